"""Random streams under tensor and sequence parallelism.

A whole activation, which every tensor-parallel rank holds alike, must be dropped out alike on all of them; shards and
local heads must be dropped out independently. So a process has two streams, one that is replicated over the
tensor-parallel ranks and one of its own, and :class:`RankStreams` switches between them.
"""

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

from lightning_seqpar.distributed.autograd import generator_id, unseen


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
        if self._began is not None and not _host_moved(self._began):
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
    """Switches torch's generators between the replicated stream and this tensor-parallel rank's own stream.

    Draws on whole activations (``[b, s, h]``, alike on every rank) must come from the replicated stream; draws on shards
    (``[b, s/tp, h]``) and on local heads from the rank's own. From :meth:`begin` to :meth:`end` draws are the rank's own.

    The own stream is not kept from one use to the next: each :meth:`begin` seeds it from the replicated stream's state and
    the rank. So ``seed_everything`` alone decides both streams, and a run that is resumed from a checkpoint draws what it
    would have drawn. Where nothing was drawn from the own stream, :meth:`end` leaves the replicated one exactly where it
    was, as in a run on one process; otherwise one draw further, so that the next :meth:`begin` seeds anew.

    A recompute (activation checkpointing) must draw what the forward drew. It restores the state that the generators had
    where the checkpointed part began, and the seed in that state tells which stream it is: the replicated stream that an own
    one was seeded from is remembered by the own one's seed.

    Args:
        rank: the tensor-parallel rank.

    Attributes:
        draws: whether draws are to be expected in this step. Without, nothing is switched and no state is read.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self.draws = rank, True
        self.forget()

    def forget(self) -> None:
        """Forget what was begun: no recompute of it is to come."""
        # By the seeds of an own stream: the states that it was seeded from, and the positions before its first draw.
        self._seeded_from: dict[tuple[int, ...], tuple[list[Tensor], list[bytes]]] = {}
        self._alike: set[tuple[tuple[int, ...], bytes]] = set()

    @property
    def own(self) -> bool:
        """Whether a draw would come from the rank's own stream now."""
        return bool(self._seeded_from) and _seeds() in self._seeded_from

    def begin(self) -> bool:
        """Switch to this rank's own stream; returns whether that was not the current one already."""
        if not self.draws or self.own:
            return False
        replicated = _states()
        _reseed(replicated, self._rank)
        fresh = [_position(state) for state in _states()]
        self._seeded_from[_seeds()] = replicated, fresh
        return True

    def end(self) -> bool:
        """Switch to the replicated stream; returns whether that was not the current one already.

        It goes on where it was, or one draw further if the own stream was used.
        """
        if not self.draws or not self.own:
            return False
        replicated, fresh = self._seeded_from[_seeds()]
        used = [_position(state) != at for state, at in zip(_states(), fresh, strict=False)]
        _restore(replicated)
        _advance(used)
        return True

    def note_alike(self) -> None:
        """Note for a recompute that what is drawn next is drawn alike on all ranks."""
        self._alike.add(self._place())

    def was_alike(self) -> bool:
        """Whether :meth:`note_alike` was called at the present state of the own stream."""
        return bool(self._alike) and self._place() in self._alike

    @staticmethod
    def _place() -> tuple[tuple[int, ...], bytes]:
        return _seeds(), b"".join(_position(state) for state in _states())


class StepDraws:
    """Tells of a step whether it drew from torch's generators, made where the step begins."""

    def __init__(self) -> None:
        self._before = _states()

    def end(self) -> bool:
        """Whether the step has drawn. Ranks that did not expect it have drawn alike, and equally much."""
        return _differ(self._before, _states())


def _generators() -> list[torch.Generator]:
    """torch's own generators: the CPU's, and the current CUDA device's once CUDA is in use."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


def _states() -> list[Tensor]:
    """The states of torch's own generators now."""
    return [generator.get_state() for generator in _generators()]


def _seeds() -> tuple[int, ...]:
    """The seeds of torch's own generators; where draws are made on a device, that of the CPU tells nothing."""
    return tuple(generator.initial_seed() for generator in _generators())


def _position(state: Tensor) -> bytes:
    """How far a generator has gone since it was seeded: the bytes behind the seed in torch's states."""
    return state.numpy()[8:24].tobytes()


def _differ(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether any generator has another state in ``b`` than in ``a``."""
    return any(one.numpy().tobytes() != other.numpy().tobytes() for one, other in zip(a, b, strict=False))


def _restore(states: list[Tensor]) -> None:
    """Set torch's own generators to states that :func:`_states` returned."""
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)


def _reseed(states: list[Tensor], rank: int) -> None:
    """Seed each generator from its state and the tensor-parallel rank."""
    for generator, state in zip(_generators(), states, strict=True):
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8, salt=rank.to_bytes(4, "little"))
        generator.manual_seed(int.from_bytes(digest.digest(), "little") >> 1)


@contextmanager
def drawn_apart(place: int) -> Iterator[None]:
    """A context in which ranks draw apart, each by its ``place``, such as its context-parallel rank; then alike again."""
    before = _states()
    _reseed(before, _APART + place)
    for generator in _generators():
        generator.manual_seed(generator.initial_seed() & ~_MARK | _APART_MARK)
    apart = _states()
    try:
        yield
    finally:
        has_drawn = _differ(apart, _states())
        _restore(before)
        if has_drawn:  # else the streams are left as on one process
            _advance([True] * len(before))


def draws_apart() -> bool:
    """Whether a draw now is one of :func:`drawn_apart`, which the generator's seed tells."""
    return torch.default_generator.initial_seed() & _MARK == _APART_MARK


class SavedStreams:
    """The states of torch's, Python's and numpy's generators at one moment."""

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = _states(), random.getstate(), np.random.get_state()

    def have_moved(self) -> bool:
        """Whether anything was drawn since."""
        return _differ(self._torch, _states()) or _host_moved((self._python, self._numpy))

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
        _reseed(self._before, _STAGE + chunk)

    def begin_between(self, stack: int) -> None:
        """What lies behind a stack of blocks, and in front of the next, begins; all stages draw alike there."""
        _reseed(self._before, _BETWEEN + stack)

    def end(self) -> None:
        """The forward's part on this stage is done."""
        _reseed(self._before, _BEHIND_STAGES)

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


def _host_moved(since: tuple[Any, Any]) -> bool:
    """Whether Python's or numpy's generator has another state than ``since``."""
    (_, keys, *rest), (_, now, *others) = since[1], np.random.get_state()
    return random.getstate() != since[0] or rest != others or not np.array_equal(keys, now)


def host_state(states: tuple[Any, Any] | None = None) -> bytes:
    """The states of Python's and numpy's generators, now or as given; the same on all ranks that are in the same state."""
    both: Any = states or (random.getstate(), np.random.get_state())
    (_, numbers, gauss), (_, keys, *rest) = both
    parts = np.array(numbers, dtype=np.uint32).tobytes(), repr(gauss).encode(), keys.tobytes(), repr(rest).encode()
    return b"".join(parts)


_STAGE = 1 << 17
"""Above any context-parallel rank behind :data:`_APART`."""

_BETWEEN = 3 << 16
"""Above any chunk of a pipeline's stages behind :data:`_STAGE`."""

_BEHIND_STAGES = 1 << 18

_APART = 1 << 16
"""Above any tensor-parallel rank, whose own streams are seeded from the same state."""

_MARK = 0xFFFFF << 40
"""Bits of a seed that a CPU's generator does not use, which tell draws of :func:`drawn_apart`."""

_APART_MARK = 0xA9A47 << 40
"""What they are there."""


def _advance(used: list[bool]) -> None:
    """Draw one number from each generator for which ``used`` is set."""
    with unseen():  # not a draw of the model, so no check may see it
        for generator, moved in zip(_generators(), used, strict=False):
            if moved:
                torch.rand(1, dtype=torch.float32, generator=generator, device=generator.device)


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
