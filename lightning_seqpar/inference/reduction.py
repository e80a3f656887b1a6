"""How the copies of a large model are smaller than it: one block of each kind, a short vocabulary, a few dozen tokens.

What a copy proves does not need the model's depth, since blocks of one kind compute alike, nor all rows of its vocabulary, nor
long sequences. Widths, heads and the remainders of what is dealt out over ranks stay as they are. A model whose code does not
run at a smaller vocabulary or length is copied with its own.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import re
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.module_names import inside

LARGE = 10_000_000
"""Number of parameters above which copies of a model are reduced."""

IDS = (torch.int16, torch.int32, torch.int64)
"""Types of tensors that may hold the ids of tokens."""

PRECISE = 100_000_000
"""Number of parameters of a copy up to which it computes in float64."""

_ROWS = 512
"""About how many rows of a vocabulary a copy keeps."""

_TOKENS = 32
"""About how long the sequences are that a copy is run on."""

_TOKENS_PER_EXPERT = 8
"""About how many positions there are for each expert of a list, so that each gets tokens."""

_WINDOW = 256
"""Attention windows up to this length are exceeded by the sequences that a copy is run on."""


def is_large(model: nn.Module) -> bool:
    """Whether copies of a model are reduced."""
    return sum(parameter.numel() for parameter in model.parameters()) > LARGE


@dataclass(frozen=True)
class Reduction:
    """How a copy is smaller than its model, and its example than the batch.

    Attributes:
        skips_repeats: equal blocks share one module, and are computed at its first two calls.
        vocabularies: number of rows of each vocabulary, and how many of them the copy has.
        lengths: length of the example's sequences, and of those that the copy is run on; None leaves them.
        samples: how many samples of a batch are kept at most; None for all.
    """

    skips_repeats: bool = False
    vocabularies: Mapping[int, int] = field(default_factory=dict)
    lengths: tuple[int, int] | None = None
    samples: int | None = None

    @staticmethod
    def variants(model: nn.Module, tp: int, length: int | None, longest: int = 0) -> list[Reduction]:
        """The reductions to try, the smallest first; the last one leaves the model as it is.

        Args:
            model: the model.
            tp: number of tensor-parallel ranks; what is left of a vocabulary and a length has their remainder.
            length: of the example's sequences, if it is made of tokens.
            longest: the largest dim of its tensors: tables of positions keep as many rows.
        """
        if not is_large(model):
            return [Reduction()]
        rows = _short_vocabularies(model, tp, max(_ROWS, longest))
        found = [Reduction(True, rows, samples=2), Reduction(True, samples=2), Reduction()]
        if length is not None and (kept := _short_length(model, tp, length)) is not None:
            rows = _short_vocabularies(model, tp, max(_ROWS, kept if longest == length else longest))
            found[:0] = [Reduction(True, rows, (length, kept), samples=2)]
            found[2:2] = [Reduction(True, {}, (length, kept), samples=2)]
        return [one for at, one in enumerate(found) if one not in found[:at]]

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """What is left of one of the example's tensors: the first positions, and ids inside the short vocabularies."""
        if self.lengths is not None:
            whole, kept = self.lengths
            for dim in range(1, tensor.ndim):
                if tensor.shape[dim] == whole:
                    tensor = tensor.narrow(dim, 0, kept)
        if self.vocabularies and tensor.dtype in IDS:
            tensor = torch.where(tensor >= min(self.vocabularies.values()), self.of_id(tensor), tensor)
        return tensor

    def numel(self, model: nn.Module) -> int:
        """How many parameters a copy has."""
        left_out = (
            {id(p) for block in _repeated_blocks(model) for p in block.parameters()} if self.skips_repeats else set()
        )
        return sum(
            math.prod(self.vocabularies.get(size, size) for size in parameter.shape)
            for parameter in model.parameters()
            if id(parameter) not in left_out
        )

    def dtype(self, model: nn.Module) -> torch.dtype:
        """The type in which a copy computes: float64, or float32 where it would need much memory and time."""
        return torch.float64 if self.numel(model) <= PRECISE else torch.float32

    def of_id(self, token: Any) -> Any:
        """The id that stands for a token's in the short vocabularies."""
        return token % min(self.vocabularies.values())


WHOLE = Reduction()
"""A copy as large as its model."""


# ---- vocabulary and length -------------------------------------------------------------------------------------


def _short_vocabularies(model: nn.Module, tp: int, least: int) -> dict[int, int]:
    """Rows of each large embedding outside the repeated blocks, and how many a copy has: at least ``least``, as many modulo ``tp``.

    Left out are rows that are as many as the features of something else, which would be cut with them.
    """
    repeated = _in_repeated_blocks(model)
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    features = {size for m in model.modules() if id(m) in repeated for p in m.parameters(False) for size in p.shape}
    features |= {module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)}
    found: dict[int, int] = {}
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or id(module) in repeated or module.num_embeddings in features:
            continue
        if (rows := module.num_embeddings) < 4 * least:
            continue
        kept = -(-least // tp) * tp + rows % tp
        while kept in sizes or kept in found.values():  # a size of its own, so that nothing takes it for another dim
            kept += tp
        if 2 * kept < rows:
            found.setdefault(rows, kept)
    return found


def _short_length(model: nn.Module, tp: int, length: int) -> int | None:
    """A length of a few dozen tokens, with the remainder of the whole one by ``2 tp``; None if it is not shorter.

    It is above the model's short windows, and gives each expert of a list some tokens.
    """
    windows = (window + 1 for window in _windows(model) if window <= _WINDOW)
    least = max([_TOKENS, _TOKENS_PER_EXPERT * _most_experts(model), *windows])
    kept = -(-least // (2 * tp)) * 2 * tp + length % (2 * tp)
    return kept if kept < length else None


def _most_experts(model: nn.Module) -> int:
    """How many modules of one class the longest list inside a repeated block holds; 0 without such lists."""
    repeated = _in_repeated_blocks(model)
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and id(module) in repeated)
    return max((len(module) for module in lists if len({type(one) for one in module}) == 1), default=0)


def _windows(model: nn.Module) -> Iterator[int]:
    """Lengths of windows and chunks of attention, as modules and configs name them."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for key, value in getattr(holder, "__dict__", {}).items():
                if isinstance(value, int) and not isinstance(value, bool) and _WINDOW_NAME.search(key):
                    yield value


_WINDOW_NAME = re.compile(r"window|chunk|local", re.IGNORECASE)


def cut_vocabularies(model: nn.Module, vocabularies: Mapping[int, int], memo: dict[int, Any]) -> None:
    """Write into ``memo`` that tensors over a vocabulary are copied with its first rows only.

    Args:
        model: the model that will be copied.
        vocabularies: rows, and how many the copy has.
        memo: for ``copy.deepcopy``.
    """
    repeated = _in_repeated_blocks(model)
    for module in model.modules():
        if id(module) in repeated:
            continue
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or id(tensor) in memo or not any(size in vocabularies for size in tensor.shape):
                continue
            part = tensor.detach()
            for dim, size in enumerate(tensor.shape):
                part = part.narrow(dim, 0, vocabularies.get(size, size))
            part = part.clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(part, tensor.requires_grad) if is_parameter else part
            memo.setdefault(id(memo), []).append(tensor)  # as deepcopy does, so that the id stays the tensor's


def tell_vocabularies(copied: nn.Module, original: nn.Module, reduction: Reduction) -> None:
    """Give the copy's attributes and configs the sizes of the short vocabularies, in place, and ids inside them.

    Args:
        copied: the copy.
        original: its model; objects that both hold are left alone.
        reduction: how the copy is smaller.
    """
    shared = {id(value) for value in _holders(original)}
    smallest, largest = min(reduction.vocabularies.values()), max(reduction.vocabularies)
    for holder in _holders(copied):
        if id(holder) in shared:
            continue
        values = holder if isinstance(holder, dict) else vars(holder)
        for key, value in list(values.items()):
            if type(value) is not int or not isinstance(key, str):
                continue
            if value in reduction.vocabularies and not _OTHER_SIZE.search(key):
                values[key] = reduction.vocabularies[value]
            elif smallest <= value < largest and _TOKEN_NAME.search(key):
                values[key] = reduction.of_id(value)


_OTHER_SIZE = re.compile(
    r"hidden|inter|ffn|ff_|dim|width|position|ctx|context|len|window|block|in_features", re.IGNORECASE
)
"""Names of attributes that are no vocabulary's size, though they may be equal to one."""

_TOKEN_NAME = re.compile(r"(id|idx|index|token|pad|mask|bos|eos|cls|sep|unk|sos)$", re.IGNORECASE)
"""Names of attributes that hold the id of a token."""


def _holders(model: nn.Module) -> Iterator[Any]:
    """A model's modules, and the configs and dictionaries that they hold, two levels deep, each once."""
    seen: set[int] = set()
    level: list[Any] = list(model.modules())
    for _ in range(3):
        below: list[Any] = []
        for holder in level:
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            yield holder
            values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
            below += [value for value in values.values() if _is_settings(value)]
        level = below


def _is_settings(value: Any) -> bool:
    """Whether a value may be a config: an object with attributes, or a dictionary, that is no tensor, class or module."""
    if isinstance(value, dict):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type) and not callable(value)


# ---- depth -----------------------------------------------------------------------------------------------------


def kind_of(module: nn.Module, decisive: dict[type, frozenset[str]] | None = None) -> Any:
    """A key that is equal for blocks of a stack that are alike: classes, shapes, hooks and settings.

    A block's own index counts only if its code decides by it; most blocks merely hand it to a cache.

    Args:
        module: the block.
        decisive: what is known of the code of classes; kept by who asks for several blocks, since source is slow to read.
    """
    decisive = {} if decisive is None else decisive

    def decides(kind: type, key: str) -> bool:
        if kind not in decisive:
            decisive[kind] = _attributes_that_decide(kind)
        return key in decisive[kind]

    def settings(part: nn.Module) -> tuple[Any, ...]:
        return tuple(
            (key, _setting(value))
            for key, value in sorted(vars(part).items())
            if key not in _TOLD_OTHERWISE and (not _INDEX.search(key) or decides(type(part), key))
        )

    return tuple(
        (
            name,
            type(part),
            settings(part),
            tuple(
                (n, tuple(t.shape), t.requires_grad)
                for n, t in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
            ),
        )
        for name, part in module.named_modules()
    )


_TOLD_OTHERWISE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
"""Attributes of modules that say nothing of their own, or that a kind has anyway."""


def _setting(value: Any, depth: int = 3) -> Any:
    """A key that is equal for values that let a block do the same.

    Numbers, functions, containers and configs are told by their content, all else by its identity.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device):
        return type(value), repr(value)
    if depth and isinstance(value, list | tuple):
        return type(value), tuple(_setting(one, depth - 1) for one in value)
    if depth and isinstance(value, dict):
        return type(value), tuple((_setting(key, 0), _setting(one, depth - 1)) for key, one in value.items())
    if isinstance(value, set | frozenset):
        return type(value), tuple(sorted(map(str, value)))
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, types.MethodType):
        return "method", value.__func__
    if depth and isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        return "function", value.__code__, _setting((value.__defaults__, value.__kwdefaults__, held), depth - 1)
    if depth and isinstance(value, partial):
        return "partial", _setting((value.func, value.args, value.keywords), depth)
    if depth and _is_settings(value):
        return type(value), _setting(vars(value), depth - 1)
    return type(value), id(value)


_INDEX = re.compile(r"(idx|index|layer_id|layer_number|depth)$", re.IGNORECASE)
"""Names of attributes that hold a block's own index in its stack."""

_INDEX_READ = re.compile(r"\.\w*(idx|index|layer_id|layer_number|depth)\b", re.IGNORECASE)
"""How such an attribute is read."""


def _attributes_that_decide(kind: type) -> frozenset[str]:
    """Names of the attributes of ``self`` that a class's methods, but not its constructor, may decide by.

    Those are left out that are only handed to a cache, printed, or part of a number that is neither compared nor looked up by.
    """
    found: set[str] = set()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        if not base.__module__.startswith("torch.") and _INDEX_READ.search(source):
            found |= _names_decided_by(source)
    return frozenset(found)


def _names_decided_by(source: str) -> set[str]:
    """The same for the source of one class."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:
        return set()
    around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    return {
        node.attr
        for method in ast.walk(tree)
        if isinstance(method, ast.FunctionDef) and method.name != "__init__" and method.args.args
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _INDEX.search(node.attr)
        if isinstance(node.value, ast.Name) and node.value.id == method.args.args[0].arg and _decides(node, around)
    }


def _decides(value: ast.AST, around: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether code may do one thing or another by a value.

    Args:
        value: where it is read.
        around: for each part of the code, what it is a part of.
    """
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


_HARMLESS = re.compile(r"cache|past|kv|log|warn|print|^(float|str|repr|super)")
"""Functions that a block may give its index to without deciding by it."""


def _stacks(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
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
    """Write into ``memo`` that equal blocks of a stack are copied as one module, so that they need the memory of one.

    Args:
        model: the model that will be copied.
        rules: what a plan says of modules and parameters, by name; blocks of which it says different things are not equal.
        memo: for ``copy.deepcopy``.
    """
    decisive: dict[type, frozenset[str]] = {}
    for blocks in _stacks(model):
        first: dict[Any, Any] = {}
        last = next(reversed(blocks), "")
        for name, block in blocks.items():
            if id(block) in memo:
                continue
            told = tuple((key[len(name) :], rule) for key, rule in rules.items() if inside(key, name))
            # The last one is a module of its own: activations may become whole behind it, but not between the blocks.
            kind = kind_of(block, decisive), told, name == last
            if kind not in first:
                first[kind] = copy.deepcopy(block, memo)
            memo[id(block)] = first[kind]


def _repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks that a copy has no module of its own for, since an earlier one is alike."""
    decisive: dict[type, frozenset[str]] = {}
    for blocks in _stacks(model):
        first: dict[Any, nn.Module] = {}
        last = next(reversed(blocks), "")
        for name, block in blocks.items():
            if first.setdefault((kind_of(block, decisive), name == last), block) is not block:
                yield block


def _in_repeated_blocks(model: nn.Module) -> set[int]:
    """Ids of all modules inside blocks of which a stack has several of one class."""
    found: set[int] = set()
    for blocks in _stacks(model):
        kinds = [type(block) for block in blocks.values()]
        found |= {id(part) for block in blocks.values() if kinds.count(type(block)) > 1 for part in block.modules()}
    return found


class Repeats:
    """The blocks of a copy that stand for more than two of the model, while only their first two calls are computed.

    Later calls hand on the activation as it is. When the module that runs the
    blocks is called once more (on another input), counting begins again.

    Args:
        model: the copy; None if every call is to be computed.
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
    """A forward of which the first two calls of each form are computed; in a later one the activation goes through as it is.

    Calls are of one form if they pass tensors of the same shapes, and everything else alike.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._last: dict[Any, Any] = {}
        self.calls: Counter[Any] = Counter()
        self.skips = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        form = _form((args, kwargs))
        self.calls[form] += 1
        if self.calls[form] <= 2 or not self.skips:
            self._last[form] = self._forward(*args, **kwargs)
            return self._last[form]
        return _passed_through(self._last[form], (*args, *kwargs.values()))


def _form(value: Any) -> Any:
    """A key that is equal for arguments of one form."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return type(value), tuple(_form(one) for one in value)
    if isinstance(value, dict):
        return type(value), tuple((str(key), _form(one)) for key, one in value.items())
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), repr(value)
    return (type(value), id(value)) if callable(value) else type(value)


def _passed_through(out: Any, given: Sequence[Any]) -> Any:
    """An earlier output with the activation that a call was given in its place, so that gradients reach what made that.

    Args:
        out: the earlier output.
        given: the arguments of the call.
    """
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
