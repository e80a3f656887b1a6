"""Logits that stay sharded by vocabulary through a loss, and are whole for everything else, after arXiv 1909.08053."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_seqpar.context.operations import arguments_of
from lightning_seqpar.context.seq_part import FACTS, RESHAPES, functions, warn_of_gather, writes
from lightning_seqpar.distributed.async_ops import all_gather
from lightning_seqpar.distributed.autograd import GivenAway, is_node_of, memory_of, once_differentiable, without_subclasses
from lightning_seqpar.distributed.collectives import (
    copy_to_tensor_parallel_region,
    gather_replicated_from_sequence_parallel_region,
    passes_none,
    reduce_from_tensor_parallel_region,
)
from lightning_seqpar.distributed.host import require_inside
from lightning_seqpar.nn.vocab_loss import StoredLogits, VocabParallelCrossEntropy, VocabPart
from lightning_seqpar.releases import is_look


class ShardedLogits(Tensor):
    """Logits of the global shape ``[..., v]``, of which every rank holds ``[..., ceil(v/tp)]``.

    Casts, scalings, reshapes and slices that leave the last dim alone keep them sharded, and so does a softmax; an argmax and
    ``F.cross_entropy`` on ``[n, v]`` run on the shards. Every other operation gathers them first, which a warning names and is a
    collective over tp: an operation that only some ranks run waits for the others. A change in place gathers them for good: from
    then on they are whole. Of logits that are views of one another only those that were changed may be read behind that.
    """

    _part: StoredLogits
    _of: VocabPart
    _memory: _Memory
    _changed: Tensor | None = None
    """The whole logits, once they were changed in place."""

    @staticmethod
    def wrap(local: Tensor, of: VocabPart) -> ShardedLogits:
        """The logits of which ``local``, ``[..., ceil(v/tp)]``, is this rank's part."""
        return ShardedLogits._wrap(StoredLogits(local, local.dtype), of)

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, of: VocabPart) -> ShardedLogits:
        """The logits ``x Wᵀ + b``, not computed yet: ``F.cross_entropy`` computes them ``chunk`` tokens at a time.

        ``x`` is the head's input ``[..., h]``; of ``weight`` and ``bias`` this rank has ``[ceil(v/tp), h]`` and ``[ceil(v/tp)]``.
        """
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        return ShardedLogits._wrap(StoredLogits(x, dtype, weight, bias, dtype, chunk), of)

    @staticmethod
    def _wrap(part: StoredLogits, of: VocabPart) -> ShardedLogits:
        if not torch.is_grad_enabled():  # made without gradients, they must not train the head when they are read later
            part = part.detached()
        out: ShardedLogits = _Wrap.apply(*part.tensors, part, of)  # type: ignore[no-untyped-call]
        out._part, out._of, out._memory = part, of, _Memory()
        return out

    @property
    def local(self) -> Tensor:
        """This rank's part, ``[..., ceil(v/tp)]``, with its graph; columns past the vocabulary's end are padding."""
        part = self._part
        made = part.read()
        if part.is_deferred:
            with without_subclasses():
                graph = self.requires_grad
            # Not if a metric reads them under no_grad: the loss would then read them without a graph.
            if made.requires_grad or not (graph or made.is_inference()):
                self._part = StoredLogits(made, made.dtype)  # computed once for all readers
        return made

    @property
    def is_changed(self) -> bool:
        """Whether they were changed in place: they are whole then."""
        return self._changed is not None

    def whole(self) -> Tensor:
        """The whole logits ``[..., v]`` as a plain tensor; collective over tp, unless they were changed in place.

        Raises RuntimeError if others, of which these are a view, or that are views of these, were changed in place.
        """
        self._memory.check(self)
        if self._changed is not None:
            return self._changed
        self._meet()
        local = self.local
        return gather_replicated_from_sequence_parallel_region(local, local.ndim - 1, self._of.group, self._of.shard.length)

    def _meet(self) -> None:
        """Wait for the other ranks, which must gather them too; raises RuntimeError if they do not."""
        if self._of.meeting is not None:
            self._of.meeting.await_others(
                "logits that are sharded by vocabulary are read whole (an argmax, a metric, a table)",
                "Read them on every rank, and print or log the result on one: not under 'if self.global_rank == 0' or "
                "@rank_zero_only. Or leave the head whole (vocab=False)",
            )

    def _write(self, change: Callable[[Tensor], Any]) -> Any:
        """Change the whole logits in place (collective over tp), and return what the operation does."""
        whole = self.whole()
        if any(one.is_held for one in self._memory.copies):
            raise RuntimeError(
                "logits that are sharded by vocabulary are changed in place while a view of them is held, which is a copy and "
                "would not change with them. Write logits = logits.whole() first (on all ranks)"
            )
        if self._changed is None:
            self._memory.changed = weakref.ref(self)
            whole = self._changed = whole.clone()
            with without_subclasses():  # what comes past the changed logits, from an autograd.Function, is refused
                if self.requires_grad:
                    self.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        out = change(whole)
        return self if out is whole else out

    def with_local(self, local: Tensor) -> ShardedLogits:
        """Logits over the same vocabulary with another local part ``[..., ceil(v/tp)]``."""
        return ShardedLogits.wrap(local, self._of)

    def with_part(self, part: StoredLogits) -> ShardedLogits:
        """The same for a part whose storage has not been read."""
        return ShardedLogits._wrap(part, self._of)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The global shape and the rank; no numbers, which would take a collective."""
        return f"ShardedLogits(shape={list(self.shape)}, rank {self._of.rank} of tp={self._of.group.size()})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation above autograd: on the shards if it can, else on gathered logits.

        RuntimeError for a change in place that would change a copy, or logits out of a reentrant activation checkpoint.
        """
        kwargs = dict(kwargs) if kwargs else {}
        if func in _FACTS:
            with without_subclasses():
                return func(*args, **kwargs)
        logits = args[0] if args and isinstance(args[0], ShardedLogits) else None
        keep = _KEEPING.get(func) if kwargs.get("out") is None else None
        if logits is not None and logits._changed is None and keep is not None:
            for given in (*args, *kwargs.values()):
                if isinstance(given, ShardedLogits):
                    _check_graph(given)
                    given._memory.check(given)
            kept = keep(func, logits, args[1:], kwargs)
            if kept is not None:
                if func in _VIEWS and not _copies(func, logits, kept, args, kwargs):
                    kept._memory = logits._memory
                return kept
        is_write, name = logits is not None and writes(func, kwargs), getattr(func, "__name__", str(func))
        if func is Tensor.register_hook and logits is not None and is_look(args[1]):
            parts = logits._part.tensors if logits._changed is None else (logits._changed,)
            return next(one for one in parts if one is not None and one.requires_grad).register_hook(args[1])
        if func in _REFUSED or (is_write and name in RESHAPES) or isinstance(kwargs.get("out"), ShardedLogits):
            raise RuntimeError(
                f"{name} of logits that are sharded by vocabulary would change a copy: they are whole only where they are used. "
                "Write logits = logits.whole() first (on all ranks), or the same out of place, or leave the head whole in the plan "
                "(vocab=False)"
            )
        gathered: list[tuple[_Memory, Tensor]] = []

        def read(other: ShardedLogits) -> Tensor:
            gathered.append((other._memory, other.whole()))
            return gathered[-1][1]

        for one in tree_leaves((args, kwargs)):
            if isinstance(one, ShardedLogits):
                _check_graph(one)
                if one._changed is None and one._of.group.size() > 1 and not one._of.rank:
                    warn_of_gather(func, f"the vocabulary of logits of which each rank of tp={one._of.group.size()}")
        if logits is not None and is_write:
            rest, plain_kwargs = tree_map_only(ShardedLogits, read, (args[1:], kwargs))
            return logits._write(lambda whole: func(whole, *rest, **plain_kwargs))
        plain_args, plain_kwargs = tree_map_only(ShardedLogits, read, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        if logits is None or logits._changed is None:
            made = {memory_of(one) for one in tree_leaves(out) if isinstance(one, Tensor)}
            for memory, whole in gathered:
                if memory_of(whole) in made:
                    memory.copies.append(GivenAway(whole))
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation below autograd, from the forward of somebody's ``autograd.Function``, on gathered logits."""

        def read(logits: ShardedLogits) -> Tensor:
            logits._memory.check(logits)
            if logits._changed is not None:
                return logits._changed.detach()
            logits._meet()
            return all_gather(logits.local.detach(), logits.ndim - 1, logits._of.group, logits._of.shard.length)

        plain_args, plain_kwargs = tree_map_only(ShardedLogits, read, (args, dict(kwargs or {})))
        return func(*plain_args, **plain_kwargs)


def _refuse_gradient(grad: Tensor) -> None:
    """A hook of logits that were changed in place: what reads them has the changed ones, and its gradient goes there."""
    raise RuntimeError(
        "logits that are sharded by vocabulary were changed in place, and an autograd.Function read them, whose gradient would "
        "leave the change out; give it logits.whole()"
    )


class _Memory:
    """What logits that are views of one another have in common."""

    def __init__(self) -> None:
        self.changed: weakref.ref[ShardedLogits] | None = None  # which of them were changed in place
        self.copies: list[GivenAway] = []  # gathered ones, of which an operation gave away what is a view of plain logits

    def check(self, logits: ShardedLogits) -> None:
        """Refuse to read logits that don't have a change that was made to a view of them."""
        is_stale = self.changed is not None and self.changed() is not logits
        if is_stale or any(one.is_changed for one in self.copies):
            raise RuntimeError(
                "logits that are sharded by vocabulary are read after a tensor that shares their memory was changed in place, and "
                "the change did not reach them. Write it as a new tensor (torch.where, x = x + y), or logits = logits.whole() "
                "first (on all ranks)"
            )


def whole_logits(x: Tensor) -> Tensor:
    """Sharded logits as a whole plain tensor (collective over tp); any other tensor unchanged."""
    return x.whole() if isinstance(x, ShardedLogits) else x


def _copies(func: Any, logits: Tensor, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function of views makes a copy: a cast to another type, or an index by tensors or lists."""
    if func in _CASTS:
        return out.dtype != logits.dtype or bool(kwargs.get("copy"))
    if func is not Tensor.__getitem__:
        return False
    items = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(item, Tensor | list) for item in items)


def _check_graph(logits: ShardedLogits) -> None:
    """Refuse logits that an ``autograd.Function`` made, as a reentrant activation checkpoint does: their parts have no graph."""
    with without_subclasses():
        node = logits.grad_fn
    if node is not None and not is_node_of(node, _Wrap):
        name = type(node).__name__.removesuffix("Backward")
        what = f"{name}, an autograd.Function" if name != "CheckpointFunction" else "a reentrant activation checkpoint"
        raise RuntimeError(
            f"logits that are sharded by vocabulary came out of {what}, and their parts have no graph: what the loss says would "
            "not reach the model. Give the function logits.whole() (on all ranks); write checkpoint(..., use_reentrant=False), or "
            "take the head out of it"
        )


class _Wrap(torch.autograd.Function):
    """From a rank's part of the logits, or the head's inputs, to :class:`ShardedLogits`: a gather that is not carried out.

    Its backward runs only if someone reads the logits themselves, rather than ``local`` or a loss on the shards.

    ============  ==============  =========================  ==================
    tensor        global          local                      saved for backward
    ============  ==============  =========================  ==================
    x             ``[..., v]``    ``[..., ceil(v/tp)]``      —
    or x          ``[..., h]``    ``[..., h]``               itself
    weight        ``[v, h]``      ``[ceil(v/tp), h]``        itself
    bias          ``[v]``         ``[ceil(v/tp)]``           —
    logits        ``[..., v]``    as their storage           —
    ============  ==============  =========================  ==================

    The gradient ``g`` of the logits is the same on all ranks, and ``g_r`` are this rank's columns of it. With logits in
    memory ``dx = g_r``. With the head's inputs ``dx = g_r W`` (a term of a sum over tp, which ``copy_to_`` in front of the
    head sums), ``dW = g_rᵀ x`` and ``db = Σ g_r``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, part: StoredLogits, of: VocabPart) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.columns, ctx.width = of.columns, part.shape[-1]
        ctx.is_product, ctx.dtype = weight is not None, x.dtype
        if ctx.is_product:
            ctx.save_for_backward(x, weight)
        shape = (*part.shape[:-1], of.shard.length)
        return Tensor._make_wrapper_subclass(ShardedLogits, shape, dtype=part.dtype, device=x.device)

    @staticmethod
    @passes_none
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        start, stop = ctx.columns
        own = F.pad(grad[..., start:stop], (0, ctx.width - (stop - start)))
        if not ctx.is_product:
            return own.to(ctx.dtype), *([None] * 4)
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        flat = own.flatten(0, -2)
        grad_x = (own @ weight.to(own.dtype)).to(x.dtype) if needs[0] else None
        grad_w = (flat.t() @ x.flatten(0, -2).to(own.dtype)).to(weight.dtype) if needs[1] else None
        return grad_x, grad_w, flat.sum(0) if needs[2] else None, None, None


# ---- operations that keep logits sharded -----------------------------------------------------------------------
#
# Each is called with the operation, the logits and the other arguments, and returns the result, or None to have the logits
# gathered.


def _cast(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A cast: to a wider type it waits until the logits are read; to another device, where the group is not, they are gathered."""
    if not any(isinstance(value, ShardedLogits) for value in (*args, *kwargs.values())):
        like = func(torch.empty((), dtype=logits.dtype, device=logits.device), *args, **kwargs)
        if like.device != logits.device:
            return None
        wider = like.is_floating_point() and torch.promote_types(like.dtype, logits.dtype) == like.dtype
        if wider and not kwargs.get("copy"):
            return logits.with_part(logits._part.cast(like.dtype))
    return logits.with_local(func(logits.local, *args, **kwargs))


def _softmax(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A softmax over the vocabulary, or its logarithm: two sums over tp, of a number a token."""
    dim, group = args[0] if args else kwargs.get("dim"), logits._of.group
    if dim not in (-1, logits.ndim - 1) or len(args) > 1 or group.size() == 1:
        return None
    like = torch.empty(1, dtype=logits.dtype, device=logits.device)
    dtype = kwargs.get("dtype") or func(like, -1).dtype  # as in autocast
    logits._meet()
    x = _with_padding(logits, torch.promote_types(dtype, torch.float32))
    top = all_gather(x.detach().amax(-1, keepdim=True), x.ndim - 1, group).amax(-1, keepdim=True)
    powers = (x - top).exp()
    total = reduce_from_tensor_parallel_region(powers.sum(-1, keepdim=True), group)
    total = copy_to_tensor_parallel_region(total, group)
    return logits.with_local((x - top - total.log() if func in _LOG_SOFTMAXES else powers / total).to(dtype))


def _argmax(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The token of the largest logit: each rank's, and then that of the rank whose is the largest."""
    given, of = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs, logits._of
    if given.get("dim") not in (-1, logits.ndim - 1):
        return None
    logits._meet()
    largest, at = _with_padding(logits, logits.dtype).detach().max(-1, keepdim=True)
    owner = all_gather(largest, largest.ndim - 1, of.group).argmax(-1, keepdim=True)
    found = all_gather(at + of.columns[0], at.ndim - 1, of.group).gather(-1, owner)
    return found if given.get("keepdim") else found.squeeze(-1)


def _with_padding(logits: ShardedLogits, dtype: torch.dtype) -> Tensor:
    """This rank's part, whose columns past the vocabulary's end are minus infinity."""
    start, stop = logits._of.columns
    local = logits.local.to(dtype)
    return F.pad(local[..., : stop - start], (0, local.shape[-1] - (stop - start)), value=float("-inf"))


def _pointwise(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on each number by itself, with plain numbers (a temperature); a sum with logits like these (an adapter's)."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, ShardedLogits) and func in _SUMS and x._changed is None and x.shape == logits.shape:
            if (x._of.shard, x._of.group) != (logits._of.shard, logits._of.group):
                return None
        elif isinstance(x, Tensor):
            return None
    others, named = tree_map_only(ShardedLogits, lambda x: x.local, (args, kwargs))
    return logits.with_local(func(logits.local, *others, **named))


def _reshape(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A reshape, if its last dim stays the vocabulary; a view as another type is gathered."""
    if any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values())):
        return None
    own = tuple(logits.shape)
    shape = func(torch.empty(own, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != own[-1]:
        return None
    return logits.with_part(logits._part.of_tokens(lambda x: x.reshape(*shape[:-1], x.shape[-1])))


def _index(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An index that chooses among the tokens, if it takes all of the last dim."""
    (index,) = args
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_dims(item) for item in items)
    at = next((number for number, item in enumerate(items) if item is Ellipsis), None)
    if at is not None:
        items[at : at + 1] = [slice(None)] * (logits.ndim - used)
        used = logits.ndim
    if used > logits.ndim or (used == logits.ndim and items[-1] != slice(None)):
        return None
    return logits.with_part(logits._part.of_tokens(lambda x: x[tuple(items)]))


def _dims(item: Any) -> int:
    """How many dims of the tensor one item of an index uses up."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _cross_entropy(func: Any, logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.cross_entropy`` of logits ``[n, v]`` for class targets ``[n]``; classes in another dim and soft targets are gathered.

    The forward makes one all-gather over tp, of ``[3, n]`` numbers a rank (``[4, n]`` with smoothing); the backward makes
    none. Kept for the backward are the logits as the head made them, or the head's inputs if ``loss_chunk`` is set.
    """
    given = arguments_of(func, (logits, *args), kwargs)
    target, weight, reduction, ignore_index = (given[n] for n in ("target", "weight", "reduction", "ignore_index"))
    if given["size_average"] is not None or given["reduce"] is not None:
        return None  # deprecated ways to write a reduction
    if logits.ndim != 2 or isinstance(target, ShardedLogits) or target.is_floating_point():
        return None
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction; write 'mean', 'sum' or 'none'")
    count, classes = logits.shape
    if target.shape != (count,):
        raise ValueError(f"Expected input batch_size ({count}) to match target batch_size ({list(target.shape)}).")
    part, device = logits._part, target.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        part = part.cast(torch.promote_types(part.dtype, torch.float32))
    if 0 <= ignore_index < classes:
        target, ignore_index = target.masked_fill(target == ignore_index, -(2**62)), -(2**62)  # what is no class
    kept = target.clamp(0, classes - 1)
    beyond = target - kept  # 0 where a target counts, else how far it is outside the vocabulary
    ignored = ignore_index if ignore_index < 0 else ignore_index - (classes - 1)
    if device == "cpu":
        require_inside(target, (beyond == 0) | (beyond == ignored), "Target {} is out of bounds.")
    weight = None if weight is None else weight.to(torch.promote_types(part.dtype, torch.float32))
    own = None if weight is None else weight[kept]
    options = part, weight, own, given["label_smoothing"], logits._of
    found: Tensor = VocabParallelCrossEntropy.apply(*part.tensors, target, options)  # type: ignore[no-untyped-call]
    # As if each were the log-likelihood of the one class 0: a GPU asserts that no other target is there but the ignored ones.
    by_weight = own is not None and reduction == "mean"
    loss = F.nll_loss(found.unsqueeze(-1), beyond, ignore_index=ignored, reduction="sum" if by_weight else reduction)
    if own is not None and by_weight:
        loss = loss / (own * (beyond == 0)).sum()
    return loss.to(part.dtype)


_CASTS = functions("float double half bfloat16 to type_as", Tensor)
_ALIASES = functions("detach data contiguous", torch, Tensor)
_RESHAPES = functions("reshape flatten squeeze unsqueeze unflatten view", torch, Tensor)
_LOG_SOFTMAXES = functions("log_softmax", torch, Tensor, F)
_SUMS = functions("add __add__ __radd__ sub __sub__", torch, Tensor)
_SCALINGS = functions("mul __mul__ __rmul__ div __truediv__ tanh neg __neg__ clone", torch, Tensor)
_KEEPING: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((*_SUMS, *_SCALINGS, *_ALIASES), _pointwise),
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(_RESHAPES, _reshape),
    Tensor.__getitem__: _index,
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys((*_LOG_SOFTMAXES, *functions("softmax", torch, Tensor, F)), _softmax),
    **dict.fromkeys(functions("argmax", torch, Tensor), _argmax),
}
_VIEWS = frozenset([*_CASTS, *_ALIASES, *_RESHAPES, Tensor.__getitem__])
_FACTS = FACTS.union(functions("requires_grad grad_fn is_leaf _version is_contiguous", Tensor))
_REFUSED = frozenset(functions("register_hook retain_grad requires_grad_ share_memory_", Tensor))
