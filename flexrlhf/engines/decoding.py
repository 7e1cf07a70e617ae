"""Decode responses with a transformers model, in slots of a cache or in waves of rows.

A response depends on its row number and its prompt alone: noise is a function of (seed, step, row, position), and
attention reads no other row. So rows may be sorted, batched, and dropped once they have ended, and samples of one
prompt read it once.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flexrlhf.engines.base import Batch, RowSource, Sampling
from flexrlhf.engines.decoded_rows import DueRows, LiveRows, WaitingRow
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.engines.router_replay import Routers
from flexrlhf.engines.sampling import completes_stop, sample_tokens
from flexrlhf.engines.slots import RowKey, Slots
from flexrlhf.engines.waves import Wave
from flexrlhf.placement.rollout import KeptSlots

_DROP_SHARE = 0.25
"""Share of ended rows from which on copying the KV cache of the others pays off."""
_REFILLED = 8
"""One of so many slots are free when waiting rows get them, as each time costs a pass over their prompts."""


def tokens_between_looks(device: torch.device) -> int:
    """Return the tokens after which the host looks for rows that have ended, for which it waits for a GPU."""
    return 1 if device.type == "cpu" else 8


class KeptRows:
    """Rows of one model that keep their keys and values from call to call, in slots with room for all of them.

    settings: of the slots.
    """

    def __init__(self, settings: KeptSlots) -> None:
        self._settings, self._period = settings, 0
        self._slots: Slots | None = None

    def slots_at(
        self,
        step: int,
        model: PreTrainedModel,
        columns: int,
        settings: PassSettings,
        device: torch.device,
        routers: Routers | None,
    ) -> Slots:
        """Return the slots at a call of ``step``, with the rows that are under way; the other arguments are those of
        ``Slots``, the same at every call."""
        kept, period = self._settings, self._settings.period(step)
        if self._slots is None:
            self._slots = Slots(model, kept.rows, columns, settings, device, routers, keeps=True)
        oldest = step if period != self._period else step - kept.segments + 1
        self._period = period
        self._slots.begin_call(oldest)
        return self._slots

    def drop(self) -> None:
        """Drop the keys and values of all rows."""
        if self._slots is not None:
            self._slots.begin_call(sys.maxsize)


class Decoding:
    """Responses of at most ``max_tokens`` tokens to the prompts of ``batch``, decoded call by call of the model.

    settings:  by which passes are laid out.
    routers:   of the model, whose experts are recorded; None: none are.
    source:    of further rows, decoded in slots with these, which receives each row that has ended; None: there are no
               others, and ``columns`` returns all of them.
    kept:      rows of calls before that keep their keys and values; None: none do.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: Batch,
        sampling: Sampling,
        max_tokens: int,
        settings: PassSettings,
        routers: Routers | None = None,
        source: RowSource | None = None,
        kept: KeptRows | None = None,
    ) -> None:
        assert settings.slots or (source is None and kept is None), "slots alone keep rows, or take more of them"
        self._model, self._sampling, self._source, self._kept = model, sampling, source, kept
        self._settings = settings.within(batch.tokens)
        self._routers, self._max_tokens = routers, max_tokens
        device = batch.rows.device
        self._tokens_between_looks = tokens_between_looks(device)
        self._end_tokens = torch.tensor(sampling.eos_token_ids, dtype=torch.int64, device=device)
        self.num_rows = 0
        """Rows that were due so far."""
        # of rows with stop strings, by place: these, the tokens of the response, and how many are not searched
        self._searched = dict[int, tuple[tuple[str, ...], list[int], int]]()
        self._first = self._due(batch)
        self._shares = settings.shares and batch.samples_per_prompt > 1
        self._text_width = batch["prompts"].shape[1] + max_tokens
        self._most = max_tokens if source is not None else int(self._first.limits.max()) if len(batch) else 0
        # rows that have no new token
        none = self._live(self._first, (self._first.limits <= 0).nonzero().squeeze(1))
        if routers is not None:
            shape = (len(none.places), self._text_width, routers.layers, routers.top)
            none.experts = torch.zeros(shape, dtype=routers.dtype, device=device)
        self._ended = [none]

    def _due(self, batch: Batch) -> DueRows:
        due = DueRows(batch, self._sampling, self._max_tokens, self.num_rows)
        stops = batch.stops_of(self._sampling)
        if any(stops):
            each = zip(stops, due.responses(), batch.searched_from, strict=True)
            self._searched |= {place: searched for place, searched in enumerate(each, self.num_rows) if searched[0]}
        self.num_rows += len(batch)
        return due

    def _live(self, due: DueRows, index: Tensor) -> LiveRows:
        # a column more, for tokens behind the limit of a row whose end the host has not seen yet
        return due.live(index, self._most + 1)

    def calls(self, num_rows: int) -> Iterator[bool]:
        """Decode at most ``num_rows`` rows at a time, longest prompts first; yield True before each model call."""
        if self._settings.slots:
            yield from self._in_slots(num_rows)
            return
        places = [row.place for row in self._first.waiting(shares=False)]
        for wave in torch.tensor(places, device=self._end_tokens.device).split(num_rows) if places else ():
            yield from self._in_wave(wave)

    def columns(self) -> dict[str, Tensor]:
        """Return the columns of ``Engine.generate``."""
        ended = self._ended[0].joined(*self._ended[1:])
        return self._columns(ended.select(ended.places.argsort()), self._first.batch)

    def _columns(self, ended: LiveRows, batch: Batch) -> dict[str, Tensor]:
        return ended.columns(batch, self._max_tokens, self._sampling.pad_token_id)

    def _slots(self, num_rows: int, waiting: Sequence[WaitingRow]) -> Slots:
        """Return slots for at most ``num_rows`` rows at a time, of which ``waiting`` come first, or the kept ones."""
        source, device, routers = self._source, self._end_tokens.device, self._routers
        if self._kept is not None:
            return self._kept.slots_at(
                self._sampling.step, self._model, self._text_width, self._settings, device, routers
            )
        if source is None:
            size, columns = len(waiting), max((row.length + row.limit for row in waiting), default=0)
        else:
            size, columns = source.most_rows, self._text_width
        size, keeps = min(num_rows, size), source is not None
        return Slots(self._model, size, columns, self._settings, device, routers, keeps)

    def _waiting(self, due: DueRows) -> list[WaitingRow]:
        return due.waiting(self._settings.shares, self._kept is not None)

    def _in_slots(self, num_rows: int) -> Iterator[bool]:
        """Decode rows, each as soon as it has a slot."""
        waiting, source, device = deque(self._waiting(self._first)), self._source, self._end_tokens.device
        is_greedy, slots = self._sampling.temperature == 0, self._slots(num_rows, waiting)
        live, placed, last, step = self._live(self._first, self._first.limits[:0]), list[WaitingRow](), list[int](), 0
        looks = True
        while waiting or placed or source is not None:
            free = slots.size - len(placed)
            if source is not None and looks and len(waiting) < free:
                batch = source.due(wait=not (waiting or placed))
                if batch is None:
                    source = None
                else:
                    waiting.extend(self._waiting(self._due(batch)))
            if waiting and (not placed or free >= min(-(-slots.size // _REFILLED), len(waiting))):
                new = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                for due, group in groupby(new, lambda row: row.due):
                    rows = list(group)
                    holders = {
                        row.context: slot for slot, row in reversed(list(enumerate(placed + rows))) if row.due is due
                    }
                    index = torch.tensor([row.place for row in rows], device=device)
                    lengths, sources = [row.length for row in rows], [holders[row.context] for row in rows]
                    keys = [RowKey(row.step, row.row, is_greedy) for row in rows]
                    yield from slots.add(due.texts(index), lengths, sources, keys)
                    live, placed = live.joined(self._live(due, index)), placed + rows
                    last += [step + row.limit for row in rows]
            if not placed:
                continue
            yield True
            sampled = self._sample(live, slots.next_logits())
            slots.append(sampled)
            step += 1
            looks = step % self._tokens_between_looks == 0 or step == min(last)
            if looks:
                ended = live.ended.tolist()
                if any(ended):
                    self._end([slot for slot, has_ended in enumerate(ended) if has_ended], live, placed, slots)
                    counts = live.lengths.tolist() if slots.keeps else []
                    left = slots.remove(ended, [row.length + n - 1 for row, n in zip(placed, counts, strict=False)])
                    live = live.select(torch.tensor(left, dtype=torch.int64, device=device))
                    placed, last = [placed[slot] for slot in left], [last[slot] for slot in left]

    def _end(self, numbers: Sequence[int], live: LiveRows, placed: Sequence[WaitingRow], slots: Slots) -> None:
        """Keep the rows of the slots ``numbers``, which have ended, or return them to the source."""
        ended = live.select(torch.tensor(numbers, device=live.places.device))
        if self._routers is not None:
            ended.keep_experts(slots.experts(numbers), torch.zeros_like(ended.places), self._text_width)
        if self._source is None:
            self._ended.append(ended)
            return
        rows = [placed[number] for number in numbers]
        for due in dict.fromkeys(row.due for row in rows):
            own = [number for number, row in enumerate(rows) if row.due is due]
            places, index = torch.tensor([[rows[number].place for number in own], own], device=live.places.device)
            for place in (places + due.first).tolist() if self._searched else ():
                self._searched.pop(place, None)
            batch = due.batch.select(places)
            self._source.receive(batch, self._columns(ended.select(index), batch))

    def _in_wave(self, places: Tensor) -> Iterator[bool]:
        """Decode the rows at ``places`` together until all of them have ended."""
        live, wave, most = self._live(self._first, places), self._wave(places), self._most
        yield True
        logits, width = wave.read_prompts(), wave.columns
        if self._routers is not None:
            live.experts = wave.experts.new_zeros(len(places), width + most, *wave.experts.shape[2:])
            live.experts[:, :width] = wave.experts
        for number in range(1, most + 1):
            tokens = self._sample(live, logits)
            if number == most:
                break
            if number % self._tokens_between_looks == 0:
                num_left = len(live.ended) - int(live.ended.sum())
                if not num_left:
                    break
                if num_left <= (1 - _DROP_SHARE) * len(live.ended):
                    left, ended = live.ended.byte().argsort(stable=True).tensor_split([num_left])
                    self._keep(live.select(ended), width)
                    live, tokens = live.select(left), tokens[left]
                    wave.keep(left)
            yield True
            logits = wave.read(tokens)
            if live.experts is not None:
                live.experts[:, width + number - 1] = wave.experts[:, 0]
        self._keep(live, width)

    def _keep(self, ended: LiveRows, width: int) -> None:
        """Keep rows of a wave. ``width``: its columns before their first new tokens."""
        if ended.experts is not None:
            ended.keep_experts(
                ended.experts,
                width - self._first.batch["prompts"].shape[1] + ended.begins - ended.first,
                self._text_width,
            )
        self._ended.append(ended)

    def _wave(self, places: Tensor) -> Wave:
        mask, tokens = self._first.mask[places], self._first.tokens[places]
        # without columns that are padding in all of them
        first, prompts = int(mask.argmax(1).min()), None
        mask, tokens = mask[:, first:], tokens[:, first:]
        if self._shares:
            distinct, prompts = torch.stack([tokens, mask], 1).unique(dim=0, return_inverse=True)
            tokens, mask = distinct.unbind(1)
        return Wave(self._model, tokens, mask, prompts, tokens.shape[1] + self._most, self._routers)

    def _sample(self, live: LiveRows, logits: Tensor) -> Tensor:
        """Sample and record the next token (m,) of every row; columns mask tokens behind an end."""
        number = live.number
        tokens, logprobs = sample_tokens(logits, self._sampling, live.rows, live.first + number, live.steps)
        at = number.clamp(max=self._most)[:, None]
        live.tokens.scatter_(1, at, tokens[:, None])
        live.logprobs.scatter_(1, at, logprobs[:, None])
        ends = (torch.isin(tokens, self._end_tokens) | self._completed_stops(live, tokens)) & ~live.ended
        live.number = number + 1
        live.lengths = live.lengths.where(~ends, live.number)
        live.finished = live.finished | ends
        live.ended = live.ended | ends | (live.number >= live.limits)
        return tokens

    def _completed_stops(self, live: LiveRows, tokens: Tensor) -> Tensor:
        """Return bool (m,): rows that have not ended and whose new token completes a stop string."""
        if not self._searched:
            return torch.zeros_like(live.ended)
        completed = []
        for place, token, ended in zip(live.places.tolist(), tokens.tolist(), live.ended.tolist(), strict=True):
            stops, response, first = self._searched.get(place, ((), [], 0))
            is_searched = bool(stops) and not ended
            if is_searched:
                response.append(token)
            completed.append(is_searched and completes_stop(response, self._sampling, first, stops))
        return torch.tensor(completed, device=tokens.device)
