"""A training to which something happens, as a user's script: ``python -m tests.helpers.ill_run``, told by environment variables.

``BAD=what:rank`` is what happens, and on which rank (``every`` for all), at ``PLACE`` (a hook) of batch ``AT``.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.strategy import ending, launcher
from tests.helpers import models
from tests.helpers.fit import quiet_trainer

EARLY = ("setup", "on_fit_start", "on_train_start")
PLACES = (
    *EARLY, "on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_train_batch_end", "on_validation_batch_start", "on_save_checkpoint",
)  # fmt: skip


class Bad(Callback):
    """Strikes once, in the first attempt alone."""

    def __init__(self) -> None:
        self.what, self.rank = os.environ["BAD"].split(":")
        self.place, self.at = os.environ.get("PLACE", "on_train_batch_start"), int(os.environ.get("AT", "2"))
        self.done = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    def __getattribute__(self, name: str) -> Any:
        # It has the one hook in which it strikes: another might be refused (on_after_backward with pp).
        has_it = name in PLACES and name == self.place
        return partial(self.come_by, name) if has_it else super().__getattribute__(name)

    def come_by(self, place: str, trainer: Any, *args: Any, **kwargs: Any) -> None:
        is_due = place in EARLY or trainer.fit_loop.epoch_loop.batch_idx >= self.at
        if place == self.place and is_due and self.rank in (str(trainer.global_rank), "every") and not self.done:
            self.done = True
            os.write(2, f"STRUCK {time.time()}\n".encode())
            strike(self.what, trainer)


def strike(what: str, trainer: Any) -> None:
    if what == "raise":
        raise ValueError("on purpose")
    if what == "exit":
        sys.exit(3)
    if what == "refused":
        trainer.strategy.groups.rank("nowhere")
    if what == "save":
        trainer.save_checkpoint("half.ckpt")
    if what in ("hang", "pause"):
        os.write(1, b"HANGING\n")
        if what == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while True:
            signal.pause()
    if what == "fork":  # as a pool or a data worker that is ended with SIGTERM
        ready, tell = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.write(tell, b"r")
            signal.pause()
        os.read(ready, 1)
        os.kill(worker, signal.SIGTERM)
        os.waitpid(worker, 0)
    if what == "INT":  # as a terminal does
        os.killpg(os.getpgid(0), signal.SIGINT)
    if what in ("KILL", "TERM", "STOP", "USR1"):
        os.kill(os.getpid(), getattr(signal, f"SIG{what}"))


def mine(signum: int, frame: Any) -> None:
    """A handler of the user's."""
    os.write(1, f"MY HANDLER {os.environ['LOCAL_RANK']}\n".encode())
    os._exit(7)


def tell_in_turn() -> None:
    """Rank 0 leaves once rank 1 has told: torchrun ends a rank as soon as it sees that another one left."""
    store, wait = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), ending.await_the_end
    if os.environ["RANK"] == "0":
        atexit.register(store.wait, ["told"])
    ending.await_the_end = lambda: store.set("told", "") or wait()


class Validated(models.GPT):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))


def main() -> None:
    def number(name: str, default: int) -> int:
        return int(os.environ.get(name, default))

    launcher.PUT_OFF = float(os.environ.get("PUT_OFF", launcher.PUT_OFF))
    if "IN_TURN" in os.environ:
        tell_in_turn()
    if "MINE" in os.environ:
        signal.signal(signal.SIGTERM, mine)
    refused: dict[str, Any] = {"plan": [{"pattern": "nowhere", "style": "row"}]} if "REFUSED" in os.environ else {}
    steps, windows, trainings = number("STEPS", 6), number("WINDOWS", 1), number("TRAININGS", 1)
    folder = os.environ.get("FOLDER")
    for training in range(trainings):
        strategy = SeqParallelStrategy(tp=number("TP", 2), pp=number("PP", 1), timeout=number("TIMEOUT", 60), **refused)
        callbacks: list[Callback] = [Bad()] if "BAD" in os.environ and training == trainings - 1 else []
        options: dict[str, Any] = {"limit_val_batches": 0}
        if "VALIDATE" in os.environ:
            options = {"limit_val_batches": 1, "val_check_interval": 3}
        if folder:
            place = os.path.join(folder, str(training)) if trainings > 1 else folder
            saves_at = {"every_n_train_steps": number("EVERY", 100), "save_on_exception": "RAISED" in os.environ}
            callbacks = [*callbacks, ModelCheckpoint(place, save_top_k=-1, **saves_at)]
            options |= {"enable_checkpointing": True, "default_root_dir": folder}
        trainer = quiet_trainer(
            devices=number("WORLD", 2), strategy=strategy, max_steps=steps, callbacks=callbacks,
            accumulate_grad_batches=windows, **options,
        )  # fmt: skip
        module = Validated().double()
        data = models.loader(4, count=4 * steps * windows, shuffle=True)
        trainer.fit(module, data, models.loader(4, count=4), ckpt_path=os.environ.get("RESUME"))
        total = sum(float(p.detach().abs().sum()) for p in module.parameters() if strategy.holds(p))
        os.write(1, f"WEIGHTS {training}.{trainer.global_rank} {total!r}\n".encode())
    if os.environ.get("LATE") and trainer.is_global_zero:
        watch: Any = launcher.ChildWatch.of_this_process
        watch._procs[0][1].wait()
    if os.environ.get("SAVE") and trainer.is_global_zero:
        trainer.save_checkpoint(os.environ["SAVE"])
    if trainer.global_rank == number("AFTER", -1):
        raise ValueError("after fit")


if __name__ == "__main__":
    main()
