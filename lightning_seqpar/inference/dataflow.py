"""What a recorded forward says of a model: its blocks, which linears are rows and columns, where to gather."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn

from lightning_seqpar.inference.trace import Call, ForwardTrace, Op, Value
from lightning_seqpar.layout.module_names import Argument

RES = "<residual>"
"""Stands for the block's activation among upstream linears."""
ENC = "<other input>"
"""Stands for the block's other inputs."""
_SUMS = ("add", "sub", "rsub", "addcmul", "lerp", "_foreach_add")
_NORMS = (nn.LayerNorm, nn.RMSNorm)


class CantInferError(ValueError):
    """The data flow does not say how to shard; the message names the module and the rule to write."""


class UnknownLinearError(CantInferError):
    """A linear of a class that is not known to compute what ``nn.Linear`` does: refused, never left aside."""


@dataclass
class Linear:
    """One product of an activation and a parameter, in one block.

    Attributes:
        name: the module that owns the weight (or an ``nn.MultiheadAttention``); the parameter's own name where the module
            multiplies it beside others.
        parameter: the weight's name; empty for an ``nn.MultiheadAttention``.
        upstream: the nearest linears that its input comes from, or :data:`RES`, :data:`ENC`.
        op: index of the product.
        reads: the activation that it reads.
        makes: what it makes.
    """

    name: str
    parameter: str
    upstream: frozenset[str]
    op: int
    reads: int
    makes: tuple[int, ...]

    @property
    def is_raw(self) -> bool:
        """Whether it is a parameter that a module multiplies itself."""
        return self.name == self.parameter


@dataclass
class BlockFlow:
    """The data flow of one block.

    ``sums`` holds the modules that return partial sums, with the arguments to gather for them: those that multiply parameters
    themselves, and those that give some of the tokens to each of their rows (experts in a list).
    """

    call: Call
    arg: Argument
    linears: dict[str, Linear] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    columns: dict[str, list[str]] = field(default_factory=dict)
    gathers: dict[tuple[str, str], list[Argument]] = field(default_factory=dict)
    attentions: list[str] = field(default_factory=list)
    sums: dict[str, list[Argument]] = field(default_factory=dict)
    residual_in: dict[str, bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the block."""
        return self.call.name

    def tokens(self, trace: ForwardTrace) -> tuple[int, ...]:
        """The activation's shape without its features: ``(b, s)``, or the number of flat tokens."""
        return trace.values[self.call.args[self.arg]].shape[:-1]

    @property
    def all_columns(self) -> list[str]:
        """Columns of all rows, each once."""
        return list(dict.fromkeys(column for row in self.rows for column in self.columns[row]))


# ---- blocks ----------------------------------------------------------------------------------------------------


def activation(trace: ForwardTrace, call: Call) -> Argument | None:
    """The argument that the call maps to an output of the same shape: the activation."""
    if not call.outputs:
        return None
    out = trace.values[call.outputs[0]]
    if not out.floating or len(out.shape) not in (2, 3):
        return None
    for key, value in call.args.items():
        given = trace.values[value]
        if given.floating and given.shape == out.shape:
            return key
    return None


def find_stacks(trace: ForwardTrace, model: nn.Module) -> list[list[Call]]:
    """The repeated blocks, by stack: first calls, in order of execution.

    A block maps an activation to one of the same shape, holds linears, and is one of several alike, or is called
    several times; of nested candidates the outermost counts. Modules that stand in no list and hold a list whose
    modules feed each other are owners of blocks, such as the encoder and the decoder of one class.
    """
    weighty = {
        name
        for name, module in model.named_modules()
        if name
        and not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.MultiheadAttention)
        and any(True for _ in module.children())
        and sum(parameter.ndim >= 2 for parameter in module.parameters()) >= 2
    }
    fitting = [call for call in trace.calls if call.name in weighty and activation(trace, call) is not None]
    by_kind: dict[tuple[str, type], list[Call]] = defaultdict(list)
    for call in fitting:
        by_kind[_parent(call.name), type(call.module)].append(call)
    listed = {call.id: call for call in fitting if _is_listed(model, call.name)}
    repeated: set[str] = set()
    for calls in by_kind.values():
        if calls[0].id in listed or (
            len(calls) > 1 and not any(_holds_a_chain(trace, call, listed.values()) for call in calls)
        ):
            repeated |= {call.name for call in calls}
    outermost = [call for call in fitting if call.name in repeated and not _encloses(trace, call, repeated)]
    stacks: dict[str, list[Call]] = defaultdict(list)
    for call in outermost:
        stack = stacks[_parent(call.name)]
        if all(call.name != other.name for other in stack):
            stack.append(call)
    return list(stacks.values())


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_listed(model: nn.Module, name: str) -> bool:
    parent = _parent(name)
    return bool(parent) and isinstance(model.get_submodule(parent), nn.ModuleList | nn.Sequential)


def _holds_a_chain(trace: ForwardTrace, call: Call, listed: Iterable[Call]) -> bool:
    """Whether inside the call a listed module works on what the one before it returned; experts work side by side."""
    last: dict[tuple[str, type], Call] = {}
    for one in listed:
        if call.first_op <= one.first_op < call.last_op and _encloses(trace, one, {call.name}):
            kind = _parent(one.name), type(one.module)
            before, key = last.get(kind), activation(trace, one)
            assert key is not None
            if before and trace.values[one.args[key]].root == trace.values[before.outputs[0]].root:
                return True
            last[kind] = one
    return False


def _encloses(trace: ForwardTrace, call: Call, among: set[str]) -> bool:
    at = call.parent
    while at is not None:
        if trace.calls[at].name in among:
            return True
        at = trace.calls[at].parent
    return False


# ---- the flow of one block -------------------------------------------------------------------------------------


class _Flow:
    def __init__(self, trace: ForwardTrace, call: Call, model: nn.Module) -> None:
        self.trace, self.call, self.model = trace, call, model
        arg = activation(trace, call)
        assert arg is not None
        self.out = BlockFlow(call, arg)
        self.up: dict[int, frozenset[str]] = {}
        self.rows: dict[str, None] = {}
        self.ops = trace.ops_in(call)
        self.shape = trace.values[call.args[arg]].shape

    def value(self, number: int) -> Value:
        return self.trace.values[number]

    def run(self) -> BlockFlow:
        for key, number in self.call.args.items():
            mark = RES if key == self.out.arg else ENC
            if self.value(number).floating:
                self.up[number] = frozenset({mark})
        attention: Call | None = None
        for op in self.ops:
            inside = self._attention_of(op)
            if attention is not None and inside is not attention:
                self._close(attention)
            attention = inside
            if attention is None:
                self._step(op)
        if attention is not None:
            self._close(attention)
        self._leave()
        self._order()
        return self.out

    def _attention_of(self, op: Op) -> Call | None:
        for number in op.stack:
            call = self.trace.calls[number]
            if call.id > self.call.id and isinstance(call.module, nn.MultiheadAttention):
                return call
        return None

    def _close(self, call: Call) -> None:
        upstream = self._union(call.args.values())
        reads = call.args.get(0, call.args.get("query", -1))
        self.out.linears[call.name] = Linear(call.name, "", upstream, call.first_op, reads, tuple(call.outputs))
        if call.name not in self.out.attentions:
            self.out.attentions.append(call.name)
        for number in call.outputs:
            self.up[number] = frozenset({call.name})

    def _union(self, numbers: Iterable[int]) -> frozenset[str]:
        return frozenset().union(*(self.up.get(number, frozenset()) for number in numbers))

    def _step(self, op: Op) -> None:
        weights = [n for n in op.inputs if (v := self.value(n)).parameter is not None and len(v.shape) >= 2]
        others = [n for n in op.inputs if self.value(n).parameter is None]
        if op.is_product and len(weights) == 1 and others:
            self._product(op, weights[0], others)
            return
        result: frozenset[str] = frozenset()
        if not op.is_empty:
            result = self._union(op.inputs)
        if op.name in _SUMS:
            result = self._sum(op, result)
        for number in op.outputs:
            if self.value(number).floating:
                self.up[number] = self.up.get(number, frozenset()) | result if op.name == "rewrite" else result

    def _product(self, op: Op, weight: int, others: list[int]) -> None:
        parameter = self.value(weight).parameter
        assert parameter is not None
        owner = parameter if self._is_raw(parameter) else parameter.rpartition(".")[0]
        upstream = self._union(others)
        known = self.out.linears.get(owner)
        if known is not None and known.parameter != parameter:
            owner = parameter  # a module with several weights: each stands for itself
            known = self.out.linears.get(owner)
        if known is None:
            self.out.linears[owner] = Linear(owner, parameter, upstream, op.index, others[0], op.outputs)
        else:
            known.upstream |= upstream
            known.makes += op.outputs
        for number in op.outputs:
            self.up[number] = frozenset({owner})

    def _is_raw(self, parameter: str) -> bool:
        """Whether a module multiplies the parameter beside others, or as one of many matrices: it is no linear then."""
        owner, _, leaf = parameter.rpartition(".")
        own = [p for p in self.model.get_submodule(owner)._parameters.values() if p is not None and p.ndim > 1]
        return len(own) > 1 or leaf != "weight" or own[0].ndim > 2

    def _sum(self, op: Op, result: frozenset[str]) -> frozenset[str]:
        sides = [self.up[n] for n in op.inputs if self.up.get(n)]
        through = [side for side in sides if RES in side]
        added = [side for side in sides if RES not in side]
        if through and added and self._is_activation(op.outputs[0]):
            for side in added:
                for name in sorted(side - {ENC}):
                    self.rows[name] = None
            return frozenset({RES})
        return result

    def _is_activation(self, number: int) -> bool:
        shape = self.value(number).shape
        whole = 1
        for size in self.shape:
            whole *= size
        count = 1
        for size in shape:
            count *= size
        return count == whole and shape[-1] == self.shape[-1]

    def _leave(self) -> None:
        """What leaves the block without a residual was made by rows too."""
        for name in sorted(self._union(self.call.outputs[:1]) - {RES, ENC}):
            self.rows[name] = None
        # A linear between two pairs: its own input comes from linears, and it feeds a column.
        while True:
            fresh: dict[str, None] = {}
            for row in self.rows:
                for column in self.out.linears[row].upstream - {RES, ENC}:
                    for feeding in self.out.linears[column].upstream - {RES, ENC}:
                        deep = self.out.linears[feeding].upstream - {RES, ENC}
                        if feeding not in self.rows and deep:
                            fresh[feeding] = None
            if not fresh:
                return
            self.rows.update(fresh)

    def _order(self) -> None:
        linears = self.out.linears
        order = list(linears)
        for row in sorted(self.rows, key=order.index):
            found = linears[row]
            if row in self.out.attentions:
                self.out.rows.append(row)
                self.out.columns[row] = []
                continue
            columns = sorted(found.upstream - {RES, ENC}, key=order.index)
            if not columns:
                continue  # it reads the residual and is added straight back: whole, on shards
            self.out.rows.append(row)
            self.out.columns[row] = columns
            self.out.residual_in[row] = RES in found.upstream


def read_blocks(
    trace: ForwardTrace,
    calls: Iterable[Call],
    model: nn.Module,
    mixes: Callable[[BlockFlow, str], bool],
    *,
    sums: bool = True,
) -> list[BlockFlow]:
    """The data flow of every block, one call each; ``mixes`` says whether positions mix between columns and a row.

    With ``sums`` a module that deals tokens out to experts is entered whole and returns a sum; else each expert gathers.
    """
    flows = [_Flow(trace, call, model).run() for call in calls]
    reduced = {number for flow in flows for row in flow.rows for number in flow.linears[row].makes}
    for flow in flows:
        gathering = _Gathering(trace, flow, reduced, [other.call for other in flows], sums=sums)
        for row in flow.rows:
            if flow.linears[row].is_raw:
                gathering.find_sum(row)
                continue
            for column in flow.columns[row]:
                gathering.find(column)
            if mixes(flow, row):
                gathering.merge(row)
    return flows


def made_of_activation(trace: ForwardTrace, flow: BlockFlow) -> set[int]:
    """Values that depend on the block's activation; whole numbers such as expert choices too."""
    made = {flow.call.args[flow.arg]}
    for op in trace.ops_in(flow.call):
        if not op.is_empty and any(number in made for number in op.inputs):
            made.update(op.outputs)
    return made


def orders_tokens(trace: ForwardTrace, flow: BlockFlow, covers: Callable[[str], bool]) -> tuple[str, str] | None:
    """A module and an operation of the block that counts, sorts or reduces tokens where it sees shards; or none.

    A place in an expert's queue, for one: no gradient shows it, and the example need not be long enough to. Modules that
    the user has computed whole (``covers``) see whole sequences.
    """
    made, tokens = made_of_activation(trace, flow), flow.tokens(trace)
    entered = {name for name, style in flow.gathers if style == "gather"} | set(flow.sums) | set(flow.attentions)
    behind = {
        name: {number for row in flow.rows if row.startswith(f"{name}.") for number in flow.linears[row].makes}
        for name in entered - set(flow.sums)
    }
    for op in trace.ops_in(flow.call):
        names = [trace.calls[number].name for number in op.stack]
        for name in names:
            if name in behind and any(number in behind[name] for number in op.inputs):
                behind[name].update(op.outputs)
        if not op.dims or op.inputs[0] not in made:
            continue
        if any(name in entered and op.inputs[0] not in behind.get(name, ()) for name in names):
            continue  # tokens are whole there, up to the row
        if any(covers(name) for name in names):
            continue
        shape = trace.values[op.inputs[0]].shape
        flat = shape[:1] == (math.prod(tokens),) and 0 in op.dims
        if flat or (shape[: len(tokens)] == tokens and any(dim < len(tokens) for dim in op.dims)):
            return names[-1], op.name
    return None


def reorders_tokens(trace: ForwardTrace, flow: BlockFlow) -> str | None:
    """A module that is given tokens flattened in another order than the block's, ``[s·b, h]`` for ``[b, s, h]``; or none."""
    tokens = flow.tokens(trace)
    if len(tokens) != 2:
        return None
    makers: dict[int, Op] = {}
    for op in trace.ops_in(flow.call):
        for number in op.outputs:
            makers.setdefault(number, op)
    square = tokens[0] == tokens[1]  # a turned activation has the same shape then: whoever turns one is taken to have
    asked = [(name, args) for (name, style), args in flow.gathers.items() if style == "gather"] + [*flow.sums.items()]
    for name, args in asked:
        call = next(call for call in trace.calls_of(name) if call.first_op >= flow.call.first_op)
        todo, seen = [call.args[key] for key in args if key in call.args], set()
        while todo:
            number = todo.pop()
            shape = trace.values[number].shape
            if number in seen or number not in makers:
                continue
            seen.add(number)
            maker = makers[number]
            if shape[:1] == (math.prod(tokens),) and shape[:2] != tokens:
                todo += maker.inputs
            elif square and shape[:2] == tokens:
                turned = maker.name in ("transpose", "permute", "t") and trace.values[maker.inputs[0]].shape == shape
                if turned:
                    return name
                todo += maker.inputs
            elif len(shape) > 2 and math.prod(shape[:2]) == math.prod(tokens) and shape[:2] != tokens:
                return name
    return None


# ---- where to gather -------------------------------------------------------------------------------------------


class _Gathering:
    """Finds the modules at whose entry the columns' input is gathered."""

    def __init__(
        self, trace: ForwardTrace, flow: BlockFlow, reduced: set[int], blocks: list[Call], *, sums: bool
    ) -> None:
        self.trace, self.flow, self.reduced, self.sums = trace, flow, reduced, sums
        self.blocks = {call.name for call in blocks}

    def _leaks(self, call: Call, root: int) -> bool:
        """Whether something that the call makes of ``root`` leaves the block past the rows."""
        trace, block = self.trace, self.flow.call
        tainted: set[int] = set()
        # Attention maps are put together where the model returns them.
        maps = {n for n in call.outputs[1:] if len(trace.values[n].shape) == 4}
        for op in trace.ops[call.first_op :]:
            inside = op.index < call.last_op
            read = op.inputs if inside else [n for n in op.inputs if n not in maps]
            reads = any(n in tainted or (inside and trace.values[n].root == root) for n in read)
            if op.is_empty or not reads:
                continue
            if op.index >= block.last_op and not any(trace.calls[n].name in self.blocks for n in op.stack):
                return True
            moved = not inside or any(n in tainted for n in op.inputs)
            for number in op.outputs:
                value = trace.values[number]
                if value.floating and number not in self.reduced and (moved or value.root != root):
                    tainted.add(number)
        return any(number in tainted for number in block.outputs[:1])

    def find(self, column: str) -> None:
        """The gather of one column: the outermost call that is given its input and lets it out through rows only.

        Of an encoder's states the innermost around the linear: what else stands in a larger one sees the decoder's.
        """
        trace, flow = self.trace, self.flow
        linear = flow.linears[column]
        if column in flow.rows:
            return
        style = "gather" if RES in linear.upstream else "copy" if linear.upstream == {ENC} else ""
        if not style:
            return  # fed by another linear, which reads what is gathered
        root = trace.values[linear.reads].root
        stack = trace.ops[linear.op].stack
        calls = [trace.calls[number] for number in stack[stack.index(flow.call.id) + 1 :]]
        if style == "copy":
            calls = [c for c in reversed(calls) if c.name != column] + [c for c in calls if c.name == column]
        for call in calls:
            given = [key for key, value in call.args.items() if trace.values[value].root == root]
            if given and not self._leaks(call, root):
                some = style == "gather" and not self._holds_tokens(trace.values[call.args[given[0]]])
                if self.sums and some and self._find_dealer(column):
                    return
                args = flow.gathers.setdefault((call.name, style), [])
                args += [key for key in given if key not in args]
                return
        raise CantInferError(f"{column}: its input is given to no module that could gather it")

    def _find_dealer(self, column: str) -> bool:
        """The module that is given all tokens and hands some of them on to this column; whether there is one."""
        trace, flow = self.trace, self.flow
        made = self._made_of_activation()
        stack = trace.ops[flow.linears[column].op].stack
        for number in reversed(stack[stack.index(flow.call.id) + 1 :]):
            call = trace.calls[number]
            given = [key for key, value in call.args.items() if value in made or trace.values[value].root in made]
            if given and all(self._holds_tokens(trace.values[call.args[key]]) for key in given):
                if self._escapes(call):
                    return False
                flow.sums[call.name] = given
                return True
        return False

    def _escapes(self, call: Call) -> bool:
        """Whether anything is read of what a call makes but its first output, as a loss does that balances a router.

        It would be whole on every rank, and its gradient counted by each.
        """
        trace = self.trace
        roots = {trace.values[number].root for number in call.outputs[:1]}
        made = {n for op in trace.ops_in(call) for n in op.outputs if trace.values[n].floating}
        # A parameter's view is the same value wherever it is taken.
        made = {n for n in made if trace.values[n].root not in roots and trace.values[n].parameter is None}
        return any(n in made for op in trace.ops[call.last_op :] for n in op.inputs)

    def find_sum(self, row: str) -> None:
        """A row that its module multiplies itself: everything that holds tokens is gathered where that module is entered."""
        trace, flow = self.trace, self.flow
        names = [row, *flow.columns[row]]
        owner = row.rpartition(".")[0]
        mixed = [name for name in names if name.rpartition(".")[0] != owner or not flow.linears[name].is_raw]
        open_calls = [trace.calls[number] for number in trace.ops[flow.linears[row].op].stack]
        call = next((call for call in open_calls if call.name == owner), None)
        if mixed or owner == flow.name or call is None:
            return  # no one module makes it of its own parameters: told where the row is planned
        made = self._made_of_activation()
        given = [key for key, value in call.args.items() if value in made or trace.values[value].root in made]
        if given and all(self._holds_tokens(trace.values[call.args[key]]) for key in given) and not self._escapes(call):
            flow.sums[owner] = given

    def _made_of_activation(self) -> set[int]:
        made = made_of_activation(self.trace, self.flow)
        return made | {self.trace.values[number].root for number in made}

    def _holds_tokens(self, value: Value) -> bool:
        """Whether an argument has a place for every token: ``[b, s, ...]`` or ``[b·s, ...]``."""
        tokens = self.flow.tokens(self.trace)
        return value.shape[: len(tokens)] == tokens or value.shape[:1] == (math.prod(tokens),)

    def merge(self, row: str) -> None:
        """Columns that would gather for themselves gather where their attention is entered, if they can.

        What stands around a column that gathers for itself sees shards, and attention reads the length of what it sees.
        """
        trace, flow = self.trace, self.flow
        alone = [column for column in flow.columns[row] if (column, "gather") in flow.gathers]
        if not alone:
            return
        stacks = [trace.ops[flow.linears[name].op].stack for name in (*alone, row)]
        common = [number for number in stacks[0] if all(number in stack for stack in stacks)]
        for number in common[common.index(flow.call.id) + 1 :]:
            call = trace.calls[number]
            given = [key for key, value in call.args.items() if self._is_activation(trace.values[value])]
            if len(given) == 1 and not self._leaks(call, trace.values[call.args[given[0]]].root):
                for column in alone:
                    del flow.gathers[column, "gather"]
                flow.gathers[call.name, "gather"] = given
                return

    def _is_activation(self, value: Value) -> bool:
        return value.floating and value.shape == self.trace.values[self.flow.call.args[self.flow.arg]].shape


# ---- the end of the region -------------------------------------------------------------------------------------


def find_exit(trace: ForwardTrace, stack: list[BlockFlow]) -> str | None:
    """The final norm, if nothing else reads the last block's output; none if the last block itself is the end."""
    names = {flow.name for flow in stack}
    calls = [call for call in trace.calls if call.name in names]
    last = max(calls, key=lambda call: call.last_op)
    root = trace.values[last.outputs[0]].root
    readers = [op for op in trace.ops[last.last_op :] if any(trace.values[n].root == root for n in op.inputs)]
    around = _owners(trace, last)
    heads = {op.stack[len(around)] if len(op.stack) > len(around) else None for op in readers}
    if len(heads) != 1 or None in heads:
        return None
    call = trace.calls[next(iter(head for head in heads if head is not None))]
    given = [key for key, value in call.args.items() if trace.values[value].root == root]
    pointwise = isinstance(call.module, _NORMS) or _looks_like_norm(call.module)
    same = bool(call.outputs) and trace.values[call.outputs[0]].shape == trace.values[last.outputs[0]].shape
    return call.name if pointwise and same and given else None


def _owners(trace: ForwardTrace, call: Call) -> tuple[int, ...]:
    """The calls around a block, outermost first."""
    found: list[int] = []
    at = call.parent
    while at is not None:
        found.insert(0, at)
        at = trace.calls[at].parent
    return tuple(found)


def _looks_like_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return (
        not any(True for _ in module.children())
        and bool(parameters)
        and all(parameter.ndim == 1 for parameter in parameters)
        and "norm" in type(module).__name__.lower()
    )
