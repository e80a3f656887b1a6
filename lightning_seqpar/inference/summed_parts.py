"""Modules that are cut as one: what ranks make of parts of such a module sums up to what the whole module makes.

One is a linear with an adapter, ``W x + B(A x)``, or any other sum of products of one input: the products that read it are cut
along their in-features, what comes behind them stays whole. It is tried on small numbers and large ones, so that a nonlinearity
between ``A`` and ``B`` is found. Another multiplies its parameters itself, by einsum or expert by expert: cuts are tried in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice, product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_seqpar.distributed.rng import Drawn, DrawWatch, kept_streams, seed_streams
from lightning_seqpar.inference.dataflow import BlockFlow, CantInferError, Linear, SummedRow
from lightning_seqpar.inference.edit_search import Edit, changed_attribute
from lightning_seqpar.inference.feature_dependence import Block, is_equal, other_data, run_quietly
from lightning_seqpar.inference.trace import Call, ForwardTrace
from lightning_seqpar.layout.linear_kind import is_parametrized
from lightning_seqpar.layout.module_names import Argument, inside
from lightning_seqpar.layout.param_layout import Shard

_SCALES = (1.0, 100.0)  # sizes of the inputs that a module is tried on: what saturates is nearly linear in small ones
_MAX_WAYS = 64  # ways to treat a module's vectors that are tried at most, the likeliest first
_MAX_CUTS = 2000  # cuts of a module's own parameters that are tried at most, the likeliest first
_SEGMENTS = (1, 2, 3)  # numbers of equal parts that a fused parameter is tried as: ``[f]``, ``[gate|up]``, ``[q|k|v]``


def _sums_up(whole: Tensor, parts: Iterable[Callable[[], Any]]) -> bool:
    """Whether what a module makes in parts sums up to the whole; it may raise where a cut does not fit."""
    total = torch.zeros_like(whole)
    for make in parts:
        try:
            part = make()
        except Exception:  # the user's own code, which was made for other sizes
            return False
        if not isinstance(part, Tensor) or (part.shape, part.dtype) != (whole.shape, whole.dtype):
            return False
        total += part
    return is_equal(total, whole)


def summed_rows(flow: BlockFlow) -> dict[str, SummedRow]:
    """The modules in a block that are one row each, by name: the innermost around each row that are linear in their input."""
    found: dict[str, SummedRow | None] = {}
    for row in flow.rows:
        for call in reversed(flow.calls_around(row)):
            if call.name not in found:
                linears = _products(flow, call)
                found[call.name] = _Candidate(call, linears).try_all() if linears else None
            if found[call.name]:
                break
    rows = {name: one for name, one in found.items() if one}
    return {name: one for name, one in rows.items() if not any(inside(name, other) for other in rows if other != name)}


def _products(flow: BlockFlow, call: Call) -> list[Linear]:
    """The products inside a module that may be one row; none if it is a linear, or given anything beside what columns made."""
    linears = [one for one in flow.linears.values() if call.first_op <= one.op < call.last_op]
    if len(linears) == 1 and linears[0].is_called:
        return []
    if any(map(is_parametrized, call.module.modules())):
        return []  # torch's kernel of weight_norm does not check sizes: it must never see a part of a parameter
    trace, first, last = flow.trace, flow.call.first_op, flow.call.last_op
    if not all(_is_closed(trace, one) for one in trace.calls_of(call.name) if first <= one.first_op < last):
        return []
    names = {one.name for one in linears}
    fed = frozenset().union(*(one.upstream for one in linears)) - names
    columns = fed & flow.linears.keys()
    own = {name for name, _ in call.module.named_parameters(prefix=call.name)}
    if not columns or fed - columns or any(not one.parameter or one.parameter not in own for one in linears):
        return []
    used = {trace.values[number].parameter for op in trace.ops_in(call) for number in op.inputs}
    return linears if used - {None} == own else []


def _is_closed(trace: ForwardTrace, call: Call) -> bool:
    """Whether a call makes one tensor of one, and reads nothing else that was computed outside of it."""
    x = call.args.get(0)
    given, named = call.given
    tensors = [value for value in (*given, *named.values()) if isinstance(value, Tensor)]
    if x is None or len(tensors) != 1 or len(call.outputs) != 1 or not trace.values[x].floating:
        return False
    before = {number for op in trace.ops[: call.first_op] for number in op.outputs}
    outer = {n for op in trace.ops_in(call) for n in op.inputs if n in before and trace.values[n].parameter is None}
    return all(trace.values[number].root == trace.values[x].root for number in outer)


class _Candidate:
    def __init__(self, call: Call, linears: Sequence[Linear]) -> None:
        self._module, self._count = call.module, len(linears)
        self._x: Tensor = call.given[0][0]
        self._features = self._x.shape[-1]
        self._parts = torch.arange(self._features).tensor_split(2)
        names = {one.name for one in linears}
        self._readers = [one for one in linears if not one.upstream & names]
        own = dict(self._module.named_parameters(prefix=call.name))
        self._weights = {one.parameter: (own[one.parameter], 1 - one.out_dim) for one in self._readers}
        biases = {f"{one.name}.bias" for one in self._readers if one.is_called}
        self._biases = [tensor for name, tensor in own.items() if name in biases]
        self._vectors = {name: tensor for name, tensor in own.items() if tensor.ndim == 1 and name not in biases}

    def try_all(self) -> SummedRow | None:
        """How the module is split, if the terms of all ranks sum up to what it returns."""
        if any(tensor.ndim != 2 or tensor.shape[dim] != self._features for tensor, dim in self._weights.values()):
            return None
        if self._features < 2 or not self._readers or (len(self._readers) == 1 and self._count > 1):
            return None  # a chain of linears is no sum: one of them can be a row by itself
        # A vector is added by one rank, cut with the input's features, or left whole.
        all_ways = [
            ("once", "local", "whole") if len(vector) == self._features else ("once", "whole")
            for vector in self._vectors.values()
        ]
        for ways in islice(product(*all_ways), _MAX_WAYS):
            chosen = dict(zip(self._vectors, ways, strict=True))
            once, local = ([n for n, way in chosen.items() if way == one] for one in ("once", "local"))
            if self._sums_up(once, local) and self._draws_for_features(once, local):
                rows = [(one.name, None) if one.is_called else (one.parameter, 1 - one.out_dim) for one in self._readers]
                return SummedRow(tuple(rows), tuple(once), tuple(local))
        return None

    def _sums_up(self, once: Sequence[str], local: Sequence[str]) -> bool:
        """Whether what the module makes of two parts of an input sums up to what it makes of the whole input."""
        for training, (seed, scale) in product((True, False), enumerate(_SCALES)):
            generator = torch.Generator().manual_seed(31 + seed)
            x = (torch.randn(self._x.shape, generator=generator, dtype=torch.float64) * scale).to(self._x)

            def make(at: int, x: Tensor = x) -> Any:
                mine = self._parts[at]
                with self._cut(mine, once, local, first=at == 0):
                    return run_quietly(self._module, (x.index_select(-1, mine.to(x.device)),), {})

            with self._mode(training), torch.no_grad():
                try:
                    whole = run_quietly(self._module, (x,), {})
                except Exception:  # the user's own code
                    return False
                if not isinstance(whole, Tensor) or not whole.is_floating_point():
                    return False
                if not _sums_up(whole, [partial(make, at) for at in range(len(self._parts))]):
                    return False
        return True

    def _draws_for_features(self, once: Sequence[str], local: Sequence[str]) -> bool:
        """Whether all that the module draws is for the features of its input, of which each rank draws for its own."""
        drawn: list[Drawn] = []
        mine = self._parts[0]
        cut = self._cut(mine, once, local, first=True)
        for part, x in ((nullcontext(), self._x), (cut, self._x.index_select(-1, mine.to(self._x.device)))):
            drawn.clear()
            try:
                with kept_streams(), self._mode(True), part, torch.no_grad(), DrawWatch(drawn.append):
                    seed_streams()
                    self._module(x)
            except Exception:  # the user's own code, whose draws were constant until now
                return False
            if any(draw.shape != x.shape for draw in drawn):
                return False
        return True

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        before = {module: module.training for module in self._module.modules()}
        self._module.train(training)
        try:
            yield
        finally:
            for module, mode in before.items():
                module.training = mode

    def _cut(self, mine: Tensor, once: Sequence[str], local: Sequence[str], *, first: bool) -> AbstractContextManager[None]:
        """While open, the module has the parameters of a rank with some of the input's features."""
        cut = [*self._weights.values(), *((self._vectors[name], 0) for name in local)]
        held = [(tensor, tensor.detach().index_select(dim, mine.to(tensor.device))) for tensor, dim in cut]
        if not first:
            added = [*self._biases, *(self._vectors[name] for name in once)]
            held += [(tensor, torch.zeros_like(tensor.detach())) for tensor in added]
        return other_data(held)


@dataclass(frozen=True)
class Cut:
    """How one parameter is cut."""

    dim: int | None  # the tensor dim; None for a parameter that stays whole and that the first rank alone adds (a bias)
    size: int = 0  # that dim's length
    segments: int = 1  # number of equal parts of a fused parameter, each of which is split over the ranks


class UnwrappedProducts:
    """One module that multiplies its parameters itself, called as in a recorded forward.

    ``rows`` and ``columns`` are full names of the parameters that act as such. Raises CantInferError if the block does not call the
    module ``owner``, or it returns no tensor.
    """

    def __init__(self, block: Block, owner: str, rows: Sequence[str], columns: Sequence[str]) -> None:
        self.owner, self.module = owner, block.modules[owner]
        cut = len(owner) + 1
        self.rows, self.columns = [name[cut:] for name in rows], [name[cut:] for name in columns]
        self._given = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), block.flow.call_of(owner).given)
        with torch.no_grad():
            self.whole = _first(run_quietly(self.module, *self._given))

    def mixes_positions(self, arg: Argument) -> bool:
        """Whether the output for the last token depends on other tokens of an argument; one without gradients tells nothing."""
        args, kwargs = list(self._given[0]), dict(self._given[1])
        holder: Any = args if isinstance(arg, int) else kwargs
        if not isinstance(holder[arg], Tensor) or not holder[arg].is_floating_point():
            return False
        holder[arg] = x = holder[arg].detach().requires_grad_()
        with torch.enable_grad():
            out = _first(run_quietly(self.module, args, kwargs))
        flat = out.reshape(-1, out.shape[-1])
        (grad,) = torch.autograd.grad(flat[-1].sum() + 0 * flat.sum(), x)
        return bool(grad.reshape(-1, grad.shape[-1])[:-1].any())

    def deal(self, tp: int) -> tuple[dict[str, Cut], Sequence[Edit]]:
        """Cuts by the parameters' own names (others stay whole), and edits, with which what ``tp`` ranks make sums up."""
        for edits, cuts in islice(self._candidates(tp), _MAX_CUTS):
            if _sums_up(self.whole, [partial(self._make, cuts, edits, tp, rank) for rank in range(tp)]):
                return cuts, edits
        names = ", ".join((*self.columns, *self.rows))
        raise CantInferError(
            f"{self.owner}: it multiplies the parameters {names} itself, and no way of cutting them for tp={tp} makes the ranks' "
            "parts sum up to its output"
        )

    def idle(self) -> list[str]:
        """Parameters on which the output does not depend for the example's input, which shows nothing of them."""
        own = {name: p for name, p in self.module.named_parameters(recurse=False) if p.is_floating_point()}
        frozen = [parameter for parameter in own.values() if not parameter.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_()
            with torch.enable_grad():
                out = _first(run_quietly(self.module, *self._given))
                weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view(out.shape).to(out)
                total = (out * weights).sum()
            grads = torch.autograd.grad(total, list(own.values()), allow_unused=True) if total.requires_grad else []
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        used = {name for name, grad in zip(own, grads, strict=False) if grad is not None and bool(grad.any())}
        return [name for name in own if name not in used]

    def _candidates(self, tp: int) -> Iterator[tuple[tuple[Edit, ...], dict[str, Cut]]]:
        """Edits and cuts to try, the likeliest first: cuts alone, then with one or two edits, then unlikely cuts."""
        plain, found = list(self._cuts(tp, likely=True)), self._edits(tp)
        sets = [*combinations(found, 1), *combinations(found, 2)]
        yield from (((), cuts) for cuts in plain)
        yield from ((edits, cuts) for cuts in plain for edits in sets)
        yield from (((), cuts) for cuts in self._cuts(tp, likely=False))

    def _cuts(self, tp: int, *, likely: bool) -> Iterator[dict[str, Cut]]:
        """Cuts by parameter; parameters of one shape are cut alike."""
        own = dict(self.module.named_parameters(recurse=False))
        shapes = list(dict.fromkeys(tuple(own[name].shape) for name in self.columns))
        row_shapes = list(dict.fromkeys(tuple(own[name].shape) for name in self.rows))
        options = [[*_options(shape, tp, _SEGMENTS), None] for shape in shapes]
        row_options: list[list[Cut | None]] = [[*_options(shape, tp, (1,))] for shape in row_shapes]
        ranked: list[tuple[int, int, int, dict[str, Cut]]] = []
        for picks in product(*row_options, *options):
            by_row = dict(zip(row_shapes, picks, strict=False))
            by_column = dict(zip(shapes, picks[len(row_shapes) :], strict=True))
            if not any(by_column.values()):
                continue
            cuts = {name: cut for name in self.rows if (cut := by_row[tuple(own[name].shape)]) is not None}
            cuts |= {name: cut for name in self.columns if (cut := by_column[tuple(own[name].shape)]) is not None}
            lengths = {cut.size for name, cut in cuts.items() if name in self.rows}
            odd = sum(cut.size // cut.segments not in lengths for cut in cuts.values())
            # Columns that stay whole, such as keys and values that all query heads read.
            shared = sum(cut is None for cut in by_column.values())
            ranked.append((shared, odd, sum(cut.segments for cut in cuts.values()), cuts))
        rest = [name for name in own if name not in self.columns and name not in self.rows]
        for *_, cuts in sorted(ranked, key=lambda item: item[:3]):
            choices = product(*(self._others(own[name], cuts) for name in rest))
            for chosen in islice(choices, 1) if likely else islice(choices, 1, None):
                yield cuts | {name: cut for name, cut in zip(rest, chosen, strict=True) if cut is not None}

    def _others(self, tensor: Tensor, cuts: dict[str, Cut]) -> list[Cut | None]:
        """How another parameter, such as a bias, may be treated: cut like a column, added by one rank, or left whole (None)."""
        columns = sorted({(cut.size, cut.segments) for name, cut in cuts.items() if name in self.columns})
        dims = [*enumerate(tensor.shape)]
        sliced: list[Cut | None] = [Cut(dim, size, n) for dim, size in dims for length, n in columns if size == length]
        once: list[Cut | None] = [Cut(None)] if tensor.ndim and tensor.shape[-1] == self.whole.shape[-1] else []
        return [*sliced, *once, None]

    def _edits(self, tp: int) -> list[Edit]:
        """Attributes that may count what is split over the ranks: heads, or the length of a cut dim."""
        edits = [
            Edit("set", self.owner, key, value=value // tp)
            for key, value in vars(self.module).items()
            if type(value) is int and not key.startswith("_") and value > 1 and value % tp == 0
        ]
        return sorted(edits, key=lambda edit: "head" not in str(edit.key))

    def _make(self, cuts: dict[str, Cut], edits: Sequence[Edit], tp: int, rank: int) -> Tensor:
        """The output of one rank, with its parts of the parameters and attributes of its own."""
        held: list[tuple[Tensor, Tensor]] = []
        for name, cut in cuts.items():
            parameter = getattr(self.module, name)
            if cut.dim is not None:
                sizes = [cut.size // cut.segments] * cut.segments
                held.append((parameter, Shard.by_segments(cut.dim, sizes, sizes, tp, name).take(parameter.data, rank)))
            elif rank > 0:
                held.append((parameter, torch.zeros_like(parameter.data)))
        with ExitStack() as stack, other_data(held), torch.no_grad():
            for edit in edits:
                stack.enter_context(changed_attribute(self.module, str(edit.key), edit.value))
            return _first(run_quietly(self.module, *self._given))


def _options(shape: tuple[int, ...], tp: int, segments: Sequence[int]) -> list[Cut]:
    return [Cut(dim, size, count) for dim, size in enumerate(shape) for count in segments if size % (count * tp) == 0]


def _first(out: Any) -> Tensor:
    first = out[0] if isinstance(out, list | tuple) and out else out
    if not isinstance(first, Tensor):
        raise CantInferError(f"a module that multiplies parameters itself returns a {type(first).__name__}, no tensor")
    return first
