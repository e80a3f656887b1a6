"""Names of modules: patterns that match them, and which module is inside which."""

from __future__ import annotations

import re

from torch import nn

Argument = int | str
"""An argument of a call: its position or its name."""


def inside(name: str, parent: str) -> bool:
    """Whether a module is the module ``parent`` or inside it; the empty name is the model's."""
    return parent == "" or name == parent or name.startswith(parent + ".")


def in_all_layers(name: str) -> str:
    """A pattern for what has this name in any layer: ``h.*.attn`` for ``h.0.attn``.

    Only the number in front of a name counts layers: one at the end, as in ``h.*.mlp.2``, tells apart what is not alike.
    """
    return re.sub(r"(?<![^.])\d+(?=\.[^.\d])", "*", name)


def likely_blocks(model: nn.Module) -> list[str]:
    """Patterns of what may be a model's repeated blocks: modules of one class in a list, with modules of their own inside."""
    found: list[str] = []
    for name, module in model.named_modules():
        listed = [*module.children()] if isinstance(module, nn.ModuleList | nn.Sequential) else []
        are_blocks = len({type(one) for one in listed}) == 1 and all(any(one.children()) for one in listed)
        if are_blocks and not any(inside(name, outer) for outer in found):
            found.append(name)
    return [f"{name}.*" if name else "*" for name in found]


def match_pattern(pattern: str, name: str) -> bool:
    """Whether a pattern matches a module's full name."""
    return compile_pattern(pattern).fullmatch(name) is not None


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern over full names as a regular expression: ``*`` is one name or index, ``{a,b}`` alternatives."""
    out, depth = "", 0
    for char in pattern:
        if char == "{":
            out, depth = out + "(?:", depth + 1
        elif char == "}":
            out, depth = out + ")", depth - 1
        elif char == "," and depth:
            out += "|"
        else:
            out += "[^.]+" if char == "*" else re.escape(char)
    return re.compile(out)
