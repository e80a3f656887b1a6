"""The proof before training: a copy of the model, dense against sharded, forward and backward, on the real groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_seqpar.blueprint import inside
from lightning_seqpar.collectives import split
from lightning_seqpar.grad_sync import GradSync, check_replicated
from lightning_seqpar.groups import ParallelGroups
from lightning_seqpar.guards import check_loss, check_readers
from lightning_seqpar.parallelize import ShardedModel, parallelize
from lightning_seqpar.parity import gather_grads, norm_of
from lightning_seqpar.plan import ShardingPlan
from lightning_seqpar.probe import Example, Quiet, default_dtype, detached_copy, kept_streams, seed_streams

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


class PlanError(Exception):
    """The plan can't be carried out on the model."""


class SelfCheckError(ValueError):
    """The sharded model does not compute what the whole one does."""


class _Watch(Quiet):
    """Also notes whether a forward narrows what came in as float64."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__(draws=draws)
        self.narrow = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, Tensor) and out.is_floating_point() and out.ndim > 1 and out.dtype != torch.float64:
            self.narrow = True
        return out


@dataclass
class _Run:
    """One run of one copy."""

    loss: float
    grads: dict[str, Tensor | None]
    outputs: list[tuple[str, Tensor]]
    narrow: bool


@contextmanager
def _recorded(model: nn.Module, names: Sequence[str], outputs: list[tuple[str, Tensor]]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:

            def note(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
                first = out[0] if isinstance(out, list | tuple) and out else out
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
    regather: bool,
    device: torch.device,
    dtype: torch.dtype | None = torch.float64,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> Verdict:
    """Run a copy of ``model`` whole and sharded and compare; collective over tp, equal on all of its ranks.

    ``model`` itself is not touched. Every rank must hold the same ``model`` and ``example``.
    """
    example = example.to(device, dtype)
    told: str | None = None
    verdict = Verdict()
    with kept_streams(device), default_dtype(dtype):
        try:
            whole = detached_copy(model, device, dtype)
            prepare(whole)
            names = _watched(whole, plans)
            dense = _run(whole, None, example, names, groups)
            del whole
            copied = detached_copy(model, device, dtype)
            prepare(copied)
            try:
                record = parallelize(copied, plans, groups, sp=sp, regather=regather)
            except ValueError as error:
                raise PlanError from error
            record.is_copy = True
            sharded = _run(copied, record, example, names, groups)
            verdict = _compare(dense, sharded, record, names, groups)
            try:
                check_replicated(copied.parameters(), record.layout, groups)
            except RuntimeError as error:
                verdict.wrong.append(str(error))
        except PlanError as error:
            raise ValueError(str(error.__cause__)) from None  # the same on every rank: nothing has run yet
        except Exception as error:  # told to every rank below
            told = f"{type(error).__name__}: {error}"
    return _agree(verdict, told, groups)


def _agree(verdict: Verdict, told: str | None, groups: ParallelGroups) -> Verdict:
    answers: list[Any] = [None] * groups.size("tp")
    dist.all_gather_object(answers, (verdict.wrong, told), group=groups["tp"])
    for wrong, failed in answers:
        if failed is not None:
            verdict.wrong = [f"it does not run: {failed}" + _hint(failed)]
            return verdict
        if wrong:
            verdict.wrong = wrong
            return verdict
    return verdict


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
    watch = _Watch(draws=example.draws)
    seed_streams()
    sync = GradSync(record.layout, groups, record.doubtful) if record is not None else None
    with torch.enable_grad(), _recorded(model, names, outputs), watch:
        if record is not None:
            record.reset_calls()
        loss = example.run(model)
        if record is not None:
            record.check_closed(loss)
            check_loss(loss, groups)
            check_readers(loss, record)
        model.zero_grad()
        loss.backward()  # watched too: checkpointing draws again in it
    if record is not None and sync is not None:
        sync.flush_all(check=True)
        sync.remove()
    return _Run(float(loss.detach()), gather_grads(model), outputs, watch.narrow)


def _compare(dense: _Run, sharded: _Run, record: ShardedModel, names: Sequence[str], groups: ParallelGroups) -> Verdict:
    limit = NARROW_LIMIT if dense.narrow else LIMIT
    verdict = Verdict()
    ran = {name for name, _ in dense.outputs}
    verdict.idle = [name for name in names if name not in ran and not any(inside(one, name) for one in ran)]
    error = abs(dense.loss - sharded.loss) / max(abs(dense.loss), 1e-12)
    norm = max(norm_of(dense.grads), 1e-300)
    worst, where = 0.0, ""
    for name, grad in dense.grads.items():
        other = sharded.grads.get(name)
        if grad is None and other is None:
            continue
        a = grad if grad is not None else torch.zeros_like(other)  # type: ignore[arg-type]
        b = other if other is not None else torch.zeros_like(a)
        gap = float((a.double() - b.double()).abs().max()) / norm if a.numel() else 0.0
        own = gap * norm / max(float(a.abs().max()), 1e-300) if a.numel() else 0.0
        wrong = not gap <= limit or (own > OWN_LIMIT and gap > NOISE[dense.narrow])
        if wrong and not gap <= worst:
            worst, where = gap, name
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
        gaps = [gap / max(float(a.abs().max()), 1e-12) for gap in gaps]
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
