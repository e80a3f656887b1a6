"""Inference: a plan for a model that nobody wrote one for.

The data flow of a recorded forward shows which linears are columns and rows and where to gather; gradients show which
features belong together; a rehearsal of each rank's part shows which attributes must change. What can't be decided is
refused, and what is decided is still proved by the self-check.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_seqpar.distributed.rng import kept_streams, seed_streams
from lightning_seqpar.inference.block_planner import BlockPlan, BlockPlanner, alike, pair_mixes_positions, pattern_of
from lightning_seqpar.inference.dataflow import (
    BlockFlow,
    CantInferError,
    NothingToSplitError,
    UnknownLinearError,
    UserDecidesError,
    made_of_activation,
)
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.gather_points import read_blocks
from lightning_seqpar.inference.isolated_block import Block
from lightning_seqpar.inference.model_copy import Quiet, default_dtype, detached_copy, without_checkpoints
from lightning_seqpar.inference.proposals import with_tried_rules
from lightning_seqpar.inference.reduction import Reduction, is_large
from lightning_seqpar.inference.repeats import owner_of
from lightning_seqpar.inference.stacks import activation, find_exit, find_stacks, only_convolutions
from lightning_seqpar.inference.trace import Call, ForwardTrace
from lightning_seqpar.inference.trainer_view import describe_failure
from lightning_seqpar.layout.adapters import without_adapters
from lightning_seqpar.layout.class_source import is_installed
from lightning_seqpar.layout.linear_kind import is_parametrized, linear_kind
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.styles.style import LINEAR


@dataclass
class Inference:
    """An inferred plan.

    Attributes:
        plan: the plan.
        reasons: why it is as it is, a sentence each.
        parts: rules, each of which has one sharded part of the blocks computed whole.
        whole: patterns of the modules that are left whole, each with the reason.
        no_sp: patterns of the blocks that are given whole sequences, each with the reason.
    """

    plan: ShardingPlan
    reasons: list[str]
    parts: list[dict[str, Any]] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    no_sp: dict[str, str] = field(default_factory=dict)


def infer_plan(
    model: nn.Module,
    example: Any,
    tp: int,
    own: ShardingPlan | None = None,
    *,
    beside: Sequence[ShardingPlan] = (),
    sums: bool = True,
    dtype: torch.dtype | None = torch.float64,
    prepare: Callable[[nn.Module], None] = lambda copied: None,
) -> Inference:
    """Infer a plan for ``model`` from a run of a copy on this process's CPU; the model itself is not touched.

    Args:
        model: any module, on any device; one on meta, or a large one, is never materialised whole.
        example: what ``forward`` takes (a tensor, a tuple or a dict), or an :class:`Example`.
        tp: number of tensor-parallel ranks.
        own: the user's own rules, which inference leaves alone.
        beside: plans for other parts of the model; their blocks are left out.
        sums: whether a module that deals its tokens out to experts may be reduced where it returns; if not, each expert is
            reduced by itself, which needs whole sequences between the blocks.
        dtype: of the copy; None keeps the model's.
        prepare: is called with the copy before its forward.

    Raises:
        CantInferError: naming the module and why, with the rules that were tried and work, or the sentence that none was found.
    """
    if not isinstance(example, Example):
        kwargs = dict(example) if isinstance(example, Mapping) else {}
        args = () if kwargs else example if isinstance(example, tuple) else (example,)
        example = Example("the example", "forward", args, kwargs, reduction=Reduction(skips_repeats=is_large(model)))
    cpu = torch.device("cpu")
    if dtype is torch.float64 and is_large(model):
        dtype = torch.float32
    with kept_streams(cpu), default_dtype(dtype):
        copied = without_checkpoints(without_adapters(detached_copy(model, cpu, dtype, example.reduction)))
        prepare(copied)
        on_cpu = example.to(cpu, dtype)

        def attempt(more: Sequence[dict[str, Any]]) -> Inference:
            rules = ShardingPlan.from_rules(more).rules
            user_plan = replace(own, rules=(*own.rules, *rules)) if own is not None else ShardingPlan(rules)
            try:
                return _infer(copied, on_cpu, tp, user_plan if more else own, beside=beside, sums=sums)
            except CantInferError:
                raise
            except Exception as error:
                raise CantInferError(_of_the_run(model, error)) from error

        try:
            return attempt([])
        except CantInferError as error:
            raise with_tried_rules(error, attempt, tp) from None


def _of_the_run(model: nn.Module, error: Exception) -> str:
    """Why nothing is inferred where a run of the copy raised."""
    name = type(model).__name__
    if "use_reentrant" not in str(error):
        return f"{name}: a copy of it was run to see what it computes, which raised {describe_failure(error)}"
    installed = [kind for kind in {type(module) for module in model.modules()} if is_installed(kind)]
    own = not [kind for kind in installed if not kind.__module__.startswith(("torch.", "lightning."))]
    return (
        f"{name}: its forward runs blocks under reentrant checkpointing, through which no plan can be inferred; "
        + ("write checkpoint(..., use_reentrant=False)" if own else "turn that off, or make it use_reentrant=False")
        + " (Hugging Face: gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False}))"
        * (not own)
    )


def _infer(
    model: nn.Module,
    example: Example,
    tp: int,
    own: ShardingPlan | None,
    *,
    beside: Sequence[ShardingPlan] = (),
    sums: bool,
) -> Inference:
    """:func:`infer_plan` on the copy itself."""
    trace = ForwardTrace(model)
    user_rules = _UserRules(model, own)
    with example.repeats(model), trace.watch(), Quiet(draws=example.draws):
        seed_streams()
        example.run(model)
    if not trace.calls:
        raise CantInferError(
            f"{type(model).__name__}: a copy of it runs none of its own modules (its forward is a closure over the original?)"
        )
    planned = {match.name for plan in beside for match in plan.match(model)}
    stacks = user_rules.stacks(trace) or [
        calls
        for calls in find_stacks(trace, model)
        if not any(inside(name, call.name) or inside(call.name, name) for call in calls for name in planned if name)
    ]
    if not stacks and (convolutions := only_convolutions(model)):
        raise NothingToSplitError(
            f"{type(model).__name__}: its repeated modules ({convolutions}) hold convolutions and no linears, so tensor "
            "parallelism has nothing to split, whatever the rules: train it with data parallelism alone (tp=1)"
        )
    if not stacks:
        raise CantInferError(
            f"{type(model).__name__}: no repeated blocks found, that is modules of one class that hold linears and map an "
            "activation [b, s, h] to one of the same shape; name them by {pattern: ..., style: blocks}"
        )
    rules: list[dict[str, Any]] = []
    reasons: list[str] = []
    parts: list[dict[str, Any]] = []
    why_whole: dict[str, str] = {}
    no_sp: dict[str, str] = {}
    owners = [owner_of(model, calls[0].name) for calls in stacks]
    failed: list[CantInferError] = []
    for calls, owner in zip(stacks, owners, strict=True):
        try:
            stack = _plan_kinds(trace, model, calls, tp, user_rules, alone=owners.count(owner) == 1, sums=sums)
        except UserDecidesError:
            raise
        except Exception as caught:
            if "use_reentrant" in str(caught):
                raise
            error = caught if isinstance(caught, CantInferError) else _told(caught, calls[0].name)
            failed.append(error)
            names = _all_names(model, [call.name for call in calls])
            reasons.append(f"{pattern_of(names)}: every rank has these blocks whole: {error.why}")
            why_whole[pattern_of(names)] = error.why
            continue
        rules += stack.rules
        reasons += stack.reasons
        parts += stack.parts
        why_whole |= stack.whole
        no_sp |= stack.no_sp
    if not rules:
        raise failed[0]
    return Inference(ShardingPlan.from_rules(rules, source="inferred"), reasons, parts, why_whole, no_sp)


def _told(error: Exception, block: str) -> CantInferError:
    """What was raised while a stack was planned, as a reason to leave it whole; the other stacks are planned all the same."""
    told = CantInferError(f"{block}: planning it was tried, which raised {describe_failure(error)}")
    told.__cause__ = error
    return told


class _UserRules:
    """What the user's own rules decide, so that inference leaves it alone.

    Args:
        model: the copy.
        own: the rules, or None.
    """

    def __init__(self, model: nn.Module, own: ShardingPlan | None) -> None:
        self._matches = own.match(model) if own is not None else []
        self._wholes = [match.name for match in self._matches if match.rule.undoes_inside]
        self._linears = {match.name for match in self._matches if match.rule.slot == LINEAR}

    def stacks(self, trace: ForwardTrace) -> list[list[Call]]:
        """The stacks of blocks that the user named, in order of execution."""
        named = {match.name for match in self._matches if match.rule.style == "blocks"}
        by_parent: dict[str, dict[str, Call]] = {}
        for call in trace.calls:
            if call.name in named and activation(trace, call) is not None:
                by_parent.setdefault(call.name.rpartition(".")[0], {}).setdefault(call.name, call)
        return [list(calls.values()) for calls in by_parent.values()]

    def covers(self, *names: str) -> bool:
        """Whether the rules decide these modules: one of them is computed whole, or all have a rule of their own."""
        whole = any(inside(name, one) for name in names for one in self._wholes)
        return whole or all(name in self._linears for name in names)


class _StackPlan(NamedTuple):
    """The plan of one stack of blocks.

    Attributes:
        rules: as data.
        reasons: why they are as they are.
        parts: rules by which a part of the blocks would stay whole.
        whole: patterns of what is left whole, each with the reason.
        no_sp: the pattern of the blocks with the reason, if they are given whole sequences.
    """

    rules: list[dict[str, Any]]
    reasons: list[str]
    parts: list[dict[str, Any]]
    whole: dict[str, str]
    no_sp: dict[str, str]


def _plan_kinds(
    trace: ForwardTrace,
    model: nn.Module,
    calls: Sequence[Call],
    tp: int,
    user_rules: _UserRules,
    *,
    alone: bool,
    sums: bool,
) -> _StackPlan:
    """The plan of one stack; kinds of blocks in it that can't be planned at all stay whole, between whole sequences.

    Args:
        trace: the recorded forward.
        model: the copy.
        calls: the first call of each block.
        tp: number of tensor-parallel ranks.
        user_rules: what the user decides.
        alone: whether no other stack has the same owner.
        sums: as in :func:`infer_plan`.

    Raises:
        CantInferError: as :func:`_plan_stack` does, if nothing is left of the stack.
    """
    left: dict[str, str] = {}
    first: CantInferError | None = None
    rest = list(calls)
    while True:
        try:
            plan = _plan_stack(trace, model, rest, tp, user_rules, alone=alone, sums=sums, left=left)
        except UserDecidesError:
            raise
        except CantInferError as error:
            first = first or error
            failing = [c for c in rest if error.block and alike(c.module, model.get_submodule(error.block))]
            rest = [call for call in rest if call not in failing]
            if not failing or not rest:
                raise first from None
            left[pattern_of(_all_names(model, [call.name for call in failing]))] = error.why
            continue
        reasons = [f"{name}: every rank has these blocks whole: {why}" for name, why in left.items()]
        return plan._replace(reasons=[*plan.reasons, *reasons], whole={**plan.whole, **left})


def _plan_stack(
    trace: ForwardTrace,
    model: nn.Module,
    calls: Sequence[Call],
    tp: int,
    user_rules: _UserRules,
    *,
    alone: bool,
    sums: bool,
    left: Mapping[str, str],
) -> _StackPlan:
    """The plan of one stack of blocks.

    Args:
        trace: the recorded forward.
        model: the copy.
        calls: the first call of each block.
        tp: number of tensor-parallel ranks.
        user_rules: what the user decides.
        alone: whether no other stack has the same owner.
        sums: as in :func:`infer_plan`.
        left: patterns of blocks of this stack that stay whole.

    Raises:
        CantInferError: if a block can't be planned, or none has a row.
    """
    mixing: dict[Any, bool] = {}

    def mixes(flow: BlockFlow, row: str) -> bool:
        key = (row[len(flow.name) :], _likeness(flow, model))
        if key not in mixing:
            mixing[key] = pair_mixes_positions(model, flow, row)
        return mixing[key]

    _refuse_unknown_linears(trace, model, calls, user_rules)
    flows = read_blocks(trace, calls, model, mixes, sums=sums)
    names = _all_names(model, [flow.name for flow in flows])
    planned = _plan_blocks(trace, model, flows, names, tp, user_rules, sums=sums)
    known, plans, wholes = planned.kinds, planned.of_block, planned.wholes
    dims = {flow.name: Block(model, flow).sequence_dim() for flow in planned.examples}
    _refuse_idle_stack(flows[0].name, known, wholes.values())
    blocks = pattern_of(names)
    dim = next(iter(dims.values())) if len(set(dims.values())) == 1 else None
    streams = dict.fromkeys(key for flow in flows for key in flow.streams)
    why_no_sp = ""
    if len(set(dims.values())) > 1:
        why_no_sp = f"its blocks have their sequence at different dims ({dims})"
    elif dim is None:
        why_no_sp = _positions(trace, flows[0])
    elif streams:
        why_no_sp = f"argument {', '.join(map(repr, streams))} is an activation too"
    elif left:
        why_no_sp = f"{', '.join(left)} stay whole between these blocks"
    else:
        why_no_sp = next((plan.no_sp for plan in known if plan.reads_length), "")
    whole = bool(why_no_sp) or any(plan.reads_length for plan in known)
    where = {"style": "blocks", **({} if dim is None else {"dim": dim}), **({"sp": False} if whole else {})}
    out: list[dict[str, Any]] = [{"pattern": blocks, **where}]
    args = {name: flow.arg for flow in flows if flow.arg != 0 for name in _all_names(model, [flow.name])}
    for arg in dict.fromkeys(args.values()):
        out.append({"pattern": pattern_of([n for n in names if args.get(n) == arg]), "style": "scatter", "arg": arg})
    out += _compress(names, plans)
    out += _whole_rules(trace, flows, blocks, wholes)
    out += _exit_rules(trace, model, names, blocks, alone=alone)
    kinds = "" if len(known) == 1 else f" of {len(known)} kinds"
    at = [] if dim is None else [f"sequence at dim {dim}"]
    at += [f"{why_no_sp}: no sequence parallelism here"] if dim is None or streams or left else []
    reasons = [f"{blocks}: {len(names)} block{'s' * (len(names) > 1)}{kinds}, {', '.join(at)}"]
    for plan in known:
        reasons += plan.reasons
    reasons += [f"{blocks}.{part}: computed whole on every rank: {error.why}" for part, error in wholes.items()]
    sharded = dict.fromkeys(part for plan in known for part in plan.parts)
    why_whole = {f"{blocks}.{part}": error.why for part, error in wholes.items()}
    for name, plan in plans.items():
        like = blocks if len(known) == 1 else name
        why_whole |= {f"{like}.{inner}": why for inner, why in plan.whole.items()}
    no_sp = {blocks: why_no_sp} if whole else {}
    return _StackPlan(out, reasons, _whole_rules(trace, flows, blocks, sharded), why_whole, no_sp)


@dataclass
class _PlannedBlocks:
    """The plans of the blocks of one stack.

    Attributes:
        kinds: the plan of each kind of block.
        examples: the data flow of a block of each kind.
        of_block: the plan of each block, by all its names.
        wholes: the parts that can't be split, by their name inside a block, each with the reason.
    """

    kinds: list[BlockPlan]
    examples: list[BlockFlow]
    of_block: dict[str, BlockPlan]
    wholes: dict[str, CantInferError]


def _plan_blocks(
    trace: ForwardTrace,
    model: nn.Module,
    flows: Sequence[BlockFlow],
    names: Sequence[str],
    tp: int,
    user_rules: _UserRules,
    *,
    sums: bool,
) -> _PlannedBlocks:
    """Plan each kind of block; what can't be split is left whole in all of them, and the rest is planned again.

    Raises:
        CantInferError: if a row can't be planned and no part around it could be whole, or the user should decide.
    """
    wholes: dict[str, CantInferError] = {}

    def covers(*asked: str) -> bool:
        parts = [f"{name}.{inner}" for name in names for inner in wholes]
        return user_rules.covers(*asked) or any(inside(one, part) for one in asked for part in parts)

    while True:
        plans: dict[Any, BlockPlan] = {}
        of_block: dict[str, BlockPlan] = {}
        examples: list[BlockFlow] = []
        for flow in flows:
            key = _likeness(flow, model)
            if key not in plans:
                try:
                    plans[key] = BlockPlanner(trace, model, flow, tp, covers, names, sums=sums).make()
                except CantInferError as error:
                    part = error.whole[len(flow.name) + 1 :]
                    if part:
                        error.rules = _whole_rules(trace, flows, pattern_of(names), [part])
                    if not part or part in wholes or isinstance(error, UserDecidesError):
                        error.block = flow.name
                        raise
                    wholes = {one: why for one, why in wholes.items() if not inside(one, part)} | {part: error}
                    break
                examples.append(flow)
            of_block.update(dict.fromkeys(_all_names(model, [flow.name]), plans[key]))
        else:
            return _PlannedBlocks([*plans.values()], examples, of_block, wholes)


def _positions(trace: ForwardTrace, flow: BlockFlow) -> str:
    """Why no one dim of a block's activation is the sequence."""
    shape = list(trace.values[flow.call.args[flow.arg]].shape)
    if len(shape) > 3:
        return f"its activation {shape} has positions in {len(shape) - 2} dims"
    return f"both the first and the second dim of its activation {shape} mix (a batch norm?)"


def _whole_rules(
    trace: ForwardTrace, flows: Sequence[BlockFlow], blocks: str, wholes: Iterable[str]
) -> list[dict[str, Any]]:
    """The rules for parts of the blocks that are computed whole, with the arguments that hold the activation."""
    out: list[dict[str, Any]] = []
    for inner in wholes:
        flow = next(flow for flow in flows if trace.calls_of(f"{flow.name}.{inner}"))
        call = next(c for c in trace.calls_of(f"{flow.name}.{inner}") if c.first_op >= flow.call.first_op)
        made, shape = made_of_activation(trace, flow), trace.values[flow.call.args[flow.arg]].shape
        args = [key for key, value in call.args.items() if value in made and trace.values[value].shape == shape]
        out.append(
            {"pattern": f"{blocks}.{inner}", "style": "whole", **({"args": args} if args not in ([], [0]) else {})}
        )
    return out


def _refuse_idle_stack(first: str, plans: Iterable[BlockPlan], wholes: Iterable[CantInferError] = ()) -> None:
    """Refuse a stack without a row linear.

    Args:
        first: name of the first block.
        plans: the plans of its blocks.
        wholes: why parts of them can't be split.

    Raises:
        CantInferError: naming the block.
    """
    if not any(style in ("row", "replace") for plan in plans for _, style, _ in plan.rules):
        if reasons := [error.why for error in wholes]:
            raise CantInferError(
                f"{'; '.join(reasons)}\n  With these parts computed whole nothing of the block is left to shard: no plan was "
                "found for it"
            )
        raise CantInferError(
            f"{first}: no pair of linears is found in it, of which the second one's output is added to the block's "
            "input; name them: {pattern: ..., style: column} and {pattern: ..., style: row}"
        )


def _exit_rules(
    trace: ForwardTrace, model: nn.Module, names: Sequence[str], blocks: str, *, alone: bool
) -> list[dict[str, Any]]:
    """The rules for the end of a stack's region, if it is not the last block.

    Args:
        trace: the recorded forward.
        model: the copy.
        names: all names of the stack's blocks.
        blocks: the pattern of the blocks.
        alone: whether no other stack has the same owner.
    """
    owner = owner_of(model, names[0])
    if type(model.get_submodule(owner)) is nn.TransformerEncoder:
        return [{"pattern": owner, "style": "replace"}, {"pattern": owner, "style": "exit"}]
    exit_at = find_exit(trace, names)
    if exit_at is None:
        return []
    return [{"pattern": exit_at, "style": "exit", **({} if alone else {"blocks": blocks})}]


def _refuse_unknown_linears(
    trace: ForwardTrace, model: nn.Module, blocks: Sequence[Call], user_rules: _UserRules
) -> None:
    """Refuse a subclass of ``nn.Linear`` that may compute something else (quantised?), unless the user's rules decide it.

    One that returns more than one tensor (a router) is not taken for a linear.

    Raises:
        UnknownLinearError: naming the module and the rule to write.
    """
    for call in trace.calls:
        module = call.module
        unknown = isinstance(module, nn.Linear) and linear_kind(module) is None and len(call.outputs) == 1
        unknown = unknown and not is_parametrized(module)  # what it computes is known: its part is left whole
        if unknown and any(inside(call.name, block.name) for block in blocks) and not user_rules.covers(call.name):
            error = UnknownLinearError(
                f"{call.name}: a {type(module).__name__}, which is not known to compute what nn.Linear does (is it quantised?)"
            )
            block = next(block.name for block in blocks if inside(call.name, block.name))
            around = call.name.rpartition(".")[0]
            part = (around if around != block else call.name)[len(block) + 1 :]
            stack = pattern_of(_all_names(model, [one.name for one in blocks]))
            error.rules = [{"pattern": f"{stack}.{part}", "style": "whole"}]
            raise error


def _all_names(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """All names of the blocks, in the model's order; in the copy of a large model one module has the names of many blocks."""
    objects = {id(model.get_submodule(name)) for name in blocks}
    return [name for name, module in model.named_modules(remove_duplicate=False) if id(module) in objects]


def _likeness(flow: BlockFlow, model: nn.Module) -> Any:
    """A key that is equal for blocks that get the same plan: classes, shapes and data flow."""
    cut = len(flow.name) + 1
    block = model.get_submodule(flow.name)
    shapes = tuple((name, type(m)) for name, m in block.named_modules())
    weights = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
    return (
        shapes,
        weights,
        flow.arg,
        tuple(row[cut:] for row in flow.rows),
        tuple((name[cut:], style, tuple(args)) for (name, style), args in flow.gathers.items()),
        tuple((name[cut:], tuple(args)) for name, args in flow.sums.items()),
    )


def _compress(names: Sequence[str], plans: Mapping[str, BlockPlan]) -> list[dict[str, Any]]:
    """Rules over patterns: each rule once for all blocks that have it, in the order in which they first appear."""
    holders: dict[str, list[str]] = defaultdict(list)
    rules: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for name in names:
        for rule in plans[name].rules:
            key = repr(rule)
            rules[key] = rule
            holders[key].append(name)
    out = []
    for key, (inner, style, options) in rules.items():
        named = holders[key]
        if len(named) == len(names):
            block = pattern_of(names)
        else:
            parent = named[0].rpartition(".")[0]
            leaves = ",".join(name.rpartition(".")[2] for name in named)
            block = (f"{parent}." if parent else "") + (f"{{{leaves}}}" if len(named) > 1 else leaves)
        out.append({"pattern": f"{block}.{inner}" if inner else block, "style": style, **options})
    return out
