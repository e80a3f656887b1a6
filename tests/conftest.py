"""Fixtures for every test."""

from __future__ import annotations

import os
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # started as python -c, where the strategy would start no processes
    sys.argv[0] = pytest.__file__


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-table", help="write the largest error of each family and topology to this file")


@pytest.hookimpl(tryfirst=True)  # before pytest and xdist read the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put each test into its tier and into the group that one worker runs.

    Of a test that starts processes the first case that the suite runs is of the core, ``make test``, and so are others that one
    start of processes runs with it. The rest shows what another topology, model or option does, and is ``more``, unless the test
    says that every case is of the core (``@pytest.mark.core``: refusals, each with its sentence).

    Files share what is made once for all of their tests, or for those of one start; launches share nothing.
    """
    first: dict[str, Any] = {}  # by test: the start of its first case, or that case
    for item in items:
        if item.path.parent.name == "unit" or item.get_closest_marker("matrix") is not None:
            continue
        start = _start_of(item) or item.nodeid
        if first.setdefault(item.nodeid.partition("[")[0], start) != start and item.get_closest_marker("core") is None:
            item.add_marker(pytest.mark.more)
    if config.getoption("loadgroup", False):  # set by xdist in its workers, where "dist" is always "no"
        for item in items:
            if item.get_closest_marker("launch") is None:
                item.add_marker(pytest.mark.xdist_group(f"{item.path.name} {_start_of(item)}"))


def _start_of(item: pytest.Item) -> Any:
    """What a test says of the processes that it shares with other cases: empty for nothing."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return params.get("start") or params.get("topology", "")


Errors = list[tuple[str, str, str, str, float]]
ERRORS = pytest.StashKey[Errors]()


def pytest_configure(config: pytest.Config) -> None:
    # Processes that tests start find the modules that pytest finds (pythonpath in pyproject.toml).
    folders = [*map(str, config.getini("pythonpath")), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    config.stash[ERRORS] = []


@pytest.fixture(scope="session")
def parity_errors(request):
    """Collects ``(family, topology, plan, precision, error)``; written as a table where one is asked for."""
    return request.config.stash[ERRORS]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker of the suite found."""
    node.config.stash[ERRORS] += map(tuple, node.workeroutput["parity"])


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["parity"] = config.stash[ERRORS]
    elif path := config.getoption("--parity-table"):
        Path(path).write_text(table_of(config.stash[ERRORS]))


def table_of(errors: Errors) -> str:
    """The errors as Markdown: a row for each family, a column for each topology, a table for each precision and plan."""
    text = "# Parity of Hugging Face families with one process\n\nWritten by `make parity`.\n"
    errors = sorted(errors)  # workers end in any order
    for precision, plan in dict.fromkeys((e[3], e[2]) for e in sorted(errors, key=lambda e: (e[3] != "float64", e[2]))):
        found = {(f, t): error for f, t, p, kind, error in errors if (kind, p) == (precision, plan)}
        families, topologies = (list(dict.fromkeys(key[at] for key in found)) for at in (0, 1))
        what = "losses, gradients and weights" if precision == "float64" else "losses"
        text += f"\n## {precision}, plan: {plan}; largest error of {what}\n\n"
        text += f"| family | {' | '.join(topologies)} |\n|---|{'---|' * len(topologies)}\n"
        for family in families:
            cells = [f"{found[family, t]:.1e}" if (family, t) in found else "" for t in topologies]
            text += f"| {family} | {' | '.join(cells)} |\n"
    return text


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
    """Plans that runs write are kept for this run of the tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        forkserver.set_forkserver_preload(["tests.helpers.warm"])
        forkserver.ensure_running()  # now: ranks have its environment
        yield
