"""Errors that say in a sentence what to change: rank 0 prints them with the user's own frames, and other ranks in one line.

They stay ordinary exceptions, raised alike on every rank as a rule: ``sys.excepthook`` prints those that nobody catches.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from pydantic import ValidationError

from lightning_seqpar.user_input import name_error

P = ParamSpec("P")
T = TypeVar("T")

VERBOSE = "SEQPAR_VERBOSE"
"""Environment variable: set, to anything but 0, it has errors told with all frames."""
PAUSE = 2.0
"""Seconds that rank 0 gets to come to an error that all ranks raise and, under torchrun, to print it before another rank leaves."""
NOT_THE_USERS = {"lightning_seqpar", "lightning", "lightning_utilities", "pydantic", "torch"}
"""Packages whose frames say nothing of the user's code."""


def _folder(package: str) -> str:
    spec: Any = find_spec(package)
    return str(Path(spec.origin).parent) + os.sep


_FOLDERS = tuple(_folder(name) for name in sorted(NOT_THE_USERS))
_STANDARD = ("<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "scripts"))


def is_users(file: str) -> bool:
    """Whether a file is the user's, or of a library that the user has chosen, such as a model's."""
    return not file.startswith(_FOLDERS) and (file.startswith(_INSTALLED) or not file.startswith(_STANDARD))


def say(message: str) -> None:
    """Prints to standard error at once: to the descriptor, as torch replaces ``sys.stderr`` by a buffer while it formats an
    exception.
    """
    os.write(2, f"lightning_seqpar: {message}\n".encode())


def await_the_end() -> None:
    """Waits, for :data:`PAUSE` at most, until torchrun ends this rank, as it does once the rank that prints the error has left."""
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait(PAUSE)
    signal.signal(signal.SIGTERM, before)


OTHER_COLLECTIVE = "op.preamble.length <= op.nbytes"
"""Text in gloo's error where two ranks met in different collectives, or with tensors of different sizes."""
_SIGNS_OF_A_LOST_PEER = (
    *(OTHER_COLLECTIVE, "closed by peer", "pair closure", "reset by peer"),
    *("Broken pipe", "Connection refused", "Timed out", "timed out", "Read error"),
)
"""Texts in errors of gloo and nccl that say that another rank is gone, or in another collective."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception says that another rank is gone, rather than what went wrong.

    Others' errors may have the same words (a loader's own timeout, a data base's): those that a ``raise`` statement makes are
    taken by them only if it is torch.distributed's or this package's. Collectives raise from C++.
    """
    if not isinstance(error, RuntimeError) or not any(sign in str(error) for sign in _SIGNS_OF_A_LOST_PEER):
        return False
    stack = traceback.extract_tb(error.__traceback__)
    if not is_at_raise(stack):
        return True
    cause = error.__cause__
    return stack[-1].filename.startswith((_folder("torch.distributed"), _folder("lightning_seqpar"))) or (
        cause is not None and is_lost_peer(cause)
    )


def is_at_raise(stack: traceback.StackSummary) -> bool:
    """Whether a ``raise`` statement raised an error: if not, the interpreter did, or what is called from C++."""
    return bool(stack) and "raise" in (stack[-1].line or "").split()


def is_verbose() -> bool:
    """Whether errors are told with all frames."""
    return os.environ.get(VERBOSE, "0") not in ("", "0")


def is_refusal(error: BaseException) -> bool:
    """Whether an error is a sentence of this package for the user: one that a ``raise`` statement of it makes, or pydantic for
    it. What the interpreter or torch raises inside of this package is somebody's mistake in code.
    """
    stack = traceback.extract_tb(error.__traceback__)
    while stack and stack[-1].filename.startswith(_folder("pydantic")):
        stack.pop()
    if not isinstance(error, ValueError | RuntimeError) or not stack:
        return False
    is_ours = stack[-1].filename.startswith(_folder("lightning_seqpar"))
    return is_ours and (isinstance(error, ValidationError) or is_at_raise(stack))


class _Short:
    """A ``sys.excepthook`` that prints one error, and those of lost ranks, shortly (only rank 0 more than a line), others as
    before.
    """

    def __init__(self, error: BaseException | None = None, rank: int = 0, *, is_told: bool = False) -> None:
        before = sys.excepthook
        self._usual: Callable[..., Any] = before._usual if isinstance(before, _Short) else before
        self._error, self._rank, self._is_told = error, rank, is_told

    def __call__(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is self._error and self._is_told:
            return
        if value is self._error and self._rank:
            say(f"rank {self._rank} raised {name_error(value)}")
            await_the_end()
        elif is_verbose() or (value is not self._error and not is_lost_peer(value)):
            self._usual(kind, value, trace)
        else:
            told = traceback.TracebackException(kind, value, trace)
            _keep_users(told)
            sys.stderr.write("".join(told.format()))


def _keep_users(told: traceback.TracebackException) -> None:
    told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if is_users(frame.filename)])
    for cause in (told.__cause__, told.__context__):
        if cause is not None:
            _keep_users(cause)


def tell_shortly(error: BaseException | None = None, rank: int = 0, *, is_told: bool = False) -> None:
    """Print an error, and those of lost ranks, shortly where nothing catches it; not if it ``is_told`` otherwise."""
    sys.excepthook = _Short(error, rank, is_told=is_told)


def shortens_refusals(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate what is called before the ranks are connected, so that its refusals are told shortly."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            if is_refusal(error):
                tell_shortly(error, int(os.environ.get("RANK", "0")))
            raise

    return called
