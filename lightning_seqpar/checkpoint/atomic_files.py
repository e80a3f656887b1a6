"""Checkpoints that are complete or not there at all (renamed when they are on the disk), and errors that all ranks see."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import torch.distributed as dist
from torch.distributed import ProcessGroup

UNFINISHED = ".unfinished"  # suffix of a checkpoint's name until it is complete
REPLACED = ".replaced"  # suffix of the name of a folder while a new one takes its name
MARKER = "seqpar.json"  # the file that is written last into a folder; a folder without it is not complete

T = TypeVar("T")


class SaveError(RuntimeError):
    """A checkpoint could not be written; one that had its name before is still there."""


class NoCheckpointError(FileNotFoundError, ValueError):
    """There is no checkpoint under the path that was given."""


def beside(path: Path, suffix: str) -> Path:
    """The path in the same folder whose name has ``suffix`` added."""
    return path.with_name(path.name + suffix)


def clear_away(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        # First: if removing is interrupted, the rest is not taken for a complete checkpoint.
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def local_path(path: Any) -> Path | None:
    """The path, or that of a ``file://`` URL; None for a URL of another file system (``memory://``, ``s3://``)."""
    parts = urlsplit(str(path))
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(path) if len(parts.scheme) < 2 and not parts.netloc else None


def write_synced(path: Path, write: Callable[[Any], None]) -> None:
    """Writes a file, by a function of the open binary file, and waits until it is on the disk."""
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or the names of the files in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, write: Callable[[Any], None]) -> None:
    """Writes a file under another name, waits until it is on the disk, and renames it."""
    unfinished = beside(path, UNFINISHED)
    if unfinished.is_dir():  # left by a run that was killed while it wrote a sharded checkpoint
        clear_away(unfinished)
    write_synced(unfinished, write)
    unfinished.replace(path)
    sync(path.parent)


def on_first_rank(work: Callable[[], Any], group: ProcessGroup, what: str) -> None:
    """Does something on the group's first rank alone; where that raises, SaveError of ``what`` is raised on all. Collective."""
    message: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            work()
        except Exception as error:  # the other ranks must hear of it before this one raises
            message[0] = f"{what}: {describe_error(error)}"
    dist.broadcast_object_list(message, src=dist.get_process_group_ranks(group)[0], group=group)
    if message[0] is not None:
        raise SaveError(message[0])


def on_every_rank(work: Callable[[], T], group: ProcessGroup, what: str) -> T:
    """Does something on every rank; where it fails on another one, ValueError of ``what`` is raised on this one. Collective."""
    failed: Exception | None = None
    try:
        result = work()
    except Exception as error:  # the other ranks must hear of it before this one raises
        failed = error
    errors: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, None if failed is None else describe_error(failed), group=group)
    if failed is not None:
        raise failed
    for rank, error_of_rank in zip(dist.get_process_group_ranks(group), errors, strict=True):
        if error_of_rank is not None:
            raise ValueError(f"{what}: rank {rank}: {error_of_rank}")
    return result


def describe_error(error: BaseException) -> str:
    """The message of an error; if an error of the system (a full disk) caused it, the message of that one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}" if cause is None else str(cause)


def missing(path: Path) -> NoCheckpointError:
    """The error for a checkpoint that is not there; it names what an interrupted run may have left beside it."""
    hint, unfinished, replaced = "", beside(path, UNFINISHED), beside(path, REPLACED)
    if unfinished.exists():
        hint = f"; {unfinished} is one that was being written when its run ended, so go on from the one before"
    if replaced.exists():
        hint += f"; {replaced} is one that was being replaced, or a part of it"
    return NoCheckpointError(f"{path}: there is no such checkpoint{hint}")
