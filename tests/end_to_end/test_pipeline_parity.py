"""Stages of a pipeline beside all else: one process and many, loss, gradients, norm and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_seqpar.testing import run_distributed
from tests.helpers import models
from tests.helpers.pipelines import check_cases, trainer_of
from tests.helpers.slices import rest
from tests.mutants import sees

FSDP = {"data_parallel": "fsdp"}
COMPILED = {"compile": True, "compile_options": {"backend": "aot_eager"}}
TURNS = {"pp": 2, "virtual_pp": 2}
HOW = {"steps": 3, "accumulate": 3, "clip": 0.05}
TIED: tuple[str, dict[str, Any]] = ("GPT", {"tied": True})
LLAMA = ("HuggingFace", {"family": "llama"})
CACHED = ("HuggingFace", {"family": "llama", "use_cache": True})  # as the library has it, and with buffers
DEEP: tuple[str, dict[str, Any]] = ("GPT", {"tied": True, "layers": 4})
UNTIED: tuple[str, dict[str, Any]] = ("GPT", {"tied": False, "layers": 5})
ENCODER: tuple[str, dict[str, Any]] = ("Encoder", {"batch_first": False})
DEEP_LLAMA = ("HuggingFace", {"family": "llama", "num_hidden_layers": 4})
BIASED: tuple[str, dict[str, Any]] = ("distributed.test_pipeline:Biased", {})
ADAPTED = ("Adapted", {"family": "llama", "targets": ["q_proj", "down_proj"]})


FAMILIES = [
    BIASED, *(("Zoo", {"kind": kind}) for kind in ("gqa", "alibi")),
    *(("HuggingFace", {"family": family}) for family in ("qwen3", "gpt2", "gpt_neox", "mistral", "phi3")),
]  # fmt: skip


@sees(
    "pp: replicas wait for gradients that are elsewhere",
    "HeldParameters.hiding_from_ddp",
    "if not self.holds(name)]",
    "if not name]",
    case="dp",
)
@sees(
    "pp: gradients that several stages hold are subtracted",
    "HeldParameters._sum_over",
    "functools.reduce(torch.add, parts.values())",
    "functools.reduce(torch.sub, parts.values())",
    case="four",
)
@sees(
    "pp: parts of a sequence arrive as whole ones",
    "_placed_as",
    "if isinstance(nothing, SeqPart) else x",
    "if not isinstance(nothing, Tensor) else x",
    case="cp",
)
@sees(
    "turns: gradients as large as without accumulation",
    "Stages._run_backward",
    "gradient = self._gradient_of(one).to(loss.dtype)",
    "gradient = torch.ones_like(loss)",
    case="turns",
)
@sees(
    "turns: replicas keep gradients of their own",
    "Stages._run_window",
    "if ddp is not None and reduces:",
    "if ddp is not None and not reduces:",
    case="turns-four",
)
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [(*TIED, {"pp": 2, "recompute": "full"}), (*LLAMA, {"pp": 2, "recompute": "selective"}),
             (*TIED, {"pp": 2, "tile_mlp": 4, "loss_chunk": 4}), (*ADAPTED, {"pp": 2}), (*CACHED, {"pp": 2})]),
        (4, [(*TIED, {"pp": 2}), (*TIED, {"pp": 2, **FSDP}), (*LLAMA, {"pp": 2, **FSDP, "recompute": "full"})]),
        (4, [(*TIED, {"pp": 2, "cp": 2}), (*LLAMA, {"pp": 2, "cp": 2, "cp_method": "ring"})]),
        (4, [(*TIED, {"pp": 2, "tp": 2, "recompute": "full"}), (*TIED, {"pp": 2, "tp": 2, "order": "dp-cp-tp-pp"})]),
        rest(4, [(*TIED, {"pp": 2, "cp": 2, **FSDP}), (*LLAMA, {"pp": 2, "cp": 2, "recompute": "selective"}),
                 (*TIED, {"pp": 2, "cp": 2, "order": "cp-pp-dp-tp", "tile_mlp": 4})]),
        rest(4, [(*TIED, {"pp": 2, "tp": 2, "sp": False, "recompute": "selective", "tile_mlp": 4, "loss_chunk": 4}),
                 (*LLAMA, {"pp": 2, "tp": 2, "recompute": "selective", "tile_mlp": 4, "loss_chunk": 4}),
                 (*ADAPTED, {"pp": 2, "tp": 2}), (*TIED, {"pp": 2, "tp": 2, "vocab": False})]),
        rest(4, [(*TIED, {"pp": 2, **COMPILED}), (*TIED, {"pp": 2, "order": "dp-pp-cp-tp"}),
                 (*TIED, {"pp": 2, "ddp": {"find_unused_parameters": True}}),
                 (*TIED, {"pp": 2, **FSDP, "fsdp": {"reshard_after_forward": False}})]),
        (2, [(*case, {"pp": 2}) for case in FAMILIES]),
        (4, [(*DEEP, {"pp": 4}), (*BIASED, {"pp": 4}), (*FAMILIES[1], {"pp": 2, "tp": 2}), (*FAMILIES[4], {"pp": 2, "tp": 2})]),
        (2, [(*DEEP, TURNS), (*UNTIED, {**TURNS, "recompute": "full"}), ("GPT", {"layers": 6}, {"pp": 2, "virtual_pp": 3}),
             (*DEEP_LLAMA, {**TURNS, "recompute": "selective", "tile_mlp": 4, "loss_chunk": 4})]),
        (4, [(*DEEP, TURNS), (*UNTIED, {**TURNS, **FSDP}), (*DEEP, {**TURNS, "tp": 2}),
             ("GPT", {"layers": 8}, {"pp": 4, "virtual_pp": 2})]),
        rest(4, [(*DEEP, {**TURNS, "cp": 2}), (*DEEP_LLAMA, {**TURNS, "tp": 2, "sp": False}), (*DEEP, {**TURNS, **COMPILED}),
                 (*DEEP_LLAMA, {**TURNS, **FSDP, "fsdp": {"reshard_after_forward": False}, "recompute": "full"}),
                 (*DEEP, {**TURNS, "ddp": {"find_unused_parameters": True}}), (*UNTIED, {**TURNS, "pp_layers": [1, 1, 2, 1]})]),
        rest(8, [(*TIED, {"pp": 2, "tp": 2}), (*TIED, {"pp": 2, "tp": 2, **FSDP}), (*TIED, {"pp": 2, "cp": 2, "tp": 2})]),
    ],
    ids=["recompute", "dp", "cp", "tp", "cp-more", "tp-more", "dp-more",
         "families", "four", "turns", "turns-four", "turns-more", "three axes"],
)  # fmt: skip
@pytest.mark.more
def test_stages_beside_all_else_are_one_process(world, cases):
    check_cases(world, cases, HOW)


@sees(
    "pp: the micro-batch that came last goes back first",
    "OneForwardOneBackward.add",
    "self._waiting.popleft()()",
    "self._waiting.pop()()",
    case="pp2",
)
@sees(
    "pp: gradients of tied weights not summed",
    "HeldParameters.sum_shared",
    "        if not shared:\n",
    "        if shared:\n",
    case="pp2",
)
@sees(
    "pp: what comes back is scaled by what stands for the loss",
    "_HandOn.backward",
    "ctx.message)[0] if ctx.wants",
    "ctx.message)[0] * grad if ctx.wants",
    case="pp2",
)
@sees(
    "pp: a stage's activation is that of another block",
    "Stage._take_at",
    "self._is_awaited = False",
    "self._is_awaited = name == self._cut.blocks[self.number][0]",
    case="pp2",
)
@sees(
    "pp: a stage's graph is followed across the cut",
    "_Traced.take",
    "put_argument(where, _changeable(leaf), args, kwargs)",
    "put_argument(where, x, args, kwargs)",
    case="pp2",
)
@sees(
    "pp: tied weights count twice in the norm",
    "global_grad_norm",
    'found.stages[0] != groups.rank("pp")',
    'groups.rank("pp") not in found.stages',
    case="pp2",
)
@sees(
    "pp: a stage's norm is that of its own gradients",
    "global_grad_norm",
    "    if in_stages:\n        dist.all_reduce",
    "    if norm_type < 0:\n        dist.all_reduce",
    case="pp2",
)
@sees(
    "pp: parameters as the last stage has them",
    "from_holder",
    'groups.ranks("pp")[layout.stages[0]]',
    'groups.ranks("pp")[-1]',
    case="pp2",
)
@sees(
    "pp: a window's last backwards do not run",
    "Stages.run_when_due",
    "is_last else backward, is_last=is_last)",
    "is_last else backward, is_last=False)",
    case="pp2",
)
@pytest.mark.parametrize(
    ("world", "sizes"),
    [(2, {"pp": 2}), (4, {"pp": 2, "tp": 2}), rest(4, {"pp": 2, "tp": 2, "sp": False})],
    ids=["pp2", "pp2-tp2", "pp2-tp2-no-sp"],
)
def test_stages_are_one_process(world, sizes):
    check_cases(world, [(*case, sizes) for case in (TIED, UNTIED, ENCODER)], HOW)


class Grows(models.GPT):
    """In the second window the gradient of one parameter, which one stage holds, is infinite."""

    def __init__(self, name: str) -> None:
        super().__init__(tied=False, layers=4)
        self.seen: list[tuple[bool, float]] = []
        self.get_parameter(name).register_hook(self._spoil)

    def _spoil(self, grad: torch.Tensor) -> torch.Tensor:
        return grad + float("inf") if len(self.seen) == 1 else grad

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.begin = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            held = [(a, b) for a, b in zip(self.begin, self.parameters(), strict=True) if not a.isnan().any()]
            moved = any(not torch.equal(a, b) for a, b in held)
            self.seen.append((moved, self.trainer.precision_plugin.scaler.get_scale()))


def overflow(name: str, sizes: dict[str, Any]) -> list[tuple[bool, float]]:
    module = Grows(name)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3))
    trainer = trainer_of(
        sizes, accumulate_grad_batches=2, max_steps=-1, max_epochs=1, plugins=[plugin], precision=None,
        limit_train_batches=6, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, models.loader(2, count=64))
    return module.seen


@sees(
    "pp: a stage skips a step alone",
    "SeqParallelStrategy.setup",
    "share_overflows(self.precision_plugin, env.world)",
    "share_overflows(self.precision_plugin, self.groups[self.groups.holder_axes])",
)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("model.blocks.0.mlp.up.weight", {"pp": 2}),
        rest("model.blocks.3.mlp.up.weight", {"pp": 2}),
        ("model.blocks.2.mlp.up.weight", TURNS),
    ],
    ids=["first", "last", "turns"],
)
def test_all_stages_skip_the_same_step(name, sizes):
    for seen in run_distributed(overflow, 2, name, sizes):
        assert seen == [(True, 8.0), (False, 4.0), (True, 4.0)]
