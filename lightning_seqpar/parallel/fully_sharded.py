"""Sharding over the data-parallel replicas: torch's ``fully_shard`` on the blocks of a model whose tp parts are made already.

Of every parameter (its part over tp) a rank then holds some rows between steps, gathered before a block runs, and so of gradients
and moments (ZeRO-2 and -3, arXiv 1910.02054). ``fully_shard`` replaces every parameter; layouts find them again by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_seqpar.context.seq_part import Place, places_of, plain_of, put_in
from lightning_seqpar.distributed.autograd import has_tensor_hooks
from lightning_seqpar.distributed.host import send_numbers
from lightning_seqpar.layout.module_names import inside
from lightning_seqpar.layout.param_layout import gather_rows, is_split
from lightning_seqpar.nn.linear import set_data
from lightning_seqpar.nn.sharded_logits import ShardedLogits
from lightning_seqpar.parallel.fsdp_units import units_of
from lightning_seqpar.parallel.sharded_model import ModuleSnapshot, ShardedModel, changes_since
from lightning_seqpar.topology.process_groups import ParallelGroups

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Where a module keeps the hooks that ``fully_shard`` registers and gives no handle for."""


class _PartsAround:
    """Hides parts of sequences and sharded logits from the hooks of ``fully_shard`` on a unit; made before it, closed after."""

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit
        self._places: list[list[_Place]] = []  # of the calls under way, the innermost last
        self._made: list[_Place] = []
        unit.register_forward_pre_hook(self._put_back, prepend=True, with_kwargs=True)
        unit.register_forward_hook(self._take_out)

    def close(self) -> None:
        """Register the hooks that lie outside of those of ``fully_shard``."""
        self._unit.register_forward_pre_hook(self._take, prepend=True, with_kwargs=True)
        self._unit.register_forward_hook(lambda module, args, out: _with_places(out, self._made))

    def _take(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._places.append([_place(leaf) for leaf in tree_leaves((args, kwargs))])
        return tree_map(_plain, (args, kwargs))

    def _put_back(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_places((args, kwargs), self._places.pop())

    def _take_out(self, module: nn.Module, args: Any, out: Any) -> Any:
        self._made = [_place(leaf) for leaf in tree_leaves(out)]
        return tree_map(_plain, out)


_Place = tuple[tuple[Place, ...], ShardedLogits | None]
"""What a plain tensor was before: where a part of a sequence lies in it, and logits such as these, or neither."""


def _plain(leaf: Any) -> Any:
    leaf = plain_of(leaf)
    if isinstance(leaf, ShardedLogits):
        return leaf.whole() if leaf.is_changed else leaf.local
    return leaf


def _place(leaf: Any) -> _Place:
    local = plain_of(leaf)
    return places_of(leaf), local if isinstance(local, ShardedLogits) and not local.is_changed else None


def _with_places(tree: Any, places: Sequence[_Place]) -> Any:
    """The tensors of a tree as the parts of sequences, or of logits, that they were."""
    leaves, spec = tree_flatten(tree)
    for at, (where, logits) in enumerate(places):
        if logits is not None:
            leaves[at] = logits.with_local(leaves[at])
        leaves[at] = put_in(leaves[at], where)
    return tree_unflatten(leaves, spec)


def _mesh(groups: ParallelGroups, device: str) -> DeviceMesh:
    """The replicas that hold rows of each parameter; beside them, if they are not all, those that hold the same rows."""
    if groups.size("fsdp_replicate") == 1:
        return DeviceMesh.from_group(groups["fsdp_shard"], device, mesh_dim_names=("shard",))
    ranks = torch.tensor(groups.ranks(groups.mean_axes)).view(-1, groups.size("fsdp_shard"))
    both = [groups["fsdp_replicate"], groups["fsdp_shard"]]
    return DeviceMesh.from_group(both, device, mesh=ranks, mesh_dim_names=("replicate", "shard"))


class FullySharded:
    """A model of which each data-parallel rank holds some rows of every parameter.

    Raises ValueError for what ``fully_shard`` would compute wrong, or refuse in the first step; the model is untouched then.
    """

    def __init__(self, record: ShardedModel, blocks: Iterable[str], options: Mapping[str, Any], device: torch.device) -> None:
        self._record, self._model = record, record.model
        everything = dict(self._model.named_parameters())
        parameters = {name: p for name, p in everything.items() if record.stage is None or record.stage.holds(name)}
        # The blocks that are gathered and reduced each on its own; and what has no dims, which fully_shard can't split.
        self.units = [name for name in units_of(self._model, blocks) if any(inside(one, name) for one in parameters)]
        self.whole = {name: p for name, p in parameters.items() if p.ndim == 0}
        left_alone = {*self.whole.values(), *(p for name, p in everything.items() if name not in parameters)}
        self._check(parameters)
        self._own = {name: p for name, p in parameters.items() if name not in self.whole}
        self._original_names = {id(p): name for name, p in self._own.items()}
        self._own_names = {
            name: self._model.get_parameter(name) for name, _ in self._model.named_parameters(remove_duplicate=False)
        }
        mesh = _mesh(record.groups, device.type)
        modules = list(self._model.modules())
        snapshots = [ModuleSnapshot(module) for module in modules]
        self._hooks = [(module, {key: dict(getattr(module, key)) for key in _HOOKS}) for module in modules]
        left = dict(self._own)
        crossings = [_PartsAround(self._model.get_submodule(unit)) for unit in self.units]
        for unit in [*self.units, ""]:
            within = [left.pop(name) for name in list(left) if inside(name, unit)]
            for parameter in within:
                parameter.data = parameter.data.contiguous()
            fully_shard(self._model.get_submodule(unit), mesh=mesh, ignored_params=left_alone, **options)
            for parameter in within:  # its rows were copied: no more than one unit lies in memory twice
                set_data(parameter, torch.empty(0, dtype=parameter.dtype, device=parameter.device))
        self._own_calls()
        self.root.set_reduce_scatter_unused_params(True)  # replicas that use different experts reduce the same tensors
        self._versions = {name: p._version for name, p in self._own.items()}
        self._used: set[str] = set()  # parameters that have got a gradient since they had none
        changes = changes_since(snapshots)
        self._changes = [change for change in changes if change.own is not change.other or change.added]
        record.layout.rebind(self._model)
        record.changes, record.replicas = [*record.changes, *self._changes], self
        self._notes = [
            self._model.get_submodule(name).register_forward_pre_hook(functools.partial(self._note, name))
            for name in [*self.units, ""]
        ]
        self._trains = {name: p.requires_grad for name, p in self._own.items()}
        # Modules outside of the blocks that hold parameters themselves; not the model, whose call gathers them.
        outside = [
            module
            for name, module in self._model.named_modules()
            if name and not any(inside(name, one) for one in self.units) and any(True for _ in module.parameters(False))
        ]
        self._handles = [
            *(module.register_forward_pre_hook(self._gather_outside, prepend=True) for module in outside),
            *(self._model.get_submodule(unit).register_forward_hook(_refuse_graph(unit)) for unit in self.units),
        ]
        for crossing in crossings:
            crossing.close()

    @property
    def root(self) -> FSDPModule:
        """The model, which holds every parameter that is in no block."""
        assert isinstance(self._model, FSDPModule)
        return self._model

    @property
    def _state(self) -> Any:
        """What torch keeps for the root. It has no public way to say that a backward begins in the middle of a forward."""
        return self.root._get_fsdp_state()

    def _own_calls(self) -> None:
        """Put hooks of ours in the place of those that ``fully_shard`` gave the model for its calls."""
        # A step of the user's is such a call, and calls the model once more where it reads self(x): what is in no block is gathered
        # by then. And torch's hook can't be given to logits that are sharded by vocabulary.
        self._in_step = False
        state = self._state
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        self._model.register_forward_pre_hook(self._begin_call, prepend=True, with_kwargs=True)
        self._model.register_forward_hook(self._end_call)

    def _begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._in_step:
            return self._state._pre_forward(module, args, kwargs)
        self._gather_outside(module, args)  # a backward in the middle of the step frees what is in no block
        return self._state._cast_forward_inputs(args, kwargs)

    def _end_call(self, module: nn.Module, args: Any, out: Any) -> Any:
        if not self._in_step:
            self._state._post_forward(module, args, None)
        for tensor in map(plain_of, tree_leaves(out)) if torch.is_grad_enabled() else ():
            if isinstance(tensor, Tensor) and tensor.requires_grad and not isinstance(tensor, ShardedLogits):
                tensor.register_hook(self._state._pre_backward)  # for a backward that the strategy does not see
        return self._state._cast_output_dtype(out)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model for a step: what is in no block is gathered before, and stays so for all calls within."""
        args, kwargs = self._state._pre_forward(self._model, args, kwargs)
        self._in_step = True
        try:
            out = self._model(*args, **kwargs)
        finally:
            self._in_step = False
        self._state._post_forward(self._model, args, None)
        return out

    def _check(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise ValueError for what ``fully_shard`` does not do right."""
        for name, parameter in parameters.items():
            if has_tensor_hooks(parameter):
                raise ValueError(
                    f"{name}: it has a gradient hook of yours, which data_parallel='fsdp' would never call (it replaces the "
                    "parameter). Change gradients in on_before_optimizer_step, or use data_parallel='ddp'"
                )
        seen: dict[str, tuple[torch.dtype, str]] = {}  # of each unit the type of its first parameter that trains
        for name, parameter in parameters.items():
            if not parameter.requires_grad or name in self.whole:
                continue
            unit = next((each for each in self.units if inside(name, each)), "")
            one, first = seen.setdefault(unit, (parameter.dtype, name))
            if parameter.dtype != one:
                raise ValueError(
                    f"{first} is {one} and {name} is {parameter.dtype}: data_parallel='fsdp' reduces the gradients of "
                    f"{unit or 'everything outside the blocks'} together, in one type. Give the model one type (model.to), or "
                    "use data_parallel='ddp'"
                )

    def _note(self, unit: str, module: nn.Module, args: Any) -> None:
        """Note, in a unit's first forward, the parameters that it computes with. A hook that takes itself away."""
        self._note_computing(f"{unit}." if unit else "")
        self._notes[[*self.units, ""].index(unit)].remove()

    def _note_computing(self, prefix: str) -> None:
        """Note what stands in for parameters in a forward, and let each tell when it gets a gradient."""
        for name, stand_in in self._record.layout.note_computing(self._model, prefix).items():
            trains = stand_in.requires_grad
            stand_in.requires_grad_(True)  # a hook can be given to no other; it may be frozen now and train later
            stand_in.register_post_accumulate_grad_hook(lambda _, name=name: self._used.add(name))
            stand_in.requires_grad_(trains)

    def _gather_outside(self, module: nn.Module, args: Any) -> None:
        """Before a module outside of the blocks: gather what is in no block, if no call of the model has.

        That is so behind a backward in the middle of a step (manual optimization), and outside of steps.
        """
        if any(is_split(parameter) for parameter in module.parameters(recurse=False)):
            self.root.unshard()
            self._note_computing("")
        for parameter in module.parameters(recurse=False):
            layout = self._record.layout.of(parameter)
            if layout is None or layout.name not in self._own:
                continue
            # Which parameters train may be set on either object, and was the same on both.
            own = self._record.layout.parameter(layout.name)
            if own.requires_grad != parameter.requires_grad:
                trains = not self._trains[layout.name]
                own.requires_grad_(trains)
                parameter.requires_grad_(trains)
            self._trains[layout.name] = own.requires_grad

    # ---- steps -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Fix which module is the root, once all parameters have their values: the first that is called would be it."""
        self._state._lazy_init()

    def expect_backward(self, loss: Tensor) -> None:
        """Before a backward: let the root's gradients be reduced at its end, also in the middle of a step."""
        refuse_rows(loss)
        parameter = self._record.layout.parameter  # a new sum of gradients begins for what was zeroed
        self._used = {name for name in self._used if parameter(name).grad is not None}
        if loss.requires_grad:
            loss.register_hook(self._state._pre_backward)

    def check_reduced(self) -> None:
        """Raise RuntimeError if a gradient was left behind by the reduction over the replicas."""
        if left := self._record.layout.left_computing():
            raise RuntimeError(
                f"{left[0]}: its gradient was not reduced over the replicas (data_parallel='fsdp'): it came behind the backward of "
                "its block, or from a backward that the strategy does not see. Call self.manual_backward(loss) instead of "
                "loss.backward() (in automatic optimization return the sum of the losses from training_step), and read the "
                "parameters of a block in its own forward only"
            )

    def settle(self) -> None:
        """Let the model hold rows alone, as between steps: an evaluation leaves what is in no block gathered."""
        self.root.reshard()
        self.check_originals()

    def check_originals(self) -> None:
        """Raise RuntimeError if the user's code changed a parameter by an object that it kept from before the split."""
        for name, version in self._versions.items():
            if self._own[name]._version != version:
                raise RuntimeError(_kept(name, "it was changed"))

    def check_leaf(self, leaf: Tensor) -> None:
        """Raise RuntimeError if a leaf of the loss's graph is a parameter's object from before the split."""
        if (name := self._original_names.get(id(leaf))) is not None:
            raise RuntimeError(_kept(name, "the loss reads it"))

    def refuse_originals(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError for an optimizer that would update objects from before the split, which get no gradients."""
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if (name := self._original_names.get(id(parameter))) is not None:
                raise RuntimeError(
                    f"{name}: {type(optimizer).__name__} would update it by an object from before the model was split over "
                    "replicas (data_parallel='fsdp'), which gets no gradients; return the optimizer from "
                    "configure_optimizers, or give it to fabric.setup_optimizers"
                )

    def adopt(self, optimizer: Optimizer) -> None:
        """Give an optimizer that was made before the split the parameters in the place of their old objects."""
        for group in optimizer.param_groups:
            for at, parameter in enumerate(group["params"]):
                if (name := self._original_names.get(id(parameter))) is not None:
                    if parameter in optimizer.state:
                        raise ValueError(
                            f"{name}: the optimizer was made before configure_optimizers and holds state of it, which "
                            "data_parallel='fsdp' can't split; make the optimizer in configure_optimizers"
                        )
                    group["params"][at] = self._record.layout.parameter(name)

    def reset(self) -> None:
        """Forget a step that raised in its middle."""
        self.root.reset_iter_state()
        self._record.layout.drop_computed()

    def drop_unused(self, parameters: Sequence[Tensor] | None) -> None:
        """Take away the gradients of those of ``parameters`` (None for all) that no rank has used, and an optimizer leaves alone.

        Collective over dp and tp; a rank that has used all of them does not wait for what the others say.
        """
        layout = self._record.layout
        if parameters is None:
            parameters = [layout.parameter(name) for name in layout]
        named = [(p, item.name) for p in parameters if p.requires_grad and (item := layout.of(p)) is not None]
        due = [name for p, name in named if is_split(p) or name in self.whole]
        if not due:
            return
        used_here = [name in self._used for name in due]
        flags = send_numbers(used_here, torch.uint8, layout.parameter(due[0]).device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._record.groups[self._record.groups.holder_axes])
        if all(used_here):
            return
        for name, used in zip(due, flags.tolist(), strict=True):
            if used:
                self._used.add(name)
            else:
                layout.parameter(name).grad = None

    def average(self, parameters: Sequence[Tensor] | None) -> None:
        """Average the gradients of those of ``parameters`` (None for all) that every replica holds whole. Collective over dp.

        Those without one here, or anywhere, get zeros, until :meth:`drop_unused` takes away what nobody has used.
        """
        asked = None if parameters is None else {id(parameter) for parameter in parameters}
        group = self._record.groups[self._record.groups.mean_axes]
        for name, parameter in self.whole.items():
            if parameter.requires_grad and (asked is None or id(parameter) in asked):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                else:
                    self._used.add(name)
                with torch.no_grad():
                    total = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
                    dist.all_reduce(total, group=group)
                    parameter.grad.copy_(total / group.size())

    # ---- the way back ----------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Give the model its own parameter objects back, each with all rows of its part over tp. Collective over dp."""
        self.reset()
        group = self._record.groups["fsdp_shard"]
        sharded = {name: self._model.get_parameter(name) for name in self._own}
        with torch.no_grad():
            for name, parameter in self._own.items():
                trains, whole = sharded[name].requires_grad, gather_rows(sharded[name], group).clone()
                if parameter.is_meta:
                    torch.utils.swap_tensors(parameter, nn.Parameter(whole))
                else:
                    set_data(parameter, whole)
                parameter.requires_grad_(trains)
        for handle in (*self._notes, *self._handles):
            handle.remove()
        for module, known in self._hooks:
            for key, hooks in known.items():
                present = getattr(module, key)
                for added in [each for each in present if each not in hooks]:
                    del present[added]
        for change in self._changes:
            change.undo()
        self._record.changes = [change for change in self._record.changes if change not in self._changes]
        self._record.replicas = None
        for name in [*self.units, ""]:
            # torch remembers for good which modules it has split, and would refuse to split this one again.
            _module_state_mapping.pop(self._model.get_submodule(name), None)
        for name, parameter in self._own_names.items():
            holder, _, leaf = name.rpartition(".")
            self._model.get_submodule(holder)._parameters[leaf] = parameter
        self._record.layout.rebind(self._model)


def _kept(name: str, what: str) -> str:
    return (
        f"{name}: {what} by an object of it that was kept from before the model was split over the replicas (data_parallel='fsdp' "
        "replaces parameters). Take parameters from their module where you use them: self.layer.weight, not a list made in __init__"
    )


def _refuse_graph(unit: str) -> Callable[..., None]:
    """Make a hook of a block: a backward through it that is to be differentiated itself is refused."""

    def refuse(grad: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{unit}: a backward through it is to be differentiated again (create_graph=True, a gradient penalty), and "
                "data_parallel='fsdp' frees the block's parameters behind the first. Set fsdp={'units': []}, which keeps them for "
                "the whole step, or use data_parallel='ddp'"
            )

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        for tensor in tree_leaves(out) if torch.is_grad_enabled() else ():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(refuse)

    return hook


READ_ROWS = (
    "the step reads a parameter of a block outside of that block's forward (a norm of weights in the loss?), where "
    "data_parallel='fsdp' holds this rank's rows of it alone. Read it in the block, set fsdp={'units': []}, which gathers all "
    "parameters for the whole step, or use data_parallel='ddp'"
)
"""What is said where rows meet whole tensors."""


def refuse_rows(out: Any) -> None:
    """Refuse what a step returned if a parameter's rows are in it, which the step took for the parameter."""
    if any(is_split(tensor) for tensor in tree_leaves(out)):
        raise RuntimeError(READ_ROWS)
