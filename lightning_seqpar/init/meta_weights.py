"""Weights of models that were made on the meta device: read from files, or drawn as at once, one tensor at a time."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_seqpar.distributed.autograd import storage_id
from lightning_seqpar.init.deferred import DeferredInit, TensorRef
from lightning_seqpar.init.weight_files import WeightFiles
from lightning_seqpar.layout.linear_kind import is_adapted
from lightning_seqpar.layout.param_layout import ParamLayout, empty_on_cpu, local_rows, rows_held
from lightning_seqpar.parallel.sharded_model import ShardedModel

_SOURCE = "_seqpar_weights"  # the attribute of a module on the meta device that holds its :class:`_Source`
_Module = TypeVar("_Module", bound=nn.Module)


class _Source:
    """The path of a module's weights, its tensors by their names then, and how many operations were recorded until then."""

    def __init__(self, path: str, tensors: dict[str, Tensor], since: int) -> None:
        self.path, self.tensors, self.since = path, tensors, since
        # Kept alive, so that no other storage gets the same id: a cast gives a parameter another storage.
        self.storages = {storage_id(tensor): (name, tensor.untyped_storage()) for name, tensor in tensors.items()}
        self._versions = {name: tensor._version for name, tensor in tensors.items()}
        self._names: dict[int, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            self._names[id(tensor)].append(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Source:
        copied = _Source(self.path, copy.deepcopy(self.tensors, memo), self.since)
        copied._versions.update(dict.fromkeys(self.changed(), -1))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _Source, (self.path, self.tensors, self.since)

    def names(self, tensor: Tensor) -> list[str]:
        return self._names.get(id(tensor), [])

    def changed(self) -> list[str]:
        return [name for name, tensor in self.tensors.items() if tensor._version != self._versions[name]]


def weights_from(module: _Module, path: str | Path) -> _Module:
    """Fill the parameters and buffers of ``module`` from safetensors files.

    A module on the meta device only notes the path; the strategy reads the weights when it shards the model, of each tensor
    this rank's part alone. Any other module is filled at once. Call it in ``configure_model``::

        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)
        weights_from(self.model, "llama-folder")

    Args:
        module: the module by whose names the files call the tensors.
        path: a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either, as ``save_pretrained`` writes.

    Returns:
        The module.

    Raises:
        ValueError: if there are no such files, a tensor is missing, or one has another shape.
        ImportError: without the extra ``hf``.
    """
    files = WeightFiles(path, module)
    files.check()
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in tensors:
            if not tensor.is_meta and files.has(name):
                tensor.copy_(files.read(name))
    if meta := {name: tensor for name, tensor in tensors if tensor.is_meta and files.has(name)}:
        module.__dict__[_SOURCE] = _Source(str(path), meta, DeferredInit.count())
    return module


@dataclass
class _Place:
    """A tensor of the model: its name, the module and attribute that hold it, and the meta tensor in the record."""

    name: str
    holder: nn.Module
    leaf: str
    ref: TensorRef


class LateWeights:
    """Gives values to the meta tensors of a model; made before the model is changed in any way: from ``state``, a checkpoint's
    weights, from files, or from ``recorder``, which has the record of its initialisation.
    """

    def __init__(
        self, model: nn.Module, recorder: DeferredInit | None = None, state: Mapping[str, Tensor] | None = None
    ) -> None:
        self._model, self._state = model, state or {}
        self._sources: dict[str, tuple[_Source, WeightFiles]] = {
            name: (source, WeightFiles(source.path, module))
            for name, module in model.named_modules()
            if (source := module.__dict__.get(_SOURCE)) is not None
        }
        # Looked up before anything is written here. Loading a state dict into meta tensors, which changes nothing, counts as
        # a write too, so with a state nothing can be said.
        self._changed = {
            (path, name) for path, (source, _) in self._sources.items() if not self._state for name in source.changed()
        }
        self.recorder = recorder or DeferredInit()
        self._complete()
        self._parameters: dict[int, list[_Place]] = defaultdict(list)
        self._others: dict[int, list[_Place]] = defaultdict(list)
        for name, module in model.named_modules():
            others = {**vars(module), **module._buffers}
            attributes = [(leaf, value, self._parameters) for leaf, value in module._parameters.items()]
            attributes += [(leaf, value, self._others) for leaf, value in others.items()]
            for leaf, tensor, places in attributes:
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    ref = self.recorder.ref(tensor)
                    places[ref.storage].append(_Place(f"{name}.{leaf}" if name else leaf, module, leaf, ref))

    def _complete(self) -> None:
        """Records the initialisation of modules that have none in the record and no files, by calling it now."""
        for name, module in self._model.named_modules():
            if any(name == source or name.startswith(f"{source}.") or not source for source in self._sources):
                continue
            self._initialize_huggingface(name, module)
            blank = [parameter for parameter in module.parameters(recurse=False) if self._is_blank(parameter)]
            reset = getattr(module, "reset_parameters", None)
            if blank and callable(reset):
                with self.recorder, torch.no_grad():
                    reset()

    def _initialize_huggingface(self, name: str, module: nn.Module) -> None:
        """Calls the initialisation of a Hugging Face model, which the library skips on the meta device."""
        # The class is asked, since PEFT's wrappers pass attributes of the wrapped model on.
        initialize = getattr(module, "initialize_weights", None) if hasattr(type(module), "_init_weights") else None
        meta = [inner for inner, parameter in module.named_parameters() if parameter.is_meta]
        if not meta or not callable(initialize) or getattr(module, "_is_hf_initialized", False):
            return
        adapted = next((inner for inner, part in module.named_modules() if is_adapted(part)), None)
        names = [f"{name}.{inner}" if name else inner for inner in meta]
        if adapted is not None and not all(each in self._state for each in names):
            raise ValueError(
                f"{name or type(module).__name__}: it was made on the meta device without weights and adapted since "
                f"({adapted}), and its own initialisation would go over the adapters; give its weights before it is "
                "adapted, weights_from(module, folder), or make it outside torch.device('meta')"
            )
        with self.recorder, torch.no_grad():
            initialize()

    def _is_blank(self, tensor: Tensor) -> bool:
        return tensor.is_meta and not self.recorder.fills(tensor)

    def check(self) -> None:
        """Raises ValueError for a tensor that nothing fills, or that would get other values than in a whole model."""
        drawn: list[_Place] = []  # tensors that get their values from the record
        read: set[int] = set()  # storages of tensors that are read from a checkpoint or a file
        sources = [source for source, _ in self._sources.values()]
        storages_of_files = {key: (name, one.since) for one in sources for key, (name, _) in one.storages.items()}
        for place in self._places():
            tensor = getattr(place.holder, place.leaf)
            if place.name in self._state or place.name in self._in_files:
                read.add(place.ref.storage)
                continue
            for _, source, files, inner in self._around(place.name):
                if isinstance(tensor, nn.Parameter) and files.has(inner):  # another one than files were to fill
                    raise ValueError(
                        f"{place.name}: it came after weights_from({source.path!r}), which holds numbers of that name; change "
                        "layers (a resized embedding, a new head) before weights_from, or make the model outside "
                        "torch.device('meta')"
                    )
            drawn.append(place)
            if self.recorder.written_elsewhere(tensor):
                raise ValueError(
                    f"{place.name}: it was made on the meta device, and initialised there outside configure_model, where nothing "
                    "remembers it; make and initialise the model in configure_model, or give its weights: weights_from(module, "
                    "folder)"
                )
            if self._is_blank(tensor):
                raise ValueError(
                    f"{place.name}: it was made on the meta device, and nothing says how it is filled: its module "
                    f"({type(place.holder).__name__}) has no reset_parameters. Make the model in configure_model (what is done to "
                    "meta tensors there is remembered), or give its weights: weights_from(module, folder)"
                )
        for place in drawn:
            # Unless it is tied to a tensor that is read.
            if place.ref.storage in storages_of_files and place.ref.storage not in read:
                name_in_file = storages_of_files[place.ref.storage][0]
                raise ValueError(
                    f"{place.name}: it has the memory of {name_in_file}, which weights_from fills, under another "
                    "name or as another parameter (weight_norm, a parametrization?); make the model outside "
                    "torch.device('meta') and load it whole"
                )
        self.recorder.check((place.ref for place in drawn), storages_of_files)

    def _places(self) -> list[_Place]:
        """All places: those of parameters, then those of other tensors."""
        return [place for group in (self._parameters, self._others) for places in group.values() for place in places]

    def _around(self, name: str) -> Iterator[tuple[str, _Source, WeightFiles, str]]:
        """The sources of all modules that a name lies in: the module's name, its source, its files, the name within it."""
        for path, (source, files) in self._sources.items():
            if name == path or not path or name.startswith(f"{path}."):
                yield path, source, files, name.removeprefix(f"{path}.") if path else name

    @functools.cached_property
    def _in_files(self) -> dict[str, tuple[WeightFiles, str]]:
        """Maps each tensor that files fill to the files and its name there; looked up before any tensor gets its values."""
        return {place.name: source for place in self._places() if (source := self._source_of(place)) is not None}

    def _source_of(self, place: _Place) -> tuple[WeightFiles, str] | None:
        """Finds the files of a tensor, and its name when they were given; raises ValueError if it was changed in place since."""
        tensor = getattr(place.holder, place.leaf)
        for path, source, files, inner in self._around(place.name):
            known = source.names(tensor)
            names = known if known or isinstance(tensor, nn.Parameter) else [inner]
            name = next((candidate for candidate in names if files.has(candidate)), None)
            if name is None:
                continue
            if (path, name) in self._changed:
                raise ValueError(
                    f"{place.name}: it was changed in place after weights_from({source.path!r}), whose numbers are read later "
                    "and would undo that; change weights in the files, or make the model outside torch.device('meta')"
                )
            return files, name
        return None

    def fill_buffers(self) -> None:
        """Give tensors that are no parameters their values, whole, before the model is sharded."""
        self._fill(self._others)

    def fill_parameters(self, record: ShardedModel | None) -> None:
        """Gives every parameter this rank's part of its values, or its rows; no more than one whole tensor exists at a time."""
        # What other stages of a pipeline hold has left the meta device already, without values.
        wanted: dict[int, list[_Place]] = {}
        # Memory for all parts is allocated first, so that the whole tensors come and go in the same place after them.
        for key, places in self._parameters.items():
            for place in places:
                parameter = getattr(place.holder, place.leaf)
                if parameter.is_meta:
                    wanted[key] = places
                    room = nn.Parameter(empty_on_cpu(parameter), parameter.requires_grad)
                    torch.utils.swap_tensors(parameter, room)
        self._fill(wanted, record)
        for module in self._model.modules():
            module.__dict__.pop(_SOURCE, None)

    def _fill(self, wanted: Mapping[int, list[_Place]], record: ShardedModel | None = None) -> None:
        """Gives tensors, by storage, their values: read from a checkpoint or a file if one has them, else from the record."""
        rank = record.groups.rank("tp") if record is not None else 0
        drawn: dict[int, list[_Place]] = {}
        for key, places in wanted.items():
            read = [self._read(place, _layout(record, place), rank) for place in places]
            if not any(read):
                drawn[key] = places

        def draw(key: int, tensor: Callable[[TensorRef], Tensor]) -> None:
            for place in drawn[key]:
                layout, whole = _layout(record, place), tensor(place.ref)
                _set(place, whole if layout is None else layout.take(whole, rank))

        if drawn:
            self.recorder.replay([place.ref for places in drawn.values() for place in places], draw)

    def _read(self, place: _Place, layout: ParamLayout | None, rank: int) -> bool:
        if place.name in self._state:
            whole = self._state[place.name]
            _set(place, whole if layout is None else layout.take(whole, rank))
            return True
        if place.name not in self._in_files:
            return False
        files, name = self._in_files[place.name]
        _set(place, files.read(name, layout.shard if layout is not None else None, rank))
        return True


def _layout(record: ShardedModel | None, place: _Place) -> ParamLayout | None:
    """The layout of a parameter; None for any other tensor, and if the model is not sharded."""
    return record.layout.of(getattr(place.holder, place.leaf)) if record is not None else None


def _set(place: _Place, value: Tensor) -> None:
    """Gives a tensor its values. A parameter stays the same object, so that tied parameters stay tied."""
    current = getattr(place.holder, place.leaf)
    if tuple(value.shape) != tuple(current.shape):
        raise ValueError(
            f"{place.name}: weights of shape {list(value.shape)} were found for a tensor of {list(current.shape)}; they belong "
            "to another configuration"
        )
    if isinstance(current, nn.Parameter):
        with torch.no_grad():
            rows = rows_held(current)
            local_rows(current).copy_(value if rows is None else value[slice(*rows)])
    else:
        kept = place.holder._buffers if place.leaf in place.holder._buffers else place.holder.__dict__
        kept[place.leaf] = value.to(current.dtype, copy=True)
