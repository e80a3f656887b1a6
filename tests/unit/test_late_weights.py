"""Weights that are remembered, and read or drawn when they are needed: without processes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import peft
import pytest
import torch
import transformers
from byte_gpt import ByteGPT
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_seqpar import weights_from
from lightning_seqpar.inference.model_copy import default_dtype
from lightning_seqpar.init.deferred import DeferredInit
from lightning_seqpar.init.meta_weights import LateWeights
from tests.helpers.families import build, save_pretrained
from tests.mutants import sees


def filled(model: nn.Module, late: LateWeights) -> dict[str, Tensor]:
    late.check()
    late.fill_buffers()
    late.fill_parameters(None)
    return dict(model.named_parameters())


def made_twice(make: Any, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The numbers of a model made with memory, and of one that is filled behind; ``dtype`` is the default while it is made."""
    torch.manual_seed(3)
    with default_dtype(dtype):
        real = make()
    torch.manual_seed(3)
    recorder = DeferredInit()
    with default_dtype(dtype), recorder, torch.device("meta"):
        model = make()
    torch.manual_seed(99)
    filled(model, LateWeights(model, recorder))
    one, other = (dict((*kind.named_parameters(), *kind.named_buffers())) for kind in (real, model))
    return one, other


class Awkward(nn.Module):
    """Initialised in several goes, with views, copies and buffers that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(4, 6))
        self.b = nn.Parameter(torch.ones(4) * 3)
        self.table = nn.Embedding(7, 4, padding_idx=2)
        self.register_buffer("steps", torch.arange(5).float() / 10)
        with torch.no_grad():
            nn.init.trunc_normal_(self.a, std=0.3)
            self.a[1].zero_()
            self.a[2:, :3].copy_(torch.eye(3)[:2])
            self.b.mul_(self.a.norm())
            nn.init.orthogonal_(self.table.weight)
            self.table.weight[2].fill_(0)
        self.c = nn.Parameter(self.a.detach().clone().t())
        self.register_buffer("noise", torch.randn(3))


class Given(nn.Module):
    """Numbers of Python, seeds, generators and real draws in between."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.first = nn.Linear(3, 4)
        torch.manual_seed(5)
        self.second = nn.Linear(3, 4)
        torch.manual_seed(5)
        self.third = nn.Linear(3, 4)
        self.fourth = nn.Linear(3, 4)
        self.register_buffer("gain", torch.tensor([2.0, 3.0]) * 1.5)
        self.own = nn.Parameter(torch.empty(4, 3))
        self.other = nn.Parameter(torch.empty(4, 3))
        with torch.no_grad():
            nn.init.normal_(self.own, generator=generator)
            nn.init.trunc_normal_(self.other, generator=generator)
            self.own[torch.tensor([0, 2])] = 0
            self.first.bias.copy_(torch.as_tensor([1.0, 2.0, 3.0, 4.0]))
            self.second.bias.copy_(self.first.bias.new_tensor([4.0, 3.0, 2.0, 1.0]) + torch.as_tensor(self.first.bias))
        self.register_buffer("picked", torch.multinomial(torch.tensor([0.1, 0.2, 0.7]), 2))
        self.last = nn.Linear(3, 4)


class Halves(nn.Module):
    """Two parameters that are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(4, 3)
        self.a, self.b = nn.Parameter(both[:2]), nn.Parameter(both[2:])


@sees(
    "draws of weights that are overwritten left out",
    "DeferredInit.replay",
    "                        if op.is_random:\n",
    "                        if op.is_random and not at:\n",
    case="<lambda>0",
)
@sees(
    "a seed set while a late model is made forgotten",
    "DeferredInit._note_stream",
    "            op.state = len(self._states)\n",
    "            op.state = len(self._states) if not self._states else -1\n",
    case="Given",
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: ByteGPT(dim=16, n_head=4, n_layer=2, context=16, tied=True, vocab=31),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4), 2, enable_nested_tensor=False),
        Awkward,
        Given,
        Halves,
    ],
)
def test_late_weights_are_the_numbers_of_the_real_thing(make):
    want, found = made_twice(make)
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), name


class Plain(nn.Module):
    """Numbers whose type nobody wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 6) / 3)
        self.b = nn.Parameter(torch.full((4,), 0.1) * torch.rand(4))


@sees(
    "late weights drawn in another type",
    "deferred:_run",
    "    with default_dtype(op.dtype):\n",
    "    with default_dtype(None):\n",
)
def test_late_weights_are_drawn_in_the_type_that_was_the_default_then():
    want, found = made_twice(Plain, torch.float64)
    for name, tensor in want.items():
        assert tensor.dtype == torch.float64
        assert torch.equal(found[name], tensor), name


# ---- what can't be done ----------------------------------------------------------------------------------------


def test_files_that_do_not_fit_are_refused(tmp_path):
    model = ByteGPT(dim=16, n_head=4, n_layer=1, context=16, tied=True, vocab=31)
    with pytest.raises(ValueError, match=r"does not exist; give a safetensors file, its index, or a folder"):
        weights_from(model, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no model.safetensors .* save the model with save_pretrained"):
        weights_from(model, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is no safetensors file"):
        weights_from(model, tmp_path / "pytorch_model.bin")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="can't be read"):
        weights_from(model, tmp_path / "broken.safetensors")
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_file({**state, "norm.bias": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"holds norm.bias with shape \[3\], and the model's norm.bias has \[16\]"):
        weights_from(model, tmp_path / "other.safetensors")
    save_file({f"x.{name}": p for name, p in state.items()}, tmp_path / "renamed.safetensors")
    with pytest.raises(ValueError, match=r"has no tokens.weight.*parameters are missing\); it has .*x.tokens.weight"):
        weights_from(model, tmp_path / "renamed.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ValueError, match=r"names gone.safetensors, which is not beside it"):
        weights_from(model, tmp_path)


def test_a_model_with_numbers_is_filled_at_once(tmp_path):
    one, other = (ByteGPT(dim=16, n_head=4, n_layer=1, context=16, tied=True, vocab=31) for _ in range(2))
    save_file({name: p.detach().clone() for name, p in one.named_parameters()}, tmp_path / "model.safetensors")
    weights_from(other, tmp_path)
    for name, p in one.named_parameters():
        assert torch.equal(p, other.get_parameter(name)), name


def test_resets_fill_what_was_made_too_early():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(50, 40), nn.LayerNorm(40), nn.Linear(40, 30))
    late = LateWeights(model)
    late.check()
    late.fill_buffers()
    late.fill_parameters(None)
    assert float(model[0].weight.std()) == pytest.approx(1.0, rel=0.1)
    assert torch.equal(model[1].weight, torch.ones(40))
    assert 0 < float(model[2].weight.abs().max()) <= 40**-0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_pretrained("llama", tmp_path_factory.mktemp("llama")))


def remembered(folder: str, *, then: Any = lambda model: model, weights: bool = True) -> tuple[nn.Module, DeferredInit]:
    recorder = DeferredInit()
    torch.manual_seed(5)
    with recorder:
        with torch.device("meta"):
            model = build("llama")
        if weights:
            weights_from(model, folder)
        model = then(model)
    return model, recorder


def late_llama(folder: str, **options: Any) -> tuple[nn.Module, LateWeights]:
    model, recorder = remembered(folder, **options)
    return model, LateWeights(model, recorder)


def lora(model: nn.Module, **kwargs: Any) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, **kwargs))


def scaled(model: nn.Module) -> nn.Module:
    model.model.norm.weight.mul_(2)
    return model


def exchanged(model: nn.Module) -> nn.Module:
    model.model.norm = nn.RMSNorm(16)
    return model


def copied(model: nn.Module) -> nn.Module:
    model.trained = copy.deepcopy(model.lm_head)
    return model.bfloat16()


def fused(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.mlp.both = nn.Parameter(torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]))
        del layer.mlp.gate_proj, layer.mlp.up_proj
    return model


def normed(model: nn.Module) -> nn.Module:
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    return model


def test_what_may_happen_between_files_and_filling(folder):
    """Casts, checkpoints that are loaded over meta tensors; a copy of before."""
    real = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    names = dict(real.named_parameters())

    found = filled(*late_llama(folder, then=lambda model: model.bfloat16().requires_grad_(False)))
    assert all(torch.equal(p, names[name].bfloat16()) for name, p in found.items())

    state = {name: p.detach() + 1 for name, p in real.state_dict().items()}
    model, recorder = remembered(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does nothing
        model.load_state_dict(state)
    found = filled(model, LateWeights(model, recorder, state))
    assert all(torch.equal(p, state[name].float()) for name, p in found.items())

    with pytest.raises(ValueError, match="adapted since"):
        late_llama(folder, then=lora, weights=False)
    with DeferredInit() as recorder, torch.device("meta"):
        model = lora(build("llama"))
    whole = {name: torch.full(p.shape, 2.0) for name, p in model.named_parameters()}
    assert all((p == 2).all() for p in filled(model, LateWeights(model, recorder, whole)).values())

    with DeferredInit() as recorder:
        with torch.device("meta"):
            model = build("llama")
            teacher = copy.deepcopy(model)
        weights_from(model.model, folder)
        both = nn.ModuleDict({"student": model, "teacher": teacher})
    found = filled(both, LateWeights(both, recorder))
    for name, parameter in names.items():
        of_files = name.startswith("model.")
        assert torch.equal(found[f"student.{name}"].double(), parameter) == of_files, name
        assert found[f"teacher.{name}"].any(), name


def test_a_part_with_numbers_is_filled_at_once(folder):
    with torch.device("meta"):
        model = build("llama")
    model.lm_head.to_empty(device="cpu")
    model.lm_head.weight.data.zero_()
    assert weights_from(model, folder).lm_head.weight.any()


@sees(
    "layers that were wrapped after weights_from are drawn",
    "LateWeights._source_of",
    "known if known or isinstance(tensor, nn.Parameter) else [inner]",
    "[inner]",
)
def test_adapters_around_layers_that_files_fill(folder):
    """PEFT gives layers other names after ``weights_from``; they are filled by those they had."""
    model, late = late_llama(folder, then=lora)
    filled(model, late)
    real = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = {name.replace("base_layer.", ""): p for name, p in model.base_model.model.named_parameters()}
    for name, parameter in real.named_parameters():
        assert torch.equal(found.pop(name).double(), parameter), name
    assert found
    assert all(bool(p.any()) == ("lora_A" in name) for name, p in found.items())


@sees(
    "copies of what files fill have numbers of the initialisation",
    "DeferredInit.check",
    "if taken := [elsewhere[key][0] for key in read & elsewhere.keys() if at >= elsewhere[key][1]]:",
    "if taken := []:",
    case="True-<lambda>-lm_head.*weights_from gives its numbers, and \\\\w+ has made",
)
@pytest.mark.parametrize(
    ("weights", "then", "says"),
    [
        (
            True,
            lambda model: lora(model, modules_to_save=["lm_head"]),
            r"lm_head.*weights_from gives its numbers, and \w+ has made",
        ),
        (True, scaled, r"norm.weight: it was changed in place after weights_from"),
        (True, exchanged, r"norm.weight: it came after weights_from"),
        (True, copied, r"lm_head.*weights_from gives its numbers, and \w+ has made"),
        (True, fused, r"(gate|up)_proj.weight: weights_from gives its numbers, and cat has made another"),
        (
            True,
            normed,
            r"up_proj.parametrizations.weight.original\d: it has the memory of .*up_proj.weight, which|gives its numbers",
        ),
        (True, lambda model: copy.deepcopy(scaled(model)), r"norm.weight: it was changed in place after weights_from"),
        (False, lora, r"made on the meta device without weights and adapted since .*q_proj\)"),
    ],
)
def test_what_became_of_layers_that_files_fill(folder, weights, then, says):
    def broken(model: nn.Module) -> nn.Module:
        with torch.no_grad(), torch.device("meta"):
            return then(model)

    with pytest.raises(ValueError, match=says):
        late_llama(folder, then=broken, weights=weights)[1].check()


def test_what_nothing_remembers_is_refused():
    with torch.device("meta"):
        early = ByteGPT(dim=16, n_head=4, n_layer=1, context=16, tied=True, vocab=31)
        orphan = nn.ParameterDict({"scale": nn.Parameter(torch.empty(3))})
    with pytest.raises(ValueError, match="initialised there outside configure_model, where nothing remembers it"):
        LateWeights(early, DeferredInit()).check()
    with pytest.raises(ValueError, match="scale: it was made on the meta device, and nothing says how it is filled"):
        LateWeights(orphan).check()


def test_what_is_read_and_not_known_is_refused():
    with torch.device("meta"):
        scale = torch.full((3,), 2.0)
    recorder = DeferredInit()
    with recorder, torch.device("meta"):
        model = nn.Linear(3, 3)
        with torch.no_grad():
            model.weight.mul_(scale)
    with pytest.raises(ValueError, match=r"mul_ reads a tensor of shape \[3\] whose numbers are not known"):
        LateWeights(model, recorder).check()
