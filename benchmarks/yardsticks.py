"""What a sharded block need not cost more than: the same block cut by hand, on the bare means of torch.

Between the blocks each rank has its part of the sequence. A module whose columns read the whole sequence gathers it in front
of them, and its row sums the ranks' terms and keeps the rank's part of the sum: two collectives forward, as in Megatron-LM
(arXiv 2205.05198). ``one_function`` is the same exchange with the products inside the autograd function, which keeps the part
alone and gathers it again in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

Groups = Mapping[str, tuple[Mapping[str, int], str]]
"""Modules of a block that read whole sequences: of each its columns, with how many parts are fused in them, and its row."""


def gather(x: Tensor, group: ProcessGroup, async_op: bool = False) -> tuple[Tensor, Work | None]:
    """``[b, s/tp, h]`` of every rank, one behind the other (:func:`joined`), and the work to wait for."""
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    return out, dist.all_gather_single(out, x.contiguous(), group=group, async_op=async_op)


def joined(parts: Tensor, group: ProcessGroup) -> Tensor:
    """``[tp·b, s/tp, h]`` as ``[b, s, h]``."""
    return parts.view(group.size(), -1, *parts.shape[1:]).movedim(0, 1).flatten(1, 2)


def reduce_scatter(x: Tensor, group: ProcessGroup, async_op: bool = False) -> tuple[Tensor, Work | None]:
    """The rank's ``[b, s/tp, h]`` of the sum of every rank's ``[b, s, h]``, and the work to wait for."""
    parts = x.view(x.shape[0], group.size(), -1, x.shape[-1]).movedim(1, 0).contiguous()
    out = parts.new_empty(parts.shape[1:])
    return out, dist.reduce_scatter_single(out, parts.flatten(0, 1), group=group, async_op=async_op)


def part(x: Tensor, group: ProcessGroup) -> Tensor:
    """The rank's ``[b, s/tp, h]`` of ``[b, s, h]``."""
    return x.chunk(group.size(), 1)[group.rank()].contiguous()


class Gather(torch.autograd.Function):
    """Forward: gather. Backward: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return joined(gather(x, group)[0], group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_scatter(grad, ctx.group)[0], None


class ReduceScatter(torch.autograd.Function):
    """Forward: reduce-scatter. Backward: gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return joined(gather(grad, ctx.group)[0], ctx.group), None


class Enter(torch.autograd.Function):
    """Forward: the rank's part. Backward: gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return part(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return joined(gather(grad, ctx.group)[0], ctx.group), None


class Leave(torch.autograd.Function):
    """Forward: gather. Backward: the rank's part, for every rank has the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return joined(gather(x, group)[0], group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return part(grad, ctx.group), None


class GatherColumns(torch.autograd.Function):
    """The gathered sequence and every column's product with it; of weights and biases in turn.

    Keeps the part. The backward gathers it again under the input-gradient products, and sums the parts' gradient under
    those of the weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, *params: Tensor | None) -> tuple[Tensor, ...]:
        whole = joined(gather(x, group)[0], group)
        weights, biases = params[::2], params[1::2]
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return whole, *(F.linear(whole, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, of_whole: Tensor | None, *grads: Tensor | None) -> Any:
        x, *weights = ctx.saved_tensors
        again, gathered = gather(x, ctx.group, async_op=True)
        total = None if of_whole is None else of_whole.flatten(0, 1)
        flat = [None if grad is None else grad.flatten(0, 1) for grad in grads]
        for grad, weight in zip(flat, weights, strict=True):
            if grad is not None:
                total = grad @ weight if total is None else torch.addmm(total, grad, weight)
        of_part, summed = reduce_scatter(total.view(x.shape[0], -1, x.shape[-1]), ctx.group, async_op=True)
        gathered.wait()
        whole = joined(again, ctx.group).flatten(0, 1)
        made: list[Tensor | None] = []
        for at, grad in enumerate(flat):
            made.append(None if grad is None else grad.t() @ whole)
            made.append(grad.sum(0) if grad is not None and ctx.needs_input_grad[2 * at + 3] else None)
        summed.wait()
        return of_part, None, *made


class Row(torch.autograd.Function):
    """The product, its terms summed over the ranks: the rank's part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return reduce_scatter(F.linear(x, weight), group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        whole = joined(gather(grad, ctx.group)[0], ctx.group)
        return whole @ weight, whole.flatten(0, 1).t() @ x.flatten(0, 1), None


class ColumnLinear(nn.Linear):
    """Gives what :class:`GatherColumns` made of its input."""

    made: tuple[Tensor, Tensor]

    def forward(self, x: Tensor) -> Tensor:
        whole, made = self.__dict__.pop("made")
        assert whole is x
        return made


class RowLinear(nn.Linear):
    """A product and its sum, in two functions."""

    group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        return self._add(ReduceScatter.apply(F.linear(x, self.weight), self.group))

    def _add(self, x: Tensor) -> Tensor:
        return x if self.bias is None else x + self.bias


class OneFunctionRowLinear(RowLinear):
    """A product and its sum, in one function."""

    def forward(self, x: Tensor) -> Tensor:
        return self._add(Row.apply(x, self.weight, self.group))


def cut(tensor: Tensor, dim: int, group: ProcessGroup, fused: int = 1) -> nn.Parameter:
    """The rank's part of a parameter, of each of ``fused`` pieces of the dimension."""
    pieces = tensor.detach().unflatten(dim, (fused, -1)).chunk(group.size(), dim + 1)
    return nn.Parameter(pieces[group.rank()].flatten(dim, dim + 1).clone())


def by_hand(model: nn.Module, blocks: nn.ModuleList, groups: Groups, group: ProcessGroup, *, one_function: bool) -> None:
    """Cut the linears of the blocks and put the exchange around them, in place."""
    for block in blocks:
        for name, (columns, row) in groups.items():
            module = block.get_submodule(name)
            linears = [module.get_submodule(column) for column in columns]
            for linear, fused in zip(linears, columns.values(), strict=True):
                linear.weight = cut(linear.weight, 0, group, fused)
                if linear.bias is not None:
                    linear.bias = cut(linear.bias, 0, group, fused)
            last = module.get_submodule(row)
            last.weight = cut(last.weight, 1, group)
            last.__class__ = OneFunctionRowLinear if one_function else RowLinear
            last.group = group
            if hasattr(module, "n_head"):
                module.n_head //= group.size()
            module.register_forward_pre_hook(_multiply(linears, group) if one_function else _gather(group))
    blocks[0].register_forward_pre_hook(lambda module, args: Enter.apply(args[0], group))
    blocks[-1].register_forward_hook(lambda module, args, out: Leave.apply(out, group))


def _gather(group: ProcessGroup) -> Any:
    return lambda module, args: Gather.apply(args[0], group)


def _multiply(linears: list[nn.Module], group: ProcessGroup) -> Any:
    params = [parameter for linear in linears for parameter in (linear.weight, linear.bias)]
    for linear in linears:
        linear.__class__ = ColumnLinear

    def hook(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        whole, *made = GatherColumns.apply(args[0], group, *params)
        for linear, y in zip(linears, made, strict=True):
            linear.made = whole, y
        return whole

    return hook
