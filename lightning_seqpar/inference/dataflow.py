"""The data flow of one block: which of its linears are rows, and which are the columns of each row.

A linear whose output is added to the residual is a row, and the linears that its input was made from are its columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from lightning_seqpar.inference.trace import Call, ForwardTrace, Op
from lightning_seqpar.layout.linear_kind import is_parametrized, linear_kind
from lightning_seqpar.layout.module_names import Argument

RESIDUAL = "<residual>"  # stands among upstream linears for the block's activation, on which residuals are added up
OTHER_INPUT = "<other input>"  # stands among upstream linears for the block's other inputs, such as an encoder's states
_SUMS = ("add", "sub", "rsub", "addcmul", "lerp", "_foreach_add")


class CantInferError(ValueError):
    """Inference can't decide how to shard a module; the message names it."""

    def __init__(self, message: str, whole: str = "", why: str = "") -> None:
        super().__init__(message)
        self.whole = whole  # the module inside a block that would have to be computed whole to go on; empty for none
        self.why = why or message  # the message without what to write
        self.block = ""  # the block that can't be planned at all; empty for none
        self.rules: list[dict[str, Any]] = []  # with which inference may go on; a message proposes them once they were tried


class UserDecidesError(CantInferError):
    """With less sharded inference could go on, but that is for the user to say."""


class NothingToSplitError(UserDecidesError):
    """Nothing that rules could shard, so none is worth writing."""


@dataclass(frozen=True)
class SummedRow:
    """A module that is one row: the sum of several products of its input, such as a linear with an adapter, ``W x + B(A x)``."""

    # Names of the products that read its input, each with the dim of its in-features; a linear module has none.
    rows: tuple[tuple[str, int | None], ...]
    once: tuple[str, ...] = ()  # parameters that it adds to their sum
    local: tuple[str, ...] = ()  # parameters that belong to its input's features


@dataclass
class Linear:
    """One product of an activation and a parameter, in one block."""

    # The linear module (or `nn.MultiheadAttention`) that owns the weight; for a parameter that a module multiplies itself,
    # the parameter's own name.
    name: str
    parameter: str  # the weight's name; empty for an `nn.MultiheadAttention` and for a module of several products
    upstream: frozenset[str]  # the nearest linears that its input comes from, or `RESIDUAL`, `OTHER_INPUT`
    op: int  # index of the product's operation
    reads: int  # id of the value that it reads, the activation
    makes: tuple[int, ...]  # ids of the values that it makes
    # Whether all its products happen in calls of a module that is known to be a linear, and none past it (`F.linear(x,
    # linear.weight)`, or in a module that adds more to its product).
    is_called: bool = True
    out_dim: int = 0  # the dim of the parameter along which its out-features are
    summed: SummedRow | None = None  # the products that it consists of, if it is a module of several
    also_reads: tuple[int, ...] = ()  # ids of the values that it reads in its further calls in the block

    @property
    def feeding(self) -> frozenset[str]:
        """The linears among those upstream."""
        return self.upstream - {RESIDUAL, OTHER_INPUT}

    @property
    def is_unwrapped(self) -> bool:
        """Whether it is a parameter that a module multiplies itself, with no linear module around it."""
        return self.name == self.parameter


@dataclass
class BlockFlow:
    """The data flow of one block."""

    trace: ForwardTrace  # the recorded forward
    call: Call  # the recorded call of the block
    arg: Argument  # which argument of it is the activation
    linears: dict[str, Linear] = field(default_factory=dict)  # every product with a parameter, by name
    rows: list[str] = field(default_factory=list)  # names of the rows, in order of execution
    columns: dict[str, list[str]] = field(default_factory=dict)  # the columns of each row
    # By module and style (`gather` or `copy`), the arguments to make whole where it is entered.
    gathers: dict[tuple[str, str], list[Argument]] = field(default_factory=dict)
    attentions: list[str] = field(default_factory=list)  # names of modules of the class `nn.MultiheadAttention`
    # Modules that return partial sums, with the arguments to gather for them: those that multiply parameters themselves,
    # and those that deal their tokens out to experts.
    sums: dict[str, list[Argument]] = field(default_factory=dict)
    # Of rows whose input is put together of parts along the features, the parts' sizes.
    row_segments: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # Other arguments that are activations too, to which the block adds what it makes, and which it returns (the text's
    # tokens beside the picture's).
    streams: tuple[Argument, ...] = ()
    # Rows with a column whose input can't be gathered anywhere, and why.
    ungathered: dict[str, CantInferError] = field(default_factory=dict)
    # For each parameter that is computed with activations past a product (a norm's, a scale), the nearest linears that
    # those activations come from.
    used_with: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def activations(self) -> list[int]:
        """Ids of the values that the block is given as activations."""
        return [self.call.args[key] for key in (self.arg, *self.streams) if key in self.call.args]

    @property
    def name(self) -> str:
        """The block's name."""
        return self.call.name

    @property
    def tokens(self) -> tuple[int, ...]:
        """The activation's shape without its features: ``(b, s)``, or ``(tokens,)`` if they are flattened."""
        return self.trace.values[self.call.args[self.arg]].shape[:-1]

    @cached_property
    def made(self) -> set[int]:
        """Ids of the values that depend on the block's activations, integers such as choices of experts too."""
        made = {*self.activations}
        for op in self.trace.ops_in(self.call):
            if not op.is_empty and any(number in made for number in op.inputs):
                made.update(op.outputs)
        return made

    def call_of(self, name: str) -> Call:
        """The first call of a module in the block; raises CantInferError if there is none."""
        if (call := self.trace.call_inside(self.call, name)) is None:
            raise CantInferError(f"{name}: the block does not call it")
        return call

    def calls_around(self, name: str) -> list[Call]:
        """The calls inside the block around the product of a linear, outermost first."""
        stack = self.trace.ops[self.linears[name].op].stack
        return [self.trace.calls[number] for number in stack[stack.index(self.call.id) + 1 :]]

    def behind_rows(self, parameter: str) -> bool:
        """Whether a parameter that is no linear's is computed with what rows made, and nothing else."""
        made_by = self.used_with.get(parameter, frozenset())
        return bool(made_by) and made_by <= set(self.rows)

    def between(self, parameter: str, rows: Iterable[str]) -> bool:
        """Whether a parameter that is no linear's is computed with what becomes the input of these rows, behind a linear."""
        made_by = self.used_with.get(parameter, frozenset())
        leading: set[str] = set()
        todo = [column for row in rows for column in self.columns[row]]
        while todo:
            if (name := todo.pop()) not in leading and name in self.linears and name not in self.rows:
                leading.add(name)
                todo += self.linears[name].upstream
        return bool(made_by) and made_by <= leading


def find_streams(trace: ForwardTrace, call: Call) -> tuple[Argument, ...]:
    """The arguments of a block beside its activation that it adds to and returns, of the same batch and features."""
    arg = trace.activation(call)
    assert arg is not None
    first = trace.values[call.args[arg]]
    found = []
    returned = [trace.values[number] for number in call.outputs]
    for key, number in call.args.items():
        value = trace.values[number]
        alike = len(value.shape) == len(first.shape) == 3 and value.shape[::2] == first.shape[::2]
        if key == arg or not (alike and value.floating) or value.root == first.root:
            continue
        new = [one for one in returned if one.floating and one.shape == value.shape and one.root != value.root]
        if len(new) > (value.shape == first.shape):
            found.append(key)
    return tuple(found)


class BlockReader:
    """Walks through a block's operations and keeps, for every value, the nearest linears that it was made by.

    ``streams`` are what :func:`find_streams` finds, and ``summed`` the modules inside the block that are one row each, by name.
    """

    def __init__(self, trace: ForwardTrace, call: Call, streams: tuple[Argument, ...], summed: Mapping[str, SummedRow]) -> None:
        self.trace, self.call, self.summed = trace, call, summed
        arg = trace.activation(call)
        assert arg is not None
        self.out = BlockFlow(trace, call, arg, streams=tuple(key for key in streams if key != arg))
        self.upstream_of: dict[int, frozenset[str]] = {}
        self.made_of: dict[int, frozenset[str]] = {}  # the parameters that a value is made of, without any activation
        self.rows: dict[str, None] = {}
        self.ops = trace.ops_in(call)
        self.makers = {n: op for op in self.ops for n in op.outputs}
        self.value = trace.values.__getitem__
        shapes = [trace.values[number].shape for number in self.out.activations]
        self.width = shapes[0][-1]
        self.counts = {math.prod(shape) for shape in shapes} | {sum(math.prod(shape) for shape in shapes)}

    def run(self) -> BlockFlow:
        """The block's data flow; where to gather is not decided yet."""
        for key, number in self.call.args.items():
            mark = RESIDUAL if key == self.out.arg or key in self.out.streams else OTHER_INPUT
            if self.value(number).floating:
                self.upstream_of[number] = frozenset({mark})
        unit: Call | None = None
        for op in self.ops:
            inside = self._unit_of(op)
            if unit is not None and inside is not unit:
                self._close(unit)
            unit = inside
            if unit is None:
                self._step(op)
        if unit is not None:
            self._close(unit)
        self._leave()
        self._order()
        return self.out

    def _unit_of(self, op: Op) -> Call | None:
        """The call inside the block of an ``nn.MultiheadAttention``, or of a row of several products, that an operation is in."""
        for number in op.stack:
            call = self.trace.calls[number]
            if call.id > self.call.id and (isinstance(call.module, nn.MultiheadAttention) or call.name in self.summed):
                return call
        return None

    def _close(self, call: Call) -> None:
        """Record such a module as one linear; an ``nn.MultiheadAttention`` calls its projections through their weights."""
        upstream = self._union(call.args.values())
        reads = call.args.get(0, call.args.get("query", -1))
        summed = self.summed.get(call.name)
        known = self.out.linears.get(call.name)
        makes = tuple(call.outputs)
        if summed is not None and known is not None:
            upstream, makes = upstream | known.upstream, known.makes + makes
        self.out.linears[call.name] = Linear(call.name, "", upstream, call.first_op, reads, makes, summed=summed)
        if summed is None and call.name not in self.out.attentions:
            self.out.attentions.append(call.name)
        for number in call.outputs:
            self.upstream_of[number] = frozenset({call.name})

    def _union(self, numbers: Iterable[int]) -> frozenset[str]:
        """The nearest linears that any of these values was made by."""
        return frozenset().union(*(self.upstream_of.get(number, frozenset()) for number in numbers))

    def _step(self, op: Op) -> None:
        # A parameter that the block is given (positions) is no weight.
        own = [n for n in op.inputs if self.value(n).parameter is not None and not self.upstream_of.get(n)]
        weights = [n for n in own if len(self.value(n).shape) >= 2]
        others = [n for n in op.inputs if n not in own]
        if op.is_product:
            around = [is_parametrized(self.trace.calls[number].module) for number in op.stack]
            # A parametrized weight is made of parameters alone (a spectral norm multiplies it by vectors).
            if len(weights) == 1 and others and (self._union(op.inputs) or not any(around)):
                self._product(op, weights[0], others)
                return
            made = next((n for n in op.inputs if n in self.made_of and len(self.value(n).shape) == 2), None)
            if not weights and any(around[-1:]) and made is not None:
                self._product(op, made, [n for n in others if n != made])
                return
        result: frozenset[str] = frozenset()
        if not op.is_empty:
            result = self._union(op.inputs)
            self._note_parameters(op, result)
        if op.name in _SUMS:
            result = self._sum(op, result)
        for number in op.outputs:
            if self.value(number).floating:
                self.upstream_of[number] = result | self._union([number] if op.name == "rewrite" else [])

    def _note_parameters(self, op: Op, upstream: frozenset[str]) -> None:
        """Note with what activations the parameters are computed that an operation reads, or what it makes of them alone."""
        parameters: set[str] = set()
        for number in op.inputs:
            own = self.value(number).parameter
            parameters |= self.made_of.get(number, frozenset()) if own is None else {own}
        if upstream:
            for parameter in sorted(parameters):
                self.out.used_with[parameter] = self.out.used_with.get(parameter, frozenset()) | upstream
        elif parameters:
            self.made_of.update(dict.fromkeys(op.outputs, frozenset(parameters)))

    def _product(self, op: Op, weight: int, others: list[int]) -> None:
        parameter = self.value(weight).parameter
        if parameter is None:
            parameter, owner = min(self.made_of[weight]), self.trace.calls[op.stack[-1]].name
        else:
            owner, _, leaf = parameter.rpartition(".")
            own = [p for p in self.trace.modules[owner]._parameters.values() if p is not None and p.ndim > 1]
            if len(own) > 1 or leaf != "weight" or own[0].ndim > 2:
                owner = parameter  # its module is no linear: it owns other matrices, or this one stacks several
        upstream = self._union(others)
        known = self.out.linears.get(owner)
        if known is not None and known.parameter != parameter:
            owner = parameter  # the module has several weights: each is a linear of its own
            known = self.out.linears.get(owner)
        # A bias that was computed is no parameter either, but no linear is upstream of it.
        reads = next((number for number in others if self.upstream_of.get(number)), others[0])
        module = next((call.module for n in op.stack if (call := self.trace.calls[n]).name == owner), None)
        is_called = module is not None and linear_kind(module) is not None
        if known is None:
            out_dim = self._out_dim(op, weight)
            self.out.linears[owner] = Linear(owner, parameter, upstream, op.index, reads, op.outputs, is_called, out_dim)
        else:
            known.upstream |= upstream
            known.makes += op.outputs
            known.also_reads += (reads,)
            known.is_called &= is_called
        for number in op.outputs:
            self.upstream_of[number] = frozenset({owner})

    def _out_dim(self, op: Op, weight: int) -> int:
        """The dim of a matrix along which the out-features of a product with it are."""
        turns, at = int(op.name != "linear"), weight
        while at in self.makers and self.value(at).parameter is not None:
            maker = self.makers[at]
            turns += maker.name in ("t", "transpose", "permute")
            at = maker.inputs[0]
        return turns % 2

    def _sum(self, op: Op, result: frozenset[str]) -> frozenset[str]:
        """The linears that a sum was made by: what is added to the residual was made by rows, and the sum is the residual."""
        sides = [self.upstream_of[n] for n in op.inputs if self.upstream_of.get(n)]
        through = [side for side in sides if RESIDUAL in side]
        added = [side for side in sides if RESIDUAL not in side]
        shape = self.value(op.outputs[0]).shape if through and added else ()
        # As many numbers and features as one of the block's activations, or as all of them.
        if math.prod(shape) not in self.counts or shape[-1:] != (self.width,):
            return result
        for side in added:
            self.rows |= dict.fromkeys(sorted(side - {OTHER_INPUT}))
        return frozenset({RESIDUAL})

    def _leave(self) -> None:
        """Count as rows what made the block's output without a residual, and linears in between that feed a column."""
        left = self.call.outputs if self.out.streams else self.call.outputs[:1]
        self.rows |= dict.fromkeys(sorted(self._union(left) - {RESIDUAL, OTHER_INPUT}))
        # A linear whose input comes from linears and whose output feeds a column of another row is a row too.
        linears, rows = self.out.linears, [*self.rows]
        for row in rows:
            for feeding in (one for column in linears[row].feeding for one in linears[column].feeding):
                if feeding not in self.rows and linears[feeding].feeding:
                    self.rows[feeding] = None
                    rows.append(feeding)

    def _order(self) -> None:
        order = list(self.out.linears)
        for row in sorted(self.rows, key=order.index):
            linear, is_attention = self.out.linears[row], row in self.out.attentions
            if not is_attention and not linear.feeding:
                continue  # it reads the residual and is added to it: it stays whole and works on shards
            self.out.rows.append(row)
            self.out.columns[row] = [] if is_attention else sorted(linear.feeding, key=order.index)
            if not is_attention and (segments := self._segments_of(linear.reads)):
                self.out.row_segments[row] = segments

    def _segments_of(self, number: int) -> tuple[int, ...]:
        """The sizes of the parts that a value is put together of along its features; none if it is not."""
        while (op := self.makers.get(number)) is not None and op.name != "cat" and len(op.inputs) == 1:
            if self.value(op.inputs[0]).shape[-1:] != self.value(number).shape[-1:]:
                return ()
            number = op.inputs[0]
        if op is None or op.name != "cat":
            return ()
        sizes = tuple(self.value(one).shape[-1] for one in op.inputs)
        return sizes if sum(sizes) == self.value(number).shape[-1] else ()
