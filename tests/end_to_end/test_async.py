"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.checkpoint import folder
from lightning_seqpar.checkpoint.atomic_files import UNFINISHED, SaveError
from lightning_seqpar.testing import run_distributed
from tests.helpers import models
from tests.helpers.checkpoints import same, whole
from tests.helpers.fit import quiet_trainer
from tests.mutants import sees


class Held(Callback):
    """Holds the background's writing back until a step has been trained; breaks the write of this number."""

    def __init__(self, until: int, *, breaks: int = 0) -> None:
        self.until, self.breaks, self.trained, self.written_at = until, breaks, 0, []
        self.open, self.write = threading.Event(), folder.save

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        folder.save = self.held

    def held(self, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.open.wait(60)
            self.written_at.append(self.trained)
            if len(self.written_at) == self.breaks and dist.get_rank() == 1:
                kwargs["planner"].create_local_plan = self.full
        self.write(*args, **kwargs)

    def full(self) -> Any:
        raise OSError(28, "No space left on device")

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.trained = trainer.global_step
        if self.trained >= self.until:
            self.open.set()

    def on_exception(self, *args: Any) -> None:
        self.open.set()

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        folder.save = self.write


def fit(folder: str, held: Callback | None, async_save: bool = True, steps: int = 6, **saver: Any) -> tuple[Any, Any]:
    options = {"filename": "{step}", "every_n_train_steps": 4, "save_top_k": -1, **saver}
    strategy = SeqParallelStrategy(tp=2, checkpoint={"format": "sharded", "async_save": async_save})
    trainer = quiet_trainer(
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=steps,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, **options), *([held] if held else [])],
    )
    module = models.GPT()
    return trainer, lambda: trainer.fit(module, models.loader(4, count=48))


def names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def overlap(folder: str) -> list[int]:
    held = Held(until=6)
    _, train = fit(f"{folder}/async", held)
    train()
    _, train = fit(f"{folder}/awaited", None, async_save=False)
    train()
    return held.written_at


@sees(
    "what is written meanwhile is no copy",
    "Part.frozen",
    'offsets: (piece.to("cpu", copy=True), True)',
    "offsets: (piece, True)",
)
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    """Its numbers are those of its own step, bitwise."""
    for written_at in run_distributed(overlap, 4, str(tmp_path)):
        assert written_at == [6]
    a, b = whole(tmp_path / "async" / "step=4.ckpt"), whole(tmp_path / "awaited" / "step=4.ckpt")
    assert a.keys() == b.keys()
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "lightning_seqpar"):
        assert same(a[part], b[part]), part


def failing(folder: str, every: int) -> tuple[str, str, int, list[str]]:
    held = Held(until=1, breaks=2)
    # One is kept: where the second checkpoint fails the first one stays.
    trainer, train = fit(folder, held, steps=6, every_n_train_steps=every, save_top_k=1, monitor="step", mode="max")
    with warnings.catch_warnings(record=True) as seen, pytest.raises(SaveError) as caught:
        warnings.simplefilter("always")
        train()
    trainer.strategy.barrier()
    told = [str(one.message) for one in seen if "can't be written" in str(one.message)]
    return str(caught.value), told[0] if told else "", held.trained, names(folder)


@sees(
    "an older checkpoint goes before the new one is whole",
    "Background.afterwards",
    "        if saving is None or self._thread is None:\n",
    "        if True:\n",
    case="at the next checkpoint",
)
@sees(
    "training ends before its last checkpoint is written",
    "Saver.end_training",
    "        self.trains = False\n        self._background.wait()\n",
    "        self.trains = False\n",
    case="at the end",
)
@pytest.mark.parametrize(("every", "at"), [(1, 3), (3, 6)], ids=["at the next checkpoint", "at the end"])
def test_a_failure_is_told_at_once_and_ends_every_rank(tmp_path, every, at):
    (one, warned, trained, left), (other, *_) = run_distributed(failing, 2, str(tmp_path), every)
    assert one == other
    assert one.endswith(f"step={2 * every}.ckpt can't be written: rank 1: [Errno 28] No space left on device")
    assert "the run ends where its next checkpoint would be written, or at its end" in warned
    assert trained == at
    assert left == [f"step={every}.ckpt", f"step={2 * every}.ckpt{UNFINISHED}"]


def kept(folder: str) -> None:
    options = {"every_n_train_steps": 1, "monitor": "step", "mode": "max"}
    trainer, train = fit(f"{folder}/held", Held(until=2), steps=4, save_top_k=1, **options)
    train()
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    assert (Path(folder) / "after.ckpt" / "seqpar.json").exists()
    _, train = fit(f"{folder}/last", None, steps=4, save_top_k=1, save_last=True, **options)
    train()


@pytest.mark.more
def test_removals_wait_their_turn(tmp_path):
    """What goes, goes behind what comes."""
    run_distributed(kept, 2, str(tmp_path))
    assert {name: whole(tmp_path / "last" / name)["global_step"] for name in names(tmp_path / "last")} == {
        "last.ckpt": 4,
        "step=4.ckpt": 4,
    }


class Boom(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            raise ArithmeticError("of the user's")


def ended(folder: str) -> None:
    held = Held(until=99)
    trainer, train = fit(folder, held, every_n_train_steps=2)
    trainer.callbacks.insert(0, Boom())
    with pytest.raises(ArithmeticError):
        train()


def test_a_run_that_ends_by_an_error_ends_its_checkpoint(tmp_path):
    run_distributed(ended, 2, str(tmp_path))
    assert names(tmp_path) == ["step=2.ckpt"]
    assert whole(tmp_path / "step=2.ckpt")["global_step"] == 2


def linked(folder: str) -> str:
    _, train = fit(folder, None, save_last="link")
    with pytest.raises(ValueError, match="save_last='link'") as caught:
        train()
    return str(caught.value)


def test_a_link_to_what_is_not_whole_is_refused(tmp_path):
    assert "use save_last=True, or async_save: false" in run_distributed(linked, 2, str(tmp_path))[1]
    assert not names(tmp_path)
