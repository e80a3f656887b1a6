"""Break the source on purpose, one fault at a time, and show which test sees it.

    make mutants                 all of them, with a table in runs/mutants.md
    make mutants ARGS=norm       those with 'norm' in their name
    make mutants ARGS=--check    runs nothing: those that fit the source no more, and why

Each fault stands beside the test that must see it (:func:`sees`), and is a replacement in a copy of the repository; the package
itself has no switches. A fault names a definition (a function, a method, a class or a constant of a module), wherever it lives,
and a text that stands in it once: code can move between files. Exit code 1 if any fault survives or fits no more, or if no fault
has such a name.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """A fault: in a definition, ``old`` (which must stand there exactly once) becomes ``new``.

    Attributes:
        name: what is wrong, for the table.
        definition: the qualified name, such as ``GradSync.flush``; with the module's last name in front of it where
            several modules have one of that name, ``grad_norm:global_grad_norm``.
        old: a part of the definition's source.
        new: what stands there instead.
        test: the test that sees it, as pytest names it.
    """

    name: str
    definition: str
    old: str
    new: str
    test: str = ""


Test = TypeVar("Test", bound=Callable[..., Any])


def sees(what: str, definition: str, old: str, new: str, *, case: str = "") -> Callable[[Test], Test]:
    """Decorate the test that must go red with a fault in the package. At run time it does nothing: the source is read.

    Args:
        what: what is wrong then.
        definition: where it is, as :class:`Mutant` has it.
        old: a part of the definition's source.
        new: what stands there instead.
        case: the parameters with which the test is run, as pytest writes them; all of them if left out.
    """
    return lambda test: test


@cache
def all_mutants(root: Path = ROOT) -> list[Mutant]:
    """The faults that stand beside tests."""
    found = []
    for file in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.parse(file.read_text()).body:
            for call in getattr(node, "decorator_list", []):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "sees":
                    values = [ast.literal_eval(value) for value in call.args]
                    case = "".join(f"[{ast.literal_eval(option.value)}]" for option in call.keywords)
                    found.append(Mutant(*values, f"{file.relative_to(root)}::{node.name}{case}"))  # type: ignore[attr-defined]
    return found


@dataclass(frozen=True)
class Span:
    """The lines of one definition, decorators included: ``[first, last)``."""

    file: Path
    first: int
    last: int

    def text(self, lines: Sequence[str]) -> str:
        return "".join(lines[self.first : self.last])


def definitions(package: Path) -> dict[str, list[Span]]:
    """Every definition of a package by qualified name: functions, methods and classes, and constants of modules."""
    found: dict[str, list[Span]] = {}

    def visit(parent: ast.AST, file: Path, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            names: list[str] = []
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = [node.name]
                visit(node, file, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
                visit(node, file, prefix)  # the body of an if, a try, a with
            if not names:
                continue
            first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])
            for name in names:
                found.setdefault(prefix + name, []).append(Span(file, first - 1, node.end_lineno or first))

    for file in sorted(package.rglob("*.py")):
        visit(ast.parse(file.read_text()), file, "")
    return found


def place_of(mutant: Mutant, known: Mapping[str, Sequence[Span]]) -> Span:
    """Where a fault's text stands.

    Raises:
        ValueError: if there is no such definition, more than one, or the text does not stand in it exactly once.
    """
    module, _, name = mutant.definition.rpartition(":")
    spans = [span for span in known.get(name, []) if module in ("", span.file.stem)]
    if not spans:
        raise ValueError(f"{mutant.name}: there is no definition {mutant.definition}")
    files = {span.file for span in spans}
    if len(files) > 1:
        stems = ", ".join(sorted(f"{file.stem}:{name}" for file in files))
        raise ValueError(f"{mutant.name}: {mutant.definition} is several definitions; name one of {stems}")
    lines = spans[0].file.read_text().splitlines(keepends=True)
    counts = [span.text(lines).count(mutant.old) for span in spans]  # a property has two of one name
    if sum(counts) != 1:
        raise ValueError(f"{mutant.name}: its text stands {sum(counts)} times in {mutant.definition}")
    return spans[counts.index(1)]


def stale(package: Path) -> list[str]:
    """The faults that fit the source no more, and why."""
    known, found = definitions(package), []
    for mutant in all_mutants():
        try:
            ast.parse(faulty(mutant, place_of(mutant, known)))
        except SyntaxError as error:
            found.append(f"{mutant.name}: the source is none with it: {error}")
        except ValueError as error:
            found.append(str(error))
    return found


def faulty(mutant: Mutant, span: Span) -> str:
    """The text of the file with the fault."""
    lines = span.file.read_text().splitlines(keepends=True)
    lines[span.first : span.last] = [span.text(lines).replace(mutant.old, mutant.new)]
    return "".join(lines)


def apply(mutant: Mutant, package: Path) -> None:
    """Put the fault into a copy of the package."""
    span = place_of(mutant, definitions(package))
    span.file.write_text(faulty(mutant, span))


def copy_repository(folder: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if name.endswith((".py", ".yaml", ".toml")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run(mutant: Mutant) -> tuple[bool, str]:
    """Whether a test went red, and which."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        copy_repository(folder)
        try:
            apply(mutant, folder / "lightning_seqpar")
        except ValueError as error:
            return False, f"STALE: {error}"
        env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        where = subprocess.run(
            [sys.executable, "-c", "import lightning_seqpar as l; print(l.__file__)"],
            cwd=folder, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if where.returncode:
            return False, f"BROKEN: {where.stderr.splitlines()[-1]}"
        assert Path(where.stdout.strip()).is_relative_to(folder.resolve()), where.stdout
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", ""]
        done = subprocess.run([*command, mutant.test], cwd=folder, env=env, capture_output=True, text=True, check=False)
        seen = re.search(r"^FAILED (.+?)(?: - |$)", done.stdout, re.M)
        if done.returncode == 1 and seen:
            return True, re.sub(r"^tests/(\w+/)?", "", seen.group(1))
        return (False, "SURVIVED" if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-300:]}")


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        gone = stale(ROOT / "lightning_seqpar")
        print(*gone, f"{len(all_mutants()) - len(gone)} of {len(all_mutants())} faults fit the source", sep="\n")
        return 1 if gone else 0
    chosen = [mutant for mutant in all_mutants() if all(word in mutant.name for word in sys.argv[1:])]
    if not chosen:
        print(f"no fault has {' and '.join(sys.argv[1:])} in its name")
        return 1
    rows: list[tuple[Mutant, bool, str]] = []
    with ThreadPoolExecutor(2) as pool:
        for mutant, (caught, where) in zip(chosen, pool.map(run, chosen), strict=True):
            rows.append((mutant, caught, where))
            print(f"{'caught' if caught else 'ALIVE ':<7} {mutant.name:<48} {where}", flush=True)
    alive = sum(not caught for _, caught, _ in rows)
    table = ["| fault | in | seen by |", "|---|---|---|"]
    table += [f"| {mutant.name} | `{mutant.definition}` | `{where}` |" for mutant, _, where in rows]
    (ROOT / "runs").mkdir(exist_ok=True)
    (ROOT / "runs" / "mutants.md").write_text("\n".join(table) + "\n")
    print(f"\n{len(rows) - alive} of {len(rows)} faults caught; runs/mutants.md")
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
