"""A step whose collectives take time, with and without the work that hides them: ``python benchmarks/overlap.py steps``.

One process plays a rank whose collectives take as long as a product does on average (``loopback.py``): a step in which each
is waited for where it starts, and one in which input-grad products, weight-grad products and the backward run under them.
``trace`` shows a step of two true gloo ranks as torch's profiler saw it.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import loopback  # noqa: E402
import peers  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from lightning_seqpar import ParallelGroups, ProcessTopology  # noqa: E402
from lightning_seqpar.inference.infer import infer_plan  # noqa: E402
from lightning_seqpar.parallel.apply import parallelize  # noqa: E402
from lightning_seqpar.plan.sharding_plan import resolve_plans  # noqa: E402
from lightning_seqpar.testing import run_distributed  # noqa: E402

PRODUCTS_A_LAYER = 4  # that a collective stands beside: q k v together, o, gate and up together, down
CASES: dict[str, dict[str, Any]] = {
    "dp 2 × tp 2": {"dp": 2, "tp": 2},
    "dp 2 × tp 4": {"dp": 2, "tp": 4},
    "tp 2": {"dp": 1, "tp": 2},
    "dp 2 × tp 2, no sp": {"dp": 2, "tp": 2, "sp": False},
}


def shard(model: peers.Decoder, batch: Tensor, groups: ParallelGroups, *, sp: bool = True) -> Any:
    """The model on its ranks, every large activation gathered and made again."""
    tp = groups.size("tp")
    plans = resolve_plans("auto", model, lambda: infer_plan(model, (batch[:, :8],), tp).plan)
    return parallelize(model, plans, groups, sp=sp, regather=True)


class Player:
    """One rank of dp × tp, with nobody else there.

    Args:
        wire: how long collectives take.
        dim: features; 4 sequences of ``length`` tokens, ``layers`` layers.
        dp: replicas.
        tp: tensor-parallel ranks.
        sp: whether the sequence is sharded between them.
    """

    def __init__(
        self, wire: loopback.Wire, dim: int, length: int, *, dp: int, tp: int, layers: int = 4, sp: bool = True
    ) -> None:
        loopback.play(0, dp * tp, wire)
        groups = ParallelGroups(ProcessTopology(["dp", "tp"], [dp, tp]), 0)
        torch.manual_seed(0)
        model = peers.Decoder(dim, layers, vocab=512)
        self.layers, self.batch = layers, torch.randint(0, 512, (4, length))
        shard(model, self.batch, groups, sp=sp)
        self.model: nn.Module = model
        if dp > 1:
            layer = sum(p.nbytes for p in model.layers[0].parameters()) / 2**20
            self.model = DistributedDataParallel(model, process_group=groups["dp"], bucket_cap_mb=layer)

    def step(self) -> None:
        """Forward and backward, at whose end a replica's reduction is waited for."""
        for parameter in self.model.parameters():
            parameter.grad = None
        loss: Tensor = self.model(self.batch).float().pow(2).mean()
        loss.backward()

    def close(self) -> None:
        """The process may play another rank."""
        dist.destroy_process_group()


def measure(dim: int, length: int, rounds: int, clock: loopback.Clock, **shape: Any) -> dict[str, list[float]]:
    """Times of a step with no latency, with collectives waited for at once, and overlapped; in turn, ``rounds`` times."""
    wire = loopback.ClockWire(clock)
    player = Player(wire, dim, length, **shape)
    found: dict[str, list[float]] = {"products": [], "serial": [], "overlapped": []}

    def lap(name: str, wait: float, *, serial: bool) -> None:
        wire.latency, wire.serial = wait, serial
        begin = clock.now()
        player.step()
        clock.sleep_until(wire.latest)
        found[name].append(clock.now() - begin)

    for _ in range(3):
        player.step()
    for _ in range(rounds):
        lap("products", 0.0, serial=False)
        # Forward and backward are three products each.
        each = statistics.median(found["products"]) / (3 * PRODUCTS_A_LAYER * player.layers)
        lap("serial", each, serial=True)
        lap("overlapped", each, serial=False)
    player.close()
    return found


def counted() -> dict[str, dict[str, list[float]]]:
    """Each case by a clock that counts multiplications alone: the same on every machine."""
    found = {}
    for name, shape in CASES.items():
        with loopback.ProductClock() as clock:
            found[name] = measure(256, 16, 1, clock, **shape)
    return found


def steps(rounds: int = 3) -> dict[str, Any]:
    """Each case by that clock, and by the wall."""
    wall = loopback.WallClock()
    return {name: {"counted": one, "wall": measure(512, 512, rounds, wall, **CASES[name])} for name, one in counted().items()}


def trace() -> dict[str, Any]:
    """A step of two gloo ranks: ``[kind, begin, end]`` of products and collectives in ms, and where the backward begins."""
    return run_distributed(_traced, 2, 512, 256)[0]


def _traced(dim: int, length: int) -> dict[str, Any]:
    groups = ParallelGroups(ProcessTopology(["tp"], [2]), dist.get_rank())
    torch.manual_seed(0)
    model, batch = peers.Decoder(dim, 2, vocab=512), torch.randint(0, 512, (4, length))
    shard(model, batch, groups)
    for _ in range(2):
        model(batch).float().pow(2).mean().backward()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loss = model(batch).float().pow(2).mean()
        with torch.profiler.record_function("backward"):
            loss.backward()
    kinds = {
        "aten::mm": "product",
        "aten::bmm": "product",
        "aten::addmm_": "product",
        "gloo:all_to_all": "collective",
        "backward": "backward",
    }
    told = [(kinds[e.name], e.time_range.start, e.time_range.end) for e in seen.events() if e.name in kinds]
    first = min(begin for _, begin, _ in told)
    spans = sorted((kind, (begin - first) / 1e3, (end - first) / 1e3) for kind, begin, end in told)
    begin, end = next((a, b) for kind, a, b in spans if kind == "backward")
    return {"spans": [span for span in spans if span[0] != "backward"], "backward": [begin, end]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"counted": counted, "steps": steps, "trace": trace}[sys.argv[1]]()))
