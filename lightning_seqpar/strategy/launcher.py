"""Starts the ranks of this node and watches over them.

The launcher alone knows which rank a dead process was: gloo says "connection reset by peer" and names nobody. So the
main process waits for each child. And each child has one end of a pipe, of which the main process alone has the other, so
that it notices when the main process is gone.
"""

from __future__ import annotations

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

from lightning_seqpar.strategy.child_watch import (
    LIFELINE,
    REPORTS,
    ChildWatch,
    follow_main_process,
    is_lost_peer,
    record_for_torchrun,
    report_exception,
    tell_external_launcher,
)
from lightning_seqpar.strategy.refusals import Refusals


def is_script() -> bool:
    """Whether this process runs a file or a module, which another process can run too; not ``python -c`` or standard input."""
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
    """Lightning's subprocess launcher with a watch over the children.

    Attributes:
        watch: watches the children; None in a process that started none.
    """

    watch: ChildWatch | None = None
    _is_child = False

    @property
    def is_child(self) -> bool:
        """Whether this process was started by a launcher in another process."""
        return self._is_child

    @property
    def is_interactive_compatible(self) -> bool:
        """True, so that Lightning leaves it to the strategy to refuse what does not work at a prompt."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks of this node, unless another launcher does, and run ``function`` in this process.

        Returns:
            What ``function`` returns.
        """
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            if self.num_processes * self.num_nodes > 1:
                self._start_children()
        elif follow_main_process(environment.global_rank()):
            self._is_child = True
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Called by Lightning to pass a signal on to the children.

        SIGKILL is passed on. On any other signal the watch ends the children, after they had time to print their message.
        """
        if self.watch is not None and signum == signal.SIGKILL:
            self.watch.interrupt()  # Lightning kills the children after Ctrl-C
        elif self.watch is not None:
            self.watch.fail(f"the main process got {signal.Signals(signum).name}")
        if signum == signal.SIGKILL:
            super().kill(signum)

    def take_signals(self, user_handler: Any) -> None:
        """Make SIGTERM end the run, in processes that this launcher started, and in the one that started them.

        Lightning's own handler would wait in a broadcast for the other ranks. Ctrl-C raises ``KeyboardInterrupt`` as always,
        and handlers of the user's stay.

        Args:
            user_handler: the handler of SIGTERM before Lightning's; used if it is a function.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if callable(user_handler) and (self._is_child or self.watch is not None):
            signal.signal(signal.SIGTERM, user_handler)
        elif self._is_child:
            # The process ends at once; the main process notices, and names the rank.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.watch is not None:
            taken: set[int] = set() if callable(user_handler) else {signal.SIGTERM}
            if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, self._on_signal):
                taken.add(signal.SIGINT)
            for signum in taken:
                signal.signal(signum, self._on_signal)
            self.watch.hear_signals(taken, self.cluster_environment.global_rank())

    def give_signals_back(self) -> None:
        """Stop listening to signals at the end of a run; Lightning puts back the handlers that were there before it."""
        if self.watch is not None and threading.current_thread() is threading.main_thread():
            self.watch.hear_no_signals()
            if signal.getsignal(signal.SIGINT) == self._on_signal:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_signal(self, signum: int, frame: Any) -> None:
        """Handle SIGTERM or Ctrl-C in the main thread: end by an exception."""
        assert self.watch is not None
        self.watch.handled(signum, self.cluster_environment.global_rank())
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signum)

    def tell(self, error: BaseException, refusals: Refusals | None = None) -> None:
        """Report an exception of this rank to whoever started the ranks; one that all ranks raised is left to rank 0.

        Args:
            error: the exception.
            refusals: what finds out whether all ranks raised it; None if that can't be.
        """
        rank = self.cluster_environment.global_rank()
        if refusals is not None and not is_lost_peer(error) and refusals.is_shared(error):
            refusals.tell_once(error, opens_log=self.cluster_environment.local_rank() == 0)
            if self.watch is not None:
                self.watch.expect(error)
            elif rank == 0:
                record_for_torchrun(error)
        elif self._is_child:
            report_exception(rank, error)
        elif self.watch is not None:
            self.watch.fail(f"rank {rank} raised {type(error).__name__}: {error}", symptom=is_lost_peer(error))
        else:
            tell_external_launcher(rank, error)

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
        self.procs = []
        try:
            for local_rank in range(1, self.num_processes):
                command, folder = self._command(local_rank)
                env = {
                    **os.environ,
                    "LOCAL_RANK": str(local_rank),
                    LIFELINE: str(lifeline_end),
                    REPORTS: str(reports_end),
                }
                ends = (lifeline_end, reports_end)
                self.procs.append(subprocess.Popen(command, env=env, cwd=folder, pass_fds=ends))
        finally:
            os.close(lifeline_end)
            os.close(reports_end)
        self.watch = ChildWatch(self.procs, environment.node_rank() * self.num_processes, lifeline, reports)
        self.watch.start()

    @staticmethod
    def _command(local_rank: int) -> tuple[Sequence[str], str | None]:
        """The command that runs this script again as another rank, and its folder (None for this one's)."""
        if _HYDRA_AVAILABLE:
            from hydra.core.hydra_config import HydraConfig

            if HydraConfig.initialized():
                return _hydra_subprocess_cmd(local_rank)
        return _basic_subprocess_cmd(), None
