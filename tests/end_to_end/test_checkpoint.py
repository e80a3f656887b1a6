"""The model behind checkpoints: shards are not given away, and stay what they are from one call of the trainer to the next."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lightning_seqpar import SeqParallelStrategy, unshard
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import ParityRecorder, Trace, compare
from tests.helpers import models
from tests.helpers.checkpoints import same
from tests.helpers.fit import fit, quiet_trainer
from tests.mutants import sees


def guard_and_unshard(model: str) -> None:
    module = getattr(models, model)()
    before = copy.deepcopy({n: p.detach().clone() for n, p in module.named_parameters()})
    text = str(module)
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2))
    trainer.predict(module, models.loader(4))
    parts = (module.model, module.model.head) if model == "Watched" else (module.encoder,)  # a tied head by itself too
    for part in (module, *parts):
        with pytest.raises(RuntimeError, match=r"use lightning_seqpar.unshard|lightning_seqpar.unshard\(model\) first"):
            part.state_dict()
    held = sum(p.numel() for p in module.parameters())
    assert held < sum(p.numel() for p in before.values())
    assert unshard(module) is module
    assert unshard(module) is module
    assert str(module) == text
    module = module.float()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert record_of(module) is None
    module.state_dict()
    module.training_step(next(iter(models.loader(4))), 0).backward()


@sees(
    "state_dict not guarded", "guard_state_dict.hook", "        if not record.reading:\n", "        if False:\n", case="Watched"
)
@pytest.mark.parametrize("model", ["Watched", "PaddedEncoder"])
def test_state_dict_of_shards_raises_and_unshard_gives_the_model_back(model):
    run_distributed(guard_and_unshard, 2, model)


def shards_after(tp: int) -> Trace:
    """Fit, validate, test, predict and fit again, with one trainer; what was trained last."""
    module, recorder, loader = models.Watched(), ParityRecorder(), models.loader(8, count=160)
    strategy = SeqParallelStrategy(tp=tp) if tp > 1 else "auto"
    trainer = quiet_trainer(devices=tp, strategy=strategy, max_steps=2, limit_val_batches=2)

    def held() -> dict[str, Any]:
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    trainer.fit(module, loader, loader)
    fitted, record = held(), record_of(module)
    for call in (trainer.validate, trainer.test):
        call(module, loader, verbose=False)
        assert same(held(), fitted)
    trainer.predict(module, loader)
    assert same(held(), fitted)
    trainer.callbacks.append(recorder)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, loader, loader)
    assert {n: p.shape for n, p in held().items()} == {n: p.shape for n, p in fitted.items()}
    assert not same(held(), fitted)
    if tp > 1:
        assert record_of(module).layout is record.layout
        # Another trainer takes the sharded model over; one with another layout makes it whole first.
        for sp in (True, False):
            quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2, sp=sp), max_steps=1).fit(module, loader)
            assert record_of(module).sp is sp
    return recorder.trace


def test_validate_test_predict_and_fit_again_leave_the_shards_as_they_are():
    expected = shards_after(1)
    assert len(expected.losses) == 2
    for trace in run_distributed(shards_after, 2, 2):
        compare(expected, trace).raise_if_failed()


def load_foreign(path: str) -> None:
    module = models.Watched()
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), precision="32-true")
    trainer.validate(module, models.loader(4), verbose=False)
    trainer.validate(module, models.loader(4), ckpt_path=path, verbose=False)


def test_a_checkpoint_of_another_model_names_the_tensor(tmp_path):
    other = fit("GPT", {"dim": 32}, steps=1, precision="32-true")
    torch.save({"state_dict": other.weights, "pytorch-lightning_version": "2.6.6", "loops": {}}, tmp_path / "other.ckpt")
    with pytest.raises(RankFailedError, match=r"model\..*: expected the whole shape .* it belongs to another model"):
        run_distributed(load_foreign, 2, str(tmp_path / "other.ckpt"))
