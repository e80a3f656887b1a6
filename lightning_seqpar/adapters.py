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
