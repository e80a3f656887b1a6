"""Tensor + sequence parallel training for PyTorch Lightning, on a model you did not change.

What is shown here is loaded when it is asked for.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_seqpar.config import CheckpointConfig as CheckpointConfig
    from lightning_seqpar.config import ParallelConfig as ParallelConfig
    from lightning_seqpar.config import PlanSpec as PlanSpec
    from lightning_seqpar.init.meta_weights import weights_from as weights_from
    from lightning_seqpar.layout.param_layout import ModelLayout as ModelLayout
    from lightning_seqpar.layout.param_layout import ParamLayout as ParamLayout
    from lightning_seqpar.parallel.apply import unshard as unshard
    from lightning_seqpar.plan.sharding_plan import ShardingPlan as ShardingPlan
    from lightning_seqpar.sizing.search import LayoutSearch as LayoutSearch
    from lightning_seqpar.sizing.search import PredictedLayout as PredictedLayout
    from lightning_seqpar.sizing.search import fit_layout as fit_layout
    from lightning_seqpar.strategy.monitor import SeqParallelMonitor as SeqParallelMonitor
    from lightning_seqpar.strategy.strategy import SeqParallelStrategy as SeqParallelStrategy
    from lightning_seqpar.strategy.strategy import grad_norm as grad_norm
    from lightning_seqpar.strategy.strategy import summoned as summoned
    from lightning_seqpar.topology.grid import ProcessTopology as ProcessTopology
    from lightning_seqpar.topology.process_groups import ParallelGroups as ParallelGroups
    from lightning_seqpar.verify.describe import Description as Description
    from lightning_seqpar.verify.describe import describe as describe
    from lightning_seqpar.verify.trial import Verification as Verification
    from lightning_seqpar.verify.trial import verify_parity as verify_parity

_HOMES = {
    "config": ("CheckpointConfig", "ParallelConfig", "PlanSpec"),
    "init.meta_weights": ("weights_from",),
    "layout.param_layout": ("ModelLayout", "ParamLayout"),
    "parallel.apply": ("unshard",),
    "plan.sharding_plan": ("ShardingPlan",),
    "sizing.search": ("LayoutSearch", "PredictedLayout", "fit_layout"),
    "strategy.monitor": ("SeqParallelMonitor",),
    "strategy.strategy": ("SeqParallelStrategy", "grad_norm", "summoned"),
    "topology.grid": ("ProcessTopology",),
    "topology.process_groups": ("ParallelGroups",),
    "verify.describe": ("Description", "describe"),
    "verify.trial": ("Verification", "verify_parity"),
}
"""Modules, and what each shows here."""

__version__ = "0.1.0"
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def _is_command() -> bool:
    """Whether this process runs the command ``seqpar``: some of its subcommands do not need Lightning, which takes seconds."""
    return Path(sys.argv[0]).name in ("seqpar", "seqpar.exe") or (sys.argv[0] == "-m" and "lightning_seqpar" in sys.orig_argv)


if not _is_command():
    from lightning_seqpar.releases import pl, register_strategies

    register_strategies(
        pl.strategies.StrategyRegistry, "SeqParallelStrategy", lambda **given: __getattr__("SeqParallelStrategy")(**given)
    )
