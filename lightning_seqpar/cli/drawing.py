"""Pictures of ``seqpar plan --fit``."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from lightning_seqpar.sizing.search import LayoutSearch, PredictedLayout
from lightning_seqpar.sizing.timeline import timeline

_KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered (fsdp)",
    "activations": "activations",
    "at_once": "for a moment",
}
_COLORS = ("#30638e", "#00798c", "#8d99ae", "#7b5ea7", "#edae49", "#d1495b")
_MOST_MICRO_BATCHES = 16


def draw_layouts(searched: LayoutSearch, file: Path, most: int = 5) -> None:
    """Draw the memory of each stage of the best layouts, and of those that nearly fit; below, the best pipeline's timeline.

    Raises ImportError without matplotlib, and ValueError if there is nothing to draw.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError("a picture needs matplotlib: pip install 'lightning-seqpar[plot]'") from None
    layouts = [*searched.best[:most], *searched.too_large[:3]]
    if not layouts:
        raise ValueError(f"--plot {file}: there is no layout to draw")
    piped = next((one for one in searched.best[:most] if len(one.stages) > 1), None)
    figure, axes = plt.subplots(
        1 + (piped is not None), 1, figsize=(11, 4.5 + 3 * (piped is not None)), squeeze=False, layout="constrained"
    )
    _bars(axes[0][0], layouts, searched)
    if piped is not None:
        _timeline(axes[1][0], piped)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _bars(axis: Any, layouts: list[PredictedLayout], searched: LayoutSearch) -> None:
    width, gib = 0.8, 2**30
    for at, layout in enumerate(layouts):
        stages = len(layout.stages)
        for stage, memory in enumerate(layout.stages):
            place, below = at - width / 2 + (stage + 0.5) * width / stages, 0.0
            for (kind, name), color in zip(_KINDS.items(), _COLORS, strict=True):
                height = getattr(memory, kind) / gib
                label = name if at == stage == 0 else None
                faint = 1.0 if layout.fits else 0.45
                axis.bar(place, height, 0.9 * width / stages, bottom=below, color=color, alpha=faint, label=label)
                below += height
    usable, tallest = searched.cluster.machine.usable / gib, max(layout.memory.total for layout in layouts) / gib
    if usable < 4 * tallest:  # else bars would be flat
        axis.axhline(usable, color="black", linewidth=1, linestyle="--", label="of a device")
    # Lines are broken between axes, never within "dp 4".
    kept = [re.sub(r"(?<=×) | (?=\d)", "\N{NO-BREAK SPACE}", layout.shown) for layout in layouts]
    axis.set_xticks(range(len(layouts)), [textwrap.fill(name, 14) for name in kept], fontsize=8)
    axis.set_ylabel("peak of a rank, GiB")
    title = f"{searched.cluster.shown} with {usable:.3g} GiB, {searched.precision}: a bar for each stage; pale ones do not fit"
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def _timeline(axis: Any, layout: PredictedLayout) -> None:
    chunks, count = layout.config.virtual_pp or 1, min(layout.micro_batches, _MOST_MICRO_BATCHES)
    for run in timeline(layout.seconds.stages, chunks, count):
        color = "#d1495b" if run.part.is_backward else "#30638e"
        shade = 1.0 - 0.4 * run.part.chunk / chunks
        axis.barh(run.stage, run.end - run.begin, left=run.begin, color=color, alpha=shade, edgecolor="white", linewidth=0.5)
        axis.text(
            (run.begin + run.end) / 2, run.stage, str(run.part.micro_batch), ha="center", va="center", fontsize=6, color="w"
        )
    axis.invert_yaxis()
    axis.set_yticks(range(layout.config.pp), [f"stage {stage}" for stage in range(layout.config.pp)], fontsize=8)
    axis.set_xlabel("seconds")
    first = f"the first {count} of {layout.micro_batches}" if count < layout.micro_batches else f"{count}"
    axis.set_title(f"{layout.shown}: {first} micro-batches, forwards blue, backwards red", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
