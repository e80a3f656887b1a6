"""The rules of a plan: a pattern over module names, and a style with its options, each option validated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from lightning_seqpar.config import FrozenModel, nearest
from lightning_seqpar.layout.module_names import Argument


class Rule(FrozenModel):
    """What a pattern's modules become. Subclasses are the styles."""

    pattern: str
    """Module name with ``*`` for one name or index and ``{a,b}`` for alternatives; ``""`` is the root."""
    style: str

    @field_validator("pattern")
    @classmethod
    def pattern_is_well_formed(cls, value: str) -> str:
        if value and (".." in value or value.startswith(".") or value.endswith(".") or "**" in value):
            raise ValueError(
                f"pattern={value!r}: write names joined by single dots, '*' for one name, '{{a,b}}' for alternatives"
            )
        if value.count("{") != value.count("}"):
            raise ValueError(f"pattern={value!r}: a brace is not closed; write alternatives as '{{a,b}}'")
        return value

    def dump(self) -> dict[str, Any]:
        """The rule as plain data, defaults left out."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        return {"pattern": self.pattern, "style": self.style, **data}


class BlocksRule(Rule):
    """The repeated blocks: their path is the sequence region."""

    style: Literal["blocks"] = "blocks"
    dim: Literal[0, 1] = 1
    """Where the sequence is: 1 for ``[b, s, h]``, 0 for ``[s, b, h]`` or flattened tokens."""
    sp: bool = True
    """Off, these blocks see whole sequences even where the strategy has ``sp=True``: for a block whose own forward reads
    the sequence length."""


class ScatterRule(Rule):
    """Which argument of the blocks carries the activation into the region (default: the first)."""

    style: Literal["scatter"] = "scatter"
    arg: Argument = 0


class ExitRule(Rule):
    """The region ends at this module's output (default: at the last block's)."""

    style: Literal["exit"] = "exit"
    blocks: str | None = None
    """Pattern of the blocks whose region ends, where one module runs several stacks."""


def _each_once(value: tuple[Argument, ...], what: str) -> tuple[Argument, ...]:
    if not value or len(set(value)) != len(value):
        raise ValueError(f"args={list(value)}: name each argument to {what} once, by position or keyword")
    return value


class GatherRule(Rule):
    """Arguments gathered along the sequence where this module is entered."""

    style: Literal["gather"] = "gather"
    args: tuple[Argument, ...] = (0,)
    local_width: bool = False
    """The module sees a stand-in as wide as this rank's part, and its columns the gathered activation: for a forward that
    takes its head size from its input's last dim (``B, T, C = x.shape``)."""

    @field_validator("args")
    @classmethod
    def args_are_named_once(cls, value: tuple[Argument, ...]) -> tuple[Argument, ...]:
        return _each_once(value, "gather")


class CopyRule(Rule):
    """Arguments that are whole already where this module reads them, such as encoder states; their gradient is summed."""

    style: Literal["copy"] = "copy"
    args: tuple[Argument, ...] = (0,)

    @field_validator("args")
    @classmethod
    def args_are_named_once(cls, value: tuple[Argument, ...]) -> tuple[Argument, ...]:
        return _each_once(value, "copy")


class WholeRule(Rule):
    """A module inside the blocks that every rank computes whole: inputs gathered, output sliced again.

    For what mixes positions and can't be dealt out: attention with head counts written into it, a convolution.
    """

    style: Literal["whole"] = "whole"
    args: tuple[Argument, ...] = (0,)

    @field_validator("args")
    @classmethod
    def args_are_named_once(cls, value: tuple[Argument, ...]) -> tuple[Argument, ...]:
        return _each_once(value, "whole")


class LocalHeadsRule(Rule):
    """A parameter, a buffer or a module's arguments with a head or feature dim: each rank takes its part of it."""

    style: Literal["local_heads"] = "local_heads"
    dim: int = 0
    """The tensor dim of the heads; negative counts from the last."""
    args: tuple[Argument, ...] | None = None
    """Arguments of the module that the pattern names; none if it names a parameter or a buffer."""

    @field_validator("args")
    @classmethod
    def args_are_named_once(cls, value: tuple[Argument, ...] | None) -> tuple[Argument, ...] | None:
        return None if value is None else _each_once(value, "slice")


class FullWidthRule(Rule):
    """A norm over the whole sharded width: features gathered, the norm as it is, this rank's features again."""

    style: Literal["full_width"] = "full_width"


class ColumnRule(Rule):
    """Out-features sharded, of a linear or of a parameter that its module multiplies itself (einsum, stacked experts)."""

    style: Literal["column"] = "column"
    dim: int | None = None
    """For a parameter: the dim of its out-features; by default the last but one, as in ``[experts, out, in]``."""
    segments: int | tuple[int | str, ...] = 1
    """Parts of a fused projection: how many equal ones, their names, or their sizes. Named parts with units of their own are as
    long as these are many: ``segments: [q, k, v], units: [n_head, n_kv, n_kv]``."""
    units: int | str | tuple[int | str, ...] | None = None
    """Whole units (heads) in each part: a number, or an attribute of the module or the nearest one around it; a list
    gives each part its own. A part with fewer units than ranks is shared: tp must be a multiple of them then."""

    @field_validator("segments")
    @classmethod
    def segments_are_of_one_kind(cls, value: int | tuple[int | str, ...]) -> int | tuple[int | str, ...]:
        kinds = {type(part) for part in value} if isinstance(value, tuple) else set()
        if value in (0, ()) or (isinstance(value, int) and value < 0) or len(kinds) > 1:
            raise ValueError(
                f"segments={value!r}: write a number of equal parts (3), their names ([q, k, v]) or their sizes"
            )
        return value


class RowRule(Rule):
    """In-features sharded. A parameter's partial sums are reduced where its module returns."""

    style: Literal["row"] = "row"
    dim: int | None = None
    """For a parameter: the dim of its in-features; by default the last, as in ``[experts, out, in]``."""
    units: int | str | None = None
    """As for a column."""


class ReduceRule(Rule):
    """The rows inside this module leave partial sums, which are reduced where it returns: once for many experts."""

    style: Literal["reduce"] = "reduce"


class OnceRule(Rule):
    """A parameter that its module adds to partial sums, such as an output bias: the first rank alone adds it."""

    style: Literal["once"] = "once"


class VocabRule(Rule):
    """An embedding or a head outside the blocks, sharded by vocabulary; tied ones together."""

    style: Literal["vocab"] = "vocab"


class SetRule(Rule):
    """Attributes of the module instance that change under tensor parallelism."""

    style: Literal["set"] = "set"
    divide: tuple[str, ...] = ()
    """Attributes divided by tp, such as a head count. ``config.num_heads`` gives the module a view of its config, in which
    the number is divided; the config itself, which others share, stays as it is."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Attributes given a fixed value."""
    ratio: dict[str, tuple[str | int, str | int]] = Field(default_factory=dict)
    """Attributes that are a ratio of two counts: ``{num_key_value_groups: [num_heads, num_key_value_heads]}``. Where
    there are fewer kv heads than ranks, each rank has one of them."""


class ReplaceRule(Rule):
    """A module whose forward bypasses its submodules, replaced by an equal one.

    ``nn.MultiheadAttention``, and ``nn.TransformerEncoder``, which may pack its input past the layers.
    """

    style: Literal["replace"] = "replace"


STYLES: dict[str, type[Rule]] = {
    "blocks": BlocksRule,
    "scatter": ScatterRule,
    "exit": ExitRule,
    "gather": GatherRule,
    "copy": CopyRule,
    "whole": WholeRule,
    "local_heads": LocalHeadsRule,
    "full_width": FullWidthRule,
    "column": ColumnRule,
    "row": RowRule,
    "reduce": ReduceRule,
    "once": OnceRule,
    "vocab": VocabRule,
    "set": SetRule,
    "replace": ReplaceRule,
}


def parse_rule(data: Any) -> Rule:
    """One rule from plain data.

    Raises:
        ValueError: for a missing or unknown style, or a wrong option; the message shows the rule.
    """
    if isinstance(data, Rule):
        return data
    if not isinstance(data, Mapping) or "style" not in data or "pattern" not in data:
        raise ValueError(
            f"plan rule {data!r}: a rule is a mapping with at least 'pattern' and 'style', such as "
            "{pattern: layers.*, style: blocks}"
        )
    style = data["style"]
    if style not in STYLES:
        raise ValueError(
            f"plan rule {dict(data)}: no style {style!r}; did you mean {nearest(str(style), list(STYLES))}?"
        )
    try:
        return STYLES[style](**data)
    except ValidationError as error:
        causes = "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in error.errors())
        raise ValueError(f"plan rule {dict(data)}: {causes}") from None


# ---- families --------------------------------------------------------------------------------------------------
