"""Blocks of a model that are alike: a copy has one module for all of them, and computes it at its first two calls."""

from __future__ import annotations

import ast
import copy
import re
import textwrap
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.inference.lazy_copy import deep_copy
from lightning_seqpar.layout.attributes import class_source
from lightning_seqpar.layout.module_names import inside, outwards


def is_settings(value: Any) -> bool:
    """Whether a value may be a config: an object with attributes that is no tensor, class, module, mapping or function."""
    simple = isinstance(value, Tensor | nn.Module | type | Mapping) or callable(value)
    return not simple and isinstance(getattr(value, "__dict__", None), dict)


def kind_of(module: nn.Module, decisive: dict[type, frozenset[str]] | None = None) -> Any:
    """A key that is equal for blocks of a stack that are alike: classes, shapes, hooks and settings.

    A block's own index counts only if its code decides by it; most blocks merely hand it to a cache. ``decisive`` is what is known
    of the code of classes, kept by who asks for several blocks, since source is slow to read.
    """
    decisive = {} if decisive is None else decisive

    def counts(kind: type, key: str) -> bool:
        if not _INDEX.search(key):
            return key not in _TOLD_OTHERWISE
        if kind not in decisive:
            decisive[kind] = _attributes_that_decide(kind)
        return key in decisive[kind]

    def key_of(name: str, part: nn.Module) -> tuple[Any, ...]:
        settings = tuple((key, setting_key(value)) for key, value in sorted(vars(part).items()) if counts(type(part), key))
        tensors = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        return name, type(part), settings, tuple((n, tuple(t.shape), t.requires_grad) for n, t in tensors)

    return tuple(key_of(name, part) for name, part in module.named_modules())


_TOLD_OTHERWISE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
"""Attributes of modules that say nothing of their own, or that a kind has anyway."""


def setting_key(value: Any, depth: int = 3) -> Any:
    """A key that is equal for values that let a block do the same: their content if that is known, else their identity."""
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device):
        return type(value), repr(value)
    if depth and isinstance(value, list | tuple):
        return type(value), tuple(setting_key(one, depth - 1) for one in value)
    if depth and isinstance(value, dict):
        return type(value), tuple((setting_key(key, 0), setting_key(one, depth - 1)) for key, one in value.items())
    if isinstance(value, set | frozenset):
        return type(value), tuple(sorted(map(str, value)))
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, types.MethodType):
        return "method", value.__func__
    if depth and isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        return "function", value.__code__, setting_key((value.__defaults__, value.__kwdefaults__, held), depth - 1)
    if depth and isinstance(value, partial):
        return "partial", setting_key((value.func, value.args, value.keywords), depth)
    if depth and is_settings(value):
        return type(value), setting_key(vars(value), depth - 1)
    return type(value), id(value)


_INDEX = re.compile(r"(idx|index|layer_id|layer_number|depth)$", re.IGNORECASE)  # names of a block's own index in its stack
_INDEX_READ = re.compile(r"\.\w*(idx|index|layer_id|layer_number|depth)\b", re.IGNORECASE)  # how it is read


def _attributes_that_decide(kind: type) -> frozenset[str]:
    """Names of the attributes of ``self`` that a class's methods, but not its constructor, may decide by.

    Those are left out that are only handed to a cache, printed, or part of a number that is neither compared nor looked up by.
    """
    found: set[str] = set()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        if base.__module__.startswith("torch."):
            continue
        try:
            source = class_source(base)
            tree = ast.parse(textwrap.dedent(source) if _INDEX_READ.search(source) else "")
        except (OSError, TypeError, SyntaxError):
            continue
        around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        found |= {
            node.attr
            for method in ast.walk(tree)
            if isinstance(method, ast.FunctionDef) and method.name != "__init__" and method.args.args
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _INDEX.search(node.attr)
            if isinstance(node.value, ast.Name) and node.value.id == method.args.args[0].arg and _decides(node, around)
        }
    return frozenset(found)


def _decides(value: ast.AST, around: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether code may do one thing or another by a value."""
    node = around[value]
    while isinstance(node, ast.BinOp | ast.UnaryOp | ast.keyword) and not (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.FloorDiv)
    ):
        value, node = node, around[node]
    if isinstance(node, ast.Call):
        return value is not node.func and not _HARMLESS.search(ast.unparse(node.func))
    if isinstance(node, ast.Subscript):
        return value is node.slice and not re.search(r"cache|past|kv", ast.unparse(node.value))
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):  # under another name; not in a longer expression
        return isinstance(value, ast.Attribute)
    return not isinstance(node, ast.FormattedValue | ast.Attribute | ast.Expr)


_HARMLESS = re.compile(r"cache|past|kv|log|warn|print|^(float|str|repr|super)")  # functions that may be handed an index


def stacks(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """The blocks of every list that may be a stack of them, by name; lists inside blocks hold experts, which are no stack."""
    inner: set[int] = set()
    for name, stack in model.named_modules():
        if not isinstance(stack, nn.ModuleList | nn.Sequential | nn.ModuleDict) or id(stack) in inner:
            continue
        kinds = [type(block) for block in stack.children()]
        for block in stack.children():
            if kinds.count(type(block)) > 1:
                inner |= {id(part) for part in block.modules()}
        if len(stack) >= 3:
            yield {
                f"{name}.{key}".lstrip("."): block
                for key, block in stack._modules.items()
                if block is not None and any(True for _ in block.children())
            }


def share_equal_blocks(model: nn.Module, rules: Mapping[str, str], memo: dict[int, Any]) -> None:
    """Write into ``memo``, for ``copy.deepcopy``, that blocks of a stack are copied as one module if they are equal.

    ``rules`` is what a plan says of modules and parameters, by name; blocks of which it says different things are not equal.
    """
    for block, first in _with_first(model, rules, planned=bool(rules)):
        if id(block) not in memo:
            memo[id(block)] = copy.deepcopy(first, memo)


def _with_first(model: nn.Module, rules: Mapping[str, str], *, planned: bool) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The blocks of every stack, each with the first one that is equal to it."""
    decisive: dict[type, frozenset[str]] = {}
    for blocks in stacks(model):
        first: dict[Any, nn.Module] = {}
        last = next(reversed(blocks), "")
        for name, block in blocks.items():
            told = tuple((key[len(name) :], rule) for key, rule in rules.items() if inside(key, name))
            # Under a plan the last one is a module of its own: activations may become whole behind it, but not between the blocks.
            kind = kind_of(block, decisive), told, planned and name == last
            yield block, first.setdefault(kind, block)


def spread_equal_blocks(copied: nn.Module) -> None:
    """Give a copy whose equal blocks are one module a module for each again, in place; those of a kind share the numbers.

    So each has parameters of its own, by which it is told from the others, and all of a kind need the memory of one.
    """
    for blocks in stacks(copied):
        seen: set[int] = set()
        for name, block in blocks.items():
            if id(block) in seen:
                inner = {id(part) for part in block.modules()}
                memo: dict[int, Any] = {id(part): part for part in copied.modules() if id(part) not in inner}
                memo |= {id(part): part for part in (*copied.parameters(), *copied.buffers())}
                memo |= {id(one): nn.Parameter(one.detach(), one.requires_grad) for one in block.parameters()}
                parent, _, key = name.rpartition(".")
                copied.get_submodule(parent)._modules[key] = deep_copy(block, memo)
            seen.add(id(block))


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks that a copy under a plan has no module of its own for, since an earlier one is alike."""
    return (block for block, first in _with_first(model, {}, planned=True) if first is not block)


def in_repeated_blocks(model: nn.Module) -> set[int]:
    """Ids of all modules inside blocks of which a stack has several of one class."""
    found: set[int] = set()
    for blocks in stacks(model):
        kinds = [type(block) for block in blocks.values()]
        found |= {id(part) for block in blocks.values() if kinds.count(type(block)) > 1 for part in block.modules()}
    return found


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
        names: dict[int, list[str]] = defaultdict(list)
        for name, module in model.named_modules(remove_duplicate=False):
            names[id(module)].append(name)
        inner: set[int] = set()  # parts of a block run when it does
        for module in model.modules():
            if id(module) not in inner and len(names[id(module)]) > 2 and any(True for _ in module.children()):
                self._repeats[module] = _Repeat(module.forward)
                inner |= {id(part) for part in module.modules()}
        runs: dict[nn.Module, list[_Repeat]] = defaultdict(list)
        for module, repeat in self._repeats.items():
            for name in dict.fromkeys(owner_of(model, name) for name in names[id(module)]):
                runs[model.get_submodule(name)].append(repeat)
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
    lists = nn.ModuleList | nn.Sequential | nn.ModuleDict
    return next((one for one in outwards(block.rpartition(".")[0]) if not isinstance(model.get_submodule(one), lists)), "")
