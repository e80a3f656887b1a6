"""Who holds which positions, against a list of them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_seqpar.context.chunks import Chunks, contiguous, zigzag

CPU = torch.device("cpu")


class Group:
    """Of a group, what chunks ask for."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


def chunks_of(deal: Any, length: int, size: int, rank: int = 0) -> Chunks:
    return Chunks(Group(rank), length, deal(length, size), "auto")  # type: ignore[arg-type]


def held(chunks: Chunks) -> list[list[int]]:
    return [[at for start, stop in runs for at in range(start, stop)] for runs in chunks.ranges]


deals = st.sampled_from([contiguous, zigzag])
lengths = st.integers(0, 40)
sizes = st.integers(1, 6)


@given(deals, lengths, sizes)
def test_every_position_is_held_once(deal, length, size):
    chunks = chunks_of(deal, length, size)
    assert sorted(at for positions in held(chunks) for at in positions) == list(range(length))
    assert chunks.size == size
    assert chunks.counts == tuple(len(positions) for positions in held(chunks))
    runs = len(chunks.ranges[0])
    assert max(chunks.counts) - min(chunks.counts) <= runs, "as even as it goes"


@given(st.integers(1, 8), sizes)
def test_zigzag_evens_out_causal_work(each, size):
    """Queries and keys before them, of every rank: equally many where the length divides by twice the ranks."""
    work = [sum(at + 1 for at in positions) for positions in held(chunks_of(zigzag, 2 * size * each, size))]
    assert len(set(work)) == 1
