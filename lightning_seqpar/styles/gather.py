"""``gather`` and ``copy``: modules that are entered with whole activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.module_names import Argument, inside
from lightning_seqpar.region.hooks import close_gather, gather_arguments
from lightning_seqpar.styles.style import Application, ArgumentsRule, PlannedModel


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
        *(region, name, gathered, copied),
        columns=application.columns_of(name),
        local_width=local_width,
        deals_out=bool(around),
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
