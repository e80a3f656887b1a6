"""Who holds which positions, against a list of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_seqpar.context.chunks import contiguous, zigzag


def held(deal: Any, length: int, size: int) -> list[list[int]]:
    """The positions of each rank."""
    return [[at for start, stop in runs for at in range(start, stop)] for runs in deal(length, size)]


deals = st.sampled_from([contiguous, zigzag])
lengths = st.integers(0, 40)
sizes = st.integers(1, 6)


@given(deals, lengths, sizes)
def test_every_position_is_held_once(deal, length, size):
    positions = held(deal, length, size)
    assert sorted(at for of_rank in positions for at in of_rank) == list(range(length))
    counts = [len(of_rank) for of_rank in positions]
    assert len(counts) == size
    assert max(counts) - min(counts) <= len(deal(length, size)[0]), "as even as it goes"


@given(st.integers(1, 8), sizes)
def test_zigzag_evens_out_causal_work(each, size):
    """Queries and keys before them, of every rank: equally many where the length divides by twice the ranks."""
    work = [sum(at + 1 for at in positions) for positions in held(zigzag, 2 * size * each, size)]
    assert len(set(work)) == 1
