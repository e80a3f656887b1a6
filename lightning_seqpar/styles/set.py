"""``set``: attributes of a module that change under tensor parallelism, such as a head count."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lightning_seqpar.layout.attribute_override import read_attribute, write_attribute
from lightning_seqpar.styles.style import Application, PlannedModel, Rule


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

    accumulates: ClassVar[bool] = True

    def check(self, name: str, plan: PlannedModel) -> None:
        """The module has the attributes; those that are divided are multiples of tp, and ratios are what the counts say."""
        module = plan.modules[name]
        for attribute in (*self.divide, *self.values, *self.ratio):
            try:
                read_attribute(module, attribute)
            except AttributeError:
                raise ValueError(f"{name}: 'set' names {attribute!r}, which {type(module).__name__} does not have") from None
        for attribute in self.divide:
            value = read_attribute(module, attribute)
            if not isinstance(value, int) or value % plan.size:
                raise ValueError(f"{name}.{attribute} is {value!r} and can't be divided by tp={plan.size}")
        for attribute in self.ratio:
            self._local_ratio(attribute, name, plan)

    def _local_ratio(self, attribute: str, name: str, plan: PlannedModel) -> int:
        """What an attribute that is a ratio of two counts becomes on a rank, where the smaller count may be shared."""
        above, below = self.ratio[attribute]
        over, under = (n if isinstance(n, int) else plan.number_at(name, n) for n in (above, below))
        value = read_attribute(plan.modules[name], attribute)
        if value != over // under:
            raise ValueError(f"{name}.{attribute} is {value}, not {above} / {below} ({over} / {under})")
        return max(1, over // plan.size) // max(1, under // plan.size)

    def apply(self, name: str, application: Application) -> None:
        """The instance gets its own values."""
        module, plan = application.module(name), application.plan
        ratios = {each: self._local_ratio(each, name, plan) for each in self.ratio}  # of the whole counts
        for attribute in self.divide:
            write_attribute(module, attribute, read_attribute(module, attribute) // plan.size)
        for attribute, value in (self.values | ratios).items():
            write_attribute(module, attribute, value)
