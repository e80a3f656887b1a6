"""Modules that have never heard of tensor parallelism: inferred, proved, trained, and equal to one process."""

from __future__ import annotations

import functools

import pytest

from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import zoo
from tests.helpers.fit import fit, fit_kinds
from tests.mutants import sees

KEPT_WHOLE = ("hard_coded", "head_list")
KINDS = [kind for kind in (*zoo.BLOCKS, *zoo.MODELS) if kind not in KEPT_WHOLE]
# On four ranks, one of each sort; the rest differ in what two ranks show as well.
FOUR = [
    "parallel_residual", "sandwich", "gqa", "gqa_shared", "mqa", "head_norm", "full_norm", "fused_per_head", "fused_gqa", "einsum",
    "alibi", "bias_table", "raw_attention", "routed_moe",
    "inline_mlp", "nano", "bert", "sequence_first", "flat", "vision", "encoder_decoder", "tied",
]  # fmt: skip
TOPOLOGIES = {
    "tp2": (2, 2, True),
    "tp4": (4, 4, True),
    "dp2-tp2": (4, 2, True),
    "tp2-no-sp": (2, 2, False),
}
SLICES = {"tp2": KINDS, "tp4": FOUR[0::8], "dp2-tp2": FOUR[1::8], "tp2-no-sp": FOUR[2::8]}
WHOLE = {"tp2": KINDS, "tp4": FOUR, "dp2-tp2": FOUR, "tp2-no-sp": KINDS}
CHOSEN = SLICES | {f"{name}-others": [kind for kind in WHOLE[name] if kind not in SLICES[name]] for name in TOPOLOGIES}


@functools.cache
def reference(kind: str) -> Trace:
    return fit("Zoo", {"kind": kind}, steps=3)


@functools.cache
def trained(topology: str) -> dict[str, tuple[Trace, int] | str]:
    """One start of the ranks for all kinds."""
    world, tp, sp = TOPOLOGIES[topology.removesuffix("-others")]
    kinds = CHOSEN[topology]
    return run_distributed(fit_kinds, world, "Zoo", kinds, world, tp, sp, timeout=400.0)[0]


CASES = [
    pytest.param(name, kind, marks=pytest.mark.matrix if name.endswith("others") else (), id=f"{name}-{kind}")
    for name, kinds in CHOSEN.items()
    for kind in kinds
]


@sees(
    "shared kv gradients not summed",
    "GradSync._sum_bucket",
    "            part.take(summed, rows)\n",
    "            del summed\n",
    case="tp2-fused_mqa",
)
@sees(
    "encoder states gathered backwards alone",
    "DataPath.copy",
    "        copied = copy_to_tensor_parallel_region(x, self.group)\n        self._frames.current.copied",
    "        copied = x.view_as(x)\n        self._frames.current.copied",
    case="tp2-encoder_decoder",
)
@pytest.mark.parametrize(("topology", "kind"), CASES)
@pytest.mark.more
def test_parity_with_one_process(topology, kind):
    got = trained(topology)[kind]
    assert not isinstance(got, str), got
    compare(reference(kind), got[0]).raise_if_failed()


@sees(
    "one rank rehearsed for all",
    "rehearse",
    "    for rank in range(tp):\n        try:\n",
    "    for rank in range(1):\n        try:\n",
)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", KEPT_WHOLE)
def test_what_cannot_be_dealt_out_is_computed_whole(kind, tp):
    compare(reference(kind), run_distributed(fit_here, tp, kind, tp)[0]).raise_if_failed()


def fit_here(kind: str, world: int) -> Trace:
    return fit("Zoo", {"kind": kind}, world=world, strategy={"tp": world}, steps=3)


@pytest.mark.parametrize("kind", ["conv", "shifted"])
def test_blocks_that_mix_positions_keep_whole_sequences(kind):
    got = run_distributed(fit_here, 2, kind, 2)
    compare(fit("Zoo", {"kind": kind}, steps=3), got[0]).raise_if_failed()
