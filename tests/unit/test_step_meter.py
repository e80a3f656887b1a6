"""The meter of one training batch: what it says when that batch never came, and that it always stops counting."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_seqpar.distributed.autograd import dispatch_modes, saved_tensor_hooks
from lightning_seqpar.measure import StepMeter
from tests.helpers.fit import quiet_trainer
from tests.mutants import sees

FIGURES = ("saved_bytes", "calls", "bytes", "backend_calls", "backend_bytes")
ROWS, FEATURES = 2, 4


class Small(L.LightningModule):
    """One linear; ``at`` is the batch at which ``what`` happens."""

    def __init__(self, what: str = "", at: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 1, bias=False)
        self.what, self.at = what, at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.what == "skip" and batch_idx == self.at else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.layer(batch).square().mean()
        if batch_idx == self.at and self.what == "raise":
            raise ZeroDivisionError
        return None if batch_idx == self.at and self.what == "no loss" else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(meter: StepMeter, module: L.LightningModule, batches: int, epochs: int = 1) -> None:
    data = torch.utils.data.DataLoader([torch.ones(FEATURES)] * (ROWS * batches), batch_size=ROWS)
    quiet_trainer(devices=1, max_epochs=epochs, precision="32-true", callbacks=[meter]).fit(module, data)


@sees(
    "figures of a batch that never came are zeros",
    "StepMeter._read",
    "        raise RuntimeError(\n",
    "        return _StepFigures(0, {}, {}, {}, {})\n        raise RuntimeError(\n",
    case="saved_bytes",
)
@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_before_any_batch_says_what_to_do(figure):
    meter = StepMeter(batch=3)
    assert not meter.measured
    with pytest.raises(
        RuntimeError,
        match=r"StepMeter\(batch=3\) has measured nothing: it waited for the training batch with index 3 of an epoch "
        r"\(0-based\), and no training batch has ended yet; give the meter to the Trainer's callbacks, and read it when fit",
    ):
        getattr(meter, figure)


@pytest.mark.parametrize("figure", FIGURES)
def test_a_batch_that_never_came_says_how_many_did(figure):
    meter = StepMeter(batch=3)
    fit(meter, Small(), batches=3, epochs=2)  # six batches, but none with index 3 of an epoch
    assert not meter.measured
    with pytest.raises(
        RuntimeError,
        match=r"index 3 of an epoch \(0-based\), and 6 ended, of which the highest index in an epoch was 2; "
        r"use StepMeter\(batch=2\) or less, or let an epoch have 4 batches or more",
    ):
        getattr(meter, figure)


class Selective(Small):
    """Its product is cached by a selective checkpoint, and the rest recomputed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        saves = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        return checkpoint(lambda x: self.layer(x).square(), batch, use_reentrant=False, context_fn=saves).mean()


@sees(
    "recompute: what a selective checkpoint caches is not counted",
    "SavedBytes.keep_caches",
    "            self.keep(tensor)\n",
    "            pass\n",
)
def test_what_a_selective_checkpoint_caches_counts():
    meter = StepMeter(batch=1)
    fit(meter, Selective(), batches=2)
    assert meter.saved_bytes == 4 * (ROWS * FEATURES + ROWS)  # its input, and what is cached


@sees(
    "an error in the measured batch leaves the counters on",
    "StepMeter.on_exception",
    "        self._stop()\n",
    "        pass\n",
    case="raise",
)
@pytest.mark.parametrize("what", ["raise", "skip", "no loss"])
def test_counting_stops_however_the_batch_ends(what):
    module, meter = Small(what, at=1), StepMeter(batch=1)
    if what == "raise":
        with pytest.raises(ZeroDivisionError):
            fit(meter, module, batches=3)
    else:
        fit(meter, module, batches=3)
    assert dispatch_modes() == [], "no count of collectives is left on"
    assert saved_tensor_hooks() is None, "no count of kept bytes is left on"
    if what == "no loss":
        assert meter.saved_bytes == 4 * (ROWS * FEATURES + ROWS), "of the forward of that batch, and of no later one"
    else:
        with pytest.raises(RuntimeError, match="and 1 ended, of which the highest index in an epoch was 0"):
            _ = meter.calls
