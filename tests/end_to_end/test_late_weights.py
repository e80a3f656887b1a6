"""Models on the meta device: the same weights at every tp, read or drawn one tensor at a time."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
import transformers
from byte_gpt import ByteGPT
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_seqpar import SeqParallelStrategy, weights_from
from lightning_seqpar.inference.model_copy import default_dtype
from lightning_seqpar.init.deferred import DeferredInit
from lightning_seqpar.init.meta_weights import LateWeights
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import ParityRecorder, Trace, compare
from tests.helpers import models, zoo
from tests.helpers.families import TASKS, HuggingFace, build
from tests.helpers.fit import fit, quiet_trainer
from tests.helpers.models import GPT
from tests.helpers.processes import memory


def replayed(make: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What a model made without memory is filled with; ``dtype`` is the default while it is made."""
    torch.manual_seed(3)
    recorder = DeferredInit()
    with default_dtype(dtype), recorder, torch.device("meta"):
        model = make()
    torch.manual_seed(99)
    refs = {name: recorder.ref(x) for name, x in (*model.named_parameters(), *model.named_buffers())}
    found: dict[str, Tensor] = {}

    def take(key: int, tensor: Any) -> None:
        found.update({name: tensor(ref).clone() for name, ref in refs.items() if ref.storage == key})

    recorder.replay(refs.values(), take)
    return found


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: ByteGPT(dim=16, n_head=4, n_layer=2, context=16, tied=True, vocab=31),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4), 2, enable_nested_tensor=False),
        Awkward,
    ],
)
def test_a_replay_gives_the_numbers_of_the_real_thing(make):
    torch.manual_seed(3)
    real = make()
    found = replayed(make)
    want = dict((*real.named_parameters(), *real.named_buffers()))
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor.detach()), name


class Plain(nn.Module):
    """Numbers whose type nobody wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 6) / 3)
        self.b = nn.Parameter(torch.full((4,), 0.1) * torch.rand(4))


def test_a_replay_draws_in_the_type_that_was_the_default_then():
    torch.manual_seed(3)
    with default_dtype(torch.float64):
        real = Plain()
    found = replayed(Plain, torch.float64)
    for name, tensor in real.named_parameters():
        assert tensor.dtype == torch.float64
        assert torch.equal(found[name], tensor.detach()), name


# ---- through the trainer ---------------------------------------------------------------------------------------


class Late(GPT):
    """The example's GPT, made in ``configure_model`` in the way that ``how`` says."""

    def __init__(self, how: str) -> None:
        L.LightningModule.__init__(self)
        self.how, self.model, self.optimizer = how, None, "adamw"

    def configure_model(self) -> None:
        if self.model is not None:
            return
        if self.how != "unseeded":
            torch.manual_seed(7)
        if self.how == "real":
            self.model = self.make()
        elif self.how in ("meta", "unseeded"):
            with torch.device("meta"):
                self.model = self.make()
        else:
            with self.trainer.init_module(empty_init=True):
                self.model = self.make()

    @staticmethod
    def make() -> nn.Module:
        return ByteGPT(dim=16, n_head=4, n_layer=2, context=16, tied=True, vocab=31)


models.Late = Late


def fit_late(cases: list[tuple[str, dict[str, Any]]], world: int, tp: int) -> list[Trace]:
    return [fit(kind, args, world=world, strategy={"tp": tp}, steps=3) for kind, args in cases]


@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 4), (4, 2)])
def test_a_model_of_meta_trains_like_the_one_made_for_real(world, tp):
    real = fit("Late", {"how": "real"}, steps=3)
    cases = [("Late", {"how": "meta"}), ("Late", {"how": "empty_init"})]
    for got in run_distributed(fit_late, world, cases, world, tp)[0]:
        compare(real, got).raise_if_failed()


def fit_unseeded() -> Tensor:
    torch.manual_seed(100 + torch.distributed.get_rank())
    module = Late("unseeded")
    quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), max_steps=1).fit(module, models.loader(4))
    return module.model.tokens.weight.detach().clone()


def test_ranks_that_are_seeded_apart_draw_one_model():
    one, other = run_distributed(fit_unseeded, 2)
    assert torch.equal(one, other)


class LateHF(HuggingFace):
    """A Hugging Face model without memory, initialised by its library or read from ``folder``."""

    def __init__(self, family: str, folder: str = "", prefix: str = "", **settings: Any) -> None:
        L.LightningModule.__init__(self)
        self.loss, self.model = "user", None
        self.family, self.folder, self.settings = family, folder, settings

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(7)
        with torch.device("meta"):
            self.model = build(self.family, **self.settings)
        if self.folder:
            weights_from(self.model, self.folder)
        quiet(self.model)


def quiet(model: nn.Module) -> None:
    """Without dropout, and Gemma's norm aside, as the families' own test has it."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.train()


zoo.LateHF = LateHF
CASES = ["llama", "phi3", "gpt2", "mixtral", "t5", "bert", "gpt_neox"]


def fit_folders(folders: list[tuple[str, str]], world: int, tp: int) -> list[Trace | str]:
    found: list[Trace | str] = []
    for family, folder in folders:
        try:
            args = {"family": family, "folder": folder}
            found.append(fit("LateHF", args, world=world, strategy={"tp": tp}, steps=2, length=9))
        except (ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each family's weights as ``save_pretrained`` writes them; every other one in several files."""
    made = {}
    for at, family in enumerate(CASES):
        torch.manual_seed(at)
        model = build(family)
        models.perturb(model)
        made[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(made[family], max_shard_size="20KB" if at % 2 else "5GB")
    return made


class Loaded(LateHF):
    """The same, read whole by its library."""

    def configure_model(self) -> None:
        if self.model is None:
            kind = TASKS.get(self.family, transformers.AutoModelForCausalLM)
            more = {"experts_implementation": "eager"} if self.family == "mixtral" else {}
            self.model = kind.from_pretrained(self.folder, dtype=torch.float64, use_cache=False, **more)
            quiet(self.model)


zoo.Loaded = Loaded


@pytest.mark.parametrize(("world", "tp"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.matrix)])
def test_weights_are_read_from_a_folder_in_parts(folders, world, tp):
    given = [(family, str(folder)) for family, folder in folders.items()]
    for (family, folder), got in zip(given, run_distributed(fit_folders, world, given, world, tp)[0], strict=True):
        assert isinstance(got, Trace), f"{family}: {got}"
        compare(fit("Loaded", {"family": family, "folder": folder}, steps=2, length=9), got).raise_if_failed()


def test_random_weights_are_the_same_at_every_tp():
    given = [(family, "") for family in CASES]
    two = run_distributed(fit_folders, 2, given, 2, 2)[0]
    one = run_distributed(fit_folders, 2, given, 2, 1)[0]
    for family, a, b in zip(CASES, one, two, strict=True):
        assert isinstance(a, Trace), f"{family}: {a}"
        assert isinstance(b, Trace), f"{family}: {b}"
        compare(a, b).raise_if_failed()
        assert all(float(weight.std()) > 0 for weight in a.weights.values() if weight.ndim > 1), family


# ---- memory ----------------------------------------------------------------------------------------------------

LARGE = {"dim": 1024, "n_head": 8, "n_layer": 21, "context": 16, "tied": True, "vocab": 31}
"""1.06 GB in float32."""


class LargeLM(GPT):
    """Ends right behind the strategy's set-up."""

    def __init__(self, folder: str = "") -> None:
        L.LightningModule.__init__(self)
        self.folder, self.model, self.peak, self.local = folder, None, 0, 0

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = ByteGPT(**LARGE)
            if self.folder:
                weights_from(self.model, self.folder)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_fit_start(self) -> None:
        self.peak = memory("VmHWM") - memory("RssFile")  # without the libraries' code, which comes as it is run
        self.local = sum(p.nbytes for p in self.parameters())


def peak_of(folder: str, check: bool) -> dict[str, int]:
    module = LargeLM(folder)
    before = memory("VmRSS") - memory("RssFile")
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
    trainer = quiet_trainer(
        devices=2, strategy=SeqParallelStrategy(tp=2, self_check=check), precision="32-true", max_steps=0
    )
    trainer.fit(module, models.loader(2, length=8, count=2))
    return {"peak": module.peak - before, "local": module.local}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to measure a peak")
@pytest.mark.parametrize("source", ["random", "file"])
def test_a_rank_never_holds_more_than_its_shards_and_one_tensor(source, tmp_path):
    with torch.device("meta"):
        model = ByteGPT(**LARGE)
    whole = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    assert whole > 1_000_000_000
    if source == "file":
        real = {name: torch.zeros_like(p, device="cpu") for name, p in model.named_parameters()}
        save_file(real, tmp_path / "model.safetensors")
    for check in (False, True):
        for told in run_distributed(peak_of, 2, str(tmp_path) if source == "file" else "", check, timeout=250.0):
            assert told["local"] < 0.51 * whole
            if check:  # the proof runs on a copy whose equal blocks are one
                assert told["peak"] < 0.8 * whole, told
            else:
                assert told["peak"] < told["local"] + largest + 64_000_000, told


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


class Orphan(Late):
    """A parameter that nothing fills: made on the meta device before anything could remember it."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.how, self.model, self.optimizer = "real", None, "adamw"
        self.scale = nn.Parameter(torch.empty(3, device="meta"))


models.Orphan = Orphan


def fit_orphan() -> str:
    try:
        fit("Orphan", {}, world=2, strategy={"tp": 2}, steps=1)
    except ValueError as error:
        return str(error)
    return "trained"


def test_a_parameter_that_nothing_fills_is_refused():
    for told in run_distributed(fit_orphan, 2):
        assert told.startswith("scale: it was made on the meta device, and nothing says how it is filled")
        assert "weights_from(module, folder)" in told


class Early(GPT):
    """Made and initialised on the meta device before any strategy could remember it."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.optimizer = "adamw"
        with torch.device("meta"):
            self.model = ByteGPT(dim=16, n_head=4, n_layer=1, context=16, tied=True, vocab=31)


models.Early = Early


def fit_early() -> str:
    try:
        fit("Early", {}, world=2, strategy={"tp": 2}, steps=1)
    except ValueError as error:
        return str(error)
    return "trained"


def test_an_initialisation_that_nothing_remembers_is_refused():
    for told in run_distributed(fit_early, 2):
        assert "initialised there outside configure_model, where nothing remembers it" in told


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
        with torch.random.fork_rng():
            self.forked = nn.Linear(3, 4)
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


@pytest.mark.parametrize("make", [Given, Halves])
def test_what_the_meta_device_forgets_is_remembered(make):
    torch.manual_seed(3)
    real = make()
    torch.manual_seed(3)
    recorder = DeferredInit()
    with recorder, torch.device("meta"):
        model = make()
    late = LateWeights(model, recorder)
    late.check()
    late.fill_buffers()
    late.fill_parameters(None)
    for name, tensor in (*real.named_parameters(), *real.named_buffers()):
        assert torch.equal(dict((*model.named_parameters(), *model.named_buffers()))[name], tensor), name


def late_llama(folder: str, *, then: Any = lambda model: model, weights: bool = True) -> tuple[nn.Module, LateWeights]:
    recorder = DeferredInit()
    torch.manual_seed(5)
    with recorder:
        with torch.device("meta"):
            model = build("llama")
        if weights:
            weights_from(model, folder)
        model = then(model)
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


def filled(model: nn.Module, late: LateWeights) -> dict[str, Tensor]:
    late.check()
    late.fill_buffers()
    late.fill_parameters(None)
    return dict(model.named_parameters())


def test_what_may_happen_between_files_and_filling(folders):
    """Casts, checkpoints that are loaded over meta tensors; a copy of before."""
    folder = str(folders["llama"])
    real = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    names = dict(real.named_parameters())

    found = filled(*late_llama(folder, then=lambda model: model.bfloat16().requires_grad_(False)))
    assert all(torch.equal(p, names[name].bfloat16()) for name, p in found.items())

    state = {name: p.detach() + 1 for name, p in real.state_dict().items()}
    model, late = late_llama(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does nothing
        model.load_state_dict(state)
    found = filled(model, LateWeights(model, late._recorder, state))
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


def test_a_part_with_numbers_is_filled_at_once(folders):
    with torch.device("meta"):
        model = build("llama")
    model.lm_head.to_empty(device="cpu")
    model.lm_head.weight.data.zero_()
    assert weights_from(model, str(folders["llama"])).lm_head.weight.any()


def test_adapters_around_layers_that_files_fill(folders):
    """PEFT gives layers other names after ``weights_from``; they are filled by those they had."""
    folder = str(folders["llama"])
    model, late = late_llama(folder, then=lora)
    filled(model, late)
    real = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = {name.replace("base_layer.", ""): p for name, p in model.base_model.model.named_parameters()}
    for name, parameter in real.named_parameters():
        assert torch.equal(found.pop(name).double(), parameter), name
    assert found
    assert all(bool(p.any()) == ("lora_A" in name) for name, p in found.items())


@pytest.mark.parametrize(
    ("weights", "then", "says"),
    [
        (
            True,
            lambda model: lora(model, modules_to_save=["lm_head"]),
            r"lm_head.*weights_from gives its numbers, and \w+ has made",
        ),
        (
            True,
            scaled,
            r"norm.weight: it was changed in place after weights_from",
        ),
        (
            True,
            exchanged,
            r"norm.weight: it came after weights_from",
        ),
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
def test_what_became_of_layers_that_files_fill(folders, weights, then, says):
    def broken(model: nn.Module) -> nn.Module:
        with torch.no_grad(), torch.device("meta"):
            return then(model)

    with pytest.raises(ValueError, match=says):
        late_llama(str(folders["llama"]), then=broken, weights=weights)[1].check()


def test_two_parameters_in_one_memory_are_refused():
    recorder = DeferredInit()
    with recorder, torch.device("meta"):
        model = nn.Module()
        model.a = nn.Parameter(torch.randn(3))
        model.b = nn.Parameter(model.a.data)
    with pytest.raises(ValueError, match="a and b are two parameters in one memory"):
        LateWeights(model, recorder).check()


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


def resume(folder: str) -> list[Trace]:
    """Three steps in two runs, the second from the first one's checkpoint; with numbers from the start, and without."""
    found = []
    for how in ("real", "meta"):
        for steps in (1, 3):
            recorder = ParityRecorder()
            trainer = quiet_trainer(
                devices=2, strategy=SeqParallelStrategy(tp=2), max_steps=steps, callbacks=[recorder]
            )
            file = f"{folder}/{how}.ckpt"
            data = models.loader(8, length=10, count=24)
            trainer.fit(Late(how), data, ckpt_path=file if steps == 3 else None, weights_only=False)
            if steps == 1:
                trainer.save_checkpoint(file)
        found.append(recorder.trace)
    return found


def test_a_checkpoint_fills_a_model_without_numbers(tmp_path):
    real, late = run_distributed(resume, 2, str(tmp_path))[0]
    compare(real, late).raise_if_failed()
