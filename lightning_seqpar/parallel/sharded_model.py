"""The record of a model that a plan was carried out on, and what that changed of its modules: compared, and taken back.

No style lists what it changes: a module's class and its own attributes are compared as a whole. Parameters and buffers are
cut in place and made whole again from their layouts; hooks are removed by their handles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_seqpar.distributed.rng import DEVICES, generators
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.layout.param_layout import ModelLayout, ParamLayout
from lightning_seqpar.parallel.compiled_blocks import BlockGraphs
from lightning_seqpar.pipeline.stage import Stage
from lightning_seqpar.region.products import ColumnGroup
from lightning_seqpar.region.sequence_region import SequenceRegion
from lightning_seqpar.styles.style import Match
from lightning_seqpar.topology.process_groups import ParallelGroups


@dataclass(frozen=True)
class ModuleChange:
    """How one module differs from what the user wrote."""

    module: nn.Module
    own: type  # its class in the user's model
    other: type  # its class now
    added: frozenset[str]  # attributes that it did not have
    replaced: dict[str, Any]  # what attributes that it has had were before
    counts: dict[str, tuple[int, int]]  # whole numbers (features, heads) that differ: before, now

    def undo(self) -> None:
        """Give the module its own class and attributes back; what others have set since stays."""
        self.module.__class__ = self.own
        own = vars(self.module)
        for name in self.added:
            own.pop(name, None)
        own.update(self.replaced)


class ModuleSnapshot:
    """A module's class and attributes as they are when this is made."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._kind, self._attributes = module, type(module), dict(vars(module))

    def change(self) -> ModuleChange | None:
        """What is different now; none if nothing is."""
        before, now = self._attributes, vars(self._module)
        added = frozenset(now.keys() - before.keys())
        replaced = {name: value for name, value in before.items() if name in now and now[name] is not value}
        if type(self._module) is self._kind and not added and not replaced:
            return None
        counts = {
            name: (value, now[name])
            for name, value in replaced.items()
            if type(value) is int and type(now[name]) is int and value != now[name]
        }
        return ModuleChange(self._module, self._kind, type(self._module), added, replaced, counts)


def changes_since(snapshots: Iterable[ModuleSnapshot]) -> list[ModuleChange]:
    """Every module that differs from its snapshot."""
    return [change for snapshot in snapshots if (change := snapshot.change()) is not None]


class _WholeShapes(TorchFunctionMode):
    """Sharded parameters that are asked for their shape tell that of the whole."""

    def __init__(self, layout: ModelLayout) -> None:
        super().__init__()
        self._layout = layout

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = args[0] if args else kwargs.get("input")
        found = self._layout.of(asked) if isinstance(asked, Tensor) else None
        if asked is not None and found is not None and found.is_sharded:
            shape = torch.Size(found.global_shape)
            if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
                return shape
            if func is Tensor.size:
                dim = args[1] if len(args) > 1 else kwargs.get("dim")
                return shape if dim is None else shape[dim]
            if func in (Tensor.numel, Tensor.nelement, torch.numel):
                return math.prod(shape)
            if func is Tensor.__len__:
                return shape[0]
        return func(*args, **kwargs)


@contextmanager
def as_written(changed: Sequence[ModuleChange], layout: ModelLayout) -> Iterator[None]:
    """Shows ``configure_optimizers`` the model that the user wrote: its classes, its numbers and the whole shapes of parameters.

    Learning rates that follow from a weight's width (muP), groups by shape or by a module's exact class are then what they are in
    one process. Nothing can be run or copied meanwhile: the weights are shards.
    """
    with ExitStack() as stack:
        for one in changed:
            if type(one.module) is one.other:
                stack.enter_context(_as_own(one))
        stack.enter_context(_WholeShapes(layout))
        yield


@contextmanager
def _as_own(one: ModuleChange) -> Iterator[None]:
    module, held = one.module, vars(one.module)  # instances may have a forward of their own

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"configure_optimizers runs or copies a {one.own.__name__} whose weights are this rank's shards by then; make copies "
            "in __init__ or configure_model, and run the model in on_fit_start or later"
        )

    kept: dict[str, Any] = {key: held[key] for key in ("forward", "__deepcopy__") if key in held}
    held.update({key: whole for key, (whole, _) in one.counts.items()})
    held.update(forward=refuse, __deepcopy__=refuse)
    module.__class__ = one.own
    try:
        yield
    finally:
        for key in ("forward", "__deepcopy__"):
            del held[key]
        held.update(kept)
        held.update({key: local for key, (_, local) in one.counts.items()})
        if type(module) is one.own:
            module.__class__ = one.other


RECORD_KEY = "_seqpar_record"
"""Under which a sharded model's own attributes hold its record."""
PART_KEY = "_seqpar_part"
"""Under which a module that holds a shard has its name, by which copies of it are known."""

PICKLE_KEY = "_seqpar_pickle_guard"
"""Under which a module that holds a shard, at any depth, has what refuses to be pickled."""
NEVER_SHARDS = (
    "shards, which must never pass for the model. Use trainer.save_checkpoint(path) or fabric.save, which write the whole model, "
    "or lightning_seqpar.unshard(model) first (both on all ranks)"
)
"""What an error says to one who asks a sharded model for its tensors."""


class PickleGuard:
    """The first attribute of a module that must not be pickled: pickling it, and so the module, raises. Copies have it too."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __deepcopy__(self, memo: dict[int, Any]) -> PickleGuard:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(self._why)


_WRITES_SHARDS = f"pickling (torch.save) of a parallelised model, or of a part, would write {NEVER_SHARDS}"


def guard_pickling(module: nn.Module, why: str = _WRITES_SHARDS) -> None:
    """Refuse to pickle a module, in place: what it holds comes behind the first of its attributes, which raises ``why``."""
    own = vars(module)
    others = dict(own)
    own.clear()
    own[PICKLE_KEY] = PickleGuard(why)
    own.update(others)


@dataclass
class ShardedModel:
    """What parallelisation did to a model; found again with :func:`record_of`."""

    model: nn.Module
    layout: ModelLayout
    groups: ParallelGroups
    regions: list[SequenceRegion]  # one per stack of blocks
    sp: bool
    matches: list[Match]  # the plan's rules with the modules and tensors that they hold for, in order
    buffers: dict[str, ParamLayout] = field(default_factory=dict)  # those that are cut
    hooks: list[RemovableHandle] = field(default_factory=list)
    reading: bool = False  # state_dict may answer
    strategy: Callable[[], Any] = lambda: None
    made_by: object = None
    is_copy: bool = False  # no trainer trains it
    on_shards: frozenset[str] = frozenset()  # partial parameters that are read inside a sequence region
    recomputed: tuple[str, ...] = ()  # modules that run again in the backward
    tiled: tuple[str, ...] = ()  # MLPs that run some tokens at a time
    column_groups: tuple[ColumnGroup, ...] = ()  # columns that may read what is gathered for one module
    stay_frozen: frozenset[str] = frozenset()  # the plan was proved with them frozen alone
    why_frozen: str = ""  # what is wrong when they train
    versions: dict[str, int] = field(default_factory=dict)
    changes: list[ModuleChange] = field(default_factory=list)  # what became of its modules, to take it back
    replicas: Any = None  # FullySharded; None if every replica holds all parts
    graphs: BlockGraphs | None = None  # None if blocks run eagerly
    context_blocks: tuple[str, ...] = ()  # that see a part of the sequence each
    stage: Stage | None = None  # None without a pipeline
    summoned: frozenset[str] = frozenset()  # parameters that are whole for now
    summons: int = 0  # how often that has changed

    @property
    def choices(self) -> list[tuple[str, str, str]]:
        """``(module, style, who decided)`` for each planned module, in order."""
        return [(match.name, match.rule.style, match.source) for match in self.matches]

    def note_versions(self) -> None:
        """The shards are as they should be now."""
        sharded = [name for name, item in self.layout.items() if item.is_sharded]
        self.versions = {name: self.layout.parameter(name)._version for name in sharded}

    def check_versions(self) -> None:
        """Nobody may have initialised shards by himself: every rank would have given its part the same numbers."""
        for name, version in self.versions.items():
            if self.layout.parameter(name)._version != version:
                raise ValueError(
                    f"{name}: changed in place after the model was sharded and before training; initialise weights in "
                    "__init__ or configure_model, while they are whole"
                )

    def check_frozen(self) -> None:
        """What was frozen in the proof must not train, if the proof holds for that alone."""
        for name in sorted(self.stay_frozen):
            if self.layout.parameter(name).requires_grad:
                raise RuntimeError(
                    f"{name}: it trains now, and the plan could be proved only with it frozen ({self.why_frozen}). Thaw it before "
                    "trainer.fit, and write or mend the plan (plan={'rules': [...]}) until the self-check passes"
                )

    def as_written(self) -> AbstractContextManager[None]:
        """The model looks like the user's own, for code that reads its classes and shapes and runs nothing."""
        # The last change of a module first, since each leads to the class of the one before.
        seen = [change for change in reversed(self.changes) if change.own is not change.other or change.counts]
        return as_written(seen, self.layout)

    def on_shard(self, name: str) -> bool:
        """Whether the module stands inside blocks whose activations are shards."""
        return any(region.sp and any(inside(name, one) for one in region.blocks) for region in self.regions)

    def equal_buffers(self) -> list[tuple[str, Tensor]]:
        """Buffers that every rank must hold alike: all but the cut ones and those of modules that work on local features."""
        local = {match.name for match in self.matches if match.rule.holds_local_features}
        alike = [(name, buffer) for name, buffer in self.model.named_buffers() if name not in self.buffers and buffer.numel()]
        return [(n, buffer) for n, buffer in alike if not any(inside(n.rpartition(".")[0], one) for one in local)]

    def reset_calls(self, *, draws: Collection[str] = DEVICES, forget: bool = True) -> None:
        """A new step begins: forget what aborted calls left, and, with ``forget``, the random streams of steps before it.

        ``draws`` are the types of the devices on which draws are expected in it.
        """
        expected = generators(draws)
        for region in self.regions:
            region.reset()
            region.streams.draws = expected
        if forget:
            self.forget_streams()

    def forget_streams(self) -> None:
        """Forget the random streams of steps whose backwards have run."""
        for region in self.regions:
            region.streams.forget()
        for group in self.column_groups:
            if group.left:
                group.settle()

    def is_inside(self, name: str) -> bool:
        """Whether the module of that name works on shards."""
        return any(item.is_sharded or item.is_partial for key, item in self.layout.items() if inside(key, name))

    def added_inside(self) -> list[nn.Parameter]:
        """Parameters that came after the model was sharded, inside modules that it had then."""
        return [
            self.model.get_parameter(name)
            for name in self.layout.added(self.model)
            if any(self.is_inside(name[:at]) for at, char in enumerate(name) if char == ".")
        ]

    def check_closed(self, out: Any = None) -> None:
        """A step ended with ``out``: no shard must be given away."""
        leaves = [out] if isinstance(out, Tensor) else tree_leaves(out)
        for region in self.regions:
            region.observers.sharded_outputs.check_none(leaves, f"the sequence region of {region.name}")

    @contextmanager
    def allow_state_dict(self) -> Iterator[None]:
        """Let ``state_dict`` answer with local tensors, for those who know the layout."""
        self.reading = True
        try:
            yield
        finally:
            self.reading = False


def record_of(model: nn.Module) -> ShardedModel | None:
    """The record of a model that is parallelised now; none for any other."""
    record = model.__dict__.get(RECORD_KEY)
    return record if isinstance(record, ShardedModel) and record.model is model else None


def guard_state_dict(record: ShardedModel) -> Callable[..., None]:
    """A pre-hook of ``state_dict`` that refuses to return shards."""

    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not record.reading:
            raise RuntimeError(f"state_dict() of a parallelised model would return {NEVER_SHARDS}")

    return hook


def whole_model(model: nn.Module, groups: ParallelGroups) -> ShardedModel:
    """The record of a model of which tp shards nothing, so that the replicas can split it (``data_parallel='fsdp'`` at tp 1)."""
    names = [name for name, _ in model.named_parameters()]
    layouts = {name: ParamLayout(name, tuple(model.get_parameter(name).shape)) for name in names}
    record = ShardedModel(model, ModelLayout(model, layouts), groups, [], sp=False, matches=[])
    record.hooks = [module.register_state_dict_pre_hook(guard_state_dict(record)) for module in model.modules()]
    model.__dict__[RECORD_KEY] = record
    return record


def refuse_copies(record: ShardedModel) -> None:
    """What the model holds must not be a copy of one of its shards, which would pass for the whole."""
    for name, module in record.model.named_modules():
        if PART_KEY in module.__dict__ and any(record.layout.of(p) is None for p in module.parameters(recurse=False)):
            raise RuntimeError(
                f"{name} is a copy of {module.__dict__[PART_KEY]}, made while it was sharded: it holds this rank's part, which "
                "would pass for the whole. Make copies (an average of weights, a reference) in __init__ or configure_model, where "
                "they are sharded like any model, or keep them out of the module"
            )
