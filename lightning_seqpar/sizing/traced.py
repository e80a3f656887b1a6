"""One rank's step of a model, run without memory at many configurations: what the predictions are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.data.batch import map_tensors, tensors_in
from lightning_seqpar.distributed.rng import kept_streams
from lightning_seqpar.inference.pipeline_cut import stacks_of
from lightning_seqpar.parallel.fsdp_units import listed_blocks, units_among, units_of
from lightning_seqpar.pipeline.cut import Cut
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.verify.describe import Describer, configured, without_numbers
from lightning_seqpar.verify.step_usage import Segment, StepUsage
from lightning_seqpar.verify.traced_step import StepNumbers, TracedStep, why_not_without_numbers

PRECISIONS = {
    "32-true": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, None),
    "16-mixed": (torch.float32, torch.float16),
    "64-true": (torch.float64, None),
}
"""Precisions of a Trainer: the type of the parameters, and that of products where it is another one."""


@dataclass(frozen=True)
class HeldParameter:
    """A parameter as one rank of tp holds it."""

    name: str
    numel: int
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
        precision: of the Trainer.
        example: what ``forward`` takes.
        batch: what ``training_step`` takes, in its place.
        length: positions of a sample, where tokens are drawn.
    """

    model: nn.Module
    precision: str = "bf16-mixed"
    example: Any = None
    batch: Any = None
    length: int | None = None
    optimizer: str = "adamw"
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    _plans: dict[int, list[ShardingPlan]] = field(default_factory=dict)
    _traced: dict[Any, TracedRank] = field(default_factory=dict)
    _cuts: dict[Any, Cut] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with kept_streams():
            self.made = configured(self.model)

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
            self._traced[key] = self._trace(alone, samples)
        return self._traced[key]

    def _trace(self, config: ParallelConfig, samples: int) -> TracedRank:
        with kept_streams():
            describer, mode = self._describer(config, samples)
            with mode:
                copied = describer.shard_copy()
                model = copied.model.train()
                plans = copied.plans or self.plans(2, samples)
                blocks = [block for stack in stacks_of(copied.model, plans) for block in stack.blocks]
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = None
                step = describer.step
                given = [*tensors_in((step.example.args, step.example.kwargs))] if step.example is not None else []
                usage = StepUsage([*model.parameters(), *model.buffers()], copied.groups)
                try:
                    with usage.watch(model, blocks), StepNumbers(), usage:  # type: ignore[no-untyped-call]
                        with self._cast():
                            loss = step.run(model)
                        usage.begin_backward()
                        loss.backward()
                except Exception as error:  # of the user's code
                    raise ValueError(f"the step can't be traced: {why_not_without_numbers(error)}") from error
                held = [
                    HeldParameter(name, p.numel(), p.nbytes, p.shape[0] if p.ndim else 0, p.requires_grad)
                    for name, p in model.named_parameters()
                ]
                return TracedRank(
                    usage.finish(),
                    blocks,
                    held,
                    sum(b.nbytes for b in model.buffers()),
                    sum(x.nbytes for x in given),
                    usage.activation,
                    units_of(model, units_among(self.fsdp, model, [*blocks, *listed_blocks(model)])),
                )

    def cut(self, config: ParallelConfig, samples: int) -> Cut:
        """Where a pipeline's stages are cut; raises ValueError where the model can't be."""
        whole = ParallelConfig(pp=config.pp, virtual_pp=config.virtual_pp, pp_layers=config.pp_layers)
        key = whole.model_dump_json()
        if key not in self._cuts:
            with kept_streams():
                describer, mode = self._describer(whole, samples)
                describer.found = self.plans(2, samples)
                with mode:
                    self._cuts[key] = describer.cut(without_numbers(self.made))
        return self._cuts[key]

    def plans(self, tp: int, samples: int) -> list[ShardingPlan]:
        """The plans that hold for the model at a tp."""
        if tp not in self._plans:
            config = ParallelConfig(tp=max(2, tp))
            describer, mode = self._describer(config, samples)
            with mode:
                self._plans[tp] = describer.shard_copy().plans
        return self._plans[tp]

    def _describer(self, config: ParallelConfig, samples: int) -> tuple[Describer, FakeTensorMode]:
        topology = ProcessTopology.from_config(config, config.smallest_world)
        step = self.step(samples)
        dtype, _ = PRECISIONS[self.precision]
        describer = Describer(self.made, config, topology, self.optimizer, step, dtype=dtype)
        return describer, FakeTensorMode(allow_non_fake_inputs=True)

    def _cast(self) -> AbstractContextManager[Any]:
        _, dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def resized(given: Any, samples: int) -> Any:
    """A batch or an example with so many samples: tensors whose first dim is the batch's are repeated or cut."""
    sizes = [x.shape[0] for x in tensors_in(given) if x.ndim]
    if not sizes or sizes[0] == samples:
        return given

    def change(x: Tensor) -> Tensor:
        if not x.ndim or x.shape[0] != sizes[0]:
            return x
        return x.repeat(-(-samples // sizes[0]), *[1] * (x.ndim - 1))[:samples]

    return map_tensors(change, given)
