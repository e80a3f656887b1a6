"""A strategy that is not set up yet answers as one process does; and small rules of what it saves and tells."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.checkpoint.atomic_files import NoCheckpointError
from lightning_seqpar.checkpoint.state_dict import full_optimizer_state, load_full_optimizer_state, optimizer_parts
from lightning_seqpar.inference.examples import _step_args
from lightning_seqpar.layout.param_layout import ModelLayout
from lightning_seqpar.strategy.saving import WholeFileIO
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.guards.while_training import refuse_overlaps
from lightning_seqpar.verify.parity import RUNS, compare_losses
from tests.helpers import models
from tests.helpers.fit import quiet_trainer
from tests.mutants import sees


class Loading(models.GPT):
    def train_dataloader(self) -> Any:
        return models.loader(4, count=32)


def connected(**fields: Any) -> tuple[Any, Any]:
    """A trainer of four devices that knows its model, as Lightning's own tests have it."""
    trainer, module = quiet_trainer(devices=4, strategy=SeqParallelStrategy(**fields), max_epochs=3), Loading()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    return trainer, module


@sees(
    "a refusal before the start is told as a module without a trainer",
    "SeqParallelStrategy.on_exception",
    "            env = self.environment  #",
    "            env = self.environment\n            env.trainer  #",
)
def test_an_error_before_the_ranks_start_keeps_its_sentence(monkeypatch):
    def fail(*args: Any, **options: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("subprocess.Popen", fail)
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2), max_steps=1)
    with pytest.raises(OSError, match="no more processes"):
        trainer.fit(models.GPT(), models.loader(4))


@pytest.mark.parametrize("form", ["single", "sharded"])
def test_a_checkpoint_is_one_processes(tmp_path, form):
    trainer, module = connected(tp=2, checkpoint={"format": form})
    trainer.save_checkpoint(tmp_path / "before.ckpt")
    state = trainer.strategy.load_checkpoint(tmp_path / "before.ckpt")["state_dict"]
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())


def test_collectives_give_this_processes_own():
    strategy = connected(tp=2)[0].strategy
    one = torch.ones(2)
    assert strategy.reduce(one, reduce_op="sum") is one
    assert strategy.all_gather(one) is one
    assert not strategy.reduce_boolean_decision(False, all=False)
    assert strategy.broadcast(5, src=1) == 5
    with pytest.raises(
        RuntimeError, match="made in setup_environment"
    ):  # not 0 on every rank, by which data would be dealt out
        _ = strategy.dp_rank


@sees("habits: an exception stays ours", "SeqParallelStrategy.on_exception", "super().on_exception(exception)", "pass")
def test_an_exception_is_told_to_lightnings_strategy_too(monkeypatch):
    told = []
    monkeypatch.setattr(Strategy, "on_exception", lambda self, exception: told.append(exception))
    error = KeyError("x")
    strategy = SeqParallelStrategy()
    strategy.connect(Loading())
    strategy.on_exception(error)
    assert told == [error]


@sees(
    "habits: a missing checkpoint is no missing file",
    "NoCheckpointError",
    "class NoCheckpointError(FileNotFoundError, ValueError):",
    "class NoCheckpointError(ValueError):",
)
def test_a_missing_checkpoint_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such checkpoint") as caught:
        WholeFileIO().load_checkpoint(tmp_path / "nothing.ckpt")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NoCheckpointError)


@sees("habits: a layout of its own is cut", "_refuse_own_layout", "if layout is not None and state:", "if False:")
def test_a_layout_of_its_own_is_refused_where_parameters_are_sharded():
    groups = ParallelGroups.fake(ProcessTopology(["dp", "tp"], [1, 2]), 0)
    layer = nn.Linear(2, 2)
    layout = ModelLayout(layer, {})
    optimizer: Any = SimpleNamespace(param_groups=[{"params": [layer.weight]}], state_dict=lambda: {"slow": [torch.ones(2)]})
    for ask in (
        lambda: full_optimizer_state(optimizer, layout, groups, torch.device("cpu")),
        lambda: optimizer_parts(optimizer, layout, groups),
        lambda: load_full_optimizer_state(optimizer, {"slow": []}, layout, groups),
    ):
        with pytest.raises(ValueError, match=r"its state dict holds slow in a layout of its own.*use the optimizer with tp=1"):
            ask()


class Steps:
    def named(self, batch, batch_idx): ...
    def alone(self, batch): ...
    def any(self, *args, **kwargs): ...
    def other(self, batch, number): ...
    def defaults(self, batch, batch_idx, dataloader_idx=0): ...


@sees("habits: steps are not told of several loaders", "_step_args", "((0,) if several else ())", "()")
@pytest.mark.parametrize(
    ("step", "one", "several"),
    [
        ("named", (5, 0), (5, 0, 0)),
        ("alone", (5,), (5, 0)),
        ("any", (5, 0), (5, 0, 0)),
        ("other", (5, 0), (5, 0, 0)),
        ("defaults", (5, 0), (5, 0, 0)),
    ],
)
def test_steps_are_given_what_lightning_gives_them(step, one, several):
    method = getattr(Steps(), step)
    assert _step_args(method, 5, False) == one
    assert _step_args(method, 5, True) == several


def test_pickled_groups_answer_ranks_and_sizes():
    groups = ParallelGroups.silent(ProcessTopology(["dp", "tp"], [2, 2]), 3)
    again = pickle.loads(pickle.dumps(OrderedDict(groups=groups)))["groups"]
    assert (again.rank("dp"), again.size("tp"), again.ranks("tp")) == (1, 2, [2, 3])
    with pytest.raises(RuntimeError, match="fake groups have no process group"):
        again["tp"]


@sees(
    "a strategy that compiles nothing imports torch's backends",
    "check_compile_options",
    'if "backend" in options and backend not in',
    "if backend not in",
)
def test_a_strategy_that_compiles_nothing_imports_no_compiler(monkeypatch):
    """torch's list of backends imports them all, which took a second of the start of every process."""

    def list_backends(**_):
        raise AssertionError("torch's backends were imported")

    monkeypatch.setattr(torch.compiler, "list_backends", list_backends)
    SeqParallelStrategy(tp=2)
    SeqParallelStrategy(tp=2, compile=True)
    with pytest.raises(AssertionError, match="backends were imported"):
        SeqParallelStrategy(tp=2, compile=True, compile_options={"backend": "inductor"})


@sees("two parameters in one memory are cut apart", "refuse_overlaps", "            if start < stop:", "            if False:")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_parameters_in_one_memory_are_refused(device):
    model, flat = nn.Module(), torch.zeros(6, device=device)
    model.a, model.b = nn.Parameter(flat[:3]), nn.Parameter(flat[3:])
    refuse_overlaps(model)  # side by side
    model.c = nn.Parameter(model.b.data)
    with pytest.raises(ValueError, match="b and c are two parameters in one memory"):
        refuse_overlaps(model)


@sees("an infinite loss is equal to any", "compare_losses", "gap if math.isinf(gap) else gap / size", "gap / size")
def test_a_loss_that_is_infinite_is_no_other_one():
    assert not compare_losses("loss", [1.0, float("inf")], [1.0, 5.0], RUNS[False]).ok
