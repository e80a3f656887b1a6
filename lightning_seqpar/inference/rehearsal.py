"""Rehearsal: one block run as a rank would run it, with its linears cut down, on one process.

If the forward goes wrong or a row reads anything but this rank's part of its input, more than the linears must change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_seqpar.inference.dataflow import Linear
from lightning_seqpar.inference.feature_dependence import GroupLayout
from lightning_seqpar.inference.isolated_block import EQUAL, Block, is_equal, other_data
from lightning_seqpar.layout.attributes import write_attribute
from lightning_seqpar.layout.linear_kind import linear_kind
from lightning_seqpar.layout.stand_in import resolve, stand_in

_ROUNDED = 16 * torch.finfo(torch.float32).eps
"""The limit of float64 where a block computes a part in float32 (a norm, a softmax), whose last bits depend on the shapes."""


@dataclass(frozen=True)
class Edit:
    """One more thing that must change on a rank beside the linears.

    Its kind is ``set``: an attribute gets another value; ``tensor``: a parameter or buffer is cut along ``dim``; ``arg``: an
    argument is cut along ``dim``; ``given``: an argument comes from another block, so it is this rank's part already (the rehearsal
    cuts it); or ``narrow``: the module sees an argument of this rank's width, which only columns resolve.
    """

    kind: str
    module: str  # its name; for a tensor, of the one that owns it
    key: int | str  # the attribute, the tensor's own name, or the argument
    value: int = 0  # the attribute's new value
    dim: int = 0  # the tensor dim of the heads

    @property
    def shown(self) -> str:
        """The name that messages give it."""
        argument = self.kind in ("arg", "given")
        if self.kind == "narrow":
            return f"the width of argument {self.key!r} of {self.module}"
        return f"argument {self.key!r} of {self.module}" if argument else f"{self.module}.{self.key}"


def rehearse(block: Block, groups: Sequence[GroupLayout], tp: int, edits: Sequence[Edit]) -> str | None:
    """Run the block as each of ``tp`` ranks would; what goes wrong, or None.

    Each row's input must be exactly the rank's part of what it is in the whole block.
    """
    casts = _Casts()  # type: ignore[no-untyped-call]
    with casts:
        wanted = _inputs_of(block, [g.row for g in groups] + [n for g in groups for n in g.full_width])
    for rank in range(tp):
        try:
            with _Rehearsal(block, tp, rank, wanted, rounds=casts.to_float32).cut(groups, edits), torch.no_grad():
                args, kwargs, _ = block.inputs()
                block.run(args, kwargs)
        except _MismatchError as error:
            return str(error)
        except Exception as error:  # of the block's own code, which was made for other sizes
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def _inputs_of(block: Block, names: Sequence[str]) -> dict[str, list[Tensor]]:
    """The inputs of some modules in a run of the whole block, one for each call."""
    kept: dict[str, list[Tensor]] = {name: [] for name in names}
    with ExitStack() as stack, torch.no_grad():
        for name in kept:

            def keep(module: nn.Module, args: Any, name: str = name) -> None:
                kept[name].append(args[0])

            stack.enter_context(block.modules[name].register_forward_pre_hook(keep))
        args, kwargs, _ = block.inputs()
        block.run(args, kwargs)
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
                if count != len(self._wanted[name]):
                    times = len(self._wanted[name])
                    raise _MismatchError(f"{name} runs {count} times, in the whole model {times} times")

    def _cut_columns(self, group: GroupLayout, stack: ExitStack) -> None:
        """Let columns read the whole input and return this rank's features."""

        for column, layout in group.columns.items():
            mine = torch.cat([torch.arange(start, stop) for start, stop in layout.ranges[self._rank]])
            linear = self._block.flow.linears[column]
            if not linear.is_called:
                stack.enter_context(_cut_weight(self._block, linear, mine))
                continue
            module = self._block.modules[column]
            whole = [(tensor, tensor.data) for tensor in module.parameters()]
            stack.enter_context(_cut_weight(self._block, linear, mine))  # an adapter around it may read its weight
            cut = [(tensor, tensor.data) for tensor in module.parameters()]

            def before(module: nn.Module, args: Any, whole: Sequence[tuple[Tensor, Tensor]] = whole) -> Any:
                for tensor, data in whole:
                    tensor.data = data
                return (resolve(args[0]), *args[1:])

            def after(
                module: nn.Module,
                args: Any,
                out: Tensor,
                mine: Tensor = mine,
                cut: Sequence[tuple[Tensor, Tensor]] = cut,
            ) -> Tensor:
                for tensor, data in cut:
                    tensor.data = data
                # Features of the whole product, to the last bit: code behind it may round to a narrower type.
                return out.index_select(-1, mine.to(out.device))

            stack.enter_context(module.register_forward_pre_hook(before))
            stack.enter_context(module.register_forward_hook(after))
            stack.enter_context(changed_attribute(module, "out_features", len(mine)))

    def _check_readers(self, group: GroupLayout, stack: ExitStack) -> None:
        """Let the row, and norms over the whole width, check their input and read the whole block's; norms make a part of it."""
        for name in (group.row, *group.full_width):

            def swap(module: nn.Module, args: Any, name: str = name) -> Any:
                if name == group.row:
                    mine = group.part(self._rank, self._tp)
                else:
                    size = self._wanted[name][0].shape[-1] // self._tp
                    mine = torch.arange(self._rank * size, (self._rank + 1) * size)
                return (self._compare(name, args[0], mine.to(args[0].device)), *args[1:])

            stack.enter_context(self._block.modules[name].register_forward_pre_hook(swap))

        def narrow(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            width = out.shape[-1] // self._tp
            return out.narrow(-1, self._rank * width, width)

        for name in group.full_width:
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
    """While open, an edit holds on one rank."""

    def part(tensor: Tensor) -> Tensor:
        size = tensor.shape[edit.dim] // tp
        return tensor.narrow(edit.dim, rank * size, size)

    if edit.kind == "set":
        return changed_attribute(module, str(edit.key), edit.value)
    if edit.kind == "tensor":
        tensor = getattr(module, str(edit.key))
        return other_data([(tensor, part(tensor.data).clone())])
    changed = functools.partial(stand_in, size=tp) if edit.kind == "narrow" else part

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(edit.key, str):
            return args, {**kwargs, edit.key: changed(kwargs[edit.key])}
        return (*args[: edit.key], changed(args[edit.key]), *args[edit.key + 1 :]), kwargs

    return module.register_forward_pre_hook(hook, with_kwargs=True)
