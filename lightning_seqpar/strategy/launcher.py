"""Starts the ranks of this node and watches over them.

The launcher alone knows which rank a dead process was: gloo says "connection reset by peer" and names nobody. So the
main process waits on each child, and each child holds a pipe whose other end only the main process holds.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import (
    _basic_subprocess_cmd,
    _hydra_subprocess_cmd,
)
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _HYDRA_AVAILABLE,
    _SubprocessScriptLauncher,
)
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


def is_script() -> bool:
    """Whether there is a file or a module that another process can run again: not ``python -c`` or standard input."""
    import __main__

    return __main__.__spec__ is not None or sys.argv[0] not in ("", "-", "-c")


def is_hydra_sweep() -> bool:
    """Whether this process runs the jobs of a hydra multirun, one after the other."""
    if not _HYDRA_AVAILABLE:
        return False
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


class SeqParallelLauncher(_SubprocessScriptLauncher):
    """Lightning's subprocess launcher with our own watch over the children."""

    watch: ChildWatch | None = None

    @property
    def is_child(self) -> bool:
        """Whether this process was started by the launcher in another one."""
        return self._follows

    _follows = False

    @property
    def is_interactive_compatible(self) -> bool:
        """The strategy itself refuses what does not work at a prompt."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks of this node if nobody else does, then run ``function`` in this one."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            if self.num_processes * self.num_nodes > 1:
                self._start_children()
        elif follow_main_process(environment.global_rank()):
            self._follows = True
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Lightning passes signals on with this; the watch ends the children instead, after their own message."""
        if self.watch is not None and signum == signal.SIGKILL:
            self.watch.interrupt()  # Lightning sends it to the children after Ctrl-C
        elif self.watch is not None:
            self.watch.fail(f"the main process got {signal.Signals(signum).name}")
        if signum == signal.SIGKILL:
            super().kill(signum)

    def take_signals(self, theirs: Any) -> None:
        """Make SIGTERM end the run, in processes of ours: Lightning's own handler waits in a broadcast for its peers.

        Ctrl-C raises ``KeyboardInterrupt`` as ever; handlers of the user's stay, ``theirs`` for SIGTERM.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if callable(theirs) and (self._follows or self.watch is not None):
            signal.signal(signal.SIGTERM, theirs)
        elif self._follows:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the main process sees it and names the rank
        if self.watch is not None:
            taken: set[int] = set() if callable(theirs) else {signal.SIGTERM}
            if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, self._on_signal):
                taken.add(signal.SIGINT)
            for signum in taken:
                signal.signal(signum, self._on_signal)
            self.watch.hear_signals(taken, self.cluster_environment.global_rank())

    def give_signals_back(self) -> None:
        """The run is over; Lightning puts the handlers back that it found."""
        if self.watch is not None and threading.current_thread() is threading.main_thread():
            self.watch.hear_no_signals()
            if signal.getsignal(signal.SIGINT) == self._on_signal:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_signal(self, signum: int, frame: Any) -> None:
        assert self.watch is not None
        self.watch.handled(signum, self.cluster_environment.global_rank())
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signum)

    def tell(self, error: BaseException) -> None:
        """This rank raised."""
        rank = self.cluster_environment.global_rank()
        if self._follows:
            report_exception(rank, error)
        elif self.watch is not None:
            self.watch.fail(f"rank {rank} raised {type(error).__name__}: {error}", symptom=is_lost_peer(error))
        else:
            tell_external_launcher(rank, error)

    def _start_children(self) -> None:
        """As Lightning starts them, but each child inherits the reading end of the lifeline."""
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        reading, writing = os.pipe()
        reports, telling = os.pipe()
        self.procs = []
        try:
            for local_rank in range(1, self.num_processes):
                command, folder = self._command(local_rank)
                env = {**os.environ, "LOCAL_RANK": str(local_rank), LIFELINE: str(reading), REPORTS: str(telling)}
                self.procs.append(subprocess.Popen(command, env=env, cwd=folder, pass_fds=(reading, telling)))
        finally:
            os.close(reading)
            os.close(telling)
        self.watch = ChildWatch(self.procs, environment.node_rank() * self.num_processes, writing, reports)
        self.watch.start()

    @staticmethod
    def _command(local_rank: int) -> tuple[Sequence[str], str | None]:
        if _HYDRA_AVAILABLE:
            from hydra.core.hydra_config import HydraConfig

            if HydraConfig.initialized():
                return _hydra_subprocess_cmd(local_rank)
        return _basic_subprocess_cmd(), None
