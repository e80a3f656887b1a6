"""Tests that train through ``Trainer.fit``: parity with one process, checkpoints, data, and what is refused on the way."""
