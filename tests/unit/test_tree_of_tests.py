"""What the tests promise about themselves: where they lie, and what they import."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT

TESTS = ROOT / "tests"
FOLDERS = ("unit", "distributed", "end_to_end", "ways_in")
FILES = sorted(TESTS.rglob("*.py"))
STARTS_PROCESSES = {"run_distributed", "run_all", "Popen", "launch", "subprocess", "multiprocessing"}


def name_of(path: Path) -> str:
    return str(path.relative_to(TESTS))


def imported(path: Path) -> set[str]:
    """Every module that a file imports, and every name that it takes from one, as dotted paths."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_file_of_tests_lies_in_a_folder_of_its_kind_under_a_name_of_its_own():
    files = [path for path in FILES if path.name.startswith("test_")]
    assert [name_of(path) for path in files if path.parent not in [TESTS / folder for folder in FOLDERS]] == []
    names = [path.name for path in files]
    assert {name for name in names if names.count(name) > 1} == set()


def test_tests_of_a_file_go_to_one_worker(request):
    """What they make once they would make once on each worker otherwise, in twice the time: pytest 9.2 does that to xdist 3.8."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith(f"@{Path(__file__).name} ")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_imports_a_test(path):
    for name in imported(path):
        parts = name.split(".")
        assert not any(part.startswith("test_") for part in parts[:-1]), f"{path.name} imports from the test {name}"
        assert parts[0] != "tests" or parts[1] not in FOLDERS, f"{path.name} imports the test {name}"
        assert parts[0] != "tests" or len(parts) > 1, "import a module of the tests by its name"


@pytest.mark.parametrize("path", sorted((TESTS / "unit").glob("test_*.py")), ids=lambda path: path.name)
def test_a_unit_test_starts_no_process(path):
    if path == Path(__file__):
        return
    tree = ast.parse(path.read_text())
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert (named | {part for name in imported(path) for part in name.split(".")}) & STARTS_PROCESSES == set()


@pytest.mark.parametrize("folder", [*FOLDERS, "helpers"])
def test_a_folder_says_what_it_is_for(folder):
    assert ast.get_docstring(ast.parse((TESTS / folder / "__init__.py").read_text()))
