"""One ordinary checkpoint: written in parallel, read by plain Lightning, and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lightning_seqpar import SeqParallelStrategy, unshard
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import FLOAT64_TOLERANCE, ParityRecorder, compare
from tests.helpers import models
from tests.helpers.checkpoints import PRECISION, same, train
from tests.helpers.fit import fit, quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees


def shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: shapes(item) for key, item in value.items()}
    return [shapes(item) for item in value] if isinstance(value, list) else type(value).__name__


@sees(
    "checkpoint of shards",
    "Saver.model_state",
    "        return full_state_dict(record, self._env.device)",
    "        with record.allow_state_dict():\n            return super().lightning_module_state_dict()",
    case="4-2-GPT",
)
@sees(
    "moments of shards in the checkpoint",
    "Saver.optimizer_state",
    ("        return full_optimizer_state(plain_optimizer(optimizer), record.layout, record.groups, self._env.device)"),
    "        return super().optimizer_state(optimizer)",
    case="4-2-GPT",
)
@sees(
    "moments of a replicated parameter from the wrong rank",
    "_assemble",
    '        return local if _is_writer(groups) else local.to("meta")\n',
    '        return local.to("meta") if _is_writer(groups) else local\n',
    case="4-2-GPT",
)
@pytest.mark.parametrize("model", ["GPT", "Encoder"])
@pytest.mark.parametrize(("world", "tp"), [rest(2, 2), (4, 2)])
def test_the_file_is_an_ordinary_one(tmp_path, model, world, tp):
    run_distributed(
        train, world, model, tp, str(tmp_path / "ours"), after=str(tmp_path / "after.ckpt"), precision="64-true"
    )
    train(model, 1, str(tmp_path / "plain"), precision="64-true")
    ours = torch.load(tmp_path / "ours" / "step=6.ckpt", weights_only=True)
    plain = torch.load(tmp_path / "plain" / "step=6.ckpt", weights_only=True)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert shapes(ours[part]) == shapes(plain[part])
    assert list(ours["state_dict"]) == list(plain["state_dict"])
    for name, value in plain["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, rtol=0, atol=FLOAT64_TOLERANCE)
    if model == "GPT":  # tied over a vocabulary that is sharded
        assert (
            ours["state_dict"]["model.head.weight"].data_ptr() == ours["state_dict"]["model.tokens.weight"].data_ptr()
        )
    after = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert same(after["state_dict"], ours["state_dict"])
    assert same(after["optimizer_states"], ours["optimizer_states"])
    getattr(models, model).load_from_checkpoint(tmp_path / "after.ckpt")


@pytest.mark.parametrize("optimizer", ["adamw", rest("sgd")])
@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 2)])
def test_resuming_at_the_same_tp_is_bitwise_the_uninterrupted_run(tmp_path, optimizer, world, tp):
    # Two epochs of three batches; the checkpoint is that of the first epoch's end.
    options = {"optimizer": optimizer, "batches": 3}
    whole = run_distributed(train, world, "GPT", tp, str(tmp_path), **options)
    rest = run_distributed(train, world, "GPT", tp, None, ckpt=str(tmp_path / "step=3.ckpt"), **options)
    assert len(whole[0].losses) == 6
    for rank in range(world):
        assert rest[rank].losses == whole[rank].losses[3:]
        assert same(rest[rank].weights, whole[rank].weights)
    # Plain Lightning, on one process, goes on from it too.
    plain = train("GPT", 1, None, ckpt=str(tmp_path / "step=3.ckpt"), **options)
    assert plain.losses == pytest.approx(whole[0].losses[3:], rel=1e-5)


def guard_and_unshard(model: str) -> None:
    module = getattr(models, model)()
    before = copy.deepcopy({n: p.detach().clone() for n, p in module.named_parameters()})
    text = str(module)
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2))
    trainer.validate(module, models.loader(4), verbose=False)
    for part in (module, module.model if model == "Watched" else module.encoder):
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
    "state_dict not guarded",
    "guard_state_dict.hook",
    "        if not record.reading:\n",
    "        if False:\n",
    case="Watched",
)
@pytest.mark.parametrize("model", ["Watched", "WatchedEncoder"])
def test_state_dict_of_shards_raises_and_unshard_gives_the_model_back(model):
    run_distributed(guard_and_unshard, 2, model)


def shards_after(tp: int) -> None:
    module = models.Watched()
    trainer = quiet_trainer(
        devices=2, strategy=SeqParallelStrategy(tp=tp), max_steps=2, limit_val_batches=2, precision=PRECISION
    )
    loader = models.loader(4)

    def held() -> dict[str, Any]:
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    trainer.fit(module, loader, loader)
    fitted = held()
    layout = record_of(module).layout
    for call in (trainer.validate, trainer.test):
        call(module, loader, verbose=False)
        assert same(held(), fitted)
    trainer.predict(module, loader)
    assert same(held(), fitted)
    assert record_of(module).layout is layout
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, loader, loader)
    assert {n: p.shape for n, p in held().items()} == {n: p.shape for n, p in fitted.items()}
    assert not same(held(), fitted)
    # Another trainer takes the sharded model over.
    second = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=tp), max_steps=1, precision=PRECISION)
    second.fit(module, loader)
    # One with another layout makes it whole first.
    third = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=tp, sp=False), max_steps=1, precision=PRECISION)
    third.fit(module, loader)
    assert record_of(module).sp is False


def test_validate_test_predict_and_fit_again_leave_the_shards_as_they_are():
    run_distributed(shards_after, 2, 2)


def fit_twice(world: int, tp: int) -> Any:
    module = models.Watched()
    options = {"strategy": SeqParallelStrategy(tp=tp)} if world > 1 else {}
    trainer = quiet_trainer(devices=world, max_steps=3, **options)
    loader = models.loader(8, count=160)
    trainer.fit(module, loader)
    trainer.validate(module, loader, verbose=False)
    recorder = ParityRecorder()
    trainer.callbacks.append(recorder)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, loader)
    return recorder.trace


def test_fit_validate_fit_follows_one_process():
    expected = fit_twice(1, 1)
    assert len(expected.losses) == 3
    compare(expected, run_distributed(fit_twice, 2, 2, 2)[0], FLOAT64_TOLERANCE).raise_if_failed()


def load_foreign(path: str) -> None:
    module = models.Watched()
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), precision=PRECISION)
    trainer.validate(module, models.loader(4), verbose=False)
    trainer.validate(module, models.loader(4), ckpt_path=path, verbose=False)


def test_a_checkpoint_of_another_model_names_the_tensor(tmp_path):
    other = fit("GPT", {"dim": 32}, steps=1, precision=PRECISION)
    torch.save(
        {"state_dict": other.weights, "pytorch-lightning_version": "2.6.6", "loops": {}}, tmp_path / "other.ckpt"
    )
    with pytest.raises(RankFailedError, match=r"model\..*: expected the whole shape .* it belongs to another model"):
        run_distributed(load_foreign, 2, str(tmp_path / "other.ckpt"))
