"""What column linears save of the whole activation that they read, and how the backward gathers it again."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.activations.norm_recompute import NormCall, norm_of
from lightning_seqpar.activations.policy import keeper
from lightning_seqpar.distributed.async_ops import PendingGather
from lightning_seqpar.distributed.autograd import NO_BACKWARD, current_backward


class RegatheredInput:
    """An activation that several column linears read whole, and of which they save the shard alone.

    The backward gathers the shard again, once for all of them. If a norm made the activation, its input is saved and the
    norm runs again first.

    Args:
        x: the shard ``[b, s/tp, h]``; or, with ``length`` None, the activation that is whole on every rank, ``[b, s, h]``.
        length: number of positions of the whole activation; None if nothing is gathered.

    Attributes:
        kept: what the linears save; None once the module that reads the activation has returned.
        call: the call of the norm that makes the activation from ``kept``; None if ``kept`` is the activation.
        keeper: the activation checkpoint of the forward (:func:`~lightning_seqpar.activations.policy.keeper`).
    """

    def __init__(self, x: Tensor, dim: int, group: ProcessGroup, length: int | None) -> None:
        call = norm_of(x)
        source = None if call is None else call.source
        self.call: NormCall | None = None if source is None else call
        self.kept: Tensor | None = x.detach() if source is None else source.detach()
        self.keeper = keeper()
        self._dim, self._group, self._length = dim, group, length
        self._users = self._left = 0
        self._task = NO_BACKWARD
        self._pending: PendingGather | None = None
        self._whole: Tensor | None = None

    def add_user(self) -> None:
        """Count a linear that will need the whole activation in its backward."""
        self._users += 1
        self._left += 1

    @property
    def keeps_less(self) -> bool:
        """Whether the linears save something else than the whole activation: its shard, or the input of its norm."""
        return self._length is not None or self.call is not None

    def _begin(self) -> None:
        """Reset per-backward state on the first use in a new backward.

        An earlier backward may have stopped before every user ran (``torch.autograd.grad`` on a subset) and left a gather
        pending.
        """
        task = current_backward()
        if self._task != task:
            self._task, self._left, self._pending, self._whole = task, self._users, None, None

    def start(self, kept: Tensor) -> None:
        """Start to gather from ``kept``, the saved tensor, unless an earlier user of this backward did."""
        self._begin()
        if self._pending is not None or self._whole is not None:
            return
        shard = kept if self.call is None else self.call.output(kept)
        if self._length is None:
            self._whole = shard
        else:
            self._pending = PendingGather(shard, self._dim, self._group, self._length, async_op=True)

    def take(self, kept: Tensor) -> Tensor:
        """The whole activation ``[b, s, h]``; it is freed when the last user of this backward has taken it."""
        self.start(kept)  # does nothing, unless a hook ran another backward in between
        if self._pending is not None:
            self._whole, self._pending = self._pending.wait(), None
        assert self._whole is not None
        whole = self._whole
        self._end()
        return whole

    def skip(self) -> None:
        """Count a user that does not need the activation in this backward, as its weight needs no gradient."""
        self._begin()
        self._end()

    def _end(self) -> None:
        """One user less; after the last the activation is freed."""
        self._left -= 1
        if self._left == 0:
            self._whole, self._task = None, NO_BACKWARD
