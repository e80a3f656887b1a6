"""What ``configure_optimizers`` sees of a sharded model: the one that the user wrote.

Learning rates that follow from a weight's width (muP), groups by shape or by a module's exact class are then what they
are in one process. The optimizers themselves hold shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_seqpar.layout.param_layout import ModelLayout
from lightning_seqpar.parallel.module_changes import ModuleChange

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
def as_written(changed: Sequence[ModuleChange], layout: ModelLayout) -> Iterator[None]:
    """Modules have their own classes and numbers again, and sharded parameters tell their whole shapes.

    Nothing can be run or copied meanwhile: the weights are shards.
    """
    with ExitStack() as stack:
        for one in changed:
            if type(one.module) is one.other:
                stack.enter_context(_as_own(one))
        stack.enter_context(_WholeShapes(layout))
        yield


@contextmanager
def _as_own(one: ModuleChange) -> Iterator[None]:
    module, held = one.module, vars(one.module)  # instances may have a forward of their own

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"configure_optimizers runs or copies a {one.own.__name__} whose weights are this rank's shards by then; make copies "
            "in __init__ or configure_model, and run the model in on_fit_start or later"
        )

    kept: dict[str, Any] = {key: held[key] for key in ("forward", "__deepcopy__") if key in held}
    held.update({key: whole for key, (whole, _) in one.counts.items()})
    held.update(forward=refuse, __deepcopy__=refuse)
    module.__class__ = one.own
    try:
        yield
    finally:
        for key in ("forward", "__deepcopy__"):
            del held[key]
        held.update(kept)
        held.update({key: local for key, (_, local) in one.counts.items()})
        if type(module) is one.own:
            module.__class__ = one.other
