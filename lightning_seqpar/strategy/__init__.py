"""Lightning's side: the strategy, its environment, steps, checkpoints, and the processes that it starts.

Glue alone: what it calls lives in the packages to its left.
May import: ``user_input`` to ``sizing``.
"""
