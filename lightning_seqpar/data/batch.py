"""The tensors of a batch in whatever containers they are: also mappings and dataclasses that torch's pytrees don't know."""

from __future__ import annotations

import array
import copy
import dataclasses
from collections import UserString
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_NO_CONTAINERS = (Tensor, str, UserString, bytes, bytearray, memoryview, range, array.array)
"""Types that are sequences, or tensors, and hold no tensors."""


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in order."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif items := _items(leaf):
            yield from tensors_in(list(items.values()))


def map_tensors(change: Callable[[Tensor], Any], batch: Any) -> Any:
    """Makes a batch with what ``change`` makes of each tensor. A container that holds none is the very object of the old batch."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if next(tensors_in(list(_items(leaf).values())), None) is None:
            return leaf
        return _with(leaf, {key: map_tensors(change, value) for key, value in _items(leaf).items()})

    return tree_map(changed, batch)


def own_tensors(batch: Any) -> Any:
    """The batch with tensors of its own, since a step may change them in place; one that it holds twice is still one."""
    made: dict[int, Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.clone()
        return made[id(tensor)]

    return map_tensors(own, batch)


def _items(leaf: Any) -> dict[Any, Any]:
    """Returns the items of a container that torch's pytrees take for a leaf (Hugging Face's ``BatchEncoding``), by key or field."""
    if isinstance(leaf, _NO_CONTAINERS):
        return {}
    if isinstance(leaf, Mapping):
        return dict(leaf.items())
    if isinstance(leaf, Sequence):
        return dict(enumerate(leaf))
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        names = [field.name for field in dataclasses.fields(leaf)]
        return {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}
    return {}


def _with(leaf: Any, items: dict[Any, Any]) -> Any:
    if isinstance(leaf, Mapping) and not isinstance(leaf, MutableMapping):
        return type(leaf)(items)  # type: ignore[call-arg]
    if isinstance(leaf, Sequence) and not isinstance(leaf, MutableSequence):
        return type(leaf)(items.values())  # type: ignore[call-arg]
    other = copy.copy(leaf)
    for key, value in items.items():
        if isinstance(leaf, Mapping | Sequence):
            other[key] = value
        else:
            object.__setattr__(other, key, value)  # works for frozen dataclasses too
    return other
