"""Input that nobody would write: random values, texts, plans and grids are taken, or refused by a sentence that helps.

What is raised is always a ``ValueError`` (pydantic's ``ValidationError`` is one) that names the field, shows a shortened value, and
says what to write. ``SEQPAR_FUZZ=10000`` runs each of the ten random tests that often: 100,000 cases, ``make fuzz``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import ValidationError
from torch import nn

from lightning_seqpar import CheckpointConfig, ParallelConfig, PlanSpec, ProcessTopology, ShardingPlan
from lightning_seqpar.config import AXES
from lightning_seqpar.plan.sharding_plan import parse_yaml
from lightning_seqpar.styles.registry import STYLES
from lightning_seqpar.user_input import SYNONYMS, shortened, shown, why_unreadable

CASES = int(os.environ.get("SEQPAR_FUZZ", 0))
"""Of each random test; 0 for the few that are the same at every run."""

random_cases = settings(
    max_examples=CASES or 100,
    derandomize=not CASES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

FIXES = (
    "write", "use ", "did you mean", "leave ", "set ", "must ", "such as", "drop ", "give ", "name each", "near names",
    "Input should", "it has ", "needs every axis", "stands at the top", "is a whole number", "at most", "save it",
    "found duplicate key",
)  # fmt: skip
"""Each sentence has one of them, unless it repeats what a parser says of a place in a text."""
CANNOT_READ = "Config can't read "
"""So begins a sentence on a value that raises as it is looked at; the fields and their values follow."""
OF_A_PARSER = ("is not YAML: ", "can't be read: ", "can't be resolved: ")


def refused(call: Callable[[], Any], *, names: tuple[str, ...] = (), shows: tuple[str, ...] = ()) -> Any:
    """What a call returns; None if it refuses, by a sentence that helps. Anything else that is raised fails the test.

    Args:
        call: what may be refused.
        names: fields, of which each sentence names one.
        shows: forms of values, of which each sentence shows one.
    """
    try:
        return call()
    except ValueError as error:
        caught = error
    assert type(caught) in (ValueError, ValidationError), type(caught)
    sentences = [item["msg"] for item in caught.errors()] if isinstance(caught, ValidationError) else [str(caught)]
    assert len(str(caught)) <= 2000 * len(sentences)
    for sentence in sentences:
        assert 20 <= len(sentence) <= 2000, sentence
        assert any(fix in sentence for fix in (*FIXES, *OF_A_PARSER)), sentence
        assert not names or any(name in sentence for name in (*names, CANNOT_READ)), (names, sentence)
        assert not shows or any(form in sentence for form in (*shows, CANNOT_READ)), (shows, sentence)
    return None


# ---- values ---------------------------------------------------------------------------------------------------------


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def doubled(levels: int) -> list[Any]:
    """A list that is small in memory and has ``2 ** levels`` parts when it is written out."""
    value: list[Any] = ["lol"]
    for _ in range(levels):
        value = [value, value]
    return value


def holding_itself(value: Any) -> Any:
    if isinstance(value, dict):
        value["self"] = value
    else:
        value.append(value)
    return value


class Odd:
    """A value that is of no use to anybody, and raises when it is looked at."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("it can't be compared")

    def __str__(self) -> str:
        raise RuntimeError("it can't be shown")

    __repr__ = __str__
    __hash__ = None  # type: ignore[assignment]


ODD: dict[str, Callable[[], Any]] = {
    "a number of 5000 digits": lambda: 10**5000,
    "a negative number of 5000 digits": lambda: -(10**5000),
    "a number of 400 digits": lambda: 10**400,
    "5000 digits": lambda: "9" * 5000,
    "a long word": lambda: "x" * 1_000_000,
    "nested lists": lambda: nested(3000),
    "nested mappings": lambda: {"a": {"a": nested(100)}},
    "a list that holds itself": lambda: holding_itself([]),
    "a mapping that holds itself": lambda: holding_itself({}),
    "a billion lists": lambda: doubled(60),
    "a mapping with a billion lists": lambda: {"a": doubled(60)},
    "a list of a million": lambda: [1] * 1_000_000,
    "a mapping of numbers": lambda: {1: 2, None: 3},
    "an endless range": lambda: range(10**30),
    "a set": lambda: {1, 2},
    "bytes": lambda: b"tp",
    "a mark for a byte": lambda: "\udcff",
    "zero byte": lambda: "\0",
    "three": lambda: "\u0663",
    "not a number": lambda: Decimal("NaN"),
    "a third": lambda: Fraction(1, 3),
    "a number of numpy's": lambda: np.int64(3),
    "no number of numpy's": lambda: np.float32("nan"),
    "numbers of numpy's": lambda: np.array([1, 2]),
    "a switch of numpy's": lambda: np.bool_(True),
    "a number of torch's": lambda: torch.tensor(2),
    "numbers of torch's": lambda: torch.tensor([1, 2]),
    "a type of torch's": lambda: torch.float32,
    "a class": lambda: int,
    "a function": lambda: len,
    "what raises": Odd,
    "a list of what raises": lambda: [Odd()],
    "the longest time": lambda: timedelta.max,
    "no time": lambda: timedelta(0),
    "a path": lambda: Path("a.yaml"),
    "a config": lambda: ParallelConfig(tp=2),
    "a plan": lambda: PlanSpec(base="none"),
    "a checkpoint": CheckpointConfig,
    "an interpolation": lambda: OmegaConf.create({"a": 1, "b": "${a}"}),
    "an interpolation that leads nowhere": lambda: OmegaConf.create({"a": "${b}"}),
    "an interpolation in a circle": lambda: OmegaConf.create({"a": "${b}", "b": "${a}"}),
    "a list of OmegaConf's": lambda: OmegaConf.create([1, {"a": "${nope:}"}]),
}
"""Values that hypothesis could not show, by name."""


@dataclass(frozen=True)
class Of:
    """Stands for a value of ``ODD`` until the test makes it."""

    name: str


def made(value: Any) -> Any:
    """A drawn value, with what stands for others replaced by them."""
    if isinstance(value, Of):
        return ODD[value.name]()
    if isinstance(value, dict):
        return {key: made(part) for key, part in value.items()}
    return [made(part) for part in value] if isinstance(value, list) else value


WORDS = st.sampled_from(
    [
        "auto", "none", "ddp", "fsdp", "ring", "full", "true", "off", "null", "", " ", "-1", "2.0", "1e9", "0x10", "1_000", "nan",
        "pp-dp-cp-tp", "tp-tp-tp-tp", "0:00:10", "99999999999999 days, 0:00:00", "0:00:0.0000001", "${tp}", "${", "???", "a.yaml",
        "nope.yaml", "../../etc/passwd", "pattern", "style", "row", "*",
    ]
)  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 9),
    st.floats(),
    st.text(max_size=12),
    st.binary(max_size=6),
    WORDS,
)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.text(max_size=8), WORDS), inner, max_size=4)
    ),
    max_leaves=8,
)
VALUES = st.recursive(
    st.one_of(SCALARS, st.sampled_from([Of(name) for name in ODD])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
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
    "recompute": st.sampled_from(["none", "selective", "full"]),
    "timeout": st.floats(1e-6, 1e8),
    "checkpoint": st.fixed_dictionaries({"format": st.just("sharded"), "async_save": st.booleans()}),
    "check_every": st.integers(0, 100),
    "sp": st.booleans(),
    "compile": st.booleans(),
    "compile_options": st.just({"backend": "eager"}),
    "ddp": st.just({"static_graph": True}),
    "regather": st.sampled_from(["auto", True, False]),
    "loss_chunk": st.one_of(st.none(), st.integers(1, 4096)),
}
KEYS = st.one_of(
    st.sampled_from(FIELDS), st.sampled_from(FIELDS), st.sampled_from(list(SYNONYMS)), st.text(max_size=8), WORDS
)


@st.composite
def keywords(draw: st.DrawFn, values: st.SearchStrategy[Any] = VALUES) -> dict[str, Any]:
    """Keyword arguments of a ParallelConfig: right ones, and some that are wrong or that it does not have."""
    right = draw(st.sets(st.sampled_from(list(RIGHT)), max_size=5))
    wrong = draw(st.dictionaries(KEYS, values, max_size=2))
    return {**{field: draw(RIGHT[field]) for field in sorted(right)}, **wrong}


def forms(field: str, value: Any) -> tuple[str, ...]:
    """How sentences on a field may begin to show its value."""
    if field in ("plan", "checkpoint"):  # what is wrong may be inside of it, and is shown by itself
        return ()
    known = [shown(value), f"[{shown(value)}"]  # a number that stands for a list of one
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        known.append(shown(value.tolist()))
    if isinstance(value, str | float):  # a number in a text, or with nothing behind its point
        known.append(str(value).removesuffix(".0"))
    if isinstance(value, str) and len(value) < 100 and value.strip().isdecimal():  # in the digits of another script
        known.append(str(int(value)))
    return tuple(f"{field}={form[:6]}" for form in known)


INNER = ("PlanSpec", "CheckpointConfig", "base=", "rules=", "format=", "async_save=")
"""Names in sentences on a plan or on how checkpoints are written."""


# ---- the configuration ----------------------------------------------------------------------------------------------


@random_cases
@given(field=st.sampled_from(FIELDS), value=VALUES)
@example("virtual_pp", Of("three"))
@example("tp", Of("a number of 400 digits"))
@example("timeout", Of("a number of 400 digits"))
@example("tp", Of("nested lists"))
@example("sp", Of("a billion lists"))
@example("tp", Of("what raises"))
@example("pp_layers", [Of("a number of 5000 digits")])
@example("timeout", "99999999999999 days, 0:00:00")
@example("timeout", 1e-9)
@example("fsdp", Of("a mapping of numbers"))
@example("ddp", Of("an interpolation in a circle"))
@example("ddp", {"a": Of("a list of a million")})
@example("sp", Of("a switch of numpy's"))
@example("plan", {"rules": [Of("a mapping of numbers")]})
@example("plan", {"base": "none", "rules": [{"pattern": "a", "x": Of("a billion lists")}]})
def test_one_field(field, value):
    """A wrong value is shown behind its field's name."""
    value = made(value)
    names = (f"{field}=", *(INNER if field in ("plan", "checkpoint") else ()))
    refused(lambda: ParallelConfig(**{field: value}), names=names, shows=forms(field, value))


@random_cases
@given(fields=keywords())
def test_fields(fields):
    """What holds is written to YAML and read back; a mapping is taken as the same keywords are."""
    fields = made(fields)
    names = (*INNER, "below", *(part for field in fields for part in (f"{field}=", shown(field))))
    config = refused(lambda: ParallelConfig(**fields), names=names)
    if not {"_target_", "_convert_"} & set(fields):
        again = refused(lambda: ParallelConfig.from_omegaconf(fields), names=names)
        assert (again is None) == (config is None)
    if config is not None and not set(fields) & {"ddp", "fsdp", "compile_options", "plan"}:
        read = OmegaConf.create(yaml.safe_load(config.to_yaml()))
        assert ParallelConfig.from_omegaconf(read) == config


# ---- YAML -----------------------------------------------------------------------------------------------------------

RUN = "{file}"
"""In a text of YAML, the file that a tag would write if it were followed."""
FRAGMENTS = [
    "tp: 2", "tp: ${dp}", "dp: ${tp}", "dp: ${pp}", "pp: ${cp}", "cp: ${pp}", "tp: ${tp}", "ddp: {a: ${ddp}}",
    "ddp: {a: ${.b}, b: ${..tp}}", "ddp: &d {a: 1}", "fsdp: *d", "fsdp: {<<: *d, b: 2}", "<<: *d", "? [a, b]\n: 1",
    "? {a: b}\n: 1", "- 1", "null: 1", "1.5: 2", "plan: &p [*p]", "plan: &p {a: *p}",
    "plan: {rules: [{pattern: a, style: row}]}", "rules: [{pattern: 'a.{b', style: row}]",
    "rules: [{pattern: a, style: [row]}]", "rules: [{1: 2, pattern: a, style: row}]", "rules: [{pattern: a, style: colum}]",
    "rules: [3, a, null]", "rules: {}", "rules: []", "tp: 2\ntp: 4", "tp: ???", "tp: '${oc.env:SEQPAR_NO_SUCH}'",
    "tp: ${oc.env:HOME}", "tp: ${oc.decode:'['}", "tp: ${oc.create:{a: 1}}", "tp: ${nope:1}", "tp: ${nope.nope}", "tp: ${",
    "tp: ${}", "tp: $", "tp: '${${${tp}}}'", "tp: !!python/object/apply:os.system ['touch {file}']",
    "!!python/object/apply:os.system ['touch {file}']: 1", "tp: !!python/object/new:os.system ['touch {file}']",
    "tp: !!python/name:os.system", "tp: !!python/module:os", "tp: !!python/tuple [1, 2]",
    "tp: !!python/object/apply:pathlib.Path ['{file}']", "tp: !!python/object/apply:pathlib.WindowsPath [a]",
    "tp: !!python/object/apply:subprocess.check_call [[touch, '{file}']]", "--- !!python/object/apply:os.mkdir ['{file}']",
    "tp: !!bool x", "tp: !!int x", "tp: !!int ''", "tp: !!float x", "tp: !!null x", "tp: !!timestamp x",
    "tp: !!timestamp 2001-01-01", "timeout: 2001-01-01", "timeout: 2001-99-99", "timeout: 0b_", "timeout: 0x_",
    "timeout: 1:99:99", "timeout: 190:20:30", "timeout: .nan", "tp: !!binary x", "tp: !!binary 'YQ=='", "tp: !!set {a}",
    "tp: !!set [a]", "tp: !!omap [a: 1]", "tp: !!omap a", "tp: !!pairs [[a]]", "tp: !!str [a]", "tp: !!map a", "tp: !!merge a",
    "tp: =", "tp: <<", "tp: !<tag:x,2000:y> 1", "tp: !own 1", "%YAML 1.1", "%YAML 9.9", "%TAG ! x", "---", "...", "\ufeff",
    "\ufefftp: 2", "\t", "tp:\t2", "  tp: 2", "'", '"', "|", ">", "{", "}", "[", "]", "[" * 60, "{a: " * 60, "- " * 60, "#",
    "@", "`", "%", "&", "*", "*x", "!", "\0", "\x85", "\u2028", "\udcff", "\U0001f600: 1", "off", "sp: off", "recompute: off",
    "auto", "3",
]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("\n".join),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=6)), max_size=5).map(" ".join),
    st.text(alphabet="tpd: ,-[]{}&*!|>'\"%#$?@\n\ta1.", max_size=40),
    st.text(max_size=40),
    st.dictionaries(KEYS, PLAIN, max_size=4).map(lambda data: yaml.dump(data, allow_unicode=True)),
    PLAIN.map(lambda data: yaml.dump(data, default_flow_style=True)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where texts are written to; the tags in them would make more files."""
    path = tmp_path_factory.mktemp("fuzz")
    yield path
    assert {file.name for file in path.iterdir()} <= {"input.yaml"}


def written(text: str | bytes, folder: Path) -> Path:
    file = folder / "input.yaml"
    raw = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    file.write_bytes(raw.replace(RUN.encode(), bytes(folder / "run")))
    return file


@random_cases
@given(
    text=st.one_of(
        TEXTS, TEXTS, TEXTS, st.binary(max_size=30), TEXTS.map(lambda text: text.encode("utf-16", "surrogatepass"))
    )
)
@example(text="tp: !!python/object/apply:os.system ['touch {file}']")
def test_a_file(text, folder):
    file = written(text, folder)
    made = refused(lambda: ParallelConfig.from_yaml(file))
    assert made is None or isinstance(made, ParallelConfig)
    assert not (folder / "run").exists()


KEYS_OF_OVERRIDES = st.one_of(
    KEYS,
    st.sampled_from(["", "[", "]", "a.b.c", "tp.x", "tp[", "ddp[0]", "..", ".", "ddp.a", "plan.rules[0]", "${tp}"]),
)
OVERRIDES = st.one_of(
    st.tuples(KEYS_OF_OVERRIDES, st.one_of(TEXTS, WORDS, st.text(max_size=6))).map("=".join),
    KEYS_OF_OVERRIDES,
    VALUES,
)


@random_cases
@given(overrides=st.one_of(st.lists(OVERRIDES, min_size=1, max_size=3), VALUES))
@example(overrides=["tp="])
@example(overrides=["=4"])
@example(overrides=["tp=["])
@example(overrides=["[=1"])
@example(overrides=["a.b.c=1"])
@example(overrides=["tp=" + "[" * 1000])
@example(overrides=["tp=!!bool x"])
def test_overrides(overrides, folder):
    overrides = made(overrides)
    if isinstance(overrides, list):
        overrides = [one.replace(RUN, str(folder / "run")) if isinstance(one, str) else one for one in overrides]
    file = written("ddp: {a: 1}\nplan: [{pattern: a, style: row}]\n", folder)
    refused(lambda: ParallelConfig.from_yaml(file, overrides=overrides))
    assert not (folder / "run").exists()


@random_cases
@given(data=st.one_of(keywords(PLAIN), PLAIN, VALUES, TEXTS), child=st.booleans())
@example({"tp": "${dp}", "dp": "${tp}"}, False)
@example({"tp": "${nope:1}"}, True)
def test_a_node_of_omegaconf(data, child):
    node = data = made(data)
    if why_unreadable(data) is None:  # else OmegaConf itself would never end
        with contextlib.suppress(Exception):  # its own refusal, in front of ours
            node = OmegaConf.create({"strategy": data}).strategy if child else OmegaConf.create(data)
    config = refused(lambda: ParallelConfig.from_omegaconf(node))
    assert config is None or isinstance(config, ParallelConfig)


# ---- plans ----------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """A model with a module of each kind that a pattern may name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(2, 2) for name in ("a", "b", "aaaaaaaaaaaaaaaaaaaaaaab")}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(2)
        self.register_buffer("mask", torch.ones(2))


MODEL = Tiny()
PATTERNS = st.one_of(
    st.sampled_from(["layers.*", "layers.*.{a,b}", "norm", "", "layers.*.a.weight", "mask", "*", "*.*.{a,{a,b}}"]),
    st.lists(
        st.sampled_from(
            [
                "layers",
                "norm",
                "a",
                "b",
                "*",
                "{",
                "}",
                ",",
                ".",
                "0",
                "{a,b}",
                "{*,*}",
                "..",
                "**",
                "[",
                "(",
                "\\",
                "é",
            ]
        ),
        max_size=12,
    ).map("".join),
    st.tuples(
        st.sampled_from(["{a,b}", "{*,*}", "*a", "{a,aa}", "{", "}{", "{{a},", "a.", "*.", "x"]), st.integers(1, 40)
    ).map(lambda part: part[0] * part[1]),
    st.text(max_size=10),
)
OPTIONS = [
    "dim",
    "segments",
    "units",
    "args",
    "arg",
    "sp",
    "divide",
    "values",
    "ratio",
    "summed",
    "blocks",
    "local_width",
    "rows",
    "",
]
SMALL = st.one_of(
    st.integers(-2, 3),
    st.sampled_from(["a", "n_head", "auto"]),
    st.lists(st.one_of(st.integers(0, 3), st.just("q")), max_size=3),
)


@st.composite
def rules(draw: st.DrawFn) -> Any:
    """A rule: right ones, wrong ones, and what is none."""
    if draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    rule: dict[Any, Any] = {
        "pattern": draw(st.one_of(PATTERNS, PATTERNS, PATTERNS, VALUES)),
        "style": draw(
            st.one_of(
                st.sampled_from(list(STYLES)), st.sampled_from(list(STYLES)), st.sampled_from(list(STYLES)), VALUES
            )
        ),
    }
    more = draw(
        st.dictionaries(
            st.one_of(st.sampled_from(OPTIONS), st.sampled_from(OPTIONS), SCALARS), st.one_of(SMALL, VALUES), max_size=2
        )
    )
    return {**rule, **more} if draw(st.booleans()) else rule


@random_cases
@given(given_rules=st.one_of(st.lists(rules(), max_size=3), st.lists(rules(), max_size=1), VALUES))
@example([{"pattern": "a", "style": ["row"]}])
@example([{"pattern": "a", "style": "row", 1: 2}])
@example([{"pattern": "}{", "style": "row"}])
@example([{"pattern": "a", "style": "exit", "blocks": "}{"}])
@example([{"pattern": "{*,*}" * 20 + "c", "style": "row"}])
@example([{"pattern": "{" * 5000 + "}" * 5000, "style": "row"}])
@example([{"pattern": "a", "style": "column", "dim": "x"}])
@example([{"pattern": "a", "style": "set", "values": Of("a billion lists")}])
def test_rules(given_rules):
    """What holds is written to YAML and read back, and matches or says that it does not."""
    given_rules = made(given_rules)
    plan = refused(lambda: ShardingPlan.from_rules(given_rules), names=("plan rule", "rules="))
    if plan is None:
        return
    found = refused(
        lambda: plan.match(MODEL), names=tuple(f"plan pattern {shown(rule.pattern)[:20]}" for rule in plan.rules)
    )
    assert found is None or len(found) >= len(plan.rules)
    # In values anything may stand, and a lone half of a character has no form in YAML.
    plain = [rule for rule in plan.rules if not getattr(rule, "values", None) and "\\ud" not in repr(rule)]
    assert ShardingPlan.from_yaml_text(ShardingPlan(tuple(plain)).to_yaml(), source="plan") == ShardingPlan(
        tuple(plain)
    )


@random_cases
@given(pattern=PATTERNS, style=st.sampled_from(["blocks", "row", "exit", "local_heads"]))
@example("{a,b}" * 5000, "row")
@example("{a,aa}" * 16 + "c", "row")
@example("x" * 100_000, "row")
def test_patterns(pattern, style):
    """They are matched in no time, as an expansion of the braces is, or refused."""
    started = time.monotonic()
    plan = refused(
        lambda: ShardingPlan.from_rules([{"pattern": pattern, "style": style}]),
        names=("pattern=",),
        shows=(shown(pattern)[:12],),
    )
    found = None if plan is None else refused(lambda: plan.match(MODEL), names=(f"plan pattern {shown(pattern)[:12]}",))
    assert time.monotonic() - started < 10
    for match in found or ():
        assert any(fits(one, match.name) for one in expanded(pattern))


def expanded(pattern: str) -> list[str]:
    """The patterns without braces that a pattern stands for."""
    inner = re.search(r"\{([^{}]*)\}", pattern)
    if inner is None:
        return [pattern]
    texts = [pattern[: inner.start()] + part + pattern[inner.end() :] for part in inner.group(1).split(",")]
    return [one for text in texts for one in expanded(text)]


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern without braces matches a name, part by part."""
    parts, names = pattern.split("."), name.split(".")
    regexes = [".+".join(map(re.escape, part.split("*"))) for part in parts]
    return len(parts) == len(names) and all(re.fullmatch(regex, one) for regex, one in zip(regexes, names, strict=True))


@random_cases
@given(
    text=st.one_of(
        TEXTS,
        st.lists(rules(), max_size=2).map(lambda some: f"rules: {[part for part in some if isinstance(part, dict)]}"),
    )
)
def test_a_plan_in_yaml(text, folder):
    file = written(text, folder)
    from_file = refused(lambda: ShardingPlan.from_yaml(file), names=("plan ",))
    from_text = refused(lambda: ShardingPlan.from_yaml_text(text.replace(RUN, str(folder / "run"))), names=("plan",))
    assert from_file is None or from_text is None or from_file.rules == from_text.rules
    with contextlib.suppress(yaml.YAMLError):
        parse_yaml(text)
    assert not (folder / "run").exists()


# ---- topologies -----------------------------------------------------------------------------------------------------


@st.composite
def grids(draw: st.DrawFn) -> ProcessTopology:
    """A grid of up to 131,072 ranks."""
    axes = draw(
        st.lists(st.one_of(st.sampled_from(AXES), st.text(min_size=1, max_size=4)), min_size=1, max_size=5, unique=True)
    )
    left, dims = draw(st.sampled_from([64, 64, 1024, 1024, 1024, 131_072])), []
    for _ in axes:
        dims.append(draw(st.one_of(st.integers(1, min(4, left)), st.integers(1, left))))
        left //= dims[-1]
    return ProcessTopology(axes, draw(st.permutations(dims)))


@random_cases
@given(topology=grids(), data=st.data())
def test_a_grid(topology, data):
    """There and back between ranks and coordinates; the lists of some axes have each rank once."""
    world = topology.world_size
    rank = data.draw(st.one_of(st.integers(0, world - 1), st.just(world - 1)))
    coord = topology.get_coord(rank)
    assert topology.get_rank(**coord) == rank
    assert all(0 <= coord[axis] < size for axis, size in topology)
    chosen = data.draw(st.lists(st.sampled_from(topology.axes), min_size=1, unique=True))
    lists = topology.get_axis_comm_lists(*chosen)
    assert sorted(itertools.chain(*lists)) == list(range(world))
    assert {len(ranks) for ranks in lists} == {math.prod(topology.get_dim(axis) for axis in chosen)}
    (own,) = (ranks for ranks in lists if rank in ranks)
    assert topology.get_comm_list(rank, *chosen) == own == sorted(own)
    rest = {axis: index for axis, index in coord.items() if axis not in chosen}
    assert topology.filter_match(**rest) == own
    assert rank in topology.get_axis_list(chosen[0], coord[chosen[0]])
    label = topology.get_rank_repr(rank, omit_axes=())
    assert label == "-".join(
        f"{axis}_{index:0{max(2, len(str(topology.get_dim(axis) - 1)))}d}" for axis, index in coord.items()
    )
    assert topology.prev_stage(topology.next_stage(rank)) == rank


# ---- what is too much -----------------------------------------------------------------------------------------------

HUGE = {
    "brackets": "[" * 10_000_000,
    "nested lists": "tp: " + "[" * 400_000 + "]" * 400_000,
    "nested mappings": "{a: " * 200_000 + "1" + "}" * 200_000,
    "nested blocks": "".join(" " * level + "a:\n" for level in range(1000)),
    "nested dashes": "- " * 400_000 + "1",
    "10 MB of nested mappings": "{a: " * 2_500_000,
    "a long word": "tp: " + "x" * 900_000,
    "a long key": "x" * 900_000 + ": 1",
    "many values": "".join(f"k{at}: 1\n" for at in range(90_000)),
    "one key again and again": "tp: 1\n" * 100_000,
    "a billion laughs": "a0: &a0 [lol]\n"
    + "".join(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 10)}]\n" for at in range(1, 10)),
    "a billion merges": "a0: &a0 {x: 1}\n"
    + "".join(f"a{at}: &a{at} {{<<: [{', '.join([f'*a{at - 1}'] * 10)}]}}\n" for at in range(1, 10)),
    "a billion interpolations": "a0: lol\n" + "".join(f"a{at}: '{f'${{a{at - 1}}}' * 10}'\n" for at in range(1, 10)),
    "nested interpolations": "tp: '" + "${" * 5000 + "tp" + "}" * 5000 + "'",
    "a chain of interpolations": "".join(f"a{at}: ${{a{at + 1}}}\n" for at in range(3000)) + "a3000: 1",
    "an alias in itself": "plan: &a {b: *a}",
    "a key that holds itself": "? &a [*a]\n: 1",
    "zeros": "\0" * 900_000,
    "a long number": "tp: " + "9" * 900_000,
    "comments": "#\n" * 600_000,
}


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_text_is_refused_at_once(name, folder):
    file = written(HUGE[name], folder)
    started = time.monotonic()
    assert refused(lambda: ParallelConfig.from_yaml(file), names=("config", "field", "tp=")) is None
    assert refused(lambda: ShardingPlan.from_yaml(file), names=("plan",)) is None
    with_override = written("tp: 2", folder)
    assert refused(lambda: ParallelConfig.from_yaml(with_override, overrides=[f"tp={HUGE[name]}"])) is None
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("call", ["apply:os.mkdir", "new:os.mkdir", "apply:pathlib.Path.touch", "apply:os.system"])
def test_a_tag_is_never_followed(call, tmp_path):
    """What a loader that follows tags makes of it is seen; nothing of ours makes it."""
    run = tmp_path / "run"
    given_to = f"touch {run}" if call.endswith("system") else str(run)
    tag = f"!!python/object/{call} ['{given_to}']"
    if call == "apply:os.mkdir":
        yaml.unsafe_load(tag)
        run.rmdir()
    for text in (
        f"tp: {tag}",
        tag,
        f"? {tag}\n: 1",
        f"ddp: {{a: [{tag}]}}",
        f"rules: [{tag}]",
        f"rules: [{{pattern: a, style: {tag}}}]",
    ):
        file = written(text, tmp_path)
        assert refused(lambda file=file: ParallelConfig.from_yaml(file)) is None
        assert refused(lambda file=file: ShardingPlan.from_yaml(file)) is None
        assert refused(lambda text=text: ShardingPlan.from_yaml_text(text)) is None
        with pytest.raises(yaml.YAMLError, match="could not determine a constructor for the tag"):
            parse_yaml(text)
        plain = written("tp: 2", tmp_path)
        assert refused(lambda plain=plain: ParallelConfig.from_yaml(plain, overrides=[f"tp={tag}"])) is None
    assert not run.exists()


def test_paths_that_name_no_file(folder):
    for path in ("x" * 5000, "tp: 2\n" * 500, "\0", "", None, 3, folder, [1], "\udcff"):
        assert refused(lambda path=path: ParallelConfig.from_yaml(path), names=("does not exist",)) is None
        assert refused(lambda path=path: ShardingPlan.from_yaml(path), names=("no such file",)) is None


def test_what_an_editor_of_windows_saves_is_read(folder):
    assert ParallelConfig.from_yaml(written(b"\xef\xbb\xbftp: 2\r\nsp: false\r\n", folder)) == ParallelConfig(
        tp=2, sp=False
    )
    assert (
        refused(
            lambda: ParallelConfig.from_yaml(written("tp: 2".encode("utf-16"), folder)), names=("save it as UTF-8",)
        )
        is None
    )
    assert ParallelConfig.from_yaml(written("", folder)) == ParallelConfig()


def test_what_messages_show():
    assert (shown("a"), shown({"b": 1, "a": [1, (2,)]}), shown(10**5000)) == (
        "'a'",
        "{'b': 1, 'a': [1, (2,)]}",
        "<a number of 16610 bits>",
    )
    assert (shown(Odd())[:5], shown(nested(100_000)), shown([*range(13)])[-5:]) == ("<Odd ", "[[[[[[...]]]]]]", " ...]")
    assert (len(shown("x" * 1000)), shortened("x" * 30, 11), shortened("abc", 11)) == (200, "xxx ... xxx", "abc")
    assert len(shown(doubled(60))) <= 200
