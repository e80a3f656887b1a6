"""Embeddings and heads sharded by vocabulary, after arXiv 1909.08053."""

from __future__ import annotations

import dis
import itertools
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seqpar.context.seq_part import SeqPart, over_tp
from lightning_seqpar.distributed.autograd import once_differentiable
from lightning_seqpar.distributed.collectives import (
    copy_to_tensor_parallel_region,
    passes_none,
    reduce_from_tensor_parallel_region,
)
from lightning_seqpar.distributed.host import require_inside
from lightning_seqpar.nn.linear import shrink
from lightning_seqpar.nn.sharded_logits import ShardedLogits
from lightning_seqpar.nn.vocab_loss import VocabPart


class _ReadPart(torch.autograd.Function):
    """A rank's part of a weight or bias, as its own layer reads it: the tensor itself, forward and backward.

    Its node in the graph tells the layer from other code that reads the parameter, which would take the part for the whole.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return part.view_as(part)

    @staticmethod
    @passes_none
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


READERS = (_ReadPart,)
"""Autograd functions through which these layers read their parameters."""


def _read(part: Tensor) -> Tensor:
    read: Tensor = _ReadPart.apply(part)  # type: ignore[no-untyped-call]
    return read


def unfit_forward(module: nn.Module, base: type[nn.Module]) -> str | None:
    """Why the forward of a user's subclass of ``base`` can't be kept around a parallel layer; None if it leaves that to super."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    kind = type(module)
    for own in kind.__mro__[: kind.__mro__.index(base)]:
        if "__call__" in vars(own):
            return f"{own.__name__} has a __call__ of its own"
        forward = vars(own).get("forward")
        if forward is not None and not (isinstance(forward, types.FunctionType) and _leaves_it_to_super(forward)):
            return f"the forward of {own.__name__} computes with the weight itself, rather than by super().forward"
    return None


def _leaves_it_to_super(forward: types.FunctionType) -> bool:
    """Whether a method calls ``super().forward``, and asks its weight and bias for nothing but their type and device."""
    steps = list(dis.get_instructions(forward))
    names = {step.argval for step in steps if isinstance(step.argval, str)}
    own = ("weight", "bias", "_parameters", "parameters")
    pairs = [pair for pair in itertools.pairwise(steps) if pair[0].opname.startswith("LOAD") and pair[0].argval in own]
    return {"super", "forward"} <= names and all(after.argval in ("dtype", "device") for _, after in pairs)


def _parallel_class(parallel: Any, own: Any, base: Any) -> Any:
    """The class that a module of the user's becomes: ``parallel``, behind the user's own forward where there is one."""
    if own is base or own.__module__.startswith("torch.nn."):
        return parallel
    body = {"__doc__": own.__doc__, "__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (own, parallel), body)


class _VocabParallel(nn.Module):
    """What embedding and head share: how they are made from the user's module."""

    _base: type[nn.Module]
    _vocab_part: VocabPart

    @classmethod
    def adopt(cls, module: nn.Module, part: VocabPart, *, cut: bool) -> None:
        """Turn a module into this class in place, and ``cut`` the weight, unless a module that it is tied to did so.

        A subclass with a forward of its own keeps it, around this one.
        """
        module.__class__ = _parallel_class(cls, type(module), cls._base)
        layer: Any = module
        layer._vocab_part = part
        if cut:
            shrink(layer.weight, part.shard, part.rank)
        bias = getattr(layer, "bias", None)
        if bias is not None and bias.shape[0] == part.shard.length:  # one that two heads share is cut once
            shrink(bias, part.shard, part.rank)

    def extra_repr(self) -> str:
        """The whole shape, and which rank of how many this is."""
        return f"{super().extra_repr()}, rank {self._vocab_part.rank} of tp={self._vocab_part.group.size()}"


class VocabParallelEmbedding(_VocabParallel, nn.Embedding):
    """An embedding of which every rank holds a part of the vocabulary, made in place.

    ============  ==============  =========================
    tensor        global          local
    ============  ==============  =========================
    ids           ``[b, s]``      ``[b, s]``
    weight        ``[v, h]``      ``[ceil(v/tp), h]``, padded with zero rows
    output        ``[b, s, h]``   ``[b, s, h]``, summed over tp
    ============  ==============  =========================

    Forward: ids outside this rank's part of the vocabulary give zeros, and the ranks' outputs are summed by an all-reduce.
    Backward: the output's gradient is whole on every rank; each adds it to the rows of its own ids in its weight's gradient.
    Ids and masks are saved, and no activation.
    """

    _base = nn.Embedding

    @staticmethod
    def unfit(embedding: nn.Embedding) -> str | None:
        """Why it has no form over a part of the vocabulary: an option, or a forward of its own; None if it has."""
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option):
                return f"an nn.Embedding with {option} can't be sharded by vocabulary"
        return unfit_forward(embedding, nn.Embedding)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids ``[b, s]`` → ``[b, s, h]``; collective over tp. IndexError, or a GPU's assertion, for an id outside."""
        ids = over_tp(ids) if isinstance(ids, SeqPart) else ids
        if isinstance(ids, SeqPart):
            return SeqPart.wrap(VocabParallelEmbedding.forward(self, ids.local), ids.place)  # not what a subclass adds
        shard, group = self._vocab_part.shard, self._vocab_part.group
        inside = (ids >= 0) & (ids < shard.length)
        require_inside(
            *(ids, inside),
            f"token id {{}} is out of range: the embedding has {shard.length} rows; resize it to the tokenizer before training, "
            "or mask the id",
        )
        start, stop = self._vocab_part.columns
        mine = (ids >= start) & (ids < stop)
        local = (ids - start).masked_fill(~mine, 0)
        out = F.embedding(local, _read(self.weight)) * mine.unsqueeze(-1)
        if self.padding_idx is not None:  # the padding's row gets no gradient
            pads = ids == self.padding_idx
            out = out.detach() * pads.unsqueeze(-1) + out * ~pads.unsqueeze(-1)
        return reduce_from_tensor_parallel_region(out, group)


class VocabParallelHead(_VocabParallel, nn.Linear):
    """A head of which every rank computes the logits of its part of the vocabulary, made in place.

    ============  ==============  =========================
    tensor        global          local
    ============  ==============  =========================
    input         ``[b, s, h]``   ``[b, s, h]``
    weight        ``[v, h]``      ``[ceil(v/tp), h]``
    output        ``[b, s, v]``   ``[b, s, ceil(v/tp)]``, as :class:`ShardedLogits`
    ============  ==============  =========================

    Forward: ``y = x Wᵀ + b`` for this rank's rows of ``W``. Backward: ``dx = Σ_tp dy W`` by an all-reduce (the input is
    copied to the ranks, f in arXiv 1909.08053), ``dW = dyᵀ x`` and ``db = Σ dy``.

    With :attr:`VocabPart.loss_chunk` the output is not computed before somebody reads it; a cross entropy computes it for that many
    tokens at a time.
    """

    _base = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """``[..., h]`` → :class:`ShardedLogits` of the shape ``[..., v]``."""
        x = over_tp(x) if isinstance(x, SeqPart) else x
        if isinstance(x, SeqPart):
            return x.like(VocabParallelHead.forward(self, x.local))  # not what a subclass of the user's adds
        part = self._vocab_part
        x = copy_to_tensor_parallel_region(x, part.group)
        weight, bias = _read(self.weight), None if self.bias is None else _read(self.bias)
        if part.loss_chunk is not None:
            return ShardedLogits.product(x, weight, bias, part.loss_chunk, part)
        return ShardedLogits.wrap(F.linear(x, weight, bias), part)
