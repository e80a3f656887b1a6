"""The results of ``bench.py`` as Markdown and pictures: ``python benchmarks/tables.py benchmarks/results``."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BASE = "dtensor"
MIB = 2**20
COLORS = {"ours": "#f0a202", "dtensor": "#1f5fbf", "ddp": "#8a8f98", "plain": "#c9ced6"}


def write(results: dict[str, Any], out: Path) -> None:
    """``bench.md`` and a picture for each part that was measured."""
    parts = {
        "steps": _steps,
        "host": _host,
        "overlap": _overlap,
        "kept": _kept,
        "loss": _loss,
        "length": _length,
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
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*("---" for _ in cells))]


def _color(way: str) -> str:
    return next((color for name, color in COLORS.items() if way.startswith(name)), "#555555")


def _timed(times: dict[str, list[float]], base: str = BASE) -> list[str]:
    """Rows of a way's times, and of its ratio to the base in the same round."""
    lines = _head("way", "ms, median", "min–max", f"of {base}'s")
    for way, own in times.items():
        ratios = [a / b for a, b in zip(own, times[base], strict=True)]
        shown = f"{statistics.median(ratios):.2f}"
        lines.append(_row(way, f"{statistics.median(own):.1f}", f"{min(own):.1f}–{max(own):.1f}", shown))
    return lines


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
            bars,
            [f"{bar.get_width():,.0f}" if bar.get_width() >= 100 else f"{bar.get_width():.3g}" for bar in bars],
            padding=3,
        )
        panel.set_title(title)
        panel.set_xlabel(label)
        panel.margins(x=0.18)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _steps(found: dict[str, Any], out: Path) -> list[str]:
    one = found.get("one rank")
    dims = {dim: times for dim, times in found.items() if dim != "one rank"}
    lines = ["## Step time"]
    ratios: dict[str, dict[str, float]] = {}
    for dim, times in dims.items():
        lines += ["", f"Dim {dim}, tp 2, {len(times[BASE])} rounds:", "", *_timed(times)]
        ratios[f"dim {dim}"] = {
            way: statistics.median([a / b for a, b in zip(own, times[BASE], strict=True)]) for way, own in times.items()
        }
    if one:
        lines += ["", "One rank, beside plain Lightning:", "", *_timed(one, "plain")]
    lines += ["", "![step time](steps.png)"]
    _bars(out / "steps.png", ratios, "step time, of dtensor's")
    return lines


def _host(found: dict[str, list[float]], out: Path) -> list[str]:
    _bars(
        out / "host.png", {"tp 2, 16 tokens, dim 128": {w: statistics.median(t) for w, t in found.items()}}, "host ms"
    )
    return [
        "## Host time",
        "",
        "Of the main thread, waiting left out:",
        "",
        *_timed(found),
        "",
        "![host time](host.png)",
    ]


def _overlap(found: dict[str, Any], out: Path) -> list[str]:
    lines = [
        "## Overlap",
        "",
        "Where a collective takes as long as a product does on average; steps, of the serial one's:",
        "",
    ]
    lines += _head(
        "case", "no latency, counted", "overlapped, counted", "no latency, wall", "overlapped, wall", "min–max"
    )
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
    lines += _head("dim", "tp", "way", "kept, MiB", "of dtensor's", "collectives", "sent, MiB")
    for key, one in found.items():
        dim, tp, way = key.split("/")
        base = found.get(f"{dim}/{tp}/{BASE}", {}).get("kept")
        calls, sent = sum(one["calls"].values()), sum(one["sent"].values()) / MIB
        share = f"{one['kept'] / base:.2f}" if base else ""
        lines.append(_row(dim, tp, way, f"{one['kept'] / MIB:.1f}", share, calls, f"{sent:.1f}"))
    keys = [key.split("/") for key in found]
    sizes = sorted({int(tp) for _, tp, way in keys if way == BASE})
    dim = keys[0][0]
    figure, panel = plt.subplots(figsize=(6, 3.8))
    whole = found.get(f"{dim}/{sizes[0]}/plain", {}).get("kept")
    for way in dict.fromkeys(way for _, _, way in keys):
        values = [found[f"{dim}/{tp}/{way}"]["kept"] / MIB for tp in sizes if f"{dim}/{tp}/{way}" in found]
        if len(values) == len(sizes) and way != "plain":
            x, y = ([1, *sizes], [whole / MIB, *values]) if whole else (sizes, values)
            style = "-" if way in ("ours", BASE) else "--"
            panel.plot(x, y, style, marker="o", color=_color(way), alpha=1.0 if style == "-" else 0.5, label=way)
    panel.set(xlabel="tp", ylabel="kept for the backward, MiB", xticks=[1, *sizes], ylim=(0, None))
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "kept.png", dpi=120)
    plt.close(figure)
    groups = {
        f"tp {tp}": {
            k.split("/")[2]: sum(v["sent"].values()) / MIB for k, v in found.items() if k.split("/")[1] == str(tp)
        }
        for tp in sizes
    }
    _bars(out / "sent.png", {title: {w: v for w, v in one.items() if v} for title, one in groups.items()}, "MiB sent")
    return [*lines, "", "![kept](kept.png)", "", "![sent](sent.png)"]


def _loss(found: dict[str, Any], out: Path) -> list[str]:
    lines = [
        "## Memory of head and loss",
        "",
        "Vocabulary 131,072, 1,024 tokens, tp 2; one rank holds logits of 256 MiB in float32.",
    ]
    lines += ["", *_head("way", "peak of a step, MiB")]
    lines += [_row(way, f"{one['step'] / MIB:.0f}") for way, one in found.items()]
    _bars(
        out / "loss.png",
        {"vocabulary 131,072": {w: one["step"] / MIB for w, one in found.items()}},
        "peak of a step, MiB",
    )
    return [*lines, "", "![loss](loss.png)"]


def longest(peaks: dict[str, float], budget: float) -> int:
    """The length at which the budget is spent, between two that were measured, in steps of 64 positions."""
    points = sorted((int(at), peak) for at, peak in peaks.items())
    if points[-1][1] <= budget:
        return points[-1][0]
    (a, low), (b, high) = ([(0, 0.0), *points])[-2:]
    return int(a + (b - a) * (budget - low) / (high - low)) // 64 * 64 if low <= budget else 0


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
            panel.plot(
                *zip(*points, strict=True), style, marker="o", markersize=3, color=_color(way), label=f"{way}, tp {tp}"
            )
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


def _shown(peaks: dict[str, float], budget: float) -> str:
    last = max(int(at) for at in peaks)
    return f"{longest(peaks, budget):,}" if peaks[str(last)] > budget else f"{last:,} or more"


def _scale(found: dict[str, Any], out: Path) -> list[str]:
    names: Sequence[str] = list(next(iter(found.values())))
    lines = [
        "## One rank of many",
        "",
        "Seconds before training, tp 8 × pp 4 × dp, 24 layers of dim 512, torch's fake backend:",
    ]
    lines += ["", *_head("world", *names)]
    return [*lines, *(_row(world, *(f"{one[name]:.3f}" for name in names)) for world, one in found.items())]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(json.loads((folder / "bench.json").read_text()), folder)
