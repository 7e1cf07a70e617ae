"""Losses without gradients, of any engine's passes: their statistics, and the first row that is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.engines.base import Batch, Loss, Moments, Totals
from flexrlhf.engines.micro_batch import MicroBatch
from flexrlhf.engines.non_finite import NonFinite, TrainingPass
from flexrlhf.engines.readout import Computed


class LossPasses:
    """Passes of one model, micro-batch by micro-batch.

    dp:  data-parallel group of the model.
    """

    dp: RankGroup

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Split ``batch``, with idle micro-batches if ranks call the model equally often."""
        raise NotImplementedError

    def evaluated(self, pieces: Sequence[MicroBatch], loss: Loss) -> Iterator[tuple[MicroBatch, Computed]]:
        """Yield ``pieces``, all of a mini-batch, with what ``loss`` reads of each, without gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def first_non_finite(self, parts: Sequence[tuple[Batch, Loss]]) -> NonFinite | None:
        """Return the first row with a number that is not finite, over all data-parallel ranks, which call this alike.

        Computes the micro-batches of ``parts`` once more, without gradients.
        """
        return NonFinite.first_of(self._training_passes(parts), parts, self.dp)

    @torch.no_grad()
    def losses(self, parts: Sequence[tuple[Batch, Loss]]) -> Moments:
        """Compute the losses, each of its own mini-batch, as ``Engine.losses``."""
        return TrainingPass.losses_of(self._training_passes(parts), parts, self.dp)

    def _training_passes(self, parts: Sequence[tuple[Batch, Loss]]) -> Iterator[TrainingPass]:
        for part, (batch, loss) in enumerate(parts):
            totals, pieces = Totals.of(batch, self.dp), self.micro_batches(batch)
            for number, (piece, computed) in enumerate(self.evaluated(pieces, loss)):
                if not piece.idle:
                    yield TrainingPass(part, number, piece.batch, loss.outputs(computed), totals)
