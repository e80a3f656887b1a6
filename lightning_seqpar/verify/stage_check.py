"""The proof that a model computes in stages what it computes whole: on copies, before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.inference.block_kinds import spread_equal_blocks
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.model_copy import detached_copy, release
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.pipeline.cut import Cut
from lightning_seqpar.pipeline.stage import Stage
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.comparison import COPIES, compare_losses
from lightning_seqpar.verify.observed_run import observe_run
from lightning_seqpar.verify.parity import each_gradient
from lightning_seqpar.verify.run_comparison import Verdict, describe_wrong, wrong_gradients
from lightning_seqpar.verify.self_check import compare_on_copies, shard_copy

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
    """Run a copy of ``model`` whole and another one in stages, and compare them; collective over the world.

    The plans are proved already. What is new here: a stage has no numbers of parameters that others hold, and blocks of other
    stages do not run on it. The verdict is the same on every rank of the replica.

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
        record = shard_copy(parts, plans, config, groups, None)
        record.layout.note_stages(cut.shared)
        record.stage = Stage(parts, cut, groups, device, own_streams=False)
        stages = observe_run(parts, record, own, [], groups)
        verdict = Verdict()
        loss = compare_losses("the loss", [dense.loss], [stages.loss], COPIES[dense.narrow])
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
        made, wanted, limit = stages.buffers, dense.buffers, COPIES[dense.narrow].tensors
        stale = [
            name
            for name in sorted(dense.changed & equal)
            if wanted[name].shape != made[name].shape
            or not torch.allclose(wanted[name], made[name], rtol=limit, atol=0)
        ]
        if stale:
            verdict.wrong.append(
                f"the step writes to the buffer {stale[0]} where one stage alone comes (a batch norm's statistics, a counter), and "
                "the others would have an old one"
            )
        release(parts)
        return verdict

    return compare_on_copies(compare, groups, device, dtype)
