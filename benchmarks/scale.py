"""What one rank of a large world does before it trains, in seconds: ``python benchmarks/scale.py 4096``.

Torch's fake backend answers every collective at once: what is left is this rank's own work, which must not grow with groups
that the rank is not in.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from byte_gpt import ByteGPT  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from lightning_seqpar import ParallelGroups, ProcessTopology  # noqa: E402
from lightning_seqpar.parallel.apply import parallelize  # noqa: E402
from lightning_seqpar.plan.choice import resolve_plans  # noqa: E402

TP, PP = 8, 4


def measure(world: int) -> dict[str, float]:
    """Seconds of each part, at tp 8, pp 4 and the rest dp, on a rank in the middle."""
    rank = world // 2 + 3
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    torch.manual_seed(0)
    model = ByteGPT(dim=512, n_head=8, n_layer=24, context=64, tied=False)
    found, last = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        found[name], last = round(now - last, 4), now

    topology = ProcessTopology(["pp", "dp", "cp", "tp"], [PP, world // (TP * PP), 1, TP])
    lap("topology")
    groups = ParallelGroups(topology, rank)
    lap("groups")
    plans = resolve_plans("auto", model, lambda: None)
    lap("plan")
    parallelize(model, plans, groups)
    lap("swap")
    return found


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
