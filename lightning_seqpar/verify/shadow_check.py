"""The shadow check: what some blocks did in a step of the training is done again by whole ones, and compared.

The proof before training runs copies on an example. This runs on the step just taken: the real weights, batch and types, behind
the recompute, the reduction over replicas and the user's hooks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.activations.wgrad_overlap import READERS
from lightning_seqpar.distributed.autograd import (
    backward_classes,
    children,
    in_backward,
    reach,
    sequence_nr,
    tensor_hooks,
)
from lightning_seqpar.distributed.collectives import all_gather, gather_replicated_from_sequence_parallel_region
from lightning_seqpar.distributed.rng import drawn_by, get_streams, is_draw, kept_streams
from lightning_seqpar.inference.block_kinds import kind_of
from lightning_seqpar.inference.isolated_block import is_cache
from lightning_seqpar.inference.model_copy import point_to_copy
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.layout.replica_rows import is_split
from lightning_seqpar.parallel.apply import whole_tensor
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.region.block_recorder import BlockRecorder, Recorded, RecordedCall
from lightning_seqpar.region.hooks import record_call
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.verify.self_check import rules_by_name

_NOISE = 8.0
"""How many times as far from the exact numbers as a whole block a sharded one may be: it rounds at other places."""

_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5}
"""How far it may be in any case, relative to the size of what is compared; 2e-2 in narrower types."""

_OF_BLOCK = {torch.float64: 1e-11, torch.float32: 1e-6}
"""The same for gradients, relative to the norm of all of the block's; 2e-3 in narrower types."""


class ShadowError(RuntimeError):
    """A block did not do in a step what it does whole."""


class WholeBlock:
    """A block as it was before it was sharded, on the meta device: its code and settings, and no numbers.

    Args:
        model: the whole model.
        name: of the block.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        memo: dict[int, Any] = {}
        for module in model.modules():
            for attribute in ("_trainer", "_fabric"):
                if (other := module.__dict__.get(attribute)) is not None:
                    memo[id(other)] = None
            memo |= {id(value): value for value in vars(module).values() if isinstance(value, dist.ProcessGroup)}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(_on_meta(parameter), parameter.requires_grad)
        memo |= {id(buffer): _on_meta(buffer) for buffer in model.buffers()}
        self.module: nn.Module = copy.deepcopy(model.get_submodule(name), memo)
        point_to_copy(model, self.module, memo)


class _Followed:
    """What users may change of a live block while it trains, so that the whole one is changed alike.

    Args:
        live: the block, as it was sharded.
        whole: the same block, whole.
    """

    def __init__(self, live: nn.Module, whole: nn.Module) -> None:
        self._live, self._whole = live, whole
        self._known = {name: (module, _settings(module)) for name, module in live.named_modules()}

    def update(self) -> str:
        """Change the whole block as the live one was changed since.

        Returns:
            Why that can't be done; empty if it was.
        """
        now = dict(self._live.named_modules())
        for name, module in self._live.named_modules():
            before, known = self._known.get(name, (None, {}))
            holder, _, key = name.rpartition(".")
            if before is not module:
                if any(True for _ in module.parameters()) or holder not in now:
                    return f"{name} was exchanged since the model was sharded"
                self._whole.get_submodule(holder)._modules[key] = copy.deepcopy(module)
                continue
            whole = self._whole.get_submodule(name)
            whole.training = module.training
            for attribute, value in _settings(module).items():
                if attribute in vars(whole) and (attribute not in known or not _is_same(known[attribute], value)):
                    vars(whole)[attribute] = value
        trains = {name: parameter.requires_grad for name, parameter in self._live.named_parameters()}
        for name, parameter in self._whole.named_parameters():
            parameter.requires_grad_(trains.get(name, parameter.requires_grad))
        return ""


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """Which buffers a module has, and how often each was changed in place."""
    return [(id(buffer), buffer._version) for buffer in module.buffers()]


def _settings(module: nn.Module) -> dict[str, Any]:
    """Numbers, words and functions among a module's own attributes."""
    plain = (bool, int, float, str, types.FunctionType, types.BuiltinFunctionType, type(None))
    return {key: value for key, value in vars(module).items() if isinstance(value, plain)}


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="meta")


def whole_blocks(model: nn.Module, plans: Sequence[ShardingPlan]) -> dict[str, WholeBlock]:
    """A :class:`WholeBlock` for each block that the plans name; those of one kind share theirs.

    Args:
        model: the whole model.
        plans: by which it will be sharded.
    """
    rules = rules_by_name(model, plans)
    decisive: dict[type, frozenset[str]] = {}
    kinds: dict[Any, WholeBlock] = {}
    found: dict[str, WholeBlock] = {}
    for name in dict.fromkeys(m.name for plan in plans for m in plan.match(model) if m.rule.says_where_blocks_are):
        module = model.get_submodule(name)
        if not any(True for _ in module.parameters()):
            continue
        told = tuple((key[len(name) :], rule) for key, rule in rules.items() if inside(key, name))
        kind = kind_of(module, decisive), told
        if kind not in kinds:
            kinds[kind] = WholeBlock(model, name)
        found[name] = kinds[kind]
    return found


@dataclass
class Finding:
    """What was found of one block.

    Attributes:
        wrong: what differs, in words; the worst first.
        why_not: why it could not be compared; empty if it was.
        partly: what could not be compared of it.
        compared: number of tensors that were.
        largest: the largest error, relative to the size of the tensor.
    """

    wrong: list[str] = field(default_factory=list)
    why_not: str = ""
    partly: str = ""
    compared: int = 0
    largest: float = 0.0

    def add(self, judge: _Judge) -> None:
        """Take over what was judged."""
        self.wrong += judge.worst()
        self.compared += judge.compared
        self.largest = max(self.largest, judge.largest)


class ShadowCheck:
    """Compares a block of each kind with the whole one, in the first step of a run and every so many.

    Args:
        record: of the sharded model.
        blocks: whole blocks by name.

    Attributes:
        findings: of the last check, by block.
    """

    def __init__(self, record: ShardedModel, blocks: Mapping[str, WholeBlock]) -> None:
        self._record, self._groups = record, record.groups
        self.begin_run()
        self._recorders: list[tuple[SequenceRegion, BlockRecorder]] = []
        self._late: list[RemovableHandle] = []
        self._versions: dict[str, list[tuple[int, int]]] = {}  # of a block's buffers, when its step began
        self.findings: dict[str, Finding] = {}
        self._blocks: dict[str, WholeBlock] = {}
        for region in record.regions:  # one of each kind among those that this stage runs
            seen: set[int] = set()
            for name in region.blocks:
                whole = blocks.get(name)
                if whole is not None and id(whole) not in seen and self._holds(name):
                    seen.add(id(whole))
                    self._blocks[name] = whole
        live = {name: record.model.get_submodule(name) for name in self._blocks}
        self._followed = {name: _Followed(live[name], whole.module) for name, whole in self._blocks.items()}
        self._read_elsewhere: set[str] = set()
        self._leaks: set[int] = set()
        self._read_inputs: set[int] = set()  # calls whose input a loss reads too (hidden states)

    def begin_run(self, every: int = 0, changes_gradients: Callable[[], bool] = lambda: False) -> None:
        """A training begins: its steps are counted from here.

        Args:
            every: number of optimizer steps from one check to the next; 0 for the first alone.
            changes_gradients: whether code of the user's may change gradients behind a backward, so that they are not compared.
        """
        self._step, self._every, self._changes_gradients = 0, every, changes_gradients

    @property
    def _first_of_chunks(self) -> set[str]:
        """The blocks of this stage at which a chunk of it begins."""
        stage = self._record.stage
        return set() if stage is None else {first for first, _ in stage.ends[stage.number]}

    def _holds(self, block: str) -> bool:
        stage = self._record.stage
        return stage is None or all(stage.holds(name) for name in self._record.layout if inside(name, block))

    @property
    def records(self) -> bool:
        """Whether the current step is being recorded."""
        return bool(self._recorders)

    @property
    def is_first(self) -> bool:
        """Whether the last check was the first of the run."""
        return self._step == 1

    @property
    def summary(self) -> str:
        """What the last check found on this rank, in a sentence."""
        told = []
        for name, found in self.findings.items():
            if found.why_not:
                told.append(f"{name} is not compared ({found.why_not})")
            else:
                partly = f", without its gradients: {found.partly}" if found.partly else ""
                told.append(
                    f"{found.compared} tensors of {name} are the whole block's (largest error {found.largest:.0e}{partly})"
                )
        return f"shadow check of step {self._step}: {'; '.join(told) or 'no blocks to compare'}"

    def begin_step(self) -> None:
        """The first micro-batch of an optimizer step begins: its blocks are recorded if it is due."""
        self.stop()
        self._step += 1
        if self._step != 1 and not (self._every and self._step % self._every == 0):
            return
        for region in self._record.regions:
            names = [name for name in region.blocks if name in self._blocks]
            self._versions |= {name: _versions(self._record.model.get_submodule(name)) for name in names}
            late = [name for name in names if name in self._first_of_chunks]
            region.recorder = BlockRecorder(names, late, region.dim, region.sp, region.frames, region.sharded_outputs)
            self._recorders.append((region, region.recorder))
            for name in region.recorder.late:  # behind the hook by which it gets what the stage before has made
                hook = record_call(region, name)
                module = self._record.model.get_submodule(name)
                self._late.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def stop(self) -> None:
        """Forget what was recorded."""
        for region, recorder in self._recorders:
            recorder.close()
            region.recorder = None
        for handle in self._late:
            handle.remove()
        self._recorders, self._late, self._versions = [], [], {}
        self._read_elsewhere, self._leaks, self._read_inputs = set(), set(), set()

    def note_loss(self, loss: Tensor) -> None:
        """Note what the loss reads of a recorded block past its outputs: gradients come to that on ways of their own."""
        calls = [(name, call) for _, one in self._recorders for name, made in one.calls.items() for call in made]
        outputs = {made.node for _, call in calls for made in call.outputs.values() if made.node is not None}
        handed_on = backward_classes(READERS)  # a row's weight, whose product runs behind the block
        spans = [(name, call, *call.nodes) for name, call in calls]

        def follow(node: Any) -> list[Any]:
            return [] if node in outputs else children(node)

        for node in reach(loss.grad_fn, follow):
            if node in outputs or type(node) in handed_on:
                continue
            number = sequence_nr(node)
            self._read_inputs |= {id(call) for _, call in calls if node is call.x.node}
            for _, call, first, end in spans:
                if first <= number < end:
                    self._leaks.add(id(call))
            for child in children(node):
                variable = getattr(child, "variable", None)
                layout = None if variable is None else self._record.layout.of(variable)
                if layout is not None:
                    self._read_elsewhere.add(layout.name)

    def check(self, parameters: Collection[Tensor]) -> None:
        """Compare what was recorded, where the gradients are summed and no update was made. Collective over the world.

        Args:
            parameters: whose gradients are summed.

        Raises:
            ShadowError: on every rank, if a block of any did otherwise than the whole one.
        """
        if not self._recorders:
            return
        names = {layout.name for p in parameters if (layout := self._record.layout.of(p)) is not None}
        self.findings = {}
        for region, recorder in self._recorders:
            region.recorder = None
            for name, calls in recorder.calls.items():
                self.findings[name] = self._check_block(region, name, calls, names)
        self.stop()
        groups = self._groups
        everybody = tuple(sorted(groups.topology.axes))
        told: list[Any] = [None] * groups.size(everybody)
        wrong = [(name, found.wrong[0]) for name, found in self.findings.items() if found.wrong]
        dist.all_gather_object(told, wrong, group=groups[everybody])
        if found := [one for each in told for one in each]:
            name, what = found[0]
            raise ShadowError(
                f"shadow check: in step {self._step} of this run {name} ({type(self._record.model.get_submodule(name)).__name__}) "
                f"did not do what it does whole on one rank: {what}. Nothing was updated by this step. `seqpar verify` shows which "
                "parts of the plan are wrong; self_check=False trains without this check"
            )

    # ---- one block -----------------------------------------------------------------------------------------------

    @property
    def _stage_axes(self) -> tuple[str, ...]:
        """The axes over which all ranks run the same blocks."""
        return tuple(axis for axis in self._groups.topology.axes if axis != "pp")

    def _agree(self, why_not: str, to_come: Any = None) -> str:
        """Why any rank of this stage can't go on; empty if all can. Collective.

        Args:
            why_not: why this rank can't.
            to_come: what decides which collectives follow: ranks go on only if it is the same on all of them.
        """
        told: list[Any] = [None] * self._groups.size(self._stage_axes)
        dist.all_gather_object(told, (why_not, to_come), group=self._groups[self._stage_axes])
        if why_not := next((one for one, _ in told if one), ""):
            return why_not
        return "" if all(other == to_come for _, other in told) else "ranks did other things in it"

    def _check_block(self, region: SequenceRegion, name: str, calls: list[RecordedCall], summed: set[str]) -> Finding:
        live, skeleton = self._record.model.get_submodule(name), self._blocks[name].module
        why_not = next((call.strange for call in calls if call.strange), "")
        if not calls:
            why_not = "it was not called with gradients"
        elif not all(call.is_whole for call in calls):
            why_not = "a call of it did not return"
        elif self._versions.get(name) != _versions(live):
            why_not = "its forward changes its buffers"
        elif "cp" in self._groups.topology.axes and self._groups.size("cp") > 1:
            why_not = "it is given parts of a sequence"
        leaks = any(id(call) in self._leaks for call in calls)
        compared = [] if leaks or self._changes_gradients() else self._comparable(name, live, summed)
        to_come = compared, [([drawn for drawn, _ in call.drawn], [*call.outputs], call.x.is_shard) for call in calls]
        if why_not := self._agree(why_not or self._followed[name].update(), to_come):
            return Finding(why_not=why_not)
        weights = {key: self._whole(f"{name}.{key}", p) for key, p in live.named_parameters()}
        buffers = {key: self._whole_buffer(f"{name}.{key}", b) for key, b in live.named_buffers()}
        runs = [self._to_repeat(call, region) for call in calls]
        dtype = next((p.dtype for p in weights.values() if p.is_floating_point()), torch.float32)
        rounded = next((call.autocast for call in calls if call.autocast is not None), dtype)
        wide = None if rounded == torch.float64 else torch.promote_types(dtype, torch.float32)
        if rounded == torch.float32:
            wide = torch.float64
        same, exact, why_not = None, None, ""
        try:
            same = _repeat(skeleton, weights, buffers, runs, None, self._groups.rank("tp"))
            exact = same if wide is None else _repeat(skeleton, weights, buffers, runs, wide, self._groups.rank("tp"))
        except Exception as error:  # of the user's code, which is run in another way than it was written for
            why_not = f"it does not run whole: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if why_not := self._agree(why_not):
            return Finding(why_not=why_not)
        assert same is not None
        assert exact is not None
        found = Finding()
        if leaks:
            found.partly = "the loss reads what is inside of it"
        elif self._changes_gradients():
            found.partly = "on_after_backward may change them"
        judge = _Judge(rounded)
        for number, run in enumerate(runs):
            for at, made in run.outputs.items():
                exact_one = exact.outputs[number][at]
                whole = made.value(tuple(exact_one.shape), self._groups.rank("tp"))
                judge.compare("what it returns", whole, same.outputs[number][at], exact_one)
            is_read = id(run.call) in self._read_inputs
            if not leaks and not is_read and run.x.grad is not None and exact.inputs[number] is not None:
                judge.compare("the gradient of its input", run.x.grad, same.inputs[number], exact.inputs[number])
        found.add(judge)
        for one in {id(same): same, id(exact): exact}.values():
            one.grads = {key: self._mean(one.grads.get(key), weights[key]) for key in compared}
        judge = _Judge(rounded, exact.grads.values())
        for key in compared:
            parameter = live.get_parameter(key)
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            whole = self._whole(f"{name}.{key}", grad)
            judge.compare(f"the gradient of {key}", whole, same.grads[key], exact.grads[key])
        found.add(judge)
        return found

    def _comparable(self, block: str, live: nn.Module, summed: Collection[str]) -> list[str]:
        """Parameters of a block, by their names in it, of whose gradients the block alone decides."""
        found = []
        for key, parameter in live.named_parameters():
            layout = self._record.layout[f"{block}.{key}"]
            # On other parameters, and where replicas split them, hooks are refused.
            hooked = not layout.is_partial and not is_split(parameter) and tensor_hooks(parameter)
            if layout.name in summed and layout.name not in self._read_elsewhere and not hooked:
                found.append(key)
        return found

    def _whole(self, name: str, local: Tensor) -> Tensor:
        """The whole of a parameter, or of its gradient. Collective over tp, and over the replicas that split it."""
        layout = dataclasses.replace(self._record.layout[name], stages=())
        return whole_tensor(local, layout, self._groups)

    def _whole_buffer(self, name: str, local: Tensor) -> Tensor:
        layout = self._record.buffers.get(name)
        return local.detach().clone() if layout is None else whole_tensor(local, layout, self._groups)

    def _mean(self, grad: Tensor | None, weight: Tensor) -> Tensor:
        """The mean of a gradient over the replicas. Collective."""
        axes = self._groups.mean_axes
        grad = torch.zeros_like(weight) if grad is None else grad
        if self._groups.size(axes) > 1:
            grad = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
            dist.all_reduce(grad, group=self._groups[axes])
            grad = grad / self._groups.size(axes)
        return grad

    def _to_repeat(self, call: RecordedCall, region: SequenceRegion) -> _Run:
        """A call of a rank as a call of the whole block. Collective over tp."""
        group = self._groups["tp"]

        def whole(tensor: Tensor) -> Tensor:
            return gather_replicated_from_sequence_parallel_region(tensor, region.dim, group, call.length)

        def gradient(made: Recorded) -> Tensor:
            return torch.zeros_like(made.value) if made.grad is None else made.grad  # other ranks may have one

        def of(made: Recorded) -> Recorded:
            if not made.is_shard:
                return made
            return Recorded(whole(made.value), False, whole(gradient(made)))

        def parts(tensor: Tensor) -> list[Tensor]:
            return list(all_gather(tensor.contiguous().unsqueeze(0), 0, group))

        x = of(call.x)
        run = _Run(call, x, {}, [(name, parts(tensor)) for name, tensor in call.drawn])
        for at, made in call.outputs.items():
            if made.is_shard or made.value.shape == x.value.shape:
                run.outputs[at] = _Parts(of(made), None, None)
            else:  # what else it returns may be of this rank's heads
                run.outputs[at] = _Parts(made, parts(made.value), parts(gradient(made)))
        return run


# ---- repeating calls ------------------------------------------------------------------------------------------------


@dataclass
class _Parts:
    """Something that a block returned.

    Attributes:
        made: what this rank has of it, and its gradient; the whole, where it is an activation.
        values: what each tensor-parallel rank has, where it is no activation; else None.
        grads: the gradients there.
    """

    made: Recorded
    values: list[Tensor] | None
    grads: list[Tensor] | None

    def value(self, shape: tuple[int, ...], rank: int) -> Tensor:
        """The whole, which has ``shape``."""
        return self.made.value if self.values is None else _put_together(self.values, shape, rank)

    def grad(self, shape: tuple[int, ...], rank: int) -> Tensor | None:
        """The gradient of the whole: what every rank has, or, where each has a term of it, their sum."""
        if self.grads is None or tuple(self.grads[rank].shape) != shape:
            return self.made.grad if self.grads is None else _put_together(self.grads, shape, rank)
        apart = max(float(_norm(one - self.grads[0])) for one in self.grads)
        return self.grads[rank] if apart <= 0.1 * float(_norm(self.grads[0])) else torch.stack(self.grads).sum(0)


@dataclass
class _Run:
    """A call to be repeated, in whole tensors.

    Attributes:
        call: as it was recorded.
        x: the activation that it was given, and its gradient.
        outputs: what it returned, by place.
        drawn: for each random draw its operation, and what each tensor-parallel rank drew.
    """

    call: RecordedCall
    x: Recorded
    outputs: dict[int, _Parts]
    drawn: list[tuple[str, list[Tensor]]]


@dataclass
class _Repeated:
    """What a whole block did in some calls.

    Attributes:
        outputs: for each call, what it returned, by place.
        inputs: for each call, the gradient of its activation.
        grads: the gradient of each parameter, of all calls together.
    """

    outputs: list[dict[int, Tensor]] = field(default_factory=list)
    inputs: list[Tensor | None] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)


def _repeat(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    runs: Sequence[_Run],
    wide: torch.dtype | None,
    rank: int,
) -> _Repeated:
    """Run calls of a whole block forward and backward.

    Args:
        module: the block, on the meta device.
        weights: its parameters.
        buffers: its buffers.
        runs: the calls.
        wide: the type to compute in; None for that of the training.
        rank: this tensor-parallel rank, for draws that are not divided.
    """
    done = _Repeated()
    trains = {key: parameter.requires_grad for key, parameter in module.named_parameters()}

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(wide) if wide is not None and tensor.is_floating_point() else tensor

    leaves = {key: nn.Parameter(cast(weight).detach(), trains[key]) for key, weight in weights.items()}
    held = {key: cast(buffer).clone() for key, buffer in buffers.items()}
    device = next(iter(weights.values())).device
    for run in runs:
        x = cast(run.x.value).detach().clone().requires_grad_(run.call.x.node is not None)
        args, kwargs = tree_map_only(Tensor, cast, (run.call.args, run.call.kwargs))
        args, kwargs = tree_map(lambda leaf: None if is_cache(leaf) else leaf, (args, kwargs), is_leaf=is_cache)
        if isinstance(run.call.where, int):
            args = (*args[: run.call.where], x, *args[run.call.where + 1 :])
        else:
            kwargs = {**kwargs, run.call.where: x}
        wanted = [x] * x.requires_grad + [leaf for leaf in leaves.values() if leaf.requires_grad]
        grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
        casts = run.call.autocast is not None and wide is None
        numbers = _numbers(module, {**leaves, **held})
        assert run.call.host is not None
        with torch.enable_grad(), kept_streams(device), run.call.host.again(), numbers, _Again(run.drawn, rank, device):
            with torch.autocast(device.type, run.call.autocast if casts else None, enabled=casts):
                out = module(*args, **kwargs)
            made = tree_flatten(out)[0]
            tops = {
                at: one.grad(tuple(made[at].shape), rank) for at, one in run.outputs.items() if made[at].requires_grad
            }
            ends = {at: grad.to(made[at]) for at, grad in tops.items() if grad is not None}
            if len(ends) > 1:
                ends = _from_outside(made, ends)
            if ends:
                grads = torch.autograd.grad([made[at] for at in ends], wanted, [*ends.values()], allow_unused=True)
        done.outputs.append({at: made[at].detach() for at in run.outputs})
        by_leaf = iter(grads)
        done.inputs.append(next(by_leaf) if x.requires_grad else None)
        for key, leaf in leaves.items():
            if leaf.requires_grad and (grad := next(by_leaf)) is not None:
                done.grads[key] = done.grads[key] + grad if key in done.grads else grad
    return done


@contextlib.contextmanager
def _numbers(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which a block of the meta device has numbers, in its backward too, where parts of it may run again.

    Args:
        module: the block.
        tensors: its parameters and buffers, by name.
    """
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    places = []
    for name, tensor in named:
        holder, _, key = name.rpartition(".")
        owner = module.get_submodule(holder)
        held = owner._parameters if key in owner._parameters else owner._buffers
        places.append((held, key, tensor, first.setdefault(id(tensor), name)))
    try:
        for held, key, _, name in places:
            held[key] = tensors[name]  # type: ignore[assignment]
        yield
    finally:
        for held, key, tensor, _ in places:
            held[key] = tensor  # type: ignore[assignment]


def _from_outside(made: Sequence[Any], ends: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Gradients that come to what a block returned from outside alone.

    Something that it returns beside its activation may be read inside of it too (a bias of the attention's scores), and what
    was recorded is the gradient from both.

    Args:
        made: what it returned.
        ends: the recorded gradients, by place; the first is that of the activation.
    """
    first, *others = ends
    inner = torch.autograd.grad(
        made[first], [made[at] for at in others], ends[first], retain_graph=True, allow_unused=True
    )
    found = {first: ends[first]}
    for at, inside_of_it in zip(others, inner, strict=True):
        found[at] = ends[at] if inside_of_it is None else ends[at] - inside_of_it
    return found


class _Again(TorchDispatchMode):
    """A mode in which random draws give again what was drawn in a recorded call.

    An activation checkpoint within the block draws once more in the backward, from the state that the generator had in the forward:
    by that state it is given the same numbers.

    Args:
        drawn: for each draw its operation, and what each tensor-parallel rank drew.
        rank: this rank.
        device: on which the block runs.
    """

    def __init__(self, drawn: Sequence[tuple[str, list[Tensor]]], rank: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn, self._rank, self._device = iter(drawn), rank, device
        self._by_state: dict[bytes, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not is_draw(func):
            return func(*args, **(kwargs or {}))
        state = b"".join(one.numpy().tobytes() for one in get_streams(self._device)[2:] if one is not None)
        out = func(*args, **(kwargs or {}))
        drawn = drawn_by(func, out, args, kwargs)
        assert drawn is not None
        if in_backward():
            if state not in self._by_state:
                raise ValueError(f"it draws {drawn.name} in the backward, where the forward drew nothing of the kind")
            filled = self._by_state[state]
        else:
            name, parts = next(self._drawn, ("nothing", []))
            if name != drawn.name:
                raise ValueError(f"it draws {drawn.name} where the sharded block drew {name}")
            filled = self._by_state[state] = _put_together(parts, drawn.shape, self._rank)
        if drawn.name == "native_dropout":
            keep = 1.0 - float(args[1])
            return args[0] * filled * (1.0 / keep if keep else 0.0), filled
        return out.copy_(filled)


def _put_together(parts: Sequence[Tensor], shape: tuple[int, ...], rank: int) -> Tensor:
    """What all ranks drew, in the shape of the whole block's draw.

    Args:
        parts: of each rank.
        shape: of the whole.
        rank: whose part is the whole, where the draw is not divided.

    Raises:
        ValueError: if they do not fit.
    """
    own = tuple(parts[rank].shape)
    if own == shape:
        return parts[rank]
    dims = [at for at, (part, size) in enumerate(zip(own, shape, strict=False)) if part != size]
    if len(own) == len(shape) and len(dims) == 1:
        whole = torch.cat(list(parts), dims[0])
        if whole.shape[dims[0]] >= shape[dims[0]]:
            return whole.narrow(dims[0], 0, shape[dims[0]])
    raise ValueError(f"ranks drew {list(own)} each, which do not make {list(shape)}")


# ---- judging --------------------------------------------------------------------------------------------------------


class _Judge:
    """Compares tensors of a sharded block with those of a whole one, and keeps what is wrong.

    How far two right computations lie apart is measured: a whole block is run in the training's type, and in a wider one.

    Args:
        dtype: the type in which the training computes.
        together: gradients whose norm errors are also relative to.
    """

    def __init__(self, dtype: torch.dtype, together: Collection[Tensor] = ()) -> None:
        self._limit, self._overflows = _LIMITS.get(dtype, 2e-2), dtype == torch.float16
        self._norm = float(torch.stack([_norm(one) for one in together]).norm()) if together else 0.0
        self._floor = _OF_BLOCK.get(dtype, 2e-3) * self._norm
        self._wrong: list[tuple[float, str]] = []
        self.compared, self.largest = 0, 0.0

    def compare(self, what: str, got: Tensor, same: Tensor | None, exact: Tensor | None) -> None:
        """Compare one tensor.

        Args:
            what: what it is, in words.
            got: of the sharded block, whole.
            same: of the whole block, in the same type.
            exact: of the whole block, in a wider type.
        """
        assert same is not None
        assert exact is not None
        if got.shape != exact.shape:
            self._wrong.append((float("inf"), f"{what} has the shape {list(got.shape)}, not {list(exact.shape)}"))
            return
        wide = torch.promote_types(exact.dtype, torch.float32)
        size, gap = float(_norm(exact)), float(_norm(got.to(wide) - exact.to(wide)))
        noise = float(_norm(same.to(wide) - exact.to(wide)))
        if not math.isfinite(gap) and (not math.isfinite(noise) or self._overflows):
            return  # a loss that is scaled too far, as a GradScaler finds out; or a model that makes no numbers whole either
        self.compared += 1
        if gap > self._floor:
            self.largest = max(self.largest, gap / size if size else float("inf"))
        if not gap <= max(_NOISE * noise + self._limit * size, self._floor):
            own = float(_norm(got))
            ratio = f"{own / size:.4g} times as large as it should be, " if size else ""
            share = gap / size if size else float("inf")
            self._wrong.append((share, f"{what} is {ratio}off by {share:.1e} of its size"))

    def worst(self) -> list[str]:
        """Sentences on what is wrong, the largest errors first."""
        return [text for _, text in sorted(self._wrong, key=lambda one: -one[0])]


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)))
    return norm
