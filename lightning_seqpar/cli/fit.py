"""``seqpar plan --fit``: the layouts in which a model fits on machines."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from lightning_seqpar.cli.arguments import console, human, table, text_of
from lightning_seqpar.config import with_overrides
from lightning_seqpar.init.model_source import TargetModel
from lightning_seqpar.plan.sharding_plan import parse_yaml
from lightning_seqpar.sizing.machines import Cluster, cluster, machines_in, presets, quantity
from lightning_seqpar.sizing.search import MAKE_LAYOUTS, LayoutSearch, PredictedLayout, fit_layout
from lightning_seqpar.verify.traced_step import checked_precision, sizes_of


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``--fit``."""
    group = parser.add_argument_group("which layout fits")
    group.add_argument(
        "--fit", metavar="MACHINES", help=f"'8x H100': find the fastest layouts that fit ({', '.join(presets())}, or a number)"
    )
    group.add_argument("--gpus", type=int, metavar="N", help="devices, in the place of --fit N, with --memory and so on")
    group.add_argument("--per-node", type=int, metavar="N", help="devices of a node (default: 8)")
    group.add_argument("--memory", metavar="BYTES", help="of a device, such as 80GiB")
    group.add_argument("--flops", metavar="FLOPS", help="of a device per second, dense, in 16 bits, such as 800T")
    group.add_argument("--nvlink", type=float, metavar="GB/S", help="of a device within its node, in one direction")
    group.add_argument("--network", type=float, metavar="GB/S", help="of a device to other nodes, in one direction")
    group.add_argument("--machines", metavar="FILE", help="YAML file with machines of your own, as --calibrate writes one")
    group.add_argument("--tokens-per-batch", type=int, metavar="N", help="positions of a step (default: a sample a device)")
    group.add_argument("--top", type=int, default=5, metavar="N", help="how many layouts are shown (default: 5)")
    group.add_argument("--write", type=Path, metavar="FILE", help="write the fastest layout as a YAML file for seqpar fit")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw the memory of each stage, and the pipeline's timeline")
    group.add_argument("--calibrate", type=Path, metavar="FILE", help="measure products and collectives here; needs no target")


def wants_fit(given: argparse.Namespace) -> bool:
    """Whether the arguments ask for a search."""
    return given.fit is not None or given.gpus is not None


def find(given: argparse.Namespace, target: TargetModel, batch: Any) -> Iterator[str]:
    """Runs the search that the arguments ask for; gives what is printed of it, piece by piece."""
    machines = _cluster(given)
    precision = precision_of(given, target) or ("32-true" if target.settings else "bf16-mixed")
    tokens = given.tokens_per_batch
    if tokens is None:
        tokens = _tokens_of_file(target, batch, machines.devices)
    searched = fit_layout(
        target.model,
        machines,
        tokens_per_batch=tokens,
        length=given.length,
        batch=batch,
        optimizer=given.optimizer,
        precision=precision,
        config=_fixed(given.overrides, target),
        samples=_samples_of_file(target, batch),
    )
    searched.notes += [*_not_kept(given.overrides, target), *target.notes]
    yield json.dumps(searched.to_dict(given.top), indent=2) if given.json else render_search(searched, given.top)
    if given.plot:
        from lightning_seqpar.cli.drawing import draw_layouts

        draw_layouts(searched, given.plot, given.top)
        if not given.json:
            yield f"{given.plot}: memory of each stage"
    if given.write:
        if not searched.best:
            raise ValueError(f"--write {given.write}: no layout fits, so nothing is written")
        write_layout(given.write, searched.best[0], target, machines, precision)
        if not given.json:
            yield f"{given.write}: the first layout; {_how_to_train(given.write, target, searched.best[0])}"


def precision_of(given: argparse.Namespace, target: TargetModel) -> str | None:
    """The precision of the command line, or of the file; None, with a note, for one of the file that is not predicted."""
    if given.precision:
        return checked_precision(given.precision)
    named = target.trainer.get("precision")
    try:
        return None if named is None else checked_precision(named)
    except ValueError as error:
        target.notes.append(f"traced without it: {error}")
        return None


def _not_kept(overrides: Sequence[str], target: TargetModel) -> list[str]:
    """A note on fields of the file that are found anew."""
    said = {one.partition("=")[0].lstrip("+") for one in overrides}
    found = [f"{name}={value}" for name, value in target.fields.items() if name in MAKE_LAYOUTS and name not in said]
    return [f"found anew, whatever the file says: {', '.join(found)}; write it behind the file to keep it"] if found else []


def _cluster(given: argparse.Namespace) -> Cluster:
    if given.fit is not None and given.gpus is not None:
        raise ValueError(f"--fit {given.fit} and --gpus {given.gpus}: give one of them")
    known = None if given.machines is None else {**presets(), **machines_in(given.machines)}
    changes: dict[str, Any] = {
        "memory": None if given.memory is None else quantity(given.memory, "--memory"),
        "flops": None if given.flops is None else quantity(given.flops, "--flops"),
        "in_node": None if given.nvlink is None else given.nvlink * 1e9,
        "network": None if given.network is None else given.network * 1e9,
        "per_node": given.per_node,
    }
    return cluster(given.fit if given.fit is not None else str(given.gpus), known, **changes)


def _fixed(overrides: Sequence[str], target: TargetModel) -> dict[str, Any]:
    """Fields that hold for every layout: those of the command line, and of the YAML file what makes no layout."""
    kept = {name: value for name, value in target.fields.items() if name not in MAKE_LAYOUTS}
    if "fsdp" in kept:
        kept["fsdp"] = {name: value for name, value in dict(kept["fsdp"] or {}).items() if name != "shard_size"}
    fields: Any = OmegaConf.to_container(with_overrides(kept, overrides), resolve=True)
    return dict(fields)


def _samples_of_file(target: TargetModel, batch: Any) -> int | None:
    """Samples of the first batch, where the file says of no ``batch_size`` that could be changed; None for a free choice."""
    if batch is None or not target.settings or "batch_size" in _data_arguments(target):
        return None
    return None if (found := sizes_of(batch)) is None else found[0]


def _tokens_of_file(target: TargetModel, batch: Any, devices: int) -> int | None:
    """Positions of a step as the YAML file has it now, or with its batch on each device; None without a batch."""
    found = sizes_of(batch)
    if found is None:
        return None
    inner = math.prod(int(target.fields.get(axis, 1)) for axis in ("tp", "cp", "pp"))
    replicas = devices if target.world_size is None else max(1, target.world_size // inner)
    accumulated = target.trainer.get("accumulate_grad_batches", 1)
    return found[0] * found[1] * replicas * (accumulated if isinstance(accumulated, int) else 1)


def _data_arguments(target: TargetModel) -> dict[str, Any]:
    data = target.settings.get("data")
    found = data.get("init_args") if isinstance(data, dict) else None
    return found if isinstance(found, dict) else {}


def render_search(searched: LayoutSearch, most: int, width: int = 120) -> str:
    """Renders the best layouts as a table, then those that are nearest to fitting, and notes."""
    shown = console(width)
    usable = human(searched.cluster.machine.usable)
    shown.print(f"{searched.cluster.shown}, {usable} of each for tensors; {searched.step}, {searched.precision}\n")
    best = table(">", "layout", ">samples", ">micro-batches", ">peak", ">s a step", ">tokens/s", "limited by")
    for number, one in enumerate(searched.best[:most], 1):
        seconds = one.seconds.total
        best.add_row(
            str(number),
            one.shown,
            str(one.samples),
            str(one.micro_batches),
            human(one.memory.total),
            f"{seconds:.3g}",
            f"{one.tokens_per_second:,.0f}",
            one.seconds.limit,
        )
    shown.print(best if searched.best else "no layout fits\n")
    if searched.too_large:
        shown.print("\ndo not fit:" if searched.best else "nearest to it:")
        large = table("layout", ">samples", ">peak", ">too much by", "most of it")
        for one in _unlike(searched.too_large, 3):
            memory = one.memory
            kinds = ("parameters", "gradients", "optimizer", "gathered", "activations", "at_once")
            most_of = max(kinds, key=lambda kind: getattr(memory, kind)).replace("at_once", "what lives for a moment")
            large.add_row(one.shown, str(one.samples), human(memory.total), human(memory.total - one.usable), most_of)
        shown.print(large)
    for why in dict.fromkeys(searched.refused.values()):
        where = "; ".join(name for name, reason in searched.refused.items() if reason == why)
        shown.print(f"note: {where}: {why}", markup=False)
    for note in searched.notes:
        shown.print(f"note: {note}", markup=False)
    return text_of(shown)


def _unlike(found: Sequence[PredictedLayout], most: int) -> list[PredictedLayout]:
    """The first layouts of different names."""
    return list({one.shown: one for one in reversed(found)}.values())[::-1][:most]


def write_layout(file: Path, layout: PredictedLayout, target: TargetModel, machines: Cluster, precision: str) -> None:
    """Write a layout into a YAML file: the target's own with another strategy, or a section ``trainer`` to be given beside it."""
    trainer = {**layout.trainer(machines.machine.per_node), "precision": precision}
    data: dict[str, Any] = parse_yaml(yaml.safe_dump(target.settings)) if target.settings else {}
    data["trainer"] = {**(data.get("trainer") or {}), **trainer}
    arguments = _data_arguments(target)
    if "batch_size" in arguments:
        data["data"]["init_args"]["batch_size"] = layout.samples
    predicted = f"{human(layout.memory.total)} at most, {layout.seconds.total:.3g} s a step"
    head = f"# {layout.shown} on {machines.shown}: {predicted}, predicted\n"
    if "batch_size" not in arguments:
        head += f"# samples of a micro-batch on each replica: {layout.samples}\n"
    file.write_text(head + yaml.safe_dump(data, sort_keys=False))


def _how_to_train(file: Path, target: TargetModel, layout: PredictedLayout) -> str:
    if target.settings:
        return f"train with seqpar fit -c {file}"
    samples = f"{layout.samples} sample{'s' * (layout.samples > 1)}"
    return f"train with seqpar fit -c YOUR.yaml -c {file}, where YOUR.yaml has the model, and data in batches of {samples}"
