"""Trial runs: a model that trains in one process and on several, by any strategy of Lightning's, and what differs in words.

May import: ``config`` to ``strategy``.
"""
