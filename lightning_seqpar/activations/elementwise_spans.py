"""When element-wise spans begin and end: at a region's column and row linears."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_seqpar.activations.elementwise_recompute import ElementwiseRecompute


class ElementwiseSpans:
    """Opens and closes the spans of one region, one at a time.

    Args:
        worth: whether an activation of so many bytes on a rank is worth recomputing.
    """

    def __init__(self, worth: Callable[[int], bool]) -> None:
        self._worth = worth
        self._span: ElementwiseRecompute | None = None
        self._columns: list[Any] = []
        self._left_open: list[ElementwiseRecompute] = []

    def after_column(self, out: Tensor, column: Any) -> None:
        """Note the output of a column linear, and open a span at the first one.

        Args:
            out: the output, ``[b, s, f/tp]``.
            column: the layer, whose ``recomputes_elementwise`` says whether a span was worthwhile last time.
        """
        if not column.recomputes_elementwise or not out.requires_grad or not torch.is_grad_enabled():
            return
        if self._span is None:
            if not self._worth(out.nbytes):
                return
            self._span, self._columns = ElementwiseRecompute.open(), []
        if self._span is not None:
            self._span.add(out)
            self._columns.append(column)

    @contextmanager
    def row(self) -> Iterator[None]:
        """Wraps the product of a row linear, which saves its input, and ends the span."""
        if self._span is None:
            yield
            return
        self._span.pause()
        done = False
        try:
            yield
            done = True
        finally:
            self._end(done=done)

    def drop(self) -> None:
        """End a span that no row ended, where the block ends; and remove what earlier ones could not remove then."""
        if self._span is not None:
            self._span.pause()
            self._end(done=False)
        self._left_open = [one for one in reversed(self._left_open) if not one.release()][::-1]

    def _end(self, *, done: bool) -> None:
        """Close the span, and remember with its columns whether it was worthwhile."""
        span, self._span = self._span, None
        assert span is not None
        gained = span.close(done=done)
        for column in self._columns if not span.was_disturbed else ():
            # A column whose span saved no memory once is not recorded again; somebody who looked on may be gone next time.
            column.recomputes_elementwise = column.recomputes_elementwise and gained
        self._columns = []
        if not span.release():
            self._left_open.append(span)
