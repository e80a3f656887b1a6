"""Which frames of a refusal's traceback are left, and which errors are refusals."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_seqpar import SeqParallelStrategy, ShardingPlan
from lightning_seqpar.inference.infer import infer_blocks
from lightning_seqpar.layout.shard import Shard
from lightning_seqpar.strategy.child_watch import flush_stdout, is_lost_peer
from lightning_seqpar.strategy.missing_ranks import Wait, tell_waits
from lightning_seqpar.strategy.refusals import is_refusal, shorten_traceback, shortens_refusals
from lightning_seqpar.strategy.tracebacks import UsersCall, users_call
from lightning_seqpar.user_input import name_error
from tests.mutants import sees

THIS = Path(__file__).name


@pytest.fixture(autouse=True)
def printed(monkeypatch) -> list[tuple[BaseException, list[str]]]:
    """What ``sys.excepthook`` is given to print: the error, and its frames."""
    got: list[tuple[BaseException, list[str]]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: got.append((value, frames(trace))))
    monkeypatch.delenv("SEQPAR_VERBOSE", raising=False)
    return got


def frames(trace: TracebackType | None) -> list[str]:
    return [Path(frame.filename).name for frame in traceback.extract_tb(trace)]


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


@sees(
    "a refusal is shown with all frames inside the package",
    "shorten_traceback",
    "    _linked([first, *_users(inner)])\n",
    "",
)
def test_the_users_frames_stay_and_no_other(printed):
    error = raised(refuses)
    assert frames(error.__traceback__)[2:] != []
    text = str(error)
    shorten_traceback(error)
    assert (type(error), str(error)) == (ValueError, text)
    assert frames(error.__traceback__) == [THIS, THIS]
    uncaught(error)
    assert printed == [(error, [THIS, THIS])]


@sees(
    "a refusal that nothing catches is printed with Lightning's frames",
    "_WithUsersFrames.__call__",
    "trace = _linked(_users(frames_of(trace)))",
    "pass",
)
def test_frames_between_those_of_the_user_are_left_out(printed):
    error = raised(shortens_refusals(refuses))
    assert frames(error.__traceback__) == [THIS, "refusals.py", THIS], "caught in the package"
    uncaught(error)
    assert printed == [(error, [THIS, THIS])]


@sees(
    "what the interpreter raises inside the package is taken for a refusal",
    "is_refusal",
    "return isinstance(error, ValidationError) or is_at_raise(frames[-1])",
    "return True",
    case="strict_zip",
)
@pytest.mark.parametrize("call", [users_own, strict_zip])
def test_an_error_that_is_no_refusal_keeps_all_its_frames(printed, call):
    error = raised(call)
    before = frames(error.__traceback__)
    shorten_traceback(error)
    assert not is_refusal(error)
    assert frames(error.__traceback__) == before
    uncaught(error)
    assert printed == [(error, before)]


def test_a_value_that_pydantic_refuses(printed):
    error = raised(lambda: SeqParallelStrategy(tp=0))
    assert type(error).__name__ == "ValidationError"
    assert "main.py" not in frames(error.__traceback__), "pydantic's"
    uncaught(error)
    assert printed == [(error, [THIS, THIS])]


@pytest.mark.parametrize(("value", "is_short"), [("1", False), ("0", True), ("", True)])
def test_a_variable_keeps_all_frames(printed, monkeypatch, value, is_short):
    monkeypatch.setenv("SEQPAR_VERBOSE", value)
    error = raised(refuses)
    shorten_traceback(error)
    uncaught(error)
    assert ("sharding_plan.py" not in frames(error.__traceback__)) == is_short
    assert ("sharding_plan.py" not in printed[0][1]) == is_short


class Broken(nn.Module):
    def forward(self, x):
        users_own()


def test_the_cause_of_a_refusal_keeps_its_frames_if_the_user_raised_it():
    error = raised(lambda: infer_blocks(Broken(), torch.ones(1, 2, 3)))
    cause = error.__cause__
    assert cause is not None
    before = frames(cause.__traceback__)
    shorten_traceback(error)
    assert frames(error.__traceback__) == [THIS, THIS]
    assert error.__cause__ is cause
    assert frames(cause.__traceback__) == before
    assert before[-2:] == [THIS, THIS]


@pytest.mark.parametrize("cause", [strict_zip, refuses])
def test_a_cause_from_within_the_package_is_told_without_frames(cause):
    error, within = raised(refuses), raised(cause)
    trace = within.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).name == THIS:
        trace = trace.tb_next
    error.__cause__ = within.with_traceback(trace)
    shorten_traceback(error)
    assert error.__cause__ is within
    assert within.__traceback__ is None


def test_a_script_that_catches_many_refusals_gets_one_hook(printed):
    before = sys.excepthook
    for _ in range(sys.getrecursionlimit()):
        shorten_traceback(error := raised(refuses))
    other = raised(users_own)
    uncaught(other)
    uncaught(error)
    assert [value for value, _ in printed] == [other, error]
    assert sys.excepthook is not before


def raised_by(text: str, error: str) -> RuntimeError:
    linecache.cache["users.py"] = len(text), None, text.splitlines(keepends=True), "users.py"
    try:
        exec(compile(text, "users.py", "exec"), {"__name__": "users", "error": RuntimeError(error)})
    except RuntimeError as caught:
        return caught
    raise AssertionError("it raises")


@sees("a user's own words are those of a lost rank", "is_lost_peer", "or not is_at_raise(frames[-1]):", "or True:")
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


class Toy(nn.Module):
    """As a model of the user's; the sum fails."""

    def forward(self, x):
        return self.inner(x)

    def inner(self, x):
        return torch.stack([x, torch.zeros(7)])


def dispatch(hook: Any) -> None:
    """As Lightning calls a hook."""
    exec(
        "def call(hook):\n  hook()",
        within := {"__name__": "lightning.pytorch.trainer.call", "__package__": "lightning"},
    )
    within["call"](hook)


def hook_that_samples() -> None:
    Toy()(torch.zeros(2))


@contextlib.contextmanager
def a_wrapper() -> Iterator[None]:
    yield


@a_wrapper()
def helper() -> None:
    ShardingPlan.from_rules([3])


def hook_that_calls() -> None:
    helper()


def call_of(hook: Any) -> UsersCall:
    trace = raised(lambda: dispatch(hook)).__traceback__
    assert trace is not None
    return users_call(trace)


@sees(
    "a module that a hook calls is taken for the hook's own line",
    "users_call",
    "    last = ends[0] if ends else len(frames)\n",
    "    last = len(frames)\n",
)
def test_the_call_of_the_users_hook_and_its_lines():
    sampled = call_of(hook_that_samples)
    assert (sampled.name, sampled.caller) == ("Toy.forward", "hook_that_samples")
    hooks, inner = sampled.lines
    assert THIS in hooks
    assert "in hook_that_samples: Toy()(torch.zeros(2))" in hooks
    assert "in inner: return torch.stack([x, torch.zeros(7)])" in inner
    called = call_of(hook_that_calls)
    assert (called.name, called.caller) == ("from_rules", "helper"), "through a decorator"
    assert len(called.lines) == 1
    assert "in helper: ShardingPlan.from_rules([3])" in called.lines[0]


SAVE = Wait("gather of tp (ranks 0, 1), at batch 2", "Trainer.save_checkpoint", "on_train_batch_end", ["save"])
FIT = Wait("all_reduce of all ranks (ranks 0, 1, 2, 3), at batch 2", "Trainer.fit", "<module>", ["fit"])
STEP = Wait("all_reduce of tp (ranks 0, 1), at batch 3", "LM.forward", "training_step", ["step", "inner"])


@sees(
    "a call that some ranks did not make is not told",
    "tell_waits",
    "    if len(alike) > 1 or missing:\n",
    "    if False:\n",
)
def test_waits_of_ranks_that_ran_apart_name_the_call():
    told = tell_waits({0: SAVE, 1: FIT, 2: FIT, 3: FIT}, [])
    assert told.startswith(
        "every rank waited, in different collectives: rank 0 in gather of tp (ranks 0, 1), at batch 2; rank 1"
    )
    assert "\n  rank 0: in Trainer.save_checkpoint\n    save\n  ranks 1, 2, 3: in Trainer.fit\n    fit\n" in told
    assert (
        "\n  Trainer.save_checkpoint needs every rank: call it on all ranks, not under `if trainer.is_global_zero`"
        in told
    )
    assert "\n  Trainer.save_checkpoint needs" in tell_waits({0: SAVE, 1: STEP}, []), (
        "a step is not what is out of place"
    )
    assert "call it on all ranks" not in tell_waits({0: FIT, 1: FIT}, [])
    missing = tell_waits({0: SAVE}, [1])
    assert missing.startswith(
        "rank 1 is missing: rank 0 waited in gather of tp (ranks 0, 1), at batch 2\n  rank 0: in Trainer."
    )
    many = {rank: STEP._replace(lines=[f"line {rank}", "inner"]) for rank in range(64)}
    assert len(tell_waits(many, []).splitlines()) <= 25


@sees(
    "the frames of python -m stay in a refusal",
    "_WithUsersFrames.__call__",
    "            value.__traceback__ = trace  # Python's own hook prints this one\n",
    "",
)
def test_the_usual_hook_prints_the_users_frames_alone(capsys, monkeypatch):
    """Python's own prints the traceback that the error holds, whatever it is given."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    caught: list[BaseException] = []
    within = {
        "call": refuses,
        "caught": caught,
        "__name__": "lightning.pytorch.trainer.call",
        "__package__": "lightning",
    }
    exec("try: call()\nexcept Exception as error: caught.append(error)", within)
    shorten_traceback(caught[0])
    uncaught(caught[0])
    told = capsys.readouterr().err
    assert "in refuses" in told
    assert 'File "<string>"' not in told, "where it was caught"


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
