"""Plan + model + groups → the model, swapped in place, and its layouts; and the way back."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.context.attention import ContextAxis, Method
from lightning_seqpar.distributed.async_ops import all_gather
from lightning_seqpar.layout.module_names import inside, outwards
from lightning_seqpar.layout.param_layout import ModelLayout, ParamLayout, Reason, gather_rows, is_split
from lightning_seqpar.nn.linear import set_data
from lightning_seqpar.parallel.beside_tp import (
    MLPTiles,
    Recompute,
    deal_out_flex,
    hook_embeddings,
    make_recomputed,
    recomputed,
    remake_activations,
)
from lightning_seqpar.parallel.compiled_blocks import BlockGraphs, check_graph, is_compiled
from lightning_seqpar.parallel.resolve import ResolvedPlan
from lightning_seqpar.parallel.sharded_model import (
    PART_KEY,
    RECORD_KEY,
    ModuleSnapshot,
    ShardedModel,
    changes_since,
    guard_pickling,
    guard_state_dict,
    record_of,
    refuse_copies,
)
from lightning_seqpar.pipeline.cut import from_holder
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.region.float8 import Float8
from lightning_seqpar.region.hooks import begin_on_shards, draw_alike, end_on_shards, return_whole
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.styles.blocks import close_stack, hook_stack
from lightning_seqpar.styles.linear import linears_in_float8
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
        regather: bool,
        loss_chunk: int | None,
        recompute: Recompute,
        compiler: BlockGraphs | None,
        tiles: MLPTiles | None,
        cp_method: Method,
        float8: Float8 | None,
    ) -> None:
        self.plan = ResolvedPlan(model, plans, groups.size("tp"), sp, loss_chunk)
        self._recompute, self._recomputed = recompute, recomputed(self.plan, recompute)
        self._model, self._groups, self._compiler = model, groups, compiler
        self._float8 = float8
        if float8 is not None:
            linears_in_float8(self.plan, float8)
        self._context = ContextAxis(groups["cp"], cp_method) if has_context(groups) else None
        self._tiles, self._tiled = tiles, tiles.find(self.plan) if tiles is not None else []
        if compiler is not None:
            refuse_untraceable(self.plan)
        regions = {stack.blocks[0]: self._region(stack, regather) for stack in self.plan.stacks}
        self._application = Application(self.plan, groups["tp"], groups.rank("tp"), regions, compiles=compiler is not None)

    def _region(self, stack: Stack, regather: bool) -> SequenceRegion:
        region = SequenceRegion(
            *(self._groups["tp"], stack.dim),
            sp=stack.sp,
            name=stack.shown,
            # In a compiled block that runs again in the backward all that was gathered is there again.
            regather=regather and (self._compiler is None or self._recompute != "full"),
            context=self._context,
            traced=self._compiler is not None,
            float8=self._float8,
        )
        region.blocks, region.argument = tuple(stack.blocks), stack.arg
        return region

    def apply(self) -> ShardedModel:
        """Change the model; nothing was changed before this."""
        plan, application = self.plan, self._application
        layouts = {name: plan.layout_of(name) for name, _ in self._model.named_parameters()}
        before = [ModuleSnapshot(module) for module in dict.fromkeys(plan.modules.values())]
        # Modules before parameters and buffers: a count that a module reads off its tensors is the whole model's.
        for match in sorted(plan.decided, key=lambda match: match.of_tensor):
            match.rule.apply(match.name, application)
        if self._context is not None:
            deal_out_flex(plan)
        make_recomputed(plan, self._recomputed, self._recompute, application.region_of)
        if self._recompute in ("activations", "selective"):
            remake_activations(application, [*self._recomputed, *self._tiled])
        if self._tiles is not None:
            self._tiles.apply(plan, self._tiled, application.region_of)
        record = ShardedModel(
            self._model,
            ModelLayout(self._model, layouts),
            self._groups,
            list(application.regions.values()),
            plan.sp,
            matches=plan.matches,
            buffers=application.buffers,
            recomputed=tuple(self._recomputed),
            tiled=tuple(self._tiled),
            on_shards=frozenset(
                name for name, item in layouts.items() if item.is_partial and plan.sp_at(name.rpartition(".")[0])
            ),
        )
        record.hooks = list(self._hooks(record))
        record.column_groups = tuple(application.columns.values())
        record.graphs = self._compiler
        if self._compiler is not None:
            self._compile_blocks(self._compiler, record.layout)
        for name in dict.fromkeys(name.rpartition(".")[0] for name in self._sharded_names(record.layout)):
            plan.modules[name].__dict__[PART_KEY] = name
        for module in self._holders(record.layout):
            guard_pickling(module)
        record.changes = changes_since(before)
        self._model.__dict__[RECORD_KEY] = record
        return record

    def _compile_blocks(self, compiler: BlockGraphs, layouts: ModelLayout) -> None:
        count = sum(len(stack.blocks) for stack in self.plan.stacks)
        for stack in self.plan.stacks:
            check = functools.partial(check_graph, layout=layouts, region=self._application.region_at(stack))
            for name in stack.blocks:
                compiler.compile(self.plan.modules[name], name, count, check)

    # ---- hooks -------------------------------------------------------------------------------------------------

    def _hooks(self, record: ShardedModel) -> Iterator[RemovableHandle]:
        """All forward hooks, in the order in which those of one module run; the user's own come behind, and see no shards."""
        blocks = [self.plan.modules[name] for stack in self.plan.stacks for name in stack.blocks]
        own = [(block._forward_hooks, list(block._forward_hooks)) for block in blocks]
        yield from self._own_hooks(record)
        for hooks, keys in own:
            for key in keys:
                hooks.move_to_end(key)

    def _own_hooks(self, record: ShardedModel) -> Iterator[RemovableHandle]:
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
        if self._context is not None:
            yield from hook_embeddings(self.plan, self._context)
        yield from self._hook_dropouts()
        yield from self._hook_shard_readers(record.layout)
        for stack in self.plan.stacks:
            yield from close_stack(stack, self._application)
        yield from self._hook_modules_around()
        for module in self._holders(record.layout):
            yield module.register_state_dict_pre_hook(guard_state_dict(record))

    def _hook_dropouts(self) -> Iterator[RemovableHandle]:
        """What drops whole activations, and stochastic depth, draws alike on all ranks."""
        for name, module in self.plan.modules.items():
            if self._application.is_compiled(name):
                continue  # the graph's draws are checked when it is made
            stochastic = type(module).__name__.lower().endswith(("droppath", "stochasticdepth"))
            if (stochastic or isinstance(module, _DropoutNd)) and any(stack.covers(name) for stack in self.plan.stacks):
                before, behind = draw_alike(self._application.region_of(name), always=stochastic)
                yield module.register_forward_pre_hook(before)
                yield module.register_forward_hook(behind, always_call=True)

    def _hook_shard_readers(self, layouts: Mapping[str, ParamLayout]) -> Iterator[RemovableHandle]:
        """Modules whose parameters see shards, called between the blocks, or, which is refused, where activations are whole."""
        if not self.plan.sp:
            return
        ends = {name for stack in self.plan.stacks for name in (*stack.blocks, *stack.exits)}
        readers = {
            name.rpartition(".")[0]
            for name, layout in layouts.items()
            if layout.is_partial and layout.reason is Reason.SEES_SHARDS
        }
        for name in sorted(readers):
            stack = self.plan.stack_reaching(name)
            if stack is not None and name not in ends and not self._application.is_compiled(name):
                module, region = self.plan.modules[name], self._application.region_at(stack)
                yield module.register_forward_pre_hook(
                    begin_on_shards(region, name, is_exit=False), with_kwargs=True, prepend=True
                )
                yield module.register_forward_hook(end_on_shards(region, name, is_exit=False), always_call=True)

    def _hook_modules_around(self) -> Iterator[RemovableHandle]:
        """Modules around the blocks: what they return of the inside must be whole."""
        around: dict[nn.Module, list[SequenceRegion]] = defaultdict(list)
        for stack in self.plan.stacks:
            for name in (*outwards(stack.owner), ""):
                around[self.plan.modules[name]].append(self._application.region_at(stack))
        for module, regions in around.items():
            yield module.register_forward_hook(return_whole(regions))

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
        trainer, record = getattr(model, "_trainer", None), record_of(model)
        if trainer is None or record is None or record.is_copy:
            return
        if trainer.strategy is not record.strategy() and trainer.training:
            raise RuntimeError(
                f"the model is still sharded by an earlier strategy, and {type(trainer.strategy).__name__} would train "
                "the shards as if they were the model; call lightning_seqpar.unshard(model) on all ranks first"
            )

    return hook


def refuse_compiled(model: nn.Module, planned: Iterable[str]) -> None:
    """What torch.compile made of ``planned`` modules, or of modules in or around them, knows nothing of shards."""
    names = list(planned)
    for name, module in model.named_modules():
        if is_compiled(module) and any(not name or inside(one, name) or inside(name, one) for one in names):
            raise ValueError(
                f"{name or 'the model'} was compiled (torch.compile, or the module's own compile()), and a compiled graph knows "
                "nothing of shards. Leave torch.compile away and set compile: true (SeqParallelStrategy(compile=True)): the "
                "strategy then compiles each block after it has sharded the model"
            )


def has_context(groups: ParallelGroups) -> bool:
    """Whether sequences are dealt out over several context-parallel ranks."""
    return "cp" in groups.topology.axes and groups.size("cp") > 1


def parallelize(
    model: nn.Module,
    plans: Sequence[ShardingPlan],
    groups: ParallelGroups,
    *,
    sp: bool = True,
    regather: bool = True,
    loss_chunk: int | None = None,
    recompute: Recompute = "none",
    compiler: BlockGraphs | None = None,
    cp_method: Method = "auto",
    tiles: MLPTiles | None = None,
    float8: Float8 | None = None,
) -> ShardedModel:
    """Shard ``model`` in place by ``plans`` over the axis ``tp``, and the sequence in its blocks over ``cp``.

    Every rank must hold the same whole model. Modules and parameters stay the same objects; shapes shrink. With a ``compiler`` the
    forward of the blocks is compiled.

    Raises:
        ValueError: for a plan that can't be carried out right; the model is untouched then.
    """
    if record_of(model) is not None:
        raise ValueError("the model is parallelised already; call unshard(model) first")
    swap = _Swap(model, plans, groups, sp, regather, loss_chunk, recompute, compiler, tiles, cp_method, float8)
    refuse_compiled(model, [match.name for match in swap.plan.matches])
    return swap.apply()


def refuse_untraceable(plan: ResolvedPlan) -> None:
    """Every style inside the blocks must be one that can be traced, and no region may begin or end in a block of another one."""
    for match in plan.decided:
        if not any(stack.covers(match.name) for stack in plan.stacks):
            continue
        if (why := match.rule.unfit_to_trace(match.name, plan)) is not None:
            raise ValueError(f"{match.name}: compile=True, but {why}; use compile=False")
    for stack in plan.stacks:
        blocks = [block for other in plan.stacks for block in other.blocks]
        for name in (stack.owner, *stack.exits):
            around = None if name in stack.blocks else next((block for block in blocks if inside(name, block)), None)
            if around is not None:
                raise ValueError(
                    f"{name}: compile=True, but the sequence region of {stack.shown} begins or ends there, inside the block "
                    f"{around}, and a compiled block can't hold the end of a region; use compile=False"
                )
        for name in stack.blocks:
            if "forward" in vars(plan.modules[name]):
                raise ValueError(
                    f"{name}: compile=True, but the block's forward was replaced on the instance, and its class's would be "
                    "compiled; use compile=False, or change the class"
                )


def whole_tensor(local: Tensor, layout: ParamLayout, groups: ParallelGroups) -> Tensor:
    """The whole of a tensor laid out as the parameter is.

    Collective over tp, over dp if the replicas split it, and over pp if other stages hold it.
    """
    local = from_holder(gather_rows(local, groups["fsdp_shard"]) if is_split(local) else local, layout, groups)
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
    if record.replicas is not None:
        record.replicas.undo()
    with torch.no_grad():
        for name, layout in record.layout.items():
            if layout.is_sharded or record.stage is not None:
                parameter = record.layout.parameter(name)
                set_data(parameter, whole_tensor(parameter.data, layout, record.groups))
        for name, layout in record.buffers.items():
            holder, _, leaf = name.rpartition(".")
            module = model.get_submodule(holder)
            setattr(module, leaf, whole_tensor(getattr(module, leaf), layout, record.groups))
    for hook in record.hooks:
        hook.remove()
    if record.stage is not None:
        record.stage.undo_hooks()
    for change in reversed(record.changes):  # a module's last change leads to its class before that
        change.undo()
    del model.__dict__[RECORD_KEY]
    return model
