"""Plans and checkpoints as text for a terminal."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_seqpar.checkpoint.convert import Contents
    from lightning_seqpar.verify.describe import Description


def human(count: float) -> str:
    """A number of bytes in the largest unit of which there is at least one: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError


def _console(width: int = 100) -> Any:
    """A console that prints into memory; raises ImportError without rich."""
    try:
        from rich.console import Console
    except ImportError:
        raise ImportError("the table needs rich: pip install 'lightning-seqpar[cli]'") from None
    return Console(file=io.StringIO(), width=width, highlight=False, color_system=None)


def _table(*columns: str) -> Any:
    """An empty table without lines; columns whose name begins with ``>`` are set to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    return table


def _text(console: Any) -> str:
    """What was printed on a console, without blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def render_contents(contents: Contents) -> str:
    """Renders what a checkpoint holds: a headline, a table of its tensors, and its other keys."""
    console = _console()
    origin = contents.origin
    sizes = [f"{axis} {size}" for axis, size in (origin.get("topology") or {}).items() if size > 1]
    form = {"safetensors": "safetensors in Hugging Face's layout"}.get(contents.form, contents.form)
    headline = [f"{form}, whole", *([f"written by {' × '.join(sizes)}"] if sizes else [])]
    told = [name for name in ("epoch", "global_step", "version") if origin.get(name) is not None]
    headline += [f"{name.replace('_', ' ')} {origin[name]}" for name in told]
    console.print(f"{contents.path}: {', '.join(headline)}", soft_wrap=True)
    optimizer = f"; optimizer {human(contents.optimizer_bytes)}" if contents.optimizer_bytes else "; no optimizer"
    console.print(f"{contents.parameters:,} numbers, {human(contents.model_bytes)}{optimizer}\n")
    console.print(_tensors(contents.tensors, contents.tied))
    console.print(f"\nbeside it: {', '.join(contents.other)}")
    return _text(console)


def render_tensors(tensors: Mapping[str, tuple[list[int], str]]) -> str:
    """Renders a table of tensors."""
    console = _console()
    console.print(_tensors(tensors, {}))
    return _text(console)


def _tensors(tensors: Mapping[str, tuple[list[int], str]], ties: Mapping[str, str]) -> Any:
    """A table of tensors; those whose names differ in an index alone, and nothing else, are one row."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for name, (shape, dtype) in tensors.items():
        tied = re.sub(r"\.\d+(?=\.)", ".*", ties.get(name, ""))
        counts[re.sub(r"\.\d+(?=\.)", ".*", name), str(shape), dtype, f"tied to {tied}" if tied else ""] += 1
    table = _table(">", "tensor", "shape", "type", "")
    for row, count in counts.items():
        table.add_row(f"{count} ×" if count > 1 else "", *row)
    return table


def render(described: Description, width: int = 100) -> str:
    """Renders what a plan makes of a model: a headline, a table of the modules, the totals of a rank, and notes."""
    console = _console(width)
    console.print(_headline(described))
    table = _table(">", "module", "style", "on a rank", "gradient", "decided by")
    blocks = ""
    for row in described.rows:
        if "blocks" in row.style.split(", "):
            blocks = f"{row.module}."
        count = f"{row.count} ×" if row.count > 1 else ""
        inner = bool(blocks) and row.module.startswith(blocks)
        name = f"  .{row.module.removeprefix(blocks)}" if inner else row.module or "(the model)"
        shapes = [f"{_shape(tensor)}{' tied' if tensor[0] in row.tied else ''}" for tensor in row.tensors]
        sync = row.sync.partition(":")[0].replace("sum over", "sum")  # the axes, without the reason
        table.add_row(count, name, row.style, "\n".join(shapes), sync, row.decided)
    console.print(table)
    if (coverage := described.coverage) is not None:
        console.print("\n".join(("", str(coverage), *coverage.reasons)), markup=False)
    if described.stages:
        console.print("", _stages(described), sep="\n")
    console.print("", _totals(described), sep="\n")
    reasons = sorted({row.sync for row in described.rows if row.sync})
    for line in (*reasons, *described.notes):
        console.print(f"note: {line}")
    return _text(console)


def _headline(described: Description) -> str:
    """A line with the number of ranks, the axes and the parameters."""
    sizes = " × ".join(f"{axis} {size}" for axis, size in described.axes.items()) or "one rank, nothing is sharded"
    sp = ", sequence parallel" if described.sp else ""
    off = described.coverage.sp_off if described.coverage is not None else ""
    if off:
        sp = f"{sp} (not in {off})" if sp else f", not sequence parallel ({off})"
    ranks = f"{described.world_size:,} rank{'s' * (described.world_size > 1)}"
    return f"{ranks}: {sizes}{sp}; {described.global_parameters:,} parameters, {described.parameters:,} on a rank\n"


def _shape(tensor: tuple[str, tuple[int, ...], tuple[int, ...]]) -> str:
    """A tensor's name with its dims, of which sharded ones show the whole length and the rank's: ``weight [64→32, 16]``."""
    name, whole, local = tensor
    dims = ", ".join(str(length) if length == own else f"{length}→{own}" for length, own in zip(whole, local, strict=True))
    return f"{name} [{dims}]"


def _stages(described: Description) -> Any:
    """A table of the stages of a pipeline, with what a rank of each keeps."""
    bytes_kept = (">weights", ">gradients", ">optimizer", ">activations", ">of micro-batches", ">together")
    table = _table(">stage", "blocks", ">parameters", *bytes_kept)
    for number, stage in enumerate(described.stages):
        kept = "?" if stage.activation_bytes is None else human(stage.activation_bytes)
        numbers = [human(n) for n in (stage.parameter_bytes, stage.gradient_bytes, stage.optimizer_bytes)]
        parent = f"{stage.ends[0][0].rpartition('.')[0]}."
        named = [one if one == last else f"{one} to {last.removeprefix(parent)}" for one, last in stage.ends]
        blocks = ", ".join([*named[:1], *(one.removeprefix(parent) for one in named[1:])])
        blocks += f" ({stage.blocks})" * (stage.blocks > 1)
        total = human(stage.total_bytes)
        table.add_row(str(number), blocks, f"{stage.parameters:,}", *numbers, kept, f"{stage.alive:g}", total)
    return table


def _totals(described: Description) -> Any:
    """A table of the bytes that a rank keeps, and those that it sends in a step."""
    table = _table("per rank", ">", "")
    size = " × ".join(map(str, described.input)) or "the example"
    whole = "whole parameters at once in a step: no unit's, and two units'"
    rows = [
        ("parameters", described.parameter_bytes, ""),
        ("gradients", described.gradient_bytes, ""),
        ("optimizer", described.optimizer_bytes, described.optimizer),
        ("gathered", described.gathered_bytes or None, whole),
        ("activations", described.activation_bytes, f"traced, one step of {size}"),
        ("together", described.total_bytes, ""),
    ]
    for number, (name, count) in enumerate(described.sent_bytes.items()):
        remark = f"{name.partition(' ')[0]} of the gradients over the replicas, in buckets"
        if calls := described.sent_calls.get(name):
            remark = f"{name}, {calls} call{'s' * (calls > 1)}"
        rows.append(("" if number else "sent in a step", count, remark))
    for name, held, remark in rows:
        if held is not None:
            table.add_row(name, human(held), remark)
    return table
