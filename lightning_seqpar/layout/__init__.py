"""Where a parameter lies: which indices of which dim a rank holds, and over which axes its gradient is summed.

Also how modules keep their weights: linears of any class, adapters, attributes that change under tensor parallelism.
May import: ``user_input`` to ``distributed``.
"""
