"""Predictions of ``seqpar plan --fit`` beside what runs on this machine: the peak of a rank, and the order of step times.

    python benchmarks/layouts.py                     all of MODELS (fifteen minutes); writes results/layouts.json and layouts.md
    python benchmarks/layouts.py --models llama      some of them, printed alone

Ranks are processes of one thread over gloo. A peak is the most of a process in memory in one step beside what it had at the begin
of that step, and the states that are known then; what its allocator frees goes back to the system at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent / "examples")]

import lightning as L  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from memory import forget_peak, give_back, used  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from lightning_seqpar import ParallelConfig, SeqParallelStrategy  # noqa: E402
from lightning_seqpar.layout.param_layout import local_rows  # noqa: E402
from lightning_seqpar.sizing.calibrate import calibrated  # noqa: E402
from lightning_seqpar.sizing.machines import Cluster, Machine, machines_in  # noqa: E402
from lightning_seqpar.sizing.search import layout_of  # noqa: E402
from lightning_seqpar.testing import run_distributed  # noqa: E402

RESULTS = HERE / "results"
SAMPLES, LENGTH, UNCHECKED, TIMED = 4, 256, 16, 5  # no check of a run is due in steps 17 to 31
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2": {},
    "dp 2, recompute full": {"recompute": "full"},
    "dp 2 fsdp": {"data_parallel": "fsdp"},
    "dp 2 fsdp, 2 micro-batches": {"data_parallel": "fsdp", "accumulate": 2},
    "tp 2": {"tp": 2},
    "tp 2, recompute activations": {"tp": 2, "recompute": "activations"},
    "tp 2, recompute full": {"tp": 2, "recompute": "full"},
    "cp 2": {"cp": 2},
    "pp 2, 4 micro-batches": {"pp": 2, "accumulate": 4},
}
"""Of two ranks; each trains the same samples a step."""
WORDS = 8192
MODELS = ("gpt2", "llama", "mixtral", "own")


def make(kind: str) -> nn.Module:
    """A model."""
    dim, words, blocks = 512, WORDS, 4
    if kind == "own":
        from byte_gpt import ByteGPT

        return ByteGPT(dim=dim, n_head=8, n_layer=blocks, context=LENGTH, tied=False, vocab=words)
    import transformers

    shape = {"vocab_size": words, "use_cache": False, "bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        free = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(n_embd=dim, n_layer=blocks, n_head=8, n_positions=LENGTH, **free, **shape)
        return transformers.GPT2LMHeadModel(config)
    shape |= {"hidden_size": dim, "num_hidden_layers": blocks, "num_attention_heads": 8, "num_key_value_heads": 4}
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=3 * dim, **shape))
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(intermediate_size=dim, **experts, **shape))


class Module(L.LightningModule):
    """Next-token training of any of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = make(kind)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of ``[b, s]`` tokens."""
        out = self.model(batch)
        logits = out if isinstance(out, Tensor) else out.logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Watch(L.Callback):
    """Times unchecked steps, and takes the peak of the second of them."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.peak = self.held = self.states = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches:
            return
        self.begins.append(time.perf_counter())
        if trainer.global_step == UNCHECKED + 1:
            gc.collect()
            state = [x for one in trainer.optimizers[0].state.values() for x in one.values() if isinstance(x, Tensor)]
            held = [p for p in module.parameters() if trainer.strategy.holds(p)]
            mine = [*held, *(p.grad for p in held if p.grad is not None), *state]
            self.states = sum(local_rows(x).nbytes for x in mine)
            wrapped = trainer.strategy.model
            if isinstance(wrapped, nn.parallel.DistributedDataParallel):
                self.states += sum(p.nbytes for p in module.parameters())  # its buckets
            self.held = used()
            forget_peak()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == UNCHECKED + 2 and not self.peak:
            self.peak = used(peak=True)


def train(kind: str, strategy: dict[str, Any]) -> dict[str, float]:
    """Train a model on this rank: the seconds of a step, and the peak of one."""
    torch.manual_seed(0)
    accumulate, fields = strategy.get("accumulate", 1), {k: v for k, v in strategy.items() if k != "accumulate"}
    replicas = dist.get_world_size() // (fields.get("tp", 1) * fields.get("cp", 1) * fields.get("pp", 1))
    steps, watch, module = UNCHECKED + TIMED, Watch(), Module(kind)
    lengths = [32] * (SAMPLES * UNCHECKED) + [LENGTH] * (SAMPLES * (TIMED + 1))
    rows = [torch.randint(0, WORDS, (length,)) for length in lengths]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=SeqParallelStrategy(self_check=False, **fields),
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=SAMPLES // replicas // accumulate))
    spans = [stop - start for start, stop in zip(watch.begins[UNCHECKED:], watch.begins[UNCHECKED + 1 :], strict=False)]
    return {"seconds": min(spans), "peak": float(watch.peak - watch.held + watch.states)}


def seconds(kind: str, strategy: dict[str, Any]) -> float:
    """Those of a step on this rank."""
    return train(kind, strategy)["seconds"]


def peak(kind: str, strategy: dict[str, Any]) -> float:
    """Bytes at once on this rank, which gives back what it frees; so steps take longer."""
    give_back()
    return train(kind, strategy)["peak"]


def predicted(kind: str, strategy: dict[str, Any], cluster: Cluster) -> dict[str, float]:
    """The same figures by the model of ``seqpar plan --fit``."""
    fields = {k: v for k, v in strategy.items() if k != "accumulate"}
    accumulate = strategy.get("accumulate", 1)
    config = ParallelConfig(**fields)
    replicas = cluster.devices // (config.tp * config.cp * config.pp)
    samples = SAMPLES // replicas // accumulate
    batch = torch.zeros(samples, LENGTH, dtype=torch.int64)
    one = layout_of(Module(kind), cluster, config, batch=batch, precision="32-true", micro_batches=accumulate)
    return {"seconds": one.seconds.total, "peak": float(one.memory.total)}


NOISE = 1.1
"""By how much the seconds of one layout differ from one run of this benchmark to the next, on two shared cores."""


def agreement(rows: dict[str, dict[str, Any]], noise: float = NOISE) -> tuple[int, int]:
    """Of all pairs of layouts whose measured seconds differ by more than noise, how many are predicted in that order."""
    right = count = 0
    for a, b in combinations([row for row in rows.values() if "seconds" in row["measured"]], 2):
        measured_by = a["measured"]["seconds"] / b["measured"]["seconds"]
        if not 1 / noise < measured_by < noise:
            count += 1
            right += (measured_by > 1) == (a["predicted"]["seconds"] > b["predicted"]["seconds"])
    return right, count


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The figures as Markdown."""
    head = ["model", "layout", "peak, MiB", "predicted", "of it", "step, ms", "predicted"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for kind, rows in found.items():
        for layout, row in rows.items():
            was, said = {"peak": math.nan, "seconds": math.nan, **row["measured"]}, row["predicted"]
            cells = [kind, layout, f"{was['peak'] / 2**20:.1f}", f"{said['peak'] / 2**20:.1f}"]
            cells += [f"{said['peak'] / was['peak']:.3f}", f"{was['seconds'] * 1e3:.0f}", f"{said['seconds'] * 1e3:.0f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--figures", nargs="*", default=["seconds", "peak"], help="of: seconds peak; none predicts alone")
    given = parser.parse_args()
    known = json.loads((RESULTS / "layouts.json").read_text()) if (RESULTS / "layouts.json").exists() else {"found": {}}
    if "seconds" in given.figures or "machine" not in known:
        with tempfile.TemporaryDirectory() as folder:
            print(calibrated(Path(folder, "machine.yaml")))
            machine = machines_in(Path(folder, "machine.yaml"))["CPU"]
    else:
        machine = Machine(**known["machine"])
    cluster, found = Cluster(devices=2, machine=machine, name="CPU"), dict[str, Any]()
    for kind, rows in known["found"].items():  # figures of an earlier run that are not measured now
        found[kind] = {layout: {"measured": row["measured"]} for layout, row in rows.items()}
    for figure in (seconds, peak):
        if figure.__name__ not in given.figures:
            continue
        for kind in given.models:
            for layout in given.layouts:
                ranks = run_distributed(figure, 2, kind, LAYOUTS[layout], timeout=600)
                row = found.setdefault(kind, {}).setdefault(layout, {"measured": {}})
                before = row["measured"].get(figure.__name__) if figure is seconds else None
                row["measured"][figure.__name__] = min(filter(None, (before, max(ranks))))  # others use the machine, too
                print(kind, layout, row, flush=True)
    for kind, rows in found.items():
        for layout, row in rows.items():
            row["predicted"] = predicted(kind, LAYOUTS[layout], cluster)
    told = "Seconds of one layout differ by up to 10 % from run to run here."
    for noise in (NOISE, 1.03):
        pairs = [agreement(rows, noise) for rows in found.values()]
        right, count = sum(one for one, _ in pairs), sum(one for _, one in pairs)
        told += f" Of {count} pairs of layouts that differ by {noise - 1:.0%} or more, {right} are in the predicted order."
    text = f"{table(found)}\n\n{told}"
    print(text)
    if given.models == list(MODELS) and given.layouts == list(LAYOUTS):
        (RESULTS / "layouts.json").write_text(json.dumps({"machine": machine.model_dump(), "found": found}, indent=1))
        head = (
            "# Predicted layouts\n\n`python benchmarks/layouts.py`: what `seqpar plan --fit` says beside what ran. Two ranks, "
            f"dim 512, 4 blocks, 8,192 words, {SAMPLES} samples of {LENGTH} a step, float32. A peak is of the fullest rank.\n\n"
        )
        where = f"\n\n_CPU, gloo, one thread per rank; torch {torch.__version__}, lightning {L.__version__}_\n"
        (RESULTS / "layouts.md").write_text(head + text + where)


if __name__ == "__main__":
    main()
