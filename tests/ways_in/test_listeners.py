"""What listens during a run, seen from outside: nothing that another machine could reach where all ranks are on this one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import PYTHON, TORCHRUN, run

pytestmark = [pytest.mark.launch, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
SCRIPT = """
import os
from pathlib import Path
from lightning.pytorch.callbacks import Callback
from tests.helpers import models
from tests.helpers.fit import quiet_trainer

LISTENS = "0A"


class Tells(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        held = {os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.exists() or one.is_symlink()}
        rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/self/net", name).read_text().splitlines()[1:]]
        found = sorted(row[1].split(":")[0] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in held)
        os.write(1, f"RANK {trainer.global_rank} {' '.join(found)} AT {os.environ.get('GLOO_SOCKET_IFNAME')}\\n".encode())


if __name__ == "__main__":
    trainer = quiet_trainer(devices=2, strategy="seqpar_tp2", max_steps=1, callbacks=[Tells()])
    trainer.fit(models.GPT(), models.loader(4))
"""
LOOPBACK = "0100007F"  # 127.0.0.1, as /proc/net/tcp has it


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((PYTHON,), id="python", marks=pytest.mark.matrix),
        pytest.param((*TORCHRUN, "--nproc-per-node", "2"), id="torchrun"),
    ],
)
@pytest.mark.more
def test_ranks_of_one_node_listen_to_themselves(command, tmp_path):
    script = Path(tmp_path, "script.py")
    script.write_text(SCRIPT)
    code, told = run(*command, str(script))
    assert code == 0, told
    found = dict(re.findall(r"RANK (\d) ([0-9A-F ]+) AT lo\n", told))
    assert found.keys() == {"0", "1"}, told
    assert {address for row in found.values() for address in row.split()} == {LOOPBACK}
