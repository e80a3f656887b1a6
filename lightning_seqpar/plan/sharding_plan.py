"""Plans: rules in order, matched against the names of a model; those shipped for families; and which hold for a model.

Later rules win. Plans are written by hand, shipped for families (``families/*.yaml``) or inferred; whatever made it, a plan can
be printed, edited and fed back.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import Field, ValidationError
from torch import nn

from lightning_seqpar.config import FrozenModel, PlanSpec
from lightning_seqpar.layout.attributes import class_source
from lightning_seqpar.layout.linear_kind import BASE, is_adapted, plain_modules
from lightning_seqpar.layout.module_names import compile_pattern, in_all_layers, inside, likely_blocks, match_pattern
from lightning_seqpar.styles.blocks import BlocksRule, ExitRule, ScatterRule
from lightning_seqpar.styles.gather import CopyRule, GatherRule, OnceRule, ReduceRule
from lightning_seqpar.styles.linear import ColumnRule, LocalHeadsRule, RowRule
from lightning_seqpar.styles.replace import FlexRule, ReplaceRule, SetRule, VocabRule
from lightning_seqpar.styles.style import Match, PlannedModel, Rule, Target
from lightning_seqpar.styles.whole import FullWidthRule, GradientRule, WholeRule
from lightning_seqpar.user_input import nearest, read_text, shortened, shown

STYLES: dict[str, type[Rule]] = {
    "blocks": BlocksRule,
    "scatter": ScatterRule,
    "exit": ExitRule,
    "whole": WholeRule,
    "replace": ReplaceRule,
    "column": ColumnRule,
    "row": RowRule,
    "gather": GatherRule,
    "copy": CopyRule,
    "reduce": ReduceRule,
    "once": OnceRule,
    "local_heads": LocalHeadsRule,
    "full_width": FullWidthRule,
    "gradient": GradientRule,
    "set": SetRule,
    "flex": FlexRule,
    "vocab": VocabRule,
}
"""The styles, in the order in which they are checked and applied. Of the forward hooks of one module, those of the first style here
are the outermost: what ``reduce`` sums is summed before ``gather`` lets go of what it gathered."""


def parse_rule(data: Any) -> Rule:
    """One rule from plain data; raises ValueError, which shows the rule, for what is none."""
    if isinstance(data, Rule):
        return data
    if not isinstance(data, Mapping) or "style" not in data or "pattern" not in data:
        raise ValueError(
            f"plan rule {shown(data)}: a rule is a mapping with at least 'pattern' and 'style', such as "
            "{pattern: layers.*, style: blocks}"
        )
    style = data["style"]
    if not all(isinstance(key, str) for key in (*data, style)):
        raise ValueError(
            f"plan rule {shown(data)}: options and style must be words, such as {{pattern: layers.*, style: blocks}}"
        )
    if style not in STYLES:
        near = nearest(style, list(STYLES))
        raise ValueError(f"plan rule {shown(dict(data))}: no style {shown(style)}; did you mean {near}?")
    try:
        return STYLES[style](**data)
    except ValidationError as error:
        causes = "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in error.errors())
        raise ValueError(f"plan rule {shown(dict(data))}: {shortened(causes)}") from None


KEYS = ("rules", "family", "class_name", "parts", "source", "when")
"""What may stand at the top of a plan's file; all but the rules are those of shipped plans, which say what models they are for."""

EXAMPLE = """\
rules:
- {pattern: "layers.*", style: blocks, dim: 1}                   # the repeated blocks; dim of the sequence
- {pattern: "layers.*.{attn,mlp}", style: gather}                # whole sequence in, once for all columns
- {pattern: "layers.*.attn.{q,k,v}", style: column, units: n_head}
- {pattern: "layers.*.attn", style: set, divide: [n_head]}       # head counts that forward reads
- {pattern: "layers.*.mlp.up", style: column}
- {pattern: "layers.*.{attn.out,mlp.down}", style: row}
- {pattern: "norm", style: exit}                                 # the region ends behind it"""


class UniqueKeysLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that stands twice in a mapping, of which the last alone would count."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """The mapping of a node."""
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for at, key in enumerate(keys):
            if any(key.value == other.value for other in keys[:at]):
                raise yaml.constructor.ConstructorError(
                    None, None, f"found duplicate key {shown(key.value)}; write it once", key.start_mark
                )
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The data in a YAML text of anybody's; raises ``yaml.YAMLError``, whatever is wrong with it."""
    try:
        return yaml.load(text, Loader=UniqueKeysLoader)  # by libyaml where there is one
    except yaml.YAMLError:
        raise
    except Exception as error:  # of a value that its tag does not fit, such as '!!bool x'
        raise yaml.YAMLError(f"a value in it does not fit its tag ({type(error).__name__}: {error})") from None


def _rules_in(text: str, name: str) -> list[Any]:
    """The list ``rules`` of a plan in YAML; raises ValueError if there is none, with the plan's ``name``."""
    try:
        data = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {shortened(error)}") from None
    if isinstance(data, Mapping) and isinstance(data.get("plan"), Mapping):
        raise ValueError(f"{name}: 'rules' stands under 'plan' there; in a plan's own file it stands at the top")
    if not isinstance(data, Mapping) or not isinstance(data.get("rules"), list):
        raise ValueError(f"{name}: it must hold a list 'rules', for example\n{EXAMPLE}")
    for key in data:
        if key not in KEYS:
            fix = "give it in the field plan, {base: auto, rules: [...]}" if key == "base" else "leave it out"
            raise ValueError(f"{name}: {shown(key)} is no key of a plan's file, which holds a list 'rules'; {fix}")
    return [*data["rules"]]


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
        """From plain data or :class:`Rule` objects.

        Raises:
            ValueError: for what is no rule, or has a wrong option; the message shows the rule.
        """
        try:
            listed = None if isinstance(rules, str | Mapping) else iter(rules)
        except TypeError:
            listed = None
        if listed is None:
            raise ValueError(f"rules={shown(rules)}: write a list of rules, each {{pattern: ..., style: ...}}")
        return cls(tuple(parse_rule(rule) for rule in listed), prefix, source)

    @classmethod
    def from_yaml(cls, path: str | Path) -> ShardingPlan:
        """From a YAML file with a list ``rules``.

        Raises:
            ValueError: if the file is missing or holds no list of rules.
        """
        name = f"plan {shown(str(path))}"
        text = read_text(path, name)
        if text is None:
            raise ValueError(f"{name}: no such file; give a YAML file, a family ({', '.join(families())}) or 'auto'")
        return cls.from_rules(_rules_in(text, name), source=str(path))

    @classmethod
    def from_yaml_text(cls, text: str, *, source: str = "inferred") -> ShardingPlan:
        """From what :meth:`to_yaml` wrote; raises ValueError if it holds no list of rules."""
        return cls.from_rules(_rules_in(text, "the plan"), source=source)

    def without_sp(self) -> ShardingPlan:
        """The same with whole sequences in every stack of blocks."""
        return ShardingPlan(tuple(rule.without_sp() for rule in self.rules), self.prefix, self.source)

    def to_yaml(self) -> str:
        """The rules as YAML that :meth:`from_yaml` reads back; patterns carry the prefix."""
        lines = [
            yaml.safe_dump(
                {**rule.dump(), "pattern": self.full(rule.pattern)}, default_flow_style=True, sort_keys=False, width=1000
            ).strip()
            for rule in self.rules
        ]
        return "rules:\n" + "".join(f"- {line}\n" for line in lines) if lines else "rules: []\n"

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
            pattern = self.full(rule.pattern)
            hits, target = names.hits(rule, pattern)
            if not hits:
                patterns = [in_all_layers(name) for name in names.of[target] if name]
                patterns += likely_blocks(model) if target is Target.MODULES else []
                near = nearest(in_all_layers(pattern), [*dict.fromkeys(patterns)], 5)
                raise ValueError(
                    f"plan pattern {shown(pattern)} (style {rule.style}) matches no {target.value}; near names: {near}"
                )
            found += [Match(name, rule, self.source, target is not Target.MODULES) for name in hits]
        return found


def read_plans(model: nn.Module, plans: Iterable[ShardingPlan], size: int = 1, sp: bool = False) -> PlannedModel:
    """The plans' rules on a model for ``size`` ranks of tp; later plans win. Nothing is checked."""
    return PlannedModel(model, [match for plan in plans for match in plan.match(model)], list(STYLES), size, sp)


class _Names:
    """What a model's patterns can match."""

    def __init__(self, model: nn.Module) -> None:
        parameters = [name for name, _ in model.named_parameters()]
        self.of = {
            Target.MODULES: [name for name, _ in model.named_modules(remove_duplicate=False)],
            Target.PARAMETERS: parameters,
            Target.TENSORS: [*parameters, *(name for name, _ in model.named_buffers())],
        }

    def hits(self, rule: Rule, pattern: str) -> tuple[list[str], Target]:
        """The names that a rule holds for, and what they are names of; where it hits nothing, what it should name first of all."""
        compiled = compile_pattern(pattern)
        for target in rule.targets:
            if found := [name for name in self.of[target] if compiled.fullmatch(name)]:
                return found, target
        return [], rule.targets[0]


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
    source: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    """Digest of the source of each class, or one for each release of its library: a plan is only right for the code that it was
    proved on."""
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
        for kind in dict.fromkeys(type(module) for module in root.modules()):
            proved = self.source.get(kind.__name__)
            if proved is not None and source_digest(kind) not in ((proved,) if isinstance(proved, str) else proved):
                return (
                    f"the source of {kind.__name__} differs from the one that the plan was proved on; if the rules still hold, "
                    f"name the plan yourself: plan={self.family!r}"
                )
        return None

    def plan_for(self, root: nn.Module, prefix: str) -> ShardingPlan:
        """The plan without the rules for parts that ``root``, the module at ``prefix``, does not have."""
        plan, names = ShardingPlan.from_rules(self.rules), _Names(root)
        kept = [rule for rule in plan.rules if names.hits(rule, rule.pattern)[0]]
        return ShardingPlan(tuple(kept), prefix, f"family {self.family}")


def source_digest(kind: type) -> str:
    """Digest of a class's source; empty if the source can't be read."""
    try:
        return hashlib.sha256(class_source(kind).encode()).hexdigest()[:16]
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


def _search_families(model: nn.Module, known: Sequence[Family], *, strict: bool) -> tuple[list[ShardingPlan], list[str]]:
    """The plans of the families whose classes a model has, and why others, which only look so, are none."""
    plans: list[ShardingPlan] = []
    refused: list[str] = []
    for name, module in model.named_modules():
        reasons: list[str] = []
        for family in (one for one in known if one.is_named_by(module)):
            reason = family.mismatch(module) if strict else None
            if reason is None:
                plans.append(family.plan_for(module, name))
                reasons = []
                break
            reasons.append(f"{name or type(model).__name__}: not {family.family}: {reason}")
        refused += reasons
    return plans, refused


Infer = Callable[[], ShardingPlan]
"""Makes a plan for a model."""
InferRest = Callable[[Sequence[ShardingPlan]], ShardingPlan | None]
"""Makes a plan for what the plans that it is given leave whole; None if there is none."""


def resolve_plans(
    spec: str | PlanSpec, model: nn.Module, infer: Infer | None = None, infer_rest: InferRest | None = None
) -> list[ShardingPlan]:
    """The plans that a config's ``plan`` stands for on ``model``: the base's, then the user's own rules.

    ``infer`` makes a plan where ``auto`` finds no family, and ``infer_rest`` one for the rest where a family's plan ends.

    Raises:
        ValueError: if ``auto`` finds nothing (the message says how to write a plan), or a name is unknown.
    """
    if isinstance(spec, str):
        plans = _resolve_base(spec, model, infer, infer_rest)
    else:
        own = ShardingPlan.from_rules(spec.rules, source="your plan")
        plans = [*([] if spec.base == "none" else _resolve_base(spec.base, model, infer, infer_rest)), own]
    return [_with_adapters(plan, model) for plan in plans]


def _with_adapters(plan: ShardingPlan, model: nn.Module) -> ShardingPlan:
    """A rule for a linear with an adapter holds for the linear in it and for the half of ``B(A(x))`` that meets the shards."""
    # Beside a column, B makes this rank's features; beside a row, A reads them, and its output is reduced like the row's own.
    adapted = {name for name, module in model.named_modules() if is_adapted(module)}
    if not adapted:
        return plan
    rules: list[Rule] = []
    for rule in plan.rules:
        found = [n for n in adapted if match_pattern(plan.full(rule.pattern), n)]
        half = rule.adapter_half
        if not found or half is None:
            rules.append(rule)
            continue
        named = [name for name, _ in model.named_modules() if match_pattern(plan.full(rule.pattern), name)]
        patterns = [f"{rule.pattern}.{BASE}", f"{rule.pattern}.{half}.*"]
        if len(found) < len(named):  # some have none
            inner = [name.removeprefix(f"{plan.prefix}.") if plan.prefix else name for name in named]
            whole = [name if plan.full(name) not in adapted else f"{name}.{BASE}" for name in inner]
            patterns = [*whole, *(f"{name}.{half}.*" for name in inner if plan.full(name) in adapted)]
        rules += [rule.model_copy(update={"pattern": pattern}) for pattern in patterns]
    return ShardingPlan(tuple(rules), plan.prefix, plan.source)


def check_plan(spec: str | PlanSpec) -> None:
    """Raises ValueError for what is wrong with a plan whatever the model is: names, files, styles and options."""
    base = spec if isinstance(spec, str) else spec.base
    if isinstance(spec, PlanSpec):
        ShardingPlan.from_rules(spec.rules)
        if base == "none" and not spec.rules:
            raise ValueError("plan={'base': 'none'} without rules shards nothing; add rules, or use base: auto")
    if base.endswith((".yaml", ".yml")):
        ShardingPlan.from_yaml(base)
    elif base not in ("auto", "infer") and not (base == "none" and isinstance(spec, PlanSpec)):
        _family_named(base)


def _family_named(name: str) -> Family:
    if name == "none":
        raise ValueError("plan='none' has no rules; write plan={'base': 'none', 'rules': [...]}")
    if name not in families():
        known = ["auto", "infer", *families()]
        raise ValueError(f"plan={name!r} is no family; did you mean {nearest(name, known, 1)}? (a file ends in .yaml)")
    return load_families()[families().index(name)]


def linears_beside(model: nn.Module, plans: Sequence[ShardingPlan]) -> list[str]:
    """Names of the linears in repeated modules that lie outside the modules that the plans are relative to."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.MultiheadAttention)
        and not any(inside(name, plan.prefix) for plan in plans)
        and any(inside(name, one) for one in lists)
    ]


def _resolve_base(base: str, model: nn.Module, infer: Infer | None, infer_rest: InferRest | None) -> list[ShardingPlan]:
    if base.endswith((".yaml", ".yml")):
        return [ShardingPlan.from_yaml(base)]
    if base == "infer":
        if infer is None:
            raise ValueError("plan='infer' is found by a strategy, which has an example input; here name a plan, or use 'auto'")
        return [infer()]
    if base == "auto":
        plans, refused = _search_families(model, load_families(), strict=True)
        if plans:
            more = infer_rest(plans) if infer_rest and linears_beside(model, plans) else None
            return [*plans, *([] if more is None else [more])]
        if infer is not None:
            return [infer()]
        raise ValueError(_how_to_write_a_plan(model, refused))
    chosen = _family_named(base)
    plans, _ = _search_families(model, [chosen], strict=False)
    if not plans:
        raise ValueError(
            f"plan={base!r}: the model has no module of class {chosen.class_name}; use 'auto', a plan of your own, or a "
            "model of that family"
        )
    return plans


def _how_to_write_a_plan(model: nn.Module, refused: Sequence[str]) -> str:
    why = "".join(f"\n  - {line}" for line in refused)
    return (
        f"plan='auto': no shipped plan fits {type(model).__name__} (shipped: {', '.join(families())}).{why}\n"
        "Write one with the module names of your model, in a YAML file (plan='my_plan.yaml') or in the config "
        "(plan={'base': 'none', 'rules': [...]}):\n"
        f"{EXAMPLE}"
    )
