"""A plan carried out on a model: resolved, checked, applied, undone; and the gradients that ranks then share.

Start with ``resolve`` (plan and model to decisions) and ``apply`` (decisions to a changed model).
May import: ``user_input`` to ``pipeline``.
"""
