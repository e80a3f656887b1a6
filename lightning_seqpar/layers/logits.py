"""Logits that stay sharded by vocabulary through a loss, and are whole for everything else, after arXiv 1909.08053."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from lightning_seqpar.collectives import all_gather, gather_replicated_from_sequence_parallel_region
from lightning_seqpar.layers.shard import Shard


class ShardedLogits(Tensor):
    """A tensor ``[..., v]`` of which every rank holds ``[..., ceil(v/tp)]``.

    Casts, scalings, reshapes and slices that leave the last dim alone keep it sharded, and ``F.cross_entropy`` on ``[n, v]``
    runs on the shards; every other operation gathers first, on all ranks of the group: what only some ranks ask of it waits
    for the others.

    Attributes:
        local: this rank's part, with a gradient; columns behind the vocabulary's end are padding.
    """

    local: Tensor
    _shard: Shard
    _group: ProcessGroup
    _rank: int

    @staticmethod
    def wrap(local: Tensor, shard: Shard, group: ProcessGroup, rank: int) -> ShardedLogits:
        """The whole logits that ``local`` is this rank's part of."""
        out: ShardedLogits = _Wrap.apply(local, shard, group, rank)  # type: ignore[no-untyped-call]
        out.local = local
        return out

    @staticmethod
    def _make(local: Tensor, shard: Shard, group: ProcessGroup, rank: int) -> ShardedLogits:
        out: ShardedLogits = Tensor._make_wrapper_subclass(
            ShardedLogits, (*local.shape[:-1], shard.length), dtype=local.dtype, device=local.device
        )
        out.local, out._shard, out._group, out._rank = local, shard, group, rank
        return out

    def whole(self) -> Tensor:
        """The whole logits as a plain tensor; collective over tp."""
        local = self.local
        return gather_replicated_from_sequence_parallel_region(local, local.ndim - 1, self._group, self._shard.length)

    def with_local(self, local: Tensor) -> ShardedLogits:
        """Logits of the same vocabulary with another local part."""
        return ShardedLogits.wrap(local, self._shard, self._group, self._rank)

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
        keep = _KEEPING.get(func)
        if keep is not None and isinstance(args[0], ShardedLogits):
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


class _Wrap(torch.autograd.Function):
    """Stands for a gather in the graph; its gradient is the same on all ranks, of which each takes its part."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: Shard, group: ProcessGroup, rank: int) -> Tensor:
        ctx.columns, ctx.width = shard.ranges[rank][0], local.shape[-1]
        return ShardedLogits._make(local.detach(), shard, group, rank)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        start, stop = ctx.columns
        return F.pad(grad[..., start:stop], (0, ctx.width - (stop - start))), None, None, None


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
    """Casts and copies."""
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
    return logits.with_local(logits.local.reshape(*shape[:-1], logits.local.shape[-1]))


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
    return logits.with_local(logits.local[tuple(items)])


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
    **dict.fromkeys((*_CASTS, *_COPIES), _same),
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

    Two reductions over tp, of ``[n]`` and ``[3, n]`` numbers; none in the backward.

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
    local = logits.local
    if torch.is_autocast_enabled(local.device.type):
        local = local.float()
    valid = target != ignore_index
    inside = ~valid | ((target >= 0) & (target < logits.shape[-1]))
    if target.device.type == "cpu":
        if not bool(inside.all()):
            raise IndexError(f"Target {int(target[~inside][0])} is out of bounds.")
    else:
        torch._assert_async(inside.all(), "a target lies outside the vocabulary")
    losses: Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        local, target, valid, weight, label_smoothing, logits.columns, logits.shape[-1], logits._group
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
    """Losses ``[n]`` from this rank's logits ``[n, v/tp]``; saved are the probabilities ``[n, v/tp]``."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        target: Tensor,
        valid: Tensor,
        weight: Tensor | None,
        smoothing: float,
        columns: tuple[int, int],
        classes: int,
        group: ProcessGroup,
    ) -> Tensor:
        start, stop = columns
        wide = torch.float32 if local.dtype in (torch.float16, torch.bfloat16) else local.dtype
        x = local[:, : stop - start].to(wide)
        largest = x.amax(-1) if stop > start else x.new_full(x.shape[:1], float("-inf"))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        x = x - largest.unsqueeze(-1)
        weights = x.new_ones(classes) if weight is None else weight.to(wide)
        mine = valid & (target >= start) & (target < stop)
        at = (target - start).masked_fill(~mine, 0)
        scores = x.gather(-1, at.unsqueeze(-1)).squeeze(-1) * mine if stop > start else x.new_zeros(x.shape[:1])
        smooth = x @ weights[start:stop] if smoothing else torch.zeros_like(scores)
        probabilities = x.exp_()
        sums = torch.stack([probabilities.sum(-1), scores, smooth])
        dist.all_reduce(sums, group=group)
        total, score, smooth = sums
        own = _taken(weights, target, valid)
        losses: Tensor = (1 - smoothing) * own * (total.log() - score)
        if smoothing:
            losses = losses + smoothing / classes * (weights.sum() * total.log() - smooth) * valid
        ctx.save_for_backward(probabilities.div_(total.unsqueeze(-1)), at, mine, own, weights, valid)
        ctx.smoothing, ctx.columns, ctx.classes = smoothing, columns, classes
        ctx.dtype, ctx.width = local.dtype, local.shape[-1]
        return losses.to(local.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, at, mine, own, weights, valid = ctx.saved_tensors
        (start, stop), smoothing = ctx.columns, ctx.smoothing
        scale = grad.to(probabilities.dtype).masked_fill(~valid, 0)  # infinite where all targets are ignored
        hard = (1 - smoothing) * own * scale
        soft = smoothing / ctx.classes * scale
        out = probabilities * (hard + soft * weights.sum()).unsqueeze(-1)
        if stop > start:
            out.scatter_add_(-1, at.unsqueeze(-1), -(hard * mine).unsqueeze(-1))
        if smoothing:
            out -= soft.unsqueeze(-1) * weights[start:stop]
        return F.pad(out, (0, ctx.width - (stop - start))).to(ctx.dtype), *([None] * 7)
