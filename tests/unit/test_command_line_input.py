"""What ``seqpar plan`` and ``seqpar verify`` are given: what can't be read is refused in a sentence, with exit status 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_seqpar.cli.main import main
from tests.mutants import sees

LLAMA = "tests.helpers.families:make_llama"
BOTH = pytest.mark.parametrize("command", ["plan", "verify"])
STRATEGY = "{{strategy: {{class_path: lightning_seqpar.SeqParallelStrategy, init_args: {}}}}}"
NO_TEXT = b'{"\xff": 1}'


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What a command line that ends with status 2 says on the standard error."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    return captured.err


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


@BOTH
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("tp", "error: override 'tp': write it as field=value, such as 'tp=4'"),
        ("tp=[", "error: override 'tp=[': while parsing a flow "),
        ("plan=${", "error: override 'plan=${': "),
        ("tp=${tp}", "error: the parallel config can't be resolved: Recursive interpolation detected"),
        ("ddp.x=${nowhere}", "error: the parallel config can't be resolved: Interpolation key 'nowhere' not found"),
    ],
)
def test_an_override_that_cannot_be_read(command, override, told, capsys):
    assert told in refusal(capsys, command, LLAMA, override)


@sees(
    "overrides beside --config are forgotten",
    "arguments:config_of",
    "ParallelConfig.from_yaml(given.config, given.overrides)",
    "ParallelConfig.from_yaml(given.config)",
    case="plan",
)
@BOTH
def test_a_file_of_the_configuration_and_overrides_over_it(command, tmp_path, capsys):
    file = write(tmp_path / "parallel.yaml", "tp: 3\ncp: 2\ncp_method: ring\n")
    said = refusal(capsys, command, LLAMA, "cp=1", "--config", file)
    assert "cp_method='ring' with cp=1: " in said
    assert refusal(capsys, command, LLAMA, "tp=[", "--config", file).startswith("error: override 'tp=[': ")
    main(["plan", LLAMA, "tp=2", "--config", file])
    assert capsys.readouterr().out.startswith("4 ranks: cp 2 × tp 2")


@BOTH
def test_fields_in_the_file_of_a_model(command, tmp_path, capsys):
    text = (
        "trainer: {strategy: {class_path: lightning_seqpar.SeqParallelStrategy, init_args: {tp: 2, cp: FIELD}}}\n"
        "model: {class_path: tests.helpers.models.GPT, init_args: {dim: 32}}\n"
    )
    circle = write(tmp_path / "circle.yaml", text.replace("FIELD", "'${cp}'"))
    assert "error: the parallel config can't be resolved: Recursive" in refusal(capsys, command, circle)
    half = write(tmp_path / "half.yaml", text.replace("FIELD", "'${'"))
    assert "error: the parallel config can't be read: " in refusal(capsys, command, half)
    main(["plan", write(tmp_path / "run.yaml", text.replace("FIELD", "'${tp}'"))])
    assert capsys.readouterr().out.startswith("4 ranks: cp 2 × tp 2")


@BOTH
@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        ("5", "trainer=5 is no mapping; write trainer: {devices: 2, ...}"),
        (STRATEGY.format("5"), "init_args=5 of trainer.strategy is no mapping; write arguments by name, as tp: 2"),
        (STRATEGY.format("{config: [1]}"), "init_args.config=[1] of trainer.strategy is no mapping"),
    ],
)
def test_settings_in_the_file_of_a_model_that_are_no_mappings(command, trainer, told, tmp_path, capsys):
    text = f"trainer: {trainer}\nmodel: {{class_path: tests.helpers.models.GPT}}\n"
    assert f"run.yaml: {told}" in refusal(capsys, command, write(tmp_path / "run.yaml", text))


@pytest.mark.parametrize("strategy", ["ddp", "{class_path: lightning.pytorch.strategies.DDPStrategy}"])
def test_another_strategy_has_no_plan(strategy, tmp_path, capsys):
    text = f"trainer: {{strategy: {strategy}}}\nmodel: {{class_path: tests.helpers.models.GPT}}\n"
    assert "is none of ours; name lightning_seqpar.SeqPar" in refusal(capsys, "plan", write(tmp_path / "run.yaml", text))


@BOTH
@pytest.mark.parametrize("config", [{"hidden_size": 16, "num_attention_heads": 3}, {"hidden_size": "x"}, {"architectures": 5}])
def test_configurations_that_make_no_model(command, config, tmp_path, capsys):
    file = write(tmp_path / "config.json", json.dumps({"model_type": "llama", **config}))
    assert refusal(capsys, command, str(tmp_path)).startswith(f"error: {file}: it is no configuration of a model (")


@BOTH
def test_files_that_are_no_text_are_named(command, tmp_path, capsys):
    for name, target in (("run.yaml", tmp_path / "run.yaml"), ("config.json", tmp_path)):
        file = write(tmp_path / name, NO_TEXT)
        assert refusal(capsys, command, str(target)).startswith(
            f"error: {file} is no text: byte 2 is not UTF-8; save it as UTF-8\n"
        )
