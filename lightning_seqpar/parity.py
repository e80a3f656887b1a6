"""Dense against sharded, under its public path."""

from lightning_seqpar.verify.comparison import ParityReport, Row, norm_of
from lightning_seqpar.verify.parity import ParityRecorder, Trace, compare, gather_grads, gather_weights

__all__ = ["ParityRecorder", "ParityReport", "Row", "Trace", "compare", "gather_grads", "gather_weights", "norm_of"]
