"""Activations and their gradients on their way between neighbouring stages."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 6
"""More dims no activation has: what is told of a tensor before it is sent has a fixed length."""
_FACTS = 8 + _MOST_DIMS


def refuse_nested(x: Any) -> None:
    """Raise ValueError for a nested tensor, which has no shape that another stage could be told."""
    if isinstance(x, Tensor) and x.is_nested:
        raise ValueError(
            "a nested activation can't be sent to another stage: nn.TransformerEncoder makes one of padded sequences in "
            "evaluation; construct it with enable_nested_tensor=False"
        )


class Message(NamedTuple):
    """What a tensor on its way between stages belongs to."""

    micro_batch: int
    chunk: int  # that takes the activation, or has taken it and sends its gradient
    slot: int = 0  # 0: between two blocks the activation; 1, 2, ...: what goes beside it; -1, -2, ...: the end of a stack


_NONE = Message(0, 0)


def _facts(x: Tensor, message: Message = _NONE, wants_gradient: bool = False, beside: Tensor | None = None) -> Tensor:
    """What is told of a tensor before it is sent; ``beside`` is two numbers in float64."""
    if x.dtype not in _DTYPES or x.ndim > _MOST_DIMS:
        raise ValueError(
            f"an activation of dtype {x.dtype} and shape {list(x.shape)} can't be sent to another stage: it must be of "
            f"floats and have {_MOST_DIMS} dims at most"
        )
    facts = [*message, _DTYPES.index(x.dtype), int(wants_gradient), x.ndim, *x.shape]
    known = torch.tensor(facts + [0] * (_FACTS - 2 - len(facts)), dtype=torch.int64, device=x.device)
    return torch.cat([known.new_zeros(2) if beside is None else beside.view(torch.int64), known])


def _empty(facts: Tensor) -> tuple[Tensor, bool, Message]:
    """Memory for the tensor of which something was told, whether it waits for its gradient, and what it belongs to."""
    micro_batch, chunk, slot, dtype, wants_gradient, ndim, *shape = facts[2:].tolist()
    x = torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=facts.device)
    return x, bool(wants_gradient), Message(micro_batch, chunk, slot)


def from_stage(stage: int, x: Tensor | None, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """A tensor of one stage, on every stage; ``x`` is None on the others. Collective over the pipeline."""
    facts = torch.empty(_FACTS, dtype=torch.int64, device=device) if x is None else _facts(x)
    dist.broadcast(facts, group=group, group_src=stage)
    x = _empty(facts)[0] if x is None else x.detach().contiguous()
    if x.numel():
        dist.broadcast(x, group=group, group_src=stage)
    return x


def count_channels(pp: int, virtual_pp: int) -> int:
    """How many groups carry messages between neighbours: one for each direction and kind, since kinds overtake each other."""
    if pp == 1:
        return 0
    return 2 if virtual_pp == 1 else 4


class Link:
    """The way to a neighbouring stage and back. Tensors arrive in the order in which they were sent, each with its own shape.

    ``there`` and ``back`` are groups of the pipeline that carry one direction and nothing else; ``depth`` tensors may be under way
    before :meth:`send` waits, which four times as many as there are chunks never make it do.
    """

    def __init__(self, there: dist.ProcessGroup, back: dist.ProcessGroup, peer: int, device: torch.device, depth: int) -> None:
        self._there, self._back, self._peer, self._device, self._depth = there, back, peer, device, depth
        self._arrived: dict[Message, tuple[Tensor, bool, list[float]]] = {}  # and was not asked for yet
        self._sent: deque[tuple[list[Any], list[Tensor]]] = deque()

    def send(self, x: Tensor, message: Message, *, wants_gradient: bool = False, beside: Tensor | None = None) -> None:
        """Send a tensor, and two numbers beside it; it must not be changed before it has arrived."""
        tensors = [_facts(x, message, wants_gradient, beside), x.detach().contiguous()]
        works = [dist.isend(one, group=self._there, group_dst=self._peer) for one in tensors if one.numel()]
        self._sent.append((works, tensors))
        while len(self._sent) > self._depth:
            self._wait_for_first()

    def receive(self, what: str, message: Message) -> tuple[Tensor, bool, list[float]]:
        """The next tensor from the neighbour, whether it waits for its gradient, and the two numbers beside it."""
        what = f"{what} of micro-batch {message.micro_batch}"
        while message not in self._arrived:
            came, found = self._next(what)
            if came.micro_batch != message.micro_batch or (came.chunk != message.chunk and came.slot == message.slot):
                chunk = "" if came.chunk == message.chunk else f" for chunk {came.chunk} of blocks, not {message.chunk}"
                raise RuntimeError(
                    f"stage {self._back.rank()} waited for {what}, and stage {self._peer} sent that of micro-batch "
                    f"{came.micro_batch}{chunk}: the stages are not in the same step any more. Each must read the same batches, "
                    "and call the model as often"
                )
            self._arrived[came] = found  # a backward sends what it has first, and another one asks for it later
        return self._arrived.pop(message)

    def _next(self, what: str) -> tuple[Message, tuple[Tensor, bool, list[float]]]:
        """What the neighbour sent next."""
        facts = torch.empty(_FACTS, dtype=torch.int64, device=self._device)
        try:
            dist.recv(facts, group=self._back, group_src=self._peer)
            x, wants_gradient, came = _empty(facts)
            if x.numel():
                dist.recv(x, group=self._back, group_src=self._peer)
        except RuntimeError as error:
            rank = dist.get_global_rank(self._back, self._peer)
            raise RuntimeError(
                f"stage {self._back.rank()} waited for {what}, which did not come from stage {self._peer} (rank {rank}): it has "
                f"ended, or is stuck ({str(error).splitlines()[0]})"
            ) from error
        return came, (x, wants_gradient, facts[:2].view(torch.float64).tolist())

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._sent:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        for work in self._sent.popleft()[0]:
            work.wait()
