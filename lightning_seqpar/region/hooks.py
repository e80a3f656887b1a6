"""The forward hooks that carry activations into, through and out of a sequence region."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_seqpar.distributed.autograd import in_backward
from lightning_seqpar.layout.module_names import Argument
from lightning_seqpar.region.partial_sum_check import MarkRow
from lightning_seqpar.region.sequence_region import SequenceRegion


def _argument(name: str, arg: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Any]:
    """Where an argument stands in a call, and its value."""
    if isinstance(arg, int):
        if arg < len(args):
            return arg, args[arg]
        if arg == 0 and kwargs:
            first = next(iter(kwargs))
            return first, kwargs[first]
    elif arg in kwargs:
        return arg, kwargs[arg]
    raise ValueError(
        f"{name}: the plan names argument {arg!r}, but it was called with {len(args)} positional arguments and "
        f"keywords {sorted(kwargs)}; name the argument as the caller passes it"
    )


def _replace(
    where: int | str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(where, int):
        return (*args[:where], value, *args[where + 1 :]), kwargs
    return args, {**kwargs, where: value}


def open_call(region: SequenceRegion) -> Callable[..., None]:
    """The owner, which runs the blocks, is called."""

    def hook(module: nn.Module, args: Any) -> None:
        region.open_frame()

    return hook


def close_call(region: SequenceRegion, *, at_block: bool) -> Callable[..., Any]:
    """The owner returned or raised; the region ends ``at_block``, or at a module that always runs."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        whole = region.leave_early(out) if at_block and out is not None else None
        region.close_frame(aborted=out is None)  # no output: it raised
        return whole

    return hook


def enter_at_exit(region: SequenceRegion, name: str) -> Callable[..., Any]:
    """Where no block ran (layerdrop), the module at which the region ends begins it too: its parameters see shards."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (region.enter_last(args[0], name), *args[1:]) if args and isinstance(args[0], Tensor) else None

    return hook


def enter_block(region: SequenceRegion, name: str, arg: Argument) -> Callable[..., Any]:
    """The block's activation enters the region, or is in it."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where, x = _argument(name, arg, args, kwargs)
        if not isinstance(x, Tensor) or x.is_nested:
            raise ValueError(
                f"{name}: argument {arg!r} of the block is no (plain) tensor; name the right one by 'scatter'"
            )
        entered = region.enter(x, name)
        region.begin_block()
        return _replace(where, entered, args, kwargs)

    return hook


def leave_block(region: SequenceRegion, name: str) -> Callable[..., None]:
    """The block returned or raised."""

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        region.end_block(aborted=out is None)
        if out is None:  # it raised
            region.abort()
        else:
            first = out[0] if isinstance(out, list | tuple) and out else out
            region.note_shard(first, name)
            region.check_reduced(first, name)
        region.finish(name)

    return hook


def exit_region(region: SequenceRegion, name: str, *, at_owner: bool = False) -> Callable[..., Any]:
    """The region ends at this module's output; ``at_owner``, if it began."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if at_owner and not region.active:
            return None
        if isinstance(out, Tensor):
            return region.leave(out, name)
        if not (isinstance(out, list | tuple) and out and isinstance(out[0], Tensor)):
            raise ValueError(
                f"{name}: the region ends here, but its output is a {type(out).__name__}; end it elsewhere"
            )
        shape = out[0].shape
        for other in out[1:]:
            if region.sp and isinstance(other, Tensor) and other.shape == shape:
                raise ValueError(
                    f"{name}: two of its outputs look like shards; end the region at a module with one output"
                )
        whole = [region.leave(out[0], name), *out[1:]]
        return type(out)(whole) if not hasattr(out, "_fields") else type(out)(*whole)

    return hook


def _widest(values: Iterable[Any]) -> torch.dtype | None:
    """The type of the most precise tensor: the others' gradients are sums over ranks too, and must not lose more."""
    kinds = [value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return functools.reduce(torch.promote_types, kinds) if len(kinds) > 1 else None


def gather_arguments(
    region: SequenceRegion,
    name: str,
    gathered: Sequence[Argument],
    copied: Sequence[Argument] = (),
    *,
    local_width: bool = False,
    rows: int = 1,
) -> Callable[..., Any]:
    """The module's arguments are gathered, or copied where they are whole already, once each; it has so many row linears."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        done: dict[int, Tensor] = {}  # one gather serves an argument that is passed twice
        widest = _widest(_argument(name, arg, args, kwargs)[1] for arg in (*gathered, *copied))
        for arg in (*gathered, *copied):
            where, x = _argument(name, arg, args, kwargs)
            if x is None and arg in copied:
                continue  # an encoder's states that this call does without
            if not isinstance(x, Tensor):
                style = "gather" if arg in gathered else "copy"
                raise ValueError(f"{name}: argument {arg!r} is a {type(x).__name__}; {style!r} takes tensors")
            if not done:
                region.open_gather(x, name, rows)
            if id(x) not in done:
                given = x.to(widest) if widest is not None and x.is_floating_point() else x
                whole = region.gather(given, name) if arg in gathered else region.copy(given, name)
                casts = torch.is_autocast_enabled(x.device.type)
                if widest not in (None, x.dtype) and not casts and any(p.dtype == x.dtype for p in module.parameters()):
                    whole = whole.to(x.dtype)  # products want their input in the weights' type
                done[id(x)] = region.stand_in(whole) if local_width and arg in gathered else whole
            args, kwargs = _replace(where, done[id(x)], args, kwargs)
        return args, kwargs

    return hook


def note_shards(region: SequenceRegion, name: str) -> Callable[..., None]:
    """What a module on shards returns is a shard too (a router's scores)."""

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        for item in out if isinstance(out, list | tuple) else (out,):
            region.note_shard(item, name)

    return hook


def return_whole(regions: Sequence[SequenceRegion]) -> Callable[..., Any]:
    """Of what a module gives to the code around the region, parts become whole (hidden states, attention maps)."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        leaves = tree_leaves(out)
        for region in regions:
            if region.sharded_outputs.has(leaves):
                out = tree_map_only(Tensor, region.sharded_outputs.whole, out)
        return out

    return hook


def close_gather(
    region: SequenceRegion, name: str, *, is_block: bool = False, heads: int | None = None
) -> Callable[..., None]:
    """The gathering module returned or raised; it works on a part of ``heads`` query heads."""

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        first = out[0] if isinstance(out, list | tuple) and out else out
        region.close_gather(first if isinstance(first, Tensor) else None, name)
        if out is None:  # it raised
            region.abort_columns()
        elif heads is not None and isinstance(out, list | tuple):
            for item in out[1:]:
                if isinstance(item, Tensor):
                    region.note_heads(item, name, heads)
        if is_block:
            region.check_reduced(first, name)
        region.finish(name)

    return hook


def begin_sum(
    region: SequenceRegion,
    added: Sequence[tuple[nn.Module, str]],
    rows: Sequence[tuple[nn.Module, str]],
    widths: frozenset[int],
    *,
    raw: bool,
) -> Callable[..., None]:
    """A module that makes partial sums begins: what it adds to them counts on the first rank alone."""

    def hook(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            for holder, leaf in rows:
                parameter = holder._parameters[leaf]
                if parameter is not None and not parameter.requires_grad:
                    holder.__dict__[leaf] = MarkRow.apply(parameter, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
        region.begin_sum(widths)
        if raw:
            region.begin_unwrapped()
        if region.rank:
            for holder, leaf in added:
                parameter = holder._parameters[leaf]
                if parameter is not None:  # an attribute of the instance is found before its parameters
                    holder.__dict__[leaf] = parameter * 0.0  # with a gradient: DDP waits for one

    return hook


def end_sum(region: SequenceRegion, hidden: Sequence[tuple[nn.Module, str]], *, raw: bool) -> Callable[..., None]:
    """It returned or raised: the parameters that :func:`begin_sum` hid show again."""

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        if raw:
            region.end_unwrapped()
        region.end_sum()
        for holder, leaf in hidden:
            holder.__dict__.pop(leaf, None)

    return hook


def reduce_output(
    region: SequenceRegion, name: str, rows: list[nn.Parameter], once: list[nn.Parameter]
) -> Callable[..., Any]:
    """What the module returns is a partial sum."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return region.reduce_sum(out, name, rows, once)
        if not (isinstance(out, list | tuple) and out and isinstance(out[0], Tensor)):
            raise ValueError(
                f"{name}: a {type(out).__name__} can't be reduced; 'reduce' takes a module that returns a tensor"
            )
        first = region.reduce_sum(out[0], name, rows, once)
        return type(out)([first, *out[1:]]) if not hasattr(out, "_fields") else type(out)(first, *out[1:])

    return hook


def make_whole(region: SequenceRegion, name: str, wanted: Sequence[Argument]) -> Callable[..., Any]:
    """The module is computed whole on every rank: its arguments are gathered for that."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        done: dict[int, Tensor] = {}
        for arg in wanted:
            where, x = _argument(name, arg, args, kwargs)
            if not isinstance(x, Tensor):
                raise ValueError(f"{name}: argument {arg!r} is a {type(x).__name__}; 'whole' takes tensors")
            if id(x) not in done:
                done[id(x)] = region.suspend(x, name)
            args, kwargs = _replace(where, done[id(x)], args, kwargs)
        return args, kwargs

    return hook


def make_shards(region: SequenceRegion, name: str) -> Callable[..., Any]:
    """What a module made whole becomes shards again."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            out = region.resume(out, name)
        elif isinstance(out, list | tuple) and out and isinstance(out[0], Tensor):
            first = region.resume(out[0], name)
            out = type(out)([first, *out[1:]]) if not hasattr(out, "_fields") else type(out)(first, *out[1:])
        elif out is not None:
            raise ValueError(
                f"{name}: a {type(out).__name__} can't be sliced; 'whole' takes a module that returns a tensor"
            )
        region.finish(name)
        return out

    return hook


def slice_arguments(region: SequenceRegion, name: str, wanted: Sequence[Argument], dim: int) -> Callable[..., Any]:
    """Arguments with a head dim: each rank takes its heads."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for arg in wanted:
            where, x = _argument(name, arg, args, kwargs)
            if isinstance(x, Tensor) and x.shape[dim] > 1:  # one head stands for all
                args, kwargs = _replace(where, region.slice(x, dim, f"{name}, argument {arg!r}"), args, kwargs)
        return args, kwargs

    return hook


def widen(region: SequenceRegion, name: str) -> Callable[..., Any]:
    """A norm over the whole sharded width reads all ranks' features."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (region.gather_features(args[0]), *args[1:])

    return hook


def narrow(region: SequenceRegion, name: str) -> Callable[..., Any]:
    """Of its output each rank keeps its own features."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if not isinstance(out, Tensor):
            raise ValueError(f"{name}: 'full_width' takes a module that returns a tensor, not a {type(out).__name__}")
        width = out.shape[-1] // region.size
        return out.narrow(-1, region.rank * width, width)

    return hook


def switch_streams(region: SequenceRegion, what: Literal["begin", "end", "pause", "resume"]) -> Callable[..., None]:
    """From here on draws come from another stream: see :class:`~lightning_seqpar.distributed.rng.RankStreams`."""

    def hook(module: nn.Module, *args: Any) -> None:
        streams = region.streams
        if what == "resume":
            streams.resume(id(module))
        else:
            getattr(streams, what)()

    return hook


def draw_alike(region: SequenceRegion, *, always: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    """Before and behind a module that draws: alike on all ranks, always or where its input is a whole activation."""
    switched: list[bool] = []

    def reads_whole(args: tuple[Any, ...]) -> bool:
        return bool(args) and isinstance(args[0], Tensor) and region.is_whole(args[0])

    pause, resume = switch_streams(region, "pause"), switch_streams(region, "resume")

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        recomputes = in_backward()  # then the streams do what the forward did at this state
        switched.append(recomputes or (region.streams.own and (always or reads_whole(args))))
        if switched[-1]:
            pause(module)

    def behind(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if switched and switched.pop():
            resume(module)
        if isinstance(out, Tensor) and reads_whole(args):
            region.note_whole(out)

    return before, behind


def require_shard(region: SequenceRegion, name: str) -> Callable[..., None]:
    """The module must only be called where shards flow."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if in_backward():
            return  # a recompute; the forward was checked
        if not region.active:
            raise ValueError(
                f"{name}: called outside the sequence region of {region.name}, where its input is whole; its gradient "
                "could not be synced by one rule. Call it only between the region's blocks, or leave it out of the plan"
            )

    return hook
