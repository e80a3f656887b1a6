"""Context parallelism: sequences of which each rank of the cp axis holds a part, through attention, head and loss.

:mod:`~lightning_seqpar.context.chunks` says which positions a rank holds, :mod:`~lightning_seqpar.context.exchange` moves them between
ranks, and :mod:`~lightning_seqpar.context.seq_part` is the tensor that the user's code sees.
"""

# These say what torch's functions do with parts of sequences, from their import on.
from lightning_seqpar.context import attention, loss  # noqa: F401
