"""A stand-in for flash-attn 2 on CPUs: its functions and operators, of the same names and signatures, which make all weights.

As the real ones, they take heads at dim -2, a batch ``[b, s, n, d]`` or packed tokens ``[total, n, d]``, fewer heads of keys and
values than of queries, and give autograd functions of their own, which call custom operators. While ``strict`` is set they take
16-bit tensors alone.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

REAL = find_spec("flash_attn") is not None
"""Whether flash-attn itself is here, whose operators can't be registered a second time: then these are its functions."""
strict = False
NAME = "flash_stand_in" if REAL else "flash_attn"
noise = 0.0  # of gradients, relative to their largest: the order of a GPU's sums is another in each run


def _weights(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int, slopes: Tensor | None) -> Tensor:
    """``[b, n, s, t]`` of ``[b, n, s, d]``; a causal mask is aligned to the last position, as flash-attn's is."""
    back = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2]) - torch.arange(k.shape[2])
    hidden = (back < 0) if causal else torch.zeros_like(back, dtype=torch.bool)
    if left >= 0:
        hidden |= back > left
    if right >= 0:
        hidden |= -back > right
    scores = q @ k.mT * scale
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype).view(-1, slopes.shape[-1], 1, 1) * back.abs()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def _kept(weights: Tensor, p: float, seed: int) -> Tensor:
    """A mask of weights, which are larger where they stay."""
    drawn = torch.rand(weights.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn >= p).to(weights.dtype) / (1 - p)


def _documents(ends_q: Tensor | None, ends_k: Tensor | None, *tensors: Tensor) -> list[list[Tensor]]:
    """Of packed tokens each document's ``[1, n, s, d]``; of a batch ``[b, n, s, d]``. The second and third are keys and values."""
    if ends_q is None or ends_k is None:
        return [[x.transpose(1, 2) for x in tensors]]
    ends = [ends_k.tolist() if at in (1, 2) else ends_q.tolist() for at in range(len(tensors))]
    places = range(len(ends[0]) - 1)
    return [[x[None, at[i] : at[i + 1]].transpose(1, 2) for x, at in zip(tensors, ends, strict=True)] for i in places]


def _joined(parts: list[Tensor], packed: bool) -> Tensor:
    parts = [x.transpose(1, 2) for x in parts]
    return torch.cat([x[0] for x in parts]) if packed else parts[0].contiguous()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, p: float, cu_q: Any, cu_k: Any, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if strict and q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    made, seed = [], int(torch.randint(2**31, ())) if p else 0
    for at, (a, b, c) in enumerate(_documents(cu_q, cu_k, q, k, v)):
        b, c = (x.repeat_interleave(a.shape[1] // x.shape[1], 1) for x in (b, c))
        weights = _weights(a, b, *how)
        made.append((weights * _kept(weights, p, seed + at) if p else weights) @ c)
    shape = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return (_joined(made, cu_q is not None), q.new_zeros(shape, dtype=torch.float32), q.new_empty(0), torch.tensor([seed, 0]))


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, into: list[Tensor], p: float, state: Tensor | None, cu_q: Any, cu_k: Any,
    *how: Any,
) -> Tensor:  # fmt: skip
    made: list[list[Tensor]] = []
    scale = how[0]
    for at, (a, b, c, d) in enumerate(_documents(cu_q, cu_k, q, k, v, grad)):
        share = a.shape[1] // b.shape[1]
        b, c = (x.repeat_interleave(share, 1) for x in (b, c))
        weights = _weights(a, b, *how)
        kept = _kept(weights, p, int(state[0]) + at) if p and state is not None else torch.ones_like(weights)
        dv, dw = (weights * kept).mT @ d, (d @ c.mT) * kept
        ds = weights * (dw - (dw * weights).sum(-1, keepdim=True)) * scale
        dk, dv = (x.unflatten(1, (-1, share)).sum(2) for x in (ds.mT @ a, dv))
        made.append([ds @ b, dk, dv])
    for target, parts in zip(into, zip(*made, strict=True), strict=True):
        target.copy_(made_of := _joined(list(parts), cu_q is not None))
        if noise:
            source = torch.Generator().manual_seed(time.perf_counter_ns())
            drawn = torch.rand(target.shape, generator=source, dtype=torch.float64) - 0.5
            target.add_((drawn * (2 * noise * float(made_of.abs().max()))).to(target.dtype))
    return q.new_zeros(1, dtype=torch.float32)


@torch.library.custom_op(f"{NAME}::_flash_attn_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _attend(q, k, v, dropout_p, None, None, softmax_scale, causal, window_size_left, window_size_right, alibi_slopes)


@torch.library.custom_op(f"{NAME}::_flash_attn_varlen_forward", mutates_args=())
def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False, block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    how = softmax_scale, causal, window_size_left, window_size_right, alibi_slopes
    return _attend(q, k, v, dropout_p, cu_seqlens_q, cu_seqlens_k, *how)


@torch.library.custom_op(f"{NAME}::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None, dk: Tensor | None,
    dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    how = softmax_scale, causal, window_size_left, window_size_right, alibi_slopes
    return _gradients(dout, q, k, v, [dq, dk, dv], dropout_p, rng_state, None, None, *how)


@torch.library.custom_op(f"{NAME}::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def _varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None, dk: Tensor | None,
    dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    how = softmax_scale, causal, window_size_left, window_size_right, alibi_slopes
    return _gradients(dout, q, k, v, [dq, dk, dv], dropout_p, rng_state, cu_seqlens_q, cu_seqlens_k, *how)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@_varlen_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any, **more: Any) -> tuple[Tensor, ...]:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@_backward.register_fake
@_varlen_backward.register_fake
def _(dout: Tensor, q: Tensor, *others: Any, **more: Any) -> Tensor:
    return q.new_empty(1, dtype=torch.float32)


OPS = getattr(torch.ops, NAME)


def _run(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: tuple[Any, ...], scale: float | None, *how: Any) -> Tensor:
    """Call the forward operator; ``ends`` are cu_seqlens and max_seqlens of packed tokens, else nothing."""
    dropout, causal, window, softcap, slopes, deterministic = how
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    op = OPS._flash_attn_varlen_forward if ends else OPS._flash_attn_forward
    out, lse, _, state = op(
        q, k, v, *ends, dropout, scale, causal=causal, window_size_left=window[0], window_size_right=window[1], softcap=softcap,
        alibi_slopes=slopes, return_softmax=False,
    )  # fmt: skip
    ctx.save_for_backward(q, k, v, out, lse, *ends[:2], state)
    ctx.ends, ctx.how = ends[2:], (dropout, scale, causal, *window, softcap, slopes, deterministic)
    return out


def _run_back(ctx: Any, saved: Any, dout: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    q, k, v, out, lse, *ends, state = saved
    op = OPS._flash_attn_varlen_backward if ends else OPS._flash_attn_backward
    op(dout, q, k, v, out, lse, dq, dk, dv, *ends, *ctx.ends, *ctx.how, rng_state=state)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Any, *how: Any) -> Tensor:
        return _run(ctx, q, k, v, ends, *how)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        saved = ctx.saved_tensors
        grads = tuple(map(torch.empty_like, saved[:3]))
        _run_back(ctx, saved, dout, *grads)
        return *(grad[..., : dout.shape[-1]] for grad in grads), *[None] * 8


class _FlashPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, ends: Any, *how: Any) -> Tensor:
        q, k, v = (qkv[..., at, :, :].detach() for at in range(3))
        return _run(ctx, q, k, v, ends, *how)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, *_ = saved = ctx.saved_tensors
        dqkv = torch.empty(*q.shape[:-2], 3, *q.shape[-2:], dtype=q.dtype, device=q.device)
        _run_back(ctx, saved, dout, *(dqkv[..., at, :, :] for at in range(3)))
        return dqkv, *[None] * 8


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    return _Flash.apply(q, k, v, (), softmax_scale, dropout_p, causal, window_size, softcap, alibi_slopes, deterministic)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Any = None,
) -> Tensor:  # fmt: skip
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _Flash.apply(q, k, v, ends, softmax_scale, dropout_p, causal, window_size, softcap, alibi_slopes, deterministic)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    return _FlashPacked.apply(qkv, (), softmax_scale, dropout_p, causal, window_size, softcap, alibi_slopes, deterministic)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    ends = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return _FlashPacked.apply(qkv, ends, softmax_scale, dropout_p, causal, window_size, softcap, alibi_slopes, deterministic)


if REAL:
    from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func  # noqa: F401


def into_transformers() -> None:
    """Let transformers' ``flash_attention_2`` call these functions in this process; it finds the real ones only beside a GPU."""
    from transformers import modeling_flash_attention_utils as utils

    utils._flash_fn, utils._flash_varlen_fn = flash_attn_func, flash_attn_varlen_func
    utils._flash_with_kvcache_fn, utils._pad_fn, utils._unpad_fn = None, utils._pad_input, utils._unpad_input
    utils._process_flash_kwargs_fn = utils._lazy_define_process_function(flash_attn_varlen_func)
    utils._process_with_kvcache_kwargs_fn = dict
    utils._loaded_implementation = "flash_attention_2"
