"""When the shadow check calls a tensor wrong."""

from __future__ import annotations

import pytest
import torch

from lightning_seqpar.verify.shadow_check import _Judge

EXACT = torch.linspace(-1, 1, 64, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "noise", "error", "wrong"),
    [
        (torch.float64, 0.0, 1e-10, False),
        (torch.float64, 0.0, 1e-8, True),
        (torch.float32, 1e-7, 7e-7, False),
        (torch.float32, 1e-7, 1e-4, True),
        (torch.float32, 1e-4, 7e-4, False),  # ill-conditioned: the whole block in the same type is as far
        (torch.bfloat16, 3e-3, 1e-2, False),
        (torch.bfloat16, 3e-3, 0.5, True),
    ],
)
def test_an_error_is_measured_by_that_of_the_whole_block(dtype, noise, error, wrong):
    judge = _Judge(dtype)
    judge.compare("it", EXACT * (1 + error), EXACT * (1 + noise), EXACT)
    assert bool(judge.worst()) is wrong


def test_a_small_gradient_beside_large_ones_may_be_noise():
    judge = _Judge(torch.float32, [EXACT * 1e6])
    judge.compare("a bias", EXACT * 0.1, torch.zeros_like(EXACT), torch.zeros_like(EXACT))
    assert judge.worst() == []


@pytest.mark.parametrize(
    ("dtype", "same", "wrong"),
    [(torch.float32, 1.0, True), (torch.float32, float("inf"), False), (torch.float16, 1.0, False)],
)
def test_what_overflows_is_wrong_where_the_whole_block_has_numbers(dtype, same, wrong):
    judge = _Judge(dtype)
    judge.compare("it", EXACT * float("inf"), EXACT * same, EXACT)
    assert bool(judge.worst()) is wrong
    assert judge.compared == int(wrong)
