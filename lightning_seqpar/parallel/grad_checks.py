"""Whether gradients that must be equal are: over the replicas, and over tp where every rank holds a parameter whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seqpar.layout.param_layout import ModelLayout
from lightning_seqpar.layout.replica_rows import is_split, local_rows
from lightning_seqpar.topology.process_groups import ParallelGroups


def tolerance(dtype: torch.dtype) -> float:
    """How far equal computations may lie apart on two ranks: far below what a missing part would show."""
    return 1e-9 if dtype == torch.float64 else 1e-4 if dtype == torch.float32 else 2e-2


def _norm(tensor: Tensor) -> Tensor:
    """The norm of a tensor in float64, block by block: to copy all of it into float64 takes eight times as long on a CPU."""
    flat = tensor.detach().reshape(-1)
    block = 2**18 if flat.device.type == "cpu" else 2**24  # what a CPU's cache holds; few calls elsewhere
    norm: Tensor = torch.stack([part.double().norm() for part in flat.split(block)]).norm()
    return norm


def spread(tensors: Sequence[Tensor], groups: ParallelGroups, axis: str = "tp") -> tuple[list[float], list[float]]:
    """The smallest and the largest norm that each tensor has on any rank of an axis; collective over it."""
    on_gpus = [tensor.device for tensor in tensors if tensor.is_cuda]
    if not on_gpus and dist.get_backend(groups[axis]) == "nccl":  # numbers of the user's own on the CPU
        on_gpus = [torch.device("cuda", torch.cuda.current_device())]
    device = on_gpus[0] if on_gpus else tensors[0].device
    norms = torch.stack([_norm(tensor).to(device) for tensor in tensors])
    both = torch.cat([norms, -norms])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=groups[axis])
    count = len(tensors)
    return (-both[count:]).tolist(), both[:count].tolist()


def check_reduced(parameters: Iterable[Tensor], groups: ParallelGroups) -> None:
    """Gradients must be equal on all replicas when the optimizer reads them; collective over dp.

    Raises:
        RuntimeError: on every rank, if one differs.
    """
    held = [p for p in parameters if p.requires_grad and not is_split(p)]
    if not held or groups.size("dp") == 1:
        return
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in held]
    lows, highs = spread(grads, groups, "dp")
    unused = sum(p.grad is None for p in held)
    hint = (
        f". {unused} parameter{'s' * (unused > 1)} got no gradient: what the loss does not read the reduction waits for; set "
        "ddp={'find_unused_parameters': True}, or freeze it"
        if unused
        else ""
    )
    for grad, low, high in zip(grads, lows, highs, strict=True):
        if high - low > tolerance(grad.dtype) * high:
            raise RuntimeError(
                f"a gradient of shape {list(grad.shape)} that reaches the optimizer differs between the replicas (its norm is "
                f"{low:.9g} on one and {high:.9g} on another): it came past the reduction over dp. Call self.manual_backward(loss) "
                "instead of loss.backward() or torch.autograd.grad (in automatic optimization return the sum of the losses from "
                "training_step), change gradients behind it alike on every replica, and where optimizers are toggled "
                "(toggle_optimizer) set ddp={'find_unused_parameters': True}"
                f"{hint}"
            )


def check_replicated(parameters: Iterable[Tensor], layout: ModelLayout, groups: ParallelGroups) -> None:
    """Gradients of parameters that every rank holds whole must be equal across tp when the optimizer reads them.

    Raises:
        RuntimeError: on every rank, naming the parameter that differs most.
    """
    names, grads = [], []
    for parameter in parameters:
        found = layout.of(parameter)
        if found is None:
            unknown = (
                f"a parameter of shape {list(parameter.shape)} that is none of the model's (register it in its module)"
            )
            names.append((unknown, "nothing is known of it"))
        elif not found.is_sharded:
            names.append((found.name, str(found.reason)))
        if found is None or not found.is_sharded:
            grads.append(local_rows(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)))
    if not grads:
        return
    lows, highs = spread(grads, groups)
    worst, at = 0.0, -1
    for index, (low, high, grad) in enumerate(zip(lows, highs, grads, strict=True)):
        gap = (high - low) / high if high > 0 else 0.0
        if gap > tolerance(grad.dtype) and gap > worst:
            worst, at = gap, index
    if at >= 0:
        name, reason = names[at]
        raise RuntimeError(
            f"{name}: every rank holds it whole, but the gradients that reach the optimizer differ across tp by "
            f"{worst:.1e} (laid out as: {reason}). Either it also sees sequence shards or lies between a gather and "
            "a row linear (change the plan), or gradients were clipped by torch.nn.utils.clip_grad_norm_, which knows "
            "nothing of shards (use self.clip_gradients or Trainer(gradient_clip_val=...))"
        )
