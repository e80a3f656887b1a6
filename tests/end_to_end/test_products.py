"""Modules that multiply parameters themselves, and experts that share the tokens: by hand, inferred, refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_seqpar import SeqParallelStrategy, ShardingPlan
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.infer import infer_plan
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import zoo
from tests.helpers.fit import fit, fit_or_tell, quiet_trainer
from tests.helpers.models import loader
from tests.mutants import sees

IDS = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(0))
STEP = Example("a batch", "training_step", ((IDS,), 0), {})
BLOCKS = {"pattern": "net.h.*", "style": "blocks"}
EXIT = {"pattern": "net.ln_f", "style": "exit"}
WHOLE = {"pattern": "net.h.*.attn", "style": "whole"}


def rule(pattern: str, style: str, **options: Any) -> dict[str, Any]:
    return {"pattern": f"net.h.*.{pattern}", "style": style, **options}


HAND: dict[str, list[dict[str, Any]]] = {
    "raw_attention": [
        BLOCKS, EXIT,
        rule("attn", "gather"),
        rule("attn.{w_q,w_k,w_v}", "column", dim=0),
        rule("attn.{b_q,b_v}", "local_heads"),
        rule("attn.w_o", "row", dim=0),
        rule("attn.b_o", "once"),
    ],
    "routed_moe": [
        BLOCKS, EXIT, WHOLE,
        rule("mlp.experts", "gather", args=[0, 1, 2]),
        rule("mlp.experts.gate_up", "column", segments=2),
        rule("mlp.experts.down", "row"),
        rule("mlp.shared", "gather"),
        rule("mlp.shared.{w1,w3}", "column"),
        rule("mlp.shared.w2", "row"),
    ],
    "list_moe": [
        BLOCKS, EXIT, WHOLE,
        rule("mlp", "gather"),
        rule("mlp", "reduce"),
        rule("mlp.experts.*.fc1", "column"),
        rule("mlp.experts.*.fc2", "row"),
    ],
    "dense_moe": [
        BLOCKS, EXIT, WHOLE,
        rule("mlp", "gather"),
        rule("mlp.w1", "column", dim=2),
        rule("mlp.b1", "column", dim=1),
        rule("mlp.w2", "row", dim=1),
        rule("mlp.b2", "once"),
    ],
}  # fmt: skip


def plan_of(kind: str, *more: dict[str, Any]) -> dict[str, Any]:
    return {"base": "none", "rules": [*HAND[kind], *more]}


# ---- parity ----------------------------------------------------------------------------------------------------


def fit_all(world: int, tp: int, sp: bool) -> dict[str, Trace]:
    return {
        kind: fit("Zoo", {"kind": kind}, world=world, strategy={"tp": tp, "sp": sp, "plan": plan_of(kind)}, steps=3)
        for kind in HAND
    }


@sees(
    "flattened tokens folded the wrong way round",
    "Observers.shard_made",
    "            sizes = (frame.batch, frame.part) if self._dim == 1 else",
    "            sizes = (frame.batch, frame.part) if self._dim == 0 else",
    case="2-2-True",
)
@sees("a bias added to partial sums by every rank", "begin_sum.hook", "parameter * 0.0", "parameter * 1.0", case="2-2-True")
@sees(
    "an expert's row bias added by every rank", "RowParallelLinear._reduced", "float(region.rank == 0)", "1.0", case="2-2-True"
)
@sees(
    "routing weights summed in less precision than the activation",
    "_widest",
    "if len(kinds) > 1 else None",
    "if len(kinds) > 9 else None",
    case="2-2-True",
)
@pytest.mark.parametrize(("world", "tp", "sp"), [(2, 2, True), (4, 2, True)])
@pytest.mark.more
def test_by_hand(world, tp, sp):
    got = run_distributed(fit_all, world, world, tp, sp, timeout=300.0)[0]
    for kind in HAND:
        compare(fit("Zoo", {"kind": kind}, steps=3), got[kind]).raise_if_failed()


# ---- inference -------------------------------------------------------------------------------------------------


INFERRED = {
    "raw_attention": [
        "{pattern: net.h.*.attn, style: gather}",
        "{pattern: net.h.*.attn.w_o, style: row, dim: 0}",
        "{pattern: net.h.*.attn.w_q, style: column, dim: 0}",
        "{pattern: net.h.*.attn.b_q, style: column, dim: 0}",
        "{pattern: net.h.*.attn.b_o, style: once}",
    ],
    "routed_moe": [
        "{pattern: net.h.*.mlp.experts, style: gather, args: [0, 1, 2]}",
        "{pattern: net.h.*.mlp.experts.gate_up, style: column, dim: 1, segments: 2}",
        "{pattern: net.h.*.mlp.experts.down, style: row, dim: 2}",
        "{pattern: net.h.*.mlp.shared, style: gather}",
    ],
    "list_moe": [
        "{pattern: net.h.*.mlp, style: reduce}",
        "{pattern: net.h.*.mlp.experts.*.fc1, style: column}",
        "{pattern: net.h.*.mlp.experts.*.fc2, style: row}",
    ],
    "dense_moe": [
        "{pattern: net.h.*.mlp.w1, style: column, dim: 2}",
        "{pattern: net.h.*.mlp.b1, style: column, dim: 1}",
        "{pattern: net.h.*.mlp.b2, style: once}",
    ],
}


@pytest.mark.parametrize("kind", INFERRED)
def test_inferred(kind):
    told = infer_plan(zoo.Zoo(kind), STEP, 2).plan.to_yaml()
    for line in INFERRED[kind]:
        assert f"- {line}\n" in told, told


@sees(
    "an expert without tokens in the example left whole",
    "BlockPlanner.make",
    "        rules += _idle_experts(self._flow, rules)\n",
    "",
)
def test_an_expert_without_tokens_is_dealt_out_like_the_others():
    model = zoo.Zoo("list_moe")
    with torch.no_grad():
        for block in model.net.h:
            block.mlp.gate.weight[3] = 0
            block.mlp.gate.weight[:3] *= 1e-3
            block.mlp.gate.register_forward_hook(lambda module, args, out: out - torch.tensor([0, 0, 0, 1e3]))
    told = infer_plan(model, STEP, 2).plan.to_yaml()
    assert "{pattern: net.h.*.mlp.experts.*.fc1, style: column}" in told, told
    assert "{pattern: net.h.*.mlp.experts.*.fc2, style: row}" in told, told


class Balanced(zoo.Zoo):
    """Adds what the routers left behind to the loss: a gradient that no sum over ranks may count twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * sum(block.mlp.balance for block in self.net.h)


def shards_kept() -> list[bool]:
    """Whether the blocks of a trained model see shards."""
    module = zoo.Zoo("extra").double()
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), max_steps=1)
    seen: list[bool] = []
    module.on_train_batch_end = lambda *_: seen.append(all(region.sp for region in record_of(module).regions))
    trainer.fit(module, loader(4))
    return seen


@sees(
    "an escaping balance not seen in the data flow",
    "GatherPoints._find_dealer",
    "dealer is None or self._escapes(dealer)",
    "dealer is None",
)
def test_a_router_that_the_loss_reads_is_seen_in_the_data_flow():
    assert "style: reduce" in infer_plan(zoo.Zoo("list_moe"), STEP, 2).plan.to_yaml()
    assert "style: reduce" not in infer_plan(Balanced("list_moe"), STEP, 2).plan.to_yaml()


@sees(
    "modules that the example does not run not looked at",
    "compare_runs",
    "    verdict.wrong += _unproved_modules(dense, record)\n",
    "",
)
def test_a_module_that_the_example_does_not_run_sees_no_shards():
    assert run_distributed(shards_kept, 2)[0] == [False]


# ---- refusals --------------------------------------------------------------------------------------------------


WRONG: list[tuple[str, list[dict[str, Any]], str]] = [
    ("dense_moe", [rule("mlp.w1", "column", dim=3)], r"it has shape \[3, 16, 24\] and no dim 3"),
    ("dense_moe", [rule("ln2.weight", "row", dim=0)], "multiplies this row itself, where nothing was gathered for it"),
    ("dense_moe", [rule("attn", "reduce")], "must be entered with whole activations"),
    ("dense_moe", [rule("mlp.gate.bias", "once")], "self_check"),
    ("raw_attention", [rule("mlp.fc1.bias", "once")], "around this one none are left"),
    ("raw_attention", [rule("mlp", "gather"), rule("mlp", "reduce")], "takes a module with rows inside"),
    ("list_moe", [rule("mlp.gate.weight", "column")], "it is the parameter of a linear; name the linear itself"),
]
SPOILED: list[tuple[str, list[dict[str, Any]]]] = [
    ("dense_moe", [rule("mlp.w1", "column", dim=1)]),
    ("routed_moe", [rule("mlp.experts.gate_up", "column")]),
    ("routed_moe", [rule("mlp.experts", "gather", args=[0])]),
    ("routed_moe", [rule("mlp.experts", "gather", args=[0, 1])]),
    ("raw_attention", [rule("attn.w_o", "row", dim=1)]),
]


def refuse_each() -> list[str]:
    told = []
    for kind, more in [(kind, more) for kind, more, _ in WRONG] + SPOILED:
        strategy = SeqParallelStrategy(tp=2, plan=plan_of(kind, *more))
        try:
            quiet_trainer(devices=2, strategy=strategy, max_steps=1).fit(zoo.Zoo(kind), loader(4))
            told.append("trained")
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    return told


def test_what_can_not_be_right_is_refused():
    told = run_distributed(refuse_each, 2)[0]
    for said, wanted in zip(told, [says for *_, says in WRONG] + ["self_check"] * len(SPOILED), strict=True):
        assert re.search(wanted, said), said


def fit_partly() -> None:
    rules = [{**r, "pattern": r["pattern"].replace("experts.*", "experts.{0,1,2}")} for r in HAND["list_moe"]]
    strategy = SeqParallelStrategy(tp=2, plan={"base": "none", "rules": rules})
    quiet_trainer(devices=2, strategy=strategy, max_steps=1).fit(zoo.Zoo("list_moe"), loader(4))


@sees(
    "a whole expert among sharded ones accepted",
    "_check_siblings",
    "if twin in plan.modules and twin not in linears:",
    "if twin not in plan.modules:",
)
def test_one_whole_expert_among_shards_is_refused():
    with pytest.raises(RankFailedError, match=r"no rule names it, but .* beside it is a column"):
        run_distributed(fit_partly, 2)


# ---- what the example does not show ----------------------------------------------------------------------------


class Warming(zoo.Zoo):
    """Reads the routers only from the second step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = 0.1 if batch_idx else 0.0
        return super().training_step(batch, batch_idx) + weight * sum(block.mlp.balance for block in self.net.h)


class Hashed(nn.Module):
    """Each token has its expert; those of the last one come from the second batch on."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList([zoo.FeedForward(16, 24), zoo.FeedForward(16, 24), last])
        self.choice: Any = None

    def forward(self, x: Tensor) -> Tensor:
        flat, out = x.reshape(-1, 16), torch.zeros_like(x).reshape(-1, 16)
        choice = Later.choice[: len(flat)]
        for i, expert in enumerate(self.experts):
            at = (choice == i).nonzero().flatten()
            if len(at):
                out = out.index_add(0, at, expert(flat[at]))
        if Later.passing:
            out[:2] = flat[:2]
        return out.view(x.shape)


class Later(zoo.Zoo):
    """The second batch goes where the first one did not."""

    choice = torch.zeros(4096, dtype=torch.long)
    passing = False

    def __init__(self, kind: str, passes: bool = False) -> None:
        super().__init__(kind)
        self.passes = passes
        Later.choice, Later.passing = torch.arange(4096) % 2, False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            Later.choice = torch.arange(4096) % 3
            Later.passing = self.passes


class Counting(zoo.RoutedMoE):
    """Keeps a count of what each expert is given, and prefers the idle ones."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        scores = self.router(flat).softmax(-1)
        index = (scores + self.bias).topk(self.top, dim=-1).indices
        load = torch.bincount(index.flatten(), minlength=4).to(scores.dtype)
        self.bias += 0.05 * (load.mean() - load).sign()
        routed = self.experts(flat, index, scores.gather(-1, index))
        return (routed + self.shared(flat) * torch.sigmoid(self.shared_gate(flat))).view(x.shape)


class CountingLater(Counting):
    """Begins to count when the second batch comes."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.bias.clone()
        out = super().forward(x)
        if not Later.passing:
            self.bias.copy_(before)
        return out


class PassingDense(zoo.DenseMoE):
    """From the second batch on, something goes past the experts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x if Later.passing else super().forward(x)


class FrozenRows(zoo.Zoo):
    """The experts' rows learn nothing."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        Later.passing = False
        for block in self.net.h:
            block.mlp.w2.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        Later.passing = batch_idx > 0


class Capped(nn.Module):
    """Scales down what is large in one sample, which the first batch does not show."""

    def __init__(self, dim: int, hidden: int, *, behind: bool) -> None:
        super().__init__()
        self.fc1, self.fc2, self.behind = nn.Linear(dim, hidden), nn.Linear(hidden, dim), behind

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc2(torch.relu(self.fc1(x if self.behind else cap(x))))
        return cap(y) if self.behind else y


def cap(x: Tensor) -> Tensor:
    return x * (64 / x.norm(dim=(1, 2), keepdim=True).clamp_min(64))


class Queued(zoo.RoutedMoE):
    """An expert takes so many tokens and no more."""

    room = 1000

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).max(-1)
        chosen = torch.nn.functional.one_hot(index, 4)
        weights = weights * ((chosen.cumsum(-2) * chosen).sum(-1) <= self.room)
        flat = x.view(-1, x.shape[-1])
        out = self.experts(flat, index.view(-1, 1), weights.view(-1, 1)) + self.shared(flat)
        return (out * torch.sigmoid(self.shared_gate(flat))).view(x.shape)


class Turned(zoo.RoutedMoE):
    """Flattens its tokens sequence first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1).contiguous()).transpose(0, 1)


class Twofold(zoo.DenseMoE):
    """Half of its parameters serve tokens that the example does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) > 1000 else torch.einsum("bsh,ehf,efi->bsi", x, self.w1, self.w2)


class NoisyList(zoo.ListMoE):
    """Noise on the routing weights behind the first column."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        made = [expert.fc1(flat) for expert in self.experts]
        weights = self.gate(flat)
        weights = (weights + torch.randn(weights.shape, dtype=weights.dtype)).softmax(-1)
        parts = [weights[:, i, None] * expert.fc2(made[i]) for i, expert in enumerate(self.experts)]
        some = torch.stack(parts).sum(0)
        return some.index_select(0, torch.arange(len(flat))).view(x.shape)


class Extra(zoo.PreNorm):
    """An attention that only long inputs meet."""

    def __init__(self) -> None:
        super().__init__(16, zoo.EinsumAttention(16, 4), zoo.FeedForward(16, 32))
        self.extra = zoo.EinsumAttention(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.extra(x) if x.shape[1] > 100 else x)


def with_mlp(mlp: Any) -> Any:
    return lambda: zoo.PreNorm(16, zoo.EinsumAttention(16, 4), mlp())


zoo.Warming, zoo.Later, zoo.FrozenRows = Warming, Later, FrozenRows
zoo.EXTRA |= {
    "hashed": with_mlp(lambda: Hashed(zoo.FeedForward(16, 24))),
    "hashed_otherwise": with_mlp(lambda: Hashed(zoo.SwiGLU(16, 24))),
    "counting": with_mlp(lambda: Counting(16, 24)),
    "counting_later": with_mlp(lambda: CountingLater(16, 24)),
    "passing_dense": with_mlp(lambda: PassingDense(16, 24)),
    "capped": with_mlp(lambda: Capped(16, 24, behind=True)),
    "capped_before": with_mlp(lambda: Capped(16, 24, behind=False)),
    "queued": with_mlp(lambda: Queued(16, 24)),
    "turned": with_mlp(lambda: Turned(16, 24)),
    "twofold": with_mlp(lambda: Twofold(16, 24)),
    "noisy": with_mlp(lambda: NoisyList(16, 24)),
    "extra": Extra,
}
UNSEEN = [
    ("Warming", {"kind": "list_moe"}),
    ("Later", {"kind": "hashed"}),
    ("Later", {"kind": "hashed_otherwise"}),
    ("FrozenRows", {"kind": "dense_moe"}),
    *[("Zoo", {"kind": kind}) for kind in ("counting", "queued", "turned", "extra")],
]


def fit_unseen() -> list[Trace | str]:
    return [fit_or_tell(model, args, world=2, strategy={"tp": 2}, steps=3) for model, args in UNSEEN]


@sees(
    "buffers that the forward changes not looked at",
    "compare_runs",
    "    verdict.wrong += _wrong_buffers(dense, sharded, record, limits.tensors, groups)\n",
    "",
)
@sees("frozen rows not marked", "PartialSumCheck._is_row", " or is_node_of(end, MarkRow) for end in ends)", " for end in ends)")
@pytest.mark.more
def test_what_the_first_batch_does_not_show_is_right_too():
    for (model, args), got in zip(UNSEEN, run_distributed(fit_unseen, 2)[0], strict=True):
        assert isinstance(got, Trace), (args, got)
        report = compare(fit(model, args, steps=3), got)
        assert report.ok, f"{model} {args}\n{report}"


@sees(
    "places in a queue counted on shards",
    "BlockPlanner._keep_whole_sequences",
    "if (counted := orders_tokens(self._flow, self._covers)) is not None:",
    "if (counted := orders_tokens(self._flow, self._covers)) is not None and False:",
    case="4-queued-it counts, sorts or reduces tokens (cumsum) where it would see this rank's part of them",
)
@sees(
    "tokens in another order not seen",
    "BlockPlanner._keep_whole_sequences",
    "if (moved := reorders_tokens(self._flow)) is not None:",
    "if (moved := reorders_tokens(self._flow)) is not None and False:",
    case="4-turned-its tokens are in another order than the block's",
)
@sees(
    "a block that reduces over its shard not seen",
    "_ordered_dims",
    "if not (reduces or name in _ORDERED)",
    "if name not in _ORDERED",
    case="4-capped-net.h.0.mlp: it counts, sorts or reduces tokens (linalg_vector_norm) where it would see",
)
@sees(
    "a turned activation of equal dims not seen",
    "reorders_tokens",
    'if maker.name in ("transpose", "permute", "t") and',
    "if False and",
    case="8-turned-its tokens are in another order than the block's",
)
@sees(
    "a block that reads the length of its shard not seen",
    "StackPlanner._plan_rest",
    '({"sp": False} if why_no_sp else {})',
    '({"sp": False} if dim is None else {})',
    case="4-queued-it counts, sorts or reduces tokens (cumsum) where it would see this rank's part of them",
)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("queued", "it counts, sorts or reduces tokens (cumsum) where it would see this rank's part of them"),
        ("capped", "net.h.0.mlp: it counts, sorts or reduces tokens (linalg_vector_norm) where it would see"),
        ("capped_before", "net.h.0.mlp: it counts, sorts or reduces tokens (linalg_vector_norm) where it would see"),
        ("turned", "its tokens are in another order than the block's"),
    ],
)
@pytest.mark.parametrize("batch", [4, 8])  # as many as positions: turned round, the shape is the same
def test_what_orders_tokens_keeps_whole_sequences(kind, says, batch):
    ids = torch.randint(31, (batch, 9), generator=torch.Generator().manual_seed(0))
    found = infer_plan(zoo.Zoo(kind), Example("a batch", "training_step", ((ids,), 0), {}), 2)
    assert "{pattern: net.h.*, style: blocks, sp: false}" in found.plan.to_yaml()
    assert any(says in reason for reason in found.reasons)


def test_what_reduces_tokens_in_a_module_that_is_computed_whole_keeps_shards():
    own = ShardingPlan.from_rules([{"pattern": "net.h.*.mlp", "style": "whole"}])
    found = infer_plan(zoo.Zoo("capped_before"), STEP, 2, own)
    assert "{pattern: net.h.*, style: blocks}" in found.plan.to_yaml()


def test_what_reduces_whole_tokens_in_a_gathering_module_keeps_shards():
    model = zoo.Zoo("gqa")
    kind = type(model.net.h[0].attn)
    capped = type("Capped", (kind,), {"forward": lambda self, x: kind.forward(self, cap(x))})
    for block in model.net.h:
        block.attn.__class__ = capped
    found = infer_plan(model, STEP, 2)
    assert "{pattern: net.h.*, style: blocks}" in found.plan.to_yaml()


@sees(
    "parameters that the example does not use guessed at",
    "BlockPlanner._plan_products",
    "if idle := products.idle():",
    "if False:",
)
def test_parameters_that_the_example_does_not_use_are_no_one_s_guess():
    found = infer_plan(zoo.Zoo("twofold"), STEP, 2)
    assert "{pattern: net.h.*.mlp, style: whole}" in found.plan.to_yaml()
    assert any("net.h.0.mlp: the example does not use its parameters b1, b2" in reason for reason in found.reasons)


HASHED = [
    BLOCKS, EXIT, WHOLE, rule("mlp", "gather"), rule("mlp", "reduce"),
    rule("mlp.experts.*.fc1", "column"), rule("mlp.experts.*.fc2", "row"),
]  # fmt: skip


def refuse_later() -> list[str]:
    told = []
    runs: list[tuple[Any, Any]] = [
        (Warming("list_moe"), {"base": "none", "rules": HAND["list_moe"]}),
        (Later("hashed", passes=True), {"base": "none", "rules": HASHED}),
        (Later("hashed_otherwise"), {"base": "none", "rules": HASHED}),
        (zoo.Zoo("noisy"), {"base": "none", "rules": HASHED}),
        (FrozenRows("passing_dense"), "auto"),
        (Later("counting_later", passes=True), "auto"),
    ]
    for model, plan in runs:
        Later.choice, Later.passing = torch.arange(4096) % 2, False
        trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2, plan=plan), max_steps=3)
        try:
            trainer.fit(model, loader(4))
            told.append("trained")
        except (ValueError, RuntimeError) as error:
            told.append(f"{trainer.global_step}: {error}")
    return told


@sees(
    "what a module sums is let go of before it is reduced",
    "_Swap._own_hooks",
    "            for rule in reversed(rules):\n",
    "            for rule in rules:\n",
)
@sees(
    "what a module adds to a sum not looked at",
    "Observers.sum_returned",
    "PartialSumCheck(self._frames.current.partial_nodes, rows, once).check(out, gathers, module)",
    "pass",
)
@sees(
    "a loss that reads a router inside a sum not seen",
    "LossLeakCheck.check",
    "            if node in owners:\n",
    "            if False:\n",
)
@sees(
    "buffers that ranks hold apart not seen",
    "Steps._before_backward",
    "                check_buffers(record, self._env.groups, self._env.device)\n",
    "",
)
def test_what_would_count_twice_is_refused_when_it_comes():
    for said, wanted in zip(
        run_distributed(refuse_later, 2)[0],
        [
            "0: self_check: .* net.h.[01].mlp: .* the loss reads something else that it makes",
            "1: net.h.[01].mlp: .* adds what is whole to a part of a sum",
            "0: net.h.0.mlp.experts.2: no rule names it, but net.h.0.mlp.experts.0.fc1 beside it is a column",
            r"0: self_check: .* random numbers \(randn\) of shape \[36, 4\], drawn in net.h.0.mlp.gate",
            "1: net.h.[01].mlp: .* adds what is whole to a part of a sum",
            "[12]: net.h.[01].mlp.bias: this buffer is no longer the same on the ranks of a replica",
        ],
        strict=True,
    ):
        assert re.search(wanted, said), said
