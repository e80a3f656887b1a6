"""Real processes, started as a user would, and looked after."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
TORCHRUN = (PYTHON, "-m", "torch.distributed.run")
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what launchers set, and with ``more``."""
    kept = {k: v for k, v in os.environ.items() if k not in _OF_LAUNCHERS and not k.startswith(("SLURM_", "TORCHELASTIC"))}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def hear_sigint() -> None:
    """In a process that is about to start: a shell starts background jobs with Ctrl-C ignored, and this may be one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(
    command: Sequence[str], cwd: Path = ROOT, env: Mapping[str, str] | None = None, start_new_session: bool = False
) -> subprocess.Popen[str]:
    """Start ``command`` with its output kept."""
    return subprocess.Popen(
        list(command),
        cwd=cwd,
        env=environment(**(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=start_new_session,
        preexec_fn=hear_sigint,
    )


def run_all(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], timeout: float = 100) -> list[tuple[int, str]]:
    """Start all commands at once; exit code and output of each."""
    procs = [start(command, env=env) for command, env in commands]
    try:
        outputs = [proc.communicate(timeout=timeout)[0] for proc in procs]
    finally:
        for proc in procs:
            proc.kill()
            proc.wait()
    return [(proc.returncode, output) for proc, output in zip(procs, outputs, strict=True)]


def run(*command: str, cwd: Path = ROOT, timeout: float = 100, **env: str) -> tuple[int, str]:
    """Run ``command``; its exit code, and what it printed on both streams."""
    done = subprocess.run(
        list(command), cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=timeout, check=False
    )
    return done.returncode, done.stdout + done.stderr


def slurm(*script: str, nodes: int = 1, **env: str) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """Two tasks of a script, on one node or on two, with the variables that srun gives them."""
    common = {
        "SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS_PER_NODE": str(2 // nodes), "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port()), **env,
    }  # fmt: skip
    places = [(str(rank), "0") if nodes == 1 else ("0", str(rank)) for rank in range(2)]
    return [
        ((PYTHON, *script), {**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": local, "SLURM_NODEID": node})
        for rank, (local, node) in enumerate(places)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def survivors(tag: str) -> list[int]:
    """Processes that carry ``SEQPAR_TAG=tag`` in their environment and still live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if f"SEQPAR_TAG={tag}".encode() in (folder / "environ").read_bytes() and state != "Z":
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def memory(what: str) -> int:
    """Bytes that this process has (``VmRSS``; of files ``RssFile``) or had at most (``VmHWM``)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) * 1024


class Peak:
    """By how many MiB this process grew at most, without the pages of files."""

    def __enter__(self) -> Peak:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        self.start = memory("VmRSS") - memory("RssFile")
        return self

    def __exit__(self, *args: object) -> None:
        self.grown = (memory("VmHWM") - memory("RssFile") - self.start) / 2**20
