"""Which micro-batch's backward runs when: one forward, one backward (arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple


class OneForwardOneBackward:
    """The order of backwards on one stage. Micro-batches are the batches of an accumulation window.

    Behind each forward one backward runs, that of the micro-batch which is as many behind as there are stages behind this one; the
    rest run at the window's end. So the last stage holds the activations of one micro-batch, and the one before it of two.
    """

    def __init__(self, stages_behind: int) -> None:
        self._behind = stages_behind
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, backward: Callable[[], None], *, is_last: bool) -> None:
        """A micro-batch's forward is done."""
        self._waiting.append(backward)
        while len(self._waiting) > self._behind:
            self._waiting.popleft()()
        if is_last:
            self.finish()

    def finish(self) -> None:
        """Run what is left, in the middle of a window too."""
        while self._waiting:
            self._waiting.popleft()()


class Part(NamedTuple):
    """A forward or a backward of one micro-batch of the window (from 0 on) through one chunk of a stage."""

    micro_batch: int
    chunk: int
    is_backward: bool


def warm_up(stage: int, stages: int, chunks: int, micro_batches: int) -> int:
    """How many forwards a stage runs before its first backward, where stages have several chunks (interleaving)."""
    longest = max(_rounds(stages, micro_batches))
    return min(chunks * micro_batches, 2 * (stages - 1 - stage) + (chunks - 1) * longest)


def interleave(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Part]:
    """The order of forwards and backwards on one stage of which each has several chunks (arXiv 2104.04473, section 2.2.2).

    A round of micro-batches, as many as there are stages or a few more, goes through the first chunks of all stages, then through
    the second ones, and so on. Behind the first forwards (:func:`warm_up`) forwards and backwards take turns. Rounds are as equal
    as they can be: with a short one at the end stages would wait for each other for ever.
    """
    forwards = list(_in_rounds(stages, chunks, micro_batches, is_backward=False))
    backwards = list(_in_rounds(stages, chunks, micro_batches, is_backward=True))
    first = warm_up(stage, stages, chunks, micro_batches)
    left = len(forwards) - first
    turns = [part for pair in zip(forwards[first:], backwards[:left], strict=True) for part in pair]
    return [*forwards[:first], *turns, *backwards[left:]]


def _rounds(stages: int, micro_batches: int) -> list[int]:
    """How many micro-batches each round has."""
    count = max(1, micro_batches // stages)
    size, more = divmod(micro_batches, count)
    return [size + (at < more) for at in range(count)]


def _in_rounds(stages: int, chunks: int, micro_batches: int, *, is_backward: bool) -> Iterator[Part]:
    for start, stop in pairwise(accumulate(_rounds(stages, micro_batches), initial=0)):
        for chunk in reversed(range(chunks)) if is_backward else range(chunks):
            for micro_batch in range(start, stop):
                yield Part(micro_batch, chunk, is_backward)
