"""Split a batch into micro-batches by a token budget, without the columns that are padding in all their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.engines.base import Batch
from flexrlhf.operators.columns import Lengths


@dataclass(frozen=True)
class MicroBatch:
    """Rows with their text narrowed to columns ``[first, last)`` of the padded sequence.

    batch:   the rows, in full width.
    first:   at most P - 1, so that the last prompt token is included.
    last:    at least P + 1, so that the first response token is included.
    lengths: P and R of the run.
    idle:    whether it stands for no row, so that its outputs do not count.
    """

    batch: Batch
    first: int
    last: int
    lengths: Lengths
    idle: bool = False

    @property
    def tokens(self) -> Tensor:
        """int64 (n, last - first)."""
        return self.batch["tokens"][:, self.first : self.last].long()

    @property
    def attention_mask(self) -> Tensor:
        """int64 (n, last - first)."""
        return self.batch["attention_mask"][:, self.first : self.last].long()

    @property
    def position_ids(self) -> Tensor:
        """int64 (n, last - first), 0 at the first token of each text."""
        return (self.attention_mask.cumsum(1) - 1).clamp(min=0)

    @property
    def response_width(self) -> int:
        """Response columns that are kept."""
        return self.last - self.lengths.prompt


def idle_micro_batch(lengths: Lengths, device: torch.device) -> MicroBatch:
    """Return one row of two tokens, for ranks that must call as often as others and have no rows left."""
    width = lengths.prompt + lengths.response
    tokens = torch.zeros(1, width, dtype=torch.int32, device=device)
    mask = torch.zeros(1, width, dtype=torch.uint8, device=device)
    mask[:, lengths.prompt - 1 : lengths.prompt + 1] = 1
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    batch = Batch({"tokens": tokens, "attention_mask": mask}, rows, 1)
    return MicroBatch(batch, lengths.prompt - 1, lengths.prompt + 1, lengths, idle=True)


def micro_batches(batch: Batch, lengths: Lengths, token_budget: int) -> Iterator[MicroBatch]:
    """Split ``batch`` into contiguous rows of at most ``token_budget`` padded tokens.

    Samples of one prompt stay together, so a micro-batch has at least one prompt, whatever its tokens.
    """
    if not len(batch):
        return
    mask = batch["attention_mask"].bool()
    firsts = mask.int().argmax(1).tolist()
    lasts = (mask.shape[1] - mask.flip(1).int().argmax(1)).tolist()
    step = batch.samples_per_prompt
    start, first, last = 0, mask.shape[1], 0
    for row in range(0, len(batch), step):
        new_first = min(first, lengths.prompt - 1, *firsts[row : row + step])
        new_last = max(last, lengths.prompt + 1, *lasts[row : row + step])
        if row > start and (row + step - start) * (new_last - new_first) > token_budget:
            yield MicroBatch(batch.select(slice(start, row)), first, last, lengths)
            start = row
            new_first = min(lengths.prompt - 1, *firsts[row : row + step])
            new_last = max(lengths.prompt + 1, *lasts[row : row + step])
        first, last = new_first, new_last
    yield MicroBatch(batch.select(slice(start, len(batch))), first, last, lengths)
