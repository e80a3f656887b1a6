"""``make gpu`` on CPUs: the same cases, ranks, backend and judgement, without the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests import gpu
from tests.helpers.fit import fit

REAL = ("GPT-2", "llama 0.55 B")
SLICE = "loss in chunks;fused heads;16-mixed;pp 2 x tp 2"
SMALL = ";".join(case.name for case in gpu.CASES if not case.name.startswith(REAL))


@pytest.mark.parametrize("only", [
    pytest.param("tp 2, by hand;cp 2, ring;pp 2, interleaved;late collectives: Ulysses", id="core"),
    pytest.param(SLICE, id="slice", marks=[pytest.mark.more, pytest.mark.timeout(600)]),
    pytest.param(SMALL, id="all", marks=[pytest.mark.matrix, pytest.mark.timeout(1200)]),
    pytest.param(";".join(REAL), id="real size", marks=[pytest.mark.matrix, pytest.mark.timeout(3600)]),
])  # fmt: skip
def test_all_of_it_is_right_on_cpus(only, tmp_path, capsys):
    out = tmp_path / "gpu.md"
    assert gpu.main(["--accelerator", "cpu", "--only", only, "--out", str(out)]) == 0, capsys.readouterr().out
    rows = [line for line in out.read_text().splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) >= len(only.split(";"))
    assert all(" | right | " in row for row in rows)


def test_what_is_wrong_waits_or_fails_is_told():
    case = gpu.CASES[0]
    told: dict[str, Any] = {"trace": vars(fit("GPT", {}, steps=2)), "waits": [], "by_scaler": True, "seconds": 1.0}
    assert gpu.judge(case, told, told) == (True, ["0.0e+00 of 1e-09 (losses (relative))", "torch's scaler", "1 s"])
    other = copy.deepcopy(told)
    other["trace"]["losses"][1] += 1e-6
    assert gpu.judge(case, told, other)[0] is False
    waits = ["tolist, parallel/grad_sync.py:1"]
    assert gpu.judge(case, told, {**told, "waits": waits}) == (False, ["0.0e+00 of 1e-09 (losses (relative))", *waits, "1 s"])
    assert gpu.judge(case, told, "rank 1 died by SIGKILL: ") == (False, ["ours: rank 1 died by SIGKILL: ", "–", "–"])


def test_a_machine_without_a_gpu_is_told(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert gpu.main([]) == 1
    assert "torch sees no CUDA device" in capsys.readouterr().out
