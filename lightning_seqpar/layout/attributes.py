"""What a module has beside tensors: attributes, which a step may read and change, and the source of its class."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import sysconfig
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_seqpar.releases import pl

_PLAIN = (bool, int, float, str, tuple, type(None))
"""What code can't change, but only replace."""

_MODULES = frozenset(vars(nn.Module()))
_LIGHTNINGS = frozenset(vars(pl.LightningModule()))
_LEFT_ALONE = ("lightning_seqpar.", "torchmetrics.")
"""Packages whose modules change what they have by themselves."""

Values = dict[tuple[str, str], Any]
"""By the name of a module, or ``hparams``, and that of an attribute."""


class ModelAttributes:
    """Reads and sets the attributes of a model's modules; not those of layers that were swapped, nor of metrics.

    Tensors count in all of its modules with ``tensors``, and else in the model itself alone.
    """

    def __init__(self, model: nn.Module, *, tensors: bool = False) -> None:
        self._holders: dict[str, tuple[dict[str, Any], frozenset[str], tuple[type, ...]]] = {}
        for name, module in model.named_modules():
            if name and any(base.__module__.startswith(_LEFT_ALONE) for base in type(module).__mro__):
                continue
            left_out = _LIGHTNINGS if isinstance(module, pl.LightningModule) else _MODULES
            self._holders[name] = vars(module), left_out, (*_PLAIN, Tensor) if tensors or not name else _PLAIN
        hparams = getattr(model, "_hparams", None)
        if isinstance(hparams, dict):
            self._holders["hparams"] = hparams, frozenset(), _PLAIN

    def read(self) -> Values:
        """All of them now."""
        return {
            (holder, name): value
            for holder, (own, left_out, kinds) in self._holders.items()
            for name, value in own.items()
            if isinstance(value, kinds) and name not in left_out
        }

    def set(self, values: Values) -> None:
        """Set them, but for those that are gone, or have become objects of another kind."""
        for (holder, name), value in values.items():
            own, _, kinds = self._holders[holder]
            if name in own and own[name] is not value and isinstance(own[name], kinds):
                own[name] = value

    @contextmanager
    def as_of(self, values: Values) -> Generator[None, None, None]:
        """A context in which they are what they were; behind it they are as before."""
        now = self.read()
        self.set(values)
        try:
            yield
        finally:
            self.set(now)


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


def class_source(kind: type) -> str:
    """Returns the source of a class, as ``inspect.getsource`` gives it; raises OSError if there is none.

    That asks every loaded module for its file, at which a module that is imported lazily may raise whatever it likes.
    """
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    lines = linecache.getlines(file) if isinstance(file, str) else []
    node: ast.AST = ast.parse("".join(lines))
    for name in kind.__qualname__.split("."):
        if name == "<locals>":
            continue
        inner = [n for n in ast.walk(node) if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name]
        if not inner:
            raise OSError(f"no source of {kind.__qualname__}")
        node = inner[0]
    assert isinstance(node, ast.ClassDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "".join(inspect.getblock(lines[first - 1 :]))


def is_installed(kind: type) -> bool:
    """Whether a class comes with an installed package, whose code users do not change."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    paths = sysconfig.get_paths()
    return isinstance(file, str) and file.startswith(tuple(paths[name] for name in ("stdlib", "purelib", "platlib")))
