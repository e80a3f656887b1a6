"""Tensors in whatever users put them into: torch's pytrees, and the mappings, sequences and dataclasses that it does not know."""

from __future__ import annotations

import array
import copy
import dataclasses
from collections import UserString
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_NO_HOLDERS = (Tensor, str, UserString, bytes, bytearray, memoryview, range, array.array)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in order."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif items := _items(leaf):
            yield from tensors_in(list(items.values()))


def map_tensors(change: Callable[[Tensor], Any], batch: Any) -> Any:
    """The batch with ``change`` of each tensor in its place, in containers of the same kinds; what holds none is as it was."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if next(tensors_in(list(_items(leaf).values())), None) is None:
            return leaf
        return _with(leaf, {key: map_tensors(change, value) for key, value in _items(leaf).items()})

    return tree_map(changed, batch)


def _items(leaf: Any) -> dict[Any, Any]:
    """What is in something that torch takes for a leaf (Hugging Face's ``BatchEncoding`` is a mapping of its own)."""
    if isinstance(leaf, _NO_HOLDERS):
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
    """Another one that holds these."""
    if isinstance(leaf, Mapping) and not isinstance(leaf, MutableMapping):
        return type(leaf)(items)  # type: ignore[call-arg]
    if isinstance(leaf, Sequence) and not isinstance(leaf, MutableSequence):
        return type(leaf)(items.values())  # type: ignore[call-arg]
    other = copy.copy(leaf)
    for key, value in items.items():
        if isinstance(leaf, Mapping | Sequence):
            other[key] = value
        else:
            object.__setattr__(other, key, value)  # frozen ones too
    return other
