"""A watch over the ranks: which one failed first, and how the run ends when one does."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

LIFELINE = "SEQPAR_LIFELINE_FD"


REPORTS = "SEQPAR_REPORTS_FD"


DONE = b"done"


GRACE = 10.0
"""Seconds that the other ranks get to end by themselves (and print their own message) once one has died."""


def describe_exit(code: int) -> str:
    """How a process ended, in words: ``was killed by SIGKILL``, ``exited with code 1``."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def say(message: str) -> None:
    """Print to standard error, at once.

    Past ``sys.stderr``: while torch formats an exception of the main thread it puts a buffer in its place, and what a
    watching thread said just before it ends the process was lost with the buffer.
    """
    os.write(2, f"lightning_seqpar: {message}\n".encode())


_LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out",
    "timed out",
    "Read error",
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception says that another rank is gone, rather than what went wrong."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_PEER)


class ChildWatch:
    """Ends the whole run when one of its processes ends badly, and tells which. Lives in the main process."""

    def __init__(self, procs: list[subprocess.Popen[bytes]], first_rank: int, lifeline: int, reports: int) -> None:
        self._procs, self._first_rank, self._lifeline, self._reports = procs, first_rank, lifeline, reports
        self._ending = threading.Event()
        self._finished = threading.Event()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._told: list[tuple[bool, str]] = []
        self._concluded = False
        self._verdict = ""
        self._interrupted = False
        self._exit_code = 0
        self._signals: int | None = None
        self._handled = threading.Event()

    def start(self) -> None:
        """Wait on every child in a thread of its own, and for the end of this process."""
        for local_rank, proc in enumerate(self._procs, start=1):
            name = f"watch-rank-{self._first_rank + local_rank}"
            threading.Thread(target=self._wait, args=(local_rank, proc), name=name, daemon=True).start()
        atexit.register(self._at_exit)

    def fail(self, reason: str, *, symptom: bool = False) -> None:
        """The main process ends badly; a ``symptom`` (a lost peer) yields to any other rank's reason."""
        self._told.append((symptom, reason))

    def hear_signals(self, taken: set[int], rank: int) -> None:
        """End the run on the signals ``taken`` (SIGTERM, Ctrl-C) even while the main thread waits in a collective.

        No Python handler runs there, but the interpreter notes every signal in a pipe at once, and a thread reads it.
        """
        if self._signals is not None:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        if (theirs := signal.set_wakeup_fd(writing, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(theirs)  # an event loop's
            return
        self._signals = writing
        os.register_at_fork(after_in_child=self._forget_signals)
        threading.Thread(target=self._hear, args=(reading, taken, rank), name="watch-signals", daemon=True).start()

    def _forget_signals(self) -> None:
        """In a forked process (a data worker, a pool): its signals are not the run's, but it has inherited the pipe."""
        if self._signals is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._signals = None

    def hear_no_signals(self) -> None:
        """The run is over: signals mean again what they mean in any process."""
        if self._signals is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._signals)
            self._signals = None

    def handled(self, signum: int, rank: int) -> None:
        """The main thread runs its handler for a signal: the run ends by itself."""
        self._handled.set()
        self._note(signum, rank)

    def _note(self, signum: int, rank: int) -> None:
        self._exit_code = 128 + signum
        if signum == signal.SIGINT:
            self.interrupt()
        else:
            self.fail(f"rank {rank} got {signal.Signals(signum).name}")

    def _hear(self, reading: int, taken: set[int], rank: int) -> None:
        while not (heard := taken & set(told := os.read(reading, 64))):
            if not told:  # the other end was closed
                os.close(reading)
                return
        if not self._handled.wait(GRACE / 2):
            self._note(min(heard), rank)
            self._conclude()
            self._say_verdict()
            os._exit(self._exit_code)

    def _wait(self, local_rank: int, proc: subprocess.Popen[bytes]) -> None:
        code = proc.wait()
        with self._lock:
            if code == 0 or self._ending.is_set():
                return
            self._ending.set()
            self._exit_code = code if 0 < code < 128 else 1
        say(f"rank {self._first_rank + local_rank} (pid {proc.pid}) {describe_exit(code)}; ending the other ranks")
        self._conclude()
        if not self._finished.wait(GRACE):
            say(f"rank {self._first_rank} did not end by itself within {GRACE:.0f} s; ending it")
        self._say_verdict()
        # A thread can't raise in the main thread, which may wait in a collective for the dead rank.
        os._exit(self._exit_code)

    def _conclude(self) -> None:
        """Let the children end, end those that do not, and learn what happened."""
        with self._lock:
            self._ending.set()
            if self._concluded:
                return
            self._concluded = True
            ended = [self._let_end(proc) for proc in self._procs]
            for local_rank, (proc, by_itself) in enumerate(zip(self._procs, ended, strict=True), start=1):
                if by_itself and proc.returncode < 0:
                    rank = self._first_rank + local_rank
                    self._told.insert(0, (False, f"rank {rank} (pid {proc.pid}) {describe_exit(proc.returncode)}"))
            os.set_blocking(self._reports, False)
            try:
                lines = os.read(self._reports, 65536).decode(errors="replace").splitlines()
            except BlockingIOError:
                lines = []
            self._told += [(line[0] == "s", line[2:]) for line in lines]
            for local_rank, (proc, by_itself) in enumerate(zip(self._procs, ended, strict=True), start=1):
                rank = self._first_rank + local_rank
                if by_itself and proc.returncode > 0 and not any(f"rank {rank} " in told for _, told in self._told):
                    self._told.append((True, f"rank {rank} (pid {proc.pid}) {describe_exit(proc.returncode)}"))
            for local_rank, (proc, by_itself) in enumerate(zip(self._procs, ended, strict=True), start=1):
                if not by_itself:
                    rank = self._first_rank + local_rank
                    told = f"rank {rank} (pid {proc.pid}) did not answer and did not end within {GRACE / 2:.0f} s; it was killed"
                    self._told.insert(0, (True, told))
            left = [
                at
                for at, (proc, by_itself) in enumerate(zip(self._procs, ended, strict=True), 1)
                if by_itself and not proc.returncode
            ]
            if left and self._told and all(symptom for symptom, _ in self._told):
                self._told.insert(
                    0,
                    (
                        True,
                        f"rank {self._first_rank + left[0]} had ended while another rank still waited for it; what speaks "
                        "to all ranks (trainer.save_checkpoint, unshard, a forward after fit) must be called on all of them",
                    ),
                )
            causes = [reason for symptom, reason in self._told if not symptom]
            symptoms = [reason for symptom, reason in self._told if symptom]
            reason = (causes or symptoms or ["a rank ended early"])[0]
            self._verdict = "the run was interrupted" if self._interrupted else f"the run failed: {reason}"

    def _say_verdict(self) -> None:
        """Last of all: below the tracebacks of ranks that only lost another one."""
        with self._lock:
            if self._verdict:
                say(self._verdict)
                sys.stdout.flush()
            self._verdict = ""

    def interrupt(self) -> None:
        """The user pressed Ctrl-C."""
        self._interrupted = True
        self._told.append((False, "interrupted"))

    @staticmethod
    def _let_end(proc: subprocess.Popen[bytes]) -> bool:
        try:
            proc.wait(timeout=GRACE / 2)
        except subprocess.TimeoutExpired:
            proc.kill()
            proc.wait()
            return False
        return True

    def _at_exit(self) -> None:
        """The main process is leaving: wait for the children, or end them if the run failed."""
        if os.getpid() != self._pid:
            return  # a forked process of the user's
        self._finished.set()
        uncaught = getattr(sys, "last_value", None)
        if uncaught is not None and not self._told:
            told = f"rank {self._first_rank} raised {type(uncaught).__name__}: {uncaught}"
            self.fail(told, symptom=is_lost_peer(uncaught))
        if not self._told and not self._ending.is_set():
            os.write(self._lifeline, DONE * len(self._procs))
            for proc in self._procs:
                proc.wait()
            if not any(proc.returncode for proc in self._procs):
                return
        self._conclude()
        self._say_verdict()
        if uncaught is None or self._exit_code:
            sys.stdout.flush()
            os._exit(self._exit_code or 1)


def report_exception(rank: int, error: BaseException) -> None:
    """In a child: tell the main process what this rank raised."""
    descriptor = os.environ.get(REPORTS)
    if descriptor is not None:
        kind = "s" if is_lost_peer(error) else "c"
        text = " ".join(f"rank {rank} raised {type(error).__name__}: {error}".split())
        os.write(int(descriptor), f"{kind} {text}"[:500].encode() + b"\n")


def tell_external_launcher(rank: int, error: BaseException) -> None:
    """Under torchrun or srun: name the rank in our own words, and write torchrun's error file for its summary."""
    if is_lost_peer(error) and "imed out" in str(error):
        say(
            f"rank {rank} waited for another rank, which did not answer within the timeout; look for the one that hangs"
        )
    elif is_lost_peer(error):
        say(f"rank {rank} lost another rank, which ended first; look for its message above or in its own log")
    else:
        say(f"rank {rank} raised {type(error).__name__}: {error}")
    if isinstance(error, Exception):
        get_error_handler().record_exception(error)


def follow_main_process(rank: int) -> bool:
    """In a child: end this process if the main process dies without saying that it is done.

    Returns whether this process is such a child.
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
