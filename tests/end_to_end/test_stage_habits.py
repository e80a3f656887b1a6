"""What users do in steps, hooks and callbacks, in stages of a pipeline: as in one process, or told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import SumMetric

from lightning_seqpar import unshard
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import gather_weights
from tests.helpers import models
from tests.helpers.pipelines import trainer_of
from tests.helpers.slices import rest
from tests.helpers.zoo import EinsumAttention, FeedForward, PreNorm
from tests.mutants import sees

PLAIN, TURNS = {"pp": 2}, {"pp": 2, "virtual_pp": 2}
Made = tuple[L.LightningModule, Any, dict[str, Any]]
WORKS: dict[str, Callable[[], Made]] = {}
TOLD: dict[str, tuple[Callable[[], Made], str]] = {}


def loader(count: int = 40) -> Any:
    return models.loader(4, length=9, count=count)


def works(make: Callable[[], Made]) -> Callable[[], Made]:
    WORKS[make.__name__] = make
    return make


def told(says: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def added(make: Callable[[], Made]) -> Callable[[], Made]:
        TOLD[make.__name__] = make, says
        return make

    return added


class Deep(models.GPT):
    def __init__(self, **more: Any) -> None:
        super().__init__(**{"tied": False, "layers": 4, **more})


# ---- state that steps change, or hooks between them ------------------------------------------------------------------


@works
def counter_of_a_submodule() -> Made:
    module = Deep()
    tokens: Any = module.model.tokens
    tokens.calls = 0

    def scale(layer: Any, args: Any, out: Tensor) -> Tensor:
        layer.calls += 1
        return out * (1 + layer.calls / 50)

    tokens.register_forward_hook(scale)
    return module, loader(), {}


class Metered(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.words = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.words.update(batch[0].numel() + batch_idx)
        self.log("words", self.words, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


@works
def metric_in_front_of_the_blocks() -> Made:
    return Metered(), loader(), {}


class Annealed(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"beta": 0.0})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.hparams["beta"] = 0.1 * batch_idx
        self.model.blocks[1].eval() if batch_idx % 2 else self.model.blocks[1].train()
        self.model.norm.eps = 0.1 * (1 + batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.hparams["beta"] + self.model.blocks[1].training)


@works
def numbers_that_hooks_set_for_each_batch() -> Made:
    return Annealed(), loader(), {}


class Shaded(PreNorm):
    shade = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sin() * self.shade)  # a recompute makes this again


class Masking(models.Blocks):
    """Puts a number on its blocks, of which a recompute of an earlier micro-batch must not read that of the next."""

    def __init__(self) -> None:
        super().__init__(lambda: Shaded(16, EinsumAttention(16, 4), FeedForward(16, 32)), 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for block in self.blocks:
            block.shade = 1 + 0.1 * (batch_idx % 4)
        return super().training_step(batch, batch_idx)


@works
def attributes_of_blocks_that_are_recomputed() -> Made:
    return Masking(), loader(), {"fields": {"recompute": "full", "self_check": False}}


# ---- windows ---------------------------------------------------------------------------------------------------------


class Skips(Deep):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


@works
def an_epoch_that_ends_in_the_middle_of_a_window() -> Made:
    return Skips(), loader(), {"max_epochs": 3}


class Swaps(Callback):
    """Validates with other weights, as averages of weights do."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = [p.detach().clone() for p in module.parameters()]
        for parameter in module.parameters():
            if getattr(trainer.strategy, "holds", lambda p: True)(parameter):
                parameter.data.mul_(0.5)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        for parameter, kept in zip(module.parameters(), self.kept, strict=True):
            if getattr(trainer.strategy, "holds", lambda p: True)(parameter):
                parameter.data.copy_(kept)


class Validated(Deep):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", super().training_step(batch, batch_idx))


@works
def other_weights_in_a_validation_within_a_window() -> Made:
    return Validated(), loader(), {"callbacks": [Swaps()], "val_check_interval": 4, "num_sanity_val_steps": 0}


# ---- several stacks --------------------------------------------------------------------------------------------------


class Towers(L.LightningModule):
    """Two towers and a retrieval metric, which hides numbers that are none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.other = nn.Embedding(31, 16), nn.Embedding(31, 16)
        towers = [nn.ModuleList(PreNorm(16, EinsumAttention(16, 4), FeedForward(16, 32)) for _ in range(2)) for _ in "ab"]
        self.left, self.right = towers
        models.perturb(self)

    def similarities(self, ids: Tensor) -> Tensor:
        x, y = self.embed(ids), self.other(ids.flip(1))
        for block in self.left:
            x = block(x)
        x = x.add_(0.1)  # in place
        for block in self.right:
            y = block(y)
        return x.mean(1) @ y.mean(1).T

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.similarities(batch[0])
        return F.cross_entropy(logits, torch.arange(len(logits)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hits = self.similarities(batch[0]).argmax(1) == torch.arange(len(batch[0]))
        self.log("hits", hits.double().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@works
def towers_that_are_validated() -> Made:
    return Towers(), loader(), {"max_epochs": 2}


class Handed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.gate = PreNorm(16, EinsumAttention(16, 4), FeedForward(16, 32)), nn.Linear(16, 1)

    def forward(self, x: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x), penalty + self.gate(x).pow(2).mean()


class Penalised(models.Blocks):
    """A penalty goes from block to block, and the loss reads it."""

    def __init__(self) -> None:
        super().__init__(Handed, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, penalty = self.embed(batch[0]), self.head.weight.new_zeros(())
        for block in self.blocks:
            x, penalty = block(x, penalty)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[0].flatten()) + penalty

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))


@works
def a_penalty_that_blocks_hand_on() -> Made:
    return Penalised(), loader(), {}


# ---- told ------------------------------------------------------------------------------------------------------------


class CountsLate(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx > 3:
            self.steps += 1
        return super().training_step(batch, batch_idx)


@told(r"virtual_pp=2: the step changes the buffer steps, and is run once for each chunk")
def a_buffer_that_later_steps_change() -> Made:
    return CountsLate(), loader(), {}


class Moves(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *more: Any) -> None:
        if trainer.strategy.holds(module.model.tokens.weight):
            module.model.tokens.weight.detach().mul_(0.9)


@told(r"virtual_pp=2: model\.tokens\.weight was changed between batches whose gradients are accumulated")
def weights_that_a_hook_changes_between() -> Made:
    return Deep(), loader(), {"callbacks": [Moves()]}


class OwnNoise(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[0].clone()
        ids[torch.rand(ids.shape, generator=self.noise) < 0.1] = 5
        return super().training_step([ids], batch_idx)

    def __deepcopy__(self, memo: Any) -> Any:  # a generator can't be copied
        copied = OwnNoise()
        copied.load_state_dict(self.state_dict())
        return copied.to(self.dtype)


@told(r"virtual_pp=2: the step draws from a torch\.Generator of its own")
def a_generator_in_front_of_the_blocks() -> Made:
    return OwnNoise(), loader(), {}


class Squares(Deep):
    def backward(self, loss: Tensor) -> None:
        (loss**2).backward()


@told(r"Squares\.backward reads the value of the loss, or runs no backward: with virtual_pp")
def a_backward_that_reads_the_loss() -> Made:
    return Squares(), loader(), {}


class Iterates(Deep):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@told(r"pp=2 with training_step\(self, dataloader_iter\): a step that reads its loader by itself")
def a_step_that_reads_its_loader() -> Made:
    return Iterates(), loader(), {}


class Freezes(Deep):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.head.weight.requires_grad_(batch_idx % 2 == 0)


@told(r"a parameter froze or began to train between batches whose gradients are accumulated .*: a pipeline's stage runs")
def parameters_that_freeze_within_a_window() -> Made:
    return Freezes(), loader(), {}


@told(r"model\.tokens\.weight: it has a gradient hook of yours, and several stages of the pipeline hold it")
def a_hook_on_tied_weights() -> Made:
    module = Deep(tied=True)
    module.model.tokens.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return module, loader(), {}


class Teacher(Deep):
    """An average of the head, which the last stage alone has."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(16, 31).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            self.average.weight.data.lerp_(self.model.head.weight.data, 0.1)


@told(r"average\.weight: this parameter is no longer the same on the stages of the pipeline that hold it")
def an_average_of_what_one_stage_has() -> Made:
    return Teacher(), loader(), {}


def run(name: str, sizes: dict[str, Any] | None) -> tuple[dict[str, Tensor], dict[str, float]]:
    make = WORKS[name] if name in WORKS else TOLD[name][0]
    torch.manual_seed(0)
    module, data, more = make()
    fields = more.pop("fields", {})
    options = {"max_steps": -1, "max_epochs": 1, "gradient_clip_val": None, **more}
    trainer = trainer_of(None if sizes is None else {**sizes, **fields}, **options)
    trainer.fit(module, data, data if "validation_step" in vars(type(module)) else None)
    unshard(module)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return weights, {key: float(value) for key, value in trainer.callback_metrics.items()}


def run_all(names: list[str], sizes: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = run(name, sizes)
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
    return found


@sees(
    "turns: batches that were put off are evaluated",
    "InterleavedWindow.entered",
    "        _set_modes(one.modes)\n",
    "",
    case="2-{'pp': 2, 'virtual_pp': 2}",
)
@sees(
    "pp: what an abandoned window leaves comes to the next",
    "Stages.enter_loops",
    '            (fit, "on_advance_end", finished),\n',
    "",
    case="2-{'pp': 2}",
)
@sees(
    "pp: a recompute reads what the next step has put on the block",
    "RecomputedCall.__call__",
    ", self._attributes.as_of(self._values):",
    ":",
    case="2-{'pp': 2}",
)
@sees(
    "stacks: an evaluation reads the end of a stack where training does",
    "Stage._elsewhere_at",
    "        if self._goes_on:\n            x, *beside",
    "        if self._goes_on and stack is self._cut.stacks[-1]:\n            x, *beside",
    case="2-{'pp': 2}",
)
@sees(
    "turns: metrics count once for each chunk",
    "InterleavedWindow.entered",
    "setattr(metric, name, value)",
    "pass",
    case="2-{'pp': 2, 'virtual_pp': 2}",
)
@sees(
    "turns: attributes below the module are those of the window's end",
    "ModelAttributes.__init__",
    "            if name and any(",
    "            if name or any(",
    case="2-{'pp': 2, 'virtual_pp': 2}",
)
@pytest.mark.parametrize(("world", "sizes"), [(2, PLAIN), (2, TURNS), rest(4, {"pp": 2, "tp": 2}), rest(4, {"pp": 4})], ids=str)
def test_what_users_do_is_what_one_process_does(world, sizes):
    stacks = {"towers_that_are_validated"} if "virtual_pp" in sizes else set()
    names = [name for name in WORKS if name not in stacks]
    everywhere = run_distributed(run_all, world, names, sizes)
    for name in names:
        weights, metrics = run(name, None)
        for rank in everywhere:
            assert not isinstance(rank[name], str), (name, rank[name])
            found, logged = rank[name]
            assert max(float((found[key] - x).abs().max()) for key, x in weights.items()) <= 1e-9, name
            assert {key: logged.get(key) for key in metrics} == pytest.approx(metrics, rel=1e-6), name


def raise_one(name: str) -> None:
    run(name, PLAIN if re.search("reads_its_loader|average|a_window$", name) else TURNS)


@sees(
    "pp: parameters may freeze within a window",
    "Steps.train",
    "            self._check_window()\n",
    "            pass\n",
    case="parameters_that_freeze_within_a_window",
)
@sees(
    "pp: parameters that stages hold may go apart",
    "Stages._end_window",
    "            check_parameters_of_stages(record, self._env.groups, self._env.device)\n",
    "",
    case="an_average_of_what_one_stage_has",
)
@sees(
    "pp: hooks on tied weights see parts",
    "Stages._end_window",
    "            refuse_hooks_on_shared(record)\n",
    "",
    case="a_hook_on_tied_weights",
)
@sees(
    "turns: buffers that each run changes pass",
    "InterleavedWindow.entered",
    "            if buffer._version != version:\n",
    "            if False:\n",
    case="a_buffer_that_later_steps_change",
)
@sees(
    "turns: weights that are changed within a window pass",
    "InterleavedWindow._check_tensors",
    "if seen != was:",
    "if seen[0] != was[0]:",
    case="weights_that_a_hook_changes_between",
)
@pytest.mark.parametrize("name", TOLD)
def test_what_would_differ_is_told(name):
    with pytest.raises(AssertionError, match=TOLD[name][1]):
        run_distributed(raise_one, 2, name)


def leave(sizes: dict[str, Any] | None, batch: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Skips()
    trainer_of(sizes, max_steps=-1, max_epochs=3, gradient_clip_val=None).fit(module, models.loader(batch, length=9, count=64))
    return gather_weights(module)


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {"data_parallel": "fsdp"}),
        rest(4, {"data_parallel": "hsdp", "fsdp": {"shard_size": 2}}),
        rest(4, {**TURNS, "data_parallel": "fsdp"}),
    ],
    ids=["fsdp", "hsdp", "fsdp-turns"],
)
def test_gradients_of_a_window_that_was_left_do_not_come_to_the_next(world, sizes):
    expected = leave(None, 4)
    for found in run_distributed(leave, world, sizes, 1 if world == 4 and "pp" not in sizes else 2):
        assert max(float((found[name] - x).abs().max()) for name, x in expected.items()) <= 1e-9


class Hooked(Deep):
    def __init__(self) -> None:
        super().__init__()
        weight = self.model.blocks[0].mlp.up.weight
        weight.register_hook(lambda grad: grad + 0.1)


def hook_over_replicas() -> None:
    trainer_of(TURNS).fit(Hooked(), loader())


@sees(
    "turns: DDP's backward runs hooks once more",
    "Stages._run_window",
    "            refuse_hooks_of_reduced(record_of(self._env.module), self.reduced)\n",
    "",
)
def test_hooks_that_ddp_would_run_twice_are_told():
    with pytest.raises(AssertionError, match=r"blocks\.0\.mlp\.up\.weight: it has a gradient hook of yours, which virtual_pp"):
        run_distributed(hook_over_replicas, 4)
