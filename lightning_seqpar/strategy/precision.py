"""The user's precision plugin, clipping by the global norm."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer


class GradientOwner(Protocol):
    """What clipping needs of the strategy."""

    def sync_gradients(self, optimizer: Optimizer) -> None:
        """Sum partial gradients, if any are due."""

    def global_norm(self, parameters: list[Tensor]) -> Tensor:
        """Norm of the whole model's gradient."""

    def check_step(self, optimizer: Optimizer) -> None:
        """Look at the gradients as the optimizer will read them."""

    def before_on_after_backward(self) -> None:
        """Make gradients whole for a user who looks at them there."""


class _ShardedPrecision(Precision):
    """Mixed in before the class of the user's plugin, in a subclass of it."""

    _owner: Callable[[], GradientOwner | None]

    def _strategy(self) -> GradientOwner:
        owner = self._owner()
        assert owner is not None, "the strategy outlives its precision plugin"
        return owner

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        self._strategy().before_on_after_backward()
        return super().post_backward(tensor, module)

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._strategy().sync_gradients(optimizer)
        super().clip_gradients(optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = [p for p in self.main_params(optimizer) if p.grad is not None]
        total = self._strategy().global_norm(list(self.main_params(optimizer)))
        torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), total)

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        super()._after_closure(model, optimizer)
        self._strategy().check_step(optimizer)


def with_global_clipping(plugin: Precision, owner: GradientOwner) -> Precision:
    """A copy of ``plugin`` whose class is a subclass of its own; the plugin itself stays as it is.

    The name stays too: checkpoints hold a plugin's state under it.
    """
    made = copy.copy(plugin)
    kind = type(plugin)
    if not issubclass(kind, _ShardedPrecision):
        made.__class__ = type(kind.__name__, (_ShardedPrecision, kind), {"__qualname__": kind.__qualname__})
    vars(made)["_owner"] = weakref.ref(owner)
    return made
