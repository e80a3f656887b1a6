"""Which Lightning this process uses, under which of its two names, and in what releases of it and of torch differ.

``lightning.pytorch`` and ``pytorch_lightning`` are two packages of the same code, whose classes are not each other's. All of this
package uses the one that the user's program uses, by the names of here.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from packaging.version import Version
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

_NAMES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
ASKED = "SEQPAR_LIGHTNING"
"""Environment variable that names the package, for commands (``seqpar``), which start before anything of the user's is imported."""


def used_package(imported: Iterable[str], installed: Iterable[str], asked: str = "") -> str:
    """Lightning's package that the program uses: what is asked for, or what it imported first, or the first that is installed.

    Raises:
        ImportError: where neither is.
        ValueError: for another package that is asked for.
    """
    if asked and asked not in _NAMES:
        raise ValueError(f"{ASKED}={asked!r}: it must be one of {', '.join(_NAMES)}")
    if asked:
        return asked
    packages = [name.replace("lightning_fabric", "pytorch_lightning") for name in imported]
    found = [name for name in packages if name in _NAMES] or [name for name in _NAMES if name in installed]
    if not found:
        raise ImportError("lightning_seqpar needs Lightning, and neither of its packages is installed: pip install lightning")
    return found[0]


if TYPE_CHECKING:
    import lightning.fabric as fabric
    import lightning.fabric.strategies.parallel
    import lightning.pytorch as pl
    import lightning.pytorch.overrides.distributed  # mypy asks for these three
    import lightning.pytorch.trainer.connectors.data_connector
    import lightning.pytorch.tuner.lr_finder  # noqa: F401
else:
    _imported = [name for name, module in sys.modules.items() if module is not None]
    _used = used_package(_imported, [name for name in _NAMES if find_spec(name)], os.environ.get(ASKED, ""))
    pl, fabric = map(importlib.import_module, _NAMES[_used])

PACKAGES = {name.partition(".")[0] for name in (pl.__name__, fabric.__name__)}
"""Lightning's packages that are used."""

VERSION: str = sys.modules["lightning_seqpar"].__version__
"""Of this package; checkpoints and the comparison of ranks name it."""

LIGHTNING_VERSION: str = pl.__version__  # type: ignore[attr-defined]
if Version(LIGHTNING_VERSION) < Version("2.6.6"):
    rank_zero_warn(
        f"{pl.__name__} {LIGHTNING_VERSION} has CVE-2026-58659, by which load_from_checkpoint may run code of a file; it is fixed "
        "in 2.6.6; read no checkpoints that others wrote"
    )


def whose() -> str:
    """The package that is used, as a strategy shows it; where the other one is imported too, how that would be used."""
    others = [name for name in _NAMES if name not in PACKAGES and sys.modules.get(name) is not None]
    return f"{pl.__name__}{''.join(f' (for {name} import that before lightning_seqpar)' for name in others)}"


def is_lightnings(module: str) -> bool:
    """Whether a module of this name is one of Lightning's, under whatever name."""
    return module.partition(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")


def check_package(model: object) -> None:
    """Raises ValueError for a LightningModule of Lightning's other package, which nothing here would know as one."""
    for kind in type(model).__mro__:
        if kind.__name__ == "LightningModule" and is_lightnings(kind.__module__) and kind is not pl.LightningModule:
            package = kind.__module__.partition(".")[0]
            raise ValueError(
                f"{type(model).__name__} is a LightningModule of {package}, and lightning_seqpar works with {pl.__name__} here: "
                f"import {package} before lightning_seqpar, or set {ASKED}={package}"
            )


# ---- names of Lightning's that no package of it shows at its top -------------------------------------------------

load_file = fabric.utilities.cloud_io._load
DummyExperiment = fabric.loggers.logger._DummyExperiment
get_available_flops = fabric.utilities.throughput.get_available_flops
find_free_network_port = fabric.plugins.environments.lightning.find_free_network_port
basic_subprocess_cmd = fabric.strategies.launchers.subprocess_script._basic_subprocess_cmd
hydra_subprocess_cmd = fabric.strategies.launchers.subprocess_script._hydra_subprocess_cmd
destroy_dist_connection = fabric.utilities.distributed._destroy_dist_connection
distributed_is_initialized = fabric.utilities.distributed._distributed_is_initialized
init_dist_connection = fabric.utilities.distributed._init_dist_connection
set_num_threads_if_needed = fabric.utilities.distributed._set_num_threads_if_needed
sync_ddp_if_available = fabric.utilities.distributed._sync_ddp_if_available
BackwardSyncControl = fabric.strategies.strategy._BackwardSyncControl
FabricLauncher = fabric.strategies.launchers.subprocess_script._SubprocessScriptLauncher
validate_keys = fabric.strategies.strategy._validate_keys_for_strict_loading
IS_INTERACTIVE = fabric.utilities.imports._IS_INTERACTIVE
optimizer_to_device = fabric.utilities.optimizer._optimizer_to_device
optimizers_to_device = fabric.utilities.optimizer._optimizers_to_device

WrappedOptimizer = (pl.core.optimizer.LightningOptimizer, fabric.wrappers._FabricOptimizer)
MockOptimizer = pl.core.optimizer._MockOptimizer
configure_optimizers = pl.core.optimizer._configure_optimizers
configure_schedulers_automatic_opt = pl.core.optimizer._configure_schedulers_automatic_opt
configure_schedulers_manual_opt = pl.core.optimizer._configure_schedulers_manual_opt
IndexBatchSamplerWrapper = pl.overrides.distributed._IndexBatchSamplerWrapper
prepare_for_backward = pl.overrides.distributed.prepare_for_backward
HYDRA_AVAILABLE = pl.strategies.launchers.subprocess_script._HYDRA_AVAILABLE
SubprocessScriptLauncher = pl.strategies.launchers.subprocess_script._SubprocessScriptLauncher
ForwardRedirection = pl.strategies.strategy._ForwardRedirection
parse_num_batches = pl.trainer.connectors.data_connector._parse_num_batches
TrainerFn = pl.trainer.states.TrainerFn
LRCallback = pl.tuner.lr_finder._LRCallback
CombinedLoader = pl.utilities.combined_loader.CombinedLoader
is_overridden = pl.utilities.model_helpers.is_overridden
is_param_in_hook_signature = pl.utilities.signature_utils.is_param_in_hook_signature

# ---- what releases lack --------------------------------------------------------------------------------------------

WeightAveraging: Any = getattr(pl.callbacks, "WeightAveraging", ())  # since lightning 2.6; nothing is one before


def is_look(hook: Any) -> bool:
    """Whether a tensor's hook is Fabric's, on what a model returns, which reads no gradient: only that one comes."""
    return getattr(hook, "func", None) is fabric.wrappers._backward_hook


def converts_weights() -> bool:
    """Whether transformers' modules may have other tensors than their files (stacked experts): since transformers 5."""
    return find_spec("transformers.core_model_loading") is not None


COMPILES_APART = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # torch 2.11 lacks it
NODES_STAY = Version(torch.__version__) >= Version("2.13.0.dev0")  # with torch 2.8 an object in Python outlives its node
HAS_FSDP = hasattr(FSDPModule, "reset_iter_state")  # torch 2.11 lacks it, and set_reduce_scatter_unused_params
MUON = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()  # torch 2.8 lacks it
FAKE_HAS_NAME = hasattr(FakeProcessGroup, "_create_internal")  # torch 2.8 lacks it, and the name of its backend
ALL_GATHER = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"  # of torch 2.11
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters  # torch 2.11 lacks it


def make_fake_backend(rank: int, size: int) -> FakeProcessGroup:
    """A backend whose collectives return at once and send nothing."""
    return FakeProcessGroup._create_internal(rank, size) if FAKE_HAS_NAME else FakeProcessGroup(rank, size)


def new_group(ranks: Sequence[int], **options: Any) -> ProcessGroup:
    """A group of these world ranks in this order; only its members call this.

    Raises:
        ValueError: for ranks that do not ascend, before torch 2.13.
    """
    if list(ranks) != sorted(ranks):
        if not _KEEPS_ORDER:
            raise ValueError(
                f"a group of the ranks {list(ranks)}, in this order, needs torch 2.13; this is {torch.__version__}"
            )
        options["sort_ranks"] = False
    group = dist.new_group(list(ranks), use_local_synchronization=True, **options)
    assert isinstance(group, ProcessGroup)
    return group


def register_strategies(registry: fabric.strategies.registry._StrategyRegistry, kind: str, make: Callable[..., Any]) -> None:
    """Register names for ``Trainer(strategy=...)``, or Fabric's: ``seqpar``, and ``seqpar_tp2`` to ``seqpar_tp64``."""
    for name, tp in (("seqpar", 1), *((f"seqpar_tp{2**n}", 2**n) for n in range(1, 7))):
        registry.register(name, make, description=f"{kind}(tp={tp})", override=True, tp=tp)
