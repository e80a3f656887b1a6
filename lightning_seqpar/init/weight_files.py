"""Safetensors files of a model, read tensor by tensor by the names that the model has for them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_seqpar.layout.param_layout import Shard
from lightning_seqpar.releases import converts_weights
from lightning_seqpar.user_input import nearest


class WeightFiles:
    """Reads a safetensors file, those of an index, or a folder with either, by the names that their tensors have in a module.

    A Hugging Face model's files may also use the names that its library writes. Without a module, names are those in the files.
    """

    def __init__(self, path: str | Path, module: nn.Module | None = None) -> None:
        self.path = Path(path)
        self._files = self._find()
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self._files.values())):
            with self._open(file) as opened:
                self._shapes.update({key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()})  # noqa: SIM118
        self._module: Any = module
        self._renamed: dict[str, str] = {}
        self._converted: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        if hasattr(module, "base_model_prefix") and hasattr(module, "config"):
            self._read_mapping()

    def _find(self) -> dict[str, Path]:
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

    def _dtype(self, key: str) -> torch.dtype:
        with self._open(self._files[key]) as opened:
            if not self._shapes[key]:
                return opened.get_tensor(key).dtype  # type: ignore[no-any-return]
            return opened.get_slice(key)[:0].dtype  # type: ignore[no-any-return]

    def _read_mapping(self) -> None:
        """Finds what has another name in a Hugging Face model's files, or is made of several tensors there (stacked experts)."""
        if not converts_weights():
            return
        from transformers import conversion_mapping, core_model_loading

        transforms: list[Any] = list(conversion_mapping.get_model_conversion_mapping(self._module))
        converters = [each for each in transforms if isinstance(each, core_model_loading.WeightConverter)]
        renamings = [each for each in transforms if each not in converters]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        for key in sorted(self._files, key=core_model_loading.dot_natural_key):
            name, pattern = core_model_loading.rename_source_key(key, renamings, converters)
            if pattern is None:
                self._renamed[name] = key
            elif len(by_pattern[pattern].target_patterns) == 1:
                self._converted.setdefault(name, (by_pattern[pattern], []))[1].append((pattern, key))

    def _names(self, name: str) -> list[str]:
        """A name of the module with and without the prefix that its library gives the base model."""
        prefix = getattr(self._module, "base_model_prefix", "")
        short = name.removeprefix(f"{prefix}.")
        return [name, short if short != name else f"{prefix}.{name}"] if prefix else [name]

    def _key(self, name: str) -> str | None:
        """The name in the files of the tensor that is the module's ``name``; None if there is no such tensor."""
        keys = (self._renamed.get(candidate, candidate) for candidate in self._names(name))
        return next((key for key in keys if key in self._files), None)

    def _parts(self, name: str) -> tuple[str, Any, list[tuple[str, str]]]:
        """Returns the library's name, the converter, patterns and names in the files, of what is made of several tensors."""
        found = next(one for one in self._names(name) if one in self._converted)
        return found, *self._converted[found]

    def has(self, name: str) -> bool:
        """Whether the files hold the module's tensor ``name``."""
        return self._key(name) is not None or any(one in self._converted for one in self._names(name))

    def check(self) -> None:
        """Raises ValueError unless the files hold every parameter, with its shape."""
        keys: dict[nn.Parameter, str | None] = {}
        names: dict[nn.Parameter, list[str]] = defaultdict(list)  # tied names are one parameter's
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            names[parameter].append(name)
            if self.has(name):
                keys[parameter] = self._key(name)
        if missing := [of_one[0] for parameter, of_one in names.items() if parameter not in keys]:
            spare = sorted(set(self._files) - {key for key in keys.values() if key})
            raise ValueError(
                f"weights_from: {str(self.path)!r} has no {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''} "
                f"({len(missing)} of {len(names)} parameters are missing); it has "
                f"{nearest(missing[0], spare or list(self._files))}. The file must use the module's own names: call "
                "weights_from before adapters or wrappers change them, or load the model whole once (from_pretrained) and save "
                "its state_dict() by safetensors.torch.save_model"
            )
        for tied in names.values():
            first, *others = dict.fromkeys(key for name in tied if (key := self._key(name)) is not None) or [""]
            for key in others:
                if not torch.equal(self._read_key(first), self._read_key(key)):
                    raise ValueError(
                        f"weights_from: {str(self.path)!r} holds {first} and {key}, which differ, and the model ties them; set "
                        "tie_word_embeddings to false in its config if they were trained apart"
                    )
        for parameter, key in keys.items():
            shape = tuple(parameter.shape)
            if key is not None and self._shapes[key] != shape:
                raise ValueError(
                    f"weights_from: {str(self.path)!r} holds {key} with shape {list(self._shapes[key])}, and the model's "
                    f"{names[parameter][0]} has {list(shape)}; it belongs to another configuration"
                )

    def _read_key(self, key: str) -> Tensor:
        with self._open(self._files[key]) as opened:
            return opened.get_tensor(key)  # type: ignore[no-any-return]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that the module's tensor ``name`` has in the files."""
        key = self._key(name)
        return self._dtype(self._parts(name)[2][0][1] if key is None else key)

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """Reads the module's tensor ``name``, or a rank's part of it: nothing else, unless it is made of several tensors."""
        key = self._key(name)
        if key is None:  # it is made of several tensors of the files
            target, converter, sources = self._parts(name)
            fresh = converter.copy(converter.source_patterns, converter.target_patterns, operations=converter.operations)
            for pattern, part in sources:
                fresh.add_tensor(target, part, pattern, self._read_key(part))
            converted = fresh.convert(target, model=self._module, config=self._module.config)[target]
            whole: Tensor = converted[0] if isinstance(converted, list) else converted
            return whole if shard is None else shard.take(whole, rank)
        if shard is None:
            return self._read_key(key)
        with self._open(self._files[key]) as opened:  # closed after each tensor, so that its memory is freed
            sliced = opened.get_slice(key)
            before = (slice(None),) * shard.dim
            ranges = [(*before, slice(start, stop)) for start, stop in shard.ranges[rank]]
            return shard.join([sliced[indices] for indices in ranges])
