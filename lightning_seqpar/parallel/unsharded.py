"""A model of which tp shards nothing: blocks that run again in the backward, MLPs in tiles, heads in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.logits_storage import VocabPart
from lightning_seqpar.nn.vocab import VocabParallelHead
from lightning_seqpar.parallel.module_changes import ModuleChange, ModuleSnapshot, changes_since
from lightning_seqpar.parallel.recompute import MLPTiles, Recompute, make_recomputed, norms, recomputed, remake_norms
from lightning_seqpar.parallel.sharded_model import guard_pickling
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.plan.vocabulary import find_vocabulary
from lightning_seqpar.styles.registry import STYLES
from lightning_seqpar.styles.style import PlannedModel
from lightning_seqpar.styles.vocab import unfit_for_vocab
from lightning_seqpar.topology.process_groups import ParallelGroups

_WHY = (
    "pickling (torch.save) of a model whose head computes in chunks (loss_chunk), or of that head, would write a process group; "
    "write its state_dict(), which is the whole model's, or pickle it when training has ended"
)


def read_plans(model: nn.Module, plans: Iterable[ShardingPlan]) -> PlannedModel:
    """The plans' rules on a model, of which at tp 1 only the names of blocks, columns and rows are read."""
    return PlannedModel(model, [match for plan in plans for match in plan.match(model)], list(STYLES), 1, False)


def change_unsharded(
    model: nn.Module,
    plans: Sequence[ShardingPlan],
    groups: ParallelGroups,
    *,
    recompute: Recompute = "none",
    tiles: MLPTiles | None = None,
    loss_chunk: int | None = None,
) -> tuple[list[str], list[ModuleChange]]:
    """Change a model of which tp shards nothing; raises ValueError before that if what is asked for is not found in it.

    Returns the names of the modules that are recomputed, and what became of all modules, to take it back.
    """
    names: list[str] = []
    tiled: list[str] = []
    heads: list[nn.Linear] = []
    remade: list[nn.Module] = []  # without columns nothing lies between them and a row
    if recompute != "none" or tiles is not None:
        plan = read_plans(model, plans)
        names = recomputed(plan, recompute)
        tiled = [] if tiles is None else tiles.find(plan)
        remade = norms(plan) if recompute in ("activations", "selective") else []
    if loss_chunk is not None:
        heads = _heads(model, plans, loss_chunk)
    modules = dict.fromkeys([*(model.get_submodule(name) for name in (*names, *tiled)), *heads, *remade])
    before = [ModuleSnapshot(module) for module in modules]
    if names:
        make_recomputed(plan, names, recompute, lambda name: None)
    remake_norms(remade)
    if tiles is not None:
        tiles.apply(plan, tiled, lambda name: None)
    for head in heads:
        part = VocabPart(Shard.by_vocabulary(head.out_features, 1), groups["tp"], 0, loss_chunk)
        VocabParallelHead.adopt(head, part, cut=False)
        guard_pickling(head, _WHY)
    return names, changes_since(before)


def _heads(model: nn.Module, plans: Sequence[ShardingPlan], loss_chunk: int) -> list[nn.Linear]:
    """The heads over a vocabulary behind the blocks; raises ValueError if there are none."""
    found = [model.get_submodule(name) for name in find_vocabulary(plans, model, 1, False)]
    heads = [one for one in found if isinstance(one, nn.Linear) and unfit_for_vocab(one) is None]
    if not heads:
        raise ValueError(
            f"loss_chunk={loss_chunk} with tp=1: no head over a vocabulary is found behind the blocks, so there is nothing to make "
            "in chunks; leave loss_chunk out"
        )
    return heads
