"""``Trainer.fit`` in parallel against one process, float64: losses, gathered gradients, norm, weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch

from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers.fit import fit
from tests.helpers.slices import rest
from tests.mutants import sees

MODELS = {
    "gpt-tied": ("GPT", (("tied", True),)),
    "gpt-untied": ("GPT", (("tied", False),)),
    "encoder-bsh": ("Encoder", (("batch_first", True),)),
    "encoder-sbh": ("Encoder", (("batch_first", False),)),
}
TOPOLOGIES = {"tp2": (2, 2), "tp4": (4, 4), "dp2xtp2": (4, 2)}
WITHOUT_TP = {"tp1": (1, 1), "dp2": (2, 1)}


@cache
def reference(model: str, optimizer: str = "adamw", **kwargs) -> Trace:
    name, args = MODELS[model]
    return fit(name, {**dict(args), "optimizer": optimizer}, **kwargs)


def check(model: str, topology: str, sp: bool, optimizer: str = "adamw", strategy=None, **kwargs) -> None:
    name, args = MODELS[model]
    world, tp = {**TOPOLOGIES, **WITHOUT_TP}[topology]
    options = {"tp": tp, "sp": sp, **(strategy or {})}
    model_args = {**dict(args), "optimizer": optimizer}
    traces = run_distributed(fit, world, name, model_args, world=world, strategy=options, **kwargs)
    for trace in traces:
        compare(reference(model, optimizer, **kwargs), trace).raise_if_failed()


def cases(models: Iterable[str], first: str = "") -> list[Any]:
    """Of the first model all topologies, of the others those where mistakes show; the rest is in the matrix.

    The first model with fewer ranks over tp than there are is of the core too: there mistakes hide.
    """

    def marks(model: str, topology: str, sp: bool) -> Any:
        if model == first or (sp and topology != "tp4"):
            return pytest.mark.core if (model, topology, sp) == (first, "dp2xtp2", True) else []
        return pytest.mark.matrix

    return [
        pytest.param(
            *(model, topology, sp), id=f"{model}-{topology}-{'sp' if sp else 'no-sp'}", marks=marks(model, topology, sp)
        )
        for model in models
        for topology in TOPOLOGIES
        for sp in (True, False)
    ]


@sees(
    "norm sync left out",
    "_sum_coalesced",
    "    torch._foreach_copy_(grads, list(map(Tensor.view_as, totals, grads)))\n",
    "    del totals\n",
    case="gpt-tied-tp2-sp",
)
@sees(
    "average for sum",
    "_sum_coalesced",
    "flat = all_reduce(flat, group)",
    "flat = all_reduce(flat, group); flat /= dist.get_world_size(group)",
    case="gpt-tied-tp2-sp",
)
@sees(
    "sync on the world group",
    "GradSync._sum_bucket",
    "self._tp, losses",
    'self._groups["dp", "tp"], losses',
    case="gpt-tied-dp2xtp2-sp",
)
@sees(
    "row bias unsynced",
    "RowRule.layout",
    "Reason.ROW_BIAS_ON_SHARDS if sp else Reason.IDENTICAL, partial=sp)",
    "Reason.IDENTICAL)",
    case="gpt-tied-tp2-sp",
)
@sees(
    "wrong conjugate for the exit",
    "collectives:gather_replicated_from_sequence_parallel_region",
    "partial(_cut_by, split,",
    "partial(reduce_scatter_to_sequence_parallel_region,",
    case="gpt-tied-tp2-sp",
)
@sees(
    "collective forgets its group",
    "Exchange.__init__",
    "group.alltoall_base(self._out, self._sent",
    "dist.distributed_c10d._get_default_group().alltoall_base(self._out, self._sent",
    case="gpt-tied-dp2xtp2-sp",
)
@sees("gather not trimmed", "PendingGather.wait", "if self._length is not None and", "if False and", case="gpt-tied-tp2-sp")
@sees(
    "fused parts out of order",
    "Shard.by_segments",
    "        return cls(dim, start, tuple(tuple(own) for own in ranges))",
    "        return cls(dim, start, tuple(((r * start // size, (r + 1) * start // size),) for r in range(size)))",
    case="gpt-tied-tp2-sp",
)
@sees(
    "whole parameters counted tp times in the norm",
    "global_grad_norm",
    '("tp",) * (shard is not None)',
    '("tp",)',
    case="gpt-tied-tp2-sp",
)
@sees(
    "DDP over the world group",
    "Steps.wrap_ddp",
    "process_group=self._env.groups[self._env.groups.mean_axes]",
    "process_group=self._env.groups[self._env.groups.holder_axes]",
    case="gpt-tied-dp2xtp2-sp",
)
@sees(
    "gather before the head missing",
    "DataPath.leave",
    "as_part(gather_replicated_from_sequence_parallel_region(x, self.dim, self.group, length), self.dim, chunks)",
    "as_part(x, self.dim, chunks)",
    case="gpt-tied-tp2-sp",
)
@pytest.mark.parametrize(("model", "topology", "sp"), cases(MODELS, "gpt-tied"))
def test_ten_steps_of_adamw(model, topology, sp):
    check(model, topology, sp, steps=10)


@sees(
    "sync per micro-batch",
    "GradSync.attach",
    "else parameter.register_hook(self._arrival(partial))",
    (
        "else parameter.register_post_accumulate_grad_hook(lambda p, own=partial:"
        ' (dist.all_reduce(p.grad, group=self._groups["tp"]), setattr(own, "synced", p.grad),'
        " None)[-1])"
    ),
    case="gpt-tied-tp2-sp",
)
@sees(
    "clip with local norms",
    "_ShardedPrecision.clip_grad_by_norm",
    "self._owner().global_norm(parameters)",
    "torch.nn.utils.get_total_norm([p.grad for p in parameters])",
    case="gpt-tied-tp2-sp",
)
@pytest.mark.parametrize(("model", "topology", "sp"), cases(["gpt-tied", "encoder-sbh"]))
def test_accumulation_clipping_and_sgd(model, topology, sp):
    check(model, topology, sp, "sgd", accumulate=2, clip=0.05)


@pytest.mark.parametrize("topology", WITHOUT_TP)
def test_without_tensor_parallelism_it_is_plain_lightning(topology):
    check("gpt-tied", topology, True, accumulate=2, clip=0.05)


@pytest.mark.parametrize("length", [8, rest(3), 2], ids=lambda n: f"{n - 1}-positions")
@pytest.mark.parametrize("topology", ["tp2", "tp4"])
def test_lengths_that_do_not_divide(topology, length):
    check("gpt-tied", topology, True, length=length, steps=3)
    check("encoder-sbh", topology, True, length=length, steps=3)


@sees("a sparse buffer is sent as a dense one", "dense_parts", "tensor.layout == torch.strided", "True", case="{'mask': True}")
@pytest.mark.parametrize("variant", [{"norm_first": True}, rest({"activation": "relu"}), {"mask": True}], ids=str)
def test_encoder_variants(variant):
    expected = fit("Encoder", variant, steps=3)
    for batch_first in (True, False):
        args = {**variant, "batch_first": batch_first}
        found = run_distributed(fit, 2, "Encoder", args, world=2, strategy={"tp": 2}, steps=3)
        compare(expected, found[0]).raise_if_failed()


OURS = Trace([1.0, 2.0], {"w": torch.tensor([3.0, 4.0])}, 5.0, {"w": torch.ones(2)})


@pytest.mark.parametrize(
    "other",
    [
        {"losses": [1.0]},
        {"losses": [1.0, float("nan")]},
        {"losses": [], "grads": {}, "grad_norm": 0.0},
        {"grads": {"w": torch.tensor([3.0, 4.1])}},
        {"grads": {"w": None}},
        {"grads": {"w": torch.ones(3)}},
        {"grad_norm": 5.1},
        {"weights": {"w": torch.zeros(2)}},
        {"weights": {}},
    ],
    ids=str,
)
def test_the_engine_sees_a_difference(other):
    report = compare(OURS, Trace(**{**vars(OURS), **other}))
    assert not report.ok
    with pytest.raises(AssertionError, match="FAIL"):
        report.raise_if_failed()


def test_two_empty_traces_are_not_equal_but_refused():
    with pytest.raises(ValueError, match="both traces are empty: no step was recorded"):
        compare(Trace(), Trace())


def test_what_there_is_gets_compared():
    assert compare(OURS, OURS).ok
    ours = Trace(weights=OURS.weights)
    assert compare(ours, Trace(weights=ours.weights)).ok
    assert not compare(ours, Trace(weights={"w": torch.zeros(2)})).ok
