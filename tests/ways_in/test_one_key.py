"""A model has one key in every process, so that a proof is found again."""

from __future__ import annotations

import os
import subprocess
import sys

ELSEWHERE = """
import collections, enum, functools, logging, pathlib, types
import numpy as np
import torch
from omegaconf import OmegaConf
from torchmetrics import MeanMetric
from lightning_seqpar.config import ParallelConfig
from lightning_seqpar.verify.proof_cache import fingerprint
from tests.helpers import families
from tests.helpers.fit import quiet_trainer

Colour = enum.Enum("Colour", "RED BLUE")

def scaled(by):
    return lambda x: x * by if x not in {"a", "b", "c"} else None

def held():
    return [
        {"a", "b", Colour.RED, 1.5}, collections.deque([1]), OmegaConf.create({"a": [1]}), logging.getLogger("a"), scaled(2),
        types.SimpleNamespace(a=object), functools.partial(scaled, 1), np.arange(3), torch.Generator(), pathlib.Path("a"),
        MeanMetric(), Colour.RED, range(3), [].append, torch.relu, functools.lru_cache(scaled),
    ]

for family in ("gpt2", "llama", "t5", "mixtral"):
    model = families.HuggingFace(family)
    model.held = held()
    print(fingerprint(model, quiet_trainer(), ParallelConfig(tp=2), {"tp": 2}, None))
"""


def test_keys_are_the_same_in_every_process():
    def run(seed: str) -> str:
        space = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", ELSEWHERE]
        return subprocess.run(command, env=space, capture_output=True, text=True, check=True).stdout

    first = run("1")
    assert first.count("unread=''") == 4, first
    assert first == run("2")
