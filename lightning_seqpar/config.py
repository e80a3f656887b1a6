"""What a user asks for: :class:`ParallelConfig` and its parts; pure data, without torch, environment or world size."""

from __future__ import annotations

import io
import itertools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from lightning_seqpar.user_input import LARGEST_NUMBER, cause_of, nearest, read_text, shortened, shown

AXES = ("pp", "dp", "cp", "tp")
"""Every axis of the topology, in the default order, outermost first."""

if TYPE_CHECKING:
    Seconds = timedelta
else:
    Seconds = timedelta | float  # what command lines may hand over; the field itself always holds a timedelta


def broken(message: str) -> PydanticCustomError:
    """The error of a rule, without the decoration that Pydantic gives a ``ValueError``."""
    return PydanticCustomError("rule", "{message}", {"message": message})


def _modules_can_be_asked() -> bool:
    """Whether every loaded module can be asked for its file, as pydantic asks for docstrings; one imported lazily may raise."""
    try:
        for module in [*sys.modules.values()]:
            getattr(module, "__file__", None)
    except Exception:  # whatever importing it raises
        return False
    return True


_SENTENCES = {
    "literal_error": "it must be {expected}",
    "bool_type": "it is a switch; write true or false",
    "bool_parsing": "it is a switch; write true or false",
    "dict_type": "write a mapping of options, such as {{name: value}}",
}
"""What is said in the place of Pydantic's own sentences, by type of error."""


def _sentence(item: Any) -> str:
    """One error of Pydantic's in words."""
    context = item.get("ctx", {})
    said = _SENTENCES[item["type"]].format(**context) if item["type"] in _SENTENCES else context.get("error", item["msg"])
    yaml_made_it = item["type"] == "literal_error" and item["input"] is False
    return f"{said}{' (YAML reads a bare off or no as false; write the word in quotes)' * yaml_made_it}"


def _told(items: Sequence[Any], data: Any) -> InitErrorDetails:
    """Errors of Pydantic's on one field as one of ours, which names field and value."""
    first, field = items[0], ".".join(str(part) for part in items[0]["loc"][:1])
    said = "; or ".join([*dict.fromkeys(map(_sentence, items))][:3])
    if first["type"] == "rule":
        said = first["msg"]
    elif first["type"] == "missing":
        said = f"{field!r} is missing; write it, too"
    elif f"{field}=" not in said:
        said = f"{field}={shown(data.get(field) if isinstance(data, Mapping) else first['input'])}: {said}"
    return InitErrorDetails(type=broken(shortened(said)), loc=first["loc"][:1], input=first["input"])


class FrozenModel(BaseModel):
    """Base of every config model: frozen, and unknown keys are answered with the nearest known one."""

    # The rules below show the value themselves.
    model_config = ConfigDict(
        ser_json_timedelta="float",
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=_modules_can_be_asked(),
        hide_input_in_errors=True,
    )

    @model_validator(mode="before")
    @classmethod
    def keys_are_known(cls, data: Any) -> Any:
        if not isinstance(data, Mapping | BaseModel):
            fields = ", ".join(list(cls.model_fields)[:4])
            raise broken(f"{shown(data)} is no {cls.__name__}; write a mapping with some of its fields ({fields}, ...)")
        for key in data if isinstance(data, Mapping) else ():
            if key not in cls.model_fields:
                near = nearest(str(key), list(cls.model_fields))
                raise broken(f"{shown(key)} is not a field of {cls.__name__}; did you mean {near}?")
        return data

    @model_validator(mode="wrap")
    @classmethod
    def errors_name_field_and_value(cls, data: Any, handler: Callable[[Any], Any]) -> Any:
        """What Pydantic itself says of a value names neither; one field may have many such errors."""
        try:
            return handler(data)
        except ValidationError as error:
            fields: dict[Any, list[Any]] = {}
            for item in error.errors():
                fields.setdefault(item["loc"][:1] or item["msg"], []).append(item)
            told = [_told(items, data) for items in fields.values()]
            raise ValidationError.from_exception_data(cls.__name__, told, hide_input=True) from None


def with_overrides(fields: Any, overrides: Sequence[str]) -> Any:
    """Fields with ``overrides`` such as ``"tp=4"`` or ``"ddp.static_graph=true"`` over them, as an OmegaConf node."""
    if isinstance(overrides, str) or not isinstance(overrides, Sequence):
        raise ValueError(f"overrides={shown(overrides)}: write a list, such as ['tp=4']")
    try:
        merged = fields if OmegaConf.is_config(fields) else OmegaConf.create(fields)
    except Exception as error:  # of OmegaConf and its grammar
        raise ValueError(f"the parallel config can't be read: {cause_of(error)}; write plain values") from None
    for override in overrides:
        if not isinstance(override, str) or "=" not in override:
            raise ValueError(f"override {shown(override)}: write it as field=value, such as 'tp=4'")
        try:
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([override]))
        except Exception as error:  # of YAML, or of OmegaConf and its grammar
            raise ValueError(
                f"override {shown(override)}: {cause_of(error)}; write it as field=value, such as 'tp=4'"
            ) from None
    return merged


class CheckpointConfig(FrozenModel):
    """How checkpoints are written."""

    format: Literal["single", "sharded"] = "single"
    """``single``: one ordinary ``.ckpt`` that plain Lightning loads; ``sharded``: a folder, a part per rank."""
    async_save: bool = False
    """Write while training goes on, from a copy in the CPU's memory; ``sharded`` alone."""

    @model_validator(mode="after")
    def only_folders_are_written_meanwhile(self) -> CheckpointConfig:
        if self.async_save and self.format != "sharded":
            raise broken(
                f"checkpoint.async_save=True with format={self.format!r}: one file is assembled by one rank while all wait; "
                "use checkpoint={'format': 'sharded', 'async_save': True}"
            )
        return self


class PlanSpec(FrozenModel):
    """A plan written in the config: rules on top of a base."""

    base: str = "auto"
    """``auto``, ``none``, a family's name or the path of a YAML file; the rules are merged over it."""
    rules: tuple[dict[str, Any], ...] = ()
    """Rules as :class:`lightning_seqpar.ShardingPlan` reads them; a later rule wins."""


class ParallelConfig(FrozenModel):
    """The whole configuration of :class:`lightning_seqpar.SeqParallelStrategy`.

    Raises:
        pydantic.ValidationError: for an unknown key or a value outside its rule; the message names the field,
            the value, the rule and the fix.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("virtual_pp", "pp_split_rank", "loss_chunk", "tile_mlp")

    layout: Literal["given", "auto"] = "given"
    """``auto`` chooses ``tp``, ``cp``, ``pp``, ``data_parallel`` and ``recompute`` at the start, by the devices, their memory and
    the model; a field of these that is not the default stays as it is."""
    tp: int = 1
    """Tensor-parallel size: over how many ranks each linear is split."""
    sp: bool = True
    """Sequence parallelism over the tensor-parallel group (arXiv 2205.05198); idle at ``tp=1``."""
    dp: Literal["auto"] | int = "auto"
    """Data-parallel size; ``auto`` takes what the world leaves, a number is checked against it."""
    cp: int = 1
    """Context-parallel size: over how many ranks each sequence is dealt out."""
    cp_method: Literal["auto", "ring", "ulysses", "all_gather"] = "auto"
    """How attention is computed across the context-parallel ranks: ``ulysses`` (each rank some heads), ``ring`` (keys and values
    travel), ``all_gather`` (each rank all keys and values), or ``auto``, the first of them that fits."""
    pp: int = 1
    """Pipeline-parallel size: over how many ranks the blocks are dealt out, as stages. Micro-batches are the batches of
    ``accumulate_grad_batches``."""
    pp_layers: list[int] | None = None
    """How many blocks each stage has, or each chunk in the model's order; none for stages that cost alike."""
    virtual_pp: int | None = None
    """How many chunks of blocks each stage has (interleaving), or none for one: less waiting, and more is sent."""
    pp_split_rank: int | None = None
    """First pipeline rank of the decoder in an encoder-decoder model, or none for stages that cost alike."""
    order: str = "pp-dp-cp-tp"
    """The axes, outermost first; ranks along the last one are adjacent."""
    plan: str | PlanSpec = "auto"
    """``auto``, a family's name, the path of a YAML file, or ``{base: ..., rules: [...]}``."""
    data_parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """What synchronises the data-parallel replicas: ``ddp``; ``fsdp`` (torch's ``fully_shard`` for each block), where each
    replica holds its rows of parameters, gradients and moments alone; or ``hsdp``, where every ``shard_size`` neighbours share
    them out, and gradients are summed over such groups."""
    ddp: dict[str, Any] = Field(default_factory=dict)
    """Options passed on to ``DistributedDataParallel``."""
    fsdp: dict[str, Any] = Field(default_factory=dict)
    """Options of ``fsdp`` and ``hsdp``: ``reshard_after_forward``, ``mp_policy`` and ``offload_policy`` of ``fully_shard``,
    ``units``, patterns of the modules that are gathered each on its own, in place of the blocks, and of ``hsdp`` the
    ``shard_size``."""
    recompute: Literal["none", "activations", "selective", "full"] = "none"
    """What runs again in the backward instead of being kept: ``full``, each block, of which only the input is kept;
    ``activations``, norms and what lies between the columns and the row of an MLP; ``selective``, these and the attention in each
    block; ``none``. Gradients are the same to the last bit."""
    offload: Literal["none", "activations"] = "none"
    """Where what the blocks keep for the backward lies meanwhile: ``activations``, on the CPU, from which it comes back a block
    ahead; beside ``recompute: full`` the inputs of the blocks. What ``recompute: activations`` would make again is kept then."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Compute the products of the linears in the blocks in float8 by that recipe of torchao's, and gather what they read in 8
    bits; heads, embeddings, norms and attention stay in the precision of the trainer."""
    regather: bool = True
    """Keep the shard of what is gathered for column linears, and gather it again in the backward; false keeps it whole, which
    spares a slow network two of six all-gathers."""
    vocab: bool = True
    """Shard embeddings and heads over a vocabulary, and the loss on their logits, over the tensor-parallel ranks, wherever they
    are found and a plan that you write whole does not say otherwise."""
    loss_chunk: int | None = None
    """Tokens of which the head and the loss make logits at once; the backward makes them once more. With ``tp`` the head must be
    sharded by vocabulary, as it is by default. None makes all at once."""
    tile_mlp: int | None = None
    """Tokens of which the MLP of a block computes at a time; the backward computes each such tile once more, so that what an MLP
    needs does not grow with the sequence. None computes all at once."""
    compile: bool = False
    """Compile each block by ``torch.compile`` after it was sharded, one graph for each kind of block."""
    compile_options: dict[str, Any] = Field(default_factory=dict)
    """Options passed on to ``torch.compile``: ``backend``, ``mode``, ``options``, ``dynamic``."""
    self_check: bool = True
    """Check the plan before training, on a copy, whole against sharded."""
    check_every: int = 0
    """Repeat the run-time checks every so many steps, besides steps 1 to 16 and 32, 64, 128, ..."""
    elementwise_optimizers: list[str] = Field(default_factory=list)
    """Classes of optimizers of yours that update each element by itself, as import paths (in Python also the classes); each is
    tried on small tensors, whole and in halves, before training."""
    whole_matrix_optimizers: list[str] = Field(default_factory=list)
    """Classes of optimizers of yours that update each parameter by itself and need the whole of it (Muon, LAMB), as
    import paths (in Python also the classes); each is tried on small tensors, together and alone, before training."""
    broadcast_batch: bool = False
    """One rank of each replica reads the batches and sends them to the others: for iterable data sets that give each
    process other samples, dealt out by ``strategy.dp_rank`` and ``dp_size``. Off, every rank reads for itself and
    checksums are compared."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Form of the checkpoints: ``single``, one file, or ``sharded``, a folder;
    ``async_save`` writes the folder while training goes on."""
    process_group_backend: str | None = Field(default=None, min_length=1)
    """Backend of the process groups; none means gloo, and on CUDA nccl with gloo beside it for what lies on the CPU."""
    timeout: Seconds = timedelta(seconds=1800)
    """How long a collective may wait for its peers, in seconds or as a timedelta."""
    fp8_groups: bool = False
    """With ``float8``, let scales be of all replicas' batches (amax over tp × dp × cp) instead of one replica's."""
    gloo_twins: bool = False
    """Make a gloo group beside each group of axes, for objects and for threads of their own."""

    @field_validator(
        "tp", "cp", "pp", "dp", "virtual_pp", "check_every", "pp_split_rank", "loss_chunk", "tile_mlp", mode="before"
    )
    @classmethod
    def numbers_are_whole(cls, value: Any, info: ValidationInfo) -> Any:
        if (info.field_name == "dp" and isinstance(value, str) and value == "auto") or (
            value is None and info.field_name in cls._OPTIONAL
        ):
            return value
        whole: int | None = None
        if isinstance(value, int):
            whole = None if isinstance(value, bool) else int(value)
        elif re.fullmatch(r"-?\d{1,20}(\.0)?", str(value)):
            whole = int(str(value).removesuffix(".0"))
        if whole is None or abs(whole) > LARGEST_NUMBER:
            also = " or 'auto'" if info.field_name == "dp" else " or null" if info.field_name in cls._OPTIONAL else ""
            limit = "" if whole is None else f", {LARGEST_NUMBER} at most"
            counted = "tokens" if info.field_name in ("loss_chunk", "tile_mlp") else "ranks or steps"
            raise broken(f"{info.field_name}={shown(value)}: it counts {counted}; write a whole number{also}{limit}")
        return whole

    @field_validator("tp", "cp", "pp", "dp", "virtual_pp", "check_every", "loss_chunk", "tile_mlp")
    @classmethod
    def numbers_are_large_enough(cls, value: int | str | None, info: ValidationInfo) -> int | str | None:
        if not isinstance(value, int) or value >= (0 if info.field_name == "check_every" else 1):
            return value
        fix = f"a size must be 1 or more; leave it out for {'1' if info.field_name != 'dp' else repr('auto')}"
        if info.field_name == "check_every":
            fix = "write 0 for the default schedule or a number of steps"
        elif info.field_name in ("loss_chunk", "tile_mlp"):
            fix = "write a number of tokens, such as 1024, or leave it out"
        raise broken(f"{info.field_name}={value}: {fix}")

    @field_validator("order", mode="before")
    @classmethod
    def order_names_every_axis_once(cls, value: Any) -> Any:
        if not isinstance(value, str) or sorted(value.split("-")) != sorted(AXES):
            raise broken(
                f"order={shown(value)}: it must name {', '.join(AXES)} once each, joined by '-', outermost first; "
                f"for example {'-'.join(AXES)!r}"
            )
        return value

    @field_validator("timeout", mode="before")
    @classmethod
    def timeout_is_positive(cls, value: Any) -> Any:
        try:
            # 0:30:00 or 1 day, 0:30:00, as saved configurations show a timedelta
            given = TypeAdapter(timedelta).validate_python(value) if ":" in str(value) else value
            seconds = given.total_seconds() if isinstance(given, timedelta) else float(given)
        except (TypeError, ValueError, ArithmeticError, RuntimeError):
            raise broken(
                f"timeout={shown(value)}: write a number of seconds, such as 600, or hours:minutes:seconds, such as 0:10:00"
            ) from None
        if not 1e-6 <= seconds < 1e9 or isinstance(value, bool):
            raise broken(f"timeout={shown(value)}: a collective needs a positive number of seconds, such as 600")
        return timedelta(seconds=seconds)

    @field_validator("plan", mode="before")
    @classmethod
    def plan_is_a_name_or_rules(cls, value: Any) -> Any:
        if not isinstance(value, str | Mapping | list | tuple | PlanSpec) or value == "":
            raise broken(f"plan={shown(value)}: write 'auto', a family's name, the path of a YAML file, or rules")
        if isinstance(value, list | tuple):
            value = {"rules": value}
        if isinstance(value, str | PlanSpec):
            return value
        try:
            return PlanSpec(**{str(key): part for key, part in value.items()})
        except ValidationError as error:
            raise broken("; ".join(item["msg"] for item in error.errors())) from None

    @field_validator("elementwise_optimizers", "whole_matrix_optimizers", mode="before")
    @classmethod
    def optimizers_are_classes_or_their_paths(cls, value: Any, info: ValidationInfo) -> Any:
        given = value if isinstance(value, list | tuple) else [value]
        named = [f"{one.__module__}.{one.__qualname__}" if isinstance(one, type) else one for one in given]
        if not all(isinstance(one, str) and "." in one for one in named):
            raise broken(
                f"{info.field_name}={shown(value)}: write a list of import paths, such as ['lion_pytorch.Lion'] (in Python "
                "the classes themselves, too)"
            )
        return named

    @model_validator(mode="after")
    def split_rank_needs_a_pipeline(self) -> ParallelConfig:
        if self.pp_split_rank is not None and not 0 < self.pp_split_rank < self.pp:
            raise broken(
                f"pp_split_rank={self.pp_split_rank}: the decoder's first rank must lie inside the pipeline, "
                f"between 1 and pp - 1 = {self.pp - 1}; set pp to 2 or more, or leave pp_split_rank out"
            )
        return self

    @field_validator("pp_layers", mode="before")
    @classmethod
    def layers_are_numbers(cls, value: Any) -> Any:
        if value is None:
            return None
        numbers = value if isinstance(value, list | tuple) else [value]
        fit = [isinstance(one, int) and not isinstance(one, bool) and 1 <= one <= LARGEST_NUMBER for one in numbers]
        if not all(fit) or not numbers:
            raise broken(
                f"pp_layers={shown(value)}: it says how many blocks each stage has; write a list of whole numbers, each at least "
                "1, such as [9, 9, 8, 6], or leave it out"
            )
        return [*numbers]

    @model_validator(mode="after")
    def each_stage_has_its_layers(self) -> ParallelConfig:
        chunks = self.pp * (self.virtual_pp or 1)
        if self.pp_layers is not None and len(self.pp_layers) != chunks:
            each = "stage" if chunks == self.pp else "chunk, in the model's order,"
            virtual = "" if chunks == self.pp else f", virtual_pp={self.virtual_pp}"
            raise broken(
                f"pp_layers={shown(self.pp_layers)} with pp={self.pp}{virtual}: it says of each {each} how many blocks it has; "
                f"write {chunks} number{'s' * (chunks > 1)}, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def a_shard_size_belongs_to_hsdp(self) -> ParallelConfig:
        size = self.fsdp.get("shard_size")
        if (self.data_parallel == "hsdp") != (size is not None):
            raise broken(
                f"fsdp={shown(self.fsdp)} with data_parallel={self.data_parallel!r}: hsdp, and it alone, needs the number of "
                "replicas that share out parameters, such as data_parallel: hsdp with fsdp: {shard_size: 8}"
            )
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or not 1 < size <= LARGEST_NUMBER):
            raise broken(f"fsdp={{shard_size: {shown(size)}}}: it counts replicas; write a whole number, 2 or more")
        return self

    @property
    def smallest_world(self) -> int:
        """The smallest number of ranks that the configuration fits."""
        shares = self.shares(1)
        replicas = self.dp if isinstance(self.dp, int) else shares // math.gcd(shares, self.cp)
        return self.tp * self.cp * self.pp * replicas

    def shares(self, replicas: int) -> int:
        """How many of the replicas (dp × cp) share out each parameter; 1 where each holds all of it."""
        return {"ddp": 1, "fsdp": replicas}.get(self.data_parallel) or int(self.fsdp["shard_size"])

    @model_validator(mode="after")
    def compiled_blocks_are_not_offloaded(self) -> ParallelConfig:
        if self.offload != "none" and self.compile:
            raise broken(
                f"offload={self.offload!r} with compile=True: a compiled block decides by itself what it keeps; use one of them"
            )
        return self

    @model_validator(mode="after")
    def float8_goes_alone(self) -> ParallelConfig:
        if self.fp8_groups and self.float8 == "none":
            raise broken("fp8_groups=True with float8='none': it says of what scales are; set float8, or leave fp8_groups out")
        if self.float8 != "none" and self.compile:
            raise broken(
                f"float8={self.float8!r} with compile=True: what is gathered in 8 bits is no operation of a graph; use one of them"
            )
        if self.float8 != "none" and self.tile_mlp is not None:
            raise broken(
                f"float8={self.float8!r} with tile_mlp={self.tile_mlp}: scales would be those of a tile's tokens, and numbers "
                "others with each size of tiles; use one of them"
            )
        return self

    @model_validator(mode="after")
    def options_of_a_compiler_need_one(self) -> ParallelConfig:
        if self.compile_options and not self.compile:
            raise broken(
                f"compile_options={shown(self.compile_options)} with compile=False: nothing is compiled; set compile to true, or "
                "leave compile_options out"
            )
        return self

    @model_validator(mode="after")
    def a_context_method_needs_context_ranks(self) -> ParallelConfig:
        if self.cp_method != "auto" and self.cp == 1:
            raise broken(
                f"cp_method={self.cp_method!r} with cp=1: it says how attention is computed across context-parallel ranks, and "
                "there are none; set cp to 2 or more, or leave cp_method out"
            )
        return self

    @model_validator(mode="after")
    def virtual_stages_need_a_pipeline(self) -> ParallelConfig:
        if self.virtual_pp is not None and self.virtual_pp > 1 and self.pp == 1:
            raise broken(
                f"virtual_pp={self.virtual_pp} with pp=1: virtual stages interleave the stages of a pipeline; set pp to 2 "
                "or more, or leave virtual_pp out"
            )
        return self

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> ParallelConfig:
        """Read a YAML file (OmegaConf: interpolations work), then apply ``overrides`` such as ``"tp=4"``.

        Raises:
            ValueError: if the file does not exist or is not a mapping.
        """
        name = f"config file {shown(str(path))}"
        text = read_text(path, name)
        if text is None:
            raise ValueError(f"{name} does not exist; give the path of a YAML file")
        try:
            loaded: Any = OmegaConf.load(io.StringIO(text))
        except yaml.YAMLError as error:
            raise ValueError(f"{name} is not YAML: {shortened(error)}") from None
        except Exception as error:  # of OmegaConf, or of a tag: KeyError for '!!bool x'
            raise ValueError(f"{name} can't be read: {cause_of(error)}; write plain values, such as 'tp: 2'") from None
        if not isinstance(loaded, DictConfig):
            raise ValueError(f"{name} must hold a mapping such as 'tp: 2', not a list or a word")
        return cls.from_omegaconf(with_overrides(loaded, overrides))

    @classmethod
    def from_omegaconf(cls, cfg: Any) -> ParallelConfig:
        """Build from an OmegaConf node or a plain mapping; interpolations are resolved, ``_target_`` is dropped.

        Raises:
            ValueError: for something that is no mapping, or an interpolation that leads nowhere.
        """
        plain = cfg
        try:
            if OmegaConf.is_config(cfg):
                plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        except Exception as error:  # of OmegaConf, of its grammar, or of a resolver
            raise ValueError(f"the parallel config can't be resolved: {cause_of(error)}") from None
        if not isinstance(plain, Mapping):
            file = f"; read a file with ParallelConfig.from_yaml({shown(plain)})" if isinstance(plain, str) else ""
            raise ValueError(f"a parallel config must be a mapping such as {{'tp': 2}}, got {shown(plain)}{file}")
        for wrapper in ("strategy", "trainer", "init_args", "class_path"):
            if wrapper in plain:
                raise ValueError(
                    f"{wrapper!r} stands in the parallel config, which holds the fields themselves (tp: 2, sp: true); pass what "
                    f"stands below {'init_args' if wrapper == 'class_path' else wrapper}"
                )
        return cls(**{str(key): value for key, value in plain.items() if key not in ("_target_", "_convert_")})

    def to_yaml(self) -> str:
        """The configuration as YAML that :meth:`from_yaml` reads back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of a YAML file with these fields, for editors; Hydra's ``_target_`` may stand in it."""
        schema = cls.model_json_schema()
        properties = schema["properties"]
        counted = [properties["dp"]["anyOf"][1], *(properties[name]["anyOf"][0] for name in ("loss_chunk", "tile_mlp"))]
        for entry in (*(properties[name] for name in ("tp", "cp", "pp")), *counted):
            entry["minimum"] = 1
        properties["check_every"]["minimum"] = 0
        properties["order"]["enum"] = ["-".join(axes) for axes in itertools.permutations(AXES)]
        properties["timeout"] = {
            "description": properties["timeout"]["description"],
            "type": "number",
            "exclusiveMinimum": 0,
            "default": ParallelConfig().timeout.total_seconds(),
            "title": "Timeout",
        }
        properties["plan"]["anyOf"].append({"type": "array", "items": {"type": "object"}})
        built = "What Hydra builds: lightning_seqpar.SeqParallelStrategy."
        properties["_target_"] = {"type": "string", "description": built}
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
