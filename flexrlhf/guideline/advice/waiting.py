"""Waiting for environments: rows that go on by themselves, and processes. Both are tried for the placement to use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from flexrlhf.api import table
from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate, check
from flexrlhf.guideline.simulation.simulation_text import seconds_text

RowOrder = Literal["planned", "free"]
"""Setting ``rollout.order``."""
ORDERS: tuple[RowOrder, ...] = ("planned", "free")
PROCESSES = (1, 2, 4)
"""Factors of the processes that are tried."""


@dataclass(frozen=True, eq=False)
class WaitingVariant:
    """A placement with another order of rows, and other processes of its environment.

    order:      of rows
    processes:  of all ranks
    found:      its simulation
    is_open:    whether it may be chosen: the order is the run's own, and the request left the processes open
    """

    order: RowOrder
    processes: int
    found: FeasibleCandidate
    is_open: bool

    @property
    def seconds(self) -> float:
        return self.found.simulation.seconds


def waiting_variants(chosen: FeasibleCandidate) -> tuple[WaitingVariant, ...]:
    """Return the variants of ``chosen`` that have a plan, few processes and its own order first; none without an
    environment."""
    space = chosen.candidate.space
    environment, own = space.spec.environment, space.spec.rollout.order
    if environment is None or not (environment.seconds or space.costs.environment(environment.name)):
        return ()
    variants = []
    for factor, order in product(PROCESSES, sorted(ORDERS, key=lambda each: each != own)):
        processes = factor * environment.processes
        found = check(_changed(chosen.candidate, order, processes))
        is_open = order == own and (factor == 1 or "processes" not in environment.model_fields_set)
        if isinstance(found, FeasibleCandidate):
            variants.append(WaitingVariant(order, processes, found, is_open))
    return tuple(variants)


def _changed(candidate: Candidate, order: RowOrder, processes: int) -> Candidate:
    spec = candidate.space.spec
    assert spec.environment is not None, "a run without an environment waits for none"
    environment, rollout = spec.environment, spec.rollout
    if processes != environment.processes:
        environment = environment.model_copy(update={"processes": processes})
    if order != rollout.order:
        rollout = rollout.model_copy(update={"order": order})
    spec = spec.model_copy(update={"environment": environment, "rollout": rollout})
    return replace(candidate, space=replace(candidate.space, spec=spec))


def least_waiting(variants: Sequence[WaitingVariant], margin: float) -> WaitingVariant:
    """Return the variant to use: the first, with the fewest processes, of those as fast as the fastest within
    ``margin``."""
    fastest = min(each.seconds for each in variants)
    return next(each for each in variants if each.seconds <= (1 + margin) * fastest)


def waiting_lines(variants: Sequence[WaitingVariant], margin: float) -> Iterator[str]:
    """Yield a table of the seconds of a step by order and processes, and the proposed ones with their gain."""
    seconds = {(each.order, each.processes): each.seconds for each in variants}
    rows = [("processes", *ORDERS)]
    for processes in dict.fromkeys(each.processes for each in variants):
        cells = (seconds.get((order, processes)) for order in ORDERS)
        rows.append((str(processes), *("no plan" if each is None else seconds_text(each) for each in cells)))
    yield from table(rows, ">" * len(rows[0]))
    now, best = variants[0], least_waiting(variants, margin)
    chosen = least_waiting([each for each in variants if each.is_open] or [now], margin)
    for each in dict.fromkeys((chosen, best)):
        if each is not now:
            waits = each.found.simulation.reply_seconds
            yield (
                f"order {each.order} and {each.processes} processes in place of {now.order} and {now.processes}: "
                f"{now.seconds / each.seconds:.2f} x as fast, and ranks wait {seconds_text(waits)} "
                f"({waits / each.seconds:.0%}){'' if each is chosen else '; not chosen, since the YAML has others'}"
            )
