"""Copies of large models: one block of each kind, a short vocabulary, few tokens; and nothing of it in the model itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_seqpar.inference.block_kinds import kind_of
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.inference.model_copy import detached_copy
from lightning_seqpar.inference.reduction import LARGE, Reduction
from tests.helpers import zoo
from tests.mutants import sees

CPU = torch.device("cpu")
ROWS, KEPT = 31, 7


class Block(nn.Module):
    """A block that counts its calls."""

    def __init__(self, width: int = 8, window: int = 0, index: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.window, self.layer_idx = window, index
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x.shape[1])
        return x + self.down(F.gelu(self.up(x)))


class Indexed(Block):
    """A block that decides by its own index."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.layer_idx % 2 else x


class Cached(Block):
    """A block that hands its index to a cache alone."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return super().forward(x) if cache is None else cache.layers[self.layer_idx]


class Renaming(Block):
    """A block that decides by its index under another name."""

    def forward(self, x: Tensor) -> Tensor:
        at = self.layer_idx
        return x if at == 1 else super().forward(x)


def is_first(at: int) -> bool:
    return at == 0


class Asking(Block):
    """A block that has a function decide by its index."""

    def forward(self, x: Tensor) -> Tensor:
        return x if is_first(self.layer_idx) else super().forward(x)


class Switched(nn.Module):
    """A block that does what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.calls: list[bool] = []

    def forward(self, x: Tensor, doubles: bool) -> Tensor:
        self.calls.append(doubles)
        x = self.inner(x)
        return x * 2 if doubles else x


class Tower(nn.Module):
    def __init__(self, blocks: list[nn.Module], rows: int = ROWS) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=rows, pad_token_id=rows - 1, hidden=rows)
        self.tokens, self.positions = nn.Embedding(rows, 8), nn.Embedding(16, 8)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(8, rows)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x).view(-1, self.config.vocab_size)


def tower(*kinds: dict[str, Any], kind: type = Block) -> Tower:
    torch.manual_seed(0)
    return Tower([kind(**settings) for settings in kinds])


def reduced(**options: Any) -> Reduction:
    return Reduction(skips_repeats=True, **options)


@sees(
    "cp: long sequences of small models are proved whole",
    "Reduction.variants",
    "            return [Reduction()] if kept is None else [Reduction(lengths=(length or 0, kept)), Reduction()]\n",
    "            return [Reduction()]\n",
)
def test_of_a_small_model_long_sequences_are_cut_and_nothing_else():
    assert Reduction.variants(zoo.Zoo("gqa"), 2, 256, 256) == [Reduction()]
    short, whole = Reduction.variants(zoo.Zoo("gqa"), 2, 8191, 8191)
    assert short == Reduction(lengths=(8191, 35))
    assert whole == Reduction()


@sees(
    "the self-check skips a kind of block",
    "block_kinds:_with_first",
    "kind = kind_of(block, decisive), told, planned and name == last",
    "kind = type(block), told, planned and name == last",
)
@sees(
    "behind each block of a reduced copy activations may become whole",
    "block_kinds:_with_first",
    ", told, planned and name == last\n",
    ", told\n",
)
@sees(
    "the self-check skips blocks that the plan treats in another way",
    "block_kinds:_with_first",
    "kind = kind_of(block, decisive), told, planned and name == last",
    "kind = kind_of(block, decisive), planned and name == last",
)
def test_blocks_of_each_kind_are_there_once():
    blocks = tower({}, {"window": 4}, {}, {"window": 4}, {}, {"width": 12}, {"index": 9}, {})
    copied = detached_copy(blocks, CPU, torch.float64, reduced(), {"head": "vocab"})
    at = list(copied.layers)
    assert [at.index(block) for block in at] == [0, 1, 0, 1, 0, 5, 0, 7]  # activations may become whole behind the last
    without_plan = list(detached_copy(blocks, CPU, torch.float64, reduced()).layers)
    assert [without_plan.index(block) for block in without_plan] == [0, 1, 0, 1, 0, 5, 0, 0]
    assert reduced().numel(blocks) == sum(parameter.numel() for parameter in copied.parameters())
    told = list(detached_copy(tower(*[{}] * 5), CPU, torch.float64, reduced(), {"layers.2.up": "column"}).layers)
    assert [told.index(block) for block in told] == [0, 0, 2, 0, 4]


def double(x: Tensor) -> Tensor:
    return x * 2


def with_attribute(value: Any) -> Block:
    block = Block()
    block.setting = value
    return block


def with_hook() -> Block:
    block = Block()
    block.up.register_forward_hook(lambda module, args, out: out)
    return block


UNLIKE: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "a function": (lambda: with_attribute(None), lambda: with_attribute(double)),
    "what a function holds": (lambda: with_attribute(lambda x: x), lambda: with_attribute(lambda x: x + 1)),
    "a tuple": (lambda: with_attribute((0, 0)), lambda: with_attribute((1, 1))),
    "a config": (lambda: with_attribute(SimpleNamespace(mixes=False)), lambda: with_attribute(SimpleNamespace(mixes=True))),
    "a hook": (Block, with_hook),
    "what trains": (Block, lambda: Block().requires_grad_(False)),
    "its own index": (Indexed, lambda: Indexed(index=1)),
    "an index under another name": (Renaming, lambda: Renaming(index=1)),
    "an index that a function gets": (Asking, lambda: Asking(index=1)),
}


@sees(
    "blocks that differ in a function, a tuple or a config pass for equal ones",
    "kind_of",
    "(key, setting_key(value))",
    "(key, value if isinstance(value, bool | int | float | str) else None)",
    case="a function",
)
@sees(
    "frozen blocks pass for equal to those that train",
    "kind_of",
    "(n, tuple(t.shape), t.requires_grad)",
    "(n, tuple(t.shape))",
    case="what trains",
)
@sees(
    "blocks that decide by their index pass for equal ones",
    "_attributes_that_decide",
    "method.args.args[0].arg and _decides(node, around)",
    "method.args.args[0].arg and False",
    case="its own index",
)
@pytest.mark.parametrize("case", UNLIKE)
def test_blocks_that_may_do_different_things_are_kinds_of_their_own(case):
    one, other = UNLIKE[case]
    assert kind_of(one()) == kind_of(one())
    assert kind_of(one()) != kind_of(other())
    assert kind_of(Cached(index=1)) == kind_of(Cached())  # a cache alone is given the index


class Told(Tower):
    """Tells its later blocks to do something else, and has a module between the blocks."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.between = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for at, layer in enumerate(self.layers):
            x = layer(x, at > 3)
            if at == 2:  # the next call is skipped
                x = x + self.between(x)
        return self.head(x)


@sees(
    "calls that tell a block to do something else are skipped",
    "_Repeat.__call__",
    "        form = setting_key((args, kwargs), 5)\n",
    "        form = None\n",
)
@sees("parts of a block that is computed are skipped", "Repeats._find", "if id(module) not in inner and len(", "if len(")
@sees(
    "what stands between blocks gets no gradient in the self-check",
    "_passed_through",
    "    return passed if first is out else type(out)((passed, *out[1:]))\n",
    "    return out\n",
)
def test_each_form_of_call_is_computed_with_all_that_is_in_the_block():
    copied = detached_copy(Told([Switched() for _ in range(8)]), CPU, torch.float64, reduced())
    ids = torch.zeros(1, 5, dtype=torch.long)
    example = Example("the test", "forward", (ids,), {}, reduction=reduced())
    with example.repeats(copied):
        copied(ids).sum().backward()
    assert copied.layers[0].calls == [False, False, True, True]
    assert copied.layers[0].inner.calls == [5] * 4
    assert float(copied.between.weight.grad.abs().max()) > 0


@sees("experts share the weights of one", "stacks", "if kinds.count(type(block)) > 1:", "if False:")
def test_experts_are_no_stack():
    for depth in (2, 4):
        model = nn.ModuleList(zoo.ListMoE(8, 8) for _ in range(depth))
        experts = list(detached_copy(model, CPU, torch.float64, reduced())[0].experts)
        assert len(set(experts)) == 4


@sees(
    "the self-check computes equal blocks for the first input alone",
    "_begin_again",
    "        repeat.calls.clear()\n",
    "        repeat.calls.copy()\n",
)
def test_equal_blocks_are_computed_twice_for_each_input():
    copied = detached_copy(tower({}, {}, {}, {}, {}, {}), CPU, torch.float64, reduced(), {"head": "vocab"})
    example = Example("the test", "forward", (torch.zeros(1, 5, dtype=torch.long),), {}, reduction=reduced())
    with example.repeats(copied):
        copied(torch.zeros(1, 5, dtype=torch.long))
        copied(torch.ones(1, 5, dtype=torch.long))
    assert copied.layers[0].calls == [5, 5, 5, 5]
    copied(torch.zeros(1, 4, dtype=torch.long))
    assert copied.layers[0].calls[4:] == [4] * 5


def test_a_recomputed_block_gets_its_gradient():
    ids = torch.randint(ROWS, (2, 6), generator=torch.Generator().manual_seed(0))
    example = Example("the test", "forward", (ids,), {}, reduction=reduced())
    grads = []
    for recomputed in (False, True):
        copied = detached_copy(tower({}, {}, {}, {}), CPU, torch.float64, reduced())
        if recomputed:
            run = copied.layers[0].forward
            copied.layers[0].forward = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
        with example.repeats(copied) as repeats:
            loss = example.run(copied)
            repeats.compute_all()
            loss.backward()
        grads.append([parameter.grad for parameter in copied.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_short_vocabulary_is_told_to_all_that_know_it():
    model = tower({}, {}, {})
    before = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    copied = detached_copy(model, CPU, torch.float64, reduced(vocabularies={ROWS: KEPT}))
    assert copied.tokens.weight.shape == (KEPT, 8)
    assert copied.head.weight is copied.tokens.weight
    assert copied.head.bias.shape == (KEPT,)
    assert copied.positions.weight.shape == (16, 8)
    assert (copied.tokens.num_embeddings, copied.head.out_features) == (KEPT, KEPT)
    # A width that happens to be as large is none; the padding's id is one that the copy has.
    assert copied.config == SimpleNamespace(vocab_size=KEPT, pad_token_id=(ROWS - 1) % KEPT, hidden=ROWS)
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == before
    assert model.config.vocab_size == model.tokens.num_embeddings == model.head.out_features == ROWS
    ids = torch.arange(12).view(2, 6)
    assert copied(Example("", "forward", (ids,), {}).reduced(reduced(vocabularies={ROWS: KEPT})).args[0]).shape == (12, KEPT)


def test_the_example_is_cut_with_the_model():
    ids, mask = torch.arange(40).view(4, 10), torch.ones(4, 1, 10, 10)
    labels = torch.where(ids < 5, -100, ids)
    batch = {"ids": ids, "labels": labels, "mask": mask, "weight": torch.ones(4), "name": "x"}
    example = Example("the test", "training_step", (batch, 0), {})
    assert (example.length, example.longest) == (10, 10)
    cut = example.reduced(reduced(vocabularies={ROWS: KEPT}, lengths=(10, 4), samples=2))
    (small, index) = cut.args
    assert index == 0
    assert small["name"] == "x"
    assert small["ids"].tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]  # 10 to 13 modulo 7
    assert small["labels"].tolist() == [[-100] * 4, [3, 4, 5, 6]]
    assert small["mask"].shape == (2, 1, 4, 4)
    assert small["weight"].shape == (2,)
    assert cut.reduction.skips_repeats
    assert torch.equal(batch["ids"], ids)


def variants(model: nn.Module, tp: int, length: int | None = 1024) -> list[Reduction]:
    found = Reduction.variants(model, tp, length, length or 0)
    assert found[-1] == Reduction()  # what runs at no smaller size is copied as it is
    return found


class Large(nn.Module):
    """Shapes of a model with a large vocabulary; on the meta device."""

    def __init__(self, rows: int = 50257, dim: int = 512, window: int = 0, position_rows: int = 4096) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(rows, dim), nn.Embedding(position_rows, dim)
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(dim, 4, 4 * dim) for _ in range(4))
        self.sliding_window = window


def large(**options: Any) -> Large:
    with torch.device("meta"):
        model = Large(**options)
    assert sum(parameter.numel() for parameter in model.parameters()) > LARGE
    return model


@sees("a short vocabulary has another remainder", "_short_vocabularies", "* tp + rows % tp", "* tp")
def test_what_is_left_has_the_remainders_of_what_was():
    for tp in (2, 3, 4, 8):
        smallest = variants(large(), tp)[0]
        kept = smallest.vocabularies[50257]
        assert kept % tp == 50257 % tp
        assert 512 <= kept < 600
        assert kept != 512
        assert smallest.lengths is not None
        assert smallest.lengths[1] < 100
        assert variants(large(), tp, 1023)[0].lengths[1] % (2 * tp) == 1023 % (2 * tp)
    assert variants(large(), 2, 20)[0].lengths is None
    assert variants(large(), 2, None)[0].lengths is None


def test_what_a_copy_needs_is_left():
    long = variants(large(position_rows=65536), 2)
    assert set(long[0].vocabularies) == {50257, 65536}
    assert [one.vocabularies.get(65536, 0) >= 1024 for one in long][:2] == [False, True]  # a row for each position
    assert 2048 not in variants(large(rows=2048), 2)[0].vocabularies  # rows that are also features
    assert variants(large(window=64), 2)[0].lengths[1] > 64
    # Attention is whole on every rank: a long window proves nothing.
    assert variants(large(window=4096), 2)[0].lengths[1] < 100
    with torch.device("meta"):
        model = large()
        model.h = nn.ModuleList(zoo.ListMoE(512, 512, count=16) for _ in range(4))
    assert variants(model, 2)[0].lengths[1] >= 128  # experts get tokens


def test_a_wide_copy_computes_in_float32():
    assert variants(large(), 2)[0].dtype(large()) == torch.float64
    wide = large(dim=4096)
    assert variants(wide, 2)[0].dtype(wide) == torch.float32
