"""Which calls of the package make the host wait for the device, or would if the tensors lay on one."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import lightning_seqpar
from lightning_seqpar.distributed.autograd import Watch, is_higher_order

PACKAGE = Path(lightning_seqpar.__file__).parent
TORCH = Path(torch.__file__).parent
ON_HOST = ("distributed/host.py", "distributed/rng.py")
"""Modules whose calls do not wait: the one that tells a device from the host, and states of generators, which lie on the host."""
RECORDER = "verify/parity.py"
"""Of tests, which no training has."""
SCALERS = (TORCH / "amp", TORCH / "distributed" / "fsdp" / "sharded_grad_scaler.py")

_READ = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive",
         "repeat_interleave", "is_nonzero"}  # fmt: skip
_SENT = {"lift_fresh", "lift_fresh_copy"}  # torch.tensor(...) of Python's numbers
_METHODS = {"item", "tolist", "numpy", "cpu"}  # of tensors; on the CPU some of them call no operation


class Waits:
    """What made the host wait, told by the innermost frame that is not torch's.

    Attributes:
        found: of the package's own, each as ``what, module:line``.
        by_scaler: how often torch's scaler of gradients did.
    """

    may: tuple[str, ...] = (RECORDER,)  # modules whose calls are no matter

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.by_scaler = 0

    def _note(self, what: str, frame: FrameType | None) -> None:
        while frame is not None and _is_of_tensors(Path(frame.f_code.co_filename)):
            frame = frame.f_back
        path = Path("" if frame is None else frame.f_code.co_filename)
        if any(scaler in (path, *path.parents) for scaler in SCALERS):
            self.by_scaler += 1
        elif frame is not None and PACKAGE in path.parents and path.relative_to(PACKAGE).as_posix() not in self.may:
            self.found.append(f"{what}, {path.relative_to(PACKAGE).as_posix()}:{frame.f_lineno}")


class DeviceWaits(Waits):
    """While it is entered, notes what CUDA itself warns of: that the host waits for a device."""

    def __enter__(self) -> DeviceWaits:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._warned
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._warnings.__exit__(*error)

    def _warned(self, message: Any, *args: Any) -> None:
        if "synchroniz" in str(message):
            self._note("a wait", sys._getframe(1))


class HostWaits(Waits, Watch):
    """While it is entered, notes calls that read numbers of a tensor, or send numbers of the host to one.

    Operations are seen in the backward too, and so are methods of tensors, by the interpreter's profile hook.
    """

    may = (RECORDER, *ON_HOST)

    def __enter__(self) -> HostWaits:
        sys.setprofile(self._profile)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        sys.setprofile(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_higher_order(func):
            return func(*args, **(kwargs or {}))
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


def _is_of_tensors(path: Path) -> bool:
    """Whether a file of torch's is but a way to an operation, or Python's to a warning; an optimizer's waits are its own."""
    if path.name == "warnings.py":
        return True
    own = (TORCH / "optim", *SCALERS)
    return TORCH in path.parents and not any(one in (path, *path.parents) for one in own)


class WaitsOfSteps(Callback):
    """Notes the waits in training steps 17 to 20, the first of which no run-time check is due at.

    Args:
        waits: what sees them.
    """

    FIRST, LAST = 17, 20

    def __init__(self, waits: DeviceWaits | HostWaits | None = None) -> None:
        self.waits = waits or HostWaits()
        self._begun, self._entered = 0, False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._begun += 1  # an index comes again in each epoch
        if self._begun == self.FIRST:
            self._entered = True
            self.waits.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._begun >= self.LAST:
            self._leave()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._entered:
            self._entered = False
            self.waits.__exit__(None, None, None)
