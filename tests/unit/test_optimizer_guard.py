"""Which optimizers may update shards: known ones, their subclasses, and those that are vouched for and pass a trial."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_seqpar import ParallelConfig, SeqParallelStrategy
from lightning_seqpar.releases import MUON
from lightning_seqpar.verify.guards.optimizer import OptimizerGuard
from tests.helpers.optimizers import Factored, Lion, Trusting, Whitening
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


class Growing(Plain):
    """A rate for all parameters, by how far gradients lead the same way."""

    rate = 1.0

    def change(self, grads: list[Tensor]) -> list[Tensor]:
        self.way = [way + grad for way, grad in zip(self.way, grads, strict=True)] if hasattr(self, "way") else grads
        self.rate = max(self.rate, float(sum((way * grad).sum() for way, grad in zip(self.way, grads, strict=True))) / 100)
        return [self.rate * grad.tanh() for grad in grads]


class Renamed(optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.note = "as its parent"


class OwnStep(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Trusted(optim.AdamW):
    """Steps as long as the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(p.grad * (0.1 * (p.norm() / p.grad.norm()).clamp(max=0.3)))


class Int8(Plain):
    __module__ = "torchao.optim.adam"
    __qualname__ = "AdamW8bit"


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
    "a subclass with a step of its own": (lambda: OwnStep(params()), ""),
    "a path": (lambda: Plain(params()), f"{__name__}.Plain"),
    "another path to it": (lambda: optim.SparseAdam(params()), "torch.optim.SparseAdam"),
    "a rate of zero": (warmed_up, ""),
    "state": (in_training, ""),
    "around another": (lambda: Around(optim.SGD(params(), 0.1, momentum=0.9)), f"{__name__}.Around"),
}
MIXES = {"by row": ByRow, "by the norm of all": ByNormOfAll, "a rate of all": Growing}


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
    "                _try(optimizer, how)\n",
    "                pass\n",
    case="by row",
)
@pytest.mark.parametrize("case", MIXES)
def test_what_mixes_elements_is_refused_though_somebody_vouches_for_it(case):
    kind = MIXES[case]
    optimizer = kind(params())
    with pytest.raises(ValueError, match=rf"{kind.__name__} is not elementwise, as which it is taken"):
        OptimizerGuard([f"{kind.__module__}.{kind.__name__}"]).refuse_mixing([optimizer], 2)
    optimizer.elementwise = True
    with pytest.raises(ValueError, match="not elementwise"):
        OptimizerGuard().refuse_mixing([optimizer], 2)


@sees(
    "a subclass with a step of its own passes for its parent",
    "_leaves_alone",
    "inspect.unwrap(one) is inspect.unwrap(other)",
    "True",
)
def test_a_subclass_with_a_step_of_its_own_is_tried():
    with pytest.raises(ValueError, match=r"Trusted where parameters are divided over 2 ranks: it is not known"):
        OptimizerGuard().refuse_mixing([Trusted(params())], 2)
    with pytest.raises(ValueError, match=r"say whole_matrices = True on its class"):
        OptimizerGuard().refuse_in_stages([Trusted(params())], 2)
    named = OptimizerGuard([], [f"{__name__}.Trusted"])
    named.refuse_mixing([Trusted(params())], 2)
    named.refuse_in_stages([Trusted(params())], 2)


def test_what_nobody_vouches_for_is_refused_with_how_to():
    optimizer = Plain(params(), lr=0.1)
    OptimizerGuard().refuse_mixing([optimizer], 1)
    told = rf"over 2 ranks.*elementwise_optimizers=\['{__name__}.Plain'\].*whole_matrix_optimizers=\['{__name__}.Plain'\]"
    with pytest.raises(ValueError, match=told):
        OptimizerGuard(["some.Other"]).refuse_mixing([optimizer], 2)


def test_what_updates_each_matrix_by_itself_gets_it_whole():
    for optimizer in (Whitening(params(), lr=0.1), Trusting(params(), lr=0.1), *(one(params()[:1], lr=0.1) for one in MUON)):
        guard = OptimizerGuard([], ["tests.helpers.optimizers.Trusting"])
        guard.refuse_mixing([optimizer], 2)
        guard.refuse_in_stages([optimizer], 2)
        assert guard.needs_whole(optimizer)
        with pytest.raises(ValueError, match="needs whole matrices, and is stepped apart from the strategy"):
            guard.refuse_mixing([optimizer], 2, alone=True)
    assert not OptimizerGuard().needs_whole(OwnStep(params()))


@sees(
    "whole matrices: what steps by all parameters is taken for one that steps by each",
    "_is_alike",
    "if float((one.detach() - other)",
    "if dim is not None and float((one.detach() - other)",
    case="ByNormOfAll",
)
@sees(
    "whole matrices: sums of rows are taken for what ranks can keep",
    "_is_alike",
    "            _refuse_state(trials[0][2])\n",
    "            pass\n",
    case="Factored",
)
@pytest.mark.parametrize("kind", [ByNormOfAll, Growing, Factored, optim.Adafactor], ids=lambda kind: kind.__name__)
def test_what_needs_more_than_a_matrix_is_refused(kind):
    told = (
        r"it keeps row.*, \[8.*\], of a parameter \[8"
        if kind in (Factored, optim.Adafactor)
        else "together and on each alone differ"
    )
    with pytest.raises(ValueError, match=told):
        OptimizerGuard([], [f"{kind.__module__}.{kind.__name__}"]).refuse_mixing([kind(params())], 2)


@sees("moments of 8 bits are taken for those of 32", "_is_quantised", "bits != 32 or", "bits == 0 and", case="8bit")
@sees(
    "a subclass of one with moments of 8 bits is taken for one with 32",
    "_is_quantised",
    "type(optimizer).__mro__)",
    "[type(optimizer)])",
    case="derived",
)
@pytest.mark.parametrize("args", ["8bit", "derived", "32bit"])
def test_moments_of_few_bits_are_refused_where_shards_would_cut_their_blocks(args):
    optimizer = (type("Mine", (Int8,), {}) if args == "derived" else Int8)(params())
    guard = OptimizerGuard(["torchao.optim.adam.AdamW8bit"])
    if args == "32bit":  # bitsandbytes has one class for all
        Int8.__qualname__, optimizer.args = "AdamW", SimpleNamespace(optim_bits=8)
    with pytest.raises(ValueError, match="it keeps moments in blocks of 8 or 4 bits"):
        guard.refuse_mixing([optimizer], 2)
    guard.refuse_mixing([optimizer], 1)
    guard.refuse_in_stages([optimizer], 2)


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
