"""A block can be captured: nothing in its forward or backward reads a tensor, decides by one, or makes one of Python's numbers.

CUDA graphs record what a block launches, and play it without the host. Here it runs on tensors that have no numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_time import KINDS, _plan
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_seqpar import ParallelGroups, ProcessTopology
from lightning_seqpar.parallel.apply import parallelize
from lightning_seqpar.plan.sharding_plan import resolve_plans
from tests.mutants import sees

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gathered kept": {"regather": False},
    "without sp": {"sp": False},
    "activations": {"recompute": "activations"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
}


class Sent(TorchDispatchMode):
    """Operations by which numbers of the host come to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "lift_fresh" in str(func):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def without_numbers(model: nn.Module) -> None:
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    tensors[name] = nn.Parameter(made) if tensors is module._parameters else made


@sees(
    "a block that reads what it gathered",
    "Products.backward",
    "        whole = again if again is kept else again.wait()\n",
    "        whole = again if again is kept else again.wait()\n        assert whole is None or float(whole.sum()) != 0.5\n",
)
@pytest.mark.parametrize(
    "options",
    [pytest.param(given, id=name, marks=[pytest.mark.more] * (name != "defaults")) for name, given in OPTIONS.items()],
)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_block_neither_reads_nor_sends_numbers(kind, options):
    with FakeTensorMode(allow_non_fake_inputs=True), Sent() as sent:  # states of generators lie on the host
        with torch.device("meta"):
            model = kind.make(64, 2, 16)
        without_numbers(model)
        groups = ParallelGroups.silent(ProcessTopology(["dp", "tp"], [1, 8]), 0)
        record = parallelize(model, resolve_plans(kind.plan or _plan(kind), model), groups, **options)
        for _ in range(2):
            record.reset_calls(draws=())
            sent.found.clear()
            model(torch.zeros(1, 16, dtype=torch.long, device="cpu")).sum().backward()
    assert sent.found == []
    assert all(parameter.grad is not None for parameter in model.parameters())
