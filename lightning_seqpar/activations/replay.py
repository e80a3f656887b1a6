"""Running a call again in the backward as it ran in the forward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Autocast:
    """The autocast state of a device type, as it is now; :meth:`again` puts it back for a while."""

    __slots__ = ("_state", "_type")

    def __init__(self, kind: str) -> None:
        self._type, self._state = kind, _autocast(kind)

    def again(self) -> AbstractContextManager[Any]:
        """The state in which this was made."""
        if self._state == _autocast(self._type):
            return nullcontext()
        enabled, dtype = self._state
        return torch.autocast(self._type, dtype=dtype, enabled=enabled)


def _autocast(kind: str) -> tuple[bool, torch.dtype | None]:
    return (True, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else (False, None)


def is_plain(x: Any) -> bool:
    """Whether it is a tensor and no subclass of somebody's; one without numbers counts."""
    return type(x) is Tensor or isinstance(x, FakeTensor)
