"""Protocols called in this process: planning calls them in two of their own, which takes longer than all else of it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from flexrlhf.placement import protocols


def _run_here(module: str, task: dict[str, Any], name: str, number: int = 1) -> list[Any]:
    return [protocols._called(task)] * number


SPLITTING_HERE = patch.object(protocols, "run_apart", _run_here)
"""Decorator and context; tests/unit/test_protocols.py has protocols called apart, and so has every run."""
