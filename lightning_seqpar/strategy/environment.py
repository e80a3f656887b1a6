"""The strategy's environment: processes, process groups, the data that a rank reads, and collectives for Lightning."""

from __future__ import annotations

import atexit
import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _destroy_dist_connection,
    _distributed_is_initialized,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.data import _update_dataloader
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_seqpar.config import VERSION, ParallelConfig
from lightning_seqpar.data.broadcast import BroadcastLoader
from lightning_seqpar.data.sampler import OrderSeed, inject_sampler, replica_workers
from lightning_seqpar.distributed.collectives import gather_from_sequence_parallel_region
from lightning_seqpar.distributed.host import default_backend, host_device
from lightning_seqpar.distributed.phases import Phases
from lightning_seqpar.distributed.rank_consistency import check_agreement, describe_start
from lightning_seqpar.distributed.rendezvous import keep_gloo_local, serve_store
from lightning_seqpar.nn.sharded_logits import whole_logits
from lightning_seqpar.pipeline.link import count_channels
from lightning_seqpar.strategy.launcher import SeqParallelLauncher, is_hydra_sweep, is_script
from lightning_seqpar.strategy.refusals import shortens_refusals
from lightning_seqpar.topology.grid import ProcessTopology
from lightning_seqpar.topology.process_groups import ParallelGroups
from lightning_seqpar.verify.guards.config import check_backend, check_layer_sync, refuse_notebook, refuse_sweep


class TopologyStrategy(ParallelStrategy):
    """A Lightning strategy that knows the place of this rank in the topology, and so its groups and its data.

    It knows nothing of models; :class:`~lightning_seqpar.strategy.strategy.SeqParallelStrategy` adds them.

    Args:
        config: the configuration.
        accelerator: Lightning's own, as are all that follow; see :class:`ParallelStrategy`.
        parallel_devices: the devices of this node.
        cluster_environment: the environment that started the processes.
        checkpoint_io: writes checkpoint files.
        precision_plugin: the precision.
    """

    def __init__(
        self,
        config: ParallelConfig,
        *,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        self.config = config
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._num_nodes = 1
        self._groups: ParallelGroups | None = None
        self._is_set_up = False
        self._user_sampler_flag: bool | None = None
        self._order_seed = OrderSeed()
        self._loaders = 0  # how many loaders of the loop that is being prepared were processed
        self._loads_training = False
        self._places: list[Any] = []  # where the loaders of training were in their epoch when a checkpoint was written

    # ---- what this rank is -------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning must divide and reduce over processes here: true while a model is set up, where ``sync_dist`` asks.

        Before that Lightning asks whether to divide samples, which :meth:`process_dataloader` does by itself, and whether to refuse
        its batch-size finder, which runs here.
        """
        return self._is_set_up

    @property
    def root_device(self) -> torch.device:
        """This rank's device.

        Raises:
            ValueError: if the Trainer has fewer devices than the run has ranks on this node.
        """
        assert self.parallel_devices is not None
        if self.local_rank >= len(self.parallel_devices):
            raise ValueError(
                f"this process has local rank {self.local_rank}, but Trainer(devices={len(self.parallel_devices)}): every "
                "Trainer of a script must have the same devices, because each rank runs the whole script; use one script "
                "for each size"
            )
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """The number of ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def groups(self) -> ParallelGroups:
        """The process groups.

        Raises:
            RuntimeError: before they are made, in ``setup_environment``.
        """
        if self._groups is None:
            raise RuntimeError(
                "the process groups are made in setup_environment; read them from a hook, not before fit"
            )
        return self._groups

    @property
    def dp_rank(self) -> int:
        """The number of the data-parallel replica that this rank belongs to (0-based)."""
        return self.groups.rank("dp")

    @property
    def dp_size(self) -> int:
        """The number of data-parallel replicas."""
        return self.groups.size("dp")

    @property
    def _mean_size(self) -> int:
        """Over how many ranks a gradient is averaged."""
        return self.groups.size(self.groups.mean_axes)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a ``DistributedSampler``: it counts replicas, since the ranks of one read the same samples.

        Lightning asks before set-up too, where a loader is only counted (``trainer.estimated_stepping_batches``).
        """
        if self._groups is None:
            topology = ProcessTopology.from_config(self.config, self.num_nodes * self.num_processes)
            return {"num_replicas": topology.get_dim("dp"), "rank": topology.get_coord(self.global_rank).dp}
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    # ---- environment -------------------------------------------------------------------------------------------

    @shortens_refusals
    def _configure_launcher(self) -> None:
        """Make the launcher, after all that can be checked before processes are started."""
        assert self.cluster_environment is not None
        ProcessTopology.from_config(self.config, self.num_nodes * self.num_processes)
        check_backend(self.config.process_group_backend, self.root_device.type)
        if not self.cluster_environment.creates_processes_externally:
            if _IS_INTERACTIVE or not is_script():
                refuse_notebook(self.num_nodes * self.num_processes)
            if is_hydra_sweep():
                refuse_sweep(self.num_nodes * self.num_processes)
        check_layer_sync(self._layer_sync, self.config)
        self._launcher = SeqParallelLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's rank and the size of the world; Lightning calls it."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        vars(rank_zero_only)["rank"] = self.global_rank

    def setup_environment(self) -> None:
        """Connect the processes and make the topology's groups, once."""
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        backend = self.config.process_group_backend or default_backend(self.root_device)
        with self._phases.phase("meeting the other ranks"):
            self._connect(backend)
        topology = ProcessTopology.from_config(self.config, dist.get_world_size())
        if self._groups is None or self._groups.topology != topology:
            with self._phases.phase("making process groups"):
                self._groups = ParallelGroups(
                    topology,
                    dist.get_rank(),
                    timeout=self.config.timeout,
                    split_rank=self.config.pp_split_rank,
                    gloo_twins=self.config.gloo_twins,
                    pp_channels=count_channels(self.config.pp, self.config.virtual_pp or 1),
                )
            self._warn_of_slow_links(topology)
        self._take_over_samplers()

    def _warn_of_slow_links(self, topology: ProcessTopology) -> None:
        """Warn if tensor-parallel ranks are on different nodes."""
        per_node = self.num_processes
        if crossing := topology.get_crossing_lists("tp", per_node):
            rank_zero_warn(
                f"lightning_seqpar: tensor-parallel ranks {crossing[0]} sit on more than one node of {per_node} "
                f"rank{'s' * (per_node > 1)} ({len(crossing)} such group{'s' * (len(crossing) > 1)}); every layer then waits "
                "for the network between nodes. Keep tp within a node: tp a divisor of its ranks, and last in order"
            )

    def _connect(self, backend: str) -> None:
        """Connect to the other ranks, and compare what all were started with. Collective.

        Raises:
            RuntimeError: if the others can't be reached in time.
            ValueError: if they are another number than this Trainer has, or were started with something else.
        """
        assert self.cluster_environment is not None
        first = not _distributed_is_initialized()
        try:
            served = self._serve_store() if first else None
            _init_dist_connection(
                self.cluster_environment,
                backend,
                timeout=self.config.timeout,
                device_id=self.root_device if self.root_device.type != "cpu" else None,
                **self._store_of_attempt(),
            )
        except dist.DistError as error:
            place = f"{self.cluster_environment.main_address}:{self.cluster_environment.main_port}"
            raise RuntimeError(
                f"rank {self.global_rank} of {self.world_size} did not meet the others at {place} within timeout="
                f"{self.config.timeout.total_seconds():.0f} s: {str(error).rstrip('.')}. See that every node runs, with the "
                "same MASTER_ADDR and MASTER_PORT, devices and num_nodes; or set a longer timeout, if they take that to start"
            ) from error
        del served  # the group is connected to it
        if first and backend != "nccl":
            # Lightning does this for nccl. gloo's threads, too, should end before the interpreter does.
            atexit.register(_destroy_dist_connection)
        world = dist.group.WORLD
        assert world is not None
        if world.size() != self.num_nodes * self.num_processes:
            raise ValueError(
                f"this process is one of {world.size()} ranks already, but this Trainer asks for {self.num_nodes} × "
                f"{self.num_processes}: a process belongs to one world; use the same devices and num_nodes in every Trainer "
                "of a script, or one script for each size"
            )
        check_agreement(describe_start(self.config, VERSION), world, self.root_device)

    def _serve_store(self) -> object:
        """Listen where the other ranks look for this one, and not on every interface of the node.

        Returns:
            What serves the store, on the first rank, unless torchrun does.
        """
        assert self.cluster_environment is not None
        address, port = self.cluster_environment.main_address, self.cluster_environment.main_port
        one_node = self.num_nodes == 1
        keep_gloo_local(address, one_node=one_node)
        if self.global_rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return None
        return serve_store(address, port, self.config.timeout, one_node=one_node)

    def _store_of_attempt(self) -> dict[str, Any]:
        """The store of an attempt by torchrun that is not the first: it is the first one's, with the addresses of dead processes.

        torchrun keeps one store for all attempts (torch 2.13), and gloo looks up there where the other ranks listen.
        """
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if not attempt or _distributed_is_initialized():
            return {}
        rank, size = self.global_rank, self.world_size
        store, *_ = next(rendezvous("env://", rank, size, timeout=self.config.timeout))
        return {"store": PrefixStore(f"attempt {attempt}", store)}

    def _take_over_samplers(self) -> None:
        """Keep Lightning from replacing samplers by its own, which shuffles; :func:`inject_sampler` keeps the user's order."""
        connector = self._trainer._accelerator_connector
        if self._user_sampler_flag is None:
            self._user_sampler_flag = connector.use_distributed_sampler
        connector.use_distributed_sampler = False

    @property
    def _phases(self) -> Phases:
        """What reports the phases of the start: on the first rank, with progress bars if the Trainer has one."""
        return Phases(shows=self.global_rank == 0, bars=self._trainer.progress_bar_callback is not None)

    @property
    def _trainer(self) -> Trainer:
        """The Trainer of the user's module."""
        return self._module.trainer

    @property
    def _module(self) -> LightningModule:
        """The user's module."""
        module = self._lightning_module
        assert module is not None
        return module

    # ---- collectives for Lightning: values over the replicas, barriers and decisions over the world ---------------
    # Before set-up, when there are no groups yet, each of them answers as on one process.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the replicas; the ranks of one replica have the same value. Other objects stay as they are."""
        if not isinstance(tensor, Tensor) or self._groups is None:
            return tensor
        tensor = whole_logits(tensor).to(self.root_device)
        over = self.groups["dp"] if group is None else group
        if not (isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")):
            return _sync_ddp_if_available(tensor, over, reduce_op=reduce_op)
        # Not every backend has averages, and Lightning knows of gloo only where it is the group's one backend.
        total = _sync_ddp_if_available(tensor, over, reduce_op="sum")
        return total.div_(over.size()) if total.is_floating_point() else total.copy_(total / over.size())

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor over the replicas: ``[...]`` → ``[dp, ...]``, or unchanged where there is one replica.

        ``LightningModule.all_gather`` always passes the group of the world, so that stands for the replicas too. This
        replica's own entry is at ``dp_rank``. With ``sync_grads`` the gradient of an entry is the sum of those of all replicas'
        losses: a loss that all replicas compute alike of the gathered tensors is the one of a single process with the whole
        batch, and so are its gradients once they are averaged over the replicas. Sharded logits are gathered over tp first.
        """
        if self._groups is None:
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
        if self._groups is None:
            return decision
        reduced = torch.tensor(int(decision), device=host_device(self._world, self.root_device))
        dist.all_reduce(reduced, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, group=self._world)
        return bool(reduced)

    @property
    def _world(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        return self.groups[tuple(sorted(self.groups.topology.axes))]

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the world."""
        if name is not None and name.endswith("_dataloader()"):  # before Lightning calls process_dataloader for a loop
            self._loaders = 0
            self._loads_training = name.startswith("train")
        if not _distributed_is_initialized() or self._groups is None:
            return
        devices = [self.root_device.index] if self.root_device.type == "cuda" else None
        dist.barrier(group=self._world, device_ids=devices)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object of rank ``src`` to every rank of the world, and return it."""
        if not _distributed_is_initialized() or self._groups is None:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=src, group=self._world)
        return box[0]

    # ---- data --------------------------------------------------------------------------------------------------

    def _counted(self, dataloader: object) -> object:
        """A loader as long as a replica's, before there are process groups: it is only counted, and fit makes loaders anew."""
        kwargs = self.distributed_sampler_kwargs
        if (
            not isinstance(dataloader, DataLoader)
            or isinstance(dataloader.sampler, DistributedSampler)
            or isinstance(dataloader.dataset, IterableDataset)
            or not self._trainer._accelerator_connector.use_distributed_sampler
            or kwargs["num_replicas"] == 1
        ):
            return dataloader
        sampler: Any = DistributedSampler(dataloader.dataset, shuffle=False, **kwargs)
        made: object = _update_dataloader(dataloader, sampler)
        return made

    @property
    def _epoch_to_load(self) -> int:
        """The epoch of which loaders are made: the next one, where a run resumes from behind the last batch of one."""
        loop: Any = self._trainer.fit_loop
        progress = loop.epoch_progress.current
        ended = (
            loop.restarting and loop.epoch_loop.batch_progress.is_last_batch and progress.started > progress.processed
        )
        return int(progress.processed) + int(ended)

    def _batches_done(self) -> int:
        """How many batches of the epoch are done, if it is in its middle and has one loader; else 0."""
        loop = self._trainer.fit_loop
        loaders = loop._combined_loader
        done: int = loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]
        if loaders is None or len(loaders.flattened) != 1 or loop.epoch_loop.batch_progress.is_last_batch:
            return 0
        return done if done < self._trainer.num_training_batches else 0

    def process_dataloader(self, dataloader: object) -> object:
        """Divide the samples among the replicas, in the user's order; with ``broadcast_batch`` one rank of each reads."""
        if self._groups is None:
            return self._counted(dataloader)
        if isinstance(dataloader, BroadcastLoader):
            dataloader = dataloader.loader  # Lightning processes a loader that it keeps once more
        if isinstance(dataloader, DataLoader):
            if self._user_sampler_flag:
                dataloader = inject_sampler(
                    dataloader,
                    self.groups,
                    self._order_seed,
                    predicting=self._trainer.predicting,
                    place=self._loaders,
                    epoch=self._epoch_to_load,
                    batches_done=self._batches_done if self._loads_training else None,
                )
                self._loaders += 1
            replica_workers(dataloader, self.dp_rank)
        axes = self.groups.replica_axes
        if self.config.broadcast_batch and self.groups.size(axes) > 1:
            group = self.groups.gloo(axes) if self.config.gloo_twins else self.groups[axes]
            dataloader = BroadcastLoader(dataloader, group, self.groups.source(axes))
        if self._loads_training and self._places and hasattr(dataloader, "load_state_dict"):
            dataloader.load_state_dict(self._places.pop(0))
        return dataloader
