"""Sequences of a batch, read once by the host, and the units of them that are in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from flexrlhf.engines.base import Batch
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.memory.packed_rows import TextGroup, Unit
from flexrlhf.operators.columns import Lengths


@dataclass(frozen=True)
class PassUnit:
    """Sequences of one prompt that are in one pass.

    groups:    the sequences, in groups that share a copy of the prompt.
    rows:      of the batch, of these sequences in order.
    repeated:  further rows → the row with the same sequence, which is computed once.
    """

    groups: Unit
    rows: tuple[int, ...]
    repeated: dict[int, int]


@dataclass(frozen=True)
class BatchTexts:
    """Sequences of a batch.

    tokens:     (n, P + R), in host memory as all else here: to read a GPU stops it.
    prompts:    (n,), tokens of each prompt.
    responses:  (n,), tokens of each response.
    contents:   bytes that two sequences have in common only if all their tokens are the same.
    samples:    rows of a prompt.
    same:       of each prompt, whether its first sequences have the same one; encoded again, they do not.
    sequences:  rows of an episode, of which further ones have prompts of their own.
    """

    tokens: NDArray[np.int64]
    prompts: NDArray[np.int64]
    responses: NDArray[np.int64]
    contents: list[bytes]
    samples: int
    same: list[bool]
    sequences: int = 1

    @classmethod
    def of(cls, batch: Batch, lengths: Lengths) -> BatchTexts:
        tokens, samples = batch["tokens"].long(), batch.samples_per_prompt
        # read once; tokens outside of sequences are negative
        read = torch.where(batch["attention_mask"].bool(), tokens, -1 - tokens).cpu().numpy()
        mask = read >= 0
        prompts, responses = mask[:, : lengths.prompt].sum(1), mask[:, lengths.prompt :].sum(1)
        # a row without any token has a place all the same
        prompts = np.maximum(prompts, prompts + responses == 0)
        shown = np.where(mask, read, -1)
        prompt = shown[:, : lengths.prompt].reshape(-1, samples, lengths.prompt)[:, :: batch.sequences]
        same = (prompt == prompt[:, :1]).all((1, 2))
        read = np.where(mask, read, -1 - read)
        if batch.sequences > 1:
            # a row that no conversation has used is the prompt of its first sequence once more
            numbers = np.arange(len(read))
            own = np.where(mask.any(1), numbers, numbers - numbers % batch.sequences)
            read, prompts, shown = read[own], prompts[own], shown[own]
        contents = [row.tobytes() for row in shown]
        return cls(read, prompts, responses, contents, samples, same.tolist(), batch.sequences)

    def units(self, number: int, settings: PassSettings, compares: bool) -> Iterator[PassUnit]:
        """Yield the units of one prompt. The same sequence is computed once.

        Rounding depends on the place in a pass, and group advantages would enlarge the difference of equal sequences.
        """
        alike: dict[bytes, list[int]] = {}
        rows_of_prompt = range(number * self.samples, (number + 1) * self.samples)
        for row in sorted(rows_of_prompt, key=lambda row: row % self.sequences > 0):
            alike.setdefault(self.contents[row], []).append(row)
        again = {first: others for first, *others in alike.values()}
        left = iter(again)
        for groups in self._groups(number, list(again), settings, compares):
            rows = tuple(islice(left, sum(len(group.responses) for group in groups)))
            yield PassUnit(groups, rows, {row: first for first in rows for row in again[first]})

    def _groups(self, number: int, rows: Sequence[int], settings: PassSettings, compares: bool) -> tuple[Unit, ...]:
        """Return the sequences ``rows`` of one prompt in units, in order."""
        units: tuple[Unit, ...] = ()
        if settings.packs and settings.shares and self.same[number] and self.prompts[rows[0]]:
            alike = [row for row in rows if row % self.sequences == 0]
            group = TextGroup(int(self.prompts[rows[0]]), tuple(int(self.responses[row]) for row in alike))
            units = group.units(settings.budget, shares=True, compares=compares, masks=settings.masks)
            rows = rows[len(alike) :]
        apart = tuple(TextGroup(int(self.prompts[row]), (int(self.responses[row]),)) for row in rows)
        if compares:
            return ((*(group for unit in units for group in unit), *apart),)
        return units + TextGroup.as_units(apart, compares)
