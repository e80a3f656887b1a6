"""Lightning's batch-size finder: the sizes that one process finds, on every rank, and a training behind it at parity."""

from __future__ import annotations

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
from tests.helpers.slices import rest
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


def search_and_fit(
    folder: str,
    world: int = 1,
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
    module = Limited(**(options or {}), count=64 * dp * scale)  # a replica has as many batches as one process
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


TP2, TP1 = {"tp": 2}, {"tp": 1}
FSDP, IN_PARTS = {"data_parallel": "fsdp"}, {"checkpoint": {"format": "sharded"}}
BACKWARD: dict[str, Any] = {"options": {"at": "backward"}}
CALLBACK: dict[str, Any] = {"as_callback": True, **BACKWARD}
BLOCK: dict[str, Any] = {"mode": "binsearch", "options": {"at": "block"}, "accumulate": 2}
RUNS = [
    pytest.param(4, TP2, {"method": "validate", "options": {"at": "begin"}}, id="evaluation, dp2-tp2"),
    pytest.param(4, TP2 | FSDP, CALLBACK, id="callback, fsdp"),
    rest(2, TP2, {"options": {"at": "begin"}}, id="power, tp2"),
    rest(2, TP2, BLOCK, id="binsearch in a block, tp2"),
    rest(2, TP2, {"options": {"at": "update"}}, id="in the update, tp2"),
    rest(2, TP2, {"trials": 3, "options": {"at": "nowhere", "shuffle": True}}, id="shuffled, tp2"),
    rest(4, TP2, BACKWARD, id="in the backward, dp2-tp2"),
    rest(4, TP2, CALLBACK, id="callback, dp2-tp2"),
    rest(2, TP1 | FSDP | IN_PARTS, BACKWARD, id="in the backward, fsdp-tp1"),
    rest(2, TP1, BLOCK, id="binsearch in a block, ddp"),
]


@sees(
    "each rank looks for a checkpoint of its own behind a search",
    "SeqParallelStrategy.load_checkpoint",
    "self.saver.load(place, weights_only)",
    "self.saver.load(checkpoint_path, weights_only)",
    case="callback, dp2-tp2",
)
@sees(
    "random states are set back behind a search",
    "SeqParallelStrategy.load_checkpoint",
    "self.saver.streams = None",
    "pass",
    case="shuffled, tp2",
)
@sees(
    "DDP waits for the gradients of a step that ran out of memory",
    "Steps.forget_step",
    "if self._env.ddp is not None:",
    "if False:",
    case="callback, dp2-tp2",
)
@sees(
    "gradients of a step that ran out of memory stay",
    "FullySharded.reset",
    "self._record.layout.drop_computed()",
    "pass",
    case="callback, fsdp",
)
@sees(
    "Lightning refuses its batch-size finder",
    "SeqParallelStrategy.is_distributed",
    "return self._is_set_up",
    "return True",
    case="in the backward, dp2-tp2",
)
@pytest.mark.parametrize(("world", "strategy", "case"), RUNS)
@pytest.mark.more
def test_the_search_of_one_process(world, strategy, case, tmp_path):
    want = search_and_fit(str(tmp_path), **case)
    expected, dp = want[-1], world // strategy["tp"]
    if dp > 1:
        options = {**case["options"], "at": "nowhere"}
        plain = {"size": want[0] * dp, "scale": dp, "options": options, "accumulate": case.get("accumulate", 1)}
        expected = search_and_fit(str(tmp_path), search=False, **plain)[-1]
    for found, steps, kept, left, trace in run_distributed(
        search_and_fit, world, str(tmp_path), world, strategy=strategy, **case
    ):
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
    "if any(others[name] != collectives[name] for name in others.keys() & collectives.keys()):",
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
