"""Batches of an evaluation: how its prompts are split over replicas, and how a rank walks its instructions.

One batch of a fixed size is planned, since the number of rows is known only when a run reads its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest

from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.transfer import Transfer
from flexrlhf.strategies.instructions import Eval, Move, Run


@dataclass(frozen=True)
class EvaluationShape(BatchShape):
    """All prompts of an evaluation set. A mini-batch is one batch of the evaluation, planned with ``places`` prompts.

    The last batch may have fewer prompts than places. Prompts take the places in an order that spreads the first ones,
    however many, over all replicas; a place without a prompt is dropped by every rank alike, without communication.
    """

    places: int = 1

    def numbers(self, mini_batch: int) -> range:
        start = mini_batch * self.places
        return range(start, min(start + self.places, self.num_prompts))

    def prompts_on(self, layout: Layout, rank: int, mini_batches: range, attempt: int | None = None) -> tuple[int, ...]:
        mine = self.planned.prompts_on(layout, rank, range(1))
        return tuple(prompt for batch in mini_batches for prompt in self.at(batch, mine))

    def num_prompts_on(self, layout: Layout, rank: int, mini_batches: range, attempt: int | None = None) -> int:
        return len(self.prompts_on(layout, rank, mini_batches, attempt))

    def blocks_on(self, layout: Layout, rank: int, mini_batches: range) -> tuple[tuple[int, ...], ...]:
        mine = self.planned.blocks_on(layout, rank, range(1))
        found = (self.at(batch, block) for batch in mini_batches for block in mine)
        return tuple(block for block in found if block)

    @property
    def planned(self) -> BatchShape:
        """The places of one batch."""
        return BatchShape(self.places, self.samples_per_prompt, num_blocks=self.num_blocks, sequences=self.sequences)

    def at(self, batch: int, places: Iterable[int]) -> tuple[int, ...]:
        """Return the prompts at ``places`` of a batch, ascending."""
        numbers, prompts = _numbers(self.places), self.prompts(batch)
        return tuple(prompts[number] for number in sorted(numbers[p] for p in places) if number < len(prompts))

    def transfers_of(self, transfers: Iterable[Transfer], batch: int) -> tuple[Transfer, ...]:
        """Return ``transfers`` of planned places as transfers of the prompts of a batch."""
        filled = (replace(transfer, prompts=self.at(batch, transfer.prompts)) for transfer in transfers)
        return tuple(transfer for transfer in filled if transfer.prompts)


def evaluation_shape(num_prompts: int, batch: BatchShape) -> EvaluationShape:
    """Return the shape of ``num_prompts`` in batches like ``batch``."""
    count = -(-num_prompts // batch.num_prompts)
    blocks, k = batch.num_blocks, batch.sequences
    sizes = num_prompts, batch.samples_per_prompt, count
    return EvaluationShape(*sizes, num_blocks=blocks, sequences=k, places=batch.num_prompts)


@lru_cache(maxsize=64)
def _numbers(places: int) -> tuple[int, ...]:
    """Return for each place the number of the prompt there: 0 for a batch's first."""
    numbers = {place: number for number, place in enumerate(_spread(range(places)))}
    return tuple(numbers[place] for place in range(places))


def _spread(places: Sequence[int]) -> list[int]:
    """Return ``places`` in an order whose beginnings are spread over all of them: both halves take turns."""
    if len(places) < 2:
        return list(places)
    half = -(-len(places) // 2)
    pairs = zip_longest(_spread(places[:half]), _spread(places[half:]))
    return [place for pair in pairs for place in pair if place is not None]


def walk_evaluation(instruction: Eval, shape: EvaluationShape, rank: int) -> Iterator[tuple[int, Run | Move, range]]:
    """Yield (index in the list, instruction, batches that it works on), in order; statistics last, over all batches."""
    mine = [(index, inner) for index, inner in enumerate(instruction.instructions) if rank in inner.ranks]
    for batch in shape.mini_batches:
        for index, inner in mine:
            each = _of_batch(inner, shape, batch)
            if each is not None:
                yield index, each, range(batch, batch + 1)
    for index, inner in mine:
        if isinstance(inner, Run) and inner.is_statistic:
            yield index, inner, shape.mini_batches


def _of_batch(inner: Run | Move, shape: EvaluationShape, batch: int) -> Run | Move | None:
    """Return ``inner`` for one batch; None if it does nothing."""
    if isinstance(inner, Run):
        return None if inner.is_statistic else inner
    transfers = shape.transfers_of(inner.transfers, batch)
    if not transfers:
        return None
    # an all_gather needs equal shares, which a partly filled batch has not
    is_full = len(shape.prompts(batch)) == shape.places
    primitive = "all_to_all" if inner.primitive == "all_gather" and not is_full else inner.primitive
    return replace(inner, transfers=transfers, primitive=primitive)
