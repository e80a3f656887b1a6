"""What a step keeps for the backward and what it sends, against the formulas of docs/memory.md, through a stock Trainer."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import run_distributed
from tests.helpers import families, models, zoo
from tests.helpers.fit import metered
from tests.mutants import sees

B, S, BYTES = 4, 64, 4
TOKENS = B * S
H, FFN, HEADS, LAYERS, VOCAB = 64, 160, 8, 3, 96
COMMON = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": H, "vocab_size": VOCAB,
          "intermediate_size": FFN, "max_position_embeddings": 128}  # fmt: skip


class Family(NamedTuple):
    """What the formula must know of a model, in elements per token."""

    settings: dict[str, Any]
    kv: int  # features of all key heads
    columns: int  # of the MLP: f for each
    ends: float  # kept by modules around the blocks, whole on every rank
    statistics: int = 0  # what a norm keeps of each position beside its input: torch's own LayerNorm mean and deviation


IDS = 2.0  # int64, kept by an embedding and as targets
FLAG = 0.25  # a bool for each token
# The target's column, whether it is here and counts; the largest logit, the sum of exponentials, the loss.
LOSS = 2 * IDS + FLAG + 3
WORDS = IDS + FLAG  # the embedding's ids, and which of them are this rank's
FAMILIES = {
    # Rotary angles are shared by the batch; the head keeps its input. Its logits are this rank's.
    "llama": Family({**COMMON, "num_key_value_heads": 4, "head_dim": 8}, 32, 2 * FFN, WORDS + 2 * 8 / B + H + LOSS),
    "gpt2": Family(
        {"n_embd": H, "n_inner": FFN, "n_head": HEADS, "n_layer": LAYERS, "vocab_size": VOCAB, "n_positions": 128,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        H,
        FFN,
        WORDS + 2 / B + H + LOSS,  # and the ids of the positions
        2,
    ),
}  # fmt: skip


PARTS = {"llama": 2 * LAYERS + 1, "gpt2": 2 * (2 * LAYERS + 1) + 2 * LAYERS}
"""Parameters of ``h`` numbers that see shards: norms' weights and biases, biases of rows."""


class Plain(L.LightningModule):
    """A model of transformers as a user trains it who has no padding."""

    def __init__(self, family: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = families.build(family, **FAMILIES[family].settings).train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        return F.cross_entropy(self.model(ids).logits.flatten(0, 1), ids.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(family: str, strategy: dict[str, Any]) -> tuple[int, dict[str, int], dict[str, int], tuple[dict[str, int], ...]]:
    """Bytes kept, calls and bytes of a step without run-time checks, and what gloo was given for it."""
    meter, _ = metered(Plain(family), SeqParallelStrategy(**strategy), models.loader(B, length=S, count=B * 40))
    return meter.saved_bytes, meter.calls, meter.bytes, (meter.backend_calls, meter.backend_bytes)


def kept(family: Family, t: int, sp: bool) -> float:
    """Bytes that a rank keeps for the backward, with ``recompute='activations'``."""
    one = (H + family.statistics) / (t if sp else 1)
    norms = 2 * one  # their inputs: the residual stream, twice
    attention = (2 * H + 2 * family.kv + HEADS) / t  # q, k, v, the result, and one number per head
    layer = norms + attention + family.columns / t
    return TOKENS * BYTES * (LAYERS * layer + one + family.ends + VOCAB / t)  # one more: the final norm's input


def sent(t: int, sp: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of the blocks and the vocabulary, and the bytes that a rank gives to them; the norms' sum aside."""
    whole = TOKENS * H * BYTES
    # Sums of the embedding and of the gradient of the head's input; three numbers a token.
    ends, loss = 2, 3 * TOKENS * BYTES
    if not sp:
        sums = 4 * LAYERS + ends  # f and f̄ of two parts, each way
        return {"all_reduce": sums, "all_gather": 1}, {"all_reduce": sums * whole, "all_gather": loss}
    # Each way two gathers and two reduce-scatters a layer, two gathers again, the region's end, and its begin's gradient.
    gathers, scatters = 6 * LAYERS + 2, 4 * LAYERS
    return {"all_gather": gathers + 1, "reduce_scatter": scatters, "all_reduce": ends}, {
        "all_gather": gathers * whole // t + loss,
        "reduce_scatter": scatters * whole,
        "all_reduce": ends * whole,
    }


@pytest.mark.parametrize(
    ("family", "tp", "sp"),
    [
        pytest.param(family, tp, sp, marks=[] if tp == 2 and sp == (family != "gpt2") else pytest.mark.matrix)
        for tp in (2, 4)
        for sp in (True, False)
        for family in FAMILIES
    ],
)
@pytest.mark.more
def test_a_step_keeps_and_sends_what_the_formulas_say(family, tp, sp):
    strategy = {"tp": tp, "sp": sp, "recompute": "activations"}
    saved, calls, given, backend = run_distributed(run, tp, family, strategy)[0]
    assert saved == pytest.approx(kept(FAMILIES[family], tp, sp), rel=0.01)
    # Gloo is given each collective as one exchange, in which this rank's own piece stays where it is; a sum of the losses
    # alone is gloo's own.
    losses = 0 if sp else 8 * tp
    exchanged = {name: size * (tp - 1) // (tp if name == "reduce_scatter" else 1) for name, size in given.items()}
    given_to_gloo = {"alltoall_base": sum(exchanged.values()) - losses * (tp - 1), "allreduce": losses}
    called = {"alltoall_base": sum(calls.values()) - (not sp), "allreduce": int(not sp)}
    assert backend == tuple({name: n for name, n in counts.items() if n} for counts in (called, given_to_gloo))
    counts, sizes = sent(tp, sp)
    sums = calls.pop("all_reduce") - counts.pop("all_reduce", 0)
    small = given.pop("all_reduce") - sizes.pop("all_reduce", 0)
    assert (calls, given) == (counts, sizes)
    # One sum of the parts of gradients, with what arrived and the ranks' losses; of the losses alone where all are whole.
    parts = PARTS[family]
    assert (sums, small) == (1, BYTES * (parts * H + 2 * parts + tp) if sp else 8 * tp)


CONTEXT = [
    (4, {"tp": 2, "cp": 2}),
    (4, {"tp": 2, "cp": 2, "sp": False}),
    (4, {"tp": 2, "cp": 2, "cp_method": "ring"}),
    (8, {"tp": 2, "cp": 4, "cp_method": "ring"}),
]


@sees(
    "cp: what lies in front of the blocks is whole",
    "hook_embeddings",
    "if not any(stack.dim == 1 for stack in plan.stacks):",
    "if True:",
    case="gpt2-4-{'tp': 2, 'cp': 2}",
)
@pytest.mark.parametrize(
    ("family", "world", "strategy"),
    [
        pytest.param(family, *case, marks=[] if family == "llama" and case is CONTEXT[0] else pytest.mark.matrix)
        for case in CONTEXT
        for family in FAMILIES
    ],
    ids=str,
)
@pytest.mark.more
def test_with_context_parallelism_a_rank_keeps_and_sends_its_share_of_that(family, world, strategy):
    """A ``1/cp`` of the formulas; with Ulysses attention's result twice: of its heads, and of its positions.

    What is sent over tp is as often as without; over cp Ulysses sends queries, keys, values and the result, each way, and the
    ring keys and values as one.
    """
    saved, calls, *_ = run_distributed(run, world, family, {**strategy, "recompute": "activations"})[0]
    t, cp, sp = strategy["tp"], strategy["cp"], strategy.get("sp", True)
    rings = strategy.get("cp_method") == "ring"
    # The ring copies positions of both ends out of a llama's angles, twice.
    ring = LAYERS * (4 * 8 / B if family == "llama" else 0)
    more = ring if rings else LAYERS * H / t
    assert saved == pytest.approx((kept(FAMILIES[family], t, sp) + TOKENS * BYTES * more) / cp, rel=0.01)
    counts, _ = sent(t, sp)
    over_cp = {"send": LAYERS * (3 * cp - 2)} if rings else {"alltoall": LAYERS * 8}
    assert {name: calls.get(name, 0) for name in ("all_gather", "reduce_scatter")} == {
        name: counts.get(name, 0) for name in ("all_gather", "reduce_scatter")
    }
    assert {name: calls[name] for name in over_cp} == over_cp


class FusedAttention(zoo.Fused):
    def forward(self, x: Tensor) -> Tensor:
        return self.proj(zoo.attend(*self.heads(x), is_causal=True))


class EagerAttention(zoo.Fused):
    """With scores and probabilities, as the paper's layer has them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Layer(zoo.PreNorm):
    """The layer of arXiv 2205.05198: norms, attention, an MLP of four times the width, two dropouts."""

    def __init__(self, attention: Any) -> None:
        super().__init__(H, attention(H, HEADS), zoo.FeedForward(H, 4 * H))
        self.drop1, self.drop2 = torch.nn.Dropout(0.1), torch.nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.attn(self.ln1(x)))
        return x + self.drop2(self.mlp(self.ln2(x)))


class Classic(models.Blocks):
    def __init__(self, layers: int, eager: bool) -> None:
        super().__init__(lambda: Layer(EagerAttention if eager else FusedAttention), layers, H, VOCAB)


def run_classic(sp: bool) -> dict[tuple[str, bool], tuple[float, dict[str, int]]]:
    """What a layer keeps of each token's feature, in bytes, and its collectives; by ``recompute``, and if attention is eager."""
    rules = [
        {"pattern": "blocks.*", "style": "blocks"},
        {"pattern": "blocks.*.attn.qkv", "style": "column", "segments": [H, H, H], "units": [HEADS] * 3},
        {"pattern": "blocks.*.{attn,mlp}", "style": "gather"},
        {"pattern": "blocks.*.mlp.fc1", "style": "column"},
        {"pattern": "blocks.*.{attn.proj,mlp.fc2}", "style": "row"},
        {"pattern": "blocks.*.attn", "style": "set", "divide": ["n_head"]},
    ]
    plan, tp = {"base": "none", "rules": rules}, dist.get_world_size()
    found = {}
    for recompute, eager in CLASSIC:
        options = {"regather": True, "plan": plan, "self_check": False, "recompute": recompute}
        few, more = (
            metered(
                Classic(layers, eager),
                SeqParallelStrategy(tp=tp, sp=sp, **options),
                models.loader(B, length=S, count=B * 17),
                "bf16-true",
            )[0]
            for layers in (1, 2)
        )
        calls = {name: count - few.calls.get(name, 0) for name, count in more.calls.items()}
        found[recompute, eager] = (more.saved_bytes - few.saved_bytes) / (TOKENS * H), calls
    return found


CLASSIC = [(recompute, eager) for recompute in ("none", "activations", "selective", "full") for eager in (False, True)]


@sees(
    "recompute: a checkpoint's gathers are made twice",
    "DataPath.gather",
    "(self.regather or not self.sp) and (hooks is None or not is_of_checkpoint(hooks))",
    "self.regather or not self.sp",
    case="2-True",
)
@pytest.mark.parametrize(
    ("tp", "sp"), [(2, True), *(pytest.param(*more, marks=pytest.mark.matrix) for more in ((4, True), (2, False)))]
)
@pytest.mark.more
def test_the_papers_layer(tp, sp):
    """In bytes per s·b·h, the paper's table 2 and what is kept here (docs/memory.md has the terms one by one).

    ==========================  =============  ======  ================  ==========
                                the paper      here    the paper         here
                                with sp                without sp
    ==========================  =============  ======  ================  ==========
    none, without 5as/h         34/t           34/t    10 + 24/t         10 + 24/t
    activations                 —              22/t    —                 6 + 16/t
    attention's term            5as/(ht)       2as/ht  5as/(ht)          2as/ht
    selective                   34/t           14/t    10 + 24/t         6 + 8/t
    full                        2              2/t     2                 2
    ==========================  =============  ======  ================  ==========

    On the CPU torch's dropout keeps a factor in place of a byte, in two bytes: one more of each of the two dropouts.

    Attention's term is for eager attention without a dropout of its own: the probabilities in two bytes (the paper has a mask and
    what it leaves of them too). Fused attention keeps one number per head in float32 in its place.
    """
    found = run_distributed(run_classic, tp, sp)[0]
    factors = 2
    kept = {
        "none": ((34 + factors) / tp, 10 + factors + 24 / tp),
        "activations": ((22 + factors) / tp, 6 + factors + 16 / tp),
        "selective": ((14 + factors) / tp, 6 + factors + 8 / tp),
        "full": (2 / tp, 2.0),
    }
    fused, eager = 4 * HEADS / tp / H, 2 * HEADS * S / H / tp
    # A block that runs again gathers in place of its columns, and reduces twice more, since a dropout stands behind its last row.
    # What attention reads is gathered once in the backward, as columns gather it without recompute; behind its row nothing is kept.
    whole = {"all_gather": 6, "reduce_scatter": 4} if sp else {"all_reduce": 4}
    again = {"all_gather": 6, "reduce_scatter": 6} if sp else {"all_reduce": 6}
    for (recompute, is_eager), (bytes_kept, calls) in found.items():
        assert {name: count for name, count in calls.items() if count} == (again if recompute == "full" else whole)
        norms = 0.0 if recompute == "full" else 2 * 2 * 2 / H / (tp if sp else 1)  # mean and deviation, in the input's type
        scores = (eager if is_eager else fused) if recompute in ("none", "activations") else 0.0
        assert bytes_kept == pytest.approx(kept[recompute][not sp] + norms + scores, rel=0.01), (recompute, is_eager)
