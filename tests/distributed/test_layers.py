"""What the layers alone keep, send and refuse."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_seqpar import ParallelGroups, ProcessTopology
from lightning_seqpar.distributed.counters import SavedBytes, Traffic
from lightning_seqpar.layout.param_layout import Shard
from lightning_seqpar.nn.linear import ColumnParallelLinear, RowParallelLinear
from lightning_seqpar.region.products import ColumnGroup
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.testing import run_distributed
from tests.mutants import sees


@contextmanager
def call(region: SequenceRegion) -> Iterator[None]:
    region.frames.open("block")
    try:
        yield
    finally:
        region.end_call("block")


def build(*, regather: bool = True, own_gather: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    groups = ParallelGroups(ProcessTopology(["dp", "tp"], [1, 2]), dist.get_rank())
    region = SequenceRegion(groups["tp"], 1, sp=True, regather=regather)
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6)).to(dtype)
    shard = Shard.by_segments(0, [12, 12], [4, 4], 2, "column")
    column = ColumnParallelLinear.adopt(copy.deepcopy(dense[0]), shard, region, "column")
    row = RowParallelLinear.adopt(copy.deepcopy(dense[2]), Shard(1, 24, shard.ranges), region, "row")
    column.gathers_input = own_gather
    return region, dense, column, row


def run(region: SequenceRegion, column: Any, row: Any, x: torch.Tensor) -> torch.Tensor:
    with call(region):
        shard = region.path.enter(x)
        if column.gathers_input:
            hidden = column(shard)
        else:
            region.open_gather(shard, "mlp")
            hidden = column(region.path.gather(shard, "mlp", ColumnGroup([column])))
            region.close_gather()
        return region.path.leave(row(nn.functional.gelu(hidden)))


def check_frozen(own_gather: bool) -> None:
    region, _, column, row = build(own_gather=own_gather)
    x = torch.randn(2, 8, 6, dtype=torch.float64, requires_grad=True)
    with Traffic() as trained:
        run(region, column, row, x).sum().backward()
    column.requires_grad_(False)
    with SavedBytes(exclude=[*column.parameters(), *row.parameters()]) as saved, Traffic() as frozen:
        run(region, column, row, x).sum().backward()
    # A frozen weight needs no input: no re-gather in the backward, and the shard is not kept.
    assert trained.calls["all_gather"] - frozen.calls["all_gather"] == 1
    assert column.weight.grad is not None  # of the first backward, untouched by the second
    assert saved.total > 0
    x2 = x.detach()
    with SavedBytes() as nothing, torch.no_grad(), Traffic() as quiet:
        run(region, column, row, x2)
    assert nothing.total == 0
    assert quiet.calls == {"all_gather": 2, "reduce_scatter": 1}


def check_changed_input() -> None:
    """A gathered input that is changed in place is no longer what its shard would be gathered to."""
    for regather in (True, False):
        region, dense, column, row = build(regather=regather)
        x = torch.randn(2, 8, 6, dtype=torch.float64)
        with call(region):
            shard = region.path.enter(x)
            region.open_gather(shard, "mlp")
            whole = region.path.gather(shard, "mlp", ColumnGroup([column]))
            whole *= 0.5
            hidden = column(whole)
            region.close_gather()
            region.path.leave(row(nn.functional.gelu(hidden))).sum().backward()
        dense(x * 0.5).sum().backward()
        expected = column.shard.take(dense[0].weight.grad, region.rank)
        torch.testing.assert_close(column.weight.grad, expected, rtol=1e-12, atol=1e-12)


def check_guards() -> None:
    region, _, column, row = build(dtype=torch.float32)
    x = torch.randn(2, 8, 6)
    with pytest.raises(ValueError, match="column: this column-parallel linear runs where nothing was gathered"), call(region):
        column(region.path.enter(x))
    with pytest.raises(ValueError, match="this argument was not gathered"), call(region):
        shard = region.path.enter(x)
        region.open_gather(shard, "mlp")
        column(shard)
    with pytest.raises(ValueError, match=r"row: the output of this row-parallel linear has shape \[15, 6\]"), call(region):
        region.path.enter(x)
        row(torch.randn(15, 12))
    with pytest.raises(ValueError, match="dim 1 holds features, not the sequence"), call(region):
        region.path.enter(torch.randn(8, 6))
    with pytest.raises(ValueError, match="called outside the sequence region"):
        region.path.leave(x, "norm")


def check_costs_and_refusals() -> None:
    for own_gather in (True, False):
        check_frozen(own_gather)
    check_changed_input()
    check_guards()


@sees(
    "a gathered input that was changed taken for the gathered one",
    "take_made",
    "is_other = x._version != version or",
    "is_other =",
)
def test_costs_and_refusals():
    run_distributed(check_costs_and_refusals, 2)
