"""What a piece of work costs the host, counted exactly: Python's calls, torch's operations, collectives, bytes kept."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_seqpar.measure import SavedBytes, Traffic


class PythonCalls:
    """Counts the Python functions that this thread calls while it is entered.

    Attributes:
        by_file: their number by the file that they stand in.
    """

    def __init__(self) -> None:
        self.by_file: Counter[str] = Counter()

    def __enter__(self) -> PythonCalls:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code is not PythonCalls.__exit__.__code__:
            self.by_file[frame.f_code.co_filename] += 1


class Operations(Traffic):
    """Counts all that torch dispatches, views and collectives included, and the collectives by themselves."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


class Counts(NamedTuple):
    """Of a forward and a backward."""

    forward_calls: int
    backward_calls: int
    operations: int
    collectives: int
    kept: int
    """Bytes that autograd keeps between them, each storage once, parameters left out."""

    def beyond(self, less: Counts) -> Counts:
        """What is more than in ``less``."""
        return Counts(*(one - other for one, other in zip(self, less, strict=True)))


def count(model: nn.Module, forward: Callable[[], Tensor]) -> Counts:
    """Count a forward of the model and the backward of the sum of what it returns.

    It runs three times: what counts one thing would be counted by the other, and the first run may try out what later ones know.
    """
    with SavedBytes(exclude=model.parameters()) as kept:
        loss = forward().sum()
    kept.keep_caches()
    loss.backward()
    model.zero_grad()
    with PythonCalls() as ahead:
        out = forward()
    loss = out.sum()
    with PythonCalls() as back:
        loss.backward()
    model.zero_grad()
    with Operations() as operations:
        forward().sum().backward()
    model.zero_grad()
    calls = ahead.by_file.total(), back.by_file.total()
    return Counts(*calls, operations.total, operations.total_calls, kept.total)
