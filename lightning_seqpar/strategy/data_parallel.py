"""The call of a step under ``data_parallel: fsdp``."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_seqpar.parallel.fully_sharded import FullySharded


class RootCall(nn.Module):
    """Calls the model, so that ``fully_shard`` gathers what is in no block before a step of the user's and sees what it returns.

    Lightning sends a step through the ``forward`` of what wraps the model, and this is such a wrapper.

    Args:
        module: the model.
        split: its rows over the replicas.
    """

    def __init__(self, module: nn.Module, split: FullySharded) -> None:
        super().__init__()
        self.module, self._split = module, split

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's step returns."""
        return self._split.step(*args, **kwargs)
