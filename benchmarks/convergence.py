"""300 steps of the demo model: one process, tensor parallel, tensor + sequence parallel, and with the sync sabotaged.

    make convergence                     writes docs/convergence.png and docs/convergence.md

The story is that of GPT-NeoX's pull request for Megatron sequence parallelism (#1257): the forward is right, the loss
falls, and the gradients of the norms are not summed over tp. Here the fault is put into a copy of the source, together
with the removal of the run-time check that would refuse to train; the self-check, which would too, is off.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lightning_seqpar.parity import Trace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.mutants import Mutant, all_mutants, apply, copy_repository  # noqa: E402

RUNS = {
    "one process": ["--single"],
    "tp=2": ["strategy.sp=false"],
    "tp=2, sp": [],
    "tp=2, sp, sync sabotaged": ["strategy.self_check=false"],
}
STYLES = {
    "one process": {"color": "#c9ced6", "linewidth": 7},
    "tp=2": {"color": "#1f5fbf", "linewidth": 2.5},
    "tp=2, sp": {"color": "#f0a202", "linewidth": 1.2, "linestyle": "--"},
    "tp=2, sp, sync sabotaged": {"color": "#c0392b", "linewidth": 1.2},
}


FAULTS = (
    next(mutant for mutant in all_mutants() if mutant.name == "norm sync left out"),
    Mutant("what would see it left out", "Steps._read_comparisons", "            comparison()\n", "            pass\n"),
)


def sabotage(folder: Path) -> None:
    """A copy of the repository without the sum over tp and without the check that would see it."""
    copy_repository(folder)
    for mutant in FAULTS:
        apply(mutant, folder / "lightning_seqpar")


def train(name: str, tied: bool, steps: int, out: Path) -> Trace:
    with tempfile.TemporaryDirectory() as place:
        home = ROOT
        if "sabotaged" in name:
            home = Path(place)
            sabotage(home)
        folder = out / f"{'tied' if tied else 'untied'}-{name.replace(', ', '-').replace(' ', '-')}"
        command = [sys.executable, "examples/train.py", "--out", str(folder.resolve()), *RUNS[name]]
        command += [
            f"model.tied={str(tied).lower()}",
            f"trainer.limit_train_batches={steps}",
            "trainer.enable_progress_bar=false",
        ]
        env = {**os.environ, "PYTHONPATH": str(home)}
        print(f"{'tied' if tied else 'untied'}: {name}", flush=True)
        done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        return Trace.load(folder / "trace.pt")


def draw(traces: dict[bool, dict[str, Trace]], path: Path) -> None:
    fig, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained", sharex=True, height_ratios=[3, 2])
    for column, tied in enumerate((True, False)):
        top, bottom = axes[0][column], axes[1][column]
        reference = traces[tied]["one process"].losses
        for name, trace in traces[tied].items():
            steps = range(1, len(trace.losses) + 1)
            top.plot(steps, trace.losses, label=name, **STYLES[name])
            if name != "one process":
                gap = [max(abs(a - b), 1e-17) for a, b in zip(trace.losses, reference, strict=True)]
                bottom.plot(steps, gap, **STYLES[name])
        top.set(title=f"{'tied' if tied else 'untied'} head", ylabel="loss (nats per byte)")
        bottom.set(xlabel="step", ylabel="|loss − one process|", yscale="log", ylim=(1e-17, 10))
        for axis in (top, bottom):
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False)
    fig.savefig(path, dpi=110)


def table(traces: dict[bool, dict[str, Trace]]) -> str:
    lines = [
        "Made by `make convergence`: the model and data of `conf/demo.yaml`, float64.",
        "",
        "| head | run | loss at the last step | largest gap to one process |",
        "|---|---|---|---|",
    ]
    for tied, runs in traces.items():
        reference = runs["one process"].losses
        for name, trace in runs.items():
            gap = max(abs(a - b) for a, b in zip(trace.losses, reference, strict=True))
            lines.append(f"| {'tied' if tied else 'untied'} | {name} | {trace.losses[-1]:.10f} | {gap:.1e} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "convergence")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    traces = {tied: {name: train(name, tied, args.steps, args.out) for name in RUNS} for tied in (True, False)}
    args.docs.mkdir(parents=True, exist_ok=True)
    draw(traces, args.docs / "convergence.png")
    text = table(traces)
    (args.docs / "convergence.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
