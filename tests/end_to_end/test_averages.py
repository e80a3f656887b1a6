"""Averages of weights in Lightning's callbacks beside the table of habits: starts, second runs, the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn

from lightning_seqpar.testing import RankFailedError, run_distributed
from tests.helpers.habit_runs import LIMIT, Learner, Place, apart
from tests.helpers.slices import rest
from tests.mutants import sees


class Late(WeightAveraging):
    """The average is the initial weights until the last step."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx == 3


class Averaged(Learner):
    """In float64 from the start, since the callback copies the model before Lightning's precision converts it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.double()
        self.validated: list[float] = []

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val"]))


def whole(trainer: Any, average: nn.Module) -> dict[str, Any]:
    """The state dict of an average, which the first rank has; read on all."""
    return trainer.strategy.broadcast(dict(average.state_dict()))


def started_apart(place: Place) -> Any:
    """Every rank begins with other weights: all take the first rank's, and so does the average."""
    module = Averaged(seed=0 if place.topology == "alone" else torch.distributed.get_rank())
    callback = Late()
    out = place.train(module, callback, max_epochs=2, count=16, val=8)
    return out["weights"], module.validated, whole(out["trainer"], callback._average_model.module)


def run_twice(place: Place) -> Any:
    """The same module is trained again, from a checkpoint of the first run; then it is validated."""
    module, path, found = Averaged(), f"{place.folder}/first.ckpt", []
    for fit in ({}, {"ckpt_path": path}):
        callback = EMAWeightAveraging(decay=0.7)
        averaging = StochasticWeightAveraging(0.05, 1, annealing_epochs=1)
        options = {"max_epochs": 1} if not fit else {"max_epochs": 3}
        out = place.train(module, averaging, callback, count=32, val=8, fit=fit, **options)
        trainer = out["trainer"]
        if not fit:
            trainer.save_checkpoint(path)
        found += [out["weights"], whole(out["trainer"], callback._average_model.module)]
    trainer = place.trainer(StochasticWeightAveraging(0.05))
    found.append(trainer.validate(module, place.loader(8), verbose=False))
    return found, module.validated


def on_meta(place: Place) -> None:
    trainer = place.trainer(EMAWeightAveraging(decay=0.7))
    with trainer.init_module(empty_init=True):
        module = Learner()
    trainer.fit(module, place.loader())


class GrowsLate(Learner):
    """Has a layer of which a callback that copied the model before knows nothing."""

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Linear(4, 4)


def grown(place: Place) -> None:
    place.train(GrowsLate(), StochasticWeightAveraging(0.05))


WORKERS = {"apart": started_apart, "twice": run_twice, "meta": on_meta, "grown": grown}


def at(name: str, topology: str, folder: str) -> Any:
    own = Path(folder, topology, name)
    own.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    return WORKERS[name](Place(topology, str(own)))


@sees(
    "habits: averages of weights start apart",
    "ModelSetup.share_out_averages",
    "            self._make_replicas_equal(average)\n",
    "",
    case="apart-dp2xtp2",
)
@sees(
    "habits: a second run averages copies of shards",
    "SeqParallelStrategy.setup_environment",
    "            unshard(module)\n",
    "            pass\n",
    case="twice-tp2",
)
@pytest.mark.parametrize(("name", "topology"), [("apart", "dp2xtp2"), ("twice", "tp2"), rest("twice", "fsdp2xtp2")])
def test_it_is_the_average_of_one_process(name, topology, tmp_path):
    expected = at(name, "alone", str(tmp_path))
    world = {"tp2": 2}.get(topology, 4)
    for rank, found in enumerate(run_distributed(at, world, name, topology, str(tmp_path))):
        differ = [one for one in apart(expected, found) if not one[1] <= LIMIT]
        assert not differ, (rank, differ[:5])


@sees(
    "habits: an average of no weights",
    "refuse_on_meta",
    "    if any(parameter.is_meta for parameter in model.parameters()):\n",
    "    if False:\n",
)
def test_a_model_without_weights_has_no_average(tmp_path):
    with pytest.raises(
        RankFailedError, match=r"ValueError: EMAWeightAveraging and a model of the meta device: .*make the model with memory"
    ):
        run_distributed(at, 2, "meta", "tp2", str(tmp_path))


@sees("habits: an average of another model", "shard_average", "        if names != own:\n", "        if False:\n")
def test_an_average_of_another_model_is_refused(tmp_path):
    with pytest.raises(
        RankFailedError, match=r"ValueError: late\.\w+: the average of weights and the model do not hold the same"
    ):
        run_distributed(at, 2, "grown", "tp2", str(tmp_path))
