"""A module whose forward runs again in the backward, at once or in tiles: its inputs are kept, and nothing that it computes.

torch's own activation checkpoint (``torch.utils.checkpoint``) does it. It stands around the module's ``forward``, inside of its
hooks: what the region does where the module is entered and left happens once, and collectives, gathers and draws inside of it
run again as they ran. What the checkpoint can't know is given to it here: the length of the sequence that the call had, what was
gathered for the module (the shard is kept, and gathered again), and the draws of other generators than torch's.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_seqpar.context.seq_part import SeqPart, local_of
from lightning_seqpar.distributed.autograd import in_backward, is_of_checkpoint, saved_tensor_hooks, saved_tensor_hooks_allowed
from lightning_seqpar.distributed.counters import saved_counter
from lightning_seqpar.distributed.rng import HostDraws, drawn_apart
from lightning_seqpar.layout.attributes import ModelAttributes
from lightning_seqpar.region.products import kept_of
from lightning_seqpar.region.sequence_region import SequenceRegion


@dataclass
class RecomputeNotes:
    """What the recomputed modules of one model share."""

    asked: str  # the field of the configuration, for messages
    told: set[str] = field(default_factory=set)  # already

    def tell(self, what: str, sentence: str) -> None:
        """Warn, of each thing once, however many modules it concerns."""
        if what not in self.told:
            self.told.add(what)
            rank_zero_warn(f"lightning_seqpar: recompute={self.asked!r}: {sentence}")


class RecomputedForward:
    """Takes the place of a module's ``forward``; what it returns and the gradients are the same to the last bit.

    It keeps the arguments: of a block its activation's shard, ``[b, s/tp, h]``. Without gradients, inside an activation
    checkpoint of somebody else (which runs it again anyway) and in a recompute it runs the module as it is.
    """

    def __init__(
        self, module: nn.Module, name: str, notes: RecomputeNotes, region: SequenceRegion | None, *, stops_at_row: bool = False
    ) -> None:
        self.module, self.name, self.notes, self.region = module, name, notes, region
        self._stops_at_row = stops_at_row and region is not None
        # Of what the region does around the module, the gathers: they run again, so that the shard alone is kept.
        self.entries: list[Callable[..., Any]] = []
        self.closes: list[Callable[..., Any]] = []
        self.own = vars(module).get("forward")  # what somebody put on the instance in its class's place

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward)

    @property
    def _forward(self) -> Callable[..., Any]:
        """The module's own forward."""
        return self.own if self.own is not None else types.MethodType(type(self.module).forward, self.module)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, and the gathers around it."""
        out = None
        try:
            for entry in self.entries:
                args, kwargs = entry(self.module, args, kwargs)
            out = self._forward(*args, **kwargs)
        finally:
            for close in self.closes:
                given = close(self.module, args, out)
                out = out if given is None else given
        return out

    def _run_to_row(self, count: Any, *args: Any, **kwargs: Any) -> Any:
        """The same where it runs again: up to its row, which does not; ``count`` counts what is kept behind it."""
        assert self.region is not None
        frame = self.region.frames.current
        with ExitStack() as behind_row:
            outer, frame.span = frame.span, (behind_row, count, saved_tensor_hooks())
            try:
                return self._run(*args, **kwargs)
            finally:
                frame.span = outer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; ValueError if it changes a buffer or an argument of its own, which would be changed once more."""
        if not torch.is_grad_enabled() or not saved_tensor_hooks_allowed():
            return self._run(*args, **kwargs)
        # A reentrant checkpoint shows in the backward alone.
        if in_backward() or is_of_checkpoint(saved_tensor_hooks()):
            self.notes.tell(
                "a checkpoint",
                f"{self.name} runs inside an activation checkpoint of the model's own (gradient_checkpointing_enable?), which "
                "recomputes it already; there the strategy's own recompute steps aside",
            )
            return self._run(*args, **kwargs)
        args = tuple(self._without_cache(value) for value in args)
        kwargs = {key: self._without_cache(value) for key, value in kwargs.items()}
        before = {name: (buffer, buffer._version) for name, buffer in self.module.named_buffers()}
        sizes = _sizes((*args, *kwargs.values()))
        run = functools.partial(self._run_to_row, saved_counter()) if self._stops_at_row else self._run
        call = RecomputedCall(run, args, kwargs, self.region, ModelAttributes(self.module, tensors=True))
        out = checkpoint(call, *call.take_kept(), use_reentrant=False)
        self._check_buffers(before)
        if _sizes((*args, *kwargs.values())) != sizes:
            raise ValueError(
                f"recompute={self.notes.asked!r}: {self.name} adds to a list, set or dict that it is given, and a recompute would "
                f"add to it twice; {self._way_out}"
            )
        return out

    @property
    def _way_out(self) -> str:
        return "use recompute='none', and torch.utils.checkpoint in the model around parts that change nothing but what they return"

    def _without_cache(self, value: Any) -> Any:
        """An argument; None for an empty cache of keys and values (Hugging Face's), which training fills for nobody."""
        length = getattr(value, "get_seq_length", None)
        if length is None or not hasattr(value, "update") or isinstance(value, nn.Module):
            return value
        if (held := int(length())) > 0:  # the forward adds to it, and so would the recompute
            raise ValueError(
                f"recompute={self.notes.asked!r}: {self.name} is given a cache with keys and values of {held} tokens, and a "
                "recompute would add to it twice; train without past_key_values (a prefix of PEFT's among them), or use "
                "recompute='none'"
            )
        self.notes.tell(
            "a cache",
            f"{self.name} is given a cache of keys and values while it trains (use_cache=True), which a recompute would fill "
            "twice; blocks get none, and what the model returns of it is empty",
        )
        return None

    def _check_buffers(self, before: Mapping[str, tuple[Tensor, int]]) -> None:
        """Refuse a forward that changed a buffer in place; one that is made anew (a table that grows) is no state."""
        for name, (buffer, version) in before.items():
            if buffer._version != version:
                raise ValueError(
                    f"recompute={self.notes.asked!r}: {self.name}.{name}: the forward changes this buffer (statistics of a batch "
                    f"norm, a counter), and a recompute would change it twice; {self._way_out}"
                )


def _sizes(values: tuple[Any, ...]) -> list[int]:
    """The sizes of the lists, sets and dicts among some values."""
    return [len(value) for value in values if type(value) in (list, set, dict)]


class _Kept:
    """What stands for one tensor among a call's arguments, and how it is given to the module again.

    Of what a norm made that runs again the norm's input is kept.
    """

    def __init__(self, at: int, value: Tensor) -> None:
        self.at = at
        # Of a part of a sequence the tensor that this rank holds: somebody's saved-tensor hooks would not know the part again.
        self._place = value.place if isinstance(value, SeqPart) else None
        local = local_of(value)
        held, self._norm = kept_of(local)
        self.tensor: Tensor | None = held
        self._requires_grad = local.requires_grad

    def restore(self, kept: Tensor) -> Tensor:
        """The argument, made of what was kept of it."""
        # Without history: a hook that the module registers on it must not reach the graph of the forward.
        kept = kept.detach() if self._norm is None else self._norm.run(kept)
        kept.requires_grad_(self._requires_grad)
        return kept if self._place is None else SeqPart.wrap(kept, self._place)


class RecomputedCall:
    """One call of a recomputed module: called for the first time it is the forward, and after that a recompute.

    A step may set the module's attributes for each batch, and the recompute may come behind the next one's forward.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        region: SequenceRegion | None,
        attributes: ModelAttributes,
    ) -> None:
        self._forward, self._region = forward, region
        self._attributes, self._values = attributes, attributes.read()
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        found: dict[int, _Kept] = {}  # by the id of the argument: one that is passed twice is the same again
        self._args = tuple(self._note(value, found) for value in args)
        self._kwargs = {key: self._note(value, found) for key, value in kwargs.items()}
        self._kept = list(found.values())
        self._repeating: Callable[[], AbstractContextManager[None]] = nullcontext
        if region is not None:
            frame = region.frames.current
            self._repeating = functools.partial(region.frames.repeating, frame.record, frame.tokens)
        self._draws = HostDraws()

    def take_kept(self) -> list[Tensor]:
        """The tensors that a recompute is made of, handed over to the checkpoint."""
        tensors = []
        for kept in self._kept:
            assert kept.tensor is not None
            tensors.append(kept.tensor)
            kept.tensor = None
        return tensors

    def __call__(self, *kept: Tensor) -> Any:
        """Run the module, at first with its arguments, which are let go of then, and later with what was kept of them."""
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            out = self._forward(*args, **kwargs)
            self._draws.end()
            return out
        with self._repeating(), self._draws.again(), self._attributes.as_of(self._values):
            tensors = [item.restore(tensor) for item, tensor in zip(self._kept, kept, strict=True)]
            args = tuple(_given(value, tensors) for value in self._args)
            return self._forward(*args, **{key: _given(value, tensors) for key, value in self._kwargs.items()})

    def _note(self, value: Any, found: dict[int, _Kept]) -> Any:
        """An argument with its :class:`_Kept` in place of each tensor; lists, dicts and other objects are passed as they are."""
        if type(value) is tuple:
            return tuple(self._note(item, found) for item in value)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in found:
            found[id(value)] = _Kept(len(found), value)
        return found[id(value)]


def _given(value: Any, tensors: Sequence[Tensor]) -> Any:
    """An argument as :meth:`RecomputedCall._note` noted it, with the tensors in their places."""
    if type(value) is tuple:
        return tuple(_given(item, tensors) for item in value)
    return tensors[value.at] if isinstance(value, _Kept) else value


class TiledCall:
    """Takes the place of a module's call, hooks and collectives of the region included.

    ==========================  ======================  =================================
    tensor                      shape                   kept for the backward
    ==========================  ======================  =================================
    x                           ``[b, s/(cp·tp), h]``   itself
    a tile of it                ``[b, tile/tp, h]``     itself, a view of ``x``
    between columns and rows    ``[b, tile, f/tp]``     nothing
    the result                  as ``x``                by whoever reads it
    ==========================  ======================  =================================

    A tile is given to the module as if there were no more positions, on this rank and on those of cp. That is right for a
    module of each position by itself, which the self-check proves, in tiles of its own.
    One tensor goes in, another of the same positions comes out. A tile has so many ``tokens`` over all tensor-parallel ranks, a
    whole position of each sequence at least; there are ``least`` tiles, however few tokens there are.
    """

    def __init__(
        self, module: nn.Module, name: str, tokens: int, region: SequenceRegion | None, dim: int, least: int = 1
    ) -> None:
        self.module, self.name, self.tokens, self.region = module, name, tokens, region
        self._dim, self._least = dim, least

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on each tile; ValueError if it takes several tensors, or returns something else than an activation."""
        x = self._only_tensor(args, kwargs)
        local = local_of(x)
        if local.ndim not in (2, 3) or not self._is_tiled(local):
            return self.module._call_impl(*args, **kwargs)
        dim = self._dim if local.ndim == 3 else 0
        tiles = [self._run_tile(tile, x, args, kwargs) for tile in local.split(self._positions(local, dim), dim)]
        out = torch.cat(tiles, dim)
        return x.like(out) if isinstance(x, SeqPart) else out

    def _is_tiled(self, local: Tensor) -> bool:
        """Whether there is more than one tile here; outside of the blocks the region's own message is due."""
        if self.region is not None and self.region.sp:
            frames = self.region.frames
            if not (frames.active or frames.recomputes):
                return False
        dim = self._dim if local.ndim == 3 else 0
        return self._positions(local, dim) < local.shape[dim]

    def _positions(self, local: Tensor, dim: int) -> int:
        """How many of this rank's positions are in a tile."""
        ranks = self.region.size if self.region is not None and self.region.sp else 1
        others = local.shape[1 - dim] if local.ndim == 3 else 1
        least = -(-local.shape[dim] // self._least)
        return max(1, min(self.tokens // (ranks * others), least))

    def _only_tensor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        found = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(found) != 1:
            raise ValueError(
                f"tile_mlp={self.tokens}: {self.name} is called with {len(found)} tensors, and which of them is to be cut is not "
                "known; leave tile_mlp out"
            )
        return found[0]

    def _run_tile(self, tile: Tensor, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The module's result for a tile, ``[b, tile/tp, h]``."""
        args = tuple(tile if value is x else value for value in args)
        kwargs = {key: tile if value is x else value for key, value in kwargs.items()}
        if torch.is_grad_enabled() and saved_tensor_hooks_allowed():
            call = RecomputedCall(self._call(tile, x), args, kwargs, self.region, ModelAttributes(self.module, tensors=True))
            out = checkpoint(call, *call.take_kept(), use_reentrant=False)
        else:
            out = self._call(tile, x)(*args, **kwargs)
        if not isinstance(out, Tensor) or out.shape[:-1] != tile.shape[:-1]:
            what = f"a tensor of {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ValueError(
                f"tile_mlp={self.tokens}: {self.name} returns {what} for an input of {list(tile.shape)}, and such tiles can't be "
                "put together; leave tile_mlp out"
            )
        return out

    def _call(self, tile: Tensor, x: Tensor) -> Callable[..., Any]:
        """The module's own call, for which the tile's positions are all there are; ranks of cp draw apart for theirs."""
        shape, region, place = tile.shape, self.region, x.place.chunks.rank if isinstance(x, SeqPart) else None

        def run(*args: Any, **kwargs: Any) -> Any:
            args = tuple(map(_contiguous, args))
            kwargs = {key: _contiguous(value) for key, value in kwargs.items()}
            alone = nullcontext() if region is None else region.frames.alone(shape, is_shard=region.sp)
            with alone, nullcontext() if place is None else drawn_apart(place):
                return self.module._call_impl(*args, **kwargs)

        return run


def _contiguous(value: Any) -> Any:
    """An argument laid out as the module knows it; a tile of several sequences is a view with gaps."""
    return value.contiguous() if isinstance(value, Tensor) else value
