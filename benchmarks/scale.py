"""What one rank of a large world does before it trains: ``make scale``, or ``python benchmarks/scale.py world 4096``.

Torch's fake backend answers every collective at once: what is left is this rank's own work, which must not grow with groups
that the rank is not in. ``make scale`` writes ``results/scale.md``: Llama-3-8B and -70B, built on the meta device, on the first
rank of dp 64 × tp 8.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import hf_models  # noqa: E402
import lightning as L  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import yaml  # noqa: E402
from byte_gpt import ByteGPT  # noqa: E402
from launch import LIMIT, NO_MEMORY  # noqa: E402
from memory import forget_peak, limit, of_machine, used  # noqa: E402
from tables import scale_table, world_table  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from lightning_seqpar import ParallelConfig, ParallelGroups, ProcessTopology  # noqa: E402
from lightning_seqpar.config import PlanSpec  # noqa: E402
from lightning_seqpar.parallel.apply import parallelize  # noqa: E402
from lightning_seqpar.plan.sharding_plan import resolve_plans  # noqa: E402
from lightning_seqpar.verify.prover import Prover  # noqa: E402
from lightning_seqpar.verify.self_check import SelfCheckError  # noqa: E402

TP, PP, DP = 8, 4, 64
WORLDS = (64, 512, 4096)
MODELS = ("Llama-3-8B", "Llama-3-70B")
TOKENS = (4, 32)
"""Sequences and positions of the input that the self-check runs."""
RAN = "ran to the end, forward and backward"


class Laps:
    """Seconds and peaks of one piece of work after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """Do a piece of work; its peak counts from what is held when it begins."""
        forget_peak()
        held, begin = used(), time.perf_counter()
        out = work()
        self.seconds[name] = round(time.perf_counter() - begin, 4)
        self.peaks[name] = max(0, used(peak=True) - held)
        return out


def join(world: int, rank: int) -> None:
    """Be one rank of a world of which nobody else is there."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def measure_world(world: int) -> dict[str, float]:
    """Seconds of each part, at tp 8, pp 4 and the rest dp, on a rank in the middle."""
    rank = world // 2 + 3
    join(world, rank)
    torch.manual_seed(0)
    model = ByteGPT(dim=512, n_head=8, n_layer=24, context=64, tied=False)
    laps = Laps()
    topology = laps.run("topology", lambda: ProcessTopology(["pp", "dp", "cp", "tp"], [PP, world // (TP * PP), 1, TP]))
    groups = laps.run("groups", lambda: ParallelGroups(topology, rank))
    plans = laps.run("plan", lambda: resolve_plans("auto", model, lambda: None))
    laps.run("swap", lambda: parallelize(model, plans, groups))
    return laps.seconds


class MetaModule(hf_models.CausalModule):
    """A model of transformers without memory, and an input for the self-check."""

    def __init__(self, name: str) -> None:
        with torch.device("meta"):
            super().__init__(name)
        self.example_input_array = torch.randint(0, 1000, TOKENS)


def measure_model(name: str) -> dict[str, Any]:
    """Seconds and peak bytes of each part on the first rank, and the parameters that it holds.

    The self-check runs as before training: the whole copy, the sharded one, both backwards. Its verdict says nothing here,
    because the fake backend sends nothing: numbers of ranks that are not there are missing from every sum.
    """
    warnings.simplefilter("ignore")
    limit(room := int(0.9 * of_machine("MemAvailable")))
    join(DP * TP, 0)
    laps = Laps()
    module = laps.run("model", lambda: MetaModule(name))
    groups = laps.run("groups", lambda: ParallelGroups(ProcessTopology(["dp", "tp"], [DP, TP]), 0))
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    device = torch.device("cpu")

    def prove(config: ParallelConfig) -> Any:
        return Prover(module, trainer, config, groups, device).prove()

    proved = laps.run("plan", lambda: prove(ParallelConfig(tp=TP, self_check=False)))
    rules = [rule for plan in proved.plans for rule in yaml.safe_load(plan.to_yaml())["rules"]]

    def check() -> str:
        try:  # as a plan of the user's own: where another one fails, others would be tried
            prove(ParallelConfig(tp=TP, plan=PlanSpec(base="none", rules=rules)))
        except (SelfCheckError, RuntimeError) as error:
            said = str(error)
            if any(word in said for word in NO_MEMORY):
                return f"does not fit: needs more than {room / 2**30:.0f} GiB"
            if isinstance(error, SelfCheckError) and "does not run" not in said:
                return RAN  # and the numbers differ
            return f"{type(error).__name__}: {said.partition('The rules were:')[0].strip()}"
        return RAN

    told = laps.run("proof", check)
    whole = sum(parameter.numel() for parameter in module.parameters())
    laps.run("cut", lambda: parallelize(module, proved.plans, groups))
    return {
        "seconds": laps.seconds,
        "peaks": laps.peaks,
        "plan": ", ".join(plan.source for plan in proved.plans),
        "proof": told,
        "whole": whole,
        "rank": sum(parameter.numel() for parameter in module.parameters()),
    }


def in_a_process(*args: str) -> dict[str, Any]:
    """What this script measures in a process of its own: ``world N`` or ``model NAME``.

    Returns:
        The figures; ``{"error": ...}`` if the process failed.
    """
    command, env = [sys.executable, __file__, *args], {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT // 60} minutes"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "model", "world"], default="all")
    parser.add_argument("which", nargs="?", help="a model of hf_models.py, or the number of ranks")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    given = parser.parse_args()
    if given.what == "world":
        print(json.dumps(measure_world(int(given.which))))
    elif given.what == "model":
        print(json.dumps(measure_model(given.which)))
    else:
        found: dict[str, dict[str, Any]] = {"models": {}, "worlds": {}}
        for kind, names in (("model", MODELS), ("world", tuple(map(str, WORLDS)))):
            for name in names:
                found[f"{kind}s"][name] = in_a_process(kind, name)
                print(name, json.dumps(found[f"{kind}s"][name]), file=sys.stderr, flush=True)
        has = f"{os.cpu_count()} cores, {platform.machine()}, {of_machine('MemTotal') / 2**30:.0f} GiB"
        given.out.mkdir(parents=True, exist_ok=True)
        text = [
            "# One rank of many",
            "",
            "`make scale` wrote this; `benchmarks/README.md` says how to read it.",
            "",
            *scale_table(found["models"], DP, TP),
            "",
            *world_table(found["worlds"]),
            "",
            f"_{has}; torch {torch.__version__}_",
        ]
        (given.out / "scale.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
