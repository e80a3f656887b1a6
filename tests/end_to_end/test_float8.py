"""``float8``: the numbers of one process that casts as torchao does, and what is sent and kept in 8 bits."""

from __future__ import annotations

import copy
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_seqpar import ParallelConfig, SeqParallelStrategy
from lightning_seqpar.distributed.async_ops import all_reduce_max
from lightning_seqpar.layout.param_layout import Shard
from lightning_seqpar.region.float8 import Float8, SharedFeatures
from lightning_seqpar.region.products import Tokens
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.guards.before_training import check_float8
from lightning_seqpar.verify.parity import Trace, compare, norm_of
from tests.helpers import models
from tests.helpers.fit import fit, fit_or_tell, metered, quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees

RECIPES = ("tensorwise", "rowwise")
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GPT": ("GPT", {"tied": True}, {"accumulate": 2, "clip": 0.05}),
    "llama": ("HuggingFace", {"family": "llama"}, {"length": 11}),
    "one head of keys": ("Zoo", {"kind": "fused_mqa"}, {}),
    "experts": ("Zoo", {"kind": "list_moe"}, {}),
    "encoder and decoder": ("HuggingFace", {"family": "t5"}, {"length": 9}),
    "latent": ("Zoo", {"kind": "latent"}, {}),
    "adapters": ("Adapted", {"family": "llama", "targets": ["q_proj", "up_proj", "down_proj"]}, {}),
}
BESIDE = {"experts", "encoder and decoder", "latent", "adapters"}  # whose modules read more of what is gathered


def recorded(model: str, args: dict[str, Any], **how: Any) -> tuple[Trace, list[str]]:
    """The trace of a run, and which linears computed in float8."""
    from tests.helpers.float8 import InFloat8

    seen = InFloat8()
    trace = fit(model, args, **{"steps": 2, "callbacks": [seen], **how})
    return trace, seen.names


def fit_cases(world: int, strategy: dict[str, Any], names: set[str]) -> dict[tuple[str, str], tuple[Trace, list[str]]]:
    return {
        (recipe, name): recorded(model, args, world=world, strategy={"float8": recipe, **strategy}, **how)
        for recipe in RECIPES
        for name, (model, args, how) in CASES.items()
        if name in names
    }


@sees(
    "float8: what is behind the end of a sequence counts for its scale",
    "float8:_own_rows",
    "> 0:",
    "> 10**9:",
    case="4-tp2-cp2-fp8_groupsTrue",
)
@sees(
    "float8: each rank scales by its own largest number",
    "Float8.scales",
    "            if (group := self._groups.get(over)) is not None:\n",
    "            if (group := None) is not None:\n",
    case="2-tp2",
)
@sees(
    "float8: the gradient of features that several ranks have is cast before it is summed",
    "SharedFeatures.gradient",
    "        terms = ",
    "        return grad\n        terms = ",
    case="2-tp2",
)
@sees(
    "float8: each replica scales by its own batch",
    "Float8.of",
    "if config.fp8_groups and",
    "if False and",
    case="2-fp8_groupsTrue",
)
@sees(
    "float8: a norm that runs again is cast with a scale of its own",
    "float8:_remade",
    "ctx.scale).data",
    "ctx.scale * 0.9).data",
    case="2-tp2-recomputeactivations",
)
@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (2, {"tp": 2}), (4, {"tp": 2}), (2, {"fp8_groups": True}), (4, {"tp": 2, "cp": 2, "fp8_groups": True}),
        *(pytest.param(2, {"tp": 2, **one}, marks=pytest.mark.more) for one in (
            {"sp": False}, {"recompute": "activations"}, {"recompute": "full"}, {"regather": False}, {"offload": "activations"},
        )),
        *(pytest.param(world, one, marks=pytest.mark.more) for world, one in (
            (4, {"tp": 4}), (4, {"tp": 2, "fp8_groups": True}), (4, {"tp": 2, "data_parallel": "fsdp", "fp8_groups": True}),
            (2, {"cp": 2, "fp8_groups": True}), (2, {"pp": 2}),
        )),
        rest(2, {"tp": 2, "recompute": "selective"}), rest(4, {"tp": 2, "pp": 2}), rest(2, {"recompute": "activations"}),
        rest(1, {}),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(f"{key}{x}" for key, x in value.items()),
)  # fmt: skip
def test_float8_trains_as_on_one_process(world, strategy):
    dp = world // strategy.get("tp", 1) // strategy.get("cp", 1) // strategy.get("pp", 1)
    parts = 1 if strategy.get("fp8_groups") else dp
    for found in run_distributed(fit_cases, world, world, strategy, CASES.keys() - BESIDE):
        for (recipe, name), (trace, names) in found.items():
            model, args, how = CASES[name]
            told = {"model": model, "args": args, "recipe": recipe, "names": names, "parts": parts}
            report = compare(fit("helpers.float8:by_hand", told, **{"steps": 2, **how}), trace)
            assert report.ok, f"{recipe}: {name}\n{report}"


@sees(
    "float8: what others read is what columns read in float8",
    "Float8Products.forward",
    "given.detach().flatten(0, -2), own_shape)",
    "own.data.to(given.dtype) / scale, own_shape)",
)
def test_what_others_read_of_what_is_gathered_is_as_it_was():
    for found in run_distributed(fit_cases, 2, 2, {"tp": 2}, BESIDE):
        for (recipe, name), (trace, names) in found.items():
            model, args, how = CASES[name]
            told = {"model": model, "args": args, "recipe": recipe, "names": names}
            assert compare(fit("helpers.float8:by_hand", told, **{"steps": 2, **how}), trace).ok, (recipe, name)
            assert not any("router" in one or "lora" in one for one in names)


GPT = ("GPT", {"tied": True, "dim": 64, "optimizer": "sgd"})


def fit_precisions(world: int, tp: int) -> dict[tuple[str, str], tuple[Trace, list[str]]]:
    return {
        (recipe, precision): recorded(*GPT, world=world, strategy={"tp": tp, "float8": recipe}, precision=precision)
        for recipe in RECIPES
        for precision in ("32-true", "bf16-true")
    }


def error(right: Trace, found: Trace) -> float:
    """The norm of the difference of two runs' first gradients, of the global norm."""
    apart = {name: found.grads[name].double() - grad.double() for name, grad in right.grads.items() if grad is not None}  # type: ignore[union-attr]
    return norm_of(apart) / norm_of(right.grads)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_kernels_of_float8_err_as_much_as_torchaos_own_linears(tp):
    (found, *_) = run_distributed(fit_precisions, tp, tp, tp)
    for (recipe, precision), (trace, names) in found.items():
        told = {"model": GPT[0], "args": GPT[1], "recipe": recipe, "names": names}
        exact = fit("helpers.float8:by_hand", told, steps=2)
        torchaos = fit("helpers.float8:by_torchao", told, steps=2, precision=precision)
        assert 1e-4 < error(exact, torchaos) < 0.1
        assert error(exact, trace) < 1.2 * error(exact, torchaos), (recipe, precision)
        if precision == "32-true" and (tp == 1 or recipe == "tensorwise"):  # by rows the kernel makes 16 bits of a partial sum
            assert error(torchaos, trace) < 1e-6
            assert torch.tensor(trace.losses) == pytest.approx(torch.tensor(torchaos.losses), rel=1e-5)


def sent_and_kept(float8: str) -> tuple[dict[str, int], int]:
    module = models.GPT(tied=True, dim=64)
    strategy = SeqParallelStrategy(tp=2, float8=float8)  # type: ignore[arg-type]
    meter, _ = metered(module, strategy, models.loader(4, length=12, count=4 * 17), "bf16-true")
    return dict(meter.bytes), meter.saved_bytes


def sent(float8: list[str]) -> list[tuple[dict[str, int], int]]:
    return [sent_and_kept(one) for one in float8]


def test_what_is_gathered_is_sent_in_8_bits():
    ((none, kept), (tensorwise, kept_by_one), (rowwise, kept_by_rows)), _ = run_distributed(sent, 2, ["none", *RECIPES])
    blocks, tokens = 2, 4 * 6
    shard = tokens * 64  # numbers
    # Forward: what columns read, twice a block. Backward: the same again, and the gradients of what rows made.
    assert none["all_gather"] - tensorwise["all_gather"] == blocks * 6 * shard
    # The latter in 16 bits, which are needed with two scales; beside the former go the scales of tokens.
    assert none["all_gather"] - rowwise["all_gather"] == blocks * (4 * shard - 2 * tokens * 4)
    assert none["reduce_scatter"] == tensorwise["reduce_scatter"] == rowwise["reduce_scatter"]
    assert kept_by_one == kept_by_rows < kept


def test_float8_is_refused_where_it_can_not_be(monkeypatch):
    with pytest.raises(ValueError, match="fp8_groups=True with float8='none'"):
        ParallelConfig(fp8_groups=True)
    with pytest.raises(ValueError, match="float8='rowwise' with compile=True"):
        ParallelConfig(float8="rowwise", compile=True)
    with pytest.raises(ValueError, match="float8='rowwise' with tile_mlp=4"):
        ParallelConfig(float8="rowwise", tile_mlp=4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match=r"float8='rowwise' on A100: .* need compute capability 8.9"):
        check_float8(ParallelConfig(float8="rowwise"), torch.device("cuda", 0))
    check_float8(ParallelConfig(), torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ValueError, match=r"float8='rowwise' needs torchao \(.*\): pip install 'lightning-seqpar\[float8\]'"):
        Float8("rowwise")


def test_experts_of_replicas_do_not_wait_for_each_other():
    told = {"tp": 2, "float8": "tensorwise", "fp8_groups": True}
    for said in run_distributed(fit_or_tell, 4, "Zoo", {"kind": "list_moe"}, world=4, strategy=told):
        assert "is an expert's, which runs where tokens are dealt to it" in said


class Odd(models.GPT):
    """Changes what columns made in place, and looks on one rank at what they read."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        for block in self.model.blocks:
            block.mlp.up.register_forward_hook(self.look)

    @staticmethod
    def look(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            assert float(args[0].detach().abs().mean()) > 0
        out *= 0.5


@sees(
    "float8: what columns make is a view",
    "Float8Products.forward",
    "owned(out.view(*shape, out.shape[1]))",
    "out.view(*shape, out.shape[1])",
)
@sees(
    "float8: one rank alone may gather what a hook reads",
    "ColumnGroup.gather",
    "                read(whole)",
    "                pass",
)
def test_hooks_that_change_what_columns_make_or_look_at_what_they_read():
    odd = "end_to_end.test_float8:Odd"
    for trace, names in run_distributed(recorded, 2, odd, {}, world=2, strategy={"tp": 2, "float8": "tensorwise"}, timeout=60):
        told = {"model": odd, "args": {}, "recipe": "tensorwise", "names": names}
        assert compare(fit("helpers.float8:by_hand", told, steps=2), trace).ok
        assert len(names) == 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_expert_without_tokens_and_a_vector(recipe, dtype):
    weight = nn.Parameter(torch.randn(8, 16, dtype=dtype))
    for shape in ((0, 16), (3, 0, 16), (16,)):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        out = Float8(recipe).columns((None, None, (False,), None), x, weight, None)
        assert out.shape == (*shape[:-1], 8)
        out.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == shape


@sees("float8: the activation is kept beside what was cast of it", "Float8Products.forward", "replace(how, kept=None)", "how")
@pytest.mark.parametrize("recipe", RECIPES)
def test_of_an_activation_nothing_stays_but_8_bits(recipe):
    x = torch.randn(2, 6, 16, requires_grad=True) * 1.0
    tokens = Tokens(SimpleNamespace(rank=lambda: 0, size=lambda: 1), 1, sp=False)  # type: ignore[arg-type]
    weight = nn.Parameter(torch.randn(8, 16))
    whole, out = Float8(recipe).columns((tokens, (x, None), (False,), None), x, weight, None)
    (kept,) = [one for one in out.grad_fn.saved_tensors if one is not weight and one.shape != weight.shape]
    assert kept.itemsize == 1
    seen = weakref.ref(x)
    del x, whole, kept
    assert seen() is None


def largest(values: list[float]) -> list[float]:
    mine = torch.tensor(values[dist.get_rank() :] + values[: dist.get_rank()])
    return [float(one) for one in all_reduce_max(mine, dist.group.WORLD)]


def test_what_is_not_a_number_on_one_rank_is_none_on_all():
    nan, inf = float("nan"), float("inf")
    for found in run_distributed(largest, 2, [nan, 1.0]):
        assert torch.tensor(found).isnan().all()
    for found in run_distributed(largest, 2, [inf, 0.0]):
        assert torch.tensor(found).isnan().all()
    for found in run_distributed(largest, 2, [2.0, 3.0]):
        assert found == [3.0, 3.0]


def test_features_that_ranks_share_can_be_copied():
    shard = Shard.by_segments(0, [8], [2], 4, "k")
    features = SharedFeatures(shard, SimpleNamespace(rank=lambda: 0))  # type: ignore[arg-type]
    assert copy.deepcopy(features) is features


class Evaluated(models.GPT):
    losses: list[float]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.training_step(batch, batch_idx)))


def evaluated(tp: int) -> float:
    module, losses = Evaluated(tied=True), list[float]()
    module.losses = losses
    trainer = quiet_trainer(devices=tp, strategy=SeqParallelStrategy(tp=tp, float8="tensorwise"))
    trainer.validate(module, models.loader(4, count=8), verbose=False)
    return sum(losses)


def test_a_validation_alone_is_in_float8_too():
    (alone, *_), (halves, *_) = run_distributed(evaluated, 1, 1), run_distributed(evaluated, 2, 2)
    assert alone == pytest.approx(halves, rel=1e-9)


def classes_behind_fit() -> bool:
    """Whether a model has the classes that it had."""
    model = models.GPT()
    before = {name: type(one) for name, one in model.named_modules()}
    trainer = quiet_trainer(devices=1, strategy=SeqParallelStrategy(float8="rowwise"), max_steps=1)
    trainer.fit(model, models.loader(4))
    return {name: type(one) for name, one in model.named_modules()} == before


def test_a_model_in_float8_is_as_it_was_behind_its_fit():
    assert run_distributed(classes_behind_fit, 1) == [True]
