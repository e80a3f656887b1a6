"""What must change beside the linears (head counts, tensors and arguments with a head dim): found by rehearsals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations, islice, takewhile
from typing import Any

from torch import nn

from lightning_seqpar.inference.block_kinds import is_settings
from lightning_seqpar.inference.dataflow import CantInferError
from lightning_seqpar.inference.feature_dependence import GroupLayout
from lightning_seqpar.inference.isolated_block import Block
from lightning_seqpar.inference.rehearsal import Edit, rehearse
from lightning_seqpar.layout.attributes import named_numbers
from lightning_seqpar.layout.linear_kind import is_depthwise, linear_kind
from lightning_seqpar.layout.module_names import inside

_OWN_OF_MODULES = ("_parameters", "_buffers", "_modules", "_forward", "_backward", "_state_dict", "_load_state")
"""Beginnings of the attributes in which every ``nn.Module`` keeps its parts and hooks."""
_MAX_TRIES = 600  # sets of edits that are rehearsed at most, the smallest first


def _local_numbers(block: Block, groups: Sequence[GroupLayout], tp: int) -> dict[int, int]:
    """Numbers of features and of what they divide into (heads, kv heads, heads of a kv head), and what they become on a rank."""
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


def _modules_around(block: Block, group: GroupLayout) -> list[str]:
    """Names of the modules that the group's linears stand in, the innermost first, the block last."""
    around: dict[str, None] = {}
    for name in (group.row, *group.columns):
        at = name.rpartition(".")[0]
        while len(at) >= len(block.flow.name):
            around[at] = None
            at = at.rpartition(".")[0]
    return sorted(around, key=len, reverse=True)


def _holder(block: Block, group: GroupLayout) -> str:
    """The name of the smallest module that holds a row and all its columns."""
    paths = [name.split(".")[:-1] for name in (group.row, *block.flow.columns[group.row])]
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    return ".".join(common)


def _candidates(block: Block, groups: Sequence[GroupLayout], tp: int) -> list[Edit]:
    """Edits that may be needed, the likeliest first: attributes, then the width of arguments, tensors and arguments."""
    shares = _local_numbers(block, groups, tp)
    group, columns = groups[-1], block.flow.columns[groups[-1].row]
    around = _modules_around(block, group)
    edits: list[Edit] = []
    parts = [name for name in around if name != block.flow.name] or [block.flow.name]
    within = [name for name in block.modules if name not in around and any(inside(name, part) for part in parts)]
    for name in (*around, *within):
        module = block.modules[name]
        if inside(name, group.row) or name in columns or type(module).__module__.startswith("torch.nn"):
            continue
        for key, value in vars(module).items():
            numbers = {key: value}
            if is_settings(value):
                numbers = {f"{key}.{leaf}": one for leaf, one in vars(value).items() if not leaf.startswith("_")}
            edits += [
                Edit("set", name, path, value=shares[number])
                for path, number in numbers.items()
                if type(number) is int and number in shares
            ]
    heads = {group.units, group.features, *(block.width(column) for column in group.columns)}
    linears = {group.row, *(name for name in columns if linear_kind(block.modules.get(name)) is not None)}
    products = {block.flow.linears[name].parameter for name in columns}
    for name, module in block.modules.items():
        if not any(inside(name, one) for one in parts) or inside(name, group.row):
            continue
        if name in linears or name in group.full_width:
            continue
        for key, value in vars(module).items():  # sizes by name, as einops' layers keep them
            if not key.startswith(_OWN_OF_MODULES):
                edits += [
                    Edit("set", name, f"{key}.{leaf}", value=shares[number])
                    for leaf, number in named_numbers(value).items()
                    if number in shares
                ]
        if "parametrizations" in name.split(".") or "weight_v" in module._parameters:
            continue  # torch's kernel of weight_norm does not check sizes: it must never see a part of a parameter
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if f"{name}.{key}" in products or block.flow.behind_rows(f"{name}.weight"):
                continue
            dims = [dim for dim, size in enumerate(tensor.shape) if size in heads and size % tp == 0 and size > 1]
            edits += [Edit("tensor", name, key, dim=dim) for dim in dims]
    for name in parts:
        if (entered := block.flow.trace.call_inside(block.flow.call, name)) is None:
            continue
        for arg, value in entered.args.items():
            shape = block.flow.trace.values[value].shape
            for dim in range(len(shape) - 1) if len(shape) > 2 else ():
                if shape[dim] == group.units:
                    kind = "given" if _is_made_in_another_block(block, value) else "arg"
                    edits.append(Edit(kind, name, arg, dim=dim))
    for (name, style), keys in block.flow.gathers.items():
        if style == "gather" and len(keys) == 1 and inside(group.row, name) and name not in linears:
            edits.append(Edit("narrow", name, keys[0]))
    return sorted(edits, key=lambda edit: (edit.kind not in ("set", "narrow"), "head" not in str(edit.key)))


def _is_made_in_another_block(block: Block, value: int) -> bool:
    """Whether an argument was made in another block, where it becomes this rank's part."""
    trace = block.flow.trace
    root = trace.values[value].root
    maker = next((op for op in trace.ops if any(trace.values[n].root == root for n in op.outputs)), None)
    return maker is not None and any(trace.calls[n].name in block.blocks for n in maker.stack)


def find_edits(block: Block, groups: Sequence[GroupLayout], edits: Sequence[Edit], tp: int) -> list[Edit]:
    """The smallest set of edits that the last of the groups needs beside ``edits``, those of the others.

    With them every rank computes its part of the block. Raises CantInferError if no set will do.
    """
    norms = [edit for edit in _batch_norms(block, groups[-1], tp) if edit not in edits]
    edits = [*edits, *norms]
    first = rehearse(block, groups, tp, edits)
    if first is None:
        return norms
    together = [*_depthwise(block, groups[-1], tp), *_beside_columns(block, groups[-1], tp)]
    candidates = [edit for edit in _candidates(block, groups, tp) if edit not in edits]
    near = [edit for edit in candidates if inside(edit.module, _holder(block, groups[-1]))]
    tries = chain(islice(_tries(near, together), _MAX_TRIES // 2) if near != candidates else (), _tries(candidates, together))
    for chosen in islice(tries, _MAX_TRIES):
        if rehearse(block, groups, tp, [*edits, *chosen]) is None:
            return [*norms, *_needed(block, groups, tp, edits, chosen)]
    row = groups[-1].row
    tried = ", ".join(edit.shown for edit in candidates[:5]) + (", ..." if len(candidates) > 5 else "") or "none"
    raise CantInferError(
        f"{row}: with its columns cut for one rank of tp={tp} the forward goes wrong ({first}), and no change of what could "
        f"count heads or have a head dim mends it (found: {tried}). Are head counts written into the forward as numbers, or is "
        "there a module for each head?"
    )


def _tries(candidates: Sequence[Edit], together: Sequence[Edit]) -> Iterator[tuple[Edit, ...]]:
    """Sets of edits, the likeliest first: each alone, then families, then all by size; ``together`` is in every second try."""
    sets = [edit for edit in candidates if edit.kind == "set"]
    heads = _by(sets, lambda edit: edit.value if "head" in str(edit.key) else None)
    names = _by(sets, lambda edit: str(edit.key).rpartition(".")[2])
    values = _by(sets, lambda edit: edit.value)
    tensors = _by([edit for edit in candidates if edit.kind == "tensor"], lambda edit: edit.dim)
    families = list(dict.fromkeys([*heads, *names, *values, *([tuple(sets)] if len(sets) > 1 else [])]))
    joint = [*families, *tensors, *(family + some for some in tensors for family in families)]
    joint += [(edit, *some) for some in tensors for edit in candidates if edit.kind in ("set", "narrow")]
    single = [(edit,) for edit in candidates]
    tries: Iterator[tuple[Edit, ...]] = chain(
        [()] if together else [],
        single,
        joint,
        *(combinations(candidates, size) for size in range(2, len(candidates) + 1)),
    )
    for chosen in tries:
        if together:
            yield (*together, *chosen)
        if chosen:
            yield chosen


def _by(edits: Sequence[Edit], key: Callable[[Edit], Any]) -> list[tuple[Edit, ...]]:
    """Families of several edits with an equal key; an edit whose key is None is in none."""
    families: dict[Any, list[Edit]] = defaultdict(list)
    for edit in edits:
        if (of := key(edit)) is not None:
            families[of].append(edit)
    return [tuple(family) for family in families.values() if len(family) > 1]


def _needed(block: Block, groups: Sequence[GroupLayout], tp: int, edits: Sequence[Edit], chosen: Sequence[Edit]) -> list[Edit]:
    """Those of the chosen edits without which the rehearsal goes wrong."""
    kept = list(chosen)
    for edit in chosen if len(chosen) > 1 else ():
        fewer = [one for one in kept if one != edit]
        if rehearse(block, groups, tp, [*edits, *fewer]) is None:
            kept = fewer
    return kept


def _depthwise(block: Block, group: GroupLayout, tp: int) -> list[Edit]:
    """Edits for the convolutions around a row's columns of which each channel stands for itself: a rank has its channels."""
    widths = {group.features, *(block.width(column) for column in group.columns)}
    around = [name for name in _modules_around(block, group) if name != block.flow.name] or [block.flow.name]
    edits: list[Edit] = []
    for name, module in block.modules.items():
        if not is_depthwise(module) or module.in_channels not in widths or module.in_channels % tp:
            continue
        if any(inside(name, one) for one in around):
            edits += [
                Edit("set", name, key, value=module.in_channels // tp) for key in ("groups", "in_channels", "out_channels")
            ]
            edits += [Edit("tensor", name, key) for key, _ in module.named_parameters()]
    return edits


def _beside_columns(block: Block, group: GroupLayout, tp: int) -> list[Edit]:
    """Edits for the tensors of a module around a column that have its out-features as rows, as adapters' have (DoRA, LoHa)."""
    edits: list[Edit] = []
    for around in dict.fromkeys(name.rpartition(".")[0] for name in group.columns):
        widths = {block.width(name) for name in group.columns if inside(name, around)}
        if inside(group.row, around) or len(widths) != 1 or (width := widths.pop()) % tp:
            continue
        edits += [
            Edit("tensor", name, key)
            for name, module in block.modules.items()
            if inside(name, around) and name not in group.columns
            for key, tensor in module.named_parameters(recurse=False)
            if tensor.ndim and tensor.shape[0] == width and tensor.shape[-1] != 1
        ]
    return edits


def _batch_norms(block: Block, group: GroupLayout, tp: int) -> list[Edit]:
    """Edits for the batch norms between a row and its columns: each channel stands for itself, so a rank has its channels."""
    return [
        Edit("tensor", name, key)
        for name, module in block.modules.items()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.num_features % tp == 0
        if block.flow.between(f"{name}.weight", [group.row])
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if tensor.ndim
    ]
