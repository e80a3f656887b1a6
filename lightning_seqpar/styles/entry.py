"""The hooks around a module that is entered with whole activations: what ``gather`` and ``copy`` share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.utils.hooks import RemovableHandle

from lightning_seqpar.layout.module_names import Argument, inside
from lightning_seqpar.region import lowered
from lightning_seqpar.region.hooks import close_gather, gather_arguments
from lightning_seqpar.styles.style import Application


def hook_entry(
    name: str,
    application: Application,
    gathered: Sequence[Argument] = (),
    copied: Sequence[Argument] = (),
    *,
    local_width: bool = False,
) -> Iterator[RemovableHandle]:
    """In front of the module: arguments are gathered, or copied where they are whole already."""
    plan, region = application.plan, application.region_of(name)
    # Experts are dealt tokens out, each by itself: they are given this rank's positions of a sequence as all there are.
    around = [n for n in plan.named("reduce") if inside(name, n) and not plan.sums_features(n)]
    hook = gather_arguments(region, name, gathered, copied, local_width=local_width, deals_out=bool(around))
    yield application.module(name).register_forward_pre_hook(hook, with_kwargs=True)


def close_entry(name: str, application: Application) -> Iterator[RemovableHandle]:
    """Behind it: what was gathered is let go of, and must have passed a row."""
    plan = application.plan
    is_block = any(name in stack.blocks for stack in plan.stacks)
    is_exit = any(name in stack.exits for stack in plan.stacks)
    heads = _query_heads(name, application)
    hook = close_gather(application.region_of(name), name, is_block=is_block, is_exit=is_exit, heads=heads)
    yield application.module(name).register_forward_hook(hook, always_call=True)


def _query_heads(name: str, application: Application) -> int | None:
    """Of how many query heads the module has a part: the units of its first column; none if it has no column."""
    plan = application.plan
    columns = (n for n, m in plan.named("column").items() if inside(n, name) and not m.of_tensor)
    return next((plan.units[column] for column in columns), None)


def lower_entry(
    name: str,
    application: Application,
    gathered: Sequence[Argument] = (),
    copied: Sequence[Argument] = (),
    *,
    local_width: bool = False,
) -> Iterator[RemovableHandle]:
    """The hook of :func:`hook_entry` in its lowered form."""
    hook = lowered.gather_arguments(application.lowered_at(name), name, gathered, copied, local_width=local_width)
    yield application.module(name).register_forward_pre_hook(hook, with_kwargs=True)
