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

WAYS = (
    "",
    "full",
    "selective",
    *(f"{part}{kind}" for part in ("block", "attn", "columns", "between", "mlp") for kind in ("", ", reentrant")),
)
"""What is computed again in the backward: by the strategy, or by a checkpoint in the user's code, around a part of a block."""


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


class Drawing(nn.Module):
    """Scales activations by numbers that it draws, and keeps those of forwards by where they were drawn.

    Args:
        drawn: the numbers.
        way: one of :data:`WAYS`.
        seeds: where the code seeds torch's generators, in front of its draw.
    """

    def __init__(self, drawn: dict[str, list[Tensor]], way: str, seeds: str) -> None:
        super().__init__()
        self.drawn, self.way, self.seeds = drawn, way, seeds

    def scaled(self, x: Tensor, where: str) -> Tensor:
        if self.seeds == where:
            torch.manual_seed(9)
        numbers = torch.rand(x.shape, dtype=x.dtype)
        if not in_backward():
            self.drawn[where].append(numbers)
        return x * (0.5 + numbers)

    def again(self, part: str, call: Any, *args: Tensor) -> Any:
        if self.way.split(",")[0] != part:
            return call(*args)
        return checkpoint(call, *args, use_reentrant="reentrant" in self.way)


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
        return tuple(
            t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.scaled(self.qkv(x), "columns").chunk(3, -1)
        )

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


class DrawingModel(L.LightningModule):
    """Runs several forwards and then their backwards, in another order.

    Args:
        order: the forwards whose backwards run, in order.
    """

    def __init__(self, way: str, seeds: str, order: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.drawn: dict[str, list[Tensor]] = defaultdict(list)
        self.embed, self.norm, self.out = nn.Embedding(31, 16), nn.LayerNorm(16), nn.Linear(16, 31)
        self.blocks = nn.ModuleList(DrawingBlock(self.drawn, way, seeds) for _ in range(2))
        self.seeds, self.order, self.grads = seeds, order, []

    def one(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if self.draw("between the blocks") > -1:
                x = block.again("block", block, x)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), ids.flatten())

    def draw(self, where: str) -> float:
        self.drawn[where].append(torch.rand(2))
        return float(self.drawn[where][-1][0])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (ids,) = batch
        self.draw("in front")
        losses = [self.one(ids)]
        if self.seeds == "step":
            torch.manual_seed(batch_idx)
        self.draw("between forwards")
        losses.append(self.one(ids.flip(1)))
        self.draw("behind")
        for at in self.order:
            self.manual_backward(losses[at])
            self.draw("between backwards")
        self.grads.append({name: p.grad.clone() for name, p in self.named_parameters()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


CASES = [
    ("", (1, 0)),
    ("step", (1, 0)),
    *((where, (0, 1)) for where in ("whole", "shards", "columns", "heads", "behind the rows")),
]
"""Where the user's code seeds, and the order of backwards."""
ALIKE = {"whole", "between the blocks", "in front", "between forwards", "behind", "between backwards"}
Run = tuple[dict[str, list[Tensor]], list[dict[str, Tensor]]]


def run_all(tp: int, sp: bool) -> list[list[Run]]:
    return [[run_one(tp, sp, way, seeds, order) for way in WAYS] for seeds, order in CASES]


def run_one(tp: int, sp: bool, way: str, seeds: str, order: tuple[int, ...]) -> Run:
    L.seed_everything(5, verbose=False)
    data = DataLoader(TensorDataset(torch.randint(31, (8, 11))), batch_size=4)
    recompute = way if way in ("full", "selective") else "none"
    strategy = SeqParallelStrategy(tp=tp, sp=sp, plan=PLAN, self_check=False, recompute=recompute)
    module = DrawingModel(way, seeds, order)
    quiet_trainer(devices=tp, strategy=strategy, max_epochs=1).fit(module, data)
    return dict(module.drawn), module.grads


@pytest.mark.parametrize(("tp", "sp"), [(2, True), rest(2, False), rest(4, True), rest(4, False)])
def test_what_user_code_draws_is_alike_or_apart_and_drawn_again_in_a_backward(tp, sp):
    ranks = run_distributed(run_all, tp, tp, sp, timeout=600.0)
    alike = ALIKE if sp else {*ALIKE, "shards", "behind the rows"}
    for number, (seeds, _) in enumerate(CASES):
        plain = [rank[number][0] for rank in ranks]
        for where, first in plain[0][0].items():
            for drawn, _ in plain[1:]:
                if where in alike:
                    assert all(map(torch.equal, drawn[where], first)), (seeds, where)
        if seeds in ("", "step"):  # else all draw alike behind the seed, until they come to the next switch
            runs = [(drawn, drawn.keys() if drawn is plain[0][0] else drawn.keys() - alike) for drawn, _ in plain]
            numbers = torch.cat([one.flatten() for drawn, names in runs for name in names for one in drawn[name]])
            assert len(numbers.unique()) == len(numbers), seeds  # nothing is drawn twice
        for at, way in enumerate(WAYS):
            for (drawn, grads), (expected, kept) in zip((rank[number][at] for rank in ranks), plain, strict=True):
                assert all(all(map(torch.equal, drawn[where], expected[where])) for where in expected), (seeds, way)
                for one, other in zip(grads, kept, strict=True):
                    for name in one:
                        assert one[name].allclose(other[name], rtol=1e-9, atol=1e-12), (seeds, way, name)
