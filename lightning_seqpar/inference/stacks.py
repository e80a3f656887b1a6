"""The stacks of repeated blocks in a recorded forward, and the norm after them at which the region may end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import nn

from lightning_seqpar.inference.trace import Call, ForwardTrace
from lightning_seqpar.layout.module_names import Argument


def activation(trace: ForwardTrace, call: Call) -> Argument | None:
    """The argument that is the activation: the first floating-point one with the shape of the call's first output.

    None if there is no such argument. Shapes are ``[tokens, h]``, ``[b, s, h]`` or, with positions in several dims,
    ``[b, h, w, c]`` and ``[b, c, h, w]``.
    """
    if not call.outputs:
        return None
    out = trace.values[call.outputs[0]]
    if not out.floating or len(out.shape) < 2:
        return None
    given = ((key, trace.values[value]) for key, value in call.args.items())
    return next((key for key, value in given if value.floating and value.shape == out.shape), None)


def find_stacks(trace: ForwardTrace) -> list[list[Call]]:
    """Find the repeated blocks: for each stack, the first call of every block, in order of execution.

    A block maps an activation to one of the same shape and holds at least two matrices. It stands in a list, or is one of
    several modules of one class, or is called several times. Of nested candidates the outermost is the block. A module
    outside lists that holds a list of modules that feed each other is no block but the owner of blocks: an encoder and a
    decoder may be of one class.
    """
    weighty = {
        name
        for name, module in trace.modules.items()
        if name
        and not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.MultiheadAttention)
        and any(True for _ in module.children())
        and sum(parameter.ndim >= 2 for parameter in module.parameters()) >= 2
    }
    # Blocks of images are candidates if they hold linears: of convolutions alone nothing is sharded.
    dense = {name for name in weighty if sum(p.ndim == 2 for p in trace.modules[name].parameters()) >= 2}
    fitting = [
        call
        for call in trace.calls
        if call.name in weighty
        and activation(trace, call) is not None
        and (call.name in dense or len(trace.values[call.outputs[0]].shape) < 4)
    ]
    by_kind: dict[tuple[str, type], list[Call]] = defaultdict(list)
    for call in fitting:
        by_kind[_parent(call.name), type(call.module)].append(call)
    listed = {call.id: call for call in fitting if _is_listed(trace.model, call.name)}
    repeated: set[str] = set()
    for calls in by_kind.values():
        if calls[0].id in listed or (
            len(calls) > 1 and not any(_holds_a_chain(trace, call, listed.values()) for call in calls)
        ):
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
    """The pattern and class of a model's repeated modules if they hold convolutions and none of the repeated holds a linear.

    Empty if there are no such modules, or linears among them.
    """
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
    """The name of the module that holds a module."""
    return name.rpartition(".")[0]


def _is_listed(model: nn.Module, name: str) -> bool:
    """Whether a module stands in a list of modules."""
    parent = _parent(name)
    return bool(parent) and isinstance(model.get_submodule(parent), nn.ModuleList | nn.Sequential)


def _holds_a_chain(trace: ForwardTrace, call: Call, listed: Iterable[Call]) -> bool:
    """Whether inside the call a module of a list works on what the one before it returned, as blocks do and experts don't."""
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
    """Whether a call happens inside a call of one of the modules ``among``."""
    return any(trace.calls[number].name in among for number in call.around)


def find_exit(trace: ForwardTrace, blocks: Sequence[str]) -> str | None:
    """The module at whose output the region ends: the final norm, if nothing else reads the last block's output.

    A norm works on each position by itself, so it can run on shards. None if the region ends with the last block.
    """
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
