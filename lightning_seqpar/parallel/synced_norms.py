"""``Trainer(sync_batchnorm=True)``: the batch norms of a model take their statistics over the data-parallel replicas."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.nn.batch_norm import make_synced
from lightning_seqpar.parallel.compiled_blocks import is_compiled
from lightning_seqpar.parallel.module_changes import ModuleChange, ModuleSnapshot, changes_since
from lightning_seqpar.topology.process_groups import ParallelGroups


def sync_batch_norms(model: nn.Module, groups: ParallelGroups, *, every: bool) -> list[ModuleChange]:
    """Let the batch norms of a model take the statistics of all replicas' batches; raises ValueError if one of them can't."""
    over_replicas = every and groups.size("dp") > 1
    chosen: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            if module.process_group is None:  # one of the user's own, over all ranks
                chosen[name] = module
        elif isinstance(module, BatchNorm) and over_replicas:
            chosen[name] = module
    compiled = [name for name, module in model.named_modules() if is_compiled(module)]
    for name in chosen:
        for block in compiled:
            if not block or inside(name, block):
                raise ValueError(
                    f"{name}: sync_batchnorm=True, and this batch norm lies in {block or 'the model'}, which torch.compile "
                    "compiles: its statistics would be those of one replica's batch. Leave that module uncompiled "
                    "(compile=False), or use sync_batchnorm=False"
                )
    before = [ModuleSnapshot(module) for module in chosen.values()]
    try:
        for name, module in chosen.items():
            make_synced(module, name, groups["dp"])
    except ValueError:
        for change in changes_since(before):
            change.undo()
        raise
    return changes_since(before)
