"""Batches: their tensors, whatever holds them, the order of samples, and batches that one rank reads for its replica.

Tensor-parallel ranks of one replica read the same batch, replicas different ones.
May import: ``user_input`` to ``parallel``.
"""
