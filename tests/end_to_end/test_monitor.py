"""The callback that logs speed, traffic, memory and the gradient's norm: its numbers, what they cost, and when they come."""

from __future__ import annotations

import contextlib
import csv
import pickle
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_seqpar import SeqParallelMonitor, SeqParallelStrategy
from lightning_seqpar.distributed.autograd import dispatch_modes
from lightning_seqpar.measure import StepMeter
from lightning_seqpar.testing import RankFailedError, run_distributed
from tests.helpers import models
from tests.helpers.fit import class_named, quiet_trainer
from tests.helpers.host_waits import WaitsOfSteps
from tests.mutants import sees

NAMES = {f"seqpar/{name}" for name in (
    "tokens_per_second", "samples_per_second", "step_seconds", "bytes_sent_per_step", "memory_gib_max", "memory_gib_min",
    "grad_norm", "parameters_gib", "gradients_gib", "optimizer_gib",
)}  # fmt: skip
PEAK = 1e9
LENGTH = 10


class Rows(Logger):
    """Keeps what is logged by its step; ``came`` has how many batches had begun when it came."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}
        self.came: dict[int, int] = {}
        self.begun = 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        assert step not in self.rows
        self.rows[step], self.came[step] = metrics, self.begun


class Begins(Callback):
    """Tells the rows of each batch that begins."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.logger.begun += 1


def logged(
    strategy: Any,
    model: str = "GPT",
    given: dict[str, Any] | None = None,
    *,
    every: int = 2,
    batch: int = 8,
    peak: float | None = None,
    **options: Any,
) -> Rows:
    """Train with a monitor; what it logged."""
    rows = Rows()
    ours = isinstance(strategy, dict)
    trainer = quiet_trainer(
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy=SeqParallelStrategy(self_check=False, **strategy) if ours else strategy,
        callbacks=[SeqParallelMonitor(every, peak_flops=peak), Begins()],
        **{"max_steps": 4, "gradient_clip_val": 0.1, "logger": rows, **options},
    )
    trainer.fit(class_named(model)(**(given or {})), models.loader(batch, length=LENGTH, count=192))
    return rows


def norms(rows: Rows) -> list[float]:
    return [row["seqpar/grad_norm"] for row in rows.rows.values()]


def counted(rows: Rows, what: str) -> list[float]:
    """How many tokens or samples a step had, of the rate and the time of a step."""
    return [row[f"seqpar/{what}_per_second"] * row["seqpar/step_seconds"] for row in rows.rows.values()]


TWO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp": ({"tp": 2}, {}),
    "cp": ({"cp": 2}, {}),
    "pp": ({"pp": 2}, {"batch": 4, "accumulate_grad_batches": 2}),
    "virtual pp": ({"pp": 2, "virtual_pp": 2}, {"batch": 4, "accumulate_grad_batches": 2}),
    "dp": ({}, {"batch": 2, "accumulate_grad_batches": 2}),
}
FOUR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp x tp": ({"tp": 2}, {"batch": 4}),
    "fsdp x tp": ({"tp": 2, "data_parallel": "fsdp"}, {"batch": 4}),
}


def logged_in_turn(cases: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Rows]:
    return {name: logged(strategy, given={"layers": 4}, peak=PEAK, **more) for name, (strategy, more) in cases.items()}


def flops(rows: Rows, ranks: int) -> list[float]:
    """Of each logged step."""
    all_rows = rows.rows.values()
    return [row["seqpar/model_flops_utilization"] * row["seqpar/step_seconds"] * PEAK * ranks for row in all_rows]


@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (4, FOUR)])
def test_numbers_are_those_of_one_process(world, cases):
    alone = logged("auto", given={"layers": 4}, peak=PEAK)
    expected, numel = norms(alone), sum(p.numel() for p in models.GPT(layers=4).parameters())
    assert [row["seqpar/parameters_gib"] * 2**30 for row in alone.rows.values()] == [8 * numel] * 2
    assert [row["seqpar/gradients_gib"] * 2**30 for row in alone.rows.values()] == [8 * numel] * 2
    assert alone.rows[3]["seqpar/optimizer_gib"] * 2**30 == pytest.approx(16 * numel, rel=1e-2)  # and numbers of steps
    assert len(expected) == 2
    assert min(expected) > 0.2, "before it is clipped to 0.1"
    first, *others = run_distributed(logged_in_turn, world, cases)
    for name, rows in first.items():
        assert list(rows.rows) == [1, 3], name  # as Lightning numbers steps
        assert norms(rows) == pytest.approx(expected, rel=1e-9), name
        # Of the last blocks; attention over cp has other formulas.
        # A vocabulary over tp has a row of padding; attention over cp runs other operators, of which torch knows no formula.
        error = 1e-12 if name in ("dp", "pp", "virtual pp") else 1e-2 if name == "cp" else 2e-3
        assert flops(rows, world) == pytest.approx(flops(alone, 1), rel=error), name
        assert counted(rows, "samples") == pytest.approx([8, 8], rel=1e-12), name
        assert counted(rows, "tokens") == pytest.approx([8 * LENGTH] * 2, rel=1e-12), name
        for row in rows.rows.values():
            assert row.keys() == NAMES | {"seqpar/model_flops_utilization"}, name
            assert row["seqpar/parameters_gib"] < alone.rows[3]["seqpar/parameters_gib"] or name in ("cp", "dp"), name
            assert 0 < row["seqpar/memory_gib_min"] <= row["seqpar/memory_gib_max"] < 64, name
            assert row["seqpar/bytes_sent_per_step"] > 0, name
    for other in others:
        assert all(rows.rows == {} for rows in other.values()), "rank 0 alone logs"


def measured(every: int | None, at: int, *more: Callback) -> tuple[dict[str, int], int, Rows]:
    """The collectives of batch ``at`` with a monitor that logs so often, or without one; their bytes; and what was logged."""
    rows, meter = Rows(), StepMeter(batch=at)
    monitors = [] if every is None else [SeqParallelMonitor(every)]
    trainer = quiet_trainer(
        devices=2,
        strategy=SeqParallelStrategy(tp=2, self_check=False),
        max_steps=at + 3,
        logger=rows,
        callbacks=[*more, meter, Begins(), *monitors],
    )
    trainer.fit(models.GPT(), models.loader(2, count=192))
    return meter.calls, sum(meter.bytes.values()), rows


def measured_in_turn() -> tuple[Any, ...]:
    waits = WaitsOfSteps()
    *_, rows = measured(2, 17, waits)
    return measured(None, 17), measured(4, 17), measured(6, 17), (waits.waits.found, rows.came)


@sees(
    "a callback that only reads gradients has them compared in every step",
    "_may_change_gradients",
    'not vars(owner).get("only_reads_gradients", False)',
    "True",
)
@pytest.mark.more
def test_what_it_costs_and_when_it_logs():
    """At steps that are not logged the ranks exchange nothing more; at those that are, what it exchanges itself is not counted."""
    (calls, sent, _), (beside, _, _), (_, _, rows), (waits, came) = run_distributed(measured_in_turn, 2)[0]
    assert beside == calls
    assert rows.rows[17]["seqpar/bytes_sent_per_step"] == sent > 0
    assert [found for found in waits if "monitor.py" in found] == []
    assert came == {**{step: step + 2 for step in range(1, 18, 2)}, 19: 20}, "a step later, and the last at the end"


class Clips(SeqParallelMonitor):
    """Changes what it should only read, in a step in which no check is due: torch's clipping knows this rank's parts alone."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 18:
            torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1e-3)


def clipping_on_instance() -> SeqParallelMonitor:
    """The same by a hook that stands on the instance, in place of the class's."""
    monitor = SeqParallelMonitor()
    vars(monitor)["on_before_optimizer_step"] = Clips().on_before_optimizer_step
    return monitor


def fit_clipping(make: Any) -> None:
    trainer = quiet_trainer(
        devices=2, strategy=SeqParallelStrategy(tp=2, self_check=False), max_steps=20, logger=Rows(), callbacks=[make()]
    )
    trainer.fit(models.GPT(), models.loader(4, count=96))


@sees(
    "a callback that changes gradients passes for the class that it derives from, which only reads them",
    "_may_change_gradients",
    'not vars(owner).get("only_reads_gradients", False)',
    'not getattr(callback, "only_reads_gradients", False)',
    case="Clips",
)
@pytest.mark.parametrize("make", [Clips, clipping_on_instance])
def test_a_callback_that_derives_from_one_that_only_reads_speaks_for_itself(make):
    with pytest.raises(RankFailedError, match=r"gradients were clipped by torch\.nn\.utils\.clip_grad"):
        run_distributed(fit_clipping, 2, make)


def test_other_strategies():
    alone = logged("auto", batch=4)
    beside = run_distributed(logged, 2, "ddp", batch=4, use_distributed_sampler=False)[0]  # both ranks read the same
    assert norms(beside) == pytest.approx(norms(alone), rel=1e-9)
    for rows, replicas in ((alone, 1), (beside, 2)):
        assert [row.keys() for row in rows.rows.values()] == [NAMES] * 2
        assert counted(rows, "samples") == pytest.approx([4 * replicas] * 2, rel=1e-12)
        assert counted(rows, "tokens") == pytest.approx([4 * replicas * LENGTH] * 2, rel=1e-12)
    # Once for every replica, as DDP reduces them.
    parameters = sum(p.numel() for p in models.GPT().parameters())
    assert [row["seqpar/bytes_sent_per_step"] for row in alone.rows.values()] == [0, 0]
    assert beside.rows[3]["seqpar/bytes_sent_per_step"] == 8 * parameters


@pytest.mark.more
def test_manual_optimization():
    given = {"model": "ManualTwo", "given": {"style": "leak"}, "gradient_clip_val": None}
    expected = logged("auto", **given)
    rows = run_distributed(logged, 2, {"tp": 2}, **given)[0]
    assert norms(rows) == pytest.approx(norms(expected), rel=1e-9)
    assert list(rows.rows) == [1]  # Lightning counts four steps of two optimizers each in two batches


class Small(L.LightningModule):
    """A linear that reads no batch; ``at`` is the batch at which ``what`` happens."""

    def __init__(self, what: str = "", at: int = -1, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.what, self.at, self.fused = what, at, fused

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.what == "skip" and batch_idx == self.at else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.what == "raise" and batch_idx == self.at:
            raise ZeroDivisionError
        return self.layer(torch.ones(1, 4, device=self.device)).square().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.trainer.logger.seconds += 1000  # type: ignore[union-attr]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=self.fused)


def fit_small(module: Small, batches: list[Any], *callbacks: Callback, every: int = 1, **options: Any) -> Rows:
    rows = Rows()
    callbacks = (SeqParallelMonitor(every), Begins(), *callbacks)
    trainer = quiet_trainer(devices=1, max_epochs=1, logger=rows, callbacks=[*callbacks], **options)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return rows


IDS, MASK, WIDE = torch.zeros(2, 5, dtype=torch.int32), torch.ones(2, 9, dtype=torch.bool), torch.zeros(3, 4, 6)


@pytest.mark.parametrize(
    ("batch", "tokens", "samples"),
    [
        ({"x": WIDE, "few": IDS[:, :3], "mask": MASK, "ids": IDS}, 10, 2),
        ([MASK[0], WIDE], 12, 3),
        (torch.zeros(7), None, 7),
        ({"text": "no tensor"}, None, None),
    ],
)
def test_what_counts_as_a_token(batch, tokens, samples):
    rows = fit_small(Small(), [batch] * 2)
    for what, count in (("tokens", tokens), ("samples", samples)):
        if count is None:
            assert all(f"seqpar/{what}_per_second" not in row for row in rows.rows.values())
        else:
            assert counted(rows, what) == pytest.approx([count] * 2, rel=1e-12)


def test_batches_of_all_steps_since_the_last_time_count():
    batches = [torch.zeros(1, size) for size in (1, 2, 3, 4, 5, 6, 7)]
    rows = fit_small(Small(), batches, every=2, accumulate_grad_batches=2)
    assert list(rows.rows) == [1, 3]
    assert counted(rows, "tokens") == pytest.approx([10 / 2, 18 / 2], rel=1e-12)  # the last step has one batch


def test_validations_take_no_time(monkeypatch):
    rows = Rows()
    rows.seconds = 0.0

    def clock() -> float:
        rows.seconds += 1e-3
        return rows.seconds

    monkeypatch.setattr(time, "perf_counter", clock)
    trainer = quiet_trainer(devices=1, max_epochs=2, val_check_interval=1, logger=rows, callbacks=[SeqParallelMonitor(1)])
    trainer.fit(Small(), DataLoader([IDS] * 2, batch_size=None), DataLoader([IDS], batch_size=None))
    assert rows.seconds > 4000
    assert len(rows.rows) == 4
    assert all(0 < row["seqpar/step_seconds"] < 1 for row in rows.rows.values())


def test_the_trainers_steps_and_a_loggers_columns(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = quiet_trainer(devices=1, max_epochs=1, logger=logger, log_every_n_steps=3, callbacks=[SeqParallelMonitor()])
    trainer.fit(Small(), DataLoader([IDS] * 7, batch_size=None))
    with (tmp_path / "metrics.csv").open() as file:
        written = list(csv.DictReader(file))
    assert {*written[0]} == NAMES | {"step"}
    assert [row["step"] for row in written] == ["2", "5"]


def test_gradients_that_a_fused_optimizer_unscales():
    expected = norms(fit_small(Small(), [IDS] * 2))
    assert expected[0] > 0
    for fused in (False, True):
        scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
        rows = fit_small(Small(fused=fused), [IDS] * 2, precision=None, plugins=[scaled])
        assert norms(rows) == pytest.approx(expected, rel=1e-2), f"fused={fused}"


class Pickles(Callback):
    """Pickles the monitor while it measures, and keeps what comes out."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.copy = pickle.loads(pickle.dumps(trainer.callbacks[0]))


def test_copies_measure_anew():
    pickles = Pickles()
    fit_small(Small(), [IDS] * 2, pickles, every=2)
    rows = Rows()
    quiet_trainer(devices=1, max_steps=2, logger=rows, callbacks=[pickles.copy]).fit(
        Small(), DataLoader([IDS] * 2, batch_size=None)
    )
    assert list(rows.rows) == [1]


@pytest.mark.parametrize("what", ["raise", "skip"])
def test_counting_stops_however_a_batch_ends(what):
    with pytest.raises(ZeroDivisionError) if what == "raise" else contextlib.nullcontext():
        fit_small(Small(what, at=1), [IDS] * 3)
    assert dispatch_modes() == [], "no count of collectives is left on"


def disagree() -> None:
    logged({"tp": 2}, every=1 + dist.get_rank())


def test_refusals():
    with pytest.raises(ValueError, match=r"SeqParallelMonitor\(every_n_steps=0\): give 1 or more, or None"):
        SeqParallelMonitor(0)
    with pytest.raises(ValueError, match=r"SeqParallelMonitor with Trainer\(logger=False\): there is nothing to log to"):
        logged("auto", logger=False)
    with pytest.raises(RankFailedError, match="every_n_steps of SeqParallelMonitor is 1 on rank 0 and 2 on rank 1"):
        run_distributed(disagree, 2)


def test_a_snapshot_of_one_step(monkeypatch, tmp_path):
    """torch records on CUDA alone: what it is asked for, and when."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled="all", **more: asked.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: asked.append(Path(file).relative_to(tmp_path)))
    monitor = SeqParallelMonitor(1, snapshot_step=1, snapshot_folder=tmp_path / "memory")
    monitor.setup = lambda *args, **kwargs: None  # which refuses this on a CPU
    trainer = quiet_trainer(
        devices=1, max_epochs=1, logger=Rows(), callbacks=[monitor, Begins()], accumulate_grad_batches=2, limit_train_batches=6
    )
    trainer.fit(Small(), DataLoader([IDS] * 6, batch_size=None))
    assert asked == ["all", Path("memory/memory-step1-rank0.pickle"), None]
    with pytest.raises(ValueError, match=r"snapshot_step=1\): torch records memory on CUDA, and this run is on cpu"):
        fit_small(Small(), [IDS], SeqParallelMonitor(1, snapshot_step=1))
    for wrong in ({"snapshot_step": -1}, {"peak_flops": 0.0}):
        with pytest.raises(ValueError, match="SeqParallelMonitor"):
            SeqParallelMonitor(**wrong)


class Multiplies(Small):
    """Its optimizer multiplies matrices."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *args: torch.ones(64, 64) @ torch.ones(64, 64))
        return optimizer


def test_the_products_of_an_update_are_none_of_the_models():
    rows = Rows()
    trainer = quiet_trainer(devices=1, max_epochs=1, logger=rows, callbacks=[SeqParallelMonitor(1, peak_flops=PEAK)])
    trainer.fit(Multiplies(), DataLoader([IDS] * 3, batch_size=None))
    assert flops(rows, 1) == pytest.approx([3 * 2 * 4] * 3, rel=1e-9)
