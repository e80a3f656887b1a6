"""Batches in whatever users put them into, and what tells one from another."""

from __future__ import annotations

import dataclasses
from collections import UserDict, UserList, UserString, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_seqpar.data.batch import map_tensors, tensors_in
from lightning_seqpar.inference.examples import Example, small
from lightning_seqpar.verify.guards.while_training import checksum
from tests.mutants import sees

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "ids labels")


class Encoding(UserDict[str, Any]):
    """As Hugging Face's collators return them: no pytree of torch's."""


@dataclasses.dataclass
class Sample:
    ids: Tensor
    more: Any
    name: str = "sample"


@dataclasses.dataclass(frozen=True)
class Frozen:
    ids: Tensor
    more: Any
    unset: int = dataclasses.field(init=False)


HOLDERS: dict[str, Any] = {
    "frozen dataclass": lambda a, b: Frozen(a, [b]),
    "constant mapping": lambda a, b: MappingProxyType({"a": a, "b": b}),
    "dict": lambda a, b: {"ids": a, "more": [b, None]},
    "mapping": lambda a, b: Encoding(ids=a, more=Encoding(b=b)),
    "mapping in a list": lambda a, b: [Encoding(ids=a), "text", Encoding(b=b)],
    "dataclass": lambda a, b: Sample(a, {"b": b}),
    "dataclass in a mapping": lambda a, b: Encoding(both=Sample(a, (b,))),
    "sequence": lambda a, b: UserList([a, (b, 3)]),
    "named tuple": Pair,
}


@sees(
    "batches of mappings not looked at",
    "_items",
    "    if isinstance(leaf, Mapping):\n",
    "    if isinstance(leaf, dict):\n",
    case="mapping",
)
@pytest.mark.parametrize("holder", HOLDERS)
def test_tensors_are_found_and_changed_wherever_they_are(holder):
    a, b = torch.arange(6).view(2, 3), torch.ones(2)
    batch = HOLDERS[holder](a, b)
    assert [id(tensor) for tensor in tensors_in(batch)] == [id(a), id(b)]
    changed = map_tensors(lambda tensor: tensor + 1, batch)
    assert type(changed) is type(batch)
    assert torch.equal(next(iter(tensors_in(changed))), a + 1)
    assert torch.equal(next(iter(tensors_in(batch))), a)
    moved = Example("", "training_step", (batch, 0), {}).to(CPU, torch.float64)
    assert [tensor.dtype for tensor in tensors_in(moved.args)] == [torch.int64, torch.float64]
    large = HOLDERS[holder](torch.zeros(8, 3000), torch.ones(8))
    assert [len(tensor) for tensor in tensors_in(small(large))] == [4, 4]
    assert not torch.equal(checksum(batch, CPU), checksum(HOLDERS[holder](a, b + 1), CPU))


def test_what_holds_no_tensors_is_left_alone():
    for batch in ("text", b"bytes", bytearray(3), range(3), UserString("text"), 3, None, Sample, object(), UserList("ab")):
        assert not list(tensors_in(batch))
        assert map_tensors(torch.neg, batch) is batch
        assert checksum(batch, CPU).tolist() == [0, 0]


MASK = torch.tensor([[0.0, float("-inf")], [float("inf"), torch.finfo(torch.float32).min]])


@sees(
    "the same values in another order are the same batch",
    "checksum",
    "total += (bits * position).sum()",
    "total += bits.sum()",
    case="torch.int64, [3]",
)
@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([3, 1, 2]),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.randn(5, dtype=torch.bfloat16),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.arange(12.0).view(3, 4).t()[1:],
        torch.randint(0, 255, (4, 4), dtype=torch.uint8),
    ],
    ids=lambda given: f"{given.dtype}, {list(given.shape)}",
)
def test_a_checksum_tells_apart_what_differs_in_one_number_or_in_its_place(given):
    assert torch.equal(checksum(MASK.to(torch.complex64).conj(), CPU), checksum(MASK.to(torch.complex64).conj().clone(), CPU))

    def told(*tensors: Tensor) -> list[int]:
        return checksum([MASK, *tensors], CPU).tolist()

    assert told(given) == told(given.clone())
    other = given.clone(memory_format=torch.contiguous_format)
    other.view(-1)[-1] = ~other.view(-1)[-1] if given.dtype == torch.bool else other.view(-1)[-1] + 1
    assert told(given) != told(other)
    assert told(given, given[:0] if given.ndim else given) != told(given)
    assert told(given, other) != told(other, given)
    if given.ndim:
        assert told(given) != told(given.flip(0))
