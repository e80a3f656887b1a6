"""A block as it was before it was sharded, without numbers; and what users change of the live one meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_seqpar.inference.block_kinds import kind_of
from lightning_seqpar.inference.model_copy import left_out_of_copies, point_to_copy
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.region.block_recorder import RecordedCall
from lightning_seqpar.region.block_state import changed_state, is_same_setting, settings_of, state_of
from lightning_seqpar.verify.content_digest import hooks_of
from lightning_seqpar.verify.self_check import rules_by_name


class WholeBlock:
    """A block as it was before it was sharded, on the meta device: its code and settings, and no numbers.

    Args:
        model: the whole model.
        name: of the block.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        memo = left_out_of_copies(model)
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(_on_meta(parameter), parameter.requires_grad)
        memo |= {id(buffer): _on_meta(buffer) for buffer in model.buffers()}
        self.module: nn.Module = copy.deepcopy(model.get_submodule(name), memo)
        point_to_copy(self.module, memo)


class FollowedBlock:
    """What users may change of a live block while it trains, so that the whole one is changed alike.

    Args:
        live: the block, as it was sharded.
        whole: the same block, whole.
    """

    def __init__(self, live: nn.Module, whole: nn.Module) -> None:
        self._live, self._whole = live, whole
        self._known = {name: (module, settings_of(module)) for name, module in live.named_modules()}
        self._state = state_of(live)
        self._hooks = _users_hooks(live)

    def update(self) -> str:
        """Change the whole block as the live one was changed since.

        Returns:
            Why that can't be done; empty if it was.
        """
        now = dict(self._live.named_modules())
        for name, module in self._live.named_modules():
            before, known = self._known.get(name, (None, {}))
            holder, _, key = name.rpartition(".")
            if before is not module:
                if any(True for _ in module.parameters()) or holder not in now:
                    return f"{name} was exchanged since the model was sharded"
                self._whole.get_submodule(holder)._modules[key] = copy.deepcopy(module)
                continue
            whole = self._whole.get_submodule(name)
            whole.training = module.training
            for attribute, value in settings_of(module).items():
                if attribute in vars(whole) and (
                    attribute not in known or not is_same_setting(known[attribute], value)
                ):
                    vars(whole)[attribute] = value
        trains = {name: parameter.requires_grad for name, parameter in self._live.named_parameters()}
        for name, parameter in self._whole.named_parameters():
            parameter.requires_grad_(trains.get(name, parameter.requires_grad))
        return ""

    def differs(self, calls: Sequence[RecordedCall]) -> str:
        """What of the live block the whole one has not, in words; empty if nothing.

        These are hooks, and what others put into an attribute for some calls: what a call itself puts there (a router's scores,
        say) the whole block makes likewise.
        """
        for name, hooks in _users_hooks(self._live).items():
            if hooks != self._hooks.get(name, []):
                return f"{name or 'it'} has other hooks than when the model was sharded"
        state = self._state
        # Sharded modules have more attributes.
        names = [
            f"{name}.{key}".lstrip(".")
            for name, module in self._whole.named_modules()
            for key in (*vars(module), "forward")
        ]
        for call in calls:
            entered, left = call.states
            if changed := changed_state(state, entered, names):
                return f"{changed} is not what it was when the model was sharded"
            state = left
        return ""


def _users_hooks(block: nn.Module) -> dict[str, list[Any]]:
    """The hooks that users registered on a block's modules, by the module's name."""
    return {
        name: [
            hook
            for hooks in hooks_of(module).values()
            for hook in hooks
            if not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("lightning_seqpar.")
        ]
        for name, module in block.named_modules()
    }


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="meta")


def whole_blocks(model: nn.Module, plans: Sequence[ShardingPlan]) -> dict[str, WholeBlock]:
    """A :class:`WholeBlock` for each block that the plans name; those of one kind share theirs.

    Args:
        model: the whole model.
        plans: by which it will be sharded.
    """
    rules = rules_by_name(model, plans)
    decisive: dict[type, frozenset[str]] = {}
    kinds: dict[Any, WholeBlock] = {}
    found: dict[str, WholeBlock] = {}
    for name in dict.fromkeys(m.name for plan in plans for m in plan.match(model) if m.rule.says_where_blocks_are):
        module = model.get_submodule(name)
        if not any(True for _ in module.parameters()):
            continue
        told = tuple((key[len(name) :], rule) for key, rule in rules.items() if inside(key, name))
        kind = kind_of(module, decisive), told
        if kind not in kinds:
            kinds[kind] = WholeBlock(model, name)
        found[name] = kinds[kind]
    return found
