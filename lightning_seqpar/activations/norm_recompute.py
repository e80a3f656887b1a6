"""Norms that save less for the backward, made in place from the user's own modules.

A norm written in Python saves its input two or three times over, and the linears behind it save its output. Here the input
alone is saved: the backward runs the module's own forward once more (element-wise work, no matrix product), and the
linears' weight gradients and the norm's own gradients share that one run.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_seqpar.activations.policy import keeper
from lightning_seqpar.activations.replay import Autocast, is_plain
from lightning_seqpar.context.seq_part import SeqPart
from lightning_seqpar.distributed.autograd import function_mode, is_node_of, leaf_of, once_differentiable, reach
from lightning_seqpar.distributed.collectives import passes_none
from lightning_seqpar.distributed.rng import get_streams, kept_streams

_STATE = "_seqpar_norm"
"""Attribute of a norm that has its :class:`_NormState`."""


class _NormState:
    """The state of a norm that is recomputed in the backward.

    Attributes:
        saves: whether an activation of so many bytes is worth recomputing.
        repeatable: whether its forward gives the same for the same input; None before the first input was tried.
        of_positions: whether it gives the same for a part of a sequence as for the whole; None likewise.
    """

    def __init__(self, saves: Callable[[int], bool]) -> None:
        self.saves = saves
        self.repeatable: bool | None = None
        self.of_positions: bool | None = None


# ---- norms -----------------------------------------------------------------------------------------------------


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm over the features.

    It has norm in its class's name, vectors as its only parameters, no submodules and no buffers, and its class's own
    forward. Norms over batches or groups are not.
    """
    cls = type(module)
    parameters = [p for p in module._parameters.values() if p is not None]
    return (
        (isinstance(module, nn.LayerNorm | nn.RMSNorm) or "norm" in cls.__name__.lower())
        and not isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm)
        and "forward" not in module.__dict__
        and not module._modules
        and not module._buffers
        and bool(parameters)
        and all(p.ndim == 1 for p in parameters)
    )


class NormCall:
    """One call of a norm, which can be run again from its input.

    Args:
        x: its input, ``[..., h]``.

    Attributes:
        version: the version of the output as the norm returned it; changes in place count it up.
    """

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.version = 0
        self._keeper = keeper()
        self._source, self._read = weakref.ref(x), x._version
        self._module, self._autocast = module, Autocast(x.device.type)
        # The parameters of this call: until the backward the module may get others.
        self._parameters = {name: p.detach() for name, p in module._parameters.items() if p is not None}
        self._versions = [p._version for p in self._parameters.values()]
        self._made: tuple[Tensor, list[Tensor], Tensor] | None = None

    @property
    def source(self) -> Tensor | None:
        """The input, if a linear may save it in place of the output.

        None if it was changed in place or freed, or an activation checkpoint began between the norm and the caller: the
        caller's forward would then run again without the norm's.
        """
        x = self._source()
        return x if x is not None and x._version == self._read and keeper() == self._keeper else None

    def __repr__(self) -> str:
        return f"a {type(self._module).__name__} of {[list(p.shape) for p in self._parameters.values()]}"

    def compute(self, x: Tensor) -> Tensor:
        """The module's own forward, ``[..., h]`` → ``[..., h]``."""
        out: Tensor = _plain(self._module, x)
        return out

    def output(self, x: Tensor) -> Tensor:
        """The output for the saved input ``x``, without a graph; the norm's own backward will use the same run."""
        if self._made is None:
            self._made = self._run(x)
        return self._made[2].detach()

    def take(self, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """Input, parameters and output of a run with a graph, which is handed over and not kept here."""
        made, self._made = self._made or self._run(x), None
        return made

    def _run(self, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """Run the norm again with a graph, under the autocast state of the call.

        Raises:
            RuntimeError: if its parameters were changed since, or it reads other tensors with a gradient.
        """
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
    """The leaves of input and parameters (new ones, so that no hook of the real ones fires) and the output of a norm's forward."""
    parameters = module._parameters
    real = dict(parameters)
    leaves = {name: p.detach().requires_grad_() for name, p in own.items()}
    uncounted = torch.autograd.graph.saved_tensors_hooks(_same, _same)  # counters of saved bytes do not see this run
    with torch.enable_grad(), uncounted:
        leaf = x.detach().requires_grad_()
        try:
            parameters.update(leaves)  # type: ignore[arg-type]
            out = _plain(module, leaf)
        finally:
            parameters.update(real)
    return leaf, list(leaves.values()), out


def _same(tensor: Tensor) -> Tensor:
    """The tensor: a saved-tensor hook that changes nothing."""
    return tensor


def _reads_others(out: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether the backward of ``out`` would reach any leaf but these."""
    known = {id(leaf) for leaf in leaves}
    ends = (leaf_of(node) for node in reach(out.grad_fn))
    return any(leaf is not None and id(leaf) not in known for leaf in ends)


class _Norm(torch.autograd.Function):
    """A norm that saves its input alone and is run again in the backward.

    ============  ============  ==================
    tensor        shape         saved for backward
    ============  ============  ==================
    x             ``[..., h]``  itself
    parameters    ``[h]``       themselves
    y             ``[..., h]``  —
    ============  ============  ==================

    Forward: ``y = norm(x)``. Backward: ``norm`` runs again on ``x`` with a graph, and autograd gives ``dx`` and the parameters'
    gradients from ``dy``; linears that read ``y`` take it from the same run. ``x`` is local: a shard between the blocks.
    """

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
        grads = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
        return None, *(next(grads) if needed else None for needed in needs)


def saved_by(ctx: Any, call: NormCall | None) -> tuple[Tensor, ...]:
    """The saved tensors of a node that may have saved a norm's input.

    Raises:
        RuntimeError: naming the norm and the remedies, if its input was changed in place.
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
    """The call of the norm that made ``x``; None if no norm of this form did, or ``x`` was changed in place since."""
    node: Any = x.grad_fn
    call: NormCall | None = getattr(node, "call", None) if is_node_of(node, _Norm) else None
    return call if call is not None and x._version == call.version else None


def _plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of the user's class."""
    cls: Any = type(module)
    return cls._seqpar_plain(module, *args, **kwargs)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a norm that is recomputed; the user's own where that is not worthwhile, or not known to be right."""
    x = args[0] if len(args) == 1 and not kwargs else None
    if isinstance(x, SeqPart) and _is_of_positions(self, x):
        return x.like(_forward(self, x.local))
    if x is None or not is_plain(x) or not torch.is_grad_enabled() or not x.is_floating_point() or _is_watched():
        return _plain(self, *args, **kwargs)
    parameters = [p for p in self._parameters.values() if p is not None]
    worth = self.__dict__[_STATE].saves(x.nbytes) and (x.requires_grad or any(p.requires_grad for p in parameters))
    if not worth or any(isinstance(value, Tensor) for value in self.__dict__.values()) or not _is_trusted(self, x):
        return _plain(self, x)
    call = NormCall(self, x)
    out: Tensor = _Norm.apply(call, x, *parameters)  # type: ignore[no-untyped-call]
    call.version = out._version
    return out


def _is_watched() -> bool:
    """Whether somebody's function mode is active: it would see this call, and not the one in the backward."""
    mode = function_mode()
    return mode is not None and not getattr(mode, "is_transparent", False)


def _is_trusted(module: nn.Module, x: Tensor) -> bool:
    """Whether the norm's forward gives the same for the same input, which is tried once, on its first input."""
    state: _NormState = module.__dict__[_STATE]
    if state.repeatable is None:
        if isinstance(x, FakeTensor):
            return True  # there are no values to compare
        state.repeatable = x.is_meta or _try(module, x)
    return state.repeatable


def _is_of_positions(module: nn.Module, x: SeqPart) -> bool:
    """Whether a norm of a part of a sequence is that part of the norm, which is tried once, on its first input."""
    state: _NormState = module.__dict__[_STATE]
    if state.of_positions is None and isinstance(x.local, FakeTensor):
        return True  # there are no values to compare
    if state.of_positions is None and min(x.place.chunks.counts) == 0:
        return False  # a rank without positions can't tell
    if state.of_positions is None:
        with _trial(module, x):
            part, local = _plain(module, x), _plain(module, x.local)
        state.of_positions = (
            isinstance(part, SeqPart)
            and part.place.dim == x.place.dim
            and part.place.same(x.place)
            and (x.is_meta or torch.equal(part.local.nan_to_num(), local.nan_to_num()))
        )
    return state.of_positions


@contextmanager
def _trial(module: nn.Module, x: Tensor) -> Iterator[None]:
    """A context in which a norm is tried; behind it random streams and the module's attributes are as before."""
    own, before = module.__dict__, dict(module.__dict__)
    with kept_streams(x.device), torch.no_grad():
        yield
    own.clear()
    own.update(before)


def _try(module: nn.Module, x: Tensor) -> bool:
    """Runs a norm twice and compares: equal outputs, no random draw, no attribute written, no other tensor with a gradient read."""
    with _trial(module, x):
        own, before, streams = module.__dict__, dict(module.__dict__), get_streams(x.device)[2:]
        first, second = _plain(module, x), _plain(module, x)
        noted = len(own) != len(before) or any(own.get(name, before) is not value for name, value in before.items())
        now = get_streams(x.device)[2:]
        drawn = any(a is not None and not torch.equal(a, b) for a, b in zip(streams, now, strict=True))
    same = type(first) is Tensor and first.shape == x.shape and torch.equal(first.nan_to_num(), second.nan_to_num())
    if not same or noted or drawn or first.data_ptr() == x.data_ptr():
        return False
    leaf, leaves, out = _with_leaves(module, x, {name: p for name, p in module._parameters.items() if p is not None})
    return not _reads_others(out, [leaf, *leaves])


# ---- classes ---------------------------------------------------------------------------------------------------


@functools.cache
def _recomputing_class(cls: Any) -> Any:
    """A subclass that looks like ``cls`` and has :func:`_forward`."""
    own = {"forward": _forward, "_seqpar_plain": cls.forward, "__doc__": cls.__doc__, "__module__": cls.__module__}
    made = type(cls.__name__, (cls,), own)
    made.__qualname__ = cls.__qualname__
    return made


def make_recomputing(norm: nn.Module, saves: Callable[[int], bool]) -> None:
    """Turn a norm (see :func:`is_norm`) into the form that saves its input alone, in place."""
    norm.__dict__[_STATE] = _NormState(saves)
    norm.__class__ = _recomputing_class(type(norm))  # type: ignore[arg-type]
