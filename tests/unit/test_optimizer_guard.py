"""Which optimizers may update shards: known ones, their subclasses, and those that are vouched for and pass a trial."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_seqpar import ParallelConfig, SeqParallelStrategy
from lightning_seqpar.verify.guards.optimizer import OptimizerGuard
from tests.helpers.optimizers import Lion
from tests.mutants import sees


class Plain(Optimizer):
    """Descends along what :meth:`change` makes of all gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        given = [p for group in self.param_groups for p in group["params"]]
        for p, update in zip(given, self.change([p.grad for p in given]), strict=True):
            p.sub_(update * self.defaults["lr"])

    def change(self, grads: list[Tensor]) -> list[Tensor]:
        return [grad.tanh() for grad in grads]


class ByRow(Plain):
    def change(self, grads: list[Tensor]) -> list[Tensor]:
        return [grad / (1 + grad.norm(dim=-1, keepdim=True)) for grad in grads]


class ByNormOfAll(Plain):
    """Leaves small gradients alone."""

    def change(self, grads: list[Tensor]) -> list[Tensor]:
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        return [grad * (50 / norm).clamp(max=1) for grad in grads]


class Around(Optimizer):
    """One around another."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Renamed(optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.note = "as its parent"


class OwnStep(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=torch.double)) for shape in ((30, 20), (30,), (2, 3, 5))]


def warmed_up() -> Optimizer:
    optimizer = Lion(params(), lr=0.1)
    LambdaLR(optimizer, lambda epoch: epoch / 10)
    return optimizer


def in_training() -> Optimizer:
    """One that has state already, in two groups."""
    first, *others = params()
    optimizer = Lion([{"params": [first], "weight_decay": 0.1}, {"params": others, "lr": 0.5}], lr=0.1)
    for p in (first, *others):
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


RIGHT = {
    "a subclass": (lambda: Renamed(params()), ""),
    "an attribute of the class": (lambda: Lion(params()), ""),
    "a path": (lambda: OwnStep(params()), f"{__name__}.OwnStep"),
    "another path to it": (lambda: optim.SparseAdam(params()), "torch.optim.SparseAdam"),
    "a rate of zero": (warmed_up, ""),
    "state": (in_training, ""),
    "around another": (lambda: Around(optim.SGD(params(), 0.1, momentum=0.9)), f"{__name__}.Around"),
}
MIXES = {"by row": lambda: ByRow(params()), "by the norm of all": lambda: ByNormOfAll(params())}


@pytest.mark.parametrize("case", RIGHT)
def test_what_updates_each_element_by_itself_passes_and_is_left_as_it_was(case):
    make, path = RIGHT[case]
    if case == "another path to it":  # its kernel is for sparse gradients, and no trial is needed in stages
        return OptimizerGuard().refuse_in_stages([make()], 2)
    optimizer, guard = make(), OptimizerGuard([path] if path else [])
    held = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    states, stream = len(optimizer.state), torch.get_rng_state()
    guard.refuse_mixing([optimizer], 2)
    guard.refuse_in_stages([optimizer], 2)
    assert all(map(torch.equal, held, (p for group in optimizer.param_groups for p in group["params"])))
    assert len(optimizer.state) == states
    assert torch.equal(torch.get_rng_state(), stream)
    return None


@sees(
    "an optimizer that is vouched for is not tried",
    "OptimizerGuard._passes",
    "            _check_elementwise(optimizer)\n",
    "",
    case="by row",
)
@pytest.mark.parametrize("case", MIXES)
def test_what_mixes_elements_is_refused_though_somebody_vouches_for_it(case):
    optimizer = MIXES[case]()
    kind = type(optimizer)
    with pytest.raises(ValueError, match=rf"{kind.__name__} is not elementwise, though it is vouched for"):
        OptimizerGuard([f"{kind.__module__}.{kind.__name__}"]).refuse_mixing([optimizer], 2)
    optimizer.elementwise = True
    with pytest.raises(ValueError, match="not elementwise"):
        OptimizerGuard().refuse_mixing([optimizer], 2)


@sees(
    "a subclass with a step of its own passes for its parent",
    "_leaves_alone",
    "inspect.unwrap(one) is inspect.unwrap(other)",
    "True",
    case="OwnStep",
)
@pytest.mark.parametrize("kind", [OwnStep, Plain], ids=lambda kind: kind.__name__)
def test_what_nobody_vouches_for_is_refused_with_how_to(kind):
    optimizer = kind(params(), lr=0.1)
    OptimizerGuard().refuse_mixing([optimizer], 1)
    with pytest.raises(ValueError, match=rf"with tp=2.*elementwise_optimizers=\['{__name__}.{kind.__name__}'\]"):
        OptimizerGuard(["some.Other"]).refuse_mixing([optimizer], 2)


def test_what_cannot_be_tried_says_why():
    class Stuck(Plain):
        elementwise = True

        def step(self) -> None:
            raise OSError("no such kernel")

    with pytest.raises(ValueError, match=r"can't be tried on small tensors \(OSError: no such kernel\)"):
        OptimizerGuard().refuse_mixing([Stuck(params())], 2)


def test_classes_and_paths_are_one_field():
    told = SeqParallelStrategy(tp=2, elementwise_optimizers=[Lion, "some.Other"]).config
    assert told.elementwise_optimizers == ["tests.helpers.optimizers.Lion", "some.Other"]
    assert told == ParallelConfig(tp=2, elementwise_optimizers=["tests.helpers.optimizers.Lion", "some.Other"])
    assert ParallelConfig.from_omegaconf({"elementwise_optimizers": ["a.B"]}).elementwise_optimizers == ["a.B"]
    with pytest.raises(ValueError, match=r"elementwise_optimizers=\['Lion'\]: write a list of import paths"):
        ParallelConfig(elementwise_optimizers=["Lion"])
