"""Low-rank adapters around linears, as PEFT makes them (arXiv 2106.09685), recognised by the names of their parts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

BASE = "base_layer"
"""Name of the adapted linear inside an adapter."""
DOWN = "lora_A"
"""Name of the linears ``A``, ``[h → r]``, by adapter name."""
UP = "lora_B"
"""Name of the linears ``B``, ``[r → f]``, by adapter name."""


def is_adapted(module: nn.Module) -> bool:
    """Whether ``module`` adds ``B(A(x))`` to a linear and has no other parameters: LoRA without its variants."""
    children = dict(module.named_children())
    if not {BASE, DOWN, UP} <= children.keys():
        return False
    halves = [children.pop(name) for name in (DOWN, UP)]
    del children[BASE]
    filled = all(isinstance(half, nn.ModuleDict) and len(half) for half in halves)
    return filled and not any(True for other in children.values() for _ in other.parameters())


def is_variant(config: object) -> bool:
    """Whether PEFT's configuration is of adapters in linears that are no plain LoRA (DoRA, LoHa, LoKr, OFT, IA3, ...)."""
    kind = getattr(getattr(config, "peft_type", None), "name", "")
    plain = kind in ("", "LORA") and not getattr(config, "use_dora", False)
    return not plain and bool(getattr(config, "target_modules", None))


def holds_variants(root: nn.Module) -> bool:
    """Whether adapters stand in ``root`` that are no plain LoRA."""
    return any(is_variant(config) for config in _configs(root))


def _configs(root: nn.Module) -> Iterator[object]:
    """PEFT's configurations of the adapters in ``root``."""
    held = [getattr(module, "peft_config", None) for module in root.modules()]
    return (config for configs in held if isinstance(configs, dict) for config in configs.values())


def known_limits(root: nn.Module) -> list[str]:
    """A sentence for each kind of adapter in ``root``, by PEFT's configuration, that is known not to work on shards."""
    limits: dict[str, None] = {}
    for config in _configs(root):
        kind = getattr(getattr(config, "peft_type", None), "name", "")
        if kind == "PREFIX_TUNING":
            limits["prefix tuning gives every block keys and values of all heads; use LoRA or prompt tuning"] = None
        if is_variant(config):
            kind = "DORA" if getattr(config, "use_dora", False) else kind
            limits[
                f"the attention or MLP in which {kind} stands may have to be whole on every rank, and then nothing but the "
                "vocabulary is left to shard; leave the attention's or the MLP's linears out of target_modules, or use LoRA"
            ] = None
        if getattr(config, "target_parameters", None):
            limits[
                "LoRA on target_parameters (experts) replaces parameters that are dealt out; use target_modules, or leave "
                "the module that holds them whole: {pattern: ..., style: whole}"
            ] = None
        if getattr(config, "alora_invocation_tokens", None):
            limits["activated LoRA picks tokens by their place in the whole sequence; set sp=False"] = None
    return list(limits)


def plain_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``root.named_modules()`` as if there were no adapters: an adapter's name comes with the linear inside it."""
    hidden: tuple[str, ...] = ()
    for name, module in root.named_modules():
        if name.startswith(hidden):
            continue
        if is_adapted(module):
            hidden = (*hidden, f"{name}." if name else "")
            module = module.get_submodule(BASE)
        yield name, module


def without_adapters(root: nn.Module) -> nn.Module:
    """Replace each adapter by the linear inside it, in place, which trains again: for a copy from which a plan is inferred."""
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            if is_adapted(child):
                base = child.get_submodule(BASE)
                module._modules[name] = base.requires_grad_(True)
    return root
