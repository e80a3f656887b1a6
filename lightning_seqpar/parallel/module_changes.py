"""What applying a plan changed of modules, recorded by comparing them before and after, so that it can be taken back.

No style lists what it changes: a module's class and its own attributes are compared as a whole. Parameters and buffers are
cut in place and made whole again from their layouts; hooks are removed by their handles. A property that stores its value
outside the module is the one thing that this can't see: ``apply`` notes the values of those that a plan sets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ModuleChange:
    """How one module differs from what the user wrote."""

    module: nn.Module
    own: type  # its class in the user's model
    other: type  # its class now
    added: frozenset[str]  # attributes that it did not have
    replaced: dict[str, Any]  # what attributes that it has had were before
    counts: dict[str, tuple[int, int]]  # whole numbers (features, heads) that differ: before, now

    def undo(self) -> None:
        """Give the module its own class and attributes back; what others have set since stays."""
        self.module.__class__ = self.own
        own = vars(self.module)
        for name in self.added:
            own.pop(name, None)
        own.update(self.replaced)


class ModuleSnapshot:
    """A module's class and attributes as they are when this is made."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._kind, self._attributes = module, type(module), dict(vars(module))

    def change(self) -> ModuleChange | None:
        """What is different now; none if nothing is."""
        before, now = self._attributes, vars(self._module)
        added = frozenset(now.keys() - before.keys())
        replaced = {name: value for name, value in before.items() if name in now and now[name] is not value}
        if type(self._module) is self._kind and not added and not replaced:
            return None
        counts = {
            name: (value, now[name])
            for name, value in replaced.items()
            if type(value) is int and type(now[name]) is int and value != now[name]
        }
        return ModuleChange(self._module, self._kind, type(self._module), added, replaced, counts)


def changes_since(snapshots: Iterable[ModuleSnapshot]) -> list[ModuleChange]:
    """Every module that differs from its snapshot."""
    return [change for snapshot in snapshots if (change := snapshot.change()) is not None]
