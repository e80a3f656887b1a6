"""Every function on a sequence in parts gives the values and gradients that it gives on the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_seqpar.activations.norm_recompute import make_recomputing
from lightning_seqpar.context import attention, loss, operations, seq_part
from lightning_seqpar.context.chunks import Chunks, contiguous, zigzag
from lightning_seqpar.context.exchange import enter
from lightning_seqpar.context.seq_part import HANDLERS, Place, SeqPart, whole_of
from lightning_seqpar.distributed.counters import SavedBytes
from lightning_seqpar.testing import run_distributed
from tests.mutants import sees

# A table: one call a line.

PACKAGE = (attention, loss, operations)  # they fill HANDLERS
TOLERANCE = 1e-12
Draw = Callable[[torch.Generator, tuple[int, ...]], torch.Tensor]


def _normal(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Maker:
    """Makes the tensors of a case, once as whole plain ones and once as sequences in parts, of the same numbers."""

    def __init__(self, s: int, chunks: Chunks | None) -> None:
        self.s, self.chunks = s, chunks
        self.generator = torch.Generator().manual_seed(7)
        self.leaves: list[tuple[torch.Tensor, bool]] = []  # and whether each was entered

    def part(self, *shape: int, dim: int, draw: Draw = _normal, length: int | None = None, grad: bool = True) -> Any:
        """A tensor of which ``dim`` is the sequence."""
        leaf = draw(self.generator, shape)
        if leaf.is_floating_point() and grad:
            leaf.requires_grad_()
            self.leaves.append((leaf, True))
        return self.entered(leaf, dim)

    def entered(self, leaf: torch.Tensor, dim: int) -> Any:
        if self.chunks is None:
            return leaf
        chunks = self.chunks
        if leaf.shape[dim] != chunks.length:
            chunks = Chunks(chunks.group, leaf.shape[dim], contiguous(leaf.shape[dim], chunks.size), chunks.method)
        return SeqPart.wrap(enter(leaf, dim, chunks), Place(chunks, dim))

    def flat(self, *shape: int, dim: int, draw: Draw = _normal) -> Any:
        """A tensor of which the dims ``dim`` and ``dim + 1`` are one: ``[b·s, h]`` of ``[b, s, h]``, ``[s·b, h]`` of ``[s, b, h]``."""
        at = shape.index(self.s, dim) if self.s in shape[dim : dim + 2] else dim
        x = self.part(*shape, dim=at, draw=draw)
        return x.flatten(dim, dim + 1)

    def plain(self, *shape: int, draw: Draw = _normal, grad: bool = True) -> torch.Tensor:
        leaf = draw(self.generator, shape)
        if leaf.is_floating_point() and grad:
            leaf.requires_grad_()
            self.leaves.append((leaf, False))
        return leaf


def ints(high: int) -> Draw:
    return lambda generator, shape: torch.randint(0, high, shape, generator=generator)


def bools(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape, generator=generator) > 0.5


def positive(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1


Case = Callable[[Maker, int], Any]
CASES: dict[str, Case] = {}


def add(name: str, *cases: Case) -> None:
    for case in cases:
        CASES[f"{name} {sum(key.split(' ')[0] == name for key in CASES)}"] = case


# ---- each number by itself: every function under every name ----------------------------------------------------

UNARY = """abs absolute angle asin asinh atan atanh ceil celu clone contiguous cos cosh detach digamma elu erf erfc erfinv exp exp2 expm1 fix
floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 logical_not logit
logsigmoid mish nan_to_num neg negative positive reciprocal relu relu6 round rsqrt selu sgn sigmoid sign silu sin sinc sinh softplus softshrink
softsign sqrt square tan tanh tanhshrink trunc acos float double long int short bool type half bfloat16 __neg__ __abs__ zeros_like
ones_like""".split()
BINARY = """add atan2 copysign div divide eq fmax fmin fmod ge greater greater_equal gt hypot le less less_equal logaddexp
lt maximum minimum mul multiply ne not_equal pow remainder sub subtract true_divide xlogy rsub logical_and logical_or logical_xor __add__ __radd__
__sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __mod__ __pow__ __rpow__ __eq__ __ne__ __lt__ __le__ __gt__
__ge__""".split()
OF_BITS = "bitwise_and bitwise_or bitwise_xor __and__ __rand__ __or__ __ror__ __xor__ __rxor__".split()
IN_PLACE_ALONE = "neg_ exp_ relu_ sigmoid_ tanh_ zero_ sqrt_ rsqrt_".split()
IN_PLACE_WITH = "add_ sub_ mul_ div_ pow_ copy_ __iadd__ __isub__ __imul__ __itruediv__ __ipow__".split()


def homes(name: str) -> list[Any]:
    found = []
    for home in (torch, torch.Tensor, F, torch.special):
        func = getattr(home, name, None)
        if func in HANDLERS and func not in found:
            found.append(func)
    return found


for _name in UNARY:
    for _func in homes(_name):
        add(_name, lambda m, s, f=_func: f(m.part(2, s, 3, dim=1, draw=positive)))
        add(_name, lambda m, s, f=_func: f(m.part(s, 3, dim=0, draw=positive)))
acosh_input: Draw = lambda g, shape: positive(g, shape) + 1.0  # noqa: E731
for _func in homes("acosh"):
    add("acosh", lambda m, s, f=_func: f(m.part(2, s, dim=1, draw=acosh_input)))
for _name in BINARY:
    for _func in homes(_name):
        add(
            _name, lambda m, s, f=_func: f(m.part(2, s, 3, dim=1, draw=positive), m.part(2, s, 3, dim=1, draw=positive))
        )
        add(_name, lambda m, s, f=_func: f(m.part(2, s, 3, dim=1, draw=positive), m.plain(s, 1, draw=positive)))
        add(_name, lambda m, s, f=_func: f(m.plain(1, s, 3, draw=positive), m.part(s, 3, dim=0, draw=positive)))
        add(_name, lambda m, s, f=_func: f(m.part(s, 1, dim=0, draw=positive), m.part(1, s, dim=1, draw=positive)))
for _name in ("floor_divide", "heaviside", "__floordiv__", "__rfloordiv__"):
    for _func in homes(_name):
        add(
            _name,
            lambda m, s, f=_func: f(
                m.part(2, s, 3, dim=1, draw=positive, grad=False), m.plain(s, 1, draw=positive, grad=False)
            ),
        )
for _name in OF_BITS:
    for _func in homes(_name):
        add(_name, lambda m, s, f=_func: f(m.part(2, s, 3, dim=1, draw=ints(9)), m.plain(s, 1, draw=ints(9))))
for _name in ("bitwise_not", "__invert__"):
    for _func in homes(_name):
        add(_name, lambda m, s, f=_func: f(m.part(2, s, dim=1, draw=ints(9))))
for _name in IN_PLACE_ALONE:
    for _func in homes(_name):
        add(_name, lambda m, s, f=_func: f(m.part(2, s, 3, dim=1, draw=positive) * 1.0))
for _name in IN_PLACE_WITH:
    for _func in homes(_name):
        add(_name, lambda m, s, f=_func: f(m.part(2, s, 3, dim=1, draw=positive) * 1.0, m.plain(s, 1, draw=positive)))


for _name in ("__ifloordiv__", "__imod__", "remainder_", "floor_divide_", "fmod_"):
    add(
        _name,
        lambda m, s, f=homes(_name)[0]: f(
            m.part(2, s, dim=1, draw=positive, grad=False) * 9, m.plain(s, draw=positive, grad=False)
        ),
    )


def _in_place(name: str, call: Callable[[Any, Any, Maker, int], Any]) -> None:
    for func in homes(name):
        add(name, lambda m, s, f=func: call(f, m.part(2, s, 3, dim=1, draw=positive) * 1.0, m, s))


_in_place("clamp_", lambda f, x, m, s: f(x, 0.2, 0.6))
_in_place("clamp_min_", lambda f, x, m, s: f(x, 0.2))
_in_place("clamp_max_", lambda f, x, m, s: f(x, 0.5))
_in_place("fill_", lambda f, x, m, s: f(x, 0.5))
_in_place("masked_fill_", lambda f, x, m, s: f(x, m.plain(s, 3, draw=bools), 0.5))
_in_place("addcmul_", lambda f, x, m, s: f(x, m.plain(s, 3), m.part(2, s, 3, dim=1), value=0.5))
_in_place("addcdiv_", lambda f, x, m, s: f(x, m.plain(s, 3), m.part(2, s, 3, dim=1, draw=positive)))
_in_place("lerp_", lambda f, x, m, s: f(x, m.plain(2, s, 3), 0.3))
for _name in ("clamp", "clip"):
    for _func in homes(_name):
        add(_name, lambda m, s, f=_func: f(m.part(2, s, 3, dim=1), -0.3, max=0.4))
        add(_name, lambda m, s, f=_func: f(m.part(2, s, 3, dim=1), m.plain(s, 1), None))
for _name, _call in {
    "clamp_max": lambda f, x, m, s: f(x, 0.2),
    "clamp_min": lambda f, x, m, s: f(x, 0.2),
    "threshold": lambda f, x, m, s: f(x, 0.3, 0.1),
    "addcmul": lambda f, x, m, s: f(x, m.plain(s, 3), m.part(2, s, 3, dim=1), value=0.5),
    "addcdiv": lambda f, x, m, s: f(x, m.plain(s, 3), m.plain(3, draw=positive), value=0.5),
    "lerp": lambda f, x, m, s: f(x, m.plain(2, s, 3), m.part(s, 1, dim=0)),
    "masked_fill": lambda f, x, m, s: f(x, m.part(2, s, 1, dim=1, draw=bools), 0.5),
    "full_like": lambda f, x, m, s: f(x, 2.5),
    "empty_like": lambda f, x, m, s: f(x).fill_(1.0),
    "type_as": lambda f, x, m, s: f(x, torch.ones(4, 5, 6, dtype=torch.float32)),
    "to": lambda f, x, m, s: (f(x, torch.float32), f(x, "cpu"), f(x, torch.zeros(4, dtype=torch.float32)), f(x, x.long())),
    "where": lambda f, x, m, s: f(x > 0.4, x, m.plain(s, 3)) if f is not torch.Tensor.where else f(x, x > 0.4, m.plain(s, 3)),
    "rrelu": lambda f, x, m, s: f(x - 0.5, 0.1, 0.3, False),
    "dropout": lambda f, x, m, s: (f(x, 0.5, False), f(x, 0.0, True)),
    "alpha_dropout": lambda f, x, m, s: f(x, 0.5, False),
}.items():  # fmt: skip
    for _func in homes(_name):
        add(_name, lambda m, s, f=_func, c=_call: c(f, m.part(2, s, 3, dim=1, draw=positive), m, s))
add(
    "where",
    lambda m, s: torch.where(m.part(2, s, 3, dim=1) > 0),
    lambda m, s: torch.where(m.plain(s, 3, draw=bools), m.part(2, s, 3, dim=1), 0.0),
    lambda m, s: torch.where(m.plain(2, s, s, draw=bools), m.part(s, 1, dim=0), m.part(1, s, dim=1)),
)
add(
    "mixed",
    lambda m, s: 2.0 ** m.part(2, s, dim=1) / 3 + 1,
    lambda m, s: m.part(2, s, 3, dim=1) * m.part(3, dim=0, grad=True) if s != 3 else m.part(2, s, 3, dim=1),
    lambda m, s: m.part(2, s, s, dim=1) * m.part(2, s, s, dim=2),
    lambda m, s: m.part(s, s, dim=1) + m.plain(s),
    lambda m, s: m.part(s, s, dim=0) + m.plain(s) + m.plain(s, 1),
    lambda m, s: m.part(2, 1, 3, dim=1) * m.part(2, s, 3, dim=1),
    lambda m, s: m.part(2, s, 3, dim=1) * m.part(2, 1, 3, dim=1),
    lambda m, s: m.part(2, 1, 3, dim=1) * m.plain(2, s, 3),
    lambda m, s: m.flat(2, s, 3, dim=0) * m.plain(2 * s, 1) + m.flat(2, s, 3, dim=0),
    lambda m, s: m.flat(s, 2, 3, dim=0) * m.plain(2 * s, 1) - m.flat(2, s, 3, dim=0),
    lambda m, s: m.part(2, s, 3, dim=1).type(torch.float32),
    lambda m, s: m.part(2, s, 3, dim=1).to(device="cpu", dtype=torch.float32),
    lambda m, s: (torch.maximum(m.plain(s, 3), m.part(2, s, 3, dim=1)), torch.clamp(input=m.part(s, dim=0), min=0)),
    lambda m, s: torch.frexp(m.part(2, s, dim=1)),
    lambda m, s: F.prelu(m.part(2, 3, s, dim=2), m.plain(3)),
    lambda m, s: F.relu(m.part(2, s, 3, dim=1) * 1.0, inplace=True),
    lambda m, s: F.relu(m.part(2, s, 3, dim=1) * 1.0, True),
)

# ---- along other dims ------------------------------------------------------------------------------------------

for _name in ("softmax", "log_softmax", "softmin", "cumsum"):
    for _func in homes(_name):
        for _dim in (0, 1, -1):
            add(_name, lambda m, s, f=_func, d=_dim: f(m.part(2, s, 3, dim=1), d))
        add(_name, lambda m, s, f=_func: f(m.part(s, s, dim=0), dim=1))
        add(_name, lambda m, s, f=_func: f(m.flat(2, s, 3, dim=0), dim=0))
for _name in ("sort", "argsort", "glu", "topk", "normalize"):
    for _func in homes(_name):
        for _dim in (0, 1, 2, -1):
            if _name == "topk":
                add(_name, lambda m, s, f=_func, d=_dim: f(m.part(2, s, 4, dim=1), 1, d))
            elif _name == "normalize":
                add(_name, lambda m, s, f=_func, d=_dim: f(m.part(2, s, 4, dim=1), 2.0, d))
            elif _name == "glu":
                add(_name, lambda m, s, f=_func, d=_dim: f(m.part(2, 2 * s, 4, dim=1), d))
            else:
                add(_name, lambda m, s, f=_func, d=_dim: f(m.part(2, s, 4, dim=1), dim=d, descending=True))
        _rest = (1,) if _name == "topk" else ()
        add(_name, lambda m, s, f=_func, r=_rest: f(m.part(2, s, 4, dim=1), *r))
add(
    "sort",
    lambda m, s: torch.sort(m.part(2, s, 4, dim=1), stable=True, dim=0),
    lambda m, s: m.part(2, s, dim=1).sort(0, True),
)
for _func in homes("index_select"):
    for _dim in (0, 1, 2):
        add("index_select", lambda m, s, f=_func, d=_dim: f(m.part(2, s, 3, dim=1), d, torch.tensor([0, 0])))
add("flip", lambda m, s: m.part(2, s, 3, dim=1).flip(0, 1), lambda m, s: m.part(2, s, 3, dim=1).flip(dims=(0, 2)))
add(
    "roll",
    lambda m, s: torch.roll(m.part(2, s, 3, dim=1), 1),
    lambda m, s: m.part(2, s, 3, dim=1).roll(shifts=1, dims=2),
)
for _name in ("chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split"):
    for _func in homes(_name):
        for _dim in (0, 1, -1):
            add(_name, lambda m, s, f=_func, d=_dim: f(m.part(2, s, 4, dim=1), 2, d))
        add(
            _name,
            lambda m, s, f=_func: f(m.part(s, 4, dim=0), 2),
            lambda m, s, f=_func: f(m.part(s, 4, dim=0), 2, dim=1),
        )
for _func in homes("split_with_sizes"):
    add("split_with_sizes", lambda m, s, f=_func: f(m.part(s, 4, dim=0), [1, 3], -1))
add("split", lambda m, s: m.part(s, 4, dim=0).split([1, 3], dim=-1))
for _func in homes("repeat_interleave"):
    for _dim in (0, 1, -1):
        add("repeat_interleave", lambda m, s, f=_func, d=_dim: f(m.part(2, s, 3, dim=1), 2, d))
    add("repeat_interleave", lambda m, s, f=_func: f(m.part(2, s, 3, dim=1), torch.tensor([1, 2]), dim=0))
for _func in homes("layer_norm"):
    add(
        "layer_norm",
        lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), (4,), m.plain(4), m.plain(4)),
        lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), (s, 4), eps=1e-3),
        lambda m, s, f=_func: f(input=m.part(s, s, 4, dim=0), normalized_shape=(s, 4)),
    )
for _func in homes("rms_norm"):
    add("rms_norm", lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), (4,), m.plain(4)))
for _name in ("sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "logsumexp", "all", "any", "prod", "var", "std", "median",
              "nansum", "count_nonzero", "std_mean", "var_mean", "nanmean", "nanmedian"):  # fmt: skip
    for _func in homes(_name):
        for _dim in (0, 1, 2, -1):
            add(_name, lambda m, s, f=_func, d=_dim: f(m.part(2, s, s, dim=1), d))
            if _name != "count_nonzero":
                add(_name, lambda m, s, f=_func, d=_dim: f(m.part(2, s, 3, dim=1), dim=d, keepdim=True))
        if _name in (
            "sum",
            "mean",
            "amax",
            "amin",
            "logsumexp",
            "all",
            "any",
            "var",
            "std",
            "nansum",
            "count_nonzero",
            "nanmean",
        ):
            for _dims in ((0, 2), (0, 1), (1, 2), [0, -1]):
                add(_name, lambda m, s, f=_func, d=_dims: f(m.part(2, s, 3, dim=1), d))
        if _name != "logsumexp":
            add(
                _name,
                lambda m, s, f=_func: f(m.part(2, s, 3, dim=1)),
                lambda m, s, f=_func: f(m.flat(2, s, 3, dim=0), 0),
            )
for _name in ("var", "std"):
    add(
        _name,
        lambda m, s, f=getattr(torch, _name): f(m.part(2, s, 3, dim=1), 0, False),
        lambda m, s, f=getattr(torch, _name): f(m.part(2, s, s, dim=1), 0, False, True),
        lambda m, s, f=getattr(torch, _name): f(m.part(2, s, 3, dim=1), 0, True),
        lambda m, s, f=getattr(torch, _name): f(m.part(2, s, 3, dim=1), False),
    )
add(
    "reduce",
    lambda m, s: torch.max(m.part(2, s, dim=1), m.plain(s)),
    lambda m, s: torch.min(m.part(2, s, dim=1), other=m.plain(2, s)),
    lambda m, s: m.part(2, s, 3, dim=1, draw=ints(9)).sum(),
    lambda m, s: m.part(2, s, 3, dim=1, draw=ints(9)).sum(1),
    lambda m, s: m.part(2, s, 3, dim=1, draw=bools).sum((0, 1), keepdim=True),
    lambda m, s: m.part(2, s, 3, dim=1, draw=bools).float().mean(),
    lambda m, s: m.part(2, s, 3, dim=1, draw=ints(9)).mean(1, dtype=torch.float64),
    lambda m, s: (m.part(2, s, 3, dim=1) > 0).any(1),
    lambda m, s: (m.part(2, s, 3, dim=1) > 0).all(),
    lambda m, s: m.part(2, s, 3, dim=1).sum(axis=1, keepdims=True),
    lambda m, s: m.part(2, s, 3, dim=1).mean(axis=0, keepdims=True),
    lambda m, s: torch.sum(input=m.part(2, s, 3, dim=1), dim=(1,), dtype=torch.float64),
    lambda m, s: m.part(2, s, 3, dim=1).sum(()),
    lambda m, s: m.flat(s, 2, 3, dim=0).mean(0),
    lambda m, s: m.part(2, s, 3, dim=1).sum().add_(1.0).mul_(2.0),
    lambda m, s: (m.part(2, s, 3, dim=1) * 1.0)[:, -1].mul_(m.plain(3)),
    lambda m, s: torch.linalg.vector_norm(m.part(2, s, 3, dim=1), dim=-1, keepdim=True),
    lambda m, s: torch.linalg.vector_norm(m.part(2, s, 3, dim=1), dim=0),
    lambda m, s: torch.linalg.norm(m.part(2, s, s, dim=1), 2, 0),
    lambda m, s: torch.linalg.norm(m.part(2, s, s, dim=1), 2, (0, 2)),
    lambda m, s: torch.norm(m.part(2, s, s, dim=1), 2, 0, True),
    lambda m, s: torch.norm(m.part(2, s, s, dim=1)),
    lambda m, s: m.part(2, s, s, dim=1).norm(2, 0),
    lambda m, s: m.part(2, s, s, dim=1).norm(dim=1),
)

# ---- products --------------------------------------------------------------------------------------------------

add(
    "linear",
    lambda m, s: F.linear(m.part(2, s, 4, dim=1), m.plain(3, 4), m.plain(3)),
    lambda m, s: F.linear(m.flat(2, s, 4, dim=0), m.plain(3, 4)),
    lambda m, s: F.linear(m.part(2, 4, s, dim=2), m.plain(3, s), bias=m.plain(3)),
    lambda m, s: F.linear(input=m.part(2, s, s, dim=1), weight=m.plain(s, s)),
    lambda m, s: F.linear(m.plain(2, 4), m.part(s, 4, dim=0)),
    lambda m, s: F.linear(m.part(s, dim=0), m.plain(3, s)),
)
for _func in homes("addmm"):
    add("addmm", lambda m, s, f=_func: f(m.plain(3), m.part(s, 4, dim=0), m.plain(4, 3)))
    add("addmm", lambda m, s, f=_func: f(m.plain(s, 3), m.part(s, 4, dim=0), m.plain(4, 3), beta=2, alpha=3))
    add("addmm", lambda m, s, f=_func: f(m.plain(3), m.part(4, s, dim=1), m.plain(s, 3)))
    add("addmm", lambda m, s, f=_func: f(m.part(s, 3, dim=0), m.part(s, 4, dim=0), m.plain(4, 3)))
    add("addmm", lambda m, s, f=_func: f(m.plain(1, s), m.part(s, s, dim=0), m.plain(s, s)))
for _func in homes("baddbmm"):
    add(
        "baddbmm",
        lambda m, s, f=_func: f(m.plain(2, 1, s), m.part(2, s, 4, dim=1), m.part(2, 4, s, dim=2), beta=0.5, alpha=2),
    )
    if _func is torch.baddbmm:
        add(
            "baddbmm",
            lambda m, s: torch.baddbmm(input=m.plain(2, s, 3), batch1=m.part(2, s, 4, dim=1), batch2=m.plain(2, 4, 3)),
        )
for _name in ("matmul", "__matmul__"):
    for _func in homes(_name):
        add(
            _name,
            lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), m.plain(4, 3)),
            lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), m.part(2, 4, s, dim=2)),
            lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), m.plain(4)),
            lambda m, s, f=_func: f(m.part(2, 4, s, dim=2), m.plain(s)),
            lambda m, s, f=_func: f(m.plain(4), m.part(2, 4, s, dim=2)),
            lambda m, s, f=_func: f(m.plain(4), m.part(4, s, dim=1)),
            lambda m, s, f=_func: f(m.part(s, dim=0), m.part(s, dim=0)),
            lambda m, s, f=_func: f(m.part(s, dim=0), m.part(2, s, 3, dim=1)),
            lambda m, s, f=_func: f(m.part(2, s, 3, 4, dim=1), m.plain(s, 4, 5)),
            lambda m, s, f=_func: f(m.part(2, s, 3, 4, dim=1), m.plain(1, 4, 5)),
            lambda m, s, f=_func: f(m.part(2, s, 3, 4, dim=1), m.plain(4)),
            lambda m, s, f=_func: f(m.plain(3, 1, 2, 4), m.part(s, 4, 5, dim=0)),
            lambda m, s, f=_func: f(m.part(s, 4, dim=0), m.plain(2, 4, 3)),
            lambda m, s, f=_func: f(m.plain(2, 3, s), m.part(s, s, dim=1)),
            lambda m, s, f=_func: f(m.part(s, s, dim=1), m.part(s, s, dim=1)),
            lambda m, s, f=_func: f(m.part(s, s, dim=0), m.part(s, s, dim=0)),
        )
for _func in homes("__rmatmul__"):
    add("__rmatmul__", lambda m, s, f=_func: f(m.part(2, 4, s, dim=2), m.plain(3, 4)))
for _func in homes("mm"):
    add(
        "mm",
        lambda m, s, f=_func: f(m.part(s, 4, dim=0), m.plain(4, 3)),
        lambda m, s, f=_func: f(m.plain(3, s), m.part(s, 4, dim=0)),
    )
for _func in homes("bmm"):
    add(
        "bmm",
        lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), m.plain(2, 4, 3)),
        lambda m, s, f=_func: f(m.part(s, 2, 3, dim=0), m.plain(s, 3, 2)),
    )
add(
    "einsum",
    lambda m, s: torch.einsum("bsd,de->bse", m.part(2, s, 3, dim=1), m.plain(3, 4)),
    lambda m, s: torch.einsum("bqd,bkd->bqk", m.part(2, s, 3, dim=1), m.part(2, s, 3, dim=1)),
    lambda m, s: torch.einsum("bsd,bse->bde", m.part(2, s, 3, dim=1), m.part(2, s, 4, dim=1)),
    lambda m, s: torch.einsum("ij,jj->ij", m.part(2, s, dim=1), m.plain(s, s)),
    lambda m, s: torch.einsum("ii->i", m.part(s, s, dim=0)),
    lambda m, s: torch.einsum("bii->bi", m.part(2, s, s, dim=2)),
    lambda m, s: torch.einsum("...sd,df->...sf", m.part(2, s, 3, dim=1), m.plain(3, 4)),
    lambda m, s: torch.einsum("...d,...d->...", m.part(2, s, 3, dim=1), m.plain(s, 3)),
    lambda m, s: torch.einsum("...d,d", m.part(2, s, 3, dim=1), m.plain(3)),
    lambda m, s: torch.einsum("sd , td -> st", m.part(s, 3, dim=0), m.plain(4, 3)),
    lambda m, s: torch.einsum("bs,s->b", [m.part(2, s, dim=1), m.plain(s)]),
    lambda m, s: torch.einsum("bs,bs->bs", m.part(2, s, dim=1), m.plain(2, 1)),
    lambda m, s: torch.einsum(m.part(2, s, dim=1), [0, 1], [1, 0]),
)


def _renormed(indices: Any, table: torch.Tensor) -> Any:
    return F.embedding(indices, table, max_norm=0.5), table


add(
    "embedding",
    lambda m, s: F.embedding(m.part(2, s, dim=1, draw=ints(6)), m.plain(6, 3)),
    lambda m, s: F.embedding(m.part(2, s, dim=1, draw=ints(6)), m.plain(6, 3), 0),
    lambda m, s: F.embedding(m.part(2, s, dim=1, draw=ints(6)), m.plain(6, 3), scale_grad_by_freq=True),
    lambda m, s: _renormed(m.part(2, s, dim=1, draw=ints(6)), m.plain(6, 3, grad=False)),
    lambda m, s: F.embedding(m.plain(2, 4, draw=lambda g, shape: ints(s)(g, shape)), m.part(s, 3, dim=0)),
    lambda m, s: torch.embedding(m.plain(6, 3), m.part(2, s, dim=1, draw=ints(6))),
    lambda m, s: F.one_hot(m.part(2, s, dim=1, draw=ints(6)), 6),
    lambda m, s: F.one_hot(m.part(2, s, dim=1, draw=ints(6))),
)

# ---- dims ------------------------------------------------------------------------------------------------------

for _func in (torch.reshape, torch.Tensor.reshape, torch.Tensor.view):
    add(
        "reshape",
        lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), (2 * s, 4)),
        lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), (2, s, 2, 2)),
        lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), (2, -1)),
        lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), (-1,)),
        lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), (4, -1)),
        lambda m, s, f=_func: f(m.part(2, s, 4, dim=1), (1, 2, 1, s, 1, 4)),
        lambda m, s, f=_func: f(m.part(s, s, s, dim=1), (s * s, s)),
        lambda m, s, f=_func: f(m.part(s, s, s, dim=1), (s, s * s)),
        lambda m, s, f=_func: f(m.part(s, s, dim=1), (1, s, 1, s)),
        lambda m, s, f=_func: f(f(m.part(s, s, 2, dim=0), (s * s, 2)), (s, s, 2)),
        lambda m, s, f=_func: f(f(m.part(2, s, 3, 2, dim=1), (2 * s * 3, 2)), (2, s, 3, 2)).sum(2),
        lambda m, s, f=_func: f(f(m.part(2, s, 6, dim=1), (2 * s, 6)), (s, 2, 6)),
        lambda m, s, f=_func: f(m.part(1, s, 1, dim=1), (s,)),
    )
add(
    "views",
    lambda m, s: m.part(2, s, 4, dim=1).view(-1, 4).view(2, s, 4),
    lambda m, s: m.part(2, s, 4, dim=1).view(torch.int64),
    lambda m, s: m.part(2, s, 4, dim=1).reshape(m.plain(1, 1).shape[0] * 2, -1, 2, 2),
    lambda m, s: m.part(2, s, 4, dim=1).view_as(m.plain(2 * s, 4)),
    lambda m, s: m.part(2, s, 4, dim=1).reshape_as(m.part(2, s, 2, 2, dim=1)),
    lambda m, s: m.part(2, s, 4, dim=1).flatten(),
    lambda m, s: torch.flatten(m.part(2, s, 4, dim=1), 1),
    lambda m, s: m.part(2, s, 4, dim=1).flatten(0, 1).unflatten(0, (2, s)),
    lambda m, s: m.part(2, s, 4, dim=1).unflatten(-1, (2, 2)),
    lambda m, s: torch.unflatten(m.part(2, s, 4, dim=1), 1, (1, -1)),
    lambda m, s: m.part(1, s, 1, dim=1).squeeze(),
    lambda m, s: m.part(1, s, 1, dim=1).squeeze(0),
    lambda m, s: torch.squeeze(m.part(1, s, 1, dim=1), -1),
    lambda m, s: m.part(1, s, 1, dim=1).squeeze((0, 2)),
    lambda m, s: m.part(2, s, 1, dim=1).squeeze(1),
    lambda m, s: m.part(2, s, 3, dim=1).transpose(1, 2),
    lambda m, s: torch.transpose(m.part(2, s, 3, dim=1), 0, -2),
    lambda m, s: torch.transpose(m.part(2, s, 3, dim=1), dim0=0, dim1=-1),
    lambda m, s: (m.part(2, s, 3, dim=1).swapaxes(0, 2), torch.swapaxes(m.part(s, s, dim=0), 0, 1)),
    lambda m, s: (m.part(2, s, 3, dim=1).swapdims(0, 1), torch.swapdims(m.part(s, s, dim=0), 0, 1)),
    lambda m, s: (m.part(2, s, 3, dim=1).permute(2, 0, 1), torch.permute(m.part(s, s, 2, dim=0), (-1, 1, 0))),
    lambda m, s: (m.part(2, s, 3, dim=1).movedim(1, 0), torch.movedim(m.part(s, s, 2, dim=0), (0, 1), (1, 2))),
    lambda m, s: (m.part(2, s, 3, dim=1).moveaxis(1, -1), torch.moveaxis(m.part(s, s, 2, dim=0), 0, 1)),
    lambda m, s: (m.part(s, s, dim=1).t(), torch.t(m.part(s, 3, dim=0)), m.part(s, dim=0).t()),
    lambda m, s: (m.part(s, s, dim=1).T, m.part(s, 3, 2, dim=0).mT, m.part(s, s, dim=0).H, m.part(2, s, s, dim=1).mH),
    lambda m, s: (m.part(2, s, 3, dim=1).adjoint(), torch.adjoint(m.part(s, s, dim=0))),
    lambda m, s: (
        m.part(2, s, dim=1).unsqueeze(0),
        m.part(2, s, dim=1).unsqueeze(1),
        torch.unsqueeze(m.part(2, s, dim=1), -1),
    ),
    lambda m, s: (m.part(2, s, dim=1).unsqueeze(-2), torch.unsqueeze(m.part(s, s, dim=1), dim=2)),
    lambda m, s: m.part(2, s, 1, dim=1).expand(4, 2, -1, 3),
    lambda m, s: m.part(2, s, 1, dim=1).expand((2, s, s)),
    lambda m, s: m.part(2, 1, 3, dim=1).expand(2, s, 3),
    lambda m, s: m.part(1, s, dim=1).expand_as(m.plain(3, s)),
    lambda m, s: (torch.broadcast_to(m.part(s, 1, dim=0), (2, s, s)), m.part(s, 1, dim=0).broadcast_to((s, 4))),
    lambda m, s: (
        m.part(2, s, dim=1).repeat(3, 1),
        m.part(2, s, dim=1).repeat(2, 1, 3),
        m.part(2, s, dim=1).repeat((2, 2, 1)),
    ),
    lambda m, s: (
        m.part(2, s, dim=1).tile(3, 1),
        torch.tile(m.part(2, s, dim=1), (2,)),
        m.part(s, 2, dim=0).tile((2,)),
    ),
    lambda m, s: (
        *m.part(2, s, 3, dim=1).unbind(),
        *torch.unbind(m.part(s, 3, dim=0), -1),
        *m.part(s, 2, dim=0).unbind(0),
    ),
    lambda m, s: (
        m.part(2, s, 3, dim=1).select(0, 1),
        m.part(2, s, 3, dim=1).select(1, -1),
        torch.select(m.part(2, s, dim=1), -1, 0),
    ),
    lambda m, s: (m.part(2, s, 3, dim=1).narrow(2, 1, 2), torch.narrow(m.part(2, s, 3, dim=1), 1, s - 1, 1)),
    lambda m, s: (
        m.part(2, s, 3, dim=1).narrow(1, -1, 1),
        m.part(2, s, 3, dim=1).narrow(1, 0, s),
        m.part(s, dim=0).narrow(0, 0, 0),
    ),
    lambda m, s: F.pad(m.part(2, s, 3, dim=1), (1, 2)),
    lambda m, s: F.pad(m.part(2, s, 3, dim=1), (0, 0, 1, 0)),
    lambda m, s: F.pad(m.part(2, s, 3, dim=1), (1, 1), mode="reflect"),
    lambda m, s: F.pad(m.part(2, s, 3, dim=1), (-1, 0), value=2.0),
    lambda m, s: list(m.part(2, s, 3, dim=1)),
    lambda m, s: list(m.part(s, 3, dim=0)),
    lambda m, s: (m.part(2, s, dim=1).new_zeros(s), m.part(s, dim=0).new_ones(2), m.part(s, dim=0).new_full((2,), 3.0)),
    lambda m, s: (m.part(s, dim=0).new_tensor([1.0]), m.part(s, dim=0).new_empty(2).fill_(1)),
    lambda m, s: torch.tensor([m.part(s, 2, dim=0).stride(0), m.part(s, 2, dim=0).storage_offset()]),
    lambda m, s: torch.tensor([torch.Tensor.is_contiguous(m.part(s, 2, dim=0)), torch.is_conj(m.part(s, dim=0))]),
    lambda m, s: torch.tensor(
        [m.part(s, dim=0).is_neg(), m.part(s, dim=0).is_inference(), torch.is_neg(m.part(s, dim=0))]
    ),
    lambda m, s: torch.tensor([m.part(s, dim=0).is_conj(), torch.is_inference(m.part(s, dim=0))]),
)
for _name in ("cat", "concat", "concatenate"):
    for _func in homes(_name):
        add(
            _name,
            lambda m, s, f=_func: f([m.part(2, s, 3, dim=1), m.plain(2, s, 2), m.part(2, s, 1, dim=1)], -1),
            lambda m, s, f=_func: f([m.part(2, s, 3, dim=1), m.plain(1, s, 3)]),
            lambda m, s, f=_func: f((m.part(2, s, 3, dim=1), m.part(2, s, 3, dim=1)), dim=1),
            lambda m, s, f=_func: f((m.part(s, s, dim=0), m.part(s, s, dim=1)), dim=1),
            lambda m, s, f=_func: f((m.plain(0), m.part(s, s, dim=0)), 0),
            lambda m, s, f=_func: f(tensors=[m.part(2, s, dim=1), m.part(2, s, dim=1)], dim=0),
        )
for _dim in (0, 1, 2, 3, -1, -2):
    add("stack", lambda m, s, d=_dim: torch.stack([m.part(2, s, 3, dim=1), m.plain(2, s, 3)], d))
add("stack", lambda m, s: torch.stack((m.part(s, s, dim=0), m.part(s, s, dim=1)), dim=1))
for _number, _items in enumerate(
    [
        (Ellipsis, None), (None,), (slice(None), -1), (slice(None), 0), (0,), (slice(None), slice(1, None)), (slice(None), slice(None, -1)),
        (slice(None), slice(2, 5)), (slice(None), slice(-2, None)), (slice(None), slice(None, None, 2)), (slice(None), slice(4, 2)),
        (Ellipsis, slice(1, None)), (Ellipsis, 0), (slice(1), None, slice(1, None), 2), (1, -1, 1), (Ellipsis, [-2], slice(None)),
        (Ellipsis, [0, 2]), (slice(None), slice(None), [2, 2, 0]), ([1, 0],), (Ellipsis, [2], ), (0, slice(1, None), [0, 2]),
        (slice(None), [0]), ([0], slice(None), [1]), (None, slice(1), Ellipsis, None, [1]), (slice(None), -1, [0, 1]), (Ellipsis,), (),
    ]
):  # fmt: skip
    add("getitem", lambda m, s, i=_items: m.part(2, s, 3, dim=1)[i])
add(
    "getitem",
    lambda m, s: m.part(s, s, dim=1)[0],
    lambda m, s: m.part(s, s, dim=0)[-1],
    lambda m, s: m.part(s, s, dim=0)[..., -1],
    lambda m, s: m.part(2, s, 3, dim=1)[m.plain(2, s, draw=bools)],
    lambda m, s: m.part(2, s, 3, dim=1)[m.part(2, s, 3, dim=1, draw=bools)],
    lambda m, s: m.part(2, s, 3, dim=1)[:, m.plain(s, draw=bools)],
    lambda m, s: m.part(2, s, 3, dim=1)[:, :, torch.tensor([True, False, True])],
    lambda m, s: m.part(2, s, 3, dim=1)[:, torch.arange(s - 1, -1, -1)],
    lambda m, s: m.part(2, s, 3, dim=1)[torch.tensor([1, 0]), :, torch.tensor([1, 2])],
    lambda m, s: m.part(2, s, 3, dim=1)[torch.arange(2), m.part(s, dim=0, draw=ints(1))[:1]],
    lambda m, s: m.part(2, s, 3, dim=1)[..., torch.tensor([[1, 2], [0, 0]])],
    lambda m, s: m.plain(5, 3)[m.part(2, s, dim=1, draw=ints(5))],
    lambda m, s: m.flat(2, s, 3, dim=0)[1:],
    lambda m, s: m.flat(2, s, 3, dim=0)[:, 1:],
    lambda m, s: m.part(s, dim=0)[-1],
    lambda m, s: m.part(2, s, dim=1, draw=bools)[:, -1],
    lambda m, s: m.part(2, s, dim=1, draw=ints(9))[:, 0],
    lambda m, s: (m.part(2, s, 3, dim=1)[:, 1:] * m.plain(2, s, 3)[:, 1:]).sum(1),
    lambda m, s: m.part(2, s, 3, dim=1)[:, :-1] * m.part(2, s, 3, dim=1)[:, 1:],
    lambda m, s: (m.part(s, dim=0) * torch.tensor([float("inf"), *(s - 2) * [1.0], float("inf")][:s]))[s // 2],
    lambda m, s: (m.part(2, s, dim=1) / torch.tensor([0.0, *(s - 2) * [1.0], 0.0][:s]))[:, -1],
)  # fmt: skip

# ---- changes in place ------------------------------------------------------------------------------------------


def _changed(change: Callable[[Any, Maker, int], Any], *shape: int, dim: int = 1) -> Case:
    def run(m: Maker, s: int) -> Any:
        x = m.part(*(s if size == -1 else size for size in (shape or (2, -1, 3))), dim=dim)
        y = x * 1.0
        change(y, m, s)
        return y, x * y

    return run


def _set(items: Any, value: Callable[[Maker, int], Any]) -> Callable[[Any, Maker, int], Any]:
    def change(x: Any, m: Maker, s: int) -> None:
        x[items] = value(m, s)

    return change


def _set_row(x: Any, m: Maker, s: int) -> None:
    x[m.plain(2, s, draw=bools)] = 0.5


add(
    "changes",
    _changed(lambda x, m, s: x.view(-1, 3).mul_(2.0)),
    _changed(lambda x, m, s: x.transpose(1, 2).add_(m.plain(3, s))),
    _changed(lambda x, m, s: x[..., 1:].mul_(3.0)),
    _changed(lambda x, m, s: x[0].zero_()),
    _changed(lambda x, m, s: x.narrow(-1, 1, 1).copy_(m.plain(2, s, 1))),
    _changed(lambda x, m, s: x.unsqueeze(0).mul_(m.part(2, s, 3, dim=1))),
    _changed(lambda x, m, s: x.select(-1, 0).neg_()),
    _changed(_set((slice(None), 0), lambda m, s: m.plain(3))),
    _changed(_set((slice(None), slice(1, None)), lambda m, s: m.plain(2, s, 3)[:, 1:])),
    _changed(_set((Ellipsis, 1), lambda m, s: m.part(2, s, dim=1))),
    _changed(_set((), lambda m, s: m.part(2, s, 3, dim=1))),
    _changed(_set_row),
    _changed(lambda x, m, s: x.index_add_(1, torch.zeros(2, dtype=torch.long), m.plain(2, 2, 3), alpha=2)),
    _changed(lambda x, m, s: x.index_copy_(1, torch.tensor([s - 1]), m.plain(2, 1, 3))),
    _changed(lambda x, m, s: x.scatter_add_(1, m.plain(2, s, 3, draw=ints(s)), m.part(2, s, 3, dim=1))),
    _changed(lambda x, m, s: x.scatter_(2, m.plain(2, s, 1, draw=ints(3)), 0.5)),
    _changed(lambda x, m, s: x.index_fill_(1, torch.tensor([0]), 2.0)),
    _changed(lambda x, m, s: x.masked_scatter_(m.plain(2, s, 3, draw=bools), m.plain(2 * s * 3))),
    _changed(lambda x, m, s: x.cumsum_(1)),
    _changed(lambda x, m, s: x.flatten(0, 1).index_add_(0, torch.arange(s), m.part(s, 3, dim=0))),
    _changed(lambda x, m, s: x.data.mul_(2.0)),
    _changed(lambda x, m, s: x.add_(m.plain(2, s, 3)).mul_(2)),
    lambda m, s: torch.zeros_like(m.part(2, s, 3, dim=1)).index_add_(1, torch.tensor([0, 0]), m.plain(2, 2, 3)),
    lambda m, s: torch.zeros_like(m.flat(2, s, 3, dim=0)).index_add_(0, torch.arange(2 * s), m.flat(2, s, 3, dim=0)),
    lambda m, s: m.plain(2, s, 3).mul(1.0).add_(m.part(2, s, 3, dim=1)),
    lambda m, s: m.plain(2, s, 3).mul(1.0).index_add_(1, torch.arange(s), m.part(2, s, 3, dim=1)),
    lambda m, s: torch.add(m.part(2, s, dim=1, grad=False), 1.0, out=torch.empty(2, s, dtype=torch.float64)),
)  # fmt: skip

# ---- losses ----------------------------------------------------------------------------------------------------


def ignored(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    labels = torch.randint(0, 5, shape, generator=generator)
    return labels.masked_fill(torch.rand(shape, generator=generator) < 0.3, -100)


def soft(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64).softmax(1)


for _options in (
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 2}, {"label_smoothing": 0.1}, {"size_average": False},
    {"label_smoothing": 0.1, "reduction": "sum"}, {"reduce": False},
):  # fmt: skip
    add(
        "cross_entropy",
        lambda m, s, o=_options: F.cross_entropy(m.flat(2, s, 5, dim=0), m.plain(2 * s, draw=ints(5)), **o),
        lambda m, s, o=_options: F.cross_entropy(m.flat(s, 2, 5, dim=0), m.flat(s, 2, dim=0, draw=ints(5)), **o),
        lambda m, s, o=_options: F.cross_entropy(m.part(2, 5, s, dim=2), m.plain(2, s, draw=ignored if "ignore_index" not in o else ints(5)), **o),
        lambda m, s, o=_options: F.cross_entropy(m.part(s, 5, dim=0), m.plain(s, draw=ints(5)), m.plain(5, draw=positive, grad=False), **o),
        lambda m, s, o=_options: F.cross_entropy(m.part(2, 5, s, dim=2), m.plain(2, s, draw=ints(5)), weight=m.plain(5, draw=positive, grad=False), **o),
        lambda m, s, o=_options: F.nll_loss(m.part(2, 5, s, dim=2), m.plain(2, s, draw=ints(5)), **o) if "label_smoothing" not in o else m.plain(1),
    )  # fmt: skip
    if "ignore_index" not in _options:
        add(
            "cross_entropy",
            lambda m, s, o=_options: F.cross_entropy(m.part(2, 5, s, dim=2), m.plain(2, 5, s, draw=soft), **o),
        )
        add(
            "cross_entropy",
            lambda m, s, o=_options: F.cross_entropy(
                m.part(s, 5, dim=0), m.plain(s, 5, draw=soft), weight=m.plain(5, draw=positive, grad=False), **o
            ),
        )
add(
    "cross_entropy",
    lambda m, s: F.cross_entropy(m.part(s, 5, dim=0), torch.full((s,), -100)),
    lambda m, s: F.cross_entropy(m.part(s, 5, dim=0), torch.full((s,), -100), reduction="sum"),
    lambda m, s: F.cross_entropy(m.part(s, dim=0), torch.tensor(0)),
    lambda m, s: F.cross_entropy(m.part(5, s, dim=1).T, m.part(s, dim=0, draw=ints(5))),
    lambda m, s: F.cross_entropy(m.part(2, s, 5, dim=1), m.plain(2, 5, draw=ints(1))),
    lambda m, s: F.cross_entropy(input=m.part(2, s, 5, dim=1)[:, :-1].reshape(-1, 5), target=m.plain(2, s, draw=ints(5))[:, 1:].flatten()) if s > 1 else m.plain(1),
    lambda m, s: F.cross_entropy(m.part(2, s, 5, dim=1)[:, :-1].transpose(1, 2), m.part(2, s, dim=1, draw=ints(5))[:, 1:]) if s > 1 else m.plain(1),
    lambda m, s: F.nll_loss(m.part(s, 5, dim=0), m.plain(s, draw=ints(5)), m.plain(5, grad=False)),
)  # fmt: skip
for _func in (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
):
    for _reduction in ("mean", "sum", "none"):
        add(
            _func.__name__,
            lambda m, s, f=_func, r=_reduction: f(
                m.part(2, s, 3, dim=1, draw=positive), m.plain(2, s, 3, draw=positive), reduction=r
            ),
            lambda m, s, f=_func, r=_reduction: f(
                m.plain(2, s, 3, draw=positive), m.part(2, s, 3, dim=1, draw=positive), reduction=r
            ),
            lambda m, s, f=_func, r=_reduction: f(
                m.part(s, s, dim=0, draw=positive), m.part(s, s, dim=1, draw=positive), reduction=r
            ),
        )
add(
    "pointwise",
    lambda m, s: F.kl_div(m.part(2, s, 3, dim=1), m.plain(2, s, 3), reduction="batchmean", log_target=True),
    lambda m, s: F.smooth_l1_loss(m.part(2, s, 3, dim=1), m.plain(2, s, 3), beta=0.3),
    lambda m, s: F.binary_cross_entropy_with_logits(m.part(2, s, 3, dim=1), m.plain(2, s, 3, draw=positive), pos_weight=m.plain(3, grad=False)),
    lambda m, s: F.mse_loss(input=m.part(2, s, 3, dim=1), target=m.plain(2, s, 3)),
    lambda m, s: F.hinge_embedding_loss(m.part(2, s, dim=1), m.plain(2, s, draw=bools).double() * 2 - 1),
    lambda m, s: F.cosine_embedding_loss(m.part(s, 3, dim=0), m.plain(s, 3), torch.ones(s)),
    lambda m, s: F.gaussian_nll_loss(m.part(s, 3, dim=0), m.plain(s, 3), m.plain(s, 3, draw=positive)),
)  # fmt: skip

# ---- what has no handler ---------------------------------------------------------------------------------------

add(
    "fallback",
    lambda m, s: F.conv1d(m.part(2, 3, s, dim=2), m.plain(4, 3, 3), m.plain(4), padding=1),
    lambda m, s: m.part(2, s, 3, dim=1).gather(1, m.plain(2, s, 3, draw=ints(s))),
    lambda m, s: m.part(2, s, 3, dim=1).scatter(1, m.plain(2, s, 3, draw=ints(s)), m.part(2, s, 3, dim=1)) * 0 + 1,
    lambda m, s: m.part(2, s, 3, dim=1).scatter_add(1, m.plain(2, s, 3, draw=ints(s)), m.part(2, s, 3, dim=1)),
    lambda m, s: m.part(2, s, 3, dim=1).unfold(1, 1, 1),
    lambda m, s: F.interpolate(m.part(2, 3, s, dim=2), size=2 * s, mode="linear"),
    lambda m, s: torch.fft.rfft(m.part(2, s, dim=1), dim=1).abs(),
    lambda m, s: torch.outer(m.part(s, dim=0), m.part(s, dim=0)),
    lambda m, s: m.part(s, dim=0, draw=ints(9))[:, None] >= m.part(s, dim=0, draw=ints(9))[None, :],
    lambda m, s: torch.nonzero(m.part(2, s, dim=1) > 0),
    lambda m, s: (m.part(2, s, dim=1) > 0).nonzero(as_tuple=True),
    lambda m, s: torch.tril(m.part(s, s, dim=0)),
    lambda m, s: torch.cdist(m.part(s, 3, dim=0), m.part(s, 3, dim=0), p=1.0),
    lambda m, s: torch.bucketize(m.part(s, dim=0, grad=False), torch.tensor([-0.5, 0.5], dtype=torch.float64)),
    lambda m, s: torch.unique(m.part(2, s, dim=1, draw=ints(4))),
    lambda m, s: torch.hstack([m.part(2, s, dim=1), m.part(2, s, dim=1)]),
    lambda m, s: torch.meshgrid(m.part(s, dim=0), m.plain(3), indexing="ij"),
    lambda m, s: torch.diagonal(m.part(s, s, dim=0)),
    lambda m, s: torch.masked_select(m.part(2, s, dim=1), m.plain(2, s, draw=bools)),
    lambda m, s: torch.take_along_dim(m.part(2, s, dim=1), m.plain(2, s, draw=ints(s)), 1),
    lambda m, s: torch.diff(m.part(2, s, dim=1)),
    lambda m, s: F.group_norm(m.part(2, 4, s, dim=2), 2, m.plain(4)),
    lambda m, s: F.batch_norm(m.part(2, 4, s, dim=2), None, None, m.plain(4), training=True),
    lambda m, s: F.max_pool1d(m.part(2, 3, s, dim=2), 1),
    lambda m, s: F.cosine_similarity(m.part(2, s, 3, dim=1), m.plain(2, s, 3), -1),
    lambda m, s: torch.tensordot(m.part(2, s, 3, dim=1), m.plain(s, 3), dims=2),
    lambda m, s: torch.trapezoid(m.part(2, s, dim=1)),
    lambda m, s: torch.complex(m.part(2, s, dim=1), m.plain(2, s)).abs(),
    lambda m, s: torch.addmv(m.plain(s), m.part(s, 3, dim=0), m.plain(3)),
    lambda m, s: m.part(s, dim=0).dot(m.plain(s)),
    lambda m, s: torch.tensor([m.part(s, dim=0).sum().item(), float(m.part(s, dim=0)[-1])]),
    lambda m, s: torch.tensor(m.part(2, s, dim=1).tolist()),
    lambda m, s: torch.from_numpy(m.part(2, s, dim=1, grad=False).numpy().copy()),
    lambda m, s: torch.tensor([torch.equal(m.part(2, s, dim=1), m.plain(2, s)), torch.allclose(m.part(s, dim=0), m.plain(s))]),
    lambda m, s: F.gumbel_softmax(m.part(2, s, 3, dim=1) * 0 + 1, tau=1e6) * 0,
    lambda m, s: copy.deepcopy(m.part(2, s, dim=1, grad=False)),
    lambda m, s: torch.from_numpy(torch.Tensor.__array__(m.part(2, s, dim=1, grad=False)).copy()),
    lambda m, s: torch.tensor(float(f"{m.part(s, dim=0).sum().detach():.17g}")) + 0 * len(f"{m.part(s, dim=0).detach()}"),
    lambda m, s: torch.stack(list(torch.Tensor.__iter__(m.part(2, s, dim=1)))),
    lambda m, s: torch.tile(m.part(s, 2, dim=0), (2,)),
    lambda m, s: F.alpha_dropout(m.part(s, dim=0), 0.5, False),
    lambda m, s: copy.deepcopy([m.part(2, s, dim=1).detach()])[0],
)  # fmt: skip

# ---- attention and modules -------------------------------------------------------------------------------------


def _module(make: Callable[[], nn.Module], m: Maker) -> nn.Module:
    torch.manual_seed(3)
    module = make().double()
    m.leaves += [(p, False) for p in module.parameters()]
    return module


def _causal(s: int) -> torch.Tensor:
    return torch.ones(s, s, dtype=torch.bool).triu(1)


def _padding(s: int) -> torch.Tensor:
    padding = torch.zeros(2, s, dtype=torch.bool)
    padding[0, s - 1 :] = s > 1
    return padding


def _mha(m: Maker, first: bool = True, dropout: float = 0.0, **options: Any) -> nn.Module:
    return _module(lambda: nn.MultiheadAttention(8, 4, dropout, batch_first=first, **options), m)


def _self(module: nn.Module, x: Any, **options: Any) -> Any:
    return module(x, x, x, **options)


add(
    "modules",
    lambda m, s: _self(_mha(m), m.part(2, s, 8, dim=1)),
    lambda m, s: _self(_mha(m), m.part(2, s, 8, dim=1), need_weights=False)[0],
    lambda m, s: _self(_mha(m, False), m.part(s, 2, 8, dim=0), average_attn_weights=False),
    lambda m, s: _self(_mha(m), m.part(s, 8, dim=0), attn_mask=_causal(s)),
    lambda m, s: _self(_mha(m), m.part(s, 8, dim=0), key_padding_mask=_padding(s)[0], need_weights=False)[0],
    lambda m, s: _self(_mha(m), m.part(2, s, 8, dim=1), key_padding_mask=_padding(s), attn_mask=_causal(s), need_weights=False)[0],
    lambda m, s: _self(_mha(m), m.part(2, s, 8, dim=1), key_padding_mask=_padding(s), attn_mask=m.plain(8, s, s)),
    lambda m, s: _self(_mha(m), m.part(2, s, 8, dim=1), attn_mask=_causal(s), is_causal=True, need_weights=False)[0],
    lambda m, s: _self(_mha(m), m.part(2, s, 8, dim=1), attn_mask=_causal(s), is_causal=True),
    lambda m, s: _self(_mha(m, bias=False), m.part(2, s, 8, dim=1)),
    lambda m, s: _self(_mha(m, add_bias_kv=True, add_zero_attn=True), m.part(2, s, 8, dim=1)),
    lambda m, s: _mha(m, kdim=3, vdim=5)(m.part(2, s, 8, dim=1), m.plain(2, 4, 3), m.plain(2, 4, 5)),
    lambda m, s: _mha(m)(m.part(2, s, 8, dim=1), *2 * (m.part(2, 5, 8, dim=1),), need_weights=False)[0],
    lambda m, s: _mha(m)(m.plain(2, 3, 8), *2 * (m.part(2, s, 8, dim=1),)),
    lambda m, s: _self(_mha(m, dropout=0.3).eval(), m.part(2, s, 8, dim=1), need_weights=False)[0],
    lambda m, s: _module(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), m)(m.part(2, s, 8, dim=1), src_key_padding_mask=_padding(s)),
    lambda m, s: _module(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, norm_first=True), m)(m.part(s, 2, 8, dim=0), src_mask=_causal(s), is_causal=True),
    lambda m, s: _module(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), m)(m.part(2, s, 8, dim=1)),
    lambda m, s: _module(lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), m)(m.part(2, s, 8, dim=1), m.part(2, 5, 8, dim=1), tgt_mask=_causal(s)),
    lambda m, s: _module(lambda: nn.LSTM(4, 3, batch_first=True), m)(m.part(2, s, 4, dim=1))[0],
    lambda m, s: _module(lambda: nn.GRU(4, 3), m)(m.part(s, 2, 4, dim=0)),
    lambda m, s: _module(lambda: nn.Conv1d(4, 4, 3, padding=1, groups=4), m)(m.part(2, s, 4, dim=1).transpose(1, 2)).transpose(1, 2),
    lambda m, s: F.scaled_dot_product_attention(m.part(2, 4, s, 3, dim=2), m.part(2, 4, s, 3, dim=2), m.part(2, 4, s, 3, dim=2), is_causal=True),
    lambda m, s: F.scaled_dot_product_attention(m.part(s, 2, 4, 3, dim=0), m.part(s, 2, 4, 3, dim=0), m.part(s, 2, 4, 3, dim=0)),
)  # fmt: skip


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
    """Of a sequence, a row of weights and a table of positions."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, table: Any) -> Any:
        ctx.save_for_backward(x, weight, table)
        return x * weight + table

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1)), grad.sum(0)


class Times(torch.autograd.Function):
    """Whose backward returns a whole plain tensor for the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        return whole_of(grad) @ weight.T, torch.einsum("bsi,bso->io", x, grad)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 7


def _looked_at(m: Maker, s: int) -> Any:
    y = Gelu.apply(m.part(2, s, 3, dim=1) * 1.0)
    with torch.no_grad():
        y.sum()
    return y * 2.0


def _hooked(hook: Callable[[Any], Any]) -> Case:
    def run(m: Maker, s: int) -> Any:
        x = m.part(2, s, 3, dim=1) * 1.0
        x.register_hook(hook)
        return x * m.plain(s, 3)

    return run


def _kept(m: Maker, s: int) -> Any:
    x = m.part(2, s, 3, dim=1) * 1.0
    x.retain_grad()
    (x.pow(2).sum() + (x * m.plain(s, 3)).sum()).backward()
    return x.grad, x.detach()


def _leaf(m: Maker, s: int) -> Any:
    x = m.part(2, s, 3, dim=1).detach().requires_grad_()
    (x.pow(3).sum()).backward()
    return x.grad


def _late(m: Maker, s: int) -> Any:
    x = torch.zeros_like(m.part(2, s, 3, dim=1))
    view = x.view(-1, 3)
    x.add_(m.plain(3))
    return Gelu.apply(x) + Gelu.apply(view).view(2, s, 3)


def _penalty(m: Maker, s: int) -> Any:
    x = m.part(2, s, 3, dim=1)
    return checkpoint(lambda y, w: F.linear(y, w).tanh(), x, m.plain(3, 3), use_reentrant=False)


add(
    "graph",
    lambda m, s: Gelu.apply(m.part(2, s, 3, dim=1) * 2.0),
    lambda m, s: Gelu.apply(m.part(2, s, 3, dim=1)) * Gelu.apply(m.flat(2, s, 3, dim=0)).view(2, s, 3),
    lambda m, s: torch.cat([Gelu.apply(m.part(2, s, 3, dim=1)), Gelu.apply(m.part(2, s, 3, dim=1))], -1),
    lambda m, s: Scaled.apply(m.part(2, s, 3, dim=1), m.plain(3), m.plain(s, 3)),
    lambda m, s: Times.apply(m.part(2, s, 3, dim=1), m.plain(3, 4)),
    lambda m, s: Times.apply(m.part(2, s, 3, dim=1, grad=False), m.plain(3, 4)),
    _looked_at,
    lambda m, s: Same.apply(m.part(2, s, 3, dim=1) * 1.0) * m.plain(3),
    lambda m, s: Same.apply(m.part(2, s, 3, dim=1)),
    _hooked(lambda grad: None),
    _hooked(lambda grad: grad * 2.0),
    _hooked(lambda grad: grad / grad.norm()),
    _hooked(lambda grad: whole_of(grad) * 3.0),
    _kept,
    _leaf,
    _late,
    _penalty,
    lambda m, s: m.part(2, s, 3, dim=1).detach() * m.plain(3),
    lambda m, s: m.part(2, s, 3, dim=1).data * m.plain(3),
    lambda m, s: torch.tensor([m.part(2, s, dim=1).requires_grad, m.part(2, s, dim=1).detach().is_leaf, m.part(s, dim=0).grad_fn is None and False]),
    lambda m, s: torch.tensor([(m.part(2, s, dim=1) * 1).retains_grad, (m.part(2, s, dim=1) * 1)._version == 1]),
)  # fmt: skip


# ---- the test --------------------------------------------------------------------------------------------------

LAYOUTS = [("contiguous", 13), ("zigzag", 13), ("contiguous", 1), ("contiguous", 3), ("zigzag", 3), ("contiguous", 4), ("zigzag", 8), ("contiguous", 2)]  # fmt: skip


def _result(
    case: Case, s: int, chunks: Chunks | None
) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor | None, bool]]]:
    m = Maker(s, chunks)
    torch.manual_seed(5)
    out = case(m, s)
    values = [
        whole_of(x.int() if x.dtype == torch.int16 else x) for x in tree_leaves(out) if isinstance(x, torch.Tensor)
    ]
    generator = torch.Generator().manual_seed(11)
    total: Any = 0.0
    for x in (x for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
        if x.requires_grad and x.dtype in (torch.float64, torch.float32):
            total = total + (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum()
    if isinstance(total, torch.Tensor):
        total.backward()
    return [value.detach() for value in values], [(leaf.grad, entered) for leaf, entered in m.leaves]


def _agree(bad: str) -> str:
    """What any rank says; all ranks go on alike."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, bad)
    return next((one for one in said if one), "")


def _compare(case: Case, s: int, chunks: Chunks) -> str:
    """What is wrong with a case on any rank; nothing if it is right, or if the whole raises as well."""
    refused = ""
    try:
        values, grads = _result(case, s, None)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    try:
        found, found_grads = _result(case, s, chunks)
        raised = ""
    except Exception as error:
        raised = f"raises {type(error).__name__}: {str(error)[:300]}"
    if refused and s == 13:
        return f"the whole raises {refused}"
    if refused:  # a size that the function does not take, such as three halves
        return _agree("" if raised else f"the whole raises {refused}; the parts do not")
    if bad := _agree(raised):
        return bad
    means = []
    for got, entered in found_grads:
        has = torch.tensor(float(got is not None))
        dist.all_reduce(has)
        mean = None if got is None else got.clone()
        if has and not entered:
            mean = torch.zeros_like(grads[len(means)][0]) if mean is None else mean
            dist.all_reduce(mean)
            mean /= chunks.size
        means.append(mean)
    return _agree(_difference(values, found, [grad for grad, _ in grads], means))


def _difference(values: list[Any], found: list[Any], grads: list[Any], means: list[Any]) -> str:
    if len(values) != len(found) or len(grads) != len(means):
        return "another number of results"
    for value, got in zip(values, found, strict=True):
        if value.shape != got.shape or value.dtype != got.dtype:
            return f"{got.shape} of {got.dtype}, not {value.shape} of {value.dtype}"
        loose = 1e-6 if value.dtype in (torch.float32, torch.float16, torch.bfloat16) else TOLERANCE
        if not torch.allclose(value.double(), got.double(), loose, loose, equal_nan=True):
            return f"wrong value: {float((value.double() - got.double()).abs().max())}"
    for number, (grad, got) in enumerate(zip(grads, means, strict=True)):
        if got is None or grad is None:
            if (grad is not None and grad.any()) or (got is not None and got.any()):
                return f"gradient {number} is {'lost' if got is None else 'made up'}"
            continue
        largest = max(1.0, float(grad.nan_to_num(0, 0, 0).abs().max()) if grad.numel() else 1.0)
        if grad.shape != got.shape or not torch.allclose(grad, got, TOLERANCE, TOLERANCE * largest, equal_nan=True):
            return f"wrong gradient {number}: {float((grad - got).abs().max())}"
    return ""


def check_cases(layouts: list[tuple[str, int]], names: list[str] | None = None) -> tuple[list[str], set[str], int]:
    """What is wrong, the handlers that no case reached, and how many comparisons were made."""
    torch.set_default_dtype(torch.float64)
    size, group, wrong, made = dist.get_world_size(), dist.group.WORLD, [], 0
    reached: set[Any] = set()
    kept = dict(HANDLERS)
    for func, handler in kept.items():

        def spy(f: Any, args: Any, kwargs: Any, func: Any = func, handler: Any = handler) -> Any:
            out = handler(f, args, kwargs)
            if out is not NotImplemented:
                reached.add(func)
            return out

        HANDLERS[func] = spy
    for layout, s in layouts:
        chunks = Chunks(group, s, (zigzag if layout == "zigzag" else contiguous)(s, size))
        for name, case in CASES.items():
            if names is not None and name not in names:
                continue
            made += 1
            if bad := _compare(case, s, chunks):
                wrong.append(f"{name}, {layout} {s}: {bad}")
    HANDLERS.update(kept)
    reached |= {func for func in kept if (arriving := _arrives(func)) is not func and arriving in reached}
    return wrong, {_name_of(func) for func in kept if func not in reached | DRAWN | ELSEWHERE}, made


class _Told(Exception):
    pass


class _Probe(torch.Tensor):
    """Tells as which function torch hands a call on: an operator may arrive under another name."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Told(func)


def _arrives(func: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        probe = torch.zeros(2, 2).as_subclass(_Probe)
    for arguments in ((probe,), (probe, probe), (probe, 1)):
        try:
            func(*arguments)
        except _Told as told:
            return told.args[0]
        except Exception:
            continue
    return func


DRAWN = {
    func for name in ("bernoulli", "bernoulli_", "exponential_", "normal_", "uniform_", "rand_like", "randn_like", "randint_like")
    for func in homes(name)
}  # fmt: skip
"""They draw: see the test of draws."""

ELSEWHERE = {
    *(torch.autograd.backward, torch.autograd.grad, getattr(torch.Tensor, "requires_grad").__set__),  # noqa: B009
    *(torch.Tensor.cpu, torch.Tensor.cuda),
}
"""What reentrant checkpoints and users of parts over tp call (test_overlap, test_between_blocks); moves between devices, as ``to``."""


def _name_of(func: Any) -> str:
    return f"{getattr(func, '__objclass__', getattr(func, '__module__', ''))} {getattr(func, '__qualname__', func)} {getattr(func, '__self__', '')}"


EVERY = ["contiguous", "zigzag"]


@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        (2, [("zigzag", 13)]),
        pytest.param(2, [("contiguous", 3)], marks=pytest.mark.matrix),
        pytest.param(4, [("contiguous", 3)], marks=pytest.mark.matrix),
        *(
            pytest.param(size, [(layout, s) for layout in EVERY], marks=pytest.mark.matrix)
            for size in (2, 4)
            for s in (1, 2, 3, 4, 8, 13)
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(f"{layout[0]}{s}" for layout, s in value),
)
def test_parts_are_as_the_whole(size, layouts):
    told = run_distributed(check_cases, size, layouts, timeout=280)
    assert told[0][0] == [], "\n".join(told[0][0])
    assert told[0][2] > 1000
    if any(s == 13 for _, s in layouts):
        assert told[0][1] == set(), "handlers without a case"


# ---- what is refused, and what stays on parts ------------------------------------------------------------------


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


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 2 * grad * ctx.saved_tensors[0]


def _changed_after_saving(x: Any) -> Any:
    y = x * 1.0
    out = Saves.apply(y)
    out = out * 1.0
    y.mul_(2.0)
    return out.sum().backward()


def _copy_changed(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        y = x * 1.0
        take(y).mul_(2.0)
        return y.sum()

    return run


def _changed_behind_a_copy(x: Any) -> Any:
    y = x * 1.0
    row = y[:, 0]
    y.add_(1.0)
    return row


def _whole_change_behind_a_copy(x: Any) -> Any:
    y = x * 1.0
    row = y[:, 0]
    y.index_add_(1, torch.tensor([0]), torch.ones(2, 1, 3))
    return row


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a plain tensor of a Function": (lambda x: Summed.apply(x).backward(), "made a whole tensor of a sequence"),
    "two outputs": (lambda x: Two.apply(x)[0].sum(), "beside other outputs"),
    "the second of two outputs": (lambda x: Two.apply(x)[1].sum(), "beside other outputs"),
    "a Function of another": (lambda x: Saves.apply(Saves.apply(x)).sum(), "of other tensors that have a graph"),
    "a non-leaf beside": (lambda x: Scaled.apply(x, torch.ones(3, requires_grad=True) * 2, torch.ones(5, 3)).sum(), "other tensors"),
    "changed after it was saved": (_changed_after_saving, "modified by an inplace operation"),
    "a reentrant checkpoint": (lambda x: checkpoint(lambda y: y.tanh(), x, use_reentrant=True).sum(), "use_reentrant=False"),
    "vmap": (lambda x: torch.vmap(lambda y: y * 2)(x), "past torch's functions"),
    "func.grad": (lambda x: torch.func.grad(lambda y: y.pow(2).sum())(x), "past torch's functions"),
    "data_ptr": (lambda x: x.data_ptr(), "would read or change a copy"),
    "storage": (lambda x: x.untyped_storage(), "would read or change a copy"),
    "storage of old": (lambda x: x.storage(), "would read or change a copy"),
    "dlpack": (lambda x: torch.from_dlpack(x.detach()), "copy"),
    "out": (lambda x: torch.add(x.detach(), 1.0, out=x.detach()), "would read or change a copy"),
    "resize_": (lambda x: x.detach().resize_(2, 2), "would read or change a copy"),
    "t_": (lambda x: x[0].t_(), "would read or change a copy"),
    "setting data": (lambda x: setattr(x, "data", torch.ones(2, 5, 3)), "would read or change a copy"),
    "autograd.grad": (lambda x: torch.autograd.grad((x * 2).sum(), x, allow_unused=True), "that is not in the graph"),
    "a row that was changed": (_copy_changed(lambda y: y[:, 0]), "but it was a copy"),
    "a row of a view": (_copy_changed(lambda y: y.view(2, 5, 3, 1)[:, 0]), "but it was a copy"),
    "a view of a row": (_copy_changed(lambda y: y[:, -1].view(-1)[:2]), "but it was a copy"),
    "every other position": (_copy_changed(lambda y: y[:, ::2]), "but it was a copy"),
    "a cut-up shape": (_copy_changed(lambda y: y.view(3, -1)), "but it was a copy"),
    "a run of zig-zag positions": (_copy_changed(lambda y: y[:, 1:]), "but it was a copy"),
    "the diagonal": (_copy_changed(lambda y: y.diagonal(0, 1, 2)), "but it was a copy"),
    "a change behind a copy": (_changed_behind_a_copy, "the copy would not change"),
    "a change of the whole behind a copy": (_whole_change_behind_a_copy, "the copy would not change"),
    "a change of an array": (lambda x: x.detach().numpy().__setitem__(0, 1.0), "read-only"),
    "a size that does not fit": (lambda x: x + torch.ones(4, 3), "must match the size"),
    "an index past the end": (lambda x: x[:, 5], "out of bounds"),
}  # fmt: skip

STAYS: dict[str, Callable[[Any], Any]] = {
    "a list on another dim": lambda x: x.view(2, 5, 3)[..., [-2]],
    "masks on another dim": lambda x: x[:, :, torch.tensor([True, False, True])],
    "a run": lambda x: x[:, 1:],
    "flattened": lambda x: x.view(-1, 3).view(2, 5, 3).transpose(0, 1).reshape(10, 3) * torch.ones(10, 1),
    "two heads": lambda x: x.view(2, 5, 3, 1).transpose(1, 2) @ x.view(2, 5, 3, 1).transpose(1, 2).transpose(-1, -2),
    "attention": lambda x: nn.MultiheadAttention(3, 1, batch_first=True)(x, x, x, need_weights=False)[0],
    "attention and weights": lambda x: nn.MultiheadAttention(3, 1, batch_first=True)(x, x, x, key_padding_mask=torch.zeros(2, 5) > 0)[1],
    "an encoder": lambda x: nn.TransformerEncoderLayer(3, 1, 4, batch_first=True)(x),
    "a decoder": lambda x: nn.TransformerDecoderLayer(3, 1, 4, batch_first=True)(x, x),
    "a Function": lambda x: Gelu.apply(x) * 2,
    "in a list": lambda x: torch.cat([x, x], -1),
    "a copy in depth": lambda x: copy.deepcopy(x.detach()),
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
        if name == "the second of two outputs":
            assert leaf.grad is None
    whole = seq_part.on_whole
    for name, call in STAYS.items():
        leaf = torch.randn(2, 5, 3).requires_grad_()
        x = SeqPart.wrap(enter(leaf, 1, chunks), Place(chunks, 1))
        fallen: list[Any] = []
        seq_part.on_whole = lambda func, args, kwargs, fallen=fallen: (fallen.append(func), whole(func, args, kwargs))[
            1
        ]
        try:
            out = call(x)
        finally:
            seq_part.on_whole = whole
        told[name] = (type(out).__name__, [str(func) for func in fallen])
    half = torch.zeros(2, 5, 3, dtype=torch.bfloat16)
    half[0, 0, 0], half[0, 4, 0], half[0, 2, 0] = 256, 1, 1  # 257, what the first rank holds, is no bfloat16; 258 is
    x = SeqPart.wrap(enter(half, 1, chunks), Place(chunks, 1))
    told["bfloat16"] = [float(x.sum() - half.sum()), float(x.mean(1).sub(half.mean(1)).abs().max()), str(x.sum().dtype)]
    many = Chunks(dist.group.WORLD, 20000, contiguous(20000, dist.get_world_size()))
    logits = torch.zeros(20000, 64, dtype=torch.float16)
    x = SeqPart.wrap(enter(logits, 0, many), Place(many, 0))
    told["float16"] = float(F.cross_entropy(x, torch.zeros(20000, dtype=torch.long)) - torch.tensor(64.0).log())
    return told


def test_what_would_be_wrong_is_refused_and_the_rest_stays_on_parts():
    for told in run_distributed(check_refusals, 2):
        wrong = {name: told[name] for name, (_, sentence) in REFUSED.items() if sentence not in told[name]}
        assert wrong == {}, "\n".join(f"{name}: {what}" for name, what in wrong.items())
        assert {name: told[name] for name in STAYS if told[name] != ("SeqPart", [])} == {}
        assert told["bfloat16"] == [0.0, 0.0, "torch.bfloat16"]
        assert abs(told["float16"]) < 4e-3


# ---- draws -----------------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of torch": lambda x: torch.dropout(x, 0.5, True),
    "dropout in place": lambda x: F.dropout(x * 1.0, 0.5, True, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "rrelu": lambda x: F.rrelu(-x, 0.1, 0.9, True),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "bernoulli of the tensor": lambda x: (x * 0.5).bernoulli(),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: x.clone().uniform_(),
    "exponential_": lambda x: x.clone().exponential_(),
}


def check_draws() -> dict[str, Any]:
    size = dist.get_world_size()
    chunks = Chunks(dist.group.WORLD, 33, contiguous(33, size))  # not as many on each
    told = {}
    for name, call in DRAWS.items():
        torch.manual_seed(4)
        x = SeqPart.wrap(enter(torch.ones(2, 33, 3), 1, chunks), Place(chunks, 1))
        drawn = call(x)
        state = torch.get_rng_state()
        again = call(x)
        told[name] = (
            isinstance(drawn, SeqPart),
            whole_of(drawn).tolist(),
            whole_of(again).tolist(),
            state.sum().item(),
            torch.rand(1).item(),
        )
    torch.manual_seed(4)
    before = torch.get_rng_state()
    F.dropout(F.dropout(x, 0.5, False), 0.0, True)
    told["no draw"] = torch.equal(before, torch.get_rng_state())
    given = torch.Generator().manual_seed(3)
    told["of a generator"] = (
        whole_of(torch.bernoulli(x * 0.5, generator=given)).tolist(),
        given.get_state().sum().item(),
    )
    told["in place of a generator"] = (
        whole_of(x.clone().normal_(generator=given)).tolist(),
        given.get_state().sum().item(),
    )
    expected = torch.Generator().manual_seed(3)
    told["expected"] = torch.bernoulli(torch.full((2, 33, 3), 0.5), generator=expected).tolist()
    return told


def test_each_rank_draws_for_itself_and_all_go_on_alike():
    first, *others = run_distributed(check_draws, 3)
    assert all(other == first for other in others), "the same whole, and the same state behind it"
    for name in DRAWS:
        parts, drawn, again = first[name][0], torch.tensor(first[name][1]), torch.tensor(first[name][2])
        assert parts, name
        pieces = drawn.unflatten(1, (3, 11)).unbind(1)
        assert not any(torch.equal(pieces[a], pieces[b]) for a, b in ((0, 1), (0, 2), (1, 2))), (
            f"{name}: ranks drew alike"
        )
        assert not torch.equal(drawn, again), f"{name}: the same draw again"
    assert first["no draw"]
    assert first["of a generator"][0] == first["expected"]


# ---- norms that are recomputed ---------------------------------------------------------------------------------


class SequenceNorm(nn.Module):
    """Looks like a norm over the features, and takes its mean over the sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(1, keepdim=True)) * self.weight


def recomputed_norms() -> dict[str, tuple[float, int]]:
    """For each norm the largest error against the whole one's output and gradients, and the elements that a part of it keeps."""
    torch.set_default_dtype(torch.float64)
    chunks, found = Chunks(dist.group.WORLD, 7, contiguous(7, dist.get_world_size())), {}
    for make in (nn.LayerNorm, nn.RMSNorm, SequenceNorm):
        torch.manual_seed(0)
        whole, x = make(4), torch.randn(2, 7, 4)
        norm, own, other = copy.deepcopy(whole), x.clone().requires_grad_(), x.clone().requires_grad_()
        make_recomputing(norm, lambda _: True)
        wanted = whole(other)
        wanted.pow(3).sum().backward()
        for _ in range(2):
            own.grad = norm.weight.grad = None
            part = SeqPart.wrap(enter(own, 1, chunks), Place(chunks, 1))
            with SavedBytes(exclude=list(norm.parameters())) as kept:
                out = norm(part)
            out.pow(3).sum().backward()
        dist.all_reduce(norm.weight.grad)
        errors = (
            whole_of(out) - wanted,
            own.grad - other.grad,
            norm.weight.grad / chunks.size - whole.weight.grad,
        )
        found[make.__name__] = max(float(error.abs().max()) for error in errors), kept.total // 8
    torch.set_default_dtype(torch.float32)
    return found


@sees(
    "cp: whatever looks like a norm is taken for one of each position",
    "norm_recompute:_is_of_positions",
    "    return state.of_positions\n",
    "    return True\n",
)
@sees(
    "cp: norms of parts keep what autograd keeps",
    "norm_recompute:_forward",
    "isinstance(x, SeqPart) and _is_of_positions(self, x)",
    "False",
)
def test_a_norm_of_parts_keeps_its_input_alone_if_it_looks_at_one_position():
    for rank, found in enumerate(run_distributed(recomputed_norms, 2)):
        assert all(error <= TOLERANCE for error, _ in found.values())
        own = 2 * (4, 3)[rank] * 4
        assert [kept for _, kept in found.values()][:2] == [own, own]
