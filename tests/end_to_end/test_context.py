"""Context parallelism: unmodified models on parts of sequences, equal to one process in losses, gradients and weights."""

from __future__ import annotations

import functools
from collections import ChainMap
from typing import Any, NamedTuple

import pytest

from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers.families import FAMILIES
from tests.helpers.fit import fit, fit_or_tell
from tests.helpers.third_party import BATCH_NORMS, KINDS
from tests.helpers.zoo import BLOCKS, MODELS
from tests.mutants import sees

LENGTH = 9  # odd: ranks hold different numbers of positions


class Run(NamedTuple):
    """One training: the model of the helpers, its arguments, and what differs from the usual."""

    model: str
    args: tuple[tuple[str, Any], ...]
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """For the test's id."""
        return "-".join(str(value) for _, value in (*self.args, *self.more)) or self.model


def zoo(kinds: Any) -> list[Run]:
    return [Run("Zoo", (("kind", kind),)) for kind in kinds]


def families(names: Any) -> list[Run]:
    return [Run("HuggingFace", (("family", name), ("loss", "user")), (("length", LENGTH),)) for name in names]


OWN = [
    Run("GPT", (("tied", True),)),
    Run("GPT", (("tied", False),), (("length", LENGTH), ("accumulate", 2), ("clip", 0.05))),
    Run("Encoder", (("batch_first", True),)),
    Run("Encoder", (("batch_first", False),), (("length", LENGTH),)),
]
EVERY = [*OWN, *zoo((*BLOCKS, *MODELS)), *families(FAMILIES)]
THIRD_PARTY = [Run("ThirdParty", (("kind", kind),)) for kind in KINDS]
FEW = [*OWN[:2], *zoo(("gqa_shared", "alibi", "bias_table", "encoder_decoder", "flat")), *families(("llama", "t5", "gpt2"))]
EXPERTS = [*zoo(("routed_moe",)), *families(("mixtral",))]
# Of each start the runs that are always tried; make parity tries every run at those of WHOLE.
STARTS: dict[str, tuple[int, dict[str, Any], list[Run]]] = {
    "cp2": (2, {"cp": 2}, [*OWN, *FEW[2:]]),
    "cp2-ring": (2, {"cp": 2, "cp_method": "ring"}, [*FEW[:3], *families(("llama", "t5"))]),
    "cp4": (4, {"cp": 4}, [OWN[1], *EVERY[4::18]]),
    "dp2-cp2": (4, {"cp": 2}, [OWN[0], *EVERY[5::18]]),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}, [*OWN[1:3], *EVERY[6::18], *EXPERTS]),
    "tp2-cp2-no-sp": (4, {"tp": 2, "cp": 2, "sp": False}, [OWN[1], *EVERY[25::18], *families(("mixtral",))]),
    "tp2-cp2-recompute": (4, {"tp": 2, "cp": 2, "recompute": "full"}, OWN[1:3]),
    "cp2-fsdp": (2, {"cp": 2, "data_parallel": "fsdp"}, FEW[:3]),
    "dp2-cp2-fsdp": (4, {"cp": 2, "data_parallel": "fsdp"}, OWN[1:2]),
    "tp2-cp2-fsdp": (4, {"tp": 2, "cp": 2, "data_parallel": "fsdp"}, OWN[1:2]),
    "cp2-activations": (2, {"cp": 2, "recompute": "activations"}, [OWN[1], *families(("llama",))]),
}
WHOLE = ("cp2", "cp4", "dp2-cp2", "tp2-cp2", "tp2-cp2-no-sp", "tp2-cp2-recompute", "cp2-ring", "tp2-cp2-fsdp")
# A batch norm's statistics are those of one replica's batch, and a block that counts batches is not run twice.
WITHOUT_BATCH_NORMS = ("dp2-cp2", "tp2-cp2-recompute")
OTHERS = {
    **{
        f"{name}-others": (
            world,
            strategy,
            [
                run
                for run in (*EVERY, *THIRD_PARTY)
                if run not in runs and not (name in WITHOUT_BATCH_NORMS and run.name in BATCH_NORMS)
            ],
        )
        for name, (world, strategy, runs) in STARTS.items()
        if name in WHOLE
    },
    "cp2-all_gather": (2, {"cp": 2, "cp_method": "all_gather"}, EVERY),
    "cp2-recompute": (2, {"cp": 2, "recompute": "full"}, OWN[1:2]),
    "cp2-selective": (2, {"cp": 2, "recompute": "selective"}, FEW),
    "tp2-cp2-no-sp-activations": (4, {"tp": 2, "cp": 2, "sp": False, "recompute": "activations"}, [*FEW, *EXPERTS]),
    "tp2-cp2-selective": (4, {"tp": 2, "cp": 2, "recompute": "selective"}, [*FEW, *EXPERTS]),
}


def train(runs: list[Run], world: int, strategy: dict[str, Any]) -> dict[Run, Trace | str]:
    """Every run, one after the other."""
    how: dict[str, Any] = {"world": world, "strategy": strategy, "steps": 3}
    return {run: fit_or_tell(run.model, dict(run.args), **{**how, **dict(run.more)}) for run in runs}


@functools.cache
def trained(start: str) -> dict[Run, Trace | str]:
    """All runs of a topology, a few to a start of the ranks (fully_shard's groups keep their threads)."""
    world, strategy, runs = {**STARTS, **OTHERS}[start]
    few = [runs[first : first + 12] for first in range(0, len(runs), 12)]
    return dict(ChainMap(*(run_distributed(train, world, each, world, strategy, timeout=290.0)[0] for each in few)))


@functools.cache
def reference(run: Run) -> Trace:
    return fit(run.model, dict(run.args), **{"steps": 3, **dict(run.more)})


CASES = [
    pytest.param(start, run, id=f"{start}-{run.name}", marks=marks)
    for starts, marks in ((STARTS, ()), (OTHERS, (pytest.mark.matrix, pytest.mark.timeout(1200))))
    for start, (_, _, runs) in starts.items()
    for run in runs
]


@sees(
    "cp: the whole gathered for readers that are taken for alike",
    "chunks:_reduce",
    "    return _between(x, dim, chunks, _reduced, gather_for_parts)\n",
    "    return chunks.own(x, dim).clone() * chunks.size\n",
    case="cp2-flat",
)
@sees(
    "cp: what lies in front of the blocks gets a sum for a mean",
    "chunks:_leave",
    "whole / chunks.losses if chunks.losses > 1 else whole",
    "whole",
    case="cp2-False-9",
)
@sees(
    "cp: labels of the first positions on every rank",
    "_labels",
    "    own: Tensor = place.own(target, at)\n",
    "    own: Tensor = target.narrow(at, 0, place.local_size)\n",
    case="cp2-True0",
)
@sees(
    "cp: means of ranks averaged",
    "loss:cross_entropy",
    "    return (total / _count(own, given, logits, place).to(total.dtype)).to(dtype)\n",
    "    return sum_over_ranks(summed / (own != -100).sum(), place.chunks) / place.chunks.size\n",
    case="tp2-cp2-False-9-2-0.05",
)
@sees(
    "cp: gradients averaged over dp alone",
    "Steps.wrap_ddp",
    "process_group=self._env.groups[self._env.groups.mean_axes]",
    'process_group=self._env.groups["dp"]',
    case="dp2-cp2-True",
)
@sees(
    "cp: blocks see plain chunks, and count positions from the start",
    "ContextAxis.part",
    "        return SeqPart.wrap(local, Place(chunks, dim))\n",
    "        return local\n",
    case="cp2-llama-user-9",
)
@sees(
    "cp: what is gathered over tp is a plain chunk",
    "as_part",
    "    if chunks is None:\n",
    "    if True:\n",
    case="tp2-cp2-False-9-2-0.05",
)
@sees(
    "cp: experts see the whole sequence's length",
    "hooks:gather_arguments",
    "                if deals_out and isinstance(whole, SeqPart):\n",
    "                if False:\n",
    case="tp2-cp2-mixtral-user-9",
)
@sees("cp: experts see all tokens' choices", "_own_tokens", "else place.own(x)", "else x", case="tp2-cp2-no-sp-mixtral-user-9")
@sees(
    "cp: fully_shard's hooks see parts of sequences",
    "_PartsAround._take",
    "        return tree_map(_plain, (args, kwargs))\n",
    "        return args, kwargs\n",
    case="cp2-fsdp-True",
)
@sees(
    "cp: the self-check's gradients are one rank's",
    "observe_run",
    'average_gradients(list(model.parameters()), groups["cp"])',
    "pass",
    case="cp2-True0",
)
@pytest.mark.parametrize(("start", "run"), CASES)
def test_parity_with_one_process(start, run):
    got = trained(start)[run]
    assert isinstance(got, Trace), got
    compare(reference(run), got).raise_if_failed()
