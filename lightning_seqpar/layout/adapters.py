"""Low-rank adapters around linears, as PEFT makes them (arXiv 2106.09685): what they are, and the model without them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

BASE = "base_layer"
DOWN = "lora_A"
UP = "lora_B"


def is_adapted(module: nn.Module) -> bool:
    """Whether ``module`` adds ``B(A(x))`` to a linear and does nothing else: LoRA without variants."""
    children = dict(module.named_children())
    if not {BASE, DOWN, UP} <= children.keys():
        return False
    halves = [children.pop(name) for name in (DOWN, UP)]
    del children[BASE]
    filled = all(isinstance(half, nn.ModuleDict) and len(half) for half in halves)
    return filled and not any(True for other in children.values() for _ in other.parameters())


def known_limits(root: nn.Module) -> list[str]:
    """What is known not to fit shards among the adapters that PEFT configured in ``root``: a sentence for each."""
    found: dict[str, None] = {}
    for module in root.modules():
        configs = getattr(module, "peft_config", None)
        for config in configs.values() if isinstance(configs, dict) else ():
            if getattr(getattr(config, "peft_type", None), "name", "") == "PREFIX_TUNING":
                found["prefix tuning gives every block keys and values of all heads; use LoRA or prompt tuning"] = None
            if getattr(config, "target_parameters", None):
                found[
                    "LoRA on target_parameters (experts) replaces parameters that are dealt out; use target_modules, or leave "
                    "the module that holds them whole: {pattern: ..., style: whole}"
                ] = None
            if getattr(config, "alora_invocation_tokens", None):
                found["activated LoRA picks tokens by their place in the whole sequence; set sp=False"] = None
    return list(found)


def plain_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``root.named_modules()`` as if there were no adapters: each stands for the linear in it."""
    hidden: tuple[str, ...] = ()
    for name, module in root.named_modules():
        if name.startswith(hidden):
            continue
        if is_adapted(module):
            hidden = (*hidden, f"{name}." if name else "")
            module = module.get_submodule(BASE)
        yield name, module


def without_adapters(root: nn.Module) -> nn.Module:
    """``root`` with each adapter replaced by the linear in it, in place: for a copy that is only looked at.

    What is frozen under an adapter has gradients without it.
    """
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            if is_adapted(child):
                base = child.get_submodule(BASE)
                module._modules[name] = base.requires_grad_(True)
    return root
