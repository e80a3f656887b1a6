"""What a proof depends on: equal models have one key in every process, and any difference makes another."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import logging
import random
import sys
import threading
import types
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pydantic
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.verify.content_digest import ContentDigest, UnreadableError
from lightning_seqpar.verify.proof_cache import Proof, fingerprint, read_proof, write_proof
from tests.helpers.fit import quiet_trainer


def digest(value: Any) -> str:
    own = ContentDigest({})
    own.add(value, "it")
    return own.hexdigest()


# ---- values --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    size: int = 3


@dataclasses.dataclass
class Plain:
    size: int = 3


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Settings(pydantic.BaseModel):
    size: int = 3


class Custom:
    def __init__(self, size: int) -> None:
        self.size, self.itself = size, self

    def method(self) -> int:
        return self.size


class CustomDict(dict):  # type: ignore[type-arg]
    pass


def with_cell(size: int) -> Any:
    return lambda x: x * size


def with_defaults(size: int, name: int = 1) -> Any:
    def f(x: int = size, *, y: int = name) -> int:
        return x + y

    return f


def with_body(source: str) -> Any:
    space: dict[str, Any] = {}
    exec(f"def f(x):\n    return {source}", space)
    return space["f"]


@functools.lru_cache
def cached(x: int) -> int:
    return x


def linked(length: int, last: int) -> Any:
    first: Any = SimpleNamespace(value=last)
    for _ in range(length):
        first = SimpleNamespace(next=first)
    return first


VALUES: dict[str, tuple[Any, Any]] = {
    "numbers": (lambda: 1, lambda: 2),
    "types of numbers": (lambda: 1, lambda: True),
    "floats": (lambda: 0.1, lambda: 0.1000000001),
    "strings": (lambda: "a", lambda: b"a"),
    "where strings end": (lambda: ["ab", "c"], lambda: ["a", "bc"]),
    "slots": (lambda: Slots(3), lambda: Slots(4)),
    "dataclass": (lambda: Plain(3), lambda: Plain(4)),
    "classes": (lambda: Plain(3), lambda: Slots(3)),
    "pydantic": (lambda: Settings(size=3), lambda: Settings(size=4)),
    "omegaconf": (lambda: OmegaConf.create({"a": {"b": [1]}}), lambda: OmegaConf.create({"a": {"b": [2]}})),
    "argparse": (lambda: argparse.Namespace(a=1), lambda: argparse.Namespace(a=2)),
    "namespace": (lambda: SimpleNamespace(a=1), lambda: SimpleNamespace(a=2)),
    "enum": (lambda: Colour.RED, lambda: Colour.BLUE),
    "path": (lambda: Path("a"), lambda: Path("b")),
    "array": (lambda: np.arange(3), lambda: np.arange(1, 4)),
    "scalar": (lambda: np.float32(0.1), lambda: np.float64(0.1)),
    "numpy's dtype": (lambda: np.dtype("f4"), lambda: np.dtype("f8")),
    "array of objects": (lambda: np.array([{"a": 1}, None]), lambda: np.array([{"a": 2}, None])),
    "tensor": (lambda: torch.arange(3.0), lambda: torch.arange(1.0, 4.0)),
    "torch's dtype": (lambda: torch.float32, lambda: torch.float64),
    "deque": (lambda: collections.deque([1], 3), lambda: collections.deque([1], 4)),
    "ordered": (lambda: collections.OrderedDict(a=1, b=2), lambda: collections.OrderedDict(b=2, a=1)),
    "default": (lambda: collections.defaultdict(list), lambda: collections.defaultdict(dict)),
    "set": (lambda: {"a", "b", "c"}, lambda: {"a", "b", "d"}),
    "set of objects": (lambda: {Slots(1), Slots(2)}, lambda: {Slots(1), Slots(3)}),
    "dict of a class": (lambda: CustomDict(a=1), lambda: {"a": 1}),
    "date": (lambda: datetime.datetime(2026, 1, 1), lambda: datetime.datetime(2026, 1, 2)),
    "duration": (lambda: datetime.timedelta(1), lambda: datetime.timedelta(2)),
    "range": (lambda: range(3), lambda: range(4)),
    "slice": (lambda: slice(3), lambda: slice(4)),
    "cycle": (lambda: Custom(1), lambda: Custom(2)),
    "bound self": (lambda: Custom(1).method, lambda: Custom(2).method),
    "bound method of a list": (lambda: [1].count, lambda: [2].count),
    "cell": (lambda: with_cell(1), lambda: with_cell(2)),
    "cells of cells": (lambda: with_cell(with_cell(1)), lambda: with_cell(with_cell(2))),
    "defaults": (lambda: with_defaults(1), lambda: with_defaults(2)),
    "keyword defaults": (lambda: with_defaults(1, 1), lambda: with_defaults(1, 2)),
    "constants": (lambda: with_body("x + 1"), lambda: with_body("x + 2")),
    "nested constants": (lambda: with_body("[(lambda: 1)() for _ in x]"), lambda: with_body("[(lambda: 2)() for _ in x]")),
    "bodies": (lambda: with_body("x + x"), lambda: with_body("x * x")),
    "names": (lambda: with_body("x.sin()"), lambda: with_body("x.cos()")),
    "constant sets": (lambda: with_body("x in {'a', 'b'}"), lambda: with_body("x in {'a', 'c'}")),
    "partial": (lambda: functools.partial(F.gelu, approximate="none"), lambda: functools.partial(F.gelu, approximate="tanh")),
    "torch's functions": (lambda: torch.relu, lambda: torch.sigmoid),
    "functions": (lambda: F.gelu, lambda: F.silu),
    "cached": (lambda: cached, lambda: functools.lru_cache(with_cell(3))),
    "logger": (lambda: logging.getLogger("a"), lambda: logging.getLogger("b")),
    "generator": (lambda: torch.Generator().manual_seed(1), lambda: torch.Generator().manual_seed(2)),
    "random": (lambda: random.Random(1), lambda: random.Random(2)),
    "numpy's generator": (lambda: np.random.default_rng(1), lambda: np.random.default_rng(2)),
    "property": (lambda: property(with_body("x.a")), lambda: property(with_body("x.b"))),
    "weak": (lambda: weakref.ref(Colour.RED), lambda: weakref.ref(Colour.BLUE)),
    "metric": (MeanMetric, lambda: MeanMetric(nan_strategy="ignore")),
    "module": (lambda: [nn.Linear(2, 2, bias=False).requires_grad_(False)], lambda: [nn.Linear(3, 2)]),
    "depth": (lambda: linked(5000, 1), lambda: linked(5000, 2)),
    "sharing": (lambda: [[1]] * 2, lambda: [[1], [1]]),
}  # fmt: skip


@pytest.mark.parametrize("kind", VALUES)
def test_equal_values_have_one_digest_and_others_another(kind):
    one, other = VALUES[kind]
    torch.manual_seed(0)
    first = digest(one())
    torch.manual_seed(0)
    assert first == digest(one())
    assert first != digest(other())


def test_two_values_are_not_written_like_one():
    one, other, long = object(), object(), object()
    apart = ContentDigest({id(one): "x", id(other): "y"})
    apart.add(one, "")
    apart.add(other, "")
    together = ContentDigest({id(long): "x0 partsaty"})
    together.add(long, "")
    assert apart.hexdigest() != together.hexdigest()


def test_classes_of_modules_without_a_file_are_read(monkeypatch):
    digests = set()
    for result in ("x", "x + 1"):
        made = types.ModuleType("made_at_run_time")
        monkeypatch.setitem(sys.modules, made.__name__, made)
        exec(f"class Net:\n    def forward(self, x):\n        return {result}", vars(made))
        digests.add(digest(made.Net))
    assert len(digests) == 2


def test_locks_and_events_are_read():
    assert digest(threading.Lock()) == digest(threading.Lock())
    assert digest(threading.Event()) == digest(threading.Event())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (SimpleNamespace(a=[0, {"b": (x for x in "ab")}]), r"a'?\]?\[1\].*generator"),
        (SimpleNamespace(file=sys.stderr), "whose content can't be read"),
        (with_cell(x for x in "ab"), r"it \(size\) is a generator"),
    ],
)
def test_what_cannot_be_read_is_named(value, said):
    with pytest.raises(UnreadableError, match=said):
        digest(value)


# ---- models --------------------------------------------------------------------------------------------------------

SWITCH = {"on": False}
LIMIT = 3


def helper(x: Tensor) -> Tensor:
    return x * LIMIT if SWITCH["on"] else x


class Model(L.LightningModule):
    limit = 1

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.settings = Plain()
        self.tokenizer: Any = None
        self.act = with_cell(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return helper(self.second(self.act(self.first(batch[0])))).sum()


def tie(model: Model) -> None:
    model.second.weight = model.first.weight


def run_time_class(model: Model) -> None:
    class Model(type(model)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * 2

    model.__class__ = Model


def another_class(model: Model) -> None:
    space = {"__module__": nn.Linear.__module__, "forward": with_cell(3)}
    model.first.__class__ = type("Linear", (nn.Linear,), space)


def patched_instance(model: Model) -> None:
    forward = type(model.first).forward
    model.first.forward = types.MethodType(lambda self, x: forward(self, x).flip(1), model.first)  # type: ignore[method-assign]


CHANGES: dict[str, Any] = {
    "ties": tie,
    "frozen": lambda model: model.first.weight.requires_grad_(False),
    "dtype": lambda model: model.double(),
    "mode": lambda model: model.first.eval(),
    "buffer": lambda model: model.norm.running_mean.add_(1),
    "config": lambda model: setattr(model.settings, "size", 4),
    "closure": lambda model: setattr(model, "act", with_cell(2)),
    "hook": lambda model: model.first.register_forward_hook(lambda module, args, out: out * 2),
    "hook before": lambda model: model.first.register_forward_pre_hook(with_cell(1)),
    "hook of a gradient": lambda model: model.first.weight.register_hook(with_cell(1)),
    "class": another_class,
    "class at run time": run_time_class,
    "method of an instance": patched_instance,
    "attribute": lambda model: setattr(model.first, "in_features", 3),
    "manual": lambda model: setattr(model, "automatic_optimization", False),
    "hyperparameters": lambda model: model.save_hyperparameters({"a": 1}),
}  # fmt: skip


def key(model: Any, trainer: Any = None, **more: Any) -> str:
    options: dict[str, Any] = {"config": ParallelConfig(tp=2), "sizes": {"tp": 2, "dp": 1}, "example": None, **more}
    found = fingerprint(model, trainer or quiet_trainer(), **options)
    assert found.key is not None, found.unread
    return found.key


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_has_another_key(change):
    first, second = Model(), Model()
    assert key(first) == key(second)
    CHANGES[change](second)
    assert key(first) != key(second)


OTHERWISE: dict[str, Any] = {
    "hook": lambda model, n: model.first.register_forward_hook(with_cell(n)),
    "hook of a gradient": lambda model, n: model.first.weight.register_hook(with_cell(n)),
}  # fmt: skip


@pytest.mark.parametrize("change", OTHERWISE)
def test_what_is_changed_in_two_ways_has_two_keys(change):
    found = []
    for n in (1, 1, 2):
        model = Model()
        OTHERWISE[change](model, n)
        found.append(key(model))
    assert found[0] == found[1] != found[2]


def test_a_library_that_is_patched_in_two_ways_has_two_keys(monkeypatch):
    found = [key(Model())]
    for n in (1, 1, 2):
        monkeypatch.setattr(F, "softplus", with_cell(n))
        found.append(key(Model()))
    assert found[0] != found[1] == found[2] != found[3]


def test_weights_are_no_part_of_a_proof():
    first, second = Model(), Model()
    with torch.no_grad():
        first.first.weight.add_(1)
    assert key(first) == key(second)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (sys.modules[__name__], "LIMIT", 4),
        (sys.modules[__name__], "SWITCH", {"on": True}),
        (sys.modules[__name__], "helper", lambda x: x),
        (Model, "limit", 2),
        (Model, "validation_step", lambda self, batch: None),
        (F, "linear", lambda x, weight, bias: x @ weight.T),
        (nn.Linear, "forward", lambda self, x: x @ self.weight.T),
        (nn.Linear, "extra", property(lambda self: 1)),
        (torch.backends, "registry", {"mine": with_cell(1)}),
        (nn.Module, "train", lambda self, mode=True: self),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_model_reaches_is_in_the_key(monkeypatch, where, name, value):
    model = Model()
    before = key(model)
    monkeypatch.setattr(where, name, value, raising=False)
    assert key(model) != before
    monkeypatch.undo()
    assert key(model) == before


def test_settings_and_the_example_are_in_the_key():
    model = Model()
    example = Example("", "training_step", ([torch.ones(2, 2)], 0), {})
    others = [
        {"config": ParallelConfig(tp=2, sp=False)},
        {"config": ParallelConfig(tp=2, regather=True)},
        {"sizes": {"tp": 4, "dp": 1}},
        {"sizes": {"tp": 2, "dp": 2}},
        {"example": example},
        {"example": dataclasses.replace(example, args=([torch.ones(2, 3)], 0))},
        {"example": dataclasses.replace(example, args=([torch.ones(2, 2).double()], 0))},
        {"example": dataclasses.replace(example, args=({"x": torch.ones(2, 2)}, 0))},
        {"example": dataclasses.replace(example, method="forward")},
    ]
    keys = [key(model), *(key(model, **other) for other in others)]
    assert len(set(keys)) == len(keys)
    same = dataclasses.replace(example, args=([torch.zeros(2, 2)], 0))
    assert key(model, example=example) == key(model, example=same)
    assert key(model) == key(model, config=ParallelConfig(tp=2, timeout=7, check_every=5))


class Data(L.LightningDataModule):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale


class Scaled(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.trainer.datamodule.scale


@pytest.mark.parametrize(("kind", "depends"), [(Model, False), (Scaled, True)])
def test_what_a_step_reads_of_the_trainer_is_in_the_key(kind, depends):
    one, other = quiet_trainer(), quiet_trainer()
    one.datamodule, other.datamodule = Data(1.0), Data(2.0)
    model = kind()
    assert (key(model, one) != key(model, other)) is depends


def test_what_keeps_a_model_from_being_remembered_is_named():
    model = Model()
    model.first.tokenizer = open(__file__)  # noqa: SIM115
    found = fingerprint(model, quiet_trainer(), ParallelConfig(tp=2), {"tp": 2}, None)
    assert found == (None, "model.first.tokenizer is a TextIOWrapper whose content can't be read")
    model.first.tokenizer.close()


# ---- the file ------------------------------------------------------------------------------------------------------


def test_a_proof_is_read_as_it_was_written_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_proof("k") is None
    proof = Proof(
        "- a plan\n", "it is tied", ["a reason"], {"h.*.attn": "four heads"}, {"h.*": "a shift"}, "no example"
    )
    write_proof("k", proof)
    assert read_proof("k") == proof
    (file,) = tmp_path.rglob("*.json")
    text = file.read_text()
    for broken in (text[:-5], "", "[]", "null", "7", text.replace("a plan", "b plan"), '{"plan": ""}', "\xff"):
        file.write_bytes(broken.encode("latin1"))
        assert read_proof("k") is None
    file.rename(file.with_name("other.json"))
    assert read_proof("other") is None
    file.with_name("k.json").mkdir()
    assert read_proof("k") is None


def test_a_folder_that_cannot_be_made_is_told_of(tmp_path, monkeypatch, caplog):
    (tmp_path / "lightning_seqpar").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        write_proof("k", Proof())
    assert "the proof is not remembered, its folder can't be written" in caplog.text
    assert read_proof("k") is None


def test_a_user_without_a_home(monkeypatch, caplog):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)

    def nobody(number: int) -> Any:
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        write_proof("k", Proof())
    assert "the proof is not remembered" in caplog.text
    assert read_proof("k") is None


def test_two_runs_write_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = [threading.Thread(target=write_proof, args=("k", Proof("plan\n" * 10000))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_proof("k") == Proof("plan\n" * 10000)
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["k.json"]
