"""What the traceback of an error says: its frames, whose code they run, and whether a ``raise`` statement made the error."""

from __future__ import annotations

import dis
from types import TracebackType


def frames_of(trace: TracebackType | None) -> list[TracebackType]:
    """A traceback's frames, the outermost first."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def is_at_raise(frame: TracebackType) -> bool:
    """Whether a frame is at a ``raise`` statement: if not, the interpreter raises there, or what is called from C++."""
    return frame.tb_frame.f_code.co_code[frame.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def module_of(frame: TracebackType) -> str:
    """The module whose code a frame runs."""
    return str(frame.tb_frame.f_globals.get("__name__") or "")
