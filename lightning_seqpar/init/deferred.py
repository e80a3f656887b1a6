"""Initialisation that waits: what is done to tensors on the meta device is remembered, and done later, one tensor at a time.

A model that is made under a :class:`DeferredInit` costs no memory. Replayed, each of its tensors gets the very numbers that
it would have got at once, whoever keeps which part of it: random draws are made in the same order, from the same stream.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_seqpar.distributed.autograd import dispatch_modes, generator_id, storage_id
from lightning_seqpar.inference.model_copy import default_dtype

_OVERWRITES = ("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_")
"""Operations that leave nothing of what was in their first argument."""
_VALUES_DECIDE = ("multinomial", "poisson", "_standard_gamma", "_sample_dirichlet", "binomial")
"""Random operations that draw as many numbers as their arguments' values ask for."""
_EMPTY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
"""Operations that fill nothing."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor on the meta device, as a view of its storage."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def is_all(self) -> bool:
        """Whether it begins its storage and has no holes; with the storage's size, whether it covers it."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class _Op:
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any
    writes: frozenset[int]  # storages that it changes in place
    overwrites: int | None  # the one of which it leaves nothing
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)  # the default when it was called
    stream: int = 0  # which generator it draws from; 0 is torch's own
    state: int = -1  # number of the random state that the stream was set to before it; -1 if it goes on
    restored: int = -1  # or of the operation behind which its state was restored

    @property
    def name(self) -> str:
        return _name(self.func)

    @property
    def is_random(self) -> bool:
        tags = getattr(self.func, "tags", None)
        return self.func is not _constant if tags is None else torch.Tag.nondeterministic_seeded in tags

    def reads(self) -> set[int]:
        found = {leaf.storage for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, TensorRef)}
        return found if self.overwrites is None else found - {self.overwrites} | self._others()

    def _others(self) -> set[int]:
        rest = tree_leaves((self.args[1:], dict(self.kwargs)))
        return {leaf.storage for leaf in rest if isinstance(leaf, TensorRef)}

    def makes(self) -> set[int]:
        return {leaf.storage for leaf in tree_leaves(self.out) if isinstance(leaf, TensorRef)}


class DeferredInit(TorchDispatchMode):
    """Remembers every operation on tensors of the meta device while it is active.

    A draw there moves no random stream; each one that is remembered moves the real one elsewhere instead, so that a seed set
    in between is noticed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops: list[_Op] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that their addresses stay theirs
        self._filled: set[int] = set()
        self._made: set[int] = set()
        self._writes: Counter[int] = Counter()
        self._watch = _SkipWatch(self)
        self._depth = 0
        self._states: list[Tensor] = []
        self._generators: dict[int, torch.Generator] = {0: torch.default_generator}
        self._seen: dict[int, dict[bytes, int]] = defaultdict(dict)  # by stream: states that we left behind
        self._latest: dict[int, bytes] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs, out))):
            told_args, told_kwargs = (tree_map(self._refer, told) for told in (args, kwargs))
            known = len(self._storages)
            told_out = tree_map(self._refer, out)
            made = list(self._storages)[known:]
            written = [
                told_args[at] if at < len(told_args) else told_kwargs.get(argument.name)
                for at, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            writes = frozenset(leaf.storage for leaf in tree_leaves(written) if isinstance(leaf, TensorRef))
            self._note(_Op(func, told_args, told_kwargs, told_out, writes, self._overwritten(func, told_args)), made)
        return out

    def _note(self, op: _Op, made: Iterable[int] = ()) -> None:
        if op.is_random:
            self._note_stream(op)
        self._ops.append(op)
        self._made.update(made)
        self._writes.update(op.writes)
        if op.name not in _EMPTY:
            self._filled.update(op.writes, made)

    def _note_stream(self, op: _Op) -> None:
        """Where its draws come from."""
        given = [leaf for leaf in tree_leaves((op.args, dict(op.kwargs))) if isinstance(leaf, torch.Generator)]
        op.stream = generator_id(given[0]) if given else 0
        generator = self._generators.setdefault(op.stream, given[0] if given else torch.default_generator)
        state = generator.get_state()
        now = state.numpy().tobytes()
        if now in self._seen[op.stream]:
            if now != self._latest[op.stream]:
                op.restored = self._seen[op.stream][now]
        else:  # the first draw, or seeded in between, or something else drew
            op.state = len(self._states)
            self._states.append(state)
        digest = hashlib.blake2b(now + len(self._ops).to_bytes(8, "little"), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        left = generator.get_state().numpy().tobytes()
        self._seen[op.stream][left], self._latest[op.stream] = len(self._ops), left

    def note_constant(self, out: Tensor, value: Tensor) -> None:
        """A tensor of numbers that the meta device forgets."""
        known = len(self._storages)
        ref = self.ref(out)
        self._note(_Op(_constant, (value,), {}, ref, frozenset(), None), list(self._storages)[known:])

    @property
    def shared(self) -> tuple[list[Tensor], list[Tensor]]:
        """What may differ between ranks: the random states, and the numbers that were given."""
        return self._states, [
            leaf for op in self._ops for leaf in tree_leaves((op.args, dict(op.kwargs))) if isinstance(leaf, Tensor)
        ]

    @shared.setter
    def shared(self, told: tuple[list[Tensor], list[Tensor]]) -> None:
        self._states = told[0]
        numbers = iter(told[1])
        for op in self._ops:
            op.args, op.kwargs = tree_map(
                lambda x: next(numbers) if isinstance(x, Tensor) else x, (op.args, dict(op.kwargs))
            )

    def digest(self) -> str:
        """What is done, random states and given numbers aside."""
        told = hashlib.sha256()
        for op in self._ops:
            leaves = tree_leaves((op.args, dict(op.kwargs)))
            plain = [
                (leaf.shape, str(leaf.dtype)) if isinstance(leaf, TensorRef | Tensor) else repr(leaf)
                for leaf in leaves
                if not isinstance(leaf, torch.Generator)
            ]
            told.update(repr((op.name, plain)).encode())
        return told.hexdigest()

    def written_elsewhere(self, tensor: Tensor) -> bool:
        """Whether more was written to a meta tensor than is remembered; what it was made with before counts once."""
        key = storage_id(tensor)
        known = self._writes[key]
        return tensor._version > (known if key in self._made else 2 * known)

    @staticmethod
    def count() -> int:
        """How many operations are remembered now; none outside any such context."""
        active = [mode for mode in dispatch_modes() if isinstance(mode, DeferredInit)]
        return len(active[-1]._ops) if active else 0

    def check(self, wanted: Iterable[TensorRef], elsewhere: Mapping[int, tuple[str, int]]) -> None:
        """Whether all that the wanted tensors are made of is known.

        Args:
            wanted: the tensors.
            elsewhere: storages that others fill: the name of what lies in them, and the operation from which on.

        Raises:
            ValueError: if an operation reads a tensor that nothing filled, or that others fill.
        """
        needed = self._needed({ref.storage for ref in wanted})
        for at, (op, is_needed) in enumerate(zip(self._ops, needed, strict=True)):
            taken = (op.reads() - op.writes) & elsewhere.keys() if is_needed else set()
            if taken := {key for key in taken if at >= elsewhere[key][1]}:
                raise ValueError(
                    f"{elsewhere[next(iter(taken))][0]}: weights_from gives its numbers, and {op.name} has made another tensor of "
                    "it since, which would have those of the initialisation (a trained copy, such as PEFT's modules_to_save, or a "
                    "resized layer?); make the model outside torch.device('meta') and load it whole"
                )
            if is_needed and (unknown := op.reads() - op.writes - self._filled):
                leaves = tree_leaves((op.args, dict(op.kwargs)))
                refs = [leaf for leaf in leaves if isinstance(leaf, TensorRef) and leaf.storage in unknown]
                raise ValueError(
                    f"a model of the meta device: {op.name} reads a tensor of shape {list(refs[0].shape)} whose numbers are not "
                    "known (made outside configure_model, or of numbers that the meta device forgot); make it with its numbers "
                    "inside configure_model, or outside torch.device('meta')"
                )

    def note_call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """A function of ``torch.nn.init`` that leaves meta tensors alone: it is done as a whole, later."""
        told = {name: self._refer(value) for name, value in arguments.items()}
        target = told["tensor"]
        whole = target.is_all and target.nbytes == self._storages[target.storage].nbytes()
        self._note(_Op(function, (), told, None, frozenset([target.storage]), target.storage if whole else None))

    def __enter__(self) -> DeferredInit:
        self._depth += 1
        if self._depth == 1:  # contexts inside each other are one
            self._watch.__enter__()  # type: ignore[no-untyped-call]
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._watch.__exit__(*raised)  # type: ignore[no-untyped-call]

    def _refer(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self.ref(value) if value.is_meta else value.detach().clone()

    def ref(self, tensor: Tensor) -> TensorRef:
        """How a meta tensor is known here."""
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage_id(storage), storage)
        return TensorRef(
            storage_id(storage), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
        )

    def fills(self, tensor: Tensor) -> bool:
        """Whether something was written to a meta tensor, or it was made with content."""
        return storage_id(tensor) in self._filled

    def _overwritten(self, func: Any, args: tuple[Any, ...]) -> int | None:
        if _name(func) not in _OVERWRITES or not isinstance(args[0], TensorRef):
            return None
        first = args[0]
        whole = first.is_all and first.nbytes == self._storages[first.storage].nbytes()
        return first.storage if whole else None

    def replay(self, wanted: Iterable[TensorRef], take: Callable[[int, Callable[[TensorRef], Tensor]], None]) -> None:
        """Make the storages of ``wanted`` for real, each for as long as it is needed.

        Args:
            wanted: the tensors.
            take: is called once per storage, when it is final: with its key, and what gives any ref to it as a tensor.
        """
        wished = {ref.storage for ref in wanted}
        needed = self._needed(wished)
        last: dict[int, int] = {}
        for at, op in enumerate(self._ops):
            if needed[at]:
                last.update(dict.fromkeys(op.reads() | op.writes | op.makes(), at))
        before = torch.get_rng_state()
        generators = {key: torch.Generator() if key else torch.default_generator for key in self._generators}
        restored = {op.restored for op in self._ops}
        marks: dict[int, Tensor] = {}  # states behind operations that a later one goes back to
        real: dict[int, torch.UntypedStorage] = {}

        def tensor(ref: TensorRef) -> Tensor:
            if ref.storage not in real:
                real[ref.storage] = torch.zeros(
                    self._storages[ref.storage].nbytes(), dtype=torch.uint8
                ).untyped_storage()
            empty = torch.empty(0, dtype=ref.dtype)
            return empty.set_(real[ref.storage], ref.offset, ref.shape, ref.stride)

        ends: dict[int, list[int]] = defaultdict(list)
        for key, at in last.items():
            ends[at].append(key)
        try:
            with torch.no_grad():
                for at, op in enumerate(self._ops):
                    if op.state >= 0:
                        generators[op.stream].set_state(self._states[op.state])
                    elif op.restored >= 0:
                        generators[op.stream].set_state(marks[op.restored])
                    if not needed[at]:
                        if op.is_random:
                            _run(op, _fresh, generators)  # the stream moves on as it did
                        if at in restored:
                            marks[at] = generators[op.stream].get_state()
                        continue
                    out = _run(op, tensor, generators)
                    if at in restored:
                        marks[at] = generators[op.stream].get_state()
                    for ref, made in zip(tree_leaves(op.out), tree_leaves(out), strict=True):
                        if isinstance(ref, TensorRef) and ref.storage not in real:
                            if made.stride() != ref.stride and made.shape == ref.shape:
                                made = _fresh(ref).copy_(made)
                            if (made.shape, made.dtype) != (ref.shape, ref.dtype):
                                raise RuntimeError(
                                    f"{op.name}: made {made.dtype} {list(made.shape)}, not what it did before"
                                )
                            real[ref.storage] = made.untyped_storage()
                    for key in ends[at]:
                        if key in wished:
                            take(key, tensor)
                        real.pop(key, None)
                for key in wished - last.keys():  # made, and never filled
                    take(key, tensor)
                    real.pop(key, None)
        finally:
            torch.set_rng_state(before)

    def _needed(self, wished: set[int]) -> list[bool]:
        """Which operations the final content of the storages depends on."""
        live = set(wished)
        needed = [False] * len(self._ops)
        for at in range(len(self._ops) - 1, -1, -1):
            op = self._ops[at]
            made = op.makes() - op.reads() - op.writes
            if op.name in _EMPTY:
                live -= made  # nothing is in it
                continue
            if not (op.writes | made) & live and op.name not in _VALUES_DECIDE:
                continue
            needed[at] = True
            live -= made
            if op.overwrites is not None:
                live.discard(op.overwrites)
            live |= op.reads()
        return needed


def _name(func: Any) -> str:
    return func.__name__ if inspect.isfunction(func) else str(func.name()).split("::")[-1].split(".")[0]


class _SkipWatch(TorchFunctionMode):
    """Sees what the meta device hides.

    Functions of ``torch.nn.init`` that ask whether a tensor is on it, and return at once if it is; and numbers given in Python.
    """

    def __init__(self, recorder: DeferredInit) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func == _IS_META and out:
            caller = sys._getframe(1)
            while caller.f_code.co_filename == _DEVICE_CONTEXT and caller.f_back is not None:
                caller = caller.f_back  # a torch.device context inside this one passes the question on
            if caller.f_code.co_filename == torch.nn.init.__file__:
                names = inspect.getargs(caller.f_code).args
                function = vars(torch.nn.init)[caller.f_code.co_name]
                self._recorder.note_call(function, {name: caller.f_locals[name] for name in names})
        elif func in _GIVEN and out.is_meta:
            given = args[1:2] if func == torch.Tensor.new_tensor else args[:1]
            if not any(isinstance(value, Tensor) and value.is_meta for value in given):
                self._recorder.note_constant(out, func(*args, **{**(kwargs or {}), "device": "cpu"}))
        return out


_GIVEN = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
_DEVICE_CONTEXT = torch.utils._device.__file__
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _fresh(ref: TensorRef) -> Tensor:
    return torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype).zero_()


def _constant(value: Tensor) -> Tensor:
    return value.clone()


def _run(op: _Op, tensor: Callable[[TensorRef], Tensor], generators: Mapping[int, torch.Generator]) -> Any:
    def real(value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return generators[op.stream]
        if isinstance(value, TensorRef):
            return tensor(value)
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value

    with default_dtype(op.dtype):
        return op.func(*tree_map(real, op.args), **tree_map(real, dict(op.kwargs)))
