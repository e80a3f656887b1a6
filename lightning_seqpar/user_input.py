"""What users write, as messages show it: values of fields, names that are not known, files.

Pure data, as ``config``: nothing here knows torch or the environment.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

SYNONYMS = {
    "tensor_parallel": "tp",
    "tensor_parallel_size": "tp",
    "tensor_model_parallel_size": "tp",
    "tp_size": "tp",
    "sequence_parallel": "sp",
    "data_parallel_size": "dp",
    "dp_size": "dp",
    "context_parallel": "cp",
    "context_parallel_size": "cp",
    "sequence_parallel_size": "cp",
    "pipeline_parallel": "pp",
    "pipeline_parallel_size": "pp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "virtual_pp",
    "pipeline_model_parallel_split_rank": "pp_split_rank",
    "axes": "order",
    "tp_plan": "plan",
    "parallelize_plan": "plan",
    "activation_checkpointing": "recompute",
    "gradient_checkpointing": "recompute",
    "backend": "process_group_backend",
    "use_fp8": "fp8_groups",
}
"""What other systems call the fields of :class:`~lightning_seqpar.config.ParallelConfig`."""

LARGEST_NUMBER = 2**31 - 1
"""Of ranks, layers, tokens and steps; torch counts ranks in 32 bits."""


def shown(value: object, most: int = 200) -> str:
    """What a message shows of a value: its ``repr``, of which the middle is left out where it has more than ``most`` characters."""
    return shortened(repr(value), most)


def shortened(text: object, most: int = 1000) -> str:
    """A text of at most ``most`` characters: both ends of a longer one."""
    whole = str(text)
    end = (most - 5) // 2
    return whole if len(whole) <= most else f"{whole[: most - 5 - end]} ... {whole[-end:]}"


def sizes_that_divide(axis: str, count: int) -> str:
    """What to write for an axis so that it divides ``count`` units: ``use tp=2, 4 or 8``."""
    works = [str(size) for size in range(2, count + 1) if count % size == 0]
    if not works:
        return f"use {axis}=1"
    shown = [*works[:7], "..."] if len(works) > 8 else works[:-1]
    return f"use {axis}={' or '.join(part for part in (', '.join(shown), works[-1]) if part)}"


def nearest(word: str, known: Sequence[str], count: int = 3) -> str:
    """Up to ``count`` of the ``known`` names that look most like ``word``, or the first of all, as text for a message."""
    if SYNONYMS.get(word) in known:
        return repr(SYNONYMS[word])
    if word.lower() in known:
        return repr(word.lower())
    found = difflib.get_close_matches(word[:200], known, n=count, cutoff=0.4)
    return shortened(", ".join(map(repr, found or known)), 800)


def cause_of(error: Exception) -> str:
    """What an error of a library says, in one line that is not too long."""
    return shortened(" ".join(f"{error if str(error) else type(error).__name__}".split()), 600)


def name_error(error: BaseException) -> str:
    """An error in one line: its type, and what it says, of which both ends are shown."""
    return shortened(" ".join(f"{type(error).__name__}: {error}".split()), 400).removesuffix(":")


def read_text(path: str | Path, name: str) -> str | None:
    """Reads a file that a user names; None if there is no such file.

    Raises:
        ValueError: if it can't be read, or is not in UTF-8; the message calls it ``name``.
    """
    try:
        file = Path(path)
        if not file.is_file():
            return None
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no text: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except PermissionError:
        raise ValueError(f"{name} can't be opened: it must be readable for you") from None
    except (OSError, TypeError):  # a path that is too long, or none
        return None
