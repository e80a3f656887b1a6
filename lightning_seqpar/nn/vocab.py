"""Embeddings and heads sharded by vocabulary, after arXiv 1909.08053."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.collectives import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.linear import shrink
from lightning_seqpar.nn.logits_storage import can_read_values
from lightning_seqpar.nn.sharded_logits import ShardedLogits


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which every rank holds a part of the vocabulary, made in place.

    ============  ==============  =========================
    tensor        global          local
    ============  ==============  =========================
    ids           ``[b, s]``      ``[b, s]``
    weight        ``[v, h]``      ``[ceil(v/tp), h]``, padded with zero rows
    output        ``[b, s, h]``   ``[b, s, h]``, summed over tp
    ============  ==============  =========================

    Forward: ids outside this rank's part of the vocabulary give zeros, and the ranks' outputs are summed by an all-reduce.
    Backward: the output's gradient is whole on every rank; each adds it to the rows of its own
    ids in its weight's gradient. Ids and masks are saved, and no activation.
    """

    shard: Shard
    group: ProcessGroup
    rank: int

    @classmethod
    def adopt(cls, embedding: nn.Embedding, shard: Shard, group: ProcessGroup, rank: int, *, cut: bool) -> None:
        """Turn ``embedding`` into this class in place.

        Args:
            embedding: the user's module.
            shard: how the vocabulary is split.
            group: the tensor-parallel group.
            rank: this rank in it.
            cut: whether to cut the weight; False if a module that it is tied to did so.
        """
        embedding.__class__ = cls
        layer: Any = embedding
        layer.shard, layer.group, layer.rank = shard, group, rank
        if cut:
            shrink(layer.weight, shard, rank)

    @staticmethod
    def check(embedding: nn.Embedding, name: str) -> None:
        """Refuse options that have no form over a part of the vocabulary.

        Raises:
            ValueError: naming the module and the option.
        """
        for option, wrong in (
            ("max_norm", embedding.max_norm is not None),
            ("scale_grad_by_freq", embedding.scale_grad_by_freq),
            ("sparse", embedding.sparse),
        ):
            if wrong:
                raise ValueError(
                    f"{name}: an nn.Embedding with {option} can't be sharded by vocabulary; leave it whole"
                )

    def extra_repr(self) -> str:
        """The whole shape, and which rank of how many this is."""
        return f"{super().extra_repr()}, rank {self.rank} of tp={self.group.size()}"

    def forward(self, ids: Tensor) -> Tensor:
        """Ids ``[b, s]`` → ``[b, s, h]``; collective over tp.

        Raises:
            IndexError: for an id outside the vocabulary (on the CPU; as in torch, a device assertion elsewhere).
        """
        inside = (ids >= 0) & (ids < self.shard.length)
        if not can_read_values(inside):
            torch._assert_async(inside.all(), "a token id lies outside the vocabulary")
        elif not bool(inside.all()):
            raise IndexError(
                f"token id {int(ids[~inside][0])} is out of range: the embedding has {self.shard.length} rows; resize it to "
                "the tokenizer before training, or mask the id"
            )
        ((start, stop),) = self.shard.ranges[self.rank]
        mine = (ids >= start) & (ids < stop)
        local = (ids - start).masked_fill(~mine, 0)
        out = F.embedding(local, self.weight) * mine.unsqueeze(-1)
        if self.padding_idx is not None:  # the padding's row gets no gradient
            pads = ids == self.padding_idx
            out = out.detach() * pads.unsqueeze(-1) + out * ~pads.unsqueeze(-1)
        return reduce_from_tensor_parallel_region(out, self.group)


class VocabParallelHead(nn.Linear):
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

    With :attr:`loss_chunk` the output is not computed before somebody reads it; a cross entropy computes it for that many tokens
    at a time.
    """

    shard: Shard
    group: ProcessGroup
    rank: int
    loss_chunk: int | None

    @classmethod
    def adopt(
        cls,
        head: nn.Linear,
        shard: Shard,
        group: ProcessGroup,
        rank: int,
        *,
        cut: bool,
        loss_chunk: int | None = None,
    ) -> None:
        """Turn ``head`` into this class in place.

        Args:
            head: the user's module.
            shard: how the vocabulary is split.
            group: the tensor-parallel group.
            rank: this rank in it.
            cut: whether to cut the weight; False if a module that it is tied to did so.
            loss_chunk: tokens of which a loss makes the logits at a time; None to make them all here.
        """
        head.__class__ = cls
        layer: Any = head
        layer.shard, layer.group, layer.rank, layer.loss_chunk = shard, group, rank, loss_chunk
        if cut:
            shrink(layer.weight, shard, rank)
        if layer.bias is not None:
            shrink(layer.bias, shard, rank)

    def extra_repr(self) -> str:
        """The whole shape, and which rank of how many this is."""
        return f"{super().extra_repr()}, rank {self.rank} of tp={self.group.size()}"

    def forward(self, x: Tensor) -> Tensor:
        """``[..., h]`` → :class:`ShardedLogits` of the shape ``[..., v]``."""
        x = copy_to_tensor_parallel_region(x, self.group)
        where = (self.shard, self.group, self.rank)
        if self.loss_chunk is not None:
            return ShardedLogits.product(x, self.weight, self.bias, self.loss_chunk, *where)
        return ShardedLogits.wrap(F.linear(x, self.weight, self.bias), *where)
