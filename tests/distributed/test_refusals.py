"""Errors that all ranks raise alike: who tells them."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch.distributed as dist

from lightning_seqpar.strategy.refusals import Refusals
from lightning_seqpar.testing import run_distributed
from tests.mutants import sees


def refusals() -> Refusals:
    assert dist.group.WORLD is not None
    return Refusals.of_world(dist.group.WORLD, patience=timedelta(seconds=2))


def compares() -> None:
    rank = dist.get_rank()
    assert refusals().is_shared(ValueError("the same"))
    assert not refusals().is_shared(ValueError(f"another one on rank {rank}"))
    assert not refusals().is_shared((ValueError if rank else TypeError)("of another type"))
    assert refusals().is_shared(ValueError("the same")), "again, later in the run"
    dist.barrier()
    if rank == 1:
        assert not refusals().is_shared(ValueError("here alone"))


@sees(
    "an error of one rank alone is taken for everybody's",
    "Refusals._have_come",
    "            return False\n",
    "            return True\n",
)
@sees(
    "ranks that raise different errors count as one refusal",
    "Refusals.is_shared",
    " and all(self._store.get(key).decode() == said for key in keys)",
    "",
)
def test_an_error_is_shared_if_all_ranks_raise_it():
    run_distributed(compares, 2)


def tells() -> None:
    rank = dist.get_rank()
    printed: list[BaseException] = []
    sys.excepthook = lambda kind, value, trace: printed.append(value)

    def prints(error: BaseException, *, caught_on_rank_0: bool = False) -> bool:
        """Whether this rank prints a shared error, where the user's code catches it nowhere, or on rank 0 alone."""
        found = refusals()
        assert found.is_shared(error)
        found.tell_once(error, opens_log=False)
        if rank or not caught_on_rank_0:
            sys.excepthook(type(error), error, None)
        return error in printed

    assert prints(ValueError("the same")) == (rank == 0)
    assert prints(ValueError("the same"), caught_on_rank_0=True) == (rank == 1)
    other = ValueError("another one")
    sys.excepthook(type(other), other, None)
    assert other in printed, "only the shared error is left to rank 0"
    dist.barrier()


@sees("every rank tells what all of them raised", "Refusals.tell_once", "        sys.excepthook = print_once\n", "")
@sees(
    "what rank 0 caught is told by nobody",
    "Refusals.tell_once",
    'self._rank and not self._have_come([f"{self._name} is told"])',
    "False",
)
def test_rank_0_tells_it_and_the_others_only_if_rank_0_did_not():
    run_distributed(tells, 2)
