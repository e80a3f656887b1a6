"""Small versions of Hugging Face configurations: narrow heads, few blocks, a short vocabulary; the same code paths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

HEAD_DIM = 8
"""Features of a head in a shrunken model."""

_VOCABULARY = 256
_BLOCKS = 2

_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "hidden_dim")
_WIDTHS = (
    "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "hidden_dim", "moe_intermediate_size",
    "shared_expert_intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "word_embed_proj_dim", "embedding_size",
    "q_lora_rank", "kv_lora_rank", "intermediate_size_mlp", "dense_intermediate_size",
)  # fmt: skip
"""Fields that are scaled as the width is."""

_OF_HEADS = (
    "head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim", "global_head_dim",
)  # fmt: skip
"""Fields that are features of one head, or a part of them."""

_DEPTHS = (
    "num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "n_layers",
    "num_encoder_layers",
)  # fmt: skip


def shrink(config: Any, *, width: bool = True) -> list[str]:
    """Makes a configuration of Hugging Face's small, in place; lists what was changed, as ``hidden_size 4096 → 256``.

    Heads get 8 features, and other widths (if ``width``) shrink alike; the vocabulary keeps its remainder of 64, and as many blocks
    stay as show every kind. Numbers of heads and experts stay: how they meet the ranks is what a trial is about.
    """
    changes: list[str] = []
    for one in _with_parts(config):
        if width:
            _shrink_width(one, changes)
        _shrink_depth(one, changes)
    return list(dict.fromkeys(changes))


def _with_parts(config: Any) -> Iterator[Any]:
    """A configuration and those that stand in it, such as ``text_config``."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield from _with_parts(part)


def _own(config: Any, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Fields of these names that a configuration itself has as positive numbers."""
    for name in names:
        value = vars(config).get(name)
        if type(value) is int and value > 0:
            yield name, value


def _set(config: Any, name: str, value: Any, changes: list[str]) -> None:
    before = getattr(config, name)
    if before != value:
        setattr(config, name, value)
        if not isinstance(value, list | dict):
            changes.append(f"{name} {before} → {value}")


def _shrink_width(config: Any, changes: list[str]) -> None:
    heads = next((value for _, value in _own(config, _HEADS)), None)
    width_name, width = next(_own(config, _WIDTH), ("", 0))
    if heads is not None and width:
        per_head = next((value for name, value in _own(config, ("head_dim", "d_kv"))), width // heads)
        nope = vars(config).get("qk_nope_head_dim")
        per_head = nope if isinstance(nope, int) and nope > 0 else per_head
        # A model as small as that already would grow.
        scale = min(1.0, HEAD_DIM / max(1, per_head))
        for name, value in _own(config, _OF_HEADS):
            _set(config, name, max(2, 2 * round(value * scale / 2)), changes)
        unit = heads if width % heads == 0 else 1
        _set(config, width_name, max(unit, unit * round(width * scale / unit)), changes)
        for name, value in _own(config, _WIDTHS):
            if name != width_name:
                step = math.gcd(value, 16)
                _set(config, name, max(step, step * round(value * scale / step)), changes)
        _shrink_sections(config, scale)


def _shrink_depth(config: Any, changes: list[str]) -> None:
    for name, value in _own(config, ("vocab_size",)):
        _set(config, name, min(value, _VOCABULARY + value % 64), changes)
        for special, token in list(vars(config).items()):
            if special.endswith("token_id") and isinstance(token, int) and token >= config.vocab_size:
                setattr(config, special, config.vocab_size - 1)
    kinds = [value for name, value in vars(config).items() if name.endswith("layer_types") and isinstance(value, list)]
    showing_all = [max(one.index(kind) for kind in set(one)) + 1 for one in kinds if one]
    for name, value in _own(config, _DEPTHS):
        blocks = min(value, max([_BLOCKS, *showing_all]))
        lists = [key for key, one in vars(config).items() if isinstance(one, list) and len(one) == value]
        _set(config, name, blocks, changes)
        for key in lists:
            setattr(config, key, getattr(config, key)[:blocks])


def _shrink_sections(config: Any, scale: float) -> None:
    """Scale the sections of a rotary embedding, which must add up to half a head."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = vars(config).get(name)
        if isinstance(rope, dict) and isinstance(rope.get("mrope_section"), list):
            half = HEAD_DIM // 2
            sections = [max(1, round(one * scale)) for one in rope["mrope_section"]]
            sections[-1] += half - sum(sections)
            setattr(config, name, {**rope, "mrope_section": sections})
