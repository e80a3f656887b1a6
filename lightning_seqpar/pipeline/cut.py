"""Where a model is cut into the stages of a pipeline, what goes from one to the other, and which micro-batch runs on one when."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_seqpar.distributed.autograd import leaf_of, reach
from lightning_seqpar.distributed.host import any_rank_has, host_device, read_on_host, send_numbers
from lightning_seqpar.layout.module_names import Argument, inside
from lightning_seqpar.layout.param_layout import ParamLayout, gather_rows, local_rows
from lightning_seqpar.region.hooks import find_argument
from lightning_seqpar.topology.process_groups import ParallelGroups


class CutStack(NamedTuple):
    """One stack of blocks, as stages see it."""

    blocks: tuple[str, ...]
    arg: Argument  # of a block, that carries the activation
    returned: int = 0  # length of the tuple that a block returns, the activation first; 0 where it returns that itself
    # What a block hands to the next one too, such as a bias: its place in the tuple, and the argument that carries it.
    beside: tuple[tuple[int, Argument], ...] = ()
    readers: tuple[int, ...] = ()  # chunks that read what the last block returns, other than its own

    @property
    def carries(self) -> tuple[Argument, ...]:
        """The arguments of a block that come from the one before: the activation, and what is handed on beside it."""
        return (self.arg, *(arg for _, arg in self.beside))

    @property
    def places(self) -> tuple[int, ...]:
        """Where what is handed on beside the activation stands in the tuple that a block returns."""
        return tuple(at for at, _ in self.beside)

    def as_returned(self, x: Tensor, beside: dict[int, Any] | None = None) -> Any:
        """An activation as a block returns it."""
        if not self.returned:
            return x
        if beside is None:
            beside = {at: torch.full((), float("nan"), dtype=x.dtype, device=x.device) for at in self.places}
        return (x, *[beside.get(at) for at in range(1, self.returned)])

    def passing_by(self, name: str) -> Callable[..., Any]:
        """A forward for a block that hands on what it is given, as the block would return it. Not for the first."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            beside = {at: find_argument(name, arg, args, kwargs)[1] for at, arg in self.beside}
            return self.as_returned(find_argument(name, self.arg, args, kwargs)[1], beside)

        return forward


class Cut(NamedTuple):
    """Where a model is cut. Chunks of blocks go round the stages: of three stages the first has chunks 0, 3, 6, ..."""

    blocks: tuple[tuple[str, ...], ...]  # of each chunk
    held: tuple[frozenset[str], ...]  # of each stage the names of the parameters that it reads
    stacks: tuple[CutStack, ...]  # in the order in which they run
    draws: bool = False  # the step draws random numbers while it trains
    host_draws: bool = False  # it draws from Python's or numpy's generators in the blocks or behind them

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.held)

    def chunks(self, stage: int) -> range:
        """The numbers of the chunks that a stage has."""
        return range(stage, len(self.blocks), self.stages)

    def stack_of(self, name: str) -> CutStack:
        """The stack that a block is in."""
        return next(stack for stack in self.stacks if name in stack.blocks)

    def goes_on(self, chunk: int) -> bool:
        """Whether a chunk goes on with a stack that the one before it began: it takes its activation from there."""
        first = self.blocks[chunk][0]
        return first != self.stack_of(first).blocks[0]

    def shared(self, name: str) -> tuple[int, ...]:
        """The stages that read a parameter."""
        return tuple(stage for stage, names in enumerate(self.held) if name in names)


class OneForwardOneBackward:
    """The order of backwards on one stage. Micro-batches are the batches of an accumulation window.

    Behind each forward one backward runs, that of the micro-batch which is as many behind as there are stages behind this one; the
    rest run at the window's end. So the last stage holds the activations of one micro-batch, and the one before it of two.
    """

    def __init__(self, stages_behind: int) -> None:
        self._behind = stages_behind
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, backward: Callable[[], None], *, is_last: bool) -> None:
        """A micro-batch's forward is done."""
        self._waiting.append(backward)
        while len(self._waiting) > self._behind:
            self._waiting.popleft()()
        if is_last:
            self.finish()

    def finish(self) -> None:
        """Run what is left, in the middle of a window too."""
        while self._waiting:
            self._waiting.popleft()()


class Part(NamedTuple):
    """A forward or a backward of one micro-batch of the window (from 0 on) through one chunk of a stage."""

    micro_batch: int
    chunk: int
    is_backward: bool


def warm_up(stage: int, stages: int, chunks: int, micro_batches: int) -> int:
    """How many forwards a stage runs before its first backward, where stages have several chunks (interleaving)."""
    longest = max(_rounds(stages, micro_batches))
    return min(chunks * micro_batches, 2 * (stages - 1 - stage) + (chunks - 1) * longest)


def interleave(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Part]:
    """The order of forwards and backwards on one stage of which each has several chunks (arXiv 2104.04473, section 2.2.2).

    A round of micro-batches, as many as there are stages or a few more, goes through the first chunks of all stages, then through
    the second ones, and so on. Behind the first forwards (:func:`warm_up`) forwards and backwards take turns. Rounds are as equal
    as they can be: with a short one at the end stages would wait for each other for ever.
    """
    forwards = list(_in_rounds(stages, chunks, micro_batches, is_backward=False))
    backwards = list(_in_rounds(stages, chunks, micro_batches, is_backward=True))
    first = warm_up(stage, stages, chunks, micro_batches)
    left = len(forwards) - first
    turns = [part for pair in zip(forwards[first:], backwards[:left], strict=True) for part in pair]
    return [*forwards[:first], *turns, *backwards[left:]]


def _rounds(stages: int, micro_batches: int) -> list[int]:
    count = max(1, micro_batches // stages)
    size, more = divmod(micro_batches, count)
    return [size + (at < more) for at in range(count)]


def _in_rounds(stages: int, chunks: int, micro_batches: int, *, is_backward: bool) -> Iterator[Part]:
    for start, stop in pairwise(accumulate(_rounds(stages, micro_batches), initial=0)):
        for chunk in reversed(range(chunks)) if is_backward else range(chunks):
            for micro_batch in range(start, stop):
                yield Part(micro_batch, chunk, is_backward)


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 6  # more dims no activation has: what is told of a tensor before it is sent has a fixed length
_FACTS = 8 + _MOST_DIMS


def refuse_nested(x: Any) -> None:
    """Raise ValueError for a nested tensor, which has no shape that another stage could be told."""
    if isinstance(x, Tensor) and x.is_nested:
        raise ValueError(
            "a nested activation can't be sent to another stage: nn.TransformerEncoder makes one of padded sequences in "
            "evaluation; construct it with enable_nested_tensor=False"
        )


class Message(NamedTuple):
    """What a tensor on its way between stages belongs to."""

    micro_batch: int
    chunk: int  # that takes the activation, or has taken it and sends its gradient
    slot: int = 0  # 0: between two blocks the activation; 1, 2, ...: what goes beside it; -1, -2, ...: the end of a stack


_NONE = Message(0, 0)


def _facts(
    x: Tensor, device: torch.device, message: Message = _NONE, wants_gradient: bool = False, beside: Tensor | None = None
) -> Tensor:
    """What is told of a tensor before it is sent, on a device of the hosts'; ``beside`` is two numbers in float64."""
    if x.dtype not in _DTYPES or x.ndim > _MOST_DIMS:
        raise ValueError(
            f"an activation of dtype {x.dtype} and shape {list(x.shape)} can't be sent to another stage: it must be of "
            f"floats and have {_MOST_DIMS} dims at most"
        )
    facts = [*message, _DTYPES.index(x.dtype), int(wants_gradient), x.ndim, *x.shape]
    known = send_numbers(facts + [0] * (_FACTS - 2 - len(facts)), torch.int64, device)
    return torch.cat([known.new_zeros(2) if beside is None else beside.to(device).view(torch.int64), known])


def _empty(facts: Tensor, device: torch.device) -> tuple[Tensor, bool, Message]:
    """Memory for the tensor of which something was told, whether it waits for its gradient, and what it belongs to."""
    micro_batch, chunk, slot, dtype, wants_gradient, ndim, *shape = read_on_host(facts[2:])
    x = torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=device)
    return x, bool(wants_gradient), Message(micro_batch, chunk, slot)


def from_stage(stage: int, x: Tensor | None, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """A tensor of one stage, on every stage; ``x`` is None on the others. Collective over the pipeline."""
    host = host_device(group, device)
    facts = torch.empty(_FACTS, dtype=torch.int64, device=host) if x is None else _facts(x, host)
    dist.broadcast(facts, group=group, group_src=stage)
    x = _empty(facts, device)[0] if x is None else x.detach().contiguous()
    if x.numel():
        dist.broadcast(x, group=group, group_src=stage)
    return x


def count_channels(pp: int, virtual_pp: int) -> int:
    """How many groups carry messages between neighbours: one for each direction and kind, since kinds overtake each other."""
    if pp == 1:
        return 0
    return 2 if virtual_pp == 1 else 4


class Link:
    """The way to a neighbouring stage and back. Tensors arrive in the order in which they were sent, each with its own shape.

    ``there`` and ``back`` are groups of the pipeline that carry one direction and nothing else; ``depth`` tensors may be under way
    before :meth:`send` waits, which four times as many as there are chunks never make it do.
    """

    def __init__(self, there: dist.ProcessGroup, back: dist.ProcessGroup, peer: int, device: torch.device, depth: int) -> None:
        self._there, self._back, self._peer, self._device, self._depth = there, back, peer, device, depth
        self._host = host_device(there, device)  # on which facts are told, ahead of what the device computes
        self._arrived: dict[Message, tuple[Tensor, bool, list[float]]] = {}  # and was not asked for yet
        self._sent: deque[tuple[list[Any], list[Tensor]]] = deque()

    def send(self, x: Tensor, message: Message, *, wants_gradient: bool = False, beside: Tensor | None = None) -> None:
        """Send a tensor, and two numbers beside it; it must not be changed before it has arrived."""
        tensors = [_facts(x, self._host, message, wants_gradient, beside), x.detach().contiguous()]
        works = [dist.isend(one, group=self._there, group_dst=self._peer) for one in tensors if one.numel()]
        self._sent.append((works, tensors))
        self.settle(self._depth)

    def receive(self, what: str, message: Message) -> tuple[Tensor, bool, list[float]]:
        """The next tensor from the neighbour, whether it waits for its gradient, and the two numbers beside it."""
        what = f"{what} of micro-batch {message.micro_batch}"
        while message not in self._arrived:
            came, found = self._next(what)
            if came.micro_batch != message.micro_batch or (came.chunk != message.chunk and came.slot == message.slot):
                chunk = "" if came.chunk == message.chunk else f" for chunk {came.chunk} of blocks, not {message.chunk}"
                raise RuntimeError(
                    f"stage {self._back.rank()} waited for {what}, and stage {self._peer} sent that of micro-batch "
                    f"{came.micro_batch}{chunk}: the stages are not in the same step any more. Each must read the same batches, "
                    "and call the model as often"
                )
            self._arrived[came] = found  # a backward sends what it has first, and another one asks for it later
        return self._arrived.pop(message)

    def _next(self, what: str) -> tuple[Message, tuple[Tensor, bool, list[float]]]:
        facts = torch.empty(_FACTS, dtype=torch.int64, device=self._host)
        try:
            dist.recv(facts, group=self._back, group_src=self._peer)
            x, wants_gradient, came = _empty(facts, self._device)
            if x.numel():
                dist.recv(x, group=self._back, group_src=self._peer)
        except RuntimeError as error:
            rank = dist.get_global_rank(self._back, self._peer)
            raise RuntimeError(
                f"stage {self._back.rank()} waited for {what}, which did not come from stage {self._peer} (rank {rank}): it has "
                f"ended, or is stuck ({str(error).splitlines()[0]})"
            ) from error
        return came, (x, wants_gradient, read_on_host(facts[:2].view(torch.float64)))

    def settle(self, under_way: int = 0) -> None:
        """Wait until all that was sent has arrived, but for so many tensors."""
        while len(self._sent) > under_way:
            for work in self._sent.popleft()[0]:
                work.wait()


_IGNORED = "_ddp_params_and_buffers_to_ignore"  # the attribute of a model in which DDP looks for what it is to leave alone


def from_holder(local: Tensor, layout: ParamLayout, groups: ParallelGroups) -> Tensor:
    """A parameter, or what has its shape, as a stage that holds it has it. Collective over the pipeline, where stages differ."""
    if not layout.stages or len(layout.stages) == groups.size("pp"):
        return local
    local = local.detach()
    held = local.contiguous() if groups.rank("pp") in layout.stages else local.new_empty(local.shape)
    dist.broadcast(held, src=groups.ranks("pp")[layout.stages[0]], group=groups["pp"])
    return held


class HeldParameters:
    """What a stage holds of a model. Parameters of other stages are NaN, without memory."""

    def __init__(self, model: nn.Module, cut: Cut, groups: ParallelGroups, device: torch.device) -> None:
        self.number, self.count, self._cut = groups.rank("pp"), cut.stages, cut
        self._model, self._group, self._device = model, groups["pp"], device

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.number == self.count - 1

    def leave_out(self, device: torch.device) -> None:
        """Let parameters that only other stages hold be NaN without memory; they stay in the model, and get no gradient."""
        for name, parameter in self._model.named_parameters():
            if self.holds(name):
                continue
            nothing = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
            number = torch.full((), nothing, dtype=parameter.dtype, device=device).expand(parameter.shape)
            if parameter.is_meta:
                torch.utils.swap_tensors(parameter, nn.Parameter(number, parameter.requires_grad))
            else:
                parameter.data = number

    def holds(self, name: str) -> bool:
        """Whether the parameter of that name is here."""
        return name in self._cut.held[self.number]

    @contextmanager
    def hiding_from_ddp(self) -> Iterator[None]:
        """A context in which DDP, when it is made, takes no notice of parameters that are not here."""
        absent = [name for name, _ in self._model.named_parameters() if not self.holds(name)]
        absent += [f".{name}" for name in absent if "." not in name]  # as DDP's reducer calls those of the model itself
        own = self._model.__dict__.get(_IGNORED)
        setattr(self._model, _IGNORED, [*(getattr(self._model, _IGNORED, None) or ()), *absent])
        try:
            yield
        finally:
            delattr(self._model, _IGNORED)
            if own is not None:
                setattr(self._model, _IGNORED, own)

    def shared(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter."""
        return self._cut.shared(name)

    def begin_evaluation(self, shares: dist.ProcessGroup) -> None:
        """Get the parameters that the last stage reads behind the blocks. Collective over the pipeline."""
        blocks = [block for chunk in self._cut.chunks(self.count - 1) for block in self._cut.blocks[chunk]]
        for name, parameter in self._model.named_parameters():
            if name not in self._cut.held[-1] or any(inside(name, block) for block in blocks):
                continue
            if self.is_last:
                whole = gather_rows(parameter, shares).detach().contiguous()
            else:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            dist.broadcast(whole, group=self._group, group_src=self.count - 1)
            if not self.holds(name):
                parameter.data = whole

    def end_evaluation(self) -> None:
        """Forget the parameters that :meth:`begin_evaluation` got."""
        self.leave_out(self._device)

    def check_graph(self, loss: Tensor) -> None:
        """What this stage computes must read no parameter that is not here."""
        absent = {id(p): name for name, p in self._model.named_parameters() if not self.holds(name)}
        for node in reach(loss.grad_fn):
            if (leaf := leaf_of(node)) is not None and id(leaf) in absent:
                raise RuntimeError(
                    f"stage {self.number} of {self.count} reads {absent[id(leaf)]}, which is on stage "
                    f"{self._cut.shared(absent[id(leaf)])[0]}: in the example this stage did not read it. A model whose stages "
                    "change what they read can't be cut; use pp=1"
                )

    def sum_shared(self) -> None:
        """Sum the gradients of parameters that several stages hold (tied embeddings), over those. Collective over the pipeline."""
        shared = self._shared_parameters()
        if not shared:
            return
        has_one = self.on_any([parameter.grad is not None for _, parameter in shared])
        for (name, parameter), has in zip(shared, has_one, strict=True):
            if has and self.holds(name):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._sum_over(self.shared(name), local_rows(parameter.grad))

    def _shared_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self._model.named_parameters() if len(self._cut.shared(n)) > 1 and p.requires_grad]

    def refuse_kept(self) -> None:
        """Where a window begins, gradients that several stages hold must be zero: what is kept would be summed once more."""
        for name, parameter in self._shared_parameters():
            if self.holds(name) and parameter.grad is not None and bool(local_rows(parameter.grad).any()):
                raise RuntimeError(
                    f"{name}: its gradient was kept from the step before (optimizer_zero_grad), and several stages of the pipeline "
                    "hold it, so that it would be summed once more. Accumulate by Trainer(accumulate_grad_batches=...), or use pp=1"
                )

    def _sum_over(self, stages: Sequence[int], x: Tensor) -> None:
        """Sum a tensor over stages of which this is one, in place: in the order of the stages, so that all have the same bits."""
        sent = x.contiguous()
        parts = {stage: sent if stage == self.number else torch.empty_like(sent) for stage in sorted(stages)}
        others = [stage for stage in parts if stage != self.number]
        works = [dist.isend(sent, group=self._group, group_dst=stage) for stage in others]
        for stage in others:
            dist.recv(parts[stage], group=self._group, group_src=stage)
        for work in works:
            if work is not None:
                work.wait()
        x.copy_(functools.reduce(torch.add, parts.values()))

    def on_any(self, facts: Sequence[bool]) -> list[bool]:
        """Which facts hold on any stage. Collective over the pipeline."""
        return any_rank_has(facts, self._group, self._device)

    def of_last(self, x: Tensor) -> Tensor:
        """A tensor of floats that every stage has, as it is on the last one. Collective over the pipeline."""
        return from_stage(self.count - 1, x if self.is_last else None, self._group, self._device)
