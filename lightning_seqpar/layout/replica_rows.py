"""The rows that a rank holds of a parameter which torch's ``fully_shard`` split over the data-parallel ranks.

It makes a ``DTensor`` of the part that tensor parallelism gives a rank, and so are the gradient and the optimizer's moments.
Everywhere else tensors stay plain: this module is where the two forms meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_seqpar.distributed.async_ops import all_gather
from lightning_seqpar.distributed.padding import pad


def is_split(tensor: object) -> TypeGuard[DTensor]:
    """Whether each data-parallel rank holds only some rows of the tensor."""
    return isinstance(tensor, DTensor)


def local_rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor that is split over the replicas, in the same memory; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def rows_held(tensor: Tensor) -> tuple[int, int] | None:
    """The first of this rank's rows and the one behind the last; None for a tensor that every replica holds whole."""
    if not is_split(tensor):
        return None
    mesh, length = tensor.device_mesh, tensor.shape[0]
    part = -(-length // mesh.size())  # as torch.chunk cuts: the last ranks may hold fewer rows, or none
    start = min(mesh.get_local_rank() * part, length)
    return start, min(start + part, length)


def take_rows(part: Tensor, like: Tensor) -> Tensor:
    """Takes this rank's rows of ``part``, in memory of their own, if ``like`` is split; else returns ``part``."""
    if not is_split(like):
        return part
    start, stop = rows_held(like) or (0, 0)
    return with_rows(part[start:stop].clone(), like)


def with_rows(rows: Tensor, like: DTensor) -> DTensor:
    """The ``DTensor`` of which this rank holds ``rows``, split as ``like`` is."""
    return DTensor.from_local(rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def empty_like_rows(like: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU for a tensor which a replica holds as ``shape``; a ``DTensor`` of this rank's rows if ``like`` is one."""
    if like is None or not is_split(like):
        return torch.zeros(shape, dtype=dtype)
    start, stop = rows_held(like) or (0, 0)
    return with_rows(torch.zeros(stop - start, *shape[1:], dtype=dtype), like)


def empty_on_cpu(like: Tensor) -> Tensor:
    """Memory on the CPU for what a rank holds of a tensor on the meta device, split as that is."""
    if not is_split(like):
        return torch.empty_like(like, device="cpu")
    return with_rows(torch.empty_like(local_rows(like), device="cpu"), like)


def gather_rows(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Gathers the rows of all replicas, if the tensor is split. Collective over the data-parallel group."""
    if not is_split(tensor):
        return tensor
    rows = local_rows(tensor).detach()
    device = rows.device
    if device.type == "cpu" and dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())  # after fit the model lies on the CPU
    sent = pad(rows.to(device), 0, -(-tensor.shape[0] // group.size()))
    return all_gather(sent, 0, group, tensor.shape[0]).to(rows.device)
