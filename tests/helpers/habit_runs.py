"""How the table of habits (``habits.py``) runs at a place, and how what it yields there is compared with one process."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.verify.parity import gather_weights
from tests.helpers import models
from tests.helpers.fit import quiet_trainer

TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "dp2xtp2": (4, {"tp": 2}),
    "fsdp2xtp2": (4, {"tp": 2, "data_parallel": "fsdp"}),
    "cp2": (2, {"cp": 2}),
    "tp2xcp2": (4, {"tp": 2, "cp": 2}),
    "pp2": (2, {"pp": 2}),
}
"""World, and the strategy's sizes."""
LIMIT = 1e-9


@dataclass(frozen=True)
class Place:
    """Where a habit runs: on one process without the strategy, or on the ranks of a topology.

    Attributes:
        topology: a key of :data:`TOPOLOGIES`, or "alone".
        folder: of this habit at this place, the same on all ranks.
        check: whether the plan is proved first.
    """

    topology: str
    folder: str
    check: bool = False

    @property
    def replicas(self) -> int:
        world, sizes = TOPOLOGIES.get(self.topology, (1, {}))
        return world // math.prod(sizes.get(axis, 1) for axis in ("tp", "cp", "pp"))

    def trainer(self, *callbacks: Any, **options: Any) -> L.Trainer:
        """A trainer as a user makes it, for this place; three steps unless told otherwise."""
        fields = options.pop("fields", {})
        world, sizes = TOPOLOGIES.get(self.topology, (1, {}))
        strategy: Any = "auto"
        if sizes:
            strategy = SeqParallelStrategy(**{**sizes, **fields}, self_check=self.check, regather=True)
        if not {"max_epochs", "fast_dev_run"} & options.keys():
            options = {"max_steps": 3, **options}
        options = {"default_root_dir": self.folder, **options}
        return quiet_trainer(devices=world, strategy=strategy, callbacks=list(callbacks), **options)

    def loader(self, count: int = 24, batch: int = 8, seed: int = 3, **more: Any) -> Any:
        """``count`` sequences in batches of ``batch`` over all replicas."""
        return models.loader(batch // self.replicas, count=count, seed=seed, **more)

    def train(
        self, module: L.LightningModule, *callbacks: Any, count: int = 24, val: int = 0, fit: Any = None, **options: Any
    ) -> dict[str, Any]:
        """Train a model; its losses and weights, and the trainer for whoever wants more of it.

        Args:
            module: the model.
            callbacks: the user's.
            count: sequences of an epoch.
            val: sequences to validate on.
            fit: more arguments of ``fit``.
            options: of the trainer.
        """
        seen = self.losses()
        trainer = self.trainer(*callbacks, seen, **options)
        trainer.fit(module, self.loader(count), self.loader(val, seed=5) if val else None, **(fit or {}))
        return {**self.ended(module, seen), "trainer": trainer}

    @staticmethod
    def losses() -> StepLosses:
        """A callback that notes the losses."""
        return StepLosses()

    @staticmethod
    def ended(module: L.LightningModule, seen: StepLosses) -> dict[str, Any]:
        """Losses and weights behind a training."""
        return {"losses": seen.losses, "weights": gather_weights(module)}


class StepLosses(Callback):
    """The loss of each accumulation window, over all replicas, as every rank is given it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._window: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        record = record_of(pl_module)
        if loss is not None:
            # Stages of a pipeline are given the loss of the window where it ends, and that of the one before until then.
            kept = [] if record is not None and record.stage is not None else self._window
            self._window = [*kept, loss.detach().clone()]
        if self._window and not trainer.fit_loop._should_accumulate():
            self.losses.append(float(trainer.strategy.reduce(torch.stack(self._window).sum(), reduce_op="mean")))
            self._window = []


class Learner(models.GPT):
    """What a user has: a loss, metrics, an optimizer with a rate."""

    lr = 0.1

    def __init__(self, optimizer: str = "sgd", **more: Any) -> None:
        super().__init__(tied=False, optimizer=optimizer, **more)

    def loss(self, batch: Any) -> Tensor:
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return super().configure_optimizers()


Yield = dict[str, Any]


@dataclass(frozen=True)
class Habit:
    """A row of the table.

    Attributes:
        name: of the feature.
        written: how a user writes it, as code.
        run: what it does at a place; it returns numbers, strings and tensors to compare.
        refused: the sentence (a regular expression) by which the ranks refuse it that hold shards; by topology if others do.
        remark: for the docs.
        suite: the topologies at which it runs in the suite; at the others it does in ``make parity``.
        left_out: topologies at which it is not compared; the remark says why.
        check: whether the plan is proved first.
        in_stages: the sentence by which the stages of a pipeline refuse it.
    """

    name: str
    written: str
    run: Callable[[Place], Yield]
    refused: str | Mapping[str, str] = ""
    remark: str = ""
    suite: tuple[str, ...] = ("tp2",)
    left_out: tuple[str, ...] = ()
    check: bool = False
    in_stages: str = ""

    @property
    def slug(self) -> str:
        """A name without spaces."""
        return self.run.__name__

    def refusal(self, topology: str) -> str:
        """The sentence at a topology; empty where it works."""
        if topology == "pp2":
            return self.in_stages
        if isinstance(self.refused, Mapping):
            return self.refused.get(topology, "")
        return "" if topology == "cp2" else self.refused  # every rank holds all of each parameter


# ---- comparing ---------------------------------------------------------------------------------------------------


def apart(expected: Any, found: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Where two yields differ, and by how much; infinitely where they can't be compared."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if list(expected) != list(found):
            yield f"{where}: {list(found)} for {list(expected)}", float("inf")
            return
        for key in expected:
            yield from apart(expected[key], found[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(expected) != len(found):
            yield (f"{where}: {len(found)} for {len(expected)}: {str(found)[:200]} for {str(expected)[:200]}", float("inf"))
            return
        for at, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from apart(one, other, f"{where}/{at}")
    elif isinstance(expected, float | Tensor) and isinstance(found, float | Tensor):
        one, other = torch.as_tensor(expected).double(), torch.as_tensor(found).double()
        if one.shape != other.shape:
            yield f"{where}: {list(other.shape)} for {list(one.shape)}", float("inf")
        elif one.numel():
            error = float((one - other).abs().nan_to_num(float("inf")).max() / one.abs().max().clamp_min(1.0))
            yield where, error if error == error else float("inf")
    elif expected != found:
        yield f"{where}: {str(found)[:300]} for {str(expected)[:300]}", float("inf")


def judge(habit: Habit, topology: str, expected: Yield | str, found: Yield | str) -> tuple[str, float]:
    """What is wrong with what a rank found (empty if nothing is), and the largest error."""
    sentence = habit.refusal(topology)
    if sentence:
        refused = isinstance(found, str) and re.search(sentence, found, re.S)
        return ("" if refused else f"not refused by {sentence!r}: {str(found)[:1500]}"), 0.0
    if isinstance(expected, str):
        return f"one process: {expected}", float("inf")
    if isinstance(found, str):
        return found, float("inf")
    errors = sorted(apart(expected, found), key=lambda one: -one[1])
    worst = errors[0][1] if errors else 0.0
    wrong = [f"{where}: {error:.1e}" for where, error in errors if not error <= LIMIT]
    return "\n".join(wrong[:6]), worst
