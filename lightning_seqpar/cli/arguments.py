"""What subcommands have in common: the arguments that name a model and its configuration, errors, and tables for a terminal."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_seqpar.config import ParallelConfig, with_overrides

INSTALL = "pip install 'lightning-seqpar[cli]'"  # what installs what Lightning's command line needs


def add_model_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the arguments that name a model, and those that say how it is to be parallel."""
    parser.add_argument(
        "target",
        nargs="?" if optional else None,
        help="YAML file with a model, Hugging Face folder (config.json is enough), or package.module:factory",
    )
    parser.add_argument("overrides", nargs="*", help="fields of ParallelConfig: tp=4 sp=false plan=my_plan.yaml")
    parser.add_argument("--config", metavar="FILE", help="YAML file of a ParallelConfig; the overrides come on top")


def config_of(given: argparse.Namespace, fields: Mapping[str, Any]) -> ParallelConfig:
    """Returns the configuration of ``--config``, or else of the target's ``fields``, with the overrides on top."""
    if given.config:
        return ParallelConfig.from_yaml(given.config, given.overrides)
    return ParallelConfig.from_omegaconf(with_overrides(fields, given.overrides))


@contextmanager
def told(parser: argparse.ArgumentParser) -> Iterator[None]:
    """A context manager in which an error ends the process with code 2, by a sentence and where to find help."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"error: {cause_of(str(error))}\ntip: {parser.prog} --help\n")


def cause_of(message: str) -> str:
    """The causes in a message of jsonargparse's, without the types that it tried and the value that it shows."""
    found = re.match(r"\d+ validation errors? for \w+\n", message)
    if found is not None:  # of pydantic alone: for each error the name of a field, and a sentence that names it too
        told = re.sub(r"^[\w.]+\n(?=  )", "", message[found.end() :], flags=re.MULTILINE)
        message = re.sub(r"\n\s*", "\n       ", told.strip())
    message = re.sub(r"\d+ validation errors? for \w+\n(?:\s*\w+\n)?", "", message)
    message = re.sub(r" \[type=\w+\]", "", message)
    if "Errors:" not in message:
        return message
    alternatives = message.split("Errors:")[-1].split("Given value type")[0]
    causes = [" ".join(part.split()) for part in re.split(r"\n\s*- ", alternatives)]
    return "; ".join(cause for cause in causes if cause and not cause.startswith("Expected a <class")) or message


def human(count: float) -> str:
    """A number of bytes in the largest unit of which there is at least one: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError


def console(width: int = 100) -> Any:
    """A console that prints into memory; raises ImportError without rich."""
    try:
        from rich.console import Console
    except ImportError:
        raise ImportError("the table needs rich: pip install 'lightning-seqpar[cli]'") from None
    return Console(file=io.StringIO(), width=width, highlight=False, color_system=None)


def table(*columns: str) -> Any:
    """An empty table without lines; columns whose name begins with ``>`` are set to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    return table


def text_of(shown: Any) -> str:
    """What was printed on a console, without blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in shown.file.getvalue().splitlines())
