"""Converting a checkpoint from one form to another, tensor by tensor."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_seqpar.checkpoint.atomic_files import UNFINISHED, beside, sync_folder
from lightning_seqpar.checkpoint.contents import (
    FileSource,
    Form,
    Source,
    find_folder,
    identity,
    walk,
)
from lightning_seqpar.checkpoint.folder import (
    Opened,
    Part,
    SavingPlanner,
    begin_folder,
    finish_folder,
    pack,
    read_parts,
    split_parts,
)


class _Folder(Source):
    """A sharded checkpoint."""

    form: Form = "sharded"

    def __init__(self, path: Path, *, trust: bool) -> None:
        self.opened = Opened(path, weights_only=not trust)
        self.path, self.tree = path, self.opened.checkpoint
        self.origin = {key: value for key, value in self.opened.folder.marker.items() if key != "format"}

    def read(self, value: Tensor) -> Tensor:
        if self.opened.key_of(value) is None:
            return value
        target = torch.empty(value.shape, dtype=value.dtype)
        self.fill(value, target)
        return target

    def fill(self, value: Tensor, target: Tensor) -> None:
        if (key := self.opened.key_of(value)) is not None:
            read_parts(self.opened.folder, {key: Part(target, None, 0, writes=False)})
        else:
            target.copy_(value)


def open_source(path: str | Path, *, trust: bool = False) -> Source:
    """Open a checkpoint of either of this package's forms.

    Args:
        path: a file, or the folder of a sharded checkpoint.
        trust: whether to read objects that are neither tensors nor plain data; their pickles may run code.

    Raises:
        ValueError: if it is missing, damaged or unfinished.
    """
    place = find_folder(Path(path))
    return _Folder(place, trust=trust) if place.is_dir() else FileSource(place, trust=trust)


def write_checkpoint(
    source: Source, target: Path, form: Form, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write a checkpoint in one of this package's two forms.

    Tensors are copied one by one, so that no more than the largest is in memory.

    Args:
        source: the checkpoint that is read.
        target: where it is written; nothing may be there.
        form: ``single`` or ``sharded``.
        progress: called with the bytes that are written and the bytes of all.

    Raises:
        ValueError: if the target is there.
    """
    check_free(target)
    (_to_file if form == "single" else _to_folder)(source, target, progress)


def check_free(target: Path) -> None:
    """Check that nothing would be overwritten.

    Raises:
        ValueError: if the target exists.
    """
    if target.exists():
        raise ValueError(f"{target}: it is there already; remove it, or write elsewhere")


def _to_file(source: Source, target: Path, progress: Callable[[int, int], None]) -> None:
    """Write the single form: a file with space for all numbers, which is then mapped into memory and filled."""
    unfinished = beside(target, UNFINISHED)
    target.parent.mkdir(parents=True, exist_ok=True)
    within = _write_empty_file(source, target, unfinished)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(unfinished, map_location="cpu", mmap=True, weights_only=False)
    places: dict[str, Tensor] = {}
    walk(mapped, lambda key, leaf: places.setdefault(key, leaf) if isinstance(leaf, Tensor) else leaf)
    _fill_within(within, mapped, places, target, unfinished)
    tensors: dict[str, Tensor] = {}
    walk(source.tree, lambda key, leaf: tensors.setdefault(key, leaf) if isinstance(leaf, Tensor) else leaf)
    total, done = sum(value.numel() * value.element_size() for value in tensors.values()), 0
    for key, value in tensors.items():
        source.fill(value, places[key])
        done += value.numel() * value.element_size()
        progress(done, total)
    with unfinished.open("rb+") as file:
        os.fsync(file.fileno())
    unfinished.replace(target)
    sync_folder(target.parent)


def _write_empty_file(source: Source, target: Path, unfinished: Path) -> list[Tensor]:
    """Write a checkpoint's file with space for the numbers of its tensors, but without the numbers.

    Returns:
        The tensors within objects, which :func:`walk` does not find.

    Raises:
        ValueError: if one of those is not strided.
    """
    stand_ins: dict[int, Tensor] = {}
    with FakeTensorMode():

        def stand_in(key: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in stand_ins:
                stand_ins[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
            return stand_ins[id(leaf)]

        tree = walk(source.tree, stand_in)
    within = _Within(stand_ins.values()).of(tree)
    if odd := next((tensor for tensor in within if tensor.layout != torch.strided), None):
        raise ValueError(
            f"{target}: the checkpoint holds a tensor of layout {odd.layout} within an object; convert it to the sharded form, or "
            "take it out"
        )
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tree, unfinished)
    return within


def _fill_within(
    within: list[Tensor], mapped: Any, places: Mapping[str, Tensor], target: Path, unfinished: Path
) -> None:
    """Copy the numbers of tensors within objects into the mapped file, and check that all of them arrived.

    Args:
        within: those tensors, of the source.
        mapped: the checkpoint in the mapped file.
        places: the other tensors of the mapped file.
        target: the checkpoint's name, for the error.
        unfinished: the file, which is removed if something is missing.

    Raises:
        ValueError: if the file has other such tensors than the source.
    """
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


class _Within(pickle.Pickler):
    """Finds tensors within objects that :func:`walk` does not look into (modules, dataclasses).

    They are found in the order in which they are pickled, which is the same in a checkpoint that was saved and loaded.

    Args:
        known: the tensors that :func:`walk` finds.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__(io.BytesIO())
        self._tensors: dict[int, Tensor] = {}
        self._known = {id(tensor) for tensor in known}

    def persistent_id(self, thing: Any) -> int | None:
        """An id for a tensor, so that its numbers are not pickled; None for any other object."""
        if not isinstance(thing, Tensor):
            return None
        if id(thing) not in self._known:
            self._tensors[id(thing)] = thing
        return id(thing)

    def of(self, tree: Any) -> list[Tensor]:
        """The tensors within objects of a checkpoint, without those that are known."""
        self.dump(tree)
        return [*self._tensors.values()]


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits (a NaN equals itself)."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(*(x.detach().contiguous().view(-1).view(torch.uint8) for x in (a, b)))


class _DeferredPart(Part):
    """A whole tensor that is read from the source only when it is about to be written.

    Args:
        meta: a tensor of its shape and dtype.
        read: reads it.
    """

    def __init__(self, meta: Tensor, read: Callable[[], Tensor]) -> None:
        super().__init__(meta, None, 0, writes=True)
        self._read = read

    def piece(self, offsets: torch.Size | None) -> Tensor:
        return self._read()


def _to_folder(source: Source, target: Path, progress: Callable[[int, int], None]) -> None:
    """Write the sharded form, as one process: all parts are whole tensors."""
    parts: dict[Any, Part] = {}
    done = 0

    def read(leaf: Tensor) -> Tensor:
        nonlocal done
        done += leaf.numel() * leaf.element_size()
        progress(done, total)
        return source.read(leaf)

    def part(key: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and key.partition("/")[0] in ("state_dict", "optimizer_states"):
            return parts.setdefault(identity(leaf), _DeferredPart(leaf, lambda: read(leaf)))
        return leaf

    state, deferred = split_parts(walk(source.tree, part))
    total = sum(item.local.numel() * item.local.element_size() for item in deferred.values())
    begin_folder(target)
    try:
        with warnings.catch_warnings():  # torch warns that one process writes alone, which is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                deferred,
                storage_writer=FileSystemWriter(beside(target, UNFINISHED)),
                planner=SavingPlanner(),
                no_dist=True,
            )
    except Exception:
        shutil.rmtree(beside(target, UNFINISHED), ignore_errors=True)
        raise
    finish_folder(target, pack(state), {"version": None, "topology": None, **source.origin})
    progress(total, total)
