"""Checkpoints in parts, and any topology to any other."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.checkpoint.atomic_files import MARKER
from lightning_seqpar.checkpoint.folder import Opened
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import ParityRecorder, Trace
from tests.helpers import dropping, models
from tests.helpers.checkpoints import FORMS, same, save_in_parts, whole
from tests.helpers.fit import quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees

STEPS = 6  # two epochs of three; Lightning goes on from an epoch's end where the data began


# ---- what is hard to put together --------------------------------------------------------------------------------


def kinds() -> dict[str, tuple[Any, Any]]:
    """A module and its plan, by what is hard about it."""
    from tests.helpers import adapted, zoo
    from tests.helpers.families import HuggingFace

    vocab = {"base": "auto", "rules": [{"pattern": "model.{tokens,head}", "style": "vocab"}]}
    return {
        "fused": (lambda: zoo.Zoo("fused_gqa"), "auto"),
        "shared kv": (lambda: zoo.Zoo("gqa_shared"), "auto"),
        "padded and tied": (lambda: models.GPT(tied=True), vocab),
        "lora": (lambda: adapted.Adapted("llama", ["q_proj", "o_proj"]), "auto"),
        "conv1d": (lambda: HuggingFace("gpt2"), "auto"),
        "experts": (lambda: HuggingFace("mixtral"), "auto"),
        "a buffer of heads": (lambda: zoo.Zoo("alibi"), "auto"),
        "a table of heads": (lambda: zoo.Zoo("bias_table"), "auto"),
    }


def train_kind(tp: int, form: str, folder: str, names: list[str], resume: str | None) -> None:
    for name in names:
        make, plan = kinds()[name]
        strategy = SeqParallelStrategy(tp=tp, checkpoint=FORMS[form], plan=plan)
        world = dist.get_world_size()
        trainer = quiet_trainer(devices=world, strategy=strategy, max_steps=2)
        ckpt = None if resume is None else f"{resume}/{name}.ckpt"
        trainer.fit(make().double(), models.loader(4, count=16, length=9), ckpt_path=ckpt)
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")


@sees(
    "fused parts written out of order",
    "Part.__init__",
    "        for start, stop in shard.ranges[rank]:\n            if stop > start:\n                # Of",
    "        for start, stop in reversed(shard.ranges[rank]):\n            if stop > start:\n                # Of",
)
@sees(
    "padding left in",
    "Shard.assemble",
    "        shape[self.dim] = self.length\n        whole = parts[0].new_empty(shape)\n",
    (
        "        if self.padded is not None:\n            return torch.cat(list(parts), self.dim)"
        "\n        shape[self.dim] = self.length\n        whole = parts[0].new_empty(shape)\n"
    ),
)
@sees(
    "padding left in the parts",
    "Part.__init__",
    "        self.shape = torch.Size(local.shape if layout is None or shard is None else layout.global_shape)\n",
    (
        "        self.shape = torch.Size(local.shape if layout is None or shard is None else"
        " layout.global_shape)\n        if shard is not None and shard.padded is not None:"
        "\n            self.shape = torch.Size([shard.padded * len(shard.ranges),"
        " *self.shape[1:]])\n"
    ),
)
@pytest.mark.more
def test_round_trips_of_the_hard_cases(tmp_path):
    """tp 2 in parts, tp 4 in one file, tp 4 in parts, tp 1 in one file: bitwise the same throughout."""
    names = [*kinds()]
    run_distributed(train_kind, 2, 2, "sharded", str(tmp_path / "a"), names, None)
    run_distributed(train_kind, 4, 4, "single", str(tmp_path / "b"), names, str(tmp_path / "a"))
    run_distributed(train_kind, 4, 4, "sharded", str(tmp_path / "c"), names, str(tmp_path / "b"))
    run_distributed(train_kind, 1, 1, "single", str(tmp_path / "d"), names, str(tmp_path / "c"))
    for name in names:
        first, *others = (whole(tmp_path / step / f"{name}.ckpt") for step in "abcd")
        shapes = {key: tuple(value.shape) for key, value in kinds()[name][0]().state_dict().items()}
        assert {key: tuple(value.shape) for key, value in first["state_dict"].items()} == shapes
        for other in others:
            for part in ("state_dict", "optimizer_states"):
                assert same(first[part], other[part]), (name, part)


def test_tied_weights_are_written_once(tmp_path):
    run_distributed(train_kind, 2, 2, "sharded", str(tmp_path), ["padded and tied"], None)
    opened = Opened(tmp_path / "padded and tied.ckpt")
    state = opened.tree["state_dict"]
    assert opened.key_of(state["model.head.weight"]) == opened.key_of(state["model.tokens.weight"])
    index = opened.index().state_dict_metadata
    assert sum("model.head" in key or "model.tokens" in key for key in index) == 1


class Counted(models.GPT):
    """Buffers that each replica counts for itself."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("small", "large", "total"):
            self.register_buffer(name, torch.zeros(1 if name == "small" else 4000))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for buffer in self.buffers():
            buffer += batch[0].float().mean()
        return super().training_step(batch, batch_idx)


def count(form: str, path: str) -> None:
    strategy = SeqParallelStrategy(tp=2, checkpoint=FORMS[form], ddp={"broadcast_buffers": False})
    trainer = quiet_trainer(devices=4, strategy=strategy, max_steps=2)
    trainer.fit(Counted(), models.loader(4, count=16))
    trainer.save_checkpoint(path)


@sees("buffers of several replicas in one folder", "model_parts", "alike=is_parameter", "alike=True")
def test_buffers_are_those_of_one_replica(tmp_path):
    for form in ("single", "sharded"):
        run_distributed(count, 4, form, str(tmp_path / form))
    one, parts = whole(tmp_path / "single")["state_dict"], whole(tmp_path / "sharded")["state_dict"]
    assert one["large"].unique().numel() == 1
    assert same(dict(one), dict(parts))
    assert torch.equal(parts["small"], parts["large"][:1])


# ---- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("saved") / "a.ckpt"
    run_distributed(save_in_parts, 2, str(place))
    return place


def cut(name: str) -> Any:
    def damage(folder: Path) -> None:
        file = next(folder.glob(name))
        file.write_bytes(file.read_bytes()[:-40])

    return damage


DAMAGE = {
    "a truncated part": (cut("__1_0.distcp"), r"__1_0.distcp: it holds \d+ bytes of \d+; the checkpoint is damaged"),
    "a missing part": (
        lambda folder: (folder / "__0_0.distcp").unlink(),
        "__0_0.distcp: it is missing; the checkpoint is damaged",
    ),
    "a truncated index": (cut(".metadata"), "its index .metadata can't be read"),
    "a truncated state": (cut("state.pt"), r"state.pt: it can't be read .*; the checkpoint is damaged"),
    "no marker": (lambda folder: (folder / MARKER).unlink(), f"no {MARKER} in it, so it is not a sharded checkpoint"),
    "a later format": (
        lambda folder: (folder / MARKER).write_text('{"format": 2, "version": "9.9"}'),
        r"written in format 2, and this version reads 1; use the version of lightning_seqpar that wrote it \(9.9\)",
    ),
    "killed while writing": (
        lambda folder: [(folder / MARKER).unlink(), folder.rename(folder.with_name(f"{folder.name}.unfinished"))],
        "there is no such checkpoint; .*unfinished is one that was being written when its run ended, so go on from the one",
    ),
}


@sees(
    "a truncated folder is read", "Opened.__init__", "        self._check_files()\n", "        pass\n", case="a truncated part"
)
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_folder_is_refused(tmp_path, folder, what):
    damage, says = DAMAGE[what]
    shutil.copytree(folder, tmp_path / "a.ckpt")
    damage(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=says):
        opened = Opened(tmp_path / "a.ckpt", weights_only=True)
        opened.take(opened.tree["state_dict"], {}, 0)


@pytest.mark.parametrize("end", [".unfinished", ".replaced"])
def test_what_was_whole_between_two_renames_is_read(tmp_path, folder, end):
    shutil.copytree(folder, tmp_path / f"a.ckpt{end}")
    with pytest.warns(UserWarning, match=r"was being replaced when its run ended; the .* is whole, and is read"):
        opened = Opened(tmp_path / "a.ckpt", weights_only=True)
    assert opened.take(opened.tree["state_dict"], {}, 0)


# ---- random numbers -----------------------------------------------------------------------------------------------


class Dropping(dropping.Dropping):
    """Draws from the generators of Python and numpy too."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.noise.append(random.random() + float(np.random.rand()))
        return super().training_step(batch, batch_idx)


def drop(tp: int, form: str, folder: str, ckpt: str | None, at: int) -> tuple[Trace, list[float]]:
    L.seed_everything(3)  # of which the sampler's order follows
    if ckpt is None:  # replicas draw apart
        for _ in range(1 + dist.get_rank() // tp):
            random.random(), np.random.rand(), torch.rand(1)
    recorder = ParityRecorder()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=at, save_top_k=-1)
    trainer = quiet_trainer(
        devices=dist.get_world_size(),
        strategy=SeqParallelStrategy(tp=tp, checkpoint=FORMS[form], plan="infer"),
        max_steps=6,
        enable_checkpointing=ckpt is None,
        callbacks=[recorder, *([saver] if ckpt is None else [])],
    )
    module = Dropping().double()
    # In the middle of an epoch Lightning begins with the epoch's first batch again: there all are the same.
    data = models.loader(2, shuffle=True, count=12) if at == 3 else DataLoader(Same(), batch_size=2)
    trainer.fit(module, data, ckpt_path=ckpt)
    return recorder.trace, module.noise


class Same(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> Any:
        return (torch.arange(10) % 31,)


@sees(
    "random streams begin anew",
    "Saver.load_optimizers",
    "            SavedStreams.unpack(self.streams).restore()\n        if not",
    "            pass\n        if not",
    case="epoch's end-sharded",
)
@sees(
    "the order of samples follows the stream",
    "ReplicaSampler.set_epoch",
    "            torch.default_generator.manual_seed(number)\n",
    "",
    case="epoch's end-sharded",
)
@pytest.mark.parametrize("form", [form if form == "sharded" else rest(form) for form in FORMS])
@pytest.mark.parametrize("at", [3, 2], ids=["epoch's end", "within an epoch"])
@pytest.mark.more
def test_a_resumed_run_draws_what_the_uninterrupted_one_drew(tmp_path, form, at):
    whole = run_distributed(drop, 4, 2, form, str(tmp_path), None, at)
    rest = run_distributed(drop, 4, 2, form, str(tmp_path), str(tmp_path / f"step={at}.ckpt"), at)
    assert len({noise[0] for _, noise in whole}) == 2
    for (all_of_it, noise), (trace, own) in zip(whole, rest, strict=True):
        assert trace.losses == all_of_it.losses[at:]
        assert same(trace.weights, all_of_it.weights)
        assert own == noise[at:]


# ---- models that are restored in another way ----------------------------------------------------------------------


def restored(kind: str, form: str, ckpt: str, path: str) -> None:
    strategy = SeqParallelStrategy(tp=2, checkpoint=FORMS[form])
    trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=2, precision="32-true")
    module = models.Late("meta") if kind == "meta" else models.GPT()
    if kind == "sharded already":
        trainer.fit(module, models.loader(4, count=8, length=9))
    trainer.fit(module, models.loader(4, count=8, length=9), ckpt_path=ckpt)
    trainer.save_checkpoint(path)


def write_first(form: str, path: str) -> None:
    trainer = quiet_trainer(
        devices=4, strategy=SeqParallelStrategy(tp=4, checkpoint=FORMS[form]), max_steps=2, precision="32-true"
    )
    trainer.fit(models.GPT(seed=5), models.loader(4, count=8, length=9))
    trainer.save_checkpoint(path)


@pytest.mark.parametrize(("kind", "form"), [("meta", "single"), ("meta", "sharded"), ("sharded already", "sharded")])
def test_a_checkpoint_fills_models_without_memory_and_models_of_shards(tmp_path, kind, form):
    run_distributed(write_first, 4, form, str(tmp_path / "a.ckpt"))
    run_distributed(restored, 2, kind, form, str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt"))
    a, b = whole(tmp_path / "a.ckpt"), whole(tmp_path / "b.ckpt")
    for part in ("state_dict", "optimizer_states"):
        assert same(a[part], b[part]), part
