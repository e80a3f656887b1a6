"""Batch norms that take their statistics over the batches of several ranks; made in place from the user's modules.

The ranks are those that hold different samples, the data-parallel replicas. The ranks of one replica see the same batch, and no
value is counted twice: each of them takes part in a group that has one rank of every replica.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.overrides import TorchFunctionMode

from lightning_seqpar.context.operations import arguments_of
from lightning_seqpar.distributed.collectives import gather_from_sequence_parallel_region


def _synced_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    group: ProcessGroup,
) -> Tensor:
    """A batch norm in training, of one rank's samples with the statistics of all ranks'; computed in float32 at least.

    =====================  ===========================  =========================
    tensor                 on this rank                 over the group
    =====================  ===========================  =========================
    input, output          ``[b_r, c, ...]``            ``[sum of b_r, c, ...]``
    weight, bias           ``[c]``                      the same on all ranks
    mean, variance         ``[c]``                      the same on all ranks
    =====================  ===========================  =========================

    Forward: each rank sends the mean, the variance and the number of its own values of each channel, from which all compute
    those of the whole: with ``n = sum n_r`` values, ``mean = sum n_r mean_r / n``,
    ``var = sum n_r (var_r + (mean_r - mean)^2) / n`` and ``y = (x - mean) / std * weight + bias``. Backward: autograd's; gradients
    of what ranks sent are reduce-scattered, and those of weight and bias are sums over this rank's values.
    """
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    mean, var, total = _moments(x, group)
    for kept, new in ((running_mean, mean), (running_var, var * (total / (total - 1)))):  # the latter is unbiased
        if kept is not None:
            kept.mul_(1 - momentum).add_((new.detach() * momentum).to(kept.dtype))
    factor = torch.rsqrt(var + eps) if weight is None else torch.rsqrt(var + eps) * weight
    along = (1, -1, *[1] * (x.ndim - 2))
    y = (x - mean.view(along)) * factor.view(along)  # in this order: a mean may be far larger than what is left
    return (y if bias is None else y + bias.view(along)).to(input.dtype)


def _moments(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel over all ranks' values, ``[c]``, and their number, ``[]``; a rank may have no values."""
    channels, dims = x.shape[1], [dim for dim in range(x.ndim) if dim != 1]
    count = x.numel() // max(channels, 1)
    if count:
        var, mean = torch.var_mean(x, dims, correction=0)
    else:
        var = mean = x.sum(dims)  # zeros with a graph, whose collective all ranks must run
    sent = torch.cat([mean, var, mean.new_full((1,), count)]).unsqueeze(0)
    gathered = gather_from_sequence_parallel_region(sent, 0, group, group.size())
    means, variances, counts = gathered.split([channels, channels, 1], 1)
    counts = counts.detach()
    total = counts.sum()
    if count <= 1 and int(total) <= 1:
        raise ValueError(
            f"a batch norm in training got an input of shape {list(x.shape)}, and all replicas together have {int(total)} value"
            f"{'s' * (int(total) != 1)} of each channel, where it needs more than 1; use a larger batch, or drop_last=True"
        )
    mean = (means * counts).sum(0) / total
    var = ((variances + (means - mean).square()) * counts).sum(0) / total
    return mean, var, total


class _SyncedStatistics(TorchFunctionMode):
    """A mode in which ``F.batch_norm`` takes the statistics of a training batch over all ranks of a group."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = arguments_of(func, args, kwargs or {}) if func is F.batch_norm else {}
        if not given.pop("training", False):
            return func(*args, **(kwargs or {}))
        return _synced_batch_norm(**given, group=self._group)


def make_synced(module: nn.Module, name: str, group: ProcessGroup) -> None:
    """Let a batch norm take its statistics over all ranks of a group while it trains, in place: its class becomes another.

    The object, its parameters, its buffers and their names stay; what its class computes beside the norm is computed as before. In
    evaluation mode nothing is sent. Copies are synced too; pickled, it is the module that it was. ValueError if its forward was
    replaced on the object, or it is a script of TorchScript.
    """
    own: Any = type(module)
    if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"{name}: sync_batchnorm=True, but the forward of this {own.__name__} was replaced on the object or is a script, and "
            "that of its class would be synced; change the class instead, or use sync_batchnorm=False"
        )
    takes_torchs = own.forward is nn.SyncBatchNorm.forward  # which needs CUDA, and takes the ranks of the world
    inner = BatchNorm.forward if takes_torchs else own.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return inner(self, *args, **kwargs)
        with _SyncedStatistics(group):
            return inner(self, *args, **kwargs)

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        made = nn.Module.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def reduced(self: Any, protocol: Any) -> Any:
        plain: Any = nn.Module.__new__(own)
        plain.__dict__.update(self.__dict__)
        return copy.copy, (plain,)

    looks = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    methods = {"forward": forward, "__deepcopy__": copied, "__reduce_ex__": reduced}
    module.__class__ = type(own.__name__, (own,), {**looks, **methods})
