"""The tensor-parallel layers: linears, attention, embedding, head and loss, each made in place from the user's module.

Every class has a table of its shapes: global, local, saved for the backward.
May import: ``user_input`` to ``region``.
"""
