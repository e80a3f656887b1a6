"""Finds a plan for a module that has never heard of one.

Data flow says which linears are columns and rows and where to gather; Jacobian support says which features belong
together; a rehearsal of each rank's part says which attributes must change. What this can't decide it refuses, and
what it decides is still proved by the self-check.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any

import torch
from torch import nn

from lightning_seqpar.dataflow import (
    BlockFlow,
    CantInferError,
    UnknownLinearError,
    activation,
    find_exit,
    find_stacks,
    orders_tokens,
    read_blocks,
    reorders_tokens,
)
from lightning_seqpar.layers import read_attribute
from lightning_seqpar.plan import BlocksRule, ColumnRule, ReplaceRule, RowRule, ShardingPlan, WholeRule
from lightning_seqpar.probe import (
    Example,
    Quiet,
    default_dtype,
    detached_copy,
    is_large,
    kept_streams,
    kind_of,
    repeats_skipped,
    seed_streams,
)
from lightning_seqpar.products import Products
from lightning_seqpar.support import Block, ColumnLayout, Edit, GroupLayout
from lightning_seqpar.trace import Call, Trace

_TRIES = 600  # sets of changes that are tried at most, the smallest first


@dataclass
class BlockPlan:
    """What one block becomes: ``(name inside the block, style, options)``, and why."""

    rules: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    reads_length: bool = False


@dataclass
class Inference:
    """An inferred plan and the reasons for it, one line each."""

    plan: ShardingPlan
    reasons: list[str]


def infer_plan(
    model: nn.Module,
    example: Any,
    tp: int,
    own: ShardingPlan | None = None,
    *,
    sums: bool = True,
    dtype: torch.dtype | None = torch.float64,
    prepare: Callable[[nn.Module], None] = lambda copied: None,
) -> Inference:
    """A plan for ``model``, whose copy is run on this process's CPU; the model itself is not touched.

    Args:
        model: any module, on any device; one on meta, or a large one, is never materialised whole.
        example: what ``forward`` takes (a tensor, a tuple or a dict), or an :class:`~lightning_seqpar.probe.Example`.
        tp: for how many ranks.
        own: the user's own rules; what they decide is left to them.
        sums: a module that deals its tokens out to experts may be reduced where it returns; else at each expert, which needs
            whole sequences between the blocks.
        dtype: of the copy; none keeps the model's.
        prepare: makes the copy ready for its forward.

    Raises:
        CantInferError: naming the module, why, and the rule to write.
    """
    if not isinstance(example, Example):
        kwargs = dict(example) if isinstance(example, Mapping) else {}
        args = () if kwargs else example if isinstance(example, tuple) else (example,)
        example = Example("the example", "forward", args, kwargs)
    cpu = torch.device("cpu")
    if dtype is torch.float64 and is_large(model):
        dtype = torch.float32
    with kept_streams(cpu), default_dtype(dtype):
        copied = detached_copy(model, cpu, dtype)
        prepare(copied)
        return _infer(copied, example.to(cpu, dtype), tp, own, sums=sums)


def _infer(model: nn.Module, example: Example, tp: int, own: ShardingPlan | None, *, sums: bool) -> Inference:
    trace = Trace(model)
    decided = _Decided(model, own)
    with repeats_skipped(model) if is_large(model) else nullcontext(), trace.watch(), Quiet(draws=example.draws):
        seed_streams()
        example.run(model)
    if not trace.calls:
        raise CantInferError(
            f"{type(model).__name__}: a copy of it runs none of its own modules (its forward is a closure over the original?)"
        )
    stacks = decided.stacks(trace) or find_stacks(trace, model)
    if not stacks:
        raise CantInferError(
            f"{type(model).__name__}: no repeated blocks found, that is modules of one class that hold linears and map an "
            "activation [b, s, h] to one of the same shape; name them by {pattern: ..., style: blocks}"
        )
    rules: list[dict[str, Any]] = []
    reasons: list[str] = []
    owners = [_owner(model, calls[0].name) for calls in stacks]
    for calls, owner in zip(stacks, owners, strict=True):
        found, why = _plan_stack(trace, model, calls, tp, decided, alone=owners.count(owner) == 1, sums=sums)
        rules += found
        reasons += why
    return Inference(ShardingPlan.from_rules(rules, source="inferred"), reasons)


class _Decided:
    """What the user's own rules say already."""

    def __init__(self, model: nn.Module, own: ShardingPlan | None) -> None:
        self._matches = own.match(model) if own is not None else []
        self._wholes = [match.name for match in self._matches if isinstance(match.rule, WholeRule)]
        self._linears = {match.name for match in self._matches if isinstance(match.rule, ColumnRule | RowRule)}
        self._replaced = {match.name for match in self._matches if isinstance(match.rule, ReplaceRule)}

    def stacks(self, trace: Trace) -> list[list[Call]]:
        """The stacks of blocks that the user named, in order of execution."""
        named = {match.name for match in self._matches if isinstance(match.rule, BlocksRule)}
        found: dict[str, dict[str, Call]] = {}
        for call in trace.calls:
            if call.name in named and activation(trace, call) is not None:
                found.setdefault(call.name.rpartition(".")[0], {}).setdefault(call.name, call)
        return [list(calls.values()) for calls in found.values()]

    def covers(self, *names: str) -> bool:
        """Whether the modules of a group are decided: one is computed whole, or the user names them all."""
        whole = any(_inside(name, one) for name in names for one in self._wholes)
        return whole or all(name in self._linears or name in self._replaced for name in names)


def _inside(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")


def _owner(model: nn.Module, block: str) -> str:
    """The module that runs the blocks, past lists."""
    owner = block.rpartition(".")[0]
    while owner and isinstance(model.get_submodule(owner), nn.ModuleList | nn.Sequential | nn.ModuleDict):
        owner = owner.rpartition(".")[0]
    return owner


def _plan_stack(
    trace: Trace,
    model: nn.Module,
    calls: Sequence[Call],
    tp: int,
    decided: _Decided,
    *,
    alone: bool,
    sums: bool,
) -> tuple[list[dict[str, Any]], list[str]]:
    mixing: dict[Any, bool] = {}

    def mixes(flow: BlockFlow, row: str) -> bool:
        key = (row[len(flow.name) :], _likeness(flow, model))
        if key not in mixing:
            mixing[key] = _mixes(model, flow, row)
        return mixing[key]

    flows = read_blocks(trace, calls, model, mixes, sums=sums)
    known: dict[Any, BlockPlan] = {}
    plans: dict[str, BlockPlan] = {}
    dims = {}
    names = _all_names(model, [flow.name for flow in flows])
    for flow in flows:
        key = _likeness(flow, model)
        if key not in known:
            known[key] = _plan_block(trace, model, flow, tp, decided, names, sums=sums)
            dims[flow.name] = Block(model, flow).sequence_dim()
        plans.update(dict.fromkeys(_all_names(model, [flow.name]), known[key]))
    if len(set(dims.values())) > 1:
        raise CantInferError(f"the blocks {', '.join(dims)} have their sequence at different dims: {dims}")
    if not any(style in ("row", "replace") for plan in plans.values() for _, style, _ in plan.rules):
        raise CantInferError(
            f"{flows[0].name}: no pair of linears is found in it, of which the second one's output is added to the block's "
            "input; name them: {pattern: ..., style: column} and {pattern: ..., style: row}"
        )
    blocks = _pattern(names)
    dim = next(iter(dims.values()))
    whole = any(plan.reads_length for plan in known.values())
    out: list[dict[str, Any]] = [{"pattern": blocks, "style": "blocks", "dim": dim, **({"sp": False} if whole else {})}]
    args = {name: flow.arg for flow in flows if flow.arg != 0 for name in _all_names(model, [flow.name])}
    for arg in dict.fromkeys(args.values()):
        out.append({"pattern": _pattern([n for n in names if args.get(n) == arg]), "style": "scatter", "arg": arg})
    out += _compress(names, plans)
    owner = _owner(model, names[0])
    if type(model.get_submodule(owner)) is nn.TransformerEncoder:
        out += [{"pattern": owner, "style": "replace"}, {"pattern": owner, "style": "exit"}]
    elif (exit_at := find_exit(trace, flows)) is not None:
        out.append({"pattern": exit_at, "style": "exit", **({} if alone else {"blocks": blocks})})
    kinds = "" if len(known) == 1 else f" of {len(known)} kinds"
    reasons = [f"{blocks}: {len(names)} block{'s' * (len(names) > 1)}{kinds}, sequence at dim {dim}"]
    for plan in known.values():
        reasons += plan.reasons
    return out, reasons


def _all_names(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Every name under which the blocks stand, in the model's order: in a copy one may stand for many."""
    objects = {id(model.get_submodule(name)) for name in blocks}
    return [name for name, module in model.named_modules(remove_duplicate=False) if id(module) in objects]


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules are made of the same classes, settings and shapes."""
    return bool(kind_of(one) == kind_of(other))


def _likeness(flow: BlockFlow, model: nn.Module) -> Any:
    """What two blocks must share to get the same plan."""
    cut = len(flow.name) + 1
    block = model.get_submodule(flow.name)
    shapes = tuple((name, type(m)) for name, m in block.named_modules())
    weights = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
    return (
        shapes,
        weights,
        flow.arg,
        tuple(row[cut:] for row in flow.rows),
        tuple((name[cut:], style, tuple(args)) for (name, style), args in flow.gathers.items()),
        tuple((name[cut:], tuple(args)) for name, args in flow.sums.items()),
    )


# ---- one block -------------------------------------------------------------------------------------------------


def _plan_block(
    trace: Trace, model: nn.Module, flow: BlockFlow, tp: int, decided: _Decided, stack: Sequence[str], *, sums: bool
) -> BlockPlan:
    block = Block(model, flow, set(stack) - {flow.name})
    plan = BlockPlan()
    cut = len(flow.name) + 1
    groups: list[GroupLayout] = []
    edits: list[Edit] = []
    idle_rows: list[str] = []
    for row in flow.rows:
        if decided.covers(row, *flow.columns[row]):
            continue
        if 0 in trace.values[flow.linears[row].reads].shape:
            idle_rows.append(row)  # an expert that the example gave no token
            continue
        if flow.linears[row].is_raw:
            _plan_products(block, row, tp, plan, decided, stack)
        elif row in flow.attentions:
            plan.rules.append((row[cut:], "replace", {}))
            plan.reasons.append(f"{row}: an nn.MultiheadAttention, which calls its projections through raw weights")
        else:
            tried = [*groups]
            try:
                group = block.group(row, tp)
                tried.append(group)
                found = _find_edits(trace, block, tried, edits, tp)
            except CantInferError as error:
                if isinstance(error, UnknownLinearError) or _mixes(model, flow, row, unknown=True):
                    raise CantInferError(f"{error}\n  {_what_to_write(flow, row, stack)}") from None
                plan.reasons.append(
                    f"{row}: left whole, as are its columns; they work on each position alone ({error})"
                )
                continue
            groups, edits = tried, [*edits, *found]
            alone = [column for column in flow.columns[row] if (column, "gather") in flow.gathers]
            if alone and block.mixes_positions(row):
                plan.reads_length = True
                plan.reasons.append(
                    f"{flow.name}: the attention of {row[cut:]} stands in the block's own forward, which would read the length "
                    "of its shard: no sequence parallelism here; a module of its own for the attention would allow it"
                )
            shown = ", ".join(column[cut:] for column in group.columns)
            plan.reasons.append(
                f"{row}: row, its output is added to the residual; its input falls apart into {group.units} units, made by "
                f"the columns {shown}"
            )
    plan.reasons += [f"{edit.shown}: without it the forward of one rank's part goes wrong" for edit in edits]
    if (moved := reorders_tokens(trace, flow)) is not None:
        plan.reads_length = True
        plan.reasons.append(f"{moved}: its tokens are in another order than the block's: no sequence parallelism here")
    if (counted := orders_tokens(trace, flow)) is not None:
        plan.reads_length = True
        plan.reasons.append(
            f"{counted[0]}: it counts or sorts tokens ({counted[1]}) where it would see this rank's part of them: no sequence "
            "parallelism here"
        )
    used = {name for group in groups for name in (group.row, *group.columns)}
    used |= {column for group in groups for column in flow.columns[group.row]}
    for (name, style), args in flow.gathers.items():
        if any(_inside(one, name) for one in used):
            options: dict[str, Any] = {} if args == [0] else {"args": list(args)}
            if any(edit.kind == "narrow" and edit.module == name for edit in edits):
                options["local_width"] = True
            plan.rules.append((name[cut:], style, options))
    for name, args in flow.sums.items():
        if any(_inside(group.row, name) for group in groups):
            plan.rules.append((name[cut:], "gather", {} if args == [0] else {"args": list(args)}))
            plan.rules.append((name[cut:], "reduce", {}))
            plan.reasons.append(
                f"{name}: it gives each expert some of its tokens; what they make is summed where it returns"
            )
    for group in groups:
        for column, layout in group.columns.items():
            plan.rules.append((column[cut:], "column", _column_options(model, column, layout)))
        for norm in group.full_width:
            plan.rules.append((norm[cut:], "full_width", {}))
        row_options = {} if group.units == group.features else {"units": _unit_name(model, group.row, group.units)}
        plan.rules.append((group.row[cut:], "row", row_options))
    plan.rules += _edit_rules(model, edits, tp, cut)
    plan.rules += _idle_experts(model, flow, plan.rules)
    for row in idle_rows if sums else ():
        if not any(name == row[cut:] and style == "row" for name, style, _ in plan.rules):
            raise CantInferError(
                f"{row}: the example gives it no token, and no module like it shows how to deal it out; set example_input_array to "
                f"an input that does\n  {_what_to_write(flow, row, stack)}"
            )
    plan.rules = _one_for_all_experts(model.get_submodule(flow.name), plan.rules)
    return plan


def _one_for_all_experts(
    block: nn.Module, rules: Sequence[tuple[str, str, dict[str, Any]]]
) -> list[tuple[str, str, dict[str, Any]]]:
    """Rules that hold alike for all modules of a list inside the block, as one with ``*``."""
    known = {repr(rule) for rule in rules}
    out: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for name, style, options in rules:
        path = name.split(".")
        for at in range(1, len(path)):
            holder = block.get_submodule(".".join(path[:at]))
            if isinstance(holder, nn.ModuleList | nn.ModuleDict) and len(holder) > 1:
                twins = [
                    (".".join([*path[:at], key, *path[at + 1 :]]), style, options)
                    for key in dict(holder.named_children())
                ]
                if all(repr(twin) in known for twin in twins):
                    path[at] = "*"
                    break
        rule = (".".join(path), style, options)
        out[repr(rule)] = rule
    return list(out.values())


def _idle_experts(
    model: nn.Module, flow: BlockFlow, rules: Sequence[tuple[str, str, dict[str, Any]]]
) -> list[tuple[str, str, dict[str, Any]]]:
    """Rules for experts that the example gave no token: those of an equal one."""
    known = {(name, style) for name, style, _ in rules}
    block = model.get_submodule(flow.name)
    found = []
    for name, style, options in rules:
        full = f"{flow.name}.{name}"
        if style == "reduce" or not any(_inside(full, owner) and full != owner for owner in flow.sums):
            continue
        path = name.split(".")
        for at in range(1, len(path)):
            holder = block.get_submodule(".".join(path[:at]))
            if not isinstance(holder, nn.ModuleList | nn.ModuleDict):
                continue
            for key, other in holder.named_children():
                twin = ".".join([*path[:at], key, *path[at + 1 :]])
                if (twin, style) not in known and alike(other, holder.get_submodule(path[at])):
                    known.add((twin, style))
                    found.append((twin, style, options))
    return found


def _plan_products(block: Block, row: str, tp: int, plan: BlockPlan, decided: _Decided, stack: Sequence[str]) -> None:
    """A module that multiplies parameters itself: all its rows and columns at once."""
    flow, owner = block.flow, row.rpartition(".")[0]
    cut, inner = len(flow.name) + 1, owner[len(flow.name) + 1 :]
    if any(name == inner and style == "gather" for name, style, _ in plan.rules):
        return  # another of its rows was here
    rows = [name for name in flow.rows if name.rpartition(".")[0] == owner]
    columns = list(dict.fromkeys(column for name in rows for column in flow.columns[name]))
    if owner not in flow.sums:
        raise CantInferError(
            f"{row}: a parameter that is multiplied past any linear module, and no one module inside the block makes what is "
            f"added of its own parameters and the tokens given to it\n  {_what_to_write(flow, row, stack)}"
        )
    products = Products(block, owner, rows, columns)
    try:
        products.check_used()
    except CantInferError as error:
        raise CantInferError(f"{error}\n  {_what_to_write(flow, row, stack)}") from None
    try:
        layout = products.deal(tp)
    except CantInferError as error:
        if any(products.mixes_positions(arg) for arg in flow.sums[owner] if products.is_floating(arg)):
            raise CantInferError(f"{error}\n  {_what_to_write(flow, row, stack)}") from None
        plan.reasons.append(f"{owner}: left whole; it works on each token alone ({error})")
        return
    args = flow.sums[owner]
    plan.rules.append((inner, "gather", {} if args == [0] else {"args": list(args)}))
    for name, part in layout.cuts.items():
        options: dict[str, Any] = {}
        style = "once" if part.dim is None else "row" if name in products.rows else "column"
        if part.dim is not None:
            options["dim"] = part.dim
            if part.segments > 1:
                options["segments"] = part.segments
        plan.rules.append((f"{owner}.{name}"[cut:], style, options))
    plan.rules += _edit_rules(block.model, layout.edits, tp, cut)
    dims = ", ".join(f"{name} at dim {part.dim}" for name, part in layout.cuts.items() if part.dim is not None)
    plan.reasons.append(
        f"{owner}: it multiplies parameters itself; cut into {tp} parts ({dims}), what it returns sums up to the whole"
    )


def _mixes(model: nn.Module, flow: BlockFlow, row: str, *, unknown: bool = False) -> bool:
    """Whether positions mix between the row's columns and the row; ``unknown`` where no module can be asked."""
    if row in flow.attentions:
        return False  # it gathers for itself
    modules = {name for name, _ in model.named_modules()}
    if not all(name in modules for name in (row, *flow.columns[row])):
        return unknown
    return Block(model, flow).mixes_positions(row)


def _what_to_write(flow: BlockFlow, row: str, stack: Sequence[str]) -> str:
    """A rule that gets a block past what inference can't decide."""
    names = [name for (name, _), _ in flow.gathers.items() if _inside(row, name)]
    around = names[0] if names else row.rpartition(".")[0]
    if len(around) <= len(flow.name):
        return (
            "Put that part of the block's forward into a module of its own, or write the columns and the row yourself"
        )
    inside = around[len(flow.name) + 1 :]
    return (
        f"To have every rank compute it whole, and shard the rest, write: {{pattern: '{_pattern(stack)}.{inside}', style: "
        "whole}"
    )


def _column_options(model: nn.Module, column: str, layout: ColumnLayout) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if len(layout.segments) > 1:
        equal = len(set(layout.segments)) == 1
        options["segments"] = len(layout.segments) if equal else list(layout.segments)
    if any(count != size for count, size in zip(layout.units, layout.segments, strict=True)):
        names = [_unit_name(model, column, count) for count in layout.units]
        options["units"] = names[0] if len(set(names)) == 1 else names
    return options


def _unit_name(model: nn.Module, name: str, count: int) -> int | str:
    """The attribute that holds the number of units, as the plan's reader would look it up; else the number."""
    at = name
    while at:
        at = at.rpartition(".")[0]
        own = vars(model.get_submodule(at))
        places = {"": own} | {f"{key}.": vars(value) for key, value in own.items() if _is_settings(value)}
        for prefix, settings in places.items():
            found = [key for key, value in settings.items() if type(value) is int and value == count and _counts(key)]
            if found:
                return f"{prefix}{min(found, key=lambda key: ('kv' in key or 'key' in key, len(key)))}"
    return count


def _counts(key: str) -> bool:
    """Whether an attribute's name says that it counts heads."""
    low = key.lower()
    return "head" in low and "dim" not in low and "size" not in low and not low.startswith("_")


def _edit_rules(model: nn.Module, edits: Sequence[Edit], tp: int, cut: int) -> list[tuple[str, str, dict[str, Any]]]:
    sets: dict[str, dict[str, Any]] = {}
    out: list[tuple[str, str, dict[str, Any]]] = []
    for edit in edits:
        if edit.kind == "tensor":
            out.append((f"{edit.module}.{edit.key}"[cut:], "local_heads", {"dim": edit.dim} if edit.dim else {}))
        elif edit.kind in ("given", "narrow"):
            continue  # another block made it of its own part; the gather rule says it
        elif edit.kind == "arg":
            out.append((edit.module[cut:], "local_heads", {"args": [edit.key], "dim": edit.dim}))
        else:
            options = sets.setdefault(edit.module, {})
            if read_attribute(model.get_submodule(edit.module), str(edit.key)) == edit.value * tp:
                options.setdefault("divide", []).append(edit.key)
            else:
                options.setdefault("values", {})[edit.key] = edit.value
    return [*((name[cut:], "set", options) for name, options in sets.items()), *out]


# ---- what must change beside the linears -----------------------------------------------------------------------


def _local_numbers(block: Block, groups: Sequence[GroupLayout], tp: int) -> dict[int, int]:
    """Numbers that may count something which is dealt out now, and what they are on one rank."""
    shares: dict[int, int] = {}
    for group in groups:
        kv = {count for layout in group.columns.values() for count in layout.units if count < tp}
        kv |= {1} if len(group.columns) < len(block.flow.columns[group.row]) else set()
        numbers = [group.features, *(block.width(column) for column in group.columns)]
        numbers += [size for layout in group.columns.values() for size in layout.segments]
        # Heads, kv heads, groups: whatever the features can be made of.
        numbers += [n for n in range(2, group.features + 1) if group.features % n == 0]
        for number in numbers:
            if number % tp == 0:
                shares.setdefault(number, number // tp)
        for count in sorted(kv):
            if count > 1:
                shares[count] = 1
            if group.units // count > 1:
                shares.setdefault(group.units // count, group.units // tp)
    return shares


def _is_settings(value: Any) -> bool:
    """Whether an attribute is an object of plain settings, such as a config that many modules share."""
    simple = isinstance(value, nn.Module | torch.Tensor | type | Mapping) or callable(value)
    return not simple and isinstance(getattr(value, "__dict__", None), dict)


def _modules_around(block: Block, group: GroupLayout) -> list[str]:
    """The modules that the group's linears stand in, the innermost first, and their parts; the block last."""
    around: dict[str, None] = {}
    for name in (group.row, *group.columns):
        at = name.rpartition(".")[0]
        while len(at) >= len(block.flow.name):
            around[at] = None
            at = at.rpartition(".")[0]
    return sorted(around, key=len, reverse=True)


def _candidates(trace: Trace, block: Block, groups: Sequence[GroupLayout], tp: int) -> list[Edit]:
    """Attributes, tensors and arguments that may have to change, the likeliest first."""
    shares = _local_numbers(block, groups, tp)
    group = groups[-1]
    around = _modules_around(block, group)
    found: list[Edit] = []
    for name in around:
        module = block.modules[name]
        if type(module).__module__.startswith("torch.nn"):
            continue
        for key, value in vars(module).items():
            if type(value) is int and value in shares:
                found.append(Edit("set", name, key, value=shares[value]))
            elif _is_settings(value):
                inner = vars(value)
                found += [
                    Edit("set", name, f"{key}.{leaf}", value=shares[number])
                    for leaf, number in inner.items()
                    if type(number) is int and number in shares and not leaf.startswith("_")
                ]
    heads = {group.units, group.features, *(block.width(column) for column in group.columns)}
    linears = {group.row, *block.flow.columns[group.row]}
    inside = [name for name in around if name != block.flow.name] or [block.flow.name]
    for name, module in block.modules.items():
        if not any(_inside(name, one) for one in inside) or name in linears or name in group.full_width:
            continue
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            dims = [dim for dim, size in enumerate(tensor.shape) if size in heads and size % tp == 0 and size > 1]
            found += [Edit("tensor", name, key, dim=dim) for dim in dims]
    for name in inside:
        found += [
            Edit("given" if _is_made_in_another_block(trace, block, name, key) else "arg", name, key, dim=dim)
            for key, shape in block.argument_shapes(name).items()
            for dim, size in enumerate(shape)
            if size == group.units and len(shape) > 2 and dim < len(shape) - 1
        ]
    for (name, style), keys in block.flow.gathers.items():
        if style == "gather" and len(keys) == 1 and _inside(group.row, name) and name not in linears:
            found.append(Edit("narrow", name, keys[0]))
    return sorted(found, key=lambda edit: (edit.kind not in ("set", "narrow"), "head" not in str(edit.key)))


def _is_made_in_another_block(trace: Trace, block: Block, name: str, key: int | str) -> bool:
    """Whether a module's argument was made by another block: then it is this rank's part already."""
    inside = next(call for call in trace.calls_of(name) if call.first_op >= block.flow.call.first_op)
    value = inside.args.get(key)
    if value is None:
        return False
    root = trace.values[value].root
    maker = next((op for op in trace.ops if any(trace.values[n].root == root for n in op.outputs)), None)
    return maker is not None and any(trace.calls[n].name in block.blocks for n in maker.stack)


def _find_edits(
    trace: Trace, block: Block, groups: Sequence[GroupLayout], edits: Sequence[Edit], tp: int
) -> list[Edit]:
    """The fewest things that must change so that every rank computes its part; beside ``edits``.

    Raises:
        CantInferError: if no set of them will do.
    """
    first = block.rehearse(groups, tp, edits)
    if first is None:
        return []
    candidates = [edit for edit in _candidates(trace, block, groups, tp) if edit not in edits]
    for chosen in islice(_subsets(candidates), _TRIES):
        if block.rehearse(groups, tp, [*edits, *chosen]) is None:
            return list(chosen)
    row = groups[-1].row
    tried = ", ".join(edit.shown for edit in candidates[:5]) + (", ..." if len(candidates) > 5 else "") or "none"
    raise CantInferError(
        f"{row}: with its columns cut for one rank of tp={tp} the forward goes wrong ({first}), and no change of what could "
        f"count heads or have a head dim mends it (found: {tried}). Are head counts written into the forward as numbers, or is "
        "there a module for each head?"
    )


def _subsets(items: Sequence[Edit]) -> Iterator[tuple[Edit, ...]]:
    for size in range(1, len(items) + 1):
        yield from combinations(items, size)


# ---- patterns --------------------------------------------------------------------------------------------------


def _pattern(names: Sequence[str]) -> str:
    """One pattern for the blocks of a stack: ``layers.*``, or ``{first,second}``."""
    if len(names) == 1:
        return names[0]
    parent = names[0].rpartition(".")[0]
    leaves = [name.rpartition(".")[2] for name in names]
    prefix = f"{parent}." if parent else ""
    if all(re.fullmatch(r"\d+", leaf) for leaf in leaves):
        return f"{prefix}*"
    return f"{prefix}{{{','.join(leaves)}}}"


def _compress(names: Sequence[str], plans: Mapping[str, BlockPlan]) -> list[dict[str, Any]]:
    """Rules by pattern: one for all blocks that share it, in the order of their first mention."""
    holders: dict[str, list[str]] = defaultdict(list)
    rules: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for name in names:
        for rule in plans[name].rules:
            key = repr(rule)
            rules[key] = rule
            holders[key].append(name)
    out = []
    for key, (inside, style, options) in rules.items():
        held = holders[key]
        if len(held) == len(names):
            block = _pattern(names)
        else:
            parent = held[0].rpartition(".")[0]
            leaves = ",".join(name.rpartition(".")[2] for name in held)
            block = (f"{parent}." if parent else "") + (f"{{{leaves}}}" if len(held) > 1 else leaves)
        out.append({"pattern": f"{block}.{inside}" if inside else block, "style": style, **options})
    return out
