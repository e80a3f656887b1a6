"""Host time of a block, dense and sharded, where nothing is sent: ``python benchmarks/host_time.py``.

Collectives of torch's fake backend return at once, and the sizes are so small that products cost next to nothing: what is left is
what the host does for each block, which a GPU has to be fast enough to hide, or to be hidden behind. Times are those of the thread,
so other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
from byte_gpt import ByteGPT  # noqa: E402

from lightning_seqpar import ParallelGroups, ProcessTopology  # noqa: E402
from lightning_seqpar.distributed.rng import DEVICES  # noqa: E402
from lightning_seqpar.parallel.apply import parallelize  # noqa: E402
from lightning_seqpar.plan.choice import resolve_plans  # noqa: E402

BLOCKS, TOKENS, ROUNDS, STEPS = 8, 16, 5, 30


def step(model: torch.nn.Module, ids: torch.Tensor, record: Any, draws: bool) -> tuple[float, float]:
    """Microseconds of a forward and of a backward, for each block."""
    if record is not None:
        record.reset_calls(draws=DEVICES if draws else ())
    began = time.thread_time()
    out = model(ids)
    forward = time.thread_time() - began
    loss = out.sum()
    began = time.thread_time()
    loss.backward()
    backward = time.thread_time() - began
    model.zero_grad()
    return forward / BLOCKS * 1e6, backward / BLOCKS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (1, TOKENS))
    built = [ByteGPT(dim=given.dim, n_head=8, n_layer=BLOCKS, context=64, tied=False) for _ in range(2)]
    groups = ParallelGroups.silent(ProcessTopology(["dp", "tp"], [1, given.tp]), 0)
    record = parallelize(built[1], resolve_plans("byte_gpt", built[1]), groups)
    ways: dict[str, tuple[torch.nn.Module, Any, bool]] = {
        "dense": (built[0], None, False),
        "sharded": (built[1], record, False),
        "sharded, streams switched": (built[1], record, True),
    }
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):  # in turns, so that what else the machine does hits all of them
        for way, (model, of, draws) in ways.items():
            made = [step(model, ids, of, draws) for _ in range(STEPS)]
            times[way].append((statistics.median(f for f, _ in made), statistics.median(b for _, b in made)))
    print(f"dim {given.dim}, tp {given.tp}, {TOKENS} tokens: host time of a block, µs\n")
    print("| | forward | backward | of the dense block's |\n|---|---|---|---|")
    dense = [min(column) for column in zip(*times["dense"], strict=True)]
    for way, found in times.items():
        best = [min(column) for column in zip(*found, strict=True)]
        ratios = " / ".join(f"{own / one:.2f}" for own, one in zip(best, dense, strict=True))
        print(f"| {way} | {best[0]:.0f} | {best[1]:.0f} | {ratios} |")


if __name__ == "__main__":
    main()
