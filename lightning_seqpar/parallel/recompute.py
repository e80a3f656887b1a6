"""Which modules are recomputed in the backward: the blocks, or the attention in each; and which MLPs run in tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.parallel.module_changes import ModuleChange, ModuleSnapshot, changes_since
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.region.recompute import RecomputedForward, RecomputeNotes
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.region.tiled_call import TiledCall
from lightning_seqpar.styles.column import ColumnRule
from lightning_seqpar.styles.registry import STYLES
from lightning_seqpar.styles.style import PlannedModel

Recompute = Literal["none", "selective", "full"]
"""The field of the configuration."""


def attentions(plan: PlannedModel) -> list[str]:
    """The attention modules inside the blocks.

    An attention holds columns that are dealt out by heads (``units``: queries, keys, values) and the row that their result
    goes to: the nearest module around both. Where only the block is around both, it is the nearest module around all such
    columns. ``nn.MultiheadAttention`` is one by itself.

    Returns:
        Nothing of a block that holds the projections of its attention itself: there no module is the attention.
    """
    found = [
        name for name in plan.named("replace") if isinstance(plan.modules[name], nn.MultiheadAttention)
    ]  # an encoder is replaced too
    rows = list(plan.named("row"))
    for block in (block for stack in plan.stacks for block in stack.blocks):
        heads = [
            name
            for name, match in plan.named("column").items()
            if isinstance(match.rule, ColumnRule) and match.rule.units is not None and inside(name, block)
        ]
        around = {name: _nearest_around([name], block, rows) for name in heads}
        found += [name for name in around.values() if name is not None]
        if alone := [name for name, found_around in around.items() if found_around is None]:
            found += [name for name in (_nearest_around(alone, block),) if name is not None]
    found = list(dict.fromkeys(found))
    return [name for name in found if not any(inside(name, one) for one in found if one != name)]


def _nearest_around(names: Sequence[str], block: str, rows: Sequence[str] | None = None) -> str | None:
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
            f"recompute='selective': in the blocks ({blocks}) no module is the attention, that is one which holds the columns "
            "dealt out by heads (units); use recompute='full', or 'none'"
        )
    return found


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


# ---- tiles -----------------------------------------------------------------------------------------------------


def mlps(plan: PlannedModel) -> list[str]:
    """The MLPs inside the blocks: the nearest module around columns that are not dealt out by heads, and around a row.

    Experts that hold their weights themselves are none. What is gathered for the columns must be gathered in it, and what the
    row makes reduced in it, so that it takes and returns activations as they are between the blocks.
    """
    rows, found, heads = list(plan.named("row")), list[str](), attentions(plan)
    for block in (block for stack in plan.stacks for block in stack.blocks):
        columns = [
            name
            for name, match in plan.named("column").items()
            if isinstance(match.rule, ColumnRule)
            and match.rule.units is None
            and inside(name, block)
            and not match.of_tensor  # the weights of experts
        ]
        found += [name for column in columns if (name := _nearest_around([column], block, rows)) is not None]
    around = (*plan.named("gather"), *plan.named("reduce"))
    return [
        name
        for name in dict.fromkeys(found)
        if not any(inside(name, one) and one != name for one in around) and not any(inside(one, name) for one in heads)
    ]


class NoMLPError(ValueError):
    """The MLPs are to run in tiles, and no module of the blocks is one."""


@dataclass(frozen=True)
class MLPTiles:
    """How the MLPs of the blocks run, some tokens at a time.

    Attributes:
        tokens: the field ``tile_mlp`` of the configuration.
        least: the least number of tiles, however few tokens there are.
    """

    tokens: int
    least: int = 1

    def find(self, plan: PlannedModel) -> list[str]:
        """The names of the MLPs.

        Raises:
            NoMLPError: if no module is one.
        """
        if names := mlps(plan):
            return names
        blocks = ", ".join(f"{stack.blocks[0].rpartition('.')[0]}.*" for stack in plan.stacks)
        raise NoMLPError(
            f"tile_mlp={self.tokens}: in the blocks ({blocks}) no module is the MLP, that is one which holds columns that are not "
            "dealt out by heads, and the row behind them, and takes and returns an activation; leave tile_mlp out"
        )

    def apply(self, plan: PlannedModel, names: Iterable[str], regions: Callable[[str], SequenceRegion | None]) -> None:
        """Let the MLPs of those names compute some tokens at a time.

        Args:
            plan: of the model.
            names: of the MLPs.
            regions: the sequence region of a module; None where nothing is sharded.
        """
        for name in names:
            stack = plan.stack_reaching(name)
            assert stack is not None
            module = plan.modules[name]
            # torch's own place for what is called instead of a module, hooks included; copies and pickles leave it out.
            module._compiled_call_impl = TiledCall(module, name, self.tokens, regions(name), stack.dim, self.least)


def tile_unsharded(
    model: nn.Module, plans: Sequence[ShardingPlan], tiles: MLPTiles
) -> tuple[list[str], list[ModuleChange]]:
    """Let the MLPs of a model of which tp shards nothing run in tiles.

    Args:
        model: the model.
        plans: name its blocks, columns and rows; nothing else is read of them.
        tiles: how.

    Returns:
        The names of the MLPs, and what became of them, to take it back.

    Raises:
        NoMLPError: if no module is one.
    """
    plan = PlannedModel(model, [match for one in plans for match in one.match(model)], list(STYLES), 1, False)
    names = tiles.find(plan)
    before = [ModuleSnapshot(plan.modules[name]) for name in names]
    tiles.apply(plan, names, lambda name: None)
    return names, changes_since(before)
