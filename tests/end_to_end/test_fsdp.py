"""``data_parallel: fsdp``: the tp parts split over the replicas, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_seqpar import SeqParallelStrategy, unshard
from lightning_seqpar.distributed.counters import StepMeter
from lightning_seqpar.layout.param_layout import is_split, local_rows
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import ParityRecorder, Trace, compare, gather_weights
from tests.helpers import models
from tests.helpers.fit import fit, quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "accumulated, clipped by norm": ("GPT", {"tied": False}, {"clip": 0.1, "accumulate": 2}, {}),
    "offloaded, clipped by value": ("GPT", {}, {"clip": 0.01, "clip_by": "value"}, {"fsdp": {"offload_policy": True}}),
    "blocks stay gathered, no sp": ("GPT", {}, {}, {"sp": False, "fsdp": {"reshard_after_forward": False}}),
    "two optimizers by hand": ("ManualTwo", {"style": "toggle"}, {"steps": 6}, {}),
    "thaw and freeze": ("Frozen", {"thaw": True, "at": (4, 9), "tied": False}, {"steps": 5, "accumulate": 3}, {}),
    "frozen within a step": ("Switches", {}, {}, {}),
    "gradients exchanged": ("Edits", {}, {"accumulate": 2}, {}),
    "recomputed blocks": ("GPT", {}, {"accumulate": 2}, {"recompute": "full"}),
    "no module owns the blocks": ("Direct", {}, {}, {}),
    "a parameter without dims": ("Tempered", {}, {"clip": 0.1}, {}),
    "shared kv heads": ("Zoo", {"kind": "mqa"}, {}, {}),
    "shared fused kv heads": ("Zoo", {"kind": "fused_mqa"}, {}, {}),
    "other experts on each replica": ("Routed", {}, {"accumulate": 2, "steps": 8}, {}),
    "an optimizer made in __init__": ("EarlyOptimizer", {}, {}, {}),
    "a block that is a list": ("ThirdParty", {"kind": "value_residual"}, {}, {}),
    "a step that calls itself": ("CallsItself", {}, {"accumulate": 2}, {}),
    "the model is one unit": ("CallsItself", {}, {}, {"fsdp": {"units": ["model"]}, "loss_chunk": 5}),
    "the model is one unit, with cp": ("CallsItself", {}, {}, {"cp": 2, "fsdp": {"units": ["model"]}}),
    "no units": ("CallsItself", {"by_hand": True}, {}, {"fsdp": {"units": []}}),
    "a step by hand that calls itself": ("CallsItself", {"by_hand": True}, {}, {}),
}
FEW = ["accumulated, clipped by norm", "blocks stay gathered, no sp", "a step that calls itself"]
PLANS = {"Direct": lambda: models.plan("", None)}


class Tempered(models.GPT):
    """A parameter without dims, read in the step itself, and a 1-d one of the LightningModule's own."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.temperature = nn.Parameter(torch.tensor(0.9))
        self.bias = nn.Parameter(torch.zeros(31))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self.model(tokens[:, :-1]) * self.temperature + self.bias
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx), sync_dist=True)


class CallsItself(Tempered):
    """Its forward returns logits, and reads parameters of the LightningModule's own; the step calls it, by hand twice."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"bias": self.bias * 1.0, "logits": self.model(tokens)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (tokens,) = batch
        for _ in range(1 if self.automatic_optimization else 2):
            out = self(tokens[:, :-1])
            loss = nn.functional.cross_entropy(out["logits"].flatten(0, 1), tokens[:, 1:].flatten())
            loss = loss * self.temperature + out["bias"].pow(2).sum()
            if not self.automatic_optimization:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
        return {"loss": loss, "logits": out["logits"]} if self.automatic_optimization else loss.detach()


class Switches(models.GPT):
    """Freezes parts in the middle of a step, by the objects that it sees there or by the optimizer's, over several backwards."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        parts = (self.model.positions, self.model.norm)
        for by_optimizer in (False, True):
            for trains in (False, True):
                shown = [p for m in parts for p in m.parameters()]
                for parameter in optimizer.param_groups[0]["params"][1:2] if by_optimizer else shown:
                    parameter.requires_grad_(trains)
                for _ in range(2):
                    loss = super().training_step(batch, batch_idx)
                    self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class Routed(models.GPT):
    """Few sequences go to an expert, by their first token, and none to the third: often one replica uses an expert alone."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.experts = nn.ModuleList(nn.Linear(31, 31) for _ in range(3))
        models.perturb(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits, first = self.model(tokens[:, :-1]), tokens[:, 0]
        expert_of = 0 * (first < 5) + 1 * (first > 25) - 1 * ((first >= 5) & (first <= 25))
        out = logits * 1.0
        for number, expert in enumerate(self.experts):
            if len(chosen := (expert_of == number).nonzero().flatten()):
                out = out.index_put((chosen,), logits[chosen] + expert(logits[chosen]))
        return nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())


class EarlyOptimizer(models.GPT):
    """Its optimizer holds the parameters as they were in ``__init__``."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.made


models.Tempered, models.Switches, models.Routed, models.EarlyOptimizer = Tempered, Switches, Routed, EarlyOptimizer
models.CallsItself = CallsItself


def fit_cases(names: list[str], world: int, tp: int) -> list[Trace]:
    found = []
    for name in names:
        model, args, options, more = CASES[name]
        strategy = {"tp": tp, "data_parallel": "fsdp", **more}
        if model in PLANS and tp > 1:
            strategy["plan"] = PLANS[model]()
        found.append(fit(model, args, world=world, strategy=strategy, **{"steps": 3, **options}))
    return found


@sees(
    "fsdp: split over the world",
    "_mesh",
    'DeviceMesh.from_group(groups["fsdp_shard"], device',
    "DeviceMesh.from_group(groups[groups.holder_axes], device",
    case="4-2",
)
@sees(
    "fsdp: norm from this rank's rows",
    "global_grad_norm",
    '        dist.all_reduce(both, op=op, group=groups["fsdp_shard"])\n',
    "",
    case="4-2",
)
@sees(
    "fsdp: gradient sync on the parameters before",
    "FullySharded.__init__",
    "        record.layout.rebind(self._model)\n",
    "",
    case="4-2",
)
@sees("fsdp: a summed gradient summed again", "GradSync._make_term", "local_rows(whole).div_(share)", "pass", case="4-2")
@sees(
    "fsdp: no reduction of a backward within a step",
    "FullySharded.expect_backward",
    "if loss.requires_grad:",
    "if False:",
    case="4-1",
)
@sees(
    "fsdp: a step that calls the model puts torch's hook on sharded logits",
    "FullySharded._end_call",
    " and not isinstance(tensor, ShardedLogits)",
    "",
    case="4-2",
)
@sees(
    "fsdp: a call within a step begins as one of its own",
    "FullySharded._begin_call",
    "self._gather_outside(module, args)",
    "pass",
    case="4-2",
)
@sees(
    "fsdp: sharded logits of a unit seen by torch's hooks",
    "fully_sharded:_plain",
    "    if isinstance(leaf, ShardedLogits):\n        return leaf.whole() if leaf.is_changed else leaf.local\n",
    "",
    case="4-2",
)
@sees(
    "fsdp: a parameter without dims not averaged",
    "FullySharded.average",
    "if parameter.requires_grad and",
    "if False and",
    case="4-2",
)
@sees(
    "fsdp: shared heads summed by the first replica's rows",
    "_SharedPart.__init__",
    "            at = at[slice(*rows)]\n",
    "            at = at[: rows[1] - rows[0]]\n",
    case="4-2",
)
@sees(
    "fsdp: shared heads counted by the first replica's rows",
    "ModelLayout.first_held",
    "is_first = is_first[slice(*rows)]",
    "is_first = is_first[: rows[1] - rows[0]]",
    case="4-2",
)
@sees(
    "fsdp: freezing of a gathered parameter lost",
    "FullySharded._gather_outside",
    "own.requires_grad_(trains)\n                parameter.requires_grad_(trains)",
    "pass",
    case="4-2",
)
@sees(
    "fsdp: replicas reduce what each has used",
    "FullySharded.__init__",
    "self.root.set_reduce_scatter_unused_params(True)",
    "self.root.set_reduce_scatter_unused_params(False)",
    case="4-2",
)
@sees(
    "fsdp: zeros for what nobody used",
    "FullySharded.drop_unused",
    "                layout.parameter(name).grad = None\n",
    "                pass\n",
    case="4-2",
)
@sees(
    "fsdp: uses forgotten between micro-batches",
    "FullySharded.expect_backward",
    "self._used = {name for name in self._used if parameter(name).grad is not None}",
    "self._used = set()",
    case="4-2",
)
@sees(
    "fsdp: an optimizer keeps the old parameters",
    "FullySharded.adopt",
    'group["params"][at] = self._record.layout.parameter(name)',
    "pass",
    case="4-2",
)
@pytest.mark.parametrize(
    ("world", "tp", "names"),
    [
        pytest.param(4, 2, FEW, id="4-2-few"),
        pytest.param(4, 2, list(CASES), id="4-2"),
        pytest.param(4, 1, list(CASES), id="4-1", marks=pytest.mark.matrix),
        pytest.param(8, 4, [name for name in CASES if "kv" in name], id="8-4", marks=pytest.mark.matrix),
    ],
)
def test_parity_with_one_process(world, tp, names):
    everywhere = run_distributed(fit_cases, world, names, world, tp, timeout=400.0)
    for at, name in enumerate(names):
        model, args, options, _ = CASES[name]
        expected = fit(model, args, **{"steps": 3, **options})
        for found in everywhere:
            report = compare(expected, found[at])
            assert report.ok, f"{name}\n{report}"


HYBRID: dict[str, list[Any]] = {
    "4-hsdp": [("GPT", {"tied": True}, {}, {}), ("GPT", {"tied": False}, {"accumulate": 2, "clip": 0.05}, {"cp": 2}),
               ("Routed", {}, {"accumulate": 2, "steps": 8}, {}),
               ("Frozen", {"thaw": True, "at": (4, 9), "tied": False}, {"steps": 5, "accumulate": 3}, {}),
               ("GPT", {"tied": True}, {}, {"cp": 2, "recompute": "full"})],
    "8-hsdp": [("GPT", {"tied": True}, {"clip": 0.05}, {"tp": 2}), ("Zoo", {"kind": "gqa"}, {}, {"tp": 2, "sp": False}),
               ("GPT", {"tied": True}, {"accumulate": 2}, {"pp": 2}), ("GPT", {"tied": False}, {}, {"tp": 2, "cp": 2})],
}  # fmt: skip


HSDP: dict[str, Any] = {"data_parallel": "hsdp", "fsdp": {"shard_size": 2}}


def fit_hybrid(world: int, cases: list[Any]) -> tuple[list[Trace], list[int]]:
    meters = [StepMeter(batch=at) for at in range(3)]
    fit("GPT", {}, world=world, strategy=HSDP, steps=1, accumulate=3, callbacks=meters)
    traces = [
        fit(model, args, world=world, strategy={**HSDP, **more}, **{"steps": 3, **how}) for model, args, how, more in cases
    ]
    return traces, [meter.calls["reduce_scatter"] for meter in meters]


@sees(
    "hsdp: the norm counts rows of all replicas",
    "global_grad_norm",
    'group=groups["fsdp_shard"])',
    "group=groups[groups.mean_axes])",
    case="4-hsdp",
)
@sees(
    "hsdp: gradients are those of the ranks that share out a parameter",
    "_mesh",
    'if groups.size("fsdp_replicate") == 1:',
    'if groups.size("fsdp_shard") > 1:',
    case="4-hsdp",
)
@pytest.mark.parametrize("name", ["4-hsdp", pytest.param("8-hsdp", marks=pytest.mark.more)])
def test_hybrid_sharding_trains_as_one_process(name):
    cases, world = HYBRID[name], int(name[0])
    for everywhere, sent in run_distributed(fit_hybrid, world, world, cases, timeout=400.0):
        assert sent == [3, 3, 3]  # in each micro-batch, of two blocks and the rest
        for (model, args, how, _), found in zip(cases, everywhere, strict=True):
            compare(fit(model, args, **{"steps": 3, **how}), found).raise_if_failed()


# ---- a life ------------------------------------------------------------------------------------------------------


class Counts(Callback):
    """Elements of parameters and of moments on this rank, and collectives over the replicas in each batch."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.parameters = sum(local_rows(p).numel() for p in module.parameters())
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self.moments = sum(local_rows(v).numel() for state in states for v in state.values() if v.ndim)


def live(tp: int, folder: str) -> dict[str, Any]:
    """Fitted twice, validated, saved behind fit, and turned back into a plain model, which one process trains on."""
    module, counts = Tempered(), Counts()
    torch.manual_seed(0)
    own = dict(module.named_parameters())

    def trainer(how: str, steps: int) -> Any:
        strategy = SeqParallelStrategy(tp=tp, data_parallel=how, regather=True)
        return quiet_trainer(devices=4, strategy=strategy, max_steps=steps, callbacks=[counts])

    def data() -> Any:
        return models.loader(2 * tp, count=48)

    first = trainer("fsdp", 2)
    first.fit(module, data())
    split = sum(is_split(p) for p in module.parameters())
    first.validate(module, data(), verbose=False)
    metric = float(first.callback_metrics["val"])
    first.save_checkpoint(f"{folder}/after.ckpt")
    trainer("fsdp", 2).fit(module, data())
    weights = gather_weights(module)
    parameters, moments = counts.parameters, counts.moments
    unshard(module)
    same = all(module.get_parameter(name) is parameter for name, parameter in own.items())
    plain = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    equal = all(torch.equal(plain[name], weights[name]) for name in weights)
    classes = [type(part).__name__ for part in module.modules()]
    third = trainer("ddp", 2)
    third.fit(module, data())
    out = {
        "split": split,
        "metric": metric,
        "parameters": parameters,
        "moments": moments,
        "of tp": sum(parameter.numel() for parameter in module.parameters()),
        "same": same and equal,
        "classes": classes,
        "ddp": gather_weights(module),
    }
    trainer("fsdp", 1).fit(unshard(module), data())  # split once more
    return {**out, "end": gather_weights(module)}


@pytest.mark.parametrize("tp", [rest(1), 2])
def test_a_life_with_several_runs(tp, tmp_path):
    dense = Tempered()
    expected: dict[str, Any] = {}
    for at, steps in enumerate((2, 2, 2, 1)):
        trainer = quiet_trainer(devices=1, max_steps=steps)
        trainer.fit(dense, models.loader(8, count=48))
        if at == 0:
            trainer.validate(dense, models.loader(8, count=48), verbose=False)
            expected["metric"] = float(trainer.callback_metrics["val"])
            expected["first"] = {k: v.clone() for k, v in dense.state_dict().items()}
        expected[at] = {name: p.detach().clone() for name, p in dense.named_parameters()}
    dp = 4 // tp
    ranks = run_distributed(live, 4, tp, str(tmp_path), timeout=200.0)
    # Every element is held once in the dp ranks of a tp shard, but for the parameter without dims, which each has.
    assert sum(told["parameters"] - 1 for told in ranks) * dp == sum(told["of tp"] - 1 for told in ranks)
    for told in ranks:
        assert told["metric"] == pytest.approx(expected["metric"], rel=1e-9)
        assert told["same"]
        assert not any(name.startswith("FSDP") for name in told["classes"])
        assert told["split"] == len(expected[0]) - 1  # all but the one without dims
        # A rank holds about 1/dp of its tp shard (rows that do not divide leave the last with fewer), and two moments of
        # each element.
        assert told["parameters"] < 1.2 / dp * told["of tp"]
        assert told["moments"] == 2 * (told["parameters"] - 1)  # the parameter without dims is whole, and so are its moments
        for key, at in (("ddp", 2), ("end", 3)):
            for name, weight in expected[at].items():
                torch.testing.assert_close(told[key][name], weight, rtol=0, atol=1e-9)
    saved = torch.load(tmp_path / "after.ckpt", weights_only=False)["state_dict"]
    for name, weight in expected["first"].items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-9)


# ---- what it sends, and what it refuses --------------------------------------------------------------------------


class ReadsBlock(models.GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * sum(p.pow(2).sum() for p in self.parameters())


class Penalised(models.GPT):
    """The square of the loss's gradient with respect to the embeddings is in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        embedded = self.model.tokens(tokens[:, :-1])
        x = embedded + self.model.positions(torch.arange(embedded.shape[1]))
        with sdpa_kernel(SDPBackend.MATH):
            for block in self.model.blocks:
                x = block(x)
        logits = self.model.head(self.model.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (grad,) = torch.autograd.grad(loss, embedded, create_graph=True)
        return loss + grad.pow(2).sum()


class Raw(models.ManualTwo):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)


class Kept(models.GPT):
    """Uses a parameter by a list that it made in ``__init__``: in the loss, or to clamp it."""

    def __init__(self, clamps: bool) -> None:
        super().__init__()
        self.clamps, self.kept = clamps, [self.model.blocks[0].mlp.up.weight]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.clamps else loss + self.kept[0].pow(2).sum()

    def on_train_batch_end(self, *args: Any) -> None:
        if self.clamps:
            with torch.no_grad():
                self.kept[0].clamp_(-0.1, 0.1)


class ReadsByHand(ReadsBlock):
    """Gives the loss to ``manual_backward`` and returns none."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.manual_backward(super().training_step(batch, batch_idx))
        return torch.zeros(())


class Hooked(models.GPT):
    def __init__(self) -> None:
        super().__init__()
        self.model.norm.weight.register_hook(lambda grad: grad * 2)


class Mixed(models.GPT):
    def on_fit_start(self) -> None:
        raise AssertionError("refused before")

    def configure_model(self) -> None:
        self.model.blocks[0].mlp.up.double()


class Replaces(models.GPT):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.norm.weight = nn.Parameter(self.model.norm.weight.detach().clone())


for each in (Replaces, ReadsBlock, Penalised, Raw, Kept, ReadsByHand, Hooked, Mixed):
    setattr(models, each.__name__, each)


READS_ROWS = "reads a parameter of a block outside of that block's forward"
REFUSALS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "rows": ("ReadsBlock", {}, {}, READS_ROWS),
    "rows by hand": ("ReadsByHand", {}, {}, READS_ROWS),
    "graph": ("Penalised", {}, {}, "a backward through it is to be differentiated again (create_graph=True"),
    "raw": ("Raw", {"style": "keep"}, {}, "its gradient was not reduced over the replicas"),
    "hook": ("Hooked", {}, {}, "model.norm.weight: it has a gradient hook of yours"),
    "kept": ("Kept", {"clamps": False}, {}, "up.weight: the loss reads it by an object of it that was"),
    "clamped": ("Kept", {"clamps": True}, {}, "up.weight: it was changed by an object of it that was"),
    "types": ("Mixed", {}, {}, "reduces the gradients of model.blocks.0 together, in one type"),
    "unit": ("GPT", {}, {"fsdp": {"units": ["model.block.*"]}}, "did you mean 'model.blocks."),
    "replaced": (
        "Replaces",
        {},
        {"data_parallel": "ddp", "tp": 2},
        "the model holds another parameter than the one that was laid out",
    ),
}
GATHERED: dict[str, Any] = {"fsdp": {"units": []}}


def refusals() -> tuple[dict[str, str], dict[str, Trace]]:
    def trace(model: str, args: dict[str, Any], strategy: dict[str, Any]) -> Trace:
        chosen, precision = {"data_parallel": "fsdp", **strategy}, "32-true" if model == "Mixed" else "64-true"
        return fit(model, args, world=2, strategy=chosen, steps=2, precision=precision)

    told = {}
    for name, (model, args, strategy, _) in REFUSALS.items():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            trace(model, args, strategy)
        told[name] = str(caught.value)
    right = {
        "ReadsBlock": trace("ReadsBlock", {}, GATHERED),
        "GPT": trace("GPT", {}, {"fsdp": {"units": ["model.blocks.*.mlp"]}}),
        "graph of all": trace("Penalised", {}, GATHERED),
        "graph of ddp": trace("Penalised", {}, {"data_parallel": "ddp"}),
    }
    return told, right


@sees(
    "fsdp: what the reduction left behind unseen",
    "FullySharded.check_reduced",
    "if left := self._record.layout.left_computing():",
    "if left := []:",
)
@sees("fsdp: rows in a loss", "refuse_rows", "if any(is_split(tensor) for tensor in tree_leaves(out)):", "if False:")
@sees(
    "fsdp: a backward differentiated through freed parameters",
    "_refuse_graph",
    "if torch.is_grad_enabled():\n            raise",
    "if False:\n            raise",
)
@sees(
    "fsdp: an old parameter changed unseen",
    "FullySharded.check_originals",
    "if self._own[name]._version != version:",
    "if False:",
)
@sees("fsdp: an old parameter in the loss", "FullySharded.check_leaf", "is not None:", "is False:")
def test_what_it_refuses():
    for told, right in run_distributed(refusals, 2, timeout=200.0):
        for name, (*_, says) in REFUSALS.items():
            assert says in told[name], name
        # The penalty is a mean over replicas, not one process's.
        compare(right.pop("graph of ddp"), right.pop("graph of all")).raise_if_failed()
        for model, trace in right.items():
            compare(fit(model, {}, steps=2), trace).raise_if_failed()


class Dtypes(models.GPT):
    """Notes in which type a product of a block is made."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        handle = self.model.blocks[0].mlp.up.register_forward_hook(lambda m, a, out: self.seen.add(out.dtype))
        loss = super().training_step(batch, batch_idx)
        handle.remove()
        return loss


def in_types(fsdp: dict[str, Any]) -> tuple[set[torch.dtype], list[float]]:
    module, recorder = Dtypes(), ParityRecorder()
    module.seen = set()
    strategy = SeqParallelStrategy(tp=2, data_parallel="fsdp", fsdp=fsdp, self_check=False)
    trainer = quiet_trainer(devices=4, strategy=strategy, max_steps=3, precision="32-true", callbacks=[recorder])
    trainer.fit(module, models.loader(4))
    return module.seen, recorder.trace.losses


def test_a_policy_of_mixed_precision():
    policy = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    (whole, expected), (half, losses) = (run_distributed(in_types, 4, fsdp)[0] for fsdp in ({}, policy))
    assert (whole, half) == ({torch.float32}, {torch.bfloat16})
    assert losses == pytest.approx(expected, rel=2e-2)
    assert losses != expected
