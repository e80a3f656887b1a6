"""The activations that column linears read, from where they are gathered to where the module around the columns ends."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lightning_seqpar.activations.policy import SavePolicy, keeper
from lightning_seqpar.activations.regather import RegatheredInput
from lightning_seqpar.activations.wgrad_overlap import BackwardExchange, DeferredWgrad, defer_wgrad
from lightning_seqpar.distributed.autograd import input_node, node_classes
from lightning_seqpar.region.frames import FrameStack, GatheredActivation

_PASSING = node_classes("ToCopy", "View", "UnsafeView", "Alias")
"""Nodes whose result is all of their input: casts and views."""


class ColumnInputs:
    """What was gathered or copied for the modules that are running, found again by the tensor that a column reads."""

    def __init__(self, frames: FrameStack) -> None:
        self._frames = frames

    def open(self) -> None:
        """A module with gathered inputs begins."""
        self._frames.current.gather_scopes.append([])

    def close(self) -> None:
        """It ended, or raised."""
        frame = self._frames.current
        del frame.gather_scopes[-1:]
        if not frame.gather_scopes:
            for read in frame.gathered:
                if read.handle is not None:
                    read.handle.kept = None  # now the graph alone holds it
            frame.gathered, frame.wholes = [], []

    def add(self, whole: Tensor, handle: RegatheredInput | None, exchange: BackwardExchange) -> None:
        """An activation was gathered (or copied) for columns.

        Args:
            whole: the activation, ``[b, s, h]``.
            handle: what columns may keep in its place for the backward; None for the activation itself.
        """
        if torch.is_grad_enabled():
            handle = handle if handle is not None and handle.keeps_less else None
            self._frames.current.gathered.append(
                GatheredActivation(weakref.ref(whole), whole._version, handle, exchange)
            )
        self.add_whole(whole)

    def add_whole(self, whole: Tensor) -> None:
        """An activation that is the same on all ranks, for the innermost module that is running."""
        self.note_whole(whole)
        scopes = self._frames.current.gather_scopes
        if scopes and whole.grad_fn is not None:
            scopes[-1].append(whole.grad_fn)

    # ---- tensors that are whole ------------------------------------------------------------------------------

    def note_whole(self, x: Tensor) -> None:
        """``x`` was made of what is the same on all ranks alone, and so it is the same too."""
        self._frames.current.wholes.append(weakref.ref(x))

    def is_whole(self, x: Tensor) -> bool:
        """Whether ``x`` is known to be the same on all ranks, or a view or cast of such a tensor."""
        wholes = [whole() for whole in self._frames.current.wholes]
        if any(whole is x for whole in wholes):
            return True
        node, nodes = x.grad_fn, [whole.grad_fn for whole in wholes if whole is not None and whole.grad_fn is not None]
        while node is not None and type(node) in _PASSING:
            node = input_node(node, 0)
        return node is not x.grad_fn and node in nodes

    # ---- for the backward of a column ------------------------------------------------------------------------

    def find_regathered(self, x: Tensor) -> RegatheredInput | None:
        """What a column keeps in place of ``x`` for its backward.

        Returns:
            None where it keeps ``x`` itself: nothing less is kept, ``x`` was changed since it was gathered, or an activation
            checkpoint began in between, which would have gathered it inside.
        """
        read = self._find(x)
        if read is None or read.handle is None or x._version != read.version:
            return None
        return read.handle if keeper() == read.handle.keeper else None

    def defer_wgrad(
        self, x: Tensor, weight: Tensor, policy: SavePolicy
    ) -> tuple[Tensor, DeferredWgrad | None, BackwardExchange | None]:
        """Let the products of a column's backward run where they cost least.

        Returns:
            The weight to multiply with; where the weight-gradient product is left, to run under the reduction of the input's
            gradient (None if it does not wait); and where the input-gradient product joins those of other columns (None if
            ``x`` was not gathered, or was changed since).
        """
        read = self._find(x)
        if read is None:
            return weight, None, None
        number = read.exchange.overlap_seq_nr if policy.overlaps(x.nbytes) else None
        return *defer_wgrad(weight, number), read.exchange if x._version == read.version else None

    def _find(self, x: Tensor) -> GatheredActivation | None:
        return next((read for read in self._frames.current.gathered if read.whole() is x), None)
