"""Real processes: Lightning's launcher, torchrun, and runs that end badly."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys

import pytest

from tests.helpers.ill_run import PLACES
from tests.helpers.processes import PYTHON, environment, hear_sigint, run_all, slurm, start, survivors
from tests.mutants import sees

pytestmark = pytest.mark.launch

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

MODULE = ("-m", "tests.helpers.ill_run")


@pytest.fixture
def script(tmp_path):
    tag = f"{tmp_path.parent.name}-{tmp_path.name}"

    def run(*command: str, timeout: float = 200, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*(command or (sys.executable,)), *MODULE],
            env=environment(SEQPAR_TAG=tag, **env),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            start_new_session=env.get("BAD", "").startswith("INT"),  # which goes to the whole group
            preexec_fn=hear_sigint,
        )

    run.tag = tag
    yield run
    # No orphan may be left: every process of this run carries the tag in its environment.
    assert survivors(tag) == []


FRAMES = r'File ".*/(lightning|torch|lightning_seqpar)/'
SAVED_ALONE = (
    r'rank 0: File ".*ill_run.py", line \d+, in strike: trainer\.save',
    r"rank 1: at no line of yours",
    "must be called on all of them, not under `if trainer.is_global_zero`",
)
ENDS = [
    # How it is started, what happens, the exit code (None: any but 0), what is said, what is not.
    ("rank 1 raises", (), {"BAD": "raise:1"}, None, ["the run failed: rank 1 raised ValueError: on purpose"], ""),
    ("rank 0 raises", (), {"BAD": "raise:0"}, None, ["the run failed: rank 0 raised ValueError: on purpose"], ""),
    ("rank 1 killed", (), {"BAD": "KILL:1"}, None, [r"the run failed: rank 1 \(pid \d+\) was killed by SIGKILL"], ""),
    ("rank 2 killed", (), {"BAD": "KILL:2", "WORLD": "4"}, None, [r"failed: rank 2 \(pid \d+\) was killed by SIGKILL"], ""),
    ("all leave", (), {"BAD": "exit:every"}, 3, [], "the run failed"),
    ("rank 1 leaves", (), {"BAD": "exit:1"}, 3, ["the run failed: rank 1 raised SystemExit: 3"], ""),
    ("main ends last", (), {"LATE": "yes"}, 0, [], "Exception ignored"),
    (
        "rank 1 hangs", (), {"BAD": "hang:1", "TIMEOUT": "15"}, None,
        [r"failed: rank 1 \(pid \d+\) did not answer and did not end .*\(rank 1 is missing: rank 0 waited in \w+, "], "",
    ),
    (
        "rank 1 hangs, torchrun", TORCHRUN, {"BAD": "hang:1", "TIMEOUT": "15"}, None,
        [r"lightning_seqpar: rank 1 is missing: rank 0 waited in \w+, at batch 2"], "",
    ),
    (
        "main stops", (), {"BAD": "STOP:0", "TIMEOUT": "15"}, -signal.SIGKILL,
        [r"The main process \(local rank 0\) was stopped, and is killed"], "",
    ),
    ("rank 0 saves alone", (), {"BAD": "save:0", "TIMEOUT": "15"}, None, SAVED_ALONE, "Traceback"),
    (
        "rank 0 saves alone after fit", (), {"SAVE": "half.ckpt"}, None,
        ["rank 1 had ended while another rank still waited for it; what speaks to all ranks"], FRAMES,
    ),
    ("main killed", (), {"BAD": "KILL:0"}, -signal.SIGKILL, ["rank 1 stops: the main process .* is gone"], ""),
    ("rank 0 raises after fit", (), {"AFTER": "0"}, None, ["the run failed: rank 0 raised ValueError: after fit"], ""),
    ("rank 1 raises after fit", (), {"AFTER": "1"}, None, [r"the run failed: rank 1 \(pid \d+\) exited with code 1"], ""),
    (
        "rank 1 raises, torchrun", TORCHRUN, {"BAD": "raise:1"}, None,
        ["lightning_seqpar: rank 1 raised ValueError: on purpose", "(?s)Root Cause.*ValueError: on purpose"], "",
    ),
    ("a worker is ended", (), {"BAD": "fork:0", "STEPS": "50", "PUT_OFF": "0.02"}, 0, [], "Traceback"),
    ("a handler of the user's", (), {"BAD": "TERM:0", "MINE": "1"}, 7, [], "lightning_seqpar: the run ended"),
    ("a wrong world", (), {"WORLD": "3"}, 1, [r"world size 3 does not divide by tp 2 × cp 1 × pp 1 = 2; use 2"], "rank 1"),
]  # fmt: skip
SUITE = {"rank 1 killed", "all leave", "main ends last", "rank 1 hangs", "rank 0 saves alone", "a wrong world"}
"""The ends of the suite; the others differ little from them."""


@sees(
    "a rank that leaves is a failure", "ChildWatch._at_exit", "or isinstance(self.expected, SystemExit)", "", case="all leave"
)
@sees(
    "a main process that ends last speaks to nobody",
    "ChildWatch._at_exit",
    "contextlib.suppress(BrokenPipeError):  # all",
    "contextlib.nullcontext():  # all",
    case="main ends last",
)
@sees(
    "a rank that waits names nobody",
    "find_missing",
    "[one for one in range(size) if one not in heard]",
    "[]",
    case="rank 1 hangs",
)
@sees(
    "a main process that is stopped keeps its children",
    "end_stopped_parent",
    '    if state not in ("T", "t"):\n',
    "    if True:\n",
    case="main stops",
)
@sees(
    "signals of forked processes taken for the run's",
    "ChildWatch.take",
    "            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))\n",
    "",
    case="a worker is ended",
)
@pytest.mark.parametrize(
    ("command", "env", "code", "says", "never"),
    [pytest.param(*end, id=name, marks=[] if name in SUITE else pytest.mark.matrix) for name, *end in ENDS],
)
def test_the_end_of_a_run_names_its_reason_and_leaves_nobody(script, command, env, code, says, never):
    done = script(*command, **env)
    assert done.returncode == code if code is not None else done.returncode != 0, done.stderr[-3000:]
    for pattern in says:
        assert re.search(pattern, done.stderr), done.stderr[-3000:]
    assert not never or not re.search(never, done.stderr), done.stderr[-3000:]
    assert len(done.stderr.partition("the run failed")[2].splitlines()) <= 25, "the reason comes last"


def weights_of(done: subprocess.CompletedProcess[str]) -> dict[str, float]:
    """The sums of weights that the ranks printed behind each training."""
    assert done.returncode == 0, done.stderr[-3000:]
    return {key: float(total) for key, total in re.findall(r"WEIGHTS (\S+) (\S+)", done.stdout)}


@sees("SIGTERM is acted on where a rank is", "Ending.note", "if not self.listens or self._is_asked_to_end:", "if True:")
@pytest.mark.parametrize(
    ("rank", "setup", "step"),
    [
        ("1", {}, 3),
        pytest.param("0", {"WINDOWS": "2"}, 2, marks=pytest.mark.matrix),
        pytest.param("1", {"PP": "2", "TP": "1", "WINDOWS": "2"}, 2, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.more
def test_sigterm_to_any_rank_ends_all_between_two_steps_with_a_checkpoint(script, tmp_path, rank, setup, step):
    done = script(BAD=f"TERM:{rank}", FOLDER=str(tmp_path / "runs"), **setup)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr[-2000:]
    assert done.stderr.rstrip().endswith("lightning_seqpar: the run ended by SIGTERM, between two steps")
    assert "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [f"interrupted-epoch=0-step={step}.ckpt"]
    saved = str(tmp_path / "runs" / f"interrupted-epoch=0-step={step}.ckpt")
    assert weights_of(script(RESUME=saved, **setup)) == pytest.approx(weights_of(script(**setup)), rel=1e-9)


@sees(
    "an exception saves on ranks at different places",
    "Ending.is_apart",
    "        return self._apart\n",
    "        return False\n",
    case="1",
)
@pytest.mark.parametrize(
    "rank", [pytest.param("0", marks=pytest.mark.matrix), "1", pytest.param("every", marks=pytest.mark.matrix)]
)
@pytest.mark.more
def test_an_exception_saves_only_where_every_rank_raised_it(script, tmp_path, rank):
    done = script(BAD=f"raise:{rank}", RAISED="1", FOLDER=str(tmp_path / "runs"), TIMEOUT="60")
    assert done.returncode != 0
    assert re.search(r"the run failed: rank \d raised ValueError: on purpose", done.stderr), done.stderr[-2000:]
    left = [path.name for path in (tmp_path / "runs").iterdir()] if (tmp_path / "runs").exists() else []
    assert left == (["epoch=0-step=2.ckpt"] if rank == "every" else [])


@sees("a restart begins anew", "RestartList.newest", "                return str(path)\n", "                pass\n")
@sees(
    "a restart looks for ranks where dead ones were",
    "Environment._store_of_attempt",
    'return {"store": PrefixStore(f"attempt {attempt}", store)}',
    "return {}",
)
@sees(
    "a training is named by limits that Lightning fills in later",
    "Saver.save",
    "            restarts.add(filepath)\n",
    "            type(restarts)(self._env.trainer, self._env.module).add(filepath)\n",
)
@pytest.mark.more
def test_what_torchrun_starts_again_goes_on_from_the_last_checkpoint(script, tmp_path):
    """Two trainings of one script, the second of which loses a rank: each goes on from its own."""
    setup = {"STEPS": "9", "EVERY": "2", "TRAININGS": "2"}
    folders = [str(tmp_path / name) for name in ("whole", "again")]
    whole = script(*TORCHRUN, FOLDER=folders[0], **setup)
    again = script(*TORCHRUN, "--max-restarts", "1", FOLDER=folders[1], BAD="KILL:1", AT="5", **setup)
    told = re.findall(r"torchrun started the run again: it goes on from (\S+)", again.stderr)
    assert [os.path.relpath(path, folders[1]) for path in told] == ["0/epoch=0-step=8.ckpt", "1/epoch=0-step=4.ckpt"], (
        again.stderr[-6000:]
    )
    assert weights_of(again) == pytest.approx(weights_of(whole), rel=1e-9)
    assert len(weights_of(whole)) == 4


SAYS = {
    "raise": r"ValueError: on purpose",
    "KILL": r"rank {rank} .*(killed by SIGKILL|is missing)|lost another rank|Signal 9|did not meet|main process .* is gone",
    "STOP": r"rank {rank} (is missing: rank \d waited in \w+|.*did not answer)|main process .* (was stopped|is gone)|did not meet",
    "pause": r"rank {rank} (is missing: rank \d waited in \w+|.*did not answer)|did not meet",
    "TERM": r"ended by SIGTERM|SIGTERM|exitcode  : 143|killed by SIGTERM|Signal 15",
    "INT": r"interrupted|KeyboardInterrupt|Signal 2|died",
}
"""What may happen at a random moment, and what is said then."""
TRIALS = int(os.environ.get("FAULTS", "1"))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(TRIALS))
@pytest.mark.parametrize("command", [(), TORCHRUN], ids=["own", "torchrun"])
@pytest.mark.parametrize("kind", [*SAYS, "restart"])
def test_what_happens_at_a_random_moment_ends_the_run_with_its_reason(script, tmp_path, kind, command, seed):
    """Or torchrun starts it again; ``make faults`` tries each kind twenty times."""
    chance = random.Random(f"{command} {kind} {seed}")
    rank, place, at = chance.randrange(2), chance.choice(PLACES), str(chance.randrange(6))
    setup = {"STEPS": "8", "EVERY": "2", "VALIDATE": "1", "RAISED": "1", "TIMEOUT": "30", "FOLDER": str(tmp_path / "runs")}
    if kind == "restart":
        done = script(*TORCHRUN, "--max-restarts", "1", BAD=f"KILL:{rank}", PLACE=place, AT=at, **setup)
        assert "torchrun started the run again" in done.stderr
        assert weights_of(done) == pytest.approx(weights_of(script(STEPS="8")), rel=1e-9)
        return
    done = script(*command, BAD=f"{kind}:{rank}", PLACE=place, AT=at, **setup)
    told = f"{place}, batch {at}, rank {rank}: {done.stderr[-3000:]}"
    assert done.returncode != 0, told
    assert re.search(SAYS[kind].format(rank=rank), done.stderr), told
    left = sorted((tmp_path / "runs").glob("*.ckpt*"), key=lambda path: path.stat().st_mtime)
    assert kind == "KILL" or not [path for path in left if "unfinished" in path.name], told
    if kind == "TERM" and done.returncode == 128 + signal.SIGTERM and left:
        again = script(RESUME=str(left[-1]), STEPS="8")
        assert weights_of(again) == pytest.approx(weights_of(script(STEPS="8")), rel=1e-9)


@sees(
    "SLURM's signal saves where a rank is",
    "Ending.take_requeue_signal",
    "            signal.signal(environment.requeue_signal, self.note_requeue)\n",
    "            pass\n",
)
@pytest.mark.more
def test_slurms_requeue_signal_saves_on_all_ranks_at_one_place(script, tmp_path):
    """``scontrol`` is a script here, which notes that it was called."""
    called = tmp_path / "called"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $@ >> {called}\n")
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    results = run_all(slurm(*MODULE, SEQPAR_TAG=script.tag, BAD="USR1:1", FOLDER=str(tmp_path / "runs"), PATH=path))
    assert all(code == 0 for code, _ in results), results
    assert called.read_text() == "requeue 5\n"
    assert [file.name for file in (tmp_path / "runs").iterdir()] == ["hpc_ckpt_1.ckpt"]


@sees(
    "the watch over the children tells a refusal once more", "ChildWatch._at_exit", "if is_shared and all(", "if False and all("
)
@sees(
    "a refusal is told by each rank",
    "SeqParallelLauncher.tell",
    "            tell_shortly(error, rank, is_told=self._is_child)\n",
    "            pass\n",
    case="in a later step",
)
@pytest.mark.parametrize(
    ("refused", "users"),
    [({"REFUSED": "1"}, ["<module>", "main"]), ({"BAD": "refused:every"}, ["<module>", "main", "come_by", "strike"])],
    ids=["at the start", "in a later step"],
)
def test_a_refusal_is_told_once_and_without_our_frames(script, refused, users):
    """By rank 0, with the frames of the script alone; children say nothing, and so does the watch over them."""
    done = script(**refused)
    assert done.returncode == 1
    told = done.stderr[done.stderr.index("Traceback") :]
    assert done.stderr.count("'nowhere'") == done.stderr.count("Traceback") == 1, done.stderr
    assert "rank1" not in done.stderr
    assert "the run failed" not in done.stderr
    assert re.findall(r"File .*ill_run.py\", line \d+, in (.*)", told) == users
    assert told.count("  File ") == len(users), told
    assert "direct cause" not in told
    assert "During handling" not in told


@sees(
    "under torchrun each rank tells what the strategy's constructor refuses",
    "shortens_refusals",
    "            if is_refusal(error):\n",
    "            if False:\n",
    case="before the ranks are connected",
)
@pytest.mark.parametrize(
    ("refused", "says"),
    [
        ({"TP": "0"}, ("ValidationError", "tp=0: a size must be 1 or more")),
        pytest.param({"REFUSED": "1"}, ("ValueError", "'nowhere'"), marks=pytest.mark.matrix),
    ],
    ids=["before the ranks are connected", "later"],
)
def test_torchrun_tells_a_refusal_once(script, refused, says):
    done = script(*TORCHRUN, IN_TURN="1", **refused)
    assert done.returncode == 1
    own = done.stderr[: done.stderr.index("torch/distributed/elastic")]
    assert (own.count("Traceback"), own.count("  File ")) == (1, 2), own
    assert own.count(f"lightning_seqpar: rank 1 raised {says[0]}: ") == 1
    assert own.count(says[1]) == 2


@pytest.mark.matrix
def test_a_rank_that_nobody_meets(script):
    ((code, told),) = run_all(slurm(*MODULE, SEQPAR_TAG=script.tag, TIMEOUT="4")[:1])
    assert code != 0
    assert re.search(r"RuntimeError: rank 0 of 2 did not meet the others at 127.0.0.1:\d+ within timeout=4 s", told), told
    assert "with the same MASTER_ADDR and MASTER_PORT, devices and num_nodes" in told


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        pytest.param("raise:1", "lightning_seqpar: rank 1 raised ValueError: on purpose", marks=pytest.mark.matrix),
        ("KILL:1", "rank 0 lost another rank, which ended first"),
    ],
)
@pytest.mark.more
def test_slurm_with_a_rank_that_dies(script, bad, says):
    results = run_all(slurm(*MODULE, SEQPAR_TAG=script.tag, BAD=bad))
    assert all(code != 0 for code, _ in results), results
    assert any(says in told for _, told in results), results


def read_until(proc, word: str) -> str:
    told = ""
    for line in proc.stdout:
        told += line
        if word in line:
            break
    return told


@sees(
    "SIGTERM not heard in a collective",
    "ChildWatch.take",
    "            signal.set_wakeup_fd(present)\n",
    "            signal.set_wakeup_fd(present)\n        signal.set_wakeup_fd(-1)\n",
)
@pytest.mark.matrix
def test_sigterm_while_the_main_process_waits_for_a_hanging_rank(script):
    """Its main thread sits in a collective, where no Python handler runs."""
    proc = start((PYTHON, *MODULE), env={"SEQPAR_TAG": script.tag, "BAD": "hang:1", "TIMEOUT": "300"})
    told = read_until(proc, "HANGING")
    proc.send_signal(signal.SIGTERM)
    told += proc.communicate(timeout=100)[0]
    assert proc.returncode == 128 + signal.SIGTERM, told
    assert "the run failed: rank 0 got SIGTERM" in told


@sees("SIGTERM not heard while a model is set up", "SeqParallelLauncher.launch", "        self.take_signals({})\n", "")
@sees(
    "a later training does not know the ranks that were started",
    "SeqParallelLauncher.launch",
    "self.watch = ChildWatch.of_this_process",
    "pass",
)
@pytest.mark.more
def test_sigterm_while_the_model_is_set_up(script):
    """The second one in a process whose first training started the ranks."""
    env = {"SEQPAR_TAG": script.tag, "BAD": "pause:0", "PLACE": "setup", "TIMEOUT": "300", "TRAININGS": "2", "STEPS": "1"}
    proc = start((PYTHON, *MODULE), env=env)
    told = read_until(proc, "HANGING")
    proc.send_signal(signal.SIGTERM)
    told += proc.communicate(timeout=100)[0]
    assert proc.returncode == 128 + signal.SIGTERM, told
    assert told.rstrip().endswith("lightning_seqpar: the run failed: rank 0 got SIGTERM"), told


@pytest.mark.parametrize("hangs", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_ctrl_c(script, hangs):
    """The terminal sends SIGINT to every process of the run."""
    env = {"SEQPAR_TAG": script.tag, "BAD": "hang:1" if hangs else "pause:1", "TIMEOUT": "300"}
    proc = start((PYTHON, *MODULE), env=env, start_new_session=True)
    told = read_until(proc, "HANGING")
    os.killpg(proc.pid, signal.SIGINT)
    told += proc.communicate(timeout=100)[0]
    assert proc.returncode != 0, told
    assert told.rstrip().endswith("lightning_seqpar: the run was interrupted"), told[-1500:]
