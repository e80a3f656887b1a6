"""Every function on a sequence in parts gives the values and gradients that it gives on the whole."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_seqpar.context import operations
from lightning_seqpar.context.chunks import Chunks, contiguous, enter, padded, zigzag
from lightning_seqpar.context.seq_part import HANDLERS, Place, SeqPart, whole_of
from lightning_seqpar.testing import run_distributed
from tests.mutants import sees

TOLERANCE = 1e-12
Draw = Callable[[torch.Generator, tuple[int, ...]], Tensor]


def normal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def positive(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1


def bools(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=generator) > 0.5


def ints(high: int) -> Draw:
    return lambda generator, shape: torch.randint(0, high, shape, generator=generator)


class Maker:
    """Makes the tensors of a case, once as whole plain ones and once as sequences in parts, of the same numbers."""

    def __init__(self, s: int, chunks: Chunks | None) -> None:
        self.s, self.chunks = s, chunks
        self.generator = torch.Generator().manual_seed(7)
        self.leaves: list[tuple[Tensor, Place | None]] = []

    def part(self, *shape: int, dim: int, draw: Draw = normal, grad: bool = True) -> Any:
        """A tensor of which ``dim`` is the sequence."""
        leaf, place = draw(self.generator, shape), None
        if self.chunks is not None:
            chunks = self.chunks
            if shape[dim] != chunks.length:
                chunks = Chunks(chunks.group, shape[dim], contiguous(shape[dim], chunks.size), "auto", chunks.axis)
            place = Place(chunks, dim)
            leaf = place.own(leaf).clone(memory_format=torch.contiguous_format)
        if leaf.is_floating_point() and grad:
            self.leaves.append((leaf.requires_grad_(), place))
        return leaf if place is None else SeqPart.wrap(leaf, place)

    def x(self, draw: Draw = normal, grad: bool = True) -> Any:
        return self.part(2, self.s, 3, dim=1, draw=draw, grad=grad)

    def flat(self, *shape: int, dim: int, draw: Draw = normal) -> Any:
        """A tensor of which the dims 0 and 1 are one, and ``dim`` of them is the sequence: ``[b·s, h]`` or ``[s·b, h]``."""
        return self.part(*shape, dim=dim, draw=draw).flatten(0, 1)

    def plain(self, *shape: int, draw: Draw = normal, grad: bool = True) -> Tensor:
        leaf = draw(self.generator, shape)
        if leaf.is_floating_point() and grad:
            self.leaves.append((leaf.requires_grad_(), None))
        return leaf

    def module(self, make: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(3)
        module = make().double()
        self.leaves += [(p, None) for p in module.parameters()]
        return module


Case = Callable[[Maker], Any]

# ---- each number by itself: every function under every name, in every form that it takes ------------------------

FORMS: dict[str, Callable[[Any, Maker, Any], tuple[Any, ...]]] = {
    "x": lambda x, m, given: (x,),
    "x, y": lambda x, m, given: (x, m.x(**given)),
    "x, row": lambda x, m, given: (x, m.plain(m.s, 1, **given)),
    "x, n": lambda x, m, given: (x, 0.5),
    "x, n, n": lambda x, m, given: (x, 0.2, 0.6),
    "x, mask, n": lambda x, m, given: (x, m.part(m.s, 1, dim=0, draw=bools), 0.5),
    "x, y, row": lambda x, m, given: (x, m.x(**given), m.plain(m.s, 1, **given)),
    "mask, x, row": lambda x, m, given: (x > 0.4, x, m.plain(m.s, 1, **given)),
}
KINDS: list[dict[str, Any]] = [
    {"draw": positive},
    {"draw": positive, "grad": False},
    {"draw": lambda g, shape: positive(g, shape) + 1.0},
    {"draw": ints(9)},
]


def elementwise() -> tuple[dict[str, Case], set[Any]]:
    """Cases of the functions of each number by itself, and these functions: operators arrive under other names."""
    cases: dict[str, Case] = {}
    found: set[Any] = set()
    for func in [one for one, handling in HANDLERS.items() if handling.run is operations.elementwise]:
        name = f"{func.__qualname__} of {getattr(func, '__objclass__', getattr(func, '__module__', 'torch'))}"
        arity = 0
        for form, make in FORMS.items():
            if arity in (1, 2) and form.count(",") > 1:
                break
            for given in KINDS:
                case = lambda m, f=func, a=make, g=given: f(*a(m.x(**g).clone(), m, g))  # noqa: E731
                try:
                    value = Run(case, 5, None).outputs[0]
                except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):
                    continue
                if not value.isnan().any() and not func.__name__.startswith("empty"):
                    cases[f"{name} ({form})"], arity = case, form.count(",") + 1
                    found.add(func)
                    break
    return cases, found


PARTS: dict[str, list[Case]] = {}
"""By kind, calls that must run on parts, without a gather."""
WHOLE: dict[str, list[Case]] = {}
"""By kind, calls that gather."""

PARTS["elementwise"] = [
    lambda m: 2.0 ** m.x() / 3 + 1,
    lambda m: m.part(m.s, m.s, dim=0) + m.plain(m.s) + m.plain(m.s, 1),
    lambda m: m.plain(1, m.s, 3) * m.part(m.s, 3, dim=0),
    lambda m: m.flat(2, m.s, 3, dim=1) * m.plain(2 * m.s, 1) + m.flat(2, m.s, 3, dim=1),
    lambda m: (m.x().type(torch.float32), m.x().to(device="cpu", dtype=torch.float32), m.x().to(torch.zeros(4).float())),
    lambda m: (m.x().type_as(m.x(ints(3))), m.x().to("cpu") * 1, torch.ones(2).double().type_as(m.x())),
    lambda m: (m.x().clamp(-0.3, max=0.4), torch.empty_like(m.x()).fill_(1.0), torch.Tensor.new_empty(m.x(), 2).fill_(1)),
    lambda m: F.relu(m.x() * 1.0, inplace=True),
    lambda m: (torch.where(m.plain(m.s, 3, draw=bools), m.x(), 0.0), m.x().where(m.x() > 0, m.plain(m.s, 3))),
    lambda m: (F.dropout(m.x(), 0.5, False), F.dropout(m.x(), 0.0, True), F.alpha_dropout(m.x(), 0.5, False)),
]  # fmt: skip
WHOLE["elementwise"] = [
    lambda m: torch.where(m.x() > 0),
    lambda m: torch.frexp(m.x()),
    lambda m: F.prelu(m.part(2, 3, m.s, dim=2), m.plain(3)),
]
EITHER: dict[str, list[Case]] = {}
"""Calls of which some sequences are gathered: beside a part another one that lies otherwise."""
EITHER["mixed"] = [
    lambda m: m.part(m.s, 1, dim=0) * m.part(1, m.s, dim=1),
    lambda m: m.part(2, 1, 3, dim=1) * m.x(),
    lambda m: m.flat(m.s, 2, 3, dim=0) * m.plain(2 * m.s, 1) - m.flat(2, m.s, 3, dim=1),
    lambda m: m.part(m.s, dim=0, draw=ints(9))[:, None] >= m.part(m.s, dim=0, draw=ints(9))[None, :],
]

# ---- along dims and over them: the sequence is dim 1 of 3 --------------------------------------------------------

REDUCTIONS = ["sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "logsumexp", "all", "any", "prod", "var", "std", "norm"]  # fmt: skip
SUMS = ("sum", "mean")
ALONG: dict[str, Callable[[Any, Any, int], Any]] = {
    "softmax": lambda f, x, d: f(x, d),
    "log_softmax": lambda f, x, d: f(x, dim=d),
    "glu": lambda f, x, d: f(torch.cat([x, x], 2) if d != 1 else x[:, : x.shape[1] // 2 * 2], d),
    "normalize": lambda f, x, d: f(x, 2.0, d),
    "repeat_interleave": lambda f, x, d: f(x, 2, d),
    "chunk": lambda f, x, d: f(x, 2, d),
    "split": lambda f, x, d: f(x, 2, dim=d),
    "tensor_split": lambda f, x, d: f(x, 2, d),
    **{name: lambda f, x, d: f(x, d) if f.__name__ != "norm" else f(x, 2, d) for name in REDUCTIONS},
}
for _name, _call in ALONG.items():
    for _func in {getattr(home, _name) for home in (torch, Tensor, F, torch.special) if getattr(home, _name, None) in HANDLERS}:
        for _dim in (2, -1) if _name == "glu" else (0, 1, 2, -1):
            stays = _dim != 1 or _name in SUMS
            (PARTS if stays else WHOLE).setdefault(_name, []).append(lambda m, f=_func, c=_call, d=_dim: c(f, m.x(positive), d))
for _name in REDUCTIONS:
    PARTS[_name].append(lambda m, n=_name: getattr(torch, n)(m.x(), dim=0, keepdim=True))
    if _name != "logsumexp":
        (PARTS if _name in SUMS else WHOLE)[_name].append(lambda m, n=_name: getattr(torch, n)(m.x()))
PARTS["along"] = [
    lambda m: (m.part(m.s, 4, dim=0).split([1, 3], dim=-1), F.glu(m.part(2, m.s, 4, dim=1)), F.normalize(m.part(m.s, 4, dim=0))),
    lambda m: F.layer_norm(m.part(2, m.s, 4, dim=1), (4,), m.plain(4), m.plain(4)),
    lambda m: (torch.layer_norm(m.x(), (3,)), F.rms_norm(m.x(), (3,), m.plain(3)), torch.rms_norm(m.x(), (3,))),
    lambda m: (torch.max(m.part(2, m.s, dim=1), m.plain(m.s)), torch.min(m.part(2, m.s, dim=1), other=m.plain(2, m.s))),
    lambda m: (m.x(ints(9)).sum(), m.x(ints(9)).sum(1), m.x(bools).sum((0, 1), keepdim=True), m.x(bools).float().mean()),
    lambda m: (m.x(ints(9)).mean(1, dtype=torch.float64), m.x().sum(()), m.flat(m.s, 2, 3, dim=0).mean(0)),
    lambda m: (m.x().sum(axis=1, keepdims=True), m.x().mean(axis=0, keepdims=True), m.x().sum([0, -1])),
    lambda m: m.x().sum().add_(1.0).mul_(2.0),
    lambda m: (torch.linalg.vector_norm(m.x(), dim=-1, keepdim=True), torch.linalg.norm(m.x(), 2, 0), m.x().norm(dim=(0, 2))),
]  # fmt: skip
WHOLE["along"] = [
    lambda m: F.layer_norm(m.part(2, m.s, 4, dim=1), (m.s, 4), eps=1e-3),
    *(lambda m, f=f: f(m.x()) for f in (torch.median, torch.nansum, torch.std_mean, torch.count_nonzero)),
    *(lambda m, f=f: f(m.x(), 1) for f in (torch.cumsum, torch.sort, torch.argsort)),
    lambda m: (m.x().topk(1, 1), m.x().topk(2, 2), torch.index_select(m.x(), 0, torch.tensor([0, 0]))),
]  # fmt: skip

# ---- products --------------------------------------------------------------------------------------------------

PARTS["products"] = [
    lambda m: (F.linear(m.x(), m.plain(4, 3), m.plain(4)), F.linear(m.flat(2, m.s, 3, dim=1), m.plain(4, 3))),
    lambda m: (torch.addmm(m.plain(3), m.part(m.s, 4, dim=0), m.plain(4, 3)), m.plain(m.s, 3).addmm(m.part(m.s, 4, dim=0), m.plain(4, 3))),
    lambda m: torch.addmm(m.plain(1, m.s), m.part(m.s, m.s, dim=0), m.plain(m.s, m.s)),
    lambda m: torch.baddbmm(m.plain(2, 1, 4), m.x(), m.plain(2, 3, 4), beta=0.5, alpha=2),
    lambda m: (m.x() @ m.plain(3, 4), m.x() @ m.plain(3), m.plain(4) @ m.part(2, 4, m.s, dim=2), m.plain(4) @ m.part(4, m.s, dim=1)),
    lambda m: (torch.matmul(m.part(m.s, 4, dim=0), m.plain(2, 4, 3)), m.plain(2, 3, m.s) @ m.part(m.s, m.s, dim=1)),
    lambda m: Tensor.__rmatmul__(m.part(2, 4, m.s, dim=2), m.plain(3, 4)),
    lambda m: (torch.mm(m.part(m.s, 4, dim=0), m.plain(4, 3)), m.part(m.s, 4, dim=0).mm(m.plain(4, 3))),
    lambda m: (torch.bmm(m.x(), m.plain(2, 3, 4)), m.part(m.s, 2, 3, dim=0).bmm(m.plain(m.s, 3, 2)), Tensor.matmul(m.x(), m.plain(3, 4))),
    lambda m: torch.einsum("bsd,de->bse", m.x(), m.plain(3, 4)),
    lambda m: (torch.einsum("sd , td -> st", m.part(m.s, 3, dim=0), m.plain(4, 3)), torch.einsum("bs,bs->bs", m.part(2, m.s, dim=1), m.plain(2, 1))),
    lambda m: (F.embedding(m.part(2, m.s, dim=1, draw=ints(6)), m.plain(6, 3)), F.embedding(m.part(2, m.s, dim=1, draw=ints(6)), m.plain(6, 3), 0)),
]  # fmt: skip
EITHER["mixed"] += [
    lambda m: m.x() @ m.part(2, 3, m.s, dim=2),
    lambda m: m.part(m.s, m.s, dim=1) @ m.part(m.s, m.s, dim=1),
    lambda m: Tensor.baddbmm(m.plain(2, 1, m.s), m.x(), m.part(2, 3, m.s, dim=2)),
    lambda m: torch.einsum("bqd,bkd->bqk", m.x(), m.x()),
]
WHOLE["products"] = [
    lambda m: (F.linear(m.part(2, 4, m.s, dim=2), m.plain(3, m.s), bias=m.plain(3)), F.linear(m.plain(2, 4), m.part(m.s, 4, dim=0))),
    lambda m: (m.part(2, 4, m.s, dim=2) @ m.plain(m.s), m.part(m.s, dim=0) @ m.part(m.s, dim=0), m.part(m.s, dim=0) @ m.x()),
    lambda m: torch.mm(m.plain(3, m.s), m.part(m.s, 4, dim=0)),
    lambda m: (torch.einsum("bsd,bse->bde", m.x(), m.x()), torch.einsum("bii->bi", m.part(2, m.s, m.s, dim=2))),
    lambda m: F.embedding(m.part(2, m.s, dim=1, draw=ints(6)), m.plain(6, 3), scale_grad_by_freq=True),
    lambda m: F.embedding(m.plain(2, 4, draw=ints(m.s)), m.part(m.s, 3, dim=0)),
    lambda m: (torch.embedding(m.plain(6, 3), m.part(2, m.s, dim=1, draw=ints(6))), F.one_hot(m.part(2, m.s, dim=1, draw=ints(6)), 6)),
]  # fmt: skip


# ---- dims ------------------------------------------------------------------------------------------------------

for _func in (torch.reshape, Tensor.reshape, Tensor.view):
    PARTS.setdefault("reshape", []).extend([
        lambda m, f=_func: (f(m.part(2, m.s, 4, dim=1), (2 * m.s, 4)), f(m.part(2, m.s, 4, dim=1), (2, m.s, 2, 2))),
        lambda m, f=_func: (f(m.x(), (2, -1)), f(m.x(), (-1,)), f(m.x(), (1, 2, 1, m.s, 1, 3))),
        lambda m, f=_func: (f(m.part(m.s, m.s, m.s, dim=1), (m.s * m.s, m.s)), f(m.part(m.s, m.s, dim=1), (1, m.s, 1, m.s))),
        lambda m, f=_func: f(f(m.part(m.s, m.s, 2, dim=0), (m.s * m.s, 2)), (m.s, m.s, 2)),
        lambda m, f=_func: f(f(m.part(2, m.s, 3, 2, dim=1), (2 * m.s * 3, 2)), (2, m.s, 3, 2)).sum(2),
    ])  # fmt: skip
PARTS["views"] = [
    lambda m: m.x().view(-1, 3).view(2, m.s, 3),
    lambda m: (m.part(2, m.s, 4, dim=1).view_as(m.plain(2 * m.s, 4)), m.part(2, m.s, 4, dim=1).reshape_as(m.part(2, m.s, 2, 2, dim=1))),
    lambda m: (m.x().flatten(), torch.flatten(m.x(), 1), m.x().flatten(0, 1).unflatten(0, (2, m.s)), torch.unflatten(m.x(), 1, (1, -1))),
    lambda m: (m.part(1, m.s, 1, dim=1).squeeze(), torch.squeeze(m.part(1, m.s, 1, dim=1), -1), m.part(1, m.s, 1, dim=1).squeeze((0, 2))),
    lambda m: (m.x().transpose(1, 2), torch.transpose(m.x(), dim0=0, dim1=-1), m.x().swapaxes(0, 2), torch.swapaxes(m.x(), 0, 1)),
    lambda m: (m.x().swapdims(0, 1), torch.swapdims(m.x(), 0, 1), m.x().permute(2, 0, 1), torch.permute(m.x(), (-1, 1, 0))),
    lambda m: (m.x().movedim(1, 0), torch.movedim(m.x(), (0, 1), (1, 2)), m.x().moveaxis(1, -1), torch.moveaxis(m.x(), 0, 1)),
    lambda m: (m.part(m.s, m.s, dim=1).t(), torch.t(m.part(m.s, 3, dim=0)), m.x().adjoint(), torch.adjoint(m.x())),
    lambda m: (m.part(m.s, m.s, dim=1).T, m.x().mT, m.part(m.s, m.s, dim=0).H, m.x().mH),
    lambda m: (m.x().unsqueeze(0), m.x().unsqueeze(1), torch.unsqueeze(m.x(), -1), m.x().unsqueeze(-2), torch.unsqueeze(m.x(), dim=2)),
    lambda m: (m.part(2, m.s, 1, dim=1).expand(4, 2, -1, 3), m.part(2, m.s, 1, dim=1).expand((2, m.s, m.s))),
    lambda m: (m.part(1, m.s, dim=1).expand_as(m.plain(3, m.s)), torch.broadcast_to(m.part(m.s, 1, dim=0), (2, m.s, m.s))),
    lambda m: (m.part(m.s, 1, dim=0).broadcast_to((m.s, 4)), *m.x().unbind(), *torch.unbind(m.part(m.s, 3, dim=0), -1), *m.x()),
    lambda m: (m.x().select(0, 1), m.x().select(1, -1), torch.select(m.part(2, m.s, dim=1), -1, 0)),
    lambda m: (m.x().narrow(2, 1, 2), torch.narrow(m.x(), 1, m.s - 1, 1), m.x().narrow(1, -1, 1), m.x().narrow(1, 0, m.s)),
    lambda m: (m.x().new_zeros(m.s), m.x().new_ones(2), m.x().new_full((2,), 3.0), m.x().new_tensor([1.0]), m.x().new_empty(2).fill_(1)),
    lambda m: torch.tensor([Tensor.is_contiguous(m.x()), m.x().is_conj(), m.x().is_neg(), m.x().is_inference()]),
    lambda m: torch.tensor([torch.is_conj(m.x()), torch.is_neg(m.x()), torch.is_inference(m.x())]),
    lambda m: torch.tensor(len(f"{m.x()}") < 80) | (m.chunks is None),
]  # fmt: skip
WHOLE["views"] = [
    lambda m: (m.part(2, m.s, 4, dim=1).view(4, -1), m.x().view(torch.int64), m.part(2, 1, 3, dim=1).expand(2, m.s, 3)),
    lambda m: m.part(2, m.s, 6, dim=1).view(2 * m.s, 6).view(m.s, 2, 6),
    lambda m: (F.pad(m.x(), (1, 2)), F.pad(m.x(), (0, 0, 1, 0)), torch.tensor([m.x().stride(0), m.x().storage_offset()])),
    lambda m: torch.cat((m.x(), m.x()), dim=1),
]  # fmt: skip
for _func in (torch.cat, torch.concat, torch.concatenate):
    PARTS.setdefault("join", []).extend([
        lambda m, f=_func: f([m.x(), m.plain(2, m.s, 2), m.part(2, m.s, 1, dim=1)], -1),
        lambda m, f=_func: (f([m.x(), m.plain(1, m.s, 3)]), f((m.plain(0), m.part(m.s, m.s, dim=0)), 0)),
        lambda m, f=_func: f(tensors=[m.part(2, m.s, dim=1), m.part(2, m.s, dim=1)], dim=0),
    ])  # fmt: skip
PARTS["join"] += [lambda m, d=d: torch.stack([m.x(), m.plain(2, m.s, 3)], d) for d in (0, 1, 2, 3, -1, -2)]
EITHER["mixed"] += [
    lambda m, f=f: f((m.part(m.s, m.s, dim=0), m.part(m.s, m.s, dim=1)), dim=1) for f in (torch.cat, torch.stack)
]
ALL = slice(None)
PARTS["getitem"] = [
    *(lambda m, i=i: m.x()[i] for i in (
        (..., None), (None,), (ALL, -1), (ALL, 0), (0,), (ALL, slice(1, None)), (ALL, slice(None, -1)), (ALL, slice(2, 5)),
        (ALL, slice(-2, None)), (..., slice(1, None)), (..., 0), (slice(1), None, slice(1, None), 2), (1, -1, 1), (...,), (),
    )),
    lambda m: (m.part(m.s, m.s, dim=1)[0], m.part(m.s, m.s, dim=0)[-1], m.part(m.s, m.s, dim=0)[..., -1], m.part(m.s, dim=0)[-1]),
    lambda m: (m.flat(2, m.s, 3, dim=1)[:, 1:], m.part(2, m.s, dim=1, draw=ints(9))[:, 0]),
    lambda m: (m.part(m.s, dim=0) * torch.tensor([float("inf"), *(m.s - 2) * [1.0], float("inf")][: m.s]))[m.s // 2],
    lambda m: (m.part(2, m.s, dim=1) / torch.tensor([0.0, *(m.s - 2) * [1.0], 0.0][: m.s]))[:, -1],
]  # fmt: skip
WHOLE["getitem"] = [
    *(lambda m, i=i: m.x()[i] for i in (
        (ALL, slice(None, None, 2)), (ALL, slice(4, 2)), (..., [0, 2]), ([1, 0],), (0, slice(1, None), [0, 2]), (ALL, [0]), (ALL, -1, [0, 1]),
    )),
    lambda m: (m.x()[m.plain(2, m.s, draw=bools)], m.x()[m.x(bools)], m.x()[:, m.plain(m.s, draw=bools)]),
    lambda m: (m.x()[:, torch.arange(m.s - 1, -1, -1)], m.x()[torch.tensor([1, 0]), :, torch.tensor([1, 2])]),
    lambda m: (m.plain(5, 3)[m.part(2, m.s, dim=1, draw=ints(5))], m.flat(2, m.s, 3, dim=1)[1:], m.part(2, m.s, dim=1, draw=bools)[:, -1]),
]  # fmt: skip
EITHER["mixed"] += [
    lambda m: m.x()[:, :-1] * m.x()[:, 1:],
    lambda m: F.cross_entropy(m.part(2, m.s, 5, dim=1)[:, :-1].transpose(1, 2), m.part(2, m.s, dim=1, draw=ints(5))[:, 1:]),
]

# ---- changes in place ------------------------------------------------------------------------------------------


def _changed(change: Callable[[Any, Maker], Any]) -> Case:
    def run(m: Maker) -> Any:
        x = m.x()
        y = x * 1.0
        change(y, m)
        return y, x * y

    return run


def _set(items: Any, value: Callable[[Maker], Any]) -> Callable[[Any, Maker], Any]:
    return lambda x, m: x.__setitem__(items, value(m))


def _add_to(x: Any, items: Any, other: Tensor) -> None:
    x[items] += other


PARTS["changes"] = [
    *map(_changed, [
        lambda x, m: x.view(-1, 3).mul_(2.0),
        lambda x, m: x.transpose(1, 2).add_(m.plain(3, m.s)),
        lambda x, m: x[..., 1:].mul_(3.0),
        lambda x, m: x[0].zero_(),
        lambda x, m: x.narrow(-1, 1, 1).copy_(m.plain(2, m.s, 1)),
        lambda x, m: x.data.mul_(2.0),
    ]),
    lambda m: (m.x() * 1.0)[:, -1].mul_(m.plain(3)),
]  # fmt: skip
WHOLE["changes"] = [
    *map(_changed, [
        _set((ALL, 0), lambda m: m.plain(3)),
        _set((ALL, slice(1, None)), lambda m: m.plain(2, m.s, 3)[:, 1:]),
        lambda x, m: _add_to(x, (ALL, 0), m.plain(3)),
        lambda x, m: _add_to(x, (ALL, slice(1, None)), m.plain(3)),
        _set((..., 1), lambda m: m.part(2, m.s, dim=1)),
        lambda x, m: x.__setitem__(m.plain(2, m.s, draw=bools), 0.5),
        lambda x, m: x.index_add_(1, torch.zeros(2, dtype=torch.long), m.plain(2, 2, 3), alpha=2),
        lambda x, m: x.scatter_add_(1, m.plain(2, m.s, 3, draw=ints(m.s)), m.x()),
        lambda x, m: x.cumsum_(1),
    ]),
    lambda m: torch.add(m.part(2, m.s, dim=1, grad=False), 1.0, out=torch.empty(2, m.s, dtype=torch.float64)),
]  # fmt: skip

# ---- losses ----------------------------------------------------------------------------------------------------


def ignored(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    labels = torch.randint(0, 5, shape, generator=generator)
    return labels.masked_fill(torch.rand(shape, generator=generator) < 0.3, -100)


def soft(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64).softmax(1)


def weights(m: Maker) -> Tensor:
    return m.plain(5, draw=positive, grad=False)


PARTS["losses"] = []
for _options in (
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 2}, {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "reduction": "sum"},
):  # fmt: skip
    PARTS["losses"] += [
        lambda m, o=_options: F.cross_entropy(m.flat(2, m.s, 5, dim=1), m.plain(2 * m.s, draw=ints(5)), **o),
        lambda m, o=_options: F.cross_entropy(m.flat(m.s, 2, 5, dim=0), m.flat(m.s, 2, dim=0, draw=ints(5)), **o),
        lambda m, o=_options: F.cross_entropy(m.part(2, 5, m.s, dim=2), m.plain(2, m.s, draw=ints(5) if "ignore_index" in o else ignored), **o),
        lambda m, o=_options: F.cross_entropy(m.part(2, 5, m.s, dim=2), m.plain(2, m.s, draw=ints(5)), weight=weights(m), **o),
    ]  # fmt: skip
    if "label_smoothing" not in _options:
        PARTS["losses"].append(lambda m, o=_options: F.nll_loss(m.part(2, 5, m.s, dim=2), m.plain(2, m.s, draw=ints(5)), **o))  # fmt: skip
    if "ignore_index" not in _options:
        PARTS["losses"] += [
            lambda m, o=_options: F.cross_entropy(m.part(2, 5, m.s, dim=2), m.plain(2, 5, m.s, draw=soft), **o),
            lambda m, o=_options: F.cross_entropy(m.part(m.s, 5, dim=0), m.plain(m.s, 5, draw=soft), weight=weights(m), **o),
        ]  # fmt: skip
PARTS["losses"] += [
    lambda m: F.cross_entropy(m.part(m.s, 5, dim=0), torch.full((m.s,), -100)),
    lambda m: F.cross_entropy(m.part(5, m.s, dim=1).T, m.part(m.s, dim=0, draw=ints(5))),
    lambda m: F.nll_loss(m.part(m.s, 5, dim=0), m.plain(m.s, draw=ints(5)), m.plain(5, grad=False)),
    *(
        lambda m, f=f, r=r: (f(m.x(positive), m.plain(2, m.s, 3, draw=positive), reduction=r), f(m.plain(2, m.s, 3, draw=positive), m.x(positive), reduction=r))
        for f in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div)
        for r in ("mean", "sum", "none")
    ),
    lambda m: F.kl_div(m.x(), m.plain(2, m.s, 3), reduction="batchmean", log_target=True),
    lambda m: (F.smooth_l1_loss(m.x(), m.plain(2, m.s, 3), beta=0.3), F.mse_loss(input=m.x(), target=m.plain(2, m.s, 3))),
]  # fmt: skip
WHOLE["losses"] = [
    lambda m: F.cross_entropy(m.part(2, m.s, 5, dim=1), m.plain(2, 5, draw=ints(1))),
    lambda m: F.cross_entropy(m.part(m.s, 5, dim=0), m.plain(m.s, draw=ints(5)), size_average=False),
    lambda m: F.mse_loss(m.part(m.s, m.s, dim=0), m.part(m.s, m.s, dim=1)),
    lambda m: F.binary_cross_entropy_with_logits(m.x(), m.plain(2, m.s, 3, draw=positive), pos_weight=m.plain(3, grad=False)),
]  # fmt: skip

# ---- functions without a handler, and modules that use them --------------------------------------------------------

WHOLE["others"] = [
    lambda m: F.conv1d(m.part(2, 3, m.s, dim=2), m.plain(4, 3, 3), m.plain(4), padding=1),
    lambda m: (m.x().gather(1, m.plain(2, m.s, 3, draw=ints(m.s))), m.x().scatter_add(1, m.plain(2, m.s, 3, draw=ints(m.s)), m.x())),
    lambda m: (m.x().unfold(1, 1, 1), F.interpolate(m.part(2, 3, m.s, dim=2), size=2 * m.s, mode="linear"), torch.fft.rfft(m.x(), dim=1).abs()),
    lambda m: (torch.bucketize(m.part(m.s, dim=0, grad=False), torch.tensor([-0.5, 0.5]).double()), torch.unique(m.part(2, m.s, dim=1, draw=ints(4)))),
    lambda m: (F.batch_norm(m.part(2, 4, m.s, dim=2), None, None, m.plain(4), training=True), F.group_norm(m.part(2, 4, m.s, dim=2), 2, m.plain(4))),
    lambda m: (F.cosine_similarity(m.x(), m.plain(2, m.s, 3), 1), torch.tensordot(m.x(), m.plain(m.s, 3), dims=2), torch.complex(m.x(), m.plain(2, m.s, 3)).abs()),
    lambda m: torch.tensor([m.part(1, dim=0).item(), *m.part(m.s, dim=0).tolist(), float(torch.equal(m.x(), m.plain(2, m.s, 3)))]),
    lambda m: (torch.from_numpy(np.asarray(m.x(grad=False)) + m.x(grad=False).numpy()), copy.deepcopy([m.x(grad=False)])[0]),
    lambda m: m.module(lambda: nn.LSTM(4, 3, batch_first=True))(m.part(2, m.s, 4, dim=1))[0],
]  # fmt: skip


def _mha(m: Maker, first: bool = True, **options: Any) -> nn.Module:
    return m.module(lambda: nn.MultiheadAttention(8, 4, batch_first=first, **options))


def _self(module: nn.Module, x: Any, **options: Any) -> Any:
    return module(x, x, x, **options)


def _causal(s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool).triu(1)


def _padding(s: int) -> Tensor:
    padding = torch.zeros(2, s, dtype=torch.bool)
    padding[0, s - 1 :] = s > 1
    return padding


EITHER["attention"] = [
    lambda m: _self(_mha(m, False), m.part(m.s, 2, 8, dim=0), average_attn_weights=False, attn_mask=_causal(m.s)),
    lambda m: _self(_mha(m), m.part(2, m.s, 8, dim=1), key_padding_mask=_padding(m.s), attn_mask=_causal(m.s), need_weights=False)[0],
    lambda m: _self(_mha(m), m.part(2, m.s, 8, dim=1), key_padding_mask=_padding(m.s), attn_mask=m.plain(8, m.s, m.s)),
    lambda m: _self(_mha(m), m.part(2, m.s, 8, dim=1), attn_mask=_causal(m.s), is_causal=True, need_weights=False)[0],
    lambda m: _self(_mha(m, bias=False, add_bias_kv=True, add_zero_attn=True), m.part(2, m.s, 8, dim=1)),
    lambda m: _mha(m, kdim=3, vdim=5)(m.part(2, m.s, 8, dim=1), m.plain(2, 4, 3), m.plain(2, 4, 5)),
    lambda m: _mha(m)(m.part(2, m.s, 8, dim=1), *2 * (m.part(2, 5, 8, dim=1),), need_weights=False)[0],
    lambda m: _mha(m)(m.plain(2, 3, 8), *2 * (m.part(2, m.s, 8, dim=1),)),
    lambda m: _self(_mha(m, dropout=0.3).eval(), m.part(2, m.s, 8, dim=1), need_weights=False)[0],
    lambda m: m.module(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))(m.part(2, m.s, 8, dim=1), src_key_padding_mask=_padding(m.s)),
    lambda m: m.module(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, norm_first=True))(m.part(m.s, 2, 8, dim=0), src_mask=_causal(m.s), is_causal=True),
    lambda m: m.module(lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True))(m.part(2, m.s, 8, dim=1), m.part(2, 5, 8, dim=1), tgt_mask=_causal(m.s)),
    lambda m: F.scaled_dot_product_attention(*(m.part(2, 4, m.s, 3, dim=2) for _ in "qkv"), is_causal=True),
]  # fmt: skip

# ---- the graph -------------------------------------------------------------------------------------------------


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(1.702 * x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(1.702 * x)
        return grad * (gate + 1.702 * x * gate * (1 - gate))


class Scaled(torch.autograd.Function):
    """Of a sequence, whose gradient it returns whole, a row of weights and a table of positions."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, table: Any) -> Any:
        ctx.save_for_backward(x, weight, table)
        return x * weight + table

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return whole_of(grad) * weight, (grad * x).sum((0, 1)), grad.sum(0)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 7


def _looked_at(m: Maker) -> Any:
    y = Gelu.apply(m.x() * 1.0)
    with torch.no_grad():
        y.sum()
    return y * 2.0


def _hooked(hook: Callable[[Any], Any]) -> Case:
    def run(m: Maker) -> Any:
        x = m.x() * 1.0
        x.register_hook(hook)
        return x * m.plain(m.s, 3)

    return run


def _kept(m: Maker) -> Any:
    x = m.x() * 1.0
    x.retain_grad()
    (x.pow(2).sum() + (x * m.plain(m.s, 3)).sum()).backward()
    return x.grad, x.detach()


def _leaf(m: Maker) -> Any:
    x = m.x().detach().requires_grad_()
    (x.pow(3).sum()).backward()
    return x.grad


EITHER["graph"] = [
    lambda m: Gelu.apply(m.x() * 2.0),
    lambda m: Gelu.apply(m.x()) * Gelu.apply(m.flat(2, m.s, 3, dim=1)).view(2, m.s, 3),
    lambda m: Scaled.apply(m.x(), m.plain(3), m.plain(m.s, 3)),
    _looked_at,
    lambda m: Same.apply(m.x() * 1.0) * m.plain(3),
    _hooked(lambda grad: None),
    _hooked(lambda grad: grad / grad.norm()),
    _hooked(lambda grad: whole_of(grad) * 3.0),
    _kept,
    _leaf,
    lambda m: checkpoint(lambda y, w: F.linear(y, w).tanh(), m.x(), m.plain(3, 3), use_reentrant=False),
    lambda m: (m.x().detach() * m.plain(3), m.x().data * m.plain(3)),
    lambda m: torch.tensor([m.x().requires_grad, m.x().detach().is_leaf, m.x().grad_fn is None, (m.x() * 1).retains_grad, m.x()._version == 0]),
]  # fmt: skip


# ---- the test --------------------------------------------------------------------------------------------------


class Run:
    """A case, run and differentiated."""

    def __init__(self, case: Case, s: int, chunks: Chunks | None) -> None:
        m = Maker(s, chunks)
        torch.manual_seed(5)
        out = [x for x in tree_leaves(case(m)) if isinstance(x, Tensor)]
        self.outputs, self.leaves = out, m.leaves
        generator = torch.Generator().manual_seed(11)
        total: Any = 0.0
        for x in out:
            if x.requires_grad and x.is_floating_point():
                cotangent = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
                if isinstance(x, SeqPart):  # each rank's share of the loss; over cp the mean of all ranks' is due
                    places = x.place
                    total = total + places.chunks.losses * (x.settled().local * places.own(cotangent)).sum()
                else:
                    total = total + (x * cotangent).sum()
        if isinstance(total, Tensor):
            total.backward()


def _close(expected: Tensor, got: Tensor, scale: float = 1.0) -> bool:
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    loose = 1e-6 if got.dtype in (torch.float32, torch.float16, torch.bfloat16) else TOLERANCE
    return torch.allclose(expected.double(), got.double(), loose, loose * scale, equal_nan=True)


def difference(whole: Run, parts: Run) -> str:
    """What differs on this rank in values and in the gradients of sequences."""
    if len(whole.outputs) != len(parts.outputs):
        return "another number of results"
    for expected, got in zip(whole.outputs, parts.outputs, strict=True):
        if got.shape != expected.shape:
            return f"{got.shape}, not {expected.shape}"
        of_part = isinstance(got, SeqPart)
        own, mine = (got.place.own(expected), got.settled().local) if of_part else (expected, got)
        if not _close(own.detach(), mine.detach()):
            return f"wrong value: {mine}, not {own}"
    for number, ((leaf, _), (got, place)) in enumerate(zip(whole.leaves, parts.leaves, strict=True)):
        if place is not None and not _same_gradient(place.own(_grad(leaf)), _grad(got) / place.chunks.losses):
            return f"wrong gradient {number}"
    return ""


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _same_gradient(expected: Tensor, got: Tensor) -> bool:
    return _close(expected, got, max(1.0, float(expected.nan_to_num(0, 0, 0).abs().max())) if expected.numel() else 1.0)


def check_cases(layouts: list[tuple[str, int]]) -> tuple[list[str], set[str], int]:
    """What is wrong on this rank, the handlers that no case reached, and how many comparisons were made."""
    torch.set_default_dtype(torch.float64)
    by_number, of_numbers = elementwise()
    table: list[tuple[str, Case, bool | None]] = [(name, case, False) for name, case in by_number.items()]
    for cases, gathers in ((PARTS, False), (WHOLE, True), (EITHER, None)):
        table += [(f"{kind} {n}", case, gathers) for kind, of in cases.items() for n, case in enumerate(of)]
    size, wrong, made, kept = dist.get_world_size(), [], 0, dict(HANDLERS)
    reached: set[Any] = set()

    def spied(func: Any, handling: Any) -> Any:
        def spy(f: Any, args: Any, kwargs: Any) -> Any:
            out = handling.run(f, args, kwargs)
            if out is not NotImplemented:
                reached.add(func)
            return out

        return handling._replace(run=spy)

    HANDLERS.update({func: spied(func, handling) for func, handling in kept.items()})
    for layout, s in layouts:
        deal = {"zigzag": zigzag, "contiguous": contiguous, "tp": padded}[layout]
        chunks = Chunks(dist.group.WORLD, s, deal(s, size), "auto", "tp" if layout == "tp" else "cp")
        for kind, case, gathers in table:
            name = f"{kind}, {layout} {s}"
            try:
                whole = Run(case, s, None)
            except Exception:  # a size that the function does not take, such as three halves
                if s == 13:
                    raise
                continue
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    parts = Run(case, s, chunks)
                except Exception as error:
                    raise AssertionError(f"{name} raises {error}") from error
            made += 1
            gathered = any("needs all of the positions" in str(one.message) for one in told)
            if bad := difference(whole, parts):
                wrong.append(f"{name}: {bad}")
            elif s == 13 and not chunks.rank and gathers is not None and gathered != gathers:
                wrong.append(f"{name}: {'is gathered' if gathered else 'stays on parts'}")
            for (leaf, _), (got, place) in zip(whole.leaves, parts.leaves, strict=True):
                if place is None:
                    mean = _grad(got).clone()
                    if layout != "tp":  # of all ranks' losses
                        dist.all_reduce(mean)
                        mean /= size
                    if not _same_gradient(_grad(leaf), mean):
                        wrong.append(f"{name}: wrong gradient of a whole tensor")
    HANDLERS.update(kept)
    return wrong, {f"{func.__qualname__} {func}" for func in kept if func not in reached | of_numbers | ELSEWHERE}, made


ELSEWHERE = {
    *(torch.autograd.backward, torch.autograd.grad, getattr(Tensor, "requires_grad").__set__),  # noqa: B009
    *(Tensor.cpu, Tensor.cuda),
    *(
        func
        for func, handling in HANDLERS.items()
        if handling.run is operations.draws and func not in (F.dropout, F.alpha_dropout)
    ),
}
"""What reentrant checkpoints and users of parts over tp call (test_overlap, test_between_blocks); moves; what draws (below)."""

LENGTHS = (1, 2, 3, 4, 8, 13)
LAYOUTS = [(layout, s) for layout in ("contiguous", "zigzag", "tp") for s in LENGTHS]


@sees(
    "parts: a sum over positions is one rank's",
    "_sum_of_all",
    "total = sum_over_ranks(torch.sum(x._local, dims, keepdim=keep, dtype=wide), x._place.chunks)",
    "total = torch.sum(x._local, dims, keepdim=keep, dtype=wide)",
    case="2",
)
@sees(
    "parts: the gradient of a sum over ranks is one rank's",
    "sum_over_ranks",
    'x if chunks.axis == "tp" else copy_to_tensor_parallel_region(x, chunks.group)',
    "x",
    case="2",
)
@sees(
    "parts: a whole tensor beside a part counts from the first position",
    "Place.own",
    "return self.chunks.own(x, self.dim if dim is None else dim, self.before, self.behind)",
    "return x.narrow(self.dim if dim is None else dim, 0, self.local_size)",
    case="2",
)
@sees("parts: a gather is not told", "on_whole", "if chunks.size > 1 and not chunks.rank:", "if False:", case="2")
@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        (2, [("zigzag", 13), ("tp", 13)]),
        *(pytest.param(size, LAYOUTS, marks=(pytest.mark.matrix, pytest.mark.timeout(1000))) for size in (2, 4)),
    ],
    ids=["2", "2-all", "4-all"],
)
def test_parts_are_as_the_whole(size, layouts):
    for rank, (wrong, unreached, made) in enumerate(run_distributed(check_cases, size, layouts, timeout=900)):
        assert wrong == [], f"rank {rank}:\n" + "\n".join(wrong)
        assert unreached == set(), f"handlers without a case: {unreached}"
        assert made > 1000


# ---- what is refused ------------------------------------------------------------------------------------


class Summed(torch.autograd.Function):
    """A plain tensor of a sequence: nothing of ours sees the gradient on its way."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.expand(2, 5, 3)


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, one: Any, other: Any) -> Any:
        return one * 2 + other * 3


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a plain tensor of a Function": (lambda x: Summed.apply(x).backward(), "made a whole tensor of a sequence"),
    "two outputs": (lambda x: Two.apply(x)[0].sum(), "beside other outputs"),
    "a Function of another": (lambda x: Gelu.apply(Gelu.apply(x)).sum(), "of other tensors that have a graph"),
    "a non-leaf beside": (lambda x: Scaled.apply(x, torch.ones(3, requires_grad=True) * 2, torch.ones(5, 3)).sum(), "other tensors"),
    "a reentrant checkpoint": (lambda x: checkpoint(lambda y: y.tanh(), x, use_reentrant=True).sum(), "use_reentrant=False"),
    "vmap": (lambda x: torch.vmap(lambda y: y * 2)(x), "past torch's functions"),
    "data_ptr": (lambda x: x.data_ptr(), "would read or change a copy"),
    "out": (lambda x: torch.add(x.detach(), 1.0, out=x.detach()), "would read or change a copy"),
    "resize_": (lambda x: x.detach().resize_(2, 2), "would read or change a copy"),
    "setting data": (lambda x: setattr(x, "data", torch.ones(2, 5, 3)), "would read or change a copy"),
    "autograd.grad": (lambda x: torch.autograd.grad((x * 2).sum(), x, allow_unused=True), "that is not in the graph"),
    "a size that does not fit": (lambda x: x + torch.ones(4, 3), "must match the size"),
    "an index past the end": (lambda x: x[:, 5], "out of bounds"),
}  # fmt: skip


def check_refusals() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    chunks = Chunks(dist.group.WORLD, 5, zigzag(5, dist.get_world_size()))
    told: dict[str, Any] = {}
    for name, (call, _) in REFUSED.items():
        leaf = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
        x = SeqPart.wrap(enter(leaf, 1, chunks), Place(chunks, 1))
        try:
            call(x)
            told[name] = "nothing"
        except Exception as error:
            told[name] = str(error)
    half = torch.zeros(2, 5, 3, dtype=torch.bfloat16)
    half[0, 0, 0], half[0, 4, 0], half[0, 2, 0] = 256, 1, 1  # 257, what the first rank holds, is no bfloat16; 258 is
    x = SeqPart.wrap(enter(half, 1, chunks), Place(chunks, 1))
    told["bfloat16"] = [float(x.sum() - half.sum()), float(x.mean(1).sub(half.mean(1)).abs().max()), str(x.sum().dtype)]
    many = Chunks(dist.group.WORLD, 20000, contiguous(20000, dist.get_world_size()))
    logits = torch.zeros(20000, 64, dtype=torch.float16)
    x = SeqPart.wrap(enter(logits, 0, many), Place(many, 0))
    told["float16"] = float(F.cross_entropy(x, torch.zeros(20000, dtype=torch.long)) - torch.tensor(64.0).log())
    return told


def test_what_would_be_wrong_is_refused():
    for told in run_distributed(check_refusals, 2):
        wrong = {name: told[name] for name, (_, sentence) in REFUSED.items() if sentence not in told[name]}
        assert wrong == {}, "\n".join(f"{name}: {what}" for name, what in wrong.items())
        assert told["bfloat16"] == [0.0, 0.0, "torch.bfloat16"]
        assert abs(told["float16"]) < 4e-3


# ---- draws -----------------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x * 1.0, 0.5, True, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "rrelu": lambda x: F.rrelu(-x, 0.1, 0.9, True),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "normal_": lambda x: x.clone().normal_(),
}


def check_draws() -> dict[str, Any]:
    size = dist.get_world_size()
    chunks = Chunks(dist.group.WORLD, 33, contiguous(33, size))  # not as many on each
    told = {}
    for name, call in DRAWS.items():
        torch.manual_seed(4)
        x = SeqPart.wrap(enter(torch.ones(2, 33, 3), 1, chunks), Place(chunks, 1))
        drawn, again = call(x), call(x)
        behind = torch.rand(1).item()
        told[name] = isinstance(drawn, SeqPart), whole_of(drawn).tolist(), whole_of(again).tolist(), behind
    given = torch.Generator().manual_seed(3)
    told["of a generator"] = whole_of(torch.bernoulli(x * 0.5, generator=given)).tolist()
    return told


def test_each_rank_draws_for_itself_and_all_go_on_alike():
    first, *others = run_distributed(check_draws, 3)
    assert all(other == first for other in others), "the same whole, and the same state behind it"
    for name in DRAWS:
        parts, drawn, again = first[name][0], torch.tensor(first[name][1]), torch.tensor(first[name][2])
        assert parts, name
        pieces = drawn.unflatten(1, (3, 11)).unbind(1)
        assert not any(torch.equal(pieces[a], pieces[b]) for a, b in ((0, 1), (0, 2), (1, 2))), f"{name}: ranks drew alike"
        assert not torch.equal(drawn, again), f"{name}: the same draw again"
    generator = torch.Generator().manual_seed(3)
    assert first["of a generator"] == torch.bernoulli(torch.full((2, 33, 3), 0.5), generator=generator).tolist()


# ---- norms that are recomputed ---------------------------------------------------------------------------------
