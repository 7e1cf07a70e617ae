"""Micro-batches: rows of a batch laid out for one pass of a model, without padding between prompt and response.

``memory/packed_rows.py`` decides which sequences are in which row of a pass. Here tokens, positions and attention of
the rows are built from that, and the places at which the outputs of each sequence are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexrlhf.engines.attended_spans import TokenSpan, copied_to
from flexrlhf.engines.attention import PassAttention, SharedAttention
from flexrlhf.engines.base import Batch
from flexrlhf.engines.batch_texts import BatchTexts, PassUnit
from flexrlhf.engines.context_parallel import shared_attention
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.engines.row_split import RowPart, RowSplit
from flexrlhf.memory.packed_rows import PackedPass
from flexrlhf.operators.columns import Column


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch, and m rows of W tokens in which their sequences are computed.

    batch:           the n rows, in full width; samples of one prompt are neighbours.
    order:           int64 (n,), their places in the batch that was split.
    tokens:          int64 (m, W).
    position_ids:    int64 (m, W), 0 at the first token of each sequence.
    attended:        the tokens that attend to each other; None: ``attention_mask`` is read.
    numbers:         int64 (2, m, W): the sequence of each token, and the prompt that it follows; -1 of padding; None
                     without a mask.
    mask_dtype:      of the mask that separates several sequences in a row; None: rows with one each, in a model that
                     masks padding itself.
    places:          int64 (n, L), places of the tokens of each sequence in the flattened m x W; 0 behind its end.
    prompt_lengths:  int64 (n,), tokens of each prompt.
    text_lengths:    int64 (n,), tokens of each sequence.
    scored:          int64 (k,), places of the tokens of responses in the flattened n x r, r the longest response.
    shortest_prompt, longest_response: tokens.
    num_texts:       different sequences.
    expert_places:   int64 (m, W), for each token the place of its recorded experts in the flattened n x (P+R), -1 where
                     none are; None: the batch has no recorded experts.
    part:            part of the rows on this rank; None: all of them.
    idle:            whether it stands for no row, so that its outputs do not count.
    """

    batch: Batch
    order: Tensor
    tokens: Tensor
    position_ids: Tensor
    attended: PassAttention | None
    numbers: Tensor | None
    mask_dtype: torch.dtype | None
    places: Tensor
    prompt_lengths: Tensor
    text_lengths: Tensor
    scored: Tensor
    shortest_prompt: int
    longest_response: int
    num_texts: int
    expert_places: Tensor | None = None
    part: RowPart | None = None
    idle: bool = False

    @classmethod
    def split(cls, batch: Batch, settings: PassSettings) -> Iterator[MicroBatch]:
        """Split each block of ``batch`` into passes of at most ``batch.tokens`` or ``settings.budget`` computed tokens.

        A micro-batch has at least one sequence, whatever its tokens; if the batch compares them, all samples of a
        prompt.
        """
        if not len(batch):
            return
        texts, settings = BatchTexts.of(batch, settings.lengths), settings.within(batch.tokens)
        for prompts in batch.blocks or (range(len(texts.same)),):
            yield from _composed(batch, prompts, texts, settings)

    @classmethod
    def one_idle(cls, settings: PassSettings, device: torch.device) -> MicroBatch:
        """Return one row of two tokens, for ranks that must call as often as others and have no rows left."""
        lengths = settings.lengths
        tokens = torch.zeros(1, lengths.total, dtype=torch.int32, device=device)
        mask = torch.zeros(1, lengths.total, dtype=torch.uint8, device=device)
        mask[:, lengths.prompt - 1 : lengths.prompt + 1] = 1
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        batch = Batch({"tokens": tokens, "attention_mask": mask}, rows, 1)
        (piece,) = cls.split(batch, settings)
        return replace(piece, idle=True)

    def own_part(self, split: RowSplit | None) -> tuple[Tensor, Tensor, SharedAttention]:
        """Return the tokens (m, w) and positions (m, w) of the pass that this rank computes, and their attention."""
        assert self.attended is not None, "rows attend by the lengths of sequences"
        if self.part is None:
            return self.tokens, self.position_ids, self.attended
        assert split is not None, "parts are of rows that are split"
        columns, attended = self.part.columns, shared_attention(self.attended, split, self.width)
        return self.tokens[:, columns], self.position_ids[:, columns], attended

    @property
    def width(self) -> int:
        """W."""
        return self.tokens.shape[1]

    @property
    def has_mask(self) -> bool:
        """Whether attention reads a mask: causal attention suits one sequence in a row, behind which all padding is."""
        return self.numbers is not None and (self.mask_dtype is None or self.num_texts != len(self.tokens))

    @property
    def attention_mask(self) -> Tensor | None:
        """int64 (m, W), 1 at tokens of sequences; None where causal attention is enough; of rows with more sequences
        (m, 1, W, W), added to attention scores: 0 where a token is attended to, else the least number.

        Made anew for each pass, because the masks of a whole mini-batch are larger than a pass.
        """
        if not self.has_mask or self.numbers is None:
            return None
        texts, prompts = self.numbers.unbind()
        if self.mask_dtype is None:
            return (texts >= 0).long()
        keys = texts[:, None, :]
        is_seen = ((texts[:, :, None] == keys) | (prompts[:, :, None] == keys)).tril()
        mask = torch.zeros(is_seen.shape, dtype=self.mask_dtype, device=texts.device)
        return mask.masked_fill_(~is_seen, torch.finfo(self.mask_dtype).min)[:, None]

    @property
    def text_mask(self) -> Tensor:
        """Tokens of each sequence: bool (n, L)."""
        return _columns(self.places.shape[1], self.places) < self.text_lengths[:, None]

    @property
    def text_tokens(self) -> Tensor:
        """Tokens of each sequence: int64 (n, L), anything behind its end."""
        return self.tokens.flatten()[self.places]

    @property
    def state_mask(self) -> Tensor:
        """Whether response token t, or the end of the sequence, has a token before it: bool (n, r + 1)."""
        return self._state_columns < self.text_lengths[:, None]

    @property
    def state_places(self) -> Tensor:
        """Places of the token before response token t, and of the last token: int64 (n, r + 1), r the longest response.

        The model's outputs there predict the response token, or value the sequence so far.
        """
        last = self.places.shape[1] - 1
        return self.places.gather(1, self._state_columns.clamp(0, last))

    @property
    def predicting_places(self) -> Tensor:
        """Places of the tokens that come before response tokens: int64 (k,)."""
        return self.state_places[:, :-1].flatten()[self.scored]

    @property
    def scored_tokens(self) -> Tensor:
        """Tokens of all responses: int64 (k,)."""
        return self.tokens.flatten()[self.state_places[:, 1:].flatten()[self.scored]]

    @property
    def _state_columns(self) -> Tensor:
        return self.prompt_lengths[:, None] - 1 + _columns(self.longest_response + 1, self.places)


def _columns(width: int, like: Tensor) -> Tensor:
    return torch.arange(width, device=like.device)[None]


def _composed(batch: Batch, prompts: Sequence[int], texts: BatchTexts, settings: PassSettings) -> Iterator[MicroBatch]:
    """Yield the passes of ``prompts``, which depend on these alone."""
    units = [unit for number in prompts for unit in texts.units(number, settings, batch.compares)]
    for narrow in PackedPass.all_of(
        tuple(unit.groups for unit in units), settings.budget, settings.packs, settings.masks
    ):
        each = replace(narrow, width=-(-narrow.width // settings.multiple) * settings.multiple)
        starts = {start.row: start for start in _starts(each, units)}
        num_texts = len(starts)
        for unit in each.units:
            starts |= {row: starts[first]._replace(row=row) for row, first in units[unit].repeated.items()}
        numbers = [starts[row] for row in sorted(starts)]
        fills = batch.rows.device.type != "cpu"
        attended = None if settings.masks else _attended(each, units, fills, settings.pins)
        yield _laid_out(batch, numbers, num_texts, texts, each, settings, attended)


class _Start(NamedTuple):
    """Places at which a sequence starts in the flattened rows of a pass.

    row:       of the batch.
    prompt:    place of the prompt's first token.
    response:  place of the response's first token.
    number:    of the response: its tokens attend to the prompt, and to tokens of the same number.
    """

    row: int
    prompt: int
    response: int
    number: int


def _starts(each: PackedPass, units: Sequence[PassUnit]) -> Iterator[_Start]:
    """Yield the sequences of the rows of a pass."""
    for start, row in enumerate(each.rows):
        place = start * each.width
        for unit, index in row:
            groups = units[unit].groups
            group, before = groups[index], sum(len(other.responses) for other in groups[:index])
            prompt, is_alone = place, len(group.responses) == 1
            place += group.prompt
            for number, response in zip(units[unit].rows[before:], group.responses, strict=False):
                yield _Start(number, prompt, place, prompt if is_alone else place)
                place += response


def _attended(each: PackedPass, units: Sequence[PassUnit], fills: bool, pins: bool) -> PassAttention:
    """Return which tokens of the rows of a pass attend to each other.

    fills: whether padding behind the sequences of a row is one more, for kernels that would skip places by copies.
    """
    own: list[TokenSpan] = []
    responses: list[TokenSpan] = []
    prompts: list[TokenSpan] = []
    for number, row in enumerate(each.rows):
        place = number * each.width
        for unit, index in row:
            group = units[unit].groups[index]
            is_alone = len(group.responses) == 1
            parts = (group.tokens,) if is_alone else (group.prompt, *group.responses)
            if not is_alone and (answered := sum(group.responses)):
                responses.append((place + group.prompt, answered))
                prompts.append((place, group.prompt))
            for length in filter(None, parts):
                own.append((place, length))
                place += length
        left = (number + 1) * each.width - place
        if fills and left:
            own.append((place, left))
    return PassAttention.of(own, responses, prompts, pins)


def _laid_out(
    batch: Batch,
    starts: Sequence[_Start],
    num_texts: int,
    texts: BatchTexts,
    each: PackedPass,
    settings: PassSettings,
    attended: PassAttention | None,
) -> MicroBatch:
    """Build the micro-batch of one pass. ``starts``: in the order of the batch; ``num_texts``: different ones."""
    shape = (len(each.rows), each.width)
    order, prompt, response, number = np.array(starts, dtype=np.int64).T
    prompts, responses = texts.prompts[order], texts.responses[order]
    length = prompts + responses
    columns = np.arange(length.max())
    is_token, in_prompt = columns < length[:, None], columns < prompts[:, None]
    places = np.where(in_prompt, prompt[:, None], (response - prompts)[:, None]) + columns
    places = np.where(is_token, places, 0)
    stored = (settings.lengths.prompt - prompts)[:, None] + columns
    own = np.take_along_axis(texts.tokens[order], np.minimum(stored, settings.lengths.total - 1), 1)

    def filled(values: NDArray[np.int64], padding: NDArray[np.int64]) -> NDArray[np.int64]:
        out = padding.copy()
        out[places[is_token]] = np.broadcast_to(values, places.shape)[is_token]
        return out.reshape(shape)

    nothing = np.full(each.tokens, -1)
    # positions of padding go on, as if one sequence filled the row
    positions = filled(columns, np.tile(np.arange(each.width), len(each.rows)))
    numbers = None
    if attended is None:
        own_number = filled(np.where(in_prompt, prompt[:, None], number[:, None]), nothing)
        numbers = np.stack([own_number, filled(prompt[:, None], nothing)])
    longest = int(responses.max())
    scored = np.flatnonzero(np.arange(longest) < responses[:, None])

    device = batch.rows.device

    def on_device(values: NDArray[np.int64]) -> Tensor:
        return copied_to(device, torch.from_numpy(values), settings.pins)

    expert_places = None
    if Column.EXPERTS in batch.columns:
        # of sequences that share tokens, the first one's; the last token of a sequence was never read
        read = (columns < length[:, None] - 1)[::-1]
        of_batch = (stored + np.arange(len(order))[:, None] * settings.lengths.total)[::-1][read]
        whole = nothing.copy()
        whole[places[::-1][read]] = of_batch
        expert_places = on_device(whole.reshape(shape))

    part = None
    if settings.split is not None:
        before = np.minimum(np.maximum(prompts[:, None] - 1 + np.arange(longest), 0), len(columns) - 1)
        predicting = np.take_along_axis(places, before, 1).flatten()[scored]
        split = settings.split
        mine, at, counted = split.part(each.width, predicting)
        part = RowPart(on_device(mine), on_device(at), on_device(counted), split.ranks)
    rows = on_device(order)
    return MicroBatch(
        batch=batch.select(rows),
        order=rows,
        tokens=on_device(filled(own, np.zeros_like(nothing))),
        position_ids=on_device(positions),
        attended=attended,
        numbers=None if numbers is None else on_device(numbers),
        mask_dtype=settings.dtype if settings.packs else None,
        places=on_device(places),
        prompt_lengths=on_device(prompts),
        text_lengths=on_device(length),
        scored=on_device(scored),
        shortest_prompt=int(prompts.min()),
        longest_response=longest,
        num_texts=num_texts,
        expert_places=expert_places,
        part=part,
    )
