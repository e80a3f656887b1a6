"""Tensor + sequence parallel training for PyTorch Lightning, on a model you did not change."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_seqpar.config import VERSION

__version__ = VERSION

__all__ = [
    "CheckpointConfig",
    "Description",
    "ModelLayout",
    "ParallelConfig",
    "ParallelGroups",
    "ParamLayout",
    "PlanSpec",
    "ProcessTopology",
    "SeqParallelMonitor",
    "SeqParallelStrategy",
    "ShardingPlan",
    "Verification",
    "describe",
    "grad_norm",
    "summoned",
    "unshard",
    "verify_parity",
    "weights_from",
]


def _is_command() -> bool:
    """Whether this process runs the command ``seqpar``: some of its subcommands need nothing of what takes seconds to load."""
    return Path(sys.argv[0]).name in ("seqpar", "seqpar.exe") or (sys.argv[0] == "-m" and "lightning_seqpar" in sys.orig_argv)


if TYPE_CHECKING or not _is_command():
    from lightning_seqpar.public import (
        CheckpointConfig,
        Description,
        ModelLayout,
        ParallelConfig,
        ParallelGroups,
        ParamLayout,
        PlanSpec,
        ProcessTopology,
        SeqParallelMonitor,
        SeqParallelStrategy,
        ShardingPlan,
        Verification,
        describe,
        grad_norm,
        summoned,
        unshard,
        verify_parity,
        weights_from,
    )
else:

    def __getattr__(name: str) -> Any:
        """What this package shows, loaded when it is asked for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lightning_seqpar import public

        return getattr(public, name)
