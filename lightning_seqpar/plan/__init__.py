"""Sharding plans: data that says which style holds for which module, shipped for families of models or written by hand.

Nothing here changes a model; ``parallel`` reads a plan on a model and carries it out.
May import: ``user_input`` to ``styles``.
"""
