"""Layout of sequences in the rows of forward and training passes, so that few computed tokens are padding.

A row has several sequences, one behind the other, which do not attend to each other; sequences with the same prompt
share one copy of it. Engines lay tensors out by it, and the cost model counts the tokens that will be computed.

Attention that takes the lengths of sequences costs the same in any row, so a pass is one row. Under a mask it computes
all pairs of a row's tokens: then rows are not much wider than the longest sequence.

Before lengths are known, the largest pass is bounded: it has as many computed tokens as its budget allows, or one
sequence where this alone is more, all sequences of a prompt where a loss compares them; its rows are no wider than the
widest that is tried for its longest sequence.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import ClassVar, NamedTuple

from flexrlhf.config.model_families import Families
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.model_shape import ModelShape

BY_LENGTHS = ("auto", "flash_attention_2")
"""Values of ``attention`` that take the lengths of sequences in a row, in families that are packed."""
PACKED_ATTENTION = (*BY_LENGTHS, "sdpa", "eager")
"""Values of ``attention`` that compute several sequences in a row: by their lengths, or under a mask as numbers."""
EQUAL_WIDTH = 4096
"""Width at which attention over a row under a mask is taken to cost as much as all else: 6 times hidden size 683."""
PASS_COST = 64
"""Tokens that cost about as much as one more pass."""
WIDTHS = (1.0, 1.15, 1.4, 2.0, 3.0)
"""Widths of a row that are tried, over its longest sequence."""
SMALLEST_PASS = 1024
"""Tokens of a pass of rows with one sequence each, below which more padding is cheaper than another pass."""
MOST_PADDING = 1.15
"""Length of the longest of such rows over that of the shortest, above which another pass begins."""


@dataclass(frozen=True)
class TextGroup:
    """Sequences in one row that share one copy of their prompt.

    prompt:     tokens of the prompt.
    responses:  tokens of each response.
    """

    prompt: int
    responses: tuple[int, ...]

    @cached_property
    def tokens(self) -> int:
        """Tokens of the prompt and all responses."""
        return self.prompt + sum(self.responses)

    @cached_property
    def pairs(self) -> int:
        """Pairs of tokens over which causal attention reaches, both of a pair that it reads in one direction."""
        shared = 2 * self.prompt * sum(self.responses)
        return self.prompt**2 + shared + sum(response**2 for response in self.responses)

    @property
    def apart(self) -> tuple[TextGroup, ...]:
        """The same sequences, each with a copy of the prompt."""
        return tuple(TextGroup(self.prompt, (response,)) for response in self.responses)

    def units(self, budget: int, shares: bool, compares: bool, masks: bool = True) -> tuple[Unit, ...]:
        """Return the sequences of a prompt in units, in order.

        shares:    whether several sequences may share a copy of the prompt, as far as ``budget`` has room for them.
        compares:  whether all sequences are in one pass.
        masks:     whether attention over a row is computed under a mask.
        """
        return TextGroup.as_units(shared(self, budget, masks) if shares else self.apart, compares)

    @staticmethod
    def as_units(groups: tuple[TextGroup, ...], compares: bool) -> tuple[Unit, ...]:
        """Return ``groups`` as one unit if ``compares``, else each as one."""
        return (groups,) if compares else tuple((group,) for group in groups)


Unit = tuple[TextGroup, ...]
"""Groups of sequences that are in one pass."""


class Place(NamedTuple):
    """A group of sequences: ``unit`` among the packed units, ``group`` in its unit."""

    unit: int
    group: int


@dataclass(frozen=True)
class PackedPass:
    """Rows of one pass.

    rows:   groups of each row, one behind the other.
    width:  tokens of a row, at least as many as its groups have; the rest is padding.
    """

    rows: tuple[tuple[Place, ...], ...]
    width: int

    @property
    def tokens(self) -> int:
        """Computed tokens."""
        return len(self.rows) * self.width

    @property
    def units(self) -> tuple[int, ...]:
        """Units in the pass, in order."""
        return tuple(sorted({place.unit for row in self.rows for place in row}))

    # a rank's models, and epochs, compute the same mini-batches: the layout of each is decided once
    @staticmethod
    @lru_cache(maxsize=64)
    def all_of(
        units: tuple[Unit, ...], budget: int, together: bool = True, masks: bool = True
    ) -> tuple[PackedPass, ...]:
        """Return passes of at most ``budget`` computed tokens, each of at least one unit. A unit is in one pass.

        together:  whether several groups may be in one row.
        masks:     whether attention over a row is computed under a mask.

        Deterministic, so all ranks of a tensor-parallel group agree.
        """
        order = sorted(range(len(units)), key=lambda unit: -_longest(units[unit]))
        passes: list[PackedPass] = []
        while order:
            if together:
                longest = _longest(units[order[0]])
                widths = dict.fromkeys(ceil(longest * factor) for factor in WIDTHS)
                fits = [width for width in widths if width <= max(budget, longest)] if masks else [max(budget, longest)]
                fillings = [_filled(units, order, width, budget) for width in fits]
                # one unit may be above the budget: wider rows would add to it
                most = max(budget, fillings[0].tokens)
                best = min((each for each in fillings if each.tokens <= most), key=_Filling.cost)
            else:
                best = _apart(units, order, budget)
            passes.append(best.as_pass())
            taken = set(best.units)
            order = [unit for unit in order if unit not in taken]
        return tuple(passes)


def shared(group: TextGroup, budget: int, masks: bool = True) -> tuple[TextGroup, ...]:
    """Return ``group`` in as many copies of its prompt as cost least: attention over a long row under a mask is not
    free.

    No row is above ``budget`` tokens, unless the longest sequence alone is: none is longer than that then.
    """
    cost = _row_cost if masks else float
    number, most = len(group.responses), max(budget, group.prompt + max(group.responses))
    candidates = [_copies(group, count) for count in range(1, number + 1)]
    return min(candidates, key=lambda parts: (_longest(parts) > most, sum(cost(part.tokens) for part in parts)))


def _copies(group: TextGroup, count: int) -> tuple[TextGroup, ...]:
    each = ceil(len(group.responses) / count)
    starts = range(0, len(group.responses), each)
    return tuple(TextGroup(group.prompt, group.responses[start : start + each]) for start in starts)


def _row_cost(width: int) -> float:
    """Return the cost of a row in tokens of a short one."""
    return width * (1 + width / EQUAL_WIDTH)


def _longest(unit: Sequence[TextGroup]) -> int:
    return max(group.tokens for group in unit)


class _Filling:
    """Rows of a pass while groups are placed in them. ``free``: (tokens left, row), ascending."""

    def __init__(self, width: int) -> None:
        self.width = max(1, width)
        self.rows: list[list[Place]] = []
        self.units: list[int] = []
        self.real = 0
        self.free: list[tuple[int, int]] = []

    def add(self, number: int, unit: Sequence[TextGroup], most_rows: int) -> bool:
        """Place the groups of a unit in the fullest rows that have room; without effect where there is too little."""
        if len(unit) == 1:
            return self._add_alone(number, unit[0].tokens, most_rows)
        free, new, places = list(self.free), 0, []
        for index in sorted(range(len(unit)), key=lambda index: -unit[index].tokens):
            tokens = unit[index].tokens
            at = bisect_left(free, (tokens, 0))
            if at == len(free):
                if self.rows and len(self.rows) + new >= most_rows:
                    return False
                insort(free, (self.width, len(self.rows) + new))
                at, new = bisect_left(free, (self.width, len(self.rows) + new)), new + 1
            left, row = free.pop(at)
            insort(free, (left - tokens, row))
            places.append((row, Place(number, index)))
        self.rows.extend([] for _ in range(new))
        for row, place in places:
            self.rows[row].append(place)
        self.free = free
        self.units.append(number)
        self.real += sum(group.tokens for group in unit)
        return True

    def _add_alone(self, number: int, tokens: int, most_rows: int) -> bool:
        """Do the same for a unit of one group, of which nothing is undone."""
        at = bisect_left(self.free, (tokens, 0))
        if at < len(self.free):
            left, row = self.free.pop(at)
        elif self.rows and len(self.rows) >= most_rows:
            return False
        else:
            left, row = self.width, len(self.rows)
            self.rows.append([])
        insort(self.free, (left - tokens, row))
        self.rows[row].append(Place(number, 0))
        self.units.append(number)
        self.real += tokens
        return True

    @property
    def tokens(self) -> int:
        """Computed tokens."""
        return len(self.rows) * self.width

    def cost(self) -> float:
        """Return the cost of a real token."""
        return (PASS_COST + len(self.rows) * _row_cost(self.width)) / max(1, self.real)

    def as_pass(self) -> PackedPass:
        """Return the rows, as wide as the fullest of them."""
        width = self.width - min(left for left, _ in self.free)
        return PackedPass(tuple(tuple(row) for row in self.rows), max(1, width))


def _filled(units: Sequence[Sequence[TextGroup]], order: Sequence[int], width: int, budget: int) -> _Filling:
    """Return a pass of rows of ``width`` tokens with as many of the units as there is room for, the longest first."""
    filling, most_rows, least = _Filling(width), max(1, budget // max(1, width)), _longest(units[order[-1]])
    for number in order:
        # the room that is left is too little for any other unit
        if len(filling.rows) >= most_rows and filling.free[-1][0] < least:
            break
        filling.add(number, units[number], most_rows)
    return filling


def _apart(units: Sequence[Sequence[TextGroup]], order: Sequence[int], budget: int) -> _Filling:
    """Return a pass of rows with one group each, of about the same length."""
    filling = _Filling(_longest(units[order[0]]))
    for number in order:
        unit = units[number]
        tokens = (len(filling.rows) + len(unit)) * filling.width
        is_shorter = filling.width > MOST_PADDING * _longest(unit) and tokens > SMALLEST_PASS
        if filling.rows and (tokens > budget or is_shorter):
            break
        for index, group in enumerate(unit):
            filling.rows.append([Place(number, index)])
            filling.free.append((filling.width - group.tokens, len(filling.rows)))
        filling.real += sum(group.tokens for group in unit)
        filling.units.append(number)
    return filling


@dataclass(frozen=True)
class PassSize:
    """Bounds of a forward or training pass.

    tokens:     computed tokens: rows times their width.
    width:      tokens of a row.
    responses:  tokens of responses, whose log-probs are computed.
    packed:     whether rows have several sequences.
    masks:      whether attention reads a mask.
    total:      computed tokens of all passes of the call; None: any number.
    """

    tokens: int
    width: int
    responses: int
    packed: bool
    masks: bool = True
    total: int | None = None

    def in_flight(self, passes: int, texts: int = 1) -> int:
        """Return the tokens of at most so many passes of calls with ``texts`` sequences a row."""
        several = passes * self.tokens
        return several if self.total is None else max(self.tokens, min(several, texts * self.total))

    def or_larger(self, other: PassSize) -> PassSize:
        """Return bounds of both."""
        total = None if self.total is None or other.total is None else max(self.total, other.total)
        sizes = max(self.tokens, other.tokens), max(self.width, other.width), max(self.responses, other.responses)
        return PassSize(*sizes, self.packed, self.masks, total)

    def of_part(self, parts: int) -> PassSize:
        """Return the size on one of so many ranks that each have a part of the tokens of every row."""
        if parts == 1:
            return self
        tokens = -(-self.tokens // parts)
        total = None if self.total is None else -(-self.total // parts)
        return replace(self, tokens=tokens, responses=min(self.responses, tokens), total=total)


@dataclass(frozen=True)
class TextPacking:
    """Layout of a model's sequences in the rows of its passes.

    in_slots:  whether transformers decodes rows in slots (engines/slots.py).
    packs:     whether forward and training passes have several sequences in a row.
    masks:     whether attention in them reads a mask.
    """

    in_slots: bool
    packs: bool
    masks: bool

    FAMILIES: ClassVar = frozenset(Families.LLAMA_LIKE + Families.WITH_EXPERTS)
    """Model types whose attention in transformers takes any mask, where no window restricts it."""

    @classmethod
    def of(cls, model: PlacedModel, shape: ModelShape | None, longest: int) -> TextPacking:
        """Return how ``model`` packs. ``longest``: tokens of a sequence."""
        settings, facts = model.settings, model.facts
        if shape is None or shape.sizes is None:
            return cls(in_slots=False, packs=False, masks=True)
        of_model = shape.sizes.family, settings.attention, shape.window, longest
        found = cls.of_family(*of_model, packs=settings.pack_texts)
        return found if facts.transformers_modules else replace(found, masks=False)

    @classmethod
    def of_family(cls, model_type: str, attention: str, window: int | None, longest: int, packs: bool) -> TextPacking:
        """Return how a model of transformers packs.

        window:   of sliding attention.
        longest:  tokens of a sequence.
        packs:    whether it is to pack where its attention can.
        """
        fits = window is None or window >= longest
        in_slots = model_type in cls.FAMILIES and attention in PACKED_ATTENTION and fits
        return cls(in_slots, packs and in_slots, masks=not (cls.has_lengths(model_type, attention) and in_slots))

    @classmethod
    def has_lengths(cls, model_type: str, attention: str) -> bool:
        """Whether a model has attention by the lengths of sequences, where no window restricts it."""
        return model_type in cls.FAMILIES and attention in BY_LENGTHS


@lru_cache(maxsize=4096)
def largest_pass(
    prompt: int,
    response: int,
    samples: int,
    budget: int,
    rows: int | None,
    packs: bool,
    shares: bool,
    compares: bool = False,
    block: int | None = None,
    masks: bool = True,
) -> PassSize:
    """Return bounds of a pass of ``budget`` tokens.

    prompt, response:  tokens at most.
    samples:           sequences of a prompt.
    rows:              sequences of the call; None: any number.
    packs:             whether several sequences are in a row.
    shares:            whether samples of a prompt then share a copy of it.
    compares:          whether all sequences of a prompt are in one pass, because a loss compares them.
    block:             most sequences of which a pass is composed; None: those of the call.
    masks:             whether attention over a row is computed under a mask.
    """
    whole = TextGroup(prompt, (response,) * samples)
    shares = packs and shares
    units = whole.units(budget, shares, compares, masks)
    rows_of_prompt = [part for unit in units for part in unit]
    longest_row = max(part.tokens for part in rows_of_prompt)
    tokens = max(budget, longest_row * max(map(len, units)))
    # shorter samples may share one row where the longest are divided; a prompt has a token at least
    answered = min(samples * response, max(budget, longest_row) - 1) if shares else response
    responses = tokens - tokens // (1 + answered)
    total = None
    if rows is not None:
        total = max(1, rows // samples) * len(rows_of_prompt) * longest_row
        prompts = max(1, min(rows, rows if block is None else block) // samples)
        tokens = min(tokens, prompts * len(rows_of_prompt) * longest_row)
        responses = min(responses, prompts * samples * response)
    if not packs:
        return PassSize(tokens, prompt + response, responses, packed=False, masks=masks, total=total)
    longest = whole.tokens if shares else prompt + response
    widest = min(ceil(WIDTHS[-1] * longest) if masks else tokens, max(budget, longest_row), tokens)
    return PassSize(tokens, max(widest, prompt + response), responses, packed=True, masks=masks, total=total)
