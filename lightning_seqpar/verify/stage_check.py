"""The proof that a model computes in stages what it computes whole: on copies, before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from lightning_seqpar.distributed.rng import kept_streams
from lightning_seqpar.inference.block_kinds import spread_equal_blocks
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.model_copy import default_dtype, detached_copy, release
from lightning_seqpar.inference.trainer_view import describe_failure
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.pipeline.cut import Cut
from lightning_seqpar.pipeline.stage import Stage
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.observed_run import ObservedRun, observe_run
from lightning_seqpar.verify.parity import each_gradient
from lightning_seqpar.verify.run_comparison import LIMIT, NARROW_LIMIT, Verdict, worst_gradient
from lightning_seqpar.verify.self_check import Sharding, share_verdict

_NO_NUMBERS = (
    "it is made of an activation between blocks, or of a parameter, that another stage has (a hidden state in the loss, or "
    "torch.utils.checkpoint around a block, in whose place recompute='full' can stand)"
)


def stage_check(
    model: nn.Module,
    plans: Sequence[ShardingPlan],
    cut: Cut,
    how: Sharding,
    groups: ParallelGroups,
    example: Example,
    *,
    device: torch.device,
    dtype: torch.dtype | None = torch.float64,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> Verdict:
    """Run a copy of ``model`` whole and another one in stages, and compare them; collective over the world.

    The plans are proved already. What is new here: a stage has no numbers of parameters that others hold, and blocks of other
    stages do not run on it. A value that goes from block to block beside the activation, and of which no gradient tells, is wrong.

    Args:
        model: the whole model, which is not touched.
        plans: of the model.
        cut: where it is cut.
        how: the sharding of the copy in stages.
        groups: the process groups that training will use.
        example: the input of both copies.
        device: this rank's.
        dtype: of the copies; None keeps the model's own types.
        prepare: is called with each copy before it runs.

    Returns:
        The verdict, the same on every rank of the replica.

    Raises:
        FailedAloneError: on a rank whose copy raises while others wait for it.
    """
    example = example.to(device, dtype)
    # Of a large model two blocks of each stage are computed, the first one's gradients alone are kept, in both copies.
    firsts = {stack.blocks[0] for stack in cut.stacks}  # which make what the others are given
    passed_by = [name for names in cut.blocks for name in names[2:] if name not in firsts]
    passed_by = passed_by if example.reduction.skips_repeats else []
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
        record = how.shard(parts, plans, groups, None)
        record.layout.note_stages(cut.shared)
        record.stage = Stage(parts, cut, groups, device, own_streams=False)
        stages = observe_run(parts, record, own, [], groups)
        verdict = Verdict()
        error = abs(dense.loss - stages.loss) / max(abs(dense.loss), 1e-12)
        if math.isnan(stages.loss):
            verdict.wrong.append(f"the loss is no number instead of {dense.loss:.9g}: {_NO_NUMBERS}")
        elif not error <= (NARROW_LIMIT if dense.narrow else LIMIT):
            verdict.wrong.append(f"the loss differs: {stages.loss:.9g} instead of {dense.loss:.9g}")
        worst = worst_gradient(dense.grads, each_gradient(parts), narrow=dense.narrow)
        if worst and math.isnan(worst.ratio) and not math.isnan(stages.loss):
            verdict.wrong.append(f"the gradient of {worst.name} is no number: {_NO_NUMBERS}")
        elif worst and not math.isnan(worst.ratio):
            verdict.wrong.append(
                f"the gradient of {worst.name} is {worst.ratio:.4g} times as large as it should be (error {worst.error:.1e} of "
                "the global norm)"
            )
        equal = {name for name, _ in record.equal_buffers()}
        if stale := [name for name in sorted(dense.changed & equal) if not _close(dense, stages, name)]:
            verdict.wrong.append(
                f"the step writes to the buffer {stale[0]} where one stage alone comes (a batch norm's statistics, a counter), and "
                "the others would have an old one"
            )
        release(parts)
        return verdict

    failure: str | None = None
    verdict = Verdict()
    with kept_streams(device), default_dtype(dtype):
        try:
            verdict = compare()
        except Exception as error:  # every rank hears of it below
            failure = describe_failure(error)
    return share_verdict(verdict, failure, groups)


def _close(dense: ObservedRun, stages: ObservedRun, name: str) -> bool:
    """Whether a buffer of a copy in stages has the values that the step gave it in the whole one."""
    one, other = dense.buffers[name], stages.buffers[name]
    return one.shape == other.shape and torch.allclose(one, other, rtol=NARROW_LIMIT if dense.narrow else LIMIT, atol=0)
