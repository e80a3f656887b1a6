"""The main job, shown to be right: train in parallel, train on one process, compare.

python examples/demo.py [--data FILE_OR_FOLDER] [--out runs/demo]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_seqpar.parity import ParityReport, Trace, compare

HERE = Path(__file__).resolve().parent
MIB = 1024 * 1024


def run(name: str, folder: Path, options: list[str]) -> tuple[Trace, dict[str, Any]]:
    print(f"\n=== {name}", flush=True)
    command = [sys.executable, str(HERE / "train.py"), "--out", str(folder), *options]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(f"the run '{name}' ended with code {code}; its message stands above")
    return Trace.load(folder / "trace.pt"), json.loads((folder / "facts.json").read_text())


def measured(facts: list[dict[str, Any]]) -> bool:
    """Whether every run was long enough for the batch that train.py's StepMeter measures; its figures are null otherwise."""
    return all(fact["saved_bytes"] is not None for fact in facts)


def table(names: list[str], traces: list[Trace], facts: list[dict[str, Any]], report: ParityReport) -> str:
    steps = len(traces[0].losses)
    rows: list[tuple[str, list[str]]] = [
        (f"loss at step {at + 1}", [f"{trace.losses[at]:.10f}" for trace in traces]) for at in (0, steps // 2, steps - 1)
    ]
    rows.append(("parameters per rank", [f"{fact['parameters']:,}" for fact in facts]))
    if measured(facts):
        saved = [f"{fact['saved_bytes'] / MIB:.1f} MiB" for fact in facts]
        calls = [f"{sum(fact['calls'].values())}" for fact in facts]
        given = [f"{sum(fact['bytes'].values()) / MIB:.1f} MiB" for fact in facts]
    else:
        saved = calls = given = ["-"] * len(facts)
    rows += [("saved for backward per rank", saved), ("collectives per step", calls), ("bytes given to them per step", given)]
    lines = [f"{'':<30}{names[0]:>22}{names[1]:>22}"]
    lines += [f"{label:<30}{values[0]:>22}{values[1]:>22}" for label, values in rows]
    loss, weight = report.rows[0], report.rows[-1]
    lines.append("-" * 74)
    lines.append(f"{'largest loss difference':<30}{loss.error:>22.1e}   relative, at {loss.where}")
    lines.append(f"{'largest weight difference':<30}{weight.error:>22.1e}   absolute, {weight.where}")
    return "\n".join(lines)


def draw(names: list[str], traces: list[Trace], facts: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=[2, 1], layout="constrained")
    steps = range(1, len(traces[0].losses) + 1)
    left.plot(steps, traces[0].losses, color="#c9ced6", linewidth=6, label=names[0])
    left.plot(steps, traces[1].losses, color="#1f5fbf", linewidth=1.5, label=names[1])
    left.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss: one curve over the other")
    left.legend(frameon=False)
    values = [(fact["saved_bytes"] or 0) / MIB for fact in facts]
    bars = right.bar(names, values, color=["#c9ced6", "#1f5fbf"], width=0.6)
    right.bar_label(bars, [f"{value:.0f} MiB" if measured(facts) else "-" for value in values])
    right.set(ylabel="MiB per rank", title="Saved for backward")
    right.margins(y=0.15)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(HERE.parent / "conf" / "demo.yaml"))
    parser.add_argument("--data", help="a file or folder to train on (default: the standard library's sources)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("overrides", nargs="*", help="such as trainer.limit_train_batches=50")
    args = parser.parse_args()

    options = ["--config", args.config, *(["--data", args.data] if args.data else []), *args.overrides]
    strategy = OmegaConf.merge(OmegaConf.load(args.config), OmegaConf.from_dotlist(args.overrides)).strategy
    label = f"tp={strategy.tp}, sp={'on' if strategy.sp else 'off'}"
    parallel = run(f"SeqParallelStrategy({label})", args.out / "parallel", options)
    single = run("one process, plain Lightning", args.out / "single", [*options, "--single"])

    names = ["one process", label]
    traces, facts = [single[0], parallel[0]], [single[1], parallel[1]]
    report = compare(*traces)
    print("\n" + table(names, traces, facts, report))
    if not measured(facts):
        print("-: not measured; a step is measured at batch 16 of an epoch, and the runs had no such batch")
    picture = args.out / "demo.png"
    draw(names, traces, facts, picture)
    print(f"\npicture: {picture}")
    if not report.ok:
        print(f"\nThe two runs differ by more than {report.worst.limit:.0e} (expected in float32):\n{report}")


if __name__ == "__main__":
    main()
