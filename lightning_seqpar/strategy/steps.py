"""What the strategy does from a batch to an update: steps, backward, gradient sync, clipping."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_seqpar.context.seq_part import SeqPart, whole_of
from lightning_seqpar.data.batch import map_tensors, tensors_in
from lightning_seqpar.distributed.host import OneStepLate
from lightning_seqpar.distributed.rng import drawn_since, torch_states
from lightning_seqpar.nn.sharded_logits import ShardedLogits, whole_logits
from lightning_seqpar.parallel.fully_sharded import READ_ROWS, FullySharded, refuse_rows
from lightning_seqpar.parallel.grad_checks import Comparison, StageScales, check_reduced, check_replicated
from lightning_seqpar.parallel.grad_sync import GradSync, check_loss, global_grad_norm
from lightning_seqpar.parallel.sharded_model import ShardedModel, record_of
from lightning_seqpar.parallel.whole_matrices import WholeMatrices, behind_closure
from lightning_seqpar.region.observers import WatchSchedule
from lightning_seqpar.releases import ForwardRedirection, WrappedOptimizer, is_overridden, pl, prepare_for_backward
from lightning_seqpar.strategy.callbacks import share_metrics
from lightning_seqpar.strategy.environment import Environment
from lightning_seqpar.strategy.stages import Stages
from lightning_seqpar.strategy.weights_by_hand import WeightWatch
from lightning_seqpar.verify.guards.optimizer import OptimizerGuard
from lightning_seqpar.verify.guards.while_training import (
    OutputWatch,
    check_batch,
    check_buffers,
    check_parameters,
    check_readers,
    refuse_added,
    refuse_second_derivative,
    warn_of_equal_replicas,
)

_BEHIND_BACKWARD = ("on_after_backward", "on_before_optimizer_step")
"""Hooks between the backward and the update, in which a user's code may change gradients."""


def _may_change_gradients(callback: pl.callbacks.Callback) -> bool:
    """Whether a callback has such hooks, and is of no class that defines them with ``only_reads_gradients = True``."""
    for hook in _BEHIND_BACKWARD:
        if is_overridden(hook, callback, pl.callbacks.Callback):
            owner = next((kind for kind in type(callback).__mro__ if hook in vars(kind)), pl.callbacks.Callback)
            if hook in vars(callback) or not vars(owner).get("only_reads_gradients", False):
                return True
    return False


def made_whole(out: Any) -> Any:
    """What a step returns, with whole tensors where ranks hold parts. Collective over the ranks that do."""
    if not any(isinstance(x, ShardedLogits | SeqPart) for x in tensors_in(out)):
        return out
    return map_tensors(lambda x: whole_logits(whole_of(x)), out)


_AT_BEGIN = "Switch requires_grad in on_train_batch_start where batch_idx % accumulate_grad_batches == 0"


class Steps:
    """Runs steps and updates, in every loop."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        self.schedule = WatchSchedule(environment.config.check_every)
        self.stages = Stages(environment, self.schedule, self.run_step, self._before_backward)
        self.redirection = _Redirection(self.stages)
        self.outputs = OutputWatch()  # of evaluation steps
        self.split: FullySharded | None = None  # the rows of parameters over the replicas (``data_parallel: fsdp``)
        self._sync: GradSync | None = None
        self._steps: dict[int, int] = {}
        self._counts: dict[int, int] = {}  # of an optimizer's parameters
        self._comparisons: OneStepLate[Comparison] = OneStepLate()
        self._flushed = self._has_backward = False
        self._of_window: list[nn.Parameter] = []  # parameters, where an accumulation window of stages began, and
        self._trained: list[bool] = []  # which of them trained
        self._optimizing: Optimizer | None = None
        self._watching = ExitStack()
        # Optimizers with a hook on steps that bypass the strategy.
        self._guarded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._optimizer_guard = OptimizerGuard(
            environment.config.elementwise_optimizers, environment.config.whole_matrix_optimizers
        )
        self._whole = WholeMatrices()  # for optimizers that need them
        self._scales: StageScales | None = None
        self._weights: WeightWatch | None = None
        self._record: ShardedModel | None = None  # of the model of this run

    def begin(self, record: ShardedModel | None) -> None:
        """Begin a run of a model that is set up."""
        self._record, self._sync, self._steps, self._comparisons = record, None, {}, OneStepLate()
        self.stages.stage = None if record is None else record.stage
        if self._env.fits and record is not None:
            self._sync = GradSync(record.layout, self._env.groups)
            self._whole.begin(record.layout, self._env.groups)
            if record.stage is not None:
                self.stages.begin(record.stage)

    def watch(self, record: ShardedModel | None) -> None:
        """Watch the optimizers of a training, and what the user's hooks do with weights; nothing of an earlier one."""
        self._watching.close()
        self._weights = None
        if record is None:
            return
        self._watching.callback(register_optimizer_step_pre_hook(self._refuse_unknown).remove)
        if self._env.has_trainer and any(layout.is_sharded for layout in record.layout.values()):
            self._weights = WeightWatch(record)
            self._watching.callback(self._weights.end)
            self._weights.begin(self._env.trainer)

    def end(self) -> None:
        """End a run."""
        self.settle_rows()
        self.split = None
        if self._sync is not None:
            self._sync.remove()
            self._sync = None
        self._watching.close()
        self._weights = None

    def _step(self, loop: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._record is None:
            return step(*args, **kwargs)
        self.settle_rows()  # whoever changed a parameter since the last step has changed its rows
        schedule = self.schedule
        schedule.begin_step(loop)
        # A loop of the user's may call the model again before it calls a backward, and pp does until a window ends.
        graphs, stage = self._record.graphs, self.stages.stage
        if graphs is not None and self._env.has_trainer and (stage is None or loop != "training" or self._env.begins_window):
            graphs.begin_step()
        if schedule.is_due(loop):
            share_metrics(self._env)
        if schedule.walks_graphs and (batch := args[0] if args else kwargs) is not None:
            check_batch(batch, self._env.groups, self._env.device, loop)
            if loop == "training" and schedule.is_first(loop):
                warn_of_equal_replicas(batch, self._env.groups, self._env.device)
        if loop == "training" and self.stages.window is not None:
            return step(*args, **kwargs)  # which puts it off
        return self.run_step(loop, step, args, kwargs)

    def run_step(self, loop: str, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a step of the user's that is the current one, checked, and look at what it returns."""
        record, schedule, stage = self._record, self.schedule, self.stages.stage
        assert record is not None
        if stage is not None:
            stage.compares = schedule.walks_graphs
        expects = schedule.expects_draws(loop)
        # On a stage the backwards of earlier micro-batches are to come, which may run parts of them again.
        record.reset_calls(draws=expects, forget=stage is None or loop != "training")
        before = torch_states() if loop == "training" else None
        watched: AbstractContextManager[None] = nullcontext()
        if self._weights is not None and loop == "training" and schedule.is_due(loop):
            watched = self._weights.watched(decides=not self._env.automatic, is_step=True)
        try:
            with watched:
                out = step(*args, **kwargs)
        except Exception as error:
            if self.split is not None:
                self.split.reset()
                if any(word in str(error) for word in ("DTensor", "sharding strategy")):
                    raise RuntimeError(READ_ROWS) from error
            if not isinstance(error, RuntimeError):
                raise
            refuse_second_derivative(error)
            refuse_added(record.added_inside(), record)  # if modules were added, that is the likelier cause
            raise
        record.check_closed(out)
        if self.split is not None:
            refuse_rows(out)
            if loop != "training":
                self.settle_rows()
        # Logits are gathered here, since what a step returns may next be read on one rank alone.
        if before is not None:
            schedule.note_draws(drawn_since(before))  # ranks that did not expect it have drawn alike, and equally much
            if isinstance(out, dict) and self._env.has_trainer:
                with torch.no_grad():  # Lightning detaches what stands beside the loss
                    out = {key: value if key == "loss" else made_whole(value) for key, value in out.items()}
        else:
            out = made_whole(out)
            self.outputs.note(out, self._env.device)
            if schedule.walks_graphs or self.outputs.is_full:
                self.outputs.check(self._env.groups, loop)
        return out

    def _unwatched(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run what the strategy runs in the midst of the user's hooks."""
        if self._weights is None or not self._weights.is_on:
            return run(*args, **kwargs)
        with self._weights.paused():
            return run(*args, **kwargs)

    def run_user_step(self, loop: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the user's step of a loop (``training``, ``validation``, ``test``, ``predict``) as far as this rank's stage goes."""
        if (stage := self.stages.stage) is None:
            return self._step(loop, step, args, kwargs)
        with self.stages.running(stage, f"{loop}_step"):
            return self._step(loop, step, args, kwargs)

    def train(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the user's training step."""
        self._comparisons.begin_step()
        if self._sync is not None:
            self._sync.begin_step()
            self._flushed = self._has_backward = False
        if self._record is not None:
            self._record.check_frozen()
            # Updates change shards from now on; a learning-rate finder begins another training then.
            self._record.versions.clear()
        if (ddp := self._env.ddp) is not None:
            self._follow_training_parameters(ddp)
        if (stage := self.stages.stage) is not None and stage.chunks == 1:  # with more an interleaved window checks it
            self._check_window()
        return self._unwatched(self.run_user_step, "training", step, *args, **kwargs)

    def _thawed(self) -> bool:
        """Whether a parameter of an optimizer trains that was frozen when DDP was made, which does not reduce its gradient."""
        reduced = {id(parameter) for parameter in self.stages.reduced}
        return any(
            parameter.requires_grad and id(parameter) not in reduced
            for optimizer in self._env.strategy.optimizers
            for parameter in parameters_of(optimizer)
        )

    def _follow_training_parameters(self, ddp: DistributedDataParallel) -> None:
        """Make DDP anew if parameters thawed since it was made, or froze (it would wait for their gradients)."""
        thawed = self._thawed()
        frozen = [p for p in self.stages.reduced if not p.requires_grad] if self._waits(ddp) else []
        lost = any(p.grad is not None for p in frozen)
        # With find_unused_parameters, a new DDP does not know which parameters only earlier batches used.
        if (lost or (thawed and ddp.find_unused_parameters)) and not self._env.begins_window:
            raise RuntimeError(
                f"a parameter {'froze' if lost else 'began to train'} between batches whose gradients are accumulated "
                f"(accumulate_grad_batches={self._env.trainer.accumulate_grad_batches}): each replica (dp > 1) holds parts of "
                f"gradients that would not be summed any more. {_AT_BEGIN}"
            )
        if thawed or frozen:
            self.wrap_ddp()

    def _check_window(self) -> None:
        """Raise RuntimeError if parameters froze or thawed within a window, of which a stage runs backwards later than the step."""
        if self._env.begins_window:
            self._of_window = list(self._env.module.parameters())
            self._trained = [parameter.requires_grad for parameter in self._of_window]
        elif self._trained != [parameter.requires_grad for parameter in self._of_window]:
            raise RuntimeError(
                "a parameter froze or began to train between batches whose gradients are accumulated "
                f"(accumulate_grad_batches={self._env.trainer.accumulate_grad_batches}): a pipeline's stage runs the backward of a "
                f"batch when later ones have begun, and would leave its gradient out. {_AT_BEGIN}"
            )

    def _waits(self, ddp: DistributedDataParallel) -> bool:
        """Whether DDP waits for the gradients of all parameters that it was made with."""
        return self._env.automatic and not ddp.find_unused_parameters

    def wrap_ddp(self) -> None:
        """Wrap the model into DDP over the replicas, with the configured options, once more if it is wrapped."""
        self.stages.reduced = [parameter for parameter in self._env.module.parameters() if parameter.requires_grad]
        options = dict(self._env.config.ddp)
        if (before := self._env.ddp) is not None:
            before._remove_autograd_hooks()
            # Replicas are equal already, and writing to parameters would spoil the accumulated gradients.
            options["init_sync"] = False
        devices = None if self._env.device.type == "cpu" else [self._env.device.index]
        stream = torch.cuda.stream(torch.cuda.Stream()) if devices is not None else nullcontext()
        with stream, nullcontext() if self.stages.stage is None else self.stages.stage.hiding_from_ddp():
            self._env.strategy.model = DistributedDataParallel(
                self._env.module, device_ids=devices, process_group=self._env.groups[self._env.groups.mean_axes], **options
            )

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check, before the backward, that all ranks of a replica have one loss and that it reads no partial values."""
        if self.stages.window is None:  # else it is no loss yet
            self._before_backward(closure_loss, is_loss=self.stages.stage is None or self.stages.stage.is_last)

    def _before_backward(self, loss: Tensor, *, is_loss: bool) -> None:
        record = self._record
        if record is not None:
            assert self._sync is not None
            self._sync.attach()  # once more, since a parameter may have thawed in the step
            self._sync.begin_backward()
            if self.split is not None:
                self.split.expect_backward(loss)
            if is_loss:
                self._sync.losses.note(loss)
            if self.schedule.is_due("training"):
                if is_loss:
                    check_loss(loss, self._env.groups)
                    check_readers(loss, record)
                if record.stage is not None:
                    record.stage.check_graph(loss)
                check_parameters(record)
                check_buffers(record, self._env.groups, self._env.device)
        if (ddp := self._env.ddp) is not None:
            thawed = self._thawed()
            if thawed or (self._waits(ddp) and not all(p.requires_grad for p in self.stages.reduced)):
                raise RuntimeError(
                    f"a parameter {'began' if thawed else 'ceased'} to train within a step, where the reduction over replicas "
                    f"(dp > 1) does not know {'it' if thawed else 'of it'} yet: switch requires_grad (unfreeze, set_adapter) "
                    "before the step, in on_train_batch_start or a callback"
                )
            if not self._env.automatic:
                prepare_for_backward(ddp, loss)

    def backward(self, run: Callable[..., Tensor], closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward by Lightning's ``run``; a gradient that is differentiated through a sharded layer raises RuntimeError."""
        backward = functools.partial(self._run_backward, run, closure_loss, *args, **kwargs)
        try:
            if (stage := self.stages.stage) is None:
                closure_loss = self._unwatched(backward)
            else:
                self._unwatched(self.stages.run_when_due, closure_loss, backward, stage)
        except RuntimeError as error:
            refuse_second_derivative(error)
            raise
        return closure_loss

    def _run_backward(self, run: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Run one backward; behind it all ranks draw alike, also where a recompute in it restored no streams."""
        try:
            return run(*args, **kwargs)
        finally:
            for region in () if self._record is None else self._record.regions:
                if region.streams.draws:
                    region.streams.end()

    def before_on_after_backward(self) -> None:
        """Sum partial gradients at once where the user's code may read them: ``on_after_backward``, ``manual_backward``."""
        self._has_backward = True
        if self._sync is None:
            return
        automatic = self._env.automatic
        if not automatic or self._reads_each_backward():
            self._sum_gradients(None)
            self._flushed = automatic and not self._env.trainer.fit_loop._should_accumulate()

    def _reads_each_backward(self) -> bool:
        """Whether the user's code may read gradients behind each backward; callbacks may be added while a training begins."""
        hook, module = "on_after_backward", self._env.module
        if hook in vars(module) or type(module).on_after_backward is not pl.LightningModule.on_after_backward:
            return True
        return any(
            hook in vars(callback) or type(callback).on_after_backward is not pl.callbacks.Callback.on_after_backward
            for callback in self._env.callbacks
        )

    def update(
        self, step: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run an optimizer's step by Lightning's ``step``; partial gradients are summed right after the user's closure."""

        def synced() -> Any:
            out = closure()
            self.sync_gradients(optimizer)
            return out

        self._optimizing = optimizer
        try:
            return self._unwatched(step, optimizer, synced, *args, **kwargs)
        finally:
            self._optimizing = None
            if self._whole.step is not None:
                self._whole.put_back()

    def make_optimizers(self, make: Callable[[], None]) -> None:
        """Let Lightning call ``configure_optimizers``, which sees the classes and shapes of the model as it was written."""
        record = record_of(self._env.module)
        with record.as_written() if record is not None else nullcontext():
            make()
        if self.split is not None:
            for optimizer in self._env.strategy.optimizers:
                self.split.adopt(plain_optimizer(optimizer))

    def check_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Check the optimizers of the training, also where a callback exchanges them in its course."""
        plain = [plain_optimizer(optimizer) for optimizer in optimizers]
        self._optimizer_guard.refuse_mixing(plain, self.shards if plain else 1)
        self._optimizer_guard.refuse_in_stages(plain, self._env.config.pp)
        for optimizer in plain:
            # Gradients must be synced too if it is stepped without the strategy. One around another may not call
            # Optimizer.__init__.
            if optimizer not in self._guarded and hasattr(optimizer, "_optimizer_step_pre_hooks"):
                optimizer.register_step_pre_hook(self._before_raw_step)
            self._guarded.add(optimizer)
            if self.shards > 1 and self._optimizer_guard.needs_whole(optimizer):
                self._whole.around(optimizer)

    @property
    def shards(self) -> int:
        """Over how many ranks parameters are divided."""
        return self._env.config.tp * (self._env.groups.size("fsdp_shard") if self.split is not None else 1)

    def _refuse_unknown(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        record = self._record
        if record is None or optimizer in self._guarded or plain_optimizer(optimizer) in self._guarded:
            return
        if self.split is not None:
            self.split.refuse_originals(optimizer)
        if any(layout.is_sharded for p in parameters_of(optimizer) if (layout := record.layout.of(p)) is not None):
            self._optimizer_guard.refuse_mixing([optimizer], self.shards, alone=True)

    def _before_raw_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Sync and check gradients in a step that does not come through the strategy. A hook before each step."""
        if self._optimizing is not None:
            return None

        def sync() -> None:
            self.sync_gradients(optimizer)
            self.check_step(optimizer)

        return behind_closure(sync, args, kwargs)

    def sync_gradients(self, optimizer: Optimizer | None) -> None:
        """Sum the partial gradients of an optimizer's parameters (None for all) over tp, unless that is done. Collective."""
        if self._sync is None or self._flushed:
            return  # no gradient is added between the backward and the update
        automatic = self._env.automatic
        self._sum_gradients(None if automatic or optimizer is None else parameters_of(optimizer))
        if optimizer is not None and self.stages.stage is not None and self._gradients_may_change:
            self._scales = StageScales(parameters_of(optimizer), self._env.groups)
        # Elsewhere (a raw step, grad_norm in some hook) a backward may still be to come.
        self._flushed = automatic and self._optimizing is not None and self._has_backward

    def _sum_gradients(self, parameters: Sequence[Tensor] | None) -> None:
        """Sum the gradients of ``parameters`` (None for all) over tp, and over replicas what DDP leaves to us. Collective."""
        assert self._sync is not None
        if self.split is not None:
            self.split.check_reduced()
            self.split.average(parameters)
        self._sync.flush(parameters)
        if self.split is not None:
            self.split.drop_unused(parameters)

    def settle_rows(self) -> None:
        """Let each replica hold its own rows alone, where they split parameters."""
        if self.split is not None:
            self.split.settle()

    def check_step(self, optimizer: Optimizer) -> None:
        """Check, before an update, that gradients which must be equal on all ranks are equal. Collective.

        Where the user's code may change them they are compared in every step, but the host waits for the answer only in steps in
        which checks are due; else it is read before the next update, and before anything is saved.
        """
        optimizer, record = plain_optimizer(optimizer), self._record
        step = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        self._read_comparisons()
        due = self.schedule.is_due_at(step)
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        if record is not None and (due or count != self._counts.get(id(optimizer))):
            refuse_added(parameters_of(optimizer), record)
            self._counts[id(optimizer)] = count
        if self._gradients_may_change or due:
            parameters = parameters_of(optimizer)
            self._comparisons.add(check_reduced(parameters, self._env.module, self._env.groups))
            if record is not None:
                self._comparisons.add(check_replicated(parameters, record.layout, self._env.groups))
        if self._scales is not None:
            self._comparisons.add(self._scales.check())
            self._scales = None
        if due:
            self._read_comparisons(everything=True)

    def _read_comparisons(self, *, everything: bool = False) -> None:
        """Raise RuntimeError if the gradients of earlier steps differed, whose comparison nobody has waited for."""
        for comparison in self._comparisons.take(everything=everything):
            comparison()

    def settle(self) -> None:
        """Raise RuntimeError if losses or gradients of the last step differed over the ranks, before anything is kept of it."""
        if self._sync is not None:
            self._sync.losses.settle(everything=True)
        self._read_comparisons(everything=True)

    def note_hooks(self) -> None:
        """Note whether code of the user's runs between the backward and the update on any rank. Collective over the world."""
        module, callbacks = self._env.module, self._env.callbacks
        own = ("backward", "configure_gradient_clipping", "optimizer_step", *_BEHIND_BACKWARD)
        self._gradients_may_change = self._env.strategy.reduce_boolean_decision(
            not self._env.automatic
            or any(is_overridden(hook, module) for hook in own)
            or any(_may_change_gradients(each) for each in callbacks),
            all=False,
        )

    def global_norm(self, parameters: list[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradients of these parameters, equal on all ranks. Collective over tp."""
        if (record := record_of(self._env.module)) is not None:
            return global_grad_norm(parameters, record.layout, self._env.groups, norm_type)
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)


class _Redirection(ForwardRedirection):
    """Lightning's forward through DDP, which ``pre_backward`` prepares for backwards in manual optimization and in stages."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def on_after_inner_forward(self, wrapper_module: nn.Module, original_module: pl.LightningModule) -> None:
        later = self._stages.stage is not None or not original_module.automatic_optimization
        self._waits = later and isinstance(wrapper_module, DistributedDataParallel)
        if self._waits:
            wrapper_module.require_backward_grad_sync = False  # type: ignore[assignment]

    def on_after_outer_forward(self, wrapper_module: nn.Module, original_module: pl.LightningModule) -> None:
        if self._waits:
            wrapper_module.require_backward_grad_sync = True  # type: ignore[assignment]


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The user's optimizer, taken out of Lightning's wrapper if it is in one."""
    return optimizer._optimizer if isinstance(optimizer, WrappedOptimizer) else optimizer


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [parameter for group in plain_optimizer(optimizer).param_groups for parameter in group["params"]]
