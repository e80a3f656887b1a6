"""Random streams: shared within a replica, and the draws that tensor parallelism can't do yet."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode


def get_streams(device: torch.device) -> list[Any]:
    """The random state of this process: python, numpy, torch, the device."""
    state: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state(), None]
    if device.type == "cuda":
        state[3] = torch.cuda.get_rng_state(device)
    return state


def set_streams(state: list[Any], device: torch.device) -> None:
    """Take over what :func:`get_streams` gave."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[3], device)


def share_streams(group: ProcessGroup, source: int, device: torch.device) -> None:
    """Give every rank of ``group`` the random state of world rank ``source``: python, numpy, torch, the device.

    What a replica draws on whole activations (noise, a shuffle) is then the same on all of its ranks, seeded or not.
    """
    state = get_streams(device)
    dist.broadcast_object_list(state, src=source, group=group)
    set_streams(state, device)


def find_dropout(model: nn.Module) -> list[tuple[str, float]]:
    """Modules of ``model`` that drop out when they train: ``[(name, p), ...]``."""
    found = []
    for name, module in model.named_modules():
        p = 0.0
        if isinstance(module, _DropoutNd):
            p = float(module.p)
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            p = float(module.dropout)
        if p > 0:
            found.append((name or type(module).__name__, p))
    return found


DROPOUT_FIX = (
    "set its p to 0: under tensor parallelism every rank would draw its own mask from the wrong stream, "
    "and the streams that make it right are not there yet"
)


class RefuseDropout(TorchFunctionMode):
    """Raises ``ValueError`` when a forward drops out through a function, or draws random numbers inside a region.

    Args:
        in_region: says whether activations are sharded at this moment.
    """

    _DROPOUT = (
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
        "feature_dropout",
    )
    _DRAWS = (
        "bernoulli",
        "rand",
        "randn",
        "rand_like",
        "randn_like",
        "randint",
        "randperm",
        "normal",
        "uniform",
        "multinomial",
    )

    def __init__(self, in_region: Callable[[], bool]) -> None:
        super().__init__()
        self._in_region = in_region

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").rstrip("_")
        if name in self._DROPOUT:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            if training and p > 0:
                raise ValueError(f"the forward calls {name} with p={p}; {DROPOUT_FIX}")
        elif name == "scaled_dot_product_attention":
            p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if p > 0:
                raise ValueError(f"attention drops out with dropout_p={p}; {DROPOUT_FIX}")
        elif name in self._DRAWS and self._in_region():
            raise ValueError(
                f"the forward calls {name} between the blocks' first and last, where each rank has a part of the "
                "activations and would draw its part from the wrong stream; draw outside the blocks"
            )
        return func(*args, **kwargs)
