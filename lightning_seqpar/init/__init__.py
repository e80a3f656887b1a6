"""Models that never were whole on one rank: initialisation replayed from meta, weights read in slices from files.

Also what a command line names as the model.
May import: ``config`` to ``inference``.
"""
