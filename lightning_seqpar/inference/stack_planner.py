"""The stacks of repeated blocks in a recorded forward, and the plan of each, as rules over patterns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_seqpar.inference.block_kinds import kind_of, owner_of
from lightning_seqpar.inference.block_planner import BlockPlan, BlockPlanner, pattern_of
from lightning_seqpar.inference.dataflow import BlockFlow, CantInferError, UserDecidesError
from lightning_seqpar.inference.feature_dependence import Block, mixes_positions
from lightning_seqpar.inference.gather_points import read_blocks
from lightning_seqpar.inference.trace import Call, ForwardTrace
from lightning_seqpar.layout.linear_kind import holds_variants, is_parametrized, linear_kind
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.plan.sharding_plan import ShardingPlan


def find_stacks(trace: ForwardTrace) -> list[list[Call]]:
    """Find the repeated blocks: for each stack, the first call of every block, in order of execution.

    A block maps an activation to one of the same shape and holds at least two matrices. It stands in a list, or is one of
    several modules of one class, or is called several times. Of nested candidates the outermost is the block. A module
    outside lists that holds a list of modules that feed each other is no block but the owner of blocks: an encoder and a
    decoder may be of one class.
    """

    def fits(call: Call) -> bool:
        module = call.module
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.MultiheadAttention)
        if not call.name or is_list or not any(True for _ in module.children()) or trace.activation(call) is None:
            return False
        # Blocks of images are candidates if they hold linears: of convolutions alone nothing is sharded.
        is_image = len(trace.values[call.outputs[0]].shape) >= 4
        return sum(p.ndim == 2 if is_image else p.ndim >= 2 for p in module.parameters()) >= 2

    fitting = [call for call in trace.calls if fits(call)]
    by_kind: dict[tuple[str, type], list[Call]] = defaultdict(list)
    for call in fitting:
        by_kind[_parent(call.name), type(call.module)].append(call)
    listed = {call.id: call for call in fitting if _is_listed(trace.model, call.name)}
    repeated: set[str] = set()
    for calls in by_kind.values():
        chained = len(calls) > 1 and not any(_holds_a_chain(trace, call, listed.values()) for call in calls)
        if calls[0].id in listed or chained:
            repeated |= {call.name for call in calls}
    outermost = [call for call in fitting if call.name in repeated and not _encloses(trace, call, repeated)]
    outermost = _without_lone_mlps(trace, outermost)
    stacks: dict[str, list[Call]] = defaultdict(list)
    for call in outermost:
        stack = stacks[_parent(call.name)]
        if all(call.name != other.name for other in stack):
            stack.append(call)
    return list(stacks.values())


def _without_lone_mlps(trace: ForwardTrace, calls: Sequence[Call]) -> list[Call]:
    """Candidates for blocks without those that stand for themselves and relate no positions, if others do relate them.

    An MLP in front of the transformer is none of its blocks, also where it stands in the same list. One behind the first block of
    a list (a feed-forward module of its own) is, and so are several of one class in a list, which repeat. Lists in a list
    (``[norm, attention, residual]``, ``[norm, feed-forward, residual]``, ...) are one.
    """
    mixing = [call for call in calls if any(op.name in _RELATING for op in trace.ops_in(call)) or _multiplies(trace, call)]
    within = {call.name: _outer_list(trace.model, _parent(call.name)) for call in calls}
    first = {within[call.name]: call.id for call in reversed(mixing)}
    if not first:
        return list(calls)
    alike: dict[tuple[str, type], set[str]] = defaultdict(set)
    for call in (one for one in calls if _is_listed(trace.model, one.name)):
        alike[within[call.name], type(call.module)].add(call.name)
    mixes = {call.name for call in mixing}
    return [
        call
        for call in calls
        if call.name in mixes
        or len(alike[within[call.name], type(call.module)]) > 1
        or first.get(within[call.name], call.id) < call.id
    ]


def _outer_list(model: nn.Module, name: str) -> str:
    """The name of the outermost list that has the list ``name`` in it, itself if it is in none."""
    while isinstance(model.get_submodule(_parent(name)), nn.ModuleList) and _parent(name):
        name = _parent(name)
    return name


_RELATING = ("convolution", "cumsum", "_fft_r2c", "_fft_c2c", "flip", "roll")
"""Operations by which positions see each other, besides attention's own and products of two activations."""


def _multiplies(trace: ForwardTrace, call: Call) -> bool:
    """Whether activations are multiplied with each other inside a call, as attention does: no factor is a parameter."""
    for op in trace.ops_in(call):
        if "scaled_dot_product" in op.name or "attention" in op.name:
            return True
        factors = [trace.values[one] for one in op.inputs if len(trace.values[one].shape) > 1]
        if op.name in ("mm", "bmm", "baddbmm") and len(factors) > 1 and all(one.parameter is None for one in factors):
            return True
    return False


def only_convolutions(model: nn.Module) -> str:
    """The pattern and class of a model's repeated modules if they hold convolutions and none of them a linear; else empty."""
    sizes: dict[tuple[str, type], int] = defaultdict(int)
    for name, module in model.named_modules():
        if not _is_listed(model, name):
            continue
        # A single linear in a list is a head: nothing repeats around it.
        if sum(parameter.ndim == 2 for parameter in module.parameters()) > 1:
            return ""
        if any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules()) and any(True for _ in module.children()):
            sizes[_parent(name), type(module)] += sum(parameter.numel() for parameter in module.parameters())
    if not sizes:
        return ""
    parent, kind = max(sizes, key=lambda key: sizes[key])
    return f"{parent}.*, of class {kind.__name__}"


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_listed(model: nn.Module, name: str) -> bool:
    parent = _parent(name)
    return bool(parent) and isinstance(model.get_submodule(parent), nn.ModuleList | nn.Sequential)


def _holds_a_chain(trace: ForwardTrace, call: Call, listed: Iterable[Call]) -> bool:
    """Whether inside the call a module of a list works on what the one before it returned, as blocks do and experts don't."""
    last: dict[tuple[str, type], Call] = {}
    for one in listed:
        if call.first_op <= one.first_op < call.last_op and _encloses(trace, one, {call.name}):
            kind = _parent(one.name), type(one.module)
            before, key = last.get(kind), trace.activation(one)
            assert key is not None
            if before and trace.values[one.args[key]].root == trace.values[before.outputs[0]].root:
                return True
            last[kind] = one
    return False


def _encloses(trace: ForwardTrace, call: Call, among: set[str]) -> bool:
    return any(trace.calls[number].name in among for number in call.around)


def find_exit(trace: ForwardTrace, blocks: Sequence[str]) -> str | None:
    """The norm at whose output the region ends, if nothing else reads the last block's; None if it ends with that block."""
    calls = [call for call in trace.calls if call.name in blocks]
    last = max(calls, key=lambda call: call.last_op)
    root = trace.values[last.outputs[0]].root
    readers = [op for op in trace.ops[last.last_op :] if any(trace.values[n].root == root for n in op.inputs)]
    depth = len(last.around)
    heads = {op.stack[depth] if len(op.stack) > depth else -1 for op in readers}
    if len(heads) != 1 or -1 in heads:
        return None
    call = trace.calls[heads.pop()]
    takes = any(trace.values[value].root == root for value in call.args.values())
    same = bool(call.outputs) and trace.values[call.outputs[0]].shape == trace.values[last.outputs[0]].shape
    return call.name if _is_norm(call.module) and same and takes else None


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is one of torch's norms, or is called a norm and has vectors alone."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    own = [*module.parameters()]
    leaf = not any(True for _ in module.children())
    return leaf and "norm" in type(module).__name__.lower() and {one.ndim for one in own} == {1}


@dataclass
class Inference:
    """An inferred plan: of a model, or of one stack of its blocks."""

    rules: list[dict[str, Any]] = field(default_factory=list)  # as data
    reasons: list[str] = field(default_factory=list)  # why they are as they are, a sentence each
    # Rules, each of which has one sharded part of the blocks computed whole.
    parts: list[dict[str, Any]] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)  # patterns of modules that are left whole, with the reasons
    no_sp: dict[str, str] = field(default_factory=dict)  # patterns of blocks that are given whole sequences, likewise

    @property
    def plan(self) -> ShardingPlan:
        """The rules as a plan."""
        return ShardingPlan.from_rules(self.rules, source="inferred")

    def add(self, other: Inference) -> None:
        """Add what is planned for other blocks."""
        self.rules += other.rules
        self.reasons += other.reasons
        self.parts += other.parts
        self.whole |= other.whole
        self.no_sp |= other.no_sp


class StackPlanner:
    """Plans the stacks of one model; ``covers`` and ``sums`` are as in :class:`BlockPlanner`."""

    def __init__(self, trace: ForwardTrace, tp: int, covers: Callable[..., bool], *, sums: bool) -> None:
        self._trace, self._model, self._tp = trace, trace.model, tp
        self._covers, self._sums = covers, sums

    def plan(self, calls: Sequence[Call], *, alone: bool) -> Inference:
        """The plan of one stack; kinds of blocks in it that can't be planned at all stay whole, between whole sequences.

        ``calls`` are the first of each block; ``alone`` says whether no other stack has the same owner. Raises CantInferError if
        nothing is left of the stack that could be planned, or no block has a row.
        """
        left: dict[str, str] = {}
        first: CantInferError | None = None
        rest = list(calls)
        while True:
            try:
                plan = self._plan_rest(rest, left, alone=alone)
                plan.add(left_whole(left))
                return plan
            except UserDecidesError:
                raise
            except CantInferError as error:
                first = first or error
                kind = kind_of(self._trace.modules[error.block]) if error.block else None
                failing = [call for call in rest if kind is not None and kind_of(call.module) == kind]
                rest = [call for call in rest if call not in failing]
                if not failing or not rest:
                    raise first from None
                left[pattern_of_all(self._model, failing)] = error.why

    def _plan_rest(self, calls: Sequence[Call], left: Mapping[str, str], *, alone: bool) -> Inference:
        """The plan of a stack's blocks, of which some others are left whole: ``left``, by pattern with the reason."""
        trace, model = self._trace, self._model
        mixing: dict[Any, bool] = {}

        def mixes(flow: BlockFlow, row: str) -> bool:
            key = (row[len(flow.name) :], _likeness(flow))
            if key not in mixing:
                mixing[key] = mixes_positions(flow, row)
            return mixing[key]

        self._refuse_unknown_linears(calls)
        flows = read_blocks(trace, calls, mixes, sums=self._sums)
        names = all_names(model, [flow.name for flow in flows])
        examples, plans, wholes = self._plan_blocks(flows, names)
        known = [plans[flow.name] for flow in examples]
        dims = {flow.name: Block(flow).sequence_dim() for flow in examples}
        _refuse_idle_stack(model, flows[0].name, known, wholes.values())
        blocks = pattern_of(model, names)
        dim = next(iter(dims.values())) if len(set(dims.values())) == 1 else None
        streams = dict.fromkeys(key for flow in flows for key in flow.streams)
        why_no_sp = _why_whole_sequences(flows, known, dims, left)
        where = {"style": "blocks", **({} if dim is None else {"dim": dim}), **({"sp": False} if why_no_sp else {})}
        out: list[dict[str, Any]] = [{"pattern": blocks, **where}]
        args = {name: flow.arg for flow in flows if flow.arg != 0 for name in all_names(model, [flow.name])}
        for arg in dict.fromkeys(args.values()):
            out.append({"pattern": pattern_of(model, [n for n in names if args.get(n) == arg]), "style": "scatter", "arg": arg})
        out += _compress(model, names, plans)
        out += _whole_rules(flows, blocks, wholes)
        out += _exit_rules(trace, model, names, blocks, alone=alone)
        kinds = "" if len(known) == 1 else f" of {len(known)} kinds"
        at = [] if dim is None else [f"sequence at dim {dim}"]
        at += [f"{why_no_sp}: no sequence parallelism here"] if dim is None or streams or left else []
        reasons = [f"{blocks}: {len(names)} block{'s' * (len(names) > 1)}{kinds}, {', '.join(at)}"]
        reasons += [reason for plan in known for reason in plan.reasons]
        reasons += [f"{blocks}.{part}: computed whole on every rank: {error.why}" for part, error in wholes.items()]
        sharded = dict.fromkeys(part for plan in known for part in plan.parts)
        why_whole = {f"{blocks}.{part}": error.why for part, error in wholes.items()}
        for name, plan in plans.items():
            like = blocks if len(known) == 1 else name
            why_whole |= {f"{like}.{inner}": why for inner, why in plan.whole.items()}
        no_sp = {blocks: why_no_sp} if why_no_sp else {}
        return Inference(out, reasons, _whole_rules(flows, blocks, sharded), why_whole, no_sp)

    def _plan_blocks(
        self, flows: Sequence[BlockFlow], names: Sequence[str]
    ) -> tuple[list[BlockFlow], dict[str, BlockPlan], dict[str, CantInferError]]:
        """Plan each kind of block; what can't be split is left whole in all of them, and the rest is planned again.

        A block of each kind, the plans by all names of each block, and by its name inside a block what can't be split.
        """
        model = self._model
        wholes: dict[str, CantInferError] = {}

        def covers(*asked: str) -> bool:
            parts = [f"{name}.{inner}" for name in names for inner in wholes]
            return self._covers(*asked) or any(inside(one, part) for one in asked for part in parts)

        while True:
            plans: dict[Any, BlockPlan] = {}
            of_block: dict[str, BlockPlan] = {}
            examples: list[BlockFlow] = []
            for flow in flows:
                key = _likeness(flow)
                if key not in plans:
                    try:
                        plans[key] = BlockPlanner(flow, self._tp, covers, names, sums=self._sums).make()
                    except CantInferError as error:
                        part = error.whole[len(flow.name) + 1 :]
                        if part:
                            error.rules = _whole_rules(flows, pattern_of(model, names), [part])
                        if not part or part in wholes or isinstance(error, UserDecidesError):
                            error.block = flow.name
                            raise
                        wholes = {one: why for one, why in wholes.items() if not inside(one, part)} | {part: error}
                        break
                    examples.append(flow)
                of_block.update(dict.fromkeys(all_names(model, [flow.name]), plans[key]))
            else:
                return examples, of_block, wholes

    def _refuse_unknown_linears(self, calls: Sequence[Call]) -> None:
        """Refuse a subclass of ``nn.Linear`` that may compute something else (quantised?), unless the user's rules decide it."""
        for call in self._trace.calls:
            module, block = call.module, next((one.name for one in calls if inside(call.name, one.name)), None)
            # A router returns more than one tensor; what a parametrized one computes is known: its part is left whole.
            is_linear = isinstance(module, nn.Linear) and len(call.outputs) == 1 and not is_parametrized(module)
            if is_linear and linear_kind(module) is None and block is not None and not self._covers(call.name):
                error = UserDecidesError(
                    f"{call.name}: a {type(module).__name__}, which is not known to compute what nn.Linear does (is it quantised?)"
                )
                around = call.name.rpartition(".")[0]
                part = (around if around != block else call.name)[len(block) + 1 :]
                error.rules = [{"pattern": f"{pattern_of_all(self._model, calls)}.{part}", "style": "whole"}]
                raise error


def _why_whole_sequences(
    flows: Sequence[BlockFlow], plans: Iterable[BlockPlan], dims: Mapping[str, int | None], left: Iterable[str]
) -> str:
    """Why the blocks are given whole sequences; empty if they are given shards."""
    found = list(dict.fromkeys(dims.values()))
    if len(found) > 1:
        return f"its blocks have their sequence at different dims ({dims})"
    if found == [None]:
        shape = list(flows[0].trace.values[flows[0].activations[0]].shape)
        if len(shape) > 3:
            return f"its activation {shape} has positions in {len(shape) - 2} dims"
        return f"both the first and the second dim of its activation {shape} mix (a batch norm?)"
    if streams := dict.fromkeys(key for flow in flows for key in flow.streams):
        return f"argument {', '.join(map(repr, streams))} is an activation too"
    if names := ", ".join(left):
        return f"{names} stay whole between these blocks"
    return next((plan.no_sp for plan in plans if plan.no_sp), "")


def left_whole(blocks: dict[str, str]) -> Inference:
    """The plan of blocks that every rank has whole: patterns, each with the reason."""
    reasons = [f"{pattern}: every rank has these blocks whole: {why}" for pattern, why in blocks.items()]
    return Inference(reasons=reasons, whole=blocks)


def _whole_rules(flows: Sequence[BlockFlow], blocks: str, wholes: Iterable[str]) -> list[dict[str, Any]]:
    """The rules for parts of the blocks that are computed whole, with the arguments that hold the activation."""
    values, out = flows[0].trace.values, []
    for inner in wholes:
        flow = next(flow for flow in flows if flow.trace.calls_of(f"{flow.name}.{inner}"))
        shape = values[flow.call.args[flow.arg]].shape
        given = flow.call_of(f"{flow.name}.{inner}").args.items()
        args = [key for key, value in given if value in flow.made and values[value].shape == shape]
        options = {"args": args} if args not in ([], [0]) else {}
        out.append({"pattern": f"{blocks}.{inner}", "style": "whole", **options})
    return out


def _refuse_idle_stack(model: nn.Module, first: str, plans: Iterable[BlockPlan], wholes: Iterable[CantInferError] = ()) -> None:
    """Refuse a stack without a row linear; with adapters in all its linears it may be whole, between shards of the sequence."""
    if not any(style in ("row", "replace") for plan in plans for _, style, _ in plan.rules):
        reasons = [error.why for error in wholes]
        if reasons and holds_variants(model):
            return
        if reasons:
            raise CantInferError(
                f"{'; '.join(reasons)}\n  With these parts computed whole nothing of the block is left to shard: no plan was "
                "found for it"
            )
        advice = "name them: {pattern: ..., style: column} and {pattern: ..., style: row}"
        for name, module in model.get_submodule(first).named_modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and {*module.kernel_size} == {1}:
                advice = (
                    f"{name} is a convolution of kernel 1, and linears alone are sharded: write it as nn.Linear, on [b, s, c]"
                )
                break
        raise CantInferError(
            f"{first}: no pair of linears is found in it, of which the second one's output is added to the block's input; {advice}"
        )


def _exit_rules(
    trace: ForwardTrace, model: nn.Module, names: Sequence[str], blocks: str, *, alone: bool
) -> list[dict[str, Any]]:
    owner = owner_of(model, names[0])
    if type(model.get_submodule(owner)) is nn.TransformerEncoder:
        return [{"pattern": owner, "style": "replace"}, {"pattern": owner, "style": "exit"}]
    exit_at = find_exit(trace, names)
    if exit_at is None:
        return []
    return [{"pattern": exit_at, "style": "exit", **({} if alone else {"blocks": blocks})}]


def all_names(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """All names of the blocks, in the model's order; in the copy of a large model one module has the names of many blocks."""
    objects = {id(model.get_submodule(name)) for name in blocks}
    return [name for name, module in model.named_modules(remove_duplicate=False) if id(module) in objects]


def pattern_of_all(model: nn.Module, calls: Iterable[Call]) -> str:
    """The pattern of the blocks of which these are calls."""
    return pattern_of(model, all_names(model, [call.name for call in calls]))


def _likeness(flow: BlockFlow) -> Any:
    """A key that is equal for blocks that get the same plan: classes, shapes and data flow."""
    cut, block = len(flow.name) + 1, flow.call.module
    return (
        tuple((name, type(m)) for name, m in block.named_modules()),
        tuple((name, tuple(p.shape)) for name, p in block.named_parameters()),
        flow.arg,
        tuple(row[cut:] for row in flow.rows),
        tuple((name[cut:], style, tuple(args)) for (name, style), args in flow.gathers.items()),
        tuple((name[cut:], tuple(args)) for name, args in flow.sums.items()),
    )


def _compress(model: nn.Module, names: Sequence[str], plans: Mapping[str, BlockPlan]) -> list[dict[str, Any]]:
    """Rules over patterns: each rule once for all blocks that have it, in the order in which they first appear."""
    found: dict[str, tuple[tuple[str, str, dict[str, Any]], list[str]]] = {}
    for name in names:
        for rule in plans[name].rules:
            found.setdefault(repr(rule), (rule, []))[1].append(name)
    return [
        {"pattern": f"{pattern_of(model, holders)}.{inner}".rstrip("."), "style": style, **options}
        for (inner, style, options), holders in found.values()
    ]
