"""Copies that are made as somebody reads them: what is done to such a copy does nothing to the object behind it.

A step may reach anything through its trainer: gigabytes of data, files, locks. So an object of a Python class is stood for by one
of a subclass, with an empty ``__dict__``: its methods and properties are the class's own, an attribute is copied from the object
when it is first read, and what is written stays in the copy.
"""

from __future__ import annotations

import collections
import copy
import functools
import logging
import random
import re
import threading
import types
import weakref
from abc import ABCMeta
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_seqpar.releases import is_lightnings

_UNCHANGEABLE = (
    *(bool, int, float, complex, str, bytes, type(None), type, range, slice),
    *(types.ModuleType, re.Pattern, logging.Logger),
    *(Enum, PurePath, date, time, timedelta, tzinfo, Decimal, Fraction, np.generic, np.dtype),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, ProcessGroup),
)
"""Types whose objects are given out as they are."""
_LARGE_ARRAY = 2**26  # bytes from which an array of numpy is not copied, but given out such that it can't be written to


class CantCopyError(ValueError):
    """Something can't be given out such that what is done to it is harmless."""


class LazyCopies:
    """Copies of objects that refer to each other, each made once.

    ``given`` has by an object's id what is called, when the object is first read, for what stands for it; ``changes`` gives for a
    class the attributes that copies of its objects have in place of its own.
    """

    def __init__(
        self, given: Mapping[int, Callable[[], Any]], changes: Callable[[type], Mapping[str, Any]] = lambda cls: {}
    ) -> None:
        self._given, self._changes = given, changes
        self._made: dict[int, Any] = {}
        self._behind: dict[int, tuple[Any, str]] = {}  # by a copy's id: what it stands for, and where that was found
        self._kept: list[Any] = []  # so that no id is used twice
        self._classes: dict[type, type] = {}

    def of(self, value: Any, path: str) -> Any:
        """What stands for ``value``, which the user's code reaches by ``path``; raises CantCopyError if nothing harmless can."""
        if isinstance(value, _UNCHANGEABLE):
            return value
        if id(value) not in self._made:
            self._kept.append(value)
            given = self._given.get(id(value))
            made = self._copy(value, path) if given is None else given()
            self._made.setdefault(id(value), made)
        return self._made[id(value)]

    def _copy(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            copied = value.detach().clone()
            if isinstance(value, nn.Parameter):
                return nn.Parameter(copied, value.requires_grad)
            return copied.requires_grad_(value.requires_grad)
        if isinstance(value, np.ndarray):
            large = value.nbytes >= _LARGE_ARRAY or isinstance(value, np.memmap)
            array: np.ndarray[Any, Any] = value.view() if large else value.copy()
            array.flags.writeable = not large
            return array
        if isinstance(value, dict | list | tuple | set | frozenset | collections.deque):
            return self._container(value, path)
        if callable(value) and (function := self._function(value, path)) is not None:
            return function
        if isinstance(value, weakref.ReferenceType):
            target = value()
            return (lambda: None) if target is None else weakref.ref(self.of(target, path))
        if isinstance(value, weakref.ProxyTypes):
            return self.of(value.__repr__.__self__, path)
        for make in (threading.Lock, threading.RLock):
            if type(value) is type(make()):
                return make()
        if _is_plain_class(type(value)):
            return self._twin(value, path)
        return self._deep(value, path)

    def _deep(self, value: Any, path: str) -> Any:
        """A copy of an object that only its own class knows how to copy."""
        memo = dict(self._made)
        for known, make in self._given.items():
            with suppress(AttributeError):  # a copy that is smaller than the model lacks it
                memo[known] = make()
        try:
            return value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value, memo)
        except Exception as error:
            raise CantCopyError(
                f"{path} is a {type(value).__name__}, which can't be copied ({error}), and before training the step runs on "
                "copies alone"
            ) from None

    def _container(self, value: Any, path: str) -> Any:
        if isinstance(value, tuple | frozenset):
            items = [self.of(item, f"{path}[{at}]") for at, item in enumerate(value)]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        made = copy.copy(value)
        self._made[id(value)] = made  # before its items, which may refer to it
        if isinstance(value, dict | list):
            kind = dict if isinstance(value, dict) else list
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                kind.__setitem__(made, key, self.of(item, f"{path}[{key!r}]"))
        else:
            made.clear()
            (made.update if isinstance(value, set) else made.extend)(self.of(item, f"{path}[...]") for item in value)
        return made

    def _function(self, value: Any, path: str) -> Any:
        """A method that works on a copy of its object, or a function as it is; None for any other callable object."""
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.of(value.__self__, path))
        if isinstance(value, types.BuiltinMethodType):
            owner = value.__self__
            return value if owner is None else getattr(self.of(owner, path), value.__name__)
        if isinstance(value, functools.partial):
            function, args, keywords = (self.of(part, path) for part in (value.func, value.args, value.keywords))
            return functools.partial(function, *args, **keywords)
        return value if isinstance(value, types.FunctionType) else None

    # ---- objects of Python classes ---------------------------------------------------------------------------------

    def _twin(self, value: Any, path: str) -> Any:
        """An object whose attributes are copied from ``value`` when they are read; of a class for itself."""
        cls = type(value)
        if cls not in self._classes:
            self._classes[cls] = self._twin_class(cls)
        try:
            twin: Any = object.__new__(self._classes[cls])
        except TypeError:
            return self._deep(value, path)  # its class is made in C
        self._kept.append(twin)
        self._behind[id(twin)] = (value, path)
        self._made[id(value)] = twin
        return twin

    def _twin_class(self, cls: type) -> type:
        """A subclass of ``cls`` whose objects are read through :meth:`_load`; neither registers itself nor finalises."""
        copies, real = self, cls

        class Reading:
            def __init_subclass__(cls, **options: Any) -> None:
                """Nothing of the user's is told of the subclass."""

            def __getattribute__(self, name: str) -> Any:
                if name == "__class__":
                    return real
                copies._load(self, name)
                return super().__getattribute__(name)

            def __del__(self) -> None:
                """What the object behind it holds is not this one's to close."""

        for name, change in self._changes(cls).items():
            setattr(Reading, name, change)
        meta = ABCMeta if isinstance(cls, ABCMeta) else type
        return meta(cls.__name__, (Reading, cls), {"__module__": cls.__module__})

    def _load(self, twin: Any, name: str) -> None:
        """Copy an attribute (all of them for ``__dict__``) into a twin, unless it was read or written before."""
        if id(twin) not in self._behind:
            return  # a copy of a copy, which is complete
        value, path = self._behind[id(twin)]
        own, real = object.__getattribute__(twin, "__dict__"), getattr(value, "__dict__", {})
        for key in list(real) if name == "__dict__" else (name,):
            if key in real and key not in own:
                own[key] = self.of(real[key], f"{path}.{key}")


_COPIED_BY_CLASS = ("__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__getnewargs_ex__")


def _is_plain_class(cls: type) -> bool:
    """Whether an object is no more than its attributes: a Python class that doesn't say itself how it is copied."""
    if type(cls) not in (type, ABCMeta) or not cls.__flags__ & (1 << 9):  # a heap type
        return False
    if issubclass(cls, random.Random | np.random.Generator):
        return False
    for base in cls.__mro__[:-1]:
        if vars(base).get("__slots__"):
            return False
        # Those of torch's modules and of Lightning's classes say how they are pickled, and hide nothing.
        known = is_lightnings(base.__module__) or base.__module__.startswith(("torch.nn.modules.", "torch.utils.data."))
        if not known and any(name in vars(base) for name in _COPIED_BY_CLASS):
            return False
    return True


def deep_copy(model: nn.Module, memo: dict[int, Any], begin: Callable[[dict[int, Any]], None] = lambda memo: None) -> nn.Module:
    """``copy.deepcopy`` of a model, whose modules may hold what has no copy: locks, open files, tensors with a graph, ...

    ``memo`` gets all copies; ``begin`` is called with it before.
    """
    attempt = dict(memo)
    try:
        begin(attempt)
        copied = copy.deepcopy(model, attempt)
    except Exception:  # whatever a class raises that can't be copied
        attempt = dict(memo)
        attempt |= _stand_ins(model, attempt)
        begin(attempt)
        copied = copy.deepcopy(model, attempt)
    memo.update(attempt)
    return copied


def _stand_ins(model: nn.Module, copies: Mapping[int, Any]) -> dict[int, Any]:
    """What stands, by id, for attributes that ``copy.deepcopy`` can't copy; ``copies`` is its memo, which gets the modules."""
    parts = [*model.modules(), *model.parameters(), *model.buffers()]
    known = {id(part): part for part in parts}
    known |= {key: known.get(key, value) for key, value in copies.items()}
    lazy = LazyCopies({key: functools.partial(copies.get, key) for key in known})
    left = [(f"{name}.{key}".lstrip("."), value) for name, m in model.named_modules() for key, value in vars(m).items()]
    seen, found = set(known), dict[int, Any]()
    while left:
        path, value = left.pop()
        if id(value) in seen or isinstance(value, (*_UNCHANGEABLE, np.ndarray)):
            continue
        seen.add(id(value))
        if isinstance(value, dict | list | tuple | set | frozenset | collections.deque):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            left += [(f"{path}[{key!r}]", item) for key, item in items]
        elif not isinstance(value, Tensor) or not value.is_leaf:
            try:
                copy.deepcopy(value, dict(known))
            except Exception:  # whatever its class raises
                try:
                    found[id(value)] = lazy.of(value, path)
                except CantCopyError as error:
                    found[id(value)] = _NoCopy(str(error))
    return found


class _NoCopy:
    """Stands in a copy of a model for what can't be copied; says so to whom it is of use."""

    def __init__(self, told: str) -> None:
        self.__dict__["told"] = told

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CantCopyError(self.__dict__["told"])

    def __deepcopy__(self, memo: Any) -> _NoCopy:
        return self


def own_containers(model: nn.Module) -> None:
    """Give a copy of a model containers of its own where its classes hold some as class attributes, in place."""
    for module in model.modules():
        for base in type(module).__mro__:
            if base.__module__.startswith("torch.") or is_lightnings(base.__module__):
                continue
            for name, value in vars(base).items():
                if isinstance(value, dict | list | set | collections.deque) and not name.startswith("__"):
                    module.__dict__.setdefault(name, copy.copy(value))
