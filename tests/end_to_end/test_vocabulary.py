"""Embeddings and heads over a vocabulary, sharded without a word from the user: equal to one process, or whole with a reason."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import models
from tests.helpers.fit import fit


class Scaled(nn.Embedding):
    """As Gemma and BART have it."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * torch.tensor(4.0).to(self.weight.dtype)


class Looked(nn.Embedding):
    """Looks its rows up by itself."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight) * 2.0


class Warm(nn.Linear):
    """A head with a temperature of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0.7


class Words(models.GPT):
    """The example's GPT with an end of another sort, or with another use of it."""

    def __init__(self, kind: str) -> None:
        super().__init__(tied=kind in TIED)
        self.kind, gpt = kind, self.model
        make = {"scaled": Scaled, "looked": Looked}.get(kind)
        if make is not None:
            gpt.tokens = make(31, 16)
        if kind == "padding":
            gpt.tokens = nn.Embedding(31, 16, padding_idx=0)
        if kind == "max_norm":
            gpt.tokens = nn.Embedding(31, 16, max_norm=1.0)
        if kind == "warm":
            gpt.head = Warm(16, 31)
        if kind in ("bias", "frozen"):
            gpt.head = nn.Linear(16, 31)
        if kind == "tied_late":
            gpt.head.weight = gpt.tokens.weight
        if kind == "auxiliary":
            self.second = nn.Linear(16, 31)
        if kind == "few":
            gpt.tokens, gpt.head = nn.Embedding(3, 16), nn.Linear(16, 3)
        if kind == "two":
            self.chars, self.char_head = nn.Embedding(7, 16), nn.Linear(16, 7)
        if kind == "bias_twice":
            gpt.head = Predictions(16, 31)
        models.perturb(self)
        if kind == "frozen":
            gpt.tokens.requires_grad_(False)
            gpt.head.requires_grad_(False)

    def hidden(self, ids: Tensor) -> Tensor:
        gpt = self.model
        x = gpt.tokens(ids) + gpt.positions(torch.arange(ids.shape[1]))
        if self.kind == "two":
            x = x + self.chars(ids % 7)
        for block in gpt.blocks:
            x = block(x)
        return gpt.norm(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (ids,) = batch
        ids = ids % 3 if self.kind == "few" else ids
        target = ids[:, 1:]
        x = self.hidden(ids[:, :-1])
        gpt = self.model
        if self.kind == "projected":
            return F.cross_entropy(F.linear(x, gpt.tokens.weight).flatten(0, 1), target.flatten())
        if self.kind == "last":
            x, target = x[:, -3:], target[:, -3:]
        logits = gpt.head(x)
        if self.kind == "soft_cap":
            logits = 5.0 * torch.tanh(logits / 5.0)
        if self.kind == "by_shape":
            return F.cross_entropy(logits.view(-1, gpt.head.weight.shape[0]), target.flatten())
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        if self.kind == "auxiliary":
            loss = loss + 0.5 * F.cross_entropy((self.second(x) + logits).flatten(0, 1), target.flatten())
        if self.kind == "two":
            loss = loss + F.cross_entropy(self.char_head(x).flatten(0, 1), target.flatten() % 7)
        if self.kind == "penalty":
            loss = loss + 0.1 * gpt.tokens.weight.square().sum()
        if self.kind == "z_loss":
            loss = loss + 1e-2 * torch.logsumexp(logits, -1).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


class Predictions(nn.Module):
    """BERT's: the decoder's bias stands in the module around it too."""

    def __init__(self, dim: int, rows: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(rows))
        self.decoder = nn.Linear(dim, rows)
        self.decoder.bias = self.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x)


models.Words = Words
TIED = ("projected", "penalty", "soft_cap")
SHARDED = {
    "plain": 2, "scaled": 2, "padding": 2, "warm": 3, "bias": 3, "tied_late": 1, "soft_cap": 1, "auxiliary": 4, "last": 2,
    "two": 5, "few": 3, "bias_twice": 3, "z_loss": 2, "frozen": 3,
}  # fmt: skip
"""How many tensors of the ends are sharded."""
WHOLE = {
    "projected": "is out of bounds",
    "penalty": "the loss must not read parameters",
    "by_shape": "shape",
    "looked": None,
    "max_norm": None,
}
"""What the warning names; None where no run is needed to see it."""


def fit_words(kinds: list[str], world: int, tp: int) -> list[tuple[Trace, int, str]]:
    """The run, how many of the ends' tensors were sharded, and what was warned of the vocabulary."""
    found = []
    for kind in kinds:
        seen = Ends()
        with warnings.catch_warnings(record=True) as caught:
            trace = fit("Words", {"kind": kind}, world=world, strategy={"tp": tp}, steps=3, callbacks=[seen])
        told = [str(one.message) for one in caught if "vocabulary" in str(one.message)]
        found.append((trace, seen.count, " ".join(told)))
    return found


class Ends(models.L.Callback):
    """Counts the sharded tensors outside the blocks, and has warnings shown while the model is set up."""

    count = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        warnings.simplefilter("always")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        record = record_of(pl_module)
        if record is not None:
            self.count = sum(one.is_sharded and "blocks" not in name for name, one in record.layout.items())


@functools.cache
def trained(world: int, tp: int) -> dict[str, tuple[Trace, int, str]]:
    kinds = [*SHARDED, *WHOLE] if world == 2 else ["plain", "two", "few", "bias_twice", "tied_late"]
    return dict(zip(kinds, run_distributed(fit_words, world, kinds, world, tp, timeout=400.0)[0], strict=True))


@functools.cache
def reference(kind: str) -> Trace:
    return fit("Words", {"kind": kind}, steps=3)


@pytest.mark.parametrize("kind", [*SHARDED, *WHOLE])
def test_every_end_is_that_of_one_process(kind):
    got, count, _ = trained(2, 2)[kind]
    compare(reference(kind), got).raise_if_failed()
    assert count == SHARDED.get(kind, count)


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_not_right_on_shards_stays_whole_with_a_reason(kind):
    _, count, told = trained(2, 2)[kind]
    if WHOLE[kind] is not None:
        assert count == 0
        assert "the vocabulary stays whole on every rank" in told
        assert WHOLE[kind] in told
    else:
        assert count == 1  # the head alone
        assert told == ""


@pytest.mark.parametrize("kind", ["plain", "two", "few", "bias_twice", "tied_late"])
@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("tp", [2, 4])
def test_on_four_ranks(kind, world, tp):
    """Of three tokens over four ranks the last rank holds padding alone."""
    got, count, _ = trained(world, tp)[kind]
    compare(reference(kind), got).raise_if_failed()
    assert count == SHARDED[kind]
