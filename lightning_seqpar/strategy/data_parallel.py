"""What synchronises the data-parallel replicas by sharding: the options of ``data_parallel: fsdp``, and the call of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from lightning_seqpar.layout.module_names import match_pattern
from lightning_seqpar.parallel.fully_sharded import FullySharded
from lightning_seqpar.user_input import nearest

_TYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
_MP_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
OPTIONS = ("reshard_after_forward", "mp_policy", "offload_policy", "units")
"""What the field ``fsdp`` may hold: by the names of ``fully_shard``, and ``units``."""


def fully_shard_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of ``fully_shard`` for the field ``fsdp``.

    Args:
        given: ``units``: patterns of the modules that are each gathered and reduced on their own, in place of the blocks; an
            empty list gathers everything for the whole of a step. It is checked here and read by :func:`units_among`.
            ``reshard_after_forward``: whether blocks are gathered once more in the backward (ZeRO-3, the default) or stay
            gathered (ZeRO-2). ``mp_policy``: a mapping of ``param_dtype``, ``reduce_dtype``, ``output_dtype`` (names such as
            ``bfloat16``) and ``cast_forward_inputs``. ``offload_policy``: true to keep parameters, gradients and moments on the
            CPU.

    Raises:
        ValueError: for another option or value.
    """
    for name in given:
        if name not in OPTIONS:
            raise ValueError(
                f"fsdp={{{name!r}: ...}}: there is no such option; did you mean {nearest(name, list(OPTIONS))}? "
                f"({', '.join(OPTIONS)})"
            )
    units = given.get("units")
    if units is not None and (not isinstance(units, list | tuple) or not all(isinstance(each, str) for each in units)):
        raise ValueError(
            f"fsdp={{'units': {units!r}}}: give a list of patterns, such as ['model.layers.*'], or an empty list"
        )
    out: dict[str, Any] = {}
    if (reshard := given.get("reshard_after_forward")) is not None:
        if not isinstance(reshard, bool):
            raise ValueError(
                f"fsdp={{'reshard_after_forward': {reshard!r}}}: use true (blocks are gathered once more in the backward) or "
                "false (they stay gathered)"
            )
        out["reshard_after_forward"] = reshard
    if (policy := given.get("mp_policy")) is not None:
        out["mp_policy"] = policy if isinstance(policy, MixedPrecisionPolicy) else _mixed_precision(policy)
    if (offload := given.get("offload_policy")) is not None:
        out["offload_policy"] = offload if isinstance(offload, OffloadPolicy) else _offloading(offload)
    return out


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
            if not isinstance(value, bool):
                raise ValueError(f"fsdp={{'mp_policy': {{{name!r}: {value!r}}}}}: use true or false")
            fields[name] = value
        elif value is not None:
            found = value if isinstance(value, torch.dtype) else _TYPES.get(str(value).removeprefix("torch."))
            if found is None:
                raise ValueError(
                    f"fsdp={{'mp_policy': {{{name!r}: {value!r}}}}}: it is no floating-point type; use one of {', '.join(_TYPES)}"
                )
            fields[name] = found
    return MixedPrecisionPolicy(**fields)


def _offloading(value: Any) -> OffloadPolicy:
    """The policy for true or false; raises ValueError for anything else."""
    if not isinstance(value, bool):
        raise ValueError(f"fsdp={{'offload_policy': {value!r}}}: use true (keep it all on the CPU) or false")
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if value else OffloadPolicy()


def block_lists(model: nn.Module) -> Iterator[str]:
    """Names of the modules of every list that holds several of one class with modules in them: the blocks of most models."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            parts = {f"{name}.{key}".lstrip("."): part for key, part in module._modules.items() if part is not None}
            kinds = [type(part) for part in parts.values()]
            for path, part in parts.items():
                if kinds.count(type(part)) > 1 and any(True for _ in part.children()):
                    yield path


def units_among(given: Mapping[str, Any], model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """Names of the modules that are each gathered and reduced on their own.

    Args:
        given: the field ``fsdp``.
        model: the model.
        blocks: names of its repeated blocks, which are taken if the field has no ``units``.

    Raises:
        ValueError: for a pattern that no module has.
    """
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


class RootCall(nn.Module):
    """Calls the model, so that ``fully_shard`` gathers what is in no block before a step of the user's and sees what it returns.

    Lightning sends a step through the ``forward`` of what wraps the model, and this is such a wrapper.

    Args:
        module: the model.
        split: its rows over the replicas.
    """

    def __init__(self, module: nn.Module, split: FullySharded) -> None:
        super().__init__()
        self.module, self._split = module, split

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's step returns."""
        return self._split.step(*args, **kwargs)
