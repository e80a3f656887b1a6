"""What is refused of stages of a pipeline and in which words, and what is told of them before and while they train."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LearningRateFinder
from torch import Tensor, nn

from lightning_seqpar import ParallelConfig, SeqParallelStrategy, describe
from lightning_seqpar.cli.plan import render
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.guards.before_training import describe_bubble
from tests.helpers import models
from tests.helpers.fit import quiet_trainer
from tests.helpers.pipelines import trainer_of
from tests.helpers.slices import rest
from tests.mutants import sees


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Plain(models.Blocks):
    """Three blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__(Block, 3)


class Peeking(Plain):
    """The loss is scaled by what the first block made, which no gradient tells."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        seen: list[Tensor] = []
        handle = self.blocks[0].register_forward_hook(lambda module, args, out: seen.append(out.detach().norm()))
        loss = super().training_step(batch, batch_idx)
        handle.remove()
        return loss * (1 + seen[0])


class Penalised(Plain):
    """An L2 term over all weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + sum(p.pow(2).sum() for p in self.blocks.parameters())


class Counting(Plain):
    """Counts in a buffer: in front of the blocks, where all stages do, or behind them."""

    behind = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += not self.behind
        loss = super().training_step(batch, batch_idx)
        self.steps += self.behind
        return loss


class CountingBehind(Counting):
    behind = True


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Reading(Plain):
    def on_after_backward(self) -> None:
        """Reads gradients."""


class Quasi(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


KINDS = {one.__name__: one for one in (Plain, Peeking, Penalised, Counting, CountingBehind, Manual, Reading, Quasi)}
CALLBACKS: dict[str, Any] = {
    "": Callback, "EMA": lambda: EMAWeightAveraging(decay=0.9), "LR": LearningRateFinder,
}  # fmt: skip


def refused(cases: list[tuple[str, str]]) -> list[str]:
    told = []
    for kind, callback in cases:
        try:
            trainer_of({"pp": 2}, gradient_clip_val=None, accumulate_grad_batches=1, callbacks=[CALLBACKS[callback]()]).fit(
                KINDS[kind](), models.loader(4, length=9)
            )
        except ValueError as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("trained")
    return told


SAYS = {
    ("Plain", ""): "trained",
    ("Peeking", ""): "the loss is no number instead of",
    ("Penalised", ""): "stage 1 reads blocks.0.down.bias, which is on stage 0",
    ("Counting", ""): "trained",
    ("CountingBehind", ""): "the step writes to the buffer steps where one stage alone comes",
    ("Manual", ""): "pp=2 with automatic_optimization=False",
    ("Reading", ""): "Reading.on_after_backward with pp=2",
    ("Quasi", ""): "torch.optim.lbfgs.LBFGS with pp=2: it is not known to update each parameter by itself",
    ("Plain", "EMA"): "EMAWeightAveraging with pp=2: it copies all weights",
    ("Plain", "LR"): "LearningRateFinder with pp=2: it reads the loss behind each batch",
}


@sees(
    "pp: nobody hears that stages compute something else",
    "Prover.check_stages",
    "        if verdict.wrong:\n",
    "        if False:\n",
)
@sees(
    "pp: a buffer that one stage writes passes", "stage_check", "sorted(dense.changed & equal)", "sorted(dense.changed - equal)"
)
def test_what_stages_can_not_do_is_refused():
    cases = list(SAYS)
    for told in run_distributed(refused, 2, cases):
        for case, text in zip(cases, told, strict=True):
            assert SAYS[case] in text, (case, text)


def dealt(pp_layers: list[int] | None) -> tuple[int, list[str]]:
    module = Plain()
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(pp=2, pp_layers=pp_layers), max_steps=1)
    trainer.fit(module, models.loader(4, length=9))
    stage = record_of(module).stage
    return stage.number, [name for at in range(3) if stage.holds(name := f"blocks.{at}.up.weight")]


@sees("pp: the head costs nothing", "trace_cut", "        costs[-1] += ", "        costs[-1] += 0 * ", case="None-2")
@pytest.mark.parametrize(("pp_layers", "first"), [(None, 2), ([1, 2], 1), rest([2, 1], 2)])
def test_blocks_are_dealt_out(pp_layers, first):
    names = [f"blocks.{at}.up.weight" for at in range(3)]
    assert run_distributed(dealt, 2, pp_layers) == [(0, names[:first]), (1, names[first:])]


def test_the_bubble_is_told():
    assert describe_bubble(2, 4) == (
        "pp=4 with accumulate_grad_batches=2: each stage waits 60% of the time for others, since there are fewer micro-batches "
        "than stages; accumulate_grad_batches=16 would leave 16%"
    )
    assert describe_bubble(16, 4) == "pp=4 with accumulate_grad_batches=16: each stage waits 16% of the time for others"


class Stuck(Plain):
    """In the second micro-batch of a window the last stage ends by an error, or waits for longer than the others have patience."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.raises = raises

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)  # only the last stage comes behind it
        if batch_idx == 19 and self.raises:
            raise ArithmeticError("no such luck")
        if batch_idx == 19:
            threading.Event().wait(10.0)
        return loss


def get_stuck(raises: bool) -> None:
    strategy = SeqParallelStrategy(pp=2, timeout=3, self_check=False)
    trainer = quiet_trainer(devices=4, strategy=strategy, max_steps=7, accumulate_grad_batches=3)
    trainer.fit(Stuck(raises), models.loader(1, length=9, count=42))  # no run-time check is due at the 20th


@sees(
    "pp: every micro-batch waits for all stages",
    "Stages.enter_loops",
    '            (loop, "_broadcast_sigterm_tensor", asked),\n',
    "",
    case="stalls",
)
@pytest.mark.parametrize("raises", [True, False], ids=["raises", "stalls"])
def test_a_stage_that_ends_or_stalls_is_told(raises):
    with pytest.raises(RankFailedError) as error:
        run_distributed(get_stuck, 4, raises, timeout=60)  # so that the pipeline has a group of its own
    told = str(error.value)
    # The first stage has sent three micro-batches by the time it waits for the gradient of the second.
    waited = "stage 0 waited for the gradient of micro-batch 2, which did not come from stage 1 (rank 2)"
    assert ("no such luck" if raises else waited) in told


def held_by(sizes: dict[str, int]) -> tuple[int, int]:
    """The parameters and their bytes that this rank of a run holds."""
    module = models.GPT(tied=False)
    trainer = quiet_trainer(devices=dist.get_world_size(), strategy=SeqParallelStrategy(**sizes), max_steps=1)
    trainer.fit(module, models.loader(2, length=9))
    stage = record_of(module).stage
    held = [p for name, p in module.named_parameters() if stage.holds(name)]
    absent = [p for name, p in module.named_parameters() if not stage.holds(name)]
    assert all(p.untyped_storage().nbytes() == p.element_size() for p in absent)
    return sum(p.numel() for p in held), sum(p.nbytes for p in held)


@sees(
    "pp: a stage holds all parameters",
    "HeldParameters.leave_out",
    ".expand(parameter.shape)",
    ".repeat(*parameter.shape)",
    case="{'pp': 2}",
)
@pytest.mark.parametrize("sizes", [{"pp": 2}, rest({"pp": 2, "tp": 2})], ids=str)
def test_stages_hold_what_is_said_of_them(sizes):
    module, batch = models.GPT(tied=False).double(), next(iter(models.loader(2, length=9, count=2)))
    said = describe(module, ParallelConfig(**sizes), batch=batch)
    found = run_distributed(held_by, math.prod(sizes.values()), sizes)
    assert [(stage.parameters, stage.parameter_bytes) for stage in said.stages] == list(dict.fromkeys(found))
    assert [(stage.ends, stage.blocks, stage.alive) for stage in said.stages] == [
        ((("model.blocks.0", "model.blocks.0"),), 1, 2), ((("model.blocks.1", "model.blocks.1"),), 1, 1),
    ]  # fmt: skip
    assert said.parameters == max(stage.parameters for stage in said.stages)
    shown = render(said, 140)
    assert "stage  blocks" in shown
    assert "note: pp=2 with accumulate_grad_batches=2: each stage waits 33% of the time for others" in shown


def test_a_description_shows_chunks_and_what_they_save():
    module, batch = models.GPT(tied=False, layers=5).double(), next(iter(models.loader(2, length=9, count=2)))
    said = describe(module, ParallelConfig(pp=2, virtual_pp=2, pp_layers=[1, 1, 2, 1]), batch=batch)
    assert [(stage.ends, stage.alive) for stage in said.stages] == [
        ((("model.blocks.0", "model.blocks.0"), ("model.blocks.2", "model.blocks.3")), 2.5),
        ((("model.blocks.1", "model.blocks.1"), ("model.blocks.4", "model.blocks.4")), 1.5),
    ]
    shown = render(said, 140)
    assert "model.blocks.0, 2 to 3 (3)" in shown
    assert "pp=2, virtual_pp=2 with accumulate_grad_batches=2: each stage waits 20% of the time for others" in shown
