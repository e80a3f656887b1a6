"""The documentation: its blocks of code fit the package, and the site has a place for every public name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex

import pytest
import yaml

import lightning_seqpar
from lightning_seqpar import ParallelConfig, SeqParallelStrategy, ShardingPlan
from lightning_seqpar.cli.main import LIGHTNINGS, OWN
from tests.helpers.guides import GIVEN, blocks, calls, execute
from tests.helpers.processes import ROOT

PYTHON, YAML, PLAIN = blocks("python"), blocks("yaml"), blocks("")
DOCS = ROOT / "docs"


def site_hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_blocks_to_look_at():
    assert len(PYTHON) > 25
    assert len(YAML) >= 6
    assert {block.page for block in PYTHON if block.is_script} >= {
        f"docs/recipes/{name}.md" for name in ("llama", "gpt", "vit", "t5", "experts", "weather")
    }


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_in_the_documentation_is_python_and_asks_for_fields_that_there_are(block):
    compile(block.code, str(block), "exec")
    for name, given in calls(block.code):
        known = {**ParallelConfig.model_fields, "config": None}
        assert given.keys() <= known.keys(), f"{block}: {name} has no {given.keys() - known.keys()}"
        ParallelConfig(**{field: value for field, value in given.items() if value is not ...})
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_seqpar"):
            shown = importlib.import_module(str(node.module))
            assert all(hasattr(shown, alias.name) for alias in node.names), f"{block}: {ast.unparse(node)}"


@pytest.mark.parametrize("block", [one for one in PYTHON if not one.is_script and not one.fits and not one.why], ids=str)
def test_fragments_run_with_what_the_text_around_them_takes_for_granted(block, tmp_path, monkeypatch):
    assert block.needs <= {*re.findall(r"\w+", GIVEN)}, f"{block}: give these, or say why it is <!-- not run: ... -->"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parallel.yaml").write_text("tp: 2\n")
    execute(block.code, str(tmp_path))


@pytest.mark.parametrize("block", YAML, ids=str)
def test_yaml_in_the_documentation_is_what_the_package_reads(block):
    found = yaml.safe_load(block.code)
    if "rules" in found:
        ShardingPlan.from_rules(found["rules"])
    else:
        strategy = found["strategy"]
        assert strategy["class_path"] == f"lightning_seqpar.{SeqParallelStrategy.__name__}"
        ParallelConfig(**strategy["init_args"])


@pytest.mark.parametrize("block", [one for one in PLAIN if re.search(r"^seqpar ", one.code, re.M)], ids=str)
def test_commands_in_the_documentation_are_commands(block):
    for line in re.findall(r"^seqpar .*", block.code, re.M):
        _, name, *rest = shlex.split(line, comments=True)
        assert name in {**LIGHTNINGS, **OWN}, f"{block}: {line}"
        if name in ("plan", "verify"):
            fields = [word for word in rest if "=" in word and not word.startswith("-")]
            ParallelConfig.from_omegaconf(dict(yaml.safe_load(word.replace("=", ": ", 1)).popitem() for word in fields))


def test_messages_on_the_page_of_symptoms_are_those_of_the_package():
    said = [
        node.value
        for path in (ROOT / "lightning_seqpar").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    page = (DOCS / "symptoms.md").read_text()
    quoted = [part.strip() for span in re.findall(r"`([^`]*…[^`]*)`", page) for part in span.split("…") if len(part) > 11]
    assert len(quoted) > 15
    assert [part for part in quoted if not any(part in text for text in said)] == []


def reference() -> set[str]:
    """What the pages of the reference show."""
    return {name for page in (DOCS / "reference").glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)}


def test_every_public_name_stands_in_the_reference():
    assert {f"lightning_seqpar.{name}" for name in lightning_seqpar.__all__} <= reference()
    assert {f"lightning_seqpar.{path}" for path in ("collectives", "measure", "parity", "testing")} <= reference()
    assert "lightning_seqpar.fabric.SeqParallelFabricStrategy" in reference()


def test_the_site_lists_the_fields_and_what_each_means():
    hooks = site_hooks()
    told = {name: text for name, _, _, text in hooks.options()}
    fields = ParallelConfig.model_fields
    assert told == {name: " ".join(str(field.description).split()).replace("``", "`") for name, field in fields.items()}
    defaults = {name: default for name, _, default, _ in hooks.options()}
    assert (defaults["tp"], defaults["ddp"], defaults["process_group_backend"], defaults["dp"]) == ("1", "{}", "None", '"auto"')
    assert "<!-- the fields of ParallelConfig -->" in (DOCS / "reference" / "config.md").read_text()


def test_the_page_of_the_command_line_has_every_command_and_option():
    page = (DOCS / "reference" / "cli.md").read_text()
    assert [name for name in {**LIGHTNINGS, **OWN} if f"`{name}`" not in page] == []
    sources = [path.read_text() for path in (ROOT / "lightning_seqpar" / "cli").glob("*.py")]
    options = {name for source in sources for name in re.findall(r'add_argument\(\s*(?:"-\w", )?"(--[\w-]+)"', source)}
    assert len(options) > 15
    assert sorted(name for name in options if f"`{name}`" not in page) == []


def test_pages_outside_of_docs_get_a_place_on_the_site():
    hooks = site_hooks()
    outside = hooks.outside()
    assert outside["README.md"] == "index.md"
    assert outside["examples/finetune_hf.py"] == "examples/finetune_hf.py.md"
    assert outside["benchmarks/results/pipeline.png"] == "benchmarks/results/pipeline.png"
    for path, uri in outside.items():
        assert hooks.path_of(uri) == path or uri == f"{path}.md"


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"^ +- .*?([\w/.]+\.md)$", text, re.M))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages <= listed
    assert listed <= pages | {"index.md"} | {*site_hooks().MORE}
