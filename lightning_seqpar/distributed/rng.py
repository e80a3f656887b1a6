"""Random streams: one shared within a replica, one for each tensor-parallel rank, and a watch on who draws where."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_seqpar.distributed.autograd import generator_id, in_backward, unseen


def get_streams(device: torch.device) -> list[Any]:
    """The random state of this process: python, numpy, torch, the device."""
    state: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state(), None]
    if device.type == "cuda":
        state[3] = torch.cuda.get_rng_state(device)
    return state


def set_streams(state: list[Any], device: torch.device) -> None:
    """Take over what :func:`get_streams` gave."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[3], device)


def pack_streams(device: torch.device) -> dict[str, Any]:
    """The random state of this process in plain numbers and tensors, as a checkpoint that is not trusted may hold them."""
    python, arrays, cpu, own = get_streams(device)
    name, keys, *rest = arrays
    return {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [str(name), keys.tolist(), *rest],
        "torch": cpu,
        "device": own,
    }


def unpack_streams(packed: Mapping[str, Any], device: torch.device) -> None:
    """Take over what :func:`pack_streams` gave; a device's own stream where it was saved on one of its kind."""
    version, state, gauss = packed["python"]
    name, keys, *rest = packed["numpy"]
    own = packed["device"] if packed["device"] is not None or device.type == "cpu" else get_streams(device)[3]
    arrays = (name, np.array(keys, dtype=np.uint32), *rest)
    set_streams([(version, tuple(state), gauss), arrays, packed["torch"].cpu(), own], device)


def share_streams(group: ProcessGroup, source: int, device: torch.device) -> None:
    """Give every rank of ``group`` the random state of world rank ``source``: python, numpy, torch, the device.

    What a replica draws on whole activations (noise, a shuffle) is then the same on all of its ranks, seeded or not.
    """
    state = get_streams(device)
    dist.broadcast_object_list(state, src=source, group=group)
    set_streams(state, device)


class RankStreams:
    """Two random streams in one process: the replicated one, and one of this tensor-parallel rank's own.

    Whole activations must be dropped out alike on every rank, shards and local heads each for themselves. The own stream
    is no second state to keep: it is seeded from the replicated one where it begins, so that ``seed_everything`` alone
    decides both, and a resumed run goes on as it would have. Where nothing was drawn from it, the replicated stream is left
    as one process would have it.

    A recompute draws what the forward drew. Activation checkpointing gives back the state of the generators at its start,
    wherever that was, and may run a part of what lay between two switches: so a switch in a backward does not count what
    began and ended, but does what the forward did at this state.

    Args:
        rank: the tensor-parallel rank.

    Attributes:
        drawn: in this step, how far each stretch of the own stream went, and whether anything was drawn between two of them.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.drawn: list[bytes] = []
        self._behind: list[_State] = []  # the replicated stream behind the last stretch
        self._replicated: list[_State] = []
        self._own: list[_State] = []
        self._started: list[_State] = []
        self._depth = 0
        self._paused = False
        self._done: dict[tuple[Any, int], list[_State] | None] = {}  # what a switch led to; none where it did twice
        self._again = _Again()

    @property
    def on(self) -> bool:
        """Whether the rank's own stream is begun (paused or not)."""
        return (self._again.depth if in_backward() else self._depth) > 0

    @property
    def own(self) -> bool:
        """Whether draws come from the rank's own stream now."""
        return self._again.own if in_backward() else self._depth > 0 and not self._paused

    def forget(self) -> None:
        """A new step: nothing is begun, no recompute is to come."""
        while self._depth:
            self._end()
        self._done, self._again = {}, _Again()
        self.drawn, self._behind = [], []

    def begin(self, *, nests: bool = True) -> None:
        """From here on draws are this rank's own; calls nest, or do nothing where one is begun."""
        if in_backward():
            if self._repeat("begin"):
                self._again.depth, self._again.own = 1, True
            elif nests and self._again.depth:
                self._again.depth += 1
            return
        if self._depth:
            self._depth += nests
            return
        self._depth = 1
        self._replicated = _states()
        if self._behind and _differ(self._behind, self._replicated):
            self.drawn.append(b"between")
        _reseed(self._replicated, self._rank)
        self._started = _states()
        self._note("begin", self._replicated, self._started)

    def end(self) -> None:
        """Draws are replicated again, as they were, or one draw further if the own stream was used."""
        if not in_backward():
            self._end()
            return
        self._again.depth = max(0, self._again.depth - 1)
        if self._again.depth == 0:
            self._repeat("end")
            self._again.own = False

    def _end(self) -> None:
        if self._depth == 0:
            return
        self._depth -= 1
        if self._depth:
            return
        before = _states()
        own = self._resume("end", before)
        self.drawn.append(b"".join(state.position for state in own))
        _restore(self._replicated)
        used = [_differ([a], [b]) for a, b in zip(own, self._started, strict=True)]
        _advance(used)
        self._behind = _states() if any(used) else self._replicated
        self._note("end", before, self._behind)

    def pause(self) -> None:
        """A whole activation: draws are replicated until :meth:`resume`."""
        if in_backward():
            self._again.own &= not self._repeat("pause")
            return
        if self._paused or self._depth == 0:
            return
        self._own, self._paused = _states(), True
        _restore(self._replicated)

    def resume(self, where: Any = None) -> None:
        """The activation is dealt out: draws are the rank's own again.

        Args:
            where: tells calls of different places apart.

        Raises:
            ValueError: in a recompute, where the forward did two things at this state.
        """
        if in_backward():
            self._again.own |= self._repeat(("resume", where))
        elif self._paused:
            self._resume(where, _states())

    def _resume(self, where: Any, now: list[_State]) -> list[_State]:
        """Go on from here, ``now``; returns where the own stream stands."""
        if not self._paused:
            return now
        _restore(self._own)
        own = self._own
        if moved := _differ(now, self._replicated):
            self._note("pause", own, self._replicated)
            fresh = not _differ(own, self._started)
            _advance([True] * len(now))  # the next pause begins at a state of its own
            own = _states()
            if fresh:
                self._started = own
        self._replicated, self._paused = now, False
        if moved or where != "end":
            self._note(("resume", where), now, own)
        return own

    def _note(self, what: Any, before: list[_State], after: list[_State]) -> None:
        key = (what, _key(before))
        known = self._done.get(key, after)
        self._done[key] = after if known is after or (known is not None and not _differ(known, after)) else None

    def _repeat(self, what: Any) -> bool:
        """Do what the forward did at this state, if it did."""
        key = (what, _key(_states()))
        if key not in self._done:
            return False
        found = self._done[key]
        if found is None:
            raise ValueError(
                f"random numbers: {what[1] if isinstance(what, tuple) else what} ran twice at one state of the generators, and an "
                "activation checkpoint that begins between a whole activation and its columns can't tell which of the two it runs "
                "again; let the checkpoint begin in front of the module, or set its dropout to 0"
            )
        _restore(found)
        return True


class _Again:
    """What the recompute under way did.

    Attributes:
        depth: begun and not ended in it, as far as is known.
        own: whether its last switch led to the rank's own stream.
    """

    def __init__(self) -> None:
        self.depth, self.own = 0, False


class _State(NamedTuple):
    """Of a generator, as it is set and as it is compared."""

    tensor: Tensor
    bits: bytes

    @property
    def position(self) -> bytes:
        """Where it stands in its sequence: behind the seed in torch's states, on a CPU in front of the numbers."""
        return self.bits[8:24]


def _differ(a: list[_State], b: list[_State]) -> bool:
    return any(x.bits != y.bits for x, y in zip(a, b, strict=True))


def _key(states: list[_State]) -> int:
    return hash(tuple(state.bits for state in states))


class OneStream(RankStreams):
    """For a step that computes no numbers: whose stream a draw comes from does not matter."""

    def begin(self, *, nests: bool = True) -> None:
        """Nothing is switched."""

    def end(self) -> None:
        """Nothing is switched."""

    def pause(self) -> None:
        """Nothing is switched."""

    def resume(self, where: Any = None) -> None:
        """Nothing is switched."""


def _generators() -> list[torch.Generator]:
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def _states() -> list[_State]:
    states = [generator.get_state() for generator in _generators()]
    return [_State(state, state.numpy().tobytes()) for state in states]


def _restore(states: list[_State]) -> None:
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state.tensor)


def _reseed(states: list[_State], rank: int) -> None:
    """Seed each generator from its own state and the rank."""
    for generator, state in zip(_generators(), states, strict=True):
        digest = hashlib.blake2b(state.bits, digest_size=8, salt=rank.to_bytes(4, "little"))
        generator.manual_seed(int.from_bytes(digest.digest(), "little") >> 1)


def _advance(used: list[bool]) -> None:
    with unseen():  # no draw of the model's
        for generator, moved in zip(_generators(), used, strict=False):
            if moved:
                torch.rand(1, dtype=torch.float32, generator=generator, device=generator.device)


DRAWS = (
    "bernoulli",
    "native_dropout",
    "_fused_dropout",
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "uniform",
    "normal",
    "exponential",
    "randint",
    "randint_like",
    "random",
    "multinomial",
    "geometric",
    "cauchy",
    "log_normal",
    "randperm",
    "binomial",
    "poisson",
    "_standard_gamma",
    "_sample_dirichlet",
)
"""Operations that draw random numbers."""


class DrawWatch(TorchDispatchMode):
    """Shows every random draw of a forward to ``check``.

    Args:
        check: is given what was drawn; raises if it can't be right.
    """

    def __init__(self, check: Callable[[Drawn], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if (drawn := drawn_by(func, out, args, kwargs)) is not None:
            self._check(drawn)
        return out


class Drawn(NamedTuple):
    """Random numbers.

    Attributes:
        name: of the operation.
        shape: of what it drew.
        seeded: whether a generator of the user's own gave them, which is no rank's: all ranks draw alike.
    """

    name: str
    shape: tuple[int, ...]
    seeded: bool = False


def drawn_by(func: Any, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Drawn | None:
    """What an operation drew; none if it draws nothing."""
    name = func.name().split("::")[-1].split(".")[0].rstrip("_")
    if name not in DRAWS:
        return None
    given: Any = next((one for one in (*args, *(kwargs or {}).values()) if isinstance(one, torch.Generator)), None)
    known: list[Any] = [*_generators()]
    seeded = given is not None and generator_id(given) not in [generator_id(one) for one in known]
    return Drawn(name, tuple((out[0] if isinstance(out, tuple) else out).shape), seeded)


def seed_streams() -> None:
    """The same beginning for every run that is compared; inside :func:`kept_streams`."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


@contextmanager
def kept_streams(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, the random streams come back as they were."""
    before = get_streams(device)
    try:
        yield
    finally:
        set_streams(before, device)
