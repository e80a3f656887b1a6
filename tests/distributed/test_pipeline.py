"""Stages of a pipeline run the user's own step, micro-batches one forward and one backward at a time, as one process does."""

from __future__ import annotations

import random
import re
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.infer import infer_blocks, infer_plan
from lightning_seqpar.inference.pipeline_cut import deal_out, find_cut
from lightning_seqpar.parallel.apply import parallelize
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.pipeline.cut import OneForwardOneBackward
from lightning_seqpar.pipeline.stage import Stage
from lightning_seqpar.plan.sharding_plan import STYLES
from lightning_seqpar.styles.style import PlannedModel
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.topology.process_groups import ParallelGroups
from tests.helpers import dropping, models
from tests.helpers.fit import class_named
from tests.helpers.slices import rest
from tests.mutants import sees


class Biased(models.GPT):
    """A table outside the blocks that all of them read, and a block that returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 16 * 16).view(16, 16))
        self.embed, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.blocks = nn.ModuleList(PairBlock() for _ in range(4))
        models.perturb(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        x, shift = self.embed(ids), self.table.tanh()[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, shift)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, shift: Tensor) -> tuple[Tensor, None]:
        return x + self.down(F.gelu(self.up(self.norm(x) + shift))), None


class Skipping(Biased):
    """The last block reads what the first one made, past the activation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        x, first = self.embed(ids), torch.zeros(())
        for at, block in enumerate(self.blocks):
            x = block(x + first * (at == 3), self.table[: ids.shape[1]])[0]
            first = x if at == 0 else first
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class BeginsToRead(Biased):
    """From some step on, the head adds the embedding's mean, which the last stage did not read before."""

    begins = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.embed.weight.mean() if self.begins else loss


OWN: dict[str, Any] = {one.__name__: one for one in (Biased, Skipping, BeginsToRead)}


def made(name: str, args: dict[str, Any]) -> L.LightningModule:
    module: L.LightningModule = (OWN.get(name) or class_named(name))(**args).double()
    module.log = lambda *given, **more: None  # type: ignore[method-assign]
    return module


def batches() -> list[Any]:
    """Micro-batches of different sizes and lengths."""
    data = models.tokens(count=12, length=9).tensors[0]
    return [[data[4 * at : 4 * at + 3 + at % 2, : 9 - at % 3]] for at in range(3)]


def groups_of(tp: int = 1) -> ParallelGroups:
    topology = ProcessTopology(["pp", "dp", "cp", "tp"], [dist.get_world_size() // tp, 1, 1, tp])
    return ParallelGroups(topology, dist.get_rank(), pp_channels=4)


def stage_of(module: L.LightningModule, example: Any, groups: ParallelGroups | None = None, *, sp: bool = True) -> Stage:
    """This rank's stage, of a model that is sharded over tp too where the groups have several such ranks."""
    given = Example("the first batch", "training_step", (example, 0), {})
    plan = infer_blocks(module, given)
    planned = PlannedModel(module, plan.match(module), list(STYLES), 1, False)
    groups = groups or groups_of()
    cut = find_cut(module, given, planned.stacks, ParallelConfig(pp=groups.size("pp")))
    if groups.size("tp") > 1:
        parallelize(module, [infer_plan(module, given, groups.size("tp")).plan], groups, sp=sp)
    return Stage(module, cut, groups, torch.device("cpu"))


def refused(name: str, args: dict[str, Any]) -> str:
    module = made(name, args)
    try:
        stage_of(module, batches()[0])
    except ValueError as error:
        return str(error)
    return ""


@sees(
    "pp: what goes past the activation is not refused",
    "trace_cut",
    "if other != at and crossing:",
    "if other > at and crossing:",
    case="past the activation",
)
@sees(
    "stacks: what a block returns and nobody is given is left out",
    "_Traced.take",
    "            if self._left:\n",
    "            if self._left is None:\n",
    case="two activations",
)
@pytest.mark.parametrize(
    ("name", "args", "stages", "says"),
    [
        ("Skipping", {}, 2, r"pp=2: stage 1 reads blocks\.0\.\S+, which is on stage 0, or what it made, past the activation"),
        ("GPT", {}, 3, r"pp=3: model has 2 blocks, and each stage needs one; use pp=2 at most"),
        ("ThirdParty", {"kind": "two_activations"}, 2, r"net\.blocks\.1: the block before it returns more than its activation"),
    ],
    ids=["past the activation", "too few", "two activations"],
)
def test_what_can_not_be_cut_is_refused(name, args, stages, says):
    for told in run_distributed(refused, stages, name, args):
        assert re.search(says, told), told


def begin_to_read() -> None:
    module, data = made("BeginsToRead", {}), batches()
    stage = stage_of(module, data[0])
    module.begins = True
    loss = stage.run(lambda: module.training_step(data[0], 0))
    stage.check_graph(loss)
    stage.settle()


@sees("pp: nobody looks at what a stage reads", "HeldParameters.check_graph", "if not self.holds(name)}", "if not name}")
def test_a_stage_that_begins_to_read_what_it_does_not_hold_is_told():
    with pytest.raises(RankFailedError, match=r"stage 1 of 2 reads embed\.weight, which is on stage 0"):
        run_distributed(begin_to_read, 2)


def drop_over_tp(sp: bool) -> tuple[int, dict[str, list[Tensor]], Tensor]:
    groups = groups_of(2)
    module = dropping.Dropping(depth=2)
    torch.manual_seed(5)  # with which masks of four flags are not equal by chance
    data = [torch.randint(31, (4, 12), generator=torch.Generator().manual_seed(1))]
    stage, record = stage_of(module, data, groups, sp=sp), record_of(module)
    assert record is not None
    for part in module.modules():
        part.__dict__.pop("masks", None)
    for _ in range(2):
        record.reset_calls()
        stage.run(lambda: module.training_step(data, 0)).backward()
    stage.settle()
    return stage.number, {n: part.masks for n, part in module.named_modules() if hasattr(part, "masks")}, torch.rand(2)


@sees("pp: all stages drop out alike", "StageStreams.begin_stage", "_STAGE + chunk", "_STAGE", case="True")
@sees(
    "pp: stages go on apart behind a forward",
    "StageStreams.end",
    "_BEHIND_STAGES)",
    "_BEHIND_STAGES + self._stage)",
    case="True",
)
@pytest.mark.parametrize("sp", [True, rest(False)])
def test_over_tp_masks_are_alike_where_activations_are_and_of_each_stage_its_own(sp):
    told = run_distributed(drop_over_tp, 4, sp)
    assert [number for number, _, _ in told] == [0, 0, 1, 1]
    assert all(torch.equal(told[0][2], after) for _, _, after in told)
    for first, second in (told[:2], told[2:]):
        assert len(first[1]) == 6
        for name, masks in first[1].items():
            alike = name.endswith(("drop", "path", "before")) or (not sp and name.endswith("behind"))
            for one, two in zip(masks, second[1][name], strict=True):
                assert (one.shape == two.shape and torch.equal(one, two)) == alike, name
    for name, masks in told[0][1].items():
        if name != "drop":  # that of the second stage, of NaN, tells nothing
            other = told[2][1][name.replace("blocks.0", "blocks.1")]
            assert not any(torch.equal(one, two) for one, two in zip(masks, other, strict=True)), name


class HostDraws(Biased):
    """Mixes inputs by a number of numpy's, which the loss reads too, and draws from both generators behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mixed += [float(np.random.beta(1, 1)), random.random()]
        loss = super().training_step(batch, batch_idx)
        return loss * float(np.random.rand()) * random.random()


def draw_on_host() -> list[float]:
    random.seed(3), np.random.seed(3)
    module, data = HostDraws().double(), batches()
    stage = stage_of(module, data[0])
    module.mixed = []
    for at in range(3):
        stage.run(lambda at=at: module.training_step(data[at], at)).backward()
    stage.settle()
    return module.mixed


@sees(
    "pp: generators of the host go on apart",
    "Stage.run",
    "                self._streams.end_on_host()\n",
    "                pass\n",
)
def test_stages_draw_alike_from_the_generators_of_the_host():
    one, other = run_distributed(draw_on_host, 2)
    assert one == other
    assert len(set(one)) == 6


class OwnGenerator(Biased):
    """Draws from a generator of its own behind the blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.rand((), generator=torch.Generator().manual_seed(1), dtype=loss.dtype)


class Twice(Biased):
    """The blocks run once more in the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + super().training_step(batch, batch_idx) if batch_idx else loss


class MaskOfEmbeddings(Biased):
    """Blocks are given a mask that is made of the embedding's values, which a stage behind does not have."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        x = self.embed(ids)
        shift = (x.detach().abs().sum(-1, keepdim=True) > 9.0).to(x.dtype) * self.table.tanh()[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, shift)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class BeginsToDrop(Biased):
    """Drops out the loss from the second batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.dropout(super().training_step(batch, batch_idx), 0.5 * (batch_idx > 0))


class Leaving(Biased):
    """Comes to no block in the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.embed.weight.sum() if batch_idx else super().training_step(batch, batch_idx)


OWN |= {one.__name__: one for one in (OwnGenerator, Twice, MaskOfEmbeddings, BeginsToDrop, Leaving)}


def run_two(kind: str, mixed_up: bool) -> None:
    """Two micro-batches; ``mixed_up`` has their backwards in another order on the first stage."""
    module, data = made(kind, {}), batches()
    stage = stage_of(module, data[0])
    before = torch.get_rng_state()
    losses = [stage.run(lambda: module.training_step(data[0], 0))]
    assert torch.equal(before, torch.get_rng_state())  # as on one process, where nothing draws
    losses.append(stage.run(lambda: module.training_step(data[1], 1)))
    for loss in losses[::-1] if mixed_up and not stage.is_last else losses:
        loss.backward()


@sees(
    "pp: blocks run once more on what passed by",
    "Stage._begin_at",
    "if self._runs and name in self._ran:",
    "if self._runs and not name:",
    case="second pass",
)
@sees(
    "pp: nobody looks what a block is given beside its activation",
    "Stage._take_at",
    "                self._check_beside(name, came, beside)\n",
    "                pass\n",
    case="mask",
)
@sees(
    "pp: a generator of the step's own goes on apart",
    "find_cut",
    "if any(one.seeded for one in",
    "if any(not one for one in",
    case="generator",
)
@sees(
    "pp: draws of a model that drew nothing are not told",
    "Stage.run",
    "if drew and self._own_streams:",
    "if not drew and False:",
    case="draws",
)
@sees(
    "pp: nobody looks whose gradient came",
    "Link.receive",
    "if came.micro_batch != message.micro_batch or",
    "if came.micro_batch < 0 or",
    case="mixed up",
)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("OwnGenerator", r"pp=2: the step draws from a torch\.Generator of its own in the blocks or behind them"),
        ("Twice", r"stage 1 of 2: blocks\.2 is called once more in a training step"),
        (
            "MaskOfEmbeddings",
            r"stage 1 of 2: what blocks\.2 is given beside its activation .* is not what stage 0 would give it",
        ),
        ("BeginsToDrop", r"stage \d of 2: the step drew random numbers, as it did not in the example"),
        ("Leaving", r"stage \d of 2: the step ended without calling"),
        ("GPT", r"stage 0 waited for the gradient of micro-batch 2, and stage 1 sent that of micro-batch 1"),
    ],
    ids=["generator", "second pass", "mask", "draws", "no blocks", "mixed up"],
)
def test_what_would_differ_from_stage_to_stage_is_told(kind, says):
    with pytest.raises(RankFailedError, match=says):
        run_distributed(run_two, 2, kind, kind == "GPT")


class Probed(Biased):
    """Has a table that the example does not read, and notes what goes from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.linspace(0, 1, 31), requires_grad=False)
        self.between: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.table[: ids.shape[1]])[0]
            self.between.append(bool(x.isnan().any()))
        loss = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return loss * self.probe[5] if batch_idx else loss


def probe() -> tuple[float, list[bool]]:
    module, data = Probed().double(), batches()
    stage = stage_of(module, data[0])
    module.between = []
    losses = [stage.run(lambda at=at: module.training_step(data[0], at)) for at in range(2)]
    for loss in losses:
        loss.backward()
    stage.settle()
    return float(losses[1].detach() / losses[0].detach()), module.between


@sees("pp: what passes by looks like an activation", "_nothing_like", 'float("nan")', "1.0")
@sees(
    "pp: what nothing read is on the first stage alone",
    "trace_cut",
    "            each.add(unread)\n",
    "            held[0].add(unread)\n",
)
def test_what_passed_by_is_no_number_and_what_was_unread_is_there():
    (_, first), (ratio, second) = run_distributed(probe, 2)
    assert first == [False, False] * 2  # its own blocks, behind which the step ends
    assert second == [True, True, False, False] * 2
    assert ratio == pytest.approx(5 / 30)


@pytest.mark.parametrize(
    ("costs", "stages", "layers"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 1, 1], 2, [2, 3]),  # the first stage keeps more micro-batches
        ([10] * 31 + [34], 4, [8, 9, 9, 6]),  # the head costs as much as 2.4 blocks
        ([1, 1, 1, 9], 3, [1, 2, 1]),
        ([5], 1, [1]),
    ],
)
def test_blocks_are_dealt_out_by_cost(costs, stages, layers):
    assert deal_out(costs, stages) == layers


@pytest.mark.parametrize(("behind", "micro"), [(0, 4), (1, 4), (3, 4), (3, 8), (3, 1)])
def test_the_order_of_backwards(behind, micro):
    schedule, done, alive = OneForwardOneBackward(behind), [], []
    for at in range(micro):
        schedule.add(lambda at=at: done.append(at), is_last=at == micro - 1)
        alive.append(at + 1 - len(done))
    assert done == list(range(micro))
    assert max([*alive, 0]) <= behind
