"""Which features belong together: what each rank's part of a row's input depends on, found by gradients in one block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_seqpar.inference.dataflow import CantInferError, UnknownLinearError
from lightning_seqpar.inference.isolated_block import Block
from lightning_seqpar.layout.linear_kind import linear_kind
from lightning_seqpar.layout.shard import Shard

_DRAWS = 16
"""Inputs that are tried before a feature counts as dead."""

Ranges = tuple[tuple[int, int], ...]


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


def group_layout(block: Block, row: str, tp: int) -> GroupLayout:
    """The layout of one row and its columns for ``tp`` ranks.

    Raises:
        CantInferError: if the features do not fall apart into ``tp`` parts.
    """
    columns = block.flow.columns[row]
    for name in (row, *columns):
        if name not in block.modules:
            raise CantInferError(f"{name}: a parameter that is multiplied past any linear module (einsum?)")
        if linear_kind(block.modules[name]) is None:
            raise UnknownLinearError(
                f"{name}: a {type(block.modules[name]).__name__}, which is not known to compute what nn.Linear does"
            )
    found = _Supports(block, row, columns, (), tp)
    if any(found.is_shared(column) for column in columns) and (norms := _wide_norms(block, row, columns)):
        without = _Supports(block, row, columns, norms, tp)
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


def mixes_positions(block: Block, row: str) -> bool:
    """Whether the row's input at one position depends on its columns' outputs at others: attention, not an MLP."""
    try:
        probe = _Probe(block, row, block.flow.columns[row], 1, ())
    except CantInferError:
        probe = _Probe(block, row, block.flow.columns[row], 0, ())
    flat = probe.read.reshape(-1, probe.features)
    if not len(flat):
        return False  # an expert that was given no token
    cotangent = torch.zeros_like(flat)
    cotangent[-1] = 1.0
    leaves = [leaf for made in probe.made.values() for leaf in made]
    grads = torch.autograd.grad(flat, leaves, cotangent, allow_unused=True)
    return any(grad is not None and bool(grad.reshape(-1, grad.shape[-1])[:-1].any()) for grad in grads)


def _wide_norms(block: Block, row: str, columns: Sequence[str]) -> list[str]:
    """Modules without children that run between the columns and the row and keep their input's shape."""
    found: list[str] = []
    hooks = []
    ran: list[str] = []
    for name in (row, *columns):
        hooks.append(block.modules[name].register_forward_hook(lambda module, args, out, name=name: ran.append(name)))
    dense = {block.modules[name] for name in (row, *columns)}
    prefix = block.flow.name + "."
    shapes: dict[str, bool] = {}
    for name, module in block.modules.items():
        leaf = module not in dense and not any(True for _ in module.children())
        if name.startswith(prefix) and leaf and any(p.ndim == 1 for p in module.parameters()):

            def note(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
                fits = args and isinstance(args[0], Tensor) and isinstance(out, Tensor)
                between = bool(ran) and row not in ran
                shapes[name] = bool(between and fits and args[0].shape == out.shape and args[0].ndim <= 3)

            hooks.append(module.register_forward_hook(note))
    try:
        with torch.no_grad():
            args, kwargs, _ = block.inputs()
            block.run(args, kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    widths = {block.width(name) for name in columns}
    for name, fits in shapes.items():
        module = block.modules[name]
        if fits and all(p.shape[0] in widths for p in module.parameters()):
            found.append(name)
    return found


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
