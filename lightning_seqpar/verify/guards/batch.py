"""Comparisons of what the ranks of one replica read and return: batches, and the outputs of evaluation steps.

The tensor-parallel ranks of a replica compute one model together, so they must read the same batch and return the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_seqpar.data.batch import tensors_in
from lightning_seqpar.topology.process_groups import ParallelGroups

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type that shows the bits of an element of so many bytes."""


def checksum(batch: Any, device: torch.device) -> Tensor:
    """A checksum over the bits and positions of a batch's plain tensors, and the number of all tensors: ``[2]``, int64."""
    total, count = torch.zeros((), dtype=torch.int64, device=device), 0
    for at, leaf in enumerate(tensors_in(batch)):
        count += 1
        if not leaf.numel() or leaf.is_nested or leaf.layout != torch.strided or leaf.is_quantized:
            continue
        plain = leaf.detach().resolve_conj().resolve_neg()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        # The bits as they are stored: in a sum of floats, infinities or huge values (masks) would hide the rest.
        bits = plain.contiguous().flatten().view(_AS_INTEGERS[plain.element_size()]).to(device=device, dtype=torch.int64)
        # Each is multiplied by a hash of its position, so that another order gives another sum. All is modulo 2**64.
        position = torch.arange(1, len(bits) + 1, device=device) + (at << 40)
        position = (position ^ (position >> 15)) * 0x2C1B3C6D297A2D39
        position = (position ^ (position >> 32)) * 0x9E3779B97F4A7C1 | 1
        total += (bits * position).sum()
    return torch.stack([total, torch.full_like(total, count)])


def _gathered(numbers: Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    """Every rank's ``numbers``, in the order of the ranks; collective over ``group``."""
    values = [torch.zeros_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(values, numbers, group=group)
    return [value.tolist() for value in values]


def check_batch(batch: Any, groups: ParallelGroups, device: torch.device, loop: str) -> None:
    """Compare the checksums of the batch over the ranks of one replica; collective over the replica."""
    values = _gathered(checksum(batch, device), groups[groups.replica_axes])
    if any(value != values[0] for value in values):
        raise RuntimeError(
            f"the ranks of one replica read different {loop} batches (checksums "
            f"{', '.join(f'{value % 2**64:016x}' for value, _ in values)}). Deal data by strategy.dp_rank and dp_size, not by "
            "rank and world size, and draw random samples and augmentations from a seed that the replica shares; or set "
            "broadcast_batch=True, and one rank of each replica reads for all"
        )


def warn_of_equal_replicas(batch: Any, groups: ParallelGroups, device: torch.device) -> None:
    """Warn if all replicas read the same batch (with tensors in it): they learn no more than one. Collective over dp."""
    values = _gathered(checksum(batch, device), groups["dp"])
    if len(values) > 1 and values[0][1] and all(value == values[0] for value in values):
        rank_zero_warn(
            f"lightning_seqpar: all {len(values)} replicas read the same first training batch; deal an iterable data set "
            "out by trainer.strategy.dp_rank and dp_size, or each sample is read by every replica"
        )


class OutputWatch:
    """Compares what evaluation steps return over the tensor-parallel ranks of a replica, many steps at once."""

    LIMIT = 1024
    """How many steps' numbers are kept at most before they are compared."""

    def __init__(self) -> None:
        self._steps: list[Tensor] = []
        self._tolerance = 0.0

    def note(self, out: Any, device: torch.device) -> None:
        """Keep three numbers of a step's floating-point tensors: their count, the sum of norms, and that weighted by position."""
        leaves = [leaf.detach() for leaf in tensors_in(out) if leaf.is_floating_point()]
        numbers = torch.zeros(3, dtype=torch.float64, device=device)
        for position, leaf in enumerate(leaves, 1):
            norm = leaf.double().nan_to_num(0.0, 0.0, 0.0).norm().to(device)  # masked scores are infinite
            numbers += torch.stack([torch.ones_like(norm), norm, position * norm])
            tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(leaf.dtype, 2e-2)
            self._tolerance = max(self._tolerance, tolerance)
        self._steps.append(numbers)

    @property
    def is_full(self) -> bool:
        """Whether so many steps were noted that :meth:`check` is due."""
        return len(self._steps) >= self.LIMIT

    def check(self, groups: ParallelGroups, loop: str) -> None:
        """Compare the numbers of all steps since the last call; collective over the replica."""
        if not self._steps:
            return
        numbers, tolerance = torch.cat(self._steps), self._tolerance
        self._steps, self._tolerance = [], 0.0
        both = torch.cat([numbers, -numbers])  # the largest of the negated numbers is the smallest
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=groups[groups.replica_axes])
        highs, lows = both[: len(numbers)], -both[len(numbers) :]
        apart = (highs - lows > tolerance * torch.maximum(highs.abs(), lows.abs())).tolist()
        if any(apart):
            norm = apart.index(True) // 3 * 3 + 1
            raise RuntimeError(
                f"what the {loop} step returns differs across the ranks of one replica (its norms sum to "
                f"{lows[norm]:.9g} on one and {highs[norm]:.9g} on another): it is made of this rank's part of an activation "
                "(hidden states or attention maps that were changed, pooled or kept aside before the model returned them?), or "
                "drawn at random on its own. Use what the model returns in lists or tuples, or set sp=False"
            )
