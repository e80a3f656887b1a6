"""``seqpar plan``: what a configuration makes of a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_seqpar.cli.arguments import add_model_arguments, config_of, told
from lightning_seqpar.cli.report import render
from lightning_seqpar.init.model_source import as_steps_take_it, batch_named, load_target, made_by_user
from lightning_seqpar.verify.describe import OPTIMIZERS, describe


def print_plan(args: Sequence[str]) -> None:
    """Run ``seqpar plan`` with its arguments; exits with code 2 if the target or a field is wrong."""
    parser = argparse.ArgumentParser(
        prog="seqpar plan",
        description="Before any launch, without GPUs: what becomes of each module, and what a rank keeps and sends.",
        epilog="examples:\n"
        "  seqpar plan conf/cli.yaml\n"
        "  seqpar plan llama-folder tp=8 --world-size 1024 --length 4096\n"
        "  seqpar plan my_package.models:make tp=4 --batch my_package.models:batch --out my_plan.yaml",
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
    form.add_argument("--yaml", action="store_true", help="print the plan alone, to be edited and given back by plan=FILE")
    form.add_argument("--out", type=Path, metavar="FILE", help="write the plan into a file, which plan=FILE takes")
    given = parser.parse_intermixed_args(list(args))
    with told(parser):
        target = load_target(given.target, getattr(torch, given.dtype) if given.dtype else None)
        batch = batch_named(given.batch, target)
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
        if given.json:
            text = json.dumps(described.to_dict(), indent=2)
        elif given.out:
            given.out.write_text(described.plan)
            text = f"{given.out}: the plan; train with plan={given.out}"
        else:
            text = described.plan if given.yaml else render(described)
    print(text.rstrip())  # noqa: T201
