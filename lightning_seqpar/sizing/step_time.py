"""Seconds of a training step, from the usage of a traced micro-batch and what a machine reaches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.sizing.machines import Machine
from lightning_seqpar.sizing.memory import StagePart, sharded
from lightning_seqpar.sizing.timeline import timeline
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.verify.step_usage import Segment


@dataclass(frozen=True)
class StepSeconds:
    """Where the seconds of a step go, on the rank that takes longest.

    Attributes:
        products: matrix products and attentions.
        other: all other operations of the device, and the update.
        host: what the host is behind the device.
        sent: what collectives take beside what computing hides, by axis.
        bubble: waiting for other stages.
    """

    products: float
    other: float
    host: float
    sent: Mapping[str, float]
    bubble: float
    stages: tuple[tuple[float, float], ...] = ()  # of each stage a micro-batch's forward and backward

    @property
    def total(self) -> float:
        """All of it."""
        return self.products + self.other + self.host + sum(self.sent.values()) + self.bubble

    @property
    def limit(self) -> str:
        """The largest part, in a word or two."""
        parts = {"products": self.products, "memory traffic": self.other, "the host": self.host, "the bubble": self.bubble}
        parts |= {f"{axis} traffic": seconds for axis, seconds in self.sent.items()}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Links:
    """How fast the ranks of an axis reach each other."""

    topology: ProcessTopology
    machine: Machine

    def seconds(self, axes: Sequence[str], name: str, given: float) -> float:
        """Seconds of a collective of which a rank gives so many bytes, along axes."""
        return self.among(self.topology.get_comm_list(0, *axes), name, given)

    def among(self, ranks: Sequence[int], name: str, given: float) -> float:
        """Seconds of a collective among ranks."""
        count = len(ranks)
        if count < 2:
            return 0.0
        machine, per_node = self.machine, self.machine.per_node
        local = sum(rank // per_node == ranks[0] // per_node for rank in ranks)
        crosses = local < count
        # A ring over nodes leaves each of them by the links of all its members.
        speed = min(machine.in_node, machine.network * local) if crosses else machine.in_node
        latency = machine.latency.network if crosses else machine.latency.in_node
        share = (count - 1) / count
        if name.startswith("all_gather"):
            moved = given * (count - 1)
        elif name.startswith("all_reduce"):
            moved = 2 * given * share
        elif name.startswith("send"):
            moved = given
        else:
            moved = given * share
        return latency + moved / speed


def step_seconds(
    parts: Sequence[StagePart],
    config: ParallelConfig,
    topology: ProcessTopology,
    machine: Machine,
    micro_batches: int,
    dtype: str,
    moments: int,
) -> StepSeconds:
    """Seconds of a step of so many micro-batches on each replica.

    A pipeline's slowest stage takes those of all its micro-batches, and waits for others as the schedule has it: for equal ones
    ``(p - 1) / v`` micro-batches (arXiv 2104.04473, section 2.2). Gradients are summed over replicas under the last backward.
    """
    links = Links(topology, machine)
    stages = [_micro_batch(part, links, machine, dtype) for part in parts]
    slowest = max(range(len(parts)), key=lambda at: stages[at].total)
    one, part = stages[slowest], parts[slowest]
    sent = {axis: seconds * micro_batches for axis, seconds in one.sent.items()}
    if config.pp > 1:
        crossings = (config.virtual_pp or 1) * 2 * micro_batches
        passed = max(stage.received for stage in parts) / (config.virtual_pp or 1)
        between = links.seconds(("pp",), "send", passed)
        sent["pp"] = crossings * between * (1 - machine.overlap.get("pp", 0.0))
    axes = tuple(axis for axis in ("dp", "cp") if topology.get_dim(axis) > 1)
    shares = config.shares(topology.get_dim("dp") * config.cp)
    gradients = sum(parameter.nbytes for parameter in part.parameters if parameter.trains)
    if axes:
        sent["dp"] = _replicas(part, config, links, axes, micro_batches, one, shares)
    held = sum(sharded(parameter, shares) for parameter in part.parameters if parameter.trains)
    # An update reads parameter, gradient and moments, and writes all but the gradient.
    update = held * (3 + 2 * moments) / (machine.bandwidth * machine.bandwidth_share) if gradients else 0.0
    ways = tuple(
        (_micro_batch(part, links, machine, dtype, False).total, _micro_batch(part, links, machine, dtype, True).total)
        for part in parts
    )
    # Many micro-batches take as much longer as the slowest stage does.
    few = min(micro_batches, 2 * config.pp)
    chunks = config.virtual_pp or 1
    bubble = max(run.end for run in timeline(ways, chunks, few)) - few * sum(ways[slowest]) if config.pp > 1 else 0.0
    other = one.other * micro_batches + update
    return StepSeconds(one.products * micro_batches, other, one.host * micro_batches, sent, max(0.0, bubble), ways)


def _micro_batch(part: StagePart, links: Links, machine: Machine, dtype: str, is_backward: bool | None = None) -> StepSeconds:
    """Seconds of a micro-batch on a stage, or of its forward or its backward alone."""
    segments = [one for one in part.segments if is_backward is None or one.is_backward == is_backward]
    products = sum(
        count * machine.product_seconds(flops, moved, dtype, is_attention)
        for segment in segments
        for (is_attention, flops, moved), count in segment.products.items()
    )
    other = sum(segment.moved for segment in segments) / (machine.bandwidth * machine.bandwidth_share)
    sent: dict[str, float] = {}
    for axis, seconds, back in _traffic(segments, links):
        # Gathers of a backward run under its products, those of a forward under nothing.
        hidden = 0.0 if axis == "tp" and not back else machine.overlap.get(axis, 0.0)
        sent[axis] = sent.get(axis, 0.0) + seconds * (1 - hidden)
    host = sum(segment.operations for segment in segments) * machine.host
    behind = max(0.0, host - products - other - sum(sent.values()))
    return StepSeconds(products, other, behind, sent, 0.0)


def _traffic(segments: Iterable[Segment], links: Links) -> Iterable[tuple[str, float, bool]]:
    for segment in segments:
        for (axes, name, given), count in segment.collectives.items():
            named = tuple(axes.split(" × ")) if axes else ("tp",)
            yield named[0], count * links.seconds(named, name, given), segment.is_backward


def _replicas(
    part: StagePart,
    config: ParallelConfig,
    links: Links,
    axes: tuple[str, ...],
    micro_batches: int,
    one: StepSeconds,
    shares: int,
) -> float:
    """Seconds of the collectives over the replicas that a step does not hide."""
    gradients = sum(parameter.nbytes for parameter in part.parameters if parameter.trains)
    computing = one.products + one.other
    if shares == 1:
        seconds = links.seconds(axes, "all_reduce", gradients)
        return max(seconds - links.machine.overlap.get("dp", 0.0) * computing * 2 / 3, seconds * 0.05)
    held = sum(parameter.nbytes for parameter in part.parameters)
    ranks = links.topology.get_comm_list(0, *axes)
    sharing, same = ranks[:shares], ranks[::shares]
    stays = config.fsdp.get("reshard_after_forward") is False
    gather = links.among(sharing, "all_gather", held / shares)
    hides = links.machine.overlap.get("dp", 0.0) * computing
    exposed = 0.0
    for phase in (1 / 3, 2 / 3)[: 1 if stays else 2]:  # of the forward and of the backward
        exposed += max(gather - hides * phase, gather * 0.05)
    reduce = links.among(sharing, "reduce_scatter", gradients) + links.among(same, "all_reduce", gradients / shares)
    exposed += max(reduce - hides / 3, reduce * 0.05)
    return exposed * micro_batches
