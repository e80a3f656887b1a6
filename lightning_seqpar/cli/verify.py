"""``seqpar verify``: its arguments, and how they become a trial."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_seqpar.cli.arguments import add_model_arguments, cause_of, config_of
from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.init.model_source import TargetModel, batch_named, function_named, load_target, shrink
from lightning_seqpar.releases import pl
from lightning_seqpar.verify.training import make_batch
from lightning_seqpar.verify.trial import Verification, verify_parity

_COPIES = 7  # times its weights that a process holds at most: weights, gradients, two moments, what it gathers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seqpar verify",
        description="Is a parallel run right? Trains one process and several ranks on this machine's CPU, in\n"
        "float64, with the same weights and batches: two steps, a checkpoint, and a third step\n"
        "resumed from it. Exits with 0 if losses, gradients, norm and weights are the same, with 1 if\n"
        "they are not or if the ranks refuse, with 2 if there is nothing to compare.",
        epilog="examples:\n"
        "  seqpar verify conf/cli.yaml\n"
        "  seqpar verify llama-folder tp=2 --shrink --world-size 4\n"
        "  seqpar verify my_package.models:make tp=2 pp=2 --batch my_package.models:batch\n"
        "  seqpar verify my_package.models:make --strategy ddp\n"
        "  seqpar verify my_package.models:make --strategy my_package.models:my_strategy",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--strategy",
        metavar="NAME",
        help="another strategy, whose plan is in question: a name that Lightning knows, or package.module:factory",
    )
    parser.add_argument(
        "--world-size", metavar="N", type=int, help="ranks (default: the smallest, or as the YAML says if 8 at most)"
    )
    parser.add_argument("--batch", metavar="FACTORY", help="package.module:function that returns the first batch")
    parser.add_argument("--batch-size", metavar="N", type=int, default=1, help="samples of a micro-batch that is made up (1)")
    parser.add_argument("--length", metavar="N", type=int, help="positions of a sample that is made up (32)")
    parser.add_argument(
        "--micro-batches", metavar="N", type=int, help="that a replica accumulates for a step (the stages of pp)"
    )
    parser.add_argument(
        "--shrink", action="store_true", help="narrow heads, few blocks, a short vocabulary (Hugging Face folders)"
    )
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=600.0, help="seconds for each side (600)")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the traceback of a refusal or a failure")
    return parser


def _verify(given: argparse.Namespace) -> Verification:
    notes: list[str] = []
    change = _shrinking(given.target, notes) if given.shrink else None
    target = load_target(given.target, change=change, foreign=True)
    _check_room(target.model, given)
    config = _strategy_of(given, target)
    world_size = given.world_size
    if world_size is None and target.world_size is not None and not given.overrides and target.world_size <= 8:
        world_size = target.world_size
    found = verify_parity(
        functools.partial(_make_target, given.target, change),
        batch_named(given.batch, target),
        config,
        world_size=world_size,
        samples=given.batch_size,
        length=given.length,
        micro_batches=given.micro_batches,
        dtype=given.dtype,
        trainer=target.clipping,
        timeout=given.timeout,
    )
    found.notes = [*notes, *target.notes, *found.notes]
    return found


def _make_target(target: str, change: Callable[[Any], Any] | None) -> nn.Module:
    return load_target(target, memory=True, change=change, foreign=True).model


def _shrinking(target: str, notes: list[str]) -> Callable[[Any], Any]:
    """Chooses what makes the configuration of a folder small: in width too, if its model still runs then."""
    failures = []
    for way in (shrink, functools.partial(shrink, width=False)):
        changes: list[str] = []

        def change(config: Any, way: Callable[[Any], list[str]] = way, changes: list[str] = changes) -> None:
            changes += way(config)

        try:
            model = load_target(target, memory=True, change=change).model
            batch = make_batch(model, 1, None)
            with torch.no_grad():
                model(**batch) if isinstance(batch, Mapping) else model(batch)
        except ImportError:
            raise
        except Exception as error:  # of the model's code, which did not expect such numbers
            if not changes:
                raise
            failures.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        notes.append(f"shrunk: {', '.join(changes) or 'nothing, it is small already'}")
        return way
    raise ValueError(
        f"--shrink: the model does not run when it is smaller ({failures[-1]}); give it a small config.json instead"
    )


def _strategy_of(given: argparse.Namespace, target: TargetModel) -> ParallelConfig | Callable[[], pl.strategies.Strategy] | str:
    """Returns the strategy that is asked for: by option, by fields, or by the YAML file."""
    if given.strategy is not None:
        if given.overrides or given.config:
            raise ValueError(
                f"--strategy={given.strategy!r} beside fields of ParallelConfig: which of them is meant? Leave one out"
            )
        name: str = given.strategy
        return function_named(name, "--strategy") if ":" in name else name
    if target.strategy is not None and not given.overrides and not given.config:
        path, arguments = target.strategy
        if path in pl.strategies.StrategyRegistry:
            return path
        module, _, kind = path.rpartition(".")
        return functools.partial(function_named(f"{module or pl.strategies.__name__}:{kind}", "strategy"), **arguments)
    return config_of(given, target.fields)


def _check_room(model: nn.Module, given: argparse.Namespace) -> None:
    """Raises ValueError unless this machine has memory for the processes of a trial."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    width = 8 if given.dtype == "float64" else 4
    size = sum(parameter.numel() for parameter in model.parameters()) * width
    # One process alone holds it whole; the ranks make it whole before they cut it.
    if (needed := size * _COPIES) > free:
        fix = "--shrink makes it small" if Path(given.target).is_dir() else "give a smaller one, with the same blocks"
        raise ValueError(
            f"target={given.target!r}: a trial of it would need about {needed / 2**30:.0f} GiB in one process, and "
            f"{free / 2**30:.0f} GiB are free; {fix}"
        )


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
    parser = _parser()
    given = parser.parse_intermixed_args(list(args))
    try:
        with _stdout_to_stderr() if given.json else nullcontext():
            found = _verify(given)
    except (ValueError, ImportError) as error:
        cause = error.__cause__ if given.verbose else None
        trace = "" if cause is None else "".join(traceback.format_exception(cause))
        tip = "seqpar verify --help" if given.verbose or error.__cause__ is None else "-v shows where it was raised"
        parser.exit(2, f"{trace}error: {cause_of(str(error))}\ntip: {tip}\n")
    except KeyboardInterrupt:
        parser.exit(130, "seqpar verify: interrupted\n")
    print(json.dumps(found.to_dict(), indent=2) if given.json else found)  # noqa: T201
    if given.verbose and found.trace:
        print(found.trace, file=sys.stderr)  # noqa: T201
    if not found.ok:
        sys.exit(1)
