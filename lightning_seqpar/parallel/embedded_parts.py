"""Token embeddings of which each context-parallel rank makes its own positions, so that nothing in front of the blocks is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.context.axis import ContextAxis
from lightning_seqpar.context.seq_part import SeqPart
from lightning_seqpar.styles.style import PlannedModel


def hook_embeddings(plan: PlannedModel, axis: ContextAxis) -> Iterator[RemovableHandle]:
    """Pre-hooks of the embeddings in front of the blocks: their ids ``[b, s]`` become this rank's, ``[b, s/cp]``.

    Which dim of other ids is the sequence is not known, and where it is wrong nothing is lost but time: what does not fit is
    gathered in front of the blocks. So blocks of ``[s, b, h]`` have none. An embedding that reads which ids there are, or changes
    the rows of those, gathers them (:func:`~lightning_seqpar.context.operations.look_up`).

    Args:
        plan: of the model.
        axis: the context-parallel axis.
    """
    if not any(stack.dim == 1 for stack in plan.stacks):
        return
    for name, module in plan.modules.items():
        if plan.canonical[name] != name or not isinstance(module, nn.Embedding):
            continue
        if not any(stack.covers(name) for stack in plan.stacks):
            yield module.register_forward_pre_hook(_enter_ids(axis))


def _enter_ids(axis: ContextAxis) -> Callable[..., Any]:
    """A pre-hook of an embedding."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
        ids, *rest = args or (None,)
        if not isinstance(ids, Tensor) or isinstance(ids, SeqPart) or ids.ndim != 2 or ids.is_floating_point():
            return None
        return axis.part(ids, 1), *rest

    return hook
