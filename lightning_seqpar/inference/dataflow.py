"""What a recorded forward says of a model: its blocks, which linears are rows and columns, where to gather."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from lightning_seqpar.inference.stacks import activation
from lightning_seqpar.inference.trace import Call, ForwardTrace, Op, Value
from lightning_seqpar.layout.module_names import Argument

RES = "<residual>"
"""Stands for the block's activation among upstream linears."""
ENC = "<other input>"
"""Stands for the block's other inputs."""
_SUMS = ("add", "sub", "rsub", "addcmul", "lerp", "_foreach_add")


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


def read_block(trace: ForwardTrace, call: Call, model: nn.Module) -> BlockFlow:
    """The rows and columns of the block that ``call`` is a call of; where to gather is not decided yet."""
    return _BlockReader(trace, call, model).run()


class _BlockReader:
    """Reads the data flow of one block from a recorded forward."""

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
        """The block's data flow."""
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


def made_of_activation(trace: ForwardTrace, flow: BlockFlow) -> set[int]:
    """Values that depend on the block's activation; whole numbers such as expert choices too."""
    made = {flow.call.args[flow.arg]}
    for op in trace.ops_in(flow.call):
        if not op.is_empty and any(number in made for number in op.inputs):
            made.update(op.outputs)
    return made
