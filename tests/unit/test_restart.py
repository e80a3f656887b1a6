"""The list of checkpoints by which a run that torchrun starts again goes on."""

from __future__ import annotations

from types import SimpleNamespace

import lightning as L

from lightning_seqpar.strategy import ending
from tests.mutants import sees


@sees("trainings of a script share their checkpoints", "RestartList.count_training", " + 1)", " + 0)")
def test_each_training_of_a_script_goes_on_from_its_own_checkpoints(tmp_path, monkeypatch):
    trainer, module = SimpleNamespace(default_root_dir=tmp_path, max_epochs=1, max_steps=-1), L.LightningModule()
    monkeypatch.setenv(ending.TRAININGS, "0")
    for name in ("first.ckpt", "second.ckpt"):
        ending.RestartList.count_training()
        listed = ending.RestartList(trainer, module)
        assert listed.resume(0) is None
        (tmp_path / name).touch()
        listed.add(tmp_path / name)
    monkeypatch.setenv(ending.TRAININGS, "0")  # another attempt
    for name in ("first.ckpt", "second.ckpt"):
        ending.RestartList.count_training()
        assert ending.RestartList(trainer, module).newest() == str(tmp_path / name)
    ending.RestartList.count_training()
    assert ending.RestartList(trainer, module).newest() is None
    monkeypatch.setenv(ending.TRAININGS, "1")  # the first is skipped, and the second, of other length, comes first
    trainer.max_epochs = 2
    assert ending.RestartList(trainer, module).newest() is None
