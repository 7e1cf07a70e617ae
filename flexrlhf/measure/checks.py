"""Results of checks, and their table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from flexrlhf.text import table

Result = Literal["ok", "warning", "FAILS", "skipped"]
MOST_PARTS = 4
"""Hosts or ranks that a line shows."""
_WORST: tuple[Result, ...] = ("FAILS", "warning", "ok", "skipped")


@dataclass(frozen=True)
class Check:
    """One line of a preflight.

    name:    what is checked
    result:  ``FAILS`` where a run would end early or give other numbers, ``warning`` where it may
    seen:    values that were measured
    advice:  what to do; empty where all is well
    """

    name: str
    result: Result
    seen: str
    advice: str = ""


def united(name: str, parts: Iterable[Check]) -> Check:
    """Return the checks of several hosts or runs as one line: the worst result, with what was seen where."""
    found = list(parts)
    worst = min((part.result for part in found), key=_WORST.index)
    shown = [part for part in found if part.result == worst]
    return Check(name, worst, _joined(part.seen for part in shown), _joined(part.advice for part in shown))


def failed(checks: Iterable[Check]) -> list[str]:
    """Return the names of the checks that fail."""
    return [check.name for check in checks if check.result == "FAILS"]


def format_checks(checks: Sequence[Check]) -> str:
    """Return a table with a line for each check."""
    return "\n".join(table([(each.name, each.result, _last_cell(each)) for each in checks], "<<<"))


def closing_line(checks: Sequence[Check]) -> str:
    """Return how many checks there were, and which of them fail or warn."""
    names = {result: [check.name for check in checks if check.result == result] for result in _WORST}
    if names["FAILS"]:
        return f"{len(names['FAILS'])} of {len(checks)} checks failed: {', '.join(names['FAILS'])}"
    warned = f", with warnings: {', '.join(names['warning'])}" if names["warning"] else ""
    return f"{len(checks) - len(names['skipped'])} checks passed{warned}"


def _last_cell(check: Check) -> str:
    return " -> ".join(filter(None, (check.seen, check.advice)))


def _joined(texts: Iterable[str]) -> str:
    """Return distinct texts with semicolons, at most the first few of many."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    more = [f"{len(distinct) - MOST_PARTS} more"] if len(distinct) > MOST_PARTS else []
    return "; ".join([*distinct[:MOST_PARTS], *more])
