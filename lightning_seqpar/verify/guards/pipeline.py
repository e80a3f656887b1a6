"""What a training in stages of a pipeline can't do, refused before anything is run; and the bubble, told where it is large."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, LearningRateFinder, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_seqpar.distributed.autograd import count_tensor_hooks
from lightning_seqpar.parallel.sharded_model import ShardedModel


def refuse_in_stages(module: LightningModule, callbacks: Iterable[Any], pp: int) -> None:
    """Refuse a module or a callback that needs what one stage alone has."""
    if not module.automatic_optimization:
        raise ValueError(
            f"pp={pp} with automatic_optimization=False: micro-batches of a pipeline are the batches that Lightning accumulates, "
            "and backwards run when they are due; use automatic optimization with accumulate_grad_batches, or pp=1"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"pp={pp} with training_step(self, dataloader_iter): a step that reads its loader by itself can't be run by stages "
            "that are not equally far; write training_step(self, batch, batch_idx), or use pp=1"
        )
    reads = [module] if is_overridden("on_after_backward", module) else []
    for callback in callbacks:
        name = type(callback).__name__
        if is_overridden("on_after_backward", callback, Callback):
            reads.append(callback)
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ValueError(
                f"{name} with pp={pp}: it copies all weights, of which each stage has its own; leave it out, or use pp=1"
            )
        if isinstance(callback, LearningRateFinder | _LRCallback):
            raise ValueError(
                f"{name} with pp={pp}: it reads the loss behind each batch, which the last stage alone has then; look for the rate "
                "with pp=1, or leave it out"
            )
    if reads:
        raise ValueError(
            f"{type(reads[0]).__name__}.on_after_backward with pp={pp}: behind a micro-batch its backward may still be to come; "
            "use on_before_optimizer_step, or pp=1"
        )


def refuse_hooks_on_shared(record: ShardedModel) -> None:
    """Refuse gradient hooks of the user's on parameters that several stages hold: each would see its stage's part."""
    assert record.stage is not None
    for name in record.layout:
        if len(record.stage.shared(name)) > 1 and _hooks_of_user(record, record.layout.parameter(name)):
            raise RuntimeError(
                f"{name}: it has a gradient hook of yours, and several stages of the pipeline hold it, so that the hook would see "
                "each one's part of the gradient; change gradients in on_before_optimizer_step, or use pp=1"
            )


def refuse_hooks_of_reduced(record: ShardedModel | None, parameters: Iterable[Tensor]) -> None:
    """Refuse gradient hooks of the user's where DDP reduces in a backward of its own (``virtual_pp``), which repeats them."""
    for parameter in parameters:
        if record is not None and _hooks_of_user(record, parameter):
            layout = record.layout.of(parameter)
            raise RuntimeError(
                f"{'a parameter' if layout is None else layout.name}: it has a gradient hook of yours, which virtual_pp with "
                "replicas (dp > 1) would run twice; change gradients in on_before_optimizer_step, or leave virtual_pp out"
            )


def _hooks_of_user(record: ShardedModel, parameter: Tensor) -> bool:
    layout = record.layout.of(parameter)
    ours = layout is not None and layout.is_partial and parameter.requires_grad
    return count_tensor_hooks([parameter])[0] > ours


def describe_bubble(micro_batches: int, pp: int, virtual_pp: int = 1) -> str:
    """A sentence on the part of a step in which a stage waits: ``(p - 1) / (v m + p - 1)`` (arXiv 2104.04473, section 2.2)."""

    def share(count: int) -> str:
        return f"{(pp - 1) / (virtual_pp * count + pp - 1):.0%}"

    told = f"pp={pp}" + f", virtual_pp={virtual_pp}" * (virtual_pp > 1)
    told += f" with accumulate_grad_batches={micro_batches}: each stage waits {share(micro_batches)} of the time for others"
    if micro_batches < pp:
        told += ", since there are fewer micro-batches than stages"
    if micro_batches < 4 * pp:
        told += f"; accumulate_grad_batches={4 * pp} would leave {share(4 * pp)}"
    return told
