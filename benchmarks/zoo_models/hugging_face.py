"""Transformers: models of which some have a shipped plan and most have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo_models.recipe import Recipe, named, recipe, tokens

# ---- transformers ----

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _hf(model: str, config: str, options: dict[str, Any], sample: Callable[[], dict[str, Tensor]]) -> Recipe:
    import transformers

    net = getattr(transformers, model)(getattr(transformers, config)(**options))
    net.train()
    return Recipe(net, sample, named)


def _ids(length: int = 12) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"input_ids": torch.randint(2, 64, (length,))}


def _pixels(size: int = 32) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(3, size, size)}


def _both() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(2, 64, (12,)), "decoder_input_ids": torch.randint(2, 64, (8,))}


_GPT_SIZES = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
_VIT_SIZES = {**_SMALL, "image_size": 32, "patch_size": 8}
_HF: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, _ids()),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        _ids(),
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 32,
            "dropout": 0.0,
        },
        _ids(),
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
        _ids(),
    ),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**_GPT_SIZES, "rotary_dim": 4}, _ids()),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT_SIZES, "rotary_dim": 4}, _ids()),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
        },
        _ids(),
    ),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {**_SMALL, "num_key_value_heads": 4}, _ids()),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**_SMALL, "num_key_value_heads": 2}, _ids()),
    "olmo2": (
        "Olmo2ForCausalLM",
        "Olmo2Config",
        {**_SMALL, "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 1},
        _ids(),
    ),
    "cohere": (
        "CohereForCausalLM",
        "CohereConfig",
        {**_SMALL, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
        _ids(),
    ),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**_SMALL, "num_key_value_heads": 2}, _ids()),
    "deberta_v2": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {
            **_SMALL,
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
        _ids(),
    ),
    "xlnet": (
        "XLNetLMHeadModel",
        "XLNetConfig",
        {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "dropout": 0.0},
        _ids(),
    ),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_SMALL, "embedding_size": 16}, _ids()),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**_SMALL, "embedding_size": 16}, _ids()),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": 64,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "max_position_embeddings": 32,
        },
        _ids(),
    ),
    "mobilebert": (
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        {**_SMALL, "embedding_size": 32, "intra_bottleneck_size": 32, "use_bottleneck": False, "num_feedforward_networks": 1},
        _ids(),
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ, _both),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", _SEQ2SEQ, _both),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "decoder_start_token_id": 1,
        },
        lambda: {"input_features": torch.randn(8, 20), "decoder_input_ids": torch.randint(2, 64, (8,))},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", _VIT_SIZES, _pixels()),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _VIT_SIZES, _pixels()),
    "beit": ("BeitForImageClassification", "BeitConfig", {**_VIT_SIZES, "drop_path_rate": 0.0}, _pixels()),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {**_VIT_SIZES, "mlp_ratio": 2}, _pixels()),
    "timesformer": (
        "TimesformerForVideoClassification",
        "TimesformerConfig",
        {**_VIT_SIZES, "num_frames": 2},
        lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
    ),
    "videomae": (
        "VideoMAEForVideoClassification",
        "VideoMAEConfig",
        {**_VIT_SIZES, "num_frames": 4},
        lambda: {"pixel_values": torch.randn(4, 3, 32, 32)},
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.0,
        },
        _pixels(),
    ),
    "swinv2": (
        "Swinv2ForImageClassification",
        "Swinv2Config",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.0,
        },
        _pixels(),
    ),
    "segformer": (
        "SegformerForImageClassification",
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [2, 2],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "num_attention_heads": [2, 4],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "drop_path_rate": 0.0,
            "hidden_dropout_prob": 0.0,
        },
        _pixels(64),
    ),
    "pvt": (
        "PvtForImageClassification",
        "PvtConfig",
        {
            "image_size": 32,
            "num_encoder_blocks": 2,
            "depths": [2, 2],
            "sequence_reduction_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [4, 2],
            "strides": [4, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
            "drop_path_rate": 0.0,
        },
        _pixels(32),
    ),
    "sam_vision": (
        "SamVisionModel",
        "SamVisionConfig",
        {**_VIT_SIZES, "output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 64, "num_pos_feats": 8},
        _pixels(32),
    ),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", _VIT_SIZES, _pixels()),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", _VIT_SIZES, _pixels()),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **_SMALL,
            "conv_dim": [16, 16],
            "conv_stride": [5, 2],
            "conv_kernel": [10, 3],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "feat_proj_dropout": 0.0,
            "final_dropout": 0.0,
            "layerdrop": 0.0,
            "mask_time_prob": 0.0,
        },
        lambda: {"input_values": torch.randn(200)},
    ),
    "hubert": (
        "HubertForCTC",
        "HubertConfig",
        {
            **_SMALL,
            "conv_dim": [16, 16],
            "conv_stride": [5, 2],
            "conv_kernel": [10, 3],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "feat_proj_dropout": 0.0,
            "final_dropout": 0.0,
            "layerdrop": 0.0,
            "mask_time_prob": 0.0,
        },
        lambda: {"input_values": torch.randn(200)},
    ),
    "trocr": (
        "TrOCRForCausalLM",
        "TrOCRConfig",
        {
            "vocab_size": 64,
            "d_model": 32,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 32,
            "cross_attention_hidden_size": 32,
            "dropout": 0.0,
        },
        lambda: {"input_ids": torch.randint(2, 64, (12,)), "encoder_hidden_states": torch.randn(6, 32)},
    ),
    "perceiver": (
        "PerceiverForMaskedLM",
        "PerceiverConfig",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_latents": 32,
            "num_latents": 8,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
            "qk_channels": 32,
            "v_channels": 32,
            "max_position_embeddings": 12,
            "attention_probs_dropout_prob": 0.0,
        },
        _ids(),
    ),
    "fnet": ("FNetForMaskedLM", "FNetConfig", {**{k: v for k, v in _SMALL.items() if "attention" not in k}}, _ids()),
    "roformer": ("RoFormerForMaskedLM", "RoFormerConfig", {**_SMALL, "embedding_size": 32}, _ids()),
    "longformer": (
        "LongformerForMaskedLM",
        "LongformerConfig",
        {**_SMALL, "attention_window": [4, 4], "pad_token_id": 1},
        _ids(),
    ),
    "nystromformer": (
        "NystromformerForMaskedLM",
        "NystromformerConfig",
        {**_SMALL, "num_landmarks": 4, "segment_means_seq_len": 12, "conv_kernel_size": 3},
        _ids(),
    ),
    "esm": (
        "EsmForMaskedLM",
        "EsmConfig",
        {**_SMALL, "position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 3},
        _ids(),
    ),
    "patchtst": (
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
        },
        lambda: {"past_values": torch.randn(16, 2)},
    ),
    "time_series_transformer": (
        "TimeSeriesTransformerModel",
        "TimeSeriesTransformerConfig",
        {
            "prediction_length": 4,
            "context_length": 8,
            "lags_sequence": [1, 2],
            "num_time_features": 1,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
        },
        lambda: {
            "past_values": torch.randn(10),
            "past_time_features": torch.randn(10, 1),
            "past_observed_mask": torch.ones(10),
            "future_values": torch.randn(4),
            "future_time_features": torch.randn(4, 1),
        },
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        _ids(),
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **_SMALL,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "experts_implementation": "eager",
        },
        _ids(),
    ),
}
for _name, _args in _HF.items():
    recipe("transformers", _name)(lambda args=_args: _hf(*args))


@recipe("transformers", "detr")
def _() -> Recipe:
    from transformers import DetrConfig, DetrModel, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"], num_channels=3
    )
    net = DetrModel(
        DetrConfig(
            use_timm_backbone=False,
            backbone_config=backbone,
            num_queries=6,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            dropout=0.0,
        )
    )
    return Recipe(net, _pixels(32), lambda net, batch: net(**batch).last_hidden_state)


@recipe("transformers", "llava")
def _() -> Recipe:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(**_VIT_SIZES)
    text = LlamaConfig(**{**_SMALL, "num_key_value_heads": 2})
    net = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=63, image_seq_length=16)
    )

    def sample() -> dict[str, Tensor]:
        words = torch.randint(2, 60, (24,))
        words[2:18] = 63
        return {"input_ids": words, "pixel_values": torch.randn(3, 32, 32)}

    return Recipe(net, sample, lambda net, batch: net(**batch).logits)


@recipe("sentence-transformers", "SentenceTransformer (BERT)")
def _() -> Recipe:
    from sentence_transformers.models import Pooling
    from transformers import BertConfig, BertModel

    class Sentences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(BertConfig(**_SMALL))
            self.pooling = Pooling(32)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones_like(x)
            hidden = self.bert(input_ids=x, attention_mask=mask).last_hidden_state
            return self.pooling({"token_embeddings": hidden, "attention_mask": mask})["sentence_embedding"]

    return Recipe(Sentences(), tokens())
