"""Example inputs: what a model's own code takes, found without running the user's loaders or touching their state."""

from __future__ import annotations

import functools
import math
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_seqpar.context.seq_part import whole_of
from lightning_seqpar.data.batch import map_tensors, own_tensors, tensors_in
from lightning_seqpar.distributed.rng import kept_streams, seed_streams
from lightning_seqpar.inference.block_kinds import Repeats
from lightning_seqpar.inference.model_copy import Quiet, default_dtype, detached_copy, release
from lightning_seqpar.inference.reduction import IDS, WHOLE, Reduction
from lightning_seqpar.inference.trainer_view import (
    NoExampleError,
    PlainBackwardError,
    answer_harmlessly,
    attach_view,
    describe_failure,
)
from lightning_seqpar.nn.sharded_logits import whole_logits
from lightning_seqpar.releases import CombinedLoader, TrainerFn, is_overridden, is_param_in_hook_signature, pl


def backward_at_once(loss: Tensor) -> None:
    """Compute gradients of a loss whose graph stays, for the backward of all losses together."""
    loss.backward(retain_graph=True)


@dataclass(frozen=True)
class Example:
    """An input of a model, and the method that takes it."""

    source: str  # where it comes from, for messages
    method: str  # `forward`, or the name of a step such as `training_step`
    args: tuple[Any, ...]  # positional arguments
    kwargs: Mapping[str, Any]  # named arguments
    draws: bool = False  # whether the method needs random draws to be random
    path: str = ""  # name of the submodule that takes it; empty for the model itself
    reduction: Reduction = WHOLE  # how a copy that takes it is smaller than the model
    # Whether the step is given an iterator of batches (`training_step(self, dataloader_iter)`); `args` is what that gives.
    iterates: bool = False
    reads_gradients: bool = False  # whether `manual_backward` computes gradients at once, for a step that reads them
    # Whether parameters that are frozen stay so in copies that take it. Else all of them ask for gradients, so that what is
    # found is right when they thaw.
    frozen: bool = False

    @property
    def _given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, dict(self.kwargs)

    @property
    def length(self) -> int | None:
        """How long its sequences of tokens are; None if it has no tokens ``[b, s]``."""
        return next((one.shape[1] for one in tensors_in(self._given) if one.ndim > 1 and one.dtype in IDS), None)

    @property
    def longest(self) -> int:
        """The largest dim of its tensors behind the first; 0 without tensors."""
        return max((size for tensor in tensors_in(self._given) for size in tensor.shape[1:]), default=0)

    def repeats(self, copied: nn.Module) -> Repeats:
        """A context in which equal blocks of a copy are computed twice, if it is a reduced one."""
        return Repeats(copied if self.reduction.skips_repeats else None)

    def reduced(self, reduction: Reduction) -> Example:
        """The part of it that a smaller copy is run on."""
        if reduction == WHOLE:
            return self
        samples = reduction.samples if count_samples(self._given) and self.longest else None

        def part(tensor: Tensor) -> Tensor:
            return reduction.of_tensor(tensor if samples is None or not tensor.ndim else tensor[:samples])

        return replace(self.mapped(part), reduction=reduction)

    def to(self, device: torch.device, dtype: torch.dtype | None) -> Example:
        """The same input on a device, floating-point tensors in ``dtype``; None keeps their types."""

        def move(tensor: Tensor) -> Tensor:
            wanted = dtype if tensor.is_floating_point() and dtype is not None else tensor.dtype
            return tensor.detach().to(device=device, dtype=wanted)

        return self.mapped(move)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Example:
        """The same input with other tensors."""
        args, kwargs = map_tensors(change, self._given)
        return replace(self, args=args, kwargs=kwargs)

    def run(self, model: nn.Module, backward: Callable[[Tensor], None] = backward_at_once) -> Tensor:
        """Run it on a copy: a scalar with a gradient, which is the step's loss or a fixed projection of the outputs.

        ``backward`` computes the gradients of a loss where the step reads them; the loss's graph must stay.

        Raises NoExampleError if no output has a gradient, or the step reads more of the trainer than a copy has;
        PlainBackwardError if the step runs its backward itself.
        """
        out, logged, losses = self.call(model, backward if self.reads_gradients else None)
        if self.method != "forward":
            loss = out.get("loss") if isinstance(out, Mapping) else out
            if losses:
                return torch.stack([one.double().sum() for one in losses]).sum()
            if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
                return loss.sum()
        given = (*tensors_in(out), *(value for _, value in logged if isinstance(value, Tensor)))
        found = [whole_logits(whole_of(tensor)) for tensor in given if tensor.requires_grad]
        if not found:
            if self.method == "training_step" and any(parameter.grad is not None for parameter in model.parameters()):
                raise PlainBackwardError(
                    "training_step calls loss.backward(), of which neither Lightning nor this strategy knows: call "
                    "self.manual_backward(loss) in its place (automatic_optimization=False)"
                )
            raise NoExampleError(f"{self.method} with {self.source} gives nothing that has a gradient")
        return torch.stack([project(leaf) for leaf in found]).sum()

    def evaluate(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        """Run it on a copy: the floating-point values that the method logs and returns, each with what it is."""
        out, logged, losses = self.call(model)
        values = [(f"the logged {name!r}", value) for name, value in logged]
        values += [("the loss of a backward", value) for value in losses]
        values += [("a tensor that it returns", value) for value in tensors_in(out)]
        values = [(what, torch.tensor(value) if isinstance(value, float) else value) for what, value in values]
        return [(what, value) for what, value in values if isinstance(value, Tensor) and value.is_floating_point()]

    def call(
        self, model: nn.Module, at_once: Callable[[Tensor], None] | None = None
    ) -> tuple[Any, list[tuple[str, Any]], list[Tensor]]:
        """What the method returns, what it logs, and the losses that it passes to ``manual_backward``."""
        logged: list[tuple[str, Any]] = []
        losses: list[Tensor] = []
        if isinstance(model, pl.LightningModule):
            answer_harmlessly(model, logged, losses, at_once)
        target = model.get_submodule(self.path) if self.method == "forward" else getattr(model, self.method)
        args, kwargs = own_tensors(self._given)
        return target(*((_batches(args),) if self.iterates else args), **kwargs), logged, losses

    @classmethod
    def of_step(cls, source: str, module: pl.LightningModule, step: str, batch: Any, *, several: bool = False) -> Example:
        """A batch as a loop gives it to a step: an iterator of it, or itself."""
        method = getattr(module, step)
        if is_param_in_hook_signature(method, "dataloader_iter", explicit=True):
            return cls(source, step, (batch, 0, 0), {}, iterates=True)
        return cls(source, step, _step_args(method, batch, several), {})

    @classmethod
    def of_forward(cls, source: str, given: Any, **fields: Any) -> Example:
        """What ``forward`` takes: a mapping of named arguments, a tuple of positional ones, or the first one."""
        if isinstance(given, Mapping):
            return cls(source, "forward", (), given, **fields)
        return cls(source, "forward", given if isinstance(given, tuple) else (given,), {}, **fields)


def _batches(given: tuple[Any, ...]) -> Iterator[tuple[Any, int, int]]:
    """What a loader's iterator gives to a step: the batch with its number and its loader's, as often as the step asks."""
    batch, _, loader = given
    for number in count():
        yield own_tensors(batch), number, loader


def project(tensor: Tensor) -> Tensor:
    """A scalar of a tensor's numbers with fixed weights, so that every number has a gradient of its own."""
    # The weights are computed: under Quiet, random ones would all be zero, and with them every gradient.
    places = torch.arange(1, tensor.numel() + 1, dtype=torch.float64, device=tensor.device)
    weights = (places * 12.9898).sin().view(tensor.shape)
    return (tensor.double() * weights).sum() / math.sqrt(max(1, tensor.numel()))


_LOOPS = {
    TrainerFn.FITTING: ("fit_loop", "training_step", "training"),
    TrainerFn.VALIDATING: ("validate_loop", "validation_step", "validation"),
    TrainerFn.TESTING: ("test_loop", "test_step", "test"),
    TrainerFn.PREDICTING: ("predict_loop", "predict_step", "predict"),
}


def find_examples(module: pl.LightningModule, trainer: pl.Trainer | None, called_with: Any = None) -> Iterator[Example]:
    """Examples of the module's input, the best first.

    They are its ``example_input_array``; the first batch of the running loop, for the user's own step and loss; and the
    ``dummy_inputs`` of a model inside it, as Hugging Face's have them. After these NoExampleError is raised if the loader can be
    read only once. Without a trainer it is the module's first call, by its arguments.
    """
    if trainer is None:
        method, args, kwargs = small(called_with)
        yield Example("its first call", method, args, kwargs)
        return
    if module.example_input_array is not None:
        yield Example.of_forward("example_input_array", module.example_input_array)
    refused: NoExampleError | None = None
    loop, step, name = _LOOPS[trainer.state.fn or TrainerFn.FITTING]
    try:
        yield from _of_loop(module, trainer, getattr(trainer, loop), ("training_step", step), name)
    except NoExampleError as error:
        refused = error
    for path, part in module.named_modules():
        given = getattr(part, "dummy_inputs", None)
        if isinstance(given, Mapping) and any(isinstance(value, Tensor) for value in given.values()):
            yield Example.of_forward(f"the dummy_inputs of {path or type(part).__name__}", given, path=path)
            break
    if refused is not None:
        raise refused


def _of_loop(module: pl.LightningModule, trainer: pl.Trainer, loop: Any, names: Sequence[str], name: str) -> Iterator[Example]:
    """The first batch of a loop, for each step of ``names`` that the module has. The user's hooks are called once, on this rank."""
    steps = [one for one in dict.fromkeys(names) if is_overridden(one, module)]
    # The user's hooks may draw (augment), and count.
    with kept_streams(), _state_kept([module, getattr(trainer, "datamodule", None)], levels=1):
        batch, several = _peek(loop._data_source.dataloader(), name, in_turn=loop is not trainer.fit_loop)
        read, source = small(batch), f"the first {name} batch"
        examples = [Example.of_step(source, module, one, read, several=several and one != "training_step") for one in steps]
        if not all(one.iterates for one in examples):
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = small(module._apply_batch_transfer_handler(batch, device=torch.device("cpu"), dataloader_idx=0))
    for one in examples:
        yield one if one.iterates else replace(one, args=(batch, *one.args[1:]))


def peek_batch(make_loaders: Callable[[], Any], what: str, *, in_turn: bool = False) -> Any:
    """The first batch, read in this process; random streams and generators are put back as they were.

    ``make_loaders`` gives the user's loader, or a container of loaders, which with ``in_turn`` are read one after the other, as in
    evaluation; else each gives a part of a batch. Raises NoExampleError for an empty loader, or a stream to be read once only.
    """
    with kept_streams():
        return _peek(make_loaders(), what, in_turn=in_turn)[0]


def _peek(loaders: Any, what: str, *, in_turn: bool) -> tuple[Any, bool]:
    """:func:`peek_batch` of loaders that are made, and whether there are several that are read one after the other."""
    if isinstance(loaders, DataLoader) or not isinstance(loaders, list | tuple | dict | CombinedLoader):
        return _first(loaders, what), False
    mode: Any = "sequential" if in_turn else "min_size"
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, mode)
    if in_turn and combined._mode == "sequential":
        if not combined.flattened:
            raise NoExampleError(f"there is no {what} loader")
        return _first(combined.flattened[0], what), len(combined.flattened) > 1
    return tree_unflatten([_first(one, what) for one in combined.flattened], combined._spec), False


def _step_args(method: Callable[..., Any], batch: Any, several: bool) -> tuple[Any, ...]:
    """The arguments that a loop gives to a step: the batch, its number if that is taken, and the loader's if there are several."""
    number = (0,) if is_param_in_hook_signature(method, "batch_idx", min_args=2) else ()
    return (batch, *number, *((0,) if several else ()))


@contextmanager
def _state_kept(holders: Sequence[Any], levels: int) -> Iterator[None]:
    """While open, the user's code may read data: random generators, counters and lists of these objects are put back after.

    They are found ``levels`` deep: in transforms, and data sets around data sets. What can't be found is the place in a
    stream or a file that is held open.
    """
    back: list[Callable[[], Any]] = []
    level = list(holders)
    seen: set[int] = set()
    for _ in range(levels):
        below: list[Any] = []
        for value in level:
            if id(value) in seen or isinstance(value, Tensor | np.ndarray | type | types.ModuleType):
                continue
            seen.add(id(value))
            if isinstance(value, torch.Generator | np.random.RandomState):
                state: Any = value.get_state()
                back.append(functools.partial(value.set_state, state))
            elif isinstance(value, random.Random):
                back.append(functools.partial(value.setstate, value.getstate()))
            elif isinstance(value, np.random.Generator):
                back.append(functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state))
            elif isinstance(value, list | tuple | dict):
                below += islice(value.values() if isinstance(value, dict) else value, _FEW)
            else:
                held = getattr(value, "__dict__", {})
                counts = {key: number for key, number in held.items() if type(number) in (int, float)}
                lists = [items for items in held.values() if type(items) is list]
                back.append(functools.partial(held.update, counts))
                back += [functools.partial(items.__setitem__, slice(None), list(items)) for items in lists]
                below += held.values()
        level = below
    try:
        yield
    finally:
        for put_back in back:
            put_back()


_LEVELS = 5  # how deep generators and counters are sought
_FEW = 64  # among how many items of a container they are


def _first(loader: Any, what: str) -> Any:
    """The first batch of one loader, which is put back to where it was."""
    if not isinstance(loader, DataLoader):
        return next(_reading(loader, f"{what} loader"))
    inner, data = getattr(loader.batch_sampler, "sampler", None), loader.dataset
    with _state_kept([loader, loader.sampler, loader.batch_sampler, inner, data], _LEVELS):  # read without its workers
        if isinstance(data, IterableDataset):
            iterator = _reading(data, f"{what} data set")
            if loader.batch_size is None:
                return loader.collate_fn(next(iterator))
            samples = list(islice(iterator, loader.batch_size))
        elif loader.batch_sampler is not None:
            samples = [data[index] for index in next(iter(loader.batch_sampler))]
        else:
            return loader.collate_fn(data[next(iter(loader.sampler))])
        if not samples:
            raise NoExampleError(f"the {what} loader is empty; {_ADVICE}")
        return loader.collate_fn(samples)


def _reading(data: Any, what: str) -> Iterator[Any]:
    iterator: Iterator[Any] = iter(data)
    if iterator is data:
        raise NoExampleError(f"the {what} is a stream that can be read once only; {_ADVICE}")
    return iterator


_ADVICE = "set example_input_array on the module (a tensor, tuple or dict that its forward takes)"


def small(batch: Any, limit: int = 4096) -> Any:
    """The first samples of a batch, of about ``limit`` numbers but 4 at least; all if its tensors differ in their first dim."""
    size, largest = count_samples(batch), max((tensor.numel() for tensor in tensors_in(batch)), default=0)
    if not size or largest <= limit or all(tensor.ndim < 2 for tensor in tensors_in(batch)):
        return batch
    keep = min(size, max(4, size * limit // largest))
    return map_tensors(lambda tensor: tensor[:keep] if tensor.ndim else tensor, batch)


def count_samples(batch: Any) -> int:
    """How many samples a batch holds: the first dim of its tensors; 0 if they have none in common."""
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else 0


_COPIES = 6  # times a copy's weights that a check needs: weights, noise, gradients of both copies, one gathered
_SLACK = 512 * 1024**2  # bytes for activations, and for what an allocator can't give back


class FoundExample(NamedTuple):
    """The outcome of looking for an input that the model runs on."""

    example: Example | None  # the first input that works, on the CPU; None if none does
    dtype: torch.dtype | None  # in which the model's copy runs it; None keeps the model's own types
    failures: list[str]  # for each input that was tried before, why it does not work
    evaluation: Example | None = None  # what the run evaluates first, as small as the example; None if it evaluates nothing


class ExampleSearch:
    """Tries the inputs that a module and its trainer offer, on copies of it, in this process; ``tp`` ranks share a sample."""

    def __init__(
        self,
        module: Any,
        trainer: pl.Trainer | None,
        tp: int,
        device: torch.device,
        called_with: tuple[str, Any, Any] | None = None,
    ) -> None:
        self._module, self._trainer, self._tp, self._device = module, trainer, tp, device
        self._called_with = called_with

    def run(self) -> FoundExample:
        """Try the inputs that the module and the trainer offer, with and without random draws, until one works."""
        failures: list[str] = []
        try:
            for candidate in find_examples(self._module, self._trainer, self._called_with):
                reductions = Reduction.variants(self._module, self._tp, candidate.length, candidate.longest)
                for narrow, tried in self._ways(candidate):
                    for reduction in reductions:
                        dtype = None if narrow else reduction.dtype(self._module)
                        example = tried.reduced(reduction)
                        if (wrong := self._try(example, dtype)) is None:
                            found = example.to(torch.device("cpu"), None)
                            return FoundExample(found, dtype, failures, self._evaluated_as(example))
                        text, at_any_size = wrong
                        if at_any_size:
                            break
                    failures.append(f"{example.method} with {example.source}: {text}")
        except PlainBackwardError:
            raise
        except NoExampleError as error:
            failures.append(str(error))
        except Exception as error:  # of the user's loader: training would meet it too, and raise it as it is
            failures.append(f"the loader raised {type(error).__name__}: {error}")
        return FoundExample(None, None, failures)

    def _evaluated_as(self, example: Example) -> Example | None:
        """What the run evaluates first, as small as an example that was found; None if that is nothing, or can't be read."""
        if self._trainer is None:
            return example.to(torch.device("cpu"), None)
        running, step, name = _LOOPS[self._trainer.state.fn or TrainerFn.FITTING]
        loop = getattr(self._trainer, running)
        if step == "training_step":
            if not self._trainer.enable_validation:
                return None
            loop, step, name = self._trainer.fit_loop.epoch_loop.val_loop, "validation_step", "validation"
        try:
            evaluation = next(_of_loop(self._module, self._trainer, loop, (step,), name))
        except Exception:  # there is no such step, or the loop itself will tell
            return None
        alike = replace(evaluation, draws=example.draws, frozen=example.frozen)
        return alike.reduced(example.reduction).to(torch.device("cpu"), None)

    def _ways(self, candidate: Example) -> Iterator[tuple[bool, Example]]:
        """How an input is tried, and whether in the model's own types alone. What proves most goes first."""
        manual = self._trainer is not None and not self._module.automatic_optimization
        for frozen in (False, True) if any(not p.requires_grad for p in self._module.parameters()) else (False,):
            for narrow, draws in ((False, False), (False, True), (True, False)):
                for reads_gradients in (False, True) if manual else (False,):
                    yield narrow, replace(candidate, draws=draws, reads_gradients=reads_gradients, frozen=frozen)

    def _try(self, example: Example, dtype: torch.dtype | None) -> tuple[str, bool] | None:
        """Run the example on a whole copy; what is wrong, and whether it is so in copies of any size, or None."""
        device = self.room(example, dtype)
        with kept_streams(), default_dtype(dtype):
            try:
                copied = detached_copy(self._module, device, dtype, example.reduction, frozen=example.frozen)
                attach_view(copied, self._trainer)
                seed_streams()
                with example.repeats(copied) as repeats, Quiet(draws=example.draws):
                    loss = example.to(device, dtype).run(copied)
                    if not bool(torch.isfinite(loss.detach())):
                        return f"the loss is {float(loss.detach())}", True
                    copied.zero_grad()
                    repeats.compute_all()
                    loss.backward()
                if all(parameter.grad is None for parameter in copied.parameters()):
                    why = "does something hold the model itself, by a global name or a closure?"
                    return f"no parameter of the copy that it runs on gets a gradient ({why})", True
            except PlainBackwardError:
                raise
            except Exception as error:  # shown to the user if no other example works
                # Its text alone: the error's frames hold the copy.
                return describe_failure(error), isinstance(error, NoExampleError)
            release(copied)
        return None

    def room(self, example: Example, dtype: torch.dtype | None) -> torch.device:
        """The device on which this process has room for a copy of type ``dtype`` (None: the model's own): its own, or the CPU."""
        if self._device.type != "cuda":
            return self._device
        widths = {p.element_size() for p in self._module.parameters()} if dtype is None else {dtype.itemsize}
        needed = _COPIES * example.reduction.numel(self._module) * max(widths, default=4) + _SLACK
        free, _ = torch.cuda.mem_get_info(self._device)
        return self._device if needed <= free else torch.device("cpu")
