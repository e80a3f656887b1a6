"""The same engine for a training loop of your own: ``Fabric(strategy=SeqParallelFabricStrategy(tp=2))``.

A model is found out and sharded at its first call, whose arguments are the example that a plan is inferred and proved with: until
then it is whole, on the CPU, and so are its state and that of its optimizers, which may be loaded.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.data.batch import map_tensors
from lightning_seqpar.data.sampler import BroadcastLoader, OrderSeed, inject_sampler, replica_workers
from lightning_seqpar.distributed.rng import DEVICES
from lightning_seqpar.releases import (
    BackwardSyncControl,
    FabricLauncher,
    fabric,
    optimizers_to_device,
    register_strategies,
    validate_keys,
)
from lightning_seqpar.strategy.environment import Environment
from lightning_seqpar.strategy.model_setup import ModelSetup
from lightning_seqpar.strategy.precision import clip_by_norm, share_overflows
from lightning_seqpar.strategy.replicas import OnReplicas
from lightning_seqpar.strategy.saving import Saver, WholeFileIO
from lightning_seqpar.strategy.steps import Steps, made_whole
from lightning_seqpar.strategy.strategy import checked_config
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.verify.guards.before_training import check_backend

__all__ = ["SeqParallelFabricStrategy"]


class _LoopOfTheUsers(Environment):
    """The processes of a run in which the user's own loop calls the model: there is no Trainer, and no callback."""

    has_trainer = automatic = is_apart = False
    fits = begins_window = True
    callbacks: Any = ()
    launcher = None

    @property
    def module(self) -> Any:
        """The user's module; ValueError before there is one."""
        module: nn.Module | None = self.strategy.module  # type: ignore[attr-defined]
        if module is None:
            raise ValueError("no model is set up: call fabric.setup(model) first")
        return module


class _Entry(nn.Module):
    """What Fabric calls in the place of the model."""

    def __init__(self, module: nn.Module, strategy: SeqParallelFabricStrategy) -> None:
        super().__init__()
        self.module, self._strategy = module, weakref.ref(strategy)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        strategy = self._strategy()
        assert strategy is not None
        return strategy.call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError(f"a copy of {type(self.module).__name__} behind fabric.setup would train with it; copy it before")


class _SyncControl(BackwardSyncControl):
    """``fabric.no_backward_sync``."""

    def __init__(self, hold: Callable[[], AbstractContextManager[None]]) -> None:
        self._hold = hold

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._hold() if enabled else nullcontext()


class SeqParallelFabricStrategy(OnReplicas, fabric.strategies.parallel.ParallelStrategy):
    """Tensor + sequence parallel training of an unmodified model in a loop of your own.

    ``Fabric(devices=8, strategy=SeqParallelFabricStrategy(tp=4, sp=True))``, and then Fabric's own ``setup``,
    ``setup_dataloaders`` (samples are divided among the replicas), ``backward``, ``no_backward_sync``, ``clip_gradients``,
    ``save`` and ``load`` (files of the whole model, for any topology). All ranks of a replica must be given the same batches.

    Args:
        tp: over how many ranks the features of linears are divided.
        sp: whether activations between the blocks' columns and rows are divided along the sequence, ``[b, s/tp, h]``.
        config: all fields as one ``ParallelConfig``, in place of keywords.
        accelerator: Fabric's own, as are ``parallel_devices``, ``cluster_environment``, ``checkpoint_io`` and ``precision``.
        fields: the other fields of :class:`~lightning_seqpar.config.ParallelConfig`.

    Raises:
        ValueError: for what does not run with Fabric: ``pp``, and ``checkpoint: {async_save: true}``.
        pydantic.ValidationError: for a value outside its rule.
    """

    def __init__(
        self,
        tp: int = 1,
        sp: bool = True,
        *,
        config: ParallelConfig | None = None,
        accelerator: fabric.accelerators.accelerator.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: fabric.plugins.ClusterEnvironment | None = None,
        checkpoint_io: fabric.plugins.CheckpointIO | None = None,
        precision: fabric.plugins.Precision | None = None,
        **fields: Any,
    ) -> None:
        self.config = checked_config(config, {"tp": tp, "sp": sp, **fields})
        if self.config.layout == "auto":
            raise ValueError(
                "layout='auto' in a loop of your own: the model is not known when processes start; find a layout by "
                "lightning_seqpar.fit_layout(model, ...), or seqpar plan --fit, and give its fields"
            )
        if self.config.pp > 1:
            raise ValueError(f"pp={self.config.pp}: a loop of your own can't be run in stages; use the Trainer, or pp=1")
        if self.config.checkpoint.async_save:
            raise ValueError("checkpoint={'async_save': True}: fabric.save returns when all is written; leave async_save out")
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io or WholeFileIO(), precision)
        self.module: nn.Module | None = None  # the user's
        self._model: nn.Module | None = None
        self.optimizers: list[Optimizer] = []
        self._num_nodes = 1
        self._layer_sync = None
        self.environment = _LoopOfTheUsers(self, self.config)  # type: ignore[arg-type]
        self.steps = Steps(self.environment)
        self._setup = ModelSetup(self.environment)
        self._saver = Saver(self.environment, self.steps, None)
        self._order_seed, self._loaders, self._divides = OrderSeed(), 0, False
        self._is_set_up = self._in_step = self._holds_back = False
        self._calls = 0  # with gradients, of this step
        self._backward_sync_control = _SyncControl(self._holding_back)

    @property
    def model(self) -> nn.Module | None:
        """What is called: the user's module, or what is around it for the replicas."""
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """The number of nodes, which Fabric sets."""
        return self._num_nodes

    # ---- processes and data ------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        ProcessTopology.from_config(self.config, self.num_nodes * self.num_processes)
        check_backend(self.config, self.root_device.type)
        self._launcher = FabricLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connect the processes and make their groups. Collective."""
        super().setup_environment()
        self.set_world_ranks()
        self.environment.connect()
        self.environment.share_streams()  # by which a loader draws its order

    @property
    def distributed_sampler_kwargs(self) -> None:  # type: ignore[override]
        """None: Fabric asks this of each loader whose samples are to be divided, which :meth:`process_dataloader` does."""
        self._divides = True

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divide samples among the replicas, in the user's order; with ``broadcast_batch`` one rank of each reads. Collective."""
        divides, self._divides = self._divides, False
        if divides:
            dataloader = inject_sampler(dataloader, self.groups, self._order_seed, place=self._loaders)
            self._loaders += 1
        replica_workers(dataloader, self.dp_rank)
        axes = self.groups.replica_axes
        if not self.config.broadcast_batch or self.groups.size(axes) == 1:
            return dataloader
        return BroadcastLoader(dataloader, self.groups[axes], self.groups.source(axes))

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the replicas, for which the world stands too; the ranks of one have the same value."""
        return self.reduce(tensor, None if group is dist.group.WORLD else group, reduce_op)

    # ---- the model ---------------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """A context in which a model is made whole on the CPU, with uninitialised memory if it is to be loaded (``empty_init``)."""
        stack = ExitStack()
        stack.enter_context(super().module_init_context(empty_init))
        stack.enter_context(torch.device("cpu"))
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: of a model that is whole a rank's device may not hold more than its part, which goes there when it is cut."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """What Fabric calls from now on; the model stays as it is until its first call."""
        if self.module is not None:
            raise ValueError(
                f"fabric.setup({type(module).__name__}): {type(self.module).__name__} is set up already, and a strategy trains one "
                "model; make them parts of one module, or use a model that does not train as it is"
            )
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            raise ValueError(
                f"{type(module).__name__} has tensors on the meta device, which nothing fills here; make it in "
                "fabric.init_module(empty_init=True), which gives it memory on the CPU, and load its weights"
            )
        self.module = self.model = module
        return _Entry(module, self)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Note an optimizer of the model; ValueError for one that would be wrong on shards."""
        self.optimizers.append(optimizer)
        self.steps.check_optimizers(self.optimizers)
        if self._is_set_up and self.steps.split is not None:
            self.steps.split.adopt(optimizer)
        return optimizer

    def _set_up(self, args: Any, kwargs: Any) -> None:
        """Find a plan with the arguments of the first call, prove it, and cut the model and the states of its optimizers."""
        env, setup, steps, module = self.environment, self._setup, self.steps, self.environment.module
        stand_in: Any = vars(module).get("forward")  # Fabric's, if another method is called (training_step)
        method = "forward"
        if getattr(stand_in, "__module__", "") == fabric.wrappers.__name__:
            method = inspect.getclosurevars(stand_in).nonlocals["method_name"]
            del module.forward
        env.called_with = method, args, kwargs
        states = [(optimizer, optimizer.state_dict()) for optimizer in self.optimizers if optimizer.state]
        env.share_streams()
        record = setup.shard(module)
        module.to(self.root_device)
        for optimizer, _ in states:
            optimizer.state.clear()
        steps.split = setup.split_over_replicas(module, record)
        if record is not None:
            record.reset_calls()
            record.strategy = weakref.ref(self)
            for region in record.regions:
                region.observers.schedule = steps.schedule
        steps.begin(record)
        steps.schedule.note_draws(DEVICES)  # of a step's later calls nobody notes whether they draw
        if steps.split is not None:
            steps.split.begin()
            for optimizer in self.optimizers:
                steps.split.adopt(optimizer)
        elif env.mean_size > 1:
            steps.wrap_ddp()
        for optimizer, state in states:
            self._saver.load_optimizer(optimizer, state)
        steps.check_optimizers(self.optimizers)
        steps.note_hooks()
        if record is not None:
            share_overflows(self.precision, env.world)
        optimizers_to_device(self.optimizers, self.root_device)
        env.share_streams()
        steps.watch(record)
        if method != "forward":
            vars(module)["forward"] = stand_in
        env.called_with, self._is_set_up = None, True

    # ---- steps -------------------------------------------------------------------------------------------------

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. A step is a call with gradients and its backward; of several calls before one, all until the update."""
        if torch.is_inference_mode_enabled():  # whose tensors tell no versions
            with torch.inference_mode(False), torch.no_grad():
                args, kwargs = map_tensors(lambda x: x.clone() if x.is_inference() else x, (args, kwargs))
                return self.call(*args, **kwargs)
        if not self._is_set_up:
            with torch.enable_grad(), torch.autocast(self.root_device.type, enabled=False):
                self._set_up(args, kwargs)
        trains = torch.is_grad_enabled()
        self._calls += trains
        if not self._in_step and trains:
            self._in_step, self._calls = True, 1
            return self.steps.train(self._run, *args, **kwargs)
        if not self._in_step:
            return self.steps.run_user_step("validation", self._run, *args, **kwargs)
        out = self._run(*args, **kwargs)
        return out if trains else made_whole(out)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        assert self.model is not None
        if (ddp := self.environment.ddp) is None:
            return self.model(*args, **kwargs)
        ddp.require_backward_grad_sync = False  # it is prepared for each backward
        return ddp(*args, **kwargs)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run a backward; behind it gradients are those of the whole model's loss, unless ``no_backward_sync`` puts that off."""
        if (ddp := self.environment.ddp) is not None:
            ddp.require_backward_grad_sync = not self._holds_back
        self._in_step = self._calls > 1  # else another call of this step may have its backward later
        self.steps.pre_backward(tensor)
        self.steps.backward(super().backward, tensor, module, *args, **kwargs)  # type: ignore[arg-type]
        if not self._holds_back:
            self.steps.before_on_after_backward()

    @contextmanager
    def _holding_back(self) -> Generator[None, None, None]:
        """A context for micro-batches behind whose backwards nothing is summed yet; fsdp, which holds rows, sums its own."""
        before, self._holds_back = self._holds_back, True
        try:
            yield
        finally:
            self._holds_back = before

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run the optimizer's step, with which a step ends."""
        self._in_step = False
        return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> Tensor:
        """Clip by the norm of the whole model's gradient, which is returned (0-dim). Collective."""
        self.precision.unscale_gradients(optimizer)
        self.steps.sync_gradients(optimizer)
        parameters: list[Tensor] = list(self.precision.main_params(optimizer))
        total = self.steps.global_norm(parameters, float(norm_type))
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"the gradient's norm of order {norm_type} is {float(total)}, by which nothing can be clipped; "
                "error_if_nonfinite=False lets it pass"
            )
        clip_by_norm(parameters, total, max_norm)
        return total

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of the gradients. Collective."""
        self.steps.sync_gradients(optimizer)
        super().clip_gradients_value(module, optimizer, clip_val)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The whole model's state dict on the first rank, with meta tensors elsewhere; or parts, for a folder. Collective."""
        if not isinstance(module, _Entry):
            return super().get_module_state_dict(module)
        return self._saver.model_state(module.module.state_dict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state dict, in the same form as the model's. Collective."""
        if self.module is None:
            return super().get_optimizer_state(optimizer)
        return self._saver.optimizer_state(super().get_optimizer_state, optimizer)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: dict[str, Any] | None = None
    ) -> None:
        """Write a file on the first rank, or with ``checkpoint={'format': 'sharded'}`` a folder's part on each. Collective."""
        if self.module is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        self._saver.save(self._convert_stateful_objects_in_state(state, filter or {}), path, storage_options)

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of the whole model, of which one that is sharded takes its parts. Collective."""
        if not isinstance(module, _Entry):
            super().load_module_state_dict(module, dict(self._saver.made_whole(state_dict)), strict)
            return

        def usual(checkpoint: Mapping[str, Any], *, strict: bool) -> None:
            module.module.load_state_dict(checkpoint["state_dict"], strict=strict)

        self._saver.load_model(usual, {"state_dict": state_dict}, strict)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore what ``state`` names; what is left of the checkpoint is returned. Collective."""
        if self.module is None:
            return super().load_checkpoint(path, state, strict)
        checkpoint = self._saver.read(path, weights_only)
        if isinstance(state, nn.Module):
            self.load_module_state_dict(state, checkpoint, strict)
            return {}
        if isinstance(state, Optimizer):
            self._saver.load_optimizer(state, checkpoint)
            return {}
        if not state:
            return dict(self._saver.made_whole(checkpoint))
        validate_keys(state.keys(), checkpoint.keys(), strict=strict)
        for name in [name for name in state if name in checkpoint]:
            one, value = state[name], checkpoint.pop(name)
            if isinstance(one, nn.Module):
                self.load_module_state_dict(one, value, strict)
            elif isinstance(one, Optimizer):
                self._saver.load_optimizer(one, value)
            elif hasattr(one, "load_state_dict"):
                one.load_state_dict(self._saver.made_whole(value))
            else:
                state[name] = self._saver.made_whole(value)
        return dict(self._saver.made_whole(checkpoint))


register_strategies(fabric.strategies.STRATEGY_REGISTRY, "SeqParallelFabricStrategy", SeqParallelFabricStrategy)
