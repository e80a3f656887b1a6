"""Optimizers that are not torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class _EachAlone(Optimizer):
    """One that updates a parameter from its value, its gradient and what is kept of it."""

    def __init__(self, params: Any, lr: float = 1e-4, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.change(p, p.grad, self.state[p], group)
        return loss

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_EachAlone):
    """As published (arXiv 2302.06675): the sign of an average of gradients."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-4, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay=weight_decay)

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        average = state.setdefault("exp_avg", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(average.lerp(grad, 0.1).sign(), alpha=-group["lr"])
        average.lerp_(grad, 0.01)


class Damped(_EachAlone):
    """Descends along the hyperbolic tangent of an average of gradients."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        average = state.setdefault("average", torch.zeros_like(p))
        p.sub_(average.lerp_(grad, 0.5).tanh() * group["lr"])


class Trusting(_EachAlone):
    """A step as long as the parameter (arXiv 1904.00962); counts in numbers and in tensors, keeps an average in float32."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        counted = state.setdefault("counted", torch.zeros(()))
        counted += 1
        average = state.setdefault("average", torch.zeros_like(p, dtype=torch.float32))
        average.lerp_(grad.float(), 0.5)
        update = average.double() / (1 - 0.5 ** state["step"]) + 0.01 * p / counted
        p.sub_(update * (group["lr"] * p.norm() / update.norm()))


class Whitening(Trusting):
    """Says so itself; orthogonalises matrices, in float64, by the singular values of the whole."""

    whole_matrices = True

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.ndim != 2:
            super().change(p, grad, state, group)
            return
        average = state.setdefault("momentum", torch.zeros_like(p)).lerp_(grad, 0.5)
        left, _, right = torch.linalg.svd(average + 1e-3 * p, full_matrices=False)
        p.sub_(left @ right * group["lr"])


class Factored(_EachAlone):
    """Keeps sums of rows, as Adafactor does."""

    whole_matrices = True

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        rows = state.setdefault("rows", torch.zeros(p.shape[:1], dtype=p.dtype)).add_(
            grad.pow(2).view(len(grad), -1).sum(1) + 1e-9
        )
        p.sub_(grad / rows.sqrt().view(-1, *[1] * (p.ndim - 1)) * group["lr"])
