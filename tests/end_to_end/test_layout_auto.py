"""``layout="auto"``: one layout on all ranks, which trains right, or a refusal on all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import layouts
import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_seqpar import ParallelConfig, SeqParallelStrategy
from lightning_seqpar.fabric import SeqParallelFabricStrategy
from lightning_seqpar.sizing.calibrate import calibrated
from lightning_seqpar.sizing.machines import Cluster, Machine, machines_in, presets
from lightning_seqpar.strategy import auto_layout
from lightning_seqpar.testing import RankFailedError, run_distributed
from tests.helpers.fit import fit, quiet_trainer
from tests.helpers.models import GPT, loader
from tests.mutants import sees

RESULTS = Path(layouts.__file__).parent / "results" / "layouts.json"


def train(strategy: dict[str, Any], memory: float | None = None) -> dict[str, Any]:
    """Train on this rank, as if devices had so much memory: what was chosen and told, and the losses."""
    if memory is not None:
        of_device = Machine(**{**presets()["CPU"].model_dump(), "memory": memory, "reserved": 0.0, "per_node": 2})
        auto_layout.found_cluster = lambda *args: Cluster(devices=dist.get_world_size(), machine=of_device, name="CPU")
    told: list[str] = []
    auto_layout.rank_zero_info = told.append
    torch.manual_seed(0)
    module, trainer = GPT(), quiet_trainer(devices=dist.get_world_size(), strategy=SeqParallelStrategy(**strategy), max_steps=2)
    trainer.fit(module, loader(8, length=10, count=64))
    chosen: Any = trainer.strategy
    return {
        "config": chosen.config,
        "told": [line for line in told if "layout auto" in line],
        "axes": str(chosen.groups.topology),
    }


@sees("each rank with a layout of its own", "auto_layout:chosen_layout", "if dist.get_rank() == 0:", "if dist.get_rank() > 9:")
@sees("a chosen layout that nobody takes", "Environment.connect", "self.config = self.strategy.config =", "unused =")
@pytest.mark.parametrize(
    ("fields", "memory", "wanted"),
    [({}, None, {"dp": 2, "way": "ddp"}), ({"tp": 2, "recompute": "full"}, None, {"tp": 2}), ({}, 300e3, None)],
    ids=["all-fits", "given", "tight"],
)
def test_all_ranks_take_one_layout(fields, memory, wanted):
    first, second = run_distributed(train, 2, {"layout": "auto", **fields}, memory)
    config: ParallelConfig = first["config"]
    assert config == second["config"]
    assert first["axes"] == second["axes"]
    assert config.layout == "given"
    for name, value in fields.items():
        assert getattr(config, name) == value
    (line,) = first["told"]
    assert "GiB and" in line
    assert "limited by" in line
    if wanted is None:  # the whole states of a replica do not fit
        assert (config.tp, config.data_parallel) != (1, "ddp")
    elif "tp" in wanted:
        assert "with tp, recompute as you set them" in line
    else:
        assert (config.tp, config.pp, config.cp, config.data_parallel) == (1, 1, 1, "ddp")


class Data(L.LightningDataModule):
    """Data that exists once the trainer has set it up, and says how often that was."""

    def __init__(self, folder: str, breaks: bool = False) -> None:
        super().__init__()
        self.folder, self.breaks, self.setups = folder, breaks, 0

    def prepare_data(self) -> None:
        Path(self.folder, "prepared").touch()

    def setup(self, stage: str) -> None:
        assert self.trainer.world_size == 2
        assert Path(self.folder, "prepared").exists()
        self.setups += 1

    def train_dataloader(self) -> Any:
        if self.breaks:
            raise OSError("the disk is away")
        return loader(8, length=10, count=64)


def train_on_data(folder: str, breaks: bool) -> tuple[str, int]:
    told: list[str] = []
    auto_layout.rank_zero_info = told.append
    data, strategy = Data(folder, breaks), SeqParallelStrategy(layout="auto", recompute="full")
    module, trainer = GPT(), quiet_trainer(devices=2, strategy=strategy, max_steps=2)
    trainer.fit(module, datamodule=data)
    return next(line for line in told if "layout auto" in line), data.setups


@sees(
    "the trainer copied with the data",
    "auto_layout:_first_batch",
    "copy.deepcopy(given, {id(trainer): trainer})",
    "copy.deepcopy(given, {id(trainer): None})",
)
@sees("the user's data module set up", "auto_layout:_first_batch", "copy.deepcopy(given, {id(trainer): trainer})", "given")
def test_a_data_module_gives_the_batch(tmp_path):
    for line, setups in run_distributed(train_on_data, 2, str(tmp_path), False):
        assert "the fastest of" in line
        assert setups == 1  # by the trainer; for the search a copy was
    with pytest.raises(RankFailedError, match=r"the first training batch can't be read: OSError: the disk is away"):
        run_distributed(train_on_data, 2, str(tmp_path), True)


def test_what_is_chosen_trains_as_one_process():
    alone = fit("GPT", {}, strategy=None, global_batch=8)
    auto = run_distributed(fit, 2, "GPT", {}, world=2, strategy={"layout": "auto", "tp": 2}, global_batch=8)[0]
    assert auto.losses == pytest.approx(alone.losses, rel=1e-9)


def test_nothing_fits_is_told_on_every_rank():
    with pytest.raises(RankFailedError) as error:
        run_distributed(train, 2, {"layout": "auto"}, 1e3)
    text = str(error.value)
    assert "no layout fits into" in text
    assert "nearest is" in text


def test_a_loop_of_your_own_gives_its_layout():
    with pytest.raises(ValueError, match="layout='auto' in a loop of your own"):
        SeqParallelFabricStrategy(layout="auto")


def test_a_machine_is_measured(tmp_path):
    threads = torch.get_num_threads()
    told = calibrated(tmp_path / "machine.yaml")
    assert torch.get_num_threads() == threads
    found = machines_in(tmp_path / "machine.yaml")["CPU"]
    assert "TFLOPS" in told
    assert found.flops["float32"] > 1e9
    assert found.in_node > 1e6
    assert found.host < 1e-3
    assert max(share for _, share in found.efficiency) == pytest.approx(1)
    assert "measured by seqpar plan --calibrate" in found.sources[0]


# ---- predictions beside runs: benchmarks/layouts.py --------------------------------------------------------------------------


@pytest.mark.more
@sees(
    "moments that are one number each",
    "memory:peak_memory",
    "optimizer = moments * gradients",
    "optimizer = gradients",
    case="llama-tp 2",
)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("llama", "tp 2"), ("gpt2", "dp 2 fsdp"), ("own", "pp 2, 4 micro-batches"), ("mixtral", "cp 2")],
    ids="-".join,
)
def test_peaks_are_what_a_run_takes(kind, layout):
    ranks = run_distributed(layouts.peak, 2, kind, layouts.LAYOUTS[layout], timeout=280)
    cluster = Cluster(devices=2, machine=presets()["CPU"], name="CPU")
    said = layouts.predicted(kind, layouts.LAYOUTS[layout], cluster)
    assert said["peak"] == pytest.approx(max(ranks), rel=0.05)


@pytest.mark.more
def test_what_was_measured_is_what_is_predicted():
    recorded = json.loads(RESULTS.read_text())
    cluster = Cluster(devices=2, machine=Machine(**recorded["machine"]), name="CPU")
    right = count = 0
    for kind, rows in recorded["found"].items():
        for layout, row in rows.items():
            row["predicted"] = layouts.predicted(kind, layouts.LAYOUTS[layout], cluster)
            assert row["predicted"]["peak"] == pytest.approx(row["measured"]["peak"], rel=0.05), (kind, layout)
        agreed, pairs = layouts.agreement(rows)
        right, count = right + agreed, count + pairs
    assert {*recorded["found"]} == {*layouts.MODELS}
    assert count >= 80
    assert right >= 0.9 * count
