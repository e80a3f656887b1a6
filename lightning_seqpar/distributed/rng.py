"""Random streams under tensor and sequence parallelism.

A replicated activation must be dropped out alike on all tensor-parallel ranks; shards and local heads must be dropped out
independently. So a process has two streams, one that the ranks of a replica share and one of its own, and
:class:`RankStreams` switches between them.
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

from lightning_seqpar.distributed.autograd import Watch, generator_id, is_higher_order, unseen


class RankStreams:
    """Switches torch's generators between the stream that the ranks of a replica share and this rank's own.

    ======================================================  ================================  ============================
    draws                                                   with sequence parallelism         without
    ======================================================  ================================  ============================
    between the blocks (layerdrop)                          shared                            shared
    in a block, on its activation                           own: shards ``[b, s/tp, h]``      shared: ``[b, s, h]``
    in front of columns, and in replicated modules          shared: ``[b, s, h]``             shared
    between a column and its row, ``[b, s, f/tp]``          own                               own
    ======================================================  ================================  ============================

    No state of the own stream is kept: each :meth:`begin` seeds it from a key of the shared stream's present state and the
    rank's place. So ``seed_everything`` alone decides both streams, and a run that is resumed from a checkpoint draws what it
    would have drawn. Where nothing was drawn from the own stream, :meth:`end` leaves the shared one exactly where it was, as in
    a run on one process; otherwise one number further, so that the next :meth:`begin` seeds anew.

    A recompute (activation checkpointing) must draw what the forward drew. It restores the state that a generator had where the
    checkpointed part began, and the seed in that state tells which stream it is: the shared state that an own stream was
    seeded from is remembered by the own one's seed. ``place`` is the number of this rank among those that draw apart.
    """

    def __init__(self, place: int) -> None:
        self._place = place
        self.draws = generators()  # from which draws are expected in this step: no other is switched, or its state read
        self.forget()

    def forget(self) -> None:
        """Forget what was begun: no recompute of it is to come."""
        self._shared: dict[int, Tensor] = {}  # by the seed of an own stream: the state that it was seeded from
        self._alike: set[bytes] = set()

    @property
    def own(self) -> bool:
        """Whether a draw would come from the rank's own stream now."""
        return any(one.initial_seed() in self._shared for one in self.draws)

    def begin(self) -> bool:
        """Switch to this rank's own stream; returns whether that was not the current one already."""
        switched = False
        for one in self.draws:
            if one.initial_seed() not in self._shared:
                shared, switched = one.get_state(), True
                one.manual_seed(seed := _derived_seed(shared, self._place))
                self._shared[seed] = shared
        return switched

    def end(self) -> bool:
        """Switch to the shared stream; returns whether that was not the current one already."""
        switched = False
        for one in self.draws:
            if (shared := self._shared.get(one.initial_seed())) is not None:
                used, switched = one.get_state().numpy()[8:24].tobytes() not in _FRESH, True
                one.set_state(shared)
                if used:
                    _advance(one)
        return switched

    def note_alike(self) -> None:
        """Note for a recompute that what is drawn next is drawn alike on all ranks."""
        self._alike.add(self._key())

    def was_alike(self) -> bool:
        """Whether :meth:`note_alike` was called at the present state of the own stream."""
        return bool(self._alike) and self._key() in self._alike

    def _key(self) -> bytes:
        return b"".join([_key(one.get_state()) for one in self.draws])


class OneStream(RankStreams):
    """The same inside compiled blocks: a graph switches no streams, and draws from the one that its block began with."""

    def __init__(self) -> None:
        self.draws: Any = ()

    def begin(self) -> bool:
        """Nothing."""
        return False

    def end(self) -> bool:
        """Nothing."""
        return False


DEVICES = frozenset(("cpu", "cuda"))
"""Types of devices that have a generator."""


def generators(devices: Collection[str] = DEVICES) -> list[torch.Generator]:
    """torch's own generators of some types of devices: the CPU's, and the current CUDA device's once CUDA is in use."""
    found = [torch.default_generator] if "cpu" in devices else []
    if "cuda" in devices and torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


_FRESH = (torch.Generator().get_state().numpy()[8:24].tobytes(), bytes(8))
"""The position of a generator behind its seed, before its first draw: on a CPU, and on a CUDA device."""


def _key(state: Tensor) -> bytes:
    """Tells a generator's state from the others of a run.

    A CUDA generator's 16 bytes are its seed and offset. Of a CPU's 5,056 the key takes the seed, the position among the 624
    present numbers, the first four of these, which all others follow from, and a normally distributed number in store.
    """
    held = state.numpy()
    return bytes(held[:56].tobytes() + held[5016:].tobytes())


def _derived_seed(state: Tensor, place: int) -> int:
    """The seed of a stream that begins at another one's state; ``place`` tells it from others that do."""
    digest = hashlib.blake2b(_key(state), digest_size=8, salt=place.to_bytes(4, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1


def _advance(generator: torch.Generator) -> None:
    """Leave out one number."""
    if generator.device.type == "cuda":
        generator.set_offset(generator.get_offset() + 4)  # as a draw would, without a kernel
        return
    with unseen():  # not a draw of the model, so no check may see it
        torch.rand(1, dtype=torch.float32, generator=generator, device=generator.device)


def torch_states() -> list[Tensor]:
    """The states of torch's own generators now."""
    return [one.get_state() for one in generators()]


def drawn_since(states: Sequence[Tensor]) -> frozenset[str]:
    """Types of the devices from whose generators was drawn since :func:`torch_states` returned ``states``."""
    pairs = zip(generators(), states, strict=False)
    return frozenset(one.device.type for one, before in pairs if _key(one.get_state()) != _key(before))


def _restore(states: Sequence[Tensor]) -> None:
    for one, state in zip(generators(), states, strict=False):
        one.set_state(state)


def _reseed(states: Sequence[Tensor], place: int) -> None:
    for one, state in zip(generators(), states, strict=False):
        one.manual_seed(_derived_seed(state, place))


def _host_states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _restore_host(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def host_state(states: tuple[Any, Any] | None = None) -> bytes:
    """Tells states of Python's and numpy's generators, now or as given, from others; the same on ranks that are in the same."""
    (_, numbers, gauss), (_, keys, *rest) = states or _host_states()  # as of torch's, the first four of 624 numbers
    return repr((numbers[:4], numbers[-1], gauss, keys[:4].tolist(), rest)).encode()


def _moved(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    """Whether Python's or numpy's generator has another state than it had."""
    (python, (_, keys, *rest)), (python_now, (_, keys_now, *rest_now)) = before, now
    return python != python_now or rest != rest_now or not np.array_equal(keys[:4], keys_now[:4])


class HostDraws:
    """Lets a part of a forward, which begins now, draw again from Python's and numpy's generators what it drew.

    torch restores its own generators for a recompute, and no others.
    """

    def __init__(self) -> None:
        self._began: tuple[Any, Any] | None = _host_states()

    def end(self) -> None:
        """The part ended: if it drew nothing there is nothing to draw again."""
        if self._began is not None and not _moved(self._began, _host_states()):
            self._began = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context in which the part is run again; behind it the generators are where they were."""
        if self._began is None:
            yield
            return
        now = _host_states()
        _restore_host(self._began)
        try:
            yield
        finally:
            _restore_host(now)


class SavedStreams:
    """The states of torch's, Python's and numpy's generators at one moment."""

    def __init__(self) -> None:
        self._torch, self._host = torch_states(), _host_states()

    def have_moved(self) -> bool:
        """Whether anything was drawn since."""
        return bool(drawn_since(self._torch)) or _moved(self._host, _host_states())

    def restore(self) -> None:
        """Go on from there."""
        _restore(self._torch)
        _restore_host(self._host)

    def pack(self) -> dict[str, Any]:
        """The states as plain numbers and tensors, which ``weights_only=True`` loads."""
        python, (name, keys, *rest) = self._host
        return {
            "python": [python[0], list(python[1]), python[2]],
            "numpy": [str(name), keys.tolist(), *rest],
            "torch": self._torch[0],
            "device": self._torch[1] if len(self._torch) > 1 else None,
        }

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> SavedStreams:
        """What :meth:`pack` packed; a device's generator keeps its state if that was on a CPU."""
        saved, (version, state, gauss), (name, keys, *rest) = cls(), packed["python"], packed["numpy"]
        saved._host = (version, tuple(state), gauss), (name, np.array(keys, dtype=np.uint32), *rest)
        saved._torch = [one.cpu() for one in (packed["torch"], packed["device"]) if one is not None]
        return saved


@contextmanager
def kept_streams() -> Iterator[None]:
    """A context after which the generators of this process have the states that they had before it."""
    before = SavedStreams()
    try:
        yield
    finally:
        before.restore()


def share_streams(group: ProcessGroup, source: int) -> None:
    """Give every rank of ``group`` the states of world rank ``source``: they draw alike even if nobody seeded. Collective."""
    box = [SavedStreams()]
    dist.broadcast_object_list(box, src=source, group=group)
    box[0].restore()


def seed_streams() -> None:
    """Seed the generators with a fixed number, inside :func:`kept_streams`: runs that are compared draw alike."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


@contextmanager
def drawn_apart(place: int) -> Iterator[None]:
    """A context in which ranks draw apart, each by its ``place``, such as its context-parallel rank; then alike again."""
    before = torch_states()
    for one, state in zip(generators(), before, strict=True):
        one.manual_seed(_derived_seed(state, _APART + place) & ~_MARK | _APART_MARK)
    apart = torch_states()
    try:
        yield
    finally:
        drawn = drawn_since(apart)
        _restore(before)
        for one in generators() if drawn else ():  # else the streams are left as on one process
            _advance(one)


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
        self._before = torch_states()
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
        return bool(drawn_since(self._before))

    def has_drawn_on_host(self) -> bool:
        """Whether anything was drawn from Python's or numpy's generators since :meth:`enter_blocks`."""
        return self._host_at_blocks != host_state()

    def end_on_host(self) -> None:
        """Let Python's and numpy's generators of all stages go on from one state, which that at the beginning gives."""
        digest = hashlib.blake2b(self._host_before, digest_size=16).digest()
        random.seed(digest)
        np.random.seed(list(np.frombuffer(digest, dtype=np.uint32)))


_APART = 1 << 16
"""Added to a place, and above any, as the next three are: kinds of streams that are seeded from one state."""
_STAGE = 2 << 16
_BETWEEN = 3 << 16
_BEHIND_STAGES = 4 << 16

_MARK = 0xFFFFF << 40
"""Bits of a seed that a CPU's generator does not use ..."""
_APART_MARK = 0xA9A47 << 40
"""... and what they are in draws of :func:`drawn_apart`."""


DRAWS = (
    "bernoulli", "native_dropout", "_fused_dropout", "rand", "rand_like", "randn", "randn_like", "uniform", "normal",
    "exponential", "randint", "randint_like", "random", "multinomial", "geometric", "cauchy", "log_normal", "binomial",
    "poisson", "_standard_gamma", "_sample_dirichlet",
    "randperm",
)  # fmt: skip
"""Names of torch's operations that draw random numbers."""


class DrawWatch(Watch):
    """A dispatch mode that shows every random draw to ``check``."""

    def __init__(self, check: Callable[[Drawn], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_higher_order(func):
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if (drawn := drawn_by(func, out, args, kwargs)) is not None:
            self._check(drawn)
        return out


class Drawn(NamedTuple):
    """One random draw."""

    name: str  # of the operation, such as native_dropout
    shape: tuple[int, ...]  # of the tensor that it filled
    # Whether it drew from a generator that the user passed, which is not switched between the streams: all ranks draw alike.
    seeded: bool = False


def drawn_by(func: Any, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Drawn | None:
    """The draw that an operation made, as a dispatch mode sees it; None if it draws nothing."""
    name = func.name().split("::")[-1].split(".")[0].rstrip("_")
    if name not in DRAWS:
        return None
    passed: Any = next((arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, torch.Generator)), None)
    own = [generator_id(generator) for generator in generators()]
    seeded = passed is not None and generator_id(passed) not in own
    return Drawn(name, tuple((out[0] if isinstance(out, tuple) else out).shape), seeded)
