"""Blocks of code in the documentation that train, as they stand there."""

from __future__ import annotations

import pytest

from lightning_seqpar.testing import run_distributed
from tests.helpers import processes
from tests.helpers.guides import blocks, execute

TRAINING = [block for block in blocks("python") if block.fits and not block.why]
SCRIPTS = [block for block in TRAINING if block.is_script]


@pytest.mark.parametrize("block", TRAINING, ids=str)
def test_a_block_that_trains_does_so_on_two_ranks(block, tmp_path):
    run_distributed(execute, 2, block.code, str(tmp_path), *([""] if block.is_script else []))


@pytest.mark.launch
@pytest.mark.more
def test_a_recipe_runs_as_the_file_that_one_saves(tmp_path):
    (block,) = [block for block in SCRIPTS if block.page.endswith("gpt.md")]
    (tmp_path / "train.py").write_text(block.code)
    code, printed = processes.run(processes.PYTHON, "train.py", cwd=tmp_path)
    assert code == 0, printed
    assert "self-check: passed" in printed


def test_what_a_block_raises_is_seen(tmp_path):
    block = next(block for block in SCRIPTS if block.page.endswith("gpt.md"))
    with pytest.raises(AssertionError, match="3 units"):
        run_distributed(execute, 2, block.code.replace("heads=4", "heads=3").replace("dim=64", "dim=48"), str(tmp_path), "")
