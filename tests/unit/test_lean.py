"""What the lean forms keep, and that their gradients are those of the plain forms to the last bit."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_seqpar.activations.elementwise_recompute import ElementwiseRecompute
from lightning_seqpar.activations.norm_recompute import is_norm, make_recomputing, norm_of
from lightning_seqpar.distributed.autograd import saved_tensor_hooks
from lightning_seqpar.distributed.counters import SavedBytes
from tests.helpers.zoo import RMSNorm
from tests.mutants import sees


def lean(norm: nn.Module) -> Any:
    """A copy that keeps its input alone."""
    copied = copy.deepcopy(norm)
    make_recomputing(copied, lambda _: True)
    return copied


def run(module: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """The output and the gradients of a norm, and the bytes that it keeps."""
    leaf = x.clone().requires_grad_()
    with SavedBytes(exclude=module.parameters()) as saved:
        out = module(leaf * 1)
    out.square().sum().backward()
    return [out.detach(), leaf.grad, *(p.grad for p in module.parameters())], saved.total


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [RMSNorm, nn.LayerNorm, nn.RMSNorm])
def test_a_lean_norm_is_the_norm_and_keeps_its_input(kind, dtype):
    torch.manual_seed(0)
    plain = kind(16).to(dtype)
    other = lean(plain)
    assert isinstance(other, kind)
    assert type(other).__name__ == kind.__name__
    assert is_norm(other)
    x = torch.randn(2, 8, 16, dtype=dtype)
    (wanted, kept), (found, less) = run(plain, x), run(other, x)
    assert all(map(torch.equal, wanted, found))
    assert less == x.nbytes <= kept


class ProductNorm(RMSNorm):
    """Takes its mean by a product, which autocast makes in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt((x * x) @ torch.full((16, 1), 1 / 16) + 1e-6)


@sees(
    "a norm run again outside its autocast",
    "NormCall._run",
    "        with self._autocast.again():\n            leaf, leaves, out =",
    "        if True:\n            leaf, leaves, out =",
)
def test_a_lean_norm_under_autocast_runs_again_under_autocast():
    torch.manual_seed(0)
    plain, x = ProductNorm(16), torch.randn(2, 8, 16, requires_grad=True)
    grads = []
    for module in (plain, lean(plain)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.linear(module(x), torch.ones(16, 16)).square().sum()
        grads.append(torch.autograd.grad(loss, (x, module.weight)))
    assert all(map(torch.equal, *grads))


class Noisy(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn_like(x)


class Counting(RMSNorm):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Warming(RMSNorm):
    """Counts its calls, which changes nothing until the sixth."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 if self.calls < 6 else 2)


@sees(
    "a norm that counts run again",
    "norm_recompute:_try",
    "if not same or noted or drawn or first.data_ptr() == x.data_ptr():",
    "if not same or drawn or first.data_ptr() == x.data_ptr():",
    case="Warming",
)
@sees(
    "a norm that draws run again",
    "norm_recompute:_try",
    "if not same or noted or drawn or first.data_ptr() == x.data_ptr():",
    "if noted:",
    case="Noisy",
)
@pytest.mark.parametrize("kind", [Noisy, Counting, Warming])
def test_a_norm_that_is_no_function_of_its_input_stays_as_it_is(kind):
    torch.manual_seed(0)
    plain, x, found = kind(16), torch.randn(2, 8, 16, requires_grad=True), []
    other = lean(plain)
    for module in (plain, other):
        torch.manual_seed(1)
        found.append((module(x), torch.get_rng_state(), module(x)))  # the first input finds it out
    assert norm_of(other(x)) is None
    assert all(map(torch.equal, *found))  # and the trial left no trace


def test_a_hook_of_a_norms_parameter_fires_once():
    norm, seen = lean(RMSNorm(16)), []
    norm.weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    norm(torch.randn(2, 8, 16)).sum().backward()
    assert len(seen) == 1
    assert torch.equal(norm.weight.grad, seen[0] * 2)


@sees(
    "a norm's changed output made again unchanged",
    "norm_recompute:norm_of",
    "return call if call is not None and x._version == call.version else None",
    "return call",
)
def test_an_output_that_was_changed_is_not_made_again():
    out = lean(RMSNorm(16))(torch.randn(2, 8, 16))
    assert norm_of(out) is not None
    with torch.no_grad():
        out.mul_(2)
    assert norm_of(out) is None


@sees(
    "a norm's input changed before its output is used",
    "NormCall.source",
    "x._version == self._read and keeper()",
    "keeper()",
)
def test_a_changed_input_is_not_what_the_norm_read():
    x = torch.randn(2, 8, 16)
    out = lean(RMSNorm(16))(x)
    assert norm_of(out).source is x
    x.add_(1)
    assert norm_of(out).source is None
    with pytest.raises(
        RuntimeError, match=r"a RMSNorm of \[\[16\]\]: its input .* was changed in place .* regather=False"
    ):
        out.sum().backward()


class Gained(RMSNorm):
    """Reads a tensor that is no parameter of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.held = [torch.ones(dim)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.held[0]


@sees(
    "another tensor's gradient lost in a norm",
    "norm_recompute:_try",
    "    return not _reads_others(out, [leaf, *leaves])\n",
    "    return bool(leaves) and leaf is not out\n",
)
def test_a_norm_that_reads_another_tensor_with_a_gradient():
    x, gain = torch.randn(2, 8, 16), torch.ones(16, requires_grad=True)
    norm, late, set_from_outside = lean(Gained(16)), lean(Gained(16)), lean(RMSNorm(16))
    norm.held[0] = gain
    norm(x).sum().backward()  # stays as it is
    assert gain.grad is not None
    late(x)
    late.held[0] = gain  # behind the first input
    with pytest.raises(RuntimeError, match="reads a tensor with a gradient that is none of its parameters"):
        late(x).sum().backward()
    set_from_outside(x)
    set_from_outside.gain = gain
    assert norm_of(set_from_outside(x)) is None


def test_the_parameters_of_the_call_count():
    norm, again, x = lean(RMSNorm(16)), RMSNorm(16), torch.randn(2, 8, 16)
    other = again.weight.detach().clone().requires_grad_()
    torch.func.functional_call(norm, {"weight": other}, (x,)).square().sum().backward()
    again(x).square().sum().backward()
    assert torch.equal(other.grad, again.weight.grad)
    assert norm.weight.grad is None


def test_a_norm_in_somebodys_mode_by_keyword_and_copied():
    plain, x = nn.LayerNorm(16), torch.randn(2, 8, 16)
    norm = lean(plain)
    assert torch.equal(norm(input=x), plain(input=x))
    with Halving():
        assert norm_of(norm(x)) is None
    assert norm_of(copy.deepcopy(norm)(x)) is not None


def test_what_is_no_norm():
    odd = nn.LayerNorm(4)
    odd.forward = lambda x: x  # type: ignore[method-assign]
    others = (nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.Linear(2, 2), nn.LayerNorm(4, elementwise_affine=False), odd)
    assert not any(map(is_norm, others))


# ---- the stretch between columns and their row -------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gelu_by_hand(gate: Tensor, up: Tensor) -> Tensor:
    return 0.5 * gate * (1.0 + torch.tanh(0.79788456 * (gate + 0.044715 * torch.pow(gate, 3.0))))


def fused(gate: Tensor, up: Tensor) -> Tensor:
    one, other = gate.chunk(2, dim=-1)
    return F.gelu(one, approximate="tanh") * other


def scaled(gate: Tensor, up: Tensor) -> Tensor:
    return (
        ((0.5 * gate).sigmoid() * gate)
        .to(torch.float32)
        .type_as(gate)
        .view(-1, gate.shape[-1])
        .unflatten(0, gate.shape[:2])
    )


def through(body: Any, *columns: Tensor, row: Tensor, lean: bool = True) -> tuple[Tensor, Tensor, bool | None]:
    """What a body makes of columns' outputs, what a row makes of that, and whether anything is made again."""
    stretch = ElementwiseRecompute.open() if lean else None
    for column in columns if stretch is not None else ():
        stretch.add_source(column)
    inner = body(*columns)
    if stretch is not None:
        stretch.pause()
    out = F.linear(inner, row)
    gained = stretch.close(done=True) if stretch is not None else None
    return inner, out, gained


def compared(body: Any, dtype: torch.dtype = torch.float64, extra: Any = lambda inner: 0) -> tuple[int, int, bool]:
    """Two columns, a body and a row, plain and lean, with equal gradients: bytes kept, and whether the lean form gains."""
    found = []
    for lean in (False, True):
        torch.manual_seed(1)
        x = torch.randn(2, 4, 8, dtype=dtype, requires_grad=True)
        weights = [nn.Parameter(torch.randn(16, 8, dtype=dtype)) for _ in range(2)]
        row = nn.Parameter(torch.randn(8, 8 if body is fused else 16, dtype=dtype))
        with SavedBytes(exclude=[x, row, *weights]) as saved:
            inner, out, gained = through(body, *(F.linear(x, weight) for weight in weights), row=row, lean=lean)
        (out.square().sum() + extra(inner)).backward()
        assert saved_tensor_hooks() is None
        found.append(([p.grad for p in (x, row, *weights) if p.grad is not None], saved.total, gained))
    (plain, kept, _), (grads, less, gained) = found
    assert all(map(torch.equal, plain, grads))
    return kept, less, gained


@sees(
    "what a stretch keeps is not counted",
    "ElementwiseRecompute.close",
    "                    self._count(tensor)\n",
    "                    pass\n",
    case="swiglu-dtype0",
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("body", [swiglu, gelu_by_hand, fused, scaled], ids=lambda f: f.__name__)
def test_a_stretch_keeps_what_the_columns_made(body, dtype):
    kept, less, gained = compared(body, dtype)
    assert gained
    width = 2 * 4 * 16 * dtype.itemsize
    assert width <= less <= (2 if body is swiglu else 1) * width < kept


def test_what_else_reads_the_stretch_gets_its_gradient():
    """An auxiliary loss on the activations: the graph is the user's."""
    *_, gained = compared(swiglu, extra=lambda inner: inner.abs().sum())
    assert gained


def changed_inside(gate: Tensor, up: Tensor) -> Tensor:
    inner = F.silu(gate)
    return inner.mul_(2.0) * up


def hidden_change(gate: Tensor, up: Tensor) -> Tensor:
    inner = F.silu(gate.clone()) * up
    with torch.no_grad():
        inner.t().mul_(2.0) if inner.ndim == 2 else inner.movedim(0, 1).mul_(2.0)
    return inner


def drawn(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * torch.rand_like(up) * up


def masked(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate)[:, torch.tensor([0, 1, 3, 2])] * up


class Halving(TorchFunctionMode):
    """Somebody's mode that changes results."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if getattr(func, "__name__", "") in ("tanh", "rsqrt") else out


def as_complex(gate: Tensor, up: Tensor) -> Tensor:
    pairs = torch.view_as_complex(torch.tanh(gate).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * pairs.abs()).flatten(-2) * up


def changed_arguments(gate: Tensor, up: Tensor) -> Tensor:
    sizes, index = [4, 12], np.array([0, 1, 3, 2])
    one, other = F.silu(gate).split(sizes, -1)
    out = torch.cat([other, one], -1)[:, index] * F.silu(up)[:, index] * F.tanh(gate).split(sizes, -1)[0].sum(-1, True)
    sizes[:] = [1, 15]
    index[:] = 0
    return out


@sees(
    "a stretch that was changed in place made again",
    "ElementwiseRecompute.close",
    "gained = self.remove() and done and not self._spoiled and self._is_intact() and self._settle()",
    "gained = self.remove() and done and self._settle()",
    case="changed_inside-",
)
@sees(
    "what is drawn in a stretch drawn again",
    "REPLAYED",
    "REPLAYED = frozenset((*_ARITHMETIC, *_ACTIVATIONS, *_SHAPES))",
    'REPLAYED = frozenset((*_ARITHMETIC, *_ACTIVATIONS, *_SHAPES, "rand_like"))',
    case="drawn-",
)
@sees(
    "a stretch read as another type made again as its own",
    "ElementwiseRecompute._settle",
    "if not self._can_view(tensor)}",
    "if storage_id(tensor) not in self._homes}",
    case="as_complex-",
)
@sees(
    "arguments that change later replayed",
    "ElementwiseRecompute._note",
    "if not all(isinstance(value, Tensor) or is_constant(value) for value in (*args, *kwargs.values())):",
    "if False:",
    case="changed_arguments-",
)
@pytest.mark.parametrize(
    ("body", "gains"),
    [
        (changed_inside, False),
        (hidden_change, False),
        (drawn, True),
        (masked, None),
        (as_complex, None),
        (changed_arguments, None),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_no_function_of_the_columns_is_kept(body, gains):
    kept, less, gained = compared(body)
    assert gains is None or gained is gains
    assert less <= kept


def column_and_row() -> tuple[Tensor, nn.Parameter]:
    """What a column made, and the weight of a row."""
    return F.linear(torch.randn(2, 4, 8), nn.Parameter(torch.randn(16, 8))), nn.Parameter(torch.randn(8, 16))


def test_what_a_stretch_keeps_may_not_change_either():
    """Hooks of saved tensors take that check from autograd."""
    column, row = column_and_row()
    shares, out, _ = through(lambda column: F.silu(column).softmax(-1), column, row=row)
    with torch.no_grad():
        shares.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"between column and row linears was modified by an inplace operation"):
        out.sum().backward()


@sees(
    "a column changed behind its row not seen",
    "ElementwiseRecompute._replay",
    "if tensor._version != self._versions[at]:",
    "if False:",
)
def test_a_column_changed_behind_its_row_is_told():
    column, row = column_and_row()
    _, out, gained = through(lambda column: F.silu(column) * column.sigmoid(), column, row=row)
    assert gained
    with torch.no_grad():
        column.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"changed in place after its row-parallel linear had read it"):
        out.sum().backward()


@sees(
    "a stretch under activation checkpointing",
    "ElementwiseRecompute.open",
    "or (outer is not None and count is None) ",
    "",
)
@sees(
    "a stretch under a mode that changes results",
    "ElementwiseRecompute.open",
    "if function_mode() is not None or ",
    "if ",
)
def test_a_stretch_leaves_what_others_keep_alone():
    def opened(x: Tensor) -> Tensor:
        opens.append(ElementwiseRecompute.open())
        return x * x

    opens: list[Any] = []
    checkpoint(opened, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    torch.func.grad(lambda x: opened(x).sum())(torch.ones(2))
    with torch.autograd.graph.save_on_cpu():
        opened(torch.ones(2))
    with Halving():
        opened(torch.ones(2))
    assert opens == [None] * 5, (
        "in a checkpoint's forward, in its recomputation, where no hooks may be, under hooks and modes"
    )
    assert saved_tensor_hooks() is None
