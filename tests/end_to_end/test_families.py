"""Hugging Face models: by shipped plan and by inference alone, equal to one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from lightning_seqpar.plan.sharding_plan import resolve_plans
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests import write_families
from tests.helpers.families import FAMILIES, build
from tests.helpers.fit import fit, fit_or_tell
from tests.helpers.slices import rest

TOPOLOGIES = {
    "tp2": (2, 2, True), "tp2-no-sp": (2, 2, False), "tp4": (4, 4, True), "tp4-no-sp": (4, 4, False),
    "dp2-tp2": (4, 2, True), "dp2-tp2-no-sp": (4, 2, False),
}  # fmt: skip
LENGTH = 9  # odd: the last shard is padded
RUN: dict[str, Any] = {"steps": 3, "length": LENGTH}
PRECISION = {"float64": "64-true", "float32": "32-true"}


Case = tuple[str, str, str, str, str]
"""Topology, plan, loss, precision, family."""
WAYS = (("auto", "user", "float64"), ("infer", "model", "float64"), ("auto", "user", "float32"))


def cases(families: list[str], topologies: list[str]) -> list[Case]:
    return [(topology, *way, family) for topology in topologies for way in WAYS for family in families]


PICKED = ("phi3", "t5", "qwen3_moe")
SLICE = [case for case in cases(FAMILIES, ["tp2"]) if case[1] == "infer" or (case[3] == "float64" and case[4] in PICKED)]
SLICE += [case for case in cases(["llama"], ["dp2-tp2"]) if case[1] == "auto"]
MATRIX = [case for case in cases(FAMILIES, list(TOPOLOGIES)) if case not in SLICE]


def fit_all(topology: str, plan: str, loss: str, precision: str, families: list[str]) -> dict[str, Trace | str]:
    world, tp, sp = TOPOLOGIES[topology]
    out: dict[str, Trace | str] = {}
    for family in families:
        # By its name where the test's own norm is no class of the family.
        strategy = {"tp": tp, "sp": sp, "plan": family if (family, plan) == ("gemma3", "auto") else plan}
        how = {"world": world, "strategy": strategy, "precision": PRECISION[precision], **RUN}
        out[family] = fit_or_tell("HuggingFace", {"family": family, "loss": loss}, **how)
    return out


@functools.cache
def reference(family: str, loss: str, precision: str) -> Trace:
    return fit("HuggingFace", {"family": family, "loss": loss}, precision=PRECISION[precision], **RUN)


@functools.cache
def trained(topology: str, plan: str, loss: str, precision: str, families: tuple[str, ...]) -> dict[str, Trace | str]:
    """One start of the ranks for all families of a topology, plan, loss and precision."""
    given = (topology, plan, loss, precision, list(families))
    return run_distributed(fit_all, TOPOLOGIES[topology][0], *given, timeout=290.0)[0]


def grouped(chosen: list[Case], *marks: Any) -> list[Any]:
    """The cases with all families that start together."""
    by_start: dict[tuple[str, ...], list[str]] = {}
    for *start, family in chosen:
        by_start.setdefault(tuple(start), []).append(family)
    return [
        pytest.param(
            (*start, tuple(families)),
            family,
            id=f"{family}-{start[0]}-{start[1]}-{start[2]}_loss{'-float32' * (start[3] == 'float32')}",
            marks=marks,
        )
        for start, families in by_start.items()
        for family in families
    ]


@pytest.mark.parametrize(("start", "family"), grouped(SLICE) + grouped(MATRIX, pytest.mark.matrix))
def test_parity_with_one_process(start, family, parity_errors):
    topology, plan, loss, precision, _ = start
    got = trained(*start)[family]
    assert isinstance(got, Trace), got
    report = compare(reference(family, loss, precision), got, limit=1e-9 if precision == "float64" else 1e-5)
    told = report.rows[:1] if precision == "float32" else report.rows  # AdamW aside, float32 weights round too
    parity_errors.append((family, topology, plan, precision, max(row.error for row in told)))
    assert all(row.ok for row in told), f"the runs differ\n{report}"


FEWER = [("llama", 2), ("llama", 1), ("phi3", 2)]


def fit_fewer(plan: str) -> list[Trace]:
    args = [{"family": family, "loss": "user", "num_key_value_heads": heads} for family, heads in FEWER]
    return [fit("HuggingFace", a, world=4, strategy={"tp": 4, "plan": plan}, steps=2, length=LENGTH) for a in args]


@pytest.mark.parametrize("plan", ["auto", rest("infer")])
@pytest.mark.more
def test_fewer_kv_heads_than_ranks(plan):
    for (family, heads), got in zip(FEWER, run_distributed(fit_fewer, 4, plan)[0], strict=True):
        args = {"family": family, "loss": "user", "num_key_value_heads": heads}
        compare(fit("HuggingFace", args, steps=2, length=LENGTH), got).raise_if_failed()


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_takes_the_shipped_plan(family):
    plans = resolve_plans("auto", build(family))
    assert {plan.source for plan in plans} == {f"family {family}"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shipped_file_is_of_this_version(family):
    file = write_families.FOLDER / f"{family}.yaml"
    assert file.read_text() == write_families.text(family), "run tests/write_families.py, then make parity"
