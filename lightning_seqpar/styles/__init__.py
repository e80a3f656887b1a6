"""The styles of a plan's rules, one class each: the options it takes, what it checks, lays out, changes and hooks.

``registry`` finds them by name; ``style`` says what each of them answers.
May import: ``user_input`` to ``nn``.
"""
