"""What a checkpoint holds, and one form of it out of another, tensor by tensor."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_seqpar.checkpoint.atomic_files import UNFINISHED, beside, missing, sync_folder
from lightning_seqpar.checkpoint.folder import (
    Opened,
    Part,
    SavingPlanner,
    begin_folder,
    find_folder,
    finish_folder,
    pack,
    split_parts,
    walk,
)
from lightning_seqpar.distributed.autograd import storage_id

Form = Literal["single", "sharded", "safetensors"]


@dataclass
class Contents:
    """What a checkpoint holds.

    Attributes:
        path: where it is.
        form: ``single`` (one file), ``sharded`` (a folder) or ``safetensors`` (Hugging Face's folder).
        model_bytes: of the model's tensors, tied ones once.
        optimizer_bytes: of the optimizers' tensors.
        told: who wrote it: version, topology, epoch, global_step; what is known.
        tensors: shape and type of each tensor of the model, by name.
        moments: shape and type of each tensor of the optimizers, by its place.
        tied: names that stand for the tensor of another name.
        other: the checkpoint's other keys.
    """

    path: Path
    form: Form
    told: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    moments: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)
    model_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def parameters(self) -> int:
        """Numbers in the model's tensors."""
        return sum(torch.Size(shape).numel() for name, (shape, _) in self.tensors.items() if name not in self.tied)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "path": str(self.path), "form": self.form, "complete": True, **self.told, "parameters": self.parameters,
            "model_bytes": self.model_bytes, "optimizer_bytes": self.optimizer_bytes, "tensors": self.tensors,
            "moments": self.moments, "tied": self.tied, "other": self.other,
        }  # fmt: skip


class Source:
    """A checkpoint whose tensors are read when they are asked for.

    Attributes:
        path: where it is.
        form: its form.
        tree: the checkpoint, with tensors that :meth:`read` reads.
        told: who wrote it; what is known.
    """

    path: Path
    form: Form
    tree: dict[str, Any]
    told: dict[str, Any]

    def read(self, value: Tensor) -> Tensor:
        """One of the tree's tensors."""
        return value

    def fill(self, value: Tensor, target: Tensor) -> None:
        """Copy one of the tree's tensors into memory that is there."""
        target.copy_(self.read(value))


class _File(Source):
    """One ``.ckpt``: its pages are read as they are touched."""

    form: Form = "single"

    def __init__(self, path: Path, *, trust: bool) -> None:
        if not path.exists():
            raise missing(path)
        self.path, self.tree = path, _load_file(path, trust=trust)
        self.told = {key: self.tree[key] for key in ("epoch", "global_step") if key in self.tree}


class _Folder(Source):
    """A folder in parts."""

    form: Form = "sharded"

    def __init__(self, path: Path, *, trust: bool) -> None:
        self.opened = Opened(path, weights_only=not trust)
        self.path, self.tree = path, self.opened.checkpoint
        self.told = {key: value for key, value in self.opened.folder.told.items() if key != "format"}

    def read(self, value: Tensor) -> Tensor:
        if self.opened.key_of(value) is None:
            return value
        target = torch.empty(value.shape, dtype=value.dtype)
        self.fill(value, target)
        return target

    def fill(self, value: Tensor, target: Tensor) -> None:
        if (key := self.opened.key_of(value)) is not None:
            self.opened.folder.read({key: Part(target, None, 0, writes=False)})
        else:
            target.copy_(value)


def open_source(path: str | Path, *, trust: bool = False) -> Source:
    """A checkpoint of either form.

    Args:
        path: a file, or a folder of the sharded form.
        trust: read objects that are no tensors or plain data, whose pickles may run code.

    Raises:
        ValueError: if it is missing, damaged or unfinished.
    """
    place = find_folder(Path(path))
    return _Folder(place, trust=trust) if place.is_dir() else _File(place, trust=trust)


def _load_file(path: Path, *, trust: bool) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=not trust)
    except Exception as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "" if trust else "; if it holds objects of yours and you trust who wrote it, add --trust"
        raise ValueError(f"{path}: it can't be read ({told}){hint}") from None
    if not isinstance(found, dict) or not isinstance(found.get("state_dict"), dict):
        raise ValueError(f"{path}: it is no checkpoint of Lightning's (no state_dict in it)")
    return found


def identity(tensor: Tensor) -> Any:
    """What tied tensors share: one object where a folder holds the numbers, else the place in memory."""
    if tensor.is_meta:
        return id(tensor)
    return storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def inspect_checkpoint(path: str | Path, *, trust: bool = False) -> Contents:
    """What a checkpoint holds; its tensors are not read.

    Args:
        path: a file, or a folder of the sharded form.
        trust: read objects that are no tensors or plain data, whose pickles may run code.

    Raises:
        ValueError: if it is missing, damaged or unfinished.
    """
    return contents_of(open_source(path, trust=trust))


def contents_of(source: Source) -> Contents:
    """What a checkpoint holds; its tensors are not read."""
    found = Contents(source.path, source.form, source.told)
    first: dict[Any, str] = {}

    def note(key: str, leaf: Any) -> Any:
        top, _, name = key.partition("/")
        if isinstance(leaf, Tensor) and top in ("state_dict", "optimizer_states"):
            told = list(leaf.shape), str(leaf.dtype).removeprefix("torch.")
            size = leaf.numel() * leaf.element_size()
            if top == "optimizer_states":
                found.moments[name] = told
                found.optimizer_bytes += size
                return leaf
            found.tensors[name] = told
            one = identity(leaf)
            if one in first:
                found.tied[name] = first[one]
            else:
                found.model_bytes += size
            first.setdefault(one, name)
        return leaf

    walk(source.tree, note)
    found.other = [key for key in source.tree if key not in ("state_dict", "optimizer_states")]
    return found


def write_checkpoint(
    source: Source, target: Path, form: Form, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write a checkpoint in a form of ours.

    Tensors go over one by one: no more than the largest is held.

    Args:
        source: what is read.
        target: what is written; it must not be there.
        form: ``single`` or ``sharded``.
        progress: called with the bytes that are written and those that will be.

    Raises:
        ValueError: if the target is there.
    """
    check_free(target)
    (_to_file if form == "single" else _to_folder)(source, target, progress)


def check_free(target: Path) -> None:
    """Nothing is written over.

    Raises:
        ValueError: if something is there.
    """
    if target.exists():
        raise ValueError(f"{target}: it is there already; remove it, or write elsewhere")


def _to_file(source: Source, target: Path, progress: Callable[[int, int], None]) -> None:
    """First the file with holes for its numbers, then the numbers, into the mapped file."""
    unfinished = beside(target, UNFINISHED)
    target.parent.mkdir(parents=True, exist_ok=True)
    stand_ins: dict[int, Tensor] = {}
    with FakeTensorMode():

        def stand_in(key: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in stand_ins:
                stand_ins[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
            return stand_ins[id(leaf)]

        holes = walk(source.tree, stand_in)
    within = _Within(stand_ins.values()).of(holes)
    if odd := next((tensor for tensor in within if tensor.layout != torch.strided), None):
        raise ValueError(
            f"{target}: the checkpoint holds a tensor of layout {odd.layout} within an object; convert it to the sharded form, or "
            "take it out"
        )
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(holes, unfinished)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(unfinished, map_location="cpu", mmap=True, weights_only=False)
    places: dict[str, Tensor] = {}
    walk(mapped, lambda key, leaf: places.setdefault(key, leaf) if isinstance(leaf, Tensor) else leaf)
    for value, place in zip(within, _Within(places.values()).of(mapped), strict=False):
        if place.untyped_storage().nbytes() == value.untyped_storage().nbytes():
            place.untyped_storage().copy_(value.untyped_storage())
    written = _Within(places.values()).of(mapped)
    if len(written) != len(within) or not all(map(_are_equal, within, written)):
        unfinished.unlink()
        raise ValueError(
            f"{target}: the checkpoint holds tensors within objects that can't be written one by one (in a set, sparse, or made "
            "where they are pickled); convert it to the sharded form, or take them out"
        )
    whole: dict[str, Tensor] = {}
    walk(source.tree, lambda key, leaf: whole.setdefault(key, leaf) if isinstance(leaf, Tensor) else leaf)
    total, done = sum(value.numel() * value.element_size() for value in whole.values()), 0
    for key, value in whole.items():
        source.fill(value, places[key])
        done += value.numel() * value.element_size()
        progress(done, total)
    with unfinished.open("rb+") as file:
        os.fsync(file.fileno())
    unfinished.replace(target)
    sync_folder(target.parent)


class _Within(pickle.Pickler):
    """Finds tensors in objects that are no plain containers (modules, dataclasses), in the order in which they are pickled.

    Args:
        known: those that are found anyway.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__(io.BytesIO())
        self._found: dict[int, Tensor] = {}
        self._known = {id(tensor) for tensor in known}

    def persistent_id(self, thing: Any) -> int | None:
        """Of a tensor, which is not looked into."""
        if not isinstance(thing, Tensor):
            return None
        if id(thing) not in self._known:
            self._found[id(thing)] = thing
        return id(thing)

    def of(self, tree: Any) -> list[Tensor]:
        """Those of a checkpoint."""
        self.dump(tree)
        return [*self._found.values()]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(x.detach().contiguous().view(-1).view(torch.uint8) for x in (one, other)))


class _DeferWgrad(Part):
    """A whole tensor that is read when it is written."""

    def __init__(self, meta: Tensor, read: Callable[[], Tensor]) -> None:
        super().__init__(meta, None, 0, writes=True)
        self._read = read

    def piece(self, offsets: torch.Size | None) -> Tensor:
        return self._read()


def _to_folder(source: Source, target: Path, progress: Callable[[int, int], None]) -> None:
    parts: dict[Any, Part] = {}
    done = 0

    def read(leaf: Tensor) -> Tensor:
        nonlocal done
        done += leaf.numel() * leaf.element_size()
        progress(done, total)
        return source.read(leaf)

    def part(key: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and key.partition("/")[0] in ("state_dict", "optimizer_states"):
            return parts.setdefault(identity(leaf), _DeferWgrad(leaf, lambda: read(leaf)))
        return leaf

    state, found = split_parts(walk(source.tree, part))
    total = sum(one.local.numel() * one.local.element_size() for one in found.values())
    begin_folder(target)
    try:
        with warnings.catch_warnings():  # that it writes by itself, which is what it is told to do
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                found,
                storage_writer=FileSystemWriter(beside(target, UNFINISHED)),
                planner=SavingPlanner(),
                no_dist=True,
            )
    except Exception:
        shutil.rmtree(beside(target, UNFINISHED), ignore_errors=True)
        raise
    told = {"version": None, "topology": None, **source.told}
    finish_folder(target, pack(state), told)
    progress(total, total)
