"""Who holds which positions, against a list of them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
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


def test_zigzag_is_even_on_one_rank_alone_where_no_index_is_needed():
    assert not chunks_of(zigzag, 8, 2).is_even
    assert not chunks_of(contiguous, 7, 2).is_even
    assert chunks_of(contiguous, 8, 2).is_even
    swapped = Chunks(Group(0), 4, (((2, 4),), ((0, 2),)))  # type: ignore[arg-type]
    assert not swapped.is_even, "in another order than the ranks'"


@given(deals, lengths, sizes)
def test_what_is_held_comes_back_in_order(deal, length, size):
    chunks = chunks_of(deal, length, size)
    whole = torch.arange(length)
    parts = [whole[positions] for positions in held(chunks)]
    longest = max(chunks.counts)
    padded = torch.cat([torch.cat([part, part.new_full((longest - len(part),), -1)]) for part in parts])
    assert torch.equal(padded[chunks.order(CPU, is_padded=True)], whole)
    assert torch.equal(torch.cat(parts)[chunks.order(CPU)], whole)
    assert chunks.positions(CPU).tolist() == held(chunks)[0]
    assert chunks.positions(CPU) is chunks.positions(CPU), "made once"


@settings(max_examples=60)
@given(deals, lengths, sizes, st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_own_positions_of_a_whole(deal, length, size, before, behind, dim):
    shape = [2, 3, 4]
    shape[dim] = before * length * behind
    whole = torch.randn(shape)
    split = whole.unflatten(dim, (before, length, behind)) if length else whole
    for rank in range(size):
        chunks = chunks_of(deal, length, size, rank)
        own = chunks.own(whole, dim, before, behind)
        assert chunks.local_length == len(held(chunks)[rank])
        if not length:
            assert own.shape[dim] == 0
            continue
        expected = split.index_select(dim + 1, torch.tensor(held(chunks)[rank], dtype=torch.long))
        assert torch.equal(own, expected.flatten(dim, dim + 2))


@given(deals, st.integers(1, 40), sizes, st.data())
def test_a_slice_keeps_what_each_rank_holds_of_it(deal, length, size, data):
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    for rank in range(size):
        chunks = chunks_of(deal, length, size, rank)
        mine = held(chunks)[rank]
        sliced = chunks.sliced(start, stop)
        assert (sliced.length, sliced.method, sliced.size) == (stop - start, chunks.method, size)
        assert held(sliced)[rank] == [at - start for at in mine if start <= at < stop]
        local = [n for first, last in chunks.held_between(start, stop) for n in range(first, last)]
        assert [mine[n] for n in local] == [at for at in mine if start <= at < stop]
        assert all(first < last for first, last in chunks.held_between(start, stop))
        whole = torch.randn(length)[start:stop]
        assert torch.equal(sliced.own(whole, 0), whole[held(sliced)[rank]]), "also where a rank holds none of it"
        assert all(sliced.ranges), "no rank without a run, which may be empty"
