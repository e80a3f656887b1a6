"""Tiny models of the Hugging Face families that plans are shipped for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests import write_families
from tests.helpers.models import perturb

FAMILIES = list(write_families.FAMILIES)
TASKS = {"bert": transformers.AutoModelForMaskedLM, "roberta": transformers.AutoModelForMaskedLM,
         "t5": transformers.AutoModelForSeq2SeqLM}  # fmt: skip
EXPERTS = {"experts_implementation": "eager"}  # grouped products know no float64


def build(family: str, attention: str = "sdpa", **settings: Any) -> Any:
    """A tiny model of a family with a head."""
    config = write_families.FAMILIES[family][1][-1].__class__(
        **{**write_families.FAMILIES[family][1][-1].to_dict(), "use_cache": False, **settings}
    )
    more = EXPERTS if family in ("mixtral", "qwen3_moe") else {}
    kind = TASKS.get(family, transformers.AutoModelForCausalLM)
    return kind.from_config(config, attn_implementation=attention, **more)


def save_pretrained(family: str, folder: Path, seed: int = 0, shards: str = "5GB") -> Path:
    """Write a tiny model of a family as its library does, in files of ``shards`` at most; the folder."""
    torch.manual_seed(seed)
    model = build(family)
    perturb(model)
    model.save_pretrained(folder, max_shard_size=shards)
    return folder


def quiet(model: nn.Module) -> None:
    """Without dropout, to be trained."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.train()


def make_llama() -> nn.Module:
    """For ``seqpar plan``, which is given a function's name."""
    return build("llama")


class PreciseNorm(Gemma3RMSNorm):
    """Gemma's norm in the precision of its input: rounded to float32, 1e-16 may become 1e-7."""

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * (1.0 + self.weight)


class PreciseT5Norm(T5LayerNorm):
    """T5's norm likewise."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def precise_loss(logits: Tensor, labels: Tensor, *args: Any, **more: Any) -> Tensor:
    """The library's loss of a causal model without its cast to float32, in which a mean over replicas rounds at 1e-7."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class HuggingFace(L.LightningModule):
    """A model of transformers; the loss is its own, or ``F.cross_entropy`` on its logits.

    With ``precise`` T5's norms are not those of the library, and no shipped plan fits.
    """

    def __init__(self, family: str, loss: str = "model", precise: bool = False, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = build(family, **settings)
        quiet(self.model)
        for module in self.model.modules():
            if type(module).__name__ == "Gemma3RMSNorm":
                module.__class__ = PreciseNorm
            if precise and type(module).__name__ == "T5LayerNorm":
                module.__class__ = PreciseT5Norm
        if family not in TASKS:
            self.model.loss_function = precise_loss
        perturb(self)
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        mask = (ids != 0).long()
        if self.loss == "model":
            return self.model(input_ids=ids, attention_mask=mask, labels=ids).loss
        more = {"decoder_input_ids": ids} if self.model.config.is_encoder_decoder else {}
        logits = self.model(input_ids=ids, attention_mask=mask, **more).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
