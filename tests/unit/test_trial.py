"""Trial runs without processes: batches dealt out, configurations made small, and what is said of wrong tensors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seqpar.inference.model_copy import Quiet
from lightning_seqpar.init.model_source import shrink
from lightning_seqpar.verify.parity import Trace, compare, largest_gap
from lightning_seqpar.verify.training import (
    Digest,
    KeepFloat64,
    make_batch,
    reverse_samples,
    shorten,
    split_samples,
    switch_off_dropout,
)
from lightning_seqpar.verify.trial import verify_parity
from lightning_seqpar.verify.trial_comparison import (
    Wrong,
    describe_difference,
    describe_late,
    describe_ranks,
    group_first_wrong,
)
from tests.mutants import sees

SIZES = {"tp": 2, "dp": 4}
RIGHT = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (2 * RIGHT, "exactly 2.0 × too large (as many as tp ranks): summed twice?"),
        (4 * RIGHT, "exactly 4.0 × too large (as many as dp ranks): summed where it should be averaged?"),
        (3 * RIGHT, "exactly 3.0 × too large: summed twice?"),
        (RIGHT / 2, "exactly 1/2 of the right one (1 of 2 tp ranks): averaged where it should be summed, or twice?"),
        (1.37 * RIGHT, "1.37 times the right one, everywhere"),
        (0 * RIGHT, "zero: is it detached, or does a collective have no backward?"),
        (None, "there is none: the parameter is not reached on the ranks"),
        (RIGHT[:4], "its shape is [4, 6] instead of [8, 6]: not gathered, or cut twice?"),
        (RIGHT.clone().fill_(float("nan")), "not finite"),
        (RIGHT.roll(2, 0), "the same numbers in other places: are rows, heads or parts of a fused weight in another order?"),
        (RIGHT.sin(), "no multiple of the right one (cosine"),
        (RIGHT + 1e-8 * RIGHT.sin(), "right to rounding of a narrower type: is something computed in float32"),
    ],
)
def test_a_wrong_tensor_is_described_by_what_it_looks_like(got, says):
    assert describe_difference(RIGHT, got, SIZES).startswith(says)
    assert describe_difference(None, RIGHT, SIZES).startswith("there is one, and one process has none")


@pytest.mark.parametrize(
    ("of_rank", "replicas", "says"),
    [
        (lambda rank: RIGHT * (0.3, 0.7)[rank], 1, "each rank holds a part of it, and the parts add up"),
        (lambda rank: RIGHT + (1, -1)[rank] * RIGHT.sin(), 2, "each replica holds its own, and their mean is the right one"),
        (lambda rank: RIGHT * (0.3, 0.9)[rank], 1, "the ranks hold different ones"),
    ],
)
def test_ranks_that_hold_different_gradients_are_told_apart_by_sums(of_rank, replicas, says):
    digests = [Digest.of("weight", of_rank(rank)) for rank in range(2)]
    told = describe_ranks(digests, Digest.of("weight", RIGHT), replicas)
    assert told.startswith(says)


@sees(
    "verify: an update is taken for a sum",
    "describe_late",
    "    if not hint.startswith((_NO_MULTIPLE, _ROUNDED)) or",
    "    if True or",
)
def test_what_is_wrong_first_is_told_once_for_tensors_that_look_alike():
    names = {"a.0.norm.weight": "twice", "a.1.norm.weight": "twice", "b": "zero"}
    wrong = [Wrong(name, "gradient of step 1", 1.0 + (name == "b"), 1.0, hint) for name, hint in names.items()]
    late = Wrong("a.0.norm.weight", "weight after 2 steps", 9.0, 9.0, "twice")
    assert [(one.what, one.count) for one in group_first_wrong([*wrong, late])] == [("b", 1), ("a.*.norm.weight", 2)]
    hint = describe_difference(RIGHT, RIGHT.sin(), SIZES)
    assert "is the update another one" in describe_late(hint, "gradient of step 2")
    assert "does the checkpoint lose something" in describe_late(hint, "weight after step 3, resumed")


def test_a_batch_is_dealt_out_by_its_samples():
    batch = {"ids": torch.arange(8).view(4, 2), "scale": torch.tensor(3.0), "names": ["a", "b"]}
    first, second = split_samples(batch, 2)
    assert first["ids"].tolist() == [[0, 1], [2, 3]]
    assert second["ids"].tolist() == [[4, 5], [6, 7]]
    assert first["scale"] == 3.0
    assert reverse_samples(batch)["ids"][0].tolist() == [6, 7]
    with pytest.raises(ValueError, match=r"it has 4 samples, and it must be dealt out over 3 parts"):
        split_samples(batch, 3)
    with pytest.raises(ValueError, match="tensors whose first dims differ"):
        split_samples([torch.zeros(4, 2), torch.zeros(3)], 2)


@sees(
    "verify: the second batch is as long as the first",
    "shorten",
    "tensor = tensor.narrow(dim, 0, short)",
    "tensor = tensor.narrow(dim, 0, length)",
)
def test_sequences_are_cut_to_an_odd_length_with_their_masks():
    batch = shorten((torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 1, 16, 16), torch.zeros(2, 16, 3)))
    assert [list(tensor.shape) for tensor in batch] == [[2, 11], [2, 1, 11, 11], [2, 11, 3]]
    assert shorten(torch.zeros(2, 3, 8, 8)) is None
    assert shorten(torch.zeros(2, 16, 3), 2).shape == (2, 12, 3), "by a multiple of 2"
    assert shorten(torch.zeros(2, 13, 3), 4).shape == (2, 9, 3)
    assert shorten(torch.zeros(2, 4, 3), 4) is None


@sees("verify: dropout stays", "switch_off_dropout", "                values[name] = 0.0\n", "                pass\n")
def test_dropout_is_switched_off_wherever_it_is_set():
    class Config:
        hidden_dropout = 0.1

        def __init__(self) -> None:
            self.layerdrop = 0.2

    model = nn.TransformerEncoderLayer(8, 2, dropout=0.3)
    model.config, model.drop_path, model.backdrop = Config(), 0.1, "blue"
    switch_off_dropout(model)
    assert model.config.layerdrop == model.drop_path == 0.0
    model.train()
    x = torch.randn(3, 2, 8)
    assert torch.equal(model(x), model(x))


@sees(
    "verify: casts to narrower types are made",
    "KeepFloat64.__torch_dispatch__",
    '            kwargs["dtype"] = torch.float64\n',
    "            pass\n",
)
def test_casts_of_float64_to_narrower_types_are_turned_down():
    x = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    with KeepFloat64() as mode:
        assert torch.equal(torch.softmax(x, -1, dtype=torch.float32), torch.softmax(x, -1))
        assert x.float().dtype is torch.float64
        assert torch.ones(2).dtype is torch.float32
    assert mode.casts == 2


@sees("verify: small heads are not small", "_shrink_width", "scale = min(1.0, HEAD_DIM / max(1, per_head))", "scale = 1.0")
def test_a_configuration_is_made_small_with_its_heads_kept():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_key_value_heads=8)
    assert "hidden_size 4096 → 256" in shrink(config)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 8)
    assert config.num_hidden_layers == 2
    kinds = transformers.Gemma3TextConfig()
    shrink(kinds)
    assert len(kinds.layer_types) == kinds.num_hidden_layers == 6, "its sixth block is the first of its kind"
    small = transformers.LlamaConfig(hidden_size=16, num_attention_heads=4, head_dim=4, intermediate_size=32, vocab_size=64)
    small.num_hidden_layers = 1
    assert shrink(small) == [], "what is small does not grow"


def test_a_batch_of_tokens_is_made_up_for_a_model_of_hugging_face_s():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=40)
    batch = make_batch(transformers.GPT2LMHeadModel(config), 3, 7)
    assert batch["input_ids"].shape == (3, 7)
    assert torch.equal(batch["labels"], batch["input_ids"])
    with pytest.raises(ValueError, match="nothing says what the model takes"):
        make_batch(nn.Linear(2, 2), 1, None)


@sees(
    "verify: a number that is not finite is lost among errors", "largest_gap", "math.inf if any(map(math.isnan, gaps)) else", ""
)
def test_a_number_that_is_none_differs_from_every_number():
    right, wrong = Trace([1.0], {"a": RIGHT}, 1.0, {"a": RIGHT, "b": RIGHT}), RIGHT.clone()
    wrong[0, 0] = float("nan")
    # "b" comes behind it, and its comparison is an ordinary one.
    row = compare(right, Trace([1.0], {"a": RIGHT}, 1.0, {"a": wrong, "b": RIGHT + 1e-12})).rows[-1]
    assert (row.ok, row.where, row.error) == (False, "a", math.inf)
    assert largest_gap(RIGHT, RIGHT[:4]) == largest_gap(None, RIGHT) == math.inf
    assert largest_gap(None, None) == 0.0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"module_or_factory": 3, "config": {"tp": 2}}, "module_or_factory=3 is neither a module nor a function"),
        (
            {"module_or_factory": nn.Linear, "config": "dpp"},
            "config='dpp' is no strategy that Lightning knows; did you mean 'ddp'",
        ),
        ({"module_or_factory": nn.Linear, "config": 3}, "config=3 is no strategy"),
        ({"module_or_factory": nn.Linear, "config": {"tp": 1}}, "world_size=1: there is nothing to compare"),
        ({"module_or_factory": nn.Linear, "config": {"tp": 2}, "world_size": 3}, "world size 3 does not divide"),
        ({"module_or_factory": lambda: None, "config": {"tp": 2}}, "can't be sent to other processes"),
    ],
)
def test_what_makes_no_trial_is_refused_before_a_process_starts(given, says):
    with pytest.raises(ValueError, match=says):
        verify_parity(**given)


GROUPS = torch.tensor([3, 3, 8], dtype=torch.int32)  # one expert has no tokens


@sees(
    "grouped products: groups one row too early",
    "model_copy:grouped_product",
    "zip([0, *ends]",
    "zip([1, *ends]",
    case="rows-Quiet",
)
@sees(
    "the self-check's grouped products in their kernel's types",
    "Quiet._run",
    "if is_grouped_in_float64(func, args):",
    "if False:",
    case="rows-Quiet",
)
@pytest.mark.parametrize("mode", [Quiet, KeepFloat64])
@pytest.mark.parametrize(
    ("first", "second", "groups"),
    [((8, 16), (3, 16, 8), GROUPS), ((3, 8, 16), (16, 8), GROUPS), ((16, 8), (8, 16), GROUPS), ((3, 8, 16), (3, 16, 8), None)],
    ids=["rows", "columns", "both", "none"],
)
def test_grouped_products_are_those_of_the_kernel(mode, first, second, groups):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(first, generator=generator), torch.randn(second, generator=generator)

    def run(a: Tensor, b: Tensor) -> list[Tensor]:
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        out = F.grouped_mm(a, b, offs=groups)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), (a, b))]

    expected = run(a, b)
    with mode():
        found = run(a.double(), b.double())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is torch.float64
        torch.testing.assert_close(one.float(), other, rtol=1e-4, atol=1e-5)
