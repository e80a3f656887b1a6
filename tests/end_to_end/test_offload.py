"""``offload: activations``: the same numbers, what is moved, and that nothing of it stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_seqpar.distributed.counters import SavedBytes
from lightning_seqpar.region import offload
from lightning_seqpar.region.offload import ActivationOffload
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.verify.parity import Trace, compare
from tests.helpers import models
from tests.helpers.fit import fit
from tests.helpers.slices import rest
from tests.mutants import sees

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GPT": ("GPT", {"tied": True}, {"accumulate": 2, "clip": 0.05}),
    "llama": ("HuggingFace", {"family": "llama"}, {}),
    "documents": ("helpers.packed:Packed", {"kind": "documents"}, {}),
}


def fit_cases(world: int, strategy: dict[str, Any]) -> tuple[list[Trace], int]:
    offload.LEAST = 1
    moved: list[ActivationOffload] = []
    attach = ActivationOffload.attach
    ActivationOffload.attach = lambda self: (moved.append(self), attach(self))[1]  # type: ignore[method-assign]
    how = {"world": world, "strategy": {"offload": "activations", **strategy}, "steps": 2}
    return [fit(model, args, **{**how, **more}) for model, args, more in CASES.values()], sum(one.moved for one in moved)


@sees(
    "offload: another block's tensors come back",
    "_Call.keep",
    "            self.kept[key] = _Memory(x, stream)\n",
    "            self.kept[key] = _Memory(x.clone().zero_(), stream)\n",
    case="2-tp2",
)
@sees(
    "offload: a part of a sequence comes back as a plain tensor",
    "ActivationOffload._enter",
    "*view), places)",
    "*view), ())",
    case="2-cp2",
)
@sees(
    "offload: the blocks keep what they kept",
    "ModelSetup._offloaded",
    "[module.get_submodule(name) for stack in stacks_of(module, plans) for name in stack.blocks]",
    "[]",
    case="2-tp2",
)
@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (2, {"tp": 2}), (2, {"cp": 2}),
        *(pytest.param(2, one, marks=pytest.mark.more) for one in ({"tp": 2, "recompute": "full"}, {"data_parallel": "fsdp"})),
        *(rest(2, {"tp": 2, "recompute": one}) for one in ("activations", "selective")),
        *(rest(2, one) for one in ({}, {"cp": 2, "recompute": "full"}, {"pp": 2})), rest(4, {"tp": 2, "cp": 2}),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(f"{key}{x}" for key, x in value.items()),
)  # fmt: skip
def test_offloaded_activations_train_as_on_one_process(world, strategy):
    for found, moved in run_distributed(fit_cases, world, world, strategy):
        assert moved > 0
        for (name, (model, args, how)), trace in zip(CASES.items(), found, strict=True):
            report = compare(fit(model, args, **{"steps": 2, **how}), trace)
            assert report.ok, f"{name}\n{report}"


def kept(model: nn.Module, blocks: list[nn.Module], least: int) -> tuple[int, int, dict[str, torch.Tensor | None]]:
    """Bytes that a step keeps where it computes, and those that it moves."""
    tokens, offloads = torch.arange(44).remainder(31).view(4, 11), ActivationOffload(blocks, least)
    handles = offloads.attach()
    model.zero_grad()
    with SavedBytes(exclude=model.parameters()) as saved:
        loss = model.training_step((tokens,), 0)
    loss.backward()
    for handle in handles:
        handle.remove()
    return saved.total, offloads.moved, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_all_that_blocks_keep_is_moved_once_and_the_gradients_are_the_same_to_the_last_bit():
    model = models.GPT(layers=3)
    all_of_it, none, expected = kept(model, [], 1)
    beside, moved, grads = kept(model, [*model.model.blocks], 1)
    assert none == 0
    assert beside + moved == all_of_it  # views of one memory count as one, and are moved as one
    assert beside < all_of_it / 3
    assert all(torch.equal(expected[name], grad) for name, grad in grads.items())
    large, fewer, _ = kept(model, [*model.model.blocks], 2**12)
    assert 0 < fewer < moved
    assert large + fewer == all_of_it


def test_a_block_that_raises_leaves_no_hooks_behind():
    block = nn.Linear(2, 2)
    handles = ActivationOffload([block], 1).attach()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        block(torch.ones(3, 3))
    x = torch.ones(2, 2, requires_grad=True)
    assert (x * x).grad_fn._saved_self is x
    for handle in handles:
        handle.remove()
