"""Everything else: torch itself, time series, tables, and packages of one model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo_models.recipe import Recipe, floats, image, named, recipe, tokens

# ---- torch itself ----


@recipe("torch", "nn.Transformer")
def _() -> Recipe:
    net = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
    return Recipe(net, lambda: {"source": torch.randn(12, 32), "target": torch.randn(8, 32)})


@recipe("torch", "nn.TransformerDecoder")
def _() -> Recipe:
    net = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)
    return Recipe(net, lambda: {"target": torch.randn(12, 32), "memory": torch.randn(8, 32)})


# ---- others ----


@recipe("pytorch-forecasting", "TemporalFusionTransformer")
def _() -> Recipe:
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    rows = [
        {"series": str(s), "t": t, "value": float((s + 1) * t % 7), "known": float(t % 3)} for s in range(2) for t in range(24)
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

    net = ViT(in_channels=1, img_size=(16, 16, 16), patch_size=(8, 8, 8), hidden_size=32, mlp_dim=64, num_layers=2, num_heads=4)
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

    net = SwinUNETR(in_channels=1, out_channels=2, feature_size=12, depths=(2, 2, 2, 2), num_heads=(2, 2, 4, 4), spatial_dims=2)
    return Recipe(net, floats(1, 64, 64))


@recipe("monai", "DecoderOnlyTransformer")
def _() -> Recipe:
    from monai.networks.nets import DecoderOnlyTransformer

    net = DecoderOnlyTransformer(num_tokens=64, max_seq_len=16, attn_layers_dim=32, attn_layers_depth=2, attn_layers_heads=4)
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

    net = LocalTransformer(num_tokens=64, dim=32, depth=2, heads=4, dim_head=8, max_seq_len=16, local_attn_window_size=4)
    return Recipe(net, tokens(16))


@recipe("openai-whisper", "Whisper")
def _() -> Recipe:
    from whisper.model import ModelDimensions, Whisper

    net = Whisper(ModelDimensions(8, 10, 32, 4, 2, 64, 16, 32, 4, 2))
    nn.init.normal_(net.decoder.positional_embedding, std=0.1)  # left as it was allocated
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
    return Recipe(ChronosBoltModelForForecasting(config), lambda: {"context": torch.randn(16), "target": torch.randn(4)}, named)


@recipe("reformer-pytorch", "ReformerLM")
def _() -> Recipe:
    from reformer_pytorch import ReformerLM

    net = ReformerLM(num_tokens=64, dim=32, depth=2, max_seq_len=16, heads=4, bucket_size=4, n_hashes=2, causal=True)
    return Recipe(net, tokens(16))


@recipe("encodec", "EncodecModel")
def _() -> Recipe:
    from encodec.modules.transformer import StreamingTransformerEncoder

    return Recipe(
        StreamingTransformerEncoder(32, num_heads=4, num_layers=2, hidden_scale=2.0, past_context=16, dropout=0.0),
        floats(12, 32),
        lambda net, batch: net(batch["x"])[0],
    )
