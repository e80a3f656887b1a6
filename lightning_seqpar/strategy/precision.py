"""The user's precision plugin, changed to clip by the norm of the whole model's gradient."""

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
    """The methods of the strategy that clipping calls."""

    def sync_gradients(self, optimizer: Optimizer) -> None:
        """Sum the partial gradients of an optimizer's parameters, unless that is done already."""

    def global_norm(self, parameters: list[Tensor]) -> Tensor:
        """The norm of the whole model's gradients of these parameters."""

    def check_step(self, optimizer: Optimizer) -> None:
        """Check the gradients as the optimizer will read them."""

    def before_on_after_backward(self) -> None:
        """Sum partial gradients at once, if a user's hook reads them before the update."""


class _ShardedPrecision(Precision):
    """Methods that take the place of those of the user's plugin, in a class that is derived from this one and the plugin's."""

    _owner: Callable[[], GradientOwner | None]
    _own_class: type[Precision]

    def _strategy(self) -> GradientOwner:
        """The strategy, to which the plugin has a weak reference."""
        owner = self._owner()
        assert owner is not None, "the strategy outlives its precision plugin"
        return owner

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Sum partial gradients before ``on_after_backward``, if that reads them."""
        self._strategy().before_on_after_backward()
        return super().post_backward(tensor, module)

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Sum partial gradients, then clip."""
        self._strategy().sync_gradients(optimizer)
        super().clip_gradients(optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale this rank's gradients by the norm of the whole model's."""
        parameters = [p for p in self.main_params(optimizer) if p.grad is not None]
        total = self._strategy().global_norm(list(self.main_params(optimizer)))
        torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), total)

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Check the gradients as the optimizer will read them, after the user's hooks."""
        super()._after_closure(model, optimizer)
        self._strategy().check_step(optimizer)


def with_global_clipping(plugin: Precision, owner: GradientOwner) -> Precision:
    """Make a copy of a precision plugin that clips by the norm of the whole model's gradient.

    The class of the copy is derived from the plugin's and has its name, under which checkpoints hold a plugin's state.

    Args:
        plugin: the user's plugin, which is not changed.
        owner: the strategy.
    """
    clipping = copy.copy(plugin)
    plugin_class = type(plugin)
    if not issubclass(plugin_class, _ShardedPrecision):
        bases = _ShardedPrecision, plugin_class
        names = {"__qualname__": plugin_class.__qualname__, "_own_class": plugin_class}
        clipping.__class__ = type(plugin_class.__name__, bases, names)
    vars(clipping)["_owner"] = weakref.ref(owner)
    return clipping


def without_global_clipping(plugin: Precision) -> Precision:
    """A copy of a plugin that :func:`with_global_clipping` made, of the user's own class; any other plugin is returned as it is."""
    if not isinstance(plugin, _ShardedPrecision):
        return plugin
    own: Precision = copy.copy(plugin)
    own.__class__ = plugin._own_class
    vars(own).pop("_owner")
    return own
