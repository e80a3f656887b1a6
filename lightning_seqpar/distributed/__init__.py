"""What ranks do together, for any model: collectives, random streams, counts of what is sent and kept, comparing ranks.

Private calls of torch live here, in ``autograd``; what is special to the gloo backend in ``gloo``.
May import: ``user_input`` to ``topology``.
"""
