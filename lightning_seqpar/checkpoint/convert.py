"""Converting a checkpoint from one form to another, tensor by tensor."""

from __future__ import annotations

import functools
import mmap
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_seqpar.checkpoint.atomic_files import UNFINISHED, beside, sync
from lightning_seqpar.checkpoint.contents import FileSource, Form, Source, find_folder, identity, is_meta, walk
from lightning_seqpar.checkpoint.folder import (
    Opened,
    Part,
    SavingPlanner,
    begin_folder,
    finish_folder,
    pack,
    split_parts,
)

K = TypeVar("K")


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
    unfinished = beside(target, UNFINISHED)
    with read_all(source, unread, beside(target, ".scratch"), progress) as found:
        torch.save(walk(source.tree, lambda _, leaf: found.get(id(leaf), leaf)), unfinished)
    sync(unfinished)
    unfinished.replace(target)
    sync(target.parent)


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
    """Write the sharded form, as one process: all parts are whole tensors."""
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

    state, deferred = split_parts(walk(source.tree, part))
    total = sum(item.local.nbytes for item in deferred.values())
    begin_folder(target)
    try:
        with warnings.catch_warnings():  # torch warns that one process writes alone, which is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            writer = FileSystemWriter(beside(target, UNFINISHED))
            save(deferred, storage_writer=writer, planner=SavingPlanner(), no_dist=True)
    except Exception:
        shutil.rmtree(beside(target, UNFINISHED), ignore_errors=True)
        raise
    finish_folder(target, pack(state), {"version": None, "topology": None, **source.origin})
    progress(total, total)
