"""Dense against sharded: the public names of :mod:`lightning_seqpar.verify.parity`."""

from lightning_seqpar.verify.parity import *  # noqa: F403
