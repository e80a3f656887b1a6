"""Killed in front of what a rank does to the folder of a checkpoint: each kind of thing once, or all of it (``make crash``)."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.checkpoint.atomic_files import MARKER, REPLACED, UNFINISHED, beside
from lightning_seqpar.testing import RankFailedError, run_distributed
from tests.helpers import models
from tests.helpers.checkpoints import FORMS, same, whole
from tests.helpers.fit import quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees

EVERYTHING = "CRASH" in os.environ
STEPS = 3
WATCHED = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "os.symlink")


class Killer:
    """Counts what this process does to the checkpoints' folder, and dies in front of one of these things."""

    def __init__(self, folder: Path, at: int | None, everybody: bool) -> None:
        self.folder, self.at, self.everybody = str(folder), at, everybody
        self.events: list[str] = []
        self.on = True
        sync = os.fsync

        def counted(descriptor: int) -> None:
            self.seen("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            sync(descriptor)

        os.fsync = counted
        sys.addaudithook(self.audit)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event in WATCHED and args and isinstance(args[0], str | os.PathLike):
            writes = event != "open" or (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if writes:
                self.seen(event.removeprefix("os."), str(args[0]))

    def seen(self, event: str, path: str) -> None:
        if path != self.folder and not path.startswith(f"{self.folder}/"):
            return
        self.events.append(f"{event} {os.path.relpath(path, self.folder)}")
        if len(self.events) - 1 == self.at:
            self.die()

    def die(self) -> None:
        self.on = False
        if self.everybody:
            for file in Path(f"{self.folder}.pids").iterdir():
                if int(file.name) != os.getpid():
                    os.kill(int(file.name), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class Notes(Callback):
    """Notes which steps' checkpoints were awaited; one that is written meanwhile is when the next one begins."""

    def __init__(self, file: Path, form: str) -> None:
        self.file, self.behind = file, form == "async"

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if dist.get_rank() == 0:
            self.file.write_text(str(max(trainer.global_step - self.behind, 0)))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.on_train_batch_start(trainer, module, None, 0)


def work(form: str, folder: str, victim: int, at: int | None, everybody: bool) -> list[str]:
    """Train, with a checkpoint behind every step of which the best one and the last one are kept."""
    place = Path(folder)
    pids = Path(f"{folder}.pids")
    pids.mkdir(exist_ok=True)
    (pids / str(os.getpid())).touch()
    dist.barrier()
    killer = Killer(place, at if dist.get_rank() == victim else None, everybody)
    saver = ModelCheckpoint(
        place, filename="{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max", save_last=True
    )
    trainer = quiet_trainer(
        devices=2,
        strategy=SeqParallelStrategy(tp=2, checkpoint=FORMS[form], self_check=False),
        max_steps=STEPS,
        enable_checkpointing=True,
        callbacks=[saver, Notes(Path(f"{folder}.done"), form)],
    )
    trainer.fit(models.GPT(), models.loader(4, count=4 * STEPS))
    killer.on = False
    return killer.events


@dataclass
class Found:
    """What is left in a folder."""

    whole: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def look(folder: Path, expected: dict[int, Any]) -> Found:
    """Whatever has a checkpoint's name must be whole and right; the rest must be refused."""
    found = Found()
    for name in sorted({path.name.split(".ckpt")[0] for path in folder.iterdir()}):
        path = folder / f"{name}.ckpt"
        remains = [beside(path, end) for end in (UNFINISHED, REPLACED) if beside(path, end).exists()]
        there = path.is_file() or (path.is_dir() and any(path.iterdir()))
        try:
            state = whole(path)
        except (ValueError, OSError) as error:
            if there:
                found.wrong.append(f"{path.name} has the name of a whole one: {error}")
            elif not remains or any(remain.name not in str(error) for remain in remains):
                found.wrong.append(f"{path.name}: what is left of it is not reported: {error}")
            continue
        found.whole.append(state["global_step"])
        if not same(dict(state["state_dict"]), expected[state["global_step"]]):
            found.wrong.append(f"{path.name}: other weights than those of step {state['global_step']}")
    done = Path(f"{folder}.done")
    awaited = int(done.read_text() or 0) if done.exists() else 0
    if awaited and max(found.whole, default=0) < awaited:
        found.wrong.append(f"step {awaited} was saved, and {found.whole} are left")
    return found


def uninterrupted(form: str) -> tuple[list[list[str]], dict[int, Any]]:
    """The events of each rank, and the weights behind each step."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        events = run_distributed(work, 2, form, str(folder), -1, None, False)
        expected = {}
        for step in range(1, STEPS + 1):
            run_distributed(save_step, 2, form, f"{place}/{step}.ckpt", step)
            expected[step] = dict(whole(f"{place}/{step}.ckpt")["state_dict"])
        return events, expected


def save_step(form: str, path: str, step: int) -> None:
    strategy = SeqParallelStrategy(tp=2, checkpoint=FORMS[form], self_check=False)
    trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=step)
    trainer.fit(models.GPT(), models.loader(4, count=4 * STEPS))
    trainer.save_checkpoint(path)


def trial(form: str, victim: int, at: int, everybody: bool, expected: Any) -> Found:
    """One run that is killed, and what it leaves."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        with suppress(RankFailedError):  # killed, as it should be
            run_distributed(work, 2, form, str(folder), victim, at, everybody, timeout=60)
        found = look(folder, expected) if folder.exists() else Found()
        shutil.rmtree(folder, ignore_errors=True)
        return found


# Written in the background it is the same folder in the same order; make crash tries all of it.
@sees(
    "the marker written first",
    "begin_folder",
    "    unfinished.mkdir(parents=True)\n",
    '    unfinished.mkdir(parents=True)\n    (unfinished / MARKER).write_text(json.dumps({"format": FORMAT}))\n',
    case="sharded",
)
@pytest.mark.parametrize("form", [rest("single"), "sharded", pytest.param("async", marks=pytest.mark.matrix)])
@pytest.mark.more
def test_whatever_is_killed_leaves_the_one_before(form):
    events, expected = uninterrupted(form)
    started = next(at for at, event in enumerate(events[0]) if event.startswith("open step=2"))  # the first is whole
    kinds = {event.split()[0]: at for at, event in reversed([*enumerate(events[0])][started:])}
    assert {"open", "fsync", "rename"} <= kinds.keys()
    moments = [(0, at) for at in kinds.values()]
    if EVERYTHING:
        moments = [(victim, at) for victim in (0, 1) for at in range(len(events[victim]))]
    for victim, at in moments:
        for everybody in (False, True):
            found = trial(form, victim, at, everybody, expected)
            assert not found.wrong, (events[victim][at], found.wrong)
            assert found.whole or EVERYTHING, events[victim][at]
    if form != "single":
        order = [event for event in events[0] if "step=2.ckpt.unfinished" in event]
        marker = next(at for at, event in enumerate(order) if MARKER in event)
        assert all(".distcp" not in event and ".metadata" not in event for event in order[marker:])
