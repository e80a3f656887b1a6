"""``verify_parity`` and ``seqpar verify``: right is called right, and wrong is called wrong, with the cause in words."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_seqpar import SeqParallelStrategy, verify_parity
from lightning_seqpar.cli.main import main
from lightning_seqpar.testing import assert_parity
from tests.helpers.models import GPT, Encoder
from tests.helpers.processes import ROOT, environment, survivors
from tests.helpers.slices import rest
from tests.mutants import sees

TOKENS = [torch.randint(0, 31, (8, 13), generator=torch.Generator().manual_seed(3))]


@sees(
    "verify: every replica reads the first one's samples",
    "Feed.train_dataloader",
    "slice(own * self._micro_batches, (own + 1) * self._micro_batches)",
    "slice(0, self._micro_batches)",
    case="{'tp': 2}-4",
)
@pytest.mark.parametrize(
    ("config", "world"),
    [
        ({"tp": 2}, 4),
        rest({"tp": 2, "data_parallel": "fsdp", "checkpoint": {"format": "sharded"}}, 4),
        ({"cp": 2}, 2),
        ({"pp": 2, "virtual_pp": 2}, 2),
        ("ddp", 2),
        rest({"tp": 2, "compile": True}, 2),
    ],
    ids=str,
)
def test_what_is_right_is_called_right(config, world):
    found = assert_parity(functools.partial(GPT, layers=4), TOKENS, config, world_size=world)
    assert found.verdict.startswith("RIGHT: ")
    assert "length 9" in str(found), "the second batch is shorter"
    assert any("resumed" in row.quantity for row in found.rows)
    assert max(row.error for row in found.rows) <= 1e-9


def make_plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False)


def test_a_plain_module_trains_by_a_projection_of_its_outputs():
    x = torch.randn(4, 12, 16, generator=torch.Generator().manual_seed(0))
    found = assert_parity(make_plain, x, {"tp": 2}, world_size=4)
    assert found.notes == []


class Manual(GPT):
    """Optimizes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.more
def test_a_module_that_optimizes_by_itself():
    assert_parity(Manual, TOKENS, {"tp": 2}, world_size=4)


class Normed(L.LightningModule):
    """A residual MLP with norms, sharded by hand with torch's styles, as ModelParallelStrategy asks its users to.

    Args:
        forgets: leave the norms out of the plan: they see parts of sequences, and nobody sums their gradients.
    """

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.norm = nn.Embedding(31, 16), nn.LayerNorm(16)
        self.up, self.down, self.out = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 31)
        self.forgets = forgets

    def configure_model(self) -> None:
        parts, whole = Shard(1), Replicate()
        plan = {
            "embed": RowwiseParallel(input_layouts=whole, output_layouts=parts),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=parts),
            "down": RowwiseParallel(output_layouts=parts),
            "out": PrepareModuleInput(input_layouts=parts, desired_input_layouts=whole, use_local_output=True),
        }
        if self.forgets:
            del plan["norm"]
        parallelize_module(self, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        return F.cross_entropy(self.out(x + self.down(self.up(self.norm(x)).relu())).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def two_by_torch() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)


@sees(
    "verify: ranks are not compared with each other",
    "Sides._hint",
    "if len(seen) == len(digests) and _apart(seen) > _EXACT_RANKS * _largest(seen):",
    "if False:",
)
def test_a_plan_of_somebody_else_s_is_right_or_its_norms_are_not_summed():
    tokens = TOKENS[0][:, :12]
    assert_parity(functools.partial(Normed, False), tokens, two_by_torch)
    found = verify_parity(functools.partial(Normed, True), tokens, two_by_torch)
    assert found.verdict == (
        "WRONG: ModelParallelStrategy on 2 ranks does not train as one process does; the gradient of step 1 of norm.weight, "
        "norm.bias (2 parameters): each rank holds a part of it, and the parts add up to the right one: the sum over the ranks "
        "is missing"
    )


class Clipped(Normed):
    """Clips, which changes gradients in place."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(0.01)


@sees(
    "verify: gradients change as they are clipped",
    "own_whole",
    "return whole.clone() if whole.untyped_storage().data_ptr() == own.untyped_storage().data_ptr() else whole",
    "return whole",
)
def test_gradients_that_are_clipped_in_place_are_compared_as_they_were():
    assert_parity(functools.partial(Clipped, False), TOKENS[0][:, :12], two_by_torch)


class Padded(GPT):
    """Divides its loss by the number of tokens that are no padding, of all replicas."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = (batch[0][:, 1:] > 9).double()
        losses = F.cross_entropy(self.model(batch[0][:, :-1]).transpose(1, 2), batch[0][:, 1:], reduction="none")
        return (losses * kept).sum() / self.all_gather(kept.sum()).mean()


@sees(
    "verify: losses of whole batches are wrong",
    "verify_parity",
    "if not found.ok and first.replicas > 1 and whole.parts > 1:",
    "if False:",
)
def test_a_loss_divided_by_a_number_of_the_whole_batch_is_right_and_told():
    (note,) = assert_parity(Padded, TOKENS, "ddp").notes
    assert note.startswith("replicas train as one process does that reads their parts together")


class Unsynced(DDPStrategy):
    """Data parallelism that forgets to average."""

    def _setup_model(self, model: nn.Module) -> Any:
        return model


class Doubled(SeqParallelStrategy):
    """Counts what one linear contributes twice."""

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        for name, parameter in self.lightning_module.named_parameters():
            if name.endswith("qkv.weight"):
                parameter.register_hook(lambda grad: 2 * grad)


class Forgetful(SeqParallelStrategy):
    """Saves checkpoints without what the optimizer remembers."""

    def optimizer_state(self, optimizer: Any) -> Any:
        saved = super().optimizer_state(optimizer)
        for state in (saved or {}).get("state", {}).values():
            for value in state.values():
                value.zero_()
        return saved


WRONG = {  # what is trained, by what strategy, and what is told
    "averages": (GPT, Unsynced, r"gradient of step 1 of .* their mean is the right one: they are not averaged"),
    "twice": (
        GPT,
        functools.partial(Doubled, tp=2, self_check=False),
        r"gradient of step 1 of model.blocks.\*.attn.qkv.weight .*: exactly 2.0 × too large",
    ),
    "checkpoint": (GPT, functools.partial(Forgetful, tp=2), r"the weight after step 3, resumed of"),
}


@sees(
    "verify: what resumes is not compared",
    "Sides.compare",
    '            rows.append(self._weights("resumed", 1, "weight after step 3, resumed"))\n',
    "            pass\n",
    case="checkpoint",
)
@pytest.mark.parametrize("case", WRONG)
def test_what_differs_first_is_told(case):
    make, strategy, says = WRONG[case]
    found = verify_parity(make, TOKENS, strategy)
    assert found.status == "wrong"
    assert re.search(says, found.verdict), found.verdict
    if case == "checkpoint":
        assert [row.quantity for row in found.rows if not row.ok] == ["the weights after step 3, resumed (absolute)"]


class Factored(GPT):
    """Its optimizer factors the second moments of whole matrices."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters())


class Failing(GPT):
    """Raises on one rank alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if os.environ.get("RANK") == "1":
            raise RuntimeError("out of luck")
        return super().training_step(batch, batch_idx)


def test_a_refusal_is_one_sentence_and_a_failure_names_what_was_raised():
    refused = verify_parity(Factored, TOKENS, {"tp": 2})
    assert refused.verdict.startswith(
        "REFUSED: tp 2 on 2 ranks: torch.optim.Adafactor where parameters are divided over 2 ranks: "
    )
    failed = verify_parity(Failing, TOKENS, "ddp")
    assert failed.verdict == "FAILED: ddp on 2 ranks: RuntimeError: out of luck"
    assert "training_step" in failed.trace
    with pytest.raises(ValueError, match="one process can't train this: ValueError: too many values to unpack"):
        verify_parity(GPT, {"a": TOKENS[0], "b": TOKENS[0]}, {"tp": 2})


class Idle(GPT):
    """Trains nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 0.0


@sees(
    "verify: nothing that trains is right",
    "_refuse_empty",
    "if not whole.digests or not any(whole.norms):",
    "if not any(whole.norms) and False:",
)
def test_what_trains_nothing_or_ends_early_is_not_called_right():
    with pytest.raises(ValueError, match="one process got no gradient that is not zero in the first two batches"):
        verify_parity(Idle, TOKENS, {"tp": 2})
    with pytest.raises(ValueError, match="one process ended in front of the third batch"):
        verify_parity(GPT, TOKENS, {"tp": 2}, trainer={"max_steps": 2})
    with pytest.raises(ValueError, match="batch: it has 7 samples, and it must be dealt out over 2 parts"):
        verify_parity(GPT, [TOKENS[0][:7]], "ddp")


class Fixed(GPT):
    """Takes sequences of one length alone, and draws in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch[0].shape[1] == 13, "one length"
        self.noise = torch.rand(1)
        return super().training_step(batch, batch_idx) * (1 + self.noise)[0]


def test_a_model_of_one_length_that_draws_is_compared_and_both_are_noted():
    found = assert_parity(Fixed, TOKENS, {"tp": 2}, world_size=4)
    assert [note[:45] for note in found.notes] == [
        "the second batch has the length of the first:",
        "a step draws random numbers in spite of dropo",
    ]


@pytest.mark.more
def draw_tokens() -> list[Tensor]:
    return [torch.randint(0, 31, (8, 13))]


@sees("verify: batches drawn anew", "training:make_batches", "    _seed(SEED)  #", "    pass  #")
def test_a_batch_may_be_drawn_each_time_it_is_asked_for():
    found = verify_parity(GPT, draw_tokens, {"tp": 2}, world_size=2)
    assert found.verdict.startswith("RIGHT: "), found


def test_an_encoder_in_float32():
    found = assert_parity(Encoder, TOKENS, {"tp": 2}, dtype="float32")
    assert not any("weights after" in row.quantity for row in found.rows)


@pytest.fixture
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def status_of(*arguments: str) -> int:
    try:
        main(["verify", *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.usefixtures("_from_the_root")
def test_the_command_line_ends_with_the_verdict_as_its_status(capsys, tmp_path):
    assert status_of("conf/cli.yaml", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert told["verdict"].startswith("RIGHT: tp 2 on 2 ranks trains as one process does")
    wrong = ("tests.end_to_end.test_verify:make_wrong", "--batch", "tests.end_to_end.test_verify:tokens")
    assert status_of(*wrong, "--strategy", "tests.end_to_end.test_verify:Unsynced") == 1
    assert capsys.readouterr().out.startswith("WRONG: Unsynced on 2 ranks does not train as one process does; ")
    assert status_of(*wrong, "tp=2", "plan=byte_gtp") == 1
    assert "did you mean 'byte_gpt'" in capsys.readouterr().out
    assert status_of(*wrong, "tp=0") == 2
    assert "tp=0: a size must be 1 or more" in capsys.readouterr().err
    assert status_of(*wrong, "tp=2", "--strategy", "ddp") == 2
    assert "which of them is meant" in capsys.readouterr().err
    assert status_of("conf/cli.yaml", "--shrink") == 2
    assert "only a Hugging Face folder" in capsys.readouterr().err


SCRIPT = """
import signal
import torch
from lightning_seqpar import verify_parity
from tests.helpers.models import GPT

class Slow(GPT):
    def training_step(self, batch, batch_idx):
        print("stepping", flush=True)
        while True:
            signal.pause()

if __name__ == "__main__":
    verify_parity(Slow, [torch.zeros(8, 13, dtype=torch.long)], {"tp": 2})
"""


@sees("verify: ranks outlive what started them", "_rank_main", "    _end_with_parent()\n", "")
@pytest.mark.more
def test_what_ends_the_script_ends_its_ranks(tmp_path):
    (script := tmp_path / "trialscript.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, script, "now"], env=environment(PYTHONPATH=f"{ROOT}:{ROOT}/examples", SEQPAR_TAG=(tag := str(script))),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "stepping\n"
    process.kill()
    process.wait()
    assert process.stdout.read() == "", "the pipe is open as long as a rank lives"
    assert survivors(tag) == []


make_wrong = GPT


def tokens() -> Any:
    return TOKENS


@pytest.mark.usefixtures("_from_the_root")
def test_a_hugging_face_folder_is_shrunk_and_proved(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=2, hidden_size=1024, intermediate_size=2048)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert status_of(str(tmp_path), "tp=4", "--shrink") == 0
    told = capsys.readouterr().out
    assert told.startswith("RIGHT: tp 4 on 4 ranks")
    assert "note: shrunk: head_dim 128 → 8, hidden_size 1024 → 64" in told
    assert "computed in float64 on both sides" in told


@sees(
    "verify: grouped products in their kernel's types",
    "training:KeepFloat64.__torch_dispatch__",
    "if is_grouped_in_float64(func, args):",
    "if False:",
)
@pytest.mark.usefixtures("_from_the_root")
def test_experts_are_proved_in_float64(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=64)
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(tmp_path)
    assert status_of(str(tmp_path), "tp=2", "--shrink", "--length", "12") == 0
    assert "limit 1e-09" in capsys.readouterr().out
