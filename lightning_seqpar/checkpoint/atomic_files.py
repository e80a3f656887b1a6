"""Checkpoints that are whole or not there: written beside their name, synced, renamed; an error of one rank is one of all."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from torch.distributed import ProcessGroup

UNFINISHED = ".unfinished"
"""What is added to a checkpoint's name until it is whole."""
REPLACED = ".replaced"
"""What is added to the name of a folder that is being replaced by a new one of its name."""


T = TypeVar("T")


MARKER = "seqpar.json"
"""Written last into a folder; one without it is not whole."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; what stood under its name before is still there."""


def beside(path: Path, end: str) -> Path:
    """A name next to ``path``."""
    return path.with_name(path.name + end)


def clear_away(path: Path) -> None:
    """Remove what is there; of a folder the marker first, so that what is left of it is never taken for a whole one."""
    if path.is_dir() and not path.is_symlink():
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def local_path(path: Any) -> Path | None:
    """The path in this file system; none for one of another (``memory://``, ``s3://``)."""
    parts = urlsplit(str(path))
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(path) if len(parts.scheme) < 2 and not parts.netloc else None


def write_synced(path: Path, write: Callable[[Any], None]) -> None:
    """Write a file by ``write(file)``, and wait until the disk has it."""
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def on_first_rank(work: Callable[[], Any], group: ProcessGroup, what: str) -> None:
    """Do ``work`` on the group's first rank, while the others wait; collective.

    Raises:
        SaveError: on every rank, beginning with ``what``, if it raised.
    """
    told: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            work()
        except Exception as error:  # the others wait for an answer
            told[0] = f"{what}: {told_of(error)}"
    dist.broadcast_object_list(told, src=dist.get_process_group_ranks(group)[0], group=group)
    if told[0] is not None:
        raise SaveError(told[0])


def on_every_rank(work: Callable[[], T], group: ProcessGroup, what: str) -> T:
    """Do ``work`` on every rank; if it fails on one, it fails on all; collective.

    Raises:
        Exception: its own, where it raised.
        ValueError: elsewhere, beginning with ``what`` and naming the rank.
    """
    failed: Exception | None = None
    try:
        done = work()
    except Exception as error:  # the others wait for an answer
        failed = error
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, None if failed is None else told_of(failed), group=group)
    if failed is not None:
        raise failed
    for rank, one in enumerate(told):
        if one is not None:
            raise ValueError(f"{what}: rank {dist.get_process_group_ranks(group)[rank]}: {one}")
    return done


def told_of(error: BaseException) -> str:
    """An error in words: that of the system (a full disk) where it lies behind another one."""
    at: BaseException | None = error
    while at is not None and not isinstance(at, OSError):
        at = at.__cause__ or at.__context__
    return str(at) if at is not None else f"{type(error).__name__}: {error}"


def missing(path: Path) -> ValueError:
    """What to say where no checkpoint is, and what may be there instead."""
    hint = ""
    if beside(path, UNFINISHED).exists():
        hint = f"; {beside(path, UNFINISHED)} is one that was being written when its run ended, so go on from the one before"
    if beside(path, REPLACED).exists():
        hint += f"; {beside(path, REPLACED)} is one that was being replaced, or a part of it"
    return ValueError(f"{path}: there is no such checkpoint{hint}")


class WholeFileIO(TorchCheckpointIO):
    """Lightning's files, renamed when they are whole; other file systems as Lightning writes them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write beside the name, straight to the disk, and rename."""
        place = local_path(path)
        if place is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if place.is_dir() and not place.is_symlink():
            raise IsADirectoryError(f"{place} is a folder (a sharded checkpoint?), and a file is to be written there")
        place.parent.mkdir(parents=True, exist_ok=True)
        if beside(place, UNFINISHED).is_dir():  # of a run that was killed, which wrote in parts
            clear_away(beside(place, UNFINISHED))
        write_synced(beside(place, UNFINISHED), lambda file: torch.save(checkpoint, file))
        beside(place, UNFINISHED).replace(place)
        sync_folder(place.parent)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file; of a local one the tensors' pages come when they are touched, so that a rank reads its parts alone.

        Raises:
            ValueError: if it is missing or damaged.
        """
        place = local_path(path)
        if place is not None and not place.exists():
            raise missing(place)
        kwargs = {} if map_location is None else {"map_location": map_location}
        found: dict[str, Any]
        try:
            if place is not None and zipfile.is_zipfile(place):
                found = torch.load(place, mmap=True, weights_only=weights_only, map_location=map_location or "cpu")
            else:
                found = super().load_checkpoint(path, weights_only=weights_only, **kwargs)
        except pickle.UnpicklingError:
            raise  # its own words tell of weights_only
        except (EOFError, RuntimeError) as error:
            told = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{path}: it can't be read ({told}); it is damaged, or no checkpoint") from None
        return found
