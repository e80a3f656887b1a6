"""Checkpoints to safetensors in Hugging Face's layout and back, tensor by tensor."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lightning_seqpar.checkpoint.convert import open_source, write_checkpoint
from lightning_seqpar.checkpoint.huggingface import HuggingFaceSource, HuggingFaceTarget
from lightning_seqpar.cli.main import main
from tests import write_families
from tests.helpers import families
from tests.helpers.processes import memory
from tests.mutants import sees

SIZE = "40KB"  # so that tiny models make several files


def files(folder: Path) -> dict[str, Any]:
    """Every tensor with the name of its file."""
    return {name: (value, file.name) for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def written(family: str, place: Path, **settings: Any) -> Any:
    """A module's checkpoint, and what its library makes of its model."""
    module = families.HuggingFace(family, **settings)
    module.model.save_pretrained(place / "like", max_shard_size=SIZE)
    (place / "like" / "tokenizer.json").write_text('{"of": "the user"}')
    torch.save({"state_dict": module.state_dict(), "epoch": 1, "global_step": 2}, place / "a.ckpt")
    return module


def ties(state: dict[str, Any]) -> list[list[str]]:
    at: dict[int, list[str]] = {}
    for name, value in state.items():
        at.setdefault(value.data_ptr(), []).append(name)
    return list(at.values())


@sees(
    "experts left stacked",
    "HuggingFaceTarget.write",
    "state_dict=state, max_shard_size",
    "state_dict=state, save_original_format=False, max_shard_size",
    case="mixtral",
)
@pytest.mark.parametrize("family", list(write_families.FAMILIES))
def test_the_layout_is_the_librarys_own(tmp_path, family):
    """Names, tensors, files, index and config as ``save_pretrained`` writes them; and back, bitwise."""
    module = written(family, tmp_path)
    like, out = tmp_path / "like", tmp_path / "out"
    HuggingFaceTarget(open_source(tmp_path / "a.ckpt"), like, max_shard_size=SIZE).write(out)
    expected, got = files(like), files(out)
    assert set(got) == set(expected)
    for name, (value, _) in expected.items():
        assert torch.equal(got[name][0], value), name
    assert {name: file for name, (_, file) in got.items()} == {name: file for name, (_, file) in expected.items()}
    assert sorted(f.name for f in out.iterdir()) == sorted(f.name for f in like.iterdir())
    for name in ("config.json", "model.safetensors.index.json"):
        assert json.loads((out / name).read_text()) == json.loads((like / name).read_text())
    assert (out / "tokenizer.json").read_text() == '{"of": "the user"}'
    loaded = type(module.model).from_pretrained(out).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in module.model.state_dict().items())

    back = HuggingFaceSource(out, "model")
    write_checkpoint(back, tmp_path / "b.ckpt", "single")
    write_checkpoint(back, tmp_path / "parts", "sharded")
    write_checkpoint(open_source(tmp_path / "parts"), tmp_path / "c.ckpt", "single")
    whole = module.state_dict()
    for name in ("b.ckpt", "c.ckpt"):
        state = torch.load(tmp_path / name)["state_dict"]
        assert list(state) == list(whole)
        assert all(torch.equal(state[key], value) for key, value in whole.items())
        assert ties(state) == ties(whole)


def test_what_the_config_ties_and_the_files_hold_twice_must_be_equal(tmp_path):
    module = families.HuggingFace("qwen2", tie_word_embeddings=True)
    module.model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    assert "lm_head.weight" not in state
    for name, value in (("the same", state["model.embed_tokens.weight"].clone()), ("another", torch.ones(31, 32))):
        save_file({**state, "lm_head.weight": value}, file, metadata={"format": "pt"})
        if name == "the same":
            HuggingFaceSource(tmp_path, "model")
        else:
            with pytest.raises(ValueError, match="which differ, and the model ties them"):
                HuggingFaceSource(tmp_path, "model")
    save_file({"lm_head.weight": state.pop("model.embed_tokens.weight"), **state}, file, metadata={"format": "pt"})
    write_checkpoint(HuggingFaceSource(tmp_path, "model"), tmp_path / "a.ckpt", "single")
    found = torch.load(tmp_path / "a.ckpt")["state_dict"]
    assert list(found) == list(module.state_dict())
    assert all(torch.equal(value, found[key]) for key, value in module.state_dict().items())


def test_what_stands_beside_the_weights_is_copied(tmp_path):
    module = written("llama", tmp_path)
    like = tmp_path / "like"
    config = json.loads((like / "config.json").read_text())
    (like / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    for name in ("templates/one.jinja", ".cache/hidden", "old/pytorch_model.bin"):
        (like / name).parent.mkdir()
        (like / name).write_text(name)
    module.model.model.to(torch.bfloat16)
    module.model.model.embed_tokens.to(torch.float32)
    torch.save({"state_dict": module.state_dict()}, tmp_path / "a.ckpt")
    HuggingFaceTarget(open_source(tmp_path / "a.ckpt"), like).write(tmp_path / "out")
    found = sorted(str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert found == ["config.json", "generation_config.json", "model.safetensors", "templates/one.jinja", "tokenizer.json"]
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert told["dtype"] == "float32"  # the first parameter's, as save_pretrained tells it
    assert "quantization_config" not in told


def test_a_dry_run_lists_and_writes_nothing(tmp_path, capsys):
    written("mixtral", tmp_path)
    before = sorted(tmp_path.rglob("*"))
    args = ["convert", str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--to", "safetensors", "--dry-run"]
    main([*args, "--like", str(tmp_path / "like")])
    told = capsys.readouterr().out
    assert "8 ×  model.layers.*.block_sparse_moe.experts.*.w1.weight  [48, 32]  float32" in told
    assert "would write safetensors in Hugging Face's layout, 177.38 KiB" in told
    assert sorted(tmp_path.rglob("*")) == before


# ---- what goes wrong ----------------------------------------------------------------------------------------------


def change(**more: Any) -> Any:
    def changed(place: Path) -> None:
        state = torch.load(place / "a.ckpt")
        for name, value in more.items():
            state["state_dict"][name.replace("__", ".")] = value
        torch.save(state, place / "a.ckpt")

    return changed


def twice(place: Path) -> None:
    state = torch.load(place / "a.ckpt")
    state["state_dict"].update({f"teacher.{k}": v for k, v in [*state["state_dict"].items()]})
    torch.save(state, place / "a.ckpt")


WRONG = {
    "another shape": (
        change(model__lm_head__weight=torch.zeros(40, 32)),
        r"model.lm_head.weight: the checkpoint .* holds \[40, 32\], and the model of .*config.json has \[31, 32\]",
    ),
    "more than the model": (
        change(model__model__extra=torch.zeros(1)),
        "model.model.extra: the checkpoint .* holds 1 tensors that the model of .* has not",
    ),
    "a teacher and a student": (twice, "it holds this model 2 times, under 'model' and 'teacher.model'; say which by --prefix"),
    "adapters": (
        lambda place: torch.save({"state_dict": {"model.q_proj.lora_A.weight": torch.zeros(1)}}, place / "a.ckpt"),
        "adapters are in it: merge them into the model first",
    ),
    "another model": (
        lambda place: torch.save({"state_dict": {"encoder.weight": torch.zeros(1)}}, place / "a.ckpt"),
        "it does not hold the model of .*: 21 of its 21 tensors are missing, as model.embed_tokens.weight",
    ),
    "no folder": (lambda place: (place / "like/config.json").unlink(), "--like .*: no config.json is in it"),
}  # fmt: skip


@sees(
    "tensors under the model's prefix that it has not are dropped",
    "HuggingFaceTarget._check",
    "        if self._start and (more := ",
    "        if False and (more := ",
    case="more than the model",
)
@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_this_model_is_refused(tmp_path, what):
    written("llama", tmp_path)
    damage, says = WRONG[what]
    damage(tmp_path)
    with pytest.raises(ValueError, match=says):
        HuggingFaceTarget(open_source(tmp_path / "a.ckpt"), tmp_path / "like")


@sees(
    "weights that differ written as tied ones",
    "HuggingFaceTarget._check_ties",
    "if identity(one) != identity(other) and not torch.equal(",
    "if identity(one) != identity(other) and torch.equal(",
)
def test_weights_that_were_trained_apart_are_not_written_as_one(tmp_path):
    """A tied config writes one of two tensors; that is right where both are the same."""
    written("t5", tmp_path)
    tied = torch.load(tmp_path / "a.ckpt")
    tied["state_dict"]["model.encoder.embed_tokens.weight"] = tied["state_dict"]["model.shared.weight"].clone()
    torch.save(tied, tmp_path / "a.ckpt")
    HuggingFaceTarget(open_source(tmp_path / "a.ckpt"), tmp_path / "like").write(tmp_path / "out")
    tied["state_dict"]["model.encoder.embed_tokens.weight"] += 1
    torch.save(tied, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"differ, and .* ties them; set tie_word_embeddings to false there"):
        HuggingFaceTarget(open_source(tmp_path / "a.ckpt"), tmp_path / "like")


def test_a_teacher_or_a_student_is_chosen_by_its_prefix(tmp_path):
    module = written("llama", tmp_path)
    twice(tmp_path)
    made = HuggingFaceTarget(open_source(tmp_path / "a.ckpt"), tmp_path / "like", "teacher.model")
    assert len(made.left_out) == len(module.state_dict())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["a.ckpt", "out", "--to", "safetensors"], "error: --to safetensors needs --like FOLDER"),
        (["a.ckpt", "out", "--to", "single"], "error: --to single: a.ckpt has that form already; copy it"),
        (["like", "out"], "error: like is a Hugging Face folder: say which attribute of your LightningModule holds the model"),
        (
            ["like", "out", "--prefix", "model", "--to", "safetensors", "--like", "like"],
            "error: like: it is in Hugging Face's layout",
        ),
        (
            ["a.ckpt", "out", "--to", "safetensors", "--like", "like", "--max-shard-size", "big"],
            "error: --max-shard-size big: write a number of bytes, such as 5GB or 500MB",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_told(tmp_path, monkeypatch, capsys, args, says):
    monkeypatch.chdir(tmp_path)
    written("llama", tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["convert", *args])
    assert capsys.readouterr().err.startswith(says)
    assert not Path("out").exists()


def test_a_file_that_is_cut_is_told(tmp_path):
    written("llama", tmp_path)
    file = next((tmp_path / "like").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model-\d+-of-\d+.safetensors' can't be read"):
        HuggingFaceSource(tmp_path / "like", "model")


# ---- memory -------------------------------------------------------------------------------------------------------


def through_every_form(place: Path, note: Any) -> None:
    """Hugging Face's folder to a file, to a folder in parts, to a file, and back to Hugging Face's."""
    write_checkpoint(HuggingFaceSource(place / "like", "model"), place / "a.ckpt", "single", note)
    write_checkpoint(open_source(place / "a.ckpt"), place / "parts", "sharded", note)
    write_checkpoint(open_source(place / "parts"), place / "b.ckpt", "single", note)
    target = HuggingFaceTarget(open_source(place / "parts"), place / "like", max_shard_size="40MB")
    target.write(place / "out", note)


@sees(
    "all of a shard is held while it is written",
    "read_all",
    "memory = mmap.mmap(file.fileno(), 0)",
    "memory = bytearray(max(size, 1))",
)
@pytest.mark.more
def test_no_more_than_a_tensor_is_held(tmp_path):
    """176 MiB of 4 MiB tensors."""

    def make(name: str, width: int) -> int:
        config = transformers.LlamaConfig(
            hidden_size=width, intermediate_size=width, num_hidden_layers=6, num_attention_heads=8, vocab_size=width
        )
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / name / "like", max_shard_size="40MB")
        return max(p.numel() * p.element_size() for p in model.parameters())

    make("small", 32)
    largest = make("large", 1024)
    through_every_form(tmp_path / "small", lambda done, total: None)  # what is imported and started once
    gc.collect()
    ctypes.CDLL(None).mallopt(-3, 2**20)  # what is freed goes back to the system, and no hole of 4 MiB stays
    start = memory("RssAnon")
    peaks: list[int] = []
    through_every_form(tmp_path / "large", lambda done, total: peaks.append(memory("RssAnon") - start))
    assert len(peaks) > 4 * 44
    assert max(peaks) < 3 * largest, f"{max(peaks) / largest:.1f} times the largest tensor"
    expected, got = files(tmp_path / "large" / "like"), files(tmp_path / "large" / "out")
    assert all(torch.equal(value, got[name][0]) for name, (value, _) in expected.items())
