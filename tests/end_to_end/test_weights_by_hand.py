"""Weights and gradients changed by hand: elementwise as they are, anything else on whole ones, and refused on parts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.utilities import grad_norm as lightnings_grad_norm
from torch import Tensor

from lightning_seqpar import grad_norm, summoned
from lightning_seqpar.testing import run_distributed
from tests.helpers.habit_runs import LIMIT, TOPOLOGIES, Learner, Place, apart
from tests.mutants import sees


class ByHand(Learner):
    """Its cases say what a hook does.

    Args:
        whole: whether they do it on whole weights.
    """

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole

    def weights(self) -> Any:
        """The context in which weights are changed."""
        return summoned(self) if self.whole else contextlib.nullcontext()


NEEDS_WHOLE: dict[str, type[ByHand]] = {}
RIGHT: dict[str, type[ByHand]] = {}
"""What needs whole weights, and what is right on parts; by name."""


def case(hook: str, cases: dict[str, type[ByHand]] = NEEDS_WHOLE) -> Callable[[Any], Any]:
    """Decorate what a hook of a module does with its weights; gradients of that are none."""

    def added(function: Callable[..., None]) -> Callable[..., None]:
        @torch.no_grad()
        def called(self: ByHand, *args: Any) -> None:
            with self.weights():
                function(self, *args)

        cases[function.__name__] = type(function.__name__, (ByHand,), {hook: called})
        return function

    return added


def needs_whole(kind: type[ByHand]) -> type[ByHand]:
    """Decorate a module that needs whole weights."""
    NEEDS_WHOLE[kind.__name__] = kind
    return kind


# ---- what needs whole weights --------------------------------------------------------------------------------------


@case("on_train_batch_end")
def unit_rows(self: Any, *args: Any) -> None:
    """As normalised transformers do."""
    for block in self.model.blocks:
        for linear in (block.attn.qkv, block.attn.proj, block.mlp.up, block.mlp.down):
            linear.weight.copy_(F.normalize(linear.weight, dim=1))


@case("on_train_batch_start")
def max_norm(self: Any, *args: Any) -> None:
    for p in self.parameters():
        if p.ndim == 2:
            p.copy_(torch.renorm(p, 2, 0, 0.9))


@case("on_train_batch_end")
def by_assignment(self: Any, *args: Any) -> None:
    """Columns of unit length, by ``.data =``."""
    for block in self.model.blocks:
        block.mlp.up.weight.data = block.mlp.up.weight.data / block.mlp.up.weight.data.norm(dim=0, keepdim=True)


@case("on_before_optimizer_step")
def own_clipping(self: Any, optimizer: Any) -> None:
    norm = torch.tensor([p.grad.norm() for p in self.parameters()], dtype=torch.float64).norm()
    for p in self.parameters():
        p.grad.mul_((0.05 / norm).clamp(max=1.0))


@case("on_before_optimizer_step")
def clipped_by_numbers(self: Any, optimizer: Any) -> None:
    norm = sum(p.grad.data.norm(2).item() ** 2 for p in self.parameters()) ** 0.5
    if norm > 0.05:
        for p in self.parameters():
            p.grad.data.mul_(0.05 / norm)


@case("on_before_optimizer_step")
def first_rows_stay(self: Any, optimizer: Any) -> None:
    """Indices of the whole weight."""
    self.model.blocks[0].mlp.up.weight.grad[:20] = 0


@needs_whole
class InManualSteps(ByHand):
    """An own norm decides whether to step. A hook of its own runs in the midst of the step."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__(whole)
        self.automatic_optimization = False

    def on_after_backward(self) -> None:
        self.backwards = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        with self.weights():
            norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in self.parameters()])).item()
        is_small = norm < (1e9 if batch_idx else 1e-9)
        if is_small:
            optimizer.step()
        return loss.detach()


@needs_whole
class InForward(ByHand):
    """In the module's own forward, which its step calls; and in the step."""

    def forward(self, batch: Any) -> None:
        with self.weights(), torch.no_grad():
            self.model.blocks[0].attn.proj.weight.div_(self.model.blocks[0].attn.proj.weight.norm())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self(batch)
        return super().training_step(batch, batch_idx)


@needs_whole
class InSteps(InForward):
    """In a step of automatic optimization, in front of the forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.forward(batch)
        return ByHand.training_step(self, batch, batch_idx)


class Thaws(BaseFinetuning):
    """Its code is called by a hook of Lightning's own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks[1].norm1)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        with pl_module.weights():
            weight = pl_module.model.blocks[0].mlp.up.weight.data
            weight /= weight.std()


@needs_whole
class ByFinetuning(ByHand):
    def configure_callbacks(self) -> list[Callback]:
        return [Thaws()]


# ---- what is right on parts ----------------------------------------------------------------------------------------


class Elementwise(ByHand):
    """Averages, decay, clamps, masks, copies, a look for what is not finite."""

    def on_train_start(self) -> None:
        self.average = [p.detach().clone() for p in self.parameters()]

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.mul_(0.5).add_(p.detach(), alpha=1e-3).clamp_(-0.1, 0.1)
            p.grad = p.grad + 0.0 * torch.zeros_like(p)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if any(torch.isnan(p.grad).any() for p in self.parameters()) or not torch.isfinite(self.model.head.weight).all():
            optimizer.zero_grad()

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for p, average in zip(self.parameters(), self.average, strict=True):
            p.mul_(1 - 1e-3)
            average.lerp_(p, 0.1)
            p.copy_(average.float().double() * 0.5 + p * 0.5)
            p.mul_(p.abs() > 1e-3)
            p.copy_(torch.where(p > 0.5, p.sqrt(), p))
        torch._foreach_mul_([*self.parameters()], 0.999)
        torch._foreach_lerp_(self.average, [*self.parameters()], 0.5)


class LogsNorms(ByHand):
    """As many do: the numbers are one rank's, and nothing hangs on them. (torch has no such thing for rows of replicas.)"""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(lightnings_grad_norm(self, 2))
        print("norm of the head:", self.model.head.weight.grad.norm().item())

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for p in self.parameters():
            p[p.abs() < 1e-3] = 0


RIGHT |= {"Elementwise": Elementwise, "LogsNorms": LogsNorms}


@case("on_train_batch_end", RIGHT)
def rows_of_columns(self: Any, *args: Any) -> None:
    """Rows of a weight of which each rank has some rows."""
    for block in self.model.blocks:
        block.mlp.up.weight.copy_(F.normalize(block.mlp.up.weight, dim=1))
        block.mlp.up.weight.t().div_(block.mlp.up.weight.t().abs().amax(0, keepdim=True))
        block.norm1.weight.div_(block.norm1.weight.norm())


@case("on_train_batch_end", RIGHT)
def samples_in_hooks(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    """Runs the model, and a backward of another thing, in a hook."""
    scale = self.loss(batch).exp().clamp(max=2.0)
    with torch.enable_grad():
        x = torch.ones(3, requires_grad=True)
        (x * x.norm()).sum().backward()
    for p in self.model.blocks.parameters():
        p.data.mul_(1 - 1e-4 * float(scale) * float(x.grad[0]))


@case("on_before_zero_grad", RIGHT)
def max_norm_of_embeddings(self: Any, optimizer: Any) -> None:
    """Between a forward and its backward, where embeddings may change."""
    self.model.tokens.weight.copy_(torch.renorm(self.model.tokens.weight, 2, 0, 0.9))
    with summoned(self):
        self.model.positions.weight.mul_(0.9 / self.model.tokens.weight.norm(dim=1).max())


@case("on_before_optimizer_step", RIGHT)
def knows_its_norm(self: Any, optimizer: Any) -> None:
    """Decides by the norm of the whole gradient."""
    norm = grad_norm(self)
    if norm > 0.01:
        for p in self.parameters():
            p.grad.mul_(0.01 / norm)


@case("on_train_batch_end", RIGHT)
def named_weights(self: Any, *args: Any) -> None:
    """Some alone are summoned."""
    with summoned(self, "model.blocks.0.mlp.*", "model.tokens.weight"):
        self.model.blocks[0].mlp.down.weight.div_(self.model.blocks[0].mlp.down.weight.norm())
        self.model.tokens.weight[3:20] *= 0.9


REFUSED = r"^ValueError: model\..*test_weights_by_hand\.py:\d+ \(.*with lightning_seqpar\.summoned\(self\)"
SAYS = {
    ("fsdp2xtp2", "by_assignment"): r"mlp.up.weight: its data was assigned .* which data_parallel='fsdp' never reads",
    # These are torch's: it has no such operation on the rows of replicas.
    ("fsdp2xtp2", "max_norm"): r"aten.renorm.default does not have a sharding strategy",
    ("fsdp2xtp2", "own_clipping"): r"its data is not allocated yet",
    ("fsdp2xtp2", "first_rows_stay"): r"aten.fill_.Tensor does not have a sharding strategy",
}
"""What is said of a case on parts."""


# ---- how they run --------------------------------------------------------------------------------------------------


def run_all(topology: str, folder: str, only: str = "") -> dict[str, Any]:
    """What each case yields at a place; the sentence where it is refused."""
    place, found = Place(topology, folder), {}
    cases: dict[str, Callable[[], ByHand]] = dict(RIGHT)
    for name, kind in NEEDS_WHOLE.items():
        cases[f"{name} on whole weights"] = lambda kind=kind: kind(whole=True)
        if topology != "alone":
            cases[f"{name} on parts"] = kind
    for name, make in cases.items():
        if only in name:
            torch.manual_seed(0)
            try:
                found[name] = {key: value for key, value in place.train(make()).items() if key != "trainer"}
            except (ValueError, RuntimeError) as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    return run_all("alone", str(tmp_path_factory.mktemp("alone")))


@sees(
    "weights by hand: the number of a storage that is gone is another one's",
    "WeightWatch._look_up",
    "            self._kept.append(StorageWeakRef(rows.untyped_storage()))\n",
    "",
    case="tp2",
)
@sees(
    "weights by hand: hooks are not watched",
    "Steps.watch",
    "            self._weights.begin(self._env.trainer)\n",
    "",
    case="tp2",
)
@sees(
    "weights by hand: steps are not watched",
    "Steps.run_step",
    'if self._weights is not None and loop == "training" and schedule.is_due(loop):',
    "if False:",
    case="tp2",
)
@sees(
    "weights by hand: a module's own forward is not watched",
    "_users_frame",
    'isinstance(frame.f_locals.get("self"), pl.LightningModule)',
    "False",
    case="tp2",
)
@sees(
    "weights by hand: what was made of a part is assigned",
    "WeightWatch._refuse_assigned",
    "if known is not None and",
    "if False and known is not None and",
    case="tp2",
)
@sees(
    "weights by hand: a part's norm decides",
    "WeightWatch._check_read",
    "if self._decides or is_tested:",
    "if False:",
    case="tp2",
)
@sees(
    "weights by hand: a number read of a part scales gradients",
    "WeightWatch._check_read",
    "        self._read = self._read or found\n",
    "",
    case="tp2",
)
@sees(
    "weights by hand: numbers that torch.tensor reads pass",
    "WeightWatch._look_at_lifted",
    "                self._mark(out, mark)\n",
    "",
    case="tp2",
)
@sees(
    "weights by hand: rows by their index pass",
    "_Part.dims",
    "return found if covered >= self.length else None",
    "return found",
    case="tp2",
)
@sees(
    "weights by hand: a hook in the midst of a step ends its watch",
    "WeightWatch.watched",
    "            vars(self).update(outer)\n",
    "            self._begin_call()\n",
    case="tp2",
)
@sees("weights by hand: every reduction is refused", "WeightWatch._result", "if not along & dims:", "if False:", case="tp2")
@sees(
    "summoned weights are not written back",
    "_Held.put_back",
    "local_rows(self.parameter.data).copy_(self._cut(whole))",
    "pass",
    case="tp2",
)
@sees(
    "summoned gradients are not written back",
    "_Held.put_back",
    "local_rows(self.grad).copy_(self._cut(whole_grad))",
    "pass",
    case="tp2",
)
@sees(
    "a norm taken before the backward ends the sums of the step",
    "Steps.sync_gradients",
    " and self._has_backward",
    "",
    case="tp2",
)
@sees(
    "weights by hand: what a hook of Lightning's calls is trusted",
    "_has_code",
    "for each in (own, type(one))",
    "for each in (own,)",
    case="tp2",
)
@pytest.mark.parametrize("topology", ["tp2", pytest.param("dp2xtp2", marks=pytest.mark.more), "fsdp2xtp2"])
def test_weights_that_are_changed_by_hand(topology, alone, tmp_path):
    for found in run_distributed(run_all, TOPOLOGIES[topology][0], topology, str(tmp_path), timeout=280):
        wrong = {}
        for name, out in found.items():
            if name.endswith("on parts"):
                says = SAYS.get((topology, name.split()[0]), REFUSED)
                if not (isinstance(out, str) and re.search(says, out)):
                    wrong[name] = out
            elif topology == "fsdp2xtp2" and name == "LogsNorms":
                continue
            elif isinstance(out, str):
                wrong[name] = out
            elif (far := max((gap for _, gap in apart(alone[name], out)), default=0.0)) > LIMIT:
                wrong[name] = f"off by {far:.1e}"
        assert not wrong, "\n".join(f"{name}: {str(out)[:600]}" for name, out in wrong.items())
