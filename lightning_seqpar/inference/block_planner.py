"""The plan of one block: the rules for its linears, parameters and attributes, with the reasons for them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_seqpar.inference.block_kinds import is_settings, kind_of
from lightning_seqpar.inference.dataflow import BlockFlow, CantInferError, SummedRow, UserDecidesError
from lightning_seqpar.inference.edit_search import Edit, find_edits
from lightning_seqpar.inference.feature_dependence import Block, ColumnLayout, GroupLayout, group_layout, mixes_positions
from lightning_seqpar.inference.gather_points import orders_tokens, reorders_tokens
from lightning_seqpar.inference.summed_parts import UnwrappedProducts
from lightning_seqpar.inference.trainer_view import describe_failure
from lightning_seqpar.layout.attributes import is_installed, read_attribute
from lightning_seqpar.layout.linear_kind import linear_kind
from lightning_seqpar.layout.module_names import Argument, inside, outwards

_Rule = tuple[str, str, dict[str, Any]]  # the name of a module or parameter, the style, and its options


@dataclass
class BlockPlan:
    """The plan of one block."""

    rules: list[_Rule] = field(default_factory=list)  # with names inside the block
    reasons: list[str] = field(default_factory=list)  # why, a sentence each
    # Names inside the block of the modules around what is sharded, each of which could be computed whole instead.
    parts: list[str] = field(default_factory=list)
    no_sp: str = ""  # why it is right on whole sequences only; empty if it is right on shards
    # Names inside the block of modules and parameters that are left whole, each with the reason.
    whole: dict[str, str] = field(default_factory=dict)


class BlockPlanner:
    """Makes the plan of one block from its data flow and from runs of the block.

    ``covers`` says whether the user's own rules decide some modules, ``sums`` whether a module that deals its tokens out to experts
    is reduced where it returns; ``stack`` are the names of all blocks of the stack.
    """

    def __init__(self, flow: BlockFlow, tp: int, covers: Callable[..., bool], stack: Sequence[str], *, sums: bool) -> None:
        self._flow, self._model, self._tp = flow, flow.trace.model, tp
        self._covers, self._sums = covers, sums
        self._block = Block(flow, set(stack) - {flow.name})
        self._plan = BlockPlan()
        self._rules: list[_Rule] = []  # with full names
        self._groups: list[GroupLayout] = []
        self._edits: list[Edit] = []
        self._idle: list[str] = []
        self._reason = self._plan.reasons.append

    def _inner(self, name: str) -> str:
        return name[len(self._flow.name) + 1 :]

    def _stop(self, error: str | Exception, row: str) -> CantInferError:
        """The error to raise for a row, with the module around it that could be computed whole."""
        around, text = part_around(self._flow, row), str(error)
        advice = "\n  It stands in the block's own forward, so no rule can have it computed whole" * (not around)
        if not around and not is_installed(type(self._block.module)):
            advice += "; as a module of its own it could be"
        kind = type(error) if isinstance(error, UserDecidesError) else CantInferError
        return kind(f"{text}{advice}", around, text)

    def make(self) -> BlockPlan:
        """Make the plan; raises CantInferError naming the module, why, and the rule to write."""
        for row in self._flow.rows:
            if row in {group.row for group in self._groups} or self._covers(row, *self._flow.columns[row]):
                continue
            try:
                self._plan_any(row)
            except CantInferError:
                raise
            except Exception as error:  # of the model's own code, run in another way than it was made for
                tried = f"{row}: cutting it for tp={self._tp} was tried, and the block's code raised"
                raise self._stop(f"{tried} {describe_failure(error)}", row) from error
            if around := part_around(self._flow, row):
                self._plan.parts.append(self._inner(around))
        for edit in self._edits:
            self._reason(f"{edit.shown}: without it the forward of one rank's part goes wrong")
        self._keep_whole_sequences()
        self._write_gathers()
        self._write_linears()
        self._write_gradients()
        self._write_edits(self._edits)
        rules = [(self._inner(name), style, options) for name, style, options in self._rules]
        rules += _idle_experts(self._flow, rules)
        ruled = {name for name, style, _ in rules if style == "row"}
        for row in self._idle if self._sums else ():
            if self._inner(row) not in ruled:
                raise self._stop(
                    f"{row}: the example gives it no token, and no module like it shows how to deal it out; set "
                    "example_input_array to an input that does",
                    row,
                )
        self._plan.rules = _one_for_all_experts(self._block.module, rules)
        return self._plan

    def _plan_any(self, row: str) -> None:
        if (error := self._flow.ungathered.get(row)) is not None:
            raise self._stop(error, row)
        shared = [name for name in self._flow.columns[row] if not inside(name, self._flow.name)]
        if shared:
            raise self._stop(f"{row}: one of its columns, {shared[0]}, belongs to another part of the model", row)
        if 0 in self._flow.trace.values[self._flow.linears[row].reads].shape:
            self._idle.append(row)  # an expert that gets no token of the example
        elif self._flow.linears[row].is_unwrapped:
            self._plan_products(row)
        elif row in self._flow.attentions:
            self._rule(row, "replace")
            self._reason(f"{row}: an nn.MultiheadAttention, which calls its projections through raw weights")
        else:
            self._plan_row(row)

    def _rule(self, name: str, style: str, **options: Any) -> None:
        self._rules.append((name, style, options))

    def _plan_row(self, row: str) -> None:
        """Plan a row linear and its columns, or leave them whole if they work on each position by itself."""
        flow = self._flow
        try:
            groups, more_edits = self._split(row)
        except CantInferError as error:
            if mixes_positions(flow, row, unknown=True):
                raise self._stop(error, row) from None
            self._reason(f"{row}: left whole, as are its columns; they work on each position alone ({error})")
            names = [self._inner(name) for name in (row, *flow.columns[row])]
            self._plan.whole |= dict.fromkeys(names, f"it works on each position alone, and can't be split: {error}")
            return
        group = groups[0]
        self._groups, self._edits = [*self._groups, *groups], [*self._edits, *more_edits]
        alone = [column for column in flow.columns[row] if (column, "gather") in flow.gathers]
        if alone and mixes_positions(flow, row, unknown=True):
            self._plan.no_sp = (
                f"the attention of {self._inner(row)} stands in the block's own forward, which would read the length of "
                "its shard"
            )
            advice = "; a module of its own for the attention would allow it"
            advice *= not is_installed(type(self._block.module))
            self._reason(f"{flow.name}: {self._plan.no_sp}: no sequence parallelism here{advice}")
        shown = ", ".join(self._inner(column) for column in group.columns)
        self._reason(
            f"{row}: row, its output is added to the residual; its input falls apart into {group.units} units, made by "
            f"the columns {shown}"
        )

    def _split(self, row: str) -> tuple[list[GroupLayout], list[Edit]]:
        """Split a row and the rows beside it, and find what must change with them."""
        flow = self._flow
        if flow.linears[row].summed and any(inside(row, owner) for owner in flow.sums):
            raise CantInferError(f"{row}: a sum of products inside an expert, whose own output is summed")
        groups = [group_layout(self._block, row, self._tp)]
        for peer in self._rows_beside(row):
            groups.append(group_layout(self._block, peer, self._tp))
            # Columns that other rows have cut already are left out.
            for other in groups[:-1]:
                for column in [name for name in groups[-1].columns if name in other.columns]:
                    if groups[-1].columns.pop(column).ranges != other.columns[column].ranges:
                        raise CantInferError(f"{column}: {other.row} and {peer} need other parts of it on a rank")
        return groups, find_edits(self._block, [*self._groups, *groups], self._edits, self._tp)

    def _rows_beside(self, row: str) -> list[str]:
        """The rows that read columns of this row too, so that they are planned with it (one for the text, one for the picture)."""
        columns = self._flow.columns
        found = [row]
        for one in found:
            found += [other for other in columns if other not in found and set(columns[one]) & set(columns[other])]
        return found[1:]

    def _plan_products(self, row: str) -> None:
        """Plan a module that multiplies its parameters itself: all its rows and columns at once, or leave it whole."""
        flow, owner = self._flow, row.rpartition(".")[0]
        if any(name == owner and style == "gather" for name, style, _ in self._rules):
            return  # the module was planned for another of its rows
        rows = [name for name in flow.rows if name.rpartition(".")[0] == owner]
        columns = list(dict.fromkeys(column for name in rows for column in flow.columns[name]))
        if owner not in flow.sums:
            raise self._stop(
                f"{row}: a parameter that is multiplied past any linear module, and no one module inside the block makes what "
                "is added of its own parameters and the tokens given to it",
                row,
            )
        products = UnwrappedProducts(self._block, owner, rows, columns)
        if idle := products.idle():
            raise self._stop(
                f"{owner}: the example does not use its parameter{'s' * (len(idle) > 1)} {', '.join(idle)}, so nothing tells how "
                "to cut it; set example_input_array to an input that does",
                row,
            )
        try:
            cuts, edits = products.deal(self._tp)
        except CantInferError as error:
            if any(products.mixes_positions(arg) for arg in flow.sums[owner]):
                raise self._stop(error, row) from None
            self._reason(f"{owner}: left whole; it works on each token alone ({error})")
            self._plan.whole[self._inner(owner)] = f"it works on each token alone, and can't be split: {error}"
            return
        self._rule(owner, "gather", **_args(flow.sums[owner]))
        for name, part in cuts.items():
            style = "once" if part.dim is None else "row" if name in products.rows else "column"
            options = {} if part.dim is None else {"dim": part.dim}
            if part.segments > 1:
                options["segments"] = part.segments
            self._rule(f"{owner}.{name}", style, **options)
        self._write_edits(edits)
        dims = ", ".join(f"{name} at dim {part.dim}" for name, part in cuts.items() if part.dim is not None)
        self._reason(
            f"{owner}: it multiplies parameters itself; cut into {self._tp} parts ({dims}), what it returns sums up to the whole"
        )

    def _keep_whole_sequences(self) -> None:
        """Turn sequence parallelism off for the block if something in it is right on whole sequences only."""
        own = "the block's own forward"
        if (moved := reorders_tokens(self._flow)) is not None:
            self._plan.no_sp = f"{self._inner(moved) or own} works on tokens in another order than the block's"
            self._reason(f"{moved}: its tokens are in another order than the block's: no sequence parallelism here")
        if (counted := orders_tokens(self._flow, self._covers)) is not None:
            self._plan.no_sp = f"{self._inner(counted[0]) or own} counts, sorts or reduces tokens ({counted[1]})"
            self._reason(
                f"{counted[0]}: it counts, sorts or reduces tokens ({counted[1]}) where it would see this rank's part of them: no "
                "sequence parallelism here"
            )

    def _write_gathers(self) -> None:
        """Rules for the gather points of the groups that are split, and for modules that reduce what experts make."""
        flow, groups = self._flow, self._groups
        used = {name for group in groups for name in (group.row, *flow.columns[group.row])}
        for (name, style), args in flow.gathers.items():
            if any(inside(one, name) for one in used):
                options = _args(args)
                narrow = [edit.key for edit in self._edits if edit.kind == "narrow" and edit.module == name]
                if style == "gather" and any(key in args for key in narrow):
                    options["local_width"] = True
                self._rule(name, style, **options)
        for name, args in flow.sums.items():
            if any(inside(group.row, name) for group in groups):
                self._rule(name, "gather", **_args(args))
                self._rule(name, "reduce")
                self._reason(
                    f"{name}: columns in it read some of its tokens (experts), or in another order; what rows make is summed "
                    "where it returns"
                )

    def _write_linears(self) -> None:
        for group in self._groups:
            for column, layout in group.columns.items():
                linear, options = self._flow.linears[column], _column_options(self._model, column, layout)
                if linear.is_called:
                    self._rule(column, "column", **options)
                    continue
                dim = {"dim": linear.out_dim} if linear.out_dim else {}
                self._rule(linear.parameter, "local_heads", **dim, **options)
                module = self._block.modules.get(column)
                if linear_kind(module) is not None and isinstance(getattr(module, "bias", None), Tensor):
                    self._rule(f"{column}.bias", "local_heads", **options)
            for norm in group.full_width:
                self._rule(norm, "full_width")
            if (summed := self._flow.linears[group.row].summed) is not None:
                self._write_summed(group, summed)
            else:
                self._rule(group.row, "row", **_row_options(self._model, group))

    def _write_summed(self, group: GroupLayout, summed: SummedRow) -> None:
        """Rules for a module of several rows, which leave partial sums that are reduced where it returns."""
        options = _row_options(self._model, group)
        for name, dim in summed.rows:
            place = {} if dim is None or dim == self._model.get_parameter(name).ndim - 1 else {"dim": dim}
            self._rule(name, "row", **place, **options)
        for name in summed.once:
            self._rule(name, "once")
        for name in summed.local:
            self._rule(name, "local_heads", **(options if len(group.segments) > 1 else {}))
        self._rule(group.row, "reduce")
        shown = ", ".join(name[len(group.row) + 1 :] for name, _ in summed.rows)
        self._reason(
            f"{group.row}: it returns a sum of products of its input and is linear in it; {shown} are cut along that input's "
            "features, and what it returns is summed over the ranks"
        )

    def _write_gradients(self) -> None:
        """Rules for parameters that are whole, where the gather points do not tell whether their gradients come in parts."""
        flow = self._flow
        openers = [name for name, style, _ in self._rules if style in ("gather", "copy", "full_width")]
        known = {name for name, _, _ in self._rules}
        known |= {f"{edit.module}.{edit.key}" for edit in self._edits if edit.kind == "tensor"}
        rows = [group.row for group in self._groups]
        for parameter in flow.used_with:
            module = parameter.rpartition(".")[0]
            if parameter in known or module in flow.linears or not inside(module, flow.name):
                continue
            if any(inside(parameter, name) for name, one in flow.linears.items() if one.summed is not None):
                continue  # such a module's own style says it of all that it holds
            inner = any(inside(module, opener) for opener in openers)
            if flow.between(parameter, rows) and not inner:
                self._rule(parameter, "gradient", summed=True)
                self._reason(f"{parameter}: all heads or features share it, so its gradient is the sum of the ranks' parts")
            elif inner and flow.behind_rows(parameter):
                self._rule(parameter, "gradient", summed=False)
                self._reason(f"{parameter}: it is used behind the row, where every rank computes the same")

    def _write_edits(self, edits: Sequence[Edit]) -> None:
        """Rules for edits; an argument of another block needs none, and a narrow one is an option of the gather rule."""
        sets: dict[str, dict[str, Any]] = defaultdict(dict)
        others: list[_Rule] = []
        for edit in edits:
            if edit.kind == "set" and read_attribute(self._block.modules[edit.module], str(edit.key)) == edit.value * self._tp:
                sets[edit.module].setdefault("divide", []).append(edit.key)
            elif edit.kind == "set":
                sets[edit.module].setdefault("values", {})[edit.key] = edit.value
            elif edit.kind == "tensor":
                others.append((f"{edit.module}.{edit.key}", "local_heads", {"dim": edit.dim} if edit.dim else {}))
            elif edit.kind == "flex":
                others.append((edit.module, "flex", {}))
            elif edit.kind == "arg":
                others.append((edit.module, "local_heads", {"args": [edit.key], "dim": edit.dim}))
        self._rules += [*((name, "set", options) for name, options in sets.items()), *others]


def _args(args: Sequence[Argument]) -> dict[str, Any]:
    """The option that names the arguments that a module gathers or copies; none for the first one alone."""
    return {} if list(args) == [0] else {"args": list(args)}


def _row_options(model: nn.Module, group: GroupLayout) -> dict[str, Any]:
    if len(group.segments) == 1:
        return {} if group.units == group.features else {"units": _unit_name(model, group.row, group.units)}
    units = [
        count if count == size else _unit_name(model, group.row, count)
        for count, size in zip(group.segment_units, group.segments, strict=True)
    ]
    return {"segments": list(group.segments), "units": units}


def _one_for_all_experts(block: nn.Module, rules: Sequence[_Rule]) -> list[_Rule]:
    """Rules in which those that are alike for all modules of a list inside the block are one rule with ``*``."""
    known = {repr(rule) for rule in rules}
    out: dict[str, _Rule] = {}
    for name, style, options in rules:
        shown = name
        for holder, like in _lists_around(block, name):
            if len(holder) > 1 and all(repr((like.format(key), style, options)) in known for key in holder):
                shown = like.format("*")
                break
        out[repr((shown, style, options))] = shown, style, options
    return list(out.values())


def _lists_around(block: nn.Module, name: str) -> Iterator[tuple[dict[str, nn.Module], str]]:
    """The lists of modules that a name leads through, the outermost first, each with the name as a format of a key of it."""
    path = name.split(".")
    for at in range(1, len(path)):
        holder = block.get_submodule(".".join(path[:at]))
        if isinstance(holder, nn.ModuleList | nn.ModuleDict):
            yield dict(holder.named_children()), ".".join([*path[:at], "{}", *path[at + 1 :]])


def _idle_experts(flow: BlockFlow, rules: Sequence[_Rule]) -> list[_Rule]:
    """Rules for experts that get no token of the example: those of an equal expert."""
    known = {(name, style) for name, style, _ in rules}
    copied = []
    for name, style, options in rules:
        full = f"{flow.name}.{name}"
        if style == "reduce" or not any(inside(full, owner) and full != owner for owner in flow.sums):
            continue
        for holder, like in _lists_around(flow.call.module, name):
            own = next(module for key, module in holder.items() if like.format(key) == name)
            for key, other in holder.items():
                if (like.format(key), style) not in known and kind_of(other) == kind_of(own):
                    known.add((like.format(key), style))
                    copied.append((like.format(key), style, options))
    return copied


def part_around(flow: BlockFlow, row: str) -> str:
    """The module inside the block that would have to be computed whole if a row can't be split; empty if that is the block."""
    names = [name for name, _ in flow.gathers if inside(row, name)] or [row.rpartition(".")[0]]
    around = next((one for one in outwards(names[0]) if flow.trace.calls_of(one)), "")  # a list of modules is called by nobody
    return around if len(around) > len(flow.name) else ""


def _column_options(model: nn.Module, column: str, layout: ColumnLayout) -> dict[str, Any]:
    """The options of a column's rule: its segments and units, left out where they are the default."""
    options: dict[str, Any] = {}
    if len(layout.segments) > 1:
        equal = len(set(layout.segments)) == 1
        options["segments"] = len(layout.segments) if equal else list(layout.segments)
    if any(count != size for count, size in zip(layout.units, layout.segments, strict=True)):
        names = [_unit_name(model, column, count) for count in layout.units]
        options["units"] = names[0] if len(set(names)) == 1 else names
    return options


def _unit_name(model: nn.Module, name: str, count: int) -> int | str:
    """The name of an attribute around the module that holds the number of units, as a plan may write it; else the number."""
    for around in (*outwards(name.rpartition(".")[0]), ""):
        own = vars(model.get_submodule(around))
        places = {"": own} | {f"{key}.": vars(value) for key, value in own.items() if is_settings(value)}
        for prefix, settings in places.items():
            matching = [key for key, value in settings.items() if type(value) is int and value == count]
            if matching := [key for key in matching if _COUNTS_HEADS.fullmatch(key)]:
                return f"{prefix}{min(matching, key=lambda key: ('kv' in key or 'key' in key, len(key)))}"
    return count


_COUNTS_HEADS = re.compile(r"(?!_|.*dim|.*size).*head.*", re.IGNORECASE)  # names of attributes that count heads


def pattern_of(model: nn.Module, names: Sequence[str]) -> str:
    """A pattern that matches these blocks and nothing beside them: ``layers.*`` for all of a list, else ``{first,second}``."""
    if len(names) == 1:
        return names[0]
    parent = names[0].rpartition(".")[0]
    leaves = [name.rpartition(".")[2] for name in names]
    is_all = all(re.fullmatch(r"\d+", leaf) for leaf in leaves) and {*leaves} == {*model.get_submodule(parent)._modules}
    return f"{parent}.".lstrip(".") + ("*" if is_all else f"{{{','.join(leaves)}}}")
