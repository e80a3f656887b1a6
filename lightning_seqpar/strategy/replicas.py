"""What both strategies, the Trainer's and Fabric's, answer about ranks: which one this is, and values over the replicas."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.distributed.collectives import gather_from_sequence_parallel_region
from lightning_seqpar.distributed.host import any_rank_has
from lightning_seqpar.nn.sharded_logits import whole_logits
from lightning_seqpar.releases import fabric, sync_ddp_if_available, whose
from lightning_seqpar.strategy.environment import Environment
from lightning_seqpar.topology.process_groups import ParallelGroups


class OnReplicas:
    """A base of strategies, in front of Lightning's: ranks of one replica read the same samples, and are one to it."""

    config: ParallelConfig
    environment: Environment
    parallel_devices: list[torch.device] | None
    cluster_environment: fabric.plugins.ClusterEnvironment | None
    num_nodes: int
    local_rank: int
    node_rank: int
    global_rank: int

    def __repr__(self) -> str:
        default = ParallelConfig()
        values = {name: getattr(self.config, name) for name in ParallelConfig.model_fields}
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name))
        return f"{type(self).__name__}({shown}) of {whose()}"

    @property
    def root_device(self) -> torch.device:
        """This rank's device; ValueError if the Trainer has fewer devices than the run has ranks on this node."""
        assert self.parallel_devices is not None
        if self.local_rank >= len(self.parallel_devices):
            raise ValueError(
                f"this process has local rank {self.local_rank}, but Trainer(devices={len(self.parallel_devices)}): every "
                "Trainer of a script must have the same devices, because each rank runs the whole script; use one script "
                "for each size"
            )
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """The number of ranks on this node."""
        return self.environment.num_processes

    @property
    def groups(self) -> ParallelGroups:
        """The process groups; RuntimeError before they are made, in ``setup_environment``."""
        return self.environment.groups

    @property
    def dp_rank(self) -> int:
        """The number of the data-parallel replica that this rank belongs to (0-based)."""
        return self.groups.rank("dp")

    @property
    def dp_size(self) -> int:
        """The number of data-parallel replicas."""
        return self.groups.size("dp")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a ``DistributedSampler`` that counts replicas, since the ranks of one read the same samples."""
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's rank and the size of the world; Lightning calls it."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        vars(rank_zero_only)["rank"] = self.global_rank

    # ---- collectives for Lightning: values over the replicas, barriers and decisions over the world ---------------
    # Before set-up, when there are no groups yet, and where the ranks are apart, each of them answers as on one process.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the replicas; the ranks of one replica have the same value. Other objects stay as they are."""
        if not isinstance(tensor, Tensor) or not self.environment.answers:
            return tensor
        tensor = whole_logits(tensor).to(self.root_device)
        over = self.groups["dp"] if group is None else group
        if not (isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")):
            return sync_ddp_if_available(tensor, over, reduce_op=reduce_op)
        # Not every backend has averages, and Lightning knows of gloo only where it is the group's one backend.
        total = sync_ddp_if_available(tensor, over, reduce_op="sum")
        return total.div_(over.size()) if total.is_floating_point() else total.copy_(total / over.size())

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor over the replicas: ``[...]`` → ``[dp, ...]``, or unchanged where there is one replica.

        ``LightningModule.all_gather`` always passes the group of the world, so that stands for the replicas too. This
        replica's own entry is at ``dp_rank``. With ``sync_grads`` the gradient of an entry is the sum of those of all replicas'
        losses: a loss that all replicas compute alike of the gathered tensors is the one of a single process with the whole
        batch, and so are its gradients once they are averaged over the replicas. Sharded logits are gathered over tp first.
        """
        if not self.environment.has_groups:
            return tensor
        tensor = whole_logits(tensor)
        over = self.groups["dp"] if group is None or group is dist.group.WORLD else group
        if over.size() == 1:
            return tensor
        # Lightning's own takes the numbers of ranks within a group for those of the world in its backward.
        with nullcontext() if sync_grads else torch.no_grad():
            return gather_from_sequence_parallel_region(tensor.contiguous().unsqueeze(0), 0, over)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether ``decision`` is true on all ranks of the world, or with ``all=False`` on any."""
        if not self.environment.answers:
            return decision
        otherwise = any_rank_has([bool(decision) != all], self.environment.world, self.root_device)[0]
        return otherwise != all

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the world."""
        if dist.is_initialized() and self.environment.answers:
            devices = [self.root_device.index] if self.root_device.type == "cuda" else None
            dist.barrier(group=self.environment.world, device_ids=devices)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object of rank ``src`` to every rank of the world, and return it; this rank's own if they are apart."""
        if not dist.is_initialized() or not self.environment.answers:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=src, group=self.environment.world)
        return box[0]
