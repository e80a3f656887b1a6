"""What the code base promises about itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from mutants import MUTANTS

import lightning_seqpar

PACKAGE = Path(lightning_seqpar.__file__).parent
LINE = [
    "config", "batch", "adapters", "topology", "groups", "measure", "collectives", "random", "linearity", "parts", "lean",
    "stretch", "gathered", "overlap", "draws", "region", "layers", "layout", "facade", "plan", "trace", "probe", "dataflow",
    "support", "products", "blockplan", "infer", "hooks", "blueprint", "parallelize", "losswatch", "grad_sync", "files",
    "background", "folder", "convert", "checkpoint", "parity", "guards", "metrics", "sampler", "precision", "launcher",
    "agreement", "selfcheck", "proof", "broadcast", "summary", "describe", "deferred", "weights", "environment", "stepping",
    "saving", "strategy", "report", "targets", "huggingface", "testing", "cli", "__main__",
]  # fmt: skip


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lightning_seqpar"):
            found += [node.module] if "." in node.module else [f"lightning_seqpar.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("lightning_seqpar")]
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_left(path):
    own = name_of(path)
    assert own in LINE, f"{own} has no place in the line"
    for imported in imports(path):
        other = imported.split(".")[1]
        allowed = LINE[: LINE.index(own) + (path.parent != PACKAGE)]
        assert other in allowed, f"{own} imports {other}, which is not on its left"


def test_config_is_pure():
    tree = ast.parse((PACKAGE / "config.py").read_text())
    used = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    used |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert not used & {"torch", "lightning", "os"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_level_state_and_no_group_fallback(path):
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                assert isinstance(target, ast.Name)
                assert target.id == "__all__" or target.id.lstrip("_")[0].isupper(), f"{target.id} looks like state"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args]
            defaults = [None] * (len(arguments) - len(node.args.defaults)) + list(node.args.defaults)
            inherited = node.name in ("reduce", "all_gather") and path.name == "environment.py"  # Lightning's signature
            for argument, default in zip(arguments, defaults, strict=True):
                assert not (argument.arg == "group" and default is not None) or inherited, (
                    f"{node.name} has a group fallback"
                )
        if isinstance(node, ast.ExceptHandler):
            assert not (len(node.body) == 1 and isinstance(node.body[0], ast.Pass)), "a silent except"


def test_public_names_are_pinned():
    assert sorted(lightning_seqpar.__all__) == [
        "CheckpointConfig", "Description", "ModelLayout", "ParallelConfig", "ParallelGroups", "ParamLayout", "PlanSpec",
        "ProcessTopology", "SeqParallelStrategy", "ShardingPlan", "describe", "grad_norm", "unshard", "weights_from",
    ]  # fmt: skip
    assert all(hasattr(lightning_seqpar, name) for name in lightning_seqpar.__all__)


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


def test_links_in_the_documentation_lead_somewhere():
    root = PACKAGE.parent
    pages = [
        *(root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *sorted((root / "docs").glob("*.md")),
    ]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_mutant_still_fits_its_source():
    stale = [m.name for m in MUTANTS if (PACKAGE / m.file).read_text().count(m.old) != 1]
    assert stale == []
