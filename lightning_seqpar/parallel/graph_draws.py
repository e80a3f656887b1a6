"""Random draws of a traced block: whether all of them may come from the one stream that the block runs on.

Eagerly a region switches between two random streams as modules begin and end. A graph can't: with sequence parallelism a compiled
block draws from the rank's own stream throughout, and without it from the replicated one. So what would need the other stream is
refused when the graph is made, as are draws of which a graph does not tell what they are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_seqpar.layout.param_layout import ModelLayout
from lightning_seqpar.region.lowered import LoweredRegion

_ELEMENTWISE = (F.dropout, torch.dropout)
"""What drops out single elements."""
_ATTENTION = (F.scaled_dot_product_attention,)
"""What drops out single elements of what attention looks at."""


class _Draws(TorchDispatchMode):
    """Notes whether any operation draws random numbers."""

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            schema = func._schema.arguments
            given = {one.name: one.default_value for one in schema if one.has_default_value()}
            given |= dict(zip((one.name for one in schema), args, strict=False)) | kwargs
            rate = given.get("dropout_p", given.get("p"))
            self.drew = self.drew or rate != 0.0
        return func(*args, **kwargs)


def _value(node: Any) -> Any:
    """The example of what a node gives."""
    return node.meta.get("example_value")


def _draws(node: fx.Node, mode: Any) -> bool:
    """Whether what a node computes draws random numbers: its operation is run on examples that hold no numbers."""
    args, kwargs = (fx.node.map_arg(given, _value) for given in (node.args, node.kwargs))
    with mode, _Draws() as draws:
        if node.op == "call_method":
            getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            node.target(*args, **kwargs)  # type: ignore[operator]
    return draws.drew


_OPAQUE = ("_c10d_functional", "autograd_function_apply", "wait_tensor", "getitem", "getattr", "setitem")


def _is_opaque(node: fx.Node) -> bool:
    """Whether an operation is known to draw nothing and better not run: a collective, or a function with its own backward."""
    return node.op not in ("call_function", "call_method") or any(text in str(node.target) for text in _OPAQUE)


def _tensors(node: fx.Node) -> Iterator[fx.Node]:
    return iter(node.all_input_nodes)


class GraphDraws:
    """Follows through a graph which values are whole, and which are this rank's features.

    Args:
        graph: a block's, as it was traced.
        inputs: what it was traced with.
        layout: of the model's parameters.
        lowered: the block's region.
    """

    def __init__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], layout: ModelLayout, lowered: LoweredRegion
    ) -> None:
        self._nodes, self._lowered = list(graph.graph.nodes), lowered
        placeholders = [node for node in self._nodes if node.op == "placeholder"]
        self._cut = {
            node
            for node, value in zip(placeholders, inputs, strict=True)
            if isinstance(value, Tensor) and (known := layout.of(value)) is not None and known.is_sharded
        }

    def refusal(self) -> str | None:
        """The first draw that the block's stream is wrong for, in words; None if there is none."""
        state: dict[fx.Node, str] = {}
        # The mode that the examples were made in; while a backend runs, another one is current.
        examples = [value for value in map(_value, self._nodes) if isinstance(value, FakeTensor)]
        mode = examples[0].fake_mode if examples else None
        for node in self._nodes:
            state[node] = self._state(node, state)
            if mode is None or _is_opaque(node) or not _draws(node, mode):
                continue
            if (why := self._refuse(node, state[node])) is not None:
                return why
        return None

    def _state(self, node: fx.Node, state: Mapping[fx.Node, str]) -> str:
        """``features`` of this rank, ``whole`` on a way to columns, or neither."""
        if "all_gather" in str(node.target):
            return "whole"
        if any(text in str(node.target) for text in ("reduce_scatter", "all_reduce", "autograd_function_apply")):
            return ""
        inputs = [state[one] for one in _tensors(node)]
        if any(one in self._cut for one in _tensors(node)) or "features" in inputs:
            return "features"
        return "whole" if "whole" in inputs else ""

    def _refuse(self, node: fx.Node, state: str) -> str | None:
        what = getattr(node.target, "__name__", str(node.target))
        if not self._lowered.sp:
            if state != "features":
                return None
            return (
                f"{what} draws for this rank's features, but without sequence parallelism a compiled block draws alike on all "
                "ranks: use sp=True, or set that dropout to 0"
            )
        if state == "whole":
            return (
                f"{what} draws for whole activations between a gather and its columns, where all ranks must draw alike, but a "
                "compiled block draws for each rank by itself: set that dropout to 0"
            )
        shape = tuple(getattr(_value(node), "shape", ()))
        elementwise = node.target in _ELEMENTWISE and (state == "features" or self._is_shard(node))
        if elementwise or node.target in _ATTENTION:
            return None
        return (
            f"{what} draws a tensor of shape {[int(n) if isinstance(n, int) else str(n) for n in shape]}, which is not dropout of "
            "each element of an activation: for all positions alike (stochastic depth) the ranks would have to draw alike"
        )

    def _is_shard(self, node: fx.Node) -> bool:
        """Whether a node gives an activation's shard, in which every position is one of this rank alone."""
        value, lowered = _value(node), self._lowered
        if not isinstance(value, Tensor) or value.ndim != lowered.ndim:
            return False
        return int(value.shape[lowered.dim]) == -(-lowered.length // lowered.size)
