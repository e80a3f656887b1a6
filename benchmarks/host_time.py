"""What a sharded block costs the host, beside blocks that are cut by hand: ``python benchmarks/host_time.py``.

Collectives of torch's fake backend return at once, and the sizes are so small that products cost next to nothing: what is left is
what the host does for each block, which a GPU has to be fast enough to hide, or to be hidden behind. Times are those of the thread,
so other work on the machine counts little, and those of a whole model, shared out over its blocks. Counts are what one block more
makes, exactly. What is kept may depend on the bytes of an activation: ``--tokens 8192 --dim 512 --rounds 0`` counts at a real size,
in some minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import peers  # noqa: E402
import torch  # noqa: E402
from byte_gpt import ByteGPT  # noqa: E402
from counting import Counts, count  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from yardsticks import Groups, by_hand  # noqa: E402

from lightning_seqpar import ParallelConfig, ParallelGroups, ProcessTopology  # noqa: E402
from lightning_seqpar.config import PlanSpec  # noqa: E402
from lightning_seqpar.parallel.apply import parallelize  # noqa: E402
from lightning_seqpar.plan.sharding_plan import resolve_plans  # noqa: E402

BLOCKS, HEADS = 8, 8
FIELDS = ("recompute", "regather")
"""Fields of the configuration that decide what a block keeps and makes again: each of their values is a row."""
DENSE, MINIMAL, ONE_FUNCTION, OURS = "dense", "minimal Megatron", "one function a gather group", "ours"


class Kind(NamedTuple):
    """A model whose blocks are measured."""

    make: Callable[[int, int, int], nn.Module]
    """Of features, blocks and tokens."""
    stack: str
    groups: Groups
    plan: str | None = None
    """The shipped plan, or none for one that follows from the groups."""


def _llama_like(dim: int, blocks: int, tokens: int) -> nn.Module:
    model = peers.Decoder(dim, blocks, vocab=256)
    for layer in model.layers:
        layer.attn.head = dim // HEADS
    return model


KINDS = {
    "ByteGPT": Kind(
        lambda dim, blocks, tokens: ByteGPT(dim, HEADS, blocks, context=tokens, tied=False),
        "blocks",
        {"attn": ({"qkv": 3}, "proj"), "mlp": ({"up": 1}, "down")},
        "byte_gpt",
    ),
    "llama-like": Kind(_llama_like, "layers", {"attn": ({"q": 1, "k": 1, "v": 1}, "o"), "mlp": ({"gate": 1, "up": 1}, "down")}),
}


class Size(NamedTuple):
    """Features, tokens, and over how many ranks."""

    dim: int
    tokens: int
    tp: int


class Row(NamedTuple):
    """What a block costs in one way; times are none where they were not taken."""

    us: tuple[float, float] | None
    """Of the thread, forward and backward: the least of the rounds' medians."""
    of_minimal: tuple[float, float] | None
    """Of the minimal block's: the median of the ratios within a round, so that a machine that slows down hurts both."""
    counts: Counts


def ways() -> dict[str, dict[str, Any] | None]:
    """Every way, with what ours sets in it."""
    found: dict[str, dict[str, Any] | None] = dict.fromkeys([DENSE, MINIMAL, ONE_FUNCTION])
    found[OURS] = default = {field: ParallelConfig.model_fields[field].default for field in FIELDS}
    for field in FIELDS:
        for value in _values(ParallelConfig.model_fields[field].annotation):
            if value != default[field]:
                found[f"{OURS}, {field}: {str(value).lower()}"] = {**default, field: value}
    return found


def _values(annotation: Any) -> Iterator[Any]:
    """All values of a field."""
    if annotation is bool:
        yield from (True, False)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        assert get_origin(annotation) in (Union, UnionType), annotation
        for part in get_args(annotation):
            yield from _values(part)


class Runner:
    """A model in one way."""

    def __init__(self, kind: Kind, way: str, size: Size, blocks: int) -> None:
        torch.manual_seed(0)
        self.model, self._record = kind.make(size.dim, blocks, size.tokens), None
        self._ids = torch.randint(0, 256, (1, size.tokens))
        groups = ParallelGroups.silent(ProcessTopology(["dp", "tp"], [1, size.tp]), 0)
        if way in (MINIMAL, ONE_FUNCTION):
            stack = self.model.get_submodule(kind.stack)
            by_hand(self.model, stack, kind.groups, groups["tp"], one_function=way == ONE_FUNCTION)
        elif way != DENSE:
            plans = resolve_plans(kind.plan or _plan(kind), self.model)
            self._record = parallelize(self.model, plans, groups, **ways()[way])

    def forward(self) -> Tensor:
        """A step's forward."""
        self._begin()
        return self.model(self._ids)

    def _begin(self) -> None:
        """What the strategy does in front of a step, and not for each block."""
        if self._record is not None:
            self._record.reset_calls(draws=())

    def time(self, steps: int) -> tuple[float, float]:
        """Seconds of a forward and of a backward, each the median of so many steps."""
        times = []
        for _ in range(steps):
            self._begin()
            began = time.thread_time()
            out = self.model(self._ids)
            forward = time.thread_time() - began
            loss = out.sum()
            began = time.thread_time()
            loss.backward()
            times.append((forward, time.thread_time() - began))
            self.model.zero_grad()
        forward, backward = (statistics.median(column) for column in zip(*times, strict=True))
        return forward, backward


def _plan(kind: Kind) -> PlanSpec:
    """The rules that say what the groups say."""
    rules: list[dict[str, Any]] = [{"pattern": f"{kind.stack}.*", "style": "blocks"}]
    for name, (columns, row) in kind.groups.items():
        inside, heads = f"{kind.stack}.*.{name}", {"units": HEADS} if name == "attn" else {}
        rules.append({"pattern": inside, "style": "gather"})
        rules += [{"pattern": f"{inside}.{column}", "style": "column", **heads} for column in columns]
        rules.append({"pattern": f"{inside}.{row}", "style": "row", **heads})
    return PlanSpec(base="none", rules=tuple(rules))


def measure(kind: Kind, size: Size, rounds: int, steps: int) -> dict[str, Row]:
    """Every way in turns, so that what else the machine does hits all of them."""
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways()}
    runners = {way: Runner(kind, way, size, BLOCKS) for way in times} if rounds else {}
    for _ in range(rounds):
        for way, runner in runners.items():
            times[way].append(runner.time(steps))
    found = {}
    for way, taken in times.items():
        us, of_minimal = None, None
        if rounds:
            forward, backward = zip(*taken, strict=True)
            least_forward, least_backward = zip(*times[MINIMAL], strict=True)
            us = min(forward) / BLOCKS * 1e6, min(backward) / BLOCKS * 1e6
            of_minimal = _ratio(forward, least_forward), _ratio(backward, least_backward)
        found[way] = Row(us, of_minimal, count_block(kind, way, size))
    return found


def _ratio(own: Sequence[float], least: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(own, least, strict=True))


def count_block(kind: Kind, way: str, size: Size, blocks: int = 2) -> Counts:
    """What one block more makes than so many of them."""
    less, more = (Runner(kind, way, size, blocks + extra) for extra in (0, 1))
    return count(more.model, more.forward).beyond(count(less.model, less.forward))


def table(rows: dict[str, Row]) -> str:
    """The rows as Markdown."""
    lines = ["| | forward | backward | of the minimal | Python calls | operations | collectives | kept |", "|---" * 8 + "|"]
    for way, (us, of_minimal, counts) in rows.items():
        shown = ["–"] * 3
        if us is not None and of_minimal is not None:
            shown = [f"{us[0]:.0f}", f"{us[1]:.0f}", f"{of_minimal[0]:.2f} / {of_minimal[1]:.2f}"]
        calls = f"{counts.forward_calls} / {counts.backward_calls}"
        shown += [calls, f"{counts.operations}", f"{counts.collectives}", f"{counts.kept:,}"]
        lines.append(f"| {' | '.join([way, *shown])} |")
    return "\n".join(lines)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30, help="of timed steps; 0 counts alone")
    parser.add_argument("--steps", type=int, default=4, help="of each way in a round")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    given = parser.parse_args(args)
    size = Size(given.dim, given.tokens, given.tp)
    if not given.json:
        print(f"dim {given.dim}, tp {given.tp}, {given.tokens} tokens: a block's host time, µs; counts; bytes kept")
    models: dict[str, Any] = {}
    for name, kind in KINDS.items():
        rows = measure(kind, size, given.rounds, given.steps)
        models[name] = {way: {"us": row.us, "of_minimal": row.of_minimal, **row.counts._asdict()} for way, row in rows.items()}
        if not given.json:
            print(f"\n{name}\n\n{table(rows)}", flush=True)
    if given.json:
        print(json.dumps({**size._asdict(), "models": models}, indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
