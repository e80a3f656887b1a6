"""A training loop of the user's own, by Fabric, against one process of plain Fabric."""

from __future__ import annotations

import re

import pytest

from lightning_seqpar.parity import compare
from lightning_seqpar.testing import run_alone, run_distributed
from tests.helpers.fabric_loops import LOOPS, goes_on, goes_on_from_each, told, trained
from tests.mutants import sees

TOPOLOGIES = {
    "tp2": (2, {"tp": 2}),
    "dp2-tp2": (4, {"tp": 2}),
    "tp2-fsdp": (4, {"tp": 2, "data_parallel": "fsdp"}),
    "tp4": (4, {"tp": 4}),
    "cp2": (2, {"cp": 2}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "ddp": (2, {}),
    "recomputed": (2, {"tp": 2, "recompute": "full"}),
    "chunks": (2, {"tp": 2, "loss_chunk": 8, "recompute": "activations"}),
    "whole sequences": (2, {"tp": 2, "sp": False, "vocab": False}),
}


@pytest.fixture(scope="module")
def alone():
    return run_alone(trained, None, 1)


@pytest.fixture(scope="module")
def start(request):
    world, fields = TOPOLOGIES[request.param]
    return run_distributed(trained, world, fields, world, timeout=200)


@sees(
    "Fabric clips by the norm of this rank's part",
    "SeqParallelFabricStrategy.clip_gradients_norm",
    "self.steps.global_norm(parameters, float(norm_type))",
    "torch.nn.utils.get_total_norm([p.grad for p in parameters])",
    case="steps-tp2",
)
@sees(
    "replicas are averaged before the last micro-batch alone, by no_backward_sync",
    "SeqParallelFabricStrategy.backward",
    "grad_sync = not self._holds_back",
    "grad_sync = self._holds_back",
    case="puts off-dp2-tp2",
)
@sees(
    "a second call with gradients forgets what the first one's backward needs",
    "SeqParallelFabricStrategy.call",
    "if not self._in_step and trains:",
    "if trains:",
    case="calls twice-recomputed",
)
@sees(
    "the step of a LightningModule is proved as a call of its forward",
    "SeqParallelFabricStrategy._set_up",
    'nonlocals["method_name"]',
    'nonlocals["method_name"][:0] or "forward"',
    case="training steps-tp2",
)
@sees(
    "what a model returns by name is taken for what a step returns beside its loss, and gives no gradients",
    "Steps.run_step",
    "isinstance(out, dict) and self._env.has_trainer",
    "isinstance(out, dict)",
    case="reads names-tp2",
)
@sees(
    "Fabric's sums are over all ranks of a replica",
    "SeqParallelFabricStrategy.all_reduce",
    "None if group is dist.group.WORLD else group",
    "group",
    case="reads names-tp2",
)
@sees(
    "a step ends with its first backward, though a call of it has its own later",
    "SeqParallelFabricStrategy.backward",
    "self._in_step = self._calls > 1",
    "self._in_step = False",
    case="interleaves-tp2",
)
@pytest.mark.parametrize("start", TOPOLOGIES, indirect=True)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_what_one_process_trains(start, alone, loop):
    for rank in start:
        assert not isinstance(rank[loop], str), rank[loop]
        compare(alone[loop], rank[loop]).raise_if_failed()


KINDS = {"one.ckpt": None, "file.ckpt": "single", "folder": "sharded"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints behind the second batch, of one process and of two ranks; what one process does from there."""
    folder = tmp_path_factory.mktemp("written")
    for name, form in KINDS.items():
        if form is None:
            run_alone(goes_on, None, 1, folder / name)
        else:
            run_distributed(goes_on, 2, {"tp": 2, "checkpoint": {"format": form}}, 2, folder / name)
    return folder, run_alone(goes_on, None, 1, folder / "one.ckpt")[0]


PLACES = {
    "early": (2, {"tp": 2}, False),
    "late": (2, {"tp": 2}, True),
    "late-fsdp": (4, {"tp": 2, "data_parallel": "fsdp"}, True),
    "early-fsdp": (2, {"data_parallel": "fsdp"}, False),
    "early-cp": (2, {"cp": 2}, False),
}


@sees(
    "moments that were loaded before the first call stay those of the whole model",
    "SeqParallelFabricStrategy._set_up",
    "self._saver.load_optimizer(optimizer, state)",
    "optimizer.load_state_dict(state)",
    case="early",
)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_goes_on_from_a_checkpoint_of_any_other(written, place):
    folder, right = written
    world, fields, late = PLACES[place]
    for found in run_distributed(goes_on_from_each, world, fields, world, [folder / name for name in KINDS], late=late):
        for trace, left in found:
            compare(right, trace).raise_if_failed()
            assert left == (4, [0, 1, 2])


def test_plain_fabric_goes_on_from_a_file(written):
    folder, right = written
    compare(right, run_alone(goes_on, None, 1, folder / "file.ckpt")[0]).raise_if_failed()


TOLD = {
    "stages": r"pp=2: a loop of your own can't be run in stages; use the Trainer",
    "in the background": r"async_save",
    "unknown": r"recompte",
    "two models": r"ByteGPT is set up already, and a strategy trains one model",
    "on meta": r"fabric\.init_module\(empty_init=True\)",
    "other batches": r"the ranks of one replica read different training batches .*strategy\.dp_rank",
    "plain backward": r"call `fabric\.backward\(loss\)`",
    "plain clipping": r"differ across tp .* clipped by torch\.nn\.utils\.clip_grad_norm_.*fabric\.clip_gradients",
    "a copy": r"a copy of ByteGPT behind fabric\.setup would train with it; copy it before",
    "no model": r"param_groups",
    "a strange optimizer beside fsdp": r"AdamW would update it by an object from before the .*fabric\.setup_optimizers",
    "not finite": r"the gradient's norm of order 2.0 is (inf|nan)",
}


@sees(
    "gradients that a user's own clipping scaled by rank go into the update",
    "_LoopOfTheUsers",
    "has_trainer = automatic = is_apart = False",
    "automatic, has_trainer, is_apart = True, False, False",
    case="plain clipping",
)
@pytest.mark.core
@pytest.mark.parametrize("what", TOLD)
def test_what_cannot_be_right_is_told_on_every_rank(what):
    for said in run_distributed(told, 2, what, 2):
        assert re.search(TOLD[what], said), said
