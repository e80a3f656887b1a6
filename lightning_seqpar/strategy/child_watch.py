"""A watch over the ranks: which one failed first, and how the run ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import ClassVar

from lightning_seqpar.strategy.refusals import PAUSE, is_lost_peer, say
from lightning_seqpar.user_input import name_error

LIFELINE = "SEQPAR_LIFELINE_FD"
"""Environment variable of a child: the descriptor of a pipe that closes when the main process is gone."""
REPORTS = "SEQPAR_REPORTS_FD"
"""Environment variable of a child: the descriptor of a pipe to which it writes what it raised."""
DONE = b"done"
"""What the main process writes into the lifeline, once for each child, when it ends well."""
PUT_OFF = 20.0
"""Seconds that a training gets to come to the end of a step after SIGTERM."""
GRACE = 10.0
"""Seconds that the other ranks get to end by themselves (and print their own message) once one has died."""
CALL_ON_ALL = "what speaks to all ranks (trainer.save_checkpoint, unshard, a forward after fit) must be called on all of them"


def describe_exit(code: int) -> str:
    """Describes how a process ended: ``was killed by SIGKILL``, ``exited with code 1``."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def flush_stdout() -> None:
    """Writes out what was printed, if somebody reads it still: standard output may be closed."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()


class ChildWatch:
    """Ends the whole run when one of its processes fails, and says which. It belongs to the main process, until that ends.

    ``first_rank`` is the rank of the main process; its children are the ranks behind it. They watch the pipe ``lifeline``, and
    write what they raised into ``reports``. ``expected`` is an error that every rank raises, most likely, and in any order.
    """

    of_this_process: ClassVar[ChildWatch | None] = None  # which may train several times; None if it started no children

    def __init__(self, first_rank: int, lifeline: int, reports: int) -> None:
        self._first_rank, self._lifeline, self._reports = first_rank, lifeline, reports
        self._procs: list[subprocess.Popen[bytes]] = []
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._reasons: list[tuple[bool, str]] = []  # why the run failed: whether it is only a symptom, and a sentence
        self._waits: list[str] = []  # what ranks said that waited for another one
        self._waited: set[int] = set()  # and which ones did
        self.expected: BaseException | None = None
        self._agreed = False  # whether all ranks end by a signal, between two steps
        self._is_leaving = threading.Event()  # set when the main thread acts on a signal, or ends
        self._finished = threading.Event()  # set when the main thread ends
        self._is_over = self._interrupted = False
        self._verdict, self._exit_code = "", 0
        self._taken: frozenset[int] = frozenset()  # the signals (SIGTERM, and SIGINT for Ctrl-C) that end the run now
        self._finishes_step: Callable[[], bool] = bool
        self._signals: int | None = None  # the pipe into which the interpreter writes them
        atexit.register(self._at_exit)
        ChildWatch.of_this_process = self

    def follow(self, proc: subprocess.Popen[bytes]) -> None:
        """Waits for the next child in a thread of its own."""
        self._procs.append(proc)
        rank = self._first_rank + len(self._procs)
        threading.Thread(target=self._wait, args=(rank, proc), name=f"watch-rank-{rank}", daemon=True).start()

    def fail(self, reason: str, *, symptom: bool = False) -> None:
        """Notes why the run fails; a ``symptom`` only follows from another rank's failure (a lost peer), and counts least."""
        self._reasons.append((symptom, reason))

    def fail_waiting(self, sentence: str, waited: Collection[int]) -> None:
        """Notes that the run fails since this rank waited, as those in ``waited`` did: one that is slow to end is no cause."""
        self._waits.append(sentence)
        self._waited.update(waited)
        self.fail(sentence, symptom=True)

    def expect_end(self) -> None:
        """Notes that all ranks have agreed to end by SIGTERM, which may have come to any of them."""
        self._agreed, self._exit_code = True, 128 + signal.SIGTERM
        self._is_leaving.set()

    def note_signal(self, signum: int) -> None:
        """Notes a signal as the reason why the run ends."""
        self._exit_code = 128 + signum
        self._interrupted |= signum == signal.SIGINT
        self.fail(f"rank {self._first_rank} got {signal.Signals(signum).name}")
        self._is_leaving.set()

    def take(self, signals: frozenset[int], finishes_step: Callable[[], bool] = bool) -> None:
        """Says which signals end the run now, after SIGTERM with the step that is under way if ``finishes_step()``.

        In a collective Python runs no handler. But the interpreter writes every signal into a pipe at once, which a thread reads.
        """
        self._taken, self._finishes_step = signals, finishes_step
        if not signals or threading.current_thread() is not threading.main_thread():
            return
        if self._signals is None:
            reading, self._signals = os.pipe()
            os.set_blocking(self._signals, False)
            # A forked process (a data worker, a pool) inherits the pipe, but a signal that it gets does not concern the run.
            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
            threading.Thread(target=self._hear, args=(reading,), name="watch-signals", daemon=True).start()
        # Every time: an event loop may have taken the interpreter's pipe since, and given it back. If it still has it, it keeps it.
        if (present := signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)) not in (-1, self._signals):
            signal.set_wakeup_fd(present)

    def _hear(self, reading: int) -> None:
        """Reads signals from the pipe, in a thread; on one that is taken ends the process, unless the main thread does soon."""
        while not (heard := self._taken.intersection(os.read(reading, 64))):
            pass
        signum = min(heard)
        if not self._is_leaving.wait(PUT_OFF if signum == signal.SIGTERM and self._finishes_step() else GRACE / 2):
            self.note_signal(signum)
            self._conclude()
            self._leave()

    def _wait(self, rank: int, proc: subprocess.Popen[bytes]) -> None:
        """Waits for a child, in a thread; ends the process if it fails before any other."""
        code = proc.wait()
        # It may have failed of the same error as the main process, which then says so.
        patience = GRACE if self.expected is not None or self._is_leaving.is_set() else PAUSE if code > 0 else 0.0
        if code == 0 or self._finished.wait(patience):
            return
        said = f"rank {rank} (pid {proc.pid}) {describe_exit(code)}; ending the other ranks"
        if self._conclude(said, code if 0 < code < 128 else 1):
            if not self._finished.wait(GRACE):
                say(f"rank {self._first_rank} did not end by itself within {GRACE:.0f} s; ending it")
            self._leave()

    def _leave(self) -> None:
        """Ends the process: a thread can't raise in the main thread, which may wait in a collective for a dead rank."""
        self._say_verdict()
        os._exit(self._exit_code)

    def _conclude(self, said: str = "", exit_code: int = 0) -> bool:
        """Waits for the children to end, kills those that do not, and decides what the run failed of: whether this call did."""
        with self._lock:
            if self._is_over:
                return False
            self._is_over = True
            self._exit_code = self._exit_code or exit_code
            if said:
                say(said)
            self._gather_reasons()
            causes = [reason for symptom, reason in self._reasons if not symptom]
            symptoms = [reason for symptom, reason in self._reasons if symptom]
            reason = (causes or symptoms or ["a rank ended early"])[0]
            if self._waits and self._waits[0] not in reason:
                reason += f" ({self._waits[0]})"
            self._verdict = "the run was interrupted" if self._interrupted else f"the run failed: {reason}"
            return True

    def _gather_reasons(self) -> None:
        """Adds to the known reasons what the children reported, and what follows from how they ended."""
        until = time.monotonic() + GRACE / 2
        ended: list[tuple[str, subprocess.Popen[bytes], bool]] = []
        for rank, proc in enumerate(self._procs, self._first_rank + 1):
            by_itself = True
            try:
                proc.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                by_itself = False
                proc.kill()
                proc.wait()
            ended.append((f"rank {rank} ", proc, by_itself or rank in self._waited))
            if by_itself and proc.returncode < 0:
                self._reasons.insert(0, (False, f"rank {rank} (pid {proc.pid}) {describe_exit(proc.returncode)}"))
        self._read_reports()
        for name, proc, is_known in ended:
            child = f"{name}(pid {proc.pid})"
            if not is_known:
                reason = f"{child} did not answer and did not end within {GRACE / 2:.0f} s; it was killed"
                self._reasons.insert(0, (True, reason))
            elif proc.returncode > 0 and not any(name in reason for _, reason in self._reasons):
                self._reasons.append((True, f"{child} {describe_exit(proc.returncode)}"))
        done = [name for name, proc, _ in ended if not proc.returncode]
        if done and self._reasons and all(symptom for symptom, _ in self._reasons):
            self._reasons.insert(0, (True, f"{done[0]}had ended while another rank still waited for it; {CALL_ON_ALL}"))

    def _read_reports(self) -> None:
        """Adds what the children wrote by :func:`report`."""
        os.set_blocking(self._reports, False)
        with contextlib.suppress(BlockingIOError):
            lines = os.read(self._reports, 65536).decode(errors="replace").splitlines()
            self._waits += [line[2:] for line in lines if line[0] == "w"]
            self._reasons += [(line[0] != "c", line[2:]) for line in lines]

    def _say_verdict(self) -> None:
        """Prints why the run ended, once; at the very end, below the tracebacks of ranks that only lost another one."""
        with self._lock:
            if self._verdict:
                say(self._verdict)
                flush_stdout()
            self._verdict = ""

    def _at_exit(self) -> None:
        """Waits for the children at the end of the main process, or ends them if the run failed."""
        if os.getpid() != self._pid:
            return  # this is a forked process of the user's
        self._finished.set()
        self._is_leaving.set()
        uncaught = getattr(sys, "last_value", None)
        is_shared = self.expected is not None and (self.expected is uncaught or isinstance(self.expected, SystemExit))
        error = self.expected if is_shared else uncaught
        said = "" if error is None else name_error(error)
        if error is not None and (is_shared or not self._reasons):
            self.fail(f"rank {self._first_rank} raised {said}", symptom=is_lost_peer(error))
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            self._exit_code = error.code
        if not (self._reasons or self._agreed or self._is_over):
            with contextlib.suppress(BrokenPipeError):  # all of them have ended before
                os.write(self._lifeline, DONE * len(self._procs))
            codes = {proc.wait() for proc in self._procs}
            if not any(codes):
                return
        self._conclude()
        if is_shared and all(reason.endswith(said) for _, reason in self._reasons):
            return
        if self._agreed and all(proc.returncode in (0, self._exit_code) for proc in self._procs):
            self._verdict = "the run ended by SIGTERM, between two steps"
        self._say_verdict()
        # A rank may have left with a status of its own, which shows here as a lost peer.
        status = self._exit_code or next((proc.returncode for proc in self._procs if 1 < proc.returncode < 128), 0)
        if uncaught is None or status:
            flush_stdout()
            os._exit(status or 1)


def report(letter: str, sentence: str) -> None:
    """Writes a line into the pipe of reports, in a child: ``s`` for a symptom, ``c`` for a cause or ``w`` for a wait."""
    descriptor = os.environ.get(REPORTS)
    if descriptor is not None:
        os.write(int(descriptor), f"{letter} {' '.join(sentence.split())}"[:2000].encode() + b"\n")


def follow_main_process(rank: int) -> None:
    """Ends this process, if it is a child, when the main process dies without saying that it is done."""
    descriptor = os.environ.pop(LIFELINE, None)
    if descriptor is None:
        return

    def wait() -> None:
        if os.read(int(descriptor), len(DONE)) != DONE:
            say(f"rank {rank} stops: the main process (local rank 0), which launched it, is gone")
            os._exit(1)

    threading.Thread(target=wait, name="follow-main-process", daemon=True).start()
