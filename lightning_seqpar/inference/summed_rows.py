"""Rows that are modules: a linear with an adapter, ``W x + B(A x)``, or any other sum of products of one input.

Of a module that is linear in its input, each rank can make a term of its output from its own features of that input: the products
that read the input are cut along their in-features, and what comes behind them stays whole. Whether a module is one is
tried: what it makes of parts of an input must sum up to what it makes of the whole input, in training and not, of small numbers
and of large ones. So a nonlinearity between ``A`` and ``B`` is found, whatever it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice, product

import torch
from torch import Tensor

from lightning_seqpar.distributed.rng import Drawn, DrawWatch, kept_streams, seed_streams
from lightning_seqpar.inference.dataflow import BlockFlow, Linear, SummedRow
from lightning_seqpar.inference.isolated_block import Block, is_equal, other_data
from lightning_seqpar.inference.trace import Call, ForwardTrace
from lightning_seqpar.layout.linear_kind import is_parametrized
from lightning_seqpar.layout.module_names import inside

_SCALES = (1.0, 100.0)  # sizes of the inputs that a module is tried on: what saturates is nearly linear in small ones
_MAX_TRIES = 64  # ways to treat a module's vectors that are tried at most, the likeliest first


def summed_rows(flow: BlockFlow) -> dict[str, SummedRow]:
    """The modules in a block that are one row each, by name: the innermost around each row that are linear in their input.

    In the block's data flow ``flow`` their products stand one by one.
    """
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
    """A module that may be one row."""

    def __init__(self, call: Call, linears: Sequence[Linear]) -> None:
        self._module = call.module
        self._x: Tensor = call.given[0][0]
        self._features = self._x.shape[-1]
        self._parts = torch.arange(self._features).tensor_split(2)
        names = {one.name for one in linears}
        self._count = len(linears)
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
        for ways in islice(product(*all_ways), _MAX_TRIES):
            chosen = dict(zip(self._vectors, ways, strict=True))
            once, local = ([n for n, way in chosen.items() if way == one] for one in ("once", "local"))
            if self._sums_up(once, local) and self._draws_for_features(once, local):
                dims = {name: dim for name, (_, dim) in self._weights.items()}
                rows = [(one.name, None) if one.is_called else (one.parameter, dims[one.parameter]) for one in self._readers]
                return SummedRow(tuple(rows), tuple(once), tuple(local))
        return None

    def _sums_up(self, once: Iterable[str], local: Iterable[str]) -> bool:
        """Whether what the module makes of two parts of an input sums up to what it makes of the whole input."""
        for training, (seed, scale) in product((True, False), enumerate(_SCALES)):
            generator = torch.Generator().manual_seed(31 + seed)
            x = (torch.randn(self._x.shape, generator=generator, dtype=torch.float64) * scale).to(self._x)
            with self._mode(training), torch.no_grad():
                whole = self._run(x)
                if whole is None:
                    return False
                total = torch.zeros_like(whole)
                for at, mine in enumerate(self._parts):
                    with self._cut(mine, once, local, first=at == 0):
                        part = self._run(x.index_select(-1, mine.to(x.device)))
                    if part is None or part.shape != whole.shape:
                        return False
                    total += part
            if not is_equal(total, whole):
                return False
        return True

    def _run(self, x: Tensor) -> Tensor | None:
        """What the module makes of an input, with random draws made constant; None if it does not take it."""
        try:
            out = Block.quiet(self._module, (x,), {})
        except Exception:  # the user's own code, which was made for other sizes
            return None
        return out if isinstance(out, Tensor) and out.is_floating_point() else None

    def _draws_for_features(self, once: Iterable[str], local: Iterable[str]) -> bool:
        """Whether all that the module draws is for the features of its input, of which each rank draws for its own."""
        drawn: list[Drawn] = []
        mine = self._parts[0]
        for part, x in (
            (nullcontext(), self._x),
            (self._cut(mine, once, local, first=True), self._x.index_select(-1, mine.to(self._x.device))),
        ):
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
        """While open, the module and all inside it are in training, or not."""
        before = {module: module.training for module in self._module.modules()}
        self._module.train(training)
        try:
            yield
        finally:
            for module, mode in before.items():
                module.training = mode

    def _cut(self, mine: Tensor, once: Iterable[str], local: Iterable[str], *, first: bool) -> AbstractContextManager[None]:
        """While open, the module has the parameters of a rank with some of the input's features."""
        parts = {name: tensor.index_select(dim, mine.to(tensor.device)) for name, (tensor, dim) in self._weights.items()}
        tensors = {name: tensor for name, (tensor, _) in self._weights.items()} | self._vectors
        parts |= {name: self._vectors[name].index_select(0, mine.to(self._vectors[name].device)) for name in local}
        held = [(tensors[name], part.detach()) for name, part in parts.items()]
        if not first:
            added = [*self._biases, *(self._vectors[name] for name in once)]
            held += [(tensor, torch.zeros_like(tensor.detach())) for tensor in added]
        return other_data(held)
