"""Column and row linears of compiled blocks: a product and the collectives of its plan, and nothing else.

They keep the class, parameters and attributes of :mod:`~lightning_seqpar.nn.linear`; what is kept for the backward, and which
products run beside which collective, is the compiler's affair.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_seqpar.nn.linear import ColumnParallelLinear, RowParallelLinear
from lightning_seqpar.region.lowered import LoweredRegion


class LoweredColumnLinear(ColumnParallelLinear):
    """A column linear that ``torch.compile`` traces.

    ============  ====================  ======================  ===============================
    tensor        global                local                   saved for backward
    ============  ====================  ======================  ===============================
    input         ``[b, s, h]``         ``[b, s, h]``           ``[b, s, h]``, once for all
                                                                columns that read it
    weight        ``[f, h]``            ``[f/tp, h]``           itself
    bias          ``[f]``               ``[f/tp]``              —
    output        ``[b, s, f]``         ``[b, s, f/tp]``        —
    ============  ====================  ======================  ===============================
    """

    lowered: LoweredRegion

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, h]`` (or its shard, if this layer gathers) → ``[b, s, f/tp]``."""
        self.check_settings()
        if self.gathers_input:
            x = self.lowered.gather(x)
        elif x.shape[-1] != self.in_features and self.lowered.wholes:
            x = self.lowered.wholes[-1]  # the input is a stand-in of this rank's width
        return F.linear(x, self.matrix, self.bias)


class LoweredRowLinear(RowParallelLinear):
    """A row linear that ``torch.compile`` traces; its table is that of :class:`RowParallelLinear`."""

    lowered: LoweredRegion

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, f/tp]`` → ``[b, s/tp, h]``."""
        self.check_settings()
        out = self.lowered.reduce(F.linear(x, self.matrix))
        return out if self.bias is None else out + self.bias.to(out.dtype)
