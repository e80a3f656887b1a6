"""The shadow check: what some blocks did in a step of the training is done again by whole ones, and compared.

The proof before training runs copies on an example. This runs on the step just taken: the real weights, batch and types, behind
the recompute, the reduction over replicas and the user's hooks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.activations.wgrad_overlap import READERS
from lightning_seqpar.distributed.autograd import (
    backward_classes,
    children,
    reach,
    sequence_nr,
    tensor_hooks,
)
from lightning_seqpar.distributed.collectives import all_gather, gather_replicated_from_sequence_parallel_region
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.layout.replica_rows import is_split
from lightning_seqpar.parallel.apply import whole_tensor
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.region.block_recorder import BlockRecorder, Recorded, RecordedCall
from lightning_seqpar.region.block_state import is_same_setting, settings_of
from lightning_seqpar.region.hooks import record_call
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.verify.repeated_block import CallToRepeat, ReturnedParts, repeat, size_of
from lightning_seqpar.verify.whole_block import FollowedBlock, WholeBlock

_NOISE = 8.0
"""How many times as far from the exact numbers as a whole block a sharded one may be: it rounds at other places."""

_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5}
"""How far it may be in any case, relative to the size of what is compared; 2e-2 in narrower types."""

_OF_BLOCK = {torch.float64: 1e-11, torch.float32: 1e-6}
"""The same for gradients, relative to the norm of all of the block's; 2e-3 in narrower types."""


class ShadowError(RuntimeError):
    """A block did not do in a step what it does whole."""


@dataclass
class Finding:
    """What was found of one block.

    Attributes:
        wrong: what differs, in words; the worst first.
        why_not: why it could not be compared; empty if it was.
        excused: what the whole block has not, which may be why it differs; empty if it does not differ.
        partly: what could not be compared of it.
        compared: number of tensors that were.
        largest: the largest error, relative to the size of the tensor.
    """

    wrong: list[str] = field(default_factory=list)
    why_not: str = ""
    excused: str = ""
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
        self._followed = {name: FollowedBlock(live[name], whole.module) for name, whole in self._blocks.items()}
        self._read_elsewhere: set[str] = set()
        self._kept: set[str] | None = None  # parameters with a gradient before the step's first backward
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
            if found.excused:
                told.append(f"{name} differs from the whole block ({found.wrong[0]}), but {found.excused}")
            elif found.why_not:
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
            blocks = {name: self._record.model.get_submodule(name) for name in region.blocks if name in self._blocks}
            self._versions |= {name: _versions(module) for name, module in blocks.items()}
            late = [name for name in blocks if name in self._first_of_chunks]
            region.recorder = BlockRecorder(blocks, late, region.dim, region.sp, region.frames, region.sharded_outputs)
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
        self._read_elsewhere, self._leaks, self._read_inputs, self._kept = set(), set(), set(), None

    def note_loss(self, loss: Tensor) -> None:
        """Note what the loss reads of a recorded block past its outputs: gradients come to that on ways of their own.

        Of the first loss of a step, note also which gradients an earlier step has left.
        """
        if self._kept is None:
            self._kept = {
                f"{name}.{key}"
                for name in self._blocks
                for key, parameter in self._record.model.get_submodule(name).named_parameters()
                if parameter.grad is not None and self._record.stage is None and bool((parameter.grad != 0).any())
            }
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
        differing = [(name, found.wrong[0], found.excused) for name, found in self.findings.items() if found.wrong]
        dist.all_gather_object(told, differing, group=groups[everybody])
        found = [one for each in told for one in each]
        for name, what, excuse in [one for one in found if one[2]][:1]:
            rank_zero_warn(
                f"shadow check: in step {self._step} of this run {name} did not do what it does whole on one rank: {what}. But "
                f"{excuse}, and the whole block is as it was then, so that this may be no error. `seqpar verify` compares all of a "
                "run with one process"
            )
        if found := [one for one in found if not one[2]]:
            name, what, _ = found[0]
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
        elif changed := _changed_settings(live, calls):
            why_not = f"{changed} was changed behind a call of it"
        elif "cp" in self._groups.topology.axes and self._groups.size("cp") > 1:
            why_not = "it is given parts of a sequence"
        leaks = any(id(call) in self._leaks for call in calls)
        compared = [] if leaks or self._changes_gradients() else self._comparable(name, live, summed)
        # What thaws or freezes between the micro-batches of a step has the gradients of some of them.
        compared = [key for key in compared if len({key in call.trained for call in calls}) == 1]
        to_come = compared, [([drawn for drawn, _ in call.drawn], [*call.outputs], call.x.is_shard) for call in calls]
        if why_not := self._agree(why_not or self._followed[name].update(), to_come):
            return Finding(why_not=why_not)
        weights = {key: self._whole(f"{name}.{key}", p) for key, p in live.named_parameters()}
        buffers = {key: self._whole_buffer(f"{name}.{key}", b) for key, b in live.named_buffers()}
        runs = [self._torepeat(call, region) for call in calls]
        dtype = next((p.dtype for p in weights.values() if p.is_floating_point()), torch.float32)
        rounded = next((call.autocast for call in calls if call.autocast is not None), dtype)
        wide = None if rounded == torch.float64 else torch.promote_types(dtype, torch.float32)
        if rounded == torch.float32:
            wide = torch.float64
        same, exact, why_not = None, None, ""
        try:
            same = repeat(skeleton, weights, buffers, runs, None, self._groups.rank("tp"))
            exact = same if wide is None else repeat(skeleton, weights, buffers, runs, wide, self._groups.rank("tp"))
        except Exception as error:  # of the user's code, which is run in another way than it was written for
            why_not = f"it does not run whole: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if why_not := self._agree(why_not):
            return Finding(why_not=why_not)
        assert same is not None
        assert exact is not None
        if rounded == torch.float64 and same.narrow:
            rounded = torch.float32  # a norm that rounds to it: two right computations lie that far apart
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
        if found.wrong:
            found.excused = self._followed[name].differs(calls)
        return found

    def _comparable(self, block: str, live: nn.Module, summed: Collection[str]) -> list[str]:
        """Parameters of a block, by their names in it, of whose gradients the block alone decides."""
        found = []
        for key, parameter in live.named_parameters():
            layout = self._record.layout[f"{block}.{key}"]
            # On other parameters, and where replicas split them, hooks are refused.
            hooked = not layout.is_partial and not is_split(parameter) and tensor_hooks(parameter)
            kept = self._kept is not None and f"{block}.{key}" in self._kept
            if layout.name in summed and layout.name not in self._read_elsewhere and not hooked and not kept:
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

    def _torepeat(self, call: RecordedCall, region: SequenceRegion) -> CallToRepeat:
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
        run = CallToRepeat(call, x, {}, [(name, parts(tensor)) for name, tensor in call.drawn])
        for at, made in call.outputs.items():
            if made.is_shard or made.value.shape == x.value.shape:
                run.outputs[at] = ReturnedParts(of(made), None, None)
            else:  # what else it returns may be of this rank's heads
                run.outputs[at] = ReturnedParts(made, parts(made.value), parts(gradient(made)))
        return run


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """Which buffers a module has, and how often each was changed in place."""
    return [(id(buffer), buffer._version) for buffer in module.buffers()]


def _changed_settings(live: nn.Module, calls: list[RecordedCall]) -> str:
    """A setting of a block that is another one than a call of it ended with; empty if there is none.

    The whole block runs with those of now: a flag that is set for one of two forwards would be that of the other.
    """
    for name, module in live.named_modules():
        now = settings_of(module)
        for call in calls:
            for key, value in call.settings.get(name, {}).items():
                if key in now and not is_same_setting(value, now[key]):
                    return f"{name}.{key}".lstrip(".")
    return ""


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
        self._norm = float(torch.stack([size_of(one) for one in together]).norm()) if together else 0.0
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
        size, gap = float(size_of(exact)), float(size_of(got.to(wide) - exact.to(wide)))
        noise = float(size_of(same.to(wide) - exact.to(wide)))
        if not math.isfinite(gap) and (not math.isfinite(noise) or self._overflows):
            return  # a loss that is scaled too far, as a GradScaler finds out; or a model that makes no numbers whole either
        self.compared += 1
        if gap > self._floor:
            self.largest = max(self.largest, gap / size if size else float("inf"))
        if not gap <= max(_NOISE * noise + self._limit * size, self._floor):
            own = float(size_of(got))
            ratio = f"{own / size:.4g} times as large as it should be, " if size else ""
            share = gap / size if size else float("inf")
            self._wrong.append((share, f"{what} is {ratio}off by {share:.1e} of its size"))

    def worst(self) -> list[str]:
        """Sentences on what is wrong, the largest errors first."""
        return [text for _, text in sorted(self._wrong, key=lambda one: -one[0])]
