"""Batches and outputs that ranks compare."""

from __future__ import annotations

import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.guards.while_training import OutputWatch, warn_of_equal_replicas
from tests.mutants import sees

CPU = torch.device("cpu")


class Encoding(UserDict[str, Any]):
    """As Hugging Face's collators return them: no pytree of torch's."""


def replicas(batches: list[Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_equal_replicas(batches[dist.get_rank()], {"dp": dist.group.WORLD}, CPU)  # type: ignore[arg-type]
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("batches", "warns"),
    [
        ([Encoding(ids=torch.zeros(3)), Encoding(ids=torch.zeros(3))], True),
        ([Encoding(ids=torch.zeros(3)), Encoding(ids=torch.ones(3))], False),
        (["text", "text"], False),
    ],
)
def test_replicas_are_warned_of_batches_that_are_known_to_be_equal(batches, warns):
    assert bool(run_distributed(replicas, 2, batches)[0]) is warns


def watched(scores: list[Tensor]) -> None:
    watch = OutputWatch()
    watch.note(Encoding(scores=scores[dist.get_rank()]), CPU)
    watch.check(ParallelGroups(ProcessTopology(["tp"], [2]), dist.get_rank()), "validation")


@sees(
    "infinite scores hide an output that differs",
    "OutputWatch.note",
    "norm = leaf.double().nan_to_num(0.0, 0.0, 0.0).norm()",
    "norm = leaf.double().nan_to_num().norm()",
)
def test_outputs_that_differ_beside_infinities_are_seen():
    same = torch.tensor([1.0, float("-inf"), float("nan")])
    run_distributed(watched, 2, [same, same])
    with pytest.raises(RankFailedError, match="what the validation step returns differs"):
        run_distributed(watched, 2, [same, same + 1])
