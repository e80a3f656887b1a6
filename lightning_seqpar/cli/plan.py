"""``seqpar plan``: what a configuration makes of a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_seqpar.cli.arguments import add_model_arguments, config_of, console, human, table, text_of, told
from lightning_seqpar.cli.fit import add_fit_arguments, find, precision_of, wants_fit
from lightning_seqpar.config import ParallelConfig, PlanSpec
from lightning_seqpar.init.model_source import TargetModel, as_steps_take_it, batch_named, load_target, made_by_user
from lightning_seqpar.plan.sharding_plan import parse_yaml
from lightning_seqpar.sizing.calibrate import calibrated
from lightning_seqpar.sizing.machines import Cluster, presets
from lightning_seqpar.sizing.search import layout_of
from lightning_seqpar.sizing.traced import optimizer_of
from lightning_seqpar.verify.describe import OPTIMIZERS, Description, describe


def print_plan(args: Sequence[str]) -> None:
    """Run ``seqpar plan`` with its arguments; exits with code 2 if the target or a field is wrong."""
    parser = argparse.ArgumentParser(
        prog="seqpar plan",
        description="Before any launch, without GPUs: what becomes of each module, and what a rank keeps and sends.",
        epilog="examples:\n"
        "  seqpar plan conf/cli.yaml\n"
        "  seqpar plan llama-folder tp=8 --world-size 1024 --length 4096\n"
        "  seqpar plan llama-folder --fit '64x H100' --length 8192 --tokens-per-batch 4194304 --write run.yaml\n"
        "  seqpar plan my_package.models:make tp=4 --batch my_package.models:batch --out my_plan.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_arguments(parser, optional=True)
    parser.add_argument("--world-size", type=int, help="ranks (default: as the YAML says, or the smallest)")
    parser.add_argument(
        "--batch",
        metavar="FACTORY",
        help="package.module:function that returns what training_step takes (default: the first batch of a YAML file's data)",
    )
    parser.add_argument("--batch-size", type=int, default=1, help="samples of a micro-batch on one rank")
    parser.add_argument("--length", type=int, help="positions of a sample (default: the model's limit, 2048 at most)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="of the parameters")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), help="default: what the module configures, or adamw")
    parser.add_argument(
        "--precision", help="of the Trainer (default: as the YAML says; with --fit of a model alone bf16-mixed)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print all of it as JSON")
    form.add_argument("--yaml", action="store_true", help="print the plan alone, to be edited and given back by plan=FILE")
    form.add_argument("--out", type=Path, metavar="FILE", help="write the plan into a file, which plan=FILE takes")
    add_fit_arguments(parser)
    given = parser.parse_intermixed_args(list(args))
    with told(parser):
        if given.calibrate is not None:
            print(calibrated(given.calibrate))  # noqa: T201
            return
        if given.target is None:
            raise ValueError("no target: give a YAML file with a model, a Hugging Face folder, or package.module:factory")
        target = load_target(given.target, getattr(torch, given.dtype) if given.dtype else None, foreign=wants_fit(given))
        batch = batch_named(given.batch, target)
        if given.batch is not None and callable(batch):
            batch = made_by_user(batch, f"--batch={given.batch!r}")
        if batch is not None:
            batch = made_by_user(lambda: as_steps_take_it(target.model, batch), "the hooks that transfer a batch")
        given.optimizer = given.optimizer or optimizer_of(target.model)
        if wants_fit(given):
            with _causes(target):
                for text in find(given, target, batch):
                    print(text.rstrip())  # noqa: T201
            return
        precision = precision_of(given, target)
        config = config_of(given, target.fields)
        step: dict[str, Any] = {"batch": batch, "length": given.length, "optimizer": given.optimizer, "precision": precision}
        with _causes(target):
            described = describe(
                target.model, config, world_size=given.world_size or target.world_size, batch_size=given.batch_size, **step
            )
        described.notes += target.notes
        if given.out:
            given.out.write_text(described.plan)
            text = f"{given.out}: the plan; train with plan={given.out}"
        elif given.yaml:
            text = described.plan
        else:
            _add_peak(described, target, config, given.batch_size, step)
            text = json.dumps(described.to_dict(), indent=2) if given.json else render(described)
    print(text.rstrip())  # noqa: T201


@contextmanager
def _causes(target: TargetModel) -> Iterator[None]:
    """A context in which an error begins with what of the target could not be read."""
    try:
        yield
    except ValueError as error:
        if not target.notes:
            raise
        raise ValueError("; ".join([*target.notes, str(error)])) from error


def _add_peak(
    described: Description, target: TargetModel, config: ParallelConfig, samples: int, step: Mapping[str, Any]
) -> None:
    """Add the most that a rank holds at once in a step, where one can be traced, to what is told."""
    if described.activation_bytes is None:
        return
    name = "CPU" if target.trainer.get("accelerator") == "cpu" else "H100"
    machines = Cluster(devices=described.world_size, machine=presets()[name], name=name)
    accumulated = target.trainer.get("accumulate_grad_batches") or 1
    micro_batches = max(accumulated if isinstance(accumulated, int) else 1, config.pp)
    planned = config.model_copy(update={"plan": PlanSpec(base="none", **parse_yaml(described.plan))} if config.tp > 1 else {})
    try:
        count = samples if step["batch"] is None else None
        found = layout_of(target.model, machines, planned, micro_batches=micro_batches, samples=count, **step)
    except ValueError as error:
        described.notes.append(f"the peak of a step: {error}")
        return
    described.peak_bytes, described.micro_batches = found.memory.total, micro_batches


def render(described: Description, width: int = 100) -> str:
    """Renders what a plan makes of a model: a headline, a table of the modules, the totals of a rank, and notes."""
    shown = console(width)
    shown.print(_headline(described))
    modules = table(">", "module", "style", "on a rank", "gradient", "decided by")
    blocks = ""
    for row in described.rows:
        if "blocks" in row.style.split(", "):
            blocks = f"{row.module}."
        count = f"{row.count} ×" if row.count > 1 else ""
        inner = bool(blocks) and row.module.startswith(blocks)
        name = f"  .{row.module.removeprefix(blocks)}" if inner else row.module or "(the model)"
        shapes = [f"{_shape(tensor)}{' tied' if tensor[0] in row.tied else ''}" for tensor in row.tensors]
        sync = row.sync.partition(":")[0].replace("sum over", "sum")  # the axes, without the reason
        modules.add_row(count, name, row.style, "\n".join(shapes), sync, row.decided)
    shown.print(modules)
    if (coverage := described.coverage) is not None:
        shown.print("\n".join(("", str(coverage), *coverage.reasons)), markup=False)
    if described.stages:
        shown.print("", _stages(described), sep="\n")
    shown.print("", _totals(described), sep="\n")
    reasons = sorted({row.sync for row in described.rows if row.sync})
    for line in (*reasons, *described.notes):
        shown.print(f"note: {line}")
    return text_of(shown)


def _headline(described: Description) -> str:
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
    stages = table(">stage", "blocks", ">parameters", *bytes_kept)
    for number, stage in enumerate(described.stages):
        kept = "?" if stage.activation_bytes is None else human(stage.activation_bytes)
        numbers = [human(n) for n in (stage.parameter_bytes, stage.gradient_bytes, stage.optimizer_bytes)]
        parent = f"{stage.ends[0][0].rpartition('.')[0]}."
        named = [one if one == last else f"{one} to {last.removeprefix(parent)}" for one, last in stage.ends]
        blocks = ", ".join([*named[:1], *(one.removeprefix(parent) for one in named[1:])])
        blocks += f" ({stage.blocks})" * (stage.blocks > 1)
        total = human(stage.total_bytes)
        stages.add_row(str(number), blocks, f"{stage.parameters:,}", *numbers, kept, f"{stage.alive:g}", total)
    return stages


def _totals(described: Description) -> Any:
    """A table of the bytes that a rank keeps, and those that it sends in a step."""
    totals = table("per rank", ">", "")
    size = " × ".join(map(str, described.input)) or "the example"
    whole = "whole parameters at once in a step: no unit's, and two units'"
    step = f"a step of {(count := described.micro_batches)} micro-batch{'es' * (count > 1)} and its update"
    rows = [
        ("parameters", described.parameter_bytes, ""),
        ("gradients", described.gradient_bytes, ""),
        ("optimizer", described.optimizer_bytes, described.optimizer),
        ("gathered", described.gathered_bytes or None, whole),
        ("activations", described.activation_bytes, f"traced, one step of {size}"),
        ("together", described.total_bytes, ""),
        ("peak", described.peak_bytes, f"the most at once, in {step}"),
    ]
    for number, (name, count) in enumerate(described.sent_bytes.items()):
        remark = f"{name.partition(' ')[0]} of the gradients over the replicas, in buckets"
        if calls := described.sent_calls.get(name):
            remark = f"{name}, {calls} call{'s' * (calls > 1)}"
        rows.append(("" if number else "sent in a step", count, remark))
    for name, held, remark in rows:
        if held is not None:
            totals.add_row(name, human(held), remark)
    return totals
