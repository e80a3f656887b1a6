"""Random numbers that the user's own code draws, wherever it draws, seeds, and runs backwards."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.distributed.autograd import in_backward
from lightning_seqpar.testing import run_distributed
from tests.helpers.fit import quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees

WAYS = (
    "full",
    "selective",
    *(f"{part}{kind}" for part in ("block", "attn", "columns", "between", "mlp") for kind in ("", ", reentrant")),
)
"""What is computed again in the backward: by the strategy, or by a checkpoint in the user's code, around a part of a block."""
UNKEPT = ("attn, unkept", "columns, reentrant, unkept", "mlp, unkept")
"""The same by checkpoints that restore no random numbers, in blocks that draw none."""


PLAN = {
    "base": "none",
    "rules": [
        {"pattern": "blocks.*", "style": "blocks"},
        {"pattern": "blocks.*.attn", "style": "gather"},
        {"pattern": "blocks.*.attn", "style": "set", "divide": ["heads"]},
        {"pattern": "blocks.*.attn.qkv", "style": "column", "segments": 3, "units": "heads"},
        {"pattern": "blocks.*.attn.proj", "style": "row", "units": "heads"},
        {"pattern": "blocks.*.up", "style": "gather"},
        {"pattern": "blocks.*.up", "style": "column"},
        {"pattern": "blocks.*.down", "style": "row"},
        {"pattern": "norm", "style": "exit"},
    ],
}


class Notes:
    """What a run draws in each step, by where it does, and where its code seeds torch's generators in this step."""

    def __init__(self) -> None:
        self.drawn: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
        self.step, self.seeds = 0, ""

    def draw(self, where: str, shape: tuple[int, ...]) -> Tensor:
        if self.seeds == where:
            torch.manual_seed(9)
        numbers = torch.rand(shape, dtype=torch.float64)
        if not in_backward():
            self.drawn[self.step, where].append(numbers)
        return numbers


class Drawing(nn.Module):
    """Scales activations by numbers that it draws; ``way`` is one of :data:`WAYS` or :data:`UNKEPT`."""

    def __init__(self, notes: Notes, way: str) -> None:
        super().__init__()
        self.notes, self.way = notes, way

    def scaled(self, x: Tensor, where: str) -> Tensor:
        return x if "unkept" in self.way else x * (0.5 + self.notes.draw(where, tuple(x.shape)))

    def again(self, part: str, call: Any, *args: Tensor) -> Any:
        if self.way.split(",")[0] != part:
            return call(*args)
        return checkpoint(call, *args, use_reentrant="reentrant" in self.way, preserve_rng_state="unkept" not in self.way)


class DrawingAttention(Drawing):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heads, self.qkv, self.proj = 4, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scaled(x, "whole")
        y = self.again("between", self._mix, *self.again("columns", self._columns, x))
        return self.proj(self.scaled(y, "behind the heads"))

    def _columns(self, x: Tensor) -> tuple[Tensor, ...]:
        b, s, _ = x.shape
        return tuple(t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.scaled(self.qkv(x), "columns").chunk(3, -1))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.scaled((q @ k.transpose(-1, -2)).softmax(-1), "heads")
        return (weights @ v).transpose(1, 2).flatten(2)


class DrawingBlock(Drawing):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.n1, self.n2, self.attn = nn.LayerNorm(16), nn.LayerNorm(16), DrawingAttention(*args)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scaled(x, "shards")
        x = x + self.again("attn", self.attn, self.n1(x))
        x = x + self.again("mlp", self._mlp, self.n2(x))
        return self.scaled(x, "behind the rows")

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(self.scaled(F.gelu(self.up(x)), "features"))


CASES = [
    ("", (1, 0)),
    ("between forwards", (1, 0)),
    *((where, (0, 1)) for where in ("whole", "shards", "columns", "heads", "behind the rows")),
]
"""Of each step where its code seeds, and which forward's backward runs first."""


class DrawingModel(L.LightningModule):
    """Runs two forwards in a step, and their backwards in the order of :data:`CASES`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.embed, self.norm, self.out = nn.Embedding(31, 16), nn.LayerNorm(16), nn.Linear(16, 31)
        self.notes, self.grads = Notes(), []
        self.blocks = nn.ModuleList(DrawingBlock(self.notes, way) for _ in range(2))

    def one(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if float(self.notes.draw("between the blocks", (2,))[0]) > -1:
                x = block.again("block", block, x)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), ids.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (ids,) = batch
        self.notes.step = batch_idx
        self.notes.seeds, order = CASES[batch_idx]
        self.notes.draw("in front", (2,))
        losses = [self.one(ids)]
        self.notes.draw("between forwards", (2,))
        losses.append(self.one(ids.flip(1)))
        for at in order:
            self.notes.draw("beside backwards", (2,))
            self.manual_backward(losses[at])
        self.notes.draw("beside backwards", (2,))
        self.grads.append([p.grad.clone() for p in self.parameters()])
        self.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(way: str, tp: int, sp: bool, kind: type[DrawingModel] = DrawingModel, pp: int = 1) -> DrawingModel:
    L.seed_everything(5, verbose=False)
    data = DataLoader(TensorDataset(torch.randint(31, (2 * len(CASES), 11))), batch_size=2)
    recompute = way if way in ("full", "selective") else "none"
    strategy = SeqParallelStrategy(tp=tp, sp=sp, pp=pp, plan=PLAN, self_check=False, recompute=recompute)
    module = kind(way)
    module.automatic_optimization = kind is not DrawingModel
    quiet_trainer(devices=tp * pp, strategy=strategy, max_epochs=1).fit(module, data)
    return module


def run_all(tp: int, sp: bool) -> tuple[dict[tuple[int, str], list[Tensor]], list[tuple[str, int]]]:
    """What a rank draws where nothing runs again, and the ways and steps in which another way draws or computes another thing."""
    plain, without, wrong = run("", tp, sp), run(", unkept", tp, sp), []
    for way in (*WAYS, *UNKEPT):
        again, expected = run(way, tp, sp), without if way in UNKEPT else plain
        for step, (grads, kept) in enumerate(zip(again.grads, expected.grads, strict=True)):
            alike = [one.allclose(other, rtol=1e-9, atol=1e-12) for one, other in zip(grads, kept, strict=True)]
            for where, numbers in expected.notes.drawn.items():
                alike += map(torch.equal, again.notes.drawn[where], numbers) if where[0] == step else []
            wrong += [] if all(alike) else [(way, step)]
    return dict(plain.notes.drawn), wrong


@sees(
    "draws behind a backward from the stream that a recompute left",
    "Steps._run_backward",
    "                    region.streams.end()\n",
    "                    pass\n",
    case="2-True",
)
@pytest.mark.parametrize(("tp", "sp"), [(2, True), rest(2, False), rest(4, True), rest(4, False)])
def test_what_user_code_draws_is_alike_or_apart_and_drawn_again_in_a_backward(tp, sp):
    ranks = run_distributed(run_all, tp, tp, sp)
    assert [wrong for _, wrong in ranks] == [[]] * tp
    alike = {"whole", "between the blocks", "in front", "between forwards", "beside backwards"}
    alike |= set() if sp else {"shards", "behind the rows"}
    first, numbers = ranks[0][0], []
    assert len(first) == 11 * len(CASES)
    for (step, where), expected in first.items():
        others = [drawn[step, where] for drawn, _ in ranks[1:]]
        if where in alike:
            assert all(all(map(torch.equal, drawn, expected)) for drawn in others), (step, where)
        if step < 2:  # else all draw alike behind the seed, until they come to the next switch
            numbers += [one.flatten() for drawn in (expected, *([] if where in alike else others)) for one in drawn]
    everything = torch.cat(numbers)
    assert len(everything.unique()) == len(everything)  # nothing is drawn twice, by one rank or several


class InStages(DrawingModel):
    """Notes behind each step which stream is current."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), batch[0].flatten())

    def on_train_batch_end(self, *args: Any) -> None:
        self.grads.append(torch.initial_seed())


def run_in_stages() -> list[int]:
    return run("attn, unkept", 2, True, kind=InStages, pp=2).grads


def test_behind_a_backward_in_stages_all_draw_alike():
    assert len({seed for seeds in run_distributed(run_in_stages, 4) for seed in seeds}) == 1
