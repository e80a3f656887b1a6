"""What ``data_parallel: fsdp`` asks of torch's ``fully_shard``, and what a rank then holds and sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from lightning_seqpar.layout.module_names import inside, match_pattern
from lightning_seqpar.user_input import nearest

_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
_MP_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
OPTIONS = ("reshard_after_forward", "mp_policy", "offload_policy", "units", "shard_size")
"""What the field ``fsdp`` may hold: by the names of ``fully_shard``, and what is ours."""


def fully_shard_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of ``fully_shard`` for the field ``fsdp``, but for ``units``, which :func:`units_among` reads.

    ``reshard_after_forward``: true (ZeRO-3) or false (ZeRO-2). ``mp_policy``: ``param_dtype``, ``reduce_dtype``, ``output_dtype``
    (by name) and ``cast_forward_inputs``. ``offload_policy``: true keeps parameters, gradients and moments on the CPU. Another
    option or value is a ValueError.
    """
    for name in given:
        if name not in OPTIONS:
            raise ValueError(
                f"fsdp={{{name!r}: ...}}: there is no such option; did you mean {nearest(name, list(OPTIONS))}? "
                f"({', '.join(OPTIONS)})"
            )
    units = given.get("units")
    if units is not None and (not isinstance(units, list | tuple) or not all(isinstance(each, str) for each in units)):
        raise ValueError(f"fsdp={{'units': {units!r}}}: give a list of patterns, such as ['model.layers.*'], or an empty list")
    out: dict[str, Any] = {}
    if (reshard := given.get("reshard_after_forward")) is not None:
        use = "true (blocks are gathered once more in the backward) or false (they stay gathered)"
        out["reshard_after_forward"] = _flag(f"'reshard_after_forward': {reshard!r}", reshard, use)
    if (policy := given.get("mp_policy")) is not None:
        out["mp_policy"] = policy if isinstance(policy, MixedPrecisionPolicy) else _mixed_precision(policy)
    if (offload := given.get("offload_policy")) is not None:
        if not isinstance(offload, OffloadPolicy):
            on_cpu = _flag(f"'offload_policy': {offload!r}", offload, "true (keep it all on the CPU) or false")
            offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if on_cpu else OffloadPolicy()
        out["offload_policy"] = offload
    return out


def _flag(option: str, value: Any, use: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"fsdp={{{option}}}: use {use}")
    return value


def _mixed_precision(policy: Any) -> MixedPrecisionPolicy:
    """The policy of a mapping; raises ValueError for a wrong key or value."""
    if not isinstance(policy, Mapping):
        raise ValueError(
            f"fsdp={{'mp_policy': {policy!r}}}: give a mapping, such as {{param_dtype: bfloat16, reduce_dtype: float32}}"
        )
    fields: dict[str, Any] = {}
    for name, value in policy.items():
        if name not in _MP_FIELDS:
            raise ValueError(
                f"fsdp={{'mp_policy': {{{name!r}: ...}}}}: there is no such field; did you mean {nearest(name, list(_MP_FIELDS))}?"
            )
        if name == "cast_forward_inputs":
            fields[name] = _flag(f"'mp_policy': {{{name!r}: {value!r}}}", value, "true or false")
        elif value is not None:
            found = value if isinstance(value, torch.dtype) else _TYPES.get(str(value).removeprefix("torch."))
            if found is None:
                raise ValueError(
                    f"fsdp={{'mp_policy': {{{name!r}: {value!r}}}}}: it is no floating-point type; use one of {', '.join(_TYPES)}"
                )
            fields[name] = found
    return MixedPrecisionPolicy(**fields)


def listed_blocks(model: nn.Module) -> Iterator[str]:
    """Names of the modules of every list that holds several of one class with modules in them: the blocks of most models."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            parts = {f"{name}.{key}".lstrip("."): part for key, part in module._modules.items() if part is not None}
            kinds = [type(part) for part in parts.values()]
            for path, part in parts.items():
                if kinds.count(type(part)) > 1 and any(True for _ in part.children()):
                    yield path


def units_among(given: Mapping[str, Any], model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """Names of the modules that are each gathered and reduced on their own."""
    if (patterns := given.get("units")) is None:
        return list(blocks)
    names = [name for name, _ in model.named_modules() if name]
    found: list[str] = []
    for pattern in patterns:
        if not (matched := [name for name in names if match_pattern(pattern, name)]):
            raise ValueError(
                f"fsdp={{'units': [{pattern!r}]}}: no module has that name; did you mean {nearest(pattern, names)}?"
            )
        found += matched
    return found


def units_of(model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """Names of the blocks that are gathered and reduced each on its own, in order; of a list of modules, those.

    One that shares a parameter with anything outside of it is left out: the parameter would belong to two units.
    """
    named = dict(model.named_modules())
    modules = {id(named[name]): name for name in reversed(list(blocks)) if name in named}
    outer = [name for name in modules.values() if not any(other != name and inside(name, other) for other in modules.values())]
    everywhere = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = set()
    while outer:
        name = outer.pop()
        if isinstance(named[name], nn.ModuleList | nn.ModuleDict):  # nobody calls it, so it is gathered before nothing
            outer += [f"{name}.{key}" for key, _ in named[name].named_children()]
            continue
        held = Counter(id(p) for _, p in named[name].named_parameters(remove_duplicate=False))
        if held and all(everywhere[key] == count for key, count in held.items()):
            found.add(name)
    return [name for name in named if name in found]


@dataclass(frozen=True)
class ReplicaSplit:
    """How ``fully_shard`` shares out a model over replicas, in numbers: those of the first rank, which holds most rows."""

    replicas: int = 1  # that share a parameter
    copies: int = 1  # replicas that hold the same rows
    units: Sequence[str] = ()  # modules that are gathered and reduced each on its own; the rest is one more
    options: Mapping[str, Any] = field(default_factory=dict)  # keywords of ``fully_shard``

    @classmethod
    def of(
        cls, model: nn.Module, given: Mapping[str, Any], blocks: Iterable[str], replicas: int, copies: int = 1
    ) -> ReplicaSplit:
        """The split of a model."""
        units = units_of(model, units_among(given, model, [*blocks, *listed_blocks(model)]))
        return cls(replicas, copies, units, fully_shard_options(given))

    def numel(self, parameter: Tensor) -> int:
        """How many numbers of a parameter a rank holds; all of one without dims."""
        if not parameter.numel() or not parameter.ndim:
            return parameter.numel()
        return -(-parameter.shape[0] // self.replicas) * (parameter.numel() // parameter.shape[0])

    def nbytes(self, parameter: Tensor) -> int:
        """Bytes of what a rank holds of a parameter, or of its gradient."""
        return self.numel(parameter) * parameter.element_size()

    def gathered(self, parameters: Mapping[str, Tensor]) -> int:
        """Bytes of whole parameters that a rank holds at once in a step: all outside of the units, and those of two units."""
        if self.replicas == 1:
            return 0
        *units, rest = [sum(p.numel() * self._size(p) for p in unit) for unit in self._groups(parameters)]
        stay = self.options.get("reshard_after_forward") is False
        return rest + (sum(units) if stay else sum(sorted(units)[-2:]))

    def traffic(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, int], dict[str, int]]:
        """Collectives over the replicas in one step, and the bytes that a rank gives to them, by their names."""
        calls, sent = Counter[str](), Counter[str]()
        if self.replicas == 1:
            return calls, sent
        again = self.options.get("reshard_after_forward")
        *units, rest = self._groups(parameters)
        has_gradient = any(p.requires_grad for p in rest)
        for unit, gathers in [(rest, again is True), *((unit, again is not False) for unit in units)]:
            if not unit:
                continue
            # Behind a unit that is frozen, and all before it are, there is no backward.
            has_gradient = has_gradient or any(p.requires_grad for p in unit)
            times = 1 + (gathers and has_gradient)
            calls["all_gather"] += times
            sent["all_gather"] += times * sum(self.numel(p) * self._size(p) for p in unit)
            if trained := [p for p in unit if p.requires_grad]:
                calls["reduce_scatter"] += 1
                rows = sum(self.numel(p) * self._size(p, "reduce_dtype") for p in trained)
                sent["reduce_scatter"] += self.replicas * rows
                if self.copies > 1:
                    calls["all_reduce"] += 1
                    sent["all_reduce"] += rows
        return calls, sent

    def _size(self, parameter: Tensor, field: str = "param_dtype") -> int:
        """Bytes of a number of a parameter as it is gathered, or of its gradient as it is reduced."""
        policy = self.options.get("mp_policy")
        dtype: torch.dtype = getattr(policy, field, None) or getattr(policy, "param_dtype", None) or parameter.dtype
        return dtype.itemsize

    def _groups(self, parameters: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """The parameters of each unit, and of what is in none; without those that are not shared."""
        left = {name: parameter for name, parameter in parameters.items() if parameter.ndim}
        return [[left.pop(name) for name in list(left) if not unit or inside(name, unit)] for unit in [*self.units, ""]]
