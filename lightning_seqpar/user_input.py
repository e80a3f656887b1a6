"""What users write, read within limits and shown in messages: YAML files, values of fields, names that are not known.

Pure data, as ``config``: nothing here knows torch or the environment.
"""

from __future__ import annotations

import difflib
import itertools
import re
import reprlib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import yaml

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

MOST_CHARACTERS = 1_000_000
"""In a YAML text."""

MOST_VALUES = 50_000
"""In a YAML text or in the value of a field; what stands at several places is counted at each of them."""

MOST_INTERPOLATIONS = 1000
"""In the text of a configuration."""

MOST_LEVELS = 50
"""How deep lists and mappings may lie in one another, in a YAML text or in the value of a field."""

MOST_BITS = 640
"""Of a whole number that is shown, or taken: Python writes none of more than some thousand digits."""


class _Short(reprlib.Repr):
    """``repr`` that ends early: few parts of each container, few levels of them, and both ends of what is long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 5
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 12
        self.maxstring = self.maxother = self.maxlong = 200

    def repr1(self, x: Any, level: int) -> str:
        """The type of a part that can't be shown."""
        try:
            return super().repr1(x, level)
        except Exception:  # of the part's own, such as an interpolation that leads nowhere
            return f"<{type(x).__name__}>"

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        """In the mapping's own order."""
        if level <= 0:
            return "{...}"
        parts = [
            f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}"
            for key, value in itertools.islice(x.items(), self.maxdict)
        ]
        return f"{{{', '.join(parts)}{', ...' * (len(x) > self.maxdict)}}}"

    def repr_int(self, x: int, level: int) -> str:
        """In words, where Python would write none of its digits."""
        return f"<a number of {x.bit_length()} bits>" if x.bit_length() > MOST_BITS else super().repr_int(x, level)

    def repr_instance(self, x: Any, level: int) -> str:
        """Mappings and lists of other libraries as ours."""
        if isinstance(x, Mapping):
            return self.repr_dict(x, level)
        return self.repr_list([*x], level) if isinstance(x, list | tuple) else super().repr_instance(x, level)


_SHORT = _Short()


def shown(value: object, most: int = 200) -> str:
    """What a message shows of a value: its ``repr``, of which the middle is left out where it has more than ``most`` characters.

    It ends early and raises nothing, whatever the value is.
    """
    return shortened(_SHORT.repr(value), most)


def shortened(text: object, most: int = 1000) -> str:
    """A text of at most ``most`` characters: both ends of a longer one."""
    whole = str(text)
    end = (most - 5) // 2
    return whole if len(whole) <= most else f"{whole[: most - 5 - end]} ... {whole[-end:]}"


def why_unreadable(value: object) -> str | None:
    """Why a value is not looked at: it is nested too deeply (or holds itself), or holds too much; None if it can be read."""
    left, parts = MOST_VALUES, [(value, 0)]
    try:
        while parts:
            one, level = parts.pop()
            if isinstance(one, int) and one.bit_length() > MOST_BITS:
                return "it holds a number of more digits than anything has; write a smaller one"
            if isinstance(one, str | bytes | bytearray | memoryview) or not isinstance(one, Mapping | Sequence | Set):
                continue
            if len(one) > left:
                return f"it holds more than {MOST_VALUES:,} values; write what is needed alone"
            if one and level >= MOST_LEVELS:
                return f"it is nested deeper than {MOST_LEVELS} levels; write a flat one"
            left -= len(one)
            parts += [(part, level + 1) for part in one]
            parts += [(part, level + 1) for part in one.values()] if isinstance(one, Mapping) else []
    except Exception as error:  # of a container that is no plain one, such as OmegaConf's with an interpolation in it
        return f"it can't be read ({shortened(' '.join(str(error).split()), 300)}); write a plain value"
    return None


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
    names, room = [repr(name) for name in found or known], 800
    fitting = [name for name in names if (room := room - len(name) - 2) >= 0]
    return ", ".join(fitting or [shortened(names[0], 200)] if names else []) + ", ..." * (len(fitting) < len(names))


def cause_of(error: Exception) -> str:
    """What an error of a library says, in one line that is not too long."""
    return shortened(" ".join(f"{error if str(error) else type(error).__name__}".split()), 600)


def name_error(error: BaseException) -> str:
    """An error in one line: its type, and what it says, of which both ends are shown."""
    return shortened(" ".join(f"{type(error).__name__}: {error}".split()), 400).removesuffix(":")


def read_text(path: str | Path, name: str) -> str | None:
    """The text of a file that a user names; None if there is no such file.

    Args:
        path: its path.
        name: how messages call it.

    Raises:
        ValueError: if it can't be read, is too large, or is not in UTF-8.
    """
    try:
        file = Path(path)
        if not file.is_file():
            return None
        if file.stat().st_size > 4 * MOST_CHARACTERS:
            raise ValueError(
                f"{name} has {file.stat().st_size:,} bytes; give a file of {MOST_CHARACTERS:,} characters at most"
            )
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no text: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except PermissionError:
        raise ValueError(f"{name} can't be opened: it must be readable for you") from None
    except (OSError, TypeError):  # a path that is too long, or none
        return None


def check_yaml(text: str) -> None:
    """See that a YAML text is read at once: it is not too long, not nested too deeply, and has no aliases that make it so.

    Raises:
        yaml.YAMLError: if not, or if it is not YAML.
    """
    if len(text) > MOST_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text):,} characters; write {MOST_CHARACTERS:,} at most")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise yaml.YAMLError(
            f"its character {error.start} is none of Unicode's; write it in quotes, as \\x.. or \\u...."
        ) from None
    named: dict[str | None, int] = {}  # values that an anchor stands for; too many, while what it names is not complete
    inside: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append((event.anchor, 1))
            named[event.anchor], values = MOST_VALUES + 1, 0
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values = inside.pop()
            named[anchor] = values
        elif isinstance(event, yaml.AliasEvent):
            values = named.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            values = named[event.anchor] = 1
        else:  # where a document begins and ends
            continue
        inside[-1] = (inside[-1][0], inside[-1][1] + values)
        if len(inside) > MOST_LEVELS or inside[-1][1] > MOST_VALUES:
            raise yaml.YAMLError(
                f"it must hold {MOST_VALUES:,} values at most, each alias counted as what it stands for, nested in "
                f"{MOST_LEVELS} levels at most"
            )


def check_config_text(text: str) -> None:
    """:func:`check_yaml` for a text that OmegaConf reads: interpolations take it a millisecond each."""
    check_yaml(text)
    if text.count("${") > MOST_INTERPOLATIONS:
        raise yaml.YAMLError(f"it has more than {MOST_INTERPOLATIONS:,} interpolations; write values instead")


def check_interpolations(raw: Any) -> None:
    """Raise ValueError if interpolations of interpolations would make more than a text may have.

    Args:
        raw: plain data in which nothing is resolved.
    """
    texts: dict[str, list[str]] = {}  # what stands at or below a key of this name, wherever it is
    parts: list[tuple[tuple[str, ...], Any]] = [((), raw)]
    while parts:
        path, part = parts.pop()
        if isinstance(part, Mapping | list):
            inner = part.items() if isinstance(part, Mapping) else enumerate(part)
            parts += [((*path, str(key)), value) for key, value in inner]
        else:
            for key in set(path):
                texts.setdefault(key, []).append(str(part))
    sizes: dict[str, int] = {}

    def size(key: str) -> int:
        if key not in sizes:
            sizes[key] = 0  # in a circle, of which OmegaConf tells
            words = [word for text in texts[key] if "${" in text for word in re.findall(r"\w+", text) if word in texts]
            sizes[key] = sum(map(len, texts[key])) + sum(map(size, words))
        return sizes[key]

    if any(size(key) > MOST_CHARACTERS for key in texts):
        raise ValueError(f"interpolations make more than {MOST_CHARACTERS:,} characters; write values instead")
