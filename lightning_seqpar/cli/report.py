"""A description of a plan as text for a terminal."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightning_seqpar.checkpoint.convert import Contents
from lightning_seqpar.verify.describe import Description, ModuleRow

_WIDTH = 100


def human(count: float) -> str:
    """Bytes in the unit that fits: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError


def _console(width: int | None) -> tuple[Any, Any]:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        raise ImportError("the table needs rich: pip install 'lightning-seqpar[cli]'") from None
    return Console(file=io.StringIO(), width=width or _WIDTH, highlight=False, color_system=None), Table


def _text(console: Any) -> str:
    """What was printed, without blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def render_contents(contents: Contents, width: int | None = None) -> str:
    """What a checkpoint holds: the headline, and a table of its tensors.

    Args:
        contents: what :func:`~lightning_seqpar.checkpoint.convert.inspect_checkpoint` returned.
        width: columns of the terminal; the default is 100.

    Raises:
        ImportError: without the extra ``cli``.
    """
    console, table_class = _console(width)
    origin = contents.origin
    sizes = [f"{axis} {size}" for axis, size in (origin.get("topology") or {}).items() if size > 1]
    form = {"safetensors": "safetensors in Hugging Face's layout"}.get(contents.form, contents.form)
    facts = [
        f"{form}, whole",
        *([f"written by {' × '.join(sizes)}"] if sizes else []),
        *(
            f"{name.replace('_', ' ')} {origin[name]}"
            for name in ("epoch", "global_step", "version")
            if origin.get(name) is not None
        ),
    ]
    console.print(f"{contents.path}: {', '.join(facts)}", soft_wrap=True)
    optimizer = f"; optimizer {human(contents.optimizer_bytes)}" if contents.optimizer_bytes else "; no optimizer"
    console.print(f"{contents.parameters:,} numbers, {human(contents.model_bytes)}{optimizer}\n")
    _add_tensors(console, table_class, contents.tensors, contents.tied)
    console.print(f"\nbeside it: {', '.join(contents.other)}")
    return _text(console)


def render_tensors(tensors: Mapping[str, tuple[list[int], str]], width: int | None = None) -> str:
    """A table of tensors, given by name with shape and type.

    Raises:
        ImportError: without the extra ``cli``.
    """
    console, table_class = _console(width)
    _add_tensors(console, table_class, tensors, {})
    return _text(console)


def _add_tensors(
    console: Any, table_class: Any, tensors: Mapping[str, tuple[list[int], str]], ties: Mapping[str, str]
) -> None:
    """A table of tensors, of which those that differ in an index alone are one row."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for name, (shape, dtype) in tensors.items():
        tied = re.sub(r"\.\d+(?=\.)", ".*", ties.get(name, ""))
        counts[re.sub(r"\.\d+(?=\.)", ".*", name), str(shape), dtype, f"tied to {tied}" if tied else ""] += 1
    table = table_class(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", justify="right")
    for title in ("tensor", "shape", "type", ""):
        table.add_column(title, overflow="fold")
    for row, count in counts.items():
        table.add_row(f"{count} ×" if count > 1 else "", *row)
    console.print(table)


def render(described: Description, width: int | None = None) -> str:
    """The table and the totals.

    Args:
        described: what :func:`~lightning_seqpar.verify.describe.describe` returned.
        width: columns of the terminal; the default is 100.

    Raises:
        ImportError: without the extra ``cli``.
    """
    console, table_class = _console(width)
    console.print(_headline(described))
    table = table_class(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", justify="right")
    for name in ("module", "style", "on a rank", "gradient", "decided by"):
        table.add_column(name, overflow="fold")
    blocks = ""
    for row in described.rows:
        if "blocks" in row.style.split(", "):
            blocks = f"{row.module}."
        count = f"{row.count} ×" if row.count > 1 else ""
        inner = bool(blocks) and row.module.startswith(blocks)
        name = f"  .{row.module.removeprefix(blocks)}" if inner else row.module or "(the model)"
        shapes = [f"{_shape(tensor)}{' tied' if tensor[0] in row.tied else ''}" for tensor in row.tensors]
        table.add_row(count, name, row.style, "\n".join(shapes), _sync(row), row.decided)
    console.print(table)
    console.print()
    console.print(_totals(described, table_class))
    reasons = sorted({row.sync for row in described.rows if row.sync})
    for line in (*reasons, *described.notes):
        console.print(f"note: {line}")
    return _text(console)


def _headline(described: Description) -> str:
    sizes = " × ".join(f"{axis} {size}" for axis, size in described.axes.items()) or "one rank, nothing is sharded"
    sp = ", sequence parallel" if described.sp else ""
    ranks = f"{described.world_size:,} rank{'s' * (described.world_size > 1)}"
    return f"{ranks}: {sizes}{sp}; {described.global_parameters:,} parameters, {described.parameters:,} on a rank\n"


def _shape(tensor: tuple[str, tuple[int, ...], tuple[int, ...]]) -> str:
    name, whole, local = tensor
    dims = ", ".join(str(a) if a == b else f"{a}→{b}" for a, b in zip(whole, local, strict=True))
    return f"{name} [{dims}]"


def _sync(row: ModuleRow) -> str:
    return row.sync.partition(":")[0].replace("sum over", "sum")


def _totals(described: Description, table_class: Any) -> Any:
    table = table_class(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("per rank")
    table.add_column("", justify="right")
    table.add_column("")
    size = " × ".join(map(str, described.input)) or "the example"
    rows = [
        ("parameters", described.parameter_bytes, ""),
        ("gradients", described.gradient_bytes, ""),
        ("optimizer", described.optimizer_bytes, described.optimizer),
    ]
    if described.activation_bytes is not None:
        rows.append(("activations", described.activation_bytes, f"traced, one step of {size}"))
    if described.activation_bytes_by_formula is not None:
        rows.append(
            ("", described.activation_bytes_by_formula, "at least, by formula: what columns write and norms read")
        )
    rows.append(("together", described.total_bytes, ""))
    for name, count, told in rows:
        table.add_row(name, human(count), told)
    for at, (name, count) in enumerate(described.sent_bytes.items()):
        calls = described.sent_calls.get(name)
        told = (
            f"{name}, {calls} call{'s' * (calls > 1)}"
            if calls
            else f"{name.partition(' ')[0]} of the gradients over the replicas, in buckets"
        )
        table.add_row("sent in a step" if at == 0 else "", human(count), told)
    return table
