"""What a compiled block knows of its region, and the forward hooks of the modules in it.

Around a block the region's own hooks run eagerly (:mod:`~lightning_seqpar.region.hooks`). Inside, a block is lowered: hooks and
layers that do the same with torch operations and functional collectives alone, so that the block's forward is traced to one graph.
They change no random stream, watch nothing, and keep for the backward what the compiler decides. They read no module names, since
a graph is for all blocks of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_seqpar.distributed import traced
from lightning_seqpar.layout.module_names import Argument
from lightning_seqpar.region.frames import FrameStack
from lightning_seqpar.region.hooks import find_argument, put_argument


class LoweredRegion:
    """Moves activations in the blocks of one stack between whole and sharded, as a traced graph does.

    Methods and shapes are those of :class:`~lightning_seqpar.region.data_path.DataPath`.

    Attributes:
        length: positions of the whole sequence in the block that runs, or 0 where activations are whole; no graph reads it.
        padding: by how many positions the shards of all ranks are longer together.
        ndim: number of dims of an activation.
        wholes: what was gathered for modules that are running which see a stand-in of this rank's width.
    """

    def __init__(self, group: ProcessGroup, dim: int, sp: bool) -> None:
        self.group, self.dim, self.sp = group, dim, sp
        self.size, self.rank = group.size(), group.rank()
        self.length, self.padding, self.ndim = 0, 0, 3
        self.wholes: list[Tensor] = []

    def __deepcopy__(self, memo: dict[int, object]) -> LoweredRegion:
        return self  # a process group can't be copied, and all else belongs to the block that runs

    def begin_block(self, frames: FrameStack) -> None:
        """A block begins in the call that ``frames`` tells of."""
        frame = frames.current
        self.length, self.ndim, self.wholes = frame.length or 0, frame.ndim, []
        self.padding = -self.length % self.size

    # ---- columns and rows ----------------------------------------------------------------------------------------

    def gather(self, x: Tensor) -> Tensor:
        """A shard on its way to column linears: whole."""
        if not self.sp:
            return traced.copy_to_tensor_parallel_region(x, self.group)
        self._require_activation(x)
        return traced.gather_from_sequence_parallel_region(x, self.dim, self.group, self.padding)

    def reduce(self, x: Tensor) -> Tensor:
        """The partial sums of a row linear, reduced over the ranks."""
        if not self.sp:
            return traced.reduce_from_tensor_parallel_region(x, self.group)
        self._require_activation(x)
        return traced.reduce_scatter_to_sequence_parallel_region(x, self.dim, self.group, self.padding)

    def _require_activation(self, x: Tensor) -> None:
        if x.ndim != self.ndim:
            raise ValueError(
                f"a tensor of {x.ndim} dims is gathered or reduced in a compiled block, where activations have {self.ndim}: "
                "flattened tokens have no compiled form; use compile=False"
            )

    def copy(self, x: Tensor) -> Tensor:
        """An activation that is whole already (an encoder's states) on its way to column linears."""
        return traced.copy_to_tensor_parallel_region(x, self.group)

    # ---- modules that are computed whole -------------------------------------------------------------------------

    def suspend(self, x: Tensor) -> Tensor:
        """A shard on its way to a module that every rank computes whole."""
        if not self.sp:
            return x
        self._require_activation(x)
        return traced.gather_replicated_from_sequence_parallel_region(x, self.dim, self.group, self.padding)

    def resume(self, x: Tensor) -> Tensor:
        """What such a module made: a shard again."""
        if not self.sp:
            return x
        self._require_activation(x)
        return traced.scatter_to_sequence_parallel_region(x, self.dim, self.group, self.padding)

    # ---- other dims ----------------------------------------------------------------------------------------------

    def slice(self, x: Tensor, dim: int, what: str) -> Tensor:
        """This rank's part of a whole tensor along a head or feature dim; messages call the tensor ``what``."""
        if x.shape[dim] % self.size:
            raise ValueError(f"{what}: {x.shape[dim]} heads or features at dim {dim} do not divide by tp={self.size}")
        return traced.scatter_to_sequence_parallel_region(x, dim % x.ndim, self.group)

    def gather_features(self, x: Tensor) -> Tensor:
        """Every rank's features, in order, for a module over the whole width."""
        return traced.gather_from_sequence_parallel_region(x, x.ndim - 1, self.group)


# ---- hooks -------------------------------------------------------------------------------------------------------------


def begin_lowered_block(lowered: LoweredRegion, frames: FrameStack) -> Callable[..., None]:
    """A pre-hook of a block, eager: from here on its parts know the length of the sequence."""

    def hook(module: nn.Module, args: Any) -> None:
        lowered.begin_block(frames)

    return hook


def gather_arguments(
    lowered: LoweredRegion, name: str, gathered: Sequence[Argument], copied: Sequence[Argument], *, local_width: bool
) -> Callable[..., Any]:
    """A pre-hook of a module around columns and rows: its arguments become whole, ``[b, s/tp, h]`` → ``[b, s, h]``.

    An argument that is passed twice is gathered once. The arguments of the hook of the same name in
    :mod:`~lightning_seqpar.region.hooks`, to which this one is equal.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        done: list[tuple[Tensor, Tensor]] = []
        dtypes = [find_argument(name, arg, args, kwargs)[1] for arg in (*gathered, *copied)]
        dtypes = [value.dtype for value in dtypes if isinstance(value, Tensor) and value.is_floating_point()]
        widest = dtypes[0] if dtypes else None
        for dtype in dtypes[1:]:
            widest = torch.promote_types(widest, dtype)  # type: ignore[arg-type]
        for arg in (*gathered, *copied):
            where, x = find_argument(name, arg, args, kwargs)
            if x is None and arg in copied:
                continue
            if not isinstance(x, Tensor):
                raise ValueError(f"{name}: argument {arg!r} is a {type(x).__name__}, and no tensor can be gathered")
            whole = None
            for before, made in done:
                if before is x:
                    whole = made
            if whole is None:
                given = x.to(widest) if x.is_floating_point() and x.dtype != widest else x
                whole = lowered.gather(given) if arg in gathered else lowered.copy(given)
                casts = torch.is_autocast_enabled(x.device.type)
                if x.dtype != whole.dtype and not casts and any(p.dtype == x.dtype for p in module.parameters()):
                    whole = whole.to(x.dtype)  # products want their input in the weights' type
                if local_width and arg in gathered:
                    lowered.wholes.append(whole)
                    whole = stand_in(whole, lowered.size)
                done.append((x, whole))
            args, kwargs = put_argument(where, whole, args, kwargs)
        return args, kwargs

    return hook


def stand_in(whole: Tensor, size: int) -> Tensor:
    """``[..., h]`` → NaN in the shape ``[..., h/tp]``: it tells a rank's width, and columns read what was gathered instead."""
    return whole.detach().new_full((), float("nan")).expand(*whole.shape[:-1], whole.shape[-1] // size)


def forget_gathered(lowered: LoweredRegion) -> Callable[..., None]:
    """A hook of such a module, which returned: columns behind it read nothing of what was gathered for it."""

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        lowered.wholes.pop()

    return hook


def make_whole(lowered: LoweredRegion, name: str, wanted: Sequence[Argument]) -> Callable[..., Any]:
    """A pre-hook of a module that every rank computes whole: its arguments ``wanted`` become whole for it."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for arg in wanted:
            where, x = find_argument(name, arg, args, kwargs)
            args, kwargs = put_argument(where, lowered.suspend(x), args, kwargs)
        return args, kwargs

    return hook


def make_shards(lowered: LoweredRegion) -> Callable[..., Any]:
    """A hook of such a module: the activation that it returns becomes a shard again."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return lowered.resume(out) if isinstance(out, Tensor) else type(out)([lowered.resume(out[0]), *out[1:]])

    return hook
