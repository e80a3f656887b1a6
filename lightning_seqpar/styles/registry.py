"""All styles by name, and rules from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lightning_seqpar.styles.blocks import BlocksRule, ExitRule, ScatterRule
from lightning_seqpar.styles.full_width import FullWidthRule
from lightning_seqpar.styles.gather import CopyRule, GatherRule
from lightning_seqpar.styles.linear import ColumnRule, RowRule
from lightning_seqpar.styles.local_heads import LocalHeadsRule
from lightning_seqpar.styles.reduce import OnceRule, ReduceRule
from lightning_seqpar.styles.replace import ReplaceRule
from lightning_seqpar.styles.set import SetRule
from lightning_seqpar.styles.style import Rule
from lightning_seqpar.styles.vocab import VocabRule
from lightning_seqpar.styles.whole import GradientRule, WholeRule
from lightning_seqpar.user_input import nearest, shortened, shown

STYLES: dict[str, type[Rule]] = {
    "blocks": BlocksRule,
    "scatter": ScatterRule,
    "exit": ExitRule,
    "whole": WholeRule,
    "replace": ReplaceRule,
    "column": ColumnRule,
    "row": RowRule,
    "gather": GatherRule,
    "copy": CopyRule,
    "reduce": ReduceRule,
    "once": OnceRule,
    "local_heads": LocalHeadsRule,
    "full_width": FullWidthRule,
    "gradient": GradientRule,
    "set": SetRule,
    "vocab": VocabRule,
}
"""The styles, in the order in which they are checked and applied. Of the forward hooks of one module, those of the first style here
are the outermost: what ``reduce`` sums is summed before ``gather`` lets go of what it gathered."""


def parse_rule(data: Any) -> Rule:
    """One rule from plain data; raises ValueError, which shows the rule, for what is none."""
    if isinstance(data, Rule):
        return data
    if not isinstance(data, Mapping) or "style" not in data or "pattern" not in data:
        raise ValueError(
            f"plan rule {shown(data)}: a rule is a mapping with at least 'pattern' and 'style', such as "
            "{pattern: layers.*, style: blocks}"
        )
    style = data["style"]
    if not all(isinstance(key, str) for key in (*data, style)):
        raise ValueError(
            f"plan rule {shown(data)}: options and style must be words, such as {{pattern: layers.*, style: blocks}}"
        )
    if style not in STYLES:
        near = nearest(style, list(STYLES))
        raise ValueError(f"plan rule {shown(dict(data))}: no style {shown(style)}; did you mean {near}?")
    try:
        return STYLES[style](**data)
    except ValidationError as error:
        causes = "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in error.errors())
        raise ValueError(f"plan rule {shown(dict(data))}: {shortened(causes)}") from None
