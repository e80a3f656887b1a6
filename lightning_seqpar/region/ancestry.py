"""Checks of paths in the autograd graph: to every column through a gather, and to every output of a block through a row.

The gradient of a column's input is one term of a sum on each rank, and only the backward of a gather (or of a copy) sums the
terms. So the gradient on a path around the gather, or around the row behind it, would be wrong by a factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from lightning_seqpar.distributed.autograd import children, leaf_of, reach, sequence_nr
from lightning_seqpar.region.partial_sum_check import REDUCTIONS


def passes_by_rows(start: Any, gathers: Sequence[Any]) -> bool:
    """Whether a path leads from the node ``start`` back to one of ``gathers`` without the reduction of a row linear on it."""
    first = min(sequence_nr(node) for node in gathers)

    def follow(node: Any) -> list[Any]:
        if leaf_of(node) is not None or type(node) in REDUCTIONS or sequence_nr(node) < first:
            return []  # what was made before the gathers does not lead to them
        return children(node)

    return any(node in gathers for node in reach(start, follow))


def check_reduced(out: Tensor, pending: Sequence[tuple[str, Sequence[Any]]], block: str) -> None:
    """Every path to a block's output from what was gathered in it must have passed a row linear.

    Args:
        out: the output.
        pending: modules that returned before their row ran, and the graph nodes of what was gathered for them.
        block: the block's name.

    Raises:
        ValueError: naming the module whose gathered input reaches the output by another path.
    """
    for module, gathers in pending:
        if passes_by_rows(out.grad_fn, gathers):
            raise ValueError(
                f"{module}: what it makes of its gathered input reaches the output of {block} past the row linear (a "
                "residual inside the module?), and the gradient on that path would count tp times; gather at the column "
                "linears themselves, or at a module that leaves the residual outside"
            )


def check_ancestry(x: Tensor, gathers: Sequence[Any], module: str) -> None:
    """The input of a column linear must depend on activations through a gather alone.

    Args:
        x: the input, ``[b, s, h]``.
        gathers: graph nodes of what was gathered for the modules that are running.
        module: the column's name.

    Raises:
        ValueError: naming the module, if it depends on an activation that was not gathered for it.
    """
    if x.grad_fn is None or not gathers or x.grad_fn in gathers:
        return
    first = min(sequence_nr(node) for node in gathers)

    def follow(node: Any) -> list[Any]:
        return [] if node in gathers else children(node)

    for node in reach(x.grad_fn, follow):
        if node in gathers:
            continue
        leaf = leaf_of(node)
        if sequence_nr(node) < first if leaf is None else not isinstance(leaf, Parameter):
            raise ValueError(
                f"{module}: its input depends on a whole activation that was not gathered for it (encoder states?), "
                "whose gradient would be a part on each rank; name that argument in a gather rule if it is a shard, in a "
                "copy rule if it is whole already"
            )
