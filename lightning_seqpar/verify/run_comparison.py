"""Two runs of a model's copy, whole and sharded: what is noted of each, and what differs, in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_seqpar.context.seq_part import SeqPart
from lightning_seqpar.distributed.async_ops import split
from lightning_seqpar.distributed.rng import Drawn, SavedStreams, drawn_by, draws_apart, seed_streams
from lightning_seqpar.inference.examples import Example, backward_at_once
from lightning_seqpar.inference.model_copy import Quiet, kept_tensors
from lightning_seqpar.layout.attributes import ModelAttributes, is_installed
from lightning_seqpar.layout.module_names import in_all_layers, inside, outwards
from lightning_seqpar.nn.sharded_logits import ShardedLogits
from lightning_seqpar.parallel.beside_tp import average_gradients
from lightning_seqpar.parallel.grad_sync import GradSync, check_loss
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.guards.while_training import check_readers
from lightning_seqpar.verify.parity import (
    COPIES,
    Limits,
    WrongTensor,
    compare_losses,
    compare_tensors,
    is_close,
    largest_number,
    norm_of,
)


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

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
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


_MOST_OF_KERNELS = 1e-2  # of the gradients' norm: what kernels of 16 bits may add to an error, at most


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
    kernels: set[str] = field(default_factory=set)  # operators that computed in 16 bits, since they take no float64
    own_error: float = 0.0  # by how much another run of the same copy differs, of the gradients' norm: kernels sum in any order

    @property
    def limits(self) -> Limits:
        """What another run of the model may differ by."""
        limits, own = COPIES[self.narrow], min(8 * self.own_error, _MOST_OF_KERNELS)
        return replace(limits, tensors=max(limits.tensors, own), noise=max(limits.noise, own)) if own else limits

    def with_own_error(self, other: ObservedRun) -> ObservedRun:
        """The same, with the error that another run of the same copy shows."""
        row, _ = compare_tensors("gradients", self.grads, other.grads.items(), self.limits, norm_of(self.grads))
        return replace(self, own_error=row.error)


def observe_run(
    model: nn.Module, record: ShardedModel | None, example: Example, names: Sequence[str], groups: ParallelGroups
) -> ObservedRun:
    """Run the example forward and backward, with random streams seeded anew; collective over tp if the model is sharded."""
    before = _dense_buffers(model)
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
    buffers = _dense_buffers(model)
    changed = {name for name, buffer in buffers.items() if name in before and not torch.equal(buffer, before[name])}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()} if record is None else {}
    keeps = not kept_tensors(model).keys() <= held.keys()
    made = float(loss.detach()), grads, observer.outputs, observer.narrow
    return ObservedRun(*made, buffers, changed, observer.ran, drawn, keeps, observer.kernels)


def _dense_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers, which another run may change."""
    return {name: buffer.detach().to_dense().clone() for name, buffer in model.named_buffers()}


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


@dataclass
class Verdict:
    """The result of the self-check."""

    wrong: list[str] = field(default_factory=list)  # what differs, in words; empty if nothing does
    # whether random numbers of the user's own code are among what differs: how they are drawn is for the user to change
    draws: bool = False
    # planned modules that the example did not run: nothing is proved of them
    idle: list[str] = field(default_factory=list)
    failure: str | None = None  # what the sharded copy raised in evaluation
    not_evaluated: str = ""  # why evaluation was not compared, in words; empty if it was


def compare_runs(
    dense: ObservedRun,
    sharded: ObservedRun,
    record: ShardedModel,
    names: Sequence[str],
    groups: ParallelGroups,
    *,
    draws: bool = True,
) -> Verdict:
    """Compare the runs of the whole and the sharded copy, their ``draws`` if both draw equally often; collective over tp."""
    limits, rank, verdict = dense.limits, groups.rank("tp"), Verdict()
    ran = {name for name, _ in dense.outputs}
    verdict.idle = [name for name in names if name not in ran and not any(inside(one, name) for one in ran)]
    loss = compare_losses("the loss", [dense.loss], [sharded.loss], limits)

    def part(name: str, whole: Tensor) -> Tensor:
        shard = record.layout[name].shard
        return whole if shard is None else shard.take(whole, rank).narrow(shard.dim, 0, len(shard.indices(rank)))

    # Each rank compares its own part, without padding: nothing is gathered, and all of them hear of the first that is wrong.
    def own() -> Iterator[tuple[str, Tensor | None]]:
        for name, parameter in record.model.named_parameters():
            shard, grad = record.layout[name].shard, parameter.grad
            if grad is not None and shard is not None:
                grad = grad.to_dense().narrow(shard.dim, 0, len(shard.indices(rank)))
            yield name, grad

    wrong = wrong_gradients(dense, own(), part)
    verdict.wrong += _unproved_modules(dense, record)
    shared = any(layout.shard is not None and layout.shard.has_shared for layout in record.layout.values())
    sharers = groups.size("tp") if shared else 0
    if draws and (wrong_draw := _wrong_draw(dense.drawn, sharded.drawn, sharers)):
        verdict.wrong.append(wrong_draw[1])
        verdict.draws = _is_own_code(record.model, wrong_draw[0])
    verdict.wrong += _wrong_buffers(dense, sharded, record, limits.tensors, groups)
    first, _ = _first_difference(dense.outputs, sharded.outputs, record, groups, limits.tensors)
    if not loss.ok:
        verdict.wrong.append(f"the loss differs: {loss.where}")
    # It says where an error begins. By itself it is no error, since outputs may be changed later.
    if first and (verdict.wrong or wrong):
        verdict.wrong.append(first)
    verdict.wrong += [describe_wrong(one) for one in wrong[:1]]
    return verdict


def wrong_gradients(
    dense: ObservedRun, got: Iterable[tuple[str, Tensor | None]], part: Callable[[str, Tensor], Tensor] | None = None
) -> list[WrongTensor]:
    """The gradients of a copy that are not those of the whole one, the worst first; ``part`` is :func:`compare_tensors`'s."""
    limits = dense.limits
    _, wrong = compare_tensors("gradients", dense.grads, got, limits, norm_of(dense.grads), part)
    return sorted(wrong, key=lambda one: -one.error)


def describe_wrong(one: WrongTensor) -> str:
    """A sentence on a gradient that is wrong."""
    of_norm = f"error {one.error:.1e} of the global norm"
    return f"the gradient of {one.name} is {one.ratio:.4g} times as large as it should be ({of_norm})"


def _unproved_modules(dense: ObservedRun, record: ShardedModel) -> list[str]:
    """A sentence for each module on shards that no rule names and that the example does not run: nothing is proved of it."""
    known = {match.name for match in record.matches if match.name and not match.rule.says_where_blocks_are}
    unproved: list[str] = []
    for name, module in record.model.named_modules():
        if name in dense.ran or not record.on_shard(name) or any(inside(name, one) for one in unproved):
            continue
        planned = any(inside(name, one) or inside(one, name) for one in known)
        if not planned and any(parameter.ndim > 1 for parameter in module.parameters()):
            unproved.append(name)
    return [
        f"{name} is inside the sequence region, but the example does not run it and no rule names it, so nothing is known of "
        "it: set example_input_array to an input that runs it, or have it computed whole, "
        f"{{pattern: {in_all_layers(name)}, style: whole}}"
        for name in unproved
    ]


def _wrong_draw(dense: Sequence[RandomDraw], sharded: Sequence[RandomDraw], sharers: int) -> tuple[str, str] | None:
    """The first random draw that comes from the wrong stream: the module behind which it is drawn, and a sentence.

    Numbers for a whole activation must come from the stream that the ranks share, numbers for a part of one from the rank's own.
    ``sharers`` is tp where some ranks hold the same key and value heads, else 0.
    """
    names = [[one.drawn.name for one in draws] for draws in (dense, sharded)]
    if names[0] != names[1]:
        alike = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*names, strict=False))])
        first = max(dense[alike:], sharded[alike:], key=len)[0]
        text = (
            f"{first.where or 'the step'} (or what is behind it) draws random numbers ({first.drawn.name}) in one of them alone: "
            f"the sharded model draws {len(sharded)} times, the whole one {len(dense)} times, or in other ways; let the forward "
            "draw alike, whatever the shape of its input"
        )
        return first.where, text
    for one, draw in zip(dense, sharded, strict=True):
        # One position is as long as a shard of it, so shapes say nothing.
        if any(length == 1 for _, length in draw.sequences):
            continue
        whole, shape = one.drawn.shape, draw.drawn.shape
        text = (
            f"random numbers ({draw.drawn.name}) of shape {list(shape)}, drawn in {draw.where or 'the step'} (or behind it), "
        )
        if draw.own and sharers and _is_drawn_by_several(whole, shape, draw.sequences, sharers):
            text += (
                f"are more than a rank's part of {list(whole)} in the whole model: some of {sharers} ranks hold the same key "
                "and value heads, and each would draw its own for the same head. Draw them for the query or the attention's "
                "weights, or use no more ranks than key and value heads"
            )
            return draw.where, text
        if (whole == shape) is not draw.own:
            continue
        if draw.own:
            text += (
                "are as many as in the whole model, so that all ranks must draw the same, but behind a column linear and in "
                "a block of shards each rank draws its own. Draw them in front of the first column linear of the attention or "
                "MLP (an adapter's dropout in front of the adapted linear), in a module whose class is called ...DropPath or "
                "...StochasticDepth, or not at all"
            )
            return draw.where, text
        text += (
            f"are a part of {list(whole)} in the whole model, so that each rank must draw its own, but between the "
            "blocks, in a DropPath, behind a row linear and from a generator of your own all ranks draw the same; draw them inside "
            "a block, from torch's own generator, or not at all"
        )
        return draw.where, text
    return None


def _is_drawn_by_several(
    whole: tuple[int, ...], shape: tuple[int, ...], sequences: Sequence[tuple[int, int]], ranks: int
) -> bool:
    """Whether a draw covers heads that several ranks hold: along a dim that is no sequence, more than ``1 / ranks`` of it."""
    if len(whole) != len(shape):
        return False

    def is_sequence(at: int, size: int) -> bool:
        flat = len(whole) == 2 and at == 0
        return any((at == dim and size == length) or (flat and size % length == 0) for dim, length in sequences)

    return any(
        part != size and part * ranks > size and not is_sequence(at, size)
        for at, (size, part) in enumerate(zip(whole, shape, strict=True))
    )


def _is_own_code(model: nn.Module, name: str) -> bool:
    """Whether a module is the user's own code; of a linear or another module of torch's, the one around it counts."""
    for around in outwards(name):
        kind = type(model.get_submodule(around))
        if not kind.__module__.startswith(("torch.", "lightning_seqpar.")):
            return not is_installed(kind)
    return True


def _wrong_buffers(
    dense: ObservedRun, sharded: ObservedRun, record: ShardedModel, limit: float, groups: ParallelGroups
) -> list[str]:
    """Sentences on buffers that the sharded forward changes otherwise than the whole one (counts of tokens, running means)."""
    wrong = []
    for name, buffer in dense.buffers.items():
        other = sharded.buffers.get(name)
        if other is None or not buffer.numel():
            continue
        layout = record.buffers.get(name)
        wanted = buffer if layout is None or layout.shard is None else layout.shard.take(buffer, groups.rank("tp"))
        if not is_close(wanted, other, limit, least=1.0):
            wrong.append(name)
    return [
        f"the buffer {name} is not what the whole model's forward makes of it: does a rank see a part of the sequence there?"
        for name in wrong[:3]
    ]


def compare_evaluations(
    dense: ObservedEvaluation, sharded: ObservedEvaluation, record: ShardedModel, groups: ParallelGroups
) -> tuple[dict[int, str], str | None]:
    """A sentence for each value of an evaluation that differs, by its place, and one on the first module that does.

    The place is -1 if there are no values, and the last output differs. Collective over tp.
    """
    limit = COPIES[dense.narrow].tensors
    first, last_differs = _first_difference(dense.outputs, sharded.outputs, record, groups, limit)
    if [what for what, _ in dense.values] != [what for what, _ in sharded.values]:
        return {-1: f"it gives {len(sharded.values)} values, and whole {len(dense.values)}"}, first
    texts = {}
    for at, ((what, a), (_, b)) in enumerate(zip(dense.values, sharded.values, strict=True)):
        if not is_close(a, b, limit) and not _is_of_heads(a, b):
            how = f"{float(b):.9g} instead of {float(a):.9g}" if a.numel() == b.numel() == 1 else "is another"
            texts[at] = f"{what} differs: {how}" if a.numel() == 1 else f"{what} ({list(a.shape)}) {how}"
    if not dense.values and last_differs:
        texts[-1] = "modules return other numbers"
    return texts, first


def without_unstable(wrong: dict[int, str], dense: ObservedEvaluation, moved: ObservedEvaluation) -> dict[int, str]:
    """The wrong values without those that are others whole too, once weights moved by rounding: times, differences that cancel."""
    limit = COPIES[dense.narrow].tensors
    values = dict(enumerate(zip(dense.values, moved.values, strict=False)))
    return {at: text for at, text in wrong.items() if at not in values or is_close(values[at][0][1], values[at][1][1], limit)}


def _is_of_heads(a: Tensor, b: Tensor) -> bool:
    """Whether ``b`` may be a rank's heads of ``a`` (an attention's weights, a cache)."""
    apart = [size > part for size, part in zip(a.shape, b.shape, strict=False) if size != part]
    return a.ndim == b.ndim >= 4 and apart == [True]


def _first_difference(
    whole: Sequence[tuple[str, Tensor]],
    local: Sequence[tuple[str, Tensor]],
    record: ShardedModel,
    groups: ParallelGroups,
    limit: float,
) -> tuple[str | None, bool]:
    """A sentence on the first module whose output is no shard of the whole one's on some rank; whether the last is none."""
    group = groups["tp"]
    at, size, differs = len(whole), 0.0, False  # of this rank's first wrong output: its place, and its error
    for index, ((name, a), (other, b)) in enumerate(zip(whole, local, strict=False)):
        if name != other:
            break
        gaps = [largest_number(a.double() - b.double())] if a.shape == b.shape else []
        for part in (split(a, region.dim, group) for region in record.regions if a.ndim > region.dim):
            if part.shape == b.shape:
                # It may end in padding: zeros in the part that was split off, and anything in what the model made.
                gaps.append(largest_number(part.double() - b.double().masked_fill(part == 0, 0.0)))
        if not gaps:
            continue
        gap = min(gaps) / max(largest_number(a), 1e-12)
        differs = not gap <= 100 * limit
        if differs and not size:
            at, size = index, gap
    answers: list[Any] = [None] * groups.size("tp")
    dist.all_gather_object(answers, (at, size, differs), group=group)
    first, size, _ = min(answers)
    text = f"the first wrong output is that of {whole[first][0]} (off by {size:.1e} of its size)" if size else None
    return text, any(differs for *_, differs in answers)
