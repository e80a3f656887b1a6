"""Models that are made on the meta device: their weights are read or drawn one tensor at a time, and cut at once."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_seqpar.config import nearest
from lightning_seqpar.distributed.autograd import storage_id
from lightning_seqpar.init.deferred import DeferredInit, TensorRef
from lightning_seqpar.layout.adapters import is_adapted
from lightning_seqpar.layout.param_layout import ParamLayout
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.parallel.apply import ShardedModel

_SOURCE = "_seqpar_weights"
_Module = TypeVar("_Module", bound=nn.Module)


class _Source(str):
    """The path of a module's weights, and what it held when it was told: it may be wrapped, and its names changed, since.

    Args:
        path: as :func:`weights_from` takes it.
        tensors: parameters and buffers that files fill, by their names in the module.
        since: how many operations had been remembered then.
    """

    def __new__(cls, path: str, tensors: dict[str, Tensor], since: int) -> _Source:
        return super().__new__(cls, path)

    def __init__(self, path: str, tensors: dict[str, Tensor], since: int) -> None:
        self.tensors, self.since = tensors, since
        # Held, so that their addresses stay theirs: a cast gives a parameter another.
        self.storages = {storage_id(tensor): (name, tensor.untyped_storage()) for name, tensor in tensors.items()}
        self._versions = {name: tensor._version for name, tensor in tensors.items()}
        self._names: dict[int, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            self._names[id(tensor)].append(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Source:
        copied = _Source(str(self), copy.deepcopy(self.tensors, memo), self.since)
        copied._versions.update(dict.fromkeys(self.changed(), -1))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _Source, (str(self), self.tensors, self.since)

    def names(self, tensor: Tensor) -> list[str]:
        """Under which the module held a tensor."""
        return self._names.get(id(tensor), [])

    def changed(self) -> list[str]:
        """Tensors into which something was written since."""
        return [name for name, tensor in self.tensors.items() if tensor._version != self._versions[name]]


def weights_from(module: _Module, path: str | Path) -> _Module:
    """Let the parameters and buffers of ``module`` come from safetensors files.

    A module on the meta device keeps the path: the strategy reads its weights when the model is cut, of each tensor the
    rank's own part. Any other module is filled now. Write it in ``configure_model``::

        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)
        weights_from(self.model, "llama-folder")

    Args:
        module: whose names the files use.
        path: a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with either, as ``save_pretrained`` writes.

    Returns:
        The module.

    Raises:
        ValueError: if there are no such files, a tensor is missing, or one has another shape.
        ImportError: without the extra ``hf``.
    """
    files = WeightFiles(path, module)
    files.check()
    held = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    filled = {name: tensor for name, tensor in held if files.has(name)}
    with torch.no_grad():
        for name, tensor in {id(tensor): (name, tensor) for name, tensor in filled.items()}.values():
            if not tensor.is_meta:
                tensor.copy_(files.read(name))
    if any(tensor.is_meta for tensor in filled.values()):
        late = {name: tensor for name, tensor in filled.items() if tensor.is_meta}
        module.__dict__[_SOURCE] = _Source(str(path), late, DeferredInit.count())
    return module


class WeightFiles:
    """Safetensors files, read by the names of a module.

    Args:
        path: as :func:`weights_from` takes it.
        module: which one; of a Hugging Face model the names that its library writes are known too.
    """

    def __init__(self, path: str | Path, module: nn.Module) -> None:
        self.path, self._module = Path(path), module
        self._files = self._find()
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self._files.values())):
            with self._open(file) as opened:
                self._shapes.update({key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()})  # noqa: SIM118
        self._renamed: dict[str, str] = {}
        self._converted: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        if hasattr(module, "base_model_prefix") and hasattr(module, "config"):
            self._read_mapping()

    def _read_mapping(self) -> None:
        """How a Hugging Face model's names differ from the files': renamed, or made of several tensors (experts)."""
        from transformers import conversion_mapping, core_model_loading

        model: Any = self._module
        transforms: list[Any] = list(conversion_mapping.get_model_conversion_mapping(model))
        converters = [one for one in transforms if isinstance(one, core_model_loading.WeightConverter)]
        renamings = [one for one in transforms if one not in converters]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        for key in sorted(self._files, key=core_model_loading.dot_natural_key):
            name, pattern = core_model_loading.rename_source_key(key, renamings, converters)
            if pattern is None:
                self._renamed[name] = key
            elif len(by_pattern[pattern].target_patterns) == 1:
                self._converted.setdefault(name, (by_pattern[pattern], []))[1].append((pattern, key))

    def _find(self) -> dict[str, Path]:
        path = self.path
        if path.is_dir():
            found = [f for f in ("model.safetensors.index.json", "model.safetensors") if (path / f).is_file()]
            others = sorted(file.name for file in path.glob("*.safetensors"))
            if not found and len(others) != 1:
                raise ValueError(
                    f"weights_from: {str(path)!r} holds no model.safetensors and no model.safetensors.index.json (there is: "
                    f"{', '.join(sorted(f.name for f in path.iterdir())[:5]) or 'nothing'}); save the model with "
                    "save_pretrained, which writes them"
                )
            path = path / (found or others)[0]
        if not path.is_file():
            raise ValueError(
                f"weights_from: {str(path)!r} does not exist; give a safetensors file, its index, or a folder"
            )
        if path.name.endswith(".json"):
            told = json.loads(path.read_text())
            if not isinstance(told, Mapping) or not isinstance(told.get("weight_map"), Mapping):
                raise ValueError(
                    f"weights_from: {str(path)!r} has no 'weight_map'; give a model.safetensors.index.json"
                )
            files = {key: path.parent / name for key, name in told["weight_map"].items()}
            if missing := sorted({file.name for file in files.values() if not file.is_file()}):
                raise ValueError(f"weights_from: {str(path)!r} names {missing[0]}, which is not beside it")
            return files
        if path.suffix != ".safetensors":
            raise ValueError(f"weights_from: {str(path)!r} is no safetensors file; save the model with save_pretrained")
        with self._open(path) as opened:
            return dict.fromkeys(opened.keys(), path)

    @staticmethod
    def _open(file: Path) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ImportError("reading weights needs safetensors: pip install 'lightning-seqpar[hf]'") from None
        try:
            return safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"weights_from: {str(file)!r} can't be read: {error}") from None

    def _names(self, name: str) -> list[str]:
        """A name with and without a library's prefix of the base model."""
        prefix = getattr(self._module, "base_model_prefix", "")
        if not prefix:
            return [name]
        return [name, name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"]

    def _key(self, name: str) -> str | None:
        """Under which name one tensor of the files is the module's ``name``."""
        keys = (self._renamed.get(one, one) for one in self._names(name))
        return next((key for key in keys if key in self._files), None)

    def _parts(self, name: str) -> tuple[str, Any, list[tuple[str, str]]] | None:
        """Of which tensors the module's ``name`` is made."""
        return next(((one, *self._converted[one]) for one in self._names(name) if one in self._converted), None)

    def has(self, name: str) -> bool:
        """Whether the files hold the module's tensor ``name``."""
        return self._key(name) is not None or self._parts(name) is not None

    def check(self) -> None:
        """Whether every parameter is there, with its shape.

        Raises:
            ValueError: naming what is not.
        """
        found: dict[int, str | None] = {}
        names: dict[int, list[str]] = defaultdict(list)
        tensors = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            tensors[id(parameter)] = parameter
            names[id(parameter)].append(name)
            if self.has(name):
                found[id(parameter)] = self._key(name)
        if missing := [names[one][0] for one in tensors if one not in found]:
            spare = sorted(set(self._files) - {key for key in found.values() if key})
            raise ValueError(
                f"weights_from: {str(self.path)!r} has no {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''} "
                f"({len(missing)} of {len(tensors)} parameters are missing); it has "
                f"{nearest(missing[0], spare or list(self._files))}. The file must use the module's own names: call "
                "weights_from before adapters or wrappers change them, or load the model whole once (from_pretrained) and save "
                "its state_dict() by safetensors.torch.save_model"
            )
        self._check_ties(names)
        for one, key in found.items():
            if key is not None and self._shapes[key] != tuple(tensors[one].shape):
                raise ValueError(
                    f"weights_from: {str(self.path)!r} holds {key} with shape {list(self._shapes[key])}, and the model's "
                    f"{names[one][0]} has {list(tensors[one].shape)}; it belongs to another configuration"
                )

    def _check_ties(self, names: Mapping[int, list[str]]) -> None:
        """What the module ties must be one tensor in the files, or the same twice."""
        for tied in names.values():
            keys = list(dict.fromkeys(key for name in tied if (key := self._key(name)) is not None))
            whole = [self._read_key(key) for key in keys] if len(keys) > 1 else []
            for key, value in zip(keys[1:], whole[1:], strict=True):
                if not torch.equal(whole[0], value):
                    raise ValueError(
                        f"weights_from: {str(self.path)!r} holds {keys[0]} and {key}, which differ, and the model ties them; set "
                        "tie_word_embeddings to false in its config if they were trained apart"
                    )

    def _read_key(self, key: str) -> Tensor:
        with self._open(self._files[key]) as opened:
            return opened.get_tensor(key)  # type: ignore[no-any-return]

    def contents(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each tensor, by its name in the files."""
        return {key: (self._shapes[key], self._dtype(key)) for key in self._files}

    def dtype(self, name: str) -> torch.dtype:
        """In which the files hold the module's tensor ``name``."""
        key, parts = self._key(name), self._parts(name)
        return self._dtype(key if key is not None or parts is None else parts[2][0][1])

    def _dtype(self, key: str | None) -> torch.dtype:
        assert key is not None
        with self._open(self._files[key]) as opened:
            if not self._shapes[key]:
                return opened.get_tensor(key).dtype  # type: ignore[no-any-return]
            return opened.get_slice(key)[:0].dtype  # type: ignore[no-any-return]

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """The module's tensor ``name``, or of it what ``rank`` holds: nothing else is read, unless it is made of several."""
        key = self._key(name)
        if key is None:
            whole = self._convert(name)
            return whole if shard is None else shard.take(whole, rank)
        with self._open(self._files[key]) as opened:  # opened for one tensor: its pages are let go with it
            if shard is None:
                return opened.get_tensor(key)  # type: ignore[no-any-return]
            sliced = opened.get_slice(key)
            before = (slice(None),) * shard.dim
            held = [(*before, slice(start, stop)) for start, stop in shard.ranges[rank]]
            return shard.join([sliced[part] for part in held])

    def _convert(self, name: str) -> Tensor:
        parts = self._parts(name)
        assert parts is not None
        target, converter, sources = parts
        fresh = converter.copy(converter.source_patterns, converter.target_patterns, operations=converter.operations)
        for pattern, key in sources:
            with self._open(self._files[key]) as opened:
                fresh.add_tensor(target, key, pattern, opened.get_tensor(key))
        made = fresh.convert(target, model=self._module, config=self._module.config)[target]
        return made[0] if isinstance(made, list) else made  # type: ignore[no-any-return]


# ---- models without numbers ------------------------------------------------------------------------------------


@dataclass
class _Place:
    """Where a tensor belongs: ``holder.leaf``, and its name in the model."""

    name: str
    holder: nn.Module
    leaf: str
    ref: TensorRef


class LateWeights:
    """The tensors of a model that has none yet, found before anything is done to it.

    Args:
        model: with parameters or buffers on the meta device.
        recorder: of the contexts that the model may have been made in.
        state: weights of a checkpoint, which count more than files.
    """

    def __init__(
        self, model: nn.Module, recorder: DeferredInit | None = None, state: Mapping[str, Tensor] | None = None
    ) -> None:
        self._model, self._state = model, state or {}
        self._sources: dict[str, tuple[_Source, WeightFiles]] = {
            name: (source, WeightFiles(source, module))
            for name, module in model.named_modules()
            if (source := module.__dict__.get(_SOURCE)) is not None
        }
        # Read before anything is written here; to load a state into meta tensors, which does nothing, writes too.
        self._changed = {
            (path, name) for path, (source, _) in self._sources.items() if not self._state for name in source.changed()
        }
        self._recorder = recorder or DeferredInit()
        self._complete()
        self._parameters: dict[int, list[_Place]] = defaultdict(list)
        self._others: dict[int, list[_Place]] = defaultdict(list)
        for name, module in model.named_modules():
            others = {**vars(module), **module._buffers}
            own = [(leaf, one, self._parameters) for leaf, one in module._parameters.items()]
            own += [(leaf, one, self._others) for leaf, one in others.items()]
            for leaf, tensor, into in own:
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    ref = self._recorder.ref(tensor)
                    into[ref.storage].append(_Place(f"{name}.{leaf}" if name else leaf, module, leaf, ref))

    @property
    def shared(self) -> Any:
        """Random states and given numbers, to be made equal on all ranks."""
        return self._recorder.shared

    @shared.setter
    def shared(self, told: Any) -> None:
        self._recorder.shared = told

    def digest(self) -> str:
        """What is done to the tensors, for a comparison of ranks."""
        return self._recorder.digest()

    def _complete(self) -> None:
        """Run what initialises a module outside its ``__init__``, where nothing was remembered of its parameters."""
        for name, module in self._model.named_modules():
            if any(name == source or name.startswith(f"{source}.") or not source for source in self._sources):
                continue
            # Of the class: PEFT's wrappers pass on what they are asked for.
            inits = getattr(module, "initialize_weights", None) if hasattr(type(module), "_init_weights") else None
            inner = [p for p in module.parameters() if p.is_meta]
            skipped = callable(inits) and not getattr(module, "_is_hf_initialized", False)
            if inner and inits is not None and skipped:  # Hugging Face's own, which a meta device skips
                adapted = next((one for one, part in module.named_modules() if is_adapted(part)), None)
                inside = [f"{name}.{one}" if name else one for one, p in module.named_parameters() if p.is_meta]
                if adapted is not None and not all(one in self._state for one in inside):
                    raise ValueError(
                        f"{name or type(module).__name__}: it was made on the meta device without weights and adapted since "
                        f"({adapted}), and its own initialisation would go over the adapters; give its weights before it is "
                        "adapted, weights_from(module, folder), or make it outside torch.device('meta')"
                    )
                with self._recorder, torch.no_grad():
                    inits()
            blank = [p for p in module.parameters(recurse=False) if self._is_blank(p)]
            reset = getattr(module, "reset_parameters", None)
            if blank and callable(reset):
                with self._recorder, torch.no_grad():
                    reset()

    def _is_blank(self, tensor: Tensor) -> bool:
        return tensor.is_meta and not self._recorder.fills(tensor)

    def check(self) -> None:
        """Whether all that is missing will be there.

        Raises:
            ValueError: naming a tensor that nothing fills.
        """
        self._check_overlaps()
        drawn: list[_Place] = []
        read: set[int] = set()
        given = {
            key: (name, source.since)
            for source, _ in self._sources.values()
            for key, (name, _) in source.storages.items()
        }
        for places in (*self._parameters.values(), *self._others.values()):
            for place in places:
                tensor = getattr(place.holder, place.leaf)
                if place.name in self._state or place.name in self._found:
                    read.add(place.ref.storage)
                    continue
                self._check_known(place)
                drawn.append(place)
                if self._recorder.written_elsewhere(tensor):
                    raise ValueError(
                        f"{place.name}: it was made on the meta device, and initialised there outside configure_model, where "
                        "nothing remembers it; make and initialise the model in configure_model, or give its weights: "
                        "weights_from(module, folder)"
                    )
                if self._is_blank(tensor):
                    raise ValueError(
                        f"{place.name}: it was made on the meta device, and nothing says how it is filled: its module "
                        f"({type(place.holder).__name__}) has no reset_parameters. Make the model in configure_model (what is "
                        "done to meta tensors there is remembered), or give its weights: weights_from(module, folder)"
                    )
        for place in drawn:
            if place.ref.storage in given and place.ref.storage not in read:  # and not tied to what is filled
                raise ValueError(
                    f"{place.name}: it has the memory of {given[place.ref.storage][0]}, which weights_from fills, under another "
                    "name or as another parameter (weight_norm, a parametrization?); make the model outside "
                    "torch.device('meta') and load it whole"
                )
        self._recorder.check((place.ref for place in drawn), given)

    def _check_known(self, place: _Place) -> None:
        """A parameter that took the place of one that files fill would be drawn, and the files' numbers lost."""
        for _, source, files, inner in self._around(place.name):
            if isinstance(getattr(place.holder, place.leaf), nn.Parameter) and files.has(inner):
                raise ValueError(
                    f"{place.name}: it came after weights_from({str(source)!r}), which holds numbers of that name; change layers "
                    "(a resized embedding, a new head) before weights_from, or make the model outside torch.device('meta')"
                )

    def _check_overlaps(self) -> None:
        for places in self._parameters.values():
            seen: dict[int, _Place] = {id(getattr(place.holder, place.leaf)): place for place in places}
            ends = sorted(
                (place.ref.offset, place.ref.offset + place.ref.nbytes // place.ref.dtype.itemsize, place.name)
                for place in seen.values()
            )
            for (_, stop, one), (start, _, other) in itertools.pairwise(ends):
                if start < stop:
                    raise ValueError(
                        f"{one} and {other} are two parameters in one memory, which would part when the model is cut; tie them by "
                        "one nn.Parameter under both names"
                    )

    def _around(self, name: str) -> Iterator[tuple[str, _Source, WeightFiles, str]]:
        """What was given for modules around a tensor: their names, and its own in each of them."""
        for path, (source, files) in self._sources.items():
            if name == path or not path or name.startswith(f"{path}."):
                yield path, source, files, name.removeprefix(f"{path}.") if path else name

    @functools.cached_property
    def _found(self) -> dict[str, tuple[WeightFiles, str]]:
        """Of what files fill: which, and its name there. Read once, before the numbers come."""
        places = (place for held in (self._parameters, self._others) for places in held.values() for place in places)
        return {place.name: found for place in places if (found := self._source_of(place)) is not None}

    def _source_of(self, place: _Place) -> tuple[WeightFiles, str] | None:
        """In which files a tensor is, and under which name: that which it had when they were given."""
        tensor = getattr(place.holder, place.leaf)
        for path, source, files, inner in self._around(place.name):
            known = source.names(tensor)
            names = known if known or isinstance(tensor, nn.Parameter) else [inner]
            found = next((name for name in names if files.has(name)), None)
            if found is None:
                continue
            if (path, found) in self._changed:
                raise ValueError(
                    f"{place.name}: it was changed in place after weights_from({str(source)!r}), whose numbers are read later "
                    "and would undo that; change weights in the files, or make the model outside torch.device('meta')"
                )
            return files, found
        return None

    # ---- filling ---------------------------------------------------------------------------------------------

    def fill_buffers(self) -> None:
        """Give all that is no parameter its numbers; it is small, and read before the model is cut."""

        def take(places: Sequence[_Place], tensor: Callable[[TensorRef], Tensor]) -> None:
            for place in places:
                _set(place, tensor(place.ref).clone())

        self._fill(self._others, take)

    def fill_parameters(self, record: ShardedModel | None) -> None:
        """Give every parameter its numbers: of each this rank's part, and no second tensor beside it."""
        rank = record.groups.rank("tp") if record is not None else 0
        # Room for the parts first: the whole tensors then come and go in the same place behind them.
        for place in (place for places in self._parameters.values() for place in places):
            parameter = getattr(place.holder, place.leaf)
            if parameter.is_meta:
                room = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, room)

        def take(places: Sequence[_Place], tensor: Callable[[TensorRef], Tensor]) -> None:
            done: set[int] = set()
            for place in places:
                parameter = getattr(place.holder, place.leaf)
                if id(parameter) not in done:  # not tied
                    done.add(id(parameter))
                    layout = _layout(record, parameter)
                    _copy_part(place, tensor(place.ref), layout.shard if layout is not None else None, rank)

        self._fill(self._parameters, take, record, rank)
        for module in self._model.modules():
            module.__dict__.pop(_SOURCE, None)  # its work is done

    def _fill(
        self,
        wanted: Mapping[int, list[_Place]],
        take: Callable[[Sequence[_Place], Callable[[TensorRef], Tensor]], None],
        record: ShardedModel | None = None,
        rank: int = 0,
    ) -> None:
        drawn: dict[int, list[_Place]] = {}
        for key, places in wanted.items():
            read = [self._read(place, record, rank) for place in places]  # each, not the first alone
            if not any(read):
                drawn[key] = places
        if drawn:
            refs = [place.ref for places in drawn.values() for place in places]
            self._recorder.replay(refs, lambda key, tensor: take(drawn[key], tensor))

    def _read(self, place: _Place, record: ShardedModel | None, rank: int) -> bool:
        """Take a tensor from a checkpoint or a file, if one has it."""
        current = getattr(place.holder, place.leaf)
        layout = _layout(record, current) if isinstance(current, nn.Parameter) else None
        if place.name in self._state:
            whole = self._state[place.name]
            local = layout.take(whole, rank) if layout is not None else whole
        elif (found := self._found.get(place.name)) is not None:
            files, name = found
            local = files.read(name, layout.shard if layout is not None else None, rank)
        else:
            return False
        _set(place, local)
        return True


def _layout(record: ShardedModel | None, parameter: Tensor) -> ParamLayout | None:
    return record.layout.of(parameter) if record is not None else None


def _copy_part(place: _Place, whole: Tensor, shard: Shard | None, rank: int) -> None:
    """What ``rank`` holds of a whole tensor, without another copy of it on the way."""
    if shard is None or shard.padded is not None:
        _set(place, whole if shard is None else shard.take(whole, rank))
        return
    parameter, at = getattr(place.holder, place.leaf), 0
    with torch.no_grad():
        for start, stop in shard.ranges[rank]:
            parameter.narrow(shard.dim, at, stop - start).copy_(whole.narrow(shard.dim, start, stop - start))
            at += stop - start


def _set(place: _Place, value: Tensor) -> None:
    """Numbers for a tensor; a parameter stays the same object, so that ties stay tied."""
    current = getattr(place.holder, place.leaf)
    if tuple(value.shape) != tuple(current.shape):
        raise ValueError(
            f"{place.name}: weights of shape {list(value.shape)} were found for a tensor of {list(current.shape)}; they belong "
            "to another configuration"
        )
    if isinstance(current, nn.Parameter):
        with torch.no_grad():
            current.copy_(value)
    elif place.leaf in place.holder._buffers:
        place.holder._buffers[place.leaf] = value.to(current.dtype)
    else:
        place.holder.__dict__[place.leaf] = value.to(current.dtype)
