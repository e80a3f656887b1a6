"""Where a model is cut into the stages of a pipeline, and which micro-batch runs on one when (arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_seqpar.layout.module_names import Argument
from lightning_seqpar.region.hooks import find_argument


class CutStack(NamedTuple):
    """One stack of blocks, as stages see it."""

    blocks: tuple[str, ...]
    arg: Argument  # of a block, that carries the activation
    returned: int = 0  # length of the tuple that a block returns, the activation first; 0 where it returns that itself
    # What a block hands to the next one too, such as a bias: its place in the tuple, and the argument that carries it.
    beside: tuple[tuple[int, Argument], ...] = ()
    readers: tuple[int, ...] = ()  # chunks that read what the last block returns, other than its own

    @property
    def carries(self) -> tuple[Argument, ...]:
        """The arguments of a block that come from the one before: the activation, and what is handed on beside it."""
        return (self.arg, *(arg for _, arg in self.beside))

    @property
    def places(self) -> tuple[int, ...]:
        """Where what is handed on beside the activation stands in the tuple that a block returns."""
        return tuple(at for at, _ in self.beside)

    def as_returned(self, x: Tensor, beside: dict[int, Any] | None = None) -> Any:
        """An activation as a block returns it."""
        if not self.returned:
            return x
        if beside is None:
            beside = {at: torch.full((), float("nan"), dtype=x.dtype, device=x.device) for at in self.places}
        return (x, *[beside.get(at) for at in range(1, self.returned)])

    def passing_by(self, name: str) -> Callable[..., Any]:
        """A forward for a block that hands on what it is given, as the block would return it. Not for the first."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            beside = {at: find_argument(name, arg, args, kwargs)[1] for at, arg in self.beside}
            return self.as_returned(find_argument(name, self.arg, args, kwargs)[1], beside)

        return forward


class Cut(NamedTuple):
    """Where a model is cut. Chunks of blocks go round the stages: of three stages the first has chunks 0, 3, 6, ..."""

    blocks: tuple[tuple[str, ...], ...]  # of each chunk
    held: tuple[frozenset[str], ...]  # of each stage the names of the parameters that it reads
    stacks: tuple[CutStack, ...]  # in the order in which they run
    draws: bool = False  # the step draws random numbers while it trains
    host_draws: bool = False  # it draws from Python's or numpy's generators in the blocks or behind them

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.held)

    def chunks(self, stage: int) -> range:
        """The numbers of the chunks that a stage has."""
        return range(stage, len(self.blocks), self.stages)

    def stack_of(self, name: str) -> CutStack:
        """The stack that a block is in."""
        return next(stack for stack in self.stacks if name in stack.blocks)

    def goes_on(self, chunk: int) -> bool:
        """Whether a chunk goes on with a stack that the one before it began: it takes its activation from there."""
        first = self.blocks[chunk][0]
        return first != self.stack_of(first).blocks[0]

    def shared(self, name: str) -> tuple[int, ...]:
        """The stages that read a parameter."""
        return tuple(stage for stage, names in enumerate(self.held) if name in names)


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
    count = max(1, micro_batches // stages)
    size, more = divmod(micro_batches, count)
    return [size + (at < more) for at in range(count)]


def _in_rounds(stages: int, chunks: int, micro_batches: int, *, is_backward: bool) -> Iterator[Part]:
    for start, stop in pairwise(accumulate(_rounds(stages, micro_batches), initial=0)):
        for chunk in reversed(range(chunks)) if is_backward else range(chunks):
            for micro_batch in range(start, stop):
                yield Part(micro_batch, chunk, is_backward)
