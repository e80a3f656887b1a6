"""Which detectors see a fault of the engine: the proof before training, the checks of a run, the shadow check, and verify.

    make detectors                 the faults of `tests/mutants.py` in the packages that compute, with a table at the end
    make detectors ARGS=gather     those with 'gather' in their name

Each fault is put into a copy of the repository. There some models train on four ranks (dp 2 x tp 2), three times: as they are, for
the proof; without a proof, for the checks of a run, and for verify, which sees a run that ends and compares one that goes on with
one process; and with a proof that passes everything, for the shadow check. A fault that none of these models shows has an empty
row: its test has another model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests import mutants

PACKAGES = ("activations", "distributed", "layout", "nn", "parallel", "region", "styles")
"""The packages that compute, whose faults are shown."""
ELSEWHERE = ("cp:", "pp:", "turns:", "stacks:", "fsdp", "verify:", "habits:", "compile")
"""Beginnings of the names of faults that these topologies do not run."""
SETUPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt": ("GPT", {}, {"tp": 2}),
    "gqa": ("Zoo", {"kind": "gqa_shared"}, {"tp": 2, "recompute": "full", "loss_chunk": 4}),
    "experts": ("Zoo", {"kind": "routed_moe"}, {"tp": 2, "data_parallel": "fsdp"}),
    "heads": ("Zoo", {"kind": "bias_table"}, {"tp": 2, "sp": False}),
}
DETECTORS = ("self-check", "run", "shadow", "verify")
HEADS = ("the proof before training", "checks of a run", "shadow check", "verify")


def on_ranks(folder: str) -> dict[str, list[str]]:
    """On a rank: which detectors see something, for each model."""
    import torch

    from lightning_seqpar.verify import prover
    from lightning_seqpar.verify.parity import Trace, compare
    from lightning_seqpar.verify.run_comparison import Verdict
    from lightning_seqpar.verify.self_check import SelfCheckError
    from lightning_seqpar.verify.shadow_check import ShadowError
    from tests.helpers.fit import fit

    own = prover.self_check
    all_seen: dict[str, list[str]] = {}
    for name, (model, arguments, _) in SETUPS.items():
        reference = Trace.load(Path(folder, f"{name}.pt"))
        found: set[str] = set()

        def train(
            name: str = name, model: str = model, given: Any = arguments, seen: Any = found, **more: Any
        ) -> Trace | None:
            try:
                return fit(model, given, world=4, strategy={**SETUPS[name][2], **more}, steps=2)
            except SelfCheckError:
                seen.add("self-check")
            except ShadowError:
                seen.add("shadow")
            except Exception:  # whatever ends a run
                seen.add("run")
                if torch.distributed.get_rank() == 0:
                    traceback.print_exc()
            return None

        train()
        trace = train(self_check=False)
        if trace is None or not compare(reference, trace).ok:  # verify's exit status is 1 in both cases
            found.add("verify")
        prover.self_check = lambda *args, **kwargs: Verdict()
        try:
            train()
        finally:
            prover.self_check = own
        all_seen[name] = sorted(found)
    return all_seen


def references(folder: str) -> None:
    """Train each model in one process, and write what it did."""
    from tests.helpers.fit import fit

    for name, (model, arguments, _) in SETUPS.items():
        # One process reads the samples of both replicas.
        fit(model, arguments, steps=2).save(Path(folder, f"{name}.pt"))


def one(folder: str) -> None:
    """In the copy: run all, and print what was seen as JSON, behind a word by which it is found."""
    from lightning_seqpar.testing import run_distributed

    try:
        told = run_distributed(on_ranks, 4, folder, timeout=150.0)
    except Exception as error:  # ranks that wait for each other
        print("SEEN", json.dumps({"all": ["run"], "error": str(error)[:200]}))
        return
    print("SEEN", json.dumps({name: sorted({d for each in told for d in each[name]}) for name in SETUPS}))


def run(mutant: mutants.Mutant | None, folder: str) -> dict[str, Any]:
    """Run one fault in a copy of the repository; no fault for None."""
    with tempfile.TemporaryDirectory() as place:
        mutants.copy_repository(Path(place))
        if mutant is not None:
            mutants.apply(mutant, Path(place, "lightning_seqpar"))
        path = ":".join([place, f"{place}/examples", f"{place}/benchmarks"])
        own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": f"{place}/cache"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.detectors", "--one", folder],
            cwd=place, env={**os.environ, **own}, capture_output=True, text=True, check=False, timeout=400,
        )  # fmt: skip
        line = next((line for line in done.stdout.splitlines() if line.startswith("SEEN ")), None)
        return {"all": ["run"], "error": done.stderr[-300:]} if line is None else dict(json.loads(line[5:]))


def chosen(words: list[str]) -> list[mutants.Mutant]:
    known = mutants.definitions(mutants.ROOT / "lightning_seqpar")
    return [
        mutant
        for mutant in mutants.MUTANTS
        if mutants.place_of(mutant, known).file.relative_to(mutants.ROOT / "lightning_seqpar").parts[0] in PACKAGES
        and not mutant.name.startswith(ELSEWHERE)
        and all(word in mutant.name for word in words)
    ]


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2])
        return 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        references(folder)
        clean = run(None, folder)
        if any(clean.values()):
            print(f"without a fault something is seen: {clean}")
            return 1
        faults, rows = chosen(sys.argv[1:]), []
        for mutant, seen in zip(faults, pool.map(lambda one: run(one, folder), faults), strict=True):
            found = {d for key, each in seen.items() if key != "error" for d in each}
            rows.append((mutant, found))
            print(f"{mutant.name:<60} {', '.join(sorted(found)) or '-'}", flush=True)
    shown = [(mutant, found) for mutant, found in rows if found]
    print(f"\n{len(rows)} faults, of which these models show {len(shown)}:\n")
    print("| | " + " | ".join(HEADS) + " |\n|---" * 1 + "|---" * len(HEADS) + "|")
    print("| seen | " + " | ".join(str(sum(d in found for _, found in shown)) for d in DETECTORS) + " |")
    print(f"\n{sum(len(found) > 1 for _, found in shown)} of {len(shown)} are seen by two detectors or more.\n")
    print("| fault | " + " | ".join(HEADS) + " |")
    print("|---" * (1 + len(HEADS)) + "|")
    for mutant, found in rows:
        print(f"| {mutant.name} | " + " | ".join("x" if d in found else "" for d in DETECTORS) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
