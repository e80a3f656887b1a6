"""What some blocks are given, return, draw, and get as gradients, in a step that is compared with whole blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_seqpar.context.seq_part import SeqPart
from lightning_seqpar.distributed.autograd import in_backward, next_sequence_nr
from lightning_seqpar.distributed.rng import HostDraws, drawn_by
from lightning_seqpar.region.block_state import State, settings_of, state_of
from lightning_seqpar.region.frames import FrameStack
from lightning_seqpar.region.sharded_outputs import ShardedOutputs


@dataclass
class Recorded:
    """An activation of a call, as it was, and the gradient that reached it.

    Attributes:
        value: this rank's, ``[b, s/tp, h]``, or whole.
        is_shard: whether it is this rank's part of the sequence.
        grad: its gradient, laid out alike; None if none came.
        node: the graph node that made it; None if it needs no gradient.
    """

    value: Tensor
    is_shard: bool
    grad: Tensor | None = None
    node: Any = None

    def note(self, tensor: Tensor) -> None:
        """Keep the gradient that will reach ``tensor``, which is this activation in the graph."""

        def keep(grad: Tensor) -> None:
            self.grad = grad.detach().clone() if self.grad is None else self.grad + grad.detach()

        self.node = tensor.grad_fn
        if self.node is None:
            tensor.register_hook(keep)
            return
        at = tensor.output_nr

        def keep_of(grads: tuple[Tensor | None, ...]) -> None:
            grad = grads[at]
            if grad is not None:
                keep(grad)

        # Behind the hooks of the tensor itself, by which users may change its gradient.
        self.node.register_prehook(keep_of)


@dataclass
class RecordedCall:
    """One call of a block.

    Attributes:
        x: the activation that it was given.
        where: which argument that is: its index or its keyword.
        args: all positional arguments; None in the place of the activation.
        kwargs: all named ones, likewise.
        length: positions of the whole sequence; None where activations are whole.
        autocast: the type to which products are cast, if they are.
        trained: names of the block's parameters that trained when it was called.
        settings: those of the block's modules when it returned, by the name of the module.
        states: what is in other attributes of its modules when it was called, and when it returned.
        outputs: tensors among what it returned, by their place in it, that gradients may reach.
        drawn: each random draw in it: the operation, and what it filled.
        nodes: sequence numbers of the first node of the graph that it made, and of the first behind it.
        is_whole: whether it returned.
        host: what it drew from Python's and numpy's generators.
        strange: why it can't be repeated on one rank; empty if it can.
    """

    x: Recorded
    where: int | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    length: int | None
    autocast: torch.dtype | None
    trained: frozenset[str] = frozenset()
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    outputs: dict[int, Recorded] = field(default_factory=dict)
    drawn: list[tuple[str, Tensor]] = field(default_factory=list)
    nodes: tuple[int, int] = (0, 0)
    is_whole: bool = False
    host: HostDraws | None = None
    strange: str = ""


class _Draws(TorchDispatchMode):
    """Notes what each random draw filled.

    Args:
        call: in which they are made.
    """

    def __init__(self, call: RecordedCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if (drawn := drawn_by(func, out, args, kwargs)) is not None:
            filled = out[1] if drawn.name == "native_dropout" else out
            self._call.drawn.append((drawn.name, filled.detach().clone()))
        elif "scaled_dot_product" in func.name() and _dropout_of(func, args, kwargs or {}) > 0:
            self._call.strange = "its attention drops out within a kernel"
        return out


def _dropout_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The rate of dropout that an operation on attention was given."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return float(args[at] if at < len(args) else kwargs.get("dropout_p", 0.0))
    return 0.0


class BlockRecorder:
    """Records the calls of some blocks of a region.

    Args:
        blocks: by their names.
        late: those of them whose input is known behind the hooks of the region alone; :meth:`entered` is called for them there.
        dim: the tensor dim of the sequence.
        sp: whether activations between blocks are shards along it.
        frames: the calls of the region's blocks.
        parts: the tensors of this step of which this rank has a part.

    Attributes:
        calls: the calls of each block, in order.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        late: Collection[str],
        dim: int,
        sp: bool,
        frames: FrameStack,
        parts: ShardedOutputs,
    ) -> None:
        self.calls: dict[str, list[RecordedCall]] = {name: [] for name in blocks}
        self._blocks = blocks
        self.late = frozenset(late)
        self._dim, self._sp, self._frames, self._parts = dim, sp, frames, parts
        self._open: list[tuple[str, RecordedCall, ExitStack]] = []

    def entered(
        self, name: str, where: int | str, given: Tensor, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """A block is called. Collective over tp if it is given other parts of tensors.

        Args:
            name: of the block.
            where: which argument is the activation.
            given: the activation as the caller gave it.
            x: the activation as the block gets it.
            args: the positional arguments.
            kwargs: the named arguments.

        Returns:
            The activation for the block: the same numbers, with a node of the graph for this call alone.
        """
        if name not in self.calls or in_backward() or not torch.is_grad_enabled():
            return x
        is_shard = self._sp and self._frames.active
        strange = ""
        if any(isinstance(leaf, SeqPart) for leaf in (x, *tree_flatten((args, kwargs))[0])):
            strange = "it is given parts of a sequence"
        elif is_shard and self._frames.length == 1:
            strange = "its sequence has one position, of which a part looks like the whole"

        def kept(tensor: Tensor) -> Tensor | None:
            if tensor is given or tensor is x:
                return None
            return self._parts.whole(tensor).detach()

        with torch.no_grad():
            others: Any = ((), {}) if strange else tree_map_only(Tensor, kept, (args, kwargs))
            call = RecordedCall(
                Recorded(x.detach().clone(), is_shard),
                where,
                others[0],
                others[1],
                self._frames.length if is_shard else None,
                torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None,
                frozenset(key for key, one in self._blocks[name].named_parameters() if one.requires_grad),
                states=[state_of(self._blocks[name])],
                strange=strange,
            )
        self.calls[name].append(call)
        if x.requires_grad:
            x = x.view_as(x)
            call.x.note(x)
        call.nodes = (next_sequence_nr(), 0)
        call.host = HostDraws()
        stack = ExitStack()
        stack.enter_context(_Draws(call))
        self._open.append((name, call, stack))
        return x

    def left(self, name: str, out: Any) -> None:
        """A block returned ``out``; or raised, where that is None."""
        if not self._open or self._open[-1][0] != name or in_backward():
            return
        _, call, stack = self._open.pop()
        stack.close()
        call.nodes = (call.nodes[0], next_sequence_nr())
        call.is_whole = out is not None
        call.states.append(state_of(self._blocks[name]))
        call.settings = {key: settings_of(module) for key, module in self._blocks[name].named_modules()}
        if call.host is not None:
            call.host.end()
        for at, tensor in enumerate(tree_flatten(out)[0]):
            if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                continue
            if isinstance(tensor, SeqPart):
                call.strange = "it returns parts of a sequence"
                continue
            call.outputs[at] = made = Recorded(tensor.detach().clone(), self._is_shard(tensor, call))
            made.note(tensor)

    def _is_shard(self, tensor: Tensor, call: RecordedCall) -> bool:
        """Whether an output is this rank's part: it is whole behind the region's end, which may be at this block."""
        if not call.x.is_shard or tensor.ndim <= self._dim:
            return False
        return self._frames.active and tensor.shape[self._dim] == call.x.value.shape[self._dim]

    def close(self) -> None:
        """Stop: a step ended, or was aborted within a block."""
        while self._open:
            self._open.pop()[2].close()
