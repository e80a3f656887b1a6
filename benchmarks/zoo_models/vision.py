"""Pictures: timm, torchvision, vit-pytorch, open_clip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo_models.recipe import Recipe, floats, image, recipe

# ---- timm ----

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
    "swin_tiny_patch4_window7_224": {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4},
    "swinv2_tiny_window8_256": {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4},
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
    from timm.models import coat, convnext, focalnet, hiera, levit, maxxvit, metaformer, mlp_mixer, mvitv2, nest, pit, volo

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
            img_size=32, num_levels=2, embed_dims=(16, 32), num_heads=(2, 4), depths=(2, 2), drop_path_rate=0.0, num_classes=6
        ),
        "MViTv2": lambda: mvitv2.MultiScaleVit(
            mvitv2.MultiScaleVitCfg(depths=(1, 2), embed_dim=16, num_heads=2, stride_q=((1, 1), (2, 2))),
            img_size=(32, 32),
            num_classes=6,
        ),
        "FocalNet": lambda: focalnet.FocalNet(embed_dim=16, depths=(2, 2), drop_path_rate=0.0, num_classes=6),
        "LeViT": lambda: levit.Levit(img_size=64, embed_dim=(32, 64), key_dim=8, depth=(2, 2), num_heads=(2, 4), num_classes=6),
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
    return Recipe(makers[model](), image(64 if model in ("LeViT", "CoaT", "ConvNeXt", "PoolFormer", "CAFormer") else 32))


for _name in (
    *("MlpMixer", "ResMLP", "gMLP", "PiT", "ConvNeXt", "Hiera", "VOLO", "PoolFormer", "CAFormer", "NesT", "MViTv2"),
    *("FocalNet", "LeViT", "CoaT", "MaxViT"),
):
    recipe("timm", _name)(lambda name=_name: _timm_parts(name))


# ---- torchvision ----


@recipe("torchvision", "vit (VisionTransformer)")
def _() -> Recipe:
    from torchvision.models.vision_transformer import VisionTransformer

    net = VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=6)
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


# ---- vit-pytorch ----

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


# ---- open_clip ----


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
    text = CLIPTextCfg(context_length=12, vocab_size=64, width=32, heads=4, layers=2, embed_cls=True, output_tokens=True)
    decoder = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2}
    net = CoCa(embed_dim=32, multimodal_cfg=decoder, text_cfg=text, vision_cfg=vision)
    nn.init.normal_(net.text_decoder.text_projection, std=0.1)  # left as it was allocated
    return Recipe(
        net,
        lambda: {"image": torch.randn(3, 32, 32), "text": torch.randint(1, 64, (11,))},
        lambda net, batch: {k: v for k, v in net(batch["image"], batch["text"]).items() if k in ("image_features", "logits")},
    )
