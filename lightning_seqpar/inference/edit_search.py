"""What must change beside the linears (head counts, tensors and arguments with a head dim), found by rehearsals.

In a rehearsal one block is run as a rank would run it, with its linears cut down, on one process. If the forward goes wrong or a
row reads anything but this rank's part of its input, more than the linears must change.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, combinations, islice, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_seqpar.context.flex import Heads, calls_flex, rebound
from lightning_seqpar.inference.block_kinds import is_settings
from lightning_seqpar.inference.dataflow import CantInferError, Linear
from lightning_seqpar.inference.feature_dependence import EQUAL, Block, GroupLayout, is_equal, other_data, part_of_segments
from lightning_seqpar.layout.attributes import named_numbers, write_attribute
from lightning_seqpar.layout.linear_kind import is_depthwise, linear_kind
from lightning_seqpar.layout.module_names import inside, outwards
from lightning_seqpar.layout.stand_in import resolve, stand_in
from lightning_seqpar.region.hooks import find_argument, put_argument

_ROUNDED = 16 * torch.finfo(torch.float32).eps
"""The limit of float64 where a block computes a part in float32 (a norm, a softmax), whose last bits depend on the shapes."""


@dataclass(frozen=True)
class Edit:
    """One more thing that must change on a rank beside the linears."""

    # ``set``: an attribute gets another value; ``tensor``: a parameter or buffer is cut along ``dim``; ``arg``: an argument is
    # cut along ``dim``; ``given``: an argument comes from another block, so it is this rank's part already (the rehearsal cuts it);
    # ``narrow``: the module sees an argument of this rank's width, which only columns resolve; ``flex``: FlexAttention in it is
    # given the whole model's heads.
    kind: str
    module: str  # its name; for a tensor, of the one that owns it
    key: int | str  # the attribute, the tensor's own name, or the argument
    value: int = 0  # the attribute's new value
    dim: int = 0  # the tensor dim of the heads

    @property
    def shown(self) -> str:
        """The name that messages give it."""
        if self.kind in ("set", "tensor"):
            return f"{self.module}.{self.key}"
        if self.kind == "flex":
            return f"the heads of FlexAttention in {self.module}"
        return "the width of " * (self.kind == "narrow") + f"argument {self.key!r} of {self.module}"


def rehearse(block: Block, groups: Sequence[GroupLayout], tp: int, edits: Sequence[Edit]) -> str | None:
    """Run the block as each of ``tp`` ranks would; what goes wrong, or None."""
    casts = _Casts()  # type: ignore[no-untyped-call]
    with casts:
        wanted = _inputs_of(block, [g.row for g in groups] + [n for g in groups for n in g.full_width])
    for rank in range(tp):
        try:
            with _Rehearsal(block, tp, rank, wanted, rounds=casts.to_float32).cut(groups, edits), torch.no_grad():
                block.run()
        except _MismatchError as error:
            return str(error)
        except Exception as error:  # of the block's own code, which was made for other sizes
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def _inputs_of(block: Block, names: Sequence[str]) -> dict[str, list[Tensor]]:
    kept: dict[str, list[Tensor]] = {name: [] for name in names}
    with ExitStack() as stack, torch.no_grad():
        for name in kept:

            def keep(module: nn.Module, args: Any, name: str = name) -> None:
                kept[name].append(args[0])

            stack.enter_context(block.modules[name].register_forward_pre_hook(keep))
        block.run()
    return kept


class _Casts(TorchDispatchMode):
    """While open, notes whether anything was rounded from float64 to float32 (:attr:`to_float32`)."""

    to_float32 = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].dtype, out.dtype) == (torch.float64, torch.float32):
            self.to_float32 = True
        return out


class _Rehearsal:
    """The block cut down to what one rank would hold, with hooks that compare the rows' inputs with the whole block's."""

    def __init__(self, block: Block, tp: int, rank: int, wanted: Mapping[str, list[Tensor]], *, rounds: bool) -> None:
        self._limits = {**EQUAL, torch.float64: _ROUNDED} if rounds else EQUAL
        self._block, self._tp, self._rank, self._wanted = block, tp, rank, wanted
        self._counts = dict.fromkeys(wanted, 0)

    @contextmanager
    def cut(self, groups: Sequence[GroupLayout], edits: Sequence[Edit]) -> Iterator[None]:
        """While open, columns make this rank's features, rows check what they read, and ``edits`` hold."""
        with ExitStack() as stack:
            for group in groups:
                self._cut_columns(group, stack)
                self._check_readers(group, stack)
                row = self._block.modules[group.row]
                stack.enter_context(changed_attribute(row, "in_features", group.features // self._tp))
            for edit in edits:
                module = self._block.modules[edit.module]
                stack.enter_context(_edited(module, edit, self._tp, self._rank))
            yield
            for name, count in self._counts.items():
                if count != (times := len(self._wanted[name])):
                    raise _MismatchError(f"{name} runs {count} times, in the whole model {times} times")

    def _cut_columns(self, group: GroupLayout, stack: ExitStack) -> None:
        """Let columns read the whole input and return this rank's features."""
        for column, layout in group.columns.items():
            self._cut_column(column, torch.cat([torch.arange(*own) for own in layout.ranges[self._rank]]), stack)

    def _cut_column(self, column: str, mine: Tensor, stack: ExitStack) -> None:
        linear = self._block.flow.linears[column]
        if not linear.is_called:
            stack.enter_context(_cut_weight(self._block, linear, mine))
            return
        module = self._block.modules[column]
        whole = [(tensor, tensor.data) for tensor in module.parameters()]
        stack.enter_context(_cut_weight(self._block, linear, mine))  # an adapter around it may read its weight
        cut = [(tensor, tensor.data) for tensor in module.parameters()]

        def before(module: nn.Module, args: Any) -> Any:
            for tensor, data in whole:
                tensor.data = data
            return (resolve(args[0]), *args[1:])

        def after(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            for tensor, data in cut:
                tensor.data = data
            # Features of the whole product, to the last bit: code behind it may round to a narrower type.
            return out.index_select(-1, mine.to(out.device))

        stack.enter_context(module.register_forward_pre_hook(before))
        stack.enter_context(module.register_forward_hook(after))
        stack.enter_context(changed_attribute(module, "out_features", len(mine)))

    def _check_readers(self, group: GroupLayout, stack: ExitStack) -> None:
        """Let the row, and norms over the whole width, check their input and read the whole block's; norms make a part of it."""

        def narrow(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out.chunk(self._tp, -1)[self._rank]

        for name in (group.row, *group.full_width):

            def swap(module: nn.Module, args: Any, name: str = name) -> Any:
                segments = group.segments if name == group.row else [self._wanted[name][0].shape[-1]]
                mine = part_of_segments(segments, self._rank, self._tp)
                return (self._compare(name, args[0], mine.to(args[0].device)), *args[1:])

            stack.enter_context(self._block.modules[name].register_forward_pre_hook(swap))
            if name != group.row:
                stack.enter_context(self._block.modules[name].register_forward_hook(narrow))

    def _compare(self, name: str, x: Tensor, mine: Tensor) -> Tensor:
        """The whole block's input of this call, if ``x`` is its features ``mine``."""
        at = self._counts[name]
        self._counts[name] += 1
        if at >= len(self._wanted[name]):
            raise _MismatchError(f"{name} runs more often than in the whole model")
        whole = self._wanted[name][at]
        part = whole.index_select(-1, mine)
        if x.shape != part.shape:
            raise _MismatchError(f"{name}: its input is {list(x.shape)}, expected {list(part.shape)}")
        if part.numel() and not is_equal(x, part, self._limits.get(part.dtype)):
            raise _MismatchError(f"{name}: its input is not this rank's part of the whole one's")
        return whole


class _MismatchError(Exception):
    """A module read something else than this rank's part, or ran more or less often than in the whole block."""


@contextmanager
def changed_attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    """While open, an attribute (a dotted path, too) has another value."""
    first = name.partition(".")[0]
    with ExitStack() as stack:
        if hasattr(module, first):
            stack.callback(setattr, module, first, getattr(module, first))
        else:
            stack.callback(delattr, module, first)
        write_attribute(module, name, value)
        yield


@contextmanager
def _own_attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """While open, the instance has an attribute of its own."""
    before = vars(module)
    had, old = name in before, before.get(name)
    before[name] = value
    try:
        yield
    finally:
        if had:
            before[name] = old
        else:
            del before[name]


def _cut_weight(block: Block, linear: Linear, mine: Tensor) -> AbstractContextManager[None]:
    """While open, a parameter that is multiplied past a linear has some of its out-features only; and a linear's bias too."""
    module = block.modules.get(linear.name)
    kind = linear_kind(module)
    out_dim = linear.out_dim if kind is None else int(kind == "in_out")
    parts: list[tuple[Tensor, int]] = [(block.model.get_parameter(linear.parameter), out_dim)]
    if module is not None and kind is not None and isinstance(module.bias, Tensor):
        parts.append((module.bias, 0))
    return other_data([(tensor, tensor.data.index_select(dim, mine.to(tensor.device))) for tensor, dim in parts])


def _edited(module: nn.Module, edit: Edit, tp: int, rank: int) -> AbstractContextManager[Any]:
    def part(tensor: Tensor) -> Tensor:
        size = tensor.shape[edit.dim] // tp
        return tensor.narrow(edit.dim, rank * size, size)

    if edit.kind == "set":
        return changed_attribute(module, str(edit.key), edit.value)
    if edit.kind == "flex":
        stack = ExitStack()
        for name, value in rebound(module, Heads(rank, tp)).items():
            stack.enter_context(_own_attribute(module, name, value))
        return stack
    if edit.kind == "tensor":
        tensor = getattr(module, str(edit.key))
        return other_data([(tensor, part(tensor.data).clone())])
    changed = functools.partial(stand_in, size=tp) if edit.kind == "narrow" else part

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where, value = find_argument(edit.module, edit.key, args, kwargs)
        return put_argument(where, changed(value), args, kwargs)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


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
    holders = (name.rpartition(".")[0] for name in (group.row, *group.columns))
    around = dict.fromkeys(one for holder in holders for one in outwards(holder) if inside(one, block.flow.name))
    return sorted(around, key=len, reverse=True)


def _holder(block: Block, group: GroupLayout) -> str:
    paths = [name.split(".")[:-1] for name in (group.row, *block.flow.columns[group.row])]
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    return ".".join(common)


def _parts(block: Block, group: GroupLayout) -> list[str]:
    """The modules in the block that the group's linears stand in; the block, if there is no other."""
    return [name for name in _modules_around(block, group) if name != block.flow.name] or [block.flow.name]


def _modules_in(block: Block, group: GroupLayout) -> list[str]:
    """The modules around the group's linears, and those in them."""
    around, parts = _modules_around(block, group), _parts(block, group)
    return [*around, *(name for name in block.modules if name not in around and any(inside(name, part) for part in parts))]


def _candidates(block: Block, groups: Sequence[GroupLayout], tp: int) -> list[Edit]:
    """Edits that may be needed, the likeliest first: attributes, then the width of arguments, tensors and arguments."""
    shares = _local_numbers(block, groups, tp)
    group, columns = groups[-1], block.flow.columns[groups[-1].row]
    edits: list[Edit] = []
    parts = _parts(block, group)
    for name in _modules_in(block, group):
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
    """The smallest set of edits that the last group needs beside ``edits``, the others'; a CantInferError if none will do."""
    norms = [edit for edit in _batch_norms(block, groups[-1], tp) if edit not in edits]
    edits = [*edits, *norms]
    # Whether functions read the head an example may not show, so that they are given the right one wherever that can be.
    flex = [one for one in _flex(block, groups[-1]) if one not in edits]
    if flex and rehearse(block, groups, tp, [*edits, *flex]) is None:
        return [*norms, *flex]
    first = rehearse(block, groups, tp, edits)
    if first is None:
        return norms
    together = [*_depthwise(block, groups[-1], tp), *_beside_columns(block, groups[-1], tp), *flex]
    candidates = [edit for edit in _candidates(block, groups, tp) if edit not in edits]
    near = [edit for edit in candidates if inside(edit.module, _holder(block, groups[-1]))]
    tries = chain(islice(_tries(near, together), _MAX_TRIES // 2) if near != candidates else (), _tries(candidates, together))
    for chosen in islice(tries, _MAX_TRIES):
        if rehearse(block, groups, tp, [*edits, *chosen]) is None:
            heads = [one for one in chosen if one in flex]
            return [*norms, *heads, *_needed(block, groups, tp, [*edits, *heads], [one for one in chosen if one not in flex])]
    row = groups[-1].row
    tried = ", ".join(edit.shown for edit in candidates[:5]) + (", ..." if len(candidates) > 5 else "") or "none"
    raise CantInferError(
        f"{row}: with its columns cut for one rank of tp={tp} the forward goes wrong ({first}), and no change of what could "
        f"count heads or have a head dim mends it (found: {tried}). Are head counts written into the forward as numbers, or is "
        "there a module for each head?"
    )


def _flex(block: Block, group: GroupLayout) -> list[Edit]:
    """Edits for the calls of FlexAttention around columns that are dealt out by heads."""
    if group.units == group.features:
        return []
    return [Edit("flex", name, "") for name in _modules_in(block, group) if calls_flex(block.modules[name])]


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
        [()] if together else [], single, joint, *(combinations(candidates, size) for size in range(2, len(candidates) + 1))
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
