"""The configuration: what is read, and how it refuses."""

from __future__ import annotations

import inspect
import json
from datetime import timedelta

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from pydantic import ValidationError

from lightning_seqpar import ParallelConfig, SeqParallelStrategy
from tests.helpers.processes import ROOT

CONF = ROOT / "conf"


def test_defaults_are_the_contract():
    config = ParallelConfig()
    assert (config.tp, config.sp, config.dp, config.cp, config.pp) == (1, True, "auto", 1, 1)
    assert (config.order, config.plan, config.data_parallel) == ("pp-dp-cp-tp", "auto", "ddp")
    assert (config.recompute, config.regather, config.compile) == ("none", True, False)
    assert (config.self_check, config.check_every, config.timeout) == (True, 0, timedelta(seconds=1800))


def test_yaml_there_and_back_with_interpolation_and_overrides(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("tp: 2\ndp: ${tp}\ntimeout: 60\nplan: {base: none, rules: [{pattern: a, style: exit}]}\n")
    config = ParallelConfig.from_yaml(file, overrides=["tp=4", "sp=false"])
    assert (config.tp, config.dp, config.sp, config.timeout.total_seconds()) == (4, 4, False, 60)
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert ParallelConfig.from_yaml(again) == config


def test_keywords_and_config():
    assert SeqParallelStrategy(tp=2, sp=False).config == ParallelConfig(tp=2, sp=False)
    hydra = OmegaConf.create({"_target_": "lightning_seqpar.SeqParallelStrategy", "tp": 2})
    for config in (ParallelConfig(tp=2), {"tp": 2}, hydra):
        strategy = SeqParallelStrategy(config=config)
        assert (strategy.config, repr(strategy)) == (ParallelConfig(tp=2), "SeqParallelStrategy(tp=2) of lightning.pytorch")
    with pytest.raises(ValidationError, match="frozen"):
        strategy.config.tp = 4
    # A command line passes every default along.
    assert SeqParallelStrategy(config=ParallelConfig(tp=2), sp=True, timeout=1800).config.tp == 2


def test_the_committed_schema_is_fresh():
    """``seqpar schema > conf/parallel_config.schema.json``."""
    committed = json.loads((CONF / "parallel_config.schema.json").read_text())
    assert committed == ParallelConfig.json_schema()


def test_the_schema_knows_every_field_and_describes_it():
    properties = ParallelConfig.json_schema()["properties"]
    assert set(properties) == {*ParallelConfig.model_fields, "_target_"}
    assert all(entry.get("description") for entry in properties.values())
    assert properties["tp"]["minimum"] == 1
    assert properties["timeout"]["type"] == "number"
    assert properties["recompute"]["enum"] == ["none", "activations", "selective", "full"]


def test_the_strategys_keywords_are_the_configs_fields_with_their_defaults_and_texts():
    """Command lines read the signature and the docstring; the config is the truth."""
    parameters = inspect.signature(SeqParallelStrategy.__init__).parameters
    told = " ".join(inspect.getdoc(SeqParallelStrategy).split())
    default = ParallelConfig()
    for name, field in ParallelConfig.model_fields.items():
        shown, own = parameters[name].default, getattr(default, name)
        assert shown == own or (shown is None and own in ({}, [], default.checkpoint)) or name == "timeout", name
        assert f"{name}: {' '.join(field.description.split())}" in told, name
    assert parameters["timeout"].default == default.timeout.total_seconds()


@pytest.mark.parametrize("path", sorted((CONF / "strategy").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_strategy_is_read(path):
    assert SeqParallelStrategy(config=ParallelConfig.from_yaml(path)).config.tp >= 1
    assert path.read_text().startswith("# yaml-language-server: $schema=../parallel_config.schema.json\n")


def test_every_shipped_yaml_is_read():
    for path in sorted(CONF.rglob("*.yaml")):
        assert OmegaConf.is_dict(OmegaConf.load(path)), path
    demo = OmegaConf.load(CONF / "demo.yaml")
    assert ParallelConfig.from_omegaconf(demo.strategy).tp == 2
    cli = OmegaConf.load(CONF / "cli.yaml")
    assert SeqParallelStrategy(**cli.trainer.strategy.init_args).config.tp == 2


@pytest.mark.parametrize("experiment", [None, *sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))])
def test_every_composition_is_read(experiment):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", [f"+experiment={experiment}"] if experiment else [])
    assert isinstance(instantiate(composed.strategy), SeqParallelStrategy)
    assert set(composed) >= {"strategy", "model", "data", "trainer"}


def test_a_saved_configuration_is_read_back():
    """Lightning's command line writes a timedelta as 0:30:00."""
    assert ParallelConfig(timeout="0:30:00") == ParallelConfig()
    assert ParallelConfig(timeout="1:00:00").timeout == timedelta(hours=1)
    assert ParallelConfig(timeout=str(timedelta(days=2, seconds=5.5))).timeout == timedelta(days=2, seconds=5.5)
    assert ParallelConfig(**ParallelConfig(tp=2, plan=[{"pattern": "a", "style": "row"}]).model_dump()) == ParallelConfig(
        tp=2, plan=[{"pattern": "a", "style": "row"}]
    )


def test_hydras_containers_are_keywords_too():
    node = OmegaConf.create({"ddp": {"find_unused_parameters": True}, "plan": [{"pattern": "a", "style": "row"}]})
    strategy = SeqParallelStrategy(tp=2, **node)
    assert strategy.config.ddp == {"find_unused_parameters": True}
    assert type(strategy.config.plan.rules[0]) is dict


def test_the_table_in_the_documentation_is_the_configuration():
    table = (ROOT / "docs" / "launch.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(ParallelConfig.model_fields)
    for row, field in zip(rows, ParallelConfig.model_fields.values(), strict=True):
        assert row.endswith(f"| {' '.join(field.description.replace('``', '`').split())} |"), row
