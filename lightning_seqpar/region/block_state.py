"""What the modules of a block hold beside weights, buffers and modules: settings, and objects that others may write to."""

from __future__ import annotations

import types
import weakref
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

_PLAIN = (bool, int, float, str, types.FunctionType, types.BuiltinFunctionType, type(None))
_OF_MODULES = frozenset(vars(nn.Module()))
_DEPTH = 4
"""How deep objects are looked into."""

_WIDTH = 64
"""How many items of each are read."""

State = dict[str, list[Any]]
"""By an attribute's name, what is in it, in order."""


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Numbers, words and functions among a module's own attributes."""
    return {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)}


def is_same_setting(one: Any, other: Any) -> bool:
    """Whether a setting is as it was."""
    return one is other or (type(one) is type(other) and one == other)


def state_of(block: nn.Module) -> State:
    """What is in all other attributes of a block's modules: tensors, collections and objects, by which tensors they hold."""
    found: State = {}
    for name, module in block.named_modules():
        for key, value in vars(module).items():
            if key not in _OF_MODULES and not isinstance(value, _PLAIN):
                _note(value, found.setdefault(f"{name}.{key}".lstrip("."), []), _DEPTH)
    return found


def changed_state(before: State, now: State, names: Collection[str]) -> str:
    """One of these attributes in which something else is now; empty if there is none."""
    for key in names:
        one, other = before.get(key, []), now.get(key, [])
        if len(one) != len(other) or not all(map(_is_same, one, other)):
            return key
    return ""


def _note(value: Any, into: list[Any], depth: int) -> None:
    if isinstance(value, Tensor):
        into += [weakref.ref(value), value._version]
    elif isinstance(value, _PLAIN):
        into.append(value)
    elif isinstance(value, types.MethodType):
        into.append(value.__func__)
    elif isinstance(value, nn.Module | type) or not depth:
        into.append(type(value))
    elif isinstance(value, list | tuple):
        into.append(len(value))
        for one in value[:_WIDTH]:
            _note(one, into, depth - 1)
    elif isinstance(value, dict) or hasattr(value, "__dict__"):
        items = value if isinstance(value, dict) else vars(value)
        into.append(len(items))
        for key, one in list(items.items())[:_WIDTH]:
            into.append(str(key))
            _note(one, into, depth - 1)
    else:
        into.append(type(value))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, weakref.ref) and isinstance(other, weakref.ref):
        return one() is not None and one() is other()
    return is_same_setting(one, other)
