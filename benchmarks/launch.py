"""One way, trained in processes of its own, started with torchrun; what was measured can be kept, so that a long run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from memory import of_machine

HERE = Path(__file__).resolve().parent
GIB = 2**30
SPARE = 1.5 * GIB
"""Bytes that the ranks leave to the machine and to the process that starts them."""
LIMIT = 1800
"""Seconds after which a launch is ended."""


NO_MEMORY = ("allocate memory", "MemoryError", "bad_alloc", "Signal 9 (SIGKILL)")
"""What is said, by torch, Python, the C++ library or torchrun, when memory is spent."""


class FailedRunError(RuntimeError):
    """A way that could not be trained; the message says why, in a line."""


class Launcher:
    """Trains ways in turn, and remembers what they measured.

    Args:
        folder: where the launches that are done are remembered. The n-th launch of a task is
            answered with the n-th of that task that did not fail, if there are so many.
    """

    def __init__(self, folder: Path) -> None:
        self._journal = folder / "launches.jsonl"
        self._done: dict[str, list[dict[str, Any]]] = {}
        if self._journal.exists():
            for line in self._journal.read_text().splitlines():
                task, answer = json.loads(line)
                if "error" not in answer:  # what failed may run now
                    self._done.setdefault(task, []).append(answer)
        self._asked: Counter[str] = Counter()

    def __call__(self, ranks: int, *, note: str = "", **task: Any) -> dict[str, Any]:
        """Train one way on so many ranks.

        Args:
            ranks: processes.
            note: tells launches of one task apart.
            task: the arguments of ``child.run``.

        Returns:
            What rank 0 measured; with ``startup``, of each figure the largest of any rank.

        Raises:
            FailedRunError: if it does not run, or needs more memory than the machine has for each rank.
        """
        key = json.dumps([ranks, note, task], sort_keys=True)
        at, self._asked[key] = self._asked[key], self._asked[key] + 1
        if at < len(self._done.get(key, ())):
            answer = self._done[key][at]
        else:
            begin = time.monotonic()
            answer = _run(ranks, task)
            with self._journal.open("a") as file:
                file.write(json.dumps([key, answer]) + "\n")
            shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in answer.items())
            took = time.monotonic() - begin
            print(f"{time.strftime('%H:%M:%S')} {ranks} × {note} {task}: {shown} [{took:.0f} s]", file=sys.stderr, flush=True)
        if "error" in answer:
            raise FailedRunError(answer["error"])
        return answer


def _run(ranks: int, task: dict[str, Any]) -> dict[str, Any]:
    room = int((of_machine("MemAvailable") - SPARE) / ranks)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        # Memory that is given back shows at once, at any size.
        calm = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"} if task.get("memory") else {}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **calm}
        # A session of its own, so that ranks end with the process that started them.
        process = subprocess.Popen(
            [*command, str(HERE / "child.py"), json.dumps({"room": room, **task}), folder],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            said = process.communicate(timeout=LIMIT)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {"error": f"not done after {LIMIT // 60} minutes"}
        told: list[dict[str, Any]] = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
    errors = [one["error"] for one in told if "error" in one]
    # Ranks that lose a peer fail too: one that had no memory, or was ended by the kernel for it, is the cause.
    if any(word in error for error in (*errors, said) for word in NO_MEMORY):
        return {"error": f"does not fit: needs more than {room / GIB:.1f} GiB on a rank"}
    if errors:
        return {"error": errors[0]}
    if process.returncode or len(told) != ranks:
        lines = [line.strip() for line in said.splitlines() if "Error" in line]
        return {"error": f"a rank ended without a word; {(lines or ['nobody said why'])[0][:300]}"}
    if task.get("startup"):
        return {name: max(one[name] for one in told) for name in told[0]}
    return told[0]
