"""What one rank of tp 8 does on one GPU, beside DTensor and beside its part of the model alone: ``make gpu-bench``.

    python benchmarks/gpu_bench.py                          all of it (an hour or two)
    python benchmarks/gpu_bench.py --parts steps --models "Llama-3-8B, 4 layers" --tokens 8192 --network nvlink --picture
    python benchmarks/gpu_bench.py --small --out folder     tiny models, on a CPU too, where counts alone mean anything

The other seven ranks are not there: collectives return at once (``fake``) or take the time of a network (``loopback.py``). Each
way runs in a process of its own, one after the other. One that fails has its error for a row, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import logging
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import hf_models  # noqa: E402
import lightning as L  # noqa: E402
import loopback  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from child import StartupClock  # noqa: E402
from counting import Operations  # noqa: E402
from launch import LIMIT  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from memory import forget_peak, used  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.profiler import ProfilerActivity, profile, schedule  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from lightning_seqpar import SeqParallelStrategy  # noqa: E402
from lightning_seqpar.measure import StepMeter  # noqa: E402
from lightning_seqpar.parallel.grad_sync import LossWatch  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TP = 8
WARM, TIMED, APART = 18, 7, 3
"""Steps until run-time checks are rare and caches full; those that are timed; those that begin on an idle device. Of two more the
second is profiled or counted. The next check is due in the 32nd."""
COUNTED = WARM + TIMED + APART
MIB, GIB = 2**20, 2**30
OURS, ALONE = "ours", "a rank's part alone"
DTENSOR, DTENSOR_COMPILED = "DTensor with loss parallel", "DTensor, blocks compiled"
OFFLOADED = f"{OURS}, activations on the CPU"
WAYS = (OURS, f"{OURS}, compiled", OFFLOADED, DTENSOR, DTENSOR_COMPILED, ALONE, f"{ALONE}, compiled")
NETWORKS = ("fake", *loopback.NETWORKS) if CUDA else ("fake", "thread")
RATES = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Operations a second that devices are sold for, of dense products in bfloat16."""
WHOLE, TINY = "Llama-3-8B", "a tiny llama"
STEPPED, STARTED = ("Llama-3-8B, 4 layers", "Llama-3-70B, 2 layers"), ("GPT-2 124 M", "llama 0.55 B, 128k words")
_WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    STEPPED[0]: ("Llama-3-8B", {"num_hidden_layers": 4}),
    STEPPED[1]: ("Llama-3-70B", {"num_hidden_layers": 2}),
    **{name: (name, {}) for name in (*STARTED, WHOLE)},
    TINY: ("Llama-3-8B", {"num_hidden_layers": 2, **_WIDTHS}),
}
"""Of each shape, a model of ``hf_models.MODELS``, and the fields that it has others of."""
SAVING: dict[str, dict[str, Any]] = {
    WHOLE: {"recompute": "full", "tile_mlp": 8192, "loss_chunk": 2048},
    TINY: {"recompute": "full", "tile_mlp": 64, "loss_chunk": 16},
}
"""Everything of ours that saves memory on one device."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process of its own measures."""

    part: str
    way: str
    shape: str
    tokens: int
    network: str | None = None
    """By which the collectives of a rank travel that is played; none for one that has nobody else."""
    link: loopback.Network | None = None
    """What that network can do, of one that has a GPU's streams."""

    def __str__(self) -> str:
        return ", ".join(str(part) for part in (self.part, self.shape, self.tokens, self.network, self.way) if part is not None)


# ---- in the processes ----------------------------------------------------------------------------------------------


class Meter(Callback):
    """Times, memory and kernels of some steps each. Nothing waits for the device in a step, nor between those that are timed."""

    def __init__(self, profiles: bool) -> None:
        self._stamps, self._host, self._kept = list[Any](), list[float](), list[int]()
        self._operations, self._counting = Beneath(), ExitStack()
        kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * CUDA]
        self._profile = profile(activities=kinds, schedule=schedule(wait=0, warmup=1, active=1)) if profiles else None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if WARM <= batch_idx <= WARM + TIMED:
            self._stamps.append(_stamp())
        if batch_idx >= WARM + TIMED:
            _wait()
        if batch_idx == WARM + TIMED:
            forget_peak()
            self._held = used()
        elif batch_idx == COUNTED:
            self._peak = used(peak=True) - self._held
            if self._profile is not None:
                self._counting.enter_context(self._profile)
        elif batch_idx == COUNTED + 1 and self._profile is not None:
            self._profile.step()
        elif batch_idx == COUNTED + 1:
            self._counting.enter_context(self._operations)
        self._is_apart = WARM + TIMED <= batch_idx < COUNTED
        if self._is_apart:
            self._before, self._begin = used(), time.perf_counter()

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Behind the forward; the gradients of the last step are still there, as they were in front of it."""
        if self._is_apart:
            self._kept.append(used() - self._before)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._is_apart:
            self._host.append(time.perf_counter() - self._begin)
        if batch_idx == COUNTED + 1:
            _wait()
            self._counting.close()

    def measured(self) -> dict[str, Any]:
        """Medians in ms, and bytes."""
        pairs = itertools.pairwise(self._stamps)
        times = [begin.elapsed_time(end) if CUDA else (end - begin) * 1e3 for begin, end in pairs]
        found = {"ms": statistics.median(times), "host_ms": statistics.median(self._host) * 1e3, "peak": self._peak}
        return found | ({"kept": statistics.median(self._kept)} if CUDA else {"operations": self._operations.total})

    def events(self) -> list[dict[str, Any]]:
        """The profiled step, as Chrome's traces have it, which are alike in all releases."""
        if self._profile is None:
            return []
        with tempfile.TemporaryDirectory() as folder:
            self._profile.export_chrome_trace(file := f"{folder}/trace.json")
            return [event for event in json.loads(Path(file).read_text())["traceEvents"] if event.get("ph") == "X"]


class Beneath(Operations):
    """Counts what DTensor makes of an operation on its tensors, in the place of that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def _stamp() -> Any:
    """When the device is here; where it is the host that computes, a time."""
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def spans_of(events: Sequence[dict[str, Any]], cuda: bool) -> list[tuple[str, str, float, float]]:
    """Row, kind, begin and length in ms of all that ran in a profiled step.

    On a GPU kernels and copies, and the host's launches: a stream that waits for a network (``torch.cuda._sleep``) communicates.
    Otherwise operations, of which one may run within another, and what is done of collectives.
    """
    runs = ("kernel", "gpu_memcpy", "gpu_memset") if cuda else ("cpu_op",)
    sending = {event["args"]["stream"] for event in events if event.get("cat") == "kernel" and "spin_kernel" in event["name"]}
    found = []
    for event in events:
        kind, name = event.get("cat"), event["name"]
        if name == loopback.NAME or (kind in runs and event.get("args", {}).get("stream") in sending):
            found.append(("communication", "collective", event))
        elif kind in runs:
            found.append(("compute", _kind(name), event))
        elif kind in ("cuda_runtime", "cuda_driver") and "Launch" in name:
            found.append(("host", "launch", event))
    first = min((event["ts"] for *_, event in found), default=0.0)
    return [(row, kind, (event["ts"] - first) / 1e3, event["dur"] / 1e3) for row, kind, event in found]


def _kind(name: str) -> str:
    """Of a kernel or an operation."""
    name = name.lower()
    if any(part in name for part in ("flash", "fmha", "attention", "sdpa")):
        return "attention"
    is_product = name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
    return "product" if is_product or any(part in name for part in ("gemm", "nvjet", "cutlass", "_tem_", "splitk")) else "other"


def union(spans: Sequence[tuple[float, float]]) -> float:
    """How long any of these, each a begin and a length, runs."""
    total, until = 0.0, float("-inf")
    for begin, length in sorted(spans):
        total += max(0.0, begin + length - max(begin, until))
        until = max(until, begin + length)
    return total


def model_flops(config: Any, tokens: int, parts: int) -> float:
    """Of a step's products on one of so many ranks: of each weight but the embedding's, and of half the square of attention."""
    heads = config.num_attention_heads * config.head_dim
    projections = 2 * (heads + config.num_key_value_heads * config.head_dim) + 3 * config.intermediate_size
    layers = config.num_hidden_layers * (config.hidden_size * projections + heads * tokens)
    return 6 * tokens * (layers + config.hidden_size * config.vocab_size) / parts


class ByTorch(hf_models.DTensorLlama):
    """DTensor's way. Nobody scatters weights to a rank that is alone: its parts would be whatever the memory held."""

    compiled = False

    def configure_model(self) -> None:
        super().configure_model()
        for parameter in self.parameters():
            nn.init.normal_(parameter.to_local() if isinstance(parameter, DTensor) else parameter, std=0.02)
        if self.compiled:
            compile_blocks(self)


class WithSGD(hf_models.CausalModule):
    """Without moments, which take twice the weights."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Adapted(hf_models.CausalModule):
    """Trains low-rank adapters of queries and values alone."""

    def __init__(self, name: str, **others: Any) -> None:
        import peft

        super().__init__(name, **others)
        config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
        self.model = peft.get_peft_model(self.model, config)


def compile_blocks(module: Any) -> None:
    """Each decoder block as torch's users compile it. Blocks make graphs of their own; DTensor's take no varying lengths."""
    torch._dynamo.config.recompile_limit = 64
    for layer in module.model.model.layers:
        layer.compile(dynamic=False)


def make(kind: Callable[..., Any], job: Job, **others: Any) -> Any:
    """A module whose weights are made where, and as what, they are trained."""
    model, fields = SHAPES[job.shape]
    if hf_models.MODELS[model][0] == "LlamaForCausalLM":
        others |= {"use_cache": False, "max_position_embeddings": job.tokens}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return kind(model, **{**fields, **others}, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(torch.float32)


def fit(job: Job, module: Any, strategy: Any, words: int, steps: int, callbacks: list[Callback], nodes: int = 1) -> None:
    """Train on batches of one sequence, all of a length and where the device has them, so that the host waits for no copy."""
    data = torch.randint(0, words, (steps, 1, job.tokens + 1), device=DEVICE)
    trainer = L.Trainer(
        accelerator="auto", devices=1, num_nodes=nodes, strategy=strategy, precision="bf16-true", max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(list(data), batch_size=None))


def join(job: Job) -> None:
    """Be the first rank of a world that nobody else is in, for torch and for the Trainer."""
    os.environ.update(loopback.placed(TP))
    if job.network == "fake":
        dist.init_process_group("fake", rank=0, world_size=TP, store=FakeStore())
    else:
        loopback.play(0, TP, loopback.StreamWire(job.link) if job.link is not None else loopback.ThreadWire())


def step(job: Job) -> dict[str, Any]:
    """A step of a way: times, kernels or operations, memory, and what ran when where a picture is to be drawn of it."""
    compiled, tp = job.way.endswith("compiled"), 1 if job.part == "lora" else TP
    config = {**hf_models.MODELS[SHAPES[job.shape][0]][1], **SHAPES[job.shape][1]}
    strategy: Any = "auto"
    if job.network is not None:
        join(job)
    if job.way.startswith(OURS):
        backend = {None: None, "fake": "fake"}.get(job.network, loopback.NAME)
        offload = "activations" if job.way == OFFLOADED else "none"
        options: Any = {"self_check": False, "process_group_backend": backend, "compile": compiled, "offload": offload}
        strategy = SeqParallelStrategy(tp=tp, **options)
        module = make(Adapted if job.part == "lora" else hf_models.CausalModule, job)
    elif job.part == "lora":
        module = make(Adapted, job)
    elif job.way in (DTENSOR, DTENSOR_COMPILED):
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=TP)
        module = make(ByTorch, job)
        module.compiled = compiled
    else:
        cut = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
        head = config["hidden_size"] // config["num_attention_heads"]
        module = make(hf_models.CausalModule, job, head_dim=head, **{name: config[name] // TP for name in cut})
        if compiled:
            compile_blocks(module)
    nodes = 1 if job.network is None else TP
    flops = model_flops(module.model.config, job.tokens, nodes)
    meter, kept = Meter(profiles=CUDA or job.part == "picture"), StepMeter(batch=COUNTED)
    # Nobody else has a word: all are of the first rank's part of the vocabulary.
    with patch.object(LossWatch, "settle", loopback.asks_nobody) if nodes > 1 else nullcontext():
        fit(job, module, strategy, config["vocab_size"] // tp, COUNTED + 2, [meter, *[kept] * (not CUDA)], nodes)
    found, spans = {**meter.measured(), "flops": flops}, spans_of(meter.events(), CUDA)
    if CUDA:
        computed = [(begin, length) for row, _, begin, length in spans if row == "compute"]
        found |= {"kernels": len(computed), "busy": union(computed) / found["ms"]}
    else:
        found["kept"] = kept.saved_bytes
    return found | ({"spans": spans} if job.part == "picture" else {})


def start(job: Job) -> dict[str, Any]:
    """The way to the first step, with the self-check and without."""
    module = make(hf_models.CausalModule, job)
    clock = StartupClock()
    fit(job, module, SeqParallelStrategy(tp=1, self_check=job.way == "self-check"), module.vocab, 4, [clock])
    return clock.measured()


def train_long(job: Job) -> dict[str, Any]:
    """Two steps with everything on that saves memory, under the optimizer that the way names: the peak, if they fit."""
    module = make(WithSGD if job.way == "SGD" else hf_models.CausalModule, job)
    fit(job, module, SeqParallelStrategy(tp=1, self_check=False, **SAVING[job.shape]), module.vocab, 2, [])
    return {"peak": used(peak=True)}


def measure(job: Job, out: Connection) -> None:
    """Measure in this process, and send what was found, or why it failed."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        found = {"steps": step, "picture": step, "lora": step, "start": start, "longest": train_long}[job.part](job)
        found["device"] = torch.cuda.get_device_name(0) if CUDA else f"a CPU ({platform.machine()})"
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    out.send(found)


# ---- in the one that starts them -----------------------------------------------------------------------------------


def in_a_process(job: Job) -> dict[str, Any]:
    """What a process of its own measures; ``{"error": ...}`` if it fails."""
    begin = time.monotonic()
    # Tiny models take less time than imports do, which a fork need not do again; CUDA has no forks.
    context: Any = multiprocessing.get_context("spawn" if CUDA else "fork")
    here, there = context.Pipe(duplex=False)
    # Where memory is searched for its end, what is free counts, and not what is in one piece.
    more = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if job.part == "longest" else {}
    with patch.dict(os.environ, more):
        process = context.Process(target=measure, args=(job, there))
        process.start()
    there.close()
    found: dict[str, Any] = {"error": f"not done after {LIMIT // 60} minutes"}
    try:
        if here.poll(LIMIT):
            found = here.recv()
            process.join(60)
    except EOFError:
        process.join()
        found = {"error": f"its process ended with {process.exitcode}"}
    process.kill()
    process.join()
    shown = {name: value for name, value in found.items() if name != "spans"}
    print(f"{time.strftime('%H:%M:%S')} {job}: {shown} [{time.monotonic() - begin:.0f} s]", file=sys.stderr, flush=True)
    return found


class Report:
    """What was found and the text of it, written anew behind each table: a run that is ended leaves what it did."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.failed, self._given, self._device = 0, given, "no device"
        self._found: dict[str, dict[str, Any]] = {}
        self._lines: list[str] = []

    def measure(self, job: Job, *, may_fail: bool = False) -> dict[str, Any]:
        """What a job finds, which is done once."""
        if str(job) not in self._found:
            self._found[str(job)] = found = in_a_process(job)
            self.failed += "error" in found and not may_fail
            self._device = found.get("device", self._device)
        return self._found[str(job)]

    def rate(self) -> float | None:
        """What the device can do in a second."""
        return self._given.flops or next((rate for name, rate in RATES.items() if name in self._device), None)

    def add(self, *lines: str) -> None:
        """Print lines, and write all so far."""
        print("\n".join(lines), end="\n\n", flush=True)
        self._lines += [*lines, ""]
        if (out := self._given.out) is None:
            return
        versions = f"torch {torch.__version__}, Lightning {L.__version__}, Python {platform.python_version()}"
        options = {name: value for name, value in vars(self._given).items() if value is not None and name != "out"}
        where = f"{self._device}; {versions}"
        head = [f"`make gpu-bench` wrote this on {datetime.date.today()}: {where}.", "", f"Options: {options}.", ""]
        if not CUDA:
            head += ["A CPU computed this: no figure means anything but the counts (operations, and bytes kept).", ""]
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu_bench.md").write_text("\n".join(["# One rank on one GPU", "", *head, *self._lines]))
        told = {"device": self._device, "versions": versions, "options": options, "found": self._found}
        (out / "gpu_bench.json").write_text(json.dumps(told, indent=1))


def table(head: Sequence[str], rows: dict[str, dict[str, Any]], cells: Callable[[dict[str, Any]], Sequence[str]]) -> list[str]:
    """Markdown; what failed has its error for a row."""
    lines = [[*head], ["---"] * len(head)]
    for name, found in rows.items():
        failed = [found.get("error", ""), *["–"] * (len(head) - 2)]
        lines.append([name, *(failed if "error" in found else cells(found))])
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def report_steps(report: Report, given: argparse.Namespace) -> None:
    """A table for each model, network and length; a picture, if asked."""
    report.add(
        f"## Steps of one rank of tp {TP}",
        "",
        f"Medians of {TIMED} steps in bfloat16, a batch one sequence. A rank's part alone sends nothing. Utilisation: 6 × tokens × "
        "(the rank's weights without its embedding's, and half the square of attention) a second, of what the device is sold for. "
        "Kernels, with copies, and how much of a step any of them runs: of the stream that computes. Operations: without those in "
        "a compiled graph, and without collectives where a thread does them. Host: until a step is launched on an idle device. "
        "Kept: for the backward. Peak: over what is held between steps.",
    )
    counted = "kernels" if CUDA else "operations"
    head = f"way|step, ms|of the part alone|tokens/s|utilisation|{counted}|GPU busy|host, ms|kept, MiB|peak, MiB".split("|")

    def job(part: str, way: str, shape: str, network: str, tokens: int) -> Job:
        link = loopback.NETWORKS.get(network) if CUDA else None
        if link is not None:
            others = {name: value for name in ("latency", "bandwidth") if (value := getattr(given, name)) is not None}
            link = dataclasses.replace(link, **others)
        return Job(part, way, shape, tokens, *(() if way.startswith(ALONE) else (network, link)))

    for shape, network, tokens in itertools.product(given.models, given.network, given.tokens):
        rows = {way: report.measure(job("steps", way, shape, network, tokens)) for way in given.ways}
        alone = rows.get(ALONE, {}).get("ms")

        def cells(found: dict[str, Any], tokens: int = tokens, alone: float | None = alone) -> Sequence[str]:
            seconds, rate = found["ms"] / 1e3, report.rate()
            times = f"{found['ms']:.1f}", f"{found['ms'] / alone:.2f}" if alone else "–", f"{tokens / seconds:,.0f}"
            shares = f"{found['flops'] / seconds / rate:.0%}" if rate and CUDA else "–", f"{found['busy']:.0%}" if CUDA else "–"
            sizes = f"{found['host_ms']:.1f}", f"{found['kept'] / MIB:,.2f}", f"{found['peak'] / MIB:,.2f}"
            return *times, shares[0], f"{found[counted]:,}", shares[1], *sizes

        report.add(f"{shape}, {tokens:,} tokens, network: {network}", "", *table(head, rows, cells))
    if given.picture:
        drawn = job("picture", OURS, given.models[0], given.network[-1], sorted(given.tokens)[len(given.tokens) // 2])
        found = report.measure(drawn)
        if "error" not in found:
            from tables import step_picture  # and matplotlib, which nothing else here needs

            step_picture(found.pop("spans"), given.out / "gpu_step.png")
            said = f"{drawn.shape}, {drawn.tokens:,} tokens, network: {drawn.network}"
            report.add(f"A step of ours as torch's profiler saw it; {said}:", "", "![a step](gpu_step.png)")


def report_starts(report: Report, given: argparse.Namespace) -> None:
    """What the self-check costs on one device."""
    pairs = itertools.product((TINY,) if given.small else STARTED, ("self-check", "no self-check"))
    rows = {f"{shape}, {way}": report.measure(Job("start", way, shape, 128)) for shape, way in pairs}
    head = ("ours, tp 1", "from fit to the first step, s", "peak until then, GiB", "peak of steps, GiB")

    def cells(found: dict[str, Any]) -> Sequence[str]:
        return f"{found['startup_s']:.2f}", f"{found['startup_peak'] / GIB:.2f}", f"{found['training_peak'] / GIB:.2f}"

    report.add("## Starting", "", *table(head, rows, cells))


def longest_of(fits: Callable[[int], bool], first: int, last: int) -> int:
    """The longest that fits: doubled until one does not, or would be past the last; then the gap halved to an eighth."""
    fitting, failing = 0, first
    while failing <= last and fits(failing):
        fitting, failing = failing, 2 * failing
    gap = fitting // 8
    while fitting > 0 and failing <= last and failing - fitting > gap:
        middle = (fitting + failing) // 2
        fitting, failing = (middle, failing) if fits(middle) else (fitting, middle)
    return fitting


def report_longest(report: Report, given: argparse.Namespace) -> None:
    """The longest sequence of the whole model that trains on one device."""
    shape, first, last = (TINY, 128, 256) if given.small else (WHOLE, 2**15, 2**24)
    rows = {}
    for way in ("AdamW", "SGD"):
        tried: dict[int, dict[str, Any]] = {}

        def fits(tokens: int, way: str = way, tried: dict[int, dict[str, Any]] = tried) -> bool:
            tried[tokens] = report.measure(Job("longest", way, shape, tokens), may_fail=tokens > first)
            return "error" not in tried[tokens]

        most = longest_of(fits, first, last)
        beyond = min((tokens for tokens, found in tried.items() if "error" in found), default=0)
        rows[way] = {
            **tried[most or first],
            "most": most,
            "why": f"{beyond:,}: {tried[beyond]['error']}" if beyond else "not tried",
        }
    head = ("optimizer", "longest, tokens", "peak, GiB", "what was too long")
    lines = table(head, rows, lambda found: (f"{found['most']:,}", f"{found['peak'] / GIB:.2f}", found["why"]))
    report.add("## Longest sequence", "", f"{shape} on one device, ours at tp 1 with {SAVING[shape]}:", "", *lines)


def report_lora(report: Report, given: argparse.Namespace) -> None:
    """Low-rank adapters on one device."""
    shape, tokens = (TINY, 32) if given.small else (WHOLE, 8192)
    rows = {way: report.measure(Job("lora", way, shape, tokens)) for way in (OURS, "plain Lightning")}
    head = ("way", "step, ms", "tokens/s", "host, ms", "peak, MiB")

    def cells(found: dict[str, Any]) -> Sequence[str]:
        return (
            f"{found['ms']:.1f}",
            f"{tokens / found['ms'] * 1e3:,.0f}",
            f"{found['host_ms']:.1f}",
            f"{found['peak'] / MIB:,.2f}",
        )

    report.add("## LoRA", "", f"{shape} on one device, rank 16 on q and v, {tokens:,} tokens:", "", *table(head, rows, cells))


PARTS = {"steps": report_steps, "start": report_starts, "longest": report_longest, "lora": report_lora}
NEIGHBOURS = "Published of Llama-3-8B on one H100: 500 K tokens by ALST; 12,473 tokens/s with LoRA by NeMo Automodel."


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--models", nargs="+", choices=[*STEPPED, TINY], help="of the steps")
    parser.add_argument("--tokens", nargs="+", type=int, help="of the steps: 2048 8192 32768, or 32 of tiny ones")
    parser.add_argument("--network", nargs="+", default=NETWORKS[:2], choices=NETWORKS, help="of the steps")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="of the steps")
    parser.add_argument("--latency", type=float, help="in seconds, in place of the network's")
    parser.add_argument("--bandwidth", type=float, help="in bytes a second, in place of the network's")
    parser.add_argument(
        "--flops", type=float, help=f"operations a second of the device, unless it is one of {', '.join(RATES)}"
    )
    parser.add_argument("--picture", action="store_true", help="draw a step of ours on the last network: gpu_step.png")
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, default=not CUDA, help="tiny models")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" if CUDA else None, help="folder")
    given = parser.parse_args(args)
    if given.picture and (given.out is None or find_spec("matplotlib") is None):
        parser.error("--picture needs a folder (--out) and matplotlib")
    given.models = given.models or ([TINY] if given.small else [*STEPPED])
    given.tokens = given.tokens or ([32] if given.small else [2048, 8192, 32768])
    report = Report(given)
    for part in given.parts:
        PARTS[part](report, given)
    if {"longest", "lora"} & {*given.parts}:
        report.add(NEIGHBOURS)
    return int(report.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
