"""``SeqParallelStrategy``: what Lightning's hooks call when a model is set up, and when a run ends."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, ParamSpec

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from omegaconf import OmegaConf
from torch import Tensor, nn

from lightning_seqpar.checkpoint.atomic_files import on_every_rank
from lightning_seqpar.config import VERSION, CheckpointConfig, ParallelConfig, PlanSpec
from lightning_seqpar.distributed.autograd import storage_id
from lightning_seqpar.distributed.host import OneStepLate
from lightning_seqpar.distributed.rank_consistency import check_agreement, describe_model
from lightning_seqpar.distributed.rng import share_streams
from lightning_seqpar.init.deferred import DeferredInit
from lightning_seqpar.init.meta_weights import LateWeights
from lightning_seqpar.layout.replica_rows import is_split
from lightning_seqpar.parallel.apply import parallelize, unshard
from lightning_seqpar.parallel.compiled_blocks import BlockGraphs, compile_plain_blocks
from lightning_seqpar.parallel.context import split_context
from lightning_seqpar.parallel.fsdp_units import block_lists, fully_shard_options, units_among
from lightning_seqpar.parallel.fully_sharded import FullySharded
from lightning_seqpar.parallel.grad_sync import GradSync
from lightning_seqpar.parallel.module_changes import ModuleChange
from lightning_seqpar.parallel.sharded_model import ShardedModel, record_of, whole_model
from lightning_seqpar.parallel.summoned import summon
from lightning_seqpar.parallel.synced_norms import sync_batch_norms
from lightning_seqpar.parallel.tiled_mlps import MLPTiles
from lightning_seqpar.parallel.unsharded import change_unsharded
from lightning_seqpar.pipeline.cut import Cut
from lightning_seqpar.pipeline.stage import Stage
from lightning_seqpar.plan.choice import check_plan
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.strategy.averages import (
    averages_of,
    averaging_callbacks,
    refuse_on_meta,
    save_whole,
    shard_average,
)
from lightning_seqpar.strategy.child_watch import exit_status, is_lost_peer, record_for_torchrun
from lightning_seqpar.strategy.data_parallel import RootCall
from lightning_seqpar.strategy.launcher import SeqParallelLauncher
from lightning_seqpar.strategy.missing_ranks import find_missing
from lightning_seqpar.strategy.precision import share_overflows, without_global_clipping
from lightning_seqpar.strategy.refusals import Refusals, is_refusal, is_verbose, shorten_traceback, shortens_refusals
from lightning_seqpar.strategy.summary import describe_compiled, describe_stages, summarize, summarize_briefly
from lightning_seqpar.strategy.tuning import TuningStrategy
from lightning_seqpar.strategy.weights_by_hand import WeightWatch
from lightning_seqpar.user_input import nearest
from lightning_seqpar.verify.coverage import Coverage, cover
from lightning_seqpar.verify.guards.callbacks import refuse_callbacks
from lightning_seqpar.verify.guards.config import (
    check_compile_options,
    check_ddp_options,
    refuse_unsupported,
    syncs_batch_norms,
)
from lightning_seqpar.verify.guards.heads import context_method, refuse_uneven_heads
from lightning_seqpar.verify.guards.pipeline import refuse_in_stages
from lightning_seqpar.verify.plan_file import write_plan
from lightning_seqpar.verify.prover import Proved, Prover

P = ParamSpec("P")

_NONE_FOR_EMPTY = ("ddp", "fsdp", "checkpoint", "compile_options", "elementwise_optimizers")
"""Fields whose keyword has None as its default, in place of an empty list or mapping."""

_SIZES = re.compile(
    r"must match the size|cannot be multiplied|size mismatch|does not broadcast|out of (?:range|bounds)|is invalid for input"
    r"|[Ee]xpected size"
)
"""In torch's messages about sizes that do not fit."""

_REACHES_NO_MODULE = (
    "dp",  # "auto" and a number make one topology, which is compared
    "ddp",  # each fit wraps the model anew
    "check_every",  # each fit has a schedule of its own
    "broadcast_batch",  # who reads the data
    "checkpoint",  # how files are written
    "elementwise_optimizers",  # each fit makes its optimizers anew
)
"""Fields of the configuration that change nothing in a sharded module, each with its reason."""


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


class SeqParallelStrategy(TuningStrategy):
    """Tensor + sequence parallel training of an unmodified LightningModule.

    ``Trainer(devices=8, strategy=SeqParallelStrategy(tp=4, sp=True))``. The fields are those of
    :class:`~lightning_seqpar.config.ParallelConfig`; give them as keywords or as ``config=``, not both.

    Args:
        tp: Tensor-parallel size: over how many ranks each linear is split.
        sp: Sequence parallelism over the tensor-parallel group (arXiv 2205.05198); idle at ``tp=1``.
        dp: Data-parallel size; ``auto`` takes what the world leaves, a number is checked against it.
        cp: Context-parallel size: over how many ranks each sequence is dealt out.
        cp_method: How attention is computed across the context-parallel ranks: ``ulysses`` (each rank some heads), ``ring``
            (keys and values travel), ``all_gather`` (each rank all keys and values), or ``auto``, the first of them that
            fits.
        pp: Pipeline-parallel size: over how many ranks the blocks are dealt out, as stages. Micro-batches are the batches of
            ``accumulate_grad_batches``.
        pp_layers: How many blocks each stage has, or each chunk in the model's order; none for stages that cost alike.
        virtual_pp: How many chunks of blocks each stage has (interleaving), or none for one: less waiting, and more is sent.
        pp_split_rank: First pipeline rank of the decoder in an encoder-decoder model, or none for stages that cost alike.
        order: The axes, outermost first; ranks along the last one are adjacent.
        plan: ``auto``, a family's name, the path of a YAML file, or ``{base: ..., rules: [...]}``.
        data_parallel: What synchronises the data-parallel replicas: ``ddp``, or ``fsdp`` (torch's ``fully_shard`` for each block),
            where each replica holds its rows of parameters, gradients and moments alone.
        ddp: Options passed on to ``DistributedDataParallel``.
        fsdp: Options of ``fsdp``: ``reshard_after_forward``, ``mp_policy`` and ``offload_policy`` of ``fully_shard``, and
            ``units``, patterns of the modules that are gathered each on its own, in place of the blocks.
        recompute: What runs again in the backward instead of being kept: ``full``, each block, of which only the input is
            kept; ``selective``, the attention in each block; ``none``. Gradients are the same to the last bit.
        regather: Gather a column linear's input again in the backward, and make norms and activations again, instead of
            keeping them. ``auto``: where the whole activation has more than 2 MiB; smaller ones are kept.
        vocab: Shard embeddings and heads over a vocabulary, and the loss on their logits, over the tensor-parallel ranks, wherever
            they are found and a plan that you write whole does not say otherwise.
        loss_chunk: Tokens of which the head and the loss make logits at once; the backward makes them once more. With ``tp`` the
            head must be sharded by vocabulary, as it is by default. None makes all at once.
        tile_mlp: Tokens of which the MLP of a block computes at a time; the backward computes each such tile once more, so that
            what an MLP needs does not grow with the sequence. None computes all at once.
        compile: Compile each block by ``torch.compile`` after it was sharded, one graph for each kind of block.
        compile_options: Options passed on to ``torch.compile``: ``backend``, ``mode``, ``options``, ``dynamic``.
        self_check: Check the plan before training, on a copy, whole against sharded.
        check_every: Repeat the run-time checks every so many steps, besides steps 1 to 16 and 32, 64, 128, ...
        elementwise_optimizers: Classes of optimizers of yours that update each element by itself, as import paths (in Python also
            the classes); each is tried on small tensors, whole and in halves, before training.
        broadcast_batch: One rank of each replica reads the batches and sends them to the others: for iterable
            data sets that give each process other samples, dealt out by ``strategy.dp_rank`` and ``dp_size``.
            Off, every rank reads for itself and checksums are compared.
        checkpoint: Form of the checkpoints: ``single``, one file, or ``sharded``, a folder; ``async_save`` writes the folder while
            training goes on.
        process_group_backend: Backend of the process groups; none means gloo, and on CUDA nccl with gloo beside it for what
            lies on the CPU.
        timeout: How long a collective may wait for its peers, in seconds or as a timedelta.
        fp8_groups: Make the amax-reduction groups (tp × dp) of fp8 training. Not run yet.
        gloo_twins: Make a gloo group beside each group of axes, for objects and for threads of their own.
        config: all of these as one ``ParallelConfig``, in place of keywords.
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
        data_parallel: Literal["ddp", "fsdp"] = "ddp",
        ddp: dict[str, Any] | None = None,
        fsdp: dict[str, Any] | None = None,
        recompute: Literal["none", "selective", "full"] = "none",
        regather: Literal["auto"] | bool = "auto",
        vocab: bool = True,
        loss_chunk: int | None = None,
        tile_mlp: int | None = None,
        compile: bool = False,
        compile_options: dict[str, Any] | None = None,
        self_check: bool = True,
        check_every: int = 0,
        elementwise_optimizers: list[Any] | None = None,
        checkpoint: CheckpointConfig | dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = 1800,
        fp8_groups: bool = False,
        gloo_twins: bool = False,
        broadcast_batch: bool = False,
        config: ParallelConfig | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        keywords = {name: value for name, value in locals().items() if name in ParallelConfig.model_fields}
        merged = _merge_config(config, keywords)
        refuse_unsupported(merged)
        check_ddp_options(merged.ddp)
        if merged.fsdp and merged.data_parallel != "fsdp":
            raise ValueError(
                f"fsdp={merged.fsdp!r} beside data_parallel={merged.data_parallel!r}: nothing reads it; set data_parallel='fsdp', "
                "or leave it out"
            )
        fully_shard_options(merged.fsdp)
        check_compile_options(merged.compile_options)
        check_plan(merged.plan)  # here, so that wrong rules raise before any process starts
        super().__init__(
            merged,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._summarized = False
        self._recorder: DeferredInit | None = None
        self._failed = False
        self._unsharded_changes: list[ModuleChange] = []  # of a model that is not sharded
        self._reverts: Callable[[LightningModule], Any] | None = None  # takes back what a plugin has changed

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled or copied: what the Trainer gave, the model and the optimizers, and nothing of a run under way."""
        return {
            "model": self.lightning_module,  # first: a sharded one raises
            "arguments": {
                "config": self.config,
                "accelerator": self.accelerator,
                "parallel_devices": self.parallel_devices,
                "cluster_environment": self.cluster_environment,
                "checkpoint_io": self.checkpoint_io,
                "precision_plugin": without_global_clipping(self.precision_plugin),
            },
            "num_nodes": self.num_nodes,
            "layer_sync": self._layer_sync,
            "launched": self._launcher is not None,
            "optimizers": self.optimizers,
            "lr_scheduler_configs": self.lr_scheduler_configs,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A strategy that was given the same, and is not set up."""
        SeqParallelStrategy.__init__(self, **state["arguments"])
        self.num_nodes, self._layer_sync = state["num_nodes"], state["layer_sync"]
        self._lightning_module = self.model = state["model"]
        self.optimizers, self.lr_scheduler_configs = state["optimizers"], state["lr_scheduler_configs"]
        if state["launched"]:
            assert self.cluster_environment is not None
            self._launcher = SeqParallelLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register names for ``Trainer(strategy=...)``: ``seqpar``, and ``seqpar_tp2`` to ``seqpar_tp64``."""
        for name, tp in (("seqpar", 1), *((f"seqpar_tp{2**n}", 2**n) for n in range(1, 7))):
            description = f"SeqParallelStrategy(tp={tp})"
            strategy_registry.register(name, cls, description=description, override=True, tp=tp)

    def __repr__(self) -> str:
        default = ParallelConfig()
        values = {name: getattr(self.config, name) for name in ParallelConfig.model_fields}
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name))
        return f"SeqParallelStrategy({shown}) of lightning.pytorch"

    # ---- model -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Shard the model (once), fill it if it is on the meta device, wrap it into DDP, and then make the optimizers."""
        assert self.accelerator is not None
        self._schedule.begin_run()
        self._failed, self._is_set_up = False, True
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self.config.pp > 1:
            refuse_in_stages(module, trainer.callbacks, self.config.pp)  # type: ignore[attr-defined]
        meta_weights = self._late_weights(module)
        self.precision_plugin.convert_module(module)
        share_streams(
            self.groups[self.groups.replica_axes], self.groups.source(self.groups.replica_axes), self.root_device
        )
        record = self._parallelize(module)
        if meta_weights is not None and self._splits:
            self._split = self._split_over_replicas(
                module, record
            )  # before it has weights: of each a rank keeps its rows
        if meta_weights is not None:
            with self._phases.phase("filling the weights", meta_weights.count) as filling:
                on_every_rank(
                    lambda: meta_weights.fill_parameters(record, filling.advance),
                    self._world,
                    "the model's weights can't be read",
                )
        self.model_to_device()
        if meta_weights is None:
            self._split = self._split_over_replicas(module, record)
        if self._split is not None:
            self._split.begin()
            for loop in (
                trainer.validate_loop,
                trainer.test_loop,
                trainer.predict_loop,
                trainer.fit_loop.epoch_loop.val_loop,
            ):
                loop.inference_mode = (
                    False  # what it gathers would be of no use to training; Lightning's own FSDP has it off too
                )
        if record is not None:
            record.reset_calls()
            record.strategy = weakref.ref(self)
            for region in record.regions:
                region.observers.schedule = self._schedule
            refuse_callbacks(trainer.callbacks, self._shards * self.config.pp)  # type: ignore[attr-defined]
        if fitting:
            self._share_out_averages(record)
        self._share_metrics()
        self._sync = None
        self._steps, self._comparisons = {}, OneStepLate()
        if fitting:
            if record is not None:
                self._sync = GradSync(record.layout, self.groups)
                if record.stage is not None:
                    self._begin_stages(record.stage)
            self._apply_layer_sync(module)
            with self._phases.phase("making optimizers"):
                if self._mean_size > 1 and self._split is None:
                    self._wrap_ddp(module)
                self.setup_optimizers(trainer)
            self._watch_all_steps()
            self._note_hooks()
        self.setup_precision_plugin()
        if record is not None:
            share_overflows(self.precision_plugin, self._world)
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
        share_streams(
            self.groups[self.groups.replica_axes], self.groups.source(self.groups.replica_axes), self.root_device
        )
        if record is not None:
            record.note_versions()
        if fitting and record is not None and any(layout.is_sharded for layout in record.layout.values()):
            self._weights = WeightWatch(record)
            self._weights.begin(trainer)

    def setup_environment(self) -> None:
        """Connect the processes, and make a model whole that an earlier run sharded, if callbacks are about to copy it.

        Raises:
            ValueError: if they are, and the model has no weights yet.
        """
        super().setup_environment()
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        if self._trainer.state.fn == TrainerFn.FITTING:
            refuse_on_meta(callbacks, self._module)
        if averaging_callbacks(callbacks) and record_of(self._module) is not None:
            unshard(self._module)

    def _share_out_averages(self, record: ShardedModel | None) -> None:
        """Cut the averages of weights as the model is cut, from the first rank's. Collective over the world."""
        for average in averages_of(self._trainer.callbacks):  # type: ignore[attr-defined]
            self._make_replicas_equal(average)
            if record is not None:
                shard_average(average, record)
                save_whole(average, functools.partial(self._average_state_dict, record))

    def _parallelize(self, module: LightningModule) -> ShardedModel | None:
        """Find and prove a plan, and shard the model by it, unless an earlier run did.

        Returns:
            The record of the sharded model; None at tp 1.
        """
        tp = self.groups.size("tp")
        earlier = record_of(module)
        config = self.config
        made_by = (
            self.groups.topology,
            {
                name: repr(getattr(config, name))
                for name in ParallelConfig.model_fields
                if name not in _REACHES_NO_MODULE
            },
            self._syncs_batch_norms,
            tp > 1 or not self._changes_unsharded or self._trainer.state.fn == TrainerFn.FITTING,
        )
        if earlier is not None:
            if earlier.made_by == made_by:
                return earlier
            unshard(module)  # it was sharded for another topology or by another plan
        with self._phases.phase("comparing the ranks' models"):
            facts = {**describe_model(module), "sync_batchnorm": self._syncs_batch_norms}
            check_agreement(facts, self._world, self.root_device)
        self._make_replicas_equal(module)
        if tp == 1 and (config.cp > 1 or config.pp > 1):
            return self._split_unsharded(module, made_by)
        if tp == 1:
            changes = self._recompute_unsharded(module)
            if config.compile:
                changes += compile_plain_blocks(module, BlockGraphs(config.compile_options))
            compiled = [f"compile: {len(changes)} blocks"] if config.compile else []
            how = "sharded" if self._splits else "plain"
            nothing = f"none: tp is 1, so nothing is sharded over tp and sp is idle; this is {how} data parallelism"
            if self._splits or self._trainer.state.fn == TrainerFn.FITTING:
                try:
                    changes += sync_batch_norms(module, self.groups, every=self._syncs_batch_norms)
                except ValueError:
                    for change in reversed(changes):
                        change.undo()
                    raise
            self._log_summary([nothing, *compiled])
            if not self._splits:
                self._unsharded_changes = changes
                return None
            record = whole_model(module, self.groups)
            record.made_by, record.changes = made_by, changes
            return record
        phases = self._phases
        prover = Prover(module, self._trainer, self.config, self.groups, self.root_device, phases)
        proved = prover.prove()
        plans = proved.plans
        plan_text = "; ".join(f"{plan.source}: {plan.to_yaml()}" for plan in plans)
        check_agreement({"the plan": plan_text}, self._world, self.root_device)
        hooked = [name for name, module in module.named_modules() if module._forward_hooks and name]
        cut = prover.find_cut(plans) if config.pp > 1 else None
        if cut is not None:
            proved.lines += prover.check_stages(plans, cut)
        with phases.phase("cutting the model"):
            record = parallelize(
                *(module, plans, self.groups),
                sp=config.sp,
                regather=config.regather,
                loss_chunk=config.loss_chunk,
                recompute=config.recompute,
                tiles=self._tiles,
                cp_method=config.cp_method,
                compiler=BlockGraphs(config.compile_options) if config.compile else None,
            )
        record.made_by = made_by
        if cut is not None:
            self._cut(record, cut)
        try:
            record.changes += sync_batch_norms(module, self.groups, every=self._syncs_batch_norms)
        except ValueError:
            unshard(module)
            raise
        if proved.frozen:
            record.why_frozen = proved.frozen
            record.stay_frozen = frozenset(name for name, p in module.named_parameters() if not p.requires_grad)
            rank_zero_warn(f"lightning_seqpar: the plan is proved only while what is frozen stays so: {proved.frozen}")
        coverage = cover(record, plans, proved.known, sp=config.sp)
        compiled = [] if record.graphs is None else [describe_compiled(record)]
        lines = [
            _describe_plan(record, plans, coverage),
            *describe_stages(record),
            *coverage.reasons,
            *proved.lines,
            *compiled,
        ]
        self._log_summary(lines, coverage, plans)
        for warning in coverage.warnings:
            rank_zero_warn(warning)
        vocabulary = {match.name for match in record.matches if match.rule.style == "vocab"}  # their outputs look whole
        if seen := [name for name in hooked if record.is_inside(name) and name not in vocabulary]:
            rank_zero_warn(
                f"lightning_seqpar: forward hooks of yours sit on {', '.join(seen[:3])}{' ...' if len(seen) > 3 else ''}; "
                "they will see this rank's part of the activations"
            )
        return record

    def _cut(self, record: ShardedModel, cut: Cut) -> None:
        """Keep one stage of a model."""
        record.layout.note_stages(cut.shared)
        record.stage = Stage(record.model, cut, self.groups, self.root_device)

    def _split_unsharded(self, module: LightningModule, made_by: object) -> ShardedModel:
        """Split a model that tp does not shard along the sequence (cp), into stages (pp), or both, once that is proved."""
        config = self.config
        prover = Prover(module, self._trainer, config, self.groups, self.root_device, self._phases)
        needs_proof = config.cp > 1 or self._needs_proof
        proved = prover.prove_unsharded() if needs_proof else Proved(prover.find_unsharded())
        plans = proved.plans
        check_agreement({"the plan": "; ".join(plan.to_yaml() for plan in plans)}, self._world, self.root_device)
        cut = prover.find_cut(plans) if config.pp > 1 else None
        if cut is not None:
            proved.lines += prover.check_stages(plans, cut)
        record = (
            split_context(module, plans, self.groups, config.cp_method)
            if config.cp > 1
            else whole_model(module, self.groups)
        )
        record.made_by = made_by
        record.changes = self._change_unsharded(module, plans)
        if config.compile:
            record.changes += compile_plain_blocks(module, BlockGraphs(config.compile_options))
        if cut is not None:
            self._cut(record, cut)
        try:
            record.changes += sync_batch_norms(module, self.groups, every=self._syncs_batch_norms)
        except ValueError:
            unshard(module)
            raise
        lines = describe_stages(record)
        if blocks := record.context_blocks:
            lines.append(
                f"each rank of cp holds a part of the sequence in {len(blocks)} blocks ({blocks[0]} to {blocks[-1]})"
            )
        self._log_summary([*lines, *proved.lines], plans=plans)
        return record

    @property
    def _tiles(self) -> MLPTiles | None:
        """How MLPs run in tiles; None where they run whole."""
        return None if self.config.tile_mlp is None else MLPTiles(self.config.tile_mlp)

    @property
    def _syncs_batch_norms(self) -> bool:
        """Whether batch norms take their statistics over all replicas."""
        return syncs_batch_norms(self._layer_sync)

    def _apply_layer_sync(self, module: LightningModule) -> None:
        """Let a plugin of the user's change the model before it is trained, as Lightning's own DDP does.

        Raises:
            ValueError: if it makes another module of the model itself.
        """
        if self._layer_sync is None or self._syncs_batch_norms:
            return
        if self._layer_sync.apply(module) is not module:
            raise ValueError(
                f"plugins=[{type(self._layer_sync).__name__}()]: its apply() returned another module than the model; exchange "
                "modules inside the model, and return the model"
            )
        self._reverts = self._layer_sync.revert

    @property
    def _splits(self) -> bool:
        """Whether the replicas share out what one of them would hold."""
        return self.config.data_parallel == "fsdp" and self._mean_size > 1

    def _split_over_replicas(self, module: LightningModule, record: ShardedModel | None) -> FullySharded | None:
        """Let each replica hold some rows of every parameter, where that is asked for; an earlier run may have done so."""
        if not self._splits:
            return None
        assert record is not None
        split = record.replicas
        if split is None:
            for tensor in (*module.parameters(), *module.buffers()):
                if not tensor.is_meta:
                    tensor.data = tensor.data.to(self.root_device)
            blocks = [*(name for region in record.regions for name in region.blocks), *block_lists(module)]
            units = units_among(self.config.fsdp, module, blocks)
            split = FullySharded(record, units, fully_shard_options(self.config.fsdp), self.root_device)
        assert isinstance(split, FullySharded)
        for region in record.regions:
            region.path.row_window = "block" if set(region.blocks) <= {*split.units} else "none"
        self.model = RootCall(module, split)
        return split

    def _recompute_unsharded(self, module: LightningModule) -> list[ModuleChange]:
        """Let what the configuration names of a model that tp does not shard be recomputed, or run in parts, while it is fitted.

        Returns:
            What that changed of the model.
        """
        config = self.config
        if not self._changes_unsharded or self._trainer.state.fn != TrainerFn.FITTING:
            return []
        prover = Prover(module, self._trainer, config, self.groups, self.root_device, self._phases)
        return self._change_unsharded(
            module, prover.prove_unsharded().plans if self._needs_proof else prover.find_unsharded()
        )

    @property
    def _needs_proof(self) -> bool:
        """Whether what is changed of a model that tp does not shard must be proved."""
        return self.config.tile_mlp is not None or self.config.loss_chunk is not None

    @property
    def _changes_unsharded(self) -> bool:
        """Whether a model of which tp shards nothing is changed nonetheless while it is fitted."""
        config = self.config
        return config.recompute != "none" or config.tile_mlp is not None or config.loss_chunk is not None

    def _change_unsharded(self, module: LightningModule, plans: Sequence[ShardingPlan]) -> list[ModuleChange]:
        """Let blocks that the plans name be recomputed, their MLPs run in tiles and heads in chunks, if the model is fitted."""
        if self._trainer.state.fn != TrainerFn.FITTING:
            return []
        config = self.config
        how: dict[str, Any] = {"recompute": config.recompute, "tiles": self._tiles, "loss_chunk": config.loss_chunk}
        return change_unsharded(module, plans, self.groups, **how)[1]

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """A context manager in which the initialisation of tensors on the meta device is recorded.

        ``setup`` gives them their values later, of each tensor this rank's part alone.

        Args:
            empty_init: make all tensors on the meta device, as under ``with torch.device("meta")``.
        """
        self._recorder = self._recorder or DeferredInit()
        with super().tensor_init_context(), torch.device("meta") if empty_init else nullcontext(), self._recorder:
            yield

    def _late_weights(self, module: LightningModule) -> LateWeights | None:
        """Prepare to give a model on the meta device its weights, and give it its buffers. Collective.

        Returns:
            What fills the parameters once the model is sharded; None if no tensor is on the meta device.
        """
        recorder, self._recorder = self._recorder, None
        state, self._state_for_meta_model = self._state_for_meta_model, None
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            return None
        late = LateWeights(module, recorder, state)
        late.check()
        initialisation = {
            "how the model of the meta device is initialised (numbers of Python, shapes)": late.recorder.digest()
        }
        check_agreement(initialisation, self._world, self.root_device)
        shared = [late.recorder.shared]
        dist.broadcast_object_list(shared, src=dist.get_process_group_ranks(self._world)[0], group=self._world)
        late.recorder.shared = shared[0]
        late.fill_buffers()
        return late

    @shortens_refusals
    def check_before_start(self, module: LightningModule) -> None:
        """Refuse what the model's attributes tell, before the ranks are started or meet; the launcher calls it.

        Raises:
            ValueError: for heads that do not divide by tp.
        """
        refuse_uneven_heads(module, self.config)

    def _log_summary(
        self, plan: list[str], coverage: Coverage | None = None, plans: Sequence[ShardingPlan] = ()
    ) -> None:
        """Log the text at the start of a run, once.

        Args:
            plan: lines on the plan.
            coverage: what it shards.
            plans: the plans, whose rules are written into a file.
        """
        if self._summarized or self.global_rank:
            return
        self._summarized = True
        config = self.config
        if config.cp > 1:
            config = config.model_copy(update={"cp_method": context_method(self._module, config)})
        about = (self.groups.topology, config, self.num_processes, VERSION, plan, coverage)
        if is_verbose():
            rank_zero_info(summarize(*about))
        else:
            rank_zero_info(summarize_briefly(*about, write_plan(plans, summarize(*about)) if plans else ""))

    def _make_replicas_equal(self, module: nn.Module) -> None:
        """Send the first rank's weights and buffers to all ranks, while the model is still whole on each. Collective."""
        group = self.groups[tuple(sorted(self.groups.topology.axes))]
        # One on the meta device is filled later, from a record or files that are the same on all ranks.
        whole = {id(t): t for t in (*module.parameters(), *module.buffers()) if not t.is_meta and t.numel()}.values()
        tensors = [part for tensor in whole for part in _dense_parts(tensor)]
        total = sum(tensor.nbytes for tensor in tensors)
        with torch.no_grad(), self._phases.phase("sending the first rank's weights to all", total) as sending:
            for tensor in tensors:
                staged = tensor.detach().to(self.root_device).contiguous()
                # As bytes, since backends do not support every dtype.
                dist.broadcast(staged.view(-1).view(torch.uint8), src=0, group=group)
                if storage_id(staged) != storage_id(tensor):
                    tensor.data.copy_(staged)
                sending.advance(tensor.nbytes)

    def model_to_device(self) -> None:
        """Move the model, which is sharded already, to this rank's device. What other stages hold is there already."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    # ---- the end -----------------------------------------------------------------------------------------------

    def _hint(self, exception: BaseException) -> str:
        """What may be behind an error of torch's that can't know it; empty if nothing is known."""
        told = str(exception)
        if self._stage is not None and "written-to tensor refers to a single memory location" in told:
            return (
                f"pp={self.config.pp}: parameters that other stages hold are NaN without memory here, and can't be written to; "
                "change those for which trainer.strategy.holds(parameter) is true"
            )
        is_torchs = isinstance(exception, RuntimeError | IndexError) and not is_refusal(exception)
        if self._shards > 1 and self._schedule.has_begun and is_torchs and _SIZES.search(told):
            return (
                "lightning_seqpar: if the sizes above are those of one rank's part, this step takes a way that the first batch did "
                "not take, and for which the plan was not made: it gives a block a tensor that it was not given then, or reads a "
                "sharded weight past its module (vocab=False for an embedding or a head). Let the first batch, or "
                "example_input_array, take it"
            )
        return ""

    def on_exception(self, exception: BaseException) -> None:
        """Report an error to the process that started the ranks, so that the others end too.

        One that every rank raises before it trains is told by rank 0 alone, and so is a refusal of all ranks in a later step.
        """
        self._failed = True
        add_note = getattr(exception, "add_note", None)  # from Python 3.11 on
        if add_note is not None and (hint := self._hint(exception)):
            add_note(hint)
        super().on_exception(exception)
        self._unmute_writers()
        # The end by a signal is no Exception: nobody waits for the other ranks to say the same.
        may_be_shared = isinstance(exception, Exception) and (not self._schedule.has_begun or is_refusal(exception))
        # Nor is this one, but ranks may all leave at the same place, which is no failure.
        may_be_shared |= isinstance(exception, SystemExit) and exit_status(exception) < 128
        lost = is_lost_peer(exception)
        if not lost or not dist.is_initialized():
            shorten_traceback(exception)
        if isinstance(self.launcher, SeqParallelLauncher) and not self.launcher.has_begun:
            record_for_torchrun(exception)  # a sentence of every rank, of which rank 0 alone prints it
        elif isinstance(self.launcher, SeqParallelLauncher) and not self._ending.together:
            world = dist.group.WORLD if dist.is_initialized() else None
            refusals = Refusals.of_world(world) if world is not None and not lost else None
            if refusals is not None and not may_be_shared:
                refusals.note(exception)  # a rank that refuses to go on because of it does not wait for this one
                refusals = None
            missing = None if world is None else lambda: find_missing(exception, world, self._groups, self._trainer)
            self.launcher.tell(exception, refusals, missing)

    def holds(self, parameter: Tensor) -> bool:
        """Whether this rank has the parameter, or a part of it: stages of a pipeline (``pp``) have those of their own blocks alone.

        Parameters of other stages stay in the model as NaN without memory, have no gradients, and can't be written to.
        """
        record = record_of(self._module)
        layout = None if record is None else record.layout.of(parameter)
        return record is None or record.stage is None or layout is None or record.stage.holds(layout.name)

    def teardown(self) -> None:
        """Take DDP off the model. It stays sharded, and the groups stay, so that it can be saved after ``fit``."""
        self._is_set_up = False
        self._interruption = None  # it holds the frames of the run that it ended
        if self.lightning_module is not None and self.lightning_module._trainer is not None:  # else nothing has begun
            self._leave_loops()
        self._ending.leave()
        if self._split is not None:
            self._split.settle()
        self.model, self._ddp_model, self._split = self.lightning_module, None, None
        if self._sync is not None:
            self._sync.remove()
            self._sync = None
        self._stop_watching()
        if self._weights is not None:
            self._weights.end()
            self._weights = None
        for change in reversed(self._unsharded_changes):
            change.undo()
        self._unsharded_changes = []
        if self._reverts is not None and self.lightning_module is not None:
            self._reverts(self.lightning_module)
        self._reverts = None
        module = self.lightning_module
        if (stage := self._stage) is not None:
            stage.leave_out(torch.device("cpu"))
        unmovable = is_split if self._failed or self.root_device.type == "cpu" else lambda parameter: False
        if module is not None and any(parameter.is_meta or unmovable(parameter) for parameter in module.parameters()):
            # It never got its weights, or a graph that the error kept alive holds its rows: Lightning would fail to move it to
            # the CPU, and hide the error that ended the run.
            self._lightning_module = None
        super().teardown()
        self._lightning_module = module


def _describe_plan(record: ShardedModel, plans: Sequence[ShardingPlan], coverage: Coverage) -> str:
    """A line on where the plans are from, and how much of the parameters is sharded."""
    stage, layout = record.stage, record.layout
    held = layout.local_numel([name for name in layout if stage is None or stage.holds(name)])
    whose = "per rank" if stage is None else f"on a rank of stage {stage.number}"
    return (
        f"{', '.join(dict.fromkeys(plan.source for plan in plans))}: {coverage}; "
        f"{held:,} of {layout.global_numel():,} parameters {whose}"
    )


def _merge_config(config: ParallelConfig | None, given: Mapping[str, Any]) -> ParallelConfig:
    """The configuration of a strategy.

    Args:
        config: what was given as ``config=``.
        given: the keywords; beside ``config`` they must have their defaults, which command lines pass along.

    Raises:
        ValueError: for a keyword with another value beside ``config``.
    """
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


def grad_norm(module: LightningModule, norm_type: float = 2.0) -> Tensor:
    """The norm of the whole model's gradient, as a 0-dim tensor: shards of every rank, whole parameters once.

    Call it where gradients are ready, such as ``on_before_optimizer_step``; under a ``SeqParallelStrategy`` it is
    collective: call it on every rank. Under any other strategy it is the plain norm, so the user's code runs on both.
    """
    strategy = module.trainer.strategy
    if not isinstance(strategy, SeqParallelStrategy):
        return torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None], norm_type)
    strategy.sync_all_gradients()
    return strategy.global_norm(list(module.parameters()), norm_type)


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
        strategy.settle_rows()
        strategy.sync_all_gradients()
    if record.versions:
        record.check_versions()
    with summon(record, names):
        yield
    if record.versions:
        record.note_versions()


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor consists of: itself, or the indices and values of a sparse one.

    Raises:
        ValueError: for a layout that can't be sent.
    """
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo and tensor.is_coalesced():
        return [tensor.detach().indices(), tensor.detach().values()]
    raise ValueError(
        f"a parameter or buffer of shape {list(tensor.shape)} and layout {tensor.layout} can't be sent to the other ranks; "
        "register it dense, or coalesced as torch.sparse_coo"
    )
