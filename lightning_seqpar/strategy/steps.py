"""From a batch to an update: steps, backward, gradient sync, clipping, and the loops around them."""

from __future__ import annotations

import signal
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.data.batch import map_tensors, tensors_in
from lightning_seqpar.distributed.rank_consistency import check_agreement, told_of_optimizer
from lightning_seqpar.distributed.rng import DrawWatch
from lightning_seqpar.nn.sharded_logits import ShardedLogits, whole_logits
from lightning_seqpar.parallel.apply import record_of
from lightning_seqpar.parallel.grad_norm import global_grad_norm
from lightning_seqpar.parallel.grad_sync import GradSync, check_reduced, check_replicated
from lightning_seqpar.parallel.loss_consistency import check_loss
from lightning_seqpar.strategy.environment import TopologyStrategy
from lightning_seqpar.strategy.launcher import SeqParallelLauncher
from lightning_seqpar.strategy.metrics import share_metrics
from lightning_seqpar.strategy.precision import with_global_clipping
from lightning_seqpar.verify.guards.batch import OutputWatch, check_batch, warn_of_equal_replicas
from lightning_seqpar.verify.guards.graph import check_readers
from lightning_seqpar.verify.guards.model import check_buffers, check_parameters, refuse_added
from lightning_seqpar.verify.guards.optimizer import refuse_optimizers

_MANY = 2**14  # patterns of draws that are remembered
_BEHIND_BACKWARD = ("on_after_backward", "on_before_optimizer_step")


class SteppingStrategy(TopologyStrategy):
    """What happens between a batch and an update, in every loop; the model that it happens to is the subclass's matter."""

    def __init__(self, config: ParallelConfig, **plugins: Any) -> None:
        super().__init__(config, **plugins)
        self._forward_redirection = _Redirection()
        self._sync: GradSync | None = None
        self._steps: dict[int, int] = {}
        self._calls: Counter[str] = Counter()
        self._since_start: Counter[str] = Counter()  # of an epoch, or of an evaluation: loaders may begin anew there
        self._flushed = self._others_flushed = False
        self._optimizing: Optimizer | None = None
        self._all_steps: RemovableHandle | None = None
        self._guarded: weakref.WeakSet[Optimizer] | None = None  # against steps past the strategy
        self._muted_writers: list[tuple[int, Any]] = []
        self._ddp_model: DistributedDataParallel | None = None
        self._reduced: list[Tensor] = []  # by DDP, over the replicas
        self._outputs = OutputWatch()
        self._draws: set[int] = set()  # how much steps drew whose draws were watched, as hashes
        self._gradients_may_change = True
        self._watches_draws = False

    def _share_metrics(self) -> None:
        share_metrics([self._module, *self._trainer.callbacks], self.groups["dp"])  # type: ignore[attr-defined]

    # ---- steps -------------------------------------------------------------------------------------------------

    def _step(self, loop: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A step of the user's: nothing of an earlier call is left when it begins, nor of its own when it ends."""
        record = record_of(self._module)
        if record is None:
            return step(*args, **kwargs)
        record.reset_calls()
        self._calls[loop] += 1
        due = self._is_due(self._calls[loop])
        if due:
            self._share_metrics()
        self._since_start[loop] += 1
        if args and (due or self._is_due(self._since_start[loop])):
            check_batch(args[0], self.groups, self.root_device, loop)
            if loop == "training" and self._calls[loop] == 1:
                warn_of_equal_replicas(args[0], self.groups, self.root_device)
        watched = loop == "training" and (due or self._watches_draws)
        try:
            with DrawWatch(record.check_draw) if watched else nullcontext():
                out = step(*args, **kwargs)
        except RuntimeError:
            refuse_added(record.added_inside(), record)  # the likelier cause of shapes that do not fit
            raise
        record.check_closed(out)
        if loop == "training":
            self._note_draws(record.drawn(), watched=watched)
        else:
            if any(isinstance(tensor, ShardedLogits) for tensor in tensors_in(out)):
                out = map_tensors(whole_logits, out)  # who reads it next may do so on one rank alone
            self._outputs.note(out, self.root_device)
            if due or self._is_due(self._since_start[loop]) or self._outputs.is_full:
                self._outputs.check(self.groups, loop)
        return out

    def _note_draws(self, drawn: Any, *, watched: bool) -> None:
        """A step that draws as none before did (a rate that rises from zero) has the next one watched."""
        if len(self._draws) >= _MANY:
            self._draws.clear()
        if watched:
            self._draws.add(hash(drawn))
        self._watches_draws = hash(drawn) not in self._draws

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step; its random draws are watched at due steps, and behind one that drew as none before."""
        if self._sync is not None:
            self._sync.attach()
            self._flushed = self._others_flushed = False
        if isinstance(self.model, DistributedDataParallel):
            self._follow_training_parameters(self.model)
        return self._step("training", super().training_step, args, kwargs)

    def _thawed(self) -> bool:
        """Whether an optimizer's parameter learns that was not to learn when DDP was made: it reduces those of then."""
        reduced = {id(parameter) for parameter in self._reduced}
        return any(p.requires_grad and id(p) not in reduced for one in self.optimizers for p in _parameters(one))

    def _follow_training_parameters(self, ddp: DistributedDataParallel) -> None:
        """A replica's reduction is made anew where parameters thawed (or froze, which it would wait for) since.

        Raises:
            RuntimeError: if gradients that the replicas have not summed would not be summed any more.
        """
        every = self._trainer.accumulate_grad_batches
        within = self._trainer.fit_loop.epoch_loop.batch_idx % every != 0
        thawed, frozen = self._thawed(), [p for p in self._reduced if not p.requires_grad] if self._waits(ddp) else []
        lost = any(p.grad is not None for p in frozen)
        # A new reduction knows nothing of what only earlier batches used.
        if within and (lost or (thawed and ddp.find_unused_parameters)):
            raise RuntimeError(
                f"a parameter {'froze' if lost else 'began to train'} between batches whose gradients are accumulated "
                f"(accumulate_grad_batches={every}): each replica (dp > 1) holds parts of gradients that would not be summed any "
                "more. Switch requires_grad in on_train_batch_start where batch_idx % accumulate_grad_batches == 0"
            )
        if thawed or frozen:
            ddp._remove_autograd_hooks()
            self._wrap_ddp(self._module, init_sync=False)  # equal already; written to, parts of gradients would be void

    def _waits(self, ddp: DistributedDataParallel) -> bool:
        """Whether the reduction waits for the gradient of every parameter that it knows."""
        return self._module.automatic_optimization and not ddp.find_unused_parameters

    def _wrap_ddp(self, module: LightningModule, **more: Any) -> None:
        self._reduced = [parameter for parameter in module.parameters() if parameter.requires_grad]
        options = {**self.config.ddp, **more}
        devices = None if self.root_device.type == "cpu" else [self.root_device.index]
        stream = torch.cuda.stream(torch.cuda.Stream()) if devices is not None else nullcontext()
        with stream:
            self._ddp_model = DistributedDataParallel(
                module, device_ids=devices, process_group=self.groups["dp"], **options
            )
        self.model = self._ddp_model

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step."""
        return self._step("validation", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step."""
        return self._step("test", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step."""
        return self._step("predict", super().predict_step, args, kwargs)

    def _is_due(self, step: int) -> bool:
        """Whether a check runs at this step: at the first 16, at 32, 64, 128, ... and every ``check_every``."""
        every = self.config.check_every
        return step <= 16 or step & (step - 1) == 0 or (every > 0 and step % every == 0)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Before the backward: the loss must be one loss, and must not read what comes in parts."""
        record = record_of(self._module)
        if record is not None:
            assert self._sync is not None
            self._sync.attach()  # a parameter may have thawed in the step
            self._sync.losses.note(closure_loss)
            if self._is_due(self._calls["training"]):
                check_loss(closure_loss, self.groups)
                check_readers(closure_loss, record)
                check_parameters(record)
                check_buffers(record, self.groups, self.root_device)
            else:
                check_readers(closure_loss, record, inside=False)  # a loss may begin to read a parameter at any step
        if isinstance(self.model, DistributedDataParallel):
            thawed = self._thawed()
            if thawed or (self._waits(self.model) and not all(p.requires_grad for p in self._reduced)):
                raise RuntimeError(
                    f"a parameter {'began' if thawed else 'ceased'} to train within a step, where the reduction over replicas "
                    f"(dp > 1) does not know {'it' if thawed else 'of it'} yet: switch requires_grad (unfreeze, set_adapter) "
                    "before the step, in on_train_batch_start or a callback"
                )
            if not self._module.automatic_optimization:
                prepare_for_backward(self.model, closure_loss)

    def before_on_after_backward(self) -> None:
        """Gradients are whole in the user's ``on_after_backward``, and behind ``manual_backward``."""
        if self._sync is None:
            return
        hooked = is_overridden("on_after_backward", self._module) or any(
            is_overridden("on_after_backward", callback, Callback)
            for callback in self._trainer.callbacks  # type: ignore[attr-defined]
        )
        if hooked or not self._module.automatic_optimization:
            self._sync.flush_all(check=self._is_due(self._calls["training"]))
            # Read in automatic optimization alone.
            self._flushed = self._others_flushed = not self._trainer.fit_loop._should_accumulate()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The step, with the partial gradients summed right behind the user's closure."""

        def synced() -> Any:
            out = closure()
            self.sync_gradients(optimizer)
            return out

        self._optimizing = optimizer
        try:
            return super().optimizer_step(optimizer, synced, model, **kwargs)
        finally:
            self._optimizing = None

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Let the user make them, who sees the model that he wrote."""
        record = record_of(self._module)
        with record.as_written() if record is not None else nullcontext():
            super().setup_optimizers(trainer)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of the training, also where the user exchanges them in its course."""
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        plain = [plain_optimizer(optimizer) for optimizer in optimizers]
        refuse_optimizers(plain, self.groups.size("tp") if plain else 1)
        self._guarded = self._guarded or weakref.WeakSet()
        for optimizer in plain:
            if optimizer not in self._guarded:  # one that is stepped past the strategy is synced for too
                self._guarded.add(optimizer)
                optimizer.register_step_pre_hook(self._before_raw_step)
        super(SteppingStrategy, type(self)).optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    def _watch_all_steps(self) -> None:
        """Also optimizers that nobody told Lightning of must update each element by itself, if they hold shards."""
        self._stop_watching()
        if record_of(self._module) is not None:
            self._all_steps = register_optimizer_step_pre_hook(self._refuse_unknown)

    def _stop_watching(self) -> None:
        if self._all_steps is not None:
            self._all_steps.remove()
            self._all_steps = None

    def _refuse_unknown(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._guarded is not None and optimizer in self._guarded:
            return
        record = record_of(self._module)
        if record is not None and any(
            found.is_sharded for p in _parameters(optimizer) if (found := record.layout.of(p)) is not None
        ):
            refuse_optimizers([optimizer], self.groups.size("tp"))

    def _before_raw_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
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
        """Sum the partial gradients of this optimizer's parameters that are due; idempotent."""
        automatic = self._module.automatic_optimization
        if self._sync is None or (automatic and self._flushed):
            return  # between an automatic step's backward and its update nothing can arrive
        step = self._steps.get(id(optimizer), 0) + 1
        self._sync.flush(_parameters(optimizer), check=self._is_due(step))
        # Elsewhere (a raw step, grad_norm in some hook) the backward may still be to come.
        self._flushed = automatic and self._optimizing is not None

    def sync_others(self) -> None:
        """Sum the partial gradients of parameters that train and that no optimizer holds; idempotent."""
        automatic = self._module.automatic_optimization
        if self._sync is None or (automatic and self._others_flushed):
            return
        held = {id(parameter) for optimizer in self.optimizers for parameter in _parameters(optimizer)}
        others = [p for p in self._module.parameters() if p.requires_grad and id(p) not in held]
        if others:
            self._sync.flush(others)
        self._others_flushed = automatic and self._optimizing is not None

    def check_step(self, optimizer: Optimizer) -> None:
        """Parameters that every rank holds whole must get the same gradient on every rank."""
        optimizer = plain_optimizer(optimizer)
        step = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        record = record_of(self._module)
        if record is not None:
            refuse_added(_parameters(optimizer), record)
        if self._gradients_may_change or self._is_due(step):
            check_reduced(_parameters(optimizer), self.groups)
            if record is not None:
                check_replicated(_parameters(optimizer), record.layout, self.groups)

    def _note_hooks(self) -> None:
        """Whether code of the user's runs between the backward and the update, on any rank; collective over the world."""
        module, callbacks = self._module, self._trainer.callbacks  # type: ignore[attr-defined]
        own = ("backward", "configure_gradient_clipping", "optimizer_step", *_BEHIND_BACKWARD)
        self._gradients_may_change = self.reduce_boolean_decision(
            not module.automatic_optimization
            or any(is_overridden(hook, module) for hook in own)
            or any(is_overridden(hook, one, Callback) for hook in _BEHIND_BACKWARD for one in callbacks),
            all=False,
        )

    def global_norm(self, parameters: list[Tensor], norm_type: float = 2.0) -> Tensor:
        """Norm of the whole model's gradient over ``parameters``; equal on all ranks."""
        record = record_of(self._module)
        if record is not None:
            return global_grad_norm(parameters, record.layout, self.groups, norm_type)
        grads = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads, norm_type)

    @property
    def precision_plugin(self) -> Precision:
        """The user's precision plugin, clipping by the global norm."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None and self.config.tp > 1:
            raise ValueError(
                "precision='16-mixed' with tp > 1: ranks would disagree about skipping a step; use 'bf16-mixed' or '32-true'"
            )
        self._precision_plugin = None if plugin is None else with_global_clipping(plugin, self)

    # ---- loops -------------------------------------------------------------------------------------------------

    def _on_loop_start(self) -> None:
        self._share_metrics()
        if isinstance(self.launcher, SeqParallelLauncher):
            theirs = self._trainer._signal_connector._original_handlers.get(signal.SIGTERM)
            self.launcher.take_signals(theirs)

    def on_train_start(self) -> None:
        """Compare what the ranks will loop over, and log what a step is made of."""
        self._on_loop_start()
        check_agreement(self._told_of_training(), self._world, self.root_device)
        if (record := record_of(self._module)) is not None:
            record.check_versions()
        loader = self._trainer.train_dataloader
        size = getattr(loader, "batch_size", None)
        if isinstance(size, int):
            accumulate = self._trainer.accumulate_grad_batches
            rank_zero_info(
                f"lightning_seqpar: global batch {size * self.dp_size * accumulate} = {size} × dp {self.dp_size} × "
                f"accumulate {accumulate}"
            )

    def _told_of_training(self) -> dict[str, Any]:
        """What makes all ranks of the world take the same steps."""
        trainer = self._trainer
        return {
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": str(trainer.gradient_clip_algorithm),
            "precision": str(trainer.precision),
            "val_check_interval": trainer.val_check_interval,
            "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
            **{f"optimizer {at}": told_of_optimizer(plain_optimizer(one)) for at, one in enumerate(self.optimizers)},
            "the schedulers": [type(one.scheduler).__name__ for one in self.lr_scheduler_configs],
        }

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Loaders may be made anew for an epoch: all ranks must take as many steps."""
        if batch_idx == 0:
            self._since_start["training"] = 0
            told = {"training batches in an epoch": self._trainer.num_training_batches}
            check_agreement(told, self._world, self.root_device)

    def _agree_on_batches(self, loop: str, counts: list[int | float]) -> None:
        """The ranks of a replica would wait for each other in different loops if one had fewer batches."""
        self._since_start[loop] = 0
        self._outputs = OutputWatch()  # an earlier loop may have ended in the middle
        group = self.groups[self.groups.replica_axes]
        check_agreement({f"{loop} batches": counts}, group, self.root_device)

    def on_train_end(self) -> None:
        """The losses of the last step are still to be compared."""
        if self._sync is not None:
            self._sync.losses.settle()

    def on_validation_start(self) -> None:
        """Compare what the ranks will loop over."""
        self._on_loop_start()
        checking = self._trainer.sanity_checking
        counts = self._trainer.num_sanity_val_batches if checking else self._trainer.num_val_batches
        self._agree_on_batches("validation", list(counts))

    def on_validation_end(self) -> None:
        """Compare what the last steps returned."""
        self._outputs.check(self.groups, "validation")

    def on_test_start(self) -> None:
        """Compare what the ranks will loop over."""
        self._on_loop_start()
        self._agree_on_batches("test", list(self._trainer.num_test_batches))

    def on_test_end(self) -> None:
        """Compare what the last steps returned."""
        self._outputs.check(self.groups, "test")

    def on_predict_start(self) -> None:
        """Compare what the ranks will loop over; prediction writers write on the first rank of each replica."""
        self._on_loop_start()
        self._agree_on_batches("predict", list(self._trainer.num_predict_batches))
        if self.groups.rank("tp") > 0:
            callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
            self._muted_writers = [(i, c) for i, c in enumerate(callbacks) if isinstance(c, BasePredictionWriter)]
            for _, writer in self._muted_writers:
                callbacks.remove(writer)

    def on_predict_end(self) -> None:
        """Compare what the last steps returned; give the muted writers back."""
        self._unmute_writers()
        self._outputs.check(self.groups, "predict")

    def _unmute_writers(self) -> None:
        for index, writer in self._muted_writers:
            self._trainer.callbacks.insert(index, writer)  # type: ignore[attr-defined]
        self._muted_writers = []


class _Redirection(_ForwardRedirection):
    """Keeps DDP from preparing its reducer in manual optimization; ``pre_backward`` does it for each backward."""

    def on_after_inner_forward(self, wrapper_module: nn.Module, original_module: LightningModule) -> None:
        if isinstance(wrapper_module, DistributedDataParallel) and not original_module.automatic_optimization:
            wrapper_module.require_backward_grad_sync = False

    def on_after_outer_forward(self, wrapper_module: nn.Module, original_module: LightningModule) -> None:
        if isinstance(wrapper_module, DistributedDataParallel) and not original_module.automatic_optimization:
            wrapper_module.require_backward_grad_sync = True


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The user's optimizer, out of Lightning's wrapper."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in plain_optimizer(optimizer).param_groups for parameter in group["params"]]
