"""Which samples each rank reads, and what metrics and predictions say of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, SequentialSampler
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_seqpar import SeqParallelStrategy
from lightning_seqpar.testing import RankFailedError, run_distributed
from tests.helpers import models
from tests.helpers.fit import quiet_trainer
from tests.mutants import sees


class Numbered(Dataset):
    """Token rows that carry their own number in the first place."""

    def __init__(self, count: int, noise: bool = False) -> None:
        self.count, self.noise = count, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        row = torch.randint(1, 31, (8,), generator=torch.Generator().manual_seed(index))
        return index, torch.randint(1, 31, (8,)) if self.noise else row


class Reader(models.GPT):
    """Remembers which samples came by, in every loop."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, list[list[int]]] = {"train": [], "val": [], "predict": []}
        self.rows: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read["train"].append(batch[0].tolist())
        self.rows.append(batch[1])
        return super().training_step((batch[1],), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.read["val"].append(batch[0].tolist())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read["predict"].append(batch[0].tolist())
        return batch[0]


class Pairs(BatchSampler):
    """A user's batch sampler with its own constructor order."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch[::-1]


def make_loader(kind: str, count: int, batch: int) -> DataLoader:
    data = Numbered(count)
    if kind == "shuffled":
        return DataLoader(data, batch, shuffle=True)
    if kind == "user-sampler":
        return DataLoader(data, batch, sampler=list(reversed(range(count))))
    if kind == "generator":
        return DataLoader(data, batch, shuffle=True, generator=torch.Generator().manual_seed(5))
    if kind == "distributed":
        return DataLoader(data, batch, sampler=DistributedSampler(data, shuffle=False))
    if kind == "batch-sampler":
        return DataLoader(data, batch_sampler=Pairs(SequentialSampler(data), batch_size=batch, drop_last=False))
    if kind == "batch-shuffled":
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), batch_size=batch, drop_last=False))
    return DataLoader(data, batch)


def read(kind: str, tp: int, batch: int, seed: int | None, epochs: int = 2, count: int = 12) -> dict[str, Any]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    # Without a seed every rank starts from a state of its own.
    L.seed_everything(seed, verbose=False) if seed is not None else torch.manual_seed(
        1000 + (dist.get_rank() if world > 1 else 0)
    )
    module = Reader()
    strategy = SeqParallelStrategy(tp=tp) if world > 1 else "auto"
    trainer = quiet_trainer(devices=world, strategy=strategy, max_epochs=epochs)
    trainer.fit(module, make_loader(kind, count, batch), make_loader("plain", count, batch))
    return module.read


def read_each(jobs: list[tuple[Any, ...]]) -> list[list[list[int]]]:
    return [read(*job)["train"] for job in jobs]


SHUFFLED = ("shuffled", "generator", "batch-shuffled")


def test_one_replica_reads_what_one_process_reads():
    kinds = (*SHUFFLED, "user-sampler", "batch-sampler")
    jobs = [("shuffled", 2, 4, None), *((kind, 2, 4, 11) for kind in kinds)]
    first, second = run_distributed(read_each, 2, jobs)
    assert first == second
    for kind, train in zip(kinds, first[1:], strict=True):
        assert train == read(kind, 1, 4, 11)["train"], kind
        assert (train[:3] != train[3:]) == (kind in SHUFFLED), "epochs differ where they are shuffled"


@sees(
    "sampler by global rank",
    "ReplicaSampler.__init__",
    'self.num_replicas, self.rank = groups.size("dp"), groups.rank("dp")',
    "self.num_replicas, self.rank = dist.get_world_size(), dist.get_rank()",
)
def test_replicas_read_parts_of_one_order():
    drawn = [(kind, 2, 2, seed) for seed in (None, 11) for kind in ("shuffled", "batch-shuffled")]
    ranks = run_distributed(read_each, 4, [*drawn, ("plain", 2, 2, None), ("user-sampler", 2, 3, None, 1)])
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    *shuffled, (plain, other), (own, other_own) = zip(ranks[0], ranks[2], strict=True)
    for mine, theirs in shuffled:
        for epoch in (slice(0, 3), slice(3, 6)):
            assert sorted(at for batch in mine[epoch] + theirs[epoch] for at in batch) == list(range(12))
        assert mine[:3] != mine[3:]
    assert plain == [[0, 2], [4, 6], [8, 10]] * 2
    # One global batch is what one process would read.
    assert [sorted(a + b) for a, b in zip(plain, other, strict=True)] == read("plain", 1, 4, None)["train"]
    assert (own, other_own) == ([[11, 9, 7], [5, 3, 1]], [[10, 8, 6], [4, 2, 0]])


class Both(Reader):
    """Two training loaders at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.pairs = [*getattr(self, "pairs", []), (batch["a"][0].tolist(), batch["b"][0].tolist())]
        return super().training_step(batch["a"], batch_idx)


def read_both(tp: int, batch: int) -> list[Any]:
    L.seed_everything(3, verbose=False)
    trainer = quiet_trainer(devices=dist.get_world_size(), strategy=SeqParallelStrategy(tp=tp), max_epochs=2)
    module = Both()
    trainer.fit(module, {name: make_loader("shuffled", 12, batch) for name in ("a", "b")})
    return module.pairs


@sees("loaders shuffled alike", "OrderSeed.of_epoch", "1_000_003 * place", "0 * place")
def test_two_shuffled_loaders_have_orders_of_their_own():
    ranks = run_distributed(read_both, 4, 2, 2)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    for which in (0, 1):
        for epoch in (slice(3), slice(3, 6)):
            assert sorted(at for rank in (0, 2) for pair in ranks[rank][epoch] for at in pair[which]) == list(range(12))
    assert [pair[0] for pair in ranks[0]] != [pair[1] for pair in ranks[0]]


class RandomPairs(Sampler):
    """A batch sampler of the user's, whose order is made when it is iterated."""

    def __iter__(self):
        return iter(torch.randperm(12).view(6, 2).tolist())

    def __len__(self) -> int:
        return 6


def read_at_once() -> list[list[int]]:
    data = torch.utils.data.TensorDataset(torch.arange(12), models.tokens(count=12).tensors[0])
    module = Reader()
    torch.manual_seed(dist.get_rank())  # as after a resume, or without a seed
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=1), max_epochs=2)
    trainer.fit(module, DataLoader(data, batch_sampler=RandomPairs()))
    return module.read["train"]


@sees(
    "an order that is agreed on behind the first read", "inject_sampler", "        sampler.set_epoch(epoch)\n", "        pass\n"
)
def test_an_order_is_agreed_on_before_it_is_read():
    """Lightning begins to iterate before it tells the epoch."""
    one, other = run_distributed(read_at_once, 2)
    for epoch in (slice(3), slice(3, 6)):
        assert sorted(at for batch in (*one[epoch], *other[epoch]) for at in batch) == list(range(12))
    assert one[:3] != one[3:]


def drift() -> list[list[int]]:
    """Rank 0 alone draws random numbers between the epochs, as a plotting callback would."""

    class Plots(L.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.is_global_zero:
                torch.rand(3)

    module = Reader()
    strategy = SeqParallelStrategy(tp=2)
    trainer = quiet_trainer(devices=dist.get_world_size(), strategy=strategy, max_epochs=3, callbacks=[Plots()])
    trainer.fit(module, make_loader("shuffled", 12, 4))
    return module.read["train"]


@sees(
    "ranks of a replica shuffle each for itself",
    "ReplicaSampler.set_epoch",
    (
        "            share_streams(self.groups[self.groups.replica_axes], source)\n"
        "            if (generator := self._generator()) is not None:\n                box"
    ),
    "            if generator := None:\n                box",
)
def test_a_draw_of_one_rank_alone_does_not_part_the_replica():
    first, second = run_distributed(drift, 2)
    assert first == second


def test_a_users_distributed_sampler_that_counts_ranks_is_refused():
    with pytest.raises(
        RankFailedError, match=r"num_replicas=2, rank=1, but the ranks of one replica .* num_replicas=1, rank=0"
    ):
        run_distributed(read, 2, "distributed", 2, 4, None)


def noisy() -> list[list[int]]:
    L.seed_everything(3, workers=True, verbose=False)
    module = Reader()
    trainer = quiet_trainer(devices=dist.get_world_size(), strategy=SeqParallelStrategy(tp=2), max_epochs=1)
    trainer.fit(module, DataLoader(Numbered(4, noise=True), 2, num_workers=1))
    return [row.tolist() for row in module.rows]


@pytest.mark.more
def test_augmentations_are_the_same_within_a_replica():
    first, second = run_distributed(noisy, 2)
    assert first == second


# ---- metrics -------------------------------------------------------------------------------------------------------


class Measured(models.GPT):
    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()
        self.collection = MetricCollection({"mean": MeanMetric()})
        self.hidden = [SumMetric()]

    def on_train_start(self) -> None:
        """Averages over a group whose backends are named by device, as a run's groups are on GPUs."""
        if dist.is_initialized():
            group = dist.new_group(list(range(dist.get_world_size())), backend="cpu:gloo")
            rank = dist.get_rank()
            given = (torch.tensor(float(rank)), torch.tensor(rank, dtype=torch.float64), torch.tensor(2 * rank))
            reduce = self.trainer.strategy.reduce
            self.averages = [float(reduce(tensor, group=group, reduce_op="mean")) for tensor in given]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = self.all_gather(batch[0].double()).sum()
        return super().training_step((batch[1],), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        numbers = batch[0].double()
        self.total.update(numbers)
        self.collection.update(numbers)
        self.hidden[0].update(numbers)
        self.log("sum", numbers.sum(), sync_dist=True, reduce_fx="sum")
        self.log("mean", numbers.mean(), sync_dist=True)
        self.log("total", self.total)

    def on_validation_epoch_end(self) -> None:
        self.computed = [float(self.collection.compute()["mean"]), float(self.hidden[0].compute())]
        self.hidden[0].reset()
        self.collection.reset()
        strategy = self.trainer.strategy
        rank = self.trainer.global_rank
        self.decisions = [
            strategy.reduce_boolean_decision(rank == 0, all=False),
            strategy.reduce_boolean_decision(rank == 0, all=True),
            strategy.reduce_boolean_decision(True, all=True),
        ]


def measure(tp: int, batch: int) -> tuple[dict[str, float], list[float], list[float], list[bool]]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    module = Measured()
    strategy = SeqParallelStrategy(tp=tp) if world > 1 else "auto"
    trainer = quiet_trainer(devices=world, strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(Numbered(8), batch), DataLoader(Numbered(8), batch))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return logged, [*module.computed, float(module.seen)], getattr(module, "averages", []), module.decisions


@sees("an average over gloo beside another backend", "OnReplicas.reduce", 'reduce_op="sum")', "reduce_op=reduce_op)")
@sees(
    "metrics over the world",
    "OnReplicas.reduce",
    'self.groups["dp"] if group is None else group',
    "self.environment.world if group is None else group",
)
@sees(
    "torchmetrics over the world",
    "share_metrics",
    "        if group_of_metric is None or getattr",
    "        if False and getattr",
)
def test_metrics_speak_of_replicas_and_decisions_of_the_world():
    expected = measure(1, 4)
    assert expected[0]["sum"] == 28.0
    for world, batch in ((2, 4), (4, 2)):
        mean = (world - 1) / 2
        for logged, computed, averages, decisions in run_distributed(measure, world, 2, batch):
            assert logged == pytest.approx(expected[0])
            assert computed == pytest.approx(expected[1])
            assert averages == [mean, mean, 2 * mean]
            assert decisions == [True, False, True]


class Proved(Measured):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return models.GPT.training_step(self, (batch[1],), batch_idx)


def measure_again() -> tuple[list[float], list[float]]:
    first, second = Proved(), Proved()
    for module, tp in ((first, 2), (second, 4)):
        module.total, module.collection, module.hidden = first.total, first.collection, first.hidden
        strategy = SeqParallelStrategy(tp=tp, plan="infer")  # which must be proved, on a copy
        trainer = quiet_trainer(devices=4, strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
        trainer.fit(module, DataLoader(Numbered(8), 4), DataLoader(Numbered(8), 4))
    return first.computed, second.computed


@sees(
    "a metric keeps the group of an earlier strategy",
    "share_metrics",
    "getattr(metric, _SHARED_GROUP, None) == id(group_of_metric):",
    "False:",
)
def test_metrics_of_a_second_strategy_speak_of_its_replicas():
    for first, second in run_distributed(measure_again, 4):
        assert first == second == [3.5, 28.0]


# ---- prediction -----------------------------------------------------------------------------------------------------


class Scores(models.GPT):
    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"logits": self.model(batch[0])}


class ScoreWriter(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.written: list[list[float]] = []

    def write_on_batch_end(self, trainer, pl_module, prediction, *args) -> None:
        self.written += prediction["logits"].tolist()  # on one rank of a replica alone


def predict_logits() -> tuple[list[type], int]:
    writer = ScoreWriter()
    plan = models.plan(extra=[{"pattern": "model.{tokens,head}", "style": "vocab"}])
    trainer = quiet_trainer(devices=2, strategy=SeqParallelStrategy(tp=2, plan=plan, timeout=30), callbacks=[writer])
    out = trainer.predict(Scores(), models.loader(4, count=8))
    return [type(one["logits"]) for one in out], len(writer.written)


@sees("a writer on one rank gets logits in parts", "Steps.run_step", "            out = made_whole(out)\n", "")
def test_predicted_logits_are_whole_for_a_writer_on_one_rank():
    ranks = run_distributed(predict_logits, 2)
    assert ranks == [([Tensor, Tensor], 8), ([Tensor, Tensor], 0)]
