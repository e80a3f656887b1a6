"""Runs of a copy in which blocks that are alike are one module, and are computed at its first two calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.inference.block_kinds import setting_key


class Repeats:
    """The blocks of a copy that stand for more than two of the model, while only their first two calls are computed.

    Later calls hand on the activation as it is. When the module that runs the blocks is called once more (on another input),
    counting begins again. Without a copy every call is computed.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._repeats: dict[nn.Module, _Repeat] = {}
        self._hooks: list[RemovableHandle] = []
        if model is not None:
            self._find(model)

    def _find(self, model: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(id(module), []).append(name)
        inner: set[int] = set()  # parts of a block run when it does
        for module in model.modules():
            if id(module) not in inner and len(names[id(module)]) > 2 and any(True for _ in module.children()):
                self._repeats[module] = _Repeat(module.forward)
                inner |= {id(part) for part in module.modules()}
        runs: dict[nn.Module, list[_Repeat]] = {}
        for module, repeat in self._repeats.items():
            for name in dict.fromkeys(owner_of(model, name) for name in names[id(module)]):
                runs.setdefault(model.get_submodule(name), []).append(repeat)
        for owner, repeats in runs.items():
            if owner not in self._repeats:
                self._hooks.append(owner.register_forward_pre_hook(partial(_begin_again, repeats)))

    def __enter__(self) -> Repeats:
        for module, repeat in self._repeats.items():
            module.forward = repeat
        return self

    def __exit__(self, *error: object) -> None:
        for module in self._repeats:
            del module.forward
        for hook in self._hooks:
            hook.remove()

    def compute_all(self) -> None:
        """From now on compute every call: in the backward an activation checkpoint computes again what the forward computed."""
        for repeat in self._repeats.values():
            repeat.skips = False


def _begin_again(repeats: Sequence[_Repeat], module: nn.Module, args: Any) -> None:
    """A forward pre-hook of the module that runs blocks: their first two calls are computed again."""
    for repeat in repeats:
        repeat.calls.clear()


class _Repeat:
    """A forward of which the first two calls of each form are computed; in a later one the activation goes through as it is."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._last: dict[Any, Any] = {}
        self.calls: Counter[Any] = Counter()
        self.skips = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        form = setting_key((args, kwargs), 5)
        self.calls[form] += 1
        if self.calls[form] <= 2 or not self.skips:
            self._last[form] = self._forward(*args, **kwargs)
            return self._last[form]
        return _passed_through(self._last[form], (*args, *kwargs.values()))


def _passed_through(out: Any, given: Sequence[Any]) -> Any:
    """An earlier output with the activation that a call was given in its place, so that gradients reach what made that."""
    first = out[0] if type(out) in (tuple, list) and out else out
    passed = next((one for one in given if isinstance(one, Tensor) and one.is_floating_point()), None)
    if passed is None or not isinstance(first, Tensor) or (passed.shape, passed.dtype) != (first.shape, first.dtype):
        return out
    passed = passed.clone()
    return passed if first is out else type(out)((passed, *out[1:]))


def owner_of(model: nn.Module, block: str) -> str:
    """Name of the module that runs a block: the first module around it that is no list."""
    owner = block.rpartition(".")[0]
    while owner and isinstance(model.get_submodule(owner), nn.ModuleList | nn.Sequential | nn.ModuleDict):
        owner = owner.rpartition(".")[0]
    return owner
