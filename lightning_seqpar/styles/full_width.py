"""``full_width``: a norm over the whole of a width that is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.region.hooks import narrow, widen
from lightning_seqpar.styles.style import Application, PlannedModel, Rule


class FullWidthRule(Rule):
    """A norm over the whole sharded width: features gathered, the norm as it is, this rank's features again."""

    style: Literal["full_width"] = "full_width"

    opens_partial: ClassVar[bool] = True

    def check(self, name: str, plan: PlannedModel) -> None:
        """It lies inside a block and is a norm: its parameters are vectors, and it holds no linear."""
        plan.stack_of(name)
        wrong = [n for n, p in plan.modules[name].named_parameters() if p.ndim != 1]
        if wrong or any(inside(n, name) for n in plan.linears):
            raise ValueError(f"{name}: 'full_width' takes a norm, whose parameters are vectors over the whole width")

    def before(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """It reads all ranks' features."""
        gather = application.region_of(name).path.gather_features
        yield application.module(name).register_forward_pre_hook(widen(gather))

    def after(self, name: str, application: Application) -> Iterator[RemovableHandle]:
        """Of what it makes, this rank's features stay."""
        yield application.module(name).register_forward_hook(narrow(application.rank, application.plan.size, name))
