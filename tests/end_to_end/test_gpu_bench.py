"""``make gpu-bench`` with tiny models on a CPU, where its counts are those of any machine; and what it makes of a GPU's trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_bench
import pytest
from gpu_bench import ALONE, DTENSOR, OURS, TINY, WAYS

from tests.helpers.processes import PYTHON, ROOT, run

PINS = {OURS: 920, f"{OURS}, compiled": 566}
"""Operations of a step of ours on the fake network."""


def bench(out: Path, *args: str, timeout: float) -> dict[str, dict[str, Any]]:
    """What the command finds, which must be all that it looks for; its table stands in the file, too."""
    script = str(ROOT / "benchmarks" / "gpu_bench.py")
    status, said = run(PYTHON, script, "--small", "--out", str(out), *args, timeout=timeout, CUDA_VISIBLE_DEVICES="")
    assert status == 0, said
    text = (out / "gpu_bench.md").read_text()
    assert "A CPU computed this" in text
    assert text.partition("bytes kept).")[2].strip() in said
    return dict(json.loads((out / "gpu_bench.json").read_text())["found"])


def assert_steps(found: dict[str, dict[str, Any]], network: str) -> None:
    """Every way that was measured has numbers that can be, and ours makes fewer operations than DTensor and keeps fewer bytes."""
    ours, theirs = (found[f"steps, {TINY}, 32, {network}, {way}"] for way in (OURS, DTENSOR))
    assert ours["operations"] < theirs["operations"] < 1200
    assert ours["kept"] < 0.6 * theirs["kept"]
    for name, one in found.items():
        if name.startswith("steps"):
            assert 0 < one["ms"] < 60_000
            assert 0 < one["host_ms"] < 60_000
            assert 300 < one["operations"] < 1200
            assert 20_000 < one["kept"] < 200_000
            assert one["peak"] >= 0


def test_two_ways(tmp_path):
    found = bench(tmp_path, "--parts", "steps", "--network", "fake", "--ways", OURS, DTENSOR, timeout=100)
    assert len(found) == 2
    assert_steps(found, "fake")
    assert found[f"steps, {TINY}, 32, fake, {OURS}"]["operations"] <= PINS[OURS]


@pytest.mark.more
@pytest.mark.timeout(700)
def test_all_parts(tmp_path):
    found = bench(tmp_path, "--picture", timeout=600)
    assert (tmp_path / "gpu_step.png").stat().st_size > 5000
    for network in ("fake", "thread"):
        played = {f"steps, {TINY}, 32, {network}, {way}" for way in WAYS if not way.startswith(ALONE)}
        assert played | {f"steps, {TINY}, 32, {way}" for way in WAYS if way.startswith(ALONE)} <= found.keys()
        assert_steps(found, network)
    for way, pin in PINS.items():
        assert found[f"steps, {TINY}, 32, fake, {way}"]["operations"] <= pin
    for way in ("self-check", "no self-check"):
        one = found[f"start, {TINY}, 128, {way}"]
        assert 0 < one["startup_s"] < 60
        assert 1e8 < one["startup_peak"] <= one["training_peak"] < 4e9
    assert all(found[f"longest, {TINY}, {tokens}, {way}"]["peak"] > 1e8 for tokens in (128, 256) for way in ("AdamW", "SGD"))
    # One rank makes what one process makes.
    ours, plain = (found[f"lora, {TINY}, 32, {way}"] for way in (OURS, "plain Lightning"))
    assert (ours["operations"], ours["kept"]) == (plain["operations"], plain["kept"])


def test_what_fails_is_a_row_and_the_exit_code(tmp_path, monkeypatch):
    numbers = {
        "ms": 2.0,
        "host_ms": 1.0,
        "operations": 5,
        "kernels": 5,
        "busy": 0.5,
        "flops": 1e6,
        "kept": 2**20,
        "peak": 2**21,
    }
    given = {OURS: {"error": "OutOfMemoryError: 3 | 4"}, ALONE: numbers}
    monkeypatch.setattr(gpu_bench, "in_a_process", lambda job: given[job.way])
    asked = ["--small", "--parts", "steps", "--network", "fake", "--ways", OURS, ALONE, "--out", str(tmp_path)]
    assert gpu_bench.main(asked) == 1
    lines = (tmp_path / "gpu_bench.md").read_text().splitlines()
    assert any(line.startswith(r"| ours | OutOfMemoryError: 3 \| 4 | – |") for line in lines)
    assert any(line.startswith(f"| {ALONE} | 2.0 | 1.00 | 16,000 |") for line in lines)


def test_longest_doubles_and_halves():
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= 1500

    assert gpu_bench.longest_of(fits, 256, 2**20) == 1408
    assert tried == [256, 512, 1024, 2048, 1536, 1280, 1408]
    assert gpu_bench.longest_of(fits, 256, 1024) == 1024
    assert gpu_bench.longest_of(lambda tokens: False, 256, 2**20) == 0


def test_kernels_of_a_trace():
    """A stream that only waits communicates; annotations, which profilers draw over kernels, are none of them."""

    def event(cat: str, name: str, begin: float, length: float, stream: int = 7) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": 1e6 + begin, "dur": length, "args": {"stream": stream}}

    trace = [
        event("gpu_user_annotation", "Optimizer.step#AdamW.step", 0, 9000),
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1e6, "dur": 5, "args": {"correlation": 1}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamWaitEvent", "ts": 1e6, "dur": 5, "args": {"correlation": 2}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1e6, "dur": 5, "args": {}},
        event("kernel", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN", 1000, 2000),
        event("kernel", "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", 2000, 2000),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 5000, 500),
        event("kernel", "at::cuda::(anonymous namespace)::spin_kernel(long)", 1000, 3000, stream=20),
        event("kernel", "void at::native::elementwise_kernel<128, 2>", 4000, 500, stream=20),
    ]
    spans = gpu_bench.spans_of(trace, cuda=True)
    assert [(row, kind) for row, kind, *_ in spans] == [
        ("host", "launch"), ("compute", "product"), ("compute", "attention"), ("compute", "other"),
        *[("communication", "collective")] * 2,
    ]  # fmt: skip
    assert gpu_bench.union([span[2:] for span in spans if span[0] == "compute"]) == 3.5
    assert [(row, kind) for row, kind, *_ in gpu_bench.spans_of(trace, cuda=False)][-1] == ("compute", "product")
