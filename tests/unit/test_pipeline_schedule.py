"""The order of forwards and backwards where stages have several chunks of blocks."""

from __future__ import annotations

import pytest

from lightning_seqpar.pipeline.cut import interleave, warm_up
from tests.mutants import sees

FORWARD, BACKWARD = 1.0, 2.0


def ends(stages: int, chunks: int, micro: int) -> tuple[float, int]:
    """When the last stage is done, with backwards that take twice as long as forwards; how many chunks the first one keeps."""
    orders = [interleave(stage, stages, chunks, micro) for stage in range(stages)]
    at, clock, most = [0] * stages, [0.0] * stages, 0
    done: dict[tuple[int, int, bool], float] = {}
    last = stages * chunks - 1
    while any(at[stage] < len(order) for stage, order in enumerate(orders)):
        before = sum(at)
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                part = order[at[stage]]
                number = part.chunk * stages + stage
                needed = (part.micro_batch, number + 1, True) if part.is_backward else (part.micro_batch, number - 1, False)
                if part.is_backward and number == last:
                    needed = (part.micro_batch, number, False)
                if needed[1] >= 0 and needed not in done:
                    break
                clock[stage] = max(clock[stage], done.get(needed, 0.0)) + (BACKWARD if part.is_backward else FORWARD) / chunks
                done[part.micro_batch, number, part.is_backward] = clock[stage]
                at[stage] += 1
        assert sum(at) > before, f"{stages} stages with {chunks} chunks wait for each other: {micro} micro-batches"
    alive = 0
    for part in orders[0]:
        alive += -1 if part.is_backward else 1
        most = max(most, alive)
    return max(clock), most


@sees(
    "turns: a short round at the end",
    "_rounds",
    "    return [size + (at < more) for at in range(count)]",
    "    return [*[stages] * (micro_batches // stages), *[micro_batches % stages] * (micro_batches % stages > 0)]",
    case="2",
)
@pytest.mark.parametrize("stages", range(2, 9))
def test_no_stage_waits_for_ever_and_steps_take_what_the_formula_says(stages):
    for chunks in (2, 3, 4):
        for micro in range(1, 4 * stages + 2):
            took, kept = ends(stages, chunks, micro)
            if micro >= stages:
                assert took == pytest.approx(3 * (micro + (stages - 1) / chunks)), (chunks, micro)
            assert kept <= warm_up(0, stages, chunks, micro) + 1
