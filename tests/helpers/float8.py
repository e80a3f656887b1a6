"""Models whose linears in the blocks compute in float8 on one process: by torchao's casts, multiplied in float64."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import CastConfig, ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

from tests.helpers import fit


class _Product(torch.autograd.Function):
    """``x Wᵀ``, ``[b, ..., h]`` → ``[b, ..., f]``; every ``parts``-th sample, as one replica has them, is cast together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, config: Float8LinearConfig, parts: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.config, ctx.parts = config, parts
        w = _cast(weight.t(), config.cast_config_weight, 0, config)
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        for part in range(parts):
            out[part::parts] = _cast(x[part::parts], config.cast_config_input, -1, config) @ w
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), config = ctx.saved_tensors, ctx.config
        w = _cast(weight.t(), config.cast_config_weight_for_grad_input, -1, config)
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        for part in range(ctx.parts):
            own, read = grad[part :: ctx.parts], x[part :: ctx.parts]
            dx[part :: ctx.parts] = _cast(own, config.cast_config_grad_output, -1, config) @ w.t()
            turned = _cast(own, config.cast_config_grad_output_for_grad_weight, 0, config).flatten(0, -2).t()
            dw += turned @ _cast(read, config.cast_config_input_for_grad_weight, 0, config).flatten(0, -2)
        return dx, dw, None, None


def _cast(x: Tensor, how: CastConfig, dim: int, config: Float8LinearConfig) -> Tensor:
    """What float8 has of a tensor, in its own type."""
    by_rows = how.scaling_granularity is ScalingGranularity.AXISWISE
    flat = hp_tensor_to_float8_dynamic(
        x.reshape(-1, x.shape[-1]),
        how.target_dtype,
        None,
        scaling_granularity=how.scaling_granularity,
        axiswise_dim=dim if by_rows else None,
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    return flat.to_original_precision().reshape(x.shape)


def _linear(module: Any, config: Float8LinearConfig, parts: int, x: Tensor) -> Tensor:
    """The forward of a linear, also of one that keeps its weight as ``[in, out]``."""
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()
    out = _Product.apply(x, weight, config, parts)
    return out if module.bias is None else out + module.bias


def by_hand(model: str, args: dict[str, Any], recipe: str, names: list[str], parts: int = 1) -> L.LightningModule:
    """A model of the helpers, its linears of those names in float8, in float64."""
    module: L.LightningModule = fit.class_named(model)(**args)
    config = Float8LinearConfig.from_recipe_name(recipe)
    for name in names:
        linear = module.get_submodule(name)
        linear.forward = functools.partial(_linear, linear, config, parts)  # type: ignore[method-assign]
    return module


def by_torchao(model: str, args: dict[str, Any], recipe: str, names: list[str]) -> L.LightningModule:
    """The same by torchao's own linears."""
    module: L.LightningModule = fit.class_named(model)(**args)
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in names)
    return module


class InFloat8(Callback):
    """The names of the linears that compute in float8."""

    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self.names = [name for name, one in pl_module.named_modules() if getattr(one, "float8", None) is not None]
