"""What was trained in parts, as a folder that Hugging Face's library loads, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.cli.main import main
from lightning_seqpar.testing import run_distributed
from tests.helpers import families
from tests.helpers.fit import quiet_trainer
from tests.helpers.models import loader

FEW = ["llama", "mixtral", "t5"]


def train(folder: str, names: list[str]) -> None:
    for name in names:
        strategy = SeqParallelStrategy(tp=2, checkpoint={"format": "sharded"})
        trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=2)
        module = families.HuggingFace(name)
        trainer.fit(module, loader(4, count=16, length=9))
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")


class Validated(families.HuggingFace):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def validate(path: str) -> dict[str, Any]:
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2))
    module = Validated("t5").double()
    trainer.validate(module, loader(4, count=4, length=9), ckpt_path=path, verbose=False)
    return dict(trainer.strategy.lightning_module_state_dict())


@pytest.mark.more
def test_what_was_trained_in_parts_is_loaded_by_the_library(tmp_path, capsys):
    """And the library's folder is a checkpoint of ours."""
    run_distributed(train, 2, str(tmp_path), FEW)
    for name in FEW:
        source, out = str(tmp_path / f"{name}.ckpt"), str(tmp_path / f"{name}-out")
        families.build(name).save_pretrained(tmp_path / name)
        main(["convert", source, out, "--to", "safetensors", "--like", str(tmp_path / name)])
        main(["convert", source, f"{source}.one"])
        module = families.HuggingFace(name).double()
        module.load_state_dict(torch.load(f"{source}.one", weights_only=True)["state_dict"])
        model = type(module.model).from_pretrained(out, attn_implementation="sdpa", **families.EXPERTS)
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in module.model.state_dict().items())
        ids = torch.arange(12)[None]
        more = {"decoder_input_ids": ids} if name == "t5" else {}
        assert torch.equal(model(ids, **more).logits, module.model.eval()(ids, **more).logits)
    capsys.readouterr()
    main(["convert", f"{tmp_path}/t5-out", str(tmp_path / "t5-parts"), "--prefix", "model", "--to", "sharded"])
    state = run_distributed(validate, 2, str(tmp_path / "t5-parts"))[0]
    assert all(
        torch.equal(value, state[name]) for name, value in torch.load(tmp_path / "t5.ckpt.one")["state_dict"].items()
    )
    main(["inspect", f"{tmp_path}/mixtral-out"])
    assert "8 ×  model.layers.*.block_sparse_moe.experts.*.w1.weight" in capsys.readouterr().out
