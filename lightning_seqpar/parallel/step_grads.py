"""Gradients of earlier micro-batches, as a training step of the user's sees them: norms of them are norms of the whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_seqpar.distributed.autograd import unseen, without_subclasses
from lightning_seqpar.layout.param_layout import ParamLayout
from lightning_seqpar.parallel.apply import whole_tensor
from lightning_seqpar.parallel.sharded_model import ShardedModel

_REDUCTIONS = frozenset(
    ["linalg_vector_norm", "vector_norm", "norm", "_foreach_norm", "linalg_norm", "sum", "mean", "max", "min", "amax", "amin",
     "std", "var", "dot", "prod", "isfinite", "isnan", "isinf", "item", "tolist", "median", "quantile", "count_nonzero"]
)  # fmt: skip
"""Functions that read all elements of a gradient together."""


@dataclass
class _Window:
    """The gradients of one step.

    Attributes:
        record: of the model.
        settle: sums the partial gradients, which are plain while it runs; collective.
        plain: the gradients themselves, by the parameter's name.
        is_settled: whether they are summed.
    """

    record: ShardedModel
    settle: Callable[[], None]
    plain: dict[str, Tensor]
    shown: dict[str, StepGrad]
    is_settled: bool = False

    def put(self, grads: dict[str, Tensor] | dict[str, StepGrad]) -> None:
        """Give the parameters these gradients."""
        for name, grad in grads.items():
            self.record.layout.parameter(name).grad = grad

    def hide(self) -> None:
        """Give the parameters their plain gradients, for the rest of the step."""
        for name, shown in self.shown.items():
            if self.record.layout.parameter(name).grad is shown:
                self.record.layout.parameter(name).grad = self.plain[name]
        self.shown = {}

    def sum_partial(self) -> None:
        """Sum the partial gradients, once; collective over tp."""
        if not self.is_settled:
            self.is_settled = True
            self.put(self.plain)
            with unseen():
                self.settle()
            self.put(self.shown)


class StepGrad(Tensor):
    """A rank's part of a gradient, in the gradient's own memory.

    Elementwise functions, in place too, work on the part. What reads all elements together (a norm, a maximum) reads the whole
    gradient, which is a collective over tp.
    """

    _window: _Window
    _layout: ParamLayout

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function on parts, or on whole gradients.

        Raises:
            RuntimeError: for a norm where other ranks have other positions of the sequences (cp).
        """
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__":
            with without_subclasses():
                return func(*args, **kwargs)
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StepGrad))
        window, layout = first._window, first._layout
        window.sum_partial()
        if name in _REDUCTIONS:
            args, kwargs = tree_map_only(StepGrad, _whole, (args, kwargs))
            return func(*args, **kwargs)
        with without_subclasses():
            out = func(*args, **kwargs)
            is_part = type(out) is Tensor and out.shape == first.shape
            return _show(out, layout, window) if is_part else out


def plain_gradient(grad: Tensor) -> Tensor:
    """A gradient without what makes its norms those of the whole, in the same memory; nothing is sent."""
    if not isinstance(grad, StepGrad):
        return grad
    with without_subclasses():
        return grad.as_subclass(Tensor)


def _show(grad: Tensor, layout: ParamLayout, window: _Window) -> StepGrad:
    out = grad.as_subclass(StepGrad)
    out._window, out._layout = window, layout
    return out


def _whole(grad: StepGrad) -> Tensor:
    """The whole gradient of which this is a part. Collective over tp."""
    record = grad._window.record
    if "cp" in record.groups.topology.axes and record.groups.size("cp") > 1:
        raise RuntimeError(
            f"{grad._layout.name}: the step reads a norm of gradients that are accumulated, and with cp={record.groups.size('cp')} "
            "each rank has those of its positions: clip with Trainer(gradient_clip_val=...), or self.clip_gradients in "
            "configure_gradient_clipping"
        )
    with without_subclasses(), unseen():  # whoever follows what is made of parts must not follow this
        return whole_tensor(grad.as_subclass(Tensor), replace(grad._layout, stages=()), record.groups)


@contextmanager
def step_gradients(record: ShardedModel, settle: Callable[[], None]) -> Iterator[_Window]:
    """A context for a step's forward, in which the gradients of earlier micro-batches are :class:`StepGrad`.

    ``torch.nn.utils.clip_grad_norm_`` in a step is right there. Behind it the gradients are plain again.

    Args:
        record: of the sharded model.
        settle: sums the partial gradients; collective over tp.
    """
    layouts = {name: record.layout[name] for name in record.layout}
    plain = {name: grad for name in layouts if (grad := record.layout.parameter(name).grad) is not None}
    window = _Window(record, settle, plain, {})
    window.shown = {name: _show(grad, layouts[name], window) for name, grad in plain.items()}
    window.put(window.shown)
    try:
        yield window
    finally:
        for name, shown in window.shown.items():
            parameter = record.layout.parameter(name)
            if parameter.grad is shown:
                parameter.grad = plain[name]
            elif isinstance(parameter.grad, StepGrad):  # one that the step made of it
                with without_subclasses():
                    parameter.grad = parameter.grad.as_subclass(Tensor)
        # They refer to the window, which would keep them, and their memory, until the next garbage collection.
        window.shown, window.plain = {}, {}
