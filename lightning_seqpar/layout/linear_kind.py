"""Which modules are linears, whatever their class is, and how they keep their weight; and low-rank adapters around them."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from lightning_seqpar.layout.module_names import in_all_layers

LinearKind = Literal["out_in", "in_out"]
"""How a linear keeps its weight: ``[out, in]`` as ``nn.Linear``, or ``[in, out]`` as Conv1D."""


def linear_kind(module: nn.Module | None) -> LinearKind | None:
    """How ``module`` keeps its weight if it computes ``x Wᵀ + b`` and nothing else; None for any other module.

    A module of another class than torch's own ``nn.Linear`` with a matrix ``weight`` (Conv1D, a subclass) is run on random numbers
    and compared with ``F.linear``. One that casts its weight to its input's type is none, nor a subclass whose forward reads what
    may change while training (:func:`settings_of`), as a parallel layer would not.
    """
    if module is None:
        return None
    if type(module).__module__.startswith("torch.nn.modules.linear"):
        known = isinstance(module, nn.Linear) and set(dict(module.named_parameters())) <= {"weight", "bias"}
        return "out_in" if known else None
    own = dict(module.named_parameters())
    weight, bias = own.get("weight"), own.get("bias")
    plain = set(own) <= {"weight", "bias"} and not any(True for _ in module.children())
    if not plain or any(True for _ in module.buffers()) or getattr(module, "parametrizations", None) is not None:
        return None
    if weight is None or weight.ndim != 2 or not weight.is_floating_point() or (bias is not None and bias.ndim != 1):
        return None
    if isinstance(module, nn.Embedding) or type(module).__module__.startswith("lightning_seqpar."):
        return None
    if settings_of(module) is None:
        return None
    if type(weight) not in (nn.Parameter, Tensor, FakeTensor):
        return None  # a tensor that computes in its own way, such as a quantised one
    if weight.is_meta or isinstance(weight, FakeTensor):  # it has no values, so a copy with random ones is tried
        with unset_fake_temporarily():
            numbers = {name: torch.randn(parameter.shape) for name, parameter in own.items()}
            module = copy.deepcopy(module, {id(own[name]): nn.Parameter(number) for name, number in numbers.items()})
            return _try(module, numbers["weight"], numbers.get("bias"))
    return _try(module, weight, bias)


def is_parametrized(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a linear computes its weight of other parameters before each product (``parametrize``, weight or spectral norm)."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "weight" not in module._parameters
        and any(True for _ in module.parameters())
    )


@dataclass(frozen=True)
class LinearSettings:
    """Settings that the forward of a subclass of ``nn.Linear`` reads, none of which changes what it computes as they are."""

    of: type
    values: Mapping[str, object]  # by name, of the module or of its class

    def check(self, module: nn.Module, name: str) -> None:
        """Raises RuntimeError, naming the setting, unless all are as they were: a parallel layer computes the product alone."""
        for key, value in self.values.items():
            now = vars(module).get(key, getattr(self.of, key, None))
            if now is not value and now != value:
                raise RuntimeError(
                    f"{name}.{key}: it was {value!r} when the model was sharded and is {now!r} now. The linear's own forward reads "
                    "it, and a parallel linear computes the product alone: set it before the training starts, or have the part "
                    f"that holds the linear computed whole, {{pattern: {in_all_layers(name.rpartition('.')[0])}, style: whole}}"
                )


def settings_of(module: nn.Module) -> LinearSettings | None:
    """Finds the settings (flags, words) that the forward of a subclass of ``nn.Linear`` reads.

    None if it reads anything else that may change what it computes: a number, a type, whether it trains, a closure, a global name.
    """
    forward = type(module).forward
    if forward is nn.Linear.forward or not isinstance(module, nn.Linear):
        return LinearSettings(type(module), {})
    code, space = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    if code is None or set(code.co_freevars) - {"__class__"}:
        return None
    own = {name for kind in type(module).__mro__[: type(module).__mro__.index(nn.Linear)] for name in vars(kind)}
    held = {*vars(module), *own, "training", "__dict__"} - {"in_features", "out_features", "forward"}
    fixed = types.ModuleType | types.FunctionType | types.BuiltinFunctionType | type
    found: dict[str, object] = {}
    for name in code.co_names:
        if name in held:
            found[name] = vars(module).get(name, inspect.getattr_static(type(module), name, ...))
            if name == "training" or not isinstance(found[name], bool | str | None):
                return None
        elif name in space and not isinstance(space[name], fixed):
            return None
    return LinearSettings(type(module), found)


def _try(module: nn.Module, weight: Tensor, bias: Tensor | None) -> LinearKind | None:
    """Runs a module on random numbers ``[2, 3, in]`` and compares it with ``F.linear`` for either form of its weight."""
    generator = torch.Generator().manual_seed(5)
    kinds: tuple[tuple[LinearKind, Tensor], ...] = (("in_out", weight.t()), ("out_in", weight))
    # Modes of the caller's do not reach it: one that turns casts down would hide that a linear takes one type alone.
    with _disable_current_modes():
        for kind, matrix in kinds:
            if bias is not None and bias.shape[0] != matrix.shape[0]:
                continue
            x = torch.randn(2, 3, matrix.shape[1], generator=generator).to(weight)
            wanted = F.linear(x, matrix, bias).detach()
            if all(_makes(_output(module, x, training), wanted) for training in (True, False)):
                other = torch.float32 if x.dtype == torch.float64 else torch.float64
                return None if _output(module, x.to(other), module.training) is not None else kind
    return None


def _makes(got: Tensor | None, wanted: Tensor) -> bool:
    """Whether a module made what it was to make."""
    if got is None or (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return False
    return torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)


def _output(module: nn.Module, x: Tensor, training: bool) -> Tensor | None:
    """What a module makes of ``x``, without its hooks and with no random stream moved on; None if it does not take it."""
    before, module.training = module.training, training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            got = module.forward(x)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None  # it does not take such an input, so it is no linear of this kind
    finally:
        module.training = before
    return got if isinstance(got, Tensor) else None


def is_depthwise(module: nn.Module) -> TypeGuard[nn.modules.conv._ConvNd]:
    """Whether a module is a convolution in which every channel stands for itself, so that channels can be dealt out."""
    return (
        isinstance(module, nn.modules.conv._ConvNd)
        and not module.transposed
        and module.groups == module.in_channels == module.out_channels
    )


def features(module: nn.Module, kind: LinearKind) -> tuple[int, int]:
    """Numbers of out- and in-features of a linear."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return (weight.shape[0], weight.shape[1]) if kind == "out_in" else (weight.shape[1], weight.shape[0])


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
