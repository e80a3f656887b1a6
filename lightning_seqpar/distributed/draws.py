"""Which of torch's operations draw random numbers, and a mode that shows their draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_seqpar.distributed.autograd import generator_id
from lightning_seqpar.distributed.rng import generators

DRAWS = (
    "bernoulli", "native_dropout", "_fused_dropout", "rand", "rand_like", "randn", "randn_like", "uniform", "normal",
    "exponential", "randint", "randint_like", "random", "multinomial", "geometric", "cauchy", "log_normal", "binomial",
    "poisson", "_standard_gamma", "_sample_dirichlet",
    "randperm",
)  # fmt: skip
"""Names of torch's operations that draw random numbers."""


class DrawWatch(TorchDispatchMode):
    """A dispatch mode that shows every random draw to ``check``."""

    def __init__(self, check: Callable[[Drawn], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if (drawn := drawn_by(func, out, args, kwargs)) is not None:
            self._check(drawn)
        return out


class Drawn(NamedTuple):
    """One random draw.

    Attributes:
        name: the operation, such as ``native_dropout``.
        shape: the shape of the tensor that it filled.
        seeded: whether it drew from a generator that the user passed, rather than one of torch's own. Such a generator is
            not switched between the streams, so all ranks draw alike from it.
    """

    name: str
    shape: tuple[int, ...]
    seeded: bool = False


def drawn_by(func: Any, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Drawn | None:
    """The draw that an operation made, as a dispatch mode sees it; None if it draws nothing."""
    name = func.name().split("::")[-1].split(".")[0].rstrip("_")
    if name not in DRAWS:
        return None
    passed: Any = next((arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, torch.Generator)), None)
    own = [generator_id(generator) for generator in generators()]
    seeded = passed is not None and generator_id(passed) not in own
    return Drawn(name, tuple((out[0] if isinstance(out, tuple) else out).shape), seeded)
