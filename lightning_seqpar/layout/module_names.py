"""Names of modules: patterns that match them, and which module is inside which."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

Argument = int | str
"""An argument of a call: its position or its name."""


def inside(name: str, parent: str) -> bool:
    """Whether a module is the module ``parent`` or inside it; the empty name is the model's."""
    return parent == "" or name == parent or name.startswith(parent + ".")


def outwards(name: str) -> Iterator[str]:
    """A name, and the names of the modules around it but for the model's, from the innermost."""
    while name:
        yield name
        name = name.rpartition(".")[0]


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


def why_no_pattern(pattern: str) -> str | None:
    """Why a text is no pattern, or one over which the search could take for ever; None if it can be matched."""
    if pattern and (".." in pattern or pattern.startswith(".") or pattern.endswith(".") or "**" in pattern):
        return "write names joined by single dots, '*' for one name, '{a,b}' for alternatives"
    groups = [(0, 1)]  # around, and in each open brace: ways of the complete alternatives, and of the current one
    for at, char in enumerate(pattern):
        done, current = groups[-1]
        if char == "{":
            groups.append((0, 1))
        elif char == "," and len(groups) > 1:
            groups[-1] = (done + current, 1)
        elif char == "}":
            groups.pop()
            if not groups:
                return "a brace is closed that is not open; write alternatives as '{a,b}'"
            groups[-1] = (groups[-1][0], groups[-1][1] * (done + current))
        elif char == "*" and pattern[at + 1 : at + 2] not in ("", "."):
            groups[-1] = (done, current * 10)
        if len(groups) > 10 or groups[-1][1] > 100_000:
            return "it can be matched in too many ways; write fewer '*' and '{a,b}' in it, or several rules"
    return None if len(groups) == 1 else "a brace is not closed; write alternatives as '{a,b}'"


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
