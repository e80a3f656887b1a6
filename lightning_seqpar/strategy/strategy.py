"""``SeqParallelStrategy``: what Lightning's hooks call when a model is set up, and when a run ends."""

from __future__ import annotations

import functools
import inspect
import textwrap
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_seqpar.checkpoint.atomic_files import on_every_rank
from lightning_seqpar.config import CheckpointConfig, ParallelConfig, PlanSpec
from lightning_seqpar.layout.param_layout import is_split
from lightning_seqpar.parallel.apply import unshard
from lightning_seqpar.parallel.fsdp_units import fully_shard_options
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.parallel.summoned import summon
from lightning_seqpar.plan.sharding_plan import check_plan
from lightning_seqpar.releases import IS_INTERACTIVE, fabric, optimizers_to_device, pl
from lightning_seqpar.strategy.callbacks import averaging_callbacks, refuse_on_meta, share_metrics
from lightning_seqpar.strategy.ending import find_missing, shortens_refusals
from lightning_seqpar.strategy.environment import Environment
from lightning_seqpar.strategy.launcher import SeqParallelLauncher, is_hydra_sweep, is_script
from lightning_seqpar.strategy.loops import Loaders, Loops
from lightning_seqpar.strategy.model_setup import ModelSetup
from lightning_seqpar.strategy.precision import share_overflows, with_global_clipping, without_global_clipping
from lightning_seqpar.strategy.replicas import OnReplicas
from lightning_seqpar.strategy.saving import Saver, WholeFileIO
from lightning_seqpar.strategy.steps import Steps
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.user_input import nearest
from lightning_seqpar.verify.guards import before_training as guards

P = ParamSpec("P")
T = TypeVar("T")

_NONE_FOR_EMPTY = ("ddp", "fsdp", "checkpoint", "compile_options", "elementwise_optimizers", "whole_matrix_optimizers")
"""Fields whose keyword has None as its default, in place of an empty list or mapping."""


def _names_unknown_keywords(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate a constructor so that an unknown keyword raises ValueError with the nearest known one."""
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                raise ValueError(f"SeqParallelStrategy has no argument {name!r}; did you mean {nearest(name, known)}?")
        init(*args, **kwargs)

    return checked


def _documents_fields(cls: type[T]) -> type[T]:
    """Decorate a class: its docstring gets what the configuration says of its fields, for command lines and ``help()``."""
    fields = (f"{name}: {field.description or ''}" for name, field in ParallelConfig.model_fields.items())
    first, others = " " * 4, " " * 8
    told = "".join(f"{textwrap.fill(field, 116, initial_indent=first, subsequent_indent=others)}\n" for field in fields)
    cls.__doc__ = inspect.cleandoc(cls.__doc__ or "").replace("Args:\n", f"Args:\n{told}", 1)
    return cls


@_documents_fields
class SeqParallelStrategy(OnReplicas, pl.strategies.ParallelStrategy):
    """Tensor + sequence parallel training of an unmodified LightningModule.

    ``Trainer(devices=8, strategy=SeqParallelStrategy(tp=4, sp=True))``. The fields are those of
    :class:`~lightning_seqpar.config.ParallelConfig`; give them as keywords or as ``config=``, not both.

    Args:
        config: all of them as one ``ParallelConfig``, in place of keywords.
        accelerator: Lightning's own; leave it to the Trainer.
        parallel_devices: Lightning's own; leave it to the Trainer.
        cluster_environment: a Lightning environment, if the one that is found is not yours.
        checkpoint_io: a Lightning plugin that writes the checkpoint's file.
        precision_plugin: Lightning's own; use ``Trainer(precision=...)``.

    Raises:
        ValueError: for a keyword beside ``config=``, or anything that does not run yet.
        pydantic.ValidationError: for a value outside its rule.
    """

    @shortens_refusals
    @_names_unknown_keywords
    def __init__(
        self,
        tp: int = 1,
        sp: bool = True,
        dp: Literal["auto"] | int = "auto",
        cp: int = 1,
        cp_method: Literal["auto", "ring", "ulysses", "all_gather"] = "auto",
        pp: int = 1,
        pp_layers: list[int] | None = None,
        virtual_pp: int | None = None,
        pp_split_rank: int | None = None,
        order: str = "pp-dp-cp-tp",
        plan: str | PlanSpec | dict[str, Any] | list[dict[str, Any]] = "auto",
        data_parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp",
        ddp: dict[str, Any] | None = None,
        fsdp: dict[str, Any] | None = None,
        recompute: Literal["none", "activations", "selective", "full"] = "none",
        offload: Literal["none", "activations"] = "none",
        float8: Literal["none", "tensorwise", "rowwise"] = "none",
        regather: bool = True,
        vocab: bool = True,
        loss_chunk: int | None = None,
        tile_mlp: int | None = None,
        compile: bool = False,
        compile_options: dict[str, Any] | None = None,
        self_check: bool = True,
        check_every: int = 0,
        elementwise_optimizers: list[Any] | None = None,
        whole_matrix_optimizers: list[Any] | None = None,
        checkpoint: CheckpointConfig | dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = 1800,
        fp8_groups: bool = False,
        gloo_twins: bool = False,
        broadcast_batch: bool = False,
        layout: Literal["given", "auto"] = "given",
        config: ParallelConfig | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: fabric.plugins.ClusterEnvironment | None = None,
        checkpoint_io: fabric.plugins.CheckpointIO | None = None,
        precision_plugin: pl.plugins.precision.Precision | None = None,
    ) -> None:
        keywords = {name: value for name, value in locals().items() if name in ParallelConfig.model_fields}
        self.config = merged = checked_config(config, keywords)
        self._failed = False
        self.num_nodes = 1  # Lightning sets it
        self.environment = Environment(self, merged)
        self.loaders = Loaders(self.environment)
        self.steps = Steps(self.environment)
        self.stages = self.steps.stages
        self.loops = Loops(self.environment, self.steps)
        self.saver = Saver(self.environment, self.steps, self.loaders)
        self.model_setup = ModelSetup(self.environment)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io or WholeFileIO(),
            precision_plugin=precision_plugin,
        )
        self._forward_redirection = self.steps.redirection

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled or copied: what the Trainer gave and the model, and nothing of a run under way."""
        model = self.lightning_module  # first: a sharded one raises
        kept = ("config", "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io")
        return {
            "arguments": {
                **{name: getattr(self, name) for name in kept},
                "precision_plugin": without_global_clipping(self.precision_plugin),
            },
            "given": {"num_nodes": self.num_nodes, "_layer_sync": self._layer_sync, "_lightning_module": model},
            "launched": self._launcher is not None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A strategy that was given the same, and is not set up."""
        SeqParallelStrategy.__init__(self, **state["arguments"])
        vars(self).update(state["given"])
        self.model = self._lightning_module
        if state["launched"]:
            self._launcher = SeqParallelLauncher(self.cluster_environment, self.num_processes, self.num_nodes)  # type: ignore[arg-type]

    # ---- what this rank is -------------------------------------------------------------------------------------

    is_distributed = True
    """Whether Lightning must reduce over processes here; it refuses its batch-size finder then."""

    def holds(self, parameter: Tensor) -> bool:
        """Whether this rank has the parameter, or a part of it: stages of a pipeline (``pp``) have those of their own blocks alone.

        Parameters of other stages stay in the model as NaN without memory, have no gradients, and can't be written to.
        """
        record = record_of(self.environment.module)
        layout = None if record is None else record.layout.of(parameter)
        return record is None or record.stage is None or layout is None or record.stage.holds(layout.name)

    # ---- processes ---------------------------------------------------------------------------------------------

    @shortens_refusals
    def _configure_launcher(self) -> None:
        """Make the launcher, after all that can be checked before processes are started."""
        assert self.cluster_environment is not None
        ProcessTopology.from_config(self.config, self.num_nodes * self.num_processes)
        guards.check_backend(self.config, self.root_device.type)
        if not self.cluster_environment.creates_processes_externally:
            if IS_INTERACTIVE or not is_script():
                guards.refuse_notebook(self.num_nodes * self.num_processes)
            if is_hydra_sweep():
                guards.refuse_sweep(self.num_nodes * self.num_processes)
        guards.check_layer_sync(self._layer_sync)
        self._launcher = SeqParallelLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connect the processes and make their groups; make a model whole that an earlier run sharded, if callbacks copy it."""
        callbacks, module = self.environment.callbacks, self.environment.module
        if self.config.checkpoint.async_save:
            guards.refuse_links(callbacks)
        super().setup_environment()
        self.set_world_ranks()
        self.environment.connect()
        self.loaders.take_over_samplers()
        self.saver.make_group()
        if self.environment.fits:
            refuse_on_meta(callbacks, module)
        if averaging_callbacks(callbacks) and record_of(module) is not None:
            unshard(module)

    def process_dataloader(self, dataloader: object) -> object:
        """Divide the samples among the replicas, in the user's order; with ``broadcast_batch`` one rank of each reads."""
        return self.loaders.divide(dataloader)

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the world."""
        if name is not None and name.endswith("_dataloader()"):  # before Lightning calls process_dataloader for a loop
            self.loaders.begin(training=name.startswith("train"))
        super().barrier(name)

    # ---- model -------------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """A context in which initialisation on the meta device (of all with ``empty_init``) is recorded for ``setup``."""
        with super().tensor_init_context(), self.model_setup.recording(empty=bool(empty_init)):
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the model (once), fill it if it is on the meta device, wrap it into DDP, and then make the optimizers."""
        assert self.accelerator is not None
        env, setup, steps = self.environment, self.model_setup, self.steps
        steps.schedule.begin_run()
        self._failed = False
        self.accelerator.setup(trainer)
        module = env.module
        if env.fits and self.config.pp > 1:
            guards.refuse_in_stages(module, env.callbacks, self.config.pp)
        state, self.saver.state_for_meta_model = self.saver.state_for_meta_model, None
        meta_weights = setup.late_weights(module, state)
        self.precision_plugin.convert_module(module)
        env.share_streams()
        record = setup.shard(module)
        if meta_weights is not None:
            if setup.splits:  # before it has weights: of each a rank keeps its rows
                steps.split = setup.split_over_replicas(module, record)
            with env.phases.phase("filling the weights"):
                fill = functools.partial(meta_weights.fill_parameters, record)
                on_every_rank(fill, env.world, "the model's weights can't be read")
        self.model_to_device()
        if meta_weights is None:
            steps.split = setup.split_over_replicas(module, record)
        if steps.split is not None:
            steps.split.begin()
            evaluations = trainer.validate_loop, trainer.test_loop, trainer.predict_loop
            for loop in (*evaluations, trainer.fit_loop.epoch_loop.val_loop):
                # What it gathers would be of no use to training; Lightning's own FSDP has it off too.
                loop.inference_mode = False
        if record is not None:
            record.reset_calls()
            record.strategy = weakref.ref(self)
            for region in record.regions:
                region.observers.schedule = steps.schedule
            guards.refuse_callbacks(env.callbacks, steps.shards * self.config.pp)
        if env.fits:
            setup.share_out_averages(record, self.saver.average_state)
        share_metrics(env)
        steps.begin(record)
        if env.fits:
            with env.phases.phase("making optimizers"):
                if env.mean_size > 1 and steps.split is None:
                    steps.wrap_ddp()
                self.setup_optimizers(trainer)
            steps.note_hooks()
        self.setup_precision_plugin()
        if record is not None:
            share_overflows(self.precision_plugin, env.world)
        if env.fits:
            optimizers_to_device(self.optimizers, self.root_device)
        env.share_streams()
        if record is not None:
            record.note_versions()
        if env.fits:
            steps.watch(record)

    def model_to_device(self) -> None:
        """Move the model, which is sharded already, to this rank's device. What other stages hold is there already."""
        self.environment.module.to(self.root_device)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Call ``configure_optimizers``, which sees the classes and shapes of the model as it was written."""
        self.steps.make_optimizers(functools.partial(super().setup_optimizers, trainer))

    @pl.strategies.ParallelStrategy.optimizers.setter  # type: ignore[attr-defined, untyped-decorator]
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        """Set the optimizers of the training, checked; a callback may exchange them in its course."""
        self.steps.check_optimizers(optimizers)
        pl.strategies.ParallelStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    @pl.strategies.ParallelStrategy.precision_plugin.setter  # type: ignore[attr-defined, untyped-decorator]
    def precision_plugin(self, plugin: pl.plugins.precision.Precision | None) -> None:
        """Set the user's precision plugin, changed to clip by the norm of the whole model's gradient."""
        self._precision_plugin = None if plugin is None else with_global_clipping(plugin, self.steps)

    # ---- steps -------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's training step."""
        return self.steps.train(super().training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's validation step."""
        return self.steps.run_user_step("validation", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's test step."""
        return self.steps.run_user_step("test", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's prediction step."""
        return self.steps.run_user_step("predict", super().predict_step, *args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check, before the backward, that all ranks of a replica have one loss and that it reads no partial values."""
        self.steps.pre_backward(closure_loss)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward."""
        return self.steps.backward(super().backward, closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the optimizer's step; the partial gradients are summed right after the user's closure."""
        return self.steps.update(super().optimizer_step, optimizer, closure, model, **kwargs)

    # ---- loops -------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Compare the settings of the training over the ranks, and restore random states. Collective."""
        self.loops.begin_training()
        self.saver.begin_training()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Compare the number of batches over the ranks at the start of an epoch. Collective."""
        self.loops.begin_batch(batch_idx)

    def on_train_end(self) -> None:
        """Read what was compared in the last step, and wait until the last checkpoint is on the disk. Collective."""
        self.loops.end_training()
        self.saver.end_training()

    def on_validation_start(self) -> None:
        """Compare the number of batches over the ranks of a replica. Collective."""
        self.loops.begin_evaluation("validation")

    def on_validation_end(self) -> None:
        """Compare what the last steps returned over the ranks of a replica. Collective."""
        self.loops.end_evaluation("validation")

    def on_test_start(self) -> None:
        """Compare the number of batches over the ranks of a replica. Collective."""
        self.loops.begin_evaluation("test")

    def on_test_end(self) -> None:
        """Compare what the last steps returned over the ranks of a replica. Collective."""
        self.loops.end_evaluation("test")

    def on_predict_start(self) -> None:
        """Compare the number of batches; leave prediction writers on the first rank of each replica alone. Collective."""
        self.loops.begin_evaluation("predict")

    def on_predict_end(self) -> None:
        """Put prediction writers back, and compare what the last steps returned. Collective."""
        self.loops.end_evaluation("predict")

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state dict for a checkpoint: whole on the first rank, or for a folder this rank's parts. Collective."""
        return self.saver.model_state(super().lightning_module_state_dict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state dict for a checkpoint, in the same form as the model's. Collective."""
        return self.saver.optimizer_state(super().optimizer_state, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint: a file on the first rank, or a part of a folder on each. Collective."""
        self.saver.save(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint. Collective."""
        return self.saver.load(checkpoint_path, weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint."""
        self.saver.remove(filepath)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of the whole model; a model that is sharded already takes its parts. Collective."""
        self.saver.load_model(super().load_model_state_dict, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the moments of the whole model, of which each rank takes its parts, and restore the random states. Collective."""
        self.saver.load_optimizers(checkpoint)

    # ---- the end -----------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Report an error to the process that started the ranks, so that the others end too."""
        self._failed = True
        super().on_exception(exception)
        self.loops.unmute_writers()
        launcher = self.environment.launcher
        if launcher is not None and not self.environment.ending.together:
            env = self.environment  # which has no trainer yet, where the ranks were not started
            world = dist.group.WORLD if dist.is_initialized() else None
            launcher.tell(exception, None if world is None else lambda: find_missing(exception, world, env.trainer))

    def teardown(self) -> None:
        """Take DDP off the model. It stays sharded, and the groups stay, so that it can be saved after ``fit``."""
        module = self.lightning_module
        if module is not None and module._trainer is not None:  # else nothing has begun
            self.stages.leave_loops()
        self.environment.ending.leave()
        self.steps.end()
        self.model = module
        self.model_setup.undo()
        self.saver.end()
        record = None if module is None else record_of(module)
        if record is not None and record.stage is not None:
            record.stage.leave_out(torch.device("cpu"))
        unmovable = is_split if self._failed or self.root_device.type == "cpu" else lambda parameter: False
        if module is not None and any(parameter.is_meta or unmovable(parameter) for parameter in module.parameters()):
            # It never got its weights, or a graph that the error kept alive holds its rows: Lightning would fail to move it to
            # the CPU, and hide the error that ended the run.
            self._lightning_module = None
        super().teardown()
        self._lightning_module = module


def checked_config(config: ParallelConfig | None, given: Mapping[str, Any]) -> ParallelConfig:
    """A configuration from a whole one or from keywords; what does not run is refused before any process starts."""
    merged = _merge_config(config, given)
    guards.refuse_unsupported(merged)
    guards.check_ddp_options(merged.ddp)
    if merged.fsdp and merged.data_parallel == "ddp":
        raise ValueError(
            f"fsdp={merged.fsdp!r} beside data_parallel='ddp': nothing reads it; set data_parallel='fsdp', or leave it out"
        )
    fully_shard_options(merged.fsdp)
    guards.check_compile_options(merged.compile_options)
    check_plan(merged.plan)
    return merged


def _merge_config(config: ParallelConfig | None, given: Mapping[str, Any]) -> ParallelConfig:
    keywords: dict[str, Any] = {
        name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for name, value in given.items()
        if value is not None or name not in _NONE_FOR_EMPTY
    }
    if config is None:
        return ParallelConfig(**keywords)
    default = ParallelConfig()
    for name, value in keywords.items():
        own = getattr(default, name)
        if value != own and not (name == "timeout" and value == own.total_seconds()):
            raise ValueError(
                f"{name}={value!r} stands beside config=; put it into the config, ParallelConfig(..., {name}={value!r}), or "
                "drop config="
            )
    # Validated again: it may be a mapping from a command line, or a copy that was changed without validation.
    return ParallelConfig.from_omegaconf(dict(config) if isinstance(config, ParallelConfig) else config)


def grad_norm(module: pl.LightningModule, norm_type: float = 2.0) -> Tensor:
    """The norm of the whole model's gradient, as a 0-dim tensor: shards of every rank, whole parameters once.

    Call it where gradients are ready, such as ``on_before_optimizer_step``; under a ``SeqParallelStrategy`` it is
    collective: call it on every rank. Under any other strategy it is the plain norm, so the user's code runs on both.
    """
    strategy = module.trainer.strategy
    if not isinstance(strategy, SeqParallelStrategy):
        return torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None], norm_type)
    strategy.steps.sync_gradients(None)
    return strategy.steps.global_norm(list(module.parameters()), norm_type)


@contextmanager
def summoned(module: nn.Module, *names: str) -> Generator[None, None, None]:
    """A context in which a model's parameters, and their gradients, are whole, as in one process: for work on weights by hand.

    ``with lightning_seqpar.summoned(self): ...`` in a hook, a callback or a step. At its end each rank keeps its part of what
    became of them, unless an error left it. It is collective: call it on every rank. The model can't be run within. Under any other
    strategy it does nothing, so the user's code runs on both.

    Args:
        module: the LightningModule.
        names: of the parameters that are needed, or patterns of them (``model.blocks.*.weight``); none for all.

    Raises:
        ValueError: for a name that no parameter has, in a pipeline, or within another such context.
    """
    record = record_of(module)
    if record is None:
        yield
        return
    strategy = record.strategy()
    if isinstance(strategy, SeqParallelStrategy):
        strategy.steps.settle_rows()
        strategy.steps.sync_gradients(None)
    if record.versions:
        record.check_versions()
    with summon(record, names):
        yield
    if record.versions:
        record.note_versions()
