"""The table of features that go together says what the package refuses today."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lightning_seqpar import ParallelConfig
from tests import write_features
from tests.helpers.features import FEATURES, PAIRS, excludes, fields_of, refusal


def test_the_page_is_the_one_that_the_package_makes_today():
    assert write_features.DOC.read_text() == write_features.document(), "python -m tests.write_features"


def test_the_table_has_refusals_of_the_configuration_and_of_the_strategies():
    refused = [pair for pair in PAIRS if not excludes(pair) and refusal(pair) is not None]
    assert {("float8", "compile"), ("float8", "tile_mlp"), ("offload", "compile"), ("cp", "compile"), ("pp", "Fabric")} <= {
        *refused
    }
    with pytest.raises(ValidationError, match="use one of them"):
        ParallelConfig(**fields_of(("float8", "compile")))


def test_each_feature_changes_a_field():
    plain = ParallelConfig()
    assert [name for name, fields in FEATURES.items() if ParallelConfig(**fields) == plain] == ["dp", "Fabric"]
