"""What tests of parallel training call, under its public path."""

from lightning_seqpar.trial.ranks import RankFailedError, RankFailure, run_alone, run_distributed
from lightning_seqpar.trial.verify import assert_parity

__all__ = ["RankFailedError", "RankFailure", "assert_parity", "run_alone", "run_distributed"]
