"""The call of a step under ``data_parallel: fsdp``."""

from __future__ import annotations

from typing import Any

from torch import nn


class RootCall(nn.Module):
    """Calls the model, so that ``fully_shard`` gathers what is in no block before a step of the user's and sees what it returns.

    Lightning sends a step through the ``forward`` of what wraps the model, and this is such a wrapper.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's step returns."""
        return self.module(*args, **kwargs)
