"""What the strategy does from a batch to an update: steps, backward, gradient sync, clipping."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.context.seq_part import SeqPart, whole_of
from lightning_seqpar.data.batch import map_tensors, tensors_in
from lightning_seqpar.distributed.host import OneStepLate
from lightning_seqpar.distributed.rng import StepDraws
from lightning_seqpar.nn.sharded_logits import ShardedLogits, whole_logits
from lightning_seqpar.parallel.fully_sharded import READ_ROWS, FullySharded, refuse_rows
from lightning_seqpar.parallel.grad_checks import Comparison, StageScales, check_reduced, check_replicated
from lightning_seqpar.parallel.grad_norm import global_grad_norm
from lightning_seqpar.parallel.grad_sync import GradSync
from lightning_seqpar.parallel.loss_consistency import check_loss
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.strategy.metrics import share_metrics
from lightning_seqpar.strategy.precision import with_global_clipping
from lightning_seqpar.strategy.stages import StagedStrategy
from lightning_seqpar.strategy.weights_by_hand import WeightWatch
from lightning_seqpar.verify.guards.batch import OutputWatch, check_batch, warn_of_equal_replicas
from lightning_seqpar.verify.guards.graph import check_readers, refuse_second_derivative
from lightning_seqpar.verify.guards.model import (
    check_buffers,
    check_parameters,
    refuse_added,
)
from lightning_seqpar.verify.guards.optimizer import OptimizerGuard, refuse_fused_on_rows

_BEHIND_BACKWARD = ("on_after_backward", "on_before_optimizer_step")
"""Hooks between the backward and the update, in which a user's code may change gradients."""


def _may_change_gradients(callback: Callback) -> bool:
    """Whether a callback has hooks between the backward and the update, in which it may change gradients.

    A class with ``only_reads_gradients = True`` says that those which it defines itself don't. What a subclass defines over them is
    not covered, unless the subclass says so again.
    """
    for hook in _BEHIND_BACKWARD:
        if is_overridden(hook, callback, Callback):
            owner = next((kind for kind in type(callback).__mro__ if hook in vars(kind)), Callback)
            if hook in vars(callback) or not vars(owner).get("only_reads_gradients", False):
                return True
    return False


def _whole(x: Tensor) -> Tensor:
    """A tensor of which ranks hold parts, whole; any other unchanged. Collective over the ranks that do."""
    return whole_logits(whole_of(x))


def _with_whole_extras(out: Any) -> Any:
    """What a training step returns beside its loss, with sharded logits made whole: callbacks may read them on one rank alone."""
    if not isinstance(out, dict) or not any(isinstance(x, ShardedLogits | SeqPart) for x in tensors_in(out)):
        return out
    with torch.no_grad():  # Lightning detaches them
        return {key: value if key == "loss" else map_tensors(_whole, value) for key, value in out.items()}


class SteppingStrategy(StagedStrategy):
    """The part of the strategy that runs steps and updates, in every loop; a subclass sets up the model.

    Args:
        config: the configuration.
        plugins: the other arguments of :class:`StagedStrategy`.
    """

    def __init__(self, config: ParallelConfig, **plugins: Any) -> None:
        super().__init__(config, **plugins)
        self._forward_redirection = _Redirection(self)
        self._sync: GradSync | None = None
        self._steps: dict[int, int] = {}
        self._counts: dict[int, int] = {}  # of an optimizer's parameters
        self._comparisons: OneStepLate[Comparison] = OneStepLate()
        self._flushed = self._others_flushed = self._has_backward = False
        self._optimizing: Optimizer | None = None
        self._all_steps: RemovableHandle | None = None
        # Optimizers with a hook on steps that bypass the strategy.
        self._guarded: weakref.WeakSet[Optimizer] | None = None
        self._optimizer_guard = OptimizerGuard(config.elementwise_optimizers)
        self._ddp_model: DistributedDataParallel | None = None
        self._split: FullySharded | None = None
        self._outputs = OutputWatch()
        self._scales: StageScales | None = None
        self._gradients_may_change = True
        self._weights: WeightWatch | None = None

    def _share_metrics(self) -> None:
        """Let the metrics of the model and of callbacks sync over the replicas."""
        share_metrics([self._module, *self._trainer.callbacks], self.groups["dp"])  # type: ignore[attr-defined]

    # ---- steps -------------------------------------------------------------------------------------------------

    def _step(self, loop: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step of the user's, with the checks that are due.

        Args:
            loop: ``training``, ``validation``, ``test`` or ``predict``.
            step: the step.
            args: its arguments, the batch first.
            kwargs: its keyword arguments.

        Returns:
            What the step returned; of an evaluation with whole logits in place of sharded ones.
        """
        record = record_of(self._module)
        if record is None:
            return step(*args, **kwargs)
        if self._split is not None:
            self._split.settle()  # whoever changed a parameter since the last step has changed its rows
        schedule = self._schedule
        schedule.begin_step(loop)
        if schedule.is_due(loop):
            self._share_metrics()
        due = schedule.is_due_in_loop(loop)
        if args and due:
            check_batch(args[0], self.groups, self.root_device, loop)
            if loop == "training" and schedule.is_first(loop):
                warn_of_equal_replicas(args[0], self.groups, self.root_device)
        if loop == "training" and self._window is not None:
            return step(*args, **kwargs)  # which puts it off
        return self._run_step(loop, step, args, kwargs)

    def _run_step(self, loop: str, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a step of the user's that is the current one, checked, and look at what it returns."""
        record, schedule = record_of(self._module), self._schedule
        assert record is not None
        expects = schedule.expects_draws(loop)
        record.reset_calls(draws=expects)
        draws = StepDraws(expected=expects) if loop == "training" else None
        looks = self._weights is not None and loop == "training" and schedule.is_due(loop)
        try:
            with self._looking_at_weights(looks):
                out = step(*args, **kwargs)
        except Exception as error:
            if self._split is not None:
                self._split.reset()
            if self._split is not None and any(word in str(error) for word in ("DTensor", "sharding strategy")):
                raise RuntimeError(READ_ROWS) from error
            if not isinstance(error, RuntimeError):
                raise
            refuse_second_derivative(error)
            refuse_added(record.added_inside(), record)  # if modules were added, that is the likelier cause
            raise
        record.check_closed(out)
        if self._split is not None:
            refuse_rows(out)
        if self._split is not None and loop != "training":
            self._split.settle()
        if draws is not None:
            schedule.note_draws(drawn=draws.end())
            out = _with_whole_extras(out)
        else:
            if any(isinstance(tensor, ShardedLogits | SeqPart) for tensor in tensors_in(out)):
                out = map_tensors(_whole, out)  # gathered here, since it may next be read on one rank alone
            self._outputs.note(out, self.root_device)
            if schedule.is_due_in_loop(loop) or self._outputs.is_full:
                self._outputs.check(self.groups, loop)
        return out

    def _looking_at_weights(self, looks: bool) -> AbstractContextManager[None]:
        """A context manager for a step in which weights may be changed by hand."""
        if self._weights is None or not looks:
            return nullcontext()
        return self._weights.watched(decides=not self._module.automatic_optimization, is_step=True)

    def _unwatched(self) -> AbstractContextManager[None]:
        """A context manager for what the strategy runs in the midst of the user's hooks."""
        return nullcontext() if self._weights is None or not self._weights.is_watching else self._weights.paused()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's training step."""
        self._comparisons.begin_step()
        if self._sync is not None:
            self._sync.begin_step()
            self._flushed = self._others_flushed = self._has_backward = False
        if (record := record_of(self._module)) is not None:
            record.check_frozen()
            record.versions.clear()  # updates change shards from now on; a learning-rate finder begins another training then
        if isinstance(self.model, DistributedDataParallel):
            self._follow_training_parameters(self.model)
        batch_idx, accumulate = self._trainer.fit_loop.epoch_loop.batch_idx, self._trainer.accumulate_grad_batches
        if self._split is not None and self._module.automatic_optimization and batch_idx % accumulate == 0:
            self._split.begin_window()
        with self._unwatched(), self._in_stages("training_step"):
            return self._step("training", super().training_step, args, kwargs)

    def _thawed(self) -> bool:
        """Whether a parameter of an optimizer trains whose gradient DDP does not reduce, as it was frozen when DDP was made."""
        reduced = {id(parameter) for parameter in self._reduced}
        return any(
            parameter.requires_grad and id(parameter) not in reduced
            for optimizer in self.optimizers
            for parameter in _parameters(optimizer)
        )

    def _follow_training_parameters(self, ddp: DistributedDataParallel) -> None:
        """Make DDP anew if parameters thawed since it was made, or froze (it would wait for their gradients).

        Raises:
            RuntimeError: if gradients were accumulated that the new DDP would not reduce over the replicas.
        """
        every = self._trainer.accumulate_grad_batches
        within = self._trainer.fit_loop.epoch_loop.batch_idx % every != 0
        thawed, frozen = self._thawed(), [p for p in self._reduced if not p.requires_grad] if self._waits(ddp) else []
        lost = any(p.grad is not None for p in frozen)
        # With find_unused_parameters, a new DDP does not know which parameters only earlier batches used.
        if within and (lost or (thawed and ddp.find_unused_parameters)):
            raise RuntimeError(
                f"a parameter {'froze' if lost else 'began to train'} between batches whose gradients are accumulated "
                f"(accumulate_grad_batches={every}): each replica (dp > 1) holds parts of gradients that would not be summed any "
                "more. Switch requires_grad in on_train_batch_start where batch_idx % accumulate_grad_batches == 0"
            )
        if thawed or frozen:
            ddp._remove_autograd_hooks()
            # Without init_sync: replicas are equal already, and writing to parameters would spoil the accumulated gradients.
            self._wrap_ddp(self._module, init_sync=False)

    def _waits(self, ddp: DistributedDataParallel) -> bool:
        """Whether DDP waits for the gradients of all parameters that it was made with."""
        return self._module.automatic_optimization and not ddp.find_unused_parameters

    def _wrap_ddp(self, module: LightningModule, **more: Any) -> None:
        """Wrap the model into DDP over the replicas, with the configured options and ``more``."""
        self._reduced = [parameter for parameter in module.parameters() if parameter.requires_grad]
        options = {**self.config.ddp, **more}
        devices = None if self.root_device.type == "cpu" else [self.root_device.index]
        stream = torch.cuda.stream(torch.cuda.Stream()) if devices is not None else nullcontext()
        with stream, nullcontext() if self._stage is None else self._stage.hiding_from_ddp():
            self._ddp_model = DistributedDataParallel(
                module, device_ids=devices, process_group=self.groups[self.groups.mean_axes], **options
            )
        self.model = self._ddp_model

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's validation step."""
        with self._in_stages("validation_step"):
            return self._step("validation", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's test step."""
        with self._in_stages("test_step"):
            return self._step("test", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's prediction step."""
        with self._in_stages("predict_step"):
            return self._step("predict", super().predict_step, args, kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check, before the backward, that all ranks of a replica have one loss and that it reads no partial values.

        Raises:
            RuntimeError: with replicas, if a parameter thawed or froze within the step.
        """
        if self._window is None:  # else it is no loss yet
            self._before_backward(closure_loss, is_loss=self._stage is None or self._stage.is_last)

    def _before_backward(self, loss: Tensor, *, is_loss: bool) -> None:
        """Check a loss, or what stands for it, and prepare its backward."""
        record = record_of(self._module)
        if record is not None:
            assert self._sync is not None
            self._sync.attach()  # once more, since a parameter may have thawed in the step
            self._sync.begin_backward()
            if self._split is not None:
                self._split.expect_backward(loss)
            if is_loss:
                self._sync.losses.note(loss)
            if self._schedule.is_due("training"):
                if is_loss:
                    check_loss(loss, self.groups)
                    check_readers(loss, record)
                if record.stage is not None:
                    record.stage.check_graph(loss)
                check_parameters(record)
                check_buffers(record, self.groups, self.root_device)
        if isinstance(self.model, DistributedDataParallel):
            thawed = self._thawed()
            if thawed or (self._waits(self.model) and not all(p.requires_grad for p in self._reduced)):
                raise RuntimeError(
                    f"a parameter {'began' if thawed else 'ceased'} to train within a step, where the reduction over replicas "
                    f"(dp > 1) does not know {'it' if thawed else 'of it'} yet: switch requires_grad (unfreeze, set_adapter) "
                    "before the step, in on_train_batch_start or a callback"
                )
            if not self._module.automatic_optimization:
                prepare_for_backward(self.model, loss)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward.

        Raises:
            RuntimeError: in place of torch's, if it differentiates a gradient through a sharded layer.
        """
        try:
            backward = functools.partial(super().backward, closure_loss, *args, **kwargs)
            with self._unwatched():
                if self._stage is None:
                    closure_loss = backward()
                else:
                    self._run_when_due(closure_loss, backward, self._stage)
        except RuntimeError as error:
            refuse_second_derivative(error)
            raise
        return closure_loss

    def before_on_after_backward(self) -> None:
        """Sum partial gradients at once where the user's code may read them: ``on_after_backward``, ``manual_backward``."""
        self._has_backward = True
        if self._sync is None:
            return
        if self._reads_each_backward() or not self._module.automatic_optimization:
            self._sum_gradients(None)
            # Read in automatic optimization alone.
            self._flushed = self._others_flushed = not self._trainer.fit_loop._should_accumulate()

    def _reads_each_backward(self) -> bool:
        """Whether the user's code may read gradients behind each backward."""
        return is_overridden("on_after_backward", self._module) or any(
            is_overridden("on_after_backward", callback, Callback)
            for callback in self._trainer.callbacks  # type: ignore[attr-defined]
        )

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the optimizer's step; the partial gradients are summed right after the user's closure."""

        def synced() -> Any:
            out = closure()
            self.sync_gradients(optimizer)
            return out

        self._optimizing = optimizer
        try:
            with self._unwatched():
                return super().optimizer_step(optimizer, synced, model, **kwargs)
        finally:
            self._optimizing = None

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Call ``configure_optimizers``, which sees the classes and shapes of the model as it was written."""
        record = record_of(self._module)
        with record.as_written() if record is not None else nullcontext():
            super().setup_optimizers(trainer)
        if self._split is not None:
            for optimizer in self.optimizers:
                self._split.adopt(plain_optimizer(optimizer))

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the training. Setting them checks them, also where a callback exchanges them in its course."""
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        plain = [plain_optimizer(optimizer) for optimizer in optimizers]
        self._optimizer_guard.refuse_mixing(plain, self._shards if plain else 1)
        self._optimizer_guard.refuse_in_stages(plain, self.config.pp)
        if self._split is not None:
            refuse_fused_on_rows(plain)
        self._guarded = self._guarded or weakref.WeakSet()
        for optimizer in plain:
            if optimizer not in self._guarded:  # gradients must be synced too if it is stepped without the strategy
                self._guarded.add(optimizer)
                if hasattr(
                    optimizer, "_optimizer_step_pre_hooks"
                ):  # one around another may not call Optimizer.__init__
                    optimizer.register_step_pre_hook(self._before_raw_step)
        super(SteppingStrategy, type(self)).optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    @property
    def _shards(self) -> int:
        """Over how many ranks parameters are divided."""
        return self.config.tp * (self._mean_size if self._split is not None else 1)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """A context manager for micro-batches whose gradients are not reduced over the replicas yet.

        Where hooks of the user's read gradients behind every backward they are reduced at once: before that, no rank has them.
        """
        if self._split is None or self._reads_each_backward():
            with super().block_backward_sync():
                yield
            return
        self._split.reduce_next(False)
        try:
            yield
        finally:
            self._split.reduce_next(True)

    def _watch_all_steps(self) -> None:
        """Check every optimizer of this process at its steps, also those that Lightning does not know.

        One that holds shards must update each element by itself.
        """
        self._stop_watching()
        if record_of(self._module) is not None:
            self._all_steps = register_optimizer_step_pre_hook(self._refuse_unknown)

    def _stop_watching(self) -> None:
        """Remove the hook of :meth:`_watch_all_steps`."""
        if self._all_steps is not None:
            self._all_steps.remove()
            self._all_steps = None

    def _refuse_unknown(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raise for an optimizer that Lightning does not know, holds shards, and mixes elements. A hook before each step."""
        if self._guarded is not None and optimizer in self._guarded:
            return
        record = record_of(self._module)
        if record is not None and any(
            layout.is_sharded for p in _parameters(optimizer) if (layout := record.layout.of(p)) is not None
        ):
            self._optimizer_guard.refuse_mixing([optimizer], self._shards)

    def _before_raw_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Sync and check gradients in a step that does not come through the strategy. A hook before each step.

        Returns:
            The arguments with a closure that does so after the user's; None where there is no closure.
        """
        if self._optimizing is not None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.sync_gradients(optimizer)
            self.check_step(optimizer)
            return None

        def synced() -> Any:
            with torch.enable_grad():
                out = closure()
            self.sync_gradients(optimizer)
            self.check_step(optimizer)
            return out

        return ((args[0], synced, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": synced})

    def sync_gradients(self, optimizer: Optimizer) -> None:
        """Sum the partial gradients of an optimizer's parameters over tp, unless that is done already. Collective over tp."""
        automatic = self._module.automatic_optimization
        if self._sync is None or (automatic and self._flushed):
            return  # in automatic optimization no gradient is added between the backward and the update
        self._sum_gradients(_parameters(optimizer))
        if self._stage is not None and self._gradients_may_change:
            self._scales = StageScales(_parameters(optimizer), self.groups)
        # Elsewhere (a raw step, grad_norm in some hook) a backward may still be to come.
        self._flushed = automatic and self._optimizing is not None and self._has_backward

    def _sum_gradients(self, parameters: Sequence[Tensor] | None) -> None:
        """Sum the gradients of ``parameters`` (None for all) over tp, and over replicas what DDP leaves to us. Collective."""
        assert self._sync is not None
        if self._split is not None:
            self._split.check_reduced()
            self._split.average(parameters)
        if parameters is None:
            self._sync.flush_all()
        else:
            self._sync.flush(parameters)
        if self._split is not None:
            self._split.drop_unused(parameters)

    def sync_others(self) -> None:
        """Sum the partial gradients of parameters that train and are in no optimizer, unless that is done already."""
        automatic = self._module.automatic_optimization
        if self._sync is None or (automatic and self._others_flushed):
            return
        in_optimizers = {id(parameter) for optimizer in self.optimizers for parameter in _parameters(optimizer)}
        others = [p for p in self._module.parameters() if p.requires_grad and id(p) not in in_optimizers]
        if others:
            self._sum_gradients(others)
        self._others_flushed = automatic and self._optimizing is not None and self._has_backward

    def settle_rows(self) -> None:
        """Let each replica hold its own rows alone, where they split parameters."""
        if self._split is not None:
            self._split.settle()

    def sync_all_gradients(self) -> None:
        """Sum the partial gradients of all parameters that train, unless that is done already. Collective over tp."""
        for optimizer in self.optimizers:
            self.sync_gradients(optimizer)
        self.sync_others()

    def check_step(self, optimizer: Optimizer) -> None:
        """Check, before an update, that gradients which must be equal on all ranks are equal. Collective.

        Where the user's code may change them they are compared in every step, but the host waits for the answer only in steps in
        which checks are due; else it is read before the next update, and before anything is saved.
        """
        optimizer = plain_optimizer(optimizer)
        step = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        record = record_of(self._module)
        self._read_comparisons()
        due = self._schedule.is_due_at(step)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if record is not None and (due or count != self._counts.get(id(optimizer))):
            refuse_added(_parameters(optimizer), record)
            self._counts[id(optimizer)] = count
        if self._gradients_may_change or due:
            self._comparisons.add(self._check_reduced(optimizer))
            if record is not None:
                self._comparisons.add(check_replicated(_parameters(optimizer), record.layout, self.groups))
        if self._scales is not None:
            self._comparisons.add(self._scales.check())
            self._scales = None
        if due:
            self._read_comparisons(everything=True)

    def _check_reduced(self, optimizer: Optimizer) -> Comparison:
        """:func:`check_reduced` of an optimizer's gradients."""
        return check_reduced(_parameters(optimizer), self._module, self.groups)

    def _read_comparisons(self, *, everything: bool = False) -> None:
        """Raise RuntimeError if the gradients of earlier steps differed, whose comparison nobody has waited for.

        Args:
            everything: also those of this step, which may take a wait.
        """
        for comparison in self._comparisons.take(everything=everything):
            comparison()

    def settle(self) -> None:
        """Read what the ranks found when they compared the losses and gradients of the last step, before anything is kept of it.

        Raises:
            RuntimeError: if they differed.
        """
        if self._sync is not None:
            self._sync.losses.settle(everything=True)
        self._read_comparisons(everything=True)

    def _note_hooks(self) -> None:
        """Note whether code of the user's runs between the backward and the update on any rank. Collective over the world."""
        module, callbacks = self._module, self._trainer.callbacks  # type: ignore[attr-defined]
        own = ("backward", "configure_gradient_clipping", "optimizer_step", *_BEHIND_BACKWARD)
        self._gradients_may_change = self.reduce_boolean_decision(
            not module.automatic_optimization
            or any(is_overridden(hook, module) for hook in own)
            or any(_may_change_gradients(each) for each in callbacks),
            all=False,
        )

    def global_norm(self, parameters: list[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradients of these parameters, equal on all ranks. Collective over tp."""
        record = record_of(self._module)
        if record is not None:
            return global_grad_norm(parameters, record.layout, self.groups, norm_type)
        grads = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads, norm_type)

    @property
    def precision_plugin(self) -> Precision:
        """The user's precision plugin, which clips by the norm of the whole model's gradient."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else with_global_clipping(plugin, self)


class _Redirection(_ForwardRedirection):
    """Lightning's forward through DDP, but in manual optimization and in a pipeline DDP does not prepare for a backward there.

    ``pre_backward`` prepares it for each backward, and for that of a window's last micro-batch.

    Args:
        strategy: whose model it is.
    """

    def __init__(self, strategy: SteppingStrategy) -> None:
        self._strategy = weakref.ref(strategy)

    def on_after_inner_forward(self, wrapper_module: nn.Module, original_module: LightningModule) -> None:
        self._let_prepare(False, wrapper_module, original_module)

    def on_after_outer_forward(self, wrapper_module: nn.Module, original_module: LightningModule) -> None:
        self._let_prepare(True, wrapper_module, original_module)

    def _let_prepare(self, prepares: bool, wrapper_module: nn.Module, original_module: LightningModule) -> None:
        strategy = self._strategy()
        later = (strategy is not None and strategy.runs_stages) or not original_module.automatic_optimization
        if later and isinstance(wrapper_module, DistributedDataParallel):
            wrapper_module.require_backward_grad_sync = prepares


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The user's optimizer, taken out of Lightning's wrapper if it is in one."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _parameters(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [parameter for group in plain_optimizer(optimizer).param_groups for parameter in group["params"]]
