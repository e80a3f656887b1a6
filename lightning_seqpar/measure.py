"""What a step keeps and what it sends: the public names of :mod:`lightning_seqpar.distributed.counters`."""

from lightning_seqpar.distributed.counters import *  # noqa: F403
