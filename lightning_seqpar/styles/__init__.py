"""The styles of a plan's rules, one class each: the options it takes, what it checks, lays out, changes and hooks.

``style`` says what each of them answers; ``plan.sharding_plan`` finds them by name.
May import: ``user_input`` to ``nn``.
"""
