"""Slots of one KV cache in which rows are decoded: a slot takes a new row when its row has ended.

The tokens of a row are in the first columns of its slot, so rows of any lengths are decoded in the same pass, and a new
row copies nothing of the others. Live rows are in the first slots: a row that ends leaves its slot to the last one.
Passes have as many rows as a few sizes allow, since kernels compute 9 rows as long as 16.

A row that may go on leaves its keys and values in its slot, behind the live ones, until another row needs it: when the
row comes again, a pass reads what its context has in addition. With a slot for every row under way that is so from step
to step, also at new weights (``rollout.caches: kept``).

Of a prompt, a pass of its own reads all tokens but the last (prefill); the last one is read with the other rows' newest
tokens. Attention over slots takes no mask where all rows have the same length, and keys and values are not repeated
for the heads that share them, but of prompts on GPUs without flash attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, PreTrainedModel

from flexrlhf.engines.attended_spans import has_flash
from flexrlhf.engines.decoding_graphs import DecodingGraphs
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.engines.router_replay import Routers
from flexrlhf.engines.waves import last_logits
from flexrlhf.memory.packed_rows import PackedPass, TextGroup

ATTENTION = "flexrlhf slots"
"""Name of the attention function among those of transformers; it has no function that makes masks, so none is made."""
GRAPH_COLUMNS = 512
"""Multiple of the columns that attention reads in CUDA graphs, of which each width has one."""


def rows_of_pass(live: int, slots: int) -> int:
    """Return the rows of a decoding pass of ``live`` rows: a power of two up to 16, then a multiple of 8."""
    rows = 1 << (live - 1).bit_length() if live <= 16 else -(-live // 8) * 8
    return min(slots, rows)


class SlotCache(Cache):
    """Keys and values of all layers, (slots, heads, columns, features) each.

    A pass writes its tokens to ``slots`` (m,), from column 0 on, or to ``columns`` (m, tokens) of them; attention then
    reads the first ``width`` columns.

    texts:  int64 (slots, columns), tokens whose keys and values are there; None: they are not noted.
    """

    def __init__(self, slots: int, columns: int, texts: Tensor | None) -> None:
        super().__init__(layers=[])
        self.size, self.columns, self.texts = slots, columns, texts
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._experts: Tensor | None = None
        self._slots = torch.zeros(0, dtype=torch.int64)
        self._written: Tensor | None = None
        self._read: slice | Tensor = slice(0)
        self._width = 0

    def write_prompts(self, slots: Tensor) -> None:
        """Let the next pass write whole sequences to ``slots`` (m,); they attend to themselves."""
        self._slots, self._written = slots, None

    def write_tokens(self, slots: Tensor | None, columns: Tensor, width: int) -> None:
        """Let the next pass write to ``columns`` (m, tokens) of ``slots`` (m,); None: of the first ones."""
        self._written, self._width = columns, width
        self._slots = torch.arange(len(columns), device=columns.device) if slots is None else slots
        self._read = slice(len(columns)) if slots is None else slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (m, heads, tokens, features) of a layer; return all that the pass attends to."""
        if layer_idx == len(self._layers):
            self._layers.append((self._space(key_states), self._space(value_states)))
        pair = self._layers[layer_idx]
        if self._written is None:
            for space, new in zip(pair, (key_states, value_states), strict=True):
                space[self._slots, :, : new.shape[2]] = new
            return key_states, value_states
        for space, new in zip(pair, (key_states, value_states), strict=True):
            space[self._slots[:, None], :, self._written] = new.transpose(1, 2)
        keys, values = (space[self._read, :, : self._width] for space in pair)
        return keys, values

    def write_experts(self, experts: Tensor) -> None:
        """Write the experts (m, tokens, layers, k) of the tokens of the last pass."""
        if self._experts is None:
            self._experts = experts.new_zeros(self.size, self.columns, *experts.shape[2:])
        if self._written is None:
            self._experts[self._slots, : experts.shape[1]] = experts
        else:
            self._experts[self._slots[:, None], self._written] = experts

    def experts(self, slots: Tensor) -> Tensor:
        """Return the experts (m, columns, layers, k) of the tokens in ``slots`` (m,)."""
        assert self._experts is not None, "passes have recorded them"
        return self._experts[slots]

    def _space(self, like: Tensor) -> Tensor:
        # zeros, since a column of no weight must still be a number
        return like.new_zeros(self.size, like.shape[1], self.columns, like.shape[3])

    def copy_slots(self, sources: Tensor, targets: Tensor, columns: int) -> None:
        """Copy the first ``columns`` of the slots ``sources`` (m,) to ``targets`` (m,), all at once."""
        for space in chain.from_iterable(self._layers):
            space[targets, :, :columns] = space[sources, :, :columns]
        if self.texts is not None:
            self.texts[targets, :columns] = self.texts[sources, :columns]
        if self._experts is not None:
            self._experts[targets, :columns] = self._experts[sources, :columns]


class RowKey(NamedTuple):
    """Identity of a row, however often it comes.

    step, row:  of its noise.
    is_greedy:  whether it is a greedy response, of which a prompt may have one next to sampled ones.
    """

    step: int
    row: int
    is_greedy: bool


class Slots:
    """Rows that are decoded together, at most ``size``, with at most ``columns`` tokens each.

    settings: by which passes are laid out.
    routers:  of the model, whose experts are recorded; None: none are.
    keeps:    whether rows that were removed keep their slots as long as no other row needs them.
    lengths:  tokens in the cache of each live row, as the host counts them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        size: int,
        columns: int,
        settings: PassSettings,
        device: torch.device,
        routers: Routers | None = None,
        keeps: bool = False,
    ) -> None:
        self._model, self._budget, self._dtype = model, settings.budget, settings.dtype
        self._routers = routers
        self._device = device
        # kernels would copy a mask of any other width
        columns = -(-columns // 8) * 8
        self.keeps = keeps
        texts = torch.zeros(size, columns, dtype=torch.int64, device=device) if keeps else None
        self._cache = SlotCache(size, columns, texts)
        self.size, self.lengths = size, list[int]()
        # of live rows, and of rows that have left: the slot, and the tokens in its cache
        self._keys, self._kept = list[RowKey](), dict[RowKey, tuple[int, int]]()
        self._tokens = self._positions = torch.zeros(0, dtype=torch.int64, device=self._device)
        # inputs of passes, at the same addresses in all of them
        self._tokens_read, self._columns = torch.zeros(2, size, dtype=torch.int64, device=self._device)
        self._has_graphs, self._has_room = settings.graphs, False
        self._graphs = DecodingGraphs() if settings.graphs else None

    def begin_call(self, oldest: int) -> None:
        """Begin a call that goes on with rows of calls before, for all of which there is room: of the ones whose noise
        is of the step ``oldest`` or later. No row is live."""
        self._kept = {key: kept for key, kept in self._kept.items() if key.step >= oldest}
        # weights may be elsewhere
        self._graphs, self._has_room = DecodingGraphs() if self._has_graphs else None, True

    def add(
        self, tokens: Tensor, lengths: Sequence[int], sources: Sequence[int], keys: Sequence[RowKey]
    ) -> Iterator[bool]:
        """Put prompts into the next free slots; yield True before each model call.

        tokens:   int64 (m, w), padded behind their ends.
        lengths:  tokens of each prompt.
        sources:  the slot whose row has the same prompt, its own slot if none before it has.
        keys:     of the rows; one that was removed has the same key when it comes again.
        """
        first, read = len(self.lengths), [length - 1 for length in lengths]
        begun = self._begun(tokens, read, keys)
        new = [index for index, source in enumerate(sources) if source == first + index and read[index]]
        for is_begun in (False, True):
            rows = [index for index in new if (begun[index] > 0) == is_begun and begun[index] < read[index]]
            units = tuple((TextGroup(read[index] - begun[index], (0,)),) for index in rows)
            # a mask of a pass that continues is as large as one over a row of the budget's tokens
            budget = min(self._budget, 1 + self._budget**2 // self._cache.columns) if is_begun else self._budget
            for part in PackedPass.all_of(units, budget, together=False):
                yield True
                self._read([rows[unit] for unit in part.units], first, tokens, begun, read)
        copied = [index for index, source in enumerate(sources) if source != first + index and read[index]]
        if copied:
            held, empty = self._indices([[sources[index] for index in copied], [first + index for index in copied]])
            self._cache.copy_slots(held, empty, max(read[index] for index in copied))
        self.lengths.extend(read)
        self._keys.extend(keys)
        if self._cache.texts is not None:
            self._cache.texts[first : len(self.lengths), : tokens.shape[1]] = tokens
        at = self._indices(read)
        self._positions = torch.cat([self._positions, at])
        self._tokens = torch.cat([self._tokens, tokens.gather(1, at[:, None]).squeeze(1)])

    def _begun(self, tokens: Tensor, read: Sequence[int], keys: Sequence[RowKey]) -> list[int]:
        """Let rows that come again have their keys and values in the next free slots; return how many tokens of each.

        Rows that are kept there move to other slots, of which the ones that left last have some.
        """
        first, texts = len(self.lengths), self._cache.texts
        found = {index: self._kept.pop(key) for index, key in enumerate(keys) if key in self._kept}
        targets, kept = range(first, first + len(keys)), [*self._kept.items()]
        num_lost = max(0, len(kept) - (self.size - targets.stop))
        assert not (num_lost and self._has_room), "a row under way has no slot"
        self._kept = dict(kept[num_lost:])
        taken = {slot for slot, _ in self._kept.values()}
        free = [slot for slot in range(targets.stop, self.size) if slot not in taken]
        moves = {targets[index]: slot for index, (slot, _) in found.items()}
        longest = max((length for _, length in (*found.values(), *self._kept.values())), default=0)
        for key, (slot, length) in self._kept.items():
            if slot in targets:
                self._kept[key] = free.pop(), length
                moves[self._kept[key][0]] = slot
        moves = {target: source for target, source in moves.items() if target != source}
        if moves:
            empty, held = self._indices([list(moves), list(moves.values())])
            self._cache.copy_slots(held, empty, longest)
        begun = [0] * len(keys)
        if found and texts is not None:
            index, lengths = self._indices([[*found], [length for _, length in found.values()]])
            width = min(longest, tokens.shape[1])
            inside = torch.arange(width, device=self._device) < lengths[:, None]
            same = (texts[index + first, :width] == tokens[index, :width]) & inside
            for row, count in zip(found, same.long().cumprod(1).sum(1).tolist(), strict=True):
                begun[row] = min(count, read[row])
        return begun

    def _read(
        self, prompts: list[int], first: int, tokens: Tensor, begun: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Read tokens of ``prompts`` from ``begun`` on, of all or of none of them 0."""
        index, width = self._indices(prompts), max(lengths[prompt] - begun[prompt] for prompt in prompts)
        columns = torch.arange(width, device=self._device).expand(len(index), -1)
        if not begun[prompts[0]]:
            self._cache.write_prompts(index + first)
            self._call(tokens[index, :width], columns, None)
            return
        columns = columns + self._indices([begun[prompt] for prompt in prompts])[:, None]
        new = tokens[index].gather(1, columns.clamp(max=tokens.shape[1] - 1))
        # padding is behind all tokens, and overwritten before it is read
        columns = columns.clamp(max=self._cache.columns - 1)
        reach = self._width(max(lengths[prompt] for prompt in prompts) - 1)
        self._cache.write_tokens(index + first, columns, reach)
        self._call(new, columns, self._mask(columns, reach))

    def _indices(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def next_logits(self) -> Tensor:
        """Run the model on the newest token of every live row; return the logits (m, vocabulary) of the next one."""
        live, longest = len(self.lengths), min(max(self.lengths), self._cache.columns - 1)
        self._tokens_read[:live], self._columns[:live] = self._tokens, self._positions
        if self._cache.texts is not None:
            # slots of a pass without a live row are written as well: in a column that no kept row uses
            self._columns[live:] = self._cache.columns - 1
            at = self._columns.clamp(max=self._cache.columns - 1)
            self._cache.texts.scatter_(1, at[:, None], self._tokens_read[:, None])
        rows = rows_of_pass(live, self.size)
        if self._graphs is not None:
            rows = min(1 << (live - 1).bit_length(), self.size)
            return self._graphs.logits(self._decode, rows, self._width(longest, GRAPH_COLUMNS))[:live]
        if rows == live and min(self.lengths) == longest:
            return self._decode(rows, longest + 1, masks=False)
        return self._decode(rows, self._width(longest))[:live]

    def _width(self, longest: int, multiple: int | None = None) -> int:
        """Return the columns that attention reads; on a GPU each number of them has kernels of its own."""
        multiple = multiple or (8 if self._device.type == "cpu" else 64)
        return min(-(-(longest + 1) // multiple) * multiple, self._cache.columns)

    def _decode(self, rows: int, width: int, masks: bool = True) -> Tensor:
        """Return the logits of the first ``rows`` slots, live or not, with attention to ``width`` columns."""
        # an ended row may go on for a few tokens
        columns = self._columns[:rows, None].clamp(max=self._cache.columns - 1)
        self._cache.write_tokens(None, columns, width)
        return self._call(self._tokens_read[:rows, None], columns, self._mask(columns, width) if masks else None)

    def _mask(self, columns: Tensor, width: int) -> Tensor:
        """Return the mask (m, 1, tokens, width) of tokens in ``columns`` (m, tokens), which attend to all before."""
        behind = torch.arange(width, device=self._device) > columns[:, :, None]
        return torch.zeros_like(behind, dtype=self._dtype).masked_fill_(behind, -torch.inf)[:, None]

    def append(self, tokens: Tensor) -> None:
        """Give every live row its next token (m,)."""
        self._tokens, self._positions = tokens, self._positions + 1
        self.lengths = [length + 1 for length in self.lengths]

    def experts(self, slots: Sequence[int]) -> Tensor:
        """Return the experts (m, columns, layers, k) of the tokens of the rows in ``slots``."""
        return self._cache.experts(self._indices(slots))

    def remove(self, ended: Sequence[bool], read: Sequence[int]) -> list[int]:
        """Remove rows; return for each slot that is live from now on the one its row was in.

        read:  tokens of each row that has ended which were read before its end, where slots are kept.
        """
        left = [slot for slot, has_ended in enumerate(ended) if not has_ended]
        holes = [slot for slot, has_ended in enumerate(ended[: len(left)]) if has_ended]
        order = list(range(len(left)))
        if holes:
            moved = left[-len(holes) :]
            for hole, slot in zip(holes, moved, strict=True):
                order[hole] = slot
            # rows that are kept change places with live ones
            sources, targets = (moved, holes) if self._cache.texts is None else (moved + holes, holes + moved)
            longest = min(max(self.lengths[slot] for slot in sources), self._cache.columns)
            held, empty = self._indices([sources, targets])
            self._cache.copy_slots(held, empty, longest)
        if self._cache.texts is not None:
            places = dict(zip(holes, left[-len(holes) :], strict=True)) if holes else {}
            for slot in (slot for slot, has_ended in enumerate(ended) if has_ended):
                kept = places.get(slot, slot), min(read[slot], self._cache.columns - 1)
                self._kept[self._keys[slot]] = kept
        index = self._indices(order)
        self._tokens, self._positions = self._tokens[index], self._positions[index]
        self.lengths, self._keys = [self.lengths[slot] for slot in order], [self._keys[slot] for slot in order]
        return order

    def _call(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        call = partial(last_logits, self._model, tokens, positions, mask, self._cache)
        with _attention_over_slots(self._model):
            if self._routers is None:
                return call()
            logits, experts = self._routers.recorded(call)
            self._cache.write_experts(experts.unflatten(0, tokens.shape))
            return logits


@contextmanager
def _attention_over_slots(model: PreTrainedModel) -> Iterator[None]:
    config = model.config
    before, config._attn_implementation = config._attn_implementation, ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention (m, tokens, heads, features), as a function of transformers' attention interface.

    Of one token, the query heads that share keys are as many queries of one head.
    """
    rows, heads, tokens, features = query.shape
    shared = heads // key.shape[1]
    if tokens == 1:
        folded = query.reshape(rows, key.shape[1], shared, features)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(rows, 1, heads, -1), None
    if shared > 1 and query.is_cuda and not (attention_mask is None and has_flash(query)):
        # of torch's fused kernels flash attention alone takes grouped heads, and without one all scores are stored
        key, value, shared = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1), 1
    is_causal, grouped = attention_mask is None, shared > 1
    out = scaled_dot_product_attention(
        query, key, value, attention_mask, is_causal=is_causal, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)
