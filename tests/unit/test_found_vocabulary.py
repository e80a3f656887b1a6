"""Which embeddings and heads are over a vocabulary, as a look at the model tells, and what a plan then says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_seqpar.config import PlanSpec
from lightning_seqpar.plan.sharding_plan import resolve_plans
from lightning_seqpar.plan.vocabulary import VocabularyChoice, with_vocabulary
from tests.helpers import models
from tests.mutants import sees


class Net(nn.Module):
    """Parts around the blocks of an encoder, under the names that a test gives them."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for name, part in parts.items():
            setattr(self, name, part)


def found(model: nn.Module, spec: Any = "auto", *, certain: bool = False) -> VocabularyChoice:
    spec = spec if isinstance(spec, str) else PlanSpec(**spec)
    return with_vocabulary(resolve_plans(spec, model), spec, model, 2, True, certain=certain)


def names(choice: VocabularyChoice) -> list[str]:
    return [rule.pattern for plan in choice.plans for rule in plan.rules if rule.style == "vocab"]


def tied(rows: int = 40) -> dict[str, Any]:
    embedding, head = nn.Embedding(rows, 16), nn.Linear(16, rows, bias=False)
    head.weight = embedding.weight
    return {"one": embedding, "other": head}


class Wrapped(nn.Module):
    """As a library's model: an accessor says which embedding is the input's."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.anything = embedding

    def get_input_embeddings(self) -> nn.Module:
        return self.anything


class Byte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vocab_size, self.first = 40, nn.Embedding(40, 16)


CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    # parts, what is found, and what is found if nothing will prove it
    "equal rows": (lambda: {"a": nn.Embedding(40, 16), "b": nn.Linear(16, 40)}, ["a", "b"], ["a", "b"]),
    "tied": (tied, ["one", "other"], ["one", "other"]),
    "tied and square": (lambda: tied(16), ["one", "other"], ["one", "other"]),
    "an accessor": (lambda: {"net": Wrapped(nn.Embedding(40, 16))}, ["net.anything"], ["net.anything"]),
    "a name": (lambda: {"tok_emb": nn.Embedding(40, 16), "out": nn.Linear(16, 5)}, ["tok_emb"], []),
    "a number": (lambda: {"net": Byte()}, ["net.first"], []),
    "the largest": (lambda: {"embed": nn.Embedding(40, 16), "kind_embed": nn.Embedding(3, 16)}, ["embed"], []),
    "positions": (
        lambda: {"wte": nn.Embedding(40, 16), "wpe": nn.Embedding(40, 16), "head": nn.Linear(16, 40)},
        ["wte", "head"],
        ["wte", "head"],
    ),
    "types": (lambda: {"token_type_embeddings": nn.Embedding(2, 16), "position": nn.Embedding(9, 16)}, [], []),
    "a square linear": (
        lambda: {"tokens": nn.Embedding(16, 16), "project": nn.Linear(16, 16), "head": nn.Linear(16, 16)},
        ["tokens", "head"],
        ["tokens", "head"],
    ),
    "a classifier": (lambda: {"patch": nn.Linear(8, 16), "head": nn.Linear(16, 10)}, [], []),
    "two": (
        lambda: {"a": nn.Embedding(40, 16), "b": nn.Embedding(9, 16), "c": nn.Linear(16, 9), "d": nn.Linear(16, 40)},
        ["a", "d", "b", "c"],
        ["a", "d", "b", "c"],
    ),
    "one row": (lambda: {"tokens": nn.Embedding(1, 16), "head": nn.Linear(16, 1)}, [], []),
}


@sees(
    "a vocabulary sharded by its name, with no proof",
    "_Search.found",
    "(not certain or self._is_safe(one))",
    "True",
    case="a name",
)
@pytest.mark.parametrize("case", CASES)
def test_what_is_over_a_vocabulary(case):
    make, wanted, certain = CASES[case]
    assert sorted(names(found(Net(**make())))) == sorted(wanted)
    assert sorted(names(found(Net(**make()), certain=True))) == sorted(certain)


class Reader(nn.Module):
    """Holds a weight of somebody else's, which it presumably reads."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.table = weight


class Looked(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


def shared_with_a_reader() -> dict[str, Any]:
    tokens = nn.Embedding(40, 16)
    return {"tokens": tokens, "reader": Reader(tokens.weight)}


def replaced() -> dict[str, Any]:
    tokens = nn.Embedding(40, 16)
    tokens.forward = lambda ids: F.embedding(ids, tokens.weight)  # type: ignore[method-assign]
    return {"tokens": tokens}


def hooked(register: str) -> dict[str, Any]:
    tokens = nn.Embedding(40, 16)
    getattr(tokens.weight, register)(lambda grad: grad)
    return {"tokens": tokens}


REASONS: dict[str, tuple[Any, str]] = {
    "max_norm": (lambda: {"tokens": nn.Embedding(40, 16, max_norm=1.0)}, "an nn.Embedding with max_norm can't be"),
    "sparse": (lambda: {"tokens": nn.Embedding(40, 16, sparse=True)}, "an nn.Embedding with sparse can't be"),
    "by itself": (lambda: {"tokens": Looked(40, 16)}, "the forward of Looked computes with the weight itself"),
    "on the instance": (replaced, "replaced on the instance"),
    "a reader": (shared_with_a_reader, "its weight is reader.table too, which a Reader reads"),
    "a hook": (lambda: hooked("register_hook"), "a hook on its weight's gradient may count rows"),
    "a later hook": (lambda: hooked("register_post_accumulate_grad_hook"), "a hook on its weight's gradient may"),
    "a norm of its weight": (
        lambda: {"tokens": nn.utils.parametrizations.weight_norm(nn.Embedding(40, 16))},
        "the weight of this ParametrizedEmbedding is no floating-point parameter of its own",
    ),
}


@sees(
    "a weight whose gradient a hook of the user's changes is sharded",
    "_why_whole",
    "if has_tensor_hooks(parameter):",
    "if False:",
    case="a hook",
)
@pytest.mark.parametrize("case", REASONS)
def test_what_can_not_be_sharded_stays_whole_with_a_reason(case):
    make, reason = REASONS[case]
    choice = found(Net(**make()))
    assert names(choice) == []
    assert any(line.startswith("vocabulary: tokens whole: ") and reason in line for line in choice.lines), choice.lines


@sees(
    "a search for vocabularies computes weights that count",
    "vocabulary:_held_weight",
    "    for held in (module._parameters",
    "    module.weight\n    for held in (module._parameters",
)
def test_the_search_leaves_weights_alone_that_are_computed_when_they_are_read():
    head = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 40))
    model = Net(tokens=nn.Embedding(40, 16), head=head)
    before = {name: value.clone() for name, value in model.named_buffers()}
    found(model)
    assert before
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


class Freezing(models.GPT):
    """Zeroes gradients of the first rows, by a method that its hook calls."""

    def on_after_backward(self) -> None:
        self.freeze()

    def freeze(self) -> None:
        with torch.no_grad():
            self.model.tokens.weight.grad[:4] = 0


class Manual(models.GPT):
    """Steps by hand, and keeps the first rows as they were."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.model.tokens.weight.grad[:4] = 0
        optimizer.step()


class Weighted(models.GPT):
    """Reads a weight for its loss, where the graph shows who reads it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.model.norm.weight.square().sum()


class Shown(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        norms = [module.weight.norm() for module in pl_module.modules() if isinstance(module, nn.Embedding)]
        self.shown = sum(norms)


class Quiet(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.steps = trainer.global_step


@sees("hooks that write rows of a weight pass by", "weight_reader", "if names & _WEIGHTS and", "if False and")
@sees(
    "hooks are asked for weights, and not what they call",
    "_names",
    "if not isinstance(called, types.FunctionType) or",
    "if True or",
)
@sees("a training step that changes rows of a gradient passes by", "weight_reader", "(runs or names & _PAST_THE_GRAPH)", "runs")
def test_code_beside_the_forward_that_names_a_weight_leaves_the_vocabulary_whole():
    def outcome(model: Any, spec: Any = "auto", callbacks: Any = ()) -> VocabularyChoice:
        return with_vocabulary(resolve_plans(spec, model), spec, model, 2, True, callbacks=callbacks)

    assert outcome(models.GPT(), callbacks=[Quiet(), ModelCheckpoint()]).outcome.startswith("sharded: model.tokens")
    for model, callbacks, reader in (
        (Freezing(), [], "Freezing.on_after_backward"),
        (Manual(), [], "Manual.training_step"),
        (models.GPT(), [Shown()], "Shown.on_train_batch_end"),
    ):
        (said,) = outcome(model, callbacks=callbacks).whole
        assert said.startswith(f"model.tokens, model.head whole: {reader} names a weight")
    assert outcome(Weighted()).outcome.startswith("sharded: model.tokens")
    rules = [{"pattern": "model.{tokens,head}", "style": "vocab"}]
    chosen = outcome(Freezing(), PlanSpec(base="auto", rules=rules))
    assert not chosen.whole
    assert chosen.outcome.startswith("sharded: model.tokens")


@sees(
    "a user's rule for one of two tied ends forgets the other",
    "_deciding_rule",
    (
        "            return rule.style\n        if rule.undoes_inside and inside(name,"
        " match.name):\n            return rule.style\n"
    ),
    "            return None\n",
)
def test_a_users_rule_decides_about_what_is_tied_too():
    for pattern in ("one", "other"):
        choice = found(Net(**tied()), {"rules": [{"pattern": pattern, "style": "whole"}]})
        assert names(choice) == []
        assert "one, other whole: a rule says 'whole'" in choice.lines[-1]
        explicit = found(Net(**tied()), {"rules": [{"pattern": pattern, "style": "vocab"}]})
        assert sorted(names(explicit)) == ["one", "other"]
    assert names(found(models.GPT(tied=False), {"rules": [{"pattern": "model.head", "style": "whole"}]})) == ["model.tokens"]


def test_the_users_rules_stand_last():
    choice = found(models.GPT(), {"rules": [{"pattern": "model.norm", "style": "exit"}]})
    assert [plan.source for plan in choice.plans] == ["family byte_gpt", "vocabulary", "your plan"]
    assert choice.lines == ["vocabulary: sharded: model.tokens, model.head (31 rows, 16 on a rank, 1 more as padding)"]


def test_a_plan_that_is_written_whole_says_itself_what_is_sharded(tmp_path):
    (tmp_path / "plan.yaml").write_text(resolve_plans("auto", models.GPT())[0].to_yaml())
    for spec in (models.plan(), str(tmp_path / "plan.yaml")):
        choice = found(models.GPT(), spec)
        assert names(choice) == []
        assert choice.lines == ["vocabulary: as your plan says"]
