"""A checkpoint is whole or not there, and what goes wrong on one rank is told on every one."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.checkpoint.atomic_files import REPLACED, UNFINISHED, SaveError
from lightning_seqpar.strategy.saving import WholeFileIO
from lightning_seqpar.testing import run_distributed
from tests.helpers import models
from tests.helpers.checkpoints import whole
from tests.helpers.fit import quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees

FORMS = ["single", "sharded"]


def trained(form: str, ckpt: str | None = None, module: models.GPT | None = None, **options: Any) -> Any:
    strategy = SeqParallelStrategy(tp=2, checkpoint={"format": form})
    trainer = quiet_trainer(devices=2, strategy=strategy, **{"max_steps": 2, **options})
    trainer.fit(module or models.GPT(), models.loader(4, count=24), ckpt_path=ckpt)
    return trainer


def save_where_it_cannot(form: str, folder: str) -> list[str]:
    told = []
    trainer = trained(form)
    place = Path(folder)
    if dist.get_rank() == 0:
        (place / "file").write_text("in the way")
        (place / "folder.ckpt").mkdir()
    dist.barrier()

    def attempt(name: str) -> None:
        with pytest.raises(SaveError) as caught:
            trainer.save_checkpoint(place / name)
        told.append(str(caught.value))

    attempt("file/a.ckpt")
    if dist.get_rank() == 0:
        (place / "locked").mkdir(mode=0o555)
    user = os.geteuid()
    if user == 0:  # whom nothing is forbidden
        os.seteuid(65534)
    attempt("locked/a.ckpt")
    os.seteuid(user)
    attempt("folder.ckpt" if form == "single" else "file")
    trainer.save_checkpoint(place / "good.ckpt")
    before = whole(place / "good.ckpt")
    if dist.get_rank() == (0 if form == "single" else 1):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # a full disk, as far as this process can tell
        attempt("good.ckpt")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    else:
        attempt("good.ckpt")
    after = whole(place / "good.ckpt")
    assert all(torch.equal(before["state_dict"][name], value) for name, value in after["state_dict"].items())
    assert (place / f"good.ckpt{UNFINISHED}").exists()
    dist.barrier()
    trainer.save_checkpoint(place / "good.ckpt")
    assert not (place / f"good.ckpt{UNFINISHED}").exists()
    return told


@sees(
    "a failure to write kept to the first rank",
    "on_first_rank",
    "    if message[0] is not None:\n        raise SaveError",
    "    if message[0] is not None and dist.get_rank(group) == 0:\n        raise SaveError",
    case="single",
)
@sees(
    "a file written in its own place",
    "write_whole",
    "    write_synced(unfinished, write)\n    unfinished.replace(path)\n",
    "    write_synced(path, write)\n",
    case="single",
)
@pytest.mark.parametrize("form", FORMS)
def test_a_failure_is_one_of_every_rank_and_the_one_before_stays(tmp_path, form):
    one, other = run_distributed(save_where_it_cannot, 2, form, str(tmp_path))
    assert one == other
    assert "file/a.ckpt" in one[0]
    assert "Not a directory" in one[0] or "File exists" in one[0]
    assert "Permission denied" in one.pop(1)
    if form == "single":
        assert "folder.ckpt is a folder (a sharded checkpoint?), and a file is to be written there" in one[1]
        assert one[2].endswith("good.ckpt can't be written: [Errno 27] File too large")
    else:
        assert "file is a file; a sharded checkpoint is a folder" in one[1]
        assert one[2].endswith("good.ckpt can't be written: rank 1: [Errno 27] File too large")


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code of a stranger",))


def restore_nothing(folder: str, form: str) -> list[str]:
    told = []
    for name in ("missing.ckpt", "cut.ckpt", "evil.ckpt"):
        try:
            trained(form, f"{folder}/{name}", max_steps=4)
        except (ValueError, RuntimeError, pickle.UnpicklingError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_a_missing_or_damaged_file_is_told_on_every_rank(tmp_path):
    torch.save({"state_dict": {"a": torch.zeros(100)}}, tmp_path / "cut.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "cut.ckpt").read_bytes()[:500])
    (tmp_path / f"missing.ckpt{UNFINISHED}").write_text("")
    torch.save({"state_dict": {}, "callbacks": Evil()}, tmp_path / "evil.ckpt")
    for missing, cut, evil in run_distributed(restore_nothing, 2, str(tmp_path), "single"):
        assert missing.startswith(f"NoCheckpointError: {tmp_path}/missing.ckpt: there is no such checkpoint; ")
        assert "is one that was being written when its run ended" in missing
        assert cut.startswith(f"ValueError: {tmp_path}/cut.ckpt: it can't be read (")
        assert evil.startswith("UnpicklingError: Weights only load failed")


def restore_apart(form: str, folder: str) -> list[str]:
    trained(form).save_checkpoint(f"{folder}/a.ckpt")
    if form == "sharded":
        shutil.copytree(f"{folder}/a.ckpt", f"{folder}/{dist.get_rank()}.ckpt", dirs_exist_ok=True)
    dist.barrier()
    told = []
    for name in ("nowhere.ckpt", "late.ckpt"):
        mine = f"{folder}/{name}" if dist.get_rank() == 1 else f"{folder}/a.ckpt"
        if name == "late.ckpt":
            if form == "single":
                continue
            mine = f"{folder}/{dist.get_rank()}.ckpt"
        with pytest.raises((ValueError, RuntimeError)) as caught:
            trained(form, mine, Spoiled(mine) if name == "late.ckpt" else None, max_steps=4)
        told.append(str(caught.value))
        dist.barrier()
    return told


class Spoiled(models.GPT):
    """Its disk goes while one rank reads."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            for file in self.folder.glob("*.distcp"):
                file.unlink()


@sees(
    "what one rank can't read the others go on with",
    "on_every_rank",
    "        if error_of_rank is not None:\n            raise ValueError",
    "        if error_of_rank is not None and rank < 0:\n            raise ValueError",
    case="single",
)
@pytest.mark.parametrize("form", FORMS)
def test_what_one_rank_cannot_read_none_restores(tmp_path, form):
    one, other = run_distributed(restore_apart, 2, form, str(tmp_path))
    assert one[0].startswith(f"the checkpoint {tmp_path}/a.ckpt can't be restored: rank 1: ")
    assert one[0].endswith("nowhere.ckpt: there is no such checkpoint")
    assert other[0].startswith(f"{tmp_path}/nowhere.ckpt: there is no such checkpoint")
    if form == "sharded":
        assert one[1].startswith(f"the checkpoint {tmp_path}/0.ckpt can't be restored: rank 1: ")
        assert "No such file or directory" in one[1]


def restored_from(path: str) -> tuple[bool, bool]:
    trainer = trained("single", max_steps=1)
    trainer.save_checkpoint(path)
    before = path in Path("/proc/self/maps").read_text()
    after = trained("single", path, max_steps=2)
    gc.collect()
    assert after.global_step == 2
    return before, path in Path("/proc/self/maps").read_text()


@sees(
    "moments live in the file that was read",
    "load_full_optimizer_state",
    "own_memory(value) if value is flat[index, key] else value",
    "value",
)
def test_nothing_lives_in_the_file_that_was_restored(tmp_path):
    """Its pages are read where they are needed, and then copied: the file may go."""
    for before, after in run_distributed(restored_from, 2, str(tmp_path / "a.ckpt")):
        assert not before
        assert not after


class Loose(models.GPT):
    def __init__(self, *, strict: bool) -> None:
        super().__init__()
        self.strict_loading = strict
        self.extra = torch.nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0 * self.extra.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def restore_other_keys(form: str, folder: str) -> list[str]:
    told = []
    trained(form).save_checkpoint(f"{folder}/a.ckpt")
    for strict in (True, False):
        for cut_already in (False, True):
            module = Loose(strict=strict)
            strategy = SeqParallelStrategy(tp=2, checkpoint={"format": form})
            trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=1)
            if cut_already:
                trainer.fit(module, models.loader(4, count=8))
            try:
                trainer.validate(module, models.loader(4, count=4), ckpt_path=f"{folder}/a.ckpt", verbose=False)
                told.append("loaded")
            except (RuntimeError, ValueError) as error:
                told.append(str(error))
    return told


@pytest.mark.parametrize("form", [form if form == "sharded" else rest(form) for form in FORMS])
def test_missing_keys_are_told_or_left_as_they_are(tmp_path, form):
    for told in run_distributed(restore_other_keys, 2, form, str(tmp_path)):
        assert all('Missing key(s) in state_dict: "extra"' in one for one in told[:2])
        assert told[2:] == ["loaded", "loaded"]


def keep_some(form: str, folder: str, link: Any) -> list[str]:
    saver = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=link
    )
    trained(form, max_steps=4, enable_checkpointing=True, callbacks=[saver])
    weights = ModelCheckpoint(f"{folder}/weights", filename="{step}", every_n_train_steps=2, save_weights_only=True)
    trained(form, f"{folder}/last.ckpt", max_steps=6, enable_checkpointing=True, callbacks=[weights])
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("link", [rest(True), "link"])
def test_the_best_are_kept_and_the_last_is_found(tmp_path, form, link):
    found = run_distributed(keep_some, 2, form, str(tmp_path), link)[0]
    assert found == ["last.ckpt", "step=3.ckpt", "step=4.ckpt", "weights"]
    assert (tmp_path / "last.ckpt").is_symlink() is (link == "link")
    only = whole(tmp_path / "weights" / "step=6.ckpt")
    assert "optimizer_states" not in only
    assert set(only["state_dict"]) == set(models.GPT().state_dict())


def save_in_odd_places(form: str, folder: str) -> Any:
    """Over what another form left, over links, and on another file system; returns what was read from the last one."""
    trainer, place = trained(form), Path(folder)
    for end in (UNFINISHED, REPLACED):
        file, parts = place / f"file.ckpt{end}", place / f"parts.ckpt{end}"
        if dist.get_rank() == 0:
            file.write_text("")
            parts.mkdir()
            (parts / "__0_0.distcp").write_text("")
    dist.barrier()
    for name in ("file.ckpt", "file.ckpt", "parts.ckpt", "parts.ckpt", "step.ckpt"):
        trainer.save_checkpoint(place / name)
    for name, target in (("last.ckpt", "step.ckpt"), ("gone.ckpt", "nowhere.ckpt"), ("old.ckpt", "step.ckpt")):
        if dist.get_rank() == 0:
            (place / name).symlink_to(target)
        dist.barrier()
    trainer.save_checkpoint(place / "last.ckpt")
    trainer.save_checkpoint(place / "gone.ckpt")
    if form == "sharded":
        trainer.strategy.remove_checkpoint(place / "old.ckpt")
        with pytest.raises(ValueError, match="writes to local or mounted folders; use format 'single' there"):
            trainer.save_checkpoint("memory://a.ckpt")
        return None
    trainer.save_checkpoint("memory://a.ckpt")
    return WholeFileIO().load_checkpoint("memory://a.ckpt")["global_step"] if trainer.is_global_zero else None


@pytest.mark.core
@pytest.mark.parametrize("form", FORMS)
def test_what_is_in_the_way_of_a_checkpoint(tmp_path, form):
    """What another form left is cleared away, what a link leads to stays, and other file systems take a single file."""
    assert run_distributed(save_in_odd_places, 2, form, str(tmp_path))[0] == (2 if form == "single" else None)
    for name in ("file.ckpt", "parts.ckpt", "step.ckpt", "last.ckpt", "gone.ckpt"):
        assert not (tmp_path / name).is_symlink()
        assert set(whole(tmp_path / name)["state_dict"]) == set(models.GPT().state_dict())
    assert (tmp_path / "old.ckpt").is_symlink() is (form == "single")
    remains = UNFINISHED if form == "single" else (UNFINISHED, REPLACED)  # a file replaces another in one step
    assert not [file.name for file in tmp_path.iterdir() if file.name.endswith(remains)]
