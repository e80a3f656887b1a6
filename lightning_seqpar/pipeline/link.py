"""Activations and their gradients on their way between neighbouring stages."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 6
"""More dims no activation has: what is told of a tensor before it is sent has a fixed length."""


class Link:
    """The way to a neighbouring stage and back. Tensors arrive in the order in which they were sent, each with its own shape.

    Args:
        group: the process group of the pipeline.
        peer: the neighbour's rank in it.
        device: of this rank.
        depth: how many tensors may be under way before :meth:`send` waits for the first; as many as the pipeline has stages
            never make it wait.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device, depth: int) -> None:
        self._group, self._peer, self._device, self._depth = group, peer, device, depth
        self._sent: deque[tuple[list[Any], list[Tensor]]] = deque()

    def send(self, x: Tensor, *, wants_gradient: bool = False) -> None:
        """Send a tensor; it must not be changed before it has arrived.

        Raises:
            ValueError: for a tensor of another dtype than floats have, or of too many dims.
        """
        if x.dtype not in _DTYPES or x.ndim > _MOST_DIMS:
            raise ValueError(
                f"an activation of dtype {x.dtype} and shape {list(x.shape)} can't be sent to the next stage: it must be of "
                f"floats and have {_MOST_DIMS} dims at most"
            )
        facts = [_DTYPES.index(x.dtype), int(wants_gradient), x.ndim, *x.shape]
        facts += [0] * (3 + _MOST_DIMS - len(facts))
        tensors = [torch.tensor(facts, dtype=torch.int64, device=x.device), x.detach().contiguous()]
        works = [dist.isend(one, group=self._group, group_dst=self._peer) for one in tensors if one.numel()]
        self._sent.append((works, tensors))
        while len(self._sent) > self._depth:
            self._wait_for_first()

    def receive(self) -> tuple[Tensor, bool]:
        """The next tensor from the neighbour, and whether it waits for its gradient."""
        facts = torch.empty(3 + _MOST_DIMS, dtype=torch.int64, device=self._device)
        dist.recv(facts, group=self._group, group_src=self._peer)
        dtype, wants_gradient, ndim, *shape = facts.tolist()
        x = torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=self._device)
        if x.numel():
            dist.recv(x, group=self._group, group_src=self._peer)
        return x, bool(wants_gradient)

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._sent:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        for work in self._sent.popleft()[0]:
            work.wait()
