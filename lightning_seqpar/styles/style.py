"""What a style is, and what it works on.

A plan is a list of rules; a rule is a pattern over names and a style with options. Each style is one subclass of :class:`Rule`, and
answers for all that the style means. Undoing needs no code of a style's own: modules are compared before and after, parameters are
made whole from their layouts, and hooks go by their handles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, ClassVar, NoReturn

from pydantic import AfterValidator, ConfigDict, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.config import FrozenModel
from lightning_seqpar.layout.attributes import read_attribute
from lightning_seqpar.layout.linear_kind import LinearKind, linear_kind
from lightning_seqpar.layout.module_names import Argument, in_all_layers, inside, likely_blocks, outwards, why_no_pattern
from lightning_seqpar.layout.param_layout import ParamLayout, Reason, Shard
from lightning_seqpar.region.products import ColumnGroup
from lightning_seqpar.region.recompute import RecomputedForward
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.user_input import nearest, shown, sizes_that_divide

LINEAR = "linear"
"""The slot of the styles that shard a linear: a module is a column, a row or replaced."""


IMPLIED = "implied"
"""The source of a rule that nobody wrote, since it follows from another one."""


class Target(Enum):
    """What a pattern may name."""

    MODULES = "module"
    PARAMETERS = "parameter"
    TENSORS = "parameter or buffer"


class Rule(FrozenModel):
    """One line of a plan: a pattern, and the style that the modules (or tensors) of that name get. Subclasses are the styles."""

    model_config = ConfigDict(use_attribute_docstrings=False)  # nobody reads them, and pydantic parses the source for them

    pattern: str
    """Module name with ``*`` for one name or index and ``{a,b}`` for alternatives; ``""`` is the root."""
    style: str

    targets: ClassVar[tuple[Target, ...]] = (Target.MODULES,)
    """What the pattern names: the first of these of which it matches any."""
    slot: ClassVar[str] = ""
    """A module has at most one style per slot; the last rule wins. By default a style has a slot of its own."""
    accumulates: ClassVar[bool] = False
    """Whether every rule for a name holds, and not just the last."""
    undoes_inside: ClassVar[bool] = False
    """Whether it undoes what earlier rules said of the module and its inside, but for rules that say where the blocks are."""
    says_where_blocks_are: ClassVar[bool] = False
    """Whether it says which modules are blocks, not what becomes of a module."""
    opens_partial: ClassVar[bool] = False
    """Whether parameters inside see whole activations on their way to a sum over tp, so that their gradients are partial."""
    enters_whole: ClassVar[bool] = False
    """Whether the module is entered with whole sequences that were gathered for it."""
    holds_local_features: ClassVar[bool] = False
    """Whether buffers inside may hold this rank's features, and need not be the same on all ranks."""
    adapter_half: ClassVar[str | None] = None
    """For a linear's style: the half of an adapter around the linear that gets the style too."""

    @field_validator("pattern", "blocks", check_fields=False)  # the latter of an exit's
    @classmethod
    def patterns_are_well_formed(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and (why := why_no_pattern(value)) is not None:
            raise ValueError(f"{info.field_name}={shown(value)}: {why}")
        return value

    def dump(self) -> dict[str, Any]:
        """The rule as plain data, defaults left out."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        return {"pattern": self.pattern, "style": self.style, **data}

    def without_sp(self) -> Rule:
        """The same rule where activations between blocks stay whole."""
        return self

    def place(self, name: str, plan: PlannedModel) -> None:
        """Say where the stacks of blocks are and where they end; called before anything is checked."""

    def check(self, name: str, plan: PlannedModel) -> None:
        """Refuse what can't be done right with the module or tensor of that name, by a ValueError; nothing has been changed."""

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """The layout of a parameter that is ``name``, or lies in the module ``name``; none if the style does not decide it."""
        return None

    def apply(self, name: str, application: Application) -> None:
        """Change the module or tensor of that name in place."""

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """Forward hooks in front of the module; the first is the outermost."""
        yield from ()

    def after(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """Forward hooks behind the module, where the outermost style's come last."""
        yield from ()

    def unfit_to_trace(self, name: str, plan: PlannedModel) -> str | None:
        """Why what the style does inside a block can't be traced by ``torch.compile``, in words; None if it can."""
        return None


def _each_once(args: tuple[Argument, ...]) -> tuple[Argument, ...]:
    if not args or len(set(args)) != len(args):
        raise ValueError(f"args={list(args)}: name each argument once, by position or keyword")
    return args


Arguments = Annotated[tuple[Argument, ...], AfterValidator(_each_once)]
"""Positions or names of arguments of a module, as the caller passes them."""


class ArgumentsRule(Rule):
    """Base of the styles that work on some of a module's arguments, by default the first."""

    args: Arguments = (0,)


@dataclass(frozen=True)
class Match:
    """A rule, and one name of a model that it holds for: a module's, or a tensor's."""

    name: str
    rule: Rule
    source: str  # who wrote the rule, for the plan's table
    of_tensor: bool = False

    @property
    def slot(self) -> str:
        """Of the rules for a name that have one slot, the last holds: a parameter or buffer is dealt out once."""
        return "tensor" if self.of_tensor else self.rule.slot or self.rule.style


@dataclass
class Stack:
    """One stack of blocks and what belongs to it."""

    owner: str  # the module that runs the blocks
    blocks: list[str]
    dim: int  # of the sequence
    sp: bool = True  # activations between the blocks are shards along the sequence
    arg: Argument = 0  # of a block, that carries the activation
    exits: list[str] = field(default_factory=list)  # where the region ends; none: at the last block's output

    @property
    def shown(self) -> str:
        """How messages call the stack's region."""
        return self.owner or "the model"

    def covers(self, name: str) -> bool:
        """Whether the module is a block or a part of one."""
        return any(inside(name, block) for block in self.blocks)


class PlannedModel:
    """A model and the rules that hold for it: what a style looks at when it checks, and when it lays out parameters.

    Raises ValueError for rules that name no blocks, or say what can't be of stacks and where they end.
    """

    def __init__(
        self,
        model: nn.Module,
        matches: Sequence[Match],
        styles: Sequence[str],
        size: int,
        sp: bool,
        loss_chunk: int | None = None,
    ) -> None:
        self.model, self.size, self.sp, self.loss_chunk = model, size, sp, loss_chunk
        self.modules = dict(model.named_modules(remove_duplicate=False))  # by every name
        first: dict[int, str] = {}
        for name, module in self.modules.items():
            first.setdefault(id(module), name)
        # A module that stands under several names (a shared block) is one module: its first name counts.
        self.canonical = {name: first[id(module)] for name, module in self.modules.items()}
        # The rules that are not undone by a later whole, in the plan's order.
        self.matches = _without_undone([m for m in matches if self.canonical.get(m.name, m.name) == m.name])
        self.stacks: list[Stack] = []
        self.shards: dict[str, Shard] = {}  # how a module or tensor is dealt out, by its name; filled by the styles' checks
        self.units: dict[str, int] = {}  # of each column, into how many its first segment is dealt out
        self._styles = list(styles)
        self._implied: list[Match] = []
        self._dropped: set[tuple[str, str]] = set()
        self._kinds: dict[str, LinearKind | None] = {}
        self._decide()
        if not self.named("blocks"):
            likely = likely_blocks(self.model) or ["model.layers.*"]
            rules = " or ".join(f"{{pattern: {pattern}, style: blocks}}" for pattern in likely[:3])
            raise ValueError(f"the plan has no 'blocks' rule: name the repeated blocks, for example {rules}")
        for match in self.decided:
            match.rule.place(match.name, self)

    # ---- which rule holds ----------------------------------------------------------------------------------------

    def _decide(self) -> None:
        last: dict[tuple[str, str, int], Match] = {}
        for at, match in enumerate(self.matches):
            if (match.slot, match.name) not in self._dropped:
                last[match.slot, match.name, at if match.rule.accumulates else -1] = match
        for match in self._implied:
            last.setdefault((match.slot, match.name, -1), match)
        self._last = list(last.values())
        # The rules that hold, style by style in the order of the table.
        self.decided = sorted(self._last, key=lambda match: self._styles.index(match.rule.style))
        self._named: dict[tuple[str, ...], dict[str, Match]] = {}
        self._at: dict[str, list[Match]] = {}
        for match in self.decided:
            self._at.setdefault(match.name, []).append(match)
        planned = self.named("column", "row", "replace")
        self.openers = [match.name for match in self.decided if match.rule.opens_partial]
        self.linears = {name: match for name, match in planned.items() if not match.of_tensor}
        # Those that a module multiplies itself.
        self.unwrapped_parameters = {name: match for name, match in planned.items() if match.of_tensor}

    def named(self, *styles: str) -> dict[str, Match]:
        """What has one of these styles, by name, in the plan's order."""
        if styles not in self._named:
            self._named[styles] = {match.name: match for match in self._last if match.rule.style in styles}
        return self._named[styles]

    def at(self, name: str) -> list[Match]:
        """The rules that hold for a name, in the order of the styles."""
        return self._at.get(name, [])

    def drop(self, name: str, rule: Rule) -> None:
        """A rule turns out to have nothing to do for a name, which then has no style of that slot, not an earlier rule's either."""
        self.matches = [m for m in self.matches if not (m.name == name and m.rule.style == rule.style)]
        self._dropped.add((rule.slot or rule.style, name))
        self._decide()

    def imply(self, match: Match) -> None:
        """A rule that follows from another one, where none of the plan says so; the plan's table does not list it."""
        self._implied.append(match)
        self._decide()

    def refuse_uneven(self, name: str, count: int) -> NoReturn:
        """Raise ValueError for a number of units that does not divide by tp."""
        is_attention = isinstance(self.modules.get(name), nn.MultiheadAttention)
        part = name if is_attention else name.rpartition(".")[0]
        rule: dict[str, Any] = {"pattern": in_all_layers(part), "style": "whole"}
        if is_attention:
            rule["args"] = [0, 1, 2]
        elif "hidden_states" in inspect.signature(self.modules[part].forward).parameters:
            rule["args"] = ["hidden_states"]
        raise ValueError(
            f"{name}: {count} units (heads or features) do not divide by tp={self.size}; {sizes_that_divide('tp', count)}. "
            f"To have every rank compute {part} whole, and shard the rest: plan={ {'rules': [rule]} }"
        )

    # ---- where a module is -----------------------------------------------------------------------------------------

    def stack_of(self, name: str) -> Stack:
        """The stack whose blocks hold the module."""
        for stack in self.stacks:
            if stack.covers(name):
                return stack
        raise ValueError(
            f"plan: {name!r} is planned but lies outside the blocks "
            f"({', '.join(stack.blocks[0] for stack in self.stacks)}, ...); only what the blocks hold can be sharded"
        )

    def stack_owned_by(self, owner: str) -> Stack | None:
        """The first stack that the module runs."""
        return next((stack for stack in self.stacks if stack.owner == owner), None)

    def stack_reaching(self, name: str) -> Stack | None:
        """The first stack between whose first block and the end of whose region the module runs; none outside of all."""
        for stack in self.stacks:
            if stack.covers(name) or any(inside(name, out) for out in stack.exits):
                return stack
        return None

    def sp_at(self, name: str) -> bool:
        """Whether activations are shards where the module runs: inside the blocks of a region with sp, or at its end."""
        stack = self.stack_reaching(name)
        return stack is not None and stack.sp

    def reduced_at(self, name: str) -> str | None:
        """The module at whose end the partial sums of a row are reduced; none if at the row itself."""
        return next((owner for owner in self.named("reduce") if inside(name, owner)), None)

    def sums_features(self, name: str) -> bool:
        """Whether a module that returns partial sums is given this rank's features: it holds rows, and no column made them."""
        return any(inside(row, name) for row in self.named("row")) and not any(
            inside(column, name) for column in self.named("column")
        )

    # ---- what it is ------------------------------------------------------------------------------------------------

    def kind_of(self, name: str) -> LinearKind | None:
        """How a linear keeps its weight; none if the module is not known to be a linear."""
        if name not in self._kinds:
            self._kinds[name] = linear_kind(self.modules[name])
        return self._kinds[name]

    def tensor(self, name: str) -> Tensor:
        """The parameter or buffer of that name."""
        module, _, leaf = name.rpartition(".")
        tensor = getattr(self.modules[module], leaf)
        assert isinstance(tensor, Tensor)
        return tensor

    def number_at(self, name: str, attribute: str) -> int:
        """A whole-number attribute of a module, or of the nearest one around it."""
        around = [self.modules[at] for at in (*outwards(name), "") if at in self.modules]
        for module in around:
            try:
                value = read_attribute(module, attribute)
            except AttributeError:
                continue
            if isinstance(value, int):
                return value
        numbers = [key for module in around for key, value in vars(module).items() if type(value) is int and value > 1]
        near = f"; did you mean {nearest(attribute, [*dict.fromkeys(numbers)])}?" if numbers else ""
        raise ValueError(f"{name}: units={attribute!r} is no whole-number attribute of it or of a module around it{near}")

    def make_layout(
        self,
        parameter: str,
        reason: Reason = Reason.IDENTICAL,
        *,
        shard: Shard | None = None,
        partial: bool = False,
        free: bool = False,
    ) -> ParamLayout:
        """The layout of a parameter whose gradient is ``partial`` over tp, or not."""
        over = frozenset({"tp"}) if partial else frozenset()
        return ParamLayout(parameter, tuple(self.model.get_parameter(parameter).shape), shard, over, reason, free)


def _without_undone(matches: Sequence[Match]) -> list[Match]:
    """The rules that no later one undoes."""
    kept: list[Match] = []
    for match in matches:
        if match.rule.undoes_inside:
            kept = [m for m in kept if m.rule.says_where_blocks_are or not inside(m.name, match.name)]
        kept.append(match)
    return kept


@dataclass
class Application:
    """One plan that is being carried out on a model: what a style needs to change it."""

    plan: PlannedModel
    group: ProcessGroup  # of tp
    rank: int  # in it
    regions: dict[str, SequenceRegion]  # by the first block of their stack
    buffers: dict[str, ParamLayout] = field(default_factory=dict)  # those that styles have cut
    compiles: bool = False  # the blocks
    columns: dict[str, ColumnGroup] = field(default_factory=dict)  # that read what is gathered for a module, by its name

    def module(self, name: str) -> nn.Module:
        """The module of that name."""
        module: nn.Module = self.plan.modules[name]
        return module

    def region_of(self, name: str) -> SequenceRegion:
        """The region whose blocks hold the module."""
        return self.region_at(self.plan.stack_of(name))

    def region_at(self, stack: Stack) -> SequenceRegion:
        """The region of a stack."""
        return self.regions[stack.blocks[0]]

    def hook_entry(self, name: str, hook: Callable[..., Any]) -> Iterator[RemovableHandle]:
        """A pre-hook of a module that gathers for it; of one that is recomputed it runs again, too."""
        module = self.module(name)
        if isinstance(again := vars(module).get("forward"), RecomputedForward):
            again.entries.append(hook)
        else:
            yield module.register_forward_pre_hook(hook, with_kwargs=True)

    def hook_close(self, name: str, hook: Callable[..., Any]) -> Iterator[RemovableHandle]:
        """The hook behind such a module, which returned or raised."""
        module = self.module(name)
        if isinstance(again := vars(module).get("forward"), RecomputedForward):
            again.closes.append(hook)
        else:
            # A graph returns, or isn't there; and it would be of one module alone, whose hook is called in any case.
            yield module.register_forward_hook(hook, always_call=not self.compiles)

    def columns_of(self, name: str) -> ColumnGroup:
        """The column linears in a module that may read what is gathered or copied for it."""
        if name not in self.columns:
            plan = self.plan
            entries = plan.named("gather", "copy")
            inner = [n for n in plan.linears if plan.linears[n].rule.style == "column" and inside(n, name)]
            nearest = [n for n in inner if next(around for around in outwards(n) if around in entries) == name]
            # Of a list of experts each reads some of the tokens.
            lists = {n for n, one in plan.modules.items() if isinstance(one, nn.ModuleList | nn.ModuleDict) and inside(n, name)}
            self.columns[name] = ColumnGroup(plan.modules[n] for n in nearest if lists.isdisjoint(outwards(n)))
        return self.columns[name]

    def is_compiled(self, name: str) -> bool:
        """Whether the module or tensor lies in a block that is compiled."""
        return self.compiles and any(stack.covers(name) for stack in self.plan.stacks)
