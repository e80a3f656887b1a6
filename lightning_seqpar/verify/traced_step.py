"""The training step that a description traces: which input it is run on, and how."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves

from lightning_seqpar.data.batch import map_tensors, tensors_in
from lightning_seqpar.distributed.autograd import Watch, is_higher_order
from lightning_seqpar.inference.examples import Example, small
from lightning_seqpar.inference.reduction import Reduction, is_large
from lightning_seqpar.releases import pl
from lightning_seqpar.user_input import name_error

PRECISIONS = {
    "32-true": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, None),
    "16-mixed": (torch.float32, torch.float16),
    "16-true": (torch.float16, None),
    "64-true": (torch.float64, None),
}
"""Precisions of a Trainer: the type of the parameters, and that of products where it is another one."""


def checked_precision(given: object) -> str:
    """A precision by its whole name; raises ValueError for one that a step can't be traced in."""
    short = {"bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true", "64": "64-true"}
    name = short.get(str(given), str(given))
    if name not in PRECISIONS:
        raise ValueError(f"precision={given!r} is none of {', '.join(PRECISIONS)}")
    return name


def dtype_of(precision: str | None, model: nn.Module) -> torch.dtype | None:
    """The type of a model's floating-point parameters in a precision; None for its own, as a Trainer leaves a module's."""
    dtype, _ = PRECISIONS.get(precision or "", (None, None))
    return None if dtype == torch.float32 and isinstance(model, pl.LightningModule) else dtype


def cast_in(precision: str | None) -> AbstractContextManager[Any]:
    """A context in which operations on the CPU cast as they do on a device in a precision; in none they do not."""
    _, dtype = PRECISIONS.get(precision or "", (None, None))
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


@dataclass
class TracedStep:
    """How one training step is run on a copy of the model whose tensors have shapes and no memory."""

    example: Example | None  # what ``forward`` takes, or ``training_step`` with the user's own loss; None if there is no input
    sizes: tuple[int, int] | None = None  # batch and length of the input, if it has a tensor of two dims or more

    missing = (
        "no input to trace a step with: pass example= or batch= (seqpar plan: --batch package.module:function), or set "
        "example_input_array on the module"
    )

    @classmethod
    def find(cls, model: nn.Module, example: Any, batch: Any, batch_size: int, length: int | None) -> TracedStep:
        """The step for what the user passed; else for tokens, if the model is one of Hugging Face's; else for its example."""
        if batch is not None and isinstance(model, pl.LightningModule):
            batch = _on_cpu(batch)
            return cls(Example.of_step("the batch", model, "training_step", batch), sizes_of(batch))
        if example is None and batch is None:
            for path, part in model.named_modules():
                if tokens := draw_tokens(part, batch_size, length, longest=2048):
                    return cls(Example.of_forward("the example", tokens, path=path), sizes_of(tokens))
            example = getattr(model, "example_input_array", None)
        given = _on_cpu(batch if example is None else example)
        return cls(None) if given is None else cls(Example.of_forward("the example", given), sizes_of(given))

    def run(self, model: nn.Module) -> Tensor:
        """Run it: the loss, or the sum of all outputs that have a gradient."""
        assert self.example is not None
        out, _, losses = self.example.mapped(_given).call(model)
        loss = torch.stack(losses).sum() if losses else out.get("loss") if isinstance(out, Mapping) else out
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss.sum()
        return torch.stack([x.sum() for x in tensors_in(out) if x.requires_grad]).sum()

    def examples(self, model: nn.Module, ranks: int) -> list[Example]:
        """Inputs with numbers for copies of a model from which a plan is inferred, to be tried in turn."""
        assert self.example is not None
        generator = torch.Generator().manual_seed(0)

        def drawn(x: Tensor) -> Tensor:
            if x.dtype == torch.bool or x.any():
                return x
            if x.is_floating_point() or x.is_complex():
                return torch.randn(x.shape, generator=generator, dtype=x.dtype)
            return torch.randint(0, 8, x.shape, generator=generator, dtype=x.dtype)

        def short(x: Tensor) -> Tensor:
            return x[:2, :8] if x.ndim == 2 and not x.is_floating_point() else x

        if self.example.method == "forward":
            reduction = Reduction(skips_repeats=is_large(model))
            return [replace(self.example.mapped(short).mapped(drawn), path="", reduction=reduction)]
        whole = replace(self.example, args=map_tensors(drawn, small(self.example.args)))
        return [whole.reduced(one) for one in Reduction.variants(model, ranks, whole.length, whole.longest)]


class StepNumbers(Watch):
    """Gives numbers to the indices of a step that runs without: ids, positions and masks decide what a model's code does.

    What operations make of such real tensors of integers alone is real, too, up to :data:`_MOST_INDICES`. And grouped products of
    experts run in any type, as kernels do on real tensors; torch's shapes for them take bfloat16 alone.

    Args:
        stands_for: the kind of device that the step is traced for; its tensors say that they are on the CPU.
    """

    def __init__(self, stands_for: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stands_for = stands_for

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_higher_order(func):
            return func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten._grouped_mm and args[0].dtype != torch.bfloat16:
            given = [x.to(torch.bfloat16) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
            out: Tensor = func(*given, **kwargs)
            return out.to(args[0].dtype)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.namespace != "aten" or not all(_is_index(x) for x in given):
            return func(*args, **kwargs)
        if given and (func._schema.is_mutable or torch.Tag.data_dependent_output in func.tags):
            return _with_numbers(func, args, kwargs)
        try:
            made = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return _with_numbers(func, args, kwargs)
        tensors = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        if all(_is_integral(x) and x.numel() <= _MOST_INDICES for x in tensors) and not func.is_view:
            return _with_numbers(func, args, kwargs)
        return _with_numbers(func, args, kwargs) if given and func.is_view else made


_MOST_INDICES = 2**22


def _is_integral(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _is_index(x: Tensor) -> bool:
    return type(x) is Tensor and _is_integral(x) and x.device.type == "cpu"


def _with_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def why_not_without_numbers(error: Exception) -> str:
    """A sentence on what a run without numbers raised, with the line of the model's code."""
    own, torchs = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith((own, torchs, "<"))]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    if isinstance(error, UnsupportedOperatorException) and "c10d" in str(error):
        return f"torch {torch.__version__} runs no collective without numbers; from 2.9 on it does"
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return f"the model's code reads numbers of a tensor{place}, and here tensors have none"
    return f"a step does not run without numbers: {name_error(error)}{place}"


def _given(x: Tensor) -> Tensor:
    """An input of the step: indices with their numbers, anything else without."""
    if _is_index(x) and x.numel() <= _MOST_INDICES:
        with unset_fake_temporarily():
            return x.clone()
    return torch.empty_like(x, device="cpu")


def _on_cpu(given: Any) -> Any:
    """An input on the CPU; zeros for tensors on meta, as a model has them that was made there."""
    return map_tensors(lambda x: torch.zeros_like(x, device="cpu") if x.is_meta else x.detach().cpu(), given)


def sizes_of(inputs: Any) -> tuple[int, int] | None:
    """Samples and positions ``(b, s)`` of ids ``[b, s]`` or features ``[b, s, h]``, else of the first tensor of two dims or more.

    Of images ``[b, c, h, w]``, and of numbers ``[b, features]``, a sample is one position.
    """
    found = [tensor for tensor in tensors_in(inputs) if tensor.ndim >= 2]
    sequences = [x for x in found if x.ndim == 3 or (x.ndim == 2 and not x.is_floating_point())]
    if sequences:
        return sequences[0].shape[0], sequences[0].shape[1]
    return (found[0].shape[0], 1) if found else None


def draw_tokens(model: nn.Module, samples: int, length: int | None, longest: int) -> dict[str, Tensor]:
    """Random tokens (and labels) for a model of Hugging Face's, as long as it takes, ``longest`` at most; empty for others."""
    config, takes = getattr(model, "config", None), inspect.signature(model.forward).parameters
    vocab = getattr(config, "vocab_size", None)
    if "input_ids" not in takes or not isinstance(vocab, int):
        return {}
    limits = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions")]
    length = length or min([longest, *(n for n in limits if isinstance(n, int) and n > 0)])
    ids = torch.randint(0, vocab, (samples, length), generator=torch.Generator().manual_seed(1234))
    heads = ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration", "DoubleHeads")
    if "labels" in takes and any(word in type(model).__name__ for word in heads):
        return {"input_ids": ids, "labels": ids.clone()}
    return {"input_ids": ids, **({"decoder_input_ids": ids.clone()} if "decoder_input_ids" in takes else {})}
