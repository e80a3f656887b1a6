"""Usage of one training step: the memory that lives at each moment, the products, the bytes moved and the collectives, by block."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_seqpar.context.seq_part import local_of
from lightning_seqpar.distributed.autograd import in_backward, is_higher_order, storage_id
from lightning_seqpar.distributed.counters import Traffic
from lightning_seqpar.topology.process_groups import ParallelGroups


@dataclass
class Segment:
    """Usage between two moments of a step: of the forward or the backward of one block, or of what lies around the blocks.

    Attributes:
        block: name of the block; ``front`` and ``behind`` for what runs before the first block and after the last one.
        is_backward: whether the backward runs.
        most: the most bytes of live activations at once, beside those at the begin; gradients of parameters are not among them.
        most_growing: the same with the gradients that the segment makes among them.
        left: by how many bytes of activations more live at its end than at its begin; less than 0 in a backward.
        gradient_bytes: of the gradients of parameters that it makes.
        gradients: names of these parameters.
        products: how often a matrix product or an attention runs, by ``(is_attention, flops, bytes)``.
        moved: bytes that all other operations read and write.
        operations: number of operations that the host starts.
        collectives: number of collectives by ``(axes, name, bytes given)``.
    """

    block: str
    is_backward: bool
    most: int = 0
    most_growing: int = 0
    left: int = 0
    gradient_bytes: int = 0
    gradients: frozenset[str] = frozenset()
    products: Counter[tuple[bool, int, int]] = field(default_factory=Counter)
    moved: int = 0
    operations: int = 0
    collectives: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def of_block(self, name: str) -> Segment:
        """The same of another block of the kind."""
        renamed = frozenset(name + gradient.removeprefix(self.block) for gradient in self.gradients)
        return replace(self, block=name, gradients=renamed)


FRONT = "front"
BEHIND = "behind"

_FREE = frozenset(("detach", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "alias", "new_empty_strided"))
"""Operations that move nothing, beside views."""


def _of_groups(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """Flops of a grouped product: each row of one operand meets one matrix of the other, or one group of its rows."""
    return 2 * a.numel() // (a.shape[0] if a.ndim == 3 else 1) * b.shape[-1]


_FORMULAS = {torch.ops.aten._grouped_mm: _of_groups, **flop_registry}


class StepUsage(Traffic):
    """Records :class:`Segment` s while one forward and its backward run under it, on tensors with or without memory.

    Args:
        excluded: tensors whose storages are no activations: parameters, buffers, the batch.
        groups: the groups by whose axes collectives are told apart.
    """

    def __init__(self, excluded: Iterable[Tensor], groups: ParallelGroups | None) -> None:
        super().__init__()
        self._known = {storage_id(x): 0 for x in excluded}
        self._live = self._at_begin = 0
        self.segments = [Segment(FRONT, False)]
        self.activation: dict[str, int] = {}  # bytes of what each block returns
        self._groups = groups
        self._axes: dict[int, str] = {}

    def watch(self, model: nn.Module, blocks: Sequence[str]) -> ExitStack:
        """A context in which the blocks of ``model`` begin and end segments, and gradients are told from activations."""
        hooks = ExitStack()
        for at, name in enumerate(blocks):
            block = model.get_submodule(name)
            handles = [
                block.register_forward_pre_hook(partial(self._enter, name, at == 0), with_kwargs=True, prepend=True),
                block.register_forward_hook(partial(self._leave, name, at == len(blocks) - 1)),
            ]
            for handle in handles:
                hooks.callback(handle.remove)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hooks.callback(parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name)).remove)
        return hooks

    def begin_backward(self) -> None:
        """Begins the segment of the loss's backward."""
        self._begin(BEHIND, True)

    def finish(self) -> list[Segment]:
        """The segments, ended."""
        self.segments[-1].left = self._live - self._at_begin
        return self.segments

    def _begin(self, block: str, is_backward: bool) -> None:
        last = self.segments[-1]
        if (last.block, last.is_backward) == (block, is_backward):
            return
        last.left, self._at_begin = self._live - self._at_begin, self._live
        self.segments.append(Segment(block, is_backward))

    def _enter(self, name: str, is_first: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward():  # the block runs again
            return
        self._begin(name, False)
        for x in (*args, *kwargs.values()) if is_first else ():
            if isinstance(x, Tensor) and x.requires_grad:  # its gradient is made when the block's backward has ended
                x.register_hook(partial(self._after_backward, FRONT))
                break

    def _leave(self, name: str, is_last: bool, module: nn.Module, args: Any, out: Any) -> None:
        if in_backward():
            return
        x = out[0] if isinstance(out, tuple) and out else out
        if isinstance(x, Tensor):
            self.activation[name] = local_of(x).nbytes
            if x.requires_grad:
                x.register_hook(partial(self._after_backward, name))
        if is_last:
            self._begin(BEHIND, False)

    def _after_backward(self, block: str, grad: Tensor) -> None:
        self._begin(block, True)

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        """Counts a gradient as such, once it is in its parameter."""
        assert parameter.grad is not None
        segment = self.segments[-1]
        segment.gradients |= {name}
        key = storage_id(parameter.grad)
        if held := self._known.get(key, 0):
            self._known[key] = 0
            self._live -= held
            segment.gradient_bytes += held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_higher_order(func):
            return func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            before = dict(self.bytes)
            out = super().__torch_dispatch__(func, types, args, kwargs)
            self._communicated(args, before)
        else:
            out = func(*args, **(kwargs or {}))
        self._computed(func, args, kwargs or {}, out)
        return out

    def _communicated(self, args: Any, before: dict[str, int]) -> None:
        axes = next((self._axes_of(x) for x in args if type(x).__name__ == "ScriptObject" and "ProcessGroup" in str(x)), "")
        for name, count in self.bytes.items():
            if more := count - before.get(name, 0):
                self.segments[-1].collectives[axes, name, more] += 1

    def _axes_of(self, boxed: Any) -> str:
        group = dist.ProcessGroup.unbox(boxed)
        return "" if self._groups is None else self._groups.axes_of(group)

    def _computed(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        segment = self.segments[-1]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.device.type != "meta"]
        if not func.is_view and func.overloadpacket.__name__ not in _FREE:
            segment.operations += 1
            size = sum(x.nbytes for x in made)
            size += sum(x.nbytes for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            if (formula := _FORMULAS.get(func.overloadpacket)) is not None:
                flops = int(formula(*args, **kwargs, out_val=out))
                segment.products["attention" in func.name(), flops, size] += 1
            elif func.namespace == "aten":
                segment.moved += size
        for x in made:
            self._keep(x)
        live = self._live - self._at_begin
        segment.most = max(segment.most, live)
        segment.most_growing = max(segment.most_growing, live + segment.gradient_bytes)

    def _keep(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage_id(storage)
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self._live += storage.nbytes()
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self._live -= self._known.pop(key)
