"""When the watchers of a run look: the one place that says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from lightning_seqpar.distributed.rng import DEVICES
from lightning_seqpar.region.frames import FrameStack


class WatchSchedule:
    """Says when each watcher looks, over the steps of a run and within a forward.

    =========================================  =========================================================================
    watched                                    when
    =========================================  =========================================================================
    activations are shards where they must be  at each use by a block, a gather, a row or the exit
    modules that may see nothing but shards    at each call in a forward, not in a recompute
    inputs of columns: whole, and gathered     at each column in a forward, not where a backward repeats a part of one
                                               (:meth:`watches_columns`); most read what was gathered itself
    sums over ranks: made of rows alone        at each module that returns one where the step is due (:attr:`walks_graphs`)
    what else a loss reads of such a module    noted there
    tensors of which this rank has a part      noted in a forward, not in a recompute, and looked for in what each module
                                               around the blocks, and each step, returns
    batch, loss, buffers, gradients, outputs,  where the step is due
    who reads parameters
    =========================================  =========================================================================

    A step is due if it is one of the first 16, a power of two, or a multiple of ``every``.

    Args:
        every: number of steps from one due step to the next; 0 for none but the first 16 and powers of two.

    Attributes:
        walks_graphs: whether the current step is due, counted from the beginning of the run or of the loop, where graphs of losses
            and of whole modules are walked; also before any step.
    """

    def __init__(self, every: int = 0) -> None:
        self._every = every
        self._since_start: Counter[str] = Counter()
        self.begin_run()

    # ---- steps -----------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """A model was set up: its steps are counted from here, and nothing is known of what they draw."""
        self._due = dict.fromkeys(("training", "validation", "test", "predict"), True)
        self._steps: Counter[str] = Counter()
        self._drawn: frozenset[str] = frozenset()
        self.walks_graphs = True

    def begin_loop(self, loop: str) -> None:
        """An epoch, or an evaluation, begins: its loaders may be new ones."""
        self._since_start[loop] = 0

    def begin_step(self, loop: str) -> None:
        """Count a step of ``loop``: ``training``, ``validation``, ``test`` or ``predict``."""
        self._steps[loop] += 1
        self._since_start[loop] += 1
        self._due[loop] = self.is_due_at(self._steps[loop])
        self.walks_graphs = self._due[loop] or self.is_due_at(self._since_start[loop])

    @contextmanager
    def as_of(self, loop: str, step: int) -> Generator[None, None, None]:
        """A context in which an earlier step of ``loop`` is the current one: it was put off."""
        now, due, walks = self._steps[loop], self._due[loop], self.walks_graphs
        self._steps[loop] = step
        self._due[loop] = self.walks_graphs = self.is_due_at(step)
        try:
            yield
        finally:
            self._steps[loop], self._due[loop], self.walks_graphs = now, due, walks

    def number(self, loop: str) -> int:
        """The number of the current step of ``loop``, from 1 on."""
        return self._steps[loop]

    def is_first(self, loop: str) -> bool:
        """Whether the current step is the first of its loop in this run."""
        return self._steps[loop] == 1

    def is_due(self, loop: str) -> bool:
        """Whether the current step is due, counted from the beginning of the run."""
        return self._due[loop]

    def is_due_at(self, step: int) -> bool:
        """Whether step number ``step``, from 1 on, is due."""
        return step <= 16 or step & (step - 1) == 0 or (self._every > 0 and step % self._every == 0)

    # ---- random draws ----------------------------------------------------------------------------------------

    def expects_draws(self, loop: str) -> frozenset[str]:
        """Types of the devices on which the current step may draw: those on which a training step has, unless it is due."""
        return DEVICES if loop != "training" or self.is_due(loop) else self._drawn

    def note_draws(self, devices: frozenset[str]) -> None:
        """Notes types of the devices on which a training step drew random numbers."""
        self._drawn |= devices

    # ---- within a forward ------------------------------------------------------------------------------------

    def watches_columns(self, frames: FrameStack) -> bool:
        """Whether the inputs of columns are looked at: not where a backward repeats a part of a call of the forward."""
        return not frames.recomputes
