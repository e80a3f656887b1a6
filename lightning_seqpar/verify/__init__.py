"""Proof and refusal: sharded compared with whole, before and during training, and what is refused with a sentence.

``comparison`` is the one engine that compares; ``describe`` shows what a plan would do, ``trial`` trains on one process and on ranks.
May import: ``user_input`` to ``checkpoint``.
"""
