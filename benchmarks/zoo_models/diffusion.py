"""Denoisers: diffusers."""

from __future__ import annotations

import torch

from zoo_models.recipe import Recipe, named, recipe

# ---- diffusers ----


@recipe("diffusers", "DiTTransformer2DModel")
def _() -> Recipe:
    from diffusers import DiTTransformer2DModel

    net = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    return Recipe(
        net,
        lambda: {
            "hidden_states": torch.randn(4, 8, 8),
            "timestep": torch.randint(0, 10, ()),
            "class_labels": torch.randint(0, 10, ()),
        },
        named,
    )


@recipe("diffusers", "PixArtTransformer2DModel")
def _() -> Recipe:
    from diffusers import PixArtTransformer2DModel

    net = PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=32,
        caption_channels=16,
        use_additional_conditions=False,
    )
    return Recipe(
        net,
        lambda: {
            "hidden_states": torch.randn(4, 8, 8),
            "encoder_hidden_states": torch.randn(5, 16),
            "timestep": torch.randint(0, 10, ()),
        },
        lambda net, batch: net(**batch, added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
    )


@recipe("diffusers", "SD3Transformer2DModel")
def _() -> Recipe:
    from diffusers import SD3Transformer2DModel

    net = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
    )
    return Recipe(
        net,
        lambda: {
            "hidden_states": torch.randn(4, 8, 8),
            "encoder_hidden_states": torch.randn(5, 16),
            "pooled_projections": torch.randn(16),
            "timestep": torch.randint(0, 10, ()),
        },
        named,
    )


@recipe("diffusers", "FluxTransformer2DModel")
def _() -> Recipe:
    from diffusers import FluxTransformer2DModel

    net = FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    return Recipe(
        net,
        lambda: {
            "hidden_states": torch.randn(16, 4),
            "encoder_hidden_states": torch.randn(6, 16),
            "pooled_projections": torch.randn(16),
            "timestep": torch.rand(()),
        },
        lambda net, batch: net(**batch, img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(6, 3)),
    )


@recipe("diffusers", "WanTransformer3DModel")
def _() -> Recipe:
    from diffusers import WanTransformer3DModel

    net = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return Recipe(
        net,
        lambda: {
            "hidden_states": torch.randn(4, 2, 8, 8),
            "timestep": torch.randint(0, 10, ()),
            "encoder_hidden_states": torch.randn(6, 16),
        },
        named,
    )


@recipe("diffusers", "CogVideoXTransformer3DModel")
def _() -> Recipe:
    from diffusers import CogVideoXTransformer3DModel

    net = CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=8,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
    )
    return Recipe(
        net,
        lambda: {
            "hidden_states": torch.randn(1, 4, 8, 8),
            "encoder_hidden_states": torch.randn(8, 8),
            "timestep": torch.randint(0, 10, ()),
        },
        named,
    )


@recipe("diffusers", "Lumina2Transformer2DModel")
def _() -> Recipe:
    from diffusers import Lumina2Transformer2DModel

    net = Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(2, 4, 2),
        axes_lens=(32, 32, 32),
        cap_feat_dim=16,
    )
    return Recipe(
        net,
        lambda: {
            "hidden_states": torch.randn(4, 8, 8),
            "timestep": torch.rand(()),
            "encoder_hidden_states": torch.randn(6, 16),
            "encoder_attention_mask": torch.ones(6, dtype=torch.bool),
        },
        named,
    )


@recipe("diffusers", "UNet2DConditionModel")
def _() -> Recipe:
    from diffusers import UNet2DConditionModel

    net = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    return Recipe(
        net,
        lambda: {
            "sample": torch.randn(4, 8, 8),
            "timestep": torch.randint(0, 10, ()),
            "encoder_hidden_states": torch.randn(5, 16),
        },
        named,
    )
