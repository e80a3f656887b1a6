"""What can't be done right is refused, with a sentence."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_seqpar.activations.wgrad_overlap import READERS
from lightning_seqpar.config import ParallelConfig, nearest
from lightning_seqpar.data.batch import tensors_in
from lightning_seqpar.distributed.autograd import backward_classes, children, reach
from lightning_seqpar.nn.linear import GatherLinear, ShardedLinear
from lightning_seqpar.parallel.apply import ShardedModel
from lightning_seqpar.topology.process_groups import ParallelGroups

ELEMENTWISE_OPTIMIZERS: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
"""Optimizers whose update of an element depends on that element's gradient and state alone."""


LATER = {
    "cp": "context parallelism; config, topology and groups know it, the layers do not",
    "pp": "pipeline parallelism; config, topology and groups know it, the layers do not",
    "virtual_pp": "interleaved stages",
    "pp_split_rank": "pipelines of encoder-decoder models",
    "data_parallel": "sharding over the replicas",
    "fsdp": "sharding over the replicas",
    "recompute": "activation recompute by the strategy (checkpointing in your model works)",
    "compile": "compilation by the strategy",
    "fp8_groups": "fp8 training",
}
"""Fields that the strategy refuses when they differ from their default, and what they would turn on."""


def refuse_unsupported(config: ParallelConfig) -> None:
    """Refuse what the configuration knows and the strategy does not run yet."""
    default = ParallelConfig()
    for field, what in LATER.items():
        value, idle = getattr(config, field), getattr(default, field)
        if value != idle and not (field == "virtual_pp" and value == 1):
            raise ValueError(f"{field}={value!r} does not run yet; use {field}={idle!r} ({what})")


def refuse_notebook(processes: int) -> None:
    """Processes can't be started from a notebook or an interactive prompt.

    Raises:
        ValueError: for more than one process.
    """
    if processes > 1:
        raise ValueError(
            f"devices={processes} in a notebook, at an interactive prompt or in python -c: the other ranks are started by "
            "running the same file again, and here there is none. Put the code into a script and start it with python or "
            "torchrun; with devices=1 (tp=1) it runs here"
        )


def refuse_sweep(processes: int) -> None:
    """Several jobs of a hydra sweep in one process can't each start ranks.

    Raises:
        ValueError: for more than one process.
    """
    if processes > 1:
        raise ValueError(
            f"a hydra multirun (-m) with devices={processes}: the jobs of a sweep share one main process, and the ranks that "
            "it starts would each run the whole sweep. Start the jobs one by one (for tp in 2 4; do python train.py "
            "strategy.tp=$tp; done), or sweep with a launcher that gives each job processes of its own"
        )


def check_backend(backend: str | None, device_type: str) -> None:
    """A backend's name must be one that torch knows.

    Raises:
        ValueError: naming the nearest.
    """
    if backend == "nccl" and device_type == "cpu":
        raise ValueError("process_group_backend='nccl' with accelerator='cpu': nccl speaks between GPUs; use 'gloo'")
    known = [name for name in dist.Backend.backend_list if name != "undefined"]
    for part in (backend or "").split(","):
        name = part.split(":")[-1]
        if backend is not None and name not in known:
            raise ValueError(
                f"process_group_backend={backend!r}: torch knows no {name!r}; did you mean {nearest(name, known)}?"
            )
        if backend is not None and not dist.is_backend_available(name):
            raise ValueError(f"process_group_backend={backend!r}: this build of torch has no {name}; use 'gloo'")


TAKEN_DDP_OPTIONS = ("module", "device_ids", "output_device", "process_group", "device_mesh")
"""Arguments of ``DistributedDataParallel`` that are the strategy's own."""


def check_ddp_options(options: Mapping[str, Any]) -> None:
    """The options of ``ddp`` must be ``DistributedDataParallel``'s, and not ours.

    Raises:
        ValueError: naming the nearest.
    """
    known = [name for name in inspect.signature(DistributedDataParallel).parameters if name not in TAKEN_DDP_OPTIONS]
    for name in options:
        if name in TAKEN_DDP_OPTIONS:
            raise ValueError(f"ddp={{{name!r}: ...}}: the strategy sets {name} itself; leave it out")
        if name not in known:
            raise ValueError(
                f"ddp={{{name!r}: ...}}: DistributedDataParallel has no such option; did you mean {nearest(name, known)}?"
            )


def refuse_optimizers(optimizers: Sequence[Optimizer], tp: int) -> None:
    """Only elementwise optimizers are right on shards.

    Raises:
        ValueError: naming the optimizer.
    """
    for optimizer in optimizers:
        if tp > 1 and type(optimizer) not in (*ELEMENTWISE_OPTIMIZERS, _MockOptimizer):
            allowed = ", ".join(kind.__name__ for kind in ELEMENTWISE_OPTIMIZERS)
            raise ValueError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} with tp={tp}: it is not known to update each "
                f"element by itself, and shards would change its result; use one of torch.optim's {allowed}"
            )


class OutputWatch:
    """What evaluation steps return must be the same on all tensor-parallel ranks of a replica, at every step.

    Three numbers of each step are kept where they are, and compared when :meth:`check` is called.
    """

    MANY = 1024
    """Steps whose numbers are kept at most."""

    def __init__(self) -> None:
        self._told: list[Tensor] = []
        self._limit = 0.0

    def note(self, out: Any, device: torch.device) -> None:
        """Keep what tells one output from another: of floating-point tensors how many there are, and their norms."""
        leaves = [leaf.detach() for leaf in tensors_in(out) if leaf.is_floating_point()]
        told = torch.zeros(3, dtype=torch.float64, device=device)
        for at, leaf in enumerate(leaves, 1):
            norm = leaf.double().nan_to_num(0.0, 0.0, 0.0).norm().to(device)  # masked scores are infinite
            told += torch.stack([torch.ones_like(norm), norm, at * norm])
            limit = {torch.float64: 1e-9, torch.float32: 1e-4}.get(leaf.dtype, 2e-2)
            self._limit = max(self._limit, limit)
        self._told.append(told)

    @property
    def is_full(self) -> bool:
        """Whether it is time to compare."""
        return len(self._told) >= self.MANY

    def check(self, groups: ParallelGroups, loop: str) -> None:
        """Compare what was kept since the last time; collective over tp.

        Raises:
            RuntimeError: on all of them, if it is not the same.
        """
        if not self._told:
            return
        told, limit = torch.cat(self._told), self._limit
        self._told, self._limit = [], 0.0
        both = torch.cat([told, -told])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=groups["tp"])
        highs, lows = both[: len(told)], -both[len(told) :]
        apart = (highs - lows > limit * torch.maximum(highs.abs(), lows.abs())).tolist()
        if any(apart):
            norm = apart.index(True) // 3 * 3 + 1
            raise RuntimeError(
                f"what the {loop} step returns differs across the tensor-parallel ranks of one replica (its norms sum to "
                f"{lows[norm]:.9g} on one and {highs[norm]:.9g} on another): it is made of this rank's part of an activation "
                "(hidden states or attention maps that were changed, pooled or kept aside before the model returned them?), or "
                "drawn at random on its own. Use what the model returns in lists or tuples, or set sp=False"
            )


def check_readers(loss: Tensor, record: ShardedModel, *, inside: bool = True) -> None:
    """Who reads the parameters whose data or gradient come in parts.

    Only the parallel layers may read a sharded parameter, and one with a partial gradient may be read between the
    region's first and last block alone: a loss that reads them (an L2 term) sees a part, or is counted tp times.

    Args:
        inside: whether to look at what is read between the region's first and last block too, which is most of the graph.

    Raises:
        RuntimeError: naming the parameter and the operation that reads it.
    """
    check_sums(loss, record)
    allowed = backward_classes((ShardedLinear, GatherLinear, *READERS))

    def made_inside(node: Any) -> bool:
        return any(region.made(node) for region in record.regions)

    def follow(node: Any) -> list[Any]:
        return children(node) if inside or not made_inside(node) else []

    for node in reach(loss.grad_fn, follow):
        for child in children(node):
            variable = getattr(child, "variable", None)
            found = record.layout.of(variable) if variable is not None else None
            if found is None:
                continue
            if found.is_sharded and not found.free and type(node) not in allowed:
                raise RuntimeError(
                    f"{found.name}: it is sharded, and {node.name()} in the loss reads it past its layer, so it would see "
                    "a part of it; keep parameters out of the loss (weight decay belongs into the optimizer), or leave the "
                    "module out of the plan"
                )
            if found.is_sharded and found.free and record.on_shard(found.name) and not made_inside(node):
                raise RuntimeError(
                    f"{found.name}: it is sharded, and {node.name()} reads it outside the sequence region, where it sees a part "
                    "of it; keep parameters out of the loss (weight decay belongs into the optimizer), or leave the module out "
                    "of the plan"
                )
            if found.name in record.on_shards and not made_inside(node):
                raise RuntimeError(
                    f"{found.name}: {node.name()} reads it outside the sequence region, where its gradient is whole, but "
                    f"inside it is partial ({found.reason}): no one rule can sync both. Keep parameters out of the loss "
                    "(weight decay belongs into the optimizer), or use a parameter of its own outside"
                )


def check_sums(loss: Tensor, record: ShardedModel) -> None:
    """The loss must read of a module whose output is summed over tp nothing but that output.

    Raises:
        PartialSumError: naming the module.
    """
    for region in record.regions:
        region.loss_leaks.check(loss)


def check_buffers(record: ShardedModel, groups: ParallelGroups, device: torch.device) -> None:
    """Buffers outside the tensor-parallel parts must be the same on all ranks of a replica; collective over tp.

    A forward that counts or averages what it sees there sees this rank's part of the sequence.

    Raises:
        RuntimeError: naming the buffer, on every rank.
    """
    held = record.equal_buffers()
    if not held:
        return
    sums = torch.stack([buffer.detach().double().nan_to_num(0.0, 0.0, 0.0).sum().to(device) for _, buffer in held])
    spread = torch.stack([sums, -sums])
    dist.all_reduce(spread, op=dist.ReduceOp.MAX, group=groups["tp"])
    largest, smallest = spread[0], -spread[1]
    apart = largest - smallest > 1e-5 * torch.maximum(largest.abs(), smallest.abs()).clamp_min(1e-30)
    if bool(apart.any()):
        name = held[int(apart.nonzero()[0])][0]
        raise RuntimeError(
            f"{name}: this buffer is no longer the same on the ranks of a replica: the forward changes it where each rank sees "
            "its part of the sequence. Have its module computed whole, "
            f"{{pattern: {name.rpartition('.')[0]}, style: whole}}, or set sp=False"
        )


def check_parameters(record: ShardedModel) -> None:
    """The model must hold the parameters that were laid out.

    Raises:
        RuntimeError: naming one that was replaced.
    """
    if replaced := record.layout.replaced(record.model):
        refuse_added([*record.model.parameters()], record)  # an adapter around a linear, which has another name now
        raise RuntimeError(
            f"{replaced[0]}: the model holds another parameter than the one that was laid out; do not replace parameters "
            "while training (change their data in place)"
        )


def refuse_added(parameters: Sequence[Tensor], record: ShardedModel) -> None:
    """A parameter that came after the model was sharded has no layout: nobody would sum its gradient.

    Args:
        parameters: those that may be new.
        record: of the sharded model.

    Raises:
        RuntimeError: naming the parameter.
    """
    if any(record.layout.of(parameter) is None for parameter in parameters):
        ids = {id(parameter) for parameter in parameters}
        names = [name for name in record.layout.added(record.model) if id(record.model.get_parameter(name)) in ids]
        if names:
            raise RuntimeError(
                f"{names[0]}: this parameter came after the model was sharded (an adapter that was added while training?); add "
                "it before trainer.fit, frozen or switched off if it is for later"
            )


_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(batch: Any, device: torch.device) -> Tensor:
    """A number that depends on every bit of a batch's tensors and on its place, and how many they are: ``[2]``, int64."""
    total, count = torch.zeros((), dtype=torch.int64, device=device), 0
    for at, leaf in enumerate(tensors_in(batch)):
        count += 1
        if not leaf.numel() or leaf.is_nested or leaf.layout != torch.strided or leaf.is_quantized:
            continue
        plain = leaf.detach().resolve_conj().resolve_neg()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        # Numbers as they are stored: neither infinities nor huge ones (masks) hide the others.
        bits = (
            plain.contiguous().flatten().view(_AS_INTEGERS[plain.element_size()]).to(device=device, dtype=torch.int64)
        )
        # Times a hash of the position, so that the same values in another order differ; all modulo 2**64.
        places = torch.arange(1, len(bits) + 1, device=device) + (at << 40)
        places = (places ^ (places >> 15)) * 0x2C1B3C6D297A2D39
        places = (places ^ (places >> 32)) * 0x9E3779B97F4A7C1 | 1
        total += (bits * places).sum()
    return torch.stack([total, torch.full_like(total, count)])


def _gathered(numbers: Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    values = [torch.zeros_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(values, numbers, group=group)
    return [value.tolist() for value in values]


def check_batch(batch: Any, groups: ParallelGroups, device: torch.device, loop: str) -> None:
    """The ranks of one replica must read the same batch.

    Raises:
        RuntimeError: on every rank of the replica.
    """
    values = _gathered(checksum(batch, device), groups["tp"])
    if any(value != values[0] for value in values):
        raise RuntimeError(
            f"the tensor-parallel ranks of one replica read different {loop} batches (checksums "
            f"{', '.join(f'{value % 2**64:016x}' for value, _ in values)}). Deal data by strategy.dp_rank and dp_size, not by "
            "rank and world size, and draw random samples and augmentations from a seed that the replica shares; or set "
            "broadcast_batch=True, and one rank of each replica reads for all"
        )


def warn_of_equal_replicas(batch: Any, groups: ParallelGroups, device: torch.device) -> None:
    """Replicas that all read one stream learn no more than one of them would; they say so. Collective.

    Of batches that hold no tensors as far as is known, nothing is said.
    """
    values = _gathered(checksum(batch, device), groups["dp"])
    if len(values) > 1 and values[0][1] and all(value == values[0] for value in values):
        rank_zero_warn(
            f"lightning_seqpar: all {len(values)} replicas read the same first training batch; deal an iterable data set "
            "out by trainer.strategy.dp_rank and dp_size, or each sample is read by every replica"
        )


def refuse_callbacks(callbacks: Sequence[Any], tp: int) -> None:
    """Callbacks that keep whole copies of the weights do not fit shards.

    Raises:
        ValueError: naming the callback.
    """
    for callback in callbacks:
        for kind in type(callback).__mro__:
            if tp > 1 and kind.__name__ in ("StochasticWeightAveraging", "WeightAveraging"):
                raise ValueError(
                    f"{type(callback).__name__} with tp={tp}: it copies the model before it is sharded; leave it out, or "
                    "average checkpoints afterwards"
                )
            if tp > 1 and kind.__name__ == "ModelPruning":
                raise ValueError(
                    f"{type(callback).__name__} with tp={tp}: it copies the model before it is sharded, and each rank would choose "
                    "by its own part of a weight what to prune; prune before or after the training"
                )


def refuse_links(callbacks: Sequence[Any]) -> None:
    """A link to a checkpoint that is still being written would lead nowhere if the run ended now.

    Raises:
        ValueError: naming the callback.
    """
    for callback in callbacks:
        if getattr(callback, "save_last", None) == "link":
            raise ValueError(
                f"{type(callback).__name__}(save_last='link') with checkpoint={{'async_save': True}}: the link would lead to a "
                "checkpoint that is not whole yet; use save_last=True, or async_save: false"
            )
