"""The best layouts of a model on a cluster: every legal one is predicted, those that fit are ordered by tokens per second."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.sizing.machines import Cluster, cluster
from lightning_seqpar.sizing.memory import PeakMemory, StagePart, parts_of, peak_memory
from lightning_seqpar.sizing.step_time import StepSeconds, step_seconds
from lightning_seqpar.sizing.traced import StepTracer
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.verify.describe import OPTIMIZERS
from lightning_seqpar.verify.guards.before_training import refuse_unsupported
from lightning_seqpar.verify.traced_step import checked_precision, sizes_of

RECOMPUTES = ("none", "activations", "selective", "full")
"""From what costs least to what keeps least."""


MAKE_LAYOUTS = frozenset(
    ("layout", "tp", "cp", "cp_method", "pp", "virtual_pp", "pp_layers", "pp_split_rank", "dp", "data_parallel", "recompute")
)
"""Fields that say of a layout what a search finds, and those that go with them."""

_FEWEST = 4096
"""Positions of a sequence below which a rank of cp has products too small for a device."""
_ENOUGH = 16384
"""Positions of a micro-batch that fill a device."""


@dataclass(frozen=True)
class PredictedLayout:
    """A layout, and what is predicted for it.

    Attributes:
        config: the fields that make it.
        axes: sizes of all axes.
        samples: samples of a micro-batch on one replica.
        micro_batches: how many of them make a step, on one replica.
        stages: the peak of a rank of each pipeline stage, in bytes.
        seconds: of a step.
        tokens: of a step, of all replicas.
        usable: bytes that a device has for tensors.
    """

    config: ParallelConfig
    axes: Mapping[str, int]
    samples: int
    micro_batches: int
    stages: tuple[PeakMemory, ...]
    seconds: StepSeconds
    tokens: int
    usable: float

    @property
    def memory(self) -> PeakMemory:
        """The peak of the fullest stage."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's peak is less than a device has for tensors."""
        return self.memory.total <= self.usable

    @property
    def tokens_per_second(self) -> float:
        """Of all replicas together."""
        return self.tokens / self.seconds.total

    @property
    def shown(self) -> str:
        """The layout in words: ``tp 8 × dp 8 fsdp, recompute full``."""
        sizes = [f"{axis} {size}" for axis, size in self.axes.items() if size > 1]
        split = "" if self.config.data_parallel == "ddp" else f" {self.config.data_parallel}"
        text = (" × ".join(sizes) or "one device") + split
        if (self.config.virtual_pp or 1) > 1:
            text += f", virtual_pp {self.config.virtual_pp}"
        return text + (f", recompute {self.config.recompute}" if self.config.recompute != "none" else "")

    def trainer(self, per_node: int) -> dict[str, Any]:
        """The section ``trainer`` of a YAML file for Lightning's command line."""
        world = math.prod(self.axes.values())
        nodes = max(1, -(-world // per_node))
        fields = self.config.model_dump(mode="json", exclude_defaults=True)
        # All of these, since the section may be merged with another one.
        layout = {name: getattr(self.config, name) for name in ("tp", "cp", "pp", "virtual_pp", "data_parallel", "recompute")}
        return {
            "devices": world // nodes,
            "num_nodes": nodes,
            "accumulate_grad_batches": self.micro_batches,
            "strategy": {"class_path": "lightning_seqpar.SeqParallelStrategy", "init_args": {**layout, **fields}},
        }

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        memory = self.memory
        kinds = ("parameters", "gradients", "optimizer", "gathered", "activations", "at_once", "total")
        return {
            "layout": self.shown,
            "config": self.config.model_dump(mode="json", exclude_defaults=True),
            "axes": dict(self.axes),
            "samples": self.samples,
            "micro_batches": self.micro_batches,
            "fits": self.fits,
            "usable_bytes": int(self.usable),
            "memory": {kind: getattr(memory, kind) for kind in kinds},
            "stages": [stage.total for stage in self.stages],
            "seconds": {
                "products": self.seconds.products,
                "other": self.seconds.other,
                "host": self.seconds.host,
                "sent": dict(self.seconds.sent),
                "bubble": self.seconds.bubble,
                "total": self.seconds.total,
            },
            "limit": self.seconds.limit,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass
class LayoutSearch:
    """What a search found.

    Attributes:
        cluster: the machines that it was asked for.
        best: the layouts that fit, the fastest first.
        too_large: those that do not fit, the one that is nearest to it first.
        step: in words, how large a step is, and which optimizer it has.
        refused: why whole groups of layouts can't be run, by what they have in common.
        notes: what the predictions assume.
    """

    cluster: Cluster
    precision: str
    step: str = ""
    best: list[PredictedLayout] = field(default_factory=list)
    too_large: list[PredictedLayout] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self, most: int = 5) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {
            "cluster": self.cluster.shown,
            "precision": self.precision,
            "step": self.step,
            "best": [one.to_dict() for one in self.best[:most]],
            "too_large": [one.to_dict() for one in self.too_large[:most]],
            "refused": dict(self.refused),
            "notes": list(self.notes),
        }


def fit_layout(
    model: nn.Module,
    machines: str | Cluster = "8x H100",
    *,
    tokens_per_batch: int | None = None,
    length: int | None = None,
    example: Any = None,
    batch: Any = None,
    optimizer: str = "adamw",
    precision: str = "bf16-mixed",
    config: ParallelConfig | Mapping[str, Any] | None = None,
    samples: int | None = None,
    accumulate: int | None = None,
) -> LayoutSearch:
    """Finds the layouts in which a model fits on machines, and orders them by how fast a step is; nothing is launched.

    Each legal tp (inside a node), cp, pp, way of data parallelism, recompute and micro-batch is predicted from a step that is run
    without memory, as :func:`lightning_seqpar.describe` runs it.

    Args:
        model: any module, real or on the meta device.
        machines: ``"8x H100"``, ``"64x A100"``, ... or a cluster of :func:`~lightning_seqpar.sizing.machines.cluster`.
        tokens_per_batch: positions of all samples of a step, over all replicas; the default is one sample a device.
        length: positions of a sample; the default is the model's own limit, 2,048 at most.
        example: what ``forward`` takes, and
        batch: what ``training_step`` takes, as for ``describe``; their samples are repeated or cut for other micro-batches.
        optimizer: ``adamw``, ``adam``, ``sgd`` or ``sgd-momentum``.
        precision: of the Trainer: ``bf16-mixed``, ``bf16-true``, ``16-mixed``, ``16-true``, ``32-true`` or ``64-true``.
        config: fields that are not searched but hold for every layout.
        samples: samples of a micro-batch, if they are given.
        accumulate: micro-batches of a step, if they are given: layouts then have unlike many tokens a step, in micro-batches of
            ``samples``, or as many as the batch has, and are ordered by tokens per second.

    Raises:
        ValueError: for a machine, an optimizer or a precision that is not known, and for a model whose step can't be traced.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is none of {', '.join(OPTIMIZERS)}")
    precision = checked_precision(precision)
    for name, value in (("tokens_per_batch", tokens_per_batch), ("length", length), ("samples", samples)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be 1 or more")
    asked = cluster(machines) if isinstance(machines, str) else machines
    fixed = config if isinstance(config, ParallelConfig) else ParallelConfig.from_omegaconf(config or {})
    tracer = StepTracer(model, precision, example, batch, length, optimizer, fixed.fsdp, asked.kind)
    if accumulate is not None and samples is None:
        samples = (sizes_of(batch if batch is not None else example) or (1, 1))[0]
    return _Search(tracer, asked, fixed, optimizer, tokens_per_batch, samples, accumulate).run()


def layout_of(
    model: nn.Module,
    machines: str | Cluster,
    config: ParallelConfig,
    *,
    micro_batches: int = 1,
    samples: int | None = None,
    length: int | None = None,
    example: Any = None,
    batch: Any = None,
    optimizer: str = "adamw",
    precision: str | None = "bf16-mixed",
) -> PredictedLayout:
    """What is predicted of one configuration, with the arguments of :func:`fit_layout`; no precision is the model's own types."""
    asked = cluster(machines) if isinstance(machines, str) else machines
    given = batch if batch is not None else example
    if samples is None:
        samples = (sizes_of(given) or (1, 1))[0]
    tracer = StepTracer(model, precision, example, batch, length, optimizer, config.fsdp, asked.kind)
    search = _Search(tracer, asked, config, optimizer, None, samples, micro_batches)
    search.count_tokens()
    topology = ProcessTopology.from_config(config, asked.devices)
    search.batch = topology.get_dim("dp") * samples * micro_batches
    return search.predict(config, samples, micro_batches)


@dataclass
class _Search:
    tracer: StepTracer
    cluster: Cluster
    fixed: ParallelConfig
    optimizer: str
    tokens_per_batch: int | None
    samples: int | None
    accumulate: int | None = None
    given: int = 1  # samples of the given batch
    undivided: set[int] = field(default_factory=set)  # numbers of replicas over which the samples of a step do not divide

    def run(self) -> LayoutSearch:
        out = LayoutSearch(self.cluster, self.tracer.precision or "")
        self.count_tokens()
        devices = self.cluster.devices
        asked = self.tokens_per_batch or self.length * devices
        self.batch = max(1, round(asked / self.length))
        if self.batch * self.length != asked:
            out.notes.append(
                f"{asked:,} tokens are no whole number of samples of {self.length:,}; counted are {self.batch:,} samples"
            )
        given = sizes_of(self.tracer.batch if self.tracer.batch is not None else self.tracer.example)
        self.given = 1 if given is None else given[0]
        out.step = f"{self.batch:,} samples of {self.length:,} positions a step, {self.optimizer}"
        found: list[PredictedLayout] = []
        errors: list[str] = []
        for tp, cp in self._inner():
            try:
                found += self._at(tp, cp, out)
            except ValueError as error:
                named = " × ".join(f"{axis} {size}" for axis, size in (("tp", tp), ("cp", cp)) if size > 1) or "tp 1"
                out.refused[named] = str(error)
                errors.append(str(error))
        if not found and errors:
            raise ValueError(errors[0])
        if found and self.undivided:
            counts = ", ".join(map(str, sorted(self.undivided)))
            out.notes.append(f"{self.batch:,} samples do not divide over {counts} replicas: such layouts are left out")
        fitting = [one for one in found if one.fits]
        out.best = sorted(_distinct(fitting), key=lambda one: -one.tokens_per_second)
        out.too_large = sorted((one for one in found if not one.fits), key=lambda one: one.memory.total)
        if not found:
            said = [f"{name}={getattr(self.fixed, name)}" for name in ("tp", "cp", "pp", "dp") if self._is_fixed(name)]
            beside, change = (f" with {', '.join(said)}", "these, or tokens_per_batch") if said else ("", "tokens_per_batch")
            out.notes.append(f"no layout{beside} divides {self.batch:,} samples over {devices} devices; change {change}")
        return out

    def count_tokens(self) -> None:
        """Read from the step how many positions a sample has."""
        first = self.tracer.step(self.samples or 1)
        self.length = first.sizes[1] if first.sizes else 1

    def _is_fixed(self, name: str) -> bool:
        return name in self.fixed.model_fields_set

    def _sizes(self, name: str, most: int) -> list[int]:
        if self._is_fixed(name):
            return [int(getattr(self.fixed, name))]
        return [size for size in range(1, most + 1) if self.cluster.devices % size == 0 and most % size == 0]

    def _inner(self) -> Iterator[tuple[int, int]]:
        per_node = min(self.cluster.machine.per_node, self.cluster.devices)
        longest = 2 ** int(math.log2(max(1, self.length // _FEWEST)))
        for cp in self._sizes("cp", min(longest, self.cluster.devices)):
            for tp in self._sizes("tp", per_node):
                if self.cluster.devices % (tp * cp) == 0:
                    yield tp, cp

    def _at(self, tp: int, cp: int, out: LayoutSearch) -> list[PredictedLayout]:
        """All layouts with a tp and a cp."""
        found: list[PredictedLayout] = []
        recomputes = [self.fixed.recompute] if self._is_fixed("recompute") else list(RECOMPUTES)
        for recompute in recomputes:
            fields = {"tp": tp, "cp": cp, "recompute": recompute}
            here: list[PredictedLayout] = []
            try:
                for layout in self._outer(fields, out):
                    here += self._micro_batches(layout)
            except ValueError as error:
                if recompute == recomputes[0]:
                    raise
                out.refused[f"tp {tp}, cp {cp}, recompute {recompute}"] = str(error)
            found += here
            if here and all(one.fits for one in here):
                break  # what keeps less is slower
        return found

    def _outer(self, fields: Mapping[str, Any], out: LayoutSearch) -> Iterator[ParallelConfig]:
        """Configurations with other pp, virtual_pp and ways of data parallelism."""
        rest = self.cluster.devices // (fields["tp"] * fields["cp"])
        blocks = len(self.tracer.trace(self._config(fields), self.samples or 1).blocks)
        stages = [size for size in range(1, rest + 1) if rest % size == 0 and (size == 1 or size <= blocks)]
        for pp in [self.fixed.pp] if self._is_fixed("pp") else stages:
            if rest % pp:
                continue
            replicas = rest // pp * fields["cp"]
            ways = ["ddp"] if replicas == 1 else ["ddp", "fsdp"]
            if replicas > self.cluster.machine.per_node > 1 and not self._is_fixed("data_parallel"):
                ways.append("hsdp")
            rounds = [1, 2] if 1 < pp <= blocks // 2 else [1]
            for virtual in [self.fixed.virtual_pp or 1] if self._is_fixed("virtual_pp") else rounds:
                if pp > 1 and (why := self._why_uncut(pp, virtual, fields)):
                    out.refused[f"pp {pp}" + f", virtual_pp {virtual}" * (virtual > 1)] = why
                    continue
                for way in [self.fixed.data_parallel] if self._is_fixed("data_parallel") else ways:
                    size = math.gcd(replicas, max(1, self.cluster.machine.per_node // fields["tp"]))
                    if way == "hsdp" and not self._is_fixed("fsdp") and not 1 < size < replicas:
                        continue
                    more: dict[str, Any] = {"pp": pp, "virtual_pp": virtual if virtual > 1 else None, "data_parallel": way}
                    if way == "hsdp" and not self._is_fixed("fsdp"):
                        more["fsdp"] = {**self.fixed.fsdp, "shard_size": size}
                    config = self._config({**fields, **more})
                    try:
                        refuse_unsupported(config)
                    except ValueError as error:
                        out.refused[way] = str(error)
                        continue
                    yield config

    def _why_uncut(self, pp: int, virtual: int, fields: Mapping[str, Any]) -> str:
        """Why the model can't be cut into so many stages, of so many chunks each; empty if it can."""
        try:
            self.tracer.cut(
                self._config({**fields, "pp": pp, "virtual_pp": virtual if virtual > 1 else None}), self.samples or 1
            )
        except ValueError as error:
            return str(error)
        return ""

    def _config(self, fields: Mapping[str, Any]) -> ParallelConfig:
        given = self.fixed.model_dump(exclude_unset=True)
        return ParallelConfig(**{**given, **{name: value for name, value in fields.items() if value is not None}})

    def _micro_batches(self, config: ParallelConfig) -> Iterator[PredictedLayout]:
        """A configuration with the micro-batches that divide the batch, as large as they fit."""
        dp = self.cluster.devices // (config.tp * config.cp * config.pp)
        if config.dp not in ("auto", dp):
            return
        if self.accumulate is not None:
            self.batch = dp * self.accumulate * (self.samples or 1)
        if self.batch % dp:
            self.undivided.add(dp)
            return
        each = self.batch // dp
        known = {1, 2, 4, 8, 16, 32, self.given}
        sizes = [n for n in sorted(known) if each % n == 0 and (n in (1, self.given) or n * self.length <= _ENOUGH)]
        sizes = sizes if self.samples is None else [self.samples]
        for samples in sizes:
            if each % samples or each // samples < (config.pp if config.pp > 1 else 1):
                continue
            one = self.predict(config, samples, each // samples)
            yield one
            if not one.fits:
                break

    def predict(self, config: ParallelConfig, samples: int, micro_batches: int) -> PredictedLayout:
        """What is predicted of one layout."""
        traced = self.tracer.trace(config, samples)
        cut = self.tracer.cut(config, samples) if config.pp > 1 else None
        topology = ProcessTopology.from_config(config, self.cluster.devices)
        replicas = topology.get_dim("dp") * config.cp
        moments = OPTIMIZERS[self.optimizer]
        parts: Sequence[StagePart] = parts_of(traced, config, cut)
        fused = self.cluster.kind == "cuda"
        stages = tuple(peak_memory(traced, part, config, replicas, micro_batches, moments, fused) for part in parts)
        dtype = "float8" if config.float8 != "none" else self.tracer.product_type
        seconds = step_seconds(parts, config, topology, self.cluster.machine, micro_batches, dtype, moments)
        axes = {axis: topology.get_dim(axis) for axis in topology.axes}
        tokens = self.batch * self.length
        return PredictedLayout(config, axes, samples, micro_batches, stages, seconds, tokens, self.cluster.machine.usable)


def _distinct(found: Sequence[PredictedLayout]) -> list[PredictedLayout]:
    """Of layouts that differ in their micro-batches alone the fastest."""
    best: dict[str, PredictedLayout] = {}
    for one in found:
        if one.shown not in best or one.tokens_per_second > best[one.shown].tokens_per_second:
            best[one.shown] = one
    return list(best.values())
