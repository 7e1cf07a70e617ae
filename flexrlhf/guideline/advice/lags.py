"""Larger lags of the placement that a search finds with a lag of 1, timed in steps whose rows vary in length.

With equal steps every lag from 1 on is equally fast, so a search has no use for them. What a larger one gains where
steps vary is taken from ``simulation/variants.py``, as a share of the time with a lag of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate, RejectedCandidate, check
from flexrlhf.guideline.advice.space import with_schedule
from flexrlhf.guideline.simulation.variants import Variants


def with_larger_lags(
    feasible: Sequence[FeasibleCandidate], most: int
) -> tuple[list[FeasibleCandidate], list[RejectedCandidate]]:
    """Return the placements with lags of more than 1 up to ``most`` that fit, and those that do not."""
    first = next((item for item in feasible if item.lag == 1 and item.candidate.method == "search"), None)
    found: tuple[list[FeasibleCandidate], list[RejectedCandidate]] = [], []
    if first is None:
        return found
    space = first.candidate.space
    variants = Variants(first.candidate.spec, space.costs, space.lengths, most)
    base = variants.simulate(1, space.spec.rollout.segment_tokens).seconds
    # powers of two up to the most, and itself
    for lag in sorted({*(2**power for power in range(1, most.bit_length())), most}):
        lagging = with_schedule(space, space.spec.schedule.num_chunks, lag)
        name = first.candidate.name.replace("lag 1", f"lag {lag}")
        checked = check(Candidate("search", name, lagging, first.candidate.assignment))
        if isinstance(checked, FeasibleCandidate):
            share = variants.simulate_plan(checked.plan).seconds / base
            found[0].append(replace(checked, seconds=first.seconds * share))
        else:
            found[1].append(checked)
    return found
