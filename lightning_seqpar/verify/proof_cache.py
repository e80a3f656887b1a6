"""The memory of proofs: a digest of all that a proof depends on, and the file that is named after it.

A plan that passed the self-check need not be checked again while the model, its source, the settings and the versions are
the same. A wrong answer would train with an unproved plan, so whatever can't be put into the digest is not remembered.
"""

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

_MAX_DEPTH = 6
"""Levels of nested attributes that go into the digest; a model with deeper ones is not remembered."""


def fingerprint(module: LightningModule, config: ParallelConfig, tp: int) -> str | None:
    """Digest of all that a proof depends on and that can be read: the model, the user's source files, the plan, versions.

    Args:
        module: the whole model.
        config: what the user asked for; the fields that change the plan or what is proved go in.
        tp: number of tensor-parallel ranks.

    Returns:
        A hexadecimal digest, or None if some attribute of the model has a type whose content can't be read.
    """
    facts: dict[str, Any] = {
        "versions": [VERSION, torch.__version__, sys.version],
        "plan": config.model_dump(mode="json", include={"plan", "sp", "regather", "vocab", "loss_chunk"}),
        "tp": tp,
    }
    internal = set(vars(LightningModule())) | set(vars(torch.nn.Module()))
    try:
        for name, part in module.named_modules():
            own = {key: _canonical(value, 0) for key, value in sorted(vars(part).items()) if key not in internal}
            tensors = [
                (key, tuple(t.shape), str(t.dtype), t.requires_grad)
                for key, t in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
            ]
            facts[f"module {name}"] = [_qualified_name(type(part)), part.training, own, tensors]
        facts["hyperparameters"] = _canonical(dict(module.hparams), 0)
    except _UnreadableError:
        return None
    for package in sorted({type(m).__module__.split(".")[0] for m in module.modules()}):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "source"
    base = config.plan if isinstance(config.plan, str) else config.plan.base
    if base.endswith((".yaml", ".yml")):
        facts["file"] = Path(base).read_text()
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for file in _user_source_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _UnreadableError(Exception):
    """An attribute of the model has a type whose content can't be read."""


def _qualified_name(thing: Any) -> str:
    """The full name of a class or a function."""
    return f"{thing.__module__}.{thing.__qualname__}"


def _canonical(value: Any, depth: int) -> Any:
    """A value as plain data that is equal in two processes if and only if the values are.

    Raises:
        _UnreadableError: for a type whose content can't be read (a closure, an object with slots), or one nested too deep.
    """
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return repr(value)
    if depth > _MAX_DEPTH:
        raise _UnreadableError
    if isinstance(value, torch.nn.Module):
        return _qualified_name(type(value))  # a submodule has an entry of its own in the fingerprint
    if isinstance(value, torch.Tensor):
        content = (
            value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
        return [str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest()]
    if isinstance(value, Mapping):
        return [
            _qualified_name(type(value)),
            [(_canonical(k, depth + 1), _canonical(v, depth + 1)) for k, v in value.items()],
        ]
    if isinstance(value, list | tuple):
        return [_qualified_name(type(value)), [_canonical(item, depth + 1) for item in value]]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_canonical(item, depth + 1)) for item in value)
    if isinstance(value, functools.partial):
        return [_canonical(part, depth + 1) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, types.BuiltinFunctionType | type):
        return _qualified_name(value)
    if isinstance(value, types.FunctionType):
        if value.__closure__:
            raise _UnreadableError
        return [
            _qualified_name(value),
            value.__code__.co_code.hex(),
            repr(value.__code__.co_names),
            repr(value.__defaults__),
        ]
    if isinstance(getattr(value, "__dict__", None), dict) and not hasattr(type(value), "__slots__"):
        return [_qualified_name(type(value)), _canonical(vars(value), depth + 1)]
    raise _UnreadableError


def _user_source_files() -> list[Path]:
    """Files of loaded modules outside the installed packages: the user's own code, which may change between two runs."""
    paths = sysconfig.get_paths()
    installed = tuple(os.path.join(paths[name], "") for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    files = [getattr(loaded, "__file__", None) for loaded in list(sys.modules.values())]
    own = {name for name in files if isinstance(name, str) and name.endswith(".py") and not name.startswith(installed)}
    return sorted(file for file in map(Path, own) if file.is_file())


def _folder() -> Path:
    """Where proofs are remembered on this machine, by the XDG convention."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning_seqpar" / "proofs"


def read_proof(key: str) -> dict[str, str] | None:
    """What :func:`write_proof` remembered under a key.

    Returns:
        ``{"plan": ..., "whole": ...}`` with the plan as YAML (empty if it was not inferred) and why the vocabulary stays whole
        (empty if it does not), or None if nothing is remembered.
    """
    file = _folder() / f"{key}.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text())
    return {"plan": str(content["plan"]), "whole": str(content["whole"])}


def write_proof(key: str, plan: str, whole: str = "") -> None:
    """Remember that a model passed the self-check; a folder that can't be written is reported and otherwise ignored.

    Args:
        key: names the file.
        plan: the inferred plan as YAML, so that it need not be inferred again; empty for any other plan.
        whole: why the vocabulary stays whole, though the model has one; empty if what was found of it was proved.
    """
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{key}.{os.getpid()}.part"
        part.write_text(json.dumps({"plan": plan, "whole": whole}))
        part.replace(folder / f"{key}.json")
    except OSError as error:
        rank_zero_info(f"lightning_seqpar: the proof is not remembered, {folder} can't be written ({error})")
