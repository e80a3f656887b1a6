"""Random streams: shared within a replica, and the draws that tensor parallelism can't do yet."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode


def share_streams(group: ProcessGroup, source: int, device: torch.device) -> None:
    """Give every rank of ``group`` the random state of world rank ``source``: python, numpy, torch, the device.

    What a replica draws on whole activations (noise, a shuffle) is then the same on all of its ranks, seeded or not.
    """
    state: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state(), None]
    if device.type == "cuda":
        state[3] = torch.cuda.get_rng_state(device)
    dist.broadcast_object_list(state, src=source, group=group)
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[3], device)


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


class RefuseDropout(TorchDispatchMode):
    """Raises ``ValueError`` when a forward drops out through a function, where no module shows it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    _NAMES = ("native_dropout", "bernoulli", "_fused_dropout", "rrelu_with_noise", "alpha_dropout")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().split("::")[-1].split(".")[0].rstrip("_")
        if name in self._NAMES:
            raise ValueError(f"the forward drops out ({func.name()} with a random mask); {DROPOUT_FIX}")
        for at, argument in enumerate(func._schema.arguments):
            if argument.name == "dropout_p":
                p = kwargs.get("dropout_p", args[at] if at < len(args) else 0.0)
                if not isinstance(p, Tensor) and p > 0:
                    raise ValueError(f"attention drops out with dropout_p={p}; {DROPOUT_FIX}")
        return func(*args, **kwargs)
