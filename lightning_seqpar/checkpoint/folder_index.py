"""The folder of a sharded checkpoint: whether it is whole, what it holds and where; nothing of its tensors is read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from lightning_seqpar.checkpoint.atomic_files import MARKER, missing
from lightning_seqpar.checkpoint.contents import find_folder

STATE = "state.pt"
"""The file of the checkpoint without numbers: a meta tensor takes the place of each tensor that the ranks wrote."""
FORMAT = 1
"""Version of the folder's layout, which its marker names."""


class _Index(pickle.Unpickler):
    """Reads the index that torch writes into a folder, a pickle, and refuses any class that is not part of an index.

    Reading a pickle of arbitrary classes may run code.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Returns the class of that name; raises UnpicklingError if indexes are not made of it."""
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


class Folder:
    """Reads a sharded checkpoint. Reading is not collective, and any number of ranks may read.

    Attributes:
        path: the folder.
        marker: what its marker says: the format, and facts of the run that wrote it.

    Raises:
        ValueError: if it is not whole, or not one of ours.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = find_folder(Path(path))
        if not self.path.is_dir():
            raise missing(self.path)
        if not (self.path / MARKER).is_file():
            raise ValueError(
                f"{self.path}: no {MARKER} in it, so it is not a sharded checkpoint of lightning_seqpar, or not a whole one"
            )
        try:
            self.marker: dict[str, Any] = json.loads((self.path / MARKER).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path / MARKER}: it can't be read ({error}); the checkpoint is damaged") from None
        if self.marker.get("format") != FORMAT:
            raise ValueError(
                f"{self.path}: written in format {self.marker.get('format')!r}, and this version reads {FORMAT}; use the version "
                f"of lightning_seqpar that wrote it ({self.marker.get('version', 'unknown')})"
            )
        self._check_files()

    def index(self) -> Any:
        """Reads where each tensor's parts lie in its files; raises ValueError if it can't be read."""
        try:
            with (self.path / ".metadata").open("rb") as file:
                return _Index(file).load()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{self.path}: its index .metadata can't be read ({error}); the checkpoint is damaged"
            ) from None

    def _check_files(self) -> None:
        """Raise ValueError unless every file is as long as the index says."""
        ends: dict[str, int] = {}
        for info in self.index().storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, length in ends.items():
            file = self.path / name
            if file.parent != self.path or name in (".", ".."):
                raise ValueError(
                    f"{self.path}: its index names {name!r}, which is no file in it; the checkpoint is damaged"
                )
            size = file.stat().st_size if file.is_file() else None
            if size is None or size < length:
                what = "is missing" if size is None else f"holds {size} bytes of {length}"
                raise ValueError(f"{file}: it {what}; the checkpoint is damaged")

    def state(self, *, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads the checkpoint, with a meta tensor for each tensor that ranks wrote; raises ValueError if the file is damaged."""
        try:
            state: dict[str, Any] = torch.load(self.path / STATE, map_location="cpu", weights_only=weights_only)
        except (OSError, EOFError, RuntimeError) as error:
            raise ValueError(f"{self.path / STATE}: it can't be read ({error}); the checkpoint is damaged") from None
        return state
