"""Proof and refusal: sharded compared with whole, before and during training, and what is refused with a sentence.

``parity`` is the one engine that compares; ``describe`` tells what a plan would do; ``trial`` trains on one rank and several.
May import: ``user_input`` to ``checkpoint``.
"""
