"""A rank's own random stream and the one that its replica shares, and who draws from them."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_seqpar.distributed import rng
from lightning_seqpar.distributed.draws import DrawWatch
from lightning_seqpar.distributed.rng import RankStreams, drawn_apart
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


@sees("every rank draws the same masks", "_Pair.begin", "self._place)", "0)")
def test_own_draws_differ_and_replicated_ones_do_not():
    one, two = draws(0), draws(1)
    for at, (a, b) in enumerate(zip(one, two, strict=True)):
        assert torch.equal(a, b) is bool(at % 2)
    flat = torch.stack([*one, *two[::2]])
    assert len(flat.flatten().unique()) == flat.numel()  # nothing is drawn twice
    assert all(torch.equal(a, b) for a, b in zip(one, draws(0), strict=True))  # the seed alone decides
    assert not any(torch.equal(a, b) for a, b in zip(one, draws(0, seed=2), strict=True))


@sees(
    "two blocks begin alike on the shared stream",
    "_Pair.end",
    "                _advance(self._generator)\n",
    "                pass\n",
)
@sees(
    "every block draws the same masks",
    "_Pair.end",
    "self._own, self._shared_at[key] = left,",
    "_, self._shared_at[key] = left,",
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


@sees(
    "a recompute that begins in the own stream does not find the shared one",
    "_Pair.end",
    "if (shared := self._shared_at.get(key)) is not None:",
    "if (shared := self._shared) is not None:",
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


class Blocks(nn.Module):
    """Two blocks on shards, each with a dropout of its own and one that all ranks draw alike."""

    def __init__(self, streams: RankStreams, **checkpointed: bool) -> None:
        super().__init__()
        self.streams, self.checkpointed, self.drawn = streams, checkpointed, []

    def _drop(self, x: Tensor) -> Tensor:
        self.drawn.append(F.dropout(torch.ones(64), 0.5))
        return x * self.drawn[-1]

    def _block(self, x: Tensor) -> Tensor:
        self.streams.begin()
        try:
            x = self._drop(x)
            self.streams.end()
            x = self._drop(x)
            self.streams.begin()
            return (self._drop(x) + 1).sin() + torch.rand(64)  # which a recompute does not draw again: it saves nothing
        finally:
            self.streams.end()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self._block, x, **self.checkpointed) if self.checkpointed else self._block(x)
        return x.sum()


def steps(count: int, *, late: bool = False, **checkpointed: bool) -> list[Tensor]:
    """The gradients of some steps, and what is drawn behind them; with ``late`` a backward comes behind the next forward."""
    torch.manual_seed(1)
    streams, out, put_off = RankStreams(1), [], []
    for _ in range(count):
        x = torch.ones(64, requires_grad=True)
        put_off.append((Blocks(streams, **checkpointed)(x), x))
        if not late or len(put_off) == 2:
            for loss, leaf in put_off:
                loss.backward()
                out.append(leaf.grad)
            put_off = []
            streams.forget()
    streams.begin()
    return [*out, torch.rand(3), *[torch.rand(3) for _ in range(streams.end())]]


@sees("a recompute that stops early sets back the own stream", "_Pair.end", "if not in_backward():", "if True:")
@sees("a recompute goes on in the own stream", "_Pair.begin", "self._own_at.get(key)", "None")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_has_the_gradient_of_what_it_dropped_and_moves_no_stream(reentrant, late):
    plain = steps(4, late=late)
    assert all(map(torch.equal, steps(4, late=late, use_reentrant=reentrant), plain))


def test_a_recompute_that_torch_does_not_set_back_moves_the_shared_stream_no_further_than_its_own_draws():
    """What is drawn in it is not what was drawn, as on one process; ranks draw alike behind it."""
    behind = []
    for place in (0, 1):
        torch.manual_seed(1)
        model = Blocks(RankStreams(place), use_reentrant=False, preserve_rng_state=False)
        loss = model(torch.ones(64, requires_grad=True))
        before = torch.rand(3)
        loss.backward()
        behind.append(torch.rand(3))
        assert not model.streams.own
        assert not torch.equal(behind[-1], before)
    assert torch.equal(*behind)


@sees(
    "a forward that is run again with its random state draws anew",
    "_Pair.begin",
    "self._own_at.get(key)",
    "self._own_at.get(key) if in_backward() else None",
)
def test_a_forward_that_is_run_again_from_an_earlier_state_draws_the_same():
    """As libraries do that keep no graph at first (GradCache)."""
    torch.manual_seed(1)
    model = Blocks(RankStreams(1))
    states = []
    for _ in range(3):
        states.append(torch.get_rng_state())
        model(torch.ones(64))
    first, model.drawn = model.drawn, []
    for state in states:
        with torch.random.fork_rng():
            torch.set_rng_state(state)
            model(torch.ones(64))
    assert all(map(torch.equal, model.drawn, first))
    model(torch.ones(64))
    assert len(torch.stack([*first, *model.drawn[-6:]]).unique(dim=0)) == len(first) + 6


@sees("what is drawn alike is told by a generator that does not draw", "RankStreams.was_alike", "all(", "any(")
def test_a_generator_that_nobody_draws_from_tells_nothing(monkeypatch):
    """As the CPU's beside a GPU's, which drops out."""
    idle = torch.Generator().manual_seed(1)
    monkeypatch.setattr(rng, "generators", lambda: [idle, torch.default_generator])
    torch.manual_seed(1)
    streams = RankStreams(1)
    before = idle.get_state()
    streams.begin()
    streams.note_alike()
    streams.end()
    torch.rand(3)
    streams.begin()
    assert not streams.was_alike()
    torch.rand(3)
    streams.end()
    assert torch.equal(idle.get_state(), before)


@sees(
    "a state in a checkpoint does not tell where the shared stream was",
    "_Pair.__init__",
    "saved[1].numpy().tobytes()",
    'b""',
)
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_run_goes_on_from_saved_states(evaluates):
    """Also where a forward that draws nothing came in between."""
    torch.manual_seed(1)
    model = Blocks(RankStreams(1))
    model(torch.ones(64))
    if evaluates:
        model.streams.begin()
        model.streams.end()
    saved, shared = pickle.dumps(model.streams.states()), torch.get_rng_state()
    model.streams.forget()
    expected = model(torch.ones(64))
    torch.set_rng_state(shared)
    other = Blocks(RankStreams(1))
    other.streams.restart(pickle.loads(saved))
    assert torch.equal(other(torch.ones(64)), expected)


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


@sees("streams are switched where no draws are expected", "RankStreams.expect", " if pair.kind in kinds", "")
def test_where_no_draws_are_expected_nothing_is_switched():
    torch.manual_seed(1)
    alike = torch.rand(4)
    torch.manual_seed(1)
    streams = RankStreams(1)
    streams.expect(())
    assert not streams.begin()
    assert torch.equal(torch.rand(4), alike)  # of the replicated stream, and so on every rank
    assert not streams.end()
    streams.expect(("cpu",))
    assert streams.begin()


@sees("streams of parts of a sequence come from a few seeds", "rng:_MARK", "_MARK = 0xFFFFF << 40", "_MARK = 0xFFFFF")
def test_no_two_draws_of_parts_are_alike():
    torch.manual_seed(3)
    seen = set()
    for count in range(600):
        with drawn_apart(count % 2):
            seen.add(tuple(torch.rand(4).tolist()))
    assert len(seen) == 600
