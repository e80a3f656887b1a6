"""Which modules of the blocks run otherwise: recomputed in the backward, or some tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_seqpar.layout.module_names import inside, outwards
from lightning_seqpar.region.activations import RecomputedNorm, RecomputedSpan, is_norm
from lightning_seqpar.region.products import ColumnGroup
from lightning_seqpar.region.recompute import RecomputedForward, RecomputeNotes, TiledCall
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.styles.linear import ColumnRule
from lightning_seqpar.styles.style import PlannedModel

Recompute = Literal["none", "activations", "selective", "full"]
"""The field of the configuration."""


def _blocks(plan: PlannedModel) -> list[str]:
    return [block for stack in plan.stacks for block in stack.blocks]


def _shown_blocks(plan: PlannedModel) -> str:
    return ", ".join(f"{stack.blocks[0].rpartition('.')[0]}.*" for stack in plan.stacks)


def _columns(plan: PlannedModel, block: str, *, by_heads: bool) -> list[str]:
    """The columns in a block that are dealt out by heads (``units``: queries, keys, values), or those that are not."""
    return [
        name
        for name, match in plan.named("column").items()
        if isinstance(match.rule, ColumnRule) and (match.rule.units is not None) == by_heads and inside(name, block)
    ]


def _nearest_around(names: Sequence[str], block: str, rows: Sequence[str] | None = None) -> str | None:
    """The nearest module inside a block that is around all of ``names``, and around one of ``rows``; None if there is none."""
    for around in outwards(names[0].rpartition(".")[0]):
        if around == block or not inside(around, block):
            break
        holds_row = rows is None or any(inside(row, around) for row in rows)
        if holds_row and all(inside(name, around) for name in names):
            return around
    return None


def _attentions(plan: PlannedModel) -> list[str]:
    """The attention modules inside the blocks.

    An attention is the nearest module around columns that are dealt out by heads and the row that their result goes to. Where only
    the block is around both, it is the nearest module around all such columns. ``nn.MultiheadAttention`` is one by itself.
    """
    replaced = plan.named("replace")  # an encoder is, too
    found = [name for name in replaced if isinstance(plan.modules[name], nn.MultiheadAttention)]
    rows = list(plan.named("row"))
    for block in _blocks(plan):
        around = {name: _nearest_around([name], block, rows) for name in _columns(plan, block, by_heads=True)}
        found += [name for name in around.values() if name is not None]
        alone = [name for name, attention in around.items() if attention is None]
        if alone and (name := _nearest_around(alone, block)) is not None:
            found.append(name)
    found = list(dict.fromkeys(found))
    return [name for name in found if not any(inside(name, one) for one in found if one != name)]


def _mlps(plan: PlannedModel) -> list[str]:
    """The MLPs of the blocks: the nearest modules around columns that are not dealt out by heads, and around a row."""
    rows, heads = list(plan.named("row")), _attentions(plan)
    columns = [(name, block) for block in _blocks(plan) for name in _columns(plan, block, by_heads=False)]
    found = [_nearest_around([name], block, rows) for name, block in columns if name in plan.modules]
    around = (*plan.named("gather"), *plan.named("reduce"))
    return [
        name
        for name in dict.fromkeys(found)
        if name is not None
        and not any(inside(name, one) and one != name for one in around)
        and not any(inside(one, name) for one in heads)
    ]


class NoAttentionError(ValueError):
    """The attention is to be recomputed, and no module of the blocks is one."""


def recomputed(plan: PlannedModel, recompute: Recompute) -> list[str]:
    """The names of the modules that are recomputed."""
    if recompute in ("none", "activations"):
        return []
    if recompute == "full":
        return _blocks(plan)
    if not (found := _attentions(plan)):
        raise NoAttentionError(
            f"recompute='selective': in the blocks ({_shown_blocks(plan)}) no module is the attention, that is one which holds the "
            "columns dealt out by heads (units); use recompute='full', or 'none'"
        )
    return found


def norms(plan: PlannedModel) -> list[nn.Module]:
    """The norms of the blocks, and of the modules at which their regions end."""
    return [
        module
        for name, module in plan.modules.items()
        if plan.canonical[name] == name and is_norm(module) and plan.stack_reaching(name) is not None
    ]


def remake_norms(found: Iterable[nn.Module]) -> None:
    """Let norms run again."""
    for module in found:
        module.__dict__["forward"] = RecomputedNorm(module)


def remake_activations(
    plan: PlannedModel,
    names: Iterable[str],
    regions: Callable[[str], SequenceRegion],
    columns: Callable[[str], ColumnGroup],
) -> None:
    """Let norms, and what is between the columns and the row of an MLP, run again; ``names`` are of modules that do so anyway."""
    apart = [*names]
    gathers = {name for name in plan.named("gather") if name not in plan.named("copy")}
    remake_norms(norms(plan))
    for name in _mlps(plan):
        rows = [row for row in plan.named("row") if inside(row, name)]
        summed = any(plan.reduced_at(row) is not None for row in rows)
        if name in gathers and not summed and not any(inside(name, one) for one in apart):
            module = plan.modules[name]
            module.__dict__["forward"] = RecomputedSpan(module, columns(name), regions(name))


def make_recomputed(
    plan: PlannedModel, names: Iterable[str], recompute: Recompute, regions: Callable[[str], SequenceRegion | None]
) -> None:
    """Let modules be recomputed: each gets a ``forward`` of its own, as an attribute that hides its class's."""
    notes = RecomputeNotes(recompute)
    for name in names:
        module = plan.modules[name]
        module.__dict__["forward"] = RecomputedForward(
            module, name, notes, regions(name), stops_at_row=recompute == "selective"
        )


@dataclass(frozen=True)
class MLPTiles:
    """How the MLPs of the blocks run, some tokens at a time."""

    tokens: int
    least: int = 1

    def find(self, plan: PlannedModel) -> list[str]:
        """The names of the MLPs: the nearest modules around columns that are not dealt out by heads, and around a row.

        Experts that hold their weights themselves are none. What is gathered for the columns must be gathered in an MLP, and what
        the row makes reduced in it, so that it takes and returns activations as they are between the blocks.
        """
        names = _mlps(plan)
        if not names:
            raise ValueError(
                f"tile_mlp={self.tokens}: in the blocks ({_shown_blocks(plan)}) no module is the MLP, that is one which holds "
                "columns that are not dealt out by heads, and the row behind them, and takes and returns an activation; leave "
                "tile_mlp out"
            )
        return names

    def apply(self, plan: PlannedModel, names: Iterable[str], regions: Callable[[str], SequenceRegion | None]) -> None:
        """Let the MLPs of those names compute some tokens at a time."""
        for name in names:
            stack = plan.stack_reaching(name)
            assert stack is not None
            module = plan.modules[name]
            # torch's own place for what is called instead of a module, hooks included; copies and pickles leave it out.
            module._compiled_call_impl = TiledCall(module, name, self.tokens, regions(name), stack.dim, self.least)
