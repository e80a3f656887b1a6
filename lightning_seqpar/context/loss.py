"""Losses of sequences of which each rank holds a part: each rank's sum, over what all ranks count."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_seqpar.context.chunks import sum_over_ranks
from lightning_seqpar.context.operations import arguments_of, handles
from lightning_seqpar.context.seq_part import Place, SeqPart


@handles("cross_entropy nll_loss", homes=(F,))
def cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.cross_entropy`` or ``nll_loss`` of logits ``[n, v]`` or ``[b, v, s]``, of which a rank holds a part, with whole labels.

    Each rank sums the losses of its own positions; the sums and the counts (ignored labels left out) are added over the ranks.
    The logits never become whole.
    """
    given = arguments_of(func, args, kwargs)
    logits, target = given.pop("input"), given.pop("target")
    if given["size_average"] is not None or given["reduce"] is not None or not isinstance(logits, SeqPart):
        return NotImplemented
    place = logits._place
    classes = 1 if logits.ndim > 1 else 0
    if place.dim == classes:
        return NotImplemented
    own = _labels(target, logits, classes)
    if own is None:
        return NotImplemented
    options = {name: given[name] for name in ("weight", "ignore_index", "label_smoothing") if name in given}
    reduction = given["reduction"]
    at = place.dim - (place.dim > classes)
    if reduction == "none":
        return SeqPart.wrap(func(logits._local, own, reduction="none", **options), place.at(at))
    if logits._local.dtype in (torch.float16, torch.bfloat16):  # a sum would round, or have no room
        each = func(logits._local, own, reduction="none", **options)
        dtype, summed = each.dtype, each.sum(dtype=torch.float32)  # under autocast torch's loss is float32
    else:
        summed = func(logits._local, own, reduction="sum", **options)
        dtype = summed.dtype
    total = sum_over_ranks(summed, place.chunks)
    if reduction == "sum":
        return total.to(dtype)
    return (total / _count(own, given, logits, place).to(total.dtype)).to(dtype)


def _labels(target: Any, logits: SeqPart, classes: int) -> Tensor | None:
    """This rank's labels; None if they are laid out otherwise than the logits."""
    place = logits._place
    soft = target.ndim == logits.ndim
    at = place.dim if soft else place.dim - (place.dim > classes)
    if isinstance(target, SeqPart):
        return target._local if target._place.dim == at and target._place.same(place) else None
    if target.ndim <= at or target.shape[at] != place.whole_size:
        return None  # torch's own message
    own: Tensor = place.own(target, at)
    return own.contiguous()


def _count(own: Tensor, given: dict[str, Any], logits: SeqPart, place: Place) -> Tensor:
    """What a mean divides by, of all ranks: labels that are not ignored, or their classes' weights; with soft labels, positions."""
    if own.is_floating_point():
        return torch.tensor(float(logits.numel() // logits.shape[1]), device=own.device)
    valid = own != given["ignore_index"]
    weight = given["weight"]
    counts = valid.sum() if weight is None else torch.where(valid, weight[own.clamp(min=0)], 0.0).sum()
    return sum_over_ranks(counts.to(torch.float64 if own.device.type != "mps" else torch.float32), place.chunks)


@handles("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div", homes=(F,))
def pointwise_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of each number by itself, and its mean or sum over all ranks."""
    if len(args) > 2 or kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        return NotImplemented
    x, target = (*args, *(kwargs[name] for name in ("input", "target")[len(args) :]))
    options = {name: value for name, value in kwargs.items() if name not in ("input", "target", "reduction")}
    first = x if isinstance(x, SeqPart) else target
    other = target if first is x else x
    if any(isinstance(value, Tensor) for value in options.values()) or first.shape != other.shape:
        return NotImplemented
    place = first._place
    if not isinstance(other, SeqPart):
        beside = place.own(other)
    elif other._place.dim == place.dim and other._place.same(place):
        beside = other._local
    else:
        return NotImplemented
    locals_ = (first._local, beside) if first is x else (beside, first._local)
    each = SeqPart.wrap(func(*locals_, reduction="none", **options), place)
    reduction = kwargs.get("reduction", "mean")
    if reduction == "batchmean":
        return each.sum() / first.shape[0]
    return each if reduction == "none" else each.sum() if reduction == "sum" else each.mean()
