"""Finds a plan for a module that has never heard of one.

Data flow says which linears are columns and rows and where to gather; Jacobian support says which features belong
together; a rehearsal of each rank's part says which attributes must change. What this can't decide it refuses, and
what it decides is still proved by the self-check.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import nn

from lightning_seqpar.dataflow import BlockFlow, CantInferError, find_exit, find_stacks, read_blocks
from lightning_seqpar.plan import ShardingPlan
from lightning_seqpar.probe import Example, Quiet, default_dtype
from lightning_seqpar.support import Block, ColumnLayout, GroupLayout
from lightning_seqpar.trace import Trace

_MANY = 8  # attributes among which every subset is tried


@dataclass
class BlockPlan:
    """What one block becomes: ``(name inside the block, style, options)``, and why."""

    rules: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


@dataclass
class Inference:
    """An inferred plan and the reasons for it, one line each."""

    plan: ShardingPlan
    reasons: list[str]


def infer_plan(model: nn.Module, example: Example, tp: int) -> Inference:
    """A plan for ``model``, a detached copy that :func:`~lightning_seqpar.probe.detached_copy` made.

    Args:
        model: the copy; its forward is run, its weights are not changed.
        example: an input, in the copy's dtype.
        tp: for how many ranks.

    Raises:
        CantInferError: naming the module, why, and the rule to write.
    """
    trace = Trace(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float64)
    with default_dtype(dtype):
        with trace.watch(), Quiet():
            example.run(model)
        if not trace.calls:
            raise CantInferError(
                f"{type(model).__name__}: a copy of it runs none of its own modules (its forward is a closure over the "
                "original?)"
            )
        stacks = find_stacks(trace, model)
        if not stacks:
            raise CantInferError(
                f"{type(model).__name__}: no repeated blocks found, that is modules of one class that hold linears and map an "
                "activation [b, s, h] to one of the same shape; name them by {pattern: ..., style: blocks}"
            )
        rules: list[dict[str, Any]] = []
        reasons: list[str] = []
        for calls in stacks:
            found, why = _plan_stack(trace, model, calls, tp)
            rules += found
            reasons += why
    return Inference(ShardingPlan.from_rules(rules, source="inferred"), reasons)


def _plan_stack(
    trace: Trace, model: nn.Module, calls: Sequence[Any], tp: int
) -> tuple[list[dict[str, Any]], list[str]]:
    flows = read_blocks(trace, calls, model)
    known: dict[Any, BlockPlan] = {}
    plans: dict[str, BlockPlan] = {}
    dims = {}
    for flow in flows:
        key = _likeness(flow, model)
        if key not in known:
            known[key] = _plan_block(model, flow, tp)
            dims[flow.name] = Block(model, flow).sequence_dim()
        plans[flow.name] = known[key]
    if len(set(dims.values())) > 1:
        raise CantInferError(f"the blocks {', '.join(dims)} have their sequence at different dims: {dims}")
    if not any(style in ("row", "replace") for plan in plans.values() for _, style, _ in plan.rules):
        raise CantInferError(f"{flows[0].name}: no pair of linears in it can be sharded; " + "; ".join(known[key].reasons))
    names = [flow.name for flow in flows]
    blocks = _pattern(names)
    out: list[dict[str, Any]] = [{"pattern": blocks, "style": "blocks", "dim": next(iter(dims.values()))}]
    args = {flow.name: flow.arg for flow in flows if flow.arg != 0}
    for arg in dict.fromkeys(args.values()):
        out.append({"pattern": _pattern([n for n in names if args.get(n) == arg]), "style": "scatter", "arg": arg})
    out += _compress(names, plans)
    owner = names[0].rpartition(".")[0]
    while owner and isinstance(model.get_submodule(owner), nn.ModuleList | nn.Sequential):
        owner = owner.rpartition(".")[0]
    module = model.get_submodule(owner)
    if type(module) is nn.TransformerEncoder:
        out += [{"pattern": owner, "style": "replace"}, {"pattern": owner, "style": "exit"}]
    elif (exit_at := find_exit(trace, flows, model)) is not None:
        out.append({"pattern": exit_at, "style": "exit"})
    reasons = [f"{blocks}: {len(names)} blocks of {len(known)} kind(s), sequence at dim {out[0]['dim']}"]
    for plan in known.values():
        reasons += plan.reasons
    return out, reasons


def _likeness(flow: BlockFlow, model: nn.Module) -> Any:
    """What two blocks must share to get the same plan."""
    cut = len(flow.name) + 1
    block = model.get_submodule(flow.name)
    shapes = tuple((name, type(m)) for name, m in block.named_modules())
    numbers = tuple(
        (name, key, value)
        for name, m in block.named_modules()
        for key, value in sorted(vars(m).items())
        if isinstance(value, int) and not isinstance(value, bool) and not key.startswith("_")
    )
    weights = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
    del numbers  # an index is a number too; shapes tell heads apart well enough, and the self-check sees the rest
    return (
        shapes,
        weights,
        flow.arg,
        tuple(row[cut:] for row in flow.rows),
        tuple((name[cut:], style, tuple(args)) for (name, style), args in flow.gathers.items()),
    )


# ---- one block -------------------------------------------------------------------------------------------------


def _plan_block(model: nn.Module, flow: BlockFlow, tp: int) -> BlockPlan:
    block = Block(model, flow)
    plan = BlockPlan()
    cut = len(flow.name) + 1
    groups: list[GroupLayout] = []
    edits: dict[tuple[str, str], Any] = {}
    for row in flow.rows:
        if row in flow.attentions:
            plan.rules.append((row[cut:], "replace", {}))
            plan.reasons.append(f"{row}: an nn.MultiheadAttention, which calls its projections through raw weights")
            continue
        group = block.group(row, tp)
        groups.append(group)
        edits.update(_find_edits(block, groups, edits, tp))
        plan.reasons.append(
            f"{row}: row, its output is added to the residual; {group.units} units, columns {', '.join(group.columns)}"
        )
    for (name, style), args in flow.gathers.items():
        plan.rules.append((name[cut:], style, {} if args == [0] else {"args": list(args)}))
    for group in groups:
        for column, layout in group.columns.items():
            options = _column_options(model, column, layout)
            plan.rules.append((column[cut:], "column", options))
        for norm in group.full_width:
            plan.rules.append((norm[cut:], "full_width", {}))
        row_options = {} if group.units == group.features else {"units": _unit_name(model, group.row, group.units)}
        plan.rules.append((group.row[cut:], "row", row_options))
    plan.rules += _set_rules(model, edits, tp, cut)
    return plan


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
    at, found = name, []
    while at:
        at = at.rpartition(".")[0]
        module = model.get_submodule(at)
        for key, value in vars(module).items():
            if type(value) is int and value == count and "head" in key.lower():
                found.append(key)
        if found:
            return sorted(found, key=lambda key: ("dim" in key or "size" in key, "kv" in key or "key" in key, len(key)))[0]
    return count


def _set_rules(
    model: nn.Module, edits: Mapping[tuple[str, str], Any], tp: int, cut: int
) -> list[tuple[str, str, dict[str, Any]]]:
    rules: dict[str, dict[str, Any]] = {}
    for (name, attribute), value in edits.items():
        options = rules.setdefault(name, {})
        if _read(model.get_submodule(name), attribute) == value * tp:
            options.setdefault("divide", []).append(attribute)
        else:
            options.setdefault("values", {})[attribute] = value
    return [(name[cut:], "set", options) for name, options in rules.items()]


# ---- attributes ------------------------------------------------------------------------------------------------


def _read(module: nn.Module, attribute: str) -> Any:
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def _candidates(
    block: Block, groups: Sequence[GroupLayout], tp: int
) -> Iterator[tuple[tuple[str, str], int]]:
    """Attributes that may count something which is now dealt out, with their value on one rank."""
    shares: dict[int, int] = {}
    for group in groups:
        kv = {count for layout in group.columns.values() for count in layout.units if count < tp}
        kv |= {1} if len(group.columns) < len(block.flow.columns[group.row]) else set()
        numbers = [group.features, *(block.modules[column].out_features for column in group.columns)]
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
    last = groups[-1]
    names = [last.row, *last.columns]
    around: dict[str, None] = {}
    for name in names:
        at = name.rpartition(".")[0]
        while len(at) >= len(block.flow.name):
            around[at] = None
            at = at.rpartition(".")[0]
    for name in around:
        module = block.modules[name]
        if type(module).__module__.startswith("torch.nn"):
            continue
        for key, value in vars(module).items():
            if type(value) is int and value in shares:
                yield (name, key), shares[value]
            elif key in ("config", "cfg", "args", "hparams", "params") and not isinstance(value, nn.Module):
                for inner, number in _numbers_of(value):
                    if number in shares:
                        yield (name, f"{key}.{inner}"), shares[number]


def _numbers_of(value: Any) -> Iterator[tuple[str, int]]:
    held = getattr(value, "__dict__", {})
    for key, number in held.items():
        if type(number) is int and not key.startswith("_"):
            yield key, number


def _find_edits(
    block: Block, groups: Sequence[GroupLayout], edits: Mapping[tuple[str, str], Any], tp: int
) -> dict[tuple[str, str], Any]:
    """The fewest attributes that must change so that every rank computes its part; beside ``edits``.

    Raises:
        CantInferError: if no set of them will do.
    """
    first = block.rehearse(groups, tp, edits)
    if first is None:
        return {}
    candidates = [(key, value) for key, value in _candidates(block, groups, tp) if key not in edits]
    for chosen in _subsets(candidates):
        if block.rehearse(groups, tp, {**edits, **dict(chosen)}) is None:
            return dict(chosen)
    row = groups[-1].row
    tried = ", ".join(f"{name}.{key}" for (name, key), _ in candidates) or "none"
    raise CantInferError(
        f"{row}: with its columns cut for one rank of tp={tp} the forward goes wrong ({first}); changing the attributes that "
        f"could count heads or features (found: {tried}) does not mend it. Are head counts written into the forward as "
        "numbers?"
    )


def _subsets(items: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    limit = len(items) if len(items) <= _MANY else 2
    for size in range(1, limit + 1):
        yield from combinations(items, size)
    if len(items) > _MANY:
        yield tuple(items)


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


def explain(reasons: Iterable[str]) -> str:
    """The reasons as an indented list."""
    return "".join(f"\n  - {line}" for line in reasons)
