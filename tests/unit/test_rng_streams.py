"""A rank's own random stream and the one that its replica shares, and who draws from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_seqpar.distributed.rng import STILL, DrawWatch, RankStreams
from tests.mutants import sees


def test_an_unused_stream_leaves_no_trace():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    streams = RankStreams(1)
    streams.begin()
    streams.end()
    assert torch.equal(torch.rand(3), expected)


def draws(rank: int, seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    streams, out = RankStreams(rank), []
    for _ in range(2):
        streams.begin()
        out.append(torch.rand(4))
        streams.pause()
        out.append(torch.rand(4))
        streams.resume()
        out.append(torch.rand(4))
        streams.end()
        out.append(torch.rand(4))
    return out


@sees("every rank draws the same masks", "_reseed", 'salt=rank.to_bytes(4, "little")', 'salt=b"0"')
def test_own_draws_differ_and_replicated_ones_do_not():
    one, two = draws(0), draws(1)
    for at, (a, b) in enumerate(zip(one, two, strict=True)):
        assert torch.equal(a, b) is (at % 4 in (1, 3))
    flat = torch.stack([*one, *(b for at, b in enumerate(two) if at % 4 in (0, 2))])
    assert len(flat.flatten().unique()) == flat.numel()  # nothing is drawn twice


@sees(
    "every step draws the same masks",
    "RankStreams._end",
    "        _advance(used)\n        self._behind",
    "        self._behind",
)
def test_no_two_blocks_draw_the_same():
    """Also where nothing is drawn between them."""
    torch.manual_seed(1)
    streams, drawn = RankStreams(1), []
    for _ in range(3):
        streams.begin()
        drawn.append(torch.rand(4))
        streams.end()
    assert len(torch.stack(drawn).unique()) == 12


def test_the_seed_alone_decides():
    assert all(torch.equal(a, b) for a, b in zip(draws(1), draws(1), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(draws(1), draws(1, seed=2), strict=True))


def in_backward(act: Any) -> None:
    x = torch.ones((), requires_grad=True)
    y = 2 * x
    y.register_hook(act)
    y.backward()


@sees(
    "a recompute that begins behind a pause goes on with its stream",
    "RankStreams._resume",
    '        if moved or where != "end":\n',
    "        if False:\n",
)
def test_a_recompute_draws_what_the_forward_drew():
    """Checkpointing gives back the state at its start; what is paused then is found again by it."""
    torch.manual_seed(1)
    streams = RankStreams(1)
    streams.begin()
    before = torch.get_rng_state()
    streams.pause()
    whole = torch.rand(4)
    streams.resume()
    own = torch.rand(4)
    streams.end()

    def again(grad: Tensor) -> None:
        torch.set_rng_state(before)
        streams.pause()
        assert torch.equal(torch.rand(4), whole)
        streams.resume()
        assert torch.equal(torch.rand(4), own)

    in_backward(again)


@sees(
    "two pauses of one block share a state",
    "RankStreams._resume",
    "            _advance([True] * len(now))  # the next pause begins at a state of its own\n",
    "",
)
def test_a_recompute_finds_every_pause_though_nothing_of_its_own_is_drawn_between():
    """As where adapters drop out one whole activation each."""
    torch.manual_seed(1)
    streams, drawn, states = RankStreams(1), [], []
    streams.begin()
    for at in range(3):
        states.append(torch.get_rng_state())
        streams.pause()
        states.append(torch.get_rng_state())
        drawn.append(torch.rand(4))
        streams.resume(at)
    drawn.append(torch.rand(4))
    streams.end()

    def again(grad: Tensor) -> None:
        for start in (0, 1, 2):
            torch.set_rng_state(states[2 * start])
            for at in range(start, 3):
                streams.pause()
                assert torch.equal(torch.rand(4), drawn[at])
                streams.resume(at)
            assert torch.equal(torch.rand(4), drawn[3])
        torch.set_rng_state(states[5])  # a part that begins in the pause
        assert torch.equal(torch.rand(4), drawn[2])
        streams.resume(2)
        assert torch.equal(torch.rand(4), drawn[3])

    in_backward(again)


def test_a_recompute_that_ends_in_a_pause_leaves_nothing_to_the_next():
    """As where a block's last kept tensor is that of its DropPath: checkpointing stops there."""
    torch.manual_seed(1)
    streams, starts, own = RankStreams(1), [], []
    for draws in (False, True):
        starts.append(torch.get_rng_state())
        streams.begin()
        streams.pause()
        if draws:
            torch.rand(4)
        streams.resume("attn.q")
        own.append(torch.rand(4))
        streams.end()

    def again(grad: Tensor) -> None:
        torch.set_rng_state(starts[1])
        streams.begin()
        streams.pause()
        torch.rand(4)
        torch.set_rng_state(starts[0])
        streams.begin()
        streams.pause()
        streams.resume("attn.q")
        assert torch.equal(torch.rand(4), own[0])

    in_backward(again)


def test_a_recompute_leaves_no_stream_begun():
    torch.manual_seed(1)
    streams = RankStreams(1)
    before = torch.get_rng_state()
    streams.begin(nests=False)
    own = torch.rand(4)
    streams.end()

    def again(grad: Tensor) -> None:
        for _ in range(2):
            torch.set_rng_state(before)
            streams.begin(nests=False)
            streams.begin(nests=False)
            assert torch.equal(torch.rand(4), own)

    after = torch.get_rng_state()
    in_backward(again)
    assert not streams.on
    torch.set_rng_state(after)
    streams.begin(nests=False)
    assert not torch.equal(torch.rand(4), own)


def test_what_a_recompute_cannot_tell_apart_is_refused():
    torch.manual_seed(1)
    streams = RankStreams(1)
    streams.begin()
    whole = []
    for _ in range(2):
        streams.pause()
        whole.append(torch.get_rng_state())
        streams.resume("attn.q")
        torch.rand(1)
    streams.end()

    def again(grad: Tensor) -> None:
        torch.set_rng_state(whole[1])
        with pytest.raises(ValueError, match=r"attn\.q ran twice at one state"):
            streams.resume("attn.q")

    in_backward(again)


@pytest.mark.parametrize("draw", ["poisson", "binomial", "rand", "own"])
def test_a_generator_is_seen_wherever_it_is_given(draw):
    numbers, drawn, rates = torch.Generator(), [], torch.ones(3)
    with DrawWatch(drawn.append):
        if draw == "poisson":
            torch.poisson(rates, generator=numbers)
        elif draw == "binomial":
            torch.binomial(rates, rates / 2, generator=numbers)
        elif draw == "rand":
            torch.rand(3, generator=numbers)
        else:
            torch.rand(3, generator=torch.default_generator)
    assert [(one.shape, one.seeded) for one in drawn] == [((3,), draw != "own")]


@sees(
    "an unexpected draw not seen",
    "RankStreams._end",
    "            self.draws = any(used)\n",
    "            self.draws = False\n",
)
def test_where_no_draws_are_expected_nothing_is_switched_until_one_is_seen():
    torch.manual_seed(1)
    alike = torch.rand(2, 4)
    torch.manual_seed(1)
    streams = RankStreams(1)
    streams.draws = False
    streams.begin()
    streams.pause()
    streams.resume()
    streams.end()
    assert (streams.drawn, streams.draws) == ([STILL], False)
    streams.begin()
    assert streams.own
    assert torch.equal(torch.rand(4), alike[0])  # of the replicated stream, and so on every rank
    streams.end()
    assert streams.draws
    streams.begin()
    assert not torch.equal(torch.rand(4), alike[1])  # the rank's own from here on
    streams.end()
    assert streams.drawn[:2] == [STILL, b"unexpected"]
    assert streams.drawn[2] not in (STILL, b"unexpected")
    streams.forget()
    assert streams.draws


@sees("ranks go on apart behind an unexpected draw", "RankStreams._end", "                _restore(self._begun)\n", "")
def test_ranks_go_on_alike_behind_an_unexpected_draw_of_different_lengths():
    behind = []
    for rank, count in ((0, 3), (1, 700)):
        torch.manual_seed(1)
        streams = RankStreams(rank)
        streams.draws = False
        streams.begin()
        torch.rand(count)
        streams.end()
        behind.append(torch.rand(4))
    assert torch.equal(*behind)


def test_a_stream_that_drew_nothing_and_one_that_drew_alike_are_told_apart():
    torch.manual_seed(1)
    streams = RankStreams(1)
    for paused in (False, True):
        streams.begin()
        streams.pause()
        if paused:
            torch.rand(1)
        streams.resume()
        streams.end()
    assert streams.drawn[0] == STILL != streams.drawn[1]
