"""``compile: true``: each block one graph, and what it computes is what one process computes."""

from __future__ import annotations

import re
import shutil
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from byte_gpt import Block
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

import lightning_seqpar
from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.strategy.model_setup import describe_compiled
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import dropping, models
from tests.helpers.fit import fit, quiet_trainer
from tests.mutants import sees

EAGER = {"compile": True, "compile_options": {"backend": "aot_eager"}}
"""Graphs are traced, and their operations run as they are: fast to make, and nothing but the graphs differs."""

Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]

CASES: dict[str, tuple[Case, dict[str, int]]] = {
    # Nine positions, which do not divide by two.
    "padded, accumulation, clipping": (("GPT", {}, {}, {"steps": 2, "accumulate": 2, "clip": 0.05}), {"Block": 1}),
    "without sp": (("GPT", {}, {"sp": False}, {"steps": 2}), {"Block": 1}),
    "dynamo's own backend": (("GPT", {}, {"compile_options": {"backend": "eager"}}, {"steps": 2}), {"Block": 1}),
    # One graph for the first length; then one for any that is odd, and one for any that is even.
    "many lengths": (("Cropped", {}, {}, {"steps": 6}), {"Block": 3}),
    "Conv1D, set": (("HuggingFace", {"family": "gpt2"}, {}, {"steps": 2}), {"GPT2Block": 1}),
    "a view of the config": (("HuggingFace", {"family": "phi3"}, {}, {"steps": 2}), {"Phi3DecoderLayer": 1}),
    "local heads": (("Zoo", {"kind": "bias_table"}, {}, {"steps": 2}), {"PreNorm": 1}),
    "local width": (("Zoo", {"kind": "nano"}, {}, {"steps": 2}), {"PreNorm": 1}),
    "full width": (("Zoo", {"kind": "full_norm"}, {}, {"steps": 1}), {"PreNorm": 1}),
    "whole": (("Zoo", {"kind": "hard_coded"}, {}, {"steps": 1}), {"PreNorm": 1}),
    "copy": (("Zoo", {"kind": "encoder_decoder"}, {}, {"steps": 2}), {"PreNorm": 1, "CrossBlock": 1}),
    "MultiheadAttention": (("Encoder", {"batch_first": False}, {}, {"steps": 2}), {"TransformerEncoderLayer": 1}),
    # The graph is chosen by what the forward saw, the default dtype too, which a backward does not have.
    "checkpointed blocks": (("Recomputed", {}, {}, {"steps": 2}), {"Block": 1}),
}


class Graphs(Callback):
    """What was traced of each class of blocks, and how often torch broke a graph."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        record = record_of(pl_module)
        self.traced = dict(record.graphs.traced) if record is not None else {}
        self.breaks = sum(counters["graph_break"].values())


def fit_compiled(world: int, cases: list[Case]) -> list[tuple[Trace, dict[str, int], int]]:
    out = []
    for model, args, strategy, more in cases:
        torch._dynamo.reset()
        counters.clear()
        graphs = Graphs()
        options = {"tp": world, **EAGER, **strategy}
        trace = fit(model, args, world=world, strategy=options, callbacks=[graphs], **more)
        out.append((trace, graphs.traced, graphs.breaks))
    return out


def check(world: int, cases: dict[str, tuple[Case, dict[str, int]]]) -> None:
    results = run_distributed(fit_compiled, world, world, [case for case, _ in cases.values()], timeout=300)
    for at, (name, ((model, args, _, more), traced)) in enumerate(cases.items()):
        expected = fit(model, args, **more)
        for rank in results:
            trace, graphs, breaks = rank[at]
            compare(expected, trace).raise_if_failed()
            assert (graphs, breaks) == (traced, 0), name


@sees(
    "compiled: a sum in which each rank's addend counts for all",
    "GraphTokens.start_sum",
    "            return GraphAllReduce(addend, self.group)",
    "            return addend",
)
@sees(
    "compiled: padding not trimmed behind a gather",
    "GraphTokens.whole_length",
    "self.group.size() - self.padding",
    "self.group.size()",
)
@sees(
    "compiled: a norm over the width without its gather",
    "functional:all_gather",
    "return GraphGather(x, dim, group, length).wait()",
    "return torch.cat([x] * group.size(), dim)",
)
@sees(
    "compiled: a graph for each module with a hook that is always called",
    "Application.hook_close",
    "always_call=not self.compiles",
    "always_call=True",
)
@sees(
    "compiled: a hook whose closure has the module's name",
    "make_shards",
    "_with_first(out, region.path.resume, name, refusal)",
    "_with_first(out, lambda x, _: region.path.resume(x, name), name, refusal)",
)
@sees(
    "compiled: columns that multiply by themselves",
    "products:_take_made_in_graph",
    "    del column.__dict__[_MADE]\n    return out",
    "    return out * 2",
)
@sees(
    "compiled: steps whose draws are watched run eagerly",
    "BlockGraphs._as_compiled",
    "            stack.enter_context(unseen_by_compiler())\n",
    "",
)
@sees(
    "compiled: a recompute under another default dtype",
    "BlockGraphs._as_compiled",
    "            elif dtype != self._dtype:\n",
    "            elif False:\n",
)
@sees(
    "compiled: examples of a graph's draws make saved tensors",
    "compiled_blocks:_draws",
    "with torch.no_grad(), mode, draws:",
    "with mode, draws:",
)
@sees(
    "compiled: a graph of ours is no reader of its parameters",
    "check_readers",
    "*vocab.READERS)), *compiled}",
    "*vocab.READERS))}",
)
def test_compiled_blocks_train_as_one_process_does():
    check(2, CASES)


def fit_16_bit(precision: str, options: dict[str, Any]) -> list[float]:
    torch._dynamo.reset()
    return fit("GPT", {}, world=2, strategy={"tp": 2, **options}, steps=4, precision=precision).losses


@sees(
    "compiled: an autocast is left, and never entered, to see whether it draws",
    "_Follower.follow",
    "            if gives and not any(",
    "            if not any(",
)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_compiled_blocks_compute_in_16_bits_what_others_do(precision):
    eager, compiled = (run_distributed(fit_16_bit, 2, precision, options)[0] for options in ({}, EAGER))
    assert compiled == pytest.approx(eager, rel=1e-3)


def warned_of_graphs() -> list[str]:
    trainer = quiet_trainer(
        devices=2, max_steps=10, strategy=SeqParallelStrategy(tp=2, compile=True, compile_options={"mode": "reduce-overhead"})
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(models.GPT(), models.loader(4, count=40))
    return [str(one.message) for one in caught if "CUDA graphs" in str(one.message)]


@sees("compiled: CUDA graphs that nobody captured", "BlockGraphs.begin_step", "and not _captured():", "and _captured():")
@pytest.mark.more
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU CUDA graphs may be captured")
def test_cuda_graphs_that_are_not_captured_are_told():
    first, _ = run_distributed(warned_of_graphs, 2, timeout=300)
    assert len(first) == 1
    assert "torch has captured none in 7 steps" in first[0]


@sees("compiled: a block that runs again knows no tokens", "FrameStack.begin_repeat", "self.current.tokens = tokens", "pass")
def test_compiled_blocks_run_again_by_the_same_graph():
    check(2, {f"{sp=}": (("GPT", {}, {"sp": sp, "recompute": "full"}, {"steps": 2}), {"Block": 1}) for sp in (True, False)})


@pytest.mark.matrix
def test_over_replicas_and_with_shared_heads():
    fsdp = {"tp": 2, "data_parallel": "fsdp"}
    check(
        4,
        {
            "dp 2": (("GPT", {}, {"tp": 2}, {"steps": 2, "accumulate": 2}), {"Block": 1}),
            "dp 2, no sp": (("GPT", {}, {"tp": 2, "sp": False}, {"steps": 2}), {"Block": 1}),
            "fsdp": (("GPT", {}, fsdp, {"steps": 2, "accumulate": 2}), {"Block": 1}),
            "fsdp, recomputed": (("GPT", {}, {**fsdp, "recompute": "full"}, {"steps": 2}), {"Block": 1}),
            "tp 4, shared kv heads": (("HuggingFace", {"family": "llama"}, {}, {"steps": 2}), {"LlamaDecoderLayer": 1}),
        },
    )


@pytest.mark.matrix  # compiling the same graphs to C++ takes most of a minute
@pytest.mark.skipif(
    all(shutil.which(name) is None for name in ("g++", "clang++", "c++")), reason="inductor needs a C++ compiler"
)
def test_inductor():
    check(2, {"inductor": (("GPT", {}, {"compile_options": {}}, {"steps": 2}), {"Block": 1})})


# ---- every loop, and the way back ------------------------------------------------------------------------------------


def loops(compiled: bool) -> dict[str, Any]:
    """Validate before, within and behind training, predict, and undo it all."""
    strategy = SeqParallelStrategy(tp=2, **(EAGER if compiled else {}))
    module = models.Watched()
    kinds = [type(part) for part in module.modules()]
    trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=4, limit_val_batches=2, val_check_interval=2)
    trainer.fit(module, models.loader(8, length=8), models.loader(8, length=9))
    out: dict[str, Any] = {"val": float(trainer.callback_metrics["val"])}
    out["predicted"] = torch.cat(trainer.predict(module, models.loader(4, count=8)))
    record = record_of(module)
    out["traced"] = dict(record.graphs.traced) if record.graphs is not None else {}
    out["summary"] = describe_compiled(record)
    lightning_seqpar.unshard(module)
    out["as written"] = [type(part) for part in module.modules()] == kinds
    out["weights"] = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return out


@pytest.mark.more
def test_evaluation_and_the_way_back():
    eager, compiled = (run_distributed(loops, 2, one)[0] for one in (False, True))
    # Training, and evaluation without gradients; and each again for lengths that vary.
    assert compiled["traced"]["Block"] <= 6
    assert compiled["as written"]
    assert "compile: 2 blocks, one graph for each kind" in compiled["summary"]
    assert compiled["val"] == pytest.approx(eager["val"], abs=1e-12)
    assert torch.equal(compiled["predicted"], eager["predicted"])
    torch.testing.assert_close(compiled["weights"], eager["weights"], rtol=0, atol=1e-9)


def without_tp(dp: int) -> tuple[Trace, bool]:
    trace = fit("GPT", {}, world=dp, strategy={"tp": 1, **EAGER}, steps=2)
    module = models.GPT()
    trainer = quiet_trainer(devices=dp, strategy=SeqParallelStrategy(tp=1, **EAGER), max_steps=1)
    trainer.fit(module, models.loader(4))
    return trace, type(module.model.blocks[0]) is Block


def without_blocks() -> None:
    trainer = quiet_trainer(devices=1, strategy=SeqParallelStrategy(tp=1, compile=True), max_steps=1)
    trainer.fit(BoringModel())


@sees("compiled: without tp the blocks stay compiled", "ModelSetup.undo", "            change.undo()\n", "            pass\n")
def test_without_tp_the_repeated_blocks_are_compiled():
    (trace, undone), _ = run_distributed(without_tp, 2, 2)
    compare(fit("GPT", {}, steps=2), trace).raise_if_failed()
    assert undone
    with pytest.raises(RankFailedError, match=r"ValueError: compile=True with tp=1: .* no list of repeated blocks was found"):
        run_distributed(without_blocks, 1)


# ---- random draws ----------------------------------------------------------------------------------------------------


class Noted(nn.Dropout):
    """Keeps what it kept."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.kept = (out != 0).detach()
        return out


class Breaking(nn.Module):
    """Asks a number of its input, which no graph can."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().sum()) > 1e9 else x


class InPlace(nn.Module):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


class Dropping(dropping.Dropping):
    """Drops out what is dealt out, and on request whole activations, or samples as stochastic depth does."""

    def __init__(self, before: float = 0.0, path: bool = False, breaks: bool = False, in_place: bool = False) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn.before = InPlace() if in_place else nn.Dropout(before)
            if not path:
                block.path = Breaking() if breaks else nn.Identity()
        for module in self.modules():
            if isinstance(module, dropping.Recorder):
                module.__class__ = Noted
        self.masks: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.masks.append({name: part.kept for name, part in self.named_modules() if isinstance(part, Noted)})
        return loss


def drop() -> tuple[list[dict[str, Tensor]], Tensor]:
    module = Dropping()
    L.seed_everything(5, verbose=False)
    data = DataLoader(TensorDataset(torch.randint(31, (24, 12))), batch_size=8)
    quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2, **EAGER), max_steps=3).fit(module, data)
    return module.masks, torch.rand(3)


@pytest.mark.more
def test_masks_are_shared_or_independent_as_the_activation_is():
    (masks, after), (others, after_other) = run_distributed(drop, 2)
    assert torch.equal(after, after_other)  # the replicated stream is where it is on the other rank
    for step, (mine, other) in enumerate(zip(masks, others, strict=True)):
        for name, kept in mine.items():
            spread = (dropping.P * (1 - dropping.P) / kept.numel()) ** 0.5
            assert abs(float(kept.double().mean()) - (1 - dropping.P)) < 5 * spread, name
            assert torch.equal(kept, other[name]) == (name == "drop"), name
            assert step == 0 or not torch.equal(kept, masks[step - 1][name]), name
        assert not torch.equal(mine["blocks.0.attn.probs"], mine["blocks.1.attn.probs"])


# ---- refusals --------------------------------------------------------------------------------------------------------


PLAN = {
    "base": "none",
    "rules": [
        {"pattern": "blocks.*", "style": "blocks"},
        {"pattern": "blocks.*.attn", "style": "gather"},
        {"pattern": "blocks.*.attn", "style": "set", "divide": ["heads"]},
        {"pattern": "blocks.*.attn.qkv", "style": "column", "segments": 3, "units": "heads"},
        {"pattern": "blocks.*.attn.proj", "style": "row", "units": "heads"},
        {"pattern": "blocks.*.up", "style": "gather"},
        {"pattern": "blocks.*.up", "style": "column"},
        {"pattern": "blocks.*.down", "style": "row"},
        {"pattern": "norm", "style": "exit"},
    ],
}
REFUSALS = {
    "experts": ("Zoo", {"kind": "list_moe"}, {}, "by the style 'reduce', which has no compiled form"),
    "a parameter": ("Zoo", {"kind": "dense_moe"}, {}, "w1: compile=True, but the style 'column' on a parameter"),
    "whole activations": ("Dropping", {"before": 0.1}, {}, "blocks.0: compile=True: dropout draws for whole activations"),
    # With a plan of its own: one that is found has no sequence parallelism here, since an eager run would be refused too.
    "stochastic depth": (
        "Dropping",
        {"path": True},
        {"plan": PLAN, "self_check": False},
        "blocks.0: compile=True: bernoulli_ draws a tensor of shape [8, 1, 1]",
    ),
    "features without sp": ("Dropping", {}, {"sp": False}, "dropout draws for this rank's features, but without sequence"),
    "a change in place": (
        "Dropping",
        {"in_place": True},
        {"plan": PLAN, "self_check": False},
        "This view is the output of a function that returns multiple views",
    ),
    "a graph break": ("Dropping", {"breaks": True}, {}, "blocks.0: compile=True, but torch.compile can't make one graph"),
}


models.Dropping = Dropping


def refused() -> None:
    for model, args, strategy, says in REFUSALS.values():
        with pytest.raises(ValueError, match=re.escape(says)):
            fit(model, args, world=2, strategy={"tp": 2, **EAGER, **strategy}, steps=1)


@sees(
    "compiled: draws from the wrong stream",
    "check_draws",
    "        _Follower(region, first.fake_mode).follow(graph, given)\n",
    "        pass\n",
)
@sees(
    "compiled: a style that can't be traced let through",
    "refuse_untraceable",
    "        if (why := match.rule.unfit_to_trace(match.name, plan)) is not None:\n",
    "        if (why := match.rule.unfit_to_trace(match.name, plan)) is not None and False:\n",
)
def test_what_has_no_compiled_form_is_refused():
    run_distributed(refused, 2)
