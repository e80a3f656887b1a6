"""What a checkpoint holds, and its conversion from one form to another, tensor by tensor."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_seqpar.checkpoint.atomic_files import MARKER, beside, missing, write_whole
from lightning_seqpar.checkpoint.folder import Form, Opened, Part, Source, find_folder, is_meta, walk, write_alone
from lightning_seqpar.distributed.autograd import storage_id
from lightning_seqpar.init.weight_files import WeightFiles

K = TypeVar("K")


@dataclass
class Contents:
    """What a checkpoint holds."""

    path: Path
    form: Form
    origin: dict[str, Any] = field(default_factory=dict)  # version, topology, epoch, global_step
    tensors: dict[str, tuple[list[int], str]] = field(default_factory=dict)  # the model's by name: shape and dtype
    moments: dict[str, tuple[list[int], str]] = field(default_factory=dict)  # the optimizers', by path
    tied: dict[str, str] = field(default_factory=dict)  # of a name whose tensor has another name too, that first name
    other: list[str] = field(default_factory=list)  # the checkpoint's other keys
    model_bytes: int = 0  # of tied tensors one counts
    optimizer_bytes: int = 0

    @property
    def parameters(self) -> int:
        """How many numbers the model's tensors hold; tied ones count once."""
        return sum(torch.Size(shape).numel() for name, (shape, _) in self.tensors.items() if name not in self.tied)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain data, for JSON."""
        fields = {**vars(self), "path": str(self.path)}
        return {"complete": True, **fields.pop("origin"), "parameters": self.parameters, **fields}


class FileSource(Source):
    """A checkpoint that is one file. It is mapped into memory, so that only what is used gets read."""

    form: Form = "single"

    def __init__(self, path: Path, *, trust: bool) -> None:
        if not path.exists():
            raise missing(path)
        try:
            checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=not trust)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            hint = "" if trust else "; if it holds objects of yours and you trust who wrote it, add --trust"
            raise ValueError(f"{path}: it can't be read ({reason}){hint}") from None
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
            raise ValueError(f"{path}: it is no checkpoint of Lightning's (no state_dict in it)")
        self.path, self.tree = path, checkpoint
        self.origin = {key: checkpoint[key] for key in ("epoch", "global_step") if key in checkpoint}


def identity(tensor: Tensor) -> Any:
    """A value that two tensors have in common if they are tied."""
    if tensor.is_meta:  # tied ones are one object
        return id(tensor)
    return storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def contents_of(source: Source) -> Contents:
    """List what an open checkpoint holds, without reading its tensors."""
    contents = Contents(source.path, source.form, source.origin)
    first_names: dict[Any, str] = {}  # by identity of the tensor

    def note(key: str, leaf: Any) -> Any:
        top, _, name = key.partition("/")
        if isinstance(leaf, Tensor) and top in ("state_dict", "optimizer_states"):
            shape_and_dtype = list(leaf.shape), str(leaf.dtype).removeprefix("torch.")
            if top == "optimizer_states":
                contents.moments[name] = shape_and_dtype
                contents.optimizer_bytes += leaf.nbytes
            else:
                contents.tensors[name] = shape_and_dtype
                if (first := first_names.setdefault(identity(leaf), name)) != name:
                    contents.tied[name] = first
                else:
                    contents.model_bytes += leaf.nbytes
        return leaf

    walk(source.tree, note)
    contents.other = [key for key in source.tree if key not in ("state_dict", "optimizer_states")]
    return contents


def contents_of_files(path: Path) -> Contents:
    """Lists the tensors of a folder that ``save_pretrained`` wrote; raises ValueError if a file is missing or damaged."""
    try:
        files = WeightFiles(path)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("weights_from: ")) from None
    contents = Contents(path, "safetensors")
    for name, (shape, dtype) in files.contents().items():
        contents.tensors[name] = list(shape), str(dtype).removeprefix("torch.")
        contents.model_bytes += torch.Size(shape).numel() * dtype.itemsize
    contents.other = sorted(file.name for file in path.iterdir() if not file.name.endswith(".safetensors"))
    return contents


def is_huggingface(path: Path) -> bool:
    """Whether a folder holds a model as ``save_pretrained`` writes it."""
    weights = ("model.safetensors", "model.safetensors.index.json")  # all of them, or the index of several files
    return path.is_dir() and not (path / MARKER).exists() and any((path / name).is_file() for name in weights)


def open_source(path: str | Path, *, trust: bool = False) -> Source:
    """Opens a checkpoint of either of this package's forms; ``trust`` also reads objects whose pickles may run code."""
    place = find_folder(Path(path))
    return Opened(place, weights_only=not trust) if place.is_dir() else FileSource(place, trust=trust)


def write_checkpoint(
    source: Source, target: Path, form: Form, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Writes a checkpoint ``single`` or ``sharded``, tensor by tensor: no more than the largest is in memory.

    ``progress`` is called with the bytes that are written, and those of all. Raises ValueError if the target is there.
    """
    check_free(target)
    (_to_file if form == "single" else _to_folder)(source, target, progress)


def check_free(target: Path) -> None:
    """Raises ValueError if something would be overwritten."""
    if target.exists():
        raise ValueError(f"{target}: it is there already; remove it, or write elsewhere")


def _to_file(source: Source, target: Path, progress: Callable[[int, int], None]) -> None:
    """Writes the single form; what has no numbers yet is read into a mapped file first, tensor by tensor."""
    unread: dict[int, Tensor] = {}
    walk(source.tree, lambda _, leaf: unread.setdefault(id(leaf), leaf) if is_meta(leaf) else leaf)
    target.parent.mkdir(parents=True, exist_ok=True)
    with read_all(source, unread, beside(target, ".scratch"), progress) as found:
        tree = walk(source.tree, lambda _, leaf: found.get(id(leaf), leaf))
        write_whole(target, lambda file: torch.save(tree, file))


@contextmanager
def read_all(
    source: Source, metas: Mapping[K, Tensor], path: Path, progress: Callable[[int, int], None]
) -> Iterator[dict[K, Tensor]]:
    """Reads tensors of a source, one by one, into a mapped file that is removed at the end: they need no memory."""
    starts = accumulate((-(-meta.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for meta in metas.values()), initial=0)
    *places, size = starts
    total, done, found = sum(meta.nbytes for meta in metas.values()), 0, {}
    try:
        with path.open("w+b") as file:
            file.truncate(max(size, 1))
            memory = mmap.mmap(file.fileno(), 0)
        for place, (name, meta) in zip(places, metas.items(), strict=True):
            found[name] = torch.empty(meta.shape, dtype=meta.dtype)
            if meta.nbytes:
                room = torch.frombuffer(memory, dtype=torch.uint8, count=meta.nbytes, offset=place)
                found[name] = room.view(meta.dtype).view(meta.shape)
            found[name].copy_(source.read(meta))
            done += meta.nbytes
            progress(done, total)
        yield found
    finally:
        path.unlink(missing_ok=True)


class _DeferredPart(Part):
    """Holds the place of a whole tensor, which is read from the source only when it is about to be written."""

    def __init__(self, meta: Tensor, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__(meta, None, 0, writes=True)
        self._read = functools.partial(read, meta)

    def piece(self, offsets: torch.Size | None) -> Tensor:
        return self._read()


def _to_folder(source: Source, target: Path, progress: Callable[[int, int], None]) -> None:
    parts: dict[Any, Part] = {}  # by what tied tensors have in common
    done = 0

    def read(leaf: Tensor) -> Tensor:
        nonlocal done
        done += leaf.nbytes
        progress(done, total)
        return source.read(leaf)

    def part(key: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and key.partition("/")[0] in ("state_dict", "optimizer_states"):
            return parts.setdefault(identity(leaf), _DeferredPart(leaf, read))
        return leaf

    tree = walk(source.tree, part)
    total = sum(one.local.nbytes for one in parts.values())
    write_alone(target, tree, {"version": None, "topology": None, **source.origin})
    progress(total, total)
