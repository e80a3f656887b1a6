"""What can't be done right is refused with a sentence that names the value, the rule and the fix.

What can be known before training is a ``ValueError``, what a step shows a ``RuntimeError``, on every rank that is asked.
"""
