"""Random streams under tensor and sequence parallelism.

A whole activation, which every tensor-parallel rank holds alike, must be dropped out alike on all of them; shards and
local heads must be dropped out independently. So a process has two streams, one that its replica shares and one of its
own, and :class:`RankStreams` switches between them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    """The states of this process's generators: Python's, numpy's, torch's on the CPU, and the device's (None on a CPU)."""
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return [random.getstate(), np.random.get_state(), torch.get_rng_state(), own]


def set_streams(state: list[Any], device: torch.device) -> None:
    """Set the states of the generators to what :func:`get_streams` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[3], device)


class HostDraws:
    """Lets a part of a forward, which begins now, draw again from Python's and numpy's generators what it drew.

    torch restores its own generators for a recompute, and no others.
    """

    def __init__(self) -> None:
        self._began: tuple[Any, Any] | None = (random.getstate(), np.random.get_state())

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
        now = random.getstate(), np.random.get_state()
        self._set(self._began)
        try:
            yield
        finally:
            self._set(now)

    @staticmethod
    def _set(states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])


def pack_streams(device: torch.device) -> dict[str, Any]:
    """The states of :func:`get_streams` as plain numbers and tensors, which ``weights_only=True`` loads."""
    python, arrays, cpu, own = get_streams(device)
    name, keys, *rest = arrays
    return {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [str(name), keys.tolist(), *rest],
        "torch": cpu,
        "device": own,
    }


def unpack_streams(packed: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to what :func:`pack_streams` returned; a device's keeps its state if they were saved on a CPU."""
    version, state, gauss = packed["python"]
    name, keys, *rest = packed["numpy"]
    own = packed["device"] if packed["device"] is not None or device.type == "cpu" else get_streams(device)[3]
    arrays = (name, np.array(keys, dtype=np.uint32), *rest)
    set_streams([(version, tuple(state), gauss), arrays, packed["torch"].cpu(), own], device)


def share_streams(group: ProcessGroup, source: int, device: torch.device) -> None:
    """Give every rank of ``group`` the states of world rank ``source``: they draw alike even if nobody seeded. Collective."""
    state = get_streams(device)
    dist.broadcast_object_list(state, src=source, group=group)
    set_streams(state, device)


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
        self._draws: Collection[str] = DEVICES
        self.restart()

    def __deepcopy__(self, memo: dict[int, Any]) -> RankStreams:
        return RankStreams(self._place)

    def restart(self, states: Mapping[str, Any] | None = None) -> None:
        """Begin a run: own streams are seeded anew, or go on from ``states``, which :meth:`states` returned."""
        self._pairs: dict[str, _Pair] = {}
        self._saved = states or {}
        self.draws = self._draws

    def states(self) -> dict[str, Any]:
        """Where the own streams stand between two steps, for a checkpoint."""
        return self._saved | {kind: saved for kind, pair in self._pairs.items() if (saved := pair.saved) is not None}

    @property
    def draws(self) -> Collection[str]:
        """The kinds of devices on which draws are to be expected in this step."""
        return self._draws

    @draws.setter
    def draws(self, kinds: Collection[str]) -> None:
        self._draws = kinds
        self.active = [self._pair(one) for one in _generators() if one.device.type in kinds]

    def _pair(self, generator: torch.Generator) -> _Pair:
        kind = generator.device.type
        if kind not in self._pairs:
            self._pairs[kind] = _Pair(generator, self._place, self._saved.get(kind))
        return self._pairs[kind]

    def forget(self) -> None:
        """Forget what was begun: no recompute of it is to come."""
        for pair in self._pairs.values():
            pair.forget()

    @property
    def own(self) -> bool:
        """Whether a draw would come from the rank's own stream now."""
        return any([pair.own for pair in self.active])

    def begin(self) -> bool:
        """Switch to this rank's own stream; returns whether that was not the current one already."""
        return any([pair.begin() for pair in self.active])

    def end(self) -> bool:
        """Switch to the shared stream; returns whether that was not the current one already."""
        return any([pair.end() for pair in self.active])

    def note_alike(self) -> None:
        """Note for a recompute that what is drawn next is drawn alike on all ranks."""
        for pair in self.active:
            pair.alike.add(pair.key)

    def was_alike(self) -> bool:
        """Whether :meth:`note_alike` was called at the present state of the own stream."""
        return any([pair.key in pair.alike for pair in self.active if pair.alike])


class _Pair:
    """The shared and the own stream of one of torch's generators, which draws from one of them; the own one's seed tells from which.

    A recompute (activation checkpointing) sets the generator to a state that it had in the forward, and knows of no other
    stream. So at each switch a state must tell by itself what the other stream's was: of a stream that is left behind after a
    draw, the other one goes a draw further. What is run once more does not move the streams, whether in the backward or in a
    forward whose beginning gave the generator an earlier state.
    """

    def __init__(self, generator: torch.Generator, place: int, saved: Sequence[Tensor] | None) -> None:
        self._generator, self._place = generator, place
        # The own stream's state where it was left, and where the shared one stood when it was begun.
        self._own, self._last = (None, b"") if saved is None else (saved[0], saved[1].numpy().tobytes())
        self._seed = None if saved is None else int.from_bytes(_key(saved[0])[:8], "little")
        self._shared: Tensor | None = None  # its state, while the own stream is the current one
        self._fresh, self._repeats = b"", False
        self._drop_notes()

    def _drop_notes(self) -> None:
        self._own_at: dict[bytes, Tensor] = {}  # as entered, by where the shared stream was left
        self._shared_at: dict[bytes, Tensor] = {}  # and the other way round
        self.alike: set[bytes] = set()

    @property
    def saved(self) -> list[Tensor] | None:
        """What a checkpoint keeps: of a run that goes on from it all further draws are the same."""
        return None if self._own is None else [self._own, torch.frombuffer(bytearray(self._last), dtype=torch.uint8)]

    @property
    def key(self) -> bytes:
        """Where the current stream stands."""
        return _key(self._generator.get_state())

    @property
    def own(self) -> bool:
        return self._generator.initial_seed() == self._seed

    def forget(self) -> None:
        """Drop all notes; an aborted call may have left the own stream."""
        self.end()
        self._drop_notes()

    def begin(self) -> bool:
        if self.own:
            return False
        left = self._generator.get_state()
        key = _key(left)
        own, has_moved = self._own_at.get(key), key != self._last
        self._repeats = in_backward() or (own is not None and has_moved)
        if own is None:
            own = self._enter_latest(left, has_moved or self._repeats)
        else:
            self._generator.set_state(own)
        if not self._repeats:
            self._own_at[key], self._last = own, key
        self._shared, self._fresh = left, _key(own)
        return True

    def _enter_latest(self, shared: Tensor, has_moved: bool) -> Tensor:
        """Go on in the own stream where it was left; returns its state."""
        if self._own is None:
            self._seed = _derived(shared, "rank", self._place)
            self._generator.manual_seed(self._seed)
        else:
            self._generator.set_state(self._own)
        if has_moved:
            _advance(self._generator)
        return self._generator.get_state()

    def end(self) -> bool:
        if not self.own:
            return False
        left = self._generator.get_state()
        key = _key(left)
        if (shared := self._shared_at.get(key)) is not None:
            self._generator.set_state(shared)
        elif self._shared is None:
            return False
        else:
            self._generator.set_state(self._shared)
            if key != self._fresh:
                _advance(self._generator)
            if not self._repeats:
                self._own, self._shared_at[key] = left, self._generator.get_state()
        self._shared = None
        return True


DEVICES = frozenset(("cpu", "cuda"))
"""Kinds of devices whose generators are switched."""


class StepDraws:
    """Tells of a step whether it drew from torch's generators, made where the step begins."""

    def __init__(self) -> None:
        self._before = _states()

    def end(self) -> frozenset[str]:
        """The kinds of devices on which the step has drawn. Ranks that did not expect it have drawn alike, and equally much."""
        pairs = zip(_generators(), self._before, strict=False)
        return frozenset(one.device.type for one, before in pairs if _key(before) != _key(one.get_state()))


def _generators() -> list[torch.Generator]:
    """torch's own generators: the CPU's, and the current CUDA device's once CUDA is in use."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


def _states() -> list[Tensor]:
    """The states of torch's own generators now."""
    return [generator.get_state() for generator in _generators()]


def _key(state: Tensor) -> bytes:
    """Tells a generator's state from all others of a run: of a CPU's 5,056 bytes those behind which the others follow.

    They are the seed, the position and the first two of 624 numbers, and at the end a normal number in store; on a GPU all 16.
    """
    held = state.numpy()
    return bytes(held[:40].tobytes() + held[5016:].tobytes())


def _differ(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether any generator has another state in ``b`` than in ``a``."""
    return any(_key(one) != _key(other) for one, other in zip(a, b, strict=False))


def _restore(states: list[Tensor]) -> None:
    """Set torch's own generators to states that :func:`_states` returned."""
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)


def _derived(state: Tensor, purpose: str, number: int) -> int:
    """A seed for a stream of its own, which follows from where another one stands."""
    text = f"{purpose} {number} ".encode() + _key(state)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _reseed(states: list[Tensor], purpose: str, number: int = 0) -> None:
    """Seed each generator from a state of it, for one of several purposes."""
    for generator, state in zip(_generators(), states, strict=True):
        generator.manual_seed(_derived(state, purpose, number))


def _advance(generator: torch.Generator) -> None:
    """Go one draw further."""
    if generator.device.type == "cuda":  # nothing runs on the device
        generator.set_offset(generator.get_offset() + 4)
        return
    with unseen():  # not a draw of the model, so no check may see it
        torch.rand(1, dtype=torch.float32, generator=generator)


@contextmanager
def drawn_apart(place: int) -> Iterator[None]:
    """A context in which ranks draw apart, each by its ``place``, such as its context-parallel rank; then alike again."""
    before = _states()
    for generator, state in zip(_generators(), before, strict=True):
        generator.manual_seed(_derived(state, "apart", place) & ~_MARK | _APART_MARK)
    apart = _states()
    try:
        yield
    finally:
        has_drawn = _differ(apart, _states())
        _restore(before)
        if has_drawn:  # else the streams are left as on one process
            for generator in _generators():
                _advance(generator)


def draws_apart() -> bool:
    """Whether a draw now is one of :func:`drawn_apart`, which the generator's seed tells."""
    return torch.default_generator.initial_seed() & _MARK == _APART_MARK


class SavedStreams:
    """The states of torch's, Python's and numpy's generators at one moment."""

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = _states(), random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Go on from there."""
        _restore(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


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
        self._before = _states()
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
        return _differ(self._before, _states())

    def has_drawn_on_host(self) -> bool:
        """Whether anything was drawn from Python's or numpy's generators since :meth:`enter_blocks`."""
        return self._host_at_blocks != host_state()

    def end_on_host(self) -> None:
        """Let Python's and numpy's generators of all stages go on from one state, which that at the beginning gives."""
        digest = hashlib.blake2b(self._host_before, digest_size=16).digest()
        random.seed(digest)
        np.random.seed(list(np.frombuffer(digest, dtype=np.uint32)))


def host_state(states: tuple[Any, Any] | None = None) -> bytes:
    """The states of Python's and numpy's generators, now or as given; the same on all ranks that are in the same state."""
    both: Any = states or (random.getstate(), np.random.get_state())
    (_, numbers, gauss), (_, keys, *rest) = both
    parts = np.array(numbers, dtype=np.uint32).tobytes(), repr(gauss).encode(), keys.tobytes(), repr(rest).encode()
    return b"".join(parts)


_MARK = 0xFFFFF << 40
"""Bits of a seed that a CPU's generator does not use, which tell draws of :func:`drawn_apart`."""

_APART_MARK = 0xA9A47 << 40
"""What they are there."""


DRAWS = (
    "bernoulli", "native_dropout", "_fused_dropout", "rand", "rand_like", "randn", "randn_like", "uniform", "normal",
    "exponential", "randint", "randint_like", "random", "multinomial", "geometric", "cauchy", "log_normal", "binomial",
    "poisson", "_standard_gamma", "_sample_dirichlet",
    "randperm",
)  # fmt: skip
"""Names of torch's operations that draw random numbers."""


class DrawWatch(TorchDispatchMode):
    """A dispatch mode that shows every random draw to ``check``."""

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
    """One random draw.

    Attributes:
        name: the operation, such as ``native_dropout``.
        shape: the shape of the tensor that it filled.
        seeded: whether it drew from a generator that the user passed, rather than one of torch's own. Such a generator is
            not switched between the streams, so all ranks draw alike from it.
    """

    name: str
    shape: tuple[int, ...]
    seeded: bool = False


def drawn_by(func: Any, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Drawn | None:
    """The draw that an operation made, as a dispatch mode sees it; None if it draws nothing."""
    name = func.name().split("::")[-1].split(".")[0].rstrip("_")
    if name not in DRAWS:
        return None
    passed: Any = next((arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, torch.Generator)), None)
    own = [generator_id(generator) for generator in _generators()]
    seeded = passed is not None and generator_id(passed) not in own
    return Drawn(name, tuple((out[0] if isinstance(out, tuple) else out).shape), seeded)


def seed_streams() -> None:
    """Seed the generators with a fixed number, inside :func:`kept_streams`: runs that are compared draw alike."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


@contextmanager
def kept_streams(device: torch.device) -> Iterator[None]:
    """A context after which the generators of this process have the states that they had before it."""
    before = get_streams(device)
    try:
        yield
    finally:
        set_streams(before, device)
