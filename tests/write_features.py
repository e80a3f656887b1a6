"""Writes docs/features.md: which features go together. What is refused is asked of the package; every other pair is trained.

    python -m tests.write_features            after a change of what is refused; takes ten minutes

Nothing is written if a pair does not train as one process does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.helpers.features import FEATURES, PAIRS, excludes, needs_a_trainer, refusal, trained

DOC = Path(__file__).resolve().parent.parent / "docs" / "features.md"
HEAD = """\
# What goes together

Written by `python -m tests.write_features`. It trains a GPT of four blocks with each pair that is taken, for two steps of two
micro-batches in float64 with a checkpoint at the end, and compares losses, gradients and weights with one process (1e-9;
`float8` with one that casts by hand). Pairs without an axis run beside `tp` and `sp`.

✓ trained so · ○ taken, not trained here (`tests/end_to_end/test_fabric.py` trains some) · – values of one field · a letter:
refused, for the reason below

"""
MORE = """
Some refusals depend on the model, the machine or the Trainer:

- `recompute: selective`, `tile_mlp`: a block without an attention, or an MLP, [that is found](memory.md#recompute).
- `loss_chunk` beside `tp`: a head that is not sharded by vocabulary (`vocab: false`).
- `compile`: [what can't be traced](compile.md#what-is-refused), experts among it; on GPUs gloo.
- `float8` with `fp8_groups`: [experts](fast_paths.md#float8); GPUs without it.
- `pp`: [what reads past the activation](pipeline.md#what-is-refused); `virtual_pp`: several stacks.
- `cp`: [what can't be followed](long_context.md#what-your-code-sees).
- `hsdp`: replicas that `shard_size` does not divide.
- `async_save`: [`save_last="link"`](checkpoints.md#while-training-goes-on).
- features of a Trainer: [the table](trainer.md).
"""


def document() -> str:
    """The page: a cell for each pair, and the reasons of refusals."""
    names, reasons = list(FEATURES), list[str]()
    cells: dict[tuple[str, str], str] = {}
    for pair in PAIRS:
        said = None if excludes(pair) else refusal(pair)
        if said is not None and said not in reasons:
            reasons.append(said)
        taken = "○" if needs_a_trainer(pair) else "✓"
        cells[pair] = "–" if excludes(pair) else taken if said is None else chr(ord("a") + reasons.index(said))
    short = [name.rpartition(": ")[2] for name in names]
    lines = [f"| | {' | '.join(short[:-1])} |", f"|---|{':-:|' * (len(names) - 1)}"]
    for row, name in enumerate(names[1:], 1):
        lines.append(f"| `{name}` | {' | '.join(cells[one, name] for one in names[:row])} |" + " |" * (len(names) - 1 - row))
    told = "".join(f"\n- **{chr(ord('a') + at)}** `{reason}`" for at, reason in enumerate(reasons))
    return f"{HEAD}{chr(10).join(lines)}\n{told}\n{MORE}"


def main() -> int:
    """Train every pair that is taken; write the page if all of them are right."""
    wrong = 0
    for pair in PAIRS:
        if not excludes(pair) and refusal(pair) is None and not needs_a_trainer(pair):
            found = trained(pair)
            print(f"{' + '.join(pair)}: {found}", flush=True)
            wrong += found.startswith("wrong")
    if not wrong:
        DOC.write_text(document())
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
