"""``data_parallel: fsdp``: the tp parts split over the replicas, against one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_seqpar import SeqParallelStrategy, unshard
from lightning_seqpar.layout.replica_rows import is_split, local_rows
from lightning_seqpar.parallel.sharded_model import record_of
from lightning_seqpar.region.data_path import DataPath
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare, gather_weights
from tests.helpers import models
from tests.helpers.fit import fit, quiet_trainer

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "accumulated, clipped by norm": ("GPT", {"tied": False}, {"clip": 0.1, "accumulate": 2}, {}),
    "offloaded, clipped by value": (
        "GPT",
        {},
        {"clip": 0.01, "clip_by": "value"},
        {"fsdp": {"offload_policy": True}},
    ),
    "blocks stay gathered, no sp": ("GPT", {}, {}, {"sp": False, "fsdp": {"reshard_after_forward": False}}),
    "two optimizers by hand": ("ManualTwo", {"style": "toggle"}, {"steps": 6}, {}),
    "gradients that are kept": ("ManualTwo", {"style": "keep"}, {"steps": 6}, {}),
    "thaw and freeze": ("Frozen", {"thaw": True, "at": (4, 9), "tied": False}, {"steps": 5, "accumulate": 3}, {}),
    "gradients exchanged": ("Edits", {}, {"accumulate": 2}, {}),
    "rates by shape and class": ("FollowsShapes", {}, {}, {}),
    "checkpointed blocks": ("Recomputed", {}, {}, {}),
    "no module owns the blocks": ("Direct", {}, {}, {}),
    "a shared block": ("SharedBlock", {}, {}, {}),
    "nn.TransformerEncoder": ("Encoder", {"batch_first": False, "norm_first": True}, {}, {}),
    "a parameter without dims": ("Tempered", {}, {"clip": 0.1}, {}),
    "shared kv heads": ("Zoo", {"kind": "mqa"}, {}, {}),
    "shared fused kv heads": ("Zoo", {"kind": "fused_mqa"}, {}, {}),
    "experts": ("Zoo", {"kind": "routed_moe"}, {}, {}),
    "a block that is a list": ("ThirdParty", {"kind": "value_residual"}, {}, {}),
}
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


models.Tempered = Tempered


def fit_cases(names: list[str], world: int, tp: int) -> list[Trace]:
    found = []
    for name in names:
        model, args, options, more = CASES[name]
        strategy = {"tp": tp, "data_parallel": "fsdp", **more}
        if model in PLANS and tp > 1:
            strategy["plan"] = PLANS[model]()
        found.append(fit(model, args, world=world, strategy=strategy, **{"steps": 3, **options}))
    return found


@pytest.mark.parametrize(("world", "tp"), [(4, 2), (4, 1), (8, 4)])
def test_parity_with_one_process(world, tp):
    names = list(CASES) if tp < 4 else [name for name in CASES if "kv" in name or "clip" in name]
    everywhere = run_distributed(fit_cases, world, names, world, tp, timeout=400.0)
    for at, name in enumerate(names):
        model, args, options, _ = CASES[name]
        expected = fit(model, args, **{"steps": 3, **options})
        for found in everywhere:
            report = compare(expected, found[at])
            assert report.ok, f"{name}\n{report}"


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
    out = {"split": split, "metric": metric, "parameters": counts.parameters, "moments": counts.moments}
    unshard(module)
    same = all(module.get_parameter(name) is parameter for name, parameter in own.items())
    plain = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    equal = all(torch.equal(plain[name], weights[name]) for name in weights)
    classes = [type(part).__name__ for part in module.modules()]
    third = trainer("ddp", 2)
    third.fit(module, data())
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    out |= {"shapes": shapes, "dp_rank": third.strategy.dp_rank, "same": same, "equal": equal, "classes": classes, "ddp": gather_weights(module)}
    trainer("fsdp", 1).fit(unshard(module), data())  # split once more
    return {**out, "end": gather_weights(module)}


@pytest.mark.parametrize("tp", [1, 2])
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
    for told in run_distributed(live, 4, tp, str(tmp_path), timeout=200.0):
        assert told["metric"] == pytest.approx(expected["metric"], rel=1e-9)
        assert told["same"]
        assert told["equal"]
        assert not any(name.startswith("FSDP") for name in told["classes"])
        assert told["split"] == len(expected[0]) - 1  # all but the one without dims
        # A rank holds 1/dp of its tp shard, to the row, and two moments of each element.
        rows = [range(shape[0])[told["dp_rank"] * -(-shape[0] // dp) :][: -(-shape[0] // dp)] for shape in told["shapes"] if shape]
        held = [len(own) * math.prod(shape[1:]) for own, shape in zip(rows, filter(None, told["shapes"]), strict=True)]
        assert told["parameters"] == sum(held) + 1
        assert told["moments"] == 2 * sum(held)  # those of the parameter without dims have none either
        assert sum(held) < 1.2 / dp * sum(map(math.prod, told["shapes"]))
        for key, at in (("ddp", 2), ("end", 3)):
            for name, weight in expected[at].items():
                torch.testing.assert_close(told[key][name], weight, rtol=0, atol=1e-9)
    saved = torch.load(tmp_path / "after.ckpt", weights_only=False)["state_dict"]
    for name, weight in expected["first"].items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-9)
