"""``gather``, ``copy``, ``reduce``, ``once``: modules that are entered with whole activations, or return partial sums reduced.

Two sorts of modules reduce. One is entered with whole activations and has columns and rows inside: experts, or products of its own
parameters. The other is given this rank's features and has rows alone: a linear with an adapter, ``W x + B(A x)``, whose ``W`` and
``A`` are rows. What else it holds (``B``) is whole, and linear in a partial sum, so its gradient is a term of a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.module_names import Argument, in_all_layers, inside
from lightning_seqpar.layout.param_layout import ParamLayout, Reason
from lightning_seqpar.region.hooks import begin_sum, close_gather, end_sum, gather_arguments, reduce_output
from lightning_seqpar.styles.style import Application, ArgumentsRule, Match, PlannedModel, Rule, Target


class _EntryRule(ArgumentsRule):
    """Base of the two."""

    opens_partial: ClassVar[bool] = True
    holds_local_features: ClassVar[bool] = True

    def check(self, name: str, plan: PlannedModel) -> None:
        """It lies inside a block."""
        plan.stack_of(name)


class CopyRule(_EntryRule):
    """Arguments that are whole already where this module reads them, such as encoder states; their gradient is summed."""

    style: Literal["copy"] = "copy"

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """The arguments are copied; a module that others are gathered for too does both in one hook, that of ``gather``."""
        if name not in application.plan.named("gather"):
            yield from hook_entry(name, application, copied=self.args)

    def after(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """What was copied must have passed a row by the end of the module, or of its block."""
        if name not in application.plan.named("gather"):
            yield from _close_entry(name, application)


class GatherRule(_EntryRule):
    """Arguments gathered along the sequence where this module is entered."""

    style: Literal["gather"] = "gather"
    local_width: bool = False
    """The module sees a stand-in as wide as this rank's part, and its columns the gathered activation: for a forward that
    takes its head size from its input's last dim (``B, T, C = x.shape``)."""

    enters_whole: ClassVar[bool] = True

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """The arguments are gathered, and those that a ``copy`` rule names are copied. A column gathers by itself."""
        plan = application.plan
        copied = next((match.rule.args for match in plan.at(name) if isinstance(match.rule, CopyRule)), ())
        if copied or name not in plan.named("column"):
            yield from hook_entry(name, application, self.args, copied, local_width=self.local_width)

    def after(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """What was gathered must have passed a row by the end of the module, or of its block."""
        plan = application.plan
        if name in plan.named("copy") or name not in plan.named("column"):
            yield from _close_entry(name, application)


def hook_entry(
    name: str,
    application: Application,
    gathered: Sequence[Argument] = (),
    copied: Sequence[Argument] = (),
    *,
    local_width: bool = False,
) -> Iterator[RemovableHandle]:
    """In front of the module: arguments are gathered, or copied where they are whole already."""
    plan, region = application.plan, application.region_of(name)
    # Experts are dealt tokens out, each by itself: they are given this rank's positions of a sequence as all there are.
    around = [n for n in plan.named("reduce") if inside(name, n) and not plan.sums_features(n)]
    hook = gather_arguments(
        *(region, name, gathered, copied), columns=application.columns_of(name), local_width=local_width, deals_out=bool(around)
    )
    yield from application.hook_entry(name, hook)


def _close_entry(name: str, application: Application) -> Iterator[RemovableHandle]:
    """Behind it: what was gathered is let go of, and must have passed a row."""
    plan = application.plan
    is_block = any(name in stack.blocks for stack in plan.stacks)
    is_exit = any(name in stack.exits for stack in plan.stacks)
    columns = (n for n, m in plan.named("column").items() if inside(n, name) and not m.of_tensor)
    heads = next((plan.units[column] for column in columns), None)  # the query heads of which the module has a part
    hook = close_gather(
        *(application.region_of(name), name),
        columns=application.columns_of(name),
        is_block=is_block,
        is_exit=is_exit,
        heads=heads,
    )
    yield from application.hook_close(name, hook)


class ReduceRule(Rule):
    """The rows inside this module leave partial sums, which are reduced where it returns: once for many experts."""

    style: Literal["reduce"] = "reduce"

    def check(self, name: str, plan: PlannedModel) -> None:
        """It is given whole activations or this rank's features, has rows inside, and no expert in it is left whole."""
        stack = plan.stack_of(name)
        gathered = any(inside(name, around) for around in plan.named("gather"))
        if stack.sp and not gathered and not plan.sums_features(name):
            raise ValueError(
                f"{name}: its rows' partial sums are reduced where it returns, so it must be entered with whole activations; "
                f"add a rule {{pattern: {name}, style: gather}}, with all the arguments that hold tokens"
            )
        _check_siblings(name, plan)
        if not any(inside(row, name) for row in plan.named("row")):
            raise ValueError(f"{name}: 'reduce' takes a module with rows inside, and the plan names none there")
        if name in plan.linears:
            raise ValueError(f"{name}: a {plan.linears[name].rule.style} reduces itself; name the module around it")

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """Where rows are given this rank's features, what the module multiplies them with behind that has a term of a gradient."""
        module, own = parameter.rpartition(".")[0], plan.at(parameter)
        if not plan.sums_features(name) or own or module in plan.linears:
            return None  # what has a style of its own has its layout by that
        return plan.make_layout(parameter, Reason.IN_SUM, partial=True)

    def unfit_to_trace(self, name: str, plan: PlannedModel) -> str | None:
        """It has no compiled form."""
        return "the style 'reduce' has no compiled form"

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """What it adds to the partial sums counts on the first rank alone."""
        plan, (rows, once) = application.plan, _parts(name, application.plan)
        hook = begin_sum(application.region_of(name), once, rows, of_features=plan.sums_features(name))
        yield application.module(name).register_forward_pre_hook(hook)

    def after(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """Its output is reduced."""
        module, region = application.module(name), application.region_of(name)
        rows, once = _parts(name, application.plan)
        yield module.register_forward_hook(reduce_output(region, name, rows, once))
        yield module.register_forward_hook(end_sum(region, [*once, *rows]), always_call=True)


class OnceRule(Rule):
    """A parameter that its module adds to partial sums, such as an output bias: the first rank alone adds it.

    The hooks are those of the module whose sums are reduced (``reduce``).
    """

    style: Literal["once"] = "once"

    targets: ClassVar[tuple[Target, ...]] = (Target.TENSORS,)

    def check(self, name: str, plan: PlannedModel) -> None:
        """It is a parameter, and its module leaves partial sums."""
        module, _, leaf = name.rpartition(".")
        if leaf not in plan.modules[module]._parameters:
            raise ValueError(f"{name}: 'once' takes a parameter, and this is a buffer")
        if module in plan.linears or name in plan.unwrapped_parameters or plan.reduced_at(module) is None:
            raise ValueError(
                f"{name}: 'once' takes a parameter of its own that a module adds to partial sums; around this one none are "
                "left (a row linear adds its bias behind the sum by itself)"
            )

    def layout(self, parameter: str, name: str, plan: PlannedModel) -> ParamLayout | None:
        """Whole, with a gradient on the first rank alone: partial."""
        return plan.make_layout(parameter, Reason.ONCE, partial=True)


_Held = list[tuple[nn.Module, str]]
"""Parameters: the module that holds each, and its own name in it."""


def _parts(name: str, plan: PlannedModel) -> tuple[_Held, _Held]:
    """The row parameters that a reducing module holds, and those that the first rank alone adds."""
    rows, once = (
        [
            (plan.modules[key.rpartition(".")[0]], key.rpartition(".")[2])
            for key, match in plan.named(style).items()
            if match.of_tensor and inside(key, name)
        ]
        for style in ("row", "once")
    )
    return rows, once


def _check_siblings(name: str, plan: PlannedModel) -> None:
    """Of experts in a list all are sharded or none: a whole one would count once per rank in the sum."""
    linears: dict[str, Match] = plan.linears
    for planned in [n for n in linears if inside(n, name)]:
        path = planned.split(".")
        for at in range(name.count(".") + 2, len(path)):
            holder = plan.modules[".".join(path[:at])]
            if not isinstance(holder, nn.ModuleList | nn.ModuleDict):
                continue
            for key, _ in holder.named_children():
                twin = ".".join([*path[:at], key, *path[at + 1 :]])
                if not any(inside(one, ".".join([*path[:at], key])) for one in (*linears, *plan.unwrapped_parameters)):
                    twin = ".".join([*path[:at], key])
                if twin in plan.modules and twin not in linears:
                    every = ".".join([*path[:at], "*", *path[at + 1 :]])
                    raise ValueError(
                        f"{twin}: no rule names it, but {planned} beside it is a {linears[planned].rule.style} whose "
                        f"output is summed at the end of {name}, where a whole expert would count tp times; write the "
                        f"pattern for all of them: {{pattern: {in_all_layers(every)}, style: {linears[planned].rule.style}}}"
                    )
