"""What is known of machines: presets as data (``machines.yaml``), their parsing, and what is asked for on a command line."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from lightning_seqpar.config import FrozenModel
from lightning_seqpar.user_input import cause_of, nearest, read_text, shown

PRESETS = Path(__file__).with_name("machines.yaml")

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Latency(FrozenModel):
    """Seconds of a collective beside its bytes."""

    in_node: float = Field(ge=0)
    network: float = Field(ge=0)


class Machine(FrozenModel):
    """One accelerator, its links and what it reaches of both; all per second, in bytes and flops."""

    memory: float = Field(gt=0)
    """Bytes of one device."""
    flops: dict[str, float]
    """Of dense products, by type."""
    bandwidth: float = Field(gt=0)
    """Of its memory."""
    in_node: float = Field(gt=0)
    """Of one device to the others of its node, one direction."""
    network: float = Field(gt=0)
    """Of one device to other nodes, one direction."""
    per_node: int = Field(ge=1)
    """Devices of a node."""
    efficiency: list[tuple[float, float]] = Field(min_length=1)
    """Share of ``flops`` that a product reaches, by its flops."""
    attention: float = Field(gt=0, le=1)
    """Share that fused attentions reach."""
    bandwidth_share: float = Field(gt=0, le=1)
    """Share of ``bandwidth`` that other operations reach."""
    host: float = Field(ge=0)
    """Seconds of the host for an operation."""
    latency: Latency
    overlap: dict[str, float] = Field(default_factory=dict)
    """Share of the seconds on each axis that computing hides, where there is as much to compute."""
    reserved: float = Field(ge=0)
    """Bytes that no tensor gets: the context's, and the collectives' buffers."""
    sources: list[str] = Field(default_factory=list)
    """Where the figures come from."""

    @property
    def usable(self) -> float:
        """Bytes for tensors; an allocator loses 4 % in pieces that fit nothing."""
        return 0.96 * (self.memory - self.reserved)

    def product_seconds(self, flops: float, moved: float, dtype: str, is_attention: bool) -> float:
        """Seconds of one product, by its operations or by its bytes, whatever takes longer."""
        peak = self.flops.get(dtype) or self.flops["float32"]
        share = self.attention if is_attention else self._share(flops)
        return max(flops / (peak * share), moved / (self.bandwidth * self.bandwidth_share))

    def _share(self, flops: float) -> float:
        rows = self.efficiency
        if flops <= rows[0][0]:
            return rows[0][1]
        for (low, below), (high, above) in pairwise(rows):
            if flops <= high:
                part = math.log(flops / low) / math.log(high / low)
                return below + part * (above - below)
        return rows[-1][1]


class Cluster(FrozenModel):
    """So many devices of one kind."""

    devices: int = Field(ge=1)
    machine: Machine
    name: str = ""

    @property
    def kind(self) -> str:
        """``cpu``, where updates make few tensors and losses run in pieces that fit a cache, or ``cuda``."""
        return "cpu" if self.name.upper().startswith("CPU") else "cuda"

    @property
    def shown(self) -> str:
        """As text: ``64x H100 in 8 nodes``."""
        nodes = -(-self.devices // self.machine.per_node)
        return f"{self.devices}x {self.name or 'GPU'}" + (f" in {nodes} nodes" if nodes > 1 else "")


def presets() -> dict[str, Machine]:
    """The known machines by name."""
    return _machines(PRESETS.read_text(), str(PRESETS))


def machines_in(file: str | Path) -> dict[str, Machine]:
    """The machines of a YAML file, as ``seqpar plan --calibrate`` writes one; raises ValueError for a file that is none."""
    text = read_text(file, str(file))
    if text is None:
        raise ValueError(f"machines file {shown(str(file))} does not exist; seqpar plan --calibrate FILE writes one")
    return _machines(text, str(file))


def _machines(text: str, name: str) -> dict[str, Machine]:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {cause_of(error)}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{name} must hold machines by name, with memory, flops, bandwidth and so on")
    found = {}
    for key, fields in data.items():
        if key == "shares":
            continue
        try:
            found[str(key)] = Machine(**fields)
        except (TypeError, ValidationError) as error:
            raise ValueError(f"{name}: {key}: {cause_of(error)}") from None
    return found


def cluster(asked: str, known: dict[str, Machine] | None = None, **changes: Any) -> Cluster:
    """Reads ``8x H100`` or a number of devices; ``changes`` replace fields of the machine.

    Raises:
        ValueError: for a text of another form, an unknown machine, or a machine that is not fully described.
    """
    known = presets() if known is None else known
    match = re.fullmatch(r"\s*(\d{1,7})\s*(?:[x×]?\s*([\w.+-]+))?\s*", asked)
    if match is None or int(match[1]) < 1:
        raise ValueError(f"fit={shown(asked)}: write how many devices of which kind, such as '8x H100' ({', '.join(known)})")
    devices, name = int(match[1]), match[2]
    changes = {key: value for key, value in changes.items() if value is not None}
    if name is None:
        name = "H100" if known.get("H100") else next(iter(known))
        missing = [field for field in ("memory", "flops", "in_node", "network") if field not in changes]
        if missing:
            raise ValueError(
                f"fit={shown(asked)}: it names no kind of device; write '{devices}x {name}', or say "
                f"{', '.join(f'--{_OPTION.get(one, one)}' for one in missing)}, too"
            )
        shown_name = ""
    else:
        found = next((key for key in known if key.lower() == name.lower()), None)
        if found is None:
            raise ValueError(f"fit={shown(asked)}: {name!r} is no known machine; did you mean {nearest(name, list(known))}?")
        name = shown_name = found
    machine = known[name]
    if "flops" in changes:
        changes["flops"] = {**machine.flops, "bfloat16": changes["flops"], "float16": changes["flops"]}
    fields = {**machine.model_dump(), **changes}
    if fields["memory"] <= fields["reserved"]:
        raise ValueError(
            f"memory={fields['memory'] / 2**30:.3g} GiB: it is less than what a process takes beside its tensors "
            f"({fields['reserved'] / 2**30:.3g} GiB); give more"
        )
    try:
        return Cluster(devices=devices, machine=Machine(**fields), name=shown_name)
    except ValidationError as error:
        raise ValueError(f"fit={shown(asked)}: {cause_of(error)}") from None


_OPTION = {"in_node": "nvlink"}


def quantity(text: str, what: str) -> float:
    """Reads ``80GiB``, ``800T`` or ``450G``; raises ValueError, which names the option ``what``, for another text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kKmMgGtTpP]?(?:i?B)?)\s*", text)
    unit = match[2].upper() if match else ""
    scale = _UNITS.get(unit, _UNITS.get(unit.removesuffix("B")))
    if match is None or scale is None or float(match[1]) <= 0:
        raise ValueError(f"{what}={shown(text)}: write a number with a unit, such as 80GiB, 800T or 450G")
    return float(match[1]) * scale
