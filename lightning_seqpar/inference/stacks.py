"""Where a recorded forward has repeated blocks, what each of them maps, and where the region behind them may end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import nn

from lightning_seqpar.inference.trace import Call, ForwardTrace
from lightning_seqpar.layout.module_names import Argument

_NORMS = (nn.LayerNorm, nn.RMSNorm)


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


def find_exit(trace: ForwardTrace, blocks: Sequence[str]) -> str | None:
    """The final norm, if nothing else reads the last block's output; none if the last block itself is the end."""
    calls = [call for call in trace.calls if call.name in blocks]
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
