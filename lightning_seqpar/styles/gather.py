"""``gather``: a module's arguments gathered along the sequence where it is entered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from torch.utils.hooks import RemovableHandle

from lightning_seqpar.region.lowered import forget_gathered
from lightning_seqpar.styles.copy import CopyRule
from lightning_seqpar.styles.entry import close_entry, hook_entry, lower_entry
from lightning_seqpar.styles.style import Application, ArgumentsRule, PlannedModel


class GatherRule(ArgumentsRule):
    """Arguments gathered along the sequence where this module is entered."""

    style: Literal["gather"] = "gather"
    local_width: bool = False
    """The module sees a stand-in as wide as this rank's part, and its columns the gathered activation: for a forward that
    takes its head size from its input's last dim (``B, T, C = x.shape``)."""

    opens_partial: ClassVar[bool] = True
    enters_whole: ClassVar[bool] = True
    holds_local_features: ClassVar[bool] = True

    def check(self, name: str, plan: PlannedModel) -> None:
        """It lies inside a block."""
        plan.stack_of(name)

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """The arguments are gathered, and those that a ``copy`` rule names are copied. A column gathers by itself."""
        plan = application.plan
        copied = next((rule.args for rule in (m.rule for m in plan.at(name)) if isinstance(rule, CopyRule)), ())
        if copied or name not in plan.named("column"):
            yield from hook_entry(name, application, self.args, copied, local_width=self.local_width)

    def after(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """What was gathered must have passed a row by the end of the module, or of its block."""
        plan = application.plan
        if name in plan.named("copy") or name not in plan.named("column"):
            yield from close_entry(name, application)

    def unfit_to_lower(self, name: str, plan: PlannedModel) -> str | None:
        """It has a lowered form."""
        return None

    def lowered_before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """The arguments are gathered or copied by functional collectives. A column gathers by itself."""
        plan = application.plan
        copied = next((rule.args for rule in (m.rule for m in plan.at(name)) if isinstance(rule, CopyRule)), ())
        if copied or name not in plan.named("column"):
            yield from lower_entry(name, application, self.args, copied, local_width=self.local_width)

    def lowered_after(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """Columns behind it must not read what was gathered for it."""
        plan = application.plan
        if self.local_width and (name in plan.named("copy") or name not in plan.named("column")):
            yield application.module(name).register_forward_hook(forget_gathered(application.lowered_at(name)))
