"""Writes the shipped plans of Hugging Face families anew: their rules stay, modules and digests come from the library.

    python tests/write_families.py            after an update of transformers; the tests tell when it is needed

A plan holds for the classes whose source it was proved on; for any other the plan is inferred. Digests of earlier releases stay in
the files: what was proved on them still holds. The file of a new family begins as ``source:`` and its ``rules:``.
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

BERT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 31,
    "max_position_embeddings": 64,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, list[Any]]] = {
    "llama": ("LlamaModel", [transformers.LlamaConfig(**TINY)]),
    "mistral": ("MistralModel", [transformers.MistralConfig(**TINY)]),
    "qwen2": ("Qwen2Model", [transformers.Qwen2Config(**TINY)]),
    "qwen3": ("Qwen3Model", [transformers.Qwen3Config(**TINY)]),
    "gemma3": (
        "Gemma3TextModel",
        [transformers.Gemma3TextConfig(**TINY, sliding_window=4, layer_types=["sliding_attention", "full_attention"])],
    ),
    "mixtral": ("MixtralModel", [transformers.MixtralConfig(**TINY, num_local_experts=4)]),
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
    ),
    "phi3": ("Phi3Model", [transformers.Phi3Config(**{k: v for k, v in TINY.items() if k != "head_dim"})]),
    "gpt2": ("GPT2Model", [transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=31, n_positions=64)]),
    "gpt_neox": ("GPTNeoXModel", [transformers.GPTNeoXConfig(**BERT)]),
    "bert": ("BertModel", [transformers.BertConfig(**BERT)]),
    "roberta": ("RobertaModel", [transformers.RobertaConfig(**BERT)]),
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
    ),
}


def roots(name: str) -> list[nn.Module]:
    """Every module of the family's class in its tiny models."""
    kind, configs = FAMILIES[name]
    found = []
    for config in configs:
        model = transformers.AutoModel.from_config(config)
        found += [module for module in model.modules() if type(module).__name__ == kind]
    return found


def text(name: str) -> str:
    """The family's file; its rules are kept, and so are digests of other releases."""
    kind = FAMILIES[name][0]
    written = (FOLDER / f"{name}.yaml").read_text()
    earlier: dict[str, list[str]] = yaml.safe_load(written)["source"] or {}
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
    ]
    return "\n".join(lines).replace("'", '"') + written[written.index("\nrules:\n") :]


if __name__ == "__main__":
    for family in FAMILIES:
        (FOLDER / f"{family}.yaml").write_text(text(family))
        print(family)
