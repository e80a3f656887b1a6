"""The text that rank 0 logs at the start of a run: sizes, ranks, groups, the plan, and what is on."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_seqpar.config import VERSION, ParallelConfig
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.verify.coverage import Coverage

LINES = 8
"""How many lines the text has unless all of it is asked for."""
_DETAILS = ("why: ", "rule: ")
"""What lines on a plan begin with that are left to its file."""
_MOST = 8
"""How many ranks, rows or groups are shown before the rest is left out."""


def _ends(items: Sequence[int]) -> list[int | None]:
    """All items if they are few; else the first ones, None for those that are left out, and the last."""
    return list(items) if len(items) <= _MOST else [*items[: _MOST - 2], None, items[-1]]


def groups_of(topology: ProcessTopology) -> list[str]:
    """Lines with the ranks of each group, an axis a line: ``tp  [0 1] [2 3]``. Axes of size 1 are left out."""
    lines = []
    for axis, size in topology.larger_axes:
        lists = topology.get_axis_comm_lists(axis)
        few = _MOST // 2 if size <= _MOST // 2 else 2
        shown = " ".join(
            f"[{' '.join('...' if i is None else str(ranks[i]) for i in _ends(range(len(ranks))))}]" for ranks in lists[:few]
        )
        more = f" ... ({len(lists)} groups)" if len(lists) > few else ""
        lines.append(f"{axis:<4}{shown}{more}")
    return lines


def switches(config: ParallelConfig, tp: int, dp: int, coverage: Coverage | None = None) -> tuple[list[str], list[str]]:
    """Which features are on, and which are off, each in a few words; ``coverage`` says where sequence parallelism is off."""
    has_sp = config.sp and tp > 1 and (coverage is None or coverage.sp)
    sp_off = coverage.sp_off if coverage is not None else ""
    chunks = f" of {config.virtual_pp} chunks" if (config.virtual_pp or 1) > 1 else ""
    entries = [
        ("tp", "linears split", tp > 1),
        *([("pp", f"{config.pp} stages{chunks}, one forward and one backward in turns", True)] * (config.pp > 1)),
        *([("cp", f"parts of the sequence, attention: {config.cp_method}", True)] * (config.cp > 1)),
        ("sp", f"sequence parallelism{f'; not in {sp_off}' if sp_off else ''}", has_sp),
        (config.data_parallel, "over the replicas", dp > 1),
        *([("broadcast_batch", "one rank of each replica reads", True)] * (config.broadcast_batch and tp > 1)),
        *([("gloo_twins", "a gloo group beside each", True)] * config.gloo_twins),
    ]
    why_off = {config.data_parallel: " (one replica)", **({"sp": f" ({sp_off})"} if sp_off else {})}
    off = [f"{name}{why_off.get(name, '')}" for name, _, on in entries if not on]
    return [f"{name} ({what})" for name, what, on in entries if on], off


def _memory(config: ParallelConfig, tp: int) -> list[str]:
    """A line on what is kept for the backward, and what is made again; none for nothing."""
    told = []
    if tp > 1:
        kept = "gathered again in the backward" if config.regather else "kept whole"
        told.append(f"regather {str(config.regather).lower()}: what columns read is {kept}")
    if config.recompute != "none":
        what = {
            "activations": "norms and what follows the columns of MLPs run again in the backward",
            "selective": "norms, what follows the columns of MLPs, and the attention run again in the backward",
            "full": "each block runs again in the backward, and only its input is kept",
        }
        told.append(f"recompute {config.recompute}: {what[config.recompute]}")
    if config.tile_mlp is not None:
        told.append(f"tile_mlp: MLPs compute {config.tile_mlp} tokens at once")
    if config.loss_chunk is not None:
        told.append(f"loss_chunk: logits of {config.loss_chunk} tokens at once")
    return ["; ".join(told)] * bool(told)


def describe_compiled(record: ShardedModel) -> str:
    """A line on compiled blocks: how many."""
    blocks = {name for region in record.regions for name in region.blocks}
    return f"compile: {len(blocks)} blocks, one graph for each kind"


def describe_stages(record: ShardedModel) -> list[str]:
    """Lines on the stages of a pipeline: which blocks each has, and what several of them hold."""
    stage = record.stage
    if stage is None:
        return []
    named = [
        f"{one} {' and '.join(first if first == last else f'{first} to {last}' for first, last in ends)}"
        for one, ends in stage.ends.items()
    ]
    shared = sorted(name for name in record.layout if len(stage.shared(name)) > 1)
    lines = [f"stages: {', '.join(named)}; what is in front of the blocks runs on each, what is behind them on the last"]
    if shared:
        more = " ..." if len(shared) > 3 else ""
        lines.append(f"several stages hold {', '.join(shared[:3])}{more}; the gradients are summed")
    return lines


def _in_rows(rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Lines with a name in front of the first line of each row; rows without lines are left out."""
    return [f"  {name if at == 0 else '':<8}{line}" for name, body in rows for at, line in enumerate(body)]


def summarize(
    topology: ProcessTopology,
    config: ParallelConfig,
    ranks_per_node: int,
    plan: Sequence[str],
    coverage: Coverage | None = None,
    place: str | None = None,
) -> str:
    """All that is known at the start of a run, or the most important :data:`LINES` lines of it.

    With ``place``, the file that holds all of it (empty for none), there are few lines, of which the last one names it. ``plan``
    are lines on the plan; ``coverage`` says how much of the model it shards.
    """
    tp, dp = (topology.get_dim(axis) for axis in ("tp", "dp"))
    on, off = switches(config, tp, dp, coverage)
    memory, told_on, told_off = _memory(config, tp), ", ".join(on) or "nothing", ", ".join(off)
    world, nodes = topology.world_size, max(1, topology.world_size // ranks_per_node)
    sizes = "".join(f"{' ×' if at else ','} {axis} {size}" for at, (axis, size) in enumerate(topology.larger_axes))
    headline = f"lightning_seqpar {VERSION}: {world} rank{'s' * (world > 1)} on {nodes} node{'s' * (nodes > 1)}{sizes}"
    if place is None:
        rows = [("groups", groups_of(topology)), ("plan", plan), ("memory", memory), ("on", [told_on])]
        return "\n".join([headline, *_in_rows([*rows, ("off", [told_off] * bool(off))])])
    groups = [" ".join(line.split()) for line in groups_of(topology)]
    told = [line for line in plan if not line.startswith(_DETAILS)]
    checks = [line for line in told if line.startswith("self-check")]
    others = [line for line in told[1:] if line not in checks]
    others.sort(key=lambda line: line.startswith("vocabulary: sharded"))  # the reasons why something stays whole come first
    body = [*told[:1], *checks, *others]
    told_on += f"; off: {told_off}" * bool(off)
    around = [("groups", ["; ".join(groups)] * bool(groups)), ("memory", memory), ("on", [told_on])]
    body = body[: LINES - 2 - len(_in_rows(around))]  # without the headline, and the line on the file
    where = f"{place} (-v, or SEQPAR_VERBOSE=1, prints it)" if place else "-v, or SEQPAR_VERBOSE=1, prints them"
    few = [around[0], ("plan", body), *around[1:], ("rules", [where] if place or len(body) < len(plan) else [])]
    return "\n".join([headline, *_in_rows(few)])
