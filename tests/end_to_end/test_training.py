"""How people train: each against one process, through ``Trainer.fit``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import ParityRecorder, Trace, compare
from tests.helpers import models
from tests.helpers.fit import fit, quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees

PLANS: dict[str, Any] = {
    "SharedBlock": lambda: "byte_gpt",
    "Direct": lambda: models.plan("", None),
    "InnerRecompute": lambda: models.plan(),
    "AttentionNorm": lambda: models.plan(),
    "LayerDropBehind": lambda: models.plan("model.stack.", None),
    "LayerDrop": lambda: models.plan("model.stack."),
}
PARTLY_USED = {"ddp": {"find_unused_parameters": True}}
"""What DDP must be told of steps that leave parameters out, as in stock Lightning."""
HABITS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "two optimizers, toggled": ("ManualTwo", {"style": "toggle"}, {"steps": 12}, PARTLY_USED),
    "two optimizers that leave gradients to each other": ("ManualTwo", {"style": "leak"}, {"steps": 12}, {}),
    "two optimizers, gradients kept": ("ManualTwo", {"style": "keep"}, {"steps": 12}, {}),
    "some blocks left out, and all": ("LayerDrop", {}, {}, PARTLY_USED),
    "the last block left out": ("LayerDropBehind", {}, {}, PARTLY_USED),
    "rates by shape and class": ("FollowsShapes", {}, {}, {}),
    "frozen": ("Frozen", {"tied": False}, {"steps": 10}, {}),
    "thawed": ("Frozen", {"thaw": True, "tied": False}, {"steps": 10}, {}),
    "gradients exchanged": ("Edits", {}, {"accumulate": 2}, {}),
    "gradients edited by a hook that comes late": ("EditsLate", {}, {}, {}),
    "a norm over local heads": ("AttentionNorm", {}, {}, {}),
    "repeated and aborted forwards without an owner": ("Direct", {}, {}, {}),
    "a block that runs three times": ("SharedBlock", {}, {}, {}),
    "checkpointed blocks": ("Recomputed", {"reentrant": False}, {}, {}),
    "checkpointed blocks, reentrant": ("Recomputed", {"reentrant": True}, {}, {}),
    "checkpoints in blocks": ("InnerRecompute", {"reentrant": False}, {}, {}),
    "checkpoints in blocks, reentrant": ("InnerRecompute", {"reentrant": True}, {}, {}),
    "saved-tensor hooks around a step": ("UnderHooks", {"who": "offloads", "where": "step"}, {}, {}),
    "saved-tensor hooks in a block": ("UnderHooks", {"who": "offloads", "where": "block"}, {}, {}),
    "saved-tensor hooks in a checkpoint": ("UnderHooks", {"who": "offloads", "where": "checkpoint"}, {}, {}),
}
OVER_REPLICAS = [*HABITS][:1] + [*HABITS][2:12]
"""Those that are run with replicas too."""


def fit_habits(names: list[str], world: int, sp: bool) -> dict[str, Trace]:
    found = {}
    for name in names:
        model, args, options, more = HABITS[name]
        strategy = {"tp": 2, "sp": sp, "plan": PLANS[model]() if model in PLANS else "auto", **more}
        found[name] = fit(model, args, world=world, strategy=strategy, **{"steps": 4, **options})
    return found


@sees(
    "sync of a kept gradient counts it tp times",
    "GradSync._make_term",
    "partial.parameter.grad = whole.div_(share) if whole is partial.synced else whole / share",
    "partial.parameter.grad = whole",
    case="2-True",
)
@sees(
    "hooks that come late read partial gradients",
    "Steps._reads_each_backward",
    "if hook in vars(module) or",
    "if",
    case="2-True",
)
@sees(
    "a stack whose last block is left out ends on shards",
    "return_whole.hook",
    "        if any(isinstance(x, SeqPart) for x in leaves):\n",
    "        if False:\n",
    case="2-True",
)
@sees(
    "a norm behind blocks that are all left out sees whole activations",
    "begin_on_shards.hook",
    "if not is_exit and not any(map(lies_over_tp, tree_leaves((args, kwargs)))):",
    "if not any(map(lies_over_tp, tree_leaves((args, kwargs)))):",
    case="2-True",
)
@sees(
    "shards tell their own shapes to configure_optimizers",
    "_WholeShapes.__torch_function__",
    "if asked is not None and found is not None and found.is_sharded:",
    "if False:",
    case="2-True",
)
@sees("configure_optimizers sees our classes", "_as_own", "    module.__class__ = one.own\n", "    pass\n", case="2-True")
@sees(
    "a replaced gradient taken for a part",
    "GradSync._arrival.hook",
    "            if not partial.fired and kept is not None:\n",
    "            if not partial.fired and kept is not None and kept is partial.synced:\n",
    case="2-True",
)
@sees("heads' norm unsynced without sp", "ResolvedPlan.layout_of", ", partial=in_gather", "", case="2-False")
@pytest.mark.parametrize(("world", "sp"), [(2, True), (4, True), (2, False)])
def test_habits_of_training(world, sp):
    names = OVER_REPLICAS if world == 4 else [*HABITS]
    everywhere = run_distributed(fit_habits, world, names, world, sp, timeout=300)
    for name in names:
        model, args, options, _ = HABITS[name]
        expected = fit(model, args, **{"steps": 4, **options})
        for found in everywhere:
            report = compare(expected, found[name])
            assert report.ok, f"{name}: {report}"


def check(model: str, args: dict, world: int = 2, tp: int = 2, *, strategy=None, **kwargs) -> None:
    options = {"tp": tp, **({"plan": PLANS[model]()} if model in PLANS else {}), **(strategy or {})}
    expected = fit(model, args, **kwargs)
    for trace in run_distributed(fit, world, model, args, world=world, strategy=options, **kwargs):
        compare(expected, trace).raise_if_failed()


@sees(
    "thawed parameters are not averaged over replicas",
    "Steps._follow_training_parameters",
    "        if thawed or frozen:",
    "        if frozen:",
    case="2",
)
@sees(
    "a thaw voids the parts of gradients that wait to be summed",
    "Steps.wrap_ddp",
    'options["init_sync"] = False',
    'options["init_sync"] = True',
    case="2",
)
@pytest.mark.parametrize("tp", [2, rest(1)])
def test_a_thaw_between_accumulated_batches(tp):
    check("Frozen", {"thaw": True, "at": (4, 9), "tied": False}, 4, tp, steps=5, accumulate=3)


@sees(
    "order of the summed gradients from a set",
    "GradSync.__init__",
    "for name in layout if layout[name].is_partial and",
    "for name in set(layout) if layout[name].is_partial and",
)
def test_a_norm_behind_the_row_linear_is_right_with_sp_and_refused_without():
    check("AttentionNorm", {"behind": True}, steps=4)
    with pytest.raises(RankFailedError, match=r"out_norm.weight is 2 times as large as it should be"):
        check("AttentionNorm", {"behind": True}, strategy={"sp": False}, steps=4)


def predicted(kind: str, args: dict, strategy: dict | None) -> list:
    """What a model returns of each batch that it predicts on."""
    alone = {"devices": 1, "strategy": "auto"}
    options = alone if strategy is None else {"devices": 2, "strategy": SeqParallelStrategy(**strategy)}
    return quiet_trainer(**options).predict(getattr(models, kind)(**args), models.loader(8, count=32, length=9))


@sees(
    "padded positions of a packed encoder not zeroed",
    "ParallelTransformerEncoder.forward",
    "        out = out * kept\n",
    "",
    case="{}-True",
)
@pytest.mark.parametrize("sp", [True, rest(False)])
@pytest.mark.parametrize("args", [{}, {"norm_first": True}, {"batch_first": False}, {"norm": False}], ids=str)
def test_evaluation_of_a_padded_encoder_where_stock_torch_packs_the_batch(args, sp):
    expected = predicted("PaddedEncoder", args, None)
    for out in run_distributed(predicted, 2, "PaddedEncoder", args, {"tp": 2, "sp": sp}):
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_a_step_that_gives_activations_away_gives_all_of_them():
    expected = predicted("GivesShards", {}, None)
    for found in run_distributed(predicted, 2, "GivesShards", {}, {"tp": 2, "plan": "byte_gpt"}):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


class TwoNorms(nn.Module):
    """A norm, and a second one behind it while ``on``."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.on = first, nn.LayerNorm(16), True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.second(out) if self.on else out


class UsesByBatch(models.GPT):
    """A replica's batch decides whether it uses a norm among the shards; one process does what two replicas do, one by one."""

    def __init__(self, edits: bool) -> None:
        super().__init__(tied=False, optimizer="sgd")
        self.alone, self.edits = not dist.is_initialized(), edits
        self.model.blocks[1].norm2 = TwoNorms(self.model.blocks[1].norm2)
        models.perturb(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        halves = (tokens[0::2], tokens[1::2]) if self.alone else (tokens,)
        return torch.stack([self.loss_of(half) for half in halves]).mean()

    def loss_of(self, tokens: Tensor) -> Tensor:
        norms = self.model.blocks[1].norm2
        norms.on = bool(tokens[:, 0].sum() % 2)
        logits = self.model(tokens[:, :-1])
        norms.on = True
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def on_after_backward(self) -> None:
        for parameter in self.parameters() if self.edits else ():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.9


def use_by_batch(alone: bool, fields: dict[str, Any]) -> list[Trace]:
    traces = []
    for edits, accumulate in ((False, 1), (True, 2)):
        torch.manual_seed(0)
        recorder = ParityRecorder()
        strategy = "auto" if alone else SeqParallelStrategy(tp=2, self_check=False, regather=True, **fields)
        trainer = quiet_trainer(
            devices=1 if alone else 4, strategy=strategy, max_steps=6, accumulate_grad_batches=accumulate, callbacks=[recorder]
        )
        trainer.fit(UsesByBatch(edits), models.loader(8 if alone else 4, count=8 * 6 * accumulate))
        traces.append(recorder.trace)
    return traces


@sees(
    "what one replica used is taken for whole on the other",
    "GradSync._own_term",
    "        if not partial.fired and not is_new:",
    "        if not partial.fired:",
    case="ddp",
)
@sees(
    "kept gradients of a replica are whole in the reduction",
    "GradSync.begin_backward",
    "        if not self._has_replicas:\n",
    "        if not any(is_split(p.parameter) for p in self._partials):\n",
    case="ddp",
)
@pytest.mark.parametrize("fields", [{"ddp": {"find_unused_parameters": True}}, {"data_parallel": "fsdp"}], ids=["ddp", "fsdp"])
def test_a_norm_that_one_replica_uses(fields):
    expected = use_by_batch(True, {})
    for found in run_distributed(use_by_batch, 4, False, fields):
        for reference, trace in zip(expected, found, strict=True):
            report = compare(reference, trace)
            assert report.ok, report


class RawBehindToggled(models.ManualTwo):
    """The first optimizer is toggled, which freezes what the second trains; the second's backward is the user's own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        one, two = self.optimizers()

        def loss_of(model: nn.Module) -> Tensor:
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        self.toggle_optimizer(one)
        one.zero_grad()
        self.manual_backward(loss_of(self.first))
        one.step()
        self.untoggle_optimizer(one)
        two.zero_grad()
        loss = loss_of(self.second)
        loss.backward()
        two.step()
        return loss.detach()


@sees(
    "what an optimizer toggles off is hooked no more",
    "GradSync.flush",
    "            partial.is_done = not partial.parameter.requires_grad\n",
    "            if not partial.parameter.requires_grad:\n                partial.unhook()\n",
)
def test_a_raw_backward_behind_a_toggled_optimizer():
    check("end_to_end.test_training:RawBehindToggled", {}, strategy={"regather": True, "self_check": False}, steps=6)
