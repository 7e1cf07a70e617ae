"""Decode responses with a transformers model, in slots of a cache or in waves of rows.

A response depends on its row number and its prompt alone: noise is a function of (seed, step, row, position), and
attention reads no other row. So rows may be sorted, batched, and dropped once they have ended, and samples of one
prompt read it once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.engines.router_replay import Routers
from flexrlhf.engines.sampling import completes_stop, sample_tokens
from flexrlhf.engines.slots import Slots
from flexrlhf.engines.waves import Wave
from flexrlhf.operators.columns import Column

_DROP_SHARE = 0.25
"""Share of ended rows from which on copying the KV cache of the others pays off."""
_REFILLED = 8
"""One of so many slots are free when waiting rows get them, as each time costs a pass over their prompts."""


def tokens_between_looks(device: torch.device) -> int:
    """Return the tokens after which the host looks for rows that have ended, for which it waits for a GPU."""
    return 1 if device.type == "cpu" else 8


@dataclass
class _LiveRows:
    """Rows that are decoded in the same passes, each field of shape (m,).

    places:  int64, their indices in the batch.
    rows:    int64, their row numbers.
    steps:   int64, of their noise.
    first:   int64, tokens that their responses had before.
    limits:  int64, new tokens, if none ends them before.
    number:  int64, new tokens so far.
    ended:   bool, whether the response has ended.
    """

    places: Tensor
    rows: Tensor
    steps: Tensor
    first: Tensor
    limits: Tensor
    number: Tensor
    ended: Tensor

    def select(self, index: Tensor) -> _LiveRows:
        """Return the rows at ``index`` (k,)."""
        return _LiveRows(*(getattr(self, field.name)[index] for field in fields(self)))

    def joined(self, others: _LiveRows) -> _LiveRows:
        """Return these rows and ``others``."""
        return _LiveRows(*(torch.cat([getattr(self, f.name), getattr(others, f.name)]) for f in fields(self)))


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

    settings:  by which passes are laid out.
    routers:   of the model, whose experts are recorded; None: none are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: Batch,
        sampling: Sampling,
        max_tokens: int,
        settings: PassSettings,
        routers: Routers | None = None,
    ) -> None:
        assert sampling.decode is not None or not sampling.stop, "stop strings are searched in decoded text"
        self._model, self._batch, self._sampling = model, batch, sampling
        self._settings = settings.within(batch.tokens)
        self._routers = routers
        self._shares = settings.shares and batch.samples_per_prompt > 1
        device = batch.rows.device
        self._tokens_between_looks = tokens_between_looks(device)
        self._end_tokens = torch.tensor(sampling.eos_token_ids, dtype=torch.int64, device=device)
        self._contexts, self._max_tokens = _Contexts(batch), max_tokens
        # new tokens of each row, if none ends it before
        self._limits = batch.new_tokens(max_tokens)
        most = int(self._limits.max()) if len(batch) else 0
        # a column more, for tokens behind the limit of a row whose end the host has not seen yet
        self._tokens = torch.zeros(len(batch), most + 1, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(len(batch), most + 1, device=device)
        self._experts = torch.zeros(0)
        if routers is not None:
            shape = (len(batch), self._contexts.tokens.shape[1] + max_tokens, routers.layers, routers.top)
            self._experts = torch.zeros(shape, dtype=routers.dtype, device=device)
        self._lengths = self._limits.clone()
        self._finished = torch.zeros(len(batch), dtype=torch.bool, device=device)
        self._responses: list[list[int]] = self._given_responses() if sampling.stop else []
        self._searched_from = batch.searched_from if sampling.stop else []

    def _given_responses(self) -> list[list[int]]:
        """Return the tokens that each response has before it is continued."""
        lengths = self._contexts.lengths.tolist()
        if "responses" not in self._batch.columns:
            return [[] for _ in lengths]
        return [row[:length] for row, length in zip(self._batch["responses"].tolist(), lengths, strict=True)]

    def calls(self, num_rows: int) -> Iterator[bool]:
        """Decode at most ``num_rows`` rows at a time, longest prompts first; yield True before each model call."""
        order = self._contexts.mask.sum(1).argsort(descending=True, stable=True)
        if not len(order):
            return
        if self._settings.slots:
            yield from self._in_slots(order, num_rows)
            return
        for places in order.split(num_rows):
            yield from self._in_wave(places)

    def columns(self) -> dict[str, Tensor]:
        """Return the columns of ``Engine.generate``."""
        places = torch.arange(self._max_tokens, device=self._lengths.device).expand(len(self._batch), -1)
        first = self._contexts.lengths[:, None]
        inside, is_new = places < first + self._lengths[:, None], places >= first
        # which of the new tokens is at each place, any at others
        index = (places - first).clamp(0, self._tokens.shape[1] - 1)
        responses, logprobs = self._tokens.gather(1, index), self._logprobs.gather(1, index)
        if "responses" in self._batch.columns:
            responses = responses.where(is_new, self._batch["responses"].long())
        prompts, prompt_mask = self._batch["prompts"], self._batch["prompt_mask"]
        text_mask = torch.cat([prompt_mask, inside.to(torch.uint8)], 1)
        return self._expert_columns(text_mask) | {
            "tokens": torch.cat([prompts, responses.where(inside, self._sampling.pad_token_id)], 1).int(),
            "attention_mask": text_mask,
            "response_mask": inside.to(torch.uint8),
            "finished": self._finished.to(torch.uint8),
            "rollout_logprobs": logprobs.where(inside & is_new, 0.0),
        }

    def _expert_columns(self, text_mask: Tensor) -> dict[str, Tensor]:
        """Return the column of experts, 0 at padding and at the last token of each row, which no pass has read."""
        if self._routers is None:
            return {}
        was_read, (rows, width) = pad(text_mask[:, 1:], (0, 1)) * text_mask, text_mask.shape
        # contexts end in one column, prompts in the one before responses
        first = self._contexts.tokens.shape[1] - (width - self._max_tokens) - self._contexts.lengths
        places = torch.arange(width, device=text_mask.device) + first[:, None]
        experts = self._experts[torch.arange(rows, device=text_mask.device)[:, None], places]
        return {Column.EXPERTS: (experts * was_read[:, :, None, None]).flatten(1).view(torch.uint8)}

    def _in_slots(self, order: Tensor, num_rows: int) -> Iterator[bool]:
        """Decode the rows ``order``, each as soon as it has a slot."""
        lengths, limits, prompts = self._counted()
        waiting = deque(place for place in order.tolist() if limits[place] > 0)
        columns = max((lengths[place] + limits[place] for place in waiting), default=0)
        size, device = min(num_rows, len(waiting)), order.device
        slots = Slots(self._model, size, columns, self._settings, device, self._routers)
        tokens = self._contexts.tokens
        behind = torch.arange(tokens.shape[1], device=tokens.device)
        live, placed, last, step = self._live(order[:0]), list[int](), list[int](), 0
        while waiting or placed:
            free = slots.size - len(placed)
            if waiting and (not placed or free >= min(-(-slots.size // _REFILLED), len(waiting))):
                new = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                holders = {prompts[place]: slot for slot, place in reversed(list(enumerate(placed + new)))}
                index = torch.tensor(new, device=tokens.device)
                first = (tokens.shape[1] - self._contexts.mask[index].sum(1))[:, None]
                texts = tokens[index].gather(1, (first + behind).clamp(max=tokens.shape[1] - 1))
                yield from slots.add(texts, [lengths[place] for place in new], [holders[prompts[p]] for p in new])
                live, placed = live.joined(self._live(index)), placed + new
                last += [step + limits[place] for place in new]
            yield True
            sampled = self._sample(live, slots.next_logits())
            slots.append(sampled)
            step += 1
            if step % self._tokens_between_looks == 0 or step == min(last):
                ended = live.ended.tolist()
                if any(ended):
                    if self._routers is not None:
                        self._keep_experts(slots, [slot for slot, has_ended in enumerate(ended) if has_ended], placed)
                    left = slots.remove(ended)
                    live = live.select(torch.tensor(left, dtype=torch.int64, device=tokens.device))
                    placed, last = [placed[slot] for slot in left], [last[slot] for slot in left]

    def _keep_experts(self, slots: Slots, ended: Sequence[int], placed: Sequence[int]) -> None:
        """Keep the experts of the rows in the slots ``ended``. ``placed``: place of the row in each slot."""
        experts, places = slots.experts(ended), [placed[slot] for slot in ended]
        mask, width = self._contexts.mask[places], self._experts.shape[1]
        first = mask.shape[1] - mask.sum(1, keepdim=True)
        columns = (torch.arange(width, device=mask.device) - first).clamp(0, experts.shape[1] - 1)
        self._experts[places] = experts[torch.arange(len(places), device=mask.device)[:, None], columns]

    def _counted(self) -> tuple[list[int], list[int], list[int]]:
        """Return for each row the tokens before its next one, its limit, and which distinct prompt it has."""
        mask, tokens = self._contexts.mask, self._contexts.tokens
        prompts = torch.arange(len(mask), device=mask.device)
        if self._shares:
            _, prompts = torch.stack([tokens, mask], 1).unique(dim=0, return_inverse=True)
        lengths, limits, numbers = torch.stack([mask.sum(1), self._limits, prompts]).tolist()
        return lengths, limits, numbers

    def _in_wave(self, places: Tensor) -> Iterator[bool]:
        """Decode the rows at ``places`` together until all of them have ended."""
        live, wave = self._live(places), self._wave(places)
        most = self._tokens.shape[1] - 1
        yield True
        logits, prompt = wave.read_prompts(), self._contexts.tokens.shape[1]
        if self._routers is not None:
            self._experts[places, prompt - wave.experts.shape[1] : prompt] = wave.experts
        for number in range(1, most + 1):
            tokens = self._sample(live, logits)
            if number == most:
                return
            if number % self._tokens_between_looks == 0:
                num_left = len(live.ended) - int(live.ended.sum())
                if not num_left:
                    return
                if num_left <= (1 - _DROP_SHARE) * len(live.ended):
                    left = (~live.ended).nonzero().squeeze(1)
                    live, tokens = live.select(left), tokens[left]
                    wave.keep(left)
            yield True
            logits = wave.read(tokens)
            if self._routers is not None:
                self._experts[live.places, prompt + number - 1] = wave.experts[:, 0]

    def _wave(self, places: Tensor) -> Wave:
        mask, tokens = self._contexts.mask[places], self._contexts.tokens[places]
        # without columns that are padding in all of them
        first, prompts = int(mask.argmax(1).min()), None
        mask, tokens = mask[:, first:], tokens[:, first:]
        if self._shares:
            distinct, prompts = torch.stack([tokens, mask], 1).unique(dim=0, return_inverse=True)
            tokens, mask = distinct.unbind(1)
        limit = tokens.shape[1] + self._tokens.shape[1] - 1
        return Wave(self._model, tokens, mask, prompts, limit, self._routers)

    def _live(self, places: Tensor) -> _LiveRows:
        """Return the rows at ``places`` before their first new token."""
        steps = self._batch.columns.get("noise_step")
        return _LiveRows(
            places,
            self._batch.rows[places],
            torch.full_like(places, self._sampling.step) if steps is None else steps[places],
            self._contexts.lengths[places],
            self._limits[places],
            torch.zeros_like(places),
            torch.zeros_like(places, dtype=torch.bool),
        )

    def _sample(self, live: _LiveRows, logits: Tensor) -> Tensor:
        """Sample and record the next token (m,) of every row; ``columns`` masks tokens behind an end."""
        places, number = live.places, live.number
        tokens, logprobs = sample_tokens(logits, self._sampling, live.rows, live.first + number, live.steps)
        at = number.clamp(max=self._tokens.shape[1] - 1)
        self._tokens[places, at], self._logprobs[places, at] = tokens, logprobs
        ends = (torch.isin(tokens, self._end_tokens) | self._completed_stops(live, tokens)) & ~live.ended
        live.number = number + 1
        self._lengths[places] = self._lengths[places].where(~ends, live.number)
        self._finished[places] |= ends
        live.ended = live.ended | ends | (live.number >= live.limits)
        return tokens

    def _completed_stops(self, live: _LiveRows, tokens: Tensor) -> Tensor:
        """Return bool (m,): rows that have not ended and whose new token completes a stop string."""
        if not self._sampling.stop:
            return torch.zeros_like(live.ended)
        completed = []
        for place, token, ended in zip(live.places.tolist(), tokens.tolist(), live.ended.tolist(), strict=True):
            if not ended:
                self._responses[place].append(token)
            completed.append(
                not ended and completes_stop(self._responses[place], self._sampling, self._searched_from[place])
            )
        return torch.tensor(completed, device=tokens.device)
