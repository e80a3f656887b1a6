"""What a step keeps and what it sends: saved bytes and collectives, measured rather than estimated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_seqpar.distributed.autograd import dispatch_modes, storage_id


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of it, where it is one of torch's distributed tensors."""
    return getattr(tensor, "_local_tensor", tensor)


class SavedBytes:
    """Counts the bytes that autograd keeps for the backward, each storage once, parameters not at all.

    Use as a context manager around the forward; :attr:`total` is in bytes, on this rank.
    """

    is_transparent = True  # it changes nothing of what is kept

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        # By the storage's own address: on the meta device no storage has a memory's.
        self._excluded = {storage_id(_local(tensor)) for tensor in exclude}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor as kept."""
        storage = _local(tensor).untyped_storage()
        if storage_id(storage) not in self._excluded:
            # The storage is held so that its address can't be given out twice.
            self._storages[storage_id(storage)] = storage
        return tensor

    @property
    def total(self) -> int:
        """Bytes kept so far."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)


class Traffic(TorchDispatchMode):
    """Counts this rank's collectives and the bytes of the tensors it gives to them.

    A collective that is made of another (see :mod:`lightning_seqpar.distributed.collectives`) counts as what it stands for.

    Attributes:
        calls: number of calls by operation, such as ``{"all_gather": 4}``.
        bytes: bytes of the inputs by operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._parts = 0

    def stands_for(self, name: str, count: int, parts: int) -> None:
        """The next ``parts`` exchanges are one collective of ``count`` bytes."""
        self.calls[name] += 1
        self.bytes[name] += count
        self._parts += parts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func.name().split("::")[-1].strip("_").replace("_base", "").replace("_coalesced", "")
            name = name.removesuffix("_").replace("allgather", "all_gather").replace("allreduce", "all_reduce")
            if name.startswith("alltoall") and self._parts:
                self._parts -= 1
            elif name.startswith(("all_gather", "all_reduce", "reduce_scatter", "alltoall", "broadcast")):
                # (output, input, ...) where they differ, (tensors, ...) where they are one.
                given = args[1] if name.startswith(("all_gather", "reduce_scatter", "alltoall")) else args[0]
                self.calls[name] += 1
                self.bytes[name] += sum(tensor.nbytes for tensor in _tensors(given))
        elif func.namespace == "_c10d_functional" and "wait" not in func.name() and "wrap" not in func.name():
            # As torch's DTensor calls them.
            name = func.name().split("::")[-1].removesuffix("_into_tensor").removesuffix("_tensor")
            self.calls[name] += 1
            self.bytes[name] += sum(tensor.nbytes for tensor in _tensors(args[0]))
        return func(*args, **(kwargs or {}))

    @property
    def total_calls(self) -> int:
        """All calls."""
        return sum(self.calls.values())

    @property
    def total_bytes(self) -> int:
        """All bytes."""
        return sum(self.bytes.values())


def stands_for(name: str, count: int, parts: int = 1) -> None:
    """Tell whoever counts that the next ``parts`` exchanges of this thread are one collective of ``count`` bytes."""
    for mode in dispatch_modes():
        if isinstance(mode, Traffic):
            mode.stands_for(name, count, parts)


class StepMeter(Callback):
    """Measures one training batch: bytes kept for the backward, collectives and bytes sent, on each rank.

    Args:
        batch: which batch (0-based); the default is one at which no run-time check is due.
    """

    def __init__(self, batch: int = 16) -> None:
        self._batch = batch
        self._saved: SavedBytes | None = None
        self._traffic: Traffic | None = None
        self.saved_bytes = 0
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start to count."""
        if batch_idx == self._batch:
            self._traffic = Traffic()
            self._traffic.__enter__()  # type: ignore[no-untyped-call]
            self._saved = SavedBytes(exclude=pl_module.parameters())
            self._saved.__enter__()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """The forward is over: what is kept now is kept for the backward."""
        if self._saved is not None:
            self._saved.__exit__(None, None, None)
            self.saved_bytes, self._saved = self._saved.total, None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step is over."""
        if self._traffic is not None:
            self._traffic.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.calls, self.bytes, self._traffic = dict(self._traffic.calls), dict(self._traffic.bytes), None
