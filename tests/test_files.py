"""A checkpoint is whole or not there, and what goes wrong on one rank is told on every one."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from fit import quiet_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from test_folder import whole

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.files import UNFINISHED, SaveError
from lightning_seqpar.testing import run_distributed

FORMS = ["single", "sharded"]


def trained(form: str, ckpt: str | None = None, **options: Any) -> Any:
    strategy = SeqParallelStrategy(tp=2, checkpoint={"format": form})
    trainer = quiet_trainer(devices=2, strategy=strategy, **{"max_steps": 2, **options})
    trainer.fit(models.GPT(), models.loader(4, count=24), ckpt_path=ckpt)
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


@pytest.mark.parametrize("form", FORMS)
def test_a_failure_is_one_of_every_rank_and_the_one_before_stays(tmp_path, form):
    one, other = run_distributed(save_where_it_cannot, 2, form, str(tmp_path))
    assert one == other
    assert "file/a.ckpt" in one[0]
    assert "Not a directory" in one[0] or "File exists" in one[0]
    if form == "single":
        assert "folder.ckpt is a folder (a sharded checkpoint?), and a file is to be written there" in one[1]
        assert one[2].endswith("good.ckpt can't be written: [Errno 27] File too large")
    else:
        assert "file is a file; a sharded checkpoint is a folder" in one[1]
        assert one[2].endswith("good.ckpt can't be written: rank 1: [Errno 27] File too large")


def restore_nothing(folder: str, form: str) -> list[str]:
    told = []
    for name in ("missing.ckpt", "cut.ckpt"):
        try:
            trained(form, f"{folder}/{name}", max_steps=4)
        except (ValueError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_a_missing_or_damaged_file_is_told_on_every_rank(tmp_path):
    torch.save({"state_dict": {"a": torch.zeros(100)}}, tmp_path / "cut.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "cut.ckpt").read_bytes()[:500])
    (tmp_path / f"missing.ckpt{UNFINISHED}").write_text("")
    for missing, cut in run_distributed(restore_nothing, 2, str(tmp_path), "single"):
        assert missing.startswith(f"ValueError: {tmp_path}/missing.ckpt: there is no such checkpoint; ")
        assert "is one that was being written when its run ended" in missing
        assert cut.startswith(f"ValueError: {tmp_path}/cut.ckpt: it can't be read (")


def keep_some(form: str, folder: str, link: Any) -> list[str]:
    saver = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=link
    )
    trained(form, max_steps=4, enable_checkpointing=True, callbacks=[saver])
    weights = ModelCheckpoint(f"{folder}/weights", filename="{step}", every_n_train_steps=2, save_weights_only=True)
    trained(form, f"{folder}/last.ckpt", max_steps=6, enable_checkpointing=True, callbacks=[weights])
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("link", [True, "link"])
def test_the_best_are_kept_and_the_last_is_found(tmp_path, form, link):
    found = run_distributed(keep_some, 2, form, str(tmp_path), link)[0]
    assert found == ["last.ckpt", "step=3.ckpt", "step=4.ckpt", "weights"]
    assert (tmp_path / "last.ckpt").is_symlink() is (link == "link")
    only = whole(tmp_path / "weights" / "step=6.ckpt")
    assert "optimizer_states" not in only
    assert set(only["state_dict"]) == set(models.GPT().state_dict())


def save_over_a_link(form: str, folder: str) -> None:
    trainer, place = trained(form), Path(folder)
    trainer.save_checkpoint(place / "step.ckpt")
    for name, target in (("last.ckpt", "step.ckpt"), ("gone.ckpt", "nowhere.ckpt"), ("old.ckpt", "step.ckpt")):
        if dist.get_rank() == 0:
            (place / name).symlink_to(target)
        dist.barrier()
    trainer.save_checkpoint(place / "last.ckpt")
    trainer.save_checkpoint(place / "gone.ckpt")
    if form == "sharded":
        trainer.strategy.remove_checkpoint(place / "old.ckpt")


@pytest.mark.parametrize("form", FORMS)
def test_what_a_link_leads_to_stays(tmp_path, form):
    run_distributed(save_over_a_link, 2, form, str(tmp_path))
    for name in ("step.ckpt", "last.ckpt", "gone.ckpt"):
        assert not (tmp_path / name).is_symlink()
        assert set(whole(tmp_path / name)["state_dict"]) == set(models.GPT().state_dict())
    assert (tmp_path / "old.ckpt").is_symlink() is (form == "single")
    assert not [file.name for file in tmp_path.iterdir() if file.suffix in (".unfinished", ".replaced")]


def elsewhere(form: str) -> Any:
    trainer = trained(form)
    path = "memory://a.ckpt"
    if form == "sharded":
        with pytest.raises(ValueError, match="writes to local or mounted folders; use format 'single' there"):
            trainer.save_checkpoint(path)
        return None
    trainer.save_checkpoint(path)
    return trainer.strategy.load_checkpoint(path)["global_step"] if trainer.is_global_zero else None


def test_other_file_systems_take_a_single_file():
    assert run_distributed(elsewhere, 2, "single")[0] == 2
    assert run_distributed(elsewhere, 2, "sharded")[0] is None
