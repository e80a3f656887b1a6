"""What is kept of activations for the backward, and how the rest is made again.

Norms, dropout, element-wise code and gathered inputs; and weight-gradient products that run under collectives.
May import: ``user_input`` to ``context``.
"""
