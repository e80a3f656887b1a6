"""Refused while running: ranks of a replica that read different batches, or whose evaluation steps return different things."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_seqpar.data.batch import tensors_in
from lightning_seqpar.topology.process_groups import ParallelGroups

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(batch: Any, device: torch.device) -> Tensor:
    """A number that depends on every bit of a batch's tensors and on its place, and how many they are: ``[2]``, int64."""
    total, count = torch.zeros((), dtype=torch.int64, device=device), 0
    for at, leaf in enumerate(tensors_in(batch)):
        count += 1
        if not leaf.numel() or leaf.is_nested or leaf.layout != torch.strided or leaf.is_quantized:
            continue
        plain = leaf.detach().resolve_conj().resolve_neg()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        # Numbers as they are stored: neither infinities nor huge ones (masks) hide the others.
        bits = (
            plain.contiguous().flatten().view(_AS_INTEGERS[plain.element_size()]).to(device=device, dtype=torch.int64)
        )
        # Times a hash of the position, so that the same values in another order differ; all modulo 2**64.
        places = torch.arange(1, len(bits) + 1, device=device) + (at << 40)
        places = (places ^ (places >> 15)) * 0x2C1B3C6D297A2D39
        places = (places ^ (places >> 32)) * 0x9E3779B97F4A7C1 | 1
        total += (bits * places).sum()
    return torch.stack([total, torch.full_like(total, count)])


def _gathered(numbers: Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    values = [torch.zeros_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(values, numbers, group=group)
    return [value.tolist() for value in values]


def check_batch(batch: Any, groups: ParallelGroups, device: torch.device, loop: str) -> None:
    """The ranks of one replica must read the same batch.

    Raises:
        RuntimeError: on every rank of the replica.
    """
    values = _gathered(checksum(batch, device), groups["tp"])
    if any(value != values[0] for value in values):
        raise RuntimeError(
            f"the tensor-parallel ranks of one replica read different {loop} batches (checksums "
            f"{', '.join(f'{value % 2**64:016x}' for value, _ in values)}). Deal data by strategy.dp_rank and dp_size, not by "
            "rank and world size, and draw random samples and augmentations from a seed that the replica shares; or set "
            "broadcast_batch=True, and one rank of each replica reads for all"
        )


def warn_of_equal_replicas(batch: Any, groups: ParallelGroups, device: torch.device) -> None:
    """Replicas that all read one stream learn no more than one of them would; they say so. Collective.

    Of batches that hold no tensors as far as is known, nothing is said.
    """
    values = _gathered(checksum(batch, device), groups["dp"])
    if len(values) > 1 and values[0][1] and all(value == values[0] for value in values):
        rank_zero_warn(
            f"lightning_seqpar: all {len(values)} replicas read the same first training batch; deal an iterable data set "
            "out by trainer.strategy.dp_rank and dp_size, or each sample is read by every replica"
        )


class OutputWatch:
    """What evaluation steps return must be the same on all tensor-parallel ranks of a replica, at every step.

    Three numbers of each step are kept where they are, and compared when :meth:`check` is called.
    """

    MANY = 1024
    """Steps whose numbers are kept at most."""

    def __init__(self) -> None:
        self._told: list[Tensor] = []
        self._limit = 0.0

    def note(self, out: Any, device: torch.device) -> None:
        """Keep what tells one output from another: of floating-point tensors how many there are, and their norms."""
        leaves = [leaf.detach() for leaf in tensors_in(out) if leaf.is_floating_point()]
        told = torch.zeros(3, dtype=torch.float64, device=device)
        for at, leaf in enumerate(leaves, 1):
            norm = leaf.double().nan_to_num(0.0, 0.0, 0.0).norm().to(device)  # masked scores are infinite
            told += torch.stack([torch.ones_like(norm), norm, at * norm])
            limit = {torch.float64: 1e-9, torch.float32: 1e-4}.get(leaf.dtype, 2e-2)
            self._limit = max(self._limit, limit)
        self._told.append(told)

    @property
    def is_full(self) -> bool:
        """Whether it is time to compare."""
        return len(self._told) >= self.MANY

    def check(self, groups: ParallelGroups, loop: str) -> None:
        """Compare what was kept since the last time; collective over tp.

        Raises:
            RuntimeError: on all of them, if it is not the same.
        """
        if not self._told:
            return
        told, limit = torch.cat(self._told), self._limit
        self._told, self._limit = [], 0.0
        both = torch.cat([told, -told])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=groups["tp"])
        highs, lows = both[: len(told)], -both[len(told) :]
        apart = (highs - lows > limit * torch.maximum(highs.abs(), lows.abs())).tolist()
        if any(apart):
            norm = apart.index(True) // 3 * 3 + 1
            raise RuntimeError(
                f"what the {loop} step returns differs across the tensor-parallel ranks of one replica (its norms sum to "
                f"{lows[norm]:.9g} on one and {highs[norm]:.9g} on another): it is made of this rank's part of an activation "
                "(hidden states or attention maps that were changed, pooled or kept aside before the model returned them?), or "
                "drawn at random on its own. Use what the model returns in lists or tuples, or set sp=False"
            )
