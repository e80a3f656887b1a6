"""Heads that do not divide by tp, told before any rank is started: what inference and the styles would find after minutes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.layout.class_source import class_source
from lightning_seqpar.layout.module_names import in_all_layers
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.user_input import sizes_that_divide

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads")
"""Attributes under which an attention, or its config, has the number of its query heads."""


def refuse_uneven_heads(model: nn.Module, config: ParallelConfig) -> None:
    """Refuse a model of which no attention in repeated blocks has heads that divide by tp, if the plan is found."""
    if config.tp == 1 or config.plan != "auto" or record_of(model) is not None:
        return
    found = [(name, module, *_heads_of(module)) for name, module in _repeated(model)]
    found = [one for one in found if one[3]]
    if not found or not all(heads % config.tp for *_, heads in found):  # one of several towers may be left whole
        return
    name, module, attribute, heads = found[0]
    rule: dict[str, Any] = {"pattern": in_all_layers(name), "style": "whole"}
    if "hidden_states" in inspect.signature(module.forward).parameters:
        rule["args"] = ["hidden_states"]
    raise ValueError(
        f"tp={config.tp}: the {heads} heads of {name} ({attribute}) do not divide by it; {sizes_that_divide('tp', heads)}. "
        f"To have every rank compute this attention whole, and shard the rest: plan={ {'rules': [rule]} }"
    )


def context_method(model: nn.Module, config: ParallelConfig) -> str:
    """How attention between context-parallel ranks is computed, in words: the method that ``auto`` takes for the model's heads."""
    if config.cp_method != "auto":
        return config.cp_method
    found = [_heads_of(module) for _, module in _repeated(model)]
    counts = {heads for name, heads in found if heads and (config.tp == 1 or not name.startswith("config."))}
    if not counts or len({heads % config.cp == 0 for heads in counts}) > 1:
        return "auto, ulysses where its heads divide by cp, else ring"
    heads = ", ".join(map(str, sorted(counts)))
    divide = all(heads % config.cp == 0 for heads in counts)
    return f"{'ulysses' if divide else 'ring'}, as its {heads} heads on a rank {'divide' if divide else 'do not divide'} by cp"


def _repeated(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules within blocks of which several of one class stand in a list, with their names."""
    for name, stack in model.named_modules():
        if (
            isinstance(stack, nn.ModuleList | nn.Sequential)
            and len(stack) > 1
            and len({type(one) for one in stack}) == 1
        ):
            for inner, module in stack.named_modules(prefix=name):
                if module is not stack:
                    yield inner, module


def _heads_of(module: nn.Module) -> tuple[str, int]:
    """The attribute that says how many heads an attention has, and their number; 0 for a module that is none."""
    multiplies = any(weight.ndim == 2 for weight in module.parameters())
    if not isinstance(module, nn.MultiheadAttention) and not (multiplies and _attends(module)):
        return "", 0
    for owner, prefix in ((module, ""), (getattr(module, "config", None), "config.")):
        for name in _HEADS:
            heads = getattr(owner, name, None)
            if isinstance(heads, int) and not isinstance(heads, bool):
                return prefix + name, heads
    return "", 0


def _attends(module: nn.Module) -> bool:
    """Whether the code of a module's class computes attention over heads: others (state spaces) have heads that are whole."""
    try:
        source = class_source(type(module))
    except (OSError, TypeError):
        return False
    return any(word in source for word in ("scaled_dot_product_attention", "softmax", "ALL_ATTENTION_FUNCTIONS"))
