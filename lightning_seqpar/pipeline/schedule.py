"""Which micro-batch's backward runs when: one forward, one backward (arXiv 2104.04473, section 2.2.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class OneForwardOneBackward:
    """The order of backwards on one stage. Micro-batches are the batches of an accumulation window.

    Behind each forward one backward runs, that of the micro-batch which is as many behind as there are stages behind this one; the
    rest run at the window's end. So the last stage holds the activations of one micro-batch, and the one before it of two.

    Args:
        stages_behind: how many stages come behind this one.
    """

    def __init__(self, stages_behind: int) -> None:
        self._behind = stages_behind
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, backward: Callable[[], None], *, is_last: bool) -> None:
        """A micro-batch's forward is done.

        Args:
            backward: runs its backward.
            is_last: whether it is the window's last one.
        """
        self._waiting.append(backward)
        while len(self._waiting) > self._behind:
            self._waiting.popleft()()
        if is_last:
            self.finish()

    def finish(self) -> None:
        """Run what is left, in the middle of a window too."""
        while self._waiting:
            self._waiting.popleft()()
