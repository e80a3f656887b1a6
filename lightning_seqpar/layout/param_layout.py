"""The layout of every parameter: which indices and rows of it a rank holds, and over which axes its gradient must be summed.

Gradient sync, the gradient norm, checkpoints, descriptions and the parity engine read it, and nothing else. Rows are those of
``fully_shard``, which makes a ``DTensor`` of what tensor parallelism gives a rank, of its gradient and of the optimizer's moments.
Everywhere else tensors stay plain: this module is where the two forms meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_seqpar.distributed.async_ops import all_gather, pad
from lightning_seqpar.user_input import sizes_that_divide


@dataclass(frozen=True)
class Shard:
    """How one dim of a tensor is split over the tensor-parallel ranks.

    A rank may have several ranges (its heads of ``[q|k|v]``), and several ranks may have the same indices (a kv head that
    their query heads share).
    """

    dim: int
    length: int  # of the whole
    ranges: tuple[tuple[tuple[int, int], ...], ...]  # of each rank, (start, stop) in the order in which it stores them
    padded: int | None = None  # the length on every rank, where shorter parts end in zeros; None for no padding

    @classmethod
    def by_vocabulary(cls, length: int, size: int) -> Shard:
        """Split dim 0 into ``size`` parts of ``ceil(length / size)`` rows; the last ones are padded if it does not divide."""
        part = -(-length // size)
        ranges = tuple(((min(rank * part, length), min((rank + 1) * part, length)),) for rank in range(size))
        return cls(0, length, ranges, part)

    @classmethod
    def by_segments(cls, dim: int, segments: Sequence[int], units: Sequence[int], size: int, name: str) -> Shard:
        """Splits every segment of a fused dim by its units, in order; for example ``[q|k|v]`` by heads.

        Of fewer units than ranks, ``size / units`` neighbouring ranks have the same one, as the query heads of a group use
        one kv head. With 4 query heads, 2 kv heads, 2 features a head and ``size=4``, segments ``[8, 4, 4]`` and units
        ``[4, 2, 2]`` give rank 1 the ranges ``(2, 4)``, ``(8, 10)`` and ``(12, 14)``, of which rank 0 has the last two too.

        What does not divide is a ValueError, which names the module ``name`` and the sizes that work.
        """
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        start = 0
        for length, count in zip(segments, units, strict=True):
            if length % count:
                raise ValueError(
                    f"{name}: a segment of {length} features can't be made of {count} units; {count} must divide it"
                )
            if count % size and size % count:
                works = sizes_that_divide("tp", count)
                raise ValueError(f"{name}: {count} units (heads or features) do not divide by tp={size}; {works}")
            parts = min(count, size)
            part = length // parts
            for rank in range(size):
                at = start + rank * parts // size * part
                ranges[rank].append((at, at + part))
            start += length
        if all(own == ranges[0] for own in ranges):
            raise ValueError(
                f"{name}: with {max(units)} unit(s) every one of tp={size} ranks would hold all of it; leave it whole"
            )
        return cls(dim, start, tuple(tuple(own) for own in ranges))

    @cached_property
    def holders(self) -> Tensor:
        """How many ranks have each index: int64 ``[length]``."""
        count = torch.zeros(self.length, dtype=torch.int64)
        for own in self.ranges:
            for start, stop in own:
                count[start:stop] += 1
        return count

    @property
    def shared_length(self) -> int:
        """How many indices several ranks have; no tensor is made, so that it can be asked where tensors have no numbers."""
        held = Counter(pair for own in self.ranges for pair in own)  # of two ranks the same, or without a common index
        return sum(stop - start for (start, stop), count in held.items() if count > 1)

    @property
    def has_shared(self) -> bool:
        """Whether several ranks have the same indices."""
        return sum(stop - start for own in self.ranges for start, stop in own) > self.length

    def indices(self, rank: int) -> Tensor:
        """The global indices that ``rank`` has, in the order in which it stores them: ``[local length]``, without padding."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.ranges[rank]])

    def is_first_holder(self, rank: int) -> Tensor:
        """For each index that ``rank`` has, whether no rank before it has it too: bool ``[local length]``, without padding."""
        mine = self.indices(rank)
        before = torch.zeros(self.length, dtype=torch.bool)
        for other in range(rank):
            before[self.indices(other)] = True
        return ~before[mine]

    def local_length(self, rank: int) -> int:
        """Length of the dim on ``rank``, with padding."""
        if self.padded is not None:
            return self.padded
        return sum(stop - start for start, stop in self.ranges[rank])

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Takes the part of a whole tensor that ``rank`` has, padded, in memory of its own."""
        if whole.shape[self.dim] != self.length:
            raise ValueError(f"expected {self.length} at dim {self.dim}, got a tensor of shape {list(whole.shape)}")
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]]
        return self.join(pieces).clone(memory_format=torch.contiguous_format)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """A rank's part from the pieces of its ranges, in order; padded with zeros to :attr:`padded`, if that is set."""
        missing = 0 if self.padded is None else self.padded - sum(piece.shape[self.dim] for piece in pieces)
        shape = list(pieces[0].shape)
        shape[self.dim] = missing
        return torch.cat([*pieces, pieces[0].new_zeros(shape)] if missing else list(pieces), self.dim)

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the parts of all ranks, in order; padding is left out."""
        shape = list(parts[0].shape)
        shape[self.dim] = self.length
        whole = parts[0].new_empty(shape)
        for part, own in zip(parts, self.ranges, strict=True):
            at = 0
            for start, stop in own:
                whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, at, stop - start))
                at += stop - start
        return whole


def is_split(tensor: object) -> TypeGuard[DTensor]:
    """Whether each data-parallel rank holds only some rows of the tensor."""
    return isinstance(tensor, DTensor)


def local_rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor that is split over the replicas, in the same memory; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def rows_held(tensor: Tensor) -> tuple[int, int] | None:
    """The first of this rank's rows and the one behind the last; None for a tensor that every replica holds whole."""
    if not is_split(tensor):
        return None
    mesh = tensor.device_mesh  # of all replicas that hold rows; in front of them those that hold the same
    place = mesh.get_coordinate()
    assert place is not None
    return rows_of(tensor.shape[0], mesh.size(mesh.ndim - 1), place[-1])


def rows_of(length: int, size: int, rank: int) -> tuple[int, int]:
    """The first row of a rank's and the one behind the last, of ``length`` rows over ``size`` ranks."""
    part = -(-length // size)  # as torch.chunk cuts: the last ranks may hold fewer rows, or none
    start = min(rank * part, length)
    return start, min(start + part, length)


def take_rows(part: Tensor, like: Tensor) -> Tensor:
    """Takes this rank's rows of ``part``, in memory of their own, if ``like`` is split; else returns ``part``."""
    if not is_split(like):
        return part
    start, stop = rows_held(like) or (0, 0)
    return with_rows(part[start:stop].clone(), like)


def with_rows(rows: Tensor, like: DTensor) -> DTensor:
    """The ``DTensor`` of which this rank holds ``rows``, split as ``like`` is."""
    return DTensor.from_local(rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def empty_like_rows(like: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU for a tensor which a replica holds as ``shape``; a ``DTensor`` of this rank's rows if ``like`` is one."""
    if like is None or not is_split(like):
        return torch.zeros(shape, dtype=dtype)
    start, stop = rows_held(like) or (0, 0)
    return with_rows(torch.zeros(stop - start, *shape[1:], dtype=dtype), like)


def empty_on_cpu(like: Tensor) -> Tensor:
    """Memory on the CPU for what a rank holds of a tensor on the meta device, split as that is."""
    if not is_split(like):
        return torch.empty_like(like, device="cpu")
    return with_rows(torch.empty_like(local_rows(like), device="cpu"), like)


def gather_rows(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Gathers the rows of the replicas that share a tensor out, if it is split. Collective over their group, ``fsdp_shard``."""
    if not is_split(tensor):
        return tensor
    rows = local_rows(tensor).detach()
    device = rows.device
    if device.type == "cpu" and dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())  # after fit the model lies on the CPU
    sent = pad(rows.to(device), 0, -(-tensor.shape[0] // group.size()))
    return all_gather(sent, 0, group, tensor.shape[0]).to(rows.device)


class Reason(Enum):
    """Why a parameter has its layout; the value is the text of messages and of the plan's table."""

    IDENTICAL = "whole activations: identical gradients"
    COMPUTED_WHOLE = "computed whole on every rank: identical gradients"
    COLUMN = "column: out-features sharded"
    COLUMN_SHARED = "column: out-features sharded, some of them by several ranks"
    COLUMN_HEADS = "column: heads sharded, [q|k|v]"
    ROW = "row: in-features sharded"
    ROW_HEADS = "row: heads sharded"
    ROW_BIAS_ON_SHARDS = "row bias: added to shards"
    ROW_BIAS_ONCE = "row bias: the first rank adds it to partial sums"
    ONCE = "once: the first rank adds it to partial sums"
    VOCAB = "vocab: sharded by vocabulary"
    LOCAL_HEADS = "local_heads: sliced along its heads"
    SEES_SHARDS = "sees sequence shards"
    GATHER_TO_ROW = "between gather and row"
    COPY_TO_ROW = "between copy and row"
    IN_SUM = "in a module whose output is summed over tp"
    COLUMN_TO_ROW = "between columns and row"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class ParamLayout:
    """The layout of one parameter."""

    name: str  # in the model; parallelisation does not change it
    global_shape: tuple[int, ...]
    shard: Shard | None = None  # how it is split over the axis tp; None if every rank has all of it
    sum_over: frozenset[str] = frozenset()  # the axes over whose ranks its gradient is a sum: each rank has one term
    reason: Reason = Reason.IDENTICAL
    free: bool = False  # the model's own code reads this rank's part, rather than a parallel layer
    stages: tuple[int, ...] = ()  # of a pipeline that hold it; empty where every rank of the axis pp does

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have different parts of it."""
        return self.shard is not None

    @property
    def is_partial(self) -> bool:
        """Whether its gradient is a term of a sum over some axes."""
        return bool(self.sum_over)

    def is_on(self, stage: int) -> bool:
        """Whether a stage of a pipeline holds it."""
        return not self.stages or stage in self.stages

    def fits(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` has the whole parameter's shape, as its value and an optimizer's states for it have."""
        return tuple(tensor.shape) == self.global_shape

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Takes the part of a whole tensor that tensor-parallel ``rank`` has; raises ValueError for another shape."""
        if not self.fits(whole):
            raise ValueError(
                f"{self.name}: expected the whole shape {list(self.global_shape)}, got {list(whole.shape)}; "
                "it belongs to another model or configuration"
            )
        return whole if self.shard is None else self.shard.take(whole, rank)


class ModelLayout(Mapping[str, ParamLayout]):
    """The layouts of the parameters of a model that was parallelised, by name (as a mapping) or by parameter (:meth:`of`)."""

    def __init__(self, model: nn.Module, layouts: Mapping[str, ParamLayout]) -> None:
        self._layouts = dict(layouts)
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self._computing: dict[str, nn.Parameter] = {}
        self._first_held: dict[tuple[str, torch.device, tuple[int, int] | None], Tensor] = {}
        self.rebind(model)

    def __getitem__(self, name: str) -> ParamLayout:
        return self._layouts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def rebind(self, model: nn.Module) -> None:
        """Look the parameters up again by name, after something that replaced the objects (``fully_shard``)."""
        self._parameters = {name: model.get_parameter(name) for name in self._layouts}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._computing = {}

    def note_stages(self, stages_of: Callable[[str], tuple[int, ...]]) -> None:
        """Note of each parameter, by its name, which stages of a pipeline hold it."""
        self._layouts = {name: replace(layout, stages=stages_of(name)) for name, layout in self._layouts.items()}

    def note_computing(self, model: nn.Module, prefix: str) -> dict[str, nn.Parameter]:
        """Notes, and returns if they are new, what stands in for parameters called ``prefix``... while a forward has all rows."""
        new: dict[str, nn.Parameter] = {}
        for name in self._parameters:
            if name.startswith(prefix) and name not in self._computing:
                now = model.get_parameter(name)
                if not is_split(now) and now is not self._parameters[name]:
                    new[name] = self._computing[name] = now
                    self._names[id(now)] = name
        return new

    def left_computing(self) -> list[str]:
        """Names of parameters whose stand-in of the forward holds a gradient, which nobody has taken over to the parameter."""
        return [name for name, stand_in in self._computing.items() if stand_in.grad is not None]

    def drop_computed(self) -> None:
        """Take away gradients of the forward's stand-ins, which an aborted backward has left."""
        for stand_in in self._computing.values():
            stand_in.grad = None

    def of(self, tensor: Tensor) -> ParamLayout | None:
        """The layout of a parameter of the model, or of what stands in for it in a forward; None for any other tensor."""
        name = self._names.get(id(tensor))
        return None if name is None else self._layouts[name]

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of that name."""
        return self._parameters[name]

    def first_held(self, name: str, rank: int, grad: Tensor) -> Tensor:
        """Returns which indices of a rank's part (or rows) of a gradient no rank before it holds too: int64, made once."""
        rows, shard = rows_held(grad), self[name].shard
        key = name, grad.device, rows
        if key not in self._first_held:
            assert shard is not None
            is_first = shard.is_first_holder(rank)
            if shard.dim == 0 and rows is not None:
                is_first = is_first[slice(*rows)]
            self._first_held[key] = is_first.nonzero().flatten().to(grad.device)
        return self._first_held[key]

    def replaced(self, model: nn.Module) -> list[str]:
        """Names under which the model now has another parameter object than when it was parallelised."""
        current = dict(model.named_parameters(remove_duplicate=False))
        return [
            name
            for name, parameter in self._parameters.items()
            if (now := current.get(name)) is None or (now is not parameter and now is not self._computing.get(name))
        ]

    def added(self, model: nn.Module) -> list[str]:
        """Names of parameters that the model did not have when it was parallelised."""
        known = self._layouts.keys()
        return [name for name, p in model.named_parameters() if self.of(p) is None and name not in known]

    def local_numel(self, names: Iterable[str] | None = None) -> int:
        """How many numbers are on this rank of the parameters of these names; None for all."""
        return sum(local_rows(self._parameters[n]).numel() for n in (self._parameters if names is None else names))

    def global_numel(self) -> int:
        """Number of parameters of the whole model."""
        return sum(torch.Size(layout.global_shape).numel() for layout in self._layouts.values())
