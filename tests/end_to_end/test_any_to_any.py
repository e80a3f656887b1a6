"""Checkpoints of any topology and form, of plain Lightning and of DDP, resumed at any other."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.checkpoint.convert import open_source, write_checkpoint
from lightning_seqpar.releases import MUON
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import FLOAT64_TOLERANCE, ParityRecorder, Trace
from tests.helpers import models
from tests.helpers.checkpoints import FORMS, Counting, Two, same, whole
from tests.helpers.fit import quiet_trainer
from tests.mutants import sees

BATCHES = 3  # of an epoch; saved behind it, and resumed for another
OPTIMIZERS = ("adamw", "sgd", "several")


@dataclass(frozen=True)
class Place:
    """A way to train: ``kind`` is ours or a strategy of Lightning's."""

    world: int
    tp: int
    form: str
    kind: str = "ours"
    cp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        if self.kind in ("plain", "ddp"):
            return self.kind
        more = f"-cp{self.cp}" * (self.cp > 1) + f"-pp{self.pp}" * (self.pp > 1)
        return f"tp{self.tp}{more}-{'dp' if self.kind == 'ours' else self.kind}{self.replicas}-{self.form}"

    @property
    def replicas(self) -> int:
        """How many read other samples."""
        return self.world // (self.tp * self.cp * self.pp)


SIZES = ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))
CONTEXT = ((1, "single", "ours"), (2, "sharded", "ours"), (1, "sharded", "fsdp"), (2, "single", "fsdp"))
STAGES = ((2, "single", "ours"), (2, "sharded", "ours"), (1, "async", "ours"), (1, "single", "fsdp"), (1, "sharded", "fsdp"))
PLACES = {
    str(place): place
    for place in (
        Place(1, 1, "single", "plain"),
        Place(2, 1, "single", "ddp"),
        *(Place(world, tp, form) for world, tp in SIZES for form in ("single", "sharded")),
        Place(4, 2, "async"),
        *(Place(4, tp, form, "fsdp") for tp in (1, 2) for form in ("single", "sharded", "async")),
        *(Place(4, tp, form, kind, 2) for tp, form, kind in CONTEXT),
        *(Place(4, tp, form, kind, pp=2) for tp, form, kind in STAGES),
        *(Place(4, 1, form, "hsdp") for form in ("single", "sharded")),
    )
}


class Several(models.GPT):
    """Two optimizers of two kinds with a scheduler each, one of them with two param groups."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            scheduler.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        blocks = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        inside = {id(p) for p in blocks}
        rest = [p for p in self.parameters() if id(p) not in inside]
        wide, narrow = ([p for p in rest if (p.ndim > 1) is wide] for wide in (True, False))
        both = [
            MUON[0](blocks, lr=0.02) if MUON else torch.optim.AdamW(blocks, lr=0.02, weight_decay=0.1),
            torch.optim.SGD([{"params": wide, "momentum": 0.9}, {"params": narrow, "lr": 0.02}], lr=0.05),
        ]
        return both, [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in both]


class SaveAtStart(Callback):
    """Saves what was restored, before anything is trained."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self.path is not None:
            trainer.save_checkpoint(self.path)


@dataclass
class Job:
    """One run: from the start, or from a checkpoint that is saved again as it was restored."""

    place: Place
    optimizer: str
    epochs: int
    ckpt: str | None = None
    again: str | None = None
    save: str | None = None


def run(job: Job) -> tuple[Trace, Any]:
    place, each = job.place, 2 if job.optimizer == "several" else 1  # Lightning counts the steps of every optimizer
    ours = SeqParallelStrategy(
        tp=place.tp,
        cp=place.cp,
        pp=place.pp,
        checkpoint=FORMS[place.form],
        self_check=False,
        data_parallel=place.kind if place.kind in ("fsdp", "hsdp") else "ddp",
        fsdp={"shard_size": 2} if place.kind == "hsdp" else None,
    )
    recorder, counting = ParityRecorder(), Counting()
    callbacks: list[Callback] = [recorder, counting, SaveAtStart(job.again)]
    if job.save is not None:
        path, every = Path(job.save), BATCHES * each
        callbacks.append(ModelCheckpoint(path.parent, filename=path.stem, every_n_train_steps=every, save_top_k=-1))
    trainer = quiet_trainer(
        devices=place.world,
        strategy={"plain": "auto", "ddp": "ddp"}.get(place.kind, ours),
        max_steps=BATCHES * each * job.epochs,
        callbacks=callbacks,
        enable_checkpointing=job.save is not None,
        use_distributed_sampler=place.kind not in ("plain", "ddp"),
    )
    module = (Several() if job.optimizer == "several" else Two(optimizer=job.optimizer)).double()
    if place.kind == "ddp" and job.optimizer != "several":
        module.model.norm.weight.requires_grad_(False)  # before configure_optimizers does: DDP has counted it by then
    data = models.loader(8 // place.replicas, count=8 * BATCHES)
    if place.kind == "ddp":  # Lightning's own sampler would shuffle
        data = DataLoader(data.dataset, 4, sampler=DistributedSampler(data.dataset, shuffle=False))
    trainer.fit(module, data, ckpt_path=job.ckpt)
    return recorder.trace, counting.seen


def run_all(jobs: list[Job]) -> list[tuple[Trace, Any]]:
    """The jobs of one world, in turn."""
    return [run(job) for job in jobs]


def launch(jobs: list[Job]) -> list[tuple[Trace, Any]]:
    """What the first rank saw of each."""
    found: dict[int, tuple[Trace, Any]] = {}
    for world in sorted({job.place.world for job in jobs}):
        chosen = [at for at, job in enumerate(jobs) if job.place.world == world]
        # A few at a time: gloo's groups keep threads, which wake a hundred times a second, until their process ends.
        for few in (chosen[first : first + 4] for first in range(0, len(chosen), 4)):
            results = run_distributed(run_all, world, [jobs[at] for at in few], timeout=300)[0]
            found.update(zip(few, results, strict=True))
    return [found[at] for at in range(len(jobs))]


@functools.cache
def uninterrupted(optimizer: str) -> tuple[Trace, Any]:
    return launch([Job(PLACES["plain"], optimizer, epochs=2)])[0]


@functools.cache
def started(sources: tuple[tuple[str, str], ...]) -> tempfile.TemporaryDirectory[str]:
    """A checkpoint of each place and optimizer."""
    place = tempfile.TemporaryDirectory()
    launch([Job(PLACES[name], kind, epochs=1, save=f"{place.name}/{name}-{kind}.ckpt") for name, kind in sources])
    return place


@functools.cache
def resumed(target: str, sources: tuple[tuple[str, str], ...]) -> tuple[str, dict[tuple[str, str], tuple[Trace, Any]]]:
    """Every source's checkpoint, restored at one place, saved and trained further."""
    folder = started(sources).name
    jobs = []
    for name, kind in sources:
        ckpt, again = Path(f"{folder}/{name}-{kind}.ckpt"), f"{folder}/{name}-{kind}-at-{target}.ckpt"
        if PLACES[target].kind in ("plain", "ddp") and ckpt.is_dir():  # what plain Lightning can't read is converted
            one = ckpt.with_suffix(".one")
            if not one.exists():
                write_checkpoint(open_source(ckpt), one, "single")
            ckpt = one
        jobs.append(Job(PLACES[target], kind, 2, str(ckpt), again))
    return folder, dict(zip(sources, launch(jobs), strict=True))


def check(source: str, target: str, optimizer: str, sources: tuple[tuple[str, str], ...]) -> None:
    """Bitwise after a round trip; and training goes on as if nothing had happened."""
    folder, runs = resumed(target, sources)
    a = whole(f"{folder}/{source}-{optimizer}.ckpt")
    b = whole(f"{folder}/{source}-{optimizer}-at-{target}.ckpt")
    assert a["global_step"] == BATCHES * (2 if optimizer == "several" else 1)
    assert len(a["optimizer_states"]) == len(a["lr_schedulers"]) == (2 if optimizer == "several" else 1)
    assert any(entry for one in a["optimizer_states"] for entry in one["state"].values())
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert same(a[part], b[part]), part
    assert list(a["state_dict"]) == list(b["state_dict"])
    assert same(a["callbacks"]["Counting"], b["callbacks"]["Counting"])
    trace, seen = runs[source, optimizer]
    expected, counted = uninterrupted(optimizer)
    assert trace.losses == pytest.approx(expected.losses[BATCHES:], rel=FLOAT64_TOLERANCE)
    assert trace.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(trace.weights[name], weight, rtol=0, atol=FLOAT64_TOLERANCE)
    assert torch.equal(seen, counted)


SLICE = (
    ("tp2-dp2-sharded", "tp4-dp1-sharded", "adamw"),
    ("tp4-dp1-sharded", "tp1-dp2-single", "several"),
    ("tp2-dp2-single", "plain", "several"),
    ("plain", "tp2-dp2-sharded", "adamw"),
    ("tp2-dp2-async", "ddp", "adamw"),
    ("tp2-fsdp2-sharded", "tp1-fsdp4-single", "several"),
    ("tp4-dp1-sharded", "tp2-fsdp2-sharded", "sgd"),
    ("plain", "tp2-fsdp2-single", "several"),
    ("tp2-cp2-dp1-sharded", "plain", "adamw"),
    ("tp1-fsdp4-single", "tp2-cp2-dp1-sharded", "several"),
    ("tp1-cp2-fsdp2-sharded", "tp2-dp2-single", "sgd"),
    ("tp2-pp2-dp1-sharded", "plain", "adamw"),
    ("tp2-dp2-sharded", "tp1-pp2-fsdp2-sharded", "adamw"),
    ("tp1-pp2-fsdp2-single", "tp2-pp2-dp1-single", "sgd"),
    ("tp1-hsdp4-sharded", "tp2-dp2-sharded", "several"),
    ("tp2-fsdp2-sharded", "tp1-hsdp4-single", "adamw"),
    ("tp1-hsdp4-single", "plain", "sgd"),
    ("plain", "tp1-hsdp4-sharded", "several"),
)


@sees(
    "checkpoint of shards",
    "Saver.model_state",
    "        return full_state_dict(record, self._env.device)",
    "        with record.allow_state_dict():\n            return super().lightning_module_state_dict()",
    case="tp2-dp2-single-plain-several",
)
@sees(
    "moments of shards in the checkpoint",
    "Saver.optimizer_state",
    ("        return full_optimizer_state(plain_optimizer(optimizer), record.layout, record.groups, self._env.device)"),
    "        return super().optimizer_state(optimizer)",
    case="tp2-dp2-single-plain-several",
)
@sees(
    "moments of a replicated parameter from the wrong rank",
    "_assemble",
    '        return local if writes and is_first else local.to("meta")\n',
    '        return local.to("meta") if writes and is_first else local\n',
    case="tp2-dp2-single-plain-several",
)
@sees(
    "what all ranks hold written by none of some",
    "_WriterChoice.part",
    "writer == (dp, tp)",
    "writer == (dp, 0)",
    case="tp2-dp2-sharded-tp4-dp1-sharded-adamw",
)
@sees(
    "fsdp: rows written at another replica's place",
    "Part.__init__",
    "                    offsets[0] = rows[0]\n                    offsets[shard.dim] = start + low - at\n",
    "                    offsets[0] = 0\n                    offsets[shard.dim] = start + low - at\n",
    case="tp2-fsdp2-sharded-tp1-fsdp4-single-several",
)
@sees(
    "fsdp: another replica's rows taken",
    "take_rows",
    "part[start:stop].clone()",
    "part[: stop - start].clone()",
    case="plain-tp2-fsdp2-single-several",
)
@sees(
    "pp: each stage writes what others hold into a folder",
    "_WriterChoice.part",
    'self._groups.rank("pp") == next(iter(stages), 0)',
    "bool(self._groups)",
    case="tp2-pp2-dp1-sharded-plain-adamw",
)
@sees(
    "pp: a folder has the first stage's moments alone",
    "_optimizer_state",
    'state["state"] if layout is None else _of_all_stages(state["state"], parameters, layout, groups)',
    'state["state"]',
    case="tp2-pp2-dp1-sharded-plain-adamw",
)
@pytest.mark.parametrize(("source", "target", "optimizer"), SLICE)
def test_any_to_any(source, target, optimizer):
    """A slice of the matrix."""
    check(source, target, optimizer, ((source, optimizer),))


def runs(place: str, optimizer: str) -> bool:
    """Stages have no manual optimization."""
    return PLACES[place].pp == 1 or optimizer != "several"


FULL = [name for name, place in PLACES.items() if place.kind != "hsdp"]  # whose rows are those of fsdp
ALL = [(name, kind) for name in FULL for kind in OPTIMIZERS if runs(name, kind)]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("source", "target", "optimizer"),
    [
        pytest.param(source, target, optimizer, marks=[pytest.mark.xdist_group(target), pytest.mark.timeout(1800)])
        for target in FULL
        for source, optimizer in ALL
        if runs(target, optimizer)
    ],
)
def test_from_every_place_to_every_other(source, target, optimizer):
    """All of it."""
    check(source, target, optimizer, tuple((name, kind) for name, kind in ALL if runs(target, kind)))


HYBRID = [name for name in PLACES if name not in FULL]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(source, target, marks=[pytest.mark.xdist_group(target), pytest.mark.timeout(1800)])
        for target in PLACES
        for source in (PLACES if target in HYBRID else HYBRID)
    ],
)
def test_hybrid_sharding_to_and_from_every_other_place(source, target):
    sources = tuple(PLACES if target in HYBRID else HYBRID)
    check(source, target, "adamw", tuple((name, "adamw") for name in sources))
