"""A recipe: a model made small by its package's own arguments, and a sample of what it takes, without a batch dim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Recipe:
    """A network and how it is called.

    Attributes:
        net: the network.
        sample: makes one sample, without a batch dim, by name.
        call: the network's output for a batch of samples; the default hands them over in order.
        batch: samples of a batch.
        float32: whether it runs in float32 only.
    """

    net: nn.Module
    sample: Callable[[], dict[str, Tensor]]
    call: Callable[[nn.Module, dict[str, Tensor]], Any] = field(default=lambda net, batch: net(*batch.values()))
    batch: int = 2
    float32: bool = False


RECIPES: dict[str, dict[str, Callable[[], Recipe]]] = {}
"""Of each package, by each model's name, what makes it."""


def recipe(package: str, model: str) -> Callable[[Callable[[], Recipe]], Callable[[], Recipe]]:
    """Enter a function that makes a recipe."""

    def enter(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
        RECIPES.setdefault(package, {})[model] = make
        return make

    return enter


# ---- samples ----


def image(size: int = 32, channels: int = 3) -> Callable[[], dict[str, Tensor]]:
    """A sample of one square picture ``[c, h, w]``."""
    return lambda: {"x": torch.randn(channels, size, size)}


def floats(*shape: int) -> Callable[[], dict[str, Tensor]]:
    """A sample of one tensor of normal numbers."""
    return lambda: {"x": torch.randn(*shape)}


def tokens(length: int = 12, words: int = 64) -> Callable[[], dict[str, Tensor]]:
    """A sample of tokens ``[s]``."""
    return lambda: {"x": torch.randint(2, words, (length,))}


def pair(length: int = 12, other: int = 10, words: int = 64) -> Callable[[], dict[str, Tensor]]:
    """A sample of two sequences of tokens."""
    return lambda: {"source": torch.randint(2, words, (length,)), "target": torch.randint(2, words, (other,))}


def named(net: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Call the network with the batch by name."""
    return net(**batch)
