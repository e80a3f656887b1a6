"""Writes the shipped plans of Hugging Face families: the rules stand here, modules and digests come from the library.

    python tests/write_families.py            after an update of transformers; the tests tell when it is needed

A plan holds for the classes whose source it was proved on; for any other the plan is inferred. Digests of earlier releases stay in
the files: what was proved on them still holds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import transformers
import yaml
from torch import nn

from lightning_seqpar.plan.sharding_plan import source_digest

FOLDER = Path(__file__).resolve().parent.parent / "lightning_seqpar" / "plan" / "families"
TINY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4,
    "intermediate_size": 48, "vocab_size": 31, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

ATTENTION = """\
- {pattern: "layers.*.self_attn", style: gather, args: [hidden_states]}
- {pattern: "layers.*.self_attn.q_proj", style: column, units: config.num_attention_heads}
- {pattern: "layers.*.self_attn.{k_proj,v_proj}", style: column, units: config.num_key_value_heads}
- {pattern: "layers.*.self_attn.o_proj", style: row, units: config.num_attention_heads}
- {pattern: "layers.*.self_attn", style: set, ratio: {num_key_value_groups: [config.num_attention_heads, config.num_key_value_heads]}}
"""
MLP = """\
- {pattern: "layers.*.mlp", style: gather}
- {pattern: "layers.*.mlp.{gate_proj,up_proj}", style: column}
- {pattern: "layers.*.mlp.down_proj", style: row}
"""
EXPERTS = """\
- {pattern: "layers.*.mlp.experts", style: gather, args: [0, 1, 2]}
- {pattern: "layers.*.mlp.experts.gate_up_proj", style: column, dim: 1, segments: 2}
- {pattern: "layers.*.mlp.experts.down_proj", style: row, dim: 2}
"""
DECODER = '- {pattern: "layers.*", style: blocks, dim: 1}\n'
NORM = "- {pattern: norm, style: exit}\n"
ENCODER = """\
- {pattern: "encoder.layer.*", style: blocks, dim: 1}
- {pattern: "encoder.layer.*.attention.self", style: gather}
- {pattern: "encoder.layer.*.attention.self.{query,key,value}", style: column, units: num_attention_heads}
- {pattern: "encoder.layer.*.attention.output.dense", style: row, units: self.num_attention_heads}
- {pattern: "encoder.layer.*.output.dense", style: row}
- {pattern: "encoder.layer.*.intermediate", style: gather}
- {pattern: "encoder.layer.*.intermediate.dense", style: column}
"""

BERT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 31,
    "max_position_embeddings": 64,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, list[Any], str]] = {
    "llama": ("LlamaModel", [transformers.LlamaConfig(**TINY)], DECODER + ATTENTION + MLP + NORM),
    "mistral": ("MistralModel", [transformers.MistralConfig(**TINY)], DECODER + ATTENTION + MLP + NORM),
    "qwen2": ("Qwen2Model", [transformers.Qwen2Config(**TINY)], DECODER + ATTENTION + MLP + NORM),
    "qwen3": ("Qwen3Model", [transformers.Qwen3Config(**TINY)], DECODER + ATTENTION + MLP + NORM),
    "gemma3": (
        "Gemma3TextModel",
        [transformers.Gemma3TextConfig(**TINY, sliding_window=4, layer_types=["sliding_attention", "full_attention"])],
        DECODER + ATTENTION + MLP + NORM,
    ),
    "mixtral": (
        "MixtralModel",
        [transformers.MixtralConfig(**TINY, num_local_experts=4)],
        DECODER + ATTENTION + EXPERTS + NORM,
    ),
    "qwen3_moe": (
        "Qwen3MoeModel",
        [
            transformers.Qwen3MoeConfig(
                **TINY,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                decoder_sparse_step=1,
                mlp_only_layers=[1],
            )
        ],
        DECODER
        + ATTENTION
        + EXPERTS
        # A layer without experts has the MLP's linears instead, each with its gather.
        + MLP.replace('"layers.*.mlp", style: gather', '"layers.*.mlp.{gate_proj,up_proj}", style: gather')
        + NORM,
    ),
    "phi3": (
        "Phi3Model",
        [transformers.Phi3Config(**{k: v for k, v in TINY.items() if k != "head_dim"})],
        DECODER
        + """\
- {pattern: "layers.*.self_attn", style: gather, args: [hidden_states]}
- {pattern: "layers.*.self_attn.qkv_proj", style: column, segments: [q, k, v], units: [config.num_attention_heads, num_key_value_heads, num_key_value_heads]}
- {pattern: "layers.*.self_attn.o_proj", style: row, units: config.num_attention_heads}
- {pattern: "layers.*.self_attn", style: set, divide: [config.num_attention_heads], ratio: {num_key_value_heads: [num_key_value_heads, 1], num_key_value_groups: [config.num_attention_heads, num_key_value_heads]}}
- {pattern: "layers.*.mlp", style: gather}
- {pattern: "layers.*.mlp.gate_up_proj", style: column, segments: [gate, up]}
- {pattern: "layers.*.mlp.down_proj", style: row}
"""
        + NORM,
    ),
    "gpt2": (
        "GPT2Model",
        [transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=31, n_positions=64)],
        """\
- {pattern: "h.*", style: blocks, dim: 1}
- {pattern: "h.*.{attn,mlp}", style: gather}
- {pattern: "h.*.attn.c_attn", style: column, segments: [q, k, v], units: num_heads}
- {pattern: "h.*.attn.c_proj", style: row, units: num_heads}
- {pattern: "h.*.attn", style: set, divide: [split_size, num_heads]}
- {pattern: "h.*.mlp.c_fc", style: column}
- {pattern: "h.*.mlp.c_proj", style: row}
- {pattern: ln_f, style: exit}
""",
    ),
    "gpt_neox": (
        "GPTNeoXModel",
        [transformers.GPTNeoXConfig(**BERT)],
        """\
- {pattern: "layers.*", style: blocks, dim: 1}
- {pattern: "layers.*.{attention,mlp}", style: gather}
- {pattern: "layers.*.attention.query_key_value", style: column, units: config.num_attention_heads}
- {pattern: "layers.*.attention.dense", style: row, units: config.num_attention_heads}
- {pattern: "layers.*.mlp.dense_h_to_4h", style: column}
- {pattern: "layers.*.mlp.dense_4h_to_h", style: row}
- {pattern: final_layer_norm, style: exit}
""",
    ),
    "bert": (
        "BertModel",
        [transformers.BertConfig(**BERT)],
        ENCODER,
    ),
    "roberta": (
        "RobertaModel",
        [transformers.RobertaConfig(**BERT)],
        ENCODER,
    ),
    "t5": (
        "T5Stack",
        [
            transformers.T5Config(
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                vocab_size=31,
                feed_forward_proj=kind,
                decoder_start_token_id=0,
            )
            for kind in ("relu", "gated-gelu")
        ],
        """\
- {pattern: "block.*", style: blocks, dim: 1}
- {pattern: "block.*.layer.*.{SelfAttention,EncDecAttention,DenseReluDense}", style: gather}
- {pattern: "block.*.layer.*.EncDecAttention", style: copy, args: [key_value_states]}
- {pattern: "block.*.layer.*.{SelfAttention,EncDecAttention}.{q,k,v}", style: column, units: n_heads}
- {pattern: "block.*.layer.*.{SelfAttention,EncDecAttention}.o", style: row, units: n_heads}
- {pattern: "block.*.layer.*.{SelfAttention,EncDecAttention}", style: set, divide: [n_heads]}
- {pattern: "block.*.layer.0.SelfAttention.relative_attention_bias.weight", style: local_heads, dim: 1}
- {pattern: "block.*.layer.*.DenseReluDense.{wi,wi_0,wi_1}", style: column}
- {pattern: "block.*.layer.*.DenseReluDense.wo", style: row}
- {pattern: final_layer_norm, style: exit}
""",
    ),
}


def roots(name: str) -> list[nn.Module]:
    """Every module of the family's class in its tiny models."""
    kind, configs, _ = FAMILIES[name]
    found = []
    for config in configs:
        model = transformers.AutoModel.from_config(config)
        found += [module for module in model.modules() if type(module).__name__ == kind]
    return found


def text(name: str) -> str:
    """The family's file; digests of other releases that stand in it are kept."""
    kind, _, rules = FAMILIES[name]
    file = FOLDER / f"{name}.yaml"
    earlier: dict[str, list[str]] = yaml.safe_load(file.read_text())["source"] if file.exists() else {}
    parts: dict[str, set[str]] = defaultdict(set)
    digests: dict[str, str] = {}
    for root in roots(name):
        for path, module in root.named_modules():
            plain = not any(True for _ in module.parameters())
            ours = type(module).__module__ == type(root).__module__
            if ours:
                digests[type(module).__name__] = source_digest(type(module))
            if path:
                parts[re.sub(r"\.\d+(?=\.|$)", ".*", path)].add("*" if plain and not ours else type(module).__name__)
    package = type(roots(name)[0]).__module__
    lines = [
        f"# {kind} of transformers; proved against one process in tests/end_to_end/test_families.py.",
        f"family: {name}",
        f"class_name: {package}.{kind}",
        "parts:",
        *(f'  "{path}": [{", ".join(map(repr, sorted(kinds)))}]' for path, kinds in parts.items()),
        "source:",
        *(
            f"  {kind}: [{', '.join(map(repr, dict.fromkeys([*earlier.get(kind, []), digest])))}]"
            for kind, digest in sorted(digests.items())
        ),
        "rules:",
    ]
    out = "\n".join(lines).replace("'", '"').replace('["*"]', '["*"]') + "\n" + rules
    assert yaml.safe_load(out)["rules"]
    return out


if __name__ == "__main__":
    for family in FAMILIES:
        (FOLDER / f"{family}.yaml").write_text(text(family))
        print(family)
