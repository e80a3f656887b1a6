"""Tensors in whatever users put them into: torch's pytrees, and the mappings, sequences and dataclasses that it does not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def _is_held(leaf: Any) -> bool:
    """Whether what is a leaf to torch holds things (Hugging Face's ``BatchEncoding`` is a mapping of its own)."""
    if isinstance(leaf, Mapping) or (isinstance(leaf, Sequence) and not isinstance(leaf, str | bytes)):
        return True
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in order."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))
        elif isinstance(leaf, Sequence):
            if _is_held(leaf):
                yield from tensors_in(list(leaf))
        elif _is_held(leaf):
            yield from tensors_in([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])


def map_tensors(change: Callable[[Tensor], Any], batch: Any) -> Any:
    """The batch with ``change`` of each tensor in its place, in containers of the same kinds."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        return apply_to_collection(leaf, Tensor, change, allow_frozen=True) if _is_held(leaf) else leaf

    return tree_map(changed, batch)
