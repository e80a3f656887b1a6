"""Counters of what a step keeps for its backward (:class:`SavedBytes`) and sends (:class:`Traffic`): measured, not estimated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_seqpar.distributed.autograd import (
    Watch,
    in_backward,
    is_higher_order,
    saved_tensor_hooks,
    selective_checkpoint_caches,
    storage_id,
)
from lightning_seqpar.releases import pl


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a ``DTensor`` or of a sequence in parts; otherwise ``tensor`` itself."""
    held: Tensor | None = getattr(tensor, "_local_tensor", None)
    local: Tensor = tensor.__dict__.get("_local", tensor) if held is None else held
    return local if local is tensor else _local(local)


class SavedBytes:
    """Counts the bytes that autograd keeps for the backward on this rank, but for the storages of ``exclude`` (parameters).

    Use it as a context manager around the forward and read :attr:`total`. A storage that several operations keep, or
    that several tensors share, counts once.
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        # Storages are told apart by an id, not by the address of their memory: on the meta device they have none.
        self._excluded = {storage_id(_local(tensor)) for tensor in exclude}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        """Count the storage of a tensor that autograd keeps; returns the tensor, as autograd's pack hook must."""
        storage = _local(tensor).untyped_storage()
        if storage_id(storage) not in self._excluded:
            # The storage is kept alive, so that no other one can get the same id.
            self._storages[storage_id(storage)] = storage
        return tensor

    counted = keep
    """What tells these hooks from others: whoever replaces what is saved may tell it what is kept in the end."""

    def keep_caches(self) -> None:
        """Count what torch's selective activation checkpoints cache, too. Call it behind the forward, before the backward."""
        for tensor in selective_checkpoint_caches():
            self.keep(tensor)

    @property
    def total(self) -> int:
        """Bytes of all storages that were kept so far."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


def saved_counter() -> Any:
    """What counts saved tensors (:attr:`SavedBytes.keep`), if its are the hooks on them that apply; else None."""
    hooks = saved_tensor_hooks()
    return None if hooks is None else getattr(getattr(hooks[0], "__self__", None), "counted", None)


class Traffic(Watch):
    """Counts this rank's collectives, and the bytes of the tensors that it gives to them, as the backend gets them.

    Where a collective is made of exchanges (:mod:`lightning_seqpar.distributed.async_ops`), ``calls`` and ``bytes`` have it
    under the collective's name, with the bytes that a backend's own collective would have been given (an attribute ``counts_as`` of
    what is sent tells both), so that a step counts alike over every backend. Any other exchange counts as ``alltoall``.

    Attributes:
        calls: number of collectives by name, such as ``{"all_gather": 4}``, and of tensors sent to one rank (``send``).
        bytes: bytes of the tensors given to them by name; those of a sum in two exchanges include its padding.
        backend_calls: number of operations that the process groups really got by torch's name of them, such as
            ``{"alltoall_base": 4}``.
        backend_bytes: bytes of the tensors that they were really given to send by the same names.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.backend_calls: Counter[str] = Counter()
        self.backend_bytes: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: torch.compile compiles under this mode, which sees the collectives of compiled code when they run."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_higher_order(func):
            return func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._count(func, args)
        elif func.namespace == "_c10d_functional" and "wait" not in func.name() and "wrap" not in func.name():
            # As torch's DTensor calls them.
            operation, given = func.name().split("::")[-1], _nbytes(args[0])
            name = operation.removesuffix("_into_tensor").removesuffix("_tensor")
            self._add(self.calls, self.bytes, name, given)
            self._add(self.backend_calls, self.backend_bytes, operation, given)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count an operation of a process group: what it is given as it stands, and the collective that it makes."""
        operation = func.name().split("::")[-1].strip("_")
        # (output, input, ...) where they differ, (tensors, ...) where they are one.
        given = _nbytes(args[func._schema.arguments[0].name.startswith("output")])
        self._add(self.backend_calls, self.backend_bytes, operation, 0 if operation in _GIVES_NOTHING else given)
        made: tuple[str, int] | None = getattr(args[1], "counts_as", None) if operation == "alltoall_base" else None
        if made is not None:
            if made[0]:
                self._add(self.calls, self.bytes, *made)
            return
        name = operation.replace("_base", "").replace("_coalesced", "").removesuffix("_")
        name = name.replace("allgather", "all_gather").replace("allreduce", "all_reduce")
        if name.startswith(("all_gather", "all_reduce", "reduce_scatter", "alltoall", "broadcast", "send")):
            self._add(self.calls, self.bytes, name, given)

    @staticmethod
    def _add(calls: Counter[str], sizes: Counter[str], name: str, given: int) -> None:
        """Count one call under a name, and the bytes that were given to it."""
        calls[name] += 1
        sizes[name] += given

    @property
    def total_calls(self) -> int:
        """Number of collectives of all names."""
        return sum(self.calls.values())

    @property
    def total_bytes(self) -> int:
        """Bytes given to collectives of all names."""
        return sum(self.bytes.values())


_GIVES_NOTHING = ("barrier", "monitored_barrier", "recv", "recv_any_source", "check_for_nan")
"""Operations of process groups whose tensors are not sent."""


class ModelFlops(Watch):
    """Counts the floating-point operations of products and attentions in forwards, by torch's formulas, on this rank.

    What runs again in a backward is not counted, nor what extensions and compiled kernels compute.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.counts = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code may run under this mode as it is."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if is_higher_order(func):
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None and self.counts and not in_backward():
            self.total += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


def _nbytes(value: Any) -> int:
    """Bytes of all tensors in a tensor, or in lists and tuples."""
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


class StepMeter(pl.callbacks.Callback):
    """Measures one training batch of an epoch on each rank: bytes kept for the backward, and collectives.

    The figures exist once that batch has ended; reading one earlier, or after epochs that were too short for it, raises
    ``RuntimeError``. With several epochs they are those of the last one that had the batch.

    Args:
        batch: index within an epoch of the batch to measure (0-based); the default is one at which no run-time check is due.
    """

    def __init__(self, batch: int = 16) -> None:
        self._batch = batch
        self._ended = 0  # training batches so far, over all epochs
        self._highest = -1  # the highest index of any of them
        self._saved_bytes = 0
        self._saved: SavedBytes | None = None
        self._traffic: Traffic | None = None
        self._figures: tuple[int, Traffic] | None = None  # what was measured: kept bytes, and collectives

    @property
    def measured(self) -> bool:
        """Whether the batch has ended, so that the figures can be read."""
        return self._figures is not None

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd kept for the backward on this rank, as :class:`SavedBytes` counts them."""
        return self._read()[0]

    @property
    def calls(self) -> dict[str, int]:
        """Number of collectives by name, as :class:`Traffic` counts them."""
        return dict(self._read()[1].calls)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of the tensors given to those collectives, by name."""
        return dict(self._read()[1].bytes)

    @property
    def backend_calls(self) -> dict[str, int]:
        """Number of operations that the process groups really got, by torch's name of them."""
        return dict(self._read()[1].backend_calls)

    @property
    def backend_bytes(self) -> dict[str, int]:
        """Bytes that the process groups were really given to send, by the same names."""
        return dict(self._read()[1].backend_bytes)

    def _read(self) -> tuple[int, Traffic]:
        """What was measured; raises RuntimeError, which says what to do, if there are none."""
        if self._figures is not None:
            return self._figures
        came = "no training batch has ended yet; give the meter to the Trainer's callbacks, and read it when fit is done"
        if self._ended:
            came = (
                f"{self._ended} ended, of which the highest index in an epoch was {self._highest}; use "
                f"StepMeter(batch={self._highest}) or less, or let an epoch have {self._batch + 1} batches or more"
            )
        raise RuntimeError(
            f"StepMeter(batch={self._batch}) has measured nothing: it waited for the training batch with index {self._batch} of an "
            f"epoch (0-based), and {came}"
        )

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Start to count, in front of the batch that is measured."""
        if batch_idx == self._batch:
            self._traffic = Traffic()
            self._traffic.__enter__()  # type: ignore[no-untyped-call]
            self._saved = SavedBytes(exclude=pl_module.parameters())
            self._saved.__enter__()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Stop counting kept bytes: the forward is over, and what is kept now is kept for the backward."""
        self._stop_saved()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take over the counts: the step is over."""
        self._ended += 1
        self._highest = max(self._highest, batch_idx)
        if (traffic := self._stop()) is not None:
            self._figures = self._saved_bytes, traffic

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop counting where the batch began but was skipped (a hook of the module may return -1 to end the epoch)."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop counting where the batch ended with an error: later work on this thread must not be counted."""
        self._stop()

    def _stop_saved(self) -> None:
        """Stop counting kept bytes, if they are being counted."""
        if self._saved is not None:
            self._saved.__exit__(None, None, None)
            self._saved.keep_caches()
            self._saved_bytes, self._saved = self._saved.total, None

    def _stop(self) -> Traffic | None:
        """Stop counting altogether; returns what was counted of collectives, None if nothing was being counted."""
        self._stop_saved()
        traffic, self._traffic = self._traffic, None
        if traffic is not None:
            traffic.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return traffic
