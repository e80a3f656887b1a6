"""The source of a class, and whether it comes with an installed package."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import sysconfig


def class_source(kind: type) -> str:
    """Returns the source of a class, as ``inspect.getsource`` gives it; raises OSError if there is none.

    That asks every loaded module for its file, at which a module that is imported lazily may raise whatever it likes.
    """
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    lines = linecache.getlines(file) if isinstance(file, str) else []
    node: ast.AST = ast.parse("".join(lines))
    for name in kind.__qualname__.split("."):
        if name == "<locals>":
            continue
        inner = [n for n in ast.walk(node) if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name]
        if not inner:
            raise OSError(f"no source of {kind.__qualname__}")
        node = inner[0]
    assert isinstance(node, ast.ClassDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "".join(inspect.getblock(lines[first - 1 :]))


def is_installed(kind: type) -> bool:
    """Whether a class comes with an installed package, whose code users do not change."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    paths = sysconfig.get_paths()
    return isinstance(file, str) and file.startswith(tuple(paths[name] for name in ("stdlib", "purelib", "platlib")))
