"""The command line: ``seqpar`` and ``python -m lightning_seqpar``.

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's; the others are ours.
May import: everything.
"""

from typing import TYPE_CHECKING, Any

from lightning_seqpar.cli.main import main

if TYPE_CHECKING:
    from lightning_seqpar.cli.training import SeqParallelCLI, SeqParallelParser

__all__ = ["SeqParallelCLI", "SeqParallelParser", "main"]


def __getattr__(name: str) -> Any:
    """The classes for a command line of one's own, which load Lightning."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_seqpar.cli import training

    return getattr(training, name)
