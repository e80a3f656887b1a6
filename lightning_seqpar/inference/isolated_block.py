"""One block of a model's copy, run by itself on one process with the inputs of a recorded forward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_seqpar.inference.dataflow import BlockFlow
from lightning_seqpar.inference.model_copy import Quiet
from lightning_seqpar.layout.linear_kind import features, linear_kind

EQUAL = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest difference, relative to the largest value, up to which two tensors count as equal; 5e-2 in other types."""


def is_equal(got: Tensor, wanted: Tensor, limit: float | None = None) -> bool:
    """Whether two tensors are equal up to rounding, by :data:`EQUAL` or another limit."""
    limit = EQUAL.get(wanted.dtype, 5e-2) if limit is None else limit
    return float((got - wanted).abs().max()) <= limit * max(float(wanted.abs().max()), 1e-30)


@contextmanager
def other_data(tensors: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """While open, each of the first tensors has the data of the second."""
    with ExitStack() as stack:
        for tensor, data in tensors:
            stack.callback(setattr, tensor, "data", tensor.data)
            tensor.data = data
        yield


class Block:
    """A block of a copy that is run with the input that it had in a recorded forward; ``blocks`` are the others of its stack."""

    def __init__(self, flow: BlockFlow, blocks: Collection[str] = ()) -> None:
        self.flow, self.model, self.blocks = flow, flow.trace.model, blocks
        self.module, self.modules = flow.call.module, flow.trace.modules

    def width(self, column: str) -> int:
        """Number of a column's out-features."""
        linear = self.flow.linears[column]
        if not linear.is_called:
            return self.model.get_parameter(linear.parameter).shape[linear.out_dim]
        kind = linear_kind(self.modules[column])
        assert kind is not None
        return features(self.modules[column], kind)[0]

    def inputs(self, seed: int = 0, grad: bool = False) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
        """Positional and named arguments for a run, and the activation among them, as leaves of a new graph.

        With a ``seed`` above 0 the activation is noise drawn from it; else it is the recorded one.
        """
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), self.flow.call.given)
        # The recorded forward filled a cache of keys and values, which the block would read instead of computing them.
        args = [None if is_cache(arg) else arg for arg in args]
        kwargs = {key: None if is_cache(arg) else arg for key, arg in kwargs.items()}
        holder: Any = args if isinstance(self.flow.arg, int) else kwargs
        x = holder[self.flow.arg]
        if seed:
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        x.requires_grad_(grad)
        holder[self.flow.arg] = x
        return tuple(args), kwargs, x

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward, with random draws made constant."""
        return self.quiet(self.module, args, kwargs)

    @staticmethod
    def quiet(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A module's forward, with random draws made constant, on copies of its buffers, which it may update.

        The graph of what is returned keeps the copies: buffers that were put back would have changed under it.
        """
        copies: dict[int, Tensor] = {}
        owned = [
            (owner._buffers, key, buffer)
            for owner in module.modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None
        ]
        try:
            for buffers, key, buffer in owned:
                buffers[key] = copies.setdefault(id(buffer), buffer.detach().clone())
            with Quiet():
                return module(*args, **kwargs)
        finally:
            for buffers, key, buffer in owned:
                buffers[key] = buffer

    def sequence_dim(self) -> int | None:
        """The tensor dim along which the block mixes positions: 1 for ``[b, s, h]``, 0 for ``[s, b, h]`` or ``[tokens, h]``.

        None if there is no such one dim: positions in two dims (``[b, h, w, c]``), or entries of a batch that mix (a batch norm).
        """
        args, kwargs, x = self.inputs(grad=True)
        if x.ndim == 2:
            return 0
        if x.ndim > 3:
            return None
        out = self.run(args, kwargs)
        first = next(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad)
        mixed = [False, False]
        for at in ((-1, -1), (0, 0)):
            cotangent = torch.zeros_like(first)
            cotangent[at[0], at[1]] = torch.randn(first.shape[-1], dtype=first.dtype)
            (grad,) = torch.autograd.grad(first, x, cotangent, retain_graph=True, materialize_grads=True)
            touched = grad.abs().amax(-1) > 0
            mixed[0] |= bool(touched.any(1).sum() > 1)
            mixed[1] |= bool(touched.any(0).sum() > 1)
        return None if all(mixed) else 0 if mixed[0] else 1


def is_cache(value: Any) -> bool:
    """Whether an argument is a cache of keys and values, recognised by transformers' methods."""
    return all(callable(getattr(value, name, None)) for name in ("update", "get_seq_length"))
