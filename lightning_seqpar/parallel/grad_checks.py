"""Whether gradients that must be equal are: over the replicas, and over tp where every rank holds a parameter whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_seqpar.distributed.host import LateNumbers
from lightning_seqpar.layout.param_layout import ModelLayout, is_split, local_rows
from lightning_seqpar.topology.process_groups import ParallelGroups

Comparison = Callable[[], None]
"""A comparison of the ranks under way: a call, a step later without a wait, raises RuntimeError on all if they differ."""


def _passes() -> None:
    """The comparison where there is nothing to compare."""


def tolerance(dtype: torch.dtype) -> float:
    """How far equal computations may lie apart on two ranks: far below what a missing part would show."""
    return 1e-9 if dtype == torch.float64 else 1e-4 if dtype == torch.float32 else 2e-2


def _norm(tensor: Tensor) -> Tensor:
    """The norm of a tensor in its own precision, in float32 at least; no copy of the tensor is made."""
    flat = tensor.detach().reshape(-1)
    wide = torch.promote_types(flat.dtype, torch.float32)
    # Of what a CPU's cache holds at a time: one sum over all would lose digits in float32, and few calls elsewhere.
    block = 2**18 if flat.device.type == "cpu" else 2**30
    norms = torch._foreach_norm(flat.split(block), 2, dtype=wide)
    norm: Tensor = torch.stack(norms).double().norm()
    return norm


class Spread:
    """The smallest and the largest norm that each of some tensors has on any rank of an axis; collective over it when made."""

    def __init__(self, tensors: Sequence[Tensor], groups: ParallelGroups, axis: str | tuple[str, ...] = "tp") -> None:
        on_gpus = [tensor.device for tensor in tensors if tensor.is_cuda]
        if not on_gpus and dist.get_backend(groups[axis]) == "nccl":  # numbers of the user's own on the CPU
            on_gpus = [torch.device("cuda", torch.cuda.current_device())]
        device = on_gpus[0] if on_gpus else tensors[0].device
        norms = torch.stack([_norm(tensor).to(device) for tensor in tensors])
        both = torch.cat([norms, -norms])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=groups[axis])
        self._both = LateNumbers(both)

    def read(self) -> tuple[list[float], list[float]]:
        """The smallest norm of each tensor, and the largest."""
        both = self._both.read()
        count = len(both) // 2
        return [-number for number in both[count:]], both[:count]


def check_reduced(parameters: Iterable[Tensor], module: nn.Module, groups: ParallelGroups) -> Comparison:
    """Gradients must be equal on all replicas when the optimizer reads them; collective over dp."""
    held = [p for p in parameters if p.requires_grad and not is_split(p)]
    if not held or groups.size(groups.mean_axes) == 1:
        return _passes
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in held]
    dtypes, spread = [grad.dtype for grad in grads], Spread(grads, groups, groups.mean_axes)
    unused = [p for p in held if p.grad is None]

    def comparison() -> None:
        for parameter, dtype, low, high in zip(held, dtypes, *spread.read(), strict=True):
            # Not where they are no numbers: an overflow is alike on all replicas.
            if high - low > tolerance(dtype) * high:
                raise RuntimeError(_why_apart(parameter, unused, module))

    return comparison


def _why_apart(parameter: Tensor, unused: Sequence[Tensor], module: nn.Module) -> str:
    """A sentence on a gradient that differs between the replicas."""
    names = {id(one): name for name, one in module.named_parameters()}
    what = f"the gradient of {names.get(id(parameter), 'a parameter')} that reaches the optimizer differs between the replicas"
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        return (
            f"{what}, and {names.get(id(unused[0]), 'a parameter')}{more} got none: the reduction over dp waits for what the loss "
            "does not read. Set ddp={'find_unused_parameters': True}, or freeze it (requires_grad_(False))"
        )
    return (
        f"{what}: it came past the reduction over dp. Call self.manual_backward(loss) instead of loss.backward() or "
        "torch.autograd.grad (in automatic optimization return the sum of the losses from training_step), change gradients behind "
        "it alike on every replica, and where optimizers are toggled (toggle_optimizer) set ddp={'find_unused_parameters': True}"
    )


def check_replicated(parameters: Iterable[Tensor], layout: ModelLayout, groups: ParallelGroups) -> Comparison:
    """Gradients of parameters that every rank holds whole must be equal across tp when the optimizer reads them."""
    names, grads = [], []
    for parameter in parameters:
        found = layout.of(parameter)
        if found is None:
            what = f"a parameter of shape {list(parameter.shape)} that is none of the model's (register it in its module)"
            names.append((what, "nothing is known of it"))
        elif found.is_sharded:
            continue
        else:
            names.append((found.name, str(found.reason)))
        grads.append(local_rows(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)))
    if not grads:
        return _passes
    dtypes, spread = [grad.dtype for grad in grads], Spread(grads, groups)

    def comparison() -> None:
        gaps = {}
        for index, (low, high, dtype) in enumerate(zip(*spread.read(), dtypes, strict=True)):
            if high > 0:
                gap = (high - low) / high
                gaps[index] = gap if gap > tolerance(dtype) else 0.0
        worst = max(gaps, key=gaps.__getitem__, default=0)
        if gaps and gaps[worst] > 0:
            name, reason = names[worst]
            raise RuntimeError(
                f"{name}: every rank holds it whole, but the gradients that reach the optimizer differ across tp by "
                f"{gaps[worst]:.1e} (laid out as: {reason}). {_why_apart_over_tp([*gaps.values()])}"
            )

    return comparison


def _why_apart_over_tp(gaps: Sequence[float]) -> str:
    """A sentence on what gradients of whole parameters differ by: one number where a rank scaled all of its gradients."""
    scaled = (
        "gradients were clipped by torch.nn.utils.clip_grad_norm_, which knows nothing of shards (use self.clip_gradients, "
        "fabric.clip_gradients or Trainer(gradient_clip_val=...))"
    )
    other_way = (
        "this step took another way than the first batch, on which the plan was checked: code that ran for the first time (another "
        "task or modality, a flag, a later phase) saw this rank's part of an activation. Let the first batch take that way too, so "
        "that it is checked, or set sp=False; with self_check=False, or a plan of yours, see the rules for this parameter"
    )
    apart = [gap for gap in gaps if gap > 0]
    if min(apart) < 0.99 * max(apart):
        return f"By other numbers for other parameters, so {other_way}"
    if len(apart) == len(gaps) > 1:
        return f"By one number for all parameters, so {scaled}"
    return f"Either {other_way}; or {scaled}"


class StageScales:
    """Whether code of the user's (``torch.nn.utils.clip_grad_norm_``) has scaled each stage's gradients by a number of its own."""

    def __init__(self, parameters: Sequence[Tensor], groups: ParallelGroups) -> None:
        self._groups = groups
        self._before = [(p, _norm(local_rows(p.grad))) for p in parameters if p.grad is not None]

    def check(self) -> Comparison:
        """Compare the stages, behind that code. Collective over the pipeline."""
        found = [(norm, _norm(local_rows(p.grad)).to(norm.device)) for p, norm in self._before if p.grad is not None]
        own = torch.tensor([float("inf"), float("-inf"), 0.0], dtype=torch.float64)
        if found:
            before, after = (torch.stack(norms) for norms in zip(*found, strict=True))
            scales = torch.where(before > 0, after / before, torch.nan)
            limit = max(tolerance(p.grad.dtype) for p, _ in self._before if p.grad is not None)
            low, high = scales.nan_to_num(float("inf")).min(), scales.nan_to_num(float("-inf")).max()
            own = torch.stack([low, high, torch.full_like(low, limit)])
        told = [torch.zeros_like(own) for _ in range(self._groups.size("pp"))]
        dist.all_gather(told, own, group=self._groups["pp"])
        numbers = LateNumbers(torch.cat(told))

        def comparison() -> None:
            flat = numbers.read()
            stages = [flat[at : at + 3] for at in range(0, len(flat), 3) if flat[at] <= flat[at + 1]]
            if not all(high - low <= limit * high for low, high, limit in stages):
                return  # parameters of one stage were treated differently, as one process would
            scales = [low for low, _, _ in stages]
            if scales and max(scales) - min(scales) > max(limit for *_, limit in stages) * max(scales):
                raise RuntimeError(
                    "the gradients of each stage were scaled by another number "
                    f"({', '.join(f'{scale:.6g}' for scale in scales)}) before the optimizer: clipped by "
                    "torch.nn.utils.clip_grad_norm_, which knows one stage's alone (use self.clip_gradients or "
                    "Trainer(gradient_clip_val=...), and lightning_seqpar.grad_norm(self) for the norm)"
                )

        return comparison
