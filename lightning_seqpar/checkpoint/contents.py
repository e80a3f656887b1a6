"""What a checkpoint holds, and a checkpoint of one file as something whose tensors are read one at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_seqpar.checkpoint.atomic_files import MARKER, REPLACED, UNFINISHED, beside, missing
from lightning_seqpar.distributed.autograd import storage_id
from lightning_seqpar.init.weight_files import TensorFiles

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""Files of which a folder of Hugging Face's has one: all weights, or the index of several files."""
Form = Literal["single", "sharded", "safetensors"]


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


class Source:
    """A checkpoint whose tensors are read one at a time: those of its ``tree`` may be meta tensors, which :meth:`read` reads."""

    path: Path
    form: Form
    tree: dict[str, Any]
    origin: dict[str, Any]

    def read(self, value: Tensor) -> Tensor:
        """Read a tensor of :attr:`tree`; returns it with its numbers."""
        return value


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


def is_meta(value: object) -> bool:
    """Whether a leaf of a checkpoint is a meta tensor."""
    return isinstance(value, Tensor) and value.is_meta


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
        files = TensorFiles(path)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("weights_from: ")) from None
    contents = Contents(path, "safetensors")
    for name, (shape, dtype) in files.contents().items():
        contents.tensors[name] = list(shape), str(dtype).removeprefix("torch.")
        contents.model_bytes += torch.Size(shape).numel() * dtype.itemsize
    contents.other = sorted(file.name for file in path.iterdir() if not file.name.endswith(".safetensors"))
    return contents


def walk(tree: Any, visit: Callable[[str, Any], Any], key: str = "") -> Any:
    """Copy nested plain dicts, lists and tuples, with other leaves: ``visit`` gets a leaf's path (``a/0/b``), and the leaf."""
    if type(tree) in (dict, OrderedDict):
        return type(tree)((name, walk(value, visit, f"{key}{name}/")) for name, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(walk(value, visit, f"{key}{at}/") for at, value in enumerate(tree))
    return visit(key[:-1], tree)


def find_folder(path: Path) -> Path:
    """The path, or what a run left beside it that was killed while one checkpoint replaced another: the new one, or the old."""
    if not path.exists():
        for end, what in ((UNFINISHED, "the new one"), (REPLACED, "the one before")):
            if (beside(path, end) / MARKER).is_file():
                rank_zero_warn(
                    f"lightning_seqpar: {path} was being replaced when its run ended; {what} is whole, and is read: "
                    f"{beside(path, end)}"
                )
                return beside(path, end)
    return path


def is_huggingface(path: Path) -> bool:
    """Whether a folder holds a model as ``save_pretrained`` writes it."""
    return path.is_dir() and not (path / MARKER).exists() and any((path / name).is_file() for name in WEIGHTS)
