"""How held-out prompts are shared out. A batch of a fixed size is planned, since a plan does not know the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest

from flexrlhf.config.spec import EvalSpec
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.routes import Transfer


def held_out_batch(batch: BatchShape, settings: EvalSpec) -> BatchShape:
    """The places of one batch of an evaluation: as many prompts as a step has."""
    return BatchShape(batch.num_prompts, settings.num_samples(batch.samples_per_prompt))


@dataclass(frozen=True)
class HeldOutShape(BatchShape):
    """All held-out prompts; its mini-batches are the batches of an evaluation, each planned with ``places``.

    The last batch may have fewer prompts than places. They take them so that the first ones, however many, lie all over
    the replicas; what is at no place is at no rank, so nobody has to tell anybody.
    """

    places: int = 1

    def prompts(self, mini_batch: int) -> range:
        start = mini_batch * self.places
        return range(start, min(start + self.places, self.num_prompts))

    def prompts_on(self, layout: Layout, rank: int, mini_batches: range) -> tuple[int, ...]:
        mine = layout.slice(range(self.places), layout.replica(rank))
        return tuple(prompt for batch in mini_batches for prompt in self.at(batch, mine))

    def at(self, batch: int, places: Iterable[int]) -> tuple[int, ...]:
        """The prompts at ``places`` of a batch, ascending."""
        numbers, prompts = _numbers(self.places), self.prompts(batch)
        return tuple(prompts[number] for number in sorted(numbers[p] for p in places) if number < len(prompts))

    def cut(self, transfers: Iterable[Transfer], batch: int) -> tuple[Transfer, ...]:
        """``transfers`` of planned places as those of the prompts of a batch."""
        found = (replace(transfer, prompts=self.at(batch, transfer.prompts)) for transfer in transfers)
        return tuple(transfer for transfer in found if transfer.prompts)


def held_out_shape(num_prompts: int, batch: BatchShape) -> HeldOutShape:
    """``num_prompts`` in batches like ``batch``."""
    count = -(-num_prompts // batch.num_prompts)
    return HeldOutShape(num_prompts, batch.samples_per_prompt, count, places=batch.num_prompts)


@lru_cache(maxsize=64)
def _numbers(places: int) -> tuple[int, ...]:
    """Place → which prompt of a batch is there: the first, the second ..."""
    numbers = {place: number for number, place in enumerate(_spread(range(places)))}
    return tuple(numbers[place] for place in range(places))


def _spread(places: Sequence[int]) -> list[int]:
    """``places`` in an order whose beginnings lie all over them: both halves take turns."""
    if len(places) < 2:
        return list(places)
    half = -(-len(places) // 2)
    pairs = zip_longest(_spread(places[:half]), _spread(places[half:]))
    return [place for pair in pairs for place in pair if place is not None]
