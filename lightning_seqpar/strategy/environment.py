"""The processes of a run, and their groups."""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.distributed.host import default_backend
from lightning_seqpar.distributed.rendezvous import Phases, check_agreement, describe_start, keep_gloo_local, serve_store
from lightning_seqpar.distributed.rng import share_streams
from lightning_seqpar.pipeline.cut import count_channels
from lightning_seqpar.releases import (
    VERSION,
    TrainerFn,
    destroy_dist_connection,
    distributed_is_initialized,
    init_dist_connection,
    pl,
)
from lightning_seqpar.strategy.ending import Ending
from lightning_seqpar.strategy.launcher import SeqParallelLauncher
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.topology.process_groups import ParallelGroups


class Environment:
    """The processes of a run, their groups, and what belongs to one run of the Trainer."""

    def __init__(self, strategy: pl.strategies.ParallelStrategy, config: ParallelConfig) -> None:
        self.strategy, self.config, self.ending = strategy, config, Ending()
        self._groups: ParallelGroups | None = None
        self.called_with: tuple[str, Any, Any] | None = None  # the first call of a model that no Trainer runs

    @property
    def module(self) -> pl.LightningModule:
        """The user's module."""
        module = self.strategy._lightning_module  # its property costs each step some calls
        assert module is not None
        return module

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer of the user's module."""
        module = self.module
        return module._trainer or module.trainer  # the latter takes some calls, and raises if there is none

    @property
    def callbacks(self) -> list[Any]:
        """The Trainer's callbacks."""
        return self.trainer.callbacks  # type: ignore[attr-defined, no-any-return]

    @property
    def has_trainer(self) -> bool:
        """Whether a Trainer runs the module, and not the user's own loop."""
        return True

    @property
    def automatic(self) -> bool:
        """Whether backwards and updates are the Trainer's to call."""
        module: Any = self.strategy._lightning_module
        return bool(module.automatic_optimization)

    @property
    def fits(self) -> bool:
        """Whether the Trainer fits the model."""
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def begins_window(self) -> bool:
        """Whether the current training batch is the first of those whose gradients are accumulated."""
        return self.trainer.fit_loop.batch_idx % self.trainer.accumulate_grad_batches == 0

    @property
    def launcher(self) -> SeqParallelLauncher | None:
        """The launcher of the ranks; None before Lightning asks for it, or if somebody has put another in its place."""
        launcher = self.strategy.launcher
        return launcher if isinstance(launcher, SeqParallelLauncher) else None

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.strategy.root_device

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """DDP around the model; None if nothing of it is reduced over the replicas."""
        model: Any = self.strategy._model
        return model if type(model) is DistributedDataParallel else None  # isinstance asks its metaclass

    @property
    def num_processes(self) -> int:
        """The number of ranks on this node."""
        return len(self.strategy.parallel_devices or ())

    @property
    def phases(self) -> Phases:
        """The reports of the phases of the start, on the first rank."""
        return Phases(shows=self.strategy.global_rank == 0)

    @property
    def has_groups(self) -> bool:
        """Whether the process groups are made."""
        return self._groups is not None

    @property
    def groups(self) -> ParallelGroups:
        """The process groups; RuntimeError before they are made, in ``setup_environment``."""
        if self._groups is None:
            raise RuntimeError("the process groups are made in setup_environment; read them from a hook, not before fit")
        return self._groups

    @property
    def world(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        return self.groups[tuple(sorted(self.groups.topology.axes))]

    @property
    def mean_size(self) -> int:
        """Over how many ranks a gradient is averaged."""
        return self.groups.size(self.groups.mean_axes)

    @property
    def is_apart(self) -> bool:
        """Whether an exception ends the run on ranks that may be at different places of it, so that nothing collective works."""
        return self._groups is not None and self.ending.is_apart(self.trainer, self.world)

    @property
    def answers(self) -> bool:
        """Whether collectives over the groups work now."""
        return self._groups is not None and not self.is_apart

    def share_streams(self) -> None:
        """Let the ranks of a replica share its random streams. Collective."""
        axes = self.groups.replica_axes
        share_streams(self.groups[axes], self.groups.source(axes))

    def connect(self) -> None:
        """Connect the processes and make the topology's groups, once. Collective."""
        with self.phases.phase("meeting the other ranks"):
            self._connect(self.config.process_group_backend or default_backend(self.device))
        if self.config.layout == "auto":
            with self.phases.phase("choosing a layout"):
                self.config = self.strategy.config = self._choose_layout()  # type: ignore[attr-defined]
        topology = ProcessTopology.from_config(self.config, dist.get_world_size())
        if self._groups is None or self._groups.topology != topology:
            with self.phases.phase("making process groups"):
                self._groups = ParallelGroups(
                    topology,
                    dist.get_rank(),
                    timeout=self.config.timeout,
                    split_rank=self.config.pp_split_rank,
                    shard_size=self.config.fsdp.get("shard_size"),
                    gloo_twins=self.config.gloo_twins,
                    pp_channels=count_channels(self.config.pp, self.config.virtual_pp or 1),
                )
            per_node = self.num_processes
            if crossing := topology.get_crossing_lists("tp", per_node):
                rank_zero_warn(
                    f"lightning_seqpar: tensor-parallel ranks {crossing[0]} sit on more than one node of {per_node} "
                    f"rank{'s' * (per_node > 1)} ({len(crossing)} such group{'s' * (len(crossing) > 1)}); every layer then waits "
                    "for the network between nodes. Keep tp within a node: tp a divisor of its ranks, and last in order"
                )

    def _connect(self, backend: str) -> None:
        """Connect to the other ranks, and compare what all were started with. Collective."""
        cluster, num_nodes = self.strategy.cluster_environment, self.strategy.num_nodes  # type: ignore[attr-defined]
        assert cluster is not None
        first = not distributed_is_initialized()
        try:
            served = None
            if first:  # listen where the other ranks look for this one, and not on every interface of the node
                keep_gloo_local(cluster.main_address, one_node=num_nodes == 1)
                if not self.strategy.global_rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                    where = cluster.main_address, cluster.main_port
                    served = serve_store(*where, self.config.timeout, one_node=num_nodes == 1)
            init_dist_connection(
                cluster,
                backend,
                timeout=self.config.timeout,
                device_id=self.device if self.device.type != "cpu" else None,
                **self._store_of_attempt(),
            )
        except dist.DistError as error:
            raise RuntimeError(
                f"rank {self.strategy.global_rank} of {self.strategy.world_size} did not meet the others at "
                f"{cluster.main_address}:{cluster.main_port} within timeout={self.config.timeout.total_seconds():.0f} s: "
                f"{str(error).rstrip('.')}. See that every node runs, with the same MASTER_ADDR and MASTER_PORT, devices and "
                "num_nodes; or set a longer timeout, if they take that to start"
            ) from error
        del served  # the group is connected to it
        if first and backend != "nccl":
            # Lightning does this for nccl. gloo's threads, too, should end before the interpreter does.
            atexit.register(destroy_dist_connection)
        world = dist.group.WORLD
        assert world is not None
        if world.size() != num_nodes * self.num_processes:
            raise ValueError(
                f"this process is one of {world.size()} ranks already, but this Trainer asks for {num_nodes} × "
                f"{self.num_processes}: a process belongs to one world; use the same devices and num_nodes in every Trainer "
                "of a script, or one script for each size"
            )
        check_agreement(describe_start(self.config, VERSION), world, self.device)

    def _choose_layout(self) -> ParallelConfig:
        """The layout that the model has on the devices that were found. Collective."""
        from lightning_seqpar.strategy.auto_layout import chosen_layout  # seconds, which other runs do not need

        return chosen_layout(self.trainer, self.module, self.config, self.num_processes)

    def _store_of_attempt(self) -> dict[str, Any]:
        """The store of a later attempt by torchrun, which keeps the first one's with the addresses of dead processes in it."""
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if not attempt or distributed_is_initialized():
            return {}
        rank, size = self.strategy.global_rank, self.strategy.world_size
        store, *_ = next(rendezvous("env://", rank, size, timeout=self.config.timeout))
        return {"store": PrefixStore(f"attempt {attempt}", store)}
