"""What applying a plan changed of modules: found by comparing, taken back, and hidden from ``configure_optimizers``.

No style lists what it changes: a module's class and its own attributes are compared as a whole. Parameters and buffers are
cut in place and made whole again from their layouts; hooks are removed by their handles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_seqpar.layout.param_layout import ModelLayout


@dataclass(frozen=True)
class ModuleChange:
    """How one module differs from what the user wrote."""

    module: nn.Module
    own: type  # its class in the user's model
    other: type  # its class now
    added: frozenset[str]  # attributes that it did not have
    replaced: dict[str, Any]  # what attributes that it has had were before
    counts: dict[str, tuple[int, int]]  # whole numbers (features, heads) that differ: before, now

    def undo(self) -> None:
        """Give the module its own class and attributes back; what others have set since stays."""
        self.module.__class__ = self.own
        own = vars(self.module)
        for name in self.added:
            own.pop(name, None)
        own.update(self.replaced)


class ModuleSnapshot:
    """A module's class and attributes as they are when this is made."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._kind, self._attributes = module, type(module), dict(vars(module))

    def change(self) -> ModuleChange | None:
        """What is different now; none if nothing is."""
        before, now = self._attributes, vars(self._module)
        added = frozenset(now.keys() - before.keys())
        replaced = {name: value for name, value in before.items() if name in now and now[name] is not value}
        if type(self._module) is self._kind and not added and not replaced:
            return None
        counts = {
            name: (value, now[name])
            for name, value in replaced.items()
            if type(value) is int and type(now[name]) is int and value != now[name]
        }
        return ModuleChange(self._module, self._kind, type(self._module), added, replaced, counts)


def changes_since(snapshots: Iterable[ModuleSnapshot]) -> list[ModuleChange]:
    """Every module that differs from its snapshot."""
    return [change for snapshot in snapshots if (change := snapshot.change()) is not None]


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
        if asked is not None and found is not None and found.is_sharded:
            shape = torch.Size(found.global_shape)
            if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
                return shape
            if func is Tensor.size:
                dim = args[1] if len(args) > 1 else kwargs.get("dim")
                return shape if dim is None else shape[dim]
            if func in (Tensor.numel, Tensor.nelement, torch.numel):
                return math.prod(shape)
            if func is Tensor.__len__:
                return shape[0]
        return func(*args, **kwargs)


@contextmanager
def as_written(changed: Sequence[ModuleChange], layout: ModelLayout) -> Iterator[None]:
    """Shows ``configure_optimizers`` the model that the user wrote: its classes, its numbers and the whole shapes of parameters.

    Learning rates that follow from a weight's width (muP), groups by shape or by a module's exact class are then what they are in
    one process. Nothing can be run or copied meanwhile: the weights are shards.
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
