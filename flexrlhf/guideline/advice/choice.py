"""Outcome of a comparison of placements, and the one to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from flexrlhf.api import PlacementMap, UserError
from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate, Method, RejectedCandidate
from flexrlhf.guideline.advice.space import USABLE
from flexrlhf.guideline.advice.waiting import WaitingVariant
from flexrlhf.guideline.search.assignments import ROUNDING
from flexrlhf.guideline.search.result import SearchResult


@dataclass(frozen=True)
class Advice:
    """Outcome of ``advise``.

    feasible:  candidates that fit, fastest first.
    rejected:  the other candidates.
    misses:    rules that the guideline's own placement cannot follow, each with the reason.
    searches:  the spaces that were searched, by their labels.
    seconds:   of all searches.
    margin:    share of the fastest placement's seconds by which another one may be slower and count as equally fast.
    refusal:   sentence on changes that would help, if nothing fits.
    max_lag:   the largest lag that was tried.
    may_lag:   whether a placement with a lag may be chosen.
    own_lag:   lag that the YAML sets.
    waiting:   the placement to use with other processes of its environment and the other order of rows.
    take:      kind of placements whose fastest is to be used; None: of all kinds, the simplest that is fast enough.
    """

    feasible: tuple[FeasibleCandidate, ...]
    rejected: tuple[RejectedCandidate, ...]
    misses: Mapping[str, str]
    searches: Mapping[str, SearchResult]
    seconds: float
    margin: float
    refusal: str = ""
    max_lag: int = 1
    may_lag: bool = False
    own_lag: int = 0
    waiting: tuple[WaitingVariant, ...] = ()
    take: Method | None = None

    @property
    def comparable(self) -> tuple[FeasibleCandidate, ...]:
        """The candidates to choose from: unless a lag is allowed, those with no larger one than the YAML's, since a lag
        trains on other batches; of these the ones that leave memory unused, if there are any."""
        allowed = tuple(item for item in self.feasible if self.may_lag or item.lag <= self.own_lag)
        return tuple(item for item in allowed if not is_full(item)) or allowed

    @property
    def best(self) -> FeasibleCandidate:
        """The candidate to use: the simplest of those that are as fast as the fastest within the ``margin``; of equally
        simple ones the fastest.

        Raises UserError when nothing fits, or nothing of the kind to ``take``.
        """
        if not self.comparable:
            raise UserError(self.refusal or "no placement of these models fits the devices")
        if self.take is not None:
            return self._fastest_of(self.take)
        equal = tied(self.comparable, self.margin)
        return min(equal, key=lambda item: (complexity(item.candidate), item.seconds))

    def _fastest_of(self, method: Method) -> FeasibleCandidate:
        """Return the fastest candidate of one kind. Raises UserError if none fits, with the reasons and what fits."""
        allowed = (item for item in self.feasible if self.may_lag or item.lag <= self.own_lag)
        found = next((item for item in allowed if item.candidate.method == method), None)
        if found is None:
            reasons = [item for item in self.rejected if item.candidate.method == method]
            why = "; ".join(f"{item.candidate.name}: {item.reason}" for item in reasons) or "the request allows none"
            other = replace(self, take=None).best
            raise UserError(
                f"--take {method}: no placement of this kind fits ({why}); {other.candidate.method}, "
                f"{other.candidate.name} does, in {other.seconds:.2f} s a step: --take {other.candidate.method}"
            )
        return found

    @property
    def lagging(self) -> FeasibleCandidate | None:
        """The fastest candidate with a larger lag than ``best``, if it is faster by more than the ``margin``."""
        lagging = [item for item in self.feasible if item.lag > self.best.lag]
        fastest = min(lagging, key=lambda item: item.seconds, default=None)
        return fastest if fastest and (1 + self.margin) * fastest.seconds < self.best.seconds else None


def is_full(item: FeasibleCandidate) -> bool:
    """Whether a placement takes more memory than a recommended one may."""
    return item.share > USABLE * (1 + ROUNDING)


def complexity(candidate: Candidate) -> tuple[int, ...]:
    """Return the key by which placements are ordered, the simplest first: by what a person has to understand, which is
    the lag, shadows, the groups of devices that models have, and whether models are in host memory."""
    space, groups = candidate.space, {(choice.start, choice.size) for choice in candidate.assignment or ()}
    return space.spec.schedule.lag, space.has_shadows, len(groups), bool(space.offloaded)


def ratios_of(candidate: Candidate) -> list[Fraction]:
    """Return the share of the devices that each placed model has, a rollout engine on the ranks of its role left
    out."""
    placement, total = candidate.spec.placement, candidate.space.pool.num_devices
    if isinstance(placement, PlacementMap):
        return [Fraction(len(entry.ranks or ()), total) for entry in placement.models.values()]
    assert isinstance(placement, tuple), "proposals have a vector or ranks"
    return list(placement)


def tied(feasible: Sequence[FeasibleCandidate], margin: float) -> list[FeasibleCandidate]:
    """Return the placements that count as equally fast as the fastest, which comes first.

    feasible:  fastest first.
    margin:    share of the fastest placement's seconds by which another one may be slower and count as equally fast.
    """
    return [item for item in feasible if item.seconds <= (1 + margin) * feasible[0].seconds]
