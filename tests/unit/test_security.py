"""Nothing that the package reads runs code, unless the user says so: in its source, and of files that try."""

from __future__ import annotations

import ast
import functools
import json
import pickle
import sys
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import lightning_seqpar
from lightning_seqpar import ParallelConfig, SeqParallelStrategy, ShardingPlan, describe
from lightning_seqpar.checkpoint.convert import open_source
from lightning_seqpar.checkpoint.folder import FORMAT, MARKER, Opened
from lightning_seqpar.init.model_source import model_from_folder
from lightning_seqpar.plan.sharding_plan import UniqueKeysLoader, check_plan
from lightning_seqpar.strategy.saving import WholeFileIO
from tests.audit import describe as describe_audit
from tests.helpers import models

PACKAGE = Path(lightning_seqpar.__file__).parent
UNPICKLES = {
    ("data/sampler.py", "__iter__"): "a batch of another rank of this run, by a collective that unpickles by itself",
    ("verify/training.py", "read_trial"): "what the process that started this one wrote into its arguments",
    ("verify/ranks.py", "_collect"): "what a child that this process started wrote into a pipe",
    ("checkpoint/folder.py", "_Index"): "makes the classes of an index alone",
}
"""Functions and classes that unpickle without ``weights_only``, and why they may."""
IMPORTS_BY_NAME = {
    ("__init__.py", "__getattr__"): "this package, for names that it shows",
    ("init/model_source.py", "function_named"): "the command line, or a class_path in a file of Lightning's",
    ("cli/training.py", ""): "the package of Lightning's that is used",
}
"""Functions that import what is named by a string, and who names it."""
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "runpy.run_path", "runpy.run_module",
             "torch.serialization.add_safe_globals", "tempfile.mktemp"}  # fmt: skip


class Calls(ast.NodeVisitor):
    """All calls of a module, each with its place and with the parameters of the functions around it."""

    def __init__(self, path: Path) -> None:
        self.path, self.where, self.parameters = path.relative_to(PACKAGE).as_posix(), "", set[str]()
        self.found: list[tuple[ast.Call, str, set[str]]] = []
        self.classes: list[tuple[ast.ClassDef, str]] = []
        self.visit(ast.parse(path.read_text()))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = self.where, self.parameters
        names = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        self.where, self.parameters = node.name, self.parameters | names
        self.generic_visit(node)
        self.where, self.parameters = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.classes.append((node, self.path))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.found.append((node, self.where, self.parameters))
        self.generic_visit(node)


SOURCES = [Calls(path) for path in sorted(PACKAGE.rglob("*.py"))]


def calls(*names: str) -> Iterator[tuple[ast.Call, tuple[str, str], set[str]]]:
    """Calls of these functions, by their dotted names: each with its file and function, and with that one's parameters."""
    for source in SOURCES:
        for node, where, parameters in source.found:
            if ast.unparse(node.func) in names:
                yield node, (source.path, where), parameters


def test_every_load_of_a_file_keeps_to_weights_or_is_told_to_trust():
    for node, place, parameters in calls("torch.load", "load"):
        if place[0] == "checkpoint/folder.py" and ast.unparse(node.func) == "load":
            continue  # of torch.distributed.checkpoint: tensors, whose names are looked up in the index
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        says = given.get("weights_only")
        opted = (says == "not trust" and "trust" in parameters) or (says == "weights_only" and "weights_only" in parameters)
        assert says == "True" or opted, f"{place}: {ast.unparse(node)}"


def test_what_is_unpickled_is_from_this_run():
    found = {place for _, place, _ in calls("pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.loads")}
    readers = [one for source in SOURCES for one in source.classes]
    found |= {(path, one.name) for one, path in readers if any(ast.unparse(base).endswith("Unpickler") for base in one.bases)}
    assert found == UNPICKLES.keys()


def test_no_text_is_run():
    assert [place for _, place, _ in calls(*RUNS_TEXT)] == []
    for source in SOURCES:
        for node, where, _ in source.found:
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert "shell" not in given, (source.path, where)
            if ast.unparse(node.func).startswith("yaml.") and "load" in ast.unparse(node.func):
                assert ast.unparse(node.func) == "yaml.safe_load" or given.get("Loader") == "UniqueKeysLoader", (
                    source.path,
                    where,
                )
    assert issubclass(UniqueKeysLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert UniqueKeysLoader.yaml_constructors == getattr(yaml, "CSafeLoader", yaml.SafeLoader).yaml_constructors


def test_names_are_imported_where_a_command_line_gives_them():
    """And what reads plans can't call it: packages import from their left alone, and these stand right of plans and styles."""
    found = {place for _, place, _ in calls("importlib.import_module", "import_module", "__import__")}
    assert found == IMPORTS_BY_NAME.keys()


TRAP = "from pathlib import Path\nPath(__file__).with_name('sprung').touch()\nRun = run = print\n"


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that leaves a file behind where it is imported, and must not be; its name."""
    (tmp_path / "trap_of_plans.py").write_text(TRAP)
    monkeypatch.syspath_prepend(tmp_path)
    yield "trap_of_plans"
    assert sys.modules.pop("trap_of_plans", None) is None
    assert not (tmp_path / "sprung").exists()


def test_the_trap_works(tmp_path, monkeypatch):
    (tmp_path / "trap_of_plans.py").write_text(TRAP)
    monkeypatch.syspath_prepend(tmp_path)
    yaml.unsafe_load("!!python/object/apply:trap_of_plans.run [1]")
    assert (tmp_path / "sprung").exists()
    del sys.modules["trap_of_plans"]


RULES = [
    "{pattern: '*', style: 'TRAP:run'}",
    "{pattern: '*', style: TRAP.run}",
    "{pattern: 'TRAP:run', style: column}",
    "{pattern: '__class__.__init__.__globals__', style: row}",
    "{pattern: 'model.blocks.*', style: blocks, dim: 1, module: TRAP}",
    "{pattern: model.norm, style: set, values: {__class__: TRAP.Run}}",
    "{pattern: model.norm, style: set, divide: [__init__.__globals__]}",
    "{pattern: model.norm, style: replace, _target_: TRAP.run}",
    "{pattern: model.norm, style: replace, class_path: TRAP.Run}",
    "!!python/object/apply:TRAP.run []",
    "{pattern: !!python/name:TRAP.run '', style: column}",
    "{pattern: '*', style: !!python/object/apply:TRAP.run ['x']}",
]
"""Rules of a plan that name code; ``TRAP`` is the module that must not be imported."""


@pytest.mark.parametrize("rule", RULES)
def test_names_in_a_plan_import_nothing(rule, trap, tmp_path):
    text = f"rules:\n- {rule.replace('TRAP', trap)}\n"
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    told = []
    for read in (
        lambda: ShardingPlan.from_yaml(file).match(models.GPT()),
        lambda: ShardingPlan.from_yaml_text(text),
        lambda: check_plan(str(file)),
        lambda: SeqParallelStrategy(tp=2, plan=str(file)),
        lambda: describe(models.GPT(), ParallelConfig(tp=2, plan=str(file))),
    ):
        try:
            read()
        except (ValueError, TypeError) as error:
            told.append(str(error))
    assert told, "one of them refuses it"
    assert "!!" not in rule or all("is not YAML" in text for text in told)


@pytest.mark.parametrize("name", ["TRAP", "TRAP:run", "TRAP.run", "__import__('TRAP')", "${TRAP:run}"])
def test_the_name_of_a_plan_imports_nothing(name, trap):
    with pytest.raises(ValueError, match="no family"):
        SeqParallelStrategy(tp=2, plan=name.replace("TRAP", trap))


@pytest.mark.parametrize(
    "text",
    [
        "tp: !!python/object/apply:TRAP.run [2]",
        "plan: !!python/name:TRAP.run",
        "plan: {base: none, rules: [!!python/object/apply:TRAP.run [2]]}",
        "tp: ${TRAP:run}",
        "_target_: TRAP.run\ntp: ${_target_}",
    ],
)
def test_a_configuration_imports_nothing(text, trap, tmp_path):
    file = tmp_path / "parallel.yaml"
    file.write_text(text.replace("TRAP", trap))
    with pytest.raises(ValueError):  # noqa: PT011
        ParallelConfig.from_yaml(file)


class Runs:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_that_runs_code_is_refused_unless_it_is_trusted(zipped, tmp_path):
    place, ran = tmp_path / "a.ckpt", tmp_path / "ran"
    content = {"state_dict": {"w": torch.ones(1)}, "callbacks": Runs(ran)}
    torch.save(content, place, _use_new_zipfile_serialization=zipped)
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        WholeFileIO().load_checkpoint(place)
    with pytest.raises(ValueError, match="--trust"):
        open_source(place)
    assert not ran.exists()
    WholeFileIO().load_checkpoint(place, weights_only=False)
    assert ran.exists()


def test_an_audit_fails_for_what_a_release_fixes():
    fine, unknown = {"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "not there"}
    fixed = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2", "3"]}
    unfixed = {"id": "PYSEC-2", "fix_versions": []}
    assert describe_audit([fine, unknown]) == (["audit: 1 packages, 0 known vulnerabilities; not known there: b"], False)
    told, fixable = describe_audit([{"name": "c", "version": "1", "vulns": [unfixed]}])
    assert (told[0], fixable) == ("c 1: PYSEC-2, which no release fixes yet", False)
    told, fixable = describe_audit([fine, {"name": "c", "version": "1", "vulns": [fixed, unfixed]}])
    assert (told[0], fixable) == ("c 1: PYSEC-1 = CVE-1, fixed in 2, 3", True)


class Made:
    """Makes an object of a class where it is unpickled."""

    def __init__(self, kind: type, *given: Any) -> None:
        self.kind, self.given = kind, given

    def __reduce__(self) -> Any:
        return self.kind, self.given


@pytest.mark.parametrize("kind", ["_open_file", "_open_zipfile_writer_file"])
def test_the_index_of_a_checkpoint_empties_no_file(kind, tmp_path):
    (kept := tmp_path / "kept").write_text("precious")
    given = (str(kept), "w") if kind == "_open_file" else (str(kept),)
    (tmp_path / MARKER).write_text(json.dumps({"format": FORMAT}))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Made(getattr(torch.serialization, kind), *given)))
    with pytest.raises(ValueError, match=f"torch.serialization.{kind} has no place in the index of a checkpoint"):
        Opened(tmp_path)
    assert kept.read_text() == "precious"


@pytest.mark.parametrize("name", ["/etc/passwd", "../other", "..", "."])
def test_the_index_of_a_checkpoint_names_files_of_its_folder(name, tmp_path):
    index = Metadata({}, storage_data={MetadataIndex("w"): _StorageInfo(name, 0, 1)})
    (tmp_path / MARKER).write_text(json.dumps({"format": FORMAT}))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="which is no file in it; the checkpoint is damaged"):
        Opened(tmp_path)


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a word."""

    def log_message(self, *args: Any) -> None:
        """Nothing."""


def test_a_checkpoint_of_the_web_is_not_trusted(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")  # by which fsspec looks whether it is there
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "kept"))
    torch.save({"state_dict": {}, "callbacks": Runs(ran := tmp_path / "ran")}, tmp_path / "a.ckpt")
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/a.ckpt"
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            WholeFileIO().load_checkpoint(place)
        assert not ran.exists()
        WholeFileIO().load_checkpoint(place, weights_only=False)
        server.shutdown()
    assert ran.exists()


@pytest.mark.parametrize("known", [True, False])
def test_code_in_the_folder_of_a_model_is_not_run(known, trap, tmp_path, monkeypatch):
    """Whatever the user would answer: transformers asks on the terminal where nothing is said."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    code = {"AutoConfig": f"{trap}.Run", "AutoModelForCausalLM": f"{trap}.Run"}
    kind = {"model_type": "vit" if known else "of_nobody"}  # one that is known, and has no language model
    (tmp_path / "config.json").write_text(json.dumps({**kind, "auto_map": code}))
    with pytest.raises(ValueError, match=r"custom code|Unrecognized configuration class"):
        model_from_folder(tmp_path)
