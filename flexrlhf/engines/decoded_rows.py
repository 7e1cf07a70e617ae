"""Rows that are decoded: contexts that they continue, their new tokens, and the columns of their responses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.operators.columns import Column


@dataclass
class LiveRows:
    """Rows that are decoded in the same passes, each field of shape (m,) but the last three.

    places:   int64, their indices among the rows of the call.
    rows:     int64, their numbers in the noise.
    steps:    int64, of their noise.
    first:    int64, tokens that their responses had before.
    begins:   int64, columns of their first tokens among (P+R).
    limits:   int64, new tokens, if none ends them before.
    number:   int64, new tokens so far, also behind an end that the host has not seen yet.
    lengths:  int64, new tokens of the response, as far as it is known.
    ended:    bool, whether the response has ended or has its limit.
    finished: bool, whether an end token or a stop string ended it.
    tokens:   int64 (m, w), new tokens; the last column is behind every limit.
    logprobs: float32 (m, w), their log-probs.
    experts:  (m, P+R, layers, k) of the tokens that were read; None: they are not recorded, or not here yet.
    """

    places: Tensor
    rows: Tensor
    steps: Tensor
    first: Tensor
    begins: Tensor
    limits: Tensor
    number: Tensor
    lengths: Tensor
    ended: Tensor
    finished: Tensor
    tokens: Tensor
    logprobs: Tensor
    experts: Tensor | None = None

    def select(self, index: Tensor) -> LiveRows:
        """Return the rows at ``index`` (k,)."""
        values: list[Any] = [getattr(self, field.name) for field in fields(self)]
        selected: list[Any] = [None if each is None else each[index] for each in values]
        return LiveRows(*selected)

    def joined(self, *others: LiveRows) -> LiveRows:
        """Return these rows and ``others``."""
        values = [[getattr(rows, field.name) for rows in (self, *others)] for field in fields(self)]
        joined: list[Any] = [None if each[0] is None else torch.cat(each) for each in values]
        return LiveRows(*joined)

    def keep_experts(self, experts: Tensor, first: Tensor, width: int) -> None:
        """Keep the experts (m, columns, layers, k) of rows whose first tokens are in the columns ``first`` (m,).

        width:  P+R.
        """
        places = torch.arange(width, device=first.device) + (first - self.begins)[:, None]
        rows = torch.arange(len(first), device=first.device)[:, None]
        self.experts = experts[rows, places.clamp(0, experts.shape[1] - 1)]

    def columns(self, batch: Batch, longest: int, pad_token_id: int) -> dict[str, Tensor]:
        """Return the columns of ``Engine.generate``.

        batch:    the same rows.
        longest:  tokens of a response at most.
        """
        places = torch.arange(longest, device=self.first.device).expand(len(batch), -1)
        first = self.first[:, None]
        inside, is_new = places < first + self.lengths[:, None], places >= first
        # which of the new tokens is at each place, any at others
        index = (places - first).clamp(0, self.tokens.shape[1] - 1)
        responses, logprobs = self.tokens.gather(1, index), self.logprobs.gather(1, index)
        if "responses" in batch.columns:
            responses = responses.where(is_new, batch["responses"].long())
        text_mask = torch.cat([batch["prompt_mask"], inside.to(torch.uint8)], 1)
        return self._expert_columns(text_mask) | {
            "tokens": torch.cat([batch["prompts"], responses.where(inside, pad_token_id)], 1).int(),
            "attention_mask": text_mask,
            "response_mask": inside.to(torch.uint8),
            "finished": self.finished.to(torch.uint8),
            "rollout_logprobs": logprobs.where(inside & is_new, 0.0),
        }

    def _expert_columns(self, text_mask: Tensor) -> dict[str, Tensor]:
        """Return the column of experts, 0 at padding and at the last token of each row, which no pass has read."""
        if self.experts is None:
            return {}
        was_read = pad(text_mask[:, 1:], (0, 1)) * text_mask
        return {Column.EXPERTS: (self.experts * was_read[:, :, None, None]).flatten(1).view(torch.uint8)}


class DueRows:
    """Rows of a batch to sample from, and the tokens that they continue: prompts, and responses so far.

    first:   index of the first of them among the rows of the call.
    tokens:  int64 (n, w), left-padded.
    mask:    int64 (n, w), 1 at tokens.
    limits:  int64 (n,), new tokens of each row, if none ends it before.
    """

    def __init__(self, batch: Batch, sampling: Sampling, longest: int, first: int = 0) -> None:
        self.batch, self.first = batch, first
        self._steps = batch.columns.get("noise_step", torch.full_like(batch.rows, sampling.step))
        self._noise_rows = batch.columns.get("noise_row", batch.rows)
        prompts, mask = batch["prompts"], batch["prompt_mask"]
        self._given = torch.zeros_like(batch.rows)
        if "responses" in batch.columns:
            self._given = batch["response_mask"].sum(1)
            filled = int(self._given.max()) if len(batch) else 0
            mask = torch.cat([mask, batch["response_mask"][:, :filled]], 1)
            # padding of both sides to the left
            order = mask.argsort(dim=1, stable=True)
            prompts = torch.cat([prompts, batch["responses"][:, :filled]], 1).gather(1, order)
            mask = mask.gather(1, order)
        self.tokens, self.mask = prompts.long(), mask.long()
        self.limits = batch.new_tokens(longest)

    def responses(self) -> list[list[int]]:
        """Return the tokens that each response has before it is continued."""
        if "responses" not in self.batch.columns:
            return [[] for _ in range(len(self.batch))]
        given = zip(self.batch["responses"].tolist(), self._given.tolist(), strict=True)
        return [row[:length] for row, length in given]

    def waiting(self, shares: bool, keeps: bool = False) -> list[WaitingRow]:
        """Return the rows that have new tokens, longest contexts first.

        shares:  whether equal contexts are read once.
        keeps:   whether rows have keys and values of steps before: equal ones may be of different weights.
        """
        numbers = torch.arange(len(self.mask), device=self.mask.device)
        contexts, lengths = numbers, self.mask.sum(1)
        if shares and self.batch.samples_per_prompt > 1:
            _, contexts = torch.stack([self.tokens, self.mask], 1).unique(dim=0, return_inverse=True)
            if keeps:
                contexts = contexts.where(self._given == 0, numbers + len(numbers))
        order = lengths.argsort(descending=True, stable=True)
        columns = [numbers, lengths, self.limits, contexts, self.batch.rows, self._steps]
        rows = [WaitingRow(self, *row) for row in torch.stack(columns, 1)[order].tolist()]
        return [row for row in rows if row.limit > 0]

    def texts(self, index: Tensor) -> Tensor:
        """Return the contexts (k, w) of the rows at ``index`` (k,), padded behind."""
        width, tokens = self.tokens.shape[1], self.tokens[index]
        columns = torch.arange(width, device=tokens.device) + (width - self.mask[index].sum(1))[:, None]
        return tokens.gather(1, columns.clamp(max=width - 1))

    def live(self, index: Tensor, width: int) -> LiveRows:
        """Return the rows at ``index`` (k,) before their first new token, with space for ``width`` of them."""
        given, limits = self._given[index], self.limits[index]
        none = torch.zeros_like(index, dtype=torch.bool)
        return LiveRows(
            places=index + self.first,
            rows=self._noise_rows[index],
            steps=self._steps[index],
            first=given,
            begins=self.batch["prompts"].shape[1] + given - self.mask[index].sum(1),
            limits=limits,
            number=torch.zeros_like(index),
            lengths=limits,
            ended=none,
            finished=none,
            tokens=given.new_zeros(len(index), width),
            logprobs=torch.zeros(len(index), width, device=given.device),
        )


class WaitingRow(NamedTuple):
    """Row that has no slot yet.

    due:      the batch that it is of.
    place:    its index there.
    length:   tokens of its context.
    limit:    new tokens at most.
    context:  number of its context among the different ones of the batch.
    row:      its number.
    step:     of its noise.
    """

    due: DueRows
    place: int
    length: int
    limit: int
    context: int
    row: int
    step: int
