"""The proof before training: a copy of the model, dense against sharded, forward and backward, on the real groups."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_seqpar.distributed.rng import kept_streams
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.model_copy import default_dtype, detached_copy, is_large
from lightning_seqpar.parallel.apply import parallelize
from lightning_seqpar.parallel.grad_sync import check_replicated
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.observed_run import observe_run
from lightning_seqpar.verify.run_comparison import Verdict, compare_runs

GRACE = timedelta(minutes=1)
"""How long a rank that failed waits for the others to fail or to end, before it takes it that they wait for it."""


class PlanError(Exception):
    """The plan can't be carried out on the model."""


class SelfCheckError(ValueError):
    """The sharded model does not compute what the whole one does."""


class FailedAloneError(RuntimeError):
    """One rank's sharded model does not run, while the other ranks wait for it in a collective: all must end."""


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
        names = _planned_modules(whole, plans)
        dense = observe_run(whole, None, example, names, groups)
        del whole
        copied = detached_copy(model, device, dtype)
        prepare(copied)
        try:
            record = parallelize(copied, plans, groups, sp=sp, regather=regather, loss_chunk=loss_chunk)
        except ValueError as error:
            raise PlanError from error
        record.is_copy = True
        sharded = observe_run(copied, record, example, names, groups)
        verdict = compare_runs(dense, sharded, record, names, groups)
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
    return _share_verdict(verdict, told, groups)


def _share_verdict(verdict: Verdict, told: str | None, groups: ParallelGroups) -> Verdict:
    answers: list[Any] = [None] * groups.size("tp")
    _await_others(told, groups["tp"])
    dist.all_gather_object(answers, (verdict.wrong, told), group=groups["tp"])
    for wrong, failed in answers:
        if failed is not None:
            verdict.wrong = [f"it does not run: {failed}" + _hint(failed)]
            return verdict
        if wrong:
            verdict.wrong = wrong
            return verdict
    return verdict


def _await_others(told: str | None, group: dist.ProcessGroup) -> None:
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


def _planned_modules(model: nn.Module, plans: Sequence[ShardingPlan]) -> list[str]:
    modules = {name for name, _ in model.named_modules() if name}
    return [name for name in dict.fromkeys(m.name for plan in plans for m in plan.match(model)) if name in modules]
