"""Lightning's own command line: ``seqpar fit``, ``validate``, ``test`` and ``predict``, and the classes for one of your own."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_seqpar.cli.arguments import INSTALL, cause_of
from lightning_seqpar.releases import pl
from lightning_seqpar.strategy.ending import VERBOSE, is_verbose
from lightning_seqpar.user_input import nearest

_UNKNOWN = re.compile(
    r"Option '([^']+)' is not accepted|Key '([^']+)' is not expected|unrecognized arguments?: -*([\w.]+)"
    r"|does not accept option '([^']+)'"
)
_OWN_HINT = re.compile(r"no option '[^']+'; did you mean .*\?")  # a hint of :class:`SeqParallelParser` within a longer message

if TYPE_CHECKING:
    import lightning.pytorch.cli as lightning_cli
else:
    lightning_cli = importlib.import_module(f"{pl.__name__}.cli")


class SeqParallelParser(lightning_cli.LightningArgumentParser):
    """Lightning's parser, whose errors are the one sentence that matters, without a page of usage before it.

    For a CLI of your own: ``LightningCLI(MyModel, parser_class=SeqParallelParser)``, or :class:`SeqParallelCLI`.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one sentence and exit with code 2; within an argument of another parser, raise, and that one prints it."""
        text = self._hint(message) or cause_of(message)
        if not self.exit_on_error:
            super().error(text, ex)
        prog = getattr(ex, "subcommand_parser", self).prog.split(" [")[0]
        self.exit(2, f"error: {text}\ntip: {prog} --help\n")

    def _hint(self, message: str) -> str:
        """A sentence with the unknown option and the nearest known one; empty if the message is about something else."""
        if hints := _OWN_HINT.findall(message):
            return str(hints[-1])
        unknown = _UNKNOWN.search(message)
        if unknown is None:
            return ""
        path = next(group for group in unknown.groups() if group)
        options = [action.dest for action in self._actions if action.dest not in ("help", "config", "print_config")]
        prefix = ""
        for part in path.split("."):  # down to the first name that does not exist
            known = sorted({one.removeprefix(prefix).split(".")[0] for one in options if one.startswith(prefix)})
            if part not in known:
                return f"no option {path!r}; did you mean {nearest(part, known)}?" if known else ""
            prefix += f"{part}."
        return ""


class SeqParallelCLI(lightning_cli.LightningCLI):
    """``LightningCLI`` with errors of one sentence, which name the nearest option. A plain ``LightningCLI`` works too.

    Use it as Lightning's: ``SeqParallelCLI(MyModel, MyData)``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not has_cli():
            raise ImportError(f"the command line needs jsonargparse: {INSTALL}")
        kwargs.setdefault("parser_class", SeqParallelParser)
        super().__init__(*args, **kwargs)

    def instantiate_classes(self) -> None:
        """Make the Trainer, the model and the data; an error of this package is printed as a sentence, without a traceback."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            if unknown := re.search(r"invalid strategy name: `strategy='([^']*)'`", str(error)):
                names = nearest(unknown.group(1), pl.strategies.StrategyRegistry.available_strategies())
                self._refuse(
                    f"no strategy {unknown.group(1)!r}; did you mean {names}? For other sizes: "
                    "--trainer.strategy=lightning_seqpar.SeqParallelStrategy --trainer.strategy.tp=3"
                )
            raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            ours = raised_in.is_relative_to(Path(__file__).parent.parent)
            if not (ours or "class_path='lightning_seqpar.SeqParallelStrategy'" in str(error)) or is_verbose():
                raise
            self._refuse(str(error))

    def _refuse(self, message: str) -> NoReturn:
        parsers = self._subcommand_parsers if self.subcommand else {}
        parsers.get(str(self.subcommand), self.parser).error(message)


class _Verbose(argparse.Action):
    """An option without a value that has refusals told with all frames, on every rank, and is in no saved configuration."""

    def __init__(self, option_strings: Sequence[str], **kwargs: Any) -> None:
        nowhere = argparse.SUPPRESS
        super().__init__(option_strings, dest=nowhere, default=nowhere, nargs=0, help=kwargs["help"])

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """The ranks that this process starts have its environment."""
        os.environ[VERBOSE] = "1"


class OwnCLI(SeqParallelCLI):
    """The command line of this package, whose users write no classes of their own that could have the same options."""

    def add_core_arguments_to_parser(self, parser: lightning_cli.LightningArgumentParser) -> None:
        """Lightning's arguments, and ``-v``; ``--verbose`` is an argument of ``Trainer.validate``."""
        super().add_core_arguments_to_parser(parser)
        parser.add_argument("-v", action=_Verbose, help="Show refusals with all frames of their tracebacks.")


def has_cli() -> bool:
    """Whether Lightning found jsonargparse, on which its command line is built; the extra ``cli`` installs it."""
    return argparse.ArgumentParser in lightning_cli.LightningArgumentParser.__mro__  # Lightning derives from object otherwise
