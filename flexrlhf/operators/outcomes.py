"""Rows of a run by outcome: each row that is taken from the data is trained on, or left out for one reason.

Taken = trained + filtered + not counted + in flight, at every step. In flight: generated, and not yet due for training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from flexrlhf.metrics import EPISODE_FAILURES, Outcome


class EpisodeState:
    """State of an episode: its name, and its number in the column ``episode``.

    One that has ended did so by its environment, after its last turn, since no room was left for a turn, or since its
    environment failed.
    """

    @staticmethod
    def of_failure(kind: str) -> str:
        """Return the state after a failure of ``kind``, such as ``crash`` or ``load timeout``."""
        name = "load" if kind == "start" else kind.partition(" ")[0]
        return f"failed: {name}" if name in EPISODE_FAILURES else "failed"

    NUMBERS: ClassVar[Mapping[str, int]] = {
        name: number
        for number, name in enumerate(
            ("going on", "ended", "last turn", "no room", *map(of_failure, ("", *EPISODE_FAILURES)))
        )
    }
    """Name → number."""
    FAILED: ClassVar[int] = NUMBERS["failed"]
    """The first number of episodes that failed; later ones have the kind of failure."""


@dataclass(frozen=True)
class RowAccount:
    """Rows of a run by outcome, and those in flight.

    counts:  number of rows by outcome; outcomes without rows are left out
    """

    IN_FLIGHT: ClassVar[str] = "in_flight"
    METRICS: ClassVar[Mapping[str, str]] = {name: f"rows_{name}" for name in (*Outcome, "in_flight")}
    """Outcome, or in flight → the metric that counts its rows."""

    counts: Mapping[str, int]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, float]]) -> Self:
        """Return the account of all ``rows`` of metrics: the rows in flight are those after the last one.

        It is empty for a run of an older version.
        """
        counts = {str(name): sum(int(row.get(cls.METRICS[name], 0)) for row in rows) for name in Outcome}
        counts[cls.IN_FLIGHT] = int(rows[-1].get(cls.METRICS[cls.IN_FLIGHT], 0)) if rows else 0
        return cls({name: count for name, count in counts.items() if count})

    def __str__(self) -> str:
        """Return ``64 taken = 40 trained + 16 filtered (16 alike) + 8 in flight``."""
        counts = self.counts
        terms = [f"{counts.get(Outcome.TRAINED, 0):,} trained"]
        for kind in ("filtered", "not counted"):
            names = [name for name in Outcome if name.kind == kind and name in counts]
            if names:
                found = [f"{counts[name]:,} {name.replace('_', ' ')}" for name in names]
                terms.append(f"{sum(counts[name] for name in names):,} {kind} ({', '.join(found)})")
        if self.IN_FLIGHT in counts:
            terms.append(f"{counts[self.IN_FLIGHT]:,} in flight")
        return f"{sum(counts.values()):,} taken = {' + '.join(terms)}"
