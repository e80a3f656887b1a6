"""Plan + model + groups → the model, swapped in place, and its layouts; and the way back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.activations.norm_recompute import is_norm, make_recomputing
from lightning_seqpar.distributed.collectives import all_gather
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.layout.param_layout import ModelLayout, ParamLayout, Reason
from lightning_seqpar.nn.linear import set_data
from lightning_seqpar.parallel.module_changes import ModuleSnapshot, changes_since
from lightning_seqpar.parallel.resolve import ResolvedPlan
from lightning_seqpar.parallel.sharded_model import (
    NEVER_SHARDS,
    PART_KEY,
    RECORD_KEY,
    ShardedModel,
    guard_pickling,
    record_of,
    refuse_copies,
)
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.region.hooks import draw_alike, note_shards, require_shard, return_whole
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.styles.blocks import hook_stack
from lightning_seqpar.styles.style import Application, Stack
from lightning_seqpar.topology.process_groups import ParallelGroups


class _Swap:
    """One parallelisation: what was read and checked is carried out, on the process groups."""

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[ShardingPlan],
        groups: ParallelGroups,
        sp: bool,
        regather: bool | Literal["auto"],
        loss_chunk: int | None,
    ) -> None:
        self.plan = ResolvedPlan(model, plans, groups.size("tp"), sp, loss_chunk)
        self._model, self._groups = model, groups
        regions = {stack.blocks[0]: self._region(stack, regather) for stack in self.plan.stacks}
        self._application = Application(self.plan, groups["tp"], groups.rank("tp"), regions)

    def _region(self, stack: Stack, regather: bool | Literal["auto"]) -> SequenceRegion:
        region = SequenceRegion(self._groups["tp"], stack.dim, sp=stack.sp, name=stack.shown, regather=regather)
        region.blocks = tuple(stack.blocks)
        return region

    def apply(self) -> ShardedModel:
        """Change the model; nothing was changed before this."""
        plan, application = self.plan, self._application
        facts = {name: plan.layout_of(name) for name, _ in self._model.named_parameters()}
        layouts = {name: layout for name, (layout, _) in facts.items()}
        recomputing = self._recomputing_modules()
        before = [ModuleSnapshot(module) for module in dict.fromkeys(plan.modules.values())]
        # Modules before parameters and buffers: a count that a module reads off its tensors is the whole model's.
        for match in sorted(plan.decided, key=lambda match: match.of_tensor):
            match.rule.apply(match.name, application)
        for name, region in recomputing.items():
            make_recomputing(plan.modules[name], region.policy.remakes_between_blocks)
        record = ShardedModel(
            self._model,
            ModelLayout(self._model, layouts),
            self._groups,
            list(application.regions.values()),
            plan.sp,
            doubtful=frozenset(name for name, (_, doubt) in facts.items() if doubt),
            matches=plan.matches,
            buffers=application.buffers,
            on_shards=frozenset(
                name for name, item in layouts.items() if item.is_partial and plan.sp_at(name.rpartition(".")[0])
            ),
        )
        record.hooks = list(self._hooks(record))
        for name in dict.fromkeys(name.rpartition(".")[0] for name in self._sharded_names(record.layout)):
            plan.modules[name].__dict__[PART_KEY] = name
        for module in self._holders(record.layout):
            guard_pickling(module)
        record.changes, record.restore = changes_since(before), application.restore
        self._model.__dict__[RECORD_KEY] = record
        return record

    def _recomputing_modules(self) -> dict[str, SequenceRegion]:
        """Norms and dropouts of the regions: what they keep for the backward can be less."""
        found: dict[str, SequenceRegion] = {}
        for name, module in self.plan.modules.items():
            if self.plan.canonical[name] != name or not (is_norm(module) or type(module) is nn.Dropout):
                continue
            if (stack := self.plan.stack_reaching(name)) is not None:
                found[name] = self._application.region_at(stack)
        return found

    # ---- hooks -------------------------------------------------------------------------------------------------

    def _hooks(self, record: ShardedModel) -> Iterator[RemovableHandle]:
        """All forward hooks, in the order in which those of one module run."""
        for stack in self.plan.stacks:
            yield from hook_stack(stack, self._application)
            owner = self.plan.modules[stack.owner]
            yield owner.register_forward_pre_hook(_refuse_other_strategies(self._model), prepend=True)
        for name in dict.fromkeys(match.name for match in self.plan.decided):
            rules = [match.rule for match in self.plan.at(name)]
            for rule in rules:
                yield from rule.before(name, self._application)
            for rule in reversed(rules):
                yield from rule.after(name, self._application)
        yield from self._hook_dropouts()
        yield from self._hook_shard_readers(record.layout)
        yield from self._hook_modules_around()
        for module in self._holders(record.layout):
            yield module.register_state_dict_pre_hook(_guard(record))

    def _hook_dropouts(self) -> Iterator[RemovableHandle]:
        """What drops whole activations, and stochastic depth, draws alike on all ranks."""
        for name, module in self.plan.modules.items():
            stochastic = type(module).__name__.lower().endswith(("droppath", "stochasticdepth"))
            if (stochastic or isinstance(module, _DropoutNd)) and any(stack.covers(name) for stack in self.plan.stacks):
                before, behind = draw_alike(self._application.region_of(name), always=stochastic)
                yield module.register_forward_pre_hook(before)
                yield module.register_forward_hook(behind, always_call=True)

    def _hook_shard_readers(self, layouts: Mapping[str, ParamLayout]) -> Iterator[RemovableHandle]:
        """Modules whose parameters see shards must not be called where activations are whole."""
        if not self.plan.sp:
            return
        readers = {
            name.rpartition(".")[0]
            for name, layout in layouts.items()
            if layout.is_partial and layout.reason is Reason.SEES_SHARDS
        }
        for name in sorted(readers):
            stack = self.plan.stack_reaching(name)
            if stack is not None and name not in stack.blocks:
                module, region = self.plan.modules[name], self._application.region_at(stack)
                yield module.register_forward_pre_hook(require_shard(region, name))
                yield module.register_forward_hook(note_shards(region, name))

    def _hook_modules_around(self) -> Iterator[RemovableHandle]:
        """Modules around the blocks: what they return of the inside must be whole."""
        modules = self.plan.modules
        around: dict[int, list[SequenceRegion]] = defaultdict(list)
        for stack in self.plan.stacks:
            path = stack.owner.split(".") if stack.owner else []
            for at in range(len(path) + 1):
                around[id(modules[".".join(path[:at])])].append(self._application.region_at(stack))
        for module in {id(m): m for m in modules.values() if id(m) in around}.values():
            yield module.register_forward_hook(return_whole(around[id(module)]))

    def _holders(self, layouts: ModelLayout) -> list[nn.Module]:
        """Modules that hold a sharded parameter, at any depth."""
        sharded = self._sharded_names(layouts)
        found = [module for name, module in self.plan.modules.items() if any(inside(p, name) for p in sharded)]
        return list(dict.fromkeys(found))

    def _sharded_names(self, layouts: ModelLayout) -> list[str]:
        """Every name of every sharded parameter; a tied one has several."""
        named = self._model.named_parameters(remove_duplicate=False)
        return [name for name, parameter in named if (one := layouts.of(parameter)) is not None and one.is_sharded]


def _refuse_other_strategies(model: nn.Module) -> Callable[..., None]:
    """Before the blocks run: the trainer's strategy must be the one that sharded them."""

    def hook(module: nn.Module, args: Any) -> None:
        trainer = getattr(model, "_trainer", None)
        record = record_of(model)
        if (
            trainer is not None
            and record is not None
            and not record.is_copy
            and trainer.training
            and trainer.strategy is not record.strategy()
        ):
            raise RuntimeError(
                f"the model is still sharded by an earlier strategy, and {type(trainer.strategy).__name__} would train "
                "the shards as if they were the model; call lightning_seqpar.unshard(model) on all ranks first"
            )

    return hook


def _guard(record: ShardedModel) -> Callable[..., None]:
    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not record.reading:
            raise RuntimeError(f"state_dict() of a parallelised model would return {NEVER_SHARDS}")

    return hook


def refuse_compiled(model: nn.Module, planned: Iterable[str]) -> None:
    """What torch.compile made of ``planned`` modules, or of modules in or around them, knows nothing of shards.

    Raises:
        ValueError: naming the module.
    """
    names = list(planned)
    for name, module in model.named_modules():
        is_compiled = module._compiled_call_impl is not None or "_orig_mod" in module._modules
        if is_compiled and any(not name or inside(one, name) or inside(name, one) for one in names):
            raise ValueError(
                f"{name or 'the model'} was compiled (torch.compile, or the module's own compile()), and a compiled graph knows "
                "nothing of shards. With tp > 1 leave torch.compile away; tp=1 runs it"
            )


def parallelize(
    model: nn.Module,
    plans: Sequence[ShardingPlan],
    groups: ParallelGroups,
    *,
    sp: bool = True,
    regather: bool | Literal["auto"] = "auto",
    loss_chunk: int | None = None,
) -> ShardedModel:
    """Shard ``model`` in place by ``plans`` over the axis ``tp``.

    Every rank must hold the same whole model. Modules and parameters stay the same objects; shapes shrink.

    Raises:
        ValueError: for a plan that can't be carried out right; the model is untouched then.
    """
    if record_of(model) is not None:
        raise ValueError("the model is parallelised already; call unshard(model) first")
    swap = _Swap(model, plans, groups, sp, regather, loss_chunk)
    refuse_compiled(model, [match.name for match in swap.plan.matches])
    return swap.apply()


def whole_tensor(local: Tensor, layout: ParamLayout, groups: ParallelGroups) -> Tensor:
    """The whole of a tensor laid out as the parameter is; collective over tp."""
    if layout.shard is None:
        return local.detach().clone()
    group, sent = groups["tp"], local.detach().unsqueeze(0)
    if sent.device.type == "cpu" and dist.get_backend(group) == "nccl":
        sent = sent.to(torch.device("cuda", torch.cuda.current_device()))  # after fit the model lies on the CPU
    parts = all_gather(sent, 0, group).to(local.device)
    return layout.shard.assemble(list(parts))


def unshard(model: nn.Module) -> nn.Module:
    """Turn a parallelised model back into the plain, whole one, in place; collective over its ranks.

    Every rank then holds the whole model, on its device. A model that is not parallelised is returned as it is.
    """
    record = record_of(model)
    if record is None:
        return model
    refuse_copies(record)
    with torch.no_grad():
        for name, layout in record.layout.items():
            if layout.is_sharded:
                parameter = record.layout.parameter(name)
                set_data(parameter, whole_tensor(parameter.data, layout, record.groups))
        for name, layout in record.buffers.items():
            holder, _, leaf = name.rpartition(".")
            module = model.get_submodule(holder)
            setattr(module, leaf, whole_tensor(getattr(module, leaf), layout, record.groups))
    for hook in record.hooks:
        hook.remove()
    for change in record.changes:
        change.undo()
    for restore in reversed(record.restore):  # what was changed last is taken back first
        restore()
    del model.__dict__[RECORD_KEY]
    return model
