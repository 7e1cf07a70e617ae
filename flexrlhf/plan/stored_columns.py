"""Columns of a batch that a rank stores, and their bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flexrlhf.operators.columns import Lengths
from flexrlhf.placement.layout import BatchShape
from flexrlhf.strategies.instructions import Instruction, Move, Run


@dataclass(frozen=True)
class StoredColumns:
    """Columns of one batch on a rank: prompts by column, and the columns that most steps do not have."""

    prompts: Mapping[str, int]
    rare: frozenset[str]

    def row_bytes(self, lengths: Lengths, num_kept: int) -> int:
        """Return the bytes of a sample of each prompt in ``num_kept`` batches, of which one may have rare columns."""
        sizes = {column: number * lengths.row_bytes(column) for column, number in self.prompts.items()}
        return sum((1 if column in self.rare else num_kept) * size for column, size in sizes.items())


def stored_columns(
    instructions: Sequence[Instruction], batch: BatchShape, inputs: Collection[str], rank: int
) -> StoredColumns:
    """Return the columns of one batch on ``rank``. ``inputs``: columns that come from the data set."""
    stored: dict[str, set[int]] = defaultdict(set)
    rare: set[str] = set()
    for each in instructions:
        if isinstance(each, Run) and rank in each.ranks:
            prompts = batch.prompts_on(each.layout, rank, each.mini_batches, each.attempt)
            texts = [prompt for prompt in prompts if prompt in batch.first_places]
            for column in (*each.operator.stored_columns, *set(inputs).intersection(each.operator.reads)):
                stored[column].update(texts if column in each.operator.extra_reads else prompts)
            rare.update(each.operator.writes if each.is_rare else ())
        elif isinstance(each, Move) and rank in each.ranks:
            for transfer in each.transfers:
                if transfer.destination == rank:
                    stored[transfer.column].update(transfer.prompts)
    return StoredColumns({column: len(prompts) for column, prompts in stored.items()}, frozenset(rare))
