"""``vocab``: an embedding or a head sharded by vocabulary."""

from __future__ import annotations

from typing import Literal

from torch import nn

from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.vocab import VocabParallelEmbedding, VocabParallelHead
from lightning_seqpar.styles.style import Application, PlannedModel, Rule


class VocabRule(Rule):
    """An embedding or a head outside the blocks, sharded by vocabulary; tied ones together."""

    style: Literal["vocab"] = "vocab"

    def check(self, name: str, plan: PlannedModel) -> None:
        """It is an embedding or a linear, and lies outside the blocks."""
        module = plan.modules[name]
        if any(stack.covers(name) for stack in plan.stacks):
            raise ValueError(
                f"{name}: 'vocab' takes an embedding or a head outside the blocks; use column and row inside"
            )
        if isinstance(module, nn.Embedding):
            VocabParallelEmbedding.check(module, name)
        elif plan.kind_of(name) != "out_in":
            raise ValueError(
                f"{name}: 'vocab' takes an nn.Embedding or an nn.Linear, and this is a {type(module).__name__}; leave it whole"
            )
        plan.shards[name] = Shard.by_vocabulary(plan.tensor(f"{name}.weight").shape[0], plan.size)

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """Weight and bias are cut by vocabulary."""
        if parameter.rpartition(".")[0] != name:
            return None
        return plan.make_layout(parameter, Reason.VOCAB, shard=plan.shards[name], free=True)

    def apply(self, name: str, application: Application) -> None:
        """The module becomes the parallel class; of two that share a weight, the first cuts it."""
        module, shard = application.module(name), application.plan.shards[name]
        assert isinstance(module, nn.Embedding | nn.Linear)
        first = module.weight.shape[0] == shard.length
        if isinstance(module, nn.Embedding):
            VocabParallelEmbedding.adopt(module, shard, application.group, application.rank, cut=first)
        else:
            chunk = application.plan.loss_chunk
            VocabParallelHead.adopt(module, shard, application.group, application.rank, cut=first, loss_chunk=chunk)
