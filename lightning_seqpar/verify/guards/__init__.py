"""What can't be done right is refused with a sentence that names the value, the rule and the fix.

One module for each thing that is looked at: configuration, callbacks, optimizers, batches, the graph of a loss, the model. What
can be known before training is a ``ValueError``, what a step shows a ``RuntimeError``, on every rank that is asked.
May import: ``config`` to ``checkpoint``.
"""
