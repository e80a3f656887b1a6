"""What a configuration makes of a model, before anything is launched: shards, gradient sums, bytes kept and sent.

A copy of the model without memory (torch's fake tensors) is sharded as one rank would hold it, over groups that move
nothing; what a step keeps and sends is counted there, by the same code that trains.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import CPUOffloadPolicy

from lightning_seqpar.config import ParallelConfig, PlanSpec
from lightning_seqpar.distributed.counters import SavedBytes, Traffic
from lightning_seqpar.distributed.rng import kept_streams
from lightning_seqpar.inference.dataflow import CantInferError, UserDecidesError
from lightning_seqpar.inference.infer import infer_plan
from lightning_seqpar.inference.lazy_copy import deep_copy
from lightning_seqpar.inference.model_copy import change_attribute_tensors, left_out_of_copies
from lightning_seqpar.inference.pipeline_cut import check_stacks, leaves_blocks, stacks_of, trace_cut
from lightning_seqpar.parallel.apply import parallelize, refuse_compiled, refuse_untraceable
from lightning_seqpar.parallel.beside_tp import MLPTiles, change_unsharded, split_context
from lightning_seqpar.parallel.fsdp_units import ReplicaSplit
from lightning_seqpar.parallel.grad_sync import step_traffic
from lightning_seqpar.parallel.resolve import ResolvedPlan
from lightning_seqpar.parallel.sharded_model import ShardedModel, record_of
from lightning_seqpar.pipeline.cut import Cut, warm_up
from lightning_seqpar.plan.sharding_plan import ShardingPlan, resolve_plans
from lightning_seqpar.plan.vocabulary import VOCAB_OFF, find_vocabulary, with_vocabulary
from lightning_seqpar.region.float8 import Float8
from lightning_seqpar.releases import check_package, pl
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.coverage import Coverage, Explanations, cover, starred
from lightning_seqpar.verify.guards.before_training import describe_bubble
from lightning_seqpar.verify.traced_step import (
    StepNumbers,
    TracedStep,
    cast_in,
    checked_precision,
    dtype_of,
    why_not_without_numbers,
)

OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1}  # how many numbers each keeps as state for a parameter


@dataclass(frozen=True)
class ModuleRow:
    """A line of the table: modules whose styles and shapes are all alike."""

    module: str  # a pattern that matches exactly their names, as a plan writes it
    count: int  # how many modules they are
    style: str  # of the rules that match them; without a rule, ``on shards`` inside the blocks and ``whole`` outside
    tensors: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # name, whole shape and local shape of each parameter
    tied: tuple[str, ...]  # names of parameters that an earlier row shows under another name
    sync: str  # over which axes the gradients are summed after the backward, and why; empty if they need no sum
    decided: str  # where the rule came from: a family, the user's plan, inference; empty if there is none


@dataclass(kw_only=True)
class RankBytes:
    """What a rank keeps."""

    parameters: int  # how many
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # of the optimizer's state for them
    # Of a traced step's one micro-batch, or of all that are alive at once in a stage; None if no step could be traced.
    activation_bytes: int | None = None
    gathered_bytes: int = 0  # of whole parameters that ``fsdp`` gathers at once in a step

    @property
    def total_bytes(self) -> int:
        """All of it, as far as it is known."""
        kept = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return kept + self.gathered_bytes + (self.activation_bytes or 0)


@dataclass(kw_only=True)
class StageRow(RankBytes):
    """A stage of a pipeline, and what each of its ranks keeps."""

    ends: tuple[tuple[str, str], ...]  # of each of its chunks the names of the first and the last block
    blocks: int  # how many it has
    alive: float  # of how many micro-batches it keeps activations at once


@dataclass(kw_only=True)
class Description(RankBytes):
    """What a configuration makes of a model, and what each rank keeps; of a pipeline, in the stage that keeps most.

    Attributes:
        world_size: number of ranks.
        axes: sizes of the axes that are larger than 1.
        sp: whether activations between some of the blocks are sharded along the sequence.
        optimizer: for which the bytes of the state are counted.
        rows: the table, a row for modules that are alike.
        plan: the plan as YAML, to be edited and fed back.
        global_parameters: number of parameters of the whole model.
        sent_bytes: bytes that a rank gives to each kind of collective in one step, as :class:`Traffic` counts them.
        sent_calls: how often it calls each kind of collective in one step.
        input: batch and length of the traced input, ``[b, s]``.
        notes: what could not be found out, and why.
        coverage: how much is sharded of what could be, and why the rest is whole; None at tp 1.
        stages: the stages of a pipeline, in order; none at pp 1.
        peak_bytes: the most that a rank holds at once in a step of ``micro_batches``; ``seqpar plan`` finds it.
    """

    world_size: int
    axes: dict[str, int]
    sp: bool
    optimizer: str
    rows: list[ModuleRow]
    plan: str
    global_parameters: int
    sent_bytes: dict[str, int] = field(default_factory=dict)
    sent_calls: dict[str, int] = field(default_factory=dict)
    input: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    coverage: Coverage | None = None
    stages: list[StageRow] = field(default_factory=list)
    peak_bytes: int | None = None
    micro_batches: int = 1

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        data = dataclasses.asdict(self)
        for row in data["rows"]:
            shapes = [(name, list(whole), list(local)) for name, whole, local in row["tensors"]]
            row["tensors"] = [dict(zip(("name", "shape", "local_shape"), one, strict=True)) for one in shapes]
        return {**data, "total_bytes": self.total_bytes}


def describe(
    model: nn.Module,
    config: ParallelConfig | Mapping[str, Any] | None = None,
    *,
    world_size: int | None = None,
    example: Any = None,
    batch: Any = None,
    batch_size: int = 1,
    length: int | None = None,
    optimizer: str = "adamw",
    precision: str | None = None,
    **fields: Any,
) -> Description:
    """Describe what ``config`` makes of ``model``, without GPUs, processes or process groups; the model is not touched.

    Args:
        model: any module, real or on the meta device; a ``LightningModule`` that makes its model in ``configure_model``
            makes it here, without memory.
        config: the configuration, or its fields as a mapping such as ``{"tp": 2}``; the default is ``ParallelConfig()``.
        world_size: number of ranks; the default is the smallest world that the configuration fits.
        example: what ``forward`` takes (a tensor, a tuple of arguments, or a dict of named ones), for the traced step. The
            default is tokens ``[batch_size, length]`` for a Hugging Face model (with labels, if it takes them), else the
            module's ``example_input_array``.
        batch: what ``training_step`` takes, in its place.
        batch_size: samples of a micro-batch, on one rank.
        length: positions of a sample; the default is the model's own limit, 2,048 at most.
        optimizer: which one, for the bytes of its state: ``adamw``, ``adam``, ``sgd`` or ``sgd-momentum``.
        precision: of the Trainer; the default is one that casts nothing.
        fields: fields of the configuration in the place of ``config``: ``describe(model, tp=2)``.

    Raises:
        ValueError: for a plan or a topology that the strategy would refuse too, with the same message; for a model whose own code
            raises something where it is copied, sharded or run without numbers.
    """
    if fields and config is not None:
        raise ValueError(f"config= and {', '.join(fields)}=: give one or the other")
    check_package(model)
    if not isinstance(config, ParallelConfig):
        config = ParallelConfig.from_omegaconf(fields if config is None else config)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is none of {', '.join(OPTIMIZERS)}")
    precision = None if precision is None else checked_precision(precision)
    for name, value in (("batch_size", batch_size), ("length", 1 if length is None else length)):
        if value < 1:
            raise ValueError(f"{name}={value} must be 1 or more")
    if record_of(model) is not None:
        raise ValueError("the model is parallelised already; call unshard(model) first, or describe another one")
    topology = ProcessTopology.from_config(config, world_size or config.smallest_world)
    try:
        with kept_streams():
            made = configured(model)
            step = TracedStep.find(made, example, batch, batch_size, length)
            with FakeTensorMode(allow_non_fake_inputs=True):
                return Describer(made, config, topology, optimizer, step, precision=precision).run()
    except (ValueError, ImportError):
        raise
    except Exception as error:  # of the model's code, or of torch's where tensors have no numbers
        raise ValueError(
            f"{type(model).__name__}: it can't be described without a launch: {why_not_without_numbers(error)}; seqpar verify "
            "runs it with numbers"
        ) from error


@dataclass
class Describer:
    """Describes what a configuration makes of a model, in torch's mode for tensors without memory."""

    model: nn.Module
    config: ParallelConfig
    topology: ProcessTopology
    optimizer: str
    step: TracedStep
    known: Explanations = field(default_factory=Explanations)
    split: ReplicaSplit = field(default_factory=ReplicaSplit)
    # Plans that are known already of a model that is described at many configurations.
    found: list[ShardingPlan] | None = None
    precision: str | None = None  # of the Trainer; None for the model's own types

    def shard_copy(self) -> ShardedCopy:
        """A copy without memory, changed as a rank of the configuration would change the model."""
        config, planned = self.config, without_numbers(self.model, dtype_of(self.precision, self.model))
        groups = ParallelGroups.silent(self.topology)
        out = ShardedCopy(planned, groups)
        if config.tp > 1:
            out.plans, out.whole = self.find_plans(planned) if self.found is None else (self.found, ())
            out.record = self._shard(planned, out.plans, groups)
            out.recomputed = out.record.recomputed
        beside = config.float8 != "none" or config.recompute != "none" or config.tile_mlp or config.loss_chunk
        if config.tp == 1 and (config.cp > 1 or beside):
            self._change_unsharded(out)
        return out

    def run(self) -> Description:
        """The description."""
        config, copied = self.config, self.shard_copy()
        planned, record, plans = copied.model, copied.record, copied.plans
        replicas = self.topology.get_dim("dp") * config.cp
        if (shares := config.shares(replicas)) > 1:
            blocks = [name for region in record.regions for name in region.blocks] if record is not None else []
            self.split = ReplicaSplit.of(planned, config.fsdp, blocks, shares, replicas // shares)
        held = dict(planned.named_parameters())
        numel = sum(p.numel() for p in held.values()) if record is None else record.layout.global_numel()
        out = Description(
            world_size=self.topology.world_size,
            axes=dict(self.topology.larger_axes),
            sp=config.sp and config.tp > 1,
            optimizer=self.optimizer,
            rows=_rows(planned, record),
            plan="rules:\n" + "".join(plan.to_yaml().partition("\n")[2] for plan in plans) if plans else "rules: []\n",
            global_parameters=numel,
            **self._held(held),
        )
        if self.split.replicas > 1:
            where = ", on the CPU" * isinstance(self.split.options.get("offload_policy"), CPUOffloadPolicy)
            each = f"the rows of one of {self.split.replicas:,} replicas"
            out.notes.append(f"fsdp: of each tensor above a rank holds {each} between steps{where}")
        if record is not None:
            out.coverage = cover(record, plans, self.known, sp=config.sp)
            out.sp = out.coverage.sp
        if any(plan.source == "inferred" for plan in plans):
            out.notes.append("the plan was inferred and is not proved here; the strategy proves it before it trains")
        out.notes += [*(f"vocabulary: {line}" for line in copied.whole), *copied.notes]
        if config.offload != "none":
            out.notes.append("offload activations: of what a rank keeps for the backward, that of the blocks lies on the CPU")
        if recomputed := copied.recomputed:
            what = f"{', '.join(dict.fromkeys(map(starred, recomputed)))} ({len(recomputed)} modules)"
            out.notes.append(f"recompute {config.recompute}: {what} run again in the backward")
        self._trace(out, planned, record)
        if config.pp > 1:
            self._cut(out, planned, plans)
        return out

    @property
    def _tiles(self) -> MLPTiles | None:
        return None if self.config.tile_mlp is None else MLPTiles(self.config.tile_mlp)

    def find_plans(self, planned: nn.Module) -> tuple[list[ShardingPlan], Sequence[str]]:
        """The plans that hold for the model, and why what of its vocabulary is whole is so."""
        config = self.config

        def infer_rest(beside: Sequence[ShardingPlan]) -> ShardingPlan | None:
            try:
                return self._infer(config.tp, beside)
            except ValueError as error:
                self.known.rest = str(error)
                return None

        plans = resolve_plans(config.plan, planned, lambda: self._infer(config.tp), infer_rest)
        if not config.vocab:
            self.known.vocabulary = dict.fromkeys(find_vocabulary(plans, planned, config.tp, config.sp), VOCAB_OFF)
            return plans, ()
        choice = with_vocabulary(plans, config.plan, planned, config.tp, config.sp, certain=not config.self_check)
        self.known.vocabulary = choice.reasons
        return choice.plans, choice.whole

    def _shard(self, planned: nn.Module, plans: list[ShardingPlan], groups: ParallelGroups) -> ShardedModel:
        """Shard the copy without memory, over groups that move nothing."""
        config = self.config
        refuse_compiled(self.model, (match.name for plan in plans for match in plan.match(planned)))
        if config.compile:
            refuse_untraceable(ResolvedPlan(planned, plans, config.tp, config.sp, config.loss_chunk))
        options: dict[str, Any] = config.model_dump(include={"sp", "regather", "loss_chunk", "recompute", "cp_method"})
        record = parallelize(planned, plans, groups, tiles=self._tiles, float8=Float8.of(config, groups), **options)
        for region in record.regions:
            region.streams.draws = []  # on the meta device they give no numbers
        return record

    def _change_unsharded(self, out: ShardedCopy) -> None:
        """Change a model of which tp shards nothing as its run does, where its blocks can be found."""
        config = self.config
        try:
            plans = self.found
            if plans is None:
                plans = resolve_plans(config.plan, out.model, lambda: self._infer(2))
        except ValueError as error:
            fields = "cp, float8, recompute, tile_mlp and loss_chunk"
            out.notes.append(f"{fields}: the blocks are found before training, and the step here runs without them ({error})")
            return
        options: dict[str, Any] = config.model_dump(include={"recompute", "loss_chunk"})
        float8 = Float8.of(config, out.groups)
        if config.cp > 1:  # first, as a run does it: a module that runs again does so with what is done around it
            count = len(split_context(out.model, plans, out.groups, config.cp_method).context_blocks)
            held = f"cp {config.cp}: a rank holds its positions of each sequence in {count} blocks and around them"
            out.notes.append(held)
        out.recomputed, _ = change_unsharded(out.model, plans, out.groups, tiles=self._tiles, float8=float8, **options)

    @unset_fake_temporarily()
    def _infer(self, tp: int, beside: Sequence[ShardingPlan] = ()) -> ShardingPlan:
        """Infer a plan from a small input with real numbers, outside the mode that makes tensors without memory."""
        config, step = self.config, self.step
        if step.example is None:
            raise ValueError(
                f"plan={config.plan if isinstance(config.plan, str) else config.plan.base!r}: no shipped plan fits "
                f"{type(self.model).__name__}, and to infer one an example is needed: pass example= (what forward takes) or batch= "
                "(what training_step takes; seqpar plan: --batch package.module:function), or set example_input_array on the module"
            )
        path = step.example.path
        part = self.model.get_submodule(path)
        own = ShardingPlan.from_rules(config.plan.rules) if isinstance(config.plan, PlanSpec) else None
        above = f"{path}." if path else ""
        others = [dataclasses.replace(plan, prefix=plan.prefix.removeprefix(above)) for plan in beside]
        examples = step.examples(part, tp * config.cp)
        for example in examples:
            try:
                inferred = infer_plan(part, example, tp, own, beside=others)
                break
            except CantInferError as error:  # the code may need all of its input
                if isinstance(error, UserDecidesError) or example is examples[-1]:
                    raise
        self.known.whole = {f"{above}{pattern}": why for pattern, why in inferred.whole.items()}
        self.known.no_sp = {f"{above}{pattern}": why for pattern, why in inferred.no_sp.items()}
        return dataclasses.replace(inferred.plan, prefix=path)

    def _held(self, named: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """The fields of :class:`RankBytes` for these parameters, without activations."""
        gradients = sum(self.split.nbytes(p) for p in named.values() if p.requires_grad)
        return {
            "parameters": sum(map(self.split.numel, named.values())),
            "parameter_bytes": sum(map(self.split.nbytes, named.values())),
            "gradient_bytes": gradients,
            "optimizer_bytes": OPTIMIZERS[self.optimizer] * gradients,
            "gathered_bytes": self.split.gathered(named),
        }

    def _trace(self, out: Description, model: nn.Module, record: ShardedModel | None) -> None:
        if self.step.example is None:
            out.notes.append(f"activations and traffic: {self.step.missing}")
            return
        out.input = list(self.step.sizes or ())
        model.train()
        traffic, saved, split = Traffic(), SavedBytes(exclude=model.parameters()), self.split
        try:
            with StepNumbers(), traffic:
                with saved, cast_in(self.precision):
                    loss = self.step.run(model)
                saved.keep_caches()
                loss.backward()
        except Exception as error:  # the user's code may raise anything; the notes say what
            out.notes.append(f"activations and traffic: {why_not_without_numbers(error)}")
            return
        out.activation_bytes = saved.total
        counts = dict(traffic.calls), dict(traffic.bytes)
        if record is not None:
            shared = split if split.replicas > 1 else None
            sums = step_traffic(record.layout, record.groups.size("tp"), record.groups.size("dp"), shared)
            for counted, more in zip(counts, sums, strict=True):
                counted["all_reduce"] = counted.get("all_reduce", 0) + more
        means = " × ".join(axis for axis in ("dp", "cp") if self.topology.get_dim(axis) > 1)
        if split.replicas > 1:
            for counted, over in zip(counts, split.traffic(dict(model.named_parameters())), strict=True):
                counted |= {f"{name} ({means})": count for name, count in over.items()}
        elif means:
            counts[1][f"all_reduce ({means})"] = out.gradient_bytes
        out.sent_calls, out.sent_bytes = ({k: v for k, v in counted.items() if v} for counted in counts)

    def cut(self, copied: nn.Module) -> Cut:
        """Where a copy of the model without memory is cut into the stages of a pipeline; raises what the model's code raises."""
        config, step = self.config, self.step
        plans = self.found or resolve_plans(config.plan, copied, lambda: self._infer(max(config.tp, 2)))
        if not isinstance(config.plan, PlanSpec) and leaves_blocks(copied, plans):
            plans = [self._infer(max(config.tp, 2))]
        stacks = stacks_of(copied, plans)
        check_stacks(stacks, config)
        numel = {name: parameter.numel() for name, parameter in copied.named_parameters()}
        return trace_cut(copied, lambda: step.run(copied), stacks, config, numel)

    def _cut(self, out: Description, planned: nn.Module, plans: list[ShardingPlan]) -> None:
        """Describe the stages of a pipeline; the numbers of ``out`` become those of the stage that keeps most."""
        config, step, rounds = self.config, self.step, self.config.virtual_pp or 1
        if step.example is None:
            out.notes.append(f"stages: {step.missing}")
            return
        self.found = plans or self.found
        try:
            with StepNumbers():
                cut = self.cut(without_numbers(self.model))
        except ValueError:
            raise
        except Exception as error:  # of the user's code
            out.notes.append(f"stages: {why_not_without_numbers(error)}")
            return
        blocks = sum(len(names) for names in cut.blocks)
        local = dict(planned.named_parameters())
        for at in range(config.pp):
            chunks = [cut.blocks[chunk] for chunk in cut.chunks(at)]
            count = sum(len(names) for names in chunks)
            # With many micro-batches; of a chunk at a time where a stage has several.
            alive = float(config.pp - at)
            if rounds > 1:
                alive = (warm_up(at, config.pp, rounds, config.pp * (rounds + 2)) + 1) / rounds
            kept = None if out.activation_bytes is None else int(alive * count / blocks * out.activation_bytes)
            ends = tuple((names[0], names[-1]) for names in chunks)
            held = self._held({name: local[name] for name in cut.held[at]})
            out.stages.append(StageRow(ends=ends, blocks=count, alive=alive, activation_bytes=kept, **held))
        largest = max(out.stages, key=lambda stage: stage.total_bytes)
        for one in dataclasses.fields(RankBytes):
            setattr(out, one.name, getattr(largest, one.name))
        out.notes += [
            "per rank: of the stage that keeps most; what is sent is that of all stages, without the activations between them",
            describe_bubble(config.pp, config.pp, rounds),
        ]


@dataclass
class ShardedCopy:
    """A copy of a model as a rank would hold it, without memory."""

    model: nn.Module
    groups: ParallelGroups
    record: ShardedModel | None = None  # None at tp 1
    plans: list[ShardingPlan] = field(default_factory=list)  # empty at tp 1
    whole: Sequence[str] = ()  # why what of the vocabulary is whole is so
    recomputed: Sequence[str] = ()  # modules that run again in the backward
    notes: list[str] = field(default_factory=list)


def without_numbers(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy whose tensors have shapes but no memory (fake tensors on the CPU), made inside of torch's mode for such tensors.

    Its parameters and buffers of floating-point numbers have the type ``dtype``, if one is given.
    """
    memo = left_out_of_copies(model)
    for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
        wanted = dtype if tensor.is_floating_point() else None
        empty: Tensor = torch.empty_like(tensor, device="cpu", dtype=wanted)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    with unset_fake_temporarily():
        copied = deep_copy(model, memo)
    change_attribute_tensors(
        copied,
        lambda x: not isinstance(x, FakeTensor),
        lambda x: torch.empty_like(x, device="cpu", requires_grad=x.requires_grad),
    )
    return copied


def configured(model: nn.Module) -> nn.Module:
    """A copy of a module that makes its model in ``configure_model``, with the model made on meta; any other module itself."""
    if not isinstance(model, pl.LightningModule) or any(True for _ in model.parameters()):
        return model
    copied = deep_copy(model, left_out_of_copies(model))
    assert isinstance(copied, pl.LightningModule)
    with torch.device("meta"):
        copied.configure_model()
    return copied


def _rows(model: nn.Module, record: ShardedModel | None) -> list[ModuleRow]:
    """The table: a row for all modules that have the same styles and shapes and whose names differ in numbers alone."""
    styles: dict[str, list[str]] = defaultdict(list)
    sources: dict[str, list[str]] = defaultdict(list)
    for name, style, source in record.choices if record is not None else ():
        styles[name].append(style)
        sources[name].append(source)
    rows: dict[Any, list[str]] = {}
    first: dict[int, str] = {}
    for name, module in model.named_modules():
        tensors, sums, tied = [], [], []
        for leaf, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{leaf}" if name else leaf
            if (known := first.setdefault(id(parameter), full)) != full:
                tied.append(leaf)
            layout = record.layout.get(known) if record is not None else None
            whole = layout.global_shape if layout is not None else tuple(parameter.shape)
            tensors.append((leaf, whole, tuple(parameter.shape)))
            if layout is not None and layout.is_partial:
                sums.append(f"sum over {', '.join(sorted(layout.sum_over))}: {layout.reason}")
            styles[name] += styles.pop(full, [])
            sources[name] += sources.pop(full, [])
        if not tensors and not styles.get(name):
            continue
        shards = record is not None and record.on_shard(name)
        style = ", ".join(dict.fromkeys(styles.get(name, []))) or ("on shards" if shards else "whole")
        said = "; ".join(dict.fromkeys(sums)), ", ".join(dict.fromkeys(sources.get(name, [])))
        rows.setdefault((starred(name), style, tuple(tensors), tuple(tied), *said), []).append(name)
    patterns = [pattern for pattern, *_ in rows]
    return [
        ModuleRow(pattern if patterns.count(pattern) == 1 else _braced(names), len(names), *rest)
        for (pattern, *rest), names in rows.items()
    ]


def _braced(names: Sequence[str]) -> str:
    """A pattern that matches exactly these names, which differ in numbers alone."""
    split = [name.split(".") for name in names]
    parts = [list(dict.fromkeys(column)) for column in zip(*split, strict=True)]
    return ".".join(part[0] if len(part) == 1 else "{" + ",".join(part) + "}" for part in parts)
