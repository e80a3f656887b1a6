"""Windows of bytes from any text that the machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


def read_text(path: str | None, limit: int) -> bytes:
    """Bytes of a file, of all files below a folder, or of the standard library's ``.py`` sources."""
    root = Path(path) if path else Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise ValueError(f"data path {str(root)!r} does not exist; give a file or a folder")
    files = [root] if root.is_file() else sorted(root.glob("**/*") if path else root.glob("*.py"))
    text = bytearray()
    for file in files:
        if len(text) >= limit:
            break
        if file.is_file():
            text += file.read_bytes()
    return bytes(text[:limit])


class ByteWindows(Dataset[Tensor]):
    """Consecutive windows of ``context + 1`` bytes: ``[context + 1]`` integers each."""

    def __init__(self, text: bytes, context: int) -> None:
        count = (len(text) - 1) // context
        if count < 1:
            raise ValueError(f"the text has {len(text)} bytes; one window needs {context + 1}")
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._context, self._count = context, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return self._bytes[index * self._context : (index + 1) * self._context + 1]


class ByteData(L.LightningDataModule):
    """Shuffled batches of windows, for command lines.

    Args:
        path: a file or a folder; none takes the standard library's sources.
        limit: bytes read at most.
        context: bytes that the model sees at once.
        batch_size: windows in a batch of one replica.
    """

    def __init__(self, path: str | None = None, limit: int = 4_000_000, context: int = 128, batch_size: int = 8) -> None:
        super().__init__()
        self.path, self.limit, self.context, self.batch_size = path, limit, context, batch_size

    def train_dataloader(self) -> DataLoader[Tensor]:
        windows = ByteWindows(read_text(self.path, self.limit), self.context)
        return DataLoader(windows, self.batch_size, shuffle=True, drop_last=True)
