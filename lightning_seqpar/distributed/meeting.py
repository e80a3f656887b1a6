"""Ranks that meet in the group's store before a collective that user code may reach on some of them only."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup


class Meeting:
    """A place where all ranks of a group must arrive before they go on; collective over the group when it is made.

    A rank that waits in a collective for others that never come ends with the group's timeout, half an hour later and
    without a reason. Here it ends soon, and says who did not come. After the first times nobody waits any more.
    """

    def __init__(self, group: ProcessGroup, patience: timedelta = timedelta(minutes=2), times: int = 32) -> None:
        self._group, self._patience, self._left = group, patience, times
        made = dist.distributed_c10d._world.pg_map.get(group)
        if made is None or made[0] == "fake":  # there are no other ranks
            self._left = 0
            return
        self._store, self._rank = made[1], group.rank()
        self._name = f"meeting {self._store.add(f'meetings of rank {self._rank}', 1)}"

    def await_others(self, what: str, remedy: str) -> None:
        """Wait for the other ranks."""
        if self._left == 0:
            return
        self._left -= 1
        keys = [f"{self._name}, {self._left} to go, rank {rank}" for rank in range(self._group.size())]
        self._store.set(keys[self._rank], "")
        try:
            self._store.wait(keys, self._patience)
        except RuntimeError:
            missing = [dist.get_global_rank(self._group, rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RuntimeError(
                f"{what} on rank {dist.get_rank()}, and rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not do "
                f"the same within {self._patience.total_seconds():.0f} s, though it takes all of them. {remedy}"
            ) from None
