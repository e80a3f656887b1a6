"""What column linears keep of the activation that they read, and how the backward has it whole again."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_seqpar.activations.norm_recompute import NormCall, norm_of
from lightning_seqpar.activations.policy import keeper
from lightning_seqpar.distributed.async_ops import PendingGather
from lightning_seqpar.distributed.autograd import NO_BACKWARD, current_backward


def remembered(x: Tensor) -> tuple[Tensor, NormCall | None]:
    """What is kept for the backward in place of ``x``: the input of the norm that made it, and how; or itself."""
    call = norm_of(x)
    source = call.source if call is not None else None
    return (x.detach(), None) if source is None else (source.detach(), call)


class RegatheredInput:
    """One activation on its way to column linears, and those that read it.

    They keep its shard (or what its norm makes it from), and the backward gathers it again: once, for all of them.

    Args:
        x: the shard; with ``length`` none the activation that is whole already.
        dim: of the sequence.
        group: over which it is gathered.
        length: positions of the whole.

    Attributes:
        kept: what they keep, while the module that reads it runs.
        call: how a norm makes the activation of it; none if it is the activation.
        keeper: who decided what is kept when this was gathered.
    """

    def __init__(self, x: Tensor, dim: int, group: ProcessGroup, length: int | None) -> None:
        self.kept: Tensor | None
        self.kept, self.call = remembered(x)
        self.keeper = keeper()
        self._dim, self._group, self._length = dim, group, length
        self._users = self._left = 0
        self._task = NO_BACKWARD
        self._pending: PendingGather | None = None
        self._whole: Tensor | None = None

    def add_user(self) -> None:
        """A linear will need the whole activation in its backward."""
        self._users += 1
        self._left += 1

    @property
    def keeps_less(self) -> bool:
        """Whether anything else than the whole activation is kept."""
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
        """Start to gather from what was kept (unpacked), unless an earlier user did."""
        self._begin()
        if self._pending is not None or self._whole is not None:
            return
        shard = kept if self.call is None else self.call.output(kept)
        if self._length is None:
            self._whole = shard
        else:
            self._pending = PendingGather(shard, self._dim, self._group, self._length, async_op=True)

    def take(self, kept: Tensor) -> Tensor:
        """The whole activation; let go when the last user has taken it."""
        self.start(kept)  # nothing, unless a hook ran another backward since
        if self._pending is not None:
            self._whole, self._pending = self._pending.wait(), None
        assert self._whole is not None
        whole = self._whole
        self._end()
        return whole

    def skip(self) -> None:
        """A user's weight needs no gradient in this backward."""
        self._begin()
        self._end()

    def _end(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._whole, self._task = None, NO_BACKWARD
