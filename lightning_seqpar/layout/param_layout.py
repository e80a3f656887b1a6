"""The layout of every parameter: how it is split, and over which axes its gradient must be summed.

Gradient sync, the gradient norm, checkpoints, descriptions and the parity engine read it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor, nn

from lightning_seqpar.layout.replica_rows import is_split, local_rows, rows_held
from lightning_seqpar.layout.shard import Shard


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
