"""How a refusal is printed, and which errors are refusals."""

from __future__ import annotations

import io
import linecache
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_seqpar import ParallelConfig, SeqParallelStrategy, ShardingPlan
from lightning_seqpar.inference.infer import infer_blocks
from lightning_seqpar.layout.param_layout import Shard
from lightning_seqpar.strategy.ending import Wait, is_lost_peer, is_refusal, shortens_refusals, tell_shortly, tell_waits
from lightning_seqpar.strategy.launcher import flush_stdout
from lightning_seqpar.user_input import name_error
from lightning_seqpar.verify.guards.before_training import check_backend
from tests.mutants import sees

THIS = Path(__file__).name


@pytest.fixture(autouse=True)
def usual(monkeypatch) -> list[BaseException]:
    """The errors that the hook before ours is given to print."""
    got: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: got.append(value))
    monkeypatch.delenv("SEQPAR_VERBOSE", raising=False)
    return got


def refuses() -> None:
    ShardingPlan.from_rules([3])


def users_own() -> None:
    raise ValueError("of the user's code")


def strict_zip() -> None:
    """An error that the interpreter raises in this package, where it has given itself too many units."""
    Shard.by_segments(0, [4], [2, 2], 2, "name")


def raised(call: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its frames are what matters
        call()
    return caught.value


def uncaught(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)


def files(told: str) -> list[str]:
    return [Path(file).name for file in re.findall(r'File "(.*?)"', told)]


@sees(
    "a refusal is shown with all frames inside the package",
    "_Short.__call__",
    "            _keep_users(told)\n",
    "            pass\n",
)
@pytest.mark.parametrize("call", [refuses, lambda: SeqParallelStrategy(tp=0)], ids=["ours", "pydantic's"])
def test_the_users_frames_are_printed_and_no_other(usual, capsys, call):
    error = raised(shortens_refusals(call))
    uncaught(error)
    told = capsys.readouterr().err
    assert usual == []
    assert set(files(told)) == {THIS}
    assert told.endswith(f"{error}\n")


@sees(
    "what the interpreter raises inside the package is taken for a refusal",
    "is_refusal",
    "return is_ours and (isinstance(error, ValidationError) or is_at_raise(stack))",
    "return is_ours",
    case="strict_zip",
)
@pytest.mark.parametrize("call", [users_own, strict_zip])
def test_an_error_that_is_no_refusal_is_left_to_the_usual_hook(usual, call):
    error = raised(shortens_refusals(call))
    assert not is_refusal(error)
    uncaught(error)
    assert usual == [error]


def test_other_ranks_print_one_line_or_nothing(usual, capfd, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    error = raised(refuses)
    tell_shortly(error, 3)
    uncaught(error)
    assert capfd.readouterr().err == f"lightning_seqpar: rank 3 raised {name_error(error)}\n"
    tell_shortly(error, 3, is_told=True)
    uncaught(error)
    assert capfd.readouterr().err == ""
    assert usual == []


@pytest.mark.parametrize(("value", "is_short"), [("1", False), ("0", True), ("", True)])
def test_a_variable_keeps_all_frames(usual, monkeypatch, value, is_short):
    monkeypatch.setenv("SEQPAR_VERBOSE", value)
    error = raised(refuses)
    tell_shortly(error, 0)
    uncaught(error)
    assert (usual == []) == is_short


class Broken(nn.Module):
    def forward(self, x):
        users_own()


def test_the_cause_of_a_refusal_is_told_with_the_users_frames(capsys):
    error = raised(lambda: infer_blocks(Broken(), torch.ones(1, 2, 3)))
    tell_shortly(error, 0)
    uncaught(error)
    told = capsys.readouterr().err
    assert set(files(told)) == {THIS}
    assert "of the user's code" in told
    assert "in users_own" in told
    assert "direct cause" in told


def test_a_script_that_catches_many_refusals_gets_one_hook(usual, capsys):
    for _ in range(sys.getrecursionlimit()):
        tell_shortly(error := raised(refuses), 0)
    other = raised(users_own)
    uncaught(other)
    uncaught(error)
    assert usual == [other]
    assert "in refuses" in capsys.readouterr().err


def raised_by(text: str, error: str) -> RuntimeError:
    linecache.cache["users.py"] = len(text), None, text.splitlines(keepends=True), "users.py"
    try:
        exec(compile(text, "users.py", "exec"), {"__name__": "users", "error": RuntimeError(error)})
    except RuntimeError as caught:
        return caught
    raise AssertionError("it raises")


@sees("a user's own words are those of a lost rank", "is_lost_peer", "    if not is_at_raise(stack):\n", "    if True:\n")
def test_an_error_of_the_users_own_says_nothing_of_another_rank():
    assert not is_lost_peer(raised_by("raise error", "request to the data base timed out"))
    assert not is_lost_peer(raised_by("raise error", "no rank is meant"))
    wrapped = raised_by(
        "try:\n  raise error\nexcept RuntimeError as cause:\n  raise RuntimeError('x timed out') from cause", "y"
    )
    assert not is_lost_peer(wrapped)
    with pytest.raises(RuntimeError) as of_torch:  # as a collective's, it comes from C++
        torch.zeros(2).view(-1, 3, -1)
    of_torch.value.args = ("Connection closed by peer",)
    assert is_lost_peer(of_torch.value)
    assert is_lost_peer(RuntimeError("Timed out waiting for clients"))


SAVE = Wait("gather, at batch 2", "save")
FIT = Wait("all_reduce, at batch 2", "")


@sees("a call that some ranks did not make is not told", "tell_waits", "    if any(alike) and (", "    if False and (")
def test_waits_of_ranks_that_ran_apart_name_their_lines():
    told = tell_waits({0: SAVE, 1: FIT, 2: FIT, 3: FIT}, [])
    assert told.startswith("every rank waited, in different collectives: rank 0 in gather, at batch 2; rank 1")
    assert "\n  rank 0: save\n  ranks 1, 2, 3: at no line of yours in a hook or step\n" in told
    assert "must be called on all of them, not under `if trainer.is_global_zero`" in told
    assert "must be called on all of them" not in tell_waits({0: FIT, 1: FIT}, [])
    missing = tell_waits({0: SAVE}, [1])
    assert missing.startswith("rank 1 is missing: rank 0 waited in gather, at batch 2\n  rank 0: save\n")
    many = {rank: SAVE._replace(line=f"line {rank}") for rank in range(64)}
    assert len(tell_waits(many, []).splitlines()) <= 25


def test_errors_in_one_line_keep_both_ends():
    assert name_error(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert name_error(ValueError("a\n b")) == "ValueError: a b"
    worker = RuntimeError("Caught in worker 0.\n" + "frame\n" * 200 + "KeyError: 'text'")
    assert re.fullmatch(r"RuntimeError: Caught in worker 0\. .* \.\.\. .*KeyError: 'text'", name_error(worker))
    assert len(name_error(worker)) <= 400


@pytest.mark.parametrize("closed", [True, False])
def test_standard_output_that_is_closed_stops_nothing(closed, monkeypatch):
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stdout", gone if closed else None)
    flush_stdout()


@sees(
    "compiled blocks over gloo on GPUs",
    "check_backend",
    'if config.compile and device_type == "cuda"',
    'if device_type == "mps"',
)
def test_compiled_blocks_on_gpus_are_not_sent_over_gloo():
    for backend in ("gloo", "cpu:gloo,cuda:gloo"):
        with pytest.raises(ValueError, match="compile=True on GPUs: collectives of a compiled block over gloo ended the ranks"):
            check_backend(ParallelConfig(tp=2, compile=True, process_group_backend=backend), "cuda")
    check_backend(ParallelConfig(tp=2, compile=True, process_group_backend="gloo"), "cpu")
    check_backend(ParallelConfig(tp=2, process_group_backend="gloo"), "cuda")
