"""The autograd pairs of tensor and sequence parallelism: the public names of :mod:`lightning_seqpar.distributed.collectives`."""

from lightning_seqpar.distributed.collectives import *  # noqa: F403
