"""``offload: activations``: what the blocks keep for the backward lies on the CPU meanwhile, and comes back a block ahead.

Behind its operation the memory of a saved tensor is copied to pinned memory, on a stream of its own; on the device it is free when
the block has ended and the copy is made. When the backward of a block begins, what the one in front of it has kept is on its way.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.context.seq_part import places_of, plain_of, put_in
from lightning_seqpar.distributed.autograd import storage_id
from lightning_seqpar.distributed.counters import saved_counter

LEAST = 2**16
"""Bytes from which on memory is moved: statistics of norms and random states stay."""


class _Memory:
    """The memory of saved tensors, on the CPU."""

    def __init__(self, x: Tensor, stream: Any) -> None:
        self._device, self._stream = x.device, stream
        self._back: tuple[Tensor, Any] | None = None
        own = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        if stream is None:
            self._held = own.clone()
            return
        stream.wait_stream(torch.cuda.current_stream(x.device))
        self._held = torch.empty(own.shape, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(stream):
            self._held.copy_(own, non_blocking=True)
        own.record_stream(stream)

    def begin(self) -> None:
        """Begin to copy it back."""
        if self._stream is None:
            self._back = self._back or (self._held.clone(), None)
        elif self._back is None:
            with torch.cuda.stream(self._stream):
                back = torch.empty_like(self._held, device=self._device)
                back.copy_(self._held, non_blocking=True)
                done = torch.cuda.Event()
                done.record(self._stream)
            self._back = back, done

    def take(self) -> Tensor:
        """It on its device, for work of the current stream: bytes. It stays there until :meth:`leave`, and here with the graph."""
        self.begin()
        assert self._back is not None
        back, done = self._back
        if done is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(done)
            back.record_stream(current)
        return back

    def leave(self) -> None:
        """Nothing of it is asked for soon."""
        self._back = None


class _Call:
    """One call of a block: what it has kept, and the call in front of it."""

    def __init__(self, before: _Call | None) -> None:
        self.before, self.kept = before, dict[Any, _Memory]()
        self._behind: weakref.ref[_Call] | None = None
        self._sources: list[Tensor] = []  # until it ends, so that no other tensor gets the memory of one
        if before is not None:
            before._behind = weakref.ref(self)

    def keep(self, x: Tensor, stream: Any) -> tuple[_Memory, bool]:
        """The memory of a tensor, and whether it is new: what is saved twice is moved once."""
        key = storage_id(x), x._version
        is_new = key not in self.kept
        if is_new:
            self.kept[key] = _Memory(x, stream)
            self._sources.append(x)
        return self.kept[key], is_new

    def end(self) -> None:
        """The forward is over."""
        self._sources.clear()

    def fetch(self) -> None:
        """A tensor of it is asked for: at first that of the call behind it is not needed any more, and the one in front comes."""
        behind = None if self._behind is None else self._behind()
        before, self._behind, self.before = self.before, None, None
        for memory in () if behind is None else behind.kept.values():
            memory.leave()
        for memory in () if before is None else before.kept.values():
            memory.begin()


class ActivationOffload:
    """``ActivationOffload(blocks).attach()``: hooks on blocks, in the order in which they run.

    ``moved`` counts the bytes that went to the CPU. Parameters stay, and what has the shape of one: weights in another type
    (autocast) are made again in each step.
    """

    def __init__(self, blocks: Iterable[nn.Module], least: int | None = None) -> None:
        self._blocks, self._least = [*blocks], LEAST if least is None else least
        self._open: list[tuple[Any, _Call]] = []
        self._last: tuple[int, _Call] | None = None
        self._stream: Any = None
        self.moved = 0

    def attach(self) -> list[RemovableHandle]:
        """Register the hooks, inside of all others."""
        handles = []
        for at, block in enumerate(self._blocks):
            weights = {tuple(sorted(p.shape)) for p in block.parameters()}

            def enter(module: nn.Module, args: Any, at: int = at, weights: Any = weights) -> None:
                self._enter(at, weights)

            handles += [
                block.register_forward_pre_hook(enter),
                block.register_forward_hook(lambda module, args, out: self._leave(), always_call=True),
            ]
        return handles

    def _enter(self, at: int, weights: set[tuple[int, ...]]) -> None:
        before = self._last[1] if self._last is not None and self._last[0] < at else None
        call, count = _Call(before), saved_counter()
        self._last = at, call

        def pack(x: Tensor) -> Any:
            plain = plain_of(x)
            if self._stays(plain) or tuple(sorted(plain.shape)) in weights:
                if count is not None:  # somebody counts what is kept
                    count(x)
                return x
            if plain.is_cuda and self._stream is None:
                self._stream = torch.cuda.Stream(plain.device)
            memory, is_new = call.keep(plain, self._stream if plain.is_cuda else None)
            self.moved += plain.untyped_storage().nbytes() * is_new
            view = plain.dtype, plain.storage_offset(), plain.shape, plain.stride()
            return call, memory, view, places_of(x)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            call, memory, (dtype, *view), places = packed
            call.fetch()
            back = memory.take()
            return put_in(torch.empty(0, dtype=dtype, device=back.device).set_(back.untyped_storage(), *view), places)

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        self._open.append((hooks, call))

    def _stays(self, x: Tensor) -> bool:
        if type(x) is not Tensor or x.layout != torch.strided or x.is_conj() or x.is_neg() or isinstance(x._base, nn.Parameter):
            return True
        return x.untyped_storage().nbytes() < self._least

    def _leave(self) -> None:
        hooks, call = self._open.pop()
        hooks.__exit__(None, None, None)
        call.end()
