"""Every way to start a run, with real processes: command lines, Hydra, torchrun, SLURM, registry names, notebooks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_seqpar import SeqParallelStrategy
from tests.helpers.fit import fit, quiet_trainer
from tests.helpers.processes import PYTHON, ROOT, TORCHRUN, free_port, run, run_all, slurm
from tests.mutants import sees

SCRIPT = """
import os, warnings
from pathlib import Path
import torch
from lightning.pytorch.callbacks import Callback
from tests.helpers import models
from tests.helpers.fit import quiet_trainer
from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.parity import ParityRecorder

class Listens(Callback):
    # Tells at which addresses this process listens, as /proc/net/tcp has them.
    def on_train_end(self, trainer, module):
        held = {os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}
        rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/self/net", name).read_text().splitlines()[1:]]
        found = sorted(row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held)
        os.write(1, f"LISTENS {' '.join(found)} AT {os.environ.get('GLOO_SOCKET_IFNAME')}\\n".encode())


if __name__ == "__main__":
    torch.manual_seed(0)
    tp, devices, nodes = (int(os.environ.get(name, "1")) for name in ("TP", "DEVICES", "NODES"))
    recorder = ParityRecorder()
    trainer = quiet_trainer(
        devices=devices, num_nodes=nodes, max_steps=2, callbacks=[recorder, Listens()],
        strategy=SeqParallelStrategy(tp=tp, timeout=60),
    )
    warnings.simplefilter("default")
    trainer.fit(models.GPT(), models.loader(8 * tp // (devices * nodes), count=16))
    # In one piece: the ranks share the output.
    os.write(1, f"RANK {trainer.global_rank} REPLICA {trainer.strategy.dp_rank}\\n".encode())
    if trainer.is_global_zero:
        os.write(1, f"LOSSES {' '.join(float(loss).hex() for loss in recorder.trace.losses)}\\n".encode())
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("ways") / "script.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture(scope="module")
def losses() -> list[float]:
    """Of one process."""
    return [float(loss) for loss in fit("GPT", {}, steps=2).losses]


def check(results: list[tuple[int, str]], losses: list[float], ranks: dict[int, int]) -> str:
    """All ended well, every rank was in its replica, and the losses are one process's."""
    told = "\n".join(output for _, output in results)
    assert [code for code, _ in results] == [0] * len(results), told[-4000:]
    assert {int(r): int(d) for r, d in re.findall(r"RANK (\d+) REPLICA (\d+)", told)} == ranks
    found = re.search(r"LOSSES (.*)", told)
    assert found
    ours = [float.fromhex(one) for one in found.group(1).split()]
    assert len(ours) == len(losses) == 2
    for mine, theirs in zip(ours, losses, strict=True):
        assert abs(mine - theirs) <= 1e-9 * abs(theirs)
    return told


@pytest.mark.launch
@pytest.mark.parametrize(
    "command",
    [
        pytest.param((PYTHON,), id="python", marks=pytest.mark.matrix),
        pytest.param((*TORCHRUN, "--standalone", "--nproc-per-node", "2"), id="torchrun"),
    ],
)
@pytest.mark.more
def test_ranks_of_one_node_train_as_one_process_and_listen_to_themselves(script, losses, command):
    told = check([run(*command, str(script), TP="2", DEVICES="2")], losses, {0: 0, 1: 0})
    assert "node of" not in told
    listens = re.findall(r"LISTENS ([0-9A-F ]+) AT lo\n", told)
    assert len(listens) == 2
    assert {address for one in listens for address in one.split()} == {"0100007F"}, "127.0.0.1"


@pytest.mark.launch
@pytest.mark.more
def test_torchrun_as_two_nodes_with_tp_inside_the_node(script, losses):
    port = str(free_port())
    fixed = ("--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    env = {"TP": "2", "DEVICES": "2", "NODES": "2"}
    nodes = [((*TORCHRUN, *fixed, "--node-rank", str(node), str(script)), env) for node in range(2)]
    told = check(run_all(nodes), losses, {0: 0, 1: 0, 2: 1, 3: 1})
    assert "sit on more than one node" not in told


@pytest.mark.launch
@pytest.mark.matrix
def test_slurm(script, losses):
    check(run_all(slurm(str(script), TP="2", DEVICES="2")), losses, {0: 0, 1: 0})


@pytest.mark.matrix
@pytest.mark.launch
def test_tensor_parallel_ranks_on_two_nodes_are_warned_of_once(script, losses):
    told = check(run_all(slurm(str(script), nodes=2, TP="2", NODES="2")), losses, {0: 0, 1: 0})
    assert told.count("tensor-parallel ranks [0, 1] sit on more than one node of 1 rank (1 such group)") == 1


# ---- command lines ---------------------------------------------------------------------------------------------


@pytest.mark.launch
def test_the_command_line_with_a_config_and_overrides(tmp_path):
    config = str(ROOT / "conf" / "cli.yaml")
    overrides = ("--trainer.max_steps=2", "--trainer.strategy.sp=false")
    code, told = run(
        *(PYTHON, "-m", "lightning_seqpar", "fit", "-c", config, *overrides), cwd=tmp_path, PYTHONPATH=str(ROOT)
    )  # fmt: skip
    assert code == 0, told[-3000:]
    assert told.count("2 ranks on 1 node, tp 2") == 1, "the summary belongs to rank 0 alone"
    assert re.search(r"off: sp, ddp \(one replica\)", told)
    assert "`max_steps=2` reached" in told
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["runs/cli/config.yaml"]


@pytest.mark.launch
@pytest.mark.matrix
def test_hydra_leaves_one_folder(tmp_path):
    arguments = ("strategy.tp=2", "trainer.max_steps=2", "strategy.plan={base: auto, rules: []}")
    script = str(ROOT / "examples" / "train_hydra.py")
    code, told = run(PYTHON, script, *arguments, cwd=tmp_path)
    assert code == 0, told[-3000:]
    assert "steps 2, loss" in told
    folders = list((tmp_path / "runs" / "hydra").iterdir())
    assert len(folders) == 1
    assert sorted(path.name for path in (folders[0] / ".hydra").iterdir()) == ["config.yaml", "hydra.yaml", "overrides.yaml"]
    assert list((tmp_path / "runs").iterdir()) == [tmp_path / "runs" / "hydra"]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@sees(
    "a sweep starts ranks",
    "SeqParallelStrategy._configure_launcher",
    "                guards.refuse_sweep(self.num_nodes * self.num_processes)\n",
    "                pass\n",
)
@pytest.mark.launch
@pytest.mark.matrix
def test_hydra_sweeps_over_single_processes_alone(tmp_path):
    script = str(ROOT / "examples" / "train_hydra.py")
    code, told = run(PYTHON, script, "-m", "strategy.sp=true,false", "trainer.max_steps=1", cwd=tmp_path)
    assert code == 1
    assert "a hydra multirun (-m) with devices=2: the jobs of a sweep share one main process" in told
    assert "Initializing distributed" not in told
    code, told = run(PYTHON, script, "-m", "strategy.tp=1", "trainer.devices=1", "trainer.max_steps=1,2", cwd=tmp_path)
    assert code == 0, told[-3000:]
    assert "steps 1, loss" in told
    assert "steps 2, loss" in told


@pytest.mark.launch
@pytest.mark.matrix
def test_torchrun_with_hydra_and_an_experiment(tmp_path):
    script = str(ROOT / "examples" / "train_hydra.py")
    command = (*TORCHRUN, "--standalone", "--nproc-per-node", "4", script, "+experiment=replicas", "trainer.max_steps=2")
    code, told = run(*command, "hydra.run.dir=runs/hydra/mine", cwd=tmp_path)
    assert code == 0, told[-3000:]
    assert "4 ranks on 1 node, dp 2 × tp 2" in told
    assert [path.name for path in (tmp_path / "runs" / "hydra").iterdir()] == ["mine"]


# ---- without processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tp"), [("seqpar", 1), ("seqpar_tp2", 2), ("seqpar_tp4", 4), ("seqpar_tp64", 64)])
def test_registry_names(name, tp):
    trainer = quiet_trainer(devices=max(2, tp), strategy=name)
    assert isinstance(trainer.strategy, SeqParallelStrategy)
    assert trainer.strategy.config.tp == tp


NOTEBOOK = """
import sys
sys.ps1 = ">>> "  # what an interactive prompt sets
import torch
from tests.helpers import models
from tests.helpers.fit import quiet_trainer
from lightning_seqpar import SeqParallelStrategy
quiet_trainer(devices=1, max_steps=1, strategy=SeqParallelStrategy()).fit(models.GPT(), models.loader(4, count=4))
print("one process ran")
quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2))
"""


NO_FILE = "ValueError: devices=2 in a notebook, at an interactive prompt or in python -c: the other ranks are started"


def test_code_without_a_file_is_refused():
    code = (
        "import lightning_seqpar; from tests.helpers.fit import quiet_trainer; quiet_trainer(devices=2, strategy='seqpar_tp2')"
    )
    for command in ((PYTHON, "-c", code), ("sh", "-c", f'echo "{code}" | {PYTHON} -')):
        ended, told = run(*command)
        assert ended == 1
        assert NO_FILE in told


@pytest.mark.launch
def test_a_notebook_is_refused_with_a_sentence():
    code, told = run(PYTHON, "-c", NOTEBOOK)
    assert code == 1
    assert "one process ran" in told
    assert NO_FILE in told
    assert "with devices=1 (tp=1) it runs here" in told


# ---- Hugging Face ----------------------------------------------------------------------------------------------


@pytest.mark.launch
@pytest.mark.more
def test_the_hugging_face_example_learns_and_goes_on_from_its_folder(tmp_path):
    """A tokenizer trained here, a Llama without memory, two processes; then the folder that it left is the start."""
    script = str(ROOT / "examples" / "finetune_hf.py")
    found = []
    for more in (["--trainer.max_steps=24"], ["--trainer.max_steps=4", "--model.folder=runs/finetune/model"]):
        code, output = run(PYTHON, script, *more, cwd=tmp_path)
        assert code == 0, output[-4000:]
        told = re.search(r"loss, mean of \d+ steps: ([\d.]+) at first, ([\d.]+) at the end", output)
        assert told, output[-4000:]
        found.append([float(one) for one in told.groups()])
    assert found[0][1] < found[0][0] - 0.5
    assert found[1][0] < found[0][1] + 0.3  # not from the beginning
    assert "family llama, vocabulary: 30 of 30 tensors that could be are sharded (100 % of their parameters)" in output
    assert "vocabulary: sharded: model.model.embed_tokens, model.lm_head (512 rows, 256 on a rank)" in output
