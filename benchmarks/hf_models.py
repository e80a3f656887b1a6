"""Models of transformers at real size, as its users train them, and torch's plan for the one that torch's styles can cut."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

LLAMA_HALF = {
    "hidden_size": 1536,
    "intermediate_size": 7168,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
LLAMA_ONE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2 124 M": ("GPT2LMHeadModel", {}),
    "llama 0.55 B, 50k words": ("LlamaForCausalLM", {**LLAMA_HALF, "num_hidden_layers": 10, "vocab_size": 50_257}),
    "llama 0.55 B, 128k words": ("LlamaForCausalLM", {**LLAMA_HALF, "num_hidden_layers": 4, "vocab_size": 128_256}),
    "llama 1.1 B, 50k words": ("LlamaForCausalLM", {**LLAMA_ONE, "num_hidden_layers": 14, "vocab_size": 50_257}),
    "llama 1.1 B, 128k words": ("LlamaForCausalLM", {**LLAMA_ONE, "num_hidden_layers": 9, "vocab_size": 128_256}),
    "Llama-3-8B": (
        "LlamaForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "tie_word_embeddings": False,
        },
    ),
    "Llama-3-70B": (
        "LlamaForCausalLM",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "tie_word_embeddings": False,
        },
    ),
}
"""Of each model: its class in transformers, and the fields of its configuration that are not the default."""


def build(name: str, **others: Any) -> nn.Module:
    """A causal language model of transformers, on the default device.

    Args:
        name: a key of :data:`MODELS`.
        others: fields of its configuration that are to be others.
    """
    import transformers

    kind, fields = MODELS[name]
    architecture = getattr(transformers, kind)
    made: nn.Module = architecture(architecture.config_class(**{**fields, **others}))
    return made


class CausalModule(L.LightningModule):
    """Trains such a model on the loss that it computes itself."""

    def __init__(self, name: str, **others: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = build(name, **others)
        self.vocab = int(self.model.config.vocab_size)  # type: ignore[union-attr, arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of the tokens ``[b, s]``, each predicted from those before it."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch[:, :-1])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class DTensorLlama(CausalModule):
    """Llama with a hand-written plan of torch's: what ``ModelParallelStrategy`` asks its users for."""

    sp = True

    def configure_model(self) -> None:
        mesh = self.device_mesh["tensor_parallel"]
        whole, parts = Replicate(), Shard(1)
        inner: dict[str, Any] = {
            **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
        }
        # The model makes positions for the length that it sees here, so the embedding's output must be whole.
        outer: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(input_layouts=whole)}
        if self.sp:
            states = {"hidden_states": parts}, {"hidden_states": whole}
            inner |= {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(input_kwarg_layouts=states[0], desired_input_kwarg_layouts=states[1]),
                "self_attn.o_proj": RowwiseParallel(output_layouts=parts),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(parts,), desired_input_layouts=(whole,)),
                "mlp.down_proj": RowwiseParallel(output_layouts=parts),
            }
            outer |= {
                "model.layers.0": PrepareModuleInput(
                    input_layouts=(whole,), desired_input_layouts=(parts,), use_local_output=True
                ),
                "model.norm": SequenceParallel(),
                "lm_head": ColwiseParallel(input_layouts=parts, output_layouts=Shard(-1), use_local_output=False),
            }
        else:
            inner |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
            outer["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        for layer in self.model.model.layers:  # type: ignore[union-attr]
            parallelize_module(layer, mesh, inner)
        parallelize_module(self.model, mesh, outer)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with loss_parallel():
            return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with loss_parallel():
            super().backward(loss, *args, **kwargs)


class DTensorLlamaNoSP(DTensorLlama):
    sp = False


NO_PLAN = {
    "GPT2LMHeadModel": "no plan: torch's styles cut nn.Linear and nn.Embedding; GPT-2's projections are Conv1D, q, k and v in one"
}
"""Why a model can't be trained by ``ModelParallelStrategy`` with torch's own styles."""
