"""Recompute by the strategy: equal to one process, and to the last bit to a run that keeps everything."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seqpar import SeqParallelStrategy, unshard
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.region.recompute import RecomputedForward
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import models, zoo
from tests.helpers.fit import fit, quiet_trainer
from tests.mutants import sees

LORA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HOW = ("none", "activations", "selective", "full")


class TwoLengths(models.Direct):
    """Two forwards of a step have shards of one length, and whole sequences of another."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        shorter = tokens  # 9 positions, and 10: shards of 5 at tp 2
        longer = torch.cat([tokens, tokens[:, :1]], 1)
        return sum(F.cross_entropy(self.run(one).flatten(0, 1), one.flatten()) for one in (shorter, longer))


class PairBlock(nn.Module):
    """Takes its activation and a table by name, and returns a pair; it is called with a tuple of tensors besides."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(16), nn.LayerNorm(16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, *, tables: tuple[Tensor, Tensor], shift: float) -> tuple[Tensor, Tensor]:
        h = self.n1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0] * tables[0] + shift * tables[1]
        x = x + self.down(F.gelu(self.up(self.n2(x))))
        return x, x.detach().mean()


class Pairs(models.Blocks):
    def __init__(self) -> None:
        super().__init__(PairBlock)
        self.register_buffer("tables", torch.rand(2, 16))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x, tables=(self.tables[0], self.tables[1]), shift=0.5)
        return x


zoo.TwoLengths, zoo.Pairs = TwoLengths, Pairs
UNPROVED: dict[str, Any] = {"self_check": False}
OWN = {"plan": models.plan(), **UNPROVED}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "accumulation": ("GPT", {}, {"loss_chunk": 7, "regather": False, **UNPROVED}, {"accumulate": 2, "clip": 0.05}),
    "torch's encoder": ("Encoder", {"batch_first": False, "mask": True}, {}, {}),
    "frozen": ("Frozen", {"thaw": True, "tied": False, "at": (1, 9)}, OWN, {}),
    "manual": ("ManualTwo", {"style": "leak"}, UNPROVED, {}),
    "two lengths": ("TwoLengths", {}, {"plan": models.plan("", None), **UNPROVED}, {}),
    "pairs": ("Pairs", {}, {}, {}),
    "own inside": ("InnerRecompute", {"reentrant": True}, OWN, {}),
    "offloaded": ("UnderHooks", {"who": "offloads", "where": "step"}, OWN, {}),
    "cache": ("HuggingFace", {"family": "llama", "use_cache": True}, {}, {}),
    "cross attention": ("HuggingFace", {"family": "t5"}, UNPROVED, {}),
    "adapters": ("Adapted", {"family": "llama", "targets": LORA}, UNPROVED, {}),
}
"""Of each: the model and its arguments, fields of the strategy, and how it is trained."""
CORE = ("accumulation", "frozen", "two lengths", "pairs", "cache")
REPLICAS = ("accumulation", "pairs", "adapters")


def fit_cases(names: tuple[str, ...], options: dict[str, Any]) -> dict[tuple[str, str], Trace]:
    """Every case, kept and recomputed, in one start of the ranks."""
    found = {}
    for name in names:
        model, args, strategy, training = CASES[name]
        for recompute in HOW:
            chosen = {**strategy, **options, "recompute": recompute}
            found[name, recompute] = fit(
                model, args, world=dist.get_world_size(), strategy=chosen, steps=2, length=9, **training
            )
    return found


@sees(
    "the head's gradient of the last chunk alone",
    "_ChunkGrads.add",
    "of_head[: rows.count] += d.t()",
    "of_head[: rows.count] = d.t()",
    case="tp2",
)
@sees(
    "recompute: a context that saves collectives",
    "RecomputedForward.__call__",
    "use_reentrant=False)",
    (
        "use_reentrant=False, context_fn=lambda:"
        " torch.utils.checkpoint.create_selective_checkpoint_contexts(lambda ctx, op, *a, **k:"
        ' torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE if op.namespace == "c10d" else'
        " torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE,"
        " allow_cache_entry_mutation=True))"
    ),
    case="tp2",
)
@sees(
    "recompute: the length of another call",
    "RecomputedCall.__init__",
    "            self._repeating = functools.partial(region.frames.repeating, frame.record, frame.tokens)\n",
    "            pass\n",
    case="tp2",
)
@pytest.mark.parametrize(
    ("world", "options", "names"),
    [
        (2, {"tp": 2}, CORE),
        pytest.param(2, {"tp": 2}, tuple(name for name in CASES if name not in CORE), marks=pytest.mark.more),
        pytest.param(2, {"tp": 2, "sp": False}, ("accumulation", "pairs", "own inside"), marks=pytest.mark.matrix),
        pytest.param(4, {"tp": 2}, REPLICAS, marks=pytest.mark.matrix),
        pytest.param(2, {"tp": 1}, REPLICAS, marks=pytest.mark.matrix),
        pytest.param(2, {"tp": 2, "sp": False}, tuple(CASES), marks=pytest.mark.matrix),
        pytest.param(4, {"tp": 4}, ("accumulation", "frozen", "pairs"), marks=pytest.mark.matrix),
    ],
    ids=["tp2", "tp2-others", "tp2-no-sp", "dp2-tp2", "dp2", "tp2-no-sp-all", "tp4"],
)
def test_a_recomputed_run_is_the_run(world, options, names):
    found = run_distributed(fit_cases, world, names, options, timeout=280.0)[0]
    for name in names:
        model, args, _, training = CASES[name]
        expected = fit(model, args, steps=2, length=9, **training)
        kept = found[name, "none"]
        for recompute in HOW:
            trace = found[name, recompute]
            compare(expected, trace).raise_if_failed()
            same = trace.losses == kept.losses and all(torch.equal(trace.weights[n], kept.weights[n]) for n in kept.weights)
            assert same, (name, recompute)


# ---- what became of the model --------------------------------------------------------------------------------------


class Counting(models.Watched):
    """Counts how often its blocks' attention runs, in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = {"training": 0, "validation": 0}
        for block in self.model.blocks:
            block.attn.qkv.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: Any) -> None:
        self.runs["training" if self.training else "validation"] += 1


def forwards_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def count(tp: int, recompute: str) -> dict[str, Any]:
    module, seen = Counting(), {}

    class During(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                module.runs.update(training=0, validation=0)  # the self-check ran copies of the module, not this
            seen["during"] = forwards_of(module)
            copied = copy.deepcopy(module.model.blocks[0])
            owner = vars(copied if recompute == "full" else copied.attn)["forward"]
            seen["copy"] = owner.module in copied.modules() and owner.module is not module.model.blocks[0]

    loader = models.loader(4, length=9, count=8)
    strategy = SeqParallelStrategy(tp=tp, recompute=recompute, plan=models.plan(), regather=True)
    trainer = quiet_trainer(
        devices=dist.get_world_size(), strategy=strategy, max_epochs=1, callbacks=[During()], num_sanity_val_steps=0
    )
    trainer.fit(module, loader, loader)
    seen["runs"] = dict(module.runs)
    if tp > 1:
        record = record_of(module)
        assert record is not None
        seen["recomputed"] = list(record.recomputed)
    unshard(module)
    seen["after"] = forwards_of(module)
    pickle.loads(pickle.dumps(module.model))
    module.train()
    module.training_step(next(iter(loader)), 0).backward()
    seen["plain"] = module.runs["training"] - seen["runs"]["training"]
    return seen


@sees(
    "recompute: nothing runs again", "recomputed", '    if recompute in ("none", "activations"):\n', "    if True:\n", case="1"
)
@sees(
    "recompute: without tp the modules are not given back",
    "ModelSetup.undo",
    "            change.undo()\n",
    "            pass\n",
    case="1",
)
@pytest.mark.parametrize("tp", [1, 2])
def test_modules_run_twice_while_they_train_and_are_given_back(tp):
    for recompute, name in (("full", "model.blocks.{}"), ("selective", "model.blocks.{}.attn")):
        seen = run_distributed(count, tp, tp, recompute)[0]
        names = [name.format(at) for at in (0, 1)]
        during = [one for one in seen["during"] if ".norm" not in one and ".mlp" not in one]
        assert during == names
        assert (recompute == "selective") == (seen["during"] != names)  # what `activations` runs again, too
        assert seen.get("recomputed", names) == names
        assert seen["copy"]
        # Two batches and two blocks: the columns run twice in training, and once where nothing needs a gradient.
        assert seen["runs"] == {"training": 8, "validation": 4}
        assert (seen["after"], seen["plain"]) == ([], 2)


def step_aside(reentrant: bool) -> list[str]:
    module = models.Recomputed(reentrant)
    strategy = SeqParallelStrategy(tp=2, recompute="selective", self_check=False)
    trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, models.loader(4, length=9, count=8))
    return [str(one.message) for one in told if "recompute=" in str(one.message)]


@sees(
    "recompute: inside another checkpoint too",
    "RecomputedForward.__call__",
    "if in_backward() or is_of_checkpoint(saved_tensor_hooks()):",
    "if False:",
    case="False",
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_beside_the_models_own_checkpointing_it_steps_aside(reentrant):
    told = run_distributed(step_aside, 2, reentrant)[0]
    assert len(told) == 1
    assert ".attn runs inside an activation checkpoint of the model's own" in told[0]


def refused(tp: int) -> str:
    plan = models.plan(extra=[{"pattern": "model.blocks.*.attn", "style": "whole"}])
    strategy = SeqParallelStrategy(tp=tp, recompute="selective", plan=plan)
    try:
        quiet_trainer(devices=dist.get_world_size(), strategy=strategy, max_steps=1).fit(models.GPT(), models.loader(4))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_without_an_attention_are_told(tp):
    said = run_distributed(refused, tp, tp)[0]
    assert said.startswith("recompute='selective': in the blocks (model.blocks.*) no module is the attention")
    assert RecomputedForward.__name__ not in said
