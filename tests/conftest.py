"""Fixtures for every test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "examples", ROOT / "tests"):
    sys.path.insert(0, str(folder))
# Forked ranks find the same modules.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "examples"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
)


@pytest.fixture(autouse=True)
def _one_thread_and_a_clean_environment():
    """Ranks must not fight for cores, and a test must leave the environment as it found it."""
    torch.set_num_threads(1)
    before = dict(os.environ)
    yield
    changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
    changed -= {"PYTEST_CURRENT_TEST", "OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE"}
    for key in changed:
        if key in before:
            os.environ[key] = before[key]
        else:
            del os.environ[key]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Proofs of plans are remembered for this run of the tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
