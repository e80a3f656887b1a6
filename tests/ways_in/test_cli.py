"""The command line without processes: help, overrides, and what it says of a wrong option."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from safetensors.torch import save_file

from lightning_seqpar import ParallelConfig, SeqParallelStrategy
from lightning_seqpar.cli import SeqParallelCLI, SeqParallelParser
from lightning_seqpar.cli.main import OWN, main
from tests.helpers.models import GPT
from tests.helpers.processes import PYTHON, ROOT, run
from tests.mutants import sees

pytestmark = pytest.mark.core

CONFIG = ("-c", str(ROOT / "conf" / "cli.yaml"))


@pytest.fixture(autouse=True)
def _examples(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "path", list(sys.path))


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["fit", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--trainer.strategy.tpp=2", "error: no option 'tpp'; did you mean 'tp', 'pp', 'virtual_pp'?\n"),
        ("--trainer.strategy.config.tpp=2", "error: no option 'tpp'; did you mean 'tp', 'pp', 'virtual_pp'?\n"),
        ("--trainer.devcies=2", "error: no option 'trainer.devcies'; did you mean 'devices'"),
        ("--trainer.strategy=seqpar_tp3", "error: no strategy 'seqpar_tp3'; did you mean 'seqpar_tp"),
        ("--trainer.strategy.tp=two", "Parser key \"tp\": Expected a <class 'int'>. Got value: two\n"),
        ("--trainer.strategy.tp=0", "error: tp=0: a size must be 1 or more; leave it out for 1\n"),
        ("--trainer.strategy.tp=3", "world size 2 does not divide by tp 3 × cp 1 × pp 1 = 3; use 3 processes"),
    ],
)
def test_a_wrong_option_is_one_sentence(capsys, argument, says):
    told = refused(capsys, *CONFIG, argument)
    assert says in told
    assert told.splitlines()[-1].startswith("tip: ")
    assert "usage:" not in told
    assert len(told.splitlines()) <= 6, told


def test_an_option_shows_refusals_with_all_frames(capsys, monkeypatch):
    monkeypatch.setenv("SEQPAR_VERBOSE", "0")
    with pytest.raises(ValueError, match="world size 2 does not divide by tp 3") as caught:
        main(["fit", *CONFIG, "-v", "--trainer.strategy.tp=3"])
    assert caught.traceback[-1].path.name == "grid.py", "the frame that refuses"
    assert os.environ["SEQPAR_VERBOSE"] == "1", "the ranks that are started read it"
    with pytest.raises(SystemExit):
        main(["fit", *CONFIG, "-v", "--print_config"])
    assert "verbose" not in capsys.readouterr().out.lower(), "it is no part of a configuration"


def test_classes_are_found_in_the_current_folder_by_a_config_in_another_one(capsys, monkeypatch, tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "run.yaml").write_text("model: {class_path: a_model_of_this_folder.Mine}\n")
    (tmp_path / "a_model_of_this_folder.py").write_text("import lightning as L\n\nclass Mine(L.LightningModule): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as an installed command has it
    with pytest.raises(SystemExit) as ended:
        main(["fit", "-c", "conf/run.yaml", "--print_config"])
    assert not ended.value.code, capsys.readouterr().err


def test_a_key_in_a_file(capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text(
        "trainer: {strategy: {class_path: lightning_seqpar.SeqParallelStrategy, init_args: {tensor_parallel: 2}}}\n"
    )
    assert "error: no option 'tensor_parallel'; did you mean 'tp'?" in refused(capsys, "-c", str(tmp_path / "bad.yaml"))


def test_each_wrong_field_of_a_subcommand_is_a_line(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "tests.helpers.models:GPT", "tp=two", "sp=7"])
    assert capsys.readouterr().err == (
        "error: tp='two': it counts ranks or steps; write a whole number\n"
        "       sp=7: it is a switch; write true or false\n"
        "tip: seqpar plan --help\n"
    )


def test_overrides_reach_the_strategy():
    cli = SeqParallelCLI(
        run=False, args=[*CONFIG, "--trainer.strategy.tp=4", "--trainer.devices=4", "--trainer.strategy.sp=false"]
    )
    assert cli.trainer.strategy.config == ParallelConfig(tp=4, sp=False)


@pytest.mark.parametrize(
    "nested",
    [["--trainer.strategy.config.tp=2"], ["--trainer.strategy.config={tp: 2, timeout: 60, plan: {base: auto, rules: []}}"]],
)
def test_a_nested_config_beside_the_defaults_that_every_command_line_passes(nested):
    plain = [*CONFIG, "--trainer.strategy=SeqParallelStrategy", *nested]
    cli = SeqParallelCLI(run=False, args=plain)
    assert cli.trainer.strategy.config.tp == 2


def test_an_own_cli_with_our_parser(capsys):
    arguments = ["fit", "--trainer.strategy=SeqParallelStrategy", "--trainer.strategy.tpp=2"]
    with pytest.raises(SystemExit):
        LightningCLI(GPT, parser_class=SeqParallelParser, args=arguments)
    assert "error: no option 'tpp'; did you mean 'tp'" in capsys.readouterr().err
    cli = LightningCLI(
        GPT, run=False, args=["--trainer.strategy=seqpar_tp4", "--trainer.devices=4", "--trainer.accelerator=cpu"]
    )
    assert cli.trainer.strategy.config.tp == 4


def test_an_own_cli_with_a_nested_config_of_a_file_and_an_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("strategy.yaml").write_text(
        "class_path: lightning_seqpar.SeqParallelStrategy\ninit_args: {config: {tp: 2, sp: false, timeout: '0:01:00'}}\n"
    )
    Path("run.yaml").write_text("trainer: {accelerator: cpu, devices: 2, strategy: strategy.yaml}\n")
    cli = LightningCLI(GPT, run=False, args=["-c", "run.yaml", "--trainer.strategy.config.sp=true"])
    assert cli.trainer.strategy.config == ParallelConfig(tp=2, timeout=60)


def test_help_shows_every_field_with_its_description(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--trainer.strategy.help=lightning_seqpar.SeqParallelStrategy"])
    assert ended.value.code == 0
    told = "".join(capsys.readouterr().out.split())  # the terminal's width breaks words
    for name, field in ParallelConfig.model_fields.items():
        assert f"--trainer.strategy.{name}" in told, name
        assert "".join(field.description.split()) in told, name


def test_schema_is_printed(capsys):
    main(["schema"])
    assert json.loads(capsys.readouterr().out) == ParallelConfig.json_schema()


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """A folder with a checkpoint of each form."""
    folder = tmp_path_factory.mktemp("forms")
    torch.save({"state_dict": {"weight": torch.ones(2)}}, folder / "file.ckpt")
    (folder / "hf").mkdir()
    save_file({"weight": torch.ones(2)}, folder / "hf" / "model.safetensors")
    main(["convert", str(folder / "file.ckpt"), str(folder / "parts")])
    return folder


@pytest.mark.parametrize(
    ("line", "slow"),
    [("--help", {"torch"}), ("inspect parts", {"lightning"}), ("inspect hf", {"lightning"})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_short_questions_load_nothing_that_takes_long(forms, line, slow):
    code, output = run(*(PYTHON, "-X", "importtime", "-m", "lightning_seqpar", *line.split()), cwd=forms)
    assert code == 0, output
    assert not slow & {name.rpartition("|")[2].strip() for name in output.splitlines()}


HIDING = """
import importlib.metadata, sys
HIDDEN = ("jsonargparse", "rich", "transformers", "huggingface_hub")  # the last two bring rich along
sys.modules.update(dict.fromkeys(HIDDEN))
found = importlib.metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name.lower().replace("-", "_") in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return found(cls, name)
importlib.metadata.Distribution.from_name = classmethod(from_name)
"""
"""Makes packages seem not installed; their metadata too, which Lightning asks for."""

RUN_ALL = """
import contextlib, io, json, sys
from lightning_seqpar.cli import SeqParallelCLI, main
def ended(arguments):
    sys.argv = ["seqpar", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
            code = 0
        except SystemExit as exit:
            code = exit.code
        except Exception as error:  # a user would see a traceback
            code = repr(error)
    return code, out.getvalue(), err.getvalue()
results = [ended(arguments) for arguments in json.loads(sys.argv[1])]
try:
    SeqParallelCLI()
except ImportError as error:
    results.append(str(error))
print(json.dumps(results))
"""


EXTRA = "pip install 'lightning-seqpar[cli]'\n"
REFUSED = {
    **{
        line: f"error: seqpar {name} needs jsonargparse, which is not installed: {EXTRA}"
        for line, name in (("fit --help", "fit"), ("-c x.yaml fit", "fit"), ("--seed_everything=1", "--seed_everything=1"))
    },
    "palm": "error: no subcommand 'palm'; did you mean 'plan'?\ntip: seqpar --help\n",
    "plan own_models:make tp=2": f"error: the table needs rich: {EXTRA}tip: seqpar plan --help\n",
    f"plan {CONFIG[1]}": f"error: a YAML file with a model needs jsonargparse: {EXTRA}tip: seqpar plan --help\n",
    "inspect small.ckpt": f"error: the table needs rich: {EXTRA}tip: seqpar inspect --help\n",
    "convert small.ckpt more.ckpt --dry-run": f"error: the table needs rich: {EXTRA}tip: seqpar convert --help\n",
}
"""Command lines, and what they say where the extra ``cli`` is not installed."""
WORK = [
    "--help", "schema", "plan own_models:make tp=2 --json", "plan --help", "inspect small.ckpt --json",
    "convert small.ckpt parts.ckpt",
]  # fmt: skip


@sees("a command line without its extra goes on", "main:_train", "    if not has_cli():\n", "    if False:\n")
def test_what_needs_the_extra_names_it_and_the_rest_works(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    torch.save({"state_dict": {"weight": torch.ones(2)}}, tmp_path / "small.ckpt")
    (tmp_path / "own_models.py").write_text("from byte_gpt import ByteLM\ndef make():\n    return ByteLM()\n")
    lines = [*WORK, *REFUSED, ""]
    paths = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "examples")])
    command = (PYTHON, "-c", RUN_ALL, json.dumps([line.split() for line in lines]))
    code, output = run(*command, cwd=tmp_path, PYTHONPATH=paths)
    assert code == 0, output
    found = dict(zip([*lines, "SeqParallelCLI()"], json.loads(output.splitlines()[-1]), strict=True))
    assert {line: found[line][1:] for line in REFUSED} == {line: ["", says] for line, says in REFUSED.items()}
    assert {line: found[line][::2] for line in WORK} == {line: [0, ""] for line in WORK}
    told = found["--help"][1]
    assert all(f"\n    {name} " in told for name in OWN)
    assert "jsonargparse, which is not installed" in told
    assert found[""] == [2, "", told]
    assert found["SeqParallelCLI()"] == f"the command line needs jsonargparse: {EXTRA.strip()}"
    assert json.loads(found["schema"][1]) == ParallelConfig.json_schema()
    assert json.loads(found["plan own_models:make tp=2 --json"][1])["axes"] == {"tp": 2}
    assert json.loads(found["inspect small.ckpt --json"][1])["tensors"] == {"weight": [[2], "float32"]}


def test_the_saved_configuration_is_read_back(tmp_path):
    first = SeqParallelCLI(
        run=False, args=[*CONFIG, "--trainer.strategy=SeqParallelStrategy", "--trainer.strategy.config.tp=2"]
    )
    saved = tmp_path / "config.yaml"
    saved.write_text(first.parser.dump(first.config, skip_none=False))
    again = SeqParallelCLI(run=False, args=["-c", str(saved)])
    assert isinstance(again.trainer.strategy, SeqParallelStrategy)
    assert again.trainer.strategy.config == first.trainer.strategy.config
