"""Stages of models with several stacks of blocks, and of blocks that hand on more than their activation, as one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seqpar import ParallelConfig
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.describe import describe
from tests.helpers import models
from tests.helpers.families import HuggingFace
from tests.helpers.fit import class_named
from tests.helpers.pipelines import check_cases, trainer_of
from tests.helpers.slices import rest
from tests.helpers.zoo import EinsumAttention, FeedForward, PreNorm
from tests.mutants import sees


class Widening(L.LightningModule):
    """Two stacks of different widths, one behind the other, as vision models have them; the loss reads the end of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.aside = nn.Embedding(31, 16), nn.Linear(24, 31), nn.Linear(16, 31)
        self.narrow = nn.ModuleList(PreNorm(16, EinsumAttention(16, 4), FeedForward(16, 32)) for _ in range(3))
        self.merge, self.norm = nn.Linear(16, 24), nn.LayerNorm(24)
        self.wide = nn.ModuleList(PreNorm(24, EinsumAttention(24, 4), FeedForward(24, 48)) for _ in range(3))
        models.perturb(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        x = self.embed(ids)
        for block in self.narrow:
            x = block(x)
        early, x = self.aside(x), self.norm(self.merge(x))
        for block in self.wide:
            x = block(x)
        both = (F.cross_entropy(one.flatten(0, 1), ids.flatten()) for one in (self.head(x), early))
        return torch.stack([*both]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


HOW = {"steps": 3, "accumulate": 3, "clip": 0.05, "length": 9}
T5: tuple[str, dict[str, Any]] = ("HuggingFace", {"family": "t5", "precise": True})
LONG = ("HuggingFace", {**T5[1], "num_layers": 3, "num_decoder_layers": 4})
BOTH = ("Zoo", {"kind": "encoder_decoder"})
TEACHER = ("Zoo", {"kind": "distilled"})
WIDE: tuple[str, dict[str, Any]] = ("end_to_end.test_stages_of_stacks:Widening", {})
FSDP = {"data_parallel": "fsdp"}


@sees(
    "stacks: the end of an encoder goes to the next stage alone",
    "trace_cut",
    "if chunk != own)",
    "if chunk == own + 1)",
    case="four",
)
@sees(
    "stacks: nobody sends back the gradient of a bias that blocks hand on",
    "Stage._hand_on",
    "self._hand_over(self._behind, message, x, ",
    "self._hand_over(self._behind, message, x if slot == 0 else x.detach(), ",
    case="four",
)
@sees(
    "stacks: what a teacher made under no_grad goes nowhere",
    "_Traced.look",
    "self.has_graph = torch.is_grad_enabled()",
    "self.has_graph = True",
    case="more",
)
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [(*T5, {"pp": 2, "pp_split_rank": 1}), (*BOTH, {"pp": 2}), (*TEACHER, {"pp": 2}), (*WIDE, {"pp": 2}),
             (*LONG, {"pp": 2, "pp_layers": [2, 5], "recompute": "full"}), (*LONG, {"pp": 2, "pp_layers": [5, 2]})]),
        (4, [(*LONG, {"pp": 4, "pp_split_rank": 1}), (*LONG, {"pp": 4, "pp_layers": [2, 3, 1, 1]}), (*WIDE, {"pp": 4}),
             (*T5, {"pp": 2, "tp": 2}), (*T5, {"pp": 2}), (*BOTH, {"pp": 2, **FSDP})]),
        rest(4, [(*T5, {"pp": 2, "cp": 2}), (*BOTH, {"pp": 2, "tp": 2, "sp": False}), (*WIDE, {"pp": 2, "tp": 2}),
                 (*T5, {"pp": 2, **FSDP, "recompute": "selective"}), (*LONG, {"pp": 2, "tp": 2, "recompute": "full"}),
                 (*LONG, {"pp": 4, "pp_split_rank": 2}), (*WIDE, {"pp": 2, "cp": 2}), (*TEACHER, {"pp": 4})]),
    ],
    ids=["two", "four", "more"],
)  # fmt: skip
@pytest.mark.more
def test_stages_of_several_stacks_are_one_process(world, cases):
    check_cases(world, cases, HOW)


class Translator(HuggingFace):
    """T5 that is validated, and that generates."""

    def __init__(self) -> None:
        super().__init__("t5", precise=True, num_layers=3, num_decoder_layers=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", super().training_step(batch, batch_idx))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens: Tensor = self.model.generate(batch[0], max_new_tokens=4, use_cache=False, do_sample=False)
        return tokens


class Whole(L.LightningModule):
    """torch's own ``nn.Transformer``, of which a shipped plan knows the encoder alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.both = nn.Transformer(16, 4, 3, 3, 32, dropout=0.0, batch_first=True)
        models.perturb(self)

    def loss(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1] - 1, dtype=self.head.weight.dtype)
        x = self.both(self.embed(ids.flip(1)), self.embed(ids[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.both(self.embed(batch[0].flip(1)), self.embed(batch[0]))
        return out

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


KINDS = {one.__name__: one for one in (Translator, Whole)}


def go(kind: str, sizes: dict[str, Any] | None) -> tuple[dict[str, float], Any, list[Tensor], int]:
    torch.manual_seed(0)
    module, data = KINDS[kind](), models.loader(4, length=9, count=24)
    trainer = trainer_of(sizes, max_steps=-1, max_epochs=2, val_check_interval=4)
    trainer.fit(module, data, data)
    holds = getattr(trainer.strategy, "holds", lambda parameter: True)
    held = sum(holds(parameter) for name, parameter in module.named_parameters() if "decoder" in name)
    found = {name: float(x) for name, x in trainer.callback_metrics.items()}
    return found, trainer.validate(module, data, verbose=False), trainer.predict(module, data), held


@sees(
    "stacks: a decoder that generates waits for the encoder",
    "Stage._begin_at",
    "waits = self._cut.goes_on(chunk) and name in self._cut.stack_of(self._cut.blocks[chunk][0]).blocks",
    "waits = self._cut.goes_on(chunk)",
    case="t5",
)
@sees(
    "stacks: blocks that no shipped plan knows are on the last stage",
    "leaves_blocks",
    "    return any(\n",
    "    return False and any(\n",
    case="torch",
)
@pytest.mark.parametrize(
    ("kind", "world", "sizes"),
    [
        ("Translator", 4, {"pp": 4}),
        ("Whole", 2, {"pp": 2, "pp_split_rank": 1}),
        rest("Translator", 4, {"pp": 2, "tp": 2}),
        rest("Whole", 4, {"pp": 4}),
    ],
    ids=["t5", "torch", "t5-tp", "torch-four"],
)
@pytest.mark.more
def test_evaluations_and_generated_tokens_are_those_of_one_process(kind, world, sizes):
    metrics, validated, predicted, _ = go(kind, None)
    everywhere = run_distributed(go, world, kind, sizes)
    for found, again, tokens, _ in everywhere:
        assert found.keys() == metrics.keys()
        assert all(abs(found[name] - x) <= 1e-9 for name, x in metrics.items())
        assert all(abs(again[0][name] - x) <= 1e-9 for name, x in validated[0].items())
        for one, other in zip(predicted, tokens, strict=True):
            assert one.shape == other.shape
            assert (one.double() - other.double()).abs().max() <= 1e-9
    if kind == "Whole" and "pp_split_rank" in sizes:
        assert everywhere[0][-1] == 0  # the encoder's stage holds nothing of the decoder


class Dropping(Translator):
    def __init__(self) -> None:
        super().__init__()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        self.kept: list[Tensor] = []
        self.model.encoder.register_forward_hook(lambda module, args, out: self.kept.append(out[0].detach()[0, 0, :4]))

    def on_train_start(self) -> None:
        self.kept.clear()  # what copies drew


def drop(sizes: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(2)
    module = Dropping()
    trainer_of(sizes, max_steps=2).fit(module, models.loader(4, length=9, count=24))
    return module.kept, torch.get_rng_state()


@sees(
    "stacks: what lies between draws from each stage's own stream",
    "Stage._begin_between",
    "            self._streams.begin_between(number)\n",
    "            pass\n",
)
def test_all_decoder_stages_read_the_same_encoding_under_dropout():
    """The second stage ends the encoder and begins the decoder; what lies between is made on each stage that reads it."""
    everywhere = run_distributed(drop, 4, {"pp": 4, "pp_layers": [2, 2, 1, 1]})
    assert len({tuple(state.tolist()) for _, state in everywhere}) == 1
    readers = [kept for kept, _ in everywhere[1:]]
    for at, encoded in enumerate(readers[0]):
        assert not encoded.isnan().any()
        assert all(torch.equal(encoded, kept[at]) for kept in readers)
    assert len({tuple(encoded.tolist()) for encoded in readers[0]}) == len(readers[0]) == 6


@pytest.mark.parametrize(
    ("case", "sizes", "says"),
    [
        (T5, {"pp": 2, "virtual_pp": 2}, r"virtual_pp=2: the model has several stacks of blocks \(model\.encoder and "),
        (("GPT", {}), {"pp": 2, "pp_split_rank": 1}, r"pp_split_rank=1: .* the model has 1 stack of blocks \(model\)"),
        (LONG, {"pp": 2, "pp_split_rank": 1, "pp_layers": [4, 3]},
         r"pp_layers=\[4, 3\] with pp_split_rank=1: the first 1 are 4 blocks, and model\.encoder has 3"),
        (T5, {"pp": 2, "pp_layers": [3, 2]}, r"pp_layers=\[3, 2\]: they are 5 blocks together, and .* have 4 blocks"),
        (("GPT", {}), {"pp": 2, "pp_layers": [2, 2]},
         r"pp_layers=\[2, 2\]: they are 4 blocks together, and model has 2 blocks"),
        (T5, {"pp": 4, "pp_split_rank": 1},
         r"pp_split_rank=1 with pp=4: model\.decoder has 2 blocks for 3 stages, and each stage needs one"),
    ],
    ids=["turns", "one stack", "layers beside split", "layers", "layers of one stack", "too few blocks"],
)  # fmt: skip
@pytest.mark.core
def test_what_does_not_fit_the_stacks_is_refused(case, sizes, says):
    model, args = case
    batch = next(iter(models.loader(2, length=9, count=2)))
    with pytest.raises(ValueError, match=says):
        describe(class_named(model)(**args).double(), ParallelConfig(**sizes), batch=batch)


def test_a_description_shows_the_stages_of_both_stacks():
    batch = next(iter(models.loader(2, length=9, count=2)))
    said = describe(class_named("HuggingFace")("t5").double(), ParallelConfig(pp=2, pp_split_rank=1), batch=batch)
    assert [stage.ends for stage in said.stages] == [
        (("model.encoder.block.0", "model.encoder.block.1"),), (("model.decoder.block.0", "model.decoder.block.1"),),
    ]  # fmt: skip
