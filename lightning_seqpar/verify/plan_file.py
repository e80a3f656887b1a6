"""A file with the rules of a plan that was found, for whoever wants to read or keep it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_seqpar.plan.sharding_plan import ShardingPlan


def write_plan(plans: Sequence[ShardingPlan], text: str) -> str:
    """Write the rules of plans into a file of the XDG cache that ``plan=FILE`` reads, behind a text: its path, if any."""
    rules = "".join(plan.to_yaml().partition("\n")[2] for plan in plans)
    content = "".join(f"# {line}\n" for line in text.splitlines()) + "rules:\n" + rules
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(cache) if cache else Path.home() / ".cache") / "lightning_seqpar" / "plans"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{hashlib.sha256(rules.encode()).hexdigest()[:12]}.yaml"
        file.write_text(content)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return ""
    return str(file)
