"""Heads whose logits are made some tokens at a time, on a model of which tp shards nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.vocab import VocabParallelHead, VocabPart
from lightning_seqpar.parallel.module_changes import ModuleChange, ModuleSnapshot, changes_since
from lightning_seqpar.parallel.sharded_model import guard_pickling
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.plan.vocabulary import find_vocabulary
from lightning_seqpar.styles.vocab import unfit_for_vocab
from lightning_seqpar.topology.process_groups import ParallelGroups

_WHY = (
    "pickling (torch.save) of a model whose head computes in chunks (loss_chunk), or of that head, would write a process group; "
    "write its state_dict(), which is the whole model's, or pickle it when training has ended"
)


def chunk_heads(
    model: nn.Module, plans: Sequence[ShardingPlan], groups: ParallelGroups, tokens: int
) -> tuple[list[str], list[ModuleChange]]:
    """Let heads over a vocabulary, and the losses of their logits, compute some tokens at a time.

    Args:
        model: the model.
        plans: which say where its blocks are.
        groups: the process groups; this rank holds the whole vocabulary.
        tokens: the field ``loss_chunk`` of the configuration.

    Returns:
        The names of the heads, and what became of them, to take it back.

    Raises:
        ValueError: if there is no such head.
    """
    found = {name: model.get_submodule(name) for name in find_vocabulary(plans, model, 1, False)}
    heads = {name: one for name, one in found.items() if isinstance(one, nn.Linear) and unfit_for_vocab(one) is None}
    if not heads:
        raise ValueError(
            f"loss_chunk={tokens} with tp=1: no head over a vocabulary is found behind the blocks, so there is nothing to make in "
            "chunks; leave loss_chunk out"
        )
    before = [ModuleSnapshot(head) for head in heads.values()]
    for head in heads.values():
        shard = Shard.by_vocabulary(head.out_features, 1)
        VocabParallelHead.adopt(head, VocabPart(shard, groups["tp"], 0, tokens), cut=False)
        guard_pickling(head, _WHY)
    return list(heads), changes_since(before)
