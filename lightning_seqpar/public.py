"""What ``import lightning_seqpar`` shows, and the names of strategies that Lightning knows once it is loaded."""

from lightning_seqpar.config import CheckpointConfig, ParallelConfig, PlanSpec
from lightning_seqpar.init.meta_weights import weights_from
from lightning_seqpar.layout.param_layout import ModelLayout, ParamLayout
from lightning_seqpar.parallel.apply import unshard
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.releases import pl
from lightning_seqpar.strategy.monitor import SeqParallelMonitor
from lightning_seqpar.strategy.strategy import SeqParallelStrategy, grad_norm, summoned
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.describe import Description, describe
from lightning_seqpar.verify.trial import Verification, verify_parity

SeqParallelStrategy.register_strategies(pl.strategies.StrategyRegistry)

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
