"""Modules that multiply their parameters themselves, by einsum or expert by expert: along which dims to cut them.

There is no linear module whose output could be observed, so cuts are tried one after another: the parts that the ranks
would return must sum up to what the whole module returns. It runs on one process, with the inputs of a recorded forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_seqpar.inference.dataflow import CantInferError
from lightning_seqpar.inference.isolated_block import Block, is_equal, other_data
from lightning_seqpar.inference.rehearsal import Edit, changed_attribute
from lightning_seqpar.layout.module_names import Argument
from lightning_seqpar.layout.param_layout import Shard

_MAX_TRIES = 2000  # cuts that are tried at most, the likeliest first
_SEGMENTS = (1, 2, 3)  # numbers of equal parts that a fused parameter is tried as: ``[f]``, ``[gate|up]``, ``[q|k|v]``


@dataclass(frozen=True)
class Cut:
    """How one parameter is cut."""

    dim: int | None  # the tensor dim; None for a parameter that stays whole and that the first rank alone adds (a bias)
    size: int = 0  # that dim's length
    segments: int = 1  # number of equal parts of a fused parameter, each of which is split over the ranks


class UnwrappedProducts:
    """One module that multiplies its parameters itself, called as in a recorded forward.

    ``rows`` and ``columns`` are full names of the parameters that act as such. Raises CantInferError if the block does not call the
    module ``owner``, or it returns no tensor.
    """

    def __init__(self, block: Block, owner: str, rows: Sequence[str], columns: Sequence[str]) -> None:
        self.owner, self.module = owner, block.modules[owner]
        cut = len(owner) + 1
        self.rows, self.columns = [name[cut:] for name in rows], [name[cut:] for name in columns]
        self._args, self._kwargs = tree_map_only(
            Tensor, lambda tensor: tensor.detach().clone(), block.flow.call_of(owner).given
        )
        with torch.no_grad():
            self.whole = _first(block.quiet(self.module, self._args, self._kwargs))
        self._block = block

    def mixes_positions(self, arg: Argument) -> bool:
        """Whether the output for the last token depends on other tokens of an argument; one without gradients tells nothing."""
        args, kwargs = list(self._args), dict(self._kwargs)
        holder: Any = args if isinstance(arg, int) else kwargs
        if not isinstance(holder[arg], Tensor) or not holder[arg].is_floating_point():
            return False
        holder[arg] = x = holder[arg].detach().requires_grad_()
        with torch.enable_grad():
            out = _first(self._block.quiet(self.module, args, kwargs))
        flat = out.reshape(-1, out.shape[-1])
        (grad,) = torch.autograd.grad(flat[-1].sum() + 0 * flat.sum(), x)
        return bool(grad.reshape(-1, grad.shape[-1])[:-1].any())

    # ---- the search ------------------------------------------------------------------------------------------

    def deal(self, tp: int) -> tuple[dict[str, Cut], Sequence[Edit]]:
        """Cuts, by the parameters' own names, and edits with which the outputs of ``tp`` ranks sum up to the whole output.

        A parameter that is missing stays whole. Raises CantInferError if there are none.
        """
        for edits, cuts in islice(self._candidates(tp), _MAX_TRIES):
            if self._sums_up(cuts, edits, tp):
                return cuts, edits
        names = ", ".join((*self.columns, *self.rows))
        raise CantInferError(
            f"{self.owner}: it multiplies the parameters {names} itself, and no way of cutting them for tp={tp} makes the ranks' "
            "parts sum up to its output"
        )

    def idle(self) -> list[str]:
        """Parameters on which the output does not depend for the example's input, which shows nothing of them."""
        own = {name: p for name, p in self.module.named_parameters(recurse=False) if p.is_floating_point()}
        frozen = [parameter for parameter in own.values() if not parameter.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_()
            with torch.enable_grad():
                out = _first(self._block.quiet(self.module, self._args, self._kwargs))
                weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view(out.shape).to(out)
                total = (out * weights).sum()
            grads = torch.autograd.grad(total, list(own.values()), allow_unused=True) if total.requires_grad else []
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        used = {name for name, grad in zip(own, grads, strict=False) if grad is not None and bool(grad.any())}
        return [name for name in own if name not in used]

    def _candidates(self, tp: int) -> Iterator[tuple[tuple[Edit, ...], dict[str, Cut]]]:
        """Edits and cuts to try, the likeliest first: cuts alone, then with one or two edits, then unlikely cuts."""
        plain, found = list(self._cuts(tp, likely=True)), self._edits(tp)
        sets = [*combinations(found, 1), *combinations(found, 2)]
        yield from (((), cuts) for cuts in plain)
        yield from ((edits, cuts) for cuts in plain for edits in sets)
        yield from (((), cuts) for cuts in self._cuts(tp, likely=False))

    def _cuts(self, tp: int, *, likely: bool) -> Iterator[dict[str, Cut]]:
        """Cuts by parameter; parameters of one shape are cut alike."""
        own = dict(self.module.named_parameters(recurse=False))
        shapes = list(dict.fromkeys(tuple(own[name].shape) for name in self.columns))
        row_shapes = list(dict.fromkeys(tuple(own[name].shape) for name in self.rows))
        options = [[*_options(shape, tp, _SEGMENTS), None] for shape in shapes]
        row_options: list[list[Cut | None]] = [[*_options(shape, tp, (1,))] for shape in row_shapes]
        ranked: list[tuple[int, int, int, dict[str, Cut]]] = []
        for picks in product(*row_options, *options):
            by_row = dict(zip(row_shapes, picks, strict=False))
            by_column = dict(zip(shapes, picks[len(row_shapes) :], strict=True))
            if not any(by_column.values()):
                continue
            cuts = {name: cut for name in self.rows if (cut := by_row[tuple(own[name].shape)]) is not None}
            cuts |= {name: cut for name in self.columns if (cut := by_column[tuple(own[name].shape)]) is not None}
            lengths = {cut.size for name, cut in cuts.items() if name in self.rows}
            odd = sum(cut.size // cut.segments not in lengths for cut in cuts.values())
            # Columns that stay whole, such as keys and values that all query heads read.
            shared = sum(cut is None for cut in by_column.values())
            ranked.append((shared, odd, sum(cut.segments for cut in cuts.values()), cuts))
        rest = [name for name in own if name not in self.columns and name not in self.rows]
        for *_, cuts in sorted(ranked, key=lambda item: item[:3]):
            choices = [self._others(own[name], cuts, tp) for name in rest]
            for number, chosen in enumerate(product(*choices)):
                if likely != (number == 0):
                    continue
                yield cuts | {name: cut for name, cut in zip(rest, chosen, strict=True) if cut is not None}

    def _others(self, tensor: Tensor, cuts: dict[str, Cut], tp: int) -> list[Cut | None]:
        """How another parameter, such as a bias, may be treated: cut like a column, added by one rank, or left whole (None)."""
        columns = sorted({(cut.size, cut.segments) for name, cut in cuts.items() if name in self.columns})
        dims = [*enumerate(tensor.shape)]
        sliced: list[Cut | None] = [Cut(dim, size, n) for dim, size in dims for length, n in columns if size == length]
        once: list[Cut | None] = [Cut(None)] if tensor.ndim and tensor.shape[-1] == self.whole.shape[-1] else []
        return [*sliced, *once, None]

    def _edits(self, tp: int) -> list[Edit]:
        """Attributes that may count what is split over the ranks: heads, or the length of a cut dim."""
        edits = [
            Edit("set", self.owner, key, value=value // tp)
            for key, value in vars(self.module).items()
            if type(value) is int and not key.startswith("_") and value > 1 and value % tp == 0
        ]
        return sorted(edits, key=lambda edit: "head" not in str(edit.key))

    # ---- one cut ---------------------------------------------------------------------------------------------

    def _sums_up(self, cuts: dict[str, Cut], edits: Sequence[Edit], tp: int) -> bool:
        """Whether the outputs of all ranks, each with its parts of the parameters, sum up to the whole output."""
        total: Tensor | None = None
        for rank in range(tp):
            try:
                with self._cut(cuts, edits, tp, rank), torch.no_grad():
                    part = _first(self._block.quiet(self.module, self._args, self._kwargs))
            except (RuntimeError, ValueError, IndexError, AssertionError, TypeError):
                return False  # the shapes do not fit, so this cut is wrong
            if part.shape != self.whole.shape:
                return False
            total = part if total is None else total + part
        assert total is not None
        return is_equal(total, self.whole)

    @contextmanager
    def _cut(self, cuts: dict[str, Cut], edits: Sequence[Edit], tp: int, rank: int) -> Iterator[None]:
        """While open, the module has the parameters and attributes of one rank."""
        held: list[tuple[Tensor, Tensor]] = []
        for name, cut in cuts.items():
            parameter = getattr(self.module, name)
            if cut.dim is not None:
                sizes = [cut.size // cut.segments] * cut.segments
                shard = Shard.by_segments(cut.dim, sizes, sizes, tp, name)
                held.append((parameter, shard.take(parameter.data, rank)))
            elif rank > 0:
                held.append((parameter, torch.zeros_like(parameter.data)))
        with ExitStack() as stack:
            stack.enter_context(other_data(held))
            for edit in edits:
                stack.enter_context(changed_attribute(self.module, str(edit.key), edit.value))
            yield


def _options(shape: tuple[int, ...], tp: int, segments: Sequence[int]) -> list[Cut]:
    """All cuts of a parameter of that shape whose dim divides by the segments and the ranks."""
    return [Cut(dim, size, count) for dim, size in enumerate(shape) for count in segments if size % (count * tp) == 0]


def _first(out: Any) -> Tensor:
    """The output, or the first of several."""
    first = out[0] if isinstance(out, list | tuple) and out else out
    if not isinstance(first, Tensor):
        raise CantInferError(f"a module that multiplies parameters itself returns a {type(first).__name__}, no tensor")
    return first
