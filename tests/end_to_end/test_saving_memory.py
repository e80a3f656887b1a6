"""What ranks hold while a checkpoint is written and read: peaks of the process's own memory, from the system's count."""

from __future__ import annotations

import ctypes

import pytest
import torch.distributed as dist

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import run_distributed
from tests.helpers import models
from tests.helpers.checkpoints import FORMS
from tests.helpers.fit import quiet_trainer
from tests.helpers.processes import Peak
from tests.mutants import sees

MIB = 2**20


def saved(form: str, folder: str) -> tuple[float, float]:
    """By how much saving and restoring make this rank grow, in MiB."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # what is freed goes back to the system, and is counted when it is taken again
    strategy = SeqParallelStrategy(tp=2, checkpoint=FORMS[form], self_check=False)
    devices = dist.get_world_size()
    trainer = quiet_trainer(devices=devices, strategy=strategy, max_steps=1, precision="32-true")
    module, data = models.GPT(dim=512), models.loader(2, count=4)
    trainer.fit(module, data)
    trainer.save_checkpoint(f"{folder}/warm.ckpt", weights_only=True)  # what is imported and started once
    saves = []
    for _ in range(1 if form == "async" else 3):  # whose copies are kept for the next one
        with Peak() as save:
            strategy.saver.trains = form == "async"  # as within a run, which ends when all is on the disk
            trainer.save_checkpoint(f"{folder}/a.ckpt")
            strategy.on_train_end()
        saves.append(save.grown)  # other threads' memory adds to some of them
    trainer.fit_loop.epoch_loop.max_steps = 2
    with Peak() as restore:
        checkpoint = strategy.load_checkpoint(f"{folder}/a.ckpt")
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)
    return min(saves), restore.grown


def sizes() -> tuple[float, float]:
    """The weights and the largest of them, in MiB."""
    counts = [p.numel() * 4 / MIB for p in models.GPT(dim=512).parameters()]
    return sum(counts), max(counts)


@sees(
    "what is written at once is copied first", "write_folder", "    if later is not None:\n", "    if True:\n", case="sharded-2"
)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("form", FORMS)
def test_no_rank_but_the_writer_of_one_file_holds_more_than_its_part(tmp_path, form, world):
    """A write that goes on while training does holds a copy of what the rank writes."""
    whole, largest = sizes()
    assert whole > 6 * largest
    found = run_distributed(saved, world, form, str(tmp_path))
    for rank, (save, restore) in enumerate(found):
        print(f"{form}, {world} ranks, rank {rank}: {save:.1f} MiB to save, {restore:.1f} to restore")
        if form == "single":
            assert save < (3 * whole + 2 * largest if rank == 0 else largest)  # all of it, and the parts of one
        else:
            assert save < largest + (3.1 * whole / world if form == "async" else 0)
        assert restore < 1.6 * whole  # its part of the moments, which are new, and of the weights once more


@sees(
    "the writing dealt to one replica",
    "_WriterChoice.part",
    "            loads[row] += math.prod(layout.global_shape) * value.element_size() / loads.shape[1]\n",
    "",
    case="sharded",
)
@pytest.mark.parametrize("form", ["sharded", "async"])
def test_ranks_share_the_writing(tmp_path, form):
    run_distributed(saved, 4, form, str(tmp_path))
    whole, largest = sizes()
    written = [(tmp_path / "a.ckpt" / f"__{rank}_0.distcp").stat().st_size / MIB for rank in range(4)]
    assert sum(written) == pytest.approx(3 * whole, rel=0.02)
    assert max(written) - min(written) < 1.5 * largest
