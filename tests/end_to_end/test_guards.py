"""What can't be done right is refused with a sentence, on every rank."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_seqpar import SeqParallelStrategy, grad_norm, unshard
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import ParityRecorder, compare
from tests.helpers import models, zoo
from tests.helpers.fit import fit, quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees


class L2(models.GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())


class QuietL2(models.GPT):
    """Touches one sharded weight with a sum that happens to be no part of the loss's value."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.model.blocks[0].mlp.up.weight
        return super().training_step(batch, batch_idx) + (weight - weight.detach()).sum()


class WritesGradient(models.GPT):
    """From the second step on a gain's gradient is written beside autograd, as some fused kernels do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        gain = self.model.blocks[0].norm1.weight
        gain.requires_grad_(batch_idx == 0)
        loss = super().training_step(batch, batch_idx)
        gain.requires_grad_(True)
        if batch_idx > 0:
            loss.register_hook(lambda grad: setattr(gain, "grad", torch.ones_like(gain)))
        return loss


class Broken(models.GPT):
    def __init__(self) -> None:
        super().__init__()
        block = self.model.blocks[0]
        forward = block.forward
        block.forward = lambda x: forward(x)[:, ::2]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).sum()


class BatchNormed(models.GPT):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[0].bn = nn.BatchNorm1d(16)


class Tied(models.GPT):
    """A norm inside the blocks is the norm at the end, outside (the exit is the last block)."""

    def __init__(self) -> None:
        super().__init__()
        self.model.norm.weight = self.model.blocks[0].norm1.weight


def train(module: str, strategy: dict[str, Any], **kwargs: Any) -> None:
    L.seed_everything(1, verbose=False)
    options = {"max_steps": 20, **kwargs}
    trainer = quiet_trainer(
        devices=dist.get_world_size(), strategy=SeqParallelStrategy(**{"tp": 2, "self_check": False, **strategy}), **options
    )
    made = globals()[module]() if module in globals() else getattr(models, module)()
    trainer.fit(made, models.loader(4, count=96))


class NormInLoss(models.GPT):
    """Touches a parameter that every rank holds whole, but whose gradient comes in parts."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 1e-2 * self.model.blocks[0].norm1.weight.abs().sum()


class HookedNorm(models.GPT):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[0].norm1.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


class LateClip(models.GPT):
    """Clips with torch's own function, but only at a step that no schedule expects."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.trainer.global_step == 18:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1e-3)


class FreeWeightInLoss(zoo.Zoo):
    """Its linears are Conv1D: the model's own code may read their weights, but not the loss."""

    def __init__(self) -> None:
        super().__init__("configured")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 1e-9 * self.net.blocks[0].attn.c_attn.weight.norm()


class LateNormInLoss(NormInLoss):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (super() if batch_idx >= 16 else super(NormInLoss, self)).training_step(batch, batch_idx)


class ClipByCallback(L.Callback):
    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == 18:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)


class LateClipByCallback(models.GPT):
    def configure_callbacks(self) -> list[L.Callback]:
        return [ClipByCallback()]


class RowsByCallback(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == 18:
            weight = module.model.blocks[0].mlp.down.weight
            with torch.no_grad():
                weight.copy_(F.normalize(weight, dim=1))


class LateRows(models.GPT):
    """Makes rows of length 1 behind a step that no schedule expects, and behind no other."""

    def configure_callbacks(self) -> list[L.Callback]:
        return [RowsByCallback()]


class HiddenOptimizer(models.GPT):
    """Steps an optimizer that Lightning has never seen, behind each batch."""

    accumulate = 2

    def on_fit_start(self) -> None:
        self.trainer.accumulate_grad_batches = self.accumulate
        self.hidden = torch.optim.SGD(self.model.blocks[0].norm1.parameters(), lr=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        norm = {id(p) for p in self.model.blocks[0].norm1.parameters()}
        return torch.optim.SGD([p for p in self.parameters() if id(p) not in norm], lr=0.1)

    def on_train_batch_end(self, *args: Any) -> None:
        self.hidden.step()
        self.hidden.zero_grad()


class HiddenBehindUpdates(HiddenOptimizer):
    """And each batch has an update, for which all gradients were summed."""

    accumulate = 1


class HiddenMuon(HiddenOptimizer):
    """And one that mixes a weight's elements, of which a rank has a part."""

    def on_fit_start(self) -> None:
        self.hidden = torch.optim.Muon([self.model.blocks[0].mlp.up.weight], lr=0.1)


class CopiesForItsOptimizer(models.GPT):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.average = [copy.deepcopy(self.model)]
        return super().configure_optimizers()


class LooseParameter(models.GPT):
    """Norms whose scale is in no module, but in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.model.blocks:
            block.norm1 = LooseNorm(block.norm1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), *(block.norm1.scale[0] for block in self.model.blocks)], lr=0.2)


class LooseNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.scale = norm, [nn.Parameter(torch.ones(16, dtype=norm.weight.dtype))]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale[0]


class OtherValidation(models.Watched):
    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(models.tokens(seed=dist.get_rank()), batch_size=4)


class SometimesCross(zoo.CrossAttention):
    """Attends to its own input where it is given nothing else."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return super().forward(x, x if memory is None else memory)


class LateCrossModel(models.Blocks):
    """Attends to something else in a step that no schedule expects, and in no other."""

    def __init__(self) -> None:
        super().__init__(lambda: zoo.PreNorm(16, SometimesCross(16, 4), zoo.FeedForward(16, 32)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.memory = [self.embed(batch[0].flip(1))] if batch_idx == 17 else []
        return super().training_step(batch, batch_idx)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *self.memory)
        return x


CROSS = [
    {"pattern": "blocks.*", "style": "blocks"},
    {"pattern": "blocks.*.attn", "style": "gather"},
    {"pattern": "blocks.*.attn.q", "style": "column", "units": "heads"},
    {"pattern": "blocks.*.attn.kv", "style": "column", "segments": 2, "units": "heads"},
    {"pattern": "blocks.*.attn.o", "style": "row", "units": "heads"},
    {"pattern": "blocks.*.attn", "style": "set", "divide": ["heads"]},
]


NAMED = {"plan": "byte_gpt"}
CROSS_PLAN = {"base": "none", "rules": CROSS}
CASES = {
    "L2 in the loss": ("L2", {}, r"the loss differs across the ranks|reads it past its layer"),
    "a weight in the loss": ("QuietL2", {}, r"mlp.up.weight: it is sharded, and \w+ in the loss reads it past its layer"),
    "a weight that the model's own code reads in the loss": (
        "FreeWeightInLoss",
        {},
        r"c_attn.weight: it is sharded, and \w+ reads it outside the sequence region, where it sees a part",
    ),
    "gradient written by hand": (
        "WritesGradient",
        {},
        r"blocks.0.norm1.weight: a gradient arrived but the hook .* did not fire",
    ),
    "sequence changes": (
        "Broken",
        {},
        r"model.blocks.0: it returned a tensor of shape \[\d, 3, 16\], .* a shard has 5 of 10 positions at dim 1",
    ),
    "batch norm": (
        "BatchNormed",
        {"plan": models.plan()},
        r"model.blocks.0.bn: a BatchNorm1d mixes positions.* untried: \{pattern: model.blocks.\*.bn, style: whole\}",
    ),
    "tied across the region": (
        "Tied",
        {"plan": models.plan(exit_at=None)},
        r"are one tied parameter, used both inside and outside",
    ),
    "a user's hook on a norm": ("HookedNorm", {}, r"norm1.weight: it has a gradient hook of yours"),
    "torch's clipping, late": ("LateClip", {}, r"clipped by torch.nn.utils.clip_grad_norm_"),
    "torch's clipping in a callback, late": ("LateClipByCallback", {}, r"clipped by torch.nn.utils.clip_grad_norm_"),
    "rows normalised by a callback, late": ("LateRows", {}, r"mlp.down.weight: .*takes 'vector_norm' of this rank's part"),
    "a norm in the loss, late": (
        "LateNormInLoss",
        {"check_every": 9},
        r"norm1.weight: AbsBackward0 reads it outside the sequence region",
    ),
    "an unknown optimizer steps": ("HiddenOptimizer", {}, r"norm1.weight: it was updated before its gradient was summed"),
    "an unknown optimizer that mixes elements steps": ("HiddenMuon", {}, r"Muon needs whole matrices, and is stepped apart"),
    "a copy in configure_optimizers": ("CopiesForItsOptimizer", {}, r"configure_optimizers runs or copies a \w+ whose weights"),
    "a parameter of no module": (
        "LooseParameter",
        {},
        r"a parameter of shape \[16\] that is none of the model's \(register it in its module\): every rank holds it whole, but",
    ),
    "validation data by rank": ("OtherValidation", NAMED, r"read different validation batches \(checksums"),
    "memory not gathered, late": (
        "LateCrossModel",
        {"plan": CROSS_PLAN},
        r"attn.kv: its input depends on a whole activation that was not",
    ),
    "family of another model": ("GPT", {"plan": "torch_encoder_batch_first"}, r"the model has no module of class torch.nn"),
    "auto finds nothing": (
        "NoBlocks",
        {},
        r"no shipped plan fits NoBlocks, and inference stops at\n  NoBlocks: no repeated blocks found",
    ),
}


class CompiledTeacher(models.GPT):
    """Compiled, and none of what is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.compile(nn.Linear(4, 4).requires_grad_(False))


class NoBlocks(models.GPT):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(31, 16), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 31))


def test_compiled_modules_beside_the_plan_are_left_alone():
    run_distributed(train, 2, "CompiledTeacher", {"plan": models.plan()}, max_steps=1)


@sees(
    "optimizer made before the swap",
    "SeqParallelStrategy.setup",
    "        record = setup.shard(module)\n",
    (
        "        self.setup_optimizers(trainer) if env.fits else None\n        record ="
        " setup.shard(module)\n        self.setup_optimizers = lambda trainer: None\n"
    ),
    case="a copy in configure_optimizers",
)
@sees(
    "losses of a replica not compared",
    "Steps._before_backward",
    "                    check_loss(loss, self._env.groups)\n",
    "",
    case="L2 in the loss",
)
@sees(
    "batches of a replica not compared",
    "Steps._step",
    "            check_batch(batch, self._env.groups, self._env.device, loop)\n",
    "",
    case="validation data by rank",
)
@sees(
    "readers of partial parameters not looked at",
    "Steps._before_backward",
    "                    check_readers(loss, record)\n",
    "",
    case="a weight in the loss",
)
@sees(
    "hooks are watched where checks are due alone",
    "_Profile.__missing__",
    "        if has_code:\n",
    "        if has_code and self._trainer.global_step <= 16:\n",
    case="rows normalised by a callback, late",
)
@sees(
    "columns are looked at where checks are due alone",
    "Observers.column_begins",
    "        check_ancestry(x,",
    "        self.schedule.walks_graphs and check_ancestry(x,",
    case="memory not gathered, late",
)
@sees(
    "ancestry of a column's input not looked at",
    "Observers.column_begins",
    "check_ancestry(x, self._frames.current.sources, module)",
    "pass",
    case="memory not gathered, late",
)
@sees(
    "a weight that the model's own code reads may be in the loss",
    "check_readers",
    "if layout.is_sharded and layout.free and record.on_shard(layout.name)",
    "if False",
    case="a weight that the model's own code reads in the loss",
)
@sees(
    "an optimizer that nobody told of steps on shards",
    "Steps.watch",
    "        self._watching.callback(register_optimizer_step_pre_hook(self._refuse_unknown).remove)\n",
    "",
    case="an unknown optimizer that mixes elements steps",
)
@sees(
    "parameters of no module not compared",
    "check_replicated",
    '            names.append((what, "nothing is known of it"))\n',
    "            continue\n",
    case="a parameter of no module",
)
@sees(
    "a loss that begins to read a norm goes unseen",
    "WatchSchedule.is_due_at",
    " or (self._every > 0 and step % self._every == 0)",
    "",
    case="a norm in the loss, late",
)
@sees(
    "clipping in hooks goes unseen between due steps",
    "Steps.note_hooks",
    "or any(is_overridden(hook, module) for hook in own)",
    "or False",
    case="torch's clipping, late",
)
@sees(
    "clipping in callbacks goes unseen between due steps",
    "Steps.note_hooks",
    "or any(_may_change_gradients(each) for each in callbacks)",
    "or False",
    case="torch's clipping in a callback, late",
)
@pytest.mark.core
@pytest.mark.parametrize("case", CASES)
def test_refused(case):
    module, strategy, says = CASES[case]
    with pytest.raises(RankFailedError) as told:
        run_distributed(train, 2, module, strategy, timeout=30)
    message = str(told.value)
    assert message.startswith("2 of 2 ranks failed"), message[:400]
    assert re.search(says, message, re.DOTALL), message[:1500]


def test_an_unknown_optimizer_behind_updates_steps_on_whole_gradients():
    model = "end_to_end.test_guards:HiddenBehindUpdates"
    for trace in run_distributed(fit, 2, model, {}, world=2, strategy={"tp": 2}, steps=3):
        compare(fit(model, {}, steps=3), trace).raise_if_failed()


def start_apart() -> tuple[bool, bool]:
    """Every rank builds the model from a seed of its own."""
    torch.manual_seed(dist.get_rank())
    module = models.GPT(seed=100 + dist.get_rank())
    module.register_buffer("seen", torch.tensor(float(dist.get_rank())))
    # DDP itself broadcasts buffers over dp, and gloo does not know these types.
    unusual = (torch.int16, torch.complex64) if dist.get_world_size() == 2 else ()
    for dtype in (torch.bool, torch.bfloat16, *unusual):
        module.register_buffer(f"buffer_{dtype}".replace(".", "_"), torch.full((3,), dist.get_rank()).to(dtype))
    recorder = ParityRecorder()
    world = dist.get_world_size()
    trainer = quiet_trainer(devices=world, strategy=SeqParallelStrategy(tp=2), max_steps=2, callbacks=[recorder])
    trainer.fit(module, models.loader(2, count=64))
    weights = [None] * world
    dist.all_gather_object(weights, recorder.trace.weights)
    buffers = [buffer for name, buffer in module.named_buffers() if name.startswith(("seen", "buffer_"))]
    return (
        all(torch.equal(w[n], weights[0][n]) for w in weights for n in weights[0]),
        len(buffers) == 3 + len(unusual) and all(not buffer.any() for buffer in buffers),
    )


@sees("replicas start apart", "ModelSetup.shard", "        self._make_replicas_equal(module)\n", "")
def test_replicas_that_start_apart_are_made_equal_from_the_first_rank():
    for world in (2, 4):
        assert run_distributed(start_apart, world) == [(True, True)] * world


class KnowsNorms(zoo.Zoo):
    """Of two kv heads, which four ranks share; its optimizer is given no gradient of the first norms."""

    KINDS = (1.0, 2.0, float("inf"))

    def __init__(self) -> None:
        super().__init__("gqa_shared")
        self.told: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for n, p in self.named_parameters() if "ln1" not in n], lr=1e-3)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.told += [float(grad_norm(self, kind)) for kind in self.KINDS]


def norms_of_gradients(tp: int) -> list[float]:
    world, module = dist.get_world_size(), KnowsNorms()
    trainer = quiet_trainer(devices=world, strategy=SeqParallelStrategy(tp=tp), max_steps=1)
    trainer.fit(module, models.loader(8 // (world // tp)))
    return module.told


@sees(
    "grad_norm of gradients that no optimizer is given",
    "Steps.sync_gradients",
    "None if automatic or optimizer is None else",
    "None if optimizer is None else",
    case="2-2",
)
@sees(
    "no largest gradient where a rank counts none of a tensor",
    "global_grad_norm.power",
    "grad if grad.numel() else grad.new_zeros(1)",
    "grad",
    case="4-4",
)
@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 4), rest(4, 2)])
def test_grad_norm_is_the_norm_of_the_gathered_gradient(world, tp):
    """At tp 4 a head's second holder counts none of it, not even its largest."""
    whole = KnowsNorms().double()
    whole.training_step(next(iter(models.loader(8))), 0).backward()
    grads = [parameter.grad for parameter in whole.parameters() if parameter.grad is not None]
    expected = [torch.nn.utils.get_total_norm(grads, kind).item() for kind in KnowsNorms.KINDS]
    for told in run_distributed(norms_of_gradients, world, tp):
        assert told == pytest.approx(expected, rel=1e-12)


def fit_unchecked_then_by_others() -> None:
    """By a plan that mixes rows of q, k and v."""
    rules = {"rules": [{"pattern": "model.blocks.*.attn.qkv", "style": "column"}]}
    module = models.GPT()

    def train(strategy: Any) -> None:
        quiet_trainer(devices=2, strategy=strategy, max_steps=1).fit(module, models.loader(4))

    train(SeqParallelStrategy(tp=2, plan=rules, self_check=False))
    with pytest.raises(RuntimeError, match=r"still sharded by an earlier strategy, and DDPStrategy would train"):
        train("ddp")
    with pytest.raises(ValueError, match="self_check: with the plan"):
        train(SeqParallelStrategy(tp=2, plan=rules))


@sees(
    "a model that was not checked is used by a strategy that checks",
    "ModelSetup.shard",
    "(self._env.groups.topology, config, ",
    '(self._env.groups.topology, config.model_copy(update={"self_check": True}), ',
)
def test_a_second_strategy_checks_what_the_first_did_not_and_another_does_not_train_the_shards():
    run_distributed(fit_unchecked_then_by_others, 2)


class Reshuffled(models.GPT):
    """Reads the same samples on all ranks in the first epoch, its rank's own order in the second."""

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(dist.get_rank() * self.trainer.current_epoch)
        return DataLoader(models.tokens(68), batch_size=4, sampler=torch.randperm(68, generator=generator).tolist())


def worker_reshuffled():
    trainer = quiet_trainer(
        devices=2,
        strategy=SeqParallelStrategy(tp=2, timeout=60),
        max_steps=31,  # ends before the run's next due step, 32
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(Reshuffled())


@sees(
    "batches compared by the run's steps alone", "Steps._step", "if schedule.walks_graphs and", "if schedule.is_due(loop) and"
)
def test_another_order_in_a_later_epoch_is_seen_at_its_first_batch():
    with pytest.raises(RankFailedError, match="read different training batches"):
        run_distributed(worker_reshuffled, 2)


class Pooling(models.GPT):
    """Keeps the mean of what a module of its first block makes aside, for predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[0].mlp.register_forward_hook(self.pool)

    def pool(self, module: Any, args: Any, out: torch.Tensor) -> None:
        self.pooled = out.detach().mean(1)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.model(batch[0])
        return self.pooled


class Raw(models.GPT):
    """Manual optimization past ``manual_backward``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss


class ThawsInside(models.GPT):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[1].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.model.blocks[1].requires_grad_(True)
        return super().training_step(batch, batch_idx)


class Dead(models.GPT):
    """Has a parameter that the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.dead = torch.nn.Parameter(torch.zeros(3))


REPLICAS = {  # what is trained on two replicas, and what is told
    "backward": (Raw, "differs between the replicas: it came past the reduction over dp. Call self.manual_backward"),
    "thaw": (ThawsInside, r"a parameter began to train within a step, where the reduction over replicas \(dp > 1\) does not"),
    "dead": (
        Dead,
        "differs between the replicas, and dead got none: the reduction over dp waits for what the loss"
        r".*Set ddp=\{'find_unused_parameters': True\}",
    ),
}


def train_replicas() -> dict[str, str]:
    told = {}
    for how, (make, _) in REPLICAS.items():
        trainer = quiet_trainer(devices=4, strategy=SeqParallelStrategy(tp=2), max_steps=2)
        with pytest.raises(RuntimeError) as caught:
            trainer.fit(make(), models.loader(4, length=8, count=32))
        told[how] = str(caught.value)
    return told


@sees(
    "gradients of replicas not compared",
    "Steps.check_step",
    "            self._comparisons.add(check_reduced(parameters, self._env.module, self._env.groups))\n",
    "",
)
def test_gradients_that_replicas_do_not_share_are_refused():
    for told in run_distributed(train_replicas, 4):
        for how, (_, says) in REPLICAS.items():
            assert re.search(says, told[how], re.DOTALL), told[how]


class Switches(models.GPT):
    """A block begins (or ceases) to train at some batch, in front of the step or inside."""

    def __init__(self, at: int, on: bool, inside: bool) -> None:
        super().__init__()
        self.at, self.on, self.inside = at, on, inside
        self.model.blocks[1].requires_grad_(not on)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at and not self.inside:
            self.model.blocks[1].requires_grad_(self.on)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == self.at and self.inside:
            self.model.blocks[1].requires_grad_(self.on)
        return super().training_step(batch, batch_idx)


SWITCHES: dict[str, tuple[int, dict[str, Any], str]] = {  # tp, the module's arguments, what is told
    "freeze": (2, {"at": 3, "on": False, "inside": False}, "a parameter froze between batches"),
    "freeze, replicas alone": (1, {"at": 1, "on": False, "inside": False}, "a parameter froze between batches"),
    "freeze at a row's begin": (2, {"at": 2, "on": False, "inside": False}, "trained"),
    "freeze inside": (2, {"at": 3, "on": False, "inside": True}, "a parameter ceased to train within a step"),
    "thaw": (2, {"at": 3, "on": True, "inside": False}, "trained"),
    "freeze, unused": (2, {"at": 3, "on": False, "inside": False}, "trained"),
    "thaw, unused": (2, {"at": 3, "on": True, "inside": False}, "a parameter began to train between batches"),
}


def switch_between() -> dict[str, str]:
    told = {}
    for case, (tp, arguments, _) in SWITCHES.items():
        strategy = SeqParallelStrategy(tp=tp, ddp={"find_unused_parameters": "unused" in case})
        trainer = quiet_trainer(devices=4, strategy=strategy, max_steps=3, accumulate_grad_batches=2)
        try:
            trainer.fit(Switches(**arguments), models.loader(4, length=8, count=128))
            told[case] = "trained"
        except RuntimeError as error:
            told[case] = str(error)
    return told


@sees(
    "a gradient frozen before the replicas have summed it",
    "Steps._follow_training_parameters",
    "        if (lost or (thawed and ddp.find_unused_parameters)) and",
    "        if False and",
)
def test_switches_between_accumulated_batches_are_refused_where_replicas_would_drift_apart():
    for told in run_distributed(switch_between, 4):
        for case, (_, _, expected) in SWITCHES.items():
            assert told[case].startswith(expected), case


class CopiesLate(models.GPT):
    def on_fit_start(self) -> None:
        self.average = copy.deepcopy(self.model)


def copy_late(folder: str) -> tuple[list[str], bool]:
    module, told = CopiesLate(), []
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), max_steps=1)
    trainer.fit(module, models.loader(4))
    for use in (lambda: trainer.save_checkpoint(f"{folder}/copy.ckpt"), lambda: unshard(module)):
        with pytest.raises(RuntimeError) as caught:
            use()
        told.append(str(caught.value))
    del module.average
    copied = copy.deepcopy(unshard(module).model)
    return told, all(torch.equal(a, b) for a, b in zip(copied.parameters(), module.model.parameters(), strict=True))


@sees(
    "copies of shards pass for the whole",
    "_Swap.apply",
    "            plan.modules[name].__dict__[PART_KEY] = name\n",
    "            plan.modules[name].__dict__.pop(PART_KEY, None)\n",
)
def test_copies_of_shards_are_not_saved_as_the_whole(tmp_path):
    for told, equal in run_distributed(copy_late, 2, str(tmp_path)):
        assert all(one.startswith("average.tokens is a copy of model.tokens, made") for one in told)
        assert equal
    assert not list(tmp_path.iterdir())


class PoolsLate(Pooling):
    """Predicts with it in the middle alone, at a step at which no check is due."""

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch[0])
        return self.pooled if batch_idx == 17 else logits


class LosesLate(models.GPT):
    """From some step on the loss reads the mean of what the first block gives."""

    def __init__(self, since: int, frozen: bool = False) -> None:
        super().__init__()
        self.since = since
        self.model.blocks[0].mlp.register_forward_hook(self.pool)
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.ndim > 1 or not frozen)

    def pool(self, module: Any, args: Any, out: torch.Tensor) -> None:
        self.pooled = out.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * self.pooled if batch_idx >= self.since else loss


def train_late(folder: str, sp: bool, since: int, **kwargs: Any) -> tuple[str, int, list[str]]:
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(
        devices=2,
        strategy=SeqParallelStrategy(tp=2, sp=sp, self_check=False),
        max_steps=20,
        callbacks=[saving] if folder else [],
        enable_checkpointing=bool(folder),
    )
    told = "trained"
    try:
        trainer.fit(LosesLate(since, **kwargs), models.loader(2, length=8, count=40))
    except RuntimeError as error:
        told = str(error)
    return told, trainer.global_step, sorted(path.name for path in Path(folder).glob("*.ckpt"))


@sees(
    "losses do not ride along",
    "Steps._before_backward",
    "                self._sync.losses.note(loss)\n",
    "                pass\n",
    case="rides-19",
)
@pytest.mark.parametrize("since", [rest(16), 19])
@pytest.mark.parametrize("kind", [{}, {"frozen": True}], ids=["rides", "alone"])
def test_a_loss_that_begins_to_read_a_part_is_seen_behind_one_step(kind, since, tmp_path):
    for told, step, saved in run_distributed(train_late, 2, str(tmp_path), True, since, **kind):
        assert told.startswith("the loss differed across the ranks of one replica at the last step")
        assert step == since + 1
        assert len(saved) == since  # what the wrong step made is not


def train_unsaved_and_whole(folder: str) -> list[tuple[str, int]]:
    return [train_late("", True, 16)[:2], train_late(folder, False, 16)[:2]]


@sees(
    "losses of earlier steps are not read",
    "Steps.train",
    "            self._sync.begin_step()\n",
    "            self._sync.attach()\n",
)
def test_such_a_loss_is_seen_where_nothing_is_saved_and_may_read_what_is_whole(tmp_path):
    for (told, step), whole in run_distributed(train_unsaved_and_whole, 2, str(tmp_path)):
        assert (told[:16], step) == ("the loss differe", 17)
        assert whole == ("trained", 20)


def predict() -> list[str]:
    told = []
    for module, sp, batches in ((Pooling(), True, 1), (PoolsLate(), True, 20), (Pooling(), False, 1)):
        trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2, sp=sp, self_check=False))
        try:
            trainer.predict(module, models.loader(4, length=8, count=4 * batches))
            told.append("predicted")
        except RuntimeError as error:
            told.append(str(error))
    return told


@sees(
    "outputs behind the last due step pass",
    "Loops.end_evaluation",
    "        self._steps.outputs.check(self._env.groups, loop)\n",
    "",
)
def test_predictions_made_of_parts_are_refused_at_every_step():
    for told in run_distributed(predict, 2):
        assert [one[:55] for one in told[:2]] == ["what the predict step returns differs across the ranks "] * 2
        assert told[2] == "predicted"


def refused_overlaps() -> None:
    for fields in ({"tp": 2}, {"pp": 2}, {"data_parallel": "fsdp"}):
        module = models.GPT()
        module.model.head.weight = nn.Parameter(module.model.tokens.weight.data)
        with pytest.raises(ValueError, match="are two parameters in one memory"):
            quiet_trainer(devices=2, strategy=SeqParallelStrategy(**fields), max_steps=1, precision="32-true").fit(
                module, models.loader(4)
            )


@sees("parameters in one memory are cut", "ModelSetup.shard", "            refuse_overlaps(module)\n", "            pass\n")
def test_parameters_in_one_memory_are_refused_where_they_would_part():
    run_distributed(refused_overlaps, 2)
