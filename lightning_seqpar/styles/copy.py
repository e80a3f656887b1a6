"""``copy``: arguments that are whole already where a module reads them, such as encoder states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import field_validator
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.module_names import Argument
from lightning_seqpar.styles.entry import close_entry, hook_entry
from lightning_seqpar.styles.style import Application, PlannedModel, Rule, each_once


class CopyRule(Rule):
    """Arguments that are whole already where this module reads them, such as encoder states; their gradient is summed."""

    style: Literal["copy"] = "copy"
    args: tuple[Argument, ...] = (0,)

    opens_partial: ClassVar[bool] = True
    holds_local_features: ClassVar[bool] = True

    @field_validator("args")
    @classmethod
    def args_are_named_once(cls, value: tuple[Argument, ...]) -> tuple[Argument, ...]:
        return each_once(value, "copy")

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
