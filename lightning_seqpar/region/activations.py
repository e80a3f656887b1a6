"""Norms, and what runs between the columns of an MLP and its row, run again in the backward: ``recompute: activations``.

Both are the user's own code. A norm keeps its input, and the columns that read its output keep that, too, in place of the output.
Of an MLP the outputs of its columns are kept, and what its row reads is made again. torch's own activation checkpoint runs them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from lightning_seqpar.context.seq_part import Place, SeqPart, local_of
from lightning_seqpar.distributed.autograd import in_backward, saved_tensor_hooks, saved_tensor_hooks_allowed
from lightning_seqpar.distributed.counters import saved_counter
from lightning_seqpar.distributed.rng import drawn_since, kept_streams, torch_states
from lightning_seqpar.layout.attributes import ModelAttributes
from lightning_seqpar.layout.stand_in import later
from lightning_seqpar.region.column_inputs import ColumnGroup, hand_out
from lightning_seqpar.region.frames import Frame
from lightning_seqpar.region.products import Hold, NormCall
from lightning_seqpar.region.recompute import RecomputedCall
from lightning_seqpar.region.sequence_region import SequenceRegion


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm over the features.

    It has norm in its class's name, vectors as its only parameters, no submodules and no buffers or other tensors, and its class's
    own forward. Norms over batches or groups are not.
    """
    cls = type(module)
    parameters = [p for p in module._parameters.values() if p is not None]
    return (
        (isinstance(module, nn.LayerNorm | nn.RMSNorm) or "norm" in cls.__name__.lower())
        and not isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm)
        and "forward" not in module.__dict__
        and not (module._modules or module._buffers)
        and not any(isinstance(value, Tensor) for value in module.__dict__.values())
        and bool(parameters)
        and all(p.ndim == 1 for p in parameters)
    )


def _may_run_again() -> bool:
    """Whether a call keeps something for a backward, and nobody else has hooks on it, which may be a checkpoint's."""
    return (
        torch.is_grad_enabled()
        and not in_backward()
        and saved_tensor_hooks_allowed()
        and (saved_tensor_hooks() is None or saved_counter() is not None)
    )


def _is_repeatable(module: nn.Module, forward: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Whether a norm gives the same for the same input: torch's own, or one that is tried, and draws and notes nothing."""
    if type(module).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward) or isinstance(x, FakeTensor) or x.is_meta:
        return True
    before = dict(vars(module))
    with kept_streams(), torch.no_grad():
        states = torch_states()
        first, second = forward(x), forward(x)
        drew = drawn_since(states)
    noted = vars(module).keys() != before.keys() or any(
        vars(module)[name] is not value for name, value in before.items()
    )
    vars(module).clear()
    vars(module).update(before)
    return type(first) is Tensor and not (drew or noted) and torch.equal(first.nan_to_num(), second.nan_to_num())


class RecomputedNorm:
    """Takes the place of a norm's ``forward``; its output tells the columns behind it what it was made of."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._is_repeatable: bool | None = None  # not known before the first input

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the norm, ``[..., h]`` → ``[..., h]``."""
        forward = types.MethodType(type(self.module).forward, self.module)
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or isinstance(x, SeqPart) or not _may_run_again():
            return forward(*args, **kwargs)
        if self._is_repeatable is None:
            self._is_repeatable = _is_repeatable(self.module, forward, x)
        if not self._is_repeatable:
            return forward(x)
        # Torch's own keeps its input, and two numbers of each position.
        if type(self.module).forward is nn.LayerNorm.forward:
            out = forward(x)
        else:
            out = checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)
        if type(out) is Tensor and out is not x:
            NormCall(forward, x).note(out)
        return out


def hold(x: Tensor, frame: Frame) -> tuple[Tensor, Any]:
    """What a row reads, and the node that keeps it where a forward runs again up to here; None for the row to keep it itself.

    What is saved behind it is kept as ever.
    """
    if frame.span is None or not x.requires_grad:
        return x, None
    (behind_row, count), frame.span = frame.span, None
    x = Hold.apply(x)  # type: ignore[no-untyped-call]

    def keep(tensor: Tensor) -> tuple[Tensor, int]:
        if count is not None:
            count(tensor)
        # With hooks installed, autograd compares no versions itself. Without its history: an operation may save what it made.
        return tensor.detach(), tensor._version

    behind_row.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, _give))
    return x, x.grad_fn


def _give(kept: tuple[Tensor, int]) -> Tensor:
    """The counterpart of :func:`hold`'s hook."""
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} behind a row linear was modified by an inplace operation, and the backward "
            "needs it as it was; write the change as a new tensor"
        )
    return tensor


class RecomputedSpan:
    """Takes the place of an MLP's ``forward``: what is between its columns and its row runs again in the backward.

    ==========================  ======================  ==========================
    tensor                      shape                   kept for the backward
    ==========================  ======================  ==========================
    what the columns read       ``[b, s, h]``           as the columns keep it
    the columns' outputs        ``[b, s, f/tp]``        themselves
    what is made of them        ``[b, s, f/tp]``        nothing
    what the row reads          ``[b, s, f/tp]``        nothing
    ==========================  ======================  ==========================

    Args:
        columns: what is gathered for the MLP, and the columns that read it.
    """

    def __init__(self, module: nn.Module, columns: ColumnGroup, region: SequenceRegion) -> None:
        self.module, self.columns, self.region = module, columns, region
        self.own = vars(module).get("forward")
        # An activation that is made in place changes what is kept. The first call is on copies, and shows it.
        self._has_run = self._is_plain = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, which is given what was gathered for it."""
        forward = self.own if self.own is not None else types.MethodType(type(self.module).forward, self.module)
        # What changes a buffer would change it twice.
        if (
            self._is_plain
            or not _may_run_again()
            or [*self.module.buffers()]
            or (found := self.columns.take_all()) is None
        ):
            return forward(*args, **kwargs)
        whole, columns, made, again = found
        run = _Span(forward, self.region, whole, columns, again, copies=not self._has_run)
        run.count = saved_counter()
        args, kwargs = tuple(map(run.marked, args)), {key: run.marked(value) for key, value in kwargs.items()}
        call = RecomputedCall(
            run, (tuple(made), *args), kwargs, self.region, ModelAttributes(self.module, tensors=True)
        )
        out = checkpoint(call, *call.take_kept(), use_reentrant=False)
        self._is_plain, self._has_run = run.changes, True
        return out


class _Whole(NamedTuple):
    """Stands for what was gathered among the arguments of a call, and where it lies over cp."""

    place: Place | None


class _Span:
    """One call of such a module: at first it is the forward; later it ends at the row.

    Args:
        whole: what was gathered, which is let go of behind the first call.
        columns: those that are handed what was made of it.
        again: gathers it again, for a module that reads it otherwise, too.
        copies: whether the module is given copies of what the columns made.

    Attributes:
        changes: whether it has changed one of them in place.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        region: SequenceRegion,
        whole: Tensor,
        columns: Sequence[Any],
        again: Callable[[], Tensor],
        *,
        copies: bool,
    ) -> None:
        self._copies, self.changes = copies, False
        self._forward, self._region, self._columns, self._again = forward, region, columns, again
        self.count: Callable[[Tensor], Any] | None = None  # of somebody who counts what is kept
        self._whole: Tensor | None = whole
        self._shape, self._like, self._requires_grad = whole.shape, whole.new_empty(0), whole.requires_grad

    def marked(self, value: Any) -> Any:
        """An argument, with a mark in the place of what was gathered."""
        if local_of(value) is not self._whole:
            return value
        return _Whole(value.place if isinstance(value, SeqPart) else None)

    def __call__(self, made: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        """Run the module, whose columns made ``made``."""
        whole, self._whole = self._whole, None
        if self._copies:
            made = tuple([one.clone() for one in made])
        if whole is None:
            whole = later(self._like, self._shape, self._again, requires_grad=self._requires_grad)

        def given(value: Any) -> Any:
            if not isinstance(value, _Whole):
                return value
            return whole if value.place is None else SeqPart.wrap(whole, value.place)

        hand_out(self._columns, whole, made, saved_tensor_hooks())
        frame = self._region.frames.current
        with ExitStack() as behind_row:
            outer, frame.span = frame.span, (behind_row, self.count)
            try:
                return self._forward(*map(given, args), **{key: given(value) for key, value in kwargs.items()})
            finally:
                self.changes = self.changes or (self._copies and any(one._version for one in made))
                frame.span = outer
