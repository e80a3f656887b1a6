"""Where a model is cut into the stages of a pipeline, and which parameters each of them reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_seqpar.distributed.autograd import leaf_of, reach
from lightning_seqpar.distributed.rng import Drawn, DrawWatch, host_state
from lightning_seqpar.inference.block_kinds import spread_equal_blocks
from lightning_seqpar.inference.dataflow import CantInferError
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.infer import example_copy
from lightning_seqpar.inference.model_copy import Quiet
from lightning_seqpar.inference.trainer_view import describe_failure
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.pipeline.stage import Cut
from lightning_seqpar.region.hooks import find_argument, put_argument
from lightning_seqpar.styles.style import Stack


def find_cut(
    model: nn.Module,
    example: Example,
    stacks: Sequence[Stack],
    stages: int,
    *,
    rounds: int = 1,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype | None = torch.float64,
    prepare: Callable[[nn.Module], None] = lambda copied: None,
) -> Cut:
    """Run a copy on an example, and follow the graph from each block's end to the parameters behind it, not across a cut.

    Args:
        model: the whole model.
        example: an input.
        stacks: its blocks.
        stages: over how many stages.
        rounds: how many chunks of blocks each stage has.
        layers: how many blocks each chunk has; None for chunks that cost alike.
        dtype: of the copy.
        prepare: is called with the copy before it runs.

    Raises:
        CantInferError: if there are several stacks of blocks, too few blocks, a block returns more than its activation, or a
            stage reads what the blocks of another one made.
    """
    stack = check_stacks(stacks, stages, rounds, layers)
    numel = {name: parameter.numel() for name, parameter in model.named_parameters()}
    drawn: list[Drawn] = []
    in_front: list[int] = []  # how many of them were drawn before the first block
    with example_copy(model, example, dtype, prepare, adapted=True) as (copied, on_cpu):
        spread_equal_blocks(copied)
        first = copied.get_submodule(stack.blocks[0])
        first.register_forward_pre_hook(lambda module, args: in_front.append(len(drawn)))
        with Quiet(draws=on_cpu.draws), DrawWatch(drawn.append):
            try:
                found = trace_cut(copied, lambda: on_cpu.run(copied), stack, stages, rounds, layers, numel)
            except CantInferError:
                raise
            except Exception as error:
                raise CantInferError(
                    f"pp={stages}: to find what each stage reads a copy was run, detached at every block, which raised "
                    f"{describe_failure(error)}; such a model can't be cut. Use pp=1"
                ) from error
    if any(one.seeded for one in drawn[in_front[0] :]):
        raise CantInferError(
            f"pp={stages}: the step draws from a torch.Generator of its own in the blocks or behind them, and the stages that do "
            "not come there would go on from other numbers; draw from torch's own generators (without generator=), or use pp=1"
        )
    return found._replace(draws=bool(drawn))


def check_stacks(stacks: Sequence[Stack], stages: int, rounds: int, layers: Sequence[int] | None) -> Stack:
    """The stack of blocks that is cut.

    Raises:
        CantInferError: if there are several, or the blocks are too few, or others than ``layers`` says.
    """
    if len(stacks) != 1:
        shown = " and ".join(stack.shown for stack in stacks)
        raise CantInferError(
            f"pp={stages}: the model has several stacks of blocks ({shown}), which can't be cut yet; use pp=1"
        )
    (stack,) = stacks
    count = len(stack.blocks)
    few = f"{count} block{'s' * (count > 1)}"
    if count < stages:
        raise CantInferError(f"pp={stages}: {stack.shown} has {few}, and each stage needs one; use pp={count} at most")
    if count < stages * rounds:
        raise CantInferError(
            f"virtual_pp={rounds} with pp={stages}: {stack.shown} has {few}, and each stage needs {rounds}; use "
            f"virtual_pp={count // stages} at most"
        )
    if layers is not None and sum(layers) != count:
        raise CantInferError(
            f"pp_layers={list(layers)}: they are {sum(layers)} blocks together, and {stack.shown} has {count} blocks; let the "
            "numbers add up to that, or leave pp_layers out for stages that cost alike"
        )
    return stack


def trace_cut(
    model: nn.Module,
    run: Callable[[], Tensor],
    stack: Stack,
    stages: int,
    rounds: int,
    layers: Sequence[int] | None,
    numel: Mapping[str, int],
) -> Cut:
    """:func:`find_cut` on a model that is run as it is.

    Args:
        model: whose blocks get hooks while it runs.
        run: runs it, and returns the loss.
        stack: its blocks.
        stages: over how many stages.
        rounds: how many chunks of blocks each stage has.
        layers: how many blocks each chunk has; None for chunks that cost alike.
        numel: size of each parameter of the whole model, by name.

    Raises:
        CantInferError: as :func:`find_cut`.
    """
    called: list[str] = []
    ends: list[Tensor] = []
    returned: set[int] = set()
    at_blocks: list[bytes] = []  # the state of the host's generators at the first block

    def cut(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            where, x = find_argument(name, stack.arg, args, kwargs)
            called.append(name)
            if not at_blocks:
                at_blocks.append(host_state())
            ends.append(x)
            return put_argument(where, x.detach().requires_grad_(), args, kwargs)

        return hook

    def look(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, Tensor):
                returned.add(0)
            elif isinstance(out, tuple) and isinstance(out[0], Tensor) and all(one is None for one in out[1:]):
                returned.add(len(out))
            else:
                raise CantInferError(f"{name} returns more than its activation, which stages behind would not have")

        return hook

    with ExitStack() as hooks:
        for name in stack.blocks:
            block = model.get_submodule(name)
            hooks.callback(block.register_forward_hook(look(name)).remove)
            hooks.callback(block.register_forward_pre_hook(cut(name), with_kwargs=True).remove)
        loss = run()
    host_draws = at_blocks != [] and at_blocks[0] != host_state()
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    # In front of the blocks, of each block, and behind them.
    read = [_read_by(root, known) for root in (*ends, loss)]
    if called != list(stack.blocks) or len(returned) != 1:
        raise CantInferError(f"{stack.shown}: its blocks were not called one after the other, each once")
    if layers is None:
        costs = [sum(size for name, size in numel.items() if inside(name, block)) for block in stack.blocks]
        # What is behind the blocks (the read set of the loss has the last block's too) is computed by the last stage.
        costs[-1] += sum(numel[name] for name in read[-1] if not any(inside(name, one) for one in stack.blocks))
        layers = deal_out(costs, stages * rounds)
    starts = [sum(layers[:at]) for at in range(stages * rounds + 1)]
    blocks = tuple(tuple(stack.blocks[start:stop]) for start, stop in pairwise(starts))
    reads = [set().union(*read[start + 1 : stop + 1]) for start, stop in pairwise(starts)]
    reads[0] |= read[0]
    everything = set(known.values())
    for at, names in enumerate(blocks):
        for other, theirs in enumerate(blocks):
            crossing = _inside(theirs, reads[at])
            if other != at and crossing:
                reader, holder = (
                    (f"stage {at}", f"on stage {other}") if rounds == 1 else (f"{names[0]}", "in a chunk of its own")
                )
                raise CantInferError(
                    f"pp={stages}: {reader} reads {min(crossing)}, which is {holder}, or what it made, past the activation "
                    "between blocks; such a model can't be cut there. Use pp=1"
                )
        reads[at] |= _inside(names, everything)
    held = [set().union(*reads[stage::stages]) for stage in range(stages)]
    for unread in everything - set().union(*held):  # in the example: whoever reads it later must have it
        for each in held:
            each.add(unread)
    return Cut(blocks, tuple(frozenset(names) for names in held), returned.pop(), stack.arg, host_draws=host_draws)


def deal_out(costs: Sequence[int], stages: int) -> list[int]:
    """How many of the blocks in a row each stage gets, so that the most expensive stage costs as little as it can.

    Among equal ways, that in which the stages cost most alike; of those the one that has fewer blocks in front, since the first
    stages keep the activations of most micro-batches.

    Args:
        costs: of the blocks, in order.
        stages: how many; each gets one block at least.
    """
    # Of the first so many blocks over so many stages: the highest cost, the sum of squares, and the numbers of blocks.
    best: dict[tuple[int, int], tuple[float, float, list[int]]] = {(0, 0): (0.0, 0.0, [])}
    for stage in range(1, stages + 1):
        for stop in range(stage, len(costs) - (stages - stage) + 1):
            ways = []
            for start in range(stage - 1, stop):
                if (start, stage - 1) in best:
                    highest, squares, layers = best[start, stage - 1]
                    cost = float(sum(costs[start:stop]))
                    ways.append((max(highest, cost), squares + cost * cost, [*layers, stop - start]))
            best[stop, stage] = min(ways)
    return best[len(costs), stages][2]


def _inside(blocks: Sequence[str], names: set[str]) -> set[str]:
    """The parameters that lie in the blocks."""
    return {name for name in names if any(inside(name, block) for block in blocks)}


def _read_by(root: Tensor, known: dict[int, str]) -> set[str]:
    """The names of the parameters that a tensor's graph leads to."""
    if root.grad_fn is None:
        return set()
    leaves = (leaf_of(node) for node in reach(root.grad_fn))
    return {known[id(leaf)] for leaf in leaves if leaf is not None and id(leaf) in known}
