"""Logits that stay sharded by vocabulary through a loss, and are whole for everything else, after arXiv 1909.08053."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from lightning_seqpar.distributed.autograd import is_node_of, without_subclasses
from lightning_seqpar.distributed.collectives import (
    all_gather,
    gather_replicated_from_sequence_parallel_region,
    passes_none,
)
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.logits_storage import Held, Product, are_known
from lightning_seqpar.nn.vocab_loss import VocabParallelCrossEntropy, taken


class ShardedLogits(Tensor):
    """A tensor ``[..., v]`` of which every rank holds ``[..., ceil(v/tp)]``.

    Casts, scalings, reshapes and slices that leave the last dim alone keep it sharded, and ``F.cross_entropy`` on ``[n, v]``
    runs on the shards; every other operation gathers first, on all ranks of the group: what only some ranks ask of it waits
    for the others. A cast to a wider type costs nothing until somebody reads it: the loss widens a few tokens at a time.
    """

    _part: Held
    _shard: Shard
    _group: ProcessGroup
    _rank: int

    @staticmethod
    def wrap(local: Tensor, shard: Shard, group: ProcessGroup, rank: int) -> ShardedLogits:
        """The whole logits that ``local`` is this rank's part of."""
        return ShardedLogits._wrap(Held(local, local.dtype), shard, group, rank)

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
        return ShardedLogits._wrap(Product(x, weight, bias, dtype, dtype, chunk), shard, group, rank)

    @staticmethod
    def _wrap(part: Held, shard: Shard, group: ProcessGroup, rank: int) -> ShardedLogits:
        if not torch.is_grad_enabled():  # whoever reads it where gradients are made must not teach the head
            part = part.detached()
        out: ShardedLogits = _Wrap.apply(*part.tensors, part, shard, group, rank)  # type: ignore[no-untyped-call]
        out._part = part
        return out

    @staticmethod
    def _make(part: Held, shard: Shard, group: ProcessGroup, rank: int) -> ShardedLogits:
        out: ShardedLogits = Tensor._make_wrapper_subclass(
            ShardedLogits, (*part.shape[:-1], shard.length), dtype=part.dtype, device=part.tensors[0].device
        )
        out._part, out._shard, out._group, out._rank = part, shard, group, rank
        return out

    @property
    def local(self) -> Tensor:
        """This rank's part, with a gradient; columns behind the vocabulary's end are padding."""
        part = self._part
        if isinstance(part, Product):
            made = part.read()
            with without_subclasses():
                graph = self.requires_grad
            # A metric may read under no_grad what the loss will read with a graph.
            if made.requires_grad or not (graph or made.is_inference()):
                self._part = Held(made, made.dtype)  # the next reader has it
            return made
        return part.read()

    def whole(self) -> Tensor:
        """The whole logits as a plain tensor; collective over tp."""
        local = self.local
        return gather_replicated_from_sequence_parallel_region(local, local.ndim - 1, self._group, self._shard.length)

    def with_local(self, local: Tensor) -> ShardedLogits:
        """Logits of the same vocabulary with another local part."""
        return ShardedLogits.wrap(local, self._shard, self._group, self._rank)

    def with_part(self, part: Held) -> ShardedLogits:
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
            with without_subclasses():
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


def whole_logits(x: Tensor) -> Tensor:
    """Logits that are sharded, whole as a plain tensor (collective over tp); any other tensor as it is."""
    return x.whole() if isinstance(x, ShardedLogits) else x


def _check_graph(logits: ShardedLogits) -> None:
    with without_subclasses():
        node = logits.grad_fn
    if node is not None and is_node_of(node, CheckpointFunction):
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
        part: Held,
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
    losses: Tensor = VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        *part.tensors, part, target, valid, weight, label_smoothing, logits._shard, logits._rank, logits._group
    )
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    counts = valid.to(losses.dtype) if weight is None else taken(weight.to(losses.dtype), target, valid)
    return losses.sum() / counts.sum()
