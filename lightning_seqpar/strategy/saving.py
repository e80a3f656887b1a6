"""Checkpoints as Lightning asks a strategy for them: one ordinary file, or a folder with a part of each rank.

Either can be read at any topology.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_seqpar.checkpoint.async_writer import Background
from lightning_seqpar.checkpoint.atomic_files import local_path, on_every_rank, on_first_rank
from lightning_seqpar.checkpoint.contents import find_folder
from lightning_seqpar.checkpoint.folder import (
    FolderTensors,
    Opened,
    own_memory,
    remove_folder,
    write_folder,
)
from lightning_seqpar.checkpoint.state_dict import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
    model_parts,
    optimizer_parts,
    read_whole,
)
from lightning_seqpar.checkpoint.whole_file import WholeFileIO
from lightning_seqpar.config import VERSION, ParallelConfig
from lightning_seqpar.data.sampler import PLACE
from lightning_seqpar.distributed.rng import pack_streams, unpack_streams
from lightning_seqpar.parallel.sharded_model import ShardedModel, record_of
from lightning_seqpar.strategy.averages import averages_of
from lightning_seqpar.strategy.child_watch import is_lost_peer
from lightning_seqpar.strategy.launcher import SeqParallelLauncher
from lightning_seqpar.strategy.loops import LoopStrategy
from lightning_seqpar.strategy.refusals import Refusals
from lightning_seqpar.strategy.steps import plain_optimizer
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.guards.callbacks import refuse_links, refuse_saved_shards

T = TypeVar("T")
OWN = "lightning_seqpar"
"""Key of this package's own entry in a checkpoint; plain Lightning ignores it."""


class _FileExists:
    """``ModelCheckpoint.file_exists`` where the name of a checkpoint that is being written is taken too.

    A copy of the callback, and what is pickled of it, has the original in its place.

    Args:
        original: the callback's method.
        background: what writes checkpoints.
    """

    def __init__(self, original: Callable[[Any, Any], bool], background: Background) -> None:
        self.original, self._background = original, background

    def __call__(self, filepath: Any, trainer: Any) -> bool:
        return bool(self.original(filepath, trainer)) or local_path(filepath) == self._background.path is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> Any:
        return copy.copy, (self.original,)


def take_places(checkpoint: dict[str, Any]) -> list[Any]:
    """Take out of a checkpoint where this package's loaders are in their epoch.

    Lightning puts it there, and without this package could not resume loaders that know nothing of it.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states = loops.get("combined_loader", [])
    if not states or not all(isinstance(state, Mapping) and PLACE in state for state in states):
        return []
    places: list[Any] = loops.pop("combined_loader")
    return places


class SavingStrategy(LoopStrategy):
    """The part of the strategy that saves and restores. All of its methods are collective over the world."""

    def __init__(self, config: ParallelConfig, **plugins: Any) -> None:
        plugins["checkpoint_io"] = plugins.get("checkpoint_io") or WholeFileIO()
        super().__init__(config, **plugins)
        self._state_for_meta_model: Mapping[str, Tensor] | None = None  # weights that wait until that is sharded
        self._opened: Opened | None = None
        self._read_from: Any = None  # path of the checkpoint that is being restored
        self._within_epoch = False  # whether that was written in the middle of an epoch
        self._streams: dict[str, Any] | None = None  # this replica's random states in it, until they are restored
        self._background = Background()
        self._background_groups: tuple[ParallelGroups, ProcessGroup] | None = None
        self._trains = False
        self._interruption: BaseException | None = (
            None  # what ends the run, and whether ranks are at different places of it
        )
        self._apart = False

    @property
    def _in_parts(self) -> bool:
        """Whether checkpoints are written as folders with a part of each rank. Before set-up there is one process's to write."""
        return self.config.checkpoint.format == "sharded" and self._groups is not None

    def setup_environment(self) -> None:
        """Connect the processes, and make a group for the thread that writes checkpoints."""
        if self.config.checkpoint.async_save:
            refuse_links(self._trainer.callbacks)  # type: ignore[attr-defined]
        super().setup_environment()
        made = self._background_groups
        if self.config.checkpoint.async_save and (made is None or made[0] is not self.groups):
            ranks = dist.get_process_group_ranks(self._world)
            group = dist.new_group(
                ranks, timeout=self.config.timeout, backend="gloo", use_local_synchronization=True, sort_ranks=False
            )
            assert isinstance(group, ProcessGroup)
            self._background_groups = self.groups, group

    @property
    def _is_apart(self) -> bool:
        """Whether an exception ends the run on ranks that may be at different places of it, so that nothing collective works.

        Lightning's callbacks may save then. After a signal that the ranks agreed on they are at one place, and so they are if
        every one of them raised the same.
        """
        if self._groups is None or self._trainer.state.status != TrainerStatus.INTERRUPTED or self._ending.together:
            return False
        error = sys.exc_info()[1]
        if error is None:  # somebody has caught it, and saves later
            return False
        if error is not self._interruption:
            self._interruption = error
            self._apart = self._world.size() > 1
            if self._apart and isinstance(error, Exception) and not is_lost_peer(error):
                self._apart = not Refusals.of_world(self._world).is_shared(error)
        return self._apart

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the world, unless they are at different places."""
        if not self._is_apart:
            super().barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object of rank ``src`` to every rank of the world, and return it; this rank's own if they are apart."""
        return obj if self._is_apart else super().broadcast(obj, src)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce a tensor over the replicas; it stays as it is if the ranks are apart."""
        return tensor if self._is_apart else super().reduce(tensor, *args, **kwargs)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether ``decision`` is true on all ranks of the world, or on any; this rank's own if they are apart."""
        return decision if self._is_apart else super().reduce_boolean_decision(decision, all)

    # ---- saving ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state dict for a checkpoint. Collective.

        For a single file it holds whole tensors on the first rank, and meta tensors elsewhere. For a folder it holds this
        rank's part of each tensor.
        """
        record = record_of(self._module)
        if self._is_apart:
            return {}
        self.settle()  # raises if ranks had different losses or gradients: such weights must not be saved
        if self._in_parts:
            return model_parts(self._module, record, self.groups)
        if record is None:
            return super().lightning_module_state_dict()
        return full_state_dict(record, self.root_device)

    def _average_state_dict(self, record: ShardedModel, held: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of an average of weights for a checkpoint, in the same form as the model's. Collective."""
        if self._in_parts:
            return model_parts(self._module, record, self.groups, held)
        return full_state_dict(record, self.root_device, held)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state dict for a checkpoint, in the same form as the model's. Collective."""
        record = record_of(self._module)
        if self._is_apart:
            return {}
        if self._in_parts:
            layout = None if record is None else record.layout
            return optimizer_parts(plain_optimizer(optimizer), layout, self.groups)
        if record is None:
            return super().optimizer_state(optimizer)
        return full_optimizer_state(plain_optimizer(optimizer), record.layout, record.groups, self.root_device)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint: a file on the first rank, or a part of a folder on each. Collective.

        With ``async_save`` it returns as soon as the tensors are copied and the checkpoint before is on the disk.

        Raises:
            SaveError: on every rank, if this checkpoint, or the one before that was written meanwhile, can't be written.
        """
        if self._groups is None:  # before set-up
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._is_apart:
            rank_zero_warn(
                f"lightning_seqpar: {filepath} is not written: the run was interrupted on ranks that are at different places of "
                "it, and a checkpoint needs all of them; the last one before it is whole"
            )
            return
        self._background.wait()
        if (record := record_of(self._module)) is not None:
            refuse_saved_shards(checkpoint, record)
        if "callbacks" in checkpoint:  # a checkpoint of weights alone has none, and needs no random states
            streams: list[Any] = [None] * self.dp_size
            dist.all_gather_object(streams, pack_streams(self.root_device), group=self.groups["dp"])
            # One state for each replica, whose ranks share it.
            own = {"streams": streams, "order_seed": self._order_seed.value, "loaders": take_places(checkpoint)}
            checkpoint = {**checkpoint, OWN: own}
        if self._in_parts:
            place = local_path(filepath)
            if place is None:
                raise ValueError(
                    f"{filepath}: checkpoint={{'format': 'sharded'}} writes to local or mounted folders; use format 'single' there"
                )
            meanwhile = self._trains and self._background_groups is not None
            later = self._background_groups[1] if meanwhile and self._background_groups else None
            write = write_folder(place, checkpoint, self._facts_of_run(checkpoint), self._world, later)
            if meanwhile:
                self._background.start(place, write)
            else:
                write()
        else:
            on_first_rank(
                lambda: self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options),
                self._world,
                f"the checkpoint {filepath} can't be written",
            )
        restarts = self.launcher.restarts if isinstance(self.launcher, SeqParallelLauncher) else None
        if restarts is not None and self._trains and "callbacks" in checkpoint and self.global_rank == 0:
            restarts.add(filepath)

    def _facts_of_run(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """What the folder of a checkpoint says of the run that wrote it."""
        return {
            "version": VERSION,
            "topology": {axis: self.groups.size(axis) for axis in self.groups.topology.axes},
            "epoch": checkpoint.get("epoch"),
            "global_step": checkpoint.get("global_step"),
        }

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or a folder, on the first rank."""
        place = local_path(filepath)
        if place is None or not place.is_dir():
            super().remove_checkpoint(filepath)
        elif self.is_global_zero and place.is_symlink():
            place.unlink()
        elif self.is_global_zero:
            self._background.afterwards(lambda: remove_folder(place))

    # ---- restoring ---------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint. Collective.

        Of a folder the tensors are meta tensors; each rank reads its parts of them when they are restored.

        Raises:
            ValueError: on every rank, if one of them can't read it.
        """
        self._background.wait()
        checkpoint = self._reading(lambda: self._load(checkpoint_path, weights_only), checkpoint_path)
        if averages_of(self._trainer.callbacks):  # type: ignore[attr-defined]
            checkpoint = self._reading(lambda: self._with_averages(checkpoint), checkpoint_path)
        if self._groups is None:
            return checkpoint
        streams = checkpoint.get(OWN, {}).get("streams", [])
        self._order_seed.value = checkpoint.get(OWN, {}).get("order_seed", self._order_seed.value)
        self._streams = streams[self.dp_rank] if len(streams) == self.dp_size else None
        self._places = [] if self._streams is None else list(checkpoint[OWN].get("loaders", []))
        if streams and self._streams is None:
            rank_zero_info(
                f"lightning_seqpar: {checkpoint_path} was written by {len(streams)} replicas, and there are {self.dp_size} now: "
                "random numbers (dropout) begin anew"
            )
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._within_epoch = not loop.get("epoch_loop.batch_progress", {}).get("is_last_batch", True)
        resumable = self._places or loop.get("state_dict", {}).get("combined_loader")
        if self._within_epoch and not resumable and self._trainer.state.fn == TrainerFn.FITTING:
            # Lightning takes our loaders for ones that resume, and does not warn.
            rank_zero_warn(
                f"lightning_seqpar: {checkpoint_path} was written in the middle of an epoch, and does not say which samples were "
                "read (it is of another dp, or not of this strategy): the epoch's first batches are read again"
            )
        return checkpoint

    def _reading(self, read: Callable[[], T], path: Any) -> T:
        """Call ``read`` on every rank; if it fails on one, it fails on all. Collective.

        Args:
            read: reads something of the checkpoint.
            path: the checkpoint, for the error.
        """
        self._read_from = path
        if self._groups is None:  # before set-up
            return read()
        return on_every_rank(read, self._world, f"the checkpoint {path} can't be restored")

    def _with_averages(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint from a folder with whole tensors where callbacks look for weights, which they load by themselves."""
        if self._opened is None:
            return checkpoint
        theirs = ("state_dict", "current_model_state", "averaging_state", "callbacks")
        return {
            **checkpoint,
            **read_whole({key: checkpoint[key] for key in theirs if key in checkpoint}, 0, self._opened),
        }

    def _load(self, checkpoint_path: Any, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint of either form."""
        self._opened = None
        place = local_path(checkpoint_path)
        if place is not None and find_folder(place).is_dir():
            self._opened = Opened(place, weights_only=weights_only)
            return self._opened.checkpoint
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        # Callbacks and schedulers keep what they are given, so it is copied: it may be mapped from the file.
        others = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        return {**checkpoint, **own_memory(others)}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of the whole model; a model that is sharded already takes its parts. Collective."""
        self._reading(lambda: self._load_model(checkpoint, strict), self._read_from)

    def _load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the weights on this rank; those of a model on the meta device are kept until it is sharded."""
        record, state, opened = record_of(self._module), checkpoint["state_dict"], self._opened
        if record is not None:
            load_full_state_dict(record, state, strict=strict, opened=opened)
            record.note_versions()
        elif any(parameter.is_meta for parameter in self._module.parameters()):
            # torch warns of loading into meta tensors; here that only checks names and shapes.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*meta parameter in the current model.*")
                super().load_model_state_dict(checkpoint, strict=strict)
            self._state_for_meta_model = state if opened is None else FolderTensors(opened, state)
        elif opened is not None:
            self._module.load_state_dict(opened.take(state, {}, 0), strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the moments of the whole model, of which each rank takes its parts, and restore the random states. Collective."""
        self._reading(lambda: self._load_optimizers(checkpoint), self._read_from)
        if self._streams is not None:  # here, before the loader of the next epoch draws its seed
            unpack_streams(self._streams, self.root_device)
        if not self._within_epoch:
            self._streams = None

    def on_train_start(self) -> None:
        """Restore the random states once more, if the checkpoint was written in the middle of an epoch.

        The epoch's loader draws its seed when it starts; in the run that wrote the checkpoint it had done so before.
        """
        super().on_train_start()
        self._trains = True
        if self.config.checkpoint.async_save:
            for callback in self._trainer.checkpoint_callbacks:
                self._reserve_names(callback)
        if self._streams is not None:
            unpack_streams(self._streams, self.root_device)
            self._streams = None

    def _reserve_names(self, callback: Any) -> None:
        """Let ``ModelCheckpoint`` know that the name of a checkpoint that is being written is taken.

        Its method ``file_exists`` is replaced by one that knows. If an earlier strategy did so, that one is replaced.
        """
        present = getattr(callback, "file_exists", None)
        original = getattr(present, "original", present)
        if callable(original):
            callback.file_exists = _FileExists(original, self._background)

    def on_train_end(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        super().on_train_end()
        self._trains = False
        self._background.wait()

    def teardown(self) -> None:
        """Forget the checkpoint that was restored, and finish writing one that is under way."""
        try:
            self._background.wait()
        except Exception as error:  # only a warning, since training may have ended by an error of its own
            rank_zero_warn(f"lightning_seqpar: {error}")
        self._background.close()
        self._trains = False
        self._opened = self._streams = None
        super().teardown()

    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of all optimizers on this rank; raises ValueError if they are another number, unless there are none."""
        record, opened = record_of(self._module), self._opened
        layout = None if record is None else record.layout
        states = checkpoint["optimizer_states"]
        if not states:  # a hook has emptied them, so that the optimizers begin anew
            return
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint holds the states of {len(states)} optimizers, and configure_optimizers returns "
                f"{len(self.optimizers)}; it belongs to another model"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_full_optimizer_state(optimizer, state, layout, self.groups, opened)
            _optimizer_to_device(optimizer, self.root_device)
