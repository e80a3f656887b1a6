"""Checkpoints as Lightning asks a strategy for them: one ordinary file, or a folder with a part of each rank, for any topology."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_seqpar.checkpoint.atomic_files import SaveError, local_path, missing, on_every_rank, on_first_rank, write_whole
from lightning_seqpar.checkpoint.folder import FolderTensors, Opened, find_folder, own_memory, remove_folder, write_folder
from lightning_seqpar.checkpoint.state_dict import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
    model_parts,
    optimizer_parts,
    read_whole,
)
from lightning_seqpar.data.sampler import PLACE
from lightning_seqpar.distributed.rng import SavedStreams
from lightning_seqpar.parallel.sharded_model import ShardedModel, record_of
from lightning_seqpar.releases import VERSION, fabric, load_file, new_group, optimizer_to_device
from lightning_seqpar.strategy.callbacks import averages_of
from lightning_seqpar.strategy.environment import Environment
from lightning_seqpar.strategy.loops import Loaders
from lightning_seqpar.strategy.steps import Steps, plain_optimizer
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.guards.while_training import refuse_saved_shards


class Background:
    """A thread that writes one checkpoint at a time, and then does what must wait for it; collective, in one order on all ranks."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._saving: Future[None] | None = None
        self._waiting: list[Future[None]] = []

    def start(self, write: Callable[[], None]) -> None:
        """Begins to write a checkpoint in the thread; :meth:`wait` must have been called for the one before."""

        def write_or_warn() -> None:
            try:
                write()
            except SaveError as error:  # raised once more by wait()
                end = "the run ends where its next checkpoint would be written, or at its end"
                rank_zero_warn(f"lightning_seqpar: {error}; {end}")
                raise

        assert self._saving is None
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="lightning_seqpar-save")
        self._saving = self._thread.submit(write_or_warn)

    def afterwards(self, work: Callable[[], None]) -> None:
        """Do something, such as removing an older checkpoint, once the one that is being written is complete, if it ever is."""
        saving = self._saving
        if saving is None or self._thread is None:
            work()
        else:
            self._waiting.append(self._thread.submit(lambda: None if saving.exception() else work()))

    def wait(self) -> None:
        """Waits until the checkpoint is written and all that came after it is done; raises SaveError on every rank if it failed."""
        under_way = [*filter(None, [self._saving]), *self._waiting]
        self._saving, self._waiting = None, []
        for future in under_way:
            future.result()

    def close(self) -> None:
        """End the thread as soon as it has finished what it began."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


T = TypeVar("T")
OWN = "lightning_seqpar"  # key of this package's own entry in a checkpoint; plain Lightning ignores it


def take_places(checkpoint: dict[str, Any]) -> list[Any]:
    """Take out of a checkpoint where this package's loaders are in their epoch, which plain Lightning could not resume."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    if not all(isinstance(state, Mapping) and PLACE in state for state in loop.get("combined_loader", [])):
        return []
    places: list[Any] = loop.pop("combined_loader", [])
    return places


class WholeFileIO(fabric.plugins.TorchCheckpointIO):
    """Lightning's writing and reading of checkpoint files, where local files are renamed when they are complete."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes a file under another name, waits until it is on the disk, and renames it."""
        place = local_path(path)
        if place is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if place.is_dir() and not place.is_symlink():
            raise IsADirectoryError(f"{place} is a folder (a sharded checkpoint?), and a file is to be written there")
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, lambda file: torch.save(checkpoint, file))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file, a local one mapped into memory: a rank reads what it uses. Raises ValueError if it is missing or damaged."""
        place = local_path(path)
        if place is not None and not place.exists():
            raise missing(place)
        checkpoint: dict[str, Any]
        try:
            if place is not None and zipfile.is_zipfile(place):
                checkpoint = torch.load(place, mmap=True, weights_only=weights_only, map_location=map_location or "cpu")
            else:
                # Lightning would trust what lies behind an address of the web unless it is told not to.
                careful = True if weights_only is None else weights_only
                checkpoint = load_file(path, map_location, weights_only=careful)
        except pickle.UnpicklingError:
            raise  # its message explains weights_only
        except (EOFError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{path}: it can't be read ({reason}); it is damaged, or no checkpoint") from None
        return checkpoint


class Saver:
    """Saves and restores checkpoints. All of its methods are collective over the world."""

    def __init__(self, environment: Environment, steps: Steps, loaders: Loaders | None) -> None:
        self._env, self._steps, self._loaders = environment, steps, loaders
        self.state_for_meta_model: Mapping[str, Tensor] | None = None  # until a model on the meta device is sharded
        self.streams: dict[str, Any] | None = None  # of this replica, in the checkpoint, until they are restored
        self._opened: Opened | None = None
        self._read_from: Any = None  # path of the checkpoint that is being restored
        self._within_epoch = False  # whether that was written in the middle of an epoch
        self._background = Background()
        self._background_groups: tuple[ParallelGroups, ProcessGroup] | None = None
        self.trains = False  # while a training is under way ``async_save`` writes

    @property
    def _in_parts(self) -> bool:
        """Whether checkpoints are written as folders with a part of each rank. Before set-up there is one process's to write."""
        return self._env.config.checkpoint.format == "sharded" and self._env.has_groups

    def make_group(self) -> None:
        """Make a group for the thread that writes checkpoints."""
        made, config = self._background_groups, self._env.config
        if config.checkpoint.async_save and (made is None or made[0] is not self._env.groups):
            group = new_group(dist.get_process_group_ranks(self._env.world), backend="gloo", timeout=config.timeout)
            self._background_groups = self._env.groups, group

    def model_state(self, usual: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The model's state dict: whole on the first rank and meta elsewhere, or this rank's parts for a folder. Collective."""
        record = record_of(self._env.module)
        if self._env.is_apart:
            return {}
        self._steps.settle()  # raises if ranks had different losses or gradients: such weights must not be saved
        if self._in_parts:
            return model_parts(self._env.module, record, self._env.groups)
        if record is None:
            return usual()
        return full_state_dict(record, self._env.device)

    def average_state(self, record: ShardedModel, held: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of an average of weights for a checkpoint, in the same form as the model's. Collective."""
        if self._in_parts:
            return model_parts(self._env.module, record, self._env.groups, held)
        return full_state_dict(record, self._env.device, held)

    def optimizer_state(self, usual: Callable[[Optimizer], dict[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state dict for a checkpoint, in the same form as the model's. Collective."""
        record = record_of(self._env.module)
        if self._env.is_apart:
            return {}
        if self._in_parts:
            layout = None if record is None else record.layout
            return optimizer_parts(plain_optimizer(optimizer), layout, self._env.groups)
        if record is None:
            return usual(optimizer)
        return full_optimizer_state(plain_optimizer(optimizer), record.layout, record.groups, self._env.device)

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint: a file on the first rank, or a part of a folder on each. Collective.

        With ``async_save`` it returns as soon as the tensors are copied and the checkpoint before is on the disk. Every rank raises
        SaveError if this checkpoint, or the one before that was written meanwhile, can't be written.
        """
        checkpoint_io = self._env.strategy.checkpoint_io
        if not self._env.has_groups:  # before set-up
            if self._env.strategy.is_global_zero:
                checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        if self._env.is_apart:
            rank_zero_warn(
                f"lightning_seqpar: {filepath} is not written: the run was interrupted on ranks that are at different places of "
                "it, and a checkpoint needs all of them; the last one before it is whole"
            )
            return
        self._background.wait()
        if (record := record_of(self._env.module)) is not None:
            refuse_saved_shards(checkpoint, record)
        # A checkpoint of weights alone has no callbacks, and needs no random states.
        if self._loaders is not None and "callbacks" in checkpoint:
            streams: list[Any] = [None] * self._env.groups.size("dp")
            dist.all_gather_object(streams, SavedStreams().pack(), group=self._env.groups["dp"])
            # One state for each replica, whose ranks share it.
            own = {"streams": streams, "order_seed": self._loaders.order_seed.value, "loaders": take_places(checkpoint)}
            checkpoint = {**checkpoint, OWN: own}
        if self._in_parts:
            place = local_path(filepath)
            if place is None:
                raise ValueError(
                    f"{filepath}: checkpoint={{'format': 'sharded'}} writes to local or mounted folders; use format 'single' there"
                )
            later = self._background_groups[1] if self.trains and self._background_groups else None
            about = {  # what the folder says of the run that wrote it
                "version": VERSION,
                "topology": dict(self._env.groups.topology),
                **{key: checkpoint.get(key) for key in ("epoch", "global_step")},
            }
            write = write_folder(place, checkpoint, about, self._env.world, later)
            if later is None:
                write()
            else:
                self._background.start(write)
        else:
            on_first_rank(
                lambda: checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options),
                self._env.world,
                f"the checkpoint {filepath} can't be written",
            )
        restarts = None if self._env.launcher is None else self._env.launcher.restarts
        if restarts is not None and self.trains and "callbacks" in checkpoint and self._env.strategy.global_rank == 0:
            restarts.add(filepath)

    def remove(self, filepath: Any) -> None:
        """Remove a file or a folder, on the first rank."""
        place = local_path(filepath)
        if not self._env.strategy.is_global_zero:
            return
        if place is None or not place.is_dir():
            self._env.strategy.checkpoint_io.remove_checkpoint(filepath)
        elif place.is_symlink():
            place.unlink()
        else:
            self._background.afterwards(lambda: remove_folder(place))

    def load(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, of a folder as meta tensors whose parts are read later; if one rank can't, all raise ValueError."""
        assert self._loaders is not None
        checkpoint = self.read(checkpoint_path, weights_only)
        if self._opened is None:
            # Callbacks and schedulers keep what they are given, so it is copied: it may be mapped from the file.
            others = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
            checkpoint = {**checkpoint, **own_memory(others)}
        if averages_of(self._env.callbacks):
            checkpoint = self._reading(lambda: self._with_averages(checkpoint), checkpoint_path)
        if not self._env.has_groups:
            return checkpoint
        groups = self._env.groups
        own, dp = checkpoint.get(OWN, {}), groups.size("dp")
        streams = own.get("streams", [])
        self._loaders.order_seed.value = own.get("order_seed", self._loaders.order_seed.value)
        self.streams = streams[groups.rank("dp")] if len(streams) == dp else None
        self._loaders.places = [] if self.streams is None else list(own.get("loaders", []))
        if streams and self.streams is None:
            rank_zero_info(
                f"lightning_seqpar: {checkpoint_path} was written by {len(streams)} replicas, and there are {dp} now: "
                "random numbers (dropout) begin anew"
            )
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._within_epoch = not loop.get("epoch_loop.batch_progress", {}).get("is_last_batch", True)
        resumable = self._loaders.places or loop.get("state_dict", {}).get("combined_loader")
        if self._within_epoch and not resumable and self._env.fits:
            # Lightning takes our loaders for ones that resume, and does not warn.
            rank_zero_warn(
                f"lightning_seqpar: {checkpoint_path} was written in the middle of an epoch, and does not say which samples were "
                "read (it is of another dp, or not of this strategy): the epoch's first batches are read again"
            )
        return checkpoint

    def read(self, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint as it is, mapped from its file; of a folder as meta tensors whose parts are read later. Collective."""
        self._background.wait()
        return self._reading(lambda: self._read(path, weights_only), path)

    def made_whole(self, value: Any) -> Any:
        """What was read, with whole tensors in memory of its own."""
        return read_whole({"": value}, 0, self._opened)[""]

    def _reading(self, read: Callable[[], T], path: Any) -> T:
        """Call ``read`` on every rank; if it fails on one, it fails on all. Collective."""
        self._read_from = path
        if not self._env.has_groups:  # before set-up
            return read()
        return on_every_rank(read, self._env.world, f"the checkpoint {path} can't be restored")

    def _with_averages(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint from a folder with whole tensors where callbacks look for weights, which they load by themselves."""
        if self._opened is None:
            return checkpoint
        theirs = ("state_dict", "current_model_state", "averaging_state", "callbacks")
        return {**checkpoint, **read_whole({key: checkpoint[key] for key in theirs if key in checkpoint}, 0, self._opened)}

    def _read(self, checkpoint_path: Any, weights_only: bool | None) -> dict[str, Any]:
        self._opened = None
        place = local_path(checkpoint_path)
        if place is not None and find_folder(place).is_dir():
            self._opened = Opened(place, weights_only=weights_only)
            return self._opened.tree
        torch.cuda.empty_cache()
        asked = {} if weights_only is None else {"weights_only": weights_only}  # plugins know it since lightning 2.6
        return dict(self._env.strategy.checkpoint_io.load_checkpoint(checkpoint_path, **asked))

    def load_model(self, usual: Callable[..., None], checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the weights of the whole model, of which a sharded one takes its parts, and one on meta later. Collective."""

        def load() -> None:
            record, state, opened = record_of(self._env.module), checkpoint["state_dict"], self._opened
            if record is not None:
                load_full_state_dict(record, state, strict=strict, opened=opened)
                record.note_versions()
            elif any(parameter.is_meta for parameter in self._env.module.parameters()):
                # torch warns of loading into meta tensors; here that only checks names and shapes.
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*meta parameter in the current model.*")
                    usual(checkpoint, strict=strict)
                self.state_for_meta_model = state if opened is None else FolderTensors(opened, state)
            elif opened is not None:
                self._env.module.load_state_dict(opened.take(state, {}, 0), strict=strict)
            else:
                usual(checkpoint, strict=strict)

        self._reading(load, self._read_from)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the moments of the whole model, of which each rank takes its parts, and restore the random states. Collective."""
        self._reading(lambda: self._load_optimizers(checkpoint), self._read_from)
        if self.streams is not None:  # here, before the loader of the next epoch draws its seed
            SavedStreams.unpack(self.streams).restore()
        if not self._within_epoch:
            self.streams = None

    def begin_training(self) -> None:
        """Restore the random states once more within an epoch, whose loader had drawn its seed when the checkpoint was written."""
        self.trains = True
        if self.streams is not None:
            SavedStreams.unpack(self.streams).restore()
            self.streams = None

    def end_training(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self.trains = False
        self._background.wait()

    def end(self) -> None:
        """Forget the checkpoint that was restored, and finish writing one that is under way."""
        try:
            self._background.wait()
        except Exception as error:  # only a warning, since training may have ended by an error of its own
            rank_zero_warn(f"lightning_seqpar: {error}")
        self._background.close()
        self.trains = False
        self._opened = self.streams = None

    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        states, optimizers = checkpoint["optimizer_states"], self._env.strategy.optimizers
        if not states:  # a hook has emptied them, so that the optimizers begin anew
            return
        if len(states) != len(optimizers):
            raise ValueError(
                f"the checkpoint holds the states of {len(states)} optimizers, and configure_optimizers returns "
                f"{len(optimizers)}; it belongs to another model"
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            self._load_optimizer(optimizer, state)

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the moments of the whole model into one optimizer, of which each rank takes its parts. Collective."""
        self._reading(lambda: self._load_optimizer(optimizer, state), self._read_from)

    def _load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        record = record_of(self._env.module)
        layout = None if record is None else record.layout
        load_full_optimizer_state(optimizer, state, layout, self._env.groups, self._opened)
        optimizer_to_device(optimizer, self._env.device)
