"""Random streams: the same where activations are whole, each rank's own where they are dealt out."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import gather_weights
from tests.helpers.dropping import Block, DropAttention, DropPath, Dropping, P
from tests.helpers.fit import quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees


def train(
    tp: int, sp: bool, steps: int = 20, recompute: str = "", seed: int = 5, self_check: bool = True, **model: Any
) -> dict[str, Any]:
    module = Dropping(recompute, **model)
    L.seed_everything(seed, verbose=False)
    data = DataLoader(TensorDataset(torch.randint(31, (8 * steps, 12))), batch_size=8)
    strategy = SeqParallelStrategy(tp=tp, sp=sp, self_check=self_check) if tp > 1 else "auto"
    quiet_trainer(devices=tp, strategy=strategy, max_steps=steps).fit(module, data)
    masks = {name: part.masks for name, part in module.named_modules() if hasattr(part, "masks")}
    return {"losses": module.losses, "masks": masks, "after": torch.rand(3)}


def phi(a: Tensor, b: Tensor) -> float:
    """Correlation of two masks, and how large chance makes it: in standard deviations."""
    a, b = a.flatten().double(), b.flatten().double()
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]) * a.numel() ** 0.5


def train_in_stages(recompute: str) -> list[float]:
    module = Dropping(recompute)
    L.seed_everything(5, verbose=False)
    data = DataLoader(TensorDataset(torch.randint(31, (64, 12))), batch_size=4)
    strategy = SeqParallelStrategy(tp=2, pp=2)
    quiet_trainer(devices=4, strategy=strategy, accumulate_grad_batches=4, max_steps=4).fit(module, data)
    return module.losses


@sees(
    "streams of a micro-batch are forgotten before its backward",
    "Steps.run_step",
    'forget=stage is None or loop != "training"',
    "forget=True",
)
@pytest.mark.more
def test_a_checkpoint_within_a_block_draws_the_masks_of_its_micro_batch():
    """The backward of a micro-batch comes behind the forward of the next one."""
    plain, again = (run_distributed(train_in_stages, 4, recompute)[-1] for recompute in ("", "attn"))
    assert plain == pytest.approx(again, rel=1e-6)


@pytest.mark.parametrize("sp", [True, False])
def test_masks_are_shared_or_independent_as_the_activation_is(sp):
    one, two = run_distributed(train, 2, 2, sp)
    assert torch.equal(one["after"], two["after"])
    shared = {"drop", "blocks.0.path", "blocks.1.path"} | {f"blocks.{i}.attn.before" for i in (0, 1)}
    shared |= set() if sp else {f"blocks.{i}.attn.behind" for i in (0, 1)}
    assert len(one["masks"]) == 11
    for name, masks in one["masks"].items():
        mine, other = torch.cat([m.flatten() for m in masks]), torch.cat([m.flatten() for m in two["masks"][name]])
        count = mine.numel()
        spread = (P * (1 - P) / count) ** 0.5
        assert abs(float(mine.double().mean()) - (1 - P)) < 5 * spread, name
        if name in shared:
            assert torch.equal(mine, other), name
        else:
            assert abs(phi(mine, other)) < 5, name
            # Nor is a rank's mask that of another step or another block.
            assert abs(phi(torch.cat([m.flatten() for m in masks[1:]]), torch.cat([m.flatten() for m in masks[:-1]]))) < 5
    attn = [torch.cat([m.flatten() for m in one["masks"][f"blocks.{i}.attn.probs"]]) for i in (0, 1)]
    assert abs(phi(*attn)) < 5


@sees(
    "dropout of a whole activation behind a column drawn by each rank",
    "draw_alike.before",
    " and reads_whole(args):",
    " and False:",
    case="True",
)
@pytest.mark.parametrize("sp", [True, rest(False)])
def test_what_is_dropped_of_a_whole_activation_behind_a_column_is_the_same_on_all_ranks(sp):
    one, two = run_distributed(train, 2, 2, sp, steps=4, kind="late")
    for block in (0, 1):
        (mine, other), (local, others) = (
            [torch.cat([m.flatten() for m in rank["masks"][f"blocks.{block}.attn.{name}"]]) for rank in (one, two)]
            for name in ("whole", "probs")
        )
        assert torch.equal(mine, other)
        kept = (1 - P) ** 2  # its input dropped out already
        assert abs(float(mine.double().mean()) - kept) < 5 * (kept * (1 - kept) / mine.numel()) ** 0.5
        assert abs(phi(local, others)) < 5


@sees(
    "whole activations dropped out apart",
    "SequenceRegion.open_gather",
    "        if self.sp and self.streams.draws:\n            self.streams.end()\n",
    "",
    case="True",
)
@pytest.mark.parametrize("sp", [True, rest(False)])
def test_what_a_function_drops_in_front_of_the_columns_is_the_same_on_all_ranks(sp):
    # Without the self-check, which would find other masks and train whole sequences.
    one, two = run_distributed(train, 2, 2, sp, steps=4, kind="calling", self_check=False)
    for name in ("blocks.0.attn", "blocks.1.attn"):
        assert [float(mask.double().mean()) for mask in one["masks"][name]] != [1.0] * 4
        assert all(map(torch.equal, one["masks"][name], two["masks"][name]))


@sees(
    "a recompute forgets that a dropout was of a whole activation",
    "draw_alike.before",
    "switches = streams.was_alike()",
    "pass",
    case="True",
)
@pytest.mark.parametrize("sp", [True, rest(False)])
@pytest.mark.more
def test_a_recompute_drops_of_a_whole_activation_what_was_dropped(sp):
    kept = run_distributed(train, 2, 2, sp, steps=4, kind="late")[0]["losses"]
    for recompute in ("block", "block, reentrant", "attn", "columns"):
        again = run_distributed(train, 2, 2, sp, steps=4, kind="late", recompute=recompute)[0]["losses"]
        assert again == pytest.approx(kept, rel=1e-9), recompute


@pytest.mark.parametrize("sp", [True, rest(False)])
@pytest.mark.parametrize(
    ("recompute", "plain"),
    [("block", ""), ("between", "called"), *(pytest.param(one, "", marks=pytest.mark.matrix) for one in ("attn", "columns"))],
)
def test_recomputed_blocks_drop_what_they_dropped(recompute, plain, sp):
    """Another mask in the recompute would be another gradient, and another loss at the next step."""
    kept = run_distributed(train, 2, 2, sp, steps=4, recompute=plain)[0]["losses"]
    again = run_distributed(train, 2, 2, sp, steps=4, recompute=recompute)[0]["losses"]
    assert again[0] == pytest.approx(kept[0], rel=1e-12)
    assert again == pytest.approx(kept, rel=1e-9)


class Drawing(Dropping):
    """Draws from Python's generator and numpy's too."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind=kind)
        for block in self.blocks:
            block.attn.forward = Scaled(block.attn)


class Scaled:
    """A forward that somebody put on an instance, as wrappers of libraries do."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return type(self.module).forward(self.module, x) * (random.random() + float(np.random.rand()))


def draw(recompute: str, sp: bool, kind: str) -> dict[str, Any]:
    module = Drawing(kind)
    L.seed_everything(5, verbose=False)
    data = DataLoader(TensorDataset(torch.randint(31, (24, 11))), batch_size=8)
    strategy = SeqParallelStrategy(tp=2, sp=sp, self_check=False, regather=True, recompute=recompute)
    quiet_trainer(devices=2, strategy=strategy, max_steps=3).fit(module, data)
    return {"losses": module.losses, "weights": gather_weights(module), "next": (random.random(), torch.rand(2).tolist())}


def draw_all(cases: list[tuple[bool, str]]) -> list[dict[str, dict[str, Any]]]:
    return [{recompute: draw(recompute, sp, kind) for recompute in ("none", "selective", "full")} for sp, kind in cases]


@sees(
    "recompute: random streams not restored",
    "RecomputedForward.__call__",
    "use_reentrant=False)",
    "use_reentrant=False, preserve_rng_state=False)",
)
@sees("recompute: draws of Python and numpy made anew", "HostDraws.again", "        _restore_host(self._began)\n", "")
@pytest.mark.more
def test_what_was_dropped_is_dropped_again():
    cases = [(True, ""), (True, "late"), (False, "calling"), (False, "late")]
    for case, runs in zip(cases, run_distributed(draw_all, 2, cases)[0], strict=True):
        kept = runs["none"]
        for recompute in ("selective", "full"):
            again = runs[recompute]
            assert again["losses"] == kept["losses"], (case, recompute)
            assert all(torch.equal(again["weights"][n], kept["weights"][n]) for n in kept["weights"]), (case, recompute)
            assert again["next"] == kept["next"], (case, recompute)


class Stray(Dropping):
    """Draws for whole samples, in no module of their own.

    Args:
        where: in the block's own forward, or in that of its attention: between the columns and the row, or behind it.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MultiheadBlock() if where == "multihead" else StrayBlock(where) for _ in range(2))


class StrayBlock(Block):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.attn, self.where = StrayAttention(where), where
        if where == "values":
            self.attn = FewHeads()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.where == "samples":  # as stochastic depth that leaves samples out
            self.masks = [*getattr(self, "masks", []), torch.randperm(len(x))[: len(x) // 2]]
            return x.index_add(0, self.masks[-1], x[self.masks[-1]], alpha=0.1)
        if self.where == "square":  # as many features as positions
            self.masks = [*getattr(self, "masks", []), torch.rand(len(x), 16) > 0.1]
            return x * self.masks[-1][:, None]
        return x


class StrayAttention(DropAttention):
    def __init__(self, where: str) -> None:
        super().__init__(16, 4)
        self.where, self.path = where, HouseDropPath()
        if where == "seeded":
            self.numbers = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "functional":
            return self.proj(self._heads(self.qkv(x)) + self.qkv(F.dropout(x, 0.1)).chunk(3, -1)[0])
        y, b = self._heads(self.qkv(x)), len(x)
        if self.where == "sample":
            y = y * (torch.rand(b, 1, 1) > 0.1)
        if self.where == "features":
            y = y * (torch.rand(b, 1, y.shape[-1]) > 0.1)
        if self.where == "seeded":
            y = y * (torch.rand(y.shape, generator=self.numbers) > 0.1)
        y = self.proj(self.path(y) if self.where == "module" else y)
        return y * (torch.rand(b, 1, 1) > 0.1) if self.where == "behind" else y

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super()._mix(q, k, v)
        if self.where in ("shared", "pairs"):
            ones = torch.ones(len(q) if self.where == "shared" else 1, 1, *[q.shape[-2]] * 2)
            out = (q @ k.transpose(-1, -2)).softmax(-1) * F.dropout(ones, 0.1) @ v
        return out


class FewHeads(nn.Module):
    """Two key and value heads for four of the query; drops out the values."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.groups = 4, 2
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.o, self.drop = nn.Linear(16, 16), nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.heads, 4).transpose(1, 2)
        k, v = (y.view(b, s, self.groups, 4).transpose(1, 2) for y in (self.k(x), self.drop(self.v(x))))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class MultiheadBlock(nn.Module):
    """What follows torch's attention is drawn behind its ``out_proj``, which torch never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + F.dropout(self.attn(y, y, y, need_weights=False)[0], 0.1)


class HouseDropPath(DropPath):
    """Known by the end of its name."""


def fit_stray(where: str, sp: bool, *, length: int = 16, tp: int = 2) -> tuple[str, int, dict[str, list[Tensor]]]:
    data = DataLoader(TensorDataset(torch.randint(31, (176, length))), batch_size=8)
    module, told = Stray(where), "trained"
    trainer = quiet_trainer(devices=tp, strategy=SeqParallelStrategy(tp=tp, sp=sp), max_steps=4)
    try:
        trainer.fit(module, data)
    except ValueError as error:
        told = str(error)
    masks = {name: part.masks for name, part in module.named_modules() if hasattr(part, "masks")}
    record = record_of(module)
    masks["sp"] = [region.sp for region in record.regions] if record is not None else []
    return told, trainer.global_step, masks


@sees(
    "the self-check does not look at what is drawn",
    "_wrong_draw",
    "if (whole == shape) is not draw.own:",
    "if (whole == shape) is not None:",
    case="shared-True-shape0",
)
@pytest.mark.parametrize(
    ("where", "sp", "shape"),
    [
        *((where, sp, [1 if where == "pairs" else 8, 1, 16, 16]) for where in ("shared", "pairs") for sp in (True, False)),
        *(("functional", sp, [8, 16, 16]) for sp in (True, False)),
        *(("sample", sp, [8, 1, 1]) for sp in (True, False)),
    ],
)
def test_the_self_check_sees_draws_whose_shape_tells_nothing(where, sp, shape):
    """They fit what this rank has by chance: only beside those of the whole model it shows that they do not."""
    for told, step, _ in run_distributed(fit_stray, 2, where, sp):
        assert f"of shape {shape}, drawn in blocks.0" in told
        assert "are as many as in the whole model, so that all ranks must draw the same" in told
        assert step == 0


@sees("an order of samples taken for no draw", "DRAWS", '    "randperm",\n', "", case="samples")
@pytest.mark.parametrize("where", ["square", "samples", "behind"])
def test_a_block_that_draws_for_all_positions_keeps_whole_sequences(where):
    (told, _, one), (_, _, two) = run_distributed(fit_stray, 2, where, True)
    assert told == "trained"
    assert one["sp"] == [False]
    for name in ("blocks.0", "blocks.1") if where != "behind" else ():
        assert torch.equal(torch.stack(one[name]), torch.stack(two[name]))


@sees(
    "stochastic depth on the rank's own stream without sp",
    "_Swap._hook_dropouts",
    "if (stochastic or isinstance(module, _DropoutNd)) and any(",
    "if (stochastic and self.plan.sp_at(name) or isinstance(module, _DropoutNd)) and any(",
    case="module-False",
)
@pytest.mark.parametrize(
    ("where", "sp"),
    [
        *((where, True) for where in ("features", "module", "multihead")),
        ("module", False),
        *(rest(where, False) for where in ("features", "multihead")),
    ],
)
def test_the_self_check_passes_draws_that_are_right(where, sp):
    ranks = run_distributed(fit_stray, 2, where, sp)
    for told, _, masks in ranks:
        assert told == "trained"
        assert masks["sp"] == [sp]
    if where == "module":  # stochastic depth between columns and row drops the same samples
        one, other = (torch.cat(masks["blocks.0.attn.path"]) for *_, masks in ranks)
        assert torch.equal(one, other)
        assert 0 < float(one.double().mean()) < 1


@sees(
    "a generator of the user's own taken for the rank's, before training",
    "_Observer.__torch_dispatch__",
    "own = not drawn.seeded and (draws_apart() or any(region.streams.own for region in self._regions))",
    "own = any(region.streams.own for region in self._regions)",
    case="True",
)
@pytest.mark.parametrize("sp", [True, rest(False)])
def test_the_self_check_refuses_a_generator_of_ones_own_for_features(sp):
    for told, step, _ in run_distributed(fit_stray, 2, "seeded", sp):
        assert "of shape [8, 16, 8], drawn in blocks.0.attn" in told
        assert "are a part of [8, 16, 16] in the whole model" in told
        assert "from a generator of your own all ranks draw the same" in told
        assert step == 0


@sees(
    "ranks that hold the same value heads drop them apart",
    "_is_drawn_by_several",
    "part != size and part * ranks > size and not is_sequence(at, size)",
    "part != size and part * ranks < size and not is_sequence(at, size)",
    case="True",
)
@pytest.mark.parametrize("sp", [True, rest(False)])
@pytest.mark.more
def test_ranks_that_share_value_heads_may_not_drop_them_apart(sp):
    for told, step, _ in run_distributed(fit_stray, 4, "values", sp, length=8, tp=4):
        assert (
            "of shape [8, 8, 4], drawn in blocks.0.attn.drop (or behind it), are more than a rank's part of [8, 8, 8]" in told
        )
        assert "some of 4 ranks hold the same key and value heads" in told
        assert step == 0
    told, _, masks = run_distributed(fit_stray, 2, "values", sp, length=8)[0]
    assert (told, masks["sp"]) == ("trained", [sp])  # there each has its own
