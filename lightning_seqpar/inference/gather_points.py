"""Gather points, at whose entry the input of columns becomes whole, and what is right between them on whole sequences only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from lightning_seqpar.inference.dataflow import OTHER_INPUT, RESIDUAL, BlockFlow, BlockReader, CantInferError, find_streams
from lightning_seqpar.inference.summed_parts import summed_rows
from lightning_seqpar.inference.trace import Call, ForwardTrace, Value
from lightning_seqpar.layout.module_names import Argument, inside


def read_blocks(
    trace: ForwardTrace, calls: Sequence[Call], mixes: Callable[[BlockFlow, str], bool], *, sums: bool
) -> list[BlockFlow]:
    """The data flow of every block, with the modules at whose entry the input of its columns is gathered.

    ``calls`` are the first of each block; ``mixes`` says whether positions mix between the columns of a row and the row, as in
    attention; ``sums``, whether a module that deals its tokens out to experts is given all tokens and returns a partial sum: if
    not, each expert gathers for itself.
    """
    streams = tuple(dict.fromkeys(key for call in calls for key in find_streams(trace, call)))
    flows = []
    for call in calls:
        flow = BlockReader(trace, call, streams, {}).run()
        if summed := summed_rows(flow):
            flow = BlockReader(trace, call, streams, summed).run()
        _end_rows_at_attention(flow, mixes)
        flows.append(flow)
    reduced = {number for flow in flows for row in flow.rows for number in flow.linears[row].makes}
    for flow in flows:
        gathering = GatherPoints(flow, reduced, {call.name for call in calls}, sums=sums)
        for row in flow.rows:
            if flow.linears[row].is_unwrapped:
                gathering.find_sum(row)
                continue
            try:
                for column in flow.columns[row]:
                    gathering.find(column)
            except CantInferError as error:
                flow.ungathered[row] = error
                continue
            if mixes(flow, row):
                gathering.merge(row)
        gathering.settle()
    return flows


def _end_rows_at_attention(flow: BlockFlow, mixes: Callable[[BlockFlow, str], bool]) -> None:
    """Of three linears in a chain, of which the last two work on each position alone, let the middle one be the row.

    An attention's way out may be followed by one more linear (TimeSformer); that one stays whole, behind the sum.
    """
    for at, row in enumerate(flow.rows):
        middle = flow.columns[row]
        upstream = flow.linears[middle[0]].upstream if len(middle) == 1 else frozenset()
        if not upstream or upstream & {RESIDUAL, OTHER_INPUT} or middle[0] in flow.rows or mixes(flow, row):
            continue
        flow.rows[at] = middle[0]
        flow.columns[middle[0]] = sorted(upstream, key=[*flow.linears].index)
        del flow.columns[row]


class GatherPoints:
    """Finds the gather points of one block, and writes them into its data flow."""

    def __init__(self, flow: BlockFlow, reduced: set[int], blocks: set[str], *, sums: bool) -> None:
        self.trace, self.flow, self.sums = flow.trace, flow, sums
        self.reduced = reduced  # ids of all values that rows make, in any block: they are reduced, so they are shards
        self.blocks = blocks  # names of all blocks

    def _leaks(self, call: Call, root: int) -> bool:
        """Whether something whole that the call makes of the value ``root`` leaves the block other than through its rows.

        If so, the input can't be gathered at this call: what follows the block expects shards.
        """
        trace, block = self.trace, self.flow.call
        whole: set[int] = set()
        # Attention maps may leave: the ranks' maps are put together where the model returns them.
        maps = {n for n in call.outputs[1:] if len(trace.values[n].shape) == 4}
        for op in trace.ops[call.first_op :]:
            inside = op.index < call.last_op
            read = op.inputs if inside else [n for n in op.inputs if n not in maps]
            reads = any(n in whole or (inside and trace.values[n].root == root) for n in read)
            if op.is_empty or not reads:
                continue
            if op.index >= block.last_op and not any(trace.calls[n].name in self.blocks for n in op.stack):
                return True
            moved = not inside or any(n in whole for n in op.inputs)
            for number in op.outputs:
                value = trace.values[number]
                if value.floating and number not in self.reduced and (moved or value.root != root):
                    whole.add(number)
        return any(number in whole for number in (block.outputs if self.flow.streams else block.outputs[:1]))

    def find(self, column: str) -> None:
        """Find the gather point of one column: the outermost call that takes its input and lets it out through rows only.

        For an encoder's states it is the innermost call around the linear, since a larger module sees the decoder's too.
        Raises CantInferError if no call takes the column's input as an argument.
        """
        trace, flow = self.trace, self.flow
        linear = flow.linears[column]
        if column in flow.rows:
            return
        style = "gather" if RESIDUAL in linear.upstream else "copy" if linear.upstream == {OTHER_INPUT} else ""
        if not style:
            return  # its input is made by another linear, whose own input is gathered
        root = trace.values[linear.reads].root
        calls = flow.calls_around(column)
        if style == "copy":
            calls = [c for c in reversed(calls) if c.name != column] + [c for c in calls if c.name == column]
        for call in calls:
            takes = [key for key, value in call.args.items() if trace.values[value].root == root]
            if takes and not self._leaks(call, root):
                some = style == "gather" and not self._holds_tokens(trace.values[call.args[takes[0]]])
                if self.sums and some and self._find_dealer(column):
                    return
                args = flow.gathers.setdefault((call.name, style), [])
                args += [key for key in takes if key not in args]
                return
        for call in calls if style == "gather" else ():
            keys = [key for key in self._sources(call, linear.reads) if trace.values[call.args[key]].floating]
            if keys and self._can_gather(call, keys):
                self._write(call.name, "gather", keys)
                return
        raise CantInferError(f"{column}: its input is given to no module that could gather it")

    def _can_gather(self, call: Call, keys: Iterable[Argument]) -> bool:
        """Whether these arguments of a call are activations that may become whole there."""
        return all(self._is_activation(call.args[key]) for key in keys) and not any(
            self._leaks(call, self.trace.values[call.args[key]].root) for key in keys
        )

    def _find_dealer(self, column: str) -> bool:
        """Find the module that takes all tokens and hands some of them on to this column, an expert; whether there is one."""
        dealer = next((call for call in reversed(self.flow.calls_around(column)) if self._takes_tokens(call)), None)
        if dealer is None or self._escapes(dealer):
            return False
        self.flow.sums[dealer.name] = self._takes_tokens(dealer)
        return True

    def _escapes(self, call: Call) -> bool:
        """Whether anything that a call makes, other than its first output, is read after it: by a router's balancing loss.

        Such a value would be whole on every rank, and its gradient would be counted tp times.
        """
        trace = self.trace
        roots = {trace.values[number].root for number in call.outputs[:1]}
        made = {n for op in trace.ops_in(call) for n in op.outputs if trace.values[n].floating}
        # Views of parameters are left out: they have the same root wherever they are taken.
        made = {n for n in made if trace.values[n].root not in roots and trace.values[n].parameter is None}
        return any(n in made for op in trace.ops[call.last_op :] for n in op.inputs)

    def find_sum(self, row: str) -> None:
        """The gather point of a row that its module multiplies itself: that module, which then returns a partial sum."""
        flow = self.flow
        names = [row, *flow.columns[row]]
        owner = row.rpartition(".")[0]
        mixed = [name for name in names if name.rpartition(".")[0] != owner or not flow.linears[name].is_unwrapped]
        call = next((call for call in flow.calls_around(row) if call.name == owner), None)
        if mixed or call is None:
            return  # no one module makes it of its own parameters; planning the row raises
        if (takes := self._takes_tokens(call)) and not self._escapes(call):
            flow.sums[owner] = takes

    def _takes_tokens(self, call: Call) -> list[Argument]:
        """The arguments of a call that depend on the block's activation; none if one of them lacks some tokens."""
        values = self.trace.values
        made = self.flow.made | {values[number].root for number in self.flow.made}
        takes = [key for key, value in call.args.items() if value in made or values[value].root in made]
        return takes if all(self._holds_tokens(values[call.args[key]]) for key in takes) else []

    def _holds_tokens(self, value: Value) -> bool:
        """Whether a value has an entry for every token: ``[b, s, ...]`` or ``[b·s, ...]``."""
        tokens = self.flow.tokens
        return value.shape[: len(tokens)] == tokens or value.shape[:1] == (math.prod(tokens),)

    def merge(self, row: str) -> None:
        """Move the gather of an attention's columns from the columns themselves to the module around the attention.

        Around a column that gathers for itself the code sees shards, and attention code reads the sequence's length there.
        """
        trace, flow = self.trace, self.flow
        alone = [column for column in flow.columns[row] if (column, "gather") in flow.gathers]
        if not alone:
            return
        stacks = [trace.ops[flow.linears[name].op].stack for name in (*alone, row)]
        common = [number for number in stacks[0] if all(number in stack for stack in stacks)]
        for number in common[common.index(flow.call.id) + 1 :]:
            call = trace.calls[number]
            takes = [key for key, value in call.args.items() if self._is_activation(value)]
            if len(takes) == 1 and self._can_gather(call, takes):
                for column in alone:
                    del flow.gathers[column, "gather"]
                flow.gathers[call.name, "gather"] = takes
                return

    def settle(self) -> None:
        """See that what a module is given is made whole, and its gradient summed, exactly once.

        A column whose input is computed inside a module that gathers for others gets it from there (DETR adds positions to
        queries and keys, not to values), and what else such an input is made of, whole in front of the module, is copied.
        """
        trace, flow = self.trace, self.flow
        points = {name for name, _ in flow.gathers}
        for point in sorted(points, key=len):
            call = flow.call_of(point)
            inner = {column for row in flow.rows for column in flow.columns[row] if inside(column, point)}
            sources = {
                key
                for column in inner
                for read in (flow.linears[column].reads, *flow.linears[column].also_reads)
                for key in self._sources(call, read)
                if trace.values[call.args[key]].floating
            }
            nested = [one for one in points if one != point and inside(one, point)]
            args = {*self._args_of(point)}
            fed = [one for one in nested if args & self._sources_of(call, one)]
            if fed:
                whole = [key for key in sources if call.args[key] in flow.made]
                if self._can_gather(call, whole):
                    self._write(point, "gather", whole)
                    for one in fed:
                        flow.gathers.pop((one, "gather"), None)
                        flow.gathers.pop((one, "copy"), None)
            if any((point, style) in flow.gathers for style in ("gather", "copy")):
                self._write(point, "copy", [key for key in sources if call.args[key] not in flow.made])

    def _write(self, name: str, style: str, keys: Iterable[Argument]) -> None:
        """Add arguments to those that a module makes whole, in the order in which it takes them."""
        order = list(self.flow.call_of(name).args)
        args = {*self.flow.gathers.get((name, style), ()), *keys}
        if args:
            self.flow.gathers[name, style] = sorted(args, key=order.index)

    def _args_of(self, name: str) -> list[Argument]:
        return [key for style in ("gather", "copy") for key in self.flow.gathers.get((name, style), ())]

    def _sources_of(self, call: Call, name: str) -> set[Argument]:
        """The arguments of a call of which that is made what the module ``name`` inside it makes whole."""
        given = self.flow.call_of(name).args
        return set().union(*(self._sources(call, given[one]) for one in self._args_of(name) if one in given))

    def _sources(self, call: Call, number: int) -> set[Argument]:
        """The arguments of a call of which a value inside it is made."""
        root = {self.trace.values[value].root: key for key, value in call.args.items()}
        todo, found = [number], set()
        makers = {n: op for op in self.trace.ops_in(call) for n in op.outputs}
        while todo:
            at = todo.pop()
            key = root.get(self.trace.values[at].root)
            if key is not None:
                found.add(key)
            elif (maker := makers.pop(at, None)) is not None and not maker.is_empty:  # each is followed once
                todo += maker.inputs
        return found

    def _is_activation(self, number: int) -> bool:
        """Whether a value is made of the block's activations, and has the shape of one of them."""
        values, flow = self.trace.values, self.flow
        shapes = {values[one].shape for one in flow.activations}
        return number in flow.made and values[number].floating and values[number].shape in shapes


def orders_tokens(flow: BlockFlow, covers: Callable[[str], bool]) -> tuple[str, str] | None:
    """A module and an operation in it that counts, sorts or reduces tokens where it would see a shard of the sequence; or None.

    An example is a token's place in an expert's queue. No gradient shows it, and the self-check's example may be too short.
    Modules that ``covers`` says the user's own rules decide are left out: one that is computed whole sees whole sequences.
    """
    trace, tokens = flow.trace, flow.tokens
    entered = {name for name, style in flow.gathers if style == "gather"} | set(flow.sums) | set(flow.attentions)
    made_by_rows = {
        name: {number for row in flow.rows if row.startswith(f"{name}.") for number in flow.linears[row].makes}
        for name in entered - set(flow.sums)
    }
    for op in trace.ops_in(flow.call):
        names = [trace.calls[number].name for number in op.stack]
        for name in names:
            if name in made_by_rows and any(number in made_by_rows[name] for number in op.inputs):
                made_by_rows[name].update(op.outputs)
        if not op.dims or op.inputs[0] not in flow.made:
            continue
        if any(name in entered and op.inputs[0] not in made_by_rows.get(name, ()) for name in names):
            continue  # inside a gather point tokens are whole, up to the row
        if any(covers(name) for name in names):
            continue
        shape = trace.values[op.inputs[0]].shape
        flat = shape[:1] == (math.prod(tokens),) and 0 in op.dims
        if flat or (shape[: len(tokens)] == tokens and any(dim < len(tokens) for dim in op.dims)):
            return names[-1], op.name
    return None


def reorders_tokens(flow: BlockFlow) -> str | None:
    """A gather point whose tokens were flattened in another order than the block's, ``[s·b, h]`` from ``[b, s, h]``; or None."""
    trace, tokens = flow.trace, flow.tokens
    if len(tokens) != 2:
        return None
    square = tokens[0] == tokens[1]  # then a transposed activation has the same shape, so any transpose counts
    points = [(name, args) for (name, style), args in flow.gathers.items() if style == "gather"] + [*flow.sums.items()]
    for name, args in points:
        makers = {number: op for op in reversed(trace.ops_in(flow.call)) for number in op.outputs}
        call = flow.call_of(name)
        todo = [call.args[key] for key in args if key in call.args]
        while todo:
            number = todo.pop()
            shape = trace.values[number].shape
            if (maker := makers.pop(number, None)) is None:  # it comes from elsewhere, or was seen
                continue
            if shape[:1] == (math.prod(tokens),) and shape[:2] != tokens:
                todo += maker.inputs
            elif square and shape[:2] == tokens:
                if maker.name in ("transpose", "permute", "t") and trace.values[maker.inputs[0]].shape == shape:
                    return name
                todo += maker.inputs
            elif len(shape) > 2 and math.prod(shape[:2]) == math.prod(tokens) and shape[:2] != tokens:
                return name
    return None
