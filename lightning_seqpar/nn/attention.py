"""``nn.MultiheadAttention`` over this rank's heads, and ``nn.TransformerEncoder`` on shards; parameter names stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_seqpar.context.operations import added_mask, attend
from lightning_seqpar.context.seq_part import SeqPart, local_of
from lightning_seqpar.distributed.collectives import reduce_from_tensor_parallel_region
from lightning_seqpar.layout.param_layout import Shard
from lightning_seqpar.nn.linear import RowParallelLinear, shrink
from lightning_seqpar.region.products import ColumnGroup, Hooks, Products, Tokens, autocast_dtype, kept_of
from lightning_seqpar.region.sequence_region import SequenceRegion


class _Projections(ColumnGroup):
    """Weights, each with its bias or None, that multiply what is gathered for them."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        super().__init__()
        self._pairs = pairs

    def gather(self, tokens: Tokens, x: Tensor, hooks: Hooks = None, *, regather: bool = True) -> Tensor:
        """``[b, s/tp, h]`` → ``[b, s, h]``."""
        whole: Tensor
        kept = kept_of(x, traced=tokens.traced) if regather else None
        how = tokens, kept, (False,) * len(self._pairs), autocast_dtype(x)
        parameters = [one for pair in self._pairs for one in pair]
        whole, *self._made = Products.applied(how, x, *parameters, traced=tokens.traced)
        return whole

    def of(self, whole: Tensor) -> list[Tensor]:
        """The products, ``[b, s, f/tp]`` each, also of a part of a sequence: of ``whole``, which :meth:`gather` made."""
        return [whole.like(out) if isinstance(whole, SeqPart) else out for out in self._made]


class ParallelMultiheadAttention(nn.MultiheadAttention):
    """Attention over this rank's heads, made in place from an ``nn.MultiheadAttention``.

    The original calls its projections through raw weights, past every hook; this forward gathers its input itself.

    ==================  =====================  ===========================  =============================
    tensor              global                 local                        saved for backward
    ==================  =====================  ===========================  =============================
    query               ``[b, s, h]``          ``[b, s/tp, h]``             itself (:class:`Products`)
    key, value          ``[b, t, h]``          the query, or ``[b, t, h]``  itself
    in_proj_weight      ``[3h, h]``            ``[3h/tp, h]``, ``[q|k|v]``  itself
    q, k, v             ``[b, n, s, d]``       ``[b, n/tp, s, d]``          by the attention's kernel
    out_proj.weight     ``[h, h]``             ``[h, h/tp]``                itself
    output              ``[b, s, h]``          ``[b, s/tp, h]``             —
    ==================  =====================  ===========================  =============================

    Here ``n`` is the number of heads, which stay whole, and ``d`` their size; sequences are at dim 0 where ``batch_first`` is
    false. Forward: the query is gathered, q, k and v are a column linear, ``out_proj`` is a row linear, whose partial sums are
    reduce-scattered. Backward: the conjugates, in reverse order. Masks keep their global shapes. In self-attention, key and
    value are the query; in cross-attention they are encoder states, whole on every rank.
    """

    region: SequenceRegion
    shard: Shard
    full_name: str
    global_heads: int

    @classmethod
    def adopt(cls, attention: nn.MultiheadAttention, region: SequenceRegion, name: str) -> ParallelMultiheadAttention:
        """Turn ``attention`` into this class in place and cut its parameters by heads; ValueError for what has no parallel form."""
        cls.check(attention, name, sp=region.sp, dim=region.dim)
        heads, width = attention.num_heads, attention.embed_dim
        shard = Shard.by_segments(0, [width] * 3, [heads] * 3, region.size, name)
        attention.__class__ = cls
        layer: Any = attention
        layer.region, layer.shard, layer.full_name, layer.global_heads = region, shard, name, heads
        shrink(layer.in_proj_weight, shard, region.rank)
        if layer.in_proj_bias is not None:
            shrink(layer.in_proj_bias, shard, region.rank)
        RowParallelLinear.adopt(
            layer.out_proj, Shard.by_segments(1, [width], [heads], region.size, name), region, f"{name}.out_proj"
        )
        layer.num_heads = heads // region.size
        return layer  # type: ignore[no-any-return]

    @staticmethod
    def check(attention: nn.MultiheadAttention, name: str, *, sp: bool, dim: int) -> None:
        """Refuse what has no parallel form by a ValueError, before anything is changed."""
        for wrong, what in (
            (attention.in_proj_weight is None, "kdim or vdim different from embed_dim"),
            (attention.bias_k is not None, "add_bias_kv=True"),
            (attention.add_zero_attn, "add_zero_attn=True"),
        ):
            if wrong:
                raise ValueError(f"{name}: nn.MultiheadAttention with {what} has no tensor-parallel form; leave it out")
        expected = 1 if attention.batch_first else 0
        if sp and dim != expected:
            raise ValueError(
                f"{name}: batch_first={attention.batch_first}, so the sequence is at dim {expected}, but the plan's "
                f"blocks rule says dim {dim}; set 'dim: {expected}' there"
            )

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
        """As ``nn.MultiheadAttention.forward``, on batched input, with the same key and value; without attention maps by head."""
        self._check_input(query, key, value)
        self.region.open_gather(query, self.full_name)
        try:
            return self._attend(
                self._project(query, key, value), key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        finally:
            self.region.close_gather()
            self.region.frames.finish(self.full_name)

    def _check_input(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if (key is query) != (value is query):
            raise ValueError(
                f"{self.full_name}: key and value must both be the query (self-attention) or both be other, whole activations"
            )
        if query.ndim != 3:
            raise ValueError(f"{self.full_name}: batch the input; got shape {list(query.shape)}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k and v of this rank's heads: ``[b, heads/tp, s, d]`` each."""
        path, weights = self.region.path, self.in_proj_weight.chunk(3)
        packed: list[Tensor]
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if key is query:
            made = _Projections([(self.in_proj_weight, self.in_proj_bias)])
            packed = [*made.of(path.gather(query, self.full_name, made))[0].chunk(3, -1)]
        else:
            pairs = [*zip(weights, biases, strict=True)]
            made = _Projections(pairs[:1])
            packed = made.of(path.gather(query, self.full_name, made))
            for inputs in ((key,), (value,)) if key is not value else ((key, value),):
                made = _Projections(pairs[len(packed) : len(packed) + len(inputs)])
                packed += made.of(path.copy(inputs[0], self.full_name, made))
        self.region.inner_streams.begin()
        return [self._split(part) for part in packed]

    def _split(self, x: Tensor) -> Tensor:
        """``[b, s, h/tp]`` → ``[b, heads/tp, s, d]``."""
        x = x if self.batch_first else x.transpose(0, 1)
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _attend(
        self,
        projected: list[Tensor],
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over this rank's heads and the output projection; the averaged maps ``[b, s, t]`` if they are wanted."""
        q, k, v = projected
        b, s = q.shape[0], q.shape[2]
        if is_causal and attn_mask is None:
            raise ValueError(f"{self.full_name}: is_causal=True is a hint and needs attn_mask beside it")
        causal_hint = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal_hint else self._merge(attn_mask, key_padding_mask, b, s, k.shape[2], q.dtype)
        if need_weights and not average:
            raise ValueError(f"{self.full_name}: average_attn_weights=False would need every rank's heads; average them")
        out, weights = attend(q, k, v, mask, self.dropout if self.training else 0.0, causal_hint, need_weights)
        if weights is not None:
            weights = self._sum_over_ranks(weights.sum(1)) / self.global_heads
        out = out.transpose(1, 2).reshape(b, s, -1)
        return self.out_proj(out if self.batch_first else out.transpose(0, 1)), weights

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        out = reduce_from_tensor_parallel_region(local_of(x), self.region.group)
        return x.like(out) if isinstance(x, SeqPart) else out

    def _merge(
        self, attn_mask: Tensor | None, padding: Tensor | None, b: int, s: int, t: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Both masks as one additive mask that broadcasts to ``[b, heads/tp, s, t]``."""
        merged: Tensor | None = None
        if attn_mask is not None:
            merged = added_mask(attn_mask, dtype)
            if merged.ndim == 3:
                heads = self.region.rank * self.num_heads
                merged = merged.view(b, self.global_heads, s, t)[:, heads : heads + self.num_heads]
            else:
                merged = merged.view(1, 1, s, t)
        if padding is not None:
            column = added_mask(padding, dtype).view(b, 1, 1, t)
            merged = column if merged is None else merged + column
        return merged


class ParallelTransformerEncoder(nn.TransformerEncoder):
    """``nn.TransformerEncoder`` whose layers run on shards, made in place.

    In evaluation the original may pack a padded batch into a nested tensor, which shards can't be, and then returns zeros
    at the padded positions. This forward leaves the packing out and puts the zeros in.
    """

    region: SequenceRegion
    packs: bool

    @classmethod
    def adopt(cls, encoder: nn.TransformerEncoder, region: SequenceRegion) -> ParallelTransformerEncoder:
        """Turn ``encoder`` into this class in place; its layers are parallelised by rules of their own."""
        layer: Any = encoder
        layer.packs, layer.use_nested_tensor, layer.region = bool(encoder.use_nested_tensor), False, region
        encoder.__class__ = cls
        return layer  # type: ignore[no-any-return]

    def forward(
        self, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None, is_causal: bool | None = None
    ) -> Tensor:
        """As ``nn.TransformerEncoder.forward``; ``src`` is ``[b, s, h]``, or ``[s, b, h]`` without ``batch_first``."""
        if src_key_padding_mask is None or not self._would_pack(src, mask, src_key_padding_mask):
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        norm, self.norm = self.norm, None
        try:
            out = super().forward(src, mask, src_key_padding_mask, is_causal)
        finally:
            self.norm = norm
        kept = (~_boolean(src_key_padding_mask)).unsqueeze(-1).to(out.dtype)  # packing needs batch_first: [b, s, 1]
        out = out * kept
        return out if norm is None else norm(out)

    def _would_pack(self, src: Tensor, mask: Tensor | None, padding: Tensor) -> bool:
        """Whether the original would pack this batch: what it checks in its forward, beside what it checked when it was made."""
        return (
            self.packs
            and mask is None
            and src.dim() == 3
            and torch.backends.mha.get_fastpath_enabled()
            and not self.layers[0].training
            and not (torch.is_grad_enabled() and any(p.requires_grad for p in (src, *self.layers[0].parameters())))
            and not torch.is_autocast_enabled(src.device.type)
            and (not self.mask_check or bool(torch._nested_tensor_from_mask_left_aligned(src, _boolean(padding).logical_not())))
        )


def _boolean(mask: Tensor) -> Tensor:
    """A padding mask as bool: true where a position is padding."""
    return mask if mask.dtype == torch.bool else mask != 0
