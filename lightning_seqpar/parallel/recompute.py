"""Which modules are recomputed in the backward: the blocks, or the attention in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from torch import nn

from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.region.recompute import RecomputedForward, RecomputeNotes
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.styles.linear import ColumnRule
from lightning_seqpar.styles.style import PlannedModel

Recompute = Literal["none", "selective", "full"]
"""The field of the configuration."""


def attentions(plan: PlannedModel) -> list[str]:
    """The attention modules inside the blocks.

    An attention holds columns that are dealt out by heads (``units``: queries, keys, values) and the row that their result
    goes to: the nearest module around both. Where only the block is around both, it is the nearest module around all such
    columns. ``nn.MultiheadAttention`` is one by itself.
    """
    replaced = plan.named("replace")  # an encoder is, too
    found = [name for name in replaced if isinstance(plan.modules[name], nn.MultiheadAttention)]
    rows = list(plan.named("row"))
    for block in (block for stack in plan.stacks for block in stack.blocks):
        heads = [
            name
            for name, match in plan.named("column").items()
            if isinstance(match.rule, ColumnRule) and match.rule.units is not None and inside(name, block)
        ]
        around = {name: nearest_around([name], block, rows) for name in heads}
        found += [name for name in around.values() if name is not None]
        if alone := [name for name, found_around in around.items() if found_around is None]:
            found += [name for name in (nearest_around(alone, block),) if name is not None]
    found = list(dict.fromkeys(found))
    return [name for name in found if not any(inside(name, one) for one in found if one != name)]


def nearest_around(names: Sequence[str], block: str, rows: Sequence[str] | None = None) -> str | None:
    """The nearest module inside a block that is around all of ``names``, and around one of ``rows``; None if there is none."""
    around = names[0].rpartition(".")[0]
    while around != block and inside(around, block):
        holds_row = rows is None or any(inside(row, around) for row in rows)
        if holds_row and all(inside(name, around) for name in names):
            return around
        around = around.rpartition(".")[0]
    return None


class NoAttentionError(ValueError):
    """The attention is to be recomputed, and no module of the blocks is one."""


def recomputed(plan: PlannedModel, recompute: Recompute) -> list[str]:
    """The names of the modules that are recomputed."""
    if recompute == "none":
        return []
    if recompute == "full":
        return [block for stack in plan.stacks for block in stack.blocks]
    found = attentions(plan)
    if not found:
        blocks = ", ".join(f"{stack.blocks[0].rpartition('.')[0]}.*" for stack in plan.stacks)
        raise NoAttentionError(
            f"recompute='selective': in the blocks ({blocks}) no module is the attention, that is one which holds the columns "
            "dealt out by heads (units); use recompute='full', or 'none'"
        )
    return found


def make_recomputed(
    plan: PlannedModel, names: Iterable[str], recompute: Recompute, regions: Callable[[str], SequenceRegion | None]
) -> None:
    """Let modules be recomputed: each gets a ``forward`` of its own, as an attribute that hides its class's."""
    notes = RecomputeNotes(recompute)
    for name in names:
        module = plan.modules[name]
        module.__dict__["forward"] = RecomputedForward(module, name, notes, regions(name))
