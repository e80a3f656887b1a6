"""Trial runs: a model that trains in one process and on several, by any strategy of Lightning's, and what differs in words.

What users call are ``verify_parity`` and, in tests, ``assert_parity`` and ``run_distributed``.
May import: ``user_input`` to ``strategy``.
"""
