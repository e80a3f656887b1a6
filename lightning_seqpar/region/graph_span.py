"""Which nodes of an autograd graph were made inside a sequence region."""

from __future__ import annotations

from typing import Any

import torch

from lightning_seqpar.distributed.autograd import next_sequence_nr, sequence_nr

_MANY = 4096
"""Calls that are remembered outside any step, which would forget them."""
_OPEN = 2**62
"""The end of an interval that has none yet: a number that no node has."""


class GraphSpan:
    """For each call of the region's owner, the numbers of the first and the last node that it made inside the region."""

    def __init__(self) -> None:
        self._intervals: list[list[int]] = []

    def reset(self) -> None:
        """Forget the graph of the last step."""
        self._intervals = []

    def trim(self) -> None:
        """A call begins: of calls outside any step only the last ones are remembered."""
        if len(self._intervals) > _MANY:
            self._intervals = self._intervals[-_MANY:]

    def begin(self) -> None:
        """Nodes that are made from here on are inside."""
        if not torch.is_inference_mode_enabled():
            self._intervals.append([next_sequence_nr(), _OPEN])

    def end(self) -> None:
        """Nodes that are made from here on are outside."""
        if not torch.is_inference_mode_enabled() and self._intervals and self._intervals[-1][1] == _OPEN:
            self._intervals[-1][1] = next_sequence_nr()

    def holds(self, node: Any) -> bool:
        """Whether a node of this step's graph was made inside."""
        return any(begin <= sequence_nr(node) <= end for begin, end in self._intervals)
