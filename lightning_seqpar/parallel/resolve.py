"""A plan read on a model, and everything that can be checked before the model is changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_seqpar.layout.adapters import DOWN, UP
from lightning_seqpar.layout.attribute_override import read_attribute
from lightning_seqpar.layout.linear_kind import LinearKind, features, linear_kind
from lightning_seqpar.layout.module_names import Argument, inside, match_pattern
from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.attention import ParallelMultiheadAttention
from lightning_seqpar.nn.vocab import VocabParallelEmbedding
from lightning_seqpar.plan.rules import (
    BlocksRule,
    ColumnRule,
    CopyRule,
    ExitRule,
    FullWidthRule,
    GatherRule,
    LocalHeadsRule,
    OnceRule,
    ReduceRule,
    ReplaceRule,
    RowRule,
    Rule,
    ScatterRule,
    SetRule,
    VocabRule,
    WholeRule,
)
from lightning_seqpar.plan.sharding_plan import Match, ShardingPlan

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
class Stack:
    """One stack of blocks and what belongs to it.

    Attributes:
        owner: the module that runs the blocks.
        blocks: their names, in order.
        dim: the tensor dim of the sequence.
        sp: whether activations between them are shards along the sequence.
        arg: the argument of a block that carries the activation.
        exits: modules at whose output the region ends; at the last block's where there are none.
    """

    owner: str
    blocks: list[str]
    dim: int
    sp: bool = True
    arg: Argument = 0
    exits: list[str] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """How messages call the stack's region."""
        return self.owner or "the model"

    def covers(self, name: str) -> bool:
        """Whether the module is a block or a part of one."""
        return any(inside(name, block) for block in self.blocks)


class ResolvedPlan:
    """A plan read on a model: which stack of blocks each module is in, what each parameter becomes. Changes nothing.

    It needs the size of the axis ``tp``, and no process group: a plan for 512 ranks is read on one.

    Args:
        model: the whole model.
        plans: what holds for it; later ones win.
        size: number of tensor-parallel ranks.
        sp: whether activations between blocks are shards along the sequence, where a blocks rule does not say otherwise.
        loss_chunk: tokens of which a head that is sharded by vocabulary makes logits at once.

    Raises:
        ValueError: for a plan that can't be carried out right.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[ShardingPlan],
        size: int,
        sp: bool,
        loss_chunk: int | None = None,
    ) -> None:
        self.model, self.size, self.sp, self.loss_chunk = model, size, sp, loss_chunk
        self.modules = dict(model.named_modules(remove_duplicate=False))
        first: dict[int, str] = {}
        for name, module in self.modules.items():
            first.setdefault(id(module), name)
        # A module that stands under several names (a shared block) is one module: its first name counts.
        self.canonical = {name: first[id(module)] for name, module in self.modules.items()}
        matches = [
            match
            for plan in plans
            for match in plan.match(model)
            if self.canonical.get(match.name, match.name) == match.name
        ]
        self._let_whole_win(matches)
        self.matches = matches
        of_modules = [match for match in matches if not match.of_tensor]
        self.linear = self._last(of_modules, (ColumnRule, RowRule, ReplaceRule))
        self.raw = self._last([match for match in matches if match.of_tensor], (ColumnRule, RowRule))
        self.once = self._last(matches, (OnceRule,))
        self.reduces = [*self._last(matches, (ReduceRule,)), *self._raw_rows()]
        self.gathers = self._last(matches, (GatherRule,))
        self.copies = self._last(matches, (CopyRule,))
        self.wholes = self._last(matches, (WholeRule,))
        self.vocabs = self._last(matches, (VocabRule,))
        self.wide = self._last(matches, (FullWidthRule,))
        heads = self._last(matches, (LocalHeadsRule,))
        self.sliced_args = {n: m.rule for n, m in heads.items() if isinstance(m.rule, LocalHeadsRule) and m.rule.args}
        self.sliced_tensors = {
            n: m.rule for n, m in heads.items() if isinstance(m.rule, LocalHeadsRule) and not m.rule.args
        }
        self.kinds: dict[str, LinearKind] = {}
        self.sets = [match for match in matches if isinstance(match.rule, SetRule)]
        self.stacks = self._find_stacks()
        self.shards: dict[str, Shard] = {}
        self.units: dict[str, int] = {}  # of each column: into how many its first segment is dealt out
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
            stacks.append(Stack(owner, [name for name, _ in found], found[-1][1].dim, self.sp and found[-1][1].sp))
        for match in self.matches:
            if isinstance(match.rule, ScatterRule):
                self._stack_of_blocks(match, stacks).arg = match.rule.arg
            elif isinstance(match.rule, ExitRule):
                self._stack_of_exit(match.name, match.rule, stacks).exits.append(match.name)
        return stacks

    @staticmethod
    def _stack_of_blocks(match: Match, stacks: Sequence[Stack]) -> Stack:
        for stack in stacks:
            if match.name in stack.blocks:
                return stack
        raise ValueError(f"plan rule for {match.name!r}: 'scatter' names a block, and this is none")

    def _stack_of_exit(self, name: str, rule: ExitRule, stacks: Sequence[Stack]) -> Stack:
        if rule.blocks is None:
            return self._nearest_stack(name, stacks)
        for stack in stacks:
            if any(match_pattern(rule.blocks, block) for block in stack.blocks):
                return stack
        raise ValueError(
            f"plan: the exit {name!r} names blocks={rule.blocks!r}, which no 'blocks' rule does; the stacks begin with "
            f"{', '.join(stack.blocks[0] for stack in stacks)}"
        )

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
                f"plan: the exit {name!r} could end the region of {' or '.join(stack.blocks[0] for stack in nearest)}; say "
                "which by its blocks: {pattern: ..., style: exit, blocks: 'decoder.*'}"
            )
        return nearest[0]

    def stack_of(self, name: str) -> Stack:
        """The stack whose blocks hold the module.

        Raises:
            ValueError: if the module lies outside of all blocks.
        """
        for stack in self.stacks:
            if stack.covers(name):
                return stack
        raise ValueError(
            f"plan: {name!r} is planned but lies outside the blocks "
            f"({', '.join(stack.blocks[0] for stack in self.stacks)}, ...); only what the blocks hold can be sharded"
        )

    def sp_at(self, name: str) -> bool:
        """Whether activations are shards where the module runs: inside the blocks of a region with sp, or at its end."""
        for stack in self.stacks:
            if stack.covers(name) or any(inside(name, out) for out in stack.exits):
                return stack.sp
        return False

    def stack_owned_by(self, owner: str) -> Stack | None:
        """The first stack that the module runs."""
        return next((stack for stack in self.stacks if stack.owner == owner), None)

    def _let_whole_win(self, matches: list[Match]) -> None:
        """A 'whole' undoes what earlier rules said of the module and its inside."""
        kept: list[Match] = []
        for match in matches:
            if isinstance(match.rule, WholeRule):
                kept = [
                    m for m in kept if not inside(m.name, match.name) or isinstance(m.rule, BlocksRule | ScatterRule)
                ]
            kept.append(match)
        matches[:] = kept

    # ---- checks, before anything changes -----------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what can't be done right; plan the shards."""
        for name in self.wholes:
            self._check_whole(name)
        for name, match in list(self.linear.items()):
            if name in self.encoders:
                if self.stack_owned_by(name) is None:
                    raise ValueError(
                        f"{name or 'the model'}: 'replace' takes an nn.TransformerEncoder whose layers are blocks"
                    )
                continue
            stack = self.stack_of(name)
            if isinstance(match.rule, ReplaceRule):
                self._check_replace(name, stack)
            else:
                self._check_linear(name, match.rule)
        for name in (*self.gathers, *self.copies, *self.wholes, *self.wide, *self.sliced_args, *self.sliced_tensors):
            self.stack_of(name)
        for name, match in self.raw.items():
            self._check_raw(name, match.rule)
        for name in self.reduces:
            self._check_reduce(name)
        for name in self.once:
            self._check_once(name)
        for name, rule in self.sliced_tensors.items():
            self._check_sliced(name, rule)
        for name in self.wide:
            self._check_wide(name)
        for name in self.vocabs:
            self._check_vocab(name)
        if self.loss_chunk is not None and not any(isinstance(self.modules[name], nn.Linear) for name in self.vocabs):
            raise ValueError(
                f"loss_chunk={self.loss_chunk}: no head of this plan is sharded by vocabulary, so its logits are made whole; "
                "add a rule {pattern: HEAD, style: vocab} with the head's name (and its embedding's, if they are tied), or "
                "leave loss_chunk out"
            )
        for match in self.sets:
            self._check_set(match)
        if not self.linear.keys() - self.encoders and not self.raw:
            raise ValueError("the plan shards nothing: give at least one 'column' and one 'row' rule, or set tp=1")
        if self.sp:
            self._check_pointwise()
        self._check_ties()

    def _check_replace(self, name: str, stack: Stack) -> None:
        module = self.modules[name]
        if type(module) is not nn.MultiheadAttention:
            raise ValueError(
                f"{name}: 'replace' knows nn.MultiheadAttention, and this is a {type(module).__name__}; use column and row"
            )
        ParallelMultiheadAttention.check(module, name, sp=stack.sp, dim=stack.dim)
        if module.num_heads % self.size:
            works = ", ".join(str(n) for n in range(1, module.num_heads + 1) if module.num_heads % n == 0)
            raise ValueError(
                f"{name}: {module.num_heads} units (heads) do not divide by tp={self.size}; use tp of {works}"
            )

    def _check_linear(self, name: str, rule: Rule) -> None:
        module = self.modules[name]
        kind = linear_kind(module)
        if kind is None:
            raise ValueError(
                f"{name}: style {rule.style!r} takes an nn.Linear, and this is a {type(module).__module__}."
                f"{type(module).__name__}, which is not known to compute the same (Conv1D is); leave it whole"
            )
        out, into = features(module, kind)
        self.kinds[name] = kind
        if isinstance(rule, ColumnRule):
            segments = self._segments(name, rule, out)
            units = self._units(name, rule.units, segments)
            if set(units) == {1} and isinstance(rule.units, str) and self.size > 1:
                del self.linear[name], self.kinds[name]  # one kv head for all query heads: every rank has it whole
                self.matches = [m for m in self.matches if m.name != name or not isinstance(m.rule, ColumnRule)]
                return
            self.shards[name] = Shard.by_segments(0 if kind == "out_in" else 1, segments, units, self.size, name)
            self.units[name] = units[0]
        elif isinstance(rule, RowRule):
            units = self._units(name, rule.units, [into])
            if units[0] % self.size:
                works = ", ".join(str(n) for n in range(1, units[0] + 1) if units[0] % n == 0)
                raise ValueError(
                    f"{name}: {units[0]} units (heads or features) do not divide by tp={self.size}; use tp of {works}"
                )
            self.shards[name] = Shard.by_segments(1 if kind == "out_in" else 0, [into], units, self.size, name)

    def _raw_rows(self) -> list[str]:
        """Modules that multiply a row parameter themselves: their output is a partial sum."""
        owners = [name.rpartition(".")[0] for name, match in self.raw.items() if isinstance(match.rule, RowRule)]
        return list(dict.fromkeys(owners))

    def reduced_at(self, name: str) -> str | None:
        """The module at whose end the partial sums of a row are reduced; none if at the row itself."""
        return next((owner for owner in self.reduces if inside(name, owner)), None)

    def _check_raw(self, name: str, rule: Rule) -> None:
        assert isinstance(rule, ColumnRule | RowRule)
        self.stack_of(name)
        shape, module = list(self._tensor(name).shape), name.rpartition(".")[0]
        dim = rule.dim if rule.dim is not None else -2 if isinstance(rule, ColumnRule) else -1
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"{name}: it has shape {shape} and no dim {dim}; name the {rule.style}'s dim")
        if linear_kind(self.modules[module]) is not None:
            raise ValueError(f"{name}: it is the parameter of a linear; name the linear itself, {module}")
        if not any(inside(module, around) for around in (*self.gathers, *self.copies)):
            raise ValueError(
                f"{name}: {module} multiplies this {rule.style} itself, where nothing was gathered for it; add a rule "
                f"{{pattern: {module}, style: gather}}, with all the arguments that hold tokens"
            )
        if isinstance(rule, ColumnRule) and not any(inside(module, owner) for owner in self.reduces):
            raise ValueError(
                f"{name}: {module} multiplies this column itself, and no row leads out of it; name the row parameter of "
                f"{module}, or {{pattern: {module}, style: reduce}} where linear rows inside it end in a sum"
            )
        length = shape[dim]
        segments = self._segments(name, rule, length) if isinstance(rule, ColumnRule) else [length]
        units = self._units(name, rule.units, segments)
        self.shards[name] = Shard.by_segments(dim % len(shape), segments, units, self.size, name)

    def _check_reduce(self, name: str) -> None:
        stack = self.stack_of(name)
        if stack.sp and not any(inside(name, around) for around in self.gathers):
            raise ValueError(
                f"{name}: its rows' partial sums are reduced where it returns, so it must be entered with whole activations; "
                f"add a rule {{pattern: {name}, style: gather}}, with all the arguments that hold tokens"
            )
        rows = [n for n, m in (*self.linear.items(), *self.raw.items()) if isinstance(m.rule, RowRule)]
        self._check_siblings(name)
        if not any(inside(row, name) for row in rows):
            raise ValueError(f"{name}: 'reduce' takes a module with rows inside, and the plan names none there")
        if name in self.linear:
            raise ValueError(f"{name}: a {self.linear[name].rule.style} reduces itself; name the module around it")

    def _check_siblings(self, name: str) -> None:
        """Of experts in a list all are sharded or none: a whole one would count once per rank in the sum."""
        for planned in [n for n in self.linear if inside(n, name)]:
            path = planned.split(".")
            for at in range(name.count(".") + 2, len(path)):
                holder = self.modules[".".join(path[:at])]
                if not isinstance(holder, nn.ModuleList | nn.ModuleDict):
                    continue
                for key, _ in holder.named_children():
                    twin = ".".join([*path[:at], key, *path[at + 1 :]])
                    if not any(inside(one, ".".join([*path[:at], key])) for one in (*self.linear, *self.raw)):
                        twin = ".".join([*path[:at], key])
                    if twin in self.modules and twin not in self.linear:
                        raise ValueError(
                            f"{twin}: no rule names it, but {planned} beside it is a {self.linear[planned].rule.style} whose "
                            f"output is summed at the end of {name}, where a whole expert would count tp times; write the "
                            "pattern for all of them ('*')"
                        )

    def _check_once(self, name: str) -> None:
        module, _, leaf = name.rpartition(".")
        if leaf not in self.modules[module]._parameters:
            raise ValueError(f"{name}: 'once' takes a parameter, and this is a buffer")
        if module in self.linear or name in self.raw or self.reduced_at(module) is None:
            raise ValueError(
                f"{name}: 'once' takes a parameter of its own that a module adds to partial sums; around this one none are "
                "left (a row linear adds its bias behind the sum by itself)"
            )

    def _check_whole(self, name: str) -> None:
        for stack in self.stacks:
            if name in stack.blocks:
                raise ValueError(
                    f"{name}: 'whole' names a module inside a block, and this is a block; leave it out of 'blocks'"
                )
        planned = [n for n in (*self.linear, *self.gathers, *self.copies) if inside(n, name)]
        if planned:
            raise ValueError(
                f"{name} is computed whole on every rank, but {planned[0]} inside it is planned; drop one of both"
            )

    def _tensor(self, name: str) -> Tensor:
        module, _, leaf = name.rpartition(".")
        tensor = getattr(self.modules[module], leaf)
        assert isinstance(tensor, Tensor)
        return tensor

    def _check_sliced(self, name: str, rule: LocalHeadsRule) -> None:
        tensor, module = self._tensor(name), name.rpartition(".")[0]
        if module in self.linear:
            raise ValueError(f"{name}: it belongs to a linear that is a {self.linear[module].rule.style} already")
        if not -tensor.ndim <= rule.dim < tensor.ndim:
            raise ValueError(f"{name}: it has shape {list(tensor.shape)} and no dim {rule.dim}")
        if tensor.shape[rule.dim] % self.size:
            raise ValueError(
                f"{name}: {tensor.shape[rule.dim]} heads or features at dim {rule.dim} do not divide by tp={self.size}"
            )

    def sliced_shard(self, name: str) -> Shard | None:
        """How 'local_heads' deals out a parameter or a buffer; none if it does not."""
        rule = self.sliced_tensors.get(name)
        if rule is None:
            return None
        tensor = self._tensor(name)
        dim = rule.dim % tensor.ndim
        length = tensor.shape[dim]
        return Shard.by_segments(dim, [length], [length], self.size, name)

    def _check_vocab(self, name: str) -> None:
        module = self.modules[name]
        if any(stack.covers(name) for stack in self.stacks):
            raise ValueError(
                f"{name}: 'vocab' takes an embedding or a head outside the blocks; use column and row inside"
            )
        if isinstance(module, nn.Embedding):
            VocabParallelEmbedding.check(module, name)
        elif linear_kind(module) != "out_in":
            raise ValueError(
                f"{name}: 'vocab' takes an nn.Embedding or an nn.Linear, and this is a {type(module).__name__}; leave it whole"
            )

    def vocab_shard(self, name: str) -> Shard:
        """How 'vocab' deals out a module's parameters."""
        weight = self.modules[name].weight
        assert isinstance(weight, Tensor)
        return Shard.by_vocabulary(weight.shape[0], self.size)

    def _check_wide(self, name: str) -> None:
        wrong = [n for n, p in self.modules[name].named_parameters() if p.ndim != 1]
        if wrong or any(inside(n, name) for n in self.linear):
            raise ValueError(f"{name}: 'full_width' takes a norm, whose parameters are vectors over the whole width")

    def _segments(self, name: str, rule: ColumnRule, features: int) -> list[int]:
        if isinstance(rule.segments, tuple) and isinstance(rule.segments[0], int):
            sizes = [int(size) for size in rule.segments]
            if sum(sizes) != features:
                raise ValueError(
                    f"{name}: segments {sizes} sum to {sum(sizes)}, the linear has {features} out-features"
                )
            return sizes
        if isinstance(rule.segments, tuple) and isinstance(rule.units, tuple) and len(rule.units) == len(rule.segments):
            counts = self._units(name, rule.units, rule.segments)
            if features % sum(counts):
                raise ValueError(
                    f"{name}: {features} out-features do not divide into {sum(counts)} units ({list(rule.units)}: {counts})"
                )
            return [features // sum(counts) * number for number in counts]
        count = rule.segments if isinstance(rule.segments, int) else len(rule.segments)
        if features % count:
            raise ValueError(
                f"{name}: {features} out-features do not divide into {count} equal segments; give their sizes"
            )
        return [features // count] * count

    def _units(
        self, name: str, units: int | str | tuple[int | str, ...] | None, segments: Sequence[int | str]
    ) -> list[int]:
        if units is None:
            return [int(size) for size in segments]
        if not isinstance(units, tuple):
            units = (units,) * len(segments)
        if len(units) != len(segments):
            raise ValueError(
                f"{name}: {len(units)} units for {len(segments)} segments; give one for all, or one for each"
            )
        return [unit if isinstance(unit, int) else self._number_at(name, unit) for unit in units]

    def _number_at(self, name: str, attribute: str) -> int:
        """A whole-number attribute of a module, or of the nearest one around it."""
        at = name if name in self.modules else name.rpartition(".")[0]
        while True:
            try:
                value = read_attribute(self.modules[at], attribute)
            except AttributeError:
                value = None
            if isinstance(value, int):
                return value
            if at == "":
                raise ValueError(
                    f"{name}: units={attribute!r} is no whole-number attribute of it or of a module around it"
                )
            at = at.rpartition(".")[0]

    def _check_set(self, match: Match) -> None:
        rule, module = match.rule, self.modules[match.name]
        assert isinstance(rule, SetRule)
        for attribute in (*rule.divide, *rule.values, *rule.ratio):
            try:
                read_attribute(module, attribute)
            except AttributeError:
                raise ValueError(
                    f"{match.name}: 'set' names {attribute!r}, which {type(module).__name__} does not have"
                ) from None
        for attribute in rule.divide:
            value = read_attribute(module, attribute)
            if not isinstance(value, int) or value % self.size:
                raise ValueError(f"{match.name}.{attribute} is {value!r} and can't be divided by tp={self.size}")
        for attribute in rule.ratio:
            self.local_ratio(match, attribute)

    def local_ratio(self, match: Match, attribute: str) -> int:
        """What an attribute that is a ratio of two counts becomes on a rank, where the smaller count may be shared."""
        assert isinstance(match.rule, SetRule)
        above, below = match.rule.ratio[attribute]
        over, under = (n if isinstance(n, int) else self._number_at(match.name, n) for n in (above, below))
        if read_attribute(self.modules[match.name], attribute) != over // under:
            raise ValueError(
                f"{match.name}.{attribute} is {read_attribute(self.modules[match.name], attribute)}, not {above} / {below} "
                f"({over} / {under})"
            )
        return max(1, over // self.size) // max(1, under // self.size)

    def _check_pointwise(self) -> None:
        replaced = {n for n, m in self.linear.items() if isinstance(m.rule, ReplaceRule)}
        gathered = [*self.gathers, *sorted(replaced - self.encoders)]
        for name, module in self.modules.items():
            whole = any(inside(name, other) for other in self.wholes)
            if isinstance(module, _NOT_POINTWISE) and self.sp_at(name) and not whole:
                raise ValueError(
                    f"{name}: a {type(module).__name__} mixes positions (or needs whole features), and here each rank has a "
                    f"part of them{' (inside a gather it sees local features)' if any(inside(name, g) for g in gathered) else ''};"
                    f" compute the module around it whole, {{pattern: {name.rpartition('.')[0] or name}, style: whole}}, leave "
                    "those blocks out of the plan, or set sp=False if it lies outside every gather"
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
            if len(facts) == 1 and all(name.rpartition(".")[0] in self.vocabs for name in tied):
                continue
            left = [name for name in tied if name.rpartition(".")[0] not in self.vocabs]
            if left and len(left) < len(tied):
                raise ValueError(
                    f"{' and '.join(tied)} are one tied parameter, of which 'vocab' names a part only; name {', '.join(left)} too "
                    "(the modules), or none of them"
                )
            if len(facts) > 1 or (len(tied) > 1 and any(shard is not None for shard, _ in facts)):
                raise ValueError(
                    f"{' and '.join(tied)} are one tied parameter, used both inside and outside the sequence region or "
                    "sharded on one side; its gradient can't be synced by one rule: leave it whole on both sides, or untie it"
                )

    # ---- layouts -----------------------------------------------------------------------------------------------

    def _fact(self, parameter: str) -> tuple[Shard | None, bool]:
        layout, _ = self.layout_of(parameter)
        return layout.shard, layout.is_partial

    def layout_of(self, parameter: str) -> tuple[ParamLayout, bool]:
        """The layout of a parameter, and whether its class is in doubt until training shows it."""
        module, _, leaf = parameter.rpartition(".")
        shape = tuple(self.model.get_parameter(parameter).shape)

        def layout(shard: Shard | None = None, partial: bool = False, reason: Reason = Reason.IDENTICAL) -> ParamLayout:
            over = frozenset({"tp"}) if partial else frozenset()
            return ParamLayout(parameter, shape, shard, over, reason)

        sliced = self.sliced_shard(parameter)
        if sliced is not None:
            return ParamLayout(parameter, shape, sliced, reason=Reason.LOCAL_HEADS, free=True), False
        if parameter in self.raw:
            held = self.shards[parameter]
            over = frozenset({"tp"}) if held.has_shared else frozenset()
            reason = Reason.COLUMN if isinstance(self.raw[parameter].rule, ColumnRule) else Reason.ROW
            return ParamLayout(parameter, shape, held, over, reason, free=True), False
        if parameter in self.once:
            return layout(partial=True, reason=Reason.ONCE), False
        if module in self.vocabs:
            return ParamLayout(parameter, shape, self.vocab_shard(module), reason=Reason.VOCAB, free=True), False
        if any(inside(module, name) for name in self.wholes):
            return layout(reason=Reason.COMPUTED_WHOLE), False
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
            held, free = self.shards[module], self.kinds[module] == "in_out"
            if isinstance(match.rule, ColumnRule):
                dim = held.dim if leaf == "weight" else 0
                over = frozenset({"tp"}) if held.has_shared else frozenset()
                reason = Reason.COLUMN_SHARED if over else Reason.COLUMN
                return ParamLayout(parameter, shape, Shard(dim, held.length, held.ranges), over, reason, free), False
            if leaf == "weight":
                return ParamLayout(parameter, shape, held, reason=Reason.ROW, free=free), False
            if self.reduced_at(module) is not None:
                return layout(partial=True, reason=Reason.ROW_BIAS_ONCE), False
            sp = self.sp_at(module)
            return layout(partial=sp, reason=Reason.ROW_BIAS_ON_SHARDS if sp else Reason.IDENTICAL), False
        if not self.in_region(module):
            return layout(), False
        if self._follows_row(module):
            sp = self.sp_at(module)
            return layout(partial=sp, reason=Reason.SEES_SHARDS if sp else Reason.IDENTICAL), False
        in_gather = any(inside(module, name) for name in (*self.gathers, *self.copies, *self.wide))
        if self.sp_at(module):
            return layout(partial=True, reason=Reason.GATHER_TO_ROW if in_gather else Reason.SEES_SHARDS), False
        return layout(partial=in_gather, reason=Reason.COPY_TO_ROW if in_gather else Reason.IDENTICAL), in_gather

    def _follows_row(self, module: str) -> bool:
        """Whether it is the second half of a row's adapter: the first one's sums are reduced before it."""
        around, half, adapter = module.rpartition(f".{UP}.")
        first = self.linear.get(f"{around}.{DOWN}.{adapter}") if half else None
        return first is not None and isinstance(first.rule, RowRule)

    def _attention_layout(
        self, parameter: str, name: str, leaf: str, layout: Callable[..., ParamLayout]
    ) -> ParamLayout:
        module = self.modules[name]
        assert isinstance(module, nn.MultiheadAttention)
        width, heads = module.embed_dim, module.num_heads
        if leaf.startswith("in_proj"):
            shard = Shard.by_segments(0, [width] * 3, [heads] * 3, self.size, name)
            return ParamLayout(
                parameter,
                tuple(self.model.get_parameter(parameter).shape),
                shard,
                reason=Reason.COLUMN_HEADS,
                free=True,
            )
        if parameter.endswith("out_proj.weight"):
            return layout(Shard.by_segments(1, [width], [heads], self.size, name), reason=Reason.ROW_HEADS)
        sp = self.sp_at(name)
        return layout(partial=sp, reason=Reason.ROW_BIAS_ON_SHARDS if sp else Reason.IDENTICAL)
