"""The results of ``bench.py`` as Markdown and pictures: ``python benchmarks/tables.py benchmarks/results``."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BASE = "dtensor"
MIB, GIB = 2**20, 2**30
COLORS = {"ours": "#f0a202", "dtensor": "#1f5fbf", "ddp": "#8a8f98", "plain": "#c9ced6", "self": "#f0a202", "proof": "#f0a202"}


def write(results: dict[str, Any], out: Path) -> None:
    """``bench.md`` and a picture for each part that was measured."""
    parts = {
        "steps": _steps,
        "startup": _startup,
        "host": _host,
        "overlap": _overlap,
        "kept": _kept,
        "loss": _loss,
        "length": _length,
        "context": _context,
        "pipeline": _pipeline,
        "checks": _checks,
        "longest": _longest,
        "scale": _scale,
    }
    text = ["# Results", "", "`make bench`, or parts of it, wrote this; `benchmarks/README.md` says how to read it."]
    for name, show in parts.items():
        if name in results:
            text += [
                "",
                *show(results[name]["found"], out),
                "",
                f"_{results[name]['machine']}; rounds: {results[name]['rounds']}_",
            ]
    (out / "bench.md").write_text("\n".join(text) + "\n")


def _row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*("---" for _ in cells))]


def _color(way: str) -> str:
    return next((color for name, color in COLORS.items() if way.startswith(name)), "#555555")


def _timed(times: dict[str, list[float] | str], base: str = BASE) -> list[str]:
    """Rows of a way's times, and of its ratio to the base in the same round; a sentence for a way that did not run."""
    lines = _head("way", "ms, median", "min–max", f"of {base}'s")
    for way, own in times.items():
        if isinstance(own, str):
            lines.append(_row(way, own, "", ""))
        else:
            shown = "" if (ratio := _ratio(times, way, base)) is None else f"{ratio:.2f}"
            lines.append(_row(way, f"{statistics.median(own):.1f}", f"{min(own):.1f}–{max(own):.1f}", shown))
    return lines


def _ratio(times: dict[str, list[float] | str], way: str, base: str) -> float | None:
    """The median over rounds of a way's time to the base's; None if one of them did not run."""
    own, other = times[way], times.get(base, "")
    if isinstance(own, str) or isinstance(other, str):
        return None
    return statistics.median([a / b for a, b in zip(own, other, strict=False)])


def _bars(file: Path, groups: dict[str, dict[str, float]], label: str) -> None:
    """Horizontal bars, a panel for each group, three in a row."""
    wide, high = min(len(groups), 3), -(-len(groups) // 3)
    figure, panels = plt.subplots(high, wide, figsize=(4.6 * wide + 1, 3.4 * high), squeeze=False)
    for panel in panels.flat[len(groups) :]:
        panel.set_axis_off()
    for panel, (title, values) in zip(panels.flat, groups.items(), strict=False):
        names = list(values)[::-1]
        bars = panel.barh(names, [values[name] for name in names], color=[_color(name) for name in names])
        panel.bar_label(
            bars, [f"{bar.get_width():,.0f}" if bar.get_width() >= 100 else f"{bar.get_width():.3g}" for bar in bars], padding=3
        )
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(label)
        panel.margins(x=0.18)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _steps(found: dict[str, Any], out: Path) -> list[str]:
    one = found.get("one rank")
    lines = ["## Step time"]
    ratios: dict[str, dict[str, float]] = {}
    for shape, times in ((shape, times) for shape, times in found.items() if shape != "one rank"):
        base = BASE if isinstance(times.get(BASE), list) else "ddp"  # where torch's plan does not run
        rounds = max((len(own) for own in times.values() if isinstance(own, list)), default=0)
        lines += ["", f"{shape}, tp 2, {rounds} round{'s' * (rounds != 1)}:", "", *_timed(times, base)]
        shown = {way: _ratio(times, way, base) for way in times}
        ratios[f"{shape}\nof {base}'s"] = {way: ratio for way, ratio in shown.items() if ratio is not None}
    if one:
        lines += ["", f"One rank, {one['shape']}, beside plain Lightning:", "", *_timed(one["times"], "plain")]
    lines += ["", "![step time](steps.png)"]
    _bars(out / "steps.png", ratios, "step time")
    return lines


def _host(found: dict[str, list[float]], out: Path) -> list[str]:
    _bars(out / "host.png", {"tp 2, 16 tokens, dim 128": {w: statistics.median(t) for w, t in found.items()}}, "host ms")
    return ["## Host time", "", "Of the main thread, waiting left out:", "", *_timed(found), "", "![host time](host.png)"]


def _checks(found: dict[str, Any], out: Path) -> list[str]:
    lines = ["## Checks", "", "Steps on two ranks in which checks are due, of one in which none is:", ""]
    lines += _head("sequences × positions, width", "unchecked, s", "checks of a run")
    for name, one in found.items():
        lines.append(_row(name, f"{one['unchecked']:.3f}", f"{one['due']:.2f}"))
    return lines


def _overlap(found: dict[str, Any], out: Path) -> list[str]:
    lines = ["## Overlap", "", "Where a collective takes as long as a product does on average; steps, of the serial one's:", ""]
    lines += _head("case", "no latency, counted", "overlapped, counted", "no latency, wall", "overlapped, wall", "min–max")
    for name, one in found["steps"].items():
        shares = {
            (how, what): [a / b for a, b in zip(one[how][what], one[how]["serial"], strict=True)]
            for how in ("counted", "wall")
            for what in ("products", "overlapped")
        }
        wall = shares["wall", "overlapped"]
        cells = [f"{statistics.median(share):.3f}" for share in shares.values()]
        lines.append(_row(name, *cells, f"{min(wall):.3f}–{max(wall):.3f}"))
    spans, (begin, end) = found["trace"]["spans"], found["trace"]["backward"]
    figure, panel = plt.subplots(figsize=(11, 2.2))
    for level, (kind, color) in enumerate({"collective": COLORS["dtensor"], "product": COLORS["ours"]}.items()):
        shown = [(a, b - a) for name, a, b in spans if name == kind]
        panel.broken_barh(shown, (level - 0.38, 0.76), facecolors=color, edgecolor="white", linewidth=0.4)
    panel.axvspan(begin, end, color="#f2f2f2", linewidth=0, zorder=0)
    panel.annotate("backward", (begin, 1.55), annotation_clip=False, fontsize=8)
    panel.set(yticks=[0, 1], yticklabels=["collectives", "products"], xlabel="ms", ylim=(-0.5, 1.5))
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out / "trace.png", dpi=120)
    plt.close(figure)
    return [
        *lines,
        "",
        "A step of two layers on two gloo ranks, as torch's profiler saw one of them:",
        "",
        "![trace](trace.png)",
    ]


def _kept(found: dict[str, Any], out: Path) -> list[str]:
    lines = ["## Kept for the backward, and sent in a step", ""]
    lines += _head("shape", "tp", "way", "kept, MiB", "of dtensor's", "collectives", "sent, MiB")
    cases: dict[tuple[str, int], dict[str, Any]] = {}
    for key, one in found.items():
        shape, tp, way = key.split("|")
        if isinstance(one, str):
            lines.append(_row(shape, tp, way, one, "", "", ""))
            continue
        cases.setdefault((shape, int(tp)), {})[way] = one
        base = found.get(f"{shape}|{tp}|{BASE}", "")
        calls, sent = sum(one["calls"].values()), sum(one["sent"].values()) / MIB
        share = "" if isinstance(base, str) else f"{one['kept'] / base['kept']:.2f}"
        lines.append(_row(shape, tp, way, f"{one['kept'] / MIB:.1f}", share, calls, f"{sent:.1f}"))
    for what, title in (("kept", "kept for the backward, MiB"), ("sent", "sent in a step, MiB")):
        groups = {}
        for (shape, tp), ways in cases.items():
            bytes_of = {w: one["kept"] if what == "kept" else sum(one["sent"].values()) for w, one in ways.items()}
            groups[f"{shape}\ntp {tp}"] = {way: count / MIB for way, count in bytes_of.items() if count}
        _bars(out / f"{what}.png", groups, title)
    return [*lines, "", "![kept](kept.png)", "", "![sent](sent.png)"]


def _startup(found: dict[str, Any], out: Path) -> list[str]:
    groups = {
        shape: {case: one["startup_s"] for case, one in cases.items() if isinstance(one, dict)}
        for shape, cases in found.items()
    }
    _bars(out / "startup.png", groups, "from fit to the first step, s")
    lines = [
        "## Starting",
        "",
        "From `fit` to the first step, tp 2, and the most memory of a rank's process, its code included (the larger rank's):",
        "",
    ]
    return [*lines, *startup_table(found), "", "![starting](startup.png)"]


def startup_table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of every case of every shape that ``startup.measure`` measured; peaks beside those without a self-check."""
    peaks = ("peak until then, GiB", "peak of steps, GiB", "the larger, of the first row's")
    lines = _head("shape", "case", "until the first step, s", "a step, s", *peaks)
    for shape, cases in found.items():
        base = cases.get("self_check=False")
        for case, one in cases.items():
            if isinstance(one, str):
                lines.append(_row(shape, case, one, *[""] * 4))
                continue
            seconds = f"{one['startup_s']:.1f}", f"{one['step_s']:.2f}"
            bytes_of = (f"{one[name] / GIB:.2f}" for name in ("startup_peak", "training_peak"))
            share = f"{_most(one) / _most(base):.2f}" if isinstance(base, dict) else ""
            lines.append(_row(shape, case, *seconds, *bytes_of, share))
    return lines


def _most(one: dict[str, float]) -> float:
    return max(one["startup_peak"], one["training_peak"])


def _loss(found: dict[str, Any], out: Path) -> list[str]:
    lines = [
        "## Memory of head and loss",
        "",
        "Vocabulary 131,072, 1,024 tokens, tp 2; one rank holds logits of 256 MiB in float32.",
    ]
    lines += ["", *_head("way", "peak of a step, MiB")]
    lines += [_row(way, f"{one['step'] / MIB:.0f}") for way, one in found.items()]
    _bars(out / "loss.png", {"vocabulary 131,072": {w: one["step"] / MIB for w, one in found.items()}}, "peak of a step, MiB")
    return [*lines, "", "![loss](loss.png)"]


def longest(peaks: dict[str, float], budget: float, step: int = 64) -> int:
    """The length at which the budget is spent, between two that were measured, in steps of so many positions."""
    points = sorted((int(at), peak) for at, peak in peaks.items())
    if points[-1][1] <= budget:
        return points[-1][0]
    (a, low), (b, high) = ([(0, 0.0), *points])[-2:]
    return int(a + (b - a) * (budget - low) / (high - low)) // step * step if low <= budget else 0


def _length(found: dict[str, Any], out: Path) -> list[str]:
    budget, peaks = found["budget"], found["peaks"]
    lines = [
        "## Longest sequence",
        "",
        f"Within {budget / MIB:.0f} MiB for what a step adds on a rank (dim 256, 4 layers, batch 1):",
    ]
    lines += ["", *_head("way", "tp", "kept", "recomputed by the model")]
    keys = list(dict.fromkeys(tuple(key.split("/")[:2]) for key in peaks))
    for way, tp in keys:
        cells = [_shown(peaks[f"{way}/{tp}/{how}"], budget) for how in ("kept", "recompute")]
        lines.append(_row(way, tp, *cells))
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for panel, how in zip(panels, ("kept", "recompute"), strict=True):
        for way, tp in keys:
            points = sorted((int(at), peak / MIB) for at, peak in peaks[f"{way}/{tp}/{how}"].items())
            style = ":" if way == "ddp" else "--" if tp == "4" else "-"  # DDP lies on the whole model's line
            panel.plot(*zip(*points, strict=True), style, marker="o", markersize=3, color=_color(way), label=f"{way}, tp {tp}")
        panel.axhline(budget / MIB, color="#b00020", linewidth=1)
        panel.set(xscale="log", xlabel="positions", title={"kept": "kept", "recompute": "recomputed by the model"}[how])
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("peak of a step over the rest, MiB")
    panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "length.png", dpi=120)
    plt.close(figure)
    return [*lines, "", "![length](length.png)"]


def step_picture(spans: list[tuple[str, str, float, float]], file: Path) -> None:
    """Draw what ran in a step: each span's row, kind, begin and length in ms (``gpu_bench.py``)."""
    colors = {"other": COLORS["plain"], "product": COLORS["ours"], "attention": COLORS["dtensor"]}
    colors |= {"collective": "#b5179e", "launch": "#555555"}
    rows = [row for row in ("host", "communication", "compute") if any(span[0] == row for span in spans)]
    figure, panel = plt.subplots(figsize=(11, 0.6 * len(rows) + 1.4))
    for kind, color in colors.items():  # what runs within another operation is drawn over it
        for level, row in enumerate(rows):
            bars = [(begin, length) for at, what, begin, length in spans if (at, what) == (row, kind)]
            high = 0.3 if row == "host" else 0.76
            if bars:
                panel.broken_barh(bars, (level - high / 2, high), facecolors=color, label=kind)
    panel.set(yticks=range(len(rows)), yticklabels=rows, xlabel="ms", ylim=(-0.5, len(rows) - 0.5))
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(colors))
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _context(found: dict[str, Any], out: Path) -> list[str]:
    lines = [
        "## Context parallelism",
        "",
        "One layer of dim 64 with 4 heads, a vocabulary of 512, batch 1. Ulysses in figures, the others as ratios to it:",
        "",
        *_head("ranks", "positions", "way", "step", "peak of a step", "kept", "sent"),
    ]
    for key, one in found.items():
        ranks, at, way = key.split("|")
        base = found[f"{ranks}|{at}|ulysses"]
        if isinstance(one, str):
            lines.append(_row(ranks, f"{int(at):,}", way, one, "", "", ""))
            continue
        own, other = ((run["ms"], run["step"], run["kept"], sum(run["sent"].values())) for run in (one, base))
        if way == "ulysses":
            cells = [f"{own[0]:,.0f} ms", *(f"{count / MIB:,.1f} MiB" for count in own[1:])]
        else:
            cells = [f"{a / b:.2f}" for a, b in zip(own, other, strict=True)]
        lines.append(_row(ranks, f"{int(at):,}", way, *cells))
    return lines


def _pipeline(found: dict[str, Any], out: Path) -> list[str]:
    lines = [
        "## Pipeline",
        "",
        "Eight blocks that wait, 20 ms in the forward and 40 ms in the backward, over the stages, in so many chunks on each "
        "(`virtual_pp`); `alone` is a stage's own work:",
        "",
        *_head(
            *("stages", "chunks", "micro-batches", "alone", "formula, (m + (p − 1) / v) / m", "step"),
            *("of the formula's", "bubble"),
        ),
    ]
    for one in found["steps"]:
        own, formula, step = one["own"], one["formula"], one["step"]
        cells = [f"{own:.2f} s", f"{formula:.2f} s", f"{step:.2f} s", f"{step / formula:.3f}", f"{1 - own / step:.0%}"]
        lines.append(_row(one["stages"], one["chunks"], one["micro"], *cells))
    figure, panels = plt.subplots(len(found["pictures"]), figsize=(11, 4.6), sharex=True)
    for panel, stages in zip(panels, found["pictures"], strict=True):
        for stage, spans in enumerate(stages):
            for what, chunk, number, begin, end in spans:
                color = COLORS["dtensor" if what == "forward" else "ours"]
                panel.broken_barh(
                    [(begin, end - begin)],
                    (stage - 0.4, 0.8),
                    facecolors=color,
                    alpha=1.0 if chunk == 0 else 0.6,
                    edgecolor="white",
                    linewidth=0.4,
                    label=f"{what}{', second chunk' if chunk else ''}",
                )
                middle = begin + (end - begin) / 2
                panel.annotate(str(number + 1), (middle, stage), ha="center", va="center", fontsize=7, color="white")
        panel.set(yticks=range(len(stages)), yticklabels=[f"stage {at}" for at in range(len(stages))])
        panel.invert_yaxis()
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set(xlabel="s")
    shown = {label: handle for handle, label in zip(*panels[-1].get_legend_handles_labels(), strict=True)}
    panels[0].legend(shown.values(), shown, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4)
    figure.tight_layout()
    figure.savefig(out / "pipeline.png", dpi=120)
    plt.close(figure)
    below = "Steps of eight micro-batches over four stages, by number: of one chunk each above, of two chunks each below."
    return [*lines, "", below, "", "![pipeline](pipeline.png)"]


def _longest(found: dict[str, Any], out: Path) -> list[str]:
    budget, peaks = found["budget"], found["peaks"]
    first = longest(peaks["plain|1"], budget, 8)
    lines = [
        "## Longest sequence, all means together",
        "",
        f"Within {budget / MIB:.0f} MiB for what a step adds on a rank (dim 64, 16 layers, 2,048 words, batch 1, float32):",
        "",
        *_head("way", "ranks", "positions", "of one plain process"),
    ]
    figure, panel = plt.subplots(figsize=(11, 4.5))
    ours = iter(("#f0a202", "#b35c00", "#2e9e5b", "#b5179e", "#5a189a"))
    for key, own in peaks.items():
        way, ranks = key.split("|")
        last = max(own, key=int)
        at = longest(own, budget, 8)
        lines.append(_row(way, ranks, f"{at:,}" if own[last] > budget else f"{at:,} or more", f"{at / first:.1f}"))
        points = sorted((int(at), peak / MIB) for at, peak in own.items())
        style = "--" if "recompute" in way else "-"
        panel.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=f"{way}, {ranks} rank{'s' * (ranks != '1')}",
                   color=next(ours) if way.startswith("ours, ") else _color(way))  # fmt: skip
    panel.axhline(budget / MIB, color="#b00020", linewidth=1)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.set(xlabel="positions", ylabel="peak of a step over the rest, MiB", ylim=(0, 2 * budget / MIB))
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(out / "longest.png", dpi=120)
    plt.close(figure)
    return [*lines, "", "![longest](longest.png)"]


def _shown(peaks: dict[str, float], budget: float) -> str:
    last = max(int(at) for at in peaks)
    return f"{longest(peaks, budget):,}" if peaks[str(last)] > budget else f"{last:,} or more"


def _scale(found: dict[str, Any], out: Path) -> list[str]:
    return world_table(found)


def world_table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Seconds of ``scale.measure_world``, a row for each number of ranks."""
    names = next(list(one) for one in found.values() if "error" not in one)
    lines = [
        "## Groups of many ranks",
        "",
        "Seconds before training, tp 8 × pp 4 × dp, 24 layers of dim 512, torch's fake backend:",
        "",
        *_head("world", *names),
    ]
    for world, one in found.items():
        cells = [one["error"]] if "error" in one else [f"{one[name]:.3f}" for name in names]
        lines.append(_row(world, *cells, *[""] * (len(names) - len(cells))))
    return lines


def scale_table(found: dict[str, dict[str, Any]], dp: int, tp: int) -> list[str]:
    """What ``scale.measure_model`` measured, a row for each piece of work of each model."""
    does = {
        "model": "the model on the meta device",
        "groups": "process groups",
        "plan": "the plan",
        "proof": "the self-check's work",
        "cut": "cutting",
    }
    lines = ["## Large models", "", f"dp {dp} × tp {tp}, the first rank, torch's fake backend:"]
    lines += ["", *_head("model", "parameters", "on the rank", "whole / rank")]
    for name, one in found.items():
        if "error" in one:
            lines.append(_row(name, one["error"], "", ""))
        else:
            whole, rank = one["whole"], one["rank"]
            lines.append(_row(name, f"{whole / 1e9:.2f} B", f"{rank / 1e9:.3f} B", f"{whole / rank:.2f}"))
    lines += ["", *_head("model", "work", "s", "peak over what was held, MiB", "")]
    for name, one in found.items():
        for key, what in () if "error" in one else does.items():
            note = {"plan": one.get("plan", ""), "proof": one.get("proof", "")}.get(key, "")
            lines.append(_row(name, what, f"{one['seconds'][key]:.2f}", f"{one['peaks'][key] / MIB:,.0f}", note))
    return lines


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(json.loads((folder / "bench.json").read_text()), folder)
