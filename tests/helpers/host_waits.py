"""Which calls of the package make the host wait for the device, or would if the tensors lay on one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_seqpar

PACKAGE = Path(lightning_seqpar.__file__).parent
TORCH = Path(torch.__file__).parent
MAY_WAIT = ("distributed/host.py", "distributed/rng.py")
"""Modules whose calls do not wait: the one that tells a device from the host, and states of generators, which lie on the host."""

_READ = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive",
         "repeat_interleave", "is_nonzero"}  # fmt: skip
_SENT = {"lift_fresh", "lift_fresh_copy"}  # torch.tensor(...) of Python's numbers
_METHODS = {"item", "tolist", "numpy", "cpu"}  # of tensors; on the CPU some of them call no operation


class HostWaits(TorchDispatchMode):
    """While it is entered, notes calls from the package that read numbers of a tensor, or send numbers of the host to one.

    Operations are seen in the backward too, and so are methods of tensors, by the interpreter's profile hook.

    Attributes:
        found: each as ``function, module:line``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __enter__(self) -> HostWaits:
        sys.setprofile(self._profile)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        sys.setprofile(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in args[1]
        )
        if name in _READ or name in _SENT or by_mask:
            self._note(name, sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and arg.__name__ in _METHODS and isinstance(getattr(arg, "__self__", None), Tensor):
            self._note(arg.__name__, frame)

    def _note(self, name: str, frame: FrameType | None) -> None:
        while frame is not None and _is_of_tensors(Path(frame.f_code.co_filename)):
            frame = frame.f_back
        path = Path("" if frame is None else frame.f_code.co_filename)
        if frame is not None and PACKAGE in path.parents and path.relative_to(PACKAGE).as_posix() not in MAY_WAIT:
            self.found.append(f"{name}, {path.relative_to(PACKAGE).as_posix()}:{frame.f_lineno}")


def _is_of_tensors(path: Path) -> bool:
    """Whether a file of torch's is but a way to an operation; an optimizer's waits are its own."""
    return TORCH in path.parents and TORCH / "optim" not in path.parents and TORCH / "amp" not in path.parents


class WaitsOfSteps(Callback):
    """Notes the waits in training steps 17 to 20, the first of which no run-time check is due at."""

    def __init__(self) -> None:
        self.waits = HostWaits()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 16:
            self.waits.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 19:
            self.waits.__exit__(None, None, None)
