"""The command line without processes: help, overrides, and what it says of a wrong option."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_seqpar import ParallelConfig, SeqParallelStrategy
from lightning_seqpar.cli.main import SeqParallelCLI, SeqParallelParser, main
from tests.helpers.models import GPT
from tests.helpers.processes import ROOT

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
        ("--trainer.strategy.sequence_parallel=true", "error: no option 'sequence_parallel'; did you mean 'sp'?\n"),
        ("--trainer.strategy.config.tpp=2", "error: no option 'tpp'; did you mean 'tp', 'pp', 'virtual_pp'?\n"),
        ("--trainer.devcies=2", "error: no option 'trainer.devcies'; did you mean 'devices'"),
        ("--trainer.startegy.tp=2", "error: no option 'trainer.startegy.tp'; did you mean 'strategy'"),
        ("--trainer.strategy=seqpar_tp3", "error: no strategy 'seqpar_tp3'; did you mean 'seqpar_tp"),
        ("--model.dimm=3", "error: no option 'dimm'; did you mean 'dim'"),
        ("--trainer.strategy.tp=two", "Parser key \"tp\": Expected a <class 'int'>. Got value: two\n"),
        (
            "--trainer.strategy.recompute=ful",
            "Expected a typing.Literal['none', 'selective', 'full']. Got value: ful\n",
        ),
        ("--trainer.strategy.tp=0", "error: tp=0: a size must be 1 or more; leave it out for 1\n"),
        ("--trainer.strategy.tp=3", "world size 2 does not divide by tp 3 × cp 1 × pp 1 = 3; use 3 processes"),
        ("--trainer.strategy.pp=2", "error: pp=2 does not run yet; use pp=1 (pipeline parallelism;"),
        ("--trainer.strategy.plan=bytegpt", "error: plan='bytegpt' is no family; did you mean 'byte_gpt'?"),
    ],
)
def test_a_wrong_option_is_one_sentence(capsys, argument, says):
    told = refused(capsys, *CONFIG, argument)
    assert says in told
    assert told.splitlines()[-1].startswith("tip: ")
    assert "usage:" not in told
    assert len(told.splitlines()) <= 6, told


def test_a_key_in_a_file(capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text(
        "trainer: {strategy: {class_path: lightning_seqpar.SeqParallelStrategy, init_args: {tensor_parallel: 2}}}\n"
    )
    assert "error: no option 'tensor_parallel'; did you mean 'tp'?" in refused(capsys, "-c", str(tmp_path / "bad.yaml"))


def test_overrides_reach_the_strategy():
    cli = SeqParallelCLI(
        run=False, args=[*CONFIG, "--trainer.strategy.tp=4", "--trainer.devices=4", "--trainer.strategy.sp=false"]
    )
    assert cli.trainer.strategy.config == ParallelConfig(tp=4, sp=False)


@pytest.mark.parametrize(
    "nested",
    [
        ["--trainer.strategy.config.tp=2"],
        ["--trainer.strategy.config={tp: 2, timeout: 60, plan: {base: auto, rules: []}}"],
    ],
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


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-seqpar\[cli\]'"):
        main(["fit"])


def test_the_saved_configuration_is_read_back(tmp_path):
    first = SeqParallelCLI(
        run=False, args=[*CONFIG, "--trainer.strategy=SeqParallelStrategy", "--trainer.strategy.config.tp=2"]
    )
    saved = tmp_path / "config.yaml"
    saved.write_text(first.parser.dump(first.config, skip_none=False))
    again = SeqParallelCLI(run=False, args=["-c", str(saved)])
    assert isinstance(again.trainer.strategy, SeqParallelStrategy)
    assert again.trainer.strategy.config == first.trainer.strategy.config
