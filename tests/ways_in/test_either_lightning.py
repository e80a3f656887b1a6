"""The strategy under Lightning's other name, where the first cannot be imported; and where the two are mixed."""

from __future__ import annotations

import re
import sys

import pytest

from lightning_seqpar import ParallelConfig, SeqParallelStrategy, describe
from lightning_seqpar.fabric import SeqParallelFabricStrategy
from lightning_seqpar.releases import used_package
from lightning_seqpar.verify.training import build
from tests.helpers.processes import PYTHON, ROOT, run
from tests.mutants import sees

PROGRAM = (PYTHON, str(ROOT / "tests" / "helpers" / "either_lightning.py"), "pytorch_lightning")
CLI = ("fit", "--trainer.devices=2", "--trainer.strategy=lightning_seqpar.SeqParallelStrategy", "--trainer.strategy.tp=2")

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def other():
    """The package that these tests do not use, imported once the first is, and forgotten behind them."""
    import pytorch_lightning

    yield pytorch_lightning
    for name in [each for each in sys.modules if each.partition(".")[0] in ("pytorch_lightning", "lightning_fabric")]:
        del sys.modules[name]


def losses(*arguments: str) -> list[float]:
    code, told = run(*PROGRAM, *arguments)
    assert code == 0, told
    if arguments[1] not in ("plain", "cli"):
        assert "packages pytorch_lightning\n" in told, told
    return [float(each) for each in re.findall(r"^loss (\S+)$", told, re.MULTILINE)]


@pytest.fixture(scope="module")
def alone():
    found = losses("1", "plain")
    assert len(found) == 3
    return found


@pytest.mark.parametrize("how", ["object", "registry", "cli"])
def test_two_ranks_train_to_the_losses_of_one_process_of_pytorch_lightning(alone, how):
    assert losses("2", how, *(CLI if how == "cli" else ())) == pytest.approx(alone, rel=0, abs=1e-9)


@sees(
    "a program that uses pytorch_lightning gets a strategy of lightning's, which is installed too",
    "releases:used_package",
    "[name for name in packages if name in _NAMES] or",
    "",
)
def test_the_package_that_a_program_imported_first_is_used():
    both = ["lightning", "pytorch_lightning"]
    assert used_package([], both) == "lightning"
    assert used_package([], ["pytorch_lightning"]) == "pytorch_lightning"
    assert used_package(["torch", "pytorch_lightning", "lightning"], both) == "pytorch_lightning"
    assert used_package(["torch", "lightning_fabric"], both) == "pytorch_lightning"
    assert used_package(["lightning"], both, "pytorch_lightning") == "pytorch_lightning"
    with pytest.raises(ImportError, match=r"pip install lightning$"):
        used_package(["torch"], [])
    with pytest.raises(ValueError, match=r"^SEQPAR_LIGHTNING='lighning': it must be one of lightning, pytorch_lightning$"):
        used_package([], both, "lighning")


def test_a_strategy_of_one_package_in_a_trainer_of_the_other_is_one_sentence(other):
    says = r"of lightning\.pytorch \(for pytorch_lightning import that before lightning_seqpar\)`.* `pytorch_lightning\."
    with pytest.raises(ValueError, match=says):
        other.Trainer(strategy=SeqParallelStrategy(tp=2), devices=2, accelerator="cpu")
    with pytest.raises(ValueError, match=says.replace(r"`.* `pytorch_lightning\.", "")):
        sys.modules["lightning_fabric"].Fabric(strategy=SeqParallelFabricStrategy(tp=2), devices=2, accelerator="cpu")


@pytest.mark.parametrize("use", [lambda model: describe(model, ParallelConfig(tp=2)), lambda model: build(lambda: model, None)])
@sees(
    "a module of Lightning's other package is taken for one without a training step",
    "releases:check_package",
    "raise ValueError(",
    "str(",
)
def test_a_module_of_the_other_package_is_refused(other, use):
    model = type("Model", (other.LightningModule,), {})()
    with pytest.raises(ValueError, match=r"^Model is a LightningModule of pytorch_lightning, .* SEQPAR_LIGHTNING=\w+$"):
        use(model)
