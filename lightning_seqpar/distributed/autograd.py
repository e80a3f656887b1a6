"""torch's private calls, each behind a name that says what it tells; and the walk over an autograd graph.

The only module of the package that knows them: where a new torch changes one, it is mended here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

NO_BACKWARD = -1
"""What :func:`current_backward` answers where none runs."""

# ---- the engine ------------------------------------------------------------------------------------------------


def current_backward() -> int:
    """Which backward runs in this thread: a number of its own for each, or :data:`NO_BACKWARD`.

    A forward inside a backward is a recompute (activation checkpointing), and a hook may start another backward inside one.
    """
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether a backward runs: a forward that runs now is a recompute."""
    return torch._C._current_graph_task_id() != NO_BACKWARD


def will_run(node: Any) -> bool:
    """Whether the running backward comes to a node: ``torch.autograd.grad`` asks for some of a graph.

    Raises:
        RuntimeError: for the accumulator of a leaf whose gradient ``torch.autograd.grad`` was asked for.
    """
    return torch._C._will_engine_execute_node(node)


def sequence_nr(node: Any) -> int:
    """A node's place in the order in which nodes were made; the engine runs ready nodes youngest first."""
    number: int = node._sequence_nr()
    return number


def set_sequence_nr(x: Tensor, number: int) -> None:
    """Give the node that made ``x`` another place in that order, where this torch can."""
    node: Any = x.grad_fn
    if hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(number)


def next_sequence_nr() -> int:
    """The number of a node that is made now."""
    with torch.enable_grad():  # a reentrant checkpoint runs its forward without
        leaf = torch.empty(0, requires_grad=True)
        return sequence_nr(leaf.view_as(leaf).grad_fn)


# ---- the graph -------------------------------------------------------------------------------------------------


def children(node: Any) -> list[Any]:
    """The nodes that a node's gradient goes to."""
    return [child for child in input_nodes(node) if child is not None]


def input_nodes(node: Any) -> list[Any]:
    """The same for each argument of the function, none where an argument needs no gradient."""
    return [child for child, _ in node.next_functions]


def input_node(node: Any, at: int) -> Any:
    """The node that the gradient of a function's argument number ``at`` goes to; none where it needs no gradient."""
    return node.next_functions[at][0] if at < len(node.next_functions) else None


def leaf_of(node: Any) -> Tensor | None:
    """The leaf whose gradient a node accumulates; none for any other node."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def reach(start: Any, follow: Callable[[Any], list[Any]] = children) -> Iterator[Any]:
    """Every node of a graph once, from ``start`` on; ``follow`` says where to."""
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
    """Whether a node is one of ``function``'s, by class."""
    return isinstance(node, function._backward_cls)


def backward_classes(functions: Iterable[type[torch.autograd.Function]]) -> frozenset[type]:
    """The classes of the nodes that autograd functions of ours make; ``type(node)`` is one of them."""
    return frozenset(function._backward_cls for function in functions)


def node_classes(*operations: str) -> frozenset[type]:
    """The classes of the nodes that operations of torch's own make; ``type(node)`` is one of them.

    torch generates a class for each derivative formula and shows all of them in one module, but has no object that leads
    from an operation to its classes. Their names do: ``add`` makes ``AddBackward0`` and ``AddBackward1``.

    Args:
        operations: names of classes without ``Backward`` and number, such as ``Add``. One that this torch has not is
            left out, since no node of its graphs can be of it.
    """
    found = {name.rstrip("0123456789").removesuffix("Backward"): set[type]() for name in vars(torch._C._functions)}
    for name, one in vars(torch._C._functions).items():
        if isinstance(one, type):
            found[name.rstrip("0123456789").removesuffix("Backward")].add(one)
    return frozenset(one for operation in operations for one in found.get(operation, ()))


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether hooks see the gradient of a tensor, before or after it is accumulated."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def tensor_hooks(tensor: Tensor) -> list[int]:
    """The ids of a tensor's hooks, those before accumulation first."""
    return [*(tensor._backward_hooks or {}), *(getattr(tensor, "_post_accumulate_grad_hooks", None) or {})]


def has_node_hooks(node: Any) -> bool:
    """Whether Python code has hooks on a node."""
    for register in (node.register_prehook, node.register_hook):
        handle = register(_ignore)  # the one way to those that are there
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _ignore(*grads: Any) -> None:
    return None


# ---- hooks and modes that are active ---------------------------------------------------------------------------


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The innermost pair of hooks that decides what autograd keeps now; none where nobody does."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def push_saved_tensor_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Add an innermost pair; not as a context, since user code runs between here and its end."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Take the innermost pair away."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def function_mode() -> Any:
    """The innermost ``TorchFunctionMode``; none where there is none."""
    return _get_current_function_mode()


def dispatch_modes() -> list[Any]:
    """The active ``TorchDispatchMode`` objects, the outermost first."""
    return list(_get_current_dispatch_mode_stack())


def unseen() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode sees what is computed."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return nullcontext()
    return _disable_current_modes()


def without_subclasses() -> AbstractContextManager[Any]:
    """A context in which tensor subclasses are computed as what they wrap."""
    return torch._C.DisableTorchFunctionSubclass()


# ---- identities ------------------------------------------------------------------------------------------------


def storage_id(held: Tensor | torch.UntypedStorage) -> int:
    """A number for the memory that a tensor lies on, on every device: on meta no storage has an address."""
    storage = held.untyped_storage() if isinstance(held, Tensor) else held
    number: int = storage._cdata
    return number


def generator_id(generator: torch.Generator) -> int:
    """A number for a random generator; torch wraps its own anew in each call."""
    number: int = generator._cdata  # type: ignore[attr-defined]
    return number
