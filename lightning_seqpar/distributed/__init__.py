"""What ranks do together, for any model: collectives, random streams, what is sent and kept, what ranks were told.

Private calls of torch live here, in ``autograd``; what is special to the gloo backend in ``gloo``.
May import: ``config``, ``topology``.
"""
