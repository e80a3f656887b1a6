"""Deferred initialisation: operations on tensors of the meta device are recorded, and replayed later, one tensor at a time.

When the record is replayed, each tensor gets the numbers that it would have got at once: they are drawn in the same order and from
the same stream. Code that goes back to an earlier state of a generator (``torch.random.fork_rng``) gets others behind it.
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
import torch.utils._device
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_seqpar.distributed.autograd import dispatch_modes, generator_id, storage_id
from lightning_seqpar.inference.model_copy import default_dtype

_OVERWRITES = ("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_")
"""Operations after which nothing is left of the old values of their first argument."""
_VALUES_DECIDE = ("multinomial", "poisson", "_standard_gamma", "_sample_dirichlet", "binomial")
"""Random operations of which the values of the arguments decide how many numbers they draw."""
_EMPTY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
"""Operations that make tensors without values."""


@dataclass(frozen=True)
class TensorRef:
    """Names a view of a storage of the meta device, by the storage's id; strides and offset are in elements."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass
class _Op:
    """A recorded operation, with a :class:`TensorRef` in place of each meta tensor."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    writes: frozenset[int]  # storages that it changes in place
    overwrites: int | None  # that one of them of whose old values nothing is left
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    stream: int = 0  # the generator that it draws from, by id; 0 is torch's own
    state: int = -1  # index of the state that the generator was set to before the operation; -1 if it was not set

    @property
    def name(self) -> str:
        return _name(self.func)

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers; of a function of ``torch.nn.init`` that is assumed."""
        tags = getattr(self.func, "tags", None)
        return self.func is not _constant if tags is None else torch.Tag.nondeterministic_seeded in tags

    def given(self) -> list[Any]:
        """All that stands in its arguments."""
        return tree_leaves((self.args, self.kwargs))

    def reads(self) -> set[int]:
        """The storages whose values before the operation its result depends on."""
        # The first argument is the one that an operation in place changes.
        return _storages(self.args[:1]) - {self.overwrites} | _storages((self.args[1:], self.kwargs))


def _storages(tree: Any) -> set[int]:
    return {leaf.storage for leaf in tree_leaves(tree) if isinstance(leaf, TensorRef)}


class DeferredInit(TorchDispatchMode):
    """A dispatch mode that records every operation on tensors of the meta device while it is active.

    There nothing is drawn, so each recorded draw sets its generator to a state that cannot occur otherwise. If the next draw finds
    another one, the generator was seeded or used in between, and that state is recorded too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops: list[_Op] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no other gets the same id
        self._filled: set[int] = set()  # storages that have values
        self._made: set[int] = set()  # storages that were made here, and not before
        self._writes: Counter[int] = Counter()  # by storage: recorded operations that changed it in place
        self._hidden_calls = _HiddenCalls(self)
        self._depth = 0
        self._states: list[Tensor] = []  # states that generators were set to from outside
        self._generators: dict[int, torch.Generator] = {0: torch.default_generator}
        self._left_states: dict[int, bytes] = {}  # by stream: the state to which its latest draw set the generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs, out))):
            ref_args, ref_kwargs = tree_map(self._refer, (args, kwargs))
            known = len(self._storages)
            ref_out = tree_map(self._refer, out)
            made = list(self._storages)[known:]
            written = [
                ref_args[position] if position < len(ref_args) else ref_kwargs.get(argument.name)
                for position, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            first = ref_args[0] if _name(func) in _OVERWRITES else None
            overwritten = self._covered_by(first) if isinstance(first, TensorRef) else None
            self._note(_Op(func, ref_args, ref_kwargs, ref_out, frozenset(_storages(written)), overwritten), made)
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
        """Note which generator a random operation draws from, and how the generator came to its present state."""
        passed = [leaf for leaf in op.given() if isinstance(leaf, torch.Generator)]
        op.stream = generator_id(passed[0]) if passed else 0
        generator = self._generators.setdefault(op.stream, passed[0] if passed else torch.default_generator)
        state = generator.get_state()
        now = state.numpy().tobytes()
        # At the first draw, and where the generator was seeded or used in between.
        if now != self._left_states.get(op.stream):
            op.state = len(self._states)
            self._states.append(state)
        digest = hashlib.blake2b(now + len(self._ops).to_bytes(8, "little"), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        self._left_states[op.stream] = generator.get_state().numpy().tobytes()

    def note_constant(self, out: Tensor, value: Tensor) -> None:
        """Records a meta tensor that was made of numbers, which the meta device does not keep, with them."""
        ref = self.ref(out)
        self._note(_Op(_constant, (value,), {}, ref, frozenset(), None), [ref.storage])

    @property
    def shared(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parts of the record that may differ between ranks: states of generators, and tensors of given numbers."""
        return self._states, [leaf for op in self._ops for leaf in op.given() if isinstance(leaf, Tensor)]

    @shared.setter
    def shared(self, states_and_numbers: tuple[list[Tensor], list[Tensor]]) -> None:
        self._states, numbers = states_and_numbers[0], iter(states_and_numbers[1])
        for op in self._ops:
            op.args, op.kwargs = tree_map(lambda x: next(numbers) if isinstance(x, Tensor) else x, (op.args, op.kwargs))

    def digest(self) -> str:
        """A digest of the record without :attr:`shared`, to compare it over ranks."""
        digest = hashlib.sha256()
        for op in self._ops:
            plain = [
                (leaf.shape, str(leaf.dtype)) if isinstance(leaf, TensorRef | Tensor) else repr(leaf)
                for leaf in op.given()
                if not isinstance(leaf, torch.Generator)
            ]
            digest.update(repr((op.name, plain)).encode())
        return digest.hexdigest()

    def written_elsewhere(self, tensor: Tensor) -> bool:
        """Whether a meta tensor was changed in place more often than was recorded."""
        key = storage_id(tensor)
        known = self._writes[key]
        # One that was made before the record began may have been initialised once before, by as many operations.
        return tensor._version > (known if key in self._made else 2 * known)

    @staticmethod
    def count() -> int:
        """How many operations the innermost active record has so far; 0 where none is active."""
        active = [mode for mode in dispatch_modes() if isinstance(mode, DeferredInit)]
        return len(active[-1]._ops) if active else 0

    def check(self, wanted: Iterable[TensorRef], elsewhere: Mapping[int, tuple[str, int]]) -> None:
        """Raises ValueError if ``wanted`` follow from a tensor without values, or from one that files fill since.

        ``elsewhere`` has the storages that files fill: the name of the tensor there, and how many operations came before.
        """
        needed = self._needed({ref.storage for ref in wanted})
        for at, op in enumerate(self._ops):
            read = op.reads() - op.writes if needed[at] else set()
            if taken := [elsewhere[key][0] for key in read & elsewhere.keys() if at >= elsewhere[key][1]]:
                raise ValueError(
                    f"{taken[0]}: weights_from gives its numbers, and {op.name} has made another tensor of "
                    "it since, which would have those of the initialisation (a trained copy, such as PEFT's modules_to_save, or a "
                    "resized layer?); make the model outside torch.device('meta') and load it whole"
                )
            if unknown := read - self._filled:
                refs = [leaf for leaf in op.given() if isinstance(leaf, TensorRef) and leaf.storage in unknown]
                raise ValueError(
                    f"a model of the meta device: {op.name} reads a tensor of shape {list(refs[0].shape)} whose numbers are not "
                    "known (made outside configure_model, or of numbers that the meta device forgot); make it with its numbers "
                    "inside configure_model, or outside torch.device('meta')"
                )

    def note_call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Records a call of a function of ``torch.nn.init`` that does nothing to meta tensors; a replay calls it as a whole."""
        ref_arguments = {name: self._refer(value) for name, value in arguments.items()}
        target = ref_arguments["tensor"]
        self._note(_Op(function, (), ref_arguments, None, frozenset([target.storage]), self._covered_by(target)))

    def _covered_by(self, ref: TensorRef) -> int | None:
        """The storage of which a tensor is all; None if it is a part of one."""
        nbytes = torch.Size(ref.shape).numel() * ref.dtype.itemsize
        is_contiguous = torch.empty_strided(ref.shape, ref.stride, device="meta").is_contiguous()
        return ref.storage if is_contiguous and nbytes == self._storages[ref.storage].nbytes() else None

    def __enter__(self) -> DeferredInit:
        self._depth += 1
        if self._depth == 1:  # entering it again inside itself changes nothing
            self._hidden_calls.__enter__()  # type: ignore[no-untyped-call]
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._hidden_calls.__exit__(*raised)  # type: ignore[no-untyped-call]

    def _refer(self, value: Any) -> Any:
        """What takes the place of an argument in the record: a reference to a meta tensor, a copy of any other tensor."""
        if not isinstance(value, Tensor):
            return value
        return self.ref(value) if value.is_meta else value.detach().clone()

    def ref(self, tensor: Tensor) -> TensorRef:
        """The reference to a meta tensor."""
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage_id(storage), storage)
        return TensorRef(storage_id(storage), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def fills(self, tensor: Tensor) -> bool:
        """Whether the record gives values to a meta tensor."""
        return storage_id(tensor) in self._filled

    def replay(self, wanted: Iterable[TensorRef], take: Callable[[int, Callable[[TensorRef], Tensor]], None]) -> None:
        """Does what was recorded on real tensors, so far as ``wanted`` depends on it; a storage exists from its first use to
        its last.

        ``take`` is called once for each storage of wanted tensors, when it has its final values: with its id and a function
        from a reference into it to the real tensor, which must not be used after the call.
        """
        wanted_storages = {ref.storage for ref in wanted}
        needed = self._needed(wanted_storages)
        last_uses: dict[int, int] = {}
        for at, op in enumerate(self._ops):
            if needed[at]:
                last_uses.update(dict.fromkeys(op.reads() | op.writes | _storages(op.out), at))
        ends: dict[int, list[int]] = defaultdict(list)  # by operation: the storages that it is the last to use
        for key, at in last_uses.items():
            ends[at].append(key)
        real: dict[int, torch.UntypedStorage] = {}

        def tensor(ref: TensorRef) -> Tensor:
            """The real tensor of a reference, whose storage is made if there is none."""
            if ref.storage not in real:
                real[ref.storage] = torch.zeros(self._storages[ref.storage].nbytes(), dtype=torch.uint8).untyped_storage()
            empty = torch.empty(0, dtype=ref.dtype)
            return empty.set_(real[ref.storage], ref.offset, ref.shape, ref.stride)

        generators = {key: torch.Generator() if key else torch.default_generator for key in self._generators}
        before = torch.get_rng_state()
        try:
            with torch.no_grad():
                for at, op in enumerate(self._ops):
                    if op.state >= 0:
                        generators[op.stream].set_state(self._states[op.state])
                    if not needed[at]:
                        if op.is_random:
                            _run(op, _fresh, generators)  # only to draw what it drew
                        continue
                    out = _run(op, tensor, generators)
                    for ref, made in zip(tree_leaves(op.out), tree_leaves(out), strict=True):
                        if isinstance(ref, TensorRef) and ref.storage not in real:
                            real[ref.storage] = _as_recorded(op, ref, made).untyped_storage()
                    for key in ends[at]:
                        if key in wanted_storages:
                            take(key, tensor)
                        real.pop(key, None)
                for key in wanted_storages - last_uses.keys():  # made, and never filled
                    take(key, tensor)
                    real.pop(key, None)
        finally:
            torch.set_rng_state(before)

    def _needed(self, wanted_storages: set[int]) -> list[bool]:
        """For each operation, whether the final values of some storages depend on it."""
        live = set(wanted_storages)  # storages whose values at this point matter, going backwards
        needed = [False] * len(self._ops)
        for at in range(len(self._ops) - 1, -1, -1):
            op = self._ops[at]
            made = _storages(op.out) - op.reads() - op.writes
            if op.name in _EMPTY:
                live -= made  # it gives them no values
                continue
            if not (op.writes | made) & live and op.name not in _VALUES_DECIDE:
                continue
            needed[at] = True
            live -= made
            if op.overwrites is not None:
                live.discard(op.overwrites)
            live |= op.reads()
        return needed


def _as_recorded(op: _Op, ref: TensorRef, made: Tensor) -> Tensor:
    """A result with the strides that it had in the record; raises RuntimeError for another shape."""
    if (made.shape, made.dtype) != (ref.shape, ref.dtype):
        raise RuntimeError(f"{op.name}: made {made.dtype} {list(made.shape)}, not what it did before")
    return made if made.stride() == ref.stride else _fresh(ref).copy_(made)


def _name(func: Any) -> str:
    return func.__name__ if inspect.isfunction(func) else str(func.name()).split("::")[-1].split(".")[0]


class _HiddenCalls(TorchFunctionMode):
    """Records what the meta device leaves no operation of: some calls of ``torch.nn.init``, and tensors made of numbers."""

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
                caller = caller.f_back  # a torch.device context inside this one stands between
            if caller.f_code.co_filename == torch.nn.init.__file__:
                names = inspect.getargs(caller.f_code).args
                function = vars(torch.nn.init)[caller.f_code.co_name]
                self._recorder.note_call(function, {name: caller.f_locals[name] for name in names})
        elif func in _FROM_NUMBERS and out.is_meta:
            numbers = args[1:2] if func == torch.Tensor.new_tensor else args[:1]
            if not any(isinstance(value, Tensor) and value.is_meta for value in numbers):
                self._recorder.note_constant(out, func(*args, **{**(kwargs or {}), "device": "cpu"}))
        return out


_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
"""Functions that make a tensor of numbers in Python or numpy."""
_DEVICE_CONTEXT = torch.utils._device.__file__
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _fresh(ref: TensorRef) -> Tensor:
    return torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype).zero_()


def _constant(value: Tensor) -> Tensor:
    """Stands in the record for a function that made a tensor of numbers."""
    return value.clone()


def _run(op: _Op, tensor: Callable[[TensorRef], Tensor], generators: Mapping[int, torch.Generator]) -> Any:
    """Calls a recorded operation again, on real tensors, with the generator of its stream."""

    def real(value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return generators[op.stream]
        if isinstance(value, TensorRef):
            return tensor(value)
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value

    with default_dtype(op.dtype):
        return op.func(*tree_map(real, op.args), **tree_map(real, op.kwargs))
