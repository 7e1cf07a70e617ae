"""Waiting for environments: chunks that alternate, so that one generates while the environments of another reply, and
processes. Both are tried for the placement to use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from flexrlhf.api import counted, table
from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate, check
from flexrlhf.guideline.advice.space import with_schedule
from flexrlhf.guideline.simulation.simulation_text import seconds_text

CHUNKS = PROCESSES = (1, 2, 4)
"""Chunks that are tried, and factors of the processes."""


@dataclass(frozen=True, eq=False)
class WaitingVariant:
    """A placement with other chunks, and other processes of its environment.

    chunks:     of a step
    processes:  of all ranks
    found:      its simulation
    is_open:    whether the request left both open, so that it may be chosen
    """

    chunks: int
    processes: int
    found: FeasibleCandidate
    is_open: bool

    @property
    def seconds(self) -> float:
        return self.found.simulation.seconds


def waiting_variants(chosen: FeasibleCandidate) -> tuple[WaitingVariant, ...]:
    """Return the variants of ``chosen`` that fit, few processes and chunks first; none without an environment."""
    space = chosen.candidate.space
    environment, schedule = space.spec.environment, space.spec.schedule
    if environment is None or not (environment.seconds or space.costs.environment(environment.name)):
        return ()
    counts = {each for each in CHUNKS if not space.spec.algorithm.num_mini_batches % each} | {schedule.num_chunks}
    variants = []
    for factor, chunks in product(PROCESSES, sorted(counts)):
        processes = factor * environment.processes
        found = check(_changed(chosen.candidate, chunks, processes))
        is_open = chunks == schedule.num_chunks or "num_chunks" not in space.fixed_schedule
        is_open &= factor == 1 or "processes" not in environment.model_fields_set
        if isinstance(found, FeasibleCandidate):
            variants.append(WaitingVariant(chunks, processes, found, is_open))
    return tuple(variants)


def _changed(candidate: Candidate, chunks: int, processes: int) -> Candidate:
    space = with_schedule(candidate.space, chunks, candidate.space.spec.schedule.lag)
    environment = space.spec.environment
    assert environment is not None, "a run without an environment waits for none"
    if processes != environment.processes:
        environment = environment.model_copy(update={"processes": processes})
    return replace(candidate, space=replace(space, spec=space.spec.model_copy(update={"environment": environment})))


def least_waiting(variants: Sequence[WaitingVariant], margin: float) -> WaitingVariant:
    """Return the variant to use: the first, with the fewest processes, of those as fast as the fastest within
    ``margin``."""
    fastest = min(each.seconds for each in variants)
    return next(each for each in variants if each.seconds <= (1 + margin) * fastest)


def waiting_lines(variants: Sequence[WaitingVariant], margin: float) -> Iterator[str]:
    """Yield a table of the seconds of a step by chunks and processes, and the proposed ones with their gain."""
    seconds = {(each.chunks, each.processes): each.seconds for each in variants}
    counts = sorted({chunks for chunks, _ in seconds})
    rows = [("processes", *(f"{chunks} chunk{'s' * (chunks > 1)}" for chunks in counts))]
    for processes in dict.fromkeys(each.processes for each in variants):
        cells = (seconds.get((chunks, processes)) for chunks in counts)
        rows.append((str(processes), *("does not fit" if each is None else seconds_text(each) for each in cells)))
    yield from table(rows, ">" * len(rows[0]))
    now, best = variants[0], least_waiting(variants, margin)
    chosen = least_waiting([each for each in variants if each.is_open] or [now], margin)
    for each in dict.fromkeys((chosen, best)):
        if each is not now:
            waits = each.found.simulation.reply_seconds
            yield (
                f"{counted(each.chunks, 'chunk')} and {each.processes} processes in place of {now.chunks} and "
                f"{now.processes}: {now.seconds / each.seconds:.2f} x as fast, and ranks wait {seconds_text(waits)} "
                f"({waits / each.seconds:.0%}){'' if each is chosen else '; not chosen, since the YAML sets others'}"
            )
