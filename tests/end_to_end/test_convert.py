"""One form of a checkpoint out of another, and what is in it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from lightning_seqpar.checkpoint.convert import contents_of, open_source, write_checkpoint
from lightning_seqpar.cli.main import main
from lightning_seqpar.testing import run_distributed
from tests.helpers import models
from tests.helpers.checkpoints import same, save_in_parts, whole
from tests.helpers.fit import quiet_trainer
from tests.mutants import sees


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of two ranks, and a file that plain Lightning wrote."""
    place = tmp_path_factory.mktemp("saved")
    run_distributed(save_in_parts, 2, str(place / "parts.ckpt"))
    plain = quiet_trainer(devices=1, max_steps=3, precision="32-true")
    plain.fit(models.GPT(), models.loader(8, count=160))
    plain.save_checkpoint(place / "plain.ckpt")
    return place


@sees(
    "numbers of a folder left out of the file",
    "read_all",
    "            found[name].copy_(source.read(meta))\n",
    "            pass\n",
)
def test_there_and_back_is_bitwise_the_same(tmp_path, saved):
    write_checkpoint(open_source(saved / "parts.ckpt"), tmp_path / "one.ckpt", "single")
    write_checkpoint(open_source(tmp_path / "one.ckpt"), tmp_path / "parts.ckpt", "sharded")
    first, file, back = (whole(p) for p in (saved / "parts.ckpt", tmp_path / "one.ckpt", tmp_path / "parts.ckpt"))
    assert list(first) == list(file) == list(back)
    for part in first:
        assert same(first[part], file[part]), part
        assert same(first[part], back[part]), part
    state = file["state_dict"]
    assert state["model.head.weight"].data_ptr() == state["model.tokens.weight"].data_ptr()


@dataclasses.dataclass
class Held:
    weight: torch.Tensor
    again: torch.Tensor


def test_numbers_within_objects_go_along(tmp_path, saved):
    """A loss with class weights among the hyperparameters; a view, and a tensor that stands elsewhere too."""
    tree = torch.load(saved / "plain.ckpt", weights_only=False)
    weight = torch.arange(5.0)
    objects = {"loss": torch.nn.CrossEntropyLoss(weight), "held": Held(weight[1:3], next(iter(tree["state_dict"].values())))}
    torch.save({**tree, "hyper_parameters": objects}, tmp_path / "plain.ckpt")
    write_checkpoint(open_source(tmp_path / "plain.ckpt", trust=True), tmp_path / "parts.ckpt", "sharded")
    write_checkpoint(open_source(tmp_path / "plain.ckpt", trust=True), tmp_path / "one.ckpt", "single")
    write_checkpoint(open_source(tmp_path / "parts.ckpt", trust=True), tmp_path / "back.ckpt", "single")
    for name in ("one", "back"):
        found = torch.load(tmp_path / f"{name}.ckpt", weights_only=False)
        assert torch.equal(found["hyper_parameters"]["loss"].weight, weight)
        assert torch.equal(found["hyper_parameters"]["held"].weight, weight[1:3])
        assert torch.equal(found["hyper_parameters"]["held"].again, objects["held"].again)
        assert same(found["state_dict"], tree["state_dict"])


def test_what_is_in_it(saved):
    parts, plain = (contents_of(open_source(saved / "parts.ckpt")), contents_of(open_source(saved / "plain.ckpt")))
    assert (parts.form, plain.form) == ("sharded", "single")
    assert parts.origin["topology"]["tp"] == 2
    assert parts.origin["global_step"] == plain.origin["global_step"] == 3
    assert parts.parameters == plain.parameters == sum(p.numel() for p in models.GPT().parameters())
    assert parts.tied == plain.tied == {"model.head.weight": "model.tokens.weight"}
    assert parts.model_bytes == 2 * plain.model_bytes == 8 * parts.parameters
    assert parts.tensors["model.blocks.0.attn.qkv.weight"] == ([48, 16], "float64")


def test_the_commands(tmp_path, saved, capsys):
    main(["inspect", str(saved / "parts.ckpt")])
    told = capsys.readouterr().out
    assert "sharded, whole" in told
    assert "tp 2" in told
    assert "2 ×  model.blocks.*.attn.qkv.weight" in told
    main(["inspect", str(saved / "parts.ckpt"), "--json"])
    assert json.loads(capsys.readouterr().out)["global_step"] == 3
    main(["convert", str(saved / "parts.ckpt"), str(tmp_path / "one.ckpt"), "--dry-run"])
    assert "would write one file" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())
    main(["convert", str(saved / "parts.ckpt"), str(tmp_path / "one.ckpt")])
    assert [file.name for file in tmp_path.iterdir()] == ["one.ckpt"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["inspect", "nowhere.ckpt"], "error: nowhere.ckpt: there is no such checkpoint"),
        (["inspect", "text.ckpt"], "error: text.ckpt: it can't be read ("),
        (["inspect", "tensor.ckpt"], "error: tensor.ckpt: it is no checkpoint of Lightning's (no state_dict in it)"),
        (["convert", "tensor.ckpt", "text.ckpt"], "error: text.ckpt: it is there already; remove it, or write elsewhere"),
    ],
)
def test_bad_input_is_told(tmp_path, monkeypatch, capsys, args, says):
    monkeypatch.chdir(tmp_path)
    Path("text.ckpt").write_text("a text")
    torch.save({"a": torch.zeros(2)}, "tensor.ckpt")
    with pytest.raises(SystemExit):
        main(args)
    assert capsys.readouterr().err.startswith(says)
