"""``verify_parity``: is my parallel loss right? One process beside several, for any model and any strategy of Lightning's."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.releases import pl
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.user_input import nearest
from lightning_seqpar.verify.parity import ParityReport, Row
from lightning_seqpar.verify.ranks import RankFailedError, RankFailure, run_alone, run_distributed
from lightning_seqpar.verify.training import AT_ONCE, Outcome, Trial, TrialError, train_alone, train_on_ranks
from lightning_seqpar.verify.trial_comparison import Group, Sides, Wrong, group_first_wrong

DType = Literal["float64", "float32"]
Strategy = pl.strategies.Strategy


@dataclass
class Verification:
    """What :func:`verify_parity` found; ``str()`` is its verdict, a table and, if something differs, hints.

    Attributes:
        status: ``right``, ``wrong``, ``refused`` (the strategy will not train this, and says why) or ``failed``.
        setting: the topology in words.
        rows: what was compared, and the largest error of each.
        wrong: the tensors that differ.
        groups: the same, put together by what they look like.
        message: why it was refused or failed.
        trace: the traceback of that.
        notes: what else one should know.
    """

    status: Literal["right", "wrong", "refused", "failed"]
    setting: str
    rows: list[Row] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    message: str = ""
    trace: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the ranks train as one process does."""
        return self.status == "right"

    @property
    def verdict(self) -> str:
        """One line."""
        if self.status in ("refused", "failed"):
            return f"{self.status.upper()}: {self.setting}: {self.message}"
        if self.status == "right":
            worst = ParityReport(tuple(self.rows)).worst
            return (
                f"RIGHT: {self.setting} trains as one process does (largest error {worst.error:.1e} of {worst.quantity}, "
                f"limit {worst.limit:.0e})"
            )
        wrong = f"WRONG: {self.setting} does not train as one process does"
        if not self.groups:
            return f"{wrong}: {next(row for row in self.rows if not row.ok).quantity} differs"
        group, others = self.groups[0], sum(group.count for group in self.groups[1:])
        what = group.what + (f" ({group.count} parameters)" if group.count > 1 else "")
        more = f", and of {others} other{'s' * (others > 1)}" if others else ""
        return f"{wrong}; the {group.worst.quantity} of {what}{more}: {group.worst.hint}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        data = asdict(self)
        data["rows"] = [{**asdict(row), "ok": row.ok} for row in self.rows]
        return {"ok": self.ok, "verdict": self.verdict, **data}

    def raise_if_wrong(self) -> None:
        """Raise ``AssertionError`` with everything that is known, unless the ranks train as one process does."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        lines = [self.verdict]
        if self.rows:
            lines += ["", str(ParityReport(tuple(self.rows)))]
        if self.groups:
            if any(row.quantity.startswith("the loss of step 1") and not row.ok for row in self.rows):
                lines += ["", "the loss of step 1 differs already: look at the forward first"]
            lines += ["", f"what differs first: the {self.groups[0].worst.quantity} of"]
            for group in self.groups:
                one = group.worst
                lines.append(f"  {group.what}{f' ({group.count})' if group.count > 1 else ''}")
                lines.append(f"    {one.hint} (error {one.error:.1e}, {one.own_error:.1e} of its own size)")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def verify_parity(
    module_or_factory: nn.Module | Callable[[], nn.Module],
    batch: Any = None,
    config: ParallelConfig | Mapping[str, Any] | Strategy | str | Callable[[], Strategy] | None = None,
    *,
    world_size: int | None = None,
    second_batch: Any = None,
    reference: nn.Module | Callable[[], nn.Module] | None = None,
    samples: int = 1,
    length: int | None = None,
    micro_batches: int | None = None,
    dtype: DType = "float64",
    trainer: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
) -> Verification:
    """Train a module in one process and on several gloo ranks of this machine, on its CPU, and compare all that they did.

    Both begin with the same weights and read the same batches: two optimizer steps, the second with shorter sequences, then a
    checkpoint from which fresh processes' modules resume for a third step. Losses, every gathered gradient, the global norm and
    the weights are compared. Dropout is off. One process reads the parts of all replicas as micro-batches, as data parallelism
    averages them; a module that optimizes by itself reads the whole batch there.

    Args:
        module_or_factory: a ``LightningModule``, or any module (it is trained by the loss that it returns, or by a fixed
            projection of its outputs), or a function that makes one. It is pickled: a factory must stand at the top of a module.
        batch: the first batch, for all replicas together; its tensors begin with the samples. The default is the first of the
            module's ``train_dataloader``, or random tokens for a Hugging Face model.
        config: fields of :class:`~lightning_seqpar.ParallelConfig`, or any strategy of Lightning's: one that has not been used,
            its registered name, or a function that makes one.
        world_size: number of ranks; the default is the smallest that a ParallelConfig fits, and 2 for other strategies.
        second_batch: the second batch; the default is the first with its samples reversed and its sequences cut.
        reference: the module as one process trains it, if that is another one.
        samples: samples of a micro-batch that is made up.
        length: positions of a sample that is made up; the default is 32.
        micro_batches: how many a replica accumulates for a step; the default is the number of pipeline stages.
        dtype: ``float64`` (limit 1e-9), or ``float32`` (1e-5 for losses, 1e-4 for gradients; weights are not compared).
        trainer: more arguments of both Trainers, such as ``{"gradient_clip_val": 1.0}``.
        timeout: seconds for each side.

    Raises TrialError for arguments that make no trial, or a module that one process can't train.
    """
    for name, given in (("module_or_factory", module_or_factory), ("reference", nn.Module if reference is None else reference)):
        if not callable(given):  # a module is, too
            raise TrialError(f"{name}={given!r} is neither a module nor a function that makes one; give one of them")
    strategy, parallel = _strategy(config)
    if world_size is None:
        world_size = 2 if parallel is None else parallel.smallest_world
    if world_size < 2:
        raise TrialError(f"world_size={world_size}: there is nothing to compare one process with; give 2 or more")
    replicas = 1
    if parallel is not None:
        replicas = ProcessTopology.from_config(parallel, world_size).get_dim("dp")
        micro_batches = micro_batches or parallel.pp
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(
            make=_maker(module_or_factory),
            reference=_maker(reference),
            batch=_maker(batch),
            second=_maker(second_batch),
            samples=samples,
            length=length,
            strategy=strategy,
            meshed=parallel is None and isinstance(strategy(), pl.strategies.ModelParallelStrategy),
            micro_batches=micro_batches or 1,
            # Ours pads lengths that do not divide; plans of others' need not.
            unit=None if parallel is not None else world_size,
            trainer=dict(trainer or {}),
            dtype=torch.float64 if dtype == "float64" else torch.float32,
            folder=folder,
        )
        sent = _pickled(trial)
        setting = _in_words(parallel, config, world_size)
        whole, same_length, notes = _train_alone(sent, replicas, timeout)
        try:
            ranks = run_distributed(train_on_ranks, world_size, sent, same_length, whole.casts > 0, timeout=timeout)
        except RankFailedError as error:
            return _not_trained(error, setting, notes)
        first = ranks[0][0]
        if first.replicas != replicas:
            whole, same_length, notes = _train_alone(sent, first.replicas, timeout)
        sizes = {"model-parallel": world_size // first.replicas, "dp": first.replicas}
        if parallel is not None:
            sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "dp": first.replicas}
        sides = Sides(trial, whole, ranks, sizes)
        found = sides.compare()
        if not found.ok and first.replicas > 1 and whole.parts > 1:
            # Losses that ranks make from what they gather, or divide by numbers of the whole batch, are those of the whole batch.
            with contextlib.suppress(RankFailedError):  # it takes no batch of that size
                together = run_alone(train_alone, sent, first.replicas, same_length, AT_ONCE, timeout=timeout)
                if together.is_complete and not together.failed_length:
                    others = Sides(trial, together, ranks, sizes, AT_ONCE)
                    if (other := others.compare()).ok:
                        found, sides = other, others
            if found.ok:
                notes.append(
                    "replicas train as one process does that reads their parts together; it would do otherwise if it read them "
                    "as micro-batches (a loss that the ranks make from what they gather, or divide by a number of the whole batch)"
                )
        status: Literal["right", "wrong"] = "right" if found.ok else "wrong"
        return Verification(status, setting, list(found.rows), sides.wrong, group_first_wrong(sides.wrong), notes=notes)


def assert_parity(
    module_or_factory: nn.Module | Callable[[], nn.Module],
    batch: Any = None,
    config: ParallelConfig | Mapping[str, Any] | Strategy | str | Callable[[], Strategy] | None = None,
    **options: Any,
) -> Verification:
    """:func:`verify_parity` for a test: an AssertionError with the verdict, the table and the hints unless all is right."""
    found = verify_parity(module_or_factory, batch, config, **options)
    found.raise_if_wrong()
    return found


def _strategy(config: Any) -> tuple[Callable[[], Any], ParallelConfig | None]:
    """What makes the strategy of the ranks, and the configuration if the strategy is ours."""
    ours: Any = sys.modules["lightning_seqpar"].SeqParallelStrategy  # whose module imports this package
    if isinstance(config, ours):
        config = config.config
    if isinstance(config, str):
        known = pl.strategies.StrategyRegistry.available_strategies()
        if config not in known:
            raise TrialError(f"config={config!r} is no strategy that Lightning knows; did you mean {nearest(config, known)}?")
        entry = pl.strategies.StrategyRegistry[config]
        if not config.startswith("seqpar"):
            _refuse_elsewhere(entry["strategy"], config)
            if entry["init_params"].get("start_method", "popen") != "popen":
                raise TrialError(
                    f"config={config!r} starts the ranks itself, which a trial does; give 'ddp', which computes the same"
                )
            return functools.partial(copy.copy, config), None
        config = entry["init_params"]
    if config is None or isinstance(config, Mapping):
        config = ParallelConfig(**(config or {}))
    if isinstance(config, ParallelConfig):
        return functools.partial(ours, config=config), config
    made, make = config, functools.partial(copy.deepcopy, config)
    if not isinstance(config, Strategy):
        if not callable(config):
            raise TrialError(
                f"config={config!r} is no strategy; give fields of ParallelConfig, a strategy of Lightning's, its registered name, "
                "or a function that makes one"
            )
        make = config
        try:
            made = config()
        except Exception as error:  # of the user's code
            raise TrialError(f"config: the function raised {type(error).__name__}: {error}") from error
        if not isinstance(made, Strategy):
            raise TrialError(f"config: the function made {made!r}; it must make a strategy of Lightning's")
    _refuse_elsewhere(type(made), made)
    return make, None


def _refuse_elsewhere(kind: type, strategy: Any) -> None:
    if issubclass(kind, pl.strategies.FSDPStrategy | pl.strategies.DeepSpeedStrategy):
        raise TrialError(
            f"config={strategy if isinstance(strategy, str) else kind.__name__!r} trains on GPUs alone; on the CPU, "
            "where a trial runs, there is FSDP2: fully_shard in configure_model under ModelParallelStrategy, or "
            "data_parallel='fsdp' of ParallelConfig"
        )


def _maker(given: Any) -> Any:
    """What makes a module or a batch anew: a function as it is, else a copy; None of nothing."""
    is_function = callable(given) and not isinstance(given, nn.Module | Mapping | Sequence)
    return given if given is None or is_function else functools.partial(copy.deepcopy, given)


def _pickled(trial: Trial) -> bytes:
    try:
        return pickle.dumps(trial)
    except Exception as error:  # pickle raises errors of many types, and so do objects that refuse it
        raise TrialError(
            f"the module, its batch or the strategy can't be sent to other processes ({error}); give a function that makes it, "
            "which stands at the top of a module (no lambda, no function within another)"
        ) from None


def _train_alone(given: bytes, replicas: int, timeout: float) -> tuple[Outcome, bool, list[str]]:
    """Train in one process: what it did, whether the second batch is as long as the first, and notes."""
    notes: list[str] = []
    try:
        whole = run_alone(train_alone, given, replicas, False, timeout=timeout)
        if same_length := bool(whole.failed_length):
            notes.append(
                f"the second batch has the length of the first: the model itself takes no shorter one ({whole.failed_length})"
            )
            whole = run_alone(train_alone, given, replicas, True, timeout=timeout)
    except RankFailedError as error:
        failure = error.failures[0]
        if failure.text.startswith(TrialError.__name__) or not failure.trace:  # without a trace it did not come to train
            raise TrialError(failure.message) from None
        raise TrialError(f"one process can't train this: {failure.text}") from error
    if len(set(whole.lengths)) == 1 and not notes:
        notes.append("the second batch has the length of the first: no sequence was found in it that could be cut")
    if whole.casts:
        notes.append("what the model's own code computes in narrower types was computed in float64 on both sides")
    if whole.draws:
        notes.append(
            "a step draws random numbers in spite of dropout that is off; they are seeded alike, but a replica draws for its part "
            "of a batch and a rank within the blocks for its part of the model, so the result may differ for that alone: to be "
            "sure, give what is drawn in the batch"
        )
    _refuse_empty(whole)
    return whole, same_length, notes


def _refuse_empty(whole: Outcome) -> None:
    """Refuse a trial that would find everything right since nothing was trained."""
    if not whole.digests or not any(whole.norms):
        what = "took no optimizer step" if not whole.digests else "got no gradient that is not zero"
        raise TrialError(
            f"one process {what} in the first two batches, so there is nothing to compare; see that the module trains (a loss with "
            "a gradient, an optimizer with parameters)"
        )
    for what, values in (("loss", whole.losses), ("norm of the gradients", whole.norms)):
        for step, value in enumerate(values, start=1):
            if not math.isfinite(value):
                raise TrialError(
                    f"the {what} of one process is {value} in step {step}, so there is nothing to compare; see that it is a "
                    "number with these batches"
                )
    if not whole.is_complete:
        raise TrialError(
            "one process ended in front of the third batch; leave what ends a training (max_steps, max_epochs, limits of batches) "
            "to the trial"
        )


def _not_trained(error: RankFailedError, setting: str, notes: list[str]) -> Verification:
    """What it says that ranks raised: a refusal if all of them did, with one sentence."""
    failures = error.failures.values()
    # Ranks that only lost their connection to another one come last.
    first: RankFailure = min(failures, key=lambda one: (one.lost_another, not one.trace))
    if first.text.startswith(TrialError.__name__):
        raise TrialError(first.message) from None
    refused = all(one.refused for one in failures)
    message = first.message if refused else first.text
    return Verification("refused" if refused else "failed", setting, message=message, trace=str(error), notes=notes)


def _in_words(parallel: ParallelConfig | None, config: Any, world_size: int) -> str:
    """The topology: its axes of more than one rank, and the number of ranks; or the name of the strategy."""
    if parallel is None:
        made = config if isinstance(config, str | Strategy) else config()
        return f"{made if isinstance(made, str) else type(made).__name__} on {world_size} ranks"
    topology = ProcessTopology.from_config(parallel, world_size)
    axes = [f"{axis} {size}" for axis in ("tp", "cp", "pp", "dp") if (size := topology.get_dim(axis)) > 1]
    told = {"tp", "cp", "pp", "dp", "order", "self_check", "check_every", "timeout"} | ({"sp"} if parallel.tp == 1 else set())
    others = parallel.model_dump(exclude_defaults=True, exclude=told).items()
    fields = [f"{name}={value if isinstance(value, str | int | float) else '...'}" for name, value in others]
    return f"{', '.join([' × '.join(axes) or 'one rank', *fields])} on {world_size} ranks"
