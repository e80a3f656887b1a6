"""Sharded checkpoints: a folder of which every rank writes and reads its own parts, by torch's distributed checkpointing.

The tensors are the whole model's: original names, shapes, order. All else (loops, callbacks) is in one small file of the
folder.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar, cast

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
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_seqpar.checkpoint.atomic_files import (
    MARKER,
    REPLACED,
    UNFINISHED,
    SaveError,
    beside,
    clear_away,
    describe_error,
    missing,
    on_first_rank,
    sync,
    write_synced,
)
from lightning_seqpar.layout.param_layout import ParamLayout, empty_like_rows, local_rows, rows_held

K = TypeVar("K")
STATE = "state.pt"
"""The file of the checkpoint without numbers: a meta tensor takes the place of each tensor that the ranks wrote."""
FORMAT = 1  # version of the folder's layout, which its marker names


Form = Literal["single", "sharded", "safetensors"]


class Source:
    """A checkpoint whose tensors are read one at a time: those of its ``tree`` may be meta tensors, which :meth:`read` reads."""

    path: Path
    form: Form
    tree: dict[str, Any]
    origin: dict[str, Any]

    def read(self, value: Tensor) -> Tensor:
        """Read a tensor of :attr:`tree`; returns it with its numbers."""
        return value


def is_meta(value: object) -> bool:
    """Whether a leaf of a checkpoint is a meta tensor."""
    return isinstance(value, Tensor) and value.is_meta


def walk(tree: Any, visit: Callable[[str, Any], Any], key: str = "") -> Any:
    """Copy nested plain dicts, lists and tuples, with other leaves: ``visit`` gets a leaf's path (``a/0/b``), and the leaf."""
    if type(tree) in (dict, OrderedDict):
        return type(tree)((name, walk(value, visit, f"{key}{name}/")) for name, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(walk(value, visit, f"{key}{at}/") for at, value in enumerate(tree))
    return visit(key[:-1], tree)


def find_folder(path: Path) -> Path:
    """The path, or what a run left beside it that was killed while one checkpoint replaced another: the new one, or the old."""
    if not path.exists():
        for end, what in ((UNFINISHED, "the new one"), (REPLACED, "the one before")):
            if (beside(path, end) / MARKER).is_file():
                rank_zero_warn(
                    f"lightning_seqpar: {path} was being replaced when its run ended; {what} is whole, and is read: "
                    f"{beside(path, end)}"
                )
                return beside(path, end)
    return path


class Part:
    """This rank's chunks of one whole tensor, without a vocabulary's padding. Of what several ranks hold alike, one ``writes``."""

    def __init__(self, local: Tensor, layout: ParamLayout | None, rank: int, *, writes: bool) -> None:
        held = rows_held(local)
        self.local = local_rows(local).detach()
        shard = None if layout is None else layout.shard
        self.shape = torch.Size(local.shape if layout is None or shard is None else layout.global_shape)
        self._chunks: dict[torch.Size, tuple[Tensor, bool]] = {}
        if shard is None:
            if held is None or held[1] > held[0]:
                first = 0 if held is None else held[0]
                self._chunks[torch.Size([first, *[0] * (local.ndim - 1)][: local.ndim])] = self.local, writes
            return
        is_first_holder, at, rows = shard.is_first_holder(rank), 0, held or (0, local.shape[0])
        for start, stop in shard.ranges[rank]:
            if stop > start:
                # Of the range's places in the part over tp, those that this rank holds.
                low, high = at, at + stop - start
                if shard.dim == 0:
                    low, high = max(low, rows[0]), min(high, rows[1])
                if high > low and rows[1] > rows[0]:
                    offsets = [0] * local.ndim
                    offsets[0] = rows[0]
                    offsets[shard.dim] = start + low - at
                    chunk = self.local.narrow(shard.dim, low - (rows[0] if shard.dim == 0 else 0), high - low)
                    self._chunks[torch.Size(offsets)] = chunk, writes and bool(is_first_holder[at])
                at += stop - start

    def piece(self, offsets: torch.Size | None) -> Tensor:
        """The chunk that begins at these indices of the whole tensor, a view of :attr:`local`."""
        return self._chunks[torch.Size([0] * self.local.ndim) if offsets is None else offsets][0]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # Where each chunk of this rank lies in the whole tensor, as torch's distributed checkpointing asks for it when it reads.
        return [ChunkStorageMetadata(offsets, piece.shape) for offsets, (piece, _) in self._chunks.items()]

    def frozen(self) -> Part:
        """A copy on the CPU of what this rank writes, so that training may change the tensor in the meantime."""
        out = copy.copy(self)
        out._chunks = {
            offsets: (piece.to("cpu", copy=True), True) for offsets, (piece, writes) in self._chunks.items() if writes
        }
        out.local = torch.empty(0, dtype=self.local.dtype)
        return out

    def __create_write_items__(self, key: str, _: Part) -> list[WriteItem]:
        items = []
        for offsets, (piece, writes) in self._chunks.items():
            if writes:
                chunk = ChunkStorageMetadata(offsets, piece.shape)
                data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), self.shape)
                items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
        return items


class SavingPlanner(DefaultSavePlanner):
    """Tells torch's distributed checkpointing to write a dict of :class:`Part` objects."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor of a chunk."""
        return self.state_dict[index.fqn].piece(index.offset)


class _LoadingPlanner(DefaultLoadPlanner):
    """Tells torch's distributed checkpointing to read into a dict of :class:`Part` objects."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator, self.flatten_state_dict = (
            state_dict,
            metadata,
            is_coordinator,
            False,
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        chunk: Tensor = self.state_dict[index.fqn].piece(index.offset)
        return chunk


def own_memory(tree: Any) -> Any:
    """Copy a checkpoint with all its tensors, which may be mapped from a file."""

    def copied(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        clone = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return nn.Parameter(clone, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else clone

    return walk(tree, copied)


def split_parts(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Part]]:
    """Separates a checkpoint into what ranks write together, by path, and the rest, with a meta tensor for each part."""
    parts: dict[str, Part] = {}
    stand_ins: dict[int, Tensor] = {}  # by the id of a part: tied weights are one part, and stay one tensor

    def visit(key: str, leaf: Any) -> Any:
        if not isinstance(leaf, Part):
            return leaf
        if id(leaf) not in stand_ins:
            parts[key] = leaf
            stand_ins[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.local.dtype, device="meta")
        return stand_ins[id(leaf)]

    return walk(dict(checkpoint), visit), parts


def remove_folder(path: Path) -> None:
    """Remove a checkpoint: first its name, then its marker, then the rest, so that it never looks complete when it is not."""
    removed = beside(path, UNFINISHED)
    clear_away(removed)
    path.rename(removed)
    clear_away(removed)


def begin_folder(path: Path) -> None:
    """Makes an empty folder beside a checkpoint's name; what an interrupted run left there is removed."""
    unfinished = beside(path, UNFINISHED)
    if path.is_file():
        raise FileExistsError(f"{path} is a file; a sharded checkpoint is a folder")
    clear_away(unfinished)  # left by a run that was killed
    unfinished.mkdir(parents=True)


def pack(state: Any) -> bytes:
    """The bytes of :data:`STATE`: the checkpoint without the tensors that ranks write."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def finish_folder(path: Path, state: bytes, facts: Mapping[str, Any]) -> None:
    """Completes a folder of written tensors: the rest (of :func:`pack`), then the marker, then its name, each on the disk."""
    unfinished, replaced = (beside(path, end) for end in (UNFINISHED, REPLACED))
    write_synced(unfinished / STATE, lambda file: file.write(state))
    write_synced(unfinished / MARKER, lambda file: file.write(json.dumps({"format": FORMAT, **facts}, indent=1).encode()))
    sync(unfinished)
    if path.is_symlink():  # made by an earlier run with save_last="link"; what it points to stays
        path.unlink()
    if path.exists():
        clear_away(replaced)
        path.rename(replaced)
    unfinished.rename(path)
    sync(path.parent)
    clear_away(replaced)


def write_folder(
    path: Path, checkpoint: Mapping[str, Any], facts: Mapping[str, Any], group: ProcessGroup, later: ProcessGroup | None = None
) -> Callable[[], None]:
    """Begins a sharded checkpoint under a name beside its own; returns a function that writes and completes it. Collective.

    ``checkpoint`` has a :class:`Part` for each tensor that the ranks write; ``facts`` go into the marker. With ``later``, a second
    group of all ranks, parts are copied to the CPU at once, and the function may run in another thread, collectively over it.
    Both raise SaveError on every rank.
    """
    state, parts = split_parts(checkpoint)
    packed: list[bytes] = []

    def begin() -> None:
        packed.append(pack(state))
        begin_folder(path)

    on_first_rank(begin, group, f"the checkpoint {path} can't be begun")
    over = group if later is None else later
    if later is not None:
        parts = {key: part.frozen() for key, part in parts.items()}

    def write() -> None:
        writer = FileSystemWriter(beside(path, UNFINISHED))
        try:
            save(dict(parts), storage_writer=writer, planner=SavingPlanner(), process_group=over)
        except CheckpointException as error:
            causes = "; ".join(f"rank {rank}: {describe_error(cause[0])}" for rank, cause in error.failures.items())
            raise SaveError(f"the checkpoint {path} can't be written: {causes}") from None
        on_first_rank(lambda: finish_folder(path, packed[0], facts), over, f"the checkpoint {path} can't be finished")

    return write


def write_alone(path: Path, checkpoint: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Writes a sharded checkpoint as one process, of parts that are whole tensors; what is begun is removed if it fails."""
    state, parts = split_parts(checkpoint)
    begin_folder(path)
    try:
        with warnings.catch_warnings():  # torch warns that one process writes alone, which is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            writer = FileSystemWriter(beside(path, UNFINISHED))
            save(dict(parts), storage_writer=writer, planner=SavingPlanner(), no_dist=True)
    except Exception:
        clear_away(beside(path, UNFINISHED))
        raise
    finish_folder(path, pack(state), facts)


class _Index(pickle.Unpickler):
    """Reads the index of a folder, a pickle, and refuses any class that is not part of an index, which may run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePosixPath  # the index names the folder as it was called on the system that wrote it
        if (module, name) in _OF_INDEX:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint")


_OF_INDEX = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
}  # fmt: skip
"""All that an index is made of, beside types of numbers. Other classes of these modules open or empty files when they are made."""


class Opened(Source):
    """A sharded checkpoint whose :attr:`tree` has a meta tensor for each tensor that the ranks wrote, which each rank reads alone.

    ``weights_only`` is torch's, for the rest of it. Raises ValueError if the folder is not whole, damaged, or not one of ours.
    """

    form: Form = "sharded"

    def __init__(self, path: str | Path, *, weights_only: bool | None = None) -> None:
        self.path = find_folder(Path(path))
        if not self.path.is_dir():
            raise missing(self.path)
        if not (self.path / MARKER).is_file():
            raise ValueError(
                f"{self.path}: no {MARKER} in it, so it is not a sharded checkpoint of lightning_seqpar, or not a whole one"
            )
        try:
            marker = json.loads((self.path / MARKER).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path / MARKER}: it can't be read ({error}); the checkpoint is damaged") from None
        if marker.get("format") != FORMAT:
            raise ValueError(
                f"{self.path}: written in format {marker.get('format')!r}, and this version reads {FORMAT}; use the version "
                f"of lightning_seqpar that wrote it ({marker.get('version', 'unknown')})"
            )
        self.origin = {key: value for key, value in marker.items() if key != "format"}
        self._check_files()
        try:
            self.tree = torch.load(self.path / STATE, map_location="cpu", weights_only=weights_only)
        except (OSError, EOFError, RuntimeError) as error:
            raise ValueError(f"{self.path / STATE}: it can't be read ({error}); the checkpoint is damaged") from None
        self._keys: dict[int, tuple[str, Tensor]] = {}  # with the meta tensor, so that no other one gets its id
        walk(self.tree, lambda key, leaf: self._keys.setdefault(id(leaf), (key, leaf)) if is_meta(leaf) else None)

    def index(self) -> Metadata:
        """Reads where each tensor's parts lie in its files; raises ValueError if it can't be read."""
        try:
            with (self.path / ".metadata").open("rb") as file:
                return cast("Metadata", _Index(file).load())
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.path}: its index .metadata can't be read ({error}); the checkpoint is damaged") from None

    def _check_files(self) -> None:
        """Raise ValueError unless every file is as long as the index says."""
        ends: dict[str, int] = {}
        for info in self.index().storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, length in ends.items():
            file = self.path / name
            if file.parent != self.path or name in (".", ".."):
                raise ValueError(f"{self.path}: its index names {name!r}, which is no file in it; the checkpoint is damaged")
            size = file.stat().st_size if file.is_file() else None
            if size is None or size < length:
                what = "is missing" if size is None else f"holds {size} bytes of {length}"
                raise ValueError(f"{file}: it {what}; the checkpoint is damaged")

    def _read_parts(self, parts: Mapping[str, Part]) -> None:
        """Reads parts of tensors, by key, into their memory; raises ValueError for one that is not there, or has another shape."""
        if not parts:
            return
        index, reader = self.index(), FileSystemReader(self.path)
        vars(reader)["read_metadata"] = lambda *_, **__: index  # its own would run code that stands in the file
        for key, part in parts.items():
            metadata = index.state_dict_metadata.get(key)
            if not isinstance(metadata, TensorStorageMetadata):
                raise ValueError(f"{self.path}: there is no tensor {key} in it")
            if metadata.size != part.shape:
                raise ValueError(
                    f"{key}: the checkpoint {self.path} holds {list(metadata.size)}, and the model has {list(part.shape)}; it "
                    "belongs to another model or configuration"
                )
        with warnings.catch_warnings():  # torch warns that each rank reads alone, which is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                load(dict(parts), storage_reader=reader, planner=_LoadingPlanner(), no_dist=True)
            except CheckpointException as error:
                causes = "; ".join(describe_error(cause[0]) for cause in error.failures.values())
                raise ValueError(f"{self.path}: a part can't be read: {causes}") from None

    def key_of(self, value: object) -> str | None:
        """The key in the folder of the tensor that a meta tensor stands for; None for anything else."""
        return self._keys.get(id(value), (None,))[0]

    def read(self, value: Tensor) -> Tensor:
        """Reads a whole tensor of :attr:`tree`; one that has its numbers is returned as it is."""
        out: Tensor = self.take({"": value}, {}, 0)[""]
        return out

    def take(
        self,
        tensors: Mapping[K, Any],
        layouts: Mapping[K, ParamLayout | None],
        rank: int,
        likes: Mapping[K, Tensor] | None = None,
    ) -> dict[K, Any]:
        """Reads this rank's parts of meta tensors of :attr:`tree`, by any names; anything else is returned as it is.

        ``layouts`` has, by the same names, how a tensor is divided over tp; one without a layout is read whole. ``likes`` has the
        parameters that they are for: of one that the replicas split, a rank reads its rows. Raises ValueError for another shape.
        """
        out, parts, found = dict(tensors), dict[str, Part](), dict[str, Tensor]()
        for name, value in tensors.items():
            if (key := self.key_of(value)) is None:
                continue
            layout, shape = layouts.get(name) if value.ndim else None, list(value.shape)
            if layout is not None and not layout.fits(value):
                layout.take(value, rank)  # raises
            if layout is not None and layout.shard is not None:
                shape[layout.shard.dim] = layout.shard.local_length(rank)
            if key not in parts:
                like = None if likes is None or not value.ndim else likes.get(name)
                found[key] = empty_like_rows(like, shape, value.dtype)
                parts[key] = Part(found[key], layout, rank, writes=False)
            out[name] = found[key]
        self._read_parts(parts)
        return out


class FolderTensors(Mapping[str, Tensor]):
    """Maps names to tensors of a folder, each of which is read whole on every access."""

    def __init__(self, opened: Opened, tensors: Mapping[str, Any]) -> None:
        self._opened, self._tensors = opened, tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._opened.read(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
