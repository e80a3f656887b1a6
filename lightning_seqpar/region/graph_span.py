"""Which nodes of an autograd graph were made inside a sequence region."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from lightning_seqpar.distributed.autograd import next_sequence_nr, sequence_nr

_MANY = 4096
"""Calls that are remembered outside any step, which would forget them."""
_OPEN = 2**62
"""The end of an interval that has none yet: a number that no node has."""


class GraphSpan:
    """For each call in the region, the numbers of the first node that it made and of the first one behind it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the graph of the last step."""
        self._begins: list[int] = []
        self._ends: list[int] = []

    def begin(self) -> None:
        """Nodes that are made from here on are inside; of calls outside any step only the last ones are remembered."""
        if len(self._begins) >= 2 * _MANY:
            self._begins, self._ends = self._begins[-_MANY:], self._ends[-_MANY:]
        self._begins.append(next_sequence_nr())
        self._ends.append(_OPEN)

    def end(self) -> None:
        """Nodes that are made from here on are outside."""
        if self._ends and self._ends[-1] == _OPEN:
            self._ends[-1] = next_sequence_nr()

    def holds(self, node: Any) -> bool:
        """Whether a node of this step's graph was made inside."""
        number = sequence_nr(node)
        at = bisect_right(self._begins, number) - 1
        return at >= 0 and number < self._ends[at]
