"""The set-up of a model: a plan is found and proved, the model is sharded by it, and rank 0 logs what became of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.distributed.autograd import storage_id
from lightning_seqpar.distributed.rendezvous import check_agreement, describe_model
from lightning_seqpar.inference.pipeline_cut import stacks_of
from lightning_seqpar.init.deferred import DeferredInit
from lightning_seqpar.init.meta_weights import LateWeights
from lightning_seqpar.parallel.apply import parallelize, unshard
from lightning_seqpar.parallel.beside_tp import (
    MLPTiles,
    change_unsharded,
    compile_plain_blocks,
    split_context,
    sync_batch_norms,
)
from lightning_seqpar.parallel.compiled_blocks import BlockGraphs
from lightning_seqpar.parallel.fsdp_units import fully_shard_options, listed_blocks, units_among
from lightning_seqpar.parallel.fully_sharded import FullySharded
from lightning_seqpar.parallel.sharded_model import ModuleChange, ShardedModel, record_of, whole_model
from lightning_seqpar.pipeline.cut import Cut
from lightning_seqpar.pipeline.stage import Stage
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.region.float8 import Float8
from lightning_seqpar.region.offload import ActivationOffload
from lightning_seqpar.releases import VERSION, pl
from lightning_seqpar.strategy.callbacks import averages_of, save_whole, shard_average
from lightning_seqpar.strategy.ending import is_verbose
from lightning_seqpar.strategy.environment import Environment
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.verify.coverage import Coverage, cover
from lightning_seqpar.verify.guards.before_training import check_float8, syncs_batch_norms
from lightning_seqpar.verify.guards.while_training import refuse_overlaps
from lightning_seqpar.verify.prover import Proved, Prover, write_plan

LINES = 8  # how many lines the text has unless all of it is asked for
_DETAILS = ("why: ", "rule: ")  # what lines on a plan begin with that are left to its file
_MOST = 8  # how many ranks, rows or groups are shown before the rest is left out


def _ends(items: Sequence[int]) -> list[int | None]:
    """All items if they are few; else the first ones, None for those that are left out, and the last."""
    return list(items) if len(items) <= _MOST else [*items[: _MOST - 2], None, items[-1]]


def groups_of(topology: ProcessTopology) -> list[str]:
    """Lines with the ranks of each group, an axis a line: ``tp  [0 1] [2 3]``. Axes of size 1 are left out."""
    lines = []
    for axis, size in topology.larger_axes:
        lists = topology.get_axis_comm_lists(axis)
        few = _MOST // 2 if size <= _MOST // 2 else 2
        shown = " ".join(
            f"[{' '.join('...' if i is None else str(ranks[i]) for i in _ends(range(len(ranks))))}]" for ranks in lists[:few]
        )
        more = f" ... ({len(lists)} groups)" if len(lists) > few else ""
        lines.append(f"{axis:<4}{shown}{more}")
    return lines


def switches(config: ParallelConfig, tp: int, dp: int, coverage: Coverage | None = None) -> tuple[list[str], list[str]]:
    """Which features are on, and which are off, each in a few words; ``coverage`` says where sequence parallelism is off."""
    has_sp = config.sp and tp > 1 and (coverage is None or coverage.sp)
    sp_off = coverage.sp_off if coverage is not None else ""
    chunks = f" of {config.virtual_pp} chunks" if (config.virtual_pp or 1) > 1 else ""
    entries = [
        ("tp", "linears split", tp > 1),
        *([("pp", f"{config.pp} stages{chunks}, one forward and one backward in turns", True)] * (config.pp > 1)),
        *([("cp", f"parts of the sequence, attention: {config.cp_method}", True)] * (config.cp > 1)),
        ("sp", f"sequence parallelism{f'; not in {sp_off}' if sp_off else ''}", has_sp),
        (config.data_parallel, "over the replicas", dp > 1),
        *([("broadcast_batch", "one rank of each replica reads", True)] * (config.broadcast_batch and tp > 1)),
        *([("gloo_twins", "a gloo group beside each", True)] * config.gloo_twins),
    ]
    why_off = {config.data_parallel: " (one replica)", **({"sp": f" ({sp_off})"} if sp_off else {})}
    off = [f"{name}{why_off.get(name, '')}" for name, _, on in entries if not on]
    return [f"{name} ({what})" for name, what, on in entries if on], off


def _memory(config: ParallelConfig, tp: int) -> list[str]:
    """A line on what is kept for the backward, and what is made again; none for nothing."""
    told = []
    if tp > 1:
        kept = "gathered again in the backward" if config.regather else "kept whole"
        told.append(f"regather {str(config.regather).lower()}: what columns read is {kept}")
    if config.recompute != "none":
        what = {
            "activations": "norms and what follows the columns of MLPs run again in the backward",
            "selective": "norms, what follows the columns of MLPs, and the attention run again in the backward",
            "full": "each block runs again in the backward, and only its input is kept",
        }
        told.append(f"recompute {config.recompute}: {what[config.recompute]}")
    if config.float8 != "none":
        told.append(f"float8 {config.float8}: columns and rows multiply in 8 bits, and what they read is sent so")
    if config.offload != "none":
        told.append("offload activations: what the blocks keep for the backward lies on the CPU")
    if config.tile_mlp is not None:
        told.append(f"tile_mlp: MLPs compute {config.tile_mlp} tokens at once")
    if config.loss_chunk is not None:
        told.append(f"loss_chunk: logits of {config.loss_chunk} tokens at once")
    return ["; ".join(told)] * bool(told)


def describe_compiled(record: ShardedModel) -> str:
    """A line on compiled blocks: how many."""
    blocks = {name for region in record.regions for name in region.blocks}
    captures = "; as CUDA graphs, which is untried" if record.graphs is not None and record.graphs.captures else ""
    return f"compile: {len(blocks)} blocks, one graph for each kind{captures}"


def describe_stages(record: ShardedModel) -> list[str]:
    """Lines on the stages of a pipeline: which blocks each has, and what several of them hold."""
    stage = record.stage
    if stage is None:
        return []
    named = [
        f"{one} {' and '.join(first if first == last else f'{first} to {last}' for first, last in ends)}"
        for one, ends in stage.ends.items()
    ]
    shared = sorted(name for name in record.layout if len(stage.shared(name)) > 1)
    lines = [f"stages: {', '.join(named)}; what is in front of the blocks runs on each, what is behind them on the last"]
    if shared:
        more = " ..." if len(shared) > 3 else ""
        lines.append(f"several stages hold {', '.join(shared[:3])}{more}; the gradients are summed")
    return lines


def _in_rows(rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Lines with a name in front of the first line of each row; rows without lines are left out."""
    return [f"  {name if at == 0 else '':<8}{line}" for name, body in rows for at, line in enumerate(body)]


def summarize(
    topology: ProcessTopology,
    config: ParallelConfig,
    ranks_per_node: int,
    plan: Sequence[str],
    coverage: Coverage | None = None,
    place: str | None = None,
) -> str:
    """All that is known at the start of a run, or the most important :data:`LINES` lines of it.

    With ``place``, the file that holds all of it (empty for none), there are few lines, of which the last one names it. ``plan``
    are lines on the plan; ``coverage`` says how much of the model it shards.
    """
    tp, dp = (topology.get_dim(axis) for axis in ("tp", "dp"))
    on, off = switches(config, tp, dp, coverage)
    memory, told_on, told_off = _memory(config, tp), ", ".join(on) or "nothing", ", ".join(off)
    world, nodes = topology.world_size, max(1, topology.world_size // ranks_per_node)
    sizes = "".join(f"{' ×' if at else ','} {axis} {size}" for at, (axis, size) in enumerate(topology.larger_axes))
    headline = f"lightning_seqpar {VERSION}: {world} rank{'s' * (world > 1)} on {nodes} node{'s' * (nodes > 1)}{sizes}"
    if place is None:
        rows = [("groups", groups_of(topology)), ("plan", plan), ("memory", memory), ("on", [told_on])]
        return "\n".join([headline, *_in_rows([*rows, ("off", [told_off] * bool(off))])])
    groups = [" ".join(line.split()) for line in groups_of(topology)]
    told = [line for line in plan if not line.startswith(_DETAILS)]
    checks = [line for line in told if line.startswith("self-check")]
    others = [line for line in told[1:] if line not in checks]
    others.sort(key=lambda line: line.startswith("vocabulary: sharded"))  # the reasons why something stays whole come first
    body = [*told[:1], *checks, *others]
    told_on += f"; off: {told_off}" * bool(off)
    around = [("groups", ["; ".join(groups)] * bool(groups)), ("memory", memory), ("on", [told_on])]
    body = body[: LINES - 2 - len(_in_rows(around))]  # without the headline, and the line on the file
    where = f"{place} (-v, or SEQPAR_VERBOSE=1, prints it)" if place else "-v, or SEQPAR_VERBOSE=1, prints them"
    few = [around[0], ("plan", body), *around[1:], ("rules", [where] if place or len(body) < len(plan) else [])]
    return "\n".join([headline, *_in_rows(few)])


class ModelSetup:
    """Shards a model before it runs, and takes back afterwards what it changed of one that is not sharded."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        self._summarized = False
        self._recorder: DeferredInit | None = None
        self._unsharded_changes: list[ModuleChange] = []  # of a model that is not sharded
        self._unsharded_hooks: list[RemovableHandle] = []

    @contextmanager
    def recording(self, *, empty: bool) -> Generator[None, None, None]:
        """A context in which initialisation on the meta device, where ``empty`` puts all tensors, is recorded."""
        self._recorder = self._recorder or DeferredInit()
        with torch.device("meta") if empty else nullcontext(), self._recorder:
            yield

    def undo(self) -> None:
        """Take back the changes of a model that is not sharded."""
        for change in reversed(self._unsharded_changes):
            change.undo()
        for handle in self._unsharded_hooks:
            handle.remove()
        self._unsharded_changes, self._unsharded_hooks = [], []

    def share_out_averages(
        self, record: ShardedModel | None, to_whole: Callable[[ShardedModel, Mapping[str, Any]], dict[str, Any]]
    ) -> None:
        """Cut the averages of weights as the model is cut; ``to_whole`` makes what a checkpoint takes of one. Collective."""
        for average in averages_of(self._env.callbacks):
            self._make_replicas_equal(average)
            if record is not None:
                shard_average(average, record)
                save_whole(average, functools.partial(to_whole, record))

    def shard(self, module: pl.LightningModule) -> ShardedModel | None:
        """Find and prove a plan, and shard the model by it, unless an earlier run did; returns None at tp 1."""
        tp = self._env.groups.size("tp")
        earlier = record_of(module)
        config = self._env.config
        changes_of_fit = tp > 1 or not self._changes_unsharded or self._env.fits
        made_by = (self._env.groups.topology, config, self._syncs_batch_norms, changes_of_fit)
        if earlier is not None:
            if earlier.made_by == made_by:
                return earlier
            unshard(module)  # it was sharded for another topology or by another plan
        with self._env.phases.phase("comparing the ranks' models"):
            facts = {**describe_model(module), "sync_batchnorm": self._syncs_batch_norms}
            check_agreement(facts, self._env.world, self._env.device)
        self._make_replicas_equal(module)
        if tp > 1 or config.pp > 1 or self.splits:
            refuse_overlaps(module)
        if tp == config.cp == config.pp == 1:
            return self._leave_whole(module, made_by)
        prover = self._prover(module)
        if tp > 1:
            proved = prover.prove()
        elif config.cp > 1 or self._needs_proof:
            proved = prover.prove_unsharded()
        else:
            proved = Proved(prover.find_unsharded())
        plans = proved.plans
        plan_text = "; ".join(f"{plan.source}: {plan.to_yaml()}" for plan in plans)
        check_agreement({"the plan": plan_text}, self._env.world, self._env.device)
        hooked = [name for name, module in module.named_modules() if module._forward_hooks and name]
        cut = prover.find_cut(plans) if config.pp > 1 else None
        if cut is not None:
            proved.lines += prover.check_stages(plans, cut)
        offloaded = self._offloaded(module, plans)
        with self._env.phases.phase("cutting the model"):
            record = self._cut(module, plans)
            record.hooks += ActivationOffload(offloaded).attach()
        record.made_by = made_by
        self._keep_stage(record, cut)
        if tp > 1:
            self._tell_plan(record, proved, hooked)
        else:
            lines = describe_stages(record)
            if blocks := record.context_blocks:
                held = f"{len(blocks)} blocks ({blocks[0]} to {blocks[-1]})"
                lines.append(f"each rank of cp holds a part of the sequence in {held}")
            self._log_summary([*lines, *proved.lines], plans=plans)
        return record

    def _cut(self, module: pl.LightningModule, plans: Sequence[ShardingPlan]) -> ShardedModel:
        config, groups = self._env.config, self._env.groups
        if groups.size("tp") > 1:
            return parallelize(
                *(module, plans, groups),
                sp=config.sp,
                regather=config.regather,
                loss_chunk=config.loss_chunk,
                recompute=config.recompute,
                tiles=self._tiles,
                cp_method=config.cp_method,
                compiler=BlockGraphs(config.compile_options) if config.compile else None,
                float8=self._float8,
            )
        by_context = config.cp > 1
        record = split_context(module, plans, groups, config.cp_method) if by_context else whole_model(module, groups)
        record.changes += self._change_unsharded(module, plans)
        if config.compile:
            record.changes += compile_plain_blocks(module, BlockGraphs(config.compile_options))
        return record

    def _tell_plan(self, record: ShardedModel, proved: Proved, hooked: list[str]) -> None:
        """Log what a plan shards of a model, and warn of what it does not prove, and of forward hooks on parts."""
        plans, module = proved.plans, record.model
        if proved.frozen:
            record.why_frozen = proved.frozen
            record.stay_frozen = frozenset(name for name, p in module.named_parameters() if not p.requires_grad)
            rank_zero_warn(f"lightning_seqpar: the plan is proved only while what is frozen stays so: {proved.frozen}")
        coverage = cover(record, plans, proved.known, sp=self._env.config.sp)
        stage, layout = record.stage, record.layout
        sources = ", ".join(dict.fromkeys(plan.source for plan in plans))
        held = layout.local_numel([name for name in layout if stage is None or stage.holds(name)])
        whose = "per rank" if stage is None else f"on a rank of stage {stage.number}"
        plan = f"{sources}: {coverage}; {held:,} of {layout.global_numel():,} parameters {whose}"
        lines = [plan, *describe_stages(record), *coverage.reasons, *proved.lines]
        lines += [] if record.graphs is None else [describe_compiled(record)]
        self._log_summary(lines, coverage, plans)
        for warning in coverage.warnings:
            rank_zero_warn(warning)
        vocabulary = {match.name for match in record.matches if match.rule.style == "vocab"}  # their outputs look whole
        if seen := [name for name in hooked if record.is_inside(name) and name not in vocabulary]:
            rank_zero_warn(
                f"lightning_seqpar: forward hooks of yours sit on {', '.join(seen[:3])}{' ...' if len(seen) > 3 else ''}; "
                "they will see this rank's part of the activations"
            )

    def _leave_whole(self, module: pl.LightningModule, made_by: object) -> ShardedModel | None:
        """Prepare a model for data parallelism alone; returns a record of it if the replicas share its parameters out."""
        changes: list[ModuleChange] = []
        if self._changes_unsharded and (self._env.fits or self._env.config.float8 != "none"):
            prover = self._prover(module)
            plans = prover.prove_unsharded().plans if self._needs_proof else prover.find_unsharded()
            changes = self._change_unsharded(module, plans)
            self._unsharded_hooks += ActivationOffload(self._offloaded(module, plans)).attach()
        how = "sharded" if self.splits else "plain"
        lines = [f"none: tp is 1, so nothing is sharded over tp and sp is idle; this is {how} data parallelism"]
        if self._env.config.compile:
            blocks = compile_plain_blocks(module, BlockGraphs(self._env.config.compile_options))
            lines.append(f"compile: {len(blocks)} blocks")
            changes += blocks
        if self.splits or self._env.fits:
            try:
                changes += sync_batch_norms(module, self._env.groups, every=self._syncs_batch_norms)
            except ValueError:
                for change in reversed(changes):
                    change.undo()
                raise
        self._log_summary(lines)
        if not self.splits:
            self._unsharded_changes = changes
            return None
        record = whole_model(module, self._env.groups)
        record.made_by, record.changes = made_by, changes
        return record

    def _keep_stage(self, record: ShardedModel, cut: Cut | None) -> None:
        """Keep this rank's stage of a model that is sharded, if it is cut, and sync its batch norms over the replicas."""
        if cut is not None:
            record.layout.note_stages(cut.shared)
            record.stage = Stage(record.model, cut, self._env.groups, self._env.device)
        try:
            record.changes += sync_batch_norms(record.model, self._env.groups, every=self._syncs_batch_norms)
        except ValueError:
            unshard(record.model)
            raise

    def _prover(self, module: pl.LightningModule) -> Prover:
        env = self._env
        trainer = env.trainer if env.has_trainer else None
        return Prover(module, trainer, env.config, env.groups, env.device, env.phases, env.called_with)

    @property
    def _tiles(self) -> MLPTiles | None:
        return None if self._env.config.tile_mlp is None else MLPTiles(self._env.config.tile_mlp)

    @property
    def _float8(self) -> Float8 | None:
        """How the products of columns and rows are computed in float8; None where they are not."""
        check_float8(self._env.config, self._env.device)
        return Float8.of(self._env.config, self._env.groups)

    @property
    def _syncs_batch_norms(self) -> bool:
        """Whether batch norms take their statistics over all replicas."""
        return syncs_batch_norms(self._env.strategy._layer_sync)

    @property
    def splits(self) -> bool:
        """Whether the replicas share out what one of them would hold."""
        return self._env.config.data_parallel != "ddp" and self._env.mean_size > 1

    def split_over_replicas(self, module: pl.LightningModule, record: ShardedModel | None) -> FullySharded | None:
        """Let each replica hold some rows of every parameter, where that is asked for; an earlier run may have done so."""
        if not self.splits:
            return None
        assert record is not None
        split = record.replicas
        if split is None:
            for tensor in (*module.parameters(), *module.buffers()):
                if not tensor.is_meta:
                    tensor.data = tensor.data.to(self._env.device)
            blocks = [*(name for region in record.regions for name in region.blocks), *listed_blocks(module)]
            units = units_among(self._env.config.fsdp, module, blocks)
            split = FullySharded(record, units, fully_shard_options(self._env.config.fsdp), self._env.device)
        assert isinstance(split, FullySharded)
        self._env.strategy.model = _RootCall(module, split)
        return split

    @property
    def _needs_proof(self) -> bool:
        """Whether what is changed of a model that tp does not shard must be proved."""
        return self._env.config.tile_mlp is not None or self._env.config.loss_chunk is not None

    @property
    def _changes_unsharded(self) -> bool:
        """Whether a model of which tp shards nothing is changed nonetheless while it is fitted."""
        config = self._env.config
        return config.recompute != "none" or config.offload != "none" or config.float8 != "none" or self._needs_proof

    def _offloaded(self, module: nn.Module, plans: Sequence[ShardingPlan]) -> list[nn.Module]:
        """The blocks of which what is kept for the backward goes to the CPU, in the order in which they stand."""
        if self._env.config.offload == "none" or not self._env.fits:
            return []
        return [module.get_submodule(name) for stack in stacks_of(module, plans) for name in stack.blocks]

    def _change_unsharded(self, module: pl.LightningModule, plans: Sequence[ShardingPlan]) -> list[ModuleChange]:
        config, how = self._env.config, dict[str, Any]()
        if self._env.fits:
            how = {"recompute": config.recompute, "tiles": self._tiles, "loss_chunk": config.loss_chunk}
        return change_unsharded(module, plans, self._env.groups, **how, float8=self._float8)[1]

    def late_weights(self, module: pl.LightningModule, state: Mapping[str, Tensor] | None) -> LateWeights | None:
        """Give a model on the meta device its buffers, and prepare to fill its parameters (from ``state``, if given)."""
        recorder, self._recorder = self._recorder, None
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            return None
        late = LateWeights(module, recorder, state)
        late.check()
        initialisation = {"how the model of the meta device is initialised (numbers of Python, shapes)": late.recorder.digest()}
        check_agreement(initialisation, self._env.world, self._env.device)
        shared = [late.recorder.shared]
        dist.broadcast_object_list(shared, src=dist.get_process_group_ranks(self._env.world)[0], group=self._env.world)
        late.recorder.shared = shared[0]
        late.fill_buffers()
        return late

    def _log_summary(self, plan: list[str], coverage: Coverage | None = None, plans: Sequence[ShardingPlan] = ()) -> None:
        if self._summarized or self._env.strategy.global_rank:
            return
        self._summarized = True
        config = self._env.config
        about = (self._env.groups.topology, config, self._env.num_processes, plan, coverage)
        place = None if is_verbose() else write_plan(plans, summarize(*about)) if plans else ""
        rank_zero_info(summarize(*about, place))

    def _make_replicas_equal(self, module: nn.Module) -> None:
        """Send the first rank's weights and buffers to all ranks, while the model is still whole on each. Collective."""
        # One on the meta device is filled later, from a record or files that are the same on all ranks.
        whole = {id(t): t for t in (*module.parameters(), *module.buffers()) if not t.is_meta and t.numel()}.values()
        parts = [part for tensor in whole for part in dense_parts(tensor)]
        with torch.no_grad(), self._env.phases.phase("sending the first rank's weights to all"):
            for tensor in parts:
                staged = tensor.detach().to(self._env.device).contiguous()
                # As bytes, since backends do not support every dtype.
                dist.broadcast(staged.view(-1).view(torch.uint8), src=0, group=self._env.world)
                if storage_id(staged) != storage_id(tensor):
                    tensor.data.copy_(staged)


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor consists of: itself, or the indices and values of a sparse one."""
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo and tensor.is_coalesced():
        return [tensor.detach().indices(), tensor.detach().values()]
    raise ValueError(
        f"a parameter or buffer of shape {list(tensor.shape)} and layout {tensor.layout} can't be sent to the other ranks; "
        "register it dense, or coalesced as torch.sparse_coo"
    )


class _RootCall(nn.Module):
    """Lightning's wrapper of the model, through which ``fully_shard`` gathers what is in no block before a step of the user's."""

    def __init__(self, module: nn.Module, split: FullySharded) -> None:
        super().__init__()
        self.module, self._split = module, split

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._split.step(*args, **kwargs)
