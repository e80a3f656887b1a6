"""torch's private autograd calls, each behind a function whose name says what it answers; and walks over a graph.

No other module of this package calls them, so that a change in a new version of torch is mended here alone.
"""

from __future__ import annotations

import functools
import gc
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_in_torch_dispatch_mode,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _CachedTorchDispatchMode


class Function(torch.autograd.Function):
    """torch's own, with another ``apply`` that goes straight to the engine: torch's walks over all arguments for functorch."""

    @classmethod
    def applied(cls, *args: Any, traced: bool = False) -> Any:
        """The outputs of ``forward``; in a graph (``traced``) as torch applies it, which is what dynamo knows."""
        if traced or torch._C._are_functorch_transforms_active():
            return cls.apply(*args)  # type: ignore[no-untyped-call]
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


NO_BACKWARD = -1
"""What :func:`current_backward` answers when no backward runs."""


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for the ``backward`` of an autograd function that has no second derivative.

    torch's own lets a result pass for a constant where the incoming gradient needs none, as that of a loss: a gradient penalty
    would be wrong without an error. Here any derivative of the result raises. Where gradients are not to be differentiated
    (``create_graph=False``) nothing is added.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            out = backward(ctx, *grads)
        results = out if isinstance(out, tuple) else (out,)
        refuse = torch._C._functions.DelayedError(
            b"trying to differentiate twice a function that was marked with @once_differentiable", len(results)
        )
        aliases: Any = [one if one is None else one.detach().requires_grad_() for one in results]
        return refuse(*aliases)

    return wrapped


# ---- the engine ------------------------------------------------------------------------------------------------


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread, or :data:`NO_BACKWARD`; each backward has another number.

A forward inside a backward is a recompute (activation checkpointing), and a hook may start another backward inside one.
"""


def in_backward() -> bool:
    """Whether a backward runs in this thread; a forward that runs now is then a recompute."""
    return torch._C._current_graph_task_id() != NO_BACKWARD


def run_backward(
    loss: Tensor, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = ()
) -> None:
    """``Tensor.backward`` without asking modes: one that is asked is not active while the backward runs."""
    grads = (torch.ones_like(loss) if gradient is None else gradient,)
    kept = create_graph if retain_graph is None else retain_graph
    leaves = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ())
    torch.autograd.graph._engine_run_backward(
        (loss,), grads, kept, create_graph, leaves, allow_unreachable=True, accumulate_grad=True
    )


def sequence_nr(node: Any) -> int:
    """The number that a node got when it was made. Of the nodes that are ready, the engine runs the highest number first."""
    number: int = node._sequence_nr()
    return number


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Whether a graph is made from here on; torch's contexts of the same take six calls."""


next_sequence_nr: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The sequence number that a node would get if it were made now."""


# ---- the graph -------------------------------------------------------------------------------------------------


def children(node: Any) -> list[Any]:
    """The nodes to which a node passes gradients on: those that made its inputs."""
    return [child for child in input_nodes(node) if child is not None]


def input_nodes(node: Any) -> list[Any]:
    """One entry for each argument of a node's function: the node that made it, or None where it needs no gradient."""
    return [child for child, _ in node.next_functions]


def input_node(node: Any, at: int) -> Any:
    """The node that made the argument number ``at`` of a node's function; None where it needs no gradient."""
    return node.next_functions[at][0] if at < len(node.next_functions) else None


def outputs_of(node: Any) -> int:
    """How many outputs the function of a node has."""
    return len(node._input_metadata)


def leaf_of(node: Any) -> Tensor | None:
    """The leaf tensor whose gradient a node accumulates; None if the node is no accumulator."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def reach(start: Any, follow: Callable[[Any], list[Any]] = children) -> Iterator[Any]:
    """Walk over a graph, and yield every node once."""
    seen: set[Any] = set()
    todo = [start]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo += follow(node)


def is_node_of(node: Any, function: type[torch.autograd.Function]) -> bool:
    """Whether a node was made by applying an autograd function of the class ``function``."""
    return isinstance(node, function._backward_cls)


def backward_classes(functions: Iterable[type[torch.autograd.Function]]) -> frozenset[type]:
    """The classes of the nodes that autograd functions of ours make; ``type(node)`` is one of them."""
    return frozenset(function._backward_cls for function in functions)


def node_classes(*operations: str) -> frozenset[type]:
    """The classes of the nodes that operations of torch's own make, by their names: ``Add`` for ``AddBackward0`` and others."""
    found = {name.rstrip("0123456789").removesuffix("Backward"): set[type]() for name in vars(torch._C._functions)}
    for name, one in vars(torch._C._functions).items():
        if isinstance(one, type):
            found[name.rstrip("0123456789").removesuffix("Backward")].add(one)
    return frozenset(one for operation in operations for one in found.get(operation, ()))


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether hooks are registered on the gradient of a tensor, before or after it is accumulated."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


grad_hooks = operator.attrgetter("_backward_hooks")
"""The hooks on the gradient of a tensor; None before the first."""


def count_tensor_hooks(tensors: Iterable[Tensor]) -> list[int]:
    """How many hooks are registered on the gradient of each tensor."""
    return [len(x._backward_hooks or ()) + len(getattr(x, "_post_accumulate_grad_hooks", None) or ()) for x in tensors]


# ---- hooks and modes that are active ---------------------------------------------------------------------------


saved_tensor_hooks: Callable[[], tuple[Any, Any] | None] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)
"""The innermost pair of hooks (pack, unpack) on saved tensors, which applies now; None if there are no hooks."""


def saved_tensor_hooks_allowed() -> bool:
    """Whether hooks on saved tensors may be added now; in ``torch.func``'s transforms they may not."""
    allowed: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return allowed


def is_of_checkpoint(hooks: tuple[Any, Any] | None) -> bool:
    """Whether hooks on saved tensors are an activation checkpoint's, whose two runs must save the same."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def dispatch_modes() -> list[Any]:
    """The active ``TorchDispatchMode`` objects, the outermost first."""
    return list(_get_current_dispatch_mode_stack()) if torch._C._len_torch_dispatch_stack() else []


def kind_of_device(x: Tensor) -> str:
    """The kind of device that a tensor is on; of one without memory, that for which a dispatch mode lets it stand."""
    return next((mode.stands_for for mode in dispatch_modes() if hasattr(mode, "stands_for")), x.device.type)


def unseen() -> AbstractContextManager[Any]:
    """A context manager in which no ``TorchDispatchMode`` sees what is computed."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return nullcontext()
    return _disable_current_modes()


def unseen_by_compiler() -> AbstractContextManager[Any]:
    """A context manager in which ``torch.compile`` compiles: no ``TorchDispatchMode`` is active under which it would not."""
    return unseen() if is_in_torch_dispatch_mode(include_infra_modes=False) else nullcontext()


def without_overrides() -> AbstractContextManager[Any]:
    """A context in which functions of tensors are torch's own, whatever class a tensor has and whatever mode is active."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return context


def without_subclasses() -> AbstractContextManager[Any]:
    """A context manager in which functions of tensor subclasses run as those of plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


as_plain_tensors: Any = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a subclass of tensors that is asked no sooner than below autograd."""


def memory_of(x: Tensor) -> int | None:
    """What tells the memory of a tensor from that of others, also where it has no numbers; None for a sparse one."""
    return None if x.layout is not torch.strided else x.untyped_storage()._cdata


def identities(tensors: Iterable[Tensor | None]) -> tuple[int, ...]:
    """What tells some tensors from others, and from themselves as they were: the objects, their versions and memory."""
    found: list[int] = []
    for one in tensors:
        if one is not None:
            found += id(one), one._version, one.untyped_storage()._cdata
    return tuple(found)


class GivenAway:
    """A tensor that was given away as a copy where torch gives a view: a change of it in place must not be lost."""

    def __init__(self, copy: Tensor) -> None:
        self._memory = StorageWeakRef(copy.untyped_storage())
        self._counter: Tensor | None = None
        if not copy.is_inference():  # which counts no changes
            self._counter = copy.detach()  # shares the count of changes in place ...
            self._counter.data = self._counter.new_empty(0)  # ... and no memory
            self._version = self._counter._version

    @property
    def is_changed(self) -> bool:
        """Whether the copy was changed in place since."""
        return self._counter is not None and self._counter._version != self._version

    @property
    def is_held(self) -> bool:
        """Whether somebody has the copy, or a view of it."""
        return not self._memory.expired()


def selective_checkpoint_caches() -> list[Tensor]:
    """What torch's selective checkpoints cache for a backward, found among all objects of the process, which takes a while."""
    found: list[Tensor] = []
    for one in gc.get_objects():
        if issubclass(type(one), _CachedTorchDispatchMode):
            entries = tree_leaves(list(one.storage.values()))
            found += [entry.val for entry in entries if isinstance(getattr(entry, "val", None), Tensor)]
    return found


def innermost_dispatch_mode() -> Any:
    """The dispatch mode that is shown operations first; None where none is active."""
    stack = _get_current_dispatch_mode_stack()
    return stack[-1] if stack else None


def leave_dispatch_mode(mode: Any) -> None:
    """Leave a dispatch mode, also where code within has entered others that stay, or has left one that was entered before."""
    stack = _get_current_dispatch_mode_stack()
    above = stack[stack.index(mode) + 1 :] if mode in stack else []
    for _ in above:
        _pop_mode()
    mode.__exit__(None, None, None)
    for other in above:
        _push_mode(other)


class Watch(TorchDispatchMode):
    """A dispatch mode that is shown higher-order operators (FlexAttention), too.

    It lets them pass by :func:`is_higher_order`; without that torch raises.
    """

    supports_higher_order_operators = True


def is_higher_order(func: Any) -> bool:
    """Whether what a dispatch mode is shown is an operator that calls functions, and not one of tensors alone."""
    return isinstance(func, HigherOrderOperator)


def in_plain_operations(func: Any) -> Callable[..., Any]:
    """The same of such an operator, by operations that have all types on all devices."""
    run: Callable[..., Any] = func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
    return run


# ---- identities ------------------------------------------------------------------------------------------------


def storage_id(owner: Tensor | torch.UntypedStorage) -> int:
    """A number that identifies a storage, or that of a tensor, for as long as the storage lives.

    Unlike the address of its memory it exists on every device; on the meta device storages have no memory.
    """
    storage = owner.untyped_storage() if isinstance(owner, Tensor) else owner
    number: int = storage._cdata
    return number


def generator_id(generator: torch.Generator) -> int:
    """A number that identifies a random generator; torch may wrap the same one in another Python object on each call."""
    number: int = generator._cdata  # type: ignore[attr-defined]
    return number
