"""Lightning's batch-size finder: the sizes that one process finds, on every rank, and a training behind it at parity."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import ParityRecorder, compare, gather_weights
from tests.helpers import models
from tests.helpers.fit import quiet_trainer
from tests.mutants import sees

FIRST, LIMIT = 4, 9
"""The size that is tried first; and that above which batches do not fit."""


class Limited(models.GPT):
    """Runs out of memory above ``LIMIT`` samples: in the step, its last block, the backward or the update.

    ``ranks`` are those on which it does; none means all.
    """

    def __init__(self, at: str = "begin", ranks: tuple[int, ...] = (), shuffle: bool = False, count: int = 64) -> None:
        super().__init__(tied=False)
        self.batch_size, self.at, self.ranks, self.shuffle, self.count = FIRST, at, ranks, shuffle, count
        self.sizes: list[int] = []
        self.lacks = False
        self.model.blocks[1].mlp.register_forward_pre_hook(self.in_the_block)

    def fill(self, at: str) -> None:
        mine = not self.ranks or dist.get_rank() in self.ranks
        if at == self.at and self.lacks and mine:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def in_the_block(self, module: nn.Module, args: Any) -> None:
        self.fill("block")
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: self.fill("backward"))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        self.sizes.append(len(tokens))
        self.lacks = len(tokens) > LIMIT
        if self.lacks and self.at == "apart":  # on one rank behind a collective that the others have not started
            if dist.get_rank() == 1:
                self.work = dist.all_reduce(torch.ones(1), group=self.trainer.strategy.groups["tp"], async_op=True)
            self.at = "begin"
        self.fill("begin")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fill("update")

    def on_train_end(self) -> None:
        self.fill("end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (tokens,) = batch
        self.sizes.append(len(tokens))
        self.lacks = len(tokens) > LIMIT
        self.fill("begin")
        self.log("val", super().training_step(batch, batch_idx), sync_dist=True)

    def train_dataloader(self) -> Any:
        return DataLoader(models.tokens(self.count), batch_size=self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self) -> Any:
        return models.loader(self.batch_size, count=self.count)


class Accumulated(Limited):
    """Trains by hand, with two backwards for each update."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.lacks:
            self.fill("update")


def search_and_fit(
    folder: str,
    world: int = 1,
    model: str = "Limited",
    mode: str = "power",
    method: str = "fit",
    as_callback: bool = False,
    accumulate: int = 1,
    strategy: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    search: bool = True,
    size: int | None = None,
    scale: int = 1,
    trials: int = 25,
) -> Any:
    """Search, and fit three batches behind it: the size, those of the steps of the search, whether it left the weights, the trace.

    With ``scale`` replicas' data in one process.
    """
    torch.manual_seed(0)
    dp = 1 if strategy is None else world // strategy["tp"]
    module = globals()[model](**(options or {}), count=64 * dp * scale)  # a replica has as many batches as one process
    recorder = ParityRecorder()
    kwargs: Any = {"mode": mode, "steps_per_trial": 2, "init_val": FIRST, "max_trials": trials}
    finder = BatchSizeFinder(**kwargs)
    trainer = quiet_trainer(
        devices=world,
        strategy="auto" if strategy is None else SeqParallelStrategy(**{"self_check": False, **strategy}),
        max_steps=3,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[recorder, *([finder] if as_callback and search else [])],
    )
    found: Any = size
    weights = gather_weights(module)
    kept = True
    if search and not as_callback:
        tuner: Any = Tuner(trainer)
        found = tuner.scale_batch_size(module, method=method, **kwargs)
        kept = all(torch.equal(weight, weights[name]) for name, weight in gather_weights(module).items())
    steps = list(module.sizes)
    if size is not None:
        module.batch_size = size
    trainer.fit(module)
    if as_callback and search:
        found = finder.optimal_batch_size
    assert size is not None or module.batch_size == found
    left = [path.name for path in Path(folder).iterdir() if "scale" in path.name]
    return found, steps, kept, left, recorder.trace


CASES: dict[str, dict[str, Any]] = {
    "power": {"options": {"at": "begin"}},
    "binsearch, in a block, accumulated": {"mode": "binsearch", "options": {"at": "block"}, "accumulate": 2},
    "in the backward": {"options": {"at": "backward"}},
    "in the update": {"options": {"at": "update"}},
    "a callback, in the backward": {"as_callback": True, "options": {"at": "backward"}},
    "evaluation": {"method": "validate", "options": {"at": "begin"}},
    "no limit, shuffled": {"trials": 3, "options": {"at": "nowhere", "shuffle": True}},
    "by hand, in the backward": {"model": "Accumulated", "options": {"at": "backward"}},
}
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "dp2-tp2": (4, {"tp": 2}),
    "fsdp": (4, {"tp": 2, "data_parallel": "fsdp"}),
    "fsdp-tp1": (2, {"tp": 1, "data_parallel": "fsdp", "checkpoint": {"format": "sharded"}}),
    "ddp": (2, {"tp": 1}),
}
ALWAYS = {
    "dp2-tp2": ("evaluation",),
    "fsdp": ("a callback, in the backward",),
}


def search_all(folders: str, runs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    out = {}
    for topology, name in runs:
        world, strategy = TOPOLOGIES[topology]
        folder = Path(folders, f"{topology} {name}")
        folder.mkdir(exist_ok=True)
        out[topology, name] = search_and_fit(str(folder), world, strategy=strategy, **CASES[name])
    return out


@functools.cache
def searched(world: int, always: bool, folders: str) -> list[dict[tuple[str, str], Any]]:
    runs = [
        (topology, name)
        for topology, (size, _) in TOPOLOGIES.items()
        for name in CASES
        if size == world and (name in ALWAYS.get(topology, ())) == always
    ]
    return run_distributed(search_all, world, folders, runs, timeout=400.0)


@functools.cache
def on_one_process(name: str, folder: str) -> Any:
    return search_and_fit(folder, **CASES[name])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return str(tmp_path_factory.mktemp("searches"))


RUNS = [
    pytest.param(topology, name, marks=() if name in ALWAYS.get(topology, ()) else pytest.mark.matrix)
    for topology in TOPOLOGIES
    for name in CASES
    if topology == "tp2" or "shuffled" not in name  # several replicas have an order of their own
]


@sees(
    "each rank looks for a checkpoint of its own behind a search",
    "SeqParallelStrategy.load_checkpoint",
    "self.saver.load(place, weights_only)",
    "self.saver.load(checkpoint_path, weights_only)",
    case="dp2-tp2-a callback, in the backward",
)
@sees(
    "random states are set back behind a search",
    "SeqParallelStrategy.load_checkpoint",
    "self.saver.streams = None",
    "pass",
    case="tp2-no limit, shuffled",
)
@sees(
    "DDP waits for the gradients of a step that ran out of memory",
    "Steps.forget_step",
    "if self._env.ddp is not None:",
    "if False:",
    case="dp2-tp2-a callback, in the backward",
)
@sees(
    "gradients of a step that ran out of memory stay",
    "FullySharded.reset",
    "self._record.layout.drop_computed()",
    "pass",
    case="fsdp-a callback, in the backward",
)
@sees(
    "Lightning refuses its batch-size finder",
    "SeqParallelStrategy.is_distributed",
    "return self._is_set_up",
    "return True",
    case="dp2-tp2-in the backward",
)
@pytest.mark.parametrize(("topology", "name"), RUNS)
@pytest.mark.more
def test_the_search_of_one_process(topology, name, folders):
    world, strategy = TOPOLOGIES[topology]
    always = name in ALWAYS.get(topology, ())
    want = on_one_process(name, folders)
    dp = world // strategy["tp"]
    expected = want[-1]
    if dp > 1:
        case = {key: value for key, value in CASES[name].items() if key in ("model", "accumulate", "options")}
        case["options"] = {**case["options"], "at": "nowhere"}
        expected = search_and_fit(folders, search=False, size=want[0] * dp, scale=dp, **case)[-1]
    for each in searched(world, always, folders):
        found, steps, kept, left, trace = each[topology, name]
        assert (found, steps) == want[:2]
        assert kept
        assert left == []
        compare(expected, trace).raise_if_failed()


# ---- trials that end otherwise on some ranks ----------------------------------------------------------------------


def ended(folder: str, world: int, options: dict[str, Any]) -> str:
    """The error of a search that can't go on; ranks wait three seconds for each other."""
    try:
        search_and_fit(folder, world, strategy={"tp": 2, "timeout": 6}, options=options)
    except ValueError as error:
        return str(error)
    return "the search went on"


BEST = "The largest that ran is 8: set the batch size to 8, and leave the finder out"


@sees("ranks try other batch sizes", "Searches.meet", "if end != ended:", "if False:", case="behind")
@sees(
    "a lack of memory at other points of the step",
    "Searches.meet",
    "if not _fit(collectives, others):",
    "if False:",
    case="apart",
)
@pytest.mark.parametrize(
    ("world", "options", "first", "last"),
    [
        pytest.param(
            2,
            {"at": "block", "ranks": (1,)},
            "rank 0 raised ",
            "rank 1 ran out of memory, and rank 0 did not within 3 s",
            id="one rank",
        ),
        pytest.param(
            2,
            {"at": "end", "ranks": (1,)},
            "rank 0 came to the end of the trial, and rank 1 ran out of memory",
            "rank 1 ran out of memory, and rank 0 came to the end of the trial",
            id="behind",
        ),
        pytest.param(
            4,
            {"at": "begin", "ranks": (2, 3)},
            "rank 0 raised ",
            "rank 3 ran out of memory, and ranks 0, 1 did not within 3 s",
            marks=pytest.mark.matrix,
            id="one replica",
        ),
        pytest.param(
            2,
            {"at": "apart"},
            "rank 0 ran out of memory, and rank 1 did so at another point of the step",
            "rank 1 ran out of memory, and rank 0 did so at another point of the step",
            marks=pytest.mark.matrix,
            id="apart",
        ),
    ],
)
def test_a_lack_of_memory_on_some_ranks_ends_the_search_on_all(tmp_path, world, options, first, last):
    said = run_distributed(ended, world, str(tmp_path), world, options)
    assert all(text.startswith("the batch-size finder can't go on: at batch size 16 rank ") for text in said)
    assert first in said[0]
    assert last in said[-1]
    assert all(text.endswith(BEST) for text in said)
