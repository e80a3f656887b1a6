"""One rank's step of a model, run without memory at many configurations: what the predictions are made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.data.batch import map_tensors, tensors_in
from lightning_seqpar.distributed.rng import kept_streams
from lightning_seqpar.inference.pipeline_cut import stacks_of
from lightning_seqpar.parallel.fsdp_units import listed_blocks, units_among, units_of
from lightning_seqpar.pipeline.cut import Cut
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.releases import is_overridden, pl
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.verify.describe import Describer, configured, without_numbers
from lightning_seqpar.verify.step_usage import BEHIND, FRONT, Segment, StepUsage
from lightning_seqpar.verify.traced_step import PRECISIONS, StepNumbers, TracedStep, cast_in, sizes_of, why_not_without_numbers


def optimizer_of(model: nn.Module) -> str:
    """The kind of :data:`OPTIMIZERS` that keeps as much as what a module configures, by a step of it without memory.

    ``adamw`` for a module that configures none without a trainer.
    """
    if not isinstance(model, pl.LightningModule) or not is_overridden("configure_optimizers", model):
        return "adamw"
    try:
        with kept_streams(), FakeTensorMode(allow_non_fake_inputs=True):
            copied: Any = without_numbers(configured(model))
            copied._trainer = None  # whose data and ranks are not there yet
            found = [one for one in tree_leaves(copied.configure_optimizers()) if isinstance(one, Optimizer)]
            trained = [parameter for one in found for group in one.param_groups for parameter in group["params"]]
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            for one in found:
                one.step()
            kept = sum(x.nbytes for one in found for state in one.state.values() for x in tensors_in(state))
            share = kept / sum(parameter.nbytes for parameter in trained)
    except Exception:  # of the user's code, which may ask for its trainer
        return "adamw"
    return "sgd" if share < 0.1 else "sgd-momentum" if share < 1.1 else "adamw"


@dataclass(frozen=True)
class HeldParameter:
    """A parameter as one rank of tp holds it."""

    name: str
    nbytes: int
    rows: int  # length of its first dim
    trains: bool


@dataclass
class TracedRank:
    """Usage of one micro-batch on one rank of tp × cp that has all blocks."""

    segments: list[Segment]
    blocks: list[str]
    parameters: list[HeldParameter]
    buffer_bytes: int
    batch_bytes: int
    activation: dict[str, int]  # bytes that each block returns
    units: Sequence[str]  # modules that fsdp gathers each on its own


@dataclass
class StepTracer:
    """Traces a model's step at configurations; what does not depend on them is found once.

    Args:
        model: the model, on any device.
        precision: of the Trainer; None for the model's own types.
        example: what ``forward`` takes.
        batch: what ``training_step`` takes, in its place.
        length: positions of a sample, where tokens are drawn.
    """

    model: nn.Module
    precision: str | None = "bf16-mixed"
    example: Any = None
    batch: Any = None
    length: int | None = None
    optimizer: str = "adamw"
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cuda"
    _plans: dict[Any, list[ShardingPlan]] = field(default_factory=dict)
    _refused: dict[Any, str] = field(default_factory=dict)
    _traced: dict[Any, TracedRank] = field(default_factory=dict)
    _cuts: dict[Any, Cut] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with kept_streams():
            self.made = configured(self.model)

    @property
    def product_type(self) -> str:
        """In which type matrices are multiplied: ``bfloat16``."""
        own, products = PRECISIONS.get(self.precision or "", (None, None))
        found = products or own or next((p.dtype for p in self.made.parameters() if p.is_floating_point()), torch.float32)
        return str(found).removeprefix("torch.")

    def step(self, samples: int) -> TracedStep:
        """The step on so many samples."""
        example, batch = (None if x is None else resized(x, samples) for x in (self.example, self.batch))
        found = TracedStep.find(self.made, example, batch, samples, self.length)
        if found.example is None:
            raise ValueError(TracedStep.missing)
        return found

    def trace(self, config: ParallelConfig, samples: int) -> TracedRank:
        """Usage of a micro-batch of ``samples`` at the tp, cp and recompute of ``config``; raises ValueError where it can't run."""
        alone = config.model_copy(update={"pp": 1, "dp": "auto", "data_parallel": "ddp", "fsdp": {}, "virtual_pp": None})
        key = (alone.model_dump_json(), samples)
        if key not in self._traced:
            with _told(self.model):
                self._traced[key] = self._trace(alone, samples)
        return self._traced[key]

    def _trace(self, config: ParallelConfig, samples: int) -> TracedRank:
        passed = self._passed(config, samples)
        try:
            return self._run(config, samples, passed)
        except Exception:  # code that does not run without some of its blocks
            if not passed:
                raise
            return self._run(config, samples, {})

    def _run(self, config: ParallelConfig, samples: int, passed: Mapping[str, str]) -> TracedRank:
        """Run a step on one rank; instead of the blocks ``passed`` those that they are like count once more."""
        plans = self.plans(config, samples)
        with kept_streams():
            describer, mode = self._describer(config, samples)
            describer.found = plans
            with mode:
                copied = describer.shard_copy()
                model, step = copied.model.train(), describer.step
                blocks = [block for stack in stacks_of(model, plans) for block in stack.blocks] if plans else []
                blocks = blocks or units_of(model, listed_blocks(model))
                given = [*tensors_in((step.example.args, step.example.kwargs))] if step.example is not None else []
                if passed:
                    cut = self.cut(self._two_stages(config), samples)
                    for name in passed:
                        model.get_submodule(name).__dict__["forward"] = cut.stack_of(name).passing_by(name)
                usage = StepUsage([*model.parameters(), *model.buffers()], copied.groups)
                run = [name for name in blocks if name not in passed]
                with usage.watch(model, run), StepNumbers(self.device), usage:
                    with cast_in(self.precision):
                        loss = step.run(model)
                    usage.begin_backward()
                    loss.backward()
                held = [
                    HeldParameter(name, p.nbytes, p.shape[0] if p.ndim else 0, p.requires_grad)
                    for name, p in model.named_parameters()
                ]
                return TracedRank(
                    _with_passed(usage.finish(), blocks, passed),
                    blocks,
                    held,
                    sum(b.nbytes for b in model.buffers()),
                    sum(x.nbytes for x in given),
                    {name: usage.activation.get(passed.get(name, name), 0) for name in blocks},
                    units_of(model, units_among(self.fsdp, model, [*blocks, *listed_blocks(model)])),
                )

    def _passed(self, config: ParallelConfig, samples: int) -> dict[str, str]:
        """Blocks that are not run, since others of their kind are, with the one that stands for each."""
        try:
            cut = self.cut(self._two_stages(config), samples)
        except ValueError:  # no stages can be made of it
            return {}
        passed: dict[str, str] = {}
        for stack in cut.stacks:
            first: dict[Any, str] = {}
            for name in stack.blocks[1:-1]:
                like = first.setdefault(_kind(self.made.get_submodule(name)), name)
                if like != name:
                    passed[name] = like
        return passed

    @staticmethod
    def _two_stages(config: ParallelConfig) -> ParallelConfig:
        return config.model_copy(update={"pp": 2, "virtual_pp": None, "pp_layers": None})

    def cut(self, config: ParallelConfig, samples: int) -> Cut:
        """Where a pipeline's stages are cut; raises ValueError where the model can't be."""
        whole = ParallelConfig(pp=config.pp, virtual_pp=config.virtual_pp, pp_layers=config.pp_layers)
        key = whole.model_dump_json()
        if key not in self._cuts:
            plans = self.plans(config, samples)
            with _told(self.model), kept_streams():
                describer, mode = self._describer(whole, samples)
                describer.found = plans
                with mode, StepNumbers(self.device):
                    self._cuts[key] = describer.cut(without_numbers(self.made))
        return self._cuts[key]

    def plans(self, config: ParallelConfig, samples: int) -> list[ShardingPlan]:
        """The plans that hold for the model at a tp; at tp 1, where they say what the blocks are, those of tp 2."""
        tp = max(2, config.tp)
        key = (tp, config.sp, config.vocab, repr(config.plan))
        if (why := self._refused.get(key)) is not None:
            if config.tp > 1 or config.cp > 1 or config.pp > 1 or config.recompute != "none":
                raise ValueError(why)
            return []
        if key not in self._plans:
            fields = config.model_dump(include={"sp", "vocab", "plan", "self_check"})
            describer, mode = self._describer(ParallelConfig(**{**fields, "tp": tp}), samples)
            try:
                with mode:
                    self._plans[key] = describer.find_plans(without_numbers(self.made))[0]
            except ValueError as error:
                self._refused[key] = str(error)
                return self.plans(config, samples)
        return self._plans[key]

    def _describer(self, config: ParallelConfig, samples: int) -> tuple[Describer, FakeTensorMode]:
        topology = ProcessTopology.from_config(config, config.smallest_world)
        step = self.step(samples)
        describer = Describer(self.made, config, topology, self.optimizer, step, precision=self.precision)
        return describer, FakeTensorMode(allow_non_fake_inputs=True)


def _kind(block: nn.Module) -> Any:
    """A key that is equal for blocks which use the same."""
    simple = [
        (name, key, value != 0 if isinstance(value, float) else value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and not _INDEX.search(key)
    ]
    shapes = [(name, x.shape, x.requires_grad) for name, x in block.named_parameters()]
    return type(block), tuple(sorted(simple, key=repr)), tuple(shapes)


_INDEX = re.compile(r"idx|index|layer_id|layer_num|depth|block_id|block_num")
"""Attributes that number blocks."""


def _with_passed(segments: Sequence[Segment], blocks: Sequence[str], passed: Mapping[str, str]) -> list[Segment]:
    """Segments with those of the blocks that passed by, each as that of a block of its kind, where it would have run."""
    if not passed:
        return list(segments)
    known = {(one.block, one.is_backward): one for one in segments}
    out: list[Segment] = []
    for is_backward in (False, True):
        order = [FRONT, *blocks, BEHIND]
        for name in reversed(order) if is_backward else order:
            found = known.get((passed.get(name, name), is_backward))
            if found is not None:
                out.append(found.of_block(name) if name in passed else found)
    return out


@contextmanager
def _told(model: nn.Module) -> Iterator[None]:
    """A context in which whatever the model's code raises, or torch's where tensors have no numbers, is a ValueError."""
    try:
        yield
    except (ValueError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"{type(model).__name__}: {why_not_without_numbers(error)}") from error


def resized(given: Any, samples: int) -> Any:
    """A batch or an example with so many samples: tensors whose first dim is the batch's are repeated or cut."""
    found = sizes_of(given) or next((x.shape for x in tensors_in(given) if x.ndim), None)
    if found is None or found[0] == samples:
        return given

    def change(x: Tensor) -> Tensor:
        if not x.ndim or x.shape[0] != found[0]:
            return x
        return x.repeat(-(-samples // found[0]), *[1] * (x.ndim - 1))[:samples]

    return map_tensors(change, given)
