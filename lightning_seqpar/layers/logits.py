"""Logits that stay sharded by vocabulary through a loss, and are whole for everything else, after arXiv 1909.08053."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from lightning_seqpar.collectives import all_gather, gather_replicated_from_sequence_parallel_region, passes_none
from lightning_seqpar.layers.shard import Shard

AT_ONCE = 2**22
"""Logits of which a loss makes the softmax at once: 16 MiB in float32."""


class _Held:
    """A rank's part of logits, as the head made it; read as ``dtype``, which holds every number of it."""

    def __init__(self, base: Tensor, dtype: torch.dtype) -> None:
        self.tensors: tuple[Tensor, Tensor | None, Tensor | None] = (base, None, None)
        self.dtype, self.chunk = dtype, 0

    def read(self) -> Tensor:
        """The part."""
        return self.tensors[0].to(self.dtype)

    def of_tokens(self, change: Callable[[Tensor], Tensor]) -> _Held:
        """The part after something was done to the tokens: a reshape, a choice among them."""
        return _Held(change(self.tensors[0]), self.dtype)

    def cast(self, dtype: torch.dtype) -> _Held:
        """The part, read as another type."""
        return _Held(self.tensors[0], dtype)

    def detached(self) -> _Held:
        """The part, of no graph."""
        return self.of_tokens(lambda x: x.detach())

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(self.tensors[0].shape)


class _Product(_Held):
    """A rank's part that is not made yet: what the head's product would make it of, ``chunk`` tokens at a time."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, compute: torch.dtype, chunk: int
    ) -> None:
        self.tensors = (x, weight, bias)
        self.dtype, self.compute, self.chunk = dtype, compute, chunk
        self._versions = self._read_versions()

    def _read_versions(self) -> list[int]:
        """Of tensors that have one: not those of an inference."""
        return [one._version for one in self.tensors if one is not None and not one.is_inference()]

    def check(self) -> None:
        """What the head would read must be what it read when it was called.

        Raises:
            RuntimeError: if an optimizer has stepped since.
        """
        if self._read_versions() != self._versions:
            raise RuntimeError(
                "logits that were not made yet (loss_chunk) are read after the head's weight or its input has changed, and would "
                "be other logits; read them before the optimizer steps (logits.whole() keeps all, on all ranks), or leave "
                "loss_chunk out"
            )

    def read(self) -> Tensor:
        self.check()
        x, weight, bias = self.tensors
        assert weight is not None
        with torch.autocast(x.device.type, enabled=False):
            made = F.linear(
                x.to(self.compute), weight.to(self.compute), None if bias is None else bias.to(self.compute)
            )
        return made.to(self.dtype)

    def of_tokens(self, change: Callable[[Tensor], Tensor]) -> _Product:
        x, weight, bias = self.tensors
        assert weight is not None
        self.check()
        return _Product(change(x), weight, bias, self.dtype, self.compute, self.chunk)

    def detached(self) -> _Product:
        x, weight, bias = self.tensors
        assert weight is not None
        self.check()
        return _Product(
            x.detach(), weight.detach(), None if bias is None else bias.detach(), self.dtype, self.compute, self.chunk
        )

    def cast(self, dtype: torch.dtype) -> _Product:
        x, weight, bias = self.tensors
        assert weight is not None
        self.check()
        return _Product(x, weight, bias, dtype, self.compute, self.chunk)

    @property
    def shape(self) -> tuple[int, ...]:
        x, weight, _ = self.tensors
        assert weight is not None
        return (*x.shape[:-1], weight.shape[0])


class ShardedLogits(Tensor):
    """A tensor ``[..., v]`` of which every rank holds ``[..., ceil(v/tp)]``.

    Casts, scalings, reshapes and slices that leave the last dim alone keep it sharded, and ``F.cross_entropy`` on ``[n, v]``
    runs on the shards; every other operation gathers first, on all ranks of the group: what only some ranks ask of it waits
    for the others. A cast to a wider type costs nothing until somebody reads it: the loss widens a few tokens at a time.
    """

    _part: _Held
    _shard: Shard
    _group: ProcessGroup
    _rank: int

    @staticmethod
    def wrap(local: Tensor, shard: Shard, group: ProcessGroup, rank: int) -> ShardedLogits:
        """The whole logits that ``local`` is this rank's part of."""
        return ShardedLogits._wrap(_Held(local, local.dtype), shard, group, rank)

    @staticmethod
    def product(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk: int,
        shard: Shard,
        group: ProcessGroup,
        rank: int,
    ) -> ShardedLogits:
        """The logits ``x Wᵀ + b``, which ``F.cross_entropy`` makes ``chunk`` tokens at a time, and nobody else keeps."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return ShardedLogits._wrap(_Product(x, weight, bias, dtype, dtype, chunk), shard, group, rank)

    @staticmethod
    def _wrap(part: _Held, shard: Shard, group: ProcessGroup, rank: int) -> ShardedLogits:
        if not torch.is_grad_enabled():  # whoever reads it where gradients are made must not teach the head
            part = part.detached()
        out: ShardedLogits = _Wrap.apply(*part.tensors, part, shard, group, rank)  # type: ignore[no-untyped-call]
        out._part = part
        return out

    @staticmethod
    def _make(part: _Held, shard: Shard, group: ProcessGroup, rank: int) -> ShardedLogits:
        out: ShardedLogits = Tensor._make_wrapper_subclass(
            ShardedLogits, (*part.shape[:-1], shard.length), dtype=part.dtype, device=part.tensors[0].device
        )
        out._part, out._shard, out._group, out._rank = part, shard, group, rank
        return out

    @property
    def local(self) -> Tensor:
        """This rank's part, with a gradient; columns behind the vocabulary's end are padding."""
        part = self._part
        if isinstance(part, _Product):
            made = part.read()
            with torch._C.DisableTorchFunctionSubclass():
                graph = self.requires_grad
            # A metric may read under no_grad what the loss will read with a graph.
            if made.requires_grad or not (graph or made.is_inference()):
                self._part = _Held(made, made.dtype)  # the next reader has it
            return made
        return part.read()

    def whole(self) -> Tensor:
        """The whole logits as a plain tensor; collective over tp."""
        local = self.local
        return gather_replicated_from_sequence_parallel_region(local, local.ndim - 1, self._group, self._shard.length)

    def with_local(self, local: Tensor) -> ShardedLogits:
        """Logits of the same vocabulary with another local part."""
        return ShardedLogits.wrap(local, self._shard, self._group, self._rank)

    def with_part(self, part: _Held) -> ShardedLogits:
        """The same for a part that is not read yet."""
        return ShardedLogits._wrap(part, self._shard, self._group, self._rank)

    @property
    def columns(self) -> tuple[int, int]:
        """Where this rank's part of the vocabulary begins and ends."""
        ((start, stop),) = self._shard.ranges[self._rank]
        return start, stop

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """What it is, without a collective."""
        return f"ShardedLogits(shape={list(self.shape)}, rank {self._rank} of tp={self._group.size()})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Keep the shards, use them, or gather: above autograd."""
        kwargs = dict(kwargs or {})
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _REFUSED or _writes(func, args, kwargs):
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} of logits that are sharded by vocabulary would change a copy: they are whole "
                "only where they are used. Write logits = logits.whole() first (on all ranks), or the same out of place "
                "(logits = logits.masked_fill(...)), or leave the head whole in the plan"
            )
        tree_map_only(ShardedLogits, _check_graph, (args, kwargs))
        keep = _KEEPING.get(func)
        if keep is not None and args and isinstance(args[0], ShardedLogits):
            kept = keep(func, args[0], args[1:], kwargs)
            if kept is not None:
                return kept
        plain_args, plain_kwargs = tree_map_only(ShardedLogits, lambda logits: logits.whole(), (args, kwargs))
        return func(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What reaches it below autograd (an ``autograd.Function`` of someone's) reads it whole."""

        def read(logits: ShardedLogits) -> Tensor:
            return all_gather(logits.local.detach(), logits.local.ndim - 1, logits._group, logits._shard.length)

        plain_args, plain_kwargs = tree_map_only(ShardedLogits, read, (args, dict(kwargs or {})))
        return func(*plain_args, **plain_kwargs)


def are_known(x: Tensor) -> bool:
    """Whether numbers are at hand: on a device it would wait for them, and fake tensors have none."""
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)


def whole_logits(x: Tensor) -> Tensor:
    """Logits that are sharded, whole as a plain tensor (collective over tp); any other tensor as it is."""
    return x.whole() if isinstance(x, ShardedLogits) else x


def _check_graph(logits: ShardedLogits) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        node = logits.grad_fn
    if node is not None and node.name() == "CheckpointFunctionBackward":
        raise RuntimeError(
            "logits that are sharded by vocabulary came out of a reentrant activation checkpoint, and their parts have no graph: "
            "what the loss says would not reach the model. Write checkpoint(..., use_reentrant=False), or take the head out of it"
        )


class _Wrap(torch.autograd.Function):
    """Stands for a gather in the graph; its gradient is the same on all ranks, of which each takes its part."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        part: _Held,
        shard: Shard,
        group: ProcessGroup,
        rank: int,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.start, ctx.width = shard.ranges[rank][0], part.shape[-1]
        ctx.is_product, ctx.dtype = weight is not None, x.dtype
        if ctx.is_product:
            ctx.save_for_backward(x, weight)
        detached = part.of_tokens(lambda x: x.detach()) if weight is None else part
        return ShardedLogits._make(detached, shard, group, rank)

    @staticmethod
    @passes_none
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        start, stop = ctx.start
        own = F.pad(grad[..., start:stop], (0, ctx.width - (stop - start)))
        if not ctx.is_product:
            return own.to(ctx.dtype), *([None] * 6)
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        flat = own.flatten(0, -2)
        grad_x = (own @ weight.to(own.dtype)).to(x.dtype) if needs[0] else None
        grad_w = (flat.t() @ x.flatten(0, -2).to(own.dtype)).to(weight.dtype) if needs[1] else None
        return grad_x, grad_w, flat.sum(0) if needs[2] else None, *([None] * 4)


def _writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call changes logits in place."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or kwargs.get("inplace") is True
    return (in_place and bool(args) and isinstance(args[0], ShardedLogits)) or isinstance(
        kwargs.get("out"), ShardedLogits
    )


_IN_PLACE = ("__setitem__", "__set__", "__delete__", *(f"__i{name}__" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul",
)))  # fmt: skip


# ---- what keeps the shards -------------------------------------------------------------------------------------


def _same(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies."""
    return logits.with_local(func(logits.local, *args, **kwargs))


def _cast(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Casts; those that lose nothing wait until the numbers are read, those to another device, where no group is, gather."""
    if not any(isinstance(value, ShardedLogits) for value in (*args, *kwargs.values())):
        like = func(torch.empty((), dtype=logits.dtype, device=logits.device), *args, **kwargs)
        if like.device != logits.device:
            return None
        wider = like.is_floating_point() and torch.promote_types(like.dtype, logits.dtype) == like.dtype
        if wider and not kwargs.get("copy"):
            return logits.with_part(logits._part.cast(like.dtype))
    return logits.with_local(func(logits.local, *args, **kwargs))


def _scaled(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is done to each number by itself: a temperature, a soft cap."""
    if any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
        return None
    return logits.with_local(func(logits.local, *args, **kwargs))


def _reshape(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A reshape whose last dim stays the vocabulary."""
    shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != logits.shape[-1]:
        return None
    return logits.with_part(logits._part.of_tokens(lambda x: x.reshape(*shape[:-1], x.shape[-1])))


def _view(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and isinstance(args[0], torch.dtype):
        return None
    return _reshape(func, logits, args, kwargs)


def _index(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Some of the tokens."""
    (index,) = args
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_dims(item) for item in items)
    at = next((number for number, item in enumerate(items) if item is Ellipsis), None)
    if at is not None:
        items[at : at + 1] = [slice(None)] * (logits.ndim - used)
        used = logits.ndim
    if used > logits.ndim or (used == logits.ndim and items[-1] != slice(None)):
        return None
    return logits.with_part(logits._part.of_tokens(lambda x: x[tuple(items)]))


def _dims(item: Any) -> int:
    """How many dims one part of an index uses."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _loss(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target = given["target"]
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None  # the old way to write a reduction
    if logits.ndim != 2 or isinstance(target, ShardedLogits) or target.is_floating_point():
        return None  # classes in another dim, or soft targets
    return cross_entropy(
        logits,
        target,
        weight=given.get("weight"),
        ignore_index=given.get("ignore_index", -100),
        reduction=given.get("reduction", "mean"),
        label_smoothing=given.get("label_smoothing", 0.0),
    )


_CASTS = (Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type_as)
_COPIES = (Tensor.clone, Tensor.detach, Tensor.contiguous, torch.clone, torch.detach)
_RESHAPES = (Tensor.reshape, Tensor.flatten, Tensor.squeeze, Tensor.unsqueeze, Tensor.unflatten)
_SCALINGS = (
    Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__, Tensor.tanh, torch.mul, torch.div, torch.tanh,
    Tensor.__neg__, Tensor.neg,
)  # fmt: skip
_KEEPING: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_SCALINGS, _scaled),
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(_COPIES, _same),
    **dict.fromkeys(
        (*_RESHAPES, torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze, torch.unflatten), _reshape
    ),
    Tensor.view: _view,
    Tensor.__getitem__: _index,
    F.cross_entropy: _loss,
}
_FACTS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in (
            "shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout", "is_cuda", "is_cpu", "is_meta",
            "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xla", "itemsize", "nbytes", "_version",
        )),
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.is_floating_point,
        Tensor.is_complex, Tensor.get_device, Tensor.__len__, Tensor.__hash__, Tensor.is_contiguous, torch.is_floating_point,
        torch.numel, torch.is_tensor,
    ]
)  # fmt: skip
_REFUSED = frozenset([Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_, Tensor.share_memory_])


# ---- the loss --------------------------------------------------------------------------------------------------


def cross_entropy(
    logits: ShardedLogits,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of logits ``[n, v]`` that are sharded by vocabulary, for class targets ``[n]``.

    One gather over tp, of ``[3, n]`` numbers a rank (4 with smoothing); none in the backward. Kept are the logits as the
    head made them, or, where it has not made them (``loss_chunk``), what it would make them of.

    Raises:
        ValueError: for an unknown reduction, or targets of another length.
        IndexError: for a target outside the vocabulary (on the CPU; as in torch, a device assertion elsewhere).
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction; write 'mean', 'sum' or 'none'")
    if target.shape != logits.shape[:1]:
        raise ValueError(
            f"Expected input batch_size ({logits.shape[0]}) to match target batch_size ({list(target.shape)})."
        )
    part = logits._part
    if torch.is_autocast_enabled(logits.device.type):
        part = part.cast(torch.promote_types(part.dtype, torch.float32))
    valid = target != ignore_index
    inside = ~valid | ((target >= 0) & (target < logits.shape[-1]))
    if are_known(inside):
        if not bool(inside.all()):
            raise IndexError(f"Target {int(target[~inside][0])} is out of bounds.")
    else:
        torch._assert_async(inside.all(), "a target lies outside the vocabulary")
    losses: Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        *part.tensors, part, target, valid, weight, label_smoothing, logits._shard, logits._rank, logits._group
    )
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    counts = valid.to(losses.dtype) if weight is None else _taken(weight.to(losses.dtype), target, valid)
    return losses.sum() / counts.sum()


def _taken(weight: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    return weight[target.masked_fill(~valid, 0)] * valid


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Losses ``[n]`` from this rank's logits ``[n, v/tp]``, or from ``x [n, h]`` and the head's ``weight [v/tp, h]``.

    Saved is what is given; softmax and gradient are made a few tokens at a time, in float32 at least.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Tensor | None,
        bias: Tensor | None,
        part: _Held,
        target: Tensor,
        valid: Tensor,
        weight: Tensor | None,
        smoothing: float,
        shard: Shard,
        rank: int,
        group: ProcessGroup,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        if isinstance(part, _Product):
            part.check()
        how = (part.dtype, part.compute if isinstance(part, _Product) else x.dtype, part.chunk)
        rows = _Rows(x, head, bias, how, shard, rank)
        ((start, stop),) = shard.ranges[rank]
        wide, classes = rows.wide, shard.length
        weights = None if weight is None else weight.to(wide)
        mine = valid & (target >= start) & (target < stop)
        at = (target - start).masked_fill(~mine, 0)
        told = x.new_zeros(4 if smoothing else 3, len(target), dtype=wide)
        told[0].fill_(float("-inf"))
        for some in rows.chunks if stop > start else ():
            z = rows.logits(some)
            largest = z.amax(-1)
            shift = largest.masked_fill(largest == float("-inf"), 0.0)  # all of this rank's are masked out
            z = z.sub_(shift.unsqueeze(-1))
            told[0, some] = largest
            told[2, some] = z.gather(-1, at[some].unsqueeze(-1)).squeeze(-1).masked_fill(~mine[some], 0.0)
            if smoothing:
                told[3, some] = z.sum(-1) if weights is None else z @ weights[start:stop]
            told[1, some] = z.exp_().sum(-1)
        own = valid.to(wide) if weights is None else _taken(weights, target, valid)
        # [tp, 3 or 4, n]: every rank puts them together alike.
        parts = all_gather(told.unsqueeze(0), 0, group)
        top = parts[:, 0].amax(0)
        below = (parts[:, 0] - top).masked_fill(parts[:, 0] == float("-inf"), 0.0)
        total = (parts[:, 1] * below.exp()).sum(0)
        owner = _owners(shard, target.masked_fill(~valid, 0))
        score = (parts[:, 2] + below).gather(0, owner.unsqueeze(0)).squeeze(0)
        losses: Tensor = (1 - smoothing) * own * (total.log() - score)
        if smoothing:
            heavy = _sums(shard, weights, parts)
            smooth = (parts[:, 3] + heavy.unsqueeze(-1) * below).sum(0)
            losses = losses + smoothing / classes * (heavy.sum() * total.log() - smooth) * valid
            ctx.heavy = heavy.sum()
        ctx.save_for_backward(x, head, bias, target, valid, own, weights, top, total)
        ctx.rows, ctx.smoothing, ctx.classes = (how, shard, rank), smoothing, classes
        return losses.to(part.dtype)

    @staticmethod
    @passes_none
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, head, bias, target, valid, own, weights, top, total = ctx.saved_tensors
        how, shard, rank = ctx.rows
        rows = _Rows(x, head, bias, how, shard, rank)
        ((start, stop),), smoothing = shard.ranges[rank], ctx.smoothing
        mine = valid & (target >= start) & (target < stop)
        at = (target - start).masked_fill(~mine, 0)
        scale = grad.to(rows.wide).masked_fill(~valid, 0)  # infinite where all targets are ignored
        hard = (1 - smoothing) * own * scale
        soft = smoothing / ctx.classes * scale
        level = (hard + soft * ctx.heavy if smoothing else hard) / total
        out = rows.collect(ctx.needs_input_grad)
        for some in rows.chunks if stop > start else ():
            z = rows.logits(some).sub_(top[some].unsqueeze(-1)).exp_().mul_(level[some].unsqueeze(-1))
            z.scatter_add_(-1, at[some].unsqueeze(-1), -(hard * mine)[some].unsqueeze(-1))
            if smoothing:
                z -= soft[some].unsqueeze(-1) * (1.0 if weights is None else weights[start:stop])
            out.add(some, z)
        return *out.grads, *([None] * 8)


class _Rows:
    """A rank's logits, some tokens at a time, widened."""

    def __init__(
        self,
        x: Tensor,
        head: Tensor | None,
        bias: Tensor | None,
        how: tuple[torch.dtype, torch.dtype, int],
        shard: Shard,
        rank: int,
    ) -> None:
        dtype, self._compute, chunk = how
        ((start, stop),) = shard.ranges[rank]
        self.wide = torch.promote_types(dtype, torch.float32)
        self.count = stop - start
        self._x, self._head, self._bias = x, head, bias
        size = chunk or max(1, AT_ONCE // max(1, self.count))
        self.chunks = [slice(at, at + size) for at in range(0, len(x), size)]

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._compute)

    def logits(self, some: slice) -> Tensor:
        """``[c, v/tp]`` without padding, in memory of its own."""
        if self._head is None:
            given = self._x[some, : self.count]
            return given.to(self.wide, copy=True)
        with torch.autocast(self._x.device.type, enabled=False):
            bias = None if self._bias is None else self._cast(self._bias[: self.count])
            made = F.linear(self._cast(self._x[some]), self._cast(self._head[: self.count]), bias)
            return made.to(self.wide)

    def collect(self, needs: tuple[bool, ...]) -> _Grads:
        """Where the gradients are put together."""
        return _Grads(self, needs)


class _Grads:
    """The gradients of what a loss was given: of logits, or of the head's input, weight and bias."""

    def __init__(self, rows: _Rows, needs: tuple[bool, ...]) -> None:
        self._rows = rows
        x, head, bias = rows._x, rows._head, rows._bias
        self.grads: list[Tensor | None] = [torch.zeros_like(x) if needs[0] else None, None, None]
        # Sums over chunks: in float32 at least, whatever the weight is.
        if head is not None and needs[1]:
            self.grads[1] = torch.zeros_like(head, dtype=torch.promote_types(head.dtype, torch.float32))
        if bias is not None and needs[2]:
            self.grads[2] = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))

    def add(self, some: slice, z: Tensor) -> None:
        """The gradient ``[c, v/tp]`` of some tokens' logits."""
        rows, (of_x, of_head, of_bias) = self._rows, self.grads
        if rows._head is None:
            if of_x is not None:
                of_x[some, : rows.count] = z.to(of_x.dtype)
            return
        with torch.autocast(z.device.type, enabled=False):
            d = rows._cast(z)
            if of_x is not None:
                of_x[some] = (d @ rows._cast(rows._head[: rows.count])).to(of_x.dtype)
            if of_head is not None:
                of_head[: rows.count] += d.t() @ rows._cast(rows._x[some])
            if of_bias is not None:
                of_bias[: rows.count] += d.sum(0)


def _owners(shard: Shard, target: Tensor) -> Tensor:
    """The rank that holds each target's column, ``[n]``."""
    stops = torch.tensor([stop for ((_, stop),) in shard.ranges], device=target.device)
    return torch.searchsorted(stops, target, right=True)


def _sums(shard: Shard, weights: Tensor | None, like: Tensor) -> Tensor:
    """The sum of the class weights in each rank's columns, ``[tp]``."""
    columns = [slice(start, stop) for ((start, stop),) in shard.ranges]
    if weights is None:
        return like.new_tensor([float(one.stop - one.start) for one in columns])
    return torch.stack([weights[one].sum() for one in columns])
