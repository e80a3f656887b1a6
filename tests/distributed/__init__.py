"""Tests of what ranks do together, on several processes that :func:`lightning_seqpar.testing.run_distributed` starts."""
