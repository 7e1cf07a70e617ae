"""A coordinate search for the few constants of a fit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def descend(
    loss: Callable[[Mapping[Name, float]], float], start: Mapping[Name, float], rounds: int = 30, step: float = 0.25
) -> dict[Name, float]:
    """Return positive constants with a smaller ``loss``: each in turn is multiplied or divided by a shrinking step."""
    values, steps = dict(start), dict.fromkeys(start, step)
    least = loss(values)
    for _ in range(rounds):
        for name in values:
            tried = [values | {name: values[name] * factor} for factor in (1 + steps[name], 1 / (1 + steps[name]))]
            found, best = min(((loss(each), each) for each in tried), key=lambda pair: pair[0])
            if found < least:
                least, values = found, best
            else:
                steps[name] *= 0.55
    return values


def mean_and_square(errors: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Return the mean of relative errors plus a little of their squares: outliers count somewhat more."""
    weights = weights or [1.0] * len(errors)
    return sum(weight * (error + 0.1 * error * error) for error, weight in zip(errors, weights, strict=True)) / sum(
        weights
    )
