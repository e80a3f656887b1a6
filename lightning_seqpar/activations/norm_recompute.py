"""Norms and dropout that keep less for the backward, in the user's own modules.

A norm written in Python keeps its input two or three times over; the linears behind it keep its output too. Here both
come from the input: the backward runs the module's own forward once more (element-wise work, no product), and the
linears' weight gradients and the norm's own gradient share that one run.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.overrides import has_torch_function_unary

from lightning_seqpar.activations.policy import keeper
from lightning_seqpar.activations.replay import Autocast, is_plain
from lightning_seqpar.distributed.autograd import function_mode, is_node_of, leaf_of, reach
from lightning_seqpar.distributed.collectives import passes_none
from lightning_seqpar.distributed.rng import get_streams, set_streams

_STATE = "_seqpar_norm"
"""Where a norm holds its :class:`_NormState`."""


class _NormState:
    """What a norm that runs again in the backward knows.

    Attributes:
        saves: whether an activation of so many bytes is worth making again.
        repeatable: whether its forward is one function of its input; none before the first input was tried.
    """

    def __init__(self, saves: Callable[[int], bool]) -> None:
        self.saves = saves
        self.repeatable: bool | None = None


def is_repeatable(module: nn.Module) -> bool | None:
    """Whether a norm's forward can be run again in the backward; none before its first input was tried."""
    state: _NormState = module.__dict__[_STATE]
    return state.repeatable


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
    """

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.version = 0
        self._keeper = keeper()
        self._source, self._read = weakref.ref(x), x._version
        self._module, self._autocast = module, Autocast(x.device.type)
        # Those of this call: others may stand in the module when the backward comes.
        self._parameters = {name: p.detach() for name, p in module._parameters.items() if p is not None}
        self._versions = [p._version for p in self._parameters.values()]
        self._made: tuple[Tensor, list[Tensor], Tensor] | None = None

    @property
    def source(self) -> Tensor | None:
        """The input, if it is still what the norm read, and the norm will run again wherever the caller does."""
        x = self._source()
        return x if x is not None and x._version == self._read and self._keeper == keeper() else None

    def __repr__(self) -> str:
        return f"a {type(self._module).__name__} of {[list(p.shape) for p in self._parameters.values()]}"

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
        if [p._version for p in self._parameters.values()] != self._versions:
            raise RuntimeError(
                f"{type(self._module).__name__}: its weights were changed between the forward and the backward"
            )
        with self._autocast.again():
            leaf, leaves, out = _with_leaves(self._module, x, self._parameters)
        if _reads_others(out, [leaf, *leaves]):
            raise RuntimeError(
                f"{type(self._module).__name__}: this norm reads a tensor with a gradient that is none of its parameters, and "
                "did not when training began; set regather=False, which keeps what autograd keeps"
            )
        return leaf, leaves, out


def _with_leaves(module: nn.Module, x: Tensor, own: dict[str, Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
    """The module's own forward with leaves for its input and its parameters ``own``: hooks of the true ones do not fire."""
    held = module._parameters
    true = dict(held)
    leaves = {name: p.detach().requires_grad_() for name, p in own.items()}
    alone = torch.autograd.graph.saved_tensors_hooks(_same, _same)  # whose counts this run is none of
    with torch.enable_grad(), alone:
        leaf = x.detach().requires_grad_()
        try:
            held.update(leaves)  # type: ignore[arg-type]
            out = _plain(module, leaf)
        finally:
            held.update(true)
    return leaf, list(leaves.values()), out


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _reads_others(out: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether a gradient of ``out`` goes to anything but the leaves."""
    known = {id(leaf) for leaf in leaves}
    ends = (leaf_of(node) for node in reach(out.grad_fn))
    return any(leaf is not None and id(leaf) not in known for leaf in ends)


class _Norm(torch.autograd.Function):
    """``y = norm(x)`` that keeps ``x`` alone, ``[..., h]``."""

    @staticmethod
    def forward(ctx: Any, call: NormCall, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(x, *parameters)
        return call.compute(x)

    @staticmethod
    @passes_none
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *_ = saved_by(ctx, ctx.call)
        leaf, leaves, out = ctx.call.take(x)
        needs = ctx.needs_input_grad[1:]
        wanted = [tensor for tensor, needed in zip((leaf, *leaves), needs, strict=True) if needed]
        found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
        return None, *(next(found) if needed else None for needed in needs)


def saved_by(ctx: Any, call: NormCall | None) -> tuple[Tensor, ...]:
    """The saved tensors of a node that may run a norm again.

    Raises:
        RuntimeError: in the norm's words, if its input was changed.
    """
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if call is None or "inplace" not in str(error):
            raise
        raise RuntimeError(
            f"{call}: its input (or its weight) was changed in place after it ran, and the backward runs it again; write "
            "x = x + y in place of x += y, or set regather=False, which keeps what autograd keeps"
        ) from error
    return saved


def norm_of(x: Tensor) -> NormCall | None:
    """The call of a norm of this form that made ``x``; none if something else did, or changed it since."""
    node: Any = x.grad_fn
    call: NormCall | None = getattr(node, "call", None) if is_node_of(node, _Norm) else None
    return call if call is not None and x._version == call.version else None


def _plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kind: Any = type(module)
    return kind._seqpar_plain(module, *args, **kwargs)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    x = args[0] if len(args) == 1 and not kwargs else None
    if x is None or not is_plain(x) or not torch.is_grad_enabled() or not x.is_floating_point() or _is_watched():
        return _plain(self, *args, **kwargs)
    parameters = [p for p in self._parameters.values() if p is not None]
    worth = self.__dict__[_STATE].saves(x.nbytes) and (x.requires_grad or any(p.requires_grad for p in parameters))
    if not worth or any(isinstance(held, Tensor) for held in self.__dict__.values()) or not _is_trusted(self, x):
        return _plain(self, x)
    call = NormCall(self, x)
    out: Tensor = _Norm.apply(call, x, *parameters)  # type: ignore[no-untyped-call]
    call.version = out._version
    return out


def _is_watched() -> bool:
    """Whether a mode of somebody's sees this call: it would not see another."""
    mode = function_mode()
    return mode is not None and not getattr(mode, "is_transparent", False)


def _is_trusted(module: nn.Module, x: Tensor) -> bool:
    """Whether its forward is one function of its input: tried once, on the first input."""
    state: _NormState = module.__dict__[_STATE]
    if state.repeatable is None:
        if isinstance(x, FakeTensor):
            return True  # nothing to compare
        state.repeatable = x.is_meta or _try(module, x)
    return state.repeatable


def _try(module: nn.Module, x: Tensor) -> bool:
    streams, held, own = get_streams(x.device), dict(module.__dict__), module.__dict__
    with torch.no_grad():
        first, second = _plain(module, x), _plain(module, x)
    _, _, *drawn_before = streams
    _, _, *drawn_after = get_streams(x.device)
    drawn = any(a is not None and not torch.equal(a, b) for a, b in zip(drawn_before, drawn_after, strict=True))
    noted = len(own) != len(held) or any(own.get(name, held) is not value for name, value in held.items())
    # The trial leaves no trace: the true call counts and draws as the first.
    set_streams(streams, x.device)
    own.clear()
    own.update(held)
    same = type(first) is Tensor and first.shape == x.shape and torch.equal(first.nan_to_num(), second.nan_to_num())
    if not same or drawn or noted or first.data_ptr() == x.data_ptr():
        return False
    leaf, leaves, out = _with_leaves(module, x, {name: p for name, p in module._parameters.items() if p is not None})
    return not _reads_others(out, [leaf, *leaves])


# ---- dropout ---------------------------------------------------------------------------------------------------


class _Dropout(torch.autograd.Function):
    """Dropout as torch's on the CPU, draw for draw, that keeps one byte per element instead of a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, mask: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.p = p
        ctx.save_for_backward(mask)
        return apply_mask(x, mask, p)

    @staticmethod
    @passes_none
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


def _forward_dropout(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    x = args[0] if len(args) == 1 and not kwargs else None
    if x is None or not self.training or self.inplace or not drops(x, self.p):
        return _plain(self, *args, **kwargs)  # type: ignore[no-any-return]
    if has_torch_function_unary(x):  # a span that is being recorded does the same, and takes note
        return _plain(self, x)  # type: ignore[no-any-return]
    return dropout(x, self.p)[0]


# ---- classes ---------------------------------------------------------------------------------------------------


@functools.cache
def _recomputing_class(kind: Any, forward: Any) -> Any:
    """A class that is ``kind`` in everything but its forward."""
    own = {"forward": forward, "_seqpar_plain": kind.forward, "__doc__": kind.__doc__, "__module__": kind.__module__}
    made = type(kind.__name__, (kind,), own)
    made.__qualname__ = kind.__qualname__
    return made


def _always(count: int) -> bool:
    return True


def make_recomputing(module: nn.Module, saves: Callable[[int], bool] = _always) -> None:
    """Turn a norm (see :func:`is_norm`) or an ``nn.Dropout`` into the form that keeps less, in place.

    Args:
        saves: whether an activation of so many bytes is worth making again.
    """
    forward = _forward_dropout if isinstance(module, nn.Dropout) else _forward
    if forward is _forward:
        module.__dict__[_STATE] = _NormState(saves)
    module.__class__ = _recomputing_class(type(module), forward)  # type: ignore[arg-type]
