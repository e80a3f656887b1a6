"""Code between the blocks that works on the sequence as a whole: as in one process, whether the first batch ran it or not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import models
from tests.helpers.between import KINDS, Between
from tests.helpers.fit import fit, quiet_trainer
from tests.helpers.slices import rest
from tests.mutants import sees


def traces(world: int, strategy: dict[str, Any] | None, kinds: list[str], **args: Any) -> dict[str, Trace]:
    """Train every kind in this process, one after the other."""
    found = {}
    for kind in kinds:
        given = {"steps": 3, "length": 10, "global_batch": 4, "strategy": strategy, "world": world}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[kind] = fit("Between", {"kind": kind, **args}, **given)
    return found


TOPOLOGIES = {
    "tp2": (2, {"tp": 2, "self_check": False}),
    "tp4": (4, {"tp": 4, "self_check": False}),  # shards with padding, and one with nothing else
    "dp2xtp2": (4, {"tp": 2, "self_check": False}),
    "tp2xcp2": (4, {"tp": 2, "cp": 2, "self_check": False}),
    "fsdp2xtp2": (4, {"tp": 2, "data_parallel": "fsdp", "self_check": False}),
}


@sees(
    "between blocks: a whole tensor has one rank's gradient",
    "seq_part:_shared",
    'if chunks is None or chunks.axis == "cp":',
    "if True:",
    case="tp2",
)
@sees(
    "between blocks: what parts are multiplied with has one rank's gradient",
    "SeqPart.for_parts",
    "self._gathered(gather_for_parts)",
    "self._gathered(gather_positions)",
    case="tp2",
)
@sees(
    "between blocks: the gradient of what is gathered counts tp times",
    "gather_positions",
    '_reduce if chunks.axis == "cp" else enter',
    "_reduce",
    case="tp2",
)
@sees(
    "between blocks: the gradient of a sum over ranks counts tp times",
    "sum_over_ranks",
    'x if chunks.axis == "tp" else copy_to',
    "copy_to",
    case="tp2",
)
@sees(
    "between blocks: a block's output does not know that it is a part",
    "hooks:_wrapped",
    "    if not region.sp:\n        return None\n",
    "    return None\n",
    case="tp2",
)
@sees(
    "between blocks: the user's hooks see shards",
    "_Swap._hooks",
    "                hooks.move_to_end(key)\n",
    "                pass\n",
    case="tp2",
)
@sees(
    "between blocks: a head reads a part",
    "VocabParallelHead.forward",
    "        x = over_tp(x) if isinstance(x, SeqPart) else x\n",
    "        x = local_of(x)\n",
    case="tp2",
)
@sees(
    "between blocks: a change in place has one rank's gradient",
    "seq_part:write",
    "share(whole, target._place.chunks)",
    "whole",
    case="tp2",
)
@sees(
    "between blocks: a module of a block is given parts there",
    "hooks:gather_arguments.hook",
    "if is_outside and any(map(lies_over_tp, (*args, *kwargs.values()))):",
    "if False:",
    case="tp2",
)
@sees(
    "between blocks: a reentrant checkpoint loses the gradient of its input",
    "SeqPart._take_over_graph",
    "inputs = [kept[at] if at in missing and known else found for at, found in enumerate(inputs)]",
    "inputs = [None for _ in inputs]",
    case="tp2",
)
@sees(
    "between blocks: a shorter sequence taken for the call's",
    "DataPath._shard_in",
    "or not place.chunks.same(own)",
    "",
    case="tp2",
)
@sees(
    "between blocks: what a composed function is given is shared twice",
    "SeqPart.__torch_function__",
    "(args, named) if handling.composed else ",
    "(args, named) if func in _OF_GRAPH else ",
    case="tp2",
)
@sees(
    "between blocks: a pooled activation is refused by the norm behind them",
    "hooks:_begin",
    " and x.ndim == 2 and ",
    " and x.ndim == 0 and ",
    case="tp2",
)
@pytest.mark.parametrize("topology", ["tp2", "tp4", rest("dp2xtp2"), "tp2xcp2", rest("fsdp2xtp2")])
def test_code_that_begins_in_the_second_step(topology):
    world, strategy = TOPOLOGIES[topology]
    left_out = OVER_CP if "cp" in strategy else OVER_REPLICAS if world > strategy["tp"] else set()
    left_out = left_out | (OVER_ROWS if "data_parallel" in strategy else set())
    kinds = [kind for kind in KINDS if kind not in left_out]
    expected = traces(1, None, kinds)
    for found in run_distributed(traces, world, world, strategy, kinds, timeout=280):
        for kind, trace in found.items():
            result = compare(expected[kind], trace)
            assert result.ok, f"{kind}: {result}"


OVER_CP = {"reentrant"}
"""What cp refuses."""

OVER_ROWS = {"norm of a block", "MLP of a block"}
"""What fsdp refuses: a block's parameters outside of its forward."""

OVER_REPLICAS = {"kept", "hook", "reentrant"}
"""Losses of which the replicas' mean is not that of the whole batch (a sum, a maximum); what DDP refuses on one process too."""


def evaluated(world: int, strategy: dict[str, Any] | None, kinds: list[str]) -> dict[str, float]:
    """The validation loss where code of each kind runs in evaluation alone."""
    found = {}
    for kind in kinds:
        module, chosen = Between(kind, since=99), "auto" if strategy is None else SeqParallelStrategy(**strategy)
        trainer = quiet_trainer(devices=world, strategy=chosen)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            told = trainer.validate(module, models.loader(4, length=10, count=8), verbose=False)
        found[kind] = told[0]["val"]
    return found


def scored(world: int, strategy: dict[str, Any] | None, since: int) -> Trace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit("Scored", {"since": since}, steps=3, length=10, global_batch=4, strategy=strategy, world=world)


@pytest.mark.parametrize("since", [rest(0), 1])
def test_scores_of_flattened_tokens_beside_an_activation(since):
    """Of the last block too, where the activation becomes whole."""
    for trace in run_distributed(scored, 2, 2, {"tp": 2, "self_check": since == 0}, since):
        compare(scored(1, None, since), trace).raise_if_failed()


EVALUATED = ["mean", "first", "placed", "attended", "convolved", "outer norm"]


@pytest.mark.parametrize("topology", ["tp2", rest("tp4"), rest("tp2xcp2")])
def test_code_that_runs_in_evaluation_alone(topology):
    world, strategy = TOPOLOGIES[topology]
    expected = evaluated(1, None, EVALUATED)
    for found in run_distributed(evaluated, world, world, strategy, EVALUATED):
        assert found == pytest.approx(expected, abs=1e-9)


def warned() -> list[str]:
    """What is said of a gather that code between the blocks takes, in two steps."""
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2, self_check=False), max_steps=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        trainer.fit(Between("rolled", since=0), models.loader(4, length=10, count=8))
    return [str(one.message) for one in told if "needs all of the positions" in str(one.message)]


def test_a_gather_between_blocks_is_told_of_once():
    (first,), other = run_distributed(warned, 2)
    assert first.startswith("roll() needs all of the positions of a sequence of which each rank of tp=2 holds a part")
    assert other == []
