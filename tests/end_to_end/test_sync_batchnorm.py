"""``Trainer(sync_batchnorm=True)``: batch norms of the global batch, against one process."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from byte_gpt import Block, ByteGPT
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_seqpar import SeqParallelStrategy, unshard
from lightning_seqpar.parallel.beside_tp import sync_batch_norms
from lightning_seqpar.testing import run_distributed
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.parity import ParityRecorder, Trace, compare
from tests.helpers import models, third_party
from tests.helpers.fit import quiet_trainer
from tests.mutants import sees

BATCH, STEPS = 8, 3


class Activated(nn.BatchNorm2d):
    """A batch norm with a forward of its own, as timm has it."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(int(self.training))
        rate = self.momentum
        return F.silu(F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, rate))


class NormedGPT(ByteGPT):
    """Batch norms of all kinds around the blocks; in the blocks too, over positions, with ``within``."""

    def __init__(self, within: bool) -> None:
        super().__init__(dim=16, n_head=4, n_layer=2, context=16, tied=False, vocab=31)
        self.two = nn.ModuleList([nn.BatchNorm1d(16), nn.BatchNorm1d(16, momentum=None)])
        self.bare = nn.BatchNorm1d(9, affine=False)
        self.untracked = nn.BatchNorm3d(9, track_running_stats=False)
        self.activated = Activated(9, momentum=0.3)
        self.frozen = nn.BatchNorm1d(16).requires_grad_(False)
        for block in self.blocks if within else ():
            block.norm1 = OverPositions()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for norm in (*self.two, self.frozen):
            x = norm(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        x = x + self.bare(x)
        if self.training:  # in evaluation it normalises by the replica's own batch, as torch's does
            x = x + self.untracked(x[..., None, None])[..., 0, 0]
        return self.head(x + self.activated(x[..., None])[..., 0])


class OverPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x.transpose(1, 2)).transpose(1, 2)


class BatchNorms(models.GPT):
    """Its loss is a sum over samples, divided by the ``share`` of the global batch that a replica stands for."""

    def __init__(self, within: bool = False, share: float = BATCH) -> None:
        super().__init__(tied=False)
        torch.manual_seed(0)
        self.model, self.share = NormedGPT(within), share
        models.perturb(self)

    def losses(self, batch: Any) -> Tensor:
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return losses.view(len(tokens), -1).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.losses(batch).sum() / self.share

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.losses(batch).mean(), sync_dist=True)


UNEVEN = (3, 5)
"""How many samples of each global batch the two replicas have."""
CASES: dict[str, dict[str, Any]] = {
    "tp1": {"tp": 1},
    "dp2-tp2-fsdp": {"tp": 2, "data_parallel": "fsdp", "uneven": True},
    "dp2-tp2-no-sp": {"tp": 2, "sp": False, "within": True, "self_check": True},
    "dp2-tp2-within": {"tp": 2, "within": True, "plan": [{"pattern": "model.blocks.*.norm1", "style": "whole"}]},
    "dp2-tp2-behind columns": {"tp": 2, "kind": "batch_normed"},
}
ALWAYS = ("tp1", "dp2-tp2-within", "dp2-tp2-fsdp")


class BehindColumns(third_party.ThirdParty):
    """Batch norms of features that are dealt out over tp."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx), sync_dist=True)


def train(world: int = 1, uneven: bool = False, within: bool = False, kind: str | None = None, **strategy: Any) -> Any:
    """Train three steps: the trace, the buffers at the end, what validation logged, and whether unsharding gave the model back."""
    torch.manual_seed(0)
    dp = world // strategy.get("tp", 1)
    module: Any = BatchNorms(within, BATCH / dp) if kind is None else BehindColumns(kind)
    classes = [type(each) for each in module.modules()]
    recorder = ParityRecorder()
    trainer = quiet_trainer(
        devices=world,
        strategy=SeqParallelStrategy(**{"self_check": False, **strategy}) if strategy else "auto",
        sync_batchnorm=True,
        max_steps=STEPS,
        use_distributed_sampler=not uneven,
        num_sanity_val_steps=0,
        callbacks=[recorder],
    )
    count = BATCH * STEPS
    loader = models.loader(BATCH // dp, count=count)
    if uneven:  # of every eight samples the first replica has three
        of_first = dist.get_rank() // 2 == 0
        mine = [at for at in range(count) if (at % BATCH < UNEVEN[0]) == of_first]
        loader = DataLoader(Subset(models.tokens(count), mine), batch_size=UNEVEN[0 if of_first else 1])
    trainer.fit(module, loader, models.loader(BATCH // dp, count=BATCH))
    logged = float(trainer.callback_metrics["val"])
    if uneven:
        recorder.trace.losses = []
    unshard(module)
    state = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return recorder.trace, state, logged, classes == [type(each) for each in module.modules()]


def train_all(names: list[str]) -> dict[str, Any]:
    return {name: train(dist.get_world_size(), **CASES[name]) for name in names}


@functools.cache
def trained(always: bool) -> list[dict[str, Any]]:
    return run_distributed(train_all, 4, [name for name in CASES if (name in ALWAYS) == always], timeout=400.0)


@functools.cache
def reference(**case: Any) -> Any:
    return train(**case)


@sees(
    "batch norms of the world's ranks",
    "sync_batch_norms",
    'make_synced(module, name, groups["dp"])',
    'make_synced(module, name, groups["dp", "tp"])',
    case="dp2-tp2-within",
)
@sees(
    "the gradient through the statistics of other replicas is lost",
    "_moments",
    "means, variances, counts = gathered.split(",
    "means, variances, counts = gathered.detach().split(",
    case="tp1",
)
@sees(
    "batches of other sizes count alike in a batch norm",
    "_moments",
    "mean = (means * counts).sum(0) / total",
    "mean = means.mean(0)",
    case="dp2-tp2-fsdp",
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.matrix) for name in CASES])
def test_parity_with_one_process(name):
    case = CASES[name]
    want = reference(**{key: case[key] for key in ("within", "kind") if key in case})
    for trace, state, logged, undone in (each[name] for each in trained(name in ALWAYS)):
        expected: Trace = copy.copy(want[0])
        if case.get("uneven"):
            expected.losses = []
        compare(expected, trace).raise_if_failed()
        assert state.keys() == want[1].keys()
        for key, value in want[1].items():
            assert float((state[key] - value).abs().max()) <= 1e-9, key
        assert abs(logged - want[2]) <= 1e-9
        assert undone


# ---- the norm itself -------------------------------------------------------------------------------------------


def synced(module: nn.Module) -> nn.Module:
    topology = ProcessTopology(["dp", "tp"], [dist.get_world_size(), 1])
    sync_batch_norms(module, ParallelGroups(topology, dist.get_rank()), every=True)
    return module


def norms(world: int) -> dict[str, Any]:
    """One norm on ranks of which one has no samples: outputs, statistics and gradients."""
    rank, found = dist.get_rank() if world > 1 else 0, {}
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 5, 3, generator=generator, dtype=torch.float64) * 3 + 100
    sizes = [4, 0, 2][:world]
    mine = whole.split(sizes)[rank] if world > 1 else whole
    norm: Any = nn.BatchNorm1d(5, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1.0, 6))
    if world > 1:
        norm = synced(norm)
    x = mine.clone().requires_grad_()
    out = norm(x)
    found["out"], found["mean"], found["var"] = out.detach(), norm.running_mean.clone(), norm.running_var.clone()
    inputs = [x, norm.weight, norm.bias]
    first = torch.autograd.grad(out.pow(3).sum(), inputs, create_graph=True)
    found["x"], found["weight"], found["bias"] = (each.detach() for each in first)
    found["twice"] = torch.autograd.grad(first[0].pow(2).sum(), x)[0]
    return found


def norms_and_copies() -> dict[str, Any]:
    """The norm of three ranks, and what else becomes of such a norm."""
    found, rank = norms(3), dist.get_rank()
    norm: Any = synced(nn.BatchNorm2d(2))
    x = torch.full((1, 2, 1, 1), float(rank))
    torch.save(norm, io.BytesIO())
    assert type(pickle.loads(pickle.dumps(norm))) is nn.BatchNorm2d
    for each in (copy.deepcopy(norm), norm):
        each(x)
        assert each.running_mean[0].item() == pytest.approx(0.1)
    assert synced(nn.BatchNorm2d(2))(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="all replicas together have 1 value of each channel"):
        norm(x[: int(rank == 0)])
    untracked = synced(nn.BatchNorm2d(2, track_running_stats=False)).eval()
    if rank == 0:  # in evaluation nobody waits for anybody
        untracked(torch.cat([x, x]))
    own: Any = nn.SyncBatchNorm(2)
    sync_batch_norms(own, ParallelGroups(ProcessTopology(["dp", "tp"], [3, 1]), rank), every=False)
    own(x)
    assert float(own.running_mean[0]) == pytest.approx(0.1)
    return found


@sees(
    "batch norms wait for each other in evaluation",
    "make_synced.forward",
    "if not self.training:",
    "if self.track_running_stats and not self.training:",
)
@sees("a batch norm of one value is trained", "_moments", "if count <= 1 and int(total) <= 1:", "if count < 0:")
def test_the_norm_of_several_ranks_is_that_of_one():
    want, got = norms(1), run_distributed(norms_and_copies, 3)
    merged = {name: torch.cat([each[name] for each in got]) for name in ("out", "x", "twice")}
    merged |= {name: sum(each[name] for each in got) for name in ("weight", "bias")}
    for found in got:
        torch.testing.assert_close({**found, **merged}, want, rtol=0, atol=1e-9)


# ---- what is refused -----------------------------------------------------------------------------------------


class Classes(Callback):
    """The class of a batch norm, and whether it is the user's, while it trains."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen = type(pl_module.model.frozen)


def manners() -> None:
    def fit(module: Any, strategy: dict[str, Any], **options: Any) -> Any:
        classes = Classes()
        chosen = SeqParallelStrategy(self_check=False, **strategy)
        trainer = quiet_trainer(devices=2, strategy=chosen, max_steps=1, callbacks=[classes], **options)
        trainer.fit(module, models.loader(4))
        return classes.seen

    def refused(module: Any, says: str, strategy: dict[str, Any], **options: Any) -> None:
        with pytest.raises(ValueError, match=says):
            fit(module, strategy, **options)

    module = BatchNorms()
    split = {"data_parallel": "fsdp"}
    assert fit(module, split, sync_batchnorm=True) is not nn.BatchNorm1d
    assert fit(module, split) is nn.BatchNorm1d
    module = BatchNorms(within=True)
    says = "model.blocks.0.norm1.bn: sync_batchnorm=True, and this batch norm lies in model.blocks.0"
    refused(module, says, {"compile": True}, sync_batchnorm=True)
    assert (type(module.model.blocks[0]), type(module.model.frozen)) == (Block, nn.BatchNorm1d)
    module.model.frozen.forward = lambda x: x
    says = "model.frozen: sync_batchnorm=True, but the forward of this BatchNorm1d was replaced"
    refused(module, says, {}, sync_batchnorm=True)
    assert type(module.model.two[0]) is nn.BatchNorm1d
    refused(BatchNorms(), "sync_batchnorm", {}, sync_batchnorm=dist.get_rank() == 0)


@sees("batch norms of compiled blocks are synced", "is_compiled", "NAME_KEY in vars(module)", "False")
@sees("a replaced forward of a batch norm is not seen", "make_synced", 'if "forward" in vars(module) or', "if")
@sees(
    "ranks that sync batch norms and ranks that do not",
    "ModelSetup.shard",
    '"sync_batchnorm": self._syncs_batch_norms}',
    '"sync_batchnorm": True}',
)
@sees(
    "a second run keeps the synced batch norms of the first",
    "ModelSetup.shard",
    "config, self._syncs_batch_norms, changes",
    "config, changes",
)
def test_what_cannot_be_synced_is_refused():
    run_distributed(manners, 2)
