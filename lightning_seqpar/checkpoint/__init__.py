"""Checkpoints of the whole model, from and to shards: one file, or a folder with a part from each rank.

What is written is canonical: original names, global shapes, any topology.
May import: ``user_input`` to ``init``.
"""
