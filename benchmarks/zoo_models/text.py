"""Text and proteins: x-transformers, torchtune, litgpt, fair-esm."""

from __future__ import annotations

import types
from typing import Any

import torch

from zoo_models.recipe import Recipe, image, pair, recipe, tokens

# ---- x-transformers ----


def _x_transformer(**options: Any) -> Recipe:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    return Recipe(TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers), tokens())


for _name, _options in {
    "Decoder": {},
    "Decoder, rotary": {"rotary_pos_emb": True},
    "Decoder, alibi": {"alibi_pos_bias": True},
    "Decoder, flash": {"attn_flash": True},
    "Decoder, rmsnorm and swiglu": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
    "Decoder, one kv head": {"attn_one_kv_head": True},
    "Decoder, kv heads 2": {"attn_kv_heads": 2},
    "Decoder, qk norm": {"attn_qk_norm": True},
    "Decoder, T5 bias": {"rel_pos_bias": True},
    "Decoder, sandwich norm": {"sandwich_norm": True},
}.items():
    recipe("x-transformers", _name)(lambda options=_options: _x_transformer(**options))


@recipe("x-transformers", "Encoder")
def _() -> Recipe:
    from x_transformers import Encoder, TransformerWrapper

    net = TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=Encoder(dim=32, depth=2, heads=4))
    return Recipe(net, tokens())


@recipe("x-transformers", "XTransformer")
def _() -> Recipe:
    from x_transformers import XTransformer

    net = XTransformer(
        dim=32,
        enc_num_tokens=64,
        enc_depth=2,
        enc_heads=4,
        enc_max_seq_len=16,
        dec_num_tokens=64,
        dec_depth=2,
        dec_heads=4,
        dec_max_seq_len=16,
    )
    return Recipe(net, pair())


@recipe("x-transformers", "ViTransformerWrapper")
def _() -> Recipe:
    from x_transformers import Encoder, ViTransformerWrapper

    net = ViTransformerWrapper(image_size=32, patch_size=8, num_classes=6, attn_layers=Encoder(dim=32, depth=2, heads=4))
    return Recipe(net, image(32))


# ---- torchtune ----


@recipe("torchtune", "llama3")
def _() -> Recipe:
    from torchtune.models.llama3 import llama3

    net = llama3(vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=16, intermediate_dim=64)
    return Recipe(net, tokens())


@recipe("torchtune", "lora_llama3")
def _() -> Recipe:
    from torchtune.models.llama3 import lora_llama3

    net = lora_llama3(
        lora_attn_modules=["q_proj", "v_proj", "output_proj"],
        apply_lora_to_mlp=True,
        vocab_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=32,
        max_seq_len=16,
        intermediate_dim=64,
        lora_rank=4,
        lora_alpha=8,
        lora_dropout=0.0,
    )
    return Recipe(net, tokens())


@recipe("torchtune", "gemma")
def _() -> Recipe:
    from torchtune.models.gemma import gemma

    net = gemma(
        vocab_size=64, num_layers=2, num_heads=4, head_dim=8, num_kv_heads=1, embed_dim=32, intermediate_dim=64, max_seq_len=16
    )
    return Recipe(net, tokens())


@recipe("torchtune", "phi3")
def _() -> Recipe:
    from torchtune.models.phi3 import phi3

    net = phi3(vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=4, embed_dim=32, intermediate_dim=64, max_seq_len=16)
    return Recipe(net, tokens())


@recipe("torchtune", "qwen2")
def _() -> Recipe:
    from torchtune.models.qwen2 import qwen2

    net = qwen2(vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, intermediate_dim=64, max_seq_len=16)
    return Recipe(net, tokens())


@recipe("torchtune", "clip_vision_encoder")
def _() -> Recipe:
    from torchtune.models.clip import clip_vision_encoder

    net = clip_vision_encoder(
        embed_dim=32, num_layers=2, num_heads=4, tile_size=16, patch_size=8, max_num_tiles=2, in_channels=3
    )
    return Recipe(
        net,
        lambda: {"images": torch.randn(1, 2, 3, 16, 16), "ratio": torch.tensor([[1, 2]])},
        lambda net, batch: net(batch["images"], batch["ratio"])[0],
    )


# ---- litgpt ----


def _litgpt(lora: bool = False, **options: Any) -> Recipe:
    if lora:
        from litgpt.lora import GPT, Config

        options |= {
            "lora_r": 4,
            "lora_alpha": 8,
            "lora_query": True,
            "lora_value": True,
            "lora_projection": True,
            "lora_mlp": True,
        }
    else:
        from litgpt import GPT, Config
    sizes = {"block_size": 16, "padded_vocab_size": 64, "vocab_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 32}
    return Recipe(GPT(Config(**{**sizes, **options})), tokens())


_LLAMA = {
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 64,
}
for _name, _options in {
    "pythia": {},
    "llama": {**_LLAMA, "n_query_groups": 2},
    "falcon": {
        "parallel_residual": True,
        "n_query_groups": 1,
        "shared_attention_norm": True,
        "bias": False,
        "rotary_percentage": 1.0,
    },
    "gemma2": {
        **_LLAMA,
        "mlp_class_name": "GemmaMLP",
        "n_query_groups": 2,
        "scale_embeddings": True,
        "attention_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "post_attention_norm": True,
        "post_mlp_norm": True,
        "head_size": 8,
    },
    "olmo2": {**_LLAMA, "norm_qk": True, "norm_qk_type": "olmo2", "post_attention_norm": True, "post_mlp_norm": True},
    "qwen3": {**_LLAMA, "norm_qk": True, "n_query_groups": 2},
    "mixtral": {**_LLAMA, "mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2},
    "pythia, LoRA": {"lora": True},
    "llama, LoRA": {**_LLAMA, "n_query_groups": 2, "lora": True},
}.items():
    recipe("litgpt", _name)(lambda options=_options: _litgpt(**options))


# ---- fair-esm ----


@recipe("fair-esm", "ESM2")
def _() -> Recipe:
    from esm.model.esm2 import ESM2

    net = ESM2(num_layers=2, embed_dim=32, attention_heads=4)
    return Recipe(net, tokens(12, 30), lambda net, batch: net(batch["x"])["logits"])


@recipe("fair-esm", "ProteinBertModel (ESM-1b)")
def _() -> Recipe:
    from esm import Alphabet
    from esm.model.esm1 import ProteinBertModel

    args = types.SimpleNamespace(
        arch="roberta_large",
        layers=2,
        embed_dim=32,
        ffn_embed_dim=64,
        attention_heads=4,
        max_positions=32,
        emb_layer_norm_before=True,
        token_dropout=False,
        final_bias=True,
    )
    net = ProteinBertModel(args, Alphabet.from_architecture("ESM-1b"))
    return Recipe(net, tokens(12, 30), lambda net, batch: net(batch["x"])["logits"])


@recipe("fair-esm", "MSATransformer")
def _() -> Recipe:
    from esm import Alphabet
    from esm.model.msa_transformer import MSATransformer

    args = types.SimpleNamespace(
        layers=2,
        embed_dim=32,
        ffn_embed_dim=64,
        attention_heads=4,
        max_positions=32,
        embed_positions_msa=True,
        embed_positions_msa_dim=32,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_tokens=4096,
        max_tokens_per_msa=4096,
        logit_bias=True,
        arch="msa_transformer",
    )
    net = MSATransformer(args, Alphabet.from_architecture("msa_transformer"))
    return Recipe(net, lambda: {"x": torch.randint(4, 24, (3, 8))}, lambda net, batch: net(batch["x"])["logits"], batch=2)
