"""Starts the ranks of this node, and watches over them: which one failed first, and how the run ends.

It alone knows which rank a dead process was: gloo says "connection reset by peer". Each child notices by a pipe when it is
gone.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_seqpar.releases import (
    HYDRA_AVAILABLE,
    SubprocessScriptLauncher,
    TrainerFn,
    basic_subprocess_cmd,
    hydra_subprocess_cmd,
    set_num_threads_if_needed,
)
from lightning_seqpar.strategy.ending import (
    CALL_ON_ALL,
    PAUSE,
    Ending,
    Missing,
    RestartList,
    await_the_end,
    end_stopped_parent,
    is_lost_peer,
    is_refusal,
    is_verbose,
    say,
    tell_shortly,
)
from lightning_seqpar.user_input import name_error

LIFELINE = "SEQPAR_LIFELINE_FD"
"""Environment variable of a child: the descriptor of a pipe that closes when the main process is gone."""
REPORTS = "SEQPAR_REPORTS_FD"  # environment variable of a child: the descriptor of a pipe to which it writes what it raised
DONE = b"done"  # what the main process writes into the lifeline, once for each child, when it ends well
PUT_OFF = 20.0  # seconds that a training gets to come to the end of a step after SIGTERM
GRACE = 10.0  # seconds that the other ranks get to end by themselves (and print their own message) once one has died


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
        self._procs: list[tuple[int, subprocess.Popen[bytes]]] = []  # with their ranks
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
        rank = self._first_rank + len(self._procs) + 1
        self._procs.append((rank, proc))
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
        """Says which signals end the run now, after SIGTERM with the step that is under way if ``finishes_step()``."""
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
        self._say_verdict()
        os._exit(self._exit_code)  # a thread can't raise in the main thread, which may wait in a collective for a dead rank

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
        until = time.monotonic() + GRACE / 2
        for rank, proc in self._procs:
            try:
                code = proc.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                proc.kill()
                proc.wait()
                if rank not in self._waited:
                    late = f"did not answer and did not end within {GRACE / 2:.0f} s; it was killed"
                    self._reasons.insert(0, (True, f"rank {rank} (pid {proc.pid}) {late}"))
            else:
                if code < 0:
                    self._reasons.insert(0, (False, f"rank {rank} (pid {proc.pid}) {describe_exit(code)}"))
        os.set_blocking(self._reports, False)
        with contextlib.suppress(BlockingIOError):  # what the children wrote by report()
            lines = os.read(self._reports, 65536).decode(errors="replace").splitlines()
            self._waits += [line[2:] for line in lines if line[0] == "w"]
            self._reasons += [(line[0] != "c", line[2:]) for line in lines]
        for rank, proc in self._procs:
            if proc.returncode > 0 and not any(f"rank {rank} " in reason for _, reason in self._reasons):
                self._reasons.append((True, f"rank {rank} (pid {proc.pid}) {describe_exit(proc.returncode)}"))
        done = [rank for rank, proc in self._procs if not proc.returncode]
        if done and self._reasons and all(symptom for symptom, _ in self._reasons):
            self._reasons.insert(0, (True, f"rank {done[0]} had ended while another rank still waited for it; {CALL_ON_ALL}"))

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
            codes = [proc.wait() for _, proc in self._procs]
            if not any(codes):
                return
        self._conclude()
        if is_shared and all(reason.endswith(said) for _, reason in self._reasons):
            return
        codes = [proc.returncode for _, proc in self._procs]
        if self._agreed and all(code in (0, self._exit_code) for code in codes):
            self._verdict = "the run ended by SIGTERM, between two steps"
        self._say_verdict()
        # A rank may have left with a status of its own, which shows here as a lost peer.
        status = self._exit_code or next((code for code in codes if 1 < code < 128), 0)
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


DEFAULT_HANDLERS: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""What happens on a signal in a process where nobody decided otherwise."""


def is_script() -> bool:
    """Whether this process runs a file or a module, which another process can run too; not ``python -c`` or standard input."""
    import __main__

    return __main__.__spec__ is not None or sys.argv[0] not in ("", "-", "-c")


def _hydra_config() -> Any:
    if not HYDRA_AVAILABLE:
        return None
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get() if HydraConfig.initialized() else None


def is_hydra_sweep() -> bool:
    """Whether this process runs the jobs of a hydra multirun, one after the other."""
    config = _hydra_config()
    return config is not None and getattr(config.mode, "name", "") == "MULTIRUN"


class SeqParallelLauncher(SubprocessScriptLauncher):
    """Lightning's subprocess launcher with a watch over the children."""

    watch: ChildWatch | None = None
    restarts: RestartList | None = None
    _is_child = False
    _ending: Ending | None = None
    _taken: frozenset[int] = frozenset()
    _pid = 0

    @property
    def is_interactive_compatible(self) -> bool:
        """True, so that Lightning leaves it to the strategy to refuse what does not work at a prompt."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks of this node, unless another launcher does, and return what ``function`` does in this process."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self._is_child = REPORTS in os.environ
        if self._is_child:
            follow_main_process(environment.global_rank())
        elif environment.creates_processes_externally:
            self.watch = ChildWatch.of_this_process
        elif self.num_processes * self.num_nodes > 1:
            self._start_children()
        set_num_threads_if_needed(num_processes=self.num_processes)
        call = inspect.signature(function).bind(*args, **kwargs)
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and trainer.state.fn == TrainerFn.FITTING:
            RestartList.count_training()
            self.restarts = RestartList(trainer, trainer.lightning_module)
            resume = self.restarts.resume(environment.global_rank())
            if call.arguments.get("ckpt_path") is None and resume is not None:
                call.arguments["ckpt_path"] = resume
        self.take_signals({})
        try:
            result = function(*call.args, **call.kwargs)
        finally:
            self._listen_to(())
            for signum, default in DEFAULT_HANDLERS.items():
                if signal.getsignal(signum) == self._on_signal:  # which only a main thread has set
                    signal.signal(signum, default)
        tell_shortly()
        return result

    def take_signals(self, found: dict[Any, Any], ending: Ending | None = None) -> None:
        """Make SIGTERM and Ctrl-C end the run: between two steps of a training, after a checkpoint; at once elsewhere.

        Lightning's own handler of SIGTERM would wait in a broadcast for the other ranks. Handlers of the user's stay. ``found`` are
        those that Lightning has replaced and puts back in the end; ``ending`` notes a signal that waits for the end of a step.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._ending, self._pid = ending, os.getpid()
        ours = []
        for signum, default in DEFAULT_HANDLERS.items():
            before = found.get(signum, signal.getsignal(signum))
            if before in (default, self._on_signal):
                ours.append(signum)
                found[signum], before = default, self._on_signal
            if before is not None:
                signal.signal(signum, before)
        self._listen_to(ours)

    def _listen_to(self, signals: Iterable[int]) -> None:
        self._taken, ending = frozenset(signals), self._ending
        if self.watch is not None:
            self.watch.take(self._taken, lambda: ending is not None and ending.listens)

    def _on_signal(self, signum: int, frame: Any) -> None:
        """Handle SIGTERM or Ctrl-C in the main thread: end by an exception, or with the step that is under way."""
        is_forked = os.getpid() != self._pid  # a data worker, a pool
        if signum == signal.SIGTERM and not is_forked and self._ending is not None and self._ending.note():
            return
        if self.watch is not None and not is_forked:
            self.watch.note_signal(signum)
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        if self._is_child or is_forked:
            # The process ends at once; the main process notices, and names the rank.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        raise SystemExit(128 + signum)

    def kill(self, signum: Any) -> None:
        """Called by Lightning: to end the children after Ctrl-C, and by its handler of SIGTERM while a model is set up."""
        if signum == signal.SIGKILL:
            if self.watch is not None:
                self.watch.note_signal(signal.SIGINT)
            super().kill(signum)
        elif signum in self._taken:
            self._on_signal(signum, None)

    def tell(self, error: BaseException, missing: Callable[[], Missing] | None = None) -> None:
        """Report an exception to whoever started the ranks; ``missing`` finds out which rank is gone, where it says that one is."""
        rank = self.cluster_environment.global_rank()
        is_lost = is_lost_peer(error)
        is_shared = is_refusal(error) and not is_lost
        said = f"rank {rank} raised {name_error(error)}"
        for_torchrun = self.watch is None and not self._is_child
        if is_shared:
            tell_shortly(error, rank, is_told=self._is_child)
        if is_lost and missing is not None:
            self._tell_missing(missing())
            tell_shortly(error, is_told=not is_verbose())
        elif self._is_child:
            report("s" if is_lost else "c", said)
        elif self.watch is not None and (is_shared or isinstance(error, SystemExit)):
            self.watch.expected = error
        elif self.watch is not None:
            self.watch.fail(said, symptom=is_lost)
        elif not self.cluster_environment.creates_processes_externally:
            return
        elif not is_shared:
            say(said)
        if for_torchrun and isinstance(error, Exception) and (rank == 0 or not is_shared):
            get_error_handler().record_exception(error)  # for torchrun's summary

    def _tell_missing(self, missing: Missing) -> None:
        if self.watch is not None:
            self.watch.fail_waiting(missing.sentence, missing.waited)
        elif not self._is_child and missing.is_teller:
            say(missing.sentence)
        elif not self._is_child:
            await_the_end()
        elif end_stopped_parent():
            say(f"{missing.sentence}. The main process (local rank 0) was stopped, and is killed")
        else:
            report("w", missing.sentence)

    def _start_children(self) -> None:
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        lifeline_end, lifeline = os.pipe()
        reports, reports_end = os.pipe()
        self.watch = ChildWatch(environment.node_rank() * self.num_processes, lifeline, reports)
        self.procs = []
        ends = {LIFELINE: lifeline_end, REPORTS: reports_end}
        is_hydra = _hydra_config() is not None
        try:
            for local_rank in range(1, self.num_processes):
                command, folder = hydra_subprocess_cmd(local_rank) if is_hydra else (basic_subprocess_cmd(), None)
                env = {**os.environ, "LOCAL_RANK": str(local_rank), **{name: str(end) for name, end in ends.items()}}
                self.procs.append(subprocess.Popen(command, env=env, cwd=folder, pass_fds=tuple(ends.values())))
                self.watch.follow(self.procs[-1])
        finally:
            os.close(lifeline_end)
            os.close(reports_end)
