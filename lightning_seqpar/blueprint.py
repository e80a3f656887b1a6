"""A plan read on a model, and everything that can be checked before the model is changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_seqpar.groups import ParallelGroups
from lightning_seqpar.layers import ParallelMultiheadAttention, Shard
from lightning_seqpar.layout import ParamLayout
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


def inside(name: str, parent: str) -> bool:
    """Whether a module is another or a part of it, by name."""
    return parent == "" or name == parent or name.startswith(parent + ".")


@dataclass
class Stack:
    """One stack of blocks and what belongs to it."""

    owner: str
    blocks: list[str]
    dim: int
    arg: Argument = 0
    exits: list[str] = field(default_factory=list)

    def covers(self, name: str) -> bool:
        """Whether the module is a block or a part of one."""
        return any(inside(name, block) for block in self.blocks)


class Blueprint:
    """A plan read on a model: which region each module is in, what each parameter becomes. Changes nothing.

    Raises:
        ValueError: for a plan that can't be carried out right.
    """

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

    def _find_stacks(self) -> list[Stack]:
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
            stacks.append(Stack(owner, [name for name, _ in found], found[-1][1].dim))
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
    def _stack_of_blocks(match: Match, stacks: Sequence[Stack]) -> Stack:
        for stack in stacks:
            if match.name in stack.blocks:
                return stack
        raise ValueError(f"plan rule for {match.name!r}: 'scatter' names a block, and this is none")

    @staticmethod
    def _nearest_stack(name: str, stacks: Sequence[Stack]) -> Stack:
        def closeness(stack: Stack) -> int:
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
            if isinstance(module, _NOT_POINTWISE) and self.in_region(name):
                raise ValueError(
                    f"{name}: a {type(module).__name__} mixes positions (or needs whole features), and here each rank has a "
                    f"part of them{' (inside a gather it sees local features)' if any(inside(name, g) for g in gathered) else ''};"
                    " leave those blocks out of the plan, or set sp=False if it lies outside every gather"
                )

    def in_region(self, name: str) -> bool:
        """Whether the module runs between the first block and the exit."""
        return any(stack.covers(name) or any(inside(name, out) for out in stack.exits) for stack in self.stacks)

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
                if inside(module, name) and isinstance(m.rule, ReplaceRule) and name not in self.encoders
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
        if not self.in_region(module):
            return layout(), False
        in_gather = any(inside(module, name) for name in self.gathers)
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
