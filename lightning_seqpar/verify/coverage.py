"""How much of a model a plan shards of what could be, and why the rest is whole: for the summary, its warnings, ``seqpar plan``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from lightning_seqpar.layout.linear_kind import DOWN, UP, is_adapted
from lightning_seqpar.layout.module_names import inside, match_pattern, outwards
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.plan.vocabulary import OWN_PLAN, SOURCE, VOCAB_OFF
from lightning_seqpar.styles.blocks import BlocksRule

_MOST_LINES = 5  # of reasons that are shown
_MOST_NAMES = 3  # in one such line
_MOST_CHARACTERS = 200  # of a reason, which may hold an error's text
_ENOUGH = 0.5  # the share of what could be sharded below which a warning says that it is little


@dataclass
class Explanations:
    """Why something is not sharded, as those who found the plans know it."""

    whole: dict[str, str] = field(default_factory=dict)  # by patterns of modules that inference left whole
    no_sp: dict[str, str] = field(default_factory=dict)  # by patterns of blocks that are given whole sequences
    rest: str = ""  # of what shipped plans leave whole, if nothing was inferred for it
    vocabulary: dict[str, str] = field(default_factory=dict)  # by embeddings and heads; empty for one that is sharded


class Origin(Enum):
    """Who wrote a plan, by what its source says; the value is why it leaves a module whole."""

    USER = OWN_PLAN
    FAMILY = "the shipped plan leaves it whole"
    INFERRED = (
        "inference made it neither a column nor a row: all ranks need what it makes whole, or no way to split it was found"
    )

    @classmethod
    def of(cls, source: str) -> Origin:
        """The origin of a plan with this source."""
        if source.startswith("family"):
            return cls.FAMILY
        return cls.INFERRED if source == "inferred" else cls.USER


@dataclass(frozen=True)
class Whole:
    """Tensors that could be sharded, or blocks with sequences that could be, which are whole for one reason."""

    names: tuple[str, ...]  # the blocks, or what the tensors are in, as patterns
    why: str  # the reason
    as_asked: bool  # whether the user's own rules or switches say so
    count: int = 0  # how many tensors they are
    numel: int = 0  # how many numbers they hold

    def __str__(self) -> str:
        tensors = f"{self.count} tensor{'s' * (self.count > 1)}"
        return f"{_listed(self.names)} ({tensors}, {self.numel:,} parameters): {self.why}"


@dataclass(frozen=True)
class Coverage:
    """How much of a model is sharded, of what could be (:func:`cover` defines it)."""

    sharded: int  # number of tensors that are sharded
    could_be: int  # number of tensors that could be, these included
    sharded_numel: int  # how many numbers they hold
    could_be_numel: int  # how many numbers those hold that could be
    whole: tuple[Whole, ...] = ()  # those that could be and are not, by reason, the largest first
    no_sp: tuple[Whole, ...] = ()  # blocks without sequence parallelism though ``sp`` is set, by reason
    sp: bool = False  # whether any block has sequence parallelism

    def __str__(self) -> str:
        share = 100 * self.sharded_numel // max(1, self.could_be_numel)
        return f"{self.sharded} of {self.could_be} tensors that could be are sharded ({share} % of their parameters)"

    @property
    def reasons(self) -> list[str]:
        """Why the rest is whole, a few lines."""
        more = len(self.whole) - _MOST_LINES
        return [f"whole: {one}" for one in self.whole[:_MOST_LINES]] + [f"whole: and {more} more"] * (more > 0)

    @property
    def sp_off(self) -> str:
        """Where sequence parallelism is off, and why; empty if it is on in every block, or not asked for."""
        return "; ".join(f"{_listed(one.names)}: {one.why}" for one in self.no_sp)

    @property
    def warnings(self) -> list[str]:
        """Warnings of what is off or whole though the user's own rules and switches do not say so."""
        told = []
        if off := [one for one in self.no_sp if not one.as_asked]:
            where = "in every block" if not self.sp and len(off) == len(self.no_sp) else "in some blocks"
            why = "; ".join(f"{_listed(one.names)}: {one.why}" for one in off)
            told.append(
                f"lightning_seqpar: sequence parallelism is off {where}: {why}. Tensor parallelism is on. plan={{'rules': [...]}} "
                "can say more: what mixes positions outside attention may be computed whole ({pattern: ..., style: whole}); "
                "sp=False says that it is meant so"
            )
        missed = [one for one in self.whole if not one.as_asked]
        if sum(one.numel for one in missed) > (1 - _ENOUGH) * self.could_be_numel:
            told.append(
                f"lightning_seqpar: {self}. {'; '.join(self.reasons)}. Every rank holds and computes the whole of these. seqpar "
                "plan shows each module; plan={'rules': [...]} can say how to shard them (columns and rows), or that they are "
                f"meant to be whole ({{pattern: {missed[0].names[0]}, style: whole}})"
            )
        return told


def cover(record: ShardedModel, plans: Sequence[ShardingPlan], known: Explanations, *, sp: bool) -> Coverage:
    """Count what is sharded, of what could be, and tell why the rest is whole.

    A tensor could be sharded if it is; or if it is a matrix of an ``nn.Linear`` or ``nn.MultiheadAttention``, of what computes
    like one in the blocks of the plans, or the weight of an embedding or a head over a vocabulary. A matrix has two dims or more
    that are longer than 1; those of embeddings, convolutions, norms and recurrent layers are none, nor is the half of an adapter
    that meets whole features.

    Vectors that are whole are not counted: norms can't be sharded, nor can the bias of a row; the bias of a column is sharded with
    its weight, and of a linear that is whole nobody knows which of both it would be.
    """
    look = _Look(record, plans, known)
    groups: dict[tuple[str, bool], list[str]] = defaultdict(list)
    sharded = []
    for name, layout in record.layout.items():
        if layout.is_sharded:
            sharded.append(name)
        elif look.could_be(name):
            groups[look.why_whole(name)].append(name)
    whole = [
        Whole(look.patterns(names), why, as_asked, len(names), look.numel(names)) for (why, as_asked), names in groups.items()
    ]
    no_sp = look.no_sp() if sp else {}
    numel = look.numel(sharded)
    return Coverage(
        len(sharded),
        len(sharded) + sum(one.count for one in whole),
        numel,
        numel + sum(one.numel for one in whole),
        tuple(sorted(whole, key=lambda one: -one.numel)),
        tuple(Whole(tuple(dict.fromkeys(map(starred, names))), why, asked) for (why, asked), names in no_sp.items()),
        any(region.sp for region in record.regions),
    )


class _Look:
    def __init__(self, record: ShardedModel, plans: Sequence[ShardingPlan], known: Explanations) -> None:
        self._record, self._known = record, known
        self._modules = dict(record.model.named_modules(remove_duplicate=False))
        origins = {Origin.of(plan.source) for plan in plans if plan.source != SOURCE}
        self._rest = Origin.USER if origins == {Origin.USER} else None  # who leaves out what stands in no blocks
        self._holders: dict[int, list[str]] = defaultdict(list)
        for name, parameter in record.model.named_parameters(remove_duplicate=False):
            self._holders[id(parameter)].append(name.rpartition(".")[0])
        self._blocks = {block for region in record.regions for block in region.blocks}

    def numel(self, names: Iterable[str]) -> int:
        return sum(torch.Size(self._record.layout[name].global_shape).numel() for name in names)

    def could_be(self, name: str) -> bool:
        """Whether a tensor that is whole could be sharded, as :func:`cover` defines it."""
        if self._vocabulary(name) is not None:
            return len(self._record.layout[name].global_shape) == 2
        holder, shape = name.rpartition(".")[0], self._record.layout[name].global_shape
        if sum(length > 1 for length in shape) < 2 or isinstance(self._modules[holder], _NO_LINEARS):
            return False
        linear = isinstance(self._modules[holder], nn.Linear | nn.MultiheadAttention)
        if not linear and not any(around in self._blocks for around in outwards(holder)):
            return False  # a table of positions
        adapters = [holder.rpartition(f".{half}.")[0] for half in (DOWN, UP) if f".{half}." in holder]
        return not any(is_adapted(self._modules[adapter]) for adapter in adapters)

    def _vocabulary(self, name: str) -> str | None:
        """Why a tensor of a module over a vocabulary is whole; None if no module that holds it is one."""
        holders = self._holders[id(self._record.layout.parameter(name))]
        return next((self._known.vocabulary[one] for one in holders if one in self._known.vocabulary), None)

    def why_whole(self, name: str) -> tuple[str, bool]:
        """Why a tensor that could be sharded is whole, and whether the user said so."""
        holder = name.rpartition(".")[0]
        wholes = [match for match in self._record.matches if match.rule.style == "whole" and inside(holder, match.name)]
        said = Origin.of(wholes[-1].source) if wholes else Origin.INFERRED
        if said is not Origin.INFERRED:
            return ("your rule", True) if said is Origin.USER else (said.value, False)
        if (why := self._vocabulary(name)) is not None:
            return (why, True) if why in (OWN_PLAN, VOCAB_OFF) else (f"vocab: {_short(why)}", False)
        if why := next(filter(None, (_reason(self._known.whole, around) for around in outwards(name))), None):
            return _short(why), False
        origin = self._origin_of_blocks(holder) or self._rest
        if origin is None:
            return _short(self._known.rest) or _NO_STACK, False
        return origin.value, origin is Origin.USER

    def _origin_of_blocks(self, name: str) -> Origin | None:
        """Who says that the module stands in blocks; None if no plan does."""
        matches = [match for match in self._record.matches if isinstance(match.rule, BlocksRule)]
        found = [Origin.of(match.source) for match in matches if inside(name, match.name)]
        return found[-1] if found else None

    def no_sp(self) -> dict[tuple[str, bool], list[str]]:
        out: dict[tuple[str, bool], list[str]] = defaultdict(list)
        for block in (block for region in self._record.regions if not region.sp for block in region.blocks):
            origin = self._origin_of_blocks(block)
            why = _short(_reason(self._known.no_sp, block) or "they are right on whole sequences only")
            if origin in (Origin.USER, Origin.FAMILY):
                why = f"{'your rule' if origin is Origin.USER else 'the shipped plan'} says sp: false"
            out[why, origin is Origin.USER].append(block)
        return out

    def patterns(self, tensors: Sequence[str]) -> tuple[str, ...]:
        """Patterns for the outermost modules around these tensors that hold none of the others."""
        given, items = set(tensors), self._record.layout.items()
        others = (name for name, layout in items if name not in given and (layout.is_sharded or self.could_be(name)))
        taken = {starred(around) for name in others for around in outwards(name.rpartition(".")[0])}
        found: dict[str, None] = {}
        for name in map(starred, tensors):
            free = [around for around in outwards(name.rpartition(".")[0]) if around not in taken]
            found[free[-1] if free else name] = None
        return tuple(found)


def _reason(reasons: Mapping[str, str], name: str) -> str | None:
    return next((why for pattern, why in reasons.items() if match_pattern(pattern, name)), None)


_NO_LINEARS = (
    *(nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd),
    *(nn.RNNBase, nn.RNNCellBase, nn.LayerNorm, nn.RMSNorm),
)
"""Modules whose matrices are no linears'."""
_NO_STACK = "it is in no stack of blocks that was found and that the example runs"  # the reason for what no plan speaks of


def starred(name: str) -> str:
    """A name with ``*`` for each index."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _short(why: str) -> str:
    """A reason on one line, cut off where it is long."""
    line = " ".join(why.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 4].rstrip()} ..."
