"""One run of a model's copy, whole or sharded, with everything that the self-check compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_seqpar.context.seq_part import SeqPart
from lightning_seqpar.distributed.rng import Drawn, SavedStreams, drawn_by, draws_apart, seed_streams
from lightning_seqpar.inference.examples import Example, backward_at_once
from lightning_seqpar.inference.model_copy import Quiet, kept_tensors
from lightning_seqpar.layout.attributes import ModelAttributes
from lightning_seqpar.nn.sharded_logits import ShardedLogits
from lightning_seqpar.parallel.beside_tp import average_gradients
from lightning_seqpar.parallel.grad_sync import GradSync, check_loss
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.guards.graph import check_readers


class RandomDraw(NamedTuple):
    """One draw of random numbers in a forward, and where it happened."""

    where: str  # name of the module that was entered last
    drawn: Drawn  # the operation and the shape that it filled
    own: bool  # whether it came from this rank's own stream rather than from the one that the replica shares
    sequences: tuple[tuple[int, int], ...]  # of each region that was open, the dim of the sequence and its whole length


class _Observer(Quiet):
    """Notes every random draw, and whether anything is computed in less than float64; see :class:`Quiet` for the rest."""

    def __init__(self, example: Example, record: ShardedModel | None) -> None:
        super().__init__(draws=example.draws)
        self.narrow = False
        self.where = ""
        self.drawn: list[RandomDraw] = []
        self.outputs: list[tuple[str, Tensor]] = []
        self.ran: set[str] = set()
        self._regions = [] if record is None else record.regions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, Tensor) and out.is_floating_point() and out.ndim > 1 and out.dtype != torch.float64:
            self.narrow = True
        if (drawn := drawn_by(func, out, args, kwargs)) is not None:
            own = not drawn.seeded and (draws_apart() or any(region.streams.own for region in self._regions))
            sequences = tuple((region.dim, region.frames.whole_length) for region in self._regions if region.frames.active)
            self.drawn.append(RandomDraw(self.where, drawn, own, sequences))
        return out

    @contextmanager
    def noting(self, model: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """While open, note the modules that are called, and the outputs of those of ``names``; sharded ones are gathered."""
        with ExitStack() as stack:
            for name, module in model.named_modules():

                def enter(module: nn.Module, args: Any, name: str = name) -> None:
                    self.ran.add(name)
                    self.where = name

                stack.callback(module.register_forward_pre_hook(enter).remove)
            for name in names:

                def leave(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
                    first = out[0] if isinstance(out, list | tuple) and out else out
                    if isinstance(first, ShardedLogits | SeqPart):
                        first = first.whole()  # a collective: every rank is in this hook now, but may not be later
                    if isinstance(first, Tensor):
                        self.outputs.append((name, first.detach()))

                stack.callback(model.get_submodule(name).register_forward_hook(leave).remove)
            yield


@dataclass
class ObservedRun:
    """What one forward and backward of a copy did, on this rank."""

    loss: float
    grads: dict[str, Tensor | None]  # of a whole copy, by parameter name; a sharded one's stay where they are
    outputs: list[tuple[str, Tensor]]  # (first) output of each planned module, in the order of returning; local
    narrow: bool  # whether something was computed in less than float64
    buffers: dict[str, Tensor]  # the buffers after the run, by name
    changed: set[str]  # names of buffers that the run changed
    ran: set[str]  # names of the modules that were called
    drawn: list[RandomDraw]  # the random draws of the forward, in order
    keeps: bool  # whether a module keeps a tensor of this run, which the next one may read


def observe_run(
    model: nn.Module, record: ShardedModel | None, example: Example, names: Sequence[str], groups: ParallelGroups
) -> ObservedRun:
    """Run the example forward and backward, with random streams seeded anew; collective over tp if the model is sharded."""
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    held, observer = kept_tensors(model), _Observer(example, record)
    seed_streams()
    sync = GradSync(record.layout, groups) if record is not None else None

    def backward(loss: Tensor) -> None:  # of a step that reads gradients, which must be whole then
        backward_at_once(loss)
        if sync is not None:
            sync.flush()

    with torch.enable_grad(), observer.noting(model, names), example.repeats(model) as repeats, observer:
        stage = None if record is None else record.stage
        streams, losses, attributes = SavedStreams(), [], ModelAttributes(model)
        values = attributes.read()
        for chunk in range(1 if stage is None else stage.chunks):
            if record is not None:
                record.reset_calls()
            if stage is None:
                losses.append(example.run(model, backward))
            else:
                streams.restore()
                attributes.set(values)
                losses.append(stage.run(lambda: example.run(model, backward), chunk=chunk, micro_batch=1))
            if record is not None:
                record.check_closed(losses[-1])
        loss = losses[-1]
        drawn = list(observer.drawn)  # of the forward; an activation checkpoint draws again in the backward
        if record is not None and (stage is None or stage.is_last):
            check_loss(loss, groups)
            check_readers(loss, record)
        if stage is not None:
            for one in losses:
                stage.check_graph(one)
        if sync is not None:
            sync.attach()  # a parameter may thaw in the step
        model.zero_grad()
        repeats.compute_all()
        for one in reversed(losses):  # under the observer too, which makes the draws of activation checkpoints constant
            one.backward()
    if stage is not None:
        stage.settle()
        stage.sum_shared()
        loss = stage.of_last(loss.detach())
    if record is not None and sync is not None:
        if "cp" in groups.topology.axes and groups.size("cp") > 1:
            average_gradients(list(model.parameters()), groups["cp"])
        sync.flush()
        sync.remove()
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}  # another run may change them
    changed = {name for name, buffer in buffers.items() if name in before and not torch.equal(buffer, before[name])}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()} if record is None else {}
    keeps = not kept_tensors(model).keys() <= held.keys()
    made = float(loss.detach()), grads, observer.outputs, observer.narrow
    return ObservedRun(*made, buffers, changed, observer.ran, drawn, keeps)


@dataclass
class ObservedEvaluation:
    """What one more forward of a copy did, in evaluation or as in training, on this rank."""

    values: list[tuple[str, Tensor]]  # what the step logged and returned, whole, each with what it is
    outputs: list[tuple[str, Tensor]]  # name and (first) output of the planned modules, as in :class:`ObservedRun`
    narrow: bool  # whether something was computed in less than float64


def observe_evaluation(
    model: nn.Module, record: ShardedModel | None, example: Example, names: Sequence[str], *, training: bool = False
) -> ObservedEvaluation:
    """Run the example without gradients, in evaluation: the copy stays in that mode. Collective over tp if the model is sharded."""
    observer = _Observer(example, record)
    seed_streams()
    for parameter in model.parameters():
        parameter.grad = None  # which a step may change in place; those of the run before are somebody's
    if not training:
        model.eval()
    if record is not None:
        record.reset_calls()
    with torch.no_grad(), observer.noting(model, names), _without_fast_path(), example.repeats(model), observer:
        values = example.evaluate(model)
        if record is not None:
            record.check_closed([value for _, value in values])
        whole = [(what, v.whole() if isinstance(v, ShardedLogits | SeqPart) else v) for what, v in values]
    return ObservedEvaluation([(what, value.detach()) for what, value in whole], observer.outputs, observer.narrow)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """While open, torch's encoders run the modules in them: their other way gives positions that are masked other numbers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
