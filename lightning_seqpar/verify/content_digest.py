"""A digest of what objects hold and of the code that they run, equal in two processes only if both are equal."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import dis
import fractions
import functools
import hashlib
import logging
import random
import re
import sys
import sysconfig
import threading
import types
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed import ProcessGroup

_WRITTEN = (
    *(int, float, complex, str, bytes, range, slice, type(None), type(...), type(NotImplemented), PurePath, uuid.UUID),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal, fractions.Fraction),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
"""Types of which ``repr`` tells all and no address."""
_BASES = (dict, list, tuple, set, frozenset, collections.deque)
"""Types made in C whose content is read where a class derives from them."""
_STANDARD = ("<frozen", *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")))
"""How names of the files of Python itself begin."""
_HASH_OF_CONFIG = "_original_object_hash"
"""Where transformers' generation settings keep a hash of what they were, which is another in every process."""
_CODE = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_posonlyargcount",
         "co_kwonlyargcount", "co_flags", "co_exceptiontable")  # fmt: skip


class UnreadableError(Exception):
    """Something has a type whose content can't be read; the message says what, and where it was found."""


def is_installed(file: str | None) -> bool:
    """Whether a source file belongs to Python or to an installed package, which its version tells all about."""
    return not file or file.startswith(_STANDARD) or "/site-packages/" in file or "/dist-packages/" in file


class ContentDigest:
    """Reads objects, one after the other, into a digest.

    Every object is read through: attributes, slots, containers, closures, defaults, the self of a bound method. A function
    goes in with its byte code, constants and all code nested in it. If it is the user's own (its file is no installed
    package's), then so do the globals that it names, and of a class of the user's all methods and attributes. References back
    to what was read go in as its number, so that cycles end and sharing counts.

    Names of files, lines and addresses stay out. What has no content that could be read raises.

    Args:
        places: stand-ins, by an object's id, for objects that are described elsewhere.
    """

    def __init__(self, places: Mapping[int, str]) -> None:
        self._hash = hashlib.sha256()
        self._places = places
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used twice
        self.names: set[str] = set()
        """All names that the user's code reads, of globals and of attributes."""

    def hexdigest(self) -> str:
        """The digest of all that was read."""
        return self._hash.hexdigest()

    def add(self, value: Any, path: str) -> None:
        """Read ``value``, found at ``path``.

        Raises:
            UnreadableError: with the path of the part that can't be read.
        """
        stack = [(value, path)]
        while stack:  # a stack of its own, since no depth is too deep
            value, path = stack.pop()
            children = list(self._read(value, path))
            self._write(f"{len(children)} parts")
            stack.extend(reversed(children))

    def _write(self, *tokens: str | bytes) -> None:
        for token in tokens:
            raw = token.encode(errors="surrogatepass") if isinstance(token, str) else token
            self._hash.update(b"%d:" % len(raw) + raw)  # with its length, so that no two sequences are written alike

    def _read(self, value: Any, path: str) -> Iterable[tuple[Any, str]]:
        """Write what ``value`` is by itself, and return its parts."""
        kind = type(value)
        if id(value) in self._places:
            self._write("at", self._places[id(value)])
            return ()
        if kind in _WRITTEN or kind is bool or issubclass(kind, np.generic | PurePath | np.dtype):
            self._write(name_of(kind), repr(value))
            return ()
        if kind is re.Pattern:
            self._write("pattern", repr(value.flags))
            return [(value.pattern, path)]
        if isinstance(value, types.CodeType):
            self._write("code", *(repr(getattr(value, name)) for name in _CODE))
            return [(constant, path) for constant in value.co_consts]
        if kind is tuple:  # without a number: whether equal constants are one object is the compiler's choice
            self._write("tuple")
            return [(item, f"{path}[{at}]") for at, item in enumerate(value)]
        if isinstance(value, set | frozenset):
            self._write(name_of(kind), *sorted(self._apart(item, path) for item in value))
            return self._attributes(value, path) if kind not in (set, frozenset) else ()
        if id(value) in self._seen:
            self._write("again", str(self._seen[id(value)]))
            return ()
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        for read in (self._code, self._library_object, self._container):
            if (parts := read(value, path)) is not None:
                return parts
        return self._object(value, path)

    def _apart(self, item: Any, path: str) -> str:
        """The digest of an item by itself, since the order of a set is another in every process."""
        own = ContentDigest(self._places)
        own._seen, own._kept, own.names = dict(self._seen), self._kept, self.names
        own.add(item, path)
        return own.hexdigest()

    # ---- code ------------------------------------------------------------------------------------------------------

    def _code(self, value: Any, path: str) -> Iterable[tuple[Any, str]] | None:
        """A function, method, class or module; None for anything else."""
        if isinstance(value, types.FunctionType):
            return self._function(value, path)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            self._write("module", value.__name__)
            return ()
        if isinstance(value, types.MethodType):
            self._write("method")
            return [(value.__func__, path), (value.__self__, path)]
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            self._write("builtin", getattr(value, "__module__", None) or "", value.__qualname__)
            owner = value.__self__
            return () if owner is None or isinstance(owner, types.ModuleType) else [(owner, path)]
        descriptors = types.WrapperDescriptorType | types.MethodDescriptorType | types.GetSetDescriptorType
        if isinstance(value, descriptors | types.MemberDescriptorType | types.ClassMethodDescriptorType | np.ufunc):
            self._write("builtin", name_of(getattr(value, "__objclass__", np.ufunc)), value.__name__)
            return ()
        if isinstance(value, functools.partial):
            self._write("partial")
            return [(part, path) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, property):
            self._write("property")
            return [(part, path) for part in (value.fget, value.fset, value.fdel)]
        if isinstance(value, staticmethod | classmethod):
            self._write(type(value).__name__)
            return [(value.__func__, path)]
        if isinstance(value, functools._lru_cache_wrapper):
            self._write("lru_cache")
            return [(value.__wrapped__, path)]
        if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            self._write("operator", str(value))
            return ()
        return None

    def _function(self, value: types.FunctionType, path: str) -> list[tuple[Any, str]]:
        self._write("function", value.__module__ or "")
        parts: list[tuple[Any, str]] = [
            (value.__code__, path),
            (value.__defaults__, path),
            (value.__kwdefaults__, path),
        ]
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                parts.append((cell.cell_contents, f"{path} ({name})"))
            except ValueError:
                parts.append(("no value yet", path))
        parts.append(({key: item for key, item in vars(value).items() if key != "__wrapped__"}, path))
        if is_installed(value.__code__.co_filename):
            return parts
        names, imported, attributes = _names_read(value.__code__)
        self.names |= names | attributes
        space = value.__globals__
        where = space.get("__name__", "")
        for name in sorted(names & space.keys()):
            parts += self._global(name, space[name], f"{where}.{name}", names | attributes)
        for name in sorted(imported & sys.modules.keys()):
            parts += self._global(name, sys.modules[name], name, names | attributes)
        return parts

    def _global(self, name: str, value: Any, path: str, read: set[str]) -> list[tuple[Any, str]]:
        """What a function reads by a global name: the value, or of a module of the user's what it reads of that."""
        parts: list[tuple[Any, str]] = [(name, path)]
        waiting, known = [(path, value)], {id(value)}
        while waiting:
            path, value = waiting.pop()
            parts.append((value, path))
            if isinstance(value, types.ModuleType) and not is_installed(getattr(value, "__file__", None)):
                for key in sorted(read & vars(value).keys()):
                    found, where = vars(value)[key], f"{path}.{key}"
                    if not isinstance(found, types.ModuleType):
                        parts += [(key, where), (found, where)]
                    elif id(found) not in known:
                        known.add(id(found))
                        waiting.append((where, found))
        return parts

    def _class(self, value: type) -> list[tuple[Any, str]]:
        self._write("class", name_of(value))
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        if is_installed(file) and value.__module__ != "__main__" and (file or not _has_users_code(value)):
            return []
        parts: list[tuple[Any, str]] = [(base, name_of(base)) for base in value.__bases__]
        for key, item in vars(value).items():
            own = isinstance(item, types.FunctionType | staticmethod | classmethod | property)
            if own or not (key.startswith("__") or key == "_abc_impl"):
                parts += [(key, key), (item, f"{name_of(value)}.{key}")]
        return parts

    # ---- what other libraries made -------------------------------------------------------------------------------

    def _library_object(self, value: Any, path: str) -> Iterable[tuple[Any, str]] | None:
        """Objects that are no more than their attributes, but are not read by them; None for anything else."""
        if isinstance(value, Tensor):
            self._tensor(value)
            return self._attributes(value, path)
        if isinstance(value, Enum):
            self._write("enum", value.name)
            return [(type(value), path), (value.value, path)]
        if isinstance(value, np.ndarray):
            self._write("array", str(value.dtype), repr(value.shape))
            if value.dtype.hasobject:
                return [(item, path) for item in value.ravel().tolist()]
            self._write(hashlib.sha256(np.ascontiguousarray(value).tobytes()).digest())
            return ()
        if isinstance(value, logging.Logger):
            self._write("logger", value.name)
            return ()
        if isinstance(value, type(threading.Lock()) | type(threading.RLock())):
            self._write("lock")
            return ()
        if isinstance(value, torch.Generator):
            self._write("generator", str(value.device), value.get_state().numpy().tobytes())
            return ()
        if isinstance(value, random.Random):
            self._write(name_of(type(value)))
            return [(value.getstate(), path)]
        if isinstance(value, weakref.ReferenceType):
            self._write("reference")
            return [(value(), path)]
        if isinstance(value, weakref.ProxyTypes):
            self._write("proxy")
            return [(value.__repr__.__self__, path)]
        if isinstance(value, ProcessGroup):
            self._write("process group", str(value.size()))
            return ()
        if isinstance(value, Trainer):
            self._write("trainer")  # what a step reads of it is told by the fingerprint
            return ()
        return None

    def _tensor(self, value: Tensor) -> None:
        self._write(
            "tensor", name_of(type(value)), str(value.dtype), repr(tuple(value.shape)), str(value.requires_grad)
        )
        self._write("meta" if value.is_meta else content_of(value))

    # ---- containers and objects of Python classes ------------------------------------------------------------------

    def _container(self, value: Any, path: str) -> Iterable[tuple[Any, str]] | None:
        if not isinstance(
            value, dict | list | tuple | collections.deque | types.MappingProxyType | array.array | bytearray
        ):
            return None
        self._write("container")
        parts: list[tuple[Any, str]] = [(type(value), path)]
        if isinstance(value, dict | types.MappingProxyType):
            for key, item in value.items():
                parts += [(key, path), (item, f"{path}[{key!r}]" if isinstance(key, str | int) else path)]
        else:
            parts += [(item, f"{path}[{at}]") for at, item in enumerate(value)]
        if isinstance(value, collections.deque):
            parts.append((value.maxlen, path))
        if isinstance(value, collections.defaultdict):
            parts.append((value.default_factory, path))
        plain = (
            dict,
            list,
            collections.OrderedDict,
            collections.defaultdict,
            collections.deque,
            types.MappingProxyType,
        )
        return parts if type(value) in (*plain, array.array, bytearray) else [*parts, *self._attributes(value, path)]

    def _object(self, value: Any, path: str) -> list[tuple[Any, str]]:
        """An object of a Python class by its attributes; of another by what it would be made of again, if it can be."""
        cls = type(value)
        parts: list[tuple[Any, str]] = [(cls, path)]
        if _holds_attributes_alone(cls):
            return parts + self._attributes(value, path)
        try:
            made_of = value.__reduce_ex__(4)
        except Exception:
            raise UnreadableError(f"{path} is a {cls.__name__} whose content can't be read") from None
        return [*parts, *((part, path) for part in (made_of if isinstance(made_of, tuple) else (made_of,)))]

    def _attributes(self, value: Any, path: str) -> list[tuple[Any, str]]:
        """The names and values of what is in the object's ``__dict__`` and slots."""
        parts: list[tuple[Any, str]] = []
        try:
            own = object.__getattribute__(value, "__dict__")
        except AttributeError:
            own = {}
        for key, item in own.items():
            if key != _HASH_OF_CONFIG:
                parts += [(key, path), (item, f"{path}.{key}")]
        for base in type(value).__mro__:
            for key, slot in vars(base).items():
                if isinstance(slot, types.MemberDescriptorType):
                    try:
                        parts += [(key, path), (slot.__get__(value), f"{path}.{key}")]
                    except AttributeError:
                        continue
        return parts


def _has_users_code(cls: type) -> bool:
    """Whether a class of a module without a file (made by ``exec``, say) has methods that no installed file holds."""
    return any(
        isinstance(item, types.FunctionType) and not is_installed(item.__code__.co_filename)
        for item in vars(cls).values()
    )


def name_of(cls: Any) -> str:
    """The full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def content_of(tensor: Tensor) -> bytes:
    """A digest of a tensor's numbers."""
    whole = tensor.detach()
    if whole.layout is not torch.strided or whole.is_quantized:
        whole = whole.dequantize() if whole.is_quantized else whole.to_dense()
    whole = whole.cpu().contiguous()
    raw = whole.reshape(-1).view(torch.uint8).numpy() if whole.numel() else np.zeros(0, np.uint8)
    return hashlib.sha256(raw.data).digest()


def _names_read(code: types.CodeType) -> tuple[set[str], set[str], set[str]]:
    """Of code, with all code nested in it: globals that it reads, modules that it imports, and all other names in it."""
    names: set[str] = set()
    imported: set[str] = set()
    others = set(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(str(instruction.argval))
        if instruction.opname == "IMPORT_NAME":
            imported.add(str(instruction.argval))
    for nested in code.co_consts:
        if isinstance(nested, types.CodeType):
            for known, more in zip((names, imported, others), _names_read(nested), strict=True):
                known |= more
    return names, imported, others


def _holds_attributes_alone(cls: type) -> bool:
    """Whether an object of the class is its attributes, slots and the content of a container, and nothing that C code holds."""
    if any(
        isinstance(vars(one).get("__new__"), types.BuiltinFunctionType)
        for one in cls.__mro__
        if one not in (*_BASES, object)
    ):
        return False  # made in C
    slots = sum(isinstance(item, types.MemberDescriptorType) for base in cls.__mro__ for item in vars(base).values())
    base = next(base for base in cls.__mro__ if base in _BASES or base is object)
    more = sum(any(name in vars(one) for one in cls.__mro__) for name in ("__dict__", "__weakref__"))
    size = base.__basicsize__ + 8 * (slots + more)
    return bool(cls.__flags__ & (1 << 9)) and cls.__basicsize__ <= size  # a class that was made at run time


def users_code_in(packages: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Functions and classes of the user's own that were put into loaded modules of installed packages.

    They stand in a module, in a class, or in a table of one of both (a registry of attention functions).

    Args:
        packages: names of packages.

    Yields:
        Where it was found, and what.
    """
    packages = set(packages)
    of_user: dict[str, bool] = {}  # by a module's name, and by a file's
    scanned: set[int] = set()

    def is_users(module: str) -> bool:
        if module not in of_user:
            file = getattr(sys.modules.get(module), "__file__", None)
            of_user[module] = module == "__main__" or not is_installed(file)
        return of_user[module]

    def is_own(value: Any) -> bool:
        kind = type(value)
        if kind is property:
            value = value.fget
        elif kind in (staticmethod, classmethod):
            value = value.__func__
        if type(value) is types.FunctionType:
            file = value.__code__.co_filename
            if file not in of_user:
                if file.startswith("<"):  # made by exec, as methods of dataclasses are
                    return is_users(value.__globals__.get("__name__", ""))
                of_user[file] = not is_installed(file)
            return of_user[file]
        return _is_class(value) and is_users(value.__module__)

    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in packages or not isinstance(module, types.ModuleType) or is_users(name):
            continue
        for key, value in list(vars(module).items()):
            if type(value) in _DULL or key.startswith("__"):
                continue
            if is_own(value):
                yield f"{name}.{key}", value
            if type(value) is types.FunctionType or id(value) in scanned:
                continue
            if not _is_class(value):  # of a class the module matters in which it is found
                scanned.add(id(value))  # many modules hold the same namespace of operators, or the same configuration
            for at, item in _table_of(value, name):
                if type(item) not in _DULL and is_own(item):
                    yield f"{name}.{key}[{at}]", item


_DULL = {str, int, float, bool, type(None), types.ModuleType, types.BuiltinFunctionType, types.GetSetDescriptorType}
"""Types of values that are no function or class of the user's and hold none."""


def _table_of(value: Any, module: str) -> list[tuple[str, Any]]:
    """What a dict, a class of the module itself, or an object holds, with the dicts that class or object has."""
    if type(value) in (dict, collections.OrderedDict):
        return [(str(key), item) for key, item in value.items()]
    is_class = _is_class(value)
    if type(value) is types.FunctionType or (is_class and value.__module__ != module):
        return []
    try:
        # Past what the object's class does when it is asked: deprecated names of a library warn, and lazy ones import.
        own = vars(value) if is_class else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    if not is_class and type(own) is not dict:
        return []
    items = list(own.items())
    return items + [
        (f"{at}.{key!s}", item) for at, table in items if type(table) is dict for key, item in table.items()
    ]


def _is_class(value: Any) -> bool:
    """Whether it is a class; unlike ``isinstance`` this does not ask the object itself."""
    return issubclass(type(value), type)


def hooks_of(module: nn.Module) -> dict[str, Any]:
    """The hooks of a module that its forward and backward call."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = {kind: list(vars(module).get(kind, {}).values()) for kind in kinds}
    return {kind: hooks for kind, hooks in found.items() if hooks}
