"""``copy``: arguments that are whole already where a module reads them, such as encoder states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from torch.utils.hooks import RemovableHandle

from lightning_seqpar.styles.gather import close_entry, hook_entry
from lightning_seqpar.styles.style import Application, ArgumentsRule, PlannedModel


class CopyRule(ArgumentsRule):
    """Arguments that are whole already where this module reads them, such as encoder states; their gradient is summed."""

    style: Literal["copy"] = "copy"

    opens_partial: ClassVar[bool] = True
    holds_local_features: ClassVar[bool] = True

    def check(self, name: str, plan: PlannedModel) -> None:
        """It lies inside a block."""
        plan.stack_of(name)

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """The arguments are copied; a module that others are gathered for too does both in one hook, that of ``gather``."""
        if name not in application.plan.named("gather"):
            yield from hook_entry(name, application, copied=self.args)

    def after(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """What was copied must have passed a row by the end of the module, or of its block."""
        if name not in application.plan.named("gather"):
            yield from close_entry(name, application)
