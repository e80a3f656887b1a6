"""Another value for some attributes of an object that others share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class AttributeOverride:
    """Answers like ``held``, except for a few attributes; ``held`` itself, shared by many modules, stays as it is.

    Never a copy: libraries write to a shared config after the model is made, and a copy would not hear of it.
    """

    def __init__(self, held: Any, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_held", held)
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask before anything is there
            raise AttributeError(name)
        values = object.__getattribute__(self, "_values")
        return values[name] if name in values else getattr(object.__getattribute__(self, "_held"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_held"), name, value)

    def __reduce__(self) -> Any:
        return AttributeOverride, (object.__getattribute__(self, "_held"), object.__getattribute__(self, "_values"))


def read_attribute(module: Any, path: str) -> Any:
    """An attribute, or one of an object that the module holds (``config.num_heads``).

    Raises:
        AttributeError: if there is none.
    """
    for part in path.split("."):
        module = getattr(module, part)
    return module


def write_attribute(module: Any, path: str, value: Any) -> None:
    """Set an attribute of the module's own; a dotted one through a view of the object that holds it."""
    holder, _, leaf = path.rpartition(".")
    if not holder:
        setattr(module, leaf, value)
        return
    held = read_attribute(module, holder)
    values = {**(held.__reduce__()[1][1] if isinstance(held, AttributeOverride) else {}), leaf: value}
    base = held.__reduce__()[1][0] if isinstance(held, AttributeOverride) else held
    write_attribute(module, holder, AttributeOverride(base, values))
