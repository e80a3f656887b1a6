"""Features that go together train as one process does, two at a time; docs/features.md has the table."""

from __future__ import annotations

import pytest

from tests.helpers.features import PAIRS, excludes, needs_a_trainer, refusal, trained

OFTEN = {("cp", "float8"), ("virtual_pp", "tile_mlp"), ("hsdp", "async_save")}
TAKEN = [pair for pair in PAIRS if not excludes(pair) and refusal(pair) is None and not needs_a_trainer(pair)]


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=() if pair in OFTEN else pytest.mark.matrix, id=" + ".join(pair)) for pair in TAKEN]
)
def test_two_features_train_as_one_process_does(pair):
    found = trained(pair)
    assert not found.startswith("wrong"), found
