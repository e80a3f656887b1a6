"""Converting checkpoints to and from the folders of safetensors that Hugging Face's ``save_pretrained`` writes."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_seqpar.checkpoint.atomic_files import UNFINISHED, beside, sync, write_synced
from lightning_seqpar.checkpoint.convert import check_free, identity, read_all
from lightning_seqpar.checkpoint.folder import Form, Source, begin_folder
from lightning_seqpar.init.model_source import model_from_folder
from lightning_seqpar.init.weight_files import WeightFiles
from lightning_seqpar.releases import LIGHTNING_VERSION, converts_weights
from lightning_seqpar.user_input import nearest

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json", ".ckpt")
"""Endings of files that hold weights, and are not copied from the folder that a model was made from."""


def _with_dot(prefix: str | None) -> str:
    """The prefix as names of tensors begin with it: ``model`` → ``model.``; an empty one stays empty."""
    return f"{prefix.rstrip('.')}." if prefix else ""


class HuggingFaceSource(Source):
    """A folder that ``save_pretrained`` wrote, as a checkpoint of weights; ``prefix`` is the attribute that holds the model."""

    form: Form = "safetensors"

    def __init__(self, path: Path, prefix: str | None) -> None:
        model: Any = model_from_folder(path)
        self.path, self.origin = path, {}
        try:
            self._files = WeightFiles(path, model)
            self._files.check()
        except ValueError as error:
            raise ValueError(str(error).removeprefix("weights_from: ")) from None
        own = model.state_dict(keep_vars=True)
        # By the id of a parameter, the first of its names that is in the files: tied ones are one tensor.
        first_names = {id(value): name for name, value in reversed(own.items()) if self._files.has(name)}
        metas = {
            parameter: torch.empty(own[name].shape, dtype=self._files.dtype(name), device="meta")
            for parameter, name in first_names.items()
        }
        self._names = {id(metas[parameter]): name for parameter, name in first_names.items()}
        state = {_with_dot(prefix) + name: metas[id(value)] for name, value in own.items() if id(value) in metas}
        versions = {"pytorch-lightning_version": LIGHTNING_VERSION}
        self.tree = {"epoch": 0, "global_step": 0, **versions, "state_dict": state}

    def read(self, value: Tensor) -> Tensor:
        """Read a tensor of :attr:`tree`; returns it with its numbers."""
        name = self._names.get(id(value))
        return value if name is None else self._files.read(name)


class HuggingFaceTarget:
    """Writes the model of a checkpoint as a folder that ``from_pretrained`` reads.

    The ``config.json`` of ``like``, the folder that the model was made from, says what the tensors are called; that file and the
    others that hold no weights (tokenizer, generation config) are copied. ``prefix`` is the attribute of the LightningModule that
    holds the model; None finds it by the names of the tensors. ``left_out`` are tensors that are no part of the model.
    """

    def __init__(self, source: Source, like: Path, prefix: str | None = None, max_shard_size: str | int = "5GB") -> None:
        self._source, self._like = source, like
        if not converts_weights():
            raise ImportError(f"writing Hugging Face's form needs transformers 5, and {version('transformers')} is installed")
        if source.form == "safetensors":
            raise ValueError(f"{source.path}: it is in Hugging Face's layout already")
        if not (like / "config.json").is_file():
            raise ValueError(
                f"--like {like}: no config.json is in it; give the Hugging Face folder that the model was made from"
            )
        self._model: Any = model_from_folder(like)
        self._state: dict[str, Tensor] = {
            name: value for name, value in source.tree["state_dict"].items() if isinstance(value, Tensor)
        }
        ignored = set(getattr(self._model, "_keys_to_ignore_on_save", None) or ())
        own = {name: value for name, value in self._model.state_dict(keep_vars=True).items() if name not in ignored}
        self._names = self._find_names(own, prefix)
        self._check(own)
        self._check_ties(own)
        written = self._in_files()
        self.tensors = {name: (list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in written.items()}
        self.nbytes = sum(value.nbytes for value in written.values())
        self._max_shard_size = max_shard_size
        from huggingface_hub import split_torch_state_dict_into_shards

        try:
            split_torch_state_dict_into_shards(written, max_shard_size=max_shard_size)
        except ValueError:
            raise ValueError(f"--max-shard-size {max_shard_size}: write a number of bytes, such as 5GB or 500MB") from None

    def _in_files(self) -> dict[str, Tensor]:
        """Meta tensors like those that ``save_pretrained`` will write, by their names in the files."""
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        saved = {name: self._state[in_checkpoint] for name, in_checkpoint in self._names.items()}
        metas = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in saved.items()}
        untied = remove_tied_weights_from_state_dict(metas, self._model)
        converted: dict[str, Tensor] = revert_weight_conversion(self._model, untied)
        return converted

    def _find_names(self, own: Mapping[str, Tensor], prefix: str | None) -> dict[str, str]:
        """Finds the name in the checkpoint of each tensor of the model; of tied tensors the checkpoint needs to have one."""
        tied: dict[int, list[str]] = defaultdict(list)
        for name, value in own.items():
            tied[id(value)].append(name)

        def under(start: str) -> dict[str, str]:
            """The names of those tensors of the model that the checkpoint has under a prefix."""
            names_there: dict[str, str] = {}
            for names in tied.values():
                if there := [start + name for name in names if start + name in self._state]:
                    names_there |= {name: start + name if start + name in there else there[0] for name in names}
            return names_there

        starts = self._prefixes(own) if prefix is None else [_with_dot(prefix)]
        whole = [start for start in starts if len(under(start)) == len(own)]
        if len(whole) > 1:
            raise ValueError(
                f"{self._source.path}: it holds this model {len(whole)} times, under "
                f"{' and '.join(repr(start.rstrip('.')) for start in whole)}; say which by --prefix"
            )
        if not whole:
            best = max(starts, key=lambda start: len(under(start)), default="")
            missing = [name for name in own if name not in under(best)]
            hint = (
                "adapters are in it: merge them into the model first (merge_and_unload), and save that"
                if any("lora_" in name or ".base_layer." in name for name in self._state)
                else f"the checkpoint has {nearest(best + missing[0], list(self._state))}. Give --like the folder of the model "
                "that was trained, and --prefix the attribute of the LightningModule that holds it"
            )
            raise ValueError(
                f"{self._source.path}: it does not hold the model of {self._like / 'config.json'} "
                f"({type(self._model).__name__}): {len(missing)} of its {len(own)} tensors are missing, as {best + missing[0]}; "
                f"{hint}"
            )
        self._start = whole[0]
        return under(self._start)

    def _prefixes(self, own: Mapping[str, Tensor]) -> list[str]:
        """Prefixes under which names of the checkpoint end like names of the model; some tensors of the model are enough."""
        last_parts = {name.rpartition(".")[2] for name in self._state}
        candidates = [name for name in own if name.rpartition(".")[2] in last_parts]
        return sorted({
            key.removesuffix(name) for name in candidates[:50] for key in self._state
            if key == name or key.endswith(f".{name}")
        })  # fmt: skip

    def _check(self, own: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless shapes are the model's, and everything under its prefix belongs to it; set ``left_out``."""
        for name, value in own.items():
            saved = self._state[self._names[name]]
            if saved.shape != value.shape:
                raise ValueError(
                    f"{self._names[name]}: the checkpoint {self._source.path} holds {list(saved.shape)}, and the model of "
                    f"{self._like / 'config.json'} has {list(value.shape)}; change that config to what was trained"
                )
        known = {self._start + name for name in self._model.state_dict()}
        if self._start and (more := [n for n in self._state if n.startswith(self._start) and n not in known]):
            raise ValueError(
                f"{more[0]}: the checkpoint {self._source.path} holds {len(more)} tensors that the model of "
                f"{self._like / 'config.json'} ({type(self._model).__name__}) has not; give --like the folder of the model that "
                "was trained"
            )
        self.left_out = [name for name in self._state if name not in known]

    def _check_ties(self, own: Mapping[str, Tensor]) -> None:
        """Let tied tensors have one name in the checkpoint; raise ValueError if they differ there."""
        first_names: dict[int, str] = {}
        for name, value in own.items():
            first = self._names[first_names.setdefault(id(value), name)]
            one, other = self._state[first], self._state[self._names[name]]
            if identity(one) != identity(other) and not torch.equal(self._source.read(one), self._source.read(other)):
                raise ValueError(
                    f"{self._source.path}: {self._names[name]} and {first} differ, and "
                    f"{self._like / 'config.json'} ties them; set tie_word_embeddings to false there if they were trained apart"
                )
            self._names[name] = first

    def write(self, target: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Writes the folder under another name by the library's ``save_pretrained``, and renames it."""
        check_free(target)
        begin_folder(target)
        folder = beside(target, UNFINISHED)
        try:
            metas = {key: self._state[key] for key in dict.fromkeys(self._names.values())}
            with read_all(self._source, metas, folder / ".scratch", progress) as numbers:
                state = {name: numbers[key] for name, key in self._names.items()}
                self._model.save_pretrained(folder, state_dict=state, max_shard_size=self._max_shard_size)
            for file in folder.iterdir():
                sync(file)
            self._copy_others(folder)
            sync(folder)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        folder.rename(target)
        sync(target.parent)

    def _copy_others(self, folder: Path) -> None:
        for file in sorted(self._like.rglob("*")):
            inner = file.relative_to(self._like)
            hidden = any(part.startswith(".") for part in inner.parts)
            if file.is_file() and not hidden and not file.name.endswith(_NOT_COPIED):
                (folder / inner).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, folder / inner)
        config = json.loads((self._like / "config.json").read_text())
        config.pop("quantization_config", None)  # the weights that are written are not quantised
        names = [self._names[name] for name, _ in self._model.named_parameters() if name in self._names]
        dtypes = [self._state[name].dtype for name in names]
        # The first floating dtype, as the library determines a model's dtype.
        if dtype := next((dtype for dtype in dtypes if dtype.is_floating_point), None):
            config.pop("torch_dtype", None)
            config["dtype"] = str(dtype).removeprefix("torch.")
        config.setdefault("architectures", [type(self._model).__name__])
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        write_synced(folder / "config.json", lambda file: file.write(text.encode()))
