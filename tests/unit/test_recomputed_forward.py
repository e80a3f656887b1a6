"""A module that runs again in the backward, by itself: what it keeps, and what it must refuse."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_seqpar.distributed.counters import SavedBytes
from lightning_seqpar.region.recompute import RecomputedForward, RecomputeNotes
from tests.mutants import sees


class Inner(nn.Module):
    """Two linears; ``does`` says what else its forward does."""

    def __init__(self, does: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(4, 16), nn.Linear(16, 4), nn.BatchNorm1d(4)
        self.does = does
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor, seen: Any = None, cache: Any = None) -> Tensor:
        if self.does == "grows":
            self.table = torch.ones(len(self.table) + 1)
        if self.does == "appends":
            seen.append(x.detach())
        if self.does == "counts":
            x = self.norm(x)
        if cache is not None:
            cache.update(x)
        return self.down(self.up(x).relu())


def recomputed(does: str = "") -> Inner:
    module = Inner(does)
    module.forward = RecomputedForward(module, "blocks.0", RecomputeNotes("full"), None)
    return module


def test_its_input_is_kept_and_nothing_else():
    plain, again, x = Inner(), recomputed(), torch.randn(6, 4, requires_grad=True)
    kept, grads = [], []
    for module in (plain, again):
        with SavedBytes(exclude=module.parameters()) as saved:
            out = module(x * 1)
        out.square().sum().backward()
        kept.append(saved.total - out.nbytes * 0)
        grads.append([x.grad, *(p.grad for p in module.parameters() if p.grad is not None)])
        x.grad = None
    assert kept[1] == x.nbytes < kept[0]
    assert all(map(torch.equal, *grads))
    assert inspect.signature(again.forward) == inspect.signature(plain.forward)


@sees("recompute: a buffer is changed twice", "RecomputedForward._check_buffers", "if buffer._version != version:", "if False:")
def test_a_buffer_that_the_forward_changes_is_refused():
    with pytest.raises(
        ValueError, match=r"recompute='full': blocks.0.norm.num_batches_tracked: the forward changes this buffer"
    ):
        recomputed("counts")(torch.randn(6, 4))
    recomputed("counts").eval()(torch.randn(6, 4))
    recomputed("grows")(torch.randn(6, 4)).sum().backward()  # a table is made anew, and is no state


@sees(
    "recompute: a list is added to twice",
    "recompute:_sizes",
    "[len(value) for value in values if type(value) in (list, set, dict)]",
    "[]",
)
def test_a_list_that_the_forward_adds_to_is_refused():
    with pytest.raises(ValueError, match=r"recompute='full': blocks.0 adds to a list, set or dict that it is given"):
        recomputed("appends")(torch.randn(6, 4), seen=[])
    recomputed()(torch.randn(6, 4), seen=[1])


class Cache:
    def __init__(self, length: int) -> None:
        self.length, self.updates = length, 0

    def get_seq_length(self) -> int:
        return self.length

    def update(self, x: Tensor) -> None:
        self.updates += 1


@sees(
    "recompute: without gradients too",
    "RecomputedForward.__call__",
    "if not torch.is_grad_enabled() or not saved_tensor_hooks_allowed():",
    "if False:",
)
@sees(
    "recompute: a cache is filled twice",
    "RecomputedForward._without_cache",
    'if length is None or not hasattr(value, "update")',
    'if True or not hasattr(value, "update")',
)
def test_a_cache_is_not_filled_twice():
    cache = Cache(0)
    module = recomputed()
    with pytest.warns(UserWarning, match=r"blocks.0 is given a cache of keys and values while it trains \(use_cache=True\)"):
        module(torch.randn(6, 4), cache=cache).sum().backward()
    assert cache.updates == 0
    with pytest.raises(
        ValueError, match=r"is given a cache with keys and values of 3 tokens, and a recompute would add to it twice"
    ):
        module(torch.randn(6, 4), cache=Cache(3))
    with torch.no_grad():
        module(torch.randn(6, 4), cache=cache)
    assert cache.updates == 1
