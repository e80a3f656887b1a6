"""What a step keeps and what it sends, measured: under its public path."""

from lightning_seqpar.distributed.counters import SavedBytes, StepMeter, Traffic

__all__ = ["SavedBytes", "StepMeter", "Traffic"]
