"""The command line: ``seqpar`` and ``python -m lightning_seqpar``.

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's own CLI; ``schema`` is ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from pydantic import ValidationError

from lightning_seqpar.config import ParallelConfig, nearest
from lightning_seqpar.strategy import SeqParallelStrategy

OWN = {"schema": "print the JSON schema of ParallelConfig, for editors"}
"""Subcommands beside Lightning's."""

_UNKNOWN = re.compile(
    r"Option '([^']+)' is not accepted|Key '([^']+)' is not expected|unrecognized arguments?: --([\w.]+)"
)
_CLASS = re.compile(r"class_path '([^']+)'")


class _Parser(LightningArgumentParser):
    """Lightning's parser, whose errors begin with the one sentence that matters."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        hint = self._hint(message)
        super().error(f"{hint}\n\n{message}" if hint else message, ex)

    def _hint(self, message: str) -> str:
        """The unknown key and the nearest known one; empty if the message is about something else."""
        found = _UNKNOWN.search(message)
        if found is None:
            return ""
        path = next(group for group in found.groups() if group)
        head, _, key = path.rpartition(".")
        owners = _CLASS.findall(message[: found.start()])
        if owners and owners[-1].endswith("SeqParallelStrategy"):
            known = list(inspect.signature(SeqParallelStrategy.__init__).parameters)[1:]
            return f"SeqParallelStrategy has no argument {key!r}; did you mean {nearest(key, known)}?"
        if owners:
            return f"{owners[-1]} has no argument {key!r}"
        options = [action.dest for action in self._actions if action.dest and action.dest != "help"]
        siblings = [o.removeprefix(f"{head}.") for o in options if o.startswith(f"{head}.")] if head else options
        return f"no option {path!r}; did you mean {nearest(key, sorted({o.split('.')[0] for o in siblings}))}?"


class SeqParallelCLI(LightningCLI):
    """``LightningCLI`` with errors that name the nearest option. A plain ``LightningCLI`` works too.

    Use it as Lightning's: ``SeqParallelCLI(MyModel, MyData)``.
    """

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Our parser in place of Lightning's."""
        require_cli()
        return _Parser(**kwargs)

    def instantiate_classes(self) -> None:
        """A value that breaks a rule of the configuration ends with its sentence, not with a traceback."""
        try:
            super().instantiate_classes()
        except ValidationError as error:
            if error.title != ParallelConfig.__name__:
                raise
            self.parser.error("; ".join(item["msg"] for item in error.errors()))


def require_cli() -> None:
    """The command line needs an extra.

    Raises:
        ImportError: naming it.
    """
    if importlib.util.find_spec("jsonargparse") is None:
        raise ImportError("the command line needs jsonargparse: pip install 'lightning-seqpar[cli]'")


def print_schema() -> None:
    """``seqpar schema``."""
    print(json.dumps(ParallelConfig.json_schema(), indent=2))  # noqa: T201


def main(args: Sequence[str] | None = None) -> None:
    """The command line; ``args`` default to the process's own."""
    given = list(sys.argv[1:] if args is None else args)
    if given[:1] == ["schema"]:
        parser = argparse.ArgumentParser(prog="seqpar schema", description=OWN["schema"])
        parser.parse_args(given[1:])
        print_schema()
        return
    require_cli()
    if "" not in sys.path:
        sys.path.insert(0, "")  # classes of the user's are found in the current folder, as under python -m
    SeqParallelCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            "description": "Tensor + sequence parallel training: Lightning's command line, with "
            "--trainer.strategy=lightning_seqpar.SeqParallelStrategy in it. Also: "
            + "; ".join(f"seqpar {name}: {text}" for name, text in OWN.items())
        },
        args=None if args is None else given,
    )
