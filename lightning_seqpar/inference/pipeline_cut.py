"""Where a model is cut into the stages of a pipeline, and which parameters each of them reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.distributed.autograd import leaf_of, reach
from lightning_seqpar.distributed.rng import Drawn, DrawWatch, host_state
from lightning_seqpar.inference.block_kinds import spread_equal_blocks
from lightning_seqpar.inference.dataflow import CantInferError
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.infer import example_copy
from lightning_seqpar.inference.model_copy import Quiet
from lightning_seqpar.inference.trainer_view import describe_failure
from lightning_seqpar.layout.module_names import Argument, inside
from lightning_seqpar.pipeline.cut import Cut, CutStack
from lightning_seqpar.plan.sharding_plan import STYLES, ShardingPlan
from lightning_seqpar.region.hooks import find_argument, put_argument
from lightning_seqpar.styles.style import PlannedModel, Stack


def find_cut(
    model: nn.Module,
    example: Example,
    stacks: Sequence[Stack],
    config: ParallelConfig,
    *,
    dtype: torch.dtype | None = torch.float64,
    prepare: Callable[[nn.Module], None] = lambda copied: None,
) -> Cut:
    """Run a copy on an example, and follow the graph from each block's end to the parameters behind it, not across a cut.

    ``dtype`` is the copy's, and ``prepare`` is called with it before it runs. Raises CantInferError if there are too few blocks, a
    block returns what no other block takes, or a stage reads what the blocks of another one made.
    """
    check_stacks(stacks, config)
    numel = {name: parameter.numel() for name, parameter in model.named_parameters()}
    drawn: list[Drawn] = []
    in_front: list[int] = []  # how many of them were drawn before the first block
    with example_copy(model, example, dtype, prepare, adapted=True) as (copied, on_cpu):
        spread_equal_blocks(copied)
        for stack in stacks:
            first = copied.get_submodule(stack.blocks[0])
            first.register_forward_pre_hook(lambda module, args: in_front.append(len(drawn)))
        with Quiet(draws=on_cpu.draws), DrawWatch(drawn.append):
            try:
                found = trace_cut(copied, lambda: on_cpu.run(copied), stacks, config, numel)
            except CantInferError:
                raise
            except Exception as error:
                raise CantInferError(
                    f"pp={config.pp}: to find what each stage reads a copy was run, detached at every block, which raised "
                    f"{describe_failure(error)}; such a model can't be cut. Use pp=1"
                ) from error
    if (config.virtual_pp or 1) > 1 and any(one.seeded for one in drawn):
        raise CantInferError(
            f"virtual_pp={config.virtual_pp}: the step draws from a torch.Generator of its own, and is run once for each chunk of "
            "blocks; draw from torch's own generators (without generator=), or leave virtual_pp out"
        )
    if any(one.seeded for one in drawn[in_front[0] :]):
        raise CantInferError(
            f"pp={config.pp}: the step draws from a torch.Generator of its own in the blocks or behind them, and the stages that "
            "do not come there would go on from other numbers; draw from torch's own generators (without generator=), or use pp=1"
        )
    return found._replace(draws=bool(drawn))


def stacks_of(model: nn.Module, plans: Sequence[ShardingPlan]) -> Sequence[Stack]:
    """The stacks of blocks that plans name in a model."""
    matches = [match for plan in plans for match in plan.match(model) if match.rule.says_where_blocks_are]
    return PlannedModel(model, matches, list(STYLES), 1, False).stacks


def leaves_blocks(module: nn.Module, plans: Sequence[ShardingPlan]) -> bool:
    """Whether a list of modules of one class, with parameters, is among no plan's blocks and in none of them."""
    blocks = {match.name for plan in plans for match in plan.match(module) if match.rule.style == "blocks"}
    known = {id(one) for block in blocks for one in module.get_submodule(block).modules()}
    return any(
        isinstance(modules, nn.ModuleList)
        and len(modules) > 1
        and len({type(one) for one in modules}) == 1
        and next(modules.parameters(), None) is not None
        and not any(id(one) in known for one in modules)
        for modules in module.modules()
    )


def check_stacks(stacks: Sequence[Stack], config: ParallelConfig) -> None:
    """Refuse stacks that can't be dealt out so: the blocks are too few, or others than the configuration says."""
    pp, rounds, layers, split = config.pp, config.virtual_pp or 1, config.pp_layers, config.pp_split_rank
    shown = " and ".join(stack.shown for stack in stacks)
    counts = [len(stack.blocks) for stack in stacks]
    count = sum(counts)
    if not stacks:
        raise CantInferError(f"pp={pp}: the model has no repeated blocks that stages could hold; use pp=1")
    few = f"{shown} {'has' if len(stacks) == 1 else 'have'} {count} block{'s' * (count > 1)}"
    if count < pp:
        raise CantInferError(f"pp={pp}: {few}, and each stage needs one; use pp={count} at most")
    if rounds > 1 and len(stacks) > 1:
        raise CantInferError(
            f"virtual_pp={rounds}: the model has several stacks of blocks ({shown}), whose stages have one chunk each; leave "
            "virtual_pp out"
        )
    if count < pp * rounds:
        raise CantInferError(
            f"virtual_pp={rounds} with pp={pp}: {few}, and each stage needs {rounds}; use virtual_pp={count // pp} at most"
        )
    if layers is not None and sum(layers) != count:
        raise CantInferError(
            f"pp_layers={list(layers)}: they are {sum(layers)} blocks together, and {few}; let the numbers add up to that, "
            "or leave pp_layers out for stages that cost alike"
        )
    if split is None:
        return
    if len(stacks) != 2:
        raise CantInferError(
            f"pp_split_rank={split}: it says at which stage the decoder begins, and the model has "
            f"{len(stacks)} stack{'s' * (len(stacks) > 1)} of blocks ({shown}), not an encoder and a decoder; leave it out"
        )
    for stack, stages in zip(stacks, (split, pp - split), strict=True):
        if len(stack.blocks) < stages:
            raise CantInferError(
                f"pp_split_rank={split} with pp={pp}: {stack.shown} has {len(stack.blocks)} blocks for {stages} "
                "stages, and each stage needs one; split elsewhere, or leave pp_split_rank out for stages that cost alike"
            )
    if layers is not None and sum(layers[:split]) != counts[0]:
        raise CantInferError(
            f"pp_layers={list(layers)} with pp_split_rank={split}: the first {split} are "
            f"{sum(layers[:split])} blocks, and {stacks[0].shown} has {counts[0]}; let them add up to that, or leave one "
            "out"
        )


class _Traced:
    """What is noted of a stack while a copy runs that is detached at its blocks."""

    def __init__(self, stack: Stack, called: list[str]) -> None:
        self.stack, self._called = stack, called
        self.given: list[list[Tensor]] = []  # of each block what it takes from the one before
        self.out = self.stand_in = torch.empty(0)  # what the last block returned, and what stands for it behind
        self.has_graph = True  # else no graph tells who reads it (a teacher)
        self.returned: set[int] = set()
        self.beside: dict[int, Argument] = {}
        self._left: dict[int, tuple[int, Tensor]] = {}  # by id what the block before returned beside its activation

    def take(self, name: str) -> Callable[..., Any]:
        """A pre-hook of a block: what it takes from the one before is detached."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._called.append(name)
            carried: list[Argument] = [self.stack.arg]
            given: list[tuple[Argument, Any]] = [*enumerate(args), *kwargs.items()]
            for arg, x in given:
                if isinstance(x, Tensor) and id(x) in self._left and arg != self.stack.arg:
                    self.beside[self._left.pop(id(x))[0]] = arg
                    carried.append(arg)
            if self._left:
                raise CantInferError(
                    f"{name}: the block before it returns more than its activation, and it is not given that, so that stages "
                    "behind would not have it; use pp=1"
                )
            found = [find_argument(name, arg, args, kwargs) for arg in carried]
            self.given.append([x for _, x in found])
            for where, x in found:
                leaf = x.detach().requires_grad_(x.is_floating_point())
                args, kwargs = put_argument(where, _changeable(leaf), args, kwargs)
            return args, kwargs

        return hook

    def look(self, name: str) -> Callable[..., Any]:
        """A hook of a block: what it returns; behind a stack's last block the activation is detached."""

        def hook(module: nn.Module, args: Any, out: Any) -> Any:
            x, *others = out if isinstance(out, tuple) and out else (out,)
            can_go = (one is None or (isinstance(one, Tensor) and one.is_floating_point()) for one in others)
            if not isinstance(x, Tensor) or not all(can_go):
                raise CantInferError(f"{name} returns more than its activation, which stages behind would not have; use pp=1")
            self.returned.add(len(others) + 1 if isinstance(out, tuple) else 0)
            is_last = name == self.stack.blocks[-1]
            self._left = {} if is_last else {id(one): (at, one) for at, one in enumerate(others, 1) if one is not None}
            if not is_last:
                return None
            self.has_graph = torch.is_grad_enabled()
            self.out, self.stand_in = x, x.detach().requires_grad_()
            behind = _changeable(self.stand_in)
            return (behind, *others) if isinstance(out, tuple) else behind

        return hook


def _changeable(leaf: Tensor) -> Tensor:
    """A copy that a block may change in place, as it may what another one returned."""
    with torch.enable_grad():
        return leaf.clone()


def trace_cut(
    model: nn.Module, run: Callable[[], Tensor], stacks: Sequence[Stack], config: ParallelConfig, numel: Mapping[str, int]
) -> Cut:
    """:func:`find_cut` on a model as it is: ``run`` makes its loss, ``numel`` is the size of each parameter of the whole model."""
    called: list[str] = []
    at_blocks: list[bytes] = []  # the state of the host's generators at the first block
    traced = [_Traced(stack, called) for stack in stacks]
    with ExitStack() as hooks:
        for one in traced:
            for name in one.stack.blocks:
                block = model.get_submodule(name)
                hooks.enter_context(block.register_forward_hook(one.look(name)))
                hooks.enter_context(block.register_forward_pre_hook(one.take(name), with_kwargs=True))
            first = model.get_submodule(one.stack.blocks[0])
            hooks.enter_context(first.register_forward_pre_hook(lambda module, args: at_blocks.append(host_state())))
        loss = run()
    host_draws = at_blocks != [] and at_blocks[0] != host_state()
    if idle := next((one.stack for one in traced if one.stack.blocks[0] not in called), None):
        raise CantInferError(
            f"pp={config.pp}: the step does not run the blocks of {idle.shown} ({idle.blocks[0]}), which each stage would hold "
            "whole beside its part of the others; use pp=1"
        )
    traced.sort(key=lambda one: called.index(one.stack.blocks[0]))
    blocks = [name for one in traced for name in one.stack.blocks]
    if called != blocks or any(len(one.returned) != 1 for one in traced):
        raise CantInferError(
            f"pp={config.pp}: the blocks of {' and '.join(one.stack.shown for one in traced)} were not called one after the "
            "other, each once, as stages need it; use pp=1"
        )
    ends = {id(one.stand_in): at for at, one in enumerate(traced)}
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    # Of each block what is read in it, and in front of the first, not across a cut; last of what is behind the blocks.
    roots: list[list[Tensor]] = []
    for one in traced:
        roots += [*one.given[1:], [one.out]]
        roots[-len(one.given)] = [*roots[-len(one.given)], *one.given[0]]
    reached = [set().union(*map(_reached, each)) for each in roots]
    of_loss = _reached(loss)
    behind = {known[leaf] for leaf in of_loss if leaf in known}
    reached[-1] |= of_loss
    read = [{known[leaf] for leaf in leaves if leaf in known} for leaves in reached]
    takes = [{ends[leaf] for leaf in leaves if leaf in ends} for leaves in reached]  # the stacks whose ends are read
    layers: Sequence[int] | None = config.pp_layers
    rounds, split = config.virtual_pp or 1, config.pp_split_rank
    if layers is None:
        costs = [sum(size for name, size in numel.items() if inside(name, block)) for block in blocks]
        # What is behind the blocks is computed by the last stage.
        costs[-1] += sum(numel[name] for name in behind)
        border = 0 if split is None else len(traced[0].stack.blocks)
        layers = deal_out(costs[border:], config.pp * rounds - (split or 0))
        layers = [*(deal_out(costs[:border], split) if split else ()), *layers]
    borders = [*accumulate(layers, initial=0)]
    chunks = tuple(tuple(blocks[start:stop]) for start, stop in pairwise(borders))
    reads = [set().union(*read[start:stop]) for start, stop in pairwise(borders)]
    everything = set(known.values())
    for at, names in enumerate(chunks):
        for other, theirs in enumerate(chunks):
            crossing = _inside(theirs, reads[at])
            if other != at and crossing:
                reader, holder = f"stage {at}", f"on stage {other}"
                if rounds > 1:
                    reader, holder = names[0], "in a chunk of its own"
                raise CantInferError(
                    f"pp={config.pp}: {reader} reads {min(crossing)}, which is {holder}, or what it made, past the activation "
                    "between blocks; such a model can't be cut there. Use pp=1"
                )
        reads[at] |= _inside(names, everything)
    held = [set().union(*reads[stage :: config.pp]) for stage in range(config.pp)]
    for unread in everything - set().union(*held):  # in the example: whoever reads it later must have it
        for each in held:
            each.add(unread)
    found = []
    for at, one in enumerate(traced):
        own = next(chunk for chunk, names in enumerate(chunks) if one.stack.blocks[-1] in names)
        reading = (chunk for chunk, (start, stop) in enumerate(pairwise(borders)) if at in set().union(*takes[start:stop]))
        readers = tuple(chunk for chunk in (reading if one.has_graph else range(own, len(chunks))) if chunk != own)
        beside = tuple(sorted(one.beside.items()))
        found.append(CutStack(tuple(one.stack.blocks), one.stack.arg, min(one.returned), beside, readers))
    return Cut(chunks, tuple(frozenset(names) for names in held), tuple(found), host_draws=host_draws)


def deal_out(costs: Sequence[int], stages: int) -> list[int]:
    """How many of the blocks in a row each stage gets, so that the most expensive stage costs as little as it can.

    Among equal ways, that in which the stages cost most alike; of those the one that has fewer blocks in front, since the first
    stages keep the activations of most micro-batches. Each stage gets one block at least.
    """
    # By how many of the first blocks the stages so far have: the highest cost, the sum of squares, and the numbers of blocks.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(1, stages + 1):
        ways: dict[int, list[tuple[float, float, list[int]]]] = defaultdict(list)
        for start, (highest, squares, layers) in best.items():
            for stop in range(start + 1, len(costs) - (stages - stage) + 1):
                cost = float(sum(costs[start:stop]))
                ways[stop].append((max(highest, cost), squares + cost * cost, [*layers, stop - start]))
        best = {stop: min(found) for stop, found in ways.items()}
    return best[len(costs)][2]


def _inside(blocks: Sequence[str], names: set[str]) -> set[str]:
    return {name for name in names if any(inside(name, block) for block in blocks)}


def _reached(root: Tensor) -> set[int]:
    if root.grad_fn is None:
        return {id(root)}
    return {id(leaf) for node in reach(root.grad_fn) if (leaf := leaf_of(node)) is not None}
