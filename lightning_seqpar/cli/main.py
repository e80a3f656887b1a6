"""The command line: ``seqpar`` and ``python -m lightning_seqpar``.

What a subcommand needs is loaded by that one alone: Lightning takes seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence

from lightning_seqpar.cli.arguments import INSTALL
from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.user_input import nearest

LIGHTNINGS = {
    "fit": "train a model, and validate it",
    "validate": "run one evaluation epoch over the validation set",
    "test": "run one evaluation epoch over the test set",
    "predict": "run inference on your data",
}
"""Subcommands of Lightning's."""

OWN = {
    "plan": "show what a configuration makes of a model: shards, bytes kept and sent",
    "verify": "train one process and several ranks on this machine, and compare losses, gradients and weights",
    "inspect": "show what a checkpoint holds, and who wrote it",
    "convert": "write a checkpoint in another form: one ordinary file, a folder in parts, or Hugging Face's safetensors",
    "schema": "print the JSON schema of ParallelConfig, for editors",
}
"""Subcommands beside Lightning's; they work without the extra ``cli``."""


def _program() -> str:
    return "python -m lightning_seqpar" if sys.argv[0].endswith("__main__.py") else "seqpar"


def _help_parser() -> argparse.ArgumentParser:
    """The parser that prints the help of the command itself: all subcommands, of which some may need the extra ``cli``."""
    trains = "".join(f"  {name:<20}{text}\n" for name, text in LIGHTNINGS.items())
    missing = (
        ""
        if importlib.util.find_spec("jsonargparse") is not None
        else "\nThey need jsonargparse, which is not installed, and so do the tables of plan and inspect (--json works),\n"
        f"YAML files with a model, and convert --dry-run:\n  {INSTALL}\n"
    )
    parser = argparse.ArgumentParser(
        prog=_program(),
        description="Tensor + sequence parallel training for PyTorch Lightning.",
        epilog="training, by Lightning's command line with --trainer.strategy=lightning_seqpar.SeqParallelStrategy:\n"
        f"{trains}{missing}\noptions of a subcommand: {_program()} fit --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = parser.add_subparsers(title="before and after a training", metavar=f"{{{','.join([*LIGHTNINGS, *OWN])}}}")
    for name, text in OWN.items():
        own.add_parser(name, help=text)
    return parser


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line, with the arguments of this process where none are given."""
    try:
        _run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the program that reads the output has closed it, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _run(args: Sequence[str] | None) -> None:
    given = list(sys.argv[1:] if args is None else args)
    name, options = (given[0], given[1:]) if given else ("", [])
    if not given:
        _help_parser().print_help(sys.stderr)
        sys.exit(2)
    if name in ("-h", "--help"):
        _help_parser().print_help()
        return
    if name == "schema":
        argparse.ArgumentParser(prog="seqpar schema", description=OWN[name]).parse_args(options)
        print(json.dumps(ParallelConfig.json_schema(), indent=2))  # noqa: T201
        return
    if not name.startswith("-") and name not in (*OWN, *LIGHTNINGS):
        parser = _help_parser()
        message = f"no subcommand {name!r}; did you mean {nearest(name, [*OWN, *LIGHTNINGS])}?"
        parser.exit(2, f"error: {message}\ntip: {parser.prog} --help\n")
    # The user's classes are found in the current folder, as with python -m: by its path, since jsonargparse changes folders.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if name not in OWN:
        _train(given, args)
        return
    if name == "plan":
        from lightning_seqpar.cli.plan import print_plan as run
    elif name == "verify":
        from lightning_seqpar.cli.verify import print_verification as run
    elif name == "inspect":
        from lightning_seqpar.cli.checkpoints import print_contents as run
    else:
        from lightning_seqpar.cli.checkpoints import convert as run
    run(options)


def _train(given: Sequence[str], args: Sequence[str] | None) -> None:
    """Runs Lightning's command line; ``args`` is None for the arguments of this process."""
    from lightning_seqpar.cli.training import OwnCLI, has_cli

    if not has_cli():
        name = next((argument for argument in given if argument in LIGHTNINGS), given[0])
        parser = _help_parser()
        parser.exit(2, f"error: {parser.prog} {name} needs jsonargparse, which is not installed: {INSTALL}\n")
    OwnCLI(
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            "prog": _program(),
            "description": "Tensor + sequence parallel training: Lightning's command line, with "
            "--trainer.strategy=lightning_seqpar.SeqParallelStrategy in it. Also: "
            + "; ".join(f"seqpar {name}: {text}" for name, text in OWN.items()),
        },
        args=None if args is None else list(given),
    )
