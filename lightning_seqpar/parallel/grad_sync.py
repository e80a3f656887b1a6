"""What a step sums over ranks: partial gradients, the losses that are compared on the way, and the norm of all gradients.

Norms and row biases see a part of the sequence on each rank, so each rank holds one term of a sum that is their gradient. The
terms are summed once per optimizer step, after accumulation and after the data-parallel reduction: a sum of what was summed
before would count it tp times (GPT-NeoX #1257 tells the story of hooks that never fired).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.distributed.async_ops import all_reduce
from lightning_seqpar.distributed.autograd import count_tensor_hooks
from lightning_seqpar.distributed.host import LateNumbers, OneStepLate, any_rank_has, send_numbers
from lightning_seqpar.layout.param_layout import ModelLayout, ParamLayout, is_split, local_rows, rows_held
from lightning_seqpar.parallel.fsdp_units import ReplicaSplit
from lightning_seqpar.topology.process_groups import ParallelGroups

_CAUSES = (
    "They must see the same batch, and the loss must not read parameters (an L2 term sees shards; weight decay belongs into "
    "the optimizer), draw random numbers on its own, depend on the number of the process (global_rank; the number of the replica "
    "is self.trainer.strategy.dp_rank), or read what the model made of its activations inside of its blocks "
    "(pooled, detached or kept aside: each rank has a part there; read what the model returns, or set sp=False)"
)


def _limit(dtype: torch.dtype) -> float:
    """How far, relative to the loss, equal computations may lie apart on two ranks."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)


def _number(loss: Tensor) -> Tensor:
    """The loss as a number that can be compared; one that is no number counts as zero on every rank."""
    return loss.detach().double().sum().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _compare(numbers: Sequence[float], limit: float, when: str, then: str = "") -> None:
    """Raise RuntimeError if the ranks' losses lie further apart."""
    if max(numbers) - min(numbers) > limit * max(1.0, *map(abs, numbers)):
        losses = ", ".join(f"{number:.9g}" for number in numbers)
        raise RuntimeError(f"the loss {when}: {losses}. {then}{_CAUSES}")


def check_loss(loss: Tensor, groups: ParallelGroups) -> None:
    """The loss must be the same on all ranks of a replica; collective over the replica."""
    own = _number(loss)
    axes = groups.loss_axes
    values = [torch.zeros_like(own) for _ in range(groups.size(axes))]
    dist.all_gather(values, own, group=groups[axes])
    numbers = [float(value) for value in values]
    _compare(numbers, _limit(loss.dtype), "differs across the ranks of one replica")


class LossWatch:
    """Compares the losses of every step, at no collective of its own where gradients are summed over tp anyway.

    Each rank has a place in a row of zeros that rides along with the sum, so that all decide alike. The row is read when the next
    step's sum is due: a step with a wrong gradient is taken, but none behind it, and nothing is saved.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self._size, self._rank = groups.size(groups.loss_axes), groups.rank(groups.loss_axes)
        self.rides_over_tp = groups.size("tp") == self._size  # whether a sum over tp reaches all ranks of the replica
        self._own: Tensor | None = None
        self._limit = 0.0
        # All ranks' losses, and how far they may lie apart.
        self._unread: OneStepLate[tuple[LateNumbers, float]] = OneStepLate()

    def begin_step(self) -> None:
        """A step begins: losses that were taken until now can be read without a wait."""
        self._unread.begin_step()

    def note(self, loss: Tensor) -> None:
        """Add a loss to those of this step (accumulation, or several backwards)."""
        number = _number(loss)
        self._own = number if self._own is None else self._own + number
        self._limit = max(self._limit, _limit(loss.dtype))

    def row(self, dtype: torch.dtype) -> Tensor | None:
        """What is to be summed over tp, ``[tp]``; none without a loss since the last time."""
        if self._own is None:
            return None
        row = torch.zeros(self._size, dtype=dtype, device=self._own.device)
        row[self._rank] = self._own
        self._limit = max(self._limit, _limit(dtype))
        return row

    def take(self, summed: Tensor) -> None:
        """The row with every rank's loss, ``[tp]``; it is not read yet."""
        self._unread.add((LateNumbers(summed), self._limit))
        self._own, self._limit = None, 0.0

    def send(self) -> None:
        """Sum the row by itself, unless it has ridden along with a sum of gradients already; collective over tp."""
        if self._own is not None and (row := self.row(torch.float64)) is not None:
            dist.all_reduce(row, group=self._groups[self._groups.loss_axes])
            self.take(row)

    def settle(self, *, everything: bool = False) -> None:
        """Read and compare the losses of earlier steps, or those of this step too (``everything``), which may take a wait."""
        for losses, limit in self._unread.take(everything=everything):
            when = "differed across the ranks of one replica at the last step"
            then = "An update that was made of it is wrong: go on from a checkpoint before it. "
            _compare(losses.read(), limit, when, then)


@dataclass(eq=False)
class _Partial:
    """One parameter whose gradient comes in parts."""

    layout: ParamLayout
    parameter: nn.Parameter
    fired: bool = False  # a gradient has arrived since the last sum: ``.grad`` holds this rank's term
    synced: Tensor | None = None  # the whole gradient that the last sum left behind
    hook: RemovableHandle | None = None  # none while it stays frozen
    is_done: bool = False  # it was frozen when it was summed last, on every rank: nothing is left to sum
    version: int = -1  # the parameter's, when the first gradient arrived: nobody may change it before the sum
    own_term: Tensor | None = None  # during a sum this rank's term, in the memory that takes the sum
    shared: _SharedPart | None = None  # what several ranks hold of it, if it is sharded

    def unhook(self) -> None:
        """Take the hook away."""
        if self.hook is not None:
            self.hook.remove()
            self.hook = None


class GradSync:
    """Sums the partial gradients of a parallelised model; every rank of a replica calls :meth:`flush` at the same points."""

    def __init__(self, layout: ModelLayout, groups: ParallelGroups) -> None:
        # Over dp too: a replica that did not use a parameter still got the others' average for it.
        self._groups, self._tp, self._holder_group = groups, groups["tp"], groups[groups.holder_axes]
        self._has_replicas = groups.size(groups.mean_axes) > 1
        self.losses = LossWatch(groups)
        # Of a pipeline those that this stage holds: no gradient comes to others' here, and a rank that lacks one waits.
        stage = groups.rank("pp") if "pp" in groups.topology.axes else 0
        held = [name for name in layout if layout[name].is_partial and layout[name].is_on(stage)]
        self._partials = [_Partial(layout[name], layout.parameter(name)) for name in held]
        self._parameters = [partial.parameter for partial in self._partials]
        # Whether no backward that the strategy knows of has begun since all was summed: so it is on every rank, or on none.
        self._all_summed = False
        self.attach()

    def attach(self) -> None:
        """Hook every partial parameter that requires a gradient and has no hook yet (it may thaw later)."""
        hooks = count_tensor_hooks(self._parameters)
        for partial, count in zip(self._partials, hooks, strict=True):
            parameter = partial.parameter
            if count > (partial.hook is not None):
                raise ValueError(
                    f"{partial.layout.name}: it has a gradient hook of yours, which would see this rank's part of the gradient "
                    f"({partial.layout.reason}); change gradients in on_before_optimizer_step, where they are whole"
                )
            if partial.hook is None and parameter.requires_grad:
                partial.hook = (
                    parameter.register_post_accumulate_grad_hook(self._arrival_of_rows(partial))
                    if is_split(parameter)
                    else parameter.register_hook(self._arrival(partial))
                )
            if partial.fired and parameter._version != partial.version:
                self._refuse_change(partial)

    def begin_step(self) -> None:
        """A training step begins: what was frozen when it was summed, and still is, need not be looked at."""
        self.losses.begin_step()
        for partial in self._partials:
            # Not before: an optimizer that is toggled freezes others' parameters for a part of a step.
            if partial.is_done and not partial.parameter.requires_grad:
                partial.unhook()
        self.attach()

    @staticmethod
    def _refuse_change(partial: _Partial) -> None:
        raise RuntimeError(
            f"{partial.layout.name}: it was updated before its gradient was summed over tp, by an optimizer that "
            "Lightning does not know (return it from configure_optimizers, or step it through self.optimizers()), or was "
            "changed by code of yours between the backward and the step (do that in on_before_optimizer_step, or on "
            "batches behind whose backward the optimizer has stepped)"
        )

    def _arrival(self, partial: _Partial) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            kept = partial.parameter.grad
            if not partial.fired and kept is not None:
                # Not zeroed since the last sum: whole on every rank, whoever put it there, and about to be summed again.
                self._make_term(partial, kept)
            if not partial.fired or kept is None:
                partial.version = partial.parameter._version
            partial.fired = True

        return hook

    @staticmethod
    def _arrival_of_rows(partial: _Partial) -> Callable[[Tensor], None]:
        """Where replicas split the parameter: called behind their reduction, when ``.grad`` holds the new gradient too."""

        def hook(parameter: Tensor) -> None:
            if not partial.fired and parameter.grad is partial.synced:
                raise RuntimeError(
                    f"{partial.layout.name}: a gradient was added to one that is summed over tp already; call "
                    "self.manual_backward(loss) instead of loss.backward() (in automatic optimization return the sum of the losses "
                    "from training_step), or zero the gradients before"
                )
            if not partial.fired:
                partial.version = partial.parameter._version
            partial.fired = True

        return hook

    def begin_backward(self) -> None:
        """Make terms of gradients that the next backward adds to, where replicas reduce them; before each backward.

        The reduction adds what is kept on one replica to what is new on another. With one replica the hook does it.
        """
        self._all_summed = False
        if not self._has_replicas:
            return
        for partial in self._partials:
            grad = partial.parameter.grad
            if grad is not None and not partial.fired:
                self._make_term(partial, grad)
                partial.fired, partial.version = True, partial.parameter._version

    def _make_term(self, partial: _Partial, whole: Tensor) -> None:
        """Make this rank's term of a gradient that is whole on every rank: the terms are about to be summed again."""
        share = self._share(partial, whole)
        with torch.no_grad():
            if is_split(whole):
                local_rows(whole).div_(share)
            else:
                partial.parameter.grad = whole.div_(share) if whole is partial.synced else whole / share

    def remove(self) -> None:
        """Take the hooks away."""
        for partial in self._partials:
            partial.unhook()

    def flush(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Sum what has arrived for ``parameters`` (those of one optimizer; None for all) since the last flush; idempotent.

        Ranks agree on which hooks fired. Where no rank's hook fired, the gradient stays as it is; where only some did, the
        others contribute zeros. A rank all of whose hooks fired knows the outcome and does not wait for the agreement; one
        that lacks a gradient does, since only the others know whether it is zero or none.
        """
        self.losses.settle()
        # Those that train, or did when they were looked at: on every rank, or on none.
        due = arriving = [p for p in self._partials if p.hook is not None or p.parameter.requires_grad]
        if parameters is not None:
            due_ids = {id(parameter) for parameter in parameters}
            due = [p for p in arriving if id(p.parameter) in due_ids]
        if due:
            self._sum(due)
        self._all_summed |= len(due) == len(arriving)
        for partial in due:
            partial.is_done = not partial.parameter.requires_grad
        self.losses.send()

    def _sum(self, due: Sequence[_Partial]) -> None:
        flags = self._arrival_flags(due)
        arrived, device = flags[0::2], due[0].parameter.device
        late: Tensor | None = None  # what the ranks agree on, which only a rank that lacks a gradient waits for
        if self._all_summed:  # there may be nothing to sum
            arrived = self._fired_anywhere(due, any_rank_has(flags, self._holder_group, device))
        elif self._has_replicas:  # over dp the agreement is a reduction of its own
            late = send_numbers(flags, torch.uint8, device)
            dist.all_reduce(late, op=dist.ReduceOp.MAX, group=self._holder_group)
            if not any(arrived):
                arrived = self._fired_anywhere(due, late.tolist())
        rides = not self._all_summed and late is None
        if not rides and not any(arrived):
            return
        for members in self._buckets(due):
            # What no rank has goes as zeros. With one replica the agreement rides along with the first sum.
            counts = self._sum_bucket(members, flags if rides and late is None else ())
            late = counts if rides and late is None else late
        if late is not None and not all(arrived):
            arrived = self._fired_anywhere(due, late.tolist())
        for partial, fired in zip(due, arrived, strict=True):
            if fired:
                assert partial.own_term is not None
                partial.parameter.grad = partial.synced = partial.own_term
                partial.fired = False
            partial.own_term = None

    def _sum_bucket(self, members: Sequence[_Partial], flags: Sequence[bool]) -> Tensor:
        """Sum the terms of some gradients of one type over tp; returns how many ranks had each of the flags."""
        whole: list[Tensor] = []
        given: list[Tensor] = []
        shared: list[tuple[_SharedPart, Tensor]] = []
        for partial in members:
            kept = partial.parameter.grad
            partial.own_term = term = kept if partial.fired and kept is not None else self._own_term(partial)
            rows = term if type(term) is Tensor else local_rows(term)
            if partial.layout.shard is None:
                whole.append(rows)
            else:
                shared.append((self._shared_part(partial, term), rows))
                given.append(shared[-1][0].given(rows))
        losses = self.losses if self.losses.rides_over_tp else None
        counts = _sum_coalesced(whole + given, self._tp, losses, flags)
        for (part, rows), summed in zip(shared, given, strict=True):
            part.take(summed, rows)
        return counts

    def _shared_part(self, partial: _Partial, grad: Tensor) -> _SharedPart:
        """What several ranks hold of a sharded parameter; made once, as its indices have to be sent to the device."""
        if partial.shared is None or partial.shared.device != grad.device:
            partial.shared = _SharedPart(partial, self._groups.rank("tp"), grad)
        return partial.shared

    @staticmethod
    def _buckets(due: Sequence[_Partial]) -> list[list[_Partial]]:
        """The parameters by type: one sum each, in an order that is the same on all ranks."""
        found: dict[torch.dtype, list[_Partial]] = {}
        for partial in due:
            found.setdefault(partial.parameter.dtype, []).append(partial)
        return [found[dtype] for dtype in sorted(found, key=str)]

    def _own_term(self, partial: _Partial) -> Tensor:
        """This rank's term of the sum, in the memory that takes the sum, where no new gradient has arrived through the hook."""
        kept = partial.parameter.grad
        if kept is None:
            return torch.zeros_like(partial.parameter, requires_grad=False)
        # What other replicas have is reduced here too.
        is_new = self._has_replicas and kept is not partial.synced
        if not partial.fired and not is_new:  # whole on every rank since the last sum
            kept = kept.clone()
            local_rows(kept).div_(self._share(partial, kept))
        return kept

    def _share(self, partial: _Partial, like: Tensor) -> Tensor | int:
        """By how many ranks a gradient that is whole on each of them is summed."""
        if partial.layout.shard is None:
            return self._groups.size("tp")
        return self._shared_part(partial, like).holders

    def _arrival_flags(self, due: Sequence[_Partial]) -> list[bool]:
        """Two for each parameter: whether a gradient has arrived here, and whether one came past its hook."""
        flags = []
        for partial in due:
            grad = partial.parameter.grad
            missed = not partial.fired and grad is not None and grad is not partial.synced
            if partial.fired and partial.parameter._version != partial.version:
                self._refuse_change(partial)
            flags += [partial.fired and grad is not None, missed]
        return flags

    @staticmethod
    def _fired_anywhere(due: Sequence[_Partial], counts: Sequence[float]) -> list[bool]:
        """Whether each parameter's hook fired on some rank, from how many ranks had each of the arrival flags."""
        for partial, fired, missed in zip(due, counts[0::2], counts[1::2], strict=True):
            if missed and not fired:
                raise RuntimeError(
                    f"{partial.layout.name}: a gradient arrived but the hook that marks it for the sum over tp did not "
                    "fire on any rank; was its hook removed, or the gradient set by hand?"
                )
        return [bool(count) for count in counts[0::2]]


class _SharedPart:
    """What several ranks hold of one sharded parameter (kv heads): its gradient has a place for every shared index."""

    def __init__(self, partial: _Partial, rank: int, like: Tensor) -> None:
        shard = partial.layout.shard
        assert shard is not None
        self.device, self._dim = like.device, shard.dim
        at = shard.indices(rank)
        if shard.dim == 0 and (rows := rows_held(like)) is not None:
            # Ranks that share heads have them at the same places of their parts, so they hold the same rows of them too.
            at = at[slice(*rows)]
        shared = shard.holders > 1
        place = (shared.cumsum(0) - 1)[at]
        self._count = int(shared.sum())
        self._local = shared[at].nonzero().flatten().to(self.device)
        self._place = place[shared[at]].to(self.device)
        # By how many ranks each index of this rank's part (its rows of it) is held, in a shape that broadcasts.
        self.holders = shard.holders[at].to(self.device).view([-1 if dim == shard.dim else 1 for dim in range(like.ndim)])

    def given(self, grad: Tensor) -> Tensor:
        """What a rank gives to the sum, of its gradient (its rows of it)."""
        shape = list(grad.shape)
        shape[self._dim] = self._count
        return grad.new_zeros(shape).index_add_(self._dim, self._place, grad.index_select(self._dim, self._local))

    def take(self, summed: Tensor, grad: Tensor) -> None:
        """Put this rank's share of the sum into its gradient."""
        grad.index_copy_(self._dim, self._local, summed.index_select(self._dim, self._place))


def step_traffic(layout: ModelLayout, tp: int, dp: int = 1, split: ReplicaSplit | None = None) -> tuple[int, int]:
    """All-reduces of one optimizer step, and the bytes that a rank gives to them: sums by type, arrival flags, the loss."""
    partial = [name for name, item in layout.items() if item.is_partial and layout.parameter(name).requires_grad]
    sums: dict[torch.dtype, int] = {}
    for name in partial:
        parameter, shard = layout.parameter(name), layout[name].shard
        count = parameter.numel() if split is None or (shard is not None and shard.dim == 0) else split.numel(parameter)
        if shard is not None:  # replicas that share out rows send places for all rows
            count = count // parameter.shape[shard.dim] * shard.shared_length
        # 16-bit parts are summed in float32.
        sums[parameter.dtype] = sums.get(parameter.dtype, 0) + count * max(4, parameter.element_size())
    first = max(4, min(sums, key=str).itemsize) if sums else 8  # of the sum that the loss rides along with, or its own
    flags, rides = 2 * len(partial), dp == 1
    calls = max(1, len(sums)) + (1 if flags and not rides else 0)
    # Which parameters were used at all is agreed on where replicas share them out.
    used = 0 if split is None else sum(layout.parameter(name).requires_grad for name in layout)
    return calls + bool(used), sum(sums.values()) + tp * first + flags * (first if rides else 1) + used


def _sum_coalesced(grads: list[Tensor], group: Any, losses: LossWatch | None, flags: Sequence[bool]) -> Tensor:
    """Sum gradients of one type, in place, in one collective; losses and flags ride along, and the counts of flags come back."""
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    row = losses.row(wide) if losses is not None else None
    riders = [] if row is None else [row]
    if flags:
        riders.append(send_numbers(flags, wide, grads[0].device))
    flat = torch.cat(list(map(torch.ravel, grads))).to(wide)
    flat = torch.cat([flat, *riders])
    flat = all_reduce(flat, group)
    sizes = list(map(Tensor.numel, grads))
    *totals, rest = flat.split_with_sizes([*sizes, flat.numel() - sum(sizes)])
    if losses is not None and row is not None:
        losses.take(rest[: row.numel()])
    torch._foreach_copy_(grads, list(map(Tensor.view_as, totals, grads)))
    return rest[rest.numel() - len(flags) :]


def global_grad_norm(
    parameters: Iterable[Tensor], layout: ModelLayout, groups: ParallelGroups, norm_type: float = 2.0
) -> Tensor:
    """The norm of the whole model's gradient (0-dim, equal on all ranks), which must be synced before.

    Shards count from every rank of tp (and of dp, where replicas split them), the rest once; what several stages hold on the first
    of them. ``parameters`` are the same on every rank; ``norm_type`` is 2, another positive number, or infinity. Collective over
    tp, over pp, and over dp if the replicas split parameters.
    """
    parameters = list(parameters)
    highest = norm_type == float("inf")
    op = dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM
    # Gradients by the axes over whose ranks they are divided.
    divided: dict[tuple[str, ...], list[Tensor]] = {(): [], ("tp",): [], ("dp",): [], ("dp", "tp"): []}
    device = torch.device("cpu")
    for parameter in parameters:
        device = parameter.device
        if parameter.grad is None:
            continue
        found, grad = layout.of(parameter), local_rows(parameter.grad)
        if found is not None and found.stages and found.stages[0] != groups.rank("pp"):
            continue
        shard = None if found is None else found.shard
        if found is not None and shard is not None and shard.has_shared:  # what several ranks hold counts once
            grad = grad.index_select(shard.dim, layout.first_held(found.name, groups.rank("tp"), parameter.grad))
        divided[("dp",) * is_split(parameter.grad) + ("tp",) * (shard is not None)].append(grad)

    def join(powers: Tensor) -> Tensor:
        return powers.max() if highest else powers.sum()

    def power(grads: list[Tensor]) -> Tensor:
        """``Σ |g|^p`` of some gradients (the largest ``|g|`` for the infinite norm), in float32 at least."""
        # Of shared heads a rank may hold none first, and nothing has no largest element.
        grads = [grad if grad.numel() else grad.new_zeros(1) for grad in grads]
        if not grads:
            return torch.zeros((), device=device, dtype=torch.float32)
        norms = torch.stack([n.to(torch.promote_types(n.dtype, torch.float32)) for n in torch._foreach_norm(grads, norm_type)])
        return join(norms if highest else norms**norm_type)

    powers = [power(grads) for grads in divided.values()]
    in_stages = "pp" in groups.topology.axes and groups.size("pp") > 1
    # Every rank has the same lists up to shards, so the dtype agrees too; but a stage without gradients knows no type.
    wide = torch.float64 if in_stages else functools.reduce(torch.promote_types, (each.dtype for each in powers))
    whole, over_tp, over_dp, over_both = (each.to(wide) for each in powers)
    if any(is_split(parameter) for parameter in parameters):  # each axis once: first dp, alone or with tp
        both = torch.stack([over_dp, over_both])
        dist.all_reduce(both, op=op, group=groups["fsdp_shard"])
        over_dp, over_both = both.unbind()
    part = join(torch.stack([over_tp, over_both]))
    dist.all_reduce(part, op=op, group=groups["tp"])
    total = join(torch.stack([whole, over_dp, part]))
    if in_stages:
        dist.all_reduce(total, op=op, group=groups["pp"])
    return total if highest else total ** (1.0 / norm_type)
