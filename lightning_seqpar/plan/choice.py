"""Which plans hold for a model: the user's rules, a shipped family's plan, or inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from lightning_seqpar.config import PlanSpec
from lightning_seqpar.layout.adapters import BASE, is_adapted
from lightning_seqpar.layout.module_names import inside, match_pattern
from lightning_seqpar.plan.sharding_plan import EXAMPLE, Family, ShardingPlan, load_families
from lightning_seqpar.styles.style import Rule
from lightning_seqpar.user_input import nearest


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
        _family_named(base, load_families())


def _family_named(name: str, known: Sequence[Family]) -> Family:
    found = [family for family in known if family.family == name]
    if name == "none":
        raise ValueError("plan='none' has no rules; write plan={'base': 'none', 'rules': [...]}")
    if not found:
        names = ["auto", "infer", *(family.family for family in known)]
        raise ValueError(f"plan={name!r} is no family; did you mean {nearest(name, names, 1)}? (a file ends in .yaml)")
    return found[0]


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


def _resolve_base(
    base: str, model: nn.Module, infer: Infer | None = None, infer_rest: InferRest | None = None
) -> list[ShardingPlan]:
    if base.endswith((".yaml", ".yml")):
        return [ShardingPlan.from_yaml(base)]
    if base == "infer":
        if infer is None:
            raise ValueError("plan='infer' is found by a strategy, which has an example input; here name a plan, or use 'auto'")
        return [infer()]
    known = load_families()
    if base == "auto":
        plans, refused = _search_families(model, known, strict=True)
        if plans:
            more = infer_rest(plans) if infer_rest and linears_beside(model, plans) else None
            return [*plans, *([] if more is None else [more])]
        if infer is not None:
            return [infer()]
        raise ValueError(_how_to_write_a_plan(model, known, refused))
    chosen = _family_named(base, known)
    plans, _ = _search_families(model, [chosen], strict=False)
    if not plans:
        raise ValueError(
            f"plan={base!r}: the model has no module of class {chosen.class_name}; use 'auto', a plan of your own, or a "
            "model of that family"
        )
    return plans


def _how_to_write_a_plan(model: nn.Module, known: Sequence[Family], refused: Sequence[str]) -> str:
    why = "".join(f"\n  - {line}" for line in refused)
    return (
        f"plan='auto': no shipped plan fits {type(model).__name__} (shipped: "
        f"{', '.join(family.family for family in known)}).{why}\nWrite one with the module names of your model, in "
        "a YAML file (plan='my_plan.yaml') or in the config (plan={'base': 'none', 'rules': [...]}):\n"
        f"{EXAMPLE}"
    )
