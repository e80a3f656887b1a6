"""``SeqParallelStrategy``: Lightning's hooks, and nothing that is not glue."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizer_to_device, _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_seqpar.checkpoint import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)
from lightning_seqpar.config import CheckpointConfig, ParallelConfig, PlanSpec
from lightning_seqpar.grad_sync import GradSync, check_replicated, global_grad_norm
from lightning_seqpar.groups import ParallelGroups
from lightning_seqpar.guards import (
    check_batch,
    check_loss,
    check_parameters,
    check_readers,
    refuse_callbacks,
    refuse_optimizers,
    refuse_unsupported,
)
from lightning_seqpar.launcher import SeqParallelLauncher
from lightning_seqpar.metrics import share_metrics
from lightning_seqpar.parallelize import ShardedModel, parallelize, record_of, unshard
from lightning_seqpar.plan import ShardingPlan, resolve_plans
from lightning_seqpar.precision import with_global_clipping
from lightning_seqpar.random import DROPOUT_FIX, RefuseDropout, find_dropout, share_streams
from lightning_seqpar.sampler import inject_sampler, replica_workers
from lightning_seqpar.topology import ProcessTopology


class SeqParallelStrategy(ParallelStrategy):
    """Tensor + sequence parallel training of an unmodified LightningModule.

    ``Trainer(devices=8, strategy=SeqParallelStrategy(tp=4, sp=True))``. The fields are those of
    :class:`~lightning_seqpar.config.ParallelConfig`; give them as keywords or as ``config=``, not both.

    Raises:
        ValueError: for a keyword beside ``config=``, or anything that does not run yet.
        pydantic.ValidationError: for a value outside its rule.
    """

    def __init__(
        self,
        tp: int = 1,
        sp: bool = True,
        dp: Literal["auto"] | int = "auto",
        cp: int = 1,
        cp_method: Literal["auto", "ring", "ulysses"] = "auto",
        pp: int = 1,
        virtual_pp: int | None = None,
        pp_split_rank: int | None = None,
        order: str = "pp-dp-cp-tp",
        plan: str | PlanSpec | dict[str, Any] | list[dict[str, Any]] = "auto",
        data_parallel: Literal["ddp", "fsdp"] = "ddp",
        ddp: dict[str, Any] | None = None,
        fsdp: dict[str, Any] | None = None,
        recompute: Literal["none", "selective", "full"] = "none",
        regather: Literal["auto"] | bool = "auto",
        compile: bool = False,
        self_check: bool = True,
        check_every: int = 0,
        checkpoint: CheckpointConfig | dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = 1800,
        fp8_groups: bool = False,
        gloo_twins: bool = False,
        config: ParallelConfig | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in ParallelConfig.model_fields}
        self.config = _merge_config(config, given)
        refuse_unsupported(self.config)
        if isinstance(self.config.plan, PlanSpec):
            ShardingPlan.from_rules(self.config.plan.rules)  # wrong rules are told before anything starts
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._forward_redirection = _Redirection()
        self._num_nodes = 1
        self._groups: ParallelGroups | None = None
        self._sync: GradSync | None = None
        self._ddp_model: DistributedDataParallel | None = None
        self._user_sampler_flag: bool | None = None
        self._steps: dict[int, int] = {}
        self._calls: Counter[str] = Counter()
        self._flushed = False
        self._optimizing: Optimizer | None = None
        self._muted_writers: list[tuple[int, Any]] = []

    # ---- what this rank is -------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Lightning asks this of strategies that it does not know; without it ``sync_dist`` does nothing."""
        return True

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Nodes of the run."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def groups(self) -> ParallelGroups:
        """The process groups."""
        if self._groups is None:
            raise RuntimeError(
                "the process groups are made in setup_environment; read them from a hook, not before fit"
            )
        return self._groups

    @property
    def dp_rank(self) -> int:
        """Which replica this rank belongs to."""
        return self.groups.rank("dp")

    @property
    def dp_size(self) -> int:
        """How many replicas there are."""
        return self.groups.size("dp")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """A sampler counts replicas: the ranks of one replica read the same samples."""
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    # ---- environment -------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # Sizes are checked before any process is started.
        ProcessTopology.from_config(self.config, self.num_nodes * self.num_processes)
        if self._layer_sync is not None:
            raise ValueError("sync_batchnorm=True: batch norms are not synced over replicas here; leave it out")
        self._launcher = SeqParallelLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's place; Lightning calls it."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        vars(rank_zero_only)["rank"] = self.global_rank

    def setup_environment(self) -> None:
        """Connect the processes and make the topology's groups, once."""
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        backend = self.config.process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        _init_dist_connection(
            self.cluster_environment,
            backend,
            timeout=self.config.timeout,
            device_id=self.root_device if self.root_device.type != "cpu" else None,
        )
        topology = ProcessTopology.from_config(self.config, dist.get_world_size())
        if self._groups is None or self._groups.topology != topology:
            self._groups = ParallelGroups(topology, dist.get_rank(), timeout=self.config.timeout)
        self._take_over_samplers()

    def _take_over_samplers(self) -> None:
        """Lightning would deal samples out by its own sampler, which shuffles; ours keeps the user's order."""
        connector = self._trainer._accelerator_connector
        if self._user_sampler_flag is None:
            self._user_sampler_flag = connector.use_distributed_sampler
        connector.use_distributed_sampler = False

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # ---- model -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Swap the model (once), wrap it for the replicas, and only then let the user make optimizers."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.precision_plugin.convert_module(module)
        record = self._parallelize(module)
        self.model_to_device()
        if record is not None:
            record.reset_calls()
            record.strategy = weakref.ref(self)
            refuse_callbacks(trainer.callbacks, self.groups.size("tp"))  # type: ignore[attr-defined]
        self._share_metrics()
        self._sync = None
        self._steps, self._calls = {}, Counter()
        if fitting:
            if record is not None:
                self._sync = GradSync(record.layout, self.groups, record.doubtful)
            if self.dp_size > 1:
                self._wrap_ddp(module)
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers, self.groups.size("tp"))
            self._guard_raw_steps()
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
        share_streams(self.groups["tp"], self.groups.ranks("tp")[0], self.root_device)
        if record is not None:
            record.note_versions()

    def _parallelize(self, module: LightningModule) -> ShardedModel | None:
        """The record of the sharded model; none at tp 1."""
        tp = self.groups.size("tp")
        if tp > 1 and self._trainer.state.fn == TrainerFn.FITTING and (dropping := find_dropout(module)):
            names = ", ".join(f"{name} (p={p})" for name, p in dropping[:5])
            raise ValueError(f"dropout in {names}{' ...' if len(dropping) > 5 else ''} with tp={tp}: {DROPOUT_FIX}")
        found = record_of(module)
        made_by = (self.groups.topology, self.config.sp, self.config.plan, self.config.regather)
        if found is not None:
            if found.made_by == made_by:
                return found
            unshard(module)  # another topology or plan: start from the whole model
        if tp > 1:
            plans = resolve_plans(self.config.plan, module)
        self._make_replicas_equal(module)
        if tp == 1:
            if self.config.sp and self.config.model_fields_set & {"sp"}:
                rank_zero_info("lightning_seqpar: sp=True is idle at tp=1")
            return None
        hooked = [name for name, module in module.named_modules() if module._forward_hooks and name]
        regather = self.config.regather is not False
        record = parallelize(module, plans, self.groups, sp=self.config.sp, regather=regather)
        record.made_by = made_by
        total, local = record.layout.global_numel(), record.layout.local_numel()
        rank_zero_info(
            f"lightning_seqpar: {self.groups.topology}, sp {'on' if self.config.sp else 'off'}, plan from "
            f"{', '.join(dict.fromkeys(plan.source for plan in plans))}; {local:,} of {total:,} parameters per rank"
        )
        if seen := [name for name in hooked if record.is_inside(name)]:
            rank_zero_warn(
                f"lightning_seqpar: forward hooks of yours sit on {', '.join(seen[:3])}{' ...' if len(seen) > 3 else ''}; "
                "they will see this rank's part of the activations"
            )
        if any(not plan.source.startswith("family") for plan in plans):
            rank_zero_warn(
                "lightning_seqpar: the plan is your own, and nothing proves it yet: a wrong rule (a head count not divided, "
                "segments left out, a block that mixes positions) can train without an error. Compare a small run with one "
                "process first: lightning_seqpar.parity.ParityRecorder and compare"
            )
        return record

    def _make_replicas_equal(self, module: LightningModule) -> None:
        """The first rank's weights and buffers count for all, while the model is still whole on every rank."""
        group = self.groups[tuple(sorted(self.groups.topology.axes))]
        with torch.no_grad():
            for tensor in {id(t): t for t in (*module.parameters(), *module.buffers())}.values():
                staged = tensor.detach().to(self.root_device).contiguous()
                if staged.numel():
                    # As bytes: backends do not know every dtype.
                    dist.broadcast(staged.view(-1).view(torch.uint8), src=0, group=group)
                    tensor.data.copy_(staged)

    def _wrap_ddp(self, module: LightningModule) -> None:
        options = dict(self.config.ddp)
        devices = None if self.root_device.type == "cpu" else [self.root_device.index]
        stream = torch.cuda.stream(torch.cuda.Stream()) if devices is not None else nullcontext()
        with stream:
            self._ddp_model = DistributedDataParallel(
                module, device_ids=devices, process_group=self.groups["dp"], **options
            )
        self.model = self._ddp_model

    def model_to_device(self) -> None:
        """Move the model, already cut, to this rank's device."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

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
            if args:
                check_batch(args[0], self.groups, self.root_device, loop)
        with RefuseDropout(record.in_region) if due and loop == "training" else nullcontext():
            out = step(*args, **kwargs)
        record.check_closed(out)
        return out

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step; at due steps it is watched for random draws that tensor parallelism can't do."""
        if self._sync is not None:
            self._sync.attach()
            self._flushed = False
        return self._step("training", super().training_step, args, kwargs)

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
            if self._is_due(self._calls["training"]):
                check_loss(closure_loss, self.groups)
                check_readers(closure_loss, record)
                check_parameters(record)
        if isinstance(self.model, DistributedDataParallel) and not self._module.automatic_optimization:
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
            self._flushed = not self._trainer.fit_loop._should_accumulate()  # read in automatic optimization alone

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

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

    def _guard_raw_steps(self) -> None:
        """``self.optimizers(use_pl_optimizer=False).step()`` goes past the strategy: sync there too."""
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self._before_raw_step)

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

    def check_step(self, optimizer: Optimizer) -> None:
        """Parameters that every rank holds whole must get the same gradient on every rank."""
        optimizer = _plain(optimizer)
        step = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        record = record_of(self._module)
        watched = not self._module.automatic_optimization or is_overridden("configure_gradient_clipping", self._module)
        if record is not None and (watched or self._is_due(step)):
            check_replicated(_parameters(optimizer), record.layout, self.groups)

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

    # ---- metrics speak of replicas; barriers of the world ---------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas: the ranks of one replica hold the same value."""
        if not isinstance(tensor, Tensor):
            return tensor
        return _sync_ddp_if_available(tensor, self.groups["dp"] if group is None else group, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over the replicas: ``[dp, ...]``; as in one process (no new dim) where there is one replica.

        ``LightningModule.all_gather`` always passes the world group, so that means the replicas too.
        """
        if group is not None and group is not dist.group.WORLD:
            return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)
        if self.dp_size == 1:
            return tensor
        return _all_gather_ddp_if_available(tensor, group=self.groups["dp"], sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) ranks of the world decided so."""
        told = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(told, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, group=self._world)
        return bool(told)

    @property
    def _world(self) -> dist.ProcessGroup:
        return self.groups[tuple(sorted(self.groups.topology.axes))]

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the world."""
        if not _distributed_is_initialized() or self._groups is None:
            return
        devices = [self.root_device.index] if self.root_device.type == "cuda" else None
        dist.barrier(group=self._world, device_ids=devices)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of rank ``src``, on every rank of the world."""
        if not _distributed_is_initialized() or self._groups is None:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=src, group=self._world)
        return box[0]

    # ---- data --------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Deal the samples out over the replicas, in the user's order."""
        if not isinstance(dataloader, DataLoader):
            return dataloader
        if self._user_sampler_flag:
            dataloader = inject_sampler(dataloader, self.groups, predicting=self._trainer.predicting)
        replica_workers(dataloader, self.dp_rank)
        return dataloader

    # ---- loops -------------------------------------------------------------------------------------------------

    def _on_loop_start(self) -> None:
        self._share_metrics()
        if isinstance(self.launcher, SeqParallelLauncher):
            self.launcher.take_sigterm()

    def on_train_start(self) -> None:
        """Log what a step is made of."""
        self._on_loop_start()
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

    def on_validation_start(self) -> None:
        """Lightning's hook."""
        self._on_loop_start()

    def on_test_start(self) -> None:
        """Lightning's hook."""
        self._on_loop_start()

    def on_predict_start(self) -> None:
        """Prediction writers write once per replica: the first rank of each."""
        self._on_loop_start()
        if self.groups.rank("tp") > 0:
            callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
            self._muted_writers = [(i, c) for i, c in enumerate(callbacks) if isinstance(c, BasePredictionWriter)]
            for _, writer in self._muted_writers:
                callbacks.remove(writer)

    def on_predict_end(self) -> None:
        """Give the muted writers back."""
        self._unmute_writers()

    def _unmute_writers(self) -> None:
        for index, writer in self._muted_writers:
            self._trainer.callbacks.insert(index, writer)  # type: ignore[attr-defined]
        self._muted_writers = []

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on the first rank, meta tensors elsewhere; collective."""
        record = record_of(self._module)
        if record is None:
            return super().lightning_module_state_dict()
        return full_state_dict(record, self.root_device)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole model's weights; a model that is cut already takes its parts."""
        record = record_of(self._module)
        if record is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            load_full_state_dict(record, checkpoint["state_dict"], strict=strict)
            record.note_versions()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state with whole moments on the first rank; collective."""
        record = record_of(self._module)
        if record is None:
            return super().optimizer_state(optimizer)
        return full_optimizer_state(_plain(optimizer), record.layout, record.groups, self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole moments; each rank takes its parts."""
        record = record_of(self._module)
        if record is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_full_optimizer_state(optimizer, state, record.layout, record.groups)
            _optimizer_to_device(optimizer, self.root_device)

    # ---- the end -----------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tell the watch, so that the other ranks end too."""
        self._unmute_writers()
        if isinstance(self.launcher, SeqParallelLauncher):
            self.launcher.tell(exception)

    def teardown(self) -> None:
        """Unwrap the model; it stays sharded, and the groups live on: saving after ``fit`` works."""
        if self._ddp_model is not None:
            self.model, self._ddp_model = self.lightning_module, None
        if self._sync is not None:
            self._sync.remove()
            self._sync = None
        super().teardown()


class _Redirection(_ForwardRedirection):
    """Keeps DDP from preparing its reducer in manual optimization; ``pre_backward`` does it for each backward."""

    def on_after_inner_forward(self, wrapper_module: nn.Module, original_module: LightningModule) -> None:
        if isinstance(wrapper_module, DistributedDataParallel) and not original_module.automatic_optimization:
            wrapper_module.require_backward_grad_sync = False

    def on_after_outer_forward(self, wrapper_module: nn.Module, original_module: LightningModule) -> None:
        if isinstance(wrapper_module, DistributedDataParallel) and not original_module.automatic_optimization:
            wrapper_module.require_backward_grad_sync = True


def _plain(optimizer: Any) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in _plain(optimizer).param_groups for parameter in group["params"]]


def _merge_config(config: ParallelConfig | None, given: Mapping[str, Any]) -> ParallelConfig:
    """The config; keywords beside it must be at their defaults, as command lines pass every default along."""
    keywords = {
        name: value for name, value in given.items() if value is not None or name in ("virtual_pp", "pp_split_rank")
    }
    if config is None:
        return ParallelConfig(**keywords)
    for name, value in keywords.items():
        default = getattr(ParallelConfig(), name)
        same = value == default or (name == "timeout" and value == default.total_seconds())
        if not same:
            raise ValueError(
                f"{name}={value!r} stands beside config=; set it in the config (config.model_copy(update={{{name!r}: "
                f"{value!r}}})) or drop config="
            )
    return config


def grad_norm(module: LightningModule, norm_type: float = 2.0) -> Tensor:
    """The norm of the whole model's gradient, as a 0-dim tensor: shards of every rank, whole parameters once.

    Call it where gradients are ready, such as ``on_before_optimizer_step``; under a ``SeqParallelStrategy`` it is
    collective. Under any other strategy it is the plain norm, so the user's code runs on both.
    """
    strategy = module.trainer.strategy
    if not isinstance(strategy, SeqParallelStrategy):
        return torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None], norm_type)
    for optimizer in strategy.optimizers:
        strategy.sync_gradients(optimizer)
    return strategy.global_norm(list(module.parameters()), norm_type)
