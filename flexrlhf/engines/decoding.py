"""Decode responses with a transformers model, in batches of rows with similar prompt lengths.

A response depends on its row number and its prompt alone: noise is a function of (seed, step, row, position), and
attention reads no other row. So rows may be sorted, batched, and dropped once they have ended, and samples of one
prompt read it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from flexrlhf.engines.base import Batch, Sampling, searched_from
from flexrlhf.engines.prefill import Prefill
from flexrlhf.engines.sampling import completes_stop, sample_tokens

_DROP_SHARE = 0.25
"""Share of ended rows from which on copying the KV cache of the others pays off."""


def tokens_between_looks(device: torch.device) -> int:
    """Return the tokens after which the host looks for rows that have ended, for which it waits for a GPU."""
    return 1 if device.type == "cpu" else 8


@dataclass
class _DecodingRows:
    """Rows that are decoded in the same passes.

    places:  int64 (m,), their indices in the batch.
    mask:    int64 (m, w), 1 where a column of the KV cache contains text.
    logits:  (m, vocabulary), of the next token; None once it is sampled.
    ended:   bool (m,), whether the response has ended.
    cache:   keys and values of the tokens read so far.
    padded:  whether a row has padding; None: the model looks for it at each token.
    """

    places: Tensor
    mask: Tensor
    logits: Tensor | None
    ended: Tensor
    cache: DynamicCache
    padded: bool | None = None

    def __post_init__(self) -> None:
        self._find_padding()

    def _find_padding(self) -> None:
        if self.padded is not None:
            self.padded = not self.mask.all()

    def take_logits(self) -> Tensor:
        """Return the logits, which are then not kept while the next ones are computed."""
        assert self.logits is not None, "a token is read before the next one is sampled"
        logits, self.logits = self.logits, None
        return logits

    def read(self, model: PreTrainedModel, tokens: Tensor) -> None:
        """Run the model on the next ``tokens`` (m,), one of each row that has not been dropped."""
        self.mask = pad(self.mask, (0, 1), value=1)
        for_all_layers = self.mask[:, None, None].bool() if self.padded else None
        out = model(
            input_ids=tokens[:, None],
            attention_mask=self.mask if self.padded is None else for_all_layers,
            position_ids=self.mask.sum(1, keepdim=True) - 1,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits = out.logits[:, -1]

    def drop_ended(self) -> Tensor:
        """Remove the rows that have ended, also from the KV cache; return which are left."""
        left = (~self.ended).nonzero().squeeze(1)
        self.places, self.mask, self.ended = self.places[left], self.mask[left], self.ended[left]
        # reorder_cache, because batch_select_indices does not exist for every kind of layer
        self.cache.reorder_cache(left)
        self._find_padding()
        return left


class _Contexts:
    """Tokens that the responses of a batch continue: prompts, and responses as far as they have been generated.

    tokens:  int64 (n, w), left-padded.
    mask:    int64 (n, w), 1 at tokens.
    lengths: int64 (n,), tokens of each response so far.
    """

    def __init__(self, batch: Batch) -> None:
        prompts, mask = batch["prompts"], batch["prompt_mask"]
        self.lengths = torch.zeros_like(batch.rows)
        if "responses" in batch.columns:
            self.lengths = batch["response_mask"].sum(1)
            longest = int(self.lengths.max()) if len(batch) else 0
            mask = torch.cat([mask, batch["response_mask"][:, :longest]], 1)
            # padding of both sides to the left
            order = mask.argsort(dim=1, stable=True)
            prompts = torch.cat([prompts, batch["responses"][:, :longest]], 1).gather(1, order)
            mask = mask.gather(1, order)
        self.tokens, self.mask = prompts.long(), mask.long()


class Decoding:
    """Responses of at most ``max_tokens`` tokens to the prompts of ``batch``, decoded call by call of the model.

    share_prompts:  whether samples of one prompt read it once.
    masks_once:     whether all layers take one mask, so that the model need not look at it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: Batch,
        sampling: Sampling,
        max_tokens: int,
        share_prompts: bool = True,
        masks_once: bool = False,
    ) -> None:
        assert sampling.decode is not None or not sampling.stop, "stop strings are searched in decoded text"
        self._model, self._batch, self._sampling = model, batch, sampling
        self._shares = share_prompts and batch.samples_per_prompt > 1
        self._masks_once = masks_once
        device = batch.rows.device
        self._tokens_between_looks = tokens_between_looks(device)
        self._end_tokens = torch.tensor(sampling.eos_token_ids, dtype=torch.int64, device=device)
        self._contexts, self._max_tokens = _Contexts(batch), max_tokens
        self._steps = batch.columns.get("noise_step")
        # new tokens of each row, if none ends it before
        self._limits = (max_tokens - self._contexts.lengths).clamp(max=sampling.most_tokens or max_tokens)
        most = int(self._limits.max()) if len(batch) else 0
        self._tokens = torch.zeros(len(batch), most, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(len(batch), most, device=device)
        self._lengths = self._limits.clone()
        self._finished = torch.zeros(len(batch), dtype=torch.bool, device=device)
        self._responses: list[list[int]] = self._given_responses() if sampling.stop else []
        self._searched_from = searched_from(batch) if sampling.stop else []

    def _given_responses(self) -> list[list[int]]:
        """Return the tokens that each response has before it is continued."""
        lengths = self._contexts.lengths.tolist()
        if "responses" not in self._batch.columns:
            return [[] for _ in lengths]
        return [row[:length] for row, length in zip(self._batch["responses"].tolist(), lengths, strict=True)]

    def calls(self, num_rows: int) -> Iterator[bool]:
        """Decode at most ``num_rows`` rows at a time, longest prompts first; yield True before each model call."""
        order = self._contexts.mask.sum(1).argsort(descending=True, stable=True)
        for places in order.split(num_rows) if len(order) else ():
            yield from self._calls(places)

    def columns(self) -> dict[str, Tensor]:
        """Return the columns of ``Engine.generate``."""
        places = torch.arange(self._max_tokens, device=self._lengths.device).expand(len(self._batch), -1)
        first = self._contexts.lengths[:, None]
        inside, is_new = places < first + self._lengths[:, None], places >= first
        # which of the new tokens is at each place, any at others
        index = (places - first).clamp(0, max(self._tokens.shape[1] - 1, 0))
        responses = self._tokens.gather(1, index) if self._tokens.numel() else torch.zeros_like(places)
        logprobs = self._logprobs.gather(1, index) if self._tokens.numel() else self._logprobs.new_zeros(places.shape)
        if "responses" in self._batch.columns:
            responses = responses.where(is_new, self._batch["responses"].long())
        prompts, prompt_mask = self._batch["prompts"], self._batch["prompt_mask"]
        return {
            "tokens": torch.cat([prompts, responses.where(inside, self._sampling.pad_token_id)], 1).int(),
            "attention_mask": torch.cat([prompt_mask, inside.to(torch.uint8)], 1),
            "response_mask": inside.to(torch.uint8),
            "finished": self._finished.to(torch.uint8),
            "rollout_logprobs": logprobs.where(inside & is_new, 0.0),
        }

    def _calls(self, places: Tensor) -> Iterator[bool]:
        prefill, prompts = self._prefill(places)
        for part in prefill.passes:
            yield True
            prefill.read(part)
        rows = self._start(places, prefill, prompts)
        for position in range(self._tokens.shape[1]):
            tokens = self._sample(rows, position)
            if position + 1 == self._tokens.shape[1]:
                return
            if (position + 1) % self._tokens_between_looks == 0:
                num_left = len(rows.ended) - int(rows.ended.sum())
                if not num_left:
                    return
                if num_left <= (1 - _DROP_SHARE) * len(rows.ended):
                    tokens = tokens[rows.drop_ended()]
            yield True
            rows.read(self._model, tokens)

    def _prefill(self, places: Tensor) -> tuple[Prefill, Tensor | None]:
        """Return the prompts of the rows at ``places``, and which each row has; None: row i has prompt i."""
        mask, tokens = self._contexts.mask[places], self._contexts.tokens[places]
        # without columns that are padding in all of them
        first, prompts = int(mask.argmax(1).min()), None
        mask, tokens = mask[:, first:], tokens[:, first:]
        if self._shares:
            distinct, prompts = torch.stack([tokens, mask], 1).unique(dim=0, return_inverse=True)
            tokens, mask = distinct.unbind(1)
        return Prefill(self._model, tokens, mask, tokens.shape[1] + self._tokens.shape[1]), prompts

    def _start(self, places: Tensor, prefill: Prefill, prompts: Tensor | None) -> _DecodingRows:
        """Return the rows at ``places`` before their first token."""
        logits, cache = prefill.joined(prompts)
        mask = prefill.mask if prompts is None else prefill.mask[prompts]
        ended, padded = torch.zeros_like(places, dtype=torch.bool), True if self._masks_once else None
        return _DecodingRows(places, mask, logits, ended, cache, padded)

    def _sample(self, rows: _DecodingRows, position: int) -> Tensor:
        """Sample and record the next token (m,) of every row; ``columns`` masks tokens behind an end."""
        places = rows.places
        number = self._contexts.lengths[places] + position
        step = None if self._steps is None else self._steps[places]
        tokens, logprobs = sample_tokens(rows.take_logits(), self._sampling, self._batch.rows[places], number, step)
        self._tokens[places, position], self._logprobs[places, position] = tokens, logprobs
        ends = (torch.isin(tokens, self._end_tokens) | self._completed_stops(rows, tokens)) & ~rows.ended
        self._lengths[places] = self._lengths[places].where(~ends, position + 1)
        self._finished[places] |= ends
        rows.ended = rows.ended | ends | (position + 1 >= self._limits[places])
        return tokens

    def _completed_stops(self, rows: _DecodingRows, tokens: Tensor) -> Tensor:
        """Return bool (m,): rows that have not ended and whose new token completes a stop string."""
        if not self._sampling.stop:
            return torch.zeros_like(rows.ended)
        completed = []
        for place, token, ended in zip(rows.places.tolist(), tokens.tolist(), rows.ended.tolist(), strict=True):
            if not ended:
                self._responses[place].append(token)
            completed.append(
                not ended and completes_stop(self._responses[place], self._sampling, self._searched_from[place])
            )
        return torch.tensor(completed, device=tokens.device)
