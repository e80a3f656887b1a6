"""Blocks whose forward ``torch.compile`` has made one graph of.

A block's class gets a subclass with another forward, so that hooks on the block stay eager and a copy of it runs on its own
parameters. One compiled function serves all blocks of a class; their graphs differ only where the blocks do.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._inductor
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from lightning_seqpar.distributed.autograd import children, in_backward, unseen_by_compiler
from lightning_seqpar.parallel.module_changes import ModuleChange, ModuleSnapshot, changes_since

NAME_KEY = "_seqpar_block"
"""Under which a compiled block has its name, for messages."""

Check = Callable[[fx.GraphModule, Sequence[Any]], None]
"""What raises :class:`GraphRefusedError` for a traced graph, given what it was traced with."""


def is_compiled(module: nn.Module) -> bool:
    """Whether the strategy compiles a module, or the user's code has compiled it."""
    return NAME_KEY in vars(module) or module._compiled_call_impl is not None or "_orig_mod" in module._modules


class GraphRefusedError(ValueError):
    """A block was traced, but its graph would not compute what the block does."""


class BlockGraphs:
    """Compiles blocks, and knows what became of them."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        # By the name of a block's class, how many graphs: one for training, one for evaluation, one more for varying lengths.
        self.traced: Counter[str] = Counter()
        self.node_types: set[type] = set()  # classes of the autograd nodes that stand for these graphs
        self._classes: dict[type, Any] = {}
        self._dtype = torch.get_default_dtype()

    def compile(self, block: nn.Module, name: str, alike: int, check: Check | None = None) -> None:
        """Give a block a forward that is compiled when it is first called."""
        kind = type(block)
        if kind not in self._classes:
            self._classes[kind] = self._compiled_class(kind, alike, check)
        block.__dict__[NAME_KEY] = name
        block.__class__ = self._classes[kind]

    def _compiled_class(self, kind: Any, alike: int, check: Check | None) -> Any:
        """A subclass that looks like ``kind`` and runs its forward compiled."""
        run = torch.compile(  # type: ignore[call-overload]
            kind.forward,
            fullgraph=check is not None,
            dynamic=self._options.get("dynamic"),
            backend=functools.partial(self._make, kind.__name__, check),
            # A number that blocks differ in (the index of a layer) makes a graph for each of them.
            recompile_limit=8 * max(1, alike),
            isolate_recompiles=True,
        )

        @functools.wraps(kind.forward)
        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self._as_compiled(block):
                out = run(block, *args, **kwargs)
            self._note_nodes(out)
            return out

        made = type(kind.__name__, (kind,), {"forward": forward, "__doc__": kind.__doc__, "__module__": kind.__module__})
        made.__qualname__ = kind.__qualname__
        return made

    @contextmanager
    def _as_compiled(self, block: nn.Module) -> Iterator[None]:
        """Sets what a block's graph runs in."""
        dtype = torch.get_default_dtype()
        with ExitStack() as stack:
            stack.enter_context(_refusing(block.__dict__[NAME_KEY]))
            # Dispatch modes are hidden, since torch compiles nothing under them. DDP would split graphs where its buckets end.
            stack.enter_context(unseen_by_compiler())
            # In an activation checkpoint columns are given products, and take them, which is no side effect behind it.
            stack.enter_context(torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True))
            if DistributedDataParallel._get_active_ddp_module() is not None:
                stack.enter_context(torch._dynamo.config.patch(optimize_ddp=False))
            # Graphs are chosen by the default dtype too, which Lightning sets in a step alone, and not for a recompute behind it.
            if not in_backward():
                self._dtype = dtype
            elif dtype != self._dtype:
                torch.set_default_dtype(self._dtype)
                stack.callback(torch.set_default_dtype, dtype)
            yield

    def _make(self, kind: str, check: Check | None, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """The backend: a traced graph as something to call."""
        if check is not None:
            check(graph, inputs)
        self.traced[kind] += 1
        backend, options = self._options.get("backend", "inductor"), dict(self._options.get("options") or {})
        if backend == "inductor":
            mode = self._options.get("mode") or "default"
            return torch._inductor.compile(graph, list(inputs), {**torch._inductor.list_mode_options(mode), **options})
        return lookup_backend(backend)(graph, list(inputs), **options)

    def _note_nodes(self, out: Any) -> None:
        """Remember the class of the autograd node that a graph's outputs have: torch makes one for each graph."""
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                around = (leaf.grad_fn, *children(leaf.grad_fn))  # an output may be a view of what the node returned
                self.node_types |= {type(node) for node in around if node.name() == "CompiledFunctionBackward"}


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """What torch says of the block ``name``, which it can't compile, as an error of the house."""
    try:
        yield
    except TorchDynamoException as error:
        if isinstance(error, BackendCompilerFailed) and isinstance(error.inner_exception, GraphRefusedError):
            raise ValueError(f"{name}: compile=True: {error.inner_exception}") from None
        raise ValueError(
            f"{name}: compile=True, but torch.compile can't make one graph of this block; change what it names, or use "
            f"compile=False. torch says: {_shortened(error)}"
        ) from error


def _shortened(error: TorchDynamoException) -> str:
    """What torch says of a block that it can't trace: the reason, and the line of code."""
    text = str(error)
    reason = " ".join(text.split("\n\n")[0].split())
    reason = re.sub(r'^backend=".*?" raised: ', "", reason)  # which is this package's
    lines = [line.strip() for line in text.split("\n") if line.strip().startswith("File ")]
    return f"{reason} ({lines[-1]})" if lines else reason


def compile_plain_blocks(model: nn.Module, compiler: BlockGraphs) -> list[ModuleChange]:
    """Compile the repeated blocks of a model that is not sharded."""
    blocks = dict(_repeated_blocks(model))
    if not blocks:
        raise ValueError(
            "compile=True with tp=1: nothing is sharded, and no list of repeated blocks was found to compile; use compile=False "
            "and call model.compile() yourself in configure_model"
        )
    before = [ModuleSnapshot(block) for block in blocks.values()]
    for name, block in blocks.items():
        compiler.compile(block, name, len(blocks))
    return changes_since(before)


def _repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost repeated blocks of a model that no plan names: modules of one class with parameters, in one list."""
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(name.startswith(f"{one}.") for one in found):
            continue
        parts = dict(module.named_children())
        if len(parts) > 1 and len({type(part) for part in parts.values()}) == 1 and [*module.parameters()]:
            for key, part in parts.items():
                found.append(f"{name}.{key}" if name else key)
                yield found[-1], part
