"""Checkpoints of one file, as Lightning writes and reads them."""

from __future__ import annotations

import pickle
import zipfile
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_seqpar.checkpoint.atomic_files import (
    UNFINISHED,
    beside,
    clear_away,
    local_path,
    missing,
    sync,
    write_synced,
)


class WholeFileIO(TorchCheckpointIO):
    """Lightning's writing and reading of checkpoint files, where local files are renamed when they are complete."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes a file under another name, waits until it is on the disk, and renames it."""
        place = local_path(path)
        if place is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if place.is_dir() and not place.is_symlink():
            raise IsADirectoryError(f"{place} is a folder (a sharded checkpoint?), and a file is to be written there")
        place.parent.mkdir(parents=True, exist_ok=True)
        if beside(place, UNFINISHED).is_dir():  # left by a run that was killed while it wrote a sharded checkpoint
            clear_away(beside(place, UNFINISHED))
        write_synced(beside(place, UNFINISHED), lambda file: torch.save(checkpoint, file))
        beside(place, UNFINISHED).replace(place)
        sync(place.parent)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file, a local one mapped into memory: a rank reads what it uses. Raises ValueError if it is missing or damaged."""
        place = local_path(path)
        if place is not None and not place.exists():
            raise missing(place)
        kwargs = {} if map_location is None else {"map_location": map_location}
        checkpoint: dict[str, Any]
        try:
            if place is not None and zipfile.is_zipfile(place):
                checkpoint = torch.load(place, mmap=True, weights_only=weights_only, map_location=map_location or "cpu")
            else:
                # Lightning would trust what lies behind an address of the web unless it is told not to.
                careful = True if weights_only is None else weights_only
                checkpoint = super().load_checkpoint(path, weights_only=careful, **kwargs)
        except pickle.UnpicklingError:
            raise  # its message explains weights_only
        except (EOFError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{path}: it can't be read ({reason}); it is damaged, or no checkpoint") from None
        return checkpoint
