"""Predicts the memory and the step time of a model at a layout on given machines, and searches the layouts for the best.

May import: ``user_input`` to ``verify``.
"""
