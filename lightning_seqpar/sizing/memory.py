"""The most memory that a rank holds in a step, from the usage of a traced micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.pipeline.cut import Cut, warm_up
from lightning_seqpar.sizing.traced import HeldParameter, TracedRank
from lightning_seqpar.verify.step_usage import BEHIND, FRONT, Segment


@dataclass(frozen=True)
class PeakMemory:
    """What the fullest moment of a step consists of, in bytes on one rank, as its allocator counts it.

    Attributes:
        parameters: parameters and buffers.
        gradients: of the parameters, with the buckets in which they are summed over replicas.
        optimizer: moments, and what their update needs at once.
        gathered: whole parameters and gradients that ``fsdp`` holds at once.
        activations: kept for the backward, of all micro-batches that are under way.
        at_once: what lives for a moment beside them: logits, gathered activations, a recomputed block.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    at_once: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations + self.at_once


@dataclass(frozen=True)
class StagePart:
    """What one stage of a pipeline, or the one rank of none, holds of a traced rank."""

    segments: Sequence[Segment]
    parameters: Sequence[HeldParameter]
    alive: float  # micro-batches whose activations it keeps at once
    received: int  # bytes of the activation that it takes from the stage before


def parts_of(traced: TracedRank, config: ParallelConfig, cut: Cut | None) -> list[StagePart]:
    """The stages of a configuration; one part without a pipeline."""
    if cut is None:
        return [StagePart(traced.segments, traced.parameters, 1.0, 0)]
    parts = []
    for stage in range(config.pp):
        chunks = [cut.blocks[at] for at in cut.chunks(stage)]
        own = {name for names in chunks for name in names}
        own |= {FRONT} if stage == 0 else set()
        own |= {BEHIND} if stage == config.pp - 1 else set()
        rounds = config.virtual_pp or 1
        alive = float(config.pp - stage)
        if rounds > 1:
            alive = (warm_up(stage, config.pp, rounds, config.pp * (rounds + 2)) + 1) / rounds
        received = sum(traced.activation.get(names[0], 0) for names in chunks[stage == 0 :])
        parts.append(
            StagePart(
                [one for one in traced.segments if one.block in own],
                [one for one in traced.parameters if one.name in cut.held[stage]],
                alive,
                received,
            )
        )
    return parts


def peak_memory(
    traced: TracedRank, part: StagePart, config: ParallelConfig, replicas: int, micro_batches: int, moments: int, fused: bool
) -> PeakMemory:
    """The fullest moment of a steady step on a rank of one stage.

    Args:
        traced: a micro-batch on one rank of tp × cp.
        part: the stage's share of it.
        config: the configuration.
        replicas: dp × cp.
        micro_batches: how many of them make a step, on one rank.
        moments: numbers of the optimizer's state for each number of a parameter.
        fused: whether the update makes tensors for all parameters at once, as torch's ``foreach`` does on GPUs.
    """
    shares = config.shares(replicas)
    trained = [one for one in part.parameters if one.trains]
    parameters = sum(sharded(one, shares) for one in part.parameters)
    gradients = sum(sharded(one, shares) for one in trained)
    optimizer = moments * gradients
    update = 0
    if moments:
        update = gradients if fused else 2 * max((sharded(one, shares) for one in trained), default=0)
    in_buckets = replicas > 1 and shares == 1
    views = in_buckets and bool(config.ddp.get("gradient_as_bucket_view"))
    buckets = gradients * (in_buckets and not views)
    base = parameters + optimizer + traced.buffer_bytes + traced.batch_bytes + buckets
    units = FsdpUnits.of(traced.units, part.parameters, config) if shares > 1 else None
    alive = min(part.alive, float(micro_batches))
    # Lightning empties the gradients of the last step between the forward and the backward of the first micro-batch.
    passes = [(alive, micro_batches == 1 and config.pp == 1 and not views)]
    if 1 < micro_batches <= alive and not views:  # all forwards of a first stage come before its first backward
        passes = [(alive, True), (alive - 1, False)]
    fullest, moment = base + gradients + update, (0, 0.0, gradients)
    for under_way, emptied in passes:
        before = (under_way - 1) * (kept_by(part.segments) + part.received) + part.received
        made: set[str] = set()  # gradients so far, in the backward
        now = grown = 0
        for one in part.segments:
            live, held, gathered = now + one.most, gradients, 0
            if units is not None:
                gathered = units.gathered(one, made, 0 if emptied else shares)
                live = now + one.most_growing if one.is_backward else live
                held = sum(sharded(p, shares) for p in trained if p.name in made) if emptied and one.is_backward else held
            elif emptied and one.is_backward:  # the gradients so far are those of this backward
                live, held = now + one.most_growing, grown
            held = 0 if emptied and micro_batches > 1 and not one.is_backward else held
            if (total := int(base + before + held + gathered + live)) > fullest:
                fullest, moment = total, (gathered, before + now, held)
            now, grown = now + one.left, grown + one.gradient_bytes
            made |= one.gradients
    gathered, kept, held = moment
    activations = int(kept)
    at_once = fullest - base - held - gathered - activations
    return PeakMemory(
        parameters + traced.buffer_bytes + traced.batch_bytes, held + buckets, optimizer, gathered, activations, at_once
    )


def kept_by(segments: Sequence[Segment]) -> int:
    """Bytes that the forward of these segments keeps for the backward."""
    return sum(one.left for one in segments if not one.is_backward)


@dataclass(frozen=True)
class FsdpUnits:
    """What ``fully_shard`` gathers at once, in bytes."""

    sizes: dict[str, int]  # of each unit
    gradients: dict[str, int]
    unit_of: dict[str, str]  # of each parameter; empty for one in no unit
    rest: int
    nbytes: dict[str, int]
    stays: bool

    @classmethod
    def of(cls, units: Sequence[str], parameters: Iterable[HeldParameter], config: ParallelConfig) -> FsdpUnits:
        """The units of parameters."""
        known = list(parameters)
        unit_of = {one.name: next((name for name in units if inside(one.name, name)), "") for one in known}
        sizes, gradients = dict.fromkeys(units, 0), dict.fromkeys(units, 0)
        for one in known:
            if unit := unit_of[one.name]:
                sizes[unit] += one.nbytes
                gradients[unit] += one.nbytes * one.trains
        rest = sum(one.nbytes for one in known if not unit_of[one.name])
        stays = config.fsdp.get("reshard_after_forward") is False
        return cls(sizes, gradients, unit_of, rest, {one.name: one.nbytes for one in known}, stays)

    def gathered(self, segment: Segment, made: set[str], adds: int) -> int:
        """Bytes of whole parameters in a segment, and of whole gradients that are not shared out yet.

        Beside the unit that computes the next one is gathered, and the gradients of the one before are summed; where earlier
        micro-batches have left gradients, its rows (of ``adds`` shares) are new for a moment.
        """
        order = [*self.sizes]
        at = next((number for number, name in enumerate(order) if inside(segment.block, name)), None)
        if segment.block in (FRONT, BEHIND):
            near = max(self.sizes.values(), default=0)
        elif at is None:  # units within a block
            near = 2 * max(self.sizes.values(), default=0)
        else:
            beside = order[max(0, at - 1)] if segment.is_backward else order[min(len(order) - 1, at + 1)]
            near = self.sizes[order[at]] + self.sizes[beside]
        gathered = self.rest + (sum(self.sizes.values()) if self.stays else near)
        if not segment.is_backward:
            return gathered
        whole = sum(self.nbytes[name] for name in made if not self.unit_of.get(name, ""))
        if at is not None and at + 1 < len(order):
            summed = self.gradients[order[at + 1]]
            whole += summed + (summed // adds if adds else 0)
        return gathered + whole


def sharded(one: HeldParameter, shares: int) -> int:
    """Bytes of a parameter on the first of the replicas that share it out by rows."""
    if shares == 1 or not one.rows:
        return one.nbytes
    return -(-one.rows // shares) * (one.nbytes // one.rows)
