"""Which modules of a model are the MLPs of its blocks, and run some tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.parallel.recompute import attentions, nearest_around
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.region.tiled_call import TiledCall
from lightning_seqpar.styles.linear import ColumnRule
from lightning_seqpar.styles.style import PlannedModel


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
        found += [name for column in columns if (name := nearest_around([column], block, rows)) is not None]
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
    """How the MLPs of the blocks run, some tokens at a time."""

    tokens: int
    least: int = 1

    def find(self, plan: PlannedModel) -> list[str]:
        """The names of the MLPs."""
        if names := mlps(plan):
            return names
        blocks = ", ".join(f"{stack.blocks[0].rpartition('.')[0]}.*" for stack in plan.stacks)
        raise NoMLPError(
            f"tile_mlp={self.tokens}: in the blocks ({blocks}) no module is the MLP, that is one which holds columns that are not "
            "dealt out by heads, and the row behind them, and takes and returns an activation; leave tile_mlp out"
        )

    def apply(self, plan: PlannedModel, names: Iterable[str], regions: Callable[[str], SequenceRegion | None]) -> None:
        """Let the MLPs of those names compute some tokens at a time."""
        for name in names:
            stack = plan.stack_reaching(name)
            assert stack is not None
            module = plan.modules[name]
            # torch's own place for what is called instead of a module, hooks included; copies and pickles leave it out.
            module._compiled_call_impl = TiledCall(module, name, self.tokens, regions(name), stack.dim, self.least)
