"""Draws the packages in import order, and who imports whom, from the source itself.

python docs/draw_packages.py          writes docs/packages.png
"""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "lightning_seqpar"

GROUPS = {
    "what is asked for, and where ranks are": ("#dbe7f5", ["user_input", "config", "releases", "topology"]),
    "layers, and what they stand on": ("#d9efdc", ["distributed", "layout", "context", "region", "nn"]),
    "a plan, and carrying it out": ("#fbeccb", ["styles", "plan", "pipeline", "parallel"]),
    "before and around training": ("#f6dcd6", ["data", "inference", "init", "checkpoint", "verify", "sizing"]),
    "what users touch": ("#e6def2", ["strategy", "fabric", "cli"]),
}
"""In import order: each imports from itself and from those before it. A package that does not exist is left out."""
SHIMS = {"__init__", "__main__", "collectives", "measure", "parity", "testing"}
"""Public paths at the top, which show names of the packages."""


def sources(name: str) -> list[Path]:
    """The files of a package, or the one of a module beside the packages."""
    folder = PACKAGE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]


def purpose(name: str) -> str:
    """The first sentence of what the package says of itself."""
    path = PACKAGE / name / "__init__.py"
    text = ast.get_docstring(ast.parse((path if path.is_file() else PACKAGE / f"{name}.py").read_text())) or ""
    return text.split("\n\n")[0].splitlines()[0].replace("``", "").replace(":class:", "").replace("`", "")


def imported(name: str) -> Counter[str]:
    """How many of a package's files import each other package."""
    found: Counter[str] = Counter()
    for path in sources(name):
        modules = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        found.update({module.split(".")[1] for module in modules if module.startswith("lightning_seqpar.")} - {name})
    return found


def main() -> None:
    """Draw and save."""
    there = {path.stem for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").is_file()}
    there |= {path.stem for path in PACKAGE.glob("*.py")} - SHIMS
    rows = [(name, group, color) for group, (color, names) in GROUPS.items() for name in names if name in there]
    names = [name for name, _, _ in rows]
    if missing := there - set(names):
        raise SystemExit(f"give {', '.join(sorted(missing))} a place in GROUPS")
    count, left, grid = len(names), 1.0, 9.0
    fig, ax = plt.subplots(figsize=(15, 0.52 * count + 1.6), layout="constrained")
    ax.set(xlim=(-1.35, grid + 0.42 * count + 0.3), ylim=(-1.0, count + 2.2))
    ax.axis("off")
    ax.text(left, count + 0.35, "package, and what it is for", fontsize=11, weight="bold", va="bottom")
    ax.text(grid - 0.15, count + 1.75, "imports (the more files, the larger the dot)", fontsize=11, weight="bold", va="bottom")
    for at, (name, _, color) in enumerate(rows):
        y = count - 1 - at
        ax.add_patch(
            FancyBboxPatch((left, y + 0.1), grid - left - 0.5, 0.8, boxstyle="round,pad=0,rounding_size=0.08",
                           facecolor=color, edgecolor="#8a8f98", linewidth=0.7)
        )  # fmt: skip
        files = len([path for path in sources(name) if path.name != "__init__.py"])
        ax.text(left + 0.12, y + 0.5, name, fontsize=11, weight="bold", va="center", family="monospace")
        ax.text(left + 1.62, y + 0.5, textwrap.fill(purpose(name), 63), fontsize=9.2, va="center", linespacing=1.05)
        ax.text(grid - 0.62, y + 0.5, f"{files}", fontsize=8, va="center", ha="right", color="#666b73")
        x = grid + 0.42 * at
        ax.plot([grid - 0.2, x], [y + 0.5] * 2, color="#e4e6ea", linewidth=0.8, zorder=0)
        ax.plot([x, x], [y + 0.5, count + 0.05], color="#e4e6ea", linewidth=0.8, zorder=0)
        ax.plot([x], [y + 0.5], marker="s", markersize=8, color=color, markeredgecolor="#8a8f98", markeredgewidth=0.7)
        ax.text(x, count + 0.15, name, rotation=55, fontsize=8.5, va="bottom", ha="left", family="monospace")
        for other, much in imported(name).items():
            if other in names:
                color_of = "#c0392b" if names.index(other) > at else "#33506e"
                size = 2.6 + 1.7 * much**0.5
                ax.plot([grid + 0.42 * names.index(other)], [y + 0.5], "o", markersize=size, color=color_of)
    for group in GROUPS:
        places = [count - 1 - at for at, (_, one, _) in enumerate(rows) if one == group]
        if places:
            middle = (min(places) + max(places) + 1) / 2
            ax.plot([left - 0.12] * 2, [min(places) + 0.15, max(places) + 0.85], color="#8a8f98", linewidth=1.2)
            ax.text(left - 0.2, middle, textwrap.fill(group, 20), fontsize=9, va="center", ha="right", color="#454a52")
    ax.text(
        left, -0.25, "A package imports only from itself and from packages above it (tests/unit/test_hygiene.py). The number at "
        "the right of a box counts its modules.", fontsize=9, color="#454a52", va="top",
    )  # fmt: skip
    fig.savefig(HERE / "packages.png", dpi=110)


if __name__ == "__main__":
    main()
