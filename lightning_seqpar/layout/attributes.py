"""What modules have as attributes beside parameters and buffers: numbers, flags, words, which a step may change and read."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, tuple, type(None))
"""What code can't change, but only replace."""

_MODULES = frozenset(vars(nn.Module()))
_LIGHTNINGS = frozenset(vars(LightningModule()))
_LEFT_ALONE = ("lightning_seqpar.", "torchmetrics.")
"""Packages whose modules change what they have by themselves."""

Values = dict[tuple[str, str], Any]
"""By the name of a module, or ``hparams``, and that of an attribute."""


class ModelAttributes:
    """Reads and sets the attributes of a model's modules; not those of layers that were swapped, nor of metrics.

    Tensors count in all of its modules with ``tensors``, and else in the model itself alone.
    """

    def __init__(self, model: nn.Module, *, tensors: bool = False) -> None:
        self._holders: dict[str, tuple[dict[str, Any], frozenset[str], tuple[type, ...]]] = {}
        for name, module in model.named_modules():
            if name and any(base.__module__.startswith(_LEFT_ALONE) for base in type(module).__mro__):
                continue
            left_out = _LIGHTNINGS if isinstance(module, LightningModule) else _MODULES
            self._holders[name] = vars(module), left_out, (*_PLAIN, Tensor) if tensors or not name else _PLAIN
        hparams = getattr(model, "_hparams", None)
        if isinstance(hparams, dict):
            self._holders["hparams"] = hparams, frozenset(), _PLAIN

    def read(self) -> Values:
        """All of them now."""
        return {
            (holder, name): value
            for holder, (own, left_out, kinds) in self._holders.items()
            for name, value in own.items()
            if isinstance(value, kinds) and name not in left_out
        }

    def set(self, values: Values) -> None:
        """Set them, but for those that are gone, or have become objects of another kind."""
        for (holder, name), value in values.items():
            own, _, kinds = self._holders[holder]
            if name in own and own[name] is not value and isinstance(own[name], kinds):
                own[name] = value

    @contextmanager
    def as_of(self, values: Values) -> Generator[None, None, None]:
        """A context in which they are what they were; behind it they are as before."""
        now = self.read()
        self.set(values)
        try:
            yield
        finally:
            self.set(now)
