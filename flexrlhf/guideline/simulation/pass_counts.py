"""Passes of a call, by the function with which engines lay texts out, from a sample of the texts' lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import gcd

from flexrlhf.guideline.costs.cost_model import MeanPass
from flexrlhf.memory.packed_rows import PackedPass, TextGroup, Unit, packed, units_of

MOST_TEXTS = 256
"""Texts that are laid out for a price; of more, passes are in proportion."""


@dataclass(frozen=True)
class TextLayout:
    """Settings by which an engine lays texts out (``engines/micro_batch.py``).

    budget:    computed tokens of a pass
    packs:     whether several texts are in a row
    shares:    whether samples of a prompt share a copy of it
    compares:  whether all texts of a prompt are in one pass, because a loss compares them
    """

    budget: int
    packs: bool
    shares: bool
    compares: bool = False

    def passes(self, groups: Sequence[TextGroup]) -> tuple[PackedPass, ...]:
        """Return the passes over ``groups``, each of one prompt."""
        return self.passes_of(tuple(chain(*map(self.units, groups))))

    def units(self, group: TextGroup) -> tuple[Unit, ...]:
        """Return the texts of a prompt in units, each of which is in one pass."""
        return units_of(group, self.budget, self.packs and self.shares, self.compares)

    def passes_of(self, units: Sequence[Unit]) -> tuple[PackedPass, ...]:
        """Return the passes over ``units``."""
        return packed(tuple(units), self.budget, self.packs)


def text_groups(prompts: Sequence[float], responses: Sequence[float], count: int, samples: int) -> list[TextGroup]:
    """Return ``count`` prompts with ``samples`` responses each, whose lengths are spread over the given samples.

    As many prompts as there are lengths have each length once.
    """
    each_prompt, each_response = _spread(prompts, count), _spread(responses, count * samples)
    mixed = _mixed(each_response)
    return [
        TextGroup(prompt, tuple(mixed[index * samples : (index + 1) * samples]))
        for index, prompt in enumerate(each_prompt)
    ]


def _spread(lengths: Sequence[float], count: int) -> list[int]:
    """Return ``count`` lengths in whole tokens: the middles of equal shares of the sorted ``lengths``."""
    ordered = sorted(lengths)
    places = ((2 * index + 1) * len(ordered) // (2 * count) for index in range(count))
    return [max(1, round(ordered[place])) for place in places]


def _mixed(lengths: Sequence[int]) -> list[int]:
    """Return ``lengths`` in an order that has little to do with their size: every so many of them, a golden section."""
    total = len(lengths)
    stride = next(step for step in range(max(1, round(0.618 * total)), 2 * total + 1) if gcd(step, total) == 1)
    return [lengths[index * stride % total] for index in range(total)]


@lru_cache(maxsize=4096)
def mean_pass(
    prompts: tuple[float, ...], responses: tuple[float, ...], count: int, samples: int, layout: TextLayout
) -> MeanPass:
    """Return the passes over ``count`` prompts with ``samples`` responses each, whose lengths are like the given ones.

    Where all have one length, in units of as many texts each, and of few texts, the number of passes is exact.
    """
    if len(set(prompts)) == len(set(responses)) == 1:
        units = layout.units(TextGroup(round(prompts[0]), (round(responses[0]),) * samples))
        if len(set(units)) == 1:
            return _of_equal_units(units[0], count * len(units), layout)
    most = max(1, min(count, MOST_TEXTS // samples))
    groups = text_groups(prompts, responses, most, samples)
    passes = layout.passes(groups)
    return _mean(passes, groups, count / most, layout.budget)


def _of_equal_units(unit: Unit, count: int, layout: TextLayout) -> MeanPass:
    """Return the passes over ``unit``, ``count`` times: full ones and the rest."""
    few = min(count, 1 + layout.budget // sum(group.tokens for group in unit))
    first = layout.passes_of([unit] * few)[0]
    at_once = len(first.units)
    full, rest = divmod(count, at_once)
    parts = [(full, _mean([first], unit * at_once))]
    if rest:
        parts.append((1, _mean(layout.passes_of([unit] * rest), unit * rest)))
    return all_passes(parts)


def _mean(passes: Sequence[PackedPass], groups: Sequence[TextGroup], scale: float = 1.0, budget: int = 0) -> MeanPass:
    """Return the mean of ``passes`` over ``groups``, or of those over ``scale`` times as many texts: these are as full
    as all but the last, and where there is but one, as ``budget`` allows."""
    tokens = sum(each.tokens for each in passes)
    pairs = sum(each.tokens * each.width for each in passes)
    answered = sum(sum(group.responses) for group in groups)
    real = answered + sum(len(group.responses) * group.prompt for group in groups)
    count: float = len(passes)
    if scale > 1:
        full = [each.tokens for each in passes[:-1]] or [max(tokens, budget)]
        count = max(1.0, scale * tokens / (sum(full) / len(full)))
    width = pairs / tokens
    return MeanPass(
        count=count,
        rows=scale * tokens / count / width,
        width=width,
        responses=scale * answered / count,
        texts=scale * real,
    )


def all_passes(parts: Iterable[tuple[float, MeanPass]]) -> MeanPass:
    """Return the passes of several mini-batches as one, each so many times."""
    counted = list(parts)
    count = sum(times * each.count for times, each in counted)
    tokens = sum(times * each.tokens for times, each in counted)
    width = sum(times * each.tokens * each.width for times, each in counted) / tokens
    return MeanPass(
        count=count,
        rows=tokens / count / width,
        width=width,
        responses=sum(times * each.count * each.responses for times, each in counted) / count,
        texts=sum(times * each.texts for times, each in counted),
    )
