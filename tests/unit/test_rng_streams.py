"""A rank's own random stream and the one that its replica shares, and who draws from them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_seqpar.distributed.rng import DEVICES, DrawWatch, RankStreams, drawn_apart, drawn_since, generators, torch_states
from lightning_seqpar.region.observers import WatchSchedule
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
    """Own and replicated draws in turn."""
    torch.manual_seed(seed)
    streams, out = RankStreams(rank), []
    for _ in range(4):
        streams.begin()
        out.append(torch.rand(4))
        streams.end()
        out.append(torch.rand(4))
    return out


@sees("every rank draws the same masks", "_derived_seed", 'salt=place.to_bytes(4, "little")', 'salt=b"0"')
def test_own_draws_differ_and_replicated_ones_do_not():
    one, two = draws(0), draws(1)
    for at, (a, b) in enumerate(zip(one, two, strict=True)):
        assert torch.equal(a, b) is bool(at % 2)
    flat = torch.stack([*one, *two[::2]])
    assert len(flat.flatten().unique()) == flat.numel()  # nothing is drawn twice
    assert all(torch.equal(a, b) for a, b in zip(one, draws(0), strict=True))  # the seed alone decides
    assert not any(torch.equal(a, b) for a, b in zip(one, draws(0, seed=2), strict=True))


@sees("every step draws the same masks", "RankStreams.end", "                if used:\n                    _advance(one)\n", "")
def test_no_two_blocks_draw_the_same():
    """Also where nothing is drawn between them."""
    torch.manual_seed(1)
    streams, drawn = RankStreams(1), []
    for _ in range(3):
        streams.begin()
        drawn.append(torch.rand(4))
        streams.end()
    assert len(torch.stack(drawn).unique()) == 12


@sees(
    "a recompute that begins in the own stream does not find the replicated one",
    "RankStreams.begin",
    "if one.initial_seed() not in self._shared:",
    "if one.initial_seed() not in [*self._shared][-1:]:",
)
def test_a_recompute_draws_what_the_forward_drew_wherever_it_begins():
    """Checkpointing gives back the state at its start, here at each switch of a block with two pauses, in the first of which
    nothing is drawn."""
    torch.manual_seed(1)
    streams, states, drawn = RankStreams(1), [], []
    switches = [streams.begin, streams.end, streams.begin, streams.end, streams.begin, streams.end]

    def run(start: int, found: list[Tensor]) -> None:
        for at, switch in enumerate(switches):
            if at < start:
                continue
            states.append(torch.get_rng_state())
            assert switch()
            found.append(torch.rand(4) if at != 1 else torch.zeros(4))

    run(0, drawn)
    starts = list(states)
    for start, state in reversed([*enumerate(starts)]):
        torch.set_rng_state(state)
        again: list[Tensor] = []
        run(start, again)
        assert all(map(torch.equal, again, drawn[start:]))


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


@sees("streams are switched where no draws are expected", "RankStreams.begin", "in self.draws:", "in generators():")
def test_where_no_draws_are_expected_nothing_is_switched():
    torch.manual_seed(1)
    alike = torch.rand(4)
    torch.manual_seed(1)
    streams = RankStreams(1)
    streams.draws = []
    assert not streams.begin()
    assert torch.equal(torch.rand(4), alike)  # of the replicated stream, and so on every rank
    assert not streams.end()
    streams.draws = generators()
    assert streams.begin()


@sees(
    "streams of parts of a sequence come from a few seeds",
    "drawn_apart",
    "& ~_MARK | _APART_MARK",
    "& ~0xFFFFFFFF | _APART_MARK",
)
def test_no_two_draws_of_parts_are_alike():
    torch.manual_seed(3)
    seen = set()
    for count in range(600):
        with drawn_apart(count % 2):
            seen.add(tuple(torch.rand(4).tolist()))
    assert len(seen) == 600


@sees("a number in store is no part of a key", "rng:_key", " + held[5016:].tobytes()", "")
@sees("a key tells positions, and not among which numbers", "rng:_key", "held[:56]", "held[:24]")
@pytest.mark.parametrize("draw", [lambda: torch.randn(1), lambda: torch.rand(624), lambda: torch.randn(1).double()])
def test_a_draw_is_seen_wherever_it_leaves_the_generator(draw):
    """Also where 624 numbers, which a CPU's generator makes at once, were drawn, or one in store was taken."""
    torch.manual_seed(4)
    before = [torch_states() for _ in range(20) if draw() is not None]
    assert not drawn_since(before.pop())
    assert all(drawn_since(states) == {"cpu"} for states in before)
    own = set()
    for states in before:
        torch.set_rng_state(states[0])
        RankStreams(1).begin()
        own.add(torch.initial_seed())
    assert len(own) == len(before)


class Philox:
    """Stands in for a CUDA device's generator, whose state is a seed and an offset."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.at = [7, 0]

    def get_state(self) -> Tensor:
        return torch.tensor(self.at).view(torch.uint8)

    def set_state(self, state: Tensor) -> None:
        self.at = state.view(torch.int64).tolist()

    def manual_seed(self, seed: int) -> None:
        self.at = [seed, 0]

    def initial_seed(self) -> int:
        return self.at[0]

    def get_offset(self) -> int:
        return self.at[1]

    def set_offset(self, offset: int) -> None:
        self.at[1] = offset

    def draw(self) -> tuple[int, ...]:
        self.at[1] += 4
        return tuple(self.at)


def test_a_devices_generator_alone_is_switched():
    streams, host, device = RankStreams(1), torch.get_rng_state(), Philox()
    streams.draws = [device]
    assert streams.begin()
    assert streams.end()
    assert device.at == [7, 0]  # nothing was drawn
    seen, starts = [], []
    for _ in range(3):
        streams.begin()
        starts.append(device.get_state())
        seen.append((device.draw(), device.draw()))
        streams.end()
        seen.append((device.draw(),))
    assert device.at == [7, 4 * 6]
    assert len({one for drawn in seen for one in drawn}) == 9
    for start, *expected in reversed([*zip(starts, seen[::2], seen[1::2], strict=True)]):
        device.set_state(start)
        assert streams.own
        assert (device.draw(), device.draw()) == expected[0]
        streams.end()
        assert (device.draw(),) == expected[1]
    assert torch.equal(torch.get_rng_state(), host)


@sees(
    "streams of every device are switched once one draws",
    "WatchSchedule.expects_draws",
    "else self._drawn",
    "else self._drawn and DEVICES",
)
def test_draws_are_expected_where_a_step_drew():
    schedule = WatchSchedule()
    for step in range(1, 20):
        schedule.begin_step("training")
        assert schedule.expects_draws("training") == (DEVICES if step <= 16 else {"cuda"})
        schedule.note_draws(frozenset(["cuda"]))
    assert schedule.expects_draws("validation") == DEVICES
