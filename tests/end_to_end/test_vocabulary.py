"""Embeddings and heads over a vocabulary, sharded without a word from the user: equal to one process, or whole with a reason."""

from __future__ import annotations

import functools
import io
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lightning_seqpar import SeqParallelStrategy, unshard
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import models, zoo
from tests.helpers.families import HuggingFace
from tests.helpers.fit import fit, metered, quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees


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
        x = gpt.tokens(ids)
        if self.kind == "no_gradient":
            x = models.NoGradient.apply(x)
        x = x + gpt.positions(torch.arange(ids.shape[1]))
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
    "two": 5, "few": 3, "bias_twice": 3, "z_loss": 2, "frozen": 3, "no_gradient": 2,
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


def fit_words(kinds: tuple[str, ...], world: int, strategy: dict[str, Any]) -> list[tuple[Trace, int, str]]:
    """The run, how many of the ends' tensors were sharded, and what was warned of the vocabulary."""
    found = []
    for kind in kinds:
        seen = Ends()
        with warnings.catch_warnings(record=True) as caught:
            # DDP, which averages over cp, makes zeros of a gradient that no rank has, unless it looks for such parameters.
            unused = {"ddp": {"find_unused_parameters": True}} if kind == "no_gradient" and "cp" in strategy else {}
            trace = fit("Words", {"kind": kind}, world=world, strategy=strategy | unused, steps=3, callbacks=[seen])
        told = [str(one.message) for one in caught if "vocabulary" in str(one.message)]
        found.append((trace, seen.count, " ".join(told)))
    return found


class Ends(models.L.Callback):
    """Counts the sharded tensors outside the blocks, and has warnings shown while the model is set up."""

    names: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.names)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        warnings.simplefilter("always")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        record = record_of(pl_module)
        if record is not None:
            blocks = [block for region in record.regions for block in region.blocks]
            self.names = tuple(
                name
                for name, one in record.layout.items()
                if one.is_sharded and not any(name.startswith(f"{block}.") for block in blocks)
            )


CORE, ON_PARTS = ("plain", "soft_cap", "projected", "looked"), ("max_norm", "soft_cap", "last", "z_loss")
EVERY, ON_FOUR = (*SHARDED, *WHOLE), ("plain", "two", "few", "bias_twice", "tied_late")
STARTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "tp2": (2, {"tp": 2}, CORE),
    "tp2-others": (2, {"tp": 2}, tuple(kind for kind in EVERY if kind not in CORE)),
    "dp2-tp2": (4, {"tp": 2}, ON_FOUR),
    "tp4": (4, {"tp": 4}, ON_FOUR),
    "cp2-chunks": (2, {"cp": 2, "loss_chunk": 5}, ON_PARTS),
    "cp2-chunks-others": (2, {"cp": 2, "loss_chunk": 5}, tuple(kind for kind in EVERY if kind not in ON_PARTS)),
    "cp2": (2, {"cp": 2}, EVERY),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}, EVERY),
}
"""World, strategy and kinds of each start of the ranks; of three tokens (``few``) over four ranks the last holds padding alone."""
RARE = ("tp4", "cp2-chunks-others", "cp2", "tp2-cp2")
CASES = [
    pytest.param(start, kind, marks=pytest.mark.matrix if start in RARE else ())
    for start, (*_, kinds) in STARTS.items()
    for kind in kinds
]


@functools.cache
def trained(start: str) -> dict[str, tuple[Trace, int, str]]:
    world, strategy, kinds = STARTS[start]
    return dict(zip(kinds, run_distributed(fit_words, world, kinds, world, strategy, timeout=400.0)[0], strict=True))


@functools.cache
def reference(kind: str) -> Trace:
    return fit("Words", {"kind": kind}, steps=3)


@sees(
    "half of a tied gradient lost",
    "VocabParallelEmbedding.forward",
    "        out = F.embedding(local, _read(self.weight)) * mine",
    "        out = F.embedding(local, self.weight.detach()) * mine",
    case="tp2-soft_cap",
)
@sees(
    "a tied gradient counted twice",
    "VocabParallelEmbedding.forward",
    "return reduce_from_tensor_parallel_region(out, group)",
    "return reduce_from_tensor_parallel_region(copy_to_tensor_parallel_region(out, group), group)",
    case="tp2-plain",
)
@sees(
    "zeros where a sharded embedding has no gradient",
    "_ReadPart.forward",
    "        ctx.set_materialize_grads(False)\n",
    "",
    case="tp2-others-no_gradient",
)
@sees(
    "cp: an embedding's own forward runs twice on parts",
    "VocabParallelHead.forward",
    "x.like(VocabParallelHead.forward(self, x.local))",
    "x.like(self.forward(x.local))",
    case="cp2-chunks-others-warm",
)
@sees(
    "cp: an embedding changes the rows of this rank's ids",
    "operations:look_up",
    'for name in ("max_norm", "scale_grad_by_freq", "sparse")',
    'for name in ("scale_grad_by_freq", "sparse")',
    case="cp2-chunks-max_norm",
)
@pytest.mark.parametrize(("start", "kind"), CASES)
def test_every_end_is_that_of_one_process(start, kind):
    got, count, _ = trained(start)[kind]
    compare(reference(kind), got).raise_if_failed()
    assert count == (SHARDED.get(kind, count) if "tp" in STARTS[start][1] else 0)


@sees(
    "an embedding that looks its rows up by itself is sharded",
    "unfit_forward",
    "if forward is not None and not",
    "if forward is not None and False and not",
    case="tp2-looked",
)
@pytest.mark.parametrize(
    ("start", "kind"), [(start, kind) for start in ("tp2", "tp2-others") for kind in STARTS[start][2] if kind in WHOLE]
)
def test_what_is_not_right_on_shards_stays_whole_with_a_reason(start, kind):
    _, count, told = trained(start)[kind]
    if WHOLE[kind] is not None:
        assert count == 0
        assert "the vocabulary stays whole on every rank" in told
        assert WHOLE[kind] in told
    else:
        assert count == 1  # the head alone
        assert told == ""


# ---- libraries -------------------------------------------------------------------------------------------------


class Bart(HuggingFace):
    """Scaled embeddings, one for both stacks and the head, and a bias of the logits in a buffer."""

    def __init__(self) -> None:
        super().__init__("llama")
        config = transformers.BartConfig(
            vocab_size=31, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0, scale_embedding=True, pad_token_id=0, use_cache=False,
        )  # fmt: skip
        self.model = transformers.BartForConditionalGeneration(config)
        models.perturb(self)
        self.model.train()


class Cast(HuggingFace):
    """With the library's own loss, which casts logits to float32."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        del self.model._loss_function  # the helper's


zoo.Bart, zoo.Cast = Bart, Cast
ADAPTED: dict[str, dict[str, Any]] = {
    "saved": {"targets": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "on the ends": {"targets": ["q_proj", "embed_tokens", "lm_head"]},
    "dora": {"targets": ["lm_head"], "use_dora": True},
    "tokens": {"targets": ["q_proj"], "trainable_token_indices": [3, 5]},
}
LIBRARIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", {}),
    **{f"peft {name}": ("Adapted", {"family": "llama", **args}) for name, args in ADAPTED.items()},
}


def fit_libraries(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[Trace, list[str]]]:
    found = []
    for model, args in cases:
        seen = Ends()
        trace = fit(model, args, world=2, strategy={"tp": 2}, steps=2, length=9, callbacks=[seen])
        found.append((trace, seen.names))
    return found


@functools.cache
def libraries() -> dict[str, tuple[Trace, list[str]]]:
    cases = [*LIBRARIES.values(), ("Cast", {"family": "llama"})]
    return dict(zip([*LIBRARIES, "cast"], run_distributed(fit_libraries, 2, cases, timeout=400.0)[0], strict=True))


SHARDED_ENDS = {"bart": 1, "peft saved": 4, "peft on the ends": 3, "peft dora": 0, "peft tokens": 0}


@pytest.mark.parametrize("case", LIBRARIES)
@pytest.mark.more
def test_libraries_models_are_those_of_one_process(case):
    got, ends = libraries()[case]
    model, args = LIBRARIES[case]
    compare(fit(model, args, steps=2, length=9), got).raise_if_failed()
    assert len(ends) == SHARDED_ENDS[case], ends


@pytest.mark.more
def test_a_loss_in_float32_differs_by_its_rounding_alone():
    """Losses to 1e-6 of themselves, gradients to 1e-6 of the global norm, in a model that is float64 else."""
    got, ends = libraries()["cast"]
    assert ends
    wanted = fit("Cast", {"family": "llama"}, steps=2, length=9)
    report = compare(wanted, got, limit=1e-6)
    assert all(row.ok for row in report.rows[:3]), report
    for one, other in zip(wanted.losses, got.losses, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


# ---- what is refused ---------------------------------------------------------------------------------------------


class PenaltyLater(models.GPT):
    """Reads the embedding's weight from its third step on, in a way that leaves the loss as it was."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx < 2:
            return loss
        size = self.model.tokens.weight.square().sum()
        return loss + 0.1 * (size - size.detach())


class SoftLater(models.GPT):
    """Embeds what it predicts from its second step on, with the embedding's weight itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if not batch_idx else loss + (torch.ones(1, 31) @ self.model.tokens.weight).mean()


def fit_later(model: type[models.GPT], says: str) -> tuple[int, str, list[str]]:
    """The step in which the run ends, what it says, and what stands behind that."""
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), max_steps=4)
    with pytest.raises(RuntimeError, match=says) as caught:
        trainer.fit(model(), models.loader(4))
    notes = getattr(caught.value, "__notes__", ["vocab=False"])  # Python 3.10 has no notes
    return trainer.global_step, str(caught.value), list(notes)


@sees(
    "a loss may read a vocabulary's weight later",
    "VocabRule.layout",
    "shard=plan.shards[name])",
    "shard=plan.shards[name], free=True)",
)
def test_a_loss_that_begins_to_read_the_weight_is_refused():
    """Or, where sizes do not fit then, is told what may be behind that."""
    for step, told, _ in run_distributed(fit_later, 2, PenaltyLater, "it is sharded, and"):
        assert step == 2
        assert told.startswith("model.tokens.weight: it is sharded, and ")
        assert "in the loss reads it past its layer" in told
    for _, _, notes in run_distributed(fit_later, 2, SoftLater, "cannot be multiplied"):
        assert any("vocab=False" in one for one in notes)


class KeepsLogits(models.GPT):
    """Returns its logits, which rank 0 alone looks at."""

    seen = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (ids,) = batch
        logits = self.model(ids[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.seen += float(outputs["logits"].logsumexp(-1).mean())


def look(tp: int) -> float:
    strategy, module = SeqParallelStrategy(tp=tp) if tp > 1 else "auto", KeepsLogits()
    quiet_trainer(devices=tp, strategy=strategy, max_epochs=1).fit(module, models.loader(4, count=8))
    unshard(module)
    assert tuple(module.model.head.weight.shape) == (31, 16)
    assert type(module.model.head) is nn.Linear
    return module.seen


def test_what_a_training_step_returns_is_whole():
    seen = look(1)
    assert seen
    assert run_distributed(look, 2, 2) == [pytest.approx(seen, rel=1e-9), 0.0]


# ---- heads in chunks, where nothing is sharded over tp -----------------------------------------------------------

ALONE: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "cp2": (2, {"cp": 2}),
    "fsdp2": (2, {"data_parallel": "fsdp"}),
    "dp2": (2, {}),
    "cp2-all": (2, {"cp": 2, "cp_method": "ring", "recompute": "full", "tile_mlp": 16, "data_parallel": "fsdp"}),
}


@pytest.mark.parametrize(
    ("model", "topology"),
    [
        pytest.param(model, topology, marks=[] if topology in shown else pytest.mark.matrix)
        for model, shown in (("tied", ("cp2-all",)), ("llama", ("tp1", "cp2")))
        for topology in ALONE
    ],
)
def test_without_tp_heads_compute_in_chunks_too(model, topology):
    name, args = {"tied": ("GPT", {"tied": True}), "llama": ("HuggingFace", {"family": "llama", "loss": "model"})}[model]
    world, strategy = ALONE[topology]
    got = run_distributed(fit, world, name, args, steps=3, world=world, strategy={**strategy, "loss_chunk": 5})
    compare(fit(name, args, steps=3), got[0]).raise_if_failed()


def kept_with(strategy: dict[str, Any]) -> list[int]:
    """Bytes kept for the backward, with logits at once and in chunks."""
    return [
        metered(models.GPT(), SeqParallelStrategy(**strategy, loss_chunk=chunk), models.loader(4, length=10, count=80))[
            0
        ].saved_bytes
        for chunk in (None, 5)
    ]


@sees("loss_chunk without tp is ignored", "change_unsharded", "if loss_chunk is not None:", "if False:", case="cp2")
@pytest.mark.parametrize(("world", "strategy"), [(2, {"cp": 2}), rest(4, {"tp": 2, "cp": 2})], ids=["cp2", "tp2-cp2"])
def test_logits_in_chunks_are_not_kept_with_cp(world, strategy):
    at_once, in_chunks = run_distributed(kept_with, world, strategy)[0]
    tokens = 4 * 5  # b · s/cp
    logits = tokens * -(-31 // strategy.get("tp", 1)) * 4  # in float32
    # Of each token: its largest logit, the sum of exponentials, how much it counts, and if, and its word.
    numbers = tokens * (3 * 4 + 1 + 8)
    assert at_once - in_chunks >= logits - numbers


def save_while_training() -> str:
    class Save(models.L.Callback):
        told = ""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            with pytest.raises(RuntimeError) as error:
                torch.save(pl_module, io.BytesIO())
            self.told = str(error.value)

    module, save = models.GPT(), Save()
    strategy = SeqParallelStrategy(loss_chunk=5)
    quiet_trainer(devices=1, strategy=strategy, max_steps=1, callbacks=[save]).fit(module, models.loader(2, length=10, count=2))
    torch.save(module, io.BytesIO())  # it is the user's own again
    return save.told


def test_a_head_in_chunks_is_not_pickled():
    assert "whose head computes in chunks (loss_chunk)" in run_distributed(save_while_training, 1)[0]


def fit_headless() -> None:
    trainer = quiet_trainer(devices=1, strategy=SeqParallelStrategy(loss_chunk=5), max_steps=1)
    trainer.fit(models.Encoder(), models.loader(2, length=10, count=2))


def test_without_a_head_there_is_nothing_to_chunk():
    with pytest.raises(RankFailedError, match=r"loss_chunk=5 with tp=1: no head over a vocabulary is found behind the blocks"):
        run_distributed(fit_headless, 1)
