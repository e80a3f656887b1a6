"""LoRA on column and row linears: equal to one process; variants of it are refused."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from lightning_seqpar import ParallelConfig, SeqParallelStrategy, describe
from lightning_seqpar.layout.linear_kind import is_adapted
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify import run_comparison
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import zoo
from tests.helpers.adapted import Adapted
from tests.helpers.families import HuggingFace, build
from tests.helpers.fit import fit, quiet_trainer
from tests.helpers.models import loader
from tests.helpers.slices import rest
from tests.mutants import sees

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("Adapted", {"family": "llama", "targets": LLAMA}),
    "some layers": ("Adapted", {"family": "llama", "targets": LLAMA, "layers_to_transform": [1]}),
    "fused": ("Adapted", {"family": "gpt2", "targets": ["c_attn", "c_proj", "c_fc"]}),
    "with biases": ("Adapted", {"family": "gpt2", "targets": ["c_attn", "c_proj"], "bias": "lora_only"}),
}


def fit_all(strategy: dict[str, Any], cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Trace]:
    world = torch.distributed.get_world_size()
    options = {"world": world, "strategy": strategy, "steps": 2, "length": 9}
    return {name: fit(model, args, **options) for name, (model, args) in cases.items()}


def check(world: int, strategy: dict[str, Any], cases: dict[str, tuple[str, dict[str, Any]]]) -> None:
    for name, got in run_distributed(fit_all, world, strategy, cases, timeout=300)[0].items():
        model, args = cases[name]
        assert got.grad_norm > 0
        report = compare(fit(model, args, steps=2, length=9), got)
        assert report.ok, f"{name}: {report}"


@sees(
    "the second half of a row's adapter summed where it is whole",
    "ResolvedPlan.layout_of",
    "and not self._follows_row(module)",
    "and not (self._follows_row(module) and sp)",
    case="tp2-no-sp",
)
@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        rest(2, {"tp": 2}),
        rest(2, {"tp": 2, "sp": False}),
        rest(4, {"tp": 4}),
        (4, {"tp": 2}),
        (2, {"tp": 2, "plan": "infer"}),
        rest(4, {"tp": 2, "cp": 2}),
    ],
    ids=["tp2", "tp2-no-sp", "tp4", "dp2-tp2", "tp2-infer", "tp2-cp2"],
)
def test_lora_trains_like_one_process(world, strategy):
    check(world, strategy, CASES if world == 2 else {name: CASES[name] for name in ("all", "fused")})


def test_the_plan_names_the_half_that_meets_the_shards():
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=4, target_modules=LLAMA))
    styles = {row.module.split("layers.*.")[-1]: row.style for row in describe(model, ParallelConfig(tp=2)).rows}
    assert styles["self_attn.q_proj.base_layer"] == styles["self_attn.q_proj.lora_B.default"] == "column"
    assert styles["self_attn.q_proj.lora_A.default"] == "on shards"
    assert styles["self_attn.o_proj.base_layer"] == styles["self_attn.o_proj.lora_A.default"] == "row"
    assert styles["self_attn.o_proj.lora_B.default"] == "on shards"


@sees(
    "a variant of an adapter taken for the plain one",
    "is_adapted",
    "    return filled and not any(True for other in children.values() for _ in other.parameters())\n",
    "    return filled\n",
    case="options2-False",
)
@pytest.mark.parametrize(("options", "plain"), [({}, True), ({"use_rslora": True}, True), ({"use_dora": True}, False)])
def test_an_adapter_with_parameters_of_its_own_is_no_plain_one(options, plain):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], **options)
    model = peft.get_peft_model(build("llama"), config)
    assert is_adapted(model.base_model.model.model.layers[0].self_attn.q_proj) is plain


class Dropping(Adapted):
    """Notes what the adapters drop out."""

    def __init__(self, **options: Any) -> None:
        super().__init__("llama", ["q_proj", "o_proj"])
        self.masks: dict[str, Tensor] = {}
        for name, module in self.model.named_modules():
            if name.endswith("lora_dropout"):
                module["default"] = nn.Dropout(0.5)
                module["default"].register_forward_hook(self.note(name))

    def note(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            self.masks.setdefault(name, out.detach() == 0)

        return hook


def masks(sp: bool) -> dict[str, Tensor]:
    model = Dropping()
    strategy = SeqParallelStrategy(tp=2, sp=sp, self_check=False)
    quiet_trainer(devices=2, strategy=strategy, max_steps=1).fit(model, loader(4, length=8, count=4))
    return model.masks


@pytest.mark.parametrize("sp", [True, False])
def test_adapters_drop_out_whole_inputs_alike_and_own_features_apart(sp):
    one, other = run_distributed(masks, 2, sp)
    assert one.keys() == other.keys()
    for name, mask in one.items():
        assert 0.3 < float(mask.double().mean()) < 0.7
        assert torch.equal(mask, other[name]) is ("q_proj" in name), name


class Later(Adapted):
    """Gets a second adapter while it trains."""

    def __init__(self, targets: list[str]) -> None:
        super().__init__("llama", ["q_proj"])
        self.targets = targets

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.model.add_adapter("second", peft.LoraConfig(r=4, target_modules=self.targets))
            self.model.set_adapter("second")
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    self.trainer.optimizers[0].add_param_group({"params": [parameter]})


class OtherKind(HuggingFace):
    """An adapter that is not plain LoRA on linears."""

    def __init__(self, kind: str) -> None:
        super().__init__("llama" if kind != "experts" else "mixtral", "model")
        config: Any = {
            "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
            "loha": peft.LoHaConfig(r=4, target_modules=["q_proj", "v_proj"]),  # it draws behind the adapted linear
            "loha everywhere": peft.LoHaConfig(r=4, target_modules=LLAMA),
            "lokr everywhere": peft.LoKrConfig(r=4, target_modules=LLAMA),
            "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            "experts": peft.LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]),
            "activated": peft.LoraConfig(
                task_type="CAUSAL_LM", target_modules=["o_proj"], alora_invocation_tokens=[1], init_lora_weights=False
            ),
        }[kind]
        self.model = peft.get_peft_model(self.model, config)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


zoo.OtherKind = OtherKind


@sees(
    "a row that is called with a constant first has no graph",
    "_Probe.__init__",
    "next((read for read in self._reads if read.requires_grad), self._reads[0])",
    "self._reads[0]",
)
@sees("a plan that shards the vocabulary alone is refused", "ResolvedPlan.__init__", 'and not self.named("vocab")', "and True")
@sees(
    "adapters in all linears of the blocks, which leave the vocabulary alone to shard, are refused",
    "_refuse_idle_stack",
    "if reasons and holds_variants(model):",
    "if False:",
)
@pytest.mark.more
def test_other_kinds_train_like_one_process():
    """DoRA scales by norms over in-features: on columns it is cut with them, on rows the part around it is whole."""
    dora = {"columns": ["q_proj", "v_proj", "up_proj"], "rows": ["q_proj", "o_proj"], "all": LLAMA}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        name: ("Adapted", {"family": "llama", "targets": targets, "use_dora": True}) for name, targets in dora.items()
    }
    for kind in ("prompt", "ia3", "loha", "loha everywhere", "lokr everywhere"):
        cases[kind] = ("OtherKind", {"kind": kind})
    check(2, {"tp": 2}, cases)


@sees(
    "draws of installed code end a run that could leave its part whole",
    "_is_own_code",
    "return not is_installed(kind)",
    "return True",
)
def test_draws_of_an_installed_adapter_are_not_the_users():
    own = nn.Sequential(nn.Linear(4, 4))
    dropping = Dropping()
    dropping.own = own
    name = next(name for name, _ in dropping.named_modules() if name.endswith("q_proj.base_layer"))
    assert [run_comparison._is_own_code(dropping, one) for one in (name, "own.0", "")] == [False, True, True]


def refusals(cases: dict[str, tuple[type, Any]]) -> dict[str, str]:
    told = {}
    for name, (kind, arg) in cases.items():
        strategy = SeqParallelStrategy(tp=2, vocab=name != "everywhere")
        trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=2)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            trainer.fit(kind(arg).double(), loader(4, length=9))
        told[name] = str(caught.value)
    return told


@sees(
    "parameters that are added while training pass",
    "refuse_added",
    "    if any(record.layout.of(parameter) is None for parameter in parameters):",
    "    if False:",
)
def test_what_is_known_not_to_fit_shards_is_told():
    cases = {
        "prefix": (OtherKind, "prefix"),
        "experts": (OtherKind, "experts"),
        "everywhere": (OtherKind, "loha everywhere"),
        "activated": (OtherKind, "activated"),
        "on a sharded linear": (Later, ["q_proj"]),
        "on a whole linear": (Later, ["lm_head"]),
    }
    told = run_distributed(refusals, 2, cases)[0]
    assert "prefix tuning gives every block keys and values of all heads" in told["prefix"]
    assert "LoRA on target_parameters" in told["experts"]
    assert "the attention or MLP in which LOHA stands may have to be whole" in told["everywhere"]
    assert "activated LoRA picks tokens by their place in the whole sequence; set sp=False" in told["activated"]
    assert "q_proj.lora_A.second.weight: this parameter came after the model was sharded" in told["on a sharded linear"]
    assert "lm_head.lora_A.second.weight: this parameter came after" in told["on a whole linear"]
