"""Blocks whose forward is right on whole sequences only, since it depends on the order or the number of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_seqpar.inference.dataflow import BlockFlow
from lightning_seqpar.inference.trace import Op


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
    makers: dict[int, Op] = {}
    for op in trace.ops_in(flow.call):
        for number in op.outputs:
            makers.setdefault(number, op)
    square = tokens[0] == tokens[1]  # then a transposed activation has the same shape, so any transpose counts
    points = [(name, args) for (name, style), args in flow.gathers.items() if style == "gather"] + [*flow.sums.items()]
    for name, args in points:
        call = flow.call_of(name)
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
