"""The order in which training visits the examples."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm

from flexrlhf.errors import UserError

MAX_BLOCK = 100_000
"""Most prompts after which each of several sources has had its share exactly."""


@dataclass(frozen=True)
class SourceShare:
    """Part of the examples that come from one source.

    num_examples:  of the source; the examples of several sources follow one another
    parts:         share of the prompts, in parts of the sum over the sources
    """

    num_examples: int
    parts: int = 1

    @staticmethod
    def whole_parts(weights: Sequence[Fraction]) -> list[int]:
        """Return weights as the smallest whole numbers in the same proportion. Raises UserError for large ones."""
        total = sum(weights)
        shares = [weight / total for weight in weights]
        block = lcm(*(share.denominator for share in shares))
        if block > MAX_BLOCK:
            # a weight may have hundreds of digits
            parts = f"1/{block}" if block < 10**15 else f"less than 1/{10**15}"
            raise UserError(
                f"data.sources: weights {', '.join(f'{float(weight):g}' for weight in weights)} are parts of {parts} "
                f"of the prompts, finer than 1/{MAX_BLOCK}; use rounder numbers such as 0.7 and 0.3"
            )
        return [int(share * block) for share in shares]


@dataclass(frozen=True)
class DataOrder:
    """Order of the examples of a run.

    The endless sequence of prompts consists of blocks in which each source has as many as it has parts, in an order of
    the block's own; which example of a source comes next is as in ``step_indices``. With one source they are the same.
    """

    seed: int
    shares: Sequence[SourceShare]

    def indices(self, step: int, num_prompts: int) -> list[int]:
        """Return the example indices of ``step``, of several sources by their shares: a pure function of its
        arguments."""
        seed, shares = self.seed, self.shares
        if len(shares) == 1:
            return step_indices(seed, step, num_prompts, shares[0].num_examples)
        starts = [sum(share.num_examples for share in shares[:index]) for index in range(len(shares))]
        return [
            starts[source] + _example(f"{seed}/source {source}", position, shares[source].num_examples)
            for source, position in _source_positions(seed, step * num_prompts, num_prompts, shares)
        ]


def _source_positions(seed: int, first: int, number: int, shares: Sequence[SourceShare]) -> list[tuple[int, int]]:
    """Return the source of each of ``number`` prompts from ``first`` on, and its place within that source."""
    parts = tuple(share.parts for share in shares)
    size = sum(parts)
    found: list[tuple[int, int]] = []
    for block in range(first // size, (first + number - 1) // size + 1):
        taken = [block * share for share in parts]
        for place, source in enumerate(_block(seed, block, parts), start=block * size):
            if first <= place < first + number:
                found.append((source, taken[source]))
            taken[source] += 1
    return found


def _example(seed: str, position: int, num_examples: int) -> int:
    epoch, place = divmod(position, num_examples)
    return _permutation(seed, epoch, num_examples)[place]


@lru_cache(maxsize=4)
def _block(seed: int, block: int, parts: tuple[int, ...]) -> list[int]:
    """Return the sources of one block of prompts in a random order."""
    sources = [source for source, count in enumerate(parts) for _ in range(count)]
    random.Random(f"{seed}/block {block}").shuffle(sources)
    return sources


def step_indices(seed: int, step: int, num_prompts: int, num_examples: int) -> list[int]:
    """Return the ``num_prompts`` example indices of ``step``, a pure function of its arguments.

    Step ``s`` takes positions ``s * num_prompts`` onwards of an endless sequence: epoch after epoch, each its own
    permutation of ``range(num_examples)``. A resumed run therefore needs nothing but the step number.
    """
    first = step * num_prompts
    last = first + num_prompts - 1
    order: list[int] = []
    for epoch in range(first // num_examples, last // num_examples + 1):
        start = epoch * num_examples
        order += _permutation(seed, epoch, num_examples)[max(first - start, 0) : last + 1 - start]
    return order


@lru_cache(maxsize=64)
def _permutation(seed: int | str, epoch: int, num_examples: int) -> list[int]:
    order = list(range(num_examples))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
