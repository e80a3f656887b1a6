"""Where a model is cut, and what one stage of a pipeline runs of it.

Every stage runs the user's own step. Blocks of the stages before return NaN there; at its first block the activation is
replaced by that of the stage before; where the first block of the stage behind is called, the activation is sent on and the
step ends. What lies in front of the blocks runs on every stage. Parameters that a stage does not read are NaN there, without
memory: what is made of them is thrown away, and would be seen where it is not. A step that evaluates goes on instead, on
every stage, with what the last block returned on the last one.

A stage may have several chunks of blocks (interleaving, arXiv 2104.04473, section 2.2.2). It runs the step once for each, as
if each were a stage of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.context.seq_part import SeqPart, local_of
from lightning_seqpar.distributed.autograd import leaf_of, once_differentiable, reach
from lightning_seqpar.distributed.rng import SavedStreams, StageStreams
from lightning_seqpar.layout.module_names import Argument, inside
from lightning_seqpar.layout.param_layout import ParamLayout
from lightning_seqpar.layout.replica_rows import gather_rows, is_split, local_rows
from lightning_seqpar.pipeline.link import Link, Message, from_last, refuse_nested
from lightning_seqpar.region.hooks import find_argument, put_argument
from lightning_seqpar.topology.process_groups import ParallelGroups

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a model in which DDP looks for what it is to leave alone."""


class StageEndError(Exception):
    """The user's step came to a block of a stage behind: what follows runs there. No error, but a way out of the step.

    An ``Exception``, since torch calls hooks that must end what others began for those alone.

    Attributes:
        loss: stands for the loss, which the last stage has; its backward is that of what was sent.
    """

    def __init__(self, loss: Tensor) -> None:
        super().__init__(
            "the model was called outside of a step, where a stage of a pipeline has its own blocks alone; call it in "
            "training_step, validation_step, test_step or predict_step"
        )
        self.loss = loss


class Cut(NamedTuple):
    """Where a model is cut.

    Attributes:
        blocks: of each chunk the names of its blocks, in order. Chunks go round the stages: of three stages the first has chunks
            0, 3, 6, ...
        held: of each stage the names of the parameters that it reads.
        returned: of a block's outputs, how many stand in a tuple, of which the first is the activation; 0 where it returns the
            activation itself.
        arg: the argument of a block that carries the activation.
        draws: whether the step draws random numbers while it trains.
        host_draws: whether it draws from Python's or numpy's generators in the blocks or behind them.
    """

    blocks: tuple[tuple[str, ...], ...]
    held: tuple[frozenset[str], ...]
    returned: int
    arg: Argument
    draws: bool = False
    host_draws: bool = False

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.held)

    def chunks(self, stage: int) -> range:
        """The numbers of the chunks that a stage has."""
        return range(stage, len(self.blocks), self.stages)

    def passing_by(self, name: str) -> Callable[..., Any]:
        """A forward for a block that hands its activation on, as the block would return it."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.as_returned(find_argument(name, self.arg, args, kwargs)[1])

        return forward

    def as_returned(self, x: Tensor) -> Any:
        """An activation as a block returns it."""
        return (x, *[None] * (self.returned - 1)) if self.returned else x

    def shared(self, name: str) -> tuple[int, ...]:
        """The stages that read a parameter."""
        return tuple(stage for stage, names in enumerate(self.held) if name in names)


def from_holder(local: Tensor, layout: ParamLayout, groups: ParallelGroups) -> Tensor:
    """A parameter, or what has its shape, as a stage that holds it has it. Collective over the pipeline, where stages differ."""
    if not layout.stages or len(layout.stages) == groups.size("pp"):
        return local
    local = local.detach()
    held = local.contiguous() if groups.rank("pp") in layout.stages else local.new_empty(local.shape)
    dist.broadcast(held, src=groups.ranks("pp")[layout.stages[0]], group=groups["pp"])
    return held


class _HandOn(torch.autograd.Function):
    """Forward: send an activation to the next stage; what is left stands for the loss. Backward: its gradient comes from there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, link: Link, message: Message, beside: Tensor) -> Tensor:
        ctx.link, ctx.wants, ctx.message = link, x.requires_grad, message
        link.send(x, message, wants_gradient=x.requires_grad, beside=beside)
        return x.new_full((), float("nan"), dtype=torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x = ctx.link.receive("the gradient", ctx.message)[0] if ctx.wants else None
        return x, None, None, None, None


class _Take(torch.autograd.Function):
    """Forward: the activation that the stage before has sent. Backward: send its gradient back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, link: Link, message: Message) -> Tensor:
        ctx.link, ctx.message = link, message
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        ctx.link.send(grad, ctx.message)
        return None, None, None, None


def _placed_as(nothing: Any, x: Tensor) -> Tensor:
    """An activation that came from another stage, as a part of a sequence where what stands in its place is one."""
    return SeqPart.wrap(x, nothing.place) if isinstance(nothing, SeqPart) else x


def _beside(x: Any, args: Any, kwargs: Any) -> Tensor:
    """Two numbers that tell what a block is given beside its activation: ``[2]``, float64. Nothing waits for the device."""
    refuse_nested(x)
    device, total = local_of(x).device, torch.zeros(2, dtype=torch.float64, device=local_of(x).device)
    others = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one is not x)
    for number, one in enumerate(others, 1):
        own = local_of(one).detach()
        if own.is_nested or own.is_sparse or own.is_complex() or not own.numel():
            continue
        plain = own.nan_to_num(0.5, 2.0, -2.0) if own.is_floating_point() else own
        rows = plain.reshape(-1, plain.shape[-1] if plain.ndim else 1).sum(-1, dtype=torch.float64).to(device)
        places = torch.arange(1, len(rows) + 1, dtype=torch.float64, device=device)
        total += number * torch.stack([rows.sum() + plain.numel(), (rows * places).mean()])
    return total


def _nothing_like(x: Any) -> Any:
    """NaN in the place of an activation that is not here."""
    refuse_nested(x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    nothing = torch.full_like(local_of(x).detach(), float("nan"))
    return _placed_as(x, nothing)


class Stage:
    """One stage of a pipeline: hooks on the blocks of a model, and parameters without memory where other stages hold them.

    Args:
        model: the whole model.
        cut: where it is cut.
        groups: the process groups, of which ``pp`` is the pipeline.
        device: of this rank.
        own_streams: whether the stages draw apart; not in copies that are compared with a whole one.

    Attributes:
        losses: on the last stage those of the micro-batches that were settled last.
    """

    def __init__(
        self, model: nn.Module, cut: Cut, groups: ParallelGroups, device: torch.device, *, own_streams: bool = True
    ) -> None:
        self.number, self.count, self._cut = groups.rank("pp"), cut.stages, cut
        self._model, self._group = model, groups["pp"]
        self._chunks = cut.chunks(self.number)
        self._chunk = self._chunks[0]  # that is run, of those
        self._own = {name: chunk for chunk in self._chunks for name in cut.blocks[chunk]}
        self._elsewhere = {name: at for at, names in enumerate(cut.blocks) for name in names if name not in self._own}
        self._before, self._behind = self._links(groups, device)
        # What needs a gradient, so that the backward of what is sent and taken runs whatever the model's own tensors need.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._begun: int | None = None  # the chunk of which a block was called
        self._is_awaited = False  # and the activation for it is still to come
        self._runs = False  # a step that trains
        self.losses: list[Tensor] = []
        self._computed: list[Tensor] = []
        self._ran: set[str] = set()  # its blocks that were called in it
        self._goes_on = False  # behind the last block, on every stage: it evaluates
        self._micro_batch = 0  # the number of the last one since all that was sent had arrived
        self._streams, self._own_streams = StageStreams(), own_streams
        self._handles: list[RemovableHandle] = []
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._install()
        self.leave_out(device)

    def _links(self, groups: ParallelGroups, device: torch.device) -> tuple[Link | None, Link | None]:
        """The ways to the stage before and to the one behind; the first and the last are neighbours where there are more chunks."""
        activations, gradients, *around = groups.pp_channels
        depth, last = 4 * len(self._cut.blocks), self.count - 1
        before = behind = None
        if self.number > 0:
            before = Link(gradients, activations, self.number - 1, device, depth)
        elif len(self._chunks) > 1:
            before = Link(around[1], around[0], last, device, depth)
        if self.number < last:
            behind = Link(activations, gradients, self.number + 1, device, depth)
        elif len(self._chunks) > 1:
            behind = Link(around[0], around[1], 0, device, depth)
        return before, behind

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.number == self.count - 1

    @property
    def chunks(self) -> int:
        """How many chunks of blocks this stage has."""
        return len(self._chunks)

    @property
    def stages_behind(self) -> int:
        """How many stages come behind this one."""
        return self.count - 1 - self.number

    def run(self, step: Callable[[], Any], *, chunk: int = 0, micro_batch: int | None = None) -> Any:
        """Run the user's step as far as this stage goes.

        Args:
            step: the step.
            chunk: which of this stage's chunks of blocks is run.
            micro_batch: number of the micro-batch, from 1 on; None for the next one.

        Returns:
            What it returned where the last chunk was run; else what stands for the loss.

        Raises:
            RuntimeError: if it came to its end without having come to this stage's first or last block, or drew random numbers
                that no example drew.
        """
        self._begin_step()
        self._micro_batch = self._micro_batch + 1 if micro_batch is None else micro_batch
        self._ran, self._runs, self._chunk = set(), True, self._chunks[chunk]
        self._streams.begin()
        try:
            with self._passing_by_own():
                out, ended = step(), False
        except StageEndError as end:
            out, ended = end.loss, True
        finally:
            self._runs = False
            drew = not self._switches_streams and self._streams.has_drawn()
            drew |= not self._cut.host_draws and self._streams.has_drawn_on_host()
            if self._switches_streams:
                self._streams.end()
            if self._cut.host_draws and self._own_streams:
                self._streams.end_on_host()
        if drew and self._own_streams:
            raise RuntimeError(
                f"stage {self.number} of {self.count}: the step drew random numbers, as it did not in the example, and the stages "
                "would draw other ones from here on. Let it draw from its first step on, or not at all (dropout=0.0); or use pp=1"
            )
        if ended:
            return out
        has_loss = self._chunk == len(self._cut.blocks) - 1
        if not has_loss or self._begun is None:
            what = "a block of its own" if has_loss else "the blocks of the stage behind"
            raise RuntimeError(
                f"stage {self.number} of {self.count}: the step ended without calling {what} "
                f"({self._shown(self._chunk + (not has_loss))}), so that nothing went through the pipeline"
            )
        loss = out.get("loss") if isinstance(out, Mapping) else out
        if isinstance(loss, Tensor):
            self._computed.append(loss.detach())
        return out

    def _begin_step(self) -> None:
        self._begun, self._is_awaited = None, False

    @contextmanager
    def _passing_by_own(self) -> Iterator[None]:
        """A context in which this stage's chunks in front of the one that is run pass by too."""
        passed = {name: self._modules[name] for name, chunk in self._own.items() if chunk < self._chunk}
        kept = {name: vars(module).get("forward") for name, module in passed.items()}
        for name, module in passed.items():
            module.forward = self._elsewhere_at(name, self._own[name])
        try:
            yield
        finally:
            for name, module in passed.items():
                del module.forward
                if kept[name] is not None:
                    module.forward = kept[name]

    def evaluate(self, step: Callable[[], Any]) -> Any:
        """Run a step of the user's to its end on every stage, without gradients.

        Behind the last block all stages go on with what it returned on the last one, and do the same from there: they return
        the same, log the same and count the same. Call it between :meth:`begin_evaluation` and :meth:`end_evaluation`.

        Raises:
            RuntimeError: if it came to its end in the middle of the blocks.
        """
        self._begin_step()
        self._goes_on = True
        self._micro_batch += 1
        self._streams.begin()
        try:
            out = step()
        finally:
            self._goes_on = False
        if self._begun is not None:
            raise RuntimeError(
                f"stage {self.number} of {self.count}: the step ended without calling the last block ({self._last_block}), so "
                "that the stages would go on with different activations"
            )
        return out

    def begin_evaluation(self, replicas: dist.ProcessGroup) -> None:
        """Get the parameters that the last stage reads behind the blocks. Collective over the pipeline.

        Args:
            replicas: over which ``fully_shard`` splits parameters, where it does; collective over them too then.
        """
        wanted = self._behind_blocks
        for name, parameter in self._model.named_parameters():
            if name not in wanted:
                continue
            if self.is_last:
                whole = gather_rows(parameter, replicas) if is_split(parameter) else parameter
                whole = whole.detach().contiguous()
            else:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            dist.broadcast(whole, group=self._group, group_src=self.count - 1)
            if not self.holds(name):
                parameter.data = whole

    def end_evaluation(self) -> None:
        """Forget the parameters that :meth:`begin_evaluation` got."""
        self.leave_out(self._anchor.device)

    def check_graph(self, loss: Tensor) -> None:
        """What this stage computes must read no parameter that is not here.

        Args:
            loss: what :meth:`run` returned.

        Raises:
            RuntimeError: naming the parameter.
        """
        absent = {id(p): name for name, p in self._model.named_parameters() if not self.holds(name)}
        for node in reach(loss.grad_fn):
            if (leaf := leaf_of(node)) is not None and id(leaf) in absent:
                raise RuntimeError(
                    f"stage {self.number} of {self.count} reads {absent[id(leaf)]}, which is on stage "
                    f"{self._cut.shared(absent[id(leaf)])[0]}: in the example this stage did not read it. A model whose stages "
                    "change what they read can't be cut; use pp=1"
                )

    def put_off(self) -> SavedStreams:
        """Go on as if a micro-batch had been run, whose run is put off: its random streams, and behind them those of the next."""
        return self._streams.put_off(seeded=self._switches_streams, host=self._cut.host_draws and self._own_streams)

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        self._micro_batch = 0
        self.losses, self._computed = self._computed, []
        for link in (self._before, self._behind):
            if link is not None:
                link.settle()

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

    @property
    def ends(self) -> dict[int, list[tuple[str, str]]]:
        """Of each stage the first and the last block of its chunks."""
        ends = [(names[0], names[-1]) for names in self._cut.blocks]
        return {stage: [ends[chunk] for chunk in self._cut.chunks(stage)] for stage in range(self.count)}

    def sum_shared(self) -> None:
        """Sum the gradients of parameters that several stages hold (tied embeddings), over those. Collective over the pipeline."""
        shared = self._shared_parameters()
        if not shared:
            return
        has_one = self.on_any([parameter.grad is not None for _, parameter in shared])
        for (name, parameter), has in zip(shared, has_one, strict=True):
            holders = self._cut.shared(name)
            if not has or self.number not in holders:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._sum_over(holders, local_rows(parameter.grad))

    def _shared_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those that train and that several stages hold, by name."""
        return [(n, p) for n, p in self._model.named_parameters() if len(self._cut.shared(n)) > 1 and p.requires_grad]

    def refuse_kept(self) -> None:
        """Where a window begins, gradients that several stages hold must be zero: what is kept would be summed once more.

        Raises:
            RuntimeError: naming the parameter.
        """
        for name, parameter in self._shared_parameters():
            if self.holds(name) and parameter.grad is not None and bool(local_rows(parameter.grad).any()):
                raise RuntimeError(
                    f"{name}: its gradient was kept from the step before (optimizer_zero_grad), and several stages of the pipeline "
                    "hold it, so that it would be summed once more. Accumulate by Trainer(accumulate_grad_batches=...), or use pp=1"
                )

    def _sum_over(self, stages: Sequence[int], x: Tensor) -> None:
        """Sum a tensor over stages of which this is one, in place: in the order of the stages, so that all have the same bits."""
        others = [stage for stage in stages if stage != self.number]
        sent = x.contiguous()
        works = [dist.isend(sent, group=self._group, group_dst=stage) for stage in others]
        parts = {stage: torch.empty_like(sent) for stage in others}
        for stage in others:
            dist.recv(parts[stage], group=self._group, group_src=stage)
        for work in works:
            if work is not None:
                work.wait()
        before = [part for stage, part in parts.items() if stage < self.number]
        for part in before[1:]:
            before[0].add_(part)
        for part in (*before[:1], *(part for stage, part in parts.items() if stage > self.number)):
            x.add_(part)

    def on_any(self, facts: Sequence[bool]) -> list[bool]:
        """Which facts hold on any stage. Collective over the pipeline."""
        flags = torch.tensor(facts, dtype=torch.int32, device=self._anchor.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in flags.tolist()]

    def of_last(self, x: Tensor) -> Tensor:
        """A tensor of floats that every stage has, as it is on the last one. Collective over the pipeline."""
        return from_last(x if self.is_last else None, self._group, self._anchor.device)

    # ---- the cut -----------------------------------------------------------------------------------------------

    def _install(self) -> None:
        for name in self._own:
            # Streams in front of all other hooks, of which some may draw; the activation behind them, in its final form.
            module, chunk = self._modules[name], self._own[name]
            self._handles.append(module.register_forward_pre_hook(self._begin_at(name, chunk), prepend=True))
            if chunk > 0:
                self._handles.append(module.register_forward_pre_hook(self._take_at(name, chunk), with_kwargs=True))
        for name, chunk in self._elsewhere.items():
            self._modules[name].forward = self._elsewhere_at(name, chunk)
        if self.is_last:  # in front of all other hooks, as the others have it from the block's forward
            self._handles.append(self._modules[self._last_block].register_forward_hook(self._give_to_all, prepend=True))

    @property
    def _switches_streams(self) -> bool:
        """Whether the stages draw from streams of their own."""
        return self._cut.draws and self._model.training and self._own_streams

    def _passes_by(self, chunk: int) -> bool:
        """Whether a chunk of this stage is not the one that a training step runs."""
        return self._runs and chunk != self._chunk

    def _begin_at(self, name: str, chunk: int) -> Callable[..., None]:
        """A pre-hook of this stage's blocks: the first that runs begins its chunk."""

        def hook(module: nn.Module, args: Any) -> None:
            if self._passes_by(chunk):
                return
            if self._runs and name in self._ran:
                raise RuntimeError(
                    f"stage {self.number} of {self.count}: {name} is called once more in a training step, in which the stages "
                    "before have ended theirs. A model that runs its blocks several times in a step can't be cut; use pp=1"
                )
            self._ran.add(name)
            if self._begun != chunk:
                self._begun, self._is_awaited = chunk, chunk > 0
                self._streams.enter_blocks()
                if self._switches_streams:
                    self._streams.begin_stage(chunk)

        return hook

    def _check_beside(self, name: str, came: Sequence[float], own: Tensor) -> None:
        """What a block is given beside its activation must be the same where it runs as on the stage before.

        Raises:
            RuntimeError: if it is not.
        """
        if any(abs(a - b) > 1e-6 * max(1.0, abs(a), abs(b)) for a, b in zip(came, own.tolist(), strict=True)):
            raise RuntimeError(
                f"stage {self.number} of {self.count}: what {name} is given beside its activation (a mask, positions) is not what "
                f"stage {self.number - 1} would give it: it is made of embeddings, or of a cache, that this stage does not have. "
                "Make it of the batch, generate without a cache (use_cache=False), or use pp=1"
            )

    def _take_at(self, name: str, chunk: int) -> Callable[..., Any]:
        """A pre-hook of this stage's blocks: in front of the first that runs, the activation of the stage before comes in."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._is_awaited or self._passes_by(chunk):
                return None
            self._is_awaited = False
            assert self._before is not None
            where, nothing = find_argument(name, self._cut.arg, args, kwargs)
            message = Message(self._micro_batch, chunk)
            x, wants, came = self._before.receive("the activation", message)
            self._check_beside(name, came, _beside(nothing, args, kwargs))
            if wants and torch.is_grad_enabled():
                x = _Take.apply(self._anchor, x, self._before, message)  # type: ignore[no-untyped-call]
            return put_argument(where, _placed_as(nothing, x), args, kwargs)

        return hook

    def _elsewhere_at(self, name: str, chunk: int) -> Callable[..., Any]:
        """The forward of a block that is not run here.

        In front of this stage's chunk it passes by: what it returns is no number, so that nobody takes it for one. Behind it the
        activation goes to the next stage, and this stage's step ends. One that evaluates goes on.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            x = find_argument(name, self._cut.arg, args, kwargs)[1]
            is_next = chunk - 1 in self._chunks and name == self._cut.blocks[chunk][0]
            if not self._goes_on and chunk < self._chunk:
                return self._cut.as_returned(_nothing_like(x))
            if self._begun is None if not self._goes_on else is_next and self._begun != chunk - 1:
                raise RuntimeError(
                    f"stage {self.number} of {self.count}: {name} was called before any block of its own "
                    f"({self._shown(self._chunk)})"
                )
            message = Message(self._micro_batch, chunk)
            if not self._goes_on:
                assert self._behind is not None
                sent = local_of(x), self._anchor, self._behind, message, _beside(x, args, kwargs)
                raise StageEndError(_HandOn.apply(*sent))  # type: ignore[no-untyped-call]
            if is_next:
                assert self._behind is not None
                self._behind.send(local_of(x), message, beside=_beside(x, args, kwargs))
            x = _placed_as(x, self._rejoin(None)) if name == self._last_block else _nothing_like(x)
            return self._cut.as_returned(x)

        return forward

    def _give_to_all(self, module: nn.Module, args: Any, out: Any) -> None:
        """A hook behind the last block of all."""
        if self._goes_on:
            self._rejoin(local_of(out[0] if self._cut.returned else out))

    def _rejoin(self, x: Tensor | None) -> Tensor:
        """What the last stage's last block returned, on every stage.

        Random streams go on alike; in evaluation mode blocks draw nothing, and they are left alone.
        """
        x = from_last(x, self._group, self._anchor.device)
        if self._switches_streams:
            self._streams.end()
            self._streams.begin()  # the model may be called once more
        self._begun = None
        return x

    @property
    def _last_block(self) -> str:
        return self._cut.blocks[-1][-1]

    @property
    def _behind_blocks(self) -> set[str]:
        """The parameters that the last stage reads outside its blocks."""
        blocks = [block for chunk in self._cut.chunks(self.count - 1) for block in self._cut.blocks[chunk]]
        return {name for name in self._cut.held[-1] if not any(inside(name, block) for block in blocks)}

    def _shown(self, chunk: int) -> str:
        names: Sequence[str] = self._cut.blocks[chunk]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def leave_out(self, device: torch.device) -> None:
        """Let parameters that only other stages hold be NaN without memory; they stay in the model, and get no gradient.

        Args:
            device: where they are then. What has no memory is made whole where a module is moved: call it before.
        """
        for name, parameter in self._model.named_parameters():
            if self.holds(name):
                continue
            nothing = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
            number = torch.full((), nothing, dtype=parameter.dtype, device=device).expand(parameter.shape)
            if parameter.is_meta:
                torch.utils.swap_tensors(parameter, nn.Parameter(number, parameter.requires_grad))
            else:
                parameter.data = number

    def undo_hooks(self) -> None:
        """Let the blocks be the user's again."""
        for handle in self._handles:
            handle.remove()
        for name in self._elsewhere:
            del self._modules[name].forward
        self._handles, self._elsewhere = [], {}
