"""Where the columns' input is gathered: the modules at whose entry shards of the sequence become whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch import nn

from lightning_seqpar.inference.dataflow import (
    OTHER_INPUT,
    RESIDUAL,
    BlockFlow,
    CantInferError,
    made_of_activation,
    read_block,
)
from lightning_seqpar.inference.trace import Call, ForwardTrace, Value


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
    flows = [read_block(trace, call, model) for call in calls]
    reduced = {number for flow in flows for row in flow.rows for number in flow.linears[row].makes}
    for flow in flows:
        gathering = GatherPoints(trace, flow, reduced, [other.call for other in flows], sums=sums)
        for row in flow.rows:
            if flow.linears[row].is_unwrapped:
                gathering.find_sum(row)
                continue
            for column in flow.columns[row]:
                gathering.find(column)
            if mixes(flow, row):
                gathering.merge(row)
    return flows


class GatherPoints:
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
        style = "gather" if RESIDUAL in linear.upstream else "copy" if linear.upstream == {OTHER_INPUT} else ""
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
        mixed = [name for name in names if name.rpartition(".")[0] != owner or not flow.linears[name].is_unwrapped]
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
