"""Plan + model + groups → the model, swapped in place, and its layouts; and the way back."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.activations.norm_recompute import is_norm, make_recomputing
from lightning_seqpar.distributed.collectives import all_gather
from lightning_seqpar.distributed.rng import Drawn
from lightning_seqpar.layout.adapters import BASE
from lightning_seqpar.layout.attribute_override import read_attribute, write_attribute
from lightning_seqpar.layout.module_names import Argument, inside
from lightning_seqpar.layout.param_layout import ModelLayout, ParamLayout, Reason
from lightning_seqpar.nn.attention import ParallelMultiheadAttention, ParallelTransformerEncoder
from lightning_seqpar.nn.linear import ColumnParallelLinear, RowParallelLinear, set_data, shrink
from lightning_seqpar.nn.vocab import VocabParallelEmbedding, VocabParallelHead
from lightning_seqpar.parallel.module_changes import ModuleChange, ModuleSnapshot, changes_since
from lightning_seqpar.parallel.resolve import ResolvedPlan, Stack
from lightning_seqpar.parallel.unsharded_view import as_written
from lightning_seqpar.plan.rules import ColumnRule, CopyRule, GatherRule, ReplaceRule, RowRule, Rule, SetRule, WholeRule
from lightning_seqpar.plan.sharding_plan import Match, ShardingPlan
from lightning_seqpar.region.hooks import (
    begin_sum,
    close_call,
    close_gather,
    draw_alike,
    end_sum,
    enter_at_exit,
    enter_block,
    exit_region,
    gather_arguments,
    leave_block,
    make_shards,
    make_whole,
    narrow,
    note_shards,
    reduce_output,
    require_shard,
    return_whole,
    slice_arguments,
    switch_streams,
    widen,
)
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.topology.process_groups import ParallelGroups

_RECORD = "_seqpar_record"
_PART = "_seqpar_part"


@dataclass
class ShardedModel:
    """What parallelisation did to a model; found again with :func:`record_of`.

    Attributes:
        layout: every parameter's layout.
        groups: the process groups.
        regions: the sequence regions, one per stack of blocks.
        doubtful: partial parameters whose class the module tree alone does not prove; checked when training runs.
        changes: what became of its modules, to take it back.
        restore: gives properties of modules their values back: what they store elsewhere no comparison of the module shows.
        choices: ``(module, style, who decided)`` for each planned module, in order.
        buffers: layouts of the buffers that are cut.
        on_shards: parameters whose gradient is partial because they are read inside a sequence region.
        is_copy: the model is a copy that no trainer trains.
    """

    model: nn.Module
    layout: ModelLayout
    groups: ParallelGroups
    regions: list[SequenceRegion]
    sp: bool
    doubtful: frozenset[str]
    choices: list[tuple[str, str, str]]
    buffers: dict[str, ParamLayout] = field(default_factory=dict)
    hooks: list[RemovableHandle] = field(default_factory=list)
    reading: bool = False
    strategy: Callable[[], Any] = lambda: None
    made_by: object = None
    is_copy: bool = False
    on_shards: frozenset[str] = frozenset()
    versions: dict[str, int] = field(default_factory=dict)
    changes: list[ModuleChange] = field(default_factory=list)
    restore: list[Callable[[], None]] = field(default_factory=list)

    def note_versions(self) -> None:
        """The shards are as they should be now."""
        self.versions = {
            name: self.layout.parameter(name)._version for name, item in self.layout.items() if item.is_sharded
        }

    def check_versions(self) -> None:
        """Nobody may have initialised shards by himself: every rank would have given its part the same numbers.

        Raises:
            ValueError: naming a parameter that was changed.
        """
        for name, version in self.versions.items():
            if self.layout.parameter(name)._version != version:
                raise ValueError(
                    f"{name}: changed in place after the model was sharded and before training; initialise weights in "
                    "__init__ or configure_model, while they are whole"
                )

    def as_written(self) -> AbstractContextManager[None]:
        """The model looks like the user's own, for code that reads its classes and shapes and runs nothing."""
        seen = [change for change in self.changes if change.own is not change.other or change.counts]
        return as_written(seen, self.layout)

    def on_shard(self, name: str) -> bool:
        """Whether the module stands inside blocks whose activations are shards."""
        return any(region.sp and any(inside(name, one) for one in region.blocks) for region in self.regions)

    def equal_buffers(self) -> list[tuple[str, Tensor]]:
        """Buffers that every rank must hold alike: all but the cut ones and those of modules that work on local features."""
        local = {name for name, style, _ in self.choices if style in ("gather", "copy", "replace")}
        return [
            (name, buffer)
            for name, buffer in self.model.named_buffers()
            if name not in self.buffers
            and not any(inside(name.rpartition(".")[0], one) for one in local)
            and buffer.numel()
        ]

    def reset_calls(self) -> None:
        """A new step begins: forget what aborted calls left."""
        for region in self.regions:
            region.reset()

    def is_inside(self, name: str) -> bool:
        """Whether the module of that name works on shards."""
        return any(item.is_sharded or item.is_partial for key, item in self.layout.items() if inside(key, name))

    def added_inside(self) -> list[nn.Parameter]:
        """Parameters that came after the model was sharded, inside modules that it had then."""
        names = self.layout.added(self.model)
        paths = {name: name.split(".") for name in names}
        return [
            self.model.get_parameter(name)
            for name, path in paths.items()
            if any(self.is_inside(".".join(path[:at])) for at in range(1, len(path)))
        ]

    def check_draw(self, drawn: Drawn) -> None:
        """A random draw of a forward must fit the stream that it comes from."""
        for region in self.regions:
            region.check_draw(drawn)

    def drawn(self) -> tuple[tuple[bytes, ...], ...]:
        """Which draws this step made from the ranks' own streams, as far as their ends tell."""
        return tuple(tuple(region.streams.drawn) for region in self.regions)

    def check_closed(self, out: Any = None) -> None:
        """A step ended with ``out``: every region must have been left, and no shard given away."""
        for region in self.regions:
            region.check_closed()
            region.sharded_outputs.check_none(tree_leaves(out), f"the sequence region of {region.name}")

    @contextmanager
    def allow_state_dict(self) -> Iterator[None]:
        """Let ``state_dict`` answer with local tensors, for those who know the layout."""
        self.reading = True
        try:
            yield
        finally:
            self.reading = False


def record_of(model: nn.Module) -> ShardedModel | None:
    """The record of a model that is parallelised now; none for any other."""
    record = model.__dict__.get(_RECORD)
    return record if isinstance(record, ShardedModel) and record.model is model else None


class _Swap(ResolvedPlan):
    """One parallelisation: what was read and checked is carried out, on the process groups."""

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[ShardingPlan],
        groups: ParallelGroups,
        sp: bool,
        regather: bool | Literal["auto"],
        loss_chunk: int | None,
    ) -> None:
        super().__init__(model, plans, groups.size("tp"), sp, loss_chunk)
        self.groups, self.rank = groups, groups.rank("tp")
        self.regions = {stack.blocks[0]: self._region(stack, regather) for stack in self.stacks}

    def _region(self, stack: Stack, regather: bool | Literal["auto"]) -> SequenceRegion:
        region = SequenceRegion(self.groups["tp"], stack.dim, sp=stack.sp, name=stack.shown, regather=regather)
        region.blocks = tuple(stack.blocks)
        return region

    def region_of(self, name: str) -> SequenceRegion:
        """The region whose blocks hold the module."""
        return self.regions[self.stack_of(name).blocks[0]]

    def apply(self) -> ShardedModel:
        """Change the model; nothing was changed before this."""
        names = [name for name, _ in self.model.named_parameters()]
        facts = {name: self.layout_of(name) for name in names}
        layouts = {name: layout for name, (layout, _) in facts.items()}
        doubtful = frozenset(name for name, (_, doubt) in facts.items() if doubt)
        keepers = self._keepers()
        before = [ModuleSnapshot(module) for module in dict.fromkeys(self.modules.values())]
        for name, match in self.linear.items():
            self._swap(name, match.rule)
        restore = [setter for match in self.sets for setter in self._property_setters(match)]
        for match in self.sets:
            self._set(match)
        self._swap_vocabs()
        for name, region in keepers.items():
            make_recomputing(self.modules[name], region.policy.remakes_between_blocks)
        choices = [(match.name, match.rule.style, match.source) for match in self.matches]
        record = ShardedModel(
            self.model,
            ModelLayout(self.model, layouts),
            self.groups,
            list(self.regions.values()),
            self.sp,
            doubtful,
            choices,
        )
        record.on_shards = frozenset(
            n for n, item in layouts.items() if item.is_partial and self.sp_at(n.rpartition(".")[0])
        )
        record.buffers = dict(self._slice_tensors())
        record.hooks = [*self._hook_regions(), *self._hook_gathers(), *self._hook_others()]
        record.hooks += [*self._hook_shard_readers(layouts), *self._hook_givers()]
        record.hooks += [module.register_state_dict_pre_hook(_guard(record)) for module in self._holders(record)]
        for name in dict.fromkeys(name.rpartition(".")[0] for name, item in layouts.items() if item.is_sharded):
            self.modules[name].__dict__[_PART] = name
        record.changes, record.restore = changes_since(before), restore
        self.model.__dict__[_RECORD] = record
        return record

    def _keepers(self) -> dict[str, SequenceRegion]:
        """Norms and dropouts of the regions: what they keep for the backward can be less."""
        found: dict[str, SequenceRegion] = {}
        for name, module in self.modules.items():
            if self.canonical[name] != name or not (is_norm(module) or type(module) is nn.Dropout):
                continue
            for stack in self.stacks:
                if stack.covers(name) or any(inside(name, out) for out in stack.exits):
                    found.setdefault(name, self.regions[stack.blocks[0]])
        return found

    def _swap(self, name: str, rule: Rule) -> None:
        module = self.modules[name]
        if name in self.encoders:
            assert isinstance(module, nn.TransformerEncoder)
            stack = self.stack_owned_by(name)
            assert stack is not None
            ParallelTransformerEncoder.adopt(module, self.regions[stack.blocks[0]])
            return
        region = self.region_of(name)
        if isinstance(rule, ReplaceRule):
            if not isinstance(module, ParallelMultiheadAttention):
                assert isinstance(module, nn.MultiheadAttention)
                ParallelMultiheadAttention.adopt(module, region, name)
            return
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            return  # the same module under a second name
        if isinstance(rule, ColumnRule):
            column = ColumnParallelLinear.adopt(module, self.shards[name], region, name, self.kinds[name])
            column.recomputes_elementwise = True
            column.gathers_input = name in self.gathers and name not in self.copies
        else:
            row = RowParallelLinear.adopt(module, self.shards[name], region, name, self.kinds[name])
            row.leaves_partial = self.reduced_at(name) is not None

    def _slice_tensors(self) -> Iterator[tuple[str, ParamLayout]]:
        """Cut what has a head dim of its own; the layouts of the buffers among it."""
        for name in self.raw:
            shrink(self._tensor(name), self.shards[name], self.rank)
        shards = {name: self.sliced_shard(name) for name in self.sliced_tensors}
        for name, shard in shards.items():
            assert shard is not None
            tensor, (module, _, leaf) = self._tensor(name), name.rpartition(".")
            if isinstance(tensor, nn.Parameter):
                shrink(tensor, shard, self.rank)
            else:
                layout = ParamLayout(name, tuple(tensor.shape), shard, reason=Reason.LOCAL_HEADS)
                setattr(self.modules[module], leaf, shard.take(tensor, self.rank))
                yield name, layout

    def _swap_vocabs(self) -> None:
        cut: set[int] = set()
        shards = {name: self.vocab_shard(name) for name in self.vocabs}
        for name, shard in shards.items():
            module = self.modules[name]
            assert isinstance(module, nn.Embedding | nn.Linear)
            first = id(module.weight) not in cut
            cut.add(id(module.weight))
            if isinstance(module, nn.Embedding):
                VocabParallelEmbedding.adopt(module, shard, self.groups["tp"], self.rank, cut=first)
            else:
                VocabParallelHead.adopt(
                    module, shard, self.groups["tp"], self.rank, cut=first, loss_chunk=self.loss_chunk
                )

    def _property_setters(self, match: Match) -> Iterator[Callable[[], None]]:
        """For each property that a ``set`` rule writes to: what gives it the value that it has now."""
        rule, module = match.rule, self.modules[match.name]
        assert isinstance(rule, SetRule)
        for attribute in dict.fromkeys((*rule.divide, *rule.values, *rule.ratio)):
            first = attribute.partition(".")[0]
            if isinstance(getattr(type(module), first, None), property):
                yield functools.partial(setattr, module, first, getattr(module, first))

    def _set(self, match: Match) -> None:
        rule, module = match.rule, self.modules[match.name]
        assert isinstance(rule, SetRule)
        ratios = {attribute: self.local_ratio(match, attribute) for attribute in rule.ratio}  # of the whole counts
        for attribute in rule.divide:
            write_attribute(module, attribute, read_attribute(module, attribute) // self.size)
        for attribute, value in rule.values.items():
            write_attribute(module, attribute, value)
        for attribute, value in ratios.items():
            write_attribute(module, attribute, value)

    def _hook_regions(self) -> Iterator[RemovableHandle]:
        for stack in self.stacks:
            region = self.regions[stack.blocks[0]]
            owner = self.modules[stack.owner]
            yield owner.register_forward_pre_hook(_open_call(region, self.model), prepend=True)
            exits = stack.exits or stack.blocks[-1:]
            for name in exits:  # before the hooks that close what the exit needs
                if name not in stack.blocks and name != stack.owner:
                    yield self.modules[name].register_forward_pre_hook(enter_at_exit(region, name))
                yield self.modules[name].register_forward_hook(exit_region(region, name, at_owner=name == stack.owner))
            for name in stack.blocks:
                block = self.modules[name]
                yield block.register_forward_pre_hook(enter_block(region, name, stack.arg), with_kwargs=True)
                yield block.register_forward_hook(leave_block(region, name), always_call=True)
            # The owner's frame closes last, behind an exit at the owner itself.
            yield owner.register_forward_hook(close_call(region, at_block=exits[-1] in stack.blocks), always_call=True)

    def _hook_gathers(self) -> Iterator[RemovableHandle]:
        blocks = {name for stack in self.stacks for name in stack.blocks}
        for name in dict.fromkeys((*self.gathers, *self.copies)):
            gathered, copied = (self._args(found, name) for found in (self.gathers, self.copies))
            if not copied and isinstance(getattr(self.linear.get(name), "rule", None), ColumnRule):
                continue  # the column gathers itself
            module, region = self.modules[name], self.region_of(name)
            rule = self.gathers[name].rule if name in self.gathers else None
            narrow_input = isinstance(rule, GatherRule) and rule.local_width
            rows = sum(isinstance(m.rule, RowRule) and inside(n, name) for n, m in self.linear.items())
            hook = gather_arguments(region, name, gathered, copied, local_width=narrow_input, rows=rows)
            yield module.register_forward_pre_hook(hook, with_kwargs=True)
            if name in self.reduces:  # before the hook that closes what was gathered
                yield from self._hook_reduce(name)
            closing = close_gather(region, name, is_block=name in blocks, heads=self._heads(name))
            yield module.register_forward_hook(closing, always_call=True)

    def _hook_reduce(self, name: str) -> Iterator[RemovableHandle]:
        module, region = self.modules[name], self.region_of(name)
        held = {key: self.model.get_parameter(key) for key in (*self.raw, *self.once) if inside(key, name)}
        rows = [key for key in held if key in self.raw and isinstance(self.raw[key].rule, RowRule)]
        once = [key for key in held if key in self.once]

        def holders(names: Sequence[str]) -> list[tuple[nn.Module, str]]:
            return [(self.modules[key.rpartition(".")[0]], key.rpartition(".")[2]) for key in names]

        raw = any(key.rpartition(".")[0] == name for key in self.raw)
        columns = [n for n, m in self.linear.items() if isinstance(m.rule, ColumnRule) and inside(n, name)]
        widths = frozenset(self.shards[n].local_length(self.rank) for n in columns)
        begin = begin_sum(region, holders(once), holders(rows), widths, raw=raw)
        yield module.register_forward_pre_hook(begin)
        reducing = reduce_output(region, name, [held[key] for key in rows], [held[key] for key in once])
        yield module.register_forward_hook(reducing)
        yield module.register_forward_hook(end_sum(region, holders([*once, *rows]), raw=raw), always_call=True)

    @staticmethod
    def _args(found: Mapping[str, Match], name: str) -> tuple[Argument, ...]:
        rule = found[name].rule if name in found else None
        return rule.args if isinstance(rule, GatherRule | CopyRule | WholeRule) else ()

    def _hook_others(self) -> Iterator[RemovableHandle]:
        """Modules that are computed whole, norms over the full width, arguments with a head dim, sums of parts."""
        for name in self.reduces:
            if name not in self.gathers and name not in self.copies:
                yield from self._hook_reduce(name)
        for name in self.wholes:
            module, region = self.modules[name], self.region_of(name)
            args = self._args(self.wholes, name)
            yield module.register_forward_pre_hook(make_whole(region, name, args), with_kwargs=True)
            yield module.register_forward_hook(make_shards(region, name))
        for name in self.wide:
            module, region = self.modules[name], self.region_of(name)
            yield module.register_forward_pre_hook(widen(region, name))
            yield module.register_forward_hook(narrow(region, name))
        yield from self._hook_adapters()
        for name, module in self.modules.items():
            stochastic = type(module).__name__.lower().endswith(("droppath", "stochasticdepth"))
            if (stochastic or isinstance(module, _DropoutNd)) and any(stack.covers(name) for stack in self.stacks):
                before, behind = draw_alike(self.region_of(name), always=stochastic)
                yield module.register_forward_pre_hook(before)
                yield module.register_forward_hook(behind, always_call=True)
        for name, rule in self.sliced_args.items():
            module, region = self.modules[name], self.region_of(name)
            hook = slice_arguments(region, name, rule.args or (), rule.dim)
            yield module.register_forward_pre_hook(hook, with_kwargs=True)

    def _hook_adapters(self) -> Iterator[RemovableHandle]:
        """What an adapter drops out of its input: beside a column all ranks alike, beside a row each of its own features."""
        for name, match in self.linear.items():
            around, _, leaf = name.rpartition(".")
            dropout = self.modules.get(f"{around}.lora_dropout")
            if leaf != BASE or dropout is None:
                continue
            region = self.region_of(name)
            alike = isinstance(match.rule, ColumnRule)
            if not alike and region.sp:
                continue  # inside a block of shards all draws are the rank's own
            for module in dropout.children():
                yield module.register_forward_pre_hook(switch_streams(region, "pause" if alike else "begin"))
                yield module.register_forward_hook(switch_streams(region, "resume" if alike else "end"))

    def _hook_shard_readers(self, layouts: dict[str, ParamLayout]) -> Iterator[RemovableHandle]:
        """Modules whose parameters see shards must not be called where activations are whole."""
        if not self.sp:
            return
        readers = {
            name.rpartition(".")[0]
            for name, layout in layouts.items()
            if layout.is_partial and layout.reason is Reason.SEES_SHARDS
        }
        for name in sorted(readers):
            for stack in self.stacks:
                if stack.covers(name) or any(inside(name, out) for out in stack.exits):
                    if name not in stack.blocks:
                        region = self.regions[stack.blocks[0]]
                        yield self.modules[name].register_forward_pre_hook(require_shard(region, name))
                        yield self.modules[name].register_forward_hook(note_shards(region, name))
                    break

    def _hook_givers(self) -> Iterator[RemovableHandle]:
        """Modules around the blocks: what they return of the inside must be whole."""
        around: dict[int, list[SequenceRegion]] = defaultdict(list)
        for stack in self.stacks:
            path = stack.owner.split(".") if stack.owner else []
            for at in range(len(path) + 1):
                module = self.modules[".".join(path[:at])]
                around[id(module)].append(self.regions[stack.blocks[0]])
        for module in {id(m): m for m in self.modules.values() if id(m) in around}.values():
            yield module.register_forward_hook(return_whole(around[id(module)]))

    def _heads(self, name: str) -> int | None:
        """Of how many query heads a gathering module has a part: the units of its first column; none if it has no column."""
        for column, match in self.linear.items():
            if inside(column, name) and isinstance(match.rule, ColumnRule):
                return self.units[column]
        return None

    def _holders(self, record: ShardedModel) -> list[nn.Module]:
        """Modules that hold a sharded parameter, at any depth."""
        sharded = [name for name, layout in record.layout.items() if layout.is_sharded]
        found = [module for name, module in self.modules.items() if any(inside(p, name) for p in sharded)]
        return list(dict.fromkeys(found))


def _open_call(region: SequenceRegion, model: nn.Module) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        trainer = getattr(model, "_trainer", None)
        record = record_of(model)
        if (
            trainer is not None
            and record is not None
            and not record.is_copy
            and trainer.training
            and trainer.strategy is not record.strategy()
        ):
            raise RuntimeError(
                f"the model is still sharded by an earlier strategy, and {type(trainer.strategy).__name__} would train "
                "the shards as if they were the model; call lightning_seqpar.unshard(model) on all ranks first"
            )
        region.open_frame()

    return hook


def _guard(record: ShardedModel) -> Callable[..., None]:
    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not record.reading:
            raise RuntimeError(
                "state_dict() of a parallelised model would return shards, which must never pass for the model. Use "
                "trainer.save_checkpoint(path), which writes the whole model, or lightning_seqpar.unshard(model) first "
                "(both on all ranks)"
            )

    return hook


def refuse_copies(record: ShardedModel) -> None:
    """What the model holds must not be a copy of one of its shards, which would pass for the whole.

    Raises:
        RuntimeError: naming the copy.
    """
    for name, module in record.model.named_modules():
        if _PART in module.__dict__ and any(record.layout.of(p) is None for p in module.parameters(recurse=False)):
            raise RuntimeError(
                f"{name} is a copy of {module.__dict__[_PART]}, made while it was sharded: it holds this rank's part, which would "
                "pass for the whole. Make copies (an average of weights, a reference) in __init__ or configure_model, where they "
                "are sharded like any model, or keep them out of the module"
            )


def refuse_compiled(model: nn.Module, planned: Iterable[str]) -> None:
    """What torch.compile made of ``planned`` modules, or of modules in or around them, knows nothing of shards.

    Raises:
        ValueError: naming the module.
    """
    names = list(planned)
    for name, module in model.named_modules():
        is_compiled = module._compiled_call_impl is not None or "_orig_mod" in module._modules
        if is_compiled and any(not name or inside(one, name) or inside(name, one) for one in names):
            raise ValueError(
                f"{name or 'the model'} was compiled (torch.compile, or the module's own compile()), and a compiled graph knows "
                "nothing of shards. With tp > 1 leave torch.compile away; tp=1 runs it"
            )


def parallelize(
    model: nn.Module,
    plans: Sequence[ShardingPlan],
    groups: ParallelGroups,
    *,
    sp: bool = True,
    regather: bool | Literal["auto"] = "auto",
    loss_chunk: int | None = None,
) -> ShardedModel:
    """Shard ``model`` in place by ``plans`` over the axis ``tp``.

    Every rank must hold the same whole model. Modules and parameters stay the same objects; shapes shrink.

    Raises:
        ValueError: for a plan that can't be carried out right; the model is untouched then.
    """
    if record_of(model) is not None:
        raise ValueError("the model is parallelised already; call unshard(model) first")
    swap = _Swap(model, plans, groups, sp, regather, loss_chunk)
    refuse_compiled(model, [match.name for match in swap.matches])
    return swap.apply()


def whole_tensor(local: Tensor, layout: ParamLayout, groups: ParallelGroups) -> Tensor:
    """The whole of a tensor laid out as the parameter is; collective over tp."""
    if layout.shard is None:
        return local.detach().clone()
    group, sent = groups["tp"], local.detach().unsqueeze(0)
    if sent.device.type == "cpu" and dist.get_backend(group) == "nccl":
        sent = sent.to(torch.device("cuda", torch.cuda.current_device()))  # after fit the model lies on the CPU
    parts = all_gather(sent, 0, group).to(local.device)
    return layout.shard.assemble(list(parts))


def unshard(model: nn.Module) -> nn.Module:
    """Turn a parallelised model back into the plain, whole one, in place; collective over its ranks.

    Every rank then holds the whole model, on its device. A model that is not parallelised is returned as it is.
    """
    record = record_of(model)
    if record is None:
        return model
    refuse_copies(record)
    with torch.no_grad():
        for name, layout in record.layout.items():
            if layout.is_sharded:
                parameter = record.layout.parameter(name)
                set_data(parameter, whole_tensor(parameter.data, layout, record.groups))
        for name, layout in record.buffers.items():
            holder, _, leaf = name.rpartition(".")
            module = model.get_submodule(holder)
            setattr(module, leaf, whole_tensor(getattr(module, leaf), layout, record.groups))
    for hook in record.hooks:
        hook.remove()
    for change in record.changes:
        change.undo()
    for restore in record.restore:
        restore()
    del model.__dict__[_RECORD]
    return model
