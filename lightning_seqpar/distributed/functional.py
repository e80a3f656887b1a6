"""Collectives as operations of a graph, which ``torch.compile`` traces in the place of those of a process group.

While a graph is traced, :func:`all_reduce`, :func:`all_gather` and :func:`reduce_scatter` of
:mod:`~lightning_seqpar.distributed.async_ops` are those of here, so that the autograd pairs are traced as they are written.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed import async_ops
from lightning_seqpar.distributed.async_ops import pad

_OPS = torch.ops._c10d_functional


# Not by torch.library.custom_op, which asks all modules of the process for their files, and some raise.
_LIBRARY = torch.library.Library("lightning_seqpar", "DEF")
_LIBRARY.define("behind(Tensor x, Tensor grad) -> Tensor")
_LIBRARY.impl("behind", lambda x, grad: x.clone(), "CompositeExplicitAutograd")


def behind(x: Tensor, grad: Tensor) -> Tensor:
    """``x`` in a new tensor, which is there no sooner than ``grad`` is.

    What is made of it is made in the backward. Else a compiler finds that a gather in the backward gives what one in the forward
    gave, and keeps that.
    """
    out: Tensor = torch.ops.lightning_seqpar.behind(x, grad)
    return out


class GraphAllReduce:
    """A sum of tensors of any shape over the group, which the graph waits for where :meth:`wait` is called."""

    def __init__(self, x: Tensor, group: ProcessGroup) -> None:
        self._out = _OPS.all_reduce(x.contiguous(), "sum", group.group_name)

    def wait(self) -> Tensor:
        """The sum, in a new tensor."""
        out: Tensor = _OPS.wait_tensor(self._out)
        return out


class GraphGather:
    """An all-gather of ``[b, ceil(s/tp), h]`` along ``dim``, which the graph waits for where :meth:`wait` is called.

    The result is trimmed to the true ``length``, ``s``; None for all that was gathered.
    """

    def __init__(self, x: Tensor, dim: int, group: ProcessGroup, length: int | None) -> None:
        self._dim, self._length = dim % x.ndim, length
        self._out = _OPS.all_gather_into_tensor(x.unsqueeze(0).contiguous(), group.size(), group.group_name)

    def wait(self) -> Tensor:
        """The shards as one tensor, trimmed to the true length: ``[b, s, h]``."""
        dim = self._dim
        out: Tensor = _OPS.wait_tensor(self._out).movedim(0, dim).flatten(dim, dim + 1)
        return out if self._length is None else out.narrow(dim, 0, self._length)


class GraphReduceScatter:
    """A reduce-scatter of ``[b, s, h]`` along ``dim``, which the graph waits for where :meth:`wait` is called.

    ``padding`` zeros are added behind ``s``, for it to divide by the group.
    """

    def __init__(self, x: Tensor, dim: int, group: ProcessGroup, padding: int) -> None:
        dim, size = dim % x.ndim, group.size()
        x = pad(x, dim, x.shape[dim] + padding) if padding else x
        stacked = x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0).contiguous()
        self._out = _OPS.reduce_scatter_tensor(stacked, "sum", size, group.group_name)

    def wait(self) -> Tensor:
        """This rank's shard of the sum, ``[b, ceil(s/tp), h]``."""
        out: Tensor = _OPS.wait_tensor(self._out)
        return out.squeeze(0)


@torch.compiler.substitute_in_graph(async_ops.all_reduce)
def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of ``x`` over the group, in a new tensor of the same shape. Not differentiable."""
    return GraphAllReduce(x, group).wait()


@torch.compiler.substitute_in_graph(async_ops.all_gather)
def all_gather(x: Tensor, dim: int, group: ProcessGroup, length: int | None = None) -> Tensor:
    """All shards along ``dim``, trimmed to ``length``, in a new tensor. Not differentiable."""
    return GraphGather(x, dim, group, length).wait()


@torch.compiler.substitute_in_graph(async_ops.reduce_scatter)
def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard along ``dim`` of the sum over the group, zero-padded. Not differentiable."""
    return GraphReduceScatter(x, dim, group, -x.shape[dim] % group.size()).wait()
