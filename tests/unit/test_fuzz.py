"""Random configurations, files and plans are taken, or refused by a sentence that helps.

What is raised is always a ``ValueError`` (pydantic's ``ValidationError`` is one) that names the field and says what to write.
``SEQPAR_FUZZ=20000`` runs each of the three random tests that often: 60,000 cases, ``make fuzz``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from lightning_seqpar import ParallelConfig, ShardingPlan
from lightning_seqpar.config import AXES
from lightning_seqpar.plan.sharding_plan import STYLES
from lightning_seqpar.user_input import SYNONYMS, shortened, shown

CASES = int(os.environ.get("SEQPAR_FUZZ", 0))
"""Of each random test; 0 for the few that are the same at every run."""

random_cases = settings(
    max_examples=CASES or 100, derandomize=not CASES, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)

FIXES = (
    "write", "use ", "did you mean", "leave ", "set ", "must ", "such as", "drop ", "give ", "name each", "near names",
    "Input should", "it has ", "needs every axis", "stands at the top", "is a whole number", "at most", "save it",
    "found duplicate key", "is not YAML: ", "can't be read: ", "can't be resolved: ",
)  # fmt: skip
"""Each sentence has one of them; the last ones stand in front of what a parser says of a place in a text."""


def refused(call: Callable[[], Any], *names: str) -> Any:
    """What a call returns; None if it refuses, by a sentence with one of ``names`` that helps. Anything else fails the test."""
    try:
        return call()
    except ValueError as error:
        caught = error
    assert type(caught) in (ValueError, ValidationError), type(caught)
    sentences = [item["msg"] for item in caught.errors()] if isinstance(caught, ValidationError) else [str(caught)]
    for sentence in sentences:
        assert 20 <= len(sentence) <= 2000, sentence
        assert any(fix in sentence for fix in FIXES), sentence
        assert not names or any(name in sentence for name in names), (names, sentence)
    return None


WORDS = st.sampled_from(
    [
        "auto", "none", "ddp", "fsdp", "ring", "full", "true", "off", "null", "", " ", "-1", "2.0", "1e9", "0x10", "1_000", "nan",
        "pp-dp-cp-tp", "tp-tp-tp-tp", "0:00:10", "${tp}", "${", "???", "a.yaml", "nope.yaml", "pattern", "style", "row", "*",
    ]
)  # fmt: skip
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-3, 9), st.floats(), st.text(max_size=12), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.text(max_size=8), WORDS), inner, max_size=4)),
    max_leaves=8,
)  # fmt: skip
FIELDS = list(ParallelConfig.model_fields)
RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "tp": st.integers(1, 8),
    "dp": st.one_of(st.just("auto"), st.integers(1, 8)),
    "cp": st.integers(1, 4),
    "pp": st.integers(1, 4),
    "pp_layers": st.lists(st.integers(1, 9), min_size=1, max_size=4),
    "virtual_pp": st.integers(1, 3),
    "pp_split_rank": st.integers(1, 4),
    "cp_method": st.sampled_from(["auto", "ring", "ulysses", "all_gather"]),
    "order": st.permutations(AXES).map("-".join),
    "plan": st.one_of(st.just("auto"), st.just({"base": "none", "rules": [{"pattern": "a", "style": "row"}]})),
    "recompute": st.sampled_from(["none", "activations", "selective", "full"]),
    "timeout": st.floats(1e-6, 1e8),
    "checkpoint": st.fixed_dictionaries({"format": st.just("sharded"), "async_save": st.booleans()}),
    "compile": st.booleans(),
    "compile_options": st.just({"backend": "eager"}),
    "ddp": st.just({"static_graph": True}),
    "regather": st.booleans(),
    "loss_chunk": st.one_of(st.none(), st.integers(1, 4096)),
}
KEYS = st.one_of(st.sampled_from(FIELDS), st.sampled_from(list(SYNONYMS)), st.text(max_size=8), WORDS)
INNER = ("PlanSpec", "CheckpointConfig", "base=", "rules=", "format=", "async_save=", "below")
"""Names in sentences on a plan or on how checkpoints are written."""


@st.composite
def keywords(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments of a ParallelConfig: right ones, and some that are wrong or that it does not have."""
    right = draw(st.sets(st.sampled_from(list(RIGHT)), max_size=5))
    wrong = draw(st.dictionaries(KEYS, PLAIN, max_size=2))
    return {**{field: draw(RIGHT[field]) for field in sorted(right)}, **wrong}


@random_cases
@given(fields=keywords())
@example({"timeout": 1e-9})
@example({"virtual_pp": "\u0663"})
def test_fields(fields):
    """A wrong value is shown behind its field's name; what holds is written to YAML and read back."""
    names = (*INNER, *(part for field in fields for part in (f"{field}=", shown(field))))
    config = refused(lambda: ParallelConfig(**fields), *names)
    assert (refused(lambda: ParallelConfig.from_omegaconf(fields), *names) is None) == (config is None)
    if config is not None and not set(fields) & {"ddp", "fsdp", "compile_options", "plan"}:
        assert ParallelConfig.from_omegaconf(yaml.safe_load(config.to_yaml())) == config


# ---- files ----------------------------------------------------------------------------------------------------------

FRAGMENTS = [
    "tp: 2", "tp: ${dp}", "dp: ${tp}", "tp: ${tp}", "ddp: {a: ${.b}, b: ${..tp}}", "ddp: &d {a: 1}", "fsdp: *d",
    "fsdp: {<<: *d, b: 2}", "? [a, b]\n: 1", "- 1", "null: 1", "1.5: 2", "plan: {rules: [{pattern: a, style: row}]}",
    "rules: [{pattern: 'a.{b', style: row}]", "rules: [{1: 2, pattern: a, style: row}]", "rules: [{pattern: a, style: colum}]",
    "rules: [3, a, null]", "rules: {}", "rules: []", "tp: 2\ntp: 4", "tp: ???", "tp: '${oc.env:SEQPAR_NO_SUCH}'", "tp: ${nope:1}",
    "tp: ${", "tp: !!bool x", "tp: !!int ''", "tp: !!timestamp x", "timeout: 2001-01-01", "timeout: 190:20:30", "timeout: .nan",
    "tp: !!binary x", "tp: !!set [a]", "tp: !own 1", "%YAML 9.9", "---", "\ufeff", "\t", "  tp: 2", "'", "|", "{", "]", "*x", "\0",
    "sp: off", "recompute: off", "auto", "3",
]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("\n".join),
    st.text(alphabet="tpd: ,-[]{}&*!|>'\"%#$?@\n\ta1.", max_size=40),
    st.dictionaries(KEYS, PLAIN, max_size=4).map(lambda data: yaml.dump(data, allow_unicode=True)),
)


def written(text: str | bytes, folder: Path) -> Path:
    file = folder / "input.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@random_cases
@given(text=TEXTS, override=st.one_of(TEXTS.map("tp={}".format), WORDS))
@example(text="tp: 2", override="tp=")
@example(text="tp: 2", override="[=1")
@example(text="tp: 2", override="ddp[0]=1")
def test_a_file(text, override, folder):
    """As a configuration, as a plan, and beside an override."""
    file = written(text, folder)
    refused(lambda: ParallelConfig.from_yaml(file))
    refused(lambda: ParallelConfig.from_yaml(written("ddp: {a: 1}", folder), overrides=[override]))
    from_file = refused(lambda: ShardingPlan.from_yaml(written(text, folder)), "plan ")
    from_text = refused(lambda: ShardingPlan.from_yaml_text(text), "plan")
    assert from_file is None or from_text is None or from_file.rules == from_text.rules


def test_paths_that_name_no_file(folder):
    for path in ("x" * 5000, "tp: 2\n" * 500, "", folder):
        assert refused(lambda path=path: ParallelConfig.from_yaml(path), "does not exist") is None
        assert refused(lambda path=path: ShardingPlan.from_yaml(path), "no such file") is None


def test_what_an_editor_of_windows_saves_is_read(folder):
    expected = ParallelConfig(tp=2, sp=False)
    assert ParallelConfig.from_yaml(written(b"\xef\xbb\xbftp: 2\r\nsp: false\r\n", folder)) == expected
    utf16 = written("tp: 2".encode("utf-16"), folder)
    assert refused(lambda: ParallelConfig.from_yaml(utf16), "save it as UTF-8") is None
    assert ParallelConfig.from_yaml(written("", folder)) == ParallelConfig()


def test_what_messages_show():
    assert (shown("a"), shown({"b": 1, "a": [1, (2,)]})) == ("'a'", "{'b': 1, 'a': [1, (2,)]}")
    assert (len(shown("x" * 1000)), shortened("x" * 30, 11), shortened("abc", 11)) == (200, "xxx ... xxx", "abc")


# ---- plans ----------------------------------------------------------------------------------------------------------

NAMES = ("a", "b", "aaaaaaaaaaaaaaaaaaaaaaab")
MODEL = nn.ModuleDict({
    "layers": nn.ModuleList(nn.ModuleDict({name: nn.Linear(2, 2) for name in NAMES}) for _ in range(2)),
    "norm": nn.LayerNorm(2),
})  # fmt: skip
PARTS = ["layers", "norm", "a", "b", "*", "{", "}", ",", ".", "0", "{a,b}", "{*,*}", "..", "**", "[", "(", "\\", "é"]
PATTERNS = st.one_of(
    st.sampled_from(["layers.*", "layers.*.{a,b}", "norm", "", "layers.*.a.weight", "*", "*.*.{a,{a,b}}"]),
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    st.tuples(st.sampled_from(["{a,b}", "{*,*}", "*a", "{a,aa}", "{", "}{", "a.", "*."]), st.integers(1, 40)).map(
        lambda part: part[0] * part[1]
    ),
)
OPTIONS = ["dim", "segments", "units", "args", "arg", "sp", "divide", "values", "summed", "blocks", "rows", ""]
SMALL = st.one_of(st.integers(-2, 3), st.sampled_from(["a", "n_head", "auto"]), st.lists(st.integers(0, 3), max_size=3))


@st.composite
def rules(draw: st.DrawFn) -> Any:
    """A rule: right ones, wrong ones, and what is none."""
    if draw(st.integers(0, 9)) == 0:
        return draw(PLAIN)
    pattern, style = draw(st.one_of(PATTERNS, PLAIN)), draw(st.one_of(st.sampled_from(list(STYLES)), PLAIN))
    more = draw(st.dictionaries(st.sampled_from(OPTIONS), st.one_of(SMALL, PLAIN), max_size=2))
    return {"pattern": pattern, "style": style, **more}


@random_cases
@given(given_rules=st.lists(rules(), max_size=3))
@example([{"pattern": "a", "style": ["row"]}])
@example([{"pattern": "a", "style": "row", 1: 2}])
@example([{"pattern": "a", "style": "exit", "blocks": "}{"}])
@example([{"pattern": "{*,*}" * 20 + "c", "style": "row"}])
@example([{"pattern": "{a,b}" * 5000, "style": "row"}])
def test_rules(given_rules):
    """What holds is written to YAML and read back, and matches or says that it does not."""
    plan = refused(lambda: ShardingPlan.from_rules(given_rules), "plan rule", "rules=")
    if plan is None:
        return
    found = refused(lambda: plan.match(MODEL), *(f"plan pattern {shown(rule.pattern)[:20]}" for rule in plan.rules))
    assert found is None or len(found) >= len(plan.rules)
    # In values anything may stand, and a lone half of a character has no form in YAML.
    plain = tuple(rule for rule in plan.rules if not getattr(rule, "values", None) and "\\ud" not in repr(rule))
    assert ShardingPlan.from_yaml_text(ShardingPlan(plain).to_yaml(), source="plan") == ShardingPlan(plain)
