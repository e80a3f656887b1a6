"""When each stage of a pipeline runs which micro-batch, by the order that the training takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_seqpar.pipeline.cut import Part, interleave


class Run(NamedTuple):
    """One forward or backward of a micro-batch on a stage, with its begin and end in seconds."""

    stage: int
    part: Part
    begin: float
    end: float


def schedule(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Part]:
    """The order of one stage: one forward, one backward, or interleaved where stages have several chunks."""
    if chunks > 1:
        return interleave(stage, stages, chunks, micro_batches)
    first = min(stages - 1 - stage, micro_batches)
    order = [Part(at, 0, False) for at in range(first)]
    for at in range(first, micro_batches):
        order += [Part(at, 0, False), Part(at - first, 0, True)]
    return order + [Part(at, 0, True) for at in range(micro_batches - first, micro_batches)]


def timeline(seconds: Sequence[tuple[float, float]], chunks: int, micro_batches: int) -> list[Run]:
    """Runs of all stages, of which ``seconds`` gives a forward's and a backward's of one micro-batch through all its chunks.

    A forward waits for that of the chunk before it, a backward for that of the chunk behind it; nothing is lost between stages.
    """
    stages = len(seconds)
    left = [schedule(stage, stages, chunks, micro_batches) for stage in range(stages)]
    ended: dict[tuple[int, int, bool], float] = {}  # by micro-batch, number of the chunk in the model, and way
    now = [0.0] * stages
    runs: list[Run] = []
    last = stages * chunks - 1
    while any(left):
        for stage in range(stages):
            while left[stage]:
                part = left[stage][0]
                place = part.chunk * stages + stage
                before = (part.micro_batch, place + (1 if part.is_backward else -1), part.is_backward)
                if part.is_backward and place == last:
                    before = (part.micro_batch, place, False)
                if before not in ended and not (place == 0 and not part.is_backward):
                    break
                begin = max(now[stage], ended.get(before, 0.0))
                now[stage] = begin + seconds[stage][part.is_backward] / chunks
                ended[part.micro_batch, place, part.is_backward] = now[stage]
                runs.append(Run(stage, left[stage].pop(0), begin, now[stage]))
    return runs
