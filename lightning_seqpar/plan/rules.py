"""Sharding plans: data that says what happens to which module.

A plan is a list of rules, each a pattern over module names and a style with its options. Later rules win. Plans
are written by hand, shipped for families of models (``plans/*.yaml``) or, later, inferred; whatever made it, a
plan can be printed, edited and fed back.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field, ValidationError, field_validator
from torch import nn

from lightning_seqpar.config import FrozenModel, PlanSpec, nearest
from lightning_seqpar.layout.adapters import BASE, DOWN, UP, is_adapted, plain_modules
from lightning_seqpar.layout.module_names import Argument, compile_pattern, match_pattern

EXAMPLE = """\
rules:
- {pattern: "layers.*", style: blocks, dim: 1}                   # the repeated blocks; dim of the sequence
- {pattern: "layers.*.{attn,mlp}", style: gather}                # whole sequence in, once for all columns
- {pattern: "layers.*.attn.{q,k,v}", style: column, units: n_head}
- {pattern: "layers.*.attn", style: set, divide: [n_head]}       # head counts that forward reads
- {pattern: "layers.*.mlp.up", style: column}
- {pattern: "layers.*.{attn.out,mlp.down}", style: row}
- {pattern: "norm", style: exit}                                 # the region ends behind it"""


def parse_yaml(text: str) -> Any:
    """The data in a YAML text, by libyaml where there is one: the shipped plans are read at every start."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class Rule(FrozenModel):
    """What a pattern's modules become. Subclasses are the styles."""

    pattern: str
    """Module name with ``*`` for one name or index and ``{a,b}`` for alternatives; ``""`` is the root."""
    style: str

    @field_validator("pattern")
    @classmethod
    def pattern_is_well_formed(cls, value: str) -> str:
        if value and (".." in value or value.startswith(".") or value.endswith(".") or "**" in value):
            raise ValueError(
                f"pattern={value!r}: write names joined by single dots, '*' for one name, '{{a,b}}' for alternatives"
            )
        if value.count("{") != value.count("}"):
            raise ValueError(f"pattern={value!r}: a brace is not closed; write alternatives as '{{a,b}}'")
        return value

    def dump(self) -> dict[str, Any]:
        """The rule as plain data, defaults left out."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        return {"pattern": self.pattern, "style": self.style, **data}


class BlocksRule(Rule):
    """The repeated blocks: their path is the sequence region."""

    style: Literal["blocks"] = "blocks"
    dim: Literal[0, 1] = 1
    """Where the sequence is: 1 for ``[b, s, h]``, 0 for ``[s, b, h]`` or flattened tokens."""
    sp: bool = True
    """Off, these blocks see whole sequences even where the strategy has ``sp=True``: for a block whose own forward reads
    the sequence length."""


class ScatterRule(Rule):
    """Which argument of the blocks carries the activation into the region (default: the first)."""

    style: Literal["scatter"] = "scatter"
    arg: Argument = 0


class ExitRule(Rule):
    """The region ends at this module's output (default: at the last block's)."""

    style: Literal["exit"] = "exit"
    blocks: str | None = None
    """Pattern of the blocks whose region ends, where one module runs several stacks."""


def _each_once(value: tuple[Argument, ...], what: str) -> tuple[Argument, ...]:
    if not value or len(set(value)) != len(value):
        raise ValueError(f"args={list(value)}: name each argument to {what} once, by position or keyword")
    return value


class GatherRule(Rule):
    """Arguments gathered along the sequence where this module is entered."""

    style: Literal["gather"] = "gather"
    args: tuple[Argument, ...] = (0,)
    local_width: bool = False
    """The module sees a stand-in as wide as this rank's part, and its columns the gathered activation: for a forward that
    takes its head size from its input's last dim (``B, T, C = x.shape``)."""

    @field_validator("args")
    @classmethod
    def args_are_named_once(cls, value: tuple[Argument, ...]) -> tuple[Argument, ...]:
        return _each_once(value, "gather")


class CopyRule(Rule):
    """Arguments that are whole already where this module reads them, such as encoder states; their gradient is summed."""

    style: Literal["copy"] = "copy"
    args: tuple[Argument, ...] = (0,)

    @field_validator("args")
    @classmethod
    def args_are_named_once(cls, value: tuple[Argument, ...]) -> tuple[Argument, ...]:
        return _each_once(value, "copy")


class WholeRule(Rule):
    """A module inside the blocks that every rank computes whole: inputs gathered, output sliced again.

    For what mixes positions and can't be dealt out: attention with head counts written into it, a convolution.
    """

    style: Literal["whole"] = "whole"
    args: tuple[Argument, ...] = (0,)

    @field_validator("args")
    @classmethod
    def args_are_named_once(cls, value: tuple[Argument, ...]) -> tuple[Argument, ...]:
        return _each_once(value, "whole")


class LocalHeadsRule(Rule):
    """A parameter, a buffer or a module's arguments with a head or feature dim: each rank takes its part of it."""

    style: Literal["local_heads"] = "local_heads"
    dim: int = 0
    """The tensor dim of the heads; negative counts from the last."""
    args: tuple[Argument, ...] | None = None
    """Arguments of the module that the pattern names; none if it names a parameter or a buffer."""

    @field_validator("args")
    @classmethod
    def args_are_named_once(cls, value: tuple[Argument, ...] | None) -> tuple[Argument, ...] | None:
        return None if value is None else _each_once(value, "slice")


class FullWidthRule(Rule):
    """A norm over the whole sharded width: features gathered, the norm as it is, this rank's features again."""

    style: Literal["full_width"] = "full_width"


class ColumnRule(Rule):
    """Out-features sharded, of a linear or of a parameter that its module multiplies itself (einsum, stacked experts)."""

    style: Literal["column"] = "column"
    dim: int | None = None
    """For a parameter: the dim of its out-features; by default the last but one, as in ``[experts, out, in]``."""
    segments: int | tuple[int | str, ...] = 1
    """Parts of a fused projection: how many equal ones, their names, or their sizes. Named parts with units of their own are as
    long as these are many: ``segments: [q, k, v], units: [n_head, n_kv, n_kv]``."""
    units: int | str | tuple[int | str, ...] | None = None
    """Whole units (heads) in each part: a number, or an attribute of the module or the nearest one around it; a list
    gives each part its own. A part with fewer units than ranks is shared: tp must be a multiple of them then."""

    @field_validator("segments")
    @classmethod
    def segments_are_of_one_kind(cls, value: int | tuple[int | str, ...]) -> int | tuple[int | str, ...]:
        kinds = {type(part) for part in value} if isinstance(value, tuple) else set()
        if value in (0, ()) or (isinstance(value, int) and value < 0) or len(kinds) > 1:
            raise ValueError(
                f"segments={value!r}: write a number of equal parts (3), their names ([q, k, v]) or their sizes"
            )
        return value


class RowRule(Rule):
    """In-features sharded. A parameter's partial sums are reduced where its module returns."""

    style: Literal["row"] = "row"
    dim: int | None = None
    """For a parameter: the dim of its in-features; by default the last, as in ``[experts, out, in]``."""
    units: int | str | None = None
    """As for a column."""


class ReduceRule(Rule):
    """The rows inside this module leave partial sums, which are reduced where it returns: once for many experts."""

    style: Literal["reduce"] = "reduce"


class OnceRule(Rule):
    """A parameter that its module adds to partial sums, such as an output bias: the first rank alone adds it."""

    style: Literal["once"] = "once"


class VocabRule(Rule):
    """An embedding or a head outside the blocks, sharded by vocabulary; tied ones together."""

    style: Literal["vocab"] = "vocab"


class SetRule(Rule):
    """Attributes of the module instance that change under tensor parallelism."""

    style: Literal["set"] = "set"
    divide: tuple[str, ...] = ()
    """Attributes divided by tp, such as a head count. ``config.num_heads`` gives the module a view of its config, in which
    the number is divided; the config itself, which others share, stays as it is."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Attributes given a fixed value."""
    ratio: dict[str, tuple[str | int, str | int]] = Field(default_factory=dict)
    """Attributes that are a ratio of two counts: ``{num_key_value_groups: [num_heads, num_key_value_heads]}``. Where
    there are fewer kv heads than ranks, each rank has one of them."""


class ReplaceRule(Rule):
    """A module whose forward bypasses its submodules, replaced by an equal one.

    ``nn.MultiheadAttention``, and ``nn.TransformerEncoder``, which may pack its input past the layers.
    """

    style: Literal["replace"] = "replace"


_STYLES: dict[str, type[Rule]] = {
    "blocks": BlocksRule,
    "scatter": ScatterRule,
    "exit": ExitRule,
    "gather": GatherRule,
    "copy": CopyRule,
    "whole": WholeRule,
    "local_heads": LocalHeadsRule,
    "full_width": FullWidthRule,
    "column": ColumnRule,
    "row": RowRule,
    "reduce": ReduceRule,
    "once": OnceRule,
    "vocab": VocabRule,
    "set": SetRule,
    "replace": ReplaceRule,
}


def parse_rule(data: Any) -> Rule:
    """One rule from plain data.

    Raises:
        ValueError: for a missing or unknown style, or a wrong option; the message shows the rule.
    """
    if isinstance(data, Rule):
        return data
    if not isinstance(data, Mapping) or "style" not in data or "pattern" not in data:
        raise ValueError(
            f"plan rule {data!r}: a rule is a mapping with at least 'pattern' and 'style', such as "
            "{pattern: layers.*, style: blocks}"
        )
    style = data["style"]
    if style not in _STYLES:
        raise ValueError(
            f"plan rule {dict(data)}: no style {style!r}; did you mean {nearest(str(style), list(_STYLES))}?"
        )
    try:
        return _STYLES[style](**data)
    except ValidationError as error:
        causes = "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in error.errors())
        raise ValueError(f"plan rule {dict(data)}: {causes}") from None


@dataclass(frozen=True)
class Match:
    """A rule and the module of a model that it holds for."""

    name: str
    rule: Rule
    source: str
    of_tensor: bool = False


@dataclass(frozen=True)
class ShardingPlan:
    """Rules, and where they came from.

    Attributes:
        rules: in order; a later one wins.
        prefix: module path that the patterns are relative to.
        source: who wrote it, for the plan's table.
    """

    rules: tuple[Rule, ...]
    prefix: str = ""
    source: str = "plan"

    @classmethod
    def from_rules(cls, rules: Iterable[Any], *, prefix: str = "", source: str = "plan") -> ShardingPlan:
        """From plain data or :class:`Rule` objects."""
        return cls(tuple(parse_rule(rule) for rule in rules), prefix, source)

    @classmethod
    def from_yaml(cls, path: str | Path) -> ShardingPlan:
        """From a YAML file with a list ``rules``.

        Raises:
            ValueError: if the file is missing or holds no list of rules.
        """
        file = Path(path)
        if not file.is_file():
            raise ValueError(
                f"plan {str(path)!r}: no such file; give a YAML file, a family ({', '.join(families())}) or 'auto'"
            )
        try:
            data = parse_yaml(file.read_text())
        except yaml.YAMLError as error:
            raise ValueError(f"plan {str(path)!r} is not YAML: {error}") from None
        if isinstance(data, Mapping) and isinstance(data.get("plan"), Mapping):
            raise ValueError(
                f"plan {str(path)!r}: 'rules' stands under 'plan' there; in a plan's own file it stands at the top"
            )
        if not isinstance(data, Mapping) or not isinstance(data.get("rules"), list):
            raise ValueError(f"plan {str(path)!r}: it must hold a list 'rules', for example\n{EXAMPLE}")
        return cls.from_rules(data["rules"], source=str(path))

    @classmethod
    def from_yaml_text(cls, text: str, *, source: str = "inferred") -> ShardingPlan:
        """From what :meth:`to_yaml` wrote."""
        return cls.from_rules(parse_yaml(text)["rules"], source=source)

    def without_sp(self) -> ShardingPlan:
        """The same with whole sequences in every stack of blocks."""
        rules = [rule.model_copy(update={"sp": False}) if isinstance(rule, BlocksRule) else rule for rule in self.rules]
        return ShardingPlan(tuple(rules), self.prefix, self.source)

    def to_yaml(self) -> str:
        """The rules as YAML that :meth:`from_yaml` reads back; patterns carry the prefix."""
        lines = [
            yaml.safe_dump(
                {**rule.dump(), "pattern": self.full(rule.pattern)},
                default_flow_style=True,
                sort_keys=False,
                width=1000,
            ).strip()
            for rule in self.rules
        ]
        return "rules:\n" + "".join(f"- {line}\n" for line in lines)

    def full(self, pattern: str) -> str:
        """A pattern with the prefix."""
        return ".".join(part for part in (self.prefix, pattern) if part)

    def match(self, model: nn.Module) -> list[Match]:
        """Every rule with every module that it holds for, in the order of the rules and of the modules.

        Raises:
            ValueError: for a pattern that matches nothing; the message lists the nearest names.
        """
        names = _Names(model)
        found: list[Match] = []
        for rule in self.rules:
            hits, of_tensors = names.hits(rule, self.full(rule.pattern))
            if not hits:
                kind = "parameter or buffer" if of_tensors else "module"
                near = nearest(self.full(rule.pattern), [name for name in names.of(of_tensors) if name], 5)
                raise ValueError(
                    f"plan pattern {self.full(rule.pattern)!r} (style {rule.style}) matches no {kind}; near names: {near}"
                )
            found += [Match(name, rule, self.source, of_tensors) for name in hits]
        return found

    def hits(self, rule: Rule, model: nn.Module) -> bool:
        """Whether a rule holds for anything in a model."""
        return bool(_Names(model).hits(rule, self.full(rule.pattern))[0])


class _Names:
    """What a model's patterns can match."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
        self._parameters = [name for name, _ in model.named_parameters()]
        self._tensors = [*self._parameters, *(name for name, _ in model.named_buffers())]

    def of(self, tensors: bool) -> list[str]:
        """All names of one sort."""
        return self._tensors if tensors else self._modules

    def hits(self, rule: Rule, pattern: str) -> tuple[list[str], bool]:
        """The names that a rule holds for, and whether they are of tensors."""
        compiled = compile_pattern(pattern)
        of_tensors = isinstance(rule, OnceRule) or (isinstance(rule, LocalHeadsRule) and rule.args is None)
        found = [name for name in self.of(of_tensors) if compiled.fullmatch(name)]
        if not found and isinstance(rule, ColumnRule | RowRule):
            raw = [name for name in self._parameters if compiled.fullmatch(name)]
            return raw, bool(raw)
        return found, of_tensors


# ---- families --------------------------------------------------------------------------------------------------


class Family(FrozenModel):
    """A shipped plan and the models that it was proved on."""

    family: str
    class_name: str
    """Class of the module that the rules are relative to; with its package for a library's class."""
    parts: dict[str, tuple[str, ...]]
    """Every module of the family, by pattern, and the classes that it may have (``*``: any without parameters); any other
    module is foreign."""
    when: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Attributes by pattern, and the values that the plan holds for."""
    source: dict[str, str] = Field(default_factory=dict)
    """Digest of the source of each class: a plan is only right for the code that it was written for."""
    rules: tuple[dict[str, Any], ...]

    FOLDER: ClassVar[str] = "families"

    def is_named_by(self, module: nn.Module) -> bool:
        """Whether ``module`` has the family's class name."""
        kind = type(module)
        return self.class_name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")

    def mismatch(self, root: nn.Module) -> str | None:
        """Why the plan does not hold for ``root``; none if it does."""
        for name, module in plain_modules(root):
            if name == "":
                continue
            allowed = [classes for pattern, classes in self.parts.items() if match_pattern(pattern, name)]
            if not allowed:
                return f"{name!r} ({type(module).__name__}) is not a part of this family"
            plain = "*" in allowed[-1] and not any(True for _ in module.parameters())
            if not plain and type(module).__name__ not in allowed[-1]:
                return f"{name!r} is a {type(module).__name__}; the plan holds for {' or '.join(allowed[-1])}"
        for pattern, values in self.when.items():
            path, _, attribute = pattern.rpartition(".")
            for name, module in root.named_modules():
                if match_pattern(path, name) and getattr(module, attribute) not in values:
                    return f"{name}.{attribute} is {getattr(module, attribute)!r}; the plan holds for {list(values)}"
        return self._source_mismatch(root)

    def _source_mismatch(self, root: nn.Module) -> str | None:
        for kind in dict.fromkeys(type(module) for module in root.modules()):
            digest = self.source.get(kind.__name__)
            if digest is not None and source_digest(kind) != digest:
                return (
                    f"the source of {kind.__name__} differs from the one that the plan was proved on; if the rules still hold, "
                    f"name the plan yourself: plan={self.family!r}"
                )
        return None

    def plan(self, prefix: str) -> ShardingPlan:
        """The family's plan for the module at ``prefix``."""
        return ShardingPlan.from_rules(self.rules, prefix=prefix, source=f"family {self.family}")

    def plan_for(self, root: nn.Module, prefix: str) -> ShardingPlan:
        """The plan without the rules for parts that ``root``, the module at ``prefix``, does not have."""
        plan = self.plan("")
        kept = [rule for rule in plan.rules if plan.hits(rule, root)]
        return ShardingPlan(tuple(kept), prefix, plan.source)


def source_digest(kind: type) -> str:
    """Digest of a class's source; empty if the source can't be read."""
    try:
        return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


@functools.cache
def load_families() -> tuple[Family, ...]:
    """All shipped families, by name."""
    folder = resources.files("lightning_seqpar.plan") / Family.FOLDER
    files = sorted((item for item in folder.iterdir() if item.name.endswith(".yaml")), key=lambda item: item.name)
    return tuple(Family(**parse_yaml(item.read_text())) for item in files)


def families() -> list[str]:
    """Names of the shipped families."""
    return [family.family for family in load_families()]


@dataclass
class _Search:
    plans: list[ShardingPlan] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def _search_families(model: nn.Module, known: Sequence[Family], *, strict: bool) -> _Search:
    search = _Search()
    for name, module in model.named_modules():
        named = [family for family in known if family.is_named_by(module)]
        reasons: list[str] = []
        for family in named:
            reason = family.mismatch(module) if strict else None
            if reason is None:
                search.plans.append(family.plan_for(module, name))
                reasons = []
                break
            reasons.append(f"{name or type(model).__name__}: not {family.family}: {reason}")
        search.refused += reasons
    return search


def resolve_plans(
    spec: str | PlanSpec, model: nn.Module, infer: Callable[[], ShardingPlan] | None = None
) -> list[ShardingPlan]:
    """The plans that a config's ``plan`` stands for on ``model``: the base's, then the user's own rules.

    Args:
        spec: the config's field.
        model: the whole model.
        infer: makes a plan where ``auto`` finds no family.

    Raises:
        ValueError: if ``auto`` finds nothing (the message says how to write a plan), or a name is unknown.
    """
    if isinstance(spec, str):
        plans = _resolve_base(spec, model, infer)
    else:
        own = ShardingPlan.from_rules(spec.rules, source="your plan")
        plans = [*([] if spec.base == "none" else _resolve_base(spec.base, model, infer)), own]
    return [_with_adapters(plan, model) for plan in plans]


def _with_adapters(plan: ShardingPlan, model: nn.Module) -> ShardingPlan:
    """A rule for a linear with an adapter holds for the linear in it and for the half of the adapter that meets the shards.

    Of ``B(A(x))`` beside a column, ``B`` makes this rank's features; beside a row, ``A`` reads them, and its output is
    reduced like the row's own.
    """
    adapted = {name for name, module in model.named_modules() if is_adapted(module)}
    if not adapted:
        return plan
    rules: list[Rule] = []
    for rule in plan.rules:
        found = [n for n in adapted if match_pattern(plan.full(rule.pattern), n)]
        if not found or not isinstance(rule, ColumnRule | RowRule):
            rules.append(rule)
            continue
        named = [name for name, _ in model.named_modules() if match_pattern(plan.full(rule.pattern), name)]
        half = UP if isinstance(rule, ColumnRule) else DOWN
        if len(found) == len(named):
            patterns = [f"{rule.pattern}.{BASE}", f"{rule.pattern}.{half}.*"]
        else:  # some have none
            inner = [name.removeprefix(f"{plan.prefix}.") if plan.prefix else name for name in named]
            whole = [name if plan.full(name) not in adapted else f"{name}.{BASE}" for name in inner]
            patterns = [*whole, *(f"{name}.{half}.*" for name in inner if plan.full(name) in adapted)]
        rules += [rule.model_copy(update={"pattern": pattern}) for pattern in patterns]
    return ShardingPlan(tuple(rules), plan.prefix, plan.source)


def check_plan(spec: str | PlanSpec) -> None:
    """What can be said of a plan without a model: names, files, styles and options.

    Raises:
        ValueError: as :func:`resolve_plans` and :func:`parse_rule` do.
    """
    base = spec if isinstance(spec, str) else spec.base
    if isinstance(spec, PlanSpec):
        ShardingPlan.from_rules(spec.rules)
        if base == "none" and not spec.rules:
            raise ValueError("plan={'base': 'none'} without rules shards nothing; add rules, or use base: auto")
    if base.endswith((".yaml", ".yml")):
        ShardingPlan.from_yaml(base)
    elif base not in ("auto", "infer") and not (base == "none" and isinstance(spec, PlanSpec)):
        _family_named(base, load_families())


def _family_named(name: str, known: Sequence[Family]) -> Family:
    found = [family for family in known if family.family == name]
    if name == "none":
        raise ValueError("plan='none' has no rules; write plan={'base': 'none', 'rules': [...]}")
    if not found:
        names = ["auto", "infer", *(family.family for family in known)]
        raise ValueError(f"plan={name!r} is no family; did you mean {nearest(name, names, 1)}? (a file ends in .yaml)")
    return found[0]


def _resolve_base(base: str, model: nn.Module, infer: Callable[[], ShardingPlan] | None = None) -> list[ShardingPlan]:
    if base.endswith((".yaml", ".yml")):
        return [ShardingPlan.from_yaml(base)]
    if base == "infer":
        if infer is None:
            raise ValueError(
                "plan='infer' is found by a strategy, which has an example input; here name a plan, or use 'auto'"
            )
        return [infer()]
    known = load_families()
    if base == "auto":
        search = _search_families(model, known, strict=True)
        if search.plans:
            return search.plans
        if infer is not None:
            return [infer()]
        raise ValueError(_how_to_write_a_plan(model, known, search.refused))
    chosen = _family_named(base, known)
    search = _search_families(model, [chosen], strict=False)
    if not search.plans:
        raise ValueError(
            f"plan={base!r}: the model has no module of class {chosen.class_name}; use 'auto', a plan of your own, or a "
            "model of that family"
        )
    return search.plans


def _how_to_write_a_plan(model: nn.Module, known: Sequence[Family], refused: Sequence[str]) -> str:
    why = "".join(f"\n  - {line}" for line in refused)
    return (
        f"plan='auto': no shipped plan fits {type(model).__name__} (shipped: "
        f"{', '.join(family.family for family in known)}).{why}\nWrite one with the module names of your model, in "
        "a YAML file (plan='my_plan.yaml') or in the config (plan={'base': 'none', 'rules': [...]}):\n"
        f"{EXAMPLE}"
    )
