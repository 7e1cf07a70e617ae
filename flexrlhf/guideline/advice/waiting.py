"""Waiting for environments: the placement to use with more of their processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flexrlhf.api import table
from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate, check
from flexrlhf.guideline.simulation.simulation_text import seconds_text

PROCESSES = (1, 2, 4)
"""Factors of the processes that are tried."""


@dataclass(frozen=True, eq=False)
class WaitingVariant:
    """A placement with other processes of its environment.

    processes:  of all ranks
    found:      its simulation
    is_open:    whether it may be chosen: the request left the processes open
    """

    processes: int
    found: FeasibleCandidate
    is_open: bool

    @property
    def seconds(self) -> float:
        return self.found.simulation.seconds


def waiting_variants(chosen: FeasibleCandidate) -> tuple[WaitingVariant, ...]:
    """Return the variants of ``chosen`` that fit, few processes first; none without an environment."""
    space = chosen.candidate.space
    environment = space.spec.environment
    if environment is None or not (environment.seconds or space.costs.environment(environment.name)):
        return ()
    variants = []
    for factor in PROCESSES:
        processes = factor * environment.processes
        found = check(_changed(chosen.candidate, processes))
        if isinstance(found, FeasibleCandidate):
            is_open = factor == 1 or "processes" not in environment.model_fields_set
            variants.append(WaitingVariant(processes, found, is_open))
    return tuple(variants)


def _changed(candidate: Candidate, processes: int) -> Candidate:
    spec = candidate.space.spec
    assert spec.environment is not None, "a run without an environment waits for none"
    if processes == spec.environment.processes:
        return candidate
    environment = spec.environment.model_copy(update={"processes": processes})
    return replace(candidate, space=replace(candidate.space, spec=spec.model_copy(update={"environment": environment})))


def least_waiting(variants: Sequence[WaitingVariant], margin: float) -> WaitingVariant:
    """Return the variant to use: the first, with the fewest processes, of those as fast as the fastest within
    ``margin``."""
    fastest = min(each.seconds for each in variants)
    return next(each for each in variants if each.seconds <= (1 + margin) * fastest)


def waiting_lines(variants: Sequence[WaitingVariant], margin: float) -> Iterator[str]:
    """Yield a table of the seconds of a step by processes, and the proposed ones with their gain."""
    rows = [("processes", "a step", "of it waiting")]
    rows += [
        (str(each.processes), seconds_text(each.seconds), seconds_text(each.found.simulation.reply_seconds))
        for each in variants
    ]
    yield from table(rows, ">>>")
    now, best = variants[0], least_waiting(variants, margin)
    chosen = least_waiting([each for each in variants if each.is_open] or [now], margin)
    for each in dict.fromkeys((chosen, best)):
        if each is not now:
            waits = each.found.simulation.reply_seconds
            yield (
                f"{each.processes} processes in place of {now.processes}: {now.seconds / each.seconds:.2f} x as fast, "
                f"and ranks wait {seconds_text(waits)} ({waits / each.seconds:.0%})"
                f"{'' if each is chosen else '; not chosen, since the YAML sets others'}"
            )
