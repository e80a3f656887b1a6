"""The sequence region: where activations are shards along the sequence, how they enter, travel and leave.

The data path, its calls and random streams, and the observers that check what the user's code does with shards.
May import: ``user_input`` to ``context``.
"""
