"""What ``seqpar plan`` and ``seqpar verify`` have in common: the arguments that name a model and its configuration."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from lightning_seqpar.config import ParallelConfig, with_overrides
from lightning_seqpar.init.model_source import TargetModel, function_named


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a model, and those that say how it is to be parallel."""
    parser.add_argument(
        "target", help="YAML file with a model, Hugging Face folder (config.json is enough), or package.module:factory"
    )
    parser.add_argument("overrides", nargs="*", help="fields of ParallelConfig: tp=4 sp=false plan=my_plan.yaml")
    parser.add_argument("--config", metavar="FILE", help="YAML file of a ParallelConfig; the overrides come on top")


def config_of(given: argparse.Namespace, fields: Mapping[str, Any]) -> ParallelConfig:
    """The configuration that is asked for: the one of ``--config``, or else the target's, with the overrides on top.

    Args:
        given: the parsed arguments.
        fields: fields of :class:`~lightning_seqpar.config.ParallelConfig` that the target sets.

    Raises:
        ValueError: if the file, an override or what they make together is wrong.
    """
    if given.config:
        return ParallelConfig.from_yaml(given.config, given.overrides)
    return ParallelConfig.from_omegaconf(with_overrides(fields, given.overrides))


def batch_of(given: argparse.Namespace, target: TargetModel) -> Any:
    """The batch that ``--batch`` names, or what makes it; else that of the target, or None.

    Raises:
        ValueError: if nothing has that name.
    """
    return target.batch if given.batch is None else function_named(given.batch, "--batch")
