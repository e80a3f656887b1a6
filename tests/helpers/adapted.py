"""Hugging Face models with adapters."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import nn

from tests.helpers.families import HuggingFace


class Adapted(HuggingFace):
    """A Hugging Face model under PEFT; only the adapters train."""

    def __init__(self, family: str, targets: list[str], **options: Any) -> None:
        super().__init__(family, "model")
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0, **options)
        self.model = peft.get_peft_model(self.model, config)
        torch.manual_seed(5)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
