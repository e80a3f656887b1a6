"""Parameters and gradients that are whole for a while: for code that works on weights by hand."""

from __future__ import annotations

import fnmatch
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_seqpar.distributed.host import send_numbers
from lightning_seqpar.layout.param_layout import is_split, local_rows, take_rows
from lightning_seqpar.parallel.apply import whole_tensor
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.user_input import nearest


@contextmanager
def summon(record: ShardedModel, patterns: Sequence[str] = ()) -> Generator[None, None, None]:
    """A context in which parameters and their gradients are whole on every rank, and behind which each rank has its part of them.

    Nothing can be run on the model meanwhile. Collective over tp, and over dp where replicas split parameters.
    """
    if record.stage is not None:
        raise ValueError("summoned(model) with pp: a stage has no weights of the others' blocks; use pp=1")
    if record.summoned:
        raise ValueError("summoned(model) within summoned(model): leave the first one before")
    divided = (
        name for name in _named(record, patterns) if record.layout[name].is_sharded or is_split(record.layout.parameter(name))
    )
    held = [_Held(record, name) for name in divided]
    _agree_on_gradients(record, held)
    with torch.no_grad():
        for one in held:
            one.make_whole()
    record.summoned, record.summons = frozenset(one.name for one in held), record.summons + 1
    is_done = False
    try:
        yield
        is_done = True
    finally:
        with torch.no_grad():
            for one in held:
                one.put_back(keeps=is_done)
        record.summoned, record.summons = frozenset(), record.summons + 1


def _named(record: ShardedModel, patterns: Sequence[str]) -> list[str]:
    known = list(record.layout)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
            raise ValueError(
                f"summoned(model, {pattern!r}): no parameter has such a name; did you mean {nearest(pattern, known)}?"
            )
    return [name for name in known if not patterns or any(fnmatch.fnmatchcase(name, each) for each in patterns)]


class _Held:
    """One parameter whose part is put aside."""

    def __init__(self, record: ShardedModel, name: str) -> None:
        self.name, self._record, self.layout = name, record, record.layout[name]
        self.parameter = self._whole = record.layout.parameter(name)
        self.grad, self._part = self.parameter.grad, self.parameter.data
        self.has_gradient = self.grad is not None
        # fully_shard's parameters can't become plain tensors: modules get others in the place of what they show now, which is rows,
        # or gathered rows in the midst of a step.
        self._shown = record.model.get_parameter(name)
        self._places = [
            (record.model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2])
            for path, own in record.model.named_parameters(remove_duplicate=False)
            if own is self._shown and is_split(self.parameter)
        ]

    def make_whole(self) -> None:
        """Let the parameter and its gradient be whole. Collective."""
        grad = self.grad
        if grad is None and self.has_gradient:  # another rank has one
            grad = torch.zeros_like(self.parameter)
        whole = whole_tensor(self._part, self.layout, self._record.groups)
        whole_grad = None if grad is None else whole_tensor(grad, self.layout, self._record.groups)
        if self._places:
            self._whole = nn.Parameter(whole, requires_grad=self.parameter.requires_grad)
            for module, leaf in self._places:
                module._parameters[leaf] = self._whole
        else:
            self._exchange(whole)
        self._whole.grad = whole_grad

    def put_back(self, *, keeps: bool) -> None:
        """Let the parameter be this rank's part again."""
        whole, whole_grad, rank = self._whole.data, self._whole.grad, self._record.groups.rank("tp")
        if self._places:
            for module, leaf in self._places:
                module._parameters[leaf] = self._shown
        else:
            self._exchange(self._part)
        self.parameter.grad = self.grad
        if not keeps:
            return
        local_rows(self.parameter.data).copy_(self._cut(whole))
        if self._shown is not self.parameter:
            self._shown.data.copy_(self.layout.take(whole, rank))
        if whole_grad is None:
            self.parameter.grad = None
        elif self.grad is None:
            self.parameter.grad = take_rows(self.layout.take(whole_grad, rank), self.parameter)
        else:
            local_rows(self.grad).copy_(self._cut(whole_grad))

    def _exchange(self, data: Tensor) -> None:
        """Give the parameter other data. Its node in graphs stays, with DDP's hooks, and finds the old shape in a backward."""
        self.parameter.grad = None
        self.parameter.data = data

    def _cut(self, whole: Tensor) -> Tensor:
        """What this rank holds of a whole tensor."""
        part = self.layout.take(whole, self._record.groups.rank("tp"))
        return local_rows(take_rows(part, self.parameter))


def _agree_on_gradients(record: ShardedModel, held: Sequence[_Held]) -> None:
    """Let a rank know of gradients that only others have. Collective."""
    if not held:
        return
    flags = send_numbers([one.has_gradient for one in held], torch.uint8, local_rows(held[0].parameter).device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=record.groups[record.groups.holder_axes])
    for one, has in zip(held, flags.tolist(), strict=True):
        one.has_gradient = bool(has)
