"""Pipeline parallelism: each stage runs the user's own step from its first block to its last.

Where a model is cut, what travels between neighbouring stages, and which micro-batch's backward runs when.
May import: ``user_input`` to ``plan``.
"""
