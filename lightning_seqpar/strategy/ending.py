"""How a run ends: with a sentence that says what to change, a rank that is missing, a signal, or a restart that goes on.

Rank 0 prints errors with the user's own frames, and other ranks in one line. They stay ordinary exceptions, raised alike on every
rank as a rule: ``sys.excepthook`` prints those that nobody catches. After a signal all ranks save and leave, between two steps.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from pydantic import ValidationError

from lightning_seqpar.checkpoint.atomic_files import MARKER, local_path, write_whole
from lightning_seqpar.releases import PACKAGES, fabric, pl
from lightning_seqpar.user_input import name_error

P = ParamSpec("P")
T = TypeVar("T")

VERBOSE = "SEQPAR_VERBOSE"  # environment variable: set, to anything but 0, it has errors told with all frames
PAUSE = 2.0
"""Seconds that rank 0 gets to come to an error that all ranks raise and, under torchrun, to print it before another rank leaves."""
NOT_THE_USERS = {"lightning_seqpar", *PACKAGES, "lightning_utilities", "pydantic", "torch"}
"""Packages whose frames say nothing of the user's code."""


def _folder(package: str) -> str:
    spec: Any = find_spec(package)
    return str(Path(spec.origin).parent) + os.sep


_FOLDERS = tuple(_folder(name) for name in sorted(NOT_THE_USERS))
_STANDARD = ("<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "scripts"))


def is_users(file: str) -> bool:
    """Whether a file is the user's, or of a library that the user has chosen, such as a model's."""
    return not file.startswith(_FOLDERS) and (file.startswith(_INSTALLED) or not file.startswith(_STANDARD))


def say(message: str) -> None:
    """Prints to standard error's descriptor, at once: torch replaces ``sys.stderr`` by a buffer while it formats an exception."""
    os.write(2, f"lightning_seqpar: {message}\n".encode())


def await_the_end() -> None:
    """Waits, for :data:`PAUSE` at most, until torchrun ends this rank, as it does once the rank that prints the error has left."""
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait(PAUSE)
    signal.signal(signal.SIGTERM, before)


OTHER_COLLECTIVE = "op.preamble.length <= op.nbytes"
"""Text in gloo's error where two ranks met in different collectives, or with tensors of different sizes."""
_SIGNS_OF_A_LOST_PEER = (
    *(OTHER_COLLECTIVE, "closed by peer", "pair closure", "reset by peer"),
    *("Broken pipe", "Connection refused", "Timed out", "timed out", "Read error"),
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
    return stack[-1].filename.startswith((_folder("torch.distributed"), _folder("lightning_seqpar"))) or (
        cause is not None and is_lost_peer(cause)
    )


def is_at_raise(stack: traceback.StackSummary) -> bool:
    """Whether a ``raise`` statement raised an error: if not, the interpreter did, or what is called from C++."""
    return bool(stack) and "raise" in (stack[-1].line or "").split()


def is_verbose() -> bool:
    """Whether errors are told with all frames."""
    return os.environ.get(VERBOSE, "0") not in ("", "0")


def is_refusal(error: BaseException) -> bool:
    """Whether an error is a sentence of this package for the user: one that a ``raise`` statement of it makes, or pydantic for
    it. What the interpreter or torch raises inside of this package is somebody's mistake in code.
    """
    stack = traceback.extract_tb(error.__traceback__)
    while stack and stack[-1].filename.startswith(_folder("pydantic")):
        stack.pop()
    if not isinstance(error, ValueError | RuntimeError) or not stack:
        return False
    is_ours = stack[-1].filename.startswith(_folder("lightning_seqpar"))
    return is_ours and (isinstance(error, ValidationError) or is_at_raise(stack))


class _Short:
    """A ``sys.excepthook`` that prints one error, and those of lost ranks, shortly (only rank 0 more than a line)."""

    def __init__(self, error: BaseException | None = None, rank: int = 0, *, is_told: bool = False) -> None:
        before = sys.excepthook
        self._usual: Callable[..., Any] = before._usual if isinstance(before, _Short) else before
        self._error, self._rank, self._is_told = error, rank, is_told

    def __call__(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is self._error and self._is_told:
            return
        if value is self._error and self._rank:
            say(f"rank {self._rank} raised {name_error(value)}")
            await_the_end()
        elif is_verbose() or (value is not self._error and not is_lost_peer(value)):
            self._usual(kind, value, trace)
        else:
            told = traceback.TracebackException(kind, value, trace)
            _keep_users(told)
            sys.stderr.write("".join(told.format()))


def _keep_users(told: traceback.TracebackException) -> None:
    told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if is_users(frame.filename)])
    for cause in (told.__cause__, told.__context__):
        if cause is not None:
            _keep_users(cause)


def tell_shortly(error: BaseException | None = None, rank: int = 0, *, is_told: bool = False) -> None:
    """Print an error, and those of lost ranks, shortly where nothing catches it; not if it ``is_told`` otherwise."""
    sys.excepthook = _Short(error, rank, is_told=is_told)


def shortens_refusals(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate what is called before the ranks are connected, so that its refusals are told shortly."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            if is_refusal(error):
                tell_shortly(error, int(os.environ.get("RANK", "0")))
            raise

    return called


PATIENCE = timedelta(seconds=5)  # how long a rank whose wait has ended gives the others to say what they waited for
CALL_ON_ALL = "what speaks to all ranks (trainer.save_checkpoint, unshard, a forward after fit) must be called on all of them"
_COLLECTIVES = str(Path("torch", "distributed", "distributed_c10d.py"))


class Missing(NamedTuple):
    """What a rank has found out whose wait for others has ended."""

    sentence: str  # who is missing, and where each rank waited
    waited: Collection[int] = ()  # the ranks that said where they waited
    is_teller: bool = True  # of the ranks with logs of their own the one that tells it


class Wait(NamedTuple):
    """Where a rank waited."""

    where: str  # in which collective
    line: str  # of the user's; empty for none


def exchange(world: dist.ProcessGroup, topic: str, own: object, patience: timedelta) -> dict[int, Any]:
    """What ranks say of a ``topic``, another in each call, in the store within ``patience``; RuntimeError if that is gone."""
    store = dist.distributed_c10d._world.pg_map[world][1]
    keys = [f"{topic}, rank {rank}" for rank in range(world.size())]
    store.set(keys[world.rank()], json.dumps(own))
    with contextlib.suppress(RuntimeError):
        store.wait(keys, patience)
    return {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}


def find_missing(error: BaseException, world: dist.ProcessGroup, trainer: pl.Trainer) -> Missing:
    """Find which rank of the world did not come, after a collective raised an error that says that another rank is gone."""
    number = trainer.fit_loop.epoch_loop.batch_idx
    own = describe_wait(error, f", at batch {number}" if trainer.training and number >= 0 else "")
    rank, size = world.rank(), world.size()
    is_late = any(sign in str(error) for sign in ("timeout", "imed out", OTHER_COLLECTIVE))
    heard: dict[int, Wait] = {}

    def speak() -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone meanwhile
            # A rank comes a little later if it began to wait later. One that has died, and closed a connection, says nothing.
            said = exchange(world, "lost another rank", own, PATIENCE if is_late else PATIENCE / 5)
            heard.update({one: Wait(*wait) for one, wait in said.items()})

    # The store may have gone with the rank that is missing. So it is spoken to in a thread, and given up after a while.
    thread = threading.Thread(target=speak, name="last-words", daemon=True)
    thread.start()
    thread.join(2 * PATIENCE.total_seconds())
    if not is_late and len(heard) < size:
        # Its connection was closed by a rank that has ended, and not by one whose own wait is over.
        lost = f"rank {rank} lost another rank, which ended first, in {own.where}"
        return Missing(f"{lost}; look for its message above or in its own log")
    if not heard:
        return Missing(
            f"rank {rank} waited in {own.where}, and the store through which ranks speak (rank 0's, as a rule) does not answer: "
            "rank 0 may be the one that is missing"
        )
    return Missing(tell_waits(heard, [one for one in range(size) if one not in heard]), heard, rank == min(heard))


def describe_wait(error: BaseException, batch: str) -> Wait:
    """Describe where a rank waited that lost another one: in which collective (and ``batch``), and at which line."""
    stack = traceback.extract_tb(error.__traceback__)
    calls = [frame.name for frame in stack if frame.filename.endswith(_COLLECTIVES)]
    calls = [name for name in calls if not name.startswith("_") and name != "wrapper"]
    users = [frame for frame in stack if is_users(frame.filename)][-1:]
    lines = [f'File "{one.filename}", line {one.lineno}, in {one.name}: {(one.line or "")[:120]}' for one in users]
    return Wait((calls[-1] if calls else "a collective") + batch, "".join(lines))


def tell_waits(heard: Mapping[int, Wait], missing: Sequence[int]) -> str:
    """Tell which ranks are missing, where those that spoke waited, and what to do if they waited at different lines."""
    waits = sorted(heard.items())
    if missing:
        many = f"s {list_ranks(missing)} are" if len(missing) > 1 else f" {missing[0]} is"
        told = f"rank{many} missing: rank {waits[0][0]} waited in {waits[0][1].where}"
    else:
        apart = len({wait.where for _, wait in waits}) > 1
        told = f"every rank waited{', in different collectives' * apart}: " + "; ".join(
            f"rank {rank} in {wait.where}" for rank, wait in waits[:8]
        )
    alike: dict[str, list[int]] = {}
    for rank, wait in waits:
        alike.setdefault(wait.line, []).append(rank)
    for line, ranks in [*alike.items()][:4]:
        many = "s" * (len(ranks) > 1)
        told += f"\n  rank{many} {list_ranks(ranks)}: {line or 'at no line of yours in a hook or step'}"
    if any(alike) and (len(alike) > 1 or missing):
        told += f"\n  {CALL_ON_ALL}, not under `if trainer.is_global_zero` or another condition that some of them do not meet"
    return told


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: ``0, 1``, or ``0, 8, ... 56`` if they are many."""
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:2], f"... {shown[-1]}"])


def end_stopped_parent() -> bool:
    """Kill the process that started this one if it is stopped (SIGSTOP), since nothing else would end it: whether it was."""
    parent = os.getppid()
    try:
        state = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    if state not in ("T", "t"):
        return False
    os.kill(parent, signal.SIGKILL)
    return True


class Ending:
    """What asks a training to end, noted on any rank at any moment, and acted on by all of them between two optimizer steps.

    A signal comes to each rank at a place of its own, where a save would pair its collectives with those of a step elsewhere.
    ``together`` says whether all ranks have agreed to end here, so that they may save.
    """

    def __init__(self) -> None:
        self._is_asked_to_end = self._is_asked_to_requeue = self._has_requeued = False
        self._asking: pl.Trainer | None = None
        self._error: BaseException | None = None  # what ends the run, and whether ranks are at different places of it
        self._apart = False
        self.together = False

    @property
    def listens(self) -> bool:
        """Whether ranks ask each other between the steps now, so that noting a signal is enough."""
        return self._asking is not None

    def begin(self, trainer: pl.Trainer, ask: Callable[[Sequence[bool]], list[bool]], agreed: Callable[[], None]) -> None:
        """Let the training that begins ask between its steps, in the place of Lightning's broadcast of rank 0's flag: ``ask``
        which flags are set on any rank (collective). ``agreed`` is called on every rank in front of the save.
        """
        self._is_asked_to_end = self._is_asked_to_requeue = self._has_requeued = self.together = False
        self._asking, self._agreed, self._ask = trainer, agreed, ask
        loop = trainer.fit_loop.epoch_loop

        def ask_between_steps() -> None:  # it is called in front of each batch, with the number of the one before
            if (loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                self.act()

        loop.__dict__["_broadcast_sigterm_tensor"] = ask_between_steps

    def leave(self) -> None:
        """Give the loop Lightning's method back, and forget what ended the run."""
        self._error = None  # it holds the frames of the run
        if self._asking is not None:
            self._asking.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
            self._asking = None

    def note(self) -> bool:
        """Note SIGTERM: whether that is all that is to be done now. It is not where nobody asks, or for the second time."""
        if not self.listens or self._is_asked_to_end:
            return False
        self._is_asked_to_end = True
        return True

    def note_requeue(self, signum: int, frame: Any) -> None:
        """Handle SLURM's requeue signal: note it."""
        self._is_asked_to_requeue = True

    def take_requeue_signal(self, trainer: pl.Trainer) -> None:
        """Put :meth:`note_requeue` where Lightning's handler saves at once, at whatever place this rank is."""
        environment = trainer._accelerator_connector.cluster_environment
        if (
            isinstance(environment, fabric.plugins.environments.slurm.SLURMEnvironment)
            and environment.auto_requeue
            and environment.requeue_signal is not None
            and type(signal.getsignal(environment.requeue_signal)).__name__ == "_HandlersCompose"
            and threading.current_thread() is threading.main_thread()
        ):
            signal.signal(environment.requeue_signal, self.note_requeue)

    def is_apart(self, trainer: pl.Trainer, world: dist.ProcessGroup) -> bool:
        """Whether an exception, in which callbacks may save, ends the run on ranks that may be at different places of it."""
        if trainer.state.status != pl.trainer.states.TrainerStatus.INTERRUPTED or self.together:
            return False
        error = sys.exc_info()[1]
        if error is None:  # somebody has caught it, and saves later
            return False
        if error is not self._error:
            self._error = error
            shared = isinstance(error, Exception) and not is_lost_peer(error) and is_shared(error, world)
            self._apart = world.size() > 1 and not shared
        return self._apart

    def act(self) -> None:
        """Do what some rank was asked to do; after SIGTERM SIGTERMException on every rank. Collective, between two steps."""
        trainer = self._asking
        assert trainer is not None
        ends, requeues = self._ask([self._is_asked_to_end, self._is_asked_to_requeue])
        if requeues and not self._has_requeued:
            self._has_requeued = True  # SLURM may send it several times
            environment: Any = trainer._accelerator_connector.cluster_environment
            trainer._signal_connector._slurm_sigusr_handler_fn(environment.requeue_signal, None)  # type: ignore[arg-type]
        if ends:
            self.together = True
            self._agreed()
            if not self._has_requeued:
                save_before_end(trainer)
            rank_zero_info(f"lightning_seqpar: the training ends at step {trainer.global_step}: SIGTERM")
            raise pl.utilities.exceptions.SIGTERMException(128 + signal.SIGTERM)


def save_before_end(trainer: pl.Trainer) -> None:
    """Save, unless this step is saved, as the last checkpoint if the first ``ModelCheckpoint`` keeps that."""
    callback = next((one for one in trainer.checkpoint_callbacks if isinstance(one, pl.callbacks.ModelCheckpoint)), None)
    if callback is None or callback.dirpath is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    if callback._last_global_step_saved == trainer.global_step or callback.save_on_exception:  # which the end is
        return
    if callback.save_last:
        callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
        return
    path = Path(callback.dirpath, f"interrupted-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt")
    trainer.save_checkpoint(path)
    rank_zero_info(f"lightning_seqpar: saved {path}")


def is_shared(error: BaseException, world: dist.ProcessGroup) -> bool:
    """Whether every rank raises this error now, with the same text: they say so within :data:`PATIENCE`."""
    own = f"{type(error).__name__}: " + re.sub(r"\b0x[0-9a-f]+", "", str(error))  # each rank has addresses of its own
    try:
        number = dist.distributed_c10d._world.pg_map[world][1].add(f"errors of rank {world.rank()}", 1)
        said = exchange(world, f"error {number}", own, PATIENCE)
    except RuntimeError:  # the store is gone
        return False
    return len(said) == world.size() and {*said.values()} == {own}


TRAININGS = "LIGHTNING_SEQPAR_TRAININGS"  # the environment variable with the number of the process's trainings so far


class RestartList:
    """The checkpoints that a training under torchrun has written, listed for its next attempt in the Trainer's
    ``default_root_dir``.

    Trainings of a script are told apart by number, class and length: one that the next attempt skips moves the numbers behind
    it.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        run = "".join(c if c.isalnum() else "-" for c in os.environ.get("TORCHELASTIC_RUN_ID", "run"))
        self._file = Path(trainer.default_root_dir, f".seqpar-restart-{run}.json")
        kind = type(module)
        self._training = (
            f"training {os.environ.get(TRAININGS, '0')} of the process: {kind.__module__}.{kind.__qualname__}, "
            f"{trainer.max_epochs} epochs, {trainer.max_steps} steps"
        )

    @staticmethod
    def count_training() -> None:
        """Another training of this process begins. Every attempt of a run has them in the same order."""
        os.environ[TRAININGS] = str(int(os.environ.get(TRAININGS, "0")) + 1)

    def resume(self, rank: int) -> str | None:
        """The checkpoint from which this rank goes on, if torchrun started the run again; None for one that begins."""
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
            if rank == 0:  # what is listed is of another run of the same name
                self._write([entry for entry in self._read() if entry[0] != self._training])
            return None
        path = self.newest()
        if rank == 0:
            where = f"goes on from {path}" if path else "has saved no checkpoint, so it begins anew"
            say(f"torchrun started the run again: it {where}")
        return path

    def add(self, path: Any) -> None:
        """Add a checkpoint; the first rank calls it once it is written, or is being written."""
        if (place := local_path(path)) is not None:
            self._write([*self._read(), [self._training, str(place.absolute())]])

    def newest(self) -> str | None:
        """The newest checkpoint of this training that is there and whole; None without one."""
        for training, path in reversed(self._read()):
            # It may have been removed since, or not be finished: then one before it is. A file has its name once it is whole.
            if training == self._training and (Path(path).is_file() or Path(path, MARKER).is_file()):
                return str(path)
        return None

    def _read(self) -> list[list[str]]:
        entries: list[list[str]] = json.loads(self._file.read_text()) if self._file.exists() else []
        return entries

    def _write(self, entries: list[list[str]]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, lambda file: file.write(json.dumps(entries).encode()))
