"""Safetensors files of a model, found by a path and read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


class TensorFiles:
    """The tensors of a safetensors file, of its index, or of a folder with either, by the names that they have there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = self._find()
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self._files.values())):
            with self._open(file) as opened:
                self._shapes.update({key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()})  # noqa: SIM118

    def _find(self) -> dict[str, Path]:
        """The file in which each tensor is, by its name in the files; raises ValueError if there are no files."""
        path = self.path
        if path.is_dir():
            usual = [f for f in ("model.safetensors.index.json", "model.safetensors") if (path / f).is_file()]
            others = sorted(file.name for file in path.glob("*.safetensors"))
            if not usual and len(others) != 1:
                raise ValueError(
                    f"weights_from: {str(path)!r} holds no model.safetensors and no model.safetensors.index.json (there is: "
                    f"{', '.join(sorted(f.name for f in path.iterdir())[:5]) or 'nothing'}); save the model with "
                    "save_pretrained, which writes them"
                )
            path = path / (usual or others)[0]
        if not path.is_file():
            raise ValueError(f"weights_from: {str(path)!r} does not exist; give a safetensors file, its index, or a folder")
        if path.name.endswith(".json"):
            index = json.loads(path.read_text())
            if not isinstance(index, Mapping) or not isinstance(index.get("weight_map"), Mapping):
                raise ValueError(f"weights_from: {str(path)!r} has no 'weight_map'; give a model.safetensors.index.json")
            files = {key: path.parent / name for key, name in index["weight_map"].items()}
            if missing := sorted({file.name for file in files.values() if not file.is_file()}):
                raise ValueError(f"weights_from: {str(path)!r} names {missing[0]}, which is not beside it")
            return files
        if path.suffix != ".safetensors":
            raise ValueError(f"weights_from: {str(path)!r} is no safetensors file; save the model with save_pretrained")
        with self._open(path) as opened:
            return dict.fromkeys(opened.keys(), path)

    @staticmethod
    def _open(file: Path) -> Any:
        """Open one file; raises ValueError if it can't be read, and ImportError without the extra ``hf``."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ImportError("reading weights needs safetensors: pip install 'lightning-seqpar[hf]'") from None
        try:
            return safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"weights_from: {str(file)!r} can't be read: {error}") from None

    def contents(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor, by its name in the files."""
        return {key: (self._shapes[key], self._dtype(key)) for key in self._files}

    def _dtype(self, key: str | None) -> torch.dtype:
        """The dtype of a tensor by its name in the files."""
        assert key is not None
        with self._open(self._files[key]) as opened:
            if not self._shapes[key]:
                return opened.get_tensor(key).dtype  # type: ignore[no-any-return]
            return opened.get_slice(key)[:0].dtype  # type: ignore[no-any-return]
