"""A watch over the ranks: which one failed first, and how the run ends when one does."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_seqpar.user_input import name_error

LIFELINE = "SEQPAR_LIFELINE_FD"
"""Environment variable of a child: the descriptor of a pipe that closes when the main process is gone."""
REPORTS = "SEQPAR_REPORTS_FD"
"""Environment variable of a child: the descriptor of a pipe to which it writes what it raised."""
DONE = b"done"
"""What the main process writes into the lifeline, once for each child, when it ends well."""
PUT_OFF = 20.0
"""Seconds that a training gets to come to the end of a step, and save, after SIGTERM."""
GRACE = 10.0
"""Seconds that the other ranks get to end by themselves (and print their own message) once one has died."""
PAUSE = 2.0
"""Seconds that rank 0 gets to come to an error that all ranks raise and, under torchrun, to print it before another rank leaves."""
CALL_ON_ALL = (
    "what speaks to all ranks (trainer.save_checkpoint, unshard, a forward after fit) must be called on all of them"
)
_RANKS_CODE = (str(Path(dist.__file__).parent), str(Path(__file__).parent.parent))


def describe_exit(code: int) -> str:
    """How a process ended, in words: ``was killed by SIGKILL``, ``exited with code 1``."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def say(message: str) -> None:
    """Print to standard error at once.

    It is written to the descriptor, not to ``sys.stderr``. While torch formats an exception of the main thread, it replaces
    that by a buffer, and a message of a watching thread that then ends the process would be lost in the buffer.
    """
    os.write(2, f"lightning_seqpar: {message}\n".encode())


def await_the_end() -> None:
    """Wait until torchrun ends this rank, which it does once the rank that prints the error has left; for :data:`PAUSE` at most.

    torchrun ends all ranks with the first one that leaves, and what that rank has to say may be said by another one.
    """
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait(PAUSE)
    signal.signal(signal.SIGTERM, before)


OTHER_COLLECTIVE = "op.preamble.length <= op.nbytes"
"""Text in gloo's error where two ranks met in different collectives, or with tensors of different sizes."""
_SIGNS_OF_A_LOST_PEER = (
    OTHER_COLLECTIVE,
    "closed by peer",
    "pair closure",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out",
    "timed out",
    "Read error",
)
"""Texts in errors of gloo and nccl that say that another rank is gone, or in another collective."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception says that another rank is gone, rather than what went wrong.

    Others' errors may have the same words (a loader's own timeout, a data base's): those that a ``raise`` statement makes are
    taken by them only if it is torch.distributed's or this package's. Collectives raise from C++.
    """
    if not isinstance(error, RuntimeError) or not any(sign in str(error) for sign in _SIGNS_OF_A_LOST_PEER):
        return False
    stack = traceback.extract_tb(error.__traceback__)
    if not is_at_raise(stack):
        return True
    cause = error.__cause__
    return stack[-1].filename.startswith(_RANKS_CODE) or (cause is not None and is_lost_peer(cause))


def is_at_raise(stack: traceback.StackSummary) -> bool:
    """Whether a ``raise`` statement raised an error: if not, the interpreter did, or what is called from C++."""
    return bool(stack) and "raise" in (stack[-1].line or "").split()


def flush_stdout() -> None:
    """Write out what was printed, if somebody reads it still: standard output may be closed."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()


class ChildWatch:
    """Ends the whole run when one of its processes fails, and says which. It belongs to the main process.

    Args:
        first_rank: the rank of the main process; its children are the ranks behind it.
        lifeline: descriptor of the pipe that the children watch.
        reports: descriptor of the pipe to which the children write what they raised.

    Attributes:
        of_this_process: the watch over the children of this process, which may train several times; None if it started none.
    """

    of_this_process: ClassVar[ChildWatch | None] = None

    def __init__(self, first_rank: int, lifeline: int, reports: int) -> None:
        self._first_rank, self._lifeline, self._reports = first_rank, lifeline, reports
        self._procs: list[subprocess.Popen[bytes]] = []
        self._ending = threading.Event()
        self._finished = threading.Event()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._reasons: list[tuple[bool, str]] = []  # why the run failed: whether it is only a symptom, and a sentence
        self._waits: list[str] = []  # what ranks said that waited for another one
        self._waited: set[int] = set()  # and which ones did
        self._concluded = False
        self._verdict = ""
        self._interrupted = False
        self._exit_code = 0
        self._left_with: int | None = None  # the status with which every rank has left, by sys.exit
        self._expected: BaseException | None = None  # an error of this process that every rank raises, most likely
        self._signals: int | None = None  # descriptor of the pipe in which the interpreter notes signals
        self._taken: set[int] = set()  # the signals that end the run
        self._handled = threading.Event()  # set when the main thread runs its handler of a signal
        self._agreed = False  # whether all ranks end by a signal, between two steps
        self._put_off = threading.Event()  # set if that handler leaves the end to the step that is under way

    def start(self) -> None:
        """Be called at the end of this process, and found by later trainings in it."""
        atexit.register(self._at_exit)
        ChildWatch.of_this_process = self

    def follow(self, proc: subprocess.Popen[bytes]) -> None:
        """Wait for the next child in a thread of its own."""
        self._procs.append(proc)
        rank = self._first_rank + len(self._procs)
        threading.Thread(target=self._wait, args=(rank, proc), name=f"watch-rank-{rank}", daemon=True).start()

    def fail(self, reason: str, *, symptom: bool = False) -> None:
        """Note that the run fails.

        Args:
            reason: a sentence that says why.
            symptom: whether it only follows from another rank's failure (a lost peer); any other reason is then preferred.
        """
        self._reasons.append((symptom, reason))

    def fail_waiting(self, sentence: str, waited: Collection[int]) -> None:
        """Note that the run fails since this rank waited for another one.

        Args:
            sentence: which rank is missing, and in which collective this one waited.
            waited: the ranks that said that they waited: one of them that is slow to end is no cause.
        """
        self._waits.append(sentence)
        self._waited.update(waited)
        self.fail(sentence, symptom=True)

    def expect(self, error: BaseException) -> None:
        """Note an error of this process that every rank raises, most likely: they may end of it in any order."""
        self._expected = error
        if isinstance(error, SystemExit):
            self._left_with = exit_status(error)

    def hear_signals(self, taken: set[int]) -> None:
        """End the run on signals even while the main thread waits in a collective.

        Python runs no handler there. But the interpreter writes every signal into a pipe at once, which a thread reads.

        Args:
            taken: the signals, of SIGTERM and SIGINT (Ctrl-C), in place of those of an earlier call.
        """
        self._taken = taken
        if self._signals is not None:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        if (present := signal.set_wakeup_fd(writing, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(present)  # an event loop uses the pipe of the interpreter already
            return
        self._signals = writing
        os.register_at_fork(after_in_child=self._forget_signals)
        threading.Thread(target=self._hear, args=(reading,), name="watch-signals", daemon=True).start()

    def _forget_signals(self) -> None:
        """Stop listening in a forked process (a data worker, a pool).

        It inherits the pipe, but a signal that it gets does not concern the run.
        """
        if self._signals is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._signals = None

    def hear_no_signals(self) -> None:
        """Stop listening to signals: the run is over."""
        if self._signals is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._signals)
            self._signals = None

    def expect_end(self, signum: int) -> None:
        """Note that all ranks have agreed to end by a signal, which may have come to any of them."""
        self._agreed = True
        self.put_off(signum)

    def put_off(self, signum: int) -> None:
        """Note that the main thread has heard a signal, and ends the run when its step is done."""
        self._exit_code = 128 + signum
        self._put_off.set()
        self._handled.set()

    def handled(self, signum: int) -> None:
        """Note that the main thread runs its handler of a signal, so that the run ends without this watch."""
        self._handled.set()
        self._note(signum)

    def _note(self, signum: int) -> None:
        """Note a signal as the reason why the run ends."""
        self._exit_code = 128 + signum
        if signum == signal.SIGINT:
            self.interrupt()
        else:
            self.fail(f"rank {self._first_rank} got {signal.Signals(signum).name}")

    def _hear(self, reading: int) -> None:
        """Read signals from the pipe, in a thread; on one that is taken end the process, unless the main thread does soon."""
        while not (heard := self._taken & set(signals := os.read(reading, 64))):
            if not signals:  # the other end was closed
                os.close(reading)
                return
        heard_of = self._handled.wait(GRACE / 2)
        if not heard_of or (self._put_off.is_set() and not self._finished.wait(PUT_OFF)):
            self._note(min(heard))
            self._conclude()
            self._say_verdict()
            os._exit(self._exit_code)

    def _wait(self, rank: int, proc: subprocess.Popen[bytes]) -> None:
        """Wait for a child, in a thread; end the process if it fails before any other."""
        code = proc.wait()
        if code > 0 and self._finished.wait(PAUSE):
            return  # of the same error, most likely, and the main process says so
        if (self._expected is not None or self._agreed) and self._finished.wait(GRACE):
            return
        with self._lock:
            if code == 0 or self._ending.is_set():
                return
            self._ending.set()
            self._exit_code = code if 0 < code < 128 else 1
        say(f"rank {rank} (pid {proc.pid}) {describe_exit(code)}; ending the other ranks")
        self._conclude()
        if not self._finished.wait(GRACE):
            say(f"rank {self._first_rank} did not end by itself within {GRACE:.0f} s; ending it")
        self._say_verdict()
        # A thread can't raise in the main thread, which may wait in a collective for the dead rank.
        os._exit(self._exit_code)

    def _conclude(self) -> None:
        """Wait for the children to end, kill those that do not, and decide what the run failed of. Only the first call does."""
        with self._lock:
            self._ending.set()
            if self._concluded:
                return
            self._concluded = True
            ended = [self._let_end(proc) for proc in self._procs]
            self._gather_reasons(ended)
            causes = [reason for symptom, reason in self._reasons if not symptom]
            symptoms = [reason for symptom, reason in self._reasons if symptom]
            reason = (causes or symptoms or ["a rank ended early"])[0]
            if self._waits and self._waits[0] not in reason:
                reason += f" ({self._waits[0]})"
            self._verdict = "the run was interrupted" if self._interrupted else f"the run failed: {reason}"

    def _gather_reasons(self, ended: list[bool]) -> None:
        """Add to the known reasons what the children reported, and what follows from how they ended."""
        children = [
            (self._first_rank + local_rank, proc, by_itself)
            for local_rank, (proc, by_itself) in enumerate(zip(self._procs, ended, strict=True), start=1)
        ]
        for rank, proc, by_itself in children:
            if by_itself and proc.returncode < 0:
                self._reasons.insert(0, (False, f"rank {rank} (pid {proc.pid}) {describe_exit(proc.returncode)}"))
        self._reasons += self._read_reports()
        for rank, proc, by_itself in children:
            if by_itself and proc.returncode > 0 and not any(f"rank {rank} " in reason for _, reason in self._reasons):
                self._reasons.append((True, f"rank {rank} (pid {proc.pid}) {describe_exit(proc.returncode)}"))
        for rank, proc, by_itself in children:
            if not by_itself and rank not in self._waited:
                reason = f"rank {rank} (pid {proc.pid}) did not answer and did not end within {GRACE / 2:.0f} s; it was killed"
                self._reasons.insert(0, (True, reason))
        done = [rank for rank, proc, by_itself in children if by_itself and not proc.returncode]
        if done and self._reasons and all(symptom for symptom, _ in self._reasons):
            reason = f"rank {done[0]} had ended while another rank still waited for it; {CALL_ON_ALL}"
            self._reasons.insert(0, (True, reason))

    def _read_reports(self) -> list[tuple[bool, str]]:
        """What the children reported by :func:`report_exception`, as reasons."""
        os.set_blocking(self._reports, False)
        try:
            lines = os.read(self._reports, 65536).decode(errors="replace").splitlines()
        except BlockingIOError:
            lines = []
        self._waits += [line[2:] for line in lines if line[0] == "w"]
        return [(line[0] != "c", line[2:]) for line in lines]

    def _say_verdict(self) -> None:
        """Print why the run ended, once; at the very end, below the tracebacks of ranks that only lost another one."""
        with self._lock:
            if self._verdict:
                say(self._verdict)
                flush_stdout()
            self._verdict = ""

    def interrupt(self) -> None:
        """Note that the user pressed Ctrl-C."""
        self._interrupted = True
        self._reasons.append((False, "interrupted"))

    @staticmethod
    def _let_end(proc: subprocess.Popen[bytes]) -> bool:
        """Wait for a child for half of :data:`GRACE`, then kill it; returns whether it ended by itself."""
        try:
            proc.wait(timeout=GRACE / 2)
        except subprocess.TimeoutExpired:
            proc.kill()
            proc.wait()
            return False
        return True

    def _at_exit(self) -> None:
        """At the end of the main process, wait for the children, or end them if the run failed."""
        if os.getpid() != self._pid:
            return  # this is a forked process of the user's
        self._finished.set()
        uncaught = getattr(sys, "last_value", None)
        if uncaught is not None and uncaught is self._expected:
            said = name_error(self._expected)
            self.fail(f"rank {self._first_rank} raised {said}")
            self._conclude()
            if all(reason.endswith(said) for _, reason in self._reasons):
                return
        if self._left_with is not None:
            self.fail(f"rank {self._first_rank} raised SystemExit: {self._left_with}")
            self._exit_code = self._left_with
            self._conclude()
            if {proc.returncode for proc in self._procs} == {self._left_with}:
                return
        if uncaught is not None and not self._reasons:
            reason = f"rank {self._first_rank} raised {name_error(uncaught)}"
            self.fail(reason, symptom=is_lost_peer(uncaught))
        if not (self._reasons or self._agreed or self._ending.is_set()):
            with contextlib.suppress(BrokenPipeError):  # all of them have ended before
                os.write(self._lifeline, DONE * len(self._procs))
            codes = {proc.wait() for proc in self._procs}
            if not any(codes):
                return
        self._conclude()
        if self._agreed and all(proc.returncode in (0, self._exit_code) for proc in self._procs):
            self._verdict = f"the run ended by {signal.Signals(self._exit_code - 128).name}, between two steps"
        self._say_verdict()
        # A rank may have left with a status of its own, which shows here as a lost peer.
        status = self._exit_code or next((proc.returncode for proc in self._procs if 1 < proc.returncode < 128), 0)
        if uncaught is None or status:
            flush_stdout()
            os._exit(status or 1)


def exit_status(error: SystemExit) -> int:
    """The status with which a process ends that nothing keeps from it."""
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def report_exception(rank: int, error: BaseException) -> None:
    """Write an exception of this rank into the pipe of reports, in a child.

    A report is a line: ``s`` for a symptom, ``c`` for a cause or ``w`` for a wait, a blank, and a sentence.
    """
    descriptor = os.environ.get(REPORTS)
    if descriptor is not None:
        letter = "s" if is_lost_peer(error) else "c"
        os.write(int(descriptor), f"{letter} rank {rank} raised {name_error(error)}\n".encode())


def report_waiting(sentence: str) -> None:
    """Write into the pipe of reports, in a child, that it waited for another rank."""
    descriptor = os.environ.get(REPORTS)
    if descriptor is not None:
        os.write(int(descriptor), f"w {' '.join(sentence.split())}"[:2000].encode() + b"\n")


def record_for_torchrun(error: BaseException) -> None:
    """Write the error file that torchrun reads for its summary."""
    if isinstance(error, Exception):
        get_error_handler().record_exception(error)


def follow_main_process(rank: int) -> bool:
    """End this process, if it is a child, when the main process dies without saying that it is done.

    Args:
        rank: the rank of this process.

    Returns:
        Whether it is a child.
    """
    descriptor = os.environ.pop(LIFELINE, None)
    if descriptor is None:
        return False

    def wait() -> None:
        if os.read(int(descriptor), len(DONE)) != DONE:
            say(f"rank {rank} stops: the main process (local rank 0), which launched it, is gone")
            os._exit(1)

    threading.Thread(target=wait, name="follow-main-process", daemon=True).start()
    return True
