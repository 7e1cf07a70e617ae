"""Samples per second of placements with larger batches on the same devices: with the fastest settings that fit, or as
large as fits at the settings that they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flexrlhf.api import Spec, UserError
from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate, check
from flexrlhf.guideline.advice.model_options import OptionEnumerator
from flexrlhf.guideline.advice.proposals import choose_settings, in_space
from flexrlhf.guideline.advice.refinement import refined
from flexrlhf.guideline.advice.space import Space, make_space

LARGEST = 16
"""Most times that a batch is enlarged."""
MANY = 32
"""Devices above which it is enlarged fourfold at once."""
LEAST_GAIN = 0.02
"""Gain below which an even larger batch is not tried."""


@dataclass(frozen=True)
class BatchSpeeds:
    """Placements with one batch size.

    prompts:  prompts of a step.
    found:    each placement with as many; None: it does not fit.
    """

    prompts: int
    found: tuple[FeasibleCandidate | None, ...]

    def gains(self, before: BatchSpeeds) -> Iterator[float]:
        """Yield how much more samples/s each placement has than ``before``."""
        for item, other in zip(self.found, before.found, strict=True):
            if item is not None and other is not None:
                yield item.samples_per_second / other.samples_per_second - 1


def larger_batches(items: Sequence[FeasibleCandidate]) -> list[BatchSpeeds]:
    """Return the speeds of ``items`` with their batch, twice as many prompts (four times on more than ``MANY``
    devices), and so on, until none fits or gains. The optimizer steps of a step stay."""
    space = items[0].candidate.space
    spec, batch, factor = space.spec, space.batch, 2 if space.pool.num_devices <= MANY else 4
    prompts = spec.algorithm.prompts_per_step
    most = min(LARGEST, Spec.MAX_ROWS // batch.num_rows) * prompts
    found = [BatchSpeeds(prompts, tuple(items))]
    while (prompts := factor * prompts) <= most:
        # placements have the same options, whatever their schedules
        known: list[OptionEnumerator] = []
        larger = BatchSpeeds(prompts, tuple(_with_prompts(item, prompts, known) for item in items))
        if not any(larger.found):
            break
        found.append(larger)
        if max(larger.gains(found[-2]), default=0.0) < LEAST_GAIN:
            break
    return found


@dataclass(frozen=True)
class LargestTried:
    """Placement with its batch, and with the largest one at the same settings.

    item:     the placement.
    prompts:  the most that memory has room for.
    tried:    the placement with as many, at most ``LARGEST`` times its batch; None: no larger one.
    """

    item: FeasibleCandidate
    prompts: int
    tried: FeasibleCandidate | None

    @property
    def gain(self) -> float:
        """Share of its samples/s that the larger batch adds."""
        return 0.0 if self.tried is None else self.tried.samples_per_second / self.item.samples_per_second - 1


def largest_tried(items: Sequence[FeasibleCandidate]) -> list[LargestTried]:
    """Return ``items`` with their largest batches, on devices of known memory."""
    found = []
    for item in items:
        largest, prompts = item.plan.limits.largest_batch(), item.plan.spec.algorithm.prompts_per_step
        if largest is not None:
            grown = min(largest.prompts, LARGEST * prompts)
            found.append(LargestTried(item, largest.prompts, _grown(item, grown) if grown > prompts else None))
    return found


def _grown(item: FeasibleCandidate, prompts: int) -> FeasibleCandidate | None:
    """Return the placement with as many prompts a step at its settings; None if it cannot be planned."""
    larger, candidate = _larger_space(item, prompts), item.candidate
    if larger is None or candidate.assignment is None:
        return None
    same = in_space(larger, larger.problem, candidate.assignment)
    found = check(Candidate(candidate.method, candidate.name, larger, same))
    return found if isinstance(found, FeasibleCandidate) else None


def _with_prompts(item: FeasibleCandidate, prompts: int, known: list[OptionEnumerator]) -> FeasibleCandidate | None:
    """Return the placement with as many prompts a step, with its fastest settings; None if that does not fit.

    ``known``: enumerators of options of earlier spaces, which are used again and added to.
    """
    larger, candidate = _larger_space(item, prompts, known), item.candidate
    if larger is None:
        return None
    meshes = candidate.assignment or ()
    chosen = choose_settings(larger, {each.part: each.ranks for each in meshes})
    if isinstance(chosen, str):
        return None
    found = check(Candidate(candidate.method, candidate.name, larger, refined(larger, chosen)))
    return found if isinstance(found, FeasibleCandidate) else None


def _larger_space(item: FeasibleCandidate, prompts: int, known: list[OptionEnumerator] | None = None) -> Space | None:
    """Return the space of a placement with as many prompts a step; None if they cannot be planned."""
    space = item.candidate.space
    try:
        spec = space.spec.with_prompts(prompts)
        plain = make_space(spec, space.costs, space.lengths, space.pending, known=known)
    except UserError:
        return None
    return replace(
        plain, has_shadows=space.has_shadows, offloaded=space.offloaded, usable=space.usable, limits=space.limits
    )
