"""One run of a model's copy, whole or sharded, with everything that the self-check compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_seqpar.distributed.rng import Drawn, drawn_by, seed_streams
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.model_copy import Quiet
from lightning_seqpar.nn.sharded_logits import ShardedLogits
from lightning_seqpar.parallel.apply import ShardedModel
from lightning_seqpar.parallel.grad_sync import GradSync
from lightning_seqpar.parallel.loss_consistency import check_loss
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.guards.graph import check_readers
from lightning_seqpar.verify.parity import gather_grads


class RandomDraw(NamedTuple):
    """Random numbers that a forward drew."""

    where: str  # the module that began last
    drawn: Drawn
    own: bool  # from the rank's own stream
    dealt: tuple[tuple[int, int], ...]  # of the sequences that are dealt out now, the dim and the length


class _Observer(Quiet):
    """Also notes whether a forward narrows what came in as float64, and what it draws."""

    def __init__(self, *, draws: bool, regions: Sequence[SequenceRegion]) -> None:
        super().__init__(draws=draws)
        self.narrow = False
        self.where = ""
        self.drawn: list[RandomDraw] = []
        self._regions = regions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, Tensor) and out.is_floating_point() and out.ndim > 1 and out.dtype != torch.float64:
            self.narrow = True
        if (drawn := drawn_by(func, out, args, kwargs)) is not None:
            own = not drawn.seeded and any(region.streams.own for region in self._regions)
            dealt = tuple((region.dim, region.length) for region in self._regions if region.active)
            self.drawn.append(RandomDraw(self.where, drawn, own, dealt))
        return out


@dataclass
class ObservedRun:
    """One run of one copy."""

    loss: float
    grads: dict[str, Tensor | None]
    outputs: list[tuple[str, Tensor]]
    narrow: bool
    buffers: dict[str, Tensor]
    changed: set[str]
    ran: set[str]
    drawn: list[RandomDraw]


@contextmanager
def _noting_modules(model: nn.Module, ran: set[str], watch: _Observer) -> Iterator[None]:
    """Note which modules run."""
    with ExitStack() as stack:
        for name, module in model.named_modules():

            def note(module: nn.Module, args: Any, name: str = name) -> None:
                ran.add(name)
                watch.where = name

            stack.callback(module.register_forward_pre_hook(note).remove)
        yield


@contextmanager
def _noting_outputs(model: nn.Module, names: Sequence[str], outputs: list[tuple[str, Tensor]]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:

            def note(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
                first = out[0] if isinstance(out, list | tuple) and out else out
                if isinstance(first, ShardedLogits):
                    first = first.whole()  # here, where all ranks are
                if isinstance(first, Tensor):
                    outputs.append((name, first.detach()))

            stack.callback(model.get_submodule(name).register_forward_hook(note).remove)
        yield


def observe_run(
    model: nn.Module, record: ShardedModel | None, example: Example, names: Sequence[str], groups: ParallelGroups
) -> ObservedRun:
    """Run the example on a model, whole or sharded, forward and backward."""
    outputs: list[tuple[str, Tensor]] = []
    ran: set[str] = set()
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    watch = _Observer(draws=example.draws, regions=record.regions if record is not None else [])
    seed_streams()
    sync = GradSync(record.layout, groups, record.doubtful) if record is not None else None
    with torch.enable_grad(), _noting_outputs(model, names, outputs), _noting_modules(model, ran, watch), watch:
        if record is not None:
            record.reset_calls()
        loss = example.run(model)
        drawn = list(watch.drawn)  # a recompute draws again
        if record is not None:
            record.check_closed(loss)
            check_loss(loss, groups)
            check_readers(loss, record)
        if sync is not None:
            sync.attach()  # a parameter may thaw in the step
        model.zero_grad()
        loss.backward()  # watched too: checkpointing draws again in it
    if record is not None and sync is not None:
        sync.flush_all(check=True)
        sync.remove()
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
    changed = {name for name, buffer in buffers.items() if name in before and not _equal(buffer, before[name])}
    return ObservedRun(float(loss.detach()), gather_grads(model), outputs, watch.narrow, buffers, changed, ran, drawn)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
