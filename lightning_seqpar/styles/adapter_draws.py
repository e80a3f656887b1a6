"""Dropout in the adapters around columns and rows: from which random stream it draws."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.adapters import BASE
from lightning_seqpar.region.hooks import switch_streams
from lightning_seqpar.styles.style import Application


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
        yield module.register_forward_pre_hook(switch_streams(region, "pause" if alike else "begin"))
        yield module.register_forward_hook(switch_streams(region, "resume" if alike else "end"))
