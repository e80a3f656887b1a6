"""Plan + model + groups → the model, swapped in place, and its layouts; and the way back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.collectives import all_gather
from lightning_seqpar.groups import ParallelGroups
from lightning_seqpar.layers import (
    ColumnParallelLinear,
    ParallelMultiheadAttention,
    ParallelTransformerEncoder,
    RowParallelLinear,
    Shard,
    set_data,
)
from lightning_seqpar.layout import ModelLayout, ParamLayout
from lightning_seqpar.plan import (
    Argument,
    BlocksRule,
    ColumnRule,
    ExitRule,
    GatherRule,
    Match,
    ReplaceRule,
    RowRule,
    Rule,
    ScatterRule,
    SetRule,
    ShardingPlan,
)
from lightning_seqpar.region import SequenceRegion

_RECORD = "_seqpar_record"
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NOT_POINTWISE = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)


@dataclass
class _Stack:
    """One stack of blocks and what belongs to it."""

    owner: str
    blocks: list[str]
    dim: int
    arg: Argument = 0
    exits: list[str] = field(default_factory=list)

    def covers(self, name: str) -> bool:
        return any(_inside(name, block) for block in self.blocks)


@dataclass
class ShardedModel:
    """What parallelisation did to a model; found again with :func:`record_of`.

    Attributes:
        layout: every parameter's layout.
        groups: the process groups.
        regions: the sequence regions, one per stack of blocks.
        doubtful: partial parameters whose class the module tree alone does not prove; checked when training runs.
        choices: ``(module, style, who decided)`` for each planned module, in order.
    """

    model: nn.Module
    layout: ModelLayout
    groups: ParallelGroups
    regions: list[SequenceRegion]
    sp: bool
    doubtful: frozenset[str]
    choices: list[tuple[str, str, str]]
    hooks: list[RemovableHandle] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    reading: bool = False
    strategy: Callable[[], Any] = lambda: None
    versions: dict[str, int] = field(default_factory=dict)

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

    def reset_calls(self) -> None:
        """A new step begins: forget what aborted calls left."""
        for region in self.regions:
            region.reset()

    def is_inside(self, name: str) -> bool:
        """Whether the module of that name works on shards."""
        return any(item.is_sharded or item.is_partial for key, item in self.layout.items() if _inside(key, name))

    def in_region(self) -> bool:
        """Whether activations are shards, or feed sharded linears, at this moment."""
        return any(region.busy for region in self.regions)

    def check_closed(self, out: Any = None) -> None:
        """A step ended with ``out``: every region must have been left, and no shard given away."""
        for region in self.regions:
            region.check_closed()
            region.check_no_shard(tree_leaves(out))

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


def _inside(name: str, parent: str) -> bool:
    return parent == "" or name == parent or name.startswith(parent + ".")


class _Swap:
    """One parallelisation: reads and checks everything first, then changes the model."""

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[ShardingPlan],
        groups: ParallelGroups,
        sp: bool,
        regather: bool,
    ) -> None:
        self.model, self.groups, self.sp = model, groups, sp
        self.size, self.rank = groups.size("tp"), groups.rank("tp")
        self.modules = dict(model.named_modules(remove_duplicate=False))
        first: dict[int, str] = {}
        for name, module in self.modules.items():
            first.setdefault(id(module), name)
        # A module that stands under several names (a shared block) is one module: its first name counts.
        self.canonical = {name: first[id(module)] for name, module in self.modules.items()}
        matches = [match for plan in plans for match in plan.match(model) if self.canonical[match.name] == match.name]
        self.matches = matches
        self.linear = self._last(matches, (ColumnRule, RowRule, ReplaceRule))
        self.gathers = self._last(matches, (GatherRule,))
        self.sets = [match for match in matches if isinstance(match.rule, SetRule)]
        self.stacks = self._find_stacks()
        self.regions = {
            stack.owner: SequenceRegion(
                groups["tp"], stack.dim, sp=sp, name=stack.owner or "the model", regather=regather
            )
            for stack in self.stacks
        }
        self.shards: dict[str, Shard] = {}
        self.encoders = {
            name
            for name, match in self.linear.items()
            if isinstance(match.rule, ReplaceRule) and type(self.modules[name]) is nn.TransformerEncoder
        }
        self.check()

    @staticmethod
    def _last(matches: Iterable[Match], styles: tuple[type[Rule], ...]) -> dict[str, Match]:
        return {match.name: match for match in matches if isinstance(match.rule, styles)}

    # ---- reading the plan --------------------------------------------------------------------------------------

    def _find_stacks(self) -> list[_Stack]:
        by_parent: dict[str, list[tuple[str, BlocksRule]]] = defaultdict(list)
        for name, match in self._last(self.matches, (BlocksRule,)).items():
            assert isinstance(match.rule, BlocksRule)
            by_parent[name.rpartition(".")[0]].append((name, match.rule))
        if not by_parent:
            raise ValueError(
                "the plan has no 'blocks' rule: name the repeated blocks, for example "
                "{pattern: 'model.layers.*', style: blocks}"
            )
        stacks = []
        for parent, found in by_parent.items():
            owner = parent
            while isinstance(self.modules[owner], _CONTAINERS) and owner:
                owner = owner.rpartition(".")[0]
            stacks.append(_Stack(owner, [name for name, _ in found], found[-1][1].dim))
        owners = [stack.owner for stack in stacks]
        for owner in owners:
            if owners.count(owner) > 1:
                raise ValueError(
                    f"plan: {owner or 'the model'!r} runs several stacks of blocks itself "
                    f"({', '.join(s.blocks[0] for s in stacks if s.owner == owner)}, ...); a region needs a module of its own"
                )
        for match in self.matches:
            if isinstance(match.rule, ScatterRule):
                self._stack_of_blocks(match, stacks).arg = match.rule.arg
            elif isinstance(match.rule, ExitRule):
                self._nearest_stack(match.name, stacks).exits.append(match.name)
        return stacks

    @staticmethod
    def _stack_of_blocks(match: Match, stacks: Sequence[_Stack]) -> _Stack:
        for stack in stacks:
            if match.name in stack.blocks:
                return stack
        raise ValueError(f"plan rule for {match.name!r}: 'scatter' names a block, and this is none")

    @staticmethod
    def _nearest_stack(name: str, stacks: Sequence[_Stack]) -> _Stack:
        def closeness(stack: _Stack) -> int:
            ours, theirs = name.split(".") if name else [], stack.owner.split(".") if stack.owner else []
            common = 0
            while common < min(len(ours), len(theirs)) and ours[common] == theirs[common]:
                common += 1
            return 2 * common - len(theirs)

        best = max(closeness(stack) for stack in stacks)
        nearest = [stack for stack in stacks if closeness(stack) == best]
        if len(nearest) > 1:
            raise ValueError(
                f"plan: the exit {name!r} could end several regions; put each stack in a module of its own"
            )
        return nearest[0]

    def region_of(self, name: str) -> SequenceRegion:
        """The region whose blocks hold the module."""
        for stack in self.stacks:
            if stack.covers(name):
                return self.regions[stack.owner]
        raise ValueError(
            f"plan: {name!r} is planned but lies outside the blocks "
            f"({', '.join(stack.blocks[0] for stack in self.stacks)}, ...); only what the blocks hold can be sharded"
        )

    # ---- checks, before anything changes -----------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what can't be done right; plan the shards."""
        for name, match in self.linear.items():
            if name in self.encoders:
                if name not in self.regions:
                    raise ValueError(
                        f"{name or 'the model'}: 'replace' takes an nn.TransformerEncoder whose layers are blocks"
                    )
                continue
            region = self.region_of(name)
            if isinstance(match.rule, ReplaceRule):
                self._check_replace(name, region)
            else:
                self._check_linear(name, match.rule)
        for name in self.gathers:
            self.region_of(name)
        for match in self.sets:
            self._check_set(match)
        if not self.linear.keys() - self.encoders:
            raise ValueError("the plan shards nothing: give at least one 'column' and one 'row' rule, or set tp=1")
        if self.sp:
            self._check_pointwise()
        self._check_ties()

    def _check_replace(self, name: str, region: SequenceRegion) -> None:
        module = self.modules[name]
        if type(module) is not nn.MultiheadAttention:
            raise ValueError(
                f"{name}: 'replace' knows nn.MultiheadAttention, and this is a {type(module).__name__}; use column and row"
            )
        ParallelMultiheadAttention.check(module, region, name)
        Shard.by_segments(0, [module.embed_dim], [module.num_heads], self.size, name)

    def _check_linear(self, name: str, rule: Rule) -> None:
        module = self.modules[name]
        if type(module) is not nn.Linear:
            raise ValueError(
                f"{name}: style {rule.style!r} takes an nn.Linear, and this is a {type(module).__module__}."
                f"{type(module).__name__}, whose weight may mean something else; leave it whole"
            )
        if set(dict(module.named_parameters(recurse=False))) - {"weight", "bias"}:
            raise ValueError(f"{name}: its weight is made of other parameters (weight norm?); leave it whole")
        if isinstance(rule, ColumnRule):
            segments = self._segments(name, rule, module.out_features)
            self.shards[name] = Shard.by_segments(0, segments, self._units(name, rule.units, segments), self.size, name)
        elif isinstance(rule, RowRule):
            segments = [module.in_features]
            self.shards[name] = Shard.by_segments(1, segments, self._units(name, rule.units, segments), self.size, name)

    @staticmethod
    def _segments(name: str, rule: ColumnRule, features: int) -> list[int]:
        if isinstance(rule.segments, tuple) and isinstance(rule.segments[0], int):
            sizes = [int(size) for size in rule.segments]
            if sum(sizes) != features:
                raise ValueError(
                    f"{name}: segments {sizes} sum to {sum(sizes)}, the linear has {features} out-features"
                )
            return sizes
        count = rule.segments if isinstance(rule.segments, int) else len(rule.segments)
        if features % count:
            raise ValueError(
                f"{name}: {features} out-features do not divide into {count} equal segments; give their sizes"
            )
        return [features // count] * count

    def _units(self, name: str, units: int | str | None, segments: Sequence[int]) -> list[int]:
        if units is None:
            return list(segments)
        if isinstance(units, int):
            return [units] * len(segments)
        at = name
        while True:
            value = getattr(self.modules[at], units, None)
            if isinstance(value, int):
                return [value] * len(segments)
            if at == "":
                raise ValueError(f"{name}: units={units!r} is no whole-number attribute of it or of a module around it")
            at = at.rpartition(".")[0]

    def _check_set(self, match: Match) -> None:
        rule, module = match.rule, self.modules[match.name]
        assert isinstance(rule, SetRule)
        for attribute in (*rule.divide, *rule.values):
            if not hasattr(module, attribute):
                raise ValueError(
                    f"{match.name}: 'set' names {attribute!r}, which {type(module).__name__} does not have"
                )
        for attribute in rule.divide:
            value = getattr(module, attribute)
            if not isinstance(value, int) or value % self.size:
                raise ValueError(f"{match.name}.{attribute} is {value!r} and can't be divided by tp={self.size}")

    def _check_pointwise(self) -> None:
        replaced = {n for n, m in self.linear.items() if isinstance(m.rule, ReplaceRule)}
        gathered = [*self.gathers, *sorted(replaced - self.encoders)]
        for name, module in self.modules.items():
            if isinstance(module, _NOT_POINTWISE) and self._in_region(name):
                raise ValueError(
                    f"{name}: a {type(module).__name__} mixes positions (or needs whole features), and here each rank has a "
                    f"part of them{' (inside a gather it sees local features)' if any(_inside(name, g) for g in gathered) else ''};"
                    " leave those blocks out of the plan, or set sp=False if it lies outside every gather"
                )

    def _in_region(self, name: str) -> bool:
        return any(stack.covers(name) or any(_inside(name, out) for out in stack.exits) for stack in self.stacks)

    def _check_ties(self) -> None:
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            module, _, leaf = name.rpartition(".")
            canonical = ".".join(part for part in (self.canonical[module], leaf) if part)
            if canonical not in names[id(parameter)]:
                names[id(parameter)].append(canonical)
        for tied in names.values():
            facts = {self._fact(name) for name in tied}
            if len(facts) > 1 or (len(tied) > 1 and any(shard is not None for shard, _ in facts)):
                raise ValueError(
                    f"{' and '.join(tied)} are one tied parameter, used both inside and outside the sequence region or "
                    "sharded; its gradient can't be synced by one rule: leave it whole on both sides, or untie it"
                )

    # ---- layouts -----------------------------------------------------------------------------------------------

    def _fact(self, parameter: str) -> tuple[Shard | None, bool]:
        layout, _ = self.layout_of(parameter)
        return layout.shard, layout.is_partial

    def layout_of(self, parameter: str) -> tuple[ParamLayout, bool]:
        """The layout of a parameter, and whether its class is in doubt until training shows it."""
        module, _, leaf = parameter.rpartition(".")
        shape = tuple(self.model.get_parameter(parameter).shape)

        def layout(shard: Shard | None = None, partial: bool = False, reason: str = "") -> ParamLayout:
            over = frozenset({"tp"}) if partial else frozenset()
            return ParamLayout(parameter, shape, shard, over, reason or "whole activations: identical gradients")

        around = next(
            (
                name
                for name, m in self.linear.items()
                if _inside(module, name) and isinstance(m.rule, ReplaceRule) and name not in self.encoders
            ),
            None,
        )
        if around is not None:
            return self._attention_layout(parameter, around, leaf, layout), False
        match = self.linear.get(module)
        if match is not None:
            if isinstance(match.rule, ColumnRule):
                dim = self.shards[module]
                return layout(Shard(0, dim.length, dim.ranges), reason="column: out-features sharded"), False
            if leaf == "weight":
                return layout(self.shards[module], reason="row: in-features sharded"), False
            return layout(partial=self.sp, reason="row bias: added to shards" if self.sp else ""), False
        if not self._in_region(module):
            return layout(), False
        in_gather = any(_inside(module, name) for name in self.gathers)
        if self.sp:
            return layout(partial=True, reason="between gather and row" if in_gather else "sees sequence shards"), False
        return layout(partial=in_gather, reason="between copy and row" if in_gather else ""), in_gather

    def _attention_layout(
        self, parameter: str, name: str, leaf: str, layout: Callable[..., ParamLayout]
    ) -> ParamLayout:
        module = self.modules[name]
        assert isinstance(module, nn.MultiheadAttention)
        width, heads = module.embed_dim, module.num_heads
        if leaf.startswith("in_proj"):
            shard = Shard.by_segments(0, [width] * 3, [heads] * 3, self.size, name)
            return layout(shard, reason="column: heads sharded, [q|k|v]")
        if parameter.endswith("out_proj.weight"):
            return layout(Shard.by_segments(1, [width], [heads], self.size, name), reason="row: heads sharded")
        return layout(partial=self.sp, reason="row bias: added to shards" if self.sp else "")

    # ---- changing the model ------------------------------------------------------------------------------------

    def apply(self) -> ShardedModel:
        """Change the model; nothing was changed before this."""
        names = [name for name, _ in self.model.named_parameters()]
        facts = {name: self.layout_of(name) for name in names}
        layouts = {name: layout for name, (layout, _) in facts.items()}
        doubtful = frozenset(name for name, (_, doubt) in facts.items() if doubt)
        undo = list(self._snapshots())
        for name, match in self.linear.items():
            self._swap(name, match.rule)
        for match in self.sets:
            self._set(match)
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
        record.undo = undo
        record.hooks = [*self._hook_regions(), *self._hook_gathers(), *self._hook_shard_readers(layouts)]
        record.hooks += [module.register_state_dict_pre_hook(_guard(record)) for module in self._holders(record)]
        self.model.__dict__[_RECORD] = record
        return record

    def _snapshots(self) -> Iterator[Callable[[], None]]:
        """What takes each changed module back: its class and the attributes that we change, no others."""
        own = ["in_features", "out_features", "num_heads", "use_nested_tensor"]
        changed = {name: list(own) for name in self.linear}
        changed |= {
            f"{name}.out_proj": ["in_features"]
            for name, m in self.linear.items()
            if isinstance(m.rule, ReplaceRule) and name not in self.encoders
        }
        for match in self.sets:
            assert isinstance(match.rule, SetRule)
            changed.setdefault(match.name, []).extend([*match.rule.divide, *match.rule.values])
        for name, attributes in changed.items():
            yield _restorer(self.modules[name], attributes)

    def _swap(self, name: str, rule: Rule) -> None:
        module = self.modules[name]
        if name in self.encoders:
            assert isinstance(module, nn.TransformerEncoder)
            ParallelTransformerEncoder.adopt(module, self.regions[name])
            return
        region = self.region_of(name)
        if isinstance(rule, ReplaceRule):
            if not isinstance(module, ParallelMultiheadAttention):
                assert isinstance(module, nn.MultiheadAttention)
                ParallelMultiheadAttention.adopt(module, region, name)
            return
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            return  # the same module under a second name
        assert isinstance(module, nn.Linear)
        if isinstance(rule, ColumnRule):
            column = ColumnParallelLinear.adopt(module, self.shards[name], region, name)
            column.gathers_input = name in self.gathers
        else:
            RowParallelLinear.adopt(module, self.shards[name], region, name)

    def _set(self, match: Match) -> None:
        rule, module = match.rule, self.modules[match.name]
        assert isinstance(rule, SetRule)
        for attribute in rule.divide:
            setattr(module, attribute, getattr(module, attribute) // self.size)
        for attribute, value in rule.values.items():
            setattr(module, attribute, value)

    def _hook_regions(self) -> Iterator[RemovableHandle]:
        for stack in self.stacks:
            region = self.regions[stack.owner]
            owner = self.modules[stack.owner]
            yield owner.register_forward_pre_hook(_open_call(region, self.model), prepend=True)
            exits = stack.exits or stack.blocks[-1:]
            for name in exits:  # before the hooks that close what the exit needs
                yield self.modules[name].register_forward_hook(_exit(region, name))
            for name in stack.blocks:
                block = self.modules[name]
                yield block.register_forward_pre_hook(_enter(region, name, stack.arg), with_kwargs=True)
                yield block.register_forward_hook(_left_block(region, name), always_call=True)
            # The owner's frame closes last, behind an exit at the owner itself.
            yield owner.register_forward_hook(_close_call(region), always_call=True)

    def _hook_gathers(self) -> Iterator[RemovableHandle]:
        for name, match in self.gathers.items():
            if isinstance(getattr(self.linear.get(name), "rule", None), ColumnRule):
                continue  # the column gathers itself
            assert isinstance(match.rule, GatherRule)
            module, region = self.modules[name], self.region_of(name)
            yield module.register_forward_pre_hook(_gather(region, name, match.rule.args), with_kwargs=True)
            yield module.register_forward_hook(_close_gather(region, name), always_call=True)

    def _hook_shard_readers(self, layouts: dict[str, ParamLayout]) -> Iterator[RemovableHandle]:
        """Modules whose parameters see shards must not be called where activations are whole."""
        if not self.sp:
            return
        readers = {
            name.rpartition(".")[0]
            for name, layout in layouts.items()
            if layout.is_partial and layout.reason == "sees sequence shards"
        }
        for name in sorted(readers):
            for stack in self.stacks:
                if stack.covers(name) or any(_inside(name, out) for out in stack.exits):
                    if name not in stack.blocks:
                        yield self.modules[name].register_forward_pre_hook(
                            _require_shard(self.regions[stack.owner], name)
                        )
                    break

    def _holders(self, record: ShardedModel) -> list[nn.Module]:
        """Modules that hold a sharded parameter, at any depth."""
        sharded = [name for name, layout in record.layout.items() if layout.is_sharded]
        found = [module for name, module in self.modules.items() if any(_inside(p, name) for p in sharded)]
        return list(dict.fromkeys(found))


def _restorer(module: nn.Module, attributes: Iterable[str]) -> Callable[[], None]:
    kind, kept = module.__class__, {key: getattr(module, key) for key in attributes if hasattr(module, key)}

    def restore() -> None:
        if module.__class__ is not kind:
            for key in ("region", "shard", "full_name", "global_heads", "gathers_input", "packs"):
                module.__dict__.pop(key, None)
            module.__class__ = kind
        for key, value in kept.items():
            setattr(module, key, value)

    return restore


# ---- hooks -----------------------------------------------------------------------------------------------------


def _argument(name: str, arg: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Any]:
    """Where an argument stands in a call, and its value."""
    if isinstance(arg, int):
        if arg < len(args):
            return arg, args[arg]
        if arg == 0 and kwargs:
            first = next(iter(kwargs))
            return first, kwargs[first]
    elif arg in kwargs:
        return arg, kwargs[arg]
    raise ValueError(
        f"{name}: the plan names argument {arg!r}, but it was called with {len(args)} positional arguments and "
        f"keywords {sorted(kwargs)}; name the argument as the caller passes it"
    )


def _replace(
    where: int | str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(where, int):
        return (*args[:where], value, *args[where + 1 :]), kwargs
    return args, {**kwargs, where: value}


def _open_call(region: SequenceRegion, model: nn.Module) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        trainer = getattr(model, "_trainer", None)
        record = record_of(model)
        if (
            trainer is not None
            and record is not None
            and trainer.training
            and trainer.strategy is not record.strategy()
        ):
            raise RuntimeError(
                f"the model is still sharded by an earlier strategy, and {type(trainer.strategy).__name__} would train "
                "the shards as if they were the model; call lightning_seqpar.unshard(model) on all ranks first"
            )
        region.open_frame()

    return hook


def _close_call(region: SequenceRegion) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        region.close_frame(aborted=out is None)  # no output: it raised

    return hook


def _enter(region: SequenceRegion, name: str, arg: Argument) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where, x = _argument(name, arg, args, kwargs)
        if not isinstance(x, Tensor) or x.is_nested:
            raise ValueError(
                f"{name}: argument {arg!r} of the block is no (plain) tensor; name the right one by 'scatter'"
            )
        return _replace(where, region.enter(x, name), args, kwargs)

    return hook


def _left_block(region: SequenceRegion, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        if out is None:  # it raised
            region.abort()
        else:
            region.note_shard(out[0] if isinstance(out, list | tuple) and out else out)
        region.finish(name)

    return hook


def _exit(region: SequenceRegion, name: str) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return region.leave(out, name)
        if not (isinstance(out, list | tuple) and out and isinstance(out[0], Tensor)):
            raise ValueError(
                f"{name}: the region ends here, but its output is a {type(out).__name__}; end it elsewhere"
            )
        shape = out[0].shape
        for other in out[1:]:
            if region.sp and isinstance(other, Tensor) and other.shape == shape:
                raise ValueError(
                    f"{name}: two of its outputs look like shards; end the region at a module with one output"
                )
        whole = [region.leave(out[0], name), *out[1:]]
        return type(out)(whole) if not hasattr(out, "_fields") else type(out)(*whole)

    return hook


def _gather(region: SequenceRegion, name: str, wanted: Sequence[Argument]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        done: dict[int, Tensor] = {}  # one gather serves an argument that is passed twice
        for arg in wanted:
            where, x = _argument(name, arg, args, kwargs)
            if not isinstance(x, Tensor):
                raise ValueError(f"{name}: argument {arg!r} is a {type(x).__name__}; 'gather' takes tensors")
            if not done:
                region.open_gather(x, name)
            if id(x) not in done:
                done[id(x)] = region.gather(x, name)
            args, kwargs = _replace(where, done[id(x)], args, kwargs)
        return args, kwargs

    return hook


def _close_gather(region: SequenceRegion, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        first = out[0] if isinstance(out, list | tuple) and out else out
        region.close_gather(first if isinstance(first, Tensor) else None, name)
        region.finish(name)

    return hook


def _require_shard(region: SequenceRegion, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a recompute; the forward was checked
        if not region.active:
            raise ValueError(
                f"{name}: called outside the sequence region of {region.name}, where its input is whole; its gradient "
                "could not be synced by one rule. Call it only between the region's blocks, or leave it out of the plan"
            )

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


# ---- public ----------------------------------------------------------------------------------------------------


def parallelize(
    model: nn.Module,
    plans: Sequence[ShardingPlan],
    groups: ParallelGroups,
    *,
    sp: bool = True,
    regather: bool = True,
) -> ShardedModel:
    """Shard ``model`` in place by ``plans`` over the axis ``tp``.

    Every rank must hold the same whole model. Modules and parameters stay the same objects; shapes shrink.

    Raises:
        ValueError: for a plan that can't be carried out right; the model is untouched then.
    """
    if record_of(model) is not None:
        raise ValueError("the model is parallelised already; call unshard(model) first")
    return _Swap(model, plans, groups, sp, regather).apply()


def whole_tensor(local: Tensor, layout: ParamLayout, groups: ParallelGroups) -> Tensor:
    """The whole of a tensor laid out as the parameter is; collective over tp."""
    if layout.shard is None:
        return local.detach().clone()
    group, shard = groups["tp"], layout.shard
    size = groups.size("tp")
    parts = all_gather(local.detach().unsqueeze(0), 0, group)
    return shard.assemble([parts[rank] for rank in range(size)])


def unshard(model: nn.Module) -> nn.Module:
    """Turn a parallelised model back into the plain, whole one, in place; collective over its ranks.

    Every rank then holds the whole model, on its device. A model that is not parallelised is returned as it is.
    """
    record = record_of(model)
    if record is None:
        return model
    with torch.no_grad():
        for name, layout in record.layout.items():
            if layout.is_sharded:
                parameter = record.layout.parameter(name)
                set_data(parameter, whole_tensor(parameter.data, layout, record.groups))
    for hook in record.hooks:
        hook.remove()
    for restore in record.undo:
        restore()
    del model.__dict__[_RECORD]
    return model
