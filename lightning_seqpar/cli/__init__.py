"""The command line: ``seqpar`` and ``python -m lightning_seqpar``.

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's; the others are ours.
May import: everything.
"""
