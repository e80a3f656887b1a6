"""What ``seqpar plan`` is asked about: a model from a YAML file, a Hugging Face folder, or a factory."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from lightning_seqpar.config import nearest
from lightning_seqpar.plan.sharding_plan import parse_yaml


@dataclass
class Found:
    """A model, and what its target tells besides.

    Attributes:
        model: without memory where its code allows it.
        fields: of the parallel config.
        world_size: ranks.
        batch: the first training batch.
        notes: what went wrong on the way to the batch.
    """

    model: nn.Module
    fields: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    batch: Any = None
    notes: list[str] = field(default_factory=list)


_FORMS = "a YAML file with a model, a Hugging Face folder (with config.json), or package.module:factory"


def load_target(target: str, dtype: torch.dtype | None = None) -> Found:
    """The model that ``target`` names, without memory where its code allows it.

    Args:
        target: the path of a YAML file of Lightning's command line, the folder of a Hugging Face model (or its
            ``config.json``), or ``package.module:factory``, a class or function that takes no arguments.
        dtype: of the parameters; none leaves it to the model.

    Raises:
        ValueError: naming what is missing.
        ImportError: for a missing extra.
    """
    path = Path(target)
    if target.endswith((".yaml", ".yml")):
        found = _from_yaml(path)
    elif path.is_dir() or path.name == "config.json":
        found = Found(model_from_folder(path if path.is_dir() else path.parent, dtype))
    elif ":" in target:
        found = Found(_from_factory(target))
    else:
        raise ValueError(f"target={target!r} is nothing that is known; give {_FORMS}")
    if dtype is not None:
        found.model.to(dtype)
    return found


def _without_memory(make: Any, what: str) -> nn.Module:
    """Build on the meta device; code that needs numbers builds for real."""
    try:
        with torch.device("meta"):
            made = make()
    except (NotImplementedError, RuntimeError):
        made = make()
    if not isinstance(made, nn.Module):
        raise ValueError(f"{what} made a {type(made).__name__}; it must make an nn.Module")
    return made


def _from_factory(target: str) -> nn.Module:
    module, _, name = target.partition(":")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"target={target!r}: {error}; run it where {module} can be imported") from None
    if not hasattr(holder, name):
        known = [key for key in vars(holder) if not key.startswith("_")]
        raise ValueError(f"target={target!r}: {module} has no {name!r}; did you mean {nearest(name, known)}?")
    try:
        return _without_memory(getattr(holder, name), target)
    except TypeError as error:
        raise ValueError(f"target={target!r}: it must be callable without arguments ({error})") from None


def model_from_folder(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a Hugging Face folder's ``config.json``, without memory.

    Raises:
        ValueError: without a config that is one.
        ImportError: without the extra ``hf``.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"target={str(folder)!r} holds no config.json; give {_FORMS}")
    try:
        import transformers
    except ImportError:
        raise ImportError("a Hugging Face folder needs transformers: pip install 'lightning-seqpar[hf]'") from None
    try:
        told = json.loads(file.read_text())
        config = transformers.AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{file}: it is no configuration of a model ({str(error).splitlines()[0]})") from None
    named = [getattr(transformers, name, None) for name in told.get("architectures") or ()]
    kind: Any = named[0] if named and named[0] is not None else transformers.AutoModelForCausalLM
    make = kind._from_config if named and named[0] is not None else kind.from_config
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    return _without_memory(lambda: make(config, dtype=dtype), str(file))


def _from_yaml(file: Path) -> Found:
    if not file.is_file():
        raise ValueError(f"target={str(file)!r}: no such file; give {_FORMS}")
    try:
        data = parse_yaml(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {error}") from None
    if not isinstance(data, Mapping) or "model" not in data:
        raise ValueError(
            f"{file}: no 'model' stands in it, as {{class_path: package.Module, init_args: {{...}}}}; give {_FORMS}, and the "
            "parallel config by --config"
        )
    if not isinstance(data["model"], Mapping) or "class_path" not in data["model"]:
        raise ValueError(
            f"{file}: model has no class_path, so the file alone does not say what it is; write "
            "model: {class_path: package.Module, init_args: {...}}"
        )
    try:
        from jsonargparse import ArgumentParser
    except ImportError:
        raise ImportError("a YAML file with a model needs jsonargparse: pip install 'lightning-seqpar[cli]'") from None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    try:
        read = parser.parse_object({"model": data["model"]})
    except Exception as error:  # jsonargparse raises its own, with a page of causes
        raise ValueError(f"{file}: the model can't be made: {' '.join(str(error).split())[:400]}") from None
    model = _without_memory(lambda: parser.instantiate_classes(read).model, f"{file}: model")
    trainer = data.get("trainer") or {}
    found = Found(model, _strategy_of(trainer.get("strategy"), file), _world_of(trainer))
    if "data" in data:
        try:
            found.batch = _first_batch(data["data"])
        except Exception as error:  # the user's data code: its trouble is told, and the rest is said without a batch
            found.notes.append(
                f"the first training batch can't be read: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            )
    return found


def _first_batch(told: Any) -> Any:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    data = parser.instantiate_classes(parser.parse_object({"data": told})).data
    data.prepare_data()
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def _strategy_of(told: Any, file: Path) -> dict[str, Any]:
    if isinstance(told, str) and told in StrategyRegistry:
        return dict(StrategyRegistry[told].get("init_params", {}))
    if isinstance(told, Mapping) and str(told.get("class_path", "")).endswith("SeqParallelStrategy"):
        fields = dict(told.get("init_args") or {})
        return {**dict(fields.pop("config", None) or {}), **fields}
    if told is None:
        return {}
    raise ValueError(
        f"{file}: trainer.strategy={told!r} is none of ours; name lightning_seqpar.SeqParallelStrategy or seqpar_tp2"
    )


def _world_of(trainer: Mapping[str, Any]) -> int | None:
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes", 1)
    count = len(devices) if isinstance(devices, list) else devices
    return count * nodes if isinstance(count, int) and isinstance(nodes, int) and count > 0 else None
