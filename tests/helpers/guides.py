"""The blocks of code in the documentation: where they stand, what they need, and how one is run on ranks."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.processes import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_BLOCK = re.compile(r"^(?:<!-- not run: (?P<why>.+?) -->\n+)?```(?P<kind>\w*)\n(?P<code>.*?)^```$", re.M | re.S)

GIVEN = """
import lightning as L
import torch
import torch.distributed as dist
from lightning import Fabric, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM
from lightning_seqpar import ParallelConfig, SeqParallelStrategy, weights_from
from tests.helpers.models import GPT, loader as _loader

class MyModule(GPT):
    def on_train_start(self):
        self.trainer.fit_loop.max_epochs = 1  # fragments set no end

MyLightningModule = MyModule
loader = datamodule = _loader(4, count=8)
folder, config = "llama-folder", None
"""
"""What the text around a fragment takes for granted."""


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: the file's path in the repository.
        line: of its first line.
        kind: ``python``, ``yaml``, or nothing.
        code: its text.
        why: why it is not run; empty if it is.
    """

    page: str
    line: int
    kind: str
    code: str
    why: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def needs(self) -> set[str]:
        """Names that the block uses and does not make."""
        made, used = {*dir(builtins)}, set()
        for node in ast.walk(ast.parse(self.code)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                made |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                made.add(node.name)
            elif isinstance(node, ast.arg):
                made.add(node.arg)
            elif isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        return used - made

    @property
    def is_script(self) -> bool:
        """Whether it is a whole file, which trains."""
        return not self.needs and "def main():" in self.code

    @property
    def fits(self) -> bool:
        """Whether it trains: it needs ranks."""
        return ".fit(" in self.code


def blocks(kind: str) -> list[Block]:
    """All blocks of a kind."""
    return [
        Block(
            str(page.relative_to(ROOT)), text[: one.start("code")].count("\n") + 1, one["kind"], one["code"], one["why"] or ""
        )
        for page in PAGES
        for text in [page.read_text()]
        for one in _BLOCK.finditer(text)
        if one["kind"] == kind
    ]


def calls(code: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every call of a class of ours with keywords: its name, and those arguments that are written out."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "SeqParallelStrategy",
            "ParallelConfig",
        ):
            found = {}
            for keyword in node.keywords:
                try:
                    value = ast.literal_eval(keyword.value)
                except ValueError:  # a name, or a call
                    value = ...
                found[str(keyword.arg)] = ... if "Ellipsis" in repr(value) else value
            yield ast.unparse(node.func), found


def execute(code: str, folder: str, given: str = GIVEN) -> None:
    """Run a block in a folder, as a module of its own there; a script's ``main`` is called."""
    os.chdir(folder)
    file = Path(folder) / "block.py"
    file.write_text(given + code)
    spec = importlib.util.spec_from_file_location("block", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["block"] = module
    spec.loader.exec_module(module)
    if hasattr(module, "main"):
        module.main()
