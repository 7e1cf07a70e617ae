"""Numbers that one step of training hands to the next: KL coefficient, running statistics of scores, multiplier.

A step uses what the steps before it have left, so chunks and placement change nothing. Each copy of the numbers follows
from sums over all rows, so all ranks hold the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from flexrlhf.config.algorithms import KlSpec, LagrangeSpec, PolicySpec, SafeRlhfSpec
from flexrlhf.metrics import Triple

State = dict[str, float]
LEAST_LOGARITHM = -20.0
"""Of a multiplier, so that one which fell for long can rise again."""
LARGEST_ERROR = 0.2
"""Of the measured KL, relative to the target, that changes the coefficient (Ziegler et al. 2019, section 2.2)."""


def first_state(spec: PolicySpec) -> State:
    """Before the first step."""
    coefficient = 0.0 if spec.kl is None else spec.kl.coefficient
    multiplier = {"lagrange": spec.lagrange.initial} if isinstance(spec, SafeRlhfSpec) else {}
    return {"kl_coefficient": coefficient, **multiplier, **_scores(0.0, 0.0, 0.0)}


def next_state(spec: PolicySpec, state: State, statistics: Mapping[str, Triple]) -> State:
    """After a step with ``statistics`` of its combine, summed over all its rows."""
    fresh = dict(state)
    if spec.kl is not None and "kl" in statistics:
        fresh["kl_coefficient"] = _adapted(spec.kl, state["kl_coefficient"], statistics["kl"])
    if "shaped_score" in statistics:
        fresh |= _merged(state, statistics["shaped_score"])
    if isinstance(spec, SafeRlhfSpec):
        fresh["lagrange"] = _ascended(spec.lagrange, state["lagrange"], statistics["cost"])
    return fresh


def _adapted(spec: KlSpec, coefficient: float, measured: Triple) -> float:
    answers, total, _ = measured
    if spec.target is None or not answers:
        return coefficient
    error = min(max(total / answers / spec.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * answers / spec.horizon)


def _ascended(spec: LagrangeSpec, multiplier: float, costs: Triple) -> float:
    """Never beyond what exp() can take: with a wild rate the largest multiplier comes at once."""
    answers, total, _ = costs
    if not answers:
        return multiplier
    logarithm = math.log(multiplier) + spec.learning_rate * multiplier * (total / answers - spec.limit)
    return math.exp(max(min(logarithm, math.log(spec.maximum)), LEAST_LOGARITHM))


def _merged(state: State, scores: Triple) -> State:
    """Running mean and deviation with a step's scores added (Chan et al. 1979)."""
    count, total, squares = scores
    if not count:
        return {}
    mean, before = total / count, state["score_count"]
    both = before + count
    spread = state["score_spread"] + max(squares - count * mean * mean, 0.0)
    spread += (mean - state["score_mean"]) ** 2 * before * count / both
    return _scores(both, state["score_mean"] + (mean - state["score_mean"]) * count / both, spread)


def _scores(count: float, mean: float, spread: float) -> State:
    """``spread``: sum of squared deviations. The deviation of equal scores, or of one alone, is taken for 1."""
    deviation = math.sqrt(spread / (count - 1)) if count > 1 and spread > 0 else 1.0
    return {"score_count": count, "score_mean": mean, "score_spread": spread, "score_deviation": deviation}
