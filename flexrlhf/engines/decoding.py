"""Decode answers with a transformers model: rows of like prompts together, and no work for long on rows that ended.

An answer depends on its row's number and prompt alone: noise is a function of (seed, step, row, position), and
attention sees no other row. So rows may be sorted, batched and dropped in any way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.engines.sampling import sample_tokens

_WORTHWHILE = 0.25
"""The share of ended rows that pays for copying the keys and values of the others."""
_BROKEN = "\ufffd"
"""What decoders write for bytes that are no character, or not yet."""


@dataclass
class _Together:
    """Rows that are decoded together, at ``places`` of the batch.

    ``tokens`` (m, ...): what the model reads next; ``mask``: which columns hold text, of those read and these.
    """

    places: Tensor
    tokens: Tensor
    mask: Tensor
    ended: Tensor
    cache: DynamicCache

    def next_logits(self, model: PreTrainedModel) -> Tensor:
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        out = model(
            input_ids=self.tokens,
            attention_mask=self.mask,
            position_ids=positions[:, -self.tokens.shape[1] :],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def read_next(self, tokens: Tensor) -> None:
        self.tokens, self.mask = tokens[:, None], pad(self.mask, (0, 1), value=1)

    def drop_ended(self) -> None:
        left = (~self.ended).nonzero().squeeze(1)
        self.places, self.tokens, self.mask = self.places[left], self.tokens[left], self.mask[left]
        self.ended = self.ended[left]
        # layer by layer; unlike batch_select_indices, every kind of layer has it
        self.cache.reorder_cache(left)


class Decoding:
    """The answers to the prompts of ``batch``, of at most ``longest`` tokens."""

    def __init__(self, model: PreTrainedModel, batch: Batch, sampling: Sampling, longest: int) -> None:
        assert sampling.decode is not None or not sampling.stop, "stop strings are looked for in decoded text"
        self._model, self._batch, self._sampling = model, batch, sampling
        device = batch.rows.device
        self._ends = torch.tensor(sampling.eos_token_ids, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(len(batch), longest, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(len(batch), longest, device=device)
        self._lengths = torch.full((len(batch),), longest, device=device)
        self._finished = torch.zeros(len(batch), dtype=torch.bool, device=device)
        self._texts: list[list[int]] = [[] for _ in range(len(batch))] if sampling.stop else []

    def calls(self, num_rows: int) -> Iterator[bool]:
        """Decode at most ``num_rows`` rows at a time. Yields True before every call of the model."""
        order = self._batch["prompt_mask"].sum(1).argsort(descending=True, stable=True)
        for places in order.split(num_rows) if len(order) else ():
            yield from self._calls(places)

    def columns(self) -> dict[str, Tensor]:
        """What ``Engine.generate`` returns."""
        inside = torch.arange(self._tokens.shape[1], device=self._lengths.device) < self._lengths[:, None]
        prompts, prompt_mask = self._batch["prompts"], self._batch["prompt_mask"]
        answers = self._tokens.where(inside, self._sampling.pad_token_id)
        return {
            "tokens": torch.cat([prompts, answers], 1).int(),
            "attention_mask": torch.cat([prompt_mask, inside.to(torch.uint8)], 1),
            "response_mask": inside.to(torch.uint8),
            "finished": self._finished.to(torch.uint8),
            "rollout_logprobs": self._logprobs.where(inside, 0.0),
        }

    def _calls(self, places: Tensor) -> Iterator[bool]:
        texts = self._start(places)
        for position in range(self._tokens.shape[1]):
            yield True
            texts.read_next(self._draw(texts, position))
            num_left = len(texts.ended) - int(texts.ended.sum())
            if not num_left:
                return
            if num_left <= (1 - _WORTHWHILE) * len(texts.ended):
                texts.drop_ended()

    def _start(self, places: Tensor) -> _Together:
        mask = self._batch["prompt_mask"][places].long()
        first = int(mask.argmax(1).min())
        tokens = self._batch["prompts"][places, first:].long()
        ended = torch.zeros_like(places, dtype=torch.bool)
        return _Together(places, tokens, mask[:, first:], ended, DynamicCache(config=self._model.config))

    def _draw(self, texts: _Together, position: int) -> Tensor:
        """The next token of every row; what is drawn behind an end is left out of the columns."""
        places = texts.places
        tokens, logprobs = sample_tokens(
            texts.next_logits(self._model), self._sampling, self._batch.rows[places], position
        )
        self._tokens[places, position], self._logprobs[places, position] = tokens, logprobs
        ends = (torch.isin(tokens, self._ends) | self._completed_stops(texts, tokens)) & ~texts.ended
        self._lengths[places] = self._lengths[places].where(~ends, position + 1)
        self._finished[places] |= ends
        texts.ended = texts.ended | ends
        return tokens

    def _completed_stops(self, texts: _Together, tokens: Tensor) -> Tensor:
        """In which rows that have not ended the token completes a stop string."""
        if not self._sampling.stop:
            return torch.zeros_like(texts.ended)
        rows = zip(texts.places.tolist(), tokens.tolist(), texts.ended.tolist(), strict=True)
        completed = [not ended and self._completes_stop(place, token) for place, token, ended in rows]
        return torch.tensor(completed, device=tokens.device)

    def _completes_stop(self, place: int, token: int) -> bool:
        self._texts[place].append(token)
        return completes_stop(self._texts[place], self._sampling)


def completes_stop(answer: Sequence[int], sampling: Sampling) -> bool:
    """Whether the last token completes a stop string, where those before it completed none.

    As in vLLM a stop string counts when it is completed behind the first ``min_tokens`` tokens.
    """
    decode = sampling.decode
    assert decode is not None, "stop strings are looked for in decoded text"
    if len(answer) <= sampling.min_tokens:
        return False
    first = _first_that_matters(answer, decode, max(map(len, sampling.stop)))
    text, early = decode(answer[first:]), answer[first : sampling.min_tokens]
    num_early = len(decode(early).rstrip(_BROKEN)) if early else 0
    return any(text.find(stop, max(0, num_early - len(stop) + 1)) >= 0 for stop in sampling.stop)


def _first_that_matters(answer: Sequence[int], decode: Callable[[Sequence[int]], str], longest: int) -> int:
    """Where a tail of ``answer`` begins that shows any stop string of ``longest`` characters its last token completes.

    Where tokens are cut, decoders may drop a space or find no character; then the tail is taken longer.
    """
    width = longest + 8
    while width < len(answer):
        before = decode(answer[-width:-1])
        if len(before) > longest and _BROKEN not in before:
            return len(answer) - width
        width *= 2
    return 0
