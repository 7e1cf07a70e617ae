"""Passes of packed texts, by the function with which engines pack them, from a sample of the texts' lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import gcd

from flexrlhf.engines.packing import TextGroup, packed
from flexrlhf.guideline.costs.cost_model import PackedPasses

MOST_TEXTS = 2048
"""Texts that are packed for a price; of more, passes are in proportion."""


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
def packed_passes(
    prompts: tuple[float, ...], responses: tuple[float, ...], count: int, samples: int, budget: int, shares: bool
) -> PackedPasses:
    """Return the passes over ``count`` prompts with ``samples`` responses each, whose lengths are like the given ones.

    budget:  computed tokens of a pass, at most, where one prompt's texts are not more.
    shares:  whether the responses of a prompt share its tokens.
    """
    most = max(1, min(count, MOST_TEXTS // samples))
    groups = text_groups(prompts, responses, most, samples)
    passes = list(packed(groups, budget, shares))
    tokens = sum(each.rows * each.width for each in passes)
    pairs = sum(each.rows * each.width**2 for each in passes)
    answered = sum(sum(group.responses) for group in groups)
    real = sum(samples * group.prompt for group in groups) + answered
    width, scale = pairs / tokens, count / most
    return PackedPasses(
        count=scale * len(passes),
        rows=tokens / len(passes) / width,
        width=width,
        responses=answered / len(passes),
        texts=scale * real,
    )


def all_passes(parts: Iterable[tuple[float, PackedPasses]]) -> PackedPasses:
    """Return the passes of several mini-batches as one, each so many times."""
    counted = list(parts)
    count = sum(times * each.count for times, each in counted)
    tokens = sum(times * each.tokens for times, each in counted)
    width = sum(times * each.tokens * each.width for times, each in counted) / tokens
    return PackedPasses(
        count=count,
        rows=tokens / count / width,
        width=width,
        responses=sum(times * each.count * each.responses for times, each in counted) / count,
        texts=sum(times * each.texts for times, each in counted),
    )
