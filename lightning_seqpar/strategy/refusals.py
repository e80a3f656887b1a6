"""Errors that every rank raises alike: rank 0 tells them once, and the other ranks end without a word.

Most of them are refusals: what the user asked for can't be done right, and a sentence says what to change. They are told
without the frames of this package, of Lightning and of torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from pydantic import ValidationError
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from lightning_seqpar.strategy.child_watch import is_lost_peer, say
from lightning_seqpar.strategy.tracebacks import frames_of, is_at_raise, is_users, package_of

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = timedelta(seconds=5)
"""How long a rank waits for what the others raise, and for rank 0 to tell it."""
VERBOSE = "SEQPAR_VERBOSE"
"""Environment variable: set, to anything but 0, it has refusals told with all frames."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
"""Of an object, as Python shows it: each rank has its own."""
_PACKAGE = "lightning_seqpar"


class Refusals:
    """Finds out whether all ranks of the world raise one error, and has rank 0 tell it for all of them.

    The ranks compare in the store of the world's process group: one that raised nothing takes part in no collective. The error
    stays an ordinary exception on every rank, so that each of them may catch it. Only where nobody does, ``sys.excepthook``
    prints it on rank 0 alone; the other ranks wait until it is printed (torchrun would end rank 0 with the first that goes),
    and print it themselves if it is not.

    Args:
        store: the store in which they compare.
        rank: this rank, of all.
        size: how many there are.
        patience: how long a rank waits for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, patience: timedelta = PATIENCE) -> None:
        self._store, self._rank, self._size, self._patience = store, rank, size, patience
        self._name = ""

    @classmethod
    def of_world(cls, world: dist.ProcessGroup, patience: timedelta = PATIENCE) -> Refusals:
        """Those of ranks that are connected.

        Args:
            world: the process group of all ranks.
            patience: how long a rank waits for the others.
        """
        return cls(dist.distributed_c10d._world.pg_map[world][1], world.rank(), world.size(), patience)

    @classmethod
    def of_torchrun(cls) -> Refusals | None:
        """Those of ranks that torchrun has started and that are not connected yet; None where it has no store for them."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
            return None
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            store = TCPStore(address, port, is_master=False, timeout=PATIENCE)
        except RuntimeError:  # its store is gone, and every rank tells the error
            return None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        started = PrefixStore(f"before attempt {attempt} is connected", store)
        return cls(started, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def note(self, error: BaseException) -> str:
        """Let the other ranks know what this one raises, so that none of them waits for it.

        Returns:
            What stands for the error in the store.
        """
        text = _ADDRESS.sub("", f"{type(error).__name__}: {error}")
        said = hashlib.sha256(text.encode()).hexdigest()
        with contextlib.suppress(RuntimeError):  # the store is gone, and nobody waits there
            self._name = f"error {self._store.add(f'errors of rank {self._rank}', 1)}"
            self._store.set(self._keys("raised by")[self._rank], said)
        return said

    def is_shared(self, error: BaseException) -> bool:
        """Whether every rank raises this error now, with the same text. Returns once that is known, or out of patience."""
        said = self.note(error)
        keys = self._keys("raised by")
        return self._have_come(keys) and all(self._store.get(key).decode() == said for key in keys)

    def tell_once(self, error: BaseException, *, opens_log: bool, is_compared: bool = True) -> None:
        """Have rank 0 alone print an error that every rank raised, if nothing catches it.

        Args:
            error: the error.
            opens_log: whether this rank is the first one of its node, of which it prints one line if it is not rank 0.
            is_compared: whether it is known that every rank raised it; else they compare where nothing catches it.
        """
        usual = sys.excepthook

        def print_once(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
            if value is not error or not (is_compared or self.is_shared(error)):
                return usual(kind, value, trace)
            if self._rank and not self._have_come([f"{self._name} is told"]):
                return usual(kind, value, trace)
            if self._rank == 0:
                usual(kind, value, trace)
                sys.stderr.flush()
                self._store.set(f"{self._name} is told", "")
                # The store may be this process's: it stays until the others have read it.
                return self._have_come(self._keys("heard by")[1:])
            if opens_log:
                say(f"rank {self._rank} raised {kind.__name__}, as every rank did: rank 0 says why")
            return self._store.set(self._keys("heard by")[self._rank], "")

        sys.excepthook = print_once

    def _keys(self, what: str) -> list[str]:
        """The store's key of each rank, for one fact about the current error."""
        return [f"{self._name} {what} rank {rank}" for rank in range(self._size)]

    def _have_come(self, keys: Sequence[str]) -> bool:
        """Whether all these keys are in the store, or get there in time; not if the store is gone."""
        try:
            self._store.wait(list(keys), self._patience)
        except RuntimeError:
            return False
        return True


class _WithUsersFrames:
    """A ``sys.excepthook`` that prints some errors with the user's frames alone, and any other as the hook before it does.

    These are one error, and those that say that another rank is gone. There is one hook at a time, so that a script that catches
    many refusals does not get a hook for each.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        before = sys.excepthook
        self._usual: Callable[..., Any] = before._usual if isinstance(before, _WithUsersFrames) else before
        self._error = error

    def __call__(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
        if value is self._error or is_lost_peer(value):
            trace = _linked(_users(frames_of(trace)))
            value.__traceback__ = trace  # Python's own hook prints this one
        return self._usual(kind, value, trace)


def is_verbose() -> bool:
    """Whether refusals are told with all frames."""
    return os.environ.get(VERBOSE, "0") not in ("", "0")


def is_refusal(error: BaseException) -> bool:
    """Whether an error is a sentence of this package for the user, and nobody's mistake in code.

    That is a ``ValueError`` or ``RuntimeError`` which a ``raise`` statement of this package makes, or pydantic for a value
    that this package has it validate. What the interpreter or a library raises inside of this package (an index out of range,
    a rank that is gone) is none, and what the user's code raises neither.
    """
    frames = frames_of(error.__traceback__)
    while frames and package_of(frames[-1].tb_frame) == "pydantic":
        frames.pop()
    if not isinstance(error, ValueError | RuntimeError) or not frames or package_of(frames[-1].tb_frame) != _PACKAGE:
        return False
    return isinstance(error, ValidationError) or is_at_raise(frames[-1])


def shorten_traceback(error: BaseException) -> None:
    """Leave of the traceback of a refusal where it is caught, and the user's own frames behind that.

    Where nothing catches it, ``sys.excepthook`` prints the user's frames alone. What else lies inside says nothing of the user's
    code; ``SEQPAR_VERBOSE=1`` keeps it. Any other error keeps all its frames, as the cause of a refusal too, if the user's code
    has raised it.
    """
    if is_verbose() or not is_refusal(error):
        return
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        own = _users(frames_of(cause.__traceback__))
        if is_refusal(cause) or not own:
            cause.__traceback__ = _linked(own)
    first, *inner = frames_of(error.__traceback__)
    _linked([first, *_users(inner)])
    sys.excepthook = _WithUsersFrames(error)


def shorten_lost_peers() -> None:
    """Print what a later call raises that other ranks do not make too (a save after ``fit``) with the user's frames alone."""
    if not is_verbose():
        sys.excepthook = _WithUsersFrames()


def leave_untold(error: BaseException) -> None:
    """Print nothing of an error where nothing catches it, since what it says was said; ``SEQPAR_VERBOSE=1`` prints all of it.

    Its traceback, which torchrun's summary shows, is left the user's own frames.
    """
    if is_verbose():
        return
    first, *inner = frames_of(error.__traceback__)
    _linked([first, *_users(inner)])
    usual = sys.excepthook

    def print_others(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not error:
            usual(kind, value, trace)

    sys.excepthook = print_others


def shortens_refusals(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate what is called before the ranks are connected: its refusals are short, and torchrun's rank 0 alone tells them."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            refusals = Refusals.of_torchrun() if is_refusal(error) else None
            shorten_traceback(error)
            if refusals is not None:
                refusals.tell_once(error, opens_log=os.environ.get("LOCAL_RANK") == "0", is_compared=False)
            raise

    return called


def _users(frames: Iterable[TracebackType]) -> list[TracebackType]:
    """Those of some frames that run the user's code."""
    return [frame for frame in frames if is_users(frame.tb_frame)]


def _linked(frames: Iterable[TracebackType]) -> TracebackType | None:
    """A traceback of these frames, in place: Python 3.10 raises an error again with the traceback that it was caught with."""
    kept = [*frames]
    for one, following in zip(kept, [*kept[1:], None], strict=False):
        one.tb_next = following
    return kept[0] if kept else None
