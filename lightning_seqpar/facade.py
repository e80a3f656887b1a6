"""What ``configure_optimizers`` sees of a sharded model: the one that the user wrote.

Learning rates that follow from a weight's width (muP), groups by shape or by a module's exact class are then what they
are in one process. The optimizers themselves hold shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_seqpar.layout import ModelLayout

_NUMELS = (Tensor.numel, Tensor.nelement, torch.numel)


class _WholeShapes(TorchFunctionMode):
    """Sharded parameters that are asked for their shape tell that of the whole."""

    def __init__(self, layout: ModelLayout) -> None:
        super().__init__()
        self._layout = layout

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = args[0] if args else kwargs.get("input")
        found = self._layout.of(asked) if isinstance(asked, Tensor) else None
        if asked is None or found is None or not found.is_sharded:
            return func(*args, **kwargs)
        shape = torch.Size(found.global_shape)
        if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
            return shape
        if func is Tensor.size:
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return shape if dim is None else shape[dim]
        if func in _NUMELS:
            return math.prod(shape)
        if func is Tensor.__len__:
            return shape[0]
        if func == Tensor.nbytes.__get__:  # type: ignore[attr-defined]
            return math.prod(shape) * asked.element_size()
        return func(*args, **kwargs)


@contextmanager
def as_written(classes: Sequence[tuple[nn.Module, type, type]], layout: ModelLayout) -> Iterator[None]:
    """Modules have their own classes again, and sharded parameters tell their whole shapes.

    Args:
        classes: of each module that was given another class, its own and the other.
        layout: of the parameters.
    """
    for module, own, _ in classes:
        module.__class__ = own
    try:
        with _WholeShapes(layout):
            yield
    finally:
        for module, _, other in classes:
            module.__class__ = other
