"""What the code base promises about itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import lightning_seqpar
from tests.mutants import Mutant, definitions, place_of, stale

PACKAGE = Path(lightning_seqpar.__file__).parent
ORDER = [
    "user_input", "config", "releases", "topology", "distributed", "layout", "context", "region", "nn", "styles", "plan",
    "pipeline", "parallel", "data", "inference", "init", "checkpoint", "verify", "sizing", "strategy", "fabric", "cli",
    "__main__",
]  # fmt: skip
"""Packages (and modules that stand beside them): one imports from itself and from its left."""
PUBLIC = {"collectives": "distributed", "measure": "distributed", "parity": "verify", "testing": "verify"}
"""Public paths, and the package that each of them shows names of."""


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, list[str]]]:
    """Each module of ours that is imported, by its path in the package, and the names taken from it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("lightning_seqpar")):
            assert node.level == 0, "imports are absolute"
            assert "." in (node.module or ""), f"{path.name} imports from the top of the package"
            found.append(((node.module or "").split(".", 1)[1], [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            ours = [alias.name for alias in node.names if alias.name.startswith("lightning_seqpar")]
            found += [(name.split(".", 1)[1], []) for name in ours]
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_package_imports_only_from_its_left(path):
    own = name_of(path)
    if own in PUBLIC:
        assert {module.split(".")[0] for module, _ in imports(path)} == {PUBLIC[own]}
        return
    assert own in ORDER, f"{own} has no place in the order"
    for module, _ in imports(path):
        other = module.split(".")[0]
        assert other in ORDER[: ORDER.index(own) + 1], f"{own} imports {module}, which is not on its left"


def test_modules_of_a_package_do_not_import_each_other_in_a_circle():
    edges = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): {module for module, _ in imports(path)} for path in modules()
    }
    done: set[str] = set()
    while ready := {name for name, needs in edges.items() if name not in done and needs & edges.keys() <= done}:
        done |= ready
    assert edges.keys() - done == set()


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_imports_a_private_name_of_another(path):
    private = [(module, name) for module, names in imports(path) for name in names if name.startswith("_")]
    assert private == []


PRIVATE_OF_TORCH = ("torch._C", "torch.overrides._", "_sequence_nr", "_cdata", "next_functions", "_backward_hooks")


def test_private_calls_of_the_autograd_engine_live_in_one_module():
    for path in modules():
        if path.name in ("autograd.py", "process_groups.py", "ranks.py"):  # the last two: torch's stores and fake group
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name):
                text = ast.unparse(node)
                assert not text.startswith("torch._C"), f"{path.name}: {text}"
                assert text.rpartition(".")[2] not in PRIVATE_OF_TORCH, f"{path.name}: {text}"


@pytest.mark.parametrize("package", [name for name in ORDER if (PACKAGE / name).is_dir()])
def test_a_package_says_what_it_is_for_and_what_it_may_import(package):
    text = ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text())) or ""
    lines = [line for line in text.splitlines() if line]
    assert len(lines) == 3, "three lines"
    assert lines[-1].startswith("May import: ")
    if " to " in lines[-1]:
        left = ORDER[ORDER.index(package) - 1]
        assert lines[-1] == f"May import: ``user_input`` to ``{left}``."


@pytest.mark.parametrize("name", ["user_input", "config"])
def test_what_reads_what_a_user_asks_for_is_pure(name):
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    used = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    used |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert not used & {"torch", "lightning", "os"}


def _names_a_function(value: ast.expr | None) -> bool:
    """Whether a module gives a name of its own to a function of torch's, or to what Lightning has."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("functools.partial", "operator.attrgetter")
    return isinstance(value, ast.Attribute) and ast.unparse(value).startswith(("torch.", "pl.", "fabric."))


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_level_state_and_no_group_fallback(path):
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and not _names_a_function(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                target = target.value if isinstance(target, ast.Subscript) else target  # a table that is filled where it stands
                assert isinstance(target, ast.Name)
                assert target.id == "__all__" or target.id.lstrip("_")[0].isupper(), f"{target.id} looks like state"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args]
            defaults = [None] * (len(arguments) - len(node.args.defaults)) + list(node.args.defaults)
            signatures = path.name in ("replicas.py", "fabric.py", "trainer_view.py")  # Lightning's own
            inherited = node.name in ("reduce", "all_gather", "all_reduce") and signatures
            for argument, default in zip(arguments, defaults, strict=True):
                assert not (argument.arg == "group" and default is not None) or inherited, f"{node.name} has a group fallback"
        if isinstance(node, ast.ExceptHandler):
            assert not (len(node.body) == 1 and isinstance(node.body[0], ast.Pass)), "a silent except"


def test_public_names_are_pinned():
    assert sorted(lightning_seqpar.__all__) == [
        "CheckpointConfig", "Description", "LayoutSearch", "ModelLayout", "ParallelConfig", "ParallelGroups", "ParamLayout",
        "PlanSpec", "PredictedLayout", "ProcessTopology", "SeqParallelMonitor", "SeqParallelStrategy", "ShardingPlan",
        "Verification", "describe", "fit_layout", "grad_norm", "summoned", "unshard", "verify_parity", "weights_from",
    ]  # fmt: skip
    assert all(hasattr(lightning_seqpar, name) for name in lightning_seqpar.__all__)
    shown = {
        alias.asname: node.module
        for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }  # what type checkers read
    homes = {name: f"lightning_seqpar.{home}" for home, names in lightning_seqpar._HOMES.items() for name in names}
    assert shown == homes


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_everything_public_is_documented(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module says nothing of itself"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name
            for part in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                    decorated = {ast.unparse(item) for item in part.decorator_list}
                    known = {"staticmethod", "field_validator", "classmethod"}
                    overrides = node.name.endswith(("Linear", "Dropout", "Traffic")) or path.name in (
                        "precision.py",
                        "collectives.py",
                    )
                    if (
                        any(d.split("(")[0] in known or d.endswith(".setter") or "validator" in d for d in decorated)
                        or overrides
                    ):
                        continue
                    assert ast.get_docstring(part), f"{node.name}.{part.name}"


def test_the_tree_for_contributors_has_every_module():
    tree = (PACKAGE.parent / "CONTRIBUTING.md").read_text().split("lightning_seqpar/\n", 1)[1].split("```")[0]
    told = {found[1]: found[0] for found in re.finditer(r"^  (\w+).*\n(?:    .*\n)*", tree, re.M)}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        package, name = parts[0], parts[-1]
        if not name.startswith("__"):
            assert re.search(rf"\b{name}\b", told.get(package, "")), f"CONTRIBUTING.md has no line on {package}/{name}"


def test_links_in_the_documentation_lead_somewhere_and_tests_that_it_names_exist():
    root = PACKAGE.parent
    pages = [root / "README.md", root / "CONTRIBUTING.md", root / "CHANGELOG.md", *root.glob("docs/**/*.md")]
    for page in [*pages, *root.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for name in re.findall(r"\btests/[\w/]+\.py", page.read_text()):
            assert (root / name).is_file(), f"{page.name} names {name}"


def test_every_mutant_still_fits_its_source():
    assert stale(PACKAGE) == []


def test_faults_that_are_put_in_elsewhere_fit_too():
    import convergence

    known = definitions(PACKAGE)
    for fault in convergence.FAULTS:
        place_of(fault, known)


def test_a_mutant_that_fits_no_more_says_why():
    known = definitions(PACKAGE)
    for definition, old, says in (
        ("GradSync.rush", "x", "there is no definition GradSync.rush"),
        ("all_gather", "x", "is several definitions; name one of async_ops:all_gather, functional:all_gather"),
        ("GradSync.flush", "no such text", "its text stands 0 times in GradSync.flush"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            place_of(Mutant("a fault", definition, old, ""), known)
