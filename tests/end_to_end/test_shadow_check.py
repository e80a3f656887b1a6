"""The shadow check: steps of a training beside whole blocks, what it sees, what it leaves alone, and that it changes nothing."""

from __future__ import annotations

import random
import re
import types
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import gather_weights
from lightning_seqpar.verify.shadow_check import Finding
from tests.helpers import models
from tests.helpers.fit import class_named, quiet_trainer
from tests.helpers.slices import rest


class Dropping(L.LightningModule):
    """torch's encoder with dropout everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
        self.tokens = nn.Embedding(31, 16)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 31)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        return nn.functional.cross_entropy(self.head(self.encoder(self.tokens(tokens))).flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Branching(Dropping):
    """Each block draws from Python's generator too."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.encoder.layers:
            layer.activation = scaled_by_chance


def scaled_by_chance(x: Tensor) -> Tensor:
    return x * random.random()


class Rounds(Dropping):
    """A block's norm rounds to float32, as those of many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.layers[0].norm1 = Rounded(16)


class Rounded(nn.LayerNorm):
    """Computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(
            x.float(), self.normalized_shape, self.weight.float(), self.bias.float()
        ).to(x)


class Counting(Dropping):
    """A block's norm counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.layers[0].norm1 = Counted(16)


class Counted(nn.LayerNorm):
    """Counts in a buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Noted(Callback):
    """Keeps what each check found, and the step behind which it came."""

    def __init__(self) -> None:
        self.found: list[tuple[int, dict[str, Finding]]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        shadow = trainer.strategy._shadow
        if shadow is not None and shadow.findings:
            self.found.append((trainer.global_step, shadow.findings))
            shadow.findings = {}


def trained(
    model: str = "GPT",
    config: dict[str, Any] | None = None,
    precision: str = "64-true",
    steps: int = 1,
    accumulate: int = 1,
    callback: Callback | None = None,
    strategy: Any = SeqParallelStrategy,
) -> Any:
    """Train; what the checks found, and the whole weights."""
    torch.manual_seed(0)
    module = globals()[model]() if model in globals() else class_named(model)()
    noted = Noted()
    trainer = quiet_trainer(
        devices=dist.get_world_size(),
        strategy=strategy(**{"tp": 2, **(config or {})}),
        max_steps=steps,
        precision=precision,
        accumulate_grad_batches=accumulate,
        callbacks=[noted, *([callback] if callback else [])],
    )
    trainer.fit(module, models.loader(4, count=16 * accumulate * steps))
    record = record_of(module)
    assert record is not None
    return noted.found, gather_weights(module), None if record.shadow is None else record.shadow.records


SETUPS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {}),
    "dp2-tp2": (4, {}),
    "tp4-no-sp": (4, {"config": {"tp": 4, "sp": False}}),
    "fsdp2-tp2-recompute": (4, {"config": {"data_parallel": "fsdp", "recompute": "full"}, "accumulate": 2}),
    "pp2-tp2": (4, {"config": {"pp": 2}, "accumulate": 2}),
    "dropout": (2, {"model": "Dropping", "accumulate": 2}),
    "dropout-dp2-tp2": (4, {"model": "Dropping", "config": {"regather": True}}),
    "bf16-mixed": (2, {"precision": "bf16-mixed"}),
    "bf16-true": (2, {"precision": "bf16-true", "model": "Dropping"}),
    "float32": (2, {"precision": "32-true"}),
}
ERROR = {"bf16-mixed": 0.02, "bf16-true": 0.02, "float32": 1e-5}
"""Largest error of what was compared, relative to the size of each tensor; 1e-12 in float64."""


ALWAYS = ("dp2-tp2", "dropout")


@pytest.mark.parametrize("name", [one if one in ALWAYS else rest(one) for one in SETUPS])
def test_right_steps_are_the_whole_blocks(name):
    world, kwargs = SETUPS[name]
    for found, _, records in run_distributed(trained, world, **kwargs):
        assert not records
        ((step, blocks),) = found
        assert step == 1
        assert len(blocks) == 1
        for finding in blocks.values():
            assert (finding.why_not, finding.partly, finding.wrong) == ("", "", [])
            assert finding.compared == 12 + 2 * kwargs.get("accumulate", 1)
            assert finding.largest <= ERROR.get(name, 1e-12)


def test_what_is_drawn_on_the_host_is_drawn_again():
    ((_, blocks),) = run_distributed(trained, 2, model="Branching")[0][0]
    assert [(found.why_not, found.wrong, found.compared) for found in blocks.values()] == [("", [], 14)]


class Flagged(nn.Module):
    """Twice as much where its flag is up."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.flag = inner, False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return 2 * out if self.flag else out


class TwoWays(models.GPT):
    """Runs its blocks with a flag and without it in each step."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        for block in self.model.blocks:
            block.norm2 = Flagged(block.norm2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = []
        for flag in (True, False):
            for block in self.model.blocks:
                block.norm2.flag = flag
            losses.append(super().training_step(batch, batch_idx))
        return losses[0] + losses[1]


def test_a_flag_that_differs_between_calls_leaves_the_block_out():
    found, _, _ = run_distributed(trained, 2, model="TwoWays")[0]
    ((_, blocks),) = found
    assert {finding.why_not for finding in blocks.values()} == {"norm2.flag was changed behind a call of it"}


class Held:
    """What a model and its blocks share."""

    scale: Any = 1.0


class Scaled(nn.Module):
    """Multiplies by what others put into an object that it holds, or into an attribute of its own."""

    def __init__(self, inner: nn.Module, held: Held) -> None:
        super().__init__()
        self.inner, self.held, self.factor = inner, held, None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.held.scale
        return out if self.factor is None else out * self.factor


class PutsAside(models.GPT):
    """Each step puts numbers aside, for its blocks to read."""

    how = "number"

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.held = Held()
        for block in self.model.blocks:
            block.norm2 = Scaled(block.norm2, self.held)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        half = torch.full((1,), 0.5, dtype=torch.float64)
        if self.how == "attribute":
            for block in self.model.blocks:
                block.norm2.factor = half
        else:
            self.held.scale = 0.5 if self.how == "number" else half
        return super().training_step(batch, batch_idx)


class PutsTensorsAside(PutsAside):
    how = "tensor"


class SetsAttributes(PutsAside):
    how = "attribute"


@pytest.mark.parametrize(
    ("model", "where"),
    [("PutsAside", "norm2.held"), ("PutsTensorsAside", "norm2.held"), ("SetsAttributes", "norm2.factor")],
)
def test_what_a_step_puts_into_its_blocks_is_told(model, where):
    found, _, _ = run_distributed(trained, 2, model=model)[0]
    ((_, blocks),) = found
    told = {finding.excused for finding in blocks.values()}
    assert all(finding.wrong for finding in blocks.values())  # a warning says what
    assert told == {f"{where} is not what it was when the model was sharded"}


def test_a_block_that_rounds_to_float32_is_judged_as_one_in_float32():
    for found, *_ in run_distributed(trained, 2, "Rounds"):
        ((_, blocks),) = found
        assert all(not finding.wrong and finding.compared for finding in blocks.values())


def test_a_block_that_changes_its_buffers_is_left_out():
    ((_, blocks),) = run_distributed(trained, 2, model="Counting", config={"sp": False})[0][0]
    whys = sorted(found.why_not for found in blocks.values())
    assert whys == ["", "its forward changes its buffers"]


def test_training_goes_on_as_without_it():
    checked = run_distributed(trained, 2, model="Dropping", steps=4, config={"check_every": 2})[0]
    plain = run_distributed(trained, 2, model="Dropping", steps=4, config={"self_check": False})[0]
    assert [step for step, _ in checked[0]] == [1, 2, 4]
    assert plain[0] == []
    assert all(torch.equal(weight, plain[1][name]) for name, weight in checked[1].items())


# ---- what is wrong ------------------------------------------------------------------------------------------------


class NotSummed(SeqParallelStrategy):
    """Partial gradients stay partial, and nobody compares them."""

    def sync_gradients(self, optimizer: Any) -> None:
        """Nothing."""

    def check_step(self, optimizer: Any) -> None:
        """Nothing."""


class NotReduced(SeqParallelStrategy):
    """Replicas keep gradients of their own, and nobody compares them."""

    def _wrap_ddp(self, module: Any, **more: Any) -> None:
        super()._wrap_ddp(module, **more)
        self.model.register_comm_hook(None, _as_it_is)

    def check_step(self, optimizer: Any) -> None:
        """Nothing."""


def _as_it_is(state: Any, bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_as_it_is.__annotations__ = {"bucket": dist.GradBucket}


class Normalised(Callback):
    """Behind the proof, the MLP of a block begins to divide by the largest of its features, of which a rank has a part."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        module.encoder.layers[0].activation = over_features


def over_features(x: Tensor) -> Tensor:
    return x / (1 + x.abs().amax(-1, keepdim=True))


class Late(Callback):
    """From the third step on one rank's attention sees noise."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            module.encoder.layers[0].linear1.register_forward_hook(_doubled_on_the_last_rank)


def _doubled_on_the_last_rank(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * (1 + dist.get_rank())


_doubled_on_the_last_rank.__module__ = "lightning_seqpar.fault"  # a hook of a user's would leave the block out


def raised(**kwargs: Any) -> str:
    try:
        trained(**kwargs)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("world", "kwargs", "seen"),
    [
        (
            2,
            {"strategy": NotSummed},
            r"ShadowError: shadow check: in step 1 .* model\.blocks\.0 \(Block\) .*: the gradient of \S*(bias|norm\d\.weight) is",
        ),
        # Blocks are not to blame here, and are compared behind it.
        (
            4,
            {"strategy": NotReduced},
            r"RuntimeError: the gradient of .* differs between the replicas: it came past the reduct",
        ),
        (
            2,
            {"model": "Dropping", "callback": Normalised()},
            r"ShadowError: shadow check: in step .* encoder\.layers\.0 .*: (what it returns|the gradient of)",
        ),
        (
            2,
            {"model": "Dropping", "callback": Late(), "steps": 4, "config": {"check_every": 3}},
            r"ShadowError: shadow check: in step 3 .*encoder\.layers\.0",
        ),
    ],
    ids=["not summed", "not reduced", "activation", "late"],
)
def test_wrong_steps_end_on_all_ranks(world, kwargs, seen):
    for text in run_distributed(raised, world, **kwargs):
        assert re.match(seen, text), text


# ---- what it can't tell -------------------------------------------------------------------------------------------


class Hooked(Callback):
    """Halves the gradient of one weight of a block."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        module.encoder.layers[0].linear1.weight.register_hook(lambda grad: grad / 2)


class Rescaled(Callback):
    """Changes gradients behind each backward."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Softer(Callback):
    """Changes rates of dropout, and a module without weights, behind the proof."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        module.encoder.layers[0].dropout1.p = 0.5
        module.encoder.layers[0].dropout2 = nn.Dropout(0.4)


class LateHooks(Callback):
    """Hooks on a block and in it, behind the sharding."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        module.encoder.layers[0].norm1.register_forward_hook(lambda norm, args, out: 1.1 * out)


class LateForward(Callback):
    """Another forward for a module of a block, behind the sharding."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        norm = module.encoder.layers[0].norm1
        norm.forward = types.MethodType(lambda self, x: 1.1 * type(self).forward(self, x), norm)


class Between(models.GPT):
    """Scales gradients between its blocks, as they are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        model, ids = self.model, tokens[:, :-1]
        x = model.tokens(ids) + model.positions(torch.arange(ids.shape[1]))
        for block in model.blocks:
            x = block(x)
            x.register_hook(lambda grad: 0.7 * grad)
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Keeps(models.GPT):
    """Accumulates by hand: gradients go at every third batch."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 3 == 0:
            optimizer.zero_grad()


def test_gradients_that_a_step_keeps_or_scales_are_no_errors():
    found, _, _ = run_distributed(trained, 2, model="Between")[0]
    assert [finding.compared for _, blocks in found for finding in blocks.values()] == [14]
    found, _, _ = run_distributed(trained, 2, model="Keeps", steps=4, config={"check_every": 1})[0]
    # In the second and third step the gradients of all but the activations are of two and three batches.
    assert [finding.compared for _, blocks in found for finding in blocks.values()] == [14, 2, 2, 14]


@pytest.mark.parametrize(
    ("callback", "excuse"),
    [
        (LateHooks(), "norm1 has other hooks than when the model was sharded"),
        (LateForward(), "norm1.forward is not what it was when the model was sharded"),
    ],
)
def test_what_is_put_into_a_block_behind_the_sharding_is_told(callback, excuse):
    found, _, _ = run_distributed(trained, 2, model="Encoder", callback=callback)[0]
    assert [finding.excused for _, blocks in found for finding in blocks.values()] == [excuse]


class Thaws(Callback):
    """A weight trains from the second micro-batch of a step on, another one in the first alone."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.encoder.layers[0].norm1.weight.requires_grad_(batch_idx > 0)
        module.encoder.layers[0].linear1.bias.requires_grad_(batch_idx == 0)


@pytest.mark.parametrize(
    ("kwargs", "compared", "partly"),
    [
        pytest.param({"callback": Thaws(), "accumulate": 2}, 14, "", id="thawed between micro-batches"),
        pytest.param({"callback": Hooked()}, 13, "", id="a hook on a gradient"),
        pytest.param({"callback": Rescaled()}, 2, "on_after_backward may change them", id="gradients changed"),
        pytest.param({"callback": Softer()}, 14, "", id="settings changed"),
    ],
)
def test_what_users_change_is_no_error(kwargs, compared, partly):
    found, _, _ = run_distributed(trained, 2, model="Dropping", **kwargs)[0]
    ((_, blocks),) = found
    (finding,) = blocks.values()
    assert (finding.why_not, finding.wrong) == ("", [])
    assert finding.compared == compared
    assert finding.partly == partly
