"""What ``seqpar plan --fit`` predicts, against cases that were counted by hand."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
import transformers
import yaml
from byte_gpt import ByteLM
from torch import Tensor, nn

from lightning_seqpar import ParallelConfig, fit_layout
from lightning_seqpar.cli.fit import render_search
from lightning_seqpar.cli.main import main
from lightning_seqpar.init.model_source import load_target
from lightning_seqpar.sizing.machines import Cluster, Machine, cluster, machines_in, presets, quantity
from lightning_seqpar.sizing.memory import StagePart, parts_of, peak_memory
from lightning_seqpar.sizing.search import layout_of
from lightning_seqpar.sizing.step_time import Links, step_seconds
from lightning_seqpar.sizing.timeline import schedule, timeline
from lightning_seqpar.sizing.traced import HeldParameter, StepTracer, TracedRank, optimizer_of, resized
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.verify.step_usage import BEHIND, FRONT, Segment
from lightning_seqpar.verify.traced_step import sizes_of
from tests.mutants import sees

GIB = 2**30
SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


def llama(**fields: Any) -> nn.Module:
    shape = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "use_cache": False, **fields}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))


@pytest.fixture(scope="module")
def tracers() -> dict[str, StepTracer]:
    """Of each Llama-3 a tracer, so that what does not depend on a layout is found once."""
    return {size: StepTracer(llama(**SHAPES[size]), "bf16-true", length=64) for size in SHAPES}


def numbers(size: str, tp: int, blocks: int, ends: int) -> int:
    """Parameters of a rank by hand: so many blocks, and so many of embedding and head; the last norm goes with the head."""
    shape = SHAPES[size]
    h, f, kv = shape["hidden_size"], shape["intermediate_size"], 1024
    block = (2 * h * h + 2 * h * kv + 3 * h * f) // tp + 2 * h
    return blocks * block + ends * 128256 * h // tp


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize(
    ("fields", "world", "by_hand"),
    [
        ({}, 1, [lambda n, size: n(size, 1, SHAPES[size]["num_hidden_layers"], 2)]),
        ({"tp": 8}, 8, [lambda n, size: n(size, 8, SHAPES[size]["num_hidden_layers"], 2)]),
        ({"tp": 2}, 8, [lambda n, size: n(size, 2, SHAPES[size]["num_hidden_layers"], 2)]),
        ({"cp": 2}, 2, [lambda n, size: n(size, 1, SHAPES[size]["num_hidden_layers"], 2)]),
        ({"pp": 2, "pp_layers": True}, 2, [lambda n, size: n(size, 1, SHAPES[size]["num_hidden_layers"] // 2, 1)] * 2),
        (
            {"tp": 8, "pp": 4, "pp_layers": True},
            64,
            [lambda n, size, ends=ends: n(size, 8, SHAPES[size]["num_hidden_layers"] // 4, ends) for ends in (1, 0, 0, 1)],
        ),
        ({"data_parallel": "fsdp"}, 8, [lambda n, size: n(size, 1, SHAPES[size]["num_hidden_layers"], 2) // 8]),
        ({"tp": 2, "data_parallel": "fsdp"}, 8, [lambda n, size: n(size, 2, SHAPES[size]["num_hidden_layers"], 2) // 4]),
    ],
    ids=["one", "tp8", "tp2-dp4", "cp2", "pp2", "tp8-pp4-dp2", "fsdp8", "tp2-fsdp4"],
)
def test_parameters_of_llama_at_eight_layouts(tracers, size, fields, world, by_hand):
    tracer = tracers[size]
    if "pp_layers" in fields:
        pp = fields["pp"]
        fields = {**fields, "pp_layers": [SHAPES[size]["num_hidden_layers"] // pp] * pp}
    config = ParallelConfig(**fields)
    traced = tracer.trace(config, 1)
    parts = parts_of(traced, config, tracer.cut(config, 1) if config.pp > 1 else None)
    replicas = world // (config.tp * config.pp)
    h = SHAPES[size]["hidden_size"]
    assert len(parts) == len(by_hand)
    for at, (part, count) in enumerate(zip(parts, by_hand, strict=True)):
        wanted = count(numbers, size)
        if at == len(parts) - 1:  # the norm in front of the head
            wanted += h // config.shares(replicas)
        peak = peak_memory(traced, part, config, replicas, 4, 2, fused=True)
        held = peak.parameters - traced.buffer_bytes - traced.batch_bytes
        assert held == 2 * wanted
        assert peak.optimizer == 2 * held


STAGES = [
    (2, 1, 2, 0.72), (2, 1, 4, 1.20), (2, 1, 16, 4.08), (4, 1, 4, 0.84), (4, 1, 8, 1.32), (4, 1, 16, 2.28),
    (2, 2, 4, 1.08), (4, 2, 8, 1.14), (1, 1, 4, 1.92),
]  # fmt: skip
"""Stages, chunks, micro-batches, and the seconds of a step of eight blocks of 20 and 40 ms: (m + (p - 1) / v) t."""


@sees(
    "a pipeline that waits for nobody",
    "timeline:timeline",
    "max(now[stage], ended.get(before, 0.0))",
    "now[stage]",
    case="4-1-4-0.84",
)
@pytest.mark.parametrize(("stages", "chunks", "micro_batches", "seconds"), STAGES, ids=lambda x: str(x))
def test_a_pipeline_waits_as_long_as_the_formula_says(stages, chunks, micro_batches, seconds):
    runs = timeline([(8 / stages * 0.02, 8 / stages * 0.04)] * stages, chunks, micro_batches)
    assert max(run.end for run in runs) == pytest.approx(seconds)
    assert len(runs) == 2 * stages * chunks * micro_batches
    for stage in range(stages):
        own = [run for run in runs if run.stage == stage]
        assert all(one.end <= other.begin + 1e-12 for one, other in pairwise(own))


def test_the_order_of_a_stage_is_that_of_the_training():
    parts = [(part.micro_batch, "B" if part.is_backward else "F") for part in schedule(1, 3, 1, 4)]
    assert parts == [(0, "F"), (1, "F"), (0, "B"), (2, "F"), (1, "B"), (3, "F"), (2, "B"), (3, "B")]


def machine(**fields: Any) -> Machine:
    plain = {
        "memory": 10e9, "flops": {"float32": 1e12, "bfloat16": 2e12}, "bandwidth": 1e11, "in_node": 100e9, "network": 10e9,
        "per_node": 8, "efficiency": [[1e6, 0.5], [1e8, 1.0]], "attention": 0.5, "bandwidth_share": 1.0, "host": 0.0,
        "latency": {"in_node": 0.0, "network": 0.0}, "reserved": 0.0,
    }  # fmt: skip
    return Machine(**{**plain, **fields})


@sees(
    "bytes between nodes at the speed inside",
    "Links.among",
    "if crosses else machine.in_node",
    "if not crosses else machine.in_node",
)
def test_seconds_of_collectives():
    links = Links(ProcessTopology(["pp", "dp", "cp", "tp"], [1, 4, 1, 8]), machine())
    assert links.seconds(("tp",), "all_reduce", 800e6) == pytest.approx(2 * 800e6 * 7 / 8 / 100e9)
    assert links.seconds(("tp",), "all_gather", 100e6) == pytest.approx(7 * 100e6 / 100e9)
    assert links.seconds(("tp",), "reduce_scatter", 800e6) == pytest.approx(800e6 * 7 / 8 / 100e9)
    # The four replicas of a rank are on four nodes, each with one link of its own.
    assert links.seconds(("dp",), "all_reduce", 800e6) == pytest.approx(2 * 800e6 * 3 / 4 / 10e9)
    assert links.seconds(("cp",), "all_reduce", 800e6) == 0
    # Sixteen replicas on two nodes: eight links leave each.
    wide = Links(ProcessTopology(["pp", "dp", "cp", "tp"], [1, 16, 1, 1]), machine())
    assert wide.seconds(("dp",), "all_reduce", 800e6) == pytest.approx(2 * 800e6 * 15 / 16 / 80e9)
    slow = Links(ProcessTopology(["pp", "dp", "cp", "tp"], [2, 1, 1, 8]), machine(latency={"in_node": 1e-5, "network": 2e-5}))
    assert slow.seconds(("pp",), "send", 1e6) == pytest.approx(2e-5 + 1e6 / 10e9)


@sees(
    "rows that no other node holds",
    "step_time:_replicas",
    "same = ranks[:shares], ranks[::shares]",
    "same = ranks[:shares], ranks[:1]",
)
def test_seconds_of_rows_that_replicas_share_out():
    whole = [HeldParameter("w", 800_000_000, 8, True)]
    part = StagePart([], whole, 1, 0)
    topology = ProcessTopology(["pp", "dp", "cp", "tp"], [1, 16, 1, 1])

    def sent(micro_batches: int, **fields: Any) -> float:
        found = step_seconds([part], ParallelConfig(**fields), topology, machine(), micro_batches, "float32", 0).sent
        return found["dp"]

    # Two gathers and a sum in each micro-batch, over two nodes with eight links each.
    assert sent(1, data_parallel="fsdp") == pytest.approx(3 * 800e6 * 15 / 16 / 80e9)
    assert sent(4, data_parallel="fsdp") == pytest.approx(4 * sent(1, data_parallel="fsdp"))
    # Inside a node; what eight share out is summed with the other node.
    inside, between = 3 * 800e6 * 7 / 8 / 100e9, 2 * 100e6 / 2 / 10e9
    hsdp: dict[str, Any] = {"data_parallel": "hsdp", "fsdp": {"shard_size": 8}}
    assert sent(1, **hsdp) == pytest.approx(inside + between)
    assert sent(4, **hsdp) == pytest.approx(4 * sent(1, **hsdp))


def test_seconds_of_products():
    one = machine()
    assert one.product_seconds(1e8, 0, "float32", False) == pytest.approx(1e8 / 1e12)
    assert one.product_seconds(1e7, 0, "float32", False) == pytest.approx(1e7 / (1e12 * 0.75))
    assert one.product_seconds(1e5, 0, "bfloat16", False) == pytest.approx(1e5 / (2e12 * 0.5))
    assert one.product_seconds(1e9, 0, "float32", True) == pytest.approx(1e9 / (1e12 * 0.5))
    assert one.product_seconds(1e6, 1e9, "float32", False) == pytest.approx(1e9 / 1e11)


def hand_made() -> TracedRank:
    """Two blocks that keep 10 bytes each, and logits of 30; each parameter has 100 bytes."""

    def of(block: str, back: bool, most: int, left: int, gradients: tuple[str, ...] = ()) -> Segment:
        grown = 100 * len(gradients)
        return Segment(block, back, most, most + grown, left, grown, frozenset(gradients), Counter(), 0, 0, Counter())

    segments = [
        of(FRONT, False, 2, 2), of("b.0", False, 14, 10), of("b.1", False, 14, 10), of(BEHIND, False, 50, 30),
        of(BEHIND, True, 20, -30, ("head",)), of("b.1", True, 8, -10, ("b.1.w",)), of("b.0", True, 8, -10, ("b.0.w",)),
        of(FRONT, True, 4, -2, ("table",)),
    ]  # fmt: skip
    held = [HeldParameter(name, 100, 5, True) for name in ("table", "b.0.w", "b.1.w", "head")]
    return TracedRank(segments, ["b.0", "b.1"], held, 7, 3, {"b.0": 4, "b.1": 4}, ["b.0", "b.1"])


def total(config: dict[str, Any], replicas: int = 1, micro_batches: int = 1, moments: int = 2) -> int:
    traced = hand_made()
    own = StagePart(traced.segments, traced.parameters, 1, 0)
    return peak_memory(traced, own, ParallelConfig(**config), replicas, micro_batches, moments, fused=False).total


@sees(
    "gradients that are empty in the forward",
    "memory:peak_memory",
    "live, held, gathered = now + one.most, gradients, 0",
    "live, held, gathered = now + one.most, 0, 0",
)
@sees("buckets of ddp forgotten", "memory:peak_memory", "buckets = gradients * (in_buckets and not views)", "buckets = 0")
def test_peaks_by_hand():
    base = 400 + 800 + 7 + 3  # parameters, moments, buffers, batch
    # The step with its update of 2 x 100 bytes is less than the forward: old gradients, 22 kept, 50 for the logits.
    assert total({}) == max(base + 400 + 22 + 50, base + 400 + 200)
    # The update is the most here; with gradients of 400 beside.
    assert total({}) == base + 400 + 200
    # Without moments the forward is, in which the gradients of the step before still are.
    assert total({}, moments=0) == 400 + 10 + 400 + 22 + 50
    # Accumulated gradients stay in the backward: 52 kept, 20 at once.
    assert total({}, micro_batches=2) == base + 400 + 200
    # DDP has its buckets beside the gradients, or gradients are parts of them.
    assert total({}, replicas=2) == base + 400 + 400 + 200
    assert total({"ddp": {"gradient_as_bucket_view": True}}, replicas=2) == base + 400 + 200
    # Of 5 rows a rank of 2 has 3: 60 bytes. The first block's backward: table, head and two blocks are whole, and so are the
    # gradients of the head, which is in no unit, and of the last block; both have left 60; 12 kept, 8 and own gradients at once.
    sharded = 4 * 60 * 3 + 10
    assert total({"data_parallel": "fsdp"}, replicas=2) == sharded + (200 + 200) + (100 + 100) + 120 + 12 + 108
    # With several micro-batches the rows of all gradients are there from the first one, and those of a block are new beside them.
    assert (
        total({"data_parallel": "fsdp"}, replicas=2, micro_batches=2)
        == sharded + 240 + (200 + 200) + (100 + 100) + 50 + 12 + 108
    )


def test_the_first_of_two_stages_keeps_two_micro_batches():
    traced = hand_made()
    first = StagePart([one for one in traced.segments if one.block in (FRONT, "b.0")], traced.parameters[:2], 2, 0)
    peak = peak_memory(traced, first, ParallelConfig(pp=2), 1, 4, 0, fused=False)
    assert peak.total == 200 + 200 + 10 + 12 + max(2 + 14, 12 + 8)
    # Of two alone both are forward before any gradient: they grow in the first backward, or the second has its own 12 kept.
    alone = peak_memory(traced, first, ParallelConfig(pp=2), 1, 2, 0, fused=False)
    assert alone.total == 200 + 10 + max(12 + 12 + 108, 12 + 2 + 104 + 100, 200 + 12 + 8)
    last = StagePart([one for one in traced.segments if one.block in (BEHIND, "b.1")], traced.parameters[2:], 1, 4)
    assert peak_memory(traced, last, ParallelConfig(pp=2), 1, 4, 0, fused=False).total == 200 + 200 + 10 + 4 + 10 + 50


@sees("a block's usage counted once for all like it", "traced:_with_passed", "passed.get(name, name)", "name")
@pytest.mark.parametrize(
    "fields", [{}, {"tp": 2}, {"tp": 2, "recompute": "full"}, {"cp": 2, "recompute": "activations"}], ids=str
)
def test_blocks_that_pass_by_count_as_those_of_their_kind(fields, monkeypatch):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 512}
    config = ParallelConfig(**fields)
    short = StepTracer(llama(**shape), length=32)
    assert len(short._passed(config, 2)) == 3
    quick = short.trace(config, 2)
    monkeypatch.setattr(StepTracer, "_passed", lambda self, config, samples: {})
    whole = StepTracer(llama(**shape), length=32).trace(config, 2)
    assert quick.segments == whole.segments
    assert quick.activation == whole.activation


def test_a_batch_is_repeated_and_cut():
    batch = {"x": torch.arange(6).view(3, 2), "y": torch.arange(3), "scale": torch.tensor(2.0), "table": torch.zeros(5)}
    more, less = resized(batch, 7), resized(batch, 2)
    assert more["x"].shape == (7, 2)
    assert more["y"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert less["y"].tolist() == [0, 1]
    assert more["scale"].ndim == 0
    assert more["table"].shape == (5,)


@pytest.fixture(scope="module")
def searched():
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 4096}
    tight = Cluster(devices=4, machine=machine(memory=60e6, per_node=2), name="")
    return fit_layout(llama(**shape), tight, length=256, tokens_per_batch=256 * 16)


def test_a_search_orders_what_fits_and_says_what_does_not(searched):
    assert searched.best
    assert searched.too_large
    speeds = [one.tokens_per_second for one in searched.best]
    assert speeds == sorted(speeds, reverse=True)
    assert len({one.shown for one in searched.best}) == len(searched.best)
    for one in [*searched.best, *searched.too_large]:
        assert one.fits == (one.memory.total <= 0.96 * 60e6)
        sizes = one.axes
        assert sizes["tp"] * sizes["dp"] * sizes["cp"] * sizes["pp"] == 4
        assert sizes["tp"] <= 2
        assert one.samples * one.micro_batches * sizes["dp"] == 16
        assert one.config.pp == 1 or one.micro_batches >= one.config.pp
        memory = one.memory
        assert min(vars(memory).values()) >= 0
        assert ParallelConfig.from_omegaconf(one.trainer(2)["strategy"]["init_args"]) == one.config
        assert one.trainer(2)["devices"] * one.trainer(2)["num_nodes"] == 4
    kinds = {one.config.data_parallel for one in searched.best}
    assert {"fsdp", "hsdp"} & kinds
    nearest = [one.memory.total for one in searched.too_large]
    assert nearest == sorted(nearest)


def test_a_search_is_told_in_a_table_and_in_json(searched):
    text = render_search(searched, 3)
    assert searched.best[0].shown in text
    assert "do not fit:" in text
    assert "too much by" in text
    data = json.loads(json.dumps(searched.to_dict(3)))
    assert len(data["best"]) == 3
    assert data["best"][0]["memory"]["total"] == searched.best[0].memory.total
    assert (
        sum(data["best"][0]["memory"][kind] for kind in data["best"][0]["memory"] if kind != "total")
        == data["best"][0]["memory"]["total"]
    )


def test_fields_that_are_given_hold_for_every_layout():
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 512}
    found = fit_layout(
        llama(**shape), "8x A100", length=64, tokens_per_batch=64 * 16, config={"tp": 2, "pp": 1}, precision="32-true"
    )
    assert {one.config.tp for one in found.best} == {2}
    assert {one.config.pp for one in found.best} == {1}
    fixed = fit_layout(llama(**shape), "4x A100", length=64, tokens_per_batch=64 * 16, config={"dp": 2}, precision="32-true")
    assert {one.axes["dp"] for one in fixed.best} == {2}
    assert {"tp 2 × dp 2", "pp 2 × dp 2"} <= {" × ".join(sorted(one.shown.split(" × "), reverse=True)) for one in fixed.best}
    one = found.best[0]
    again = layout_of(
        llama(**shape),
        "8x A100",
        one.config,
        length=64,
        samples=one.samples,
        micro_batches=one.micro_batches,
        precision="32-true",
    )
    assert again == one


class HeadsByNumber(nn.Module):
    """A block with the number of its heads written into its forward, which no plan can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(len(x), -1, 3, 4, 4).permute(2, 0, 3, 1, 4)
        return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), -1, 16))


def test_a_model_that_tp_can_not_cut_is_searched_without():
    model = nn.Sequential(*[HeadsByNumber() for _ in range(2)])
    found = fit_layout(model, "2x H100", example=torch.zeros(2, 8, 16), precision="32-true")
    assert {one.shown for one in found.best} == {"dp 2", "dp 2 fsdp"}
    assert "tp 2" in found.refused


def test_presets_are_whole_and_named_with_their_sources():
    known = presets()
    assert {*known} == {"A100", "H100", "H200", "B200", "L40S", "MI300X", "CPU"}
    for one in known.values():
        assert one.sources
        assert 0 < one.usable < one.memory
        shares = [share for _, share in one.efficiency]
        assert shares == sorted(shares)
        assert max(shares) <= 1
    assert cluster("64x h100").shown == "64x H100 in 8 nodes"
    assert cluster("4", memory=80e9, flops=1e15, in_node=1e11, network=1e10).machine.flops["bfloat16"] == 1e15


@pytest.mark.parametrize(
    ("text", "number"), [("80GiB", 80 * GIB), ("800T", 8e14), ("450 G", 4.5e11), ("2e9", 2e9), ("1.5TB", 1.5e12)], ids=str
)
def test_quantities(text, number):
    assert quantity(text, "--memory") == number


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--fit", "8x H1000"], "'H1000' is no known machine; did you mean 'H100'"),
        (["--fit", "lots"], "write how many devices of which kind, such as '8x H100'"),
        (["--fit", "0x H100"], "write how many devices"),
        (["--fit", "8"], "it names no kind of device; write '8x H100', or say --memory, --flops, --nvlink, --network, too"),
        (["--gpus", "8", "--memory", "much"], "--memory='much': write a number with a unit, such as 80GiB"),
        (["--fit", "8x H100", "--gpus", "8"], "give one of them"),
        (["--fit", "8x H100", "--precision", "8-true"], "precision='8-true' is none of 32-true"),
        (
            ["--fit", "8x H100", "--machines", "none.yaml"],
            "'none.yaml' does not exist; seqpar plan --calibrate FILE writes one",
        ),
        (["--fit", "8x H100", "--tokens-per-batch", "0"], "tokens_per_batch=0 must be 1 or more"),
        (["--fit", "8x H100", "tpp=2"], "'tpp' is not a field of ParallelConfig; did you mean 'tp'"),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else "",
)
def test_what_is_wrong_is_said_in_a_sentence(args, sentence, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["plan", "tests.unit.test_sizing:small", *args])
    assert exit.value.code == 2
    assert sentence in capsys.readouterr().err


def small() -> nn.Module:
    return llama(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, vocab_size=512)


def test_the_command_writes_a_file_that_trains_and_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--fit", "2x CPU", "--precision", "32-true", "--tokens-per-batch", str(64 * 16), "pp=2"]
    target = str(load_target.__globals__["Path"](__file__).parents[2] / "conf" / "cli.yaml")
    main(["plan", target, *options, "--write", "run.yaml", "--plot", "fit.png"])
    told = capsys.readouterr().out
    assert "train with seqpar fit -c run.yaml" in told
    written = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert written["model"]["class_path"] == "examples.byte_gpt.ByteLM"
    wanted = {"tp": 1, "cp": 1, "pp": 2, "virtual_pp": None, "data_parallel": "ddp", "recompute": "none"}
    assert written["trainer"]["strategy"]["init_args"] == wanted
    count = written["trainer"]["accumulate_grad_batches"]
    assert written["data"]["init_args"]["batch_size"] * count == 16
    assert (tmp_path / "fit.png").stat().st_size > 10_000
    again = load_target(str(tmp_path / "run.yaml"))
    assert again.fields == wanted
    assert again.world_size == 2


class Numbered(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(at), "ids": torch.zeros(64, dtype=torch.int64)}


class NumberedData(L.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Numbered(), batch_size=self.batch_size)


class OfNumbered(ByteLM):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch["ids"], batch_idx)


@sees(
    "fields of the file's strategy lost in the search",
    "fit:_fixed",
    "with_overrides(kept, overrides)",
    "with_overrides({}, overrides)",
)
def test_a_file_keeps_its_batch_and_the_fields_that_make_no_layout(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = {"timeout": 77.0, "checkpoint": {"format": "sharded"}, "self_check": False}
    run = {
        "model": {"class_path": f"{__name__}.OfNumbered", "init_args": {"dim": 64, "n_head": 4, "n_layer": 2, "context": 64}},
        "data": {"class_path": f"{__name__}.NumberedData", "init_args": {"batch_size": 4}},
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "accumulate_grad_batches": 2,
            "strategy": {"class_path": "lightning_seqpar.SeqParallelStrategy", "init_args": {"tp": 2, "recompute": "full", **kept}},
        },
    }  # fmt: skip
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(run))
    main(["plan", "given.yaml", "--fit", "2x CPU", "--write", "run.yaml"])
    assert "no whole number" not in capsys.readouterr().out
    written = yaml.safe_load((tmp_path / "run.yaml").read_text())
    made = written["trainer"]["strategy"]["init_args"]
    assert made.items() >= kept.items()
    assert written["trainer"]["precision"] == "32-true"  # as Lightning takes it where the file says nothing
    config = ParallelConfig(**made)
    replicas = 2 // (config.tp * config.pp)
    assert written["data"]["init_args"]["batch_size"] * written["trainer"]["accumulate_grad_batches"] * replicas == 8


@sees(
    "channels of images taken for positions",
    "traced_step:sizes_of",
    "if x.ndim == 3 or (x.ndim == 2 and not x.is_floating_point())]",
    "]",
    case="images",
)
@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"index": torch.zeros(4), "ids": torch.zeros(4, 9, dtype=torch.int64)}, (4, 9)),
        ((torch.zeros(3, dtype=torch.int64), torch.zeros(3, 16, 8)), (3, 16)),
        ((torch.zeros(2, 3, 32, 32), torch.zeros(2)), (2, 1)),
        ((torch.zeros(5, 7), torch.zeros(5)), (5, 1)),
        (torch.zeros(5), None),
    ],
    ids=["ids", "features", "images", "numbers", "none"],
)
def test_samples_and_positions(given, sizes):
    assert sizes_of(given) == sizes


class Plain(ByteLM):
    optimizers_made: Any = staticmethod(lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizers_made(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1), "sgd"),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), "sgd-momentum"),
        (lambda ps: torch.optim.Adam(ps), "adamw"),
        (lambda ps: nobody_knows, "adamw"),  # noqa: F821
    ],
    ids=["sgd", "momentum", "adam", "raises"],
)
def test_the_optimizer_is_the_module_s_own(make, kind):
    module = Plain(dim=32, n_head=4, n_layer=2, context=16)
    module.optimizers_made = make
    assert optimizer_of(module) == kind
    assert optimizer_of(nn.Linear(2, 2)) == "adamw"


def test_stacks_without_chunks_have_stages(tmp_path):
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 4, "num_heads": 4, "vocab_size": 256}
    shape |= {"decoder_start_token_id": 0}
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape))
    found = fit_layout(model, "4x CPU", length=32, precision="32-true")
    assert {"dp 4", "dp 2 × tp 2", "pp 2 × tp 2"} <= {one.shown for one in found.best}
    assert any("virtual_pp 2" in name and "several stacks" in why for name, why in found.refused.items())


def test_what_no_batch_can_divide_is_not_asked_of_the_batch():
    found = fit_layout(llama(num_hidden_layers=2, hidden_size=64, intermediate_size=96), "8x H100", length=32, config={"tp": 3})
    assert found.notes == ["no layout with tp=3 divides 8 samples over 8 devices; change these, or tokens_per_batch"]


def test_a_file_of_machines_is_read_back(tmp_path):
    file = tmp_path / "machines.yaml"
    file.write_text(yaml.safe_dump({"mine": machine().model_dump(mode="json")}))
    assert machines_in(file) == {"mine": machine()}
    file.write_text("mine: {memory: 1}")
    with pytest.raises(ValueError, match=r"mine: .*flops"):
        machines_in(file)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="must hold machines by name"):
        machines_in(file)
