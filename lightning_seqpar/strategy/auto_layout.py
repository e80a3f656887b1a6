"""``layout="auto"``: the layout that a strategy takes at the start, by the devices, their memory and the model that it finds."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.distributed.host import object_of
from lightning_seqpar.distributed.rng import kept_streams
from lightning_seqpar.init.model_source import as_steps_take_it, first_batch, place_of
from lightning_seqpar.releases import pl
from lightning_seqpar.sizing.machines import Cluster, Machine, presets
from lightning_seqpar.sizing.search import LayoutSearch, fit_layout
from lightning_seqpar.sizing.traced import optimizer_of
from lightning_seqpar.user_input import name_error
from lightning_seqpar.verify.traced_step import PRECISIONS


def chosen_layout(trainer: pl.Trainer, module: pl.LightningModule, config: ParallelConfig, per_node: int) -> ParallelConfig:
    """The fastest layout that fits, of those that leave the fields alone which the user set. Collective.

    The first rank searches, by the first batch of the loader or the data module that was given to ``fit``, or by the module's
    ``example_input_array``; the others wait for it. Raises ValueError on every rank where nothing fits, or nothing can be traced.
    """
    answer: tuple[ParallelConfig | None, str] = (None, "")
    if dist.get_rank() == 0:
        try:
            answer = _search(trainer, module, config, per_node)
        except Exception as error:  # of the user's code, too; every rank raises
            answer = None, f"layout='auto': {error}"
    assert dist.group.WORLD is not None
    found, told = object_of(0, answer, dist.group.WORLD)
    if found is None:
        raise ValueError(told)
    rank_zero_info(f"lightning_seqpar: {told}")
    return found


def _search(
    trainer: pl.Trainer, module: pl.LightningModule, config: ParallelConfig, per_node: int
) -> tuple[ParallelConfig | None, str]:
    default = ParallelConfig()
    given = {name: value for name, value in dict(config).items() if value != getattr(default, name)}
    given.pop("layout")
    precision = str(trainer.precision)
    cluster = found_cluster(trainer.strategy.root_device, dist.get_world_size(), per_node)
    with kept_streams():
        batch, why = _first_batch(trainer, module)
    try:
        searched = fit_layout(
            module,
            cluster,
            batch=batch,
            optimizer=optimizer_of(module),
            precision=precision if precision in PRECISIONS else "32-true",
            config=given,
            accumulate=trainer.accumulate_grad_batches,
        )
    except ValueError as error:
        raise ValueError(f"{why}; {error}" if why else str(error)) from error
    return _answer(searched, given)


def _answer(searched: LayoutSearch, given: dict[str, Any]) -> tuple[ParallelConfig | None, str]:
    usable = searched.cluster.machine.usable / 2**30
    if not searched.best:
        near = searched.too_large[0] if searched.too_large else None
        of = "" if near is None else f"; nearest is {near.shown} with {near.memory.total / 2**30:.3g} GiB"
        why = "; ".join([*searched.refused.values(), *searched.notes][:2])
        raise ValueError(f"no layout fits into {usable:.3g} GiB of {searched.cluster.shown}{of}. {why}".strip())
    best = searched.best[0]
    config = ParallelConfig(**{**given, **best.config.model_dump(exclude_defaults=True), "layout": "given"})
    kept = f", with {', '.join(given)} as you set them" if given else ""
    return config, (
        f"layout auto: {best.shown}, the fastest of {len(searched.best)} that fit on {searched.cluster.shown}{kept}: "
        f"{best.memory.total / 2**30:.3g} of {usable:.3g} GiB and {best.seconds.total:.3g} s a step predicted, limited by "
        f"{best.seconds.limit}"
    )


def found_cluster(device: torch.device, world: int, per_node: int) -> Cluster:
    """The machines that this process runs on: the preset that is named as the device is, with the memory that it has."""
    known = presets()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        key = next((key for key in known if key.lower() in name.lower().replace(" ", "")), "H100")
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        key, memory = "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_node
    machine = Machine(**{**known[key].model_dump(), "memory": memory, "per_node": per_node})
    return Cluster(devices=world, machine=machine, name=key)


def _first_batch(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[Any, str]:
    """The first batch of the data that was given to ``fit``, or None and why there is none.

    Of a loader it is made of the first samples, since reading it on one rank may move it on. A data module is copied, as the
    trainer has still to set it up.
    """
    source = trainer.fit_loop._data_source
    given: Any = source.instance
    if given is None:
        return None, ""
    try:
        if isinstance(given, pl.LightningDataModule):
            batch = first_batch(copy.deepcopy(given, {id(trainer): trainer}))
        else:
            batch = _first_samples(given.train_dataloader() if source.is_module() else given)
        return (None, "") if batch is None else (as_steps_take_it(module, batch), "")
    except Exception as error:  # of the user's code; without a batch an example may do
        return None, f"the first training batch can't be read: {name_error(error)} ({place_of(error)})"


def _first_samples(loader: Any) -> Any:
    """The first samples of a loader, as one batch; None for one whose samples come in an order of its own."""
    dataset: Any = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or loader.batch_size is None or not hasattr(dataset, "__getitem__"):
        return None
    return loader.collate_fn([dataset[at] for at in range(min(loader.batch_size, len(dataset)))])
