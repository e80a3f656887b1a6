"""What many tests' ranks would each import anew: the fork server imports this module once, and ranks are forks of it."""

from __future__ import annotations

import gc

import pytest  # noqa: F401
from transformers import AutoModel

import lightning_seqpar.strategy.strategy  # noqa: F401
from lightning_seqpar.plan.sharding_plan import load_families
from tests import write_families
from tests.helpers import fit, zoo  # noqa: F401

load_families()
for _, configs in write_families.FAMILIES.values():
    AutoModel._model_mapping[type(configs[-1])]  # imports the modelling code

# A collection in a rank would look at, and so copy, all that was imported here.
gc.collect()
gc.freeze()
