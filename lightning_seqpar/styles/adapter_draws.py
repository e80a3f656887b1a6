"""Dropout in the adapters around columns and rows: from which random stream it draws."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.adapters import BASE
from lightning_seqpar.region.hooks import draw_alike
from lightning_seqpar.styles.style import Application, PlannedModel


def hook_adapter_dropout(name: str, application: Application, *, alike: bool) -> Iterator[RemovableHandle]:
    """What the adapter around a linear drops out of its input: beside a column all ranks alike, beside a row each for itself."""
    around, _, leaf = name.rpartition(".")
    dropout = application.plan.modules.get(f"{around}.lora_dropout")
    if leaf != BASE or dropout is None:
        return
    region = application.region_of(name)
    if not alike and region.sp:
        return  # inside a block of shards all draws are the rank's own
    for module in dropout.children():
        before, behind = draw_alike(region, always=True, switch="end" if alike else "begin")
        yield module.register_forward_pre_hook(before)
        yield module.register_forward_hook(behind)


def unfit_adapter(name: str, plan: PlannedModel) -> str | None:
    """Why the linear inside an adapter has no compiled form, in words; None if it has one.

    What the adapter drops out of its input comes from another random stream than the draws around it, and a compiled block draws
    from one.
    """
    around, _, leaf = name.rpartition(".")
    dropout = plan.modules.get(f"{around}.lora_dropout")
    if leaf == BASE and dropout is not None and any(getattr(one, "p", 0) for one in dropout.modules()):
        return "the dropout of the adapter around it would draw from another random stream than the block; set it to 0"
    return None
