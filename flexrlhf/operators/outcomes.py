"""Outcomes of rows: each row that is taken from the data is trained on, or left out for one reason.

Taken = trained + filtered + not counted + in flight, at every step. Filtered: left out by the algorithm's choice among
responses; not counted: for any other reason. In flight: generated, and not yet due for training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexrlhf.metrics import EPISODE_FAILURES, FILTERED, NOT_COUNTED


def failed_state(kind: str) -> str:
    """Return the state of an episode that failed. ``kind``: of the failure, such as ``crash`` or ``load timeout``."""
    name = "load" if kind == "start" else kind.partition(" ")[0]
    return f"failed: {name}" if name in EPISODE_FAILURES else "failed"


TRAINED, FROZEN, LEFT_OUT = "trained", "frozen", "left_out"
OUTCOMES = (TRAINED, *FILTERED, *NOT_COUNTED)
CODES = {name: code for code, name in enumerate(OUTCOMES)}
"""Outcome → its number in the column ``outcome``; 0: to be trained on."""
_STATES = ("going on", "ended", "last turn", "no room", *map(failed_state, ("", *EPISODE_FAILURES)))
EPISODE_STATES = {name: code for code, name in enumerate(_STATES)}
"""State of an episode → its number in the column ``episode``. One that has ended did so by its environment, after its
last turn, since no room was left for a turn, or since its environment failed."""
FAILED = EPISODE_STATES[failed_state("")]
"""The first state of episodes that failed; later ones have the kind of failure."""
IN_FLIGHT = "in_flight"
CARRIED = "carried"
"""In place of an outcome: rows that the next step goes on with (``rollout.segment_tokens``), a part of those in flight.
"""
ALL_TAKEN = "taken"
"""In place of an outcome: all rows that dynamic sampling has taken, with those in flight."""
UNRECORDED = "unrecorded"
"""In place of an outcome: rows of steps before a checkpoint of an older version."""


def row_metric(outcome: str) -> str:
    """Return the name of the metric that counts the rows of ``outcome``, or the rows in flight."""
    return f"rows_{outcome}"


def account(rows: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Return the number of rows by outcome over all ``rows`` of metrics, and of those in flight after the last one.

    Outcomes without rows are left out; empty for a run of an older version.
    """
    counts = {name: sum(int(row.get(row_metric(name), 0)) for row in rows) for name in OUTCOMES}
    counts[IN_FLIGHT] = int(rows[-1].get(row_metric(IN_FLIGHT), 0)) if rows else 0
    return {name: count for name, count in counts.items() if count}


def account_text(counts: Mapping[str, int]) -> str:
    """Return ``64 taken = 40 trained + 16 filtered (16 alike) + 8 in flight``."""
    terms = [f"{counts.get(TRAINED, 0):,} trained"]
    for kind, names in (("filtered", FILTERED), ("not counted", NOT_COUNTED)):
        found = [f"{counts[name]:,} {name.replace('_', ' ')}" for name in names if name in counts]
        if found:
            terms.append(f"{sum(counts.get(name, 0) for name in names):,} {kind} ({', '.join(found)})")
    if IN_FLIGHT in counts:
        terms.append(f"{counts[IN_FLIGHT]:,} in flight")
    return f"{sum(counts.values()):,} taken = {' + '.join(terms)}"
