"""Norms that run again in the backward: the same to the last bit, and what they keep."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seqpar.context.chunks import Chunks, contiguous
from lightning_seqpar.context.seq_part import Place, SeqPart, local_of
from lightning_seqpar.distributed.counters import SavedBytes
from lightning_seqpar.region.activations import RecomputedNorm, is_norm
from lightning_seqpar.region.products import kept_of
from tests.helpers.zoo import RMSNorm
from tests.mutants import sees


def again(norm: nn.Module) -> Any:
    """A copy that runs again."""
    copied = copy.deepcopy(norm)
    copied.__dict__["forward"] = RecomputedNorm(copied)
    return copied


def whole(x: Tensor) -> Tensor:
    return x


def as_part(x: Tensor) -> SeqPart:
    """A rank's 8 positions of 16, ``[2, 8, h]``; nobody answers the other ranks."""
    return SeqPart.wrap(x, Place(Chunks(dist.ProcessGroup(0, 2), 16, contiguous(16, 2)), 1))


def run(module: nn.Module, x: Tensor, place: Any = whole) -> tuple[list[Tensor], int]:
    """The output and the gradients of a norm, and the bytes that it keeps."""
    leaf = x.clone().requires_grad_()
    with SavedBytes(exclude=module.parameters()) as saved:
        given = place(leaf * 1)
        out = module(given)
    assert type(out) is type(given)
    out = local_of(out)
    out.square().sum().backward()
    return [out.detach(), leaf.grad, *(p.grad for p in module.parameters())], saved.total


@sees(
    "a norm keeps what its own forward keeps",
    "RecomputedNorm.__call__",
    "with torch.autograd.graph.saved_tensors_hooks(again.keep, again.take):",
    "if True:",
    case="RMSNorm0-dtype1-whole",
)
@sees(
    "a norm of a part of a sequence keeps what its own forward keeps",
    "RecomputedNorm.__call__",
    "if isinstance(x, SeqPart):",
    "if True:",
    case="RMSNorm0-dtype1-as_part",
)
@pytest.mark.parametrize("place", [whole, as_part])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [RMSNorm, nn.LayerNorm, nn.RMSNorm])
def test_a_norm_that_runs_again_is_the_norm(kind, dtype, place):
    torch.manual_seed(0)
    plain = kind(16).to(dtype)
    x = torch.randn(2, 8, 16, dtype=dtype)
    (wanted, kept), (found, less) = run(plain, x), run(again(plain), x, place)
    assert all(map(torch.equal, wanted, found))
    out = local_of(again(plain)(place(x.requires_grad_())))
    tensor, call = kept_of(out)
    assert torch.equal(call.run(tensor), out)
    if kind is RMSNorm:
        assert less < kept


class Flat(RMSNorm):
    """Returns tokens, in which the sequence lies otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(0, 1)


def test_a_norm_that_moves_the_sequence_runs_once():
    out = again(Flat(16))(as_part(torch.randn(2, 8, 16, requires_grad=True) * 1))
    assert (type(out), out.shape) == (SeqPart, (32, 16))
    assert kept_of(out.local)[1] is None


class Drawing(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class Counting(RMSNorm):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


class Reading(RMSNorm):
    """Multiplies by a parameter that is not registered in it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.shared = [torch.ones(width, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.shared[0]


@sees(
    "a norm that draws or counts runs again",
    "_is_repeatable",
    "if drew or noted or not torch.equal(*[one.detach().nan_to_num() for one in (first, second)]):",
    "if False:",
)
@sees(
    "a norm that reads a tensor of others' runs again without it",
    "_is_repeatable",
    "return all(leaf is None or id(leaf) in own for leaf in leaves)",
    "return True",
    case="Reading",
)
@pytest.mark.parametrize("kind", [Drawing, Counting, Reading])
def test_a_norm_that_draws_or_counts_runs_once(kind):
    plain, x = kind(16), torch.randn(2, 8, 16)
    other, found = again(plain), []
    for norm in (plain, other):
        torch.manual_seed(1)
        for _ in range(2):
            results, _ = run(norm, x)
        shared = [one.grad for one in vars(norm).get("shared", ())]
        found.append([*results, *shared, torch.rand(1)])
    assert all(map(torch.equal, *found))
    assert kept_of(other(x.requires_grad_()))[1] is None


class ProductNorm(RMSNorm):
    """Takes its mean by a product, which autocast makes in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt((x * x) @ torch.full((16, 1), 1 / 16) + 1e-6)


@sees(
    "a norm run again outside its autocast",
    "NormCall.run",
    "with as_autocast(x.device.type, self._casts):",
    "with as_autocast(x.device.type, None):",
)
def test_under_autocast_it_runs_again_under_autocast():
    torch.manual_seed(0)
    plain, x = ProductNorm(16), torch.randn(2, 8, 16, requires_grad=True)
    grads = []
    for module in (plain, again(plain)):
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
            loss = F.linear(out, torch.ones(16, 16)).square().sum()
        grads.append(torch.autograd.grad(loss, (x, module.weight)))
    assert all(map(torch.equal, *grads))
    tensor, norm = kept_of(out)
    assert torch.equal(norm.run(tensor), out)


@sees("a norm's changed output made again unchanged", "kept_of", "version != x._version or ", "")
@sees("a norm's input changed before its output is used", "kept_of", " or call.x._version != call.version", "")
def test_what_was_changed_since_is_kept_itself():
    norm, x = again(RMSNorm(16)), torch.randn(2, 8, 16)
    out = norm(x)
    assert kept_of(out)[0].data_ptr() == x.data_ptr()
    with torch.no_grad():
        out.mul_(2)
    assert kept_of(out)[0] is out
    out = norm(x)
    x.add_(1)
    assert kept_of(out)[0] is out


@sees(
    "a norm runs again under somebody's hooks",
    "_may_run_again",
    "and (saved_tensor_hooks() is None or saved_counter() is not None)",
    "",
)
def test_under_somebodys_hooks_on_saved_tensors_it_runs_as_it_is():
    norm, x = again(RMSNorm(16)), torch.randn(2, 8, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        out = norm(x)
    assert kept_of(out)[1] is None
    with torch.no_grad():
        assert kept_of(norm(x))[1] is None
    assert kept_of(norm(x))[1] is not None


class Scaled(RMSNorm):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


@sees("a norm runs again with attributes that were set since", "NormCall.run", "if held != self._attributes:", "if False:")
def test_it_runs_again_with_the_attributes_that_it_had():
    plain, x, grads = Scaled(16), torch.randn(2, 8, 16), []
    for module in (plain, again(plain)):
        module.gain, leaf = 2.0, x.clone().requires_grad_()
        out = module(leaf)
        module.gain = 3.0
        grads.append(torch.autograd.grad(out.square().sum(), (leaf, module.weight)))
        assert module.gain == 3.0
    assert all(map(torch.equal, *grads))
    tensor, norm = kept_of(out)
    assert torch.equal(norm.run(tensor), out)


def test_a_hook_of_its_parameter_fires_once_and_other_parameters_count():
    norm, seen, x = again(RMSNorm(16)), [], torch.randn(2, 8, 16)
    norm.weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    norm(x).sum().backward()
    assert len(seen) == 1
    assert torch.equal(norm.weight.grad, seen[0] * 2)


def test_what_is_no_norm():
    odd, gained = nn.LayerNorm(4), RMSNorm(4)
    odd.forward = lambda x: x  # type: ignore[method-assign]
    gained.gain = torch.ones(4)
    others = (nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.Linear(2, 2), nn.LayerNorm(4, elementwise_affine=False))
    assert not any(map(is_norm, (*others, odd, gained)))
    assert all(map(is_norm, (nn.LayerNorm(4), nn.RMSNorm(4), RMSNorm(4))))
