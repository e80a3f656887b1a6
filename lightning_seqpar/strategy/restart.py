"""What torchrun starts again goes on where its checkpoints end: they are listed beside each other, run by run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_seqpar.checkpoint.atomic_files import MARKER, UNFINISHED, beside, local_path, write_synced
from lightning_seqpar.strategy.refusals import say

TRAININGS = "LIGHTNING_SEQPAR_TRAININGS"
"""The environment variable with the number of the process's trainings so far."""


class RestartList:
    """The checkpoints that a training under torchrun has written, for its next attempt.

    A file in the Trainer's ``default_root_dir`` lists them, under torchrun's name of the run. Trainings of a script are told apart
    by number, class and how long they train: one that is skipped in the next attempt moves the numbers behind it.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
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

    @staticmethod
    def is_kept() -> bool:
        """Whether torchrun will start this run again if it fails."""
        return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0

    def begin(self) -> None:
        """Forget what another run of the same name wrote; the first rank of a first attempt calls it."""
        self._write([entry for entry in self._read() if entry[0] != self._training])

    def resume(self, rank: int) -> str | None:
        """The checkpoint from which this rank goes on, if torchrun started the run again; None for one that begins."""
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
            if rank == 0:
                self.begin()
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
        try:
            entries: list[list[str]] = json.loads(self._file.read_text())
        except FileNotFoundError:
            return []
        return entries

    def _write(self, entries: list[list[str]]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_synced(beside(self._file, UNFINISHED), lambda file: file.write(json.dumps(entries).encode()))
        beside(self._file, UNFINISHED).replace(self._file)
