"""What a training step logs and measures behind the blocks: the last stage of a pipeline alone comes there, all have it.

Evaluation steps need nothing of this, since every stage runs them to their end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

_CPU = torch.device("cpu")


class StageLogs:
    """Keeps what the training steps of an accumulation window log on the last stage, and logs it on the others behind it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, replicas: dist.ProcessGroup) -> None:
        self._group, self._device, self._replicas = group, device, replicas
        self._is_last = group.rank() == group.size() - 1
        self._stops = False  # the step asked to stop, behind the blocks
        # Calls of self.log: the hook, the name, the tensor's dtype (None for a metric), options; and the values of tensors.
        self._calls: list[tuple[str, str, torch.dtype | None, dict[str, Any]]] = []
        self._values: list[Tensor] = []
        self._losses: list[Tensor] = []
        self.window_loss = float("nan")  # of the accumulation window that ended last, on all stages
        # Of each metric's lists how many entries all stages have, and the last of those.
        self._sent: dict[str, dict[str, tuple[int, Any]]] = {}

    @contextmanager
    def step(self, trainer: Trainer, *, has_loss: bool) -> Generator[None, None, None]:
        """A context manager around a training step, or around the part of one that comes to the loss, or does not."""
        results: Any = trainer._results
        assert results is not None
        should_stop = trainer.should_stop
        results.log = self._noted(results.log, results) if has_loss else _log_nothing
        try:
            yield
        finally:
            del results.log  # the class's own again
        if has_loss and trainer.should_stop and not should_stop:
            trainer.should_stop, self._stops = False, True  # all stages stop, where the window ends

    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of a micro-batch, divided as Lightning divides it while gradients are accumulated; on the last stage."""
        self._losses.append(loss.detach().to(torch.float64))

    def share(self, trainer: Trainer, module: LightningModule, *, ends_window: bool = False) -> None:
        """Log on all stages what the last one logged since the last call, and note a window's loss. Collective over pp."""
        metrics = {name: one for name, one in module.named_modules() if isinstance(one, Metric)}
        box: list[Any] = [None]
        if self._is_last:
            ended = self._losses if ends_window else []
            noted = [*self._values, *ended]
            numbers = torch.stack(noted).tolist() if noted else []  # one wait for all of them
            loss = sum(numbers[len(self._values) :]) if ended else self.window_loss
            news = {name: self._news(name, metric) for name, metric in metrics.items()}
            box = [(self._calls, numbers[: len(self._values)], news, self._stops, loss)]
            self._calls, self._values, self._stops = [], [], False
            self._losses = [] if ends_window else self._losses
        dist.broadcast_object_list(box, group=self._group, group_src=self._group.size() - 1, device=self._device)
        calls, numbers, news, stops, self.window_loss = box[0]
        if ends_window and math.isnan(self.window_loss):
            rank_zero_warn(
                f"lightning_seqpar: the loss is NaN. With pp={self._group.size()} an activation between the blocks is NaN on "
                "stages that did not make it, a parameter on those that do not hold it, and so is a loss that reads one in a way "
                "which the first batch did not take (an auxiliary loss that begins later). If one process has a number there, "
                "train with pp=1"
            )
        trainer.should_stop |= stops
        if self._is_last:
            return
        for name, one in news.items():
            if one is not None:
                self._take(metrics[name], one)
        left, results = iter(numbers), trainer.fit_loop.epoch_loop._results  # also where a validation begins
        for fx, name, dtype, options in calls:
            if dtype is None:
                value = attrgetter(options["metric_attribute"])(module)
            else:
                value = torch.tensor(next(left), dtype=dtype, device=self._device)
            results.log(fx, name, value, sync_dist_fn=trainer.strategy.reduce, **options)
            trainer._logger_connector._current_fx = fx

    def _noted(self, log: Callable[..., None], results: Any) -> Callable[..., None]:
        """What logs, and keeps the call."""

        def noted(fx: str, name: str, value: Any, **options: Any) -> None:
            group = options.pop("sync_dist_group", None)
            if options.get("sync_dist") and group is not None and group is not self._replicas:
                raise ValueError(
                    f"self.log({name!r}, sync_dist_group=...) with pp={self._group.size()}: the stages log what the last one "
                    "logged, and are in other groups; leave it out to mean over the replicas"
                )
            log(fx, name, value, **options)
            del options["sync_dist_fn"]
            options["reduce_fx"] = getattr(options["reduce_fx"], "__name__", options["reduce_fx"])
            options["batch_size"] = options["batch_size"] or results.batch_size
            dtype = value.dtype if isinstance(value, Tensor) else None
            if dtype is not None:
                self._values.append(value.detach().to(torch.float64))
            self._calls.append((fx, name, dtype, options))

        return noted

    def _news(self, name: str, metric: Metric) -> dict[str, Any] | None:
        """What the other stages don't have of a metric's state yet; of lists, which grow, what was added."""
        if not metric._update_count and name not in self._sent:
            return None
        sent, states = self._sent.get(name, {}), {}
        for state in metric._defaults:
            value = getattr(metric, state)
            if isinstance(value, list):
                at, last = sent.get(state, (0, None))
                if at > len(value) or (at and value[at - 1] is not last):
                    at = 0  # it was reset since
                states[state] = (at, _to(value[at:], _CPU))
            else:
                states[state] = _to(value, _CPU)
        lists = {state: value for state in states if isinstance(value := getattr(metric, state), list) and value}
        self._sent[name] = {state: (len(value), value[-1]) for state, value in lists.items()}
        return {"states": states, "count": metric._update_count, "cache": _to(metric._forward_cache, _CPU)}

    def _take(self, metric: Metric, news: dict[str, Any]) -> None:
        """Bring a metric's state to what the last stage has."""
        for name, value in news["states"].items():
            if isinstance(value, tuple):
                value = [*getattr(metric, name)[: value[0]], *_to(value[1], self._device)]
            setattr(metric, name, _to(value, self._device))
        metric._update_count, metric._computed = news["count"], None
        metric._forward_cache = _to(news["cache"], self._device)


def _log_nothing(*args: Any, **options: Any) -> None:
    """Where the loss is not computed."""


def _to(value: Any, device: torch.device) -> Any:
    """Tensors, and lists of them, on a device."""
    if isinstance(value, list):
        return [_to(one, device) for one in value]
    return value.detach().to(device) if isinstance(value, Tensor) else value
