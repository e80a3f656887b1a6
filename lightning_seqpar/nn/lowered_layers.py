"""Column and row linears of compiled blocks, and attention over this rank's heads: products and the collectives of the plan alone.

They keep the class, parameters and attributes of :mod:`~lightning_seqpar.nn.linear` and :mod:`~lightning_seqpar.nn.attention`;
what is kept for the backward, and which products run beside which collective, is the compiler's affair.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_seqpar.distributed import traced
from lightning_seqpar.nn.attention import ParallelMultiheadAttention
from lightning_seqpar.nn.linear import ColumnParallelLinear, RowParallelLinear
from lightning_seqpar.region.lowered import LoweredRegion


class LoweredColumnLinear(ColumnParallelLinear):
    """A column linear that ``torch.compile`` traces: as :class:`ColumnParallelLinear`, but that ``[b, s, h]`` is kept."""

    lowered: LoweredRegion

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, h]`` (or its shard, if this layer gathers) → ``[b, s, f/tp]``."""
        self.check_settings()
        if self.gathers_input:
            x = self.lowered.gather(x)
        elif x.shape[-1] != self.in_features and self.lowered.wholes:
            x = self.lowered.wholes[-1]  # the input is a stand-in of this rank's width
        return F.linear(x, self.matrix, self.bias)


class LoweredRowLinear(RowParallelLinear):
    """A row linear that ``torch.compile`` traces; its table is that of :class:`RowParallelLinear`."""

    lowered: LoweredRegion

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, f/tp]`` → ``[b, s/tp, h]``."""
        self.check_settings()
        out = self.lowered.reduce(F.linear(x, self.matrix))
        return out if self.bias is None else out + self.bias.to(out.dtype)


class LoweredMultiheadAttention(ParallelMultiheadAttention):
    """Attention over this rank's heads that ``torch.compile`` traces.

    Its table is that of :class:`ParallelMultiheadAttention`, but that the query is kept for the backward as it was gathered,
    ``[b, s, h]``.
    """

    lowered: LoweredRegion

    @classmethod
    def lower(cls, attention: Any, lowered: LoweredRegion) -> None:
        """Turn a parallel attention into this class in place, and its row too."""
        attention.__class__, attention.lowered = cls, lowered
        attention.out_proj.__class__, attention.out_proj.lowered = LoweredRowLinear, lowered

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention.forward``, on batched input."""
        self._check_input(query, key, value)
        projected = self._project(query, key, value)
        return self._attend(projected, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        whole = self.lowered.gather(query)
        if key is query:
            packed = F.linear(whole, self.in_proj_weight, self.in_proj_bias)
            return [self._split(part) for part in packed.chunk(3, -1)]
        copied = self.lowered.copy(key)
        inputs = (whole, copied, copied if value is key else self.lowered.copy(value))
        weights = self.in_proj_weight.chunk(3)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [self._split(F.linear(*one)) for one in zip(inputs, weights, biases, strict=True)]

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        return traced.reduce_from_tensor_parallel_region(x, self.lowered.group)
