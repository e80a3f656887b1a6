"""Blocks whose forward ``torch.compile`` has made one graph of, and what is looked for in such a graph.

A block's class gets a subclass with another forward, so that hooks on the block stay eager and a copy of it runs on its own
parameters. One compiled function serves all blocks of a class; their graphs differ only where the blocks do.

Eagerly a region switches between two streams. A compiled block draws from the rank's own throughout, or without sequence
parallelism from the replicated one. What would need the other is refused when the graph is made, and so is what may need it.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._inductor
import torch.nn.functional as F
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_seqpar.distributed.autograd import children, in_backward, unseen_by_compiler
from lightning_seqpar.layout.param_layout import ModelLayout
from lightning_seqpar.region.sequence_region import SequenceRegion

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
        self._steps = 0

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
        if self._backend == "inductor":
            return torch._inductor.compile(graph, list(inputs), self._inductor_options())
        return lookup_backend(self._backend)(graph, list(inputs), **dict(self._options.get("options") or {}))

    @property
    def _backend(self) -> str:
        """The compiler's name. By ``eager`` dynamo's graph would run as it is, of whose nodes none stands for a block."""
        name = str(self._options.get("backend", "inductor"))
        return "aot_eager" if name == "eager" else name

    def _inductor_options(self) -> dict[str, Any]:
        mode = self._options.get("mode") or "default"
        return {**torch._inductor.list_mode_options(mode), **dict(self._options.get("options") or {})}

    @functools.cached_property
    def captures(self) -> bool:
        """Whether CUDA graphs are asked for (``mode: reduce-overhead``)."""
        return self._backend == "inductor" and bool(self._inductor_options().get("triton.cudagraphs"))

    def begin_step(self) -> None:
        """A step begins, and no backward is to come: what CUDA graphs gave until now may be overwritten."""
        if not self.captures:
            return
        torch.compiler.cudagraph_mark_step_begin()
        self._steps += 1
        if self._steps == _CAPTURED_BY and not _captured():
            rank_zero_warn(
                f"lightning_seqpar: compile_options={self._options}: CUDA graphs are asked for, but torch has captured none in "
                f"{_CAPTURED_BY - 1} steps, so each kernel is launched by the host; TORCH_LOGS=cudagraphs says why, and "
                "lengths that vary, or a device that is no GPU, are the usual reasons"
            )

    def _note_nodes(self, out: Any) -> None:
        """Remember the class of the autograd node that a graph's outputs have: torch makes one for each graph."""
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                around = (leaf.grad_fn, *children(leaf.grad_fn))  # an output may be a view of what the node returned
                self.node_types |= {type(node) for node in around if node.name() == "CompiledFunctionBackward"}


_CAPTURED_BY = 8
"""The step by which graphs that are captured at all have been: they are run, recorded, and played from then on."""


def _captured() -> bool:
    """Whether torch plays any CUDA graph on the current device."""
    from torch._inductor.cudagraph_trees import get_manager  # which takes seconds, and only compiled blocks need it

    manager = get_manager(torch.cuda.current_device() if torch.cuda.is_available() else 0, create_if_none_exists=False)
    return manager is not None and any(manager.roots.values())


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


class _Draws(TorchDispatchMode):
    """Notes whether any operation draws random numbers."""

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            schema = func._schema.arguments
            given = {one.name: one.default_value for one in schema if one.has_default_value()}
            given |= dict(zip((one.name for one in schema), args, strict=False)) | kwargs
            rate = given.get("dropout_p", given.get("p"))
            self.drew = self.drew or rate != 0.0
        return func(*args, **kwargs)


def _parts(node: fx.Node, graph: fx.GraphModule) -> list[fx.GraphModule]:
    """The graphs that a node runs: an activation checkpoint's, or the forward and the backward of an autograd function."""
    held = [getattr(graph, str(one.target), None) for one in node.all_input_nodes if one.op == "get_attr"]
    return [one for one in held if isinstance(one, fx.GraphModule)]


def _collectives(graph: fx.GraphModule) -> list[str]:
    """The collectives of a graph, by name."""
    kinds = ("all_gather", *_SUMS)
    return [kind for node in graph.graph.nodes for kind in kinds if kind in str(node.target)]


def _value(node: Any) -> Any:
    """The example of what a node gives."""
    return node.meta.get("example_value")


def _sizes(shape: Sequence[Any]) -> list[int | str]:
    """A shape as messages show it, in which sizes may be symbols."""
    return [size if isinstance(size, int) else str(size) for size in shape]


def _draws(node: fx.Node, mode: Any) -> bool:
    """Whether what a node computes draws random numbers: its operation is run on examples that hold no numbers."""
    args: Any = fx.node.map_arg(node.args, _value)
    kwargs: Any = fx.node.map_arg(node.kwargs, _value)
    draws = _Draws()  # type: ignore[no-untyped-call]
    with torch.no_grad(), mode, draws:  # without a gradient, since saved-tensor hooks of the user's may be active
        if node.op == "call_method":
            getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            node.target(*args, **kwargs)  # type: ignore[operator]
    return draws.drew


_QUIET = ("c10d_functional", "lightning_seqpar", "wait_tensor", "getitem", "getattr", "setitem")
"""Parts of names of operations that draw nothing and better not run: collectives, and what reads parts."""
_SUMS = ("reduce_scatter", "all_reduce")
"""Parts of names of collectives behind which a value is no term of a sum any more."""


def check_graph(graph: fx.GraphModule, inputs: Sequence[Any], layout: ModelLayout, region: SequenceRegion) -> None:
    """Raise GraphRefusedError for a graph that would not compute what its block does."""
    check_gathered(graph)
    check_draws(graph, inputs, layout, region)


def check_draws(graph: fx.GraphModule, inputs: Sequence[Any], layout: ModelLayout, region: SequenceRegion) -> None:
    """Raise GraphRefusedError for the first draw of a graph that its block's stream is wrong for."""
    # The mode that the examples were made in; while a backend runs, another one is current.
    examples = (value for node in graph.graph.nodes if isinstance(value := _value(node), FakeTensor))
    first = next(examples, None)
    if first is not None:
        known = [layout.of(value) if isinstance(value, Tensor) else None for value in inputs]
        given = ["cut" if one is not None and one.is_sharded else "" for one in known]
        _Follower(region, first.fake_mode).follow(graph, given)


def check_gathered(graph: fx.GraphModule) -> None:
    """Raise GraphRefusedError where a block changes in place what was gathered for columns, which have multiplied it before.

    Eagerly a column that is called with what was changed multiplies it again.
    """
    for node in graph.graph.nodes:
        if "autograd_function_apply" not in str(node.target):
            continue
        read = {one.args[1]: one for one in node.users if one.target is operator.getitem}
        whole = _value(read[0]) if len(read) > 1 and 0 in read else None
        if isinstance(whole, Tensor) and whole._version:
            raise GraphRefusedError(
                f"a gathered activation of shape {_sizes(whole.shape)} is changed in place, in front of linears that have "
                "multiplied it where it was gathered: write the change as a new tensor"
            )


class _Follower:
    """Follows through a graph which values are whole, and which are this rank's features."""

    def __init__(self, region: SequenceRegion, mode: Any) -> None:
        self._region, self._mode = region, mode

    def follow(self, graph: fx.GraphModule, given: Sequence[Any]) -> Any:
        """The states of what a graph returns, as it returns it, given those of its inputs."""
        state: dict[fx.Node, Any] = {}
        inputs = iter(given)
        for node in graph.graph.nodes:
            state[node] = next(inputs, "") if node.op == "placeholder" else self._state(node, state, graph)
            if node.op not in ("call_function", "call_method") or _parts(node, graph):
                continue
            # What gives no tensor draws none, and may switch something on (an autocast) that nobody would switch off.
            gives = any(isinstance(leaf, Tensor) for leaf in tree_leaves(_value(node)))
            if gives and not any(text in str(node.target) for text in _QUIET) and _draws(node, self._mode):
                self._check_draw(node, state[node])
        (output,) = graph.graph.find_nodes(op="output")
        return fx.node.map_arg(output.args[0], state.__getitem__)

    def _state(self, node: fx.Node, state: Mapping[fx.Node, Any], graph: fx.GraphModule) -> Any:
        """``features`` of this rank, ``whole`` on a way to columns, ``cut`` for a parameter of which this is a part, or neither.

        Of a node that gives several values a tuple of such.
        """
        if node.target is operator.getitem and isinstance(several := state[node.all_input_nodes[0]], tuple | list):
            at: Any = node.args[1]
            return several[at]
        inputs = tree_leaves([state[one] for one in node.all_input_nodes])
        if parts := _parts(node, graph):
            inner = [state[one] for one in node.all_input_nodes if one.op != "get_attr"]
            # Of a function with its own backward the first graph is the forward, which may be given its context first.
            forward, used = parts[0], [text for part in parts for text in _collectives(part)]
            given = sum(one.op == "placeholder" for one in forward.graph.nodes)
            behind = self.follow(forward, [""] * (given - len(inner)) + inner)
            if "autograd_function_apply" not in str(node.target):
                return behind
            behind = behind[0]  # and what it keeps for its backward
            if not used:
                return behind
            first = _collectives(forward)
            gathers = "all_gather" in first or (not first and "all_reduce" in used)
            moved = "whole" if self._region.sp and gathers else ""
            return tree_map(lambda one: one if one == "features" else moved, behind)
        if "all_gather" in str(node.target):
            return "whole"
        if any(text in str(node.target) for text in _SUMS):
            return ""
        if "cut" in inputs or "features" in inputs:
            return "features"
        return "whole" if "whole" in inputs else ""

    def _check_draw(self, node: fx.Node, state: str) -> None:
        what = getattr(node.target, "__name__", str(node.target))
        if not self._region.sp:
            if state == "features":
                raise GraphRefusedError(
                    f"{what} draws for this rank's features, but without sequence parallelism a compiled block draws alike on "
                    "all ranks: use sp=True, or set that dropout to 0"
                )
            return
        if state == "whole":
            raise GraphRefusedError(
                f"{what} draws for whole activations between a gather and its columns, where all ranks must draw alike, but a "
                "compiled block draws for each rank by itself: set that dropout to 0"
            )
        shape = tuple(getattr(_value(node), "shape", ()))
        if node.target is F.scaled_dot_product_attention:  # it drops out single elements of what it looks at
            return
        if node.target in (F.dropout, torch.dropout) and (state == "features" or self._is_shard(node)):
            return  # single elements too
        raise GraphRefusedError(
            f"{what} draws a tensor of shape {_sizes(shape)}, which is not dropout of "
            "each element of an activation: for all positions alike (stochastic depth) the ranks would have to draw alike"
        )

    def _is_shard(self, node: fx.Node) -> bool:
        """Whether a node gives an activation's shard, in which every position is one of this rank alone."""
        value, frame = _value(node), self._region.frames.current  # the block's that is traced
        if not isinstance(value, Tensor) or value.ndim != frame.ndim:
            return False
        length = value.shape[self._region.dim]
        length = length if isinstance(length, int) else length.node.hint  # asking a symbol would bind the graph to it
        return bool(length == frame.part)
