"""Random streams under tensor and sequence parallelism.

A whole activation, which every tensor-parallel rank holds alike, must be dropped out alike on all of them; shards and
local heads must be dropped out independently. So a process has two streams, one that its replica shares and one of its
own, and :class:`RankStreams` switches between them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed.autograd import in_backward, unseen

DEVICES = frozenset(("cpu", "cuda"))
"""The kinds of devices whose generators are switched between two streams."""


# ---- the generators --------------------------------------------------------------------------------------------


def generators() -> list[torch.Generator]:
    """torch's own generators: the CPU's, and the current CUDA device's once CUDA is in use."""
    on_device = [torch.cuda.default_generators[torch.cuda.current_device()]] if torch.cuda.is_initialized() else []
    return [torch.default_generator, *on_device]


def states() -> list[Tensor]:
    """The states of torch's own generators now."""
    return [generator.get_state() for generator in generators()]


def _restore(states: list[Tensor]) -> None:
    for generator, state in zip(generators(), states, strict=False):
        generator.set_state(state)


def _host() -> list[Any]:
    return [random.getstate(), np.random.get_state()]


def _restore_host(states: Sequence[Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def host_state(states: Sequence[Any] | None = None) -> bytes:
    """The states of Python's and numpy's generators, now or as given; the same on all ranks that are in the same state."""
    (_, numbers, gauss), (_, keys, *rest) = states or _host()
    parts = np.array(numbers, dtype=np.uint32).tobytes(), repr(gauss).encode(), keys.tobytes(), repr(rest).encode()
    return b"".join(parts)


def _key(state: Tensor) -> bytes:
    """Tells a state of a generator of torch's from its others: of a CPU's 5,056 bytes those from which the others follow.

    They are the seed, the position and the first two of 624 numbers, and at the end a normal number in store; on a GPU all 16.
    """
    held = state.numpy()
    return bytes(held[:40].tobytes() + held[5016:].tobytes())


def moved(before: list[Tensor]) -> frozenset[str]:
    """The kinds of devices whose generators are no more in the states that :func:`states` returned: something drew."""
    now = zip(generators(), before, strict=False)
    return frozenset(one.device.type for one, state in now if _key(one.get_state()) != _key(state))


def _derived(state: Tensor, purpose: str, number: int) -> int:
    """A seed for another stream, which follows from where one stands."""
    text = f"{purpose} {number} ".encode() + _key(state)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _reseed(states: list[Tensor], purpose: str, number: int = 0) -> None:
    for generator, state in zip(generators(), states, strict=True):
        generator.manual_seed(_derived(state, purpose, number))


def _advance(generator: torch.Generator) -> None:
    """Goes one draw further."""
    if generator.device.type == "cuda":  # nothing runs on the device
        generator.set_offset(generator.get_offset() + 4)
        return
    with unseen():  # not a draw of the model, so no check may see it
        torch.rand(1, dtype=torch.float32, generator=generator)


# ---- all streams of a process ----------------------------------------------------------------------------------


def get_streams(device: torch.device) -> list[Any]:
    """The states of this process's generators: Python's, numpy's, torch's on the CPU, and the device's (None on a CPU)."""
    return [*_host(), torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None]


def set_streams(state: list[Any], device: torch.device) -> None:
    """Set the states of the generators to what :func:`get_streams` returned."""
    _restore_host(state)
    torch.set_rng_state(state[2])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[3], device)


@contextmanager
def kept_streams(device: torch.device) -> Iterator[None]:
    """A context after which the generators of this process have the states that they had before it."""
    before = get_streams(device)
    try:
        yield
    finally:
        set_streams(before, device)


def seed_streams() -> None:
    """Seed the generators with a fixed number, inside :func:`kept_streams`: runs that are compared draw alike."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def share_streams(group: ProcessGroup, source: int, device: torch.device) -> None:
    """Give every rank of ``group`` the states of world rank ``source``: they draw alike even if nobody seeded. Collective."""
    state = get_streams(device)
    dist.broadcast_object_list(state, src=source, group=group)
    set_streams(state, device)


def pack_streams(device: torch.device) -> dict[str, Any]:
    """The states of :func:`get_streams` as plain numbers and tensors, which ``weights_only=True`` loads."""
    (version, numbers, gauss), (name, keys, *rest), cpu, own = get_streams(device)
    python = [version, list(numbers), gauss]
    return {"python": python, "numpy": [str(name), keys.tolist(), *rest], "torch": cpu, "device": own}


def unpack_streams(packed: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to what :func:`pack_streams` returned; a device's keeps its state if they were saved on a CPU."""
    version, state, gauss = packed["python"]
    name, keys, *rest = packed["numpy"]
    own = packed["device"] if packed["device"] is not None or device.type == "cpu" else get_streams(device)[3]
    arrays = (name, np.array(keys, dtype=np.uint32), *rest)
    set_streams([(version, tuple(state), gauss), arrays, packed["torch"].cpu(), own], device)


class SavedStreams:
    """The states of torch's, Python's and numpy's generators at one moment."""

    def __init__(self) -> None:
        self._torch, self._host = states(), _host()

    def restore(self) -> None:
        """Go on from there."""
        _restore(self._torch)
        _restore_host(self._host)


class HostDraws:
    """Lets a part of a forward, which begins now, draw again from Python's and numpy's generators what it drew.

    torch restores its own generators for a recompute, and no others.
    """

    def __init__(self) -> None:
        self._began: list[Any] | None = _host()

    def end(self) -> None:
        """The part ended: if it drew nothing there is nothing to draw again."""
        if host_state() == host_state(self._began):
            self._began = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context in which the part is run again; behind it the generators are where they were."""
        if self._began is None:
            yield
            return
        now = _host()
        _restore_host(self._began)
        try:
            yield
        finally:
            _restore_host(now)


# ---- the two streams of a rank ---------------------------------------------------------------------------------


class RankStreams:
    """Switches torch's generators between the stream that all ranks of a replica share and this rank's own.

    Draws on whole activations (``[b, s, h]``, alike on every rank) must come from the shared stream; draws on shards
    (``[b, s/tp, h]``) and on local heads from the rank's own. From :meth:`begin` to :meth:`end` draws are the rank's own.

    The own stream is seeded once, at its first use in a run, from where the shared one stands and the rank's place, and then
    goes on by itself. Where nothing was drawn from it, :meth:`end` leaves the shared one exactly where it was, as in a run on
    one process; otherwise one draw further (see :class:`_Pair`).

    Args:
        place: a number of this rank in its replica: over tensor- and context-parallel ranks.

    Attributes:
        active: the generators that are switched. Where none is, no state is read.
    """

    def __init__(self, place: int) -> None:
        self._place = place
        self._pairs: list[_Pair] = []
        self.restart()

    def __deepcopy__(self, memo: dict[int, Any]) -> RankStreams:
        return RankStreams(self._place)

    def restart(self, states: Mapping[str, Any] | None = None) -> None:
        """Begin a run: own streams are seeded anew, or go on from ``states``, which :meth:`states` returned."""
        self.forget()
        self._pairs = [_Pair(one, self._place, (states or {}).get(one.device.type)) for one in generators()]
        self.active = self._pairs

    def states(self) -> dict[str, Any]:
        """Where the own streams stand between two steps, by kind of device, for a checkpoint."""
        return {pair.kind: pair.saved() for pair in self._pairs}

    def expect(self, kinds: Collection[str]) -> None:
        """A step begins, in which draws are to be expected on these kinds of devices."""
        self.active = [pair for pair in self._pairs if pair.kind in kinds]

    def forget(self) -> None:
        """Forget what was begun: no recompute of it is to come."""
        for pair in self._pairs:
            pair.forget()

    @property
    def own(self) -> bool:
        """Whether a draw would come from the rank's own stream now."""
        return any(pair.own for pair in self.active)

    def begin(self) -> bool:
        """Switch to this rank's own stream; returns whether that was not the current one already."""
        return True in [pair.begin() for pair in self.active]

    def end(self) -> bool:
        """Switch to the shared stream; returns whether that was not the current one already."""
        return True in [pair.end() for pair in self.active]

    def note_alike(self) -> None:
        """Note for a recompute that what is drawn next is drawn alike on all ranks."""
        for pair in self.active:
            pair.alike.add(pair.key)

    def was_alike(self) -> bool:
        """Whether :meth:`note_alike` was called at the present state of the own stream."""
        return all(pair.key in pair.alike for pair in self.active)


class _Pair:
    """The shared and the own stream of one of torch's generators, of which the own one's seed tells when it is current.

    A recompute (activation checkpointing) sets the generator to a state that it had in the forward, and knows of no other
    stream. So at each switch the state must tell by itself where the other stream stood: where one has moved, the other one goes a
    draw further before it is used. A recompute follows what was noted, and moves neither; nor does a forward that is run again
    from an earlier state of the shared stream.
    """

    def __init__(self, generator: torch.Generator, place: int, saved: Sequence[Tensor] | None) -> None:
        self.kind, self._generator, self._place = generator.device.type, generator, place
        self._seed: int | None = None  # of the own stream
        self._own = torch.empty(0)  # its state where it was left
        self._last = b""  # where the shared stream was left by a forward
        if saved is not None:
            self._own, self._last = saved[0], saved[1].numpy().tobytes()
            self._seed = int.from_bytes(_key(self._own)[:8], "little")
        self._shared = generator.get_state()  # its state where it was left
        self._entered = b""  # where the own stream stood when it was begun
        self._own_at: dict[bytes, Tensor] = {}  # as entered, by where the shared stream was left
        self._shared_at: dict[bytes, Tensor] = {}  # and the other way round
        self.alike: set[bytes] = set()

    def saved(self) -> list[Tensor] | None:
        """What a checkpoint keeps, from which a run goes on and draws the same; None if nothing was begun."""
        last = torch.frombuffer(bytearray(self._last), dtype=torch.uint8) if self._last else None
        return None if last is None else [self._own, last]

    def forget(self) -> None:
        self.end()  # an aborted call may have left the own stream
        self._own_at.clear()
        self._shared_at.clear()
        self.alike.clear()

    @property
    def key(self) -> bytes:
        """Where the current stream stands."""
        return _key(self._generator.get_state())

    @property
    def own(self) -> bool:
        return self._generator.initial_seed() == self._seed

    def begin(self) -> bool:
        if self.own:
            return False
        left = self._generator.get_state()
        key = _key(left)
        if (own := self._own_at.get(key)) is not None:
            self._generator.set_state(own)
        else:
            if self._seed is None:
                self._seed = _derived(left, "rank", self._place)
                self._own = self._generator.manual_seed(self._seed).get_state()
            self._generator.set_state(self._own)
            if key != self._last:
                _advance(self._generator)
            own = self._generator.get_state()
            if not in_backward():
                self._own_at[key], self._last = own, key
        self._shared, self._entered = left, _key(own)
        return True

    def end(self) -> bool:
        if not self.own:
            return False
        left = self._generator.get_state()
        key = _key(left)
        if (shared := self._shared_at.get(key)) is not None:
            self._generator.set_state(shared)
        else:  # in a recompute only of one that stopped in the midst, once it had made all that was asked for
            self._generator.set_state(self._shared)
            if key != self._entered:
                _advance(self._generator)
            if not in_backward():
                self._own, self._shared_at[key] = left, self._generator.get_state()
        return True


# ---- other streams ---------------------------------------------------------------------------------------------


_MARK = 0xFFFFF << 40
"""Bits of a seed that a CPU's generator does not use, which tell draws of :func:`drawn_apart`."""

_APART_MARK = 0xA9A47 << 40
"""What they are there."""


@contextmanager
def drawn_apart(place: int) -> Iterator[None]:
    """A context in which ranks draw apart, each by its ``place``, such as its context-parallel rank; then alike again."""
    before = states()
    for generator, state in zip(generators(), before, strict=True):
        generator.manual_seed(_derived(state, "apart", place) & ~_MARK | _APART_MARK)
    apart = states()
    try:
        yield
    finally:
        has_drawn = moved(apart)
        _restore(before)
        for generator in generators() if has_drawn else ():  # else the streams are left as on one process
            _advance(generator)


def draws_apart() -> bool:
    """Whether a draw now is one of :func:`drawn_apart`, which the generator's seed tells."""
    return torch.default_generator.initial_seed() & _MARK == _APART_MARK


class StageStreams:
    """The random streams of one forward through a pipeline, of which each stage runs a part.

    In front of the blocks all stages draw alike, behind the forward too. The blocks of a stage, and what comes behind them, draw
    from a stream that is seeded from the state at the forward's beginning and the number of the chunk of blocks.
    """

    def __init__(self) -> None:
        self._before: list[Tensor] = []
        self._host_before = self._host_at_blocks = b""

    def begin(self) -> None:
        """The forward begins."""
        self._before = states()
        self._host_before = self._host_at_blocks = host_state()

    def enter_blocks(self) -> None:
        """The stage's first block is called: what is drawn from here on other stages do not draw."""
        self._host_at_blocks = host_state()

    def begin_stage(self, chunk: int) -> None:
        """The blocks of a chunk begin, by its number."""
        _reseed(self._before, "stage", chunk)

    def begin_between(self, stack: int) -> None:
        """What lies behind a stack of blocks, and in front of the next, begins; all stages draw alike there."""
        _reseed(self._before, "between", stack)

    def end(self) -> None:
        """The forward's part on this stage is done."""
        _reseed(self._before, "behind")

    def put_off(self, *, seeded: bool, host: bool) -> SavedStreams:
        """Go on as behind a forward that ends by :meth:`end` (``seeded``) and :meth:`end_on_host` (``host``); it will run later."""
        saved = SavedStreams()
        self.begin()
        if seeded:
            self.end()
        if host:
            self.end_on_host()
        return saved

    def has_drawn(self) -> bool:
        """Whether anything was drawn since :meth:`begin`."""
        return bool(moved(self._before))

    def has_drawn_on_host(self) -> bool:
        """Whether anything was drawn from Python's or numpy's generators since :meth:`enter_blocks`."""
        return self._host_at_blocks != host_state()

    def end_on_host(self) -> None:
        """Let Python's and numpy's generators of all stages go on from one state, which that at the beginning gives."""
        digest = hashlib.blake2b(self._host_before, digest_size=16).digest()
        random.seed(digest)
        np.random.seed(list(np.frombuffer(digest, dtype=np.uint32)))
