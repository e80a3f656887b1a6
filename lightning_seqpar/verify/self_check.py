"""The proof before training: a copy of the model, dense against sharded, forward and backward, on the real groups."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_seqpar.distributed.collectives import split
from lightning_seqpar.distributed.rng import Drawn, drawn_by, kept_streams, seed_streams
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.model_copy import Quiet, default_dtype, detached_copy, is_large
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.nn.sharded_logits import ShardedLogits
from lightning_seqpar.parallel.apply import ShardedModel, parallelize
from lightning_seqpar.parallel.grad_sync import GradSync, check_replicated
from lightning_seqpar.parallel.loss_consistency import check_loss
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.guards.graph import check_readers
from lightning_seqpar.verify.parity import gather_grads, norm_of

LIMIT = 1e-8
"""Largest error in float64, of the loss (relative) and of a gradient (of the global norm)."""

NARROW_LIMIT = 1e-4
"""The same where the model's own forward computes in 32 bits or less."""

OWN_LIMIT = 2e-2
"""Largest error of a gradient against its own size: one that is counted twice is wrong however small it is."""

GRACE = timedelta(minutes=1)
"""How long a rank that failed waits for the others to fail or to end, before it takes it that they wait for it."""

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


class PlanError(Exception):
    """The plan can't be carried out on the model."""


class SelfCheckError(ValueError):
    """The sharded model does not compute what the whole one does."""


class FailedAloneError(RuntimeError):
    """One rank's sharded model does not run, while the other ranks wait for it in a collective: all must end."""


class _Draw(NamedTuple):
    """Random numbers that a forward drew."""

    where: str  # the module that began last
    drawn: Drawn
    own: bool  # from the rank's own stream
    dealt: tuple[tuple[int, int], ...]  # of the sequences that are dealt out now, the dim and the length


class _Watch(Quiet):
    """Also notes whether a forward narrows what came in as float64, and what it draws."""

    def __init__(self, *, draws: bool, regions: Sequence[SequenceRegion]) -> None:
        super().__init__(draws=draws)
        self.narrow = False
        self.where = ""
        self.drawn: list[_Draw] = []
        self._regions = regions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, Tensor) and out.is_floating_point() and out.ndim > 1 and out.dtype != torch.float64:
            self.narrow = True
        if (drawn := drawn_by(func, out, args, kwargs)) is not None:
            own = not drawn.seeded and any(region.streams.own for region in self._regions)
            dealt = tuple((region.dim, region.length) for region in self._regions if region.active)
            self.drawn.append(_Draw(self.where, drawn, own, dealt))
        return out


@dataclass
class _Run:
    """One run of one copy."""

    loss: float
    grads: dict[str, Tensor | None]
    outputs: list[tuple[str, Tensor]]
    narrow: bool
    buffers: dict[str, Tensor]
    changed: set[str]
    ran: set[str]
    drawn: list[_Draw]


@contextmanager
def _noted(model: nn.Module, ran: set[str], watch: _Watch) -> Iterator[None]:
    """Note which modules run."""
    with ExitStack() as stack:
        for name, module in model.named_modules():

            def note(module: nn.Module, args: Any, name: str = name) -> None:
                ran.add(name)
                watch.where = name

            stack.callback(module.register_forward_pre_hook(note).remove)
        yield


@contextmanager
def _recorded(model: nn.Module, names: Sequence[str], outputs: list[tuple[str, Tensor]]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:

            def note(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
                first = out[0] if isinstance(out, list | tuple) and out else out
                if isinstance(first, ShardedLogits):
                    first = first.whole()  # here, where all ranks are
                if isinstance(first, Tensor):
                    outputs.append((name, first.detach()))

            stack.callback(model.get_submodule(name).register_forward_hook(note).remove)
        yield


def self_check(
    model: nn.Module,
    plans: Sequence[ShardingPlan],
    groups: ParallelGroups,
    example: Example,
    *,
    sp: bool,
    regather: bool | Literal["auto"],
    loss_chunk: int | None = None,
    device: torch.device,
    dtype: torch.dtype | None = torch.float64,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> Verdict:
    """Run a copy of ``model`` whole and sharded and compare; collective over tp, equal on all of its ranks.

    ``model`` itself is not touched. Every rank must hold the same ``model`` and ``example``.

    Raises:
        ValueError: where the plan can't be carried out.
        FailedAloneError: on a rank that fails while others wait for it.
    """
    example = example.to(device, dtype)

    def compare_copies() -> Verdict:  # in a frame of its own, which lets them go
        whole = detached_copy(model, device, dtype)
        prepare(whole)
        names = _watched(whole, plans)
        dense = _run(whole, None, example, names, groups)
        del whole
        copied = detached_copy(model, device, dtype)
        prepare(copied)
        try:
            record = parallelize(copied, plans, groups, sp=sp, regather=regather, loss_chunk=loss_chunk)
        except ValueError as error:
            raise PlanError from error
        record.is_copy = True
        sharded = _run(copied, record, example, names, groups)
        verdict = _compare(dense, sharded, record, names, groups)
        try:
            check_replicated(copied.parameters(), record.layout, groups)
        except RuntimeError as error:
            verdict.wrong.append(str(error))
        return verdict

    told: str | None = None
    verdict = Verdict()
    with kept_streams(device), default_dtype(dtype):
        try:
            verdict = compare_copies()
        except PlanError as error:
            raise ValueError(str(error.__cause__)) from None  # the same on every rank: nothing has run yet
        except Exception as error:  # told to every rank below
            told = f"{type(error).__name__}: {error}"
    if is_large(model):
        gc.collect()  # modules and their hooks know each other: without it the copies would live on for a while
    return _agree(verdict, told, groups)


def _agree(verdict: Verdict, told: str | None, groups: ParallelGroups) -> Verdict:
    answers: list[Any] = [None] * groups.size("tp")
    _meet(told, groups["tp"])
    dist.all_gather_object(answers, (verdict.wrong, told), group=groups["tp"])
    for wrong, failed in answers:
        if failed is not None:
            verdict.wrong = [f"it does not run: {failed}" + _hint(failed)]
            return verdict
        if wrong:
            verdict.wrong = wrong
            return verdict
    return verdict


def _meet(told: str | None, group: dist.ProcessGroup) -> None:
    """Ranks that failed must not start a collective while the others are in one of the model's."""
    if dist.get_backend(group) == "fake":  # there are no others
        return
    store, rank = dist.distributed_c10d._world.pg_map[group][1], group.rank()
    count = store.add(f"self-checks that rank {rank} ended", 1)
    keys = [f"self-check {count} ended on rank {one}" for one in range(group.size())]
    store.set(keys[rank], "")
    if told is None:
        return
    try:
        store.wait(keys, GRACE)
    except RuntimeError:
        waiting = [dist.get_global_rank(group, one) for one, key in enumerate(keys) if not store.check([key])]
        raise FailedAloneError(
            f"self_check: the sharded model does not run on rank {dist.get_rank()}, which raised {told}{_hint(told)}, while other "
            f"ranks ({', '.join(map(str, waiting))}) go on and wait for it. Ranks must run the same layers in the same order: a "
            "rule is wrong or missing, or a module decides by what it sees in its part of the sequence. Leave "
            "that module whole ({pattern: ..., style: whole}), or set sp=False"
        ) from None


def _hint(failed: str) -> str:
    """What may be behind an error of torch's own."""
    if "RuntimeError: shape" in failed or "shapes cannot be multiplied" in failed or "must match" in failed:
        return (
            " (a head count or a feature count that is still the whole model's, a parameter with a head dim that is not sliced, "
            "or a length that is read from this rank's part of the sequence?)"
        )
    return ""


def _watched(model: nn.Module, plans: Sequence[ShardingPlan]) -> list[str]:
    modules = {name for name, _ in model.named_modules() if name}
    return [name for name in dict.fromkeys(m.name for plan in plans for m in plan.match(model)) if name in modules]


def _run(
    model: nn.Module, record: ShardedModel | None, example: Example, names: Sequence[str], groups: ParallelGroups
) -> _Run:
    outputs: list[tuple[str, Tensor]] = []
    ran: set[str] = set()
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    watch = _Watch(draws=example.draws, regions=record.regions if record is not None else [])
    seed_streams()
    sync = GradSync(record.layout, groups, record.doubtful) if record is not None else None
    with torch.enable_grad(), _recorded(model, names, outputs), _noted(model, ran, watch), watch:
        if record is not None:
            record.reset_calls()
        loss = example.run(model)
        drawn = list(watch.drawn)  # a recompute draws again
        if record is not None:
            record.check_closed(loss)
            check_loss(loss, groups)
            check_readers(loss, record)
        if sync is not None:
            sync.attach()  # a parameter may thaw in the step
        model.zero_grad()
        loss.backward()  # watched too: checkpointing draws again in it
    if record is not None and sync is not None:
        sync.flush_all(check=True)
        sync.remove()
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
    changed = {name for name, buffer in buffers.items() if name in before and not _equal(buffer, before[name])}
    return _Run(float(loss.detach()), gather_grads(model), outputs, watch.narrow, buffers, changed, ran, drawn)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _compare(dense: _Run, sharded: _Run, record: ShardedModel, names: Sequence[str], groups: ParallelGroups) -> Verdict:
    limit = NARROW_LIMIT if dense.narrow else LIMIT
    verdict = Verdict()
    ran = {name for name, _ in dense.outputs}
    verdict.idle = [name for name in names if name not in ran and not any(inside(one, name) for one in ran)]
    error = abs(dense.loss - sharded.loss) / max(abs(dense.loss), 1e-12)
    worst, where = worst_gradient(dense.grads, sharded.grads, narrow=dense.narrow)
    verdict.wrong += _unknown(dense, record)
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


def _unknown(dense: _Run, record: ShardedModel) -> list[str]:
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


def _wrong_draws(dense: Sequence[_Draw], sharded: Sequence[_Draw], sharers: int) -> list[str]:
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
        if draw.own and sharers and _is_shared(whole, shape, draw.dealt, sharers):
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


def _is_shared(whole: tuple[int, ...], shape: tuple[int, ...], dealt: Sequence[tuple[int, int]], ranks: int) -> bool:
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


def _wrong_buffers(dense: _Run, sharded: _Run, record: ShardedModel, limit: float, groups: ParallelGroups) -> list[str]:
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
    dense: _Run, sharded: _Run, record: ShardedModel, groups: ParallelGroups, limit: float
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
