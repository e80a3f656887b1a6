"""Starts the ranks of this node and watches over them.

The launcher alone knows which rank a dead process was: gloo says "connection reset by peer" and names nobody. And each child has
one end of a pipe, of which the main process alone has the other, so that it notices when the main process is gone.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _hydra_subprocess_cmd
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _HYDRA_AVAILABLE, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_seqpar.strategy.child_watch import LIFELINE, REPORTS, ChildWatch, follow_main_process, report
from lightning_seqpar.strategy.ending import Ending
from lightning_seqpar.strategy.missing_ranks import Missing, end_stopped_parent
from lightning_seqpar.strategy.refusals import await_the_end, is_lost_peer, is_refusal, is_verbose, say, tell_shortly
from lightning_seqpar.strategy.restart import RestartList
from lightning_seqpar.user_input import name_error

DEFAULT_HANDLERS: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""What happens on a signal in a process where nobody decided otherwise."""


def is_script() -> bool:
    """Whether this process runs a file or a module, which another process can run too; not ``python -c`` or standard input."""
    import __main__

    return __main__.__spec__ is not None or sys.argv[0] not in ("", "-", "-c")


def _hydra_config() -> Any:
    """The configuration of hydra's job in this process; None without one."""
    if not _HYDRA_AVAILABLE:
        return None
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get() if HydraConfig.initialized() else None


def is_hydra_sweep() -> bool:
    """Whether this process runs the jobs of a hydra multirun, one after the other."""
    config = _hydra_config()
    return config is not None and getattr(config.mode, "name", "") == "MULTIRUN"


class SeqParallelLauncher(_SubprocessScriptLauncher):
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
        _set_num_threads_if_needed(num_processes=self.num_processes)
        call = inspect.signature(function).bind(*args, **kwargs)
        if RestartList.is_kept() and trainer.state.fn == TrainerFn.FITTING:
            RestartList.count_training()
            self.restarts = RestartList(trainer, trainer.lightning_module)
            resume = self.restarts.resume(environment.global_rank())
            if call.arguments.get("ckpt_path") is None and resume is not None:
                call.arguments["ckpt_path"] = resume
        self.take_signals({})
        try:
            result = function(*call.args, **call.kwargs)
        finally:
            self._give_signals_back()
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

    def _give_signals_back(self) -> None:
        """Stop listening to signals at the end of a run."""
        self._listen_to(())
        if threading.current_thread() is threading.main_thread():
            for signum, default in DEFAULT_HANDLERS.items():
                if signal.getsignal(signum) == self._on_signal:
                    signal.signal(signum, default)

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

    def expect_end(self) -> None:
        """Note that all ranks have agreed to end by SIGTERM."""
        if self.watch is not None:
            self.watch.expect_end()

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
        """Report that this rank waited for another one."""
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
        """Start the children as Lightning does, with two pipes: one that they watch, and one for their reports."""
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
                command, folder = _hydra_subprocess_cmd(local_rank) if is_hydra else (_basic_subprocess_cmd(), None)
                told = {"LOCAL_RANK": local_rank, **ends}
                env = {**os.environ, **{name: str(value) for name, value in told.items()}}
                self.procs.append(subprocess.Popen(command, env=env, cwd=folder, pass_fds=tuple(ends.values())))
                self.watch.follow(self.procs[-1])
        finally:
            os.close(lifeline_end)
            os.close(reports_end)
