"""The order in which training visits the examples."""

from __future__ import annotations

import random
from functools import lru_cache


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


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_examples: int) -> list[int]:
    order = list(range(num_examples))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
