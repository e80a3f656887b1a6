"""What tests of parallel training call, under its public path."""

from lightning_seqpar.verify.ranks import RankFailedError, RankFailure, run_alone, run_distributed
from lightning_seqpar.verify.trial import assert_parity

__all__ = ["RankFailedError", "RankFailure", "assert_parity", "run_alone", "run_distributed"]
