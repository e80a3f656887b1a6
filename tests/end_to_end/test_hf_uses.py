"""How Hugging Face models are used: every way equal to one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import zoo
from tests.helpers.families import FAMILIES, HuggingFace
from tests.helpers.fit import fit, fit_or_tell, quiet_trainer
from tests.helpers.models import loader
from tests.mutants import sees

LENGTH = 9  # odd
SETTINGS: dict[str, dict[str, Any]] = {
    "eager": {"attention": "eager"},
    "attentions": {"attention": "eager"},
    "cache": {"use_cache": True},
    "router": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
}


class Used(HuggingFace):
    """A model of a family, used in one of the ways that its library offers."""

    def __init__(self, family: str, use: str) -> None:
        super().__init__(family, **SETTINGS.get(use, {}))
        self.use = use
        # Gemma's own eager mask adds the least number to itself where a window holds padding alone: nan in float64.
        self.padded = family != "gemma3" or use not in ("eager", "attentions")
        if use.startswith("recompute"):
            kwargs = {"use_reentrant": use == "recompute_reentrant"}
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        mask = (ids != 0).long() if self.padded else torch.ones_like(ids)
        labels = ids
        if self.use == "left_padded":
            mask = torch.ones_like(ids)
            mask[::2, :3] = 0
            labels = ids.masked_fill(mask == 0, -100)
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if self.use == "embeds":
            given["inputs_embeds"] = self.model.get_input_embeddings()(given.pop("input_ids"))
        if self.use == "positions":
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        if self.use == "hidden":
            out = self.model(**given, output_hidden_states=True)
            states = getattr(out, "hidden_states", None) or (*out.encoder_hidden_states, *out.decoder_hidden_states)
            weights = torch.linspace(0, 1, LENGTH, dtype=torch.float64).view(1, -1, 1)
            return out.loss + sum((state.to(weights) * weights).square().mean() for state in states)
        if self.use == "attentions":
            out = self.model(**given, output_attentions=True)
            maps = getattr(out, "attentions", None) or out.encoder_attentions
            heads = torch.linspace(0, 1, maps[0].shape[1], dtype=torch.float64).view(1, -1, 1, 1)
            return out.loss + sum((probabilities * heads).square().mean() for probabilities in maps)
        return self.model(**given).loss


zoo.Used = Used


EVERY = ("eager", "left_padded", "embeds", "recompute", "recompute_reentrant", "cache", "hidden", "attentions")
EXPERTS = ("mixtral", "qwen3_moe")
SLICE = [("auto", family, use) for family, uses in (
    ("llama", [use for use in EVERY if use not in ("eager", "recompute_reentrant")]), ("mixtral", ("hidden", "router")),
    ("bert", ("hidden",)), ("t5", ("attentions",)), ("gpt2", ("hidden", "recompute_reentrant")),
) for use in uses]  # fmt: skip
SLICE += [
    ("infer", "llama", "hidden"),
    ("infer", "llama", "recompute_reentrant"),
    ("infer", "t5", "embeds"),
    ("infer", "phi3", "attentions"),
]
MATRIX = [
    (plan, family, use)
    for plan in ("auto", "infer")
    for family in FAMILIES
    for use in (*EVERY, *(("router",) if family in EXPERTS else ()))
    if (plan, family, use) not in SLICE
]


def fit_uses(cases: list[tuple[str, str, str]]) -> list[Trace | str]:
    found: list[Trace | str] = []
    for plan, family, use in cases:
        strategy = {"tp": 2, "plan": family if (family, plan) == ("gemma3", "auto") else plan}
        args = {"family": family, "use": use}
        found.append(fit_or_tell("Used", args, world=2, strategy=strategy, steps=2, length=LENGTH))
    return found


@functools.cache
def used(cases: tuple[tuple[str, str, str], ...]) -> list[Trace | str]:
    """One start of the ranks for all."""
    return run_distributed(fit_uses, 2, list(cases), timeout=290.0)[0]


def grouped(cases: list[tuple[str, str, str]], size: int, *marks: Any) -> list[Any]:
    starts = [tuple(cases[at : at + size]) for at in range(0, len(cases), size)]
    return [pytest.param(start, case, id="-".join(case), marks=marks) for start in starts for case in start]


@sees(
    "segments of a column share one count of units",
    "_FeatureSupport.units",
    "counts += [self._units(column, start, stop) for start, stop, _ in segments]",
    "counts += [self._units(column, 0, None)] * len(segments)",
    case="infer-phi3-attentions",
)
@sees(
    "hidden states given away in parts",
    "_Swap._hook_modules_around",
    "            yield module.register_forward_hook(return_whole(regions))\n",
    "            yield from ()\n",
    case="auto-llama-hidden",
)
@sees(
    "attention maps of some heads taken for all",
    "Observers.heads_made",
    "            self.sharded_outputs.note(out, module, 1, heads)\n",
    "            pass\n",
    case="auto-llama-attentions",
)
@sees(
    "router scores of a shard taken for all",
    "end_on_shards.hook",
    "                region.observers.shard_made(item, name)\n",
    "                pass\n",
    case="auto-mixtral-router",
)
@pytest.mark.parametrize(("start", "case"), grouped(SLICE, 100) + grouped(MATRIX, 20, pytest.mark.matrix))
@pytest.mark.more
def test_every_use_is_that_of_one_process(start, case):
    got = used(start)[start.index(case)]
    assert isinstance(got, Trace), got
    _, family, use = case
    compare(fit("Used", {"family": family, "use": use}, steps=2, length=LENGTH), got).raise_if_failed()


class Generating(HuggingFace):
    """Predicts by the library's ``generate``."""

    def __init__(self, family: str, sampling: bool = False) -> None:
        super().__init__(family, use_cache=True)
        self.sampling, self.beams = sampling, 1 if sampling else 2

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        mask = torch.ones_like(ids)
        return self.model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=self.sampling, num_beams=self.beams)


def generate(families: list[str], world: int = 1, plan: str = "auto") -> list[list[list[int]]]:
    """The tokens of this rank's replica, by search over two beams and by sampling."""
    found = []
    for family in families:
        for sampling in (False, True):
            torch.manual_seed(1)
            strategy = SeqParallelStrategy(tp=2, plan=plan) if world > 1 else "auto"
            batches = quiet_trainer(devices=world, strategy=strategy).predict(
                Generating(family, sampling), loader(4, length=5, count=4)
            )
            found.append(batches[0].tolist())
    return found


@pytest.mark.parametrize("plan", ["auto", pytest.param("infer", marks=pytest.mark.matrix)])
@pytest.mark.more
def test_generate_gives_the_tokens_of_one_process(plan):
    families = ["llama", "gpt2", "t5", "mixtral"]
    whole = generate(families)
    assert len({str(tokens) for tokens in whole}) == 2 * len(families)
    for got in run_distributed(generate, 2, families, 2, plan, timeout=200.0):
        assert got == whole


class Rounded(nn.Linear):
    """As quantised linears are: a subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().max() / 127
        steps = self.weight / scale
        return F.linear(x, (steps + (steps.round() - steps).detach()) * scale, self.bias)


class Quantised(HuggingFace):
    def __init__(self) -> None:
        super().__init__("llama", "user")
        for name, module in self.model.named_modules():
            if name.endswith("down_proj"):
                module.__class__ = Rounded


zoo.Quantised = Quantised


def fit_quantised(plan: Any) -> Trace | str:
    return fit_or_tell("Quantised", {}, world=2, strategy={"tp": 2, "plan": plan}, steps=2, length=LENGTH)


def test_linears_of_unknown_kind_are_refused_never_left_whole_in_silence():
    rule = {"pattern": "model.model.layers.*.mlp", "style": "whole"}
    for plan in ("auto", "llama"):
        told = run_distributed(fit_quantised, 2, plan)[0]
        assert "mlp.down_proj" in told
        assert "Rounded" in told
        assert plan == "llama" or told.endswith(f"\n    plan={{'rules': [{rule}]}}")
    got = run_distributed(fit_quantised, 2, {"rules": [rule]})[0]
    assert isinstance(got, Trace), got
    compare(fit("Quantised", {}, steps=2, length=LENGTH), got).raise_if_failed()
