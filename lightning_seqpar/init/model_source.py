"""The model that ``seqpar plan`` and ``seqpar verify`` are given: of a YAML file, a Hugging Face folder, or a factory."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.plan.sharding_plan import parse_yaml
from lightning_seqpar.user_input import cause_of, name_error, nearest, read_text, shown


@dataclass
class TargetModel:
    """A model that a target names, and what else a YAML file says of its training."""

    model: nn.Module
    fields: dict[str, Any] = field(default_factory=dict)  # of ParallelConfig
    world_size: int | None = None  # the number of ranks
    batch: Any = None  # the first training batch
    strategy: tuple[str, dict[str, Any]] | None = None  # class path and arguments of one that is not ours
    clipping: dict[str, Any] = field(default_factory=dict)  # arguments of the Trainer that say how gradients are clipped
    notes: list[str] = field(default_factory=list)  # sentences on what could not be read


_FORMS = "a YAML file with a model, a Hugging Face folder (with config.json), or package.module:factory"


def load_target(
    target: str,
    dtype: torch.dtype | None = None,
    *,
    memory: bool = False,
    change: Callable[[Any], Any] | None = None,
    foreign: bool = False,
) -> TargetModel:
    """Makes the model that ``target`` names, on the meta device where its code allows that.

    Args:
        target: the path of a YAML file of Lightning's command line, the folder of a Hugging Face model (or its
            ``config.json``), or ``package.module:factory``, a class or function that takes no arguments.
        dtype: the dtype of the parameters; None for the model's own.
        memory: make it on the CPU, with numbers.
        change: is called with the configuration of a Hugging Face folder before its model is made.
        foreign: allow a YAML file to name a strategy that is not ours.

    Raises:
        ValueError: if the target names no model, or the model can't be made.
        ImportError: without the extra that the target needs.
    """
    path = Path(target)
    is_folder = path.is_dir() or path.name == "config.json"
    if change is not None and not is_folder:
        raise ValueError(f"target={target!r}: only a Hugging Face folder has a configuration that can be changed")
    if target.endswith((".yaml", ".yml")):
        made = _from_yaml(path, memory, foreign)
    elif is_folder:
        made = TargetModel(model_from_folder(path if path.is_dir() else path.parent, dtype, memory, change))
    elif ":" in target:
        factory = function_named(target, "target")
        # A module is copied, since whoever asks again must not find it sharded.
        if isinstance(factory, nn.Module):
            made = TargetModel(copy.deepcopy(factory))
        else:
            what = f"target={target!r}"
            made = TargetModel(made_by_user(lambda: _make(factory, what, memory), what))
    else:
        raise ValueError(f"target={target!r} is nothing that is known; give {_FORMS}")
    if dtype is not None:
        made.model.to(dtype)
    return made


def made_by_user(make: Callable[[], Any], what: str) -> Any:
    """Calls a function of the user's; raises ValueError, which names it ``what``, if it raises something or needs arguments."""
    try:
        return make()
    except ImportError:
        raise
    except (Exception, SystemExit) as error:  # of the user's code
        place = traceback.extract_tb(error.__traceback__)[-1]
        if place.filename != __file__:
            raise ValueError(f"{what}: it raised {name_error(error)} ({place.filename}:{place.lineno})") from error
        if isinstance(error, TypeError):
            raise ValueError(f"{what}: it must be callable without arguments ({error})") from None
        raise


def _make(make: Any, what: str, memory: bool) -> nn.Module:
    """Makes a model on the meta device, or, where its code needs numbers (or ``memory`` is asked for), on the CPU."""
    try:
        with contextlib.nullcontext() if memory else torch.device("meta"):
            made = make()
    except (NotImplementedError, RuntimeError):
        if memory:
            raise
        made = make()
    if not isinstance(made, nn.Module):
        raise ValueError(f"{what} made a {type(made).__name__}; it must make an nn.Module")
    return made


def as_steps_take_it(model: nn.Module, batch: Any) -> Any:
    """A loader's batch on the CPU, as the module's own hooks (``on_after_batch_transfer``, ...) hand it to its steps."""
    if not isinstance(model, LightningModule):
        return batch
    batch = model._on_before_batch_transfer(batch)
    return model._apply_batch_transfer_handler(batch, device=torch.device("cpu"))


def function_named(path: str, what: str) -> Callable[[], Any]:
    """Imports what ``package.module:name`` names; raises ValueError, with the option ``what`` that gave it, if there is none."""
    module, _, name = path.partition(":")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{what}={path!r}: {error}; run it where {module} can be imported") from None
    if not hasattr(imported, name):
        known = [key for key in vars(imported) if not key.startswith("_")]
        raise ValueError(f"{what}={path!r}: {module} has no {name!r}; did you mean {nearest(name, known)}?")
    found: Callable[[], Any] = getattr(imported, name)
    return found


def batch_named(path: str | None, target: TargetModel) -> Any:
    """Returns the batch that the option ``--batch`` names, or what makes it; else that of the target, or None."""
    return target.batch if path is None else function_named(path, "--batch")


def model_from_folder(
    folder: Path,
    dtype: torch.dtype | None = None,
    memory: bool = False,
    change: Callable[[Any], Any] | None = None,
) -> nn.Module:
    """Makes the model of a Hugging Face folder's ``config.json`` as :func:`load_target` does; no weights are read."""
    file = folder / "config.json"
    text = read_text(file, str(file))
    if text is None:
        raise ValueError(f"target={str(folder)!r} holds no config.json; give {_FORMS}")
    try:
        import transformers
    except ImportError:
        raise ImportError("a Hugging Face folder needs transformers: pip install 'lightning-seqpar[hf]'") from None
    try:
        fields = json.loads(text)
        # Code in the folder is not run: transformers would ask on the terminal.
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if not isinstance(names := fields.get("architectures") or [], list):
            raise ValueError(f"architectures={shown(names)}: give a list of names")
    except Exception as error:  # transformers checks fields with errors of a library's own
        raise ValueError(f"{file}: it is no configuration of a model ({cause_of(error)})") from None
    named = [getattr(transformers, str(name), None) for name in names]
    architecture: Any = named[0] if named and hasattr(named[0], "_from_config") else None
    named_by_type = functools.partial(transformers.AutoModelForCausalLM.from_config, trust_remote_code=False)
    make = named_by_type if architecture is None else architecture._from_config
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    if change is not None:
        change(config)
    made: nn.Module = made_by_user(lambda: _make(lambda: make(config, dtype=dtype), str(file), memory), str(file))
    return made


def _from_yaml(file: Path, memory: bool, foreign: bool) -> TargetModel:
    """Makes the model of a YAML file of Lightning's command line, with the strategy's fields and the first batch."""
    text = read_text(file, str(file))
    if text is None:
        raise ValueError(f"target={str(file)!r}: no such file; give {_FORMS}")
    try:
        data = parse_yaml(text)
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
        make = _instance(LightningModule, "model", data["model"])
    except ImportError:
        raise
    except Exception as error:  # jsonargparse's own type, with a page of causes in its message
        raise ValueError(f"{file}: the model can't be made: {' '.join(str(error).split())[:400]}") from None
    what = f"{file}: model"
    model = made_by_user(lambda: _make(make, what, memory), what)
    trainer = data.get("trainer") or {}
    if not isinstance(trainer, Mapping):
        raise ValueError(f"{file}: trainer={shown(trainer)} is no mapping; write trainer: {{devices: 2, ...}}")
    clipping = {key: trainer[key] for key in ("gradient_clip_val", "gradient_clip_algorithm") if trainer.get(key)}
    target = TargetModel(model, world_size=_world_of(trainer), clipping=clipping)
    target.strategy, target.fields = _strategy_of(trainer.get("strategy"), file, foreign)
    if "data" in data or (isinstance(model, LightningModule) and is_overridden("train_dataloader", model)):
        try:
            target.batch = _first_batch(data["data"]) if "data" in data else next(iter(model.train_dataloader()))
        except Exception as error:  # of the user's data code: noted, since the plan can be shown without a batch
            target.notes.append(
                f"the first training batch can't be read: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            )
    return target


def _instance(kind: type, name: str, settings: Any) -> Callable[[], Any]:
    """Reads ``class_path`` and ``init_args`` of a YAML file; returns what makes the object."""
    try:
        from jsonargparse import ArgumentParser
    except ImportError:
        raise ImportError("a YAML file with a model needs jsonargparse: pip install 'lightning-seqpar[cli]'") from None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(kind, name)
    parsed = parser.parse_object({name: settings})
    return lambda: getattr(parser.instantiate_classes(parsed), name)


def _first_batch(settings: Any) -> Any:
    """The first training batch of the data module that a YAML file describes."""
    data = _instance(LightningDataModule, "data", settings)()
    data.prepare_data()
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def _strategy_of(setting: Any, file: Path, foreign: bool) -> tuple[tuple[str, dict[str, Any]] | None, dict[str, Any]]:
    """Reads ``trainer.strategy`` of a YAML file: another strategy with its arguments, and fields of ParallelConfig for ours."""
    if setting is None:
        return None, {}
    given = setting if isinstance(setting, Mapping) else {}
    path = str(given.get("class_path", ""))
    if path.endswith("SeqParallelStrategy"):
        fields = _mapping(given.get("init_args"), "init_args", file)
        config = fields.pop("config", None)
        if isinstance(config, str):  # a file, as Lightning's CLI takes one
            place = config if Path(config).is_file() else file.parent / config
            config = ParallelConfig.from_yaml(place).model_dump(exclude_unset=True)
        return None, {**_mapping(config, "init_args.config", file), **fields}
    registered = isinstance(setting, str) and setting in StrategyRegistry
    if registered and setting.startswith("seqpar"):
        return None, dict(StrategyRegistry[setting].get("init_params", {}))
    if foreign and registered:
        return (setting, {}), {}
    if foreign and path:
        return (path, _mapping(given.get("init_args"), "init_args", file)), {}
    raise ValueError(
        f"{file}: trainer.strategy={setting!r} is none of ours; name lightning_seqpar.SeqParallelStrategy or seqpar_tp2"
    )


def _mapping(value: Any, name: str, file: Path) -> dict[str, Any]:
    """Copies a mapping below ``trainer.strategy`` of a YAML file; empty for nothing, ValueError for anything else."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{file}: {name}={shown(value)} of trainer.strategy is no mapping; write arguments by name, as tp: 2")
    return dict(value or {})


def _world_of(trainer: Mapping[str, Any]) -> int | None:
    """The number of ranks that a trainer's settings ask for; None if they do not say."""
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes", 1)
    count = len(devices) if isinstance(devices, list) else devices
    return count * nodes if isinstance(count, int) and isinstance(nodes, int) and count > 0 else None
