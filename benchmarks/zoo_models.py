"""The models of the zoo: what packages ship, made small by the packages' own arguments, with a sample of what they take.

A recipe makes a network and one sample (no batch dim); nothing in the network is changed.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Recipe:
    """A network and how it is called.

    Attributes:
        net: the network.
        sample: makes one sample, without a batch dim, by name.
        call: the network's output for a batch of samples; the default hands them over in order.
        batch: samples of a batch.
        float32: whether it runs in float32 only.
    """

    net: nn.Module
    sample: Callable[[], dict[str, Tensor]]
    call: Callable[[nn.Module, dict[str, Tensor]], Any] = field(default=lambda net, batch: net(*batch.values()))
    batch: int = 2
    float32: bool = False


RECIPES: dict[str, dict[str, Callable[[], Recipe]]] = {}
"""Of each package, by each model's name, what makes it."""


def recipe(package: str, model: str) -> Callable[[Callable[[], Recipe]], Callable[[], Recipe]]:
    """Enter a function that makes a recipe."""

    def enter(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
        RECIPES.setdefault(package, {})[model] = make
        return make

    return enter


# ---- samples -------------------------------------------------------------------------------------------------------


def image(size: int = 32, channels: int = 3) -> Callable[[], dict[str, Tensor]]:
    """A sample of one square picture ``[c, h, w]``."""
    return lambda: {"x": torch.randn(channels, size, size)}


def floats(*shape: int) -> Callable[[], dict[str, Tensor]]:
    """A sample of one tensor of normal numbers."""
    return lambda: {"x": torch.randn(*shape)}


def tokens(length: int = 12, words: int = 64) -> Callable[[], dict[str, Tensor]]:
    """A sample of tokens ``[s]``."""
    return lambda: {"x": torch.randint(2, words, (length,))}


def pair(length: int = 12, other: int = 10, words: int = 64) -> Callable[[], dict[str, Tensor]]:
    """A sample of two sequences of tokens."""
    return lambda: {"source": torch.randint(2, words, (length,)), "target": torch.randint(2, words, (other,))}


def named(net: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Call the network with the batch by name."""
    return net(**batch)


# ---- timm ----------------------------------------------------------------------------------------------------------

_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "vit_small_patch14_reg4_dinov2": {"img_size": 28, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "vit_relpos_small_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "vit_base_patch16_siglip_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "vit_base_patch16_rope_reg1_gap_256": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "samvit_base_patch16": {
        "img_size": 64,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 4,
        "global_attn_indexes": (1,),
        "window_size": 2,
    },
    "deit3_small_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "beit_base_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "eva02_tiny_patch14_224": {"img_size": 28, "embed_dim": 48, "depth": 2, "num_heads": 4},
    "cait_xxs24_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "xcit_nano_12_p16_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "crossvit_tiny_240": {
        "img_size": 48,
        "img_scale": (1.0, 1.0),
        "patch_size": (12, 16),
        "embed_dim": (16, 32),
        "num_heads": (4, 4),
    },
    "convit_tiny": {"img_size": 32, "embed_dim": 32, "depth": 3, "num_heads": 4, "local_up_to_layer": 1},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": 4,
    },
    "swinv2_tiny_window8_256": {
        "img_size": 32,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": 4,
    },
    "pvt_v2_b0": {"embed_dims": (16, 32), "num_heads": (2, 4), "depths": (2, 2), "sr_ratios": (2, 1)},
    "twins_svt_small": {
        "img_size": 32,
        "embed_dims": (16, 32),
        "num_heads": (2, 4),
        "mlp_ratios": (2, 2),
        "depths": (2, 2),
        "sr_ratios": (2, 1),
        "wss": (4, 2),
    },
    "tnt_s_patch16_224": {"img_size": 32, "embed_dim": 32, "inner_dim": 16, "depth": 2, "num_heads_outer": 4},
    "davit_tiny": {"embed_dims": (16, 32), "depths": (1, 1), "num_heads": (2, 4)},
    "naflexvit_base_patch16_gap": {"embed_dim": 32, "depth": 2, "num_heads": 4},
}
_TIMM_IMAGE = {
    "samvit_base_patch16": 64,
    "crossvit_tiny_240": 48,
    "vit_small_patch14_reg4_dinov2": 28,
    "eva02_tiny_patch14_224": 28,
    "davit_tiny": 64,
    "pvt_v2_b0": 64,
}


def _timm(model: str) -> Recipe:
    import timm

    return Recipe(timm.create_model(model, num_classes=6, **_TIMM[model]), image(_TIMM_IMAGE.get(model, 32)))


for _name in _TIMM:
    recipe("timm", _name)(lambda name=_name: _timm(name))


def _timm_parts(model: str) -> Recipe:
    """Models whose makers take no smaller sizes: their classes do, with the parts that the makers choose."""
    from timm.models import (
        coat,
        convnext,
        focalnet,
        hiera,
        levit,
        maxxvit,
        metaformer,
        mlp_mixer,
        mvitv2,
        nest,
        pit,
        volo,
    )

    small: dict[str, Any] = {"img_size": 32, "embed_dim": 32, "num_blocks": 2, "num_classes": 6, "patch_size": 8}
    mlp, meta = mlp_mixer, metaformer
    makers: dict[str, Callable[[], nn.Module]] = {
        "MlpMixer": lambda: mlp.MlpMixer(**small),
        "ResMLP": lambda: mlp.MlpMixer(**small, mlp_ratio=4, block_layer=mlp.ResBlock, norm_layer=mlp.Affine),
        "gMLP": lambda: mlp.MlpMixer(**small, mlp_ratio=6, block_layer=mlp.SpatialGatingBlock, mlp_layer=mlp.GatedMlp),
        "PiT": lambda: pit.PoolingVisionTransformer(
            img_size=32, patch_size=8, stride=4, base_dims=(8, 8), depth=(2, 2), heads=(2, 4), num_classes=6
        ),
        "ConvNeXt": lambda: convnext.ConvNeXt(depths=(1, 1, 2, 2), dims=(8, 16, 16, 32), num_classes=6),
        "Hiera": lambda: hiera.Hiera(
            img_size=(32, 32),
            embed_dim=16,
            num_heads=2,
            stages=(2, 2),
            q_pool=1,
            mask_unit_size=(4, 4),
            mask_unit_attn=(True, False),
            num_classes=6,
        ),
        "VOLO": lambda: volo.VOLO(
            [2, 2],
            img_size=32,
            embed_dims=[16, 32],
            num_heads=[2, 4],
            downsamples=(True, False),
            outlook_attention=(True, False),
            stem_hidden_dim=16,
            num_classes=6,
        ),
        "PoolFormer": lambda: meta.MetaFormer(
            depths=(1, 1, 2, 2),
            dims=(8, 16, 16, 32),
            downsample_norm=None,
            mlp_act=nn.GELU,
            mlp_bias=True,
            norm_layers=meta.GroupNorm1,
            use_mlp_head=False,
            num_classes=6,
        ),
        "CAFormer": lambda: meta.MetaFormer(
            depths=(1, 1, 2, 2),
            dims=(32, 32, 64, 64),
            token_mixers=[meta.SepConv, meta.SepConv, meta.Attention, meta.Attention],
            norm_layers=[meta.LayerNorm2dNoBias] * 2 + [meta.LayerNormNoBias] * 2,
            num_classes=6,
        ),
        "NesT": lambda: nest.Nest(
            img_size=32,
            num_levels=2,
            embed_dims=(16, 32),
            num_heads=(2, 4),
            depths=(2, 2),
            drop_path_rate=0.0,
            num_classes=6,
        ),
        "MViTv2": lambda: mvitv2.MultiScaleVit(
            mvitv2.MultiScaleVitCfg(depths=(1, 2), embed_dim=16, num_heads=2, stride_q=((1, 1), (2, 2))),
            img_size=(32, 32),
            num_classes=6,
        ),
        "FocalNet": lambda: focalnet.FocalNet(embed_dim=16, depths=(2, 2), drop_path_rate=0.0, num_classes=6),
        "LeViT": lambda: levit.Levit(
            img_size=64, embed_dim=(32, 64), key_dim=8, depth=(2, 2), num_heads=(2, 4), num_classes=6
        ),
        "CoaT": lambda: coat.CoaT(
            img_size=64,
            patch_size=4,
            embed_dims=(32, 32, 32, 32),
            serial_depths=(1, 1, 2, 2),
            num_heads=8,
            mlp_ratios=(2, 2, 2, 2),
            num_classes=6,
        ),
        "MaxViT": lambda: maxxvit.MaxxVit(
            maxxvit.MaxxVitCfg(
                embed_dim=(32, 64),
                depths=(1, 2),
                block_type=("M", "M"),
                stem_width=16,
                transformer_cfg=maxxvit.MaxxVitTransformerCfg(dim_head=8, window_size=(4, 4), grid_size=(4, 4)),
            ),
            img_size=32,
            num_classes=6,
        ),
    }
    return Recipe(
        makers[model](), image(64 if model in ("LeViT", "CoaT", "ConvNeXt", "PoolFormer", "CAFormer") else 32)
    )


for _name in (
    *("MlpMixer", "ResMLP", "gMLP", "PiT", "ConvNeXt", "Hiera", "VOLO", "PoolFormer", "CAFormer", "NesT", "MViTv2"),
    *("FocalNet", "LeViT", "CoaT", "MaxViT"),
):
    recipe("timm", _name)(lambda name=_name: _timm_parts(name))


# ---- torchvision ---------------------------------------------------------------------------------------------------


@recipe("torchvision", "vit (VisionTransformer)")
def _() -> Recipe:
    from torchvision.models.vision_transformer import VisionTransformer

    net = VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=6
    )
    return Recipe(net, image(32))


@recipe("torchvision", "swin_v1")
def _() -> Recipe:
    from torchvision.models.swin_transformer import SwinTransformer

    net = SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=6)
    return Recipe(net, image(32))


@recipe("torchvision", "swin_v2")
def _() -> Recipe:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    net = SwinTransformer(
        [4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=6, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2
    )
    return Recipe(net, image(32))


@recipe("torchvision", "maxvit")
def _() -> Recipe:
    from torchvision.models.maxvit import MaxVit

    net = MaxVit(
        input_size=(64, 64),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
        num_classes=6,
    )
    return Recipe(net, image(64))


@recipe("torchvision", "mvit_v2")
def _() -> Recipe:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    def block(heads: int, inside: int, out: int, q: list[int], kv: list[int]) -> Any:
        return MSBlockConfig(
            num_heads=heads,
            input_channels=inside,
            output_channels=out,
            kernel_q=[3, 3, 3],
            kernel_kv=[3, 3, 3],
            stride_q=q,
            stride_kv=kv,
        )

    net = MViT(
        spatial_size=(32, 32),
        temporal_size=4,
        block_setting=[block(2, 16, 16, [1, 1, 1], [1, 2, 2]), block(2, 16, 16, [1, 1, 1], [1, 2, 2])],
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        num_classes=6,
    )
    return Recipe(net, floats(3, 4, 32, 32))


# ---- torchaudio ----------------------------------------------------------------------------------------------------


@recipe("torchaudio", "Conformer")
def _() -> Recipe:
    from torchaudio.models import Conformer

    net = Conformer(input_dim=32, num_heads=4, ffn_dim=64, num_layers=2, depthwise_conv_kernel_size=3)
    return Recipe(
        net,
        lambda: {"x": torch.randn(12, 32), "lengths": torch.tensor(12)},
        lambda net, batch: net(batch["x"], batch["lengths"])[0],
    )


@recipe("torchaudio", "Emformer")
def _() -> Recipe:
    from torchaudio.models import Emformer

    net = Emformer(32, 4, 64, 2, segment_length=4, right_context_length=2)
    return Recipe(
        net,
        lambda: {"x": torch.randn(14, 32), "lengths": torch.tensor(14)},
        lambda net, batch: net(batch["x"], batch["lengths"])[0],
    )


@recipe("torchaudio", "wav2vec2")
def _() -> Recipe:
    from torchaudio.models import wav2vec2_model

    net = wav2vec2_model(
        extractor_mode="layer_norm",
        extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)],
        extractor_conv_bias=True,
        encoder_embed_dim=32,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=8,
        encoder_pos_conv_groups=4,
        encoder_num_layers=2,
        encoder_num_heads=4,
        encoder_attention_dropout=0.0,
        encoder_ff_interm_features=64,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.0,
        encoder_layer_norm_first=True,
        encoder_layer_drop=0.0,
        aux_num_out=6,
    )
    return Recipe(net, floats(160), lambda net, batch: net(batch["x"])[0])


# ---- x-transformers ------------------------------------------------------------------------------------------------


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

    net = ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=6, attn_layers=Encoder(dim=32, depth=2, heads=4)
    )
    return Recipe(net, image(32))


# ---- vit-pytorch ---------------------------------------------------------------------------------------------------

_VIT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ViT": ("vit", "ViT", {"mlp_dim": 64}),
    "SimpleViT": ("simple_vit", "SimpleViT", {"mlp_dim": 64}),
    "DeepViT": ("deepvit", "DeepViT", {"mlp_dim": 64}),
    "CaiT": ("cait", "CaiT", {"mlp_dim": 64, "cls_depth": 2, "dim_head": 8}),
    "ViT for small datasets": ("vit_for_small_dataset", "ViT", {"mlp_dim": 64}),
    "parallel ViT": ("parallel_vit", "ViT", {"mlp_dim": 64}),
    "SimpleViT, qk norm": ("simple_vit_with_qk_norm", "SimpleViT", {"mlp_dim": 64}),
    "SimpleViT, registers": ("simple_vit_with_register_tokens", "SimpleViT", {"mlp_dim": 64}),
    "SimpleViT, value residual": ("simple_vit_with_value_residual", "SimpleViT", {"mlp_dim": 64}),
    "ViT, patch merger": ("vit_with_patch_merger", "ViT", {"mlp_dim": 64}),
    "ViT, learnable memory": ("learnable_memory_vit", "ViT", {"mlp_dim": 64}),
    "rotary ViT": ("rvt", "RvT", {"mlp_dim": 64}),
    "XCiT": ("xcit", "XCiT", {"mlp_dim": 64, "cls_depth": 2}),
    "normalized ViT": ("normalized_vit", "nViT", {"mlp_dim": 64}),
}


def _vit(model: str) -> Recipe:
    import importlib

    module, cls, options = _VIT[model]
    make = getattr(importlib.import_module(f"vit_pytorch.{module}"), cls)
    sizes = {"image_size": 32, "patch_size": 8, "num_classes": 6, "dim": 32, "depth": 2, "heads": 4}
    return Recipe(make(**sizes, **options), image(32))


for _name in _VIT:
    recipe("vit-pytorch", _name)(lambda name=_name: _vit(name))


@recipe("vit-pytorch", "CCT")
def _() -> Recipe:
    from vit_pytorch.cct import CCT

    net = CCT(
        img_size=32,
        embedding_dim=32,
        n_conv_layers=1,
        kernel_size=7,
        stride=2,
        padding=3,
        num_layers=2,
        num_heads=4,
        mlp_ratio=2.0,
        num_classes=6,
        stochastic_depth_rate=0.0,
        attention_dropout=0.0,
    )
    return Recipe(net, image(32))


@recipe("vit-pytorch", "ViViT")
def _() -> Recipe:
    from vit_pytorch.vivit import ViViT

    net = ViViT(
        image_size=32,
        frames=4,
        image_patch_size=8,
        frame_patch_size=2,
        num_classes=6,
        dim=32,
        spatial_depth=2,
        temporal_depth=2,
        heads=4,
        mlp_dim=64,
    )
    return Recipe(net, floats(3, 4, 32, 32))


# ---- diffusers -----------------------------------------------------------------------------------------------------


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


# ---- torchtune -----------------------------------------------------------------------------------------------------


@recipe("torchtune", "llama3")
def _() -> Recipe:
    from torchtune.models.llama3 import llama3

    net = llama3(
        vocab_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=32,
        max_seq_len=16,
        intermediate_dim=64,
    )
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
        vocab_size=64,
        num_layers=2,
        num_heads=4,
        head_dim=8,
        num_kv_heads=1,
        embed_dim=32,
        intermediate_dim=64,
        max_seq_len=16,
    )
    return Recipe(net, tokens())


@recipe("torchtune", "phi3")
def _() -> Recipe:
    from torchtune.models.phi3 import phi3

    net = phi3(
        vocab_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        embed_dim=32,
        intermediate_dim=64,
        max_seq_len=16,
    )
    return Recipe(net, tokens())


@recipe("torchtune", "qwen2")
def _() -> Recipe:
    from torchtune.models.qwen2 import qwen2

    net = qwen2(
        vocab_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=32,
        intermediate_dim=64,
        max_seq_len=16,
    )
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


# ---- litgpt --------------------------------------------------------------------------------------------------------


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


# ---- fair-esm ------------------------------------------------------------------------------------------------------


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
    return Recipe(
        net, lambda: {"x": torch.randint(4, 24, (3, 8))}, lambda net, batch: net(batch["x"])["logits"], batch=2
    )


# ---- speechbrain ---------------------------------------------------------------------------------------------------


def _speechbrain(**options: Any) -> Recipe:
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

    sizes = {
        "input_size": 16,
        "tgt_vocab": 64,
        "d_model": 32,
        "nhead": 4,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "d_ffn": 64,
        "dropout": 0.0,
    }
    net = TransformerASR(**{**sizes, **options})
    return Recipe(
        net,
        lambda: {"source": torch.randn(12, 16), "target": torch.randint(2, 64, (6,))},
        lambda net, batch: net(batch["source"], batch["target"]),
        float32=True,
    )


for _name, _options in {
    "TransformerASR": {"attention_type": "regularMHA"},
    "TransformerASR, normalised before": {"attention_type": "regularMHA", "normalize_before": True},
    "Conformer": {"encoder_module": "conformer", "attention_type": "RelPosMHAXL", "normalize_before": True},
    "Branchformer": {
        "encoder_module": "branchformer",
        "attention_type": "RelPosMHAXL",
        "normalize_before": True,
        "csgu_linear_units": 64,
        "kernel_size": 3,
    },
}.items():
    recipe("speechbrain", _name)(lambda options=_options: _speechbrain(**options))


# ---- open_clip -----------------------------------------------------------------------------------------------------


@recipe("open_clip_torch", "CLIP")
def _() -> Recipe:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=12, vocab_size=64, width=32, heads=4, layers=2)
    net = CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)
    return Recipe(
        net,
        lambda: {"image": torch.randn(3, 32, 32), "text": torch.randint(1, 64, (12,))},
        lambda net, batch: net(batch["image"], batch["text"])[:2],
    )


@recipe("open_clip_torch", "CoCa")
def _() -> Recipe:
    from open_clip.coca_model import CoCa
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(
        layers=2,
        width=32,
        head_width=8,
        patch_size=8,
        image_size=32,
        attentional_pool=True,
        attn_pooler_heads=4,
        output_tokens=True,
    )
    text = CLIPTextCfg(
        context_length=12, vocab_size=64, width=32, heads=4, layers=2, embed_cls=True, output_tokens=True
    )
    decoder = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2}
    net = CoCa(embed_dim=32, multimodal_cfg=decoder, text_cfg=text, vision_cfg=vision)
    nn.init.normal_(net.text_decoder.text_projection, std=0.1)  # left as it was allocated
    return Recipe(
        net,
        lambda: {"image": torch.randn(3, 32, 32), "text": torch.randint(1, 64, (11,))},
        lambda net, batch: {
            k: v for k, v in net(batch["image"], batch["text"]).items() if k in ("image_features", "logits")
        },
    )


# ---- transformers --------------------------------------------------------------------------------------------------

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
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        _ids(),
    ),
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
        {
            **_SMALL,
            "embedding_size": 32,
            "intra_bottleneck_size": 32,
            "use_bottleneck": False,
            "num_feedforward_networks": 1,
        },
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
    "dinov2": (
        "Dinov2ForImageClassification",
        "Dinov2Config",
        {**_VIT_SIZES, "mlp_ratio": 2},
        _pixels(),
    ),
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
        {
            **_VIT_SIZES,
            "output_channels": 16,
            "window_size": 2,
            "global_attn_indexes": [1],
            "mlp_dim": 64,
            "num_pos_feats": 8,
        },
        _pixels(32),
    ),
    "clip": (
        "CLIPVisionModel",
        "CLIPVisionConfig",
        _VIT_SIZES,
        _pixels(),
    ),
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
    "fnet": (
        "FNetForMaskedLM",
        "FNetConfig",
        {**{k: v for k, v in _SMALL.items() if "attention" not in k}},
        _ids(),
    ),
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
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
        num_channels=3,
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


# ---- torch itself --------------------------------------------------------------------------------------------------


@recipe("torch", "nn.Transformer")
def _() -> Recipe:
    net = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
    return Recipe(net, lambda: {"source": torch.randn(12, 32), "target": torch.randn(8, 32)})


@recipe("torch", "nn.TransformerDecoder")
def _() -> Recipe:
    net = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)
    return Recipe(net, lambda: {"target": torch.randn(12, 32), "memory": torch.randn(8, 32)})


# ---- others ---------------------------------------------------------------------------------------------------------


@recipe("pytorch-forecasting", "TemporalFusionTransformer")
def _() -> Recipe:
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    rows = [
        {"series": str(s), "t": t, "value": float((s + 1) * t % 7), "known": float(t % 3)}
        for s in range(2)
        for t in range(24)
    ]
    data = TimeSeriesDataSet(
        pd.DataFrame(rows),
        time_idx="t",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        max_prediction_length=4,
        time_varying_known_reals=["known"],
        time_varying_unknown_reals=["value"],
    )
    net = TemporalFusionTransformer.from_dataset(data, hidden_size=16, attention_head_size=2, dropout=0.0)
    first, _ = next(iter(data.to_dataloader(train=True, batch_size=1, num_workers=0)))
    return Recipe(
        net,
        lambda: (
            {k: v[0] for k, v in first.items() if isinstance(v, Tensor) and k != "target_scale"}
            | {"target_scale": first["target_scale"][0]}
        ),
        lambda net, batch: net(batch)["prediction"],
    )


@recipe("performer-pytorch", "PerformerLM")
def _() -> Recipe:
    from performer_pytorch import PerformerLM

    net = PerformerLM(num_tokens=64, max_seq_len=16, dim=32, depth=2, heads=4, dim_head=8, causal=False, nb_features=16)
    return Recipe(net, tokens(16))


@recipe("linformer", "Linformer")
def _() -> Recipe:
    from linformer import Linformer

    return Recipe(Linformer(dim=32, seq_len=12, depth=2, heads=4, k=6), floats(12, 32))


@recipe("linformer", "LinformerLM")
def _() -> Recipe:
    from linformer import LinformerLM

    return Recipe(LinformerLM(num_tokens=64, dim=32, seq_len=12, depth=2, heads=4, k=6), tokens())


@recipe("perceiver-pytorch", "Perceiver")
def _() -> Recipe:
    from perceiver_pytorch import Perceiver

    net = Perceiver(
        input_channels=3,
        input_axis=2,
        num_freq_bands=2,
        max_freq=4.0,
        depth=2,
        num_latents=8,
        latent_dim=32,
        cross_heads=2,
        latent_heads=4,
        cross_dim_head=8,
        latent_dim_head=8,
        num_classes=6,
        self_per_cross_attn=2,
    )
    return Recipe(net, floats(8, 8, 3))


@recipe("monai", "ViT")
def _() -> Recipe:
    from monai.networks.nets import ViT

    net = ViT(
        in_channels=1,
        img_size=(16, 16, 16),
        patch_size=(8, 8, 8),
        hidden_size=32,
        mlp_dim=64,
        num_layers=2,
        num_heads=4,
    )
    return Recipe(net, floats(1, 16, 16, 16), lambda net, batch: net(batch["x"])[0])


@recipe("monai", "UNETR")
def _() -> Recipe:
    from monai.networks.nets import UNETR

    net = UNETR(
        in_channels=1,
        out_channels=2,
        img_size=(32, 32),
        feature_size=8,
        hidden_size=32,
        mlp_dim=64,
        num_heads=4,
        spatial_dims=2,
    )
    return Recipe(net, floats(1, 32, 32))


@recipe("monai", "SwinUNETR")
def _() -> Recipe:
    from monai.networks.nets import SwinUNETR

    net = SwinUNETR(
        in_channels=1, out_channels=2, feature_size=12, depths=(2, 2, 2, 2), num_heads=(2, 2, 4, 4), spatial_dims=2
    )
    return Recipe(net, floats(1, 64, 64))


@recipe("monai", "DecoderOnlyTransformer")
def _() -> Recipe:
    from monai.networks.nets import DecoderOnlyTransformer

    net = DecoderOnlyTransformer(
        num_tokens=64, max_seq_len=16, attn_layers_dim=32, attn_layers_depth=2, attn_layers_heads=4
    )
    return Recipe(net, tokens())


@recipe("rtdl", "FTTransformer")
def _() -> Recipe:
    from rtdl_revisiting_models import FTTransformer

    options = FTTransformer.get_default_kwargs(2)
    net = FTTransformer(n_cont_features=6, cat_cardinalities=[4, 5], d_out=2, **options)
    return Recipe(net, lambda: {"x": torch.randn(6), "c": torch.randint(0, 4, (2,))})


@recipe("tab-transformer-pytorch", "TabTransformer")
def _() -> Recipe:
    from tab_transformer_pytorch import TabTransformer

    net = TabTransformer(
        categories=(4, 5, 6), num_continuous=4, dim=32, dim_out=2, depth=2, heads=4, dim_head=8, mlp_act=nn.ReLU()
    )
    return Recipe(net, lambda: {"c": torch.randint(0, 4, (3,)), "x": torch.randn(4)})


@recipe("tab-transformer-pytorch", "FTTransformer")
def _() -> Recipe:
    from tab_transformer_pytorch import FTTransformer

    net = FTTransformer(categories=(4, 5, 6), num_continuous=4, dim=32, dim_out=2, depth=2, heads=4, dim_head=8)
    return Recipe(net, lambda: {"c": torch.randint(0, 4, (3,)), "x": torch.randn(4)})


@recipe("conformer", "Conformer")
def _() -> Recipe:
    from conformer import Conformer

    return Recipe(Conformer(dim=32, depth=2, dim_head=8, heads=4, ff_mult=2, conv_kernel_size=3), floats(12, 32))


@recipe("nystrom-attention", "Nystromformer")
def _() -> Recipe:
    from nystrom_attention import Nystromformer

    return Recipe(Nystromformer(dim=32, dim_head=8, heads=4, depth=2, num_landmarks=4), floats(12, 32))


@recipe("local-attention", "LocalTransformer")
def _() -> Recipe:
    from local_attention import LocalTransformer

    net = LocalTransformer(
        num_tokens=64, dim=32, depth=2, heads=4, dim_head=8, max_seq_len=16, local_attn_window_size=4
    )
    return Recipe(net, tokens(16))


@recipe("openai-whisper", "Whisper")
def _() -> Recipe:
    from whisper.model import ModelDimensions, Whisper

    net = Whisper(ModelDimensions(8, 10, 32, 4, 2, 64, 16, 32, 4, 2))
    return Recipe(net, lambda: {"mel": torch.randn(8, 20), "tokens": torch.randint(2, 64, (8,))}, float32=True)


@recipe("labml-nn", "Encoder, alibi")
def _() -> Recipe:
    from labml_nn.transformers import Encoder, TransformerLayer
    from labml_nn.transformers.alibi import AlibiMultiHeadAttention
    from labml_nn.transformers.feed_forward import FeedForward

    layer = TransformerLayer(
        d_model=32,
        self_attn=AlibiMultiHeadAttention(4, 32, dropout_prob=0.0),
        feed_forward=FeedForward(32, 64, dropout=0.0),
        dropout_prob=0.0,
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 32)
            self.encoder = Encoder(layer, 2)
            self.out = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool).tril()[:, :, None]
            return self.out(self.encoder(self.embed(x).transpose(0, 1), mask).transpose(0, 1))

    return Recipe(Model(), tokens())


@recipe("segmentation-models-pytorch", "Segformer (mit_b0)")
def _() -> Recipe:
    import segmentation_models_pytorch as smp

    return Recipe(smp.Segformer("mit_b0", encoder_weights=None, classes=2), image(64))


@recipe("segmentation-models-pytorch", "DPT (vit)")
def _() -> Recipe:
    import segmentation_models_pytorch as smp

    net = smp.DPT(
        "tu-vit_tiny_patch16_224",
        encoder_weights=None,
        classes=2,
        encoder_depth=4,
        decoder_fusion_channels=16,
        dynamic_img_size=True,
    )
    return Recipe(net, image(32))


@recipe("chronos-forecasting", "Chronos-2")
def _() -> Recipe:
    from chronos.chronos2.config import Chronos2CoreConfig
    from chronos.chronos2.model import Chronos2Model

    config = Chronos2CoreConfig(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        vocab_size=2,
        chronos_config={
            "context_length": 16,
            "output_patch_size": 4,
            "input_patch_size": 4,
            "input_patch_stride": 4,
            "quantiles": [0.1, 0.5, 0.9],
            "use_reg_token": True,
            "use_arcsinh": True,
            "max_output_patches": 2,
        },
    )
    return Recipe(Chronos2Model(config), lambda: {"context": torch.randn(16)}, named)


@recipe("chronos-forecasting", "Chronos-Bolt")
def _() -> Recipe:
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    config = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        vocab_size=2,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    config.chronos_config = {
        "context_length": 16,
        "prediction_length": 4,
        "input_patch_size": 4,
        "input_patch_stride": 4,
        "quantiles": [0.1, 0.5, 0.9],
        "use_reg_token": True,
    }
    return Recipe(
        ChronosBoltModelForForecasting(config),
        lambda: {"context": torch.randn(16), "target": torch.randn(4)},
        named,
    )


@recipe("reformer-pytorch", "ReformerLM")
def _() -> Recipe:
    from reformer_pytorch import ReformerLM

    net = ReformerLM(num_tokens=64, dim=32, depth=2, max_seq_len=16, heads=4, bucket_size=4, n_hashes=2, causal=True)
    return Recipe(net, tokens(16))


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


@recipe("encodec", "EncodecModel")
def _() -> Recipe:
    from encodec.modules.transformer import StreamingTransformerEncoder

    return Recipe(
        StreamingTransformerEncoder(32, num_heads=4, num_layers=2, hidden_scale=2.0, past_context=16, dropout=0.0),
        floats(12, 32),
        lambda net, batch: net(batch["x"])[0],
    )
