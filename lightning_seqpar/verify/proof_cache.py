"""The memory of proofs: a digest of all that a proof depends on, and the file that is named after it.

A plan that passed the self-check need not be checked again while all that decides what the model computes is the same. A
wrong answer would train with an unproved plan, so what can't be read into the digest is not remembered.

Why two models with one key behave alike, though neither is run:

- The code that runs is the same. Files of the user's loaded modules go in whole, and of every function that the model reaches
  (its classes' methods, hooks, functions that it holds, and what these name as globals) the byte code with all constants,
  closures and defaults: a function made at run time, or patched into a class, differs there. Installed packages are told by
  the versions of all of them and by the loaded files of those that the model's classes are from; what the user put into a
  loaded module, class or table of theirs is looked for and goes in as the user's code does.
- What that code reads is the same: every attribute of every module, to any depth, with the content of buffers and tensors;
  the globals that the user's functions name; hyperparameters; of the trainer what the user's code names of it.
- What is left of the weights does not matter to a proof, which is made on weights that were moved off theirs: names, shapes,
  types, ties, and which are frozen go in. So does the structure of the first example; values of a batch differ at every step.

What remains is code that finds its way by other means: environment variables and files that a forward reads, globals that it reads
by a computed name, state inside of installed packages that is no function of the user's, and packages edited in place.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_seqpar.config import VERSION, ParallelConfig
from lightning_seqpar.inference.examples import Example
from lightning_seqpar.plan.sharding_plan import ShardingPlan
from lightning_seqpar.verify.content_digest import (
    ContentDigest,
    UnreadableError,
    content_of,
    hooks_of,
    is_installed,
    name_of,
    users_code_in,
)

_TRAINER_FACTS = ("max_epochs", "max_steps", "accumulate_grad_batches", "precision", "world_size", "num_nodes")
"""Plain facts of a trainer that a step may read."""


class Fingerprint(NamedTuple):
    """What :func:`fingerprint` found.

    Attributes:
        key: a hexadecimal digest; None if there is none.
        unread: what can't be read, where there is none.
    """

    key: str | None
    unread: str = ""


def fingerprint(
    module: LightningModule,
    trainer: Trainer,
    config: ParallelConfig,
    sizes: Mapping[str, int],
    example: Example | None,
    evaluation: Example | None = None,
) -> Fingerprint:
    """Digest of all that a proof depends on: the model, the code that it runs, the plan, versions. No model is run.

    Args:
        module: the whole model.
        trainer: whose facts the step may read.
        config: what the user asked for; the fields that change the plan or what is proved go in.
        sizes: size of each axis of the topology.
        example: the first input that the self-check would try; None if there is none.
        evaluation: what the run evaluates first; None for nothing.
    """
    modules = dict(module.named_modules())
    places = {id(part): f"module {name}" for name, part in modules.items()}
    tensors: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensors.setdefault(id(parameter), f"parameter {name}")
    digest = ContentDigest({**places, **tensors})
    base = config.plan if isinstance(config.plan, str) else config.plan.base
    facts: dict[str, Any] = {
        "versions": [VERSION, torch.__version__, sys.version, *_installed()],
        "plan": config.model_dump(mode="json", exclude=_WITHOUT_EFFECT),
        "file": Path(base).read_text() if base.endswith((".yaml", ".yml")) else "",
        "sizes": dict(sizes),
        "dtype": torch.get_default_dtype(),
        "device": trainer.strategy.root_device.type,
        "example": [_structure(example), _structure(evaluation)],
    }
    try:
        for name, fact in facts.items():
            digest.add(fact, name)
        packages = _add_modules(digest, module, tensors)
        digest.add(dict(module.hparams), "model.hparams")
        for where, patched in users_code_in(packages | {"torch", "lightning"}):
            digest.add(where, where)
            digest.add(patched, where)
        _add_trainer(digest, trainer)
    except UnreadableError as error:
        return Fingerprint(None, str(error))
    for file in sorted(_sources(packages)):
        digest.add(hashlib.sha256(Path(file).read_bytes()).hexdigest(), file)
    return Fingerprint(digest.hexdigest())


_WITHOUT_EFFECT = {
    "timeout",
    "check_every",
    "checkpoint",
    "broadcast_batch",
    "self_check",
    "process_group_backend",
    "ddp",
}
"""Fields of the configuration that change neither a plan nor what is proved."""
_TOLD_OTHERWISE = {
    *("_parameters", "_modules", "_buffers", "_hparams", "_hparams_initial", "_example_input_array"),
    *("_trainer", "_fabric", "_fabric_optimizers", "_metric_attributes", "_compiler_ctx", "_device_mesh"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
}
"""Attributes of modules that go in by themselves, or that no forward and backward reads."""


def _add_modules(digest: ContentDigest, module: LightningModule, tensors: Mapping[int, str]) -> set[str]:
    """Read every module with its class, attributes, hooks and tensors; the packages of their classes."""
    packages: set[str] = set()
    for name, part in module.named_modules():
        path = f"model.{name}" if name else "model"
        packages |= {base.__module__.partition(".")[0] for base in type(part).__mro__} - {"builtins"}
        digest.add(name, path)
        digest.add(type(part), path)
        for key, value in sorted(vars(part).items()):
            if key not in _TOLD_OTHERWISE:
                digest.add(key, path)
                digest.add(value, f"{path}.{key}")
        digest.add(hooks_of(part), f"a hook of {path}")
        for key, parameter in part._parameters.items():
            if parameter is None:
                digest.add([key, None], path)
                continue
            first = tensors[id(parameter)]  # another name where it is tied
            digest.add(
                [key, first, str(parameter.dtype), parameter.shape, parameter.requires_grad, parameter.is_meta], path
            )
            digest.add(list((getattr(parameter, "_backward_hooks", None) or {}).values()), f"a hook of {path}.{key}")
            if attributes := vars(parameter):
                digest.add(attributes, f"{path}.{key}")
        for key, buffer in part._buffers.items():
            digest.add([key, None if buffer is None else [str(buffer.dtype), buffer.shape, buffer.is_meta]], path)
            if buffer is not None and not buffer.is_meta:
                digest.add(content_of(buffer), path)
    return packages


def _add_trainer(digest: ContentDigest, trainer: Trainer) -> None:
    """Read what the user's code, as far as it was read, may read of the trainer."""
    if "trainer" in digest.names or "_trainer" in digest.names:
        digest.add({name: getattr(trainer, name) for name in _TRAINER_FACTS}, "trainer")
    if "datamodule" in digest.names:
        digest.add(trainer.datamodule, "trainer.datamodule")  # type: ignore[attr-defined]
    if any(name.endswith(("callbacks", "_callback")) for name in digest.names):
        digest.add(trainer.callbacks, "trainer.callbacks")  # type: ignore[attr-defined]


def _structure(example: Example | None) -> Any:
    """An example without its values: the method, the form of its arguments, and shapes and types of their tensors."""
    if example is None:
        return None
    leaves, form = tree_flatten((example.args, dict(example.kwargs)))
    kinds = [(str(x.dtype), x.shape) if isinstance(x, Tensor) else name_of(type(x)) for x in leaves]
    return [example.method, example.path, str(form), kinds]


def _installed() -> list[str]:
    """Names and versions of all packages that can be imported, as their folders of metadata tell them."""
    found: set[str] = set()
    for place in sys.path:
        if os.path.isdir(place or "."):
            found |= {entry for entry in os.listdir(place or ".") if entry.endswith((".dist-info", ".egg-info"))}
    return sorted(found)


def _sources(packages: set[str]) -> set[str]:
    """Source files of the user's loaded modules, and of the packages that the model's classes are from.

    Args:
        packages: their names; torch and Lightning, which are large, are told by their versions alone.
    """
    files: set[str] = set()
    for name, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        if name.partition(".")[0] in packages - {"torch", "lightning"} or not is_installed(file):
            files.add(file)
    return {file for file in files if os.path.isfile(file)}


# ---- files ---------------------------------------------------------------------------------------------------------


def cache_folder(what: str) -> Path:
    """Where proofs, or plans, are kept on this machine, by the XDG convention.

    Raises:
        RuntimeError: if this user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning_seqpar" / what


def write_plan(plans: Sequence[ShardingPlan], text: str) -> str:
    """Write the rules of plans into a file that ``plan=FILE`` reads, behind a text about them.

    Args:
        plans: the plans, in order.
        text: becomes comments in front of the rules.

    Returns:
        The file's path; empty if it can't be written.
    """
    rules = "".join(plan.to_yaml().partition("\n")[2] for plan in plans)
    content = "".join(f"# {line}\n" for line in text.splitlines()) + "rules:\n" + rules
    try:
        file = cache_folder("plans") / f"{hashlib.sha256(rules.encode()).hexdigest()[:12]}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    except (OSError, RuntimeError):
        return ""
    return str(file)


@dataclass(frozen=True)
class Proof:
    """What is remembered of a model that passed the self-check.

    Attributes:
        plan: the inferred plan as YAML, so that it need not be inferred again; empty for any other plan.
        whole: why the vocabulary stays whole, though the model has one; empty if what was found of it was proved.
        reasons: why the inferred plan is as it is.
        why_whole: patterns of modules that were left whole, each with the reason.
        no_sp: patterns of blocks that are given whole sequences, each with the reason.
        rest: why nothing was inferred for what shipped plans leave whole; empty if something was, or nothing is left.
        frozen: why the proof holds only while frozen parameters stay so; empty if it holds when they thaw too.
    """

    plan: str = ""
    whole: str = ""
    reasons: list[str] = field(default_factory=list)
    why_whole: dict[str, str] = field(default_factory=dict)
    no_sp: dict[str, str] = field(default_factory=dict)
    rest: str = ""
    frozen: str = ""


def read_proof(key: str) -> Proof | None:
    """What :func:`write_proof` remembered under a key; None if nothing is remembered, or not as it was written."""
    try:
        content = json.loads((cache_folder("proofs") / f"{key}.json").read_text())
        seal = content.pop("seal")
        proof = Proof(**content)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return proof if seal == _seal(key, proof) else None


def write_proof(key: str, proof: Proof) -> None:
    """Remember that a model passed the self-check; a folder that can't be written is reported and otherwise ignored.

    Args:
        key: names the file.
        proof: what is remembered.
    """
    try:
        folder = cache_folder("proofs")
        folder.mkdir(parents=True, exist_ok=True)
        # A name of its own, since runs of several machines may write one proof to one folder at once.
        handle, part = tempfile.mkstemp(prefix=f"{key}.", suffix=".part", dir=folder)
        with os.fdopen(handle, "w") as file:
            json.dump({**asdict(proof), "seal": _seal(key, proof)}, file)
        Path(part).replace(folder / f"{key}.json")
    except (OSError, RuntimeError) as error:
        rank_zero_info(f"lightning_seqpar: the proof is not remembered, its folder can't be written ({error})")


def _seal(key: str, proof: Proof) -> str:
    """A digest by which a file that was cut off or changed is told."""
    return hashlib.sha256(json.dumps([key, asdict(proof)]).encode()).hexdigest()
