"""Calls of a sharded block, done again by the whole one on each rank: forward, backward, and with the same random draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from lightning_seqpar.distributed.autograd import in_backward
from lightning_seqpar.distributed.rng import drawn_by, get_streams, is_draw, kept_streams
from lightning_seqpar.inference.isolated_block import is_cache
from lightning_seqpar.region.block_recorder import Recorded, RecordedCall


@dataclass
class ReturnedParts:
    """Something that a block returned.

    Attributes:
        made: what this rank has of it, and its gradient; the whole, where it is an activation.
        values: what each tensor-parallel rank has, where it is no activation; else None.
        grads: the gradients there.
    """

    made: Recorded
    values: list[Tensor] | None
    grads: list[Tensor] | None

    def value(self, shape: tuple[int, ...], rank: int) -> Tensor:
        """The whole, which has ``shape``."""
        return self.made.value if self.values is None else _put_together(self.values, shape, rank)

    def grad(self, shape: tuple[int, ...], rank: int) -> Tensor | None:
        """The gradient of the whole: what every rank has, or, where each has a term of it, their sum."""
        if self.grads is None or tuple(self.grads[rank].shape) != shape:
            return self.made.grad if self.grads is None else _put_together(self.grads, shape, rank)
        apart = max(float(size_of(one - self.grads[0])) for one in self.grads)
        return self.grads[rank] if apart <= 0.1 * float(size_of(self.grads[0])) else torch.stack(self.grads).sum(0)


@dataclass
class CallToRepeat:
    """A call to be repeated, in whole tensors.

    Attributes:
        call: as it was recorded.
        x: the activation that it was given, and its gradient.
        outputs: what it returned, by place.
        drawn: for each random draw its operation, and what each tensor-parallel rank drew.
    """

    call: RecordedCall
    x: Recorded
    outputs: dict[int, ReturnedParts]
    drawn: list[tuple[str, list[Tensor]]]


@dataclass
class RepeatedCalls:
    """What a whole block did in some calls.

    Attributes:
        outputs: for each call, what it returned, by place.
        inputs: for each call, the gradient of its activation.
        grads: the gradient of each parameter, of all calls together.
        narrow: whether something was computed in less than float64.
    """

    outputs: list[dict[int, Tensor]] = field(default_factory=list)
    inputs: list[Tensor | None] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    narrow: bool = False


def repeat(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    runs: Sequence[CallToRepeat],
    wide: torch.dtype | None,
    rank: int,
) -> RepeatedCalls:
    """Run calls of a whole block forward and backward.

    Args:
        module: the block, on the meta device.
        weights: its parameters.
        buffers: its buffers.
        runs: the calls.
        wide: the type to compute in; None for that of the training.
        rank: this tensor-parallel rank, for draws that are not divided.
    """
    done = RepeatedCalls()
    trains = {key: parameter.requires_grad for key, parameter in module.named_parameters()}

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(wide) if wide is not None and tensor.is_floating_point() else tensor

    leaves = {key: nn.Parameter(cast(weight).detach(), trains[key]) for key, weight in weights.items()}
    held = {key: cast(buffer).clone() for key, buffer in buffers.items()}
    device = next(iter(weights.values())).device
    for run in runs:
        x = cast(run.x.value).detach().clone().requires_grad_(run.call.x.node is not None)
        args, kwargs = tree_map_only(Tensor, cast, (run.call.args, run.call.kwargs))
        args, kwargs = tree_map(lambda leaf: None if is_cache(leaf) else leaf, (args, kwargs), is_leaf=is_cache)
        if isinstance(run.call.where, int):
            args = (*args[: run.call.where], x, *args[run.call.where + 1 :])
        else:
            kwargs = {**kwargs, run.call.where: x}
        wanted = [x] * x.requires_grad + [leaf for leaf in leaves.values() if leaf.requires_grad]
        grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
        casts = run.call.autocast is not None and wide is None
        numbers = _numbers(module, {**leaves, **held})
        assert run.call.host is not None
        again = _Again(run.drawn, rank, device)
        with torch.enable_grad(), kept_streams(device), run.call.host.again(), numbers, again:
            with torch.autocast(device.type, run.call.autocast if casts else None, enabled=casts):
                out = module(*args, **kwargs)
            made = tree_flatten(out)[0]
            tops = {
                at: one.grad(tuple(made[at].shape), rank) for at, one in run.outputs.items() if made[at].requires_grad
            }
            ends = {at: grad.to(made[at]) for at, grad in tops.items() if grad is not None}
            if len(ends) > 1:
                ends = _from_outside(made, ends)
            if ends:
                grads = torch.autograd.grad([made[at] for at in ends], wanted, [*ends.values()], allow_unused=True)
        done.narrow |= again.narrow
        done.outputs.append({at: made[at].detach() for at in run.outputs})
        by_leaf = iter(grads)
        done.inputs.append(next(by_leaf) if x.requires_grad else None)
        for key, leaf in leaves.items():
            if leaf.requires_grad and (grad := next(by_leaf)) is not None:
                done.grads[key] = done.grads[key] + grad if key in done.grads else grad
    return done


@contextlib.contextmanager
def _numbers(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which a block of the meta device has numbers, in its backward too, where parts of it may run again.

    Args:
        module: the block.
        tensors: its parameters and buffers, by name.
    """
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    places = []
    for name, tensor in named:
        holder, _, key = name.rpartition(".")
        owner = module.get_submodule(holder)
        held = owner._parameters if key in owner._parameters else owner._buffers
        places.append((held, key, tensor, first.setdefault(id(tensor), name)))
    try:
        for held, key, _, name in places:
            held[key] = tensors[name]  # type: ignore[assignment]
        yield
    finally:
        for held, key, tensor, _ in places:
            held[key] = tensor  # type: ignore[assignment]


def _from_outside(made: Sequence[Any], ends: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Gradients that come to what a block returned from outside alone.

    Something that it returns beside its activation may be read inside of it too (a bias of the attention's scores), and what
    was recorded is the gradient from both.

    Args:
        made: what it returned.
        ends: the recorded gradients, by place; the first is that of the activation.
    """
    first, *others = ends
    inner = torch.autograd.grad(
        made[first], [made[at] for at in others], ends[first], retain_graph=True, allow_unused=True
    )
    found = {first: ends[first]}
    for at, inside_of_it in zip(others, inner, strict=True):
        found[at] = ends[at] if inside_of_it is None else ends[at] - inside_of_it
    return found


class _Again(TorchDispatchMode):
    """A mode in which random draws give again what was drawn in a recorded call.

    An activation checkpoint within the block draws once more in the backward, from the state that the generator had in the forward:
    by that state it is given the same numbers.

    Args:
        drawn: for each draw its operation, and what each tensor-parallel rank drew.
        rank: this rank.
        device: on which the block runs.

    Attributes:
        narrow: whether an operation made an activation in a type narrower than float64.
    """

    def __init__(self, drawn: Sequence[tuple[str, list[Tensor]]], rank: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn, self._rank, self._device = iter(drawn), rank, device
        self._by_state: dict[bytes, Tensor] = {}
        self.narrow = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not is_draw(func):
            made = func(*args, **(kwargs or {}))
            is_narrow = isinstance(made, Tensor) and made.is_floating_point() and made.dtype != torch.float64
            self.narrow |= is_narrow and made.ndim > 1
            return made
        state = b"".join(one.numpy().tobytes() for one in get_streams(self._device)[2:] if one is not None)
        out = func(*args, **(kwargs or {}))
        drawn = drawn_by(func, out, args, kwargs)
        assert drawn is not None
        if in_backward():
            if state not in self._by_state:
                raise ValueError(f"it draws {drawn.name} in the backward, where the forward drew nothing of the kind")
            filled = self._by_state[state]
        else:
            name, parts = next(self._drawn, ("nothing", []))
            if name != drawn.name:
                raise ValueError(f"it draws {drawn.name} where the sharded block drew {name}")
            filled = self._by_state[state] = _put_together(parts, drawn.shape, self._rank)
        if drawn.name == "native_dropout":
            keep = 1.0 - float(args[1])
            return args[0] * filled * (1.0 / keep if keep else 0.0), filled
        return out.copy_(filled)


def _put_together(parts: Sequence[Tensor], shape: tuple[int, ...], rank: int) -> Tensor:
    """What all ranks drew, in the shape of the whole block's draw.

    Args:
        parts: of each rank.
        shape: of the whole.
        rank: whose part is the whole, where the draw is not divided.

    Raises:
        ValueError: if they do not fit.
    """
    own = tuple(parts[rank].shape)
    if own == shape:
        return parts[rank]
    dims = [at for at, (part, size) in enumerate(zip(own, shape, strict=False)) if part != size]
    if len(own) == len(shape) and len(dims) == 1:
        whole = torch.cat(list(parts), dims[0])
        if whole.shape[dims[0]] >= shape[dims[0]]:
            return whole.narrow(dims[0], 0, shape[dims[0]])
    raise ValueError(f"ranks drew {list(own)} each, which do not make {list(shape)}")


def size_of(tensor: Tensor) -> Tensor:
    """The 2-norm of a tensor, in float32 at least."""
    norm: Tensor = torch.linalg.vector_norm(tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)))
    return norm
