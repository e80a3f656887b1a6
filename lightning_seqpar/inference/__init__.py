"""Finding a plan for a model that nobody wrote one for, by what it computes.

One recorded forward of a harmless copy, then the blocks, the linears, and which features belong together.
May import: ``user_input`` to ``data``.
"""
