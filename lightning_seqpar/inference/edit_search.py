"""What must change beside the linears (head counts, tensors and arguments with a head dim): found by rehearsals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import Any

import torch
from torch import nn

from lightning_seqpar.inference.dataflow import CantInferError
from lightning_seqpar.inference.feature_dependence import GroupLayout
from lightning_seqpar.inference.isolated_block import Block
from lightning_seqpar.inference.rehearsal import Edit, rehearse
from lightning_seqpar.inference.trace import ForwardTrace
from lightning_seqpar.layout.module_names import inside

_MAX_TRIES = 600
"""Sets of edits that are rehearsed at most, the smallest first."""


def _local_numbers(block: Block, groups: Sequence[GroupLayout], tp: int) -> dict[int, int]:
    """Numbers in the model that may count something which is split over the ranks, and what they become on one rank.

    They are numbers of features and whatever they can be divided into: heads, kv heads, query heads of a kv head.
    """
    shares: dict[int, int] = {}
    for group in groups:
        kv = {count for layout in group.columns.values() for count in layout.units if count < tp}
        kv |= {1} if len(group.columns) < len(block.flow.columns[group.row]) else set()
        numbers = [group.features, *(block.width(column) for column in group.columns)]
        numbers += [size for layout in group.columns.values() for size in layout.segments]
        # The numbers of heads, kv heads or groups that the features may consist of.
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


def is_settings(value: Any) -> bool:
    """Whether an attribute is an object of plain settings, such as a config that many modules share."""
    simple = isinstance(value, nn.Module | torch.Tensor | type | Mapping) or callable(value)
    return not simple and isinstance(getattr(value, "__dict__", None), dict)


def _modules_around(block: Block, group: GroupLayout) -> list[str]:
    """Names of the modules that the group's linears stand in, the innermost first, the block last."""
    around: dict[str, None] = {}
    for name in (group.row, *group.columns):
        at = name.rpartition(".")[0]
        while len(at) >= len(block.flow.name):
            around[at] = None
            at = at.rpartition(".")[0]
    return sorted(around, key=len, reverse=True)


def _candidates(trace: ForwardTrace, block: Block, groups: Sequence[GroupLayout], tp: int) -> list[Edit]:
    """Edits that may be needed, the likeliest first: attributes, then the width of arguments, tensors and arguments."""
    shares = _local_numbers(block, groups, tp)
    group = groups[-1]
    around = _modules_around(block, group)
    edits: list[Edit] = []
    for name in around:
        module = block.modules[name]
        if type(module).__module__.startswith("torch.nn"):
            continue
        for key, value in vars(module).items():
            if type(value) is int and value in shares:
                edits.append(Edit("set", name, key, value=shares[value]))
            elif is_settings(value):
                inner = vars(value)
                edits += [
                    Edit("set", name, f"{key}.{leaf}", value=shares[number])
                    for leaf, number in inner.items()
                    if type(number) is int and number in shares and not leaf.startswith("_")
                ]
    heads = {group.units, group.features, *(block.width(column) for column in group.columns)}
    linears = {group.row, *block.flow.columns[group.row]}
    parts = [name for name in around if name != block.flow.name] or [block.flow.name]
    for name, module in block.modules.items():
        if not any(inside(name, one) for one in parts) or name in linears or name in group.full_width:
            continue
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            dims = [dim for dim, size in enumerate(tensor.shape) if size in heads and size % tp == 0 and size > 1]
            edits += [Edit("tensor", name, key, dim=dim) for dim in dims]
    for name in parts:
        edits += [
            Edit("given" if _is_made_in_another_block(trace, block, name, key) else "arg", name, key, dim=dim)
            for key, shape in block.argument_shapes(name).items()
            for dim, size in enumerate(shape)
            if size == group.units and len(shape) > 2 and dim < len(shape) - 1
        ]
    for (name, style), keys in block.flow.gathers.items():
        if style == "gather" and len(keys) == 1 and inside(group.row, name) and name not in linears:
            edits.append(Edit("narrow", name, keys[0]))
    return sorted(edits, key=lambda edit: (edit.kind not in ("set", "narrow"), "head" not in str(edit.key)))


def _is_made_in_another_block(trace: ForwardTrace, block: Block, name: str, key: int | str) -> bool:
    """Whether a module's argument was made in another block, where it becomes this rank's part."""
    entered = next(call for call in trace.calls_of(name) if call.first_op >= block.flow.call.first_op)
    value = entered.args.get(key)
    if value is None:
        return False
    root = trace.values[value].root
    maker = next((op for op in trace.ops if any(trace.values[n].root == root for n in op.outputs)), None)
    return maker is not None and any(trace.calls[n].name in block.blocks for n in maker.stack)


def find_edits(
    trace: ForwardTrace, block: Block, groups: Sequence[GroupLayout], edits: Sequence[Edit], tp: int
) -> list[Edit]:
    """Find the smallest set of edits with which every rank computes its part of the block.

    Args:
        trace: the recorded forward.
        block: the block.
        groups: rows with their columns, and how they are split; the last one is new.
        edits: those that the other groups need.
        tp: number of ranks.

    Returns:
        The edits that the last group needs more.

    Raises:
        CantInferError: if no set of them will do.
    """
    first = rehearse(block, groups, tp, edits)
    if first is None:
        return []
    candidates = [edit for edit in _candidates(trace, block, groups, tp) if edit not in edits]
    for chosen in islice(_subsets(candidates), _MAX_TRIES):
        if rehearse(block, groups, tp, [*edits, *chosen]) is None:
            return list(chosen)
    row = groups[-1].row
    tried = ", ".join(edit.shown for edit in candidates[:5]) + (", ..." if len(candidates) > 5 else "") or "none"
    raise CantInferError(
        f"{row}: with its columns cut for one rank of tp={tp} the forward goes wrong ({first}), and no change of what could "
        f"count heads or have a head dim mends it (found: {tried}). Are head counts written into the forward as numbers, or is "
        "there a module for each head?"
    )


def _subsets(items: Sequence[Edit]) -> Iterator[tuple[Edit, ...]]:
    """The subsets that are not empty, the smallest first."""
    for size in range(1, len(items) + 1):
        yield from combinations(items, size)
