"""Embeddings and heads over a vocabulary, found on a model without running it, and the rules that shard them.

Whatever this finds is right to shard, since a sharded embedding or head computes what the whole one does; what it must not take is
a weight that other code reads past its module. The self-check sees that, and the vocabulary then stays whole.
"""

from __future__ import annotations

import itertools
import re
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from torch import Tensor, nn

from lightning_seqpar.config import PlanSpec
from lightning_seqpar.distributed.autograd import has_tensor_hooks
from lightning_seqpar.layout.linear_kind import BASE, is_adapted
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.plan.sharding_plan import ShardingPlan, read_plans
from lightning_seqpar.releases import is_lightnings
from lightning_seqpar.styles.replace import VocabRule, unfit_for_vocab
from lightning_seqpar.styles.style import PlannedModel

SOURCE = "vocabulary"
"""Source of the plan that is added."""
OWN_PLAN = "your plan leaves it whole"
"""Why a vocabulary is whole that a plan which the user wrote whole does not shard."""
VOCAB_OFF = "vocab=False says so"
"""Why a vocabulary is whole where the user's switch says so."""

_NO_VOCABULARY = {"pos", "position", "positions", "positional", "wpe", "type", "types", "segment", "segments", "time", "timestep",
                  "timesteps", "rel", "relative", "class", "classes", "label", "labels"}  # fmt: skip
"""Words in the names of embeddings that are not over a vocabulary."""

_VOCABULARY = {"wte", "tok", "toks", "token", "tokens", "word", "words", "subword", "subwords", "vocab", "vocabulary", "byte",
               "bytes", "char", "chars"}  # fmt: skip
"""Words in the names of embeddings that are."""

_EMBEDDING = {"embed", "embeds", "emb", "embs", "embedding", "embeddings", "embedder", "lookup", "shared", "encoder",
              "decoder"}  # fmt: skip
"""Words that say no more than that a module is an embedding; the word of the module around it counts too."""

_HEAD = {"head", "logits", "unembed", "unembedding", "output", "out", "decoder", "generator", "classifier",
         "predictions"}  # fmt: skip
"""Words in the names of heads."""

_COUNT = re.compile(r"vocab|voc_size|n_?tokens?$|num_?tokens?$|n_?words$|dictionary_size", re.IGNORECASE)
"""Names of attributes that say how many tokens a vocabulary has."""

_LENGTH = re.compile(r"max_(pos|seq|len|source|target)|position|block_size|context|seq_?len|max_?len", re.IGNORECASE)
"""Names of attributes that say how many positions a sequence has."""

_WRAPPERS = (BASE, "original_module", "modules_to_save")  # names that PEFT puts between a module's own name and the module


@dataclass(frozen=True)
class VocabularyChoice:
    """What :func:`with_vocabulary` returns."""

    plans: list[ShardingPlan]  # with the one that shards the vocabulary among them if anything is to be sharded
    outcome: str  # what is sharded, or why nothing is, in a few words
    whole: list[str] = field(default_factory=list)  # for each module over a vocabulary that stays whole, why
    reasons: dict[str, str] = field(default_factory=dict)  # of every such module; empty if it is sharded

    @property
    def lines(self) -> list[str]:
        """All of it, for the start-up summary."""
        return [f"vocabulary: {text}" for text in (self.outcome, *self.whole) if text]


@dataclass
class _Found:
    """An embedding or a head over a vocabulary."""

    name: str
    module: nn.Embedding | nn.Linear
    is_certain: bool  # more than a name or a number says so

    @property
    def rows(self) -> int:
        return _rows(self.module)


def with_vocabulary(
    plans: Sequence[ShardingPlan],
    spec: str | PlanSpec,
    model: nn.Module,
    size: int,
    sp: bool,
    *,
    certain: bool = False,
    callbacks: Sequence[object] = (),
) -> VocabularyChoice:
    """The plans of a model, with rules for its embeddings and heads over a vocabulary between the base's and the user's own.

    A rule of the user's for one of these modules decides about it, and about what is tied to it. A plan that the user wrote
    whole (a file, or ``base: none``) says itself what is sharded: nothing is added.
    With ``certain``, for plans that nothing proves, only what accessors, ties or equal numbers of rows show to be a vocabulary is
    taken. One of the trainer's ``callbacks`` that reads a weight, as a hook of the model may, leaves the vocabulary whole.
    """
    base = spec if isinstance(spec, str) else spec.base
    if base == "none" or base.endswith((".yaml", ".yml")):
        names = find_vocabulary(plans, model, size, sp, certain=certain)
        return VocabularyChoice(list(plans), "as your plan says", reasons=dict.fromkeys(names, OWN_PLAN))
    planned = _planned(plans, model, size, sp)
    if planned is None:
        return VocabularyChoice(list(plans), "")  # carrying it out raises this, with its own message
    found = _Search(planned).found(certain)
    reasons = dict.fromkeys((one.name for one in found), "")
    reader = weight_reader([model, *callbacks]) if found else None
    sharded: dict[int, list[_Found]] = defaultdict(list)
    whole = []
    tied: dict[int, list[_Found]] = defaultdict(list)  # modules that share a weight are sharded together or not at all
    for one in found:
        tied[_weight_id(one.module)].append(one)
    for group in tied.values():
        reason = _why_whole(group, planned)
        if reader is not None and not any(one.name in planned.named("vocab") for one in group):
            reason = reason or (
                f"{reader} names a weight, of which it would see this rank's part; if it is not this one, say so by a rule, "
                f"{{pattern: {group[0].name}, style: vocab}}"
            )
        if reason is None:
            sharded[group[0].rows] += group
        else:
            whole.append(f"{', '.join(one.name for one in group)} whole: {reason}")
            reasons |= dict.fromkeys((one.name for one in group), reason)
    outcome = "" if found else "none found outside the blocks"
    if sharded:
        outcome = f"sharded: {'; '.join(_shown(*one, size) for one in sharded.items())}"
    named = planned.named("vocab")
    rules = [VocabRule(pattern=one.name) for group in sharded.values() for one in group if one.name not in named]
    added = [ShardingPlan(tuple(rules), source=SOURCE)] if rules else []
    at = len(plans) - isinstance(spec, PlanSpec)  # in front of the user's own
    return VocabularyChoice([*plans[:at], *added, *plans[at:]], outcome, whole, reasons)


def find_vocabulary(
    plans: Sequence[ShardingPlan], model: nn.Module, size: int, sp: bool, *, certain: bool = False
) -> list[str]:
    """Names of the embeddings and heads over a vocabulary, whether they can be sharded or not; arguments as above."""
    planned = _planned(plans, model, size, sp)
    return [] if planned is None else [one.name for one in _Search(planned).found(certain)]


def _planned(plans: Sequence[ShardingPlan], model: nn.Module, size: int, sp: bool) -> PlannedModel | None:
    """The model with the plans' rules; None if they can't be carried out."""
    try:
        return read_plans(model, plans, size, sp)
    except ValueError:
        return None


def _shown(rows: int, found: Sequence[_Found], size: int) -> str:
    """Names of modules over vocabularies of one size, and how that is dealt out to ``size`` ranks."""
    part = -(-rows // size)
    padding = f", {part * size - rows} more as padding" if part * size > rows else ""
    return f"{', '.join(one.name for one in found)} ({rows:,} rows, {part:,} on a rank{padding})"


def without_vocabulary(plans: Sequence[ShardingPlan]) -> list[ShardingPlan]:
    """The plans without what :func:`with_vocabulary` added."""
    return [plan for plan in plans if plan.source != SOURCE]


def not_proved(names: Sequence[str], plans: Sequence[ShardingPlan], model: nn.Module) -> list[str]:
    """Of the modules ``names``, which an example did not run, those of which the run of others proves nothing.

    An embedding or a head that was found is proved by one that it is tied to; and of the original of a module that PEFT trains
    a copy of (``modules_to_save``), by the copy.
    """
    found = {rule.pattern for plan in plans if plan.source == SOURCE for rule in plan.rules}
    ran = {id(model.get_submodule(name).weight) for name in found.difference(names)}
    return [
        name
        for name in names
        if name not in found or not (id(model.get_submodule(name).weight) in ran or name.endswith(".original_module"))
    ]


# ---- what is over a vocabulary -----------------------------------------------------------------------------------


class _Search:
    """A look at the embeddings and linears outside the sequence regions of a model."""

    def __init__(self, planned: PlannedModel) -> None:
        self._planned = planned
        outside = {
            name: module
            for name, module in planned.modules.items()
            if planned.canonical[name] == name and planned.stack_reaching(name) is None and _has_matrix(module)
        }
        self._embeddings = {name: one for name, one in outside.items() if isinstance(one, nn.Embedding)}
        self._linears = {name: one for name, one in outside.items() if isinstance(one, nn.Linear)}
        self._accessed = {id(one) for one in _accessed(planned.model)}
        self._found: dict[str, _Found] = {}

    def found(self, certain: bool) -> list[_Found]:
        """What is over a vocabulary, in the model's order; with ``certain`` not what names or numbers alone say."""
        for name, embedding in self._embeddings.items():
            words = _words(name)
            if id(embedding) in self._accessed or self._is_tied(embedding):
                self._found[name] = _Found(name, embedding, True)
            elif words & _NO_VOCABULARY:
                continue
            elif not self._count_named(name, embedding.num_embeddings, _LENGTH) and self._matches_a_head(embedding):
                self._found[name] = _Found(name, embedding, True)
            elif words & _VOCABULARY or self._count_named(name, embedding.num_embeddings, _COUNT):
                self._found[name] = _Found(name, embedding, False)
        self._take_the_largest()
        rows = {one.rows: one.is_certain for one in self._found.values()}
        for name, linear in self._linears.items():
            if id(linear) in self._accessed or self._is_tied(linear):
                self._found[name] = _Found(name, linear, True)
            elif linear.out_features in rows and self._may_be_head(name, linear):
                self._found[name] = _Found(name, linear, rows[linear.out_features] or self._matches_a_head(linear))
            elif _words(name) & _HEAD and self._count_named(name, linear.out_features, _COUNT):
                self._found[name] = _Found(name, linear, False)
        weights = {_weight_id(one.module): one.is_certain for one in self._found.values()}
        modules: dict[str, nn.Embedding | nn.Linear] = {**self._embeddings, **self._linears}
        for name, module in modules.items():
            if name not in self._found and (weight := _weight_id(module)) in weights:
                self._found[name] = _Found(name, module, weights[weight])
        return [one for one in self._found.values() if one.rows > 1 and (not certain or self._is_safe(one))]

    def _is_safe(self, one: _Found) -> bool:
        """Whether it is certain, and nothing stands around it that is no plain low-rank adapter, which may read the weight."""
        around, _, leaf = one.name.rpartition(".")
        return one.is_certain and (leaf != BASE or is_adapted(self._planned.modules[around]))

    def _take_the_largest(self) -> None:
        """If no embedding speaks for itself, the one with the most rows whose name says that it is just an embedding."""
        plain = {
            name: one
            for name, one in self._embeddings.items()
            if _words(name) & _EMBEDDING and not _words(name) & _NO_VOCABULARY
            if not self._count_named(name, one.num_embeddings, _LENGTH)
        }
        if plain and not any(isinstance(one.module, nn.Embedding) for one in self._found.values()):
            name = max(plain, key=lambda one: plain[one].num_embeddings)
            self._found[name] = _Found(name, plain[name], False)

    def _is_tied(self, module: nn.Module) -> bool:
        """Whether the weight is that of an embedding and of a linear."""
        return all(
            any(_weight_id(one) == _weight_id(module) for one in held.values()) for held in (self._embeddings, self._linears)
        )

    def _matches_a_head(self, module: nn.Embedding | nn.Linear) -> bool:
        """Whether a head, and an embedding whose name does not say positions, have as many rows as this."""
        rows = _rows(module)
        heads = any(one.out_features == rows and self._may_be_head(n, one) for n, one in self._linears.items())
        return heads and any(
            one.num_embeddings == rows and not _words(n) & _NO_VOCABULARY for n, one in self._embeddings.items()
        )

    @staticmethod
    def _may_be_head(name: str, linear: nn.Linear) -> bool:
        """Whether a linear that has the rows of a vocabulary is a head; a square one may be anything, unless it is called so."""
        return linear.in_features != linear.out_features or bool(_words(name) & _HEAD)

    def _count_named(self, name: str, rows: int, pattern: re.Pattern[str]) -> bool:
        """Whether the module, one around it, or its config has a number ``rows`` under a name that the pattern finds."""
        path = name.split(".")
        for at in range(len(path) + 1):
            module = self._planned.modules[".".join(path[:at])]
            for key, value in _numbers_of(module):
                if value == rows and pattern.search(key):
                    return True
        return False


def _has_matrix(module: nn.Module) -> TypeGuard[nn.Embedding | nn.Linear]:
    if not isinstance(module, nn.Embedding | nn.Linear):
        return False
    weight = _held_weight(module)
    return hasattr(module, "parametrizations") if weight is None else weight.ndim == 2


def _held_weight(module: nn.Module) -> Tensor | None:
    """The weight of a module; None if it is computed at each read, which may draw or count (the steps of a spectral norm)."""
    for held in (module._parameters, module._buffers, vars(module)):
        if isinstance(weight := held.get("weight"), Tensor):
            return weight
    return None


def _weight_id(module: nn.Module) -> int:
    """What modules that share a weight have in common."""
    weight = _held_weight(module)
    return id(module if weight is None else weight)


def _rows(module: nn.Embedding | nn.Linear) -> int:
    """Rows of a weight: the size of a vocabulary."""
    if (weight := _held_weight(module)) is not None:
        return weight.shape[0]
    return module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features


def _accessed(model: nn.Module) -> Iterator[nn.Module]:
    """What the accessors of transformers return, on the model or any part of it; of an adapter, the modules in it."""
    for module in model.modules():
        for name in ("get_input_embeddings", "get_output_embeddings"):
            if not hasattr(type(module), name):
                continue
            try:
                found = getattr(module, name)()
            except Exception:  # a model without such a module raises what it likes: it has none
                continue
            if isinstance(found, nn.Module):
                own = _has_matrix(found)
                rows = _rows(found) if own else getattr(getattr(found, "weight", None), "shape", (0,))[0]  # type: ignore[arg-type]
                yield from (one for one in found.modules() if _has_matrix(one) and _rows(one) == rows)


def _numbers_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Whole numbers among the attributes of a module, and of the configs that it holds."""
    held = vars(module)
    settings = [held.get(key) for key in ("config", "cfg", "args", "hparams", "_hparams", "settings")]
    for place in (held, *settings):
        items: Any = place if isinstance(place, dict) else getattr(place, "__dict__", {})
        yield from ((str(key), value) for key, value in items.items() if type(value) is int)


def _words(name: str) -> set[str]:
    """The words of a module's own name; with the next one around it where it says no more than that it is an embedding."""
    path = [part for part in name.split(".") if part not in _WRAPPERS]
    if "modules_to_save" in name.split("."):
        path = path[:-1]  # the adapter's name
    words: set[str] = set()
    for part in reversed(path):
        own = set(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", part))
        words |= {word.lower() for word in own}
        if words - _EMBEDDING:
            break
    return words


# ---- what is sharded together, and what stays whole ------------------------------------------------------------------


def _why_whole(group: Sequence[_Found], planned: PlannedModel) -> str | None:
    """Why the modules of a group stay whole; None if they can be sharded."""
    names = {one.name for one in group}
    for one in group:
        if (unfit := unfit_for_vocab(one.module)) is not None:
            return unfit
        if (match := _deciding_rule(one.name, planned)) is not None:
            return f"a rule says {match!r}"
        for leaf, parameter in one.module.named_parameters(recurse=False):
            if has_tensor_hooks(parameter):
                return f"a hook on its {leaf}'s gradient may count rows, and would see a part of them"
            for other, held in planned.model.named_parameters(remove_duplicate=False):
                holder = other.rpartition(".")[0]
                if held is not parameter or planned.canonical[holder] in names:
                    continue
                if leaf == "bias" and inside(one.name, holder):  # BERT keeps its decoder's bias around it too
                    continue
                kind = type(planned.modules[holder]).__name__
                return f"its {leaf} is {other} too, which a {kind} reads"
    return None


def _deciding_rule(name: str, planned: PlannedModel) -> str | None:
    """The style of another rule than ``vocab`` that speaks of the module, one around it or its parameters; None if none does."""
    for match in planned.matches:
        rule = match.rule
        if rule.says_where_blocks_are or rule.style in ("vocab", "set", "exit"):
            continue
        if match.name == name or (match.of_tensor and match.name.rpartition(".")[0] == name):
            return rule.style
        if rule.undoes_inside and inside(name, match.name):
            return rule.style
    return None


_STEPS = {"backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping",
          "validation_step", "test_step", "predict_step"}  # fmt: skip
"""Methods of modules and callbacks that run while training or evaluating, beside those whose names begin with ``on_``."""

_WEIGHTS = {"weight", "get_input_embeddings", "get_output_embeddings"}
"""Names by which code comes to an embedding's or a head's weight."""

_PAST_THE_GRAPH = {"grad", "data", "no_grad"}
"""Names by which code reads or changes a weight past autograd."""


def weight_reader(owners: Iterable[object]) -> str | None:
    """The first hook or step, as ``Class.method``, whose code or that of what it calls names a weight; None if there is none.

    Of training steps only those that also name ``grad``, ``data`` or ``no_grad``. ``owners`` are a LightningModule and callbacks.
    """
    for owner in owners:
        for kind in itertools.takewhile(_is_the_users, type(owner).__mro__):
            for name, method in vars(kind).items():
                runs = name.startswith("on_") or name in _STEPS
                if not isinstance(method, types.FunctionType) or not (runs or name == "training_step"):
                    continue
                names = _names(method, owner, set())
                # What a training step reads of a weight for its loss is guarded in the graph; only past that it is not.
                if names & _WEIGHTS and (runs or names & _PAST_THE_GRAPH):
                    return f"{kind.__name__}.{name}"
    return None


def _is_the_users(kind: type) -> bool:
    """Whether a class of an object stands in front of Lightning's."""
    return kind is not object and not is_lightnings(kind.__module__)


def _names(function: types.FunctionType, owner: object, seen: set[int]) -> set[str]:
    """The names in a function's code, and in that of the methods of its object and the functions beside it that it calls."""
    seen.add(id(function))
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    for name in tuple(names):
        for called in (getattr(type(owner), name, None), function.__globals__.get(name)):
            if not isinstance(called, types.FunctionType) or called.__module__ != function.__module__:
                continue
            if id(called) not in seen:
                names |= _names(called, owner, seen)
    return names


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
