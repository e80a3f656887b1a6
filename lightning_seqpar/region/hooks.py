"""The forward hooks that carry activations into, through and out of a sequence region.

Each function makes one, and says first which: a pre-hook gets a module's arguments and may return others, a hook gets its
output and may return another. Hooks that close something are registered with ``always_call``: where the module
raised they get None for its output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_seqpar.context.seq_part import SeqPart, lies_over_tp, local_of, over_tp
from lightning_seqpar.distributed.autograd import in_backward
from lightning_seqpar.layout.module_names import Argument
from lightning_seqpar.layout.stand_in import stand_in
from lightning_seqpar.region.partial_sum_check import MarkRow
from lightning_seqpar.region.products import NO_COLUMNS, ColumnGroup
from lightning_seqpar.region.sequence_region import SequenceRegion


def find_argument(name: str, arg: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Any]:
    """Where an argument stands in a call (its index, or its keyword), and its value."""
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


def put_argument(
    where: int | str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with another value where :func:`find_argument` found one."""
    if isinstance(where, int):
        return (*args[:where], value, *args[where + 1 :]), kwargs
    return args, {**kwargs, where: value}


def _with_first(out: Any, change: Callable[[Tensor, str], Any], name: str, refusal: str) -> Any:
    """Changes the activation in what the module ``name`` returns: a tensor, or the first of several; else says ``refusal``.

    ``change`` is given the name, which it must not have in a closure: a graph would be of one module alone.
    """
    if isinstance(out, Tensor):
        return change(out, name)
    if not (isinstance(out, list | tuple) and out and isinstance(out[0], Tensor)):
        raise ValueError(f"{name}: {refusal.format(type(out).__name__)}")
    values = [change(out[0], name), *out[1:]]
    return type(out)(*values) if hasattr(out, "_fields") else type(out)(values)


def enter_block(region: SequenceRegion, name: str, arg: Argument) -> Callable[..., Any]:
    """A pre-hook of a block: its activation becomes a shard, ``[b, s, h]`` → ``[b, s/tp, h]``, unless it is one."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region.frames.open(name)
        where, x = find_argument(name, arg, args, kwargs)
        if not isinstance(x, Tensor) or x.is_nested:
            raise ValueError(f"{name}: argument {arg!r} of the block is no (plain) tensor; name the right one by 'scatter'")
        entered = region.path.enter(x, name)
        args, kwargs = _unwrapped(region, *put_argument(where, entered, args, kwargs))
        region.begin_shards()
        return args, kwargs

    return hook


def leave_block(region: SequenceRegion, name: str, *, is_exit: bool) -> Callable[..., Any]:
    """A hook of a block, which returned or raised: what it made goes on as parts of a sequence, or whole at the region's end."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        aborted = out is None
        region.end_shards(aborted=aborted)
        region.observers.shard_made(out[0] if isinstance(out, list | tuple) and out else out, name)
        try:
            return None if aborted else _left(region, name, out) if is_exit else _wrapped(region, name, out)
        finally:
            region.end_call(name)

    return hook


def _unwrapped(region: SequenceRegion, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block with shards in the place of parts of sequences."""
    plain = (Tensor, bool, int, float, str, type(None), torch.nn.Parameter)
    if region.sp and not all(type(x) in plain for x in (*args, *kwargs.values())):
        args, kwargs = tree_map_only(SeqPart, region.path.unwrap, (args, kwargs))
    return args, kwargs


def _wrapped(region: SequenceRegion, name: str, out: Any) -> Any:
    """What a module on shards returns, with parts of a sequence in the place of shards."""
    if not region.sp:
        return None
    if isinstance(out, Tensor) and isinstance(part := region.path.wrap(out), SeqPart):
        return part
    wrapped = tree_map_only(Tensor, region.path.wrap, out)
    floats = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1]
    if floats and not any(isinstance(x, SeqPart) for x in tree_leaves(wrapped)):
        raise ValueError(
            f"{name}: it returned a tensor of shape {list(floats[0].shape)}, but in the sequence region of {region.name} a shard "
            f"has {region.frames.current.part} of {region.frames.length} positions at dim {region.dim}; something in the block "
            "changes the sequence: leave those blocks out of the plan, end the region before them, or set sp=False"
        )
    return wrapped


def begin_on_shards(region: SequenceRegion, name: str, *, is_exit: bool) -> Callable[..., Any]:
    """A pre-hook of a module beside the blocks whose parameters see shards, or at which the region ends.

    Inside a block it is given shards. Called between the blocks it takes parts of a sequence. Where the region ends, what is whole
    may enter too (layerdrop: no block ran).
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if region.frames.current.length is not None:
            return None
        if not is_exit and not any(map(lies_over_tp, tree_leaves((args, kwargs)))):
            region.observers.shard_reader_called(name)
            return None
        return _begin(region, name, 0, args, kwargs)

    return hook


def _begin(
    region: SequenceRegion, name: str, arg: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Begin a call of a module between the blocks: its arguments become shards."""
    region.frames.open(name)
    region.begin_shards()
    where, x = find_argument(name, arg, args, kwargs)
    if isinstance(x, Tensor):
        # A pooled activation, [b, h]: what follows the blocks treats its rows as positions.
        of_samples = region.sp and region.dim == 1 and x.ndim == 2 and type(x) is Tensor
        entered = region.path.enter(x.unsqueeze(0) if of_samples else x, name)
        region.frames.current.of_samples = of_samples
        args, kwargs = put_argument(where, entered, args, kwargs)
    return _unwrapped(region, args, kwargs)


def _end(region: SequenceRegion, name: str, out: Any, *, is_exit: bool = False) -> Any:
    """End such a call, which returned or raised: it gives back parts of a sequence, at the region's end what is whole."""
    region.end_shards(aborted=out is None)
    of_samples = region.frames.current.of_samples
    try:
        given = None if out is None else _left(region, name, out) if is_exit else _wrapped(region, name, out)
        return given.squeeze(0) if of_samples and isinstance(given, Tensor) else given
    finally:
        region.end_call(name)


def end_on_shards(region: SequenceRegion, name: str, *, is_exit: bool) -> Callable[..., Any]:
    """A hook of such a module, which returned or raised: it gives back parts of a sequence, at the region's end what is whole."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        frame = region.frames.current
        if frame.module != name or not frame.is_call:
            for item in out if isinstance(out, list | tuple) else (out,):  # a router's scores may be a shard too
                region.observers.shard_made(item, name)
            return None
        return _end(region, name, out, is_exit=is_exit)

    return hook


def _left(region: SequenceRegion, name: str, out: Any) -> Any:
    """What the module at which the region ends returns, whole: ``[b, s/tp, h]`` → ``[b, s, h]``."""
    if isinstance(out, Tensor):
        return region.path.leave(out, name)
    if not region.sp and isinstance(out, list | tuple):
        return None  # nothing in it is a shard; the activation may stand anywhere
    if not (isinstance(out, list | tuple) and out and isinstance(out[0], Tensor)):
        raise ValueError(f"{name}: the region ends here, but its output is a {type(out).__name__}; end it elsewhere")
    others = tree_map_only(Tensor, region.path.wrap, list(out[1:]))  # a router's scores, another stream
    whole = [region.path.leave(out[0], name), *others]
    return type(out)(*whole) if hasattr(out, "_fields") else type(out)(whole)


def _widest(values: Iterable[Any]) -> torch.dtype | None:
    """The dtype to which all of ``values`` can be cast without loss; None for fewer than two floating-point tensors."""
    kinds = [value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return functools.reduce(torch.promote_types, kinds) if len(kinds) > 1 else None


def _narrow(whole: Tensor, size: int) -> Tensor:
    """What stands for a gathered activation where a module reads its width off it."""
    narrow = stand_in(local_of(whole), size)
    return SeqPart.wrap(narrow, whole.place) if isinstance(whole, SeqPart) else narrow


def _own_tokens(x: Tensor, part: SeqPart) -> Tensor:
    """This rank's tokens of a tensor of the tokens of ``part`` that is whole (``topk`` makes it so); anything else unchanged."""
    if isinstance(x, SeqPart):
        return x
    tokens, shape = tuple(part.shape[:-1]), tuple(x.shape)
    place = part.place.reshaped(tokens, shape[:-1]) or part.place.reshaped(tokens, shape)
    return x if place is None else place.own(x)


def gather_arguments(
    region: SequenceRegion,
    name: str,
    gathered: Sequence[Argument],
    copied: Sequence[Argument] = (),
    *,
    columns: ColumnGroup = NO_COLUMNS,
    local_width: bool = False,
    deals_out: bool = False,
) -> Callable[..., Any]:
    """A pre-hook of a module around columns and rows: its arguments become whole, ``[b, s/tp, h]`` → ``[b, s, h]``.

    An argument that is passed twice is gathered once. Arguments of several types are gathered in the widest of them: the
    gradient of each is a sum over ranks, and none must lose more than another.

    Args:
        gathered: arguments that are shards.
        copied: arguments that are whole already (an encoder's states), or None.
        columns: those that may read the first of the arguments as it stands.
        local_width: whether the module reads this rank's width off its input: then it gets a stand-in of that width.
        deals_out: whether the module deals tokens out to experts: of a sequence that is dealt out over context-parallel ranks
            it is given this rank's positions as all there are, also of what is whole beside it.
    """

    is_simple = tuple(gathered) == (0,) and not (copied or local_width or deals_out)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frames = region.frames
        is_outside = region.sp and not frames.traced and frames.current.length is None
        if is_outside and any(map(lies_over_tp, (*args, *kwargs.values()))):
            args, kwargs = _begin(region, name, gathered[0] if gathered else 0, args, kwargs)  # called between the blocks
        if is_simple and args and isinstance(args[0], Tensor):
            region.open_gather(args[0], name)
            return (region.path.gather(args[0], name, columns), *args[1:]), kwargs
        done: list[tuple[Tensor, Tensor]] = []  # one gather serves an argument that is passed twice
        values = [find_argument(name, arg, args, kwargs)[1] for arg in (*gathered, *copied)]
        widest = _widest(values)
        parts = [x for x in values[: len(gathered)] if isinstance(x, SeqPart) and deals_out and not region.sp]
        for arg in (*gathered, *copied):
            where, x = find_argument(name, arg, args, kwargs)
            if x is None and arg in copied:
                continue  # an encoder's states that this call does without
            if not isinstance(x, Tensor):
                style = "gather" if arg in gathered else "copy"
                raise ValueError(f"{name}: argument {arg!r} is a {type(x).__name__}; {style!r} takes tensors")
            if not done:
                region.open_gather(x, name)
            for before, made in done:
                if before is x:
                    args, kwargs = put_argument(where, made, args, kwargs)
                    break
            else:
                given = x.to(widest) if widest is not None and x.is_floating_point() else x
                if parts and arg in gathered:
                    given = _own_tokens(given, parts[0])
                readers = columns if not done and given.dtype == x.dtype else NO_COLUMNS
                move = region.path.gather if arg in gathered else region.path.copy
                whole = move(given, name, readers)
                casts = torch.is_autocast_enabled(x.device.type)
                if widest not in (None, x.dtype) and not casts and any(p.dtype == x.dtype for p in module.parameters()):
                    whole = whole.to(x.dtype)  # products want their input in the weights' type
                if deals_out and isinstance(whole, SeqPart):
                    region.frames.current.dealt_out = region.frames.current.dealt_out or whole.place
                    whole = whole.local
                made = _narrow(whole, region.size) if local_width and arg in gathered else whole
                done.append((x, made))
                args, kwargs = put_argument(where, made, args, kwargs)
        return args, kwargs

    return hook


def return_whole(regions: Sequence[SequenceRegion]) -> Callable[..., Any]:
    """A hook of a module around the blocks: of what it returns (hidden states, attention maps), parts become whole."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        leaves = [out] if isinstance(out, Tensor) else tree_leaves(out)
        if any(isinstance(x, SeqPart) for x in leaves):
            out = tree_map_only(SeqPart, over_tp, out)
        for region in regions:
            if region.observers.sharded_outputs.has(leaves):
                out = tree_map_only(Tensor, region.observers.sharded_outputs.whole, out)
        return out

    return hook


def close_gather(
    region: SequenceRegion,
    name: str,
    *,
    columns: ColumnGroup = NO_COLUMNS,
    is_block: bool = False,
    is_exit: bool = False,
    heads: int | None = None,
) -> Callable[..., Any]:
    """A hook of a module whose arguments were gathered, which returned or raised.

    Of an attention ``heads`` is the number of query heads, of which each rank has a part.
    """

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        region.close_gather()
        if columns is not NO_COLUMNS:
            columns.close(name, aborted=out is None)
        if out is None and not region.sp:  # it raised between a column and its row
            region.inner_streams.end()
        if heads is not None and isinstance(out, list | tuple):
            for item in out[1:]:
                if isinstance(item, Tensor):
                    region.observers.heads_made(item, name, heads)
        frames = region.frames
        if frames.traced:
            return None
        if frames.current.resumed_by is not None:
            frames.finish(name)
        if not (is_block or is_exit) and frames.current.module == name and frames.current.is_call:
            return _end(region, name, out)
        return None

    return hook


def begin_sum(
    region: SequenceRegion, added: Sequence[tuple[nn.Module, str]], rows: Sequence[tuple[nn.Module, str]], *, of_features: bool
) -> Callable[..., None]:
    """A pre-hook of a module that returns one term of a sum over ranks, and is given whole activations or this rank's features.

    Until :func:`end_sum`, parameters that it ``added`` to the sum are zero on all ranks but the first, and frozen ``rows`` leave
    a node in the graph, so that the sum can be checked. Each is told as the module that holds it and the attribute.
    """

    def hook(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            for holder, leaf in rows:
                parameter = holder._parameters[leaf]
                if parameter is not None and not parameter.requires_grad:
                    holder.__dict__[leaf] = MarkRow.apply(parameter, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
        region.begin_sum(args if of_features else None)
        if region.rank:
            for holder, leaf in added:
                parameter = holder._parameters[leaf]
                if parameter is not None:  # an attribute of the instance is found before its parameters
                    holder.__dict__[leaf] = parameter * 0.0  # with a gradient: DDP waits for one

    return hook


def end_sum(region: SequenceRegion, hidden: Sequence[tuple[nn.Module, str]]) -> Callable[..., None]:
    """A hook of such a module, which returned or raised: the parameters that :func:`begin_sum` hid show again."""

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        region.end_sum()
        for holder, leaf in hidden:
            holder.__dict__.pop(leaf, None)

    return hook


def reduce_output(
    region: SequenceRegion, name: str, rows: Sequence[tuple[nn.Module, str]], once: Sequence[tuple[nn.Module, str]]
) -> Callable[..., Any]:
    """A hook of such a module: what it makes by ``rows``, and adds ``once``, is reduced, ``[b, s, h]`` → ``[b, s/tp, h]``."""

    def read(held: Sequence[tuple[nn.Module, str]]) -> list[nn.Parameter]:
        # In the forward, since a parameter may be another object then (fully_shard).
        return [parameter for holder, leaf in held if (parameter := holder._parameters[leaf]) is not None]

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return _with_first(
            out,
            lambda x, name: region.reduce_sum(x, name, read(rows), read(once)),
            name,
            "a {} can't be reduced; 'reduce' takes a module that returns a tensor",
        )

    return hook


def make_whole(region: SequenceRegion, name: str, wanted: Sequence[Argument]) -> Callable[..., Any]:
    """A pre-hook of a module that every rank computes whole: its arguments ``wanted`` become whole for it."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        done: list[tuple[Tensor, Tensor]] = []
        for arg in wanted:
            where, x = find_argument(name, arg, args, kwargs)
            if not isinstance(x, Tensor):
                raise ValueError(f"{name}: argument {arg!r} is a {type(x).__name__}; 'whole' takes tensors")
            for before, made in done:
                if before is x:
                    args, kwargs = put_argument(where, made, args, kwargs)
                    break
            else:
                whole = region.path.suspend(x, name)
                done.append((x, whole))
                args, kwargs = put_argument(where, whole, args, kwargs)
        return args, kwargs

    return hook


def make_shards(region: SequenceRegion, name: str) -> Callable[..., Any]:
    """A hook of such a module: the activation that it returns becomes a shard again."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if out is not None:
            refusal = "a {} can't be sliced; 'whole' takes a module that returns a tensor"
            out = _with_first(out, region.path.resume, name, refusal)
        region.frames.finish(name)
        return out

    return hook


def slice_arguments(
    take: Callable[[Tensor, int, str], Tensor], name: str, wanted: Sequence[Argument], dim: int
) -> Callable[..., Any]:
    """A pre-hook of a module on local heads: of each argument in ``wanted`` a rank takes its heads, along ``dim``.

    ``take`` is the method ``slice`` of the region's data path.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for arg in wanted:
            where, x = find_argument(name, arg, args, kwargs)
            if isinstance(x, Tensor) and x.shape[dim] > 1:  # one head stands for all
                args, kwargs = put_argument(where, take(x, dim, f"{name}, argument {arg!r}"), args, kwargs)
        return args, kwargs

    return hook


def widen(gather: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A pre-hook of a module over the whole width: it reads all ranks' features, ``[b, s, f/tp]`` → ``[b, s, f]``."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (gather(args[0]), *args[1:])

    return hook


def narrow(rank: int, size: int, name: str) -> Callable[..., Any]:
    """A hook of such a module: of its output each rank keeps its own features, ``[b, s, f]`` → ``[b, s, f/tp]``."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if not isinstance(out, Tensor):
            raise ValueError(f"{name}: 'full_width' takes a module that returns a tensor, not a {type(out).__name__}")
        width = out.shape[-1] // size
        return out.narrow(out.ndim - 1, rank * width, width)

    return hook


def draw_alike(
    region: SequenceRegion, *, always: bool, switch: Literal["begin", "end"] = "end"
) -> tuple[Callable[..., None], Callable[..., None]]:
    """A pre-hook and a hook of a module that draws: in between all ranks draw alike (``end``), or each for itself (``begin``).

    Streams are switched ``always``, or where the input is the same on all ranks.
    """
    back: Literal["begin", "end"] = "begin" if switch == "end" else "end"
    switched: list[bool] = []

    def reads_whole(args: tuple[Any, ...]) -> bool:
        return bool(args) and isinstance(args[0], Tensor) and region.frames.is_whole(local_of(args[0]))

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        streams, switches = region.streams, always
        if not always and streams.own:
            if in_backward():
                switches = streams.was_alike()
            elif module.training and module.p and reads_whole(args):
                streams.note_alike()
                switches = True
        switched.append(switches and getattr(streams, switch)())

    def behind(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if switched and switched.pop():
            getattr(region.streams, back)()
        if isinstance(out, Tensor) and reads_whole(args):
            region.frames.note_whole(local_of(out))

    return before, behind
