"""Models that never were whole on one rank: initialisation on the meta device replayed, weights read in slices from files.

Also finding the model that a command line names.
May import: ``user_input`` to ``inference``.
"""
