"""Models of many packages, as they are shipped, trained by the one line and compared with one process.

    python benchmarks/zoo.py                        all of them, into docs/zoo.md (half an hour on two cores)
    python benchmarks/zoo.py timm/ "x-transformers" those whose name contains one of these

Each model is trained for three steps of AdamW in float64, on one process and by ``SeqParallelStrategy(tp=2)``: losses,
gradients and weights must be equal to 1e-9, or to 1e-6 where the model itself computes in float32 (a norm that casts); a
model that float64 does not run is trained in float32, and its losses and gradients must be equal to 1e-5. Results are kept in
a folder, so that a run that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

STEPS = 3
KEPT = HERE.parent / "runs" / "zoo"
TABLE = HERE.parent / "docs" / "zoo.md"
LIMITS = {"float64": 1e-9, "float32 inside": 1e-6, "float32": 1e-5}
"""Largest differences that count as equal, by what the model computes in."""
LIMIT = 400
"""Seconds for one model, with the start of its processes."""


# ---- one model, in a process of its own ----------------------------------------------------------------------------


def _declare_operators() -> None:
    """Without CUDA's libraries torchvision's wheel can't load its C++ operators; its Python code asks for two to exist."""
    if torch.version.cuda is None:
        _declare_operators.library = torch.library.Library("torchvision", "DEF")  # type: ignore[attr-defined]
        for name in ("nms", "qnms"):
            _declare_operators.library.define(  # type: ignore[attr-defined]
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


def train(name: str) -> dict[str, Any]:
    """Train a model on one process, then by the strategy; the outcome. The second process trains the second part alone."""
    import lightning as L
    from torch import Tensor, nn
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.data import DataLoader, default_collate
    from zoo_models import RECIPES

    from lightning_seqpar import SeqParallelStrategy
    from lightning_seqpar.verify.parity import ParityRecorder, Trace, compare

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    package, _, model = name.partition("/")
    make = RECIPES[package][model]

    def tensors(value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value] if value.is_floating_point() and value.requires_grad else []
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return [tensor for one in values for tensor in tensors(one)]

    class Lit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.recipe = make()
            self.net = self.recipe.net
            self.net.train()
            with torch.no_grad():  # nothing stays at zero or one, where an error would not show
                for parameter in self.net.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            outputs = tensors(self.recipe.call(self.net, batch))
            losses = []
            for out in outputs:
                target = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
                losses.append(nn.functional.mse_loss(out, target))
            return torch.stack(losses).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Clock(L.Callback):
        seconds = 0.0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self.seconds = time.perf_counter() - started

    class Casts(TorchDispatchMode):
        """Notes whether anything is cast to float32."""

        seen = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            given = args[0] if args else None
            if isinstance(given, Tensor) and isinstance(out, Tensor) and given.dtype == torch.float64:
                self.seen |= out.dtype == torch.float32
            return out

    class Summary(logging.Handler):
        """Keeps the strategy's summary."""

        text = ""

        def emit(self, record: logging.LogRecord) -> None:
            said = record.getMessage()
            self.text = said if said.startswith("lightning_seqpar") and " ranks on " in said else self.text

    def arithmetic() -> str:
        lit = Lit()
        if lit.recipe.float32:
            return "float32"
        batch = default_collate([lit.recipe.sample() for _ in range(lit.recipe.batch)])
        batch = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
        torch.set_default_dtype(torch.float64)
        with Casts() as casts:
            lit.double().training_step(batch, 0)
        torch.set_default_dtype(torch.float32)
        return "float32 inside" if casts.seen else "float64"

    def fit(**options: Any) -> tuple[Trace, Clock]:
        recorder, clock = ParityRecorder(), Clock()
        lit = Lit()
        torch.manual_seed(1)
        data = [lit.recipe.sample() for _ in range(STEPS * lit.recipe.batch)]
        trainer = L.Trainer(
            accelerator="cpu",
            precision="32-true" if lit.recipe.float32 else "64-true",
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[recorder, clock],
            **options,
        )
        torch.manual_seed(2)
        trainer.fit(lit, DataLoader(data, batch_size=lit.recipe.batch))
        return recorder.trace, clock

    out: dict[str, Any] = {"parameters": sum(p.numel() for p in Lit().parameters())}
    if "LOCAL_RANK" not in os.environ:
        started = time.perf_counter()
        out["arithmetic"] = arithmetic()
        reference, _ = fit(devices=1)
    summary = Summary()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(summary)
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    started = time.perf_counter()
    try:
        trace, clock = fit(devices=2, strategy=SeqParallelStrategy(tp=2))
    except Exception as error:
        if "LOCAL_RANK" in os.environ and os.environ["LOCAL_RANK"] != "0":
            raise
        kind = "refused" if isinstance(error, ValueError) else "error"
        return {**out, "outcome": kind, "type": type(error).__name__, "sentence": str(error)}
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return out
    if out["arithmetic"] == "float32":  # AdamW turns the smallest gradient into a step of full length
        reference.weights = trace.weights = {}
    report = compare(reference, trace, LIMITS[out["arithmetic"]])
    out |= {"outcome": "parity" if report.ok else "wrong", "seconds": round(clock.seconds, 1), "summary": summary.text}
    out["worst"] = max(row.error for row in report.rows)
    return out | ({} if report.ok else {"sentence": str(report)})


# ---- all of them ---------------------------------------------------------------------------------------------------


def run(name: str) -> dict[str, Any]:
    """The outcome for a model, out of a process of its own; how long it took with both runs and all imports."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "outcome.json")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": folder, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--one", name, "--out", str(out)]
        started = time.perf_counter()
        with Path(folder, "log").open("w+") as log:
            try:
                subprocess.run(command, env=env, stdout=log, stderr=log, timeout=LIMIT, check=False)
            except subprocess.TimeoutExpired:
                return {"outcome": "error", "type": "timeout", "sentence": f"not done after {LIMIT} s"}
            log.seek(0)
            said = log.read()
        took = round(time.perf_counter() - started, 1)
        if not out.exists():
            return {"outcome": "error", "type": "process", "sentence": said[-3000:], "took": took}
        return {**json.loads(out.read_text()), "took": took}


def packages(names: list[str]) -> list[str]:
    """The packages of these models with their versions."""
    found = []
    for package in dict.fromkeys(name.partition("/")[0] for name in names):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(package)
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """The page of the docs."""
    counts = Counter(result["outcome"] for result in found.values())
    models, libraries = len(found), len({name.partition("/")[0] for name in found})
    lines = [
        "# The zoo: models of many packages, unmodified",
        "",
        f"{models} models of {libraries} packages, made small by their packages' own arguments, trained for {STEPS} steps by",
        "`SeqParallelStrategy(tp=2)` and nothing else, against one process, in float64. *Parity* says that losses, gradients and",
        "updated weights are equal to 1e-9 (to 1e-6 where the model itself casts to float32; 1e-5 in losses and gradients where",
        "it runs in float32 only). A refusal comes before training, with its sentence below. *Sharded* are tensors of those that",
        "could be (matrices of linears, vocabularies) with their share of the parameters; the time is from `fit` to the first",
        "step, with the start of the second process, inference and the self-check. Written by `make zoo`.",
        "",
        ", ".join(f"**{counts[kind]} {word}**" for kind, word in _WORDS.items()) + ".",
        "",
        "| package | model | arithmetic | largest difference | sharded | sp | seconds |",
        "|---|---|---|---:|---:|---|---:|",
    ]
    for name, result in found.items():
        package, _, model = name.partition("/")
        if result["outcome"] in ("parity", "wrong"):
            cells = [
                result["arithmetic"],
                f"{result['worst']:.1e}" + (" (wrong)" if result["outcome"] == "wrong" else ""),
                _share_of(result["summary"]),
                _sp_of(result["summary"]),
                f"{result['seconds']}",
            ]
            lines.append(f"| {package} | {model} | {' | '.join(cells)} |")
    refused = {name: result for name, result in found.items() if result["outcome"] not in ("parity",)}
    if refused:
        lines += ["", "## Refusals, with their sentence", ""]
        for name, result in refused.items():
            sentence, _, rules = " ".join(result.get("sentence", "").split()).partition(" The rules were:")
            sentence = re.sub(r" Rules of yours are kept, .*?\(docs/your_model\.md\)", "", sentence)  # the same in all of them
            sentence += " (the rules follow)" if rules else ""
            lines.append(f"- **{name}** ({result.get('type', result['outcome'])}): {sentence}")
    lines += ["", "Versions: " + ", ".join(packages(list(found))) + ".", ""]
    return "\n".join(lines)


def _share_of(summary: str) -> str:
    """How many tensors a summary says are sharded, of how many that could be, and their share of the parameters."""
    found = re.search(r"(\d+) of (\d+) tensors that could be are sharded \((\d+) %", summary)
    return f"{found[1]}/{found[2]} ({found[3]}%)" if found else "?"


def _sp_of(summary: str) -> str:
    """Whether a summary says that sequence parallelism is on, and whether everywhere."""
    found = re.search(r"^  on .*\bsp \(sequence parallelism(; not in)?", summary, re.MULTILINE)
    return "off" if found is None else "in part" if found[1] else "on"


_WORDS = {"parity": "at parity", "refused": "refused", "error": "ended in an error", "wrong": "wrong"}


def main() -> None:
    """Train what is asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of PACKAGE/MODEL; none for all")
    parser.add_argument("--jobs", type=int, default=1, help="models trained at once")
    parser.add_argument("--again", action="store_true", help="train what was trained before too")
    parser.add_argument("--kept", type=Path, default=KEPT, help="folder of the results")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    _declare_operators()
    if args.one:
        torch.set_num_threads(1)
        result = train(args.one)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            args.out.write_text(json.dumps(result))
        return
    from zoo_models import RECIPES

    every = [f"{package}/{model}" for package, models in RECIPES.items() for model in models]
    chosen = [name for name in every if not args.names or any(part in name for part in args.names)]
    args.kept.mkdir(parents=True, exist_ok=True)

    def path_of(name: str) -> Path:
        return args.kept / ("".join(c if c.isalnum() else "_" for c in name) + ".json")

    def one(name: str) -> None:
        path = path_of(name)
        if args.again or not path.exists():
            path.write_text(json.dumps(result := run(name)))
            said = "" if result["outcome"] == "parity" else ": " + " ".join(result.get("sentence", "").split())[:300]
            print(f"{result['outcome']:<8}{name} ({result.get('took', '?')} s){said}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, chosen))
    found = {name: json.loads(path_of(name).read_text()) for name in every if path_of(name).exists()}
    args.table.write_text(table(found))
    print(f"{len(found)} models: {dict(Counter(result['outcome'] for result in found.values()))}; {args.table}")


if __name__ == "__main__":
    main()
