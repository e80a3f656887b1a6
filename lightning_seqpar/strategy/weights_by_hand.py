"""Code of the user's that works on weights and gradients by hand: refused where it takes this rank's part for the whole.

A sharded parameter and its gradient are plain tensors, of which each rank holds a part. In hooks, callbacks and steps what treats
each element by itself (a product with a number, a clamp, an average with an older value) is right on parts. A norm, a maximum or a
row's mean is that of a part, and another one on each rank. A dispatch mode around the user's hooks follows which tensors are parts,
and which are made of one part alone; the latter may be logged, and must change no weight and decide nothing.
"""

from __future__ import annotations

import dis
import math
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_seqpar.distributed.autograd import (
    Watch,
    innermost_dispatch_mode,
    is_higher_order,
    leave_dispatch_mode,
    storage_id,
)
from lightning_seqpar.layout.param_layout import is_split, local_rows
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.releases import is_lightnings, pl
from lightning_seqpar.strategy.ending import NOT_THE_USERS

_OTHER_HOOKS = ("batch_transfer", "transfer_batch_to_device", "_dataloader", "configure_optimizers", "configure_callbacks")
"""Ends of the names of hooks that see data, or the model as it is made."""
_COPIES = {
    *("copy_", "_to_copy", "fill_", "zero_", "masked_fill", "masked_fill_", "lift_fresh", "_unsafe_view"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
}
"""Operations that treat each element by itself, and that torch does not call pointwise."""
_OVER_RANKS = ("c10d", "_c10d_functional")  # namespaces of collectives: whoever sums over ranks knows of parts
_BY_ONE = {"mul_", "div_", "_foreach_mul_", "_foreach_div_"}
_REMEDY = (
    "Do it where weights and gradients are whole, on all ranks: with lightning_seqpar.summoned(self): ... (the norm of the whole "
    "gradient is lightning_seqpar.grad_norm(self)); what treats each element by itself is right as it is"
)


class _Part(NamedTuple):
    """A storage holds elements of parts."""

    name: str  # of the parameter
    stride: int  # distance in memory of neighbours along the sharded dim; 0 if elements lie in no known order
    length: int  # how many indices of the sharded dim this rank has

    def dims(self, x: Tensor) -> set[int] | None:
        """The dims of a view of the storage that run along the sharded dim; None if the view has some of its indices alone."""
        if not self.stride:
            return {*range(x.ndim)}
        if self.length == 1:
            return {dim for dim in range(x.ndim) if x.shape[dim] == 1}
        found, covered, span = set(), 1.0, self.stride * self.length
        for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
            if stride % span and stride * (size - 1) >= self.stride:
                found.add(dim)
                covered *= size * min(stride, self.stride) / self.stride
        return found if covered >= self.length else None


class _Local(NamedTuple):
    """A storage holds numbers that were made of one rank's part."""

    name: str  # of the parameter
    what: str  # the operation that made them
    where: str  # the user's line


_Mark = _Part | _Local
# What WeightWatch knows of one call.
_OF_A_CALL = ("_decides", "_is_step", "_known", "_numbers", "_read", "_found", "_homes", "_kept", "_rows")


def _has_code(action: str, trainer: pl.Trainer) -> bool:
    """Whether an action that Lightning profiles is a hook that may touch weights, and that somebody has written."""
    kind, _, rest = action.partition("]")
    owner, _, hook = rest.rpartition(".")
    if kind not in ("[Callback", "[LightningModule") or action.endswith(_OTHER_HOOKS):
        return False
    base: type = pl.LightningModule if kind == "[LightningModule" else pl.Callback
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    owners = [trainer.lightning_module] if base is pl.LightningModule else [c for c in callbacks if c.state_key == owner]
    default = getattr(base, hook, None)
    return not owners or any(
        hook in vars(one)
        or (
            (own := getattr(type(one), hook, None)) is not default
            # Lightning's hooks and ours change weights as on one process, or are refused; they may call a subclass of the user's.
            and not all(
                str(each.__module__).startswith("lightning_seqpar.") or is_lightnings(each.__module__)
                for each in (own, type(one))
            )
        )
        for one in owners
    )


class _Profile(dict[str, AbstractContextManager[Any]]):
    """The contexts of the actions that Lightning profiles; those in which nothing is to be done are kept."""

    def __init__(self, watch: WeightWatch, trainer: pl.Trainer, profiler: pl.profilers.Profiler) -> None:
        super().__init__()
        self._watch, self._trainer = watch, trainer
        # Lightning's default enters a generator around each hook, and does nothing in it.
        self._usual = None if type(profiler) is pl.profilers.PassThroughProfiler else profiler.profile
        self._has_code: dict[str, bool] = {}

    def __missing__(self, action: str) -> AbstractContextManager[Any]:
        if (has_code := self._has_code.get(action)) is None:
            has_code = self._has_code[action] = _has_code(action, self._trainer)
        if has_code:
            watched = self._watch.watched(decides=action.endswith(".optimizer_step"))
            return watched if self._usual is None else _both(self._usual(action), watched)
        return self.setdefault(action, nullcontext()) if self._usual is None else self._usual(action)


@contextmanager
def _both(usual: AbstractContextManager[Any], watched: AbstractContextManager[None]) -> Generator[Any, None, None]:
    with usual as name, watched:
        yield name


class WeightWatch(Watch):
    """Watches what the user's hooks and steps do with the parts of a sharded model: a dispatch mode around one call at a time."""

    def __init__(self, record: ShardedModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record
        self._marks: dict[int, tuple[StorageWeakRef, _Mark]] = {}
        self._room = 1024
        self._has_warned = self.is_on = False
        self._profiler: pl.profilers.Profiler | None = None
        self._begin_call()

    def _begin_call(self, *, decides: bool = False, is_step: bool = False) -> None:
        """What is known of the call that is watched: of each its own, also where one runs in the midst of another."""
        self._decides, self._is_step = decides, is_step
        self._known: int | None = None  # how often weights were summoned when homes were found
        self._numbers: list[tuple[Tensor, _Local]] = []
        self._read: _Local | None = None  # of which a number was read
        self._found: _Local | None = None  # what was made of one part first
        # By the storages that hold parameters and their gradients: of each the bytes behind its end, its name and its part.
        self._homes: dict[int, list[tuple[int, str, _Part | None]]] = {}
        self._kept: list[StorageWeakRef] = []
        self._rows: dict[str, int] = {}  # of parameters that replicas split, the storages that they show

    # ---- where it watches --------------------------------------------------------------------------------------

    def begin(self, trainer: pl.Trainer) -> None:
        """Watch each hook that has code in it, by Lightning's profiler, in every step: nothing else sees what it does."""
        profiler: pl.profilers.Profiler = trainer.profiler  # type: ignore[attr-defined]
        self._profiler, vars(profiler)["profile"] = profiler, _Profile(self, trainer, profiler).__getitem__

    def end(self) -> None:
        """Leave the profiler as it was."""
        if self._profiler is not None:
            vars(self._profiler).pop("profile", None)
            self._profiler = None

    @contextmanager
    def watched(self, *, decides: bool, is_step: bool = False) -> Generator[None, None, None]:
        """A context manager for code of the user's; ValueError for what takes a part for the whole.

        ``decides`` says whether a number that the code reads is taken to decide something; ``is_step`` whether it is a step,
        with a forward, where autograd knows what a loss reads.
        """
        if self.is_on:
            yield
            return
        outer = {name: vars(self)[name] for name in _OF_A_CALL}
        self._begin_call(decides=decides, is_step=is_step)
        self.is_on = True
        self.__enter__()  # type: ignore[no-untyped-call]
        try:
            try:
                yield
            finally:
                leave_dispatch_mode(self)
            self._refuse_lost()
            if self._found is not None:
                self._refuse_assigned()
            if (found := self._found) is not None and not self._has_warned:
                self._has_warned = True
                rank_zero_warn(
                    f"lightning_seqpar: {found.where} takes {found.what} of {found.name}, of which this rank holds a part: the "
                    "number is not that of the whole. lightning_seqpar.grad_norm(self) is the norm of the whole gradient; for "
                    "others use with lightning_seqpar.summoned(self): ..."
                )
        finally:
            self.is_on = False
            vars(self).update(outer)

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """A context manager for what the strategy itself runs in the midst of a hook: forward, backward, the optimizer's step."""
        if not self.is_on or innermost_dispatch_mode() is not self:
            yield
            return
        self.is_on = False
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()
            self._known = None  # there may be other gradients than before
            self.is_on = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Blocks that are compiled stay so."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_higher_order(func):
            return func(*args, **(kwargs or {}))
        given = kwargs or {}
        if any(kind not in (Tensor, nn.Parameter, DTensor) for kind in types):
            return func(*args, **given)
        if self._known != self._record.summons:
            self._look_up()
        tensors = [*_tensors((*args, *given.values()))]
        is_known = any(self._mark_of(x) is not None for x in tensors)
        if not is_known or (self._is_step and torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            out = func(*args, **given)
            if self._numbers and func is torch.ops.aten.lift_fresh.default:
                self._look_at_lifted(out)
        else:
            out = self._follow(func, args, given)
        if self._read is not None and func._schema.is_mutable and func.namespace not in _OVER_RANKS:
            self._check_write(_written(func, args, given))
        return out

    # ---- what it knows -----------------------------------------------------------------------------------------

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """The parts over tp of the model's parameters, and of their gradients, by the parameter's name."""
        for name in self._record.layout:
            if name not in self._record.summoned:
                parameter = self._record.layout.parameter(name)
                yield name, parameter
                if parameter.grad is not None:
                    yield name, parameter.grad

    def _look_up(self) -> None:
        """Find the storages of the model's parts, which change where gradients come and weights are summoned."""
        record = self._record
        self._known, layout = record.summons, record.layout
        for name in record.summoned:
            whole = record.model.get_parameter(name)
            self._forget(x for x in (whole, whole.grad) if x is not None)
        # A gradient may be replaced: a weak reference keeps another storage from getting the same number.
        self._homes, self._kept = {}, []
        parameters = {name: layout.parameter(name) for name in layout if name not in record.summoned}
        self._rows = {name: storage_id(x) for name, x in parameters.items() if is_split(x)}
        for name, x in self._held():
            rows, shard = local_rows(x), layout[name].shard
            end = int((rows.storage_offset() + rows.numel()) * rows.element_size())
            part = None if shard is None else _Part(name, x.stride(shard.dim), x.shape[shard.dim])
            self._kept.append(StorageWeakRef(rows.untyped_storage()))
            self._homes.setdefault(storage_id(rows), []).append((end, name, part))
        for homes in self._homes.values():
            homes.sort(key=lambda home: home[0])

    def _home_of(self, x: Tensor) -> tuple[str, _Part | None] | None:
        """The parameter that a tensor, or the gradient whose view it is, belongs to; and its part, if it is sharded."""
        rows = local_rows(x)
        homes = self._homes.get(storage_id(rows), ())  # several, where gradients are reduced together
        at = rows.storage_offset() * rows.element_size()
        return next(((name, part) for end, name, part in homes if at < end), None)

    def _mark_of(self, x: Tensor) -> _Mark | None:
        home, known = self._home_of(x), self._marks.get(_key(x))
        if known is not None and not known[0].expired() and (isinstance(known[1], _Local) or home is None):
            return known[1]
        return None if home is None else home[1]

    def _mark(self, x: Tensor, mark: _Mark) -> None:
        if len(self._marks) >= self._room:
            self._marks = {key: held for key, held in self._marks.items() if not held[0].expired()}
            self._room = max(1024, 2 * len(self._marks))
        # The weak reference keeps another storage from getting the same number.
        self._marks[_key(x)] = StorageWeakRef(local_rows(x).untyped_storage()), mark

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            self._marks.pop(_key(x), None)

    # ---- one operation ---------------------------------------------------------------------------------------------

    def _follow(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense":
            self._check_read(args[0])
            return func(*args, **given)
        out = func(*args, **given)
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if is_view and all(self._mark_of(x) is not None for x in _tensors([out])):
            return out  # rows of replicas may be gathered for it; then it has a storage of its own
        if func.namespace in _OVER_RANKS:
            self._forget(_written(func, args, given))
            return out
        if name.startswith("_foreach_"):
            lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
            alone = [arg for arg in args if isinstance(arg, Tensor)]
            count = len(lists[0])
            for at in range(count):
                sources = [*(each[at] for each in lists if len(each) == count), *alone]
                self._note(func, name, args, given, sources, [*_tensors((out or ())[at : at + 1])])
        else:
            self._note(func, name, args, given, [*_tensors((*args, *given.values()))], [*_tensors([out])])
        return out

    def _note(self, func: Any, name: str, args: Any, given: Any, sources: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Mark what an operation on ``sources`` made: ``made``, or what it wrote to."""
        in_place = func._schema.is_mutable
        targets = made if not in_place else [sources[0]] if name.startswith("_foreach_") else _written(func, args, given)
        result = self._result(func, name, args, given, sources, targets)
        if result is None:
            return
        if in_place and isinstance(result, _Local):
            if name in _BY_ONE and len(sources) == 2 and _value(sources[1]) == 1:
                return
            self._check_write(targets, result)
        for target in targets:
            if isinstance(result, _Local):
                self._mark(target, result)
                if target.numel() == 1:
                    self._numbers.append((target, result))
            elif self._mark_of(target) is None:
                rows = local_rows(target)
                owns = rows.numel() * rows.element_size() == rows.untyped_storage().nbytes()
                self._mark(target, _laid_out(result, target) if owns else _Part(result[0], 0, 2))

    def _result(self, func: Any, name: str, args: Any, given: Any, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Any:
        """A :class:`_Local`, or a parameter's name and the dims of the result that run along its sharded dim; None for neither."""
        marks = [(x, mark) for x in sources if (mark := self._mark_of(x)) is not None]
        for _, mark in marks:
            if isinstance(mark, _Local):
                return mark
        parts = [(x, mark, mark.dims(x)) for x, mark in marks if isinstance(mark, _Part)]
        if not parts or not targets:
            return None
        part = parts[0][1].name
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random or any(dims is None for _, _, dims in parts):
            return self._made_local(part, name if is_random else "index", targets)
        ndim = targets[0].ndim
        if torch.Tag.pointwise in func.tags or name in _COPIES or _is_masked(name, args):
            found = [frozenset(ndim - x.ndim + dim for dim in dims or ()) for x, _, dims in parts]
            return part, found[0] if len({*found}) == 1 else None
        if name.startswith("_foreach_") and name.rstrip("_") not in ("_foreach_norm", "_foreach_max"):
            return part, frozenset(parts[0][2] or ())
        if name in ("cat", "stack"):
            return part, None
        x, _, dims = parts[0]
        along = _dims_of(func, args, given, x)
        if len(parts) == 1 and x is sources[0] and along is not None and dims is not None:
            if name in ("renorm", "renorm_"):  # whose dim is the one along which they do not reduce
                along = {*range(x.ndim)} - along
            if not along & dims:
                gone = sorted(along) if ndim < x.ndim else []
                return part, frozenset(dim - sum(one < dim for one in gone) for dim in dims)
        return self._made_local(part, name, targets)

    def _made_local(self, part: str, name: str, targets: Sequence[Tensor]) -> _Local | None:
        """What code of the user's made of one part; None for code of others, which knows of parts."""
        frame = _users_frame(sys._getframe(1))
        if frame is None:
            return None
        if name in ("any", "all") and _value(targets[0]) == (name == "all"):
            return None  # so it is for the whole, unless another rank finds another answer, and says so
        names = [one.f_code.co_name for one in _frames(sys._getframe(1)) if _module(one) == "torch.nn.utils.clip_grad"]
        helper = [one for one in names if not one.startswith("_")][-1:]
        found = _Local(part, helper[0] if helper else f"'{name.removeprefix('linalg_').strip('_')}'", _shown(frame))
        self._found = self._found or found
        return found

    def _refuse_lost(self) -> None:
        """Refuse ``parameter.data = ...`` where replicas split parameters: torch shows the new tensor, and keeps its rows."""
        for name, shown in self._rows.items():
            if storage_id(self._record.layout.parameter(name)) != shown:
                raise ValueError(
                    f"{name}: its data was assigned (parameter.data = ...), which data_parallel='fsdp' never reads; change it in "
                    "place (parameter.data.copy_(...))"
                )

    def _refuse_assigned(self) -> None:
        """Refuse a parameter or gradient that was replaced by what was made of one part (``weight.data = ...``)."""
        for name, x in self._held():
            known = self._marks.get(_key(x))
            if known is not None and isinstance(known[1], _Local):
                raise ValueError(_refusal(known[1], f"and puts what it makes of it into {name}"))

    def _check_write(self, targets: Iterable[Tensor], found: _Local | None = None) -> None:
        """Refuse what the user's code writes into a parameter or a gradient, if it is made of one part, or decided by one."""
        home = next((home[0] for home in map(self._home_of, targets) if home is not None), None)
        if home is None or (frame := _users_frame(sys._getframe(1))) is None:
            return
        if found is not None:
            raise ValueError(_refusal(found, f"and {_shown(frame)} writes what it makes of it into {home}"))
        if self._read is not None:
            raise ValueError(_refusal(self._read, f"reads it as a number, and {_shown(frame)} changes {home} behind that"))

    def _check_read(self, x: Tensor) -> None:
        mark = self._mark_of(x)
        frame = _users_frame(sys._getframe(1), libraries=False)
        if mark is None or frame is None:
            return
        found = mark if isinstance(mark, _Local) else _Local(mark.name, "one element", _shown(frame))
        self._found = self._found or found
        at = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        is_tested = "JUMP" in at or at in ("UNARY_NOT", "TO_BOOL")  # at if, while, and, not
        if self._decides or is_tested:
            raise ValueError(_refusal(found, f"and {_shown(frame)} decides by it"))
        self._read = self._read or found

    def _look_at_lifted(self, out: Tensor) -> None:
        """Mark a tensor that ``torch.tensor`` made of numbers, if one of them is of one part: no mode sees how it reads them."""
        if not out.is_floating_point() or out.numel() > 2**14:
            return
        values = {*out.flatten().tolist()} - {0.0, 1.0}
        for number, mark in self._numbers:
            if _value(number, out.dtype) in values:
                self._mark(out, mark)
                return


def _refusal(found: _Local, how: str) -> str:
    if "clip_grad" in found.what:
        return (
            f"{found.name}: gradients were clipped by torch.nn.utils.{found.what} ({found.where}), which knows nothing of shards "
            "(use self.clip_gradients or Trainer(gradient_clip_val=...))"
        )
    how = how.replace(f"{found.where} ", "")
    part = f"takes {found.what} of this rank's part of it, which is not that of the whole"
    return f"{found.name}: {found.where} {part}, {how}. {_REMEDY}"


def _key(x: Tensor) -> int:
    """A number for what holds a tensor, or this rank's rows of one that replicas split."""
    return storage_id(local_rows(x))


def _value(x: Tensor, dtype: torch.dtype | None = None) -> float | None:
    """A number on the device; None for what is none, or is a term of a sum over replicas."""
    if x.numel() != 1 or (is_split(x) and not all(place.is_replicate() for place in x.placements)):
        return None
    with torch.no_grad():
        return float(local_rows(x).to(x.dtype if dtype is None else dtype))


def _laid_out(result: tuple[str, frozenset[int] | None], x: Tensor) -> _Part:
    """How a tensor that owns its storage holds elements of parts."""
    name, dims = result
    if dims is None:
        return _Part(name, 0, 2)
    along = [dim for dim in dims if x.shape[dim] > 1]
    if not along:
        return _Part(name, 1, 1)
    return _Part(name, min(x.stride(dim) for dim in along), math.prod(x.shape[dim] for dim in along))


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from (x for x in arg if isinstance(x, Tensor))


def _written(func: Any, args: Any, given: Any) -> list[Tensor]:
    arguments = func._schema.arguments
    names = {one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write}
    bound = {**dict(zip((one.name for one in arguments), args, strict=False)), **given}
    return [*_tensors(bound[name] for name in names if name in bound)]


def _dims_of(func: Any, args: Any, given: Any, x: Tensor) -> set[int] | None:
    """The dims along which an operation works; None if it does not name them."""
    if func._schema.name.partition("::")[2] in ("index", "index_put", "index_put_"):
        is_plain = all(one is None or (one.ndim == 1 and one.dtype != torch.bool) for one in args[1])
        return {dim for dim, one in enumerate(args[1]) if one is not None} if is_plain else None
    for at, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims"):
            told = given.get(argument.name, args[at] if at < len(args) else argument.default_value)
            told = [told] if isinstance(told, int) else told
            return {dim % max(x.ndim, 1) for dim in told} if told else {*range(x.ndim)}
    return None


def _is_masked(name: str, args: Any) -> bool:
    """Whether elements are exchanged where a mask of the tensor's own shape says so."""
    if name not in ("index_put", "index_put_") or len(args[1]) != 1 or args[1][0] is None:
        return False
    (mask,) = args[1]
    return bool(mask.dtype == torch.bool and mask.shape == args[0].shape and args[2].numel() == 1)


# ---- frames ------------------------------------------------------------------------------------------------------------

_RUNS = tuple(f"{pl.__name__}.{part}" for part in ("loops", "trainer", "strategies"))
"""Modules of Lightning that call the user's code."""
_TRANSPARENT = {*sys.stdlib_module_names, *NOT_THE_USERS} - {"lightning_seqpar"}


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__") or "")


def _users_frame(start: FrameType, *, libraries: bool = True) -> FrameType | None:
    """The user's innermost frame, if that works on weights by hand; None in a module's forward, a backward or an optimizer."""
    user = None
    for frame in _frames(start):
        module = _module(frame)
        package = module.partition(".")[0]
        if module == __name__:
            continue
        if package == "lightning_seqpar" or module.startswith(_RUNS):
            return user
        if module in ("torch.optim.optimizer", "torch.autograd", "torch.autograd.graph"):
            return None
        if module == "torch.nn.modules.module" and frame.f_code.co_name == "_call_impl":
            # The forward of a LightningModule is a part of the user's step.
            if not isinstance(frame.f_locals.get("self"), pl.LightningModule):
                return None
            continue
        if is_lightnings(package) and not libraries and user is None:
            return None
        if package not in _TRANSPARENT and user is None:
            user = frame
    return user


def _shown(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
