"""Optimizers that need whole matrices (Muon, LAMB): in a step each rank updates some of them whole, and sends their parts back.

The matrices of which ranks hold parts are dealt out among those ranks, so that memory and work of an update are divided as the
parameters are. What an optimizer keeps of a matrix between steps stays in parts, as the parameter does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_seqpar.layout.param_layout import ModelLayout, ParamLayout, is_split, local_rows, rows_of
from lightning_seqpar.topology.process_groups import ParallelGroups

_ALIGNED = 16  # bytes: every tensor that is sent begins at a multiple of it, as a view in its own type must


class WholeMatrices:
    """Hooks on steps of optimizers: before one a rank gets the matrices that it updates, behind it their parts go back."""

    def __init__(self) -> None:
        self._begun: tuple[ModelLayout, ParallelGroups] | None = None
        self._around: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.step: _Step | None = None  # under way

    def begin(self, layout: ModelLayout, groups: ParallelGroups) -> None:
        """Begin a run of a model that is laid out so."""
        self._begun = layout, groups

    def around(self, optimizer: Optimizer) -> None:
        """Let steps of ``optimizer`` see whole matrices, from now on."""
        if optimizer not in self._around:
            self._around.add(optimizer)
            optimizer.register_step_pre_hook(self._before)
            # In front of hooks of the user's, which read and change parameters.
            behind, hooks = optimizer.register_step_post_hook(self._behind), vars(optimizer)["_optimizer_step_post_hooks"]
            hooks.move_to_end(behind.id, last=False)

    def put_back(self) -> None:
        """Give an optimizer whose step has raised its own parameters back."""
        if self.step is not None:
            self.step.put_back()
            self.step = None

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        def begin() -> None:
            self.put_back()
            if self._begun is not None:
                self.step = _Step(optimizer, *self._begun)

        return behind_closure(begin, args, kwargs)

    def _behind(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.step is not None:
            self.step.finish()
        self.put_back()


def behind_closure(run: Any, args: Any, kwargs: Any) -> Any:
    """What a hook in front of an optimizer's step returns, for ``run`` to be called behind the closure, or now if there is none."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return run()

    def closed() -> Any:
        with torch.enable_grad():
            out = closure()
        run()
        return out

    return ((args[0], closed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closed})


@dataclass(frozen=True)
class _Divided:
    """A parameter that is divided, and along each axis (``tp``, ``rows``) the rank that updates it."""

    parameter: nn.Parameter
    layout: ParamLayout
    owner: Mapping[str, int]


class _Axis(Protocol):
    """An axis along which parameters are cut."""

    name: str
    group: ProcessGroup

    def cuts(self, one: _Divided) -> bool:
        """Whether its ranks hold different parts; else each has the same."""

    def shape(self, one: _Divided, rank: int) -> Sequence[int]:
        """The shape of a rank's part."""

    def join(self, one: _Divided, parts: Sequence[Tensor]) -> Tensor:
        """What the parts of all ranks make."""

    def take(self, one: _Divided, joined: Tensor, rank: int) -> Tensor:
        """A rank's part."""


class _TensorParallel:
    """The ranks of tp."""

    name = "tp"

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def cuts(self, one: _Divided) -> bool:
        return one.layout.is_sharded

    def shape(self, one: _Divided, rank: int) -> Sequence[int]:
        shape, shard = list(one.layout.global_shape), one.layout.shard
        if shard is not None:
            shape[shard.dim] = shard.local_length(rank)
        return shape

    def join(self, one: _Divided, parts: Sequence[Tensor]) -> Tensor:
        assert one.layout.shard is not None
        return one.layout.shard.assemble(parts)

    def take(self, one: _Divided, joined: Tensor, rank: int) -> Tensor:
        return one.layout.take(joined, rank)


class _Rows:
    """The replicas that hold rows."""

    name = "rows"

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def cuts(self, one: _Divided) -> bool:
        return is_split(one.parameter)

    def shape(self, one: _Divided, rank: int) -> Sequence[int]:
        start, stop = self._range(one, rank)
        return stop - start, *one.parameter.shape[1:]

    def join(self, one: _Divided, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([*parts])

    def take(self, one: _Divided, joined: Tensor, rank: int) -> Tensor:
        return joined[slice(*self._range(one, rank))]

    def _range(self, one: _Divided, rank: int) -> tuple[int, int]:
        length = one.parameter.shape[0]
        return rows_of(length, self.group.size(), rank) if self.cuts(one) else (0, length)


@dataclass(frozen=True)
class _Form:
    """What an optimizer keeps of a parameter under a name: a tensor that is cut as the parameter is, or a number."""

    dtype: torch.dtype | None  # of such a tensor
    value: Any = None  # anything else, on the CPU
    is_on_device: bool = False


_Forms = dict[str, _Form]
_Values = dict[int, list[Tensor]]  # tensors that are cut as a parameter is, by its place among those of a step


class _Step:
    """One step of an optimizer. Making it, and :meth:`finish`, are collective over the ranks that hold parts of its matrices."""

    def __init__(self, optimizer: Optimizer, layout: ModelLayout, groups: ParallelGroups) -> None:
        self._optimizer = optimizer
        self._held: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
        due = [
            (parameter, found)
            for held in self._held
            for parameter in held
            if parameter.grad is not None
            and (found := layout.of(parameter)) is not None
            and (found.is_sharded or is_split(parameter))
        ]
        self._axes: list[_Axis] = [_TensorParallel(groups["tp"])]
        if any(is_split(parameter) for parameter, _ in due):
            self._axes.insert(0, _Rows(groups["fsdp_shard"]))
        self._device = next((local_rows(parameter).device for parameter, _ in due), torch.device("cpu"))
        self._rank = {axis.name: axis.group.rank() for axis in self._axes}
        self._due = dict(enumerate(_dealt_out(due, {axis.name: axis.group.size() for axis in self._axes})))
        self._made: dict[int, nn.Parameter] = {}
        states = [optimizer.state[one.parameter] for one in self._due.values() if one.parameter in optimizer.state]
        self._is_new = len(states) < len(self._due)
        # Ranks that hold parts of a matrix do not know what its update makes of numbers.
        self._tells = self._is_new or any(not isinstance(x, Tensor) or not x.ndim for state in states for x in state.values())
        if self._due:
            with torch.no_grad():
                self._begin()

    def _is_mine(self, one: _Divided, axes: Iterable[_Axis]) -> bool:
        return all(one.owner[axis.name] == self._rank[axis.name] for axis in axes)

    def _begin(self) -> None:
        """Put the matrices that this rank updates in the place of the parameters that it holds parts of."""
        optimizer, values = self._optimizer, _Values()
        for at, one in self._due.items():
            if self._is_mine(one, [axis for axis in self._axes if not axis.cuts(one)]):
                assert one.parameter.grad is not None
                tensors = (one.parameter, one.parameter.grad, *self._kept_parts(one.parameter).values())
                values[at] = [local_rows(tensor).detach() for tensor in tensors]
        for axis in self._axes:
            values = self._united(axis, values)
        for at, (weight, grad, *parts) in values.items():
            one = self._due[at]
            whole = self._made[at] = nn.Parameter(weight)
            whole.grad = grad
            if one.parameter in optimizer.state:
                kept = dict(zip(self._kept_parts(one.parameter), parts, strict=True))
                optimizer.state[whole] = {**optimizer.state[one.parameter], **kept}
        due = {id(one.parameter): self._made.get(at) for at, one in self._due.items()}
        for group, held in zip(optimizer.param_groups, self._held, strict=True):
            seen = (due.get(id(parameter), parameter) for parameter in held)
            group["params"] = [parameter for parameter in seen if parameter is not None]

    def finish(self) -> None:
        """Send the parts of what the step has made of this rank's matrices to the ranks that hold them."""
        if not self._due:
            return
        state, values = self._optimizer.state, _Values()
        forms = {at: self._forms(self._due[at], whole) for at, whole in self._made.items()}
        for at, whole in self._made.items():
            values[at] = [whole.detach(), *self._kept_parts(whole).values()]
        if self._tells:
            for axis in reversed(self._axes):
                told: list[Any] = [None] * axis.group.size()
                dist.all_gather_object(told, forms, group=axis.group)
                forms = {at: form for one in told for at, form in one.items()}
        else:
            forms = {at: self._forms(one, one.parameter) for at, one in self._due.items()}
        with torch.no_grad():
            for at, axis in reversed([*enumerate(self._axes)]):
                values = self._dealt(axis, self._axes[:at], values, forms)
            for at, one in self._due.items():
                weight, *kept = values[at]
                local_rows(one.parameter).copy_(weight)
                self._take_over(one.parameter, iter(kept), forms[at], state[one.parameter])

    def put_back(self) -> None:
        """Give the optimizer its own parameters back."""
        for group, held in zip(self._optimizer.param_groups, self._held, strict=True):
            group["params"] = held
        for whole in self._made.values():
            self._optimizer.state.pop(whole, None)

    def _kept_parts(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What is kept of a parameter and is cut as it is, in one order on all ranks."""
        state = self._optimizer.state.get(parameter, {})
        return {key: state[key] for key in sorted(state) if is_like(state[key], parameter)}

    def _forms(self, one: _Divided, parameter: nn.Parameter) -> _Forms:
        """What the optimizer keeps of a parameter, by name."""
        state, forms = self._optimizer.state.get(parameter, {}), _Forms()
        known = self._optimizer.state.get(one.parameter, state)
        if state.keys() != known.keys() or not all(can_keep(x, parameter) for x in state.values()):
            kept = ", ".join(f"{key} {list(getattr(x, 'shape', []))}" for key, x in sorted(state.items()))
            raise RuntimeError(
                f"{one.layout.name}: {type(self._optimizer).__name__} keeps {kept} of it. Ranks that hold parts of a matrix can "
                "keep parts of tensors of its shape, and numbers, the same in every step"
            )
        for key in sorted(state):
            value = state[key]
            if is_like(value, parameter):
                forms[key] = _Form(value.dtype)
            elif isinstance(value, Tensor):
                forms[key] = _Form(None, value.cpu(), value.device == parameter.device)
            else:
                forms[key] = _Form(None, value)
        return forms

    def _take_over(self, parameter: nn.Parameter, kept: Any, forms: _Forms, state: dict[str, Any]) -> None:
        """Write this rank's parts into what is kept of a parameter."""
        for key, form in forms.items():
            if form.dtype is None:
                state[key] = form.value.to(parameter.device) if form.is_on_device else form.value
            else:
                if key not in state:  # where the parameter is: rows may be offloaded
                    state[key] = torch.zeros_like(parameter, dtype=form.dtype, requires_grad=False)
                local_rows(state[key]).copy_(next(kept))

    # ---- what is sent ------------------------------------------------------------------------------------------

    def _united(self, axis: _Axis, values: _Values) -> _Values:
        """Of parts along an axis the whole ones, on the rank of it that updates them."""
        size, own = axis.group.size(), self._rank[axis.name]
        cut = {at: parts for at, parts in values.items() if axis.cuts(self._due[at])}
        given = [
            [x for at, parts in cut.items() if self._due[at].owner[axis.name] == rank for x in parts] for rank in range(size)
        ]
        mine = [at for at in values if self._due[at].owner[axis.name] == own]
        wanted = [
            [(axis.shape(self._due[at], rank), x.dtype) for at in mine if at in cut for x in cut[at]] for rank in range(size)
        ]
        got = [iter(each) for each in _exchanged(given, wanted, axis.group, self._device)]
        out = _Values()
        for at in mine:
            out[at] = values[at]
            if at in cut:
                out[at] = [axis.join(self._due[at], [next(each) for each in got]) for _ in cut[at]]
        return out

    def _dealt(self, axis: _Axis, others: Sequence[_Axis], values: _Values, forms: Mapping[int, _Forms]) -> _Values:
        """Of what one rank of an axis has updated each rank's parts; ``others`` are the axes along which parts go on from there."""
        size, own = axis.group.size(), self._rank[axis.name]
        given = [
            [axis.take(self._due[at], x, rank).contiguous() for at, joined in values.items() for x in joined]
            for rank in range(size)
        ]
        ours = {at: one for at, one in self._due.items() if self._is_mine(one, others)}
        by_owner = [[at for at, one in ours.items() if one.owner[axis.name] == rank] for rank in range(size)]
        wanted = [
            [
                (axis.shape(self._due[at], own), dtype)
                for at in places
                for dtype in (self._due[at].parameter.dtype, *(form.dtype for form in forms[at].values()))
                if dtype is not None
            ]
            for places in by_owner
        ]
        got = _exchanged(given, wanted, axis.group, self._device)
        out = _Values()
        for places, each in zip(by_owner, map(iter, got), strict=True):
            for at in places:
                count = 1 + sum(form.dtype is not None for form in forms[at].values())
                out[at] = [next(each) for _ in range(count)]
        return dict(sorted(out.items()))


def is_like(value: object, parameter: Tensor) -> bool:
    """Whether what an optimizer keeps of a parameter has its shape, and so is cut as it is."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape


def can_keep(value: object, parameter: Tensor) -> bool:
    """Whether ranks that hold parts of a parameter can keep parts of this, or the same number."""
    return is_like(value, parameter) or (isinstance(value, Tensor) and not value.ndim) or isinstance(value, int | float | None)


def _dealt_out(due: Sequence[tuple[nn.Parameter, ParamLayout]], sizes: Mapping[str, int]) -> list[_Divided]:
    """Choose who updates which parameter: the largest first, each by the rank that has the least to multiply so far."""

    def work(at: int) -> int:
        shape = due[at][1].global_shape
        return torch.Size(shape).numel() * (min(shape) if len(shape) > 1 else 1)

    loads = torch.zeros(*sizes.values(), dtype=torch.float64)
    owners: dict[int, tuple[int, ...]] = {}
    for at in sorted(range(len(due)), key=lambda at: (-work(at), at)):
        owners[at] = tuple(int(place) for place in torch.unravel_index(loads.argmin(), loads.shape))
        loads[owners[at]] += work(at)
    return [
        _Divided(parameter, layout, dict(zip(sizes, owners[at], strict=True))) for at, (parameter, layout) in enumerate(due)
    ]


def _exchanged(
    given: Sequence[Sequence[Tensor]],
    wanted: Sequence[Sequence[tuple[Sequence[int], torch.dtype]]],
    group: ProcessGroup,
    device: torch.device,
) -> list[list[Tensor]]:
    """Give each rank of the group tensors of any types and shapes, and get those that it gives, of which both are known."""
    size, own = group.size(), group.rank()
    if size == 1:
        return [[*given[0]]]
    pieces, sent = list[Tensor](), [0] * size
    for rank, each in enumerate(given):
        for x in each if rank != own else ():
            flat = x.contiguous().view(-1).view(torch.uint8)
            pieces += [flat, flat.new_zeros(-len(flat) % _ALIGNED)]
            sent[rank] += _room(x.shape, x.dtype)
    arriving = [0 if rank == own else sum(_room(*one) for one in each) for rank, each in enumerate(wanted)]
    received = torch.empty(sum(arriving), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, torch.cat([*pieces, received[:0]]), arriving, sent, group=group)
    got, start = list[list[Tensor]](), 0
    for rank, forms in enumerate(wanted):
        parts = [*given[rank]] if rank == own else []
        for shape, dtype in forms if rank != own else ():
            stop = start + torch.Size(shape).numel() * dtype.itemsize
            parts.append(received[start:stop].view(dtype).view(*shape))
            start += _room(shape, dtype)
        got.append(parts)
    return got


def _room(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that a tensor takes among those that are sent."""
    return -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNED) * _ALIGNED
