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
        CheckpointConfig as CheckpointConfig,
    )
    from lightning_seqpar.public import (
        Description as Description,
    )
    from lightning_seqpar.public import (
        ModelLayout as ModelLayout,
    )
    from lightning_seqpar.public import (
        ParallelConfig as ParallelConfig,
    )
    from lightning_seqpar.public import (
        ParallelGroups as ParallelGroups,
    )
    from lightning_seqpar.public import (
        ParamLayout as ParamLayout,
    )
    from lightning_seqpar.public import (
        PlanSpec as PlanSpec,
    )
    from lightning_seqpar.public import (
        ProcessTopology as ProcessTopology,
    )
    from lightning_seqpar.public import (
        SeqParallelMonitor as SeqParallelMonitor,
    )
    from lightning_seqpar.public import (
        SeqParallelStrategy as SeqParallelStrategy,
    )
    from lightning_seqpar.public import (
        ShardingPlan as ShardingPlan,
    )
    from lightning_seqpar.public import (
        Verification as Verification,
    )
    from lightning_seqpar.public import (
        describe as describe,
    )
    from lightning_seqpar.public import (
        grad_norm as grad_norm,
    )
    from lightning_seqpar.public import (
        summoned as summoned,
    )
    from lightning_seqpar.public import (
        unshard as unshard,
    )
    from lightning_seqpar.public import (
        verify_parity as verify_parity,
    )
    from lightning_seqpar.public import (
        weights_from as weights_from,
    )
else:

    def __getattr__(name: str) -> Any:
        """What this package shows, loaded when it is asked for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lightning_seqpar import public

        return getattr(public, name)
