"""Configurations, callbacks and modules that are refused before anything is run."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch._inductor
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.releases import (
    COMPILES_APART,
    HAS_FSDP,
    LRCallback,
    WeightAveraging,
    is_overridden,
    is_param_in_hook_signature,
    pl,
)
from lightning_seqpar.user_input import nearest


def refuse_unsupported(config: ParallelConfig) -> None:
    """Refuse a field that the configuration knows and the strategy does not run, and fields that do not go together."""
    if config.data_parallel != "ddp" and not HAS_FSDP:
        raise ValueError(
            f"data_parallel={config.data_parallel!r} needs torch 2.13, and {torch.__version__} is installed; use "
            "data_parallel='ddp'"
        )
    if not config.compile:
        return
    if not COMPILES_APART:
        raise ValueError(f"compile=True needs torch 2.13, and {torch.__version__} is installed; use compile=False")
    if config.cp > 1:
        raise ValueError(
            f"cp={config.cp} with compile=True: sequences of which ranks hold parts are not traced; use compile=False, or cp=1"
        )
    if config.tile_mlp is not None:
        raise ValueError(
            f"tile_mlp={config.tile_mlp} with compile=True: a block is one graph, in which nothing runs in tiles; leave tile_mlp "
            "out, or use compile=False"
        )
    if config.recompute in ("activations", "selective"):
        raise ValueError(
            f"recompute={config.recompute!r} with compile=True: a part of a block can't be run again from inside its one graph, of "
            "which the compiler says what is kept; use recompute='none' or 'full', or compile=False"
        )


def check_float8(config: ParallelConfig, device: torch.device) -> None:
    """Refuse float8 on a GPU that has no products in it."""
    if config.float8 != "none" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f"float8={config.float8!r} on {torch.cuda.get_device_name(device)}: products in float8 need compute capability 8.9 "
            "(Ada, Hopper, MI300) or later; leave float8 out"
        )


def refuse_notebook(processes: int) -> None:
    """Refuse to start several processes from a notebook or an interactive prompt, which have no file to run again."""
    if processes > 1:
        raise ValueError(
            f"devices={processes} in a notebook, at an interactive prompt or in python -c: the other ranks are started by "
            "running the same file again, and here there is none. Put the code into a script and start it with python or "
            "torchrun; with devices=1 (tp=1) it runs here"
        )


def refuse_sweep(processes: int) -> None:
    """Refuse to start several processes from a job of a Hydra sweep, whose jobs all run in one main process."""
    if processes > 1:
        raise ValueError(
            f"a hydra multirun (-m) with devices={processes}: the jobs of a sweep share one main process, and the ranks that "
            "it starts would each run the whole sweep. Start the jobs one by one (for tp in 2 4; do python train.py "
            "strategy.tp=$tp; done), or sweep with a launcher that gives each job processes of its own"
        )


def check_backend(config: ParallelConfig, device_type: str) -> None:
    """Refuse a backend that torch does not know, that its build lacks, or that does not work on the device."""
    backend = config.process_group_backend
    if backend == "nccl" and device_type == "cpu":
        raise ValueError("process_group_backend='nccl' with accelerator='cpu': nccl speaks between GPUs; use 'gloo'")
    known = [name for name in dist.Backend.backend_list if name != "undefined"]
    for name in [] if backend is None else [part.split(":")[-1] for part in backend.split(",")]:
        if name not in known:
            raise ValueError(
                f"process_group_backend={backend!r}: torch knows no {name!r}; did you mean {nearest(name, known)}?"
            )
        if not dist.is_backend_available(name):
            raise ValueError(f"process_group_backend={backend!r}: this build of torch has no {name}; use 'gloo'")
    if config.compile and device_type == "cuda" and {"gloo", "cuda:gloo"} & set((backend or "").split(",")):
        raise ValueError(
            f"process_group_backend={backend!r} with compile=True on GPUs: collectives of a compiled block over gloo ended the "
            "ranks without a word (torch 2.11); leave process_group_backend out, which takes nccl, or use compile=False"
        )


def syncs_batch_norms(plugin: pl.plugins.layer_sync.LayerSync | None) -> bool:
    """Whether the plugin is the one of ``Trainer(sync_batchnorm=True)``, for which the strategy syncs batch norms by itself."""
    return type(plugin) is pl.plugins.layer_sync.TorchSyncBatchNorm


def check_layer_sync(plugin: pl.plugins.layer_sync.LayerSync | None) -> None:
    """Refuse a ``LayerSync`` plugin of the user's, which would exchange modules of a model that is sharded."""
    if plugin is not None and not syncs_batch_norms(plugin):
        raise ValueError(
            f"plugins=[{type(plugin).__name__}()]: a LayerSync plugin of yours would exchange modules of a model that is sharded; "
            "use Trainer(sync_batchnorm=True), which takes the statistics over all replicas, or exchange them in your model"
        )


COMPILE_OPTIONS = ("backend", "mode", "options", "dynamic")  # of ``torch.compile``, that ``compile_options`` may hold


def check_compile_options(options: Mapping[str, Any]) -> None:
    """Refuse options of the field ``compile_options`` that are not passed on to ``torch.compile``, or that it does not take."""
    for name in options:
        if name in ("model", "fullgraph", "disable"):
            raise ValueError(f"compile_options={{{name!r}: ...}}: the strategy sets {name} itself; leave it out")
        if name not in COMPILE_OPTIONS:
            raise ValueError(
                f"compile_options={{{name!r}: ...}}: it is not passed on; did you mean {nearest(name, COMPILE_OPTIONS)}?"
            )
    backend, mode = options.get("backend", "inductor"), options.get("mode")
    # The list is asked for a backend alone: it imports all of them, for a second, in every process.
    if "backend" in options and backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise ValueError(
            f"compile_options={{'backend': {backend!r}}}: torch knows no such backend; did you mean {nearest(str(backend), known)}?"
        )
    modes = [] if mode is None else ["default", *torch._inductor.list_mode_options()]
    if mode is not None and (backend != "inductor" or mode not in modes):
        raise ValueError(
            f"compile_options={{'mode': {mode!r}}}: write one of inductor's modes ({', '.join(dict.fromkeys(modes))}), and no "
            "other backend beside it"
        )
    if not isinstance(options.get("dynamic"), bool | None):
        raise ValueError(f"compile_options={{'dynamic': {options['dynamic']!r}}}: write true, false or null")


TAKEN_DDP_OPTIONS = ("module", "device_ids", "output_device", "process_group", "device_mesh")
"""Arguments of ``DistributedDataParallel`` that the strategy sets itself."""


def check_ddp_options(options: Mapping[str, Any]) -> None:
    """Refuse options of the field ``ddp`` that ``DistributedDataParallel`` does not take or that the strategy sets itself."""
    known = [name for name in inspect.signature(DistributedDataParallel).parameters if name not in TAKEN_DDP_OPTIONS]
    for name in options:
        if name in TAKEN_DDP_OPTIONS:
            raise ValueError(f"ddp={{{name!r}: ...}}: the strategy sets {name} itself; leave it out")
        if name not in known:
            raise ValueError(
                f"ddp={{{name!r}: ...}}: DistributedDataParallel has no such option; did you mean {nearest(name, known)}?"
            )


def refuse_callbacks(callbacks: Sequence[Any], shards: int) -> None:
    """Refuse callbacks that choose among all elements of a weight (pruning), recognised by the names of their classes."""
    for callback in callbacks:
        if shards > 1 and any(kind.__name__ == "ModelPruning" for kind in type(callback).__mro__):
            raise ValueError(
                f"{type(callback).__name__} with parameters in {shards} parts: it copies the model before it is sharded, and each "
                "rank would choose by its own part of a weight what to prune; prune before or after the training"
            )


def refuse_links(callbacks: Sequence[Any]) -> None:
    """Refuse ``save_last="link"`` where checkpoints are written in the background: the link would lead to what is not whole yet."""
    for callback in callbacks:
        if getattr(callback, "save_last", None) == "link":
            raise ValueError(
                f"{type(callback).__name__}(save_last='link') with checkpoint={{'async_save': True}}: the link would lead to a "
                "checkpoint that is not whole yet; use save_last=True, or async_save: false"
            )


def refuse_in_stages(module: pl.LightningModule, callbacks: Iterable[Any], pp: int) -> None:
    """Refuse a module or a callback that needs what one stage alone has."""
    if not module.automatic_optimization:
        raise ValueError(
            f"pp={pp} with automatic_optimization=False: micro-batches of a pipeline are the batches that Lightning accumulates, "
            "and backwards run when they are due; use automatic optimization with accumulate_grad_batches, or pp=1"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"pp={pp} with training_step(self, dataloader_iter): a step that reads its loader by itself can't be run by stages "
            "that are not equally far; write training_step(self, batch, batch_idx), or use pp=1"
        )
    reads = [module] if is_overridden("on_after_backward", module) else []
    for callback in callbacks:
        name = type(callback).__name__
        if is_overridden("on_after_backward", callback, pl.callbacks.Callback):
            reads.append(callback)
        if isinstance(callback, (WeightAveraging, pl.callbacks.StochasticWeightAveraging)):
            raise ValueError(
                f"{name} with pp={pp}: it copies all weights, of which each stage has its own; leave it out, or use pp=1"
            )
        if isinstance(callback, pl.callbacks.LearningRateFinder | LRCallback):
            raise ValueError(
                f"{name} with pp={pp}: it reads the loss behind each batch, which the last stage alone has then; look for the rate "
                "with pp=1, or leave it out"
            )
    if reads:
        raise ValueError(
            f"{type(reads[0]).__name__}.on_after_backward with pp={pp}: behind a micro-batch its backward may still be to come; "
            "use on_before_optimizer_step, or pp=1"
        )


def describe_bubble(micro_batches: int, pp: int, virtual_pp: int = 1) -> str:
    """A sentence on the part of a step in which a stage waits: ``(p - 1) / (v m + p - 1)`` (arXiv 2104.04473, section 2.2)."""

    def share(count: int) -> str:
        return f"{(pp - 1) / (virtual_pp * count + pp - 1):.0%}"

    told = f"pp={pp}" + f", virtual_pp={virtual_pp}" * (virtual_pp > 1)
    told += f" with accumulate_grad_batches={micro_batches}: each stage waits {share(micro_batches)} of the time for others"
    if micro_batches < pp:
        told += ", since there are fewer micro-batches than stages"
    if micro_batches < 4 * pp:
        told += f"; accumulate_grad_batches={4 * pp} would leave {share(4 * pp)}"
    return told
