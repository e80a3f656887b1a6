"""Errors that all ranks raise alike, behind which callbacks may save."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_seqpar.strategy.ending import is_shared
from lightning_seqpar.testing import run_distributed
from tests.mutants import sees


def compares() -> None:
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None
    assert is_shared(ValueError("the same"), world)
    assert not is_shared(ValueError(f"another one on rank {rank}"), world)
    assert not is_shared((ValueError if rank else TypeError)("of another type"), world)
    assert is_shared(ValueError("the same"), world), "again, later in the run"
    dist.barrier()
    if rank == 1:
        assert not is_shared(ValueError("here alone"), world)


@sees("an error of one rank alone is taken for everybody's", "is_shared", "len(said) == world.size() and ", "")
@sees("ranks that raise different errors count as one refusal", "is_shared", " and {*said.values()} == {own}", "")
@pytest.mark.more
def test_an_error_is_shared_if_all_ranks_raise_it():
    run_distributed(compares, 2)
