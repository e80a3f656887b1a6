"""The command line: ``seqpar`` and ``python -m lightning_seqpar``.

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's own CLI; ``plan``, ``inspect``, ``convert`` and ``schema`` are ours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_seqpar.checkpoint.convert import (
    Form,
    Source,
    check_free,
    contents_of,
    inspect_checkpoint,
    open_source,
    write_checkpoint,
)
from lightning_seqpar.checkpoint.huggingface import HuggingFaceSource, HuggingFaceTarget, inspect_folder, is_huggingface
from lightning_seqpar.cli.arguments import add_model_arguments, batch_of, config_of
from lightning_seqpar.cli.report import human, render, render_contents, render_tensors
from lightning_seqpar.cli.verify import verify_parser, verify_target
from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.init.model_source import as_steps_take_it, load_target, made_by_user
from lightning_seqpar.strategy.refusals import VERBOSE, is_verbose
from lightning_seqpar.user_input import nearest
from lightning_seqpar.verify.describe import OPTIMIZERS, describe

OWN = {
    "plan": "show what a configuration makes of a model: shards, bytes kept and sent",
    "verify": "train one process and several ranks on this machine, and compare losses, gradients and weights",
    "inspect": "show what a checkpoint holds, and who wrote it",
    "convert": "write a checkpoint in another form: one ordinary file, a folder in parts, or Hugging Face's safetensors",
    "schema": "print the JSON schema of ParallelConfig, for editors",
}
"""Subcommands beside Lightning's; they work without the extra ``cli``."""

_INSTALL = "pip install 'lightning-seqpar[cli]'"

_UNKNOWN = re.compile(
    r"Option '([^']+)' is not accepted|Key '([^']+)' is not expected|unrecognized arguments?: -*([\w.]+)"
    r"|does not accept option '([^']+)'"
)
_OWN_HINT = re.compile(r"no option '[^']+'; did you mean .*\?")
"""A hint of :class:`SeqParallelParser` within a longer message."""


class SeqParallelParser(LightningArgumentParser):
    """Lightning's parser, whose errors are the one sentence that matters, without a page of usage before it.

    For a CLI of your own: ``LightningCLI(MyModel, parser_class=SeqParallelParser)``, or :class:`SeqParallelCLI`.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one sentence and exit with code 2; within an argument of another parser, raise, and that one prints it."""
        text = self._hint(message) or _cause(message)
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
            known = sorted(
                {option.removeprefix(prefix).split(".")[0] for option in options if option.startswith(prefix)}
            )
            if part not in known:
                return f"no option {path!r}; did you mean {nearest(part, known)}?" if known else ""
            prefix += f"{part}."
        return ""


def _cause(message: str) -> str:
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


def _is_raised_here(error: BaseException) -> bool:
    """Whether an exception was raised by this package, rather than by the user's code or a library."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).is_relative_to(Path(__file__).parent.parent)


class SeqParallelCLI(LightningCLI):
    """``LightningCLI`` with errors of one sentence, which name the nearest option. A plain ``LightningCLI`` works too.

    Use it as Lightning's: ``SeqParallelCLI(MyModel, MyData)``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_cli()
        kwargs.setdefault("parser_class", SeqParallelParser)
        super().__init__(*args, **kwargs)

    def instantiate_classes(self) -> None:
        """Make the Trainer, the model and the data; an error of this package is printed as a sentence, without a traceback."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            if unknown := re.search(r"invalid strategy name: `strategy='([^']*)'`", str(error)):
                names = nearest(unknown.group(1), StrategyRegistry.available_strategies())
                self._refuse(
                    f"no strategy {unknown.group(1)!r}; did you mean {names}? For other sizes: "
                    "--trainer.strategy=lightning_seqpar.SeqParallelStrategy --trainer.strategy.tp=3"
                )
            ours = "class_path='lightning_seqpar.SeqParallelStrategy'" in str(error) or _is_raised_here(error)
            if not ours or is_verbose():
                raise
            self._refuse(str(error))

    def _refuse(self, message: str) -> NoReturn:
        """Exit with a message of the parser of the subcommand."""
        parsers = self._subcommand_parsers if self.subcommand else {}
        parsers.get(str(self.subcommand), self.parser).error(message)


class _Verbose(argparse.Action):
    """An option without a value that has refusals told with all frames, on every rank, and is in no saved configuration."""

    def __init__(self, option_strings: Sequence[str], **kwargs: Any) -> None:
        super().__init__(
            option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=kwargs["help"]
        )

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """The ranks that this process starts have its environment."""
        os.environ[VERBOSE] = "1"


class _OwnCLI(SeqParallelCLI):
    """The command line of this package, whose users write no classes of their own that could have the same options."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Lightning's arguments, and ``-v``; ``--verbose`` is an argument of ``Trainer.validate``."""
        super().add_core_arguments_to_parser(parser)
        parser.add_argument("-v", action=_Verbose, help="Show refusals with all frames of their tracebacks.")


def has_cli() -> bool:
    """Whether Lightning found jsonargparse, on which its command line is built; the extra ``cli`` installs it."""
    return argparse.ArgumentParser in LightningArgumentParser.__mro__  # Lightning derives from object otherwise


def require_cli() -> None:
    """Check that Lightning's command line can be used.

    Raises:
        ImportError: without jsonargparse; the sentence names the extra that installs it.
    """
    if not has_cli():
        raise ImportError(f"the command line needs jsonargparse: {_INSTALL}")


def _program() -> str:
    """What the user typed to come here."""
    return "python -m lightning_seqpar" if sys.argv[0].endswith("__main__.py") else "seqpar"


def _main_without_cli(given: Sequence[str]) -> None:
    """What the command line says where the extra is not installed: its help, or that a subcommand needs the extra.

    Args:
        given: arguments of the command line, of which the first is no subcommand of :data:`OWN`.
    """
    needs_extra = list(SeqParallelCLI.subcommands())
    parser = argparse.ArgumentParser(
        prog=_program(),
        description="Tensor + sequence parallel training for PyTorch Lightning.",
        epilog=f"{', '.join(needs_extra)} need jsonargparse, which is not installed:\n  {_INSTALL}\n\n"
        "The same extra is needed for the tables of plan and inspect (--json works without\n"
        "it, and plan --yaml), for YAML files with a model that plan reads, and for\n"
        "convert --dry-run and its bar of progress.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = parser.add_subparsers(title="subcommands that work as installed", metavar=f"{{{','.join(OWN)}}}")
    for name, text in OWN.items():
        own.add_parser(name, help=text)
    if not given:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if given[0] in ("-h", "--help"):
        parser.print_help()
        return
    name = next((argument for argument in given if argument in needs_extra), given[0])
    if name in needs_extra or name.startswith("-"):
        parser.exit(2, f"error: {parser.prog} {name} needs jsonargparse, which is not installed: {_INSTALL}\n")
    parser.exit(2, f"error: no subcommand {name!r}; did you mean {nearest(name, [*OWN, *needs_extra])}?\n")


def print_schema() -> None:
    """Run ``seqpar schema``."""
    print(json.dumps(ParallelConfig.json_schema(), indent=2))  # noqa: T201


def _plan_parser() -> argparse.ArgumentParser:
    """The parser of ``seqpar plan``."""
    parser = argparse.ArgumentParser(
        prog="seqpar plan",
        description="Before any launch, without GPUs: what becomes of each module, and what a rank keeps and sends.",
        epilog="examples:\n"
        "  seqpar plan conf/cli.yaml\n"
        "  seqpar plan llama-folder tp=8 --world-size 1024 --length 4096\n"
        "  seqpar plan my_package.models:make tp=4 --batch my_package.models:batch --yaml > my_plan.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_arguments(parser)
    parser.add_argument("--world-size", type=int, help="ranks (default: as the YAML says, or the smallest)")
    parser.add_argument(
        "--batch",
        metavar="FACTORY",
        help="package.module:function that returns what training_step takes (default: the first batch of a YAML file's data)",
    )
    parser.add_argument("--batch-size", type=int, default=1, help="samples of a micro-batch on one rank")
    parser.add_argument("--length", type=int, help="positions of a sample (default: the model's limit, 2048 at most)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="of the parameters")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print all of it as JSON")
    form.add_argument(
        "--yaml", action="store_true", help="print the plan alone, to be edited and given back by plan=FILE"
    )
    return parser


def print_plan(args: Sequence[str]) -> None:
    """Run ``seqpar plan`` with its arguments; exits with code 2 if the target or a field is wrong."""
    parser = _plan_parser()
    given = parser.parse_intermixed_args(list(args))
    try:
        target = load_target(given.target, getattr(torch, given.dtype) if given.dtype else None)
        batch = batch_of(given, target)
        if given.batch is not None and callable(batch):
            batch = made_by_user(batch, f"--batch={given.batch!r}")
        if batch is not None:
            batch = made_by_user(lambda: as_steps_take_it(target.model, batch), "the hooks that transfer a batch")
        described = describe(
            target.model,
            config_of(given, target.fields),
            world_size=given.world_size or target.world_size,
            batch=batch,
            batch_size=given.batch_size,
            length=given.length,
            optimizer=given.optimizer,
        )
        described.notes += target.notes
        text = (
            json.dumps(described.to_dict(), indent=2)
            if given.json
            else described.plan
            if given.yaml
            else render(described)
        )
    except (ValueError, ImportError) as error:
        parser.exit(2, f"error: {_cause(str(error))}\ntip: seqpar plan --help\n")
    print(text.rstrip())  # noqa: T201


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """While open, what this process and those that it starts print goes to standard error: standard output is for data."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_verification(args: Sequence[str]) -> None:
    """Run ``seqpar verify`` with its arguments; exits with code 1 if something differs, with 2 if there is no trial to make."""
    parser = verify_parser()
    given = parser.parse_intermixed_args(list(args))
    try:
        with _stdout_to_stderr() if given.json else nullcontext():
            found = verify_target(given)
    except (ValueError, ImportError) as error:
        cause = error.__cause__ if given.verbose else None
        trace = "" if cause is None else "".join(traceback.format_exception(cause))
        tip = "seqpar verify --help" if given.verbose or error.__cause__ is None else "-v shows where it was raised"
        parser.exit(2, f"{trace}error: {_cause(str(error))}\ntip: {tip}\n")
    except KeyboardInterrupt:
        parser.exit(130, "seqpar verify: interrupted\n")
    print(json.dumps(found.to_dict(), indent=2) if given.json else found)  # noqa: T201
    if given.verbose and found.trace:
        print(found.trace, file=sys.stderr)  # noqa: T201
    if not found.ok:
        sys.exit(1)


def print_contents(args: Sequence[str]) -> None:
    """Run ``seqpar inspect`` with its arguments; exits with code 2 if the checkpoint can't be read."""
    parser = argparse.ArgumentParser(prog="seqpar inspect", description=OWN["inspect"])
    parser.add_argument("path", help="a .ckpt file, the folder of a sharded checkpoint, or a Hugging Face folder")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument("--trust", action="store_true", help="read objects whose pickles may run code")
    given = parser.parse_args(list(args))
    try:
        path = Path(given.path)
        contents = inspect_folder(path) if is_huggingface(path) else inspect_checkpoint(path, trust=given.trust)
        text = json.dumps(contents.to_dict(), indent=2, default=str) if given.json else render_contents(contents)
    except (ValueError, ImportError) as error:
        parser.exit(2, f"error: {_cause(str(error))}\ntip: seqpar inspect --help\n")
    print(text.rstrip())  # noqa: T201


def _convert_parser() -> argparse.ArgumentParser:
    """The parser of ``seqpar convert``."""
    parser = argparse.ArgumentParser(prog="seqpar convert", description=OWN["convert"])
    parser.add_argument("source", help="a .ckpt file, the folder of a sharded checkpoint, or a Hugging Face folder")
    parser.add_argument("target", help="where to write; it must not be there")
    parser.add_argument(
        "--to",
        choices=("single", "sharded", "safetensors"),
        help="what to write: one .ckpt file, a folder in parts, or Hugging Face's folder; the default is sharded for a file and "
        "single for a folder",
    )
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
    return parser


def convert(args: Sequence[str]) -> None:
    """Run ``seqpar convert`` with its arguments; exits with code 2 if something can't be read or written."""
    parser = _convert_parser()
    given = parser.parse_args(list(args))
    target = Path(given.target)
    try:
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
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"error: {_cause(str(error))}\ntip: seqpar convert --help\n")


def _source_of(given: argparse.Namespace) -> Source:
    """Open the checkpoint or Hugging Face folder that is converted; raises ValueError if it can't be read."""
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
    """A bar of bytes on the terminal; nothing is shown without rich.

    Yields:
        what to call with the bytes that are done and all of them.
    """
    try:
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
    except ImportError:
        yield lambda done, total: None
        return
    with Progress("{task.description}", BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=size)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: its arguments; None for those of this process.
    """
    try:
        _run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the program that reads the output has closed it, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _run(args: Sequence[str] | None) -> None:
    """Run a subcommand of :data:`OWN`, or Lightning's command line."""
    given = list(sys.argv[1:] if args is None else args)
    if given[:1] == ["schema"]:
        parser = argparse.ArgumentParser(prog="seqpar schema", description=OWN["schema"])
        parser.parse_args(given[1:])
        print_schema()
        return
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that the user's classes are found in the current folder, as with python -m
    if given[:1] == ["plan"]:
        print_plan(given[1:])
        return
    if given[:1] == ["verify"]:
        print_verification(given[1:])
        return
    if given[:1] == ["inspect"]:
        print_contents(given[1:])
        return
    if given[:1] == ["convert"]:
        convert(given[1:])
        return
    if not has_cli():
        _main_without_cli(given)
        return
    _OwnCLI(
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            "prog": _program(),
            "description": "Tensor + sequence parallel training: Lightning's command line, with "
            "--trainer.strategy=lightning_seqpar.SeqParallelStrategy in it. Also: "
            + "; ".join(f"seqpar {name}: {text}" for name, text in OWN.items()),
        },
        args=None if args is None else given,
    )
