"""Stages with several chunks of blocks, whose micro-batches are put off to the window's end: what a user's step does meanwhile."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_seqpar import unshard
from lightning_seqpar.testing import RankFailedError, run_distributed
from tests.helpers import dropping, models
from tests.helpers.pipelines import trainer_of
from tests.mutants import sees

TURNS = {"pp": 2, "virtual_pp": 2}


class Stateful(models.GPT):
    """A step with a memory: counters in front of the blocks, a mean behind them, a batch that it changes, hooks that count."""

    def __init__(self) -> None:
        super().__init__(tied=True, layers=4)
        self.seen, self._words, self.batches = 0, 0, 0
        self.mean: Any = None
        self.history: tuple[int, ...] = ()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1 + batch_idx

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch.pop("ids")
        ids[:, self.seen % 3] = (ids[:, 0] + 1) % 31  # in place
        self.seen += 1
        self._words += ids.numel()
        self.history = (*self.history, self.batches)
        logits = self.model(ids[:, :-1]) * (1 + random.random() + self.seen / 10 + self.batches / 100)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.mean = loss.detach() if self.mean is None else 0.5 * self.mean + 0.5 * loss.detach()
        return loss * (1 + self.mean)

    def optimizer_step(self, *args: Any, **more: Any) -> None:
        super().optimizer_step(*args, **more)
        self.after = (self.seen, self._words, self.batches, self.history)


class Batches(torch.utils.data.Dataset):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": torch.randint(31, (9 - index % 3,), generator=torch.Generator().manual_seed(index))}

    def __len__(self) -> int:
        return 20


def train_stateful(sizes: dict[str, Any] | None) -> tuple[Any, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    random.seed(3)
    module = Stateful()
    trainer_of(sizes, max_steps=-1, max_epochs=1, accumulate_grad_batches=4).fit(
        module, torch.utils.data.DataLoader(Batches(), batch_size=1)
    )
    unshard(module)
    kept = None if module.mean is None else float(module.mean)
    return module.after, {name: p.detach().clone() for name, p in module.named_parameters()}, kept


@sees("turns: each chunk's run counts", "InterleavedWindow.entered", "        self._attributes.set(before)\n", "")
@sees(
    "turns: what a chunk's run does to the batch is done to the next",
    "InterleavedWindow.entered",
    "args, kwargs = _own(one.given)",
    "args, kwargs = one.given",
)
@sees(
    "turns: the step's numbers are those of the last chunk's stage alone",
    "InterleavedWindow.run",
    "{**now, **self._changed[-1]}",
    "now",
)
def test_a_step_with_a_memory_is_run_once_for_each_micro_batch(monkeypatch):
    monkeypatch.setattr(random, "random", lambda: 0.25)
    expected = train_stateful(None)
    found = run_distributed(train_with_constant_draws, 2)
    for after, weights, _ in found:
        assert after == expected[0]
        assert max((weights[name] - x).abs().max() for name, x in expected[1].items()) <= 1e-9
    assert found[-1][2] == pytest.approx(expected[2], rel=1e-12)  # behind the blocks, on the last stage alone


def train_with_constant_draws() -> Any:
    random.random = lambda: 0.25
    return train_stateful({**TURNS, "self_check": False})


class Dropped(dropping.Dropping):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def drop() -> tuple[dict[str, list[Tensor]], list[Tensor], Tensor]:
    """The masks of this stage's blocks and of what is in front of them, and the generator behind the training."""
    torch.manual_seed(1)
    module = Dropped(depth=4)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)
    in_front: list[Tensor] = []
    module.on_train_start = in_front.clear  # what copies drew
    next(m for m in module.modules() if isinstance(m, torch.nn.Embedding)).register_forward_hook(
        lambda layer, args, out: in_front.append(F.dropout(torch.ones(64), 0.5)) if module.training else None
    )
    data = models.loader(2, length=12, count=12)
    options = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}  # in the middle of windows
    trainer = trainer_of({**TURNS, "self_check": False}, max_steps=2, precision="32-true", **options)
    trainer.fit(module, data, data)
    masks = {name: m.masks for name, m in module.named_modules() if isinstance(m, dropping.Recorder) and hasattr(m, "masks")}
    return masks, in_front, torch.get_rng_state()


@sees("turns: chunks draw from where the last one ended", "InterleavedWindow.entered", "        one.streams.restore()\n", "")
@sees("turns: own blocks in front are run", "Stage._passing_by_own", "if chunk < self._chunk", "if chunk < 0")
def test_each_chunk_draws_from_a_stream_of_its_own_and_all_stages_alike_in_front():
    found = run_distributed(drop, 2)
    assert torch.equal(found[0][2], found[1][2])
    by_block: dict[str, list[Tensor]] = defaultdict(list)
    for masks, _, _ in found:
        for name, own in masks.items():
            by_block[name] += own
    alike = [own for name, own in by_block.items() if name.startswith("blocks") and own[0].numel() > 100]
    assert len({len(own) for own in alike}) == 1
    assert len(alike[0]) == 6
    flat = [mask.flatten()[:100] for own in alike for mask in own]
    assert not [1 for i in range(len(flat)) for j in range(i) if torch.equal(flat[i], flat[j])]
    # In front of the blocks each micro-batch is masked alike, whichever chunk it is run for.
    for _, in_front, _ in found:
        assert len({tuple(mask.tolist()) for mask in in_front}) == 6
        assert len(in_front) == 12
    assert [tuple(one.tolist()) for one in found[0][1]] == [tuple(one.tolist()) for one in found[1][1]]


class Past(models.GPT):
    """What the third block makes, which is on the first one's stage, is added to what that has made."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.kept: list[Tensor] = []
        blocks = self.model.blocks
        blocks[0].register_forward_hook(lambda module, args, out: self.kept.append(out))
        blocks[2].register_forward_hook(lambda module, args, out: out + self.kept.pop())


class Freezes(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.model.tokens.weight.requires_grad_(batch_idx % 3 != 1)


class Both(models.GPT):
    """A step and a hook that change the same number."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.count = 0

    def on_train_batch_end(self, *given: Any) -> None:
        self.count += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx)


class Skips(models.GPT):
    def __init__(self) -> None:
        super().__init__(layers=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 4 else loss


def refused(kind: str, sizes: dict[str, Any]) -> None:
    module = models.GPT(layers=4) if kind == "Freezes" else {"Both": Both, "Skips": Skips, "Past": Past}[kind]()
    callbacks = [Freezes()] if kind == "Freezes" else []
    trainer_of({**sizes, "self_check": False}, callbacks=callbacks).fit(module, models.loader(2, length=9, count=40))


@sees(
    "turns: what the chunks behind read of those in front passes",
    "trace_cut",
    "            if other != at and crossing:\n",
    "            if other % stages != at % stages and crossing:\n",
    case="past",
)
@pytest.mark.parametrize(
    ("kind", "sizes", "says"),
    [
        (
            "Freezes",
            TURNS,
            r"virtual_pp=2: model\.tokens\.weight was frozen, or thawed, between batches whose gradients are accumulated",
        ),
        ("Both", TURNS, r"virtual_pp=2: both training_step and a hook .* change Both\.count"),
        ("Past", TURNS, r"pp=2: model\.blocks\.2 reads model\.blocks\.0\..*past the activation between blocks"),
        ("Skips", {"pp": 2}, r"the training step returned NoneType, and not a loss: with pp=2 no batch can be skipped"),
    ],
    ids=["freezes", "both", "past", "skips"],
)
def test_what_can_not_be_put_off_is_told(kind, sizes, says):
    with pytest.raises(RankFailedError, match=says):
        run_distributed(refused, 2, kind, sizes)


def ways() -> list[tuple[str, int]]:
    """Each group and rank to which this rank has sent something on a link."""
    sent, isend = set(), dist.isend

    def noted(tensor: Tensor, *, group: Any, group_dst: int) -> Any:
        sent.add((group.group_name, group_dst))
        return isend(tensor, group=group, group_dst=group_dst)

    dist.isend = noted
    trainer_of(TURNS).fit(models.GPT(tied=False, layers=4), models.loader(2, length=9, count=40))
    return sorted(sent)


@sees(
    "turns: two neighbours send both ways in one group",
    "Stage._links",
    "Link(around[1], around[0], last, self._device, depth)",
    "Link(activations, around[0], last, self._device, depth)",
)
def test_no_group_carries_messages_both_ways():
    first, last = run_distributed(ways, 2)
    assert {peer for _, peer in first} == {1}
    assert {peer for _, peer in last} == {0}
    assert len(first) == len(last) == 2  # activations and gradients
    assert not {name for name, _ in first} & {name for name, _ in last}
