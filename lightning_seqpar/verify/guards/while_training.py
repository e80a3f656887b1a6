"""What a step shows to be wrong: batches, outputs, losses, parameters and buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_seqpar.checkpoint.folder import walk
from lightning_seqpar.data.batch import tensors_in
from lightning_seqpar.distributed.autograd import backward_classes, children, count_tensor_hooks, reach, storage_id
from lightning_seqpar.layout.module_names import in_all_layers
from lightning_seqpar.layout.param_layout import local_rows
from lightning_seqpar.nn import vocab
from lightning_seqpar.parallel.sharded_model import ShardedModel
from lightning_seqpar.region import float8, products
from lightning_seqpar.topology.process_groups import ParallelGroups

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by its bytes, what shows an element's bits


def checksum(batch: Any, device: torch.device) -> Tensor:
    """A checksum over the bits and positions of a batch's plain tensors, and the number of all tensors: ``[2]``, int64."""
    total, count = torch.zeros((), dtype=torch.int64, device=device), 0
    for at, leaf in enumerate(tensors_in(batch)):
        count += 1
        if not leaf.numel() or leaf.is_nested or leaf.layout != torch.strided or leaf.is_quantized:
            continue
        plain = leaf.detach().resolve_conj().resolve_neg()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        # The bits as they are stored: in a sum of floats, infinities or huge values (masks) would hide the rest.
        bits = plain.contiguous().flatten().view(_AS_INTEGERS[plain.element_size()]).to(device=device, dtype=torch.int64)
        # Each is multiplied by a hash of its position, so that another order gives another sum. All is modulo 2**64.
        position = torch.arange(1, len(bits) + 1, device=device) + (at << 40)
        position = (position ^ (position >> 15)) * 0x2C1B3C6D297A2D39
        position = (position ^ (position >> 32)) * 0x9E3779B97F4A7C1 | 1
        total += (bits * position).sum()
    return torch.stack([total, torch.full_like(total, count)])


def _gathered(numbers: Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    values = [torch.zeros_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(values, numbers, group=group)
    return [value.tolist() for value in values]


def check_batch(batch: Any, groups: ParallelGroups, device: torch.device, loop: str) -> None:
    """Compare the checksums of the batch over the ranks of one replica; collective over the replica."""
    values = _gathered(checksum(batch, device), groups[groups.replica_axes])
    if any(value != values[0] for value in values):
        raise RuntimeError(
            f"the ranks of one replica read different {loop} batches (checksums "
            f"{', '.join(f'{value % 2**64:016x}' for value, _ in values)}). Deal data by strategy.dp_rank and dp_size, not by "
            "rank and world size, and draw random samples and augmentations from a seed that the replica shares; or set "
            "broadcast_batch=True, and one rank of each replica reads for all"
        )


def warn_of_equal_replicas(batch: Any, groups: ParallelGroups, device: torch.device) -> None:
    """Warn if all replicas read the same batch (with tensors in it): they learn no more than one. Collective over dp."""
    values = _gathered(checksum(batch, device), groups["dp"])
    if len(values) > 1 and values[0][1] and all(value == values[0] for value in values):
        rank_zero_warn(
            f"lightning_seqpar: all {len(values)} replicas read the same first training batch; deal an iterable data set "
            "out by trainer.strategy.dp_rank and dp_size, or each sample is read by every replica"
        )


class OutputWatch:
    """Compares what evaluation steps return over the tensor-parallel ranks of a replica, many steps at once."""

    LIMIT = 1024
    """How many steps' numbers are kept at most before they are compared."""

    def __init__(self) -> None:
        self._steps: list[Tensor] = []
        self._tolerance = 0.0

    def note(self, out: Any, device: torch.device) -> None:
        """Keep three numbers of a step's floating-point tensors: their count, the sum of norms, and that weighted by position."""
        leaves = [leaf.detach() for leaf in tensors_in(out) if leaf.is_floating_point()]
        numbers = torch.zeros(3, dtype=torch.float64, device=device)
        for position, leaf in enumerate(leaves, 1):
            norm = leaf.double().nan_to_num(0.0, 0.0, 0.0).norm().to(device)  # masked scores are infinite
            numbers += torch.stack([torch.ones_like(norm), norm, position * norm])
            tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(leaf.dtype, 2e-2)
            self._tolerance = max(self._tolerance, tolerance)
        self._steps.append(numbers)

    @property
    def is_full(self) -> bool:
        """Whether so many steps were noted that :meth:`check` is due."""
        return len(self._steps) >= self.LIMIT

    def check(self, groups: ParallelGroups, loop: str) -> None:
        """Compare the numbers of all steps since the last call; collective over the replica."""
        if not self._steps:
            return
        numbers, tolerance = torch.cat(self._steps), self._tolerance
        self._steps, self._tolerance = [], 0.0
        both = torch.cat([numbers, -numbers])  # the largest of the negated numbers is the smallest
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=groups[groups.replica_axes])
        highs, lows = both[: len(numbers)], -both[len(numbers) :]
        apart = (highs - lows > tolerance * torch.maximum(highs.abs(), lows.abs())).tolist()
        if any(apart):
            norm = apart.index(True) // 3 * 3 + 1
            raise RuntimeError(
                f"what the {loop} step returns differs across the ranks of one replica (its norms sum to "
                f"{lows[norm]:.9g} on one and {highs[norm]:.9g} on another): it is made of this rank's part of an activation "
                "(hidden states or attention maps that were changed, pooled or kept aside before the model returned them?), or "
                "drawn at random on its own. Use what the model returns in lists or tuples, or set sp=False"
            )


def check_readers(loss: Tensor, record: ShardedModel) -> None:
    """Refuse a loss that reads a sharded parameter or one with a partial gradient past its layer (an L2 term), or a partial sum."""
    for region in record.regions:
        region.observers.loss_leaks.check(loss)
    compiled = record.graphs.node_types if record.graphs is not None else set()  # of our own blocks, each a node
    allowed = {*backward_classes((*products.READERS, *float8.READERS, *vocab.READERS)), *compiled}

    def made_inside(node: Any) -> bool:
        return any(region.observers.span.holds(node) for region in record.regions)

    for node in reach(loss.grad_fn, children):
        for child in children(node):
            variable = getattr(child, "variable", None)
            layout = record.layout.of(variable) if variable is not None else None
            if layout is None:
                if variable is not None and record.replicas is not None:
                    record.replicas.check_leaf(variable)
                continue
            how = ""
            if layout.is_sharded and not layout.free and type(node) not in allowed:
                how = "in the loss reads it past its layer, so it would see"
            if layout.is_sharded and layout.free and record.on_shard(layout.name) and not made_inside(node):
                how = "reads it outside the sequence region, where it sees"
            if how:
                raise RuntimeError(
                    f"{layout.name}: it is sharded, and {node.name()} {how} a part of it; keep parameters out of the loss (weight "
                    "decay belongs into the optimizer), or leave the module out of the plan"
                )
            if layout.name in record.on_shards and not made_inside(node):
                if "BackwardBackward" in node.name():
                    raise RuntimeError(_NO_SECOND_DERIVATIVE)
                raise RuntimeError(
                    f"{layout.name}: {node.name()} reads it outside the sequence region, where its gradient is whole, but "
                    f"inside it is partial ({layout.reason}): no one rule can sync both. Keep parameters out of the loss "
                    "(weight decay belongs into the optimizer), or use a parameter of its own outside"
                )


_NO_SECOND_DERIVATIVE = (
    "a gradient is differentiated again (create_graph=True, a gradient penalty), and the sharded layers have no second "
    "derivative. Leave what it goes through out of the plan (vocab=False for the head), take the penalty as a difference "
    "of two losses (loss(x + eps * direction) - loss(x), each with a first derivative alone), or train with tp=1"
)


def refuse_second_derivative(error: RuntimeError) -> None:
    """Say what to do instead, if ``error`` is torch's of a gradient that is differentiated through a sharded layer."""
    if "once_differentiable" in str(error):
        raise RuntimeError(_NO_SECOND_DERIVATIVE) from error


def refuse_overlaps(model: nn.Module) -> None:
    """Refuse two parameters in one memory (``nn.Parameter(other.data)``), which would part when the model is cut."""
    in_storage: dict[int, list[tuple[int, int, str]]] = {}  # begin, end and name
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and parameter.is_contiguous() and parameter.numel():
            start = int(parameter.storage_offset())
            in_storage.setdefault(storage_id(parameter), []).append((start, start + parameter.numel(), name))
    for extents in in_storage.values():
        for (_, stop, first), (start, _, second) in itertools.pairwise(sorted(extents)):
            if start < stop:
                raise ValueError(
                    f"{first} and {second} are two parameters in one memory, which would part when the model is cut; tie them "
                    "by one nn.Parameter under both names"
                )


def check_parameters(record: ShardedModel) -> None:
    """Refuse a model that holds another parameter under a name than the one that was sharded."""
    if replaced := record.layout.replaced(record.model):
        refuse_added([*record.model.parameters()], record)  # an adapter gives the linear inside it another name
        raise RuntimeError(
            f"{replaced[0]}: the model holds another parameter than the one that was laid out; do not replace parameters "
            "while training (change their data in place)"
        )


def refuse_added(parameters: Sequence[Tensor], record: ShardedModel) -> None:
    """Refuse a parameter that was added after the model was sharded: without a layout, nobody would sum its gradient."""
    if any(record.layout.of(parameter) is None for parameter in parameters):
        ids = {id(parameter) for parameter in parameters}
        names = [name for name in record.layout.added(record.model) if id(record.model.get_parameter(name)) in ids]
        if names:
            raise RuntimeError(
                f"{names[0]}: this parameter came after the model was sharded (an adapter that was added while training?); add "
                "it before trainer.fit, frozen or switched off if it is for later"
            )


def check_buffers(record: ShardedModel, groups: ParallelGroups, device: torch.device) -> None:
    """Refuse buffers that differ over the ranks of a replica (counts or means of each rank's tokens); collective over tp."""
    if name := _differing_buffer(record, groups["tp"], device):
        raise RuntimeError(
            f"{name}: this buffer is no longer the same on the ranks of a replica: the forward changes it where each rank sees "
            "its part of the sequence. Have its module computed whole, "
            f"{{pattern: {in_all_layers(name.rpartition('.')[0])}, style: whole}}, or set sp=False"
        )


def check_buffers_of_stages(record: ShardedModel, groups: ParallelGroups, device: torch.device) -> None:
    """Refuse buffers that differ over the stages of a pipeline; collective over pp, where all stages are equally far."""
    if name := _differing_buffer(record, groups["pp"], device):
        raise RuntimeError(
            f"{name}: this buffer is no longer the same on all stages of the pipeline: the step changes it where one stage alone "
            "comes (a batch norm's statistics, a counter), and checkpoints and evaluations would have an old one; use pp=1"
        )


def check_parameters_of_stages(record: ShardedModel, groups: ParallelGroups, device: torch.device) -> None:
    """Refuse parameters that differ over the stages that hold them; collective over pp, where all stages are equally far."""
    stage, layout = record.stage, record.layout
    assert stage is not None
    shared = [name for name in layout if len(stage.shared(name)) > 1]
    if not shared:
        return
    nothing = torch.zeros((), dtype=torch.float64, device=device)  # what is not here has no memory, and is to get none
    with torch.no_grad():
        here = {name: local_rows(layout.parameter(name)) for name in shared if stage.holds(name)}
        sums = torch.stack([here[name].sum(dtype=torch.float64).to(device) if name in here else nothing for name in shared])
    held = torch.tensor([stage.holds(name) for name in shared], device=device)
    sums = sums.nan_to_num(1e300, 1e301, -1e301)  # numbers that differ from those of another stage
    if name := _first_apart(shared, torch.stack([sums, -sums]).masked_fill(~held, float("-inf")), groups["pp"]):
        raise RuntimeError(
            f"{name}: this parameter is no longer the same on the stages of the pipeline that hold it: code of yours "
            "changes it that reads what one stage alone has (an average of weights towards parameters of another stage). "
            "Change it on all of them alike, or use pp=1"
        )


def _differing_buffer(record: ShardedModel, group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the first buffer that differs over a group; empty if none does."""
    buffers = record.equal_buffers()
    if not buffers:
        return ""
    sums = torch.stack([buffer.detach().double().nan_to_num(0.0, 0.0, 0.0).sum().to(device) for _, buffer in buffers])
    return _first_apart([name for name, _ in buffers], torch.stack([sums, -sums]), group)


def _first_apart(names: Sequence[str], sums: Tensor, group: dist.ProcessGroup) -> str:
    """The first name whose sum differs over a group, of sums and negated sums ``[2, n]``; empty if none does. Collective."""
    dist.all_reduce(sums, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = sums[0], -sums[1]
    apart = largest - smallest > 1e-5 * torch.maximum(largest.abs(), smallest.abs()).clamp_min(1e-30)
    return names[int(apart.nonzero()[0])] if bool(apart.any()) else ""


def refuse_saved_shards(checkpoint: Mapping[str, Any], record: ShardedModel) -> None:
    """Refuse a checkpoint in which code of the user's saves this rank's part of a parameter under its name, as if it were whole."""
    by_leaf: dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = {}
    for name, layout in record.layout.items():
        held = tuple(local_rows(record.layout.parameter(name)).shape)
        elsewhere = record.stage is not None and not record.stage.holds(name)
        if elsewhere or held != tuple(layout.global_shape):
            by_leaf.setdefault(name.rpartition(".")[2], []).append((name, held, tuple(layout.global_shape)))

    def check(path: str, leaf: Any) -> Any:
        key = path.rpartition("/")[2]
        for name, held, shape in by_leaf.get(key.rpartition(".")[2], ()) if isinstance(leaf, Tensor) else ():
            is_named = name == key or ("." in key and name.endswith(f".{key}"))
            # What other stages of a pipeline hold has the whole shape here, and no numbers.
            is_part = held != shape or (not leaf.is_meta and bool(leaf.isnan().all()))
            if is_named and is_part and tuple(local_rows(leaf).shape) == held:
                where = "".join(f"[{part!r}]" for part in path.split("/"))
                what = f"this rank's part of {name}, {list(held)} of {list(shape)}"
                if held == shape:
                    what = f"{name}, which another stage of the pipeline holds, so that there are no numbers in it"
                raise ValueError(
                    f"checkpoint{where}: code of yours saves {what}, which would pass for the whole (a callback's state_dict, or "
                    "on_save_checkpoint). Keep it out of the checkpoint; for an average of weights use Lightning's "
                    "EMAWeightAveraging, or make it in __init__ as a module of the model: both are saved whole"
                )
        return leaf

    walk({key: value for key, value in checkpoint.items() if key != "optimizer_states"}, check)


def refuse_hooks_on_shared(record: ShardedModel) -> None:
    """Refuse gradient hooks of the user's on parameters that several stages hold: each would see its stage's part."""
    assert record.stage is not None
    for name in record.layout:
        if len(record.stage.shared(name)) > 1 and _hooks_of_user(record, record.layout.parameter(name)):
            raise RuntimeError(
                f"{name}: it has a gradient hook of yours, and several stages of the pipeline hold it, so that the hook would see "
                "each one's part of the gradient; change gradients in on_before_optimizer_step, or use pp=1"
            )


def refuse_hooks_of_reduced(record: ShardedModel | None, parameters: Iterable[Tensor]) -> None:
    """Refuse gradient hooks of the user's where DDP reduces in a backward of its own (``virtual_pp``), which repeats them."""
    for parameter in parameters:
        if record is not None and _hooks_of_user(record, parameter):
            layout = record.layout.of(parameter)
            raise RuntimeError(
                f"{'a parameter' if layout is None else layout.name}: it has a gradient hook of yours, which virtual_pp with "
                "replicas (dp > 1) would run twice; change gradients in on_before_optimizer_step, or leave virtual_pp out"
            )


def _hooks_of_user(record: ShardedModel, parameter: Tensor) -> bool:
    layout = record.layout.of(parameter)
    ours = layout is not None and layout.is_partial and parameter.requires_grad
    return count_tensor_hooks([parameter])[0] > ours
