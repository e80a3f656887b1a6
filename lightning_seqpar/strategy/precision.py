"""The user's precision plugin, changed to clip by the norm of the whole model's gradient and to skip steps on all ranks alike."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_seqpar.layout.param_layout import local_rows
from lightning_seqpar.releases import pl
from lightning_seqpar.strategy.steps import Steps


def clip_by_norm(parameters: Iterable[Tensor], total: Tensor, limit: float) -> None:
    """Scale gradients whose norm is ``total`` (0-dim) down to ``limit``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    scale = (float(limit) / (total + 1e-6)).clamp(max=1.0)
    for grad in (local_rows(p.grad) for p in parameters if p.grad is not None):
        grad.mul_(scale.to(grad.device))


class _ShardedPrecision(pl.plugins.precision.Precision):
    """Methods that take the place of those of the user's plugin, in a class that is derived from this one and the plugin's."""

    _owner: Callable[[], Steps]
    """A weak reference to the strategy's steps: the strategy outlives its precision plugin."""
    _own_class: type[pl.plugins.precision.Precision]

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Sum partial gradients before ``on_after_backward``, if that reads them."""
        self._owner().before_on_after_backward()
        return super().post_backward(tensor, module)

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._owner().sync_gradients(optimizer)
        super().clip_gradients(optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters: list[Tensor] = list(self.main_params(optimizer))
        clip_by_norm(parameters, self._owner().global_norm(parameters), clip_val)

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Check the gradients as the optimizer will read them, after the user's hooks."""
        super()._after_closure(model, optimizer)
        self._owner().check_step(optimizer)


def with_global_clipping(plugin: pl.plugins.precision.Precision, owner: Steps) -> pl.plugins.precision.Precision:
    """Copy the user's precision plugin to clip by the norm of the whole gradient; checkpoints know it by its class's name."""
    clipping = copy.copy(plugin)
    plugin_class = type(plugin)
    if not issubclass(plugin_class, _ShardedPrecision):
        bases = _ShardedPrecision, plugin_class
        names = {"__qualname__": plugin_class.__qualname__, "_own_class": plugin_class}
        clipping.__class__ = type(plugin_class.__name__, bases, names)
    vars(clipping)["_owner"] = weakref.ref(owner)
    return clipping


class SharedGradScaler(ShardedGradScaler):
    """A scaler of losses whose ranks skip the same steps, also where replicas split gradients."""

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        every = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        held: Any = SimpleNamespace(param_groups=[{"params": [SimpleNamespace(grad=local_rows(p.grad)) for p in every]}])
        found: dict[torch.device, Tensor] = super()._unscale_grads_(held, inv_scale, found_inf, allow_fp16)
        return found


def share_overflows(plugin: Any, group: ProcessGroup) -> None:
    """Let a plugin's scaler skip a step on all ranks of ``group`` if one has a gradient that is not finite."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return
    if type(scaler) not in (torch.amp.GradScaler, torch.cuda.amp.GradScaler, ShardedGradScaler, SharedGradScaler):
        raise ValueError(
            f"a scaler of class {type(scaler).__name__}: its ranks would disagree about skipping a step where they hold different "
            "parts of the model; give MixedPrecision a torch.amp.GradScaler, or none"
        )
    shared = SharedGradScaler(plugin.device, enabled=scaler.is_enabled(), process_group=group)
    if scaler.is_enabled():
        shared.load_state_dict(scaler.state_dict())
    plugin.scaler = shared


def without_global_clipping(plugin: pl.plugins.precision.Precision) -> pl.plugins.precision.Precision:
    """A copy of a plugin that :func:`with_global_clipping` made, of the user's own class; any other plugin is returned as it is."""
    if not isinstance(plugin, _ShardedPrecision):
        return plugin
    own: pl.plugins.precision.Precision = copy.copy(plugin)
    own.__class__ = plugin._own_class
    vars(own).pop("_owner")
    return own
