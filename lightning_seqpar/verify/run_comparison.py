"""The comparison of two runs of a model's copy, whole and sharded: what differs, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seqpar.distributed.collectives import split
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.parallel.apply import ShardedModel
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.observed_run import ObservedRun, RandomDraw
from lightning_seqpar.verify.parity import norm_of

LIMIT = 1e-8
"""Largest error in float64, of the loss (relative) and of a gradient (of the global norm)."""

NARROW_LIMIT = 1e-4
"""The same where the model's own forward computes in 32 bits or less."""

OWN_LIMIT = 2e-2
"""Largest error of a gradient against its own size: one that is counted twice is wrong however small it is."""

NOISE = {False: 1e-13, True: 1e-7}
"""Below this (of the global norm) a gradient is rounding, for forwards in float64 and in narrower types."""


@dataclass
class Verdict:
    """What the self-check found.

    Attributes:
        wrong: what differs, in words; empty if nothing does.
        idle: planned modules that the example did not run, which are not proved.
    """

    wrong: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)


def compare_runs(
    dense: ObservedRun, sharded: ObservedRun, record: ShardedModel, names: Sequence[str], groups: ParallelGroups
) -> Verdict:
    """What differs between the run of the whole copy and that of the sharded one; collective over tp."""
    limit = NARROW_LIMIT if dense.narrow else LIMIT
    verdict = Verdict()
    ran = {name for name, _ in dense.outputs}
    verdict.idle = [name for name in names if name not in ran and not any(inside(one, name) for one in ran)]
    error = abs(dense.loss - sharded.loss) / max(abs(dense.loss), 1e-12)
    worst, where = worst_gradient(dense.grads, sharded.grads, narrow=dense.narrow)
    verdict.wrong += _unproved_modules(dense, record)
    shared = any(found.shard is not None and found.shard.has_shared for found in record.layout.values())
    verdict.wrong += _wrong_draws(dense.drawn, sharded.drawn, groups.size("tp") if shared else 0)
    verdict.wrong += _wrong_buffers(dense, sharded, record, limit, groups)
    place = _first_difference(dense, sharded, record, groups, limit)
    if not error <= limit:
        verdict.wrong.append(f"the loss differs: {sharded.loss:.9g} instead of {dense.loss:.9g}")
    if place and (verdict.wrong or where):  # it explains, and is no proof of its own
        verdict.wrong.append(place)
    if where:
        ratio = norm_of({"": sharded.grads[where]}) / max(norm_of({"": dense.grads[where]}), 1e-300)
        verdict.wrong.append(
            f"the gradient of {where} is {ratio:.4g} times as large as it should be (error {worst:.1e} of the global norm)"
        )
    return verdict


def worst_gradient(
    whole: Mapping[str, Tensor | None], sharded: Mapping[str, Tensor | None], *, narrow: bool
) -> tuple[float, str]:
    """The gradient that is wrong by most, relative to the global norm, and its parameter; ``(0, "")`` if all are right.

    One that is small beside the others may drown in the limit: it must not be off by much of its own size either.

    Args:
        whole: gradients of the whole model.
        sharded: gathered gradients of the sharded one.
        narrow: something was computed in less than float64.
    """
    limit = NARROW_LIMIT if narrow else LIMIT
    norm = max(norm_of(whole), 1e-300)
    worst, where = 0.0, ""
    for name, grad in whole.items():
        other = sharded.get(name)
        if grad is None and other is None:
            continue
        a = (grad if grad is not None else torch.zeros_like(other)).to_dense()  # type: ignore[arg-type]
        b = (other if other is not None else torch.zeros_like(a)).to_dense()
        gap = float((a.double() - b.double()).abs().max()) / norm if a.numel() else 0.0
        own = gap * norm / max(float(a.abs().max()), 1e-300) if a.numel() else 0.0
        wrong = not gap <= limit or (own > OWN_LIMIT and gap > NOISE[narrow])
        if wrong and not gap <= worst:
            worst, where = gap, name
    return worst, where


def _unproved_modules(dense: ObservedRun, record: ShardedModel) -> list[str]:
    """Modules on shards that no rule names and that the example does not run: they may do anything to a sequence."""
    known = {name for name, style, _ in record.choices if name and style not in ("blocks", "scatter")}
    found: list[str] = []
    for name, module in record.model.named_modules():
        if name in dense.ran or not record.on_shard(name) or any(inside(name, one) for one in found):
            continue
        planned = any(inside(name, one) or inside(one, name) for one in known)
        if not planned and any(parameter.ndim > 1 for parameter in module.parameters()):
            found.append(name)
    return [
        f"{name} is inside the sequence region, but the example does not run it and no rule names it, so nothing is known of "
        f"it: set example_input_array to an input that runs it, or have it computed whole, {{pattern: {name}, style: whole}}"
        for name in found
    ]


def _wrong_draws(dense: Sequence[RandomDraw], sharded: Sequence[RandomDraw], sharers: int) -> list[str]:
    """What is drawn for a whole activation must be drawn alike on all ranks, what is drawn for this rank's part by each.

    Args:
        sharers: ranks that a dim is dealt to, where some hold the same heads; else 0.
    """
    if [one.drawn.name for one in dense] != [one.drawn.name for one in sharded]:
        return [
            f"the sharded model draws random numbers {len(sharded)} times, the whole one {len(dense)} times, or in other ways: "
            "let the forward draw alike, whatever the shape of its input"
        ]
    for one, draw in zip(dense, sharded, strict=True):
        if any(length == 1 for _, length in draw.dealt):  # one position is as many as a shard's
            continue
        whole, shape = one.drawn.shape, draw.drawn.shape
        told = f"random numbers ({draw.drawn.name}) of shape {list(shape)}, drawn in {draw.where or 'the step'} (or behind it), "
        if draw.own and sharers and _is_drawn_by_several(whole, shape, draw.dealt, sharers):
            return [
                f"{told}are more than a rank's part of {list(whole)} in the whole model: some of {sharers} ranks hold the same key "
                "and value heads, and each would draw its own for the same head. Draw them for the query or the attention's "
                "weights, or use no more ranks than key and value heads"
            ]
        if (whole == shape) is not draw.own:
            continue
        if draw.own:
            return [
                f"{told}are as many as in the whole model, so that all ranks must draw the same, but behind a column linear and in "
                "a block of shards each rank draws its own. Draw them in front of the first column linear of the attention or "
                "MLP (an adapter's dropout in front of the adapted linear), in a module whose class is called ...DropPath or "
                "...StochasticDepth, or not at all"
            ]
        return [
            f"{told}are a part of {list(whole)} in the whole model, so that each rank must draw its own, but between the "
            "blocks, in a DropPath, behind a row linear and from a generator of your own all ranks draw the same; draw them inside "
            "a block, from torch's own generator, or not at all"
        ]
    return []


def _is_drawn_by_several(
    whole: tuple[int, ...], shape: tuple[int, ...], dealt: Sequence[tuple[int, int]], ranks: int
) -> bool:
    """Whether what a rank drew is of heads that others hold too: more than one in so many of a dim that is no sequence."""
    if len(whole) != len(shape):
        return False

    def is_sequence(at: int, size: int) -> bool:
        flat = len(whole) == 2 and at == 0
        return any((at == dim and size == length) or (flat and size % length == 0) for dim, length in dealt)

    return any(
        part != size and part * ranks > size and not is_sequence(at, size)
        for at, (size, part) in enumerate(zip(whole, shape, strict=True))
    )


def _wrong_buffers(
    dense: ObservedRun, sharded: ObservedRun, record: ShardedModel, limit: float, groups: ParallelGroups
) -> list[str]:
    """Buffers that the forward changes: counts of tokens, running statistics. On shards each rank has its own."""
    whole = {name for name, style, _ in record.choices if style in ("gather", "whole")}
    for name in sorted(dense.changed):
        holder = name.rpartition(".")[0]
        if record.on_shard(holder) and not any(inside(holder, one) for one in whole):
            return [
                f"the buffer {name} is changed by the forward, where each rank sees its part of the sequence, so that ranks would "
                "come to differ"
            ]
    found = []
    for name, buffer in dense.buffers.items():
        other = sharded.buffers.get(name)
        if other is None or not buffer.numel():
            continue
        layout = record.buffers.get(name)
        wanted = buffer if layout is None or layout.shard is None else layout.shard.take(buffer, groups.rank("tp"))
        if wanted.shape != other.shape:
            found.append(name)
            continue
        a, b = wanted.double(), other.double()
        gap = torch.where(a == b, torch.zeros_like(a), (a - b).abs())  # infinities are equal
        size = float(torch.where(a.isfinite(), a.abs(), torch.zeros_like(a)).max())
        if not float(gap.max()) <= limit * max(1.0, size):
            found.append(name)
    return [f"the buffer {name} is not what the whole model's forward makes of it" for name in found[:3]]


def _first_difference(
    dense: ObservedRun, sharded: ObservedRun, record: ShardedModel, groups: ParallelGroups, limit: float
) -> str | None:
    """The first module whose output is not this rank's part of the whole one's."""
    group = groups["tp"]
    found = len(dense.outputs)
    size = 0.0
    for index, ((name, a), (other, b)) in enumerate(zip(dense.outputs, sharded.outputs, strict=False)):
        if name != other:
            break
        gaps = [_gap(a, b, padded=False)] if a.shape == b.shape else []
        shards = [split(a, region.dim, group) for region in record.regions if a.ndim > region.dim]
        gaps += [_gap(part, b, padded=True) for part in shards if part.shape == b.shape]
        if not gaps:
            continue
        gaps = [gap / max(float(a.abs().max()) if a.numel() else 0.0, 1e-12) for gap in gaps]
        if not min(gaps) <= 100 * limit:
            found, size = index, min(gaps)
            break
    answers: list[Any] = [None] * groups.size("tp")
    dist.all_gather_object(answers, (found, size), group=group)
    first, gap = min(answers)
    return (
        f"the first wrong output is that of {dense.outputs[first][0]} (off by {gap:.1e} of its size)" if gap else None
    )


def _gap(part: Tensor, got: Tensor, *, padded: bool) -> float:
    if padded:
        got = torch.where(part == 0, torch.zeros_like(got), got)  # padding: zeros in the part, anything in the shard
    return float((part.double() - got.double()).abs().max()) if part.numel() else 0.0
