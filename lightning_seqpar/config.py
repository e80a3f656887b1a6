"""What a user asks for: :class:`ParallelConfig` and its parts.

Pure data. Nothing here knows torch, the environment or the world size; sizes meet the world where the
topology is made (:meth:`lightning_seqpar.topology.ProcessTopology.from_config`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

AXES = ("pp", "dp", "cp", "tp")
"""Every axis of the topology, in the default order, outermost first."""


def nearest(word: str, known: Sequence[str], count: int = 3) -> str:
    """Up to ``count`` of the ``known`` names that look most like ``word``, as text for a message."""
    found = difflib.get_close_matches(word, known, n=count, cutoff=0.4)
    return ", ".join(repr(name) for name in found) if found else ", ".join(repr(name) for name in known)


class FrozenModel(BaseModel):
    """Base of every config model: frozen, and unknown keys are answered with the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def keys_are_known(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    raise ValueError(
                        f"{key!r} is not a field of {cls.__name__}; did you mean "
                        f"{nearest(str(key), list(cls.model_fields))}?"
                    )
        return data


class CheckpointConfig(FrozenModel):
    """How checkpoints are written."""

    format: Literal["single", "sharded"] = "single"
    """``single``: one ordinary ``.ckpt`` that plain Lightning loads; ``sharded``: a folder, a part per rank."""
    async_save: bool = False
    """Overlap the write with training."""


class PlanSpec(FrozenModel):
    """A plan written in the config: rules on top of a base."""

    base: str = "auto"
    """``auto``, ``none``, a family's name or the path of a YAML file; the rules are merged over it."""
    rules: tuple[dict[str, Any], ...] = ()
    """Rules as :class:`lightning_seqpar.plan.ShardingPlan` reads them; a later rule wins."""


class ParallelConfig(FrozenModel):
    """The whole configuration of :class:`lightning_seqpar.SeqParallelStrategy`.

    Raises:
        pydantic.ValidationError: for an unknown key or a value outside its rule; the message names the field,
            the value, the rule and the fix.
    """

    tp: int = 1
    """Tensor-parallel size: over how many ranks each linear is split."""
    sp: bool = True
    """Sequence parallelism over the tensor-parallel group (arXiv 2205.05198); idle at ``tp=1``."""
    dp: Literal["auto"] | int = "auto"
    """Data-parallel size; ``auto`` takes what the world leaves, a number is checked against it."""
    cp: int = 1
    """Context-parallel size."""
    cp_method: Literal["auto", "ring", "ulysses"] = "auto"
    """How attention is computed across the context-parallel ranks."""
    pp: int = 1
    """Pipeline-parallel size."""
    virtual_pp: int | None = None
    """Stages per pipeline rank (interleaving), or none."""
    pp_split_rank: int | None = None
    """First pipeline rank of the decoder in an encoder-decoder model."""
    order: str = "pp-dp-cp-tp"
    """The axes, outermost first; ranks along the last one are adjacent."""
    plan: str | PlanSpec = "auto"
    """``auto``, a family's name, the path of a YAML file, or ``{base: ..., rules: [...]}``."""
    data_parallel: Literal["ddp", "fsdp"] = "ddp"
    """What synchronises the data-parallel replicas."""
    ddp: dict[str, Any] = Field(default_factory=dict)
    """Options passed on to ``DistributedDataParallel``."""
    fsdp: dict[str, Any] = Field(default_factory=dict)
    """Options passed on to ``fully_shard``."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute."""
    regather: Literal["auto"] | bool = "auto"
    """Gather a column linear's input again in the backward instead of keeping the gathered copy."""
    compile: bool = False
    """Compile the model."""
    self_check: bool = True
    """Prove the plan before training."""
    check_every: int = 0
    """Repeat the run-time checks every so many optimizer steps (0: only at steps 1, 2, 4, 8, ...)."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Form of the checkpoints."""
    process_group_backend: str | None = None
    """Backend of the process groups; none means the device's own (gloo on CPU, nccl on CUDA)."""
    timeout: timedelta = timedelta(seconds=1800)
    """How long a collective may wait for its peers, in seconds or as a timedelta."""
    fp8_groups: bool = False
    """Make the amax-reduction groups (tp × dp)."""
    gloo_twins: bool = False
    """Make a gloo twin of every group."""

    @field_validator("tp", "cp", "pp", "dp", "virtual_pp", "check_every", "pp_split_rank", mode="before")
    @classmethod
    def numbers_are_whole(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError(f"{info.field_name}={value!r}: it counts ranks or steps; write a whole number")
        return value

    @field_validator("tp", "cp", "pp", "dp", "virtual_pp")
    @classmethod
    def sizes_are_positive(cls, value: int | str | None, info: ValidationInfo) -> int | str | None:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{info.field_name}={value}: a size must be 1 or more; leave it out for 1")
        return value

    @field_validator("check_every")
    @classmethod
    def check_every_is_not_negative(cls, value: int) -> int:
        if value < 0:
            raise ValueError(f"check_every={value}: write 0 for the default schedule or a number of steps")
        return value

    @field_validator("order")
    @classmethod
    def order_names_every_axis_once(cls, value: str) -> str:
        names = value.split("-")
        if sorted(names) != sorted(AXES):
            raise ValueError(
                f"order={value!r}: it must name {', '.join(AXES)} once each, joined by '-', outermost first; "
                f"for example {'-'.join(AXES)!r}"
            )
        return value

    @field_validator("timeout")
    @classmethod
    def timeout_is_positive(cls, value: timedelta) -> timedelta:
        if value <= timedelta(0):
            raise ValueError(f"timeout={value.total_seconds()} s: a collective needs a positive number of seconds")
        return value

    @field_validator("plan", mode="before")
    @classmethod
    def plan_rules_may_stand_alone(cls, value: Any) -> Any:
        return {"rules": value} if isinstance(value, list | tuple) else value

    @field_validator("plan")
    @classmethod
    def plan_is_named(cls, value: str | PlanSpec) -> str | PlanSpec:
        if value == "":
            raise ValueError("plan='': write 'auto', a family's name, the path of a YAML file, or rules")
        return value

    @model_validator(mode="after")
    def split_rank_needs_a_pipeline(self) -> ParallelConfig:
        if self.pp_split_rank is not None and not 0 < self.pp_split_rank < self.pp:
            raise ValueError(
                f"pp_split_rank={self.pp_split_rank}: the decoder's first rank must lie inside the pipeline, "
                f"between 1 and pp - 1 = {self.pp - 1}; set pp to 2 or more, or leave pp_split_rank out"
            )
        return self

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> ParallelConfig:
        """Read a YAML file (OmegaConf: interpolations work), then apply ``overrides`` such as ``"tp=4"``.

        Raises:
            ValueError: if the file does not exist or is not a mapping.
        """
        file = Path(path)
        if not file.is_file():
            raise ValueError(f"config file {str(path)!r} does not exist; give the path of a YAML file")
        loaded = OmegaConf.load(file)
        if not isinstance(loaded, DictConfig):
            raise ValueError(f"config file {str(path)!r} must hold a mapping such as 'tp: 2', not a list")
        return cls.from_omegaconf(OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides))))

    @classmethod
    def from_omegaconf(cls, cfg: Any) -> ParallelConfig:
        """Build from an OmegaConf node or a plain mapping; interpolations are resolved, ``_target_`` is dropped."""
        plain = OmegaConf.to_container(cfg, resolve=True) if OmegaConf.is_config(cfg) else cfg
        if not isinstance(plain, Mapping):
            raise ValueError(f"a parallel config must be a mapping such as {{'tp': 2}}, got {plain!r}")
        return cls(**{str(key): value for key, value in plain.items() if key != "_target_"})

    def to_yaml(self) -> str:
        """The configuration as YAML that :meth:`from_yaml` reads back."""
        data = self.model_dump(mode="json")
        data["timeout"] = self.timeout.total_seconds()
        return yaml.safe_dump(data, sort_keys=False)
