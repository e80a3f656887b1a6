"""Dense against sharded, under its public path."""

from lightning_seqpar.verify.parity import (
    ParityRecorder,
    ParityReport,
    Row,
    Trace,
    compare,
    gather_grads,
    gather_weights,
    norm_of,
)

__all__ = ["ParityRecorder", "ParityReport", "Row", "Trace", "compare", "gather_grads", "gather_weights", "norm_of"]
