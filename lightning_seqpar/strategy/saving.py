"""Checkpoints as Lightning asks for them: one ordinary file, or a folder with a part per rank; any topology reads both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_seqpar.checkpoint.async_writer import Background
from lightning_seqpar.checkpoint.atomic_files import WholeFileIO, local_path, on_every_rank, on_first_rank
from lightning_seqpar.checkpoint.folder import (
    FolderTensors,
    Opened,
    find_folder,
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
)
from lightning_seqpar.config import VERSION, ParallelConfig
from lightning_seqpar.distributed.rng import pack_streams, unpack_streams
from lightning_seqpar.parallel.apply import record_of
from lightning_seqpar.strategy.steps import SteppingStrategy, plain_optimizer
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.guards.callbacks import refuse_links

T = TypeVar("T")
OWN = "lightning_seqpar"
"""Key of what a checkpoint holds of us; plain Lightning passes it over."""


class SavingStrategy(SteppingStrategy):
    """What is saved and restored; everything is collective."""

    def __init__(self, config: ParallelConfig, **plugins: Any) -> None:
        plugins["checkpoint_io"] = plugins.get("checkpoint_io") or WholeFileIO()
        super().__init__(config, **plugins)
        self._late_state: Mapping[str, Tensor] | None = None
        self._opened: Opened | None = None
        self._read_from: Any = None
        self._within_epoch = False
        self._streams: dict[str, Any] | None = None  # of this replica, to be taken over again when training starts
        self._background = Background()
        self._background_groups: tuple[ParallelGroups, ProcessGroup] | None = None
        self._trains = False

    @property
    def _in_parts(self) -> bool:
        return self.config.checkpoint.format == "sharded"

    def setup_environment(self) -> None:
        """Connect the processes; the thread that writes checkpoints gets a group of its own."""
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

    # ---- saving ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on the first rank and meta tensors elsewhere, or what each rank writes of it; collective."""
        record = record_of(self._module)
        if record is not None and self._sync is not None:
            self._sync.losses.settle()  # what a wrong loss made is not saved
        if self._in_parts:
            return model_parts(self._module, record, self.groups)
        if record is None:
            return super().lightning_module_state_dict()
        return full_state_dict(record, self.root_device)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state with whole moments on the first rank, or what each rank writes of them; collective."""
        record = record_of(self._module)
        if self._in_parts:
            layout = None if record is None else record.layout
            return optimizer_parts(plain_optimizer(optimizer), layout, self.groups)
        if record is None:
            return super().optimizer_state(optimizer)
        return full_optimizer_state(plain_optimizer(optimizer), record.layout, record.groups, self.root_device)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the file on the first rank, or a part on each; collective.

        With ``async_save`` it returns when the numbers are copied, and the last checkpoint is on the disk.

        Raises:
            SaveError: on every rank, if it can't be written; or the one before, which was written meanwhile.
        """
        self._background.wait()
        if "callbacks" in checkpoint:  # not of weights alone
            streams: list[Any] = [None] * self.dp_size
            dist.all_gather_object(streams, pack_streams(self.root_device), group=self.groups["dp"])
            # One state for each replica: its ranks share it.
            checkpoint = {**checkpoint, OWN: {"streams": streams, "order_seed": self._order_seed.value}}
        if self._in_parts:
            place = local_path(filepath)
            if place is None:
                raise ValueError(
                    f"{filepath}: checkpoint={{'format': 'sharded'}} writes to local or mounted folders; use format 'single' there"
                )
            meanwhile = self._trains and self._background_groups is not None
            later = self._background_groups[1] if meanwhile and self._background_groups else None
            write = write_folder(place, checkpoint, self._told_of_run(checkpoint), self._world, later)
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

    def _told_of_run(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
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
        """The checkpoint; of a folder its tensors are read when they are restored, by each rank its part."""
        self._background.wait()
        checkpoint = self._reading(lambda: self._load(checkpoint_path, weights_only), checkpoint_path)
        streams = checkpoint.get(OWN, {}).get("streams", [])
        self._order_seed.value = checkpoint.get(OWN, {}).get("order_seed", self._order_seed.value)
        self._streams = streams[self.dp_rank] if len(streams) == self.dp_size else None
        if streams and self._streams is None:
            rank_zero_info(
                f"lightning_seqpar: {checkpoint_path} was written by {len(streams)} replicas, and there are {self.dp_size} now: "
                "random numbers (dropout) begin anew"
            )
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
        self._within_epoch = not progress.get("is_last_batch", True)
        return checkpoint

    def _reading(self, read: Callable[[], T], path: Any) -> T:
        """What one rank can't read, none can; collective."""
        self._read_from = path
        return on_every_rank(read, self._world, f"the checkpoint {path} can't be restored")

    def _load(self, checkpoint_path: Any, weights_only: bool | None) -> dict[str, Any]:
        self._opened = None
        place = local_path(checkpoint_path)
        if place is not None and find_folder(place).is_dir():
            self._opened = Opened(place, weights_only=weights_only)
            return self._opened.checkpoint
        found = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        # Callbacks and schedulers keep what they are given: in memory of its own, as it may lie in a file.
        own = {key: value for key, value in found.items() if key not in ("state_dict", "optimizer_states")}
        return {**found, **own_memory(own)}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole model's weights; a model that is cut already takes its parts; collective."""
        self._reading(lambda: self._load_model(checkpoint, strict), self._read_from)

    def _load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        record, state, opened = record_of(self._module), checkpoint["state_dict"], self._opened
        if record is not None:
            load_full_state_dict(record, state, strict=strict, opened=opened)
            record.note_versions()
        elif any(parameter.is_meta for parameter in self._module.parameters()):
            with warnings.catch_warnings():  # of a copy to the meta device, which only checks names and shapes
                warnings.filterwarnings("ignore", message=".*meta parameter in the current model.*")
                super().load_model_state_dict(checkpoint, strict=strict)
            self._late_state = state if opened is None else FolderTensors(opened, state)
        elif opened is not None:
            self._module.load_state_dict(opened.take(state, {}, 0), strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole moments, of which each rank takes its parts; random numbers go on where they were."""
        self._reading(lambda: self._load_optimizers(checkpoint), self._read_from)
        if self._streams is not None:  # now, before the loader of the next epoch draws its seed
            unpack_streams(self._streams, self.root_device)
        if not self._within_epoch:
            self._streams = None

    def on_train_start(self) -> None:
        """In the middle of an epoch its loader had drawn its seed before the checkpoint was written."""
        super().on_train_start()
        self._trains = True
        if self.config.checkpoint.async_save:
            for callback in self._trainer.checkpoint_callbacks:
                self._tell_names(callback)
        if self._streams is not None:
            unpack_streams(self._streams, self.root_device)
            self._streams = None

    def _tell_names(self, callback: Any) -> None:
        """``ModelCheckpoint`` looks for a name that is free: one that is being written is not."""
        found = getattr(callback, "file_exists", None)
        looks = getattr(found, "asked", found)  # another strategy's was there before
        if callable(looks):

            def file_exists(filepath: Any, trainer: Any) -> bool:
                return bool(looks(filepath, trainer)) or local_path(filepath) == self._background.path is not None

            file_exists.asked = looks  # type: ignore[attr-defined]
            callback.file_exists = file_exists

    def on_train_end(self) -> None:
        """The last checkpoint is on the disk when training ends."""
        super().on_train_end()
        self._trains = False
        self._background.wait()

    def teardown(self) -> None:
        """Nothing of a restored checkpoint is left for the next run; one under way is ended."""
        try:
            self._background.wait()
        except Exception as error:  # training ended by an error of its own, which is the one to tell
            rank_zero_warn(f"lightning_seqpar: {error}")
        self._background.close()
        self._trains = False
        self._opened = self._streams = None
        super().teardown()

    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        record, opened = record_of(self._module), self._opened
        layout = None if record is None else record.layout
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint holds the states of {len(states)} optimizers, and configure_optimizers returns "
                f"{len(self.optimizers)}; it belongs to another model"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_full_optimizer_state(optimizer, state, layout, self.groups, opened)
            _optimizer_to_device(optimizer, self.root_device)
