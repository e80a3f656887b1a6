"""Which cases the suite runs, and which are left to ``make parity`` and ``make matrix``."""

from __future__ import annotations

from typing import Any

import pytest


def rest(*values: Any, **more: Any) -> Any:
    """A case that shows little beside those that the suite runs."""
    return pytest.param(*values, marks=pytest.mark.matrix, **more)
