"""The model that ``seqpar plan`` and ``verify`` are given: of a YAML file, a Hugging Face folder or a factory; a small one."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.plan.sharding_plan import parse_yaml
from lightning_seqpar.releases import check_package, is_overridden, pl
from lightning_seqpar.user_input import cause_of, name_error, nearest, read_text, shown

HEAD_DIM = 8  # features of a head in a shrunken model

_VOCABULARY = 256
_BLOCKS = 2

_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "hidden_dim")
_WIDTHS = (
    "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "hidden_dim", "moe_intermediate_size",
    "shared_expert_intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "word_embed_proj_dim", "embedding_size",
    "q_lora_rank", "kv_lora_rank", "intermediate_size_mlp", "dense_intermediate_size",
)  # fmt: skip
"""Fields that are scaled as the width is."""

_OF_HEADS = (
    "head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim", "global_head_dim",
)  # fmt: skip
"""Fields that are features of one head, or a part of them."""

_DEPTHS = (
    "num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "n_layers",
    "num_encoder_layers",
)  # fmt: skip


def shrink(config: Any, *, width: bool = True) -> list[str]:
    """Makes a configuration of Hugging Face's small, in place; lists what was changed, as ``hidden_size 4096 → 256``.

    Heads get 8 features, and other widths (if ``width``) shrink alike; the vocabulary keeps its remainder of 64, and as many blocks
    stay as show every kind. Numbers of heads and experts stay: how they meet the ranks is what a trial is about.
    """
    changes: list[str] = []
    for one in _with_parts(config):
        if width:
            _shrink_width(one, changes)
        _shrink_depth(one, changes)
    return list(dict.fromkeys(changes))


def _with_parts(config: Any) -> Iterator[Any]:
    """A configuration and those that stand in it, such as ``text_config``."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield from _with_parts(part)


def _own(config: Any, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Fields of these names that a configuration itself has as positive numbers."""
    for name in names:
        value = vars(config).get(name)
        if type(value) is int and value > 0:
            yield name, value


def _set(config: Any, name: str, value: Any, changes: list[str]) -> None:
    before = getattr(config, name)
    if before != value:
        setattr(config, name, value)
        if not isinstance(value, list | dict):
            changes.append(f"{name} {before} → {value}")


def _shrink_width(config: Any, changes: list[str]) -> None:
    heads = next((value for _, value in _own(config, _HEADS)), None)
    width_name, width = next(_own(config, _WIDTH), ("", 0))
    if heads is not None and width:
        per_head = next((value for name, value in _own(config, ("head_dim", "d_kv"))), width // heads)
        nope = vars(config).get("qk_nope_head_dim")
        per_head = nope if isinstance(nope, int) and nope > 0 else per_head
        # A model as small as that already would grow.
        scale = min(1.0, HEAD_DIM / max(1, per_head))
        for name, value in _own(config, _OF_HEADS):
            _set(config, name, max(2, 2 * round(value * scale / 2)), changes)
        unit = heads if width % heads == 0 else 1
        _set(config, width_name, max(unit, unit * round(width * scale / unit)), changes)
        for name, value in _own(config, _WIDTHS):
            if name != width_name:
                step = math.gcd(value, 16)
                _set(config, name, max(step, step * round(value * scale / step)), changes)
        _shrink_sections(config, scale)


def _shrink_depth(config: Any, changes: list[str]) -> None:
    for name, value in _own(config, ("vocab_size",)):
        _set(config, name, min(value, _VOCABULARY + value % 64), changes)
        for special, token in list(vars(config).items()):
            if special.endswith("token_id") and isinstance(token, int) and token >= config.vocab_size:
                setattr(config, special, config.vocab_size - 1)
    kinds = [value for name, value in vars(config).items() if name.endswith("layer_types") and isinstance(value, list)]
    showing_all = [max(one.index(kind) for kind in set(one)) + 1 for one in kinds if one]
    for name, value in _own(config, _DEPTHS):
        blocks = min(value, max([_BLOCKS, *showing_all]))
        lists = [key for key, one in vars(config).items() if isinstance(one, list) and len(one) == value]
        _set(config, name, blocks, changes)
        for key in lists:
            setattr(config, key, getattr(config, key)[:blocks])


def _shrink_sections(config: Any, scale: float) -> None:
    """Scale the sections of a rotary embedding, which must add up to half a head."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = vars(config).get(name)
        if isinstance(rope, dict) and isinstance(rope.get("mrope_section"), list):
            half = HEAD_DIM // 2
            sections = [max(1, round(one * scale)) for one in rope["mrope_section"]]
            sections[-1] += half - sum(sections)
            setattr(config, name, {**rope, "mrope_section": sections})


@dataclass
class TargetModel:
    """A model that a target names, and what else a YAML file says of its training."""

    model: nn.Module
    fields: dict[str, Any] = field(default_factory=dict)  # of ParallelConfig
    world_size: int | None = None  # the number of ranks
    batch: Any = None  # the first training batch
    strategy: tuple[str, dict[str, Any]] | None = None  # class path and arguments of one that is not ours
    settings: dict[str, Any] = field(default_factory=dict)  # all of a YAML file
    clipping: dict[str, Any] = field(default_factory=dict)  # arguments of the Trainer that say how gradients are clipped
    notes: list[str] = field(default_factory=list)  # sentences on what could not be read

    @property
    def trainer(self) -> Mapping[str, Any]:
        """The section ``trainer`` of a YAML file."""
        return self.settings.get("trainer") or {}


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

    That is a YAML file of Lightning's command line, the folder of a Hugging Face model (or its ``config.json``), of whose
    configuration ``change`` may make another one, or ``package.module:factory``, which takes no arguments. With ``memory`` it is
    made on the CPU, with numbers; with ``foreign`` a YAML file may name a strategy that is not ours. Raises ValueError if the
    target names no model, or it can't be made, and ImportError without the extra that it needs.
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
        if traceback.extract_tb(error.__traceback__)[-1].filename != __file__:
            raise ValueError(f"{what}: it raised {name_error(error)} ({place_of(error)})") from error
        if isinstance(error, TypeError):
            raise ValueError(f"{what}: it must be callable without arguments ({error})") from None
        raise


def place_of(error: BaseException) -> str:
    """File and line in which an error was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{place.filename}:{place.lineno}"


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
    check_package(made)
    return made


def as_steps_take_it(model: nn.Module, batch: Any) -> Any:
    """A loader's batch on the CPU, as the module's own hooks (``on_after_batch_transfer``, ...) hand it to its steps."""
    if not isinstance(model, pl.LightningModule):
        return batch
    batch = model._on_before_batch_transfer(batch)
    return model._apply_batch_transfer_handler(batch, device=torch.device("cpu"))


def first_batch(loads: Any) -> Any:
    """The first training batch of a data module, which is set up for it, or of a module that has a loader itself."""
    if isinstance(loads, pl.LightningDataModule):
        loads.prepare_data()
        loads.setup("fit")
    return next(iter(loads.train_dataloader()))


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
    folder: Path, dtype: torch.dtype | None = None, memory: bool = False, change: Callable[[Any], Any] | None = None
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
        make = _instance(pl.LightningModule, "model", data["model"])
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
    target = TargetModel(model, world_size=_world_of(trainer), settings=dict(data), clipping=clipping)
    target.strategy, target.fields = _strategy_of(trainer.get("strategy"), file, foreign)
    if "data" in data or (isinstance(model, pl.LightningModule) and is_overridden("train_dataloader", model)):
        try:
            target.batch = first_batch(_instance(pl.LightningDataModule, "data", data["data"])() if "data" in data else model)
        except Exception as error:  # of the user's data code: noted, since the plan can be shown without a batch
            target.notes.append(f"the first training batch can't be read: {name_error(error)} ({place_of(error)})")
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
    registered = isinstance(setting, str) and setting in pl.strategies.StrategyRegistry
    if registered and setting.startswith("seqpar"):
        return None, dict(pl.strategies.StrategyRegistry[setting].get("init_params", {}))
    if foreign and registered:
        return (setting, {}), {}
    if foreign and path:
        return (path, _mapping(given.get("init_args"), "init_args", file)), {}
    raise ValueError(
        f"{file}: trainer.strategy={setting!r} is none of ours; name lightning_seqpar.SeqParallelStrategy or seqpar_tp2"
    )


def _mapping(value: Any, name: str, file: Path) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{file}: {name}={shown(value)} of trainer.strategy is no mapping; write arguments by name, as tp: 2")
    return dict(value or {})


def _world_of(trainer: Mapping[str, Any]) -> int | None:
    """The number of ranks that a trainer's settings ask for; None if they do not say."""
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes", 1)
    count = len(devices) if isinstance(devices, list) else devices
    return count * nodes if isinstance(count, int) and isinstance(nodes, int) and count > 0 else None
