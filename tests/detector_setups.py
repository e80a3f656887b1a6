"""The models with which tests/detectors.py looks for who sees a fault: five for all, and those that some faults need."""

from __future__ import annotations

from typing import Any, NamedTuple


class Setup(NamedTuple):
    """A model of tests/helpers with its arguments, the number of ranks, and arguments of the strategy and the training.

    Attributes:
        refused: without a fault it does not train, since the fault is that of a guard, which is left out.
    """

    model: str
    arguments: dict[str, Any]
    world: int
    strategy: dict[str, Any]
    training: dict[str, Any]
    refused: bool = False


SETUPS = {
    "gpt": Setup("GPT", {}, 4, {"tp": 2, "regather": False}, {"accumulate": 2, "clip": 0.5}),
    "gqa": Setup("Zoo", {"kind": "mqa"}, 2, {"tp": 2, "recompute": "full", "loss_chunk": 4}, {}),
    "experts": Setup("Zoo", {"kind": "routed_moe"}, 4, {"tp": 2, "data_parallel": "fsdp"}, {"clip": 0.5}),
    "heads": Setup("Zoo", {"kind": "head_norm"}, 2, {"tp": 2, "sp": False}, {}),
    "tied": Setup("Zoo", {"kind": "tied"}, 2, {"tp": 2, "tile_mlp": 3}, {"accumulate": 2}),
}


def own(
    model: str, strategy: dict[str, Any] | None = None, refused: bool = False, world: int = 2, **more: Any
) -> Setup:
    """A model that a fault needs: two ranks, tp 2. ``training`` in ``more`` is how it is trained; the rest is its arguments."""
    training = more.pop("training", {})
    return Setup(model, more, world, {"tp": 2, **(strategy or {})}, training, refused)


def in_tests(name: str) -> Any:
    """What a module of tests calls so; it is imported here alone, since it imports the package."""
    from tests.helpers.fit import named_in_tests

    return named_in_tests(name)


def by_hand(kind: str) -> dict[str, Any]:
    return {"plan": in_tests(PRODUCTS + "plan_of")(kind)}


def given(name: str) -> dict[str, Any]:
    return {"plan": in_tests(GUARDS + name)}


def plan(prefix: str = "model.", exit_at: str | None = "norm", *extra: dict[str, Any]) -> dict[str, Any]:
    from tests.helpers import models

    return {"plan": models.plan(prefix, exit_at, list(extra))}


def overruled() -> dict[str, Any]:
    from tests.helpers import models

    wrong = {"pattern": "model.blocks.*.attn.qkv", "style": "column", "units": "n_head"}  # not in three parts
    return {"plan": {"base": "none", "rules": [wrong, *models.rules()]}}


def uses(use: str, **strategy: Any) -> Setup:
    return own("helpers.rare:Uses", strategy, use=use, training={"steps": 4})


USED = "end_to_end.test_hf_uses:Used"
GUARDS, PRODUCTS, TRAINING = "end_to_end.test_guards:", "end_to_end.test_products:", "end_to_end.test_training:"
BLOCKS = "model.blocks.*"
ALONE = {"ddp": {"find_unused_parameters": True}, "self_check": False}


def rare() -> dict[str, Setup]:
    """By the name of a fault that none of the models of :data:`SETUPS` shows: the one that does what it needs."""
    return {
        "ancestry of a column's input not looked at": own(GUARDS + "CrossModel", given("CROSS_PLAN"), True),
        "residual inside a gathering module not seen": own(
            GUARDS + "ResidualInside", {**given("RESIDUAL_PLAN"), "sp": False}, True
        ),
        "a replaced gradient taken for a part": own("Edits", training={"accumulate": 2}),
        "sync of a kept gradient counts it tp times": own("ManualTwo", style="keep", training={"steps": 4}),
        "wrong conjugate for the gather": own("Zoo", kind="latent"),
        "shared kv gradients not summed": own("Zoo", {"tp": 4}, world=4, kind="gqa_shared"),
        "a shared kv head counts twice in the norm": own(
            "Zoo", {"tp": 4}, world=4, kind="gqa_shared", training={"clip": 0.1}
        ),
        "encoder states gathered backwards alone": own("Zoo", kind="encoder_decoder"),
        "a batch of ignored targets poisons the weights": own("helpers.rare:Reads", what="ignored"),
        "a metric that reads logits first cuts the loss off": own("helpers.rare:Reads", what="read_first"),
        "a change through a plain view of sharded logits is lost": own("helpers.rare:Reads", what="masked_view"),
        "logits changed in place in a copy": own("helpers.rare:Reads", what="masked_in_place"),
        "a copy of logits taken for a view": own("helpers.rare:Reads", what="changed_copy"),
        "a change of a view of logits stays in the view": own("helpers.rare:Reads", what="masked_rows"),
        "a change of logits in place is left out of a gradient": own("helpers.rare:Reads", what="changed_copy"),
        "padding of the vocabulary not cut off": own("helpers.rare:Reads", what="squared"),
        "the gradient of gathered logits not dealt out": own("helpers.rare:Reads", what="squared"),
        "logits made without gradients teach the head": own("helpers.rare:Teaching"),
        "a loss may read a vocabulary's weight later": own(
            "end_to_end.test_vocabulary:PenaltyLater", {}, True, training={"steps": 4}
        ),
        "zeros where a sharded embedding has no gradient": own(
            "end_to_end.test_vocabulary:Words", kind="no_gradient"
        ),
        "an embedding that looks its rows up by itself is sharded": own(
            "end_to_end.test_vocabulary:Words", kind="looked"
        ),
        "what a module sums is let go of before it is reduced": own("Zoo", by_hand("list_moe"), kind="list_moe"),
        "a bias added to partial sums by every rank": own("Zoo", by_hand("dense_moe"), kind="dense_moe"),
        "an expert's row bias added by every rank": own("Zoo", by_hand("list_moe"), kind="list_moe"),
        "a loss that reads a router inside a sum not seen": own(
            PRODUCTS + "Warming", by_hand("list_moe"), True, kind="list_moe"
        ),
        "what a module adds to a sum not looked at": own(
            PRODUCTS + "FrozenRows", {}, True, kind="passing_dense", training={"steps": 3}
        ),
        "frozen rows not marked": own(PRODUCTS + "FrozenRows", {}, True, kind="passing_dense", training={"steps": 3}),
        "draws beside raw parameters accepted": own(PRODUCTS + "Later", {}, True, kind="dropping"),
        "counts of heads read off tensors that are cut already": own("Zoo", by_hand("raw_attention"), kind="raw_attention"),
        "an earlier rule wins over a later one": own("GPT", overruled()),
        "of several rules that set attributes the last alone holds": own(
            "GPT", plan("model.", "norm", {"pattern": f"{BLOCKS}.attn", "style": "set", "values": {"training": True}})
        ),
        "a column with one unit gets the style of an earlier rule": own("Zoo", kind="mqa"),
        "a norm's changed output made again unchanged": own("helpers.rare:Changing", what="norm"),
        "a stretch that was changed in place made again": own("helpers.rare:Changing", what="changed_inside"),
        "a stretch read as another type made again as its own": own("helpers.rare:Changing", what="cast_inside"),
        "arguments that change later replayed": own("helpers.rare:Changing", what="changed_arguments"),
        "a gathered input that was changed taken for the gathered one": own("helpers.rare:Changing", what="gathered"),
        "a stretch under activation checkpointing": own("Recomputed"),
        "a checkpoint's input taken for its norm's": uses("recomputed_inside"),
        "a checkpoint's input taken for what was gathered outside": uses("recomputed_inside"),
        "a backward in a hook shares the place of the outer one": uses("backward_in_a_hook"),
        "what a backward in a hook gathered is not gathered again": uses("backward_in_a_hook"),
        "an input gathered for another backward is used": uses("backward_in_a_hook"),
        "what a backward left is not let go": uses("given_up"),
        "gradients added to weights that were frozen since": uses("frozen_between"),
        "gradients pass by the hooks of their node": uses("hooked_at_nodes"),
        "gradients added in place past a hook": uses("hooked"),
        "gradients added in place where torch.autograd.grad was asked for them": uses("some_after_all"),
        "columns that a backward does not come to are waited for": uses("some_leaves"),
        "columns' sum waits for one that has no gradient": uses("column_beside"),
        "the gradient of a weight's gradient lost on its way round": uses("plain"),
        "zeros where the output of a column has no gradient": uses("cut_behind_a_column"),
        "zeros where the output of a norm has no gradient": uses("cut_behind_columns"),
        "zeros where the output of a row has no gradient": uses("cut_behind_a_part"),
        "what was gathered again is not let go after its last user": uses("retained"),
        "shards tell their own shapes to configure_optimizers": own("FollowsShapes"),
        "configure_optimizers sees our classes": own("FollowsShapes"),
        "parameters of no module not compared": own(GUARDS + "LooseParameter", {}, True),
        "a stack whose last block is left out ends on shards": own(
            "LayerDropBehind", plan("model.stack.", None), training={"steps": 5}
        ),
        "a norm behind blocks that are all left out sees whole activations": own(
            "LayerDrop", plan("model.stack."), training={"steps": 5}
        ),
        "what no rank has becomes zeros": own("LayerDrop", plan("model.stack."), training={"steps": 5}),
        "a rank that lacks a gradient does not ask the others": own(
            "LayerDrop", plan("model.stack."), training={"steps": 5}
        ),
        "a whole gradient summed again by ranks that add nothing": own(
            "Frozen", plan(), thaw=True, tied=False, at=(1, 9), training={"accumulate": 3}
        ),
        "what one replica used is taken for whole on the other": own(
            TRAINING + "UsesByBatch", ALONE, world=4, edits=True, training={"accumulate": 2, "steps": 3}
        ),
        "kept gradients of a replica are whole in the reduction": own(
            TRAINING + "UsesByBatch", ALONE, world=4, edits=True, training={"accumulate": 2, "steps": 3}
        ),
        "what an optimizer toggles off is hooked no more": own(TRAINING + "RawBehindToggled", training={"steps": 4}),
        "hidden states given away in parts": own(USED, family="llama", use="hidden", training={"length": 9}),
        "router scores of a shard taken for all": own(USED, family="mixtral", use="router"),
        "attention maps of some heads taken for all": own(
            USED, family="llama", use="attentions"
        ),
        "the second half of a row's adapter summed where it is whole": own(
            "Adapted", {"sp": False}, family="llama", targets=["o_proj", "down_proj"]
        ),
        "a row's joined input dealt out as one part": own("ThirdParty", kind="one_way_out"),
        "a column's output may not be changed in place": own("ThirdParty", kind="in_place"),
        "the gradient of a scale of all heads is not summed": own("ThirdParty", kind="shared_scale"),
        "a fused parameter cut in one piece": own("ThirdParty", kind="weight_of_qkv"),
        "ranks that share a head of a parameter do not sum its gradient": own(
            "ThirdParty", {"tp": 4}, world=4, kind="grouped_adapters"
        ),
        "an adapter's second half keeps a part of its gradient": own("ThirdParty", kind="low_rank_row"),
        "channels cut in another order than the features": own("ThirdParty", kind="mix_ffn"),
        "recompute: the length of another call": own(
            "end_to_end.test_recompute:TwoLengths", {**plan("", None), "recompute": "full"}, training={"length": 9}
        ),
        "recompute: inside another checkpoint too": own("InnerRecompute", {**plan(), "recompute": "full"}),
        "recompute: a list is added to twice": own("helpers.rare:Collects", {"recompute": "full"}, True),
        "recompute: what was gathered has no gradient": own("GPT", {"recompute": "full", "sp": False}),
        "a linear whose noise may grow taken for a linear": own("end_to_end.test_hf_uses:Quantised", {}, True),
        "a scaled linear taken for a linear": own("end_to_end.test_hf_uses:Quantised", {}, True),
    }  # fmt: skip


COSTS, DRAWS, TELLS = (
    "cost memory or time alone",
    "concern random draws, which no other run repeats",
    "are about what is said or refused",
)
WHY_UNSEEN: dict[str, tuple[str, ...]] = {
    COSTS: (
        "products wait for the shortest collectives", "a stretch under activation checkpointing",
        "more is kept where somebody looks", "who looked once decides for good",
        "weight-grad products made before their collective starts", "a collective waited for where it starts",
        "what a backward left is not let go", "a checkpoint is held by its norms",
        "what was gathered again is not let go after its last user", "columns' sum waits for one that has no gradient",
        "columns that a backward does not come to are waited for", "logits gathered for the loss",
        "recompute: what was gathered is kept whole", "recompute: inside another checkpoint too",
        "recompute: without gradients too", "recompute: nothing runs again", "the host waits for what has arrived",
        "the host waits for the losses", "streams not switched once a step drew nothing",
        "what a step leaves is read in the same step", "tile_mlp: what is between columns and rows is kept",
        "a thread stays behind a phase",
    ),
    DRAWS: (
        "every rank draws the same masks", "whole activations dropped out apart", "every step draws the same masks",
        "a norm that draws run again", "what is drawn in a stretch drawn again",
        "a recompute that begins behind a pause goes on with its stream", "an order of samples taken for no draw",
        "a rate that rises from zero goes unseen", "stochastic depth on the rank's own stream without sp",
        "draws beside raw parameters accepted", "recompute: random streams not restored",
        "tile_mlp: ranks of cp drop out alike", "tile_mlp: a tile drops out anew in the backward",
    ),
    TELLS: (
        "ranks that disagree go on", "copies of shards pass for the whole", "who reads logits alone waits for ever",
        "a token outside the vocabulary is embedded as zeros", "no largest gradient where a rank counts none of a tensor",
        "a stand-in that is zero", "gradients compared by their beginning", "a phase is told on every rank",
        "a column changed behind its row not seen", "a norm's input changed before its output is used",
        "logits made of weights that have changed", "a product with a weight reads the stand-in",
        "recompute: a list is added to twice", "recompute: a cache is filled twice",
        "batch norms of compiled blocks are synced", "the gradient of a weight's gradient lost on its way round",
    ),
}  # fmt: skip
"""Of faults that nobody but their tests sees: what they do instead of making numbers wrong in these models."""
