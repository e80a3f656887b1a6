"""Checkpoints in parts: a folder of which every rank writes and reads its own share, by torch's distributed checkpointing.

The tensors are canonical: original names, whole shapes, original order. What is no tensor (loops, callbacks, param groups)
stands beside them in one small file.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import _get_layout

from lightning_seqpar.checkpoint.atomic_files import (
    MARKER,
    REPLACED,
    UNFINISHED,
    SaveError,
    beside,
    clear_away,
    missing,
    on_first_rank,
    sync_folder,
    told_of,
    write_synced,
)
from lightning_seqpar.layout.param_layout import ParamLayout

STATE = "state.pt"
"""The checkpoint, with meta tensors for what the ranks wrote."""
FORMAT = 1

K = TypeVar("K")


class Part:
    """What this rank holds of one whole tensor: a chunk for each range of indices.

    Args:
        local: the rank's own tensor; the padding of a vocabulary, which no chunk names, included.
        layout: how the whole is dealt out; none for a tensor that every rank holds whole.
        rank: the tensor-parallel rank.
        writes: whether this rank saves what it shares with others.

    Attributes:
        local: the tensor.
        shape: of the whole.
    """

    def __init__(self, local: Tensor, layout: ParamLayout | None, rank: int, *, writes: bool) -> None:
        self.local = local.detach()
        shard = None if layout is None else layout.shard
        self.shape = torch.Size(local.shape if layout is None or shard is None else layout.global_shape)
        self._chunks: dict[torch.Size, tuple[Tensor, bool]] = {}
        if shard is None:
            self._chunks[torch.Size([0] * local.ndim)] = self.local, writes
            return
        first, at = shard.is_first_holder(rank), 0
        for start, stop in shard.ranges[rank]:
            if stop > start:
                offsets = [0] * local.ndim
                offsets[shard.dim] = start
                piece = self.local.narrow(shard.dim, at, stop - start)
                self._chunks[torch.Size(offsets)] = piece, writes and bool(first[at])
                at += stop - start

    def piece(self, offsets: torch.Size | None) -> Tensor:
        """The chunk that begins at these whole indices; a view of :attr:`local`."""
        return self._chunks[torch.Size([0] * self.local.ndim) if offsets is None else offsets][0]

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Every chunk of this rank."""
        return [ChunkStorageMetadata(offsets, piece.shape) for offsets, (piece, _) in self._chunks.items()]

    def frozen(self) -> Part:
        """What this rank writes of it, copied to the CPU: training may go on meanwhile."""
        out = copy.copy(self)
        out._chunks = {
            offsets: (piece.to("cpu", copy=True), True) for offsets, (piece, writes) in self._chunks.items() if writes
        }
        out.local = torch.empty(0, dtype=self.local.dtype)
        return out

    def write_items(self, key: str) -> Iterator[WriteItem]:
        """What this rank saves."""
        for offsets, (piece, writes) in self._chunks.items():
            if writes:
                chunk = ChunkStorageMetadata(offsets, piece.shape)
                told = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), self.shape)
                yield WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=told)


class SavingPlanner(DefaultSavePlanner):
    """Writes parts."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the parts by key."""
        self.state_dict, self.is_coordinator = state_dict, is_coordinator
        self.flatten_state_dict = False

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
        self.plan = SavePlan([item for key, part in self.state_dict.items() for item in part.write_items(key)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The numbers of a chunk."""
        found: Tensor = self.state_dict[index.fqn].piece(index.offset)
        return found


class _Loading(DefaultLoadPlanner):
    """Reads into parts."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for key, part in self.state_dict.items():
            found = self.metadata.state_dict_metadata[key]
            assert isinstance(found, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, found, part.chunks())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = self.state_dict[index.fqn].piece(index.offset)
        return found


# ---- the tree of a checkpoint ------------------------------------------------------------------------------------


def walk(tree: Any, visit: Callable[[str, Any], Any], key: str = "") -> Any:
    """``tree`` with ``visit(path, leaf)`` in place of each leaf; containers that are no plain dict, list or tuple are leaves."""
    if type(tree) in (dict, OrderedDict):
        return type(tree)((name, walk(value, visit, f"{key}{name}/")) for name, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(walk(value, visit, f"{key}{at}/") for at, value in enumerate(tree))
    return visit(key[:-1], tree)


def own_memory(tree: Any) -> Any:
    """``tree`` with copies of its tensors: what was read may lie in a file."""

    def copied(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = leaf.detach().clone()
        return (
            nn.Parameter(made, leaf.requires_grad)
            if isinstance(leaf, nn.Parameter)
            else made.requires_grad_(leaf.requires_grad)
        )

    return walk(tree, copied)


def split_parts(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Part]]:
    """The checkpoint with meta tensors for its parts, and the parts by their place in it."""
    parts: dict[str, Part] = {}
    stand_ins: dict[int, Tensor] = {}  # tied weights are one part, and stay one tensor

    def visit(key: str, leaf: Any) -> Any:
        if not isinstance(leaf, Part):
            return leaf
        if id(leaf) not in stand_ins:
            parts[key] = leaf
            stand_ins[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.local.dtype, device="meta")
        return stand_ins[id(leaf)]

    return walk(dict(checkpoint), visit), parts


# ---- writing -----------------------------------------------------------------------------------------------------


def remove_folder(path: Path) -> None:
    """Take a checkpoint's name away, then its marker, then its parts."""
    going = beside(path, UNFINISHED)
    clear_away(going)
    path.rename(going)
    clear_away(going)


def begin_folder(path: Path) -> None:
    """An empty folder beside the name; what a run that was killed left there goes.

    Raises:
        OSError: if it can't be made.
    """
    unfinished = beside(path, UNFINISHED)
    if path.is_file():
        raise FileExistsError(f"{path} is a file; a sharded checkpoint is a folder")
    clear_away(unfinished)  # of a run that was killed
    unfinished.mkdir(parents=True)


def pack(state: Any) -> bytes:
    """What is no tensor of the ranks, as the file has it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def finish_folder(path: Path, state: bytes, told: Mapping[str, Any]) -> None:
    """What is no tensor, then the marker, then the name: each waits until the disk has what is before it."""
    unfinished, replaced = (beside(path, end) for end in (UNFINISHED, REPLACED))
    write_synced(unfinished / STATE, lambda file: file.write(state))
    write_synced(
        unfinished / MARKER, lambda file: file.write(json.dumps({"format": FORMAT, **told}, indent=1).encode())
    )
    sync_folder(unfinished)
    if path.is_symlink():  # save_last="link" of an earlier run: what it leads to stays
        path.unlink()
    if path.exists():
        clear_away(replaced)
        path.rename(replaced)
    unfinished.rename(path)
    sync_folder(path.parent)
    clear_away(replaced)


def write_folder(
    path: Path,
    checkpoint: Mapping[str, Any],
    told: Mapping[str, Any],
    group: ProcessGroup,
    later: ProcessGroup | None = None,
) -> Callable[[], None]:
    """Begin a checkpoint whose tensors are parts; collective over ``group``.

    It is written beside its name, and renamed when it is whole.

    Args:
        path: the folder; one of that name is replaced.
        checkpoint: Lightning's, with a :class:`Part` for each tensor that the ranks write.
        told: what the marker says of the run.
        group: all ranks.
        later: all ranks, for a write in a thread of its own: what it writes is copied to the CPU now.

    Returns:
        What writes it; collective over ``later``, or else over ``group``. It raises :class:`~.files.SaveError` on every rank.

    Raises:
        SaveError: on every rank.
    """
    state, parts = split_parts(checkpoint)
    packed: list[bytes] = []

    def begin() -> None:
        packed.append(pack(state))
        begin_folder(path)

    on_first_rank(begin, group, f"the checkpoint {path} can't be begun")
    if later is None:
        return lambda: _write(path, parts, packed, told, group)
    frozen = {key: part.frozen() for key, part in parts.items()}
    return lambda: _write(path, frozen, packed, told, later)


def _write(
    path: Path, parts: Mapping[str, Part], packed: Sequence[bytes], told: Mapping[str, Any], group: ProcessGroup
) -> None:
    try:
        save(
            dict(parts),
            storage_writer=FileSystemWriter(beside(path, UNFINISHED)),
            planner=SavingPlanner(),
            process_group=group,
        )
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {told_of(cause[0])}" for rank, cause in error.failures.items())
        raise SaveError(f"the checkpoint {path} can't be written: {causes}") from None
    on_first_rank(lambda: finish_folder(path, packed[0], told), group, f"the checkpoint {path} can't be finished")


# ---- reading -----------------------------------------------------------------------------------------------------


class _Index(pickle.Unpickler):
    """Reads the index of a folder, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that an index is made of.

        Raises:
            UnpicklingError: for anything else.
        """
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePosixPath  # where the folder was written, on another system maybe
        value = super().find_class(module, name) if "." not in name and module in self._MODULES else None
        plain = isinstance(value, torch.dtype) or value in (torch.Size, OrderedDict, _get_layout)
        if plain or (isinstance(value, type) and value.__module__ == module and module != "torch"):
            return value
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint")

    _MODULES = (
        "torch",
        "torch.serialization",
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
        "collections",
    )


class _Reader(FileSystemReader):
    """Reads with an index that was read already."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        return self._index


def find_folder(path: Path) -> Path:
    """The folder, or what a run that was killed between two renames left of it whole: the new one, else the one before."""
    if not path.exists():
        for end, what in ((UNFINISHED, "the new one"), (REPLACED, "the one before")):
            if (beside(path, end) / MARKER).is_file():
                rank_zero_warn(
                    f"lightning_seqpar: {path} was being replaced when its run ended; {what} is whole, and is read: "
                    f"{beside(path, end)}"
                )
                return beside(path, end)
    return path


class Folder:
    """A sharded checkpoint, to be read by any number of ranks; each reads for itself.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        told: what its marker says.
        index: of its tensors.

    Raises:
        ValueError: if it is not whole, or not one of ours.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = find_folder(Path(path))
        self._check_there()
        try:
            self.told: dict[str, Any] = json.loads((self.path / MARKER).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path / MARKER}: it can't be read ({error}); the checkpoint is damaged") from None
        if self.told.get("format") != FORMAT:
            raise ValueError(
                f"{self.path}: written in format {self.told.get('format')!r}, and this version reads {FORMAT}; use the version "
                f"of lightning_seqpar that wrote it ({self.told.get('version', 'unknown')})"
            )
        try:
            with (self.path / ".metadata").open("rb") as file:
                self.index: Metadata = _Index(file).load()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{self.path}: its index .metadata can't be read ({error}); the checkpoint is damaged"
            ) from None
        self._check_files()

    def _check_there(self) -> None:
        if (self.path / MARKER).is_file():
            return
        if self.path.is_dir():
            raise ValueError(
                f"{self.path}: no {MARKER} in it, so it is not a sharded checkpoint of lightning_seqpar, or not a whole one"
            )
        raise missing(self.path)

    def _check_files(self) -> None:
        """Every file must be as long as the index says."""
        ends: dict[str, int] = {}
        for info in self.index.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, length in ends.items():
            file = self.path / name
            found = file.stat().st_size if file.is_file() else None
            if found is None or found < length:
                what = "is missing" if found is None else f"holds {found} bytes of {length}"
                raise ValueError(f"{file}: it {what}; the checkpoint is damaged")

    def state(self, *, weights_only: bool | None = None) -> dict[str, Any]:
        """The checkpoint, with a meta tensor for each one that :meth:`read` reads; its place is its key."""
        try:
            found: dict[str, Any] = torch.load(self.path / STATE, map_location="cpu", weights_only=weights_only)
        except (OSError, EOFError, RuntimeError) as error:
            raise ValueError(f"{self.path / STATE}: it can't be read ({error}); the checkpoint is damaged") from None
        return found

    def read(self, parts: Mapping[str, Part]) -> None:
        """Fill the parts from the files.

        Raises:
            ValueError: for a tensor that is not there, or has another shape, and if the disk fails.
        """
        for key, part in parts.items():
            found = self.index.state_dict_metadata.get(key)
            if not isinstance(found, TensorStorageMetadata):
                raise ValueError(f"{self.path}: there is no tensor {key} in it")
            if found.size != part.shape:
                raise ValueError(
                    f"{key}: the checkpoint {self.path} holds {list(found.size)}, and the model has {list(part.shape)}; it belongs "
                    "to another model or configuration"
                )
        if parts:
            with warnings.catch_warnings():  # that it reads for itself, which is what it is told to do
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                try:
                    load(dict(parts), storage_reader=_Reader(self.path, self.index), planner=_Loading(), no_dist=True)
                except CheckpointException as error:
                    told = "; ".join(told_of(cause[0]) for cause in error.failures.values())
                    raise ValueError(f"{self.path}: a part can't be read: {told}") from None


class Opened:
    """A folder that is being restored: its checkpoint, as Lightning hands it around, and what its tensors stand for.

    Args:
        path: the folder.
        weights_only: as ``torch.load`` has it, for what is no tensor.

    Attributes:
        folder: where the tensors are.
        checkpoint: with meta tensors.
    """

    def __init__(self, path: str | Path, *, weights_only: bool | None = None) -> None:
        self.folder = Folder(path)
        self.checkpoint = self.folder.state(weights_only=weights_only)
        self._keys: dict[int, tuple[Tensor, str]] = {}
        walk(self.checkpoint, self._note)

    def _note(self, key: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_meta and id(leaf) not in self._keys:
            self._keys[id(leaf)] = leaf, key
        return leaf

    def key_of(self, value: object) -> str | None:
        """The key of a tensor that is still in the folder."""
        found = self._keys.get(id(value))
        return None if found is None else found[1]

    def take(self, tensors: Mapping[K, Any], layouts: Mapping[K, ParamLayout | None], rank: int) -> dict[K, Any]:
        """This rank's part of each of ``tensors`` (by any name) that is still in the folder; the others as they are."""
        out = dict(tensors)
        parts: dict[str, Part] = {}
        for name, value in tensors.items():
            if (key := self.key_of(value)) is not None:
                layout = layouts.get(name)
                shape = list(value.shape)
                if layout is not None and value.ndim and not layout.fits(value):
                    layout.take(value, rank)  # raises
                if layout is not None and layout.shard is not None and value.ndim:
                    shape[layout.shard.dim] = layout.shard.local_length(rank)
                else:
                    layout = None
                if key not in parts:
                    parts[key] = Part(torch.zeros(shape, dtype=value.dtype), layout, rank, writes=False)
                out[name] = parts[key].local
        self.folder.read(parts)
        return out


class FolderTensors(Mapping[str, Tensor]):
    """Tensors of a folder by name, each read whole when it is asked for."""

    def __init__(self, opened: Opened, tensors: Mapping[str, Any]) -> None:
        self._opened, self._tensors = opened, tensors

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._opened.take({name: self._tensors[name]}, {}, 0)[name]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
