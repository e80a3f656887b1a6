"""Norms and dropout that keep less for the backward, in the user's own modules.

A norm written in Python keeps its input two or three times over; the linears behind it keep its output too. Here both
come from the input: the backward runs the module's own forward once more (element-wise work, no product), and the
linears' weight gradients and the norm's own gradient share that one run.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.overrides import has_torch_function_unary

TRUSTED = "_seqpar_norm_trusted"
"""Where a norm notes whether its forward can be run again."""
SAVES = "_seqpar_norm_saves"
"""And where which activations are worth it, by their bytes."""


class Autocast:
    """The autocast state of a device type, as it is now; :meth:`again` puts it back for a while."""

    __slots__ = ("_state", "_type")

    def __init__(self, kind: str) -> None:
        self._type, self._state = kind, _autocast(kind)

    def again(self) -> AbstractContextManager[Any]:
        """The state in which this was made."""
        if self._state == _autocast(self._type):
            return nullcontext()
        enabled, dtype = self._state
        return torch.autocast(self._type, dtype=dtype, enabled=enabled)


def _autocast(kind: str) -> tuple[bool, torch.dtype | None]:
    return (True, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else (False, None)


def is_plain(x: Any) -> bool:
    """Whether it is a tensor and no subclass of somebody's; one without numbers counts."""
    return type(x) is Tensor or isinstance(x, FakeTensor)


# ---- norms -----------------------------------------------------------------------------------------------------


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm over the features: by its name, and with nothing but vectors as parameters."""
    kind = type(module)
    parameters = [p for p in module._parameters.values() if p is not None]
    return (
        (isinstance(module, nn.LayerNorm | nn.RMSNorm) or "norm" in kind.__name__.lower())
        and not isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm)
        and "forward" not in module.__dict__
        and not module._modules
        and not module._buffers
        and bool(parameters)
        and all(p.ndim == 1 for p in parameters)
    )


class NormCall:
    """One call of a norm: how to make its output again.

    Attributes:
        version: the output's, as the norm left it.
        source: the input.
    """

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.version = 0
        self.source = weakref.ref(x)
        self._module, self._autocast = module, Autocast(x.device.type)
        self._made: tuple[Tensor, list[Tensor], Tensor] | None = None

    def compute(self, x: Tensor) -> Tensor:
        """The module's own forward."""
        out: Tensor = _plain(self._module, x)
        return out

    def output(self, x: Tensor) -> Tensor:
        """The output for the kept input ``x``, without a gradient; the norm's backward will use the same run."""
        if self._made is None:
            self._made = self._run(x)
        return self._made[2].detach()

    def take(self, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """Input, parameters and output of a run with gradients, which is forgotten."""
        made, self._made = self._made or self._run(x), None
        return made

    def _run(self, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        held = self._module._parameters
        own = {name: p for name, p in held.items() if p is not None}
        leaves = {name: p.detach().requires_grad_() for name, p in own.items()}
        with torch.enable_grad(), self._autocast.again():
            leaf = x.detach().requires_grad_()
            try:
                held.update(leaves)  # type: ignore[arg-type]  # hooks of the true ones fire once, in the true backward
                out = self.compute(leaf)
            finally:
                held.update(own)
        return leaf, list(leaves.values()), out


class _Norm(torch.autograd.Function):
    """``y = norm(x)`` that keeps ``x`` alone, ``[..., h]``."""

    @staticmethod
    def forward(ctx: Any, call: NormCall, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, *parameters)
        return call.compute(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *_ = ctx.saved_tensors
        leaf, leaves, out = ctx.call.take(x)
        needs = ctx.needs_input_grad[1:]
        wanted = [tensor for tensor, needed in zip((leaf, *leaves), needs, strict=True) if needed]
        found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
        return None, *(next(found) if needed else None for needed in needs)


def norm_of(x: Tensor) -> NormCall | None:
    """The call of a lean norm that made ``x``; none if something else did, or changed it since."""
    node: Any = x.grad_fn
    call: NormCall | None = getattr(node, "call", None) if isinstance(node, _Norm._backward_cls) else None
    return call if call is not None and x._version == call.version else None


def _plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kind: Any = type(module)
    return kind._seqpar_plain(module, *args, **kwargs)


def _forward(self: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not is_plain(x) or not torch.is_grad_enabled() or not x.is_floating_point():
        return _plain(self, x, *args, **kwargs)
    parameters = [p for p in self._parameters.values() if p is not None]
    worth = self.__dict__[SAVES](x.nbytes) and (x.requires_grad or any(p.requires_grad for p in parameters))
    if not worth or not _is_trusted(self, x):
        return _plain(self, x)
    call = NormCall(self, x)
    out: Tensor = _Norm.apply(call, x, *parameters)  # type: ignore[no-untyped-call]
    call.version = out._version
    return out


def _is_trusted(module: nn.Module, x: Tensor) -> bool:
    """Whether its forward is one function of its input: tried once, on the first input."""
    known = module.__dict__.get(TRUSTED)
    if known is None:
        if isinstance(x, FakeTensor):
            return True  # nothing to compare
        known = module.__dict__[TRUSTED] = x.is_meta or _try(module, x)
    return bool(known)


def _try(module: nn.Module, x: Tensor) -> bool:
    state, held = torch.get_rng_state(), dict(module.__dict__)
    with torch.no_grad():
        first, second = _plain(module, x), _plain(module, x)
    drawn = not torch.equal(state, torch.get_rng_state())
    if drawn:
        torch.set_rng_state(state)
    now = module.__dict__
    noted = len(now) != len(held) or any(now.get(name, held) is not value for name, value in held.items())
    same = type(first) is Tensor and first.shape == x.shape and torch.equal(first.nan_to_num(), second.nan_to_num())
    return same and not drawn and not noted and first.data_ptr() != x.data_ptr()


# ---- dropout ---------------------------------------------------------------------------------------------------


class _Dropout(torch.autograd.Function):
    """Dropout as torch's on the CPU, draw for draw, that keeps one byte per element instead of a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, mask: Tensor) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(mask)
        return apply_mask(x, mask, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return apply_mask(grad, mask, ctx.p), None, None


def apply_mask(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """``x`` where the mask is true, by ``1 / (1 - p)``; zero elsewhere."""
    return x * mask.to(x.dtype).div_(1 - p)


def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """``F.dropout`` in training on the CPU, for ``0 < p < 1``; and its mask."""
    mask = torch.empty_like(x).bernoulli_(1 - p).bool()
    return _Dropout.apply(x, p, mask), mask  # type: ignore[no-untyped-call]


def drops(x: Any, p: float) -> bool:
    """Whether a dropout of this input would keep a factor where a byte does."""
    return (
        is_plain(x)
        and 0 < p < 1
        and x.device.type == "cpu"  # elsewhere torch's own keeps a byte
        and x.is_floating_point()
        and x.numel() > 0
        and torch.is_grad_enabled()
        and x.requires_grad
    )


def _forward_dropout(self: Any, x: Tensor) -> Tensor:
    if not self.training or self.inplace or not drops(x, self.p):
        return _plain(self, x)  # type: ignore[no-any-return]
    if has_torch_function_unary(x):  # an open stretch does the same, and takes note
        return _plain(self, x)  # type: ignore[no-any-return]
    return dropout(x, self.p)[0]


# ---- classes ---------------------------------------------------------------------------------------------------


@functools.cache
def _lean_class(kind: Any, forward: Any) -> Any:
    """A class that is ``kind`` in everything but its forward."""
    own = {"forward": forward, "_seqpar_plain": kind.forward, "__doc__": kind.__doc__, "__module__": kind.__module__}
    made = type(kind.__name__, (kind,), own)
    made.__qualname__ = kind.__qualname__
    return made


def _always(count: int) -> bool:
    return True


def make_lean(module: nn.Module, saves: Callable[[int], bool] = _always) -> None:
    """Turn a norm (see :func:`is_norm`) or an ``nn.Dropout`` into its lean form, in place.

    Args:
        saves: whether an activation of so many bytes is worth making again.
    """
    forward = _forward_dropout if isinstance(module, nn.Dropout) else _forward
    if forward is _forward:
        module.__dict__[SAVES] = saves
    module.__class__ = _lean_class(type(module), forward)  # type: ignore[arg-type]
