"""``vocab``: an embedding or a head sharded by vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import nn

from lightning_seqpar.distributed.meeting import Meeting
from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.logits_storage import VocabPart
from lightning_seqpar.nn.vocab import VocabParallelEmbedding, VocabParallelHead, unfit_forward
from lightning_seqpar.styles.style import Application, PlannedModel, Rule


def unfit_for_vocab(module: nn.Module) -> str | None:
    """Why a module can't be sharded by vocabulary, in words; None if it can."""
    if not isinstance(module, nn.Embedding | nn.Linear):
        return f"'vocab' takes an nn.Embedding or an nn.Linear, and this is a {type(module).__name__}"
    weight = module._parameters.get("weight")
    if weight is None or not weight.is_floating_point():
        return f"the weight of this {type(module).__name__} is no floating-point parameter of its own"
    if isinstance(module, nn.Embedding):
        return VocabParallelEmbedding.unfit(module)
    return unfit_forward(module, nn.Linear)


class VocabRule(Rule):
    """An embedding or a head outside the blocks, sharded by vocabulary; tied ones together."""

    style: Literal["vocab"] = "vocab"

    def check(self, name: str, plan: PlannedModel) -> None:
        """It is an embedding or a linear, and runs outside the blocks, where activations are whole."""
        if any(stack.covers(name) for stack in plan.stacks):
            raise ValueError(f"{name}: 'vocab' takes an embedding or a head outside the blocks; use column and row inside")
        if (unfit := unfit_for_vocab(plan.modules[name])) is not None:
            raise ValueError(f"{name}: {unfit}; leave it whole")
        if plan.stack_reaching(name) is not None:
            raise ValueError(
                f"{name}: 'vocab' takes an embedding or a head that runs where activations are whole, and the region of "
                "activations on shards ends behind this one; end it earlier ({pattern: ..., style: exit}), or leave it whole"
            )
        plan.shards[name] = Shard.by_vocabulary(plan.tensor(f"{name}.weight").shape[0], plan.size)

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """Weight and bias are cut by vocabulary."""
        if parameter not in (f"{name}.weight", f"{name}.bias"):
            return None
        return plan.make_layout(parameter, Reason.VOCAB, shard=plan.shards[name])

    def apply(self, name: str, application: Application) -> None:
        """The module becomes the parallel class; of two that share a weight, the first cuts it."""
        module, shard = application.module(name), application.plan.shards[name]
        assert isinstance(module, nn.Embedding | nn.Linear)
        first = module.weight.shape[0] == shard.length
        part = VocabPart(shard, application.group, application.rank, application.plan.loss_chunk)
        if isinstance(module, nn.Embedding):
            VocabParallelEmbedding.adopt(module, part, cut=first)
        else:
            part = replace(part, meeting=Meeting(application.group))
            VocabParallelHead.adopt(module, part, cut=first)
