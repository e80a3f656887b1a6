"""How the copies of a large model are smaller than it: one block of each kind, a short vocabulary, a few dozen tokens.

Widths, heads and the remainders of what is dealt out over ranks stay as they are. A model whose code does not run at a smaller
vocabulary or length is copied with its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_seqpar.inference.block_kinds import in_repeated_blocks, is_settings, repeated_blocks

LARGE = 10_000_000  # parameters above which copies of a model are reduced
PRECISE = 100_000_000  # parameters of a copy up to which it computes in float64
IDS = (torch.int16, torch.int32, torch.int64)  # types of tensors that may hold the ids of tokens
_ROWS = 512  # about how many rows of a vocabulary a copy keeps
_TOKENS = 32  # about how long the sequences are that a copy is run on
_LONG = 256  # sequences up to this length are left as they are, if the model is small
_TOKENS_PER_EXPERT = 8  # about how many positions there are for each expert of a list, so that each gets tokens
_WINDOW = 256  # attention windows up to this length are exceeded by the sequences that a copy is run on


def is_large(model: nn.Module) -> bool:
    """Whether copies of a model are reduced."""
    return sum(parameter.numel() for parameter in model.parameters()) > LARGE


@dataclass(frozen=True)
class Reduction:
    """How a copy is smaller than its model, and its example than the batch."""

    skips_repeats: bool = False  # equal blocks share one module, and are computed at its first two calls
    # Number of rows of each vocabulary, and how many of them the copy has.
    vocabularies: Mapping[int, int] = field(default_factory=dict)
    # Length of the example's sequences, and of those that the copy is run on; None leaves them.
    lengths: tuple[int, int] | None = None
    samples: int | None = None  # how many samples of a batch are kept at most; None for all

    @staticmethod
    def variants(model: nn.Module, tp: int, length: int | None, longest: int = 0) -> list[Reduction]:
        """The reductions to try, the smallest first; the last one leaves the model as it is.

        ``tp`` is the number of ranks that share a sample (tp × cp): what is left of a vocabulary and a length has their remainder.
        ``length`` is that of the example's sequences, if it is made of tokens; tables of positions keep ``longest`` rows.
        """
        if not is_large(model):
            kept = _short_length(model, tp, length) if length is not None and length > _LONG else None
            return [Reduction()] if kept is None else [Reduction(lengths=(length or 0, kept)), Reduction()]
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
        """How many parameters a copy has on which a plan is carried out."""
        left_out = {id(p) for block in repeated_blocks(model) for p in block.parameters()} if self.skips_repeats else set()
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


WHOLE = Reduction()  # a copy as large as its model


def _short_vocabularies(model: nn.Module, tp: int, least: int) -> dict[int, int]:
    """Rows of each large embedding outside the repeated blocks, and how many a copy has: at least ``least``, as many modulo ``tp``.

    Left out are rows that are as many as the features of something else, which would be cut with them.
    """
    repeated = in_repeated_blocks(model)
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
    """A length above short windows, of some tokens an expert, with the whole one's remainder by ``2 tp``; None if not shorter."""
    repeated = in_repeated_blocks(model)
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and id(module) in repeated)
    experts = max((len(module) for module in lists if len({type(one) for one in module}) == 1), default=0)
    held = [vars(one) for m in model.modules() for one in (m, getattr(m, "config", None)) if hasattr(one, "__dict__")]
    sizes = [value for values in held for key, value in values.items() if type(value) is int and _CHUNK.search(key)]
    least = max([_TOKENS, _TOKENS_PER_EXPERT * experts, *(size + 1 for size in sizes if size <= _WINDOW)])
    kept = -(-least // (2 * tp)) * 2 * tp + length % (2 * tp)
    return kept if kept < length else None


_CHUNK = re.compile(r"window|chunk|local", re.IGNORECASE)  # names of lengths of windows and chunks of attention


def cut_vocabularies(model: nn.Module, vocabularies: Mapping[int, int], memo: dict[int, Any]) -> None:
    """Write into ``memo``, for ``copy.deepcopy``, that tensors over a vocabulary are copied with its first rows only."""
    repeated = in_repeated_blocks(model)
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
    """Give a copy's attributes and configs the sizes of the short vocabularies and ids inside them; not what its model holds."""
    shared = {id(value) for value in holders(original)}
    smallest, largest = min(reduction.vocabularies.values()), max(reduction.vocabularies)
    for holder in holders(copied):
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


_OTHER_SIZE = re.compile(r"hidden|inter|ffn|ff_|dim|width|position|ctx|context|len|window|block|in_features", re.IGNORECASE)
"""Names of attributes that are no vocabulary's size, though they may be equal to one."""

_TOKEN_NAME = re.compile(r"(id|idx|index|token|pad|mask|bos|eos|cls|sep|unk|sos)$", re.IGNORECASE)  # names of the ids of tokens


def holders(model: nn.Module) -> Iterator[Any]:
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
            below += [value for value in values.values() if isinstance(value, dict) or is_settings(value)]
        level = below
