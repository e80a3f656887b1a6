"""What ``describe`` and ``seqpar plan`` say before a launch is what a run then keeps and sends."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import transformers
import yaml
from byte_gpt import ByteLM
from torch import nn

from lightning_seqpar import ParallelConfig, describe
from lightning_seqpar.cli.arguments import human
from lightning_seqpar.cli.main import main
from lightning_seqpar.cli.plan import render
from lightning_seqpar.sizing.search import layout_of
from tests.helpers.families import HuggingFace, build
from tests.helpers.models import GPT, loader
from tests.helpers.slices import rest
from tests.helpers.third_party import ThirdParty
from tests.helpers.zoo import Zoo
from tests.mutants import sees

LENGTH = 10
LLAMA_70B = {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672, "vocab_size": 128256, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}  # fmt: skip


def test_nothing_is_touched_started_or_drawn():
    module, batch = GPT(), next(iter(loader(2, length=LENGTH, count=2)))
    before = {name: (parameter, parameter.clone()) for name, parameter in module.named_parameters()}
    state = torch.get_rng_state()
    for plan in ("auto", "infer"):
        assert describe(module, ParallelConfig(tp=2, plan=plan), batch=batch).sent_calls
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert not dist.is_initialized()
    for name, parameter in module.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_a_model_that_a_plan_can_not_shard_is_refused_in_the_words_of_the_strategy():
    with pytest.raises(ValueError, match=r"8 units \(heads or features\) do not divide by tp=3; use tp=2, 4 or 8"):
        describe(build("llama"), ParallelConfig(tp=3))
    rules = [{"pattern": "model.layer.*", "style": "blocks"}]
    with pytest.raises(ValueError, match=r"'model.layer.\*' .* matches no module; near names: .*model.layers"):
        describe(build("llama"), ParallelConfig(tp=2, plan={"base": "none", "rules": rules}))
    with pytest.raises(ValueError, match="an example is needed"):
        describe(nn.Sequential(nn.Linear(4, 4)), ParallelConfig(tp=2))
    with pytest.raises(ValueError, match="optimizer='lion' is none of adamw"):
        describe(build("llama"), ParallelConfig(tp=2), optimizer="lion")
    model = build("llama")
    model.model.layers[1].compile()
    with pytest.raises(ValueError, match=r"model\.layers\.1 was compiled"):
        describe(model, ParallelConfig(tp=2))
    assert describe(model, ParallelConfig(tp=1))


def test_compiled_blocks_keep_what_eager_ones_do_and_must_have_a_compiled_form():
    model = build("llama")
    made_again, kept, compiled = (
        describe(model, ParallelConfig(tp=2, **one)).activation_bytes
        for one in ({"regather": True}, {"regather": False}, {"regather": True, "compile": True})
    )
    assert compiled == made_again < kept
    with pytest.raises(ValueError, match=r"gate_up_proj: compile=True, but the style 'column' on a parameter"):
        describe(build("mixtral"), ParallelConfig(tp=2, compile=True))


@sees(
    "a rehearsed column multiplies by a part of its weight",
    "_Rehearsal._cut_column",
    "for tensor, data in whole:",
    "for tensor, data in ():",
)
def test_an_unknown_model_is_inferred_from_its_example():
    example = torch.zeros(2, 12, dtype=torch.long)
    said = describe(GPT().model, ParallelConfig(tp=2, plan="infer"), example=example)
    assert {row.style for row in said.rows if row.module.endswith("attn.qkv")} == {"column"}
    assert said.input == [2, 12]
    assert any("not proved here" in note for note in said.notes)
    whole = describe(HuggingFace("gpt2"), ParallelConfig(tp=2, plan="infer"))
    assert whole.activation_bytes
    assert {row.decided for row in whole.rows if row.style == "row"} == {"inferred"}


class Odd(GPT):
    """Holds what ``deepcopy`` refuses, and gives an example."""

    def __init__(self, example: Any) -> None:
        super().__init__()
        self.example_input_array = example
        self.lock, self.event, self.generator = threading.RLock(), threading.Event(), torch.Generator()
        self.numbers, self.file = iter([1, 2]), open(__file__, encoding="utf-8")  # noqa: SIM115
        self.tables = [torch.ones(3), {"of the head": self.model.head.weight * 2}]
        self.model.blocks[0].table = torch.ones(self.model.head.weight.shape[-1], requires_grad=True)
        self.model.blocks[1].lock = threading.Lock()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.event.set()
            out: torch.Tensor = self.model(tokens) * self.tables[0].sum()
        return out


IDS = torch.zeros(2, 12, dtype=torch.long)


@sees(
    "what a copy can't hold ends a plan",
    "lazy_copy:deep_copy",
    "        attempt |= _stand_ins(model, attempt)\n",
    "",
    case="tensor",
)
@pytest.mark.parametrize("example", [IDS, {"tokens": IDS.to("meta")}], ids=["tensor", "dict"])
def test_a_module_may_hold_what_can_not_be_copied(example):
    module = Odd(example)
    known = describe(module, {"tp": 2})
    assert known.sent_calls
    assert known.sent_calls == describe(module, tp=2, plan="infer").sent_calls
    assert not module.event.is_set()
    module.file.close()


class ReadsFile(Odd):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.file.readline()
        return super().forward(tokens)


class AsksForNumbers(GPT):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(tokens)
        return out if tokens.sum() > -1 else out * 2


class AsksForActivations(GPT):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(tokens)
        return out if out.sum() > -1 else out * 2


class NoCopy(GPT):
    def __deepcopy__(self, memo: Any) -> Any:
        raise OSError("no copies of this")


def test_what_does_not_run_without_numbers_is_told_with_its_line():
    module = ReadsFile(IDS)
    (note,) = describe(module, tp=2).notes
    assert "file is a TextIOWrapper, which can't be copied" in note
    module.file.close()
    assert describe(AsksForNumbers(), tp=2, example=IDS).notes == []  # ids have numbers
    (note,) = describe(AsksForActivations(), tp=2, example=IDS).notes
    assert "reads numbers of a tensor (test_describe.py, line" in note
    assert "if out.sum() > -1" in note
    with pytest.raises(ValueError, match=r"NoCopy: it can't be described without a launch: .*no copies of this"):
        describe(NoCopy(), tp=2, example=IDS)


def test_a_configuration_is_given_in_one_way():
    with pytest.raises(ValueError, match="config= and tp=: give one or the other"):
        describe(GPT(), {"tp": 2}, tp=2)


@sees("a shared kv head's gradient left out of the traffic", "step_traffic", "shard.shared_length", "0")
def test_tp_above_the_kv_heads():
    """Ranks share kv heads, and the sums of their gradients are counted."""
    config = build("llama").config
    tp = 2 * config.num_key_value_heads
    said, alone = describe(build("llama"), tp=tp), describe(build("llama"), tp=config.num_key_value_heads)
    width = config.hidden_size // config.num_attention_heads * config.hidden_size
    shared = config.num_hidden_layers * 2 * config.num_key_value_heads * width
    assert said.sent_bytes["all_reduce"] - alone.sent_bytes["all_reduce"] >= shared * 4 > 0
    assert any("some of them by several ranks" in row.sync for row in said.rows)


@sees(
    "a norm in float32 over a rank's heads, which rounds another way, is taken for a wrong cut",
    "_Rehearsal.__init__",
    "if rounds else EQUAL",
    "if False else EQUAL",
)
def test_an_attention_that_rounds_to_float32():
    config = transformers.Llama4TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, intermediate_size_mlp=96, num_hidden_layers=4, head_dim=8,
        num_attention_heads=8, num_key_value_heads=4, num_local_experts=4, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    said = describe(transformers.Llama4ForCausalLM(config), {"tp": 4})
    assert {row.style for row in said.rows if row.module.endswith("self_attn.o_proj")} == {"row"}


@sees(
    "a plan's rows over the replicas counted whole",
    "ReplicaSplit.numel",
    "-(-parameter.shape[0] // self.replicas)",
    "parameter.shape[0]",
)
@pytest.mark.more
def test_what_replicas_share_out_is_counted():
    sizes = [{"tp": 2}, {"tp": 2, "pp": 2}, {"cp": 2}]
    for size in sizes:
        world = 2 * size.get("tp", 1) * size.get("cp", 1) * size.get("pp", 1)
        whole, said = (describe(build("llama"), {**size, "data_parallel": kind}, world_size=world) for kind in ("ddp", "fsdp"))
        parts = 2 * size.get("cp", 1)
        for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            assert getattr(said, name) * parts == pytest.approx(getattr(whole, name), rel=0.01), (size, name)
        assert 0 < said.gathered_bytes <= whole.parameter_bytes * 2
        assert not whole.gathered_bytes
        assert said.activation_bytes == whole.activation_bytes
        axes = "dp × cp" if "cp" in size else "dp"
        assert said.sent_calls[f"all_gather ({axes})"] == 5  # what is in no block once, and two blocks twice
        assert said.sent_calls[f"reduce_scatter ({axes})"] == 3
        assert f"all_reduce ({axes})" not in said.sent_bytes
        assert f"a rank holds the rows of one of {parts} replicas" in render(said, 400)
    fsdp = {"data_parallel": "fsdp", "world_size": 2}
    hybrid = {"data_parallel": "hsdp", "fsdp": {"shard_size": 2}, "world_size": 4}
    both, two = describe(build("llama"), **hybrid), describe(build("llama"), **fsdp)
    assert both.parameter_bytes == two.parameter_bytes
    assert (
        both.sent_bytes["all_reduce (dp)"]
        == both.sent_bytes["reduce_scatter (dp)"] // 2
        == two.sent_bytes["reduce_scatter (dp)"] // 2
    )
    told = (
        r"fsdp=\{shard_size: 2\}: 3 replicas \(dp 3 × cp 1\) do not divide by it; use shard_size=3, or start 2 or 4 processes"
    )
    with pytest.raises(ValueError, match=told):
        describe(build("llama"), **{**hybrid, "world_size": 3})
    with pytest.raises(ValueError, match=r"1 replicas .* do not divide by it; leave hsdp out, or start 2 processes"):
        describe(build("llama"), **{**hybrid, "world_size": 1})
    assert describe(build("llama"), **{**hybrid, "world_size": None}).world_size == 2
    stay = describe(build("llama"), fsdp={"reshard_after_forward": False}, **fsdp)
    assert stay.sent_calls["all_gather (dp)"] == 3
    assert stay.gathered_bytes == stay.global_parameters * 4
    half = describe(build("llama"), fsdp={"mp_policy": {"param_dtype": "bfloat16"}}, **fsdp)
    assert 2 * half.sent_bytes["all_gather (dp)"] == describe(build("llama"), **fsdp).sent_bytes["all_gather (dp)"]
    with pytest.raises(ValueError, match="no module has that name"):
        describe(build("llama"), fsdp={"units": ["model.layer.*"]}, **fsdp)


class LateModel(GPT):
    """Makes its model in ``configure_model``."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)

    def configure_model(self) -> None:
        GPT.__init__(self)


def test_configure_model_is_run_without_memory():
    late, early = LateModel(), GPT()
    said = describe(late, ParallelConfig(tp=2))
    assert said.global_parameters == sum(p.numel() for p in early.parameters())
    assert not list(late.parameters())


# ---- the command -----------------------------------------------------------------------------------------------


LLAMA, OWN = "tests.helpers.families:make_llama", "tests.helpers.models:GPT"


def some_batch() -> Any:
    return next(iter(loader(4, length=LENGTH, count=4)))


def no_batch() -> Any:
    raise KeyError("no batch")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    main(["plan", *args])
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path


@pytest.mark.more
def test_a_70b_folder_on_1024_ranks(folder, capsys):
    text = run(capsys, str(folder), "tp=8", "--world-size", "1024", "--length", "4096")
    assert max(map(len, text.splitlines())) <= 100
    assert "1,024 ranks: dp 128 × tp 8, sequence parallel; 70,553,706,496 parameters" in text
    local = 2 * 128256 * 8192 // 8 + 80 * ((8192 * 8192 * 2 + 2 * 1024 * 8192 + 3 * 8192 * 28672) // 8 + 2 * 8192) + 8192
    assert f"{local:,} on a rank" in text
    assert "\n562 of 562 tensors that could be are sharded (100 % of their parameters)\n" in text
    assert human(2 * local) in text
    for piece in ("80 ×", "model.layers.*", ".self_attn.q_proj", "weight [8192→1024, 8192]", "family llama", "sum tp"):
        assert piece in text


def test_json_says_all_of_it(folder, capsys):
    data = json.loads(run(capsys, LLAMA, "tp=2", "--json", "--batch-size", "2", "--length", "12"))
    said = describe(build("llama"), ParallelConfig(tp=2), batch_size=2, length=12)
    peak = layout_of(build("llama"), "2x H100", ParallelConfig(tp=2), samples=2, length=12, precision=None).memory.total
    said.peak_bytes = peak
    assert data == json.loads(json.dumps(said.to_dict()))
    assert data["rows"][3]["tensors"] == [{"name": "weight", "shape": [32, 32], "local_shape": [16, 32]}]


def test_the_plan_can_be_edited_and_fed_back(tmp_path, capsys):
    text, file = run(capsys, LLAMA, "tp=2", "--yaml"), tmp_path / "plan.yaml"
    assert "train with plan=" in run(capsys, LLAMA, "tp=2", "--out", str(file))
    assert file.read_text().rstrip() == text.rstrip()
    file.write_text(text.replace("down_proj, style: row", "down_proj, style: row, units: 2"))
    said = describe(build("llama"), ParallelConfig(tp=2, plan=str(file)))
    same = describe(build("llama"), ParallelConfig(tp=2))
    assert [(row.module, row.style, row.tensors) for row in said.rows] == [
        (row.module, row.style, row.tensors) for row in same.rows
    ]
    assert {row.decided for row in said.rows} == {str(file), ""}


def test_a_yaml_file_of_the_command_line(capsys, monkeypatch, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "trainer: {devices: 4, strategy: {class_path: lightning_seqpar.SeqParallelStrategy, init_args: {tp: 2}}}\n"
        "model: {class_path: tests.helpers.models.GPT, init_args: {dim: 32}}\n"
    )
    text = run(capsys, str(file))
    assert text.startswith("4 ranks: dp 2 × tp 2")
    assert "note: activations and traffic: no input to trace a step with" in text
    assert run(capsys, str(file), "tp=4").startswith("4 ranks: tp 4")
    text = run(capsys, str(file), "plan=infer", "--batch", "tests.unit.test_describe:some_batch")
    assert f"one step of 4 × {LENGTH}" in text
    assert "inferred" in text
    (tmp_path / "parallel.yaml").write_text("tp: 4\n")
    file.write_text(file.read_text().replace("{tp: 2}", "{config: parallel.yaml}"))
    assert run(capsys, str(file)).startswith("4 ranks: tp 4")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["nowhere"], "target='nowhere' is nothing that is known; give a YAML file"),
        (["nowhere.yaml"], "no such file"),
        (["tests.helpers.models:nothing"], "models has no 'nothing'; did you mean"),
        (["no_such_package:make"], "No module named 'no_such_package'"),
        (["tests.helpers.models:loader"], "without arguments"),
        ([LLAMA, "tp=3"], "use tp=2, 4 or 8"),
        ([LLAMA, "tq=3"], "tq"),
        ([LLAMA, "tp=2", "--length", "0"], "length=0 must be 1 or more"),
        ([LLAMA, "tp=4", "--world-size", "6"], "6"),
        ([LLAMA, "--config", "nowhere.yaml"], "does not exist"),
        ([OWN, "tp=2", "plan=infer"], "seqpar plan: --batch package.module:function"),
        ([OWN, "tp=2", "--batch", "tests.unit.test_describe:nothing"], "has no 'nothing'"),
        ([OWN, "tp=2", "--batch", "tests.unit.test_describe:no_batch"], "it raised KeyError: 'no batch' ("),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(args, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *args])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.startswith("error: ")
    assert "Traceback" not in error


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_recomputed_is_said_and_not_counted(tp):
    said = {
        how: describe(build("llama"), ParallelConfig(tp=tp, recompute=how), length=32) for how in ("none", "selective", "full")
    }
    kept = [said[how].activation_bytes for how in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert len({*kept}) == 3
    names = {"selective": "model.layers.*.self_attn", "full": "model.layers.*"}
    for how, name in names.items():
        note = f"recompute {how}: {name} (2 modules) run again in the backward"
        assert note in said[how].notes
        assert note in " ".join(render(said[how], 400).split())


@sees("a step that is traced in other types than it runs in", "traced_step:cast_in", "if dtype is None", "if True")
def test_a_precision_is_that_of_the_step():
    kinds = (None, "bf16-mixed", "bf16-true", "64-true")
    whole, mixed, half, double = (describe(build("llama"), tp=2, length=64, precision=one) for one in kinds)
    assert whole.activation_bytes is not None
    assert mixed.activation_bytes is not None
    assert mixed.activation_bytes < 0.9 * whole.activation_bytes
    assert mixed.parameter_bytes == whole.parameter_bytes == 2 * half.parameter_bytes == double.parameter_bytes // 2
    with pytest.raises(ValueError, match="precision='bf17' is none of 32-true, bf16-mixed"):
        describe(build("llama"), tp=2, precision="bf17")


def test_a_module_keeps_its_own_types_in_float32():
    module = ByteLM(dim=32, n_head=4, n_layer=2, context=16).to(torch.bfloat16)
    said = {one: describe(module, precision=one).parameter_bytes for one in ("bf16-mixed", "32-true", "64-true")}
    assert said["bf16-mixed"] == said["32-true"] == said["64-true"] // 4


@pytest.mark.parametrize(
    ("fields", "trainer"),
    [
        ({"tp": 2, "pp": 2}, {"devices": 4, "accumulate_grad_batches": 4}),
        ({"data_parallel": "fsdp"}, {"devices": 4, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
        ({"tp": 2}, {"devices": 2, "precision": "transformer-engine"}),
        ({"cp": 2, "tp": 2, "data_parallel": "hsdp", "fsdp": {"shard_size": 2}}, {"devices": 8, "precision": "bf16"}),
    ],
    ids=["pp", "fsdp", "unknown", "hsdp"],
)
def test_a_whole_yaml_file_is_read(tmp_path, capsys, fields, trainer):
    data = yaml.safe_load(Path("conf/cli.yaml").read_text())
    data["trainer"] |= trainer
    data["trainer"]["strategy"]["init_args"] = fields
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(data))
    said = json.loads(run(capsys, str(file), "--json"))
    assert said["world_size"] == trainer["devices"]
    assert said["input"] == [8, 65]  # the data module's first batch
    assert said["micro_batches"] == trainer.get("accumulate_grad_batches", 1)
    held = said["parameter_bytes"] + said["gradient_bytes"] + said["optimizer_bytes"]
    assert held < said["peak_bytes"] < 40 * held


@pytest.mark.parametrize("sizes", [rest({"cp": 2}), {"tp": 2, "cp": 2}, rest({"tp": 2, "cp": 2, "sp": False})], ids=str)
def test_sequences_over_ranks_are_counted_in_parts(sizes):
    options = ({}, {"tile_mlp": 16, "loss_chunk": 8}, {"recompute": "full"})
    for more in options:
        whole, said = (describe(build("llama"), ParallelConfig(**{**sizes, **more, "cp": cp}), length=64) for cp in (1, 2))
        assert said.activation_bytes is not None, said.notes
        assert whole.activation_bytes is not None
        assert said.activation_bytes < 0.75 * whole.activation_bytes, more
        assert said.sent_calls["alltoall"] >= 4


def test_an_attention_whose_row_stands_beside_it_is_found():
    example = torch.zeros(2, 8, dtype=torch.long)
    said = describe(ThirdParty("one_way_out").net, ParallelConfig(tp=2, recompute="selective"), example=example)
    assert "recompute selective: h.*.attn (2 modules) run again in the backward" in said.notes
    with pytest.raises(ValueError, match=r"in the blocks \(h\.\*\) no module is the attention"):
        describe(Zoo("all_inline").net, ParallelConfig(tp=2, recompute="selective"), example=example)
