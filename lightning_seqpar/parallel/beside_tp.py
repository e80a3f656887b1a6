"""What is changed of modules beside sharding them over tp: what runs again in the backward, in tiles, in chunks or compiled.

And sequences that are dealt out over cp, and batch norms that take the statistics of all replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.context.attention import ContextAxis, Method
from lightning_seqpar.context.flex import Heads, rebound
from lightning_seqpar.context.seq_part import SeqPart
from lightning_seqpar.layout.module_names import inside, outwards
from lightning_seqpar.layout.param_layout import Shard
from lightning_seqpar.nn.batch_norm import make_synced
from lightning_seqpar.nn.linear import Float8Linear
from lightning_seqpar.nn.vocab import VocabParallelHead
from lightning_seqpar.nn.vocab_loss import VocabPart
from lightning_seqpar.parallel.compiled_blocks import BlockGraphs, is_compiled
from lightning_seqpar.parallel.sharded_model import (
    ModuleChange,
    ModuleSnapshot,
    ShardedModel,
    changes_since,
    guard_pickling,
    whole_model,
)
from lightning_seqpar.plan.sharding_plan import ShardingPlan, read_plans
from lightning_seqpar.plan.vocabulary import find_vocabulary
from lightning_seqpar.region.activations import RecomputedNorm, RecomputedSpan, is_norm
from lightning_seqpar.region.float8 import Float8
from lightning_seqpar.region.hooks import find_argument, put_argument
from lightning_seqpar.region.recompute import RecomputedForward, RecomputeNotes, TiledCall
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.styles.linear import ColumnRule, linears_in_float8
from lightning_seqpar.styles.replace import unfit_for_vocab
from lightning_seqpar.styles.style import Application, PlannedModel, Stack
from lightning_seqpar.topology.process_groups import ParallelGroups

Recompute = Literal["none", "activations", "selective", "full"]
"""The field of the configuration."""


def _blocks(plan: PlannedModel) -> list[str]:
    return [block for stack in plan.stacks for block in stack.blocks]


def _shown_blocks(plan: PlannedModel) -> str:
    return ", ".join(f"{stack.blocks[0].rpartition('.')[0]}.*" for stack in plan.stacks)


def _columns(plan: PlannedModel, block: str, *, by_heads: bool) -> list[str]:
    """The columns in a block that are dealt out by heads (``units``: queries, keys, values), or those that are not."""
    return [
        name
        for name, match in plan.named("column").items()
        if isinstance(match.rule, ColumnRule) and (match.rule.units is not None) == by_heads and inside(name, block)
    ]


def _nearest_around(names: Sequence[str], block: str, rows: Sequence[str] | None = None) -> str | None:
    """The nearest module inside a block that is around all of ``names``, and around one of ``rows``; None if there is none."""
    for around in outwards(names[0].rpartition(".")[0]):
        if around == block or not inside(around, block):
            break
        holds_row = rows is None or any(inside(row, around) for row in rows)
        if holds_row and all(inside(name, around) for name in names):
            return around
    return None


def _attentions(plan: PlannedModel) -> list[str]:
    """The attention modules inside the blocks.

    An attention is the nearest module around columns that are dealt out by heads and the row that their result goes to. Where only
    the block is around both, it is the nearest module around all such columns. ``nn.MultiheadAttention`` is one by itself.
    """
    replaced = plan.named("replace")  # an encoder is, too
    found = [name for name in replaced if isinstance(plan.modules[name], nn.MultiheadAttention)]
    rows = list(plan.named("row"))
    for block in _blocks(plan):
        around = {name: _nearest_around([name], block, rows) for name in _columns(plan, block, by_heads=True)}
        found += [name for name in around.values() if name is not None]
        alone = [name for name, attention in around.items() if attention is None]
        if alone and (name := _nearest_around(alone, block)) is not None:
            found.append(name)
    found = list(dict.fromkeys(found))
    return [name for name in found if not any(inside(name, one) for one in found if one != name)]


def _mlps(plan: PlannedModel) -> list[str]:
    """The MLPs of the blocks: the nearest modules around columns that are not dealt out by heads, and around a row."""
    rows, heads = list(plan.named("row")), _attentions(plan)
    columns = [(name, block) for block in _blocks(plan) for name in _columns(plan, block, by_heads=False)]
    found = [_nearest_around([name], block, rows) for name, block in columns if name in plan.modules]
    around = (*plan.named("gather"), *plan.named("reduce"))
    return [
        name
        for name in dict.fromkeys(found)
        if name is not None
        and not any(inside(name, one) and one != name for one in around)
        and not any(inside(one, name) for one in heads)
    ]


class NoAttentionError(ValueError):
    """The attention is to be recomputed, and no module of the blocks is one."""


def recomputed(plan: PlannedModel, recompute: Recompute) -> list[str]:
    """The names of the modules that are recomputed."""
    if recompute in ("none", "activations"):
        return []
    if recompute == "full":
        return _blocks(plan)
    if not (found := _attentions(plan)):
        raise NoAttentionError(
            f"recompute='selective': in the blocks ({_shown_blocks(plan)}) no module is the attention, that is one which holds the "
            "columns dealt out by heads (units); use recompute='full', or 'none'"
        )
    return found


def norms(plan: PlannedModel) -> list[nn.Module]:
    """The norms of the blocks, and of the modules at which their regions end."""
    return [
        module
        for name, module in plan.modules.items()
        if plan.canonical[name] == name and is_norm(module) and plan.stack_reaching(name) is not None
    ]


def remake_norms(found: Iterable[nn.Module]) -> None:
    """Let norms run again."""
    for module in found:
        module.__dict__["forward"] = RecomputedNorm(module)


def remake_activations(application: Application, apart: Sequence[str]) -> None:
    """Let norms, and what is between the columns and the row of an MLP, run again; not in modules ``apart``, which do so anyway."""
    plan = application.plan
    gathers = {name for name in plan.named("gather") if name not in plan.named("copy")}
    remake_norms(norms(plan))
    for name in _mlps(plan):
        rows = [row for row in plan.named("row") if inside(row, name)]
        summed = any(plan.reduced_at(row) is not None for row in rows)
        if name in gathers and not summed and not any(inside(name, one) for one in apart):
            module = plan.modules[name]
            module.__dict__["forward"] = RecomputedSpan(module, application.columns_of(name), application.region_of(name))


def make_recomputed(
    plan: PlannedModel, names: Iterable[str], recompute: Recompute, regions: Callable[[str], SequenceRegion | None]
) -> None:
    """Let modules be recomputed: each gets a ``forward`` of its own, as an attribute that hides its class's."""
    notes = RecomputeNotes(recompute)
    for name in names:
        module = plan.modules[name]
        module.__dict__["forward"] = RecomputedForward(
            module, name, notes, regions(name), stops_at_row=recompute == "selective"
        )


@dataclass(frozen=True)
class MLPTiles:
    """How the MLPs of the blocks run, some tokens at a time."""

    tokens: int
    least: int = 1

    def find(self, plan: PlannedModel) -> list[str]:
        """The names of the MLPs: the nearest modules around columns that are not dealt out by heads, and around a row.

        Experts that hold their weights themselves are none. What is gathered for the columns must be gathered in an MLP, and what
        the row makes reduced in it, so that it takes and returns activations as they are between the blocks.
        """
        names = _mlps(plan)
        if not names:
            raise ValueError(
                f"tile_mlp={self.tokens}: in the blocks ({_shown_blocks(plan)}) no module is the MLP, that is one which holds "
                "columns that are not dealt out by heads, and the row behind them, and takes and returns an activation; leave "
                "tile_mlp out"
            )
        return names

    def apply(self, plan: PlannedModel, names: Iterable[str], regions: Callable[[str], SequenceRegion | None]) -> None:
        """Let the MLPs of those names compute some tokens at a time."""
        for name in names:
            stack = plan.stack_reaching(name)
            assert stack is not None
            module = plan.modules[name]
            # torch's own place for what is called instead of a module, hooks included; copies and pickles leave it out.
            module._compiled_call_impl = TiledCall(module, name, self.tokens, regions(name), stack.dim, self.least)


_WHY = (
    "pickling (torch.save) of a model whose head computes in chunks (loss_chunk), or of that head, would write a process group; "
    "write its state_dict(), which is the whole model's, or pickle it when training has ended"
)


_WHY_FLOAT8 = (
    "pickling (torch.save) of a model whose linears compute in float8 would write a process group; write its state_dict(), or "
    "pickle it when training has ended"
)


def change_unsharded(
    model: nn.Module,
    plans: Sequence[ShardingPlan],
    groups: ParallelGroups,
    *,
    recompute: Recompute = "none",
    tiles: MLPTiles | None = None,
    loss_chunk: int | None = None,
    float8: Float8 | None = None,
) -> tuple[list[str], list[ModuleChange]]:
    """Change a model of which tp shards nothing; raises ValueError before that if what is asked for is not found in it.

    Returns the names of the modules that are recomputed, and what became of all modules, to take it back.
    """
    names: list[str] = []
    tiled: list[str] = []
    heads: list[nn.Linear] = []
    remade: list[nn.Module] = []  # without columns nothing lies between them and a row
    linears: list[str] = []
    if recompute != "none" or tiles is not None or float8 is not None:
        plan = read_plans(model, plans)
        linears = [] if float8 is None else linears_in_float8(plan, float8)
        names = recomputed(plan, recompute)
        tiled = [] if tiles is None else tiles.find(plan)
        remade = norms(plan) if recompute in ("activations", "selective") else []
    if loss_chunk is not None:
        heads = _heads(model, plans, loss_chunk)
    modules = dict.fromkeys([*(model.get_submodule(name) for name in (*names, *tiled, *linears)), *heads, *remade])
    before = [ModuleSnapshot(module) for module in modules]
    if names:
        make_recomputed(plan, names, recompute, lambda name: None)
    remake_norms(remade)
    if tiles is not None:
        tiles.apply(plan, tiled, lambda name: None)
    for name in linears:
        Float8Linear.adopt(plan.modules[name], name, plan.kind_of(name), float8)
        guard_pickling(plan.modules[name], _WHY_FLOAT8)
    for head in heads:
        part = VocabPart(Shard.by_vocabulary(head.out_features, 1), groups["tp"], 0, loss_chunk)
        VocabParallelHead.adopt(head, part, cut=False)
        guard_pickling(head, _WHY)
    return names, changes_since(before)


def _heads(model: nn.Module, plans: Sequence[ShardingPlan], loss_chunk: int) -> list[nn.Linear]:
    """The heads over a vocabulary behind the blocks; raises ValueError if there are none."""
    found = [model.get_submodule(name) for name in find_vocabulary(plans, model, 1, False)]
    heads = [one for one in found if isinstance(one, nn.Linear) and unfit_for_vocab(one) is None]
    if not heads:
        raise ValueError(
            f"loss_chunk={loss_chunk} with tp=1: no head over a vocabulary is found behind the blocks, so there is nothing to make "
            "in chunks; leave loss_chunk out"
        )
    return heads


def enter_context(name: str, stack: Stack, axis: ContextAxis) -> Callable[..., Any]:
    """A pre-hook of a block: a whole activation becomes this rank's part of a sequence, ``[b, s, h]`` → ``[b, s/cp, h]``."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where, x = find_argument(name, stack.arg, args, kwargs)
        if isinstance(x, SeqPart):
            return None
        if not isinstance(x, Tensor) or x.is_nested:
            raise ValueError(f"{name}: argument {stack.arg!r} of the block is no (plain) tensor; name it by 'scatter'")
        return put_argument(where, axis.part(x, stack.dim), args, kwargs)

    return hook


def hook_embeddings(plan: PlannedModel, axis: ContextAxis) -> Iterator[RemovableHandle]:
    """Pre-hooks of the embeddings in front of the blocks: their ids ``[b, s]`` become this rank's, ``[b, s/cp]``.

    Which dim of other ids is the sequence is not known: activations of blocks of ``[s, b, h]`` are cut in front of the blocks.
    """
    if not any(stack.dim == 1 for stack in plan.stacks):
        return
    for name, module in plan.modules.items():
        if plan.canonical[name] != name or not isinstance(module, nn.Embedding):
            continue
        if not any(stack.covers(name) for stack in plan.stacks):
            yield module.register_forward_pre_hook(functools.partial(_enter_ids, axis))


def _enter_ids(axis: ContextAxis, module: nn.Module, args: tuple[Any, ...]) -> Any:
    ids, *rest = args or (None,)
    if not isinstance(ids, Tensor) or isinstance(ids, SeqPart) or ids.ndim != 2 or ids.is_floating_point():
        return None
    return axis.part(ids, 1), *rest


def deal_out_flex(plan: PlannedModel) -> None:
    """Let FlexAttention in the blocks take parts of sequences, in modules that have no such call of a rank's heads yet."""
    named = plan.named("flex")
    for name, module in plan.modules.items():
        if plan.canonical[name] == name and name not in named and any(stack.covers(name) for stack in plan.stacks):
            module.__dict__.update(rebound(module, Heads()))


def split_context(model: nn.Module, plans: Sequence[ShardingPlan], groups: ParallelGroups, method: Method) -> ShardedModel:
    """Let the blocks of a model, of which tp shards nothing, see a part of the sequence each."""
    plan = read_plans(model, plans)
    record, axis = whole_model(model, groups), ContextAxis(groups["cp"], method)
    record.hooks += hook_embeddings(plan, axis)
    before = [ModuleSnapshot(module) for module in dict.fromkeys(plan.modules.values())]
    deal_out_flex(plan)
    record.changes = changes_since(before)
    for stack in plan.stacks:
        for name in stack.blocks:
            hook = enter_context(name, stack, axis)
            record.hooks.append(plan.modules[name].register_forward_pre_hook(hook, with_kwargs=True))
    record.context_blocks = tuple(name for stack in plan.stacks for name in stack.blocks)
    return record


def average_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average gradients over the context-parallel ranks, as DDP does over them and the replicas. Collective."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= group.size()


def sync_batch_norms(model: nn.Module, groups: ParallelGroups, *, every: bool) -> list[ModuleChange]:
    """Let the batch norms of a model take the statistics of all replicas' batches; raises ValueError if one of them can't."""
    over_replicas = every and groups.size("dp") > 1
    chosen: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            if module.process_group is None:  # one of the user's own, over all ranks
                chosen[name] = module
        elif isinstance(module, BatchNorm) and over_replicas:
            chosen[name] = module
    compiled = [name for name, module in model.named_modules() if is_compiled(module)]
    for name in chosen:
        for block in compiled:
            if not block or inside(name, block):
                raise ValueError(
                    f"{name}: sync_batchnorm=True, and this batch norm lies in {block or 'the model'}, which torch.compile "
                    "compiles: its statistics would be those of one replica's batch. Leave that module uncompiled "
                    "(compile=False), or use sync_batchnorm=False"
                )
    before = [ModuleSnapshot(module) for module in chosen.values()]
    try:
        for name, module in chosen.items():
            make_synced(module, name, groups["dp"])
    except ValueError:
        for change in changes_since(before):
            change.undo()
        raise
    return changes_since(before)


def compile_plain_blocks(model: nn.Module, compiler: BlockGraphs) -> list[ModuleChange]:
    """Compile the repeated blocks of a model that is not sharded."""
    blocks = dict(_repeated_blocks(model))
    if not blocks:
        raise ValueError(
            "compile=True with tp=1: nothing is sharded, and no list of repeated blocks was found to compile; use compile=False "
            "and call model.compile() yourself in configure_model"
        )
    before = [ModuleSnapshot(block) for block in blocks.values()]
    for name, block in blocks.items():
        compiler.compile(block, name, len(blocks))
    return changes_since(before)


def _repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost repeated blocks of a model that no plan names: modules of one class with parameters, in one list."""
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(name.startswith(f"{one}.") for one in found):
            continue
        parts = dict(module.named_children())
        if len(parts) > 1 and len({type(part) for part in parts.values()}) == 1 and [*module.parameters()]:
            for key, part in parts.items():
                found.append(f"{name}.{key}" if name else key)
                yield found[-1], part
