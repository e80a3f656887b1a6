"""``replace``, ``vocab``, ``set``: modules that become parallel ones in place, and attributes that change with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import nn

from lightning_seqpar.context.flex import Heads, calls_flex, rebound
from lightning_seqpar.distributed.rendezvous import Meeting
from lightning_seqpar.layout.attributes import read_attribute, write_attribute
from lightning_seqpar.layout.param_layout import ParamLayout, Reason, Shard
from lightning_seqpar.nn.attention import ParallelMultiheadAttention, ParallelTransformerEncoder
from lightning_seqpar.nn.vocab import VocabParallelEmbedding, VocabParallelHead, unfit_forward
from lightning_seqpar.nn.vocab_loss import VocabPart
from lightning_seqpar.styles.style import LINEAR, Application, PlannedModel, Rule


class ReplaceRule(Rule):
    """A module whose forward bypasses its submodules (torch's attention and encoder), replaced by an equal one."""

    style: Literal["replace"] = "replace"

    slot: ClassVar[str] = LINEAR
    holds_local_features: ClassVar[bool] = True

    def check(self, name: str, plan: PlannedModel) -> None:
        """It is one of the two classes, and its heads divide by tp."""
        module = plan.modules[name]
        if type(module) is nn.TransformerEncoder:
            if plan.stack_owned_by(name) is None:
                raise ValueError(f"{name or 'the model'}: 'replace' takes an nn.TransformerEncoder whose layers are blocks")
            return
        stack = plan.stack_of(name)
        if type(module) is not nn.MultiheadAttention:
            raise ValueError(
                f"{name}: 'replace' knows nn.MultiheadAttention, and this is a {type(module).__name__}; use column and row"
            )
        ParallelMultiheadAttention.check(module, name, sp=stack.sp, dim=stack.dim)
        if module.num_heads % plan.size:
            plan.refuse_uneven(name, module.num_heads)

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """Of an attention: projections by heads, the bias of its row as that of any row. An encoder has no layout of its own."""
        module = plan.modules[name]
        if not isinstance(module, nn.MultiheadAttention):
            return None
        width, heads = module.embed_dim, module.num_heads
        if parameter.rpartition(".")[2].startswith("in_proj"):
            shard = Shard.by_segments(0, [width] * 3, [heads] * 3, plan.size, name)
            return plan.make_layout(parameter, Reason.COLUMN_HEADS, shard=shard, free=True)
        if parameter.endswith("out_proj.weight"):
            shard = Shard.by_segments(1, [width], [heads], plan.size, name)
            return plan.make_layout(parameter, Reason.ROW_HEADS, shard=shard)
        sp = plan.sp_at(name)
        return plan.make_layout(parameter, Reason.ROW_BIAS_ON_SHARDS if sp else Reason.IDENTICAL, partial=sp)

    def apply(self, name: str, application: Application) -> None:
        """The module becomes the parallel class, with the same parameter names."""
        module = application.module(name)
        if isinstance(module, nn.TransformerEncoder):
            stack = application.plan.stack_owned_by(name)
            assert stack is not None
            ParallelTransformerEncoder.adopt(module, application.region_at(stack))
        else:
            assert isinstance(module, nn.MultiheadAttention)
            ParallelMultiheadAttention.adopt(module, application.region_of(name), name)


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


class FlexRule(Rule):
    """The module calls FlexAttention for a rank's heads, and its score and mask functions are given the whole model's head."""

    style: Literal["flex"] = "flex"

    def check(self, name: str, plan: PlannedModel) -> None:
        """It lies inside a block, and calls it by a name."""
        plan.stack_of(name)
        if not calls_flex(plan.modules[name]):
            raise ValueError(
                f"{name}: style 'flex', but {type(plan.modules[name]).__name__} does not call flex_attention by a name of its own "
                "or of its file; name the module that does"
            )

    def apply(self, name: str, application: Application) -> None:
        """The instance gets methods of its own."""
        module = application.module(name)
        module.__dict__.update(rebound(module, Heads(application.rank, application.plan.size)))

    def unfit_to_trace(self, name: str, plan: PlannedModel) -> str | None:
        """It can't be: the graph of a block would have one rank's heads in it."""
        return "FlexAttention with functions that read the head has no compiled form in a block"


class SetRule(Rule):
    """Attributes of the module instance that change under tensor parallelism."""

    style: Literal["set"] = "set"
    divide: tuple[str, ...] = ()
    """Attributes divided by tp, such as a head count. ``config.num_heads`` gives the module a view of its config, in which
    the number is divided; the config itself, which others share, stays as it is."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Attributes given a fixed value."""
    ratio: dict[str, tuple[str | int, str | int]] = Field(default_factory=dict)
    """Attributes that are a ratio of two counts: ``{num_key_value_groups: [num_heads, num_key_value_heads]}``. Where
    there are fewer kv heads than ranks, each rank has one of them."""

    accumulates: ClassVar[bool] = True

    def check(self, name: str, plan: PlannedModel) -> None:
        """The module has the attributes; those that are divided are multiples of tp, and ratios are what the counts say."""
        module = plan.modules[name]
        for attribute in (*self.divide, *self.values, *self.ratio):
            try:
                read_attribute(module, attribute)
            except AttributeError:
                raise ValueError(f"{name}: 'set' names {attribute!r}, which {type(module).__name__} does not have") from None
        for attribute in self.divide:
            value = read_attribute(module, attribute)
            if not isinstance(value, int) or value % plan.size:
                raise ValueError(f"{name}.{attribute} is {value!r} and can't be divided by tp={plan.size}")
        for attribute in self.ratio:
            self._local_ratio(attribute, name, plan)

    def _local_ratio(self, attribute: str, name: str, plan: PlannedModel) -> int:
        """What an attribute that is a ratio of two counts becomes on a rank, where the smaller count may be shared."""
        above, below = self.ratio[attribute]
        over, under = (n if isinstance(n, int) else plan.number_at(name, n) for n in (above, below))
        value = read_attribute(plan.modules[name], attribute)
        if value != over // under:
            raise ValueError(f"{name}.{attribute} is {value}, not {above} / {below} ({over} / {under})")
        return max(1, over // plan.size) // max(1, under // plan.size)

    def apply(self, name: str, application: Application) -> None:
        """The instance gets its own values."""
        module, plan = application.module(name), application.plan
        ratios = {each: self._local_ratio(each, name, plan) for each in self.ratio}  # of the whole counts
        for attribute in self.divide:
            write_attribute(module, attribute, read_attribute(module, attribute) // plan.size)
        for attribute, value in (self.values | ratios).items():
            write_attribute(module, attribute, value)
