"""``seqpar inspect`` and ``seqpar convert``: what a checkpoint holds, and another form of it."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_seqpar.checkpoint.convert import (
    Contents,
    check_free,
    contents_of,
    contents_of_files,
    is_huggingface,
    open_source,
    write_checkpoint,
)
from lightning_seqpar.checkpoint.folder import Form, Source
from lightning_seqpar.cli.arguments import console, human, table, text_of, told


def print_contents(args: Sequence[str]) -> None:
    """Run ``seqpar inspect`` with its arguments; exits with code 2 if the checkpoint can't be read."""
    parser = argparse.ArgumentParser(prog="seqpar inspect", description="Shows what a checkpoint holds, and who wrote it.")
    parser.add_argument("path", help="a .ckpt file, the folder of a sharded checkpoint, or a Hugging Face folder")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument("--trust", action="store_true", help="read objects whose pickles may run code")
    given = parser.parse_args(list(args))
    with told(parser):
        path = Path(given.path)
        contents = contents_of_files(path) if is_huggingface(path) else contents_of(open_source(path, trust=given.trust))
        text = json.dumps(contents.to_dict(), indent=2, default=str) if given.json else render_contents(contents)
    print(text.rstrip())  # noqa: T201


def convert(args: Sequence[str]) -> None:
    """Run ``seqpar convert`` with its arguments; exits with code 2 if something can't be read or written."""
    parser = argparse.ArgumentParser(
        prog="seqpar convert",
        description="Writes a checkpoint in another form: one file, a folder in parts, or Hugging Face's safetensors.",
    )
    parser.add_argument("source", help="a .ckpt file, the folder of a sharded checkpoint, or a Hugging Face folder")
    parser.add_argument("target", help="where to write; it must not be there")
    forms = (
        "one .ckpt file, a folder in parts, or Hugging Face's folder; the default is sharded for a file, single for a folder"
    )
    parser.add_argument("--to", choices=("single", "sharded", "safetensors"), help=forms)
    parser.add_argument(
        "--like", metavar="FOLDER", help="for safetensors: the Hugging Face folder that the model was made from"
    )
    parser.add_argument(
        "--prefix",
        metavar="NAME",
        help="the attribute of your LightningModule that holds the Hugging Face model, such as model for self.model",
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a safetensors file (5GB)")
    parser.add_argument("--dry-run", action="store_true", help="list names and shapes of what would be written")
    parser.add_argument("--trust", action="store_true", help="read objects whose pickles may run code")
    given = parser.parse_args(list(args))
    target = Path(given.target)
    with told(parser):
        check_free(target)
        source = _source_of(given)
        form: Form = given.to or ("sharded" if source.form == "single" else "single")
        if form == "safetensors":
            _to_safetensors(source, target, given)
        elif form == source.form:
            raise ValueError(f"--to {form}: {given.source} has that form already; copy it")
        else:
            contents = contents_of(source)
            size = contents.model_bytes + contents.optimizer_bytes
            what = "one file" if form == "single" else "a folder in parts"
            if given.dry_run:
                print(f"{render_contents(contents)}\n\nwould write {what}, {human(size)}: {target}")  # noqa: T201
                return
            with _progress(f"{what}: {target}", size) as progress:
                write_checkpoint(source, target, form, progress)


def _source_of(given: argparse.Namespace) -> Source:
    from lightning_seqpar.checkpoint.huggingface import HuggingFaceSource

    path = Path(given.source)
    if not is_huggingface(path):
        return open_source(path, trust=given.trust)
    if given.prefix is None:
        raise ValueError(
            f"{path} is a Hugging Face folder: say which attribute of your LightningModule holds the model, such as --prefix model "
            "for self.model (--prefix '' where the module is the model)"
        )
    return HuggingFaceSource(path, given.prefix)


def _to_safetensors(source: Source, target: Path, given: argparse.Namespace) -> None:
    """Write a checkpoint as a Hugging Face folder, or list what would be written; raises ValueError if it can't be."""
    if given.like is None:
        raise ValueError(
            "--to safetensors needs --like FOLDER: the Hugging Face folder that the model was made from; its config.json says what "
            "the tensors are called, and it is copied with the tokenizer"
        )
    from lightning_seqpar.checkpoint.huggingface import HuggingFaceTarget

    folder = HuggingFaceTarget(source, Path(given.like), given.prefix, given.max_shard_size)
    if given.dry_run:
        text = f"would write safetensors in Hugging Face's layout, {human(folder.nbytes)}: {target}"
        print(f"{render_tensors(folder.tensors)}\n\n{text}")  # noqa: T201
    else:
        with _progress(f"safetensors: {target}", folder.nbytes) as progress:
            folder.write(target, progress)
    if folder.left_out:
        print(f"left out, as no part of the model: {', '.join(folder.left_out)}")  # noqa: T201


@contextmanager
def _progress(what: str, size: int) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar of bytes on the terminal (nothing without rich); it gets the bytes that are done and all of them."""
    try:
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
    except ImportError:
        yield lambda done, total: None
        return
    with Progress("{task.description}", BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=size)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def render_contents(contents: Contents) -> str:
    """Renders what a checkpoint holds: a headline, a table of its tensors, and its other keys."""
    shown = console()
    origin = contents.origin
    sizes = [f"{axis} {size}" for axis, size in (origin.get("topology") or {}).items() if size > 1]
    form = {"safetensors": "safetensors in Hugging Face's layout"}.get(contents.form, contents.form)
    headline = [f"{form}, whole", *([f"written by {' × '.join(sizes)}"] if sizes else [])]
    named = [name for name in ("epoch", "global_step", "version") if origin.get(name) is not None]
    headline += [f"{name.replace('_', ' ')} {origin[name]}" for name in named]
    shown.print(f"{contents.path}: {', '.join(headline)}", soft_wrap=True)
    optimizer = f"; optimizer {human(contents.optimizer_bytes)}" if contents.optimizer_bytes else "; no optimizer"
    shown.print(f"{contents.parameters:,} numbers, {human(contents.model_bytes)}{optimizer}\n")
    shown.print(_tensors(contents.tensors, contents.tied))
    shown.print(f"\nbeside it: {', '.join(contents.other)}")
    return text_of(shown)


def render_tensors(tensors: Mapping[str, tuple[list[int], str]]) -> str:
    """Renders a table of tensors."""
    shown = console()
    shown.print(_tensors(tensors, {}))
    return text_of(shown)


def _tensors(tensors: Mapping[str, tuple[list[int], str]], ties: Mapping[str, str]) -> Any:
    """A table of tensors; those whose names differ in an index alone, and nothing else, are one row."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for name, (shape, dtype) in tensors.items():
        tied = re.sub(r"\.\d+(?=\.)", ".*", ties.get(name, ""))
        counts[re.sub(r"\.\d+(?=\.)", ".*", name), str(shape), dtype, f"tied to {tied}" if tied else ""] += 1
    rows = table(">", "tensor", "shape", "type", "")
    for row, count in counts.items():
        rows.add_row(f"{count} ×" if count > 1 else "", *row)
    return rows
