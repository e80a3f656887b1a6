"""What the traceback of an error says: its frames, whose code they run, and which call of the user's they belong to."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

_PACKAGE = "lightning_seqpar"
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "scripts"))
NOT_THE_USERS = {_PACKAGE, "lightning", "lightning_utilities", "pydantic", "torch"}
"""Packages whose frames say nothing of the user's code."""
_PLUMBING = (
    "torch.nn.modules.module",
    "torch.utils._contextlib",
    "torch.distributed.c10d_logger",
    "contextlib",
    "functools",
    "lightning_utilities.core.rank_zero",
)
"""Modules whose frames lie between a call and the function that is called."""


def frames_of(trace: TracebackType | None) -> list[TracebackType]:
    """A traceback's frames, the outermost first."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def is_at_raise(frame: TracebackType) -> bool:
    """Whether a frame's line has a ``raise`` statement: if not, the interpreter raises there, or what is called from C++."""
    return "raise" in linecache.getline(frame.tb_frame.f_code.co_filename, frame.tb_lineno).split()


def module_of(frame: FrameType) -> str:
    """The module whose code a frame runs."""
    return str(frame.f_globals.get("__name__") or "")


def package_of(frame: FrameType) -> str:
    """The package, or module without one, whose code a frame runs; ``__main__`` for a script."""
    return str(frame.f_globals.get("__package__") or module_of(frame)).partition(".")[0]


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs the user's code, or a library that the user has chosen, such as a model's."""
    file = frame.f_code.co_filename
    is_standard = file.startswith(("<frozen ", *_STANDARD)) and not file.startswith(_INSTALLED)
    return not is_standard and package_of(frame) not in NOT_THE_USERS


class UsersCall(NamedTuple):
    """The call of the user's code during which an error was raised.

    Attributes:
        name: the function that was called, as in ``Trainer.save_checkpoint``; empty if nothing is known.
        caller: the name of the user's function that called it.
        lines: the line that called it, and the innermost line of the user's below it, if there is one.
    """

    name: str
    caller: str
    lines: list[str]


def users_call(trace: TracebackType) -> UsersCall:
    """The call that the user's code was in, of an error that was raised inside of it and is being handled.

    That is the call in the hook or step that Lightning called last, or in the script if it called none. Calls of functions of
    the user's own are followed, those of modules are not: ``self(x)`` in a hook is a call of ``forward``.

    Args:
        trace: the error's traceback.
    """
    outer = trace.tb_frame.f_back
    callers = [] if outer is None else [*traceback.walk_stack(outer)]
    calls = [*reversed(callers), *traceback.walk_tb(trace)]
    frames = [frame for frame, _ in calls]
    users = [place for place, frame in enumerate(frames) if is_users(frame)]
    own = [place for place in users if not frames[place].f_code.co_filename.startswith(_INSTALLED)]
    lightnings = [place for place, frame in enumerate(frames) if users and place < users[-1] and _is_lightnings(frame)]
    first = lightnings[-1] if lightnings else -1
    ends = [
        place
        for place, frame in enumerate(frames)
        if any(first < one < place for one in users) and _calls_module(frame)
    ]
    last = ends[0] if ends else len(frames)
    within = [place for place in own if first < place < last] or [place for place in users if first < place < last]
    caller = within[-1] if within else -1
    inside = [frame for frame in frames[caller + 1 :] if not _is_plumbing(frame)]
    called = next((frame for frame in inside if type(frame.f_locals.get("self")).__name__ == "Trainer"), None)
    called = called or (inside[0] if inside else None)
    shown = [caller, *(place for place in own[-1:] if place > caller)] if within else []
    return UsersCall(
        "" if called is None else _name_of(called),
        frames[caller].f_code.co_name if within else "",
        [_line_of(*calls[place]) for place in shown],
    )


def _is_lightnings(frame: FrameType) -> bool:
    return package_of(frame) == "lightning"


def _calls_module(frame: FrameType) -> bool:
    return module_of(frame) == "torch.nn.modules.module" and frame.f_code.co_name == "_call_impl"


def _is_plumbing(frame: FrameType) -> bool:
    name = frame.f_code.co_name
    return module_of(frame) in _PLUMBING or (name.startswith(("_", "<")) and name != "__init__")


def _name_of(frame: FrameType) -> str:
    """The function that a frame runs, with the class of the object whose method it is."""
    owner = frame.f_locals.get("self")
    return f"{type(owner).__name__}." * (owner is not None) + frame.f_code.co_name


def _line_of(frame: FrameType, number: int) -> str:
    """The line of the source at which a frame is, after its place."""
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    source = linecache.getline(file, number).strip()
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f'File "{shown}", line {number}, in {function}' + f": {source[:120]}" * bool(source)
