"""What one stage of a pipeline runs of a model.

Every stage runs the user's own step. Blocks of the stages before return NaN there; at its first block the activation is
replaced by that of the stage before; where the first block of the stage behind is called, the activation is sent on and the
step ends. What lies in front of the blocks runs on every stage. Parameters that a stage does not read are NaN there, without
memory: what is made of them is thrown away, and would be seen where it is not. A step that evaluates goes on instead, on
every stage, with what the last block returned on the last one.

Where several stacks of blocks run one after the other (encoder and decoder), what the last block of one returns goes to every
stage behind that reads it, and each of them makes of it what lies between the stacks. What blocks hand from one to the next
beside the activation, such as a bias that the first one makes, goes with it.

A stage may have several chunks of blocks (interleaving, arXiv 2104.04473, section 2.2.2). It runs the step once for each, as
if each were a stage of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.context.seq_part import SeqPart, local_of
from lightning_seqpar.distributed.autograd import once_differentiable
from lightning_seqpar.distributed.rng import SavedStreams, StageStreams
from lightning_seqpar.pipeline.cut import Cut, CutStack, HeldParameters, Link, Message, from_stage, refuse_nested
from lightning_seqpar.region.hooks import find_argument, put_argument
from lightning_seqpar.topology.process_groups import ParallelGroups


class StageEndError(Exception):
    """The user's step came to a block of a stage behind: what follows runs there. No error, but a way out of the step, and an
    ``Exception``, since torch calls hooks that must end what others began for those alone.
    """

    def __init__(self) -> None:
        super().__init__(
            "the model was called outside of a step, where a stage of a pipeline has its own blocks alone; call it in "
            "training_step, validation_step, test_step or predict_step"
        )


class _HandOn(torch.autograd.Function):
    """Forward: send an activation to a stage behind; what is left stands for the loss. Backward: its gradient comes from there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, link: Link, message: Message, beside: Tensor | None) -> Tensor:
        ctx.link, ctx.wants, ctx.message = link, x.requires_grad, message
        link.send(x, message, wants_gradient=x.requires_grad, beside=beside)
        return torch.full_like(anchor, float("nan"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x = ctx.link.receive("the gradient", ctx.message)[0] if ctx.wants else None
        return x, None, None, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, came: list[Tensor], link: Link, message: Message) -> Tensor:
        ctx.link, ctx.message = link, message
        return came.pop()  # no argument, so that the model may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        ctx.link.send(grad, ctx.message)
        return None, None, None, None


def _placed_as(nothing: Any, x: Tensor) -> Tensor:
    """An activation that came from another stage, as a part of a sequence where what stands in its place is one."""
    return SeqPart.wrap(x, nothing.place) if isinstance(nothing, SeqPart) else x


def _beside(carried: Sequence[Any], args: Any, kwargs: Any) -> Tensor:
    """Two numbers that tell what a block is given beside what is sent to it: ``[2]``, float64. Nothing waits for the device."""
    x = local_of(carried[0])
    total = torch.zeros(2, dtype=torch.float64, device=x.device)
    leaves = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
    others = (one for one in leaves if not any(one is each for each in carried))
    for number, one in enumerate(others, 1):
        own = local_of(one).detach()
        if own.is_nested or own.is_sparse or own.is_complex() or not own.numel():
            continue
        plain = own.nan_to_num(0.5, 2.0, -2.0) if own.is_floating_point() else own
        rows = plain.reshape(-1, plain.shape[-1] if plain.ndim else 1).sum(-1, dtype=torch.float64).to(x.device)
        places = torch.arange(1, len(rows) + 1, dtype=torch.float64, device=x.device)
        total += number * torch.stack([rows.sum() + plain.numel(), (rows * places).mean()])
    return total


def _nothing_like(x: Any) -> Any:
    """NaN in the place of an activation that is not here."""
    refuse_nested(x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return _placed_as(x, torch.full_like(local_of(x).detach(), float("nan")))


class Stage(HeldParameters):
    """One stage of a pipeline: hooks on the blocks of a model, and parameters without memory where other stages hold them."""

    def __init__(
        self, model: nn.Module, cut: Cut, groups: ParallelGroups, device: torch.device, *, own_streams: bool = True
    ) -> None:
        super().__init__(model, cut, groups, device)
        self._chunks = cut.chunks(self.number)
        self._chunk = self._chunks[0]  # that is run, of those
        self._own = {name: chunk for chunk in self._chunks for name in cut.blocks[chunk]}
        self._elsewhere = {name: at for at, names in enumerate(cut.blocks) for name in names if name not in self._own}
        self._peers: dict[int, Link] = {}
        self._before, self._behind = self._links(groups)
        # What needs a gradient, so that the backward of what is sent and taken runs whatever the model's own tensors need.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._begun: int | None = None  # the chunk of which a block was called
        self._is_awaited = False  # and the activation for it is still to come
        self._runs = False  # a step that trains
        self.losses: list[Tensor] = []
        self._computed: list[Tensor] = []
        self._ran: set[str] = set()  # its blocks that were called in it
        self._sent: list[Tensor] = []  # in it, of each tensor what its gradient comes back by
        self.compares = True  # in a step in which checks are due, what blocks are given beside activations
        self._goes_on = False  # behind the last block, on every stage: it evaluates
        self._micro_batch = 0  # the number of the last one since all that was sent had arrived
        self._streams, self._own_streams = StageStreams(), own_streams
        self._handles: list[RemovableHandle] = []
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._install()
        self.leave_out(device)

    def __deepcopy__(self, memo: Any) -> Stage:
        return self  # the hooks of a copied model, as those of the model

    def _links(self, groups: ParallelGroups) -> tuple[Link | None, Link | None]:
        """The ways to the stage before and to the one behind; the first and the last are neighbours where there are more chunks."""
        activations, gradients, *around = groups.pp_channels
        depth, last = 4 * len(self._cut.blocks), self.count - 1
        for peer in (*range(self.number), *range(self.number + 1, self.count)):
            ways = (activations, gradients) if peer > self.number else (gradients, activations)
            self._peers[peer] = Link(*ways, peer, self._device, depth)
        before, behind = self._peers.get(self.number - 1), self._peers.get(self.number + 1)
        if len(self._chunks) > 1 and self.number == 0:
            before = Link(around[1], around[0], last, self._device, depth)
        if len(self._chunks) > 1 and self.number == last:
            behind = Link(around[0], around[1], 0, self._device, depth)
        return before, behind

    @property
    def chunks(self) -> int:
        """How many chunks of blocks this stage has."""
        return len(self._chunks)

    @property
    def stages_behind(self) -> int:
        """How many stages come behind this one."""
        return self.count - 1 - self.number

    def run(self, step: Callable[[], Any], *, chunk: int = 0, micro_batch: int | None = None) -> Any:
        """Run the user's step as far as this stage goes; returns what it returns on the last chunk, else what stands for the loss.

        Raises:
            RuntimeError: if it ends without this stage's first or last block, or draws random numbers that no example drew.
            ValueError: if it returns no loss where it should.
        """
        self._begin_step()
        self._micro_batch = self._micro_batch + 1 if micro_batch is None else micro_batch
        self._ran, self._sent, self._runs, self._chunk = set(), [], True, self._chunks[chunk]
        self._streams.begin()
        try:
            with self._passing_by_own():
                out, ended = step(), False
        except StageEndError:
            out, ended = None, True
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
            return torch.stack([self._anchor + float("nan"), *self._sent]).sum()
        has_loss = self._chunk == len(self._cut.blocks) - 1
        if not has_loss or self._begun is None:
            what = "a block of its own" if has_loss else "the blocks of the stage behind"
            raise RuntimeError(
                f"stage {self.number} of {self.count}: the step ended without calling {what} "
                f"({self._shown(self._chunk + (not has_loss))}), so that nothing went through the pipeline"
            )
        loss = out.get("loss") if isinstance(out, Mapping) else out
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"the training step returned {type(loss).__name__}, and not a loss: with pp={self.count} no batch can be skipped, "
                "since the stages before the last have run it already. Return a loss that is multiplied by 0, or use pp=1"
            )
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
            module.forward = partial(self._elsewhere_at, name, self._own[name])
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
                f"stage {self.number} of {self.count}: the step ended without calling the last block ({self._cut.blocks[-1][-1]}), "
                "so that the stages would go on with different activations"
            )
        return out

    def put_off(self) -> SavedStreams:
        """Go on as if a micro-batch had been run, whose run is put off: its random streams, and behind them those of the next."""
        return self._streams.put_off(seeded=self._switches_streams, host=self._cut.host_draws and self._own_streams)

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        self._micro_batch = 0
        self.losses, self._computed = self._computed, []
        for link in (self._before, self._behind, *self._peers.values()):
            if link is not None:
                link.settle()

    @property
    def ends(self) -> dict[int, list[tuple[str, str]]]:
        """Of each stage the first and the last block of its chunks."""
        blocks = self._cut.blocks
        return {at: [(blocks[c][0], blocks[c][-1]) for c in self._cut.chunks(at)] for at in range(self.count)}

    def _install(self) -> None:
        for name, chunk in self._own.items():
            module, stack = self._modules[name], self._cut.stack_of(name)
            # Streams in front of all other hooks, of which some may draw; the activation behind them, in its final form.
            begin, take, give = (partial(hook, name, chunk) for hook in (self._begin_at, self._take_at, self._give_at))
            self._handles.append(module.register_forward_pre_hook(begin, prepend=True))
            if self._cut.goes_on(chunk):
                self._handles.append(module.register_forward_pre_hook(take, with_kwargs=True))
            if name == stack.blocks[-1]:  # in front of all other hooks, as others have it from the block's forward
                self._handles.append(module.register_forward_hook(give, prepend=True))
        for name, chunk in self._elsewhere.items():
            self._modules[name].forward = partial(self._elsewhere_at, name, chunk)
        for number, stack in enumerate(self._cut.stacks[:-1]):  # behind all other hooks, of which some end streams
            end = self._modules[stack.blocks[-1]]
            self._handles.append(end.register_forward_hook(partial(self._begin_between, number)))

    @property
    def _switches_streams(self) -> bool:
        """Whether the stages draw from streams of their own."""
        return self._cut.draws and self._model.training and self._own_streams

    def _passes_by(self, chunk: int) -> bool:
        return self._runs and chunk != self._chunk

    def _begin_at(self, name: str, chunk: int, *call: Any) -> None:
        """A pre-hook of this stage's blocks: the first that runs begins its chunk."""
        if self._passes_by(chunk):
            return
        if self._runs and name in self._ran:
            raise RuntimeError(
                f"stage {self.number} of {self.count}: {name} is called once more in a training step, in which the stages before "
                "have ended theirs. A model that runs its blocks several times in a step can't be cut; use pp=1"
            )
        self._ran.add(name)
        if self._begun != chunk:
            # An encoder whose end this stage has may be left out, where its output is known (a decoder that generates).
            waits = self._cut.goes_on(chunk) and name in self._cut.stack_of(self._cut.blocks[chunk][0]).blocks
            self._begun, self._is_awaited = chunk, waits
            self._streams.enter_blocks()
            if self._switches_streams:
                self._streams.begin_stage(chunk)

    def _check_beside(self, name: str, came: Sequence[float], own: Tensor) -> None:
        """What a block is given beside its activation must be the same where it runs as on the stage before."""
        if any(abs(a - b) > 1e-6 * max(1.0, abs(a), abs(b)) for a, b in zip(came, own.tolist(), strict=True)):
            raise RuntimeError(
                f"stage {self.number} of {self.count}: what {name} is given beside its activation (a mask, positions) is not what "
                f"stage {self.number - 1} would give it: it is made of embeddings, of a cache, or, behind detach() or "
                "no_grad, of what an encoder returned, which this stage does not have. Make it of the batch, generate without a "
                "cache (use_cache=False), or use pp=1"
            )

    def _take_at(self, name: str, chunk: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A pre-hook of this stage's blocks: in front of the first that runs, what the stage before has made comes in."""
        if not self._is_awaited or self._passes_by(chunk):
            return None
        self._is_awaited = False
        assert self._before is not None
        found = [find_argument(name, arg, args, kwargs) for arg in self._cut.stack_of(name).carries]
        beside = _beside([nothing for _, nothing in found], args, kwargs) if self.compares else None
        for slot, (where, nothing) in enumerate(found):
            x, came = self._take(self._before, Message(self._micro_batch, chunk, slot), nothing)
            if slot == 0 and beside is not None:
                self._check_beside(name, came, beside)
            args, kwargs = put_argument(where, x, args, kwargs)
        return args, kwargs

    def _take(self, link: Link, message: Message, nothing: Any) -> tuple[Tensor, list[float]]:
        """A tensor from another stage, in the place of ``nothing``, and the two numbers beside it."""
        x, wants, came = link.receive("the activation", message)
        if wants and torch.is_grad_enabled():
            x = _Take.apply(self._anchor, [x], link, message)  # type: ignore[no-untyped-call]
        return _placed_as(nothing, x), came

    def _hand_over(self, link: Link, message: Message, x: Any, beside: Tensor | None = None) -> None:
        if self._goes_on:
            link.send(local_of(x), message, beside=beside)
        else:
            given = local_of(x), self._anchor, link, message, beside
            self._sent.append(_HandOn.apply(*given))  # type: ignore[no-untyped-call]

    def _hand_on(self, name: str, chunk: int, stack: CutStack, args: Any, kwargs: Any) -> None:
        """Send the stage behind what its first block, which is called here, is given."""
        assert self._behind is not None
        found = [find_argument(name, arg, args, kwargs)[1] for arg in stack.carries]
        refuse_nested(found[0])
        for slot, x in enumerate(found):
            if not isinstance(x, Tensor):
                raise RuntimeError(
                    f"stage {self.number} of {self.count}: {name} is given {type(x).__name__} as {stack.carries[slot]!r}, and was "
                    "given a tensor in the example; a model whose blocks hand on now this, now that can't be cut. Use pp=1"
                )
            message = Message(self._micro_batch, chunk, slot)
            beside = _beside(found, args, kwargs) if slot == 0 and self.compares else None
            self._hand_over(self._behind, message, x, beside)

    def _elsewhere_at(self, name: str, chunk: int, *args: Any, **kwargs: Any) -> Any:
        """The forward of a block that is not run here.

        In front of this stage's chunk it passes by: what it returns is no number, so that nobody takes it for one; the last block
        of a stack returns what it returned on its own stage, where this stage reads that. Behind it the activation goes to the
        next stage, and this stage's step ends. One that evaluates goes on.
        """
        stack = self._cut.stack_of(name)
        begins = name == self._cut.blocks[chunk][0] and self._cut.goes_on(chunk)
        x = find_argument(name, stack.arg, args, kwargs)[1]
        if not self._goes_on and chunk > self._chunk:
            if self._begun is None:
                raise self._not_begun(name)
            if self._cut.goes_on(chunk):
                self._hand_on(name, chunk, stack, args, kwargs)
            raise StageEndError
        if self._goes_on and begins and chunk - 1 in self._chunks:
            if self._begun != chunk - 1:
                raise self._not_begun(name)
            self._hand_on(name, chunk, stack, args, kwargs)
        if name != stack.blocks[-1]:
            return stack.as_returned(_nothing_like(x))
        if self._goes_on:
            x, *beside = self._rejoin(chunk, stack, [None] * len(stack.carries), x)
            return stack.as_returned(x, dict(zip(stack.places, beside, strict=True)))
        return stack.as_returned(self._from_end(chunk, stack, x))

    def _not_begun(self, name: str) -> RuntimeError:
        return RuntimeError(
            f"stage {self.number} of {self.count}: {name} was called before any block of its own ({self._shown(self._chunk)})"
        )

    def _from_end(self, chunk: int, stack: CutStack, x: Any) -> Any:
        """What the last block of a stack returned, which runs elsewhere, where this stage reads it; else what is no number."""
        reader = next((own for own in self._chunks if own in stack.readers), None)
        if reader is None:
            return _nothing_like(x)
        refuse_nested(x)
        return self._take(self._peers[chunk % self.count], self._end_of(stack, reader), x)[0]

    def _give_at(self, name: str, chunk: int, module: nn.Module, args: Any, out: Any) -> None:
        """A hook behind the last block of a stack, which is this stage's: other stages get what it returned."""
        if self._passes_by(chunk):
            return
        stack = self._cut.stack_of(name)
        x = out[0] if stack.returned else out
        refuse_nested(x)
        if self._goes_on:
            self._rejoin(chunk, stack, [local_of(x), *(out[at] for at in stack.places)], x)
            return
        for reader in stack.readers:  # a copy, since what comes behind may change it in place
            self._hand_over(self._peers[reader % self.count], self._end_of(stack, reader), local_of(x).clone())

    def _end_of(self, stack: CutStack, reader: int) -> Message:
        return Message(self._micro_batch, reader, -1 - self._cut.stacks.index(stack))

    def _begin_between(self, number: int, *call: Any) -> None:
        """A hook behind the last block of a stack, by its number: all stages draw alike, since each makes what is read behind."""
        if self._switches_streams:
            self._streams.begin_between(number)

    def _rejoin(self, chunk: int, stack: CutStack, xs: Sequence[Tensor | None], like: Any) -> list[Tensor]:
        """In an evaluation, what the last block of a stack returned on its own stage, on every stage; all go on with it."""
        found = [from_stage(chunk % self.count, x, self._group, self._device) for x in xs]
        if stack is self._cut.stacks[-1]:
            if self._switches_streams:
                self._streams.end()
                self._streams.begin()  # the model may be called once more
            self._begun = None
        return [_placed_as(like, found[0]), *found[1:]]

    def _shown(self, chunk: int) -> str:
        first, *_, last = self._cut.blocks[chunk] * 2
        return first if first == last else f"{first} to {last}"

    def undo_hooks(self) -> None:
        """Let the blocks be the user's again."""
        for handle in self._handles:
            handle.remove()
        for name in self._elsewhere:
            del self._modules[name].forward
        self._handles, self._elsewhere = [], {}
