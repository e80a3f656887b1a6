"""Context parallelism: sequences of which each rank of the axis cp holds a part, through attention, head and loss.

A tensor that tells the shape of the whole sequence, what torch's functions do with it, and attention and losses over ranks.
May import: ``user_input`` to ``layout``.
"""

# These say what torch's functions do with parts of sequences, from their import on.
from lightning_seqpar.context import attention, flash, loss  # noqa: F401
