"""Blocks that are cut by hand, which ours is measured against, compute what the whole model does."""

from __future__ import annotations

import copy

import host_time
import torch
import torch.distributed as dist
import yardsticks
from torch import Tensor

from lightning_seqpar.testing import run_distributed


def largest_error(kind: host_time.Kind, *, one_function: bool) -> float:
    """Of the output and all gradients, on this rank."""
    torch.manual_seed(0)
    dense = kind.make(64, 2, 16).double()
    model, group = copy.deepcopy(dense), dist.group.WORLD
    yardsticks.by_hand(model, model.get_submodule(kind.stack), kind.groups, group, one_function=one_function)
    ids, scale = torch.randint(0, 256, (2, 16)), torch.randn(2, 16, 256, dtype=torch.float64)
    outs = [one(ids) for one in (dense, model)]
    for out in outs:
        (out * scale).sum().backward()
    fused = {column: count for columns, _ in kind.groups.values() for column, count in columns.items()}
    pairs = [tuple(out.detach() for out in outs)]
    for (name, whole), part in zip(dense.named_parameters(), model.parameters(), strict=True):
        expected: Tensor = whole.grad
        if whole.shape != part.shape:
            dim = 0 if whole.shape[0] != part.shape[0] else 1
            expected = yardsticks.cut(expected, dim, group, fused.get(name.split(".")[-2], 1))
        elif name.startswith(kind.stack):
            dist.all_reduce(part.grad)  # it saw this rank's tokens
        pairs.append((expected, part.grad))
    return max((one - other).abs().max().item() for one, other in pairs)


def errors() -> dict[tuple[str, bool], float]:
    return {
        (name, one_function): largest_error(kind, one_function=one_function)
        for name, kind in host_time.KINDS.items()
        for one_function in (False, True)
    }


def test_blocks_cut_by_hand_are_right():
    for found in run_distributed(errors, 2):
        assert len(found) == 4
        assert max(found.values()) < 1e-9, found
