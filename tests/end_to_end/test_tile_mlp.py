"""MLPs that compute some tokens at a time: equal to one process, and what they keep does not depend on their width."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seqpar import SeqParallelStrategy, unshard
from lightning_seqpar.context.seq_part import local_of
from lightning_seqpar.distributed.autograd import in_backward
from lightning_seqpar.testing import RankFailedError, run_distributed
from lightning_seqpar.verify.parity import compare
from tests.helpers import models, zoo
from tests.helpers.fit import fit, metered, quiet_trainer
from tests.mutants import sees

TILE = 24  # tokens: 3 positions of 8 sequences
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt": ("GPT", {}, {"length": 9}),
    "llama": ("HuggingFace", {"family": "llama", "loss": "user"}, {}),
    "gpt2": ("HuggingFace", {"family": "gpt2", "loss": "user"}, {}),
}
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-no-sp": (2, {"tp": 2, "sp": False}),
    "tp2-full": (2, {"tp": 2, "recompute": "full"}),
    "tp4": (4, {"tp": 4}),
    "dp2-tp2-fsdp": (4, {"tp": 2, "data_parallel": "fsdp"}),
    "cp2": (2, {"cp": 2}),
    "cp2-ring-full": (2, {"cp": 2, "cp_method": "ring", "recompute": "full"}),
    "cp2-fsdp": (2, {"cp": 2, "data_parallel": "fsdp"}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}),
    "tp2-cp2-no-sp": (4, {"tp": 2, "cp": 2, "sp": False}),
}
SHORT = {("gpt", "tp2"), ("llama", "tp1"), ("gpt2", "cp2"), ("llama", "tp2-cp2"), ("gpt", "dp2-tp2-fsdp"), ("gpt", "tp2-full")}


@sees(
    "tile_mlp: a tile is as long as this rank's part of it",
    "FrameStack.alone",
    "length = shape[dim] * self._size if is_shard else None",
    "length = shape[dim] if is_shard else None",
    case="gpt-tp2",
)
@pytest.mark.parametrize(
    ("model", "topology"),
    [
        pytest.param(model, topology, marks=[] if (model, topology) in SHORT else pytest.mark.matrix)
        for topology in TOPOLOGIES
        for model in MODELS
    ],
)
def test_parity_with_one_process(model, topology):
    name, args, options = MODELS[model]
    world, strategy = TOPOLOGIES[topology]
    reference = fit(name, args, steps=3, **options)
    strategy = {**strategy, "tile_mlp": TILE // (world // strategy.get("tp", 1) // strategy.get("cp", 1))}
    got = run_distributed(fit, world, name, args, steps=3, world=world, strategy=strategy, **options)
    compare(reference, got[0]).raise_if_failed()


def dropped(strategy: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """What the first step's dropouts left out on this rank, between column and row and behind the row; and between them again."""
    module, masks = Small(drop=0.5), (list[Tensor](), list[Tensor]())

    def note(dropout: Any, args: Any, out: Any) -> None:
        again = in_backward()
        if out.requires_grad and not (again and dropout is module.blocks[0].mlp.behind):  # the last, which a recompute cuts off
            masks[again].append(local_of(out).detach() == 0)

    class Noting(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            for dropout in (module.blocks[0].mlp.drop, module.blocks[0].mlp.behind):
                dropout.register_forward_hook(note)

    trainer = quiet_trainer(
        devices=dist.get_world_size(),
        strategy=SeqParallelStrategy(self_check=False, **strategy),
        max_steps=1,
        callbacks=[Noting()],
    )
    trainer.fit(module, models.loader(2, length=12, count=2))
    return masks


@sees(
    "tile_mlp: a tile drops out anew in the backward",
    "TiledCall._run_tile",
    "use_reentrant=False)",
    "use_reentrant=False, preserve_rng_state=False)",
    case="{'tp': 2}-[True, True]",
)
@sees(
    "tile_mlp: ranks of cp drop out alike",
    "TiledCall._call",
    "nullcontext() if place is None else drawn_apart(place)",
    "nullcontext()",
    case="{'cp': 2}-[True, True]",
)
@pytest.mark.parametrize(
    ("strategy", "apart"),
    [({"cp": 2}, [True, True]), ({"tp": 2}, [True, True]), ({"tp": 2, "sp": False}, [True, False])],
    ids=str,
)
def test_a_tile_drops_out_the_same_again_and_ranks_for_themselves_what_is_their_own(strategy, apart):
    found = run_distributed(dropped, 2, {**strategy, "tile_mlp": 8})
    for first, again in found:
        assert len(first) == 2 * len(again)
        assert all(map(torch.equal, first[::2], reversed(again)))  # the backward makes the last tile first
    one, other = (first for first, _ in found)
    assert len(one) == len(other) > 2
    assert [not torch.equal(a, b) for a, b in zip(one, other, strict=True)] == apart * (len(one) // 2)


@sees("cp: ranks drop out alike", "operations:draws", "with drawn_apart(args[0]._place.chunks.rank):", "if True:")
def test_without_tiles_too():
    """tp 2 × cp 2 without sp: between column and row all four ranks draw apart, behind the row those of cp."""
    masks = [first for first, _ in run_distributed(dropped, 4, {"tp": 2, "cp": 2, "sp": False})]
    differ = [[not torch.equal(masks[0][at], masks[rank][at]) for rank in (1, 2, 3)] for at in (0, 1)]
    assert differ == [[True, True, True], [False, True, True]]


class MLP(nn.Module):
    def __init__(self, width: int, mixes: bool, drop: float) -> None:
        super().__init__()
        self.up, self.down, self.mixes = nn.Linear(16, width), nn.Linear(width, 16), mixes
        self.drop, self.behind = nn.Dropout(drop), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(F.gelu(self.up(x)))
        return self.behind(self.down(h + 0.1 * F.pad(h, (0, 0, 1, 0))[:, :-1] if self.mixes else h))


class Small(models.Blocks):
    def __init__(self, width: int = 64, mixes: bool = False, drop: float = 0.0) -> None:
        super().__init__(lambda: zoo.PreNorm(16, zoo.EinsumAttention(16, 4), MLP(width, mixes, drop)))


def kept_of(strategy: dict[str, Any]) -> list[int]:
    """Bytes kept for the backward with MLPs of two widths."""
    found = []
    for width in (64, 256):
        meter, _ = metered(Small(width), SeqParallelStrategy(**strategy), models.loader(2, length=24, count=40))
        found.append(meter.saved_bytes)
    return found


@sees(
    "tile_mlp: what is between columns and rows is kept",
    "TiledCall._run_tile",
    "torch.is_grad_enabled() and saved_tensor_hooks_allowed()",
    "False",
    case="2-{'tp': 2, 'regather': True}",
)
@pytest.mark.parametrize(
    ("world", "strategy"),
    [(2, {"tp": 2, "regather": True}), (2, {"cp": 2}), pytest.param(1, {}, marks=pytest.mark.matrix)],
    ids=str,
)
@pytest.mark.more
def test_what_is_kept_does_not_depend_on_the_width_of_the_mlp(world, strategy):
    narrow, wide = run_distributed(kept_of, world, {**strategy, "tile_mlp": 8})[0]
    assert narrow == wide


def train(tile: int, mixes: bool, **strategy: Any) -> list[bool]:
    """For each MLP, whether it is called in tiles while it trains, and whether it still is when the model is whole again."""
    module = Small(mixes=mixes)
    trainer = quiet_trainer(devices=1 if strategy.get("tp", 1) == 1 else 2, max_steps=1,
                            strategy=SeqParallelStrategy(tile_mlp=tile, **strategy))  # fmt: skip
    trainer.fit(module, models.loader(2, length=12, count=4))
    tiled = [block.mlp._compiled_call_impl is not None for block in module.blocks]
    if strategy:
        unshard(module)
    return [*tiled, *(block.mlp._compiled_call_impl is not None for block in module.blocks)]


def test_the_whole_model_has_no_tiles():
    assert run_distributed(train, 2, 8, False, tp=2)[0] == [True, True, False, False]


@sees(
    "tile_mlp: the self-check's MLPs run whole",
    "self_check",
    "tiles = MLPTiles(config.tile_mlp, least=3)",
    "tiles = MLPTiles(how.tile_mlp)",
    case="1",
)
@pytest.mark.parametrize("tp", [1, 2])
def test_an_mlp_that_looks_at_other_positions_is_refused(tp):
    options = {"tp": tp} if tp > 1 else {}
    with pytest.raises(RankFailedError, match=r"an MLP that looks at other positions can't run in tiles: leave tile_mlp out"):
        run_distributed(train, tp, 4096, True, **options)  # more than the sequence has: the self-check cuts it nonetheless


def test_without_an_mlp_the_message_says_what_one_is():
    strategy = {"tp": 2, "tile_mlp": 8}
    with pytest.raises(RankFailedError, match=r"tile_mlp=8: in the blocks \(encoder.layers.\*\) no module is the MLP"):
        run_distributed(fit, 2, "Encoder", {"batch_first": True}, steps=1, world=2, strategy=strategy)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match=r"tile_mlp=8 with compile=True"):
        SeqParallelStrategy(tile_mlp=8, compile=True)
    with pytest.raises(ValueError, match=r"tile_mlp=0: write a number of tokens"):
        SeqParallelStrategy(tile_mlp=0)
