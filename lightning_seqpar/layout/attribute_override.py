"""Other values for some attributes of an object that several modules share, such as a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class AttributeOverride:
    """Stands for an object and gives other values for a few of its attributes; the object itself stays as it is.

    It is no copy, since libraries write to a shared configuration after the model is made, and a copy would not change.
    """

    def __init__(self, original: Any, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_original", original)
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask before anything is there. Plain look-ups, which torch.compile can trace, find the two own names.
        if name.startswith("__") or name in ("_original", "_values"):
            raise AttributeError(name)
        values = self._values
        return values[name] if name in values else getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_original"), name, value)

    def __reduce__(self) -> Any:
        return AttributeOverride, (object.__getattribute__(self, "_original"), object.__getattribute__(self, "_values"))


def named_numbers(value: Any) -> dict[str, int]:
    """The whole numbers that a dict holds by name, or a tuple of pairs (``(("h", 4),)`` in einops' layers); else none."""
    if type(value) is tuple and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        value = {key: number for key, number in value if isinstance(key, str)}
    if type(value) is not dict:
        return {}
    return {key: number for key, number in value.items() if isinstance(key, str) and type(number) is int}


def read_attribute(module: Any, path: str) -> Any:
    """Reads an attribute by its path, such as ``num_heads``, ``config.num_heads`` or, of a mapping or of pairs, ``sizes.h``."""
    for part in path.split("."):
        held = named_numbers(module)
        module = held[part] if part in held else getattr(module, part)
    return module


def write_attribute(module: Any, path: str, value: Any) -> None:
    """Set an attribute by its path; its holder (a config, a mapping, pairs) is overridden or replaced, and stays as it is."""
    holder, _, leaf = path.rpartition(".")
    if not holder:
        setattr(module, leaf, value)
        return
    original, values = read_attribute(module, holder), {}
    if leaf in named_numbers(original):
        pairs = {**dict(original), leaf: value}
        write_attribute(module, holder, tuple(pairs.items()) if isinstance(original, tuple) else pairs)
        return
    if isinstance(original, AttributeOverride):
        _, (original, values) = original.__reduce__()
    write_attribute(module, holder, AttributeOverride(original, {**values, leaf: value}))
