"""Which layout fits: memory and seconds of a step, predicted for each layout of a model on given machines.

They are made of one step that runs without memory, by the code that trains.
May import: ``user_input`` to ``verify``.
"""
