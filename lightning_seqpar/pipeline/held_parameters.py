"""The parameters that one stage of a pipeline holds, and their gradients, of which several stages may have parts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_seqpar.distributed.autograd import leaf_of, reach
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.layout.param_layout import ParamLayout, gather_rows, is_split, local_rows
from lightning_seqpar.pipeline.cut import Cut
from lightning_seqpar.pipeline.link import from_stage
from lightning_seqpar.topology.process_groups import ParallelGroups

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a model in which DDP looks for what it is to leave alone."""


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

    def begin_evaluation(self, replicas: dist.ProcessGroup) -> None:
        """Get the parameters that the last stage reads behind the blocks. Collective over the pipeline."""
        blocks = [block for chunk in self._cut.chunks(self.count - 1) for block in self._cut.blocks[chunk]]
        for name, parameter in self._model.named_parameters():
            if name not in self._cut.held[-1] or any(inside(name, block) for block in blocks):
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
        """Where a window begins, gradients that several stages hold must be zero: what is kept would be summed once more."""
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
        first, *behind = (sent if stage == self.number else parts[stage] for stage in sorted(stages))
        x.copy_(functools.reduce(torch.add, behind, first))

    def on_any(self, facts: Sequence[bool]) -> list[bool]:
        """Which facts hold on any stage. Collective over the pipeline."""
        flags = torch.tensor(facts, dtype=torch.int32, device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in flags.tolist()]

    def of_last(self, x: Tensor) -> Tensor:
        """A tensor of floats that every stage has, as it is on the last one. Collective over the pipeline."""
        return from_stage(self.count - 1, x if self.is_last else None, self._group, self._device)
