"""The search for an input on which a copy of the model runs: forward, a finite loss, and a backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_seqpar.distributed.rng import kept_streams, seed_streams
from lightning_seqpar.inference.examples import Example, find_evaluation, find_examples
from lightning_seqpar.inference.model_copy import Quiet, default_dtype, detached_copy, release
from lightning_seqpar.inference.reduction import Reduction
from lightning_seqpar.inference.trainer_view import NoExampleError, PlainBackwardError, attach_view, describe_failure
from lightning_seqpar.verify.self_check import has_room


class FoundExample(NamedTuple):
    """The outcome of looking for an input that the model runs on."""

    example: Example | None  # the first input that works, on the CPU; None if none does
    dtype: torch.dtype | None  # in which the model's copy runs it; None keeps the model's own types
    failures: list[str]  # for each input that was tried before, why it does not work
    # what the run evaluates first, as small as the example; None if it evaluates nothing
    evaluation: Example | None = None


class ExampleSearch:
    """Tries the inputs that a module and its trainer offer, on copies of it, in this process; ``tp`` ranks share a sample."""

    def __init__(self, module: LightningModule, trainer: Trainer, tp: int, device: torch.device) -> None:
        self._module, self._trainer, self._tp, self._device = module, trainer, tp, device

    def run(self) -> FoundExample:
        """Try the inputs that the module and the trainer offer, with and without random draws, until one works."""
        failures: list[str] = []
        try:
            for candidate in find_examples(self._module, self._trainer):
                reductions = Reduction.variants(self._module, self._tp, candidate.length, candidate.longest)
                for narrow, tried in self._ways(candidate):
                    for reduction in reductions:
                        dtype = None if narrow else reduction.dtype(self._module)
                        example = tried.reduced(reduction)
                        if (wrong := self._try(example, dtype)) is None:
                            cpu = torch.device("cpu")
                            return FoundExample(example.to(cpu, None), dtype, failures, self._evaluated_as(example))
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
        try:
            evaluation = find_evaluation(self._module, self._trainer)
        except Exception:  # of which the loop itself will tell
            return None
        if evaluation is None:
            return None
        alike = replace(evaluation, draws=example.draws, frozen=example.frozen)
        return alike.reduced(example.reduction).to(torch.device("cpu"), None)

    def _ways(self, candidate: Example) -> Iterator[tuple[bool, Example]]:
        """How an input is tried, and whether in the model's own types alone. What proves most goes first."""
        manual = not self._module.automatic_optimization
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
        """The device on which this process has room for a copy: its own, or the CPU."""
        if self._device.type != "cuda":
            return self._device
        free, _ = torch.cuda.mem_get_info(self._device)
        return self._device if has_room(self._module, example, dtype, free) else torch.device("cpu")
