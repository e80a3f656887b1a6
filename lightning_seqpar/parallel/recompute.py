"""Which modules are recomputed in the backward: the blocks, or the attention in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from torch import nn

from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.parallel.module_changes import ModuleChange, ModuleSnapshot, changes_since
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.region.recompute import RecomputedForward, RecomputeNotes
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.styles.column import ColumnRule
from lightning_seqpar.styles.registry import STYLES
from lightning_seqpar.styles.replace import ReplaceRule
from lightning_seqpar.styles.style import PlannedModel

Recompute = Literal["none", "selective", "full"]
"""The field of the configuration."""


def attentions(plan: PlannedModel) -> dict[str, str]:
    """The attention modules inside the blocks, each with the name of its block.

    An attention is what holds columns that are dealt out by heads (``units``: queries, keys, values) and the row that
    their result goes to: the nearest module around both. ``nn.MultiheadAttention`` is one by itself.

    Returns:
        Nothing of a block that holds the projections of its attention itself: there no module is the attention.
    """
    rows = list(plan.named("row"))
    blocks = [block for stack in plan.stacks for block in stack.blocks]
    found: dict[str, str] = {}
    for match in plan.decided:
        rule, name = match.rule, match.name
        block = next((one for one in blocks if inside(name, one)), None)
        if block is None:
            continue
        if isinstance(rule, ReplaceRule) and isinstance(plan.modules[name], nn.MultiheadAttention):
            found[name] = block
        elif isinstance(rule, ColumnRule) and rule.units is not None:
            around = _around_a_row(name, rows, block)
            if around is not None:
                found[around] = block
    return {name: block for name, block in found.items() if not any(inside(name, one) for one in found if one != name)}


def _around_a_row(column: str, rows: list[str], block: str) -> str | None:
    """The nearest module around a column that holds a row too; None if only the block does."""
    around = column.rpartition(".")[0]
    while around != block and inside(around, block):
        if any(inside(row, around) for row in rows):
            return around
        around = around.rpartition(".")[0]
    return None


class NoAttentionError(ValueError):
    """The attention is to be recomputed, and no module of the blocks is one."""


def recomputed(plan: PlannedModel, recompute: Recompute) -> list[str]:
    """The names of the modules that are recomputed.

    Raises:
        NoAttentionError: if the attention is asked for, and no block has one.
    """
    if recompute == "none":
        return []
    if recompute == "full":
        return [block for stack in plan.stacks for block in stack.blocks]
    found = attentions(plan)
    if not found:
        blocks = ", ".join(f"{stack.blocks[0].rpartition('.')[0]}.*" for stack in plan.stacks)
        raise NoAttentionError(
            f"recompute='selective': in the blocks ({blocks}) no module is the attention, that is one which holds columns "
            "dealt out by heads (units) and the row behind them; use recompute='full', or 'none'"
        )
    return list(found)


def make_recomputed(
    plan: PlannedModel, names: Iterable[str], recompute: Recompute, regions: Callable[[str], SequenceRegion | None]
) -> None:
    """Let modules be recomputed: each gets a ``forward`` of its own, as an attribute that hides its class's.

    Args:
        plan: of the model.
        names: of the modules.
        recompute: the field of the configuration.
        regions: the sequence region of a module; None where nothing is sharded.
    """
    notes = RecomputeNotes(recompute)
    for name in names:
        module = plan.modules[name]
        module.__dict__["forward"] = RecomputedForward(module, name, notes, regions(name))


def recompute_unsharded(
    model: nn.Module, plans: Sequence[ShardingPlan], recompute: Recompute
) -> tuple[list[str], list[ModuleChange]]:
    """Let the blocks of a model of which nothing is sharded be recomputed, or their attention.

    Args:
        model: the model.
        plans: name its blocks, and for the attention its columns and rows; nothing else is read of them.
        recompute: the field of the configuration.

    Returns:
        The names of the modules, and what became of them, to take it back.

    Raises:
        ValueError: if the plans name no blocks.
        NoAttentionError: if the attention is asked for, and no block has one.
    """
    plan = PlannedModel(model, [match for one in plans for match in one.match(model)], list(STYLES), 1, False)
    names = recomputed(plan, recompute)
    before = [ModuleSnapshot(plan.modules[name]) for name in names]
    make_recomputed(plan, names, recompute, lambda name: None)
    return names, changes_since(before)
