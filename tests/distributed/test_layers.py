"""The layers alone, against the dense linear they were made of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_seqpar import ParallelGroups, ProcessTopology
from lightning_seqpar.distributed.counters import SavedBytes, Traffic
from lightning_seqpar.layout.param_layout import ParamLayout
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.nn.linear import ColumnParallelLinear, RowParallelLinear
from lightning_seqpar.parallel.apply import whole_tensor
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.testing import run_distributed
from tests.helpers.slices import rest
from tests.mutants import sees


def build(
    tp: int, *, dim: int, sp: bool, regather: bool, own_gather: bool, dtype: torch.dtype, bias: bool = True
) -> Any:
    groups = ParallelGroups(ProcessTopology(["dp", "tp"], [dist.get_world_size() // tp, tp]), dist.get_rank())
    region = SequenceRegion(groups["tp"], dim, sp=sp, regather=regather)
    torch.manual_seed(groups.rank("dp"))
    dense = nn.Sequential(nn.Linear(6, 24, bias=bias), nn.GELU(), nn.Linear(24, 6, bias=bias)).to(dtype)
    column = ColumnParallelLinear.adopt(
        copy.deepcopy(dense[0]), Shard.by_segments(0, [12, 12], [4, 4], tp, "column"), region, "column"
    )
    row = RowParallelLinear.adopt(copy.deepcopy(dense[2]), Shard(1, 24, column.shard.ranges), region, "row")
    column.gathers_input = own_gather
    return groups, region, dense, column, row


def run(region: SequenceRegion, column: Any, row: Any, x: torch.Tensor) -> torch.Tensor:
    with region.call():
        shard = region.path.enter(x)
        if column.gathers_input:
            hidden = column(shard)
        else:
            region.open_gather(shard, "mlp")
            hidden = column(region.path.gather(shard, "mlp"))
            region.close_gather()
        return region.path.leave(row(nn.functional.gelu(hidden)))


def check_layers(
    tp: int, dim: int, length: int, sp: bool, regather: bool, own_gather: bool, dtype: torch.dtype, batch: int
) -> None:
    groups, region, dense, column, row = build(
        tp, dim=dim, sp=sp, regather=regather, own_gather=own_gather, dtype=dtype
    )
    shape = [batch, length, 6] if dim == 1 else [length, batch, 6]
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    weight = torch.randn(shape, dtype=dtype)
    expected, out = dense(x), run(region, column, row, y)
    (expected * weight).sum().backward()
    (out * weight).sum().backward()
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    close = {"rtol": limit, "atol": limit}
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(y.grad, x.grad, **close)
    rank = groups.rank("tp")
    torch.testing.assert_close(column.weight.grad, column.shard.take(dense[0].weight.grad, rank), **close)
    torch.testing.assert_close(column.bias.grad, column.shard.take(dense[0].bias.grad, rank), **close)
    torch.testing.assert_close(row.weight.grad, row.shard.take(dense[2].weight.grad, rank), **close)
    bias = row.bias.grad.clone()
    if sp:  # added to shards: the parts sum to the whole
        dist.all_reduce(bias, group=groups["tp"])
    torch.testing.assert_close(bias, dense[2].bias.grad, **close)
    # The original is untouched, and its parts make it again.
    assert dense[0].weight.shape == (24, 6)
    layout = ParamLayout("w", (24, 6), Shard(0, 24, column.shard.ranges))
    assert torch.equal(whole_tensor(column.weight, layout, groups), dense[0].weight)


@pytest.mark.parametrize(("world", "tp"), [(2, 2), rest(4, 4), (4, 2)])
@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("own_gather", [True, False])
@pytest.mark.parametrize("dim", [rest(0), 1])
def test_column_and_row_against_dense(world, tp, sp, own_gather, dim):
    run_distributed(check_all_lengths, world, tp, dim, sp, own_gather)


def check_all_lengths(tp: int, dim: int, sp: bool, own_gather: bool) -> None:
    for length, batch in ((8, 2), (5, 3), (1, 1)):
        for regather in (True, False):
            check_layers(tp, dim, length, sp, regather, own_gather, torch.float64, batch)
    for dtype in (torch.float32, torch.bfloat16):
        check_layers(tp, dim, 4, sp, True, own_gather, dtype, 2)


def check_frozen(own_gather: bool) -> None:
    _, region, _, column, row = build(2, dim=1, sp=True, regather=True, own_gather=own_gather, dtype=torch.float64)
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
        _, region, dense, column, row = build(
            2, dim=1, sp=True, regather=regather, own_gather=False, dtype=torch.float64
        )
        x = torch.randn(2, 8, 6, dtype=torch.float64)
        with region.call():
            shard = region.path.enter(x)
            region.open_gather(shard, "mlp")
            whole = region.path.gather(shard, "mlp")
            whole *= 0.5
            hidden = column(whole)
            region.close_gather()
            region.path.leave(row(nn.functional.gelu(hidden))).sum().backward()
        dense(x * 0.5).sum().backward()
        expected = column.shard.take(dense[0].weight.grad, region.rank)
        torch.testing.assert_close(column.weight.grad, expected, rtol=1e-12, atol=1e-12)


def check_guards() -> None:
    _, region, _, column, row = build(2, dim=1, sp=True, regather=True, own_gather=False, dtype=torch.float32)
    x = torch.randn(2, 8, 6)
    with (
        pytest.raises(ValueError, match="column: this column-parallel linear runs where nothing was gathered"),
        region.call(),
    ):
        column(region.path.enter(x))
    with pytest.raises(ValueError, match="this argument was not gathered"), region.call():
        shard = region.path.enter(x)
        region.open_gather(shard, "mlp")
        column(shard)
    with (
        pytest.raises(ValueError, match=r"row: the output of this row-parallel linear has shape \[15, 6\]"),
        region.call(),
    ):
        region.path.enter(x)
        row(torch.randn(15, 12))
    with pytest.raises(ValueError, match="dim 1 holds features, not the sequence"), region.call():
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
    "ColumnInputs.find_regathered",
    "read is None or read.handle is None or x._version != read.version:",
    "read is None or read.handle is None:",
)
def test_costs_and_refusals():
    run_distributed(check_costs_and_refusals, 2)
