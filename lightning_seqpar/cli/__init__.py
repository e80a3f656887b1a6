"""The command line: ``seqpar`` and ``python -m lightning_seqpar``.

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's; the others are ours.
May import: everything.
"""

from lightning_seqpar.cli.main import SeqParallelCLI, SeqParallelParser, main

__all__ = ["SeqParallelCLI", "SeqParallelParser", "main"]
