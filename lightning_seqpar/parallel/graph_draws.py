"""What is looked for in the graph of a traced block: draws from the wrong stream, and changes of what was gathered.

Eagerly a region switches between two streams. A compiled block draws from the rank's own throughout, or without sequence
parallelism from the replicated one. What would need the other is refused when the graph is made, and so is what may need it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_seqpar.layout.param_layout import ModelLayout
from lightning_seqpar.parallel.compiled_blocks import GraphRefusedError
from lightning_seqpar.region.sequence_region import SequenceRegion


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


def _parts(node: fx.Node, graph: fx.GraphModule) -> list[fx.GraphModule]:
    """The graphs that a node runs: an activation checkpoint's, or the forward and the backward of an autograd function."""
    held = [getattr(graph, str(one.target), None) for one in node.all_input_nodes if one.op == "get_attr"]
    return [one for one in held if isinstance(one, fx.GraphModule)]


def _collectives(graph: fx.GraphModule) -> list[str]:
    """The collectives of a graph, by name."""
    kinds = ("all_gather", *_SUMS)
    return [kind for node in graph.graph.nodes for kind in kinds if kind in str(node.target)]


def _value(node: Any) -> Any:
    """The example of what a node gives."""
    return node.meta.get("example_value")


def _sizes(shape: Sequence[Any]) -> list[int | str]:
    """A shape as messages show it, in which sizes may be symbols."""
    return [size if isinstance(size, int) else str(size) for size in shape]


def _draws(node: fx.Node, mode: Any) -> bool:
    """Whether what a node computes draws random numbers: its operation is run on examples that hold no numbers."""
    args: Any = fx.node.map_arg(node.args, _value)
    kwargs: Any = fx.node.map_arg(node.kwargs, _value)
    draws = _Draws()  # type: ignore[no-untyped-call]
    with torch.no_grad(), mode, draws:  # without a gradient, since saved-tensor hooks of the user's may be active
        if node.op == "call_method":
            getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            node.target(*args, **kwargs)  # type: ignore[operator]
    return draws.drew


_QUIET = ("c10d_functional", "lightning_seqpar", "wait_tensor", "getitem", "getattr", "setitem")
"""Parts of names of operations that draw nothing and better not run: collectives, and what reads parts."""
_SUMS = ("reduce_scatter", "all_reduce")
"""Parts of names of collectives behind which a value is no term of a sum any more."""


def check_graph(graph: fx.GraphModule, inputs: Sequence[Any], layout: ModelLayout, region: SequenceRegion) -> None:
    """Raise GraphRefusedError for a graph that would not compute what its block does."""
    check_gathered(graph)
    check_draws(graph, inputs, layout, region)


def check_draws(graph: fx.GraphModule, inputs: Sequence[Any], layout: ModelLayout, region: SequenceRegion) -> None:
    """Raise GraphRefusedError for the first draw of a graph that its block's stream is wrong for."""
    # The mode that the examples were made in; while a backend runs, another one is current.
    examples = (value for node in graph.graph.nodes if isinstance(value := _value(node), FakeTensor))
    first = next(examples, None)
    if first is not None:
        known = [layout.of(value) if isinstance(value, Tensor) else None for value in inputs]
        given = ["cut" if one is not None and one.is_sharded else "" for one in known]
        _Follower(region, first.fake_mode).follow(graph, given)


def check_gathered(graph: fx.GraphModule) -> None:
    """Raise GraphRefusedError where a block changes in place what was gathered for columns, which have multiplied it before.

    Eagerly a column that is called with what was changed multiplies it again.
    """
    for node in graph.graph.nodes:
        if "autograd_function_apply" not in str(node.target):
            continue
        read = {one.args[1]: one for one in node.users if one.target is operator.getitem}
        whole = _value(read[0]) if len(read) > 1 and 0 in read else None
        if isinstance(whole, Tensor) and whole._version:
            raise GraphRefusedError(
                f"a gathered activation of shape {_sizes(whole.shape)} is changed in place, in front of linears that have "
                "multiplied it where it was gathered: write the change as a new tensor"
            )


class _Follower:
    """Follows through a graph which values are whole, and which are this rank's features."""

    def __init__(self, region: SequenceRegion, mode: Any) -> None:
        self._region, self._mode = region, mode

    def follow(self, graph: fx.GraphModule, given: Sequence[Any]) -> Any:
        """The states of what a graph returns, as it returns it, given those of its inputs."""
        state: dict[fx.Node, Any] = {}
        inputs = iter(given)
        for node in graph.graph.nodes:
            state[node] = next(inputs, "") if node.op == "placeholder" else self._state(node, state, graph)
            if node.op not in ("call_function", "call_method") or _parts(node, graph):
                continue
            if not any(text in str(node.target) for text in _QUIET) and _draws(node, self._mode):
                self._check_draw(node, state[node])
        (output,) = graph.graph.find_nodes(op="output")
        return fx.node.map_arg(output.args[0], state.__getitem__)

    def _state(self, node: fx.Node, state: Mapping[fx.Node, Any], graph: fx.GraphModule) -> Any:
        """``features`` of this rank, ``whole`` on a way to columns, ``cut`` for a parameter of which this is a part, or neither.

        Of a node that gives several values a tuple of such.
        """
        if node.target is operator.getitem and isinstance(several := state[node.all_input_nodes[0]], tuple | list):
            at: Any = node.args[1]
            return several[at]
        inputs = tree_leaves([state[one] for one in node.all_input_nodes])
        if parts := _parts(node, graph):
            inner = [state[one] for one in node.all_input_nodes if one.op != "get_attr"]
            # Of a function with its own backward the first graph is the forward, which may be given its context first.
            forward, used = parts[0], [text for part in parts for text in _collectives(part)]
            given = sum(one.op == "placeholder" for one in forward.graph.nodes)
            behind = self.follow(forward, [""] * (given - len(inner)) + inner)
            if "autograd_function_apply" not in str(node.target):
                return behind
            behind = behind[0]  # and what it keeps for its backward
            if not used:
                return behind
            first = _collectives(forward)
            gathers = "all_gather" in first or (not first and "all_reduce" in used)
            moved = "whole" if self._region.sp and gathers else ""
            return tree_map(lambda one: one if one == "features" else moved, behind)
        if "all_gather" in str(node.target):
            return "whole"
        if any(text in str(node.target) for text in _SUMS):
            return ""
        if "cut" in inputs or "features" in inputs:
            return "features"
        return "whole" if "whole" in inputs else ""

    def _check_draw(self, node: fx.Node, state: str) -> None:
        what = getattr(node.target, "__name__", str(node.target))
        if not self._region.sp:
            if state == "features":
                raise GraphRefusedError(
                    f"{what} draws for this rank's features, but without sequence parallelism a compiled block draws alike on "
                    "all ranks: use sp=True, or set that dropout to 0"
                )
            return
        if state == "whole":
            raise GraphRefusedError(
                f"{what} draws for whole activations between a gather and its columns, where all ranks must draw alike, but a "
                "compiled block draws for each rank by itself: set that dropout to 0"
            )
        shape = tuple(getattr(_value(node), "shape", ()))
        if node.target is F.scaled_dot_product_attention:  # it drops out single elements of what it looks at
            return
        if node.target in (F.dropout, torch.dropout) and (state == "features" or self._is_shard(node)):
            return  # single elements too
        raise GraphRefusedError(
            f"{what} draws a tensor of shape {_sizes(shape)}, which is not dropout of "
            "each element of an activation: for all positions alike (stochastic depth) the ranks would have to draw alike"
        )

    def _is_shard(self, node: fx.Node) -> bool:
        """Whether a node gives an activation's shard, in which every position is one of this rank alone."""
        value, frame = _value(node), self._region.frames.current  # the block's that is traced
        if not isinstance(value, Tensor) or value.ndim != frame.ndim:
            return False
        length = value.shape[self._region.dim]
        length = length if isinstance(length, int) else length.node.hint  # asking a symbol would bind the graph to it
        return bool(length == frame.part)
