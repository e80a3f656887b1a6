"""One block run by itself: whether it mixes positions, and which features belong together.

Features are found by gradients: a random cotangent on some features of a row's input reaches exactly the out-features of the
columns that they are made of (the support of the Jacobian), up to values that happen to be zero.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_seqpar.inference.dataflow import BlockFlow, CantInferError, UserDecidesError
from lightning_seqpar.inference.model_copy import Quiet
from lightning_seqpar.layout.linear_kind import features, is_parametrized, linear_kind
from lightning_seqpar.layout.param_layout import Shard
from lightning_seqpar.user_input import sizes_that_divide

EQUAL = {torch.float64: 1e-8, torch.float32: 1e-3}  # largest relative difference of equal tensors; 5e-2 in other types


def is_equal(got: Tensor, wanted: Tensor, limit: float | None = None) -> bool:
    """Whether two tensors are equal up to rounding, by :data:`EQUAL` or another limit."""
    limit = EQUAL.get(wanted.dtype, 5e-2) if limit is None else limit
    return float((got - wanted).abs().max()) <= limit * max(float(wanted.abs().max()), 1e-30)


@contextmanager
def other_data(tensors: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """While open, each of the first tensors has the data of the second."""
    with ExitStack() as stack:
        for tensor, data in tensors:
            stack.callback(setattr, tensor, "data", tensor.data)
            tensor.data = data
        yield


class Block:
    """A block of a copy that is run with the input that it had in a recorded forward; ``blocks`` are the others of its stack."""

    def __init__(self, flow: BlockFlow, blocks: Collection[str] = ()) -> None:
        self.flow, self.model, self.blocks = flow, flow.trace.model, blocks
        self.module, self.modules = flow.call.module, flow.trace.modules

    def width(self, column: str) -> int:
        """Number of a column's out-features."""
        linear = self.flow.linears[column]
        if not linear.is_called:
            return self.model.get_parameter(linear.parameter).shape[linear.out_dim]
        kind = linear_kind(self.modules[column])
        assert kind is not None
        return features(self.modules[column], kind)[0]

    def run(self, seed: int = 0, *, grad: bool = False) -> tuple[Tensor, Any]:
        """Run it with what it was given, as leaves of a new graph: its activation, and what it returns.

        With a ``seed`` above 0 the activation is noise drawn from it; else it is the recorded one.
        """
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), self.flow.call.given)
        # The recorded forward filled a cache of keys and values, which the block would read instead of computing them.
        args = [None if _is_cache(arg) else arg for arg in args]
        kwargs = {key: None if _is_cache(arg) else arg for key, arg in kwargs.items()}
        holder: Any = args if isinstance(self.flow.arg, int) else kwargs
        x = holder[self.flow.arg]
        if seed:
            generator = torch.Generator().manual_seed(seed)
            holder[self.flow.arg] = x = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        x.requires_grad_(grad)
        return x, run_quietly(self.module, args, kwargs)

    def sequence_dim(self) -> int | None:
        """The tensor dim along which the block mixes positions: 1 for ``[b, s, h]``, 0 for ``[s, b, h]`` or ``[tokens, h]``.

        None if there is no such one dim: positions in two dims (``[b, h, w, c]``), or entries of a batch that mix (a batch norm).
        """
        if len(self.flow.tokens) != 2:
            return 0 if len(self.flow.tokens) == 1 else None
        x, out = self.run(grad=True)
        first = next(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad)
        mixed = [False, False]
        for at in ((-1, -1), (0, 0)):
            cotangent = torch.zeros_like(first)
            cotangent[at[0], at[1]] = torch.randn(first.shape[-1], dtype=first.dtype)
            (grad,) = torch.autograd.grad(first, x, cotangent, retain_graph=True, materialize_grads=True)
            touched = grad.abs().amax(-1) > 0
            mixed[0] |= bool(touched.any(1).sum() > 1)
            mixed[1] |= bool(touched.any(0).sum() > 1)
        return None if all(mixed) else 0 if mixed[0] else 1


def _is_cache(value: Any) -> bool:
    """Whether an argument is a cache of keys and values, recognised by transformers' methods."""
    return all(callable(getattr(value, name, None)) for name in ("update", "get_seq_length"))


def run_quietly(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A module's forward, with random draws made constant, on copies of its buffers, which it may update.

    The graph of what is returned keeps the copies: buffers that were put back would have changed under it.
    """
    copies: dict[int, Tensor] = {}
    held = [(owner._buffers, dict(owner._buffers)) for owner in module.modules()]
    try:
        for buffers, before in held:
            for key, buffer in before.items():
                if buffer is not None:
                    buffers[key] = copies.setdefault(id(buffer), buffer.detach().clone())
        with Quiet():
            return module(*args, **kwargs)
    finally:
        for buffers, before in held:
            buffers.update(before)


_MAX_DRAWS = 16  # inputs that are tried at most before an out-feature counts as one that nothing depends on (ReLU hides some)
Ranges = tuple[tuple[int, int], ...]  # ranges ``(start, stop)`` of features


@dataclass(frozen=True)
class ColumnLayout:
    """How a column's out-features are split over the ranks."""

    ranges: tuple[Ranges, ...]  # for each rank, the ranges of out-features that it gets
    segments: tuple[int, ...]  # sizes of the parts of a fused projection, such as `[q|k|v]`; one for an ordinary linear
    units: tuple[int, ...]  # for each segment, the number of units (heads) that must stay whole


@dataclass
class GroupLayout:
    """How one row and its columns are split over the ranks."""

    row: str  # the row's name
    features: int  # number of its in-features
    units: int  # number of units (heads) in them that must stay whole; of several segments, of that with the largest units
    segments: tuple[int, ...] = ()  # sizes of the parts that its input is put together of, `[attention|mlp]`; one for most rows
    segment_units: tuple[int, ...] = ()  # for each of them, the number of units
    columns: dict[str, ColumnLayout] = field(default_factory=dict)  # one that is missing stays whole
    full_width: list[str] = field(default_factory=list)  # norms between them that need the whole width


def part_of_segments(segments: Sequence[int], rank: int, tp: int) -> Tensor:
    """The indices of the features that a rank has, if each segment of them is dealt out in order."""
    return torch.cat([segment.chunk(tp)[rank] for segment in torch.arange(sum(segments)).split(list(segments))])


def group_layout(block: Block, row: str, tp: int) -> GroupLayout:
    """Split one row and its columns over ``tp`` ranks.

    Raises CantInferError if the features can't be split into ``tp`` independent parts, UserDecidesError if another tp could.
    """
    columns = block.flow.columns[row]
    for name in (row, *columns):
        linear = block.flow.linears[name]
        module = block.modules.get(name)
        if is_parametrized(module):
            raise CantInferError(
                f"{name}: its weight is parametrized, that is computed of other parameters before each product "
                "(torch.nn.utils.parametrize, weight_norm, spectral_norm), and those are not cut"
            )
        if not linear.is_called and (name == row or block.model.get_parameter(linear.parameter).ndim != 2):
            raise CantInferError(f"{linear.parameter}: a parameter that is multiplied past any linear module (einsum?)")
    support = _FeatureSupport(block, row, columns, tp)
    # A linear over positions, or one over all features, hides from which columns its input comes.
    if passed := [name for name in columns if support.mixes(name) and block.flow.linears[name].upstream & {*columns}]:
        columns = [name for name in columns if name not in passed]
        support = _FeatureSupport(block, row, columns, tp)
    if any(map(support.shared, columns)) and (norms := _wide_norms(block, row, columns, support.features)):
        without = _FeatureSupport(block, row, columns, tp, norms)
        if sum(map(without.shared, columns)) < sum(map(support.shared, columns)):
            support = without
    sharded = [column for column in columns if not support.is_shared(column)]
    if not sharded:
        raise CantInferError(
            f"{row}: each of its {support.features} in-features depends on all features of {', '.join(columns)}, so they "
            f"can't be dealt out to tp={tp} ranks (a norm or a mix over the whole width?)"
        )
    units = [support.units(sharded, at) for at in range(len(support.segments))]
    heads = min(units)
    if heads % tp:
        raise UserDecidesError(
            f"{row}: its {support.features} in-features fall apart into {heads} units (heads), which do not divide by "
            f"tp={tp}; {sizes_that_divide('tp', heads)}"
        )
    out = GroupLayout(row, support.features, heads, support.segments, tuple(units), full_width=list(support.skipped))
    for column in sharded:
        out.columns[column] = support.deal(column, min((units[at] for at in support.feeds[column]), default=heads))
    return out


def mixes_positions(flow: BlockFlow, row: str, *, unknown: bool = False) -> bool:
    """Whether the row's input at one position depends on its columns' outputs at others, as in attention and not in an MLP.

    ``unknown`` is the answer for a row or columns that are no modules.
    """
    columns = flow.columns[row]
    if row in flow.attentions:
        return False  # it gathers for itself
    if not all(name in flow.trace.modules for name in (row, *columns)):
        return unknown
    if not all(flow.linears[column].is_called for column in columns):
        return True  # a weight's gradient does not tell positions apart; it is attention that calls projections so
    try:
        probe = _Probe(Block(flow), row, columns, 1, ())
    except CantInferError:
        probe = _Probe(Block(flow), row, columns, 0, ())
    flat = probe.read.reshape(-1, probe.features)
    if not len(flat):
        return False  # an expert that gets no token
    cotangent = torch.zeros_like(flat)
    cotangent[-1] = 1.0
    grads = torch.autograd.grad(flat, [leaf for _, leaf in probe.leaves], cotangent, allow_unused=True)
    return any(grad is not None and bool(grad.reshape(-1, grad.shape[-1])[:-1].any()) for grad in grads)


def _wide_norms(block: Block, row: str, columns: Sequence[str], features: int) -> list[str]:
    """Names of modules between the columns and the row that may be norms over the whole width, by their vectors' size."""
    trace, around = block.flow.trace, block.flow.call
    dense = {block.modules[name] for name in (row, *columns) if name in block.modules}  # others are parameters
    ran = [call.last_op for name in columns if (call := trace.call_inside(around, name)) is not None]
    end = block.flow.call_of(row).last_op
    widths = {features, *(block.width(name) for name in columns)}
    fits: dict[str, bool] = {}
    for call in trace.calls:
        vectors = [parameter for parameter in call.module.parameters() if parameter.ndim == 1]
        inner = call.id > around.id and call.first_op < around.last_op
        if not inner or not vectors or call.module in dense or any(True for _ in call.module.children()):
            continue
        between = any(last <= call.last_op for last in ran) and call.last_op <= end
        shapes = [trace.values[number].shape for number in (call.args.get(0), *call.outputs) if number is not None]
        fits[call.name] = between and len(shapes) == 2 and shapes[0] == shapes[1] and len(shapes[0]) <= 3
    return [
        name
        for name, fit in fits.items()
        if fit and all(parameter.shape[0] in widths for parameter in block.modules[name].parameters())
    ]


class _Probe:
    """One forward of the block that keeps the graph from its columns' outputs to its row's input."""

    def __init__(self, block: Block, row: str, columns: Sequence[str], seed: int, skipped: Sequence[str]) -> None:
        # Leaves of the graph: outputs [b, s, f] of each column's calls; of one that is called past its module, its weight.
        self.made: dict[str, list[Tensor]] = {name: [] for name in columns}
        self._reads: list[Tensor] = []
        self._past = {name: one.out_dim for name in columns if not (one := block.flow.linears[name]).is_called}
        with ExitStack() as stack:
            for name in self._past:
                owner, _, leaf = block.flow.linears[name].parameter.rpartition(".")
                held = block.modules[owner]._parameters
                stack.callback(held.__setitem__, leaf, held[leaf])
                weight = held[leaf]
                assert weight is not None
                held[leaf] = stand_in = nn.Parameter(weight.detach().clone())  # a frozen weight has no gradient
                self.made[name].append(stand_in)
            for name in [column for column in columns if column not in self._past]:

                def cut(module: nn.Module, args: Any, out: Tensor, name: str = name) -> Tensor:
                    leaf = out.detach().requires_grad_()
                    self.made[name].append(leaf)
                    return leaf.clone()  # code that changes it in place may not change a leaf

                stack.enter_context(block.modules[name].register_forward_hook(cut))
            for name in skipped:
                stack.enter_context(block.modules[name].register_forward_hook(lambda module, args, out: args[0]))

            def keep(module: nn.Module, args: Any) -> None:
                self._reads.append(args[0])

            stack.enter_context(block.modules[row].register_forward_pre_hook(keep))
            with torch.enable_grad():
                block.run(seed)
        for name in (row, *columns):
            if not (self._reads if name == row else self.made[name]):
                raise CantInferError(f"{name}: the block run by itself does not call it (a cache, or a state of its own?)")
        # A row may be called with constants too: DoRA multiplies both halves of an adapter by the identity.
        self.read = next((read for read in self._reads if read.requires_grad), self._reads[0])
        if not self.read.requires_grad:
            raise CantInferError(
                f"{row}: its input has no graph in the block's forward (is it made under reentrant checkpointing? "
                "that must be turned off, or use_reentrant=False)"
            )
        self.features = self.read.shape[-1]
        self._seed = seed
        self.leaves = [(name, leaf) for name, made in self.made.items() for leaf in made]  # of the graph, each with its column

    def support(self, features: Tensor) -> dict[str, Tensor]:
        """For each column, on which of its out-features the row's input at the indices ``features`` depends: bool ``[f]``."""
        generator = torch.Generator().manual_seed(17 + self._seed)
        cotangent = torch.zeros_like(self.read)
        shape = (*self.read.shape[:-1], len(features))
        noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.read)
        cotangent.index_copy_(-1, features.to(self.read.device), noise)
        inputs = [leaf for _, leaf in self.leaves]
        grads = torch.autograd.grad(self.read, inputs, cotangent, retain_graph=True, allow_unused=True)
        out: dict[str, Tensor] = {}
        for (name, leaf), grad in zip(self.leaves, grads, strict=True):
            dim = self._past.get(name, -1)
            touched = torch.zeros(leaf.shape[dim], dtype=torch.bool, device=leaf.device)
            if grad is not None and grad.numel():  # an expert may get no token
                touched = grad.movedim(dim, -1).reshape(-1, leaf.shape[dim]).abs().amax(0) > 0
            out[name] = out[name] | touched if name in out else touched
        return {name: touched.cpu() for name, touched in out.items()}


class _FeatureSupport:
    """On which out-features of its columns each rank's part of a row's input depends.

    Several inputs are drawn, since ReLU sets some features to zero in each of them.
    """

    def __init__(self, block: Block, row: str, columns: Sequence[str], tp: int, skipped: Sequence[str] = ()) -> None:
        self.skipped = skipped  # norms over the whole width, which pass their input on unchanged
        self._probes = [_Probe(block, row, columns, 0, skipped)]
        self.features = self._probes[0].features
        self._tp = tp
        self._feeding = {name for column in columns for name in block.flow.linears[column].upstream}
        segments = block.flow.row_segments.get(row, ())
        self.segments = segments if sum(segments) == self.features else (self.features,)
        if any(size % tp for size in self.segments):
            works = sizes_that_divide("tp", math.gcd(*self.segments))
            raise UserDecidesError(f"{row}: its {self.features} in-features do not divide by tp={tp}; {works}")
        self._parts = self._all_parts()
        for seed in range(1, _MAX_DRAWS):
            if seed > 2 and all((self._owners(column) > 0).all() for column in columns):
                break
            try:
                self._probes.append(_Probe(block, row, columns, seed, skipped))
            except CantInferError:
                continue  # with this input an expert gets no token, so it is not called
            self._parts = self._all_parts()
        touched = [self._union(features) for features in torch.arange(self.features).split(list(self.segments))]
        # For each column, the segments of the row's input that it feeds.
        self.feeds = {name: [at for at, one in enumerate(touched) if one[name].any()] for name in columns}

    def _all_parts(self) -> list[dict[str, Tensor]]:
        """For each rank, the support of its features of the row's input, by column."""
        return [self._union(part_of_segments(self.segments, rank, self._tp)) for rank in range(self._tp)]

    def _union(self, features: Tensor) -> dict[str, Tensor]:
        """The support of some features of the row's input over all draws, by column: bool ``[f]`` each."""
        supports = [probe.support(features) for probe in self._probes]
        return {name: torch.stack([one[name] for one in supports]).any(0) for name in supports[0]}

    def _owners(self, column: str) -> Tensor:
        """For each out-feature of a column, how many ranks need it: ``[f]``."""
        return torch.stack([part[column] for part in self._parts]).sum(0)

    def is_shared(self, column: str) -> bool:
        """Whether every rank needs all out-features of a column, so that it stays whole."""
        # If another column reads it, out-features that only that column needs are not counted.
        return self.mixes(column) if column in self._feeding else self.shared(column) == len(self._owners(column))

    def mixes(self, column: str) -> bool:
        """Whether what a rank needs of a column at all, every rank needs."""
        owners = self._owners(column)
        return bool(((owners == self._tp) | (owners == 0)).all())

    def shared(self, column: str) -> int:
        """Number of a column's out-features that every rank needs."""
        return int((self._owners(column) == self._tp).sum())

    def _ranges(self, column: str) -> tuple[Ranges, ...]:
        """For each rank, the ranges of a column's out-features that it needs."""
        return _split_at_all_ends([_runs(part[column]) for part in self._parts])

    def units(self, columns: Sequence[str], segment: int) -> int:
        """The number of units (heads) in a segment of the row's input: of those that a part of a column (queries, keys) feeds."""
        counts: list[int] = []
        for column in (one for one in columns if segment in self.feeds[one]):
            try:
                segments = _segments(column, self._ranges(column))
            except CantInferError:
                counts.append(self._units(column, 0, None))
            else:
                counts += [self._units(column, start, stop) for start, stop, _ in segments]
        size = self.segments[segment]
        return max((count for count in counts if count < size), default=size)

    def _units(self, column: str, start: int, stop: int | None) -> int:
        """The number of the smallest units, from ``start`` to ``stop`` of a column, that share no out-feature with the rest."""
        own = self._owners(column) == 1
        own[:start] = False
        own[len(own) if stop is None else stop :] = False
        fed = self.feeds[column]
        everything = torch.arange(self.features).split(list(self.segments))[fed[0]] if fed else torch.arange(self.features)
        for size in (size for size in range(1, len(everything)) if len(everything) % size == 0):
            first, rest = (self._union(part)[column] & own for part in (everything[:size], everything[size:]))
            if first.any() and not (first & rest).any():
                return len(everything) // size
        # Several ranks need the same out-features (shared kv heads): there are as many units as distinct parts.
        return len({tuple(part[column].tolist()) for part in self._parts})

    def deal(self, column: str, most: int) -> ColumnLayout:
        """The layout of a column, with ``most`` units in a segment at most."""
        covered = torch.stack([part[column] for part in self._parts]).any(0)
        if not covered.any():  # only another row reads it, or none: queries of a text whose output is dropped
            units = most if len(covered) % most == 0 else len(covered)
            ranges = Shard.by_segments(0, [len(covered)], [units], len(self._parts), column).ranges
            return ColumnLayout(ranges, (len(covered),), (units,))
        if not covered.all():
            missing = int((~covered).nonzero()[0])
            raise CantInferError(f"{column}: out-feature {missing} reaches nothing, so no rank would own it")
        ranges = self._ranges(column)
        segments = _segments(column, ranges)
        owners = self._owners(column)
        sizes = [stop - start for start, stop, _ in segments]
        counts = [
            parts if owners[start] > 1 else min(self._units(column, start, stop), most) for start, stop, parts in segments
        ]
        if Shard.by_segments(0, sizes, counts, len(ranges), column).ranges != ranges:
            raise CantInferError(f"{column}: its parts are not dealt out in order: {_shown(ranges)}")
        return ColumnLayout(ranges, tuple(sizes), tuple(counts))


def _runs(touched: Tensor) -> Ranges:
    """The ranges of indices at which a bool tensor ``[f]`` is true."""
    changes = nn.functional.pad(touched.int(), (1, 1)).diff().nonzero().flatten().tolist()
    return tuple(zip(changes[::2], changes[1::2], strict=True))


def _segments(column: str, ranges: Sequence[Ranges]) -> list[tuple[int, int, int]]:
    """Start, stop and number of distinct parts of each segment of a column."""
    if any(len(runs) != len(ranges[0]) for runs in ranges):
        raise CantInferError(f"{column}: ranks need parts of it that are not alike: {_shown(ranges)}")
    segments, start = [], 0
    for runs in zip(*ranges, strict=True):
        distinct = list(dict.fromkeys(runs))
        ends = [start, *(high for _, high in distinct)]
        if [low for low, _ in distinct] != ends[:-1]:
            raise CantInferError(f"{column}: the parts that ranks need are not side by side: {_shown(ranges)}")
        segments.append((start, ends[-1], len(distinct)))
        start = ends[-1]
    return segments


def _split_at_all_ends(ranges: Sequence[Ranges]) -> tuple[Ranges, ...]:
    """Every rank's ranges, cut wherever a range of any rank begins or ends; parts of two segments may lie side by side."""
    ends = sorted({end for runs in ranges for run in runs for end in run})

    def parts(start: int, stop: int) -> Iterator[tuple[int, int]]:
        return pairwise(end for end in ends if start <= end <= stop)

    return tuple(tuple(part for run in runs for part in parts(*run)) for runs in ranges)


def _shown(ranges: Sequence[Ranges]) -> str:
    """The first two ranks' ranges, for messages."""
    return "; ".join(f"rank {rank}: {', '.join(f'{a}-{b - 1}' for a, b in runs)}" for rank, runs in enumerate(ranges[:2]))
