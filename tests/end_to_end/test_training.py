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

PLANS = {
    "Direct": lambda: models.plan("", None),
    "InnerRecompute": lambda: models.plan(),
    "AttentionNorm": lambda: models.plan(),
    "LayerDropBehind": lambda: models.plan("model.stack.", None),
    "LayerDrop": lambda: models.plan("model.stack."),
}


def check(model: str, args: dict, world: int = 2, tp: int = 2, *, sp: bool = True, strategy=None, **kwargs) -> None:
    options = {"tp": tp, "sp": sp, **({"plan": PLANS[model]()} if model in PLANS else {}), **(strategy or {})}
    expected = fit(model, args, **kwargs)
    for trace in run_distributed(fit, world, model, args, world=world, strategy=options, **kwargs):
        compare(expected, trace).raise_if_failed()


@sees(
    "sync of a kept gradient counts it tp times",
    "GradSync._make_term",
    "partial.parameter.grad = whole.div_(share) if whole is partial.synced else whole / share",
    "partial.parameter.grad = whole",
    case="leak-2-sp",
)
@pytest.mark.parametrize("sp", [True, rest(False)], ids=["sp", "no-sp"])
@pytest.mark.parametrize(
    ("style", "world"), [("toggle", 4), ("leak", 2), rest("toggle", 2), rest("keep", 2), rest("keep", 4)]
)
def test_manual_optimization_with_two_optimizers(style, world, sp):
    # "toggle" leaves parameters out by turns; DDP must be told, as in stock Lightning.
    check(
        "ManualTwo",
        {"style": style},
        world,
        sp=sp,
        steps=12,
        strategy={"ddp": {"find_unused_parameters": style == "toggle"}},
    )


@sees(
    "a stack whose last block is left out ends on shards",
    "return_whole.hook",
    "        if any(isinstance(x, SeqPart) for x in leaves):\n",
    "        if False:\n",
    case="LayerDropBehind-True-2",
)
@sees(
    "a norm behind blocks that are all left out sees whole activations",
    "begin_on_shards.hook",
    "if not is_exit and not any(map(lies_over_tp, tree_leaves((args, kwargs)))):",
    "if not any(map(lies_over_tp, tree_leaves((args, kwargs)))):",
    case="LayerDrop-True-2",
)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sp", [True, rest(False)])
@pytest.mark.parametrize("model", ["LayerDrop", "LayerDropBehind"])
def test_blocks_that_are_left_out(model, sp, world):
    """The last block too, at which the region ends, and all of them."""
    check(model, {}, world, sp=sp, strategy={"ddp": {"find_unused_parameters": world == 4}})


@pytest.mark.parametrize("world", [rest(2), 4])
def test_a_scheduler(world):
    check("Scheduled", {}, world)


@sees(
    "shards tell their own shapes to configure_optimizers",
    "_WholeShapes.__torch_function__",
    "        if asked is None or found is None or not found.is_sharded:",
    "        if True:",
    case="2-2",
)
@sees("configure_optimizers sees our classes", "_as_own", "    module.__class__ = one.own\n", "    pass\n", case="2-2")
@pytest.mark.parametrize(("world", "tp"), [(2, 2), rest(4, 4), (4, 2)])
def test_rates_that_follow_from_shapes_and_classes(world, tp):
    check("FollowsShapes", {}, world, tp)


@pytest.mark.parametrize("thaw", [rest(False), True])
@pytest.mark.parametrize("sp", [True, False])
def test_frozen_parameters_and_a_thaw(sp, thaw):
    check("Frozen", {"thaw": thaw, "tied": False}, sp=sp, steps=10)


@sees(
    "thawed parameters are not averaged over replicas",
    "Steps._follow_training_parameters",
    "        if thawed or frozen:",
    "        if frozen:",
)
def test_a_thaw_and_a_freeze_with_replicas():
    check("Frozen", {"thaw": True, "tied": False}, 4, steps=10)


@sees(
    "a thaw voids the parts of gradients that wait to be summed",
    "Steps._follow_training_parameters",
    "self.wrap_ddp(init_sync=False)",
    "self.wrap_ddp()",
    case="2",
)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_thaw_between_accumulated_batches(tp):
    check("Frozen", {"thaw": True, "at": (4, 9), "tied": False}, 4, tp, steps=5, accumulate=3)


@sees(
    "a replaced gradient taken for a part",
    "GradSync._arrival.hook",
    "            if not partial.fired and kept is not None:\n",
    "            if not partial.fired and kept is not None and kept is partial.synced:\n",
    case="True-2",
)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sp", [True, rest(False)])
def test_gradients_that_the_user_puts_in_place_of_ours(sp, world):
    check("Edits", {}, world, sp=sp, steps=4, accumulate=2)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("length", [10, rest(8)])
def test_activation_checkpointing_of_blocks(reentrant, length):
    check("Recomputed", {"reentrant": reentrant}, length=length, steps=4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sp", [True, rest(False)])
def test_activation_checkpointing_inside_blocks(reentrant, sp):
    check("InnerRecompute", {"reentrant": reentrant}, sp=sp, steps=4)


@pytest.mark.parametrize("where", ["step", "block", "checkpoint"])
@pytest.mark.parametrize("who", ["offloads", rest("counts")])
def test_saved_tensor_hooks_of_somebody_else(who, where):
    check("UnderHooks", {"who": who, "where": where}, steps=4)


@pytest.mark.parametrize("sp", [True, rest(False)])
def test_repeated_and_aborted_forwards_without_an_owner(sp):
    check("Direct", {}, sp=sp, steps=4)
    check("Direct", {}, 4, sp=sp, steps=4)


@pytest.mark.parametrize("sp", [True, rest(False)])
def test_a_block_that_runs_three_times(sp):
    check("SharedBlock", {}, sp=sp, steps=4, strategy={"plan": "byte_gpt"})


@sees(
    "heads' norm unsynced without sp",
    "ResolvedPlan.layout_of",
    "return self.make_layout(parameter, reason, partial=in_gather)",
    "return self.make_layout(parameter)",
    case="False",
)
@pytest.mark.parametrize("sp", [True, False])
def test_a_norm_over_local_heads_is_partial_with_and_without_sp(sp):
    check("AttentionNorm", {}, sp=sp, steps=4)
    check("AttentionNorm", {}, 4, sp=sp, steps=4)


@sees(
    "order of the summed gradients from a set",
    "GradSync.__init__",
    "for name in layout if layout[name].is_partial]\n",
    "for name in set(layout) if layout[name].is_partial]\n",
)
def test_a_norm_behind_the_row_linear_is_right_with_sp_and_refused_without():
    check("AttentionNorm", {"behind": True}, sp=True, steps=4)
    with pytest.raises(RankFailedError, match=r"out_norm.weight is 2 times as large as it should be"):
        check("AttentionNorm", {"behind": True}, sp=False, steps=4)


def evaluate(args: dict, strategy: dict | None, kind: str) -> list:
    module = getattr(models, kind)(**args)
    options = (
        {"devices": dist.get_world_size(), "strategy": SeqParallelStrategy(**strategy)} if strategy else {"devices": 1}
    )
    trainer = quiet_trainer(**options)
    return torch.cat(trainer.predict(module, models.loader(8, count=32, length=9)))


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
    expected = evaluate(args, None, "PaddedEncoder")
    for out in run_distributed(evaluate, 2, args, {"tp": 2, "sp": sp}, "PaddedEncoder"):
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def activations(strategy: dict | None) -> list[Tensor]:
    """What a step returns that gives away what is between the blocks."""
    options = {"devices": 2, "strategy": SeqParallelStrategy(**strategy)} if strategy else {"devices": 1}
    return [
        x for batch in quiet_trainer(**options).predict(models.GivesShards(), models.loader(4, count=8)) for x in batch
    ]


def test_a_step_that_gives_activations_away_gives_all_of_them():
    expected = activations(None)
    for found in run_distributed(activations, 2, {"tp": 2, "plan": "byte_gpt"}):
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
            devices=1 if alone else 4,
            strategy=strategy,
            max_steps=6,
            accumulate_grad_batches=accumulate,
            callbacks=[recorder],
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
@pytest.mark.parametrize(
    "fields", [{"ddp": {"find_unused_parameters": True}}, {"data_parallel": "fsdp"}], ids=["ddp", "fsdp"]
)
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


def fit_raw(alone: bool) -> Trace:
    torch.manual_seed(0)
    recorder = ParityRecorder()
    strategy = "auto" if alone else SeqParallelStrategy(tp=2, regather=True, self_check=False)
    trainer = quiet_trainer(devices=1 if alone else 2, strategy=strategy, max_steps=6, callbacks=[recorder])
    trainer.fit(RawBehindToggled(), models.loader(8, count=24))
    return recorder.trace


@sees(
    "what an optimizer toggles off is hooked no more",
    "GradSync.flush",
    "            partial.is_done = not partial.parameter.requires_grad\n",
    "            if not partial.parameter.requires_grad:\n                partial.unhook()\n",
)
def test_a_raw_backward_behind_a_toggled_optimizer():
    expected = fit_raw(True)
    for found in run_distributed(fit_raw, 2, False):
        compare(expected, found).raise_if_failed()
