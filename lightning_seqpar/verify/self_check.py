"""The proof before training: a copy of the model, whole against sharded or in stages, forward and backward, on the real groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.distributed.rng import kept_streams
from lightning_seqpar.inference.block_kinds import spread_equal_blocks
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.model_copy import default_dtype, detached_copy, nudge_weights, release
from lightning_seqpar.inference.trainer_view import describe_failure
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.parallel.apply import has_context, parallelize
from lightning_seqpar.parallel.beside_tp import MLPTiles, NoAttentionError, change_unsharded, split_context
from lightning_seqpar.parallel.grad_checks import check_replicated
from lightning_seqpar.parallel.sharded_model import ShardedModel, whole_model
from lightning_seqpar.pipeline.cut import Cut
from lightning_seqpar.pipeline.stage import Stage
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.parity import compare_losses, each_gradient
from lightning_seqpar.verify.run_comparison import (
    ObservedEvaluation,
    ObservedRun,
    Verdict,
    compare_evaluations,
    compare_runs,
    describe_wrong,
    observe_evaluation,
    observe_run,
    without_unstable,
    wrong_gradients,
)

GRACE = timedelta(minutes=1)
"""How long a rank that failed waits for the others to fail or finish too, before it assumes that they wait for it."""


class PlanError(Exception):
    """The plan can't be carried out on the model."""


class SelfCheckError(ValueError):
    """The sharded model does not compute what the whole one does."""


class FailedAloneError(RuntimeError):
    """The sharded model raised on this rank alone, while other ranks wait for it in a collective: the run must end."""


class CalledApartError(RuntimeError):
    """A step calls sharded modules on some ranks alone."""


def _shard_copy(
    copied: nn.Module, plans: Sequence[ShardingPlan], config: ParallelConfig, groups: ParallelGroups, tiles: MLPTiles | None
) -> ShardedModel:
    """Shard a copy as the model will be, its MLPs in ``tiles``; raises ValueError if the plans can't be carried out on it."""
    if groups.size("tp") == 1:
        change_unsharded(copied, plans, groups, tiles=tiles, loss_chunk=config.loss_chunk)
        context = has_context(groups)
        record = split_context(copied, plans, groups, config.cp_method) if context else whole_model(copied, groups)
    else:
        options: dict[str, Any] = config.model_dump(include={"sp", "regather", "loss_chunk", "cp_method"})
        try:
            record = parallelize(copied, plans, groups, tiles=tiles, recompute=config.recompute, **options)
        except NoAttentionError:  # which training is refused for; no fault of the plan's
            record = parallelize(copied, plans, groups, tiles=tiles, **options)
    record.is_copy = True
    return record


class _Again(NamedTuple):
    """A run of copies behind that of a training step, without gradients; ``training``: as a later step, else in evaluation."""

    example: Example
    training: bool = False

    @property
    def name(self) -> str:
        when = "in a later step, which reads what modules keep of an earlier one" if self.training else "in evaluation"
        return f"{when} ({self.example.method} with {self.example.source})"


def self_check(
    model: nn.Module,
    plans: Sequence[ShardingPlan],
    config: ParallelConfig,
    groups: ParallelGroups,
    example: Example,
    evaluation: Example | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype | None = torch.float64,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> Verdict:
    """Run a copy of ``model`` whole and another one sharded, and compare them; collective over the replica.

    Both run forward and backward as in training, forward once more if a module keeps a tensor of that, and forward as in
    evaluation. What does not run whole is not compared. Every rank must hold the same ``model`` and examples; the verdict is the
    same on every rank of the replica. Raises ValueError if the plan can't be carried out on the model.
    """
    example = example.to(device, dtype)
    # Behind a training step: a later one, which reads what modules keep of the first, and evaluations.
    again = [_Again(example, training=True), _Again(example)]
    again += [] if evaluation is None else [_Again(evaluation.to(device, dtype))]
    rules = _rules_by_name(model, plans)

    def run_whole(*, nudged: bool = False) -> tuple[ObservedRun, list[ObservedEvaluation | str], list[str]]:
        whole = detached_copy(model, device, dtype, example.reduction, rules, frozen=example.frozen)
        prepare(whole)
        if nudged:
            nudge_weights(whole)
        names = [name for name, _ in whole.named_modules() if name in rules]
        dense = observe_run(whole, None, example, names, groups)
        evaluated: list[ObservedEvaluation | str] = []
        for one in again:
            if one.training and not dense.keeps:
                evaluated.append("nothing is kept")
                continue
            try:
                evaluated.append(observe_evaluation(whole, None, one.example, names, training=one.training))
            except Exception as error:  # a model that can't be evaluated so: its trainer would not do it either
                evaluated.append(f"{one.example.method} with {one.example.source}: {describe_failure(error)}")
        release(whole)  # the run's record has the gradients
        return dense, evaluated, names

    def compare_copies() -> Verdict:
        dense, evaluated, names = run_whole()
        if dense.kernels:
            dense = dense.with_own_error(run_whole()[0])
        called = {f"{example.method} with {example.source}": [name for name, _ in dense.outputs]}
        for one, seen in zip(again, evaluated, strict=True):
            if isinstance(seen, ObservedEvaluation):
                called[one.name] = [name for name, _ in seen.outputs]
        _refuse_apart(called, groups)
        if config.tile_mlp is None:
            return compare_with(dense, evaluated, names, None)
        tiles = MLPTiles(config.tile_mlp, least=3)
        # In tiles numbers are drawn more often, and fewer at a time: another copy shows that their streams are right.
        if dense.drawn and (verdict := compare_with(dense, evaluated, names, None)).wrong:
            return verdict
        return compare_with(dense, evaluated, names, tiles)

    def compare_with(
        dense: ObservedRun, evaluated: list[ObservedEvaluation | str], names: list[str], tiles: MLPTiles | None
    ) -> Verdict:
        copied = detached_copy(model, device, dtype, example.reduction, rules, frozen=example.frozen)
        prepare(copied)
        try:
            record = _shard_copy(copied, plans, config, groups, tiles)
        except ValueError as error:
            raise PlanError from error
        sharded = observe_run(copied, record, example, names, groups)
        verdict = compare_runs(dense, sharded, record, names, groups, draws=tiles is None)
        try:
            check_replicated(copied.parameters(), record.layout, groups)()
        except RuntimeError as error:
            verdict.wrong.append(str(error))
        failures = [one if isinstance(one, str) else "" for one in evaluated]
        verdict.not_evaluated = failures[-1]
        flags = torch.tensor([bool(verdict.wrong), *map(bool, failures)], dtype=torch.int32, device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=groups[groups.replica_axes])
        training_wrong, *failed = flags.tolist()
        for at, (one, whole) in enumerate(zip(again, evaluated, strict=True)):
            if training_wrong or failed[at] or isinstance(whole, str):
                continue
            try:
                parts = observe_evaluation(copied, record, one.example, names, training=one.training)
            except Exception as error:
                verdict.failure = f"{one.name}: {describe_failure(error)}"
                break
            wrong, first = compare_evaluations(whole, parts, record, groups)
            if wrong and isinstance(moved := run_whole(nudged=True)[1][at], ObservedEvaluation):
                wrong = without_unstable(wrong, whole, moved)
            if wrong:
                said = "; ".join([*list(wrong.values())[:2], *([first] if first else [])])
                verdict.wrong.append(f"{one.name} {said}. The first step of a training is right")
        release(copied)
        return verdict

    return _compare_on_copies(compare_copies, groups, device, dtype)


_NO_NUMBERS = (
    "it is made of an activation between blocks, or of a parameter, that another stage has (a hidden state in the loss, or "
    "torch.utils.checkpoint around a block, in whose place recompute='full' can stand)"
)


def stage_check(
    model: nn.Module,
    plans: Sequence[ShardingPlan],
    cut: Cut,
    config: ParallelConfig,
    groups: ParallelGroups,
    example: Example,
    *,
    device: torch.device,
    dtype: torch.dtype | None = torch.float64,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> Verdict:
    """Run a copy of ``model`` whole and another one in stages, by plans that are proved; collective over the world.

    A stage has no numbers of parameters that others hold, and blocks of other stages do not run on it.
    """
    example = example.to(device, dtype)
    # Of a large model two blocks of each stage are computed, the first one's gradients alone are kept, in both copies.
    firsts = {stack.blocks[0] for stack in cut.stacks}  # which make what the others are given
    passed_by = [name for names in cut.blocks for name in names[2:] if name not in firsts]
    kept = [name for names in cut.blocks for name in names[:1]]

    def copied() -> nn.Module:
        made = detached_copy(model, device, dtype, example.reduction, {}, frozen=example.frozen)
        prepare(made)
        if example.reduction.skips_repeats:
            spread_equal_blocks(made)
            for name in passed_by:
                made.get_submodule(name).forward = cut.stack_of(name).passing_by(name)
            for name, parameter in made.named_parameters():
                if any(inside(name, one) for names in cut.blocks for one in names if one not in kept):
                    parameter.requires_grad_(False)
        return made

    def compare() -> Verdict:
        whole = copied()
        own = replace(example, reduction=replace(example.reduction, skips_repeats=False))
        dense = observe_run(whole, None, own, [], groups)
        release(whole)
        parts = copied()
        record = _shard_copy(parts, plans, config, groups, None)
        record.layout.note_stages(cut.shared)
        record.stage = Stage(parts, cut, groups, device, own_streams=False)
        stages = observe_run(parts, record, own, [], groups)
        verdict = Verdict()
        loss = compare_losses("the loss", [dense.loss], [stages.loss], dense.limits)
        if math.isnan(stages.loss):
            verdict.wrong.append(f"the loss is no number instead of {dense.loss:.9g}: {_NO_NUMBERS}")
        elif not loss.ok:
            verdict.wrong.append(f"the loss differs: {loss.where}")
        for one in wrong_gradients(dense, each_gradient(parts))[:1]:
            if not math.isnan(one.ratio):
                verdict.wrong.append(describe_wrong(one))
            elif not math.isnan(stages.loss):
                verdict.wrong.append(f"the gradient of {one.name} is no number: {_NO_NUMBERS}")
        equal = {name for name, _ in record.equal_buffers()}
        made, wanted, limit = stages.buffers, dense.buffers, dense.limits.tensors
        stale = [
            name
            for name in sorted(dense.changed & equal)
            if wanted[name].shape != made[name].shape or not torch.allclose(wanted[name], made[name], rtol=limit, atol=0)
        ]
        if stale:
            verdict.wrong.append(
                f"the step writes to the buffer {stale[0]} where one stage alone comes (a batch norm's statistics, a counter), and "
                "the others would have an old one"
            )
        release(parts)
        return verdict

    return _compare_on_copies(compare, groups, device, dtype)


def _compare_on_copies(
    compare: Callable[[], Verdict], groups: ParallelGroups, device: torch.device, dtype: torch.dtype | None
) -> Verdict:
    """The verdict of a comparison that makes copies and lets go of them, shared by the replica.

    Raises FailedAloneError on a rank whose copy raises while others wait for it; CalledApartError and ValueError on all alike.
    """
    failure, verdict = None, Verdict()
    with kept_streams(), default_dtype(dtype):
        try:
            verdict = compare()
        except CalledApartError:
            raise  # on every rank alike, too
        except PlanError as error:
            raise ValueError(str(error.__cause__)) from None  # raised on every rank alike, before anything was run
        except Exception as error:  # every rank hears of it below
            failure = describe_failure(error)
    return _share_verdict(verdict, failure or verdict.failure, groups)


def _refuse_apart(called: Mapping[str, Sequence[str]], groups: ParallelGroups) -> None:
    """Refuse a step that calls sharded modules, by what was run whole, on some ranks alone; collective over the replica."""
    axes = groups.replica_axes
    told: list[Any] = [None] * groups.size(axes)
    if dist.get_backend(groups[axes]) == "fake":
        return
    dist.all_gather_object(told, dict(called), group=groups[axes])
    for what, names in told[0].items():
        for at, others in enumerate(told):
            here = Counter(names)
            there = Counter(others.get(what, names))  # one that does not run there is not compared
            if more := (here - there) or (there - here):
                raise CalledApartError(
                    f"{what}: ranks {groups.ranks(axes)[0]} and {groups.ranks(axes)[at]} do not call {next(iter(more))} equally "
                    "often, and each call of the model needs every rank. Call it on all ranks, not under "
                    "`if trainer.is_global_zero` or another condition that some of them do not meet"
                )


def _share_verdict(verdict: Verdict, failure: str | None, groups: ParallelGroups) -> Verdict:
    """The verdict of the first rank that failed or saw a difference; collective over the world."""
    world = groups[tuple(sorted(groups.topology.axes))]  # all replicas, since gradients are agreed on over dp too
    answers: list[Any] = [None] * world.size()
    _await_others(failure, world)
    dist.all_gather_object(answers, (verdict.wrong, failure, verdict.draws), group=world)
    verdict.draws = any(draws for *_, draws in answers)
    told = ([f"it does not run: {raised}"] if raised is not None else wrong for wrong, raised, _ in answers)
    verdict.wrong = next(filter(None, told), verdict.wrong)
    return verdict


def _await_others(failure: str | None, group: dist.ProcessGroup) -> None:
    """Wait, on a rank that failed, until all ranks of ``group`` are through with their copies, which they say in its store.

    If it went on to the next collective at once, that would pair with a collective of the model on the other ranks.
    """
    if dist.get_backend(group) == "fake":  # there are no other ranks
        return
    store, rank = dist.distributed_c10d._world.pg_map[group][1], group.rank()
    count = store.add(f"self-checks that rank {rank} ended", 1)
    keys = [f"self-check {count} ended on rank {one}" for one in range(group.size())]
    store.set(keys[rank], "")
    if failure is None:
        return
    try:
        store.wait(keys, GRACE)
    except RuntimeError:
        waiting = [dist.get_global_rank(group, one) for one, key in enumerate(keys) if not store.check([key])]
        raise FailedAloneError(
            f"self_check: the sharded model does not run on rank {dist.get_rank()}, which raised {failure}, while "
            f"other ranks ({', '.join(map(str, waiting))}) go on and wait for it. Ranks must run the same layers in the same "
            "order: a rule is wrong or missing, or a module decides by what it sees in its part of the sequence. What "
            "may help, untried: that module whole ({pattern: ..., style: whole}), or sp=False"
        ) from None


def _rules_by_name(model: nn.Module, plans: Sequence[ShardingPlan]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for match in (match for plan in plans for match in plan.match(model)):
        rule = match.rule.model_dump(exclude={"pattern"})
        found.setdefault(match.name, []).append(repr(sorted(rule.items(), key=str)))
    return {name: "; ".join(rules) for name, rules in found.items()}
