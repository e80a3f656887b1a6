"""Each conjugate pair: values, gradients by finite differences in float64, and gradients of gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from lightning_seqpar import ParallelGroups, ProcessTopology
from lightning_seqpar import collectives as C
from lightning_seqpar.distributed.async_ops import PendingAllReduce, PendingGather, PendingReduceScatter
from lightning_seqpar.distributed.counters import Traffic
from lightning_seqpar.testing import run_distributed
from tests.mutants import sees


def tp_group(tp: int) -> ParallelGroups:
    world = dist.get_world_size()
    return ParallelGroups(ProcessTopology(["dp", "tp"], [world // tp, tp]), dist.get_rank())


def _whole(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check_all_pairs(tp: int) -> None:
    groups = tp_group(tp)
    for dim, length in itertools.product((0, 1), (8, 5, 1)):
        check_pairs(groups, dim, length)


def check_pairs(groups: ParallelGroups, dim: int, length: int) -> None:
    """The global function of each pair, written on one process, has the same value and gradient."""
    tp = groups.size("tp")
    group, rank, dp = groups["tp"], groups.rank("tp"), groups.rank("dp")
    shape = [3, 5, 2]
    shape[dim] = length
    chunk = C.shard_length(length, tp)
    # One reference per replica: a collective on the wrong group would mix them.
    parts = [_whole(shape, 10 * dp + r).requires_grad_() for r in range(tp)]
    weight = _whole(shape, 100 + dp)

    def cut(x, r):  # zero-padded shard r
        pad = list(x.shape)
        pad[dim] = chunk * tp - length
        return torch.cat([x, x.new_zeros(pad)], dim).narrow(dim, r * chunk, chunk)

    # f̄ (all-reduce): every rank's loss is the same replicated loss; the part's gradient is the loss's.
    mine = parts[rank].detach().requires_grad_()
    out = C.reduce_from_tensor_parallel_region(mine, group)
    torch.testing.assert_close(out, sum(parts), rtol=1e-12, atol=1e-12)
    (out * weight).sum().backward()
    torch.testing.assert_close(mine.grad, weight)
    # f (copy): rank r uses weight_r, the loss is the sum over ranks.
    mine = parts[0].detach().requires_grad_()
    (C.copy_to_tensor_parallel_region(mine, group) * parts[rank].detach()).sum().backward()
    torch.testing.assert_close(mine.grad, sum(parts).detach())
    # scatter: rank r uses its shard.
    mine = parts[0].detach().requires_grad_()
    shard = C.scatter_to_sequence_parallel_region(mine, dim, group)
    real = max(0, min(chunk, length - rank * chunk))
    torch.testing.assert_close(shard.narrow(dim, 0, real), cut(mine, rank).narrow(dim, 0, real))
    assert shard.shape[dim] == chunk
    if real < chunk:  # padding repeats the last position: it must survive a norm
        last = mine.narrow(dim, length - 1, 1)
        torch.testing.assert_close(shard.narrow(dim, chunk - 1, 1), last)
    (shard * cut(weight, rank)).sum().backward()
    torch.testing.assert_close(mine.grad, weight)
    # gather for a replicated consumer: the gradient is sliced.
    local = cut(parts[0], rank).detach().requires_grad_()
    whole = C.gather_replicated_from_sequence_parallel_region(local, dim, group, length)
    torch.testing.assert_close(whole, parts[0].detach())
    (whole * weight).sum().backward()
    torch.testing.assert_close(local.grad, cut(weight, rank))
    # g: gather for a tensor-parallel consumer: the gradients of all ranks are summed.
    local = cut(parts[0], rank).detach().requires_grad_()
    whole = C.gather_from_sequence_parallel_region(local, dim, group, length)
    torch.testing.assert_close(whole, parts[0].detach())
    (whole * parts[rank].detach()).sum().backward()
    torch.testing.assert_close(local.grad, cut(sum(parts), rank).detach())
    # ḡ: reduce-scatter; the gradient is gathered.
    mine = parts[rank].detach().requires_grad_()
    shard = C.reduce_scatter_to_sequence_parallel_region(mine, dim, group)
    torch.testing.assert_close(shard, cut(sum(parts), rank).detach(), rtol=1e-12, atol=1e-12)
    (shard * cut(weight, rank)).sum().backward()
    torch.testing.assert_close(mine.grad, weight)
    own, same = parts[rank].detach(), parts[0].detach()

    def sharded(y):
        shard = C.reduce_scatter_to_sequence_parallel_region(y.tanh(), dim, group)
        return C.gather_from_sequence_parallel_region(shard.tanh(), dim, group, length)

    def dealt_out(y):
        shard = C.scatter_to_sequence_parallel_region(y.tanh(), dim, group)
        return C.gather_replicated_from_sequence_parallel_region(shard.tanh(), dim, group, length)

    def copied(y):
        return C.reduce_from_tensor_parallel_region((C.copy_to_tensor_parallel_region(y, group) * own).tanh(), group)

    check_double_backward(sharded, own, group)  # the penalty of every rank depends on every rank's part
    for function in (dealt_out, copied):
        check_double_backward(function, same, None)
    for function, x in ((sharded, own), (dealt_out, same), (copied, same)):
        with torch.no_grad():
            plain = function(x)
        assert plain.grad_fn is None
        assert torch.equal(plain, function(x.clone().requires_grad_()))


def check_double_backward(function, x: torch.Tensor, group) -> None:
    """The gradient of a gradient, against finite differences along a direction (all ranks step together).

    With ``group`` the penalty is the sum over its ranks'; without, all of them have the same one.
    """

    def penalty(y):
        return torch.autograd.grad(function(y).tanh().sum(), y, create_graph=True)[0].pow(2).sum()

    direction = _whole(x.shape, 55)
    mine = x.clone().requires_grad_()
    told = torch.tensor([float((torch.autograd.grad(penalty(mine), mine)[0] * direction).sum())], dtype=torch.float64)
    step = 1e-6
    up, down = penalty((x + step * direction).requires_grad_()), penalty((x - step * direction).requires_grad_())
    slope = ((up - down) / (2 * step)).detach().reshape(1)
    if group is not None:
        for value in (told, slope):
            dist.all_reduce(value, group=group)
    torch.testing.assert_close(told, slope, rtol=1e-6, atol=1e-6)


@sees(
    "wrong conjugate for the gather",
    "collectives:gather_from_sequence_parallel_region",
    "partial(reduce_scatter_to_sequence_parallel_region,",
    "partial(_cut_by, split,",
    case="2-2",
)
@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 4), (4, 2)])
def test_pairs_are_conjugate(world, tp):
    run_distributed(check_all_pairs, world, tp)


def check_dtypes() -> None:
    group = tp_group(2)["tp"]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = _whole([2, 4, 3], dist.get_rank(), dtype)
        both = [_whole([2, 4, 3], r, dtype) for r in range(2)]
        before = x.clone()
        whole = C.all_gather(C.split(x, 1, group), 1, group)
        assert whole.dtype == dtype
        assert whole.shape == x.shape
        torch.testing.assert_close(C.all_reduce(x, group), both[0] + both[1])
        torch.testing.assert_close(x, before, rtol=0, atol=0)  # never in place
    integers = torch.arange(4) + dist.get_rank()
    assert C.all_reduce(integers, group).tolist() == [1, 3, 5, 7]


def test_any_dtype_and_never_in_place():
    run_distributed(check_dtypes, 2)


def counted(*calls) -> tuple[dict[str, int], ...]:
    """What calls gave to the backend, and the collectives that they count as: numbers and bytes of both."""
    with Traffic() as traffic:
        for function, *args in calls:
            function(*args)
    return dict(traffic.backend_calls), dict(traffic.backend_bytes), dict(traffic.calls), dict(traffic.bytes)


def complete(pending, *args) -> None:
    pending(*args).wait()


def exchanged(calls: int, sent: int, name: str, given: int) -> tuple[dict[str, int], ...]:
    """The counts of one collective that is made of exchanges."""
    return {"alltoall_base": calls}, {"alltoall_base": sent}, {name: 1}, {name: given}


def check_traffic(tp: int) -> None:
    group = tp_group(tp)["tp"]
    for async_op in (False, True):
        check_calls(tp, group, async_op)


def check_calls(tp: int, group: dist.ProcessGroup, async_op: bool) -> None:
    """Every collective is given to gloo as exchanges of the size that it needs, and counts as itself."""
    for length in (8, 5):  # the second is padded
        x = _whole([3, length, 2], dist.get_rank(), torch.float32)
        padded = 3 * C.shard_length(length, tp) * tp * 2 * 4
        got = counted((complete, PendingGather, x, 1, group, tp * length - 1, async_op))
        assert got == exchanged(1, (tp - 1) * x.nbytes, "all_gather", x.nbytes)
        got = counted((complete, PendingReduceScatter, x, 1, group, async_op))
        assert got == exchanged(1, padded // tp * (tp - 1), "reduce_scatter", padded)
        got = counted((complete, PendingAllReduce, x, group, async_op))
        assert got == exchanged(1, (tp - 1) * x.nbytes, "all_reduce", x.nbytes)
    large = torch.ones(2**17 + 1)
    padded = C.shard_length(len(large), tp) * tp * 4
    got = counted((complete, PendingAllReduce, large, group, async_op))
    if tp == 2:
        assert got == exchanged(1, large.nbytes, "all_reduce", large.nbytes)
    else:  # a reduce-scatter and an all-gather
        assert got == exchanged(2, 2 * (padded // tp) * (tp - 1), "all_reduce", padded)
    # Complex tensors go through gloo's own collectives, under torch's names of them.
    x = torch.ones(8, 3, dtype=torch.complex64)
    size = x.nbytes
    got = counted((complete, PendingGather, x, 0, group, None, async_op))
    assert got == ({"allgather_base": 1}, {"allgather_base": size}, {"all_gather": 1}, {"all_gather": size})
    got = counted((complete, PendingAllReduce, x, group, async_op))
    assert got == ({"allreduce": 1}, {"allreduce": size}, {"all_reduce": 1}, {"all_reduce": size})


@pytest.mark.parametrize("tp", [2, 4])
def test_traffic_is_what_the_backend_is_given(tp):
    run_distributed(check_traffic, tp, tp)


def check_claims() -> None:
    group = tp_group(2)["tp"]
    out, plain, gathered = torch.empty(4), torch.ones(4), torch.ones(4)
    gathered.counts_as = "all_gather", 16

    def exchange(x: torch.Tensor, splits: list[int]) -> None:
        group.alltoall_base(out, x, splits, splits, dist.AllToAllOptions()).wait()

    to_other = [0, 4] if group.rank() == 0 else [4, 0]
    assert counted((exchange, plain, to_other))[2:] == ({"alltoall": 1}, {"alltoall": 16})
    assert counted((exchange, gathered, to_other))[2:] == ({"all_gather": 1}, {"all_gather": 16})


def test_an_exchange_counts_as_the_collective_that_it_is_made_for():
    run_distributed(check_claims, 2)
