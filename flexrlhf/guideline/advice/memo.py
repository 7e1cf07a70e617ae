"""Results that are computed once for each key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Memo:
    """Results by key. Options of models share most of their costs."""

    results: dict[object, Any] = field(default_factory=dict)

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """Return the first result of ``make`` for ``key``."""
        value: T | None = self.results.get(key)
        if value is None:
            value = self.results[key] = make()
        return value
