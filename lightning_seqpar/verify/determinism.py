"""What makes two runs of a model comparable: no dropout, and float64 where the model's own code would compute in less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class KeepFloat64(TorchDispatchMode):
    """A mode in which float64 activations stay so where the model's code casts them: norms and softmaxes of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts = 0  # how many were turned down

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if (
            func is torch.ops.aten._to_copy.default
            and kwargs.get("dtype") in _NARROW
            and isinstance(args[0], Tensor)
            and args[0].dtype is torch.float64
        ):
            self.casts += 1
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def switch_off_dropout(model: nn.Module) -> None:
    """Set numbers of modules, and of configurations that they hold, whose names speak of dropping, to zero."""
    for holder in {id(one): one for one in _holders(model)}.values():
        for name, value in list(vars(holder).items()):
            drops = "drop" in name or (name == "p" and isinstance(holder, _DropoutNd))
            if drops and isinstance(value, float) and 0 < value < 1:
                setattr(holder, name, 0.0)


def _holders(model: nn.Module) -> Iterator[Any]:
    """The modules of a model, and the configurations that they hold: objects named ``config`` or ``hparams`` with attributes."""
    for module in model.modules():
        yield module
        for name, value in vars(module).items():
            if "config" in name.lower() and hasattr(value, "__dict__") and not isinstance(value, type):
                yield value
                yield from (one for one in vars(value).values() if type(one).__name__.endswith("Config"))
