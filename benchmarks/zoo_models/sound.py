"""Speech and sound: torchaudio, speechbrain."""

from __future__ import annotations

from typing import Any

import torch

from zoo_models.recipe import Recipe, floats, recipe

# ---- torchaudio ----


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


# ---- speechbrain ----


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
