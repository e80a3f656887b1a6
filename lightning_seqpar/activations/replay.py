"""Running a call again in the backward as it ran in the forward: which functions allow it, and the state around it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_ARITHMETIC = (
    "add", "__add__", "__radd__", "sub", "subtract", "__sub__", "__rsub__", "rsub", "mul", "multiply", "__mul__", "__rmul__",
    "div", "divide", "true_divide", "__truediv__", "__rtruediv__", "__div__", "__rdiv__", "pow", "__pow__", "__rpow__", "neg",
    "negative", "__neg__", "square", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "abs", "tanh", "sigmoid",
    "erf", "sin", "cos", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "where", "addcmul", "lerp",
)  # fmt: skip
_ACTIVATIONS = (
    "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "hardswish", "hardsigmoid", "hardtanh",
    "logsigmoid", "softplus", "softsign", "tanhshrink", "softshrink", "hardshrink", "threshold", "prelu", "glu",
)  # fmt: skip
_SHAPES = (
    "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "chunk", "split", "narrow", "unbind",
    "select", "squeeze", "unsqueeze", "expand", "contiguous", "clone", "__getitem__", "t",
    "to", "type_as", "float", "double", "half", "bfloat16",
)  # fmt: skip
REPLAYED = frozenset((*_ARITHMETIC, *_ACTIVATIONS, *_SHAPES))
"""Names of functions that may be run again: element-wise ones and changes of shape, which draw no random numbers."""


class Autocast:
    """The autocast state of a device type at the time when this is made."""

    __slots__ = ("_state", "_type")

    def __init__(self, device: str) -> None:
        self._type, self._state = device, _autocast(device)

    def again(self) -> AbstractContextManager[Any]:
        """A context in which autocast is as it was then."""
        if self._state == _autocast(self._type):
            return nullcontext()
        enabled, dtype = self._state
        return torch.autocast(self._type, dtype=dtype, enabled=enabled)


def _autocast(device: str) -> tuple[bool, torch.dtype | None]:
    """Whether autocast is on for a device type, and its type if it is."""
    return (True, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else (False, None)


def is_plain(x: Any) -> bool:
    """Whether it is a tensor of torch's own class, or a fake tensor, rather than of somebody's subclass."""
    return type(x) is Tensor or isinstance(x, FakeTensor)


def is_constant(value: Any) -> bool:
    """Whether an argument that is no tensor can't change before the backward."""
    if isinstance(value, list | tuple):
        return all(is_constant(item) for item in value)
    if isinstance(value, slice):
        return all(is_constant(item) for item in (value.start, value.stop, value.step))
    constants = (int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout)
    return value is None or value is Ellipsis or isinstance(value, constants)
