"""Samples per second of placements with larger batches: on the same devices, with the fastest settings that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flexrlhf.config.spec import MAX_ROWS
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate, assess
from flexrlhf.guideline.advice.proposals import choose_settings
from flexrlhf.guideline.advice.space import make_space

LARGEST = 16
"""Most times that a batch is enlarged."""
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
    """Return the speeds of ``items`` with their batch, twice as many prompts, and so on, until none fits or gains. The
    optimizer steps of a step stay."""
    spec, batch = items[0].candidate.space.spec, items[0].candidate.space.batch
    prompts = spec.algorithm.prompts_per_step
    most = min(LARGEST, MAX_ROWS // batch.num_rows) * prompts
    found = [BatchSpeeds(prompts, tuple(items))]
    while (prompts := 2 * prompts) <= most:
        larger = BatchSpeeds(prompts, tuple(_with_prompts(item, prompts) for item in items))
        if not any(larger.found):
            break
        found.append(larger)
        if max(larger.gains(found[-2]), default=0.0) < LEAST_GAIN:
            break
    return found


def _with_prompts(item: FeasibleCandidate, prompts: int) -> FeasibleCandidate | None:
    """Return the placement with as many prompts a step; None if that does not fit."""
    candidate, space = item.candidate, item.candidate.space
    algorithm = space.spec.algorithm.model_copy(update={"prompts_per_step": prompts})
    spec = space.spec.model_copy(update={"algorithm": algorithm})
    try:
        plain = make_space(spec, space.costs, space.lengths, space.pending)
    except UserError:
        return None
    larger = replace(plain, has_shadows=space.has_shadows, offloaded=space.offloaded, usable=space.usable)
    meshes = candidate.assignment or ()
    chosen = choose_settings(larger, {each.part: tuple(range(each.start, each.start + each.size)) for each in meshes})
    if isinstance(chosen, str):
        return None
    found = assess(Candidate(candidate.method, candidate.name, larger, chosen))
    return found if isinstance(found, FeasibleCandidate) else None
