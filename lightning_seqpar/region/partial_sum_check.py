"""Checks of modules whose output is summed over ranks, read from the autograd graph while training runs.

Each rank returns one term of the sum. Anything in it that is the same on all ranks (a residual, an expert that is whole) would
count once per rank. So everything that is added up must come from a row linear, which makes terms of a sum, and must be linear
in what the row made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_seqpar.distributed import collectives
from lightning_seqpar.distributed.autograd import (
    backward_classes,
    children,
    input_node,
    input_nodes,
    is_node_of,
    leaf_of,
    node_classes,
    reach,
)
from lightning_seqpar.layout.module_names import in_all_layers
from lightning_seqpar.region import float8, products


class TermKind(Enum):
    """What the result of a graph node is: the same on all ranks, one term of a sum over ranks, or neither."""

    WHOLE = "whole"
    PART = "a part of a sum"
    WRONG = "neither"


_ADDING = node_classes(
    "Add", "Sub", "Cat", "Stack", "IndexAdd", "IndexPut", "IndexPutImpl", "CopySlices", "Scatter", "ScatterAdd",
    "ScatterReduce", "Where", "SelectScatter", "SliceScatter", "IndexCopy", "AsStridedScatter", "MaskedScatter",
)  # fmt: skip
"""Nodes whose result is a part of a sum where all that they put together is."""

_LINEAR = node_classes(
    "View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "T", "Expand", "Squeeze", "Unsqueeze", "Slice", "Select",
    "Split", "SplitWithSizes", "Chunk", "Unbind", "Index", "IndexSelect", "Gather", "Sum", "Mean", "Clone", "ToCopy", "Neg",
    "Alias", "AsStrided", "Flip", "Roll", "Repeat", "ConstantPadNd", "MaskedFill", "NativeDropout", "Cumsum", "IndexFill",
    "Tril", "Triu", "Unfold",
)  # fmt: skip
"""Nodes that are linear in their one argument."""

_MULTIPLYING = node_classes("Mul", "Mm", "Bmm", "Mv", "Dot", "Matmul", "Linear", "GroupedMm")
"""Nodes that are linear in each of their arguments."""

_ADDED_PRODUCTS = node_classes("Addmm", "Baddbmm", "Addbmm", "Addmv", "Addcmul")
"""Nodes that add a product to their first argument."""

_DIVIDING = node_classes("Div")
"""Nodes that are linear in their first argument alone."""

REDUCTIONS = backward_classes((*collectives.REDUCTIONS, *products.REDUCTIONS, *float8.REDUCTIONS))
"""Nodes behind which every rank has the whole, or its shard, of a sum over ranks."""


class PartialSumError(ValueError):
    """A module returns something other than one term of a sum over ranks."""


class MarkRow(torch.autograd.Function):
    """Makes a frozen row parameter show in the graph, which holds no node for what needs no gradient.

    Forward: identity, ``parameter`` of any shape; ``probe`` is a scalar that needs a gradient. Backward: no gradient for either.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, probe: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class PartialSumCheck:
    """Reads the graph of a call of a module that returns one term of a sum over ranks; ``marked`` is what row linears made."""

    def __init__(self, marked: Collection[Any], rows: Collection[nn.Parameter], once: Collection[nn.Parameter]) -> None:
        self._marked = set(marked)
        self._rows, self._once = {id(p) for p in rows}, {id(p) for p in once}
        self._kinds: dict[Any, TermKind] = {}
        self.culprit = ""

    def check(self, out: Tensor, stops: Collection[Any], name: str) -> None:
        """Raises PartialSumError, naming the operation, unless what the module returns is made of what its rows made, linearly.

        Beyond ``stops``, the graph nodes of what was gathered for it, nothing is looked at.
        """
        if out.grad_fn is None:
            return
        self._stops = set(stops)
        kind = self._of(out.grad_fn)
        if kind is TermKind.PART:
            return
        what = self.culprit or f"{out.grad_fn.name()} depends on no row"
        raise PartialSumError(
            f"{name}: its output is reduced over tp where it returns, so every term of it must come from a row, linearly; "
            f"{what} (a residual, a token that no expert takes, or an expert that is not in the plan?), and would count tp "
            f"times. Leave the module whole: {{pattern: {in_all_layers(name)}, style: whole}}"
        )

    def _of(self, start: Any) -> TermKind:
        """What the result of a node is; nodes that it was made of are decided first, without recursion."""
        todo = [start]
        while todo:
            node = todo[-1]
            if node in self._kinds:
                todo.pop()
                continue
            if (known := self._leaf(node)) is not None:
                self._kinds[node] = known
                continue
            waiting = [child for child in children(node) if child not in self._kinds]
            if waiting:
                todo += waiting
                continue
            self._kinds[node] = self._decide(node)
        return self._kinds[start]

    def _leaf(self, node: Any) -> TermKind | None:
        if node in self._marked:
            return TermKind.PART
        if node in self._stops or type(node) in REDUCTIONS:
            return TermKind.WHOLE
        variable = leaf_of(node)
        if variable is not None:
            return TermKind.PART if id(variable) in self._once else TermKind.WHOLE
        return None

    def _decide(self, node: Any) -> TermKind:
        below, made_by = children(node), type(node)
        kinds = [self._kinds[child] for child in below]
        if TermKind.WRONG in kinds:
            return TermKind.WRONG
        if made_by in _ADDED_PRODUCTS:
            return self._added_product(node)
        parts = kinds.count(TermKind.PART)
        if any(self._is_row(child) for child in below) and not self._is_row(node):
            return self._part_or_wrong(node, parts == 0, "multiplies a row by a part of a sum")
        if parts == 0:
            return TermKind.WHOLE
        if made_by in _LINEAR:
            return TermKind.PART
        if made_by in _ADDING:
            return self._part_or_wrong(node, parts == len(kinds), "adds what is whole to a part of a sum")
        if made_by in _MULTIPLYING:
            return self._part_or_wrong(node, parts == 1, "multiplies two parts of a sum")
        if made_by in _DIVIDING:
            by = input_node(node, 1)
            fine = by is None or self._kinds[by] is TermKind.WHOLE
            return self._part_or_wrong(node, fine, "divides by a part of a sum")
        return self._part_or_wrong(node, False, "is not linear in a part of a sum")

    def _added_product(self, node: Any) -> TermKind:
        """What the result of ``first + a b`` is, such as a product with its bias."""
        first, *factors = input_nodes(node)
        factors = [child for child in factors if child is not None]
        parts = [self._kinds[child] for child in factors].count(TermKind.PART)
        row = any(self._is_row(child) for child in factors)
        added = None if first is None else self._kinds[first]
        if not row and parts == 0 and added is not TermKind.PART:
            return TermKind.WHOLE
        fine = parts + row == 1 and added in (None, TermKind.PART)
        return self._part_or_wrong(node, fine, "adds what is whole to a part of a sum")

    def _part_or_wrong(self, node: Any, fine: bool, why: str) -> TermKind:
        if not fine and not self.culprit:
            self.culprit = f"{node.name()} {why}"
        return TermKind.PART if fine else TermKind.WRONG

    def _is_row(self, node: Any) -> bool:
        """Whether a node is a row parameter, or a view or cast of one."""
        ends = self._down(node)
        return any(id(leaf_of(end)) in self._rows or is_node_of(end, MarkRow) for end in ends)

    @staticmethod
    def _down(node: Any) -> Iterator[Any]:
        while node is not None:
            yield node
            below = children(node)
            if len(below) != 1 or type(node) not in _LINEAR:
                return
            node = below[0]


class LossLeakCheck:
    """Notes the sums over ranks of a step, and checks that its loss reads nothing else that their modules made."""

    def __init__(self) -> None:
        self._sums: dict[Any, tuple[str, list[Any]]] = {}

    def note(self, name: str, reduced: Tensor, sources: Collection[Any]) -> None:
        """Note what a module returned."""
        if reduced.grad_fn is not None and sources:
            self._sums[reduced.grad_fn] = (name, list(sources))

    def forget(self) -> None:
        """Forget the sums of the last step."""
        self._sums = {}

    def check(self, loss: Tensor) -> None:
        """Raises PartialSumError, naming the module, if a path from the loss to what was gathered for one misses its sum."""
        if not self._sums:
            return
        owners = {source: name for name, sources in self._sums.values() for source in sources}
        for node in reach(loss.grad_fn, self._past_sums):
            if node in owners:
                raise PartialSumError(
                    f"{owners[node]}: its output is reduced over tp where it returns, and the loss reads something else that it "
                    "makes (a router's balance, or a second output?), whose gradient would count tp times. Compute that "
                    f"outside it, or leave the module whole: {{pattern: {in_all_layers(owners[node])}, style: whole}}"
                )

    def _past_sums(self, node: Any) -> list[Any]:
        """The nodes that a node was made of; for a sum, those that its module's gathered inputs were made of."""
        if node not in self._sums:
            return children(node)
        return [child for source in self._sums[node][1] for child in children(source)]
