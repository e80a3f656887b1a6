"""The memory of proofs: what a proof depends on, as a digest, and the file that remembers it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_seqpar.config import VERSION, ParallelConfig

_DEEP = 6
"""Levels of nested settings that are told; deeper ones can't be remembered by."""


def fingerprint(module: LightningModule, config: ParallelConfig, tp: int) -> str | None:
    """Digest of all that a proof depends on: the model, every source file that is the user's, the plan, versions.

    None if some attribute of the model is of a kind whose content can't be told: then nothing is remembered.
    """
    told: dict[str, Any] = {
        "versions": [VERSION, torch.__version__, sys.version],
        "plan": config.model_dump(mode="json", include={"plan", "sp", "regather", "loss_chunk"}),
        "tp": tp,
    }
    internal = set(vars(LightningModule())) | set(vars(torch.nn.Module()))
    try:
        for name, part in module.named_modules():
            own = {key: _tell(value, 0) for key, value in sorted(vars(part).items()) if key not in internal}
            tensors = [
                (key, tuple(t.shape), str(t.dtype), t.requires_grad)
                for key, t in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
            ]
            told[f"module {name}"] = [_name(type(part)), part.training, own, tensors]
        told["hyperparameters"] = _tell(dict(module.hparams), 0)
    except _UnknownError:
        return None
    for package in sorted({type(m).__module__.split(".")[0] for m in module.modules()}):
        try:
            told[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            told[package] = "source"
    base = config.plan if isinstance(config.plan, str) else config.plan.base
    if base.endswith((".yaml", ".yml")):
        told["file"] = Path(base).read_text()
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for file in _own_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _UnknownError(Exception):
    """An attribute whose content can't be told."""


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _tell(value: Any, depth: int) -> Any:
    """A value as text that is equal in two processes if and only if the values are."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return repr(value)
    if depth > _DEEP:
        raise _UnknownError
    if isinstance(value, torch.nn.Module):
        return _name(type(value))  # its own entry tells the rest
    if isinstance(value, torch.Tensor):
        content = (
            value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
        return [str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest()]
    if isinstance(value, Mapping):
        return [_name(type(value)), [(_tell(k, depth + 1), _tell(v, depth + 1)) for k, v in value.items()]]
    if isinstance(value, list | tuple):
        return [_name(type(value)), [_tell(item, depth + 1) for item in value]]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_tell(item, depth + 1)) for item in value)
    if isinstance(value, functools.partial):
        return [_tell(part, depth + 1) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, types.BuiltinFunctionType | type):
        return _name(value)
    if isinstance(value, types.FunctionType):
        if value.__closure__:
            raise _UnknownError
        return [_name(value), value.__code__.co_code.hex(), repr(value.__code__.co_names), repr(value.__defaults__)]
    if isinstance(getattr(value, "__dict__", None), dict) and not hasattr(type(value), "__slots__"):
        return [_name(type(value)), _tell(vars(value), depth + 1)]
    raise _UnknownError


def _own_files() -> list[Path]:
    """Source files of loaded modules that no installed package owns; they may change between two runs."""
    paths = sysconfig.get_paths()
    installed = tuple(os.path.join(paths[name], "") for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    files = [getattr(loaded, "__file__", None) for loaded in list(sys.modules.values())]
    own = {name for name in files if isinstance(name, str) and name.endswith(".py") and not name.startswith(installed)}
    return sorted(file for file in map(Path, own) if file.is_file())


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning_seqpar" / "proofs"


def read_proof(key: str) -> dict[str, str] | None:
    """What :func:`write_proof` remembered under a key; None if nothing."""
    file = _folder() / f"{key}.json"
    if not file.is_file():
        return None
    found = json.loads(file.read_text())
    return {"plan": str(found["plan"])}


def write_proof(key: str, plan: str) -> None:
    """Remember that a plan passed under a key."""
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{key}.{os.getpid()}.part"
        part.write_text(json.dumps({"plan": plan}))
        part.replace(folder / f"{key}.json")
    except OSError as error:
        rank_zero_info(f"lightning_seqpar: the proof is not remembered, {folder} can't be written ({error})")
