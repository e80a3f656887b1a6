"""Code that runs beside the forward and names a weight, of which a rank would have a part if the vocabulary were sharded.

What a loss reads is guarded in its graph. ``self.embed.weight.grad[:1000] = 0`` in ``on_after_backward`` is not: it would take
rows of this rank's part for rows of the vocabulary.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Iterator

from lightning.pytorch import Callback, LightningModule

_STEPS = {"backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping",
          "validation_step", "test_step", "predict_step"}  # fmt: skip
"""Methods of modules and callbacks that run while training or evaluating, beside those whose names begin with ``on_``."""

_WEIGHTS = {"weight", "get_input_embeddings", "get_output_embeddings"}
"""Names by which code comes to an embedding's or a head's weight."""

_PAST_THE_GRAPH = {"grad", "data", "no_grad"}
"""Names by which code reads or changes a weight past autograd."""


def weight_reader(owners: Iterable[object]) -> str | None:
    """The first hook or step, as ``Class.method``, whose code or that of what it calls names a weight; None if there is none.

    Of training steps only those that also name ``grad``, ``data`` or ``no_grad``. ``owners`` are a LightningModule and callbacks.
    """
    for owner in owners:
        for kind in itertools.takewhile(_is_the_users, type(owner).__mro__):
            for name, method in vars(kind).items():
                runs = name.startswith("on_") or name in _STEPS
                if not isinstance(method, types.FunctionType) or not (runs or name == "training_step"):
                    continue
                names = _names(method, owner, set())
                # What a training step reads of a weight for its loss is guarded in the graph; only past that it is not.
                if names & _WEIGHTS and (runs or names & _PAST_THE_GRAPH):
                    return f"{kind.__name__}.{name}"
    return None


def _is_the_users(kind: type) -> bool:
    """Whether a class of an object stands in front of Lightning's."""
    of_lightning = kind.__module__.startswith(("lightning.", "pytorch_lightning."))
    return kind not in (LightningModule, Callback, object) and not of_lightning


def _names(function: types.FunctionType, owner: object, seen: set[int]) -> set[str]:
    """The names in a function's code, and in that of the methods of its object and the functions beside it that it calls."""
    seen.add(id(function))
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    for name in tuple(names):
        for called in (getattr(type(owner), name, None), function.__globals__.get(name)):
            if not isinstance(called, types.FunctionType) or called.__module__ != function.__module__:
                continue
            if id(called) not in seen:
                names |= _names(called, owner, seen)
    return names


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
