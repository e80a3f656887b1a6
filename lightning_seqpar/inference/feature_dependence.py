"""Which features belong together: Jacobian support of one block, and a rehearsal of one rank's part of it.

Everything here runs on one process, on one block of a copy, with the inputs of a recorded forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_seqpar.inference.dataflow import BlockFlow, CantInferError, UnknownLinearError
from lightning_seqpar.inference.model_copy import Quiet
from lightning_seqpar.layout.attribute_override import write_attribute
from lightning_seqpar.layout.linear_kind import features, linear_kind
from lightning_seqpar.layout.shard import Shard

_DRAWS = 16
"""Inputs that are tried before a feature counts as dead."""

Ranges = tuple[tuple[int, int], ...]

EQUAL = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest difference, relative to the largest value, that counts as equal."""


@dataclass(frozen=True)
class ColumnLayout:
    """How a column's out-features are dealt out.

    Attributes:
        ranges: what each rank holds.
        units: how many whole units each segment has.
        segments: sizes of the fused parts.
    """

    ranges: tuple[Ranges, ...]
    segments: tuple[int, ...]
    units: tuple[int, ...]


@dataclass
class GroupLayout:
    """One row, its columns, and what else must change with them.

    Attributes:
        units: whole units among the row's in-features.
        columns: layouts by column; a column that is missing stays whole.
        full_width: norms over the whole sharded width.
    """

    row: str
    features: int
    units: int
    columns: dict[str, ColumnLayout] = field(default_factory=dict)
    full_width: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Edit:
    """One more thing that changes on a rank beside the linears.

    Attributes:
        kind: ``set`` an attribute, cut a ``tensor`` or an ``arg`` along ``dim``; an argument that another block made
            is ``given`` as this rank's part already. ``narrow``: the argument is a stand-in of this rank's width.
        module: the module; for a tensor, the one that owns it.
        key: the attribute, the tensor's own name, or the argument.
        value: the attribute's new value.
        dim: the dim of the heads.
    """

    kind: str
    module: str
    key: int | str
    value: int = 0
    dim: int = 0

    @property
    def shown(self) -> str:
        """As messages name it."""
        argument = self.kind in ("arg", "given")
        if self.kind == "narrow":
            return f"the width of argument {self.key!r} of {self.module}"
        return f"argument {self.key!r} of {self.module}" if argument else f"{self.module}.{self.key}"


class Block:
    """One block of a copy, with the input that a recorded forward gave it."""

    def __init__(self, model: nn.Module, flow: BlockFlow, blocks: Collection[str] = ()) -> None:
        self.model, self.flow, self.blocks = model, flow, blocks
        self.module = flow.call.module
        self.modules = {name: model.get_submodule(name) for name, _ in model.named_modules()}

    def width(self, column: str) -> int:
        """Out-features of a column."""
        kind = linear_kind(self.modules[column])
        assert kind is not None
        return features(self.modules[column], kind)[0]

    def inputs(self, seed: int = 0, grad: bool = False) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
        """Fresh leaves in place of the recorded arguments; the activation is noise for ``seed`` > 0."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().clone()

        args, kwargs = tree_map_only(Tensor, leaf, self.flow.call.given)
        # A cache of keys and values was filled by the recorded forward, and would be read instead of computed.
        args = [None if _is_cache(arg) else arg for arg in args]
        kwargs = {key: None if _is_cache(arg) else arg for key, arg in kwargs.items()}
        holder: Any = args if isinstance(self.flow.arg, int) else kwargs
        x = holder[self.flow.arg]
        if seed:
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        x.requires_grad_(grad)
        holder[self.flow.arg] = x
        return tuple(args), kwargs, x

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward, without luck."""
        return self.quiet(self.module, args, kwargs)

    @staticmethod
    def quiet(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A module's forward, without luck; buffers that it updates come back."""
        kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        try:
            with Quiet():
                return module(*args, **kwargs)
        finally:
            for buffer, before in kept:
                if not torch.equal(buffer, before):
                    buffer.detach().copy_(before)

    def argument_shapes(self, name: str) -> dict[int | str, tuple[int, ...]]:
        """Shapes of the tensor arguments that a module inside the block is called with."""
        shapes: dict[int | str, tuple[int, ...]] = {}

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            shapes.update({key: tuple(value.shape) for key, value in given if isinstance(value, Tensor)})

        handle = self.modules[name].register_forward_pre_hook(note, with_kwargs=True)
        with torch.no_grad():
            args, kwargs, _ = self.inputs()
            self.run(args, kwargs)
        handle.remove()
        return shapes

    # ---- sequence --------------------------------------------------------------------------------------------

    def sequence_dim(self) -> int:
        """The dim along which the block mixes positions: 1 for ``[b, s, h]``, 0 for ``[s, b, h]`` or ``[t, h]``.

        Raises:
            CantInferError: if it mixes along both.
        """
        args, kwargs, x = self.inputs(grad=True)
        out = self.run(args, kwargs)
        first = out[0] if isinstance(out, list | tuple) else out
        if x.ndim == 2:
            return 0
        mixed = [False, False]
        for at in ((-1, -1), (0, 0)):
            cotangent = torch.zeros_like(first)
            cotangent[at[0], at[1]] = torch.randn(first.shape[-1], dtype=first.dtype)
            (grad,) = torch.autograd.grad(first, x, cotangent, retain_graph=True)
            touched = grad.abs().amax(-1) > 0
            mixed[0] |= bool(touched.any(1).sum() > 1)
            mixed[1] |= bool(touched.any(0).sum() > 1)
        if all(mixed):
            raise CantInferError(
                f"{self.flow.name}: it mixes both the first and the second dim of its input {list(x.shape)}, so neither is "
                "a batch; name the sequence's dim by {pattern: ..., style: blocks, dim: 1}"
            )
        return 0 if mixed[0] else 1

    # ---- which features belong together ----------------------------------------------------------------------

    def group(self, row: str, tp: int) -> GroupLayout:
        """The layout of one row and its columns for ``tp`` ranks.

        Raises:
            CantInferError: if the features do not fall apart into ``tp`` parts.
        """
        columns = self.flow.columns[row]
        for name in (row, *columns):
            if name not in self.modules:
                raise CantInferError(f"{name}: a parameter that is multiplied past any linear module (einsum?)")
            if linear_kind(self.modules[name]) is None:
                raise UnknownLinearError(
                    f"{name}: a {type(self.modules[name]).__name__}, which is not known to compute what nn.Linear does"
                )
        found = _Supports(self, row, columns, (), tp)
        if any(found.is_shared(column) for column in columns) and (norms := self._wide_norms(row, columns)):
            without = _Supports(self, row, columns, norms, tp)
            if sum(map(without.is_shared, columns)) < sum(map(found.is_shared, columns)):
                found = without
        dealt = [column for column in columns if not found.is_shared(column)]
        if not dealt:
            raise CantInferError(
                f"{row}: each of its {found.features} in-features depends on all features of {', '.join(columns)}, so they "
                f"can't be dealt out to tp={tp} ranks (a norm or a mix over the whole width?)"
            )
        counts = [count for column in dealt for count in found.units(column)]
        heads = max((count for count in counts if count < found.features), default=found.features)
        if heads % tp:
            works = [n for n in range(2, heads + 1) if heads % n == 0]
            raise CantInferError(
                f"{row}: its {found.features} in-features fall apart into {heads} units (heads), which do not divide by "
                f"tp={tp}" + (f"; use tp of {', '.join(map(str, works))}" if works else "")
            )
        out = GroupLayout(row, found.features, heads, full_width=list(found.skipped))
        for column in dealt:
            out.columns[column] = found.deal(column, heads)
        return out

    def mixes_positions(self, row: str) -> bool:
        """Whether the row's input at one position depends on its columns' outputs at others: attention, not an MLP."""
        try:
            probe = _Probe(self, row, self.flow.columns[row], 1, ())
        except CantInferError:
            probe = _Probe(self, row, self.flow.columns[row], 0, ())
        flat = probe.read.reshape(-1, probe.features)
        if not len(flat):
            return False  # an expert that was given no token
        cotangent = torch.zeros_like(flat)
        cotangent[-1] = 1.0
        leaves = [leaf for made in probe.made.values() for leaf in made]
        grads = torch.autograd.grad(flat, leaves, cotangent, allow_unused=True)
        return any(grad is not None and bool(grad.reshape(-1, grad.shape[-1])[:-1].any()) for grad in grads)

    def _wide_norms(self, row: str, columns: Sequence[str]) -> list[str]:
        """Modules without children that run between the columns and the row and keep their input's shape."""
        found: list[str] = []
        hooks = []
        ran: list[str] = []
        for name in (row, *columns):
            hooks.append(
                self.modules[name].register_forward_hook(lambda module, args, out, name=name: ran.append(name))
            )
        dense = {self.modules[name] for name in (row, *columns)}
        prefix = self.flow.name + "."
        shapes: dict[str, bool] = {}
        for name, module in self.modules.items():
            leaf = module not in dense and not any(True for _ in module.children())
            if name.startswith(prefix) and leaf and any(p.ndim == 1 for p in module.parameters()):

                def note(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
                    fits = args and isinstance(args[0], Tensor) and isinstance(out, Tensor)
                    between = bool(ran) and row not in ran
                    shapes[name] = bool(between and fits and args[0].shape == out.shape and args[0].ndim <= 3)

                hooks.append(module.register_forward_hook(note))
        try:
            with torch.no_grad():
                args, kwargs, _ = self.inputs()
                self.run(args, kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        widths = {self.width(name) for name in columns}
        for name, fits in shapes.items():
            module = self.modules[name]
            if fits and all(p.shape[0] in widths for p in module.parameters()):
                found.append(name)
        return found

    # ---- one rank's part, rehearsed --------------------------------------------------------------------------

    def rehearse(self, groups: Sequence[GroupLayout], tp: int, edits: Sequence[Edit]) -> str | None:
        """Run the block as each rank would, with ``edits`` of attributes; what is wrong, or none.

        Each row's input must be exactly this rank's part of the whole one's.
        """
        wanted = self._inputs_of([g.row for g in groups] + [n for g in groups for n in g.full_width])
        for rank in range(tp):
            try:
                with self._cut(groups, tp, rank, edits, wanted), torch.no_grad():
                    args, kwargs, _ = self.inputs()
                    self.run(args, kwargs)
            except _MismatchError as error:
                return str(error)
            except (RuntimeError, ValueError, IndexError, AssertionError, TypeError) as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return None

    def _inputs_of(self, names: Sequence[str]) -> dict[str, list[Tensor]]:
        kept: dict[str, list[Tensor]] = {name: [] for name in names}
        with ExitStack() as stack, torch.no_grad():
            for name in kept:

                def keep(module: nn.Module, args: Any, name: str = name) -> None:
                    kept[name].append(args[0])

                stack.callback(self.modules[name].register_forward_pre_hook(keep).remove)
            args, kwargs, _ = self.inputs()
            self.run(args, kwargs)
        return kept

    @contextmanager
    def _cut(
        self,
        groups: Sequence[GroupLayout],
        tp: int,
        rank: int,
        edits: Sequence[Edit],
        wanted: Mapping[str, list[Tensor]],
    ) -> Iterator[None]:
        counts = dict.fromkeys(wanted, 0)

        def check(name: str, x: Tensor, held: Tensor) -> Tensor:
            at = counts[name]
            counts[name] += 1
            if at >= len(wanted[name]):
                raise _MismatchError(f"{name} runs more often than in the whole model")
            whole = wanted[name][at]
            part = whole.index_select(-1, held)
            if x.shape != part.shape:
                raise _MismatchError(f"{name}: its input is {list(x.shape)}, expected {list(part.shape)}")
            if not part.numel():
                return whole
            scale = float(part.abs().max())
            if not float((x - part).abs().max()) <= EQUAL.get(part.dtype, 5e-2) * max(scale, 1e-30):
                raise _MismatchError(f"{name}: its input is not this rank's part of the whole one's")
            return whole

        stand_ins: list[tuple[Tensor, Tensor]] = []

        def real(module: nn.Module, args: Any) -> Any:
            return (next((x for stand_in, x in stand_ins if stand_in is args[0]), args[0]), *args[1:])

        with ExitStack() as stack:
            for group in groups:
                size = group.features // tp
                for column in group.columns:
                    stack.callback(self.modules[column].register_forward_pre_hook(real).remove)
                mine = torch.arange(rank * size, (rank + 1) * size)
                for column, layout in group.columns.items():
                    module = self.modules[column]
                    held = _indices(layout.ranges[rank])

                    def cut(module: nn.Module, args: Any, out: Tensor, held: Tensor = held) -> Tensor:
                        return out.index_select(-1, held.to(out.device))

                    stack.callback(module.register_forward_hook(cut).remove)
                    stack.enter_context(changed_attribute(module, "out_features", len(held)))
                for name in (group.row, *group.full_width):

                    def swap(
                        module: nn.Module, args: Any, name: str = name, mine: Tensor = mine, row: str = group.row
                    ) -> Any:
                        held = mine
                        if name != row:
                            width = wanted[name][0].shape[-1]
                            held = torch.arange(rank * (width // tp), (rank + 1) * (width // tp))
                        return (check(name, args[0], held.to(args[0].device)), *args[1:])

                    stack.callback(self.modules[name].register_forward_pre_hook(swap).remove)
                for name in group.full_width:

                    def slice_(module: nn.Module, args: Any, out: Tensor) -> Tensor:
                        width = out.shape[-1] // tp
                        return out.narrow(-1, rank * width, width)

                    stack.callback(self.modules[name].register_forward_hook(slice_).remove)
                stack.enter_context(changed_attribute(self.modules[group.row], "in_features", size))
            for edit in edits:
                stack.enter_context(_edited(self.modules[edit.module], edit, tp, rank, stand_ins))
            yield
            for name, count in counts.items():
                if count != len(wanted[name]):
                    raise _MismatchError(f"{name} runs {count} times, in the whole model {len(wanted[name])} times")


def _is_cache(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("update", "get_seq_length"))


class _MismatchError(Exception):
    """A rehearsal went wrong."""


@contextmanager
def changed_attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for an attribute, for a while."""
    first = name.partition(".")[0]
    missing = not hasattr(module, first)
    before = None if missing else getattr(module, first)
    write_attribute(module, name, value)
    try:
        yield
    finally:
        delattr(module, first) if missing else setattr(module, first, before)


@contextmanager
def _edited(
    module: nn.Module, edit: Edit, tp: int, rank: int, stand_ins: list[tuple[Tensor, Tensor]]
) -> Iterator[None]:
    def narrow(x: Tensor) -> Tensor:
        stand_in = x.new_full((), float("nan")).expand(*x.shape[:-1], x.shape[-1] // tp)
        stand_ins.append((stand_in, x))
        return stand_in

    def part(tensor: Tensor) -> Tensor:
        size = tensor.shape[edit.dim] // tp
        return tensor.narrow(edit.dim, rank * size, size)

    if edit.kind == "set":
        with changed_attribute(module, str(edit.key), edit.value):
            yield
    elif edit.kind == "tensor":
        tensor = getattr(module, str(edit.key))
        before = tensor.data
        tensor.data = part(before).clone()
        try:
            yield
        finally:
            tensor.data = before
    else:
        changed = narrow if edit.kind == "narrow" else part

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if isinstance(edit.key, str):
                return args, {**kwargs, edit.key: changed(kwargs[edit.key])}
            return (*args[: edit.key], changed(args[edit.key]), *args[edit.key + 1 :]), kwargs

        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _indices(ranges: Ranges) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])


class _Probe:
    """One forward of the block with the graph from its columns' outputs to its row's input kept."""

    def __init__(self, block: Block, row: str, columns: Sequence[str], seed: int, skipped: Sequence[str]) -> None:
        self.made: dict[str, list[Tensor]] = {name: [] for name in columns}
        self._reads: list[Tensor] = []
        with ExitStack() as stack:
            for name in columns:

                def cut(module: nn.Module, args: Any, out: Tensor, name: str = name) -> Tensor:
                    leaf = out.detach().requires_grad_()
                    self.made[name].append(leaf)
                    return leaf

                stack.callback(block.modules[name].register_forward_hook(cut).remove)
            for name in skipped:
                hook = block.modules[name].register_forward_hook(lambda module, args, out: args[0])
                stack.callback(hook.remove)

            def keep(module: nn.Module, args: Any) -> None:
                self._reads.append(args[0])

            stack.callback(block.modules[row].register_forward_pre_hook(keep).remove)
            with torch.enable_grad():
                args, kwargs, _ = block.inputs(seed)
                block.run(args, kwargs)
        for name in (row, *columns):
            if not (self._reads if name == row else self.made[name]):
                raise CantInferError(
                    f"{name}: the block run by itself does not call it (a cache, or a state of its own?)"
                )
        self.read = self._reads[0]
        if not self.read.requires_grad:
            raise CantInferError(
                f"{row}: its input has no graph in the block's forward (reentrant checkpointing inside the block?); use "
                "use_reentrant=False"
            )
        self.features = self.read.shape[-1]
        self._seed = seed

    def support(self, features: Tensor) -> dict[str, Tensor]:
        """For each column, which of its out-features the row's input ``features`` (indices) depend on: bool ``[f]``."""
        generator = torch.Generator().manual_seed(17 + self._seed)
        cotangent = torch.zeros_like(self.read)
        shape = (*self.read.shape[:-1], len(features))
        noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.read)
        cotangent.index_copy_(-1, features.to(self.read.device), noise)
        leaves = [(name, leaf) for name, made in self.made.items() for leaf in made]
        grads = torch.autograd.grad(
            self.read, [leaf for _, leaf in leaves], cotangent, retain_graph=True, allow_unused=True
        )
        out: dict[str, Tensor] = {}
        for (name, leaf), grad in zip(leaves, grads, strict=True):
            touched = torch.zeros(leaf.shape[-1], dtype=torch.bool, device=leaf.device)
            if grad is not None and grad.numel():  # an expert may be given no token
                touched = grad.reshape(-1, leaf.shape[-1]).abs().amax(0) > 0
            out[name] = out[name] | touched if name in out else touched
        return {name: touched.cpu() for name, touched in out.items()}


class _Supports:
    """What each rank's part of a row's input depends on, over several draws: ReLU hides features in one of them."""

    def __init__(self, block: Block, row: str, columns: Sequence[str], skipped: Sequence[str], tp: int) -> None:
        self.skipped = skipped
        self._probes = [_Probe(block, row, columns, 0, skipped)]
        self._features = self._probes[0].features
        self._tp = tp
        self._feeding = {name for column in columns for name in block.flow.linears[column].upstream}
        if self.features % tp:
            raise CantInferError(f"{row}: its {self.features} in-features do not divide by tp={tp}")
        size = self.features // tp
        self._parts = self._all_parts(size)
        for seed in range(1, _DRAWS):
            if seed > 2 and all((self._owners(column) > 0).all() for column in columns):
                break
            try:
                self._probes.append(_Probe(block, row, columns, seed, skipped))
            except CantInferError:
                continue  # for other numbers it is not called: an expert that no token chose
            self._parts = self._all_parts(size)

    def _all_parts(self, size: int) -> list[dict[str, Tensor]]:
        return [self._union(torch.arange(rank * size, (rank + 1) * size)) for rank in range(self._tp)]

    @property
    def features(self) -> int:
        """In-features of the row."""
        return self._features

    def _union(self, features: Tensor) -> dict[str, Tensor]:
        found = [probe.support(features) for probe in self._probes]
        return {name: torch.stack([one[name] for one in found]).any(0) for name in found[0]}

    def _owners(self, column: str) -> Tensor:
        return torch.stack([part[column] for part in self._parts]).sum(0)

    def is_shared(self, column: str) -> bool:
        """Whether every rank needs all of a column, or all of what another column does not read of it."""
        owners = self._owners(column)
        if column in self._feeding:
            owners = owners[owners > 0]
        return bool((owners == self._tp).all())

    def _runs(self, column: str) -> tuple[Ranges, ...]:
        """What each rank needs of a column."""
        return _split_at_all_ends([_runs(part[column]) for part in self._parts])

    def units(self, column: str) -> list[int]:
        """Into how many units the row's in-features fall apart, as far as each segment of a column goes (queries, keys)."""
        try:
            segments = _segments(column, self._runs(column))
        except CantInferError:
            return [self._units(column, 0, None)]
        return [self._units(column, start, stop) for start, stop, _ in segments]

    def _units(self, column: str, start: int, stop: int | None) -> int:
        own = self._owners(column) == 1
        own[:start] = False
        if stop is not None:
            own[stop:] = False
        everything = torch.arange(self.features)
        for size in range(1, self.features):
            if self.features % size == 0:
                first, rest = (self._union(part)[column] & own for part in (everything[:size], everything[size:]))
                if first.any() and not (first & rest).any():
                    return self.features // size
        # Kept in whole groups, as shared kv heads are: as many as are distinct.
        return len({tuple(part[column].tolist()) for part in self._parts})

    def deal(self, column: str, most: int) -> ColumnLayout:
        """The parts of a column, by rank; ``most`` units at most.

        Raises:
            CantInferError: for parts that no list of segments describes.
        """
        covered = torch.stack([part[column] for part in self._parts]).any(0)
        if not covered.all():
            missing = int((~covered).nonzero()[0])
            raise CantInferError(f"{column}: out-feature {missing} reaches nothing, so no rank would own it")
        ranges = self._runs(column)
        segments = _segments(column, ranges)
        if segments[-1][1] != len(covered):
            raise CantInferError(f"{column}: the parts that ranks need leave a gap: {_shown(ranges)}")
        owners = self._owners(column)
        sizes = [stop - start for start, stop, _ in segments]
        counts = [
            parts if owners[start] > 1 else min(self._units(column, start, stop), most)
            for start, stop, parts in segments
        ]
        if Shard.by_segments(0, sizes, counts, len(ranges), column).ranges != ranges:
            raise CantInferError(f"{column}: its parts are not dealt out in order: {_shown(ranges)}")
        return ColumnLayout(ranges, tuple(sizes), tuple(counts))


def _runs(touched: Tensor) -> Ranges:
    held = touched.nonzero().flatten().tolist()
    runs: list[list[int]] = []
    for index in held:
        if runs and runs[-1][1] == index:
            runs[-1][1] = index + 1
        else:
            runs.append([index, index + 1])
    return tuple((start, stop) for start, stop in runs)


def _segments(column: str, ranges: Sequence[Ranges]) -> list[tuple[int, int, int]]:
    """Start, stop and number of distinct parts of each segment.

    Raises:
        CantInferError: where the ranks' parts are no segments.
    """
    if any(len(runs) != len(ranges[0]) for runs in ranges):
        raise CantInferError(f"{column}: ranks need parts of it that are not alike: {_shown(ranges)}")
    found, start = [], 0
    for runs in zip(*ranges, strict=True):
        distinct = list(dict.fromkeys(runs))
        stop = start
        for low, high in distinct:
            if low != stop:
                raise CantInferError(f"{column}: the parts that ranks need are not side by side: {_shown(ranges)}")
            stop = high
        found.append((start, stop, len(distinct)))
        start = stop
    return found


def _split_at_all_ends(ranges: Sequence[Ranges]) -> tuple[Ranges, ...]:
    """Runs cut wherever another rank's begins or ends: parts that happen to lie side by side are told apart."""
    ends = sorted({end for runs in ranges for run in runs for end in run})
    split = []
    for runs in ranges:
        parts = []
        for start, stop in runs:
            cuts = [start, *(end for end in ends if start < end < stop), stop]
            parts += list(pairwise(cuts))
        split.append(tuple(parts))
    return tuple(split)


def _shown(ranges: Sequence[Ranges]) -> str:
    return "; ".join(
        f"rank {rank}: {', '.join(f'{a}-{b - 1}' for a, b in runs)}" for rank, runs in enumerate(ranges[:2])
    )
