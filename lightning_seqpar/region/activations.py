"""Norms, and what runs between the columns of an MLP and its row, run again in the backward: ``recompute: activations``.

Both are the user's own code. A norm keeps its input, and the columns that read its output keep that, too, in place of the output.
Of an MLP the outputs of its columns are kept, and what its row reads is made again.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_seqpar.context.seq_part import Place, SeqPart, local_of
from lightning_seqpar.distributed.autograd import (
    NO_BACKWARD,
    Function,
    current_backward,
    in_backward,
    leaf_of,
    reach,
    saved_tensor_hooks,
    saved_tensor_hooks_allowed,
    set_grad_enabled,
)
from lightning_seqpar.distributed.counters import saved_counter
from lightning_seqpar.distributed.rng import SavedStreams, drawn_since, kept_streams, torch_states
from lightning_seqpar.layout.attributes import ModelAttributes
from lightning_seqpar.layout.stand_in import later
from lightning_seqpar.region.frames import Frame
from lightning_seqpar.region.products import ColumnGroup, NormCall, as_autocast, autocast_dtype, hand_out
from lightning_seqpar.region.sequence_region import SequenceRegion


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm over the features: by its class's name, parameters that are vectors, and nothing else in it.

    Norms over batches or groups are not, nor one with another forward than its class's.
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
    """Whether a norm gives the same for the same input: torch's own, or one that is tried, and draws, notes and reads nothing."""
    if type(module).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward) or isinstance(x, FakeTensor) or x.is_meta:
        return True
    before, given = dict(vars(module)), x.detach().requires_grad_()
    uncounted = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with kept_streams(), torch.enable_grad(), uncounted:
        states = torch_states()
        first, second = forward(given), forward(given)
        drew = drawn_since(states)
    noted = vars(module).keys() != before.keys() or any(vars(module)[name] is not value for name, value in before.items())
    vars(module).clear()
    vars(module).update(before)
    if type(first) is not Tensor or first.shape != x.shape:
        return False
    if drew or noted or not torch.equal(*[one.detach().nan_to_num() for one in (first, second)]):
        return False
    own = {id(one) for one in (given, *module._parameters.values())}
    leaves = [leaf_of(node) for node in reach(first.grad_fn)]
    return all(leaf is None or id(leaf) in own for leaf in leaves)  # of another one the gradient would be lost


class RecomputedNorm:
    """Takes the place of a norm's ``forward``; its output tells the columns behind it what it was made of."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._is_repeatable: bool | None = None  # not known before the first input

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the norm, ``[..., h]`` → ``[..., h]``."""
        forward = types.MethodType(type(self.module).forward, self.module)
        given = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(given, Tensor) or not _may_run_again():
            return forward(*args, **kwargs)
        x, on_part = given, None
        if isinstance(given, SeqPart):
            x, on_part = given.settled().local, _OnPart(forward, given.place)
            if isinstance(x, SeqPart):
                return forward(given)
        run: Any = on_part or forward
        if self._is_repeatable is None:
            self._is_repeatable = _is_repeatable(self.module, run, x)
        if not self._is_repeatable:
            return forward(given)
        call = NormCall(run, x, self.module)
        # Torch's own keeps its input, and two numbers of each position.
        if type(self.module).forward is nn.LayerNorm.forward:
            out = run(x)
        else:
            again, count = _NormAgain(call, x.requires_grad), saved_counter()
            if count is not None:  # somebody counts what is kept
                count(x)
            with torch.autograd.graph.saved_tensors_hooks(again.keep, again.take):
                out = run(x)
        if type(out) not in (Tensor, FakeTensor) or out.shape != x.shape:
            return out
        if out is not x:
            call.note(out)
        return out if on_part is None else SeqPart.wrap(out, on_part.place)


class _OnPart(NamedTuple):
    """A norm of a sequence that is dealt out over ranks, as one of this rank's part: ``[b, s/cp, h]`` → ``[b, s/cp, h]``."""

    forward: Callable[[Tensor], Any]
    place: Place

    def __call__(self, x: Tensor) -> Any:
        """Run the norm on the sequence; what is no such part comes as it is."""
        out = self.forward(SeqPart.wrap(x, self.place))
        return out.settled().local if isinstance(out, SeqPart) and out.place == self.place else out


class _Enough(BaseException):
    """All that a call kept was made again."""


class _Again:
    """What a call keeps for its backward: where that asks for it, the call runs again until it has kept as much."""

    def __init__(self) -> None:
        self._shapes: list[torch.Size] = []  # of what was kept, in order
        self._remade: dict[int, Tensor] = {}
        self._task = NO_BACKWARD

    def keep(self, tensor: Tensor) -> int:
        """The hook that is given what is kept."""
        self._shapes.append(tensor.shape)
        return len(self._shapes) - 1

    def take(self, at: int) -> Tensor:
        """The hook that is asked for it."""
        task = current_backward()
        if self._task != task or at not in self._remade:
            self._task, self._remade = task, {}
            enabled = torch.is_grad_enabled()
            set_grad_enabled(True)
            try:
                with torch.autograd.graph.saved_tensors_hooks(self._keep_again, _refuse):
                    self.run_again()
            except _Enough:
                return self._remade.pop(at)
            finally:
                set_grad_enabled(enabled)
            raise RuntimeError(_DIFFERS.format("fewer tensors", len(self._shapes)))
        return self._remade.pop(at)

    def _keep_again(self, tensor: Tensor) -> None:
        at = len(self._remade)
        if tensor.shape != self._shapes[at]:
            raise RuntimeError(_DIFFERS.format(list(tensor.shape), list(self._shapes[at])))
        self._remade[at] = tensor.detach()
        if at + 1 == len(self._shapes):
            raise _Enough

    def run_again(self) -> None:
        """Run the call once more, on tensors without history."""
        raise NotImplementedError


class _NormAgain(_Again):
    """A call of a norm, ``[..., h]`` → ``[..., h]``, of which the input alone is kept."""

    def __init__(self, call: NormCall, requires_grad: bool) -> None:
        super().__init__()
        self._call, self._requires_grad = call, requires_grad

    def run_again(self) -> None:
        """From the input."""
        if self._call.x._version != self._call.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the input of a "
                "norm, which its backward reads; write the change as a new tensor"
            )
        self._call.run(self._call.x.detach().requires_grad_(self._requires_grad), graph=True)


class _Hold(Function):
    """What a row reads, kept in front of it: where a forward runs again up to here, the row itself does not.

    Forward and backward: identity, ``[b, s, f/tp]``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


def hold(x: Tensor, frame: Frame) -> tuple[Tensor, Any]:
    """What a row reads, and the node that keeps it where a forward runs again up to here; None for the row to keep it itself.

    What is saved behind it is kept as ever.
    """
    if frame.span is None or not x.requires_grad or frame.span[2] != saved_tensor_hooks():
        return x, None  # a checkpoint of the user's around the row keeps what the row reads, and has it made again by the span
    (behind_row, count, _), frame.span = frame.span, None
    x = _Hold.applied(x)

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
    """Takes the place of an MLP's ``forward``: what is between its ``columns`` and its row runs again in the backward.

    ==========================  ======================  ==========================
    tensor                      shape                   kept for the backward
    ==========================  ======================  ==========================
    what the columns read       ``[b, s, h]``           as the columns keep it
    the columns' outputs        ``[b, s, f/tp]``        themselves
    what is made of them        ``[b, s, f/tp]``        nothing
    what the row reads          ``[b, s, f/tp]``        nothing
    ==========================  ======================  ==========================
    """

    def __init__(self, module: nn.Module, columns: ColumnGroup, region: SequenceRegion) -> None:
        self.module, self.columns, self.region = module, columns, region
        self.own = vars(module).get("forward")
        self.attributes: ModelAttributes | None = None
        # An activation that is made in place changes what is kept. The first call is on copies, and shows it.
        self._has_run = self._is_plain = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, which is given what was gathered for it."""
        if (
            self._is_plain
            or not _may_run_again()
            or any(isinstance(one, tuple | list | dict) for one in (*args, *kwargs.values()))
            or (found := self.columns.take_all()) is None
        ):
            return self.forward(*args, **kwargs)
        if self.attributes is None:
            self.attributes = ModelAttributes(self.module, tensors=True)
            if [*self.module.buffers()]:  # what changes one would change it twice
                self._is_plain = True
                return self.forward(*args, **kwargs)
        call = _SpanCall(self, found, args, kwargs)
        out, changes = call.first(copies=not self._has_run)
        self._is_plain, self._has_run = changes, True
        return out

    @property
    def forward(self) -> Callable[..., Any]:
        """The module's own forward."""
        return self.own if self.own is not None else types.MethodType(type(self.module).forward, self.module)


class _SpanCall(_Again):
    """One call of such a module. Where the backward asks for what it kept in front of the row, it runs again up to there."""

    def __init__(
        self,
        span: RecomputedSpan,
        found: tuple[Tensor, list[Any], list[Tensor], Callable[[], Tensor]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__()
        self._span, self._args, self._kwargs = span, args, kwargs
        self._whole: Tensor | None
        self._whole, self._columns, self._made, self._again = found
        self._whole_id = id(self._whole)
        self._dtype = autocast_dtype(self._whole)
        self._lengths = span.region.frames.current.record
        assert span.attributes is not None
        self._attributes, self._values = span.attributes, span.attributes.read()
        self._count = saved_counter()  # of somebody who counts what is kept

    def first(self, *, copies: bool) -> tuple[Any, bool]:
        """Run the module, on ``copies`` of what the columns made; returns its output, and whether it changed one of them."""
        whole, made, self._copies = self._whole, self._made, copies
        assert whole is not None
        self._versions = self._read()
        if copies:
            made = [one.clone() for one in made]
        before = SavedStreams()
        with torch.autograd.graph.saved_tensors_hooks(self.keep, self.take):
            out = self._run(whole, made, self._args, self._kwargs)
        self._before = before if before.have_moved() else None
        # What was gathered is let go of; the other arguments are kept, as what the columns made is.
        self._shape, self._like, self._requires_grad = whole.shape, whole.new_empty(0), whole.requires_grad
        mark = self._marked
        self._args, self._kwargs = tuple(map(mark, self._args)), {key: mark(one) for key, one in self._kwargs.items()}
        self._whole = None
        if self._count is not None:
            for one in (*self._made, *self._args, *self._kwargs.values()):
                if isinstance(one, Tensor):
                    self._count(local_of(one))
        return out, copies and any(one._version for one in made)

    def _read(self) -> list[int]:
        """The versions of the tensors that it reads, but for what was gathered."""
        others = (*self._args, *self._kwargs.values(), *self._values.values())
        read = [local_of(one) for one in (*self._made, *others) if isinstance(one, Tensor)]
        return [one._version for one in read if id(one) != self._whole_id]

    def _run(self, whole: Tensor, made: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the module, up to its row if what is kept was counted."""
        hand_out(self._columns, whole, made, saved_tensor_hooks(), self._dtype)
        frame = self._span.region.frames.current
        with ExitStack() as behind_row:
            outer, frame.span = frame.span, (behind_row, self._count, saved_tensor_hooks())
            try:
                return self._span.forward(*args, **kwargs)
            finally:
                frame.span = outer

    def _marked(self, value: Any) -> Any:
        """An argument, with its place over cp in the place of what was gathered."""
        if not isinstance(value, Tensor) or local_of(value) is not self._whole:
            return value
        return _Whole(value.place if isinstance(value, SeqPart) else None)

    def run_again(self) -> None:
        """From what the columns made, up to the row."""
        if self._versions != self._read():
            raise RuntimeError(
                f"{self._span.region.name}: an output of a column linear, or another tensor that an MLP reads, was modified by an "
                "inplace operation since, and its backward needs it as it was; write the change as a new tensor, or use "
                "recompute='none'"
            )
        whole = later(self._like, self._shape, self._again, requires_grad=self._requires_grad)

        def given(value: Any) -> Any:
            if isinstance(value, _Whole):
                return whole if value.place is None else SeqPart.wrap(whole, value.place)
            return _without_history(value) if isinstance(value, Tensor) else value

        frames, streams, attributes = self._span.region.frames, self._span.region.streams, self._attributes
        now = SavedStreams() if self._before is not None or streams.draws else None
        values = attributes.read()
        outer = frames.begin_repeat(self._lengths)
        try:
            if self._before is not None:
                self._before.restore()
            attributes.set(self._values)
            with as_autocast(self._like.device.type, self._dtype):
                made = [_without_history(one) for one in self._made]
                if self._copies:
                    made = [one.clone() for one in made]
                args = tuple(map(given, self._args))
                self._run(whole, made, args, {key: given(one) for key, one in self._kwargs.items()})
        finally:
            attributes.set(values)
            frames.end_repeat(outer)
            if now is not None:
                now.restore()


class _Whole(NamedTuple):
    """Stands for what was gathered among the arguments of a call, and where it lies over cp."""

    place: Place | None


_DIFFERS = (
    "recompute='activations': an MLP that runs again in the backward computes something else than in the forward ({} in the place "
    "of {}); it must depend on its inputs, parameters and attributes alone, or use recompute='none'"
)


def _without_history(x: Tensor) -> Tensor:
    """A tensor as a leaf: a hook that the module registers on it must not reach the graph of the forward."""
    if isinstance(x, SeqPart):
        return SeqPart.wrap(_without_history(x.local), x.place)
    return x.detach().requires_grad_(x.requires_grad)


def _refuse(kept: None) -> Tensor:
    """Nothing is asked for what is kept where a call runs again."""
    raise AssertionError("a backward ran through what was made again")
